//! The state of one connection, in parts that own their fields, and its life cycle.

pub(crate) mod answers;
pub(crate) mod closing_list;
pub(crate) mod context;
pub(crate) mod ecn;
pub(crate) mod handshake;
pub(crate) mod held_buffers;
pub(crate) mod input;
pub(crate) mod listeners;
pub(crate) mod multi_segments;
pub(crate) mod orphan;
pub(crate) mod output;
pub(crate) mod path;
pub(crate) mod receiver;
pub(crate) mod reset;
pub(crate) mod sender;
pub(crate) mod side_table;
pub(crate) mod stalled;
#[cfg(test)]
mod tests_without_stack;
pub(crate) mod timers;
pub(crate) mod tso_watch;

use core::mem::offset_of;

use siw_net::{ConnId, FlowKey, RecvBuf};

use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::connection::closing_list::Closing;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::path::PathState;
use crate::connection::receiver::Receiver;
use crate::connection::sender::Sender;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendVariables;
use crate::tcb::timer::Timer;

/// The listener id of connections that have none.
pub(crate) const NO_LISTENER: u32 = u32::MAX;

/// One connection: its state, and its parts. A method that needs one part is a method of that part,
/// which gets the [`Tcb`] as an argument; the methods here need several.
///
/// The order of the parts decides which cache lines a segment touches. Every segment touches the second
/// and the third ([`Self::HOT_BYTES`]): RCV.* (the last fields of `receiver`), `tcb`, and SND.* (the
/// first fields of `sender`). A segment with data also touches the first line, the rest of `receiver`,
/// and those of the headers; an acknowledgement those of the headers and the next ones of `sender`.
#[repr(C, align(64))]
pub(crate) struct Connection<B, R> {
    pub receiver: Receiver<B>,
    pub tcb: Tcb,
    pub sender: Sender<R>,
    pub generation: u32,
    /// The low half of the four-tuple's hash, needed for removal from the flow table.
    pub hash: u32,
    pub path: PathState,
    /// The listener of a passive open, else `NO_LISTENER`.
    pub listener: u32,
}

impl<B, R> Connection<B, R> {
    /// The part of a connection that every segment accesses: two cache lines.
    pub(crate) const HOT_BYTES: usize = {
        let first = offset_of!(Self, receiver) + offset_of!(Receiver<B>, rcv);
        let end = offset_of!(Self, sender) + size_of::<SendVariables>();
        assert!(first == 64 && end == 3 * 64, "two cache lines");
        end - first
    };
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Returns a connection for this four-tuple, whose hash is `hash`, before any handshake.
    pub(crate) fn new(shared: &SharedState, key: &FlowKey, hash: u64) -> Self {
        let config = &shared.config;
        let headers = if key.is_v6() { 60 } else { 40 };
        let emss = shared.net.config.mtu - headers - if config.timestamps { 12 } else { 0 };
        let mut conn = Connection {
            receiver: Receiver::new(),
            tcb: Tcb::new(emss),
            sender: Sender::new(config.congestion, emss),
            generation: 0,
            hash: hash as u32,
            path: PathState::new(&shared.net.config, key),
            listener: NO_LISTENER,
        };
        if shared.net.is_own_address(key.remote().ip()) {
            conn.tcb.flags |= ConnectionFlags::SELF_ADDRESSED;
        }
        conn
    }

    /// Returns the id of the connection, which is in slot `index`.
    #[inline]
    pub(crate) fn id(&self, index: u32) -> ConnId {
        ConnId {
            index,
            generation: self.generation,
        }
    }

    /// Prefetches the cache lines that a segment with data (`data`) or a pure ACK touches: further
    /// ones would only displace lines that are needed.
    #[inline]
    pub(crate) fn prefetch_for(&self, data: bool) {
        B::prefetch(&raw const self.tcb);
        B::prefetch(&raw const self.sender.snd);
        B::prefetch(&raw const self.receiver);
        B::prefetch(&raw const self.path.template);
        B::prefetch(&raw const self.path.neighbour_generation);
        if !data {
            B::prefetch(&raw const self.sender.send_buffer.sent);
            B::prefetch(&raw const self.sender.congestion.validation);
        }
    }

