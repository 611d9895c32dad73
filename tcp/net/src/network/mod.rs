//! The network layer of one device in one worker: addresses, routes, neighbours, and the frames that
//! belong to no connection. It knows no connection: a transport gives it the ids of connections that wait
//! for a neighbour, and gets them back.
//!
//! [`Network`] is the state that output needs, too. [`NetworkInput`] has the received frames that are kept,
//! and processes the frames that carry no TCP segment; the results that concern a transport are returned
//! as [`Received`].
//!
//! [`NetworkInput`]: input::NetworkInput
//! [`Received`]: input::Received

pub(crate) mod datagrams;
mod fragment_input;
mod groups;
mod host_path;
pub(crate) mod input;
pub(crate) mod quoted_segment;
pub(crate) mod roce;

use core::net::{IpAddr, Ipv6Addr};

use crate::config::{IpCidr, LearnedRoutes, NetConfig, check_net_config};
use crate::error::NetError;
use crate::frame_sink::FrameSink;
use crate::ids::ConnId;
use crate::link::address_conflicts::{AddressConflict, AddressConflicts};
use crate::link::control_queue::ControlQueue;
use crate::link::groups::Groups;
use crate::link::neighbours::{ClaimOutcome, Neighbours};
use crate::rate_limits::TokenBucket;
use crate::siphash::Key;
use crate::stats::NetStats;
use crate::time::Instant;
use crate::wire::frame::{self, LinkIdentity};

/// IPv6 groups of every node: ff02::1, and ff02::1:ff00:0 with the low 24 bits of an address.
const ALL_NODES: u128 = 0xff02 << 112 | 1;
const SOLICITED_NODE: u128 = 0xff02 << 112 | 0x1_ff00_0000;

/// Addresses, routes, neighbours and frames of no connection; see the module documentation.
pub struct Network {
    /// The configuration in force.
    pub config: NetConfig,
    /// The neighbour table.
    pub neighbours: Neighbours,
    /// Routes in addition to those of the configuration.
    learned_routes: LearnedRoutes,
    /// Datagrams of RoCEv2 to addresses that the kernel has too are ours.
    takes_roce: bool,
    /// Groups of which queue pairs of datagrams are members.
    groups: Groups,
    control_queue: ControlQueue,
    conflicts: AddressConflicts,
    /// Answers to datagrams.
    datagrams: TokenBucket,
    /// Counters since the start.
    pub stats: NetStats,
}

impl Network {
    /// Returns the state of a device without neighbours, whose addresses are announced if configured.
    /// `secret`: makes the identifications of fragmented packets hard to guess (RFC 7739).
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn new(config: NetConfig, secret: Key, now: Instant) -> Result<Self, NetError> {
        check_net_config(&config)?;
        let rate = config.control_rate;
        let mut net = Network {
            neighbours: Neighbours::new(config.neighbours),
            learned_routes: LearnedRoutes::default(),
            takes_roce: false,
            groups: Groups::new(secret),
            control_queue: ControlQueue::new(&config, secret, TokenBucket::new(rate)),
            conflicts: AddressConflicts::new(config.gratuitous_arp, now),
            datagrams: TokenBucket::new(rate),
            stats: NetStats::default(),
            config,
        };
        if net.config.gratuitous_arp {
            net.probe_addresses(now);
            net.announce_addresses(&[]);
        }
        Ok(net)
    }

    /// Returns the Ethernet address and the VLAN of received frames.
    #[inline]
    pub fn link_identity(&self) -> LinkIdentity {
        LinkIdentity {
            mac: self.config.mac,
            vlan: self.config.vlan,
        }
    }

    /// Returns whether the device has this address.
    pub fn is_own_address(&self, address: IpAddr) -> bool {
        self.config
            .addresses
            .iter()
            .any(|cidr| cidr.addr == address)
    }

    /// Returns the source address for an answer to a packet sent to `address`: `address` itself, or
    /// one of ours if it is a multicast group that we are in (RFC 4291 section 2.7.1: all nodes of
    /// the link, and the solicited-node groups). `None`: none of our addresses is in the group.
    #[cold]
    fn own_address_of_group(&self, address: IpAddr) -> Option<IpAddr> {
        let IpAddr::V6(group) = address else {
            return Some(address);
        };
        let ours = self.config.addresses.iter().map(|cidr| cidr.addr);
        let mut ours = ours.filter_map(|address| match address {
            IpAddr::V6(address) => Some(address.to_bits()),
            IpAddr::V4(_) => None,
        });
        let found = match group.to_bits() {
            ALL_NODES => ours.next(),
            bits if bits >> 24 == SOLICITED_NODE >> 24 => {
                ours.find(|own| (own ^ bits) & 0xff_ffff == 0)
            }
            _ => return Some(address),
        };
        found.map(|own| Ipv6Addr::from_bits(own).into())
    }

