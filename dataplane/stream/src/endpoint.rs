//! The single thread of the endpoint: ports, stacks, connections. Its shutdown is in `shutdown.rs`.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::Duration;

use dpdk::{MbufCache, Mempool, RxBatch};
use nix::sys::signalfd::SignalFd;
use siw_net::{ConnId, Instant};
use siw_tcp::{Events, StackStats};

use crate::StreamPlan;
use crate::connection::{StreamConnection, StreamContext};
use crate::pattern::StreamPattern;
use crate::record::{StreamRecord, StreamWriter};
use crate::report::{StreamReport, StreamTotals};
use crate::service::StreamService;
use siwd::datapath::batch_loop::BatchLoop;
use siwd::datapath::clock::TscClock;
use siwd::datapath::idle::{self, Idle};
use siwd::datapath::port::{WorkerPort, WorkerPortConfig};
use siwd::datapath::rx_frame;
use siwd::datapath::timer_hold::TimerHold;

/// Marks the user value of a listener, whose lower bits are the index of its offer. The user value
/// of a connection is its slot.
const LISTENER_USER: u64 = 1 << 63;
/// Maximum number of spare blocks for echoed bytes.
const SPARE_BLOCKS: usize = 4096;
/// Interval between checks of signals, the time limit and the pool.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Events that end a connection abnormally.
const FAILURES: Events = Events::RESET
    .union(Events::TIMED_OUT)
    .union(Events::REFUSED)
    .union(Events::UNREACHABLE);

/// Lifecycle of the endpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EndpointState {
    Running,
    /// Connections close in order, until this time. `acked`: bytes acknowledged when it was set.
    Closing {
        until: Instant,
        acked: u64,
    },
    Finished,
}

