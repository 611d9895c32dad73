//! Who has which address on the link: one table for ARP (RFC 826) and NDP (RFC 4861 section 7.3).
//! Connections cache the answer in their template; a new generation makes them ask again.

use core::net::{IpAddr, Ipv4Addr};
use std::collections::{BTreeSet, HashMap};

use crate::base::ids::ConnId;
use crate::base::time::Instant;
use crate::base::time::nanos;
use crate::config::NeighbourConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NeighbourState {
    /// Solicited, no answer yet.
    Incomplete,
    Reachable,
    /// Not confirmed for long: the next use probes.
    Stale,
    /// Used while asking again.
    Probe,
    /// The same, since somebody else claims the address.
    Disputed,
}

/// Who gives way first when the table is full; those that are waited for never do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionRank {
    Unconfirmed,
    Believed,
    Awaited,
}

impl EvictionRank {
    const ALL: [EvictionRank; 3] = [
        EvictionRank::Unconfirmed,
        EvictionRank::Believed,
        EvictionRank::Awaited,
    ];
}

impl NeighbourState {
    fn worth(self) -> EvictionRank {
        match self {
            NeighbourState::Stale => EvictionRank::Unconfirmed,
            NeighbourState::Reachable | NeighbourState::Probe | NeighbourState::Disputed => {
                EvictionRank::Believed
            }
            NeighbourState::Incomplete => EvictionRank::Awaited,
        }
    }
}

struct NeighbourEntry {
    mac: [u8; 6],
    status: NeighbourState,
    /// Next solicitation or expiry, ns.
    at: u64,
    sent: u8,
    /// Only half-open connections of strangers wait.
    strangers: bool,
    /// Connections that wait for the answer, by slot and generation.
    waiters: BTreeSet<(u32, u32)>,
}

/// A solicitation to send: multicast/broadcast without a MAC.
pub(crate) struct Solicitation {
    pub target: IpAddr,
    pub to: Option<[u8; 6]>,
}

pub(crate) enum NeighbourLookup {
    Found([u8; 6]),
    Wait,
    /// The table is full of unresolved entries.
    Full,
}

pub(crate) struct Neighbours {
    entries: HashMap<IpAddr, NeighbourEntry>,
    /// Every entry by its worth and `at`: timers and evictions find theirs without a search.
    order: BTreeSet<(EvictionRank, u64, IpAddr)>,
    max_entries: usize,
    /// ns, both.
    retransmit: u64,
    reachable: u64,
    probes: u8,
    /// Starts at 1; connections whose own is another look up again.
    pub generation: u32,
    /// No `at` of any entry is earlier.
    next_at: u64,
    pub solicits: Vec<Solicitation>,
    incomplete: usize,
    /// Of those, the ones that only strangers want.
    for_strangers: usize,
}

/// Of one entry. Who comes later asks again with its own timer.
const WAITERS_MAX: usize = 1 << 17;
/// A disputed address is asked so many times as often, and as many times more: who floods a link
/// with claims makes it lose answers, too.
const DISPUTED: u8 = 4;
/// The first of all addresses, as they are ordered.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

impl Neighbours {
    pub(crate) fn new(config: NeighbourConfig) -> Self {
        Neighbours {
            entries: HashMap::new(),
            order: BTreeSet::new(),
            max_entries: config.max_entries,
            retransmit: nanos(config.retransmit).max(1),
            reachable: nanos(config.reachable).max(1),
            probes: config.probes,
            generation: 1,
            next_at: u64::MAX,
            solicits: Vec::new(),
            incomplete: 0,
            for_strangers: 0,
        }
    }

    fn bump(&mut self) {
        self.generation = self.generation.wrapping_add(1).max(1);
    }

    fn add(&mut self, addr: IpAddr, entry: NeighbourEntry) {
        self.order.insert((entry.status.worth(), entry.at, addr));
        self.next_at = self.next_at.min(entry.at);
        self.incomplete += usize::from(entry.status == NeighbourState::Incomplete);
        self.for_strangers += usize::from(entry.strangers);
        self.entries.insert(addr, entry);
    }

