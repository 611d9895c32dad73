//! The slots that connections live in: taken, given back, and taken from TIME-WAIT when full.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::timer_wheel::TimerWheel;
use crate::congestion::CongestionState;
use crate::connection::time_wait_list::TimeWaitList;
use crate::connection::{Connection, NO_LISTENER};
use crate::flow::table::FlowTable;
use crate::loss::rack::ReorderWindow;
use crate::queues::receive_queue::ReceiveQueue;
use crate::queues::send_queue::TransmitQueue;
use crate::stack::Stack;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::template::Template;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Bytes of an idle connection in this crate: its slot, its entries of the timer wheel and the
    /// TIME-WAIT list, and its share of the flow table.
    pub const CONNECTION_BYTES: usize =
        size_of::<Connection<B, R>>() + TimerWheel::NODE + TimeWaitList::NODE + FlowTable::SHARE;
    /// Bytes of those that every segment touches.
    pub const HOT_BYTES: usize = size_of::<Tcb>();

    /// Frees a closed connection that nobody owns.
    pub(crate) fn free_if_done(&mut self, index: u32) {
        let tcb = &self.connections[index as usize].tcb;
        if tcb.state == TcpState::Closed && tcb.has(ConnectionFlags::RELEASED) {
            self.free_slot(index);
        }
    }

    pub(crate) fn free_slot(&mut self, index: u32) {
        let conn = &mut self.connections[index as usize];
        conn.enter_closed(&mut self.shared.context_of(index));
        self.shared.timer_wheel.remove_entry(index);
        conn.generation = conn.generation.wrapping_add(1);
        conn.tcb.flags &= ConnectionFlags::IN_OUTPUT_LIST;
        conn.tcb.events = 0;
        conn.send_queue = TransmitQueue::new();
        conn.receive_queue.clear();
        conn.update_held_buffers(&mut self.shared.context_of(index));
        self.free_slots.push(index);
    }

    /// A slot for a new connection, in the flow table, in state CLOSED. The key is not in use.
    pub(crate) fn allocate_slot(&mut self, key: FlowKey) -> Option<u32> {
        let max = self.shared.config.max_connections;
        if self.free_slots.is_empty() && self.connections.len() >= max {
            self.evict_time_wait();
        }
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let sh = &self.shared;
        let overhead = if key.is_v6() { 60 } else { 40 };
        let emss = sh.config.mtu - overhead - if sh.config.timestamps { 12 } else { 0 };
        let mut conn = Connection {
            tcb: Tcb::new(emss),
            send_queue: TransmitQueue::new(),
            receive_queue: ReceiveQueue::new(),
            out_of_order: None,
            recovery: None,
            template: Template::new(sh.config.mac, [0; 6], sh.config.vlan, &key),
            neighbour_generation: 0,
            timestamp_offset: 0,
            hash: hash as u32,
            congestion: CongestionState::new(sh.config.congestion),
            stalled_since: 0,
            generation: 0,
            retransmits: 0,
            timeouts: 0,
            listener: NO_LISTENER,
            emss_agreed: emss,
            search_at: 0,
            reorder_window: ReorderWindow::default(),
            fin_at: SeqNr(0),
        };
        if sh.is_own_address(key.remote().ip()) {
            conn.tcb.flags |= ConnectionFlags::SELF_ADDRESSED;
        }
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
        self.shared.flow_table.insert(hash, index);
        Some(index)
    }

    /// The oldest TIME-WAIT without an owner gives way. One with an owner has its turn again when
    /// it is released.
    fn evict_time_wait(&mut self) {
        while let Some(index) = self.shared.time_wait.pop_oldest() {
            if self.connections[index as usize]
                .tcb
                .has(ConnectionFlags::RELEASED)
            {
                self.shared.stats.time_wait_evicted += 1;
                self.free_slot(index);
                return;
            }
        }
    }
}
