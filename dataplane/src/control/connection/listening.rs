//! Listeners and their pending connection requests. The time of a lookup does not depend on their
//! number.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;

use nix::libc;
use siw_host::ports::{ClaimError, PortClaim};
use siw_shm::control::messages as m;

use crate::control::account::quotas::{Charge, Quota};
use crate::control::context::Context;
use crate::control::device::devices::{Devices, LocalScope};
use crate::control::request::refusal::Refusal;
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId};
use crate::worker::messages::{Command, RequestId};

/// TCP port for connections between the two ends of a pair.
pub const PAIRING_PORT: u16 = 5045;
/// Number of ports selected by the kernel that are tried for one request. One fails only if a program
/// or a client has it at another address.
const KERNEL_PORTS: usize = 16;
/// Number of ports selected by siwd that are tried for one request.
const CLAIMED_PORTS: usize = 16;

/// Meaning of a port: the same number may be in use in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortSpace {
    /// TCP ports, of connections.
    Tcp,
    /// Ports in the service ids of datagram services. The kernel has nothing of the kind for its own sockets.
    Datagrams,
}

/// A listener, on all workers of its devices, or a binding that may become one.
pub struct ClientListener {
    pub client: ClientId,
    pub space: PortSpace,
    pub cm_channel: CmChannelId,
    pub cookie: u64,
    /// Device indices.
    pub devices: Vec<usize>,
    /// It is on all devices, also those that are added.
    pub on_every_device: bool,
    pub scope: LocalScope,
    pub port: u16,
    /// The port may be shared with other bindings that set this flag.
    pub reuse: bool,
    /// False for a mere binding.
    pub listening: bool,
    /// Maximum number of pending requests.
    pub backlog: u32,
    /// Settings that differ from those of its devices.
    pub mpa: m::MpaOptions,
    /// Its connections begin in streaming mode.
    pub is_streaming: bool,
    /// Number of pending requests.
    pub waiting: u32,
    /// An overflow of the backlog was logged.
    pub overflow_logged: bool,
    /// Claims of the port in the kernel, on devices that share addresses with it.
    pub port_claims: Vec<PortClaim>,
    /// Its charge, and those of the claims on devices that were added later.
    pub charges: Vec<Charge<2>>,
}

impl ClientListener {
    /// Listens on all workers of a device.
    pub fn listen_on(&self, context: &mut Context, number: CmListenerId, user: u32, device: usize) {
        let view = &context.devices.views[device];
        let locals: Vec<Option<IpAddr>> = match self.scope {
            LocalScope::All => vec![None],
            LocalScope::One(ip) => vec![Some(ip)],
            scope => {
                let own = view.addresses.iter().map(|cidr| cidr.addr);
                own.filter(|ip| scope.includes(*ip)).map(Some).collect()
            }
        };
        for &worker in &view.workers {
            for &local in &locals {
                let command = Command::Listen {
                    listener: number,
                    user,
                    device,
                    local,
                    port: self.port,
                    backlog: self.backlog as usize,
                    mpa: self.mpa,
                    is_streaming: self.is_streaming,
                };
                context.workers.post_command(worker, command);
            }
        }
    }
}

/// Quota amounts of `listeners` listeners or bindings, and of these claims.
pub fn claim_amounts(listeners: u64, port_claims: &[PortClaim]) -> [(Quota, u64); 2] {
    let descriptors = port_claims.iter().map(PortClaim::descriptors).sum();
    [
        (Quota::Listeners, listeners),
        (Quota::Descriptors, descriptors),
    ]
}

/// All listeners, by number, by port and by client.
#[derive(Default)]
pub(in crate::control) struct Listeners {
    all: BTreeMap<CmListenerId, ClientListener>,
    by_port: BTreeMap<(PortSpace, u16), Vec<CmListenerId>>,
    by_client: BTreeMap<ClientId, BTreeSet<CmListenerId>>,
    last: u32,
}

impl Listeners {
    /// Adds a listener.
    pub fn insert(&mut self, number: CmListenerId, listener: ClientListener) {
        let key = (listener.space, listener.port);
        self.by_port.entry(key).or_default().push(number);
        let of_client = self.by_client.entry(listener.client).or_default();
        of_client.insert(number);
        self.all.insert(number, listener);
    }

