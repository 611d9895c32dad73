//! Congestion control: how the window grows and shrinks. One enum, no dynamic dispatch.

use crate::Congestion;

/// RFC 9438 section 4.1: C, beta.
const C: f64 = 0.4;
const BETA: f64 = 0.7;
/// RFC 9438 section 4.3.
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// Kept below half the sequence space with room for arithmetic.
const MAX_WINDOW: u32 = 1 << 30;

#[derive(Clone, Copy)]
pub(crate) enum Controller {
    NewReno { acked: u32 },
    Cubic(Cubic),
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
    /// Start of the congestion avoidance stage, 0: not started.
    epoch: u64,
}

impl Controller {
    pub(crate) fn new(which: Congestion) -> Self {
        match which {
            Congestion::NewReno => Controller::NewReno { acked: 0 },
            Congestion::Cubic => Controller::Cubic(Cubic::default()),
        }
    }

    /// `acked` new bytes arrived at the peer while the window was in full use.
    #[inline]
    pub(crate) fn on_ack(
        &mut self,
        cwnd: &mut u32,
        ssthresh: u32,
        acked: u32,
        mss: u32,
        now: u64,
        srtt: u64,
    ) {
        if *cwnd < ssthresh {
            // Slow start. ACKs are coalesced per batch, so all acked bytes count (RFC 3465 with
            // no limit, as Linux); what crosses ssthresh waits for the next ACK.
            *cwnd = (*cwnd).saturating_add(acked).min(ssthresh).min(MAX_WINDOW);
            return;
        }
        match self {
            Controller::NewReno { acked: sum } => {
                *sum = sum.saturating_add(acked);
                if *sum >= *cwnd {
                    *sum -= *cwnd;
                    *cwnd = cwnd.saturating_add(mss).min(MAX_WINDOW);
                }
            }
            Controller::Cubic(c) => c.avoid(cwnd, acked, mss, now, srtt),
        }
    }

    /// A loss was found: the new ssthresh (RFC 5681 section 3.1 (4), RFC 9438 section 4.6).
    pub(crate) fn on_loss(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        let floor = 2 * mss;
        match self {
            Controller::NewReno { acked } => {
                *acked = 0;
                (in_flight.min(cwnd) / 2).max(floor)
            }
            Controller::Cubic(c) => {
                let w = cwnd as f32;
                // Fast convergence, section 4.7.
                c.w_max = if w < c.w_max {
                    w * ((1.0 + BETA as f32) / 2.0)
                } else {
                    w
                };
                c.cwnd_prior = w;
                c.epoch = 0;
                ((f64::from(cwnd) * BETA) as u32).max(floor)
            }
        }
    }

    /// The flow was idle: time spent silent must not count as growth (RFC 9438 section 5.8).
    pub(crate) fn on_idle(&mut self) {
        if let Controller::Cubic(c) = self {
            c.epoch = 0;
        }
    }
}

impl Cubic {
    fn avoid(&mut self, cwnd: &mut u32, acked: u32, mss: u32, now: u64, srtt: u64) {
        let w = f64::from(*cwnd);
        let m = f64::from(mss);
        if self.epoch == 0 {
            self.epoch = now.max(1);
            self.w_est = *cwnd as f32;
            if f64::from(self.w_max) > w {
                self.k = ((f64::from(self.w_max) - w) / (C * m)).cbrt() as f32;
            } else {
                self.k = 0.0;
                self.w_max = *cwnd as f32;
            }
        }
        let t = now.saturating_sub(self.epoch) as f64 / 1e9;
        let rtt = srtt as f64 / 1e9;
        let at = |t: f64| C * m * (t - f64::from(self.k)).powi(3) + f64::from(self.w_max);
        let alpha = if self.w_est >= self.cwnd_prior {
            1.0
        } else {
            ALPHA
        };
        self.w_est = (f64::from(self.w_est) + alpha * m * f64::from(acked) / w) as f32;
        let est = f64::from(self.w_est);
        let new = if at(t) < est {
            w.max(est) // Reno-friendly region, section 4.3
        } else {
            let target = at(t + rtt).clamp(w, 1.5 * w);
            w + (target - w) * (f64::from(acked) / w).min(1.0)
        };
        *cwnd = (new as u32).min(MAX_WINDOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1448;

    #[test]
    fn slow_start_doubles_each_round_trip_rfc_5681_3_1() {
        for which in [Congestion::Cubic, Congestion::NewReno] {
            let mut c = Controller::new(which);
            let mut w = 10 * MSS;
            c.on_ack(&mut w, u32::MAX, 10 * MSS, MSS, 1, 1000);
            assert_eq!(w, 20 * MSS);
        }
    }

    #[test]
    fn new_reno_adds_one_segment_a_round_trip_and_halves_rfc_5681() {
        let mut c = Controller::new(Congestion::NewReno);
        let mut w = 20 * MSS;
        for _ in 0..20 {
            c.on_ack(&mut w, 10 * MSS, MSS, MSS, 1, 1000);
        }
        assert_eq!(w, 21 * MSS);
        assert_eq!(c.on_loss(w, w, MSS), w / 2);
    }

    #[test]
    fn cubic_returns_to_its_plateau_after_k_seconds_rfc_9438_4_2() {
        let mut c = Controller::new(Congestion::Cubic);
        let before = 1000 * MSS;
        let mut w = c.on_loss(before, before, MSS);
        assert_eq!(w, (f64::from(before) * 0.7) as u32, "section 4.6");
        let ssthresh = w;
        let k = (300.0f64 / 0.4).cbrt();
        let rtt = 100_000_000u64;
        let mut now = 1_000_000_000u64;
        let end = now + (k * 1e9) as u64;
        while now < end {
            let acked = w;
            c.on_ack(&mut w, ssthresh, acked, MSS, now, rtt);
            now += rtt;
        }
        let ratio = f64::from(w) / f64::from(before);
        assert!((0.97..1.1).contains(&ratio), "{ratio}");
        // Section 4.7: a second loss below the plateau remembers less.
        let half = before / 2;
        c.on_loss(half, half, MSS);
        let Controller::Cubic(c) = c else {
            unreachable!()
        };
        assert!(c.w_max < half as f32);
    }
}
