//! The endpoint's one thread: ports, stacks, connections.

use std::collections::VecDeque;
use std::time::Duration;

use dpdk::{MbufCache, Mempool, RxBatch, RxQueue};
use siw_tcp::{ConnId, Events, FrameInfo, Instant, Stack, StackStats};

use super::StreamPlan;
use super::flow::{Flow, FlowContext};
use super::idle::StreamIdle;
use super::pattern::StreamPattern;
use super::report::{StreamReport, StreamTotals};
use super::service::StreamService;
use super::sink::{Sink, StreamRecord};
use crate::capture::{CaptureHandle, Direction};
use crate::datapath::clock::Clock;
use crate::datapath::rx_frame::{self, RxFrame};
use crate::datapath::timer_hold::TimerHold;
use crate::link_traits::LinkTraits;
use crate::worker::WorkerPortConfig;
use crate::worker::sink::{PortOutput, TxPath};

/// Listeners' users; connections have their place in the table.
const OFFER: u64 = 1 << 63;
/// Blocks of echoed bytes that are kept for use again.
const BLOCKS: usize = 4096;
/// How long connections may take to close after the time is over.
const GRACE: Duration = Duration::from_secs(2);
/// Between looks at signals and the pool.
const LOOK: Duration = Duration::from_millis(1);

