//! Congestion window validation (RFC 7661): how much of the window the path was seen to carry of
//! late. A window that is not in use is kept for five minutes; until it is used again it does not
//! grow, bursts of it are spread over the round trip, and congestion takes it back to what was in
//! use. Called by `ack` once a round trip, by `output` when nothing is in flight, and by whoever
//! answers congestion.

use crate::base::sequence::SeqNr;
use crate::base::time::ticks;
use crate::congestion::controller::Controller;
use crate::congestion::pacing;
use crate::connection::{Hot, flag};

/// pipeACK's "undefined" value (section 4.1).
const UNDEFINED: u32 = u32::MAX;
/// Least pipeACK Sampling Period, 1 s (section 4.2), in ticks.
const SAMPLING: u32 = 954;
/// The Non-Validated Period (NVP), 5 minutes (section 4.4.3), in ticks.
const NVP: u32 = 286_103;

/// Times are ticks, see [`ticks`].
#[derive(Clone, Copy)]
pub(crate) struct Validation {
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

impl Validation {
    pub(crate) const NEW: Validation = Validation {
        used: 0,
        mark: SeqNr(0),
        high_ack: SeqNr(0),
        pipe_ack: UNDEFINED,
        sampled: 0,
        since: 0,
    };

    /// The connection begins, or a recovery ended: the window is validated until the next sample
    /// (sections 4.1, 4.4.1).
    pub(crate) fn begin(&mut self, h: &mut Hot, now: u64) {
        self.pipe_ack = UNDEFINED;
        self.sampled = ticks(now);
        self.validated(h);
        self.round(h);
    }

    /// A round trip begins to be measured.
    pub(crate) fn round(&mut self, h: &Hot) {
        (self.high_ack, self.mark) = (h.snd_una, h.snd_nxt);
        self.used = h.pipe;
    }

    #[inline]
    pub(crate) fn sent(&mut self, pipe: u32) {
        self.used = self.used.max(pipe);
    }

    /// The window was full, but for what no segment fits into (section 4.5.3). It may then grow in
    /// either phase.
    #[inline]
    pub(crate) fn limited(&self, h: &Hot) -> bool {
        self.used.saturating_add(2 * u32::from(h.emss)) > h.cwnd
    }

    /// It may grow also when it was not full: in slow start, while it is validated. Beyond slow
    /// start not (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn grows(&self, h: &Hot) -> bool {
        h.cwnd < h.ssthresh && self.carries(h.cwnd)
    }

    /// pipeACK >= cwnd / 2 (section 4.3).
    #[inline]
    fn carries(&self, cwnd: u32) -> bool {
        self.pipe_ack.saturating_mul(2) >= cwnd
    }

    #[inline]
    pub(crate) fn round_ended(&self, una: SeqNr) -> bool {
        una.ge(self.mark)
    }

    /// SND.UNA passed `mark` outside of recoveries: takes a sample and judges. Returns whether
    /// the window was adjusted.
    pub(crate) fn measure(
        &mut self,
        h: &mut Hot,
        cc: &mut Controller,
        initial: u32,
        now: u64,
    ) -> bool {
        if self.mark == self.high_ack && h.snd_una != h.snd_nxt {
            // It began with nothing in flight: the first ACK alone is no round trip's volume.
            self.mark = h.snd_nxt;
            return false;
        }
        let (sample, now) = (h.snd_una - self.high_ack, ticks(now));
        if self.pipe_ack == UNDEFINED
            || sample >= self.pipe_ack
            || now.wrapping_sub(self.sampled) >= period(h)
        {
            (self.pipe_ack, self.sampled) = (sample, now);
        }
        self.round(h);
        self.judge(h, cc, initial, now)
    }

    /// New segments are about to leave after a pause that may have outlasted the samples.
    #[inline]
    pub(crate) fn rested(&self, now: u64) -> bool {
        ticks(now).wrapping_sub(self.sampled) >= SAMPLING
    }

