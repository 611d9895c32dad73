//! The queue pair: RDMAP and DDP above a stream of records.
//!
//! One worker owns it and drives it:
//!
//! ```text
//! doorbell / room in TCP --> next_record() --> TxRecord --> TCP keeps it, calls build() to send or resend
//! ACK --------------------> acked()       --> completions of SEND and WRITE
//! bytes in order ---------> receive()     --> placement, receive completions, READ completions
//! FIN, RST, timers -------> on_peer_fin(), on_tcp_closed() --> flush
//! ```
//!
//! States (RFC 5040 section 5.1 and protocol.md section 4):
//!
//! ```text
//! IDLE --set_rts--> RTS --disconnect/FIN--> CLOSING --closed, nothing flushed--> IDLE
//!                    |                         '-----closed, something flushed--> ERROR
//!                    |--protocol error, Terminate received--> TERMINATE --closed--> ERROR
//!                    '--RST, modify_to_error--> ERROR
//! ```
//!
//! In RTS the send queue can be drained (verbs' SQD): what is started goes on to its completion,
//! nothing else starts until [`QueuePair::resume_send_queue`].

mod atomic_messages;
mod completion;
mod error_mapping;
mod fpdu_builder;
mod immediate;
#[cfg(test)]
mod msn_wrap;
mod out_of_order;
mod read_queue;
mod read_requests;
mod receive;
mod received_terminate;
mod requester;
mod responder;
mod send_queue;

pub use out_of_order::OutOfOrderPolicy;
pub use requester::OutgoingFpdu;

use crate::ddp::Msn;
use crate::environment::{ExtBufRef, FpduKind, FpduRecord, QpEnv, QpEvent};
use crate::mpa::fpdu;
use crate::mpa::marker::{self, MarkerPosition};
use crate::mpa::{NegotiatedParameters, RtrKind};
use crate::queue_pair::error_mapping::event_of;
use crate::queue_pair::out_of_order::Early;
use crate::queue_pair::read_queue::{InboundQueue, Outbound};
use crate::queue_pair::send_queue::{Entry, SendQueue};
use crate::rdmap::terminate::{
    OffendingSegment, TerminateBitOrder, TerminateCode, TerminatePayload,
};
use siw_shm::{Sge, WcStatus};
use std::collections::VecDeque;

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RdmapState {
    /// No stream.
    Idle,
    /// Ready to send and receive.
    Rts,
    /// Graceful close under way.
    Closing,
    /// A Terminate goes out or came in; nothing but the close follows.
    Terminate,
    /// Everything is flushed, and so is what comes later.
    Error,
}

/// How far the draining of the send queue is (ibv_modify_qp(3), IBV_QPS_SQD).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DrainState {
    /// Work requests start as they come.
    #[default]
    Inactive,
    /// No work request starts; some that did are not completed.
    Draining,
    /// No work request starts, and all that did are completed: SQ_DRAINED was told.
    Drained,
}

/// What a queue pair is created with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInitAttr {
    /// Queue pair number: STags bound to a stream name it.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Depth of the send queue.
    pub max_send_wr: u32,
    /// Depth of the receive queue.
    pub max_recv_wr: u32,
    /// Every send work request makes a completion (ibv_create_qp(3), sq_sig_all).
    pub sq_sig_all: bool,
}

/// How the stream shall end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseKind {
    /// FIN after everything that TCP has taken.
    Graceful,
    /// RST now.
    Abort,
}

/// Why the stream is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Both FINs are exchanged, or the close was given enough time.
    Closed,
    /// The peer sent RST.
    Reset,
    /// TCP gave up.
    TimedOut,
}

/// What [`QueuePair::receive_in_order`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiveProgress {
    /// FPDUs consumed.
    pub fpdus: u32,
    /// Stream bytes consumed.
    pub bytes: usize,
    /// The very first FPDU was among them: a responder may send from now on.
    pub first_fpdu: bool,
    /// There is something for [`QueuePair::next_record`] to send.
    pub has_output: bool,
}