    /// Returns whether packets from `address` may be answered: it is a valid peer address, and
    /// neither ours (LAND attack; except for a frame that we sent to ourselves) nor a broadcast
    /// address of our links (RFC 1122 section 3.2.1.3).
    pub fn can_be_peer(&self, address: IpAddr, src_mac: [u8; 6]) -> bool {
        let never = |cidr: &IpCidr| {
            cidr.addr == address && src_mac != self.config.mac || cidr.is_broadcast(address)
        };
        frame::is_peer_address(address) && !self.config.addresses.iter().any(never)
    }

    /// Returns the next hop for `remote`: `remote` itself if it is on the link, else a gateway. The
    /// longest prefix wins (RFC 1812 section 5.2.4.3). Called when a connection opens or the
    /// neighbour table has changed, not for each frame.
    pub fn next_hop(&self, remote: IpAddr) -> Option<IpAddr> {
        if matches!(remote, IpAddr::V6(address) if address.is_unicast_link_local()) {
            return Some(remote);
        }
        let links = self
            .config
            .addresses
            .iter()
            .map(|address| (*address, remote));
        let learned = &self.learned_routes;
        let on_link = learned.on_link.iter().map(|network| (*network, remote));
        let routes = learned.routes.iter().chain(&self.config.routes);
        let routes = routes.map(|route| (route.to, route.via));
        // `max_by_key` returns the last of equals, so that links win over routes, and configured
        // entries over learned ones.
        let best = routes
            .chain(on_link)
            .chain(links)
            .filter(|(to, _)| to.contains(remote))
            .max_by_key(|(to, _)| to.prefix);
        let default = match remote {
            IpAddr::V4(_) => {
                let gateway = self.config.gateway_v4.or(learned.gateway_v4);
                gateway.map(IpAddr::V4)
            }
            IpAddr::V6(_) => {
                let gateway = self.config.gateway_v6.or(learned.gateway_v6);
                gateway.map(IpAddr::V6)
            }
        };
        best.map(|(_, via)| via).or(default)
    }

    /// Probes whether another host has one of our addresses.
    #[cold]
    fn probe_addresses(&mut self, now: Instant) {
        self.conflicts.take_probe(now);
        for cidr in &self.config.addresses {
            self.control_queue.probe_address(cidr.addr, &mut self.stats);
        }
    }

    /// Announces our IPv4 addresses, except those in `known`.
    fn announce_addresses(&mut self, known: &[IpCidr]) {
        let own = self.config.addresses.iter().map(|cidr| cidr.addr);
        let new = own.filter(|own| !known.iter().any(|cidr| cidr.addr == *own));
        for address in new.filter(IpAddr::is_ipv4) {
            self.control_queue
                .announce_address(address, &mut self.stats);
        }
    }

    /// Processes the claim of another host to an address of ours: counts, reports and defends.
    fn on_address_conflict(&mut self, now: Instant, conflict: AddressConflict) {
        // Another worker defends.
        if self.control_queue.silent {
            return;
        }
        self.stats.address_conflicts += 1;
        if self.conflicts.record(conflict, now) {
            self.control_queue
                .announce_address(conflict.address, &mut self.stats);
        }
    }

    /// Takes a conflict about one of our addresses to report; each address at most once in ten seconds.
    #[inline]
    pub fn take_address_conflict(&mut self) -> Option<AddressConflict> {
        self.conflicts.take_report()
    }

    /// Replaces the device's addresses. New ones are probed and announced as at the start.
    ///
    /// # Errors
    /// The configuration is invalid with these addresses. Nothing has changed then.
    pub fn set_addresses(&mut self, now: Instant, addresses: Vec<IpCidr>) -> Result<(), NetError> {
        let before = core::mem::replace(&mut self.config.addresses, addresses);
        if let Err(error) = check_net_config(&self.config) {
            self.config.addresses = before;
            return Err(error);
        }
        self.neighbours.new_generation();
        if self.config.gratuitous_arp {
            self.probe_addresses(now);
            self.announce_addresses(&before);
        }
        Ok(())
    }

