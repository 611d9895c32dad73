//! ACK processing: the scoreboard, loss recovery and the congestion window.

use crate::base::events::Events;
use crate::base::time::{since_timestamp, to_ticks};
use crate::congestion::reduction::{EntryScoreboard, RecoveryAck};
use crate::congestion::{DeliveredBytes, RecoveryPhase};
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::connection::sender::Sender;
use crate::loss::rack;
use crate::loss::recovery::EchoedTimestamp;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
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

/// The effect of an ACK of new data.
#[derive(Clone, Copy, Default)]
struct AckedData {
    /// Bytes that were not selectively acknowledged before.
    delivered: u32,
    /// The round-trip time in ns; 0: not measured.
    rtt: u64,
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
    /// Processes the window of an acceptable data segment when no data is in flight. Equivalent to
    /// [`process_ack`](Self::process_ack) in that case. Returns whether the connection became writable.
    #[inline]
    pub(crate) fn take_window(&mut self, tcb: &Tcb, seg: &Segment) -> bool {
        let emss = u32::from(tcb.emss);
        let room = self.snd.room();
        self.snd.update_window(seg, tcb.scales.send());
        room < emss && self.snd.room() >= emss
    }

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
        let room = self.snd.room();
        let phase = self.snd.phase;
        let old_window = self.snd.wnd;
        self.snd.update_window(seg, tcb.scales.send());
        if old_window < self.snd.flight() && self.snd.wnd >= self.snd.flight() {
            // The peer's window had shrunk below the data in flight and covers it again: the
            // segments that the peer refused in between were not lost on the path. They are sent
            // again at once.
            self.snd.backoff = 0;
            self.split_multi_segments();
            if let Some(recovery) = &mut self.recovery {
                if recovery.timeouts_in_row > 0 && self.snd.phase == RecoveryPhase::Loss {
                    let has_sack = tcb.has(ConnectionFlags::SACK);
                    recovery.mark_after_timeout(
                        &mut self.snd,
                        &mut self.send_buffer,
                        has_sack,
                        cx.now.0,
                    );
                }
                recovery.timeouts_in_row = 0;
            }
            self.snd.stalled_since = to_ticks(cx.now.0).max(1);
            tcb.restart_retransmission_timer(&self.snd, cx);
        }
        cx.shared.stats.pure_acks_in += u64::from(len == 0);
        let new = seg.ack.gt(self.snd.una);
        let mut acked = AckedData::default();
        let newly = seg.ack.distance_from(self.snd.una).max(0) as u32;
        if new {
            acked = self.advance_una(tcb, path, cx, seg);
        } else if tcb.is_timer(Timer::Persist) {
            // The peer answers window probes, so it is alive (RFC 9293 section 3.8.6.1).
            self.snd.stalled_since = 0;
        }
        let AckedData { delivered, rtt } = acked;
        // A duplicate ACK (RFC 5681 section 2). SYN is clear here.
        let dup = !new
            && len == 0
            && self.snd.wnd == old_window
            && self.snd.flight() > 0
            && seg.ack == self.snd.una
            && seg.flags & FIN == 0;
        if self.snd.has(SendFlags::RECOVERING) || seg.sacks > 0 || dup {
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
        if delivered > 0
            && phase != RecoveryPhase::Recovery
            && self.snd.phase != RecoveryPhase::Recovery
        {
            let flight = self.snd.flight_state(tcb.emss);
            let initial = cx.shared.initial_window(tcb.emss);
            let delivered_bytes = DeliveredBytes {
                bytes: delivered,
                rtt,
                now: cx.now.0,
                phase: self.snd.phase,
                open: phase == RecoveryPhase::Open && self.snd.phase == RecoveryPhase::Open,
                idle: self.snd.unsent == 0,
                marked: seg.flags & ECE != 0 && tcb.has(ConnectionFlags::ECN),
            };
            let reduced =
                self.congestion
                    .on_ack(&mut self.snd.window, &flight, initial, &delivered_bytes);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            self.snd.forget_pacing();
        }
        if room < emss && self.snd.room() >= emss {
            cx.raise_event(tcb, Events::WRITABLE);
        }
        let fin = tcb.is_fin_pending();
        if self.snd.unsent > 0 || self.snd.has(SendFlags::RECOVERING) || fin {
            cx.schedule_output(tcb, ConnectionFlags::NONE);
        }
        if new && self.snd.is_all_acked() {
            cx.update_active_count(tcb, &self.snd);
        }
    }

