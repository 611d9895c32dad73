//! Explicit congestion notification: marks on received segments are echoed to the sender (RFC 3168
//! section 6.1.3; for DCTCP, RFC 8257 section 3.2).

use siw_net::RecvBuf;

use crate::connection::Connection;
use crate::connection::context::{EarlyAck, TcpContext};
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, Segment};

/// Maximum number of early ACKs that wait for the sink. Beyond it, the connection's next ACK covers
/// the segments, with the later mark.
const EARLY_ACKS_MAX: usize = 4096;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Processes the mark of an acceptable data segment on a connection with ECN.
    #[cold]
    pub(crate) fn on_data_with_ecn(&mut self, cx: &mut TcpContext<'_>, seg: &Segment) {
        let tcb = &mut self.tcb;
        cx.shared.stats.ce_received += u64::from(seg.ce);
        if !self.sender.congestion.is_dctcp() {
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
        if self.receiver.unacked_segs > 0 && self.path.neighbour_generation != 0 {
            if cx.shared.early_acks.len() < EARLY_ACKS_MAX {
                let srtt = self.sender.snd.rtt.srtt;
                let offer = self.receiver.receive_window(tcb, srtt, cx);
                let marked = tcb.has(ConnectionFlags::SEND_ECE);
                cx.shared.early_acks.push_back(EarlyAck {
                    id: cx.id,
                    ack: self.receiver.rcv.nxt,
                    window: offer.field,
                    flags: if marked { ACK | ECE } else { ACK },
                });
                self.receiver.on_ack_sent(offer.edge);
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
