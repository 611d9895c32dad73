//! ACK processing: the scoreboard, loss recovery and the congestion window.

use crate::base::events::Events;
use crate::base::time::{since_timestamp, to_ticks};
use crate::congestion::reduction::{EntryScoreboard, RecoveryAck};
use crate::congestion::{DeliveredBytes, RecoveryPhase};
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::connection::sender::Sender;
use crate::loss::rack;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ECE, FIN, Segment};

/// An ACK, without its SACK blocks.
#[derive(Clone, Copy)]
struct AckOutcome {
    /// Sequence space by which SND.UNA advanced.
    newly: u32,
    /// Bytes of it that had not been selectively acknowledged before.
    delivered: u32,
    /// It is a duplicate ACK (RFC 5681 section 2).
    is_duplicate: bool,
}

/// Kind of an ACK in a recovery.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecoveryAckKind {
    Duplicate,
    /// RFC 6582 section 3.2.
    Partial,
    /// Any other, or none: the reordering timer expired.
    Other,
}

impl<R> Sender<R> {
    /// Processes the ACK, which is at most SND.NXT, and the window of an acceptable segment.
    #[inline]
    pub(crate) fn process_ack(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        len: usize,
    ) {
        let emss = u32::from(tcb.emss);
        let room = tcb.room();
        let phase = tcb.phase;
        let old_window = tcb.snd_wnd;
        tcb.update_send_window(seg);
        if old_window < tcb.flight() && tcb.snd_wnd >= tcb.flight() {
            // The peer's window had shrunk below the data in flight and covers it again: the
            // segments that the peer refused in between were not lost on the path. They are sent
            // again at once.
            tcb.backoff = 0;
            self.split_multi_segments(tcb);
            if let Some(recovery) = &mut self.recovery {
                if recovery.timeouts_in_row > 0 && tcb.phase == RecoveryPhase::Loss {
                    recovery.mark_after_timeout(tcb, &mut self.send_buffer, cx.now.0);
                }
                recovery.timeouts_in_row = 0;
            }
            self.stalled_since = to_ticks(cx.now.0).max(1);
            tcb.restart_retransmission_timer(cx);
        }
        cx.shared.stats.pure_acks_in += u64::from(len == 0);
        let new = seg.ack.gt(tcb.snd_una);
        let mut delivered = 0;
        let mut rtt = 0;
        let newly = seg.ack.distance_from(tcb.snd_una).max(0) as u32;
        if new {
            (delivered, rtt) = self.advance_una(tcb, path, cx, seg);
        } else if tcb.is_timer(Timer::Persist) {
            // The peer answers window probes, so it is alive (RFC 9293 section 3.8.6.1).
            self.stalled_since = 0;
        }
        // A duplicate ACK (RFC 5681 section 2). SYN is clear here.
        let dup = !new
            && len == 0
            && tcb.snd_wnd == old_window
            && tcb.flight() > 0
            && seg.ack == tcb.snd_una
            && seg.flags & FIN == 0;
        if tcb.has(ConnectionFlags::RECOVERING) || seg.sacks > 0 || dup {
            let outcome = AckOutcome {
                newly,
                delivered,
                is_duplicate: dup,
            };
            self.process_loss_signals(tcb, path, cx, seg, outcome);
        }
        if tcb.has(ConnectionFlags::ECN) {
            self.on_ecn_ack(tcb, cx, seg, newly);
        }
        // The ACK that ends a recovery leaves the window at ssthresh (RFC 6582 section 3.2,
        // RFC 9937 section 6.4).
        if delivered > 0 && phase != RecoveryPhase::Recovery && tcb.phase != RecoveryPhase::Recovery
        {
            let flight = tcb.flight_state();
            let initial = cx.shared.initial_window(tcb);
            let delivered_bytes = DeliveredBytes {
                bytes: delivered,
                rtt,
                now: cx.now.0,
                phase: tcb.phase,
                open: phase == RecoveryPhase::Open && tcb.phase == RecoveryPhase::Open,
                idle: tcb.unsent == 0,
                marked: seg.flags & ECE != 0 && tcb.has(ConnectionFlags::ECN),
            };
            let reduced =
                self.congestion
                    .on_ack(&mut tcb.window, &flight, initial, &delivered_bytes);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            tcb.forget_pacing();
        }
        if room < emss && tcb.room() >= emss {
            cx.raise_event(tcb, Events::WRITABLE);
        }
        let fin = tcb.is_fin_pending();
        if tcb.unsent > 0 || tcb.has(ConnectionFlags::RECOVERING) || fin {
            cx.schedule_output(tcb, ConnectionFlags::NONE);
        }
        if new && tcb.snd_una == tcb.snd_nxt {
            cx.update_active_count(tcb);
        }
    }

