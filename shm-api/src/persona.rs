//! Personas: the kind of RDMA device that the drop-in libibverbs shows to programs. Many programs refuse a
//! device that calls itself iWARP. A persona changes only the answers of queries, siwd's files like those of
//! /sys, and whether there are datagrams, which are RoCEv2 UD. Connections are iWARP under each persona, so peers
//! with different personas work with each other.

use crate::device_identity::{RawGid, gid_of_mac};
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

/// The environment variable by which `siwrun --persona` overrides the personas of all devices for a program.
pub const PERSONA_VARIABLE: &str = "SIW_PERSONA";

/// Kind of device that programs see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Persona {
    /// An RNIC: iWARP, as the wire is.
    #[default]
    Iwarp = 0,
    /// A RoCE v2 device: InfiniBand's transport on an Ethernet port.
    Roce = 1,
    /// An InfiniBand device, with LIDs.
    Ib = 2,
    /// A device of another kind, with the transport `UNSPECIFIED` of verbs.
    Unspecified = 3,
}

/// Link layer of a port, with the numbers of verbs.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkLayer {
    /// `IBV_LINK_LAYER_INFINIBAND`
    InfiniBand = 1,
    /// `IBV_LINK_LAYER_ETHERNET`
    Ethernet = 2,
}

impl LinkLayer {
    /// The file `link_layer` of the kernel.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
        }
    }
}

/// `IB_PORT_CM_SUP` of the InfiniBand specification: the port has a connection manager.
const CONNECTION_MANAGER: u32 = 1 << 16;
/// Low bits of an IPv4 address that a LID carries. A LID of a single port is below 0xC000.
const LID_BITS: u16 = 0x7fff;
/// LID of an address whose low bits are zero: 0 is no LID.
const LID_OF_ZERO: u16 = 0x8000;

impl Persona {
    /// All personas.
    pub const ALL: [Persona; 4] = [
        Persona::Iwarp,
        Persona::Roce,
        Persona::Ib,
        Persona::Unspecified,
    ];

    /// Its name in the configuration and in `siwrun --persona`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Persona::Iwarp => "iwarp",
            Persona::Roce => "roce",
            Persona::Ib => "ib",
            Persona::Unspecified => "unspecified",
        }
    }

    /// The persona with that number in control messages. Clients take one that they do not know for iWARP.
    #[must_use]
    pub fn from_number(number: u8) -> Persona {
        let known = Persona::ALL.into_iter();
        let mut found = known.filter(|persona| *persona as u8 == number);
        found.next().unwrap_or_default()
    }

    /// `enum ibv_node_type`: CA, RNIC, or UNSPECIFIED.
    #[must_use]
    pub const fn node_type(self) -> i32 {
        match self {
            Persona::Iwarp => 4,
            Persona::Roce | Persona::Ib => 1,
            Persona::Unspecified => 7,
        }
    }

    /// The file `node_type` of the kernel.
    #[must_use]
    pub const fn node_type_text(self) -> &'static str {
        match self {
            Persona::Iwarp => "4: RNIC",
            Persona::Roce | Persona::Ib => "1: CA",
            Persona::Unspecified => "7: unspecified",
        }
    }

    /// `enum ibv_transport_type`: IB, IWARP, or UNSPECIFIED.
    #[must_use]
    pub const fn transport_type(self) -> i32 {
        match self {
            Persona::Iwarp => 1,
            Persona::Roce | Persona::Ib => 0,
            Persona::Unspecified => 4,
        }
    }

    /// Link layer of the port.
    #[must_use]
    pub const fn link_layer(self) -> LinkLayer {
        match self {
            Persona::Ib => LinkLayer::InfiniBand,
            Persona::Iwarp | Persona::Roce | Persona::Unspecified => LinkLayer::Ethernet,
        }
    }

    /// The GID of an IP address has the type RoCE v2; otherwise it is an InfiniBand GID.
    #[must_use]
    pub const fn has_roce_gids(self) -> bool {
        !matches!(self, Persona::Ib)
    }

    /// The device shows a GID. That of the Ethernet address exists only with iWARP.
    #[must_use]
    pub fn shows_gid(self, raw: RawGid, mac: [u8; 6]) -> bool {
        self == Persona::Iwarp || raw != gid_of_mac(mac)
    }

    /// Queue pairs of datagrams (UD) and address handles exist.
    #[must_use]
    pub const fn has_datagrams(self) -> bool {
        !matches!(self, Persona::Iwarp)
    }

    /// Each address vector has a GID (`IBV_QPF_GRH_REQUIRED`).
    #[must_use]
    pub const fn requires_gids(self) -> bool {
        matches!(self, Persona::Roce | Persona::Unspecified)
    }

    /// `port_cap_flags` of ibv_query_port(3).
    #[must_use]
    pub const fn port_capabilities(self) -> u32 {
        match self {
            Persona::Iwarp => 0,
            Persona::Roce | Persona::Ib | Persona::Unspecified => CONNECTION_MANAGER,
        }
    }

    /// The LID of a port: with [`Persona::Ib`] that of the first IPv4 address, otherwise 0.
    #[must_use]
    pub fn lid(self, ips: impl IntoIterator<Item = IpAddr>) -> u16 {
        match (self, first_ipv4(ips)) {
            (Persona::Ib, Some(ip)) => lid_of_ip(ip),
            _ => 0,
        }
    }
}

