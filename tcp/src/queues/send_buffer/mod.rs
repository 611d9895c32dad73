//! The records to be sent or acknowledged, as pushed by the upper layer, and the segments that
//! carried them. A retransmission is rebuilt from the records, with the same boundaries, so that no
//! bytes are copied here and each FPDU stays one segment (RFC 5044 section 5).
//!
//! A record is one unit, which a segment carries whole, or a run of units of one length: if a run
//! is divided among several segments, the boundaries lie between its units.
//!
//! Records are identified by running numbers that wrap; only differences between the numbers of
//! records in the queue are meaningful.

mod memory;
mod records;

use core::ops::Range;
use std::collections::VecDeque;

use crate::base::sequence::SeqNr;
pub(crate) use records::SegmentPlan;
use records::{QueuedRecord, walk_records};

/// Marks of a segment in flight. `SACKED`: selectively acknowledged (RFC 2018).
pub(crate) const SACKED: u8 = 1;
/// Deemed lost (RFC 8985 section 6.2) and was not retransmitted since.
pub(crate) const LOST: u8 = 2;
/// Sent more than once.
pub(crate) const RETX: u8 = 4;
/// Ends a message.
pub(crate) const PUSH: u8 = 8;
/// Carries our FIN after its payload.
pub(crate) const FIN: u8 = 16;
/// Was first sent together with others.
pub(crate) const SUPER_SEGMENT: u8 = 32;

/// A segment in flight, or several that were sent together, possibly as one frame that the port
/// segments (TSO). Its payload is the `len` bytes from `offset` of record `record` on.
#[derive(Clone, Copy)]
pub(crate) struct InFlightSegment {
    pub seq: SeqNr,
    pub len: u32,
    /// Running number of its first record.
    pub record: u32,
    pub offset: u32,
    /// The time of the last transmission, in ns.
    pub at: u64,
    /// The marks above.
    pub flags: u8,
    /// If the entry stands for several segments, the payload of each (the last may be shorter); 0
    /// for a single segment. Only single segments are ever marked, see
    /// [`SendBuffer::split_multi_segments`].
    pub mss: u16,
}

impl InFlightSegment {
    /// Returns the sequence number after it; a FIN takes one.
    #[inline]
    pub(crate) fn end_seq(&self) -> SeqNr {
        self.seq + self.len + u32::from(self.flags & FIN != 0)
    }

    /// Returns the payload in bytes of the segments of a multi-segment entry that `una`
    /// acknowledges.
    #[inline]
    pub(crate) fn whole_segments_to(&self, una: SeqNr) -> u32 {
        match u32::from(self.mss) {
            0 => 0,
            mss => una.distance_from(self.seq).max(0) as u32 / mss * mss,
        }
    }

    /// Returns whether it counts as being on the wire (the pipe of RFC 6675 section 4).
    #[inline]
    pub(crate) fn in_pipe(&self) -> bool {
        self.flags & (SACKED | LOST) == 0
    }
}

/// The segments that a cumulative ACK removed from the queue.
#[derive(Default)]
pub(crate) struct AckedSegments {
    /// Payload bytes that had not been selectively acknowledged before.
    pub delivered: u32,
    /// Number of segments that were marked `SACKED`, and `LOST`.
    pub sacked_segs: u32,
    pub lost_segs: u32,
    /// The send time of the newest segment, in ns. `None`: the ACK yields no RTT sample, because
    /// one of the segments was sent more than once (Karn's algorithm, RFC 6298 section 3).
    pub sent_at: Option<u64>,
    /// One of the segments was sent more than once.
    pub retransmitted: bool,
    /// A record, or at least one more unit of a run, was fully acknowledged.
    pub records: bool,
}

/// Sizes of consecutive new segments that are sent together.
#[derive(Clone, Copy)]
pub(crate) struct SegmentBudget {
    /// Payload bytes of a full segment.
    pub emss: u32,
    /// Payload bytes of the first segment, and of each that follows except for the last.
    pub size: u32,
    /// Payload bytes that may be sent in total.
    pub usable: u32,
}

/// The pushed records that were not yet returned, and the segments in flight.
pub(crate) struct SendBuffer<R> {
    records: VecDeque<QueuedRecord<R>>,
    /// Segments in flight, in the order of their sequence numbers, without gaps.
    pub sent: VecDeque<InFlightSegment>,
    /// Running number of `records[0]`.
    base: u32,
    /// Units of `records[0]` that were already reported as acknowledged.
    units_taken: u16,
    /// The beginning of the next new segment.
    next_record: u32,
    next_offset: u32,
}

impl<R> SendBuffer<R> {
    /// Returns an empty queue.
    pub(crate) fn new() -> Self {
        SendBuffer {
            records: VecDeque::new(),
            sent: VecDeque::new(),
            base: 0,
            units_taken: 0,
            next_record: 0,
            next_offset: 0,
        }
    }

