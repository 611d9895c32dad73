//! The receive side of a connection: RCV.*, received segments in order and out of order, the buffers
//! that they hold, and the receive window: its advertised edge, and its growth on long paths. The ACKs
//! that report it are in [`pure_acks`].

pub(crate) mod pure_acks;

use siw_net::RecvBuf;

use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::connection::context::TcpContext;
use crate::queues::out_of_order_queue::OutOfOrderQueue;
use crate::queues::receive_queue::ReceiveQueue;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::receive_variables::ReceiveVariables;
use crate::wire::segment::{FIN, PSH, Segment};

/// The round trip in ns from which a path is long: the initial window suffices for shorter ones, and
/// their connections are spared the measurement.
pub(crate) const LONG_PATH: u64 = 1 << 20;

/// Units of [`SideFields::round_position`](crate::connection::side_table::SideFields), as a shift.
const POSITION_SHIFT: u32 = 14;
/// Units of `round_tick`, as a shift.
const TICK_SHIFT: u32 = 20;

/// Data that was put into the receive queue.
#[derive(Clone, Copy)]
pub(crate) struct Delivery {
    pub bytes: u32,
    /// Buffers that were not held before; 0 if the data went into one that was.
    pub buffers: u32,
    /// Number of segments for the ACK policy.
    pub segments: u32,
    /// The last segment had PSH.
    pub push: bool,
}

/// The receive window to advertise.
#[derive(Clone, Copy)]
pub(crate) struct WindowOffer {
    /// The value of the field.
    pub field: u16,
    /// The right edge that it implies.
    pub edge: SeqNr,
}

/// The receive side of one connection.
///
/// The variables that every segment accesses come last: the [`Tcb`] follows them in the connection.
#[repr(C)]
pub(crate) struct Receiver<B> {
    pub receive_queue: ReceiveQueue<B>,
    pub out_of_order: Option<Box<OutOfOrderQueue<B>>>,
    /// When the delayed ACK is due, in ns; 0: none is pending.
    pub ack_at: u64,
    /// The number of received buffers of this connection, including out-of-order ones, that are
    /// counted in the total of the stack.
    pub counted_buffers: u32,
    /// Segments received since our last ACK.
    pub unacked_segs: u8,
    pub rcv: ReceiveVariables,
}

impl<B: RecvBuf> Receiver<B> {
    /// Returns a receive side without data.
    pub(crate) fn new() -> Self {
        Receiver {
            receive_queue: ReceiveQueue::new(),
            out_of_order: None,
            ack_at: 0,
            counted_buffers: 0,
            unacked_segs: 0,
            rcv: ReceiveVariables::new(),
        }
    }

    /// Records that a frame with an ACK was sent: `edge`, the right edge of the advertised window,
    /// must be honoured from now on, and no other ACK is due.
    #[inline]
    pub(crate) fn on_ack_sent(&mut self, edge: SeqNr) {
        self.rcv.adv = self.rcv.adv.max(edge);
        self.rcv.last_ack_sent = self.rcv.nxt;
        self.unacked_segs = 0;
        self.ack_at = 0;
    }

    /// Delays the ACK of a message until the owner replies. Not by the timer wheel: most waits end
    /// after a microsecond.
    #[inline]
    fn await_answer(&mut self, cx: &mut TcpContext<'_>) {
        self.ack_at = cx.now.0 + cx.shared.answer_wait;
        let awaited = (cx.id.index, self.ack_at);
        cx.shared.awaited_answers.push_back(awaited);
    }

    /// Returns whether data that is sent now follows a segment of the peer so soon that an ACK sent in
    /// between could have been piggybacked: the next ACKs wait for data.
    #[inline]
    pub(crate) fn answers_at_once(&self, tcb: &Tcb, cx: &TcpContext<'_>) -> bool {
        let since = cx.now.0.saturating_sub(tcb.last_rx);
        self.rcv.last_ack_sent == self.rcv.nxt && since < cx.shared.answer_wait
    }

