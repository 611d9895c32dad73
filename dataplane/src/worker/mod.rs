//! A worker: one pinned thread that owns a queue of every port, the TCP stacks above them,
//! and the queue pairs above those.
//!
//! ```text
//!            commands (control thread)          doorbells (clients)
//!                    |                               |
//!  rx_burst -> Stack::receive_burst -> events -> QueuePair::receive -> placement, CQEs
//!                                   |                |
//!                                acked          ready queue pairs
//!                                                    |
//!  tx_burst <- Sink <- Stack::flush/poll <- push_record <- QueuePair::next_record
//! ```
//! One turn of [`Worker::run_batch`] is one batch: the clock is read once, nothing is scanned,
//! nothing is allocated in steady state.

mod commands;
pub mod completion_queues;
mod conn_owner;
mod connect;
mod connection;
mod ext_bufs;
pub mod forward;
mod idle;
mod listen;
pub mod messages;
mod modify;
mod pending_connections;
pub mod shared_receive_queues;
pub(crate) mod sink;
pub mod worker_qp;

use std::collections::HashMap;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use dpdk::{BURST, MbufCache, RxBatch, RxQueue, TxQueue};
use siw_iwarp::mpa::MpaConfig;
use siw_iwarp::{RdmapState, TxRecord};
use siw_memory::KeyReader;
use siw_shm::DoorbellConsumer;
use siw_shm::doorbell::SleepFlag;
use siw_tcp::{Events, FrameInfo, Instant, ListenerId, Stack, WorkerSteering};

use crate::capture::{CaptureHandle, Direction};
use crate::config::IdlePolicy;
use crate::datapath::clock::Clock;
use crate::datapath::rx_frame::{self, RxFrame};
use crate::datapath::timer_hold::TimerHold;
use crate::ids::{ClientId, CmListenerId, Qpn};
use crate::link_traits::LinkTraits;
use completion_queues::CqTable;
use conn_owner::ConnOwner;
use ext_bufs::ExtBufRefs;
use forward::{ForwardedFrame, Forwarder, ProxyTx};
use idle::Idle;
use messages::{Command, Event, WorkerStats};
use pending_connections::PendingConnections;
use shared_receive_queues::SrqTable;
use sink::{BuildFailure, PortOutput, Sink, TxPath};
use worker_qp::{Env, Phase, QpTable, RingMisuse, Scratch, WorkerQp};

/// Frames that one queue pair may queue in one turn; then the next has its turn.
const RECORDS_PER_BATCH: u32 = 64;
/// Doorbells taken from one client in one turn.
const DOORBELLS_PER_BATCH: usize = 64;
/// Turns between looks at whether the pool runs dry.
const CACHE_FLUSH_INTERVAL: u64 = 1024;
/// Messages with referenced memory in flight per worker; beyond it payload is copied.
const EXT_BUF_TRACKERS: usize = 65_536;

/// Both directions of the queue between a worker and the control thread.
pub struct Mailbox {
    pub commands: ArrayQueue<Command>,
    pub events: ArrayQueue<Event>,
    /// Frames that other workers hand over, see `forward.rs`.
    pub frames: ArrayQueue<ForwardedFrame>,
    /// Wakes the worker.
    pub worker_wake: OwnedFd,
    /// The worker sleeps; else it looks at `commands` by itself.
    pub worker_asleep: SleepFlag,
    /// Wakes the control thread; shared by all workers.
    pub control_wake: Arc<OwnedFd>,
    /// The control thread sleeps; else it looks at `events` by itself.
    pub control_asleep: Arc<SleepFlag>,
}

impl Mailbox {
    /// After something was put into one of the worker's queues.
    #[inline]
    pub fn wake_worker(&self) {
        if self.worker_asleep.must_wake() {
            let _ = nix::unistd::write(&self.worker_wake, &1u64.to_ne_bytes());
        }
    }
}

/// What a worker is given of one device.
pub struct WorkerPortConfig {
    pub device: usize,
    /// The worker's queues of the port; or the worker that receives and sends for this one,
    /// when the port has too few.
    pub queues: Result<(RxQueue, TxQueue), usize>,
    pub stack: siw_tcp::StackConfig,
    pub mpa: MpaConfig,
    pub accept_timeout: std::time::Duration,
    pub link: LinkTraits,
    pub tap: Option<CaptureHandle>,
}

