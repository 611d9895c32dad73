//! The search for the largest packet that a path carries (RFC 8899 section 5.2, RFC 4821 section
//! 7): sizes, counts and times, with one state for each destination. Knows nothing of segments;
//! `probe` sends the probes, and `path_mtu` detects that a path became narrow. Times are ticks of
//! 2^20 ns that do not wrap, because a path may be unused for months.
//!
//! ```text
//!  black hole -> Base ---- resegmented data is acknowledged --> Searching <----------+
//!                  | black hole again                           ^     | nothing left |
//!                  v                                            |     v  to try      |
//!                Error --- resegmented data is acknowledged ----+   Complete --------+
//!                                 Packet Too Big: its size -----------^   600 s
//! ```

use core::net::IpAddr;
use std::collections::HashMap;

use crate::base::ids::ConnId;
use crate::base::sequence::SeqNr;

/// MAX_PROBES (RFC 8899 section 5.1.2).
const MAX_PROBES: u8 = 3;
/// PMTU_RAISE_TIMER (section 5.1.1), in 2^20 ns; RFC 1191 section 6.3 has the same ten minutes.
pub(crate) const RAISE_TICKS: u64 = 600 * 954;
/// Lifetime for new connections of the result of a search that no connection continues.
const UNFINISHED_TICKS: u64 = 60 * 954;
/// A connection that was chosen to probe but does not, or whose answer is lost, is replaced after
/// this time.
const TURN_TICKS: u64 = 64;
/// Packet sizes of links and tunnels in use, which are tried first (RFC 4821 section 7.3 recommends
/// this table); between two of them the search bisects.
const COMMON_SIZES: [u16; 15] = [
    1006, 1280, 1380, 1400, 1420, 1450, 1480, 1492, 1500, 2002, 4352, 8166, 8950, 8982, 9000,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchState {
    /// BASE_PLPMTU is being confirmed.
    Base,
    Searching,
    Complete,
    /// Even BASE_PLPMTU does not pass: the minimum size of the address family is used.
    Error,
}

/// The turn of the single connection that probes on behalf of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbeTurn {
    pub who: ConnId,
    /// Its probe in flight: the sequence number of its end, and its packet size. `None`: the owner
    /// was asked for a longer record.
    pub probe: Option<(SeqNr, u16)>,
    /// The time from which another connection may take over.
    until: u64,
    /// The time at which the owner was last asked.
    asked: u64,
}

