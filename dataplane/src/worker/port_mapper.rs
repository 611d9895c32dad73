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

use siw_iwarp::TxRecord;
use siw_iwarp::port_mapper::{PortMapperKind, PortMapperMessage};
use siw_tcp::{Datagram, DatagramOutcome, Instant, PortMapperEvent, QuotaOwner, Stack};

use super::lifecycle_state::{LifecycleState, MappingQuery};
use super::messages::ConnectParams;
use super::slots::QpSlot;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::rx_frame::RxFrame;

type WorkerStack = Stack<RxFrame, TxRecord>;

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

    /// Forgets the peers on a port.
    pub(super) fn forget_port(&mut self, port: usize) {
        self.absent.retain(|(on, _), _| *on != port);
    }

    fn remember_absence(&mut self, now: Instant, peer: (usize, IpAddr)) {
        if self.absent.len() >= ABSENCES_MAX {
            self.absent.retain(|_, until| *until > now);
        }
        if self.absent.len() < ABSENCES_MAX {
            self.absent.insert(peer, now + ABSENCE_MEMORY);
        }
    }

    /// Forgets that a peer has no mapper, after it has refused a connection.
    pub(super) fn ask_again(&mut self, port: usize, peer: IpAddr) {
        self.absent.remove(&(port, peer));
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

    /// Returns the time at which a query that begins now ends without an answer.
    pub(super) fn end_of_query(now: Instant, consumer_deadline: Option<Instant>) -> Instant {
        let end = now + ANSWER_TIMEOUT;
        consumer_deadline.map_or(end, |deadline| deadline.min(end))
    }

    /// Sends the request of a query, or waits longer for its answer. Returns `false` if there will be
    /// none.
    pub(super) fn continue_query(
        &mut self,
        now: Instant,
        (port, stack): (usize, &mut WorkerStack),
        owner: QuotaOwner,
        query: &mut MappingQuery,
    ) -> bool {
        let request = query.request;
        let (from, to) = (request.connecting.ip(), request.accepting.ip());
        let is_absent = self.is_absent(now, (port, to));
        if now >= query.end || is_absent {
            if query.was_sent && !is_absent {
                self.remember_absence(now, (port, to));
            }
            return false;
        }
        let pause = match stack.send_to_port_mapper(now, owner, from, to, &request.build()) {
            DatagramOutcome::Queued => {
                query.was_sent = true;
                REPEAT_PAUSE
            }
            DatagramOutcome::Unresolved => NEIGHBOUR_PAUSE,
            DatagramOutcome::Dropped => return false,
        };
        query.deadline = query.end.min(now + pause);
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
                    self.remember_absence(now, (port, peer));
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
                    if !is_awaited(queue_pairs.get(slot), port, &datagram, &message) {
                        continue;
                    }
                    let is_accepted = message.kind == PortMapperKind::Accept;
                    if is_accepted {
                        let acknowledgement = message.answer(PortMapperKind::Acknowledge).build();
                        stack.answer_datagram(now, &datagram, &acknowledgement);
                    }
                    let mapped = is_accepted.then_some(message.accepting.port());
                    return Some((slot, mapped.filter(|port| *port != 0)));
                }
                // Nothing was kept for an acknowledgement.
                PortMapperKind::Request | PortMapperKind::Acknowledge => {}
            }
        }
        None
    }
}

/// Returns whether a queue pair waits for this answer. Only the host that was asked may answer, and only
/// for itself.
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
    let asked = &query.request;
    answer.handle == asked.handle
        && datagram.from.ip() == asked.accepting.ip()
        && answer.accepting.ip() == asked.accepting.ip()
}
