//! Queries, changes and monitoring of the kernel's interfaces, addresses, routes and neighbours
//! through rtnetlink(7), for devices that share a NIC with the kernel's stack. Nothing here is on a
//! data path.
//!
//! `netlink-packet-route` encodes and decodes the messages. The socket is a blocking or polled one of
//! [`nix`]: an asynchronous runtime would be out of proportion for a few messages per minute.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily as SocketFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind,
    recv, send, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use siw_net::IpCidr;

/// Size of the receive buffer: the kernel puts less into one answer.
const RECEIVE_BYTES: usize = 64 << 10;
/// Groups of rtnetlink(7): neighbours, routes of IPv4 and IPv6.
const RTMGRP_NEIGH: u32 = 4;
const RTMGRP_IPV4_ROUTE: u32 = 0x40;
const RTMGRP_IPV6_ROUTE: u32 = 0x400;
/// The kernel answers immediately; a socket without an answer after this time is broken.
const ANSWER_TIMEOUT_S: i64 = 5;

/// A route of the kernel's main table through one interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRoute {
    /// Destinations; the prefix of a default route is 0.
    pub to: IpCidr,
    /// The router; `None` if the destinations are on the link.
    pub via: Option<IpAddr>,
    /// The lowest metric is preferred among routes to the same destinations.
    pub metric: u32,
}

/// A neighbour of the kernel on one interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelNeighbour {
    /// Its IP address.
    pub address: IpAddr,
    /// Its Ethernet address; `None` if the kernel does not know it, or no longer does.
    pub mac: Option<[u8; 6]>,
    /// Set by an administrator, and valid without confirmation.
    pub is_permanent: bool,
}

/// A change of the kernel's neighbours or routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelChange {
    /// A neighbour on this interface became known or unknown.
    Neighbour(u32, KernelNeighbour),
    /// Routes through this interface have to be read again.
    Routes(u32),
    /// Changes were lost because the socket's buffer was full: everything has to be read again.
    Lost,
}

/// A socket for requests, or one that receives changes.
pub struct RouteSocket {
    socket: OwnedFd,
    sequence: u32,
}

