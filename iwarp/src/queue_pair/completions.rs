//! What acknowledgements, released buffers and the end of the stream complete.

use super::QueuePair;
use super::receive::{ReceiveContext, ReceiveState};
use super::requester::{CompletionContext, Requester};
use super::state::{DrainState, RdmapState};
use super::transmitter::OpenMessage;
use crate::environment::QpEnv;
use crate::record::{FpduKind, FpduRecord};

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
    /// were handed out.
    #[inline]
    pub fn on_record_acked<E: QpEnv>(&mut self, env: &mut E, record: &FpduRecord) {
        if !record.is_last {
            return;
        }
        match record.kind {
            FpduKind::Request | FpduKind::Immediate => {
                if self.requester.on_acked(record.slot, record.kind) {
                    self.complete_ready(env);
                }
            }
            FpduKind::Response => self.responder.on_acked(record.slot),
            FpduKind::Rtr | FpduKind::Terminate => {}
        }
    }

    /// Completes what only waited for a port to release buffers: see
    /// [`QpEnv::is_released`](crate::QpEnv::is_released).
    pub fn poll_releases<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_ready(env);
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
    /// After a clean close the queue pair is IDLE, but its consumer may not have known that yet when it
    /// posted to the send queue: such a work request is flushed too, and the queue pair goes to ERROR,
    /// as if it had been posted before the end. Receive work requests wait for the next connection.
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
