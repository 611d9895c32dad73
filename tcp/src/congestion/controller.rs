//! Congestion control: how the window grows and shrinks. One enum, no dynamic dispatch.

use crate::base::sequence::SeqNr;
use crate::base::time::to_ticks;
use crate::config::CongestionControl;
use crate::congestion::hystart::HyStart;

/// RFC 9438 section 4.1: C, beta.
const C: f64 = 0.4;
const BETA: f64 = 0.7;
/// RFC 9438 section 4.3.
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// A tick in seconds.
const TICK: f64 = (1 << 20) as f64 / 1e9;

/// Kept below half the sequence space with room for arithmetic.
const MAX_WINDOW: u32 = 1 << 30;

#[derive(Clone, Copy)]
pub(crate) enum Controller {
    NewReno {
        acked: u32,
    },
    /// CUBIC before its first congestion event: slow start that looks ahead.
    HyStart(HyStart),
    Cubic(Cubic),
    Dctcp(Dctcp),
}

/// What an ACK tells a controller.
#[derive(Clone, Copy, Default)]
pub(crate) struct AckSample {
    /// Bytes that arrived at the peer.
    pub acked: u32,
    pub mss: u32,
    pub now: u64,
    pub srtt: u64,
    /// This ACK's own sample, 0: none.
    pub rtt: u64,
    pub una: SeqNr,
    pub nxt: SeqNr,
}

/// RFC 8257: how many bytes were marked decides how far the window shrinks.
#[derive(Clone, Copy)]
pub(crate) struct Dctcp {
    /// DCTCP.Alpha.
    alpha: f32,
    bytes: u32,
    marked: u32,
    /// Bytes towards the next segment of growth.
    grown: u32,
    /// DCTCP.WindowEnd.
    window_end: SeqNr,
}

/// Section 4.2: estimation gain g.
const GAIN: f32 = 1.0 / 16.0;

impl Dctcp {
    #[inline]
    pub(crate) fn on_acked(&mut self, bytes: u32, marked: bool, una: SeqNr, nxt: SeqNr) {
        self.bytes = self.bytes.saturating_add(bytes);
        if marked {
            self.marked = self.marked.saturating_add(bytes);
        }
        if una.gt(self.window_end) {
            self.end_window();
            self.window_end = nxt;
        }
    }

    pub(crate) fn begin_window(&mut self, una: SeqNr) {
        self.window_end = una;
    }

