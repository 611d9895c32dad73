//! The slots that connections live in: taken, given back, and taken from TIME-WAIT when full.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::timer_wheel::Wheel;
use crate::congestion::controller::Controller;
use crate::congestion::window_validation::Validation;
use crate::connection::time_wait_list::TimeWait;
use crate::connection::{Connection, Hot, NO_LISTENER, Phase, flag};
use crate::flow::table::FlowTable;
use crate::loss::rack::Patience;
use crate::loss::rtt::Rtt;
use crate::queues::receive_queue::ReceiveQueue;
use crate::queues::send_queue::SendQueue;
use crate::stack::Stack;
use crate::wire::flow_key::FlowKey;
use crate::wire::template::Template;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Bytes of an idle connection in this crate: its slot, its entries of the timer wheel and the
    /// TIME-WAIT list, and its share of the flow table.
    pub const CONNECTION_BYTES: usize =
        size_of::<Connection<B, R>>() + Wheel::NODE + TimeWait::NODE + FlowTable::SHARE;
    /// Bytes of those that every segment touches.
    pub const HOT_BYTES: usize = size_of::<Hot>();

    /// Frees a closed connection that nobody owns.
    pub(crate) fn reap(&mut self, index: u32) {
        let h = &self.conns[index as usize].hot;
        if h.state == TcpState::Closed && h.has(flag::RELEASED) {
            self.free(index);
        }
    }

    pub(crate) fn free(&mut self, index: u32) {
        let c = &mut self.conns[index as usize];
        c.closed(&mut self.shared.context(index));
        self.shared.wheel.remove(index);
        c.generation = c.generation.wrapping_add(1);
        c.hot.flags &= flag::IN_WORK;
        c.hot.events = 0;
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
        let hot = Hot {
            rcv_nxt: SeqNr(0),
            snd_una: SeqNr(0),
            snd_nxt: SeqNr(0),
            snd_wnd: 0,
            snd_wl1: SeqNr(0),
            snd_wl2: SeqNr(0),
            rcv_adv: SeqNr(0),
            last_ack_sent: SeqNr(0),
            ts_recent: 0,
            cwnd: 0,
            pipe: 0,
            unsent: 0,
            ssthresh: u32::MAX,
            flags: flag::HASHED,
            state: TcpState::SynSent,
            snd_wscale: 0,
            rcv_wscale: 0,
            unacked_segs: 0,
            emss,
            events: 0,
            rto_at: 0,
            ack_at: 0,
            wheel_at: u64::MAX,
            user: 0,
            last_rx: 0,
            rtt: Rtt::default(),
            max_snd_wnd: 0,
            backoff: 0,
            dup_acks: 0,
            probes: 0,
            phase: Phase::Open,
        };
        let mut c = Connection {
            hot,
            tx: SendQueue::new(),
            rx: ReceiveQueue::new(),
            ooo: None,
            recovery: None,
            template: Template::new(sh.config.mac, [0; 6], sh.config.vlan, &key),
            neighbour_generation: 0,
            ts_offset: 0,
            hash: hash as u32,
            cc: Controller::new(sh.config.congestion),
            cwv: Validation::NEW,
            ecn_mark: SeqNr(0),
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
            c.hot.flags |= flag::SELF;
        }
        let index = match self.free.pop() {
            Some(i) => {
                let slot = &mut self.conns[i as usize];
                c.generation = slot.generation;
                c.hot.flags |= slot.hot.flags & flag::IN_WORK;
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
            if self.conns[index as usize].hot.has(flag::RELEASED) {
                self.shared.stats.time_wait_evicted += 1;
                self.free(index);
                return;
            }
        }
    }
}
