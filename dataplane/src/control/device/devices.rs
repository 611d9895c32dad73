//! The devices as clients see them: attributes, and the selection of a device, its worker and its
//! ports for an address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::libc;
use siw_host::ports::{ClaimError, PortClaim};
use siw_shm::control::Addr;
use siw_shm::control::messages as m;
use siw_shm::device_identity::{gid_of_ip, gid_of_mac};

use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, send_reply};
use crate::control::resources::Resources;
use crate::device_view::DeviceView;
use crate::ids::ClientId;

/// Addresses of its devices that a listener or binding covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalScope {
    /// All addresses.
    All,
    /// All IPv4 addresses.
    Ipv4,
    /// All IPv6 addresses.
    Ipv6,
    /// One address.
    One(IpAddr),
}

impl LocalScope {
    /// Returns true if the scope covers the address.
    pub fn includes(self, ip: IpAddr) -> bool {
        match self {
            LocalScope::All => true,
            LocalScope::Ipv4 => ip.is_ipv4(),
            LocalScope::Ipv6 => ip.is_ipv6(),
            LocalScope::One(own) => own == ip,
        }
    }

    /// The scope with a port as a socket address; all addresses are the unspecified one.
    pub fn to_socket_addr(self, port: u16) -> SocketAddr {
        let ip = match self {
            LocalScope::Ipv4 => Ipv4Addr::UNSPECIFIED.into(),
            LocalScope::All | LocalScope::Ipv6 => Ipv6Addr::UNSPECIFIED.into(),
            LocalScope::One(own) => own,
        };
        SocketAddr::new(ip, port)
    }

    /// Returns true if the two scopes can have an address in common.
    pub fn overlaps(self, other: LocalScope) -> bool {
        match (self, other) {
            (LocalScope::One(ip), scope) | (scope, LocalScope::One(ip)) => scope.includes(ip),
            (LocalScope::All, _) | (_, LocalScope::All) => true,
            _ => self == other,
        }
    }
}

/// All devices, in the order of the configuration.
pub(in crate::control) struct Devices {
    pub views: Vec<DeviceView>,
    /// Round-robin counter over a device's workers.
    next_worker: usize,
}

impl Devices {
    /// Creates the list of these devices.
    pub fn new(views: Vec<DeviceView>) -> Devices {
        Devices {
            views,
            next_worker: 0,
        }
    }

    /// Reports the attributes of a device to a client.
    pub fn query_device(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        &m::QueryDevice { index, flags }: &m::QueryDevice,
    ) -> Outcome {
        let count = self.views.len();
        let device = self.views.get(index as usize).ok_or_else(|| {
            Refusal::new(
                libc::ENODEV,
                format!("no device {index}: the number of devices is {count}"),
            )
        })?;
        let client = resources.client_mut(id)?;
        if flags & m::QUERY_WATCH != 0 {
            client.watched_device = Some(index as usize);
        }
        if !device.is_deleted {
            client.known_devices.insert(index as usize);
        }
        let mut ips = [m::Addr::NONE; m::MAX_ADDRESSES];
        let mut gid_indices = [0; m::MAX_ADDRESSES];
        let mut used = 0;
        let gid_index = |raw| device.gids.index_of(raw).map_or(0, |index| index as u8);
        for (cidr, (ip, index)) in device
            .addresses
            .iter()
            .zip(ips.iter_mut().zip(&mut gid_indices))
        {
            *ip = cidr.addr.into();
            *index = gid_index(gid_of_ip(cidr.addr));
            used += 1;
        }
        let reply = m::DeviceReply {
            index,
            port_state: if device.link_up {
                m::PORT_ACTIVE
            } else {
                m::PORT_DOWN
            },
            name: m::Text::new(&device.name),
            driver: m::Text::new(&device.driver),
            mac: device.mac,
            n_ips: used,
            mtu: device.mtu.into(),
            link_mbps: device.link_mbps,
            crc: device.crc.into(),
            mpa_rev: device.mpa_rev,
            is_deleted: device.is_deleted.into(),
            persona: device.persona as u8,
            reserved: [0; 4],
            caps: m::CAP_IMMEDIATE
                | m::CAP_ATOMIC
                | m::CAP_MARKERS
                | m::CAP_LOCAL_INV
                | m::CAP_MEM_WINDOW
                | m::CAP_FAST_REG,
            ips,
            gid_indices,
            mac_gid_index: gid_index(gid_of_mac(device.mac)),
            reserved_gids: [0; 7],
        };
        send_reply::<m::QueryDevice>(resources.client_mut(id)?, seq, &reply)
    }

    /// Finds a device by its name.
    pub fn find_by_name(&self, name: &str) -> Option<usize> {
        let mut views = self.views.iter();
        views.position(|view| view.name == name && !view.is_deleted)
    }

    /// Selects the next worker of the device in round-robin order.
    pub fn next_worker_of(&mut self, device: usize) -> usize {
        let workers = &self.views[device].workers;
        self.next_worker = self.next_worker.wrapping_add(1);
        workers
            .get(self.next_worker % workers.len().max(1))
            .copied()
            .unwrap_or(0)
    }

