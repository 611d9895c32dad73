//! The control thread: client requests, client resources, and reports of workers.
//!
//! ```text
//!  clients == SOCK_SEQPACKET ==> ControlThread (this file: the loop, and the dispatch to the parts)
//!     ^                             |                                          ^
//!     |                             v                                          |
//!     |      Acceptor, Memory, Connections, Departures, Statistics,     Event (bounded queue)
//!     |      LinkMonitor; functions for PDs, queue pairs and queues            |
//!     |                             |                                          |
//!  client/outbox.rs <- Context: Resources (the tree), WorkerSet -- Command --> workers
//! ```
//! Folders, by object:
//!
//! | folder | contents |
//! |---|---|
//! | `account/` | quotas, charges, and the heap of each object |
//! | `request/` | deferred requests, replies and refusals |
//! | `threads/` | workers and helper threads as this thread sees them; the times of its turns |
//! | `memory/` | protection domains, arenas, regions, windows |
//! | `queues/` | completion queues, queue pairs, shared receive queues, address handles, multicast groups |
//! | `client/` | arrival, credentials and events of clients |
//! | `device/` | devices, links, routes of the kernel |
//! | `connection/` | listeners, connects, datagram services, pairing, ended connections |
//! | `operator/` | lists, statistics, captures, fault plans, actions, configuration, devices at run time |
//!
//! Files without `Context` (such as `client/peers.rs`, `memory/client_memory.rs`, `connection/ends.rs`) describe
//! one kind of object. `Resources` holds the objects of all kinds, and `Context` holds `Resources`. Files with
//! `Context` handle requests and reports; they call handlers of their own folder and of those above it in the
//! table. `departures.rs`, `resume.rs` and this file call handlers of all folders.
//!
//! The thread sleeps in epoll; nothing here is on a fast path. Each part has its own fields and gets
//! the `Context` that all of them use. A request handler returns `Served::Replied` after it sent the
//! reply, `Served::Deferred` if a worker must answer first (the request is kept in the client's
//! `waiting`, and its next request stays in the socket), or a `Refusal`, which becomes the reply.
//! Whatever answers a deferred request, or finds that a client must be closed, notes that in
//! `Resources::answered` and `Resources::faulty`; the loop acts on it at the end of the event.

pub mod account;
pub mod client;
mod connection;
mod context;
mod departures;
mod device;
mod memory;
pub mod operator;
mod queues;
mod request;
mod resources;
mod resume;
mod threads;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use siw_host::routes::RouteFollower;
use siw_memory::{KeyTable, Stag};
use siw_shm::control::messages::EVERY_DEVICE;
use siw_shm::control::{AsyncEventKind, CmEventKind, CmEventMessage, RecvError, Request, codec};
use siw_shm::{WorkerPage, fault_guard};
use siw_sysfs::SysfsTree;

use self::account::heap::FreeHeap;
use self::client::acceptor::{Acceptor, TOKEN_LISTENER};
use self::client::cm_events;
use self::client::outbox::TOKEN_OUTBOX;
use self::client::peers::SubordinateUsers;
use self::client::socket::BoundSocket;
use self::connection::connections::Connections;
use self::connection::{connections, pairing, streaming};
use self::context::Context;
use self::departures::{Departures, leave_slow_socket};
use self::device::devices::Devices;
use self::device::host_routes;
use self::device::links::{LinkMonitor, Removal};
use self::memory::Memory;
use self::memory::arena_files::ArenaFiles;
use self::memory::imports::Received;
use self::operator::captures::Captures;
use self::operator::counter_files::CounterFiles;
use self::operator::device_changes;
use self::operator::device_changes::{
    ChangedParts, DeviceChanges, DeviceOpener, RunningDevice, StartedDevices,
};
use self::operator::faults::FaultPlans;
use self::operator::loaded_configuration::LoadedConfiguration;
use self::operator::operators::Operators;
use self::operator::reload::Configuration;
use self::operator::runtime_changes::RuntimeChanges;
use self::operator::statistics::Statistics;
use self::operator::{flight_recorder, lists, operate, reload, routes, statistics};
use self::queues::{completion_queues, datagrams, groups, queue_pairs, shared_receive};
use self::request::deferred::{DeferredRequest, Report, Then};
use self::request::refusal::Refusal;
use self::request::replies::{Outcome, RequestState, Served};
use self::resources::Resources;
pub use self::threads::closer::Closer;
pub use self::threads::helpers::MapArena;
use self::threads::helpers::{DisposalQueue, Helpers};
use self::threads::reports::{HelperReport, LinkReport};
use self::threads::turn_times::{TurnBudget, TurnTimes};
use self::threads::watchdog::Watchdog;
use self::threads::workers::{COMMANDS_IN_FLIGHT, WorkerSet};
use crate::device_view::DeviceView;
use crate::ids::{
    AhId, ArenaId, ClientId, CmChannelId, CommandToken, CompletionChannelId, CqId, PdId, Qpn,
    ResolutionId, SrqId,
};
use crate::worker::Mailbox;
use crate::worker::messages::{Command, Event};

/// Start parameters of the control thread.
pub struct ControlParts {
    /// The control socket.
    pub socket: BoundSocket,
    /// Delivers SIGTERM and SIGINT, which end the daemon, and SIGHUP, which reloads the configuration.
    pub signals: SignalFd,
    /// Watchdog interval of the service manager; `None` without a watchdog.
    pub watchdog: Option<Duration>,
    /// The eventfd that workers write to wake the control thread.
    pub wake: Arc<OwnedFd>,
    /// Set while the control thread sleeps: workers write to `wake` only then.
    pub asleep: Arc<siw_shm::doorbell::SleepFlag>,
    /// The configuration and its source.
    pub configuration: Configuration,
    /// The configured capture.
    pub captures: Captures,
    /// Users that may read the counters of all clients.
    pub operators: Operators,
    /// Closes clients' sockets.
    pub closer: Closer,
    /// Users that share the limits of another one.
    pub subordinates: SubordinateUsers,
    /// The devices, in the order of the configuration.
    pub devices: Vec<RunningDevice>,
    /// Opens further ones.
    pub opener: DeviceOpener,
    /// The memory keys, which workers read.
    pub keys: Arc<KeyTable>,
    /// Shared page in which clients see which workers sleep.
    pub page: WorkerPage,
    /// Allocate queues and registered memory from hugepages while some are free.
    pub hugepages: bool,
    /// Maps registered memory for the ports that read it by DMA.
    pub map_arena: Arc<MapArena>,
    /// Some ports read memory by DMA; mapping memory for them is slow.
    pub ports_use_dma: bool,
    /// Effective settings, as shown to operators with the counters.
    pub settings: serde_json::Value,
}