    /// Appends a record of `len` bytes, not 0. `push`: it ends a message.
    #[inline]
    pub(crate) fn push_record(&mut self, len: u32, record: R, push: bool) {
        self.push_run((len, 1), record, push);
    }

    /// Appends a record of at least one unit, each of `unit_len` bytes. `push`: each unit ends a
    /// message.
    #[inline]
    pub(crate) fn push_run(&mut self, (unit_len, units): (u32, u16), record: R, push: bool) {
        self.records.push_back(QueuedRecord {
            unit_len,
            units,
            ends_message: push,
            record,
        });
    }

    /// Returns the index in `records` of the record with this running number.
    #[inline]
    fn record_index(&self, number: u32) -> usize {
        number.wrapping_sub(self.base) as usize
    }

    /// Plans the next new segment: whole units that fit into both `emss` and `usable` bytes. A unit
    /// longer than `emss`, or the rest of one, shares a segment with no other. The first unit may
    /// exceed `usable`; the caller then decides whether to wait or to
    /// [`plan_part`](Self::plan_part).
    #[inline]
    pub(crate) fn plan_segment(&self, emss: u32, usable: u32) -> Option<SegmentPlan> {
        let mut i = self.record_index(self.next_record);
        let first = self.records.get(i)?;
        let mut plan = SegmentPlan {
            len: 0,
            ends_message: false,
            next_record: self.next_record,
            next_offset: self.next_offset,
        };
        let left = first.unit_len - first.offset_in_unit(self.next_offset);
        if left < first.unit_len || left > emss {
            plan.take(first, left.min(emss));
            return Some(plan);
        }
        let limit = emss.min(usable);
        let whole = first.whole_units(self.next_offset, limit);
        plan.take(first, whole.max(first.unit_len));
        while plan.len < limit && plan.next_offset == 0 {
            i += 1;
            let Some(record) = self.records.get(i) else {
                break;
            };
            let whole = record.whole_units(0, limit - plan.len);
            if whole == 0 {
                break;
            }
            plan.take(record, whole);
        }
        Some(plan)
    }

    /// Plans a segment with a part of the first unit, if the peer's window has no room for all of
    /// it.
    pub(crate) fn plan_part(&self, len: u32) -> SegmentPlan {
        SegmentPlan {
            len,
            ends_message: false,
            next_record: self.next_record,
            next_offset: self.next_offset + len,
        }
    }

    /// Adds up to `limit` segments of `size` bytes, and a shorter one after them, to `sent` as one
    /// entry of at most `usable` bytes. Returns the entry, and the number of segments that it stands
    /// for. `size` is the planned length of the first: less than `emss` if whole units do not fill a
    /// segment, as FPDUs, whose length is a multiple of four.
    ///
    /// This is fast because the segments carry consecutive bytes of consecutive records: the
    /// position of the first determines the rest, and equal segments of one record are counted by a
    /// division.
    pub(crate) fn take_multi_segment(
        &mut self,
        budget: &SegmentBudget,
        limit: &crate::config::TsoLimits,
        seq: SeqNr,
        at: u64,
    ) -> Option<(InFlightSegment, u32)> {
        let &SegmentBudget { emss, size, usable } = budget;
        let most = u32::from(limit.max_segments);
        let (record, offset) = self.next_position();
        let (mut len, mut count, mut push) = (0, 0, false);
        while count < most {
            let left = usable - len;
            // The first segment is taken regardless of its length.
            let within = limit.max_bytes.saturating_sub(len);
            let room = left.min(if count == 0 { within.max(size) } else { within });
            // Equal segments of one record are taken at once: units of that length, or parts of a
            // longer one.
            if let Some(record) = self.records.get(self.record_index(self.next_record)) {
                let here = record.equal_segments_in(self.next_offset, size, emss);
                let equal = (here.min(room) / size).min(most - count);
                if equal > 0 {
                    push |= record.ends_message_in(self.next_offset, equal * size);
                    self.next_offset += equal * size;
                    if self.next_offset == record.len() {
                        self.next_record = self.next_record.wrapping_add(1);
                        self.next_offset = 0;
                    }
                    len += equal * size;
                    count += equal;
                    continue;
                }
            }
            let Some(plan) = self
                .plan_segment(emss, left)
                .filter(|plan| plan.len <= room.min(size))
            else {
                break;
            };
            self.commit_plan(&plan);
            len += plan.len;
            count += 1;
            push |= plan.ends_message;
            if plan.len < size {
                break;
            }
        }
        let whole = InFlightSegment {
            seq,
            len,
            record,
            offset,
            at,
            flags: if push { PUSH } else { 0 },
            mss: if count > 1 { size as u16 } else { 0 },
        };
        if count == 0 {
            return None;
        }
        self.sent.push_back(whole);
        Some((whole, count))
    }

