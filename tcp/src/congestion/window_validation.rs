//! Congestion window validation (RFC 7661): how much of the window the path has carried recently. A
//! window that is not in use is kept for five minutes. Until it is used again it does not grow, new
//! segments are spread over the round trip, and congestion reduces it to the part in use.
//!
//! [`CongestionState`](super::CongestionState) calls it once per round trip, before new segments
//! when nothing is in flight, and before a reduction of the window.

use crate::base::sequence::SeqNr;
use crate::base::time::to_ticks;
use crate::congestion::controller::Controller;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};

/// The "undefined" value of pipeACK (section 4.1).
const UNDEFINED: u32 = u32::MAX;
/// The minimum pipeACK Sampling Period, 1 s (section 4.2), in ticks.
const SAMPLING: u32 = 954;
/// The Non-Validated Period (NVP), 5 minutes (section 4.4.3), in ticks.
const NVP: u32 = 286_103;

/// The measured use of the window. Times are ticks (see [`to_ticks`]).
#[derive(Clone, Copy)]
pub(crate) struct WindowValidation {
    /// The maximum of the pipe since the round began, in bytes, which shows whether the window
    /// limits the connection (section 4.5.3).
    pub used: u32,
    /// The measured round trip ends when this is acknowledged. Every ACK outside of a recovery
    /// checks it, and the end of a recovery resets it.
    mark: SeqNr,
    /// HighACK: SND.UNA when that round trip began.
    high_ack: SeqNr,
    /// pipeACK: the largest sample of the last pipeACK Sampling Period, and the tick at which it
    /// was taken. When it is too old, the next sample replaces it, regardless of the samples
    /// between: pipeACK may be less than the maximum of the period, but never more (section 4.2).
    pipe_ack: u32,
    sampled: u32,
    /// The tick since which the window is not validated; 0: it is validated.
    since: u32,
}

/// The part of the window in use when congestion is detected.
#[derive(Clone, Copy)]
pub(crate) struct InUse {
    pub bytes: u32,
    /// The window was not validated (section 4.4.1).
    pub unvalidated: bool,
}

impl WindowValidation {
    pub(crate) const NEW: WindowValidation = WindowValidation {
        used: 0,
        mark: SeqNr(0),
        high_ack: SeqNr(0),
        pipe_ack: UNDEFINED,
        sampled: 0,
        since: 0,
    };

    /// Begins with a validated window, at the start of the connection or after a recovery: the
    /// window counts as validated until there is a sample (sections 4.1, 4.4.1).
    pub(crate) fn begin_validated(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        now: u64,
    ) {
        self.pipe_ack = UNDEFINED;
        self.sampled = to_ticks(now);
        self.mark_validated(window);
        self.begin_round(flight);
    }

    /// Begins to measure a round trip.
    pub(crate) fn begin_round(&mut self, flight: &Flight) {
        (self.high_ack, self.mark) = (flight.una, flight.next);
        self.used = flight.pipe;
    }

    /// Records that new segments were sent; `pipe` bytes are on the wire now.
    #[inline]
    pub(crate) fn on_sent(&mut self, pipe: u32) {
        self.used = self.used.max(pipe);
    }

    /// Returns whether the window was full to within two segments (section 4.5.3). Then it may
    /// grow, validated or not.
    #[inline]
    pub(crate) fn is_limited(&self, window: &CongestionWindow, flight: &Flight) -> bool {
        self.used.saturating_add(2 * flight.mss) > window.cwnd
    }

