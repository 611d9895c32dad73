//! The slots that connections live in: taken, given back, and taken from TIME-WAIT when full.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::timer_wheel::Wheel;
use crate::congestion::CongestionState;
use crate::connection::time_wait_list::TimeWait;
use crate::connection::{Connection, NO_LISTENER};
use crate::flow::table::FlowTable;
use crate::loss::rack::Patience;
use crate::queues::receive_queue::ReceiveQueue;
use crate::queues::send_queue::SendQueue;
use crate::stack::Stack;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::template::Template;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Bytes of an idle connection in this crate: its slot, its entries of the timer wheel and the
    /// TIME-WAIT list, and its share of the flow table.
    pub const CONNECTION_BYTES: usize =
        size_of::<Connection<B, R>>() + Wheel::NODE + TimeWait::NODE + FlowTable::SHARE;
    /// Bytes of those that every segment touches.
    pub const HOT_BYTES: usize = size_of::<Tcb>();

    /// Frees a closed connection that nobody owns.
    pub(crate) fn reap(&mut self, index: u32) {
        let h = &self.conns[index as usize].tcb;
        if h.state == TcpState::Closed && h.has(ConnectionFlags::RELEASED) {
            self.free(index);
        }
    }

    pub(crate) fn free(&mut self, index: u32) {
        let c = &mut self.conns[index as usize];
        c.closed(&mut self.shared.context(index));
        self.shared.wheel.remove(index);
        c.generation = c.generation.wrapping_add(1);
        c.tcb.flags &= ConnectionFlags::IN_OUTPUT_LIST;
        c.tcb.events = 0;
        c.tx = SendQueue::new();
        c.rx.clear();
        c.recount(&mut self.shared.context(index));
        self.free.push(index);
    }

    /// A slot for a new connection, in the flow table, in state CLOSED. The key is not in use.
    pub(crate) fn alloc(&mut self, key: FlowKey) -> Option<u32> {
        let max = self.shared.config.max_connections;
        if self.free.is_empty() && self.conns.len() >= max {
            self.evict_time_wait();
        }
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let sh = &self.shared;
        let overhead = if key.is_v6() { 60 } else { 40 };
        let emss = sh.config.mtu - overhead - if sh.config.timestamps { 12 } else { 0 };
        let mut c = Connection {
            tcb: Tcb::new(emss),
            tx: SendQueue::new(),
            rx: ReceiveQueue::new(),
            ooo: None,
            recovery: None,
            template: Template::new(sh.config.mac, [0; 6], sh.config.vlan, &key),
            neighbour_generation: 0,
            ts_offset: 0,
            hash: hash as u32,
            congestion: CongestionState::new(sh.config.congestion),
            stalled_since: 0,
            generation: 0,
            retransmits: 0,
            timeouts: 0,
            listener: NO_LISTENER,
            emss_agreed: emss,
            search_at: 0,
            patience: Patience::default(),
            fin_at: SeqNr(0),
        };
        if sh.own(key.remote().ip()) {
            c.tcb.flags |= ConnectionFlags::SELF_ADDRESSED;
        }
        let index = match self.free.pop() {
            Some(i) => {
                let slot = &mut self.conns[i as usize];
                c.generation = slot.generation;
                c.tcb.flags |= slot.tcb.flags & ConnectionFlags::IN_OUTPUT_LIST;
                *slot = c;
                i
            }
            None if self.conns.len() < self.shared.config.max_connections => {
                self.conns.push(c);
                self.conns.len() as u32 - 1
            }
            None => return None,
        };
        self.shared.table.insert(hash, index);
        Some(index)
    }

    /// The oldest TIME-WAIT without an owner gives way. One with an owner has its turn again when
    /// it is released.
    fn evict_time_wait(&mut self) {
        while let Some(index) = self.shared.time_wait.pop_oldest() {
            if self.conns[index as usize]
                .tcb
                .has(ConnectionFlags::RELEASED)
            {
                self.shared.stats.time_wait_evicted += 1;
                self.free(index);
                return;
            }
        }
    }
}
