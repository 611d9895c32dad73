//! Segments without payload that report the state of the receive side: pure ACKs with their SACK
//! blocks, and probes.

use siw_net::{FrameSink, RecvBuf};

use crate::base::sequence::SeqNr;
use crate::base::sink_full::SinkFull;
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::connection::receiver::Receiver;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendVariables;
use crate::wire::segment::{ACK, ECE};
use crate::wire::template::SegmentFields;

/// The parts of a connection, except for the receive side, that its ACKs depend on.
pub(crate) struct OtherParts<'a> {
    pub tcb: &'a Tcb,
    pub snd: &'a SendVariables,
    pub path: &'a PathState,
}

/// The first of the ACKs that are due.
pub(crate) struct FirstAck {
    /// It acknowledged nothing new.
    is_duplicate: bool,
    /// Number of recently changed ranges that it reported.
    reported: usize,
}

impl<B: RecvBuf> Receiver<B> {
    /// Sends a segment without payload: a pure ACK or a probe, with the SACK blocks after the first
    /// `skip_blocks`. Returns the number of recently changed ranges that it and those before report.
    pub(crate) fn emit_without_payload<R>(
        &mut self,
        parts: &OtherParts<'_>,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        skip_blocks: usize,
        sink: &mut impl FrameSink<R>,
    ) -> Result<usize, SinkFull> {
        let &OtherParts { tcb, snd, path } = parts;
        let offer = self.receive_window(tcb, snd.rtt.srtt, cx);
        let ts = path.timestamps(tcb, &self.rcv, cx.now);
        let mut options = [1u8; 36];
        let (mut n, mut reported) = (0, skip_blocks);
        if tcb.has(ConnectionFlags::SACK)
            && let Some(queue) = self.out_of_order.as_ref().filter(|queue| !queue.is_idle())
        {
            // RFC 2018 section 3: three blocks fit alongside timestamps, four without; a D-SACK
            // comes first (RFC 2883 section 4).
            let mut blocks = [(SeqNr(0), SeqNr(0)); 4];
            let max = if ts.is_some() { 3 } else { 4 };
            let which = (skip_blocks == 0, skip_blocks);
            let filled = queue.fill_blocks(which, self.rcv.nxt, &mut blocks[..max]);
            let used = filled.count;
            reported = filled.reported;
            // A FIN that was received out of order is part of its block.
            for block in &mut blocks[filled.dsacks..used] {
                block.1 += u32::from(tcb.has(ConnectionFlags::FIN_SEEN) && block.1 == tcb.fin_at);
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
            ack: self.rcv.nxt,
            flags: if tcb.has(ConnectionFlags::SEND_ECE) {
                ACK | ECE
            } else {
                ACK
            },
            window: offer.field,
            ts,
            options: &options[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        path.send_bare_segment(tcb, cx, &fields, sink)?;
        self.on_ack_sent(offer.edge);
        Ok(reported)
    }

    /// Sends the ACK that is due. [`send_further_acks`](Self::send_further_acks) sends those behind it.
    #[inline]
    pub(crate) fn send_first_ack<R>(
        &mut self,
        parts: &OtherParts<'_>,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<FirstAck, SinkFull> {
        let seq = parts.snd.bare_seq(parts.tcb.state);
        let is_duplicate = self.rcv.last_ack_sent == self.rcv.nxt;
        let reported = self.emit_ack(parts, cx, seq, 0, sink)?;
        Ok(FirstAck {
            is_duplicate,
            reported,
        })
    }

    /// Sends a pure ACK; see [`emit_without_payload`](Self::emit_without_payload).
    #[inline]
    fn emit_ack<R>(
        &mut self,
        parts: &OtherParts<'_>,
        cx: &mut TcpContext<'_>,
        seq: SeqNr,
        skip_blocks: usize,
        sink: &mut impl FrameSink<R>,
    ) -> Result<usize, SinkFull> {
        let reported = self.emit_without_payload(parts, cx, seq, skip_blocks, sink)?;
        cx.shared.stats.pure_acks_out += 1;
        Ok(reported)
    }

    /// Sends the ACKs after the first, which report further blocks and duplicates.
    #[cold]
    pub(crate) fn send_further_acks<R>(
        &mut self,
        parts: &OtherParts<'_>,
        cx: &mut TcpContext<'_>,
        first: &FirstAck,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let seq = parts.snd.bare_seq(parts.tcb.state);
        let mut reported = first.reported;
        self.send_further_dsacks(parts, cx, seq, sink)?;
        // One batch of received segments can open more holes than one ACK can report; data beyond
        // an unreported hole would look lost to the peer.
        let unreported = self
            .out_of_order
            .as_ref()
            .map_or(0, |queue| queue.unreported_count());
        if parts.tcb.has(ConnectionFlags::SACK) {
            while reported < unreported {
                let next = self.emit_ack(parts, cx, seq, reported, sink)?;
                // Progress even if the ACK has no block.
                reported = next.max(reported + 1);
            }
        } else {
            // Without SACK the peer counts duplicate ACKs, one for each segment that it sent; three
            // are enough (RFC 5681 section 3.2).
            let duplicates = self
                .out_of_order
                .as_ref()
                .map_or(0, |queue| queue.arrived_count())
                .min(3);
            for _ in usize::from(first.is_duplicate)..duplicates {
                self.emit_ack(parts, cx, seq, 0, sink)?;
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
    fn send_further_dsacks<R>(
        &mut self,
        parts: &OtherParts<'_>,
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
            self.emit_ack(parts, cx, seq, 0, sink)?;
        }
        Ok(())
    }
}