const TOKEN_SIGNAL: u64 = u64::MAX - 1;
const TOKEN_WAKE: u64 = u64::MAX - 2;
const TOKEN_ROUTES: u64 = u64::MAX - 3;

/// Clients accepted in a row before other events are served.
const ACCEPTS_PER_TURN: usize = 16;
/// Maximum number of requests without replies served for one client before other clients' turn.
const READ_AHEAD: usize = 8;
/// Events of one worker processed in one turn.
const EVENTS_PER_TURN: usize = 256;

/// The control thread: the loop over events, and the parts that serve them.
pub struct ControlThread {
    /// Dropped first: it removes the path of the control socket.
    acceptor: Acceptor,
    configuration: Configuration,
    changes: RuntimeChanges,
    captures: Captures,
    faults: FaultPlans,
    context: Context,
    memory: Memory,
    connections: Connections,
    departures: Departures,
    free_heap: FreeHeap,
    statistics: Statistics,
    /// Dropped before the files, which [`LinkMonitor`] owns.
    counter_files: Option<CounterFiles>,
    links: LinkMonitor,
    routes: RouteFollower,
    device_changes: DeviceChanges,
    watchdog: Option<Watchdog>,
    signals: SignalFd,
    asleep: Arc<siw_shm::doorbell::SleepFlag>,
    /// Deadline for the workers to stop; `None` while the daemon serves.
    stopping: Option<Instant>,
}

