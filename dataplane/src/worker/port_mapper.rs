//! The iWARP port mapper, in both roles ([`siw_iwarp::port_mapper`]).
//!
//! A connect first asks the peer's mapper, over UDP, for the port of the listener. It goes on with the
//! port that was asked for if the mapper refuses, if the peer says that it has none (ICMP), or after
//! [`ANSWER_TIMEOUT`]; a peer without a mapper is remembered for [`ABSENCE_MEMORY`], unless it refuses the
//! connection. Requests of others are answered without state: a listener of siwd is on the
//! port that its application asked for.
//!
//! A mapper that has to resolve siwd's address first, or is loaded, answers later. Its answer is acknowledged and
//! kept, and a connect that the peer refuses meanwhile goes to the port in it, or waits for it up to
//! [`LATE_TIMEOUT`]. A peer whose mapper has ever answered is given that time at once.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::Duration;

use siw_iwarp::TxRecord;
use siw_iwarp::port_mapper::{PortMapperKind, PortMapperMessage};
use siw_net::{Datagram, DatagramOutcome, Instant, PortMapperEvent, QuotaOwner};
use siw_tcp::Stack;

use super::lifecycle_state::{LifecycleState, MappingQuery};
use super::messages::ConnectParams;
use super::slots::QpSlot;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::rx_frame::RxFrame;

type WorkerStack = Stack<RxFrame, TxRecord>;

/// Maximum wait for the first answer of a peer, from the first request on. Peers without a mapper cost every
/// first connect this time.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(20);
/// Maximum wait, from the first request on, for the answer of a peer that refuses the connection or whose mapper
/// has answered before.
const LATE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time until the first request: the neighbour is being resolved, which the connect needs too.
const RESOLUTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Pauses until a request is sent again, which may have been lost. Each is twice the one before.
const FIRST_REPEAT_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_REPEAT_PAUSE: Duration = Duration::from_millis(320);
/// The pause after the first request of a query that continues after a refusal.
pub(super) const RESUMED_PAUSE: Duration = ANSWER_TIMEOUT;
/// Pauses until the next look at a neighbour that is not resolved, which grow likewise.
pub(super) const FIRST_NEIGHBOUR_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_NEIGHBOUR_PAUSE: Duration = Duration::from_millis(16);
/// Time in which a peer without a mapper is not asked again.
const ABSENCE_MEMORY: Duration = Duration::from_secs(30);
/// Time for which a peer with a mapper is known as such.
const PRESENCE_MEMORY: Duration = Duration::from_secs(600);
/// Time in which late answers, and repetitions of them, are acknowledged.
const LATE_MEMORY: Duration = Duration::from_secs(30);
/// Maximum number of peers, and of requests without an answer in time, that are remembered.
const REMEMBERED_MAX: usize = 1024;

/// Knowledge about a peer's mapper.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// It has answered.
    Answers,
    /// There was no answer within [`ANSWER_TIMEOUT`], or an ICMP error.
    Absent,
    /// There was none within [`LATE_TIMEOUT`] either.
    Silent,
}

/// A request without an answer in time.
struct LateRequest {
    port: usize,
    request: PortMapperMessage,
    sent: Instant,
    /// The answer that came later: the port, or none after a rejection.
    answer: Option<Option<u16>>,
}

/// State of a request whose connect was refused.
pub(super) enum LateAnswer {
    /// There is none, and none is awaited.
    None,
    /// It may come until `end`.
    Awaited { sent: Instant, end: Instant },
    /// It has named a port.
    Port(u16),
}

/// The state of a worker's port mapper.
#[derive(Default)]
pub(super) struct PortMapper {
    /// Peers by port index and address, with the time at which the knowledge expires.
    peers: HashMap<(usize, IpAddr), (Presence, Instant)>,
    /// Requests by handle.
    late: HashMap<u64, LateRequest>,
    /// Source of handles that other hosts cannot guess.
    secret: RandomState,
    requests: u64,
}

impl PortMapper {
    fn next_handle(&mut self, slot: QpSlot) -> u64 {
        self.requests += 1;
        self.secret.hash_one(self.requests) << 32 | u64::from(slot.0)
    }

    /// Returns what is known about a peer.
    fn presence(&mut self, now: Instant, peer: (usize, IpAddr)) -> Option<Presence> {
        let (presence, until) = *self.peers.get(&peer)?;
        if until > now {
            return Some(presence);
        }
        self.peers.remove(&peer);
        None
    }

    fn is_absent(&mut self, now: Instant, peer: (usize, IpAddr)) -> bool {
        let presence = self.presence(now, peer);
        matches!(presence, Some(Presence::Absent | Presence::Silent))
    }

