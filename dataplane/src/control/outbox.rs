//! A one-way socket with events for a client, on which the control thread never blocks. A client
//! that does not read gets its events later, in order; one that never reads costs a bounded backlog
//! and then its events.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use siw_shm::control::{ControlSocket, codec};

/// Bytes of events that a socket takes before they wait here, where they are counted.
const SOCKET_BYTES: usize = 64 << 10;

/// How many events wait for a client that does not read, in all its outboxes together.
#[derive(Clone)]
pub struct EventBudget {
    waiting: Arc<AtomicUsize>,
    most: usize,
}

impl EventBudget {
    /// Of at most so many events.
    pub fn new(most: usize) -> EventBudget {
        EventBudget {
            waiting: Arc::default(),
            most,
        }
    }

    /// Whether more than half of the events wait: peers then get no more of them.
    pub fn is_half_used(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > self.most / 2
    }

    fn take(&self, extra: usize) -> bool {
        let waiting = self.waiting.load(Ordering::Relaxed);
        let has_room = waiting < self.most.saturating_add(extra);
        if has_room {
            self.waiting.store(waiting + 1, Ordering::Relaxed);
        }
        has_room
    }

    fn give_back(&self, events: usize) {
        let waiting = self.waiting.load(Ordering::Relaxed);
        self.waiting
            .store(waiting.saturating_sub(events), Ordering::Relaxed);
    }
}

/// A client's socket for events, and the events that it has no room for.
pub struct Outbox {
    conn: ControlSocket,
    token: u64,
    backlog: VecDeque<Vec<u8>>,
    budget: EventBudget,
    watched: bool,
}

impl Outbox {
    /// An outbox that epoll reports under `token` while it has a backlog, for a client with this
    /// budget. Events carry `version`, which the client agreed on.
    pub fn new(conn: ControlSocket, token: u64, version: u16, budget: EventBudget) -> Outbox {
        conn.set_version(version);
        // The client has nothing to say here: descriptors that it sent would be closed by whoever
        // closes this end.
        conn.refuse_input();
        conn.limit_send_buffer(SOCKET_BYTES);
        Outbox {
            conn,
            token,
            backlog: VecDeque::new(),
            budget,
            watched: false,
        }
    }

    /// What epoll reports it under.
    pub fn epoll_token(&self) -> u64 {
        self.token
    }

    /// Sends an event, or keeps it until the client reads; false when its budget, and `extra` events
    /// beyond it, are used up: the event is lost.
    #[must_use]
    pub fn send_event(&mut self, epoll: &Epoll, packet: Vec<u8>, extra: usize) -> bool {
        if !self.budget.take(extra) {
            return false;
        }
        self.push_event(epoll, packet);
        true
    }

    /// Sends the last event that a client gets, whatever its budget.
    pub fn send_last_event(&mut self, epoll: &Epoll, packet: Vec<u8>) {
        self.budget.take(usize::MAX);
        self.push_event(epoll, packet);
    }

    fn push_event(&mut self, epoll: &Epoll, mut packet: Vec<u8>) {
        codec::stamp_version(&mut packet, self.conn.agreed_version());
        self.backlog.push_back(packet);
        self.flush_backlog(epoll);
    }

    /// Sends what waits, as far as the socket takes it, and watches for room for the rest.
    pub fn flush_backlog(&mut self, epoll: &Epoll) {
        while let Some(packet) = self.backlog.front() {
            match self.conn.send_packet(packet, &[]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Sent, or the client has closed its end and wants none.
                _ => {
                    self.backlog.pop_front();
                    self.budget.give_back(1);
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
            tracing::warn!("an event socket could not be watched: {error}");
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.budget.give_back(self.backlog.len());
    }
}
