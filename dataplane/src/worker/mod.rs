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
//! `Worker::run_batch` is one batch. It reads the clock once and allocates nothing in steady state. It
//! looks at every port and at a bounded number of polled send queues and parked queue pairs, but at no
//! idle connection. Each part owns its fields:
//!
//! | part | file | owns |
//! |---|---|---|
//! | `Worker` | `mod.rs`; `receive.rs`, `commands.rs`, `sleep.rs`, `statistics.rs` | the loop: clock, received burst, mailbox, forwarder, wake-up sources |
//! | `Scheduler` | `scheduler.rs`, with `user_shares.rs` and the limits in `thresholds.rs` | ready queue pairs, users' shares, doorbells, polled send queues |
//! | `ParkedQueuePairs` | `parked.rs` | queue pairs whose work waits for something that raises no event |
//! | `Connections` | `connections.rs`; `receive.rs`, `send.rs`, `lifecycle.rs`, `connect.rs`, `listen.rs` | TCP stacks, queue pairs, their life cycle; the path of a frame and of a work request |
//! | `StepTrace` | `trace.rs` | during a trace: the arrivals of later steps, and the step to record |
//! | `Datagrams` | `datagrams.rs` | address handles; queue pairs of unreliable datagrams (UD) over RoCEv2 send and receive there |
//! | `Mads` | `mads.rs` | budgets of management datagrams, and those that wait for their neighbour |
//! | `PortMapper` | `port_mapper.rs` | peers with and without a port mapper, requests without an answer in time |
//! | `PendingConnections`, `PortListeners` | `pending_connections.rs`, `listener_options.rs` | connections that no queue pair has taken yet; listeners |
//! | `CqTable`, `SrqTable` | `completion_queues.rs`, `shared_receive_queues.rs` | completions and the events of completion channels; shared receive queues |
//! | `ClientObjects` | `client_objects.rs` | in each of these tables and that of queue pairs: the objects of each client |
//! | `DepartingClients` | `departures.rs`; `lingering.rs` | departed clients whose objects are removed a part at a time |
//! | `FrameReleases` | `awaited_frames.rs`, with `ext_bufs.rs` | waits for frames that refer to memory |
//!
//! `worker_qp.rs`, `lifecycle_state.rs` and `qp_rings.rs` define a queue pair's state, `context.rs` the
//! state that all queue pairs of a worker share and its view for one call, `fpdu_writer.rs` and
//! `split_records.rs` the bytes of records. `messages.rs` and `mailbox.rs` connect the worker with the
//! control thread. Ports and their frames: [`crate::datapath`].

mod awaited_frames;
mod commands;
pub mod completion_queues;
mod conn_owner;
mod connect;
mod connections;
pub(crate) mod context;
mod datagrams;
mod deadlines;
mod departures;
pub mod drop_reasons;
mod ext_bufs;
mod fpdu_writer;
pub mod histogram;
mod lifecycle;
mod lifecycle_state;
mod lingering;
mod listen;
mod listener_options;
mod mads;
mod mailbox;
pub mod messages;
mod new_port;
mod owned_objects;
mod parked;
mod pending_connections;
mod port_mapper;
mod qp_rings;
mod receive;
mod resolution;
mod scheduler;
mod send;
pub mod shared_receive_queues;
mod sleep;
mod slots;
mod split_records;
mod statistics;
mod streaming;
#[cfg(test)]
mod test_worker;
mod thresholds;
mod trace;
mod traced_counters;
mod user_shares;
mod worker_qp;

use std::collections::VecDeque;
use std::sync::Arc;

use dpdk::{MbufCache, RxBatch};
use siw_memory::KeyReader;
use siw_net::Instant;
use siw_shm::doorbell::SleepFlag;

use crate::config::IdlePolicy;
use crate::datapath::batch_loop::BatchLoop;
use crate::datapath::batch_times::BatchTimes;
use crate::datapath::clock::TscClock;
use crate::datapath::forward::FrameForwarder;
use crate::datapath::idle::Idle;
use crate::datapath::inbox::WorkerInbox;
use crate::datapath::port::WorkerPortConfig;
use crate::datapath::rx_frame;
use crate::datapath::timer_hold::TimerHold;

use awaited_frames::FrameReleases;
use connections::{Connections, ReceiveWaits};
use context::WorkerContext;
use datagrams::Datagrams;
use deadlines::Deadlines;
use departures::DepartingClients;
use drop_reasons::DropCounts;
use histogram::{MessageLengths, RoundTripTimes};
use mads::Mads;
use messages::Event;
use parked::Wait;
use pending_connections::PendingConnections;
use port_mapper::PortMapper;
use resolution::Resolutions;
use scheduler::Scheduler;
use sleep::WakeSources;
use worker_qp::QpTable;

pub(crate) use ext_bufs::region_address;
pub use lifecycle::PAIR_RETRIES;
pub use mailbox::Mailbox;
pub use new_port::NewPort;

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
    /// Has the time base of all workers.
    pub clock: TscClock,
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

