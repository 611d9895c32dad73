//! What acknowledgements, released buffers and the end of the stream complete.

use super::QueuePair;
use super::receive::{ReceiveContext, ReceiveState};
use super::requester::{CompletionContext, Requester};
use super::state::{DrainState, RdmapState};
use super::transmitter::OpenMessage;
use crate::environment::QpEnv;
use crate::record::{FpduKind, FpduRecord, FpduRun};
use std::ops::Range;

impl QueuePair {
    /// The requester, and what its completions need of the queue pair.
    #[inline]
    pub(super) fn requester_with_context(&mut self) -> (&mut Requester, CompletionContext<'_>) {
        let context = CompletionContext {
            attr: &self.attr,
            errors: &self.errors,
        };
        (&mut self.requester, context)
    }

    /// The receive state, and what its completions need of the queue pair.
    #[inline]
    pub(super) fn receive_with_context(&mut self) -> (&mut ReceiveState, ReceiveContext<'_>) {
        let context = ReceiveContext {
            attr: &self.attr,
            errors: &self.errors,
        };
        (&mut self.receive, context)
    }

    /// TCP got every byte of this record acknowledged. Records come back in the order in which they
    /// were handed out; behind the last, call [`complete_acked`](Self::complete_acked).
    #[inline]
    pub fn on_record_acked(&mut self, record: &FpduRecord) {
        if !record.is_last {
            return;
        }
        match record.kind {
            FpduKind::Request | FpduKind::Immediate => {
                self.requester.on_acked(record.slot, record.kind);
            }
            FpduKind::Response => self.responder.on_acked(record.slot),
            FpduKind::Rtr | FpduKind::Terminate => {}
        }
    }

    /// [`on_record_acked`](Self::on_record_acked) for the FPDUs of a run with these numbers.
    #[inline]
    pub fn on_fpdus_acked(&mut self, run: &FpduRun, units: Range<u16>) {
        if run.count() == 1 {
            self.on_record_acked(&run.get(0));
        } else if run.ends_messages() {
            let count = units.end - units.start;
            let slot = run.get(units.start).slot;
            self.requester.on_messages_acked(slot, count);
        }
    }

    /// Completes the requests whose records [`on_record_acked`](Self::on_record_acked) got.
    #[inline]
    pub fn complete_acked<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_ready(env);
    }

    /// Completes what only waited for a port to release buffers: see
    /// [`QpEnv::is_released`](crate::QpEnv::is_released).
    pub fn poll_releases<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_ready(env);
    }

    /// Completes what waited until no other worker uses a key any more: the queue pair asked for it by
    /// [`QpEnv::await_quiescence`]. True: something still waits. Else call
    /// [`receive_in_order`](Self::receive_in_order) and [`next_record`](Self::next_record) again.
    pub fn poll_quiescence<E: QpEnv>(&mut self, env: &mut E) -> bool {
        let (requester, mut context) = self.requester_with_context();
        let is_sending = requester.poll_quiescence(env, &mut context);
        let (receive, context) = self.receive_with_context();
        let is_receiving = receive.poll_quiescence(env, &context);
        self.complete_ready(env);
        is_sending || is_receiving
    }

    /// [`receive_in_order`](Self::receive_in_order) takes nothing until
    /// [`poll_quiescence`](Self::poll_quiescence) has delivered a Send.
    #[inline]
    pub fn is_delivery_delayed(&self) -> bool {
        self.receive.is_delivery_delayed()
    }

    /// Completes the work requests at the front of the send queue that are finished.
    #[inline]
    pub(super) fn complete_ready<E: QpEnv>(&mut self, env: &mut E) {
        let (requester, mut context) = self.requester_with_context();
        requester.complete_ready(env, &mut context);
        if self.requester.drain == DrainState::Draining {
            self.check_drained(env);
        }
    }

    /// Flushes what is in the queues, still or anew, as far as the budget of one turn reaches: see
    /// [`has_unflushed`](Self::has_unflushed). Call it on a doorbell in ERROR or after the stream was
    /// closed; does nothing in other states.
    ///
    /// After a clean close, and after the end of the stream of a paired one, the queue pair is IDLE, but
    /// its consumer may not have known that yet when it posted to the send queue: such a work request is
    /// flushed too, and the queue pair goes to ERROR, as if it had been posted before the end. Receive
    /// work requests wait for the next connection.
    pub fn flush_queues<E: QpEnv>(&mut self, env: &mut E) {
        let is_closed = self.state == RdmapState::Idle && self.was_closed;
        if is_closed && self.flush_send_queue(env) {
            self.state = RdmapState::Error;
        }
        if self.state == RdmapState::Error {
            self.flush_send_queue(env);
            self.flush_receive_queue(env);
        }
    }

    /// The last flush left something in a ring: call [`flush_queues`](Self::flush_queues) again when
    /// others had their turn.
    pub fn has_unflushed(&self) -> bool {
        self.state == RdmapState::Error
            && (self.requester.has_unflushed || self.receive.has_unflushed)
    }

    /// True: a work request did not succeed.
    pub(super) fn flush_send_queue<E: QpEnv>(&mut self, env: &mut E) -> bool {
        self.transmitter.open_message = OpenMessage::None;
        let (requester, mut context) = self.requester_with_context();
        let has_failed = requester.flush(env, &mut context);
        self.responder.flush();
        has_failed
    }

    pub(super) fn flush_receive_queue<E: QpEnv>(&mut self, env: &mut E) {
        let (receive, context) = self.receive_with_context();
        receive.flush(env, &context);
    }
}
