//! Detects ports whose super-segments do not arrive although single segments do, and stops TSO on
//! them. QEMU's vmxnet3, for example, cuts a super-segment into IP fragments.
//!
//! Only losses are examined. A period ends when enough segments of super-segments were sent again;
//! it is bad if most of those sent in it were lost, and few of their retransmissions. One outage
//! makes one bad period, because it loses only data sent before its end.

use siw_net::Instant;

/// Least number of lost segments in a period.
const LOST_MIN: u32 = 16;
/// Least duration of a period in ns.
const DURATION_MIN: u64 = 30_000_000;
/// A period without a loss of this duration in ns ends without a result.
const QUIET: u64 = 10_000_000_000;
/// Bad periods in a row that stop TSO.
const BAD_PERIODS: u32 = 4;

/// The losses among segments sent in super-segments.
#[derive(Default)]
pub(crate) struct TsoWatch {
    /// Segments sent in super-segments since the period began.
    sent: u32,
    /// Those of them, or of earlier ones, that were sent again, and sent again more than once.
    lost: u32,
    lost_again: u32,
    began: Instant,
    last: Instant,
    bad_periods: u32,
    /// TSO was stopped, which the owner of the stack has not seen yet.
    pub unreported: bool,
}

impl TsoWatch {
    /// Records that a super-segment of `count` segments was sent.
    #[inline]
    pub(crate) fn on_sent(&mut self, count: u32) {
        self.sent = self.sent.saturating_add(count);
    }

    /// Records the retransmission of a segment that was first sent in a super-segment. Returns
    /// whether TSO fails.
    pub(crate) fn on_lost(&mut self, is_again: bool, now: Instant) -> bool {
        if now.0.saturating_sub(self.last.0) > QUIET {
            *self = TsoWatch {
                sent: self.sent,
                began: now,
                ..TsoWatch::default()
            };
        }
        self.last = now;
        self.lost += u32::from(!is_again);
        self.lost_again += u32::from(is_again);
        if self.lost < LOST_MIN || now.0.saturating_sub(self.began.0) < DURATION_MIN {
            return false;
        }
        let is_bad = self.lost >= self.sent / 2 && self.lost_again <= self.lost / 4;
        self.bad_periods = if is_bad { self.bad_periods + 1 } else { 0 };
        (self.sent, self.lost, self.lost_again, self.began) = (0, 0, 0, now);
        self.bad_periods >= BAD_PERIODS
    }

    /// Returns whether TSO was stopped since the last call.
    #[inline]
    pub(crate) fn take_report(&mut self) -> bool {
        core::mem::take(&mut self.unreported)
    }
}
