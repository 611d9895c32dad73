//! Client lifecycle: accept, request input, and removal.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use siw_shm::control::messages::EVERY_DEVICE;
use siw_shm::control::{AsyncEventKind, ControlSocket, RecvError, Request, codec};
use siw_shm::fault_guard;

use super::helpers::DisposalQueue;
use super::peers::PeerCredentials;
use super::pending::PendingReply;
use super::quotas::{Account, Quota};
use super::requests::RequestState;
use super::resources::{Client, DepartingClient, DepartingEntries};
use super::{ControlThread, TOKEN_LISTENER};
use crate::ids::ClientId;
use crate::worker::messages::Command;

/// Maximum number of requests without replies served for one client before other clients' turn.
const READ_AHEAD: usize = 8;

/// Descriptors per client, in addition to one per worker: socket, event outbox, doorbells.
const CLIENT_DESCRIPTORS: u64 = 3;
/// Bytes of replies that a client's socket buffers; a client that reads none loses further ones.
const REPLY_BYTES: usize = 64 << 10;
/// Bytes that the kernel buffers for one client: replies and asynchronous events.
const CLIENT_BUFFERS: u64 = (REPLY_BYTES + super::outbox::SOCKET_BYTES) as u64;
/// Clients accepted in a row before other events are served.
const ACCEPTS_PER_TURN: usize = 16;
/// Pause in accepting when the operating system is out of descriptors or memory: initial and
/// maximum length.
const ACCEPT_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Packets of a disconnected client that are searched for descriptors.
const LAST_PACKETS: usize = 1024;

/// Pause in accepting clients after the operating system failed an accept.
pub(super) struct AcceptPause {
    pub until: Instant,
    length: Duration,
}

