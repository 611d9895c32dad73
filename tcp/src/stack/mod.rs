//! The public interface: the stack of one device in one worker.

mod network;
mod open;
pub(crate) mod receive;
mod slots;
mod syn_cookies;
#[cfg(feature = "test-hooks")]
mod test_hooks;
pub(crate) mod transmit;

use crate::tcb::flags::ConnectionFlags;
use core::net::SocketAddr;
use core::time::Duration;

use siw_net::{ConnId, FrameSink, Instant, NetworkInput, QuotaOwner, RecvBuf};

use crate::base::error::StackError;
use crate::base::events::Events;
use crate::base::ids::ListenerId;
use crate::base::retransmissions::Retransmissions;
use crate::base::state::TcpState;
use crate::base::stats::{StackStats, TcpStats};
use crate::base::timer_wheel::TimerWheel;
use crate::config::StackConfig;
use crate::connection::closing_list::{Closing, ClosingLists};
use crate::connection::context::SharedState;
use crate::connection::receiver::LONG_PATH;
use crate::connection::side_table::SideTable;
use crate::connection::{Connection, NO_LISTENER};
use crate::flow::table::FlowTable;
use crate::queues::receive_queue::ReceiveQueue;
use crate::stack::receive::RxPipeline;
use crate::stack::slots::Slots;

/// Connections that send again in one call because their path has changed. The others follow in the next
/// one.
const RESUMED_AT_ONCE: usize = 64;
/// Timers that one poll runs: some tens of microseconds of work. A multiple of those prefetched together.
const TIMERS_PER_POLL: usize = 256;

/// Snapshot of a connection.
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    /// State of RFC 9293 section 3.3.2.
    pub state: TcpState,
    /// Our address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// Value set by the owner, see [`Stack::set_user`].
    pub user: u64,
    /// The listener of a passive open.
    pub listener: Option<ListenerId>,
    /// Payload bytes of a full segment at present (RFC 9293 section 3.7.1).
    pub effective_mss: usize,
    /// Congestion window in bytes (RFC 5681).
    pub cwnd: u32,
    /// Slow-start threshold in bytes; `u32::MAX` before the first loss (RFC 5681).
    pub ssthresh: u32,
    /// The peer's window.
    pub send_window: u32,
    /// Sequence space sent and not cumulatively acknowledged.
    pub in_flight: u32,
    /// Bytes queued and never sent.
    pub unsent: u32,
    /// Received bytes in order, not consumed.
    pub readable: usize,
    /// Smoothed round-trip time (RFC 6298); `None` before the first measurement.
    pub srtt: Option<Duration>,
    /// Timestamps are agreed (RFC 7323).
    pub timestamps: bool,
    /// Selective acknowledgements are agreed (RFC 2018).
    pub sack: bool,
    /// ECN is agreed (RFC 3168).
    pub ecn: bool,
    /// Retransmission timeout with its backoff (RFC 6298).
    pub rto: Duration,
    /// Segments that were sent again, by cause.
    pub retransmissions: Retransmissions,
    /// Retransmitted segments with data that are on the way: neither acknowledged nor deemed lost
    /// again.
    pub retransmitted_in_flight: u32,
    /// Zero-window probes sent (RFC 9293 section 3.8.6.1).
    pub window_probes: u32,
    /// Retransmission timeouts.
    pub timeouts: u32,
    /// The peer's FIN was received.
    pub peer_fin: bool,
}

/// The stack of one device in one worker. `B` is a received frame, `R` a record to send.
pub struct Stack<B: RecvBuf, R> {
    pub(crate) slots: Slots<B, R>,
    /// Connection of the last received segment.
    pub(crate) last_connection: u32,
    /// Empty between bursts.
    pub(crate) rx_pipeline: RxPipeline<B>,
    pub(crate) input: NetworkInput<B>,
    pub(crate) shared: SharedState,
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// Bytes of an idle connection in this crate: its slot, its entries in the timer wheel, the closing
    /// lists and the side table, and its share of the flow table.
    pub const CONNECTION_BYTES: usize = size_of::<Connection<B, R>>()
        + TimerWheel::NODE
        + ClosingLists::NODE
        + SideTable::ENTRY
        + FlowTable::SHARE;
    /// The part of these bytes that every segment accesses.
    pub const HOT_BYTES: usize = Connection::<B, R>::HOT_BYTES;

