//! The life of a queue pair in its worker: one state at a time, and every state in which something
//! is awaited of a peer has a deadline, but for RTS.
//!
//! ```text
//!   Connect                  Accept              InstallQp (moved to ERROR without a connection)
//!      |                       |                     |
//!  TcpConnecting               |                     |
//!      | CONNECTED:            |                     |
//!      | MPA request           |                     |
//!  MpaNegotiation              |                     |
//!      | MPA reply             | MPA reply           |
//!      '-------> Running <-----'                     |
//!                 |  |  |                            |
//!   disconnect,   |  |  | an error, or a Terminate   |
//!   peer's FIN    |  |  | of either side             |
//!                 |  |  '--------.                   |
//!  FinishingMessage  |      Terminating              |
//!                 |  |           |                   |
//!    last FPDU    v  v           v Terminate queued  |
//!                   Closing: FIN queued              |
//!                      | both FINs, RST, TCP gave up |
//!                      v                             v
//!                 Disconnected: flushes what is posted
//!
//!  DestroyQp while data is unacknowledged: Destroying, then out of the table; else out at once.
//!  An error without Terminate (reset, moved to ERROR, a failed build): RST, Disconnected.
//!  A set-up that fails, or whose queue pair is moved to ERROR: out of the table; the control thread
//!  has the rings back for a new attempt.
//! ```
//!
//! | state | awaits | for how long | then |
//! |---|---|---|---|
//! | `Unconnected` | nothing: the command that put it here goes on | | |
//! | `TcpConnecting` | TCP, which has its own limits | the consumer's time-out, else [`TCP_CONNECT_TIMEOUT`] | RST, set-up failed |
//! | `MpaNegotiation` | the MPA reply | what is left of the consumer's time-out, at most `reply_timeout_ms` | RST, set-up failed |
//! | `AwaitingListener` | somebody who listens, where the consumer allows another try | [`REFUSAL_PAUSE`](super::connect::REFUSAL_PAUSE) | `TcpConnecting` |
//! | `Running` | | RTS has no deadline; TCP's timers find a dead peer | |
//! | | the first FPDU of a peer that accepted, where `wake_silent_peer_ms` says so | see [`silent_peer`](super::silent_peer) | an RDMA Write of nothing |
//! | `FinishingMessage` | room for the FPDUs of the message under way | [`MESSAGE_STALL_TIMEOUT`] since the last acknowledgement | RST, `Disconnected` |
//! | `Terminating` | room for the Terminate | [`CLOSE_TIMEOUT`] | RST, `Disconnected` |
//! | `Closing` | the acknowledgement of all data, both FINs | [`CLOSE_TIMEOUT`] | RST, `Disconnected` |
//! | `Destroying` | the same | [`DESTROY_GRACE`] | RST, out of the table |
//! | `AwaitingRetries` | nothing: what a paired queue pair sends has no peer any more | [`PAIR_RETRIES`] from the stream's end, or from the first request after it | `Disconnected`, flushed |
//! | `Disconnected` | nothing of a peer: the consumer destroys it or connects again | | |
//!
//! The iWARP protocol's own state (RFC 5040 section 6.8; [`RdmapState`]) is part of
//! [`siw_iwarp::QueuePair`]. [`Worker::follow_protocol`] derives this one from it after each call,
//! and is the only place that decides to close a stream.

use std::time::Duration;

use siw_iwarp::mpa::{MpaConfig, MpaInitiator};
use siw_iwarp::{CloseKind, CloseReason, NegotiatedParameters, QueuePair, RdmapState};
use siw_shm::control;
use siw_tcp::{ConnId, Instant};

use super::Worker;
use super::deadlines::DeadlineOwner;
use super::messages::{ConnectFailure, ConnectParams, DisconnectReason, Event};
use super::silent_peer::PeerWake;
use super::worker_qp::QpSlot;
use crate::link_traits::PayloadPolicy;

