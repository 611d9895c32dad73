//! The queue pair: RDMAP and DDP above a stream of records.
//!
//! One worker owns and drives it:
//!
//! ```text
//! doorbell / room in TCP --> next_records() -----> FpduRun: kept by TCP, which calls build_fpdus() at
//!                                                  each transmission
//! ACK ---------------------> on_fpdus_acked(), complete_acked() --> completions of SEND and WRITE
//! bytes in order ----------> receive_in_order() -> placement, receive and READ completions
//! FIN, RST, timers --------> on_peer_fin(), on_tcp_closed() --> flush
//! ```
//!
//! Three parts do the work, each with its own state: the [`Requester`] sends the requests of this
//! side and completes them, the [`Responder`] answers the peer's Reads and atomics, and the
//! [`ReceiveState`] receives Writes and Sends. [`QueuePair`] holds the state that they share (the
//! outgoing stream, the RDMAP state, the errors), dispatches FPDUs to them, and decides how an error
//! of a part affects the stream.
//!
//! States (PROTOCOL.md section 4):
//!
//! ```text
//! IDLE --set_rts--> RTS --disconnect/FIN--> CLOSING --closed, nothing flushed--> IDLE
//!                    |                         '-----closed, something flushed--> ERROR
//!                    |--protocol error, Terminate received--> TERMINATE --closed--> ERROR
//!                    '--RST, modify_to_error--> ERROR
//! ```
//!
//! A queue pair whose consumer is not aware of connections ([`QueuePair::set_paired`]) enters IDLE
//! whenever its stream ends without a Terminate, and ERROR with the next send.
//!
//! In RTS the send queue can be drained (verbs' SQD): work requests that have started proceed to
//! their completion, and no other starts until [`QueuePair::resume_send_queue`].

mod closing;
mod completions;
mod error_mapping;
mod fpdu_builder;
mod receive;
mod requester;
mod responder;
mod saved;
mod state;
mod transmit;
mod transmitter;

pub use state::{
    BuildError, CloseKind, CloseReason, DrainState, QpInitAttr, QueuePairInfo, RdmapState,
    ReceiveProgress,
};

use crate::ddp::Msn;
use crate::environment::{QpEnv, QpEvent};
use crate::mpa::marker::MarkerPosition;
use crate::mpa::{NegotiatedParameters, OutOfOrderPolicy, RtrKind};
use crate::rdmap::terminate::{TerminateBitOrder, TerminateCode, TerminatePayload};
use receive::ReceiveState;
use requester::Requester;
use responder::Responder;
use serde::{Deserialize, Serialize};
use siw_memory::Stag;
use siw_shm::Access;
use state::StreamErrors;
use transmitter::{OpenMessage, Transmitter};

/// The Terminate that this side sends.
#[derive(Debug, Serialize, Deserialize)]
struct OutgoingTerminate {
    payload: TerminatePayload,
    /// TCP already has it.
    is_queued: bool,
}

/// Close of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum StreamClose {
    /// It is not closed. A clean close ends in IDLE.
    ToIdle,
    /// It is not closed. A clean close ends in ERROR, too ([`QueuePair::end_in_error`]).
    ToError,
    /// There was a stream, which has been closed.
    Done,
}

/// A queue pair.
///
/// The order of the fields decides which cache lines a message touches: sending one and completing
/// it, those before the cold fields of `requester`; receiving a Write, those before `requester` and
/// the first ones of `receive`.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Self")]
#[repr(C, align(64))]
pub struct QueuePair {
    state: RdmapState,
    /// FPDUs carry a CRC.
    crc: bool,
    stream_open: bool,
    /// A responder sends nothing, not even a Terminate, until it has received an FPDU (RFC 5044 section
    /// 7.1.2).
    may_send: bool,
    /// The message `rtr` has yet to be sent.
    is_rtr_pending: bool,
    /// The peer has closed its direction of a stream in RTS: its requests are answered before this side
    /// closes the other.
    answers_after_fin: bool,
    /// The stream is to be reset.
    wants_abort: bool,
    close: StreamClose,
    attr: QpInitAttr,
    transmitter: Transmitter,
    responder: Responder,
    requester: Requester,
    receive: ReceiveState,
    /// The ready-to-receive message, or the last one of [`send_empty_write`](Self::send_empty_write).
    rtr: Option<RtrKind>,
    /// The consumer is not aware of connections; see [`set_paired`](Self::set_paired).
    is_paired: bool,
    /// See [`set_self_connected`](Self::set_self_connected).
    is_self_connected: bool,
    terminate_bit_order: TerminateBitOrder,
    first_msn: Msn,
    errors: StreamErrors,
    terminate: Option<Box<OutgoingTerminate>>,
}