    /// Returns the end of the `len` bytes from a position on, and whether a message ends in them.
    #[inline]
    pub(crate) fn walk_records(&self, from: (u32, u32), len: u32) -> ((u32, u32), bool) {
        walk_records(&self.records, self.base, from, len)
    }

    /// Splits entries that stand for several segments into one entry per segment, from index
    /// `first` on. Called before any segment is marked.
    #[cold]
    pub(crate) fn split_multi_segments(&mut self, first: usize) {
        let Some(i) = self
            .sent
            .range(first..)
            .position(|segment| segment.mss != 0)
        else {
            return;
        };
        for mut segment in self.sent.split_off(first + i) {
            let mss = u32::from(core::mem::take(&mut segment.mss));
            segment.flags |= if mss != 0 { SUPER_SEGMENT } else { 0 };
            while mss != 0 && segment.len > mss {
                let (end, push) = walk_records(
                    &self.records,
                    self.base,
                    (segment.record, segment.offset),
                    mss,
                );
                self.sent.push_back(InFlightSegment {
                    len: mss,
                    flags: SUPER_SEGMENT | if push { PUSH } else { 0 },
                    ..segment
                });
                segment.seq += mss;
                segment.len -= mss;
                (segment.record, segment.offset) = end;
            }
            self.sent.push_back(segment);
        }
    }

    /// Returns the planned segment, at `seq`. `fin`: it carries our FIN. `at`: now, in ns.
    #[inline]
    pub(crate) fn make_segment(
        &self,
        plan: &SegmentPlan,
        seq: SeqNr,
        fin: bool,
        at: u64,
    ) -> InFlightSegment {
        let flags = if plan.ends_message { PUSH } else { 0 } | if fin { FIN } else { 0 };
        InFlightSegment {
            seq,
            len: plan.len,
            record: self.next_record,
            offset: self.next_offset,
            at,
            flags,
            mss: 0,
        }
    }

    /// Advances past the planned segment, which was sent.
    #[inline]
    pub(crate) fn commit_plan(&mut self, plan: &SegmentPlan) {
        self.next_record = plan.next_record;
        self.next_offset = plan.next_offset;
    }

    /// Returns the beginning of the next new segment, for [`rewind_to`](Self::rewind_to).
    #[inline]
    pub(crate) fn next_position(&self) -> (u32, u32) {
        (self.next_record, self.next_offset)
    }

    /// Moves back to a position that `next_position` returned: the segments after it were not sent.
    #[inline]
    pub(crate) fn rewind_to(&mut self, (record, offset): (u32, u32)) {
        (self.next_record, self.next_offset) = (record, offset);
    }

    /// Returns a segment with only our FIN.
    pub(crate) fn make_fin(&self, seq: SeqNr, at: u64) -> InFlightSegment {
        InFlightSegment {
            seq,
            len: 0,
            record: self.next_record,
            offset: self.next_offset,
            at,
            flags: FIN,
            mss: 0,
        }
    }

    /// Returns the pieces of records that make up the `len` bytes from a position on: the record, the
    /// offset in it, and the length.
    #[inline]
    pub(crate) fn pieces(
        &self,
        (record, mut offset): (u32, u32),
        mut len: u32,
    ) -> impl Iterator<Item = (&R, u32, u32)> {
        let mut index = self.record_index(record);
        core::iter::from_fn(move || {
            if len == 0 {
                return None;
            }
            let record = self.records.get(index)?;
            let piece_len = len.min(record.len() - offset);
            let piece = (&record.record, offset, piece_len);
            (index, offset, len) = (index + 1, 0, len - piece_len);
            Some(piece)
        })
    }

    /// Removes every segment that ends at or before `una`, also those within a multi-segment entry,
    /// and updates `pipe`. A partially acknowledged segment stays whole: its retransmission keeps
    /// its boundaries, and the peer takes the new part of it.
    #[inline]
    pub(crate) fn ack_to(&mut self, una: SeqNr, pipe: &mut u32) -> AckedSegments {
        let mut taken = AckedSegments::default();
        let before = self.first_unacked();
        while let Some(segment) = self.sent.front_mut() {
            if segment.end_seq().gt(una) {
                let gone = segment.whole_segments_to(una);
                if gone > 0 {
                    *pipe -= gone;
                    taken.delivered += gone;
                    taken.sent_at = Some(segment.at);
                    let from = (segment.record, segment.offset);
                    ((segment.record, segment.offset), _) =
                        walk_records(&self.records, self.base, from, gone);
                    segment.seq += gone;
                    segment.len -= gone;
                    if segment.len <= u32::from(segment.mss) {
                        segment.mss = 0;
                    }
                }
                break;
            }
            if segment.flags & (SACKED | LOST | RETX) == 0 {
                *pipe -= segment.len;
                taken.delivered += segment.len;
                taken.sent_at = Some(segment.at);
            } else {
                if segment.in_pipe() {
                    *pipe -= segment.len;
                }
                if segment.flags & SACKED != 0 {
                    taken.sacked_segs += 1;
                } else {
                    taken.delivered += segment.len;
                }
                taken.lost_segs += u32::from(segment.flags & LOST != 0);
                taken.retransmitted |= segment.flags & RETX != 0;
            }
            self.sent.pop_front();
        }
        if taken.retransmitted {
            taken.sent_at = None;
        }
        taken.records = self.first_unacked() != before;
        taken
    }

