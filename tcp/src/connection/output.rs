//! What a connection sends: repetitions, new segments, probes, SYNs, ACKs, in that order of right.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::{FrameMeta, FrameSink, TxChecksum};
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::connection::context::{ConnectionContext, SharedState};
use crate::connection::{Connection, Hot, Phase, flag};
use crate::pmtu::probe::ProbeStep;
use crate::queues::send_queue::{self, Sent};
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH};
use crate::wire::template::SegmentFields;

/// The sink has no room now.
pub(crate) struct Blocked;

impl SharedState {
    /// In bytes (RFC 6928).
    #[inline]
    pub(crate) fn initial_window(&self, h: &Hot) -> u32 {
        let segments = self.config.initial_window.max(1);
        segments.saturating_mul(u32::from(h.emss))
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    pub(crate) fn finish_meta(&self, cx: &mut ConnectionContext<'_>, meta: &mut FrameMeta) {
        meta.checksum = if cx.shared.config.tx_checksum {
            TxChecksum::Partial
        } else {
            TxChecksum::Offload
        };
        meta.self_addressed = self.hot.has(flag::SELF);
        meta.connection = Some(self.id(cx.index));
    }

    /// Receive window limit that the peer's window scaling allows.
    #[inline]
    pub(crate) fn window_limit(&self, cx: &mut ConnectionContext<'_>) -> u32 {
        cx.shared.recv_window.min(0xffff << self.hot.rcv_wscale)
    }

    /// A frame that acknowledges left: the window it advertised is promised, the ACK paid.
    #[inline]
    pub(crate) fn acknowledged(&mut self, edge: SeqNr) {
        let h = &mut self.hot;
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
        let h = &self.hot;
        let mut flags = ACK;
        if s.flags & send_queue::PUSH != 0 {
            flags |= PSH;
        }
        if s.flags & send_queue::FIN != 0 {
            flags |= FIN;
        }
        let mut ect = false;
        if h.has(flag::ECN) {
            // Repetitions are not ECN-capable (RFC 3168 section 6.1.5).
            ect = !again && s.len > 0;
            flags |= if h.has(flag::ECE_OWED) { ECE } else { 0 };
            flags |= if ect && h.has(flag::CWR_OWED) { CWR } else { 0 };
        }
        let ts = h
            .has(flag::TIMESTAMPS)
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
            meta.tso_segsz = self.hot.emss;
        }
        let user = self.hot.user;
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
            self.hot.flags &= !flag::CWR_OWED;
        }
        self.acknowledged(edge);
        if !self.has_blocks() {
            self.hot.flags &= !flag::NEED_ACK;
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
        const OWED: u32 = flag::OWED;
        if self.hot.state == TcpState::Closed {
            return Ok(());
        }
        let fin = self.hot.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED;
        let lost =
            self.hot.has(flag::RECOVERING) && self.recovery.as_ref().is_some_and(|r| r.lost > 0);
        let data = self.hot.can_send_data() && (self.hot.unsent > 0 || fin || lost);
        if !data && !self.hot.has(OWED) && !self.window_update_due(self.window_limit(cx)) {
            return Ok(());
        }
        if !self.resolved(cx) {
            if self.hot.rto_at == 0 && (data || self.hot.has(OWED)) {
                self.hot.restart_rto(cx);
            }
            return Ok(());
        }
        if self.hot.has(flag::NEED_SYN) {
            self.emit_syn(cx, tx)?;
            self.hot.flags &= !(flag::NEED_SYN | flag::NEED_ACK);
        }
        if matches!(self.hot.state, TcpState::SynSent | TcpState::SynReceived) {
            return Ok(());
        }
        if data {
            self.send_data(cx, tx)?;
        }
        if self.hot.has(flag::NEED_TLP) {
            self.tail_probe(cx, tx)?;
            self.hot.flags &= !flag::NEED_TLP;
        }
        if self.hot.has(flag::NEED_PROBE | flag::NEED_KEEPALIVE) {
            // A segment left of the window makes the peer answer with its ACK and window
            // (RFC 9293 section 3.8.4); no byte of a record is risked for it.
            self.emit_bare(cx, self.hot.snd_una - 1, 0, tx)?;
            cx.shared.stats.zero_window_probes += u64::from(self.hot.has(flag::NEED_PROBE));
            cx.shared.stats.keepalive_probes += u64::from(self.hot.has(flag::NEED_KEEPALIVE));
            self.hot.flags &= !(flag::NEED_PROBE | flag::NEED_KEEPALIVE);
        }
        if self.hot.has(flag::NEED_ACK) || self.window_update_due(self.window_limit(cx)) {
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
        if !self.hot.can_send_data() {
            return Ok(());
        }
        if self.neighbour_generation != cx.shared.neighbours.generation {
            // `poll` resolves.
            cx.owe(&mut self.hot, 0);
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
        if self.hot.has(flag::RECOVERING) && self.recovery.as_ref().is_some_and(|r| r.lost > 0) {
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
        let emss = u32::from(self.hot.emss);
        while let Some(i) = r.next_lost(&self.tx) {
            let s = self.tx.sent[i];
            if s.is_probe(emss) {
                // Its loss was nobody's answer: the search is another connection's by cx.now.
                self.tx.resegment(emss);
                r.recount(&mut self.hot, &self.tx);
                continue;
            }
            if self.hot.pipe > 0 && self.hot.pipe + s.len > self.hot.cwnd {
                break;
            }
            if self.emit(cx, &s, true, tx).is_err() {
                result = Err(Blocked);
                break;
            }
            r.repeat(&mut self.hot, &mut self.tx, i, cx.now.0);
            self.retransmits += 1;
            cx.shared.stats.repeated(&self.hot);
            // The timer has to leave the repetition its round trip: else a loss that an ACK told
            // of in time looks like silence.
            if self.hot.rto_at == 0
                || (i == 0 && self.hot.phase == Phase::Recovery && !self.hot.has(flag::REO))
            {
                self.hot.restart_rto(cx);
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
        if self.hot.flight() == 0 && self.hot.unsent > 0 {
            self.validate(cx);
        }
        // A search for what the path carries may go on here, between two segments.
        let mut searching = self.hot.has(flag::NARROW) && self.search_is_due(cx.now);
        let mut emss = u32::from(self.hot.emss);
        let mut sent = 0;
        let mut result = Ok(());
        let credit = self.pace(cx);
        while self.hot.unsent > 0 && sent < credit {
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
                emss = u32::from(self.hot.emss);
                if self.hot.unsent == 0 {
                    break;
                }
            }
            let h = &mut self.hot;
            let window = h.snd_wnd.saturating_sub(h.flight());
            // Limited transmit (RFC 3042): a segment for each of the first two duplicates, which
            // are only counted without SACK.
            let limited = if h.phase == Phase::Open {
                u32::from(h.dup_acks.min(2))
            } else {
                0
            };
            let usable = window.min((h.cwnd + limited * emss).saturating_sub(h.pipe));
            let Some(mut plan) = self.tx.plan(emss, usable) else {
                break;
            };
            if plan.len > window {
                if h.flight() > 0 {
                    break; // its ACK brings the window
                }
                // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part leaves when it
                // is half of the largest window seen, or when waiting did not help.
                if window > 0 && (window >= h.max_snd_wnd / 2 || h.has(flag::CUT)) {
                    plan = self.tx.cut(window.min(plan.len - 1).min(h.cwnd.max(1)));
                } else {
                    self.persist(cx);
                    break;
                }
            } else if plan.len > usable && h.pipe > 0 {
                break;
            }
            if plan.len == emss && plan.len <= usable && !self.hot.has(flag::CWR_OWED) && !searching
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
                if most.min(self.hot.unsent) >= 2 * emss && !self.hot.has(flag::FIN_QUEUED) {
                    let n;
                    (n, result) = self.send_together(cx, (emss, most), tx);
                    sent += n;
                    if result.is_err() {
                        break;
                    }
                    continue;
                }
            }
            let h = &mut self.hot;
            let fin = h.unsent == plan.len
                && h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED;
            let segment = self.tx.make(&plan, h.snd_nxt, fin, cx.now.0);
            if let Err(e) = self.emit_new(cx, &segment, tx) {
                result = Err(e);
                break;
            }
            self.tx.made(&plan);
            let h = &mut self.hot;
            h.pipe += plan.len;
            h.unsent -= plan.len;
            h.flags &= !flag::CUT;
            sent += plan.len;
        }
        let h = &self.hot;
        if result.is_ok()
            && h.unsent == 0
            && h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED
        {
            let segment = self.tx.make_fin(h.snd_nxt, cx.now.0);
            result = self.emit_new(cx, &segment, tx);
        }
        self.cwv.sent(self.hot.pipe);
        if sent > 0 {
            if credit != u32::MAX {
                self.paced(cx, sent);
            }
            if self.hot.has(flag::PTO) {
                self.hot.restart_rto(cx);
            }
        }
        if sent > 0
            && self.hot.phase == Phase::Recovery
            && let Some(r) = &mut self.recovery
        {
            r.sent(sent);
        }
        result
    }

    /// New segments after a pause: the window may have gone unused for too long (RFC 7661).
    #[inline]
    fn validate(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.hot;
        if self.cwv.rested(cx.now.0) && h.phase == Phase::Open {
            let initial = cx.shared.initial_window(h);
            let adjusted = self.cwv.rest(h, &mut self.cc, initial, cx.now.0);
            cx.shared.stats.idle_restarts += u64::from(adjusted);
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
        let h = &self.hot;
        if h.has(flag::RECOVERING) || !h.can_send_data() {
            return Ok(()); // an ACK came in between
        }
        self.start_recovery();
        let h = &self.hot;
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
            self.hot.pipe += plan.len;
            self.hot.unsent -= plan.len;
        } else {
            self.emit(cx, &last, true, tx)?;
            self.retransmits += 1;
            cx.shared.stats.retrans_segs += 1;
        }
        cx.shared.stats.tlp_probes += 1;
        if let Some(r) = &mut self.recovery {
            r.probed(&mut self.hot, &mut self.tx, again, cx.now.0);
        }
        self.hot.restart_rto(cx);
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
        let Some((whole, count)) = self.tx.train(budget, tso, self.hot.snd_nxt, cx.now.0) else {
            return Ok(0);
        };
        if let Err(e) = self.emit(cx, &whole, false, tx) {
            self.tx.sent.truncate(before);
            self.tx.rewind(cursor);
            return Err(e);
        }
        cx.shared.stats.out_segs += u64::from(count - 1);
        cx.shared.stats.tso_frames += u64::from(count > 1);
        if self.hot.has(flag::RECOVERING) {
            self.tx.split(before);
        } else {
            self.hot.flags |= flag::TRAINS;
        }
        self.sent_new(cx, &whole);
        let h = &mut self.hot;
        h.pipe += whole.len;
        h.unsent -= whole.len;
        h.flags &= !flag::CUT;
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
        let h = &mut self.hot;
        h.snd_nxt = s.end();
        if s.flags & send_queue::FIN != 0 {
            h.flags |= flag::FIN_SENT;
        }
        if h.has(flag::PERSIST) {
            h.backoff = 0;
            h.rto_at = 0;
        }
        if h.rto_at == 0 {
            h.restart_rto(cx);
        }
    }

    /// Nothing is in flight and the window holds the next record back: probe it in time
    /// (RFC 9293 section 3.8.6.1).
    fn persist(&mut self, cx: &mut ConnectionContext<'_>) {
        let h = &mut self.hot;
        if h.has(flag::PERSIST) && h.rto_at != 0 {
            return;
        }
        h.restart_rto(cx);
        h.flags |= flag::PERSIST;
    }
}
