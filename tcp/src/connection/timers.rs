//! Timeouts of a connection. The timer wheel holds one entry for each connection; when it expires,
//! all deadlines of the connection are checked, and the entry is rescheduled for the earliest
//! remaining one.

use siw_net::{RecvBuf, to_nanos};

use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::{at_ticks, to_ticks};
use crate::connection::Connection;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::side_table::SideFlags;
use crate::connection::stalled::ReleasedFlow;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::{SendFlags, SendVariables};
use crate::tcb::timer::Timer;

/// Idle time in ns after which a connection frees the memory of its queues. Longer than it takes to
/// serve ten thousand others in turn, because a connection that is soon used again would only
/// reallocate the memory.
const IDLE_MEMORY_AFTER: u64 = 1_000_000_000;

/// An odd multiplier that spreads sequence numbers evenly over 32 bits.
const SPREAD: u32 = 0x9e37_79b9;

/// The timers of [`ConnectionFlags::RARE_TIMERS`] and [`SendFlags::WAITS_FOR_PACER`].
const RARE_TIMERS: [Timer; 3] = [Timer::Pacing, Timer::PathMtu, Timer::Orphan];

impl SharedState {
    /// Returns the time until the next timeout of a connection whose retransmission timer has just
    /// expired, in ns; `after` is the timeout with its backoff. It is up to half longer if the timer
    /// of another connection expired in the same tick: segments that a full queue dropped together
    /// would be retransmitted together each time, and the same connections would find no place in
    /// the queue.
    fn spread_timeout(&mut self, after: u64, una: SeqNr) -> u64 {
        let now = self.now.0;
        let is_alone = to_ticks(now) != to_ticks(self.last_timeout);
        self.last_timeout = now;
        if is_alone {
            return after;
        }
        let draw = una.0.wrapping_add(now as u32).wrapping_mul(SPREAD);
        after + ((u128::from(after / 2) * u128::from(draw)) >> 32) as u64
    }
}

