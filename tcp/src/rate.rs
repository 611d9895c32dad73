//! A token bucket for what strangers can make us send: resets, challenge ACKs, ICMP.

use crate::Instant;

pub(crate) struct Bucket {
    rate: u64,
    tokens: u64,
    filled: u64,
}

const SECOND: u64 = 1_000_000_000;

impl Bucket {
    pub(crate) fn new(rate: u32, now: Instant) -> Self {
        let rate = u64::from(rate);
        Bucket {
            rate,
            tokens: rate,
            filled: now.0,
        }
    }

    pub(crate) fn take(&mut self, now: Instant) -> bool {
        if self.tokens == 0 && self.rate > 0 {
            let step = (SECOND / self.rate).max(1);
            let fresh = now.0.saturating_sub(self.filled) / step;
            self.tokens = fresh.min(self.rate);
            self.filled = if fresh >= self.rate {
                now.0
            } else {
                self.filled + fresh * step
            };
        }
        if self.tokens == 0 {
            return false;
        }
        self.tokens -= 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holds_the_rate_and_no_more_than_twice_it() {
        let mut b = Bucket::new(100, Instant(0));
        let n = (0..10_000u64)
            .filter(|i| b.take(Instant(i * 100_000)))
            .count();
        assert!((100..=200).contains(&n), "{n}");
        assert!(b.take(Instant(5_000_000_000)));
        assert!(!Bucket::new(0, Instant(0)).take(Instant(1)));
    }
}
