//! Distributions of values, counted by power of two.

/// Number of bounded buckets. One more has all larger values.
pub const BOUNDS: usize = 19;

/// Counts of values: bucket `n` has those up to 2^(`FIRST` + `n`) that no earlier bucket has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram<const FIRST: u32> {
    counts: [u64; BOUNDS + 1],
    sum: u64,
}

/// Lengths of messages, from 64 bytes to 16 MiB.
pub type MessageLengths = Histogram<6>;
/// Round-trip times in nanoseconds, from 4 microseconds to one second.
pub type RoundTripTimes = Histogram<12>;

impl<const FIRST: u32> Histogram<FIRST> {
    /// Counts `count` values that equal `value`. A few instructions without a branch.
    #[inline]
    pub fn add(&mut self, value: u64, count: u64) {
        let exponent = u64::BITS - value.saturating_sub(1).leading_zeros();
        let bucket = (exponent.saturating_sub(FIRST) as usize).min(BOUNDS);
        self.counts[bucket] += count;
        self.sum = self.sum.wrapping_add(value.wrapping_mul(count));
    }

    /// Upper bounds of the buckets but the last.
    pub fn bounds() -> [u64; BOUNDS] {
        std::array::from_fn(|bucket| 1 << (FIRST + bucket as u32))
    }

    /// Number of values in each bucket; the last one has no bound.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        let bounds = MessageLengths::bounds();
        assert_eq!((bounds[0], bounds[BOUNDS - 1]), (64, 16 << 20));
        for value in [
            0,
            1,
            63,
            64,
            65,
            128,
            129,
            4096,
            16 << 20,
            (16 << 20) + 1,
            u64::MAX,
        ] {
            let mut lengths = MessageLengths::default();
            lengths.add(value, 3);
            let expected = bounds.iter().position(|bound| value <= *bound);
            let found = lengths.counts().iter().position(|count| *count > 0);
            assert_eq!(found, Some(expected.unwrap_or(BOUNDS)), "{value}");
            assert_eq!(lengths.counts().iter().sum::<u64>(), 3);
        }
        let mut times = RoundTripTimes::default();
        times.add(5000, 2);
        times.add(7, 1);
        assert_eq!(
            (times.counts()[..2].to_vec(), times.sum()),
            (vec![1, 2], 10_007)
        );
    }
}
