//! Output of a connection: SYNs, retransmissions, new segments, probes and pure ACKs, in that
//! order.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::{FrameMeta, FrameSink, PayloadPiece, SinkFull};
use crate::base::retransmissions::RetransmissionCause;
use crate::base::state::TcpState;
use crate::congestion::RecoveryPhase;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::connection::sender::Sender;
use crate::queues::send_buffer::{self, InFlightSegment, RETX, SUPER_SEGMENT, SegmentPlan};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH};
use crate::wire::template::SegmentFields;

/// A segment with at most this number of unused bytes counts as full: FPDUs are multiples of four
/// bytes.
const MAX_PADDING: u32 = 3;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Returns the length of a segment's headers and the metadata for the sink.
    ///
    /// Inlined so that each caller has the fields in registers: a struct that is copied right after
    /// it was stored field by field waits for the stores.
    #[inline(always)]
    fn segment_meta(
        &self,
        cx: &mut TcpContext<'_>,
        fields: &SegmentFields<'_>,
        (again, mss): (bool, u16),
    ) -> (usize, FrameMeta) {
        let (len, mut meta) = self.path.template.meta(fields);
        self.path.complete_meta(&self.tcb, cx, &mut meta);
        meta.retransmission = again;
        meta.tso_segsz = mss;
        (len, meta)
    }

    /// Sends one segment with data, a FIN or both. `again`: it is a retransmission.
    #[inline]
    pub(crate) fn emit_segment(
        &mut self,
        cx: &mut TcpContext<'_>,
        segment: &InFlightSegment,
        again: bool,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let (window, edge) = self.receiver.receive_window(&self.tcb, cx);
        let tcb = &self.tcb;
        let mut flags = ACK;
        if segment.flags & send_buffer::PUSH != 0 {
            flags |= PSH;
        }
        if segment.flags & send_buffer::FIN != 0 {
            flags |= FIN;
        }
        let mut ect = false;
        if tcb.has(ConnectionFlags::ECN) {
            // Retransmissions are not ECN-capable (RFC 3168 section 6.1.5).
            ect = !again && segment.len > 0 && cx.may_send_ect();
            flags |= if tcb.has(ConnectionFlags::SEND_ECE) {
                ECE
            } else {
                0
            };
            flags |= if ect && tcb.has(ConnectionFlags::SEND_CWR) {
                CWR
            } else {
                0
            };
        }
        let ts = self.path.timestamps(tcb, cx.now);
        let fields = SegmentFields {
            seq: segment.seq,
            ack: tcb.rcv_nxt,
            flags,
            window,
            ts,
            options: &[],
            payload: segment.len,
            ect,
            tso: segment.mss != 0,
        };
        let (len, meta) = self.segment_meta(cx, &fields, (again, segment.mss));
        let fill = |out: &mut [u8]| self.path.template.build(out, &fields);
        let payload =
            self.sender
                .payload(self.tcb.user, (segment.record, segment.offset), segment.len);
        if !sink.send_frame(len, &meta, fill, payload) {
            return Err(SinkFull);
        }
        if ect {
            self.tcb.flags &= !ConnectionFlags::SEND_CWR;
        }
        if !self.tcb.has(ConnectionFlags::ANSWERS) {
            cx.notice_answer(&mut self.tcb);
        }
        self.tcb.on_ack_sent(edge);
        if !self.receiver.has_sack_blocks() {
            self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        }
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        cx.shared.stats.out_bytes += u64::from(segment.len);
        Ok(())
    }

    /// Sends all pending output that may be sent now. The connection is not in CLOSED.
    pub(crate) fn send_pending(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let fin = self.tcb.is_fin_pending();
        let lost = self.tcb.has(ConnectionFlags::RECOVERING)
            && self
                .sender
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.lost > 0);
        let data = self.tcb.can_send_data() && (self.tcb.unsent > 0 || fin || lost);
        if !data
            && !self.tcb.has(ConnectionFlags::NEED_MASK)
            && !self.receiver.window_update_due(&self.tcb, cx)
        {
            return Ok(());
        }
        if !self.path.ensure_resolved(&mut self.tcb, cx) {
            self.wait_for_neighbour(cx);
            return Ok(());
        }
        if self.tcb.has(ConnectionFlags::NEED_SYN) {
            self.emit_syn(cx, sink)?;
            self.tcb.flags &= !(ConnectionFlags::NEED_SYN | ConnectionFlags::NEED_ACK);
        }
        // Before the handshake completes, only unacceptable segments are answered.
        if matches!(self.tcb.state, TcpState::SynSent | TcpState::SynReceived)
            && !self.tcb.has(ConnectionFlags::NEED_ACK)
        {
            return Ok(());
        }
        if data {
            self.send_data(cx, sink)?;
        }
        if self.tcb.has(ConnectionFlags::NEED_TAIL_PROBE) {
            self.send_tail_probe(cx, sink)?;
            self.tcb.flags &= !ConnectionFlags::NEED_TAIL_PROBE;
        }
        if self
            .tcb
            .has(ConnectionFlags::NEED_PROBE | ConnectionFlags::NEED_KEEPALIVE)
        {
            // A segment below the peer's window makes the peer answer with its ACK and window (RFC
            // 9293 section 3.8.4), without any payload.
            let seq = self.tcb.snd_una - 1;
            self.receiver
                .emit_without_payload(&mut self.tcb, &self.path, cx, seq, 0, sink)?;
            // Without the persist timer it tests a path that may drop full segments.
            if self.tcb.has(ConnectionFlags::NEED_PROBE) && self.tcb.is_timer(Timer::Persist) {
                cx.count_window_probe();
            }
            cx.shared.stats.keepalive_probes +=
                u64::from(self.tcb.has(ConnectionFlags::NEED_KEEPALIVE));
            self.tcb.flags &= !(ConnectionFlags::NEED_PROBE | ConnectionFlags::NEED_KEEPALIVE);
        }
        if self.tcb.has(ConnectionFlags::NEED_ACK) || self.receiver.window_update_due(&self.tcb, cx)
        {
            self.receiver
                .send_acks(&mut self.tcb, &self.path, cx, sink)?;
        }
        Ok(())
    }

    /// Sends data only, for `Stack::flush`; a due ACK is piggybacked.
    pub(crate) fn send_pending_data(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        if !self.tcb.can_send_data() {
            return Ok(());
        }
        if self.path.neighbour_generation != cx.shared.neighbours.generation {
            // The neighbour table changed; `poll` looks the destination up again.
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
            return Ok(());
        }
        self.send_data(cx, sink)
    }

    #[inline]
    fn send_data(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        if self.tcb.has(ConnectionFlags::RECOVERING)
            && self
                .sender
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.lost > 0)
        {
            self.retransmit_lost(cx, sink)?;
        }
        self.send_new_segments(cx, sink)
    }

    #[cold]
    fn retransmit_lost(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let Some(mut recovery) = self.sender.recovery.take() else {
            return Ok(());
        };
        let mut result = Ok(());
        while let Some(index) = recovery.next_lost(&self.sender.send_buffer) {
            let segment = self.sender.send_buffer.sent[index];
            if self.tcb.pipe > 0 && self.tcb.pipe + segment.len > self.tcb.window.cwnd() {
                break;
            }
            if self.emit_segment(cx, &segment, true, sink).is_err() {
                result = Err(SinkFull);
                break;
            }
            if segment.flags & SUPER_SEGMENT != 0 {
                let is_again = segment.flags & RETX != 0;
                cx.shared.on_super_segment_lost(is_again, cx.now);
            }
            recovery.on_retransmitted(&mut self.tcb, &mut self.sender.send_buffer, index, cx.now.0);
            cx.count_retransmission(match self.tcb.phase {
                RecoveryPhase::Loss => RetransmissionCause::Timeout,
                _ => RetransmissionCause::Fast,
            });
            // The timer must leave the retransmission a round trip: it must not expire for a loss
            // that an ACK reported in time.
            if self.tcb.timer().is_none()
                || (index == 0
                    && self.tcb.phase == RecoveryPhase::Recovery
                    && !self.tcb.is_timer(Timer::Reordering))
            {
                self.tcb.restart_retransmission_timer(cx);
            }
        }
        self.sender.recovery = Some(recovery);
        result
    }

    #[inline]
    fn send_new_segments(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        if self.tcb.flight() == 0 && self.tcb.unsent > 0 {
            self.sender.validate_window(&mut self.tcb, cx);
        }
        let emss = u32::from(self.tcb.emss);
        let mut sent = 0;
        let mut result = Ok(());
        let credit = self.sender.pacing_credit(&mut self.tcb, cx);
        while self.tcb.unsent > 0 && sent < credit {
            let Some((plan, usable)) = self.sender.plan_new_segment(&mut self.tcb, cx, emss) else {
                break;
            };
            let size = plan.len;
            if size + MAX_PADDING >= emss
                && size <= usable
                && !self.tcb.has(ConnectionFlags::SEND_CWR)
            {
                let most = if credit == u32::MAX {
                    usable
                } else {
                    usable.min(((credit - sent) / size).max(1) * size)
                };
                if let Some(tso) = cx.shared.config.tso {
                    match self.send_tso(cx, (emss, size, most), &tso, sink) {
                        // A part of a record, for a small window, is sent below.
                        Ok(0) => {}
                        Ok(n) => {
                            sent += n;
                            continue;
                        }
                        Err(error) => {
                            result = Err(error);
                            break;
                        }
                    }
                } else if most.min(self.tcb.unsent) >= 2 * size
                    && !self.tcb.has(ConnectionFlags::FIN_QUEUED)
                {
                    // Not if the last segment will carry a FIN.
                    let n;
                    (n, result) = self.send_gso(cx, (emss, size, most), sink);
                    sent += n;
                    if result.is_err() {
                        break;
                    }
                    continue;
                }
            }
            let tcb = &mut self.tcb;
            let fin = tcb.unsent == plan.len && tcb.is_fin_pending();
            let segment = self
                .sender
                .send_buffer
                .make_segment(&plan, tcb.snd_nxt, fin, cx.now.0);
            if let Err(error) = self.emit_new_segment(cx, &segment, sink) {
                result = Err(error);
                break;
            }
            self.sender.send_buffer.commit_plan(&plan);
            let tcb = &mut self.tcb;
            tcb.pipe += plan.len;
            tcb.unsent -= plan.len;
            tcb.forbid_splitting();
            sent += plan.len;
        }
        let tcb = &self.tcb;
        if result.is_ok() && tcb.unsent == 0 && tcb.is_fin_pending() {
            let segment = self.sender.send_buffer.make_fin(tcb.snd_nxt, cx.now.0);
            result = self.emit_new_segment(cx, &segment, sink);
        }
        self.sender.congestion.on_sent(self.tcb.pipe);
        if sent > 0 {
            self.sender
                .on_new_data_sent(&mut self.tcb, cx, sent, credit != u32::MAX);
        }
        result
    }

    /// Handles the probe timeout (RFC 8985 section 7.3): sends a new segment regardless of the
    /// congestion window, or else retransmits the last one, to make the peer report what it has
    /// received.
    #[cold]
    fn send_tail_probe(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let tcb = &self.tcb;
        if tcb.has(ConnectionFlags::RECOVERING) || !tcb.can_send_data() {
            return Ok(()); // an ACK arrived since the timer fired
        }
        self.sender.start_recovery(&mut self.tcb);
        let tcb = &self.tcb;
        let Some(last) = self.sender.send_buffer.sent.back().copied() else {
            return Ok(());
        };
        let window = tcb.snd_wnd.saturating_sub(tcb.flight());
        let plan = self
            .sender
            .send_buffer
            .plan_segment(u32::from(tcb.emss), window)
            .filter(|plan| plan.len <= window);
        let again = plan.is_none();
        if let Some(plan) = plan {
            let segment = self
                .sender
                .send_buffer
                .make_segment(&plan, tcb.snd_nxt, false, cx.now.0);
            self.emit_new_segment(cx, &segment, sink)?;
            self.sender.send_buffer.commit_plan(&plan);
            self.tcb.pipe += plan.len;
            self.tcb.unsent -= plan.len;
        } else {
            self.emit_segment(cx, &last, true, sink)?;
            cx.count_retransmission(RetransmissionCause::TailProbe);
        }
        cx.shared.stats.tlp_probes += 1;
        if let Some(recovery) = &mut self.sender.recovery {
            let is_answered = self.sender.congestion.is_tail_answered(self.tcb.snd_nxt);
            let queue = &mut self.sender.send_buffer;
            recovery.on_probe_sent(&mut self.tcb, queue, (again, is_answered), cx.now.0);
        }
        self.tcb.restart_retransmission_timer(cx);
        Ok(())
    }

    /// Sends a new segment and records it as in flight; changes nothing if the sink is full.
    #[inline]
    pub(crate) fn emit_new_segment(
        &mut self,
        cx: &mut TcpContext<'_>,
        segment: &InFlightSegment,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        self.emit_segment(cx, segment, false, sink)?;
        self.sender.send_buffer.sent.push_back(*segment);
        self.on_new_segment_sent(cx, segment);
        Ok(())
    }

    #[inline]
    pub(crate) fn on_new_segment_sent(
        &mut self,
        cx: &mut TcpContext<'_>,
        segment: &InFlightSegment,
    ) {
        let tcb = &mut self.tcb;
        tcb.snd_nxt = segment.end_seq();
        if segment.flags & send_buffer::FIN != 0 {
            tcb.flags |= ConnectionFlags::FIN_SENT;
        }
        if tcb.is_timer(Timer::Persist) {
            tcb.backoff = 0;
            tcb.stop_timer();
        }
        if tcb.timer().is_none() {
            tcb.restart_retransmission_timer(cx);
        }
    }
}

