//! What a connection sends: repetitions, new segments, probes, SYNs, ACKs, in that order of right.

use crate::base::buffer::RecvBuf;
use crate::base::frame_sink::{FrameMeta, FrameSink, TxChecksum};
use crate::base::ids::ConnId;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::context::Shared;
use crate::connection::{Conn, Hot, Phase, flag};
use crate::pmtu::probe::Step;
use crate::queues::send_queue::{self, Sent};
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH};
use crate::wire::template::Fields;

/// The sink has no room now.
pub(crate) struct Blocked;

impl Shared {
    pub(crate) fn finish_meta<B: RecvBuf, R>(
        &self,
        index: u32,
        c: &Conn<B, R>,
        meta: &mut FrameMeta,
    ) {
        meta.checksum = if self.config.tx_checksum {
            TxChecksum::Partial
        } else {
            TxChecksum::Offload
        };
        meta.self_addressed = c.hot.has(flag::SELF);
        meta.connection = Some(ConnId {
            index,
            generation: c.generation,
        });
    }

    /// Receive window limit that the peer's window scaling allows.
    #[inline]
    pub(crate) fn window_limit<B: RecvBuf, R>(&self, c: &Conn<B, R>) -> u32 {
        self.recv_window.min(0xffff << c.hot.rcv_wscale)
    }

    /// A frame that acknowledges left: the window it advertised is promised, the ACK paid.
    #[inline]
    pub(crate) fn acknowledged<B: RecvBuf, R>(c: &mut Conn<B, R>, edge: SeqNr) {
        let h = &mut c.hot;
        h.rcv_adv = h.rcv_adv.max(edge);
        h.last_ack_sent = h.rcv_nxt;
        h.unacked_segs = 0;
        h.ack_at = 0;
    }

    /// One data (or FIN) segment.
    #[inline]
    fn emit<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        s: &Sent,
        again: bool,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let (window, edge) = c.window(self.window_limit(c));
        let h = &c.hot;
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
            .then(|| (Self::ts_now(now, c.ts_offset), h.ts_recent));
        let fields = Fields {
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
        let (n, mut meta) = c.template.meta(&fields);
        self.finish_meta(index, c, &mut meta);
        meta.retransmission = again;
        if fields.tso {
            meta.tso_segsz = c.hot.emss;
        }
        let user = c.hot.user;
        let fill = |out: &mut [u8]| c.template.build(out, &fields);
        let begun = match c.tx.piece((s.record, s.offset), s.len) {
            Some(r) if s.len > 0 && !fields.tso => {
                tx.send_single_piece(n, &meta, fill, (user, r, s.offset))
            }
            _ => {
                let begun = tx.begin_frame_with(n, &meta, fill);
                if begun {
                    c.tx.gather(s, |r, offset, len| tx.append_record(user, r, offset, len));
                    tx.end_frame();
                }
                begun
            }
        };
        if !begun {
            return Err(Blocked);
        }
        if ect {
            c.hot.flags &= !flag::CWR_OWED;
        }
        Self::acknowledged(c, edge);
        if !c.has_blocks() {
            c.hot.flags &= !flag::NEED_ACK;
        }
        self.stats.frames_out += 1;
        self.stats.out_segs += 1;
        self.stats.out_bytes += u64::from(s.len);
        Ok(())
    }

