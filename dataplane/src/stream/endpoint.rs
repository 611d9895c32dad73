//! The endpoint's one thread: ports, stacks, connections.

use std::collections::VecDeque;
use std::time::Duration;

use dpdk::{MbufCache, Mempool, RxBatch, RxQueue};
use siw_tcp::{ConnId, Events, FrameInfo, Instant, Stack, Stats};

use super::Plan;
use super::doze::Doze;
use super::flow::{Around, Flow};
use super::pattern::Pattern;
use super::report::{Report, Totals};
use super::service::Service;
use super::sink::{Piece, Sink};
use crate::capture::{CaptureHandle, Direction};
use crate::worker::LaneConfig;
use crate::worker::clock::Clock;
use crate::worker::frame::{self, RxFrame};
use crate::worker::sink::{Exit, Output};
use crate::worker::timer_hold::TimerHold;

/// Listeners' users; connections have their place in the table.
const OFFER: u64 = 1 << 63;
/// Blocks of echoed bytes that are kept for use again.
const BLOCKS: usize = 4096;
/// How long connections may take to close after the time is over.
const GRACE: Duration = Duration::from_secs(2);
/// Between looks at signals and the pool.
const LOOK: Duration = Duration::from_millis(1);

/// One port and the stack above it.
pub(super) struct Lane {
    pub rx: RxQueue,
    pub out: Output,
    pub stack: Stack<RxFrame, Piece>,
    pub pair: bool,
    pub rx_interrupt: bool,
    trusted: bool,
    rx_checksum: bool,
    received: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// Connections close in order until then.
    Closing(Instant),
    Over,
}

