//! Explicit congestion notification: marks on received segments are echoed to the sender, and marks
//! that the peer echoes reduce the congestion window (RFC 3168 section 6.1; for DCTCP, RFC 8257 section 3).

use crate::base::buffer::RecvBuf;
use crate::congestion::RecoveryPhase;
use crate::connection::context::{EarlyAck, TcpContext};
use crate::connection::path::PathState;
use crate::connection::receiver::Receiver;
use crate::connection::sender::Sender;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, Segment};

/// Maximum number of early ACKs that wait for the sink. Beyond it, the connection's next ACK covers
/// the segments, with the later mark.
const EARLY_ACKS_MAX: usize = 4096;

impl<B: RecvBuf> Receiver<B> {
    /// Processes the mark of an acceptable data segment on a connection with ECN.
    #[cold]
    pub(crate) fn on_data_with_ecn(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        is_dctcp: bool,
    ) {
        cx.shared.stats.ce_received += u64::from(seg.ce);
        if !is_dctcp {
            // ECE is set until CWR shows that the sender reduced its window (section 6.1.3).
            if seg.flags & CWR != 0 {
                tcb.flags &= !ConnectionFlags::SEND_ECE;
            }
            if seg.ce {
                tcb.flags |= ConnectionFlags::SEND_ECE;
            }
            return;
        }
        if seg.ce == tcb.has(ConnectionFlags::LAST_WAS_MARKED) {
            return;
        }
        // RFC 8257 section 3.2: segments received before the change are acknowledged at once, with
        // the old mark.
        if tcb.unacked_segs > 0 && path.neighbour_generation != 0 {
            if cx.shared.early_acks.len() < EARLY_ACKS_MAX {
                let (window, edge) = self.receive_window(tcb, cx);
                let marked = tcb.has(ConnectionFlags::SEND_ECE);
                cx.shared.early_acks.push_back(EarlyAck {
                    id: cx.id,
                    ack: tcb.rcv_nxt,
                    window,
                    flags: if marked { ACK | ECE } else { ACK },
                });
                tcb.on_ack_sent(edge);
            } else {
                cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
            }
        }
        tcb.flags ^= ConnectionFlags::LAST_WAS_MARKED;
        tcb.flags &= !ConnectionFlags::SEND_ECE;
        if seg.ce {
            tcb.flags |= ConnectionFlags::SEND_ECE;
        }
    }
}

impl<R> Sender<R> {
    /// Processes the ACK of `newly` bytes on a connection with ECN.
    #[inline]
    pub(crate) fn on_ecn_ack(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        newly: u32,
    ) {
        let flight = tcb.flight_state();
        let marked = seg.flags & ECE != 0;
        if self.congestion.on_ecn_ack(&flight, newly, marked) {
            self.reduce_for_mark(tcb, cx, newly);
        }
    }

    /// Reduces the congestion window for an echoed mark, at most once per window of data (RFC 3168
    /// section 6.1.2, RFC 8257 section 3.3). The ACK acknowledges `newly` bytes.
    #[cold]
    fn reduce_for_mark(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>, newly: u32) {
        cx.announce_reduction(tcb);
        // Any other phase has reduced the window already.
        if tcb.phase == RecoveryPhase::Open {
            cx.shared.stats.ecn_reductions += 1;
            let (flight, before) = (tcb.flight_state(), tcb.flight_before(newly));
            // An earlier reduction can no longer be undone without also undoing this one.
            if let Some(recovery) = &mut self.recovery {
                recovery.reduction.confirm();
            }
            self.congestion
                .on_mark(&mut tcb.window, (&flight, &before), cx.now.0);
        }
    }
}