    /// Sends all that the connection owes and may send.
    pub(crate) fn output<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        const OWED: u32 = flag::OWED;
        if c.hot.state == TcpState::Closed {
            return Ok(());
        }
        let fin = c.hot.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED;
        let lost = c.hot.has(flag::RECOVERING) && c.recovery.as_ref().is_some_and(|r| r.lost > 0);
        let data = c.hot.can_send_data() && (c.hot.unsent > 0 || fin || lost);
        if !data && !c.hot.has(OWED) && !c.window_update_due(self.window_limit(c)) {
            return Ok(());
        }
        if !self.resolved(index, c, now) {
            if c.hot.rto_at == 0 && (data || c.hot.has(OWED)) {
                self.restart_rto(index, &mut c.hot, now);
            }
            return Ok(());
        }
        if c.hot.has(flag::NEED_SYN) {
            self.emit_syn(index, c, now, tx)?;
            c.hot.flags &= !(flag::NEED_SYN | flag::NEED_ACK);
        }
        if matches!(c.hot.state, TcpState::SynSent | TcpState::SynReceived) {
            return Ok(());
        }
        if data {
            self.send_data(index, c, now, tx)?;
        }
        if c.hot.has(flag::NEED_TLP) {
            self.tail_probe(index, c, now, tx)?;
            c.hot.flags &= !flag::NEED_TLP;
        }
        if c.hot.has(flag::NEED_PROBE | flag::NEED_KEEPALIVE) {
            // A segment left of the window makes the peer answer with its ACK and window
            // (RFC 9293 section 3.8.4); no byte of a record is risked for it.
            self.emit_bare(index, c, c.hot.snd_una - 1, 0, now, tx)?;
            self.stats.zero_window_probes += u64::from(c.hot.has(flag::NEED_PROBE));
            self.stats.keepalive_probes += u64::from(c.hot.has(flag::NEED_KEEPALIVE));
            c.hot.flags &= !(flag::NEED_PROBE | flag::NEED_KEEPALIVE);
        }
        if c.hot.has(flag::NEED_ACK) || c.window_update_due(self.window_limit(c)) {
            self.send_acks(index, c, now, tx)?;
        }
        Ok(())
    }

    /// `flush`: data only; the ACK it carries is one less to send.
    pub(crate) fn output_data<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if !c.hot.can_send_data() {
            return Ok(());
        }
        if c.neighbour_generation != self.neighbours.generation {
            // `poll` resolves.
            self.owe(index, &mut c.hot, 0);
            return Ok(());
        }
        self.send_data(index, c, now, tx)
    }

    #[inline]
    fn send_data<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if c.hot.has(flag::RECOVERING) && c.recovery.as_ref().is_some_and(|r| r.lost > 0) {
            self.repeat_lost(index, c, now, tx)?;
        }
        self.send_new(index, c, now, tx)
    }

    #[cold]
    fn repeat_lost<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let Some(mut r) = c.recovery.take() else {
            return Ok(());
        };
        let mut result = Ok(());
        let emss = u32::from(c.hot.emss);
        while let Some(i) = r.next_lost(&c.tx) {
            let s = c.tx.sent[i];
            if s.is_probe(emss) {
                // Its loss was nobody's answer: the search is another connection's by now.
                c.tx.resegment(emss);
                r.recount(&mut c.hot, &c.tx);
                continue;
            }
            if c.hot.pipe > 0 && c.hot.pipe + s.len > c.hot.cwnd {
                break;
            }
            if self.emit(index, c, &s, true, now, tx).is_err() {
                result = Err(Blocked);
                break;
            }
            r.repeat(&mut c.hot, &mut c.tx, i, now.0);
            c.retransmits += 1;
            self.stats.repeated(&c.hot);
            // The timer has to leave the repetition its round trip: else a loss that an ACK told
            // of in time looks like silence.
            if c.hot.rto_at == 0
                || (i == 0 && c.hot.phase == Phase::Recovery && !c.hot.has(flag::REO))
            {
                self.restart_rto(index, &mut c.hot, now);
            }
        }
        c.recovery = Some(r);
        result
    }

    #[inline]
    fn send_new<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        if c.hot.flight() == 0 && c.hot.unsent > 0 {
            self.validate(c, now);
        }
        // A search for what the path carries may go on here, between two segments.
        let mut searching = c.hot.has(flag::NARROW) && Self::search_is_due(c, now);
        let mut emss = u32::from(c.hot.emss);
        let mut sent = 0;
        let mut result = Ok(());
        let credit = self.pace(index, c, now);
        while c.hot.unsent > 0 && sent < credit {
            if searching {
                match self.probe_path(index, c, now, tx) {
                    Ok(Step::Sent(n)) => sent += n,
                    Ok(Step::Hold) => break,
                    Ok(Step::Asked) => {}
                    Ok(Step::Later) => searching = false,
                    Err(e) => {
                        result = Err(e);
                        break;
                    }
                }
                emss = u32::from(c.hot.emss);
                if c.hot.unsent == 0 {
                    break;
                }
            }
            let h = &mut c.hot;
            let window = h.snd_wnd.saturating_sub(h.flight());
            // Limited transmit (RFC 3042): a segment for each of the first two duplicates, which
            // are only counted without SACK.
            let limited = if h.phase == Phase::Open {
                u32::from(h.dup_acks.min(2))
            } else {
                0
            };
            let usable = window.min((h.cwnd + limited * emss).saturating_sub(h.pipe));
            let Some(mut plan) = c.tx.plan(emss, usable) else {
                break;
            };
            if plan.len > window {
                if h.flight() > 0 {
                    break; // its ACK brings the window
                }
                // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part leaves when it
                // is half of the largest window seen, or when waiting did not help.
                if window > 0 && (window >= h.max_snd_wnd / 2 || h.has(flag::CUT)) {
                    plan = c.tx.cut(window.min(plan.len - 1).min(h.cwnd.max(1)));
                } else {
                    self.persist(index, c, now);
                    break;
                }
            } else if plan.len > usable && h.pipe > 0 {
                break;
            }
            if plan.len == emss && plan.len <= usable && !c.hot.has(flag::CWR_OWED) && !searching {
                let most = if credit == u32::MAX {
                    usable
                } else {
                    usable.min(((credit - sent) / emss).max(1) * emss)
                };
                if let Some(tso) = self.config.tso {
                    match self.send_train(index, c, (emss, most), &tso, now, tx) {
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
                if most.min(c.hot.unsent) >= 2 * emss && !c.hot.has(flag::FIN_QUEUED) {
                    let n;
                    (n, result) = self.send_together(index, c, (emss, most), now, tx);
                    sent += n;
                    if result.is_err() {
                        break;
                    }
                    continue;
                }
            }
            let h = &mut c.hot;
            let fin = h.unsent == plan.len
                && h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED;
            let segment = c.tx.make(&plan, h.snd_nxt, fin, now.0);
            if let Err(e) = self.emit_new(index, c, &segment, now, tx) {
                result = Err(e);
                break;
            }
            c.tx.made(&plan);
            let h = &mut c.hot;
            h.pipe += plan.len;
            h.unsent -= plan.len;
            h.flags &= !flag::CUT;
            sent += plan.len;
        }
        let h = &c.hot;
        if result.is_ok()
            && h.unsent == 0
            && h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED
        {
            let segment = c.tx.make_fin(h.snd_nxt, now.0);
            result = self.emit_new(index, c, &segment, now, tx);
        }
        c.cwv.sent(c.hot.pipe);
        if sent > 0 {
            if credit != u32::MAX {
                self.paced(index, c, sent, now);
            }
            if c.hot.has(flag::PTO) {
                self.restart_rto(index, &mut c.hot, now);
            }
        }
        if sent > 0
            && c.hot.phase == Phase::Recovery
            && let Some(r) = &mut c.recovery
        {
            r.sent(sent);
        }
        result
    }

    /// New segments after a pause: the window may have gone unused for too long (RFC 7661).
    #[inline]
    fn validate<B: RecvBuf, R>(&mut self, c: &mut Conn<B, R>, now: Instant) {
        let h = &mut c.hot;
        if c.cwv.rested(now.0) && h.phase == Phase::Open {
            let initial = self.initial_window(h);
            let adjusted = c.cwv.rest(h, &mut c.cc, initial, now.0);
            self.stats.idle_restarts += u64::from(adjusted);
        }
    }

    /// In bytes (RFC 6928).
    #[inline]
    pub(crate) fn initial_window(&self, h: &Hot) -> u32 {
        let segments = self.config.initial_window.max(1);
        segments.saturating_mul(u32::from(h.emss))
    }

    /// The probe timeout fired (RFC 8985 section 7.3): a new segment whatever the congestion
    /// window, else the last one again, makes the peer tell what it has.
    #[cold]
    fn tail_probe<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        let h = &c.hot;
        if h.has(flag::RECOVERING) || !h.can_send_data() {
            return Ok(()); // an ACK came in between
        }
        c.start_recovery();
        let h = &c.hot;
        let Some(last) = c.tx.sent.back().copied() else {
            return Ok(());
        };
        let window = h.snd_wnd.saturating_sub(h.flight());
        let plan =
            c.tx.plan(u32::from(h.emss), window)
                .filter(|p| p.len <= window);
        let again = plan.is_none();
        if let Some(plan) = plan {
            let segment = c.tx.make(&plan, h.snd_nxt, false, now.0);
            self.emit_new(index, c, &segment, now, tx)?;
            c.tx.made(&plan);
            c.hot.pipe += plan.len;
            c.hot.unsent -= plan.len;
        } else {
            self.emit(index, c, &last, true, now, tx)?;
            c.retransmits += 1;
            self.stats.retrans_segs += 1;
        }
        self.stats.tlp_probes += 1;
        if let Some(r) = &mut c.recovery {
            r.probed(&mut c.hot, &mut c.tx, again, now.0);
        }
        self.restart_rto(index, &mut c.hot, now);
        Ok(())
    }

    /// Several new segments as one frame that the port cuts. While segments are marked each is
    /// noted alone. The FIN goes alone.
    fn send_train<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        budget: (u32, u32),
        tso: &crate::config::TsoLimits,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<u32, Blocked> {
        let (cursor, before) = (c.tx.cursor(), c.tx.sent.len());
        let Some((whole, count)) = c.tx.train(budget, tso, c.hot.snd_nxt, now.0) else {
            return Ok(0);
        };
        if let Err(e) = self.emit(index, c, &whole, false, now, tx) {
            c.tx.sent.truncate(before);
            c.tx.rewind(cursor);
            return Err(e);
        }
        self.stats.out_segs += u64::from(count - 1);
        self.stats.tso_frames += u64::from(count > 1);
        if c.hot.has(flag::RECOVERING) {
            c.tx.split(before);
        } else {
            c.hot.flags |= flag::TRAINS;
        }
        self.sent_new(index, c, &whole, now);
        let h = &mut c.hot;
        h.pipe += whole.len;
        h.unsent -= whole.len;
        h.flags &= !flag::CUT;
        Ok(whole.len)
    }

    /// Sends a new segment and notes it; nothing changes when the sink is full.
    #[inline]
    pub(crate) fn emit_new<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        s: &Sent,
        now: Instant,
        tx: &mut impl FrameSink<R>,
    ) -> Result<(), Blocked> {
        self.emit(index, c, s, false, now, tx)?;
        c.tx.sent.push_back(*s);
        self.sent_new(index, c, s, now);
        Ok(())
    }

    #[inline]
    pub(crate) fn sent_new<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        s: &Sent,
        now: Instant,
    ) {
        let h = &mut c.hot;
        h.snd_nxt = s.end();
        if s.flags & send_queue::FIN != 0 {
            h.flags |= flag::FIN_SENT;
        }
        if h.has(flag::PERSIST) {
            h.backoff = 0;
            h.rto_at = 0;
        }
        if h.rto_at == 0 {
            self.restart_rto(index, h, now);
        }
    }

    /// Nothing is in flight and the window holds the next record back: probe it in time
    /// (RFC 9293 section 3.8.6.1).
    fn persist<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        let h = &mut c.hot;
        if h.has(flag::PERSIST) && h.rto_at != 0 {
            return;
        }
        self.restart_rto(index, h, now);
        h.flags |= flag::PERSIST;
    }
}