/// A record cannot be built any more: its memory key was deregistered, or the queue pair was
/// flushed. Its place in the sequence space cannot be filled otherwise: abort the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The local key no longer covers the message.
    #[error("memory of a message in flight was deregistered")]
    KeyDeregistered,
    /// The message is no longer known.
    #[error("record belongs to a message that is already completed")]
    MessageCompleted,
}

/// The Terminate that goes out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub payload: TerminatePayload,
    /// TCP has it.
    pub queued: bool,
}

/// The message whose segments are under way; RDMAP messages are never interleaved (Linux siw takes
/// a Write between two segments of a Read Response for an error).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InMessage {
    None,
    Request,
    Response,
}

/// The Send that is being received.
#[derive(Debug, Default)]
pub(crate) struct Receiving {
    pub active: bool,
    pub wr_id: u64,
    pub capacity: u32,
    pub received: u32,
    pub rdmap: u8,
    /// Kept between messages for its allocation.
    pub sges: Vec<Sge>,
}

/// A queue pair.
pub struct QueuePair {
    pub(crate) attr: QpInitAttr,
    pub(crate) state: RdmapState,
    pub(crate) crc: bool,
    pub(crate) stream_open: bool,
    pub(crate) abort: bool,
    /// A responder keeps quiet until it has received an FPDU (RFC 5044 section 7.1.2).
    pub(crate) may_send: bool,
    pub(crate) first_seen: bool,
    pub(crate) rtr_pending: bool,
    /// The ready-to-receive Send of the peer is still to come: it takes no receive work request.
    pub(crate) absorb_send: bool,
    pub(crate) prefer_response: bool,
    /// A send work request completed in error: those after it are flushed.
    pub(crate) send_failed: bool,
    pub(crate) drain: DrainState,
    pub(crate) in_message: InMessage,
    pub(crate) rtr: Option<RtrKind>,
    pub(crate) ird: u16,
    pub(crate) ord: u16,
    pub(crate) mulpdu: u16,
    pub(crate) tx_marker_position: MarkerPosition,
    pub(crate) rx_marker_position: MarkerPosition,
    /// The work request that is taken out of the ring and not sent completely.
    pub(crate) cur: Option<u32>,
    pub(crate) first_msn: Msn,
    pub(crate) send_msn: Msn,
    pub(crate) read_msn: Msn,
    pub(crate) rx_send_msn: Msn,
    pub(crate) rx_read_msn: Msn,
    /// Of Atomic Responses.
    pub(crate) atomic_msn: Msn,
    pub(crate) rx_atomic_msn: Msn,
    pub(crate) sq: SendQueue,
    pub(crate) outbound: VecDeque<Outbound>,
    pub(crate) inbound: InboundQueue,
    pub(crate) recv: Receiving,
    /// Bytes of the last RDMA Write that arrived: what Immediate Data right behind it reports.
    pub(crate) write_len: u32,
    pub(crate) write_open: bool,
    /// Immediate data of the Send that comes next.
    pub(crate) send_imm: Option<u32>,
    pub(crate) outgoing: Option<Box<Outgoing>>,
    pub(crate) local_error: Option<TerminateCode>,
    pub(crate) received: Option<TerminateCode>,
    pub(crate) terminate_bit_order: TerminateBitOrder,
    /// What was placed before its turn.
    pub(crate) early: Early,
    /// Owners of finished messages whose buffers the port still holds.
    pub(crate) zombies: Vec<ExtBufRef>,
}

