//! The listening side: from a TCP connection to an application's answer (RFC 5044 section 7).

use std::net::IpAddr;
use std::time::Duration;

use siw_iwarp::mpa::{MpaResponder, ResponderStep};
use siw_net::{ConnId, Instant};
use siw_shm::control::MpaOptions;
use siw_tcp::Events;

use super::conn_owner::ConnOwner;
use super::connect::too_many_connections;
use super::connections::Connections;
use super::deadlines::DeadlineOwner;
use super::drop_reasons::DropReason;
use super::listener_options::{ListenerSettings, PortListener, apply_mpa_config};
use super::messages::{ConnectFailure, Event, RequestId};
use super::pending_connections::{PendingConnection, PendingState, StreamState};
use super::receive::CONNECTION_ENDED;
use super::slots::{PendingSlot, QpSlot};
use super::thresholds::THRESHOLDS;
use crate::datapath::rx_frame::TcpByteStream;
use crate::ids::CmListenerId;

/// Waiting events above which refused requests are only counted: a peer could make any number of them.
const MOST_REPORTS: usize = 64;

/// Parameters of a listener.
pub(super) struct ListenRequest {
    pub(super) listener: CmListenerId,
    /// User (uid) whose limit of pending connections applies.
    pub(super) user: u32,
    pub(super) device: usize,
    pub(super) local: Option<IpAddr>,
    pub(super) tcp_port: u16,
    pub(super) backlog: usize,
    pub(super) mpa: MpaOptions,
    /// Connections begin in streaming mode.
    pub(super) is_streaming: bool,
}

impl Connections {
    /// Listens on the device's port, if this worker serves the device.
    pub(super) fn start_listening(&mut self, request: &ListenRequest) {
        let listener = request.listener;
        for index in 0..self.ports.len() {
            if self.ports[index].device != request.device {
                continue;
            }
            let started = self.ports[index].stack.listen(
                request.local,
                request.tcp_port,
                request.backlog,
                ConnOwner::Listener(listener).into(),
            );
            match started {
                Ok(tcp_listener) => {
                    let port = &mut self.port_listeners[index];
                    let own_settings = (request.mpa != MpaOptions::BY_DEVICE).then(|| {
                        ListenerSettings::new(&port.mpa, port.accept_timeout, &request.mpa)
                    });
                    let entry = port.listeners.entry(listener);
                    let entry = entry.or_insert_with(|| PortListener {
                        tcp: Vec::new(),
                        user: request.user,
                        own_settings,
                        is_streaming: request.is_streaming,
                    });
                    entry.tcp.push(tcp_listener);
                }
                Err(error) => self.post_event(Event::ListenFailed {
                    listener,
                    reason: error.to_string(),
                }),
            }
        }
    }

    /// Ends all listeners on one port.
    pub(super) fn stop_listening_on(&mut self, now: Instant, port: usize) {
        for (_, listener) in self.port_listeners[port].listeners.drain() {
            for tcp_listener in listener.tcp {
                self.ports[port].stack.stop_listening(now, tcp_listener);
            }
        }
    }

    /// Ends a listener. Connections that no application has answered are reset, unless requests are
    /// kept.
    pub(super) fn unlisten(&mut self, now: Instant, listener: CmListenerId, keep_requests: bool) {
        for (port, own) in self.ports.iter_mut().zip(&mut self.port_listeners) {
            let removed = own.listeners.remove(&listener);
            for tcp_listener in removed.into_iter().flat_map(|listener| listener.tcp) {
                port.stack.stop_listening(now, tcp_listener);
            }
        }
        self.pending.end_listener(listener, keep_requests);
    }

    /// Closes some connections of listeners that have ended.
    #[cold]
    pub(super) fn continue_unlistening(&mut self, now: Instant) {
        let mut looks = THRESHOLDS.removals;
        while let Some(slot) = self.pending.next_ended(&mut looks) {
            self.drop_pending(now, slot, true);
        }
    }

