//! Detection of another host on the link that has one of our addresses: by probes after the start, and
//! by every later message that claims an address of ours (RFC 5227 sections 2.1.1 and 2.4, RFC 4862
//! section 5.4).
//!
//! The addresses are configured, so we keep them and defend them (RFC 5227 section 2.4 (c)). Each
//! conflict is reported, because neither host works reliably.

use core::net::IpAddr;

use crate::time::Instant;

/// PROBE_NUM and PROBE_MIN of RFC 5227 section 1.1. Repetitions find hosts behind a link that comes up
/// late.
const PROBES: u8 = 3;
const PROBE_INTERVAL: u64 = 1_000_000_000;
/// DEFEND_INTERVAL of RFC 5227 section 1.1: shortest time between two defences of an address, and
/// between two reports.
const DEFEND_INTERVAL: u64 = 10_000_000_000;

/// Another host claims an address of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressConflict {
    /// Our address.
    pub address: IpAddr,
    /// The host's Ethernet address.
    pub mac: [u8; 6],
}

/// Pending probes and reports.
pub(crate) struct AddressConflicts {
    probes_left: u8,
    /// Time of the next probe in ns; `u64::MAX` after the last one.
    next_probe: u64,
    /// Addresses in conflict, with the time of the last report.
    reported: Vec<(IpAddr, u64)>,
    unread: Vec<AddressConflict>,
}

impl AddressConflicts {
    /// `probe`: our addresses are probed from `now` on.
    pub(crate) fn new(probe: bool, now: Instant) -> Self {
        AddressConflicts {
            probes_left: if probe { PROBES } else { 0 },
            next_probe: if probe { now.0 } else { u64::MAX },
            reported: Vec::new(),
            unread: Vec::new(),
        }
    }

    /// Returns whether probes are due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.0 >= self.next_probe
    }

    /// Returns the time of the next probe.
    #[inline]
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.next_probe != u64::MAX).then_some(Instant(self.next_probe))
    }

    /// Takes a due probe.
    pub(crate) fn take_probe(&mut self, now: Instant) {
        self.probes_left = self.probes_left.saturating_sub(1);
        self.next_probe = match self.probes_left {
            0 => u64::MAX,
            _ => now.0 + PROBE_INTERVAL,
        };
    }

    /// Records a conflict about one of our addresses. Returns true if it is to be defended.
    pub(crate) fn record(&mut self, conflict: AddressConflict, now: Instant) -> bool {
        let known = self
            .reported
            .iter_mut()
            .find(|(address, _)| *address == conflict.address);
        match known {
            Some((_, at)) if now.0 < *at + DEFEND_INTERVAL => return false,
            Some((_, at)) => *at = now.0,
            None => self.reported.push((conflict.address, now.0)),
        }
        self.unread.retain(|old| old.address != conflict.address);
        self.unread.push(conflict);
        true
    }

    /// Takes a conflict that has not been reported yet.
    #[inline]
    pub(crate) fn take_report(&mut self) -> Option<AddressConflict> {
        self.unread.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conflict_is_reported_once_per_interval_and_address() {
        let mut conflicts = AddressConflicts::new(false, Instant(0));
        let conflict = |last| AddressConflict {
            address: IpAddr::from([10, 0, 0, last]),
            mac: [2, 0, 0, 0, 0, last],
        };
        assert!(conflicts.record(conflict(1), Instant(5)));
        assert!(!conflicts.record(conflict(1), Instant(6)));
        assert!(conflicts.record(conflict(2), Instant(7)));
        assert_eq!(conflicts.take_report(), Some(conflict(2)));
        assert_eq!(conflicts.take_report(), Some(conflict(1)));
        assert_eq!(conflicts.take_report(), None);
        assert!(conflicts.record(conflict(1), Instant(5 + DEFEND_INTERVAL)));
    }

    #[test]
    fn addresses_are_probed_three_times() {
        let mut conflicts = AddressConflicts::new(true, Instant(9));
        for probe in 0..u64::from(PROBES) {
            let at = Instant(9 + probe * PROBE_INTERVAL);
            assert_eq!(conflicts.next_deadline(), Some(at));
            assert!(conflicts.is_due(at));
            conflicts.take_probe(at);
        }
        assert_eq!(conflicts.next_deadline(), None);
        assert!(!AddressConflicts::new(false, Instant(0)).is_due(Instant(0)));
    }
}