impl QueuePair {
    /// A queue pair in IDLE; allocates nothing.
    pub fn new(attr: QpInitAttr) -> Self {
        Self {
            attr,
            state: RdmapState::Idle,
            crc: false,
            stream_open: false,
            abort: false,
            may_send: false,
            first_seen: false,
            rtr_pending: false,
            absorb_send: false,
            prefer_response: false,
            send_failed: false,
            drain: DrainState::Inactive,
            in_message: InMessage::None,
            rtr: None,
            ird: 0,
            ord: 0,
            mulpdu: 0,
            tx_marker_position: MarkerPosition::NO_MARKERS,
            rx_marker_position: MarkerPosition::NO_MARKERS,
            cur: None,
            first_msn: Msn::FIRST,
            send_msn: Msn::FIRST,
            read_msn: Msn::FIRST,
            rx_send_msn: Msn::FIRST,
            rx_read_msn: Msn::FIRST,
            atomic_msn: Msn::FIRST,
            rx_atomic_msn: Msn::FIRST,
            sq: SendQueue::default(),
            outbound: VecDeque::new(),
            inbound: InboundQueue::default(),
            recv: Receiving::default(),
            write_len: 0,
            write_open: false,
            send_imm: None,
            outgoing: None,
            local_error: None,
            received: None,
            terminate_bit_order: TerminateBitOrder::Rfc,
            early: Early::default(),
            zombies: Vec::new(),
        }
    }

    /// The stream is in FPDU mode. `emss`: payload bytes of a full TCP segment. Ignored unless the
    /// queue pair is IDLE.
    pub fn set_rts(&mut self, n: NegotiatedParameters, emss: u32) {
        if self.state != RdmapState::Idle {
            return;
        }
        let zombies = std::mem::take(&mut self.zombies);
        let early = Early::new(self.early.policy);
        let (terminate_bit_order, first) = (self.terminate_bit_order, self.first_msn);
        *self = Self::new(self.attr);
        self.terminate_bit_order = terminate_bit_order;
        self.first_msn = first;
        self.send_msn = first;
        self.read_msn = first;
        self.rx_send_msn = first;
        self.rx_read_msn = first;
        self.atomic_msn = first;
        self.rx_atomic_msn = first;
        self.zombies = zombies;
        self.early = early;
        self.state = RdmapState::Rts;
        self.stream_open = true;
        self.crc = n.crc;
        self.tx_marker_position = MarkerPosition::start(n.markers_out);
        self.rx_marker_position = MarkerPosition::start(n.markers_in);
        self.ird = n.ird.max(1);
        self.ord = n.ord;
        self.rtr = n.rtr;
        self.may_send = n.initiator;
        self.rtr_pending = n.initiator && n.rtr.is_some();
        self.absorb_send = !n.initiator && n.rtr == Some(RtrKind::Send);
        self.set_emss(emss);
    }

    /// How Terminates of this queue pair begin; before [`set_rts`](Self::set_rts).
    pub fn set_terminate_bit_order(&mut self, order: TerminateBitOrder) {
        self.terminate_bit_order = order;
    }

    /// Number of the first message of each queue in both directions, of Terminates aside; before
    /// [`set_rts`](Self::set_rts). See [`MpaConfig::first_msn`](crate::MpaConfig::first_msn).
    pub fn set_first_msn(&mut self, first: Msn) {
        self.first_msn = first;
    }

    /// The effective MSS changed; FPDUs not yet handed to TCP follow it.
    pub fn set_emss(&mut self, emss: u32) {
        self.mulpdu = if self.tx_marker_position.has_markers() {
            marker::mulpdu_for_emss(emss)
        } else {
            fpdu::mulpdu_for_emss(emss)
        };
    }

    /// Creation attributes.
    pub fn init_attr(&self) -> &QpInitAttr {
        &self.attr
    }

    /// Current state.
    pub fn state(&self) -> RdmapState {
        self.state
    }

    /// [`next_record`](Self::next_record) has something beyond what may wait in the ring.
    pub fn has_output(&self) -> bool {
        match self.state {
            RdmapState::Terminate => self.outgoing.as_ref().is_some_and(|o| !o.queued),
            RdmapState::Closing => self.in_message != InMessage::None,
            RdmapState::Rts => {
                self.may_send
                    && (self.rtr_pending
                        || self.in_message != InMessage::None
                        || self.inbound.unsent() > 0
                        || self.cur.is_some_and(|c| !self.stalled(c)))
            }
            _ => false,
        }
    }