/// Text that names no persona.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown persona {0:?}: use iwarp, roce, ib or unspecified")]
pub struct UnknownPersona(String);

impl FromStr for Persona {
    type Err = UnknownPersona;

    fn from_str(text: &str) -> Result<Persona, UnknownPersona> {
        let mut known = Persona::ALL.into_iter();
        let found = known.find(|persona| persona.name() == text);
        found.ok_or_else(|| UnknownPersona(text.to_owned()))
    }
}

/// The address from which the LID of a device is derived.
#[must_use]
pub fn first_ipv4(ips: impl IntoIterator<Item = IpAddr>) -> Option<Ipv4Addr> {
    ips.into_iter().find_map(|ip| match ip {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    })
}

/// The LID of an IPv4 address: its low 15 bits, which differ within a network of up to that size.
#[must_use]
pub fn lid_of_ip(ip: Ipv4Addr) -> u16 {
    let low = ip.to_bits() as u16 & LID_BITS;
    if low == 0 { LID_OF_ZERO } else { low }
}

/// The address of a peer by its LID, in the network of the own address; None for a LID that no device of
/// siwd has.
#[must_use]
pub fn ip_of_lid(own: Ipv4Addr, lid: u16) -> Option<Ipv4Addr> {
    if lid == 0 || lid > LID_OF_ZERO {
        return None;
    }
    let network = own.to_bits() & !u32::from(LID_BITS);
    Some(Ipv4Addr::from_bits(network | u32::from(lid & LID_BITS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_of_personas_lead_back_to_them() {
        for persona in Persona::ALL {
            assert_eq!(persona.name().parse(), Ok(persona));
            assert_eq!(Persona::from_number(persona as u8), persona);
        }
        assert_eq!(Persona::from_number(77), Persona::Iwarp);
        let error = "RoCE".parse::<Persona>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown persona \"RoCE\": use iwarp, roce, ib or unspecified"
        );
    }

    #[test]
    fn a_lid_leads_to_its_address_within_the_network() {
        let own: Ipv4Addr = "192.168.200.1".parse().unwrap();
        for peer in ["192.168.200.2", "192.168.255.255", "192.168.128.0"] {
            let peer: Ipv4Addr = peer.parse().unwrap();
            let lid = lid_of_ip(peer);
            assert!(lid != 0 && lid < 0xC000, "{lid:#x}");
            assert_eq!(ip_of_lid(own, lid), Some(peer));
        }
        assert_eq!(ip_of_lid(own, 0), None);
        assert_eq!(ip_of_lid(own, 0xffff), None);
    }

    #[test]
    fn only_an_infiniband_port_has_a_lid() {
        let ips: [IpAddr; 2] = ["fd77::1".parse().unwrap(), "10.77.0.5".parse().unwrap()];
        let lids = Persona::ALL.map(|persona| persona.lid(ips));
        assert_eq!(lids, [0, 0, 5, 0]);
        assert_eq!(Persona::Ib.lid(ips.into_iter().take(1)), 0);
    }
}
