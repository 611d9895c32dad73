//! Life cycle of a queue pair in its worker. A queue pair is in one state at a time; each state that
//! awaits something from a peer has a deadline, except RTS.
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
//!                 Disconnected: flushes posted requests
//!
//!  DestroyQp while data is unacknowledged: Destroying, then removed; otherwise removed at once.
//!  The client departs while a stream is Running: Lingering, then removed (see `lingering.rs`).
//!  An error without Terminate (reset, moved to ERROR, a failed build): RST, Disconnected.
//!  A failed set-up: removed; the control thread gets the untouched rings back for a new attempt.
//!  Moved to ERROR during the set-up: Disconnected. The flush has read the rings, so they stay here.
//! ```
//!
//! | state | awaits | for how long | then |
//! |---|---|---|---|
//! | `Unconnected` | nothing: the command that inserted the queue pair continues | | |
//! | `MappingPort` | the peer's port mapper | 20 ms, 1 s after a refusal, see [`port_mapper`](super::port_mapper) | `TcpConnecting` |
//! | `TcpConnecting` | TCP, which has its own limits | the consumer's time-out, else [`TCP_CONNECT_TIMEOUT`] | RST, set-up failed |
//! | `MpaNegotiation` | the MPA reply | the rest of the consumer's time-out, else `reply_timeout_ms` | RST, set-up failed |
//! | `AwaitingListener` | a listener at the peer, if the consumer allows another try | [`REFUSAL_PAUSE`](super::connect::REFUSAL_PAUSE) | `TcpConnecting` |
//! | `Running` | | RTS has no deadline; TCP's timers find a dead peer | |
//! | | the first FPDU of the peer, if `wake_silent_peer_ms` is set | see [`Connections::wake_silent_peer`] | initiator: a zero-length RDMA Write; responder: it may send |
//! | `FinishingMessage` | room for the FPDUs of the message under way, and for responses that the peer's FIN left owed | [`STALL_TIMEOUT`] since the last progress | RST, `Disconnected` |
//! | `Terminating` | room for the Terminate | [`STALL_TIMEOUT`] since the last progress | RST, `Disconnected` |
//! | `Closing` | the acknowledgement of all data, both FINs | [`STALL_TIMEOUT`] since the last progress | RST if data is unacknowledged, `Disconnected` |
//! | `Destroying` | the acknowledgement of all data | [`destroy_grace`] since the last progress, at most [`STALL_TIMEOUT`] | RST if data is unacknowledged, removed |
//! | `Lingering` | the acknowledgement of all requests posted before the client departed | [`STALL_TIMEOUT`] since the last progress, at most TCP's `orphan_timeout` | RST if data is unacknowledged, removed |
//! | `AwaitingRetries` | nothing: the peer of a paired queue pair has left | [`PAIR_RETRIES`] from the stream's end, or from the first request after it | `Disconnected`, flushed |
//! | `Datagrams` | nothing: a queue pair of datagrams, see [`datagrams`](super::datagrams) | | |
//! | `Disconnected` | nothing from a peer: the consumer destroys it or connects again | | |
//!
//! Progress of an ending stream is an acknowledgement or data of the peer. A reset would destroy data
//! that the peer's TCP has acknowledged and its program has not read. Therefore a connection whose data
//! is acknowledged is released and not reset, and TCP ends it within its own limits for FIN-WAIT-1 and
//! FIN-WAIT-2.
//!
//! The iWARP protocol has a state of its own in [`siw_iwarp::QueuePair`] (RFC 5040 section 6.8;
//! [`RdmapState`]). [`Connections::follow_protocol`] derives the life-cycle state from it after each call,
//! and is the only place that decides to close a stream.

use std::time::Duration;

use siw_iwarp::{
    CloseKind, CloseReason, DrainState, NegotiatedParameters, QueuePair, RdmapState, TerminateCode,
};
use siw_net::{ConnId, Instant};
use siw_shm::control;
use siw_tcp::{TcpInfo, TcpState};