pub(super) struct Endpoint<'a> {
    plan: &'a Plan,
    name: String,
    lanes: Vec<Lane>,
    connecting_lane: usize,
    flows: Vec<Option<Flow>>,
    free: Vec<u32>,
    /// Flows that may have something to do.
    ready: VecDeque<u32>,
    /// Flows that leave what arrives unread, oldest first.
    unread: VecDeque<(Instant, u32)>,
    blocks: Vec<Vec<u8>>,
    pattern: Pattern,
    cache: MbufCache,
    batch: RxBatch,
    clock: Clock,
    hold: TimerHold,
    doze: Doze,
    totals: Totals,
    /// Connections of ours that are not over.
    ours: u32,
    phase: Phase,
    deadline: Option<Instant>,
    look_at: Instant,
    least_free: u32,
    first: Option<Instant>,
    last: Instant,
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(
        lanes: Vec<LaneConfig>,
        names: &[String],
        pool: &Mempool,
        plan: &'a Plan,
        doze: Doze,
    ) -> Result<Self, String> {
        let clock = Clock::new();
        let now = clock.now();
        let lanes = lanes
            .into_iter()
            .map(|l| {
                let (rx, tx) = l.queues.map_err(|_| "the port has no queue for us")?;
                let mut out = Output::new(Exit::Port(tx), l.device as u32);
                out.multi_segs = l.multi_segs;
                out.offload = l.tx_offload;
                out.ip_checksum = l.tx_ip_checksum;
                out.tap = l.tap;
                let mut stack = Stack::new(l.stack, now).map_err(|e| e.to_string())?;
                for (i, o) in plan.offers.iter().enumerate() {
                    stack
                        .listen(None, o.port, plan.backlog, OFFER | i as u64)
                        .map_err(|e| format!("{}:{}: {e}", o.service.name(), o.port))?;
                }
                Ok(Lane {
                    rx,
                    out,
                    stack,
                    pair: l.pair,
                    rx_interrupt: l.rx_interrupt,
                    trusted: l.trusted,
                    rx_checksum: l.rx_checksum,
                    received: 0,
                })
            })
            .collect::<Result<Vec<_>, String>>()?;
        let connecting_lane = match &plan.device {
            Some(d) => names.iter().position(|n| n == d).ok_or_else(|| {
                format!("no device is called {d:?}: there is {}", names.join(", "))
            })?,
            None => 0,
        };
        Ok(Endpoint {
            plan,
            name: names.join(", "),
            lanes,
            connecting_lane,
            flows: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            unread: VecDeque::new(),
            blocks: Vec::new(),
            pattern: Pattern::new(plan.seed),
            cache: MbufCache::new(pool),
            batch: RxBatch::new(),
            clock,
            hold: TimerHold::default(),
            doze,
            totals: Totals::default(),
            ours: 0,
            phase: Phase::Running,
            deadline: plan.seconds.map(|s| now + Duration::from_secs_f64(s)),
            look_at: now,
            least_free: u32::MAX,
            first: None,
            last: now,
        })
    }

    /// See [`super::run`].
    pub(super) fn run(&mut self) -> Result<(), String> {
        self.connect()?;
        while self.phase != Phase::Over {
            let now = self.clock.now();
            if self.turn(now) {
                self.doze.busy(now);
            } else if self.doze.may_sleep(now) {
                self.sleep(now);
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    fn connect(&mut self) -> Result<(), String> {
        let Some(c) = &self.plan.connects else {
            return Ok(());
        };
        let now = self.clock.now();
        for _ in 0..c.count {
            let slot = self.place();
            let conn = self.lanes[self.connecting_lane]
                .stack
                .connect(now, c.source, None, c.to, u64::from(slot))
                .map_err(|e| format!("connecting to {}: {e}", c.to))?;
            let mut flow = Flow::new(conn, self.connecting_lane, c.service, self.plan.bytes);
            flow.active = true;
            self.flows[slot as usize] = Some(flow);
            self.ours += 1;
        }
        Ok(())
    }

    fn place(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.flows.push(None);
            (self.flows.len() - 1) as u32
        })
    }

    /// One batch. True when anything was done.
    fn turn(&mut self, now: Instant) -> bool {
        self.hold.turn(now);
        let mut busy = false;
        for lane in 0..self.lanes.len() {
            busy |= self.receive(now, lane);
        }
        while let Some(&(at, slot)) = self.unread.front()
            && at <= now
        {
            self.unread.pop_front();
            self.make_ready(slot);
        }
        busy |= self.step_ready(now);
        let timers = !self.hold.held(now);
        for l in &mut self.lanes {
            let mut sink = sink(&mut l.out, &mut self.cache, self.pattern, &self.clock, now);
            if timers {
                l.stack.poll(now, &mut sink);
            } else {
                l.stack.poll_owed(now, &mut sink);
            }
            busy |= !l.out.batch.is_empty() || !l.out.turned.is_empty();
            l.out.burst();
        }
        frame::recycle(&mut self.cache);
        if self.look_at <= now {
            self.look_at = now + LOOK;
            self.look(now);
        }
        busy
    }

    fn receive(&mut self, now: Instant, index: usize) -> bool {
        let lane = &mut self.lanes[index];
        lane.rx.rx_burst(&mut self.batch);
        let mut any = !self.batch.is_empty();
        if any {
            if self.batch.is_full() {
                self.hold.hold(now);
            }
            lane.received += self.batch.len() as u64;
            if let Some(tap) = lane.out.tap.as_ref().filter(|_| !lane.pair) {
                capture(tap, lane.out.interface, &self.batch, self.clock.wall(now));
            }
            let (trusted, port_checks) = (lane.trusted, lane.rx_checksum);
            self.batch.prefetch(4);
            let frames = self.batch.drain().map(|mut m| {
                let checksum = frame::checksum(&m, trusted, port_checks);
                let rss_hash = m.rss_hash().unwrap_or(0);
                m.clear_offload();
                (RxFrame::new(m), FrameInfo { checksum, rss_hash })
            });
            lane.stack.receive(now, frames);
        }
        if !lane.out.turned.is_empty() {
            any = true;
            lane.stack.receive(now, lane.out.take_turned());
        }
        while let Some((conn, user, events)) = self.lanes[index].stack.next_event() {
            any = true;
            self.event(now, index, conn, user, events);
        }
        any
    }

    #[inline]
    fn event(&mut self, now: Instant, lane: usize, conn: ConnId, user: u64, events: Events) {
        let mut slot = user as u32;
        if user & OFFER != 0 {
            slot = self.place();
            let service = self.plan.offers[(user & !OFFER) as usize].service;
            self.flows[slot as usize] = Some(Flow::new(conn, lane, service, self.plan.bytes));
            self.lanes[lane].stack.set_user(conn, u64::from(slot));
            self.totals.accepted += 1;
        }
        let Some(flow) = self.flows.get_mut(slot as usize).and_then(Option::as_mut) else {
            return;
        };
        flow.note(events);
        if events.contains(Events::ACKED) {
            let (acked, blocks) = (&mut self.totals.bytes_out, &mut self.blocks);
            self.lanes[lane].stack.take_acked(conn, |p| {
                *acked += u64::from(p.len());
                keep(blocks, p);
            });
            self.last = now;
        }
        if events.intersects(Events::ACCEPTED.union(Events::CONNECTED)) {
            self.opened(now, slot, events.contains(Events::CONNECTED));
        }
        if events.contains(Events::CLOSED) {
            self.over(now, slot, events);
        } else {
            self.make_ready(slot);
        }
    }

    #[cold]
    fn opened(&mut self, now: Instant, slot: u32, connected: bool) {
        self.first.get_or_insert(now);
        self.totals.connected += u64::from(connected);
        let Some(flow) = &mut self.flows[slot as usize] else {
            return;
        };
        if !self.plan.pause.is_zero() {
            flow.unread_until = now + self.plan.pause;
            self.unread.push_back((flow.unread_until, slot));
        }
        if self.phase != Phase::Running {
            flow.stop_sending();
        }
        if flow.active && flow.service == Service::Reset {
            let lane = &mut self.lanes[flow.lane];
            flow.abort(&mut Around {
                stack: &mut lane.stack,
                pattern: self.pattern,
                blocks: &mut self.blocks,
                now,
            });
        }
    }

    /// The connection is over: what arrived before is still read.
    #[cold]
    fn over(&mut self, now: Instant, slot: u32, how: Events) {
        if let Some(f) = &mut self.flows[slot as usize] {
            f.unread_until = now;
        }
        self.step(now, slot);
        let Some(flow) = self.flows[slot as usize].take() else {
            return;
        };
        let lane = &mut self.lanes[flow.lane];
        let blocks = &mut self.blocks;
        lane.stack.take_unacked(flow.conn, |p| keep(blocks, p));
        lane.stack.release(now, flow.conn);
        self.totals.ended(how, flow.aborted);
        let failed = how.intersects(FAILURES);
        self.totals.bad_streams += u64::from(!failed && !flow.aborted && flow.wrong_length());
        self.ours -= u32::from(flow.active);
        self.free.push(slot);
    }

    #[inline]
    fn make_ready(&mut self, slot: u32) {
        if let Some(Some(f)) = self.flows.get_mut(slot as usize)
            && !f.ready
        {
            f.ready = true;
            self.ready.push_back(slot);
        }
    }

    fn step_ready(&mut self, now: Instant) -> bool {
        let n = self.ready.len();
        for _ in 0..n {
            let Some(slot) = self.ready.pop_front() else {
                break;
            };
            match &mut self.flows[slot as usize] {
                Some(f) if f.ready => f.ready = false,
                // Its place is another's now, or nobody's.
                _ => continue,
            }
            if self.step(now, slot) {
                self.make_ready(slot);
            }
        }
        n > 0
    }

    /// Lets a connection read and queue, and sends.
    #[inline]
    fn step(&mut self, now: Instant, slot: u32) -> bool {
        let Some(flow) = &mut self.flows[slot as usize] else {
            return false;
        };
        let lane = &mut self.lanes[flow.lane];
        let step = flow.step(&mut Around {
            stack: &mut lane.stack,
            pattern: self.pattern,
            blocks: &mut self.blocks,
            now,
        });
        self.totals.bytes_in += step.read;
        self.totals.bytes_checked += step.checked;
        self.totals.bad_streams += u64::from(step.bad);
        if step.read > 0 {
            self.last = now;
        }
        let mut sink = sink(
            &mut lane.out,
            &mut self.cache,
            self.pattern,
            &self.clock,
            now,
        );
        lane.stack.flush(now, flow.conn, &mut sink);
        step.more
    }

    /// Now and then: signals, the time, the pool.
    #[cold]
    fn look(&mut self, now: Instant) {
        self.cache.flush();
        let free = self.cache.pool().available() + self.cache.cached() as u32;
        self.least_free = self.least_free.min(free);
        let open = self.flows.len() - self.free.len();
        match self.phase {
            Phase::Running => {
                let late = self.deadline.is_some_and(|d| d <= now);
                if late || self.doze.told_to_stop() {
                    self.wind_up(now);
                } else if self.plan.connects.is_some()
                    && self.ours == 0
                    && self.plan.offers.is_empty()
                {
                    self.phase = Phase::Closing(now + GRACE);
                }
            }
            Phase::Closing(until) => {
                if open > 0 && until <= now {
                    self.abort_all(now);
                    self.phase = Phase::Closing(Instant(u64::MAX));
                }
                let owes = |l: &Lane| l.stack.owes() || !l.out.batch.is_empty();
                if open == 0 && !self.lanes.iter().any(owes) || self.doze.told_to_stop() {
                    self.phase = Phase::Over;
                }
            }
            Phase::Over => {}
        }
    }

    /// No more connections, no more of the pattern; those that are open close in order.
    fn wind_up(&mut self, now: Instant) {
        self.phase = Phase::Closing(now + GRACE);
        self.unread.clear();
        for slot in 0..self.flows.len() {
            let Some(f) = &mut self.flows[slot] else {
                continue;
            };
            f.unread_until = now;
            f.stop_sending();
            if !f.service.sends() && !f.closing {
                f.closing = true;
                self.lanes[f.lane].stack.close(now, f.conn);
            }
            self.make_ready(slot as u32);
        }
    }

    fn abort_all(&mut self, now: Instant) {
        for slot in 0..self.flows.len() {
            if let Some(f) = &mut self.flows[slot] {
                let stack = &mut self.lanes[f.lane].stack;
                f.abort(&mut Around {
                    stack,
                    pattern: self.pattern,
                    blocks: &mut self.blocks,
                    now,
                });
                self.over(now, slot as u32, Events::NONE);
            }
        }
    }

    fn sleep(&mut self, now: Instant) {
        let mut limit = Doze::limit(&self.lanes, now);
        if let Some(&(at, _)) = self.unread.front() {
            limit = limit.min(at.since(now));
        }
        if let Some(at) = self.deadline {
            limit = limit.min(at.since(now));
        }
        if self.phase != Phase::Running || self.plan.connects.is_some() {
            limit = limit.min(LOOK);
        }
        if limit < Duration::from_micros(5) {
            return;
        }
        if Doze::arm(&mut self.lanes) && self.turn(now) {
            Doze::disarm(&mut self.lanes);
            self.doze.busy(now);
            return;
        }
        self.cache.flush();
        if self.doze.sleep(&self.lanes, limit) {
            let now = self.clock.now();
            self.look_at = now;
            self.doze.busy(now);
        }
        Doze::disarm(&mut self.lanes);
    }

    pub(super) fn report(&self) -> Report {
        let mut tcp = Stats::default();
        for l in &self.lanes {
            tcp.merge(l.stack.stats());
        }
        let free = self.cache.pool().available() + self.cache.cached() as u32;
        Report {
            totals: self.totals.clone(),
            seconds: self.first.map_or(0.0, |f| self.last.since(f).as_secs_f64()),
            device: self.name.clone(),
            tcp,
            frames_in: self.lanes.iter().map(|l| l.received).sum(),
            frames_out: self.lanes.iter().map(|l| l.out.sent).sum(),
            buffers: [
                self.cache.pool().capacity(),
                free,
                self.least_free.min(free),
            ],
        }
    }
}

/// Ends that are no orderly close.
const FAILURES: Events = Events::RESET
    .union(Events::TIMED_OUT)
    .union(Events::REFUSED)
    .union(Events::UNREACHABLE);

fn keep(blocks: &mut Vec<Vec<u8>>, piece: Piece) {
    if let Piece::Block(b) = piece
        && blocks.len() < BLOCKS
    {
        blocks.push(b);
    }
}

#[inline]
fn sink<'a>(
    out: &'a mut Output,
    cache: &'a mut MbufCache,
    pattern: Pattern,
    clock: &Clock,
    now: Instant,
) -> Sink<'a> {
    Sink {
        out,
        cache,
        pattern,
        wall: clock.wall(now),
        frame: None,
    }
}

#[cold]
fn capture(tap: &CaptureHandle, interface: u32, batch: &RxBatch, wall: u64) {
    for i in 0..batch.len() {
        let Some(m) = batch.peek(i) else { break };
        tap.record_frame(interface, Direction::Inbound, wall, false, |v| {
            for s in m.segments() {
                v.extend_from_slice(s);
            }
        });
    }
}