    /// An observation window ended (section 3.3 steps 5 to 8).
    fn end_window(&mut self) {
        if self.bytes > 0 {
            let mss_bytes = self.marked as f32 / self.bytes as f32;
            self.alpha += GAIN * (mss_bytes - self.alpha);
        }
        (self.bytes, self.marked) = (0, 0);
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Cubic {
    /// In bytes, 0: no congestion event yet.
    w_max: f32,
    /// Seconds until the plateau.
    k: f32,
    /// The window a Reno flow would have, in bytes.
    w_est: f32,
    cwnd_prior: f32,
    /// Start of the congestion avoidance stage in ticks, 0: not started. With `HELD`: the time
    /// that it has lasted, not passing now.
    epoch: u32,
}

/// The flow is limited by something else than its window.
const HELD: u32 = 1 << 31;

impl Controller {
    pub(crate) fn new(which: CongestionControl) -> Self {
        match which {
            CongestionControl::NewReno => Controller::NewReno { acked: 0 },
            CongestionControl::Cubic => Controller::HyStart(HyStart::default()),
            // Section 4.2: alpha starts at 1.
            CongestionControl::Dctcp => Controller::Dctcp(Dctcp {
                alpha: 1.0,
                bytes: 0,
                marked: 0,
                grown: 0,
                window_end: SeqNr(0),
            }),
        }
    }

    /// New bytes arrived at the peer while the window was in full use.
    #[inline]
    pub(crate) fn on_ack(&mut self, cwnd: &mut u32, ssthresh: &mut u32, ack: &AckSample) {
        if *cwnd < *ssthresh {
            // Slow start. ACKs are coalesced per batch, so all acked bytes count (RFC 3465 with
            // no limit, as Linux); what crosses ssthresh waits for the next ACK.
            let grow = match self {
                Controller::HyStart(hystart) => hystart.slow_start(ack, *cwnd, ssthresh),
                _ => ack.acked,
            };
            *cwnd = (*cwnd)
                .saturating_add(grow)
                .min((*ssthresh).max(*cwnd))
                .min(MAX_WINDOW);
            return;
        }
        match self {
            Controller::NewReno { acked: sum } | Controller::Dctcp(Dctcp { grown: sum, .. }) => {
                *sum = sum.saturating_add(ack.acked);
                if *sum >= *cwnd {
                    *sum -= *cwnd;
                    *cwnd = cwnd.saturating_add(ack.mss).min(MAX_WINDOW);
                }
            }
            Controller::HyStart(_) => {
                let mut cubic = Cubic::default();
                cubic.on_avoidance_ack(cwnd, ack.acked, ack.mss, ack.now, ack.srtt);
                *self = Controller::Cubic(cubic);
            }
            Controller::Cubic(cubic) => {
                cubic.on_avoidance_ack(cwnd, ack.acked, ack.mss, ack.now, ack.srtt)
            }
        }
    }

    /// The peer echoed a mark: the new ssthresh (RFC 3168 section 6.1.2, RFC 8257 section 3.3).
    pub(crate) fn on_mark(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        if let Controller::Dctcp(dctcp) = self {
            let cut = (cwnd as f32 * dctcp.alpha / 2.0) as u32;
            return cwnd.saturating_sub(cut).max(2 * mss);
        }
        self.on_loss(cwnd, in_flight, mss)
    }

    /// A loss was found: the new ssthresh (RFC 5681 section 3.1 (4), RFC 9438 section 4.6).
    pub(crate) fn on_loss(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        let floor = 2 * mss;
        if let Controller::HyStart(_) = self {
            *self = Controller::Cubic(Cubic::default());
        }
        match self {
            Controller::HyStart(_) => floor,
            // RFC 8257 section 3.5: a loss is answered as ever.
            Controller::NewReno { acked } | Controller::Dctcp(Dctcp { grown: acked, .. }) => {
                *acked = 0;
                (in_flight.min(cwnd) / 2).max(floor)
            }
            Controller::Cubic(cubic) => {
                let window = cwnd as f32;
                // Fast convergence, section 4.7.
                cubic.w_max = if window < cubic.w_max {
                    window * ((1.0 + BETA as f32) / 2.0)
                } else {
                    window
                };
                cubic.cwnd_prior = window;
                cubic.epoch = 0;
                ((f64::from(cwnd) * BETA) as u32).max(floor)
            }
        }
    }

    /// A retransmission timeout: the new ssthresh. CUBIC begins anew where slow start ends, with no
    /// plateau above it (RFC 9438 section 4.8).
    pub(crate) fn on_timeout(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        let ssthresh = self.on_loss(cwnd, in_flight, mss);
        if let Controller::Cubic(cubic) = self {
            cubic.w_max = 0.0;
        }
        ssthresh
    }

    /// The window is not what limits the flow: until it is again, no time passes for CUBIC
    /// (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn on_limited(&mut self, now: u64) {
        if let Controller::Cubic(cubic) = self
            && cubic.epoch != 0
            && cubic.epoch & HELD == 0
        {
            cubic.epoch = HELD | cubic.elapsed_ticks(to_ticks(now));
        }
    }

    /// The window was reduced for what it was not used for: congestion avoidance begins anew.
    pub(crate) fn restart_avoidance(&mut self) {
        if let Controller::Cubic(cubic) = self {
            cubic.epoch = 0;
        }
    }
}

impl Cubic {
    /// How long the stage has lasted, in ticks.
    fn elapsed_ticks(&self, now: u32) -> u32 {
        if self.epoch & HELD != 0 {
            self.epoch & !HELD
        } else {
            (now & !HELD).wrapping_sub(self.epoch) & !HELD
        }
    }

