//! What a connection sends: repetitions, new segments, probes, SYNs, ACKs, in that order of right.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::{FrameMeta, FrameSink, TxChecksum};
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::congestion::RecoveryPhase;
use crate::congestion::window::initial_window;
use crate::connection::Connection;
use crate::connection::context::{ConnectionContext, SharedState};
use crate::pmtu::probe::ProbeStep;
use crate::queues::send_queue::{self, Sent};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH};
use crate::wire::template::SegmentFields;

/// The sink has no room now.
pub(crate) struct Blocked;

impl SharedState {
    /// In bytes (RFC 6928).
    #[inline]
    pub(crate) fn initial_window(&self, h: &Tcb) -> u32 {
        initial_window(self.config.initial_window, u32::from(h.emss))
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    pub(crate) fn finish_meta(&self, cx: &mut ConnectionContext<'_>, meta: &mut FrameMeta) {
        meta.checksum = if cx.shared.config.tx_checksum {
            TxChecksum::Partial
        } else {
            TxChecksum::Offload
        };
        meta.self_addressed = self.tcb.has(ConnectionFlags::SELF_ADDRESSED);
        meta.connection = Some(self.id(cx.index));
    }

    /// Receive window limit that the peer's window scaling allows.
    #[inline]
    pub(crate) fn window_limit(&self, cx: &mut ConnectionContext<'_>) -> u32 {
        cx.shared
            .recv_window
            .min(0xffff << self.tcb.scales.receive())
    }

    /// A frame that acknowledges left: the window it advertised is promised, the ACK paid.
    #[inline]
    pub(crate) fn acknowledged(&mut self, edge: SeqNr) {
        let h = &mut self.tcb;
        h.rcv_adv = h.rcv_adv.max(edge);
        h.last_ack_sent = h.rcv_nxt;
        h.unacked_segs = 0;
        h.ack_at = 0;
    }

    /// One data (or FIN) segment.
    #[inline]
    fn emit(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        s: &Sent,
        again: bool,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let (window, edge) = self.window(self.window_limit(cx));
        let h = &self.tcb;
        let mut flags = ACK;
        if s.flags & send_queue::PUSH != 0 {
            flags |= PSH;
        }
        if s.flags & send_queue::FIN != 0 {
            flags |= FIN;
        }
        let mut ect = false;
        if h.has(ConnectionFlags::ECN) {
            // Repetitions are not ECN-capable (RFC 3168 section 6.1.5).
            ect = !again && s.len > 0;
            flags |= if h.has(ConnectionFlags::SEND_ECE) {
                ECE
            } else {
                0
            };
            flags |= if ect && h.has(ConnectionFlags::SEND_CWR) {
                CWR
            } else {
                0
            };
        }
        let ts = h
            .has(ConnectionFlags::TIMESTAMPS)
            .then(|| (timestamp_at(cx.now, self.ts_offset), h.ts_recent));
        let fields = SegmentFields {
            seq: s.seq,
            ack: h.rcv_nxt,
            flags,
            window,
            ts,
            options: &[],
            payload: s.len,
            ect,
            tso: s.mss != 0,
        };
        let (n, mut meta) = self.template.meta(&fields);
        self.finish_meta(cx, &mut meta);
        meta.retransmission = again;
        if fields.tso {
            meta.tso_segsz = self.tcb.emss;
        }
        let user = self.tcb.user;
        let fill = |out: &mut [u8]| self.template.build(out, &fields);
        let begun = match self.tx.piece((s.record, s.offset), s.len) {
            Some(r) if s.len > 0 && !fields.tso => {
                tx.send_single_piece(n, &meta, fill, (user, r, s.offset))
            }
            _ => {
                let begun = tx.begin_frame_with(n, &meta, fill);
                if begun {
                    self.tx
                        .gather(s, |r, offset, len| tx.append_record(user, r, offset, len));
                    tx.end_frame();
                }
                begun
            }
        };
        if !begun {
            return Err(Blocked);
        }
        if ect {
            self.tcb.flags &= !ConnectionFlags::SEND_CWR;
        }
        self.acknowledged(edge);
        if !self.has_blocks() {
            self.tcb.flags &= !ConnectionFlags::NEED_ACK;
        }
        cx.shared.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        cx.shared.stats.out_bytes += u64::from(s.len);
        Ok(())
    }

    /// Sends all that the connection owes and may send.
    pub(crate) fn output(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if self.tcb.state == TcpState::Closed {
            return Ok(());
        }
        let fin = self.tcb.is_fin_pending();
        let lost = self.tcb.has(ConnectionFlags::RECOVERING)
            && self.recovery.as_ref().is_some_and(|r| r.lost > 0);
        let data = self.tcb.can_send_data() && (self.tcb.unsent > 0 || fin || lost);
        if !data
            && !self.tcb.has(ConnectionFlags::NEED_MASK)
            && !self.window_update_due(self.window_limit(cx))
        {
            return Ok(());
        }
        if !self.resolved(cx) {
            if self.tcb.timer().is_none() && (data || self.tcb.has(ConnectionFlags::NEED_MASK)) {
                self.tcb.restart_rto(cx);
            }
            return Ok(());
        }
        if self.tcb.has(ConnectionFlags::NEED_SYN) {
            self.emit_syn(cx, tx)?;
            self.tcb.flags &= !(ConnectionFlags::NEED_SYN | ConnectionFlags::NEED_ACK);
        }
        if matches!(self.tcb.state, TcpState::SynSent | TcpState::SynReceived) {
            return Ok(());
        }
        if data {
            self.send_data(cx, tx)?;
        }
        if self.tcb.has(ConnectionFlags::NEED_TAIL_PROBE) {
            self.tail_probe(cx, tx)?;
            self.tcb.flags &= !ConnectionFlags::NEED_TAIL_PROBE;
        }
        if self
            .tcb
            .has(ConnectionFlags::NEED_PROBE | ConnectionFlags::NEED_KEEPALIVE)
        {
            // A segment left of the window makes the peer answer with its ACK and window
            // (RFC 9293 section 3.8.4); no byte of a record is risked for it.
            self.emit_bare(cx, self.tcb.snd_una - 1, 0, tx)?;
            cx.shared.stats.zero_window_probes +=
                u64::from(self.tcb.has(ConnectionFlags::NEED_PROBE));
            cx.shared.stats.keepalive_probes +=
                u64::from(self.tcb.has(ConnectionFlags::NEED_KEEPALIVE));
            self.tcb.flags &= !(ConnectionFlags::NEED_PROBE | ConnectionFlags::NEED_KEEPALIVE);
        }
        if self.tcb.has(ConnectionFlags::NEED_ACK) || self.window_update_due(self.window_limit(cx))
        {
            self.send_acks(cx, tx)?;
        }
        Ok(())
    }

    /// `flush`: data only; the ACK it carries is one less to send.
    pub(crate) fn output_data(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if !self.tcb.can_send_data() {
            return Ok(());
        }
        if self.neighbour_generation != cx.shared.neighbours.generation {
            // `poll` resolves.
            cx.owe(&mut self.tcb, ConnectionFlags::NONE);
            return Ok(());
        }
        self.send_data(cx, tx)
    }

    #[inline]
    fn send_data(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if self.tcb.has(ConnectionFlags::RECOVERING)
            && self.recovery.as_ref().is_some_and(|r| r.lost > 0)
        {
            self.repeat_lost(cx, tx)?;
        }
        self.send_new(cx, tx)
    }

    #[cold]
    fn repeat_lost(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let Some(mut r) = self.recovery.take() else {
            return Ok(());
        };
        let mut result = Ok(());
        let emss = u32::from(self.tcb.emss);
        while let Some(i) = r.next_lost(&self.tx) {
            let s = self.tx.sent[i];
            if s.is_probe(emss) {
                // Its loss was nobody's answer: the search is another connection's by cx.now.
                self.tx.resegment(emss);
                r.recount(&mut self.tcb, &self.tx);
                continue;
            }
            if self.tcb.pipe > 0 && self.tcb.pipe + s.len > self.tcb.window.cwnd() {
                break;
            }
            if self.emit(cx, &s, true, tx).is_err() {
                result = Err(Blocked);
                break;
            }
            r.repeat(&mut self.tcb, &mut self.tx, i, cx.now.0);
            self.retransmits += 1;
            let after_timeout = self.tcb.phase == RecoveryPhase::Loss;
            cx.shared.stats.count_retransmission(after_timeout);
            // The timer has to leave the repetition its round trip: else a loss that an ACK told
            // of in time looks like silence.
            if self.tcb.timer().is_none()
                || (i == 0
                    && self.tcb.phase == RecoveryPhase::Recovery
                    && !self.tcb.is_timer(Timer::Reordering))
            {
                self.tcb.restart_rto(cx);
            }
        }
        self.recovery = Some(r);
        result
    }

    #[inline]
    fn send_new(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if self.tcb.flight() == 0 && self.tcb.unsent > 0 {
            self.validate(cx);
        }
        // A search for what the path carries may go on here, between two segments.
        let mut searching =
            self.tcb.has(ConnectionFlags::NARROW_PATH) && self.search_is_due(cx.now);
        let mut emss = u32::from(self.tcb.emss);
        let mut sent = 0;
        let mut result = Ok(());
        let credit = self.pacing_credit(cx);
        while self.tcb.unsent > 0 && sent < credit {
            if searching {
                match self.probe_path(cx, tx) {
                    Ok(ProbeStep::Sent(n)) => sent += n,
                    Ok(ProbeStep::Hold) => break,
                    Ok(ProbeStep::Asked) => {}
                    Ok(ProbeStep::Later) => searching = false,
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
                emss = u32::from(self.tcb.emss);
                if self.tcb.unsent == 0 {
                    break;
                }
            }
            let h = &mut self.tcb;
            let window = h.snd_wnd.saturating_sub(h.flight());
            // Limited transmit (RFC 3042): a segment for each of the first two duplicates, which
            // are only counted without SACK.
            let limited = if h.phase == RecoveryPhase::Open {
                u32::from(h.dup_acks.min(2))
            } else {
                0
            };
            let usable = window.min((h.window.cwnd() + limited * emss).saturating_sub(h.pipe));
            let Some(mut plan) = self.tx.plan(emss, usable) else {
                break;
            };
            if plan.len > window {
                if h.flight() > 0 {
                    break; // its ACK brings the window
                }
                // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part leaves when it
                // is half of the largest window seen, or when waiting did not help.
                if window > 0
                    && (window >= h.max_snd_wnd / 2 || h.has(ConnectionFlags::MAY_SPLIT_RECORD))
                {
                    plan = self
                        .tx
                        .cut(window.min(plan.len - 1).min(h.window.cwnd().max(1)));
                } else {
                    self.persist(cx);
                    break;
                }
            } else if plan.len > usable && h.pipe > 0 {
                break;
            }
            if plan.len == emss
                && plan.len <= usable
                && !self.tcb.has(ConnectionFlags::SEND_CWR)
                && !searching
            {
                let most = if credit == u32::MAX {
                    usable
                } else {
                    usable.min(((credit - sent) / emss).max(1) * emss)
                };
                if let Some(tso) = cx.shared.config.tso {
                    match self.send_train(cx, (emss, most), &tso, tx) {
                        Ok(n) => {
                            sent += n;
                            continue;
                        }
                        Err(e) => {
                            result = Err(e);
                            break;
                        }
                    }
                }
                // The last may carry a FIN.
                if most.min(self.tcb.unsent) >= 2 * emss
                    && !self.tcb.has(ConnectionFlags::FIN_QUEUED)
                {
                    let n;
                    (n, result) = self.send_together(cx, (emss, most), tx);
                    sent += n;
                    if result.is_err() {
                        break;
                    }
                    continue;
                }
            }
            let h = &mut self.tcb;
            let fin = h.unsent == plan.len && h.is_fin_pending();
            let segment = self.tx.make(&plan, h.snd_nxt, fin, cx.now.0);
            if let Err(e) = self.emit_new(cx, &segment, tx) {
                result = Err(e);
                break;
            }
            self.tx.made(&plan);
            let h = &mut self.tcb;
            h.pipe += plan.len;
            h.unsent -= plan.len;
            h.flags &= !ConnectionFlags::MAY_SPLIT_RECORD;
            sent += plan.len;
        }
        let h = &self.tcb;
        if result.is_ok() && h.unsent == 0 && h.is_fin_pending() {
            let segment = self.tx.make_fin(h.snd_nxt, cx.now.0);
            result = self.emit_new(cx, &segment, tx);
        }
        self.congestion.on_sent(self.tcb.pipe);
        if sent > 0 {
            if credit != u32::MAX {
                self.on_paced_output(cx, sent);
            }
            if self.tcb.is_timer(Timer::TailLossProbe) {
                self.tcb.restart_rto(cx);
            }
        }
        if sent > 0
            && self.tcb.phase == RecoveryPhase::Recovery
            && let Some(r) = &mut self.recovery
        {
            r.reduction.on_sent(sent);
        }
        result
    }

    /// New segments after a pause: the window may have gone unused for too long (RFC 7661).
    #[inline]
    fn validate(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.tcb;
        if self.congestion.has_rested(cx.now.0) && h.phase == RecoveryPhase::Open {
            let initial = cx.shared.initial_window(h);
            let flight = h.flight_state();
            let reduced = self
                .congestion
                .on_rest(&mut h.window, &flight, initial, cx.now.0);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            h.forget_pacing();
        }
    }

    /// The probe timeout fired (RFC 8985 section 7.3): a new segment whatever the congestion
    /// window, else the last one again, makes the peer tell what it has.
    #[cold]
    fn tail_probe(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let h = &self.tcb;
        if h.has(ConnectionFlags::RECOVERING) || !h.can_send_data() {
            return Ok(()); // an ACK came in between
        }
        self.start_recovery();
        let h = &self.tcb;
        let Some(last) = self.tx.sent.back().copied() else {
            return Ok(());
        };
        let window = h.snd_wnd.saturating_sub(h.flight());
        let plan = self
            .tx
            .plan(u32::from(h.emss), window)
            .filter(|p| p.len <= window);
        let again = plan.is_none();
        if let Some(plan) = plan {
            let segment = self.tx.make(&plan, h.snd_nxt, false, cx.now.0);
            self.emit_new(cx, &segment, tx)?;
            self.tx.made(&plan);
            self.tcb.pipe += plan.len;
            self.tcb.unsent -= plan.len;
        } else {
            self.emit(cx, &last, true, tx)?;
            self.retransmits += 1;
            cx.shared.stats.retrans_segs += 1;
        }
        cx.shared.stats.tlp_probes += 1;
        if let Some(r) = &mut self.recovery {
            r.probed(&mut self.tcb, &mut self.tx, again, cx.now.0);
        }
        self.tcb.restart_rto(cx);
        Ok(())
    }

    /// Several new segments as one frame that the port cuts. While segments are marked each is
    /// noted alone. The FIN goes alone.
    fn send_train(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        budget: (u32, u32),
        tso: &crate::config::TsoLimits,
        tx: &mut impl FrameSink<R>,
    ) -> Result<u32, Blocked> {
        let (cursor, before) = (self.tx.cursor(), self.tx.sent.len());
        let Some((whole, count)) = self.tx.train(budget, tso, self.tcb.snd_nxt, cx.now.0) else {
            return Ok(0);
        };
        if let Err(e) = self.emit(cx, &whole, false, tx) {
            self.tx.sent.truncate(before);
            self.tx.rewind(cursor);
            return Err(e);
        }
        cx.shared.stats.out_segs += u64::from(count - 1);
        cx.shared.stats.tso_frames += u64::from(count > 1);
        if self.tcb.has(ConnectionFlags::RECOVERING) {
            self.tx.split(before);
        } else {
            self.tcb.flags |= ConnectionFlags::MULTI_SEGMENT;
        }
        self.sent_new(cx, &whole);
        let h = &mut self.tcb;
        h.pipe += whole.len;
        h.unsent -= whole.len;
        h.flags &= !ConnectionFlags::MAY_SPLIT_RECORD;
        Ok(whole.len)
    }

    /// Sends a new segment and notes it; nothing changes when the sink is full.
    #[inline]
    pub(crate) fn emit_new(
        &mut self,
        cx: &mut ConnectionContext<'_>,
        s: &Sent,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        self.emit(cx, s, false, tx)?;
        self.tx.sent.push_back(*s);
        self.sent_new(cx, s);
        Ok(())
    }

    #[inline]
    pub(crate) fn sent_new(&mut self, cx: &mut ConnectionContext<'_>, s: &Sent) {
        let h = &mut self.tcb;
        h.snd_nxt = s.end();
        if s.flags & send_queue::FIN != 0 {
            h.flags |= ConnectionFlags::FIN_SENT;
        }
        if h.is_timer(Timer::Persist) {
            h.backoff = 0;
            h.stop_timer();
        }
        if h.timer().is_none() {
            h.restart_rto(cx);
        }
    }

    /// Nothing is in flight and the window holds the next record back: probe it in time
    /// (RFC 9293 section 3.8.6.1).
    fn persist(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.tcb;
        if !h.is_timer(Timer::Persist) {
            h.start_persist(cx);
        }
    }
}
