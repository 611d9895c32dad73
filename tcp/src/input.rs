//! What a received segment does to its connection (RFC 9293 section 3.10.7).

use crate::conn::{Conn, Phase, flag};
use crate::reassembly::Reassembly;
use crate::recovery::Recovery;
use crate::segment::{ACK, FIN, PSH, RST, SYN, Segment};
use crate::shared::Shared;
use crate::stack::State;
use crate::{Events, Instant, RecvBuf, StackConfig};

/// RFC 9293 section 3.7.1 (MUST-15): when the peer does not say.
const MSS_DEFAULT_V4: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1220;
/// Smaller offers are attacks on our packet rate.
const MSS_FLOOR: u16 = 64;

/// What else the stack must do after a segment.
pub(crate) enum Verdict {
    Done,
    /// Answer with a reset: the segment fits no connection.
    Reset,
    /// TIME-WAIT gives way to this SYN (RFC 6191).
    Reopen,
}

impl<B: RecvBuf, R> Conn<B, R> {
    /// Takes over what the peer's SYN says.
    pub(crate) fn negotiate(&mut self, seg: &Segment, config: &StackConfig, wscale: u8) {
        let h = &mut self.hot;
        h.rcv_nxt = seg.seq + 1;
        h.last_ack_sent = h.rcv_nxt;
        h.rcv_adv = h.rcv_nxt + config.recv_window.min(0xffff);
        let v6 = self.template.is_v6();
        let (overhead, default) = if v6 {
            (60, MSS_DEFAULT_V6)
        } else {
            (40, MSS_DEFAULT_V4)
        };
        let mut emss = seg
            .mss
            .unwrap_or(default)
            .max(MSS_FLOOR)
            .min(config.mtu - overhead);
        h.flags &= !(flag::TIMESTAMPS | flag::SACK);
        if config.timestamps && seg.has_ts {
            h.flags |= flag::TIMESTAMPS;
            h.ts_recent = seg.ts_val;
            emss -= 12;
        }
        if config.sack && seg.sack_permitted {
            h.flags |= flag::SACK;
        }
        (h.snd_wscale, h.rcv_wscale) = match seg.wscale {
            Some(s) => (s, wscale),
            None => (0, 0),
        };
        h.emss = emss;
        h.snd_wnd = u32::from(seg.window); // a SYN's window is never scaled
        h.max_snd_wnd = h.snd_wnd;
        h.snd_wl1 = seg.seq;
        h.snd_wl2 = seg.ack;
        h.cwnd = config
            .initial_window
            .max(1)
            .saturating_mul(u32::from(emss))
            .min(1 << 30);
    }
}

