//! Access of tests to the state of a stack: resources that it still holds after its connections ended, and a
//! receiver that reneges.

use siw_net::{ConnId, RecvBuf};

use crate::base::state::TcpState;
use crate::stack::Stack;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Describes a resource that is still held although no connection should exist: slots, timers,
    /// buffers, entries in lists and tables. `None`: there is none.
    pub fn find_leak(&self) -> Option<String> {
        let shared = &self.shared;
        if self.connection_count() > 0 {
            let left: Vec<_> = self
                .slots
                .occupied()
                .map(|conn| {
                    (
                        conn.tcb.state,
                        conn.tcb.timer(),
                        conn.path.template.key().remote(),
                    )
                })
                .collect();
            return Some(format!("{} connections: {left:?}", left.len()));
        }
        let counts = [
            ("received buffers", self.held_buffers()),
            ("received fragments", self.held_fragments()),
            ("places in a backlog", shared.listeners.places_taken()),
            ("active connections", shared.active),
            ("established connections", shared.stats.curr_estab as usize),
            ("timers", usize::from(!shared.timer_wheel.is_empty())),
        ];
        let left = counts.iter().find(|(_, count)| *count > 0);
        left.map(|(what, count)| format!("{count} {what}"))
    }

    /// Returns whether the queues of a connection hold memory.
    pub fn holds_memory(&self, id: ConnId) -> bool {
        let conn = self.slots.get(id.index);
        conn.is_some_and(|conn| conn.holds_memory())
    }

    /// Returns the state of a connection, even after its owner released it; `None` once its slot is free.
    pub fn state_of_slot(&self, id: ConnId) -> Option<TcpState> {
        let conn = self.slots.get(id.index)?;
        (conn.generation == id.generation).then_some(conn.tcb.state)
    }

    /// Returns whether a connection's Ethernet destination has to be looked up before it can send.
    pub fn waits_for_neighbour(&self, id: ConnId) -> bool {
        let conn = self.slots.get(id.index);
        conn.is_some_and(|conn| {
            conn.path.neighbour_generation != self.shared.net.neighbours.generation
        })
    }

    /// Computes the initial sequence number of a connection from `local` to `remote` opened at `now`.
    pub fn initial_sequence(
        &self,
        now: siw_net::Instant,
        local: core::net::SocketAddr,
        remote: core::net::SocketAddr,
    ) -> Option<u32> {
        let key = siw_net::FlowKey::new(local.ip(), local.port(), remote.ip(), remote.port())?;
        Some(self.shared.initial_sequence(&key, now).0)
    }

    /// Drops all data received out of order, though SACK blocks reported it (RFC 2018 section 8). Returns
    /// the number of dropped buffers.
    pub fn renege(&mut self) -> usize {
        let mut dropped = 0;
        for index in 0..self.slots.len() {
            let conn = &mut self.slots[index];
            let Some(queue) = &mut conn.receiver.out_of_order else {
                continue;
            };
            let before = queue.buffer_count();
            while queue.drop_last() {}
            dropped += before - queue.buffer_count();
            conn.receiver
                .update_held_buffers(&mut self.shared.context_of(conn.id(index)));
        }
        dropped
    }
}
