//! The state of one connection. The part that every segment touches comes first, in two cache lines.

pub(crate) mod ack;
pub(crate) mod answers;
pub(crate) mod closing_list;
pub(crate) mod context;
pub(crate) mod control_segments;
pub(crate) mod ecn;
pub(crate) mod handshake;
pub(crate) mod input;
pub(crate) mod multi_segments;
pub(crate) mod neighbour;
pub(crate) mod orphan;
pub(crate) mod output;
pub(crate) mod paced_output;
pub(crate) mod receive_window;
pub(crate) mod reset;
pub(crate) mod side_table;
#[cfg(test)]
mod tests_without_stack;
pub(crate) mod timers;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::congestion::CongestionState;
use crate::connection::closing_list::Closing;
use crate::connection::context::{SharedState, TcpContext};
use crate::loss::rack::ReorderWindow;
use crate::loss::recovery::Recovery;
use crate::queues::out_of_order_queue::OutOfOrderQueue;
use crate::queues::receive_queue::ReceiveQueue;
use crate::queues::send_queue::TransmitQueue;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::template::Template;

/// The listener id of connections that have none.
pub(crate) const NO_LISTENER: u32 = u32::MAX;

#[repr(C, align(64))]
pub(crate) struct Connection<B, R> {
    pub tcb: Tcb,
    pub send_queue: TransmitQueue<R>,
    pub receive_queue: ReceiveQueue<B>,
    pub out_of_order: Option<Box<OutOfOrderQueue<B>>>,
    pub recovery: Option<Box<Recovery>>,
    pub template: Template,
    /// The generation of the neighbour table in which the template's destination was looked up; 0:
    /// never.
    pub neighbour_generation: u32,
    pub timestamp_offset: u32,
    /// The low half of the four-tuple's hash, needed for removal from the flow table.
    pub hash: u32,
    /// Sequence number of the peer's FIN once it has been seen (`FIN_SEEN`), in order or not.
    pub fin_at: SeqNr,
    pub congestion: CongestionState,
    /// The tick at which the current series of timeouts began; 0: none.
    pub stalled_since: u32,
    pub generation: u32,
    pub retransmits: u32,
    /// The listener of a passive open, else `NO_LISTENER`.
    pub listener: u32,
    /// The effective MSS agreed in the handshake, the upper limit of `tcb.emss`.
    pub emss_agreed: u16,
    /// RACK's reordering window, kept here while there is no `recovery`.
    pub reorder_window: ReorderWindow,
    /// The tick (2^20 ns) at which the connection next takes part in the MTU search of a narrow
    /// path; its timer needs only these 32 bits. Once it may, `SEARCH_DUE` is set.
    pub search_at: u32,
    /// The number of received buffers of this connection, including out-of-order ones, that are
    /// counted in the total of the stack.
    pub counted_buffers: u32,
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Returns a connection for this four-tuple, whose hash is `hash`, before any handshake.
    pub(crate) fn new(shared: &SharedState, key: &FlowKey, hash: u64) -> Self {
        let config = &shared.config;
        let headers = if key.is_v6() { 60 } else { 40 };
        let emss = config.mtu - headers - if config.timestamps { 12 } else { 0 };
        let mut conn = Connection {
            tcb: Tcb::new(emss),
            send_queue: TransmitQueue::new(),
            receive_queue: ReceiveQueue::new(),
            out_of_order: None,
            recovery: None,
            template: Template::new(config.mac, [0; 6], config.vlan, key),
            neighbour_generation: 0,
            timestamp_offset: 0,
            hash: hash as u32,
            congestion: CongestionState::new(config.congestion),
            stalled_since: 0,
            generation: 0,
            retransmits: 0,
            listener: NO_LISTENER,
            emss_agreed: emss,
            search_at: 0,
            counted_buffers: 0,
            reorder_window: ReorderWindow::default(),
            fin_at: SeqNr(0),
        };
        if shared.is_own_address(key.remote().ip()) {
            conn.tcb.flags |= ConnectionFlags::SELF_ADDRESSED;
        }
        conn
    }

