//! Processing of a received segment by its connection (RFC 9293 section 3.10.7): header prediction
//! for the fast path, all checks for the rest.

use siw_net::RecvBuf;

use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH, RST, SYN, Segment};

/// The action required of the stack after the connection has processed a segment.
pub(crate) enum SegmentVerdict {
    Done,
    /// Answer with a reset, as for a segment without a connection.
    Reset,
    /// End the connection in TIME-WAIT and let this SYN open a new one (RFC 6191).
    Reopen,
}

/// PAWS compares timestamps only if the last segment from the peer is at most this old, in ns. With
/// a timestamp clock of 1 ms per tick, the 2^31 ticks that a comparison can distinguish last 24.8
/// days (RFC 7323 section 5.5).
const PAWS_VALID_NS: u64 = 24 * 86_400 * 1_000_000_000;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Header prediction, the fast path: the connection is established and the segment is the next
    /// in sequence, without anything unusual. Returns the buffer in all other cases.
    #[inline]
    pub(crate) fn try_header_prediction(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        buffer: B,
    ) -> Result<(), B> {
        let (tcb, snd, rcv) = (&mut self.tcb, &self.sender.snd, &mut self.receiver.rcv);
        let len = buffer.remaining();
        let ack = seg.ack.0.wrapping_sub(snd.una.0);
        if tcb.state != TcpState::Established
            || seg.flags & (FIN | SYN | RST | ACK | ECE | CWR) != ACK
            || seg.ce != tcb.has(ConnectionFlags::LAST_WAS_MARKED)
            || seg.seq != rcv.nxt
            || tcb.has(
                ConnectionFlags::RELEASED | ConnectionFlags::FIN_SEEN | ConnectionFlags::UNREAD,
            )
            || snd.has(SendFlags::RECOVERING)
            || seg.has_ts != tcb.has(ConnectionFlags::TIMESTAMPS)
            || (seg.ts_val.wrapping_sub(rcv.ts_recent) as i32) < 0 && seg.has_ts
            || seg.sacks != 0
            || ack > snd.flight()
            || len as u32 > rcv.adv - rcv.nxt
            || (len == 0 && ack == 0)
        {
            return Err(buffer);
        }
        if len > 0
            && (self.receiver.out_of_order.is_some()
                || cx.shared.shares_buffers(self.receiver.counted_buffers)
                || !cx
                    .shared
                    .held
                    .has_room(self.receiver.counted_buffers, buffer.buffer_count() as u32))
        {
            return Err(buffer);
        }
        cx.shared.stats.hp_hits += 1;
        tcb.last_rx = cx.now.0;
        tcb.probes = 0;
        if seg.seq.le(rcv.last_ack_sent) {
            rcv.ts_recent = if seg.has_ts {
                seg.ts_val
            } else {
                rcv.ts_recent
            };
        }
        if len > 0 && snd.is_idle(tcb) {
            if self.sender.take_window(tcb, seg) {
                cx.raise_event(tcb, Events::WRITABLE);
            }
        } else {
            self.sender
                .process_ack(&mut self.tcb, &self.path, cx, seg, len);
        }
        if len > 0 {
            self.receiver
                .deliver_in_order(&mut self.tcb, cx, buffer, seg.flags & PSH != 0);
        }
        Ok(())
    }

    /// Processes every segment that `try_header_prediction` does not accept, in the order of RFC
    /// 9293 section 3.10.7.4.
    pub(crate) fn process_segment(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        buffer: B,
    ) -> SegmentVerdict {
        if self.tcb.state == TcpState::SynSent {
            return self.on_segment_in_syn_sent(cx, seg, buffer);
        }
        let mut seg = *seg;
        // In SYN-RECEIVED the peer's SYN may be repeated or, in a simultaneous open, arrive as
        // SYN-ACK.
        if self.tcb.state == TcpState::SynReceived
            && seg.flags & (SYN | RST) == SYN
            && seg.seq + 1 == self.receiver.rcv.nxt
        {
            if seg.flags & ACK == 0 {
                self.on_repeated_syn(cx, &seg);
                return SegmentVerdict::Done;
            }
            seg.seq += 1;
            seg.flags &= !SYN;
            // Compensates for the later scaling: the window of a SYN-ACK is not scaled. The next
            // segment brings the exact one.
            seg.window >>= self.tcb.scales.send();
        }
        let len = buffer.remaining() as u32;
        let span = len + u32::from(seg.flags & FIN != 0) + u32::from(seg.flags & SYN != 0);
        if self.may_reopen(&seg, cx.shared.config.timestamps) {
            return SegmentVerdict::Reopen;
        }
        if !self.passes_timestamp_checks(cx, &seg, span) {
            return SegmentVerdict::Done;
        }
        if !self.is_acceptable(cx, &seg, span) {
            return self.on_unacceptable_segment(cx, seg, len, span);
        }
        if seg.flags & RST != 0 {
            return self.on_reset(cx, &seg);
        }
        if seg.flags & SYN != 0 {
            if self.tcb.state == TcpState::SynReceived && self.tcb.has(ConnectionFlags::PASSIVE) {
                // The peer has begun anew: back to LISTEN, which answers its next SYN (section
                // 3.10.7.4, fourth).
                self.enter_closed(cx);
                self.tcb.flags |= ConnectionFlags::RELEASED;
                return SegmentVerdict::Done;
            }
            cx.on_unexpected_syn(&mut self.tcb);
            return SegmentVerdict::Done;
        }
        if seg.flags & ACK == 0 {
            return SegmentVerdict::Done;
        }
        let tcb = &mut self.tcb;
        tcb.last_rx = if tcb.state == TcpState::SynReceived {
            tcb.last_rx
        } else {
            cx.now.0
        };
        tcb.probes = 0;
        if tcb.state == TcpState::SynReceived {
            if seg.ack != self.sender.snd.nxt {
                return SegmentVerdict::Reset;
            }
            if let Some(verdict) = self.on_established(cx, &seg) {
                return verdict;
            }
        }
        let (snd, rcv) = (&self.sender.snd, &mut self.receiver.rcv);
        // RFC 5961 section 5.2: an ACK of data that was never sent, or is far too old, is rejected.
        if seg.ack.gt(snd.nxt) || seg.ack.lt(snd.una - snd.max_wnd) {
            cx.shared.stats.bad_acks += 1;
            cx.send_challenge_ack(&mut self.tcb);
            return SegmentVerdict::Done;
        }
        // TS.Recent is updated only now that the ACK has been validated: a forged timestamp from
        // the future would make PAWS drop everything that follows.
        if seg.has_ts && seg.seq.le(rcv.last_ack_sent) {
            rcv.ts_recent = seg.ts_val;
        }
        if seg.ack.ge(snd.una) {
            self.sender
                .process_ack(&mut self.tcb, &self.path, cx, &seg, buffer.remaining());
        } else if seg.sacks > 0 {
            self.sender
                .process_overtaken_ack(&mut self.tcb, &self.path, cx, &seg);
        }
        if let Some(verdict) = self.on_fin_acknowledged(cx) {
            return verdict;
        }
        if len > 0 && self.tcb.has(ConnectionFlags::ECN) {
            self.on_data_with_ecn(cx, &seg);
        }
        if span > 0 {
            self.process_payload(cx, &seg, buffer)
        } else {
            SegmentVerdict::Done
        }
    }

    /// Returns whether a SYN may replace this connection in TIME-WAIT (RFC 6191 section 2, RFC 9293
    /// section 3.6.1): its timestamp is above all that the old connection received, or its sequence
    /// number if the timestamps are equal or absent. Timestamps that only the new connection uses
    /// protect it from old segments. `timestamps`: new connections use them.
    #[inline]
    fn may_reopen(&self, seg: &Segment, timestamps: bool) -> bool {
        let tcb = &self.tcb;
        if tcb.state != TcpState::TimeWait || seg.flags & (SYN | ACK | RST) != SYN {
            return false;
        }
        let rcv = &self.receiver.rcv;
        let is_above = seg.seq.gt(rcv.nxt);
        if !seg.has_ts || !timestamps {
            return is_above;
        }
        if !tcb.has(ConnectionFlags::TIMESTAMPS) {
            return true;
        }
        match seg.ts_val.wrapping_sub(rcv.ts_recent) as i32 {
            0 => is_above,
            newer => newer > 0,
        }
    }

    /// Returns whether the segment passes the timestamp checks of RFC 7323. A segment that fails
    /// has been counted, and answered if required. `span`: its length in sequence space.
    #[inline]
    fn passes_timestamp_checks(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        span: u32,
    ) -> bool {
        let tcb = &mut self.tcb;
        if !tcb.has(ConnectionFlags::TIMESTAMPS) || seg.flags & RST != 0 {
            return true; // resets are exempt
        }
        if !seg.has_ts {
            // Section 3.2: a segment without the option is dropped. A SYN continues: the peer may
            // have restarted, and the challenge ACK of RFC 5961 section 4 shows it that the
            // connection still exists here.
            let is_syn = seg.flags & SYN != 0;
            cx.shared.net.stats.in_errs += u64::from(!is_syn);
            return is_syn;
        }
        // PAWS (section 5.3).
        let rcv = &self.receiver.rcv;
        let old = (seg.ts_val.wrapping_sub(rcv.ts_recent) as i32) < 0;
        if old && cx.now.0.saturating_sub(tcb.last_rx) < PAWS_VALID_NS {
            cx.shared.stats.paws_drops += 1;
            if span > 0 || cx.may_answer(rcv, seg) {
                cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
            }
            return false;
        }
        true
    }

    /// Checks the sequence number (RFC 9293 section 3.10.7.4, first). A pure ACK may lie between
    /// our last ACK and RCV.NXT, or on the right edge of the window, as in Linux: legitimate peers
    /// send both. A reset on the right edge is outside (RFC 5961 section 3.2), unless its sequence
    /// number is RCV.NXT. `span`: the segment's length in sequence space.
    #[inline]
    fn is_acceptable(&mut self, cx: &mut TcpContext<'_>, seg: &Segment, span: u32) -> bool {
        let rcv = &self.receiver.rcv;
        let window = rcv.window();
        let right = rcv.nxt + window;
        if span == 0 {
            let inside = if seg.flags & RST == 0 {
                seg.seq.le(right)
            } else {
                seg.seq.lt(right) || seg.seq == rcv.nxt
            };
            inside && seg.seq.ge(rcv.last_ack_sent)
        } else if window == 0 && seg.seq == rcv.nxt {
            // Its data does not fit, but its ACK counts, and it may be a window probe, which must
            // be answered.
            cx.shared.stats.out_of_window += 1;
            if cx.may_answer(rcv, seg) {
                cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
            }
            true
        } else {
            seg.seq.lt(right) && (seg.seq + span).gt(rcv.nxt)
        }
    }

    /// Answers a segment outside the receive window with an ACK (RFC 9293 section 3.10.7.4, first).
    /// `len`: its payload; `span`: its length in sequence space.
    fn on_unacceptable_segment(
        &mut self,
        cx: &mut TcpContext<'_>,
        mut seg: Segment,
        len: u32,
        span: u32,
    ) -> SegmentVerdict {
        let tcb = &mut self.tcb;
        let end = seg.seq + span;
        cx.shared.stats.out_of_window += 1;
        if seg.flags & RST != 0 {
            return SegmentVerdict::Done;
        }
        if seg.flags & SYN != 0 {
            cx.on_unexpected_syn(&mut self.tcb);
            return SegmentVerdict::Done;
        }
        if tcb.state == TcpState::TimeWait && seg.flags & FIN != 0 {
            tcb.start_time_wait_timer(cx);
        }
        let rcv = &self.receiver.rcv;
        let old = end.le(rcv.nxt) && rcv.nxt - seg.seq <= cx.shared.recv_window;
        // Retransmitted data means that our ACK was lost. Segments without data may come from two
        // stacks that correct each other in an endless loop, and a peer that has not proved that it
        // receives our segments may be a forged address: answers to those are rate-limited.
        let proven = self.tcb.state != TcpState::SynReceived;
        if span > 0 && proven || cx.may_answer(rcv, &seg) {
            cx.shared.stats.dup_bytes_in += u64::from(len);
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
            // Reported by D-SACK (RFC 2883 section 4), unless it lies outside all our windows.
            if old {
                self.receiver
                    .note_duplicate(&self.tcb, seg.seq, seg.seq + len);
            }
        }
        // The ACK of an old segment is processed nevertheless: otherwise two ends whose windows
        // shrank would ignore each other forever. Its window and SACK blocks are ignored.
        let snd = &self.sender.snd;
        if old
            && seg.flags & (SYN | ACK) == ACK
            && proven
            && seg.ack.gt(snd.una)
            && seg.ack.le(snd.nxt)
        {
            seg.sacks = 0;
            self.sender
                .process_ack(&mut self.tcb, &self.path, cx, &seg, 1);
            if let Some(verdict) = self.on_fin_acknowledged(cx) {
                return verdict;
            }
        }
        SegmentVerdict::Done
    }

    /// Handles a reset (RFC 9293 section 3.10.7.4 second, with RFC 5961 section 3.2): only one with
    /// the exact next sequence number takes effect; one elsewhere in the window is answered with a
    /// challenge ACK.
    fn on_reset(&mut self, cx: &mut TcpContext<'_>, seg: &Segment) -> SegmentVerdict {
        if self.tcb.state == TcpState::TimeWait {
            return SegmentVerdict::Done; // RFC 1337
        }
        if seg.seq != self.receiver.rcv.nxt {
            cx.send_challenge_ack(&mut self.tcb);
            return SegmentVerdict::Done;
        }
        cx.shared.stats.in_rsts += 1;
        if self.tcb.state == TcpState::SynReceived {
            cx.shared.stats.attempt_fails += 1;
            self.fail_connection(cx, Events::REFUSED);
        } else {
            cx.shared.stats.estab_resets += 1;
            self.fail_connection(cx, Events::RESET);
        }
        SegmentVerdict::Done
    }

    /// Changes the state if our FIN has been acknowledged. `Some`: the connection ended, and the
    /// segment needs no further processing.
    fn on_fin_acknowledged(&mut self, cx: &mut TcpContext<'_>) -> Option<SegmentVerdict> {
        let tcb = &mut self.tcb;
        if !tcb.has(ConnectionFlags::FIN_SENT) || !self.sender.snd.is_all_acked() {
            return None;
        }
        match tcb.state {
            TcpState::FinWait1 => {
                tcb.state = TcpState::FinWait2;
                if tcb.has(ConnectionFlags::RELEASED) {
                    self.tcb.start_orphan_timer(cx);
                }
                None
            }
            TcpState::Closing => {
                self.enter_time_wait(cx);
                None
            }
            TcpState::LastAck => {
                self.enter_closed(cx);
                cx.raise_event(&mut self.tcb, Events::CLOSED);
                Some(SegmentVerdict::Done)
            }
            _ => None,
        }
    }

    /// Processes the payload and the FIN of an acceptable segment (section 3.10.7.4, seventh and
    /// eighth).
    pub(crate) fn process_payload(
        &mut self,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        buffer: B,
    ) -> SegmentVerdict {
        let tcb = &mut self.tcb;
        if !matches!(
            tcb.state,
            TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2
        ) {
            // No new data can follow the peer's FIN (section 3.10.7.4 seventh); it is acknowledged
            // again.
            cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
            return SegmentVerdict::Done;
        }
        if tcb.has(ConnectionFlags::RELEASED) && buffer.remaining() > 0 {
            // The connection has no owner to read this data: reset it (RFC 9293 section 3.6,
            // MAY-1).
            self.schedule_reset(cx);
            self.enter_closed(cx);
            return SegmentVerdict::Done;
        }
        let is_fin_next = if tcb.has(ConnectionFlags::UNREAD) {
            self.receiver.take_unread_payload(tcb, cx, seg, buffer)
        } else {
            self.receiver.take_payload(tcb, cx, seg, buffer)
        };
        if is_fin_next {
            self.on_fin(cx);
        }
        SegmentVerdict::Done
    }

    /// Handles the peer's FIN once all data before it was received (section 3.10.7.4 eighth).
    fn on_fin(&mut self, cx: &mut TcpContext<'_>) {
        let tcb = &mut self.tcb;
        self.receiver.rcv.nxt += 1;
        tcb.flags |= ConnectionFlags::FIN_RECEIVED;
        cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
        cx.raise_event(tcb, Events::PEER_FIN);
        match tcb.state {
            TcpState::Established => tcb.state = TcpState::CloseWait,
            TcpState::FinWait1 => tcb.state = TcpState::Closing,
            TcpState::FinWait2 => self.enter_time_wait(cx),
            _ => {}
        }
    }
}