    /// Creates a stack after checking the configuration.
    pub fn new(config: StackConfig, now: Instant) -> Result<Self, StackError> {
        let shared = SharedState::new(config, now)?;
        Ok(Stack {
            slots: Slots::new(shared.config.max_connections),
            last_connection: u32::MAX,
            rx_pipeline: RxPipeline::default(),
            input: NetworkInput::new(&shared.net.config),
            shared,
        })
    }

    /// Returns the smoothed round-trip time of a connection in nanoseconds (RFC 6298); `None` before the first
    /// measurement.
    #[inline]
    pub fn smoothed_round_trip(&self, id: ConnId) -> Option<u64> {
        let srtt = self.slots.owned(id)?.sender.snd.rtt.srtt;
        (srtt > 0).then_some(srtt)
    }

    /// Returns a snapshot of the connection; `None` for a stale id.
    pub fn tcp_info(&self, id: ConnId) -> Option<TcpInfo> {
        let conn = self.slots.owned(id)?;
        let (tcb, snd) = (&conn.tcb, &conn.sender.snd);
        let repeats = self.shared.side_table.repeats(id.index);
        Some(TcpInfo {
            state: tcb.state,
            local: conn.path.template.key().local(),
            remote: conn.path.template.key().remote(),
            user: tcb.user,
            listener: (conn.listener != NO_LISTENER).then_some(ListenerId(conn.listener)),
            effective_mss: usize::from(tcb.emss),
            cwnd: snd.window.cwnd(),
            ssthresh: snd.window.ssthresh().finite_bytes().unwrap_or(u32::MAX),
            send_window: snd.wnd,
            in_flight: snd.flight(),
            unsent: snd.unsent,
            readable: conn.receiver.receive_queue.len_bytes(),
            srtt: (snd.rtt.srtt > 0).then(|| Duration::from_nanos(snd.rtt.srtt)),
            timestamps: tcb.has(ConnectionFlags::TIMESTAMPS),
            sack: tcb.has(ConnectionFlags::SACK),
            ecn: tcb.has(ConnectionFlags::ECN),
            rto: Duration::from_nanos(
                snd.rtt
                    .retransmission_timeout(&self.shared.rto_limits, snd.backoff),
            ),
            retransmissions: repeats.retransmissions,
            retransmitted_in_flight: conn.sender.retransmitted_in_flight(),
            window_probes: repeats.window_probes,
            timeouts: self.shared.side_table.timeouts(id.index),
            peer_fin: tcb.has(ConnectionFlags::FIN_RECEIVED),
        })
    }

    /// Sets the value that accompanies every event of this connection.
    pub fn set_user(&mut self, id: ConnId, user: u64) {
        if let Some(conn) = self.slots.owned_mut(id) {
            conn.tcb.user = user;
        }
    }

    /// Sets the owner whose quota the connection counts against, see [`Stack::connect_for`].
    pub fn set_quota_owner(&mut self, id: ConnId, owner: QuotaOwner) {
        if self.slots.owned(id).is_some() {
            let fields = self.shared.side_table.fields_of(id.index);
            fields.set_quota_owner(Some(owner));
        }
    }

    /// Sends FIN after the queued records. Received data can still be read (half close), but no more
    /// records can be pushed.
    pub fn close(&mut self, now: Instant, id: ConnId) {
        self.shared.now = now;
        if self.slots.owned(id).is_some() {
            self.start_close(id.index);
        }
    }

