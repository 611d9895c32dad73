//! The control thread: clients' requests, their resources, and what workers report.
//!
//! ```text
//!  clients == SOCK_SEQPACKET ==> clients.rs -> requests.rs -> resources.rs (the tree)
//!     ^                                            |
//!     |                                   workers.rs: Command (bounded queue) -> workers
//!     |                                                                             |
//!  outbox.rs <- cm.rs <- worker_events.rs <- Event (bounded queue) <----------------'
//! ```
//! It sleeps in epoll; nothing here is on a fast path. A handler of a request returns
//! `Served::Replied` when it sent the reply, `Served::Deferred` when a worker has to answer first
//! (the request then waits in the client's `waiting`, and the client's next request in its socket),
//! or a `Refusal`, which becomes the reply.

mod addresses;
mod clients;
mod cm;
mod completion;
mod connection_account;
mod connections;
mod extents;
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
mod pairing;
mod pending;
mod queues;
pub mod quotas;
mod reclaim;
mod regions;
mod requests;
mod resources;
mod shared_receive;
pub mod socket;
mod statistics;
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
use siw_shm::control::AsyncEventKind;
use siw_shm::control::messages::EVERY_DEVICE;
use siw_shm::control::{codec, messages};
use siw_shm::{SharedMemory, WorkerPage};

use self::pairing::Pairing;
use crate::config::LimitsConfig;
use crate::ids::ClientId;
use crate::sysfs_tree::SysfsTree;
use crate::worker::Mailbox;
use crate::worker::messages::Command;
use clients::AcceptPause;
use helpers::Helpers;
use operators::Operators;
use quotas::QuotaLimits;
use resources::Resources;
use socket::BoundSocket;
use watchdog::Watchdog;
use workers::WorkerSet;

/// What clients see of one device, and what connects need to choose one.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// The name in the configuration, as in `siw0`.
    pub name: String,
    /// The name of its DPDK driver, as in `net_ring`.
    pub driver: String,
    /// The MAC address of its port.
    pub mac: [u8; 6],
    /// Its own addresses, each with the network that is on-link.
    pub addresses: Vec<crate::config::Cidr>,
    /// Networks behind routers on its link.
    pub routes: Vec<crate::config::Cidr>,
    /// It has an IPv4 default route.
    pub gateway: bool,
    /// It has an IPv6 default route.
    pub gateway6: bool,
    /// The largest IP packet, in bytes.
    pub mtu: u16,
    /// The speed of the link in Mb/s when last looked at; 0 where the port reports none.
    pub link_mbps: u32,
    /// The link was up when last looked at.
    pub link_up: bool,
    /// It was taken out of the machine, or can be used no longer for another reason.
    pub is_gone: bool,
    /// Connections ask for CRC unless their application says otherwise.
    pub crc: bool,
    /// No application may do without CRC.
    pub crc_required: bool,
    /// The MPA revision that initiators ask for: 1 or 2 (RFC 5044, RFC 6581).
    pub mpa_rev: u8,
    /// The most inbound RDMA READs and atomics that a queue pair may have outstanding.
    pub max_ird: u16,
    /// The most outbound RDMA READs and atomics that a queue pair may have outstanding.
    pub max_ord: u16,
    /// Workers that serve it.
    pub workers: Vec<usize>,
    /// Which of them a connection belongs to.
    pub steering: Arc<siw_tcp::Steering>,
    /// How TCP ports are divided with the kernel, where both have the device's addresses.
    pub host_ports: Option<Arc<crate::host_ports::HostPorts>>,
    /// Routes of the kernel beside its own.
    pub learned_routes: siw_tcp::LearnedRoutes,
}

/// Makes an arena known to DPDK and its NICs: they may read it while the result lives. `None` when
/// no NIC reads memory itself.
pub type MapArena =
    dyn Fn(&Arc<SharedMemory>) -> Result<Option<dpdk::ExternalRegion>, String> + Send + Sync;

/// What the control thread is started with.
pub struct ControlParts {
    /// The control socket.
    pub socket: BoundSocket,
    /// SIGTERM and SIGINT, which end the daemon, and SIGHUP, which does not.
    pub signals: SignalFd,
    /// How often the service manager wants to hear that all threads work; `None`: it does not.
    pub watchdog: Option<Duration>,
    /// The eventfd that workers write to wake the control thread.
    pub wake: Arc<OwnedFd>,
    /// Set while the control thread sleeps: workers write `wake` only then.
    pub asleep: Arc<siw_shm::doorbell::SleepFlag>,
    /// What each client may have, as its library is told.
    pub limits: LimitsConfig,
    /// What each client, each user and all together may have.
    pub quotas: QuotaLimits,
    /// Who sees the counters of all clients.
    pub operators: Operators,
    /// Whose memory may be copied from and to by system calls.
    pub process_memory: crate::config::ProcessMemoryPolicy,
    /// How long a connection may be silent at first.
    pub hello_timeout: Duration,
    /// The devices, in the order of the configuration.
    pub devices: Vec<DeviceView>,
    /// Reports links that go down and come up.
    pub links: links::LinkMonitor,
    /// Follows the kernel's routes and neighbours.
    pub host_routes: host_routes::RouteFollower,
    /// The memory keys, which workers read.
    pub keys: Arc<KeyTable>,
    /// The page in which clients see which workers sleep.
    pub page: WorkerPage,
    /// Queues and registered memory come from hugepages while there are some.
    pub hugepages: bool,
    /// Makes registered memory known to the ports that read it by DMA.
    pub map_arena: Arc<MapArena>,
    /// Whether there are such ports: making memory known to them takes long.
    pub ports_use_dma: bool,
    /// Frames may refer to registered memory instead of copying it.
    pub sends_by_reference: bool,
    /// What is in effect of the configuration, as the counters show it to operators.
    pub settings: serde_json::Value,
}

