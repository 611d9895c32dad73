//! siwd's interfaces, addresses and routes in the form of rtnetlink(7). siwd does not report prefix lengths:
//! as in getifaddrs(3), networks have the usual ones.

use crate::devices::{DeviceAddress, device_addresses};
use crate::interfaces::{FLAGS, V4_MASK, V6_MASK};
use crate::netlink_messages::{Messages, Request};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr};

/// The kind of objects that a dump lists.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DumpKind {
    Links,
    Addresses,
    Routes,
}

/// A request for a dump, which the kernel answers.
#[derive(Clone, Copy)]
pub struct Dump {
    pub kind: DumpKind,
    /// `AF_INET`, `AF_INET6`, or `AF_UNSPEC` for both.
    pub family: u8,
    pub sequence: u32,
}

impl Dump {
    /// The dump that a request asks for, if siwd has something to add.
    pub fn of_request(request: &Request<'_>) -> Option<Dump> {
        let kind = match request.kind {
            libc::RTM_GETLINK => DumpKind::Links,
            libc::RTM_GETADDR => DumpKind::Addresses,
            libc::RTM_GETROUTE => DumpKind::Routes,
            _ => return None,
        };
        request.is_dump().then_some(Dump {
            kind,
            family: *request.payload.first()?,
            sequence: request.sequence,
        })
    }

    /// The dump as a number.
    pub fn to_bits(self) -> u64 {
        u64::from(self.sequence) << 32 | u64::from(self.family) << 8 | self.kind as u64
    }

    /// The dump of [`Dump::to_bits`].
    pub fn from_bits(bits: u64) -> Dump {
        let kind = match bits & 0xff {
            0 => DumpKind::Links,
            1 => DumpKind::Addresses,
            _ => DumpKind::Routes,
        };
        Dump {
            kind,
            family: (bits >> 8) as u8,
            sequence: (bits >> 32) as u32,
        }
    }

    fn has(&self, address: &DeviceAddress) -> bool {
        let family = match address.ip {
            IpAddr::V4(_) => libc::AF_INET,
            IpAddr::V6(_) => libc::AF_INET6,
        };
        [family, libc::AF_UNSPEC].contains(&c_int::from(self.family))
    }

    /// The objects of siwd, as messages to the socket with this port.
    pub fn additions(&self, port: u32) -> Messages {
        let mut messages = Messages::to_port(port);
        let mut last_interface = None;
        for address in device_addresses() {
            let is_first = last_interface.replace(address.interface) != Some(address.interface);
            match self.kind {
                DumpKind::Links if is_first => self.add_link(&mut messages, address),
                DumpKind::Addresses if self.has(address) => {
                    self.add_address(&mut messages, address)
                }
                DumpKind::Routes if self.has(address) => self.add_route(&mut messages, address),
                _ => {}
            }
        }
        messages
    }

    fn add_link(&self, messages: &mut Messages, device: &DeviceAddress) {
        const UP: u8 = 6;
        let mut head = [0; 16];
        head[2..4].copy_from_slice(&libc::ARPHRD_ETHER.to_ne_bytes());
        head[4..8].copy_from_slice(&device.interface.to_ne_bytes());
        head[8..12].copy_from_slice(&FLAGS.to_ne_bytes());
        messages
            .add(libc::RTM_NEWLINK, libc::NLM_F_MULTI, self.sequence, &head)
            .add_text(libc::IFLA_IFNAME, device.interface_name())
            .add_number(libc::IFLA_MTU, device.mtu)
            .add(libc::IFLA_OPERSTATE, &[UP])
            .add(libc::IFLA_ADDRESS, &device.mac)
            .add(libc::IFLA_BROADCAST, &[0xff; 6]);
    }

    fn add_address(&self, messages: &mut Messages, device: &DeviceAddress) {
        let address = OfFamily::of(device.ip);
        let is_link_local = matches!(device.ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let scope = if is_link_local {
            libc::RT_SCOPE_LINK
        } else {
            libc::RT_SCOPE_UNIVERSE
        };
        let permanent = libc::IFA_F_PERMANENT as u8;
        let mut head = [0; 8];
        head[..4].copy_from_slice(&[address.family, address.prefix_len, permanent, scope]);
        head[4..].copy_from_slice(&device.interface.to_ne_bytes());
        let mut message = messages.add(libc::RTM_NEWADDR, libc::NLM_F_MULTI, self.sequence, &head);
        message.add(libc::IFA_ADDRESS, &address.octets);
        if device.ip.is_ipv4() {
            message
                .add(libc::IFA_LOCAL, &address.octets)
                .add_text(libc::IFA_LABEL, device.interface_name());
        }
    }

    fn add_route(&self, messages: &mut Messages, device: &DeviceAddress) {
        let address = OfFamily::of(device.ip);
        let mut head = [0; 12];
        head[..2].copy_from_slice(&[address.family, address.prefix_len]);
        head[4..8].copy_from_slice(&[
            libc::RT_TABLE_MAIN,
            libc::RTPROT_KERNEL,
            libc::RT_SCOPE_LINK,
            libc::RTN_UNICAST,
        ]);
        messages
            .add(libc::RTM_NEWROUTE, libc::NLM_F_MULTI, self.sequence, &head)
            .add_number(libc::RTA_TABLE, libc::RT_TABLE_MAIN.into())
            .add(libc::RTA_DST, &address.network)
            .add(libc::RTA_PREFSRC, &address.octets)
            .add_number(libc::RTA_OIF, device.interface);
    }
}

/// An address in network byte order, and its network.
struct OfFamily {
    family: u8,
    prefix_len: u8,
    octets: Vec<u8>,
    network: Vec<u8>,
}

impl OfFamily {
    fn of(ip: IpAddr) -> OfFamily {
        match ip {
            IpAddr::V4(ip) => OfFamily {
                family: libc::AF_INET as u8,
                prefix_len: V4_MASK.to_bits().count_ones() as u8,
                octets: ip.octets().to_vec(),
                network: (ip & V4_MASK).octets().to_vec(),
            },
            IpAddr::V6(ip) => OfFamily {
                family: libc::AF_INET6 as u8,
                prefix_len: V6_MASK.to_bits().count_ones() as u8,
                octets: ip.octets().to_vec(),
                network: Ipv6Addr::from_bits(ip.to_bits() & V6_MASK.to_bits())
                    .octets()
                    .to_vec(),
            },
        }
    }
}