    /// The consumer disconnects: a message that is under way is sent to its end, then
    /// [`requested_close`](Self::requested_close) asks for a graceful close. Work requests that were not
    /// started are flushed when the stream is closed.
    pub fn disconnect(&mut self) {
        if self.state == RdmapState::Rts {
            self.start_closing();
        }
    }

    /// The peer sent FIN and [`receive_in_order`](Self::receive_in_order) has seen all bytes before it. `leftover`:
    /// bytes of an incomplete FPDU that stay in the stream.
    pub fn on_peer_fin<E: QpEnv>(&mut self, env: &mut E, leftover: usize) {
        if !matches!(self.state, RdmapState::Rts | RdmapState::Closing) {
            return;
        }
        if leftover > 0 || self.recv.active {
            // Conformance 36: the stream ended inside of an FPDU or a message.
            self.lost(env);
        } else if self.state == RdmapState::Rts {
            self.start_closing();
        }
    }

    /// Starts no further work request until [`resume`](Self::resume_send_queue); SQ_DRAINED is told when
    /// those that are started are completed. False: not in RTS.
    pub fn drain_send_queue<E: QpEnv>(&mut self, env: &mut E) -> bool {
        if self.state != RdmapState::Rts {
            return false;
        }
        if self.drain == DrainState::Inactive {
            self.drain = DrainState::Draining;
        }
        self.check_drained(env);
        true
    }

    /// From draining or drained back to sending. False: not in RTS.
    pub fn resume_send_queue(&mut self) -> bool {
        let rts = self.state == RdmapState::Rts;
        if rts {
            self.drain = DrainState::Inactive;
        }
        rts
    }

    /// How far a drain is; means nothing outside of RTS.
    pub fn drain_state(&self) -> DrainState {
        self.drain
    }

    /// The last work request that was started is completed.
    #[cold]
    pub(crate) fn check_drained<E: QpEnv>(&mut self, env: &mut E) {
        // One that was taken out of the ring and waits for its turn is not started.
        let started = match self.sq.front() {
            None => false,
            Some(e) => e.started() || self.cur.is_none_or(|c| !self.sq.is_front(c)),
        };
        if self.drain == DrainState::Draining && self.state == RdmapState::Rts && !started {
            self.drain = DrainState::Drained;
            env.post_event(QpEvent::SqDrained);
        }
    }

    fn start_closing(&mut self) {
        self.state = RdmapState::Closing;
        let started = match self.in_message {
            InMessage::Request => self
                .cur
                .and_then(|c| self.sq.get(c))
                .is_some_and(Entry::started),
            InMessage::Response => true,
            InMessage::None => false,
        };
        if !started {
            self.in_message = InMessage::None;
        }
    }

    fn lost<E: QpEnv>(&mut self, env: &mut E) {
        self.local_error.get_or_insert(TerminateCode::MPA_TCP_LOST);
        self.state = RdmapState::Error;
        self.abort = true;
        env.post_event(QpEvent::QpFatal);
        self.flush_queues(env);
    }

    /// The stream is gone, no record comes back any more: flushes, and goes to IDLE (closed cleanly
    /// with nothing left to send) or ERROR.
    pub fn on_tcp_closed<E: QpEnv>(&mut self, env: &mut E, reason: CloseReason) {
        if !self.stream_open {
            return;
        }
        self.stream_open = false;
        self.complete_ready(env);
        if self.state == RdmapState::Rts
            || (self.state == RdmapState::Closing && reason != CloseReason::Closed)
        {
            self.local_error.get_or_insert(TerminateCode::MPA_TCP_LOST);
            env.post_event(QpEvent::QpFatal);
        }
        let clean = self.state == RdmapState::Closing && reason == CloseReason::Closed;
        self.state = RdmapState::Error;
        let flushed = self.flush_send(env);
        self.flush_recv(env);
        if clean && !flushed {
            self.state = RdmapState::Idle;
        }
    }

