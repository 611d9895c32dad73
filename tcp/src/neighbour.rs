//! Who has which address on the link: one table for ARP (RFC 826) and NDP (RFC 4861 section 7.3).
//! Connections cache the answer in their template; a new generation makes them ask again.

use core::net::IpAddr;
use std::collections::HashMap;

use crate::time::nanos;
use crate::{Instant, NeighbourConfig};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    /// Solicited, no answer yet.
    Incomplete,
    Reachable,
    /// Not confirmed for long: the next use probes.
    Stale,
    /// Used while asking again.
    Probe,
}

struct Entry {
    mac: [u8; 6],
    status: Status,
    /// Next solicitation or expiry, ns.
    at: u64,
    sent: u8,
    /// Only half-open connections of strangers wait.
    strangers: bool,
    /// Connections that wait for the answer.
    waiters: Vec<u32>,
}

/// A solicitation to send: multicast/broadcast without a MAC.
pub(crate) struct Solicit {
    pub target: IpAddr,
    pub to: Option<[u8; 6]>,
}

pub(crate) enum Lookup {
    Found([u8; 6]),
    Wait,
    /// The table is full of unresolved entries.
    Full,
}

pub(crate) struct Neighbours {
    entries: HashMap<IpAddr, Entry>,
    config: NeighbourConfig,
    /// Starts at 1; connections whose own is another look up again.
    pub generation: u32,
    /// Earliest `at` of all entries.
    next_at: u64,
    pub solicits: Vec<Solicit>,
    incomplete: usize,
    /// Of those, the ones that only strangers want.
    for_strangers: usize,
}

const WAITERS_MAX: usize = 65536;