    /// Returns the largest receive window that the configuration, the free buffers and the agreed
    /// window scaling allow. `srtt`: the smoothed round trip in ns.
    #[inline]
    fn window_limit(&self, tcb: &Tcb, srtt: u64, cx: &mut TcpContext<'_>) -> u32 {
        let shared = &*cx.shared;
        let limit = if srtt >= LONG_PATH {
            self.tuned_window_limit(tcb, cx)
        } else {
            shared.recv_window
        };
        limit.min(0xffff << tcb.scales.receive())
    }

    /// Returns the tuned window, as far as the free buffers of the pool would hold full segments, and
    /// at least the initial one: a connection whose owner reads goes on when others hold the pool.
    #[cold]
    fn tuned_window_limit(&self, tcb: &Tcb, cx: &mut TcpContext<'_>) -> u32 {
        let shared = &*cx.shared;
        let doublings = shared.side_table.window_doublings(cx.id.index);
        let tuned = u64::from(shared.recv_window) << doublings;
        let free = shared.held.free();
        let room = (free as u64).saturating_mul(u64::from(tcb.emss) * 3 / 4);
        tuned
            .min(shared.recv_window_max.into())
            .min(room.saturating_add(self.receive_queue.len_bytes() as u64))
            .max(shared.recv_window.into()) as u32
    }

    /// Measures how much the owner has read in a round trip, and doubles the window if that is half
    /// of it or more: the window limits the peer, or will soon. `srtt`: the smoothed round trip in ns.
    #[cold]
    pub(crate) fn tune_window(&self, tcb: &Tcb, srtt: u64, cx: &mut TcpContext<'_>) {
        let limit = u64::from(self.window_limit(tcb, srtt, cx));
        let (initial, largest) = (cx.shared.recv_window, cx.shared.recv_window_max);
        let read = self.rcv.nxt - self.receive_queue.len_bytes() as u32;
        let position = (read.0 >> POSITION_SHIFT) as u16;
        let tick = (cx.now.0 >> TICK_SHIFT) as u16;
        let fields = cx.shared.side_table.fields_of(cx.id.index);
        let elapsed = u64::from(tick.wrapping_sub(fields.round_tick));
        let round_trip = (srtt >> TICK_SHIFT).max(1);
        if elapsed < round_trip {
            return;
        }
        let bytes = u64::from(position.wrapping_sub(fields.round_position)) << POSITION_SHIFT;
        (fields.round_position, fields.round_tick) = (position, tick);
        let per_round_trip = bytes * round_trip / elapsed;
        let tuned = u64::from(initial) << fields.window_doublings;
        // Not from a window that the pool limits.
        let is_pool_free = limit >= tuned;
        if per_round_trip >= tuned / 2 && tuned < u64::from(largest) && is_pool_free {
            fields.window_doublings += 1;
        }
    }

    /// Returns the receive window to advertise. The edge never moves left (RFC 9293 section
    /// 3.8.6.2.1), and moves right only by useful amounts (silly window avoidance, section 3.8.6.2.2).
    /// `srtt`: the smoothed round trip in ns.
    #[inline]
    pub(crate) fn receive_window(
        &self,
        tcb: &Tcb,
        srtt: u64,
        cx: &mut TcpContext<'_>,
    ) -> WindowOffer {
        self.window_within(tcb, self.window_limit(tcb, srtt, cx))
    }

    /// Returns the window to advertise if it may be at most `limit` bytes.
    #[inline]
    fn window_within(&self, tcb: &Tcb, limit: u32) -> WindowOffer {
        let free = limit.saturating_sub(self.receive_queue.len_bytes() as u32);
        let now = self.rcv.window();
        let step = (limit / 2).min(u32::from(tcb.emss));
        let want = if free >= now.saturating_add(step) {
            free
        } else {
            now
        };
        let shift = tcb.scales.receive();
        let mut field = want >> shift;
        if field << shift < now {
            field += 1; // rounding must not shrink the window
        }
        let field = field.min(0xffff);
        WindowOffer {
            field: field as u16,
            edge: self.rcv.nxt + (field << shift),
        }
    }