    /// Replaces the learned routes.
    pub fn set_learned_routes(&mut self, routes: LearnedRoutes) {
        self.learned_routes = routes;
        self.neighbours.new_generation();
    }

    /// Sets the MAC address of a neighbour as known to another stack on this machine; `None`: that
    /// stack no longer knows it. `is_permanent`: the entry needs no confirmation.
    pub fn learn_neighbour(
        &mut self,
        now: Instant,
        address: IpAddr,
        mac: Option<[u8; 6]>,
        is_permanent: bool,
    ) -> ClaimOutcome {
        let Some(mac) = mac else {
            self.neighbours.forget_known(address, now);
            return ClaimOutcome::default();
        };
        self.neighbours.set_known(address, mac, is_permanent, now)
    }

    /// Takes datagrams of RoCEv2 to addresses that the kernel has too, from now on.
    pub fn take_roce_from_host(&mut self) {
        self.takes_roce = true;
    }

    /// Suppresses answers or allows them again: another worker answers the frame that is being processed.
    /// Returns whether they were suppressed before.
    pub fn set_silent(&mut self, silent: bool) -> bool {
        core::mem::replace(&mut self.control_queue.silent, silent)
    }

    /// Returns whether there is room for a frame of no connection; if not, it is counted as dropped.
    pub fn has_room(&mut self) -> bool {
        self.control_queue.has_room(&mut self.stats)
    }

    /// Returns whether the part of the queue is full that is available to answers without a rate limit.
    pub fn is_half_full(&self) -> bool {
        self.control_queue.is_half_full()
    }

    /// Queues a complete frame of a transport that consists of headers only, `l3_len` bytes of them IP, or
    /// drops and counts it.
    pub fn push_headers(&mut self, headers: &[u8], l3_len: u8, ipv6: bool) {
        let mut frame = self.control_queue.buffer();
        frame.extend_from_slice(headers);
        self.control_queue
            .push_frame(frame, l3_len, ipv6, &mut self.stats);
    }

    /// Returns whether [`poll`](Self::poll) has a timer to serve.
    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        self.neighbours.is_due(now) || self.conflicts.is_due(now) || self.groups.is_due(now)
    }

    /// Serves the timers of addresses, groups and neighbours. Returns the connections whose neighbour did not
    /// answer.
    #[inline]
    fn poll(&mut self, now: Instant) -> Vec<ConnId> {
        if self.conflicts.is_due(now) {
            self.probe_addresses(now);
        }
        if self.groups.is_due(now) {
            let (groups, mut reporter) = self.groups();
            groups.repeat_reports(now, &mut reporter);
        }
        if !self.neighbours.is_due(now) {
            return Vec::new();
        }
        let failed = self.neighbours.poll(now);
        self.stats.neighbour_failures += failed.len() as u64;
        failed
    }

    /// Returns the earliest time at which a timer is due.
    #[inline]
    fn next_deadline(&self) -> Option<Instant> {
        let all = [
            self.neighbours.next_deadline(),
            self.conflicts.next_deadline(),
            self.groups.next_deadline(),
        ];
        all.into_iter().flatten().min()
    }

    /// Returns whether frames wait to be sent.
    #[inline]
    pub fn has_output(&self) -> bool {
        !self.control_queue.is_empty() || !self.neighbours.solicits.is_empty()
    }

    /// Sends the queued frames, as far as the sink has room.
    #[inline]
    pub fn flush<R>(&mut self, sink: &mut impl FrameSink<R>) {
        if !self.control_queue.is_empty() {
            self.control_queue.flush(sink, &mut self.stats);
        }
    }

    /// Sends the solicitations of neighbours that were looked up, and the queued frames.
    pub fn send_solicitations<R>(&mut self, sink: &mut impl FrameSink<R>) {
        while let Some(solicit) = self.neighbours.solicits.pop() {
            let addrs = &self.config.addresses;
            let source = addrs.iter().find(|cidr| cidr.contains(solicit.target));
            let source = source.or_else(|| {
                addrs
                    .iter()
                    .find(|cidr| cidr.addr.is_ipv4() == solicit.target.is_ipv4())
            });
            if let Some(source) = source {
                self.control_queue
                    .push_solicitation(&solicit, source.addr, &mut self.stats);
            }
        }
        self.flush(sink);
    }
}