    /// Removes a listener.
    pub fn remove(&mut self, number: CmListenerId) -> Option<ClientListener> {
        let listener = self.all.remove(&number)?;
        let key = (listener.space, listener.port);
        if let Some(same) = self.by_port.get_mut(&key) {
            same.retain(|other| *other != number);
            if same.is_empty() {
                self.by_port.remove(&key);
            }
        }
        if let Some(of_client) = self.by_client.get_mut(&listener.client) {
            of_client.remove(&number);
            if of_client.is_empty() {
                self.by_client.remove(&listener.client);
            }
        }
        Some(listener)
    }

    /// Numbers of a client's listeners.
    pub fn of_client(&self, client: ClientId) -> impl Iterator<Item = CmListenerId> {
        self.by_client.get(&client).into_iter().flatten().copied()
    }

    /// Listeners with higher numbers than this one.
    pub fn after(
        &self,
        number: CmListenerId,
    ) -> impl Iterator<Item = (CmListenerId, &ClientListener)> {
        let later = self.all.range((Bound::Excluded(number), Bound::Unbounded));
        later.map(|(number, listener)| (*number, listener))
    }

    /// A listener by its number.
    pub fn get(&self, number: CmListenerId) -> Option<&ClientListener> {
        self.all.get(&number)
    }

    /// Mutable access to a listener; its port must not change.
    pub fn get_mut(&mut self, number: CmListenerId) -> Option<&mut ClientListener> {
        self.all.get_mut(&number)
    }

