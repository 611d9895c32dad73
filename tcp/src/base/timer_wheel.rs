//! The timer wheel: one entry per connection, for its earliest deadline. When the entry expires,
//! the connection checks its own deadlines. Moving a deadline later leaves the entry in place: it
//! expires early once and is rescheduled. Scheduling and removing are O(1), regardless of the
//! number of connections.
//!
//! Thousands of connections that ended together are due a minute later, and until then they share a
//! coarse slot. When this slot begins, its entries move to finer ones: a bounded number of them in one
//! poll, and no other entry is returned before the last one has moved.

use siw_net::Instant;

/// A tick is 2^15 ns, 32.8 us.
const TICK_SHIFT: u32 = 15;
/// Bits of a tick that select the slot of one level.
const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
/// 9 * 6 bits cover every tick of a 64-bit nanosecond clock: no overflow list, no wrap.
const LEVELS: usize = 9;
/// Entries of a coarse slot that one poll moves: about 20 us of work.
const MOVES_PER_POLL: u32 = 1024;
/// No entry.
const NIL: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct WheelNode {
    prev: u32,
    next: u32,
    /// The tick in the upper bits; level and slot, or `UNLINKED`, in the low ten.
    word: u64,
}

const PLACE_BITS: u32 = 10;
const UNLINKED: u16 = (1 << PLACE_BITS) - 1;

impl WheelNode {
    fn due_tick(self) -> u64 {
        self.word >> PLACE_BITS
    }
    fn slot_place(self) -> u16 {
        self.word as u16 & UNLINKED
    }
    fn set_place(&mut self, tick: u64, place: u16) {
        self.word = tick << PLACE_BITS | u64::from(place);
    }
}

/// A hierarchical timer wheel: a slot of level 0 spans one tick, a slot of each further level 64
/// times more.
pub(crate) struct TimerWheel {
    /// The tick up to which expired entries were returned.
    now: u64,
    /// No entry is due before this tick: most polls compare it and return.
    quiet: u64,
    heads: [[u32; SLOTS]; LEVELS],
    occupied: [u64; LEVELS],
    /// Level and slot that began at `now` and may still have entries.
    splitting: Option<(usize, usize)>,
    /// Entries that this poll may still move.
    moves_left: u32,
    nodes: Vec<WheelNode>,
}

impl TimerWheel {
    pub(crate) fn new(now: Instant) -> Self {
        TimerWheel {
            now: now.0 >> TICK_SHIFT,
            quiet: u64::MAX,
            heads: [[NIL; SLOTS]; LEVELS],
            occupied: [0; LEVELS],
            splitting: None,
            moves_left: MOVES_PER_POLL,
            nodes: Vec::new(),
        }
    }

    /// Bytes of one entry, for memory estimates.
    pub(crate) const NODE: usize = size_of::<WheelNode>();

    /// Schedules `index` for `at`, rounded up to a tick. An earlier entry stays unchanged.
    pub(crate) fn schedule_entry(&mut self, index: u32, at: Instant) {
        let position = index as usize;
        if position >= self.nodes.len() {
            self.nodes.resize(
                position + 1,
                WheelNode {
                    prev: NIL,
                    next: NIL,
                    word: u64::from(UNLINKED),
                },
            );
        }
        let tick = (at.0 >> TICK_SHIFT) + u64::from(at.0 & ((1 << TICK_SHIFT) - 1) != 0);
        let node = self.nodes[position];
        if node.slot_place() != UNLINKED {
            if node.due_tick() <= tick {
                return;
            }
            self.unlink_node(index);
        }
        let tick = tick.max(self.now);
        self.nodes[position].set_place(tick, UNLINKED);
        self.quiet = self.quiet.min(tick);
        self.link_node(index);
    }

    /// Removes the entry of `index`, if it has one.
    pub(crate) fn remove_entry(&mut self, index: u32) {
        if self
            .nodes
            .get(index as usize)
            .is_some_and(|node| node.slot_place() != UNLINKED)
        {
            self.unlink_node(index);
        }
    }