    /// Forgets the peers on a port.
    pub(super) fn forget_port(&mut self, port: usize) {
        self.peers.retain(|(on, _), _| *on != port);
        self.late.retain(|_, late| late.port != port);
    }

    fn remember(&mut self, now: Instant, peer: (usize, IpAddr), presence: Presence) {
        if self.peers.len() >= REMEMBERED_MAX {
            self.peers.retain(|_, (_, until)| *until > now);
        }
        let memory = match presence {
            Presence::Answers => PRESENCE_MEMORY,
            Presence::Absent | Presence::Silent => ABSENCE_MEMORY,
        };
        if self.peers.len() < REMEMBERED_MAX || self.peers.contains_key(&peer) {
            self.peers.insert(peer, (presence, now + memory));
        }
    }

    fn remember_late(&mut self, now: Instant, late: LateRequest) {
        if self.late.len() >= REMEMBERED_MAX {
            self.late.retain(|_, late| late.sent + LATE_MEMORY > now);
        }
        if self.late.len() < REMEMBERED_MAX {
            self.late.insert(late.request.handle, late);
        }
    }

    /// Forgets that a peer has not answered in time, after it has refused a connection. One that was given
    /// [`LATE_TIMEOUT`] stays known as silent.
    pub(super) fn ask_again(&mut self, port: usize, peer: IpAddr) {
        if let Some((Presence::Absent, _)) = self.peers.get(&(port, peer)) {
            self.peers.remove(&(port, peer));
        }
    }

    /// Returns the answer to a request whose connect was refused.
    pub(super) fn late_answer(&self, now: Instant, request: &PortMapperMessage) -> LateAnswer {
        let Some(late) = self.late.get(&request.handle) else {
            return LateAnswer::None;
        };
        let end = late.sent + LATE_TIMEOUT;
        match late.answer {
            Some(Some(port)) => LateAnswer::Port(port),
            None if now < end => LateAnswer::Awaited {
                sent: late.sent,
                end,
            },
            Some(None) | None => LateAnswer::None,
        }
    }

    /// Returns the request that precedes the connect of a queue pair on a port; `None`: the peer is not
    /// to be asked.
    pub(super) fn request_for(
        &mut self,
        now: Instant,
        (port, stack): (usize, &mut WorkerStack),
        slot: QpSlot,
        params: &ConnectParams,
    ) -> Option<PortMapperMessage> {
        let remote = params.remote;
        if !stack.has_port_mapper() || self.is_absent(now, (port, remote.ip())) {
            return None;
        }
        Some(PortMapperMessage {
            kind: PortMapperKind::Request,
            connecting: stack.source_of_mapped_connect(
                now,
                params.local,
                params.local_port,
                remote,
            )?,
            handle: self.next_handle(slot),
            accepting: remote,
        })
    }

    /// Returns the time at which a query that begins now ends without a request.
    pub(super) fn end_of_query(now: Instant, consumer_deadline: Option<Instant>) -> Instant {
        earlier(now + RESOLUTION_TIMEOUT, consumer_deadline)
    }

    /// Sends the request of a query, or waits longer for its answer. Returns `false` if there will be
    /// none in time.
    pub(super) fn continue_query(
        &mut self,
        now: Instant,
        (port, stack): (usize, &mut WorkerStack),
        owner: QuotaOwner,
        query: &mut MappingQuery,
    ) -> bool {
        let request = query.request;
        let (from, to) = (request.connecting.ip(), request.accepting.ip());
        let presence = self.presence(now, (port, to));
        if matches!(presence, Some(Presence::Absent | Presence::Silent)) {
            return false;
        }
        if now >= query.end {
            self.give_up(now, port, query);
            return false;
        }
        let longest = match stack.send_to_port_mapper(now, owner, from, to, &request.build()) {
            DatagramOutcome::Queued => {
                if query.sent.is_none() {
                    query.sent = Some(now);
                    query.pause = FIRST_REPEAT_PAUSE;
                    let patience = match presence {
                        Some(Presence::Answers) => LATE_TIMEOUT,
                        _ => ANSWER_TIMEOUT,
                    };
                    query.end = earlier(now + patience, query.consumer_deadline);
                }
                LONGEST_REPEAT_PAUSE
            }
            DatagramOutcome::Unresolved => LONGEST_NEIGHBOUR_PAUSE,
            DatagramOutcome::Dropped => return false,
        };
        query.deadline = query.end.min(now + query.pause);
        query.pause = longest.min(query.pause * 2);
        true
    }