    /// Removes the segments covered by an ACK of new data from the queue, and measures the round
    /// trip. Returns the bytes that were not selectively acknowledged before, and the RTT sample in
    /// ns (0: none).
    #[inline]
    fn advance_una(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
    ) -> (u32, u64) {
        if let Some(recovery) = &mut self.recovery {
            let echo = (seg.has_ts && tcb.has(ConnectionFlags::TIMESTAMPS)).then_some(seg.ts_ecr);
            recovery.before_ack(
                tcb,
                &self.send_buffer,
                seg.ack,
                (echo, path.timestamp_offset),
                cx.now.0,
            );
        }
        let acked = self.send_buffer.ack_to(seg.ack, &mut tcb.pipe);
        tcb.snd_una = seg.ack;
        tcb.dup_acks = 0;
        self.stalled_since = 0;
        let mut rtt = 0;
        // Only an RTT sample resets the backoff (Karn, RFC 6298 section 5): if the path has become
        // longer than the timeout, every segment would be retransmitted before its ACK can arrive.
        if let Some(at) = acked.sent_at {
            rtt = cx.now.0.saturating_sub(at);
            tcb.rtt.add_sample(rtt);
            tcb.backoff = 0;
        } else if seg.has_ts
            && tcb.has(ConnectionFlags::TIMESTAMPS)
            && let Some(since) = since_timestamp(seg.ts_ecr, path.timestamp_offset, cx.now)
        {
            // The echo identifies the transmission that was answered (RFC 7323 section 4.1).
            tcb.rtt.add_coarse_sample(since, &cx.shared.rto_limits);
            tcb.backoff = 0;
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.on_acked(seg.ack, acked.sacked_segs, acked.lost_segs);
        }
        if acked.records {
            cx.raise_event(tcb, Events::ACKED);
        }
        if tcb.snd_una == tcb.snd_nxt {
            tcb.stop_timer();
        } else {
            tcb.restart_retransmission_timer(cx);
        }
        (acked.delivered, rtt)
    }

    /// Processes the SACK blocks of an ACK that was overtaken by a later one: its SACK and D-SACK
    /// blocks are as valid as those of any ACK (RFC 2018 section 5). Its window and acknowledgement
    /// number are outdated.
    #[cold]
    pub(crate) fn process_overtaken_ack(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
    ) {
        if tcb.has(ConnectionFlags::SACK) {
            let outcome = AckOutcome {
                newly: 0,
                delivered: 0,
                is_duplicate: false,
            };
            self.process_loss_signals(tcb, path, cx, seg, outcome);
        }
    }

