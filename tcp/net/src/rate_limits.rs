//! Rate limits of replies that any sender can provoke: resets, challenge ACKs, ICMP.

use crate::siphash::Key;
use crate::time::Instant;

const SECOND: u64 = 1_000_000_000;

/// Allows a burst of `rate` events, then `rate` events per second, evenly spaced: in any interval
/// at most `rate` events and those for which tokens accrued.
pub struct TokenBucket {
    /// Time in which one token accrues, in ns; 0 allows no event.
    step: u64,
    /// When the bucket is full again.
    full_at: u64,
}

impl TokenBucket {
    /// Returns a full bucket of `rate` tokens.
    pub fn new(rate: u32) -> Self {
        TokenBucket {
            step: match u64::from(rate) {
                0 => 0,
                rate => (SECOND / rate).max(1),
            },
            full_at: 0,
        }
    }

    /// Takes a token; returns `false` if none is left now.
    pub fn try_take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.max(now.0) + self.step;
        let may = self.step > 0 && full_at - now.0 <= SECOND;
        if may {
            self.full_at = full_at;
        }
        may
    }
}

/// Allows between half and one and a half times `rate` events per second, redrawn each second. A
/// fixed limit that several peers share shows each, by its remainder, how much the others used:
/// enough to find the sequence numbers of another connection by challenge ACKs (CVE-2016-5696).
pub struct RandomizedLimit {
    rate: u64,
    tokens: u64,
    filled: u64,
    secret: Key,
    draws: u64,
}

impl RandomizedLimit {
    /// Returns a limit around `rate` events per second, drawn with `secret`.
    pub fn new(rate: u32, now: Instant, secret: Key) -> Self {
        let mut limit = RandomizedLimit {
            rate: u64::from(rate),
            tokens: 0,
            filled: 0,
            secret,
            draws: 0,
        };
        limit.draw_tokens(now);
        limit
    }

    fn draw_tokens(&mut self, now: Instant) {
        self.draws += 1;
        let drawn = self.secret.hash::<2, 4>(&[self.draws]) % self.rate.max(1);
        self.tokens = self.rate / 2 + drawn;
        self.filled = now.0;
    }

    /// Takes a token; returns `false` if none is left in this second.
    pub fn try_take(&mut self, now: Instant) -> bool {
        if self.tokens == 0 && now.0.saturating_sub(self.filled) >= SECOND {
            self.draw_tokens(now);
        }
        let may = self.tokens > 0;
        self.tokens -= u64::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the events allowed in each second of a flood.
    fn seconds(mut take: impl FnMut(Instant) -> bool) -> Vec<usize> {
        let mut count = |second: u64| {
            let times = (0..5_000u64).map(|i| Instant(second * SECOND + i * 200_000));
            times.filter(|time| take(*time)).count()
        };
        (0..50).map(&mut count).collect()
    }

    fn randomized(secret: u8) -> Vec<usize> {
        let mut limit = RandomizedLimit::new(100, Instant(0), Key::new(&[secret; 16]));
        seconds(|time| limit.try_take(time))
    }

    #[test]
    fn a_flood_gets_the_rate_once_and_then_the_rate_in_a_second() {
        let mut bucket = TokenBucket::new(100);
        let count = seconds(|time| bucket.try_take(time));
        assert!((199..=200).contains(&count[0]), "{count:?}");
        assert!(
            count[1..].iter().all(|count| (99..=101).contains(count)),
            "{count:?}"
        );
        assert!(!TokenBucket::new(0).try_take(Instant(1)));
    }

    #[test]
    fn rest_fills_a_bucket_no_higher_than_its_rate() {
        let mut bucket = TokenBucket::new(100);
        let mut take_all = |time| (0..1000).filter(|_| bucket.try_take(Instant(time))).count();
        assert_eq!(take_all(5 * SECOND), 100);
        assert_eq!(take_all(5 * SECOND + SECOND / 4), 25);
        assert_eq!(take_all(60 * SECOND), 100);
    }

    #[test]
    fn a_randomized_limit_hides_what_others_used() {
        let count = randomized(7);
        assert!(
            count.iter().all(|count| (50..=150).contains(count)),
            "{count:?}"
        );
        assert!(count.iter().min() < Some(&70) && count.iter().max() > Some(&130));
        assert_ne!(count, randomized(8), "the draw is secret");
        assert!(!RandomizedLimit::new(0, Instant(0), Key::new(&[7; 16])).try_take(Instant(1)));
    }
}
