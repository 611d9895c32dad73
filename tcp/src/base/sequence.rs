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
    /// `self` is before `other`.
    #[inline]
    pub const fn lt(self, other: SeqNr) -> bool {
        self.distance_from(other) < 0
    }
    /// `self` is before `other`, or the same.
    #[inline]
    pub const fn le(self, other: SeqNr) -> bool {
        self.distance_from(other) <= 0
    }
    /// `self` is after `other`.
    #[inline]
    pub const fn gt(self, other: SeqNr) -> bool {
        self.distance_from(other) > 0
    }
    /// `self` is after `other`, or the same.
    #[inline]
    pub const fn ge(self, other: SeqNr) -> bool {
        self.distance_from(other) >= 0
    }
    /// The later of both.
    #[inline]
    pub fn max(self, other: SeqNr) -> SeqNr {
        if self.ge(other) { self } else { other }
    }
    /// The earlier of both.
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

/// Modular difference; the caller knows that `self` is not before `other`.
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

#[cfg(test)]
mod tests {
    use super::*;

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