pub(super) struct Endpoint<'a> {
    pub(super) plan: &'a StreamPlan,
    device_names: String,
    pub(super) ports: Vec<WorkerPort<StreamRecord>>,
    connecting_port: usize,
    pub(super) connections: Vec<Option<StreamConnection>>,
    pub(super) free_slots: Vec<u32>,
    /// Connections that may have work.
    ready: VecDeque<u32>,
    /// Connections that leave received data unread, oldest first.
    pub(super) unread: VecDeque<(Instant, u32)>,
    pub(super) spare_blocks: Vec<Vec<u8>>,
    pub(super) pattern: StreamPattern,
    pub(super) cache: MbufCache,
    rx_batch: RxBatch,
    clock: TscClock,
    timer_hold: TimerHold,
    idle: Idle,
    signals: SignalFd,
    pub(super) totals: StreamTotals,
    /// Number of live connections opened by this endpoint.
    pub(super) active_count: u32,
    pub(super) state: EndpointState,
    /// The plan's time limit.
    pub(super) deadline: Option<Instant>,
    next_check: Instant,
    pub(super) least_free_buffers: u32,
    first_opened: Option<Instant>,
    last_transfer: Instant,
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(
        port_configs: Vec<WorkerPortConfig>,
        names: &[String],
        pool: &Mempool,
        plan: &'a StreamPlan,
        idle: Idle,
        signals: SignalFd,
    ) -> Result<Self, String> {
        let clock = TscClock::start();
        let now = clock.now();
        let ports = port_configs
            .into_iter()
            .map(|config| {
                let mut port = WorkerPort::new(config, now, |_| None)?;
                for (index, offer) in plan.offers.iter().enumerate() {
                    let user = LISTENER_USER | index as u64;
                    port.stack
                        .listen(None, offer.port, plan.backlog, user)
                        .map_err(|error| {
                            format!("{}:{}: {error}", offer.service.name(), offer.port)
                        })?;
                }
                Ok(port)
            })
            .collect::<Result<Vec<_>, String>>()?;
        let connecting_port = match &plan.device {
            Some(device) => names
                .iter()
                .position(|name| name == device)
                .ok_or_else(|| {
                    let names = names.join(", ");
                    format!("no device {device:?}: the devices are {names}")
                })?,
            None => 0,
        };
        Ok(Endpoint {
            plan,
            device_names: names.join(", "),
            ports,
            connecting_port,
            connections: Vec::new(),
            free_slots: Vec::new(),
            ready: VecDeque::new(),
            unread: VecDeque::new(),
            spare_blocks: Vec::new(),
            pattern: StreamPattern::new(plan.seed),
            cache: MbufCache::new(pool),
            rx_batch: RxBatch::new(),
            clock,
            timer_hold: TimerHold::default(),
            idle,
            signals,
            totals: StreamTotals::default(),
            active_count: 0,
            state: EndpointState::Running,
            deadline: plan
                .seconds
                .map(|seconds| now + Duration::from_secs_f64(seconds)),
            next_check: now,
            least_free_buffers: u32::MAX,
            first_opened: None,
            last_transfer: now,
        })
    }

    /// See [`super::run`].
    pub(super) fn run(&mut self) -> Result<(), String> {
        self.open_connections()?;
        self.run_until_finished();
        Ok(())
    }

    fn open_connections(&mut self) -> Result<(), String> {
        let Some(wanted) = &self.plan.connects else {
            return Ok(());
        };
        let now = self.clock.now();
        let port = self.connecting_port;
        for _ in 0..wanted.count {
            let slot = self.take_slot();
            let conn = self.ports[port]
                .stack
                .connect(now, wanted.source, None, wanted.to, u64::from(slot))
                .map_err(|error| format!("connecting to {}: {error}", wanted.to))?;
            let length = self.plan.bytes;
            let mut connection = StreamConnection::new(conn, port, wanted.service, length);
            connection.is_active = true;
            self.connections[slot as usize] = Some(connection);
            self.active_count += 1;
        }
        Ok(())
    }

    fn take_slot(&mut self) -> u32 {
        self.free_slots.pop().unwrap_or_else(|| {
            self.connections.push(None);
            (self.connections.len() - 1) as u32
        })
    }

    fn receive(&mut self, now: Instant, port: usize) -> bool {
        self.ports[port].take_burst(&mut self.rx_batch);
        let mut any = self.ports[port].receive(
            now,
            &mut self.rx_batch,
            &self.clock,
            &mut self.timer_hold,
            |_, _, mbuf, _| Some(mbuf),
        );
        while let Some((conn, user, events)) = self.ports[port].stack.next_event() {
            any = true;
            self.on_tcp_event(now, port, conn, user, events);
        }
        any
    }

    #[inline]
    fn on_tcp_event(&mut self, now: Instant, port: usize, conn: ConnId, user: u64, events: Events) {
        let mut slot = user as u32;
        if user & LISTENER_USER != 0 {
            slot = self.take_slot();
            let offer = self.plan.offers[(user & !LISTENER_USER) as usize];
            let connection = StreamConnection::new(conn, port, offer.service, self.plan.bytes);
            self.connections[slot as usize] = Some(connection);
            self.ports[port].stack.set_user(conn, u64::from(slot));
            self.totals.accepted += 1;
        }
        let connection = self.connections.get_mut(slot as usize);
        let Some(connection) = connection.and_then(Option::as_mut) else {
            return;
        };
        connection.note_events(events);
        if events.contains(Events::ACKED) {
            let (acked, spare_blocks) = (&mut self.totals.bytes_out, &mut self.spare_blocks);
            self.ports[port].stack.take_acked(conn, |record| {
                *acked += u64::from(record.len());
                keep_block(spare_blocks, record);
            });
            self.last_transfer = now;
        }
        if events.intersects(Events::ACCEPTED.union(Events::CONNECTED)) {
            self.on_opened(now, slot, events.contains(Events::CONNECTED));
        }
        if events.contains(Events::CLOSED) {
            self.on_ended(now, slot, events);
        } else {
            self.mark_ready(slot);
        }
    }

    #[cold]
    fn on_opened(&mut self, now: Instant, slot: u32, is_connected: bool) {
        self.first_opened.get_or_insert(now);
        self.totals.connected += u64::from(is_connected);
        let Some(connection) = &mut self.connections[slot as usize] else {
            return;
        };
        if !self.plan.pause.is_zero() {
            connection.unread_until = now + self.plan.pause;
            self.unread.push_back((connection.unread_until, slot));
        }
        if self.state != EndpointState::Running {
            connection.stop_sending();
        }
        if connection.is_active && connection.service == StreamService::Reset {
            connection.abort(&mut StreamContext {
                stack: &mut self.ports[connection.port].stack,
                pattern: self.pattern,
                blocks: &mut self.spare_blocks,
                now,
            });
        }
    }

    /// Handles the end of a connection; data received before it is still read. `how`: the events
    /// that ended it.
    #[cold]
    pub(super) fn on_ended(&mut self, now: Instant, slot: u32, how: Events) {
        if let Some(connection) = &mut self.connections[slot as usize] {
            connection.unread_until = now;
        }
        self.process_connection(now, slot);
        let Some(connection) = self.connections[slot as usize].take() else {
            return;
        };
        let stack = &mut self.ports[connection.port].stack;
        let spare_blocks = &mut self.spare_blocks;
        stack.take_unacked(connection.conn, |record| keep_block(spare_blocks, record));
        stack.release(now, connection.conn);
        let is_aborted = connection.is_aborted;
        self.totals.count_end(how, is_aborted);
        let has_closed = !how.intersects(FAILURES) && !is_aborted;
        self.totals.bad_streams += u64::from(has_closed && connection.has_wrong_length());
        self.active_count -= u32::from(connection.is_active);
        self.free_slots.push(slot);
    }

    #[inline]
    pub(super) fn mark_ready(&mut self, slot: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(slot as usize)
            && !connection.is_ready
        {
            connection.is_ready = true;
            self.ready.push_back(slot);
        }
    }

    fn process_ready(&mut self, now: Instant) -> bool {
        let count = self.ready.len();
        for _ in 0..count {
            let Some(slot) = self.ready.pop_front() else {
                break;
            };
            match &mut self.connections[slot as usize] {
                Some(connection) if connection.is_ready => connection.is_ready = false,
                // The slot is free or was reused.
                _ => continue,
            }
            if self.process_connection(now, slot) {
                self.mark_ready(slot);
            }
        }
        count > 0
    }

    /// Lets a connection read, queue and send. Returns true if more can be done at once.
    #[inline]
    fn process_connection(&mut self, now: Instant, slot: u32) -> bool {
        let Some(connection) = &mut self.connections[slot as usize] else {
            return false;
        };
        let port = &mut self.ports[connection.port];
        let progress = connection.process_data(&mut StreamContext {
            stack: &mut port.stack,
            pattern: self.pattern,
            blocks: &mut self.spare_blocks,
            now,
        });
        self.totals.bytes_in += progress.read;
        self.totals.bytes_checked += progress.checked;
        self.totals.bad_streams += u64::from(progress.found_bad);
        if progress.read > 0 {
            self.last_transfer = now;
        }
        let writer = StreamWriter {
            pattern: self.pattern,
        };
        let wall_time = self.clock.wall_time(now);
        port.flush_connection(now, connection.conn, &mut self.cache, writer, wall_time);
        progress.has_more
    }

    /// Returns true if SIGTERM or SIGINT arrived.
    pub(super) fn is_stop_requested(&self) -> bool {
        matches!(self.signals.read_signal(), Ok(Some(_)))
    }

    pub(super) fn free_buffers(&self) -> u32 {
        self.cache.pool().available_buffers() + self.cache.cached_buffers() as u32
    }

    fn sleep_limit(&self, now: Instant) -> Duration {
        let mut limit = idle::ports_sleep_limit(&self.ports, now, Instant::ZERO);
        if let Some(&(until, _)) = self.unread.front() {
            limit = limit.min(until.duration_since(now));
        }
        if let Some(deadline) = self.deadline {
            limit = limit.min(deadline.duration_since(now));
        }
        if self.state != EndpointState::Running || self.plan.connects.is_some() {
            limit = limit.min(CHECK_INTERVAL);
        }
        limit
    }

    pub(super) fn make_report(&self) -> StreamReport {
        let mut tcp = StackStats::default();
        for port in &self.ports {
            tcp.merge(&port.stack.stats());
        }
        let free = self.free_buffers();
        StreamReport {
            totals: self.totals.clone(),
            seconds: self.first_opened.map_or(0.0, |first| {
                self.last_transfer.duration_since(first).as_secs_f64()
            }),
            device: self.device_names.clone(),
            tcp,
            frames_in: self.ports.iter().map(|port| port.frames_received).sum(),
            frames_out: self.ports.iter().map(|port| port.output.frames_sent).sum(),
            buffers: [
                self.cache.pool().capacity(),
                free,
                self.least_free_buffers.min(free),
            ],
        }
    }
}

