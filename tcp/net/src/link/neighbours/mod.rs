//! The neighbour table, with the Ethernet addresses of the neighbours on the link: one table for
//! ARP (RFC 826) and NDP (RFC 4861 section 7.3). Connections copy the address into their header
//! template; a new generation of the table makes them look it up again.

use core::net::{IpAddr, Ipv4Addr};
use std::collections::{BTreeSet, HashMap};

use crate::config::NeighbourConfig;
use crate::error::NetError;
use crate::ids::ConnId;
use crate::link::neighbour_quota::UnresolvedCounts;
use crate::quota_owner::QuotaOwner;
use crate::time::Instant;
use crate::time::to_nanos;
use crate::wire::frame::is_unicast_mac;

/// The state of an entry (RFC 4861 section 7.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeighbourState {
    /// Solicited, no answer yet.
    Incomplete,
    Reachable,
    /// Not confirmed for a long time: the next use triggers a probe.
    Stale,
    /// In use while it is probed.
    Probe,
}

/// The order in which entries are evicted when the table is full. Entries with waiting connections
/// are never evicted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionRank {
    Stale,
    InUse,
    Unresolved,
}

impl EvictionRank {
    const ALL: [EvictionRank; 3] = [
        EvictionRank::Stale,
        EvictionRank::InUse,
        EvictionRank::Unresolved,
    ];
}

impl NeighbourState {
    fn worth(self) -> EvictionRank {
        match self {
            NeighbourState::Stale => EvictionRank::Stale,
            NeighbourState::Reachable | NeighbourState::Probe => EvictionRank::InUse,
            NeighbourState::Incomplete => EvictionRank::Unresolved,
        }
    }
}

/// The entry of one neighbour.
struct NeighbourEntry {
    mac: [u8; 6],
    status: NeighbourState,
    /// The time of the next solicitation or of the state's expiry, in ns.
    at: u64,
    /// The time at which `mac` was last set or confirmed, in ns.
    updated: u64,
    /// Solicitations sent in this state.
    sent: u8,
    /// Only half-open passive connections wait for it, whose peers have not proved their addresses.
    unproven: bool,
    /// The owner whose connection first requested it; `None` once it is resolved.
    charged: Option<QuotaOwner>,
    /// Connections that wait for the answer, by slot and generation.
    waiters: BTreeSet<(u32, u32)>,
}

impl NeighbourEntry {
    /// Returns an entry with a known Ethernet address and without waiting connections.
    fn with_mac(mac: [u8; 6], status: NeighbourState, at: u64, now: Instant) -> NeighbourEntry {
        NeighbourEntry {
            mac,
            status,
            at,
            updated: now.0,
            sent: 0,
            unproven: false,
            charged: None,
            waiters: BTreeSet::new(),
        }
    }
}

/// The kind of a message by which a host claims an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    /// An ARP request or a neighbour solicitation to us: its sender may be stored as a new entry.
    Solicitation,
    /// An ARP reply to us.
    Reply,
    /// A neighbour advertisement with these flags (RFC 4861 section 4.4).
    Advertisement { is_solicited: bool, overrides: bool },
    /// Gratuitous ARP.
    Announcement,
    /// ARP between others (RFC 826): their broadcasts show where the sender is.
    Overheard,
}

impl ClaimKind {
    /// Returns whether the message can be the answer to a solicitation of ours.
    fn is_answer(self) -> bool {
        match self {
            ClaimKind::Reply => true,
            ClaimKind::Advertisement { is_solicited, .. } => is_solicited,
            ClaimKind::Solicitation | ClaimKind::Announcement | ClaimKind::Overheard => false,
        }
    }
}

/// The effect of a claim on connections.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClaimOutcome {
    /// Connections that waited for the entry.
    pub waiters: Vec<ConnId>,
    /// The neighbour has another Ethernet address than before, or is back: data that got no answer
    /// through it should be sent again.
    pub is_path_new: bool,
}

/// A solicitation to send; to the multicast or broadcast address if `to` is `None`.
pub(crate) struct Solicitation {
    /// The address whose Ethernet address is requested.
    pub target: IpAddr,
    /// The Ethernet address to which the solicitation is sent.
    pub to: Option<[u8; 6]>,
}