    fn start_close(&mut self, index: u32) {
        let conn = &mut self.slots[index];
        let tcb = &mut conn.tcb;
        if tcb.has(ConnectionFlags::FIN_QUEUED) {
            return;
        }
        match tcb.state {
            TcpState::SynSent => {
                conn.fail_connection(&mut self.shared.context_of(conn.id(index)), Events::NONE);
                return;
            }
            TcpState::SynReceived => {}
            TcpState::Established => {
                tcb.state = TcpState::FinWait1;
                self.shared.stats.curr_estab -= 1;
            }
            TcpState::CloseWait => {
                tcb.state = TcpState::LastAck;
                self.shared.stats.curr_estab -= 1;
            }
            _ => return,
        }
        tcb.flags |= ConnectionFlags::FIN_QUEUED;
        self.shared
            .schedule_output(index, tcb, ConnectionFlags::NONE);
        self.shared
            .context_of(conn.id(index))
            .update_active_count(&mut conn.tcb, &conn.sender.snd);
    }

    /// Ends the connection at once; the next `poll` sends the reset. Queued records stay until
    /// `take_unacked` or `release`.
    pub fn abort(&mut self, now: Instant, id: ConnId) {
        self.shared.now = now;
        if self.slots.owned(id).is_some() {
            let conn = &mut self.slots[id.index];
            if conn.tcb.state != TcpState::Closed {
                conn.schedule_reset(&mut self.shared.context_of(id));
                conn.fail_connection(&mut self.shared.context_of(id), Events::NONE);
            }
        }
    }

    /// Longest time that a closing connection without an owner stays unacknowledged.
    pub fn orphan_timeout(&self) -> Duration {
        self.shared.config.orphan_timeout
    }

    /// Detaches the owner from the connection: no more events. A closing connection lives on until
    /// TIME-WAIT or LAST-ACK ends, or until [`TcpConfig::orphan_timeout`](crate::TcpConfig::orphan_timeout) expires. An open one is
    /// closed first (reset if received data was not read, RFC 2525 section 2.17). A reset leaves
    /// before the slot of its connection is free.
    pub fn release(&mut self, now: Instant, id: ConnId) {
        self.shared.now = now;
        if self.slots.owned(id).is_none() {
            return;
        }
        let index = id.index;
        let conn = &mut self.slots[index];
        self.shared
            .listeners
            .leave_backlog(&mut conn.tcb, conn.listener);
        if matches!(
            conn.tcb.state,
            TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2 | TcpState::CloseWait
        ) && !conn.receiver.receive_queue.is_empty()
        {
            conn.schedule_reset(&mut self.shared.context_of(id));
            conn.enter_closed(&mut self.shared.context_of(id));
        }
        self.start_close(index);
        let conn = &mut self.slots[index];
        conn.tcb.flags |= ConnectionFlags::RELEASED;
        conn.tcb.events = 0;
        conn.receiver
            .resume_reading(&mut conn.tcb, &mut self.shared.context_of(id));
        conn.receiver.receive_queue.clear();
        // Out-of-order data can no longer be read; data that fills the hole is answered with a reset.
        conn.receiver.out_of_order = None;
        let cx = &mut self.shared.context_of(conn.id(index));
        conn.receiver.update_held_buffers(cx);
        conn.tcb.start_orphan_timer(cx);
        if conn.tcb.state == TcpState::TimeWait {
            self.shared.closing.push(Closing::TimeWait, index);
        }
        self.slots.free_if_done(&mut self.shared, index);
    }

    /// Returns the next connection with events: its id, its user value, and all its events OR-ed together.
    pub fn next_event(&mut self) -> Option<(ConnId, u64, Events)> {
        while let Some(index) = self.shared.event_list.pop_front() {
            let conn = &mut self.slots[index];
            let events = Events(core::mem::take(&mut conn.tcb.events));
            if events.is_empty() || conn.tcb.has(ConnectionFlags::RELEASED) {
                continue;
            }
            if events.contains(Events::ACCEPTED) {
                self.shared
                    .listeners
                    .leave_backlog(&mut conn.tcb, conn.listener);
            }
            return Some((
                ConnId {
                    index,
                    generation: conn.generation,
                },
                conn.tcb.user,
                events,
            ));
        }
        None
    }

