//! The control thread: client requests, client resources, and reports of workers.
//!
//! ```text
//!  clients == SOCK_SEQPACKET ==> clients.rs -> requests.rs -> resources.rs (the tree)
//!     ^                                            |
//!     |                                   workers.rs: Command (bounded queue) -> workers
//!     |                                                                             |
//!  outbox.rs <- cm.rs <- worker_events.rs <- Event (bounded queue) <----------------'
//! ```
//! The thread sleeps in epoll; nothing here is on a fast path. A request handler returns
//! `Served::Replied` after it sent the reply, `Served::Deferred` if a worker must answer first (the
//! request is kept in the client's `waiting`, and its next request stays in the socket), or a
//! `Refusal`, which becomes the reply.

mod addresses;
mod clients;
mod cm;
mod completion;
mod connections;
mod extents;
pub mod heap;
mod held_memory;
mod hello;
mod helpers;
pub mod host_routes;
pub mod links;
mod listening;
mod memory;
mod modify;
pub mod operators;
mod outbox;
mod pair_schedule;
mod pairing;
pub mod peers;
mod pending;
mod queues;
pub mod quotas;
mod reclaim;
mod refusal;
mod regions;
mod reports;
mod requests;
mod resources;
mod shared_receive;
pub mod socket;
mod statistics;
mod turn_times;
mod watchdog;
mod windows;
mod worker_events;
mod workers;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use siw_memory::KeyTable;
use siw_shm::WorkerPage;
use siw_shm::control::AsyncEventKind;
use siw_shm::control::messages::EVERY_DEVICE;
use siw_shm::control::{codec, messages};

use self::pairing::Pairing;
use crate::config::LimitsConfig;
use crate::device_view::DeviceView;
use crate::ids::ClientId;
use crate::sysfs_tree::SysfsTree;
use crate::worker::Mailbox;
use crate::worker::messages::Command;
use clients::AcceptPause;
use helpers::Helpers;
pub use helpers::MapArena;
use links::LinkMonitor;
use operators::Operators;
use outbox::TOKEN_OUTBOX;
use peers::SubordinateUsers;
use quotas::QuotaLimits;
use resources::Resources;
use socket::BoundSocket;
use turn_times::TurnTimes;
use watchdog::Watchdog;
use workers::WorkerSet;

/// Start parameters of the control thread.
pub struct ControlParts {
    /// The control socket.
    pub socket: BoundSocket,
    /// Delivers SIGTERM and SIGINT, which end the daemon, and SIGHUP, which does not.
    pub signals: SignalFd,
    /// Watchdog interval of the service manager; `None` without a watchdog.
    pub watchdog: Option<Duration>,
    /// The eventfd that workers write to wake the control thread.
    pub wake: Arc<OwnedFd>,
    /// Set while the control thread sleeps: workers write to `wake` only then.
    pub asleep: Arc<siw_shm::doorbell::SleepFlag>,
    /// Limits of each client, as reported to its library.
    pub limits: LimitsConfig,
    /// Limits of each client, of each user and of all clients together.
    pub quotas: QuotaLimits,
    /// Users that may read the counters of all clients.
    pub operators: Operators,
    /// Users that share the limits of another one.
    pub subordinates: SubordinateUsers,
    /// Users whose memory workers may copy with system calls.
    pub process_memory: crate::config::ProcessMemoryPolicy,
    /// Maximum time from connect to HELLO.
    pub hello_timeout: Duration,
    /// The devices, in the order of the configuration.
    pub devices: Vec<DeviceView>,
    /// Ports whose links can go down, by device index.
    pub watched_ports: Vec<Option<links::WatchedPort>>,
    /// Follows the kernel's routes and neighbours.
    pub host_routes: host_routes::RouteFollower,
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
    /// Frames may refer to registered memory instead of a copy.
    pub sends_by_reference: bool,
    /// Effective settings, as shown to operators with the counters.
    pub settings: serde_json::Value,
}