    /// Registers a new connection of a listener as pending.
    pub(super) fn on_accepted(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        listener: CmListenerId,
        events: Events,
    ) {
        if events.intersects(CONNECTION_ENDED) {
            return self.ports[port].stack.release(now, conn);
        }
        // Connections of a removed listener are reset.
        let listeners = &self.port_listeners[port].listeners;
        let found = listeners.get(&listener);
        let found = found.map(|listener| (listener.user, listener.is_streaming));
        let (user, is_streaming) = match found {
            Some((user, streams)) if self.pending.has_room_for(user) => (user, streams),
            refused => {
                let reason = match refused {
                    Some(_) => DropReason::PendingLimit,
                    None => DropReason::ListenerGone,
                };
                self.note_refused_request(port, conn, listener, reason, reason.meaning());
                self.ports[port].stack.abort(now, conn);
                return self.ports[port].stack.release(now, conn);
            }
        };
        let (mpa, accept_timeout) = self.port_listeners[port].settings(listener);
        let (state, deadline) = match is_streaming {
            true => (
                PendingState::Streaming(StreamState::default()),
                now + accept_timeout,
            ),
            false => (
                PendingState::AwaitingRequest,
                now + Duration::from_millis(mpa.request_timeout_ms.into()),
            ),
        };
        let slot = self.pending.insert(PendingConnection {
            port,
            conn,
            listener,
            responder: MpaResponder::new(mpa),
            accept_timeout,
            state,
            deadline,
            generation: 0,
            user,
            idle_timeout: is_streaming.then_some(accept_timeout),
        });
        let owner = ConnOwner::Pending(slot);
        self.ports[port].stack.set_user(conn, owner.into());
        self.deadlines
            .insert(deadline, DeadlineOwner::Pending(slot));
        if is_streaming {
            self.report_open_stream(slot);
        }
        self.on_pending_event(now, port, conn, slot, events);
    }