impl BatchLoop for Endpoint<'_> {
    fn is_finished(&self) -> bool {
        self.state == EndpointState::Finished
    }

    fn clock(&self) -> &TscClock {
        &self.clock
    }

    fn idle(&mut self) -> &mut Idle {
        &mut self.idle
    }

    fn run_batch(&mut self, now: Instant) -> bool {
        self.timer_hold.on_batch_start(now);
        let mut busy = false;
        for port in 0..self.ports.len() {
            busy |= self.receive(now, port);
        }
        while let Some(&(until, slot)) = self.unread.front()
            && until <= now
        {
            self.unread.pop_front();
            self.mark_ready(slot);
        }
        busy |= self.process_ready(now);
        let run_timers = !self.timer_hold.is_held(now);
        let writer = StreamWriter {
            pattern: self.pattern,
        };
        let wall_time = self.clock.wall_time(now);
        for port in &mut self.ports {
            busy |= port.poll_stack(now, run_timers, &mut self.cache, writer, wall_time);
        }
        rx_frame::recycle_dropped_frames(&mut self.cache);
        if self.next_check <= now {
            self.next_check = now + CHECK_INTERVAL;
            self.check_end(now);
        }
        busy
    }

    fn sleep(&mut self, now: Instant) {
        let limit = self.sleep_limit(now);
        if !idle::is_worth_sleeping(limit) {
            return;
        }
        if idle::arm_interrupts(&mut self.ports) && self.run_batch(now) {
            idle::disarm_interrupts(&mut self.ports);
            self.idle.note_busy(now);
            return;
        }
        self.cache.return_surplus();
        if idle::wait_for_wake(self.signals.as_fd(), &mut self.ports, limit) {
            let now = self.clock.now();
            self.next_check = now;
            self.idle.note_busy(now);
        }
        idle::disarm_interrupts(&mut self.ports);
    }
}

/// Keeps the memory of an echoed block for the next one.
fn keep_block(spare_blocks: &mut Vec<Vec<u8>>, record: StreamRecord) {
    if let StreamRecord::Block(block) = record
        && spare_blocks.len() < SPARE_BLOCKS
    {
        spare_blocks.push(block);
    }
}