/// TCP has its own timers until the connection stands; this one bounds what they leave open.
pub(super) const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(200);
/// How long a message that is under way at a disconnect may wait for the peer to take more of it.
const MESSAGE_STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a Terminate may wait for room, and how long a graceful close may take, before the
/// connection is reset.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a destroyed queue pair may go on to get its last bytes acknowledged.
const DESTROY_GRACE: Duration = Duration::from_millis(100);
/// How long it takes until what a paired queue pair sends fails since its peer has left: the eight tries
/// of 67 ms that InfiniBand makes with a `timeout` of 14 and a `retry_cnt` of 7, which most programs set.
/// One whose peer is done first has read all that it waits for by then, and leaves.
pub const PAIR_RETRIES: Duration = Duration::from_millis(540);

/// Where a queue pair is in its life; see the module.
pub(super) enum LifecycleState {
    /// In the table, while the command that put it there is executed.
    Unconnected,
    TcpConnecting(Box<ConnectAttempt>),
    MpaNegotiation(Box<ConnectAttempt>),
    AwaitingListener(Box<ConnectAttempt>),
    Running {
        wake: Option<PeerWake>,
    },
    FinishingMessage {
        deadline: Instant,
    },
    Terminating {
        deadline: Instant,
    },
    Closing {
        deadline: Instant,
    },
    Destroying {
        deadline: Instant,
    },
    AwaitingRetries {
        deadline: Instant,
    },
    Disconnected,
}

/// The initiator's set-up.
pub(super) struct ConnectAttempt {
    pub(super) initiator: MpaInitiator,
    pub(super) params: ConnectParams,
    pub(super) config: MpaConfig,
    /// Of the current state.
    pub(super) deadline: Instant,
    /// Of the whole set-up, if the consumer gave a time-out.
    pub(super) consumer_deadline: Option<Instant>,
}

impl LifecycleState {
    /// When the state is given up.
    fn deadline(&self) -> Option<Instant> {
        match self {
            LifecycleState::TcpConnecting(attempt)
            | LifecycleState::MpaNegotiation(attempt)
            | LifecycleState::AwaitingListener(attempt) => Some(attempt.deadline),
            LifecycleState::FinishingMessage { deadline }
            | LifecycleState::Terminating { deadline }
            | LifecycleState::Closing { deadline }
            | LifecycleState::Destroying { deadline }
            | LifecycleState::AwaitingRetries { deadline } => Some(*deadline),
            LifecycleState::Running { wake } => wake.as_ref().map(|wake| wake.at),
            LifecycleState::Unconnected | LifecycleState::Disconnected => None,
        }
    }

    /// MPA set-up is over and the connection stands: there is a stream of FPDUs.
    #[inline]
    pub(super) fn has_stream(&self) -> bool {
        matches!(
            self,
            LifecycleState::Running { .. }
                | LifecycleState::FinishingMessage { .. }
                | LifecycleState::Terminating { .. }
                | LifecycleState::Closing { .. }
                | LifecycleState::Destroying { .. }
        )
    }

    /// A message is sent to its end before the stream is closed.
    #[inline]
    pub(super) fn is_finishing_message(&self) -> bool {
        matches!(self, LifecycleState::FinishingMessage { .. })
    }

    /// The connection is being set up by this side.
    fn is_connecting(&self) -> bool {
        matches!(
            self,
            LifecycleState::TcpConnecting(_)
                | LifecycleState::MpaNegotiation(_)
                | LifecycleState::AwaitingListener(_)
        )
    }
}

/// Its stream is over, and its consumer does not know that yet: see [`QueuePair::set_paired`].
fn is_quiet(protocol: &QueuePair) -> bool {
    protocol.is_paired() && protocol.state() == RdmapState::Idle
}

impl Worker {
    /// Puts a queue pair into another state, and its deadline into the list. Returns the old state.
    pub(super) fn enter_state(
        &mut self,
        slot: QpSlot,
        state: LifecycleState,
    ) -> Option<LifecycleState> {
        let queue_pair = self.queue_pairs.get_mut(slot)?;
        let owner = DeadlineOwner::QueuePair(slot);
        if let Some(old) = queue_pair.state.deadline() {
            self.deadlines.remove(old, owner);
        }
        if let Some(new) = state.deadline() {
            self.deadlines.insert(new, owner);
        }
        Some(std::mem::replace(&mut queue_pair.state, state))
    }

