//! Queue pairs connected without rdma_cm: programs exchange GIDs and QP numbers by other means and
//! move both queue pairs to RTR (ibv_modify_qp(3)). iWARP needs a connection for that, so the two
//! daemons (or the one daemon at both ends) make it:
//!
//! ```text
//!   end with the lower (address, QP number)          the other end
//!        | PAIR from its client                           |
//!        | TCP to PAIRING_PORT, refused until the         | PAIR from its client, or later:
//!        | other daemon listens: tried again              | the request is kept until then
//!        |---- MPA request, private data: both QPNs ----->|
//!        |<--- MPA reply ---------------------------------| if it wants exactly this queue pair
//! ```
//!
//! A queue pair that names itself needs neither: it sends to itself over a TCP connection whose two
//! ends are the same, and it remains one queue pair with one connection in every account. All FPDUs that
//! it sends come back to it, and the message numbers of both directions agree by construction.
//!
//! A daemon starts to listen on its devices at the first PAIR of a client with another peer. Work requests may be
//! posted from PAIR on; if the connection fails, they are flushed and QP_FATAL carries the reason.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nix::libc;
use siw_host::ports::PortClaim;
use siw_shm::control::messages as m;
use siw_shm::control::{AsyncEventKind, CmEventMessage};

use super::listening::{Listeners, PAIRING_PORT};
use super::pair_schedule::PairAttempt;
use crate::control::context::Context;
use crate::control::device::devices::{no_route, socket_addr};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, send_reply};
use crate::control::resources::{ClientQp, QpPhase, Resources, denied_access};
use crate::ids::{ClientId, CmListenerId, Qpn};
use crate::worker::PAIR_RETRIES;
use crate::worker::messages::{Command, ConnectFailure, ConnectParams, QpSetup, RequestId};

/// First bytes of the private data of a request.
const MAGIC: [u8; 8] = *b"siwpair1";
/// Maximum number of peers' connections kept for queue pairs of this daemon that are not in RTR
/// yet.
const MAX_EARLY_REQUESTS: usize = 4096;
/// Pairs tried again in one turn of the control thread.
const RETRIES_PER_TURN: usize = 64;
/// Time that an end in RTR waits for the other end.
const PAIRING_TIMEOUT: Duration = Duration::from_secs(30);
/// Initial pause between two attempts; it doubles up to a second.
const FIRST_RETRY: Duration = Duration::from_millis(5);
const LONGEST_RETRY: Duration = Duration::from_secs(1);
/// Private data of the reject of a daemon without the requested queue pair.
const NO_SUCH_QP: &[u8] = b"siwpair: no such queue pair";

/// One end of a pair, from the other end's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PairKey {
    local: IpAddr,
    qpn: Qpn,
    peer: IpAddr,
    peer_qpn: Qpn,
}

/// Pairing state of the control thread, except for the attempts of queue pairs.
#[derive(Default)]
pub(in crate::control) struct Pairing {
    /// Listener on all devices, from the first PAIR on.
    listener: Option<CmListenerId>,
    port_claims: Vec<PortClaim>,
    /// Requests for queue pairs that are not in RTR yet, and the user (uid) of the queue pair.
    early: HashMap<PairKey, (RequestId, u32)>,
}

impl Pairing {
    /// Returns true if this is the listener for pairs.
    pub fn is_listener(&self, listener: CmListenerId) -> bool {
        self.listener == Some(listener)
    }

    /// Removes the request of a peer that gave up.
    pub fn forget_request(&mut self, request: RequestId) {
        self.early.retain(|_, (kept, _)| *kept != request);
    }