/// The result of a lookup.
pub enum NeighbourLookup {
    /// The Ethernet address.
    Found([u8; 6]),
    /// The neighbour is being solicited; the connection is returned when it answers.
    Wait,
    /// The table is full of unresolved entries, or the requesting owner has reached its limit.
    Full,
}

/// The neighbour table of one device.
pub struct Neighbours {
    entries: HashMap<IpAddr, NeighbourEntry>,
    /// All entries by rank and `at`, so that timers and evictions find theirs without a search.
    order: BTreeSet<(EvictionRank, u64, IpAddr)>,
    max_entries: usize,
    /// Time between solicitations, ns (RFC 4861 RetransTimer).
    retransmit: u64,
    /// Lifetime of a confirmation, ns (RFC 4861 ReachableTime).
    reachable: u64,
    /// Solicitations before a neighbour is considered unreachable.
    probes: u8,
    /// Starts at 1. A connection that remembers a different value looks its neighbour up again.
    pub generation: u32,
    /// A lower bound of the `at` of all entries.
    next_at: u64,
    /// Solicitations to send.
    pub(crate) solicits: Vec<Solicitation>,
    incomplete: usize,
    /// The incomplete entries for which only unproven peers wait.
    for_unproven: usize,
    unresolved: UnresolvedCounts,
}

/// Waiter that is no connection: its owner looks the neighbour up again.
pub const NO_CONNECTION: ConnId = ConnId {
    index: u32::MAX,
    generation: 0,
};
/// Maximum number of connections that wait for one entry; further ones look it up again by their
/// own timers.
const WAITERS_MAX: usize = 1 << 17;
/// The expiry of a permanent entry, in ns; sums with it do not overflow.
const FOR_EVER: u64 = u64::MAX / 4;
/// The lowest address in the order of `IpAddr`.
const LOWEST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

impl Neighbours {
    /// Returns an empty table.
    pub fn new(config: NeighbourConfig) -> Self {
        Neighbours {
            unresolved: UnresolvedCounts::new(&config),
            entries: HashMap::new(),
            order: BTreeSet::new(),
            max_entries: config.max_entries,
            retransmit: to_nanos(config.retransmit).max(1),
            reachable: to_nanos(config.reachable).max(1),
            probes: config.probes,
            generation: 1,
            next_at: u64::MAX,
            solicits: Vec::new(),
            incomplete: 0,
            for_unproven: 0,
        }
    }

    /// Makes connections look their neighbours up again.
    pub fn new_generation(&mut self) {
        self.generation = self.generation.wrapping_add(1).max(1);
    }

    fn add(&mut self, addr: IpAddr, entry: NeighbourEntry) {
        self.order.insert((entry.status.worth(), entry.at, addr));
        self.next_at = self.next_at.min(entry.at);
        self.incomplete += usize::from(entry.status == NeighbourState::Incomplete);
        self.for_unproven += usize::from(entry.unproven);
        if let Some(owner) = entry.charged {
            self.unresolved.add(owner);
        }
        self.entries.insert(addr, entry);
    }

    fn remove(&mut self, addr: IpAddr) -> Option<NeighbourEntry> {
        let entry = self.entries.remove(&addr)?;
        self.order.remove(&(entry.status.worth(), entry.at, addr));
        self.incomplete -= usize::from(entry.status == NeighbourState::Incomplete);
        self.for_unproven -= usize::from(entry.unproven);
        if let Some(owner) = entry.charged {
            self.unresolved.remove(owner);
        }
        Some(entry)
    }

    /// Sets the state of an entry until `at`.
    fn set_state(&mut self, addr: IpAddr, status: NeighbourState, at: u64, sent: u8) {
        let Some(entry) = self.entries.get_mut(&addr) else {
            return;
        };
        self.order.remove(&(entry.status.worth(), entry.at, addr));
        self.incomplete -= usize::from(entry.status == NeighbourState::Incomplete);
        (entry.status, entry.at, entry.sent) = (status, at, sent);
        if status != NeighbourState::Incomplete
            && let Some(owner) = entry.charged.take()
        {
            self.unresolved.remove(owner);
        }
        self.order.insert((status.worth(), at, addr));
        self.incomplete += usize::from(status == NeighbourState::Incomplete);
        self.next_at = self.next_at.min(at);
    }

