//! The send interface for owners of connections: room in the window, records, and acknowledgements.

use core::ops::Range;

use siw_net::{ConnId, FrameSink, Instant, RecvBuf};

use crate::base::sink_full::SinkFull;
use crate::base::state::TcpState;
use crate::queues::send_buffer::SendBuffer;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::wire::template::SegmentFields;

/// The send buffer of a connection, while its owner adds to it.
pub struct NewRecords<'a, R> {
    send_buffer: &'a mut SendBuffer<R>,
    unsent: u32,
}

impl<R> NewRecords<'_, R> {
    /// Queues a record of `len` bytes, not 0; `ends_message`: PSH is set.
    #[inline(always)]
    pub fn push(&mut self, len: u32, record: R, ends_message: bool) {
        debug_assert!(len > 0 && self.unsent.checked_add(len).is_some());
        self.unsent = self.unsent.wrapping_add(len);
        self.send_buffer.push_record(len, record, ends_message);
    }

    /// Queues `units` records of `unit_len` bytes each, neither 0, as one entry. Segments end between
    /// records, and `ends_message` holds for each of them. A sink is asked for several records at once.
    #[inline(always)]
    pub fn push_run(&mut self, (unit_len, units): (u32, u16), record: R, ends_message: bool) {
        let len = unit_len.checked_mul(units.into());
        debug_assert!(len.is_some_and(|len| len > 0 && self.unsent.checked_add(len).is_some()));
        self.unsent = self.unsent.wrapping_add(len.unwrap_or(0));
        self.send_buffer
            .push_run((unit_len, units), record, ends_message);
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// Returns whether the remote address is one of this stack: its frames are
    /// [self-addressed](siw_net::FrameMeta::self_addressed).
    pub fn is_self_addressed(&self, id: ConnId) -> bool {
        self.slots
            .owned(id)
            .is_some_and(|conn| conn.tcb.has(ConnectionFlags::SELF_ADDRESSED))
    }

    /// Maximum payload bytes of a segment at present, and so of a record. 0 for a stale id.
    #[inline]
    pub fn effective_mss(&self, id: ConnId) -> usize {
        self.slots
            .owned(id)
            .map_or(0, |conn| usize::from(conn.tcb.emss))
    }

    /// Prefetches the state of a connection that [`send_room`](Self::send_room), `push_records` and
    /// [`flush`](Self::flush) access.
    #[inline]
    pub fn prefetch_for_sending(&self, id: ConnId) {
        if let Some(conn) = self.slots.get(id.index) {
            conn.prefetch_for(false);
        }
    }

    /// The second stage: prefetches the memory that the lines of the first stage point to. An empty queue
    /// restarts at the beginning of its memory, so that it uses few cache lines.
    #[inline]
    pub fn prefetch_queues_for_sending(&mut self, id: ConnId) {
        if let Some(conn) = self.slots.get_mut(id.index) {
            conn.sender.send_buffer.reuse_memory();
            conn.sender.send_buffer.prefetch::<B>();
            if let Some(recovery) = &conn.sender.recovery {
                B::prefetch(&raw const **recovery);
            }
        }
    }

    /// Bytes that can be queued now and leave at once: min(cwnd, peer's window) less the data in
    /// flight and queued. At least one segment when nothing is queued on an open connection, so that a
    /// record can wait for the window; 0 when not writable.
    #[inline]
    pub fn send_room(&self, id: ConnId) -> usize {
        let Some(conn) = self.slots.owned(id) else {
            return 0;
        };
        let (tcb, snd) = (&conn.tcb, &conn.sender.snd);
        if !matches!(tcb.state, TcpState::Established | TcpState::CloseWait) {
            return 0;
        }
        let floor = if snd.unsent == 0 {
            u32::from(tcb.emss)
        } else {
            0
        };
        snd.room().max(floor) as usize
    }

    /// Queues a record of `len` bytes after the others; `ends_message`: PSH is set. Only the caller's
    /// respect for `send_room` bounds the queue. Returns the record as the error if the
    /// connection cannot send (stale, closing, closed, or `len` 0).
    pub fn push_record(
        &mut self,
        id: ConnId,
        len: u32,
        record: R,
        ends_message: bool,
    ) -> Result<(), R> {
        let conn = self.slots.owned(id);
        let unsent = conn.map_or(0, |conn| conn.sender.snd.unsent);
        let is_possible = len > 0 && unsent.checked_add(len).is_some();
        let mut rest = Some(record);
        self.push_records(id, |records| {
            if let Some(record) = rest.take_if(|_| is_possible) {
                records.push(len, record, ends_message);
            }
        });
        rest.map_or(Ok(()), Err)
    }

    /// Like [`push_record`](Self::push_record) for each record that `fill` pushes; these must fit into
    /// `send_room`. Returns the result of `fill`, which is not called if the connection cannot send.
    ///
    /// Why it is fast: the connection is looked up and updated once for all records.
    #[inline(always)]
    pub fn push_records<T>(
        &mut self,
        id: ConnId,
        fill: impl FnOnce(&mut NewRecords<'_, R>) -> T,
    ) -> Option<T> {
        let conn = self.slots.get_mut(id.index);
        let conn = conn.filter(|conn| {
            conn.generation == id.generation
                && !conn.tcb.has(ConnectionFlags::RELEASED)
                && matches!(conn.tcb.state, TcpState::Established | TcpState::CloseWait)
        })?;
        let before = conn.sender.snd.unsent;
        let mut records = NewRecords {
            send_buffer: &mut conn.sender.send_buffer,
            unsent: before,
        };
        let result = fill(&mut records);
        let unsent = records.unsent;
        if unsent == before {
            return Some(result);
        }
        conn.sender.snd.unsent = unsent;
        if !conn.tcb.has(ConnectionFlags::COUNTED_ACTIVE) {
            self.shared
                .context_of(id)
                .update_active_count(&mut conn.tcb, &conn.sender.snd);
        }
        self.shared
            .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
        Some(result)
    }

    /// Sends what the windows allow, retransmissions first; an ACK that is due travels with the data. If
    /// the sink lacked room for earlier connections, this one queues behind them for `poll`.
    pub fn flush(&mut self, now: Instant, id: ConnId, sink: &mut impl FrameSink<R>) {
        self.shared.now = now;
        if self.slots.owned(id).is_some() {
            let conn = &mut self.slots[id.index];
            // A pure ACK may still travel with data of this batch; otherwise `poll` sends it.
            let ack = conn.tcb.flags & ConnectionFlags::NEED_ACK;
            let data = conn.sender.snd.unsent > 0
                || conn.sender.snd.has(SendFlags::RECOVERING)
                || conn.tcb.has(ConnectionFlags::FIN_QUEUED);
            if data && self.shared.is_output_blocked {
                self.shared
                    .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
                return;
            }
            // Early ACKs are sent first, since they acknowledge less.
            let is_full =
                data && !self.shared.early_acks.is_empty() && self.send_early_acks(sink).is_err();
            let conn = &mut self.slots[id.index];
            if is_full
                || data
                    && conn
                        .send_pending_data(&mut self.shared.context_of(id), sink)
                        .is_err()
            {
                conn.tcb.flags |= ack;
                self.shared
                    .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
                self.shared.is_output_blocked = true;
            }
        }
    }

    /// Returns whether the sink lacked room for pending output, so that [`flush`](Self::flush) only queues.
    #[inline]
    pub fn is_output_blocked(&self) -> bool {
        self.shared.is_output_blocked
    }

    /// Returns the fully acknowledged records to the owner, in order.
    #[inline]
    pub fn take_acked(&mut self, id: ConnId, visit: impl FnMut(R)) {
        if let Some(conn) = self.slots.owned_mut(id) {
            conn.sender.send_buffer.take_acked(visit);
        }
    }

    /// Like [`take_acked`](Self::take_acked) if some records were pushed as runs: reports the units of each
    /// record, counted from 0, that were acknowledged since the last call.
    #[inline]
    pub fn take_acked_units(&mut self, id: ConnId, visit: impl FnMut(&R, Range<u16>)) {
        if let Some(conn) = self.slots.owned_mut(id) {
            conn.sender.send_buffer.take_acked_units(visit);
        }
    }

    /// Returns every remaining record of a closed connection, acknowledged or not, in order; does
    /// nothing while the connection can still send.
    pub fn take_unacked(&mut self, id: ConnId, visit: impl FnMut(R)) {
        if let Some(conn) = self.slots.owned_mut(id)
            && matches!(conn.tcb.state, TcpState::Closed | TcpState::TimeWait)
        {
            conn.sender.send_buffer.drain_all(visit);
        }
    }

    /// Sends the early ACKs, oldest first.
    #[cold]
    pub(crate) fn send_early_acks(&mut self, sink: &mut impl FrameSink<R>) -> Result<(), SinkFull> {
        while let Some(early) = self.shared.early_acks.front() {
            if let Some(conn) = self.slots.current(early.id)
                && conn.tcb.state != TcpState::Closed
            {
                let (snd, rcv) = (&conn.sender.snd, &conn.receiver.rcv);
                let fields = SegmentFields {
                    seq: snd.nxt,
                    ack: early.ack,
                    flags: early.flags,
                    window: early.window,
                    ts: conn.path.timestamps(&conn.tcb, rcv, self.shared.now),
                    options: &[],
                    payload: 0,
                    ect: false,
                    tso: false,
                };
                let cx = &mut self.shared.context_of(early.id);
                conn.path.send_bare_segment(&conn.tcb, cx, &fields, sink)?;
                self.shared.stats.pure_acks_out += 1;
            }
            self.shared.early_acks.pop_front();
        }
        Ok(())
    }
}