    /// Prefetches the cache lines that a segment with data (`data`) or a pure ACK touches: further
    /// ones would only displace lines that are needed.
    #[inline]
    pub(crate) fn prefetch_for(&self, data: bool) {
        B::prefetch(&raw const self.tcb);
        B::prefetch(&raw const self.tcb.user);
        B::prefetch(&raw const self.receive_queue);
        B::prefetch(&raw const self.template);
        B::prefetch(&raw const self.neighbour_generation);
        if !data {
            B::prefetch(&raw const self.send_queue);
            B::prefetch(&raw const self.congestion.validation);
        }
    }

    /// Second stage: prefetches the memory that the lines of the first stage point to.
    #[inline]
    pub(crate) fn prefetch_queues_for(&self, data: bool) {
        if data {
            self.receive_queue.prefetch();
        } else {
            self.send_queue.prefetch::<B>();
        }
    }

    /// Prefetches the cache lines that the timers read.
    #[inline]
    pub(crate) fn prefetch_timers(&self) {
        B::prefetch(&raw const self.tcb.flags);
        B::prefetch(&raw const self.tcb.user);
        B::prefetch(&raw const self.send_queue);
        B::prefetch(&raw const self.receive_queue);
    }

    /// Returns whether SACK or D-SACK blocks are to be sent, which only a pure ACK carries.
    pub(crate) fn has_sack_blocks(&self) -> bool {
        self.out_of_order
            .as_ref()
            .is_some_and(|queue| !queue.is_idle())
    }

    /// Ensures that the recovery state exists and that each segment in flight has a record of its
    /// own, so that segments can be marked.
    #[cold]
    pub(crate) fn start_recovery(&mut self) {
        self.recovery_state();
        self.split_multi_segments();
    }

    /// Returns the number of retransmission timeouts since new data was last acknowledged.
    pub(crate) fn timeouts_in_row(&self) -> u8 {
        self.recovery
            .as_ref()
            .map_or(0, |recovery| recovery.timeouts_in_row)
    }

    /// Returns the recovery state, which is allocated on first use.
    pub(crate) fn recovery_state(&mut self) -> &mut Recovery {
        let (una, reorder_window) = (self.tcb.snd_una, self.reorder_window);
        self.recovery.get_or_insert_with(|| {
            let mut recovery = Box::new(Recovery::new(una));
            recovery.rack.reorder_window = reorder_window;
            recovery
        })
    }

    /// Splits the records of segments that were sent together into one per segment, before any is
    /// marked.
    pub(crate) fn split_multi_segments(&mut self) {
        if self.tcb.has(ConnectionFlags::MULTI_SEGMENT) {
            self.tcb.flags &= !ConnectionFlags::MULTI_SEGMENT;
            // Records split earlier are not visited again: a peer can make each of its ACKs cause a
            // search for losses.
            let first = match &mut self.recovery {
                Some(recovery) => {
                    let split_to = core::mem::replace(&mut recovery.split_to, self.tcb.snd_nxt);
                    self.send_queue.first_after(split_to)
                }
                None => 0,
            };
            self.send_queue.split_multi_segments(first);
        }
    }

    /// Records that the peer sent `lo..hi` twice, for a D-SACK block (RFC 2883).
    #[cold]
    pub(crate) fn note_duplicate(&mut self, lo: SeqNr, hi: SeqNr) {
        if self.tcb.has(ConnectionFlags::SACK) && lo.lt(hi) {
            self.out_of_order
                .get_or_insert_with(|| Box::new(OutOfOrderQueue::new()))
                .note_duplicate(lo, hi);
        }
    }

    /// Records the first part of `seq..end`, which is about to be received, that is already held,
    /// for a D-SACK block (RFC 2883 section 4.2).
    #[inline]
    pub(crate) fn note_overlap(&mut self, seq: SeqNr, end: SeqNr) {
        if let Some(queue) = &mut self.out_of_order
            && self.tcb.has(ConnectionFlags::SACK)
            && let Some((lo, hi)) = queue.first_overlap(seq, end)
        {
            queue.note_duplicate(lo, hi);
        }
    }