    /// Clears `unproven`: a connection with a proven peer also waits, or the neighbour has
    /// answered.
    fn not_for_unproven(&mut self, addr: IpAddr) {
        if let Some(entry) = self.entries.get_mut(&addr) {
            self.for_unproven -= usize::from(core::mem::take(&mut entry.unproven));
        }
    }

    /// Probes whether the known Ethernet address still has `addr`.
    fn start_probe(&mut self, addr: IpAddr, mac: [u8; 6], now: Instant) {
        self.set_state(addr, NeighbourState::Probe, now.0 + self.retransmit, 1);
        self.solicits.push(Solicitation {
            target: addr,
            to: Some(mac),
        });
    }

    /// Returns how long a neighbour is solicited before it is considered unreachable, in ns.
    pub fn resolution_time(&self) -> u64 {
        self.retransmit
            .saturating_mul(u64::from(self.probes.max(1)))
    }

    /// Returns the Ethernet address of `addr`, for the connection `waiter`. `unproven`: the
    /// connection is half-open and its peer has not proved its address. A flood of SYNs from many
    /// addresses of the link can therefore occupy at most a quarter of the table, and evicts no
    /// entry in use (RFC 6583 section 6). `owner`: the owner that an unresolved entry is charged
    /// to.
    pub fn lookup(
        &mut self,
        addr: IpAddr,
        waiter: ConnId,
        unproven: bool,
        owner: Option<QuotaOwner>,
        now: Instant,
    ) -> NeighbourLookup {
        let waiter = (waiter.index, waiter.generation);
        if let Some(entry) = self.entries.get_mut(&addr) {
            let mac = entry.mac;
            match entry.status {
                NeighbourState::Reachable | NeighbourState::Probe => {}
                NeighbourState::Stale => self.start_probe(addr, mac, now),
                NeighbourState::Incomplete => {
                    if entry.waiters.len() < WAITERS_MAX {
                        entry.waiters.insert(waiter);
                    }
                    if !unproven {
                        self.not_for_unproven(addr);
                    }
                    return NeighbourLookup::Wait;
                }
            }
            return NeighbourLookup::Found(mac);
        }
        if (unproven && self.crowded()) || self.check_quota(addr, owner).is_err() {
            return NeighbourLookup::Full;
        }
        if self.entries.len() >= self.max_entries && !self.evict_one(unproven) {
            return NeighbourLookup::Full;
        }
        self.add(
            addr,
            NeighbourEntry {
                mac: [0; 6],
                status: NeighbourState::Incomplete,
                at: now.0 + self.retransmit,
                updated: 0,
                sent: 1,
                unproven,
                charged: owner,
                waiters: BTreeSet::from([waiter]),
            },
        );
        self.solicits.push(Solicitation {
            target: addr,
            to: None,
        });
        NeighbourLookup::Wait
    }

    /// Checks whether `owner` may request the resolution of `addr`.
    ///
    /// # Errors
    /// `addr` is not in the table, and the owner has reached its limit of unresolved entries.
    pub fn check_quota(&self, addr: IpAddr, owner: Option<QuotaOwner>) -> Result<(), NetError> {
        let exceeded = owner
            .filter(|_| !self.entries.contains_key(&addr))
            .and_then(|owner| self.unresolved.exceeded_by(owner));
        match exceeded {
            None => Ok(()),
            Some((scope, limit)) => Err(NetError::TooManyUnresolved { scope, limit }),
        }
    }

    /// Returns whether unproven peers occupy their share of the table.
    #[inline]
    pub fn crowded(&self) -> bool {
        self.for_unproven >= self.max_entries / 4
    }

    /// Evicts an entry without waiting connections, stale ones first; for an unproven peer only a
    /// stale one. Returns `false` if there is none.
    fn evict_one(&mut self, unproven: bool) -> bool {
        let Some(&(worth, _, addr)) = self.order.first() else {
            return false;
        };
        if worth == EvictionRank::Unresolved || (unproven && worth == EvictionRank::InUse) {
            return false;
        }
        self.remove(addr);
        self.new_generation();
        true
    }

