//! Segments without payload: SYNs, pure ACKs with what they tell, probes.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::FrameSink;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::connection::Connection;
use crate::connection::context::ConnectionContext;
use crate::connection::output::Blocked;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, SYN};
use crate::wire::template::SegmentFields;

/// The options of a SYN, in the order that everybody sends them, and their length.
pub(crate) fn syn_options(
    mss: u16,
    sack: bool,
    ts: Option<(u32, u32)>,
    scale: Option<u8>,
) -> ([u8; 20], usize) {
    let mut o = [1u8; 20];
    o[..2].copy_from_slice(&[2, 4]);
    o[2..4].copy_from_slice(&mss.to_be_bytes());
    let mut n = 4;
    if let Some((value, echo)) = ts {
        // SACK-permitted, or two NOPs, aligns the timestamps.
        if sack {
            o[n..n + 2].copy_from_slice(&[4, 2]);
        }
        o[n + 2..n + 4].copy_from_slice(&[8, 10]);
        o[n + 4..n + 8].copy_from_slice(&value.to_be_bytes());
        o[n + 8..n + 12].copy_from_slice(&echo.to_be_bytes());
        n += 12;
    } else if sack {
        o[n + 2..n + 4].copy_from_slice(&[4, 2]);
        n += 4;
    }
    if let Some(s) = scale {
        o[n..n + 4].copy_from_slice(&[1, 3, 3, s]);
        n += 4;
    }
    (o, n)
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// A segment without payload: pure ACK or probe.
    pub(crate) fn emit_bare(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seq: SeqNr,
        skip_blocks: usize,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let (window, edge) = self.window(self.window_limit(cx));
        let h = &self.tcb;
        let ts = h
            .has(ConnectionFlags::TIMESTAMPS)
            .then(|| (timestamp_at(cx.now, self.ts_offset), h.ts_recent));
        let mut options = [1u8; 36];
        let mut n = 0;
        if h.has(ConnectionFlags::SACK)
            && let Some(o) = self.ooo.as_ref().filter(|o| !o.is_idle())
        {
            // RFC 2018 section 3: three blocks fit beside timestamps, four without; a D-SACK
            // comes first (RFC 2883 section 4).
            let mut blocks = [(SeqNr(0), SeqNr(0)); 4];
            let max = if ts.is_some() { 3 } else { 4 };
            let mut k = 0;
            if let Some(d) = o.dsack().filter(|_| skip_blocks == 0) {
                blocks[0] = d;
                k = 1;
            }
            let count = o.blocks(skip_blocks, h.rcv_nxt, &mut blocks[k..max]);
            // A FIN that came early is in its block as well.
            for b in &mut blocks[k..k + count] {
                b.1 += u32::from(h.has(ConnectionFlags::FIN_SEEN) && b.1 == self.fin_at);
            }
            k += count;
            if k > 0 {
                options[2] = 5;
                options[3] = (2 + 8 * k) as u8;
                for (b, (lo, hi)) in options[4..].chunks_exact_mut(8).zip(&blocks[..k]) {
                    b[..4].copy_from_slice(&lo.0.to_be_bytes());
                    b[4..].copy_from_slice(&hi.0.to_be_bytes());
                }
                n = 4 + 8 * k;
            }
        }
        let fields = SegmentFields {
            seq,
            ack: h.rcv_nxt,
            flags: if h.has(ConnectionFlags::SEND_ECE) {
                ACK | ECE
            } else {
                ACK
            },
            window,
            ts,
            options: &options[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        let (n, mut meta) = self.template.meta(&fields);
        self.finish_meta(cx, &mut meta);
        if !tx.send_headers_only(n, &meta, |out| self.template.build(out, &fields)) {
            return Err(Blocked);
        }
        self.acknowledged(edge);
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }

    pub(crate) fn emit_syn(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let answer = self.tcb.state == TcpState::SynReceived;
        // A SYN-ACK repeats only what the SYN offered; a SYN offers what we were told to.
        let (ts, sack, scale) = if answer {
            (
                self.tcb.has(ConnectionFlags::TIMESTAMPS),
                self.tcb.has(ConnectionFlags::SACK),
                self.tcb.scales.is_scaled(),
            )
        } else {
            (cx.shared.config.timestamps, cx.shared.config.sack, true)
        };
        let scale = scale.then_some(if answer {
            self.tcb.scales.receive()
        } else {
            cx.shared.recv_wscale
        });
        let ts = ts.then(|| {
            let echo = if answer { self.tcb.ts_recent } else { 0 };
            (timestamp_at(cx.now, self.ts_offset), echo)
        });
        let mss = cx.shared.config.mtu - if self.template.is_v6() { 60 } else { 40 };
        let (o, n) = syn_options(mss, sack, ts, scale);
        let window = cx.shared.recv_window.min(0xffff) as u16;
        let flags = match answer {
            true if self.tcb.has(ConnectionFlags::ECN) => SYN | ACK | ECE,
            true => SYN | ACK,
            false if cx.shared.config.wants_ecn() && self.tcb.backoff == 0 => SYN | ECE | CWR,
            false => SYN,
        };
        let fields = SegmentFields {
            // Until it is acknowledged, our SYN is the first unacknowledged.
            seq: self.tcb.snd_una,
            ack: if answer { self.tcb.rcv_nxt } else { SeqNr(0) },
            flags,
            window,
            ts: None,
            options: &o[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        let (n, mut meta) = self.template.meta(&fields);
        self.finish_meta(cx, &mut meta);
        meta.retransmission = self.tcb.backoff > 0;
        if !tx.begin_frame_with(n, &meta, |out| self.template.build(out, &fields)) {
            return Err(Blocked);
        }
        tx.end_frame();
        // The handshake's round trip is measured from here.
        self.tcb.last_rx = cx.now.0;
        if answer {
            self.acknowledged(self.tcb.rcv_nxt + u32::from(window));
        }
        cx.shared.stats.syn_retrans += u64::from(self.tcb.backoff > 0);
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }

    pub(crate) fn send_acks(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        // SND.NXT, unless the peer's window has shrunk below it: that would be unacceptable.
        let h = &self.tcb;
        let seq = h.snd_nxt.min(h.snd_una + h.snd_wnd.max(h.flight().min(1)));
        let again = h.last_ack_sent == h.rcv_nxt;
        self.emit_bare(cx, seq, 0, tx)?;
        cx.shared.stats.pure_acks_out += 1;
        self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        // A batch can open more holes than one ACK can tell of; untold ones would look lost.
        let told = if self.tcb.has(ConnectionFlags::TIMESTAMPS) {
            3
        } else {
            4
        };
        let more = self.ooo.as_ref().map_or(0, |o| o.unreported());
        if self.tcb.has(ConnectionFlags::SACK) {
            let first = told - usize::from(self.ooo.as_ref().is_some_and(|o| o.dsack().is_some()));
            for skip in (first..more).step_by(told) {
                self.emit_bare(cx, seq, skip, tx)?;
                cx.shared.stats.pure_acks_out += 1;
            }
        } else {
            // Without SACK the peer counts duplicates, one for each segment, of which three
            // suffice (RFC 5681 section 3.2).
            let duplicates = self.ooo.as_ref().map_or(0, |o| o.arrived()).min(3);
            for _ in usize::from(again)..duplicates {
                self.emit_bare(cx, seq, 0, tx)?;
                cx.shared.stats.pure_acks_out += 1;
            }
        }
        if let Some(o) = &mut self.ooo {
            cx.shared.stats.dsacks_out += u64::from(o.dsack().is_some());
            o.reported();
            if o.is_idle() {
                self.ooo = None;
            }
        }
        Ok(())
    }
}