/// The next action on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SearchStep {
    /// Send a probe of this packet size.
    Probe(u16),
    /// Nothing to do before this tick.
    At(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PathSearch {
    /// PLPMTU: the largest packet size that is confirmed, reported by a router, or assumed to pass.
    pub plpmtu: u16,
    pub state: SearchState,
    /// PROBE_COUNT: consecutive lost probes of at least `probed` bytes.
    count: u8,
    /// A router reported `too_long - 1` as the MTU.
    named_by_router: bool,
    /// The smallest size known not to pass; u16::MAX: none.
    too_long: u16,
    /// PROBED_SIZE.
    probed: u16,
    /// No probe is sent before this tick; in [`SearchState::Complete`] the end of the PMTU_RAISE_TIMER.
    at: u64,
    /// Until this tick new connections start with `plpmtu`.
    pub until: u64,
    pub turn: Option<ProbeTurn>,
}

impl PathSearch {
    /// Returns a search upward from a size that is in use.
    pub(crate) fn starting_at(plpmtu: u16, now: u64) -> Self {
        PathSearch {
            plpmtu,
            state: SearchState::Searching,
            count: 0,
            named_by_router: false,
            too_long: u16::MAX,
            probed: 0,
            at: now,
            until: now + UNFINISHED_TICKS,
            turn: None,
        }
    }

    /// Returns the search after a router reported the path MTU: no probes in the next ten minutes.
    pub(crate) fn from_router_mtu(mtu: u16, now: u64) -> Self {
        let mut search = PathSearch::starting_at(mtu, now);
        (search.too_long, search.named_by_router) = (mtu.saturating_add(1), true);
        search.end_search(now);
        search
    }

    /// Returns the search after a black hole for longer packets was detected: `base` is confirmed
    /// once `who` receives the ACK of `end`. `least`: `base` is the minimum size of the address
    /// family.
    pub(crate) fn from_black_hole(
        base: u16,
        least: bool,
        (who, end): (ConnId, SeqNr),
        now: u64,
    ) -> Self {
        let mut search = PathSearch::starting_at(base, now);
        search.state = if least {
            SearchState::Error
        } else {
            SearchState::Base
        };
        search.probe_sent(who, end, base, TURN_TICKS, now);
        search
    }

    fn end_search(&mut self, now: u64) {
        self.state = SearchState::Complete;
        self.at = now + RAISE_TICKS;
        self.until = self.at;
        self.turn = None;
    }

    /// Returns the difference in bytes below which the search ends.
    pub(crate) fn granularity(&self) -> u16 {
        (self.plpmtu / 256).max(8)
    }

    /// Returns the size to probe next, at most `max`.
    fn next_size(&self, max: u16) -> Option<u16> {
        let (low, high) = (self.plpmtu, max.min(self.too_long - 1));
        if high <= low {
            return None;
        }
        // The full size first: most paths are narrow only for a while. Or the size that a router
        // reported.
        if self.named_by_router || self.too_long > max {
            return Some(high);
        }
        if high - low < self.granularity() {
            return None;
        }
        let first = COMMON_SIZES.partition_point(|&common| common <= low);
        let end = COMMON_SIZES.partition_point(|&common| common <= high);
        Some(if first < end {
            COMMON_SIZES[(first + end) / 2]
        } else {
            low + (high - low).div_ceil(2)
        })
    }

    /// Returns the next action. `max`: MAX_PLPMTU of the calling connection.
    pub(crate) fn next_step(&mut self, max: u16, now: u64) -> SearchStep {
        if self.state == SearchState::Complete && now >= self.at {
            // PMTU_RAISE_TIMER expired: sizes that did not pass may pass now.
            *self = PathSearch::starting_at(self.plpmtu, now);
        }
        if now < self.at {
            return SearchStep::At(self.at);
        }
        match self.next_size(max) {
            Some(size) => SearchStep::Probe(size),
            None => {
                self.end_search(now);
                SearchStep::At(self.at)
            }
        }
    }

    /// Returns whether another connection is probing.
    pub(crate) fn is_taken_by_other(&self, me: ConnId, now: u64) -> bool {
        self.turn
            .is_some_and(|turn| turn.who != me && now < turn.until)
    }

    pub(crate) fn is_asked(&self, me: ConnId) -> bool {
        self.turn
            .is_some_and(|turn| turn.who == me && turn.probe.is_none())
    }

    /// Returns when the owner was last asked for a record.
    pub(crate) fn asked_at(&self) -> Option<u64> {
        self.turn
            .filter(|turn| turn.probe.is_none())
            .map(|turn| turn.asked)
    }

    /// Returns whether packets up to `max` are known to pass, and no size is known not to pass.
    pub(crate) fn is_whole(&self, max: u16) -> bool {
        self.plpmtu >= max && self.too_long == u16::MAX
    }

    /// Records that the owner of `who` is to be asked for a longer record. `Some(false)`: it was
    /// already asked in this tick. `None`: it has been asked for long enough.
    pub(crate) fn ask_owner(&mut self, who: ConnId, now: u64) -> Option<bool> {
        match &mut self.turn {
            // Only if it has kept asking since.
            Some(turn)
                if turn.who == who
                    && turn.probe.is_none()
                    && now.saturating_sub(turn.asked) < TURN_TICKS =>
            {
                if now >= turn.until {
                    self.turn = None;
                    return None;
                }
                Some(core::mem::replace(&mut turn.asked, now) != now)
            }
            turn => {
                *turn = Some(ProbeTurn {
                    who,
                    probe: None,
                    until: now + TURN_TICKS,
                    asked: now,
                });
                Some(true)
            }
        }
    }

    /// Records that a probe of `size` bytes that ends at `end` was sent; its answer may take
    /// `max_wait` ticks.
    pub(crate) fn probe_sent(
        &mut self,
        who: ConnId,
        end: SeqNr,
        size: u16,
        max_wait: u64,
        now: u64,
    ) {
        if self.count == 0 || size < self.probed {
            (self.probed, self.count) = (size, 0);
        }
        self.turn = Some(ProbeTurn {
            who,
            probe: Some((end, size)),
            until: now + max_wait.max(TURN_TICKS),
            asked: now,
        });
    }

    /// Returns the end and the size of `who`'s probe in flight.
    pub(crate) fn probe_of(&self, who: ConnId) -> Option<(SeqNr, u16)> {
        self.turn.filter(|turn| turn.who == who)?.probe
    }

    /// Records that the probe in flight was acknowledged.
    pub(crate) fn probe_confirmed(&mut self, size: u16, now: u64) {
        self.turn = None;
        self.count = 0;
        self.state = SearchState::Searching;
        self.at = now;
        self.until = now + UNFINISHED_TICKS;
        self.plpmtu = self.plpmtu.max(size);
        if size >= self.too_long {
            (self.too_long, self.named_by_router) = (u16::MAX, false);
        }
    }

    /// Records that the probe in flight, and no other segment, was lost (RFC 4821 section 7.6.2).
    /// The next may follow in `gap` ticks.
    pub(crate) fn probe_lost(&mut self, gap: u64, now: u64) {
        self.probe_inconclusive(gap, now);
        self.count += 1;
        if self.count == MAX_PROBES {
            self.count = 0;
            (self.too_long, self.named_by_router) = (self.probed, false);
        }
    }

    /// Ends the probe in flight without a result: it was lost together with other segments, or its
    /// fate is unknown (RFC 4821 sections 7.6.3, 7.6.4).
    pub(crate) fn probe_inconclusive(&mut self, gap: u64, now: u64) {
        self.turn = None;
        self.at = now + gap;
    }

    /// Records a router's report that the probe was longer than `mtu` (RFC 8899 section 4.6.2).
    pub(crate) fn limited_by_router(&mut self, mtu: u16, now: u64) {
        self.turn = None;
        self.count = 0;
        (self.too_long, self.named_by_router) = (mtu + 1, true);
        self.at = now;
    }
}

/// Maximum number of paths.
const PATHS_MAX: usize = 4096;

/// The state of paths that are narrower than agreed, by destination (RFC 8899 section 3 item 9).
#[derive(Default)]
pub(crate) struct Paths(pub(super) HashMap<IpAddr, PathSearch>);

impl Paths {
    pub(crate) fn learn(&mut self, to: IpAddr, search: PathSearch, now_ticks: u64) {
        if self.room_for(to, now_ticks) {
            self.0.insert(to, search);
        }
    }

    /// Returns whether an entry for `to` exists or can be added; removes expired ones if needed.
    fn room_for(&mut self, to: IpAddr, now_ticks: u64) -> bool {
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&to) {
            self.0.retain(|_, search| now_ticks < search.until);
        }
        self.0.len() < PATHS_MAX || self.0.contains_key(&to)
    }

    pub(crate) fn get(&self, to: IpAddr) -> Option<&PathSearch> {
        self.0.get(&to)
    }

    pub(crate) fn get_mut(&mut self, to: IpAddr) -> Option<&mut PathSearch> {
        self.0.get_mut(&to)
    }

    /// Returns the search on the path to `to`; if there is none, creates one that starts at `own`,
    /// the packet size in use. `None`: there are too many paths.
    pub(crate) fn search(
        &mut self,
        to: IpAddr,
        own: u16,
        now_ticks: u64,
    ) -> Option<&mut PathSearch> {
        if !self.room_for(to, now_ticks) {
            return None;
        }
        Some(
            self.0
                .entry(to)
                .or_insert_with(|| PathSearch::starting_at(own, now_ticks)),
        )
    }

    pub(crate) fn forget(&mut self, to: IpAddr) {
        self.0.remove(&to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: ConnId = ConnId {
        index: 0,
        generation: 0,
    };

    /// Searches a path that carries `mtu`; returns the result and the sizes of the probes.
    fn run(mut search: PathSearch, max: u16, mtu: u16, says: bool) -> (u16, Vec<u16>) {
        let (mut now, mut probes) = (0, vec![]);
        loop {
            match search.next_step(max, now) {
                SearchStep::Probe(size) => {
                    assert!(size > search.plpmtu && size <= max);
                    probes.push(size);
                    search.probe_sent(ME, SeqNr(1), size, 0, now);
                    if size <= mtu {
                        search.probe_confirmed(size, now);
                    } else if says {
                        search.limited_by_router(mtu, now);
                    } else {
                        search.probe_lost(1, now);
                    }
                }
                SearchStep::At(_) if search.state == SearchState::Complete => {
                    return (search.plpmtu, probes);
                }
                SearchStep::At(at) => now = at,
            }
            assert!(probes.len() < 60, "{probes:?}");
        }
    }

    #[test]
    fn every_path_mtu_is_found_to_within_the_step() {
        for max in [1500, 9000] {
            for mtu in 576..=max {
                let (found, probes) = run(PathSearch::starting_at(576, 0), max, mtu, false);
                assert!(found <= mtu, "{found} of {mtu}");
                assert!(mtu - found < (found / 256).max(8), "{found} of {mtu}");
                assert!(!COMMON_SIZES.contains(&mtu) || found == mtu);
                // Each size is probed three times, and no size is probed whose result is known.
                let lost = probes.iter().filter(|&&probe| probe > mtu);
                for &probe in lost {
                    assert_eq!(probes.iter().filter(|&&queue| queue == probe).count(), 3);
                }
            }
        }
    }

    #[test]
    fn a_restored_path_takes_one_probe_or_two_with_icmp() {
        assert_eq!(
            run(PathSearch::starting_at(1200, 0), 9000, 9000, false).1,
            [9000],
            "no jump without a probe"
        );
        let (found, probes) = run(PathSearch::starting_at(1200, 0), 9000, 1437, true);
        assert_eq!((found, &probes[..]), (1437, &[9000, 1437][..]));
        // The size that the router reported does not pass either.
        let mut search = PathSearch::starting_at(1200, 0);
        search.limited_by_router(1450, 0);
        let (found, probes) = run(search, 1500, 1400, false);
        assert_eq!((found, &probes[..3]), (1400, &[1450; 3][..]));
    }

    #[test]
    fn a_search_is_repeated_after_ten_minutes_rfc_8899() {
        let mut info = PathSearch::from_router_mtu(1400, 5);
        assert_eq!(info.next_step(1500, 6), SearchStep::At(5 + RAISE_TICKS));
        assert_eq!(
            info.next_step(1500, 4 + RAISE_TICKS),
            SearchStep::At(5 + RAISE_TICKS)
        );
        assert_eq!(
            info.next_step(1500, 5 + RAISE_TICKS),
            SearchStep::Probe(1500)
        );
        assert_eq!((info.state, info.plpmtu), (SearchState::Searching, 1400));
    }

    #[test]
    fn deadlines_hold_however_long_a_path_is_not_used() {
        const DAY: u64 = 86_400 * 954;
        let other = ConnId {
            index: 7,
            generation: 1,
        };
        for days in [20, 30, 60, 400] {
            let mut search = PathSearch::from_router_mtu(1400, 5);
            assert_eq!(search.next_step(1500, days * DAY), SearchStep::Probe(1500));
            search.probe_sent(ME, SeqNr(1), 1500, 0, 6);
            assert!(search.is_taken_by_other(other, 6));
            assert!(!search.is_taken_by_other(other, days * DAY));
        }
    }

    #[test]
    fn one_connection_probes_for_all_until_it_pauses() {
        let other = ConnId {
            index: 7,
            generation: 1,
        };
        let mut search = PathSearch::starting_at(1200, 0);
        assert_eq!(search.ask_owner(ME, 0), Some(true));
        assert!(
            search.is_asked(ME)
                && search.is_taken_by_other(other, 1)
                && !search.is_taken_by_other(ME, 1)
        );
        assert_eq!(search.ask_owner(ME, 0), Some(false), "once a tick");
        assert_eq!(search.ask_owner(ME, 1), Some(true));
        assert_eq!(search.ask_owner(ME, TURN_TICKS), None);
        assert_eq!(search.ask_owner(ME, TURN_TICKS), Some(true), "another turn");
        assert_eq!(
            search.ask_owner(ME, 9 * TURN_TICKS),
            Some(true),
            "it was silent in between"
        );
        assert_eq!(search.ask_owner(ME, 10 * TURN_TICKS - 1), Some(true));
        assert_eq!(search.ask_owner(ME, 10 * TURN_TICKS), None);
        assert!(!search.is_taken_by_other(other, 10 * TURN_TICKS));
        search.probe_sent(other, SeqNr(9), 1500, 0, 10 * TURN_TICKS);
        assert_eq!(search.probe_of(other), Some((SeqNr(9), 1500)));
        assert_eq!(search.probe_of(ME), None);
    }

    #[test]
    fn probes_lost_with_others_do_not_count_rfc_4821() {
        let mut search = PathSearch::starting_at(1200, 0);
        for now in 0..9 {
            search.probe_sent(ME, SeqNr(1), 1500, 0, now);
            search.probe_inconclusive(1, now);
            assert_eq!(search.next_step(1500, now), SearchStep::At(now + 1));
            assert_eq!(search.next_step(1500, now + 1), SearchStep::Probe(1500));
        }
    }
}