    /// Upper bound on the number of connections with events: see [`next_event`](Self::next_event).
    #[inline]
    pub fn event_count(&self) -> usize {
        self.shared.event_list.len()
    }

    /// Returns the user value and the events of the connection `ahead` places behind the next in the event
    /// list, so that its data can be prefetched.
    #[inline]
    pub fn peek_event(&self, ahead: usize) -> Option<(u64, Events)> {
        let index = *self.shared.event_list.get(ahead)?;
        let tcb = &self.slots.get(index)?.tcb;
        Some((tcb.user, Events(tcb.events)))
    }

    /// The owner of the connection does not read for a while, because it waits for something else. What the
    /// connection holds no longer takes room from others, and beyond the share of its user it accepts no
    /// more. Returns `false` if such connections hold all there is: then this one has to be read or ended.
    pub fn stop_reading(&mut self, id: ConnId) -> bool {
        if self.slots.owned(id).is_none() {
            return true;
        }
        let conn = &mut self.slots[id.index];
        let cx = &mut self.shared.context_of(id);
        conn.receiver.stop_reading(&mut conn.tcb, cx)
    }

    /// The owner of the connection reads again.
    pub fn resume_reading(&mut self, id: ConnId) {
        if self.slots.owned(id).is_some() {
            let conn = &mut self.slots[id.index];
            let cx = &mut self.shared.context_of(id);
            conn.receiver.resume_reading(&mut conn.tcb, cx);
        }
    }

