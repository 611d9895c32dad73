//! Connections in streaming mode (RFC 5044 section 7.1.3): TCP bytes go through the control thread, until
//! the application turns the connection to RDMA. TCP's windows bound the bytes in both directions:
//! received ones stay in its receive queue until the application asks for them, so that those behind the
//! agreed octet are MPA's.

use std::time::Duration;

use siw_iwarp::mpa::MpaResponder;
use siw_net::{ConnId, Instant, NetError};
use siw_tcp::{Events, StackError, TcpState};

use super::conn_owner::ConnOwner;
use super::connect::too_many_connections;
use super::connections::Connections;
use super::deadlines::DeadlineOwner;
use super::drop_reasons::DropReason;
use super::lifecycle::TCP_CONNECT_TIMEOUT;
use super::lifecycle_state::LifecycleState;
use super::messages::{
    ConnectFailure, ConnectParams, Event, QpSetup, RequestId, StreamAnswer, StreamCall,
    StreamParams,
};
use super::pending_connections::{PendingConnection, PendingState, StreamState};
use super::receive::CONNECTION_ENDED;
use super::slots::PendingSlot;
use crate::ids::{CmListenerId, CommandToken};

/// The listener of connections that this side opens.
const NO_LISTENER: CmListenerId = CmListenerId(0);

/// The failure that ends a connection with these events of TCP.
fn failure_of(events: Events) -> ConnectFailure {
    if events.contains(Events::REFUSED) {
        ConnectFailure::Refused
    } else if events.contains(Events::UNREACHABLE) {
        ConnectFailure::Unreachable
    } else if events.contains(Events::TIMED_OUT) {
        ConnectFailure::TimedOut
    } else {
        ConnectFailure::Reset
    }
}

impl Connections {
    /// Opens a connection in streaming mode.
    pub(super) fn open_stream(&mut self, now: Instant, params: StreamParams) {
        let token = params.token;
        let answer = match self.start_opening(now, &params) {
            Ok(request) => StreamAnswer::Opening(request),
            Err(failure) => {
                self.drops.count(DropReason::of_connect(&failure));
                StreamAnswer::NotOpened(failure)
            }
        };
        self.post_event(Event::StreamAnswer { token, answer });
    }

    fn start_opening(
        &mut self,
        now: Instant,
        params: &StreamParams,
    ) -> Result<RequestId, ConnectFailure> {
        let mut ports = self.ports.iter();
        let port = ports.position(|port| port.device == params.device);
        let port = port.ok_or_else(|| {
            ConnectFailure::Local("this worker has no queue of that device".to_owned())
        })?;
        let (user, most) = (params.owner.user, params.most_connections);
        if !self.pending.has_room_for(user) {
            let why = "this user has too many connections in streaming mode or not accepted: close \
                       some; see [limits] pending_connections_per_user";
            return Err(ConnectFailure::OverQuota(why.to_owned()));
        }
        let stack = &mut self.ports[port].stack;
        if !stack.has_at_most(most.saturating_sub(1)) {
            return Err(too_many_connections(most));
        }
        let owner = Some(params.owner);
        let nobody = ConnOwner::Nobody.into();
        let opened = stack.connect_for(owner, now, params.local, None, params.remote, nobody);
        let conn = opened.map_err(|error| {
            let why = error.to_string();
            match error {
                StackError::Net(NetError::TooManyUnresolved { .. }) => {
                    ConnectFailure::OverQuota(why)
                }
                _ => ConnectFailure::Local(why),
            }
        })?;
        let (mpa, accept_timeout) = self.port_listeners[port].settings(NO_LISTENER);
        let deadline = now + params.timeout.unwrap_or(TCP_CONNECT_TIMEOUT);
        let slot = self.pending.insert(PendingConnection {
            port,
            conn,
            listener: NO_LISTENER,
            responder: MpaResponder::new(mpa),
            accept_timeout,
            state: PendingState::Connecting,
            deadline,
            generation: 0,
            user,
            idle_timeout: Some(params.idle_timeout.unwrap_or(accept_timeout)),
        });
        let owner = ConnOwner::Pending(slot);
        self.ports[port].stack.set_user(conn, owner.into());
        self.deadlines
            .insert(deadline, DeadlineOwner::Pending(slot));
        let generation = self.pending.get_mut(slot).map(|new| new.generation);
        let generation = generation.unwrap_or(0);
        Ok(RequestId::new(self.index as u32, slot, generation))
    }

    /// Reports a connection that has reached streaming mode.
    pub(super) fn report_open_stream(&mut self, slot: PendingSlot) {
        let Some(pending) = self.pending.get_mut(slot) else {
            return;
        };
        let request = RequestId::new(self.index as u32, slot, pending.generation);
        let (port, conn, listener) = (pending.port, pending.conn, pending.listener);
        if let Some(info) = self.ports[port].stack.tcp_info(conn) {
            self.post_event(Event::StreamOpened {
                request,
                listener,
                local: info.local,
                remote: info.remote,
            });
        }
    }