    /// Removes the segments covered by an ACK of new data from the queue, and measures the round
    /// trip.
    #[inline]
    fn advance_una(
        &mut self,
        tcb: &mut Tcb,
        path: &PathState,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
    ) -> AckedData {
        if let Some(recovery) = &mut self.recovery {
            let echo = EchoedTimestamp {
                value: seg.ts_ecr,
                offset: path.timestamp_offset,
            };
            let has_echo = seg.has_ts && tcb.has(ConnectionFlags::TIMESTAMPS);
            recovery.before_ack(
                &mut self.snd,
                &self.send_buffer,
                seg.ack,
                has_echo.then_some(echo),
                cx.now.0,
            );
        }
        let acked = self.send_buffer.ack_to(seg.ack, &mut self.snd.pipe);
        self.snd.una = seg.ack;
        self.snd.dup_acks = 0;
        self.snd.stalled_since = 0;
        let mut rtt = 0;
        // Only an RTT sample resets the backoff (Karn, RFC 6298 section 5): if the path has become
        // longer than the timeout, every segment would be retransmitted before its ACK can arrive.
        if let Some(at) = acked.sent_at {
            rtt = cx.now.0.saturating_sub(at);
            self.snd.rtt.add_sample(rtt);
            self.snd.backoff = 0;
        } else if seg.has_ts
            && tcb.has(ConnectionFlags::TIMESTAMPS)
            && let Some(since) = since_timestamp(seg.ts_ecr, path.timestamp_offset, cx.now)
        {
            // The echo identifies the transmission that was answered (RFC 7323 section 4.1).
            self.snd.rtt.add_coarse_sample(since, &cx.shared.rto_limits);
            self.snd.backoff = 0;
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.on_acked(seg.ack, acked.sacked_segs, acked.lost_segs);
        }
        if acked.records {
            cx.raise_event(tcb, Events::ACKED);
        }
        if self.snd.is_all_acked() {
            tcb.stop_timer();
        } else {
            tcb.restart_retransmission_timer(&self.snd, cx);
        }
        AckedData {
            delivered: acked.delivered,
            rtt,
        }
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
        self.start_recovery();
        cx.shared.stats.dup_acks_in += u64::from(dup);
        self.undo_needless_reduction(tcb, path, cx, seg, new);
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if let Some(probe) = recovery.probe_answered(seg, dup) {
            // The tail loss probe repaired a loss, to which the window must react (RFC 8985
            // section 7.4.2).
            cx.shared.stats.tlp_recoveries += 1;
            let flight = self.snd.flight_state(tcb.emss);
            recovery.reduction.confirm();
            if self.congestion.on_probe_loss(
                &mut self.snd.window,
                probe.is_answered,
                &flight,
                newly,
                cx.now.0,
            ) {
                self.snd.announce_reduction(tcb, cx);
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
            let sacked = recovery.process_sack(&mut self.snd, &mut self.send_buffer, seg, cx.now.0);
            cx.shared.stats.sacked_segs += u64::from(sacked.segments);
            delivered += sacked.bytes;
            heard = sacked.segments > 0 && recovery.rack.is_first_unjudged(&self.send_buffer);
            before = recovery.lost;
        } else if dup {
            self.snd.dup_acks = self.snd.dup_acks.saturating_add(1);
            if self.snd.dup_acks == 3 && self.snd.phase == RecoveryPhase::Open {
                recovery.mark_first_lost(&mut self.snd, &mut self.send_buffer);
            }
        } else if new
            && self.snd.phase == RecoveryPhase::Recovery
            && !recovery.reduction.is_over(self.snd.una)
        {
            kind = RecoveryAckKind::Partial;
            recovery.mark_first_lost(&mut self.snd, &mut self.send_buffer); // partial ACK, RFC 6582 section 3.2 (5)
        }
        if tcb.has(ConnectionFlags::SACK) {
            let found = recovery.detect_losses(&mut self.snd, &mut self.send_buffer, cx.now.0);
            cx.shared.stats.lost_retransmit += found.retransmitted;
            due = found.due;
        }
        let mut fresh = recovery.lost - before;
        let finds_loss = fresh > 0;
        if self.snd.phase != RecoveryPhase::Open {
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
            tcb.restart_retransmission_timer(&self.snd, cx);
        }
        tcb.select_recovery_timer(&self.snd, cx, due, new);
    }

    /// Undoes a window reduction that turns out to be spurious: the peer reports that all
    /// retransmissions were duplicates (D-SACK, RFC 3708), or the first ACK after a timeout echoes
    /// a timestamp from before the retransmission (Eifel, RFC 3522).
    fn undo_needless_reduction(
        &mut self,
        tcb: &Tcb,
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
            recovery.rack.on_dsack(&self.snd);
            let timestamp =
                (seg.has_ts && tcb.has(ConnectionFlags::TIMESTAMPS)).then_some(seg.ts_val);
            recovery.reduction.on_dsack(lo, hi, timestamp, cx.now.0);
        }
        // Until the recovery point is passed, further segments may be declared lost and rightly
        // retransmitted.
        let is_over =
            self.snd.phase == RecoveryPhase::Open || recovery.reduction.is_over(self.snd.una);
        let mut needless = is_over && recovery.reduction.is_refuted();
        if needless {
            // Segments marked lost now were sent after the recovery began: their marks are
            // independent of it and stay.
            self.snd.phase = RecoveryPhase::Open;
        } else if new
            && self.snd.phase == RecoveryPhase::Loss
            && seg.has_ts
            && tcb.has(ConnectionFlags::TIMESTAMPS)
            && recovery
                .reduction
                .is_answered_by_original(seg.ts_ecr, path.timestamp_offset)
        {
            needless = true;
            self.snd.phase = RecoveryPhase::Open;
            recovery.withdraw_lost_marks(&mut self.snd, &mut self.send_buffer, cx.now.0);
        }
        if needless {
            cx.shared.stats.spurious += 1;
            let flight = self.snd.flight_state(tcb.emss);
            self.congestion
                .undo_reduction(&mut self.snd.window, &mut recovery.reduction, &flight);
        }
    }

