//! The iWARP port mapper, in both roles ([`siw_iwarp::port_mapper`]).
//!
//! A connect first asks the peer's mapper, over UDP, for the port of the listener. It goes on with the
//! port that was asked for if the mapper refuses, if the peer says that it has none (ICMP), or after
//! [`ANSWER_TIMEOUT`]; a peer without a mapper is remembered for [`ABSENCE_MEMORY`], except if it
//! refuses the connection. Requests of others are answered without state: a listener of siwd is on the
//! port that its application asked for.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::Duration;

use siw_iwarp::port_mapper::{PortMapperKind, PortMapperMessage};
use siw_tcp::{Datagram, DatagramOutcome, Instant, PortMapperEvent};

use super::connections::Connections;
use super::lifecycle_state::{LifecycleState, MappingQuery};
use super::messages::ConnectParams;
use super::slots::QpSlot;

/// Maximum wait for an answer, and with it for the resolution of a neighbour.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(20);
/// Pause until a request is sent again, which may have been lost; and until the next look at a neighbour
/// that is not resolved.
const REPEAT_PAUSE: Duration = Duration::from_millis(4);
const NEIGHBOUR_PAUSE: Duration = Duration::from_millis(1);
/// Time in which a peer without a mapper is not asked again.
const ABSENCE_MEMORY: Duration = Duration::from_secs(30);
/// Maximum number of peers without a mapper that are remembered.
const ABSENCES_MAX: usize = 1024;

/// The state of a worker's port mapper.
#[derive(Default)]
pub(super) struct PortMapper {
    /// Peers without a mapper, by port index and address, until when they are not asked again.
    absent: HashMap<(usize, IpAddr), Instant>,
    /// Source of handles that other hosts cannot guess.
    secret: RandomState,
    requests: u64,
}

impl PortMapper {
    fn next_handle(&mut self, slot: QpSlot) -> u64 {
        self.requests += 1;
        self.secret.hash_one(self.requests) << 32 | u64::from(slot.0)
    }

    fn is_absent(&mut self, now: Instant, peer: (usize, IpAddr)) -> bool {
        match self.absent.get(&peer) {
            Some(until) if *until > now => true,
            Some(_) => {
                self.absent.remove(&peer);
                false
            }
            None => false,
        }
    }

    fn remember_absence(&mut self, now: Instant, peer: (usize, IpAddr)) {
        if self.absent.len() >= ABSENCES_MAX {
            self.absent.retain(|_, until| *until > now);
        }
        if self.absent.len() < ABSENCES_MAX {
            self.absent.insert(peer, now + ABSENCE_MEMORY);
        }
    }
}

impl Connections {
    /// Asks the port mapper of the peer, if it may have one, before the connect of a queue pair.
    pub(super) fn map_then_connect(
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
        let port = queue_pair.port;
        let is_siwd = params.to_itself
            || queue_pair.protocol.is_paired()
            || self.ports[port].output.link.in_process;
        let stack = &mut self.ports[port].stack;
        let remote = params.remote;
        if is_siwd
            || !stack.has_port_mapper()
            || self.port_mapper.is_absent(now, (port, remote.ip()))
        {
            return self.connect_until(now, slot, params, consumer_deadline);
        }
        let source = stack.source_of_mapped_connect(now, params.local, params.local_port, remote);
        let Some(source) = source else {
            return self.connect_until(now, slot, params, consumer_deadline);
        };
        let query = MappingQuery {
            request: PortMapperMessage {
                kind: PortMapperKind::Request,
                handle: self.port_mapper.next_handle(slot),
                accepting: remote,
                connecting: source,
            },
            params,
            consumer_deadline,
            was_sent: false,
            deadline: now,
            end: consumer_deadline
                .map_or(now + ANSWER_TIMEOUT, |end| end.min(now + ANSWER_TIMEOUT)),
        };
        self.enter_state(slot, LifecycleState::MappingPort(Box::new(query)));
        self.continue_mapping(now, slot);
    }