    fn remove(&mut self, addr: IpAddr) -> Option<NeighbourEntry> {
        let entry = self.entries.remove(&addr)?;
        self.order.remove(&(entry.status.worth(), entry.at, addr));
        self.incomplete -= usize::from(entry.status == NeighbourState::Incomplete);
        self.for_strangers -= usize::from(entry.strangers);
        Some(entry)
    }

    /// The entry has come to `status`, in which it stays until `at`.
    fn set(&mut self, addr: IpAddr, status: NeighbourState, at: u64, sent: u8) {
        let Some(entry) = self.entries.get_mut(&addr) else {
            return;
        };
        self.order.remove(&(entry.status.worth(), entry.at, addr));
        self.incomplete -= usize::from(entry.status == NeighbourState::Incomplete);
        (entry.status, entry.at, entry.sent) = (status, at, sent);
        self.order.insert((status.worth(), at, addr));
        self.incomplete += usize::from(status == NeighbourState::Incomplete);
        self.next_at = self.next_at.min(at);
    }

    /// Somebody we know waits too, or the answer is there.
    fn not_for_strangers(&mut self, addr: IpAddr) {
        if let Some(entry) = self.entries.get_mut(&addr) {
            self.for_strangers -= usize::from(core::mem::take(&mut entry.strangers));
        }
    }

    /// The known address is asked whether it still is there; `how` is one of the two states of
    /// asking.
    fn probe(&mut self, addr: IpAddr, mac: [u8; 6], how: NeighbourState, now: Instant) {
        self.set(addr, how, now.0 + self.pace(how).0, 1);
        self.solicits.push(Solicitation {
            target: addr,
            to: Some(mac),
        });
    }

    /// Time between questions, and their number.
    fn pace(&self, status: NeighbourState) -> (u64, u8) {
        match status {
            NeighbourState::Disputed => (
                self.retransmit / u64::from(DISPUTED),
                self.probes.saturating_mul(DISPUTED),
            ),
            _ => (self.retransmit, self.probes),
        }
    }

    /// Where `addr` is, for the connection `waiter`. A `stranger` claims an address and has not
    /// proved it: whoever floods us with SYNs of many neighbours occupies a quarter of the table
    /// and pushes nobody out (RFC 6583 section 6).
    pub(crate) fn lookup(
        &mut self,
        addr: IpAddr,
        waiter: ConnId,
        stranger: bool,
        now: Instant,
    ) -> NeighbourLookup {
        let waiter = (waiter.index, waiter.generation);
        if let Some(entry) = self.entries.get_mut(&addr) {
            let mac = entry.mac;
            match entry.status {
                NeighbourState::Reachable | NeighbourState::Probe | NeighbourState::Disputed => {}
                NeighbourState::Stale => self.probe(addr, mac, NeighbourState::Probe, now),
                NeighbourState::Incomplete => {
                    if entry.waiters.len() < WAITERS_MAX {
                        entry.waiters.insert(waiter);
                    }
                    if !stranger {
                        self.not_for_strangers(addr);
                    }
                    return NeighbourLookup::Wait;
                }
            }
            return NeighbourLookup::Found(mac);
        }
        if stranger && self.crowded() {
            return NeighbourLookup::Full;
        }
        if self.entries.len() >= self.max_entries && !self.evict(stranger) {
            return NeighbourLookup::Full;
        }
        self.add(
            addr,
            NeighbourEntry {
                mac: [0; 6],
                status: NeighbourState::Incomplete,
                at: now.0 + self.retransmit,
                sent: 1,
                strangers: stranger,
                waiters: BTreeSet::from([waiter]),
            },
        );
        self.solicits.push(Solicitation {
            target: addr,
            to: None,
        });
        NeighbourLookup::Wait
    }