use super::connections::{Connections, has_no_data_in_flight};
use super::deadlines::DeadlineOwner;
use super::drop_reasons::DropReason;
use super::lifecycle_state::{LifecycleState, PeerWake, UnpolledCompletions};
use super::messages::{
    ConnectFailure, ConnectionSnapshot, DisconnectReason, Event, ModifyTarget, QpInfo,
};
use super::slots::QpSlot;
use super::thresholds::THRESHOLDS;
use super::worker_qp::WorkerQp;
use crate::ids::{CommandToken, Qpn};

/// Bounds the TCP set-up in cases that TCP's own timers leave open.
pub(super) const TCP_CONNECT_TIMEOUT: Duration = Duration::from_secs(200);
/// Time without progress after which an ending stream is given up: longer than the pauses of a slow
/// reader and the outages of a link.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Limits of [`destroy_grace`].
const DESTROY_GRACE_MIN: Duration = Duration::from_millis(100);
const DESTROY_GRACE_MAX: Duration = Duration::from_secs(2);
/// Time until sends of a paired queue pair fail after its peer has left. InfiniBand makes eight tries
/// of 67 ms with a `timeout` of 14 and a `retry_cnt` of 7, which most programs set. A consumer whose
/// peer finishes first has read everything it waits for by then, and leaves.
pub const PAIR_RETRIES: Duration = Duration::from_millis(540);
/// Longest pause between two wake-ups of a silent peer. Each pause is twice the one before.
const LONGEST_WAKE_PAUSE: Duration = Duration::from_secs(5);
/// Maximum time that the client has to poll the completions that preceded a disconnect.
const POLL_PATIENCE: Duration = Duration::from_millis(10);
/// Time between two looks at the consumer indices.
const POLL_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// True if the stream has ended without the consumer having been notified: see
/// [`QueuePair::set_paired`].
fn is_quiet(protocol: &QueuePair) -> bool {
    protocol.is_paired() && protocol.state() == RdmapState::Idle
}

/// Time without progress after which a destroyed queue pair is removed: the next acknowledgement may
/// take a retransmission.
fn destroy_grace(info: Option<&TcpInfo>) -> Duration {
    let rto = info.map_or(Duration::ZERO, |info| info.rto);
    (DESTROY_GRACE_MIN + 2 * rto).min(DESTROY_GRACE_MAX)
}

impl Connections {
    /// Moves a queue pair to another state and updates its deadline in the list. Returns the old
    /// state.
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

    /// Starts the FPDU stream after MPA set-up, on either side.
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
        let stack = &port.stack;
        queue_pair
            .protocol
            .set_rts(negotiated, stack.effective_mss(conn) as u32);
        let payload = link.stream_payload(negotiated.crc, stack.is_self_addressed(conn));
        queue_pair.rings.awaits_releases = payload.awaits_releases;
        queue_pair.protocol.set_copied_up_to(payload.copied_up_to);
        let qpn = queue_pair.rings.qpn;
        let addresses = stack.tcp_info(conn).map(|info| (info.local, info.remote));
        self.publish_state(now, slot);
        // Doorbells for requests posted before the connection was established may have gone to another
        // worker.
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

    /// Reports a failed set-up and removes the queue pair. The control thread hands the rings in again
    /// for a new attempt.
    pub(super) fn connect_failed(&mut self, now: Instant, slot: QpSlot, failure: ConnectFailure) {
        let queue_pair = self.queue_pairs.get(slot);
        let last = queue_pair.and_then(|queue_pair| queue_pair.last_snapshot(&self.ports, slot.0));
        let last = last.map(Box::new);
        let Some(queue_pair) = self.take_out(slot) else {
            return;
        };
        if let Some(conn) = queue_pair.conn {
            self.give_up_connection(now, queue_pair.port, conn);
        }
        let qpn = queue_pair.rings.qpn;
        self.drops.count(DropReason::of_connect(&failure));
        self.report_faults();
        self.post_event(Event::ConnectFailed {
            qpn,
            failure,
            last,
            is_kept: false,
        });
    }