    /// Returns whether the window grew enough to justify a pure ACK. `srtt`: the smoothed round trip in
    /// ns.
    pub(crate) fn window_update_due(&self, tcb: &Tcb, srtt: u64, cx: &mut TcpContext<'_>) -> bool {
        let limit = self.window_limit(tcb, srtt, cx);
        let left = self.rcv.window();
        if left >= limit / 2 {
            return false;
        }
        let gain = (self.window_within(tcb, limit).edge - self.rcv.nxt).saturating_sub(left);
        gain >= limit / 4 || (left < 2 * u32::from(tcb.emss) && gain > 0)
    }

    /// Returns whether SACK or D-SACK blocks are to be sent, which only a pure ACK carries.
    pub(crate) fn has_sack_blocks(&self) -> bool {
        self.out_of_order
            .as_ref()
            .is_some_and(|queue| !queue.is_idle())
    }

    /// Records that the peer sent `lo..hi` twice, for a D-SACK block (RFC 2883).
    #[cold]
    pub(crate) fn note_duplicate(&mut self, tcb: &Tcb, lo: SeqNr, hi: SeqNr) {
        if tcb.has(ConnectionFlags::SACK) && lo.lt(hi) {
            self.out_of_order
                .get_or_insert_with(|| Box::new(OutOfOrderQueue::new()))
                .note_duplicate(lo, hi);
        }
    }

