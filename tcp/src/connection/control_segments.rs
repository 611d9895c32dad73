//! Segments without payload: SYNs, pure ACKs with their SACK blocks, probes.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::{FrameSink, SinkFull};
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, CWR, ECE, SYN};
use crate::wire::template::SegmentFields;

/// Returns the options of a SYN, in an order that is common among stacks, and their length.
pub(crate) fn syn_options(
    mss: u16,
    sack: bool,
    ts: Option<(u32, u32)>,
    scale: Option<u8>,
) -> ([u8; 20], usize) {
    let mut bytes = [1u8; 20];
    bytes[..2].copy_from_slice(&[2, 4]);
    bytes[2..4].copy_from_slice(&mss.to_be_bytes());
    let mut n = 4;
    if let Some((value, echo)) = ts {
        // SACK-permitted, or two NOPs, align the timestamps.
        if sack {
            bytes[n..n + 2].copy_from_slice(&[4, 2]);
        }
        bytes[n + 2..n + 4].copy_from_slice(&[8, 10]);
        bytes[n + 4..n + 8].copy_from_slice(&value.to_be_bytes());
        bytes[n + 8..n + 12].copy_from_slice(&echo.to_be_bytes());
        n += 12;
    } else if sack {
        bytes[n + 2..n + 4].copy_from_slice(&[4, 2]);
        n += 4;
    }
    if let Some(shift) = scale {
        bytes[n..n + 4].copy_from_slice(&[1, 3, 3, shift]);
        n += 4;
    }
    (bytes, n)
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Sends a segment without payload: a pure ACK or a probe.
    pub(crate) fn emit_without_payload(
        &mut self,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        skip_blocks: usize,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let (window, edge) = self.receive_window(self.window_limit(cx));
        let tcb = &self.tcb;
        let ts = tcb
            .has(ConnectionFlags::TIMESTAMPS)
            .then(|| (timestamp_at(cx.now, self.timestamp_offset), tcb.ts_recent));
        let mut options = [1u8; 36];
        let mut n = 0;
        if tcb.has(ConnectionFlags::SACK)
            && let Some(queue) = self.out_of_order.as_ref().filter(|queue| !queue.is_idle())
        {
            // RFC 2018 section 3: three blocks fit alongside timestamps, four without; a D-SACK
            // comes first (RFC 2883 section 4).
            let mut blocks = [(SeqNr(0), SeqNr(0)); 4];
            let max = if ts.is_some() { 3 } else { 4 };
            let which = (skip_blocks == 0, skip_blocks);
            let filled = queue.fill_blocks(which, tcb.rcv_nxt, &mut blocks[..max]);
            let used = filled.count;
            // A FIN that was received out of order is part of its block.
            for block in &mut blocks[filled.dsacks..used] {
                block.1 += u32::from(tcb.has(ConnectionFlags::FIN_SEEN) && block.1 == self.fin_at);
            }
            if used > 0 {
                options[2] = 5;
                options[3] = (2 + 8 * used) as u8;
                for (block, (lo, hi)) in options[4..].chunks_exact_mut(8).zip(&blocks[..used]) {
                    block[..4].copy_from_slice(&lo.0.to_be_bytes());
                    block[4..].copy_from_slice(&hi.0.to_be_bytes());
                }
                n = 4 + 8 * used;
            }
        }
        let fields = SegmentFields {
            seq,
            ack: tcb.rcv_nxt,
            flags: if tcb.has(ConnectionFlags::SEND_ECE) {
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
        self.send_bare_segment(cx, &fields, sink)?;
        self.on_ack_sent(edge);
        Ok(())
    }

    /// Sends a segment that consists of headers only, and counts it.
    #[inline]
    pub(crate) fn send_bare_segment(
        &self,
        cx: &mut TcpContext<'_>,
        fields: &SegmentFields<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let (n, mut meta) = self.template.meta(fields);
        self.complete_meta(cx, &mut meta);
        if !sink.send_frame(n, &meta, |out| self.template.build(out, fields), []) {
            return Err(SinkFull);
        }
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }

    pub(crate) fn emit_syn(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let answer = self.tcb.state == TcpState::SynReceived;
        // A SYN-ACK agrees only to options that the SYN offered; a SYN offers those that the
        // configuration enables.
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
            (timestamp_at(cx.now, self.timestamp_offset), echo)
        });
        let mss = cx.shared.config.mtu - if self.template.is_v6() { 60 } else { 40 };
        let (options, n) = syn_options(mss, sack, ts, scale);
        let window = cx.shared.recv_window.min(0xffff) as u16;
        let flags = match answer {
            true if self.tcb.has(ConnectionFlags::ECN) => SYN | ACK | ECE,
            true => SYN | ACK,
            false if cx.shared.config.wants_ecn() && self.tcb.backoff == 0 => SYN | ECE | CWR,
            false => SYN,
        };
        let fields = SegmentFields {
            // Until our SYN is acknowledged, SND.UNA is its sequence number.
            seq: self.tcb.snd_una,
            ack: if answer { self.tcb.rcv_nxt } else { SeqNr(0) },
            flags,
            window,
            ts: None,
            options: &options[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        let (n, mut meta) = self.template.meta(&fields);
        self.complete_meta(cx, &mut meta);
        meta.retransmission = self.tcb.backoff > 0;
        if !sink.send_frame(n, &meta, |out| self.template.build(out, &fields), []) {
            return Err(SinkFull);
        }
        // Start of the RTT measurement of the handshake.
        self.tcb.last_rx = cx.now.0;
        if answer {
            self.on_ack_sent(self.tcb.rcv_nxt + u32::from(window));
        }
        cx.shared.stats.syn_retrans += u64::from(self.tcb.backoff > 0);
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }

    #[inline]
    pub(crate) fn send_acks(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let tcb = &self.tcb;
        let seq = tcb.bare_seq();
        let again = tcb.last_ack_sent == tcb.rcv_nxt;
        let has_dsack = self
            .out_of_order
            .as_ref()
            .is_some_and(|queue| queue.dsack_block().is_some());
        self.emit_ack(cx, seq, 0, sink)?;
        self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        if self.out_of_order.is_none() {
            return Ok(());
        }
        self.send_further_acks(cx, seq, (again, has_dsack), sink)
    }

    /// Sends an ACK with the SACK blocks after the first `skip_blocks`.
    #[inline]
    fn emit_ack(
        &mut self,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        skip_blocks: usize,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        self.emit_without_payload(cx, seq, skip_blocks, sink)?;
        cx.shared.stats.pure_acks_out += 1;
        Ok(())
    }

    /// Sends the ACKs after the first, which report further blocks and duplicates. `again`: the
    /// first ACK acknowledged nothing new; `has_dsack`: it had a D-SACK block.
    #[cold]
    fn send_further_acks(
        &mut self,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        (again, has_dsack): (bool, bool),
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        self.send_further_dsacks(cx, seq, sink)?;
        // One batch of received segments can open more holes than one ACK can report; data beyond
        // an unreported hole would look lost to the peer.
        let blocks_per_ack = if self.tcb.has(ConnectionFlags::TIMESTAMPS) {
            3
        } else {
            4
        };
        let more = self
            .out_of_order
            .as_ref()
            .map_or(0, |queue| queue.unreported_count());
        if self.tcb.has(ConnectionFlags::SACK) {
            let first = blocks_per_ack - usize::from(has_dsack);
            for skip in (first..more).step_by(blocks_per_ack) {
                self.emit_ack(cx, seq, skip, sink)?;
            }
        } else {
            // Without SACK the peer counts duplicate ACKs, one for each segment that it sent; three
            // are enough (RFC 5681 section 3.2).
            let duplicates = self
                .out_of_order
                .as_ref()
                .map_or(0, |queue| queue.arrived_count())
                .min(3);
            for _ in usize::from(again)..duplicates {
                self.emit_ack(cx, seq, 0, sink)?;
            }
        }
        if let Some(queue) = &mut self.out_of_order {
            queue.mark_reported();
            if queue.is_idle() {
                self.out_of_order = None;
            }
        }
        Ok(())
    }

    /// Sends one ACK for each further duplicate of the batch. The first ACK carried a D-SACK block
    /// if one was due, and an ACK carries only one such block, so each further duplicate needs an
    /// ACK of its own (RFC 2883 section 4): a sender that misses one of them cannot know that all
    /// its retransmissions were spurious.
    fn send_further_dsacks(
        &mut self,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        while let Some(queue) = &mut self.out_of_order
            && queue.dsack_block().is_some()
        {
            cx.shared.stats.dsacks_out += 1;
            if !queue.pop_duplicate() {
                break;
            }
            self.emit_ack(cx, seq, 0, sink)?;
        }
        Ok(())
    }
}