    /// Strangers wait for all the neighbours that they may.
    pub(crate) fn crowded(&self) -> bool {
        self.for_strangers >= self.max_entries / 4
    }

    /// Makes room: any entry that nobody waits for, those not confirmed first, and those alone
    /// for a stranger.
    fn evict(&mut self, stranger: bool) -> bool {
        let Some(&(worth, _, addr)) = self.order.first() else {
            return false;
        };
        if worth == EvictionRank::Awaited || (stranger && worth == EvictionRank::Believed) {
            return false;
        }
        self.remove(addr);
        self.bump();
        true
    }

    /// `addr` is at `mac`, says an answer to our solicitation, or (`learn`) somebody who asks us.
    /// Who asks is remembered as unconfirmed while there is room (RFC 4861 section 7.2.3), and
    /// evicts nobody. A claim that contradicts what we know is not believed, since anybody can
    /// make it: the known address is probed, and forgotten only when it no longer answers. Just
    /// confirmed, it is not even that (as `locktime` of arp(7)).
    /// Returns the connections that waited.
    pub(crate) fn heard(
        &mut self,
        addr: IpAddr,
        mac: [u8; 6],
        learn: bool,
        now: Instant,
    ) -> Vec<ConnId> {
        if mac[0] & 1 != 0 || mac == [0; 6] {
            return Vec::new();
        }
        let (status, at) = if learn {
            (NeighbourState::Stale, now.0 + 10 * self.reachable)
        } else {
            (NeighbourState::Reachable, now.0 + self.reachable)
        };
        let Some(entry) = self.entries.get_mut(&addr) else {
            if learn && self.entries.len() < self.max_entries {
                let entry = NeighbourEntry {
                    mac,
                    status,
                    at,
                    sent: 0,
                    strangers: false,
                    waiters: BTreeSet::new(),
                };
                self.add(addr, entry);
            }
            return Vec::new();
        };
        if entry.status == NeighbourState::Incomplete {
            entry.mac = mac;
            let waiters = ids(core::mem::take(&mut entry.waiters));
            self.not_for_strangers(addr);
            self.set(addr, status, at, 0);
            self.bump();
            return waiters;
        }
        if entry.mac == mac {
            if !learn {
                self.set(addr, status, at, 0);
            }
            return Vec::new();
        }
        let doubtful = match entry.status {
            NeighbourState::Reachable => {
                entry.at.saturating_sub(self.reachable) + self.retransmit <= now.0
            }
            NeighbourState::Stale | NeighbourState::Probe => true,
            NeighbourState::Incomplete | NeighbourState::Disputed => false,
        };
        if doubtful {
            let known = entry.mac;
            self.probe(addr, known, NeighbourState::Disputed, now);
        }
        Vec::new()
    }

    /// A claim nobody asked for may refresh only an entry that is being asked about.
    pub(crate) fn asked(&self, addr: IpAddr) -> bool {
        self.entries.get(&addr).is_some_and(|entry| {
            !matches!(
                entry.status,
                NeighbourState::Reachable | NeighbourState::Stale
            )
        })
    }