    /// Returns whether `release_memory` would free any memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.receive_queue.holds_memory() || self.out_of_order.is_some()
    }

    /// Frees the memory of empty queues.
    pub(crate) fn release_memory(&mut self) {
        self.receive_queue.release_memory();
        if !self.has_sack_blocks() {
            self.out_of_order = None;
        }
    }

    /// Updates the shared count of held buffers by the connection's current count.
    #[inline]
    pub(crate) fn update_held_buffers(&mut self, cx: &mut TcpContext<'_>) {
        let count = self.receive_queue.buffer_count()
            + self
                .out_of_order
                .as_ref()
                .map_or(0, |queue| queue.buffer_count());
        cx.shared.held.change(self.counted_buffers, count as u32);
        self.counted_buffers = count as u32;
    }

    /// Puts in-order payload into the receive queue and decides when to acknowledge it (RFC 9293
    /// section 3.8.6.3).
    #[inline]
    pub(crate) fn deliver_in_order(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        buffer: B,
        push: bool,
    ) {
        let (len, buffers) = (buffer.remaining() as u32, buffer.buffer_count() as u32);
        self.receive_queue.push(buffer);
        let delivery = Delivery {
            bytes: len,
            buffers,
            // A segment coalesced by the port counts as two, so that it is acknowledged at once.
            segments: 1 + u32::from(len > u32::from(tcb.emss)),
            push,
        };
        self.on_delivered(tcb, cx, delivery);
    }

    /// Accounts for data that was put into the receive queue, and decides when to acknowledge it.
    #[inline]
    pub(crate) fn on_delivered(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        delivery: Delivery,
    ) {
        let Delivery {
            bytes,
            buffers,
            segments,
            push,
        } = delivery;
        cx.shared.stats.in_bytes += u64::from(bytes);
        self.rcv.nxt += bytes;
        self.counted_buffers += buffers;
        cx.shared.held.change(0, buffers);
        self.unacked_segs = (u32::from(self.unacked_segs) + segments).min(255) as u8;
        if push && self.unacked_segs == 1 && tcb.has(ConnectionFlags::ANSWERS) {
            self.await_answer(cx);
        } else if push || self.unacked_segs >= 2 {
            cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
        } else if self.ack_at == 0 {
            self.ack_at = cx.now.0 + cx.shared.delayed_ack;
            cx.schedule_timer(tcb, self.ack_at);
        }
        cx.raise_event(tcb, Events::READABLE);
    }

    /// The number of buffers that a new segment may bring.
    fn room(&self, tcb: &Tcb, cx: &TcpContext<'_>) -> usize {
        let own = self.counted_buffers;
        if tcb.has(ConnectionFlags::UNREAD) {
            return cx.shared.held.room_while_waiting(cx.user(), own);
        }
        cx.shared.held.room(own)
    }

    /// The owner stops reading: what the connection holds is counted apart from the buffers of others. Data
    /// beyond the share of its user that has not been acknowledged is forgotten, as if its segments had been
    /// dropped: the peer sends it again (RFC 9293 section 3.8.1). Returns `false` if such connections already
    /// hold all buffers that there are for received data: the owner has to read, or end the connection.
    #[cold]
    pub(crate) fn stop_reading(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) -> bool {
        if tcb.has(ConnectionFlags::UNREAD) {
            return true;
        }
        if cx.shared.held.is_full_of_waiting() {
            return false;
        }
        let user = cx.user();
        self.update_held_buffers(cx);
        let may_forget = !tcb.has(ConnectionFlags::FIN_SEEN) && self.out_of_order.is_none();
        if may_forget
            && cx.shared.held.room_while_waiting(user, 0) < self.receive_queue.buffer_count()
        {
            let length = self.receive_queue.len_bytes() as u32;
            let begin = self.rcv.nxt - length;
            let acknowledged = self.rcv.last_ack_sent.distance_from(begin).max(0) as usize;
            self.receive_queue.forget_from(acknowledged);
            let kept = self.receive_queue.len_bytes() as u32;
            cx.shared.stats.in_bytes -= u64::from(length - kept);
            self.rcv.nxt = begin + kept;
            self.update_held_buffers(cx);
        }
        tcb.flags |= ConnectionFlags::UNREAD;
        cx.shared.held.begin_wait(user, self.counted_buffers);
        true
    }

    /// The owner goes on reading.
    #[cold]
    pub(crate) fn resume_reading(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        if tcb.has(ConnectionFlags::UNREAD) {
            tcb.flags &= !ConnectionFlags::UNREAD;
            cx.shared.held.end_wait(cx.user(), self.counted_buffers);
        }
    }

    /// Takes the payload of a segment as [`take_payload`](Self::take_payload), with the buffers of a
    /// connection that is not read counted apart before and afterwards.
    #[cold]
    pub(crate) fn take_unread_payload(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        buffer: B,
    ) -> bool {
        let user = cx.user();
        cx.shared.held.end_wait(user, self.counted_buffers);
        let is_fin_next = self.take_payload(tcb, cx, seg, buffer);
        cx.shared.held.begin_wait(user, self.counted_buffers);
        is_fin_next
    }

    /// Takes the payload and the FIN of an acceptable segment (RFC 9293 section 3.10.7.4, seventh).
    /// Returns whether the peer's FIN is next in sequence.
    pub(crate) fn take_payload(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        mut buffer: B,
    ) -> bool {
        let mut seq = seg.seq;
        let mut fin = seg.flags & FIN != 0;
        let was_seen = seq.lt(self.rcv.nxt);
        if was_seen {
            let old = (self.rcv.nxt - seq).min(buffer.remaining() as u32);
            cx.shared.stats.dup_bytes_in += u64::from(old);
            buffer.advance(old as usize);
            cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
            self.note_duplicate(tcb, seq, seq + old);
            seq += old;
        }
        let space = self.rcv.adv.distance_from(seq).max(0) as usize;
        if buffer.remaining() > space {
            buffer.truncate(space);
            fin = false;
        }
        if fin && !tcb.has(ConnectionFlags::FIN_SEEN) {
            tcb.fin_at = seq + buffer.remaining() as u32;
            tcb.flags |= ConnectionFlags::FIN_SEEN;
            if let Some(queue) = &mut self.out_of_order {
                queue.discard_from(tcb.fin_at);
            }
        }
        if tcb.has(ConnectionFlags::FIN_SEEN) {
            // Data beyond a FIN is ignored (section 3.10.7.4 seventh).
            let space = tcb.fin_at.distance_from(seq).max(0) as usize;
            buffer.truncate(buffer.remaining().min(space));
        }
        if buffer.remaining() > 0 {
            self.update_held_buffers(cx);
            let room = self.room(tcb, cx);
            let full = room == 0;
            if room < buffer.buffer_count() && !full {
                cx.shared.stats.rcv_q_drop += 1;
                cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
                keep_buffers(&mut buffer, room);
            }
            if seq == self.rcv.nxt {
                let shares = full || cx.shared.shares_buffers(self.counted_buffers);
                let shares = shares && self.receive_queue.absorb(&buffer);
                // A segment that fills a hole is kept beyond the limit, because the buffers held
                // beyond the hole could otherwise never be delivered. Above a second limit it
                // replaces the last segment held out of order (RFC 2018 section 8).
                if full && !shares && !self.make_room(cx) {
                    cx.shared.stats.rcv_q_drop += 1;
                    cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
                    return false;
                }
                // If a segment has several duplicate parts, the first is reported (RFC 2883 section
                // 4.2).
                if !was_seen {
                    self.note_overlap(tcb, seq, seq + buffer.remaining() as u32);
                }
                let push = seg.flags & PSH != 0;
                if shares {
                    let delivery = Delivery {
                        bytes: buffer.remaining() as u32,
                        buffers: 0,
                        segments: 1,
                        push,
                    };
                    self.on_delivered(tcb, cx, delivery);
                } else {
                    self.deliver_in_order(tcb, cx, buffer, push);
                }
                if let Some(queue) = &mut self.out_of_order {
                    let before = self.receive_queue.len_bytes();
                    self.rcv.nxt = queue.deliver_in_order(self.rcv.nxt, &mut self.receive_queue);
                    cx.shared.stats.in_bytes += (self.receive_queue.len_bytes() - before) as u64;
                    if queue.is_idle() {
                        self.out_of_order = None;
                    }
                    cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
                }
            } else {
                cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
                if full {
                    cx.shared.stats.rcv_q_drop += 1;
                } else {
                    cx.shared.stats.ofo_queue += 1;
                    let len = buffer.remaining();
                    self.note_overlap(tcb, seq, seq + len as u32);
                    let queue = self
                        .out_of_order
                        .get_or_insert_with(|| Box::new(OutOfOrderQueue::new()));
                    let kept = queue.insert_segment(seq, buffer);
                    if kept > 0 && cx.shared.config.show_out_of_order {
                        queue.remember_unseen(seq);
                        cx.raise_event(tcb, Events::OUT_OF_ORDER);
                    }
                    cx.shared.stats.dup_bytes_in += (len - kept) as u64;
                }
            }
        }
        self.update_held_buffers(cx);
        let seen = tcb.flags & (ConnectionFlags::FIN_SEEN | ConnectionFlags::FIN_RECEIVED)
            == ConnectionFlags::FIN_SEEN;
        if seen && tcb.fin_at == self.rcv.nxt {
            return true;
        }
        if fin {
            cx.schedule_output(tcb, ConnectionFlags::NEED_ACK);
        }
        false
    }

    /// Makes room for a segment that fills a hole, on a connection that has reached its limit of
    /// held buffers: first an eighth above the limit, then by dropping the last out-of-order
    /// segment. Returns `false` if there is none to drop.
    #[cold]
    fn make_room(&mut self, cx: &mut TcpContext<'_>) -> bool {
        let Some(queue) = self
            .out_of_order
            .as_mut()
            .filter(|queue| queue.buffer_count() > 0)
        else {
            return false;
        };
        if cx.shared.held.may_exceed(self.counted_buffers) {
            return true;
        }
        cx.shared.stats.rcv_pruned += 1;
        queue.drop_last()
    }

    /// Records the first part of `seq..end`, which is about to be received, that is already held,
    /// for a D-SACK block (RFC 2883 section 4.2).
    #[inline]
    fn note_overlap(&mut self, tcb: &Tcb, seq: SeqNr, end: SeqNr) {
        if let Some(queue) = &mut self.out_of_order
            && tcb.has(ConnectionFlags::SACK)
            && let Some((lo, hi)) = queue.first_overlap(seq, end)
        {
            queue.note_duplicate(lo, hi);
        }
    }
}

/// Shortens a frame to the data in its first `count` buffers.
#[cold]
fn keep_buffers<B: RecvBuf>(buffer: &mut B, count: usize) {
    let bytes = buffer.chunks().take(count).map(<[u8]>::len).sum();
    buffer.truncate(bytes);
}