    /// They did. Returns whether the window was adjusted.
    #[cold]
    pub(crate) fn rest(
        &mut self,
        h: &mut Hot,
        cc: &mut Controller,
        initial: u32,
        now: u64,
    ) -> bool {
        let (now, period) = (ticks(now), period(h));
        // The initial window needs no validation.
        let initially = self.pipe_ack == UNDEFINED && h.cwnd <= initial;
        if initially || now.wrapping_sub(self.sampled) < period {
            return false;
        }
        self.pipe_ack = 0;
        if self.since == 0 {
            self.since = moment(self.sampled.wrapping_add(period));
        }
        self.judge(h, cc, initial, now)
    }

    fn judge(&mut self, h: &mut Hot, cc: &mut Controller, initial: u32, now: u32) -> bool {
        if self.carries(h.cwnd) {
            self.validated(h);
            return false;
        }
        if self.since == 0 {
            self.since = moment(now);
        }
        // Section 4.4.2, also where the round trip has become long enough only now.
        pacing::begin(h);
        if now.wrapping_sub(self.since) < NVP {
            return false;
        }
        // Section 4.4.3, for each period that passed.
        h.ssthresh = h.ssthresh.max(h.cwnd / 4 * 3);
        let before = h.cwnd;
        while now.wrapping_sub(self.since) >= NVP && h.cwnd > initial {
            h.cwnd = (h.cwnd / 2).max(initial);
            self.since = self.since.wrapping_add(NVP);
        }
        self.since = moment(now);
        if self.carries(h.cwnd) {
            self.validated(h);
        }
        cc.restart();
        h.cwnd < before
    }

    /// The validated phase.
    pub(crate) fn is_validated(&self) -> bool {
        self.since == 0
    }

    fn validated(&mut self, h: &mut Hot) {
        self.since = 0;
        if h.ssthresh == pacing::INFINITE {
            h.ssthresh = u32::MAX;
            h.flags &= !flag::PACED;
        }
    }

    /// What congestion reduces: pipeACK or what is in flight when the window is not validated;
    /// else the window, unless most of it was free of late (RFC 9438 section 4.6).
    pub(crate) fn in_use(&self, h: &Hot) -> InUse {
        let flight = h.flight();
        if !self.carries(h.cwnd) {
            return InUse {
                bytes: self.pipe_ack.max(flight).min(h.cwnd),
                unvalidated: true,
            };
        }
        let used = self.used.max(flight);
        InUse {
            bytes: if used < h.cwnd / 2 { used } else { h.cwnd },
            unvalidated: false,
        }
    }
}

impl InUse {
    /// The new slow start threshold after a loss: of a window that was not validated half of what
    /// was in use (section 4.4.1), else as the controller says.
    pub(crate) fn after_loss(&self, h: &Hot, cc: &mut Controller) -> u32 {
        let mss = u32::from(h.emss);
        let ssthresh = cc.on_loss(self.bytes, h.flight(), mss);
        self.halved(mss).unwrap_or(ssthresh)
    }

    /// As `after_loss`, for a mark. DCTCP knows how much was marked.
    pub(crate) fn after_mark(&self, h: &Hot, cc: &mut Controller) -> u32 {
        let mss = u32::from(h.emss);
        if matches!(cc, Controller::Dctcp(_)) {
            let of = if self.unvalidated { self.bytes } else { h.cwnd };
            return cc.on_mark(of, h.flight(), mss);
        }
        let ssthresh = cc.on_mark(self.bytes, h.flight(), mss);
        self.halved(mss).unwrap_or(ssthresh)
    }

    fn halved(&self, mss: u32) -> Option<u32> {
        self.unvalidated.then_some((self.bytes / 2).max(2 * mss))
    }
}

/// A tick that is not 0.
fn moment(tick: u32) -> u32 {
    if tick == 0 { u32::MAX } else { tick }
}

/// The pipeACK Sampling Period (section 4.2).
fn period(h: &Hot) -> u32 {
    ticks(h.rtt.srtt.saturating_mul(3)).max(SAMPLING)
}
