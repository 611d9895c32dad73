//! Consecutive new segments of one connection that are planned and recorded as one: they are sent
//! as one frame that the port segments (TSO) or, without TSO, as frames whose headers are built
//! once (GSO). Called by `output`.

use siw_net::constants::HEADER_MAX;
use siw_net::{FrameSink, RecvBuf};

use crate::base::sink_full::SinkFull;
use crate::config::TsoLimits;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::queues::send_buffer::{PUSH, SegmentBudget};
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::wire::segment::{ACK, ECE, PSH};
use crate::wire::template::SegmentFields;

/// Limits of the segments recorded as one.
const LIMIT: TsoLimits = TsoLimits {
    max_segments: 256,
    max_bytes: 1 << 24,
};

impl<B: RecvBuf, R> Connection<B, R> {
    /// Sends several new segments as one frame that the port segments (TSO), and returns their
    /// payload in bytes. During a recovery each is recorded on its own, because marks apply to
    /// single segments. A FIN is never included.
    pub(crate) fn send_tso(
        &mut self,
        cx: &mut TcpContext<'_>,
        budget: &SegmentBudget,
        tso: &TsoLimits,
        sink: &mut impl FrameSink<R>,
    ) -> Result<u32, SinkFull> {
        let (cursor, before) = (
            self.sender.send_buffer.next_position(),
            self.sender.send_buffer.sent.len(),
        );
        let Some((whole, count)) =
            self.sender
                .send_buffer
                .take_multi_segment(budget, tso, self.sender.snd.nxt, cx.now.0)
        else {
            return Ok(0);
        };
        if let Err(error) = self.emit_segment(cx, &whole, false, sink) {
            self.sender.send_buffer.sent.truncate(before);
            self.sender.send_buffer.rewind_to(cursor);
            return Err(error);
        }
        cx.shared.stats.out_segs += u64::from(count - 1);
        if count > 1 {
            cx.shared.stats.tso_frames += 1;
            cx.shared.tso_watch.on_sent(count);
        }
        if self.sender.snd.has(SendFlags::RECOVERING) {
            self.sender.send_buffer.split_multi_segments(before);
        } else {
            self.sender.snd.set(SendFlags::MULTI_SEGMENT);
        }
        self.on_new_segment_sent(cx, &whole);
        self.sender.snd.move_to_pipe(whole.len);
        self.sender.snd.clear(SendFlags::MAY_SPLIT_RECORD);
        Ok(whole.len)
    }

    /// Sends segments within `budget`, followed by a shorter one if that fits. The caller has checked that the first fits. Returns the payload bytes sent, even if
    /// the sink did not accept all segments.
    #[inline]
    pub(crate) fn send_gso(
        &mut self,
        cx: &mut TcpContext<'_>,
        budget: &SegmentBudget,
        sink: &mut impl FrameSink<R>,
    ) -> (u32, Result<(), SinkFull>) {
        let size = budget.size;
        let srtt = self.sender.snd.rtt.srtt;
        let offer = self.receiver.receive_window(&self.tcb, srtt, cx);
        let (cursor, before) = (
            self.sender.send_buffer.next_position(),
            self.sender.send_buffer.sent.len(),
        );
        let Some((mut whole, _)) = self.sender.send_buffer.take_multi_segment(
            budget,
            &LIMIT,
            self.sender.snd.nxt,
            cx.now.0,
        ) else {
            return (0, Ok(()));
        };
        let tcb = &self.tcb;
        let ecn = tcb.has(ConnectionFlags::ECN);
        let flags = if ecn && tcb.has(ConnectionFlags::SEND_ECE) {
            ACK | ECE
        } else {
            ACK
        };
        let mut fields = SegmentFields {
            seq: whole.seq,
            ack: self.receiver.rcv.nxt,
            flags,
            window: offer.field,
            ts: self.path.timestamps(tcb, &self.receiver.rcv, cx.now),
            options: &[],
            payload: size,
            ect: ecn && cx.may_send_ect(),
            tso: false,
        };
        let (n, mut meta) = self.path.template.meta(&fields);
        self.path.complete_meta(&self.tcb, cx, &mut meta);
        let mut image = [0; HEADER_MAX];
        self.path.template.build(&mut image[..n], &fields);
        let tcp = usize::from(meta.l2_len) + usize::from(meta.l3_len);
        let (mut segs, mut bytes, mut result) = (0, 0, Ok(()));
        let mut at = (whole.record, whole.offset);
        let mut push = false;
        while bytes < whole.len {
            let len = size.min(whole.len - bytes);
            if len < size {
                (fields.payload, meta.payload_len) = (len, len);
                self.path.template.build(&mut image[..n], &fields);
            }
            let (next, ends) = self.sender.send_buffer.walk_records(at, len);
            let seq = whole.seq + bytes;
            let fill = |out: &mut [u8]| {
                copy_headers(out, &image);
                out[tcp + 4..tcp + 8].copy_from_slice(&seq.0.to_be_bytes());
                out[tcp + 13] = flags | if ends { PSH } else { 0 };
            };
            if !sink.send_frame(n, &meta, fill, self.sender.payload(self.tcb.user, at, len)) {
                result = Err(SinkFull);
                break;
            }
            (at, push) = (next, ends);
            bytes += len;
            segs += 1;
        }
        if segs == 0 {
            self.sender.send_buffer.sent.truncate(before);
            self.sender.send_buffer.rewind_to(cursor);
            return (0, result);
        }
        if result.is_err()
            && let Some(segment) = self.sender.send_buffer.sent.back_mut()
        {
            segment.len = bytes;
            segment.flags = if push { PUSH } else { 0 };
            if bytes <= size {
                segment.mss = 0;
            }
            whole = *segment;
            self.sender.send_buffer.rewind_to(at);
        }
        if self.sender.snd.has(SendFlags::RECOVERING) {
            self.sender.send_buffer.split_multi_segments(before);
        } else if whole.mss != 0 {
            self.sender.snd.set(SendFlags::MULTI_SEGMENT);
        }
        self.on_new_segment_sent(cx, &whole);
        self.sender.snd.move_to_pipe(bytes);
        self.sender.snd.clear(SendFlags::MAY_SPLIT_RECORD);
        self.receiver.on_ack_sent(offer.edge);
        if !self.receiver.has_sack_blocks() {
            self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        }
        cx.shared.net.stats.frames_out += segs;
        cx.shared.stats.out_segs += segs;
        cx.shared.stats.out_bytes += u64::from(bytes);
        (bytes, result)
    }
}

/// Copies the headers in pieces of constant length that may overlap: the compiler turns them into a
/// few vector moves, whereas a copy of variable length is a call.
#[inline(always)]
fn copy_headers(out: &mut [u8], image: &[u8; HEADER_MAX]) {
    let n = out.len();
    if n <= 64 || n > 96 {
        out.copy_from_slice(&image[..n]);
        return;
    }
    out[..32].copy_from_slice(&image[..32]);
    out[32..64].copy_from_slice(&image[32..64]);
    out[n - 32..].copy_from_slice(&image[n - 32..n]);
}