    /// Remembers a request without an answer.
    fn give_up(&mut self, now: Instant, port: usize, query: &MappingQuery) {
        let Some(sent) = query.sent else {
            return;
        };
        let request = query.request;
        let is_silent = now >= sent + LATE_TIMEOUT;
        let presence = if is_silent {
            Presence::Silent
        } else {
            Presence::Absent
        };
        self.remember(now, (port, request.accepting.ip()), presence);
        if !is_silent {
            let late = LateRequest {
                port,
                request,
                sent,
                answer: None,
            };
            self.remember_late(now, late);
        }
    }

    /// Takes an answer to a request that was given up. Returns `false` for others.
    fn take_late_answer(
        &mut self,
        port: usize,
        datagram: &Datagram,
        answer: &PortMapperMessage,
    ) -> bool {
        let Some(late) = self.late.get_mut(&answer.handle) else {
            return false;
        };
        if late.port != port || !is_answer_to(&late.request, datagram, answer) {
            return false;
        }
        late.answer = Some(port_in(answer));
        true
    }

    /// Processes the messages that a port has received for the port mapper, up to the next answer to a
    /// query of `queue_pairs`. Returns that queue pair, and the port that its peer has named.
    #[cold]
    pub(super) fn next_answer(
        &mut self,
        now: Instant,
        (port, stack): (usize, &mut WorkerStack),
        queue_pairs: &QpTable,
    ) -> Option<(QpSlot, Option<u16>)> {
        while let Some(event) = stack.next_port_mapper_event() {
            let datagram = match event {
                PortMapperEvent::Received(datagram) => datagram,
                // Connects that wait for an answer find it at their next step.
                PortMapperEvent::Unreachable(peer) => {
                    self.remember(now, (port, peer), Presence::Absent);
                    let is_of_peer = |late: &LateRequest| {
                        late.port == port && late.request.accepting.ip() == peer
                    };
                    self.late.retain(|_, late| !is_of_peer(late));
                    continue;
                }
            };
            let Some(message) = PortMapperMessage::parse(datagram.payload()) else {
                continue;
            };
            match message.kind {
                PortMapperKind::Request if !datagram.is_copy => {
                    let kind = if stack.listens_on(message.accepting) {
                        PortMapperKind::Accept
                    } else {
                        PortMapperKind::Reject
                    };
                    stack.answer_datagram(now, &datagram, &message.answer(kind).build());
                }
                PortMapperKind::Accept | PortMapperKind::Reject => {
                    let slot = QpSlot(message.handle as u32);
                    let is_awaited = is_awaited(queue_pairs.get(slot), port, &datagram, &message);
                    if !is_awaited && !self.take_late_answer(port, &datagram, &message) {
                        continue;
                    }
                    self.remember(now, (port, datagram.from.ip()), Presence::Answers);
                    if message.kind == PortMapperKind::Accept {
                        let acknowledgement = message.answer(PortMapperKind::Acknowledge).build();
                        stack.answer_datagram(now, &datagram, &acknowledgement);
                    }
                    if is_awaited {
                        return Some((slot, port_in(&message)));
                    }
                }
                // Nothing was kept for an acknowledgement.
                PortMapperKind::Request | PortMapperKind::Acknowledge => {}
            }
        }
        None
    }
}

/// Returns whether a queue pair waits for this answer.
fn is_awaited(
    queue_pair: Option<&WorkerQp>,
    port: usize,
    datagram: &Datagram,
    answer: &PortMapperMessage,
) -> bool {
    let Some(queue_pair) = queue_pair.filter(|queue_pair| queue_pair.port == port) else {
        return false;
    };
    let LifecycleState::MappingPort(query) = &queue_pair.state else {
        return false;
    };
    is_answer_to(&query.request, datagram, answer)
}

/// Returns whether a message answers a request. Only the host that was asked may answer, and only for itself.
fn is_answer_to(
    request: &PortMapperMessage,
    datagram: &Datagram,
    answer: &PortMapperMessage,
) -> bool {
    answer.handle == request.handle
        && datagram.from.ip() == request.accepting.ip()
        && answer.accepting.ip() == request.accepting.ip()
}

/// The port that an answer names.
fn port_in(answer: &PortMapperMessage) -> Option<u16> {
    let port = answer.accepting.port();
    (answer.kind == PortMapperKind::Accept && port != 0).then_some(port)
}

/// The end of a wait, bounded by that of the whole set-up.
pub(super) fn earlier(end: Instant, consumer_deadline: Option<Instant>) -> Instant {
    consumer_deadline.map_or(end, |deadline| deadline.min(end))
}
