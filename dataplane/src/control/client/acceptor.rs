//! New clients: accept, the wait for HELLO, and HELLO itself, which sets up a client's doorbells and
//! event socket and reports its limits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::unistd::Gid;
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;
use siw_shm::{DoorbellConsumer, SharedMemory, WorkerPage, doorbell, wqe};

use super::outbox::{self, Outbox};
use super::peers::{PeerCredentials, SubordinateUsers, has_descriptors_waiting};
use super::socket::BoundSocket;
use crate::config::{ControlSocketConfig, LimitsConfig};
use crate::control::account::quotas::{self, Quota};
use crate::control::context::Context;
use crate::control::operator::operators::Operators;
use crate::control::queues::shared_receive;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, Served};
use crate::control::resources::{Client, Resources};
use crate::control::threads::helpers::{DisposalQueue, Helpers};
use crate::device_view::DeviceView;
use crate::ids::ClientId;
use crate::worker::messages::Command;

/// Epoll token of the control socket.
pub(in crate::control) const TOKEN_LISTENER: u64 = u64::MAX;
/// Descriptors per client, in addition to one per worker: socket, event outbox, doorbells.
const CLIENT_DESCRIPTORS: u64 = 3;
/// Bytes of replies that a client's socket buffers; a client that reads none loses further ones.
const REPLY_BYTES: usize = 64 << 10;
/// Bytes that the kernel buffers for one client: replies and asynchronous events.
const CLIENT_BUFFERS: u64 = (REPLY_BYTES + outbox::SOCKET_BYTES) as u64;
/// Pause in accepting when the operating system is out of descriptors or memory: initial and
/// maximum length.
const ACCEPT_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Pause in accepting clients after the operating system failed an accept.
struct AcceptPause {
    until: Instant,
    length: Duration,
}

/// The control socket, and clients that have not sent HELLO yet.
pub(in crate::control) struct Acceptor {
    socket: BoundSocket,
    /// Users that may read the counters of all clients.
    operators: Operators,
    /// Users that share the limits of another one.
    subordinates: SubordinateUsers,
    /// Shared page in which clients see which workers sleep.
    page: WorkerPage,
    /// Maximum time from connect to HELLO.
    hello_timeout: Duration,
    /// Connections without a HELLO and their deadlines, oldest first.
    silent: VecDeque<(Instant, ClientId)>,
    is_listening: bool,
    pause: Option<AcceptPause>,
}