    /// Ends the set-up of a queue pair that is moved to ERROR, and keeps the queue pair: it flushes its
    /// rings from now on, and a worker that got them again would flush them again.
    fn end_set_up(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let last = queue_pair.last_snapshot(&self.ports, slot.0).map(Box::new);
        let (qpn, port) = (queue_pair.rings.qpn, queue_pair.port);
        if let Some(conn) = queue_pair.conn.take() {
            self.ports[port].stack.abort(now, conn);
            self.give_up_connection(now, port, conn);
        }
        self.enter_state(slot, LifecycleState::Disconnected);
        let failure = ConnectFailure::Reset;
        self.drops.count(DropReason::of_connect(&failure));
        self.report_faults();
        self.post_event(Event::ConnectFailed {
            qpn,
            failure,
            last,
            is_kept: true,
        });
        self.post_last_wqe(slot);
    }

    /// Disconnects a queue pair for its consumer.
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

    /// Moves the queue pair to ERROR: flushes it and resets its connection. A set-up under way ends.
    pub(super) fn end_in_error(&mut self, now: Instant, slot: QpSlot) {
        let queue_pair = self.queue_pairs.get(slot);
        if queue_pair.is_some_and(|queue_pair| queue_pair.state.is_connecting()) {
            self.end_set_up(now, slot);
        }
        let is_of_datagrams = self
            .queue_pairs
            .get(slot)
            .is_some_and(WorkerQp::is_of_datagrams);
        if is_of_datagrams {
            self.enter_state(slot, LifecycleState::Disconnected);
        }
        self.with_queue_pair(slot, |protocol, view| protocol.modify_to_error(view));
        self.report_and_follow(now, slot);
        if is_of_datagrams {
            self.post_last_wqe(slot);
        }
    }

    /// Moves a queue pair that never had a connection to ERROR, for its consumer or because its peer
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

