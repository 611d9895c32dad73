//! Explicit congestion notification: marks seen here go back to the sender, marks echoed to us
//! shrink the window (RFC 3168 section 6.1; for DCTCP, RFC 8257 section 3).

use crate::base::buffer::RecvBuf;
use crate::base::time::timestamp_at;
use crate::congestion::controller::Controller;
use crate::connection::context::ConnectionContext;
use crate::connection::{Connection, Phase, flag};
use crate::wire::segment::{ACK, CWR, ECE, Segment};
use crate::wire::template::SegmentFields;

impl<B: RecvBuf, R> Connection<B, R> {
    /// An acceptable data segment arrived on a connection with ECN.
    #[cold]
    pub(crate) fn marked(&mut self, cx: &mut ConnectionContext<'_>, seg: &Segment) {
        cx.shared.stats.ce_received += u64::from(seg.ce);
        if !matches!(self.cc, Controller::Dctcp(_)) {
            // ECE until the sender says that it slowed down (section 6.1.3).
            if seg.flags & CWR != 0 {
                self.hot.flags &= !flag::ECE_OWED;
            }
            if seg.ce {
                self.hot.flags |= flag::ECE_OWED;
            }
            return;
        }
        if seg.ce == self.hot.has(flag::MARKED) {
            return;
        }
        // RFC 8257 section 3.2: what came before the change is acknowledged with the old mark.
        if self.hot.unacked_segs > 0 && self.neighbour_generation != 0 {
            let (window, edge) = self.window(self.window_limit(cx));
            let h = &self.hot;
            let fields = SegmentFields {
                seq: h.snd_nxt,
                ack: h.rcv_nxt,
                flags: if h.has(flag::ECE_OWED) {
                    ACK | ECE
                } else {
                    ACK
                },
                window,
                ts: h
                    .has(flag::TIMESTAMPS)
                    .then(|| (timestamp_at(cx.now, self.ts_offset), h.ts_recent)),
                options: &[],
                payload: 0,
                ect: false,
                tso: false,
            };
            cx.shared
                .control
                .tcp(&self.template, &fields, &mut cx.shared.stats);
            cx.shared.stats.pure_acks_out += 1;
            self.acknowledged(edge);
        }
        self.hot.flags ^= flag::MARKED;
        self.hot.flags &= !flag::ECE_OWED;
        if seg.ce {
            self.hot.flags |= flag::ECE_OWED;
        }
    }

    /// The ACK of `newly` bytes on a connection with ECN.
    #[inline]
    pub(crate) fn echoed(&mut self, cx: &mut ConnectionContext<'_>, seg: &Segment, newly: u32) {
        let ece = seg.flags & ECE != 0;
        let h = &self.hot;
        if let Controller::Dctcp(d) = &mut self.cc {
            d.acked(newly, ece, h.snd_una, h.snd_nxt);
        }
        if h.snd_una.ge(self.ecn_mark) {
            if ece {
                self.slow_down(cx);
            } else {
                // Follows, or it would be half the sequence space behind one day.
                self.ecn_mark = h.snd_una;
            }
        }
    }

    /// Once a window (RFC 3168 section 6.1.2, RFC 8257 section 3.3).
    #[cold]
    fn slow_down(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.hot;
        self.ecn_mark = h.snd_nxt;
        h.flags |= flag::CWR_OWED;
        // A recovery has slowed down already.
        if h.phase == Phase::Open {
            cx.shared.stats.ecn_reductions += 1;
            h.ssthresh = self.cwv.in_use(h).after_mark(h, &mut self.cc);
            h.cwnd = h.cwnd.min(h.ssthresh);
            self.cwv.begin(h, cx.now.0);
        }
    }
}
