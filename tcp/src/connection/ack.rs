//! What an acknowledgement does: header prediction for the straight path, the scoreboard and the
//! congestion window for the rest.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::ticks;
use crate::congestion::{DeliveredBytes, RecoveryPhase};
use crate::connection::Connection;
use crate::connection::context::ConnectionContext;
use crate::loss::rack;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH, RST, SYN, Segment};

impl<B: RecvBuf, R> Connection<B, R> {
    /// Header prediction: an established connection, the next expected segment, nothing special.
    /// Gives the buffer back when it is anything else.
    #[inline]
    pub(crate) fn predicted(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seg: &Segment,
        b: B,
    ) -> Result<(), B> {
        let h = &mut self.tcb;
        let len = b.remaining();
        let ack = seg.ack.0.wrapping_sub(h.snd_una.0);
        if h.state != TcpState::Established
            || seg.flags & (FIN | SYN | RST | ACK | ECE | CWR) != ACK
            || seg.ce != h.has(ConnectionFlags::LAST_WAS_MARKED)
            || seg.seq != h.rcv_nxt
            || h.has(
                ConnectionFlags::RECOVERING | ConnectionFlags::RELEASED | ConnectionFlags::FIN_SEEN,
            )
            || seg.has_ts != h.has(ConnectionFlags::TIMESTAMPS)
            || (seg.ts_val.wrapping_sub(h.ts_recent) as i32) < 0 && seg.has_ts
            || seg.sacks != 0
            || ack > h.flight()
            || len as u32 > h.rcv_adv - h.rcv_nxt
            || (len == 0 && ack == 0)
        {
            return Err(b);
        }
        if len > 0 && (self.ooo.is_some() || cx.shared.full(self.rx.counted)) {
            return Err(b);
        }
        cx.shared.stats.hp_hits += 1;
        h.last_rx = cx.now.0;
        h.probes = 0;
        if seg.seq.le(h.last_ack_sent) {
            h.ts_recent = if seg.has_ts { seg.ts_val } else { h.ts_recent };
        }
        self.acknowledge(cx, seg, len);
        if len > 0 {
            self.deliver(cx, b, seg.flags & PSH != 0);
        }
        Ok(())
    }

    /// In-order payload: to the receive queue, and the ACK policy (RFC 9293 section 3.8.6.3).
    #[inline]
    pub(crate) fn deliver(&mut self, cx: &mut ConnectionContext<'_>, b: B, push: bool) {
        let len = b.remaining() as u32;
        self.rx.push(b);
        // What a port put together counts as several (RFC 9293 section 3.8.6.3).
        let counted = 1 + u32::from(len > u32::from(self.tcb.emss));
        self.arrived(cx, (1, counted, len), push);
    }

    /// `bytes` in so many buffers were put into the receive queue: what `deliver` does beside.
    #[inline]
    pub(crate) fn arrived(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        (buffers, segs, bytes): (u32, u32, u32),
        push: bool,
    ) {
        cx.shared.stats.in_bytes += u64::from(bytes);
        let h = &mut self.tcb;
        h.rcv_nxt += bytes;
        self.rx.counted += buffers;
        cx.shared.held += buffers as usize;
        h.unacked_segs = (u32::from(h.unacked_segs) + segs).min(255) as u8;
        if push || h.unacked_segs >= 2 {
            cx.owe(h, ConnectionFlags::NEED_ACK);
        } else if h.ack_at == 0 {
            h.ack_at = cx.now.0 + cx.shared.delayed_ack;
            cx.arm(h, h.ack_at);
        }
        cx.event(h, Events::READABLE);
    }