    /// Selects the device by the interface of a link-local address (sin6_scope_id), as the kernel
    /// does; `device` is the client's choice, an index or [`m::ANY_DEVICE`]. An address without an
    /// interface is of the only device that has link-local addresses.
    pub fn narrow_device(&self, device: u32, addresses: &[m::Addr]) -> Result<u32, Refusal> {
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
            let devices = self.views.iter().enumerate();
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
    pub fn devices_of(&self, device: u32, scope: LocalScope) -> Result<Vec<usize>, Refusal> {
        if device != m::ANY_DEVICE {
            self.check_device(device as usize)?;
        }
        let devices: Vec<usize> = match (device, scope) {
            (m::ANY_DEVICE, LocalScope::One(ip)) => {
                self.find_device(Some(ip), ip).into_iter().collect()
            }
            (m::ANY_DEVICE, _) => (0..self.views.len())
                .filter(|device| !self.views[*device].is_gone)
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
    pub fn claim_against_kernel(
        &self,
        devices: &[usize],
        scope: LocalScope,
        port: u16,
    ) -> Result<Vec<PortClaim>, ClaimError> {
        let views = devices.iter().map(|device| &self.views[*device]);
        let shared = views.filter_map(|view| view.host_ports.as_ref());
        shared
            .map(|ports| ports.claim_port(port, |ip| scope.includes(ip)))
            .collect()
    }

    /// Claims a port that the kernel selects at one of the addresses that it shares with the devices;
    /// `None` if there is none.
    pub fn claim_any_port(
        &self,
        devices: &[usize],
        scope: LocalScope,
    ) -> Result<Option<(u16, PortClaim)>, ClaimError> {
        let views = devices.iter().map(|device| &self.views[*device]);
        for ports in views.filter_map(|view| view.host_ports.as_ref()) {
            let claimed = ports.claim_any_port(|ip| scope.includes(ip))?;
            if claimed.is_some() {
                return Ok(claimed);
            }
        }
        Ok(None)
    }

    /// Selects the device for a connection: the one with the address `src` if given. Otherwise, in
    /// this order, a device with the address `dst` (loopback), one with `dst` on its network, the
    /// one with the longest matching route, or one with a gateway.
    pub fn find_device(&self, src: Option<IpAddr>, dst: IpAddr) -> Option<usize> {
        let devices = &self.views;
        let first = |fits: &dyn Fn(&DeviceView) -> bool| {
            let mut places = devices.iter();
            places.position(|device| !device.is_gone && fits(device))
        };
        if let Some(src) = src {
            return first(&|device| device.addresses.iter().any(|cidr| cidr.addr == src));
        }
        // A group is on the network of any device that has an address of its family.
        if dst.is_multicast() {
            let of_family = |device: &DeviceView| {
                let mut addresses = device.addresses.iter();
                addresses.any(|cidr| cidr.addr.is_ipv4() == dst.is_ipv4())
            };
            return first(&of_family);
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
                let own = own.map(|route| siw_net::IpCidr::new(route.addr, route.prefix));
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
    pub fn check_device(&self, device: usize) -> Result<&DeviceView, Refusal> {
        match self.views.get(device) {
            None => Err(Refusal::new(libc::ENODEV, format!("no device {device}"))),
            Some(view) if view.is_gone => Err(Refusal::new(
                libc::ENODEV,
                format!("device {} was removed", view.name),
            )),
            Some(view) => Ok(view),
        }
    }

    /// Refuses to turn off CRC on a device that requires it.
    pub fn check_crc(&self, devices: &[usize], crc: u8) -> Result<(), Refusal> {
        let strict = |device: &&usize| self.views[**device].crc_required;
        match devices.iter().find(strict).filter(|_| crc == 0) {
            Some(device) => Err(Refusal::new(
                libc::EPERM,
                format!(
                    "device {} requires CRC (crc = \"required\" in its configuration)",
                    self.views[*device].name
                ),
            )),
            None => Ok(()),
        }
    }
}

pub(in crate::control) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

pub(in crate::control) fn is_on_network(cidr: &crate::config::Cidr, addr: IpAddr) -> bool {
    siw_net::IpCidr::new(cidr.addr, cidr.prefix).contains(addr)
}

/// Checks that a device can send datagrams from this address to another one.
pub(in crate::control) fn check_own_address(
    view: &DeviceView,
    from: IpAddr,
    to: IpAddr,
) -> Result<(), Refusal> {
    if from.is_ipv4() != to.is_ipv4() {
        let why = "source and destination are of different address families";
        return Err(Refusal::new(libc::EINVAL, why));
    }
    if !view.addresses.iter().any(|cidr| cidr.addr == from) {
        let why = format!("device {} does not have {from}", view.name);
        return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
    }
    // The XDP program leaves them to the kernel.
    let shared = view.host_ports.as_ref().map(|ports| ports.addresses());
    let is_shared = shared.is_some_and(|addresses| addresses.contains(&from));
    if is_shared && view.config.host_interface.is_none() {
        let why = format!(
            "the kernel has {from}, too, and gets the datagrams to it: give device {} an address that \
             the kernel does not have",
            view.name
        );
        return Err(Refusal::new(libc::EADDRINUSE, why));
    }
    Ok(())
}

/// Refusal: no device has a route to the address.
pub(in crate::control) fn no_route(ip: IpAddr) -> Refusal {
    Refusal::new(
        libc::EHOSTUNREACH,
        format!("no device reaches {ip}: it is on no device's network, and there is no gateway"),
    )
}

/// Converts an address of a message; `None` if its family is absent or unknown. Connections do not
/// have the interface of a link-local address: it selects the device.
pub(in crate::control) fn socket_addr(addr: Addr) -> Option<SocketAddr> {
    let without_interface = Addr {
        scope_id: 0,
        ..addr
    };
    without_interface.to_socket_addr()
}