    /// Timers. Returns the connections whose neighbour did not answer.
    pub(crate) fn poll(&mut self, now: Instant) -> Vec<ConnId> {
        let mut failed = Vec::new();
        if now.0 < self.next_at {
            return failed;
        }
        let mut changed = false;
        self.next_at = u64::MAX;
        for worth in EvictionRank::ALL {
            while let Some(&(w, at, addr)) = self.order.range((worth, 0, FIRST)..).next()
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
                let (pause, most) = self.pace(status);
                match status {
                    NeighbourState::Incomplete
                    | NeighbourState::Probe
                    | NeighbourState::Disputed
                        if sent < most =>
                    {
                        self.set(addr, status, now.0 + pause, sent + 1);
                        let to = (status != NeighbourState::Incomplete).then_some(mac);
                        self.solicits.push(Solicitation { target: addr, to });
                    }
                    NeighbourState::Reachable => {
                        self.set(
                            addr,
                            NeighbourState::Stale,
                            now.0 + 10 * self.reachable,
                            sent,
                        );
                        changed = true;
                    }
                    // No answer, or unused for long.
                    NeighbourState::Incomplete
                    | NeighbourState::Probe
                    | NeighbourState::Disputed
                    | NeighbourState::Stale => {
                        changed |=
                            matches!(status, NeighbourState::Probe | NeighbourState::Disputed);
                        let gone = self.remove(addr);
                        failed.extend(gone.map(|entry| ids(entry.waiters)).unwrap_or_default());
                    }
                }
            }
        }
        if changed {
            self.bump();
        }
        failed
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.next_at != u64::MAX).then_some(Instant(self.next_at))
    }

    pub(crate) fn resolving(&self) -> bool {
        self.incomplete > 0 || !self.solicits.is_empty()
    }
}