const TOKEN_LISTENER: u64 = u64::MAX;
const TOKEN_SIGNAL: u64 = u64::MAX - 1;
const TOKEN_WAKE: u64 = u64::MAX - 2;
const TOKEN_ROUTES: u64 = u64::MAX - 3;

/// Events of one worker processed in one turn.
const EVENTS_PER_TURN: usize = 256;

/// The control thread's state.
pub struct ControlThread {
    config: ControlParts,
    epoll: Epoll,
    workers: WorkerSet,
    helpers: Helpers,
    links: LinkMonitor,
    resources: Resources,
    /// Connections without a HELLO and their deadlines, oldest first.
    silent_clients: VecDeque<(Instant, ClientId)>,
    is_listening: bool,
    accept_pause: Option<AcceptPause>,
    /// Operators whose statistics are being written, a part in each turn.
    reading_operators: VecDeque<ClientId>,
    times: TurnTimes,
    /// Round-robin counter over a device's workers.
    next_worker: usize,
    pairing: Pairing,
    watchdog: Option<Watchdog>,
    /// Files that describe devices and link states; `None` if they cannot be written.
    sysfs: Option<SysfsTree>,
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
        mut config: ControlParts,
        mailboxes: Arc<[Arc<Mailbox>]>,
    ) -> std::io::Result<ControlThread> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let watch =
            |fd: BorrowedFd<'_>, token| epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token));
        watch(config.socket.listener(), TOKEN_LISTENER)?;
        watch(config.signals.as_fd(), TOKEN_SIGNAL)?;
        let wakes = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, TOKEN_WAKE);
        epoll.add(config.wake.as_fd(), wakes)?;
        if let Some(monitor) = config.host_routes.monitor_fd() {
            watch(monitor, TOKEN_ROUTES)?;
        }
        let (wake, asleep) = (config.wake.clone(), config.asleep.clone());
        let helpers = Helpers::start(wake, asleep, config.map_arena.clone())?;
        let watched = std::mem::take(&mut config.watched_ports);
        Ok(ControlThread {
            epoll,
            workers: WorkerSet::new(mailboxes),
            links: LinkMonitor::start(watched, &config.devices, helpers.reporter())?,
            helpers,
            resources: Resources::new(config.quotas.clone()),
            silent_clients: VecDeque::new(),
            is_listening: true,
            accept_pause: None,
            reading_operators: VecDeque::new(),
            times: TurnTimes::default(),
            next_worker: 0,
            pairing: Pairing::default(),
            watchdog: config.watchdog.map(Watchdog::new),
            sysfs: write_sysfs(&config),
            stopping: None,
            config,
        })
    }

    /// Serves until a signal arrives and the workers have stopped. Returns `false` if a worker has
    /// not stopped before the deadline.
    pub fn run(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 64];
        // The monitor is open already, so changes made from now on are not lost.
        self.load_host_routes();
        while self.workers.is_running() {
            let timeout = self.sleep_limit();
            // Announce the sleep, check again, then sleep: no wake-up is lost.
            self.config.asleep.announce_sleep();
            let timeout = if self.workers.has_events() || self.helpers.has_reports() {
                EpollTimeout::ZERO
            } else {
                timeout
            };
            let waited = self.epoll.wait(&mut events, timeout);
            self.config.asleep.announce_awake();
            let ready = match waited {
                Ok(ready) => ready,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(error) => {
                    tracing::error!("the control thread cannot wait for events: {error}");
                    self.begin_stop();
                    0
                }
            };
            self.times.begin_turn();
            self.end_faulty_clients();
            for event in &events[..ready] {
                match event.data() {
                    TOKEN_LISTENER => self.accept_clients(),
                    TOKEN_SIGNAL => self.on_signal(),
                    // Edge-triggered: no read is needed.
                    TOKEN_WAKE => {}
                    TOKEN_ROUTES => self.follow_host_routes(),
                    token if token & TOKEN_OUTBOX != 0 => self.flush_outbox(token),
                    token => self.on_client_readable(ClientId(token)),
                }
                self.times.end_work("end of an event");
            }
            self.take_worker_events();
            self.take_helper_reports();
            self.continue_statistics();
            self.close_silent_clients();
            self.resume_accepting();
            self.reclaim_objects();
            self.times.end_work("reclaim");
            self.retry_pairs();
            self.run_watchdog();
            self.times.end_work("timers");
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
        if !self.reading_operators.is_empty() || self.has_entries_to_remove() {
            return EpollTimeout::ZERO;
        }
        if self.waits_for_reclaim() {
            return EpollTimeout::from(1u8);
        }
        let limits = [
            self.stopping.map(|_| Duration::from_millis(50)),
            self.pairing.time_until_retry(),
            self.watchdog.as_ref().and_then(Watchdog::time_until_round),
            self.silent_clients
                .front()
                .map(|(deadline, _)| time_until(*deadline)),
            self.accept_pause
                .as_ref()
                .filter(|_| !self.is_listening)
                .map(|pause| time_until(pause.until)),
        ];
        let limit = limits.into_iter().flatten().min();
        limit.map_or(EpollTimeout::NONE, |limit| {
            let millis = u16::try_from(limit.as_millis()).unwrap_or(u16::MAX);
            EpollTimeout::from(millis.saturating_add(1))
        })
    }

    fn on_signal(&mut self) {
        while let Ok(Some(signal)) = self.config.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGHUP as u32 {
                tracing::info!(
                    "SIGHUP: the configuration is not reloaded; restart siwd to apply changes"
                );
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
        let _ = self.epoll.delete(self.config.socket.listener());
        let ids: Vec<ClientId> = self.resources.clients.keys().copied().collect();
        for id in ids {
            self.post_async_event(
                id,
                AsyncEventKind::DeviceFatal,
                EVERY_DEVICE,
                "siwd is stopping",
            );
        }
        self.workers.post_to_all(|| Command::Stop);
    }

    /// Sends an asynchronous event to a client; a client that does not read its events loses it.
    fn post_async_event(&mut self, id: ClientId, kind: AsyncEventKind, object: u32, reason: &str) {
        let may_wait = self.resources.may_queue_events(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let Some(outbox) = &mut client.events else {
            return;
        };
        let event = messages::AsyncEventMessage::new(kind, object, reason);
        let packet = codec::encode_event(messages::KIND_ASYNC_EVENT, &event);
        if kind == AsyncEventKind::DeviceFatal && object == EVERY_DEVICE {
            outbox.send_last_event(&self.epoll, packet);
        } else if !outbox.send_event(&self.epoll, packet, 0, may_wait) {
            tracing::debug!(client = id.0, "event lost: the client does not read events");
        }
        self.resources.settle_account(id);
    }

    fn flush_outbox(&mut self, token: u64) {
        let Some((id, channel)) = self.resources.outboxes.get(&token).copied() else {
            return;
        };
        let found = self.resources.clients.get_mut(&id).and_then(|client| {
            channel.map_or(client.events.as_mut(), |channel| {
                client.cm_channels.get_mut(&channel)
            })
        });
        if let Some(outbox) = found {
            outbox.flush_backlog(&self.epoll);
        }
        self.resources.settle_account(id);
    }

    /// Processes queued events of the workers. The rest is processed in the next turn.
    fn take_worker_events(&mut self) {
        for worker in 0..self.workers.worker_count() {
            for _ in 0..EVENTS_PER_TURN {
                let Some(event) = self.workers.next_event(worker) else {
                    break;
                };
                self.on_worker_event(worker, event);
                self.times.end_work("report of a worker");
            }
        }
    }
}

/// Writes the sysfs-like files. Without them some programs find less, but siwd serves all clients.
fn write_sysfs(config: &ControlParts) -> Option<SysfsTree> {
    let written = SysfsTree::write(config.socket.path(), &config.devices);
    let warn =
        |error| tracing::warn!("cannot write the files for programs that read /sys: {error}");
    written.map_err(warn).ok()
}

fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
