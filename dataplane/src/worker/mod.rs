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
//!  tx_burst <- PortSink <- Stack::flush/poll <- push_records <- QueuePair::next_records
//! ```
//! `Worker::run_batch` is one batch. It reads the clock once, scans nothing, and allocates nothing in
//! steady state. Its steps, and where they are:
//!
//! | file | step |
//! |---|---|
//! | `commands.rs` | executes the control thread's commands (`messages.rs`, `mailbox.rs`) |
//! | `receive.rs` | passes received frames on, from TCP's events to the queue pairs |
//! | `scheduler.rs` | finds the queue pairs that clients have posted to, divides a batch among users (`user_shares.rs`), prefetches state while very many queue pairs are ready; its limits are in `thresholds.rs` |
//! | `send.rs` | passes FPDUs from queue pairs to TCP, and frames from TCP to the port (`fpdu_writer.rs`) |
//! | `after_call.rs` | does the work left by a call into a queue pair |
//! | `completion_queues.rs` | writes completions and the events of completion channels |
//! | `sleep.rs` | puts an idle worker to sleep and defines its wake-up sources |
//!
//! Connections: `lifecycle.rs` is the state machine of a queue pair and its connection, with
//! `deadlines.rs`. `connect.rs` and `listen.rs` set connections up on either side (the latter with
//! `listener_options.rs` and `pending_connections.rs`), `modify.rs` serves ibv_modify_qp(3),
//! `destroy.rs` removes queue pairs, and `port_removal.rs` a removed device. `worker_qp.rs` and
//! `qp_rings.rs` define a queue pair's state, `context.rs` the state that all queue pairs of a worker
//! share. Ports and their frames: [`crate::datapath`].

mod after_call;
mod awaited_frames;
mod commands;
pub mod completion_queues;
mod conn_owner;
mod connect;
pub(crate) mod context;
mod deadlines;
mod destroy;
mod ext_bufs;
mod fpdu_writer;
mod lifecycle;
mod listen;
mod listener_options;
mod mailbox;
pub mod messages;
mod modify;
mod parked;
mod pending_connections;
mod port_removal;
mod qp_rings;
mod receive;
mod scheduler;
mod send;
pub mod shared_receive_queues;
mod silent_peer;
mod sleep;
mod slots;
mod split_records;
mod statistics;
mod thresholds;
mod unpolled;
mod user_shares;
mod worker_qp;

use std::collections::VecDeque;
use std::sync::Arc;

use dpdk::{MbufCache, RxBatch};
use siw_iwarp::TxRecord;
use siw_memory::KeyReader;
use siw_shm::doorbell::SleepFlag;
use siw_tcp::Instant;

use crate::config::IdlePolicy;
use crate::datapath::batch_loop::BatchLoop;
use crate::datapath::clock::TscClock;
use crate::datapath::forward::{FrameForwarder, WorkerInbox};
use crate::datapath::idle::Idle;
use crate::datapath::port::{WorkerPort, WorkerPortConfig};
use crate::datapath::rx_frame;
use crate::datapath::timer_hold::TimerHold;

use awaited_frames::AwaitedFrames;
use context::WorkerContext;
use deadlines::Deadlines;
use listen::PortListeners;
use messages::Event;
use parked::Wait;
use pending_connections::PendingConnections;
use receive::ReceiveWaits;
use scheduler::Scheduler;
use sleep::WakeSources;
use worker_qp::QpTable;

pub use lifecycle::PAIR_RETRIES;
pub use mailbox::Mailbox;

/// Batches between two returns of cached buffers to the pool, where other workers can use them.
const CACHE_FLUSH_INTERVAL: u64 = 1024;

/// Everything a worker thread is started with.
pub struct WorkerConfig {
    /// The worker's place among all.
    pub index: usize,
    /// The core that its thread is pinned to.
    pub core: usize,
    /// Sleep policy.
    pub idle: IdlePolicy,
    /// Time without work before the worker sleeps; it spins until then.
    pub spin: std::time::Duration,
    /// The worker's part of each device that it serves.
    pub ports: Vec<WorkerPortConfig>,
    /// Packet buffers of all workers.
    pub pool: dpdk::Mempool,
    /// The table of memory keys.
    pub keys: KeyReader,
    /// Set while the worker sleeps; read by clients and other workers.
    pub sleeping: SleepFlag,
    /// Maximum connections of one user's listeners that wait for an MPA request or an answer.
    pub max_pending_per_user: usize,
    /// Queues to and from the control thread.
    pub mailbox: Arc<Mailbox>,
    /// The inboxes of all workers, including this one.
    pub inboxes: Arc<[Arc<WorkerInbox>]>,
}

/// A pinned thread's state.
pub struct Worker {
    index: usize,
    clock: TscClock,
    ports: Vec<WorkerPort<TxRecord>>,
    /// Listeners on each of `ports`.
    port_listeners: Vec<PortListeners>,
    queue_pairs: QpTable,
    pending: PendingConnections,
    context: WorkerContext,
    cache: MbufCache,
    scheduler: Scheduler,
    /// Time of the next look at buffers that finished messages have left in ports.
    next_sweep: Instant,
    /// Waits for frames that refer to memory.
    awaited_frames: Vec<AwaitedFrames>,
    /// FPDUs placed out of order.
    placed_out_of_order: u64,
    receive_waits: ReceiveWaits,
    deadlines: Deadlines,
    mailbox: Arc<Mailbox>,
    /// Events for the control thread: those of this batch, and those that did not fit into the
    /// mailbox.
    outgoing_events: VecDeque<Event>,
    forwarder: FrameForwarder,
    idle: Idle,
    wake_sources: WakeSources,
    rx_batch: RxBatch,
    batches: u64,
    timer_hold: TimerHold,
    /// Set while the daemon stops: deadline for connections to close.
    stopping: Option<Instant>,
    is_stopped: bool,
}