impl Shared {
    /// Header prediction: an established connection, the next expected segment, nothing special.
    /// Gives the buffer back when it is anything else.
    #[inline]
    pub(crate) fn predicted<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        b: B,
        now: Instant,
    ) -> Result<(), B> {
        let h = &mut c.hot;
        let len = b.remaining();
        let ack = seg.ack.0.wrapping_sub(h.snd_una.0);
        if h.state != State::Established
            || seg.flags & (FIN | SYN | RST | ACK) != ACK
            || seg.seq != h.rcv_nxt
            || h.has(flag::RECOVERING | flag::RELEASED)
            || seg.has_ts != h.has(flag::TIMESTAMPS)
            || (seg.ts_val.wrapping_sub(h.ts_recent) as i32) < 0 && seg.has_ts
            || seg.sacks != 0
            || ack > h.flight()
            || len as u32 > h.rcv_adv - h.rcv_nxt
            || (len == 0 && ack == 0)
        {
            return Err(b);
        }
        if len > 0 && (c.ooo.is_some() || c.rx.buffers() >= self.config.max_recv_buffers) {
            return Err(b);
        }
        self.stats.hp_hits += 1;
        h.last_rx = now.0;
        h.probes = 0;
        if seg.seq.le(h.last_ack_sent) {
            h.ts_recent = if seg.has_ts { seg.ts_val } else { h.ts_recent };
        }
        self.acknowledge(index, c, seg, len, now);
        if len > 0 {
            self.deliver(index, c, b, seg.flags & PSH != 0, now);
        }
        Ok(())
    }

    /// In-order payload: to the receive queue, and the ACK policy (RFC 9293 section 3.8.6.3).
    #[inline]
    fn deliver<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        b: B,
        push: bool,
        now: Instant,
    ) {
        let len = b.remaining();
        self.stats.in_bytes += len as u64;
        let h = &mut c.hot;
        h.rcv_nxt += len as u32;
        c.rx.push(b);
        h.unacked_segs = h.unacked_segs.saturating_add(1);
        if push || h.unacked_segs >= 2 {
            self.owe(index, h, flag::NEED_ACK);
        } else if h.ack_at == 0 {
            h.ack_at = now.0 + self.delayed_ack;
            self.arm(index, h, h.ack_at);
        }
        self.event(index, h, Events::READABLE);
    }

    /// The ACK and window of an acceptable segment; its ACK is at most SND.NXT.
    #[inline]
    fn acknowledge<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        len: usize,
        now: Instant,
    ) {
        let h = &mut c.hot;
        let emss = u32::from(h.emss);
        let room = h.room();
        let old_window = h.snd_wnd;
        if h.snd_wl1.lt(seg.seq) || (h.snd_wl1 == seg.seq && h.snd_wl2.le(seg.ack)) {
            h.snd_wnd = u32::from(seg.window) << h.snd_wscale;
            h.max_snd_wnd = h.max_snd_wnd.max(h.snd_wnd);
            h.snd_wl1 = seg.seq;
            h.snd_wl2 = seg.ack;
        }
        self.stats.pure_acks_in += u64::from(len == 0);
        let new = seg.ack.gt(h.snd_una);
        let mut delivered = 0;
        if new {
            let a = c.tx.ack_to(seg.ack, &mut h.pipe);
            h.snd_una = seg.ack;
            h.backoff = 0;
            h.dup_acks = 0;
            c.stalled_since = 0;
            delivered = a.delivered;
            if let Some(at) = a.sent_at {
                h.rtt.sample(now.0.saturating_sub(at));
            }
            if let Some(r) = &mut c.recovery {
                r.acked(seg.ack, a.sacked_segs, a.lost_segs, a.newest);
            }
            if a.records {
                self.event(index, h, Events::ACKED);
            }
            if h.snd_una == h.snd_nxt {
                h.rto_at = 0;
            } else {
                self.restart_rto(index, h, now);
            }
        } else if h.has(flag::PERSIST) {
            // The peer answers probes: it is alive (RFC 9293 section 3.8.6.1).
            c.stalled_since = 0;
        }
        let dup =
            !new && len == 0 && h.snd_wnd == old_window && h.flight() > 0 && seg.ack == h.snd_una;
        if h.has(flag::RECOVERING) || seg.sacks > 0 || dup {
            self.recover(index, c, seg, new, dup, delivered, now);
        }
        let h = &mut c.hot;
        if delivered > 0 && h.phase != Phase::Recovery {
            // Growth needs a window that was in use since it was last passed.
            let slow_start = h.cwnd < h.ssthresh;
            let used = h.phase == Phase::Loss
                || if slow_start {
                    c.cwnd_used.saturating_mul(2) >= h.cwnd
                } else {
                    c.cwnd_used + 2 * emss > h.cwnd
                };
            if used {
                c.cc.on_ack(&mut h.cwnd, h.ssthresh, delivered, emss, now.0, h.rtt.srtt);
            }
            if seg.ack.ge(c.cwnd_mark) {
                c.cwnd_mark = h.snd_nxt;
                c.cwnd_used = h.pipe;
                if h.pipe == 0 && h.unsent == 0 {
                    c.cc.on_idle();
                }
            }
        }
        let h = &mut c.hot;
        if room < emss && h.room() >= emss {
            self.event(index, h, Events::WRITABLE);
        }
        let fin = h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED;
        if h.unsent > 0 || h.has(flag::RECOVERING) || fin {
            self.owe(index, h, 0);
        }
        if new && h.snd_una == h.snd_nxt {
            self.update_active(c);
        }
    }

    /// SACK, duplicate ACKs and what follows from them (RFC 6675, 6582, 6937).
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn recover<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        new: bool,
        dup: bool,
        mut delivered: u32,
        now: Instant,
    ) {
        let h = &mut c.hot;
        let r = c
            .recovery
            .get_or_insert_with(|| Box::new(Recovery::new(h.snd_una)));
        self.stats.dup_acks_in += u64::from(dup);
        if h.has(flag::SACK) {
            let (segs, bytes) = r.sack(h, &mut c.tx, seg, now.0);
            self.stats.sacked_segs += u64::from(segs);
            delivered += bytes;
        } else if dup {
            h.dup_acks = h.dup_acks.saturating_add(1);
            if h.dup_acks == 3 && h.phase == Phase::Open {
                r.lose_first(h, &mut c.tx);
            }
            if h.phase == Phase::Recovery {
                delivered += u32::from(h.emss);
            }
        } else if new && h.phase == Phase::Recovery && !r.done(h.snd_una) {
            r.lose_first(h, &mut c.tx); // partial ACK, RFC 6582 section 3.2 (5)
        }
        r.judge(h, &mut c.tx);
        self.stats.lost_retransmit += r.judge_repeated(h, &mut c.tx);
        if new && h.phase != Phase::Open && r.done(h.snd_una) {
            if h.phase == Phase::Recovery {
                h.cwnd = h.ssthresh;
            }
            h.phase = Phase::Open;
        }
        match h.phase {
            Phase::Open if r.lost > 0 => {
                self.stats.fast_recovery += 1;
                r.enter(h, &mut c.cc);
                r.reduce(h, delivered);
            }
            Phase::Recovery => r.reduce(h, delivered),
            _ => {}
        }
        r.settle(h);
        self.owe(index, h, 0);
    }

    fn challenge<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        if self.challenges.take(now) {
            self.stats.challenge_acks += 1;
            self.owe(index, &mut c.hot, flag::NEED_ACK);
        }
    }

    /// Everything that `predicted` does not take.
    pub(crate) fn segment<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        b: B,
        now: Instant,
    ) -> Verdict {
        if c.hot.state == State::SynSent {
            return self.syn_sent(index, c, seg, now);
        }
        let mut seg = *seg;
        // In SYN-RECEIVED the peer's SYN may come again, or (simultaneous open) as SYN-ACK.
        if c.hot.state == State::SynReceived
            && seg.flags & (SYN | RST) == SYN
            && seg.seq + 1 == c.hot.rcv_nxt
        {
            if seg.flags & ACK == 0 {
                self.owe(index, &mut c.hot, flag::NEED_SYN);
                return Verdict::Done;
            }
            seg.seq += 1;
            seg.flags &= !SYN;
            // The window of a SYN-ACK is not scaled; the next segment brings the real one.
            seg.window >>= c.hot.snd_wscale;
        }
        let len = b.remaining() as u32;
        let span = len + u32::from(seg.flags & FIN != 0) + u32::from(seg.flags & SYN != 0);
        let h = &mut c.hot;
        if h.state == State::TimeWait && seg.flags & (SYN | ACK | RST) == SYN {
            // RFC 6191, RFC 9293 section 3.6.1.
            let newer = if seg.has_ts && h.has(flag::TIMESTAMPS) {
                (seg.ts_val.wrapping_sub(h.ts_recent) as i32) > 0
            } else {
                seg.seq.gt(h.rcv_nxt)
            };
            if newer {
                return Verdict::Reopen;
            }
        }
        // PAWS (RFC 7323 section 5.3); resets are exempt.
        if h.has(flag::TIMESTAMPS) && seg.flags & RST == 0 {
            if !seg.has_ts {
                self.stats.in_errs += 1;
                return Verdict::Done;
            }
            let old = (seg.ts_val.wrapping_sub(h.ts_recent) as i32) < 0;
            // Section 5.5: after 24 days of silence the comparison means nothing.
            if old && now.0.saturating_sub(h.last_rx) < 24 * 86_400 * 1_000_000_000 {
                self.stats.paws_drops += 1;
                if span > 0 || self.challenges.take(now) {
                    self.owe(index, h, flag::NEED_ACK);
                }
                return Verdict::Done;
            }
        }
        // Sequence check (section 3.10.7.4, first). A pure ACK may lie between our last ACK and
        // RCV.NXT, or on the right edge, as Linux has it: both happen to honest peers.
        let window = h.rcv_adv.dist(h.rcv_nxt).max(0) as u32;
        let right = h.rcv_nxt + window;
        let end = seg.seq + span;
        let acceptable = if span == 0 {
            seg.seq.ge(h.last_ack_sent) && seg.seq.le(right)
        } else {
            seg.seq.lt(right) && end.gt(h.rcv_nxt)
        };
        if !acceptable {
            self.stats.out_of_window += 1;
            if seg.flags & RST != 0 {
                return Verdict::Done;
            }
            if h.state == State::TimeWait && seg.flags & FIN != 0 {
                h.rto_at = now.0 + crate::time::nanos(self.config.time_wait);
                self.arm(index, h, h.rto_at);
            }
            // Data again means our ACK was lost; a bare segment may be one of two stacks
            // correcting each other for ever: limited.
            if span > 0 || self.challenges.take(now) {
                self.stats.dup_bytes_in += u64::from(len);
                self.owe(index, h, flag::NEED_ACK);
            }
            return Verdict::Done;
        }
        if seg.flags & RST != 0 {
            return self.reset_received(index, c, &seg, now);
        }
        // RFC 5961 section 4.
        if seg.flags & SYN != 0 {
            self.challenge(index, c, now);
            return Verdict::Done;
        }
        if seg.flags & ACK == 0 {
            return Verdict::Done;
        }
        h.last_rx = if h.state == State::SynReceived {
            h.last_rx
        } else {
            now.0
        };
        h.probes = 0;
        if seg.has_ts && seg.seq.le(h.last_ack_sent) {
            h.ts_recent = seg.ts_val;
        }
        if h.state == State::SynReceived {
            if seg.ack != h.snd_nxt {
                return Verdict::Reset;
            }
            if let Some(v) = self.established(index, c, &seg, now) {
                return v;
            }
        }
        let h = &mut c.hot;
        // RFC 5961 section 5.2, and what was never sent is never acknowledged.
        if seg.ack.gt(h.snd_nxt) || seg.ack.lt(h.snd_una - h.max_snd_wnd) {
            self.stats.bad_acks += 1;
            self.challenge(index, c, now);
            return Verdict::Done;
        }
        if seg.ack.ge(h.snd_una) {
            self.acknowledge(index, c, &seg, b.remaining(), now);
        }
        if let Some(v) = self.fin_acknowledged(index, c, now) {
            return v;
        }
        if span > 0 {
            self.payload(index, c, &seg, b, now)
        } else {
            Verdict::Done
        }
    }

    fn syn_sent<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        now: Instant,
    ) -> Verdict {
        let acked = seg.flags & ACK != 0;
        if acked && seg.ack != c.hot.snd_nxt {
            return if seg.flags & RST != 0 {
                Verdict::Done
            } else {
                Verdict::Reset
            };
        }
        if seg.flags & RST != 0 {
            if acked {
                self.stats.in_rsts += 1;
                self.stats.attempt_fails += 1;
                self.fail(index, c, Events::REFUSED);
            }
            return Verdict::Done;
        }
        if seg.flags & SYN == 0 {
            return Verdict::Done;
        }
        c.negotiate(seg, &self.config, self.recv_wscale);
        if acked {
            if let Some(v) = self.established(index, c, seg, now) {
                return v;
            }
            self.owe(index, &mut c.hot, flag::NEED_ACK);
        } else {
            // Simultaneous open (RFC 9293 figure 8).
            c.hot.state = State::SynReceived;
            self.owe(index, &mut c.hot, flag::NEED_SYN);
        }
        Verdict::Done
    }

    /// Our SYN is acknowledged.
    fn established<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        now: Instant,
    ) -> Option<Verdict> {
        if c.hot.has(flag::PASSIVE) && !self.listeners.contains_key(&c.listener) {
            // Nobody listens any more.
            self.closed(index, c);
            c.hot.flags |= flag::RELEASED;
            return Some(Verdict::Reset);
        }
        let h = &mut c.hot;
        h.snd_una = seg.ack;
        c.cwnd_mark = seg.ack;
        h.flags &= !flag::NEED_SYN;
        h.state = State::Established;
        h.rto_at = 0;
        if h.backoff == 0 {
            h.rtt.sample(now.0.saturating_sub(h.last_rx));
        }
        h.backoff = 0;
        h.last_rx = now.0;
        self.stats.curr_estab += 1;
        if h.has(flag::PASSIVE) {
            h.flags &= !flag::RELEASED;
            self.stats.passive_opens += 1;
            self.event(index, h, Events::ACCEPTED);
        } else {
            self.event(index, h, Events::CONNECTED | Events::WRITABLE);
        }
        if h.has(flag::FIN_QUEUED) {
            h.state = State::FinWait1;
            self.stats.curr_estab -= 1;
        }
        self.update_active(c);
        if let Some(k) = self.config.keepalive {
            let at = now.0 + crate::time::nanos(k.idle);
            self.arm(index, &mut c.hot, at);
        }
        self.owe(index, &mut c.hot, 0);
        None
    }

    /// RFC 9293 section 3.10.7.4 second, with RFC 5961 section 3.2: only the exact next sequence
    /// number resets; in the window it is asked for again.
    fn reset_received<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        now: Instant,
    ) -> Verdict {
        if c.hot.state == State::TimeWait {
            return Verdict::Done; // RFC 1337
        }
        if seg.seq != c.hot.rcv_nxt {
            self.challenge(index, c, now);
            return Verdict::Done;
        }
        self.stats.in_rsts += 1;
        if c.hot.state == State::SynReceived {
            self.stats.attempt_fails += 1;
            self.fail(index, c, Events::REFUSED);
        } else {
            self.stats.estab_resets += 1;
            self.fail(index, c, Events::RESET);
        }
        Verdict::Done
    }

    /// State changes that the ACK of our FIN brings.
    fn fin_acknowledged<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
    ) -> Option<Verdict> {
        let h = &mut c.hot;
        if !h.has(flag::FIN_SENT) || h.snd_una != h.snd_nxt {
            return None;
        }
        match h.state {
            State::FinWait1 => {
                h.state = State::FinWait2;
                if h.has(flag::RELEASED) {
                    h.rto_at = now.0 + crate::time::nanos(self.config.time_wait);
                    self.arm(index, h, h.rto_at);
                }
                None
            }
            State::Closing => {
                self.enter_time_wait(index, c, now);
                None
            }
            State::LastAck => {
                self.closed(index, c);
                self.event(index, &mut c.hot, Events::CLOSED);
                Some(Verdict::Done)
            }
            _ => None,
        }
    }

    /// Payload and FIN of an acceptable segment.
    fn payload<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        seg: &Segment,
        mut b: B,
        now: Instant,
    ) -> Verdict {
        let h = &mut c.hot;
        if !matches!(
            h.state,
            State::Established | State::FinWait1 | State::FinWait2
        ) {
            // After the peer's FIN there is nothing new (section 3.10.7.4 seventh); acknowledge again.
            self.owe(index, h, flag::NEED_ACK);
            return Verdict::Done;
        }
        if h.has(flag::RELEASED) && b.remaining() > 0 {
            // Data that nobody will read (RFC 9293 section 3.6, MAY-1).
            self.send_reset(c, now);
            self.closed(index, c);
            return Verdict::Done;
        }
        let mut seq = seg.seq;
        let mut fin = seg.flags & FIN != 0;
        if seq.lt(h.rcv_nxt) {
            let old = (h.rcv_nxt - seq).min(b.remaining() as u32);
            self.stats.dup_bytes_in += u64::from(old);
            b.advance(old as usize);
            seq += old;
            self.owe(index, h, flag::NEED_ACK);
        }
        let space = h.rcv_adv.dist(seq).max(0) as usize;
        if b.remaining() > space {
            b.truncate(space);
            fin = false;
        }
        if fin {
            c.fin_at = seq + b.remaining() as u32;
            h.flags |= flag::FIN_SEEN;
        }
        if b.remaining() > 0 {
            let held = c.rx.buffers() + c.ooo.as_ref().map_or(0, |o| o.buffers());
            if seq == h.rcv_nxt {
                // What fills a hole may always pass, or a full hold could never drain.
                if held >= self.config.max_recv_buffers && !c.has_holes() {
                    self.stats.rcv_q_drop += 1;
                    self.owe(index, &mut c.hot, flag::NEED_ACK);
                    return Verdict::Done;
                }
                self.deliver(index, c, b, seg.flags & PSH != 0, now);
                if let Some(o) = &mut c.ooo {
                    let before = c.rx.len_bytes();
                    c.hot.rcv_nxt = o.deliver(c.hot.rcv_nxt, &mut c.rx);
                    self.stats.in_bytes += (c.rx.len_bytes() - before) as u64;
                    if o.is_empty() {
                        c.ooo = None;
                    }
                    self.owe(index, &mut c.hot, flag::NEED_ACK);
                }
            } else {
                self.owe(index, h, flag::NEED_ACK);
                if held >= self.config.max_recv_buffers {
                    self.stats.rcv_q_drop += 1;
                } else {
                    self.stats.ofo_queue += 1;
                    let o = c.ooo.get_or_insert_with(|| Box::new(Reassembly::new()));
                    let len = b.remaining();
                    let kept = o.insert(seq, b);
                    self.stats.dup_bytes_in += (len - kept) as u64;
                }
            }
        }
        let seen = c.hot.flags & (flag::FIN_SEEN | flag::FIN_RECEIVED) == flag::FIN_SEEN;
        if seen && c.fin_at == c.hot.rcv_nxt {
            self.fin_received(index, c, now);
        } else if fin {
            self.owe(index, &mut c.hot, flag::NEED_ACK);
        }
        Verdict::Done
    }

    /// Section 3.10.7.4 eighth.
    fn fin_received<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        let h = &mut c.hot;
        h.rcv_nxt += 1;
        h.flags |= flag::FIN_RECEIVED;
        self.owe(index, h, flag::NEED_ACK);
        self.event(index, h, Events::PEER_FIN);
        match h.state {
            State::Established => h.state = State::CloseWait,
            State::FinWait1 => h.state = State::Closing,
            State::FinWait2 => self.enter_time_wait(index, c, now),
            _ => {}
        }
    }
}