    /// Ends the recovery, or the slow start after a timeout, once all data that was in flight when
    /// it began is acknowledged.
    fn end_recovery_if_over(&mut self, tcb: &Tcb, cx: &mut TcpContext<'_>) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if self.snd.phase == RecoveryPhase::Open || !recovery.reduction.is_over(self.snd.una) {
            return;
        }
        if self.snd.phase == RecoveryPhase::Recovery {
            recovery
                .reduction
                .end_recovery(&mut self.snd.window, u32::from(tcb.emss));
        }
        self.snd.phase = RecoveryPhase::Open;
        let timeout = self
            .snd
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, 0);
        recovery
            .reduction
            .on_recovery_end(self.snd.nxt, cx.now.0.saturating_add(timeout));
        recovery.rack.on_recovery_end();
        let flight = self.snd.flight_state(tcb.emss);
        self.congestion
            .on_recovered(&mut self.snd.window, &flight, cx.now.0);
    }

    /// Begins fast recovery if `lost` segments were declared lost outside of one; during a
    /// recovery, sets the window to what the ACK permits.
    fn adjust_window_in_recovery(
        &mut self,
        tcb: &Tcb,
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
        let begins = self.snd.phase == RecoveryPhase::Open && lost > 0;
        if begins {
            recovery.begin_fast_recovery(&mut self.snd);
            cx.shared
                .stats
                .count_recovery(tcb.has(ConnectionFlags::SACK));
            let flight = self.snd.flight_state(tcb.emss);
            let entry = EntryScoreboard {
                sacked: recovery.sacked_bytes,
                newly_delivered: ack.delivered,
            };
            if self.congestion.on_recovery(
                &mut self.snd.window,
                &mut recovery.reduction,
                &flight,
                entry,
            ) {
                self.snd.announce_reduction(tcb, cx);
            }
        }
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if self.snd.phase == RecoveryPhase::Recovery {
            let flight = self.snd.flight_state(tcb.emss);
            if !tcb.has(ConnectionFlags::SACK) {
                ack.delivered = recovery.reduction.delivered_without_sack(
                    ack.delivered,
                    kind == RecoveryAckKind::Duplicate,
                    flight.mss,
                );
            }
            recovery
                .reduction
                .on_ack(&mut self.snd.window, &flight, ack);
            if kind == RecoveryAckKind::Partial {
                recovery
                    .reduction
                    .on_partial_ack(&mut self.snd.window, &flight);
            }
        }
        recovery.finish_if_settled(&mut self.snd);
    }

    /// Marks the segments that RACK waited for as lost, after the reordering timer expired (RFC 8985
    /// section 6.2 step 5). Returns the time of the next check in ns (0: no segment is undecided);
    /// `None` without a recovery.
    pub(crate) fn on_reordering_timeout(
        &mut self,
        tcb: &Tcb,
        cx: &mut TcpContext<'_>,
    ) -> Option<u64> {
        self.split_multi_segments();
        let recovery = self.recovery.as_mut()?;
        let before = recovery.lost;
        let found = recovery.detect_losses(&mut self.snd, &mut self.send_buffer, cx.now.0);
        cx.shared.stats.lost_retransmit += found.retransmitted;
        let fresh = recovery.lost - before;
        let finds_loss = fresh > 0;
        let ack = RecoveryAck {
            delivered: 0,
            advanced: false,
            finds_loss,
        };
        self.adjust_window_in_recovery(tcb, cx, fresh, ack, RecoveryAckKind::Other);
        Some(found.due)
    }
}
