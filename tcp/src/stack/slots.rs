//! Slots for connections; when all are taken, a connection in TIME-WAIT or without an owner is
//! evicted.

use crate::base::buffer::RecvBuf;
use crate::base::timer_wheel::TimerWheel;
use crate::connection::Connection;
use crate::connection::closing_list::{Closing, ClosingLists};
use crate::connection::side_table::{SideFields, SideTable};
use crate::flow::table::FlowTable;
use crate::queues::send_queue::TransmitQueue;
use crate::stack::Stack;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Bytes of an idle connection in this crate: its slot, its entries in the timer wheel, the closing
    /// lists and the side table, and its share of the flow table.
    pub const CONNECTION_BYTES: usize = size_of::<Connection<B, R>>()
        + TimerWheel::NODE
        + ClosingLists::NODE
        + SideTable::ENTRY
        + FlowTable::SHARE;
    /// The part of these bytes that every segment accesses.
    pub const HOT_BYTES: usize = size_of::<Tcb>();

    /// Frees a closed connection that has no owner and no reset to send.
    pub(crate) fn free_if_done(&mut self, index: u32) {
        if self.connections[index as usize].tcb.is_done() {
            self.free_slot(index);
        }
    }

    pub(crate) fn free_slot(&mut self, index: u32) {
        let conn = &mut self.connections[index as usize];
        conn.enter_closed(&mut self.shared.context_of(conn.id(index)));
        self.shared.timer_wheel.remove_entry(index);
        conn.generation = conn.generation.wrapping_add(1);
        conn.tcb.flags &= ConnectionFlags::IN_OUTPUT_LIST;
        conn.tcb.events = 0;
        conn.sender.send_queue = TransmitQueue::new();
        conn.receiver.receive_queue.clear();
        conn.receiver
            .update_held_buffers(&mut self.shared.context_of(conn.id(index)));
        self.free_slots.push(index);
    }

    /// Allocates a slot for a new connection in state CLOSED and enters it in the flow table. The key must
    /// not be in use. `None`: all slots are taken.
    pub(crate) fn allocate_slot(&mut self, key: FlowKey) -> Option<u32> {
        let max = self.shared.config.max_connections;
        if self.free_slots.is_empty() && self.connections.len() >= max {
            self.evict_closing();
        }
        let hash = self.shared.table_hasher.hash(&key);
        let mut conn = Connection::new(&self.shared, &key, hash);
        let index = match self.free_slots.pop() {
            Some(i) => {
                let slot = &mut self.connections[i as usize];
                conn.generation = slot.generation;
                conn.tcb.flags |= slot.tcb.flags & ConnectionFlags::IN_OUTPUT_LIST;
                *slot = conn;
                i
            }
            None if self.connections.len() < self.shared.config.max_connections => {
                self.connections.push(conn);
                self.connections.len() as u32 - 1
            }
            None => return None,
        };
        *self.shared.side_table.fields_of(index) = SideFields::default();
        self.shared.flow_table.insert(hash, index);
        Some(index)
    }

    /// Ensures that a slot is free for a connection that replaces the one in slot `instead`, whose own slot
    /// becomes free unless it still has an owner. Returns `false` if there is none.
    pub(crate) fn make_slot(&mut self, instead: u32) -> bool {
        let replaced = &self.connections[instead as usize].tcb;
        if replaced.has(ConnectionFlags::RELEASED)
            || self.connections.len() < self.shared.config.max_connections
        {
            return true;
        }
        if self.free_slots.is_empty() {
            self.evict_closing();
        }
        !self.free_slots.is_empty()
    }

    /// Frees the slot of the oldest connection in TIME-WAIT that has no owner, or else resets the oldest
    /// orphan if its reset can be queued. A TIME-WAIT connection with an owner enters the list again
    /// on release.
    fn evict_closing(&mut self) {
        if self.evict_time_wait() {
            return;
        }
        if let Some(index) = self.shared.closing.oldest(Closing::Orphan)
            && let conn = &self.connections[index as usize]
            && conn
                .path
                .hand_over_reset(&conn.tcb, &mut self.shared.context_of(conn.id(index)))
        {
            self.shared.stats.orphans_evicted += 1;
            self.free_slot(index);
        }
    }

    /// Returns true if at most `most` connections occupy slots. Frees slots of connections in TIME-WAIT
    /// that have no owner as far as necessary.
    pub fn has_at_most(&mut self, most: usize) -> bool {
        while self.connection_count() > most {
            if !self.evict_time_wait() {
                return false;
            }
        }
        true
    }

    /// Frees the slot of the oldest connection in TIME-WAIT that has no owner, if any.
    fn evict_time_wait(&mut self) -> bool {
        while let Some(index) = self.shared.closing.pop_oldest(Closing::TimeWait) {
            if self.connections[index as usize]
                .tcb
                .has(ConnectionFlags::RELEASED)
            {
                self.shared.stats.time_wait_evicted += 1;
                self.free_slot(index);
                return true;
            }
        }
        false
    }
}
