//! The control thread: clients' requests, their resources, and what workers report.
//!
//! ```text
//!  clients == SOCK_SEQPACKET ==> requests.rs -> resources.rs (the tree)
//!                                     |
//!                          Command (bounded queue) -> workers
//!                          Event   (bounded queue) <- workers -> cm.rs -> CM and async events
//! ```
//! It sleeps in epoll; nothing here is on a fast path. A request that needs a worker's answer
//! leaves the client in `pending` until that answer comes, and the client's next request waits.

mod cm;
mod completion;
mod connections;
mod hello;
pub mod links;
mod listening;
mod memory;
mod modify;
mod outbox;
mod queues;
mod reclaim;
mod requests;
mod resources;
mod shared_receive;
mod statistics;
mod windows;

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signalfd::SignalFd;
use siw_memory::KeyTable;
use siw_shm::control::{AsyncEventKind, ControlSocket, RecvError, Request};
use siw_shm::control::{codec, messages};
use siw_shm::{SharedMemory, WorkerPage};

use crate::config::LimitsConfig;
use crate::ids::{ClientId, CmChannelId, CmListenerId, CommandToken, CqId, Qpn, SrqId};
use crate::worker::Mailbox;
use crate::worker::messages::{Command, Event, WorkerStats};
use listening::{ConnectRequests, Listeners};
use resources::Client;

/// What clients see of one device.
#[derive(Debug, Clone)]
pub struct DeviceView {
    pub name: String,
    pub driver: String,
    pub mac: [u8; 6],
    pub addresses: Vec<crate::config::Cidr>,
    /// Networks behind routers on its link.
    pub routes: Vec<crate::config::Cidr>,
    pub gateway: bool,
    pub gateway6: bool,
    pub mtu: u16,
    pub link_mbps: u32,
    pub link_up: bool,
    pub crc: bool,
    /// No application may do without CRC.
    pub crc_required: bool,
    pub mpa_rev: u8,
    pub max_ird: u16,
    pub max_ord: u16,
    /// Workers that serve it.
    pub workers: Vec<usize>,
    /// Which of them a connection belongs to.
    pub steering: Arc<siw_tcp::Steering>,
}

/// A registered arena also has to be known to DPDK before a NIC may read it.
pub type MapArena = Box<dyn Fn(&Arc<SharedMemory>) -> Result<Option<dpdk::ExternalRegion>, String>>;

/// What the control thread is started with.
pub struct ControlParts {
    pub socket: PathBuf,
    pub listener: OwnedFd,
    pub signals: SignalFd,
    pub wake: Arc<OwnedFd>,
    pub asleep: Arc<siw_shm::doorbell::SleepFlag>,
    pub limits: LimitsConfig,
    pub devices: Vec<DeviceView>,
    pub links: links::LinkMonitor,
    pub mailboxes: Vec<Arc<Mailbox>>,
    pub keys: Arc<KeyTable>,
    pub page: WorkerPage,
    pub hugepages: bool,
    pub map_arena: MapArena,
}

/// A listener, on all workers of its devices.
struct CmListener {
    client: ClientId,
    cm_channel: CmChannelId,
    cookie: u64,
    /// Device indices.
    devices: Vec<usize>,
    local: Option<IpAddr>,
    port: u16,
}

/// An object that several messages of the data path name by number: numbers are reused late.
#[derive(Default)]
struct NumberPool {
    next: u32,
    free: std::collections::VecDeque<u32>,
}

impl NumberPool {
    fn allocate(&mut self) -> u32 {
        if self.free.len() > 1024
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        self.next += 1;
        self.next
    }
    fn release(&mut self, number: u32) {
        self.free.push_back(number);
    }
}

/// What a client's unanswered request waits for.
enum PendingReply {
    /// All workers passed a fence; then the completion queue's memory is free.
    FreeCq {
        cq: CqId,
        token: CommandToken,
        left: usize,
    },
    /// All workers passed a fence: they write to the new rings.
    ResizeCq {
        cq: CqId,
        geometry: siw_shm::CqGeometry,
        token: CommandToken,
        left: usize,
    },
    /// The worker tells the queue pair's state: the answer to MODIFY_QP, or to QUERY_QP.
    QpInfo { token: CommandToken, modify: bool },
    /// The worker lets the queue pair go, which then is as new.
    ResetQp { qpn: Qpn },
    /// The worker let the queue pair go.
    DestroyQp { qpn: Qpn },
    /// No worker can use the old key any more.
    QuiescentKey {
        ticket: siw_memory::Retired,
        then: memory::QuiescentReply,
    },
    /// All workers passed a fence; then the shared receive queue's memory is free.
    FreeSrq {
        srq: SrqId,
        token: CommandToken,
        left: usize,
    },
    /// Counters of all workers.
    Stats { token: CommandToken, left: usize },
}

