//! New full segments of one connection that leave together, for ports that cut none themselves:
//! planned and noted as one, with headers that are made once. Called by `output`.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::FrameSink;
use crate::base::time::Instant;
use crate::config::TsoLimits;
use crate::connection::context::Shared;
use crate::connection::output::Blocked;
use crate::connection::{Conn, flag};
use crate::queues::send_queue::{PUSH, Sent};
use crate::wire::segment::{ACK, ECE, PSH};
use crate::wire::template::{Fields, HEADER_MAX};

/// What is noted as one.
const LIMIT: TsoLimits = TsoLimits {
    max_segments: 256,
    max_bytes: 1 << 24,
};

impl Shared {
    /// Sends full segments, `usable` bytes at most, and what follows them in a shorter one; the
    /// first fits. Returns the payload bytes that left, also when the sink did not take all.
    #[inline]
    pub(crate) fn send_together<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        (emss, usable): (u32, u32),
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> (u32, Result<(), Blocked>) {
        let (field, edge) = c.window(self.window_limit(c));
        let (cursor, before) = (c.tx.cursor(), c.tx.sent.len());
        let Some((mut whole, _)) = c.tx.train((emss, usable), &LIMIT, c.hot.snd_nxt, now.0) else {
            return (0, Ok(()));
        };
        let h = &c.hot;
        let ecn = h.has(flag::ECN);
        let flags = if ecn && h.has(flag::ECE_OWED) {
            ACK | ECE
        } else {
            ACK
        };
        let mut fields = Fields {
            seq: whole.seq,
            ack: h.rcv_nxt,
            flags,
            window: field,
            ts: h
                .has(flag::TIMESTAMPS)
                .then(|| (Self::ts_now(now, c.ts_offset), h.ts_recent)),
            options: &[],
            payload: emss,
            ect: ecn,
            tso: false,
        };
        let (n, mut meta) = c.template.meta(&fields);
        self.finish_meta(index, c, &mut meta);
        let mut image = [0; HEADER_MAX];
        c.template.build(&mut image[..n], &fields);
        let tcp = usize::from(meta.l2_len) + usize::from(meta.l3_len);
        let (mut segs, mut bytes, mut result) = (0, 0, Ok(()));
        let mut at = (whole.record, whole.offset);
        let mut push = false;
        while bytes < whole.len {
            let len = emss.min(whole.len - bytes);
            if len < emss {
                (fields.payload, meta.payload_len) = (len, len);
                c.template.build(&mut image[..n], &fields);
            }
            let (next, ends) = c.tx.walk(at, len);
            let seq = whole.seq + bytes;
            let fill = |out: &mut [u8]| {
                copy_headers(out, &image);
                out[tcp + 4..tcp + 8].copy_from_slice(&seq.0.to_be_bytes());
                out[tcp + 13] = flags | if ends { PSH } else { 0 };
            };
            let user = c.hot.user;
            let begun = match c.tx.piece(at, len) {
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
                        c.tx.gather(&s, |r, offset, len| tx.append_record(user, r, offset, len));
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
            c.tx.sent.truncate(before);
            c.tx.rewind(cursor);
            return (0, result);
        }
        if result.is_err()
            && let Some(s) = c.tx.sent.back_mut()
        {
            s.len = bytes;
            s.flags = if push { PUSH } else { 0 };
            if bytes <= emss {
                s.mss = 0;
            }
            whole = *s;
            c.tx.rewind(at);
        }
        if c.hot.has(flag::RECOVERING) {
            c.tx.split(before);
        } else if whole.mss != 0 {
            c.hot.flags |= flag::TRAINS;
        }
        self.sent_new(index, c, &whole, now);
        let h = &mut c.hot;
        h.pipe += bytes;
        h.unsent -= bytes;
        h.flags &= !flag::CUT;
        Self::acknowledged(c, edge);
        if !c.has_blocks() {
            c.hot.flags &= !flag::NEED_ACK;
        }
        self.stats.frames_out += segs;
        self.stats.out_segs += segs;
        self.stats.out_bytes += u64::from(bytes);
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
