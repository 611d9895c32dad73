//! HyStart++ (RFC 9406): slow start ends when round trips lengthen, which shows that a queue builds
//! up on the path, before that queue overflows. Used in the first slow start of a CUBIC connection.

use crate::base::sequence::SeqNr;
use crate::congestion::controller::AckSample;

/// The tuning parameters of section 4.3; times are in microseconds.
const MIN_RTT_THRESH: u32 = 4_000;
const MAX_RTT_THRESH: u32 = 16_000;
const MIN_RTT_DIVISOR: u32 = 8;
const N_RTT_SAMPLE: u32 = 8;
const CSS_GROWTH_DIVISOR: u32 = 4;
const CSS_ROUNDS: u8 = 5;

/// The state of section 4.2. Round-trip times are in microseconds.
#[derive(Clone, Copy, Default)]
pub(crate) struct HyStart {
    /// lastRoundMinRTT and currentRoundMinRTT; 0: not measured.
    last_min: u32,
    this_min: u32,
    /// The round ends when this sequence number is acknowledged.
    window_end: SeqNr,
    /// cssBaselineMinRtt; 0: this is not conservative slow start.
    baseline: u32,
    /// rttSampleCount in segments, at most N_RTT_SAMPLE: one ACK may cover many.
    samples: u8,
    css_rounds: u8,
    /// An ACK has been processed, so `window_end` is valid.
    begun: bool,
}

impl HyStart {
    /// Returns whether the measured round is over. Its end normally lies between SND.UNA and
    /// SND.NXT. While a window is not in use and does not grow, any number of bytes may pass
    /// without a call: an end outside that range belongs to an old round.
    fn is_round_over(&self, ack: &AckSample) -> bool {
        !self.begun || ack.una.ge(self.window_end) || self.window_end.gt(ack.nxt)
    }

    /// Returns by how many bytes one ACK grows the window (section 4.2). Ends slow start by
    /// lowering `ssthresh`.
    pub(crate) fn slow_start(&mut self, ack: &AckSample, cwnd: u32, ssthresh: &mut u32) -> u32 {
        if self.is_round_over(ack) {
            if self.begun && self.baseline != 0 {
                self.css_rounds += 1;
                if self.css_rounds >= CSS_ROUNDS {
                    *ssthresh = cwnd;
                    return 0;
                }
            }
            self.begun = true;
            self.window_end = ack.nxt;
            self.last_min = self.this_min;
            self.this_min = 0;
            self.samples = 0;
        }
        if ack.rtt > 0 {
            let micros = u32::try_from(ack.rtt / 1000).unwrap_or(u32::MAX).max(1);
            self.this_min = if self.this_min == 0 {
                micros
            } else {
                self.this_min.min(micros)
            };
            let segments = (ack.acked / ack.mss.max(1)).clamp(1, N_RTT_SAMPLE);
            self.samples = (u32::from(self.samples) + segments).min(N_RTT_SAMPLE) as u8;
        }
        let enough = u32::from(self.samples) >= N_RTT_SAMPLE && self.this_min != 0;
        if self.baseline != 0 {
            if enough && self.this_min < self.baseline {
                // Round trips became shorter again: the increase was jitter, not a queue.
                self.baseline = 0;
                self.css_rounds = 0;
            } else {
                return ack.acked / CSS_GROWTH_DIVISOR;
            }
        } else if enough && self.last_min != 0 {
            let thresh = (self.last_min / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESH, MAX_RTT_THRESH);
            if self.this_min >= self.last_min.saturating_add(thresh) {
                self.baseline = self.this_min;
                self.css_rounds = 0;
            }
        }
        ack.acked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    /// Simulates one round of `w` bytes with this round trip in ms.
    fn round(h: &mut HyStart, seq: &mut u32, w: &mut u32, ssthresh: &mut u32, ms: u64) {
        let n = *w / MSS;
        let end = seq.wrapping_add(n * MSS);
        for _ in 0..n {
            *seq = seq.wrapping_add(MSS);
            let ack = AckSample {
                acked: MSS,
                mss: MSS,
                rtt: ms * 1_000_000,
                una: SeqNr(*seq),
                nxt: SeqNr(end.wrapping_add(*w)),
                ..AckSample::default()
            };
            if *w < *ssthresh {
                *w += h.slow_start(&ack, *w, ssthresh);
            }
        }
    }

    #[test]
    fn longer_round_trips_end_slow_start_rfc_9406_4_2() {
        let (mut h, mut seq, mut w, mut ssthresh) = (HyStart::default(), 0, 10 * MSS, u32::MAX);
        for _ in 0..3 {
            round(&mut h, &mut seq, &mut w, &mut ssthresh, 20);
        }
        assert_eq!(h.baseline, 0);
        let before = w;
        round(&mut h, &mut seq, &mut w, &mut ssthresh, 30);
        assert_ne!(h.baseline, 0, "delay rose by more than 4 ms");
        assert!(w < 2 * before);
        for _ in 0..8 {
            round(&mut h, &mut seq, &mut w, &mut ssthresh, 30);
        }
        assert_eq!(ssthresh, w, "congestion avoidance");
    }

    #[test]
    fn a_round_that_was_left_2_gib_ago_is_over() {
        let (mut h, mut seq, mut w, mut ssthresh) = (HyStart::default(), 0, 10 * MSS, u32::MAX);
        round(&mut h, &mut seq, &mut w, &mut ssthresh, 20);
        let end = h.window_end;
        // The window was not in use for so many bytes that the old end seems to lie ahead.
        seq = seq.wrapping_add((1 << 31) + 5);
        round(&mut h, &mut seq, &mut w, &mut ssthresh, 20);
        assert_ne!(h.window_end, end, "a new round began");
    }

    #[test]
    fn a_single_slow_round_trip_does_not_end_slow_start() {
        let (mut h, mut seq, mut w, mut ssthresh) = (HyStart::default(), 0, 10 * MSS, u32::MAX);
        for ms in [20, 20, 30, 20, 20, 20] {
            round(&mut h, &mut seq, &mut w, &mut ssthresh, ms);
        }
        assert_eq!((h.baseline, ssthresh), (0, u32::MAX));
    }
}
