//! The queue pair: RDMAP and DDP above a stream of records.
//!
//! One worker owns it and drives it:
//!
//! ```text
//! doorbell / room in TCP --> next_records() -----> FpduRun: TCP keeps it, and has build_run() and
//!                                                  build_fpdu() called whenever it sends of it
//! ACK ---------------------> on_fpdus_acked(), complete_acked() --> completions of SEND and WRITE
//! bytes in order ----------> receive_in_order() -> placement, receive and READ completions
//! FIN, RST, timers --------> on_peer_fin(), on_tcp_closed() --> flush
//! ```
//!
//! Three parts do the work, each with its own state: the [`Requester`] sends what this side asks for
//! and completes it, the [`Responder`] answers Reads and atomics of the peer, the [`ReceiveState`]
//! takes Writes and Sends. [`QueuePair`] holds what they share (the outgoing stream, the state, the
//! errors), passes FPDUs to the right part, and decides what an error of a part means for the stream.
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
//! A queue pair whose consumer knows no connections ([`QueuePair::set_paired`]) goes to IDLE with
//! each end of its stream but a Terminate, and to ERROR with the next send.
//!
//! In RTS the send queue can be drained (verbs' SQD): what is started goes on to its completion,
//! nothing else starts until [`QueuePair::resume_send_queue`].

mod closing;
mod completions;
mod error_mapping;
mod fpdu_builder;
mod receive;
mod requester;
mod responder;
mod state;
mod transmit;
mod transmitter;

pub use receive::OutOfOrderPolicy;
pub use state::{
    BuildError, CloseKind, CloseReason, DrainState, QpInitAttr, RdmapState, ReceiveProgress,
};

use crate::ddp::Msn;
use crate::environment::{QpEnv, QpEvent};
use crate::mpa::marker::MarkerPosition;
use crate::mpa::{NegotiatedParameters, RtrKind};
use crate::rdmap::terminate::{TerminateBitOrder, TerminateCode, TerminatePayload};
use receive::ReceiveState;
use requester::Requester;
use responder::Responder;
use siw_memory::Stag;
use siw_shm::Access;
use state::StreamErrors;
use transmitter::{OpenMessage, Transmitter};

/// The Terminate of this side.
#[derive(Debug)]
struct OutgoingTerminate {
    payload: TerminatePayload,
    /// TCP has it.
    is_queued: bool,
}

/// A queue pair.
pub struct QueuePair {
    attr: QpInitAttr,
    state: RdmapState,
    /// FPDUs carry a CRC.
    crc: bool,
    stream_open: bool,
    /// There was a stream, which is closed.
    was_closed: bool,
    /// The stream shall be reset.
    wants_abort: bool,
    /// A responder sends nothing until it has received an FPDU (RFC 5044 section 7.1.2).
    may_send: bool,
    /// A message of `rtr` is still to be sent.
    is_rtr_pending: bool,
    /// The ready-to-receive message, or the last one of [`send_empty_write`](Self::send_empty_write).
    rtr: Option<RtrKind>,
    /// Its consumer knows no connections: see [`set_paired`](Self::set_paired).
    is_paired: bool,
    terminate_bit_order: TerminateBitOrder,
    first_msn: Msn,
    transmitter: Transmitter,
    requester: Requester,
    responder: Responder,
    receive: ReceiveState,
    errors: StreamErrors,
    terminate: Option<Box<OutgoingTerminate>>,
}