impl Neighbours {
    pub(crate) fn new(config: NeighbourConfig) -> Self {
        Neighbours {
            entries: HashMap::new(),
            config,
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

    /// Where `addr` is, for the connection `waiter`. A `stranger` claims an address and has not
    /// proved it: whoever floods us with SYNs of many neighbours occupies a quarter of the table
    /// and pushes nobody out (RFC 6583 section 6).
    pub(crate) fn lookup(
        &mut self,
        addr: IpAddr,
        waiter: u32,
        stranger: bool,
        now: Instant,
    ) -> Lookup {
        let retransmit = nanos(self.config.retransmit);
        if let Some(e) = self.entries.get_mut(&addr) {
            match e.status {
                Status::Reachable | Status::Probe => return Lookup::Found(e.mac),
                Status::Stale => {
                    e.status = Status::Probe;
                    e.sent = 1;
                    e.at = now.0 + retransmit;
                    self.next_at = self.next_at.min(e.at);
                    self.solicits.push(Solicit {
                        target: addr,
                        to: Some(e.mac),
                    });
                    return Lookup::Found(e.mac);
                }
                Status::Incomplete => {
                    if e.strangers && !stranger {
                        e.strangers = false;
                        self.for_strangers -= 1;
                    }
                    if !e.waiters.contains(&waiter) && e.waiters.len() < WAITERS_MAX {
                        e.waiters.push(waiter);
                    }
                    return Lookup::Wait;
                }
            }
        }
        let full = self.entries.len() >= self.config.max_entries;
        if stranger && self.crowded() {
            return Lookup::Full;
        }
        if full && !self.evict(stranger) {
            return Lookup::Full;
        }
        self.for_strangers += usize::from(stranger);
        let at = now.0 + retransmit;
        self.next_at = self.next_at.min(at);
        self.incomplete += 1;
        self.entries.insert(
            addr,
            Entry {
                mac: [0; 6],
                status: Status::Incomplete,
                at,
                sent: 1,
                strangers: stranger,
                waiters: vec![waiter],
            },
        );
        self.solicits.push(Solicit {
            target: addr,
            to: None,
        });
        Lookup::Wait
    }

    /// Strangers wait for all the neighbours that they may.
    pub(crate) fn crowded(&self) -> bool {
        self.for_strangers >= self.config.max_entries / 4
    }

    /// Makes room: any entry that nobody waits for, those not confirmed first, and those alone
    /// for a stranger.
    fn evict(&mut self, stranger: bool) -> bool {
        let victim = self.entries.iter().filter(|(_, e)| match e.status {
            Status::Incomplete => false,
            Status::Stale => true,
            _ => !stranger,
        });
        let Some(addr) = victim
            .min_by_key(|(_, e)| (e.status != Status::Stale, e.at))
            .map(|(a, _)| *a)
        else {
            return false;
        };
        self.entries.remove(&addr);
        self.bump();
        true
    }

    /// `addr` is at `mac`, says an answer to our solicitation, or (`learn`) somebody who asks us.
    /// Who asks is remembered as unconfirmed while there is room (RFC 4861 section 7.2.3), and
    /// evicts nobody. A claim that contradicts what we know is not believed, since anybody can
    /// make it: the known address is probed, and forgotten only when it no longer answers.
    /// Returns the connections that waited.
    pub(crate) fn heard(
        &mut self,
        addr: IpAddr,
        mac: [u8; 6],
        learn: bool,
        now: Instant,
    ) -> Vec<u32> {
        if mac[0] & 1 != 0 || mac == [0; 6] {
            return Vec::new();
        }
        let (retransmit, reachable) = (nanos(self.config.retransmit), nanos(self.config.reachable));
        let (status, at) = if learn {
            (Status::Stale, now.0 + 10 * reachable)
        } else {
            (Status::Reachable, now.0 + reachable)
        };
        let room = self.entries.len() < self.config.max_entries;
        let Some(e) = self.entries.get_mut(&addr) else {
            if learn && room {
                self.next_at = self.next_at.min(at);
                let e = Entry {
                    mac,
                    status,
                    at,
                    sent: 0,
                    strangers: false,
                    waiters: Vec::new(),
                };
                self.entries.insert(addr, e);
            }
            return Vec::new();
        };
        if e.status == Status::Incomplete {
            self.incomplete -= 1;
            self.for_strangers -= usize::from(core::mem::take(&mut e.strangers));
            e.mac = mac;
            let waiters = core::mem::take(&mut e.waiters);
            (e.status, e.at, e.sent) = (status, at, 0);
            self.next_at = self.next_at.min(at);
            self.bump();
            return waiters;
        }
        if e.mac == mac {
            if !learn {
                (e.status, e.at, e.sent) = (status, at, 0);
                self.next_at = self.next_at.min(at);
            }
        } else if e.status != Status::Probe {
            (e.status, e.at, e.sent) = (Status::Probe, now.0 + retransmit, 1);
            self.next_at = self.next_at.min(e.at);
            self.solicits.push(Solicit {
                target: addr,
                to: Some(e.mac),
            });
        }
        Vec::new()
    }

    /// A claim nobody asked for may refresh only an entry that is being asked about.
    pub(crate) fn asked(&self, addr: IpAddr) -> bool {
        self.entries
            .get(&addr)
            .is_some_and(|e| matches!(e.status, Status::Incomplete | Status::Probe))
    }

    /// Timers. Returns the connections whose neighbour did not answer.
    pub(crate) fn poll(&mut self, now: Instant) -> Vec<u32> {
        let mut failed = Vec::new();
        if now.0 < self.next_at {
            return failed;
        }
        let mut gone = false;
        let mut stale = false;
        let mut next = u64::MAX;
        let (retransmit, reachable) = (nanos(self.config.retransmit), nanos(self.config.reachable));
        let (probes, solicits, incomplete, for_strangers) = (
            self.config.probes,
            &mut self.solicits,
            &mut self.incomplete,
            &mut self.for_strangers,
        );
        self.entries.retain(|addr, e| {
            if now.0 >= e.at {
                match e.status {
                    Status::Incomplete | Status::Probe if e.sent < probes => {
                        e.sent += 1;
                        e.at = now.0 + retransmit;
                        let to = (e.status == Status::Probe).then_some(e.mac);
                        solicits.push(Solicit { target: *addr, to });
                    }
                    Status::Incomplete => {
                        failed.append(&mut e.waiters);
                        *incomplete -= 1;
                        *for_strangers -= usize::from(e.strangers);
                        return false;
                    }
                    Status::Probe => {
                        gone = true;
                        return false;
                    }
                    Status::Reachable => {
                        e.status = Status::Stale;
                        e.at = now.0 + 10 * reachable;
                        stale = true;
                    }
                    // Unused for long.
                    Status::Stale => return false,
                }
            }
            next = next.min(e.at);
            true
        });
        self.next_at = next;
        if gone || stale {
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

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    const A: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2));

    fn table(max_entries: usize) -> Neighbours {
        Neighbours::new(NeighbourConfig {
            max_entries,
            ..NeighbourConfig::default()
        })
    }

    #[test]
    fn an_unanswered_solicitation_is_repeated_then_fails_its_waiters() {
        let mut n = table(8);
        let mut now = Instant(1);
        assert!(matches!(n.lookup(A, 7, false, now), Lookup::Wait));
        assert!(matches!(n.lookup(A, 7, false, now), Lookup::Wait));
        for _ in 0..2 {
            now = now + Duration::from_secs(1);
            assert!(n.poll(now).is_empty());
        }
        assert_eq!(n.solicits.len(), 3);
        now = now + Duration::from_secs(1);
        assert_eq!(n.poll(now), [7]);
        assert!(n.next_deadline().is_none());
    }

    #[test]
    fn an_old_answer_is_probed_while_it_is_used() {
        let mut n = table(8);
        n.lookup(A, 7, false, Instant(1));
        assert_eq!(n.heard(A, [2; 6], false, Instant(1)), [7]);
        let g = n.generation;
        n.poll(Instant(1) + Duration::from_secs(31));
        assert_ne!(n.generation, g, "connections ask again");
        n.solicits.clear();
        assert!(matches!(
            n.lookup(A, 7, false, Instant::from_millis(31_000)),
            Lookup::Found(_)
        ));
        assert_eq!(
            n.solicits[0].to,
            Some([2; 6]),
            "RFC 4861 section 7.3.3: a unicast probe"
        );
    }

    #[test]
    fn a_contradicting_claim_is_believed_only_when_the_old_address_is_silent() {
        let mut n = table(8);
        let mut now = Instant(1);
        n.lookup(A, 7, false, now);
        n.heard(A, [2; 6], false, now);
        n.solicits.clear();
        for learn in [true, false, true] {
            n.heard(A, [6; 6], learn, now);
            assert!(matches!(n.lookup(A, 7, false, now), Lookup::Found(m) if m == [2; 6]));
        }
        assert_eq!(n.solicits.len(), 1, "one probe, however many claims");
        assert_eq!(n.solicits[0].to, Some([2; 6]));
        n.heard(A, [2; 6], false, now);
        assert!(n.entries[&A].status == Status::Reachable);
        // The same again, and nobody answers.
        n.heard(A, [6; 6], true, now);
        for _ in 0..3 {
            now = now + Duration::from_secs(1);
            n.poll(now);
        }
        assert!(matches!(n.lookup(A, 7, false, now), Lookup::Wait));
        assert_eq!(n.heard(A, [6; 6], false, now), [7]);
        assert!(matches!(n.lookup(A, 7, false, now), Lookup::Found(m) if m == [6; 6]));
    }

    #[test]
    fn strangers_who_ask_do_not_push_out_a_neighbour_in_use() {
        let mut n = table(8);
        n.lookup(A, 7, false, Instant(1));
        n.heard(A, [2; 6], false, Instant(1));
        for i in 0..1000u32 {
            n.heard(IpAddr::V4(i.into()), [3; 6], true, Instant(2));
        }
        assert!(matches!(
            n.lookup(A, 7, false, Instant(3)),
            Lookup::Found(_)
        ));
        // Neighbours of our own find room at the strangers' cost.
        for i in 0..7u32 {
            let addr = IpAddr::V4((i + 5000).into());
            assert!(matches!(n.lookup(addr, 1, false, Instant(3)), Lookup::Wait));
            n.heard(addr, [4; 6], false, Instant(3));
        }
        assert!(matches!(
            n.lookup(A, 7, false, Instant(3)),
            Lookup::Found(_)
        ));
    }

    #[test]
    fn half_open_connections_of_strangers_leave_the_table_to_those_in_use() {
        let mut n = table(16);
        let near = |i: u32| IpAddr::V4((0x0a00_0000 + i).into());
        for i in 0..12 {
            n.lookup(near(i), i, false, Instant(1));
            n.heard(near(i), [2; 6], false, Instant(1));
        }
        for i in 100..1000 {
            n.lookup(near(i), i, true, Instant(2));
        }
        assert_eq!((n.entries.len(), n.for_strangers), (16, 4));
        for i in 0..12 {
            assert!(matches!(
                n.lookup(near(i), i, false, Instant(3)),
                Lookup::Found(_)
            ));
        }
        // One whom we want to reach counts no more as the strangers'.
        assert!(matches!(
            n.lookup(near(100), 7, false, Instant(3)),
            Lookup::Wait
        ));
        assert_eq!(n.for_strangers, 3);
        assert_eq!(n.heard(near(100), [4; 6], false, Instant(3)), [100, 7]);
        assert_eq!(n.heard(near(101), [4; 6], false, Instant(3)), [101]);
        let mut now = Instant(3);
        for _ in 0..4 {
            now = now + Duration::from_secs(1);
            n.poll(now);
        }
        assert_eq!((n.incomplete, n.for_strangers), (0, 0));
    }

    #[test]
    fn a_storm_of_strangers_cannot_grow_the_table() {
        let mut n = table(8);
        for i in 0..1000u32 {
            n.heard(IpAddr::V4(i.into()), [2; 6], true, Instant(1));
            assert!(n.entries.len() <= 8);
        }
        for i in 0..20u32 {
            n.lookup(IpAddr::V4((i + 5000).into()), 1, false, Instant(1));
        }
        assert!(n.entries.len() <= 8);
        assert!(matches!(n.lookup(A, 1, false, Instant(1)), Lookup::Full));
        n.heard(A, [0xff; 6], true, Instant(1));
        assert!(
            !n.entries.contains_key(&A),
            "a multicast MAC is no neighbour's"
        );
    }
}