impl Acceptor {
    /// Watches the control socket.
    ///
    /// # Errors
    /// The operating system refuses to watch the socket.
    pub fn new(
        epoll: &Epoll,
        socket: BoundSocket,
        (operators, subordinates): (Operators, SubordinateUsers),
        page: WorkerPage,
        hello_timeout: Duration,
    ) -> std::io::Result<Acceptor> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_LISTENER);
        epoll.add(socket.listener(), event)?;
        Ok(Acceptor {
            socket,
            operators,
            subordinates,
            page,
            hello_timeout,
            silent: VecDeque::new(),
            is_listening: true,
            pause: None,
        })
    }

    /// Accepts a waiting client. Returns false if none waits, or none can be accepted now.
    pub fn accept_next(&mut self, context: &mut Context) -> bool {
        if !self.is_listening {
            return false;
        }
        match ControlSocket::accept_client(self.socket.listener()) {
            Ok(Some(conn)) => {
                self.pause = None;
                self.add_client(context, conn);
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.pause_accepting(&context.resources.epoll, &error);
                false
            }
        }
    }

    /// Changes the permissions of the socket and the operators, also for connected clients.
    ///
    /// # Errors
    /// The socket's owner or mode cannot be changed.
    pub fn apply_settings(
        &mut self,
        resources: &mut Resources,
        control: &ControlSocketConfig,
        group: Option<Gid>,
        operators: Operators,
    ) -> Result<(), String> {
        self.socket.set_permissions(group, control.mode)?;
        self.hello_timeout = control.hello_timeout();
        self.operators = operators;
        for client in resources.clients.values_mut() {
            let is_operator = self.operators.include(&client.peer);
            client.account.set_operator(is_operator);
        }
        Ok(())
    }

    /// Accepts no further clients: the daemon stops.
    pub fn stop(&mut self, epoll: &Epoll) {
        let _ = epoll.delete(self.socket.listener());
        self.is_listening = false;
        self.pause = None;
    }

    /// Time until a HELLO is overdue, or the pause in accepting ends.
    pub fn time_until_due(&self) -> Option<Duration> {
        let silent = self.silent.front().map(|(deadline, _)| *deadline);
        let pause = self.pause.as_ref().filter(|_| !self.is_listening);
        let due = [silent, pause.map(|pause| pause.until)];
        let first = due.into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Takes a client whose HELLO is overdue, and tells it.
    pub fn take_silent_client(&mut self, resources: &Resources) -> Option<ClientId> {
        while let Some((deadline, id)) = self.silent.front().copied() {
            let client = resources.clients.get(&id);
            let silent = client.filter(|client| !client.greeted);
            if silent.is_some() && Instant::now() < deadline {
                return None;
            }
            self.silent.pop_front();
            if let Some(client) = silent {
                let why = "no HELLO was received in time: see [control] hello_timeout_ms";
                let _ = client.conn.send_refusal(0, 0, libc::ETIMEDOUT, why);
                return Some(id);
            }
        }
        None
    }

    /// Leaves waiting clients in the listen queue for a while; otherwise epoll would wake this
    /// thread continuously.
    fn pause_accepting(&mut self, epoll: &Epoll, error: &std::io::Error) {
        let (first, longest) = ACCEPT_PAUSE;
        let length = match &self.pause {
            Some(pause) => (pause.length * 2).min(longest),
            None => {
                tracing::warn!("cannot accept clients, will retry: {error}");
                first
            }
        };
        self.watch_listener(epoll, false);
        self.pause = Some(AcceptPause {
            until: Instant::now() + length,
            length,
        });
    }

    fn watch_listener(&mut self, epoll: &Epoll, on: bool) {
        let flags = if on {
            EpollFlags::EPOLLIN
        } else {
            EpollFlags::empty()
        };
        let mut event = EpollEvent::new(flags, TOKEN_LISTENER);
        let listener = self.socket.listener();
        self.is_listening = epoll.modify(listener, &mut event).is_ok() && on;
    }

    /// Accepts clients again after the pause.
    pub fn resume_accepting(&mut self, epoll: &Epoll) {
        let over = self
            .pause
            .as_ref()
            .is_some_and(|pause| Instant::now() >= pause.until);
        // The pause is kept: the next one is longer, unless a client is accepted first.
        if over && !self.is_listening {
            self.watch_listener(epoll, true);
        }
    }

    fn add_client(&mut self, context: &mut Context, conn: ControlSocket) {
        let peer = match PeerCredentials::of(&conn) {
            Ok(peer) => peer,
            Err(error) => {
                // Nobody could be charged.
                tracing::warn!("a client without credentials is refused: {error}");
                close_refused(&context.helpers, u32::MAX, conn);
                return;
            }
        };
        let is_operator = self.operators.include(&peer);
        let uid = self.subordinates.user_of(peer.uid);
        let account = context.resources.ledger.open_account(uid, is_operator);
        let descriptors = CLIENT_DESCRIPTORS + context.workers.worker_count() as u64;
        let amounts = [
            (Quota::Clients, 1),
            (Quota::Descriptors, descriptors),
            (Quota::Memory, CLIENT_BUFFERS),
        ];
        let charge = match context.resources.ledger.charge(&account, amounts) {
            Ok(charge) => charge,
            Err(over) => {
                tracing::debug!(uid, "client refused: {over}");
                let _ = conn.send_refusal(0, 0, libc::EUSERS, &over.to_string());
                close_refused(&context.helpers, uid, conn);
                return;
            }
        };
        let id = context.resources.next_client_id();
        let event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
        if let Err(error) = context.resources.epoll.add(conn.as_fd(), event) {
            tracing::warn!("cannot watch a client's socket: {error}");
            close_refused(&context.helpers, uid, conn);
            return;
        }
        conn.limit_send_buffer(REPLY_BYTES);
        let client = Client::new(id, conn, peer, (account, charge), &context.resources.limits);
        tracing::debug!(
            client = id.0,
            pid = client.peer.pid,
            uid,
            "client connected"
        );
        context.resources.clients.insert(id, client);
        self.silent
            .push_back((Instant::now() + self.hello_timeout, id));
    }

    /// Serves HELLO.
    pub fn greet_client(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        hello: &m::ClientHello,
    ) -> Outcome {
        let version = hello.common_version().ok_or_else(|| {
            Refusal::new(
                libc::EPROTONOSUPPORT,
                format!(
                    "protocol versions {} to {}, siwd speaks {} to {}: update the older one of client library and siwd",
                    hello.min_version,
                    hello.version,
                    m::MIN_VERSION,
                    m::VERSION
                ),
            )
        })?;
        let workers = context.workers.worker_count() as u32;
        let limits = client_limits(&context.resources.limits, &context.devices.views);
        let Some(client) = context.resources.clients.get_mut(&id) else {
            return Ok(Served::Replied);
        };
        if client.greeted {
            return Err(Refusal::new(libc::EISCONN, "HELLO was already sent"));
        }
        let waits = hello.features & m::FEATURE_DOORBELL_WAIT != 0;
        let most = match waits {
            true => doorbell::MAX_CAPACITY_OF_WAITING,
            false => doorbell::MAX_CAPACITY,
        };
        let capacity = context
            .resources
            .limits
            .queue_pairs_per_client
            // A destroyed queue pair may leave an entry behind.
            .saturating_mul(2)
            .clamp(64, most)
            .next_power_of_two();
        let len = doorbell::ring_len(capacity) * workers as usize;
        // The client can touch all of it, so all of it is charged.
        let amounts = [(Quota::Memory, len as u64)];
        let charge = context.resources.charge(id, amounts)?;
        let client = context.resources.client_mut(id)?;
        client.name = hello.name.to_text();
        let region = Arc::new(
            SharedMemory::create_memfd(
                "siwd-doorbells",
                len,
                siw_shm::shared_memory::PageSize::Normal,
            )
            .and_then(|memory| memory.guard_for(id.fault_owner()))
            .map_err(Refusal::no_shared_memory)?,
        );
        let (events, theirs) = ControlSocket::new_pair().map_err(Refusal::no_shared_memory)?;
        let mut ends = Vec::new();
        for worker in 0..workers {
            let ring = DoorbellConsumer::new(
                region.clone(),
                doorbell::ring_offset(worker, capacity),
                capacity,
            )
            .map_err(|error| Refusal::new(libc::EINVAL, error.to_string()))?;
            let wake = nix::sys::eventfd::EventFd::from_value_and_flags(
                0,
                nix::sys::eventfd::EfdFlags::EFD_NONBLOCK
                    | nix::sys::eventfd::EfdFlags::EFD_CLOEXEC,
            )
            .map_err(|error| Refusal::no_shared_memory(error.into()))?;
            ends.push((ring, Arc::new(OwnedFd::from(wake))));
        }
        let features = hello.features & m::FEATURES;
        client.features = features;
        let reply = m::HelloReply {
            version: version.into(),
            client_id: id.0 as u32,
            n_workers: workers,
            n_devices: context.devices.views.len() as u32,
            doorbell_capacity: capacity,
            features,
            limits,
            daemon: m::Text::new(concat!("siwd ", env!("CARGO_PKG_VERSION"))),
        };
        let page = self.page.shared_memory().memfd();
        let (Some(page), Some(bells)) = (page, region.memfd()) else {
            return Err(Refusal::new(
                libc::ENOMEM,
                "shared memory has no descriptor",
            ));
        };
        let mut fds = vec![page, bells, theirs.as_fd()];
        fds.extend(ends.iter().map(|end| end.1.as_fd()));
        client.conn.set_version(version);
        client
            .conn
            .send_reply::<m::ClientHello>(seq, &reply, &fds)
            .map_err(Refusal::no_shared_memory)?;
        client.greeted = true;
        client.doorbells = Some(charge.of(region));
        let token = context.resources.next_outbox_token(id, None);
        let client = context.resources.client_mut(id)?;
        let budget = client.events_waiting.clone();
        client.events = Some(Outbox::new(events, token, version, budget));
        let user = client.account.uid();
        for (worker, (doorbells, wake)) in ends.into_iter().enumerate() {
            context.workers.post_command(
                worker,
                Command::AddClient {
                    client: id,
                    user,
                    doorbells,
                    wake,
                },
            );
        }
        Ok(Served::Replied)
    }
}

