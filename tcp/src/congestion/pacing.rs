//! Pacing: once a path has shown congestion, or a window has not been in use of late (RFC 7661
//! section 4.4.2), new segments are spread over the round trip instead of leaving as ACKs and
//! records happen to come. Everything else is not paced: used windows of paths that lost and marked
//! nothing, small windows, round trips that timers cannot divide, and recoveries, whose
//! rate is that of proportional rate reduction.

use crate::congestion::RecoveryPhase;
use crate::congestion::window::{CongestionWindow, Flight, MIN_PACED_RTT};

/// Least part of a window that leaves at once, and of a round trip that a late timer makes up for.
const BURST: u32 = 16;
const LATE: u64 = 4;
/// So many segments are no burst that a path minds (RFC 6928).
const SMALL_WINDOW: u32 = 10;

/// How much may leave now.
pub(crate) enum PacingCredit {
    /// So many bytes.
    Bytes(u32),
    /// Nothing before this time in ns.
    NotBefore(u64),
}

/// When a paced connection sends.
#[derive(Default)]
pub(crate) struct Pacer {
    /// When new segments may leave, in ns.
    next_at: u64,
}

impl Pacer {
    /// When new segments may leave, in ns.
    pub(crate) fn next_at(&self) -> u64 {
        self.next_at
    }

    /// How many bytes of new segments may leave now. `in_use`: the window is validated.
    pub(crate) fn take_credit(
        &mut self,
        window: &CongestionWindow,
        flight: &Flight,
        in_use: bool,
        now: u64,
    ) -> PacingCredit {
        if now < self.next_at {
            return PacingCredit::NotBefore(self.next_at);
        }
        // A pause that left the window in doubt is no lateness of a timer.
        let late = if flight.flight_size() == 0 && !in_use {
            0
        } else {
            (now - self.next_at).min(flight.srtt / LATE)
        };
        self.next_at = now - late;
        let round = sending_time(window, flight.srtt, window.cwnd).max(1);
        let owed = (u128::from(window.cwnd) * u128::from(late) / u128::from(round)) as u32;
        PacingCredit::Bytes(owed.max(window.cwnd / BURST).max(2 * flight.mss))
    }

    /// So many bytes left; `credit` had bounded them.
    pub(crate) fn on_sent(&mut self, window: &CongestionWindow, srtt: u64, bytes: u32) {
        self.next_at += sending_time(window, srtt, bytes);
    }
}

/// The window and the round trip are such that pacing has an effect.
pub(crate) fn is_effective(
    window: &CongestionWindow,
    flight: &Flight,
    phase: RecoveryPhase,
) -> bool {
    phase == RecoveryPhase::Open
        && flight.srtt >= MIN_PACED_RTT
        && window.cwnd > SMALL_WINDOW * flight.mss
}

/// Nanoseconds that `bytes` take: twice the window in a round trip while slow start doubles it,
/// a fifth more than the window else, so that pacing never is what limits it.
fn sending_time(window: &CongestionWindow, srtt: u64, bytes: u32) -> u64 {
    let (gain, of) = if window.in_slow_start() {
        (2, 1)
    } else {
        (6, 5)
    };
    let rate = u64::from(window.cwnd.max(1)) * gain;
    (u128::from(srtt) * u128::from(bytes) * of / u128::from(rate)) as u64
}
