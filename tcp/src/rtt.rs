//! Round-trip time and retransmission timeout (RFC 6298), in nanoseconds.

use crate::StackConfig;
use crate::time::nanos;

/// Bounds of the timeout, from the configuration.
#[derive(Clone, Copy)]
pub(crate) struct RtoLimits {
    pub min: u64,
    pub max: u64,
    pub initial: u64,
}

impl RtoLimits {
    pub(crate) fn new(c: &StackConfig) -> Self {
        RtoLimits {
            min: nanos(c.rto_min),
            max: nanos(c.rto_max),
            initial: nanos(c.rto_initial),
        }
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Rtt {
    /// 0: no sample yet.
    pub srtt: u64,
    var: u64,
}

impl Rtt {
    /// RFC 6298 (2.2), (2.3). Only of segments sent once (Karn).
    #[inline]
    pub(crate) fn sample(&mut self, rtt: u64) {
        let rtt = rtt.max(1);
        if self.srtt == 0 {
            self.srtt = rtt;
            self.var = rtt / 2;
        } else {
            self.var = self.var - self.var / 4 + self.srtt.abs_diff(rtt) / 4;
            self.srtt = (self.srtt - self.srtt / 8 + rtt / 8).max(1);
        }
    }

    /// The minimum bounds the variance term, not the sum: as Linux does it, so that a steady path
    /// longer than the minimum keeps a margin.
    #[inline]
    pub(crate) fn rto(&self, l: &RtoLimits, backoff: u8) -> u64 {
        let base = if self.srtt == 0 {
            l.initial
        } else {
            self.srtt + (4 * self.var).max(l.min)
        };
        let backed = base
            .checked_shl(u32::from(backoff.min(20)))
            .filter(|&v| v >> backoff.min(20) == base);
        backed.unwrap_or(u64::MAX).min(l.max.max(l.min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_rfc_6298() {
        let l = RtoLimits {
            min: 5_000_000,
            max: 60_000_000_000,
            initial: 1_000_000_000,
        };
        let mut r = Rtt::default();
        assert_eq!(r.rto(&l, 0), 1_000_000_000, "(2.1)");
        assert_eq!(r.rto(&l, 2), 4_000_000_000, "(5.5)");
        assert_eq!(r.rto(&l, 20), 60_000_000_000, "(2.5)");
        r.sample(100_000_000);
        assert_eq!(r.rto(&l, 0), 300_000_000, "(2.2)");
        for _ in 0..100 {
            r.sample(100_000_000);
        }
        assert!(
            r.rto(&l, 0) >= 105_000_000 && r.rto(&l, 0) < 106_000_000,
            "(2.4)"
        );
    }
}