/// Everything a worker thread is started with.
pub struct WorkerConfig {
    pub index: usize,
    pub core: usize,
    pub idle: IdlePolicy,
    pub spin: std::time::Duration,
    pub ports: Vec<WorkerPortConfig>,
    pub pool: dpdk::Mempool,
    pub keys: KeyReader,
    pub sleeping: SleepFlag,
    pub mailbox: Arc<Mailbox>,
    /// The mailboxes of all workers, this one's among them.
    pub all: Arc<[Arc<Mailbox>]>,
}

/// One queue of one device, and the stack above it.
struct WorkerPort {
    device: usize,
    rx: Option<RxQueue>,
    /// Sorts received frames by worker.
    home: Option<WorkerSteering>,
    /// Frames that other workers received for this one.
    handed: Vec<(RxFrame, FrameInfo)>,
    out: PortOutput,
    stack: Stack<RxFrame, TxRecord>,
    mpa: MpaConfig,
    accept_timeout: std::time::Duration,
    link: LinkTraits,
    received: u64,
    /// TCP's listeners by the daemon's numbers.
    listeners: Vec<(CmListenerId, ListenerId)>,
    /// Of listeners that do something in another way than the device.
    setups: HashMap<CmListenerId, listen::ListenerSetup>,
}

struct WorkerClient {
    client: ClientId,
    doorbells: DoorbellConsumer,
    wake: Arc<OwnedFd>,
}

/// A pinned thread's state.
pub struct Worker {
    index: usize,
    clock: Clock,
    ports: Vec<WorkerPort>,
    clients: Vec<WorkerClient>,
    qps: QpTable,
    pending: PendingConnections,
    cqs: CqTable,
    srqs: SrqTable,
    ext_bufs: ExtBufRefs,
    scratch: Scratch,
    cache: MbufCache,
    keys: KeyReader,
    /// Queue pairs that may have something to send.
    ready: VecDeque<u32>,
    /// Queue pairs that wait for a port to release buffers.
    releasing: Vec<u32>,
    failures: Vec<BuildFailure>,
    /// FPDUs placed before their turn.
    placed_out_of_order: u64,
    /// Connection set-up and close timers: the time, and whose.
    timers: BTreeMap<(Instant, u64), ()>,
    mailbox: Arc<Mailbox>,
    /// Events that the full mailbox did not take.
    backlog: VecDeque<Event>,
    forward: Forwarder,
    /// When another worker last handed over a frame.
    handed_at: Instant,
    events_waiting: bool,
    idle: Idle,
    batch: RxBatch,
    iterations: u64,
    timer_hold: TimerHold,
    stopping: Option<Instant>,
    stopped: bool,
}

