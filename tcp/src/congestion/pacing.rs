//! Pacing: once a path has shown congestion, or a window has not been in use of late (RFC 7661
//! section 4.4.2), new segments are spread over the round trip instead of being sent in the bursts in
//! which ACKs and records come. Nothing else is paced: windows in use on paths that lost and marked
//! nothing, small windows, round trips that are too short for timers to divide, and recoveries, in which
//! proportional rate reduction spreads what is sent (RFC 9937).

use crate::congestion::RecoveryPhase;
use crate::congestion::window::{CongestionWindow, Flight, MIN_PACED_RTT};

/// At least this part of a window (a sixteenth) may be sent at once.
const BURST: u32 = 16;
/// A timer that fires late is made up for by at most this part (a quarter) of a round trip.
const LATE: u64 = 4;
/// A window of so many segments needs no pacing: it is what every connection begins with (RFC 6928).
const SMALL_WINDOW: u32 = 10;

/// How much may be sent now.
pub(crate) enum PacingCredit {
    /// At most so many bytes.
    Bytes(u32),
    /// Nothing before this time (ns).
    NotBefore(u64),
}

/// When a paced connection may send.
#[derive(Default)]
pub(crate) struct Pacer {
    /// When the next new segments may be sent, in ns.
    next_at: u64,
}

impl Pacer {
    /// When the next new segments may be sent, in ns.
    pub(crate) fn next_at(&self) -> u64 {
        self.next_at
    }

    /// How many bytes of new segments may be sent now. `in_use`: the window is validated.
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
        // The time since `next_at` is credited as the lateness of a timer, unless it was a pause after which
        // the window is not validated: then it would be a burst.
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

    /// `bytes` of new segments were sent, within what `take_credit` permitted.
    pub(crate) fn on_sent(&mut self, window: &CongestionWindow, srtt: u64, bytes: u32) {
        self.next_at += sending_time(window, srtt, bytes);
    }
}

/// Whether the window and the round trip are such that pacing makes a difference.
pub(crate) fn is_effective(
    window: &CongestionWindow,
    flight: &Flight,
    phase: RecoveryPhase,
) -> bool {
    phase == RecoveryPhase::Open
        && flight.srtt >= MIN_PACED_RTT
        && window.cwnd > SMALL_WINDOW * flight.mss
}

/// The time that sending `bytes` takes, in ns. The rate is twice the window in a round trip in slow start,
/// which doubles the window in that time, else the window and a fifth, so that the window and not the pacer
/// is what limits the rate.
fn sending_time(window: &CongestionWindow, srtt: u64, bytes: u32) -> u64 {
    let (gain, of) = if window.in_slow_start() {
        (2, 1)
    } else {
        (6, 5)
    };
    let rate = u64::from(window.cwnd.max(1)) * gain;
    (u128::from(srtt) * u128::from(bytes) * of / u128::from(rate)) as u64
}
