//! Probing a narrow path with longer segments (RFC 8899 for an acknowledged protocol, RFC 4821
//! section 10.1 for TCP): when a probe may be sent, which data it carries, and the consequences of
//! its acknowledgement or loss. Only connections with [`ConnectionFlags::NARROW_PATH`] use this
//! code, and none of it runs in ACK processing: the acknowledgement of a probe is noticed when the
//! next segments are to be sent.
//!
//! A probe is one segment with the next bytes of the stream. It carries a part of a sufficiently
//! long record, or several whole records. If each record fills a segment of its own, as FPDUs do,
//! the owner is asked for one longer record ([`Events::MTU_PROBE`], [`Stack::mtu_probe_len`]), so
//! that no record is split unless that probe is lost.

use crate::base::events::Events;
use crate::base::ids::ConnId;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::to_long_ticks;
use crate::congestion::RecoveryPhase;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::path::PathState;
use crate::connection::sender::Sender;
use crate::loss::recovery::Recovery;
use crate::pmtu::search::SearchStep;
use crate::queues::send_queue::{InFlightSegment, LOST, SegmentPlan, TransmitQueue};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

/// Delay in ticks (2^20 ns) before a connection that cannot continue the search tries again: short
/// while another connection probes, long if it has no data to probe with.
const RETRY_SOON_TICKS: u64 = 16;
const RETRY_LATER_TICKS: u64 = 954;

/// The next step of the MTU search.
pub(crate) enum ProbeStep {
    /// This segment is to be sent as a probe; [`PathState::on_probe_sent`] follows.
    Send(SegmentPlan),
    /// New segments wait until the window has room for the probe.
    Hold,
    /// The owner was asked for a longer record: until that record is next, segments are sent one at
    /// a time.
    Asked,
    /// No probe now.
    Later,
}

impl SharedState {
    /// Handles `fresh` segments newly declared lost. If one is the connection's MTU probe, it is
    /// divided into segments that fit the path, to be retransmitted. Returns the number of the
    /// other losses, which, unlike that of a probe, are a sign of congestion (RFC 8899 section 3
    /// item 7, RFC 4821 section 7.6).
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
        let now_ticks = to_long_ticks(now.0);
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

impl PathState {
    /// Lets the connection take part in the search from this tick on. For narrow paths only.
    pub(crate) fn schedule_search(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>, at_tick: u64) {
        self.search_at = at_tick as u32;
        if to_long_ticks(cx.now.0) >= at_tick {
            tcb.flags |= ConnectionFlags::SEARCH_DUE;
        } else {
            tcb.flags.remove(ConnectionFlags::SEARCH_DUE);
            cx.schedule_timer(tcb, at_tick << 20);
        }
    }

    /// Applies the confirmed size of the path, and plans the next probe if one is due.
    #[cold]
    pub(crate) fn next_probe<R>(
        &mut self,
        tcb: &mut Tcb,
        sender: &Sender<R>,
        cx: &mut TcpContext<'_>,
    ) -> ProbeStep {
        let now_ticks = to_long_ticks(cx.now.0);
        let me = cx.id;
        // RFC 4821 section 7.4: no losses are outstanding.
        let open = matches!(tcb.state, TcpState::Established | TcpState::CloseWait);
        if !open
            || tcb.phase != RecoveryPhase::Open
            || tcb.has(ConnectionFlags::RECOVERING)
            || tcb.is_timer(Timer::Persist)
            || sender.timeouts_in_row() > 0
        {
            return ProbeStep::Later;
        }
        if !tcb.has(ConnectionFlags::SACK) {
            cx.shared.paths.forget(self.remote());
            widen(tcb, sender, cx, sender.emss_agreed);
            return ProbeStep::Later;
        }
        let max = self.mtu_of(tcb, sender.emss_agreed);
        let own = self.mtu_of(tcb, tcb.emss);
        let Some(path) = cx.shared.paths.search(self.remote(), own, now_ticks) else {
            self.schedule_search(tcb, cx, now_ticks + RETRY_LATER_TICKS);
            return ProbeStep::Later;
        };
        if let Some((end, size)) = path.probe_of(me) {
            if tcb.snd_una.lt(end) {
                return ProbeStep::Later;
            }
            cx.shared.stats.mtu_probes_passed += u64::from(size > path.plpmtu);
            path.probe_confirmed(size, now_ticks);
        }
        if path.plpmtu.min(max) > own {
            // The congestion window is unchanged in bytes (RFC 8899 section 3 item 7).
            let emss = self.emss_for(tcb, path.plpmtu).min(sender.emss_agreed);
            if path.is_whole(max) {
                cx.shared.paths.forget(self.remote());
            }
            widen(tcb, sender, cx, emss);
            // The owner must make its records longer before the search continues.
            return ProbeStep::Later;
        }
        // Another connection to this destination may have found a smaller size than this one uses.
        if path.plpmtu < own || path.is_taken_by_other(me, now_ticks) {
            let wait = if path.plpmtu < own {
                RETRY_LATER_TICKS
            } else {
                RETRY_SOON_TICKS
            };
            self.schedule_search(tcb, cx, now_ticks + wait);
            return ProbeStep::Later;
        }
        let size = match path.next_step(max, now_ticks) {
            SearchStep::Probe(size) => size,
            SearchStep::At(at) => {
                self.schedule_search(tcb, cx, at);
                return ProbeStep::Later;
            }
        };
        self.plan_probe(tcb, sender, cx, size)
    }

