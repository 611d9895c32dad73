//! Round-trip time and retransmission timeout (RFC 6298), in nanoseconds.

use siw_net::to_nanos;

use crate::config::TcpConfig;

/// Bounds of the timeout, from the configuration.
#[derive(Clone, Copy)]
pub(crate) struct RtoLimits {
    pub min: u64,
    pub max: u64,
    pub initial: u64,
}

impl RtoLimits {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        RtoLimits {
            min: to_nanos(config.rto_min),
            max: to_nanos(config.rto_max),
            initial: to_nanos(config.rto_initial),
        }
    }
}

/// Workers serve timers between batches, so an earlier probe would be needless.
const PTO_SLACK: u64 = 2_000_000;

/// The first timeout of a connection whose SYN or SYN-ACK was lost, in ns (RFC 6298 (5.7)).
const AFTER_LOST_SYN: u64 = 3_000_000_000;

/// Four ticks of the timestamp clock, in ns.
const COARSE_MIN: u64 = 4 << 20;

#[derive(Clone, Copy, Default)]
pub(crate) struct RoundTrip {
    /// Smoothed round-trip time; 0: no sample yet.
    pub srtt: u64,
    /// RTTVAR. Without a sample: the least initial timeout, 0 if it is the configured one.
    variance: u32,
    /// Approximate minimum of recent samples (RFC 8985 section 6.2 step 1): falls at once, rises
    /// slowly. Saturates at 4 s.
    pub min: u32,
}

impl RoundTrip {
    /// Adds a sample (RFC 6298 (2.2), (2.3)), only of segments sent once (Karn's algorithm).
    #[inline]
    pub(crate) fn add_sample(&mut self, rtt: u64) {
        let rtt = rtt.max(1);
        let short = u32::try_from(rtt).unwrap_or(u32::MAX);
        if self.srtt == 0 {
            self.srtt = rtt;
            self.variance = Self::variance_units(rtt / 2);
            self.min = short;
        } else {
            self.variance = (self.variance - self.variance / 4)
                .saturating_add(Self::variance_units(self.srtt.abs_diff(rtt)) / 4);
            self.srtt = (self.srtt - self.srtt / 8 + rtt / 8).max(1);
            self.min = short.min(self.min + (short.saturating_sub(self.min) >> 10));
        }
    }

    /// Adds a sample from an echoed timestamp, which may be one tick too long (RFC 7323 section 4.1). A
    /// sample of a few ticks counts only if it shows that the timeout is too short.
    pub(crate) fn add_coarse_sample(&mut self, rtt: u64, limits: &RtoLimits) {
        if rtt >= COARSE_MIN || self.srtt == 0 || rtt > self.first_timeout(limits) {
            self.add_sample(rtt);
        }
    }

    /// Lengthens the timeout until the first sample, because the SYN or SYN-ACK was lost (RFC 6298
    /// (5.7)).
    pub(crate) fn on_syn_lost(&mut self) {
        if self.srtt == 0 {
            self.variance = Self::variance_units(AFTER_LOST_SYN);
        }
    }

    /// Converts to the unit of the variance, 64 ns, which saturates at 275 s.
    fn variance_units(ns: u64) -> u32 {
        u32::try_from(ns >> 6).unwrap_or(u32::MAX)
    }

    /// Probe timeout (RFC 8985 section 7.2); not used before the first sample. A lone segment may wait for
    /// a delayed ACK: its slack is half the minimum timeout, which allows for the ACK delay of peers.
    #[inline]
    pub(crate) fn probe_timeout(&self, limits: &RtoLimits, alone: bool) -> u64 {
        let slack = if alone {
            limits.min / 2
        } else {
            (limits.min / 4).min(PTO_SLACK)
        };
        2 * self.srtt + slack
    }

    /// Retransmission timeout without backoff, once a round trip was measured. Equals
    /// `retransmission_timeout` in that case, but takes fewer steps.
    #[inline]
    pub(crate) fn first_timeout(&self, limits: &RtoLimits) -> u64 {
        let timeout = self.srtt + (u64::from(self.variance) << 8).max(limits.min);
        timeout.min(limits.max.max(limits.min))
    }

    /// Retransmission timeout. The minimum bounds the variance term, not the sum, as in Linux: a steady
    /// path longer than the minimum keeps a margin.
    #[inline]
    pub(crate) fn retransmission_timeout(&self, limits: &RtoLimits, backoff: u8) -> u64 {
        let base = if self.srtt == 0 {
            limits.initial.max(u64::from(self.variance) << 6)
        } else {
            self.srtt + (u64::from(self.variance) << 8).max(limits.min)
        };
        let backed = base
            .checked_shl(u32::from(backoff.min(20)))
            .filter(|&backed_off| backed_off >> backoff.min(20) == base);
        backed.unwrap_or(u64::MAX).min(limits.max.max(limits.min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_follows_rfc_6298() {
        let limits = RtoLimits {
            min: 5_000_000,
            max: 60_000_000_000,
            initial: 1_000_000_000,
        };
        let mut r = RoundTrip::default();
        r.on_syn_lost();
        assert_eq!(r.retransmission_timeout(&limits, 0), 3_000_000_000, "(5.7)");
        let mut r = RoundTrip::default();
        assert_eq!(r.retransmission_timeout(&limits, 0), 1_000_000_000, "(2.1)");
        assert_eq!(r.retransmission_timeout(&limits, 2), 4_000_000_000, "(5.5)");
        assert_eq!(
            r.retransmission_timeout(&limits, 20),
            60_000_000_000,
            "(2.5)"
        );
        r.add_sample(100_000_000);
        assert_eq!(r.retransmission_timeout(&limits, 0), 300_000_000, "(2.2)");
        assert_eq!(r.first_timeout(&limits), 300_000_000);
        for _ in 0..100 {
            r.add_sample(100_000_000);
        }
        assert!(
            r.retransmission_timeout(&limits, 0) >= 105_000_000
                && r.retransmission_timeout(&limits, 0) < 106_000_000,
            "(2.4)"
        );
    }
}