impl Tcb {
    /// (Re)starts the retransmission timer (RFC 6298 section 5), or the probe timeout in its place.
    #[inline]
    pub(crate) fn restart_retransmission_timer(
        &mut self,
        snd: &SendVariables,
        cx: &mut TcpContext<'_>,
    ) {
        let mut timer = Timer::Retransmission;
        let mut after = snd
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, snd.backoff);
        // RFC 8985 section 7.2: with SACK, a measured round trip, no recovery and no previous
        // timeout, the tail loss probe replaces the timeout if it is due sooner.
        if self.has(ConnectionFlags::SACK)
            && !snd.has(SendFlags::RECOVERING)
            && snd.rtt.srtt > 0
            && snd.backoff == 0
            && !snd.is_all_acked()
        {
            let alone = snd.flight() <= u32::from(self.emss);
            after = after.min(snd.rtt.probe_timeout(&cx.shared.rto_limits, alone));
            timer = Timer::TailLossProbe;
        }
        self.set_timer(timer, cx.now.0 + after);
        cx.schedule_timer(self, cx.now.0 + after);
    }

    /// Restarts the probe timeout after new segments were sent, because their answers are also to
    /// come (RFC 8985 section 7.2), but at most to the retransmission timeout of the oldest segment
    /// in flight, which was sent at `oldest_at`. Otherwise a connection that sends a little at a
    /// time would never detect a dead peer.
    #[inline]
    pub(crate) fn extend_probe_timeout(
        &mut self,
        snd: &SendVariables,
        cx: &mut TcpContext<'_>,
        oldest_at: u64,
    ) {
        let limits = &cx.shared.rto_limits;
        let alone = snd.flight() <= u32::from(self.emss);
        let probe_at = cx.now.0 + snd.rtt.probe_timeout(limits, alone);
        // An ACK since then may have restarted the timer (RFC 6298 (5.3)): that later deadline is
        // kept.
        let latest = (oldest_at + snd.rtt.first_timeout(limits)).max(self.timer_at().unwrap_or(0));
        let at = probe_at.min(latest);
        self.set_timer(Timer::TailLossProbe, at);
        cx.schedule_timer(self, at);
    }

    /// (Re)starts the persist timer, with the duration of the retransmission timer: the window is
    /// probed if no update arrived by then (RFC 9293 section 3.8.6.1).
    pub(crate) fn start_persist_timer(&mut self, snd: &SendVariables, cx: &mut TcpContext<'_>) {
        self.restart_retransmission_timer(snd, cx);
        if let Some(at) = self.timer_at() {
            self.set_timer(Timer::Persist, at);
        }
    }

    /// Selects the timer to run (RFC 8985 section 8 recommends a single one): the reordering timer
    /// while RACK waits until `due` (0: it does not wait), but no longer than the retransmission
    /// timeout; else the retransmission timer, which may be a tail loss probe unless a recovery is in
    /// progress. `new`: new data was acknowledged.
    pub(crate) fn select_recovery_timer(
        &mut self,
        snd: &SendVariables,
        cx: &mut TcpContext<'_>,
        due: u64,
        new: bool,
    ) {
        if snd.is_all_acked() {
            return;
        }
        // RACK measures its wait by the round trip of the last delivered segment, which spans the whole
        // outage after one: a segment lost before it has no other timer.
        let timeout = snd
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, snd.backoff);
        if due != 0 && due <= cx.now.0 + timeout {
            let sooner = match self.timer() {
                None | Some(Timer::Reordering | Timer::TailLossProbe) => true,
                Some(_) => self.timer_at().is_some_and(|at| at > due),
            };
            if sooner {
                self.set_timer(Timer::Reordering, due);
                cx.schedule_timer(self, due);
            }
            return;
        }
        let recovering = snd.has(SendFlags::RECOVERING);
        let usual = match self.timer() {
            Some(Timer::Reordering) => true,
            Some(Timer::TailLossProbe) => recovering,
            None => due != 0 || (new && !recovering),
            Some(_) => new && !recovering,
        };
        if usual {
            self.restart_retransmission_timer(snd, cx);
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
    /// Handles the expiry of the connection's timer wheel entry: fires the timers that are due, and
    /// schedules the entry for the earliest of the others. Returns `true` if the connection has
    /// ended and has no owner.
    pub(crate) fn on_timer(&mut self, cx: &mut TcpContext<'_>) -> bool {
        self.tcb.wheel_at = u64::MAX;
        self.fire_if_due(cx, Timer::DelayedAck);
        if let Some(timer) = self.tcb.timer() {
            self.fire_if_due(cx, timer);
        }
        self.fire_if_due(cx, Timer::Keepalive);
        if self.has_rare_timer() {
            for timer in RARE_TIMERS {
                self.fire_if_due(cx, timer);
            }
        }
        self.fire_if_due(cx, Timer::IdleMemory);
        if let Some(next) = self.earliest_deadline(cx) {
            cx.schedule_timer(&mut self.tcb, next);
        }
        self.tcb.is_done()
    }

    /// Returns whether a timer of [`RARE_TIMERS`] may run.
    #[inline]
    fn has_rare_timer(&self) -> bool {
        self.tcb.has(ConnectionFlags::RARE_TIMERS)
            || self.sender.snd.has(SendFlags::WAITS_FOR_PACER)
    }

    /// Sends the ACK that waited for the owner's reply.
    pub(crate) fn on_answer_missed(&mut self, cx: &mut TcpContext<'_>) {
        self.fire_timer(cx, Timer::DelayedAck);
    }

    #[inline]
    fn fire_if_due(&mut self, cx: &mut TcpContext<'_>, timer: Timer) {
        if self.deadline_of(cx, timer).is_some_and(|at| at <= cx.now.0) {
            self.fire_timer(cx, timer);
        }
    }

    /// Returns the time in ns at which the timer fires; `None` if it does not run.
    #[inline]
    fn deadline_of(&self, cx: &TcpContext<'_>, timer: Timer) -> Option<u64> {
        let (tcb, snd) = (&self.tcb, &self.sender.snd);
        match timer {
            Timer::DelayedAck => (self.receiver.ack_at != 0).then_some(self.receiver.ack_at),
            Timer::Keepalive => self.keepalive_deadline(cx),
            Timer::Pacing => {
                let waits = snd.has(SendFlags::WAITS_FOR_PACER) && snd.window.is_paced();
                let recovery = self.sender.recovery.as_ref().filter(|_| waits)?;
                Some(recovery.pacer.next_at())
            }
            Timer::PathMtu => {
                let is_narrow = tcb.has(ConnectionFlags::NARROW_PATH);
                is_narrow.then(|| at_ticks(self.path.widen_at, cx.now))
            }
            Timer::Orphan => self.tcb.orphan_deadline(cx),
            Timer::IdleMemory => {
                // The pacer is part of the recovery, which would be freed too.
                let waits = snd.has(SendFlags::WAITS_FOR_PACER);
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

    /// Returns the earliest deadline in the future.
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
        if self.has_rare_timer() {
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

    /// Performs the action of a timer whose deadline has passed.
    fn fire_timer(&mut self, cx: &mut TcpContext<'_>, timer: Timer) {
        if self.tcb.is_timer(timer) {
            self.tcb.stop_timer();
        }
        if matches!(
            timer,
            Timer::Retransmission | Timer::TailLossProbe | Timer::Persist
        ) {
            cx.note_stalled(self.sender.snd.una, self.path.remote());
        }
        match timer {
            Timer::DelayedAck => {
                self.receiver.ack_at = 0;
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
            Timer::PathMtu => self.widen_path(cx),
            Timer::IdleMemory => self.release_memory(),
        }
    }

    /// Returns whether data is unacknowledged or waits to be sent.
    #[inline]
    fn is_busy(&self) -> bool {
        self.sender.snd.is_busy(&self.tcb)
    }

    /// Sends again what got no answer, because the path to the peer has changed: another Ethernet
    /// address of the neighbour, another route, a link that is up again. It does not count as a further
    /// attempt. A change resumes a connection at most once per timeout, which [`Self::fire_timer`]
    /// records.
    #[cold]
    pub(crate) fn resume_stalled(&mut self, cx: &mut TcpContext<'_>, released: &ReleasedFlow) {
        if self.sender.snd.una != released.una || !self.is_busy() {
            return;
        }
        let backoff = match released.forgets_backoff {
            true => 0,
            false => self.sender.snd.backoff.saturating_sub(1),
        };
        match (self.tcb.state, self.tcb.timer()) {
            (TcpState::SynSent | TcpState::SynReceived, Some(_))
                if !self.tcb.has(ConnectionFlags::NEED_SYN) =>
            {
                // The number of SYNs has a limit.
                self.sender.snd.backoff = self.sender.snd.backoff.saturating_sub(1);
                self.handshake_timeout(cx);
            }
            (TcpState::SynSent | TcpState::SynReceived, _) => {
                cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE)
            }
            (_, Some(Timer::Retransmission | Timer::TailLossProbe | Timer::Reordering)) => {
                self.sender.snd.backoff = backoff;
                self.retransmission_timeout(cx);
            }
            (_, Some(Timer::Persist)) => {
                self.sender.snd.backoff = backoff;
                self.persist_timeout(cx);
            }
            _ => cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE),
        }
    }

    /// Retransmits our SYN or SYN-ACK, or gives up.
    fn handshake_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.sender.snd.backoff >= cx.shared.config.syn_retries {
            cx.shared.stats.attempt_fails += 1;
            // A router may have reported the reason (RFC 9293 section 3.9.2.2, SHLD-25).
            let fields = cx.shared.side_table.fields_of(cx.id.index);
            let why = if fields.flags.has(SideFlags::SOFT_ERROR) {
                Events::UNREACHABLE
            } else {
                Events::TIMED_OUT
            };
            self.fail_connection(cx, why);
            return;
        }
        self.sender.snd.backoff += 1;
        // One that still waits for the neighbour or the sink was not lost.
        if !self.tcb.has(ConnectionFlags::NEED_SYN) {
            cx.count_repeated_syn();
        }
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_SYN);
        self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
    }

    /// Handles the persist timeout: the peer's window did not open in time. Probes it, or allows a
    /// part of a record that fits.
    fn persist_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.sender.is_user_timeout_over(&self.tcb, cx) {
            self.abort_on_timeout(cx);
            return;
        }
        self.sender.snd.backoff = self.sender.snd.backoff.saturating_add(1);
        let need = if self.sender.snd.wnd > 0 {
            self.sender.snd.set(SendFlags::MAY_SPLIT_RECORD);
            ConnectionFlags::NONE
        } else {
            ConnectionFlags::NEED_PROBE
        };
        cx.schedule_output(&mut self.tcb, need);
        self.tcb.start_persist_timer(&self.sender.snd, cx);
    }

    /// Starts the timer of a connection with pending output whose neighbour is not resolved. With
    /// nothing in flight no other timer runs, and this one bounds the wait: the neighbour may stay
    /// silent, or the table may have had no room for the request.
    #[cold]
    pub(crate) fn wait_for_neighbour(&mut self, cx: &mut TcpContext<'_>) {
        // A route or a neighbour may end the wait. What is in flight has a timer that records it.
        let is_resolving = matches!(self.tcb.timer(), None | Some(Timer::NeighbourResolution));
        if is_resolving || cx.shared.net.next_hop(self.path.remote()).is_none() {
            cx.note_stalled(self.sender.snd.una, self.path.remote());
        }
        if self.tcb.timer().is_some()
            || !(self.is_busy() || self.tcb.has(ConnectionFlags::NEED_MASK))
        {
            return;
        }
        if self.sender.snd.stalled_since == 0 && self.is_busy() {
            self.sender.snd.stalled_since = to_ticks(cx.now.0).max(1);
        }
        self.start_neighbour_timer(cx);
    }

    /// (Re)starts the timer: with the time after which the neighbour table gives up, doubled after
    /// each expiry, and at most up to the user timeout.
    fn start_neighbour_timer(&mut self, cx: &mut TcpContext<'_>) {
        let asked = cx.shared.net.neighbours.resolution_time();
        let longest = to_nanos(cx.shared.config.rto_max).max(asked);
        let pause = asked
            .saturating_mul(1 << self.sender.snd.backoff.min(20))
            .min(longest);
        let left = self.sender.user_timeout_left(&self.tcb, cx);
        let at = cx.now.0.saturating_add(pause.min(left));
        self.tcb.set_timer(Timer::NeighbourResolution, at);
        cx.schedule_timer(&mut self.tcb, at);
    }

    /// Requests the neighbour again after it did not answer in time, unless the user timeout has
    /// passed (RFC 9293 section 3.8.3).
    pub(crate) fn neighbour_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if !self.is_busy() {
            self.tcb.drop_unsent_acks();
            return;
        }
        if self.sender.is_user_timeout_over(&self.tcb, cx) {
            self.abort_on_timeout(cx);
            return;
        }
        self.sender.snd.backoff = self.sender.snd.backoff.saturating_add(1);
        self.start_neighbour_timer(cx);
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
    }

    /// Handles the failure of the neighbour table to resolve the neighbour.
    pub(crate) fn on_neighbour_failed(&mut self, cx: &mut TcpContext<'_>) {
        match self.tcb.state {
            TcpState::SynSent | TcpState::SynReceived => {
                self.fail_connection(cx, Events::UNREACHABLE)
            }
            TcpState::Closed => {}
            // Data waits: the neighbour is asked again at once, which makes a request per
            // `retransmit`, the limit of RFC 1122 section 2.3.2.1.
            _ if self.is_busy() => cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE),
            _ => {
                self.tcb.drop_unsent_acks();
                if self.tcb.is_timer(Timer::NeighbourResolution) {
                    self.tcb.stop_timer();
                }
            }
        }
    }

    /// Ends an orphan whose deadline has passed.
    pub(crate) fn orphan_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.state != TcpState::FinWait2 {
            // The peer has not received everything: it must not take this for a regular close.
            cx.shared.stats.abort_on_timeout += 1;
            self.schedule_reset(cx);
        }
        self.enter_closed(cx);
    }

    /// Handles the probe timeout (RFC 8985 section 7.3).
    fn probe_timeout(&mut self, cx: &mut TcpContext<'_>) {
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_TAIL_PROBE);
        // The retransmission timeout as fallback, in case the probe cannot be sent.
        let at = cx.now.0
            + self
                .sender
                .snd
                .rtt
                .retransmission_timeout(&cx.shared.rto_limits, 0);
        self.tcb.set_timer(Timer::Retransmission, at);
    }

    /// Handles the reordering timer (RFC 8985 section 6.2 step 5).
    fn reordering_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if let Some(due) = self.sender.on_reordering_timeout(&self.tcb, cx) {
            let (tcb, snd) = (&mut self.tcb, &self.sender.snd);
            cx.schedule_output(tcb, ConnectionFlags::NONE);
            tcb.restart_retransmission_timer(snd, cx);
            tcb.select_recovery_timer(snd, cx, due, false);
        }
    }

    /// Begins slow start with the first unacknowledged segment (RFC 6298 (5.4) to (5.6), RFC 5681
    /// section 3.1).
    fn retransmission_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if self.sender.send_buffer.sent.is_empty() {
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
            return;
        }
        if self.sender.is_user_timeout_over(&self.tcb, cx) {
            self.abort_on_timeout(cx);
            return;
        }
        cx.shared.stats.timeouts += 1;
        let timeouts = &mut cx.shared.side_table.fields_of(cx.id.index).timeouts;
        *timeouts = timeouts.saturating_add(1);
        self.suspect_black_hole(cx);
        self.sender.on_retransmission_timeout(&self.tcb, cx);
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
        let snd = &self.sender.snd;
        let after = snd
            .rtt
            .retransmission_timeout(&cx.shared.rto_limits, snd.backoff);
        let after = cx.shared.spread_timeout(after, snd.una);
        // At most until the user timeout: the backoff may exceed it by now.
        let at = cx
            .now
            .0
            .saturating_add(after.min(self.sender.user_timeout_left(&self.tcb, cx)));
        self.tcb.set_timer(Timer::Retransmission, at);
        cx.schedule_timer(&mut self.tcb, at);
    }

    pub(crate) fn abort_on_timeout(&mut self, cx: &mut TcpContext<'_>) {
        cx.shared.stats.abort_on_timeout += 1;
        self.schedule_reset(cx);
        self.fail_connection(cx, Events::TIMED_OUT);
    }

    /// Ends the connection with an error and reports it to the owner.
    pub(crate) fn fail_connection(&mut self, cx: &mut TcpContext<'_>, why: Events) {
        self.enter_closed(cx);
        cx.raise_event(&mut self.tcb, why | Events::CLOSED);
    }

    /// Returns when the next keepalive probe is due, in ns. `None` while data is in flight: that
    /// data has a timer of its own, and its acknowledgement is equivalent to the answer to a probe.
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
        (open && self.sender.snd.is_all_acked()).then_some(at)
    }

    /// Returns when the timer wheel must next check keepalive. Data in flight postpones the probe,
    /// and its ACK does not update the wheel: a check after each idle time finds the next probe
    /// before it is due.
    #[inline]
    fn keepalive_check(&self, cx: &TcpContext<'_>) -> Option<u64> {
        let idle = to_nanos(cx.shared.config.keepalive.as_ref()?.idle);
        let at = if self.sender.snd.is_all_acked() {
            self.keepalive_deadline(cx)?
        } else {
            cx.now.0.saturating_add(idle)
        };
        (self.tcb.state != TcpState::Closed).then_some(at.max(cx.now.0 + 1))
    }

    /// Probes a peer that was silent for the keepalive time, or gives up.
    fn keepalive_timeout(&mut self, cx: &mut TcpContext<'_>) {
        let Some(keepalive) = cx.shared.config.keepalive else {
            return;
        };
        let due = self.keepalive_deadline(cx).unwrap_or(cx.now.0);
        if self.tcb.probes >= keepalive.probes {
            self.abort_on_timeout(cx);
            return;
        }
        // The next probe is due an interval after this one, even if this one is late because the
        // program did not run: the peer must have time to answer.
        self.tcb.last_rx += cx.now.0.saturating_sub(due);
        self.tcb.probes += 1;
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_KEEPALIVE);
    }
}