const TOKEN_LISTENER: u64 = u64::MAX;
const TOKEN_SIGNAL: u64 = u64::MAX - 1;
const TOKEN_WAKE: u64 = u64::MAX - 2;
const TOKEN_ROUTES: u64 = u64::MAX - 3;
/// A client's socket: its number. An event socket with a backlog: this bit set.
const TOKEN_OUTBOX: u64 = 1 << 62;

/// The control thread's state.
pub struct ControlThread {
    config: ControlParts,
    epoll: Epoll,
    workers: WorkerSet,
    helpers: Helpers,
    resources: Resources,
    /// Connections that have not said HELLO, and when they have to; the oldest first.
    silent_clients: VecDeque<(Instant, ClientId)>,
    is_listening: bool,
    accept_pause: Option<AcceptPause>,
    /// Counts connections, which take turns among a device's workers.
    next_worker: usize,
    pairing: Pairing,
    watchdog: Option<Watchdog>,
    /// Files that say what devices are and whether their links are up; `None`: they cannot be written.
    sysfs: Option<SysfsTree>,
    /// When the workers have to have stopped; `None` while the daemon serves.
    stopping: Option<Instant>,
}

impl ControlThread {
    /// Watches the control socket, signals and the workers' wake-ups.
    ///
    /// # Errors
    /// The operating system has no epoll instance or thread, or refuses to watch.
    pub fn new(
        config: ControlParts,
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
        Ok(ControlThread {
            epoll,
            workers: WorkerSet::new(mailboxes),
            helpers: Helpers::start(
                config.wake.clone(),
                config.asleep.clone(),
                config.map_arena.clone(),
            )?,
            resources: Resources::new(config.quotas.clone()),
            silent_clients: VecDeque::new(),
            is_listening: true,
            accept_pause: None,
            next_worker: 0,
            pairing: Pairing::default(),
            watchdog: config.watchdog.map(Watchdog::new),
            sysfs: write_sysfs(&config),
            stopping: None,
            config,
        })
    }

    /// Serves until a signal ends it and the workers have stopped. `false`: one of them has not, in
    /// the time that it has.
    pub fn run(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 64];
        // What changes from now on is heard of: the monitor listens already.
        self.load_host_routes();
        while self.workers.is_running() {
            let timeout = self.sleep_limit();
            // Announce, look once more, sleep: no event is missed.
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
            self.end_faulty_clients();
            for event in &events[..ready] {
                match event.data() {
                    TOKEN_LISTENER => self.accept_clients(),
                    TOKEN_SIGNAL => self.on_signal(),
                    // Watched by its edges: it need not be read.
                    TOKEN_WAKE => {}
                    TOKEN_ROUTES => self.follow_host_routes(),
                    token if token & TOKEN_OUTBOX != 0 => self.flush_outbox(token),
                    token => self.on_client_readable(ClientId(token)),
                }
            }
            self.take_worker_events();
            self.take_helper_reports();
            self.close_silent_clients();
            self.resume_accepting();
            self.reclaim_objects();
            self.poll_links();
            self.retry_pairs();
            self.run_watchdog();
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

    /// How long nothing has to be done, whatever comes.
    fn sleep_limit(&self) -> EpollTimeout {
        if self.waits_for_reclaim() {
            return EpollTimeout::from(1u8);
        }
        let limits = [
            self.stopping.map(|_| Duration::from_millis(50)),
            self.config.links.time_until_poll(),
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
                    "SIGHUP: nothing is read again; restart siwd for a changed configuration"
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

    /// An asynchronous event for a client. One that does not read them loses them.
    fn post_async_event(&mut self, id: ClientId, kind: AsyncEventKind, object: u32, reason: &str) {
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
        } else if !outbox.send_event(&self.epoll, packet, 0) {
            tracing::debug!(client = id.0, "event lost: the client reads none");
        }
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
    }

    /// Everything that workers have reported.
    fn take_worker_events(&mut self) {
        for worker in 0..self.workers.worker_count() {
            while let Some(event) = self.workers.next_event(worker) {
                self.on_worker_event(worker, event);
            }
        }
    }
}

/// Programs without these files find less; siwd serves them all the same.
fn write_sysfs(config: &ControlParts) -> Option<SysfsTree> {
    let written = SysfsTree::write(config.socket.path(), &config.devices);
    let warn = |error| tracing::warn!("no files for programs that look in /sys: {error}");
    written.map_err(warn).ok()
}

fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