impl ControlThread {
    /// Watches the control socket, signals and the workers' wake-ups.
    ///
    /// # Errors
    /// The operating system cannot create an epoll instance or a thread, or refuses to watch a
    /// descriptor.
    pub fn new(
        parts: ControlParts,
        mailboxes: Arc<[Arc<Mailbox>]>,
    ) -> std::io::Result<ControlThread> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let watch =
            |fd: BorrowedFd<'_>, token| epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token));
        watch(parts.signals.as_fd(), TOKEN_SIGNAL)?;
        let wakes = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, TOKEN_WAKE);
        epoll.add(parts.wake.as_fd(), wakes)?;
        let devices = StartedDevices::new(parts.devices)?;
        if let Some(monitor) = devices.routes.monitor_fd() {
            watch_routes(&epoll, monitor)?;
        }
        let helpers = Helpers::start(
            parts.wake,
            parts.asleep.clone(),
            parts.map_arena.clone(),
            parts.closer,
        )?;
        let interval = parts.configuration.current().control.sysfs_interval();
        let sysfs = write_sysfs(&parts.socket, &devices.views, interval.is_some());
        let counter_files = match (&sysfs, interval) {
            (Some(tree), Some(interval)) => {
                Some(CounterFiles::start(tree.counter_writer(), interval)?)
            }
            _ => None,
        };
        let mut links = LinkMonitor::new(helpers.reporter().clone(), sysfs);
        for (index, (view, port)) in devices.views.iter().zip(devices.ports).enumerate() {
            links.add(index, view, port)?;
        }
        let users = (parts.operators, parts.subordinates);
        let configuration = parts.configuration;
        let control = &configuration.current().control;
        let (hello_timeout, process_memory) = (control.hello_timeout(), control.process_memory);
        let changes = RuntimeChanges::new(parts.socket.path());
        let acceptor = Acceptor::new(&epoll, parts.socket, users, parts.page, hello_timeout)?;
        let quotas = configuration.quotas();
        let limits = configuration.current().limits.clone();
        Ok(ControlThread {
            context: Context {
                resources: Resources::new(quotas, limits, parts.hugepages, epoll),
                workers: WorkerSet::new(mailboxes),
                helpers,
                devices: Devices::new(devices.views),
                times: TurnTimes::default(),
            },
            acceptor,
            configuration,
            changes,
            captures: parts.captures,
            faults: FaultPlans::default(),
            memory: Memory {
                keys: parts.keys,
                files: ArenaFiles::default(),
                map_arena: parts.map_arena,
                ports_use_dma: parts.ports_use_dma,
                sends_by_reference: devices.sends_by_reference,
                process_memory,
                awaiting: VecDeque::new(),
            },
            connections: Connections::default(),
            departures: Departures::default(),
            free_heap: FreeHeap::default(),
            statistics: Statistics::new(parts.settings),
            counter_files,
            links,
            routes: devices.routes,
            device_changes: DeviceChanges::new(parts.opener),
            watchdog: parts.watchdog.map(Watchdog::new),
            signals: parts.signals,
            asleep: parts.asleep,
            stopping: None,
        })
    }

    /// Serves until a signal arrives and the workers have stopped. Returns `false` if a worker has
    /// not stopped before the deadline.
    pub fn run(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 64];
        // The monitor is open already, so changes made from now on are not lost.
        for device in 0..self.context.devices.views.len() {
            let context = &mut self.context;
            let (devices, workers) = (&mut context.devices, &mut context.workers);
            host_routes::load_host_routes(&self.routes, devices, workers, device);
            routes::post_permanent_neighbours(&mut self.context, device);
        }
        while self.context.workers.is_running() {
            let timeout = self.sleep_limit();
            // Announce the sleep, check again, then sleep: no wake-up is lost.
            self.asleep.announce_sleep();
            let timeout = if self.context.workers.has_events() || self.context.helpers.has_reports()
            {
                EpollTimeout::ZERO
            } else {
                timeout
            };
            let waited = self.context.resources.epoll.wait(&mut events, timeout);
            self.asleep.announce_awake();
            let ready = match waited {
                Ok(ready) => ready,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(error) => {
                    tracing::error!("the control thread cannot wait for events: {error}");
                    self.begin_stop();
                    0
                }
            };
            self.context.times.begin_turn();
            self.context.workers.send_backlogs();
            self.end_faulty_clients();
            log_refused_calls();
            for event in &events[..ready] {
                match event.data() {
                    TOKEN_LISTENER => self.accept_clients(),
                    TOKEN_SIGNAL => self.on_signal(),
                    // Edge-triggered: no read is needed.
                    TOKEN_WAKE => {}
                    TOKEN_ROUTES => host_routes::follow_host_routes(
                        &mut self.routes,
                        &mut self.context.devices,
                        &mut self.context.workers,
                    ),
                    token if token & TOKEN_OUTBOX != 0 => {
                        self.context.resources.flush_outbox(token)
                    }
                    token => self.on_client_readable(ClientId(token)),
                }
                self.context.times.end_work("end of an event");
                self.end_event();
                self.context.times.end_work("answered requests");
            }
            self.take_worker_events();
            self.take_helper_reports();
            self.continue_statistics();
            self.end_event();
            while let Some(id) = self.acceptor.take_silent_client(&self.context.resources) {
                self.remove_client(id, "did not send HELLO in time");
            }
            self.acceptor
                .resume_accepting(&self.context.resources.epoll);
            self.reclaim_objects();
            self.context.times.end_work("reclaim");
            self.free_heap
                .run(&self.context.resources.ledger, &self.context.helpers);
            pairing::retry_pairs(&mut self.context);
            let Connections {
                services,
                listeners,
                ..
            } = &mut self.connections;
            services.run(&mut self.context, listeners);
            self.end_event();
            if let Some(watchdog) = &mut self.watchdog {
                watchdog.run(&mut self.context.workers);
            }
            if let Some(files) = &mut self.counter_files {
                files.run(&mut self.context.workers, &self.context.devices.views);
            }
            if self.faults.run(&mut self.context.workers) {
                self.begin_stop();
            }
            self.context.times.end_work("timers");
            if self
                .stopping
                .is_some_and(|deadline| Instant::now() > deadline)
            {
                tracing::error!("a worker did not stop in time");
                return false;
            }
        }
        true
    }

    /// Longest sleep allowed by scheduled work.
    fn sleep_limit(&self) -> EpollTimeout {
        if self.statistics.is_writing() || self.departures.has_work() {
            return EpollTimeout::ZERO;
        }
        if self.context.workers.has_backlog() {
            return EpollTimeout::from(1u8);
        }
        if self.departures.waits_for_keys() || self.memory.waits_for_keys(&self.context.resources) {
            return EpollTimeout::from(1u8);
        }
        let next_pair = self.context.resources.pair_times.first_time();
        let next_service = self.connections.services.first_time();
        let limits = [
            self.stopping.map(|_| Duration::from_millis(50)),
            next_pair.map(|time| time.saturating_duration_since(Instant::now())),
            next_service.map(|time| time.saturating_duration_since(Instant::now())),
            self.watchdog.as_ref().and_then(Watchdog::time_until_round),
            self.counter_files
                .as_ref()
                .and_then(CounterFiles::time_until_round),
            self.acceptor.time_until_due(),
            self.faults.time_until_due(),
        ];
        let limit = limits.into_iter().flatten().min();
        limit.map_or(EpollTimeout::NONE, |limit| {
            let millis = u16::try_from(limit.as_millis()).unwrap_or(u16::MAX);
            EpollTimeout::from(millis.saturating_add(1))
        })
    }

    fn on_signal(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGHUP as u32 {
                self.configuration.begin_reload(&self.context.helpers);
                continue;
            }
            tracing::info!(signal = signal.ssi_signo, "stopping");
            self.begin_stop();
        }
    }

    fn begin_stop(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        crate::host::notify_service_manager("STOPPING=1");
        self.stopping = Some(Instant::now() + Duration::from_secs(5));
        self.acceptor.stop(&self.context.resources.epoll);
        let ids: Vec<ClientId> = self.context.resources.clients.keys().copied().collect();
        for id in ids {
            self.context.resources.post_async_event(
                id,
                AsyncEventKind::DeviceFatal,
                EVERY_DEVICE,
                "siwd is stopping",
            );
        }
        self.context.workers.post_to_all(|| Command::Stop);
    }

    /// Accepts waiting clients.
    fn accept_clients(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.acceptor.accept_next(&mut self.context) {
                return;
            }
            self.context.times.end_work("accept");
        }
    }

    /// Reads requests from a client's socket.
    fn on_client_readable(&mut self, id: ClientId) {
        // Usually one request: most clients wait for the reply before they send the next one, and
        // epoll wakes this thread for the others. A request that expects no reply is soon followed by
        // another.
        for _ in 0..READ_AHEAD {
            if !self.read_request(id) {
                return;
            }
        }
    }

    /// Serves one waiting request, if any. Returns true if that request expects no reply.
    fn read_request(&mut self, id: ClientId) -> bool {
        let Some(client) = self.context.resources.clients.get_mut(&id) else {
            return false;
        };
        if client.parked.is_some() {
            self.context.resources.leave_input(id);
            return false;
        }
        match client.conn.recv_from_client() {
            Ok(bytes) if client.waiting.is_some() => client.parked = Some(bytes),
            Ok(bytes) => {
                self.on_packet(id, &bytes);
                return codec::peek_header(&bytes).is_some_and(|(_, seq)| seq == codec::UNANSWERED);
            }
            // The reply to this request must follow the reply to the deferred one.
            Err(RecvError::Descriptors) if client.waiting.is_some() => {
                self.context.resources.leave_input(id)
            }
            Err(error @ RecvError::Descriptors) => {
                if client.greeted && self.context.helpers.must_await_room(client.account.uid()) {
                    client.awaits_room = true;
                    self.context.resources.leave_input(id);
                    return false;
                }
                match self.memory.receive_import(&mut self.context, id) {
                    Received::Nothing => {}
                    Received::Request => {
                        self.context.times.end_work("ImportMemory");
                        return false;
                    }
                    Received::WrongDescriptors => {
                        self.remove_client(id, "sent descriptors other than memory");
                        return false;
                    }
                }
                if let Some(client) = self.context.resources.clients.get(&id) {
                    let why = error.to_string();
                    let _ = client.conn.send_refusal(0, 0, libc::EPROTO, &why);
                }
                self.remove_client(id, "sent file descriptors");
            }
            Err(RecvError::WouldBlock) => {}
            Err(RecvError::Closed) => self.remove_departed(id, ("closed its socket", true)),
            Err(RecvError::Truncated | RecvError::DescriptorsLost) => {
                let _ = client
                    .conn
                    .send_refusal(0, 0, libc::EMSGSIZE, "packet too long");
                self.remove_client(id, "sent an overlong packet");
            }
            // ECONNRESET: it has ended before it read a reply.
            Err(RecvError::Io(error)) => {
                self.remove_departed(id, (&format!("socket failed: {error}"), true));
            }
        }
        false
    }

    fn on_packet(&mut self, id: ClientId, bytes: &[u8]) {
        let posted = self.context.workers.posted_commands();
        self.decode_packet(id, bytes);
        let posted = self.context.workers.posted_commands() - posted;
        self.limit_commands(id, posted);
    }

    /// Counts commands that a request has caused. A client that has caused many waits until the workers
    /// have executed them: its next request stays in its socket.
    fn limit_commands(&mut self, id: ClientId, posted: u64) {
        let Some(client) = self.context.resources.clients.get_mut(&id) else {
            return;
        };
        client.commands_in_flight += posted;
        let limit = COMMANDS_IN_FLIGHT * self.context.workers.worker_count() as u64;
        if client.commands_in_flight >= limit && client.waiting.is_none() {
            client.commands_in_flight = 0;
            let what = self.context.workers.await_barrier(id, Then::ReadOn);
            let (kind, seq) = (0, 0);
            client.waiting = Some(DeferredRequest { kind, seq, what });
        }
    }

    fn decode_packet(&mut self, id: ClientId, bytes: &[u8]) {
        match Request::decode(bytes) {
            Ok((seq, request)) => {
                let state = self.on_request(id, seq, &request);
                self.context.times.end_work(request.name());
                if state == RequestState::TryAgain
                    && let Some(client) = self.context.resources.clients.get_mut(&id)
                {
                    client.parked = Some(bytes.to_vec());
                }
            }
            Err(error) => {
                let Some(client) = self.context.resources.clients.get_mut(&id) else {
                    return;
                };
                let (kind, seq) = codec::peek_header(bytes).unwrap_or((0, 0));
                let errno = match error {
                    codec::ProtoError::Version { .. } => libc::EPROTONOSUPPORT,
                    codec::ProtoError::Kind(_) => libc::EOPNOTSUPP,
                    _ => libc::EPROTO,
                };
                tracing::warn!(client = id.0, pid = client.peer.pid, "{error}");
                let _ = client
                    .conn
                    .send_refusal(kind, seq, errno, &error.to_string());
                if !matches!(error, codec::ProtoError::Kind(_)) {
                    self.remove_client(id, "sent an invalid message");
                }
            }
        }
    }

    fn on_request(&mut self, id: ClientId, seq: u32, request: &Request) -> RequestState {
        let kind = request.kind();
        let greeted = self
            .context
            .resources
            .clients
            .get(&id)
            .is_some_and(|client| client.greeted);
        let named = self.record_request(id, request);
        let outcome = if !greeted && !matches!(request, Request::ClientHello(_)) {
            Err(Refusal::new(
                libc::EPROTO,
                "the first message must be HELLO",
            ))
        } else if !may_cross_a_reply(seq, request)
            && let Err(error) = self.context.resources.own_queues(id)
        {
            self.close_faulty_client(id, &format!("its queues are unusable: {error}"));
            return RequestState::Finished;
        } else {
            self.dispatch_request(id, seq, request)
        };
        tracing::trace!(
            client = id.0,
            request = request.name(),
            ok = outcome.is_ok()
        );
        self.context.settle_account(id);
        let Some(client) = self.context.resources.clients.get_mut(&id) else {
            return RequestState::Finished;
        };
        match outcome {
            Ok(Served::Replied) => {}
            Ok(Served::Deferred(what)) => {
                client.waiting = Some(DeferredRequest { kind, seq, what });
            }
            Err(refusal) if refusal.may_be_temporary() && !client.departing_qps.is_empty() => {
                return RequestState::TryAgain;
            }
            Err(refusal) => {
                tracing::debug!(
                    client = id.0,
                    request = request.name(),
                    "refused: {}",
                    refusal.reason()
                );
                refusal.send(&client.conn, kind, seq);
                if let Some(qpn) = named {
                    let resources = &mut self.context.resources;
                    resources.record_refusal(qpn, request.name(), refusal.reason());
                }
            }
        }
        RequestState::Finished
    }

    /// Records a request that changes a queue pair of this client; returns the queue pair.
    fn record_request(&mut self, id: ClientId, request: &Request) -> Option<Qpn> {
        let resources = &mut self.context.resources;
        if resources.limits.recorded_events == 0 {
            return None;
        }
        let (qpn, detail) = flight_recorder::named_queue_pair(request)?;
        if resources.owner_of_qp(qpn) != Some(id) {
            return None;
        }
        resources.record_event(qpn, request.name(), detail.as_deref());
        Some(qpn)
    }

    /// Borrows the parts that a change of the devices needs.
    fn split_for_changes(&mut self) -> (&mut DeviceChanges, &mut Context, ChangedParts<'_>) {
        let parts = ChangedParts {
            configuration: &mut self.configuration,
            captures: &mut self.captures,
            faults: &mut self.faults,
            connections: &mut self.connections,
            links: &mut self.links,
            memory: &mut self.memory,
            routes: &mut self.routes,
            changes: &mut self.changes,
        };
        (&mut self.device_changes, &mut self.context, parts)
    }

    /// Passes a request to its handler.
    fn dispatch_request(&mut self, id: ClientId, seq: u32, request: &Request) -> Outcome {
        let context = &mut self.context;
        match request {
            Request::ClientHello(hello) => self.acceptor.greet_client(context, id, seq, hello),
            Request::QueryDevice(query) => {
                context
                    .devices
                    .query_device(&mut context.resources, id, seq, query)
            }
            Request::AllocPd(_) => memory::alloc_pd(&mut context.resources, id, seq),
            Request::DeallocPd(request) => {
                memory::dealloc_pd(&mut context.resources, id, seq, PdId(request.pd))
            }
            Request::AllocArena(request) => self.memory.alloc_arena(context, id, seq, request),
            Request::FreeArena(request) => {
                self.memory
                    .free_arena(context, id, seq, ArenaId(request.arena))
            }
            Request::RegMr(request) => self.memory.reg_mr(&mut context.resources, id, seq, request),
            Request::DeregMr(request) => self.memory.dereg_mr(context, id, request),
            Request::ReregMr(request) => self.memory.rereg_mr(context, id, request),
            Request::AddExtents(request) => {
                memory::add_extents(&mut context.resources, id, seq, request)
            }
            Request::RegMemory(request) => {
                self.memory
                    .reg_memory(&mut context.resources, id, seq, request)
            }
            Request::ImportOwnFile(request) => {
                self.memory.import_own_file(context, id, seq, request)
            }
            Request::ImportMemory(_) => Err(Refusal::new(
                libc::EINVAL,
                "the descriptor of the memory is missing",
            )),
            Request::AllocFastMr(request) => {
                self.memory
                    .alloc_fast_mr(&mut context.resources, id, seq, request)
            }
            Request::AllocMw(request) => {
                self.memory
                    .alloc_mw(&mut context.resources, id, seq, request)
            }
            Request::DeallocMw(request) => self.memory.dealloc_mw(context, id, Stag(request.rkey)),
            Request::CreateChannel(_) => {
                completion_queues::create_channel(&mut context.resources, id, seq)
            }
            Request::DestroyChannel(request) => completion_queues::destroy_channel(
                &mut context.resources,
                id,
                seq,
                CompletionChannelId(request.channel),
            ),
            Request::CreateCq(request) => completion_queues::create_cq(context, id, seq, request),
            Request::DestroyCq(request) => {
                completion_queues::destroy_cq(context, id, CqId(request.cq))
            }
            Request::ResizeCq(request) => completion_queues::resize_cq(context, id, request),
            Request::FreeCqRing(request) => {
                completion_queues::free_cq_ring(context, id, seq, request)
            }
            Request::ModerateCq(request) => {
                completion_queues::moderate_cq(context, id, seq, request)
            }
            Request::CreateQp(request) => {
                queue_pairs::create_qp(&mut context.resources, id, seq, request)
            }
            Request::ModifyQp(request) => queue_pairs::modify_qp(context, id, seq, request),
            Request::QueryQp(request) => {
                queue_pairs::query_qp(context, id, seq, Qpn(request.qp_num))
            }
            Request::DestroyQp(request) => {
                queue_pairs::destroy_qp(context, id, seq, Qpn(request.qp_num))
            }
            Request::CreateSrq(request) => shared_receive::create_srq(context, id, seq, request),
            Request::ModifySrq(request) => {
                shared_receive::modify_srq(context, id, seq, request, true)
            }
            Request::QuerySrq(request) => {
                shared_receive::query_srq(&mut context.resources, id, seq, SrqId(request.srq))
            }
            Request::DestroySrq(request) => {
                shared_receive::destroy_srq(context, id, SrqId(request.srq))
            }
            Request::CreateCmChannel(request) => {
                connections::create_cm_channel(&mut context.resources, id, seq, request.flags)
            }
            Request::DestroyCmChannel(request) => self.connections.destroy_cm_channel(
                &mut context.resources,
                id,
                seq,
                CmChannelId(request.channel),
            ),
            Request::Connect(request) if request.stream != 0 => {
                self.connections.connect_stream(context, id, seq, request)
            }
            Request::Connect(request) => connections::connect_qp(context, id, seq, request),
            Request::OpenStream(request) => streaming::open_stream(context, id, request),
            Request::SendStream(request) => self.connections.send_stream(context, id, request),
            Request::ReceiveStream(request) => {
                self.connections.receive_stream(context, id, request)
            }
            Request::TurnStream(request) => self.connections.turn_stream(context, id, request),
            Request::EndStream(request) => self.connections.end_stream(context, id, seq, request),
            Request::PairQp(request) => self.connections.pair_qp(context, id, seq, request),
            Request::Listen(request) => self.connections.start_listener(context, id, seq, request),
            Request::Unlisten(request) => self.connections.stop_listener(context, id, seq, request),
            Request::Bind(request) => self.connections.bind_address(context, id, seq, request),
            Request::Resolve(request) => connections::resolve_address(context, id, seq, request),
            Request::StartResolution(request) => {
                connections::start_resolution(context, id, seq, request)
            }
            Request::EndResolution(request) => {
                let resolution = ResolutionId(request.resolution);
                connections::end_resolution(context, id, seq, resolution)
            }
            Request::CreateAh(request) => datagrams::create_ah(context, id, request),
            Request::DestroyAh(request) => {
                datagrams::destroy_ah(context, id, seq, AhId(request.ah))
            }
            Request::StartDatagrams(request) => datagrams::start_datagrams(context, id, request),
            Request::AttachGroup(request) => groups::attach(context, id, request),
            Request::DetachGroup(request) => groups::detach(context, id, request),
            Request::FindService(request) => {
                self.connections.services.find(context, id, seq, request)
            }
            Request::EndFindService(request) => {
                let resources = &mut context.resources;
                let services = &mut self.connections.services;
                services.end(resources, id, seq, request.search)
            }
            Request::AnswerFindService(request) => {
                let Connections {
                    services,
                    listeners,
                    ..
                } = &mut self.connections;
                services.answer(context, listeners, (id, seq), request)
            }
            Request::MigrateCm(request) => {
                self.connections
                    .migrate_events(&mut context.resources, id, seq, request)
            }
            Request::Accept(request) => self.connections.accept_request(context, id, seq, request),
            Request::Reject(request) => self.connections.reject_request(context, id, seq, request),
            Request::Disconnect(request) => connections::disconnect_qp(context, id, seq, request),
            Request::ListObjects(request) => lists::list_objects(
                context,
                lists::ListedParts {
                    memory: &self.memory,
                    listeners: &self.connections.listeners,
                    captures: &self.captures,
                    faults: &self.faults,
                    configuration: &self.configuration,
                    routes: &self.routes,
                },
                id,
                seq,
                request,
            ),
            Request::Operate(request) => {
                let (device_changes, context, changed) = self.split_for_changes();
                let parts = operate::OperatedParts {
                    device_changes,
                    changed,
                };
                operate::operate(context, parts, id, seq, request)
            }
            Request::StartCapture(request) => {
                self.captures.start_capture(context, id, seq, request)
            }
            Request::StartTrace(request) => self.captures.start_trace(context, id, seq, request),
            Request::LoadFaults(request) => self.faults.load_part(context, id, seq, request),
            Request::ReadStats(request) => {
                statistics::read_statistics(context, id, seq, request.offset)
            }
        }
    }

    /// Closes clients that broke the rules, and resumes reading requests of those whose deferred
    /// request was answered.
    fn end_event(&mut self) {
        loop {
            let faulty = std::mem::take(&mut self.context.resources.faulty);
            let answered = std::mem::take(&mut self.context.resources.answered);
            if faulty.is_empty() && answered.is_empty() {
                return;
            }
            for (id, reason) in faulty {
                self.close_faulty_client(id, &reason);
            }
            for id in answered {
                self.resume_client(id);
            }
        }
    }

    /// Resumes reading requests after a deferred one was answered.
    fn resume_client(&mut self, id: ClientId) {
        self.context.settle_account(id);
        let Some(client) = self.context.resources.clients.get_mut(&id) else {
            return;
        };
        let awaits_room = client.awaits_room;
        if client.waiting.is_none()
            && let Some(bytes) = client.parked.take()
        {
            self.on_packet(id, &bytes);
        }
        if !awaits_room {
            self.context.resources.resume_input(id);
        }
    }

    /// Closes clients that freed pages of their shared memory while it was in use.
    fn end_faulty_clients(&mut self) {
        for owner in fault_guard::take_faulty_owners() {
            let reason = "it freed pages of memory shared with siwd, and they cannot be replaced";
            self.close_faulty_client(ClientId::from_fault_owner(owner), reason);
        }
    }

    /// Closes a client that violated the rules of shared memory.
    fn close_faulty_client(&mut self, id: ClientId, reason: &str) {
        if let Some(client) = self.context.resources.clients.get(&id) {
            tracing::warn!(
                client = id.0,
                pid = client.peer.pid,
                "closing the client: {reason}"
            );
            self.context.resources.post_async_event(
                id,
                AsyncEventKind::DeviceFatal,
                EVERY_DEVICE,
                reason,
            );
            self.remove_client(id, &format!("was closed: {reason}"));
        }
    }

    /// Removes a client that has to leave, without any delay.
    fn remove_client(&mut self, id: ClientId, why: &str) {
        self.remove_departed(id, (why, false));
    }

    /// Removes a client; `reason`: why it departs, and whether its streams linger.
    fn remove_departed(&mut self, id: ClientId, reason: (&str, bool)) {
        self.captures.end_of_client(&mut self.context.workers, id);
        self.faults.end_of_client(id);
        self.departures.remove_client(
            &mut self.context,
            &mut self.connections,
            &self.memory,
            id,
            reason,
        );
        self.context.times.end_work("departure of a client");
    }

    /// Releases all clients when the daemon ends.
    pub fn let_clients_go(&mut self) {
        for client in std::mem::take(&mut self.context.resources.clients).into_values() {
            leave_slow_socket(client);
        }
        self.departures.let_go();
    }

    /// Processes queued events of the workers. The rest is processed in the next turn.
    fn take_worker_events(&mut self) {
        for worker in 0..self.context.workers.worker_count() {
            for _ in 0..EVENTS_PER_TURN {
                let Some(event) = self.context.workers.next_event(worker) else {
                    break;
                };
                self.on_worker_event(worker, event);
                self.end_event();
                self.context.times.end_work("report of a worker");
            }
        }
    }

    fn on_worker_event(&mut self, worker: usize, event: Event) {
        let context = &mut self.context;
        match event {
            Event::Sidr {
                device,
                local,
                remote,
                message,
            } => {
                let Connections {
                    services,
                    listeners,
                    ..
                } = &mut self.connections;
                services.on_message(context, listeners, (device, local, remote), &message);
            }
            Event::ReliableRocePeer { qpn, remote } => {
                pairing::note_roce_peer(&mut context.resources, qpn, remote);
            }
            Event::ConnectRequest {
                request,
                listener,
                local,
                remote,
                private_data,
                peer_ird,
                peer_ord,
            } => {
                let mut event = CmEventMessage::new(CmEventKind::ConnectRequest);
                // The initiator's IRD bounds our ORD, and its ORD our IRD.
                event.ord = peer_ird.map_or(0, u32::from);
                event.ird = peer_ord.map_or(0, u32::from);
                event.local = local.into();
                event.peer = remote.into();
                event.private_data = cm_events::to_private_data(&private_data);
                self.connections
                    .on_connect_request(context, worker, request, listener, event);
            }
            Event::RequestRefused {
                listener,
                local,
                remote,
                reason,
            } => self.connections.log_refused_request(
                &context.resources,
                listener,
                (local, remote),
                &reason,
            ),
            Event::RequestGone { request, failure } => {
                self.connections
                    .on_request_gone(&mut context.resources, request, &failure)
            }
            Event::StreamOpened {
                request,
                listener,
                local,
                remote,
            } => self.connections.on_stream_opened(
                context,
                worker,
                request,
                listener,
                (local, remote),
            ),
            Event::StreamReady { request } => self
                .connections
                .on_stream_ready(&mut context.resources, request),
            Event::StreamAnswer { token, answer } => {
                if let Some(Report::Stream(answer)) = self.on_report(token, Report::Stream(answer))
                {
                    streaming::close_unclaimed(&mut self.context, &answer);
                }
            }
            Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            } => {
                let ends = (local, remote);
                let resources = &mut context.resources;
                let switch = |on: bool| if on { "on" } else { "off" };
                let detail = format!(
                    "{local} -> {remote}, MPA revision {}, CRC {}, IRD {}, ORD {}",
                    negotiated.revision,
                    switch(negotiated.crc),
                    negotiated.ird,
                    negotiated.ord
                );
                resources.record_event(qpn, "established", Some(&detail));
                cm_events::on_established(resources, qpn, &negotiated, &private_data, ends);
                self.captures.on_established(context, qpn, ends);
                self.faults.on_established(context, qpn, ends);
            }
            Event::ConnectFailed {
                qpn,
                failure,
                last,
                is_kept,
            } => {
                context.resources.record_connection(qpn, last);
                self.faults.on_connect_failed(context, qpn);
                connections::on_connect_failed(context, qpn, failure, is_kept)
            }
            Event::Resolved {
                client,
                resolution,
                outcome,
            } => connections::on_resolved(&mut context.resources, client, resolution, &outcome),
            Event::AhResolved { token, failure } => {
                if let Some(failure) = failure {
                    datagrams::note_failure(&mut context.resources, token, failure);
                }
                self.on_report(token, Report::Done);
            }
            Event::Disconnected {
                qpn,
                failure,
                has_unpolled,
                last,
            } => {
                context.resources.record_connection(qpn, last);
                let reason = failure.map(|reason| cm_events::describe_disconnect(&reason).1);
                context.record_end(qpn, true, reason.as_deref());
                cm_events::on_disconnected(&mut context.resources, qpn, failure, has_unpolled);
            }
            Event::CompletionsPolled { qpn } => {
                cm_events::on_completions_polled(&mut context.resources, qpn)
            }
            Event::FaultsInjected { marks } => self.faults.on_injected(context, &marks),
            Event::QpDestroyed { qpn, windows } => {
                self.faults.on_destroyed(&mut context.workers, qpn);
                // The number will be reused: no window may stay bound to its next owner.
                for window in windows {
                    self.memory.keys.unbind_stream(window, qpn.0);
                }
                if let Some(token) = queue_pairs::on_released(&mut context.resources, qpn) {
                    self.on_report(token, Report::Done);
                }
            }
            Event::FramesHeld { token } => {
                memory::on_frames_late(&mut context.resources, worker, token)
            }
            Event::QpInfo { token, info, .. } => {
                self.on_report(token, Report::QpState(info));
            }
            Event::Async { client, qpn, event } => {
                queue_pairs::on_qp_event(&mut context.resources, client, qpn, event)
            }
            Event::CqOverflow { client, cq } => {
                let why = "the completion queue overflowed: make it deeper or poll it more often";
                context
                    .resources
                    .post_async_event(client, AsyncEventKind::CqErr, cq.0, why);
            }
            Event::SrqLimit { client, srq } => {
                shared_receive::srq_limit(&mut context.resources, client, srq)
            }
            Event::LastWqe { client, qpn } => {
                let why = "no more requests are taken from the shared receive queue";
                context.resources.post_async_event(
                    client,
                    AsyncEventKind::QpLastWqeReached,
                    qpn.0,
                    why,
                );
            }
            Event::BadRequest {
                client,
                qpn,
                reason,
            } => {
                let why = format!("work request refused: {reason}");
                context.resources.record_event(qpn, "QP_FATAL", Some(&why));
                context
                    .resources
                    .post_async_event(client, AsyncEventKind::QpFatal, qpn.0, &why);
            }
            Event::ClientFault { client, qpn } => {
                let why = format!("queue pair {qpn}: invalid ring indices");
                context.resources.faulty.push((client, why));
            }
            Event::ListenFailed { listener, reason } => {
                self.connections
                    .on_listen_failed(context, listener, &reason);
            }
            Event::PortRemoved { device } => self.links.on_port_removed(device),
            Event::Stats {
                worker,
                token,
                stats,
            } => {
                if let Some(counters) = context.workers.stats.get_mut(worker) {
                    *counters = *stats;
                }
                if let Some(files) = &mut self.counter_files {
                    let devices = &context.devices.views;
                    files.on_worker_stats(token, &context.workers.stats, devices);
                }
                self.on_report(token, Report::Done);
            }
            Event::Connections {
                worker,
                token,
                connections,
                next,
            } => {
                let report = Report::Connections {
                    worker,
                    connections,
                    next,
                };
                self.on_report(token, report);
            }
            Event::BarrierReached { worker, token } => self.on_barrier_passed(worker, token),
            Event::Stopped { worker } => {
                tracing::debug!(worker, "worker stopped");
                context.workers.on_stopped();
            }
        }
    }

    fn on_barrier_passed(&mut self, worker: usize, token: CommandToken) {
        if let Some(watchdog) = &mut self.watchdog
            && watchdog.on_barrier(token)
        {
            return;
        }
        let Some(id) = token.client else {
            return;
        };
        let context = &mut self.context;
        if !context.resources.clients.contains_key(&id) {
            self.departures.on_barrier(token);
            return;
        }
        memory::on_frames_released(context, worker, token);
        self.on_report(token, Report::Done);
    }

    /// Writes some rows of statistics that operators read.
    fn continue_statistics(&mut self) {
        if !self.statistics.is_writing() {
            return;
        }
        if let Some((token, text)) = self.statistics.continue_statistics(&mut self.context) {
            self.on_report(token, Report::Statistics(text));
        }
        self.context.times.end_work("ReadStats, rows");
    }

    /// Processes the helpers' reports.
    fn take_helper_reports(&mut self) {
        while let Some(report) = self.context.helpers.next_report() {
            match report {
                HelperReport::MemoryMade {
                    client,
                    token,
                    made,
                } => {
                    self.departures.forget_helper(client, token);
                    if let Some(Report::Arena(made)) = self.on_report(token, Report::Arena(made)) {
                        // The user is unknown: the client has left. Its memory is fresh, and freed as
                        // fast as any.
                        let queue = DisposalQueue::Memory(u32::MAX);
                        self.context.helpers.dispose(queue, Box::new(made), None);
                    }
                }
                HelperReport::HasRoom { uid } => self.context.resources.on_room(uid),
                HelperReport::Link { device, report } => self.on_link_report(device, &report),
                HelperReport::ConfigurationRead(loaded) => self.on_configuration_read(*loaded),
                HelperReport::DeviceOpened(opened) => {
                    let (device_changes, context, parts) = self.split_for_changes();
                    let done = device_changes.on_opened(context, parts, *opened);
                    self.store_changes();
                    if let Some((token, outcome)) = done {
                        let outcome = outcome.map(|()| String::new());
                        self.on_report(token, Report::Action(outcome));
                    }
                }
                HelperReport::HeapReturned => self.free_heap.on_returned(),
                // Its free heap may be returned.
                HelperReport::ClientGone => {}
                HelperReport::ArenaFreed { client, token } => {
                    self.departures.forget_helper(client, token);
                    self.on_report(token, Report::Done);
                }
            }
            self.end_event();
            self.context.times.end_work("report of a helper");
        }
    }

    /// Processes a report about a device's link.
    fn on_link_report(&mut self, device: usize, report: &LinkReport) {
        match report {
            LinkReport::Changed(state) => {
                self.links.on_link_state(&mut self.context, device, *state);
            }
            // Its connections end, and no new ones are made.
            LinkReport::Gone(event) => device_changes::remove_device(
                &mut self.context,
                &mut self.connections,
                &mut self.links,
                device,
                Removal::Event(*event),
            ),
            LinkReport::Closed => {
                self.links.on_closed(device);
                while let Some(token) = self.device_changes.take_removal(device) {
                    self.on_report(token, Report::Action(Ok(String::new())));
                }
            }
        }
    }

    /// Applies a configuration that was read again, and answers the requests for it.
    fn on_configuration_read(&mut self, loaded: Result<LoadedConfiguration, String>) {
        let outcome = loaded.and_then(|loaded| {
            self.configuration.apply(
                loaded,
                &mut self.context.resources,
                &mut self.acceptor,
                &mut self.memory,
            )
        });
        if let Err(why) = &outcome {
            tracing::error!("the configuration is not reloaded, nothing has changed: {why}");
        }
        for token in std::mem::take(&mut self.configuration.awaiting) {
            self.on_report(token, Report::Action(reload::outcome_text(&outcome)));
        }
        self.configuration.end_reload(&self.context.helpers);
        self.store_changes();
    }

    /// Stores what operators have changed, for the next start.
    fn store_changes(&mut self) {
        self.changes
            .update(&self.context, &self.configuration, &self.routes);
    }

    /// Answers deregistrations and frees departed clients that no worker can access.
    fn reclaim_objects(&mut self) {
        let budget = TurnBudget::new();
        let waits = self.memory.reclaim_keys(&budget);
        self.resume_key_requests();
        self.end_event();
        self.departures.reclaim(
            &mut self.context,
            &mut self.connections,
            &self.memory.keys,
            &budget,
            waits,
        );
    }
}

