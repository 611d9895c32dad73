//! CUBIC (RFC 9438): after congestion the window grows as a cubic function of time, fast at first,
//! slowly near the plateau where congestion occurred, then fast again to probe for more.
//!
//! Windows are whole bytes, but an ACK adds less than one byte to a window of many megabytes. The
//! fraction is rounded up with a probability equal to its value, so that a large window grows by
//! the same law as one of ten segments.

use crate::base::time::to_ticks;
use crate::congestion::controller::AckSample;
use crate::congestion::window::MAX_WINDOW;

/// C and beta_cubic (RFC 9438 sections 4.1, 4.6).
const C: f64 = 0.4;
const BETA: f64 = 0.7;
/// alpha_cubic (RFC 9438 section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// A tick in seconds.
const TICK: f64 = (1 << 20) as f64 / 1e9;

/// The state of CUBIC, in 20 bytes. Windows are integers in bytes; an `f32` with its 24-bit
/// mantissa would not do: from 16 MiB on, the increment of an ACK is less than its resolution.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cubic {
    /// W_max; 0: there is no plateau.
    w_max: u32,
    /// K: seconds from the start of the stage to the plateau at W_max.
    k: f32,
    /// W_est: the window of a Reno flow in the same place.
    w_est: u32,
    /// cwnd_prior: the window before the last reduction.
    cwnd_prior: u32,
    /// The tick at which the congestion avoidance stage began; 0: it has not begun. With `HELD`:
    /// the elapsed time of a stage for which no time passes.
    epoch: u32,
}

/// Marks a stage for which no time passes, because the window does not limit the flow.
const HELD: u32 = 1 << 31;

/// Odd multipliers that spread sequence numbers evenly over 32 bits, one for each rounded value.
const SPREAD_WINDOW: u32 = 0x9e37_79b9;
const SPREAD_ESTIMATE: u32 = 0x85eb_ca6b;

/// Rounds a number of bytes to a whole number, at most the largest window. `draw` is uniform over
/// its range, so that the rounding has no bias.
fn round_evenly(bytes: f64, draw: u32) -> u32 {
    let rounded = (bytes + f64::from(draw) / (f64::from(u32::MAX) + 1.0)).floor();
    rounded.min(f64::from(MAX_WINDOW)) as u32
}

impl Cubic {
    /// Returns the new slow start threshold after a loss or a mark, while `cwnd` bytes of the
    /// window were in use (RFC 9438 section 4.6).
    pub(super) fn on_loss(&mut self, cwnd: u32) -> u32 {
        // Fast convergence (section 4.7): a flow that did not reach its plateau makes room for others.
        self.w_max = if cwnd < self.w_max {
            (f64::from(cwnd) * ((1.0 + BETA) / 2.0)) as u32
        } else {
            cwnd
        };
        self.cwnd_prior = cwnd;
        self.epoch = 0;
        (f64::from(cwnd) * BETA) as u32
    }

    /// Removes the plateau after a timeout: the next stage has none above its start (section 4.8).
    pub(super) fn forget_plateau(&mut self) {
        self.w_max = 0;
    }

    /// Lets the next ACK begin a congestion avoidance stage.
    pub(super) fn restart_stage(&mut self) {
        self.epoch = 0;
    }

    /// Stops the time of the stage at `tick`, because the window does not limit the flow (section
    /// 5.8).
    #[inline]
    pub(super) fn hold(&mut self, tick: u32) {
        if self.epoch != 0 && self.epoch & HELD == 0 {
            self.epoch = HELD | self.elapsed_ticks(tick);
        }
    }

    /// Returns the elapsed time of the stage, in ticks.
    fn elapsed_ticks(&self, now: u32) -> u32 {
        if self.epoch & HELD != 0 {
            self.epoch & !HELD
        } else {
            (now & !HELD).wrapping_sub(self.epoch) & !HELD
        }
    }

