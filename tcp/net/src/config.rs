//! Configuration of one device's network layer: addresses, routes, neighbours, and sharing with the host.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;
use core::time::Duration;

use crate::error::NetError;
use crate::flow::port_set::PortSet;
use crate::flow::steering::WorkerSteering;
use crate::wire::frame::is_unicast_mac;

/// An address of this device with the prefix of its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpCidr {
    /// The address.
    pub addr: IpAddr,
    /// The length of the prefix that all addresses on the link share, in bits.
    pub prefix: u8,
}

impl IpCidr {
    /// An address and the length of its prefix in bits.
    pub const fn new(addr: IpAddr, prefix: u8) -> Self {
        IpCidr { addr, prefix }
    }

    /// Returns whether `other` is on the same link as this address.
    pub fn contains(&self, other: IpAddr) -> bool {
        match (self.addr, other) {
            (IpAddr::V4(address), IpAddr::V4(b)) => {
                let shift = 32 - u32::from(self.prefix.min(32));
                let d = address.to_bits() ^ b.to_bits();
                d.checked_shr(shift).unwrap_or(0) == 0
            }
            (IpAddr::V6(address), IpAddr::V6(b)) => {
                let shift = 128 - u32::from(self.prefix.min(128));
                let d = address.to_bits() ^ b.to_bits();
                d.checked_shr(shift).unwrap_or(0) == 0
            }
            _ => false,
        }
    }

    /// Returns whether `other` is a broadcast address of this link: directed broadcast (RFC 1122
    /// section 3.2.1.3 (d)) or its obsolete all-zeros form. Point-to-point links have none (RFC
    /// 3021).
    pub fn is_broadcast(&self, other: IpAddr) -> bool {
        let (IpAddr::V4(address), IpAddr::V4(b)) = (self.addr, other) else {
            return false;
        };
        if self.prefix > 30 || !self.contains(other) || address == b {
            return false;
        }
        let host = u32::MAX >> self.prefix;
        b.to_bits() & host == host || b.to_bits() & host == 0
    }
}

impl FromStr for IpCidr {
    type Err = NetError;
    /// `10.0.0.1/24`, `fd00::1/64`; without a prefix, a host address.
    fn from_str(text: &str) -> Result<Self, NetError> {
        let bad = || {
            NetError::Config(format!(
                "{text:?} is not an address/prefix; write e.g. 10.0.0.1/24"
            ))
        };
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let addr: IpAddr = address.parse().map_err(|_| bad())?;
        let max = if addr.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse::<u8>().map_err(|_| bad())?,
            None => max,
        };
        if prefix > max {
            return Err(bad());
        }
        Ok(IpCidr { addr, prefix })
    }
}

/// A static route: packets to these destinations go through this neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Route {
    /// Destinations; the longest matching prefix wins, and on-link prefixes win among equals.
    pub to: IpCidr,
    /// The next hop, which is on the link of one of our addresses.
    pub via: IpAddr,
}

/// Routes from a source other than the configuration, such as the kernel on a shared device. Used
/// where [`NetConfig`] has no better route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LearnedRoutes {
    /// IPv4 gateway; [`NetConfig::gateway_v4`] takes precedence.
    pub gateway_v4: Option<Ipv4Addr>,
    /// IPv6 gateway; [`NetConfig::gateway_v6`] takes precedence.
    pub gateway_v6: Option<Ipv6Addr>,
    /// Further routes, as in [`NetConfig::routes`].
    pub routes: Vec<Route>,
    /// Prefixes that are on the link although none of our addresses is in them.
    pub on_link: Vec<IpCidr>,
}

/// Limits of the neighbour table (ARP, RFC 826; NDP, RFC 4861).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourConfig {
    /// Maximum number of entries, resolved or not.
    pub max_entries: usize,
    /// Lifetime of a confirmed entry before the neighbour is probed again.
    pub reachable: Duration,
    /// Time between solicitations (RetransTimer).
    pub retransmit: Duration,
    /// Solicitations before the neighbour is considered unreachable.
    pub probes: u8,
    /// Maximum number of unresolved entries requested by one client ([`crate::QuotaOwner`]).
    pub max_unresolved_per_client: usize,
    /// Maximum number of unresolved entries requested by all clients of a user.
    pub max_unresolved_per_user: usize,
}

impl NeighbourConfig {
    /// Returns the defaults for a table of `max_entries`: a client may have an eighth of them
    /// unresolved, a user a quarter.
    pub const fn with_entries(max_entries: usize) -> Self {
        NeighbourConfig {
            max_entries,
            reachable: Duration::from_secs(30),
            retransmit: Duration::from_secs(1),
            probes: 3,
            max_unresolved_per_client: max_entries / 8,
            max_unresolved_per_user: max_entries / 4,
        }
    }
}

impl Default for NeighbourConfig {
    fn default() -> Self {
        NeighbourConfig::with_entries(1024)
    }
}

/// Limits of the reassembly of fragmented datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReassemblyConfig {
    /// Maximum number of incomplete datagrams; a new one evicts the oldest. 0 disables reassembly.
    pub max_datagrams: usize,
    /// Maximum number of received buffers held by all incomplete datagrams.
    pub max_fragments: usize,
    /// Time from the arrival of a datagram's first fragment until it is discarded (RFC 1122 section
    /// 3.3.2 asks for 60 to 120 s, RFC 8200 for 60 s).
    pub timeout: Duration,
}

impl Default for ReassemblyConfig {
    fn default() -> Self {
        ReassemblyConfig {
            max_datagrams: 64,
            max_fragments: 512,
            timeout: Duration::from_secs(60),
        }
    }
}