    /// Handles events of a connection that no queue pair has taken yet.
    pub(super) fn on_pending_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: PendingSlot,
        events: Events,
    ) {
        let Some(pending) = self.pending.get_mut(slot) else {
            return self.ports[port].stack.release(now, conn);
        };
        if pending.conn != conn {
            return;
        }
        if matches!(
            pending.state,
            PendingState::Connecting | PendingState::Streaming(_)
        ) {
            return self.on_streaming_event(now, slot, events);
        }
        // Bytes of the streaming mode may still have been unacknowledged at its end.
        if pending.idle_timeout.is_some() {
            self.ports[port].stack.take_acked(conn, |_| {});
        }
        if events.contains(Events::READABLE)
            && let Some(rx_queue) = self.ports[port].stack.receive_queue(conn)
        {
            match pending.responder.on_stream(&mut TcpByteStream(rx_queue)) {
                ResponderStep::NeedMore => {}
                ResponderStep::Request(request) => {
                    let request_id = self.await_answer(now, slot);
                    if let Some((request_id, listener)) = request_id
                        && let Some(info) = self.ports[port].stack.tcp_info(conn)
                    {
                        self.post_event(Event::ConnectRequest {
                            request: request_id,
                            listener,
                            local: info.local,
                            remote: info.remote,
                            private_data: request.private_data,
                            peer_ird: request.peer_ird,
                            peer_ord: request.peer_ord,
                        });
                    }
                }
                ResponderStep::Failed { error, send } => {
                    let (listener, reason) = (pending.listener, DropReason::of_request(error));
                    self.note_refused_request(port, conn, listener, reason, error);
                    if let Some(bytes) = send {
                        self.queue_stream_bytes(port, conn, bytes);
                    }
                    let failure = ConnectFailure::Protocol(error.to_string());
                    return self.fail_pending(now, slot, false, failure);
                }
            }
        }
        if events.intersects(CONNECTION_ENDED | Events::PEER_FIN) {
            self.drops.count(DropReason::PeerGone);
            self.drop_pending(now, slot, false);
        }
    }

    /// Counts a connection request that is refused without its application, and reports it unless many
    /// reports are waiting.
    #[cold]
    fn note_refused_request(
        &mut self,
        port: usize,
        conn: ConnId,
        listener: CmListenerId,
        reason: DropReason,
        text: impl std::fmt::Display,
    ) {
        self.drops.count(reason);
        if self.outgoing_events.len() >= MOST_REPORTS {
            return;
        }
        if let Some(info) = self.ports[port].stack.tcp_info(conn) {
            self.post_event(Event::RequestRefused {
                listener,
                local: info.local,
                remote: info.remote,
                reason: text.to_string(),
            });
        }
    }

    /// Starts the wait for the application's answer.
    fn await_answer(
        &mut self,
        now: Instant,
        slot: PendingSlot,
    ) -> Option<(RequestId, CmListenerId)> {
        let pending = self.pending.get_mut(slot)?;
        let owner = DeadlineOwner::Pending(slot);
        self.deadlines.remove(pending.deadline, owner);
        pending.state = PendingState::AwaitingAnswer;
        pending.deadline = now + pending.accept_timeout;
        self.deadlines.insert(pending.deadline, owner);
        let request_id = RequestId::new(self.index as u32, slot, pending.generation);
        Some((request_id, pending.listener))
    }

    /// Gives up a connection whose peer or application took too long.
    pub(super) fn on_pending_deadline(&mut self, now: Instant, slot: PendingSlot) {
        if let Some(pending) = self.pending.get_mut(slot) {
            let (port, conn, listener) = (pending.port, pending.conn, pending.listener);
            let reason = match pending.state {
                PendingState::Connecting => {
                    self.drops.count(DropReason::ConnectTimeout);
                    return self.fail_pending(now, slot, true, ConnectFailure::TimedOut);
                }
                PendingState::Streaming(_) => DropReason::StreamTimeout,
                PendingState::AwaitingRequest => DropReason::RequestTimeout,
                PendingState::AwaitingAnswer | PendingState::Rejected => DropReason::AnswerTimeout,
            };
            self.note_refused_request(port, conn, listener, reason, reason.meaning());
        }
        self.fail_pending(now, slot, true, ConnectFailure::TimedOut);
    }

    /// Closes a connection that no queue pair took.
    pub(super) fn drop_pending(&mut self, now: Instant, slot: PendingSlot, reset: bool) {
        self.fail_pending(now, slot, reset, ConnectFailure::Reset);
    }

    /// As [`Self::drop_pending`], with the reason for the application of a connection that began in
    /// streaming mode.
    pub(super) fn fail_pending(
        &mut self,
        now: Instant,
        slot: PendingSlot,
        reset: bool,
        failure: ConnectFailure,
    ) {
        let Some(pending) = self.pending.take(slot) else {
            return;
        };
        self.deadlines
            .remove(pending.deadline, DeadlineOwner::Pending(slot));
        if reset {
            self.ports[pending.port].stack.abort(now, pending.conn);
        }
        self.give_up_connection(now, pending.port, pending.conn);
        if pending.is_reported() {
            let request = RequestId::new(self.index as u32, slot, pending.generation);
            self.post_event(Event::RequestGone { request, failure });
        }
    }

    /// Pending connection of `request`, if it still exists.
    pub(super) fn find_pending(&mut self, request: RequestId) -> Option<&mut PendingConnection> {
        self.pending
            .get_mut(request.slot())
            .filter(|pending| pending.generation == request.generation())
    }

    /// Accepts a connection for the application: sends the reply and starts the queue pair.
    pub(super) fn accept_pending(
        &mut self,
        now: Instant,
        slot: QpSlot,
        request: RequestId,
        private_data: &[u8],
        ird: u16,
        ord: u16,
    ) {
        let port = self.find_pending(request).map(|pending| pending.port);
        let most = self.queue_pairs.get(slot).map(|qp| qp.most_connections);
        if let Some((port, most)) = port.zip(most)
            && !self.ports[port].stack.has_at_most(most)
        {
            self.reject_pending(now, request, &[]);
            return self.connect_failed(now, slot, too_many_connections(most));
        }
        let taken = port.map(|_| self.pending.take(request.slot()));
        let Some(pending) = taken.flatten() else {
            return self.connect_failed(now, slot, ConnectFailure::Reset);
        };
        let PendingConnection {
            port,
            conn,
            responder,
            deadline,
            ..
        } = pending;
        self.deadlines
            .remove(deadline, DeadlineOwner::Pending(request.slot()));
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.port = port;
            queue_pair.conn = Some(conn);
            let quota_owner = queue_pair.quota_owner;
            self.ports[port].stack.set_quota_owner(conn, quota_owner);
        }
        let owner = ConnOwner::QueuePair(slot);
        self.ports[port].stack.set_user(conn, owner.into());
        match responder.accept(ird, ord, private_data) {
            Ok((reply, negotiated)) => {
                self.queue_stream_bytes(port, conn, reply);
                if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
                    apply_mpa_config(&mut queue_pair.protocol, responder.config());
                }
                let pause = responder.config().wake_silent_peer_ms;
                self.enter_running(now, slot, conn, negotiated, Vec::new());
                // A ready-to-receive message that was agreed comes in any case.
                if negotiated.rtr.is_none() {
                    self.watch_silent_peer(now, slot, Duration::from_millis(pause.into()));
                }
                self.flush_connection(now, port, conn);
            }
            Err(error) => {
                let failure = ConnectFailure::Protocol(error.to_string());
                self.connect_failed(now, slot, failure);
            }
        }
    }

    /// Rejects a connection for the application.
    pub(super) fn reject_pending(&mut self, now: Instant, request: RequestId, private_data: &[u8]) {
        let Some(pending) = self.find_pending(request) else {
            return;
        };
        let old = std::mem::replace(&mut pending.state, PendingState::Rejected);
        let has_request = old == PendingState::AwaitingAnswer;
        let (port, conn) = (pending.port, pending.conn);
        if !has_request {
            // It is in streaming mode, or has turned and awaits its request.
            return self.drop_pending(now, request.slot(), true);
        }
        match pending.responder.reject(private_data) {
            Ok(reply) => self.queue_stream_bytes(port, conn, reply),
            Err(error) => tracing::debug!(%error, "the reject frame could not be built"),
        }
        self.drops.count(DropReason::ApplicationReject);
        self.drop_pending(now, request.slot(), false);
    }
}