    /// Derives the life-cycle state from the protocol's state: the protocol requests a close of its
    /// stream after an error, a Terminate or a disconnect. Callers after whose call the protocol may
    /// have data to send mark the queue pair ready themselves. If TCP has no room, TCP's events resume
    /// sending; a queue pair that marked itself ready again would keep the worker busy until then.
    pub(super) fn follow_protocol(&mut self, now: Instant, slot: QpSlot) {
        self.publish_state(now, slot);
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let Some(conn) = queue_pair.conn else { return };
        let port = queue_pair.port;
        let state = &queue_pair.state;
        let close = queue_pair.protocol.requested_close();
        if matches!(state, LifecycleState::Lingering { .. }) && close.is_some() {
            // The peer reads no more.
            return self.finish_lingering(now, slot);
        }
        match close {
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
                    let deadline = now + STALL_TIMEOUT;
                    self.enter_state(slot, LifecycleState::Closing { deadline });
                    self.ports[port].stack.close(now, conn);
                }
            }
            None if !matches!(state, LifecycleState::Running { .. }) => {}
            None => match queue_pair.protocol.state() {
                RdmapState::Closing => {
                    let deadline = now + STALL_TIMEOUT;
                    self.enter_state(slot, LifecycleState::FinishingMessage { deadline });
                }
                RdmapState::Terminate => {
                    let deadline = now + STALL_TIMEOUT;
                    self.enter_state(slot, LifecycleState::Terminating { deadline });
                }
                _ => {}
            },
        }
    }

    /// Restarts the deadline of an ending stream after progress.
    #[cold]
    pub(super) fn extend_deadline(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let deadline = now + STALL_TIMEOUT;
        let state = match &queue_pair.state {
            LifecycleState::FinishingMessage { .. } => {
                LifecycleState::FinishingMessage { deadline }
            }
            LifecycleState::Terminating { .. } => LifecycleState::Terminating { deadline },
            LifecycleState::Closing { .. } => LifecycleState::Closing { deadline },
            LifecycleState::Lingering { end, .. } => LifecycleState::Lingering {
                deadline: deadline.min(*end),
                end: *end,
            },
            LifecycleState::Destroying { end, .. } => {
                let stack = &self.ports[queue_pair.port].stack;
                let info = queue_pair.conn.and_then(|conn| stack.tcp_info(conn));
                let deadline = (now + destroy_grace(info.as_ref())).min(*end);
                LifecycleState::Destroying {
                    deadline,
                    end: *end,
                }
            }
            _ => return,
        };
        self.enter_state(slot, state);
    }

    /// Completes everything outstanding after the connection below a stream has ended.
    pub(super) fn on_connection_ended(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: QpSlot,
        reason: CloseReason,
    ) {
        // Before the flushed requests are added.
        let unpolled = self.find_unpolled(now, slot);
        let queue_pair = self.queue_pairs.get(slot);
        let close = queue_pair.and_then(|queue_pair| queue_pair.protocol.requested_close());
        let is_own_abort = matches!(close, Some(CloseKind::Abort));
        // While TCP has its numbers.
        let last = queue_pair.and_then(|queue_pair| queue_pair.last_snapshot(&self.ports, slot.0));
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
        } else if matches!(old, Some(LifecycleState::Lingering { .. })) {
            self.finish_lingering(now, slot);
        } else {
            let queue_pair = self.queue_pairs.get(slot);
            if !queue_pair.is_some_and(|queue_pair| is_quiet(&queue_pair.protocol)) {
                self.post_last_wqe(slot);
            }
            self.post_disconnected(slot, reason, unpolled.is_some(), is_own_abort, last);
            if let Some(unpolled) = unpolled {
                self.await_polls(now, slot, unpolled);
            }
            self.report_and_follow(now, slot);
        }
    }

    /// Handles the expiry of a state's deadline.
    pub(super) fn on_queue_pair_deadline(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        if matches!(queue_pair.state, LifecycleState::AwaitingListener(_)) {
            self.connect_again(now, slot);
        } else if matches!(queue_pair.state, LifecycleState::MappingPort(_)) {
            self.continue_mapping(now, slot);
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
            let stack = &mut self.ports[port].stack;
            let info = stack.tcp_info(conn);
            let is_fin_acked = info
                .as_ref()
                .is_some_and(|info| info.state == TcpState::FinWait2);
            let is_closing = !matches!(queue_pair.state, LifecycleState::Terminating { .. });
            if !(is_closing && has_no_data_in_flight(info.as_ref())) {
                stack.abort(now, conn);
            }
            let reason = if is_fin_acked {
                CloseReason::Closed
            } else {
                CloseReason::TimedOut
            };
            self.on_connection_ended(now, port, conn, slot, reason);
        }
    }

    /// Destroys a queue pair for its consumer. Requests posted before are still delivered if possible.
    pub(super) fn destroy_queue_pair(&mut self, now: Instant, slot: QpSlot) {
        self.leave_completion_queues(slot);
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        if let Some(conn) = queue_pair.conn.filter(|_| queue_pair.state.has_stream()) {
            let port = queue_pair.port;
            let info = self.ports[port].stack.tcp_info(conn);
            if !has_no_data_in_flight(info.as_ref()) {
                queue_pair.protocol.disconnect();
                let deadline = now + destroy_grace(info.as_ref());
                let end = now + STALL_TIMEOUT;
                self.enter_state(slot, LifecycleState::Destroying { deadline, end });
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

    fn post_disconnected(
        &mut self,
        slot: QpSlot,
        reason: CloseReason,
        has_unpolled: bool,
        is_own_abort: bool,
        last: Option<ConnectionSnapshot>,
    ) {
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
        let found = protocol.found_error().map(DisconnectReason::TerminateSent);
        // TCP knows better how the connection was lost.
        let is_lost = protocol.found_error() == Some(TerminateCode::MPA_TCP_LOST);
        let sent = found.filter(|_| !is_lost);
        let failure = received.or(sent).or(by_tcp).or(found);
        // An operator or the client has ended it, without an error.
        let is_wanted = is_own_abort && matches!(failure, Some(DisconnectReason::Reset));
        if let Some(reason) = failure.as_ref().filter(|_| !is_wanted) {
            self.drops.count(DropReason::of_end(reason));
        }
        // The phase before the end, with the Terminates of the end.
        let rdmap = protocol.info();
        let last = last.map(|last| Box::new(ConnectionSnapshot { rdmap, ..last }));
        self.report_faults();
        self.post_event(Event::Disconnected {
            qpn,
            failure,
            has_unpolled,
            last,
        });
    }

    /// Reports that the queue pair takes no more requests from its shared receive queue: all that it
    /// had taken are completed.
    fn post_last_wqe(&mut self, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get(slot)
            && queue_pair.rings.srq.is_some()
        {
            let (client, qpn) = (queue_pair.client, queue_pair.rings.qpn);
            self.post_event(Event::LastWqe { client, qpn });
        }
    }

    /// Publishes the state to the client library and flushes requests that a client posted before it
    /// saw the new state. Sends of a paired queue pair fail later.
    pub(super) fn publish_state(&mut self, now: Instant, slot: QpSlot) {
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

    /// Flushes the requests posted to a queue pair without a stream.
    fn flush_posted(&mut self, slot: QpSlot) {
        let flushed = self.with_queue_pair(slot, |protocol, view| {
            let (was_quiet, was_idle) = (is_quiet(protocol), protocol.state() == RdmapState::Idle);
            protocol.flush_queues(view);
            let has_failed = was_quiet && !is_quiet(protocol);
            // After a clean close, the flush moves the queue pair from IDLE to ERROR: a receive posted before its
            // client sees that is flushed in the next batch.
            let has_entered_error = was_idle && protocol.state() == RdmapState::Error;
            (protocol.has_unflushed() || has_entered_error, has_failed)
        });
        if flushed.is_some_and(|(has_more, _)| has_more) {
            self.mark_ready(slot);
        }
        if flushed.is_some_and(|(_, has_failed)| has_failed) {
            self.post_last_wqe(slot);
        }
        self.write_state(slot);
    }

    fn write_state(&mut self, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let protocol = &queue_pair.protocol;
        let state = match protocol.state() {
            RdmapState::Idle if queue_pair.is_of_datagrams() => control::QpState::Rts,
            RdmapState::Idle => control::QpState::Idle,
            RdmapState::Rts => control::QpState::Rts,
            // The consumer learns from its next send that the peer has left.
            RdmapState::Closing if protocol.is_paired() => control::QpState::Rts,
            RdmapState::Closing => control::QpState::Closing,
            RdmapState::Terminate => control::QpState::Terminate,
            RdmapState::Error => control::QpState::Error,
        };
        queue_pair.rings.sq.set_qp_state(state as u32);
    }

    /// Executes a requested change, and answers with the queue pair's state and the reason of a
    /// refusal.
    pub(super) fn modify_queue_pair(
        &mut self,
        now: Instant,
        qpn: Qpn,
        to: Option<ModifyTarget>,
        token: CommandToken,
    ) {
        let found = self.queue_pairs.find(qpn);
        let refused = match (to, found) {
            (Some(to), Some(slot)) => self.move_to(now, slot, to).err(),
            // The queue pair will be installed with the new rights.
            (Some(ModifyTarget::DenyAccess(_)), None) => None,
            // Its set-up has just failed: the control thread installs it in ERROR.
            (Some(ModifyTarget::Error), None) => None,
            (Some(_), None) => Some("its connection has just failed"),
            (None, _) => None,
        };
        let info = found
            .and_then(|slot| self.queue_pairs.get(slot))
            .map(queue_pair_info);
        let info = info.unwrap_or_else(|| match to {
            Some(ModifyTarget::Error) => QpInfo {
                state: control::QpState::Error,
                ..QpInfo::default()
            },
            _ => QpInfo::default(),
        });
        let info = Box::new(QpInfo { refused, ..info });
        self.post_event(Event::QpInfo { qpn, token, info });
    }

    fn move_to(
        &mut self,
        now: Instant,
        slot: QpSlot,
        to: ModifyTarget,
    ) -> Result<(), &'static str> {
        let moved = match to {
            ModifyTarget::Error => {
                self.end_in_error(now, slot);
                return Ok(());
            }
            ModifyTarget::Closing => {
                self.disconnect_queue_pair(now, slot);
                return Ok(());
            }
            ModifyTarget::DenyAccess(denied) => {
                self.with_queue_pair(slot, |protocol, _| protocol.deny_access(denied));
                return Ok(());
            }
            ModifyTarget::SendQueueDrain { is_quiet } => {
                if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
                    queue_pair.drains_quietly = is_quiet;
                }
                self.with_queue_pair(slot, |protocol, view| protocol.drain_send_queue(view))
            }
            ModifyTarget::ReadyToSend => {
                self.with_queue_pair(slot, |protocol, _| protocol.resume_send_queue())
            }
            ModifyTarget::Terminate => self.with_queue_pair(slot, |protocol, _| {
                let is_rts = protocol.state() == RdmapState::Rts;
                protocol.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
                is_rts
            }),
        };
        if moved != Some(true) {
            return Err("only a queue pair in RTS can move to this state");
        }
        self.mark_ready(slot);
        self.report_and_follow(now, slot);
        Ok(())
    }

    /// Time that the peer of a connection under set-up may stay silent; zero for no limit.
    pub(super) fn wake_after(&self, slot: QpSlot) -> Duration {
        let queue_pair = self.queue_pairs.get(slot);
        let milliseconds = match queue_pair.map(|queue_pair| &queue_pair.state) {
            Some(
                LifecycleState::TcpConnecting(attempt) | LifecycleState::MpaNegotiation(attempt),
            ) => attempt.config.wake_silent_peer_ms,
            _ => 0,
        };
        Duration::from_millis(milliseconds.into())
    }

    /// Starts to watch the peer of a new connection.
    pub(super) fn watch_silent_peer(&mut self, now: Instant, slot: QpSlot, pause: Duration) {
        let queue_pair = self.queue_pairs.get(slot);
        let is_running = |state: &LifecycleState| matches!(state, LifecycleState::Running { .. });
        if queue_pair.is_some_and(|queue_pair| is_running(&queue_pair.state)) {
            let wake = PeerWake::after(now, pause);
            self.enter_state(slot, LifecycleState::Running { wake });
        }
    }

    /// Breaks the silence of a peer that has sent nothing for the pause: a peer that has accepted gets a
    /// zero-length RDMA Write, one that has connected gets what this side's consumer sends.
    ///
    /// Linux siw installs its callback for received data after it has sent its MPA reply: data that
    /// arrives in between is acknowledged by its TCP, but read only when more arrives. If the initiator
    /// waits for an answer to its first message, both sides would wait without end. A zero-length RDMA
    /// Write is more data, and has no effect at any peer (RFC 5040 section 5.1).
    ///
    /// As an initiator siw agrees on no ready-to-receive message, and its programs may wait for the
    /// responder to send first, as they can between two siws. RFC 5044 section 7.1.2 has the responder wait
    /// for the initiator's first FPDU, so both sides would wait without end here, too. siw receives FPDUs
    /// from the MPA reply on.
    pub(super) fn wake_silent_peer(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let LifecycleState::Running { wake: Some(wake) } = &queue_pair.state else {
            return;
        };
        let pause = wake.pause * 2;
        let port = queue_pair.port;
        let conn = queue_pair.conn;
        if queue_pair.protocol.is_awaiting_first_fpdu() {
            queue_pair.protocol.send_before_first_fpdu();
            self.enter_state(slot, LifecycleState::Running { wake: None });
            self.publish_state(now, slot);
            self.mark_ready(slot);
            return;
        }
        let is_silent = !queue_pair.protocol.has_received();
        // Data in flight has the same effect, and TCP retransmits it if it is lost.
        if is_silent && conn.is_some_and(|conn| self.is_acknowledged(port, conn)) {
            if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
                queue_pair.protocol.send_empty_write();
            }
            self.mark_ready(slot);
        }
        let goes_on = is_silent && pause <= LONGEST_WAKE_PAUSE;
        let wake = PeerWake::after(now, pause).filter(|_| goes_on);
        self.enter_state(slot, LifecycleState::Running { wake });
    }

    /// True if the peer's TCP has acknowledged all data given to ours.
    fn is_acknowledged(&self, port: usize, conn: ConnId) -> bool {
        let info = self.ports[port].stack.tcp_info(conn);
        info.is_some_and(|info| info.in_flight == 0 && info.unsent == 0)
    }

    /// Finds the unpolled completions of a queue pair's queues, also those of other queue pairs.
    /// Programs take a disconnect for a reason to destroy the queue pair, and its completions with it,
    /// so the report of the disconnect may have to wait until they are polled.
    pub(super) fn find_unpolled(&self, now: Instant, slot: QpSlot) -> Option<UnpolledCompletions> {
        let rings = &self.queue_pairs.get(slot)?.rings;
        let cqs = &self.context.cqs;
        let queues = [rings.send_cq, rings.recv_cq].map(|queue| {
            let last = cqs.last_cqe(queue)?;
            (!cqs.is_polled(queue, last)).then_some((queue, last))
        });
        let deadline = now + POLL_PATIENCE;
        let has_some = queues.iter().any(Option::is_some);
        has_some.then_some(UnpolledCompletions { queues, deadline })
    }

    /// Watches the completions, and reports when they are polled.
    pub(super) fn await_polls(&mut self, now: Instant, slot: QpSlot, found: UnpolledCompletions) {
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.unpolled = Some(found);
            self.deadlines
                .insert(now + POLL_CHECK_INTERVAL, DeadlineOwner::Polls(slot));
        }
    }

    /// Looks whether the client has polled the completions.
    #[cold]
    pub(super) fn check_polls(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let Some(unpolled) = &queue_pair.unpolled else {
            return;
        };
        let cqs = &self.context.cqs;
        let mut queues = unpolled.queues.iter().flatten();
        if now < unpolled.deadline && queues.any(|(queue, last)| !cqs.is_polled(*queue, *last)) {
            let next = now + POLL_CHECK_INTERVAL;
            return self.deadlines.insert(next, DeadlineOwner::Polls(slot));
        }
        queue_pair.unpolled = None;
        let qpn = queue_pair.rings.qpn;
        self.post_event(Event::CompletionsPolled { qpn });
    }

    /// Handles expired deadlines, the earliest first; some of them in one batch, since those of a client
    /// may expire together. A worker with others left does not sleep. Called once per batch.
    #[inline]
    pub(super) fn expire_deadlines(&mut self, now: Instant) {
        for _ in 0..THRESHOLDS.deadlines {
            let Some(owner) = self.deadlines.pop_expired(now) else {
                return;
            };
            match owner {
                DeadlineOwner::QueuePair(slot) => self.on_queue_pair_deadline(now, slot),
                DeadlineOwner::Pending(slot) => self.on_pending_deadline(now, slot),
                DeadlineOwner::Polls(slot) => self.check_polls(now, slot),
                DeadlineOwner::Resolution(client, resolution) => {
                    let (resolutions, mut worker) = self.resolving();
                    resolutions.look_up(now, client, resolution, &mut worker);
                }
                DeadlineOwner::Mads => self.retry_mads(now),
            }
        }
    }
}