    /// Sends the request, waits longer for its answer, or gives it up.
    pub(super) fn continue_mapping(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let (port, owner) = (queue_pair.port, queue_pair.quota_owner);
        let LifecycleState::MappingPort(query) = &queue_pair.state else {
            return;
        };
        let (request, end, was_sent) = (query.request, query.end, query.was_sent);
        let (from, to) = (request.connecting.ip(), request.accepting.ip());
        let is_absent = self.port_mapper.is_absent(now, (port, to));
        if now >= end || is_absent {
            if was_sent && !is_absent {
                self.port_mapper.remember_absence(now, (port, to));
            }
            return self.connect_mapped(now, slot, None);
        }
        let stack = &mut self.ports[port].stack;
        let pause = match stack.send_to_port_mapper(now, owner, from, to, &request.build()) {
            DatagramOutcome::Queued => REPEAT_PAUSE,
            DatagramOutcome::Unresolved => NEIGHBOUR_PAUSE,
            DatagramOutcome::Dropped => return self.connect_mapped(now, slot, None),
        };
        let old = self.enter_state(slot, LifecycleState::Unconnected);
        if let Some(LifecycleState::MappingPort(mut query)) = old {
            query.was_sent |= pause == REPEAT_PAUSE;
            query.deadline = end.min(now + pause);
            self.enter_state(slot, LifecycleState::MappingPort(query));
        }
    }

    /// Connects to the port that the mapper has named, or else to the one that was asked for.
    fn connect_mapped(&mut self, now: Instant, slot: QpSlot, port: Option<u16>) {
        let Some(LifecycleState::MappingPort(query)) =
            self.enter_state(slot, LifecycleState::Unconnected)
        else {
            return;
        };
        let (mut params, source) = (query.params, query.request.connecting);
        params.mapped_port = port;
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

    /// Forgets that a peer has no mapper, after it has refused a connection.
    pub(super) fn ask_port_mapper_again(&mut self, port: usize, peer: IpAddr) {
        self.port_mapper.absent.remove(&(port, peer));
    }

    /// Processes the messages that a port has received for the port mapper.
    #[cold]
    pub(super) fn serve_port_mapper(&mut self, now: Instant, port: usize) {
        while let Some(event) = self.ports[port].stack.next_port_mapper_event() {
            match event {
                PortMapperEvent::Received(datagram) => {
                    if let Some(message) = PortMapperMessage::parse(datagram.payload()) {
                        self.on_port_mapper_message(now, port, &datagram, message);
                    }
                }
                // Connects that wait for an answer find it at their next step.
                PortMapperEvent::Unreachable(peer) => {
                    self.port_mapper.remember_absence(now, (port, peer));
                }
            }
        }
    }

    fn on_port_mapper_message(
        &mut self,
        now: Instant,
        port: usize,
        datagram: &Datagram,
        message: PortMapperMessage,
    ) {
        match message.kind {
            PortMapperKind::Request if !datagram.is_copy => {
                let stack = &mut self.ports[port].stack;
                let kind = if stack.listens_on(message.accepting) {
                    PortMapperKind::Accept
                } else {
                    PortMapperKind::Reject
                };
                stack.answer_datagram(now, datagram, &message.answer(kind).build());
            }
            PortMapperKind::Accept | PortMapperKind::Reject => {
                self.on_port_mapper_answer(now, port, datagram, message);
            }
            // Nothing was kept for an acknowledgement.
            PortMapperKind::Request | PortMapperKind::Acknowledge => {}
        }
    }

    fn on_port_mapper_answer(
        &mut self,
        now: Instant,
        port: usize,
        datagram: &Datagram,
        answer: PortMapperMessage,
    ) {
        let slot = QpSlot(answer.handle as u32);
        let Some(queue_pair) = self.queue_pairs.get(slot) else {
            return;
        };
        let LifecycleState::MappingPort(query) = &queue_pair.state else {
            return;
        };
        let asked = &query.request;
        // Only the host that was asked may answer, and only for itself.
        if queue_pair.port != port
            || answer.handle != asked.handle
            || datagram.from.ip() != asked.accepting.ip()
            || answer.accepting.ip() != asked.accepting.ip()
        {
            return;
        }
        let mapped = (answer.kind == PortMapperKind::Accept).then_some(answer.accepting.port());
        if mapped.is_some() {
            let acknowledgement = answer.answer(PortMapperKind::Acknowledge).build();
            let stack = &mut self.ports[port].stack;
            stack.answer_datagram(now, datagram, &acknowledgement);
        }
        self.connect_mapped(now, slot, mapped.filter(|port| *port != 0));
    }
}
