//! A token bucket that limits what anybody can make us send: resets, challenge ACKs, ICMP.

use crate::base::siphash::Key;
use crate::base::time::Instant;

/// Allows `rate` events in a second.
pub(crate) struct TokenBucket {
    rate: u64,
    tokens: u64,
    filled: u64,
    /// If set, how much a full bucket holds is drawn with it.
    secret: Option<Key>,
    draws: u64,
}

const SECOND: u64 = 1_000_000_000;

impl TokenBucket {
    pub(crate) fn new(rate: u32, now: Instant) -> Self {
        let rate = u64::from(rate);
        TokenBucket {
            rate,
            tokens: rate,
            filled: now.0,
            secret: None,
            draws: 0,
        }
    }

    /// A bucket that holds between half and one and a half times the rate, drawn anew each second. A
    /// fixed limit that several share tells each, by what is left of it, how much the others used: enough
    /// to find the sequence numbers of a foreign connection by challenge ACKs (CVE-2016-5696).
    pub(crate) fn randomized(rate: u32, now: Instant, secret: Key) -> Self {
        let mut bucket = TokenBucket::new(rate, now);
        bucket.secret = Some(secret);
        bucket.tokens = bucket.draw_tokens();
        bucket
    }

    fn draw_tokens(&mut self) -> u64 {
        let Some(secret) = &self.secret else {
            return self.rate;
        };
        self.draws += 1;
        self.rate / 2 + secret.hash::<2, 4>(&[self.draws]) % self.rate.max(1)
    }

    /// Takes a token; `false`: none is left now.
    pub(crate) fn try_take(&mut self, now: Instant) -> bool {
        if self.tokens == 0 && self.rate > 0 {
            self.refill(now);
        }
        if self.tokens == 0 {
            return false;
        }
        self.tokens -= 1;
        true
    }

    fn refill(&mut self, now: Instant) {
        let age = now.0.saturating_sub(self.filled);
        if age >= SECOND {
            self.tokens = self.draw_tokens();
            self.filled = now.0;
        } else if self.secret.is_none() {
            let step = (SECOND / self.rate).max(1);
            self.tokens = age / step;
            self.filled += self.tokens * step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many are let through in each second of a flood.
    fn seconds(bucket: &mut TokenBucket) -> Vec<usize> {
        let second = |second: u64| {
            let times = (0..5_000u64).map(|i| Instant(second * SECOND + i * 200_000));
            times.filter(|time| bucket.try_take(*time)).count()
        };
        (0..50).map(second).collect()
    }

    #[test]
    fn no_second_allows_more_than_twice_the_rate() {
        let count = seconds(&mut TokenBucket::new(100, Instant(0)));
        assert!(
            count.iter().all(|count| (99..=200).contains(count)),
            "{count:?}"
        );
        let mut bucket = TokenBucket::new(100, Instant(0));
        while bucket.try_take(Instant(1)) {}
        assert!(bucket.try_take(Instant(5 * SECOND)));
        assert!(!TokenBucket::new(0, Instant(0)).try_take(Instant(1)));
    }

    #[test]
    fn a_randomized_limit_hides_what_others_used() {
        let count = seconds(&mut TokenBucket::randomized(
            100,
            Instant(0),
            Key::new(&[7; 16]),
        ));
        assert!(
            count.iter().all(|count| (50..=150).contains(count)),
            "{count:?}"
        );
        assert!(count.iter().min() < Some(&70) && count.iter().max() > Some(&130));
        let other = seconds(&mut TokenBucket::randomized(
            100,
            Instant(0),
            Key::new(&[8; 16]),
        ));
        assert_ne!(count, other, "the draw is secret");
        assert!(!TokenBucket::randomized(0, Instant(0), Key::new(&[7; 16])).try_take(Instant(1)));
    }
}
