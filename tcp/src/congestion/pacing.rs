//! Pacing: once a path has shown congestion, or the window has not been in use recently (RFC 7661
//! section 4.4.2), new segments are spread over the round trip instead of being sent in bursts as
//! ACKs and records arrive. Not paced are: windows in use on paths without losses and marks, small
//! windows, round trips too short for timers to divide, and recoveries, in which proportional rate
//! reduction (RFC 9937) spreads the segments.

use crate::congestion::RecoveryPhase;
use crate::congestion::window::{CongestionWindow, Flight, MIN_PACED_RTT};

/// At least this fraction of a window (a sixteenth) may be sent at once.
const BURST: u32 = 16;
/// The credit for a timer that fires late is at most this fraction (a quarter) of a round trip.
const LATE: u64 = 4;
/// Windows of up to this number of segments are not paced: every connection begins with one (RFC
/// 6928).
const SMALL_WINDOW: u32 = 10;

/// The number of bytes that may be sent now.
#[derive(Clone, Copy)]
pub(crate) enum PacingCredit {
    /// Any number: the connection is not paced.
    Unlimited,
    /// At most this number of bytes.
    Bytes(u32),
    /// Nothing before this time (ns).
    NotBefore(u64),
}

/// The send time of a paced connection.
#[derive(Default)]
pub(crate) struct Pacer {
    /// The earliest time at which the next new segments may be sent, in ns.
    next_at: u64,
}

impl Pacer {
    /// Returns the earliest time at which the next new segments may be sent, in ns.
    pub(crate) fn next_at(&self) -> u64 {
        self.next_at
    }

    /// Returns how many bytes of new segments may be sent now. `in_use`: the window is validated.
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
        // The time since `next_at` is credited as timer lateness. Not after a pause that left the
        // window unvalidated: the credit would allow a burst.
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

    /// Records that `bytes` of new segments were sent, within the credit that `take_credit`
    /// returned.
    pub(crate) fn on_sent(&mut self, window: &CongestionWindow, srtt: u64, bytes: u32) {
        self.next_at += sending_time(window, srtt, bytes);
    }
}

/// Returns whether the window and the round trip are large enough for pacing to have an effect.
pub(crate) fn is_effective(
    window: &CongestionWindow,
    flight: &Flight,
    phase: RecoveryPhase,
) -> bool {
    phase == RecoveryPhase::Open
        && flight.srtt >= MIN_PACED_RTT
        && window.cwnd > SMALL_WINDOW * flight.mss
}

/// Returns the time over which `bytes` are spread, in ns. The rate is two windows per round trip in
/// slow start, which doubles the window in that time, else 1.2 windows, so that the window and not
/// the pacer limits the rate.
fn sending_time(window: &CongestionWindow, srtt: u64, bytes: u32) -> u64 {
    let (gain, of) = if window.in_slow_start() {
        (2, 1)
    } else {
        (6, 5)
    };
    let rate = u64::from(window.cwnd.max(1)) * gain;
    (u128::from(srtt) * u128::from(bytes) * of / u128::from(rate)) as u64
}
