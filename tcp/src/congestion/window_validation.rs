//! Congestion window validation (RFC 7661): how much of the window the path was seen to carry of
//! late. A window that is not in use is kept for five minutes; until it is used again it does not
//! grow, bursts of it are spread over the round trip, and congestion takes it back to what was in
//! use. Asked by [`CongestionState`](super::CongestionState) once a round trip, before new segments when nothing is in flight, and by whoever
//! answers congestion.

use crate::base::sequence::SeqNr;
use crate::base::time::to_ticks;
use crate::congestion::controller::Controller;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};

/// pipeACK's "undefined" value (section 4.1).
const UNDEFINED: u32 = u32::MAX;
/// Least pipeACK Sampling Period, 1 s (section 4.2), in ticks.
const SAMPLING: u32 = 954;
/// The Non-Validated Period (NVP), 5 minutes (section 4.4.3), in ticks.
const NVP: u32 = 286_103;

/// Times are ticks, see [`ticks`].
#[derive(Clone, Copy)]
pub(crate) struct WindowValidation {
    /// Most bytes in the pipe since `mark` was passed: tells who is limited by the window
    /// (section 4.5.3).
    pub used: u32,
    /// The round trip that is measured ends when this is acknowledged,
    mark: SeqNr,
    /// and began when this was (HighACK).
    high_ack: SeqNr,
    /// The largest sample of the last pipeACK Sampling Period, and when it was taken. When it is too
    /// old the next one takes its place, whatever came between: pipeACK may be less than the
    /// maximum of the period, never more (section 4.2).
    pipe_ack: u32,
    sampled: u32,
    /// Since when the window is not validated, 0: it is.
    since: u32,
}

/// What congestion finds in use.
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

    /// The connection begins, or a recovery ended: the window is validated until the next sample
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

    /// A round trip begins to be measured.
    pub(crate) fn begin_round(&mut self, flight: &Flight) {
        (self.high_ack, self.mark) = (flight.una, flight.next);
        self.used = flight.pipe;
    }

    #[inline]
    pub(crate) fn on_sent(&mut self, pipe: u32) {
        self.used = self.used.max(pipe);
    }

    /// The window was full, but for what no segment fits into (section 4.5.3). It may then grow in
    /// either phase.
    #[inline]
    pub(crate) fn is_limited(&self, window: &CongestionWindow, flight: &Flight) -> bool {
        self.used.saturating_add(2 * flight.mss) > window.cwnd
    }

    /// It may grow also when it was not full: in slow start, while it is validated. Beyond slow
    /// start not (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn may_grow(&self, window: &CongestionWindow) -> bool {
        window.in_slow_start() && self.carried_half_of(window.cwnd)
    }

    /// pipeACK >= cwnd / 2 (section 4.3).
    #[inline]
    fn carried_half_of(&self, cwnd: u32) -> bool {
        self.pipe_ack.saturating_mul(2) >= cwnd
    }

    #[inline]
    pub(crate) fn is_round_over(&self, una: SeqNr) -> bool {
        una.ge(self.mark)
    }

    /// SND.UNA passed `mark` outside of recoveries: takes a sample and judges. Returns whether
    /// the window was adjusted.
    pub(crate) fn measure_round(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        controller: &mut Controller,
        initial: u32,
        now: u64,
    ) -> bool {
        if self.mark == self.high_ack && flight.una != flight.next {
            // It began with nothing in flight: the first ACK alone is no round trip's volume.
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

    /// New segments are about to leave after a pause that may have outlasted the samples.
    #[inline]
    pub(crate) fn has_rested(&self, now: u64) -> bool {
        to_ticks(now).wrapping_sub(self.sampled) >= SAMPLING
    }

    /// They did. Returns whether the window was adjusted.
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
        // The initial window needs no validation.
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

    /// Says whether the window is validated, and reduces one that was not for a whole NVP. Returns
    /// whether it did.
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
        // Section 4.4.2, also where the round trip has become long enough only now.
        window.begin_pacing(flight.srtt);
        if now.wrapping_sub(self.since) < NVP {
            return false;
        }
        // Section 4.4.3, for each period that passed.
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

    /// The validated phase.
    pub(crate) fn is_validated(&self) -> bool {
        self.since == 0
    }

    fn mark_validated(&mut self, window: &mut CongestionWindow) {
        self.since = 0;
        window.end_idle_pacing();
    }

    /// What congestion reduces: pipeACK or what is in flight when the window is not validated;
    /// else the window, unless most of it was free of late (RFC 9438 section 4.6).
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

    /// As `after_loss`, for a mark. DCTCP knows how much was marked.
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

    fn halved_use(&self, mss: u32) -> Option<u32> {
        self.unvalidated.then_some((self.bytes / 2).max(2 * mss))
    }
}

/// A tick that is not 0.
fn nonzero_tick(tick: u32) -> u32 {
    if tick == 0 { u32::MAX } else { tick }
}

/// The pipeACK Sampling Period (section 4.2).
fn sampling_period(flight: &Flight) -> u32 {
    to_ticks(flight.srtt.saturating_mul(3)).max(SAMPLING)
}
