//! TCP sequence numbers (RFC 9293 section 3.4): 32 bits that wrap.

use core::ops::{Add, AddAssign, Sub};

/// A sequence number. Ordering is by signed distance, so it is only meaningful between numbers
/// less than 2^31 apart, which a window always is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SeqNr(pub u32);

impl SeqNr {
    /// Signed distance from `other` to `self`.
    #[inline]
    pub const fn distance_from(self, other: SeqNr) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }
    /// Returns whether `self` is before `other`.
    #[inline]
    pub const fn lt(self, other: SeqNr) -> bool {
        self.distance_from(other) < 0
    }
    /// Returns whether `self` is before or equal to `other`.
    #[inline]
    pub const fn le(self, other: SeqNr) -> bool {
        self.distance_from(other) <= 0
    }
    /// Returns whether `self` is after `other`.
    #[inline]
    pub const fn gt(self, other: SeqNr) -> bool {
        self.distance_from(other) > 0
    }
    /// Returns whether `self` is after or equal to `other`.
    #[inline]
    pub const fn ge(self, other: SeqNr) -> bool {
        self.distance_from(other) >= 0
    }
    /// Returns the later of both.
    #[inline]
    pub fn max(self, other: SeqNr) -> SeqNr {
        if self.ge(other) { self } else { other }
    }
    /// Returns the earlier of both.
    #[inline]
    pub fn min(self, other: SeqNr) -> SeqNr {
        if self.le(other) { self } else { other }
    }
}

impl Add<u32> for SeqNr {
    type Output = SeqNr;
    #[inline]
    fn add(self, count: u32) -> SeqNr {
        SeqNr(self.0.wrapping_add(count))
    }
}

impl Sub<u32> for SeqNr {
    type Output = SeqNr;
    #[inline]
    fn sub(self, count: u32) -> SeqNr {
        SeqNr(self.0.wrapping_sub(count))
    }
}

/// Modular difference; the caller ensures that `self` is not before `other`.
impl Sub<SeqNr> for SeqNr {
    type Output = u32;
    #[inline]
    fn sub(self, other: SeqNr) -> u32 {
        self.0.wrapping_sub(other.0)
    }
}

impl AddAssign<u32> for SeqNr {
    #[inline]
    fn add_assign(&mut self, count: u32) {
        self.0 = self.0.wrapping_add(count);
    }
}

/// Maps sequence numbers to positions in the stream, 64 bits that do not wrap. Positions are
/// totally ordered, as keys of an ordered map must be. Sequence numbers are not: three numbers
/// spread over the whole sequence space can each be before the next, and a peer may send any
/// number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamPositions {
    reference: SeqNr,
    position: u64,
}

impl Default for StreamPositions {
    fn default() -> Self {
        StreamPositions::new(SeqNr(0))
    }
}

impl StreamPositions {
    /// Maps numbers less than 2^31 from `reference`.
    pub(crate) fn new(reference: SeqNr) -> Self {
        StreamPositions {
            reference,
            // Leaves room for positions of numbers before the first reference.
            position: 1 << 32,
        }
    }

    /// From now on maps numbers less than 2^31 from `reference`. Existing positions stay valid.
    pub(crate) fn advance_to(&mut self, reference: SeqNr) {
        self.position = self.position_of(reference);
        self.reference = reference;
    }

    /// The position of `seq`.
    pub(crate) fn position_of(&self, seq: SeqNr) -> u64 {
        let distance = i64::from(seq.distance_from(self.reference));
        self.position.wrapping_add_signed(distance)
    }

    /// The sequence number of a position.
    pub(crate) fn seq_at(&self, position: u64) -> SeqNr {
        // Truncation is the arithmetic of sequence numbers.
        self.reference + position.wrapping_sub(self.position) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_grow_beyond_the_sequence_space() {
        let mut positions = StreamPositions::new(SeqNr(u32::MAX - 10));
        let first = positions.position_of(SeqNr(u32::MAX - 10));
        let (mut seq, mut last) = (SeqNr(u32::MAX - 10), first);
        for step in 0..40u64 {
            assert_eq!(positions.position_of(seq), first + step * (1 << 30));
            assert_eq!(positions.seq_at(last), seq);
            assert!(positions.position_of(seq - 5) < positions.position_of(seq));
            seq += 1 << 30;
            last += 1 << 30;
            positions.advance_to(seq);
        }
    }

    #[test]
    fn comparison_survives_the_wrap_of_sequence_space() {
        let a = SeqNr(u32::MAX - 1);
        let b = a + 4;
        assert_eq!(b, SeqNr(2));
        assert!(a.lt(b) && b.gt(a) && a.le(a) && a.ge(a));
        assert_eq!(b - a, 4);
        assert_eq!(a.max(b), b);
        assert_eq!(a.min(b), a);
        assert_eq!(a.distance_from(b), -4);
    }
}