fn ids(waiters: BTreeSet<(u32, u32)>) -> Vec<ConnId> {
    let id = |(index, generation)| ConnId { index, generation };
    waiters.into_iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    const A: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2));

    fn conn(index: u32) -> ConnId {
        ConnId {
            index,
            generation: 0,
        }
    }

    fn table(max_entries: usize) -> Neighbours {
        Neighbours::new(NeighbourConfig {
            max_entries,
            ..NeighbourConfig::default()
        })
    }

    #[test]
    fn an_unanswered_solicitation_is_repeated_then_fails_its_waiters() {
        let mut table = table(8);
        let mut now = Instant(1);
        assert!(matches!(
            table.lookup(A, conn(7), false, now),
            NeighbourLookup::Wait
        ));
        assert!(matches!(
            table.lookup(A, conn(7), false, now),
            NeighbourLookup::Wait
        ));
        for _ in 0..2 {
            now = now + Duration::from_secs(1);
            assert!(table.poll(now).is_empty());
        }
        assert_eq!(table.solicits.len(), 3);
        now = now + Duration::from_secs(1);
        assert_eq!(table.poll(now), [conn(7)]);
        assert!(table.next_deadline().is_none());
    }

    #[test]
    fn an_old_answer_is_probed_while_it_is_used() {
        let mut table = table(8);
        table.lookup(A, conn(7), false, Instant(1));
        assert_eq!(table.heard(A, [2; 6], false, Instant(1)), [conn(7)]);
        let g = table.generation;
        table.poll(Instant(1) + Duration::from_secs(31));
        assert_ne!(table.generation, g, "connections ask again");
        table.solicits.clear();
        assert!(matches!(
            table.lookup(A, conn(7), false, Instant::from_millis(31_000)),
            NeighbourLookup::Found(_)
        ));
        assert_eq!(
            table.solicits[0].to,
            Some([2; 6]),
            "RFC 4861 section 7.3.3: a unicast probe"
        );
    }

    #[test]
    fn a_contradicting_claim_is_believed_only_when_the_old_address_is_silent() {
        let mut table = table(8);
        let mut now = Instant(1);
        table.lookup(A, conn(7), false, now);
        table.heard(A, [2; 6], false, now);
        table.solicits.clear();
        // Just confirmed: not worth a question.
        table.heard(A, [6; 6], true, now);
        assert!(table.solicits.is_empty());
        now = now + Duration::from_secs(2);
        for learn in [true, false, true] {
            table.heard(A, [6; 6], learn, now);
            assert!(
                matches!(table.lookup(A, conn(7), false, now), NeighbourLookup::Found(m) if m == [2; 6])
            );
        }
        assert_eq!(table.solicits.len(), 1, "one probe, however many claims");
        assert_eq!(table.solicits[0].to, Some([2; 6]));
        table.heard(A, [2; 6], false, now);
        assert!(table.entries[&A].status == NeighbourState::Reachable);
        // The same again, and nobody answers: twelve times within three seconds.
        now = now + Duration::from_secs(2);
        table.solicits.clear();
        table.heard(A, [6; 6], true, now);
        for _ in 0..12 {
            now = now + Duration::from_millis(250);
            table.poll(now);
        }
        assert_eq!(table.solicits.len(), 12);
        assert!(matches!(
            table.lookup(A, conn(7), false, now),
            NeighbourLookup::Wait
        ));
        assert_eq!(table.heard(A, [6; 6], false, now), [conn(7)]);
        assert!(
            matches!(table.lookup(A, conn(7), false, now), NeighbourLookup::Found(m) if m == [6; 6])
        );
    }

    #[test]
    fn strangers_who_ask_do_not_push_out_a_neighbour_in_use() {
        let mut table = table(8);
        table.lookup(A, conn(7), false, Instant(1));
        table.heard(A, [2; 6], false, Instant(1));
        for i in 0..1000u32 {
            table.heard(IpAddr::V4(i.into()), [3; 6], true, Instant(2));
        }
        assert!(matches!(
            table.lookup(A, conn(7), false, Instant(3)),
            NeighbourLookup::Found(_)
        ));
        // Neighbours of our own find room at the strangers' cost.
        for i in 0..7u32 {
            let addr = IpAddr::V4((i + 5000).into());
            assert!(matches!(
                table.lookup(addr, conn(1), false, Instant(3)),
                NeighbourLookup::Wait
            ));
            table.heard(addr, [4; 6], false, Instant(3));
        }
        assert!(matches!(
            table.lookup(A, conn(7), false, Instant(3)),
            NeighbourLookup::Found(_)
        ));
    }

    #[test]
    fn half_open_connections_of_strangers_leave_the_table_to_those_in_use() {
        let mut table = table(16);
        let near = |i: u32| IpAddr::V4((0x0a00_0000 + i).into());
        for i in 0..12 {
            table.lookup(near(i), conn(i), false, Instant(1));
            table.heard(near(i), [2; 6], false, Instant(1));
        }
        for i in 100..1000 {
            table.lookup(near(i), conn(i), true, Instant(2));
        }
        assert_eq!((table.entries.len(), table.for_strangers), (16, 4));
        for i in 0..12 {
            assert!(matches!(
                table.lookup(near(i), conn(i), false, Instant(3)),
                NeighbourLookup::Found(_)
            ));
        }
        // One whom we want to reach counts no more as the strangers'.
        assert!(matches!(
            table.lookup(near(100), conn(7), false, Instant(3)),
            NeighbourLookup::Wait
        ));
        assert_eq!(table.for_strangers, 3);
        assert_eq!(
            table.heard(near(100), [4; 6], false, Instant(3)),
            [7, 100].map(conn)
        );
        assert_eq!(
            table.heard(near(101), [4; 6], false, Instant(3)),
            [conn(101)]
        );
        let mut now = Instant(3);
        for _ in 0..4 {
            now = now + Duration::from_secs(1);
            table.poll(now);
        }
        assert_eq!((table.incomplete, table.for_strangers), (0, 0));
    }

    #[test]
    fn a_storm_of_strangers_cannot_grow_the_table() {
        let mut table = table(8);
        for i in 0..1000u32 {
            table.heard(IpAddr::V4(i.into()), [2; 6], true, Instant(1));
            assert!(table.entries.len() <= 8);
        }
        for i in 0..20u32 {
            table.lookup(IpAddr::V4((i + 5000).into()), conn(1), false, Instant(1));
        }
        assert!(table.entries.len() <= 8);
        assert!(matches!(
            table.lookup(A, conn(1), false, Instant(1)),
            NeighbourLookup::Full
        ));
        table.heard(A, [0xff; 6], true, Instant(1));
        assert!(
            !table.entries.contains_key(&A),
            "a multicast MAC is no neighbour's"
        );
    }
}
