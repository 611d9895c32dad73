//! New full segments of one connection that leave together, for ports that cut none themselves:
//! planned and noted as one, with headers that are made once. Called by `output`.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::FrameSink;
use crate::base::time::timestamp_at;
use crate::config::TsoLimits;
use crate::connection::Connection;
use crate::connection::context::ConnectionContext;
use crate::connection::output::Blocked;
use crate::queues::send_queue::{PUSH, Sent};
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, ECE, PSH};
use crate::wire::template::{HEADER_MAX, SegmentFields};

/// What is noted as one.
const LIMIT: TsoLimits = TsoLimits {
    max_segments: 256,
    max_bytes: 1 << 24,
};

impl<B: RecvBuf, R> Connection<B, R> {
    /// Sends full segments, `usable` bytes at most, and what follows them in a shorter one; the
    /// first fits. Returns the payload bytes that left, also when the sink did not take all.
    #[inline]
    pub(crate) fn send_together(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        (emss, usable): (u32, u32),
        tx: &mut impl FrameSink<R>,
    ) -> (u32, Result<(), Blocked>) {
        let (field, edge) = self.window(self.window_limit(cx));
        let (cursor, before) = (self.tx.cursor(), self.tx.sent.len());
        let Some((mut whole, _)) =
            self.tx
                .train((emss, usable), &LIMIT, self.tcb.snd_nxt, cx.now.0)
        else {
            return (0, Ok(()));
        };
        let h = &self.tcb;
        let ecn = h.has(ConnectionFlags::ECN);
        let flags = if ecn && h.has(ConnectionFlags::SEND_ECE) {
            ACK | ECE
        } else {
            ACK
        };
        let mut fields = SegmentFields {
            seq: whole.seq,
            ack: h.rcv_nxt,
            flags,
            window: field,
            ts: h
                .has(ConnectionFlags::TIMESTAMPS)
                .then(|| (timestamp_at(cx.now, self.ts_offset), h.ts_recent)),
            options: &[],
            payload: emss,
            ect: ecn,
            tso: false,
        };
        let (n, mut meta) = self.template.meta(&fields);
        self.finish_meta(cx, &mut meta);
        let mut image = [0; HEADER_MAX];
        self.template.build(&mut image[..n], &fields);
        let tcp = usize::from(meta.l2_len) + usize::from(meta.l3_len);
        let (mut segs, mut bytes, mut result) = (0, 0, Ok(()));
        let mut at = (whole.record, whole.offset);
        let mut push = false;
        while bytes < whole.len {
            let len = emss.min(whole.len - bytes);
            if len < emss {
                (fields.payload, meta.payload_len) = (len, len);
                self.template.build(&mut image[..n], &fields);
            }
            let (next, ends) = self.tx.walk(at, len);
            let seq = whole.seq + bytes;
            let fill = |out: &mut [u8]| {
                copy_headers(out, &image);
                out[tcp + 4..tcp + 8].copy_from_slice(&seq.0.to_be_bytes());
                out[tcp + 13] = flags | if ends { PSH } else { 0 };
            };
            let user = self.tcb.user;
            let begun = match self.tx.piece(at, len) {
                Some(r) => tx.send_single_piece(n, &meta, fill, (user, r, at.1)),
                None => {
                    let begun = tx.begin_frame_with(n, &meta, fill);
                    if begun {
                        let (record, offset) = at;
                        let s = Sent {
                            record,
                            offset,
                            len,
                            ..whole
                        };
                        self.tx
                            .gather(&s, |r, offset, len| tx.append_record(user, r, offset, len));
                        tx.end_frame();
                    }
                    begun
                }
            };
            if !begun {
                result = Err(Blocked);
                break;
            }
            (at, push) = (next, ends);
            bytes += len;
            segs += 1;
        }
        if segs == 0 {
            self.tx.sent.truncate(before);
            self.tx.rewind(cursor);
            return (0, result);
        }
        if result.is_err()
            && let Some(s) = self.tx.sent.back_mut()
        {
            s.len = bytes;
            s.flags = if push { PUSH } else { 0 };
            if bytes <= emss {
                s.mss = 0;
            }
            whole = *s;
            self.tx.rewind(at);
        }
        if self.tcb.has(ConnectionFlags::RECOVERING) {
            self.tx.split(before);
        } else if whole.mss != 0 {
            self.tcb.flags |= ConnectionFlags::MULTI_SEGMENT;
        }
        self.sent_new(cx, &whole);
        let h = &mut self.tcb;
        h.pipe += bytes;
        h.unsent -= bytes;
        h.flags &= !ConnectionFlags::MAY_SPLIT_RECORD;
        self.acknowledged(edge);
        if !self.has_blocks() {
            self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        }
        cx.shared.stats.frames_out += segs;
        cx.shared.stats.out_segs += segs;
        cx.shared.stats.out_bytes += u64::from(bytes);
        (bytes, result)
    }
}

/// Copies of constant length that overlap instead of one of a variable length.
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
