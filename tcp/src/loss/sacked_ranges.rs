//! The selectively acknowledged bytes in flight (RFC 2018 section 5), as ranges, so that a SACK
//! block that repeats earlier blocks costs a lookup and not a walk. A receiver repeats each block
//! in at least three ACKs (RFC 2018 section 4), and a hostile peer can report half of a large
//! window in every ACK.
//!
//! Part of [`Recovery`](crate::loss::recovery::Recovery). Ranges begin and end at segment
//! boundaries, and cover exactly the segments that are marked `SACKED` in the send buffer.

use std::collections::BTreeMap;

use crate::base::sequence::{SeqNr, StreamPositions};

/// Ranges of sequence numbers, disjoint and not adjacent.
#[derive(Default)]
pub(crate) struct SackedRanges {
    positions: StreamPositions,
    /// Maps the beginning of each range to its end.
    ranges: BTreeMap<u64, u64>,
}

impl SackedRanges {
    /// Returns the state without selective acknowledgements; SND.UNA is `una`.
    pub(crate) fn new(una: SeqNr) -> Self {
        SackedRanges {
            positions: StreamPositions::new(una),
            ranges: BTreeMap::new(),
        }
    }

    /// Returns the end of the range that contains `seq`; `None` if there is none.
    pub(crate) fn end_of_range_at(&self, seq: SeqNr) -> Option<SeqNr> {
        let at = self.positions.position_of(seq);
        let (_, &end) = self.ranges.range(..=at).next_back()?;
        (end > at).then(|| self.positions.seq_at(end))
    }

    /// Returns the beginning of the first range after `seq`.
    pub(crate) fn next_range_after(&self, seq: SeqNr) -> Option<SeqNr> {
        let at = self.positions.position_of(seq);
        let (&start, _) = self.ranges.range(at + 1..).next()?;
        Some(self.positions.seq_at(start))
    }

    /// Adds `start..end`, which overlaps no range, and joins it with the ranges that it touches.
    pub(crate) fn insert(&mut self, start: SeqNr, end: SeqNr) {
        let mut start = self.positions.position_of(start);
        let mut end = self.positions.position_of(end);
        if let Some((&before, &before_end)) = self.ranges.range(..start).next_back()
            && before_end == start
        {
            start = before;
        }
        if let Some(after_end) = self.ranges.remove(&end) {
            end = after_end;
        }
        self.ranges.insert(start, end);
    }

    /// Advances SND.UNA to `una` and removes the ranges before it. Each range is removed once, so
    /// this costs no more than adding it did.
    pub(crate) fn advance_to(&mut self, una: SeqNr) {
        self.positions.advance_to(una);
        let at = self.positions.position_of(una);
        while let Some(entry) = self.ranges.first_entry() {
            if *entry.key() >= at {
                return;
            }
            let end = entry.remove();
            if end > at {
                self.ranges.insert(at, end);
            }
        }
    }

    /// Removes all ranges, because the peer reneged.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_where_they_touch_and_go_when_acked() {
        let base = SeqNr(u32::MAX - 100);
        let mut ranges = SackedRanges::new(base);
        ranges.insert(base + 10, base + 20);
        ranges.insert(base + 200, base + 300);
        assert_eq!(ranges.end_of_range_at(base + 9), None);
        assert_eq!(ranges.end_of_range_at(base + 10), Some(base + 20));
        assert_eq!(ranges.end_of_range_at(base + 20), None);
        assert_eq!(ranges.next_range_after(base + 10), Some(base + 200));
        ranges.insert(base + 20, base + 200);
        assert_eq!(ranges.end_of_range_at(base + 15), Some(base + 300));
        assert_eq!(ranges.next_range_after(base + 10), None);
        ranges.advance_to(base + 250);
        assert_eq!(ranges.end_of_range_at(base + 250), Some(base + 300));
        ranges.advance_to(base + 300);
        assert_eq!(ranges.end_of_range_at(base + 250), None);
        assert!(ranges.ranges.is_empty());
    }

    #[test]
    fn numbers_far_outside_the_window_are_harmless() {
        let base = SeqNr(7);
        let mut ranges = SackedRanges::new(base);
        ranges.insert(base + 10, base + 20);
        for far in [1 << 30, 1 << 31, (1 << 31) + 1, u32::MAX] {
            assert_eq!(ranges.end_of_range_at(base + far), None);
            let _ = ranges.next_range_after(base + far);
        }
    }
}
