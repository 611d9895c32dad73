//! A one-way event socket to a client, on which the control thread never blocks. A slow client gets
//! its events later, in order; a client that never reads costs a bounded backlog, then loses
//! events.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use siw_shm::control::{ControlSocket, codec};

/// Epoll token of a client's socket: its id. Token of an outbox with a backlog: a number with this
/// bit set.
pub(in crate::control) const TOKEN_OUTBOX: u64 = 1 << 62;
/// Bytes of events that the socket buffers; further events are queued and counted here.
pub(in crate::control) const SOCKET_BYTES: usize = 24 << 10;

/// Heap of a queued event in addition to its bytes.
const EVENT_OVERHEAD: usize = 64;

/// Limit of events queued for a client that does not read, over all its outboxes.
#[derive(Clone)]
pub struct EventBudget {
    waiting: Arc<AtomicUsize>,
    /// Heap of the waiting events.
    bytes: Arc<AtomicUsize>,
    most: usize,
}

impl EventBudget {
    /// Creates a budget of `most` events.
    pub fn new(most: usize) -> EventBudget {
        EventBudget {
            waiting: Arc::default(),
            bytes: Arc::default(),
            most,
        }
    }

    /// Heap of the waiting events in bytes.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns true if more than half of the budget is used: peers can then cause no further
    /// events.
    pub fn is_half_used(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > self.most / 2
    }

    fn take(&self, packet: &[u8], extra: usize) -> bool {
        let waiting = self.waiting.load(Ordering::Relaxed);
        let has_room = waiting < self.most.saturating_add(extra);
        if has_room {
            self.waiting.store(waiting + 1, Ordering::Relaxed);
            let bytes = self.waiting_bytes() + packet.len() + EVENT_OVERHEAD;
            self.bytes.store(bytes, Ordering::Relaxed);
        }
        has_room
    }

    fn give_back(&self, packet: &[u8]) {
        let waiting = self.waiting.load(Ordering::Relaxed);
        self.waiting
            .store(waiting.saturating_sub(1), Ordering::Relaxed);
        let bytes = self.waiting_bytes();
        let bytes = bytes.saturating_sub(packet.len() + EVENT_OVERHEAD);
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

/// A client's event socket, with a backlog for when the socket is full.
pub struct Outbox {
    conn: ControlSocket,
    token: u64,
    /// Flags of a channel of connection events.
    pub flags: u64,
    backlog: VecDeque<Vec<u8>>,
    budget: EventBudget,
    watched: bool,
}

impl Outbox {
    /// Creates an outbox that epoll reports under `token` while it has a backlog. Events carry
    /// `version`, which was negotiated with the client.
    pub fn new(conn: ControlSocket, token: u64, version: u16, budget: EventBudget) -> Outbox {
        conn.set_version(version);
        // The client has no input to send here. Descriptors in unread input would be closed,
        // possibly slowly, by the thread that closes this end.
        conn.refuse_input();
        conn.limit_send_buffer(SOCKET_BYTES);
        Outbox {
            conn,
            token,
            flags: 0,
            backlog: VecDeque::new(),
            budget,
            watched: false,
        }
    }

    /// Epoll token of the outbox.
    pub fn epoll_token(&self) -> u64 {
        self.token
    }

    /// Sends an event, or queues it until the client reads. Returns false if the event is lost
    /// because the budget and `extra` more events are used up, or because it would have to wait and
    /// `may_wait` is false.
    #[must_use]
    pub fn send_event(
        &mut self,
        epoll: &Epoll,
        packet: Vec<u8>,
        extra: usize,
        may_wait: bool,
    ) -> bool {
        let waits = !self.backlog.is_empty();
        if (waits && !may_wait) || !self.budget.take(&packet, extra) {
            return false;
        }
        self.push_event(epoll, packet);
        true
    }

    /// Sends the last event to a client, regardless of its budget.
    pub fn send_last_event(&mut self, epoll: &Epoll, packet: Vec<u8>) {
        self.budget.take(&packet, usize::MAX);
        self.push_event(epoll, packet);
    }

    fn push_event(&mut self, epoll: &Epoll, mut packet: Vec<u8>) {
        codec::stamp_version(&mut packet, self.conn.agreed_version());
        self.backlog.push_back(packet);
        self.flush_backlog(epoll);
    }

    /// Sends queued events until the socket is full, and has epoll report room for the rest.
    pub fn flush_backlog(&mut self, epoll: &Epoll) {
        while let Some(packet) = self.backlog.front() {
            match self.conn.send_packet(packet, &[]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Sent, or discarded because the client has closed its end.
                _ => {
                    self.budget.give_back(packet);
                    self.backlog.pop_front();
                }
            }
        }
        let want = !self.backlog.is_empty();
        if want == self.watched {
            return;
        }
        self.watched = want;
        let done = if want {
            let event = EpollEvent::new(EpollFlags::EPOLLOUT, self.token);
            epoll.add(self.conn.as_fd(), event)
        } else {
            epoll.delete(self.conn.as_fd())
        };
        if let Err(error) = done {
            tracing::warn!("cannot watch an event socket: {error}");
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        for packet in &self.backlog {
            self.budget.give_back(packet);
        }
    }
}