    fn on_avoidance_ack(&mut self, cwnd: &mut u32, acked: u32, mss: u32, now: u64, srtt: u64) {
        let window = f64::from(*cwnd);
        let mss_bytes = f64::from(mss);
        let tick = to_ticks(now);
        if self.epoch & HELD != 0 {
            self.epoch = (tick.wrapping_sub(self.elapsed_ticks(tick)) & !HELD).max(1);
        }
        if self.epoch == 0 {
            self.epoch = (tick & !HELD).max(1);
            self.w_est = *cwnd as f32;
            if f64::from(self.w_max) > window {
                self.k = ((f64::from(self.w_max) - window) / (C * mss_bytes)).cbrt() as f32;
            } else {
                self.k = 0.0;
                self.w_max = *cwnd as f32;
            }
        }
        let elapsed = f64::from(self.elapsed_ticks(tick)) * TICK;
        let rtt = srtt as f64 / 1e9;
        let at = |elapsed: f64| {
            C * mss_bytes * (elapsed - f64::from(self.k)).powi(3) + f64::from(self.w_max)
        };
        let alpha = if self.w_est >= self.cwnd_prior {
            1.0
        } else {
            ALPHA
        };
        self.w_est = (f64::from(self.w_est) + alpha * mss_bytes * f64::from(acked) / window) as f32;
        let est = f64::from(self.w_est);
        let new = if at(elapsed) < est {
            window.max(est) // Reno-friendly region, section 4.3
        } else {
            let target = at(elapsed + rtt).clamp(window, 1.5 * window);
            window + (target - window) * (f64::from(acked) / window).min(1.0)
        };
        *cwnd = (new as u32).min(MAX_WINDOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1448;

    fn ack(
        cubic: &mut Controller,
        window: &mut u32,
        mut ssthresh: u32,
        acked: u32,
        now: u64,
        srtt: u64,
    ) {
        let ack = AckSample {
            acked,
            mss: MSS,
            now,
            srtt,
            ..AckSample::default()
        };
        cubic.on_ack(window, &mut ssthresh, &ack);
    }

    #[test]
    fn dctcp_shrinks_by_the_marked_share_rfc_8257_3_3() {
        let mut cubic = Controller::new(CongestionControl::Dctcp);
        let window = 100 * MSS;
        assert_eq!(
            cubic.on_mark(window, window, MSS),
            window / 2,
            "alpha starts at 1"
        );
        // A tenth of the bytes is marked, for long.
        for _ in 0..200 {
            let Controller::Dctcp(dctcp) = &mut cubic else {
                unreachable!()
            };
            dctcp.on_acked(9 * MSS, false, SeqNr(0), SeqNr(0));
            dctcp.on_acked(MSS, true, SeqNr(1), SeqNr(0));
        }
        let after = f64::from(cubic.on_mark(window, window, MSS)) / f64::from(window);
        assert!((after - 0.95).abs() < 0.001, "{after}");
        assert_eq!(
            cubic.on_loss(window, window, MSS),
            window / 2,
            "section 3.5"
        );
    }

    #[test]
    fn slow_start_doubles_each_round_trip_rfc_5681_3_1() {
        for which in [CongestionControl::Cubic, CongestionControl::NewReno] {
            let mut cubic = Controller::new(which);
            let mut window = 10 * MSS;
            ack(&mut cubic, &mut window, u32::MAX, 10 * MSS, 1, 1000);
            assert_eq!(window, 20 * MSS);
        }
    }

    #[test]
    fn new_reno_adds_a_segment_a_round_and_halves() {
        let mut cubic = Controller::new(CongestionControl::NewReno);
        let mut window = 20 * MSS;
        for _ in 0..20 {
            ack(&mut cubic, &mut window, 10 * MSS, MSS, 1, 1000);
        }
        assert_eq!(window, 21 * MSS);
        assert_eq!(cubic.on_loss(window, window, MSS), window / 2);
    }

    #[test]
    fn cubic_returns_to_its_plateau_after_k_rfc_9438_4_2() {
        let mut cubic = Controller::new(CongestionControl::Cubic);
        let before = 1000 * MSS;
        let mut window = cubic.on_loss(before, before, MSS);
        assert_eq!(window, (f64::from(before) * 0.7) as u32, "section 4.6");
        let ssthresh = window;
        let k = (300.0f64 / 0.4).cbrt();
        let rtt = 100_000_000u64;
        let mut now = 1_000_000_000u64;
        let end = now + (k * 1e9) as u64;
        while now < end {
            let acked = window;
            ack(&mut cubic, &mut window, ssthresh, acked, now, rtt);
            now += rtt;
        }
        let ratio = f64::from(window) / f64::from(before);
        assert!((0.97..1.1).contains(&ratio), "{ratio}");
        // Section 4.8: after a timeout growth is convex from where slow start ends.
        let mut late = cubic;
        let ssthresh = late.on_timeout(before, before, MSS);
        let mut window = ssthresh;
        ack(&mut late, &mut window, ssthresh, MSS, now, rtt);
        let Controller::Cubic(late) = late else {
            unreachable!()
        };
        assert_eq!((late.k, late.w_max), (0.0, ssthresh as f32));
        // Section 4.7: a second loss below the plateau remembers less.
        let half = before / 2;
        cubic.on_loss(half, half, MSS);
        let Controller::Cubic(cubic) = cubic else {
            unreachable!()
        };
        assert!(cubic.w_max < half as f32);
    }

    #[test]
    fn an_unused_window_does_not_grow_rfc_9438_5_8() {
        let before = 1000 * MSS;
        let rtt = 50_000_000u64;
        let run = |pauses: bool| {
            let mut cubic = Controller::new(CongestionControl::Cubic);
            let mut window = cubic.on_loss(before, before, MSS);
            let ssthresh = window;
            let mut now = 1_000_000_000u64;
            for round in 0..400 {
                let acked = window;
                ack(&mut cubic, &mut window, ssthresh, acked, now, rtt);
                now += rtt;
                if pauses && round % 10 == 0 {
                    // Limited by the application, then idle.
                    for _ in 0..20 {
                        cubic.on_limited(now);
                        now += 500_000_000;
                    }
                }
            }
            window
        };
        let (straight, paused) = (f64::from(run(false)), f64::from(run(true)));
        assert!(
            straight > 1.3 * f64::from(before),
            "convex by then: {straight}"
        );
        let ratio = paused / straight;
        assert!((0.95..1.01).contains(&ratio), "{ratio}");
    }
}
