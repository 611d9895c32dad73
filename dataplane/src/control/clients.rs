//! Clients come and go: their sockets, their packets, and what is left to do when one is gone.

use std::os::fd::AsFd;

use nix::sys::epoll::{EpollEvent, EpollFlags};
use siw_shm::control::{AsyncEventKind, ControlSocket, RecvError, Request, codec};
use siw_shm::fault_guard;
use siw_shm::shared_memory::PageSize;

use super::ControlThread;
use super::requests::RequestState;
use super::resources::{Client, DepartingClient};
use crate::ids::{ClientId, CmListenerId};
use crate::worker::messages::Command;

/// Requests of one client that are served before those of others, when they have no answer.
const READ_AHEAD: usize = 8;

impl ControlThread {
    /// Accepts every client that waits.
    pub(super) fn accept_clients(&mut self) {
        loop {
            match ControlSocket::accept_client(self.config.socket.listener()) {
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
        if self.resources.clients.len() >= self.config.limits.clients as usize {
            let why = format!(
                "{} clients are connected; raise [limits] clients",
                self.resources.clients.len()
            );
            let _ = conn.send_refusal(0, 0, nix::libc::EUSERS, &why);
            return;
        }
        let id = self.resources.next_client_id();
        let pid = conn.peer_credentials().map_or(0, |peer| peer.0);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, u64::from(id.0));
        if let Err(error) = self.epoll.add(conn.as_fd(), event) {
            tracing::warn!("a client could not be watched: {error}");
            return;
        }
        tracing::debug!(client = id.0, pid, "client connected");
        let page_size = if self.config.hugepages {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        };
        self.resources.clients.insert(
            id,
            Client::new(id, pid, conn, page_size, &self.config.limits),
        );
    }

    /// A client's socket has requests.
    pub(super) fn on_client_readable(&mut self, id: ClientId) {
        // One at a time: most clients wait for the answer before they ask again; for the others
        // epoll wakes us again. After a request that has no answer the next one is near.
        for _ in 0..READ_AHEAD {
            if !self.read_request(id) {
                return;
            }
        }
    }

    /// Serves a request, if one waits; whether it was one that has no answer.
    fn read_request(&mut self, id: ClientId) -> bool {
        let Some(client) = self.resources.clients.get_mut(&id) else {
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
                if self.on_request(id, seq, &request) == RequestState::TryAgain
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
                tracing::warn!(client = id.0, pid = client.pid, "{error}");
                let _ = client
                    .conn
                    .send_refusal(kind, seq, errno, &error.to_string());
                if !matches!(error, codec::ProtoError::Kind(_)) {
                    self.remove_client(id, "sent what is not our protocol");
                }
            }
        }
    }

    /// Watches a client's socket for requests, or leaves them in it.
    fn watch_client(&mut self, id: ClientId, on: bool) {
        if let Some(client) = self.resources.clients.get(&id) {
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
    pub(super) fn on_answered(&mut self, id: ClientId) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
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
        let Some(client) = self.resources.clients.remove(&id) else {
            return;
        };
        tracing::debug!(client = id.0, pid = client.pid, "client gone: it {why}");
        let _ = self.epoll.delete(client.conn.as_fd());
        let gone: Vec<CmListenerId> = self
            .resources
            .listeners
            .iter()
            .filter(|(_, listener)| listener.client == id)
            .map(|(number, _)| number)
            .collect();
        for listener in gone {
            self.remove_listener(listener);
        }
        self.workers
            .post_to_all(|| Command::RemoveClient { client: id });
        let (token, left) = self.workers.post_barrier();
        self.resources.departing.push(DepartingClient {
            client,
            token,
            left,
        });
    }

    /// Ends clients that took pages of their shared memory away while it was in use.
    pub(super) fn end_faulty_clients(&mut self) {
        for owner in fault_guard::take_faulty_owners() {
            let reason = "it freed pages of memory that it shares with siwd, and none are left";
            self.close_faulty_client(ClientId::from_fault_owner(owner), reason);
        }
    }

    /// Ends a client that broke the rules of shared memory.
    pub(super) fn close_faulty_client(&mut self, id: ClientId, reason: &str) {
        if let Some(client) = self.resources.clients.get(&id) {
            tracing::warn!(
                client = id.0,
                pid = client.pid,
                "closing the client: {reason}"
            );
            self.post_async_event(id, AsyncEventKind::DeviceFatal, 0, reason);
            self.remove_client(id, "broke the rules of its queues");
        }
    }
}