/// A pinned thread: the loop that carries frames, commands and events between its parts.
pub struct Worker {
    index: usize,
    connections: Connections,
    frame_releases: FrameReleases,
    mailbox: Arc<Mailbox>,
    forwarder: FrameForwarder,
    idle: Idle,
    wake_sources: WakeSources,
    rx_batch: RxBatch,
    batches: u64,
    batch_times: BatchTimes,
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
        let now = config.clock.now();
        let wake_sources = WakeSources::new(config.sleeping, &config.mailbox)
            .map_err(|error| format!("worker {}: {error}", config.index))?;
        let mut connections = Connections {
            index: config.index,
            clock: config.clock,
            scheduler: Scheduler::new(0),
            ports: Vec::new(),
            port_listeners: Vec::new(),
            queue_pairs: QpTable::default(),
            pending: PendingConnections::new(config.max_pending_per_user),
            context: WorkerContext::new(config.keys),
            deadlines: Deadlines::default(),
            port_mapper: PortMapper::default(),
            resolutions: Resolutions::default(),
            datagrams: Datagrams::default(),
            mads: Mads::default(),
            departing: DepartingClients::default(),
            cache: MbufCache::new(&config.pool),
            placed_out_of_order: 0,
            receive_waits: ReceiveWaits::default(),
            messages: MessageLengths::default(),
            round_trips: RoundTripTimes::default(),
            drops: DropCounts::default(),
            traced: None,
            outgoing_events: VecDeque::new(),
        };
        for port in config.ports {
            connections.add_port(NewPort::new(port, now, &config.inboxes)?);
        }
        Ok(Worker {
            index: config.index,
            connections,
            frame_releases: FrameReleases::new(config.index),
            mailbox: config.mailbox,
            forwarder: FrameForwarder::new(config.index, config.inboxes),
            idle: Idle::new(config.idle, config.spin),
            wake_sources,
            rx_batch: RxBatch::new(),
            batches: 0,
            batch_times: BatchTimes::new(now),
            timer_hold: TimerHold::default(),
            stopping: None,
            is_stopped: false,
        })
    }

    /// Runs until [`messages::Command::Stop`] is done.
    pub fn run(&mut self) {
        self.run_until_finished();
    }

    #[cold]
    fn deliver_events(&mut self) {
        while let Some(event) = self.connections.outgoing_events.pop_front() {
            if let Err(event) = self.mailbox.events.push(event) {
                self.connections.outgoing_events.push_front(event);
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
        &self.connections.clock
    }

    fn idle(&mut self) -> &mut Idle {
        &mut self.idle
    }

    fn run_batch(&mut self, now: Instant) -> bool {
        self.batches = self.batches.wrapping_add(1);
        if self.batches.is_multiple_of(CACHE_FLUSH_INTERVAL) {
            self.connections.cache.return_surplus();
        }
        self.timer_hold.on_batch_start(now);
        let mut busy = self.take_commands(now);
        if self.connections.departing.has_work() {
            busy = true;
            self.connections.remove_departing(now);
        }
        if self.connections.pending.has_ended_listeners() {
            busy = true;
            self.connections.continue_unlistening(now);
        }
        let Connections {
            clock,
            ports,
            cache,
            ..
        } = &mut self.connections;
        busy |= self.forwarder.take_frames(now, clock, ports, cache);
        let mut has_received = false;
        for port in 0..self.connections.ports.len() {
            has_received |= self.receive(now, port);
        }
        let connections = &mut self.connections;
        if has_received {
            busy = true;
            // Done while they are warm in the cache: frames sent next reuse these buffers.
            rx_frame::recycle_dropped_frames(&mut connections.cache);
        }
        busy |= connections.find_posted();
        busy |= connections.send_from_ready(now);
        if !connections.context.parked.is_empty(Wait::Quiescence) {
            busy = true;
            connections.poll_quiescing(now);
        }
        if !connections.context.parked.is_empty(Wait::Receive) {
            busy |= connections.poll_awaited_receives(now);
        }
        let run_timers = !self.timer_hold.is_held(now);
        for port in 0..connections.ports.len() {
            busy |= connections.poll_port(now, port, run_timers);
        }
        if !connections.context.build_failures.is_empty() {
            connections.handle_build_failures(now);
        }
        if connections.context.ext_bufs.has_unreleased() {
            connections.complete_released(now);
        }
        let (ports, ext_bufs) = (&mut connections.ports, &mut connections.context.ext_bufs);
        if !self.frame_releases.is_empty() {
            let events = &mut connections.outgoing_events;
            busy |= self.frame_releases.poll(now, ports, ext_bufs, events);
        } else if self.frame_releases.is_sweep_due(now, ext_bufs) {
            self.frame_releases.sweep(now, ports, ext_bufs);
        }
        connections.expire_deadlines(now);
        connections.context.cqs.notify_channels(now);
        if !connections.context.cqs.overflowed.is_empty() {
            busy = true;
            connections.handle_cq_overflows(now);
        }
        while let Some((client, srq)) = connections.context.srqs.low.pop() {
            connections.post_event(Event::SrqLimit { client, srq });
        }
        rx_frame::recycle_dropped_frames(&mut connections.cache);
        while let Some((client, held)) = self.connections.departing.pop_ended() {
            self.end_departure(now, client, held);
        }
        let connections = &self.connections;
        if !connections.outgoing_events.is_empty() {
            self.deliver_events();
        }
        self.connections.context.keys.report_quiescent();
        busy
    }

    #[inline]
    fn note_batch(&mut self, began: Instant, ended: Instant) {
        self.batch_times.note_batch(began, ended);
    }

    fn sleep(&mut self, now: Instant) {
        self.sleep_until_work(now);
    }
}
