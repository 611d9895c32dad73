//! A one-way socket with events for a client, on which the control thread never blocks. A client
//! that does not read gets its events later, in order; one that never reads costs a bounded backlog
//! and then its events.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::AsFd;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use siw_shm::control::{ControlSocket, codec};

/// Events kept for a client that does not read.
const BACKLOG: usize = 65_536;

/// A client's socket for events, and the events that it has no room for.
pub struct Outbox {
    conn: ControlSocket,
    token: u64,
    backlog: VecDeque<Vec<u8>>,
    watched: bool,
    lost: u64,
}

impl Outbox {
    /// An outbox that epoll reports under `token` while it has a backlog.
    /// Events carry `version`, which the client agreed on.
    pub fn new(conn: ControlSocket, token: u64, version: u16) -> Outbox {
        conn.set_version(version);
        Outbox {
            conn,
            token,
            backlog: VecDeque::new(),
            watched: false,
            lost: 0,
        }
    }

    /// What epoll reports it under.
    pub fn epoll_token(&self) -> u64 {
        self.token
    }

    /// Sends an event, or keeps it until the client reads.
    pub fn send_event(&mut self, epoll: &Epoll, mut packet: Vec<u8>) {
        if self.backlog.len() >= BACKLOG {
            self.lost += 1;
            if self.lost == 1 {
                tracing::warn!("a client does not read its events: they are lost from now on");
            }
            return;
        }
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