impl RouteSocket {
    /// Opens a socket for requests, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn open() -> io::Result<RouteSocket> {
        let opened = RouteSocket::bind_to_groups(0, SockFlag::SOCK_CLOEXEC)?;
        let timeout = TimeVal::new(ANSWER_TIMEOUT_S, 0);
        setsockopt(&opened.socket, sockopt::ReceiveTimeout, &timeout)?;
        Ok(opened)
    }

    /// Opens a socket that receives changes to routes and neighbours and never blocks.
    ///
    /// # Errors
    /// As [`RouteSocket::open`].
    pub fn open_monitor() -> io::Result<RouteSocket> {
        RouteSocket::bind_to_groups(
            RTMGRP_NEIGH | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )
    }

    fn bind_to_groups(groups: u32, flags: SockFlag) -> io::Result<RouteSocket> {
        let socket = socket(
            SocketFamily::Netlink,
            SockType::Raw,
            flags,
            SockProtocol::NetlinkRoute,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(RouteSocket {
            socket,
            sequence: 0,
        })
    }

    /// Sets an interface's Ethernet address and MTU.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_mac_and_mtu(&mut self, interface: u32, mac: [u8; 6], mtu: u16) -> io::Result<()> {
        let attributes = vec![
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(mtu.into()),
        ];
        self.change_link(interface, LinkFlags::empty(), attributes)
    }

    /// Sets an interface up, as `ip link set NAME up` does.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_up(&mut self, interface: u32) -> io::Result<()> {
        self.change_link(interface, LinkFlags::Up, Vec::new())
    }

    /// Tells the kernel whether an interface has a carrier.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_carrier(&mut self, interface: u32, is_up: bool) -> io::Result<()> {
        let attributes = vec![LinkAttribute::Carrier(is_up.into())];
        self.change_link(interface, LinkFlags::empty(), attributes)
    }

    fn change_link(
        &mut self,
        interface: u32,
        flags: LinkFlags,
        attributes: Vec<LinkAttribute>,
    ) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = interface;
        message.header.flags = flags;
        message.header.change_mask = flags;
        message.attributes = attributes;
        self.change(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Adds an address to an interface, without duplicate address detection, as siwd itself has none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add_address(&mut self, interface: u32, cidr: IpCidr) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family_of(cidr.addr);
        message.header.prefix_len = cidr.prefix;
        message.header.index = interface;
        message.attributes = vec![
            AddressAttribute::Local(cidr.addr),
            AddressAttribute::Address(cidr.addr),
        ];
        if cidr.addr.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
            message
                .attributes
                .push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        let message = RouteNetlinkMessage::NewAddress(message);
        self.change(message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The number of the other end of a veth pair, if it is in the same network namespace; `None` for
    /// other interfaces.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn veth_peer_of(&mut self, interface: u32) -> io::Result<Option<u32>> {
        let mut found = None;
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        self.dump(request, |answer| {
            if let RouteNetlinkMessage::NewLink(link) = answer
                && link.header.index == interface
            {
                found = read_veth_peer(&link);
            }
        })?;
        Ok(found)
    }

    /// The routes of the main table through an interface, without those of the kernel's own addresses.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn routes_of(&mut self, interface: u32) -> io::Result<Vec<KernelRoute>> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            self.dump(RouteNetlinkMessage::GetRoute(message), |answer| {
                if let RouteNetlinkMessage::NewRoute(route) = answer {
                    found.extend(read_route(&route, interface));
                }
            })?;
        }
        Ok(found)
    }

    /// The neighbours on an interface whose Ethernet addresses the kernel knows.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn neighbours_of(&mut self, interface: u32) -> io::Result<Vec<KernelNeighbour>> {
        let mut found = Vec::new();
        let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        self.dump(request, |answer| {
            if let RouteNetlinkMessage::NewNeighbour(message) = answer {
                found.extend(read_neighbour(&message, false));
            }
        })?;
        found.retain(|(on, neighbour)| *on == interface && neighbour.mac.is_some());
        Ok(found.into_iter().map(|(_, neighbour)| neighbour).collect())
    }

    /// Appends the changes on these interfaces since the last call to `changes`. The socket has to be
    /// one of [`RouteSocket::open_monitor`].
    pub fn take_changes(&mut self, interfaces: &[u32], changes: &mut Vec<KernelChange>) {
        let mut buffer = vec![0; RECEIVE_BYTES];
        loop {
            let len = match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(len) => len,
                Err(Errno::EINTR) => continue,
                Err(Errno::ENOBUFS) => {
                    changes.push(KernelChange::Lost);
                    continue;
                }
                Err(_) => return,
            };
            for payload in Messages(&buffer[..len]) {
                let NetlinkPayload::InnerMessage(message) = payload else {
                    continue;
                };
                changes.extend(read_change(&message, interfaces));
            }
        }
    }

    /// Sends a request that changes something, and waits until it is done.
    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send_request(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        let mut buffer = vec![0; RECEIVE_BYTES];
        loop {
            let len = self.receive(&mut buffer)?;
            for payload in Messages(&buffer[..len]) {
                if let NetlinkPayload::Error(outcome) = payload {
                    return match outcome.code {
                        None => Ok(()),
                        Some(_) => Err(outcome.to_io()),
                    };
                }
            }
        }
    }

    /// Sends a request for a list, and visits its entries.
    fn dump(
        &mut self,
        message: RouteNetlinkMessage,
        mut visit: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.send_request(message, NLM_F_REQUEST | NLM_F_DUMP)?;
        let mut buffer = vec![0; RECEIVE_BYTES];
        loop {
            let len = self.receive(&mut buffer)?;
            for payload in Messages(&buffer[..len]) {
                match payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(outcome) => return Err(outcome.to_io()),
                    NetlinkPayload::InnerMessage(entry) => visit(entry),
                    _ => {}
                }
            }
        }
    }

    fn send_request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        Ok(())
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(self.socket.as_raw_fd(), buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => {}
                result => return Ok(result?),
            }
        }
    }
}

impl AsFd for RouteSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Iterates over the messages of one answer; ends early at an invalid length.
struct Messages<'a>(&'a [u8]);

impl Iterator for Messages<'_> {
    type Item = NetlinkPayload<RouteNetlinkMessage>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let len = self.0.get(..4)?;
            let len = u32::from_ne_bytes(len.try_into().ok()?) as usize;
            let message = self.0.get(..len).filter(|message| message.len() >= 16)?;
            // Messages begin at multiples of four.
            self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or(&[]);
            // A message that this version of the library cannot decode is skipped.
            if let Ok(read) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
                return Some(read.payload);
            }
        }
    }
}

fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn read_change(message: &RouteNetlinkMessage, interfaces: &[u32]) -> Option<KernelChange> {
    let neighbour = |entry, is_gone| {
        let (interface, neighbour) = read_neighbour(entry, is_gone)?;
        let is_meant = interfaces.contains(&interface);
        is_meant.then_some(KernelChange::Neighbour(interface, neighbour))
    };
    match message {
        RouteNetlinkMessage::NewNeighbour(entry) => neighbour(entry, false),
        RouteNetlinkMessage::DelNeighbour(entry) => neighbour(entry, true),
        // A router may change many routes through other interfaces; those are ignored.
        RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) => {
            let mut interfaces = interfaces.iter();
            let through = interfaces.find(|interface| read_route(route, **interface).is_some());
            through.map(|interface| KernelChange::Routes(*interface))
        }
        _ => None,
    }
}

