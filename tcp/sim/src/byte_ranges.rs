//! Sets of byte positions, stored as disjoint ranges that do not touch.

use std::collections::BTreeMap;

/// A set of positions in a stream.
#[derive(Clone, Debug, Default)]
pub struct ByteRanges(BTreeMap<u32, u32>);

impl ByteRanges {
    /// Adds `start..end`.
    pub fn insert(&mut self, start: u32, end: u32) {
        if start >= end {
            return;
        }
        let (mut low, mut high) = (start, end);
        while let Some((&before, &until)) = self.0.range(..=high).next_back() {
            if until < low {
                break;
            }
            self.0.remove(&before);
            (low, high) = (low.min(before), high.max(until));
        }
        self.0.insert(low, high);
    }

    /// Returns whether all of `start..end` is in the set.
    pub fn covers(&self, start: u32, end: u32) -> bool {
        start >= end
            || self
                .0
                .range(..=start)
                .next_back()
                .is_some_and(|(_, &until)| until >= end)
    }

    /// Returns the end of the last range that begins at or before `start`, but at least `start`.
    pub fn end_from(&self, start: u32) -> u32 {
        let range = self.0.range(..=start).next_back();
        range.map_or(start, |(_, &until)| until.max(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_when_they_touch_or_overlap() {
        let mut ranges = ByteRanges::default();
        ranges.insert(10, 20);
        ranges.insert(30, 40);
        assert!(ranges.covers(10, 20) && !ranges.covers(10, 21) && !ranges.covers(15, 35));
        ranges.insert(20, 30);
        assert!(ranges.covers(10, 40));
        ranges.insert(5, 50);
        assert!(ranges.covers(5, 50) && !ranges.covers(4, 6));
        assert_eq!((ranges.end_from(7), ranges.end_from(60)), (50, 60));
        assert!(ranges.covers(60, 60));
    }
}