impl QueuePair {
    /// A queue pair in IDLE; allocates nothing.
    pub fn new(attr: QpInitAttr) -> Self {
        let (first_msn, marker_position) = (Msn::FIRST, MarkerPosition::NO_MARKERS);
        let policy = OutOfOrderPolicy::Off;
        Self {
            attr,
            state: RdmapState::Idle,
            crc: false,
            stream_open: false,
            was_closed: false,
            wants_abort: false,
            may_send: false,
            is_rtr_pending: false,
            rtr: None,
            is_paired: false,
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

    /// The stream is in FPDU mode. `emss`: payload bytes of a full TCP segment. Ignored unless the
    /// queue pair is IDLE.
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

    /// In which bit order this queue pair sends its Terminate; before [`set_rts`](Self::set_rts).
    pub fn set_terminate_bit_order(&mut self, order: TerminateBitOrder) {
        self.terminate_bit_order = order;
    }

    /// Number of the first message of each queue in both directions, Terminates aside; before
    /// [`set_rts`](Self::set_rts). See [`MpaConfig::first_msn`](crate::MpaConfig::first_msn).
    pub fn set_first_msn(&mut self, first: Msn) {
        self.first_msn = first;
    }

    /// The consumer has named the peer's queue pair and knows of no connection, as with InfiniBand:
    /// the end of the stream is nothing that it hears of, until it sends. Then the first work request
    /// completes with RETRY_EXC_ERR, when its owner flushes the queue pair, which goes to ERROR. Before
    /// [`set_rts`](Self::set_rts).
    pub fn set_paired(&mut self, is_paired: bool) {
        self.is_paired = is_paired;
    }

    /// The same.
    pub fn is_paired(&self) -> bool {
        self.is_paired
    }

    /// How long an untagged message may wait for a receive work request, in milliseconds; 0: not at
    /// all. Before [`set_rts`](Self::set_rts), and when such a wait is to end.
    pub fn set_receive_wait(&mut self, milliseconds: u32) {
        self.receive.receive_wait_ms = milliseconds;
    }

    /// The same.
    pub fn receive_wait_ms(&self) -> u32 {
        self.receive.receive_wait_ms
    }

    /// [`receive_in_order`](Self::receive_in_order) has stopped at a message for which no receive
    /// work request is posted. Call it again when there may be one; when the time is over, after
    /// `set_receive_wait(0)`, for the Terminate.
    #[inline]
    pub fn awaits_receive(&self) -> bool {
        self.receive.awaits_receive
    }

    /// The stream is to be looked at again.
    pub fn stop_awaiting_receive(&mut self) {
        self.receive.awaits_receive = false;
    }

    /// The effective MSS changed; FPDUs that TCP does not have yet follow it. `emss`: payload bytes of
    /// a full TCP segment.
    pub fn set_emss(&mut self, emss: u32) {
        self.transmitter.set_emss(emss);
    }

    /// The peer has sent an FPDU.
    pub fn has_received(&self) -> bool {
        self.receive.has_first_fpdu
    }

    /// Sends an RDMA Write of nothing, between messages; only when TCP has nothing of this stream
    /// that is not acknowledged. Not while a message is under way, or none may be sent.
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

    /// Changes what the peer may not do from now on: of [`Access::REMOTE`].
    pub fn deny_access(&mut self, denied: Access) {
        self.attr.denied_access = denied;
    }

    /// What it was created with.
    pub fn init_attr(&self) -> &QpInitAttr {
        &self.attr
    }

    /// Current state.
    pub fn state(&self) -> RdmapState {
        self.state
    }

    /// [`next_record`](Self::next_record) has something to send besides what may wait in the ring.
    pub fn has_output(&self) -> bool {
        match self.state {
            RdmapState::Terminate => self.has_unsent_terminate(),
            RdmapState::Closing => self.transmitter.open_message != OpenMessage::None,
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

    fn has_unsent_terminate(&self) -> bool {
        self.terminate
            .as_ref()
            .is_some_and(|terminate| !terminate.is_queued)
    }

    /// Starts no further work request until [`resume_send_queue`](Self::resume_send_queue);
    /// [`QpEvent::SqDrained`] is posted when those that are started are completed. False: not in RTS.
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

    /// From draining or drained back to sending. False: not in RTS.
    pub fn resume_send_queue(&mut self) -> bool {
        let is_rts = self.state == RdmapState::Rts;
        if is_rts {
            self.requester.drain = DrainState::Inactive;
        }
        is_rts
    }

    /// How far a drain is; of no meaning outside of RTS.
    pub fn drain_state(&self) -> DrainState {
        self.requester.drain
    }

    /// Posts the event when the last work request that was started is completed.
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

    /// The Terminate that the peer sent, if it did.
    pub fn received_terminate(&self) -> Option<TerminateCode> {
        self.errors.received
    }

    /// The error that this side found first, as it went (or would have gone) into a Terminate.
    pub fn found_error(&self) -> Option<TerminateCode> {
        self.errors.found
    }

    /// Work requests are taken out of the send ring and not completed.
    pub fn has_outstanding_sends(&self) -> bool {
        !self.requester.is_idle()
    }

    /// IRD and ORD: Reads that the peer may have outstanding, and Reads that this side may.
    pub fn read_depths(&self) -> (u16, u16) {
        (self.responder.ird, self.requester.ord)
    }

    /// The memory windows that may be bound to this queue pair, by the keys that they were allocated
    /// with. They have to be unbound when it goes.
    pub fn take_bound_windows(&mut self) -> Vec<Stag> {
        std::mem::take(&mut self.requester.bound_windows)
            .into_iter()
            .collect()
    }

    /// Largest ULPDU of an FPDU as of now, in octets (RFC 5044 section 4.1).
    pub fn mulpdu(&self) -> u16 {
        self.transmitter.mulpdu
    }

    /// A responder that has not received an FPDU yet, and may not send therefore.
    pub fn is_awaiting_first_fpdu(&self) -> bool {
        self.state == RdmapState::Rts && !self.may_send
    }
}