    /// Returns the number of fully acknowledged records, and of acknowledged units of the next
    /// record.
    #[inline]
    fn first_unacked(&self) -> (u32, u16) {
        let (record, offset) = match self.sent.front() {
            Some(segment) => (segment.record, segment.offset),
            None => self.next_position(),
        };
        let acked = record.wrapping_sub(self.base);
        let units = match offset {
            0 => 0,
            _ => (self.records.get(acked as usize)).map_or(0, |record| record.units_in(offset)),
        };
        (acked, units)
    }

    /// Returns the fully acknowledged records to `visit`, in order.
    #[inline]
    pub(crate) fn take_acked(&mut self, mut visit: impl FnMut(R)) {
        let (acked, _) = self.first_unacked();
        for _ in 0..acked {
            if let Some(record) = self.records.pop_front() {
                self.base = self.base.wrapping_add(1);
                self.units_taken = 0;
                visit(record.record);
            }
        }
    }

    /// Like [`take_acked`](Self::take_acked), by units: calls `visit` with each record and the
    /// units of it that were acknowledged since the last call.
    #[inline]
    pub(crate) fn take_acked_units(&mut self, mut visit: impl FnMut(&R, Range<u16>)) {
        let (acked, units) = self.first_unacked();
        for _ in 0..acked {
            if let Some(record) = self.records.pop_front() {
                self.base = self.base.wrapping_add(1);
                let taken = core::mem::take(&mut self.units_taken);
                visit(&record.record, taken..record.units);
            }
        }
        let taken = self.units_taken;
        if taken < units
            && let Some(record) = self.records.front()
        {
            self.units_taken = units;
            visit(&record.record, taken..units);
        }
    }

    /// Returns all records to `visit`, in order, when the connection has ended.
    pub(crate) fn drain_all(&mut self, mut visit: impl FnMut(R)) {
        self.sent.clear();
        self.units_taken = 0;
        self.base = self.base.wrapping_add(self.records.len() as u32);
        self.next_record = self.base;
        self.next_offset = 0;
        for record in self.records.drain(..) {
            visit(record.record);
        }
    }

    /// Returns the index of the first segment that ends after `seq`.
    #[inline]
    pub(crate) fn first_after(&self, seq: SeqNr) -> usize {
        self.sent
            .partition_point(|segment| segment.end_seq().le(seq))
    }

    /// Resegments segments longer than `emss`, between units if possible, and marks them as lost,
    /// because they exceed the path MTU. Segments that were SACKed have arrived and stay as they
    /// are.
    pub(crate) fn resegment_to(&mut self, emss: u32) {
        let emss = emss.max(1);
        for segment in core::mem::take(&mut self.sent) {
            if segment.len <= emss || segment.flags & SACKED != 0 {
                self.sent.push_back(segment);
                continue;
            }
            let mut rest = segment;
            rest.flags = (rest.flags | LOST) & !SUPER_SEGMENT;
            while rest.len > emss {
                let (mut len, mut record, mut offset) = (0, rest.record, rest.offset);
                while let Some(queued) = self.records.get(self.record_index(record)) {
                    let unit_left = queued.unit_len - queued.offset_in_unit(offset);
                    let taken = if unit_left < queued.unit_len {
                        // The rest of a unit that was split.
                        if unit_left <= emss - len {
                            unit_left
                        } else {
                            0
                        }
                    } else {
                        queued.whole_units(offset, emss - len)
                    };
                    if taken == 0 {
                        if len == 0 {
                            (len, offset) = (emss, offset + emss);
                        }
                        break;
                    }
                    len += taken;
                    offset += taken;
                    if offset == queued.len() {
                        (record, offset) = (record.wrapping_add(1), 0);
                    }
                }
                if len == 0 {
                    break;
                }
                self.sent.push_back(InFlightSegment {
                    len,
                    flags: rest.flags & !(PUSH | FIN),
                    ..rest
                });
                rest = InFlightSegment {
                    seq: rest.seq + len,
                    len: rest.len - len,
                    record,
                    offset,
                    ..rest
                };
            }
            self.sent.push_back(rest);
        }
    }
}

#[cfg(test)]
mod tests;
