//! The congestion control algorithms: how the window grows with each ACK and how far congestion
//! reduces it. NewReno (RFC 5681), CUBIC (RFC 9438) and DCTCP (RFC 8257) are variants of one enum:
//! a connection has its state inline, and an ACK costs a branch and no indirect call.

use crate::base::sequence::SeqNr;
use crate::base::time::to_ticks;
use crate::config::CongestionControl;
use crate::congestion::cubic::Cubic;
use crate::congestion::hystart::HyStart;
use crate::congestion::window::MAX_WINDOW;

/// The algorithm of one connection, with its state.
#[derive(Clone, Copy)]
pub(crate) enum Controller {
    NewReno {
        /// Bytes acknowledged towards the next segment of growth.
        acked: u32,
    },
    /// CUBIC before its first congestion event: a slow start that ends before the path overflows.
    HyStart(HyStart),
    Cubic(Cubic),
    Dctcp(Dctcp),
}

/// The input that an ACK provides to a controller. Times are in ns.
#[derive(Clone, Copy, Default)]
pub(crate) struct AckSample {
    /// Bytes that arrived at the peer.
    pub acked: u32,
    pub mss: u32,
    pub now: u64,
    /// The smoothed round-trip time, 0: not measured yet.
    pub srtt: u64,
    /// The round-trip time measured by this ACK; 0: none.
    pub rtt: u64,
    /// SND.UNA and SND.NXT.
    pub una: SeqNr,
    pub nxt: SeqNr,
}

/// DCTCP (RFC 8257): the fraction of marked bytes determines how far the window is reduced.
#[derive(Clone, Copy)]
pub(crate) struct Dctcp {
    /// DCTCP.Alpha: the estimated fraction of marked bytes.
    alpha: f32,
    /// DCTCP.BytesAcked and DCTCP.BytesMarked, since the observation window began.
    bytes: u32,
    marked: u32,
    /// Bytes acknowledged towards the next segment of growth.
    grown: u32,
    /// DCTCP.WindowEnd: the observation window ends when this is passed. Every ACK on a connection
    /// with ECN checks it, so it is never far behind.
    window_end: SeqNr,
}

/// The estimation gain g (section 4.2).
const GAIN: f32 = 1.0 / 16.0;

impl Dctcp {
    /// Processes an ACK of `bytes` new bytes, with or without an echoed mark (section 3.3 steps 1
    /// to 4).
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

    /// Begins the first observation window.
    pub(crate) fn begin_window(&mut self, una: SeqNr) {
        self.window_end = una;
    }

    /// Ends an observation window (section 3.3 steps 5 to 8).
    fn end_window(&mut self) {
        if self.bytes > 0 {
            let share = self.marked as f32 / self.bytes as f32;
            self.alpha += GAIN * (share - self.alpha);
        }
        (self.bytes, self.marked) = (0, 0);
    }
}

impl Controller {
    /// Returns the controller of a new connection.
    pub(crate) fn new(which: CongestionControl) -> Self {
        match which {
            CongestionControl::NewReno => Controller::NewReno { acked: 0 },
            CongestionControl::Cubic => Controller::HyStart(HyStart::default()),
            // Alpha starts at 1 (RFC 8257 section 4.2).
            CongestionControl::Dctcp => Controller::Dctcp(Dctcp {
                alpha: 1.0,
                bytes: 0,
                marked: 0,
                grown: 0,
                window_end: SeqNr(0),
            }),
        }
    }

    /// Grows the window for bytes that arrived at the peer while the window was in use.
    #[inline]
    pub(crate) fn on_ack(&mut self, cwnd: &mut u32, ssthresh: &mut u32, ack: &AckSample) {
        if *cwnd < *ssthresh {
            // Slow start. One ACK may stand for a whole batch of segments, so all bytes that it
            // acknowledges count (RFC 3465; like Linux, without its limit). Growth stops at
            // ssthresh; from the next ACK on the window grows as below.
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
                cubic.on_avoidance_ack(cwnd, ack);
                *self = Controller::Cubic(cubic);
            }
            Controller::Cubic(cubic) => cubic.on_avoidance_ack(cwnd, ack),
        }
    }

    /// Returns the new ssthresh after an echoed mark (RFC 3168 section 6.1.2, RFC 8257 section
    /// 3.3).
    pub(crate) fn on_mark(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        if let Controller::Dctcp(dctcp) = self {
            let cut = (f64::from(cwnd) * f64::from(dctcp.alpha) / 2.0) as u32;
            return cwnd.saturating_sub(cut).max(2 * mss);
        }
        self.on_loss(cwnd, in_flight, mss)
    }

    /// Returns the new ssthresh after a loss (RFC 5681 section 3.1 (4), RFC 9438 section 4.6).
    pub(crate) fn on_loss(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        let floor = 2 * mss;
        if let Controller::HyStart(_) = self {
            *self = Controller::Cubic(Cubic::default());
        }
        match self {
            Controller::HyStart(_) => floor,
            // DCTCP reacts to a loss like NewReno (RFC 8257 section 3.5).
            Controller::NewReno { acked } | Controller::Dctcp(Dctcp { grown: acked, .. }) => {
                *acked = 0;
                (in_flight.min(cwnd) / 2).max(floor)
            }
            Controller::Cubic(cubic) => cubic.on_loss(cwnd).max(floor),
        }
    }

    /// Returns the new ssthresh after a retransmission timeout. CUBIC restarts where slow start
    /// ends, with no plateau above it (RFC 9438 section 4.8).
    pub(crate) fn on_timeout(&mut self, cwnd: u32, in_flight: u32, mss: u32) -> u32 {
        let ssthresh = self.on_loss(cwnd, in_flight, mss);
        if let Controller::Cubic(cubic) = self {
            cubic.forget_plateau();
        }
        ssthresh
    }

    /// Notes that the window does not limit the flow: until it does again, no time passes for CUBIC
    /// (RFC 9438 section 5.8).
    #[inline]
    pub(crate) fn on_limited(&mut self, now: u64) {
        if let Controller::Cubic(cubic) = self {
            cubic.hold(to_ticks(now));
        }
    }

    /// Restarts congestion avoidance after the window was reduced because it was not in use.
    pub(crate) fn restart_avoidance(&mut self) {
        if let Controller::Cubic(cubic) = self {
            cubic.restart_stage();
        }
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
        // A tenth of the bytes is marked, over many windows.
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
}