    /// Returns whether data is unacknowledged or waits to be sent.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        let tcb = &self.tcb;
        tcb.state != TcpState::Closed
            && (tcb.snd_una != tcb.snd_nxt || tcb.unsent > 0 || tcb.is_fin_pending())
    }

    /// Returns whether `release_memory` would free any memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.send_queue.holds_memory()
            || self.receive_queue.holds_memory()
            || self.out_of_order.is_some()
            || self.recovery.is_some()
    }

    /// Frees the memory of empty queues and of a finished recovery on an idle connection.
    pub(crate) fn release_memory(&mut self) {
        self.send_queue.release_memory();
        self.receive_queue.release_memory();
        if !self.has_sack_blocks() {
            self.out_of_order = None;
        }
        if !self.tcb.has(ConnectionFlags::RECOVERING)
            && let Some(recovery) = self.recovery.take()
        {
            self.reorder_window = recovery.rack.reorder_window;
        }
    }

    #[inline]
    pub(crate) fn update_active_count(&mut self, cx: &mut TcpContext<'_>) {
        let busy = self.is_busy();
        if busy != self.tcb.has(ConnectionFlags::COUNTED_ACTIVE) {
            self.tcb.flags ^= ConnectionFlags::COUNTED_ACTIVE;
            if busy {
                cx.shared.active += 1;
            } else {
                cx.shared.active -= 1;
            }
        }
    }

    /// Updates the shared `held_buffers` by the connection's current count.
    #[inline]
    pub(crate) fn update_held_buffers(&mut self, cx: &mut TcpContext<'_>) {
        let count = self.receive_queue.buffer_count()
            + self
                .out_of_order
                .as_ref()
                .map_or(0, |queue| queue.buffer_count());
        cx.shared.held_buffers = cx.shared.held_buffers + count - self.counted_buffers as usize;
        self.counted_buffers = count as u32;
    }

    /// Ends the connection: removes it from the flow table, stops its timers, and discards its
    /// pending output. Records stay in the send queue for their owner.
    pub(crate) fn enter_closed(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.state == TcpState::Closed {
            return;
        }
        if matches!(self.tcb.state, TcpState::Established | TcpState::CloseWait) {
            cx.shared.stats.curr_estab = cx.shared.stats.curr_estab.saturating_sub(1);
        }
        self.stop_orphan_timer(cx);
        self.tcb.state = TcpState::Closed;
        self.tcb.flags &= !(ConnectionFlags::NEED_MASK | ConnectionFlags::RECOVERING);
        self.tcb.stop_timer();
        self.tcb.ack_at = 0;
        self.tcb.pipe = 0;
        self.tcb.unsent = 0;
        self.out_of_order = None;
        self.recovery = None;
        self.update_held_buffers(cx);
        cx.shared.leave_backlog(&mut self.tcb, self.listener);
        self.update_active_count(cx);
        if self.tcb.has(ConnectionFlags::IN_FLOW_TABLE) {
            self.tcb.flags &= !ConnectionFlags::IN_FLOW_TABLE;
            cx.shared.flow_table.remove(u64::from(self.hash), cx.index);
        }
    }

    /// Enters TIME-WAIT (RFC 9293 section 3.6).
    pub(crate) fn enter_time_wait(&mut self, cx: &mut TcpContext<'_>) {
        self.stop_orphan_timer(cx);
        self.tcb.state = TcpState::TimeWait;
        self.tcb.backoff = 0;
        self.tcb.start_time_wait_timer(cx);
        cx.raise_event(&mut self.tcb, Events::CLOSED);
        self.update_active_count(cx);
        cx.shared.closing.push(Closing::TimeWait, cx.index);
    }
}

#[cfg(test)]
mod tests {
    use crate::base::buffer::VecBuf;

    #[test]
    fn an_idle_connection_costs_512_bytes_128_of_them_hot() {
        type S = crate::stack::Stack<VecBuf, [u64; 4]>;
        assert_eq!(S::HOT_BYTES, 128);
        let all = S::CONNECTION_BYTES;
        assert!(all <= 512, "{all}");
    }
}
