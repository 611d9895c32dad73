//! What happens when a deadline of a connection passes. The timer wheel holds one entry for each
//! connection; when it is due, all deadlines of the connection are checked, and the entry is
//! scheduled again for the earliest that is left.

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::{at_ticks, timestamp_at, to_nanos, to_ticks};
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment;
use crate::wire::template::SegmentFields;

/// After so long without traffic, in ns, an idle connection frees the memory of its queues. Longer
/// than it takes to serve ten thousand others in turn, since a connection that is used again soon
/// would only allocate the memory again.
const IDLE_MEMORY_AFTER: u64 = 1_000_000_000;

/// The timers of [`ConnectionFlags::RARE_TIMERS`].
const RARE_TIMERS: [Timer; 3] = [Timer::Pacing, Timer::PathSearch, Timer::Orphan];

impl Tcb {
    /// (Re)starts the retransmission timer (RFC 6298 section 5), or in its place the probe timeout.
    #[inline]
    pub(crate) fn restart_retransmission_timer(&mut self, cx: &mut TcpContext<'_>) {
        let mut timer = Timer::Retransmission;
        let mut after = self
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, self.backoff);
        // RFC 8985 section 7.2: with SACK, a measured round trip, no recovery and no timeout before, the
        // tail loss probe takes the place of the timeout when it is due sooner.
        if self.flags & (ConnectionFlags::SACK | ConnectionFlags::RECOVERING)
            == ConnectionFlags::SACK
            && self.rtt.srtt > 0
            && self.backoff == 0
            && self.snd_una != self.snd_nxt
        {
            let alone = self.flight() <= u32::from(self.emss);
            after = after.min(self.rtt.probe_timeout(&cx.shared.rto_limits, alone));
            timer = Timer::TailLossProbe;
        }
        self.set_timer(timer, cx.now.0 + after);
        cx.schedule_timer(self, cx.now.0 + after);
    }

    /// New segments were sent while the probe timeout runs: it starts again, since their answers are to
    /// come too (RFC 8985 section 7.2), but not beyond the retransmission timeout of the oldest segment in
    /// flight, which was sent at `oldest_at`. Otherwise a peer that is dead would never be found so by a
    /// connection that sends a little at a time.
    #[inline]
    pub(crate) fn extend_probe_timeout(&mut self, cx: &mut TcpContext<'_>, oldest_at: u64) {
        let limits = &cx.shared.rto_limits;
        let alone = self.flight() <= u32::from(self.emss);
        let probe_at = cx.now.0 + self.rtt.probe_timeout(limits, alone);
        // An ACK since then has started the timer anew (RFC 6298 (5.3)): what was set by it holds.
        let latest = (oldest_at + self.rtt.first_timeout(limits)).max(self.timer_at().unwrap_or(0));
        let at = probe_at.min(latest);
        self.set_timer(Timer::TailLossProbe, at);
        cx.schedule_timer(self, at);
    }

    /// (Re)starts the persist timer, which runs as long as the retransmission timer would: then the
    /// window is probed if no update came (RFC 9293 section 3.8.6.1).
    pub(crate) fn start_persist_timer(&mut self, cx: &mut TcpContext<'_>) {
        self.restart_retransmission_timer(cx);
        if let Some(at) = self.timer_at() {
            self.set_timer(Timer::Persist, at);
        }
    }

    /// (Re)starts the timer that ends TIME-WAIT.
    pub(crate) fn start_time_wait_timer(&mut self, cx: &mut TcpContext<'_>) {
        let at = cx.now.0 + to_nanos(cx.shared.config.time_wait);
        self.set_timer(Timer::TimeWait, at);
        cx.schedule_timer(self, at);
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// The connection's entry of the timer wheel is due: fires the timers that are due, and schedules
    /// the entry for the earliest of the others. Returns `true` when the connection has ended and
    /// has no owner.
    pub(crate) fn on_timer(&mut self, cx: &mut TcpContext<'_>) -> bool {
        self.tcb.wheel_at = u64::MAX;
        self.fire_if_due(cx, Timer::DelayedAck);
        if let Some(timer) = self.tcb.timer() {
            self.fire_if_due(cx, timer);
        }
        self.fire_if_due(cx, Timer::Keepalive);
        if self.tcb.has(ConnectionFlags::RARE_TIMERS) {
            for timer in RARE_TIMERS {
                self.fire_if_due(cx, timer);
            }
        }
        self.fire_if_due(cx, Timer::IdleMemory);
        if let Some(next) = self.earliest_deadline(cx) {
            cx.schedule_timer(&mut self.tcb, next);
        }
        self.tcb.state == TcpState::Closed && self.tcb.has(ConnectionFlags::RELEASED)
    }

    /// The ACK that waited for the owner's answer is due.
    pub(crate) fn on_answer_missed(&mut self, cx: &mut TcpContext<'_>) {
        self.fire_timer(cx, Timer::DelayedAck);
    }

    #[inline]
    fn fire_if_due(&mut self, cx: &mut TcpContext<'_>, timer: Timer) {
        if self.deadline_of(cx, timer).is_some_and(|at| at <= cx.now.0) {
            self.fire_timer(cx, timer);
        }
    }

    /// When the timer fires, in ns; `None`: it does not run.
    #[inline]
    fn deadline_of(&self, cx: &TcpContext<'_>, timer: Timer) -> Option<u64> {
        let tcb = &self.tcb;
        match timer {
            Timer::DelayedAck => (tcb.ack_at != 0).then_some(tcb.ack_at),
            Timer::Keepalive => self.keepalive_deadline(cx),
            Timer::Pacing => {
                let waits = tcb.has(ConnectionFlags::WAITS_FOR_PACER) && tcb.window.is_paced();
                let recovery = self.recovery.as_ref().filter(|_| waits)?;
                Some(recovery.pacer.next_at())
            }
            Timer::PathSearch => {
                let waits = tcb.flags
                    & (ConnectionFlags::NARROW_PATH | ConnectionFlags::SEARCH_DUE)
                    == ConnectionFlags::NARROW_PATH;
                waits.then(|| at_ticks(self.search_at, cx.now))
            }
            Timer::Orphan => self.orphan_deadline(cx),
            Timer::IdleMemory => {
                // The recovery, which would be freed too, has the pacer.
                let waits = tcb.has(ConnectionFlags::WAITS_FOR_PACER);
                let idle = tcb.timer().is_none() && !waits && self.holds_memory();
                let rest = match tcb.state {
                    TcpState::Closed => 0,
                    _ => tcb.last_rx.saturating_add(IDLE_MEMORY_AFTER),
                };
                idle.then_some(rest)
            }
            timer => tcb.timer_at().filter(|_| tcb.is_timer(timer)),
        }
    }

    /// The earliest deadline that lies ahead.
    #[inline]
    fn earliest_deadline(&self, cx: &TcpContext<'_>) -> Option<u64> {
        let mut next = u64::MAX;
        let mut consider = |timer| {
            if let Some(at) = self.deadline_of(cx, timer).filter(|&at| at > cx.now.0) {
                next = next.min(at);
            }
        };
        consider(Timer::DelayedAck);
        consider(Timer::IdleMemory);
        if self.tcb.has(ConnectionFlags::RARE_TIMERS) {
            RARE_TIMERS.into_iter().for_each(consider);
        }
        if let Some(at) = self.tcb.timer_at() {
            next = next.min(at);
        }
        if let Some(at) = self.keepalive_check(cx) {
            next = next.min(at);
        }
        (next != u64::MAX).then_some(next)
    }

    /// Does what the timer is for; its deadline has passed.
    fn fire_timer(&mut self, cx: &mut TcpContext<'_>, timer: Timer) {
        if self.tcb.is_timer(timer) {
            self.tcb.stop_timer();
        }
        match timer {
            Timer::DelayedAck => {
                self.tcb.ack_at = 0;
                self.tcb.flags.remove(ConnectionFlags::ANSWERS);
                cx.shared.stats.delayed_acks += 1;
                cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_ACK);
            }
            Timer::Retransmission => match self.tcb.state {
                TcpState::Closed => {}
                TcpState::SynSent | TcpState::SynReceived => self.handshake_timeout(cx),
                _ => self.retransmission_timeout(cx),
            },
            Timer::TailLossProbe => self.probe_timeout(cx),
            Timer::Reordering => self.reordering_timeout(cx),
            Timer::Persist => self.persist_timeout(cx),
            Timer::NeighbourResolution => self.neighbour_timeout(cx),
            Timer::TimeWait => self.enter_closed(cx),
            Timer::Orphan => self.orphan_timeout(cx),
            Timer::Keepalive => self.keepalive_timeout(cx),
            Timer::Pacing => cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE),
            Timer::PathSearch => self.tcb.flags |= ConnectionFlags::SEARCH_DUE,
            Timer::IdleMemory => self.release_memory(),
        }
    }

    /// Sends our SYN or SYN-ACK again, or gives up.
    fn handshake_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.backoff >= cx.shared.config.syn_retries {
            cx.shared.stats.attempt_fails += 1;
            // A router may have said why (RFC 9293 section 3.9.2.2, SHLD-25).
            let why = if self.tcb.has(ConnectionFlags::SOFT_ERROR) {
                Events::UNREACHABLE
            } else {
                Events::TIMED_OUT
            };
            self.fail_connection(cx, why);
            return;
        }
        self.tcb.backoff += 1;
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_SYN);
        self.tcb.restart_retransmission_timer(cx);
    }

    /// The peer's window did not open in time: probes it, or lets a part of a record be sent that
    /// fits.
    fn persist_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.is_user_timeout_over(cx) {
            self.abort_on_timeout(cx);
            return;
        }
        self.tcb.backoff = self.tcb.backoff.saturating_add(1);
        let need = if self.tcb.snd_wnd > 0 {
            ConnectionFlags::MAY_SPLIT_RECORD
        } else {
            ConnectionFlags::NEED_PROBE
        };
        cx.schedule_output(&mut self.tcb, need);
        self.tcb.start_persist_timer(cx);
    }

    /// The probe timeout (RFC 8985 section 7.3).
    fn probe_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.probe_unanswered(cx) {
            return;
        }
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_TAIL_PROBE);
        // The retransmission timeout itself, in case the probe cannot be sent.
        let at = cx.now.0
            + self
                .tcb
                .rtt
                .retransmission_timeout(&cx.shared.rto_limits, 0);
        self.tcb.set_timer(Timer::Retransmission, at);
    }

    /// Begins slow start with the first unacknowledged segment (RFC 6298 (5.4) to (5.6), RFC 5681
    /// section 3.1).
    fn retransmission_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.send_queue.sent.is_empty() {
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
            return;
        }
        if self.is_user_timeout_over(cx) {
            self.abort_on_timeout(cx);
            return;
        }
        cx.shared.stats.timeouts += 1;
        cx.shared.side_table.fields_of(cx.index).timeouts += 1;
        if self.tcb.has(ConnectionFlags::NARROW_PATH) {
            self.probe_timed_out(cx);
        }
        self.suspect_black_hole(cx);
        self.start_recovery();
        let tcb = &mut self.tcb;
        if let Some(recovery) = &mut self.recovery {
            let (flight, phase) = (tcb.flight_state(), tcb.phase);
            self.congestion
                .on_timeout(&mut tcb.window, &mut recovery.reduction, &flight, phase);
            recovery.mark_after_timeout(tcb, &mut self.send_queue, cx.now.0);
            recovery.timeouts_in_row = recovery.timeouts_in_row.saturating_add(1);
        }
        let flight = tcb.flight_state();
        self.congestion
            .after_timeout(&mut tcb.window, &flight, cx.now.0);
        tcb.backoff = tcb.backoff.saturating_add(1);
        tcb.dup_acks = 0;
        cx.schedule_output(tcb, ConnectionFlags::NONE);
        tcb.restart_retransmission_timer(cx);
        // Not after the user timeout: by then the backoff may be as long as that.
        let end = cx.now.0.saturating_add(self.user_timeout_left(cx));
        if self.tcb.timer_at().is_some_and(|at| at > end) {
            self.tcb.set_timer(Timer::Retransmission, end);
            cx.schedule_timer(&mut self.tcb, end);
        }
    }

    /// Whether the user timeout passed without progress (RFC 9293 section 3.8.3).
    pub(crate) fn is_user_timeout_over(&mut self, cx: &mut TcpContext<'_>) -> bool {
        if self.stalled_since == 0 {
            self.stalled_since = to_ticks(
                self.send_queue
                    .sent
                    .front()
                    .map_or(cx.now.0, |segment| segment.at),
            )
            .max(1);
        }
        self.stalled_for(cx) >= to_nanos(cx.shared.config.user_timeout)
    }

    /// How long nothing of what is queued has been acknowledged, in ns, if `stalled_since` says since
    /// when.
    fn stalled_for(&self, cx: &TcpContext<'_>) -> u64 {
        // A peer that shrank its window below what is in flight and still answers is not dead
        // (RFC 9293 section 3.8.6, SHLD-17).
        let heard = if self.tcb.snd_wnd < self.tcb.flight() {
            self.tcb.last_rx
        } else {
            0
        };
        let stalled = u64::from(to_ticks(cx.now.0).wrapping_sub(self.stalled_since)) << 20;
        stalled.min(cx.now.0.saturating_sub(heard))
    }

    /// What is left of the user timeout, in ns, rounded up to where `is_user_timeout_over` sees it.
    pub(crate) fn user_timeout_left(&self, cx: &TcpContext<'_>) -> u64 {
        if self.stalled_since == 0 {
            return u64::MAX;
        }
        let all = to_nanos(cx.shared.config.user_timeout);
        all.saturating_sub(self.stalled_for(cx))
            .saturating_add(1 << 20)
    }

    pub(crate) fn abort_on_timeout(&mut self, cx: &mut TcpContext<'_>) {
        cx.shared.stats.abort_on_timeout += 1;
        self.send_reset(cx);
        self.fail_connection(cx, Events::TIMED_OUT);
    }

    /// Ends the connection with an error and reports it to the owner.
    pub(crate) fn fail_connection(&mut self, cx: &mut TcpContext<'_>, why: Events) {
        self.enter_closed(cx);
        cx.raise_event(&mut self.tcb, why | Events::CLOSED);
    }

    /// A reset from a synchronised connection, with timestamps where they are agreed (RFC 7323
    /// section 3.2). Not sent when the neighbour was never resolved.
    pub(crate) fn send_reset(&mut self, cx: &mut TcpContext<'_>) {
        if self.neighbour_generation == 0
            || matches!(
                self.tcb.state,
                TcpState::SynSent | TcpState::Closed | TcpState::TimeWait
            )
        {
            return;
        }
        let fields = SegmentFields {
            seq: self
                .tcb
                .snd_nxt
                .min(self.tcb.snd_una + self.tcb.snd_wnd.max(1)),
            ack: self.tcb.rcv_nxt,
            flags: segment::RST | segment::ACK,
            window: 0,
            ts: self.tcb.has(ConnectionFlags::TIMESTAMPS).then(|| {
                (
                    timestamp_at(cx.now, self.timestamp_offset),
                    self.tcb.ts_recent,
                )
            }),
            options: &[],
            payload: 0,
            ect: false,
            tso: false,
        };
        cx.shared.stats.out_rsts += 1;
        cx.shared
            .control_queue
            .push_segment(&self.template, &fields, &mut cx.shared.stats);
    }

    /// When the next keepalive probe is due, in ns. Not while data is in flight: that has a timer of its
    /// own, and its acknowledgement is as good as the answer to a probe.
    #[inline]
    fn keepalive_deadline(&self, cx: &TcpContext<'_>) -> Option<u64> {
        let keepalive = cx.shared.config.keepalive.as_ref()?;
        let tcb = &self.tcb;
        let open = matches!(
            tcb.state,
            TcpState::Established | TcpState::CloseWait | TcpState::FinWait2
        );
        let unanswered = u64::from(tcb.probes) * to_nanos(keepalive.interval);
        let at = tcb.last_rx.saturating_add(to_nanos(keepalive.idle)) + unanswered;
        (open && tcb.snd_una == tcb.snd_nxt).then_some(at)
    }

    /// When the wheel has to call for the sake of keepalive. Data in flight puts the probe off, and its
    /// ACK does not come here: a look after each idle time finds the next probe before it is due.
    #[inline]
    fn keepalive_check(&self, cx: &TcpContext<'_>) -> Option<u64> {
        let idle = to_nanos(cx.shared.config.keepalive.as_ref()?.idle);
        let at = if self.tcb.flight() == 0 {
            self.keepalive_deadline(cx)?
        } else {
            cx.now.0.saturating_add(idle)
        };
        (self.tcb.state != TcpState::Closed).then_some(at.max(cx.now.0 + 1))
    }

    /// The peer was silent for the keepalive time: probes it, or gives up.
    fn keepalive_timeout(&mut self, cx: &mut TcpContext<'_>) {
        let Some(keepalive) = cx.shared.config.keepalive else {
            return;
        };
        let due = self.keepalive_deadline(cx).unwrap_or(cx.now.0);
        if self.tcb.probes >= keepalive.probes {
            self.abort_on_timeout(cx);
            return;
        }
        // The next is due an interval after this one, even if this one is late because the program did
        // not run: the peer must have the time to answer.
        self.tcb.last_rx += cx.now.0.saturating_sub(due);
        self.tcb.probes += 1;
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_KEEPALIVE);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::sim::{Impairment, SimNet, host_config, read_all};

    #[test]
    fn idle_queues_free_their_memory_only_after_a_rest() {
        let link = Impairment::perfect(Duration::from_micros(50));
        let hosts = [host_config(0), host_config(1)];
        let mut net = SimNet::<Vec<u8>>::new(3, hosts, [link; 2]);
        let now = net.now;
        net.hosts[1].listen(None, 80, 4, 0).unwrap();
        let to = "10.0.0.2:80".parse().unwrap();
        let a = net.hosts[0].connect(now, None, None, to, 0).unwrap();
        net.run(Duration::from_millis(5), |_| false);
        let b = net.hosts[1].next_event().unwrap().0;
        let holds =
            |net: &SimNet<Vec<u8>>| net.hosts[0].connections[a.index as usize].holds_memory();
        for turn in 0..10 {
            let record = b"a turn".to_vec();
            net.hosts[0].push_record(a, 6, record, true).unwrap();
            net.flush(0, a);
            net.run(Duration::from_millis(1), |_| false);
            assert_eq!(read_all(&mut net.hosts[1], b), b"a turn");
            net.hosts[0].take_acked(a, drop);
            // Longer than any timer of what was sent; others have their turns meanwhile.
            net.run(Duration::from_millis(60), |_| false);
            assert!(holds(&net), "turn {turn}");
        }
        net.run(Duration::from_millis(2000), |_| false);
        assert!(!holds(&net));
    }
}