impl<R> Sender<R> {
    /// Returns the pieces of the `len` bytes from a position of the send buffer on. `user`: the user
    /// value of the connection.
    #[inline]
    pub(crate) fn payload(
        &self,
        user: u64,
        from: (u32, u32),
        len: u32,
    ) -> impl Iterator<Item = PayloadPiece<'_, R>> {
        let pieces = self.send_buffer.pieces(from, len);
        pieces.map(move |(record, offset, len)| PayloadPiece::Record {
            user,
            record,
            offset,
            len,
        })
    }

    /// Plans the next new segment. Returns it together with the number of bytes that the peer's
    /// window and the congestion window still allow, or `None` if nothing may be sent now.
    #[inline]
    fn plan_new_segment(
        &self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        emss: u32,
    ) -> Option<(SegmentPlan, u32)> {
        let window = tcb.snd_wnd.saturating_sub(tcb.flight());
        // Limited transmit (RFC 3042): one segment for each of the first two duplicate ACKs, which
        // are counted only without SACK.
        let limited = if tcb.phase == RecoveryPhase::Open {
            u32::from(tcb.dup_acks.min(2))
        } else {
            0
        };
        let usable = window.min((tcb.window.cwnd() + limited * emss).saturating_sub(tcb.pipe));
        let mut plan = self.send_buffer.plan_segment(emss, usable)?;
        if plan.len > window {
            if tcb.flight() > 0 {
                return None; // the ACK of the data in flight opens the window
            }
            // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part of a record is
            // sent if it is half of the largest window seen, or if waiting did not help.
            if window > 0
                && (window >= tcb.max_snd_wnd / 2 || tcb.has(ConnectionFlags::MAY_SPLIT_RECORD))
            {
                plan = self
                    .send_buffer
                    .plan_part(window.min(plan.len - 1).min(tcb.window.cwnd().max(1)));
            } else {
                // Nothing is in flight, and the peer's window is too small for the next record: the
                // window is probed (RFC 9293 section 3.8.6.1).
                if !tcb.is_timer(Timer::Persist) {
                    tcb.start_persist_timer(cx);
                }
                return None;
            }
        } else if plan.len > usable && tcb.pipe > 0 {
            return None;
        }
        Some((plan, usable))
    }

    /// Accounts for new segments with `sent` bytes of payload: charges pacing (if the connection is
    /// paced) and the recovery, and restarts the timer of the tail loss probe.
    #[inline]
    fn on_new_data_sent(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        sent: u32,
        is_paced: bool,
    ) {
        if is_paced {
            self.on_paced_output(tcb, cx, sent);
        }
        if tcb.is_timer(Timer::TailLossProbe)
            && let Some(oldest) = self.send_buffer.sent.front()
        {
            tcb.extend_probe_timeout(cx, oldest.at);
        }
        if tcb.phase == RecoveryPhase::Recovery
            && let Some(recovery) = &mut self.recovery
        {
            recovery.reduction.on_sent(sent);
        }
    }

    /// Checks, before new segments are sent after a pause, whether the congestion window has gone
    /// unused for too long to be valid (RFC 7661).
    #[inline]
    fn validate_window(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        if self.congestion.has_rested(cx.now.0) && tcb.phase == RecoveryPhase::Open {
            let initial = cx.shared.initial_window(tcb);
            let flight = tcb.flight_state();
            let reduced = self
                .congestion
                .on_rest(&mut tcb.window, &flight, initial, cx.now.0);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            tcb.forget_pacing();
        }
    }
}