impl ControlThread {
    /// Accepts waiting clients.
    pub(super) fn accept_clients(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.is_listening {
                return;
            }
            match ControlSocket::accept_client(self.config.socket.listener()) {
                Ok(Some(conn)) => {
                    self.accept_pause = None;
                    self.add_client(conn);
                    self.times.end_work("accept");
                }
                Ok(None) => return,
                Err(error) => return self.pause_accepting(&error),
            }
        }
    }

    /// Leaves waiting clients in the listen queue for a while; otherwise epoll would wake this
    /// thread continuously.
    fn pause_accepting(&mut self, error: &std::io::Error) {
        let (first, longest) = ACCEPT_PAUSE;
        let length = match &self.accept_pause {
            Some(pause) => (pause.length * 2).min(longest),
            None => {
                tracing::warn!("cannot accept clients, will retry: {error}");
                first
            }
        };
        self.watch_listener(false);
        self.accept_pause = Some(AcceptPause {
            until: Instant::now() + length,
            length,
        });
    }

    /// Accepts clients again after the pause.
    pub(super) fn resume_accepting(&mut self) {
        let over = self
            .accept_pause
            .as_ref()
            .is_some_and(|pause| Instant::now() >= pause.until);
        // The pause is kept: the next one is longer, unless a client is accepted first.
        if over && !self.is_listening && self.stopping.is_none() {
            self.watch_listener(true);
        }
    }

    fn watch_listener(&mut self, on: bool) {
        let flags = if on {
            EpollFlags::EPOLLIN
        } else {
            EpollFlags::empty()
        };
        let mut event = EpollEvent::new(flags, TOKEN_LISTENER);
        let listener = self.config.socket.listener();
        self.is_listening = self.epoll.modify(listener, &mut event).is_ok() && on;
    }

    fn add_client(&mut self, conn: ControlSocket) {
        let peer = match PeerCredentials::of(&conn) {
            Ok(peer) => peer,
            Err(error) => {
                // Nobody could be charged.
                tracing::warn!("a client without credentials is refused: {error}");
                self.close_refused(u32::MAX, conn);
                return;
            }
        };
        let is_operator = self.config.operators.include(peer.uid, peer.gid);
        let uid = self.config.subordinates.user_of(peer.uid);
        let mut account = Account::new(uid).with_reserve(is_operator);
        let descriptors = CLIENT_DESCRIPTORS + self.workers.worker_count() as u64;
        let amounts = [
            (Quota::Clients, 1),
            (Quota::Descriptors, descriptors),
            (Quota::Memory, CLIENT_BUFFERS),
        ];
        if let Err(over) = self.resources.ledger.charge(&mut account, &amounts) {
            tracing::debug!(uid, "client refused: {over}");
            let _ = conn.send_refusal(0, 0, nix::libc::EUSERS, &over.to_string());
            self.close_refused(uid, conn);
            return;
        }
        let id = self.resources.next_client_id();
        let event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
        if let Err(error) = self.epoll.add(conn.as_fd(), event) {
            tracing::warn!("cannot watch a client's socket: {error}");
            self.resources.ledger.close(account);
            self.close_refused(uid, conn);
            return;
        }
        conn.limit_send_buffer(REPLY_BYTES);
        let client = Client::new(id, conn, peer, account, &self.config.limits);
        tracing::debug!(
            client = id.0,
            pid = client.peer.pid,
            uid,
            "client connected"
        );
        self.resources.clients.insert(id, client);
        self.silent_clients
            .push_back((Instant::now() + self.config.hello_timeout, id));
    }

    /// Closes connections whose HELLO is overdue.
    pub(super) fn close_silent_clients(&mut self) {
        while let Some((deadline, id)) = self.silent_clients.front().copied() {
            let greeted = self
                .resources
                .clients
                .get(&id)
                .is_none_or(|client| client.greeted);
            if !greeted && Instant::now() < deadline {
                return;
            }
            self.silent_clients.pop_front();
            if greeted {
                continue;
            }
            if let Some(client) = self.resources.clients.get(&id) {
                let why = "no HELLO was received in time: see [control] hello_timeout_ms";
                let _ = client.conn.send_refusal(0, 0, nix::libc::ETIMEDOUT, why);
            }
            self.remove_client(id, "did not send HELLO in time");
        }
    }

    /// Closes the connection of a refused client.
    fn close_refused(&mut self, uid: u32, conn: ControlSocket) {
        if has_descriptors_waiting(&conn) {
            self.helpers
                .dispose(DisposalQueue::Descriptors(uid), Box::new(conn), None);
        }
    }

    /// Reads requests from a client's socket.
    pub(super) fn on_client_readable(&mut self, id: ClientId) {
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
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return false;
        };
        if client.parked.is_some() {
            self.leave_input(id);
            return false;
        }
        match client.conn.recv_from_client() {
            Ok(bytes) if client.waiting.is_some() => client.parked = Some(bytes),
            Ok(bytes) => {
                self.on_packet(id, &bytes);
                return codec::peek_header(&bytes).is_some_and(|(_, seq)| seq == codec::UNANSWERED);
            }
            // The reply to this request must follow the reply to the deferred one.
            Err(RecvError::Descriptors) if client.waiting.is_some() => self.leave_input(id),
            Err(error @ RecvError::Descriptors) => {
                if client.greeted && self.helpers.must_await_room(client.account.uid()) {
                    client.awaits_room = true;
                    self.leave_input(id);
                    return false;
                }
                if self.receive_import(id) {
                    self.times.end_work("ImportMemory");
                    return false;
                }
                if let Some(client) = self.resources.clients.get(&id) {
                    let why = error.to_string();
                    let _ = client.conn.send_refusal(0, 0, nix::libc::EPROTO, &why);
                }
                self.remove_client(id, "sent file descriptors");
            }
            Err(RecvError::WouldBlock) => {}
            Err(RecvError::Closed) => self.remove_client(id, "closed its socket"),
            Err(RecvError::Truncated | RecvError::DescriptorsLost) => {
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
                let state = self.on_request(id, seq, &request);
                self.times.end_work(request.name());
                if state == RequestState::TryAgain
                    && let Some(client) = self.resources.clients.get_mut(&id)
                {
                    client.parked = Some(bytes.to_vec());
                }
            }
            Err(error) => {
                let Some(client) = self.resources.clients.get_mut(&id) else {
                    return;
                };
                let (kind, seq) = codec::peek_header(bytes).unwrap_or((0, 0));
                let errno = match error {
                    codec::ProtoError::Version { .. } => nix::libc::EPROTONOSUPPORT,
                    codec::ProtoError::Kind(_) => nix::libc::EOPNOTSUPP,
                    _ => nix::libc::EPROTO,
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

    /// Leaves further requests in the client's socket until [`Self::resume_input`].
    fn leave_input(&mut self, id: ClientId) {
        let client = self.resources.clients.get_mut(&id);
        if let Some(client) = client.filter(|client| !client.more_input) {
            client.more_input = true;
            // Otherwise epoll would continuously report a peer that has closed its end.
            let once = EpollFlags::EPOLLONESHOT;
            let mut event = EpollEvent::new(once, id.0);
            let _ = self.epoll.modify(client.conn.as_fd(), &mut event);
        }
    }

    fn resume_input(&mut self, id: ClientId) {
        let client = self.resources.clients.get_mut(&id);
        if let Some(client) = client.filter(|client| client.more_input) {
            client.more_input = false;
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
            let _ = self.epoll.modify(client.conn.as_fd(), &mut event);
        }
    }

    /// Receives descriptors of a user again, after most of its earlier ones are closed.
    pub(super) fn on_room(&mut self, uid: u32) {
        let clients = self.resources.clients.values_mut();
        let waiting: Vec<ClientId> = clients
            .filter(|client| client.account.uid() == uid)
            .filter_map(|client| std::mem::take(&mut client.awaits_room).then_some(client.id))
            .collect();
        for id in waiting {
            self.resume_input(id);
        }
    }

    /// Resumes reading requests after a deferred one was answered.
    pub(super) fn on_answered(&mut self, id: ClientId) {
        self.settle_account(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let awaits_room = client.awaits_room;
        if client.waiting.is_none()
            && let Some(bytes) = client.parked.take()
        {
            self.on_packet(id, &bytes);
        }
        if !awaits_room {
            self.resume_input(id);
        }
    }

    /// Removes a client: its objects in the workers first, then its keys and memory.
    pub(super) fn remove_client(&mut self, id: ClientId, why: &str) {
        let Some(mut client) = self.resources.clients.remove(&id) else {
            return;
        };
        tracing::debug!(
            client = id.0,
            pid = client.peer.pid,
            "client removed: it {why}"
        );
        let _ = self.epoll.delete(client.conn.as_fd());
        if let Some(outbox) = &client.events {
            self.resources.outboxes.remove(&outbox.epoll_token());
        }
        let slow_to_close = has_descriptors_waiting(&client.conn);
        let mut entries = DepartingEntries::take(&self.resources, &mut client);
        self.remove_connections(&mut entries);
        self.workers
            .post_to_all(|| Command::RemoveClient { client: id });
        let regions: Vec<_> = client
            .arenas
            .values()
            .map(|arena| &arena.region)
            .chain(client.held_memory.kept_regions())
            .cloned()
            .collect();
        // Its queue pairs are destroyed before this command: no new frame can refer to its memory.
        let (token, left) = if regions.is_empty() || !self.config.sends_by_reference {
            self.workers.post_barrier(Some(id))
        } else {
            self.workers.await_frames(id, regions.into())
        };
        let waiting = client.waiting.as_ref().map(|waiting| &waiting.what);
        let last_key = match waiting {
            Some(PendingReply::QuiescentKey { ticket, .. }) => Some(*ticket),
            _ => None,
        };
        self.resources.departing.push(DepartingClient {
            entries,
            last_key,
            client,
            token,
            left,
            slow_to_close,
        });
    }

    /// Releases all clients when the daemon ends. Sockets with unread descriptors stay open until
    /// the process exits: closing them could take as long as the client likes.
    pub fn let_clients_go(&mut self) {
        let clients = std::mem::take(&mut self.resources.clients).into_values();
        let departing = self.resources.departing.drain(..);
        for client in clients.chain(departing.map(|departing| departing.client)) {
            if has_descriptors_waiting(&client.conn) {
                std::mem::forget(client.conn);
            }
        }
    }

    /// Closes clients that freed pages of their shared memory while it was in use.
    pub(super) fn end_faulty_clients(&mut self) {
        for owner in fault_guard::take_faulty_owners() {
            let reason = "it freed pages of memory shared with siwd, and they cannot be replaced";
            self.close_faulty_client(ClientId::from_fault_owner(owner), reason);
        }
    }

    /// Closes a client that violated the rules of shared memory.
    pub(super) fn close_faulty_client(&mut self, id: ClientId, reason: &str) {
        if let Some(client) = self.resources.clients.get(&id) {
            tracing::warn!(
                client = id.0,
                pid = client.peer.pid,
                "closing the client: {reason}"
            );
            self.post_async_event(id, AsyncEventKind::DeviceFatal, EVERY_DEVICE, reason);
            self.remove_client(id, "broke the rules");
        }
    }
}

/// Returns true if the socket of a departed or refused client has unread descriptors: closing it
/// can then take long. Shuts down the socket's input first, so that nothing more can be sent to it.
fn has_descriptors_waiting(conn: &ControlSocket) -> bool {
    conn.refuse_input();
    for _ in 0..LAST_PACKETS {
        match conn.recv_from_client() {
            Ok(_) | Err(RecvError::Truncated) => {}
            Err(RecvError::WouldBlock | RecvError::Closed) => return false,
            Err(_) => return true,
        }
    }
    true
}