    /// Mutable access to all listeners; their ports must not change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (CmListenerId, &mut ClientListener)> {
        let all = self.all.iter_mut();
        all.map(|(number, listener)| (*number, listener))
    }

    /// Counts a new pending request.
    pub fn count_waiting(&mut self, number: CmListenerId) {
        if let Some(listener) = self.all.get_mut(&number) {
            listener.waiting += 1;
        }
    }

    /// Logs an overflow of the backlog, once per listener; the peer is only rejected.
    pub fn log_overflow(&mut self, number: CmListenerId) {
        let Some(listener) = self.all.get_mut(&number) else {
            return;
        };
        if listener.waiting >= listener.backlog && !listener.overflow_logged {
            listener.overflow_logged = true;
            tracing::warn!(
                port = listener.port,
                backlog = listener.backlog,
                "connections are refused: the backlog is full"
            );
        }
    }

    /// Counts a request as no longer pending, for whichever reason.
    pub fn count_answered(&mut self, number: CmListenerId) {
        if let Some(listener) = self.all.get_mut(&number) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    /// All listeners, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = (CmListenerId, &ClientListener)> {
        self.all.iter().map(|(other, listener)| (*other, listener))
    }

    /// Number of listeners, without mere bindings.
    pub fn len(&self) -> usize {
        self.all.values().filter(|one| one.listening).count()
    }

    /// Returns true if the port is unavailable on one of these devices at an address of the scope.
    /// With `reuse`, holders that share their port do not count.
    pub fn is_port_taken(
        &self,
        devices: &[usize],
        scope: LocalScope,
        port: (PortSpace, u16),
        reuse: bool,
    ) -> bool {
        self.meets_any(devices, scope, port, |other| {
            other.listening || !(reuse && other.reuse)
        })
    }

    /// Returns true if a listener has the port on one of these devices at an address of the scope.
    pub fn has_listener(
        &self,
        devices: &[usize],
        scope: LocalScope,
        port: (PortSpace, u16),
    ) -> bool {
        self.meets_any(devices, scope, port, |other| other.listening)
    }

    /// The datagram service at this address.
    pub fn find_service(
        &self,
        device: usize,
        ip: IpAddr,
        port: u16,
    ) -> Option<(CmListenerId, &ClientListener)> {
        let same = self.by_port.get(&(PortSpace::Datagrams, port));
        let mut same = same
            .into_iter()
            .flatten()
            .filter_map(|number| Some((*number, self.all.get(number)?)));
        same.find(|(_, service)| {
            service.listening && service.devices.contains(&device) && service.scope.includes(ip)
        })
    }

    /// Returns the requested port for a datagram service, or a free one for 0.
    pub fn choose_service_port(
        &self,
        devices: &[usize],
        scope: LocalScope,
        asked: u16,
        reuse: bool,
    ) -> Result<u16, Refusal> {
        let is_free = |port: u16, reuse| {
            !self.is_port_taken(devices, scope, (PortSpace::Datagrams, port), reuse)
        };
        if asked != 0 {
            return is_free(asked, reuse)
                .then_some(asked)
                .ok_or_else(|| port_in_use(asked));
        }
        dynamic_ports()
            .find(|port| is_free(*port, false))
            .ok_or_else(no_free_port)
    }

    /// Allocates a number that no other listener has.
    pub fn next_number(&mut self) -> CmListenerId {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            let number = CmListenerId(self.last);
            if !self.all.contains_key(&number) {
                return number;
            }
        }
    }

    /// Claims a port on all addresses of the devices.
    pub fn claim_port_of_all(
        &self,
        all: &Devices,
        devices: &[usize],
        port: u16,
    ) -> Result<Vec<PortClaim>, Refusal> {
        if self.is_port_taken(devices, LocalScope::All, (PortSpace::Tcp, port), false) {
            return Err(port_in_use(port));
        }
        Ok(all.claim_against_kernel(devices, LocalScope::All, port)?)
    }

    /// Returns the requested port, or a free one for 0, with its claims in the kernel.
    pub fn choose_port(
        &self,
        all: &Devices,
        devices: &[usize],
        scope: LocalScope,
        asked: u16,
        reuse: bool,
    ) -> Result<(u16, Vec<PortClaim>), Refusal> {
        // A listener of a client would take the connections of other clients' queue pairs.
        let is_used =
            |port, reuse| self.is_port_taken(devices, scope, (PortSpace::Tcp, port), reuse);
        let is_taken = |port| port == PAIRING_PORT || is_used(port, reuse);
        if asked != 0 {
            return if is_taken(asked) {
                Err(port_in_use(asked))
            } else {
                Ok((asked, all.claim_against_kernel(devices, scope, asked)?))
            };
        }
        // One call of the kernel's instead of one for each port that a program or a client has.
        for _ in 0..KERNEL_PORTS {
            let Some((port, _held)) = all.claim_any_port(devices, scope)? else {
                break;
            };
            if !is_used(port, false) {
                match all.claim_against_kernel(devices, scope, port) {
                    Ok(claims) => return Ok((port, claims)),
                    Err(ClaimError::Taken { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let is_free = |port: &u16| !is_used(*port, false);
        for port in dynamic_ports().filter(is_free).take(CLAIMED_PORTS) {
            match all.claim_against_kernel(devices, scope, port) {
                Ok(claims) => return Ok((port, claims)),
                Err(ClaimError::Taken { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(no_free_port())
    }

    fn meets_any(
        &self,
        devices: &[usize],
        scope: LocalScope,
        port: (PortSpace, u16),
        counts: impl Fn(&ClientListener) -> bool,
    ) -> bool {
        let same = self.by_port.get(&port).into_iter().flatten();
        same.filter_map(|other| self.all.get(other)).any(|other| {
            let mut its_devices = other.devices.iter();
            its_devices.any(|device| devices.contains(device))
                && other.scope.overlaps(scope)
                && counts(other)
        })
    }
}

/// Connection request that awaits the application's answer. It may outlive its listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingRequest {
    pub request: RequestId,
    pub listener: CmListenerId,
    pub client: ClientId,
    pub cm_channel: CmChannelId,
    /// Cookie of the listener.
    pub cookie: u64,
    /// Device that the request came to.
    pub device: usize,
    pub mode: RequestMode,
}

/// Mode of a connection without a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestMode {
    /// The TCP connection is being opened.
    Opening,
    /// It is in streaming mode.
    Streaming,
    /// It was in streaming mode, and awaits the peer's MPA request.
    Turned,
    /// It awaits the application's answer to the peer's MPA request.
    Requested,
}

/// Pending connection requests, by the client's number, by the worker's id, and by client and listener.
#[derive(Default)]
pub(in crate::control) struct ConnectRequests {
    all: BTreeMap<ConnectRequestId, WaitingRequest>,
    by_worker_request: BTreeMap<RequestId, ConnectRequestId>,
    by_listener: BTreeSet<(ClientId, CmListenerId, ConnectRequestId)>,
    last: u32,
}

impl ConnectRequests {
    /// Allocates the number of a request; never 0, which means none.
    pub fn next_number(&mut self) -> ConnectRequestId {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            let number = ConnectRequestId(self.last);
            if !self.all.contains_key(&number) {
                return number;
            }
        }
    }

    /// Adds a request under both keys.
    pub fn insert(&mut self, number: ConnectRequestId, waiting: WaitingRequest) {
        self.by_worker_request.insert(waiting.request, number);
        self.by_listener
            .insert((waiting.client, waiting.listener, number));
        self.all.insert(number, waiting);
    }

    /// Looks up a request by the client's number.
    pub fn get(&self, number: ConnectRequestId) -> Option<WaitingRequest> {
        self.all.get(&number).copied()
    }

    /// Mutable access to a request by the client's number.
    pub fn get_mut(&mut self, number: ConnectRequestId) -> Option<&mut WaitingRequest> {
        self.all.get_mut(&number)
    }

    /// Removes a request by the client's number.
    pub fn remove(&mut self, number: ConnectRequestId) -> Option<WaitingRequest> {
        let waiting = self.all.remove(&number)?;
        self.by_worker_request.remove(&waiting.request);
        self.by_listener
            .remove(&(waiting.client, waiting.listener, number));
        Some(waiting)
    }

    /// Removes a request that its worker reports as ended.
    pub fn remove_by_worker_request(
        &mut self,
        request: RequestId,
    ) -> Option<(ConnectRequestId, WaitingRequest)> {
        let number = *self.by_worker_request.get(&request)?;
        Some((number, self.remove(number)?))
    }

    /// Numbers of a client's requests.
    pub fn of_client(&self, client: ClientId) -> impl Iterator<Item = ConnectRequestId> {
        self.of_listeners(client, CmListenerId(0), CmListenerId(u32::MAX))
    }

    /// Numbers of the requests to a client's listeners from `first` to `last`.
    fn of_listeners(
        &self,
        client: ClientId,
        first: CmListenerId,
        last: CmListenerId,
    ) -> impl Iterator<Item = ConnectRequestId> {
        let from = (client, first, ConnectRequestId(0));
        let to = (client, last, ConnectRequestId(u32::MAX));
        let found = self.by_listener.range(from..=to);
        found.map(|(_, _, number)| *number)
    }

    /// Removes the requests of a client's listener that ended. Connections in streaming mode stay.
    pub fn forget_listener(&mut self, client: ClientId, listener: CmListenerId) {
        let requests = self.of_listeners(client, listener, listener);
        let is_request = |number: &ConnectRequestId| {
            let found = self.all.get(number);
            found.is_some_and(|found| found.mode == RequestMode::Requested)
        };
        let ended: Vec<_> = requests.filter(is_request).collect();
        for number in ended {
            self.remove(number);
        }
    }

    /// The number of a connection that its worker names.
    pub fn number_of(&self, request: RequestId) -> Option<ConnectRequestId> {
        self.by_worker_request.get(&request).copied()
    }
}

/// Dynamic ports, from a random one on.
fn dynamic_ports() -> impl Iterator<Item = u16> {
    let start = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u16;
    (0..28_000u16).map(move |index| 32_768 + (start.wrapping_add(index) % 28_000))
}

fn no_free_port() -> Refusal {
    Refusal::new(libc::EADDRINUSE, "no free port")
}

pub(in crate::control) fn port_in_use(port: u16) -> Refusal {
    Refusal::new(libc::EADDRINUSE, format!("port {port} is in use"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener on port 7 of all addresses of the first device.
    fn new_listener() -> ClientListener {
        ClientListener {
            client: ClientId(1),
            space: PortSpace::Tcp,
            cm_channel: CmChannelId(1),
            cookie: 0,
            devices: vec![0],
            on_every_device: false,
            scope: LocalScope::All,
            port: 7,
            reuse: false,
            listening: true,
            backlog: 1,
            mpa: m::MpaOptions::BY_DEVICE,
            is_streaming: false,
            waiting: 0,
            overflow_logged: false,
            port_claims: Vec::new(),
            charges: Vec::new(),
        }
    }

    #[test]
    fn a_port_is_taken_where_its_address_and_a_device_meet_and_free_again_afterwards() {
        let mut all = Listeners::default();
        let one: IpAddr = [10, 0, 0, 1].into();
        let other = [10, 0, 0, 2].into();
        let listener = |devices: &[usize], ip| ClientListener {
            devices: devices.to_vec(),
            scope: LocalScope::One(ip),
            ..new_listener()
        };
        all.insert(CmListenerId(1), listener(&[0, 1], one));
        all.insert(CmListenerId(2), listener(&[0], other));
        let taken = |all: &Listeners, devices: &[usize], scope, port| {
            all.is_port_taken(devices, scope, (PortSpace::Tcp, port), true)
        };
        let (at_one, at_other) = (LocalScope::One(one), LocalScope::One(other));
        assert!(taken(&all, &[1], LocalScope::All, 7) && taken(&all, &[0], at_one, 7));
        assert!(taken(&all, &[1], LocalScope::Ipv4, 7) && !taken(&all, &[1], LocalScope::Ipv6, 7));
        assert!(!taken(&all, &[1], at_other, 7) && !taken(&all, &[2], at_one, 7));
        assert!(!taken(&all, &[0], at_one, 8));
        assert!(all.remove(CmListenerId(1)).is_some() && all.remove(CmListenerId(1)).is_none());
        assert!(!taken(&all, &[1], LocalScope::All, 7) && taken(&all, &[0], LocalScope::All, 7));
        assert_eq!((all.len(), all.iter().count()), (1, 1));
        assert!(all.of_client(ClientId(1)).eq([CmListenerId(2)]));
    }

    #[test]
    fn bindings_share_a_port_until_one_of_them_listens() {
        let mut all = Listeners::default();
        let binding = |reuse, listening| ClientListener {
            reuse,
            listening,
            ..new_listener()
        };
        all.insert(CmListenerId(1), binding(true, false));
        assert!(all.is_port_taken(&[0], LocalScope::All, (PortSpace::Tcp, 7), false));
        assert!(!all.is_port_taken(&[0], LocalScope::All, (PortSpace::Tcp, 7), true));
        assert!(!all.has_listener(&[0], LocalScope::Ipv4, (PortSpace::Tcp, 7)));
        all.insert(CmListenerId(2), binding(true, true));
        assert!(all.is_port_taken(&[0], LocalScope::All, (PortSpace::Tcp, 7), true));
        assert!(all.has_listener(&[0], LocalScope::Ipv4, (PortSpace::Tcp, 7)));
    }

    #[test]
    fn a_request_goes_by_either_name() {
        let mut requests = ConnectRequests::default();
        let waiting = |n: u32| WaitingRequest {
            request: RequestId(u64::from(n) + 100),
            listener: CmListenerId(n % 2),
            client: ClientId((n / 5).into()),
            cm_channel: CmChannelId(1),
            cookie: 0,
            device: 0,
            mode: RequestMode::Requested,
        };
        for n in 1..6 {
            requests.insert(ConnectRequestId(n), waiting(n));
        }
        let first = Some((ConnectRequestId(1), waiting(1)));
        assert_eq!(requests.remove_by_worker_request(RequestId(101)), first);
        assert_eq!(requests.remove_by_worker_request(RequestId(101)), None);
        assert_eq!(requests.remove(ConnectRequestId(2)), Some(waiting(2)));
        assert_eq!(requests.remove_by_worker_request(RequestId(102)), None);
        assert!(requests.of_client(ClientId(1)).eq([ConnectRequestId(5)]));
        assert_eq!(requests.of_client(ClientId(0)).count(), 2);
        requests.forget_listener(ClientId(1), CmListenerId(1));
        requests.forget_listener(ClientId(0), CmListenerId(1));
        assert_eq!(requests.of_client(ClientId(1)).count(), 0);
        assert_eq!(requests.get(ConnectRequestId(3)), None);
        assert_eq!(requests.remove_by_worker_request(RequestId(103)), None);
        assert_eq!(requests.get(ConnectRequestId(4)), Some(waiting(4)));
    }

    #[test]
    fn listeners_and_requests_get_numbers_that_no_other_has() {
        let mut all = Listeners::default();
        let mut requests = ConnectRequests::default();
        all.last = u32::MAX;
        all.insert(CmListenerId(1), new_listener());
        all.insert(CmListenerId(2), new_listener());
        assert_eq!(all.next_number(), CmListenerId(3));
        requests.last = u32::MAX;
        let waiting = WaitingRequest {
            request: RequestId(9),
            listener: CmListenerId(1),
            client: ClientId(1),
            cm_channel: CmChannelId(1),
            cookie: 0,
            device: 0,
            mode: RequestMode::Requested,
        };
        requests.insert(ConnectRequestId(1), waiting);
        assert_eq!(requests.next_number(), ConnectRequestId(2));
    }
}