    /// The ACK and window of an acceptable segment; its ACK is at most SND.NXT.
    #[inline]
    pub(crate) fn acknowledge(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seg: &Segment,
        len: usize,
    ) {
        let h = &mut self.tcb;
        let emss = u32::from(h.emss);
        let room = h.room();
        let phase = h.phase;
        let old_window = h.snd_wnd;
        if h.snd_wl1.lt(seg.seq) || (h.snd_wl1 == seg.seq && h.snd_wl2.le(seg.ack)) {
            h.snd_wnd = u32::from(seg.window) << h.scales.send();
            h.max_snd_wnd = h.max_snd_wnd.max(h.snd_wnd);
            h.snd_wl1 = seg.seq;
            h.snd_wl2 = seg.ack;
        }
        if old_window < h.flight() && h.snd_wnd >= h.flight() {
            // What a window that shrank kept out was no loss of the path.
            h.backoff = 0;
            self.stalled_since = ticks(cx.now.0).max(1);
            h.restart_rto(cx);
        }
        cx.shared.stats.pure_acks_in += u64::from(len == 0);
        let new = seg.ack.gt(h.snd_una);
        let mut delivered = 0;
        let mut rtt = 0;
        let newly = seg.ack.distance_from(h.snd_una).max(0) as u32;
        if new {
            if let Some(r) = &mut self.recovery {
                let echo = (seg.has_ts && h.has(ConnectionFlags::TIMESTAMPS)).then_some(seg.ts_ecr);
                r.before_ack(h, &self.tx, seg.ack, (echo, self.ts_offset), cx.now.0);
            }
            let a = self.tx.ack_to(seg.ack, &mut h.pipe);
            h.snd_una = seg.ack;
            h.backoff = 0;
            h.dup_acks = 0;
            self.stalled_since = 0;
            delivered = a.delivered;
            if let Some(at) = a.sent_at {
                rtt = cx.now.0.saturating_sub(at);
                h.rtt.sample(rtt);
            }
            if let Some(r) = &mut self.recovery {
                r.acked(seg.ack, a.sacked_segs, a.lost_segs);
            }
            if a.records {
                cx.event(h, Events::ACKED);
            }
            if h.snd_una == h.snd_nxt {
                h.stop_timer();
            } else {
                h.restart_rto(cx);
            }
        } else if h.is_timer(Timer::Persist) {
            // The peer answers probes: it is alive (RFC 9293 section 3.8.6.1).
            self.stalled_since = 0;
        }
        // RFC 5681 section 2: SYN and FIN are off.
        let dup = !new
            && len == 0
            && h.snd_wnd == old_window
            && h.flight() > 0
            && seg.ack == h.snd_una
            && seg.flags & FIN == 0;
        if h.has(ConnectionFlags::RECOVERING) || seg.sacks > 0 || dup {
            self.recover(cx, seg, new, dup, delivered);
        }
        if self.tcb.has(ConnectionFlags::ECN) {
            self.echoed(cx, seg, newly);
        }
        let h = &mut self.tcb;
        // The ACK that ends a recovery leaves the window at ssthresh (RFC 6582 section 3.2, RFC 6937).
        if delivered > 0 && phase != RecoveryPhase::Recovery && h.phase != RecoveryPhase::Recovery {
            let flight = h.flight_state();
            let initial = cx.shared.initial_window(h);
            let told = DeliveredBytes {
                bytes: delivered,
                rtt,
                now: cx.now.0,
                phase: h.phase,
                open: phase == RecoveryPhase::Open && h.phase == RecoveryPhase::Open,
                idle: h.unsent == 0,
            };
            let reduced = self
                .congestion
                .on_ack(&mut h.window, &flight, initial, &told);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            h.forget_pacing();
        }
        let h = &mut self.tcb;
        if room < emss && h.room() >= emss {
            cx.event(h, Events::WRITABLE);
        }
        let fin = h.is_fin_pending();
        if h.unsent > 0 || h.has(ConnectionFlags::RECOVERING) || fin {
            cx.owe(h, ConnectionFlags::NONE);
        }
        if new && h.snd_una == h.snd_nxt {
            self.update_active(cx);
        }
    }