impl Worker {
    /// Builds a worker on its own thread.
    ///
    /// # Errors
    /// A device's stack refuses its configuration, or the idle machinery its descriptors.
    pub fn new(config: WorkerConfig) -> Result<Worker, String> {
        let clock = Clock::new();
        let now = clock.now();
        let idle = Idle::new(config.idle, config.spin, config.sleeping, &config.mailbox)
            .map_err(|e| format!("worker {}: {e}", config.index))?;
        let ports = config
            .ports
            .into_iter()
            .map(|l| {
                let (rx, exit) = match l.queues {
                    Ok((rx, tx)) => (Some(rx), TxPath::Queue(tx)),
                    Err(w) => {
                        let to = config.all.get(w).ok_or("no such worker")?;
                        (None, TxPath::Proxy(ProxyTx::new(l.device, to.clone())))
                    }
                };
                let mut out = PortOutput::new(exit, l.device as u32, l.link);
                out.tap = l.tap;
                Ok(WorkerPort {
                    device: l.device,
                    rx,
                    home: l.stack.steering.clone().filter(|_| l.link.needs_steering()),
                    handed: Vec::with_capacity(BURST),
                    out,
                    stack: Stack::new(l.stack, now).map_err(|e| e.to_string())?,
                    mpa: l.mpa,
                    accept_timeout: l.accept_timeout,
                    link: l.link,
                    received: 0,
                    listeners: Vec::new(),
                    setups: HashMap::new(),
                })
            })
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Worker {
            index: config.index,
            clock,
            ports,
            clients: Vec::new(),
            qps: QpTable::default(),
            pending: PendingConnections::default(),
            cqs: CqTable::default(),
            srqs: SrqTable::default(),
            ext_bufs: ExtBufRefs::new(EXT_BUF_TRACKERS),
            scratch: Scratch::default(),
            cache: MbufCache::new(&config.pool),
            keys: config.keys,
            ready: VecDeque::new(),
            releasing: Vec::new(),
            failures: Vec::new(),
            placed_out_of_order: 0,
            timers: BTreeMap::new(),
            mailbox: config.mailbox,
            backlog: VecDeque::new(),
            forward: Forwarder::new(config.index, config.all),
            handed_at: Instant::ZERO,
            events_waiting: false,
            idle,
            batch: RxBatch::new(),
            iterations: 0,
            timer_hold: TimerHold::default(),
            stopping: None,
            stopped: false,
        })
    }

    /// Runs until [`Command::Stop`] is done.
    pub fn run(&mut self) {
        while !self.stopped {
            let now = self.clock.now();
            let busy = self.run_batch(now);
            if busy {
                self.idle.busy(now);
            } else if !self.stopped && self.idle.may_sleep(now) {
                self.sleep(now);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// One batch. True when anything was done.
    fn run_batch(&mut self, now: Instant) -> bool {
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations.is_multiple_of(CACHE_FLUSH_INTERVAL) {
            self.cache.return_surplus();
        }
        self.timer_hold.on_batch_start(now);
        let mut busy = self.take_commands(now);
        busy |= self.take_forwarded_frames(now);
        for port in 0..self.ports.len() {
            busy |= self.receive(now, port);
        }
        // While they are warm: what is sent now takes them.
        rx_frame::recycle_dropped_frames(&mut self.cache);
        busy |= self.take_doorbells(now);
        busy |= self.send_from_ready(now);
        let timers = !self.timer_hold.is_held(now);
        for port in 0..self.ports.len() {
            busy |= self.poll_port(now, port, timers);
        }
        if !self.failures.is_empty() {
            self.build_failures(now);
        }
        if !self.releasing.is_empty() {
            self.poll_releases(now);
        }
        self.expire_timers(now);
        self.cqs.notify(now);
        if !self.cqs.overflows.is_empty() {
            self.overflows(now);
        }
        while let Some((client, srq)) = self.srqs.low.pop() {
            self.post_event(Event::SrqLimit { client, srq });
        }
        rx_frame::recycle_dropped_frames(&mut self.cache);
        if self.events_waiting {
            self.deliver_events();
        }
        self.keys.report_quiescent();
        busy
    }

    /// Takes a burst from a port (and the loopback frames), and reports what TCP makes of it.
    #[inline]
    fn receive(&mut self, now: Instant, index: usize) -> bool {
        let port = &mut self.ports[index];
        if let Some(rx) = &mut port.rx {
            rx.rx_burst(&mut self.batch);
        }
        let mut any = !self.batch.is_empty();
        if any {
            if self.batch.is_full() {
                self.timer_hold.hold_timers(now);
            }
            port.received += self.batch.len() as u64;
            if port.out.tap.is_some() && !port.link.in_process {
                capture(port, &self.batch, self.clock.wall(now));
            }
            let trusted = port.link.no_checksums;
            let port_checks = port.link.rx_checksum;
            self.batch.prefetch_packet(4);
            let home = port.home.as_ref();
            let device = port.device;
            let frames = self.batch.drain().filter_map(|mut m| {
                let checksum = rx_frame::checksum(&m, trusted, port_checks);
                let rss_hash = m.rss_hash().unwrap_or(0);
                m.clear_offload();
                if let Some(h) = home {
                    m = self
                        .forward
                        .sort(&h.steering, device, m, checksum, &mut self.cache)?;
                }
                Some((RxFrame::new(m), FrameInfo { checksum, rss_hash }))
            });
            port.stack.receive_burst(now, frames);
            self.forward.wake();
        }
        if !port.handed.is_empty() {
            any = true;
            port.stack.receive_burst(now, port.handed.drain(..));
        }
        if !port.out.loopback.is_empty() {
            any = true;
            port.stack.receive_burst(now, port.out.take_loopback());
        }
        while let Some((conn, user, events)) = self.ports[index].stack.next_event() {
            any = true;
            self.on_tcp_event(now, index, conn, ConnOwner::from(user), events);
        }
        any
    }

    /// Queue pairs whose doorbell was rung become ready.
    #[inline]
    fn take_doorbells(&mut self, now: Instant) -> bool {
        let mut any = false;
        for i in 0..self.clients.len() {
            let client = self.clients[i].client;
            for _ in 0..DOORBELLS_PER_BATCH {
                let Some(qpn) = self.clients[i].doorbells.pop() else {
                    break;
                };
                any = true;
                let Some(slot) = self.qps.find(Qpn(qpn)) else {
                    continue;
                };
                let Some(qp) = self.qps.get_mut(slot).filter(|q| q.client == client) else {
                    continue;
                };
                qp.rings.sq.clear_pending();
                if matches!(qp.phase, Phase::Over) || qp.qp.state() == RdmapState::Error {
                    self.flush_over(now, slot);
                } else {
                    self.make_ready(slot);
                }
            }
        }
        any
    }

    #[inline]
    fn make_ready(&mut self, slot: u32) {
        if let Some(qp) = self.qps.get_mut(slot)
            && !qp.ready
        {
            qp.ready = true;
            self.ready.push_back(slot);
        }
    }

    /// Lets every ready queue pair send, each its share.
    #[inline]
    fn send_from_ready(&mut self, now: Instant) -> bool {
        let n = self.ready.len();
        for _ in 0..n {
            let Some(slot) = self.ready.pop_front() else {
                break;
            };
            let Some(qp) = self.qps.get_mut(slot) else {
                continue;
            };
            qp.ready = false;
            if matches!(qp.phase, Phase::Running) && self.send_from(now, slot) {
                self.make_ready(slot);
            }
        }
        n > 0
    }

    /// Queues records as far as TCP has room, and sends. True when more could follow at once.
    #[inline]
    fn send_from(&mut self, now: Instant, slot: u32) -> bool {
        let Some(qp) = self.qps.get_mut(slot) else {
            return false;
        };
        let Some(conn) = qp.conn else { return false };
        let port = &mut self.ports[qp.port];
        let mut env = Env {
            rings: &mut qp.rings,
            keys: &self.keys,
            cqs: &mut self.cqs,
            srqs: &mut self.srqs,
            ext_bufs: &mut self.ext_bufs,
            scratch: &mut self.scratch,
        };
        let mut room = port.stack.send_room(conn);
        let mut budget = RECORDS_PER_BATCH;
        let mut more = false;
        while room > 0 {
            if budget == 0 {
                more = true;
                break;
            }
            let Some(fpdu) = qp.qp.next_record(&mut env, room) else {
                break;
            };
            let push = fpdu.record.is_last;
            let record = TxRecord::Fpdu(fpdu.record);
            let pushed = port.stack.push_record(conn, fpdu.wire_len, record, push);
            if pushed.is_err() {
                break;
            }
            budget -= 1;
            room = room.saturating_sub(fpdu.wire_len as usize);
        }
        let mut sink = Sink::new(
            &mut port.out,
            &mut self.cache,
            &mut self.ext_bufs,
            &self.keys,
            &self.qps,
            &mut self.failures,
            self.clock.wall(now),
        );
        port.stack.flush(now, conn, &mut sink);
        self.after(now, slot);
        more
    }

    /// Acknowledgements, timers and repetitions of one stack; then the burst.
    #[inline]
    fn poll_port(&mut self, now: Instant, index: usize, timers: bool) -> bool {
        let port = &mut self.ports[index];
        let mut sink = Sink::new(
            &mut port.out,
            &mut self.cache,
            &mut self.ext_bufs,
            &self.keys,
            &self.qps,
            &mut self.failures,
            self.clock.wall(now),
        );
        if timers {
            port.stack.poll(now, &mut sink);
        } else {
            port.stack.poll_output(now, &mut sink);
        }
        let any = !port.out.batch.is_empty() || !port.out.loopback.is_empty();
        port.out.burst();
        any
    }

    /// What a call into a queue pair left to do: events, faults, a close.
    #[inline]
    fn after(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let quiet = qp.rings.events.is_empty()
            && qp.rings.fault.is_none()
            && qp.qp.state() == RdmapState::Rts;
        if !quiet {
            self.after_slow(now, slot);
        }
    }

    fn after_slow(&mut self, now: Instant, slot: u32) {
        let Some(qp) = self.qps.get_mut(slot) else {
            return;
        };
        let (client, qpn) = (qp.client, qp.rings.qpn);
        let events = std::mem::take(&mut qp.rings.events);
        let fault = qp.rings.fault.clone();
        for event in events {
            self.post_event(Event::Async { client, qpn, event });
        }
        match fault {
            Some(RingMisuse::InvalidIndex) => self.post_event(Event::ClientFault { client, qpn }),
            Some(RingMisuse::BadRequest(reason)) => {
                self.post_event(Event::BadRequest {
                    client,
                    qpn,
                    reason,
                });
                if let Some(qp) = self.qps.get_mut(slot) {
                    qp.rings.fault = None;
                }
            }
            None => {}
        }
        self.close_if_wanted(now, slot);
    }

    fn build_failures(&mut self, now: Instant) {
        for f in std::mem::take(&mut self.failures) {
            self.with_qp(f.slot, |qp, env| {
                qp.on_build_failure(env, &f.record, f.error)
            });
            self.after_slow(now, f.slot);
        }
    }

    fn poll_releases(&mut self, now: Instant) {
        for port in &mut self.ports {
            port.out.release();
        }
        for slot in std::mem::take(&mut self.releasing) {
            let waits = self
                .with_qp(slot, |qp, env| qp.poll_releases(env))
                .unwrap_or(false);
            if let Some(qp) = self.qps.get_mut(slot) {
                qp.releasing = waits;
                if waits {
                    self.releasing.push(slot);
                } else {
                    // What waited for this completion may go now.
                    self.make_ready(slot);
                    self.after(now, slot);
                }
            }
        }
        self.ext_bufs.sweep();
    }

    /// Calls into a queue pair with its surroundings.
    #[inline]
    fn with_qp<T>(
        &mut self,
        slot: u32,
        f: impl FnOnce(&mut siw_iwarp::QueuePair, &mut Env<'_>) -> T,
    ) -> Option<T> {
        let qp = self.qps.get_mut(slot)?;
        let WorkerQp { qp, rings, .. } = qp;
        let mut env = Env {
            rings,
            keys: &self.keys,
            cqs: &mut self.cqs,
            srqs: &mut self.srqs,
            ext_bufs: &mut self.ext_bufs,
            scratch: &mut self.scratch,
        };
        Some(f(qp, &mut env))
    }

    /// Queues an event for the control thread.
    fn post_event(&mut self, event: Event) {
        self.backlog.push_back(event);
        self.events_waiting = true;
    }

    fn deliver_events(&mut self) {
        while let Some(event) = self.backlog.pop_front() {
            if let Err(event) = self.mailbox.events.push(event) {
                self.backlog.push_front(event);
                break;
            }
        }
        self.events_waiting = !self.backlog.is_empty();
        if self.mailbox.control_asleep.must_wake() {
            let _ = nix::unistd::write(&*self.mailbox.control_wake, &1u64.to_ne_bytes());
        }
    }

    fn stats(&self) -> WorkerStats {
        WorkerStats {
            queue_pairs: self.qps.count(),
            iterations: self.iterations,
            sleeps: self.idle.sleeps(),
            placed_out_of_order: self.placed_out_of_order,
            forward: self.forward.stats,
            devices: self
                .ports
                .iter()
                .map(|l| (l.device, l.received, l.out.sent, l.stack.stats().clone()))
                .collect(),
            buffers_free: self.cache.pool().available_buffers()
                + self.cache.cached_buffers() as u32,
            buffers: self.cache.pool().capacity(),
        }
    }
}

#[cold]
fn capture(port: &WorkerPort, batch: &RxBatch, wall: u64) {
    let Some(tap) = &port.out.tap else { return };
    for i in 0..BURST {
        let Some(m) = batch.peek(i) else { break };
        tap.record_frame(port.out.interface, Direction::Inbound, wall, false, |v| {
            for s in m.segments() {
                v.extend_from_slice(s);
            }
        });
    }
}

/// Events that end a connection for its owner.
const ENDINGS: Events = Events::CLOSED
    .union(Events::RESET)
    .union(Events::TIMED_OUT)
    .union(Events::REFUSED)
    .union(Events::UNREACHABLE);
