//! Configuration of one device's stack. Validated by `Stack::new`.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;
use core::time::Duration;
use std::hash::{BuildHasher, RandomState};

use crate::base::error::StackError;
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
    pub(crate) fn is_broadcast(&self, other: IpAddr) -> bool {
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
    type Err = StackError;
    /// `10.0.0.1/24`, `fd00::1/64`; without a prefix, a host address.
    fn from_str(text: &str) -> Result<Self, StackError> {
        let bad = || {
            StackError::Config(format!(
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
/// where [`StackConfig`] has no better route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LearnedRoutes {
    /// IPv4 gateway; [`StackConfig::gateway_v4`] takes precedence.
    pub gateway_v4: Option<Ipv4Addr>,
    /// IPv6 gateway; [`StackConfig::gateway_v6`] takes precedence.
    pub gateway_v6: Option<Ipv6Addr>,
    /// Further routes, as in [`StackConfig::routes`].
    pub routes: Vec<Route>,
    /// Prefixes that are on the link although none of our addresses is in them.
    pub on_link: Vec<IpCidr>,
}

/// Limits of one super-segment for TCP segmentation offload by the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TsoLimits {
    /// Wire segments, at least 2.
    pub max_segments: u16,
    /// Payload bytes, at most 65000.
    pub max_bytes: u32,
}

/// The congestion controller of new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CongestionControl {
    /// RFC 9438.
    #[default]
    Cubic,
    /// RFC 5681, 6582. The drill's scripts and the public suites expect its windows, and DCTCP is the same
    /// but for marks (RFC 8257 section 3.5).
    NewReno,
    /// RFC 8257: for fabrics whose switches mark packets and whose hosts all use DCTCP. Requests
    /// ECN.
    Dctcp,
}

/// Keepalive (RFC 9293 section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes before the connection is dropped.
    pub probes: u8,
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
    /// The addresses of [`StackConfig::addresses`] that both stacks have.
    pub addresses: Vec<IpAddr>,
    /// Our ports at these addresses, for connects without a local port.
    pub ports: PortSet,
}

/// The configuration of a [`crate::Stack`]. `StackConfig::new` fills in defaults for a fabric.
#[derive(Clone, Debug)]
pub struct StackConfig {
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
    /// Lower bound of the retransmission timeout (RFC 6298 (2.4)): 5 ms for a fabric, 200 ms for
    /// wide areas.
    pub rto_min: Duration,
    /// Upper bound of the retransmission timeout (RFC 6298 (2.5)).
    pub rto_max: Duration,
    /// Retransmission timeout before the first RTT sample (RFC 6298 (2.1)).
    pub rto_initial: Duration,
    /// Maximum delay of an ACK (RFC 9293 section 3.8.6.3: < 500 ms).
    pub delayed_ack: Duration,
    /// Maximum time that the ACK of a message waits for the owner's reply to carry it, on
    /// connections whose owner replies so fast that a pure ACK would be superfluous. Below 1 ms;
    /// zero disables the wait.
    pub answer_wait: Duration,
    /// Initial receive window of each connection in bytes, up to 1 GiB; scaled as RFC 7323 says. A
    /// connection offers no more than its `max_recv_buffers` hold, and at first no more than
    /// `max_held_buffers`.
    pub recv_window: u32,
    /// Maximum number of times that a connection doubles its receive window, while its peer fills
    /// the window in each round trip and buffers are free (autotuning for long paths). 0: never.
    pub recv_window_doublings: u8,
    /// Minimum window scale to offer (RFC 7323 section 2.2), up to 14; the receive window may need
    /// a larger one.
    pub window_scale: u8,
    /// Maximum number of received buffers that a connection holds, in order and out of order
    /// together, so that tiny segments cannot pin the whole buffer pool. Segments that fill holes
    /// may use an eighth more. Beyond a quarter of it, small segments in order share buffers.
    pub max_recv_buffers: usize,
    /// Maximum number of received buffers that all connections hold together. Connections that hold
    /// few buffers may exceed it by an eighth, and each connection may hold one beyond that. Choose
    /// it so that the port keeps enough buffers to go on receiving.
    pub max_held_buffers: usize,
    /// Raise [`crate::Events::OUT_OF_ORDER`].
    pub show_out_of_order: bool,
    /// How the congestion window grows and shrinks.
    pub congestion: CongestionControl,
    /// Initial window in segments; RFC 6928 says 10, a fabric may start with more.
    pub initial_window: u32,
    /// Secret of the initial sequence numbers (RFC 6528) and port choice (RFC 6056). Drawn at
    /// random for each configuration; all stacks of a device share it.
    pub isn_key: [u8; 16],
    /// Secret of the flow table, drawn and shared in the same way.
    pub hash_key: [u8; 16],
    /// Maximum number of connections, including TIME-WAIT (the oldest of those are evicted).
    pub max_connections: usize,
    /// Leave checksums to the sink, which completes them in software
    /// ([`crate::TxChecksum::Partial`]).
    pub tx_checksum: bool,
    /// TSO limits if the port segments super-segments ([`crate::FrameMeta::tso_segsz`]). Needs
    /// `tx_checksum` off, because only the port can then compute checksums.
    pub tso: Option<TsoLimits>,
    /// This worker's steering when several workers share the device: connects then draw source
    /// ports whose flows are steered to this worker. `None`: there is one worker.
    pub steering: Option<WorkerSteering>,
    /// The kernel's share of the device, if the device is shared.
    pub host: Option<HostShare>,
    /// Keepalive probes (RFC 9293 section 3.8.4) of every connection; `None`: none are sent.
    pub keepalive: Option<Keepalive>,
    /// Unacknowledged data older than this ends the connection (RFC 9293 section 3.8.3).
    pub user_timeout: Duration,
    /// A connection released by its owner is aborted after this time, whatever the peer answers,
    /// unless all its data is acknowledged.
    pub orphan_timeout: Duration,
    /// Maximum number of retransmissions of a SYN or SYN-ACK.
    pub syn_retries: u8,
    /// Duration of TIME-WAIT (2 MSL in RFC 9293).
    pub time_wait: Duration,
    /// Offer timestamps (RFC 7323) and SACK (RFC 2018).
    pub timestamps: bool,
    /// Offer and accept SACK (RFC 2018).
    pub sack: bool,
    /// Offer and accept ECN (RFC 3168). [`CongestionControl::Dctcp`] implies it.
    pub ecn: bool,
    /// Limits of the neighbour table (ARP, NDP).
    pub neighbours: NeighbourConfig,
    /// Limits of the reassembly of IP fragments.
    pub reassembly: ReassemblyConfig,
    /// Announce our IPv4 addresses at start-up, and probe whether another host has one of ours.
    pub gratuitous_arp: bool,
    /// Answer SYNs beyond a listener's backlog with SYN cookies, without state (RFC 4987 section
    /// 3.6).
    pub syn_cookies: bool,
    /// Rate limit in packets per second over all connections, separately for resets, challenge ACKs
    /// (RFC 5961 section 7) and ICMP replies.
    pub control_rate: u32,
    /// Receive messages of the iWARP port mapper, see [`Stack::next_port_mapper_event`](crate::Stack::next_port_mapper_event).
    pub port_mapper: bool,
}

/// Bytes that a buffer holds on average, whatever the length of segments. From a quarter of the limit
/// on, small segments share buffers, and two consecutive buffers hold more than one has room for, which
/// is at least 1900 bytes.
const BYTES_PER_BUFFER: usize = 1900 / 2 * 3 / 4;

/// Returns the bytes that this number of buffers holds at least, whatever the length of segments.
pub(crate) fn held_in(buffers: usize) -> u32 {
    let held = buffers.saturating_mul(BYTES_PER_BUFFER);
    u32::try_from(held).unwrap_or(u32::MAX)
}

impl StackConfig {
    /// Returns the maximum number of received buffers of a connection that is the only one.
    pub(crate) fn buffers_of_one(&self) -> usize {
        self.max_recv_buffers.min(self.max_held_buffers)
    }

    /// Returns the initial receive window of a connection in bytes: `recv_window`, as far as the buffers
    /// that one connection may hold suffice for segments of any length.
    pub fn initial_receive_window(&self) -> u32 {
        self.recv_window.min(held_in(self.buffers_of_one()))
    }

    pub(crate) fn wants_ecn(&self) -> bool {
        self.ecn || self.congestion == CongestionControl::Dctcp
    }

    /// Returns the defaults for a fabric, for a device with this Ethernet address and these
    /// addresses.
    pub fn new(mac: [u8; 6], addrs: Vec<IpCidr>) -> Self {
        StackConfig {
            mac,
            addresses: addrs,
            gateway_v4: None,
            gateway_v6: None,
            routes: Vec::new(),
            mtu: 1500,
            vlan: None,
            rto_min: Duration::from_millis(5),
            rto_max: Duration::from_secs(60),
            rto_initial: Duration::from_secs(1),
            delayed_ack: Duration::from_millis(1),
            answer_wait: Duration::from_micros(3),
            recv_window: 4 << 20,
            recv_window_doublings: 0,
            window_scale: 0,
            max_recv_buffers: 32_768,
            max_held_buffers: usize::MAX,
            show_out_of_order: false,
            congestion: CongestionControl::Cubic,
            initial_window: 10,
            isn_key: random_key(),
            hash_key: random_key(),
            max_connections: 65536,
            tx_checksum: true,
            tso: None,
            steering: None,
            host: None,
            keepalive: None,
            user_timeout: Duration::from_secs(120),
            orphan_timeout: Duration::from_secs(120),
            syn_retries: 6,
            time_wait: Duration::from_secs(60),
            timestamps: true,
            sack: true,
            ecn: false,
            neighbours: NeighbourConfig::default(),
            reassembly: ReassemblyConfig::default(),
            gratuitous_arp: false,
            port_mapper: false,
            syn_cookies: true,
            control_rate: 1000,
        }
    }
}

/// A secret seeded by the operating system: the standard library seeds each `RandomState` from its
/// source of randomness.
fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    for half in key.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(0u8).to_ne_bytes());
    }
    key
}

