//! Slots for connections; when all are taken, a connection in TIME-WAIT or without an owner is
//! evicted.

use core::ops::{Index, IndexMut};

use siw_net::{ConnId, FlowKey, RecvBuf};

use crate::connection::Connection;
use crate::connection::closing_list::Closing;
use crate::connection::context::SharedState;
use crate::queues::send_buffer::SendBuffer;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;

/// The connections of a stack, by the index of their slot.
pub(crate) struct Slots<B, R> {
    connections: Vec<Connection<B, R>>,
    free: Vec<u32>,
}

impl<B, R> Index<u32> for Slots<B, R> {
    type Output = Connection<B, R>;

    #[inline]
    fn index(&self, index: u32) -> &Connection<B, R> {
        &self.connections[index as usize]
    }
}

impl<B, R> IndexMut<u32> for Slots<B, R> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut Connection<B, R> {
        &mut self.connections[index as usize]
    }
}

impl<B: RecvBuf, R> Slots<B, R> {
    /// Returns the slots of a stack that has at most `max` connections.
    pub(crate) fn new(max: usize) -> Self {
        Slots {
            // Reserved for all connections: pages stay untouched until used, while growth would copy
            // all connections within one batch.
            connections: Vec::with_capacity(max),
            free: Vec::new(),
        }
    }

    /// Returns what is in the slot, if there is such a slot.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Connection<B, R>> {
        self.connections.get(index as usize)
    }

    /// As [`get`](Self::get).
    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Connection<B, R>> {
        self.connections.get_mut(index as usize)
    }

    /// Returns the connection with this id; `None`: it has ended.
    #[inline]
    pub(crate) fn current(&mut self, id: ConnId) -> Option<&mut Connection<B, R>> {
        self.get_mut(id.index)
            .filter(|conn| conn.generation == id.generation)
    }

    /// Returns the connection with this id that has an owner.
    #[inline]
    pub(crate) fn owned(&self, id: ConnId) -> Option<&Connection<B, R>> {
        self.get(id.index).filter(|conn| {
            conn.generation == id.generation && !conn.tcb.has(ConnectionFlags::RELEASED)
        })
    }

    /// As [`owned`](Self::owned).
    #[inline]
    pub(crate) fn owned_mut(&mut self, id: ConnId) -> Option<&mut Connection<B, R>> {
        self.get_mut(id.index).filter(|conn| {
            conn.generation == id.generation && !conn.tcb.has(ConnectionFlags::RELEASED)
        })
    }

    /// Returns the slot of the connection with this key, whose hash is `hash`.
    #[inline]
    pub(crate) fn find(&self, shared: &SharedState, key: &FlowKey, hash: u64) -> Option<u32> {
        shared
            .flow_table
            .find(hash, |index| self[index].path.template.carries(key))
    }

    /// Number of connections that occupy a slot, TIME-WAIT included.
    pub(crate) fn count(&self) -> usize {
        self.connections.len() - self.free.len()
    }

    /// Number of slots, free ones included.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn len(&self) -> u32 {
        self.connections.len() as u32
    }

    /// Returns the occupied slots.
    #[cfg(feature = "test-hooks")]
    pub(crate) fn occupied(&self) -> impl Iterator<Item = &Connection<B, R>> {
        let slots = self.connections.iter().enumerate();
        slots
            .filter(|(index, _)| !self.free.contains(&(*index as u32)))
            .map(|(_, conn)| conn)
    }

    /// Frees the slot of a closed connection that has no owner and no reset to send.
    pub(crate) fn free_if_done(&mut self, shared: &mut SharedState, index: u32) {
        if self[index].tcb.is_done() {
            self.free(shared, index);
        }
    }

    /// Ends a connection and frees its slot.
    pub(crate) fn free(&mut self, shared: &mut SharedState, index: u32) {
        let conn = &mut self[index];
        conn.enter_closed(&mut shared.context_of(conn.id(index)));
        shared.timer_wheel.remove_entry(index);
        shared.stalled.remove(index);
        conn.generation = conn.generation.wrapping_add(1);
        conn.tcb.flags &= ConnectionFlags::IN_OUTPUT_LIST;
        conn.tcb.events = 0;
        conn.sender.snd.flags = SendFlags::NONE;
        conn.sender.send_buffer = SendBuffer::new();
        conn.receiver.receive_queue.clear();
        conn.receiver
            .update_held_buffers(&mut shared.context_of(conn.id(index)));
        self.free.push(index);
    }

    /// Allocates a slot for a new connection in state CLOSED and enters it in the flow table. The key must
    /// not be in use. `None`: all slots are taken.
    pub(crate) fn allocate(&mut self, shared: &mut SharedState, key: &FlowKey) -> Option<u32> {
        let max = shared.config.max_connections;
        if self.free.is_empty() && self.connections.len() >= max {
            self.evict_closing(shared);
        }
        let hash = shared.table_hasher.hash(key);
        let mut conn = Connection::new(shared, key, hash);
        let index = match self.free.pop() {
            Some(index) => {
                let slot = &mut self[index];
                conn.generation = slot.generation;
                conn.tcb.flags |= slot.tcb.flags & ConnectionFlags::IN_OUTPUT_LIST;
                *slot = conn;
                index
            }
            None if self.connections.len() < max => {
                self.connections.push(conn);
                self.connections.len() as u32 - 1
            }
            None => return None,
        };
        shared.side_table.reset(index);
        shared.flow_table.insert(hash, index);
        Some(index)
    }

    /// Ensures that a slot is free for a connection that replaces the one in slot `instead`, whose own slot
    /// becomes free unless it still has an owner. Returns `false` if there is none.
    pub(crate) fn make_slot(&mut self, shared: &mut SharedState, instead: u32) -> bool {
        if self[instead].tcb.has(ConnectionFlags::RELEASED)
            || self.connections.len() < shared.config.max_connections
        {
            return true;
        }
        if self.free.is_empty() {
            self.evict_closing(shared);
        }
        !self.free.is_empty()
    }

    /// Frees the slot of the oldest connection in TIME-WAIT that has no owner, or else resets the oldest
    /// orphan if its reset can be queued. A TIME-WAIT connection with an owner enters the list again
    /// on release.
    fn evict_closing(&mut self, shared: &mut SharedState) {
        if self.evict_time_wait(shared) {
            return;
        }
        if let Some(index) = shared.closing.oldest(Closing::Orphan)
            && let conn = &self[index]
            && conn.hand_over_reset(&mut shared.context_of(conn.id(index)))
        {
            shared.stats.orphans_evicted += 1;
            self.free(shared, index);
        }
    }

    /// Frees the slot of the oldest connection in TIME-WAIT that has no owner. Returns `false` if there
    /// is none.
    pub(crate) fn evict_time_wait(&mut self, shared: &mut SharedState) -> bool {
        while let Some(index) = shared.closing.pop_oldest(Closing::TimeWait) {
            if self[index].tcb.has(ConnectionFlags::RELEASED) {
                shared.stats.time_wait_evicted += 1;
                self.free(shared, index);
                return true;
            }
        }
        false
    }
}