    /// Connects a queue pair with the one named by its client, see [`m::PairQp`].
    pub(in crate::control) fn pair_qp(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        id: ClientId,
        seq: u32,
        request: &m::PairQp,
    ) -> Outcome {
        let (qpn, peer_qpn) = (Qpn(request.qp_num), Qpn(request.peer_qp_num));
        let device = request.device as usize;
        let view = context.devices.check_device(device)?;
        let local = socket_addr(request.local).map(|addr| addr.ip());
        let own = local.filter(|ip| view.addresses.iter().any(|cidr| cidr.addr == *ip));
        let Some(local) = own else {
            return Err(Refusal::new(
                libc::EADDRNOTAVAIL,
                "the local GID is not an address of this device",
            ));
        };
        let peer = socket_addr(request.peer).map(|addr| addr.ip());
        let peer = peer.filter(|ip| !ip.is_unspecified() && ip.is_ipv4() == local.is_ipv4());
        let Some(peer) = peer else {
            return Err(Refusal::new(
                libc::EINVAL,
                "the peer's GID is not of the local GID's address family",
            ));
        };
        context
            .devices
            .find_device(None, peer)
            .ok_or_else(|| no_route(peer))?;
        let qp = context.resources.client_mut(id)?.qps.get(&qpn);
        let qp = qp.ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        if qp.phase != QpPhase::Detached {
            return Err(Refusal::new(
                libc::EISCONN,
                "the queue pair is or was connected; move it to RESET first",
            ));
        }
        let denied = denied_access(request.denied_access)?;
        let denied_before = qp.attr.denied_access;
        let to_itself = (local, qpn) == (peer, peer_qpn);
        if !to_itself {
            self.listen_for_pairs(context, listeners)?;
        }
        let initiates = to_itself || (local, qpn) < (peer, peer_qpn);
        let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
        let attempt = PairAttempt {
            local,
            peer,
            peer_qpn,
            ird: depth(request.ird),
            ord: depth(request.ord),
            initiates,
            to_itself,
            until: Instant::now() + PAIRING_TIMEOUT,
            retry_after: FIRST_RETRY,
            unknown_since: None,
            speaks_roce: false,
        };
        let until = attempt.until;
        if let Some(qp) = context.resources.qp_mut(id, qpn) {
            qp.pair = Some(attempt);
            qp.attr.denied_access = denied;
            qp.device = device;
        }
        context.resources.pair_times.set_time(until, id, qpn);
        let started = if initiates {
            connect_pair(context, id, qpn)
        } else {
            let key = PairKey {
                local,
                qpn,
                peer,
                peer_qpn,
            };
            match self.early.remove(&key) {
                Some((early, _)) => accept_pair(context, id, qpn, early),
                None => Ok(()),
            }
        };
        if let Err(refusal) = started {
            // The client may change the queue pair and ask again: nothing is tried meanwhile.
            if let Some(qp) = context.resources.qp_mut(id, qpn) {
                qp.pair = None;
                qp.attr.denied_access = denied_before;
            }
            return Err(refusal);
        }
        send_reply::<m::PairQp>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    fn listen_for_pairs(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
    ) -> Result<(), Refusal> {
        if self.listener.is_some() {
            return Ok(());
        }
        let views = context.devices.views.iter().enumerate();
        let running = views.filter(|(_, view)| !view.is_gone);
        let devices: Vec<usize> = running.map(|(device, _)| device).collect();
        let claims = listeners.claim_port_of_all(&context.devices, &devices, PAIRING_PORT)?;
        let listener = listeners.next_number();
        for device in devices {
            listen_for_pairs_on(context, listener, device);
        }
        self.port_claims = claims;
        self.listener = Some(listener);
        Ok(())
    }

    /// Listens on a device that was added.
    pub(in crate::control) fn add_device(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        device: usize,
    ) {
        let Some(listener) = self.listener else {
            return;
        };
        match listeners.claim_port_of_all(&context.devices, &[device], PAIRING_PORT) {
            Ok(claims) => {
                self.port_claims.extend(claims);
                listen_for_pairs_on(context, listener, device);
            }
            Err(error) => tracing::warn!(device, "no pairs on this device: {}", error.reason()),
        }
    }

    /// A worker could not listen for queue pairs: the next request tries again.
    pub(in crate::control) fn forget_listener(&mut self, listener: CmListenerId) {
        if self.listener == Some(listener) {
            self.listener = None;
            self.port_claims = Vec::new();
        }
    }

    /// The initiating end of a pair connects.
    pub(in crate::control) fn on_pair_request(
        &mut self,
        context: &mut Context,
        request: RequestId,
        event: &CmEventMessage,
    ) {
        let addresses = event
            .local
            .to_socket_addr()
            .zip(event.peer.to_socket_addr());
        let numbers = parse_private_data(event.private_data.as_bytes());
        let Some(((local, peer), (peer_qpn, qpn))) = addresses.zip(numbers) else {
            return reject_pair(context, request, b"siwpair: not the request of a pair");
        };
        let key = PairKey {
            local: local.ip(),
            qpn,
            peer: peer.ip(),
            peer_qpn,
        };
        let Some(id) = context.resources.owner_of_qp(qpn) else {
            return reject_pair(context, request, NO_SUCH_QP);
        };
        let matches = waiting_pair(&mut context.resources, id, qpn).is_some_and(|(_, attempt)| {
            let wanted = (attempt.local, attempt.peer, attempt.peer_qpn);
            !attempt.to_itself && wanted == (key.local, key.peer, key.peer_qpn)
        });
        if matches {
            if accept_pair(context, id, qpn, request).is_err() {
                reject_pair(context, request, b"siwpair: a limit of the client");
            }
        } else if let Some(user) = self.user_with_room(&context.resources, id) {
            // A newer request for the same two queue pairs replaces the older one.
            if let Some((older, _)) = self.early.insert(key, (request, user)) {
                reject_pair(context, older, b"siwpair: connected again");
            }
        } else {
            reject_pair(context, request, b"siwpair: too many requests");
        }
    }

    /// The user of a client, if another early request may be kept for its queue pairs: each user has a
    /// quarter of them.
    fn user_with_room(&self, resources: &Resources, id: ClientId) -> Option<u32> {
        let user = resources.clients.get(&id)?.account.uid();
        let early = &self.early;
        let of_user = early.values().filter(|(_, of)| *of == user).count();
        (early.len() < MAX_EARLY_REQUESTS && of_user < MAX_EARLY_REQUESTS / 4).then_some(user)
    }
}

/// Listens for connections of pairs on all workers of a device.
fn listen_for_pairs_on(context: &mut Context, listener: CmListenerId, device: usize) {
    for &worker in &context.devices.views[device].workers {
        let command = Command::Listen {
            listener,
            // It serves all clients: its pending requests belong to the daemon itself.
            user: nix::unistd::getuid().as_raw(),
            device,
            local: None,
            port: PAIRING_PORT,
            backlog: MAX_EARLY_REQUESTS,
            mpa: m::MpaOptions::BY_DEVICE,
            is_streaming: false,
        };
        context.workers.post_command(worker, command);
    }
}

/// Attempt of a queue pair that waits for its other end.
fn waiting_pair(
    resources: &mut Resources,
    id: ClientId,
    qpn: Qpn,
) -> Option<(&mut ClientQp, PairAttempt)> {
    let qp = resources.qp_mut(id, qpn)?;
    let attempt = qp.pair.clone()?;
    (qp.phase == QpPhase::Detached).then_some((qp, attempt))
}

/// Starts connecting a queue pair that waits for its other end; returns its device and attempt.
fn begin_attempt(
    resources: &mut Resources,
    id: ClientId,
    qpn: Qpn,
) -> Result<Option<(usize, PairAttempt)>, Refusal> {
    resources.count_connection(id, qpn, PortClaim::default())?;
    Ok(waiting_pair(resources, id, qpn).map(|(qp, attempt)| {
        qp.phase = QpPhase::Connecting;
        qp.end_is_recorded = false;
        qp.cm_channel = None;
        (qp.device, attempt)
    }))
}

/// Assigns the queue pair to a worker and returns the worker's ends of its rings.
fn set_up_pair(
    resources: &mut Resources,
    id: ClientId,
    qpn: Qpn,
    worker: usize,
) -> Result<Box<QpSetup>, Refusal> {
    if let Some(qp) = resources.qp_mut(id, qpn) {
        qp.worker = worker;
    }
    let setup = resources.client_mut(id)?.worker_setup(qpn)?;
    setup.sq.set_worker(worker as u32);
    Ok(Box::new(setup))
}

/// Connects as the initiating end.
fn connect_pair(context: &mut Context, id: ClientId, qpn: Qpn) -> Result<(), Refusal> {
    let Some((device, attempt)) = begin_attempt(&mut context.resources, id, qpn)? else {
        return Ok(());
    };
    let worker = if attempt.to_itself {
        // Whatever their port, connections to themselves have the same hash, which is symmetric.
        let end = SocketAddr::new(attempt.local, PAIRING_PORT);
        context.devices.views[device].steering.owner_of(end, end)
    } else {
        context.devices.next_worker_of(device)
    };
    let setup = set_up_pair(&mut context.resources, id, qpn, worker)?;
    let params = Box::new(ConnectParams {
        device,
        local: Some(attempt.local),
        local_port: None,
        remote: SocketAddr::new(attempt.peer, PAIRING_PORT),
        mapped_port: None,
        drawn_port: None,
        asked_mapper: None,
        to_itself: attempt.to_itself,
        private_data: to_private_data(qpn, attempt.peer_qpn),
        ird: attempt.ird,
        ord: attempt.ord,
        crc: None,
        revision: None,
        timeout_ms: Some(PAIRING_TIMEOUT.as_millis() as u32),
        refusals: 0,
        is_turned: false,
    });
    context
        .workers
        .post_command(worker, Command::Connect { setup, params });
    Ok(())
}

/// Accepts the connection of the initiating end.
fn accept_pair(
    context: &mut Context,
    id: ClientId,
    qpn: Qpn,
    request: RequestId,
) -> Result<(), Refusal> {
    let Some((_, attempt)) = begin_attempt(&mut context.resources, id, qpn)? else {
        return Ok(());
    };
    let setup = set_up_pair(&mut context.resources, id, qpn, request.worker())?;
    let command = Command::Accept {
        setup,
        request,
        private_data: Vec::new(),
        ird: attempt.ird,
        ord: attempt.ord,
    };
    context.workers.post_command(request.worker(), command);
    Ok(())
}

fn reject_pair(context: &mut Context, request: RequestId, private_data: &[u8]) {
    let command = Command::Reject {
        request,
        private_data: private_data.to_vec(),
    };
    context.workers.post_command(request.worker(), command);
}

/// A connection attempt failed. Returns true if the queue pair was a pair's: it is handled
/// here.
pub(in crate::control) fn on_pair_failed(
    context: &mut Context,
    id: ClientId,
    qpn: Qpn,
    failure: &ConnectFailure,
) -> bool {
    let Some((qp, attempt)) = waiting_pair(&mut context.resources, id, qpn) else {
        return false;
    };
    let now = Instant::now();
    // The accepting end waits for the next connection until its deadline, which may have passed
    // during this one.
    if !attempt.initiates {
        let deadline = attempt.until.max(now);
        context.resources.pair_times.set_time(deadline, id, qpn);
        return true;
    }
    let is_unknown = matches!(failure, ConnectFailure::Rejected(data) if data == NO_SUCH_QP);
    let unknown_since = is_unknown.then(|| attempt.unknown_since.unwrap_or(now));
    if let Some(pair) = &mut qp.pair {
        pair.unknown_since = unknown_since;
    }
    let reason = match failure {
        _ if unknown_since.is_some_and(|since| now >= since + PAIR_RETRIES) => {
            format!("{} has no queue pair {}", attempt.peer, attempt.peer_qpn.0)
        }
        ConnectFailure::Protocol(why) | ConnectFailure::Local(why) => why.clone(),
        _ if now < attempt.until => {
            let again = now + attempt.retry_after;
            if let Some(pair) = &mut qp.pair {
                pair.retry_after = (pair.retry_after * 2).min(LONGEST_RETRY);
            }
            let next = again.min(attempt.until);
            context.resources.pair_times.set_time(next, id, qpn);
            return true;
        }
        _ if attempt.speaks_roce => attempt.describe_absence(),
        ConnectFailure::Unreachable => {
            format!("no neighbour answers for {}", attempt.peer)
        }
        ConnectFailure::Refused => attempt.describe_refusal(),
        _ => attempt.describe_absence(),
    };
    fail_pair(context, id, qpn, &reason);
    true
}

/// Records that a host has sent RC over RoCE to a queue pair, if that waits for it. The wait goes on, since anyone
/// may have sent it.
pub(in crate::control) fn note_roce_peer(resources: &mut Resources, qpn: Qpn, remote: IpAddr) {
    let Some(id) = resources.owner_of_qp(qpn) else {
        return;
    };
    let pair = resources.qp_mut(id, qpn).and_then(|qp| qp.pair.as_mut());
    if let Some(pair) = pair.filter(|pair| pair.peer == remote) {
        pair.speaks_roce = true;
    }
}

/// Flushes posted work requests, records the reason, and reports it to the client.
fn fail_pair(context: &mut Context, id: ClientId, qpn: Qpn, reason: &str) {
    let Some(qp) = context.resources.qp_mut(id, qpn) else {
        return;
    };
    qp.state = m::QpState::Error;
    qp.phase = QpPhase::Attached;
    qp.worker = 0;
    if let Some(attempt) = &qp.pair {
        qp.local = SocketAddr::new(attempt.local, 0).into();
        qp.peer = SocketAddr::new(attempt.peer, PAIRING_PORT).into();
    }
    context.record_end(qpn, false, Some(reason));
    let client = context.resources.clients.get(&id);
    if let Some(Ok(setup)) = client.map(|client| client.worker_setup(qpn)) {
        let setup = Box::new(setup);
        context
            .workers
            .post_command(0, Command::InstallQp { setup });
    }
    let why = format!("not connected: {reason}");
    context
        .resources
        .post_async_event(id, AsyncEventKind::QpFatal, qpn.0, &why);
}

/// Retries the attempts that are due, or gives up.
pub(in crate::control) fn retry_pairs(context: &mut Context) {
    let now = Instant::now();
    // The rest follows in the next turn.
    for _ in 0..RETRIES_PER_TURN {
        let Some((id, qpn)) = context.resources.pair_times.take_due(now) else {
            return;
        };
        let Some((_, attempt)) = waiting_pair(&mut context.resources, id, qpn) else {
            continue;
        };
        if now >= attempt.until {
            fail_pair(context, id, qpn, &attempt.describe_absence());
        } else if attempt.initiates {
            context
                .resources
                .pair_times
                .set_time(attempt.until, id, qpn);
            if let Err(refusal) = connect_pair(context, id, qpn) {
                fail_pair(context, id, qpn, refusal.reason());
            }
        }
    }
}

/// Builds the private data of a request: the numbers of both queue pairs.
fn to_private_data(from: Qpn, to: Qpn) -> Vec<u8> {
    [&MAGIC[..], &from.0.to_be_bytes(), &to.0.to_be_bytes()].concat()
}

/// Parses the sender's QP number and the requested one.
fn parse_private_data(data: &[u8]) -> Option<(Qpn, Qpn)> {
    let rest = data.strip_prefix(&MAGIC)?;
    let (from, rest) = rest.split_first_chunk::<4>()?;
    let (to, _) = rest.split_first_chunk::<4>()?;
    Some((Qpn(u32::from_be_bytes(*from)), Qpn(u32::from_be_bytes(*to))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_names_both_queue_pairs() {
        let data = to_private_data(Qpn(0x10203), Qpn(7));
        assert_eq!(parse_private_data(&data), Some((Qpn(0x10203), Qpn(7))));
        assert_eq!(parse_private_data(&data[..15]), None);
        assert_eq!(parse_private_data(b"siwpair2________"), None);
    }
}
