//! Output of a connection: SYNs, retransmissions, new segments, probes and pure ACKs, in that
//! order.

use siw_net::{FrameSink, RecvBuf};

use crate::base::retransmissions::RetransmissionCause;
use crate::base::sink_full::SinkFull;
use crate::base::state::TcpState;
use crate::congestion::RecoveryPhase;
use crate::congestion::pacing::PacingCredit;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::connection::receiver::pure_acks::OtherParts;
use crate::connection::sender::Sender;
use crate::connection::sender::new_segments::NextSegment;
use crate::queues::send_buffer::{self, InFlightSegment, RETX, SUPER_SEGMENT, SegmentBudget};
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH};
use crate::wire::template::SegmentFields;

/// A segment with at most this number of unused bytes counts as full: FPDUs are multiples of four
/// bytes.
const MAX_PADDING: u32 = 3;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Sends one segment with data, a FIN or both. `again`: it is a retransmission.
    #[inline]
    pub(crate) fn emit_segment(
        &mut self,
        cx: &mut TcpContext<'_>,
        segment: &InFlightSegment,
        again: bool,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let srtt = self.sender.snd.rtt.srtt;
        let offer = self.receiver.receive_window(&self.tcb, srtt, cx);
        let (tcb, snd) = (&self.tcb, &self.sender.snd);
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
            flags |= if ect && snd.has(SendFlags::SEND_CWR) {
                CWR
            } else {
                0
            };
        }
        let ts = self.path.timestamps(tcb, &self.receiver.rcv, cx.now);
        let fields = SegmentFields {
            seq: segment.seq,
            ack: self.receiver.rcv.nxt,
            flags,
            window: offer.field,
            ts,
            options: &[],
            payload: segment.len,
            ect,
            tso: segment.mss != 0,
        };
        // Completed here, with the fields in registers: a struct that is copied right after it was
        // stored field by field waits for the stores.
        let (len, mut meta) = self.path.template.meta(&fields);
        self.path.complete_meta(&self.tcb, cx, &mut meta);
        meta.retransmission = again;
        meta.tso_segsz = segment.mss;
        let fill = |out: &mut [u8]| self.path.template.build(out, &fields);
        let payload =
            self.sender
                .payload(self.tcb.user, (segment.record, segment.offset), segment.len);
        if !sink.send_frame(len, &meta, fill, payload) {
            return Err(SinkFull);
        }
        if ect {
            self.sender.snd.clear(SendFlags::SEND_CWR);
        }
        if !self.tcb.has(ConnectionFlags::ANSWERS) && self.receiver.answers_at_once(&self.tcb, cx) {
            self.tcb.flags |= ConnectionFlags::ANSWERS;
        }
        self.receiver.on_ack_sent(offer.edge);
        if !self.receiver.has_sack_blocks() {
            self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        }
        cx.shared.net.stats.frames_out += 1;
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
        let lost = self.sender.has_lost_segments();
        let data = self.tcb.can_send_data() && (self.sender.snd.unsent > 0 || fin || lost);
        if !data && !self.tcb.has(ConnectionFlags::NEED_MASK) && !self.is_window_update_due(cx) {
            return Ok(());
        }
        if !self.ensure_resolved(cx) {
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
            let seq = self.sender.snd.una - 1;
            let parts = OtherParts {
                tcb: &self.tcb,
                snd: &self.sender.snd,
                path: &self.path,
            };
            self.receiver
                .emit_without_payload(&parts, cx, seq, 0, sink)?;
            // Without the persist timer it tests a path that may drop full segments.
            if self.tcb.has(ConnectionFlags::NEED_PROBE) && self.tcb.is_timer(Timer::Persist) {
                cx.count_window_probe();
            }
            cx.shared.stats.keepalive_probes +=
                u64::from(self.tcb.has(ConnectionFlags::NEED_KEEPALIVE));
            self.tcb.flags &= !(ConnectionFlags::NEED_PROBE | ConnectionFlags::NEED_KEEPALIVE);
        }
        if self.tcb.has(ConnectionFlags::NEED_ACK) || self.is_window_update_due(cx) {
            self.send_acks(cx, sink)?;
        }
        Ok(())
    }

    /// Returns whether the receive window grew enough to justify a pure ACK.
    fn is_window_update_due(&self, cx: &mut TcpContext<'_>) -> bool {
        let srtt = self.sender.snd.rtt.srtt;
        self.receiver.window_update_due(&self.tcb, srtt, cx)
    }

    /// Sends the ACK that is due, and further ones if there is more to report.
    #[inline]
    fn send_acks(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let parts = OtherParts {
            tcb: &self.tcb,
            snd: &self.sender.snd,
            path: &self.path,
        };
        let first = self.receiver.send_first_ack(&parts, cx, sink)?;
        self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        if self.receiver.out_of_order.is_none() {
            return Ok(());
        }
        let parts = OtherParts {
            tcb: &self.tcb,
            snd: &self.sender.snd,
            path: &self.path,
        };
        self.receiver.send_further_acks(&parts, cx, &first, sink)
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
        if self.path.neighbour_generation != cx.shared.net.neighbours.generation {
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
        if self.sender.has_lost_segments() {
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
            let snd = &self.sender.snd;
            if snd.pipe > 0 && snd.pipe + segment.len > snd.window.cwnd() {
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
            let (snd, queue) = (&mut self.sender.snd, &mut self.sender.send_buffer);
            recovery.on_retransmitted(snd, queue, index, cx.now.0);
            cx.count_retransmission(match self.sender.snd.phase {
                RecoveryPhase::Loss => RetransmissionCause::Timeout,
                _ => RetransmissionCause::Fast,
            });
            // The timer must leave the retransmission a round trip: it must not expire for a loss
            // that an ACK reported in time.
            if self.tcb.timer().is_none()
                || (index == 0
                    && self.sender.snd.phase == RecoveryPhase::Recovery
                    && !self.tcb.is_timer(Timer::Reordering))
            {
                self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
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
        let snd = &self.sender.snd;
        if snd.is_all_acked() && snd.unsent > 0 {
            self.sender.validate_window(self.tcb.emss, cx);
        }
        let emss = u32::from(self.tcb.emss);
        let mut sent = 0;
        let mut result = Ok(());
        let credit = self.pacing_credit(cx);
        while self.sender.snd.unsent > 0 && sent < credit {
            let (plan, usable) = match self.sender.plan_new_segment(emss) {
                NextSegment::Ready { plan, usable } => (plan, usable),
                NextSegment::Wait => break,
                NextSegment::ProbeWindow => {
                    if !self.tcb.is_timer(Timer::Persist) {
                        self.tcb.start_persist_timer(&self.sender.snd, cx);
                    }
                    break;
                }
            };
            let size = plan.len;
            if size + MAX_PADDING >= emss
                && size <= usable
                && !self.sender.snd.has(SendFlags::SEND_CWR)
            {
                let most = if credit == u32::MAX {
                    usable
                } else {
                    usable.min(((credit - sent) / size).max(1) * size)
                };
                let budget = SegmentBudget {
                    emss,
                    size,
                    usable: most,
                };
                if let Some(tso) = cx.shared.config.tso {
                    match self.send_tso(cx, &budget, &tso, sink) {
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
                } else if most.min(self.sender.snd.unsent) >= 2 * size
                    && !self.tcb.has(ConnectionFlags::FIN_QUEUED)
                {
                    // Not if the last segment will carry a FIN.
                    let n;
                    (n, result) = self.send_gso(cx, &budget, sink);
                    sent += n;
                    if result.is_err() {
                        break;
                    }
                    continue;
                }
            }
            let Sender {
                snd, send_buffer, ..
            } = &self.sender;
            let fin = snd.unsent == plan.len && self.tcb.is_fin_pending();
            let segment = send_buffer.make_segment(&plan, snd.nxt, fin, cx.now.0);
            if let Err(error) = self.emit_new_segment(cx, &segment, sink) {
                result = Err(error);
                break;
            }
            self.sender.send_buffer.commit_plan(&plan);
            self.sender.snd.move_to_pipe(plan.len);
            self.sender.snd.clear(SendFlags::MAY_SPLIT_RECORD);
            sent += plan.len;
        }
        let Sender {
            snd, send_buffer, ..
        } = &self.sender;
        if result.is_ok() && snd.unsent == 0 && self.tcb.is_fin_pending() {
            let segment = send_buffer.make_fin(snd.nxt, cx.now.0);
            result = self.emit_new_segment(cx, &segment, sink);
        }
        self.sender.congestion.on_sent(self.sender.snd.pipe);
        if sent > 0 {
            self.on_new_data_sent(cx, sent, credit != u32::MAX);
        }
        result
    }

    /// Returns how many bytes of new segments the pacer allows now; `u32::MAX` if the connection is not
    /// paced. Starts the pacing timer if data has to wait.
    #[inline]
    fn pacing_credit(&mut self, cx: &mut TcpContext<'_>) -> u32 {
        match self.sender.pacing_credit(self.tcb.emss, cx) {
            PacingCredit::Unlimited => u32::MAX,
            PacingCredit::Bytes(bytes) => bytes,
            PacingCredit::NotBefore(at) => {
                cx.schedule_timer(&mut self.tcb, at);
                0
            }
        }
    }

    /// Accounts for new segments with `sent` bytes of payload: charges the pacer (if `is_paced`) and the
    /// recovery, and restarts the timer of the tail loss probe.
    #[inline]
    fn on_new_data_sent(&mut self, cx: &mut TcpContext<'_>, sent: u32, is_paced: bool) {
        if is_paced {
            self.sender.on_paced_output(sent);
            // Starts the pacing timer when the credit is used up.
            self.pacing_credit(cx);
        }
        if self.tcb.is_timer(Timer::TailLossProbe)
            && let Some(oldest) = self.sender.send_buffer.sent.front()
        {
            self.tcb
                .extend_probe_timeout(&self.sender.snd, cx, oldest.at);
        }
        self.sender.charge_recovery(sent);
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
        if self.sender.snd.has(SendFlags::RECOVERING) || !self.tcb.can_send_data() {
            return Ok(()); // an ACK arrived since the timer fired
        }
        self.sender.start_recovery();
        let Sender {
            snd, send_buffer, ..
        } = &self.sender;
        let Some(last) = send_buffer.sent.back().copied() else {
            return Ok(());
        };
        let window = snd.wnd.saturating_sub(snd.flight());
        let plan = send_buffer
            .plan_segment(u32::from(self.tcb.emss), window)
            .filter(|plan| plan.len <= window);
        let again = plan.is_none();
        if let Some(plan) = plan {
            let segment = send_buffer.make_segment(&plan, snd.nxt, false, cx.now.0);
            self.emit_new_segment(cx, &segment, sink)?;
            self.sender.send_buffer.commit_plan(&plan);
            self.sender.snd.move_to_pipe(plan.len);
        } else {
            self.emit_segment(cx, &last, true, sink)?;
            cx.count_retransmission(RetransmissionCause::TailProbe);
        }
        cx.shared.stats.tlp_probes += 1;
        self.sender.on_probe_sent(again, cx.now);
        self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
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
        let (tcb, snd) = (&mut self.tcb, &mut self.sender.snd);
        snd.nxt = segment.end_seq();
        if segment.flags & send_buffer::FIN != 0 {
            tcb.flags |= ConnectionFlags::FIN_SENT;
        }
        if tcb.is_timer(Timer::Persist) {
            snd.backoff = 0;
            tcb.stop_timer();
        }
        if tcb.timer().is_none() {
            tcb.restart_retransmission_timer(snd, cx);
        }
    }
}