    /// Returns whether [`next_event`](Self::next_event) may return an event.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.shared.event_list.is_empty()
    }

    /// Returns the queue of bytes received in order.
    #[inline]
    pub fn receive_queue(&mut self, id: ConnId) -> Option<&mut ReceiveQueue<B>> {
        self.slots.owned(id)?;
        let conn = &mut self.slots[id.index];
        conn.receiver
            .update_held_buffers(&mut self.shared.context_of(id));
        // The caller may consume data and thereby open the window: `poll` checks.
        if conn.tcb.state != TcpState::Closed {
            self.shared
                .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
        }
        Some(&mut conn.receiver.receive_queue)
    }

    /// Visits each out-of-order segment not visited yet. `visit` gets its offset in bytes from the first
    /// byte of [`receive_queue`](Self::receive_queue), and its payload, or the new part of it. The
    /// segment stays held and reaches the queue once all earlier data is there.
    pub fn for_each_out_of_order(&mut self, id: ConnId, mut visit: impl FnMut(usize, &B)) {
        if self.slots.owned(id).is_none() {
            return;
        }
        let conn = &mut self.slots[id.index];
        let (next, queued) = (
            conn.receiver.rcv.nxt,
            conn.receiver.receive_queue.len_bytes(),
        );
        if let Some(queue) = &mut conn.receiver.out_of_order {
            queue.show_unseen(|seq, block| visit(queued + (seq - next) as usize, block));
        }
    }

    /// Runs timers and sends all pending output: pure ACKs (at most one per connection and batch, more
    /// only to report many holes), retransmissions, window updates, probes, SYN, RST, ARP, NDP, ICMP.
    pub fn poll(&mut self, now: Instant, sink: &mut impl FrameSink<R>) {
        self.shared.now = now;
        self.poll_timers(now);
        self.poll_network(now);
        self.resume_stalled();
        self.poll_output(now, sink);
        self.shared.net.send_solicitations(sink);
    }

    /// Returns whether [`poll`](Self::poll) has any work at `now`. This takes a few comparisons, so that
    /// callers can skip an idle poll in each batch.
    #[inline]
    pub fn needs_poll(&mut self, now: Instant) -> bool {
        let shared = &mut self.shared;
        shared.now = now;
        let is_answer_due = shared.awaited_answers.front();
        let is_answer_due = is_answer_due.is_some_and(|&(_, at)| at <= now.0);
        let is_due =
            shared.timer_wheel.is_due(now) || self.input.is_due(&shared.net, now) || is_answer_due;
        is_due || self.has_output()
    }

    /// Runs timers that are due: a bounded number of them, since those of a client's connections may be
    /// due together; the next poll continues. Several connections are prefetched together before the
    /// first is processed, so that their cache misses overlap.
    #[inline]
    fn poll_timers(&mut self, now: Instant) {
        let mut due = [0; 16];
        self.shared.timer_wheel.begin_poll();
        for _ in 0..TIMERS_PER_POLL / due.len() {
            let mut n = 0;
            while n < due.len()
                && let Some(index) = self.shared.timer_wheel.pop_due(now)
            {
                self.slots[index].prefetch_timers();
                due[n] = index;
                n += 1;
            }
            for &index in &due[..n] {
                let conn = &mut self.slots[index];
                if conn.on_timer(&mut self.shared.context_of(conn.id(index))) {
                    self.slots.free(&mut self.shared, index);
                }
            }
            if n < due.len() {
                return;
            }
        }
    }

    /// [`poll`](Self::poll) without timers, for callers with received frames still to process, which may
    /// stop a retransmission timer.
    pub fn poll_output(&mut self, now: Instant, sink: &mut impl FrameSink<R>) {
        self.shared.now = now;
        if !self.shared.early_acks.is_empty() && self.send_early_acks(sink).is_err() {
            self.shared.is_output_blocked = true;
            return;
        }
        self.shared.net.flush(sink);
        self.poll_awaited_answers(now);
        // One round: connections added during it wait for the next poll.
        for _ in 0..self.shared.output_list.len() {
            let Some(index) = self.shared.output_list.pop_front() else {
                break;
            };
            let conn = &mut self.slots[index];
            if !conn.tcb.has(ConnectionFlags::IN_OUTPUT_LIST) {
                continue;
            }
            conn.tcb.flags &= !ConnectionFlags::IN_OUTPUT_LIST;
            conn.receiver
                .update_held_buffers(&mut self.shared.context_of(conn.id(index)));
            let srtt = conn.sender.snd.rtt.srtt;
            if srtt >= LONG_PATH {
                let cx = &mut self.shared.context_of(conn.id(index));
                conn.receiver.tune_window(&conn.tcb, srtt, cx);
            }
            let is_closed = conn.tcb.state == TcpState::Closed;
            let before = conn.sender.snd.nxt;
            let sent = if is_closed {
                conn.send_pending_reset(&mut self.shared.context_of(conn.id(index)), sink)
            } else {
                conn.send_pending(&mut self.shared.context_of(conn.id(index)), sink)
            };
            if sent.is_err() {
                conn.tcb.flags |= ConnectionFlags::IN_OUTPUT_LIST;
                // One that has filled the sink goes behind the others, which have their turns first.
                if conn.sender.snd.nxt == before {
                    self.shared.output_list.push_front(index);
                } else {
                    self.shared.output_list.push_back(index);
                }
                self.shared.is_output_blocked = true;
                return;
            }
            if is_closed {
                self.slots.free_if_done(&mut self.shared, index);
            }
        }
        self.shared.is_output_blocked = false;
    }

    /// Schedules ACKs whose wait for an answer expired.
    #[inline]
    fn poll_awaited_answers(&mut self, now: Instant) {
        while let Some(&(index, at)) = self.shared.awaited_answers.front()
            && at <= now.0
        {
            self.shared.awaited_answers.pop_front();
            let conn = &mut self.slots[index];
            if conn.receiver.ack_at == at {
                conn.on_answer_missed(&mut self.shared.context_of(conn.id(index)));
            }
        }
    }

    /// Sends single segments from now on. Returns false if it did so before.
    pub fn stop_tso(&mut self) -> bool {
        self.shared.stop_tso()
    }

    /// Sends single segments while `is_paused`, and super-segments again after that if it did before.
    pub fn pause_tso(&mut self, is_paused: bool) {
        self.shared.pause_tso(is_paused);
    }

    /// Returns whether TSO was stopped since the last call: super-segments did not arrive, while single
    /// segments did.
    #[inline]
    pub fn take_tso_failure(&mut self) -> bool {
        self.shared.tso_watch.take_report()
    }

    /// Serves the timers of the network layer, before output: connections with data ask for their neighbours
    /// again.
    fn poll_network(&mut self, now: Instant) {
        for id in self.input.poll(&mut self.shared.net, now) {
            let Some(conn) = self.slots.current(id) else {
                continue;
            };
            conn.on_neighbour_failed(&mut self.shared.context_of(id));
            self.slots.free_if_done(&mut self.shared, id.index);
        }
    }

    /// Retransmits on connections whose path has changed since their last timeout, on a bounded number in
    /// each call.
    #[inline]
    fn resume_stalled(&mut self) {
        for _ in 0..RESUMED_AT_ONCE {
            let Some(released) = self.shared.stalled.next_released() else {
                return;
            };
            let index = released.index;
            let Some(conn) = self.slots.get_mut(index) else {
                continue;
            };
            conn.resume_stalled(&mut self.shared.context_of(conn.id(index)), &released);
            self.slots.free_if_done(&mut self.shared, index);
        }
    }

    /// Returns when `poll` must be called even if nothing arrives. May be early, never late.
    pub fn next_deadline(&self) -> Option<Instant> {
        let awaited_answer = self.shared.awaited_answers.front();
        let all = [
            awaited_answer.map(|&(_, at)| Instant(at)),
            self.shared.timer_wheel.next_deadline(),
            self.input.next_deadline(&self.shared.net),
        ];
        all.into_iter().flatten().min()
    }

    /// Returns whether `poll` would send something now (if the sink has room).
    pub fn has_output(&self) -> bool {
        !self.shared.output_list.is_empty()
            || !self.shared.early_acks.is_empty()
            || self.shared.net.has_output()
            || self.shared.stalled.has_released()
    }

    /// Returns whether nothing is in flight, queued or pending: if the peers' stacks are idle too, only
    /// timers and new work can wake this one.
    pub fn is_idle(&self) -> bool {
        self.shared.active == 0 && !self.has_output() && !self.shared.net.neighbours.is_resolving()
    }

    /// Returns a copy of the counters since the start. [`net_stats`](Self::net_stats) and
    /// [`tcp_stats`](Self::tcp_stats) return references, to read single counters.
    pub fn stats(&self) -> StackStats {
        StackStats {
            net: self.shared.net.stats.clone(),
            tcp: self.shared.stats.clone(),
        }
    }

    /// Returns the counters of segments and connections since the start.
    #[inline]
    pub fn tcp_stats(&self) -> &TcpStats {
        &self.shared.stats
    }

    /// Number of received buffers held by connections, in order or out of order, including those that
    /// owners consumed since the last `poll`. At most [`TcpConfig::max_held_buffers`](crate::TcpConfig::max_held_buffers) plus an
    /// eighth, and one more for each connection.
    pub fn held_buffers(&self) -> usize {
        self.shared.held.total()
    }

    /// Number of connections that occupy a slot, TIME-WAIT included.
    pub fn connection_count(&self) -> usize {
        self.slots.count()
    }

    /// Returns true if at most `most` connections occupy slots. Frees slots of connections in TIME-WAIT
    /// that have no owner as far as necessary.
    pub fn has_at_most(&mut self, most: usize) -> bool {
        while self.slots.count() > most {
            if !self.slots.evict_time_wait(&mut self.shared) {
                return false;
            }
        }
        true
    }

    /// Returns whether a listener has this address and port.
    pub fn listens_on(&self, local: SocketAddr) -> bool {
        self.shared.net.is_own_address(local.ip()) && self.shared.listeners.find(local).is_some()
    }
}
