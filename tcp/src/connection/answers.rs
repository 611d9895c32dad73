//! ACKs that answer segments which are not acceptable, and how many of them there may be. Each
//! connection has its own limits, so that segments to one use up nothing of another. The limit of
//! all connections together that RFC 5961 section 7 asks for is for challenge ACKs alone.

use crate::base::buffer::RecvBuf;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::connection::input::SegmentVerdict;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::Segment;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Answers a segment that may be forged with a challenge ACK (RFC 5961).
    pub(crate) fn send_challenge_ack(&mut self, cx: &mut TcpContext<'_>) {
        let own = &mut cx.shared.side_table.fields_of(cx.index).other_answers;
        if own.try_take(cx.now) && cx.shared.challenges.try_take(cx.now) {
            cx.shared.stats.challenge_acks += 1;
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
        } else {
            cx.shared.stats.challenges_skipped += 1;
        }
    }

    /// Answers a SYN on a synchronised connection with a challenge ACK, whatever its sequence number
    /// (RFC 5961 section 4).
    pub(crate) fn on_unexpected_syn(&mut self, cx: &mut TcpContext<'_>) -> SegmentVerdict {
        cx.shared.stats.syn_challenges += 1;
        self.send_challenge_ack(cx);
        SegmentVerdict::Done
    }

    /// Whether the connection may answer a segment outside of the window, or one that PAWS refuses.
    /// Keepalive and zero-window probes have a limit of their own: segments of those who do not know
    /// RCV.NXT must not use up the answers that tell the peer that we live.
    pub(crate) fn may_answer(&mut self, cx: &mut TcpContext<'_>, seg: &Segment) -> bool {
        let fields = cx.shared.side_table.fields_of(cx.index);
        let place = seg.seq.distance_from(self.tcb.rcv_nxt);
        let may = if place == -1 || place == 0 {
            fields.probe_answers.try_take(cx.now)
        } else {
            fields.other_answers.try_take(cx.now)
        };
        cx.shared.stats.challenges_skipped += u64::from(!may);
        may
    }
}