    /// Second stage: prefetches the memory that the lines of the first stage point to.
    #[inline]
    pub(crate) fn prefetch_queues_for(&self, data: bool) {
        if data {
            self.receiver.receive_queue.prefetch();
        } else {
            self.sender.send_buffer.prefetch::<B>();
        }
    }

    /// Prefetches the cache lines that the timers read.
    #[inline]
    pub(crate) fn prefetch_timers(&self) {
        B::prefetch(&raw const self.tcb);
        B::prefetch(&raw const self.sender.snd);
        B::prefetch(&raw const self.receiver);
        B::prefetch(&raw const self.sender.send_buffer.sent);
    }

    /// Returns whether `release_memory` would free any memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.sender.holds_memory() || self.receiver.holds_memory()
    }

    /// Frees the memory of empty queues and of a finished recovery on an idle connection.
    pub(crate) fn release_memory(&mut self) {
        self.sender.release_memory();
        self.receiver.release_memory();
    }

    /// Ends the connection: removes it from the flow table, stops its timers, and discards its
    /// pending output. Records stay in the send buffer for their owner.
    pub(crate) fn enter_closed(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.state == TcpState::Closed {
            return;
        }
        if matches!(self.tcb.state, TcpState::Established | TcpState::CloseWait) {
            cx.shared.stats.curr_estab = cx.shared.stats.curr_estab.saturating_sub(1);
        }
        cx.stop_orphan_timer();
        self.tcb.state = TcpState::Closed;
        self.tcb.flags &= !ConnectionFlags::NEED_MASK;
        self.tcb.stop_timer();
        self.receiver.ack_at = 0;
        self.receiver.resume_reading(&mut self.tcb, cx);
        self.receiver.out_of_order = None;
        self.sender.discard_output();
        self.receiver.update_held_buffers(cx);
        cx.shared
            .listeners
            .leave_backlog(&mut self.tcb, self.listener);
        cx.update_active_count(&mut self.tcb, &self.sender.snd);
        if self.tcb.has(ConnectionFlags::IN_FLOW_TABLE) {
            self.tcb.flags &= !ConnectionFlags::IN_FLOW_TABLE;
            cx.shared
                .flow_table
                .remove(u64::from(self.hash), cx.id.index);
        }
    }

    /// Returns whether the headers have the current link-layer destination, after a lookup if needed.
    /// If not, the connection waits for its neighbour and is scheduled again when the neighbour
    /// answers.
    #[inline]
    pub(crate) fn ensure_resolved(&mut self, cx: &mut TcpContext<'_>) -> bool {
        self.path.is_resolved(cx) || self.resolve_neighbour(cx)
    }

    #[cold]
    fn resolve_neighbour(&mut self, cx: &mut TcpContext<'_>) -> bool {
        let is_resolved = self.path.resolve_neighbour(&self.tcb, cx);
        if is_resolved && self.tcb.is_timer(Timer::NeighbourResolution) {
            // Segments sent from now on get the full retransmission timeout. The user timeout of the
            // data that waited goes on: it counts from when the owner submitted that data (RFC 9293
            // section 3.9.1.1).
            self.tcb.stop_timer();
            self.sender.snd.backoff = 0;
        }
        is_resolved
    }

    /// Enters TIME-WAIT (RFC 9293 section 3.6).
    pub(crate) fn enter_time_wait(&mut self, cx: &mut TcpContext<'_>) {
        cx.stop_orphan_timer();
        self.tcb.state = TcpState::TimeWait;
        self.sender.snd.backoff = 0;
        self.tcb.start_time_wait_timer(cx);
        cx.raise_event(&mut self.tcb, Events::CLOSED);
        cx.update_active_count(&mut self.tcb, &self.sender.snd);
        cx.shared.closing.push(Closing::TimeWait, cx.id.index);
    }
}

#[cfg(test)]
mod tests {
    use siw_net::VecBuf;

    #[test]
    fn an_idle_connection_costs_512_bytes_128_of_them_hot() {
        type S = crate::stack::Stack<VecBuf, [u64; 4]>;
        assert_eq!(S::HOT_BYTES, 128);
        let all = S::CONNECTION_BYTES;
        assert!(all <= 512, "{all}");
    }
}
