//! The connecting side: the peer's port mapper, TCP, then the MPA request and its reply (RFC 5044
//! section 7, RFC 6581).

use std::time::Duration;

use siw_iwarp::NegotiatedParameters;
use siw_iwarp::mpa::{InitiatorStep, MpaCrcPolicy, MpaInitiator};
use siw_net::{ConnId, Instant, NetError};
use siw_tcp::{Events, StackError};

use super::conn_owner::ConnOwner;
use super::connections::Connections;
use super::lifecycle::TCP_CONNECT_TIMEOUT;
use super::lifecycle_state::{ConnectAttempt, LifecycleState, MappingQuery};
use super::listener_options::apply_mpa_config;
use super::messages::{ConnectFailure, ConnectParams};
use super::port_mapper::{FIRST_NEIGHBOUR_PAUSE, LateAnswer, PortMapper, RESUMED_PAUSE, earlier};
use super::receive::CONNECTION_ENDED;
use super::slots::QpSlot;
use crate::datapath::rx_frame::TcpByteStream;

/// Pause between a refused connect and the next attempt.
pub(super) const REFUSAL_PAUSE: Duration = Duration::from_millis(25);

/// Failure of a connection that would use the reserve of others.
pub(super) fn too_many_connections(most: usize) -> ConnectFailure {
    ConnectFailure::OverQuota(format!(
        "connections of one worker on this device: beyond {most} they are kept for operators and new users; see [limits] connections"
    ))
}

impl Connections {
    /// Starts a connection for a queue pair that is already in the table.
    pub(super) fn connect_queue_pair(&mut self, now: Instant, slot: QpSlot, params: ConnectParams) {
        let timeout = params.timeout_ms;
        let deadline = timeout.map(|timeout| now + Duration::from_millis(timeout.into()));
        self.map_then_connect(now, slot, params, deadline);
    }