    /// Starts the time without bytes again.
    fn restart_idle_time(&mut self, now: Instant, slot: PendingSlot) {
        if let Some(pending) = self.pending.get_mut(slot)
            && let Some(idle_timeout) = pending.idle_timeout
        {
            self.move_deadline(now + idle_timeout, slot);
        }
    }

    fn move_deadline(&mut self, deadline: Instant, slot: PendingSlot) {
        if let Some(pending) = self.pending.get_mut(slot) {
            let owner = DeadlineOwner::Pending(slot);
            self.deadlines.remove(pending.deadline, owner);
            pending.deadline = deadline;
            self.deadlines.insert(deadline, owner);
        }
    }

    /// Handles TCP's events of a connection that is opened in streaming mode, or is in it.
    pub(super) fn on_streaming_event(&mut self, now: Instant, slot: PendingSlot, events: Events) {
        let Some(pending) = self.pending.get_mut(slot) else {
            return;
        };
        let (port, conn) = (pending.port, pending.conn);
        let stack = &mut self.ports[port].stack;
        // The bytes that the peer has acknowledged are not needed any more.
        stack.take_acked(conn, |_| {});
        let is_connecting = pending.state == PendingState::Connecting;
        let has_failed = events.intersects(Events(CONNECTION_ENDED.0 & !Events::CLOSED.0));
        if has_failed || (is_connecting && events.intersects(CONNECTION_ENDED | Events::PEER_FIN)) {
            self.drops.count(DropReason::PeerGone);
            return self.fail_pending(now, slot, false, failure_of(events));
        }
        if is_connecting && events.contains(Events::CONNECTED) {
            pending.state = PendingState::Streaming(StreamState::default());
            self.report_open_stream(slot);
            self.restart_idle_time(now, slot);
        }
        let Some(pending) = self.pending.get_mut(slot) else {
            return;
        };
        let PendingState::Streaming(state) = &mut pending.state else {
            return;
        };
        let stack = &mut self.ports[port].stack;
        // Both ends have closed, and bytes of the peer may still be read.
        let is_closed = events.intersects(Events::PEER_FIN | Events::CLOSED);
        state.peer_closed |= is_closed;
        let has_bytes = events.contains(Events::READABLE) || is_closed;
        let has_room = state.awaits_room && stack.send_room(conn) > 0;
        let is_ready = (state.awaits_bytes && has_bytes) || has_room;
        if is_ready {
            (state.awaits_bytes, state.awaits_room) = (false, false);
            let request = RequestId::new(self.index as u32, slot, pending.generation);
            self.post_event(Event::StreamReady { request });
        }
        if events.contains(Events::READABLE) {
            // The bytes wait for the application and take no buffers from other connections.
            if !self.ports[port].stack.stop_reading(conn) {
                let why =
                    "all buffers for connections that are not read are in use: receive faster";
                let failure = ConnectFailure::OverQuota(why.to_owned());
                return self.fail_pending(now, slot, true, failure);
            }
            self.restart_idle_time(now, slot);
        }
    }

    /// The connection of a number, if it is in streaming mode.
    fn find_streaming(&mut self, request: RequestId) -> Option<&mut PendingConnection> {
        self.find_pending(request)
            .filter(|pending| matches!(pending.state, PendingState::Streaming(_)))
    }

    /// Executes a call of the application.
    pub(super) fn call_stream(
        &mut self,
        now: Instant,
        request: RequestId,
        token: CommandToken,
        call: StreamCall,
    ) {
        let answer = match call {
            StreamCall::Send(bytes) => self.send_streaming(now, request, &bytes),
            StreamCall::Receive(most) => self.receive_streaming(now, request, most),
            StreamCall::Turn => self.await_request(now, request),
        };
        let answer = answer.unwrap_or(StreamAnswer::Gone);
        let has_turned = matches!(answer, StreamAnswer::Turned);
        self.post_event(Event::StreamAnswer { token, answer });
        if has_turned {
            self.read_arrived(now, request.slot());
        }
    }

    fn send_streaming(
        &mut self,
        now: Instant,
        request: RequestId,
        bytes: &[u8],
    ) -> Option<StreamAnswer> {
        let pending = self.find_streaming(request)?;
        let (port, conn) = (pending.port, pending.conn);
        if pending.has_closed() {
            return Some(StreamAnswer::Closed);
        }
        let stack = &mut self.ports[port].stack;
        let most = stack.effective_mss(conn).max(1);
        let taken = stack.send_room(conn).min(bytes.len());
        for segment in bytes[..taken].chunks(most) {
            self.queue_stream_bytes(port, conn, segment.into());
        }
        if taken > 0 {
            self.flush_connection(now, port, conn);
            self.restart_idle_time(now, request.slot());
        } else if let Some(pending) = self.find_streaming(request)
            && let PendingState::Streaming(state) = &mut pending.state
        {
            state.awaits_room = true;
        }
        Some(StreamAnswer::Sent(taken))
    }

