//! Client requests for addresses: selection of devices, bindings and listeners.
//!
//! ```text
//! BIND -> binding --LISTEN--> listener --UNLISTEN--> gone
//!            |                   ^          (waiting requests may live on)
//!            '-UNLISTEN-> gone   '-- LISTEN without a binding
//! ```

use std::net::{IpAddr, SocketAddr};

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::device_identity::interface_index;

use super::listening::{ClientListener, LocalScope, listener_amounts};
use super::pairing::PAIRING_PORT;
use super::requests::*;
use super::{ControlThread, cm};
use crate::device_view::DeviceView;
use crate::host_ports::{ClaimError, PortClaim};
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::Command;

/// Maximum backlog of a listener.
const MAX_BACKLOG: u32 = 4096;
/// Number of ports selected by the kernel that are tried for one request. One fails only if a program
/// or a client has it at another address.
const KERNEL_PORTS: usize = 16;
/// Number of ports selected by siwd that are tried for one request.
const CLAIMED_PORTS: usize = 16;

impl ControlThread {
    /// Reserves an address and port, see [`m::Bind`].
    pub(super) fn bind_address(&mut self, id: ClientId, seq: u32, request: &m::Bind) -> Outcome {
        if request.flags & !(m::BIND_REUSE | m::BIND_V6_ONLY) != 0 {
            return Err(Refusal::new(libc::EINVAL, "bind: unknown flags"));
        }
        let v6_only = request.flags & m::BIND_V6_ONLY != 0;
        let scope = match cm::socket_addr(request.addr).map(|addr| addr.ip()) {
            Some(ip) if !ip.is_unspecified() => LocalScope::One(ip),
            Some(IpAddr::V4(_)) => LocalScope::Ipv4,
            Some(IpAddr::V6(_)) if v6_only => LocalScope::Ipv6,
            _ => LocalScope::All,
        };
        let device = self.narrow_device(request.device, &[request.addr])?;
        let devices = self.devices_of(device, scope)?;
        let reuse = request.flags & m::BIND_REUSE != 0;
        let (port, port_claims) = self.choose_port(&devices, scope, request.addr.port, reuse)?;
        self.resources.charge(id, &listener_amounts(&port_claims))?;
        let binding = self.resources.next_listener_id();
        let bound = ClientListener {
            client: id,
            cm_channel: CmChannelId(0),
            cookie: 0,
            devices,
            scope,
            port,
            reuse,
            listening: false,
            backlog: 0,
            waiting: 0,
            overflow_logged: false,
            port_claims,
        };
        self.resources.listeners.insert(binding, bound);
        let reply = m::ListenReply {
            listener: binding.0,
            reserved: 0,
            addr: m::Addr {
                port,
                ..request.addr
            },
        };
        send_reply::<m::Bind>(self.resources.client_mut(id)?, seq, &reply)
    }