struct DeferredRequest {
    seq: u32,
    what: PendingReply,
}

/// A client that is gone, until no worker knows it any more.
struct DepartingClient {
    client: Client,
    token: CommandToken,
    left: usize,
}

/// Requests of one client that are served before those of others, when they have no answer.
const READ_AHEAD: usize = 8;
const TOKEN_LISTENER: u64 = u64::MAX;
const TOKEN_SIGNAL: u64 = u64::MAX - 1;
const TOKEN_WAKE: u64 = u64::MAX - 2;
/// A client's socket: its number. An event socket with a backlog: this bit set.
const TOKEN_OUTBOX: u64 = 1 << 40;

/// The control thread's state.
pub struct ControlThread {
    config: ControlParts,
    epoll: Epoll,
    clients: HashMap<ClientId, Client>,
    departing: Vec<DepartingClient>,
    listeners: Listeners,
    requests: ConnectRequests,
    last_client: u32,
    last_pd: u32,
    qpns: NumberPool,
    cqs: NumberPool,
    srqs: NumberPool,
    last_listener: u32,
    last_request: u32,
    last_outbox: u32,
    last_token: u64,
    next_worker: usize,
    stats: Vec<WorkerStats>,
    stopping: Option<Instant>,
    workers_running: usize,
}

impl ControlThread {
    pub fn new(config: ControlParts) -> nix::Result<ControlThread> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let watch =
            |fd: BorrowedFd<'_>, token| epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token));
        watch(config.listener.as_fd(), TOKEN_LISTENER)?;
        watch(config.signals.as_fd(), TOKEN_SIGNAL)?;
        let wakes = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, TOKEN_WAKE);
        epoll.add(config.wake.as_fd(), wakes)?;
        let workers = config.mailboxes.len();
        Ok(ControlThread {
            config,
            epoll,
            clients: HashMap::new(),
            departing: Vec::new(),
            listeners: Listeners::default(),
            requests: ConnectRequests::default(),
            last_client: 0,
            last_pd: 0,
            qpns: NumberPool::default(),
            cqs: NumberPool::default(),
            srqs: NumberPool::default(),
            last_listener: 0,
            last_request: 0,
            last_outbox: 0,
            last_token: 0,
            next_worker: 0,
            stats: vec![WorkerStats::default(); workers],
            stopping: None,
            workers_running: workers,
        })
    }

    /// Serves until a signal ends it and the workers have stopped.
    pub fn run(&mut self) {
        let mut events = [EpollEvent::empty(); 64];
        while self.workers_running > 0 {
            let timeout = if self.waits_for_reclaim() {
                EpollTimeout::from(1u8)
            } else if self.stopping.is_some() {
                EpollTimeout::from(50u8)
            } else {
                let wait = self
                    .config
                    .links
                    .time_until_poll()
                    .map(|duration| duration.as_millis() as u16 + 1);
                wait.map_or(EpollTimeout::NONE, EpollTimeout::from)
            };
            // Announce, look once more, sleep: no event is missed.
            self.config.asleep.announce_sleep();
            let told = self
                .config
                .mailboxes
                .iter()
                .any(|mailbox| !mailbox.events.is_empty());
            let timeout = if told { EpollTimeout::ZERO } else { timeout };
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
            for event in &events[..ready] {
                match event.data() {
                    TOKEN_LISTENER => self.accept_clients(),
                    TOKEN_SIGNAL => self.on_signal(),
                    // Watched by its edges: it need not be read.
                    TOKEN_WAKE => {}
                    token if token & TOKEN_OUTBOX != 0 => self.flush_outbox(token),
                    token => self.on_client_readable(ClientId(token as u32)),
                }
            }
            self.take_worker_events();
            self.reclaim_objects();
            self.poll_links();
            if self
                .stopping
                .is_some_and(|deadline| Instant::now() > deadline)
            {
                tracing::error!("a worker did not stop in time");
                return;
            }
        }
    }

    fn on_signal(&mut self) {
        if let Ok(Some(signal)) = self.config.signals.read_signal() {
            tracing::info!(signal = signal.ssi_signo, "stopping");
        }
        self.begin_stop();
    }

    fn begin_stop(&mut self) {
        if self.stopping.is_some() {
            return;
        }
        crate::host::notify_service_manager("STOPPING=1");
        self.stopping = Some(Instant::now() + Duration::from_secs(5));
        let _ = self.epoll.delete(&self.config.listener);
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            self.post_async_event(id, AsyncEventKind::DeviceFatal, 0, "siwd is stopping");
        }
        for worker in 0..self.config.mailboxes.len() {
            self.post_command(worker, Command::Stop);
        }
    }

    /// Hands a command to a worker and wakes it. A full queue is waited for: workers empty it
    /// in microseconds.
    fn post_command(&self, worker: usize, command: Command) {
        let Some(mailbox) = self.config.mailboxes.get(worker) else {
            return;
        };
        let mut command = command;
        while let Err(back) = mailbox.commands.push(command) {
            command = back;
            mailbox.inbox.wake();
            std::thread::sleep(Duration::from_micros(50));
        }
        mailbox.wake_worker();
    }

    /// A token that no command under way has.
    fn next_token(&mut self) -> CommandToken {
        self.last_token += 1;
        CommandToken(self.last_token)
    }

    /// Sends a fence to every worker; the events come with this token.
    fn post_barrier(&mut self) -> (CommandToken, usize) {
        let token = self.next_token();
        for worker in 0..self.config.mailboxes.len() {
            self.post_command(worker, Command::Barrier { token });
        }
        (token, self.config.mailboxes.len())
    }

    fn accept_clients(&mut self) {
        loop {
            match ControlSocket::accept_client(self.config.listener.as_fd()) {
                Ok(Some(conn)) => self.add_client(conn),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!("a client could not be accepted: {error}");
                    return;
                }
            }
        }
    }

    fn add_client(&mut self, conn: ControlSocket) {
        if self.clients.len() >= self.config.limits.clients as usize {
            let why = format!(
                "{} clients are connected; raise [limits] clients",
                self.clients.len()
            );
            let _ = conn.send_refusal(0, 0, nix::libc::EUSERS, &why);
            return;
        }
        self.last_client += 1;
        let id = ClientId(self.last_client);
        let pid = conn.peer_credentials().map_or(0, |peer| peer.0);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, u64::from(id.0));
        if let Err(error) = self.epoll.add(conn.as_fd(), event) {
            tracing::warn!("a client could not be watched: {error}");
            return;
        }
        tracing::debug!(client = id.0, pid, "client connected");
        let pages = if self.config.hugepages {
            siw_shm::shared_memory::PageSize::TryHuge
        } else {
            siw_shm::shared_memory::PageSize::Normal
        };
        self.clients
            .insert(id, Client::new(id, pid, conn, pages, &self.config.limits));
    }

    fn on_client_readable(&mut self, id: ClientId) {
        // One at a time: most clients wait for the answer before they ask again; of the others,
        // epoll tells. After a request that has no answer the next one is near.
        for _ in 0..READ_AHEAD {
            if !self.read_request(id) {
                return;
            }
        }
    }

    /// Serves a request, if one waits; whether it was one that has no answer.
    fn read_request(&mut self, id: ClientId) -> bool {
        let Some(client) = self.clients.get_mut(&id) else {
            return false;
        };
        if client.parked.is_some() {
            client.more_input = true;
            self.watch_client(id, false);
            return false;
        }
        match client.conn.recv_packet() {
            Ok(packet) if client.waiting.is_some() => client.parked = Some(packet.bytes),
            Ok(packet) => {
                self.on_packet(id, &packet.bytes);
                return codec::peek_header(&packet.bytes)
                    .is_some_and(|(_, seq)| seq == codec::UNANSWERED);
            }
            Err(RecvError::WouldBlock) => {}
            Err(RecvError::Closed) => self.remove_client(id, "closed its socket"),
            Err(RecvError::Truncated) => {
                let _ = client
                    .conn
                    .send_refusal(0, 0, nix::libc::EMSGSIZE, "packet too long");
                self.remove_client(id, "sent an overlong packet");
            }
            Err(RecvError::Io(error)) => self.remove_client(id, &format!("socket failed: {error}")),
        }
        false
    }

    fn on_packet(&mut self, id: ClientId, bytes: &[u8]) {
        match Request::decode(bytes) {
            Ok((seq, request)) => {
                if self.on_request(id, seq, &request) == requests::RequestState::TryAgain
                    && let Some(client) = self.clients.get_mut(&id)
                {
                    client.parked = Some(bytes.to_vec());
                }
            }
            Err(error) => {
                let Some(client) = self.clients.get_mut(&id) else {
                    return;
                };
                let (kind, seq) = codec::peek_header(bytes).unwrap_or((0, 0));
                let errno = match error {
                    codec::ProtoError::Version { .. } => nix::libc::EPROTONOSUPPORT,
                    codec::ProtoError::Kind(_) => nix::libc::EOPNOTSUPP,
                    _ => nix::libc::EPROTO,
                };
                tracing::warn!(client = id.0, pid = client.pid, "{error}");
                let _ = client
                    .conn
                    .send_refusal(kind, seq, errno, &error.to_string());
                if !matches!(error, codec::ProtoError::Kind(_)) {
                    self.remove_client(id, "spoke no protocol of ours");
                }
            }
        }
    }

    /// Reads a client's requests, or lets them wait.
    fn watch_client(&mut self, id: ClientId, on: bool) {
        if let Some(client) = self.clients.get(&id) {
            let flags = if on {
                EpollFlags::EPOLLIN
            } else {
                EpollFlags::empty()
            };
            let mut event = EpollEvent::new(flags, u64::from(id.0));
            let _ = self.epoll.modify(client.conn.as_fd(), &mut event);
        }
    }

    /// The deferred request is answered: the next one may be read.
    fn on_answered(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let watch = std::mem::take(&mut client.more_input);
        if client.waiting.is_none()
            && let Some(bytes) = client.parked.take()
        {
            self.on_packet(id, &bytes);
        }
        if watch {
            self.watch_client(id, true);
        }
    }

    /// Frees a client's subtree: first in the workers, then its keys and memory.
    fn remove_client(&mut self, id: ClientId, why: &str) {
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        tracing::debug!(client = id.0, pid = client.pid, "client gone: it {why}");
        let _ = self.epoll.delete(client.conn.as_fd());
        let gone: Vec<CmListenerId> = self
            .listeners
            .iter()
            .filter(|(_, listener)| listener.client == id)
            .map(|(number, _)| number)
            .collect();
        for listener in gone {
            self.remove_listener(listener);
        }
        for worker in 0..self.config.mailboxes.len() {
            self.post_command(worker, Command::RemoveClient { client: id });
        }
        let (token, left) = self.post_barrier();
        self.departing.push(DepartingClient {
            client,
            token,
            left,
        });
    }

    /// Ends a client that broke the rules of shared memory.
    fn close_faulty_client(&mut self, id: ClientId, reason: &str) {
        if let Some(client) = self.clients.get(&id) {
            tracing::warn!(
                client = id.0,
                pid = client.pid,
                "closing the client: {reason}"
            );
            self.post_async_event(id, AsyncEventKind::DeviceFatal, 0, reason);
            self.remove_client(id, "broke the rules of its queues");
        }
    }

    fn post_async_event(&mut self, id: ClientId, kind: AsyncEventKind, object: u32, reason: &str) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(outbox) = &mut client.events else {
            return;
        };
        let event = messages::AsyncEventMessage::new(kind, object, reason);
        outbox.send_event(
            &self.epoll,
            codec::encode_event(messages::KIND_ASYNC_EVENT, &event),
        );
    }

    fn flush_outbox(&mut self, token: u64) {
        let epoll = &self.epoll;
        let found = self
            .clients
            .values_mut()
            .flat_map(|client| {
                client
                    .events
                    .iter_mut()
                    .chain(client.cm_channels.values_mut())
            })
            .find(|outbox| outbox.token() == token);
        if let Some(outbox) = found {
            outbox.flush_backlog(epoll);
        }
    }

    /// Everything that workers have reported.
    fn take_worker_events(&mut self) {
        for worker in 0..self.config.mailboxes.len() {
            let mailbox = self.config.mailboxes[worker].clone();
            while let Some(event) = mailbox.events.pop() {
                match event {
                    Event::Stopped { worker } => {
                        tracing::debug!(worker, "worker stopped");
                        self.workers_running -= 1;
                    }
                    Event::BarrierReached { token, .. } => self.on_barrier_passed(token),
                    other => self.on_worker_event(worker, other),
                }
            }
        }
    }

    /// Answers statistics once all workers have told theirs.
    fn on_worker_stats(&mut self, worker: usize, token: CommandToken, stats: WorkerStats) {
        if let Some(counters) = self.stats.get_mut(worker) {
            *counters = stats;
        }
        let found = self
            .clients
            .iter_mut()
            .find_map(|(id, client)| match &mut client.waiting {
                Some(DeferredRequest {
                    what:
                        PendingReply::Stats {
                            token: awaited,
                            left,
                        },
                    ..
                }) if *awaited == token => {
                    *left = left.saturating_sub(1);
                    Some((*id, *left))
                }
                _ => None,
            });
        if let Some((id, 0)) = found {
            self.reply_statistics(id);
        }
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        // Only the daemon that bound the path takes it away.
        let _ = std::fs::remove_file(&self.config.socket);
        tracing::debug!(
            fd = self.config.listener.as_raw_fd(),
            "control socket closed"
        );
    }
}