    /// SACK, duplicate ACKs and what follows from them (RFC 6675, 6582, 6937).
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn recover(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        seg: &Segment,
        new: bool,
        dup: bool,
        mut delivered: u32,
    ) {
        self.start_recovery();
        let path = (self.id(cx.index), self.template.key().remote().ip());
        let h = &mut self.tcb;
        let Some(r) = &mut self.recovery else { return };
        cx.shared.stats.dup_acks_in += u64::from(dup);
        if rack::dsack(seg).is_some() && h.has(ConnectionFlags::SACK) {
            cx.shared.stats.dsacks_in += 1;
            if r.duplicate(h) && (h.phase == RecoveryPhase::Open || r.reduction.is_over(h.snd_una))
            {
                cx.shared.stats.spurious += 1;
                r.unmark_lost(h, &mut self.tx);
                let flight = h.flight_state();
                self.congestion
                    .undo(&mut h.window, &mut r.reduction, &flight);
            }
        }
        if new && h.phase == RecoveryPhase::Loss && seg.has_ts && h.has(ConnectionFlags::TIMESTAMPS)
        {
            let h = &mut self.tcb;
            if r.reduction.was_needless(seg.ts_ecr, self.ts_offset) {
                cx.shared.stats.spurious += 1;
                r.unmark_lost(h, &mut self.tx);
                let flight = h.flight_state();
                self.congestion
                    .undo(&mut h.window, &mut r.reduction, &flight);
            }
        }
        let h = &mut self.tcb;
        if r.probe_answered(seg, dup) {
            // The probe hid a loss: it counts as one (RFC 8985 section 7.4.2).
            cx.shared.stats.tlp_recoveries += 1;
            let flight = h.flight_state();
            self.congestion
                .on_probe_loss(&mut h.window, &flight, cx.now.0);
        }
        let mut due = 0;
        let mut before = r.lost;
        let mut partial = false;
        let mut heard = false;
        if h.has(ConnectionFlags::SACK) {
            let (segs, bytes) = r.sack(h, &mut self.tx, seg, cx.now.0);
            cx.shared.stats.sacked_segs += u64::from(segs);
            delivered += bytes;
            heard = segs > 0 && r.rack.all_before(&self.tx);
            before = r.lost;
        } else if dup {
            h.dup_acks = h.dup_acks.saturating_add(1);
            if h.dup_acks == 3 && h.phase == RecoveryPhase::Open {
                r.lose_first(h, &mut self.tx);
            }
            if h.phase == RecoveryPhase::Recovery {
                delivered += u32::from(h.emss);
            }
        } else if new && h.phase == RecoveryPhase::Recovery && !r.reduction.is_over(h.snd_una) {
            partial = true;
            r.lose_first(h, &mut self.tx); // partial ACK, RFC 6582 section 3.2 (5)
        }
        if h.has(ConnectionFlags::SACK) {
            let (again, at) = r.detect(h, &mut self.tx, cx.now.0);
            cx.shared.stats.lost_retransmit += again;
            due = at;
        }
        let fresh = r.lost - before;
        let mut fresh = cx
            .shared
            .without_probe(path, (h, r, &mut self.tx), fresh, cx.now);
        if h.phase != RecoveryPhase::Open {
            fresh = r.lost;
        }
        if new && h.phase != RecoveryPhase::Open && r.reduction.is_over(h.snd_una) {
            if h.phase == RecoveryPhase::Recovery {
                r.reduction.end(&mut h.window, u32::from(h.emss));
            }
            h.phase = RecoveryPhase::Open;
            r.rack.recovered();
            let flight = h.flight_state();
            self.congestion
                .on_recovered(&mut h.window, &flight, cx.now.0);
        }
        let flight = h.flight_state();
        match h.phase {
            // What was cut since the path does not carry it is lost too, but says no more.
            RecoveryPhase::Open if fresh > 0 => {
                cx.shared.stats.count_recovery(h.has(ConnectionFlags::SACK));
                r.begin(h);
                self.congestion
                    .on_recovery(&mut h.window, &mut r.reduction, &flight);
                r.reduction.on_ack(&mut h.window, &flight, delivered);
            }
            RecoveryPhase::Recovery => {
                r.reduction.on_ack(&mut h.window, &flight, delivered);
                if partial {
                    r.reduction.on_partial_ack(&mut h.window, &flight);
                }
            }
            _ => {}
        }
        r.settle(h);
        cx.owe(h, ConnectionFlags::NONE);
        if heard && !matches!(h.timer(), Some(Timer::Reordering | Timer::TailLossProbe)) {
            // RFC 6675 section 6 leaves room for it: whether a repetition was lost only shows in
            // what left after it, and the wait for that must outlast the answers to what left
            // before.
            h.restart_rto(cx);
        }
        self.retime(cx, due, new);
    }

    /// One timer for all (RFC 8985 section 8): the reordering timer while RACK waits, no probe
    /// while a recovery runs, else the usual.
    fn retime(&mut self, cx: &mut ConnectionContext<'_>, due: u64, new: bool) {
        let h = &mut self.tcb;
        if h.snd_una == h.snd_nxt {
            return;
        }
        if due != 0 {
            let sooner = match h.timer() {
                None | Some(Timer::Reordering | Timer::TailLossProbe) => true,
                Some(_) => h.timer_at().is_some_and(|at| at > due),
            };
            if sooner {
                h.set_timer(Timer::Reordering, due);
                cx.arm(h, due);
            }
            return;
        }
        let recovering = h.has(ConnectionFlags::RECOVERING);
        let usual = match h.timer() {
            Some(Timer::Reordering) => true,
            Some(Timer::TailLossProbe) => recovering,
            _ => new && !recovering,
        };
        if usual {
            h.restart_rto(cx);
        }
    }

    /// The reordering timer fired (RFC 8985 section 6.2 step 5): what was waited for is lost.
    pub(crate) fn reordering_timeout(&mut self, cx: &mut ConnectionContext<'_>) {
        self.split_trains();
        let path = (self.id(cx.index), self.template.key().remote().ip());
        let h = &mut self.tcb;
        let Some(r) = &mut self.recovery else { return };
        let before = r.lost;
        let (again, due) = r.detect(h, &mut self.tx, cx.now.0);
        cx.shared.stats.lost_retransmit += again;
        let fresh = r.lost - before;
        let fresh = cx
            .shared
            .without_probe(path, (h, r, &mut self.tx), fresh, cx.now);
        let flight = h.flight_state();
        if h.phase == RecoveryPhase::Open && fresh > 0 {
            cx.shared.stats.count_recovery(h.has(ConnectionFlags::SACK));
            r.begin(h);
            self.congestion
                .on_recovery(&mut h.window, &mut r.reduction, &flight);
        }
        if h.phase == RecoveryPhase::Recovery {
            r.reduction.on_ack(&mut h.window, &flight, 0);
        }
        cx.owe(h, ConnectionFlags::NONE);
        h.restart_rto(cx);
        self.retime(cx, due, false);
    }
}