/// Validates a configuration for `Stack::new`.
pub(crate) fn check_config(config: &StackConfig) -> Result<(), StackError> {
    let bad = |text: String| Err(StackError::Config(text));
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
    if let Some(text) = config.tso {
        if config.tx_checksum {
            return bad("TSO needs checksum offload: set tx_checksum to false".into());
        }
        if text.max_segments < 2 || text.max_bytes > 65000 {
            return bad("TSO limits must be at least 2 segments and at most 65000 bytes".into());
        }
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
    if config.recv_window < 4096 || config.recv_window > 1 << 30 {
        return bad(format!(
            "receive window {} is not in 4096..=1073741824",
            config.recv_window
        ));
    }
    if config.window_scale > 14 {
        return bad(format!(
            "window scale {} is not in 0..=14 (RFC 7323 section 2.3)",
            config.window_scale
        ));
    }
    if config.rto_min.is_zero() || config.rto_max < config.rto_min || config.rto_initial.is_zero() {
        return bad(
            "retransmission timeouts must satisfy 0 < rto_min <= rto_max, 0 < rto_initial".into(),
        );
    }
    if let Some(keepalive) = &config.keepalive
        && (keepalive.idle.is_zero() || keepalive.interval.is_zero())
    {
        return bad("keepalive: idle and interval must be greater than 0".into());
    }
    if config.max_connections == 0 || config.max_connections > 1 << 24 {
        return bad("max_connections must be in 1..=16777216".into());
    }
    if config.max_recv_buffers < 64 || config.max_held_buffers < 64 {
        return bad("max_recv_buffers and max_held_buffers must be at least 64".into());
    }
    if config.delayed_ack.as_millis() >= 500 {
        return bad("delayed_ack must be below 500 ms (RFC 9293 section 3.8.6.3)".into());
    }
    if config.answer_wait.as_millis() >= 1 {
        return bad("answer_wait must be below 1 ms".into());
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