    /// ibv_modify_qp(ERR), or the client is gone: flushes now, and wants an abort of the stream.
    pub fn modify_to_error<E: QpEnv>(&mut self, env: &mut E) {
        self.state = RdmapState::Error;
        self.abort = true;
        self.flush_queues(env);
    }

    /// Sends a Terminate of the local user's choice, then closes.
    pub fn send_terminate(&mut self, code: TerminateCode) {
        if self.state == RdmapState::Rts {
            self.queue_terminate(code, None);
        }
    }

    /// [`build_fpdu`](Self::build_fpdu) failed: the queue pair goes to ERROR and wants an abort. The message
    /// completes with LOC_PROT_ERR, everything else is flushed.
    pub fn on_build_failure<E: QpEnv>(&mut self, env: &mut E, rec: &FpduRecord, error: BuildError) {
        if self.state == RdmapState::Error {
            return;
        }
        if rec.kind == FpduKind::Request
            && error == BuildError::KeyDeregistered
            && let Some(e) = self.sq.get_mut(rec.slot)
        {
            e.status = WcStatus::LOC_PROT_ERR;
        }
        self.local_error
            .get_or_insert(TerminateCode::LOCAL_CATASTROPHIC);
        self.state = RdmapState::Error;
        self.abort = true;
        env.post_event(QpEvent::QpFatal);
        self.flush_queues(env);
    }

    /// How the stream shall be closed now, if at all. Repeats until the stream is closed.
    pub fn requested_close(&self) -> Option<CloseKind> {
        if !self.stream_open {
            return None;
        }
        if self.abort {
            return Some(CloseKind::Abort);
        }
        match self.state {
            RdmapState::Closing if self.in_message == InMessage::None => Some(CloseKind::Graceful),
            RdmapState::Terminate if !self.has_output() => Some(CloseKind::Graceful),
            _ => None,
        }
    }

    /// The Terminate that the peer sent, if it did.
    pub fn received_terminate(&self) -> Option<TerminateCode> {
        self.received
    }

    /// The error that this side found first, as it went (or would have gone) into a Terminate.
    pub fn found_error(&self) -> Option<TerminateCode> {
        self.local_error
    }

    /// Work requests taken out of the send ring and not completed.
    pub fn has_outstanding_sends(&self) -> bool {
        !self.sq.is_empty()
    }

    /// Reads that the peer may have outstanding, and reads that this side may.
    pub fn read_depths(&self) -> (u16, u16) {
        (self.ird, self.ord)
    }

    /// Largest ULPDU of an FPDU as of now (RFC 5044 section 4.1).
    pub fn mulpdu(&self) -> u16 {
        self.mulpdu
    }

    /// A responder that has not received an FPDU yet, and may not send therefore.
    pub fn is_awaiting_first_fpdu(&self) -> bool {
        self.state == RdmapState::Rts && !self.may_send
    }

    /// An error that the peer shall hear of. The first one wins (RFC 5040 section 4.8, conformance
    /// 37, 79, 80); nothing follows a Terminate, in either direction.
    pub(crate) fn fault<E: QpEnv>(
        &mut self,
        env: &mut E,
        code: TerminateCode,
        by: Option<&OffendingSegment>,
    ) {
        let sendable = match self.state {
            RdmapState::Rts => true,
            // The FIN may be out already.
            RdmapState::Closing => false,
            _ => return,
        };
        env.post_event(event_of(code));
        if sendable {
            self.queue_terminate(code, by);
        } else {
            self.local_error = Some(code);
            self.state = RdmapState::Error;
            self.abort = true;
            self.flush_queues(env);
        }
    }

    fn queue_terminate(&mut self, code: TerminateCode, by: Option<&OffendingSegment>) {
        self.local_error = Some(code);
        self.state = RdmapState::Terminate;
        self.in_message = InMessage::None;
        self.outgoing = Some(Box::new(Outgoing {
            payload: TerminatePayload::new(code, by).in_order(self.terminate_bit_order),
            queued: false,
        }));
    }
}