/// Closes the connection of a refused client.
fn close_refused(helpers: &Helpers, uid: u32, conn: ControlSocket) {
    if has_descriptors_waiting(&conn) {
        let socket = conn.as_fd().try_clone_to_owned().ok();
        let queue = DisposalQueue::Descriptors(uid);
        helpers.dispose_with_socket(queue, socket, Box::new(conn), None);
    }
}

/// Limits reported to clients, from the configuration and this version.
fn client_limits(limits: &LimitsConfig, devices: &[DeviceView]) -> m::Limits {
    let most = |property: fn(&DeviceView) -> u16| devices.iter().map(property).max().unwrap_or(0);
    m::Limits {
        max_qp: limits.queue_pairs_per_client,
        max_qp_wr: limits.work_requests,
        max_sge: wqe::MAX_SGE as u32,
        max_sge_rd: wqe::MAX_SGE as u32,
        max_inline: wqe::MAX_INLINE as u32,
        max_cq: limits.completion_queues_per_client,
        max_cqe: limits.completions,
        max_mr: limits.memory_regions_per_client,
        max_pd: quotas::MAX_PD,
        max_ord: most(|device| device.max_ord).into(),
        max_ird: most(|device| device.max_ird).into(),
        max_private_data: m::MAX_PRIVATE_DATA as u32,
        max_srq: limits.queue_pairs_per_client,
        max_srq_wr: shared_receive::srq_depth(limits),
        max_srq_sge: wqe::MAX_SGE as u32,
        max_mw: limits.memory_regions_per_client,
        max_fast_pages: siw_shm::local_wqe::MAX_FAST_PAGES,
        reserved: 0,
        max_msg: u64::from(u32::MAX),
        max_mr_size: limits.memory_per_client.0,
        max_arena: limits.memory_per_client.0,
    }
}