    /// Processes SACK blocks and duplicate ACKs: marks losses, begins and ends recoveries (RFC
    /// 6675, RFC 6582, RFC 9937, RFC 8985).
    #[cold]
    fn process_loss_signals(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        outcome: AckOutcome,
    ) {
        let AckOutcome {
            newly,
            mut delivered,
            is_duplicate: dup,
        } = outcome;
        let new = newly > 0;
        self.start_recovery(tcb);
        cx.shared.stats.dup_acks_in += u64::from(dup);
        self.undo_needless_reduction(tcb, path, cx, seg, new);
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if let Some(probe) = recovery.probe_answered(seg, dup) {
            // The tail loss probe repaired a loss, to which the window must react (RFC 8985
            // section 7.4.2).
            cx.shared.stats.tlp_recoveries += 1;
            let (flight, before) = (tcb.flight_state(), tcb.flight_before(newly));
            recovery.reduction.confirm();
            if self.congestion.on_probe_loss(
                &mut tcb.window,
                probe.is_answered,
                (&flight, &before),
                cx.now.0,
            ) {
                cx.announce_reduction(tcb);
            }
        }
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        recovery.is_answered |= dup;
        let mut due = 0;
        let mut before = recovery.lost;
        let mut kind = if dup {
            RecoveryAckKind::Duplicate
        } else {
            RecoveryAckKind::Other
        };
        let mut heard = false;
        if tcb.has(ConnectionFlags::SACK) {
            let (segs, bytes) = recovery.process_sack(tcb, &mut self.send_buffer, seg, cx.now.0);
            cx.shared.stats.sacked_segs += u64::from(segs);
            delivered += bytes;
            heard = segs > 0 && recovery.rack.is_first_unjudged(&self.send_buffer);
            before = recovery.lost;
        } else if dup {
            tcb.dup_acks = tcb.dup_acks.saturating_add(1);
            if tcb.dup_acks == 3 && tcb.phase == RecoveryPhase::Open {
                recovery.mark_first_lost(tcb, &mut self.send_buffer);
            }
        } else if new
            && tcb.phase == RecoveryPhase::Recovery
            && !recovery.reduction.is_over(tcb.snd_una)
        {
            kind = RecoveryAckKind::Partial;
            recovery.mark_first_lost(tcb, &mut self.send_buffer); // partial ACK, RFC 6582 section 3.2 (5)
        }
        if tcb.has(ConnectionFlags::SACK) {
            let (again, at) = recovery.detect_losses(tcb, &mut self.send_buffer, cx.now.0);
            cx.shared.stats.lost_retransmit += again;
            due = at;
        }
        let mut fresh = recovery.lost - before;
        let finds_loss = fresh > 0;
        if tcb.phase != RecoveryPhase::Open {
            fresh = recovery.lost;
        }
        if new {
            self.end_recovery_if_over(tcb, cx);
        }
        let ack = RecoveryAck {
            delivered,
            advanced: new,
            finds_loss,
        };
        self.adjust_window_in_recovery(tcb, cx, fresh, ack, kind);
        cx.schedule_output(tcb, ConnectionFlags::NONE);
        if heard && !matches!(tcb.timer(), Some(Timer::Reordering | Timer::TailLossProbe)) {
            // RFC 6675 section 6 permits this restart. The loss of a retransmission shows only in
            // answers to segments sent after it, so the timer must not expire while answers to
            // earlier segments still arrive.
            tcb.restart_retransmission_timer(cx);
        }
        select_recovery_timer(tcb, cx, due, new);
    }

