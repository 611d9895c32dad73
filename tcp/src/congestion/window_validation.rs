//! Congestion window validation (RFC 7661): how much of the window the path was seen to carry of
//! late. A window that is not in use is kept for five minutes. Until it is used again it does not
//! grow, what is sent is spread over the round trip, and congestion reduces it to what was in use.
//!
//! [`CongestionState`](super::CongestionState) asks once a round trip, before new segments when nothing
//! is in flight, and when the window is to be reduced.

use crate::base::sequence::SeqNr;
use crate::base::time::to_ticks;
use crate::congestion::controller::Controller;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};

/// The "undefined" value of pipeACK (section 4.1).
const UNDEFINED: u32 = u32::MAX;
/// The least pipeACK Sampling Period, 1 s (section 4.2), in ticks.
const SAMPLING: u32 = 954;
/// The Non-Validated Period (NVP), 5 minutes (section 4.4.3), in ticks.
const NVP: u32 = 286_103;

/// How much of the window is in use. Times are ticks (see [`to_ticks`]).
#[derive(Clone, Copy)]
pub(crate) struct WindowValidation {
    /// The most bytes that were in the pipe since the round began, which shows whether the window is what
    /// limits the connection (section 4.5.3).
    pub used: u32,
    /// The round trip that is measured ends when this is acknowledged. Every ACK outside of a recovery looks
    /// at it, and the end of a recovery sets it anew.
    mark: SeqNr,
    /// HighACK: SND.UNA when that round trip began.
    high_ack: SeqNr,
    /// pipeACK: the largest sample of the last pipeACK Sampling Period, and when it was taken. When it is
    /// too old the next sample takes its place, whatever came between: pipeACK may be less than the
    /// maximum of the period, but never more (section 4.2).
    pipe_ack: u32,
    sampled: u32,
    /// Since when the window is not validated; 0: it is validated.
    since: u32,
}

/// What is in use of the window when congestion is found.
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

    /// The connection begins, or a recovery ended: the window counts as validated until there is a sample
    /// (sections 4.1, 4.4.1).
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

    /// New segments were sent; `pipe` bytes are on the wire now.
    #[inline]
    pub(crate) fn on_sent(&mut self, pipe: u32) {
        self.used = self.used.max(pipe);
    }

    /// Whether the window was full, up to what no segment fits into (section 4.5.3). Then it may grow,
    /// validated or not.
    #[inline]
    pub(crate) fn is_limited(&self, window: &CongestionWindow, flight: &Flight) -> bool {
        self.used.saturating_add(2 * flight.mss) > window.cwnd
    }

    /// Whether a window that was not full may grow: in slow start, while it is validated. Beyond slow start
    /// it may not (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn may_grow(&self, window: &CongestionWindow) -> bool {
        window.in_slow_start() && self.carried_half_of(window.cwnd)
    }

    /// Whether pipeACK is at least half of the window (section 4.3).
    #[inline]
    fn carried_half_of(&self, cwnd: u32) -> bool {
        self.pipe_ack.saturating_mul(2) >= cwnd
    }

    /// Whether the round trip that is measured is over.
    #[inline]
    pub(crate) fn is_round_over(&self, una: SeqNr) -> bool {
        una.ge(self.mark)
    }

    /// The round trip is over, and there is no recovery: takes a sample of pipeACK, and decides whether the
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
            // The round began with nothing in flight. What its first ACK covers is not what a round trip
            // carries: the round ends with what is in flight now.
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

    /// Whether the last sample may be too old, now that new segments are about to be sent after a pause.
    #[inline]
    pub(crate) fn has_rested(&self, now: u64) -> bool {
        to_ticks(now).wrapping_sub(self.sampled) >= SAMPLING
    }

    /// New segments are about to be sent after a pause. Returns whether the window was reduced.
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
        // A connection that has not sent more than the initial window needs no validation.
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

    /// Decides whether the window is validated, and reduces one that was not for a whole NVP. Returns
    /// whether it was reduced.
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
        // A window that is not validated is paced (section 4.4.2). This is repeated each time, since the round
        // trip may have become long enough only now.
        window.begin_pacing(flight.srtt);
        if now.wrapping_sub(self.since) < NVP {
            return false;
        }
        // For each NVP that passed the window is halved (section 4.4.3).
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

    /// Whether the connection is in the validated phase (section 4.3).
    pub(crate) fn is_validated(&self) -> bool {
        self.since == 0
    }

    /// Enters the validated phase.
    fn mark_validated(&mut self, window: &mut CongestionWindow) {
        self.since = 0;
        window.end_idle_pacing();
    }

    /// What a reduction is computed from: pipeACK or what is in flight if the window is not validated; else
    /// the window, unless most of it was free of late (RFC 9438 section 4.6).
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
    /// The new slow start threshold after a loss: of a window that was not validated half of what
    /// was in use (section 4.4.1), else as the controller says.
    pub(crate) fn after_loss(&self, controller: &mut Controller, flight: &Flight) -> u32 {
        let ssthresh = controller.on_loss(self.bytes, flight.flight_size(), flight.mss);
        self.halved_use(flight.mss).unwrap_or(ssthresh)
    }

    /// The new slow start threshold after an echoed mark, as after a loss. DCTCP reduces the whole window by
    /// the share of it that was marked.
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

    /// Half of what was in use, of a window that was not validated.
    fn halved_use(&self, mss: u32) -> Option<u32> {
        self.unvalidated.then_some((self.bytes / 2).max(2 * mss))
    }
}

/// The tick, which is never 0 where 0 has another meaning.
fn nonzero_tick(tick: u32) -> u32 {
    if tick == 0 { u32::MAX } else { tick }
}

/// The pipeACK Sampling Period (section 4.2).
fn sampling_period(flight: &Flight) -> u32 {
    to_ticks(flight.srtt.saturating_mul(3)).max(SAMPLING)
}