fn queue_pair_info(queue_pair: &WorkerQp) -> QpInfo {
    let protocol = &queue_pair.protocol;
    let (ird, ord) = protocol.read_depths();
    QpInfo {
        state: consumer_state(queue_pair),
        drained: protocol.drain_state() == DrainState::Drained,
        ird,
        ord,
        mulpdu: protocol.mulpdu(),
        refused: None,
    }
}

/// The state in the consumer's terms.
fn consumer_state(queue_pair: &WorkerQp) -> control::QpState {
    let protocol = &queue_pair.protocol;
    let is_draining = protocol.drain_state() != DrainState::Inactive;
    match protocol.state() {
        RdmapState::Idle if queue_pair.is_of_datagrams() => control::QpState::Rts,
        RdmapState::Idle => control::QpState::Idle,
        RdmapState::Rts if is_draining => control::QpState::Sqd,
        RdmapState::Rts if protocol.is_awaiting_first_fpdu() => control::QpState::Rtr,
        RdmapState::Rts => control::QpState::Rts,
        // The consumer learns from its next send that the peer has left.
        RdmapState::Closing if protocol.is_paired() => control::QpState::Rts,
        RdmapState::Closing => control::QpState::Closing,
        RdmapState::Terminate => control::QpState::Terminate,
        RdmapState::Error => control::QpState::Error,
    }
}