    /// Returns whether a window that was not full may grow: only in slow start, and while it is
    /// validated (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn may_grow(&self, window: &CongestionWindow) -> bool {
        window.in_slow_start() && self.carried_half_of(window.cwnd)
    }

    /// Returns whether pipeACK is at least half of the window (section 4.3).
    #[inline]
    fn carried_half_of(&self, cwnd: u32) -> bool {
        self.pipe_ack.saturating_mul(2) >= cwnd
    }

    /// Returns whether the measured round trip is over.
    #[inline]
    pub(crate) fn is_round_over(&self, una: SeqNr) -> bool {
        una.ge(self.mark)
    }

    /// Ends a round trip outside of recovery: takes a sample of pipeACK, and decides whether the
    /// window is validated. Returns whether the window was reduced.
    pub(crate) fn measure_round(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        controller: &mut Controller,
        initial: u32,
        now: u64,
    ) -> bool {
        if self.mark == self.high_ack && flight.una != flight.next {
            // The round began with nothing in flight. The bytes covered by its first ACK are not
            // those of a round trip: the round ends with the data now in flight.
            self.mark = flight.next;
            return false;
        }
        let (sample, now) = (flight.una - self.high_ack, to_ticks(now));
        if self.pipe_ack == UNDEFINED
            || sample >= self.pipe_ack
            || now.wrapping_sub(self.sampled) >= sampling_period(flight)
        {
            (self.pipe_ack, self.sampled) = (sample, now);
        }
        self.begin_round(flight);
        self.judge_use(window, flight, controller, initial, now)
    }

    /// Returns whether the last sample may be too old, when new segments are sent after a pause.
    #[inline]
    pub(crate) fn has_rested(&self, now: u64) -> bool {
        to_ticks(now).wrapping_sub(self.sampled) >= SAMPLING
    }

    /// Handles a pause before new segments. Returns whether the window was reduced.
    #[cold]
    pub(crate) fn on_rest(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        controller: &mut Controller,
        initial: u32,
        now: u64,
    ) -> bool {
        let (now, period) = (to_ticks(now), sampling_period(flight));
        // A connection that has not exceeded the initial window needs no validation.
        let initially = self.pipe_ack == UNDEFINED && window.cwnd <= initial;
        if initially || now.wrapping_sub(self.sampled) < period {
            return false;
        }
        self.pipe_ack = 0;
        if self.since == 0 {
            self.since = nonzero_tick(self.sampled.wrapping_add(period));
        }
        self.judge_use(window, flight, controller, initial, now)
    }

    /// Decides whether the window is validated, and reduces one that was not validated for a whole
    /// NVP. Returns whether it was reduced.
    fn judge_use(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        controller: &mut Controller,
        initial: u32,
        now: u32,
    ) -> bool {
        if self.carried_half_of(window.cwnd) {
            self.mark_validated(window);
            return false;
        }
        if self.since == 0 {
            self.since = nonzero_tick(now);
        }
        // A window that is not validated is paced (section 4.4.2). Repeated each time, because the
        // round trip may have become long enough only now.
        window.begin_pacing(flight.srtt);
        if now.wrapping_sub(self.since) < NVP {
            return false;
        }
        // The window is halved for each NVP that passed (section 4.4.3).
        window.ssthresh = window.ssthresh.max(SlowStartThreshold(window.cwnd / 4 * 3));
        let before = window.cwnd;
        while now.wrapping_sub(self.since) >= NVP && window.cwnd > initial {
            window.cwnd = (window.cwnd / 2).max(initial);
            self.since = self.since.wrapping_add(NVP);
        }
        self.since = nonzero_tick(now);
        if self.carried_half_of(window.cwnd) {
            self.mark_validated(window);
        }
        controller.restart_avoidance();
        window.cwnd < before
    }

    /// Returns whether the connection is in the validated phase (section 4.3).
    pub(crate) fn is_validated(&self) -> bool {
        self.since == 0
    }

    /// Enters the validated phase.
    fn mark_validated(&mut self, window: &mut CongestionWindow) {
        self.since = 0;
        window.end_idle_pacing();
    }

    /// Returns the bytes from which a reduction is computed. If the window is not validated, the
    /// larger of pipeACK and the flight size; else the window, or its used part if most of it was
    /// free recently (RFC 9438 section 4.6).
    pub(crate) fn in_use(&self, window: &CongestionWindow, flight: &Flight) -> InUse {
        let size = flight.flight_size();
        if !self.carried_half_of(window.cwnd) {
            return InUse {
                bytes: self.pipe_ack.max(size).min(window.cwnd),
                unvalidated: true,
            };
        }
        let used = self.used.max(size);
        InUse {
            bytes: if used < window.cwnd / 2 {
                used
            } else {
                window.cwnd
            },
            unvalidated: false,
        }
    }
}

impl InUse {
    /// Returns the new slow start threshold after a loss: half of the bytes in use if the window
    /// was not validated (section 4.4.1), else the controller's value.
    pub(crate) fn after_loss(&self, controller: &mut Controller, flight: &Flight) -> u32 {
        let ssthresh = controller.on_loss(self.bytes, flight.flight_size(), flight.mss);
        self.halved_use(flight.mss).unwrap_or(ssthresh)
    }

    /// Returns the new slow start threshold after an echoed mark, as after a loss. DCTCP reduces
    /// the whole window, or the used bytes of one that was not validated, in proportion to the
    /// marked fraction.
    pub(crate) fn after_mark(
        &self,
        window: &CongestionWindow,
        controller: &mut Controller,
        flight: &Flight,
    ) -> u32 {
        let mss = flight.mss;
        if matches!(controller, Controller::Dctcp(_)) {
            let of = if self.unvalidated {
                self.bytes
            } else {
                window.cwnd
            };
            return controller.on_mark(of, flight.flight_size(), mss);
        }
        let ssthresh = controller.on_mark(self.bytes, flight.flight_size(), mss);
        self.halved_use(mss).unwrap_or(ssthresh)
    }

    /// Returns half of the bytes in use, if the window was not validated.
    fn halved_use(&self, mss: u32) -> Option<u32> {
        self.unvalidated.then_some((self.bytes / 2).max(2 * mss))
    }
}

/// Maps tick 0, where 0 has another meaning, to the largest tick.
fn nonzero_tick(tick: u32) -> u32 {
    if tick == 0 { u32::MAX } else { tick }
}

/// Returns the pipeACK Sampling Period (section 4.2).
fn sampling_period(flight: &Flight) -> u32 {
    to_ticks(flight.srtt.saturating_mul(3)).max(SAMPLING)
}
