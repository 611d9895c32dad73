//! End of a stream: graceful close, errors found locally, a Terminate from either side, loss of the
//! TCP connection (PROTOCOL.md sections 4.2 and 6).

use super::error_mapping::event_for_code;
use super::state::{BuildError, CloseKind, CloseReason, RdmapState};
use super::transmitter::OpenMessage;
use super::{OutgoingTerminate, QueuePair, StreamClose};
use crate::ddp::{Msn, QN_TERMINATE, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::{QpEnv, QpEvent};
use crate::mpa::fpdu::LEN_FIELD;
use crate::rdmap::terminate::{
    MAX_TERMINATE_LEN, OffendingSegment, ReceivedTerminate, TerminateCode, TerminatePayload,
};
use crate::record::{FpduKind, FpduRecord};
use crate::stream::RxStream;
use siw_shm::WcStatus;

impl QueuePair {
    /// Starts a graceful close on behalf of the consumer: a message in progress is sent to its end,
    /// then [`requested_close`](Self::requested_close) asks for the close. Work requests that have
    /// not started are flushed when the stream is closed.
    pub fn disconnect(&mut self) {
        if self.state == RdmapState::Rts {
            self.start_closing();
        }
    }

    /// Handles the peer's FIN, after [`receive_in_order`](Self::receive_in_order) has processed all
    /// bytes before it. `leftover`: bytes of an incomplete FPDU that remain in the stream. The peer's
    /// requests are answered before the stream is closed (RFC 5041 section 6.2.1).
    pub fn on_peer_fin<E: QpEnv>(&mut self, env: &mut E, leftover: usize) {
        if self.holds_terminate() {
            // The FPDU that it waits for does not come any more.
            self.terminate = None;
        }
        if !matches!(self.state, RdmapState::Rts | RdmapState::Closing) {
            return;
        }
        // A message that waits for its receive work request is whole; its owner calls again after it.
        let is_cut =
            leftover > 0 && !self.receive.awaits_receive || self.receive.is_within_message();
        if is_cut && self.is_paired {
            // The consumer is not notified about connections: its next send fails.
            self.state = RdmapState::Closing;
            self.wants_abort = true;
        } else if is_cut {
            // Conformance 36: the stream ended inside an FPDU or a message.
            self.abort(env, TerminateCode::MPA_TCP_LOST);
        } else if self.state == RdmapState::Rts {
            self.answers_after_fin = true;
            self.start_closing();
        }
    }

    fn start_closing(&mut self) {
        self.state = RdmapState::Closing;
        let is_started = match self.transmitter.open_message {
            OpenMessage::Request => self.requester.has_started_current(),
            OpenMessage::Response => true,
            OpenMessage::None => false,
        };
        if !is_started {
            self.transmitter.open_message = OpenMessage::None;
        }
    }

    /// Ends the queue pair at once: no Terminate reports the error, and the stream is reset.
    fn abort<E: QpEnv>(&mut self, env: &mut E, code: TerminateCode) {
        self.errors.found.get_or_insert(code);
        self.state = RdmapState::Error;
        self.wants_abort = true;
        env.post_event(QpEvent::QpFatal);
        self.flush_queues(env);
    }

    /// Handles the end of the TCP connection; no record will be acknowledged any more. Flushes the
    /// queues and enters IDLE (closed cleanly with nothing left to send) or ERROR. A queue pair with
    /// [`set_paired`](Self::set_paired) flushes nothing: when its retry time expires, its owner calls
    /// [`flush_queues`](Self::flush_queues), which fails the
    /// [outstanding](Self::has_outstanding_sends) and posted work requests.
    pub fn on_tcp_closed<E: QpEnv>(&mut self, env: &mut E, reason: CloseReason) {
        if !self.stream_open {
            return;
        }
        self.stream_open = false;
        let ends_in_error = self.close == StreamClose::ToError;
        self.close = StreamClose::Done;
        self.complete_ready(env);
        let was_open = matches!(self.state, RdmapState::Rts | RdmapState::Closing);
        if was_open && self.is_paired {
            self.requester.set_peer_lost();
            self.state = RdmapState::Idle;
            return;
        }
        let is_clean = self.state == RdmapState::Closing && reason == CloseReason::Closed;
        if was_open && !is_clean {
            self.errors.found.get_or_insert(TerminateCode::MPA_TCP_LOST);
            env.post_event(QpEvent::QpFatal);
        }
        if was_open && reason == CloseReason::TimedOut {
            self.requester.set_peer_lost();
        }
        self.state = RdmapState::Error;
        let has_failed = self.flush_send_queue(env);
        self.flush_receive_queue(env);
        if is_clean && !has_failed && !ends_in_error {
            self.state = RdmapState::Idle;
        }
    }

    /// Has a clean close end in ERROR, not in IDLE: receive work requests that are posted later are flushed and do
    /// not wait for another connection. A queue pair that is IDLE after such a close enters ERROR now.
    pub fn end_in_error<E: QpEnv>(&mut self, env: &mut E) {
        if self.close != StreamClose::Done {
            self.close = StreamClose::ToError;
        } else if self.state == RdmapState::Idle && !self.is_paired {
            self.state = RdmapState::Error;
            self.flush_queues(env);
        }
    }

    /// Implements ibv_modify_qp(IBV_QPS_ERR), also used when the client is gone: flushes now and
    /// requests an abort of the stream.
    pub fn modify_to_error<E: QpEnv>(&mut self, env: &mut E) {
        self.state = RdmapState::Error;
        self.wants_abort = true;
        self.flush_queues(env);
    }

    /// Records that the peer was never reached: the first flushed work request reports it.
    pub fn set_peer_lost(&mut self) {
        self.requester.set_peer_lost();
    }

    /// Sends a Terminate with a code chosen by the local user, then closes. A responder that
    /// [awaits the first FPDU](Self::is_awaiting_first_fpdu) does so when it has arrived.
    pub fn send_terminate(&mut self, code: TerminateCode) {
        if self.state == RdmapState::Rts {
            self.queue_terminate(code, None);
        }
    }

    /// Handles a failure of [`build_fpdus`](Self::build_fpdus): the queue pair enters ERROR and
    /// requests an abort. The message completes with LOC_PROT_ERR, everything else is flushed.
    pub fn on_build_failure<E: QpEnv>(
        &mut self,
        env: &mut E,
        record: &FpduRecord,
        error: BuildError,
    ) {
        if self.state == RdmapState::Error {
            return;
        }
        if record.kind == FpduKind::Request && error == BuildError::KeyDeregistered {
            let status = WcStatus::LOC_PROT_ERR;
            self.requester.fail_request(Some(record.slot), status);
        }
        self.abort(env, TerminateCode::LOCAL_CATASTROPHIC);
    }

    /// Returns how the stream is to be closed now, if at all; the answer stays until the stream is
    /// closed.
    pub fn requested_close(&self) -> Option<CloseKind> {
        if !self.stream_open {
            return None;
        }
        if self.wants_abort {
            return Some(CloseKind::Abort);
        }
        let is_ready = match self.state {
            RdmapState::Closing => !self.has_unfinished_message(),
            RdmapState::Terminate => !self.has_unsent_terminate(),
            _ => false,
        };
        is_ready.then_some(CloseKind::Graceful)
    }

    /// Ends the stream because of an error, which a Terminate reports to the peer. The first error
    /// counts (RFC 5040 section 7.1, conformance 37, 79, 80); nothing follows a Terminate, in either
    /// direction.
    pub(super) fn fail_stream<E: QpEnv>(
        &mut self,
        env: &mut E,
        code: TerminateCode,
        offender: Option<&OffendingSegment>,
    ) {
        match self.state {
            RdmapState::Rts => {
                env.post_event(event_for_code(code));
                self.queue_terminate(code, offender);
                if self.is_self_connected && offender.is_some() {
                    self.fail_own_request(env, code, offender);
                }
            }
            // The FIN may already have been sent: no Terminate can follow it.
            RdmapState::Closing => {
                env.post_event(event_for_code(code));
                self.errors.found = Some(code);
                self.state = RdmapState::Error;
                self.wants_abort = true;
                self.flush_queues(env);
            }
            _ => {}
        }
    }

    /// Fails the work request whose FPDU a self-connected queue pair has refused, as its Terminate
    /// would at a peer.
    #[cold]
    fn fail_own_request<E: QpEnv>(
        &mut self,
        env: &mut E,
        code: TerminateCode,
        offender: Option<&OffendingSegment>,
    ) {
        let payload = TerminatePayload::new(code, offender);
        if let Ok(terminate) = ReceivedTerminate::parse(payload.as_bytes()) {
            self.requester.on_terminate(&terminate);
            self.complete_ready(env);
        }
    }

    /// Returns whether a Terminate waits for the initiator's first FPDU, before which a responder sends
    /// none (RFC 5044 section 7.1.2).
    #[inline]
    pub(super) fn holds_terminate(&self) -> bool {
        self.state == RdmapState::Terminate && !self.may_send && self.has_unsent_terminate()
    }

    fn queue_terminate(&mut self, code: TerminateCode, offender: Option<&OffendingSegment>) {
        self.errors.found = Some(code);
        self.state = RdmapState::Terminate;
        self.transmitter.open_message = OpenMessage::None;
        self.terminate = Some(Box::new(OutgoingTerminate {
            payload: TerminatePayload::new(code, offender).in_bit_order(self.terminate_bit_order),
            is_queued: false,
        }));
    }

    /// The peer's Terminate ends the stream; no Terminate is sent in reply (RFC 5040 section 5.4).
    pub(super) fn on_terminate<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
    ) {
        let mut payload = [0; MAX_TERMINATE_LEN];
        let len = (len as usize).min(payload.len());
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut payload[..len]);
        let is_sound = header.qn == QN_TERMINATE
            && header.msn == Msn::FIRST
            && header.mo == 0
            && header.control.is_last();
        let parsed = ReceivedTerminate::parse(&payload[..len]);
        self.state = RdmapState::Terminate;
        self.transmitter.open_message = OpenMessage::None;
        let Some(terminate) = parsed.ok().filter(|_| is_sound) else {
            // Conformance 78: a malformed Terminate is an error of this stream too.
            self.errors.found = Some(TerminateCode::RDMAP_UNSPECIFIED);
            env.post_event(QpEvent::QpFatal);
            return;
        };
        self.errors.received = Some(terminate.code);
        env.post_event(event_for_code(terminate.code));
        self.requester.on_terminate(&terminate);
        self.complete_ready(env);
    }
}