    /// Plans a probe in a packet of `size` bytes if the stream has enough data, or asks the owner
    /// for a sufficiently long record.
    fn plan_probe<R>(
        &mut self,
        tcb: &mut Tcb,
        sender: &Sender<R>,
        cx: &mut TcpContext<'_>,
        size: u16,
    ) -> ProbeStep {
        let now_ticks = to_long_ticks(cx.now.0);
        let me = cx.id;
        let own = self.mtu_of(tcb, tcb.emss);
        let to = self.remote();
        let Some(path) = cx.shared.paths.search(to, own, now_ticks) else {
            return ProbeStep::Later;
        };
        let (emss, probe) = (u32::from(tcb.emss), u32::from(self.emss_for(tcb, size)));
        let Some(plan) = sender.send_queue.plan_segment(probe, probe) else {
            return ProbeStep::Later;
        };
        let asked = path.is_asked(me);
        let long = sender.send_queue.next_len() > emss;
        let least = emss + u32::from(path.granularity()).min(probe - emss);
        if plan.len < least || (asked && !long) {
            // If each record fills a segment, no longer segment can be made: the owner is asked. A
            // connection with small records does not need the search.
            let full = sender
                .send_queue
                .plan_segment(emss, emss)
                .is_some_and(|plan| plan.len * 8 >= emss * 7);
            if !asked && !full {
                self.schedule_search(tcb, cx, now_ticks + RETRY_SOON_TICKS);
                return ProbeStep::Later;
            }
            match path.ask_owner(me, now_ticks) {
                Some(first) => {
                    if first {
                        cx.raise_event(tcb, Events::MTU_PROBE);
                    }
                    return ProbeStep::Asked;
                }
                None => {
                    self.schedule_search(tcb, cx, now_ticks + RETRY_LATER_TICKS);
                    return ProbeStep::Later;
                }
            }
        }
        // The loss of the probe must be detectable (RFC 4821 section 7.4); one segment sent after
        // it is enough (RFC 8985).
        let window = tcb.snd_wnd.saturating_sub(tcb.flight());
        let usable = window.min(tcb.window.available(tcb.pipe));
        if plan.len > tcb.window.cwnd().min(tcb.snd_wnd) {
            return ProbeStep::Later;
        }
        let followed = tcb.unsent >= plan.len + emss;
        if plan.len > usable || !followed {
            if tcb.pipe > 0 && (followed || asked) {
                return ProbeStep::Hold;
            }
            // A record that the owner made for the probe is sent in one piece, even if no data
            // follows.
            if !asked || plan.len > window {
                return ProbeStep::Later;
            }
        }
        ProbeStep::Send(plan)
    }