/// Cache lines that sending a message and completing it access.
const LINES_FOR_SENDING: usize =
    (std::mem::offset_of!(QueuePair, requester) + Requester::HOT_BYTES).div_ceil(64);
/// Cache lines that receiving a Write accesses in the state shared by both directions, and in
/// `receive`.
const LINES_FOR_RECEIVING: (usize, usize) = (
    (std::mem::offset_of!(QueuePair, requester) + Requester::CURRENT_BYTES).div_ceil(64),
    (std::mem::offset_of!(QueuePair, receive) % 64 + ReceiveState::HOT_BYTES).div_ceil(64),
);
const _: () = assert!(LINES_FOR_SENDING <= 3 && LINES_FOR_RECEIVING.0 + LINES_FOR_RECEIVING.1 <= 4);

impl QueuePair {
    /// Creates a queue pair in IDLE; allocates no memory.
    pub fn new(attr: QpInitAttr) -> Self {
        let (first_msn, marker_position) = (Msn::FIRST, MarkerPosition::NO_MARKERS);
        let policy = OutOfOrderPolicy::Off;
        Self {
            attr,
            state: RdmapState::Idle,
            crc: false,
            stream_open: false,
            close: StreamClose::ToIdle,
            wants_abort: false,
            answers_after_fin: false,
            may_send: false,
            is_rtr_pending: false,
            rtr: None,
            is_paired: false,
            is_self_connected: false,
            terminate_bit_order: TerminateBitOrder::Rfc,
            first_msn,
            transmitter: Transmitter::new(marker_position),
            requester: Requester::new(first_msn, 0),
            responder: Responder::new(first_msn, 0),
            receive: ReceiveState::new(first_msn, marker_position, false, policy),
            errors: StreamErrors::default(),
            terminate: None,
        }
    }

    /// Enters RTS: the stream is in FPDU mode. `emss`: payload bytes of a full TCP segment. Ignored
    /// unless the queue pair is IDLE.
    pub fn set_rts(&mut self, negotiated: NegotiatedParameters, emss: u32) {
        if self.state != RdmapState::Idle {
            return;
        }
        let first_msn = self.first_msn;
        let tx_position = MarkerPosition::stream_start(negotiated.markers_out);
        let rx_position = MarkerPosition::stream_start(negotiated.markers_in);
        let is_initiator = negotiated.initiator;
        let expects_rtr_send = !is_initiator && negotiated.rtr == Some(RtrKind::Send);
        let policy = self.receive.out_of_order.policy;
        let receive_wait_ms = self.receive.receive_wait_ms;
        *self = Self {
            state: RdmapState::Rts,
            crc: negotiated.crc,
            stream_open: true,
            may_send: is_initiator,
            is_rtr_pending: is_initiator && negotiated.rtr.is_some(),
            rtr: negotiated.rtr,
            is_paired: self.is_paired,
            is_self_connected: self.is_self_connected,
            terminate_bit_order: self.terminate_bit_order,
            first_msn,
            transmitter: Transmitter::new(tx_position),
            requester: Requester::new(first_msn, negotiated.ord)
                .with_joined_immediate(negotiated.joins_immediate),
            responder: Responder::new(first_msn, negotiated.ird.max(1)),
            receive: ReceiveState::new(first_msn, rx_position, expects_rtr_send, policy)
                .with_joined_immediate(negotiated.joins_immediate)
                .with_receive_wait(receive_wait_ms),
            ..Self::new(self.attr)
        };
        self.set_emss(emss);
    }

    /// Sets the bit order of the Terminates that this queue pair sends. Call before
    /// [`set_rts`](Self::set_rts).
    pub fn set_terminate_bit_order(&mut self, order: TerminateBitOrder) {
        self.terminate_bit_order = order;
    }

    /// Sets the number of the first message of each queue in both directions, except for Terminates.
    /// Call before [`set_rts`](Self::set_rts). See
    /// [`MpaConfig::first_msn`](crate::MpaConfig::first_msn).
    pub fn set_first_msn(&mut self, first: Msn) {
        self.first_msn = first;
    }