    fn link_node(&mut self, index: u32) {
        let tick = self.nodes[index as usize].due_tick();
        // The highest bit in which the tick differs from `now` selects the level, whose slots are
        // coarse enough that the entry is moved to finer ones before it is due.
        let differ = tick ^ self.now;
        let level = if differ == 0 {
            0
        } else {
            (63 - differ.leading_zeros()) / BITS
        } as usize;
        let slot = (tick >> (BITS * level as u32)) as usize & (SLOTS - 1);
        let head = self.heads[level][slot];
        let node = &mut self.nodes[index as usize];
        node.prev = NIL;
        node.next = head;
        node.set_place(tick, (level * SLOTS + slot) as u16);
        if head != NIL {
            self.nodes[head as usize].prev = index;
        }
        self.heads[level][slot] = index;
        self.occupied[level] |= 1 << slot;
    }

    fn unlink_node(&mut self, index: u32) {
        let node = self.nodes[index as usize];
        let (level, slot) = (
            usize::from(node.slot_place()) / SLOTS,
            usize::from(node.slot_place()) % SLOTS,
        );
        if node.prev == NIL {
            self.heads[level][slot] = node.next;
            if node.next == NIL {
                self.occupied[level] &= !(1 << slot);
            }
        } else {
            self.nodes[node.prev as usize].next = node.next;
        }
        if node.next != NIL {
            self.nodes[node.next as usize].prev = node.prev;
        }
        self.nodes[index as usize].set_place(node.due_tick(), UNLINKED);
    }