    /// Processes the claim that `addr` is at `mac`. The sender of a solicitation is stored as stale if
    /// there is room (RFC 4861 section 7.2.3), without evicting other entries; no other claim creates
    /// an entry.
    ///
    /// An existing entry follows each claim to another Ethernet address (RFC 826; RFC 4861 sections
    /// 7.2.3 and 7.2.5) and is probed at its next use, with two exceptions. An advertisement without
    /// the override flag makes the entry stale. ARP has no such flag: of the replies of two hosts the
    /// first holds, and overheard ARP does not replace an entry that was just updated (`locktime` of
    /// arp(7)). Refusing other claims would protect nothing, because hosts announce their moves
    /// without being asked.
    pub fn process_claim(
        &mut self,
        addr: IpAddr,
        mac: [u8; 6],
        kind: ClaimKind,
        now: Instant,
    ) -> ClaimOutcome {
        if !is_unicast_mac(mac) {
            return ClaimOutcome::default();
        }
        let stale_until = now.0 + 10 * self.reachable;
        let Some(entry) = self.entries.get_mut(&addr) else {
            if kind == ClaimKind::Solicitation && self.entries.len() < self.max_entries {
                let entry = NeighbourEntry::with_mac(mac, NeighbourState::Stale, stale_until, now);
                self.add(addr, entry);
            }
            return ClaimOutcome::default();
        };
        let is_expected = matches!(
            entry.status,
            NeighbourState::Incomplete | NeighbourState::Probe
        );
        let (status, at) = match kind.is_answer() && is_expected {
            true => (NeighbourState::Reachable, now.0 + self.reachable),
            false => (NeighbourState::Stale, stale_until),
        };
        if entry.status == NeighbourState::Incomplete {
            (entry.mac, entry.updated) = (mac, now.0);
            let waiters = ids_of(core::mem::take(&mut entry.waiters));
            self.not_for_unproven(addr);
            self.set_state(addr, status, at, 0);
            self.new_generation();
            return ClaimOutcome {
                waiters,
                is_path_new: true,
            };
        }
        if entry.mac == mac {
            // An answer to a repeated probe, or an announcement: the neighbour was away.
            let mut is_path_new = kind == ClaimKind::Announcement;
            if status == NeighbourState::Reachable {
                is_path_new |= entry.sent > 1;
                entry.updated = now.0;
                self.set_state(addr, status, at, 0);
            }
            return ClaimOutcome {
                waiters: Vec::new(),
                is_path_new,
            };
        }
        let is_permanent = entry.at >= FOR_EVER;
        let is_locked = now.0 < entry.updated.saturating_add(self.retransmit);
        let is_followed = match kind {
            _ if is_permanent => false,
            ClaimKind::Solicitation | ClaimKind::Announcement => true,
            ClaimKind::Reply | ClaimKind::Overheard => !is_locked,
            ClaimKind::Advertisement { overrides, .. } => overrides,
        };
        if is_followed {
            (entry.mac, entry.updated) = (mac, now.0);
            self.set_state(addr, status, at, 0);
            self.new_generation();
        } else if matches!(kind, ClaimKind::Advertisement { .. })
            && entry.status == NeighbourState::Reachable
            && !is_permanent
        {
            // RFC 4861 section 7.2.5, I.
            self.set_state(addr, NeighbourState::Stale, stale_until, 0);
            self.new_generation();
        }
        ClaimOutcome {
            waiters: Vec::new(),
            is_path_new: is_followed,
        }
    }

    /// Stores an entry from another stack of this machine: `addr` is at `mac`, without expiry if it
    /// `is_permanent`.
    pub fn set_known(
        &mut self,
        addr: IpAddr,
        mac: [u8; 6],
        is_permanent: bool,
        now: Instant,
    ) -> ClaimOutcome {
        if !is_unicast_mac(mac) {
            return ClaimOutcome::default();
        }
        let at = match is_permanent {
            true => FOR_EVER,
            false => now.0 + self.reachable,
        };
        let mut is_path_new = true;
        let waiters = match self.entries.get_mut(&addr) {
            Some(entry) => {
                is_path_new = entry.mac != mac || entry.status == NeighbourState::Incomplete;
                (entry.mac, entry.updated) = (mac, now.0);
                let waiters = ids_of(core::mem::take(&mut entry.waiters));
                self.not_for_unproven(addr);
                self.set_state(addr, NeighbourState::Reachable, at, 0);
                waiters
            }
            None => {
                if self.entries.len() >= self.max_entries && !self.evict_one(false) {
                    return ClaimOutcome::default();
                }
                let entry = NeighbourEntry::with_mac(mac, NeighbourState::Reachable, at, now);
                self.add(addr, entry);
                Vec::new()
            }
        };
        self.new_generation();
        ClaimOutcome {
            waiters,
            is_path_new,
        }
    }

