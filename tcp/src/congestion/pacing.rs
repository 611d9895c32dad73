//! Pacing: once a path has shown congestion, or a window has not been in use of late (RFC 7661
//! section 4.4.2), new segments are spread over the round trip instead of leaving as ACKs and
//! records happen to come. Everything else passes by: used windows of paths that lost and marked
//! nothing, small windows, round trips that timers cannot divide, and recoveries, whose
//! rate is that of proportional rate reduction. Called by `output`.

use crate::base::buffer::RecvBuf;
use crate::connection::context::ConnectionContext;
use crate::connection::{Connection, Hot, Phase, flag};

/// Shorter round trips, in ns, are no more than a few ticks of the timer wheel.
const MIN_RTT: u64 = 500_000;
/// Least part of a window that leaves at once, and of a round trip that a late timer makes up for.
const BURST: u32 = 16;
const LATE: u64 = 4;
/// A slow start threshold as infinite as `u32::MAX`, of a connection that is paced though its path
/// showed no congestion yet.
pub(crate) const INFINITE: u32 = u32::MAX - 1;
/// So many segments are no burst that a path minds (RFC 6928).
const SMALL: u32 = 10;

/// Paces a connection that no congestion paces yet, where timers divide the round trip.
#[inline]
pub(crate) fn begin(h: &mut Hot) {
    if h.ssthresh == u32::MAX && h.rtt.srtt >= MIN_RTT {
        h.ssthresh = INFINITE;
    }
}

/// Nanoseconds that `bytes` take: twice the window in a round trip while slow start doubles it,
/// a fifth more than the window else, so that pacing never is what limits it.
fn time(h: &Hot, bytes: u32) -> u64 {
    let (gain, of) = if h.cwnd < h.ssthresh { (2, 1) } else { (6, 5) };
    let window = u64::from(h.cwnd.max(1)) * gain;
    (u128::from(h.rtt.srtt) * u128::from(bytes) * of / u128::from(window)) as u64
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// How many bytes of new segments may leave now.
    #[inline]
    pub(crate) fn pace(&mut self, cx: &mut ConnectionContext<'_>) -> u32 {
        // No congestion event yet, no doubt: nearly all connections of a fabric, nearly always.
        if self.hot.ssthresh == u32::MAX {
            return u32::MAX;
        }
        self.spaced(cx)
    }

    #[cold]
    fn spaced(&mut self, cx: &mut ConnectionContext<'_>) -> u32 {
        let h = &mut self.hot;
        let emss = u32::from(h.emss);
        if h.phase != Phase::Open || h.rtt.srtt < MIN_RTT || h.cwnd <= SMALL * emss {
            h.flags &= !flag::PACED;
            return u32::MAX;
        }
        let at = self.recovery_state().pace_at;
        let h = &mut self.hot;
        if cx.now.0 < at {
            if h.unsent > 0 {
                cx.shared.stats.paced += u64::from(!h.has(flag::PACED));
                h.flags |= flag::PACED;
                cx.arm(h, at);
            }
            return 0;
        }
        h.flags &= !flag::PACED;
        // A pause that left the window in doubt is no lateness of a timer.
        let late = if h.flight() == 0 && !self.cwv.is_validated() {
            0
        } else {
            (cx.now.0 - at).min(h.rtt.srtt / LATE)
        };
        self.recovery_state().pace_at = cx.now.0 - late;
        let h = &self.hot;
        let window = time(h, h.cwnd).max(1);
        let owed = (u128::from(h.cwnd) * u128::from(late) / u128::from(window)) as u32;
        owed.max(h.cwnd / BURST).max(2 * emss)
    }

    /// So many bytes left; `pace` had bounded them.
    #[cold]
    pub(crate) fn paced(&mut self, cx: &mut ConnectionContext<'_>, sent: u32) {
        let spaced = time(&self.hot, sent);
        self.recovery_state().pace_at += spaced;
        // Registers the wait when there is one.
        self.pace(cx);
    }
}