    /// Returns the earliest occupied slot and the tick at which it begins.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        for level in 0..LEVELS {
            let occupied = self.occupied[level];
            if occupied != 0 {
                let shift = BITS * level as u32;
                let slot = occupied.trailing_zeros() as usize;
                // An occupied slot is never before that of `now`: `pop` stops at each occupied slot.
                let base = self.now.checked_shr(shift + BITS).unwrap_or(0);
                let start = (base << BITS | slot as u64) << shift;
                return Some((level, slot, start.max(self.now)));
            }
        }
        None
    }

    /// Returns whether [`Self::pop_due`] may find an entry.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.0 >> TICK_SHIFT >= self.quiet
    }

    /// Begins the calls of [`Self::pop_due`] of one poll.
    #[inline]
    pub(crate) fn begin_poll(&mut self) {
        self.moves_left = MOVES_PER_POLL;
    }

    /// Removes an expired entry and returns its index; to be called until it returns `None`. More may
    /// be due then, if [`Self::is_due`] says so: the next poll continues.
    #[inline]
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<u32> {
        if !self.is_due(now) {
            return None;
        }
        self.pop_until(now.0 >> TICK_SHIFT)
    }

    fn pop_until(&mut self, target: u64) -> Option<u32> {
        self.quiet = u64::MAX;
        loop {
            if !self.split_slot() {
                self.quiet = self.now;
                return None;
            }
            let Some((level, slot, start)) = self.next_slot() else {
                break;
            };
            if start > target {
                self.quiet = start;
                break;
            }
            self.now = start;
            if level == 0 {
                let index = self.heads[level][slot];
                self.unlink_node(index);
                self.quiet = start;
                return Some(index);
            }
            self.splitting = Some((level, slot));
        }
        self.now = self.now.max(target);
        None
    }

    /// Moves entries of a coarse slot that has begun to finer slots. Returns false if some are left for
    /// the next poll.
    fn split_slot(&mut self) -> bool {
        let Some((level, slot)) = self.splitting else {
            return true;
        };
        loop {
            let index = self.heads[level][slot];
            if index == NIL {
                self.splitting = None;
                return true;
            }
            if self.moves_left == 0 {
                return false;
            }
            self.moves_left -= 1;
            self.unlink_node(index);
            self.link_node(index);
        }
    }

    /// Returns whether no entry is scheduled; [`TimerWheel::next_deadline`] may still return a
    /// removed one.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn is_empty(&self) -> bool {
        self.occupied.iter().all(|slots| *slots == 0)
    }

    /// Returns the time before which `pop_due` returns nothing. Early for distant entries, never
    /// late.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.quiet != u64::MAX).then_some(Instant(self.quiet << TICK_SHIFT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_due_once_and_on_time() {
        let origin = 77_777_777_777_777u64;
        let mut wheel = TimerWheel::new(Instant(origin));
        let mut random = 9u64;
        let mut want = std::collections::BTreeMap::new();
        for i in 0..2000u32 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let at = origin + (random >> 20) % (1u64 << (10 + random % 34));
            wheel.schedule_entry(i, Instant(at));
            // A later deadline does not move the entry.
            wheel.schedule_entry(i, Instant(at + 999_999_999));
            want.insert(i, at);
        }
        wheel.remove_entry(5);
        want.remove(&5);
        let mut guard = 0;
        while let Some(at) = wheel.next_deadline() {
            guard += 1;
            assert!(guard < 100_000);
            assert!(
                want.values().all(|&due| at.0 <= due + (1 << TICK_SHIFT)),
                "a deadline is never late"
            );
            wheel.begin_poll();
            while let Some(i) = wheel.pop_due(at) {
                let due = want.remove(&i).expect("due once");
                assert!(
                    due <= at.0 && at.0 < due + (2 << TICK_SHIFT),
                    "entry {i}: due {due}, came {}",
                    at.0
                );
            }
        }
        assert!(want.is_empty());
    }

    #[test]
    fn entries_scheduled_after_a_pause_are_not_late() {
        let (mut wheel, mut now, mut random) = (TimerWheel::new(Instant(0)), 0, 5u64);
        let mut due = std::collections::BTreeMap::new();
        for i in 0..20_000u32 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            now += (random >> 40) % (1 << (10 + random % 20));
            let late = |due: u64| due + (2 << TICK_SHIFT) < now;
            wheel.begin_poll();
            while let Some(i) = wheel.pop_due(Instant(now)) {
                let due = due.remove(&i).expect("was scheduled");
                assert!(due <= now, "entry {i} is early");
            }
            assert!(!due.values().any(|&due| late(due)), "an entry is late");
            let next = wheel.next_deadline();
            assert!(
                next.is_none_or(|due| due.0 > now),
                "waiting for it makes progress"
            );
            if i % 3 == 0 {
                let at = now + (random >> 30) % (1 << (12 + random % 24));
                wheel.schedule_entry(i, Instant(at));
                due.insert(i, at);
            } else if i % 7 == 0
                && let Some((gone, _)) = due.pop_first()
            {
                wheel.remove_entry(gone);
            }
        }
    }

    #[test]
    fn an_earlier_deadline_moves_the_entry_forward() {
        let mut wheel = TimerWheel::new(Instant(0));
        wheel.schedule_entry(1, Instant::from_millis(500));
        wheel.schedule_entry(1, Instant::from_millis(1));
        assert_eq!(wheel.pop_due(Instant::from_millis(2)), Some(1));
        assert_eq!(wheel.pop_due(Instant::from_millis(600)), None);
    }

    /// All are due a minute after connections that ended within a millisecond.
    #[test]
    fn a_poll_moves_a_bounded_number_of_entries_that_are_due_together() {
        const ENTRIES: u32 = 20_000;
        let mut wheel = TimerWheel::new(Instant(0));
        let due = Instant::from_millis(60_000);
        for index in 0..ENTRIES {
            wheel.schedule_entry(index, Instant(due.0 + u64::from(index % 1000) * 1000));
        }
        let last = Instant(due.0 + 2_000_000);
        let (mut polls, mut returned) = (0, 0);
        while let Some(at) = wheel.next_deadline() {
            wheel.begin_poll();
            // Entries stay removable while their slot is being split.
            wheel.remove_entry(ENTRIES - 1);
            while wheel.pop_due(at).is_some() {
                returned += 1;
            }
            polls += 1;
            assert!(wheel.moves_left <= MOVES_PER_POLL);
            assert!(at <= last, "an entry is late");
        }
        assert_eq!(returned, ENTRIES - 1);
        // Each level between the minute and the tick moves all of them once.
        assert!(polls > ENTRIES / MOVES_PER_POLL, "{polls} polls");
        assert!(wheel.is_empty());
    }
}