    /// Records that `segment` was sent as a probe.
    pub(crate) fn on_probe_sent(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        segment: &InFlightSegment,
    ) {
        let now_ticks = to_long_ticks(cx.now.0);
        let own = self.mtu_of(tcb, tcb.emss);
        let size = self.mtu_of(tcb, segment.len as u16);
        let max_wait =
            (tcb.rtt.retransmission_timeout(&cx.shared.rto_limits, 2) >> 20).min(RETRY_LATER_TICKS);
        if let Some(path) = cx.shared.paths.search(self.remote(), own, now_ticks) {
            path.probe_sent(cx.id, segment.end_seq(), size, max_wait, now_ticks);
        }
        self.schedule_search(tcb, cx, now_ticks);
    }

    /// Handles the probe timeout (RFC 8985 section 7.2). If the last segment is an MTU probe, it is
    /// resegmented instead of being retransmitted whole. Returns `false` if it is not.
    pub(crate) fn probe_unanswered<R>(
        &self,
        tcb: &mut Tcb,
        sender: &mut Sender<R>,
        cx: &mut TcpContext<'_>,
    ) -> bool {
        if !tcb.has(ConnectionFlags::NARROW_PATH) || tcb.unsent > 0 {
            return false;
        }
        let emss = u32::from(tcb.emss);
        let Some(&last) = sender
            .send_queue
            .sent
            .back()
            .filter(|segment| segment.is_probe(emss))
        else {
            return false;
        };
        let alone = last.seq == tcb.snd_una;
        // Its answer may be a delayed ACK, as for any single segment.
        let due = last.at + tcb.rtt.probe_timeout(&cx.shared.rto_limits, true);
        if alone && cx.now.0 < due {
            tcb.set_timer(Timer::TailLossProbe, due);
            return true;
        }
        let now_ticks = to_long_ticks(cx.now.0);
        if let Some(path) = cx.shared.paths.get_mut(self.remote())
            && path.probe_of(cx.id).is_some()
        {
            if alone {
                cx.shared.stats.mtu_probes_lost += 1;
                path.probe_lost(gap(tcb), now_ticks);
            } else {
                path.probe_inconclusive(gap(tcb), now_ticks);
            }
        }
        sender.resegment(tcb);
        cx.schedule_output(tcb, ConnectionFlags::NONE);
        tcb.restart_retransmission_timer(cx);
        true
    }

    /// Resegments an MTU probe in flight at a retransmission timeout. Its loss counts for the
    /// search only if it is the first unacknowledged segment, and the next probe is delayed for
    /// long (RFC 4821 section 7.6.3).
    pub(crate) fn probe_timed_out<R>(
        &self,
        tcb: &mut Tcb,
        sender: &mut Sender<R>,
        cx: &mut TcpContext<'_>,
    ) {
        let emss = u32::from(tcb.emss);
        let Some(index) = sender
            .send_queue
            .sent
            .iter()
            .position(|segment| segment.is_probe(emss))
        else {
            return;
        };
        if let Some(path) = cx.shared.paths.get_mut(self.remote())
            && path.probe_of(cx.id).is_some()
        {
            if index == 0 {
                cx.shared.stats.mtu_probes_lost += 1;
                path.probe_lost(RETRY_LATER_TICKS, to_long_ticks(cx.now.0));
            } else {
                path.probe_inconclusive(RETRY_LATER_TICKS, to_long_ticks(cx.now.0));
            }
        }
        sender.resegment(tcb);
    }
}

/// Returns the delay before the next probe after a lost one, in ticks (2^20 ns): 8 round trips, at
/// most a second.
fn gap(tcb: &Tcb) -> u64 {
    (tcb.rtt.srtt >> 17).min(RETRY_LATER_TICKS) + 1
}

/// Allows segments of up to `emss` bytes from now on.
fn widen<R>(tcb: &mut Tcb, sender: &Sender<R>, cx: &mut TcpContext<'_>, emss: u16) {
    tcb.emss = emss;
    if emss == sender.emss_agreed {
        tcb.flags
            .remove(ConnectionFlags::NARROW_PATH | ConnectionFlags::SEARCH_DUE);
    }
    cx.raise_event(tcb, Events::MSS_CHANGED);
}
