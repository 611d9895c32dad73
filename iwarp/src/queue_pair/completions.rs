//! Completions caused by acknowledgements, released buffers and the end of the stream.

use super::receive::{ReceiveContext, ReceiveState};
use super::requester::{CompletionContext, Requester};
use super::state::{DrainState, RdmapState};
use super::transmitter::OpenMessage;
use super::{QueuePair, StreamClose};
use crate::environment::QpEnv;
use crate::record::{FpduKind, FpduRecord, FpduRun};
use std::ops::Range;

impl QueuePair {
    /// The requester, and the fields of the queue pair that its completions need.
    #[inline]
    pub(super) fn requester_with_context(&mut self) -> (&mut Requester, CompletionContext<'_>) {
        let context = CompletionContext {
            attr: &self.attr,
            errors: &self.errors,
        };
        (&mut self.requester, context)
    }

    /// The receive state, and the fields of the queue pair that its completions need.
    #[inline]
    pub(super) fn receive_with_context(&mut self) -> (&mut ReceiveState, ReceiveContext<'_>) {
        let context = ReceiveContext {
            attr: &self.attr,
            errors: &self.errors,
        };
        (&mut self.receive, context)
    }

    /// TCP has the acknowledgement of every byte of this record. Call this for the records in the
    /// order in which they were handed out, then [`complete_acked`](Self::complete_acked) after the
    /// last one.
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

    /// [`on_record_acked`](Self::on_record_acked) for the FPDUs `units` of a run.
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

    /// Completes the requests whose records were passed to
    /// [`on_record_acked`](Self::on_record_acked).
    #[inline]
    pub fn complete_acked<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_ready(env);
    }

    /// Completes requests that only waited for a port to release buffers; see
    /// [`QpEnv::is_released`](crate::QpEnv::is_released).
    pub fn poll_releases<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_ready(env);
    }

    /// Completes work requests and Sends that waited until no other worker uses an invalidated key,
    /// as requested by [`QpEnv::await_quiescence`]. `true`: something still waits. `false`: call
    /// [`receive_in_order`](Self::receive_in_order) and [`next_record`](Self::next_record) again.
    pub fn poll_quiescence<E: QpEnv>(&mut self, env: &mut E) -> bool {
        let (requester, mut context) = self.requester_with_context();
        let is_sending = requester.poll_quiescence(env, &mut context);
        let (receive, context) = self.receive_with_context();
        let is_receiving = receive.poll_quiescence(env, &context);
        self.complete_ready(env);
        is_sending || is_receiving
    }

    /// Returns whether [`receive_in_order`](Self::receive_in_order) consumes nothing until
    /// [`poll_quiescence`](Self::poll_quiescence) has delivered a Send.
    #[inline]
    pub fn is_delivery_delayed(&self) -> bool {
        self.receive.is_delivery_delayed()
    }

    /// Completes the finished work requests at the front of the send queue.
    #[inline]
    pub(super) fn complete_ready<E: QpEnv>(&mut self, env: &mut E) {
        let (requester, mut context) = self.requester_with_context();
        requester.complete_ready(env, &mut context);
        if self.requester.drain == DrainState::Draining {
            self.check_drained(env);
        }
    }

    /// Flushes the work requests that are in the queues, within the budget of one turn; see
    /// [`has_unflushed`](Self::has_unflushed). Call it on a doorbell in ERROR or after the stream was
    /// closed; it does nothing in other states.
    ///
    /// After a clean close, or after the end of a paired queue pair's stream, the queue pair is IDLE,
    /// but its consumer may not have known that yet when it posted to the send queue. Such a send
    /// work request is flushed too, and the queue pair enters ERROR as if the request had been posted
    /// before the end. Receive work requests wait for the next connection.
    pub fn flush_queues<E: QpEnv>(&mut self, env: &mut E) {
        let is_closed = self.state == RdmapState::Idle && self.close == StreamClose::Done;
        if is_closed && self.flush_send_queue(env) {
            self.state = RdmapState::Error;
        }
        if self.state == RdmapState::Error {
            self.flush_send_queue(env);
            self.flush_receive_queue(env);
        }
    }

    /// Returns whether the last flush left work requests in a ring: call
    /// [`flush_queues`](Self::flush_queues) again after other queue pairs had their turn.
    pub fn has_unflushed(&self) -> bool {
        self.state == RdmapState::Error
            && (self.requester.has_unflushed || self.receive.has_unflushed)
    }

    /// Flushes the send queue and the responses. Returns whether a work request failed.
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