/// One port and the stack above it.
pub(super) struct StreamPort {
    pub rx: RxQueue,
    pub out: PortOutput,
    pub stack: Stack<RxFrame, StreamRecord>,
    pub link: LinkTraits,
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
    plan: &'a StreamPlan,
    name: String,
    ports: Vec<StreamPort>,
    connecting_port: usize,
    flows: Vec<Option<Flow>>,
    free: Vec<u32>,
    /// Flows that may have something to do.
    ready: VecDeque<u32>,
    /// Flows that leave what arrives unread, oldest first.
    unread: VecDeque<(Instant, u32)>,
    blocks: Vec<Vec<u8>>,
    pattern: StreamPattern,
    cache: MbufCache,
    batch: RxBatch,
    clock: Clock,
    hold: TimerHold,
    idle: StreamIdle,
    totals: StreamTotals,
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
        ports: Vec<WorkerPortConfig>,
        names: &[String],
        pool: &Mempool,
        plan: &'a StreamPlan,
        idle: StreamIdle,
    ) -> Result<Self, String> {
        let clock = Clock::new();
        let now = clock.now();
        let ports = ports
            .into_iter()
            .map(|l| {
                let (rx, tx) = l.queues.map_err(|_| "the port has no queue for us")?;
                let mut out = PortOutput::new(TxPath::Queue(tx), l.device as u32, l.link);
                out.tap = l.tap;
                let mut stack = Stack::new(l.stack, now).map_err(|e| e.to_string())?;
                for (i, o) in plan.offers.iter().enumerate() {
                    stack
                        .listen(None, o.port, plan.backlog, OFFER | i as u64)
                        .map_err(|e| format!("{}:{}: {e}", o.service.name(), o.port))?;
                }
                Ok(StreamPort {
                    rx,
                    out,
                    stack,
                    link: l.link,
                    received: 0,
                })
            })
            .collect::<Result<Vec<_>, String>>()?;
        let connecting_port = match &plan.device {
            Some(d) => names.iter().position(|n| n == d).ok_or_else(|| {
                format!("no device is called {d:?}: there is {}", names.join(", "))
            })?,
            None => 0,
        };
        Ok(Endpoint {
            plan,
            name: names.join(", "),
            ports,
            connecting_port,
            flows: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            unread: VecDeque::new(),
            blocks: Vec::new(),
            pattern: StreamPattern::new(plan.seed),
            cache: MbufCache::new(pool),
            batch: RxBatch::new(),
            clock,
            hold: TimerHold::default(),
            idle,
            totals: StreamTotals::default(),
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
            if self.run_batch(now) {
                self.idle.busy(now);
            } else if self.idle.may_sleep(now) {
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
            let conn = self.ports[self.connecting_port]
                .stack
                .connect(now, c.source, None, c.to, u64::from(slot))
                .map_err(|e| format!("connecting to {}: {e}", c.to))?;
            let mut flow = Flow::new(conn, self.connecting_port, c.service, self.plan.bytes);
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
    fn run_batch(&mut self, now: Instant) -> bool {
        self.hold.on_batch_start(now);
        let mut busy = false;
        for port in 0..self.ports.len() {
            busy |= self.receive(now, port);
        }
        while let Some(&(at, slot)) = self.unread.front()
            && at <= now
        {
            self.unread.pop_front();
            self.make_ready(slot);
        }
        busy |= self.step_ready(now);
        let timers = !self.hold.is_held(now);
        for l in &mut self.ports {
            let mut sink = sink(&mut l.out, &mut self.cache, self.pattern, &self.clock, now);
            if timers {
                l.stack.poll(now, &mut sink);
            } else {
                l.stack.poll_output(now, &mut sink);
            }
            busy |= !l.out.batch.is_empty() || !l.out.loopback.is_empty();
            l.out.burst();
        }
        rx_frame::recycle_dropped_frames(&mut self.cache);
        if self.look_at <= now {
            self.look_at = now + LOOK;
            self.look(now);
        }
        busy
    }

    fn receive(&mut self, now: Instant, index: usize) -> bool {
        let port = &mut self.ports[index];
        port.rx.rx_burst(&mut self.batch);
        let mut any = !self.batch.is_empty();
        if any {
            if self.batch.is_full() {
                self.hold.hold_timers(now);
            }
            port.received += self.batch.len() as u64;
            if let Some(tap) = port.out.tap.as_ref().filter(|_| !port.link.in_process) {
                capture(tap, port.out.interface, &self.batch, self.clock.wall(now));
            }
            let (trusted, port_checks) = (port.link.no_checksums, port.link.rx_checksum);
            self.batch.prefetch_packet(4);
            let frames = self.batch.drain().map(|mut m| {
                let checksum = rx_frame::checksum(&m, trusted, port_checks);
                let rss_hash = m.rss_hash().unwrap_or(0);
                m.clear_offload();
                (RxFrame::new(m), FrameInfo { checksum, rss_hash })
            });
            port.stack.receive_burst(now, frames);
        }
        if !port.out.loopback.is_empty() {
            any = true;
            port.stack.receive_burst(now, port.out.take_loopback());
        }
        while let Some((conn, user, events)) = self.ports[index].stack.next_event() {
            any = true;
            self.event(now, index, conn, user, events);
        }
        any
    }

    #[inline]
    fn event(&mut self, now: Instant, port: usize, conn: ConnId, user: u64, events: Events) {
        let mut slot = user as u32;
        if user & OFFER != 0 {
            slot = self.place();
            let service = self.plan.offers[(user & !OFFER) as usize].service;
            self.flows[slot as usize] = Some(Flow::new(conn, port, service, self.plan.bytes));
            self.ports[port].stack.set_user(conn, u64::from(slot));
            self.totals.accepted += 1;
        }
        let Some(flow) = self.flows.get_mut(slot as usize).and_then(Option::as_mut) else {
            return;
        };
        flow.note(events);
        if events.contains(Events::ACKED) {
            let (acked, blocks) = (&mut self.totals.bytes_out, &mut self.blocks);
            self.ports[port].stack.take_acked(conn, |p| {
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
        if flow.active && flow.service == StreamService::Reset {
            let port = &mut self.ports[flow.port];
            flow.abort(&mut FlowContext {
                stack: &mut port.stack,
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
        let port = &mut self.ports[flow.port];
        let blocks = &mut self.blocks;
        port.stack.take_unacked(flow.conn, |p| keep(blocks, p));
        port.stack.release(now, flow.conn);
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
        let port = &mut self.ports[flow.port];
        let step = flow.step(&mut FlowContext {
            stack: &mut port.stack,
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
            &mut port.out,
            &mut self.cache,
            self.pattern,
            &self.clock,
            now,
        );
        port.stack.flush(now, flow.conn, &mut sink);
        step.more
    }

    /// Now and then: signals, the time, the pool.
    #[cold]
    fn look(&mut self, now: Instant) {
        self.cache.return_surplus();
        let free = self.cache.pool().available_buffers() + self.cache.cached_buffers() as u32;
        self.least_free = self.least_free.min(free);
        let open = self.flows.len() - self.free.len();
        match self.phase {
            Phase::Running => {
                let late = self.deadline.is_some_and(|d| d <= now);
                if late || self.idle.stop_requested() {
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
                let owes = |l: &StreamPort| l.stack.has_output() || !l.out.batch.is_empty();
                if open == 0 && !self.ports.iter().any(owes) || self.idle.stop_requested() {
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
                self.ports[f.port].stack.close(now, f.conn);
            }
            self.make_ready(slot as u32);
        }
    }

    fn abort_all(&mut self, now: Instant) {
        for slot in 0..self.flows.len() {
            if let Some(f) = &mut self.flows[slot] {
                let stack = &mut self.ports[f.port].stack;
                f.abort(&mut FlowContext {
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
        let mut limit = StreamIdle::limit(&self.ports, now);
        if let Some(&(at, _)) = self.unread.front() {
            limit = limit.min(at.duration_since(now));
        }
        if let Some(at) = self.deadline {
            limit = limit.min(at.duration_since(now));
        }
        if self.phase != Phase::Running || self.plan.connects.is_some() {
            limit = limit.min(LOOK);
        }
        if limit < Duration::from_micros(5) {
            return;
        }
        if StreamIdle::arm(&mut self.ports) && self.run_batch(now) {
            StreamIdle::disarm(&mut self.ports);
            self.idle.busy(now);
            return;
        }
        self.cache.return_surplus();
        if self.idle.sleep(&self.ports, limit) {
            let now = self.clock.now();
            self.look_at = now;
            self.idle.busy(now);
        }
        StreamIdle::disarm(&mut self.ports);
    }

    pub(super) fn report(&self) -> StreamReport {
        let mut tcp = StackStats::default();
        for l in &self.ports {
            tcp.merge(l.stack.stats());
        }
        let free = self.cache.pool().available_buffers() + self.cache.cached_buffers() as u32;
        StreamReport {
            totals: self.totals.clone(),
            seconds: self
                .first
                .map_or(0.0, |f| self.last.duration_since(f).as_secs_f64()),
            device: self.name.clone(),
            tcp,
            frames_in: self.ports.iter().map(|l| l.received).sum(),
            frames_out: self.ports.iter().map(|l| l.out.sent).sum(),
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

fn keep(blocks: &mut Vec<Vec<u8>>, piece: StreamRecord) {
    if let StreamRecord::Block(b) = piece
        && blocks.len() < BLOCKS
    {
        blocks.push(b);
    }
}

#[inline]
fn sink<'a>(
    out: &'a mut PortOutput,
    cache: &'a mut MbufCache,
    pattern: StreamPattern,
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