    /// MPA is through, on either side: the stream is in FPDU mode.
    pub(super) fn enter_running(
        &mut self,
        now: Instant,
        slot: QpSlot,
        conn: ConnId,
        negotiated: NegotiatedParameters,
        private_data: Vec<u8>,
    ) {
        self.enter_state(slot, LifecycleState::Running { wake: None });
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let port = &self.ports[queue_pair.port];
        let link = &port.output.link;
        queue_pair.rings.copied_up_to = link.copied_up_to(negotiated.crc);
        queue_pair.rings.awaits_releases = link.payload == PayloadPolicy::ReferenceUntilRelease;
        let stack = &port.stack;
        queue_pair
            .protocol
            .set_rts(negotiated, stack.effective_mss(conn) as u32);
        let qpn = queue_pair.rings.qpn;
        let addresses = stack.tcp_info(conn).map(|info| (info.local, info.remote));
        self.publish_state(now, slot);
        // What was posted before the connection stood may have been rung for at another worker.
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.rings.sq.clear_pending();
        }
        self.mark_ready(slot);
        if let Some((local, remote)) = addresses {
            self.post_event(Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            });
        }
        self.after_call(now, slot);
    }

    /// The set-up failed: reports it, and takes the queue pair out. The control thread hands the
    /// rings in again for a new attempt.
    pub(super) fn connect_failed(&mut self, now: Instant, slot: QpSlot, failure: ConnectFailure) {
        let Some(queue_pair) = self.take_out(slot) else {
            return;
        };
        if let Some(conn) = queue_pair.conn {
            self.give_up_connection(now, queue_pair.port, conn);
        }
        let qpn = queue_pair.rings.qpn;
        self.post_event(Event::ConnectFailed { qpn, failure });
    }

    /// The consumer disconnects.
    pub(super) fn disconnect_queue_pair(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        if queue_pair.state.has_stream() {
            queue_pair.protocol.disconnect();
            self.mark_ready(slot);
            self.report_and_follow(now, slot);
        } else if queue_pair.state.is_connecting() {
            self.abort_connection(now, slot);
            self.connect_failed(now, slot, ConnectFailure::Reset);
        }
    }

    /// The queue pair goes to ERROR: it flushes, and its connection is reset. A set-up under way
    /// fails.
    pub(super) fn end_in_error(&mut self, now: Instant, slot: QpSlot) {
        self.with_queue_pair(slot, |protocol, view| protocol.modify_to_error(view));
        self.report_and_follow(now, slot);
        let queue_pair = self.queue_pairs.get(slot);
        if queue_pair.is_some_and(|queue_pair| queue_pair.state.is_connecting()) {
            self.abort_connection(now, slot);
            self.connect_failed(now, slot, ConnectFailure::Reset);
        }
    }

    /// A queue pair that never had a connection was moved to ERROR, by its consumer or since its pair
    /// could not be reached.
    pub(super) fn enter_disconnected(&mut self, now: Instant, slot: QpSlot) {
        self.enter_state(slot, LifecycleState::Disconnected);
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot)
            && queue_pair.protocol.is_paired()
        {
            queue_pair.protocol.set_peer_lost();
        }
        self.end_in_error(now, slot);
        self.post_last_wqe(slot);
    }

    /// Brings the life cycle to where the protocol went: it may want its stream closed after an
    /// error, a Terminate, a disconnect. Callers after whose call the protocol may have something to
    /// send mark the queue pair as ready themselves; without room in TCP that waits for TCP's events,
    /// since a queue pair that marks itself again would keep the worker busy until then.
    pub(super) fn follow_protocol(&mut self, now: Instant, slot: QpSlot) {
        self.publish_state(now, slot);
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let Some(conn) = queue_pair.conn else { return };
        let port = queue_pair.port;
        let state = &queue_pair.state;
        match queue_pair.protocol.requested_close() {
            Some(CloseKind::Abort) => {
                self.ports[port].stack.abort(now, conn);
                self.on_connection_ended(now, port, conn, slot, CloseReason::Reset);
            }
            Some(CloseKind::Graceful) => {
                let is_open = matches!(
                    state,
                    LifecycleState::Running { .. }
                        | LifecycleState::FinishingMessage { .. }
                        | LifecycleState::Terminating { .. }
                );
                if is_open {
                    let deadline = now + CLOSE_TIMEOUT;
                    self.enter_state(slot, LifecycleState::Closing { deadline });
                    self.ports[port].stack.close(now, conn);
                }
            }
            None if !matches!(state, LifecycleState::Running { .. }) => {}
            None => match queue_pair.protocol.state() {
                RdmapState::Closing => {
                    let deadline = now + MESSAGE_STALL_TIMEOUT;
                    self.enter_state(slot, LifecycleState::FinishingMessage { deadline });
                }
                RdmapState::Terminate => {
                    let deadline = now + CLOSE_TIMEOUT;
                    self.enter_state(slot, LifecycleState::Terminating { deadline });
                }
                _ => {}
            },
        }
    }

    /// The peer acknowledged data: a message that is being finished has its time anew.
    #[cold]
    pub(super) fn extend_message_deadline(&mut self, now: Instant, slot: QpSlot) {
        let deadline = now + MESSAGE_STALL_TIMEOUT;
        self.enter_state(slot, LifecycleState::FinishingMessage { deadline });
    }

    /// The connection under a stream is gone: everything outstanding completes.
    pub(super) fn on_connection_ended(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: QpSlot,
        reason: CloseReason,
    ) {
        self.with_queue_pair(slot, |protocol, view| protocol.on_tcp_closed(view, reason));
        self.ports[port].stack.release(now, conn);
        self.context.split_records.remove_queue_pair(slot);
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.conn = None;
        }
        let old = self.enter_state(slot, LifecycleState::Disconnected);
        self.publish_state(now, slot);
        if matches!(old, Some(LifecycleState::Destroying { .. })) {
            self.report_and_follow(now, slot);
            self.finish_destroy(now, slot);
        } else {
            let queue_pair = self.queue_pairs.get(slot);
            if !queue_pair.is_some_and(|queue_pair| is_quiet(&queue_pair.protocol)) {
                self.post_last_wqe(slot);
            }
            self.post_disconnected(slot, reason);
            self.report_and_follow(now, slot);
        }
    }

    /// A state had its time.
    pub(super) fn on_queue_pair_deadline(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        if matches!(queue_pair.state, LifecycleState::AwaitingListener(_)) {
            self.connect_again(now, slot);
        } else if matches!(queue_pair.state, LifecycleState::Running { .. }) {
            self.wake_silent_peer(now, slot);
        } else if queue_pair.state.is_connecting() {
            self.abort_connection(now, slot);
            self.connect_failed(now, slot, ConnectFailure::TimedOut);
        } else if matches!(queue_pair.state, LifecycleState::AwaitingRetries { .. }) {
            self.enter_state(slot, LifecycleState::Disconnected);
            self.flush_posted(slot);
            self.report_and_follow(now, slot);
        } else if let Some(conn) = queue_pair.conn {
            let port = queue_pair.port;
            self.ports[port].stack.abort(now, conn);
            self.on_connection_ended(now, port, conn, slot, CloseReason::TimedOut);
        }
    }

    /// The consumer destroys the queue pair. What was posted before the end still arrives when it
    /// can.
    pub(super) fn destroy_queue_pair(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        queue_pair.rings.silence_completions();
        if let Some(conn) = queue_pair.conn.filter(|_| queue_pair.state.has_stream()) {
            let port = queue_pair.port;
            let info = self.ports[port].stack.tcp_info(conn);
            if info.is_some_and(|info| info.in_flight > 0 || info.unsent > 0) {
                queue_pair.protocol.disconnect();
                let deadline = now + DESTROY_GRACE;
                self.enter_state(slot, LifecycleState::Destroying { deadline });
                self.mark_ready(slot);
                self.ports[port].stack.close(now, conn);
                return;
            }
        }
        self.finish_destroy(now, slot);
    }

    fn finish_destroy(&mut self, now: Instant, slot: QpSlot) {
        if let Some((qpn, windows)) = self.drop_queue_pair(now, slot, false) {
            self.post_event(Event::QpDestroyed { qpn, windows });
        }
    }

    fn abort_connection(&mut self, now: Instant, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get(slot)
            && let Some(conn) = queue_pair.conn
        {
            self.ports[queue_pair.port].stack.abort(now, conn);
        }
    }

    fn post_disconnected(&mut self, slot: QpSlot, reason: CloseReason) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let qpn = queue_pair.rings.qpn;
        let protocol = &queue_pair.protocol;
        let by_tcp = match reason {
            CloseReason::Closed => None,
            CloseReason::Reset => Some(DisconnectReason::Reset),
            CloseReason::TimedOut => Some(DisconnectReason::TimedOut),
        };
        let received = protocol.received_terminate();
        let received = received.map(DisconnectReason::TerminateReceived);
        let sent = protocol.found_error().map(DisconnectReason::TerminateSent);
        let failure = received.or(sent).or(by_tcp);
        self.post_event(Event::Disconnected { qpn, failure });
    }

    /// The queue pair takes nothing more from its shared receive queue: what it had taken is
    /// completed.
    fn post_last_wqe(&mut self, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get(slot)
            && queue_pair.rings.srq.is_some()
        {
            let (client, qpn) = (queue_pair.client, queue_pair.rings.qpn);
            self.post_event(Event::LastWqe { client, qpn });
        }
    }

    /// Writes the state where the client library looks, and flushes what raced with it: a client that
    /// posted without having seen the new state. What a paired queue pair sends fails later.
    fn publish_state(&mut self, now: Instant, slot: QpSlot) {
        self.write_state(slot);
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        if !queue_pair.only_flushes() {
            return;
        }
        let is_awaiting = matches!(queue_pair.state, LifecycleState::AwaitingRetries { .. });
        if !is_quiet(&queue_pair.protocol) {
            self.flush_posted(slot);
        } else if !is_awaiting && queue_pair.has_sends() {
            let deadline = now + PAIR_RETRIES;
            self.enter_state(slot, LifecycleState::AwaitingRetries { deadline });
        }
    }

    /// Flushes what is posted to a queue pair without a stream.
    fn flush_posted(&mut self, slot: QpSlot) {
        let flushed = self.with_queue_pair(slot, |protocol, view| {
            let was_quiet = is_quiet(protocol);
            protocol.flush_queues(view);
            let has_failed = was_quiet && !is_quiet(protocol);
            (protocol.has_unflushed(), has_failed)
        });
        if flushed.is_some_and(|(has_more, _)| has_more) {
            self.mark_ready(slot);
        }
        if flushed.is_some_and(|(_, has_failed)| has_failed) {
            self.post_last_wqe(slot);
        }
        // After a clean close, what was flushed has led from IDLE to ERROR.
        self.write_state(slot);
    }

    fn write_state(&mut self, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let protocol = &queue_pair.protocol;
        let state = match protocol.state() {
            RdmapState::Idle => control::QpState::Idle,
            RdmapState::Rts => control::QpState::Rts,
            // Its consumer learns by the next send that there is nobody any more.
            RdmapState::Closing if protocol.is_paired() => control::QpState::Rts,
            RdmapState::Closing => control::QpState::Closing,
            RdmapState::Terminate => control::QpState::Terminate,
            RdmapState::Error => control::QpState::Error,
        };
        queue_pair.rings.sq.set_qp_state(state as u32);
    }
}