    /// Selects paired mode: as with InfiniBand, the consumer has named the peer's queue pair and is
    /// not aware of connections. It does not learn about the end of the stream until it sends: then
    /// its owner flushes the queue pair, the first work request completes with RETRY_EXC_ERR, and the
    /// queue pair enters ERROR. Call before [`set_rts`](Self::set_rts).
    pub fn set_paired(&mut self, is_paired: bool) {
        self.is_paired = is_paired;
    }

    /// Returns the value of [`set_paired`](Self::set_paired).
    pub fn is_paired(&self) -> bool {
        self.is_paired
    }

    /// Records that the stream's peer is this queue pair itself. An error that it finds in its own
    /// FPDU then also fails the work request of that FPDU, because the Terminate comes back to a
    /// stream that has ended. Call before [`set_rts`](Self::set_rts).
    pub fn set_self_connected(&mut self) {
        self.is_self_connected = true;
    }

    /// Sets the time that an untagged message may wait for a receive work request, in milliseconds;
    /// 0: no wait. Call before [`set_rts`](Self::set_rts), and to end a wait.
    pub fn set_receive_wait(&mut self, milliseconds: u32) {
        self.receive.receive_wait_ms = milliseconds;
    }

    /// Returns the value of [`set_receive_wait`](Self::set_receive_wait).
    pub fn receive_wait_ms(&self) -> u32 {
        self.receive.receive_wait_ms
    }

    /// Selects the streams of this queue pair that may place payload beyond a gap. Call before
    /// [`set_rts`](Self::set_rts).
    pub fn set_out_of_order(&mut self, policy: OutOfOrderPolicy) {
        self.receive.out_of_order.policy = policy;
    }

    /// Returns whether [`receive_in_order`](Self::receive_in_order) has stopped at a message for
    /// which no receive work request is posted. Call it again when one may have been posted; after
    /// the time limit, call it after `set_receive_wait(0)` so that it sends the Terminate.
    #[inline]
    pub fn awaits_receive(&self) -> bool {
        self.receive.awaits_receive
    }

    /// Clears [`awaits_receive`](Self::awaits_receive), so that the stream is examined again.
    pub fn stop_awaiting_receive(&mut self) {
        self.receive.awaits_receive = false;
    }

    /// Sets the effective MSS for FPDUs that TCP does not have yet. `emss`: payload bytes of a full
    /// TCP segment.
    pub fn set_emss(&mut self, emss: u32) {
        self.transmitter.set_emss(emss);
    }

    /// Sets the longest message, in bytes, whose payload is copied into frames. Payload of longer Writes
    /// and Sends is sent by reference to their memory, except in a stream with markers, whose pieces
    /// of payload are too short for that. A stream starts with copying all. Call after
    /// [`set_rts`](Self::set_rts).
    pub fn set_copied_up_to(&mut self, len: u32) {
        self.requester.copied_up_to = if self.transmitter.has_markers() {
            u32::MAX
        } else {
            len
        };
    }

    /// Returns whether the peer has sent an FPDU.
    pub fn has_received(&self) -> bool {
        self.receive.has_first_fpdu
    }

    /// Lets a responder send although the initiator's first FPDU has not arrived: for peers that receive from
    /// the MPA reply on, and whose consumers wait for this side to send first. RFC 5044 section 7.1.2 forbids
    /// it towards any other peer.
    pub fn send_before_first_fpdu(&mut self) {
        if self.state == RdmapState::Rts {
            self.may_send = true;
        }
    }

    /// Sends a zero-length RDMA Write. Call it only when TCP has no unacknowledged data of this
    /// stream. Does nothing while a message is in progress or sending is not allowed.
    pub fn send_empty_write(&mut self) {
        if self.state == RdmapState::Rts
            && self.may_send
            && !self.is_rtr_pending
            && self.transmitter.open_message == OpenMessage::None
        {
            self.rtr = Some(RtrKind::Write);
            self.is_rtr_pending = true;
        }
    }

    /// Sets the [`Access::REMOTE`] rights that the peer is denied from now on.
    pub fn deny_access(&mut self, denied: Access) {
        self.attr.denied_access = denied;
    }

    /// Attributes that the queue pair was created with.
    pub fn init_attr(&self) -> &QpInitAttr {
        &self.attr
    }