    fn receive_streaming(
        &mut self,
        now: Instant,
        request: RequestId,
        most: usize,
    ) -> Option<StreamAnswer> {
        let pending = self.find_streaming(request)?;
        let (port, conn) = (pending.port, pending.conn);
        let rx_queue = self.ports[port].stack.receive_queue(conn)?;
        let mut bytes = vec![0; rx_queue.len_bytes().min(most)].into_boxed_slice();
        rx_queue.copy_to_slice(0, &mut bytes);
        rx_queue.consume(bytes.len());
        let is_empty = rx_queue.is_empty();
        let mut is_closed = false;
        if !bytes.is_empty() {
            if is_empty {
                self.ports[port].stack.resume_reading(conn);
            }
            self.restart_idle_time(now, request.slot());
        } else if let Some(pending) = self.find_streaming(request)
            && let PendingState::Streaming(state) = &mut pending.state
        {
            is_closed = state.peer_closed;
            state.awaits_bytes = !is_closed;
        }
        Some(StreamAnswer::Received { bytes, is_closed })
    }

    /// Ends the streaming mode of a connection whose peer is going to send an MPA request.
    fn await_request(&mut self, now: Instant, request: RequestId) -> Option<StreamAnswer> {
        let pending = self.find_streaming(request)?;
        if pending.has_closed() {
            return Some(StreamAnswer::Closed);
        }
        pending.state = PendingState::AwaitingRequest;
        let timeout = pending.responder.config().request_timeout_ms;
        let (port, conn) = (pending.port, pending.conn);
        self.ports[port].stack.resume_reading(conn);
        self.move_deadline(now + Duration::from_millis(timeout.into()), request.slot());
        Some(StreamAnswer::Turned)
    }

    /// Passes the bytes behind the last one of the streaming mode to MPA, and the end of the connection.
    fn read_arrived(&mut self, now: Instant, slot: PendingSlot) {
        if let Some(pending) = self.pending.get_mut(slot) {
            let (port, conn) = (pending.port, pending.conn);
            let events = self.arrived_events(port, conn);
            self.on_pending_event(now, port, conn, slot, events);
        }
    }

    /// The events that tell a new owner of a connection of bytes and a FIN that have arrived before.
    fn arrived_events(&mut self, port: usize, conn: ConnId) -> Events {
        let info = self.ports[port].stack.tcp_info(conn);
        let is_open = info.is_some_and(|info| info.state == TcpState::Established);
        match is_open {
            true => Events::READABLE,
            false => Events::READABLE | Events::PEER_FIN,
        }
    }

    /// Turns a connection in streaming mode to RDMA, with a queue pair as the MPA initiator.
    pub(super) fn turn_to_initiator(
        &mut self,
        now: Instant,
        setup: QpSetup,
        request: RequestId,
        params: ConnectParams,
    ) {
        let found = self.find_streaming(request);
        let found = found.filter(|pending| !pending.has_closed());
        let port = found.map(|pending| pending.port);
        let slot = self.add_queue_pair(setup, port.unwrap_or(0));
        let Some(port) = port else {
            return self.connect_failed(now, slot, ConnectFailure::Reset);
        };
        let timeout = params.timeout_ms.map(u64::from).map(Duration::from_millis);
        let deadline = timeout.map(|timeout| now + timeout);
        let attempt = match self.new_attempt(now, port, params, deadline) {
            Ok(attempt) => attempt,
            Err(failure) => {
                self.reject_pending(now, request, &[]);
                return self.connect_failed(now, slot, failure);
            }
        };
        let Some(pending) = self.pending.take(request.slot()) else {
            return self.connect_failed(now, slot, ConnectFailure::Reset);
        };
        let conn = pending.conn;
        let owner = DeadlineOwner::Pending(request.slot());
        self.deadlines.remove(pending.deadline, owner);
        let stack = &mut self.ports[port].stack;
        stack.resume_reading(conn);
        stack.set_user(conn, ConnOwner::QueuePair(slot).into());
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.conn = Some(conn);
            stack.set_quota_owner(conn, queue_pair.quota_owner);
        }
        self.enter_state(slot, LifecycleState::TcpConnecting(attempt));
        let arrived = self.arrived_events(port, conn);
        self.on_connecting_event(now, port, conn, slot, Events::CONNECTED | arrived);
    }

    /// Closes a connection in streaming mode, or its sending direction.
    pub(super) fn end_stream(
        &mut self,
        now: Instant,
        request: RequestId,
        reset: bool,
        only_sending: bool,
    ) {
        let Some(pending) = self.find_pending(request) else {
            return;
        };
        if !only_sending {
            pending.state = PendingState::Rejected;
            return self.drop_pending(now, request.slot(), reset);
        }
        let (port, conn) = (pending.port, pending.conn);
        if let PendingState::Streaming(state) = &mut pending.state {
            state.is_closed = true;
            self.ports[port].stack.close(now, conn);
            self.flush_connection(now, port, conn);
        }
    }
}