/// Reads a neighbour and its interface. `is_gone`: the kernel has removed it.
fn read_veth_peer(link: &LinkMessage) -> Option<u32> {
    let (mut is_veth, mut peer) = (false, None);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::LinkInfo(infos) => {
                is_veth = infos.contains(&LinkInfo::Kind(InfoKind::Veth));
            }
            LinkAttribute::Link(index) => peer = Some(*index),
            // The peer is in another namespace.
            LinkAttribute::LinkNetNsId(_) => return None,
            _ => {}
        }
    }
    peer.filter(|_| is_veth)
}

fn read_neighbour(message: &NeighbourMessage, is_gone: bool) -> Option<(u32, KernelNeighbour)> {
    let address = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                Some(IpAddr::V4(*address))
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                Some(IpAddr::V6(*address))
            }
            _ => None,
        })?;
    let is_known = matches!(
        message.header.state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
    );
    let mac = message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok(),
            _ => None,
        });
    let neighbour = KernelNeighbour {
        address,
        mac: mac.filter(|_| is_known && !is_gone),
        is_permanent: message.header.state == NeighbourState::Permanent,
    };
    Some((message.header.ifindex, neighbour))
}

/// Reads a route; `None` unless it is a unicast route of the main table through the interface.
fn read_route(message: &RouteMessage, interface: u32) -> Option<KernelRoute> {
    let header = &message.header;
    if header.kind != RouteType::Unicast || header.table != RouteHeader::RT_TABLE_MAIN {
        return None;
    }
    let mut to = None;
    let mut route = KernelRoute {
        to: IpCidr::new(unspecified(header.address_family)?, 0),
        via: None,
        metric: 0,
    };
    let mut is_through = false;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => is_through |= *index == interface,
            RouteAttribute::Destination(address) => to = ip_of(address),
            RouteAttribute::Gateway(address) => route.via = ip_of(address),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            // With several next hops, the first through the interface counts.
            RouteAttribute::MultiPath(hops) => {
                if let Some(hop) = hops.iter().find(|hop| hop.interface_index == interface) {
                    is_through = true;
                    route.via = hop.attributes.iter().find_map(|attribute| match attribute {
                        RouteAttribute::Gateway(address) => ip_of(address),
                        _ => None,
                    });
                }
            }
            _ => {}
        }
    }
    if let Some(address) = to {
        route.to = IpCidr::new(address, header.destination_prefix_length);
    }
    is_through.then_some(route)
}

fn unspecified(family: AddressFamily) -> Option<IpAddr> {
    match family {
        AddressFamily::Inet => Some(IpAddr::from([0; 4])),
        AddressFamily::Inet6 => Some(IpAddr::from([0; 16])),
        _ => None,
    }
}

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_route::route::RouteNextHop;

    #[test]
    fn routes_of_other_tables_kinds_and_interfaces_are_left_out() {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.kind = RouteType::Unicast;
        message.header.destination_prefix_length = 24;
        let address = |text: &str| text.parse::<IpAddr>().unwrap().into();
        message.attributes = vec![
            RouteAttribute::Destination(address("192.0.2.0")),
            RouteAttribute::Gateway(address("10.0.0.254")),
            RouteAttribute::Oif(3),
            RouteAttribute::Priority(7),
        ];
        let expected = KernelRoute {
            to: "192.0.2.0/24".parse().unwrap(),
            via: "10.0.0.254".parse().ok(),
            metric: 7,
        };
        assert_eq!(read_route(&message, 3), Some(expected));
        assert_eq!(read_route(&message, 4), None);
        let mut local = message.clone();
        local.header.table = 255;
        assert_eq!(read_route(&local, 3), None);
        let mut blackhole = message.clone();
        blackhole.header.kind = RouteType::BlackHole;
        assert_eq!(read_route(&blackhole, 3), None);
        // Several next hops, and no destination: a default route.
        let mut hop = RouteNextHop::default();
        hop.interface_index = 3;
        hop.attributes = vec![RouteAttribute::Gateway(address("10.0.0.253"))];
        message.header.destination_prefix_length = 0;
        message.attributes = vec![RouteAttribute::MultiPath(vec![
            RouteNextHop::default(),
            hop,
        ])];
        let found = read_route(&message, 3).unwrap();
        assert_eq!((found.to.prefix, found.via), (0, "10.0.0.253".parse().ok()));
    }

    #[test]
    fn the_loopback_interface_has_no_neighbours_and_answers_are_read_to_their_end() {
        let mut socket = RouteSocket::open().unwrap();
        assert_eq!(socket.neighbours_of(u32::MAX).unwrap(), []);
        assert_eq!(socket.routes_of(u32::MAX).unwrap(), []);
        let error = socket.set_carrier(u32::MAX, true).unwrap_err();
        assert!(error.raw_os_error().is_some(), "{error}");
    }

    #[test]
    fn malformed_answers_end_the_iteration() {
        for bytes in [&[][..], &[0; 3], &[0; 16], &[255; 64], &[20, 0, 0, 0, 3, 0]] {
            assert_eq!(Messages(bytes).count(), 0);
        }
    }
}