    /// Current state.
    pub fn state(&self) -> RdmapState {
        self.state
    }

    /// Returns whether [`next_record`](Self::next_record) has something to send, not counting work
    /// requests in the ring.
    pub fn has_output(&self) -> bool {
        match self.state {
            RdmapState::Terminate => self.may_send && self.has_unsent_terminate(),
            RdmapState::Closing => self.has_unfinished_message(),
            RdmapState::Rts => {
                self.may_send
                    && (self.is_rtr_pending
                        || self.transmitter.open_message != OpenMessage::None
                        || self.responder.has_unsent()
                        || self.requester.can_continue())
            }
            _ => false,
        }
    }

    /// Returns whether a closing stream still sends: the message under way, or responses that are owed.
    fn has_unfinished_message(&self) -> bool {
        self.transmitter.open_message != OpenMessage::None
            || self.answers_after_fin && self.responder.has_unsent()
    }

    fn has_unsent_terminate(&self) -> bool {
        self.terminate
            .as_ref()
            .is_some_and(|terminate| !terminate.is_queued)
    }

    /// Stops starting work requests until [`resume_send_queue`](Self::resume_send_queue); posts
    /// [`QpEvent::SqDrained`] when those that have started are completed. `false`: not in RTS.
    pub fn drain_send_queue<E: QpEnv>(&mut self, env: &mut E) -> bool {
        if self.state != RdmapState::Rts {
            return false;
        }
        if self.requester.drain == DrainState::Inactive {
            self.requester.drain = DrainState::Draining;
        }
        self.check_drained(env);
        true
    }

    /// Resumes sending when draining or drained. `false`: not in RTS.
    pub fn resume_send_queue(&mut self) -> bool {
        let is_rts = self.state == RdmapState::Rts;
        if is_rts {
            self.requester.drain = DrainState::Inactive;
        }
        is_rts
    }

    /// State of the drain; meaningful only in RTS.
    pub fn drain_state(&self) -> DrainState {
        self.requester.drain
    }

    /// Posts the event when the last started work request is completed.
    #[cold]
    fn check_drained<E: QpEnv>(&mut self, env: &mut E) {
        if self.requester.drain == DrainState::Draining
            && self.state == RdmapState::Rts
            && !self.requester.has_started_any()
        {
            self.requester.drain = DrainState::Drained;
            env.post_event(QpEvent::SqDrained);
        }
    }

    /// The Terminate that the peer sent, if any.
    pub fn received_terminate(&self) -> Option<TerminateCode> {
        self.errors.received
    }

    /// The first error that this side found, as it was (or would have been) sent in a Terminate.
    pub fn found_error(&self) -> Option<TerminateCode> {
        self.errors.found
    }

    /// Returns whether work requests were taken out of the send ring and are not completed.
    pub fn has_outstanding_sends(&self) -> bool {
        !self.requester.is_idle()
    }

    /// IRD and ORD: the Reads that the peer and this side, respectively, may have outstanding.
    pub fn read_depths(&self) -> (u16, u16) {
        (self.responder.ird, self.requester.ord)
    }

    /// Takes the memory windows that may be bound to this queue pair, identified by the keys they
    /// were allocated with. They must be unbound when the queue pair is destroyed.
    pub fn take_bound_windows(&mut self) -> Vec<Stag> {
        std::mem::take(&mut self.requester.bound_windows)
            .into_iter()
            .collect()
    }

    /// Current maximum ULPDU size of an FPDU, in octets (RFC 5044 section 4.1).
    pub fn mulpdu(&self) -> u16 {
        self.transmitter.mulpdu
    }

    /// Snapshot of the stream's parameters and errors.
    pub fn info(&self) -> QueuePairInfo {
        QueuePairInfo {
            state: self.state,
            ird: self.responder.ird,
            ord: self.requester.ord,
            crc: self.crc,
            mulpdu: self.transmitter.mulpdu,
            markers_in: self.receive.has_markers(),
            markers_out: self.transmitter.has_markers(),
            terminate_sent: self.errors.found,
            terminate_received: self.errors.received,
        }
    }

    /// Returns whether this is a responder that has not received an FPDU yet, and therefore may not
    /// send.
    pub fn is_awaiting_first_fpdu(&self) -> bool {
        self.state == RdmapState::Rts && !self.may_send
    }
}