/// Logs the system calls that workers were refused; each once.
pub fn log_refused_calls() {
    for call in siw_seccomp::take_refused_calls() {
        tracing::error!(
            call,
            "a worker made a system call that it may not make, and got EPERM: please report this; \
             [workers] confine = false permits all"
        );
    }
}

/// Requests that clients send without waiting for a reply, from any thread: another thread may not
/// have mapped the queue of the last reply yet. No worker uses a queue because of them.
fn may_cross_a_reply(seq: u32, request: &Request) -> bool {
    let ends_something = matches!(
        request,
        Request::DeallocPd(_)
            | Request::FreeArena(_)
            | Request::DeregMr(_)
            | Request::DeallocMw(_)
            | Request::DestroyCq(_)
            | Request::DestroyChannel(_)
            | Request::DestroyQp(_)
            | Request::DestroySrq(_)
            | Request::DestroyCmChannel(_)
            | Request::EndResolution(_)
            | Request::DestroyAh(_)
            | Request::EndFindService(_)
            | Request::AnswerFindService(_)
            | Request::Unlisten(_)
            | Request::Disconnect(_)
            | Request::EndStream(_)
            | Request::Reject(_)
    );
    seq == codec::UNANSWERED && ends_something
}

/// Watches the kernel's routes.
fn watch_routes(epoll: &Epoll, monitor: BorrowedFd<'_>) -> std::io::Result<()> {
    let event = EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_ROUTES);
    Ok(epoll.add(monitor, event)?)
}

/// Writes the sysfs-like files. Without them some programs find less, but siwd serves all clients.
fn write_sysfs(
    socket: &BoundSocket,
    devices: &[DeviceView],
    has_counters: bool,
) -> Option<SysfsTree> {
    let devices = devices.iter().enumerate();
    let devices: Vec<_> = devices.map(|(index, view)| view.to_sysfs(index)).collect();
    let written = SysfsTree::write(socket.path(), &devices, has_counters);
    let warn =
        |error| tracing::warn!("cannot write the files for programs that read /sys: {error}");
    written.map_err(warn).ok()
}