    /// Undoes a window reduction that turns out to be spurious: the peer reports that all
    /// retransmissions were duplicates (D-SACK, RFC 3708), or the first ACK after a timeout echoes
    /// a timestamp from before the retransmission (Eifel, RFC 3522).
    fn undo_needless_reduction(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        new: bool,
    ) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if let Some((lo, hi)) = rack::dsack_block(seg)
            && tcb.has(ConnectionFlags::SACK)
        {
            cx.shared.stats.dsacks_in += 1;
            recovery.rack.on_dsack(tcb);
            let timestamp =
                (seg.has_ts && tcb.has(ConnectionFlags::TIMESTAMPS)).then_some(seg.ts_val);
            recovery.reduction.on_dsack(lo, hi, timestamp, cx.now.0);
        }
        // Until the recovery point is passed, further segments may be declared lost and rightly
        // retransmitted.
        let is_over = tcb.phase == RecoveryPhase::Open || recovery.reduction.is_over(tcb.snd_una);
        let mut needless = is_over && recovery.reduction.is_refuted();
        if needless {
            // Segments marked lost now were sent after the recovery began: their marks are
            // independent of it and stay.
            tcb.phase = RecoveryPhase::Open;
        } else if new
            && tcb.phase == RecoveryPhase::Loss
            && seg.has_ts
            && tcb.has(ConnectionFlags::TIMESTAMPS)
            && recovery
                .reduction
                .is_answered_by_original(seg.ts_ecr, path.timestamp_offset)
        {
            needless = true;
            tcb.phase = RecoveryPhase::Open;
            recovery.withdraw_lost_marks(tcb, &mut self.send_buffer, cx.now.0);
        }
        if needless {
            cx.shared.stats.spurious += 1;
            let flight = tcb.flight_state();
            self.congestion
                .undo_reduction(&mut tcb.window, &mut recovery.reduction, &flight);
        }
    }

    /// Ends the recovery, or the slow start after a timeout, once all data that was in flight when
    /// it began is acknowledged.
    fn end_recovery_if_over(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if tcb.phase == RecoveryPhase::Open || !recovery.reduction.is_over(tcb.snd_una) {
            return;
        }
        if tcb.phase == RecoveryPhase::Recovery {
            recovery
                .reduction
                .end_recovery(&mut tcb.window, u32::from(tcb.emss));
        }
        tcb.phase = RecoveryPhase::Open;
        let timeout = tcb.rtt.retransmission_timeout(&cx.shared.rto_limits, 0);
        recovery
            .reduction
            .on_recovery_end(tcb.snd_nxt, cx.now.0.saturating_add(timeout));
        recovery.rack.on_recovery_end();
        let flight = tcb.flight_state();
        self.congestion
            .on_recovered(&mut tcb.window, &flight, cx.now.0);
    }

    /// Begins fast recovery if `lost` segments were declared lost outside of one; during a
    /// recovery, sets the window to what the ACK permits.
    fn adjust_window_in_recovery(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        lost: u32,
        mut ack: RecoveryAck,
        kind: RecoveryAckKind,
    ) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        // Segments that were resegmented because they exceed the path MTU count as lost as well,
        // but are no sign of congestion.
        let begins = tcb.phase == RecoveryPhase::Open && lost > 0;
        if begins {
            recovery.begin_fast_recovery(tcb);
            cx.shared
                .stats
                .count_recovery(tcb.has(ConnectionFlags::SACK));
            let flight = tcb.flight_state();
            let entry = EntryScoreboard {
                sacked: recovery.sacked_bytes,
                newly_delivered: ack.delivered,
            };
            if self
                .congestion
                .on_recovery(&mut tcb.window, &mut recovery.reduction, &flight, entry)
            {
                cx.announce_reduction(tcb);
            }
        }
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if tcb.phase == RecoveryPhase::Recovery {
            let flight = tcb.flight_state();
            if !tcb.has(ConnectionFlags::SACK) {
                ack.delivered = recovery.reduction.delivered_without_sack(
                    ack.delivered,
                    kind == RecoveryAckKind::Duplicate,
                    flight.mss,
                );
            }
            recovery.reduction.on_ack(&mut tcb.window, &flight, ack);
            if kind == RecoveryAckKind::Partial {
                recovery.reduction.on_partial_ack(&mut tcb.window, &flight);
            }
        }
        recovery.finish_if_settled(tcb);
    }

    /// Handles the reordering timer (RFC 8985 section 6.2 step 5): the segments that RACK waited
    /// for are lost.
    pub(crate) fn reordering_timeout(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        self.split_multi_segments(tcb);
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        let before = recovery.lost;
        let (again, due) = recovery.detect_losses(tcb, &mut self.send_buffer, cx.now.0);
        cx.shared.stats.lost_retransmit += again;
        let fresh = recovery.lost - before;
        let finds_loss = fresh > 0;
        let ack = RecoveryAck {
            delivered: 0,
            advanced: false,
            finds_loss,
        };
        self.adjust_window_in_recovery(tcb, cx, fresh, ack, RecoveryAckKind::Other);
        cx.schedule_output(tcb, ConnectionFlags::NONE);
        tcb.restart_retransmission_timer(cx);
        select_recovery_timer(tcb, cx, due, false);
    }
}

/// Selects the timer to run (RFC 8985 section 8 recommends a single one): the reordering timer
/// while RACK waits until `due` (0: it does not wait), but no longer than the retransmission
/// timeout; else the retransmission timer, which may be a tail loss probe unless a recovery is in
/// progress. `new`: new data was acknowledged.
fn select_recovery_timer(tcb: &mut Tcb, cx: &mut TcpContext<'_>, due: u64, new: bool) {
    if tcb.snd_una == tcb.snd_nxt {
        return;
    }
    // RACK measures its wait by the round trip of the last delivered segment, which spans the whole
    // outage after one: a segment lost before it has no other timer.
    let timeout = tcb
        .rtt
        .retransmission_timeout(&cx.shared.rto_limits, tcb.backoff);
    if due != 0 && due <= cx.now.0 + timeout {
        let sooner = match tcb.timer() {
            None | Some(Timer::Reordering | Timer::TailLossProbe) => true,
            Some(_) => tcb.timer_at().is_some_and(|at| at > due),
        };
        if sooner {
            tcb.set_timer(Timer::Reordering, due);
            cx.schedule_timer(tcb, due);
        }
        return;
    }
    let recovering = tcb.has(ConnectionFlags::RECOVERING);
    let usual = match tcb.timer() {
        Some(Timer::Reordering) => true,
        Some(Timer::TailLossProbe) => recovering,
        None => due != 0 || (new && !recovering),
        Some(_) => new && !recovering,
    };
    if usual {
        tcb.restart_retransmission_timer(cx);
    }
}