    /// Handles the removal of `addr` by the other stack: an entry that was permanent is confirmed
    /// again before its next use.
    pub fn forget_known(&mut self, addr: IpAddr, now: Instant) {
        let entry = self.entries.get(&addr);
        if entry.is_some_and(|entry| entry.at >= FOR_EVER) {
            let until = now.0 + 10 * self.reachable;
            self.set_state(addr, NeighbourState::Stale, until, 0);
            self.new_generation();
        }
    }

    /// Removes all resolved entries, permanent ones included.
    pub fn flush(&mut self) {
        let resolved = |entry: &NeighbourEntry| entry.status.worth() != EvictionRank::Unresolved;
        let entries = self.entries.iter();
        let resolved: Vec<IpAddr> = entries
            .filter(|(_, entry)| resolved(entry))
            .map(|(address, _)| *address)
            .collect();
        for address in resolved {
            self.remove(address);
        }
        self.new_generation();
    }

    /// Returns whether [`Self::poll`] has a timer to serve.
    #[inline]
    pub fn is_due(&self, now: Instant) -> bool {
        now.0 >= self.next_at
    }

    /// Serves the timers. Returns the connections whose neighbour did not answer.
    pub fn poll(&mut self, now: Instant) -> Vec<ConnId> {
        let mut failed = Vec::new();
        if !self.is_due(now) {
            return failed;
        }
        let mut changed = false;
        self.next_at = u64::MAX;
        for worth in EvictionRank::ALL {
            while let Some(&(w, at, addr)) = self.order.range((worth, 0, LOWEST_ADDRESS)..).next()
                && w == worth
            {
                if at > now.0 {
                    self.next_at = self.next_at.min(at);
                    break;
                }
                let Some(entry) = self.entries.get(&addr) else {
                    break;
                };
                let (status, sent, mac) = (entry.status, entry.sent, entry.mac);
                match status {
                    NeighbourState::Incomplete | NeighbourState::Probe if sent < self.probes => {
                        self.set_state(addr, status, now.0 + self.retransmit, sent + 1);
                        let to = (status != NeighbourState::Incomplete).then_some(mac);
                        self.solicits.push(Solicitation { target: addr, to });
                    }
                    NeighbourState::Reachable => {
                        self.set_state(
                            addr,
                            NeighbourState::Stale,
                            now.0 + 10 * self.reachable,
                            sent,
                        );
                        changed = true;
                    }
                    // In use, and no longer where it was: everybody on the link is asked at once.
                    NeighbourState::Probe => {
                        changed = true;
                        let at = now.0 + self.retransmit;
                        self.set_state(addr, NeighbourState::Incomplete, at, 1);
                        self.solicits.push(Solicitation {
                            target: addr,
                            to: None,
                        });
                    }
                    // Unanswered, or unused for a long time.
                    NeighbourState::Incomplete | NeighbourState::Stale => {
                        let gone = self.remove(addr);
                        failed.extend(gone.map(|entry| ids_of(entry.waiters)).unwrap_or_default());
                    }
                }
            }
        }
        if changed {
            self.new_generation();
        }
        failed
    }

    /// Returns the earliest time at which a timer is due. May be early.
    #[inline]
    pub fn next_deadline(&self) -> Option<Instant> {
        (self.next_at != u64::MAX).then_some(Instant(self.next_at))
    }

    /// Returns whether a neighbour is being solicited.
    pub fn is_resolving(&self) -> bool {
        self.incomplete > 0 || !self.solicits.is_empty()
    }
}

/// Converts a set of waiters to connection ids.
fn ids_of(waiters: BTreeSet<(u32, u32)>) -> Vec<ConnId> {
    let id = |(index, generation)| ConnId { index, generation };
    waiters.into_iter().map(id).collect()
}

#[cfg(test)]
mod tests;
