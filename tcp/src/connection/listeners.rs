//! The listeners of a stack, and the connections in their backlogs.

use core::net::{IpAddr, SocketAddr};
use std::collections::HashMap;

use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;

/// A socket in LISTEN.
pub(crate) struct ListenSocket {
    local: Option<IpAddr>,
    port: u16,
    pub backlog: usize,
    /// Connections that are half-open, or established with an ACCEPTED event not yet fetched.
    pub pending: usize,
    /// The established ones among `pending`.
    pub ready: usize,
    /// The time in ns until which ACKs of sent SYN cookies may arrive.
    pub cookies_until: u64,
    pub user: u64,
}

/// The listeners by their number, and their numbers by port and address.
#[derive(Default)]
pub(crate) struct Listeners {
    sockets: HashMap<u32, ListenSocket>,
    by_port: HashMap<(u16, Option<IpAddr>), u32>,
    next: u32,
}

impl Listeners {
    /// Adds a listener on one address or on all, and returns its number. `None`: another listens there.
    pub(crate) fn add(
        &mut self,
        local: Option<IpAddr>,
        port: u16,
        backlog: usize,
        user: u64,
    ) -> Option<u32> {
        if self.by_port.contains_key(&(port, local)) {
            return None;
        }
        let listener = self.next;
        self.next += 1;
        self.by_port.insert((port, local), listener);
        let socket = ListenSocket {
            local,
            port,
            backlog: backlog.max(1),
            pending: 0,
            ready: 0,
            cookies_until: 0,
            user,
        };
        self.sockets.insert(listener, socket);
        Some(listener)
    }

    /// Removes a listener.
    pub(crate) fn remove(&mut self, listener: u32) {
        if let Some(socket) = self.sockets.remove(&listener) {
            self.by_port.remove(&(socket.port, socket.local));
        }
    }

    /// Removes listeners on single addresses, except for those on addresses that `is_kept` selects.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(IpAddr) -> bool) {
        let ended = self.by_port.iter().filter_map(|((_, local), listener)| {
            let is_ended = local.is_some_and(|local| !is_kept(local));
            is_ended.then_some(*listener)
        });
        for listener in ended.collect::<Vec<_>>() {
            self.remove(listener);
        }
    }

    /// Returns the listener for an address and port; one on the address itself takes precedence over one
    /// on all addresses.
    pub(crate) fn find(&self, local: SocketAddr) -> Option<u32> {
        let one = self.by_port.get(&(local.port(), Some(local.ip())));
        one.or_else(|| self.by_port.get(&(local.port(), None)))
            .copied()
    }

    /// Returns whether the listener exists.
    pub(crate) fn contains(&self, listener: u32) -> bool {
        self.sockets.contains_key(&listener)
    }

    /// Returns a listener.
    pub(crate) fn get(&self, listener: u32) -> Option<&ListenSocket> {
        self.sockets.get(&listener)
    }

    /// Returns a listener.
    pub(crate) fn get_mut(&mut self, listener: u32) -> Option<&mut ListenSocket> {
        self.sockets.get_mut(&listener)
    }

    /// Takes a connection out of its listener's backlog, if it is in one.
    pub(crate) fn leave_backlog(&mut self, tcb: &mut Tcb, listener: u32) {
        if tcb.has(ConnectionFlags::IN_BACKLOG) {
            let ready = usize::from(tcb.has(ConnectionFlags::COUNTED_READY));
            tcb.flags &= !(ConnectionFlags::IN_BACKLOG | ConnectionFlags::COUNTED_READY);
            if let Some(socket) = self.sockets.get_mut(&listener) {
                socket.pending = socket.pending.saturating_sub(1);
                socket.ready = socket.ready.saturating_sub(ready);
            }
        }
    }

    /// Number of connections in all backlogs.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn places_taken(&self) -> usize {
        let sockets = self.sockets.values();
        sockets.map(|socket| socket.pending + socket.ready).sum()
    }
}