impl Worker {
    /// Builds a worker on its own thread.
    ///
    /// # Errors
    /// A device's stack refuses its configuration, or a descriptor to sleep on cannot be created.
    pub fn new(config: WorkerConfig) -> Result<Worker, String> {
        let clock = TscClock::new();
        let now = clock.now();
        let wake_sources = WakeSources::new(config.sleeping, &config.mailbox)
            .map_err(|error| format!("worker {}: {error}", config.index))?;
        let forwarder = FrameForwarder::new(config.index, config.inboxes);
        let port_listeners = config.ports.iter().map(PortListeners::new).collect();
        let ports = config
            .ports
            .into_iter()
            .map(|port| {
                let device = port.device;
                WorkerPort::new(port, now, |worker| forwarder.make_proxy(device, worker))
            })
            .collect::<Result<Vec<_>, String>>()?;
        Ok(Worker {
            index: config.index,
            clock,
            scheduler: Scheduler::new(ports.len()),
            ports,
            port_listeners,
            queue_pairs: QpTable::default(),
            pending: PendingConnections::new(config.max_pending_per_user),
            context: WorkerContext::new(config.keys),
            cache: MbufCache::new(&config.pool),
            next_sweep: Instant::ZERO,
            awaited_frames: Vec::new(),
            placed_out_of_order: 0,
            receive_waits: ReceiveWaits::default(),
            deadlines: Deadlines::default(),
            mailbox: config.mailbox,
            outgoing_events: VecDeque::new(),
            forwarder,
            idle: Idle::new(config.idle, config.spin),
            wake_sources,
            rx_batch: RxBatch::new(),
            batches: 0,
            timer_hold: TimerHold::default(),
            stopping: None,
            is_stopped: false,
        })
    }

    /// Runs until [`messages::Command::Stop`] is done.
    pub fn run(&mut self) {
        self.run_until_finished();
    }

    /// Queues an event for the control thread.
    fn post_event(&mut self, event: Event) {
        self.outgoing_events.push_back(event);
    }

    #[cold]
    fn deliver_events(&mut self) {
        while let Some(event) = self.outgoing_events.pop_front() {
            if let Err(event) = self.mailbox.events.push(event) {
                self.outgoing_events.push_front(event);
                break;
            }
        }
        self.mailbox.wake_control();
    }
}

impl BatchLoop for Worker {
    fn is_finished(&self) -> bool {
        self.is_stopped
    }

    fn clock(&self) -> &TscClock {
        &self.clock
    }

    fn idle(&mut self) -> &mut Idle {
        &mut self.idle
    }

    fn run_batch(&mut self, now: Instant) -> bool {
        self.batches = self.batches.wrapping_add(1);
        if self.batches.is_multiple_of(CACHE_FLUSH_INTERVAL) {
            self.cache.return_surplus();
        }
        self.timer_hold.on_batch_start(now);
        let mut busy = self.take_commands(now);
        busy |= self
            .forwarder
            .take_frames(now, &self.clock, &mut self.ports, &mut self.cache);
        let mut has_received = false;
        for port in 0..self.ports.len() {
            has_received |= self.receive(now, port);
        }
        if has_received {
            busy = true;
            // Done while they are warm in the cache: frames sent next reuse these buffers.
            rx_frame::recycle_dropped_frames(&mut self.cache);
        }
        busy |= self.scheduler.poll_send_queues(&mut self.queue_pairs);
        busy |= self.scheduler.take_doorbells(&mut self.queue_pairs);
        busy |= self.send_from_ready(now);
        if !self.context.parked.is_empty(Wait::Quiescence) {
            busy = true;
            self.poll_quiescing(now);
        }
        if !self.context.parked.is_empty(Wait::Receive) {
            busy |= self.poll_awaited_receives(now);
        }
        let run_timers = !self.timer_hold.is_held(now);
        for port in 0..self.ports.len() {
            busy |= self.poll_port(now, port, run_timers);
        }
        if !self.context.build_failures.is_empty() {
            self.handle_build_failures(now);
        }
        if !self.context.parked.is_empty(Wait::Release) {
            self.poll_releases(now);
        }
        if !self.awaited_frames.is_empty() {
            self.poll_awaited_frames(now);
        } else if self.context.ext_bufs.has_unreleased() && now >= self.next_sweep {
            self.sweep_sent_buffers(now);
        }
        self.expire_deadlines(now);
        self.context.cqs.notify_channels(now);
        if !self.context.cqs.overflowed.is_empty() {
            busy = true;
            self.handle_cq_overflows(now);
        }
        while let Some((client, srq)) = self.context.srqs.low.pop() {
            self.post_event(Event::SrqLimit { client, srq });
        }
        rx_frame::recycle_dropped_frames(&mut self.cache);
        if !self.outgoing_events.is_empty() {
            self.deliver_events();
        }
        self.context.keys.report_quiescent();
        busy
    }

    fn sleep(&mut self, now: Instant) {
        self.sleep_until_work(now);
    }
}
