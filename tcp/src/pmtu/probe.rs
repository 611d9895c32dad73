//! Probing a narrow path with longer segments (RFC 8899 as an acknowledged protocol does it,
//! RFC 4821 section 10.1 for TCP): when a probe may leave, what it carries, and what its
//! acknowledgement or loss means. Only connections with [`ConnectionFlags::NARROW_PATH`] come here, and none of it
//! is on the way of an ACK: that a probe arrived is found when the next segments are to leave.
//!
//! A probe is one segment of the next bytes of the stream. It carries a part of a record that is
//! long enough, or several whole records. Where each record fills a segment of its own, as FPDUs
//! do, the owner is asked for one longer record ([`Events::MTU_PROBE`], [`Stack::mtu_probe_len`]), so
//! that no record is cut in two unless that probe is lost.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::frame_sink::FrameSink;
use crate::base::ids::ConnId;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::to_ticks;
use crate::congestion::RecoveryPhase;
use crate::connection::Connection;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::output::SinkFull;
use crate::loss::recovery::Recovery;
use crate::pmtu::search::SearchStep;
use crate::queues::send_queue::{LOST, MTU_PROBE, TransmitQueue};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

/// A connection that cannot go on with the search looks again after so long, in 2^20 ns: while
/// another probes, and when it has nothing to probe with.
const RETRY_SOON_TICKS: u32 = 16;
const RETRY_LATER_TICKS: u32 = 954;

/// What came of it.
pub(crate) enum ProbeStep {
    /// A probe of so many bytes left.
    Sent(u32),
    /// New segments wait until the window takes the probe.
    Hold,
    /// The owner was asked for a longer record: segments leave one by one, until it comes up.
    Asked,
    Later,
}