    /// Finds the device and the source address for a destination, see [`m::Resolve`].
    pub(super) fn resolve_address(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Resolve,
    ) -> Outcome {
        let dst = cm::socket_addr(request.dst).ok_or_else(|| {
            Refusal::new(libc::EDESTADDRREQ, "the destination address is missing")
        })?;
        let src = cm::socket_addr(request.src).map(|addr| addr.ip());
        let src = src.filter(|ip| !ip.is_unspecified());
        if src.is_some_and(|src| src.is_ipv4() != dst.is_ipv4()) {
            let why = "source and destination are of different address families";
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let narrowed = self.narrow_device(request.device, &[request.src, request.dst])?;
        let device = match narrowed {
            m::ANY_DEVICE => self.find_device(src, dst.ip()).ok_or_else(|| match src {
                Some(src) => Refusal::new(libc::EADDRNOTAVAIL, format!("no device has {src}")),
                None => no_route(dst.ip()),
            })?,
            device => device as usize,
        };
        let view = self.check_device(device)?;
        let same_family = || {
            let addresses = view.addresses.iter();
            addresses.filter(|cidr| cidr.addr.is_ipv4() == dst.is_ipv4())
        };
        // The address itself if it is the device's own, else one on the destination's network with
        // the longest prefix.
        let chosen = src.or_else(|| {
            same_family()
                .find(|cidr| cidr.addr == dst.ip())
                .or_else(|| {
                    let near = same_family().filter(|cidr| is_on_network(cidr, dst.ip()));
                    near.max_by_key(|cidr| cidr.prefix)
                })
                .or_else(|| same_family().next())
                .map(|cidr| cidr.addr)
        });
        let local = chosen.ok_or_else(|| no_route(dst.ip()))?;
        let is_checked = is_link_local(local) || narrowed != request.device;
        if is_checked && !view.addresses.iter().any(|cidr| cidr.addr == local) {
            let why = format!("device {} does not have {local}", view.name);
            return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
        }
        // As the client names the interface, if it does.
        let mut named = [request.src.scope_id, request.dst.scope_id].into_iter();
        let scope_id = match is_link_local(local) {
            true => named.find(|number| *number != 0),
            false => Some(0),
        };
        let reply = m::ResolveReply {
            device: device as u32,
            reserved: 0,
            local: m::Addr {
                port: request.src.port,
                scope_id: scope_id.unwrap_or_else(|| interface_index(device as u32)),
                ..m::Addr::from(local)
            },
        };
        send_reply::<m::Resolve>(self.resources.client_mut(id)?, seq, &reply)
    }

    /// Moves events to another channel, see [`m::MigrateCm`].
    pub(super) fn migrate_events(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::MigrateCm,
    ) -> Outcome {
        let channel = CmChannelId(request.cm_channel);
        let client = self.resources.client_mut(id)?;
        if !client.cm_channels.contains_key(&channel) {
            return Err(Refusal::no_such("CM channel", channel.0));
        }
        if request.qp_num != 0 {
            let qp = client.qps.get_mut(&Qpn(request.qp_num));
            qp.ok_or_else(|| Refusal::no_such("queue pair", request.qp_num))?
                .cm_channel = Some(channel);
        }
        if request.listener != 0 {
            let number = CmListenerId(request.listener);
            let found = self.resources.listeners.get_mut(number);
            found
                .filter(|found| found.client == id)
                .ok_or_else(|| Refusal::no_such("listener", request.listener))?
                .cm_channel = channel;
        }
        if request.request != 0 {
            let number = ConnectRequestId(request.request);
            let found = self.resources.requests.get_mut(number);
            found
                .filter(|found| found.client == id)
                .ok_or_else(|| Refusal::no_such("connection request", request.request))?
                .cm_channel = channel;
        }
        send_reply::<m::MigrateCm>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Listens at an address or on a binding, see [`m::Listen`].
    pub(super) fn start_listener(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Listen,
    ) -> Outcome {
        check_options(&request.mpa)?;
        let binding = CmListenerId(request.binding);
        let (devices, scope, (port, port_claims)) = if request.binding == 0 {
            let addr = cm::socket_addr(request.addr);
            let ip = addr.map(|addr| addr.ip()).filter(|ip| !ip.is_unspecified());
            let scope = ip.map_or(LocalScope::All, LocalScope::One);
            let device = self.narrow_device(request.device, &[request.addr])?;
            let devices = self.devices_of(device, scope)?;
            let asked = addr.map_or(request.addr.port, |addr| addr.port());
            let port = self.choose_port(&devices, scope, asked, false)?;
            (devices, scope, port)
        } else {
            let listeners = &self.resources.listeners;
            let bound = listeners.get(binding).filter(|bound| bound.client == id);
            let bound = bound.ok_or_else(|| Refusal::no_such("binding", binding.0))?;
            if bound.listening {
                return Err(Refusal::new(libc::EINVAL, "the binding listens already"));
            }
            if listeners.has_listener(&bound.devices, bound.scope, bound.port) {
                return Err(port_in_use(bound.port));
            }
            // The port claims of the binding pass to the listener.
            (bound.devices.clone(), bound.scope, (bound.port, Vec::new()))
        };
        self.check_crc(&devices, request.mpa.crc)?;
        let client = self.resources.client_mut(id)?;
        let cm_channel = CmChannelId(request.cm_channel);
        if !client.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", request.cm_channel));
        }
        let user = client.account.uid();
        let listener = if request.binding == 0 {
            self.resources.charge(id, &listener_amounts(&port_claims))?;
            self.resources.next_listener_id()
        } else {
            binding
        };
        let backlog = request.backlog.clamp(1, MAX_BACKLOG);
        for &device in &devices {
            let view = &self.config.devices[device];
            let locals: Vec<Option<IpAddr>> = match scope {
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
                        listener,
                        user,
                        device,
                        local,
                        port,
                        backlog: backlog as usize,
                        mpa: request.mpa,
                    };
                    self.workers.post_command(worker, command);
                }
            }
        }
        let mut bound = request.addr;
        if bound.family == 0 {
            bound.family = 4;
        }
        bound.port = port;
        let reuse = false;
        let removed = match request.binding {
            0 => None,
            _ => self.resources.listeners.remove(binding),
        };
        let port_claims = removed.map_or(port_claims, |removed| removed.port_claims);
        let entry = ClientListener {
            client: id,
            cm_channel,
            cookie: request.cookie,
            devices,
            scope,
            port,
            reuse,
            listening: true,
            backlog,
            waiting: 0,
            overflow_logged: false,
            port_claims,
        };
        self.resources.listeners.insert(listener, entry);
        let reply = m::ListenReply {
            listener: listener.0,
            reserved: 0,
            addr: bound,
        };
        send_reply::<m::Listen>(self.resources.client_mut(id)?, seq, &reply)
    }

    /// Ends a listener or a binding, see [`m::Unlisten`].
    pub(super) fn stop_listener(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Unlisten,
    ) -> Outcome {
        let listener = CmListenerId(request.listener);
        let found = self.resources.listeners.get(listener);
        if found.is_none_or(|found| found.client != id) {
            return Err(Refusal::no_such("listener", listener.0));
        }
        let keep_requests = request.flags & m::UNLISTEN_KEEP_REQUESTS != 0;
        if let Some(removed) = self.remove_listener(listener, keep_requests) {
            self.resources.release(id, &removed.amounts());
        }
        send_reply::<m::Unlisten>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Removes a listener or binding, and its pending requests unless `keep_requests`. Dropping the
    /// result returns the port to the kernel.
    pub(super) fn remove_listener(
        &mut self,
        listener: CmListenerId,
        keep_requests: bool,
    ) -> Option<ClientListener> {
        let removed = self.resources.listeners.remove(listener)?;
        if removed.listening {
            if !keep_requests && removed.waiting > 0 {
                let requests = &mut self.resources.requests;
                requests.forget_listener(removed.client, listener);
            }
            self.workers.post_to_all(|| Command::Unlisten {
                listener,
                keep_requests,
            });
        }
        Some(removed)
    }

    /// Selects the device by the interface of a link-local address (sin6_scope_id), as the kernel
    /// does; `device` is the client's choice, an index or [`m::ANY_DEVICE`]. An address without an
    /// interface is of the only device that has link-local addresses.
    pub(super) fn narrow_device(&self, device: u32, addresses: &[m::Addr]) -> Result<u32, Refusal> {
        let mut chosen = device;
        for addr in addresses {
            let Some(SocketAddr::V6(addr)) = addr.to_socket_addr() else {
                continue;
            };
            let (ip, number) = (*addr.ip(), addr.scope_id());
            if !ip.is_unicast_link_local() || number == 0 && chosen != m::ANY_DEVICE {
                continue;
            }
            let fits = |(index, view): &(usize, &DeviceView)| match number {
                0 => view.has_link_local(),
                _ => view.has_interface_number(*index, number),
            };
            let devices = self.config.devices.iter().enumerate();
            let mut found = devices.filter(|(_, view)| !view.is_gone).filter(fits);
            match (found.next(), found.next()) {
                (None, _) if number == 0 => {}
                (None, _) => {
                    let why = format!("{ip}: no device is on interface {number}");
                    return Err(Refusal::new(libc::ENODEV, why));
                }
                (Some(_), Some(_)) if number == 0 => {
                    let why =
                        format!("{ip} is on several links: name the interface (sin6_scope_id)");
                    return Err(Refusal::new(libc::EINVAL, why));
                }
                (Some((index, view)), _) => {
                    if chosen != m::ANY_DEVICE && chosen != index as u32 {
                        let why = format!("{ip} is on the link of device {}", view.name);
                        return Err(Refusal::new(libc::EINVAL, why));
                    }
                    chosen = index as u32;
                }
            }
        }
        Ok(chosen)
    }

    /// Devices selected by a client; `device` is an index or [`m::ANY_DEVICE`].
    fn devices_of(&self, device: u32, scope: LocalScope) -> Result<Vec<usize>, Refusal> {
        if device != m::ANY_DEVICE {
            self.check_device(device as usize)?;
        }
        let devices: Vec<usize> = match (device, scope) {
            (m::ANY_DEVICE, LocalScope::One(ip)) => {
                self.find_device(Some(ip), ip).into_iter().collect()
            }
            (m::ANY_DEVICE, _) => (0..self.config.devices.len())
                .filter(|device| !self.config.devices[*device].is_gone)
                .collect(),
            (device, LocalScope::One(ip)) => self
                .find_device(Some(ip), ip)
                .filter(|found| *found == device as usize)
                .into_iter()
                .collect(),
            (device, _) => vec![device as usize],
        };
        if devices.is_empty() {
            let ip = match scope {
                LocalScope::One(ip) => ip.to_string(),
                _ => String::new(),
            };
            return Err(Refusal::new(
                libc::EADDRNOTAVAIL,
                format!(
                    "{ip} is not an address of this device; listen on one of its addresses or on any"
                ),
            ));
        }
        Ok(devices)
    }

    /// Claims a port in the kernel on those of the devices that share addresses with it.
    fn claim_against_kernel(
        &self,
        devices: &[usize],
        scope: LocalScope,
        port: u16,
    ) -> Result<Vec<PortClaim>, ClaimError> {
        let views = devices.iter().map(|device| &self.config.devices[*device]);
        let shared = views.filter_map(|view| view.host_ports.as_ref());
        shared
            .map(|ports| ports.claim_port(port, |ip| scope.includes(ip)))
            .collect()
    }

    /// Claims a port that the kernel selects at one of the addresses that it shares with the devices;
    /// `None` if there is none.
    fn claim_any_port(
        &self,
        devices: &[usize],
        scope: LocalScope,
    ) -> Result<Option<(u16, PortClaim)>, ClaimError> {
        let views = devices.iter().map(|device| &self.config.devices[*device]);
        for ports in views.filter_map(|view| view.host_ports.as_ref()) {
            let claimed = ports.claim_any_port(|ip| scope.includes(ip))?;
            if claimed.is_some() {
                return Ok(claimed);
            }
        }
        Ok(None)
    }

    /// Claims a port on all addresses of the devices.
    pub(super) fn claim_port_of_all(
        &self,
        devices: &[usize],
        port: u16,
    ) -> Result<Vec<PortClaim>, Refusal> {
        let listeners = &self.resources.listeners;
        if listeners.is_port_taken(devices, LocalScope::All, port, false) {
            return Err(port_in_use(port));
        }
        Ok(self.claim_against_kernel(devices, LocalScope::All, port)?)
    }

    /// Returns the requested port, or a free one for 0, with its claims in the kernel.
    fn choose_port(
        &self,
        devices: &[usize],
        scope: LocalScope,
        asked: u16,
        reuse: bool,
    ) -> Result<(u16, Vec<PortClaim>), Refusal> {
        let listeners = &self.resources.listeners;
        // A listener of a client would take the connections of other clients' queue pairs.
        let is_taken =
            |port| port == PAIRING_PORT || listeners.is_port_taken(devices, scope, port, reuse);
        if asked != 0 {
            return if is_taken(asked) {
                Err(port_in_use(asked))
            } else {
                Ok((asked, self.claim_against_kernel(devices, scope, asked)?))
            };
        }
        // One call of the kernel's instead of one for each port that a program or a client has.
        for _ in 0..KERNEL_PORTS {
            let Some((port, _held)) = self.claim_any_port(devices, scope)? else {
                break;
            };
            if !listeners.is_port_taken(devices, scope, port, false) {
                match self.claim_against_kernel(devices, scope, port) {
                    Ok(claims) => return Ok((port, claims)),
                    Err(ClaimError::Taken { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let start = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u16;
        let ports = (0..28_000u16).map(|index| 32_768 + (start.wrapping_add(index) % 28_000));
        let is_free = |port: &u16| !listeners.is_port_taken(devices, scope, *port, false);
        for port in ports.filter(is_free).take(CLAIMED_PORTS) {
            match self.claim_against_kernel(devices, scope, port) {
                Ok(claims) => return Ok((port, claims)),
                Err(ClaimError::Taken { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(Refusal::new(libc::EADDRINUSE, "no free port"))
    }

    /// Selects the device for a connection: the one with the address `src` if given. Otherwise, in
    /// this order, a device with the address `dst` (loopback), one with `dst` on its network, the
    /// one with the longest matching route, or one with a gateway.
    pub(super) fn find_device(&self, src: Option<IpAddr>, dst: IpAddr) -> Option<usize> {
        let devices = &self.config.devices;
        let first = |fits: &dyn Fn(&DeviceView) -> bool| {
            let mut places = devices.iter();
            places.position(|device| !device.is_gone && fits(device))
        };
        if let Some(src) = src {
            return first(&|device| device.addresses.iter().any(|cidr| cidr.addr == src));
        }
        let own = first(&|device| device.addresses.iter().any(|cidr| cidr.addr == dst));
        let on_link =
            || first(&|device| device.addresses.iter().any(|cidr| is_on_network(cidr, dst)));
        let by_gateway = || {
            first(&|device| match dst.is_ipv4() {
                true => device.gateway || device.learned_routes.gateway_v4.is_some(),
                false => device.gateway6 || device.learned_routes.gateway_v6.is_some(),
            })
        };
        let by_route = || {
            let longest = |device: &DeviceView| {
                let learned = &device.learned_routes;
                let own = device.routes.iter();
                let own = own.map(|route| siw_tcp::IpCidr::new(route.addr, route.prefix));
                own.chain(learned.routes.iter().map(|route| route.to))
                    .chain(learned.on_link.iter().copied())
                    .filter(|network| network.contains(dst))
                    .map(|network| network.prefix)
                    .max()
            };
            devices
                .iter()
                .enumerate()
                .filter(|(_, device)| !device.is_gone)
                .filter_map(|(index, device)| Some((longest(device)?, std::cmp::Reverse(index))))
                .max()
                .map(|(_, index)| index.0)
        };
        own.or_else(on_link).or_else(by_route).or_else(by_gateway)
    }

    /// Returns the view of a usable device.
    pub(super) fn check_device(&self, device: usize) -> Result<&DeviceView, Refusal> {
        match self.config.devices.get(device) {
            None => Err(Refusal::new(libc::ENODEV, format!("no device {device}"))),
            Some(view) if view.is_gone => Err(Refusal::new(
                libc::ENODEV,
                format!("device {} was removed from the machine", view.name),
            )),
            Some(view) => Ok(view),
        }
    }

    /// Refuses to turn off CRC on a device that requires it.
    pub(super) fn check_crc(&self, devices: &[usize], crc: u8) -> Result<(), Refusal> {
        let strict = |device: &&usize| self.config.devices[**device].crc_required;
        match devices.iter().find(strict).filter(|_| crc == 0) {
            Some(device) => Err(Refusal::new(
                libc::EPERM,
                format!(
                    "device {} requires CRC (crc = \"required\" in its configuration)",
                    self.config.devices[*device].name
                ),
            )),
            None => Ok(()),
        }
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn is_on_network(cidr: &crate::config::Cidr, addr: IpAddr) -> bool {
    siw_tcp::IpCidr::new(cidr.addr, cidr.prefix).contains(addr)
}

fn port_in_use(port: u16) -> Refusal {
    Refusal::new(libc::EADDRINUSE, format!("port {port} is in use"))
}

/// Refusal: no device has a route to the address.
pub(super) fn no_route(ip: IpAddr) -> Refusal {
    Refusal::new(
        libc::EHOSTUNREACH,
        format!("no device reaches {ip}: it is on no device's network, and there is no gateway"),
    )
}

/// Refuses undefined option values; the refusal lists the allowed ones.
fn check_options(options: &m::MpaOptions) -> Result<(), Refusal> {
    let bad = |what: &str, allowed: &str| {
        Err(Refusal::new(
            libc::EINVAL,
            format!(
                "listen: {what} is undefined; allowed are {allowed}, or 255 for the device's setting"
            ),
        ))
    };
    match options {
        _ if !matches!(options.crc, 0 | 1 | m::BY_DEVICE) => bad("this CRC", "0 and 1"),
        _ if !matches!(options.mpa_rev, 1 | 2 | m::BY_DEVICE) => {
            bad("this MPA revision", "1 and 2")
        }
        _ if !matches!(options.markers, 0..=2 | m::BY_DEVICE) => {
            bad("this marker policy", "0 to 2")
        }
        _ if !matches!(options.rtr, 0..=7 | m::BY_DEVICE) => bad("this set of RTR kinds", "0 to 7"),
        _ if !matches!(options.terminate, 0 | 1 | m::BY_DEVICE) => {
            bad("this Terminate order", "0 and 1")
        }
        _ if !matches!(options.out_of_order, 0..=2 | m::BY_DEVICE) => {
            bad("this placement", "0 to 2")
        }
        _ if !matches!(options.private_data, 0..=512 | u16::MAX) => Err(Refusal::new(
            libc::EINVAL,
            "listen: at most 512 bytes of private data, or 65535 for the device's limit",
        )),
        _ => Ok(()),
    }
}