    /// Asks the port mapper of the peer, if it may have one, before the connect of a queue pair.
    fn map_then_connect(
        &mut self,
        now: Instant,
        slot: QpSlot,
        mut params: ConnectParams,
        consumer_deadline: Option<Instant>,
    ) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        params.mapped_port = None;
        params.asked_mapper = None;
        let index = queue_pair.port;
        let port = &mut self.ports[index];
        let is_siwd =
            params.to_itself || queue_pair.protocol.is_paired() || port.output.link.in_process;
        let stack = (index, &mut port.stack);
        let request = (!is_siwd)
            .then(|| self.port_mapper.request_for(now, stack, slot, &params))
            .flatten();
        let Some(request) = request else {
            return self.connect_until(now, slot, params, consumer_deadline);
        };
        let query = MappingQuery {
            request,
            params,
            consumer_deadline,
            sent: None,
            deadline: now,
            pause: FIRST_NEIGHBOUR_PAUSE,
            end: PortMapper::end_of_query(now, consumer_deadline),
        };
        self.enter_state(slot, LifecycleState::MappingPort(Box::new(query)));
        self.continue_mapping(now, slot);
    }

    /// Takes the query out of a queue pair that waits for its peer's port mapper.
    fn take_mapping_query(&mut self, slot: QpSlot) -> Option<Box<MappingQuery>> {
        let state = &self.queue_pairs.get(slot)?.state;
        if !matches!(state, LifecycleState::MappingPort(_)) {
            return None;
        }
        match self.enter_state(slot, LifecycleState::Unconnected) {
            Some(LifecycleState::MappingPort(query)) => Some(query),
            _ => None,
        }
    }

    /// Sends the request to the port mapper, waits longer for its answer, or gives it up.
    pub(super) fn continue_mapping(&mut self, now: Instant, slot: QpSlot) {
        let Some(mut query) = self.take_mapping_query(slot) else {
            return;
        };
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let (port, owner) = (queue_pair.port, queue_pair.quota_owner);
        let stack = (port, &mut self.ports[port].stack);
        if self
            .port_mapper
            .continue_query(now, stack, owner, &mut query)
        {
            self.enter_state(slot, LifecycleState::MappingPort(query));
        } else {
            self.connect_mapped(now, slot, *query, None);
        }
    }

    /// Processes the messages that a port has received for the port mapper.
    #[cold]
    pub(super) fn serve_port_mapper(&mut self, now: Instant, port: usize) {
        loop {
            let stack = (port, &mut self.ports[port].stack);
            let answer = self.port_mapper.next_answer(now, stack, &self.queue_pairs);
            let Some((slot, mapped_port)) = answer else {
                return;
            };
            if let Some(query) = self.take_mapping_query(slot) {
                self.connect_mapped(now, slot, *query, mapped_port);
            }
        }
    }

    /// Connects to the port that the mapper has named, or else to the one that was asked for.
    fn connect_mapped(
        &mut self,
        now: Instant,
        slot: QpSlot,
        query: MappingQuery,
        port: Option<u16>,
    ) {
        let (mut params, source) = (query.params, query.request.connecting);
        params.mapped_port = port;
        params.asked_mapper = Some(query.request);
        params.drawn_port = None;
        let mut remote = params.remote;
        remote.set_port(port.unwrap_or(remote.port()));
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        if !self.ports[queue_pair.port].stack.receives(source, remote) {
            // Frames from another remote port arrive at another worker: the source port changes, too.
            params.local_port = None;
        } else if params.local_port.is_none() {
            params.drawn_port = Some(source.port());
        }
        params.local = Some(source.ip());
        self.connect_until(now, slot, params, query.consumer_deadline);
    }

    /// As [`Self::connect_queue_pair`], for one attempt of a set-up that is given up at
    /// `consumer_deadline`.
    fn connect_until(
        &mut self,
        now: Instant,
        slot: QpSlot,
        params: ConnectParams,
        consumer_deadline: Option<Instant>,
    ) {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let port = queue_pair.port;
        let attempt = match self.new_attempt(now, port, params, consumer_deadline) {
            Ok(attempt) => attempt,
            Err(failure) => return self.connect_failed(now, slot, failure),
        };
        let params = &attempt.params;
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let most = queue_pair.most_connections;
        if !self.ports[port].stack.has_at_most(most.saturating_sub(1)) {
            return self.connect_failed(now, slot, too_many_connections(most));
        }
        let stack = &mut self.ports[port].stack;
        let user = ConnOwner::QueuePair(slot).into();
        let started = match params.local.filter(|_| params.to_itself) {
            Some(local) => stack.connect_to_itself(now, local, user),
            None => {
                let mut remote = params.remote;
                remote.set_port(params.mapped_port.unwrap_or(remote.port()));
                let owner = Some(queue_pair.quota_owner);
                let mut connect =
                    |port| stack.connect_for(owner, now, params.local, port, remote, user);
                match connect(params.local_port.or(params.drawn_port)) {
                    // Another connection took the port while the mapper was asked.
                    Err(StackError::AddrInUse(_)) if params.local_port.is_none() => connect(None),
                    outcome => outcome,
                }
            }
        };
        let conn = match started {
            Ok(conn) => conn,
            Err(error) => {
                let why = error.to_string();
                let failure = match error {
                    StackError::Net(NetError::TooManyUnresolved { .. }) => {
                        ConnectFailure::OverQuota(why)
                    }
                    _ => ConnectFailure::Local(why),
                };
                return self.connect_failed(now, slot, failure);
            }
        };
        queue_pair.conn = Some(conn);
        self.enter_state(slot, LifecycleState::TcpConnecting(attempt));
    }

    /// Prepares the MPA request of a queue pair on this port.
    ///
    /// # Errors
    /// The request cannot be made of the parameters.
    pub(super) fn new_attempt(
        &self,
        now: Instant,
        port: usize,
        params: ConnectParams,
        consumer_deadline: Option<Instant>,
    ) -> Result<Box<ConnectAttempt>, ConnectFailure> {
        let mut config = self.port_listeners[port].mpa.clone();
        match params.crc {
            Some(true) if config.crc == MpaCrcPolicy::IfAsked => config.crc = MpaCrcPolicy::Asked,
            Some(false) if config.crc == MpaCrcPolicy::Asked => config.crc = MpaCrcPolicy::IfAsked,
            _ => {}
        }
        if let Some(timeout) = params.timeout_ms {
            // The consumer's deadline bounds the wait.
            config.reply_timeout_ms = timeout;
        }
        if let Some(revision) = params.revision {
            config.revision = revision;
        }
        let initiator = MpaInitiator::new(&config, params.ird, params.ord, &params.private_data)
            .map_err(|error| ConnectFailure::Protocol(error.to_string()))?;
        Ok(Box::new(ConnectAttempt {
            initiator,
            params,
            config,
            deadline: consumer_deadline.unwrap_or(now + TCP_CONNECT_TIMEOUT),
            consumer_deadline,
        }))
    }

    /// Handles events of a queue pair's connection that is not in FPDU mode yet.
    pub(super) fn on_connecting_event(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: QpSlot,
        events: Events,
    ) {
        if events.contains(Events::CONNECTED) {
            if let Some(negotiated) = self.negotiate_with_itself(slot) {
                self.enter_running(now, slot, conn, negotiated, Vec::new());
                let rest = Events(events.0 & !Events::CONNECTED.0);
                return self.on_stream_event(now, port, conn, slot, rest);
            }
            self.send_mpa_request(now, port, conn, slot);
        }
        // An acknowledged MPA request is not needed any more.
        self.ports[port].stack.take_acked(conn, |_| {});
        if events.contains(Events::READABLE) {
            match self.read_mpa_reply(port, conn, slot) {
                None | Some(InitiatorStep::NeedMore) => {}
                Some(InitiatorStep::Accepted {
                    negotiated,
                    private_data,
                }) => {
                    let wake_after = self.wake_after(slot);
                    self.enter_running(now, slot, conn, negotiated, private_data);
                    self.watch_silent_peer(now, slot, wake_after);
                    // FPDUs may follow the reply in the same batch, and TCP may have ended.
                    let rest = Events(events.0 & !Events::CONNECTED.0);
                    return self.on_stream_event(now, port, conn, slot, rest);
                }
                Some(InitiatorStep::Rejected { private_data }) => {
                    let failure = ConnectFailure::Rejected(private_data);
                    return self.connect_failed(now, slot, failure);
                }
                Some(InitiatorStep::Failed { error, send }) => {
                    if let Some(bytes) = send {
                        self.queue_stream_bytes(port, conn, bytes);
                    }
                    let failure = ConnectFailure::Protocol(error.to_string());
                    return self.connect_failed(now, slot, failure);
                }
            }
        }
        if events.intersects(CONNECTION_ENDED | Events::PEER_FIN) {
            self.on_connecting_ended(now, port, conn, slot, events);
        }
    }

    /// Returns the parameters of the stream if the queue pair connects to itself: there is no peer to
    /// negotiate with.
    fn negotiate_with_itself(&mut self, slot: QpSlot) -> Option<NegotiatedParameters> {
        let queue_pair = self.queue_pairs.get_mut(slot)?;
        let LifecycleState::TcpConnecting(attempt) = &queue_pair.state else {
            return None;
        };
        if !attempt.params.to_itself {
            return None;
        }
        apply_mpa_config(&mut queue_pair.protocol, &attempt.config);
        queue_pair.protocol.set_self_connected();
        Some(attempt.initiator.negotiate_with_itself())
    }

    /// Sends the MPA request on the established TCP connection.
    fn send_mpa_request(&mut self, now: Instant, port: usize, conn: ConnId, slot: QpSlot) {
        let is_new = |state: &LifecycleState| matches!(state, LifecycleState::TcpConnecting(_));
        let queue_pair = self.queue_pairs.get(slot);
        if !queue_pair.is_some_and(|queue_pair| is_new(&queue_pair.state)) {
            return;
        }
        let old = self.enter_state(slot, LifecycleState::Unconnected);
        let Some(LifecycleState::TcpConnecting(mut attempt)) = old else {
            return;
        };
        let request = attempt.initiator.request_frame();
        let reply_timeout = Duration::from_millis(attempt.config.reply_timeout_ms.into());
        attempt.deadline = attempt.consumer_deadline.unwrap_or(now + reply_timeout);
        self.enter_state(slot, LifecycleState::MpaNegotiation(attempt));
        self.queue_stream_bytes(port, conn, request);
        self.flush_connection(now, port, conn);
    }

    /// Advances the MPA negotiation with the bytes received so far.
    fn read_mpa_reply(&mut self, port: usize, conn: ConnId, slot: QpSlot) -> Option<InitiatorStep> {
        let queue_pair = self.queue_pairs.get_mut(slot)?;
        let rx_queue = self.ports[port].stack.receive_queue(conn)?;
        let (LifecycleState::TcpConnecting(attempt) | LifecycleState::MpaNegotiation(attempt)) =
            &mut queue_pair.state
        else {
            return None;
        };
        let step = attempt.initiator.on_stream(&mut TcpByteStream(rx_queue));
        if matches!(step, InitiatorStep::Accepted { .. }) {
            apply_mpa_config(&mut queue_pair.protocol, &attempt.config);
        }
        Some(step)
    }

    /// Handles a connection that ended before the peer's answer was complete.
    fn on_connecting_ended(
        &mut self,
        now: Instant,
        port: usize,
        conn: ConnId,
        slot: QpSlot,
        events: Events,
    ) {
        let failure = if events.contains(Events::REFUSED) {
            self.note_refusal(port, slot);
            if self.resume_mapping(now, port, conn, slot)
                || self.await_listener(now, port, conn, slot)
            {
                return;
            }
            ConnectFailure::Refused
        } else if events.contains(Events::UNREACHABLE) {
            ConnectFailure::Unreachable
        } else if events.contains(Events::TIMED_OUT) {
            ConnectFailure::TimedOut
        } else {
            if events.contains(Events::RESET)
                && let Some((params, deadline)) = self.revision_1_attempt(slot)
            {
                self.ports[port].stack.release(now, conn);
                tracing::debug!(remote = %params.remote, "reset on MPA revision 2: trying revision 1");
                return self.connect_until(now, slot, params, deadline);
            }
            ConnectFailure::Reset
        };
        self.connect_failed(now, slot, failure);
    }

    /// Lets the next connect to a peer that refused this one ask the peer's port mapper.
    fn note_refusal(&mut self, port: usize, slot: QpSlot) {
        if let Some(queue_pair) = self.queue_pairs.get(slot)
            && let LifecycleState::TcpConnecting(attempt) = &queue_pair.state
        {
            let peer = attempt.params.remote.ip();
            self.port_mapper.ask_again(port, peer);
        }
    }

    /// After a refused connect, connects to the port that the peer's port mapper has named meanwhile, or waits
    /// for its answer. Returns false if it has refused, too, or was given up.
    fn resume_mapping(&mut self, now: Instant, port: usize, conn: ConnId, slot: QpSlot) -> bool {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return false;
        };
        let LifecycleState::TcpConnecting(attempt) = &mut queue_pair.state else {
            return false;
        };
        let (None, Some(request)) = (attempt.params.mapped_port, attempt.params.asked_mapper)
        else {
            return false;
        };
        let (named, sent, end) = match self.port_mapper.late_answer(now, &request) {
            LateAnswer::None => return false,
            LateAnswer::Port(named) => (Some(named), now, now),
            LateAnswer::Awaited { sent, end } => (None, sent, end),
        };
        let old = self.enter_state(slot, LifecycleState::Unconnected);
        let Some(LifecycleState::TcpConnecting(attempt)) = old else {
            return false;
        };
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.conn = None;
        }
        self.ports[port].stack.release(now, conn);
        let query = MappingQuery {
            request,
            params: attempt.params,
            consumer_deadline: attempt.consumer_deadline,
            sent: Some(sent),
            deadline: now,
            pause: RESUMED_PAUSE,
            end: earlier(end, attempt.consumer_deadline),
        };
        if named.is_some() {
            self.connect_mapped(now, slot, query, named);
        } else {
            self.enter_state(slot, LifecycleState::MappingPort(Box::new(query)));
            self.continue_mapping(now, slot);
        }
        true
    }

    /// Schedules another attempt after a refused connect. Returns false if the consumer allows none.
    fn await_listener(&mut self, now: Instant, port: usize, conn: ConnId, slot: QpSlot) -> bool {
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return false;
        };
        let LifecycleState::TcpConnecting(attempt) = &queue_pair.state else {
            return false;
        };
        let deadline = now + REFUSAL_PAUSE;
        let is_late = attempt.consumer_deadline.is_some_and(|end| end <= deadline);
        if attempt.params.refusals == 0 || is_late {
            return false;
        }
        let old = self.enter_state(slot, LifecycleState::Unconnected);
        let Some(LifecycleState::TcpConnecting(mut attempt)) = old else {
            return false;
        };
        attempt.params.refusals -= 1;
        attempt.deadline = deadline;
        if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
            queue_pair.conn = None;
        }
        self.ports[port].stack.release(now, conn);
        self.enter_state(slot, LifecycleState::AwaitingListener(attempt));
        true
    }

    /// Starts the next attempt after the pause that follows a refusal.
    pub(super) fn connect_again(&mut self, now: Instant, slot: QpSlot) {
        let old = self.enter_state(slot, LifecycleState::Unconnected);
        if let Some(LifecycleState::AwaitingListener(attempt)) = old {
            self.map_then_connect(now, slot, attempt.params, attempt.consumer_deadline);
        }
    }

    /// Returns the parameters and the deadline of an attempt with MPA revision 1, if the device's
    /// configuration allows one: a revision 1 peer resets the connection on a request that it does not
    /// know (RFC 6581 section 10).
    fn revision_1_attempt(&self, slot: QpSlot) -> Option<(ConnectParams, Option<Instant>)> {
        let LifecycleState::MpaNegotiation(attempt) = &self.queue_pairs.get(slot)?.state else {
            return None;
        };
        if attempt.params.is_turned {
            return None;
        }
        let config = attempt.initiator.fallback_config()?;
        let mut params = attempt.params.clone();
        params.revision = Some(config.revision);
        Some((params, attempt.consumer_deadline))
    }
}