impl SharedState {
    /// New losses were found, `fresh` segments. When one is the connection's probe, it is cut into
    /// segments that pass, to be sent again; returns how many losses are left that speak of
    /// congestion (RFC 8899 section 3 item 7, RFC 4821 section 7.6).
    pub(crate) fn without_probe<R>(
        &mut self,
        (me, to): (ConnId, core::net::IpAddr),
        (tcb, recovery, tx): (&mut Tcb, &mut Recovery, &mut TransmitQueue<R>),
        fresh: u32,
        now: Instant,
    ) -> u32 {
        if fresh == 0 || !tcb.has(ConnectionFlags::NARROW_PATH) {
            return fresh;
        }
        let Some(path) = self.paths.get_mut(to) else {
            return fresh;
        };
        let emss = u32::from(tcb.emss);
        let Some(index) = path.probe_of(me).and_then(|(end, _)| tx.mtu_probe(end)) else {
            return fresh;
        };
        if tx.sent[index].flags & LOST == 0 {
            return fresh;
        }
        let now_ticks = to_ticks(now.0);
        if fresh == 1 && tcb.phase == RecoveryPhase::Open {
            self.stats.mtu_probes_lost += 1;
            path.probe_lost(gap(tcb), now_ticks);
        } else {
            path.probe_inconclusive(gap(tcb), now_ticks);
        }
        tx.resegment_to(emss);
        recovery.recount_lost(tcb, tx);
        fresh - 1
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// The connection looks after the search now. Of narrow paths only.
    pub(crate) fn search_is_due(&self, now: Instant) -> bool {
        crate::pmtu::search::has_passed(to_ticks(now.0), self.search_at)
    }

    /// Takes over what the path was found to carry, and probes it when that may be.
    #[cold]
    pub(crate) fn probe_path(
        &mut self,
        cx: &mut TcpContext<'_>,
        tx: &mut impl FrameSink<R>,
    ) -> Result<ProbeStep, SinkFull> {
        let now_ticks = to_ticks(cx.now.0);
        let me = self.id(cx.index);
        // RFC 4821 section 7.4: no losses are outstanding.
        let open = matches!(self.tcb.state, TcpState::Established | TcpState::CloseWait);
        if !open
            || self.tcb.phase != RecoveryPhase::Open
            || self.tcb.has(ConnectionFlags::RECOVERING)
            || self.tcb.is_timer(Timer::Persist)
            || self.tcb.backoff > 0
        {
            return Ok(ProbeStep::Later);
        }
        if !self.tcb.has(ConnectionFlags::SACK) {
            cx.shared.paths.forget(self.template.key().remote().ip());
            self.widen(cx, self.emss_agreed);
            return Ok(ProbeStep::Later);
        }
        let max = self.mtu_of(self.emss_agreed);
        let own = self.mtu_of(self.tcb.emss);
        let Some(path) = cx
            .shared
            .paths
            .search(self.template.key().remote().ip(), own, now_ticks)
        else {
            self.search_at = now_ticks.wrapping_add(RETRY_LATER_TICKS);
            return Ok(ProbeStep::Later);
        };
        if let Some((end, size)) = path.probe_of(me) {
            if self.tcb.snd_una.lt(end) {
                return Ok(ProbeStep::Later);
            }
            cx.shared.stats.mtu_probes_passed += u64::from(size > path.plpmtu);
            path.probe_confirmed(size, now_ticks);
        }
        if path.plpmtu.min(max) > own {
            // The congestion window stays as it is in bytes (RFC 8899 section 3 item 7).
            let emss = self.emss_for(path.plpmtu).min(self.emss_agreed);
            if path.is_whole(max) {
                cx.shared.paths.forget(self.template.key().remote().ip());
            }
            self.widen(cx, emss);
            // What its owner made of that comes first.
            return Ok(ProbeStep::Later);
        }
        // Another connection's path may have a hole that this one's has not.
        if path.plpmtu < own || path.is_taken_by_other(me, now_ticks) {
            let wait = if path.plpmtu < own {
                RETRY_LATER_TICKS
            } else {
                RETRY_SOON_TICKS
            };
            self.search_at = now_ticks.wrapping_add(wait);
            return Ok(ProbeStep::Later);
        }
        let size = match path.next_step(max, now_ticks) {
            SearchStep::Probe(size) => size,
            SearchStep::At(at) => {
                self.search_at = at;
                return Ok(ProbeStep::Later);
            }
        };
        self.send_probe(cx, size, tx)
    }

    /// From now on segments may carry `emss`.
    fn widen(&mut self, cx: &mut TcpContext<'_>, emss: u16) {
        self.tcb.emss = emss;
        if emss == self.emss_agreed {
            self.tcb.flags &= !ConnectionFlags::NARROW_PATH;
        }
        cx.raise_event(&mut self.tcb, Events::MSS_CHANGED);
    }

    fn send_probe(
        &mut self,
        cx: &mut TcpContext<'_>,
        size: u16,
        tx: &mut impl FrameSink<R>,
    ) -> Result<ProbeStep, SinkFull> {
        let now_ticks = to_ticks(cx.now.0);
        let me = self.id(cx.index);
        let own = self.mtu_of(self.tcb.emss);
        let to = self.template.key().remote().ip();
        let Some(path) = cx.shared.paths.search(to, own, now_ticks) else {
            return Ok(ProbeStep::Later);
        };
        let tcb = &self.tcb;
        let (emss, probe) = (u32::from(tcb.emss), u32::from(self.emss_for(size)));
        let Some(plan) = self.send_queue.plan_segment(probe, probe) else {
            return Ok(ProbeStep::Later);
        };
        let asked = path.is_asked(me);
        let long = self.send_queue.next_len() > emss;
        let least = emss + u32::from(path.granularity()).min(probe - emss);
        if plan.len < least || (asked && !long) {
            // Records as long as a segment: a longer one is wanted. Small ones are left alone.
            let full = self
                .send_queue
                .plan_segment(emss, emss)
                .is_some_and(|plan| plan.len * 8 >= emss * 7);
            if !asked && !full {
                self.search_at = now_ticks.wrapping_add(RETRY_SOON_TICKS);
                return Ok(ProbeStep::Later);
            }
            match path.ask_owner(me, now_ticks) {
                Some(first) => {
                    if first {
                        cx.raise_event(&mut self.tcb, Events::MTU_PROBE);
                    }
                    return Ok(ProbeStep::Asked);
                }
                None => {
                    self.search_at = now_ticks.wrapping_add(RETRY_LATER_TICKS);
                    return Ok(ProbeStep::Later);
                }
            }
        }
        // Its loss has to show (RFC 4821 section 7.4): time tells that one later segment is enough
        // (RFC 8985).
        let window = tcb.snd_wnd.saturating_sub(tcb.flight());
        let usable = window.min(tcb.window.available(tcb.pipe));
        if plan.len > tcb.window.cwnd().min(tcb.snd_wnd) {
            return Ok(ProbeStep::Later);
        }
        let followed = tcb.unsent >= plan.len + emss;
        if plan.len > usable || !followed {
            if tcb.pipe > 0 && (followed || asked) {
                return Ok(ProbeStep::Hold);
            }
            // What the owner made for it leaves in one piece.
            if !asked || plan.len > window {
                return Ok(ProbeStep::Later);
            }
        }
        let size = self.mtu_of(plan.len as u16);
        let mut segment = self
            .send_queue
            .make_segment(&plan, self.tcb.snd_nxt, false, cx.now.0);
        segment.flags |= MTU_PROBE;
        self.emit_new_segment(cx, &segment, tx)?;
        self.send_queue.commit_plan(&plan);
        let tcb = &mut self.tcb;
        tcb.pipe += plan.len;
        tcb.unsent -= plan.len;
        tcb.flags &= !ConnectionFlags::MAY_SPLIT_RECORD;
        let patience = (tcb.rtt.retransmission_timeout(&cx.shared.rto_limits, 2) >> 20)
            .min(u64::from(RETRY_LATER_TICKS)) as u32;
        if let Some(path) = cx.shared.paths.search(to, own, now_ticks) {
            path.probe_sent(me, segment.end_seq(), size, patience, now_ticks);
        }
        self.search_at = now_ticks;
        Ok(ProbeStep::Sent(plan.len))
    }

    /// The probe timeout (RFC 8985 section 7.2) passed, and the last segment is an MTU probe: it
    /// is not repeated as it was. `false`: it is none.
    pub(crate) fn probe_unanswered(&mut self, cx: &mut TcpContext<'_>) -> bool {
        if !self.tcb.has(ConnectionFlags::NARROW_PATH) || self.tcb.unsent > 0 {
            return false;
        }
        let emss = u32::from(self.tcb.emss);
        let Some(&last) = self
            .send_queue
            .sent
            .back()
            .filter(|segment| segment.is_probe(emss))
        else {
            return false;
        };
        let alone = last.seq == self.tcb.snd_una;
        // It may wait for a delayed ACK as any lone segment.
        let due = last.at + self.tcb.rtt.probe_timeout(&cx.shared.rto_limits, true);
        if alone && cx.now.0 < due {
            self.tcb.set_timer(Timer::TailLossProbe, due);
            return true;
        }
        let now_ticks = to_ticks(cx.now.0);
        if let Some(path) = cx.shared.paths.get_mut(self.template.key().remote().ip())
            && path.probe_of(self.id(cx.index)).is_some()
        {
            if alone {
                cx.shared.stats.mtu_probes_lost += 1;
                path.probe_lost(gap(&self.tcb), now_ticks);
            } else {
                path.probe_inconclusive(gap(&self.tcb), now_ticks);
            }
        }
        self.cut();
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
        self.tcb.restart_retransmission_timer(cx);
        true
    }

    /// A retransmission timeout: the probe is cut as what is lost. Where it is the first of that it
    /// counts, and the next waits long (RFC 4821 section 7.6.3).
    pub(crate) fn probe_timed_out(&mut self, cx: &mut TcpContext<'_>) {
        let emss = u32::from(self.tcb.emss);
        let Some(index) = self
            .send_queue
            .sent
            .iter()
            .position(|segment| segment.is_probe(emss))
        else {
            return;
        };
        if let Some(path) = cx.shared.paths.get_mut(self.template.key().remote().ip())
            && path.probe_of(self.id(cx.index)).is_some()
        {
            if index == 0 {
                cx.shared.stats.mtu_probes_lost += 1;
                path.probe_lost(RETRY_LATER_TICKS, to_ticks(cx.now.0));
            } else {
                path.probe_inconclusive(RETRY_LATER_TICKS, to_ticks(cx.now.0));
            }
        }
        self.cut();
    }
}

/// So long after a lost probe the next may follow, in 2^20 ns: 8 round trips, a second at most.
fn gap(tcb: &Tcb) -> u32 {
    (tcb.rtt.srtt >> 17).min(u64::from(RETRY_LATER_TICKS)) as u32 + 1
}