/// Sharing with another stack of this machine, the kernel's, which has the device's Ethernet
/// address and some of its IP addresses, too. The TCP ports at those addresses are divided between
/// the stacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostShare {
    /// The addresses of [`NetConfig::addresses`] that both stacks have.
    pub addresses: Vec<IpAddr>,
    /// Our ports at these addresses, for connects without a local port.
    pub ports: PortSet,
}

/// Addresses, routes and limits of one device's network layer. `NetConfig::new` fills in defaults for a
/// fabric.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// The device's Ethernet address.
    pub mac: [u8; 6],
    /// At least one address; the first of a family is the default source of `connect`.
    pub addresses: Vec<IpCidr>,
    /// Next hop of IPv4 packets to destinations that are neither on a link nor covered by a route.
    pub gateway_v4: Option<Ipv4Addr>,
    /// Next hop of IPv6 packets, likewise.
    pub gateway_v6: Option<Ipv6Addr>,
    /// Routes in addition to the links and the two default gateways.
    pub routes: Vec<Route>,
    /// Maximum IP packet size, at least 576 (1280 if there is an IPv6 address).
    pub mtu: u16,
    /// 802.1Q tag of all our frames; frames of other VLANs are ignored.
    pub vlan: Option<u16>,
    /// This worker's steering when several workers share the device: connects then draw source
    /// ports whose flows are steered to this worker. `None`: there is one worker.
    pub steering: Option<WorkerSteering>,
    /// The kernel's share of the device, if the device is shared.
    pub host: Option<HostShare>,
    /// Limits of the neighbour table (ARP, NDP).
    pub neighbours: NeighbourConfig,
    /// Limits of the reassembly of IP fragments.
    pub reassembly: ReassemblyConfig,
    /// Announce our IPv4 addresses at start-up, and probe whether another host has one of ours.
    pub gratuitous_arp: bool,
    /// Rate limit in packets per second over all connections, separately for resets, challenge ACKs
    /// (RFC 5961 section 7) and ICMP replies.
    pub control_rate: u32,
    /// Receive messages of the iWARP port mapper, see [`PortMapperEvent`](crate::PortMapperEvent).
    pub port_mapper: bool,
}

impl NetConfig {
    /// Returns the defaults for a fabric, for a device with this Ethernet address and these
    /// addresses.
    pub fn new(mac: [u8; 6], addresses: Vec<IpCidr>) -> Self {
        NetConfig {
            mac,
            addresses,
            gateway_v4: None,
            gateway_v6: None,
            routes: Vec::new(),
            mtu: 1500,
            vlan: None,
            steering: None,
            host: None,
            neighbours: NeighbourConfig::default(),
            reassembly: ReassemblyConfig::default(),
            gratuitous_arp: false,
            control_rate: 1000,
            port_mapper: false,
        }
    }
}

/// Validates a configuration.
///
/// # Errors
/// A setting is out of range; the text names it and its limits.
pub fn check_net_config(config: &NetConfig) -> Result<(), NetError> {
    let bad = |text: String| Err(NetError::Config(text));
    if !is_unicast_mac(config.mac) {
        return bad(format!("MAC {:02x?} is not a unicast address", config.mac));
    }
    if config.addresses.is_empty() {
        return bad("a device needs at least one address".into());
    }
    if let Some(host) = &config.host
        && let Some(address) = host
            .addresses
            .iter()
            .find(|address| !config.addresses.iter().any(|cidr| cidr.addr == **address))
    {
        return bad(format!(
            "{address} cannot be shared: the device does not have it"
        ));
    }
    for route in &config.routes {
        if route.to.addr.is_ipv4() != route.via.is_ipv4() {
            return bad(format!(
                "route via {}: not of the same address family as {}",
                route.via, route.to.addr
            ));
        }
        let link_local =
            matches!(route.via, IpAddr::V6(address) if address.is_unicast_link_local());
        if !link_local
            && !config
                .addresses
                .iter()
                .any(|address| address.contains(route.via))
        {
            return bad(format!(
                "route via {}: no address of this device is on its link; add one",
                route.via
            ));
        }
    }
    let ipv6 = config
        .addresses
        .iter()
        .any(|address| address.addr.is_ipv6());
    let min = if ipv6 { 1280 } else { 576 };
    if config.mtu < min {
        return bad(format!("MTU {} is less than {min}", config.mtu));
    }
    if config.vlan.is_some_and(|vlan| vlan == 0 || vlan > 4094) {
        return bad("the VLAN ID must be in 1..=4094".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_says_who_is_on_the_link() {
        let cidr: IpCidr = "10.1.2.3/24".parse().unwrap();
        assert!(cidr.contains("10.1.2.200".parse().unwrap()));
        assert!(!cidr.contains("10.1.3.200".parse().unwrap()));
        assert!(!cidr.contains("fd00::1".parse().unwrap()));
        let all: IpCidr = "10.1.2.3/0".parse().unwrap();
        assert!(all.contains("192.0.2.1".parse().unwrap()));
        let everybody = |address: &str| cidr.is_broadcast(address.parse().unwrap());
        assert!(everybody("10.1.2.255") && everybody("10.1.2.0"));
        assert!(!everybody("10.1.2.3") && !everybody("10.1.3.255") && !everybody("fd00::"));
        let link: IpCidr = "10.1.2.2/31".parse().unwrap();
        assert!(!link.is_broadcast("10.1.2.3".parse().unwrap()));
        let six: IpCidr = "fd00::1/64".parse().unwrap();
        assert!(six.contains("fd00::ffff".parse().unwrap()));
        assert!(!six.contains("fd01::1".parse().unwrap()));
        assert!("10.0.0.1/33".parse::<IpCidr>().is_err());
        assert!("nonsense".parse::<IpCidr>().is_err());
    }
}
