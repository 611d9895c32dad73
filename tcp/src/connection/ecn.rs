//! Explicit congestion notification: marks seen here go back to the sender, marks echoed to us
//! shrink the window (RFC 3168 section 6.1; for DCTCP, RFC 8257 section 3).

use crate::base::buffer::RecvBuf;
use crate::base::time::Instant;
use crate::congestion::controller::Controller;
use crate::connection::context::Shared;
use crate::connection::{Conn, Phase, flag};
use crate::wire::segment::{ACK, CWR, ECE, Segment};
use crate::wire::template::Fields;

impl Shared {
    /// An acceptable data segment arrived on a connection with ECN.
    #[cold]
    pub(crate) fn marked<B: RecvBuf, R>(
        &mut self,
        c: &mut Conn<B, R>,
        seg: &Segment,
        now: Instant,
    ) {
        self.stats.ce_received += u64::from(seg.ce);
        if !matches!(c.cc, Controller::Dctcp(_)) {
            // ECE until the sender says that it slowed down (section 6.1.3).
            if seg.flags & CWR != 0 {
                c.hot.flags &= !flag::ECE_OWED;
            }
            if seg.ce {
                c.hot.flags |= flag::ECE_OWED;
            }
            return;
        }
        if seg.ce == c.hot.has(flag::MARKED) {
            return;
        }
        // RFC 8257 section 3.2: what came before the change is acknowledged with the old mark.
        if c.hot.unacked_segs > 0 && c.neighbour_generation != 0 {
            let (window, edge) = c.window(self.window_limit(c));
            let h = &c.hot;
            let fields = Fields {
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
                    .then(|| (Self::ts_now(now, c.ts_offset), h.ts_recent)),
                options: &[],
                payload: 0,
                ect: false,
                tso: false,
            };
            self.control.tcp(&c.template, &fields, &mut self.stats);
            self.stats.pure_acks_out += 1;
            Self::acknowledged(c, edge);
        }
        c.hot.flags ^= flag::MARKED;
        c.hot.flags &= !flag::ECE_OWED;
        if seg.ce {
            c.hot.flags |= flag::ECE_OWED;
        }
    }

    /// The ACK of `newly` bytes on a connection with ECN.
    #[inline]
    pub(crate) fn echoed<B: RecvBuf, R>(
        &mut self,
        c: &mut Conn<B, R>,
        seg: &Segment,
        newly: u32,
        now: Instant,
    ) {
        let ece = seg.flags & ECE != 0;
        let h = &c.hot;
        if let Controller::Dctcp(d) = &mut c.cc {
            d.acked(newly, ece, h.snd_una, h.snd_nxt);
        }
        if h.snd_una.ge(c.ecn_mark) {
            if ece {
                self.slow_down(c, now);
            } else {
                // Follows, or it would be half the sequence space behind one day.
                c.ecn_mark = h.snd_una;
            }
        }
    }

    /// Once a window (RFC 3168 section 6.1.2, RFC 8257 section 3.3).
    #[cold]
    fn slow_down<B: RecvBuf, R>(&mut self, c: &mut Conn<B, R>, now: Instant) {
        let h = &mut c.hot;
        c.ecn_mark = h.snd_nxt;
        h.flags |= flag::CWR_OWED;
        // A recovery has slowed down already.
        if h.phase == Phase::Open {
            self.stats.ecn_reductions += 1;
            h.ssthresh = c.cwv.in_use(h).after_mark(h, &mut c.cc);
            h.cwnd = h.cwnd.min(h.ssthresh);
            c.cwv.begin(h, now.0);
        }
    }
}
