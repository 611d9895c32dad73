//! What a received segment does to its connection (RFC 9293 section 3.10.7).

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::Connection;
use crate::connection::context::{ConnectionContext, SharedState};
use crate::queues::out_of_order_queue::Reassembly;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, FIN, PSH, RST, SYN, Segment};

/// What else the stack must do after a segment.
pub(crate) enum Verdict {
    Done,
    /// Answer with a reset: the segment fits no connection.
    Reset,
    /// TIME-WAIT gives way to this SYN (RFC 6191).
    Reopen,
}

impl SharedState {
    /// RFC 5961 section 7.
    fn may_challenge(&mut self, now: Instant) -> bool {
        let may = self.challenges.take(now);
        self.stats.challenges_skipped += u64::from(!may);
        may
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    fn challenge(&mut self, cx: &mut ConnectionContext<'_>) {
        if cx.shared.may_challenge(cx.now) {
            cx.shared.stats.challenge_acks += 1;
            cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
        }
    }

    /// RFC 5961 section 4: wherever it lies.
    fn syn_on_connection(&mut self, cx: &mut ConnectionContext<'_>) -> Verdict {
        cx.shared.stats.syn_challenges += 1;
        self.challenge(cx);
        Verdict::Done
    }

    /// Everything that `predicted` does not take.
    pub(crate) fn segment(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seg: &Segment,
        b: B,
    ) -> Verdict {
        if self.tcb.state == TcpState::SynSent {
            return self.syn_sent(cx, seg);
        }
        let mut seg = *seg;
        // In SYN-RECEIVED the peer's SYN may come again, or (simultaneous open) as SYN-ACK.
        if self.tcb.state == TcpState::SynReceived
            && seg.flags & (SYN | RST) == SYN
            && seg.seq + 1 == self.tcb.rcv_nxt
        {
            if seg.flags & ACK == 0 {
                cx.owe(&mut self.tcb, ConnectionFlags::NEED_SYN);
                return Verdict::Done;
            }
            seg.seq += 1;
            seg.flags &= !SYN;
            // The window of a SYN-ACK is not scaled; the next segment brings the real one.
            seg.window >>= self.tcb.scales.send();
        }
        let len = b.remaining() as u32;
        let span = len + u32::from(seg.flags & FIN != 0) + u32::from(seg.flags & SYN != 0);
        let h = &mut self.tcb;
        if h.state == TcpState::TimeWait && seg.flags & (SYN | ACK | RST) == SYN {
            // RFC 6191, RFC 9293 section 3.6.1.
            let newer = if seg.has_ts && h.has(ConnectionFlags::TIMESTAMPS) {
                (seg.ts_val.wrapping_sub(h.ts_recent) as i32) > 0
            } else {
                seg.seq.gt(h.rcv_nxt)
            };
            if newer {
                return Verdict::Reopen;
            }
        }
        // RFC 7323 section 3.2. A SYN is let through: a peer that starts anew has to be told of
        // the connection (RFC 5961 section 4).
        if h.has(ConnectionFlags::TIMESTAMPS) && !seg.has_ts && seg.flags & (RST | SYN) == 0 {
            cx.shared.stats.in_errs += 1;
            return Verdict::Done;
        }
        // PAWS (RFC 7323 section 5.3); resets are exempt.
        if h.has(ConnectionFlags::TIMESTAMPS) && seg.has_ts && seg.flags & RST == 0 {
            let old = (seg.ts_val.wrapping_sub(h.ts_recent) as i32) < 0;
            // Section 5.5: after 24 days of silence the comparison means nothing.
            if old && cx.now.0.saturating_sub(h.last_rx) < 24 * 86_400 * 1_000_000_000 {
                cx.shared.stats.paws_drops += 1;
                if span > 0 || cx.shared.may_challenge(cx.now) {
                    cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
                }
                return Verdict::Done;
            }
        }
        // Sequence check (section 3.10.7.4, first). A pure ACK may lie between our last ACK and
        // RCV.NXT, or on the right edge, as Linux has it: both happen to honest peers.
        let window = h.rcv_adv.distance_from(h.rcv_nxt).max(0) as u32;
        let right = h.rcv_nxt + window;
        let end = seg.seq + span;
        let acceptable = if span == 0 {
            seg.seq.ge(h.last_ack_sent) && seg.seq.le(right)
        } else if window == 0 && seg.seq == h.rcv_nxt {
            // Nothing of it fits, but its ACK counts; it is answered.
            cx.shared.stats.out_of_window += 1;
            cx.owe(h, ConnectionFlags::NEED_ACK);
            true
        } else {
            seg.seq.lt(right) && end.gt(h.rcv_nxt)
        };
        if !acceptable {
            cx.shared.stats.out_of_window += 1;
            if seg.flags & RST != 0 {
                return Verdict::Done;
            }
            if seg.flags & SYN != 0 && h.state != TcpState::SynReceived {
                return self.syn_on_connection(cx);
            }
            if h.state == TcpState::TimeWait && seg.flags & FIN != 0 {
                h.start_closing_timer(cx, Timer::TimeWait);
            }
            let old = end.le(h.rcv_nxt) && h.rcv_nxt - seg.seq <= cx.shared.recv_window;
            // Data again means our ACK was lost; a bare segment may be one of two stacks
            // correcting each other for ever: limited.
            if span > 0 || cx.shared.may_challenge(cx.now) {
                cx.shared.stats.dup_bytes_in += u64::from(len);
                cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
                // RFC 2883 section 4; not for what lies beyond any window of ours.
                if old {
                    self.duplicate(seg.seq, seg.seq + len);
                }
            }
            // The ACK of an old segment counts all the same: two ends whose windows shrank would
            // else ignore each other for ever. Its window and blocks do not.
            let h = &self.tcb;
            if old
                && seg.flags & (SYN | ACK) == ACK
                && h.state != TcpState::SynReceived
                && seg.ack.gt(h.snd_una)
                && seg.ack.le(h.snd_nxt)
            {
                seg.sacks = 0;
                self.acknowledge(cx, &seg, 1);
                if let Some(v) = self.fin_acknowledged(cx) {
                    return v;
                }
            }
            return Verdict::Done;
        }
        if seg.flags & RST != 0 {
            return self.reset_received(cx, &seg);
        }
        if seg.flags & SYN != 0 {
            return self.syn_on_connection(cx);
        }
        if seg.flags & ACK == 0 {
            return Verdict::Done;
        }
        h.last_rx = if h.state == TcpState::SynReceived {
            h.last_rx
        } else {
            cx.now.0
        };
        h.probes = 0;
        if h.state == TcpState::SynReceived {
            if seg.ack != h.snd_nxt {
                return Verdict::Reset;
            }
            if let Some(v) = self.established(cx, &seg) {
                return v;
            }
        }
        let h = &mut self.tcb;
        // RFC 5961 section 5.2, and what was never sent is never acknowledged.
        if seg.ack.gt(h.snd_nxt) || seg.ack.lt(h.snd_una - h.max_snd_wnd) {
            cx.shared.stats.bad_acks += 1;
            self.challenge(cx);
            return Verdict::Done;
        }
        // Not before the ACK proved good: a timestamp from the future that is believed makes
        // everything else that comes look old.
        if seg.has_ts && seg.seq.le(h.last_ack_sent) {
            h.ts_recent = seg.ts_val;
        }
        if seg.ack.ge(h.snd_una) {
            self.acknowledge(cx, &seg, b.remaining());
        }
        if let Some(v) = self.fin_acknowledged(cx) {
            return v;
        }
        if len > 0 && self.tcb.has(ConnectionFlags::ECN) {
            self.marked(cx, &seg);
        }
        if span > 0 {
            self.payload(cx, &seg, b)
        } else {
            Verdict::Done
        }
    }

    /// RFC 9293 section 3.10.7.4 second, with RFC 5961 section 3.2: only the exact next sequence
    /// number resets; in the window it is asked for again.
    fn reset_received(&mut self, cx: &mut ConnectionContext<'_>, seg: &Segment) -> Verdict {
        if self.tcb.state == TcpState::TimeWait {
            return Verdict::Done; // RFC 1337
        }
        if seg.seq != self.tcb.rcv_nxt {
            self.challenge(cx);
            return Verdict::Done;
        }
        cx.shared.stats.in_rsts += 1;
        if self.tcb.state == TcpState::SynReceived {
            cx.shared.stats.attempt_fails += 1;
            self.fail(cx, Events::REFUSED);
        } else {
            cx.shared.stats.estab_resets += 1;
            self.fail(cx, Events::RESET);
        }
        Verdict::Done
    }

    /// State changes that the ACK of our FIN brings.
    fn fin_acknowledged(&mut self, cx: &mut ConnectionContext<'_>) -> Option<Verdict> {
        let h = &mut self.tcb;
        if !h.has(ConnectionFlags::FIN_SENT) || h.snd_una != h.snd_nxt {
            return None;
        }
        match h.state {
            TcpState::FinWait1 => {
                h.state = TcpState::FinWait2;
                if h.has(ConnectionFlags::RELEASED) {
                    h.start_closing_timer(cx, Timer::Orphan);
                }
                None
            }
            TcpState::Closing => {
                self.enter_time_wait(cx);
                None
            }
            TcpState::LastAck => {
                self.closed(cx);
                cx.event(&mut self.tcb, Events::CLOSED);
                Some(Verdict::Done)
            }
            _ => None,
        }
    }

    /// Payload and FIN of an acceptable segment.
    fn payload(&mut self, cx: &mut ConnectionContext<'_>, seg: &Segment, mut b: B) -> Verdict {
        let h = &mut self.tcb;
        if !matches!(
            h.state,
            TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2
        ) {
            // After the peer's FIN there is nothing new (section 3.10.7.4 seventh); acknowledge again.
            cx.owe(h, ConnectionFlags::NEED_ACK);
            return Verdict::Done;
        }
        if h.has(ConnectionFlags::RELEASED) && b.remaining() > 0 {
            // Data that nobody will read (RFC 9293 section 3.6, MAY-1).
            self.send_reset(cx);
            self.closed(cx);
            return Verdict::Done;
        }
        let mut seq = seg.seq;
        let mut fin = seg.flags & FIN != 0;
        if seq.lt(h.rcv_nxt) {
            let old = (h.rcv_nxt - seq).min(b.remaining() as u32);
            cx.shared.stats.dup_bytes_in += u64::from(old);
            b.advance(old as usize);
            cx.owe(h, ConnectionFlags::NEED_ACK);
            self.duplicate(seq, seq + old);
            seq += old;
        }
        let h = &mut self.tcb;
        let space = h.rcv_adv.distance_from(seq).max(0) as usize;
        if b.remaining() > space {
            b.truncate(space);
            fin = false;
        }
        if fin && !h.has(ConnectionFlags::FIN_SEEN) {
            self.fin_at = seq + b.remaining() as u32;
            h.flags |= ConnectionFlags::FIN_SEEN;
            if let Some(o) = &mut self.ooo {
                o.cut(self.fin_at);
            }
        }
        if h.has(ConnectionFlags::FIN_SEEN) {
            // There is nothing behind a FIN (section 3.10.7.4 seventh).
            let space = self.fin_at.distance_from(seq).max(0) as usize;
            b.truncate(b.remaining().min(space));
        }
        if b.remaining() > 0 {
            self.recount(cx);
            let full = cx.shared.full(self.rx.counted);
            if seq == self.tcb.rcv_nxt {
                // What fills a hole may pass, or a full hold could never drain; when many did, it
                // takes the place of the last that is held (RFC 2018 section 8).
                if full && !self.make_room(cx) {
                    cx.shared.stats.rcv_q_drop += 1;
                    cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
                    return Verdict::Done;
                }
                self.deliver(cx, b, seg.flags & PSH != 0);
                if let Some(o) = &mut self.ooo {
                    let before = self.rx.len_bytes();
                    self.tcb.rcv_nxt = o.deliver(self.tcb.rcv_nxt, &mut self.rx);
                    cx.shared.stats.in_bytes += (self.rx.len_bytes() - before) as u64;
                    if o.is_idle() {
                        self.ooo = None;
                    }
                    cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
                }
            } else {
                cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
                if full {
                    cx.shared.stats.rcv_q_drop += 1;
                } else {
                    cx.shared.stats.ofo_queue += 1;
                    let o = self.ooo.get_or_insert_with(|| Box::new(Reassembly::new()));
                    let len = b.remaining();
                    let kept = o.insert(seq, b);
                    if kept == 0 && self.tcb.has(ConnectionFlags::SACK) {
                        o.duplicate(seq, seq + len as u32);
                    }
                    if kept > 0 && cx.shared.config.show_out_of_order {
                        o.remember_unseen(seq);
                        cx.event(&mut self.tcb, Events::OUT_OF_ORDER);
                    }
                    cx.shared.stats.dup_bytes_in += (len - kept) as u64;
                }
            }
        }
        self.recount(cx);
        let seen = self.tcb.flags & (ConnectionFlags::FIN_SEEN | ConnectionFlags::FIN_RECEIVED)
            == ConnectionFlags::FIN_SEEN;
        if seen && self.fin_at == self.tcb.rcv_nxt {
            self.fin_received(cx);
        } else if fin {
            cx.owe(&mut self.tcb, ConnectionFlags::NEED_ACK);
        }
        Verdict::Done
    }

    /// Room for a segment that fills a hole of a connection that holds all it may: some above the
    /// limit, then in exchange.
    #[cold]
    fn make_room(&mut self, cx: &mut ConnectionContext<'_>) -> bool {
        let limit = cx.shared.config.max_recv_buffers;
        let Some(o) = self.ooo.as_mut().filter(|o| o.buffers() > 0) else {
            return false;
        };
        let all = cx.shared.config.max_held_buffers;
        if (self.rx.counted as usize) < limit + limit / 8
            && cx.shared.held < all.saturating_add(all / 8)
        {
            return true;
        }
        cx.shared.stats.rcv_pruned += 1;
        o.drop_last()
    }

    /// Section 3.10.7.4 eighth.
    fn fin_received(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.tcb;
        h.rcv_nxt += 1;
        h.flags |= ConnectionFlags::FIN_RECEIVED;
        cx.owe(h, ConnectionFlags::NEED_ACK);
        cx.event(h, Events::PEER_FIN);
        match h.state {
            TcpState::Established => h.state = TcpState::CloseWait,
            TcpState::FinWait1 => h.state = TcpState::Closing,
            TcpState::FinWait2 => self.enter_time_wait(cx),
            _ => {}
        }
    }
}