    /// Grows the window on an ACK in congestion avoidance (section 4.2).
    pub(super) fn on_avoidance_ack(&mut self, cwnd: &mut u32, ack: &AckSample) {
        let mss = f64::from(ack.mss);
        let acked = f64::from(ack.acked);
        let tick = to_ticks(ack.now);
        if self.epoch & HELD != 0 {
            self.epoch = (tick.wrapping_sub(self.elapsed_ticks(tick)) & !HELD).max(1);
        }
        if self.epoch == 0 {
            self.begin_stage(*cwnd, mss, tick);
        }
        let window = f64::from(*cwnd);
        let elapsed = f64::from(self.elapsed_ticks(tick)) * TICK;
        let rtt = ack.srtt as f64 / 1e9;
        let w_cubic =
            |elapsed: f64| C * mss * (elapsed - f64::from(self.k)).powi(3) + f64::from(self.w_max);
        let alpha = if self.w_est >= self.cwnd_prior {
            1.0
        } else {
            ALPHA
        };
        let w_est = f64::from(self.w_est) + alpha * mss * acked / window;
        let new = if w_cubic(elapsed) < w_est {
            window.max(w_est) // Reno-friendly region, section 4.3
        } else {
            let target = w_cubic(elapsed + rtt).clamp(window, 1.5 * window);
            window + (target - window) * (acked / window).min(1.0)
        };
        self.w_est = round_evenly(w_est, ack.una.0.wrapping_mul(SPREAD_ESTIMATE));
        *cwnd = round_evenly(new, ack.una.0.wrapping_mul(SPREAD_WINDOW));
    }

    /// Begins a congestion avoidance stage with this window (section 4.2).
    fn begin_stage(&mut self, cwnd: u32, mss: f64, tick: u32) {
        self.epoch = (tick & !HELD).max(1);
        self.w_est = cwnd;
        if self.w_max > cwnd {
            self.k = (f64::from(self.w_max - cwnd) / (C * mss)).cbrt() as f32;
        } else {
            self.k = 0.0;
            self.w_max = cwnd;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sequence::SeqNr;
    use crate::config::CongestionControl;
    use crate::congestion::controller::Controller;

    const MSS: u32 = 1448;

    /// Returns an ACK of `acked` bytes that advances SND.UNA to `una`.
    fn sample(una: u32, acked: u32, now: u64, srtt: u64) -> AckSample {
        AckSample {
            acked,
            mss: MSS,
            now,
            srtt,
            una: SeqNr(una),
            ..AckSample::default()
        }
    }

    fn ack(
        controller: &mut Controller,
        window: &mut u32,
        mut ssthresh: u32,
        acked: u32,
        now: u64,
        srtt: u64,
    ) {
        controller.on_ack(window, &mut ssthresh, &sample(0, acked, now, srtt));
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
        assert_eq!((late.k, late.w_max), (0.0, ssthresh));
        // Section 4.7: a second loss below the plateau remembers less.
        let half = before / 2;
        cubic.on_loss(half, half, MSS);
        let Controller::Cubic(cubic) = cubic else {
            unreachable!()
        };
        assert!(cubic.w_max < half);
    }

    #[test]
    fn windows_beyond_16_mib_grow_by_the_same_law() {
        // One ACK for every second segment, as from a receiver that delays ACKs.
        let (acked, rtt) = (2 * MSS, 20_000_000u64);
        for before in [1 << 20, 1 << 24, 1 << 26, 1 << 29] {
            let mut cubic = Cubic::default();
            let mut window = cubic.on_loss(before);
            let start = window;
            let begin = 1_000_000_000u64;
            let (mut now, mut sent, mut una) = (begin, 0, 0u32);
            for _ in 0..20 {
                let round = window;
                while sent < round {
                    una = una.wrapping_add(acked);
                    cubic.on_avoidance_ack(&mut window, &sample(una, acked, now, rtt));
                    sent += acked;
                }
                (sent, now) = (sent - round, now + rtt);
            }
            let mss = f64::from(MSS);
            let k = (f64::from(before - start) / (C * mss)).cbrt();
            let elapsed = (now - begin) as f64 / 1e9;
            let cubic_law = C * mss * (elapsed - k).powi(3) + f64::from(before);
            // W_est grows by ALPHA segments per round trip.
            let reno_law = f64::from(start) + 20.0 * ALPHA * mss;
            let expected = cubic_law.max(reno_law) - f64::from(start);
            let ratio = f64::from(window - start) / expected;
            assert!((0.9..1.1).contains(&ratio), "{before}: {ratio}");
        }
    }

    #[test]
    fn the_reno_friendly_window_grows_beyond_16_mib() {
        let mut window = 1 << 28;
        let mut cubic = Cubic {
            cwnd_prior: u32::MAX,
            ..Cubic::default()
        };
        cubic.begin_stage(window, f64::from(MSS), 1);
        // The plateau is far ahead: W_cubic is below W_est.
        cubic.k = 1000.0;
        let (start, mut una) = (window, 0u32);
        for _ in 0..30 * (start / MSS) {
            una = una.wrapping_add(MSS);
            cubic.on_avoidance_ack(&mut window, &sample(una, MSS, 1 << 21, 1_000_000));
        }
        let segments = f64::from(window - start) / f64::from(MSS);
        assert!((segments / (30.0 * ALPHA) - 1.0).abs() < 0.02, "{segments}");
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
