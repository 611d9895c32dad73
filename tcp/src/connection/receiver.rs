//! The receive side of a connection: received segments in order and out of order, the buffers that
//! they hold, and the receive window: its advertised edge, and its growth on long paths.

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::connection::context::TcpContext;
use crate::queues::out_of_order_queue::OutOfOrderQueue;
use crate::queues::receive_queue::ReceiveQueue;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;

/// The round trip in ns from which a path is long: the initial window suffices for shorter ones, and
/// their connections are spared the measurement.
pub(crate) const LONG_PATH: u64 = 1 << 20;

/// Units of [`SideFields::round_position`](crate::connection::side_table::SideFields), as a shift.
const POSITION_SHIFT: u32 = 14;
/// Units of `round_tick`, as a shift.
const TICK_SHIFT: u32 = 20;

/// The receive side of one connection. RCV.NXT and the window are in its [`Tcb`].
#[repr(C)]
pub(crate) struct Receiver<B> {
    pub receive_queue: ReceiveQueue<B>,
    pub out_of_order: Option<Box<OutOfOrderQueue<B>>>,
    /// Sequence number of the peer's FIN once it has been seen (`FIN_SEEN`), in order or not.
    pub fin_at: SeqNr,
    /// The number of received buffers of this connection, including out-of-order ones, that are
    /// counted in the total of the stack.
    pub counted_buffers: u32,
}

impl<B: RecvBuf> Receiver<B> {
    /// Returns a receive side without data.
    pub(crate) fn new() -> Self {
        Receiver {
            receive_queue: ReceiveQueue::new(),
            out_of_order: None,
            fin_at: SeqNr(0),
            counted_buffers: 0,
        }
    }

    /// Returns the largest receive window that the configuration, the free buffers and the agreed
    /// window scaling allow.
    #[inline]
    fn window_limit(&self, tcb: &Tcb, cx: &mut TcpContext<'_>) -> u32 {
        let shared = &*cx.shared;
        let limit = if tcb.rtt.srtt >= LONG_PATH {
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
        let free = shared
            .config
            .max_held_buffers
            .saturating_sub(shared.held_buffers);
        let room = (free as u64).saturating_mul(u64::from(tcb.emss) * 3 / 4);
        tuned
            .min(shared.recv_window_max.into())
            .min(room.saturating_add(self.receive_queue.len_bytes() as u64))
            .max(shared.recv_window.into()) as u32
    }

    /// Measures how much the owner has read in a round trip, and doubles the window if that is half
    /// of it or more: the window limits the peer, or will soon.
    #[cold]
    pub(crate) fn tune_window(&self, tcb: &Tcb, cx: &mut TcpContext<'_>) {
        let limit = u64::from(self.window_limit(tcb, cx));
        let (initial, largest) = (cx.shared.recv_window, cx.shared.recv_window_max);
        let read = tcb.rcv_nxt - self.receive_queue.len_bytes() as u32;
        let position = (read.0 >> POSITION_SHIFT) as u16;
        let tick = (cx.now.0 >> TICK_SHIFT) as u16;
        let fields = cx.shared.side_table.fields_of(cx.id.index);
        let elapsed = u64::from(tick.wrapping_sub(fields.round_tick));
        let round_trip = (tcb.rtt.srtt >> TICK_SHIFT).max(1);
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

    /// Returns the receive window to advertise: the value of the field and the right edge that it
    /// implies. The edge never moves left (RFC 9293 section 3.8.6.2.1), and moves right only by
    /// useful amounts (silly window avoidance, section 3.8.6.2.2).
    #[inline]
    pub(crate) fn receive_window(&self, tcb: &Tcb, cx: &mut TcpContext<'_>) -> (u16, SeqNr) {
        self.window_within(tcb, self.window_limit(tcb, cx))
    }

    /// Returns the window to advertise if it may be at most `limit` bytes.
    #[inline]
    fn window_within(&self, tcb: &Tcb, limit: u32) -> (u16, SeqNr) {
        let free = limit.saturating_sub(self.receive_queue.len_bytes() as u32);
        let now = tcb.rcv_adv.distance_from(tcb.rcv_nxt).max(0) as u32;
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
        (field as u16, tcb.rcv_nxt + (field << shift))
    }

    /// Returns whether the window grew enough to justify a pure ACK.
    pub(crate) fn window_update_due(&self, tcb: &Tcb, cx: &mut TcpContext<'_>) -> bool {
        let limit = self.window_limit(tcb, cx);
        let left = tcb.rcv_adv.distance_from(tcb.rcv_nxt).max(0) as u32;
        if left >= limit / 2 {
            return false;
        }
        let gain = (self.window_within(tcb, limit).1 - tcb.rcv_nxt).saturating_sub(left);
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
}
