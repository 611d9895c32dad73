//! What waits to be sent and what waits to be acknowledged: records as the upper layer pushed
//! them, and the segments that carried them. A retransmission is built again from the records, with the
//! same boundaries, so that no bytes are kept here and each FPDU stays one segment (RFC 5044 section 5).
//!
//! A record is a unit that one segment carries, or a run of units of one length, each of which does: where a
//! run lies in several segments, they meet between its units.
//!
//! Records are named by running numbers that wrap; only differences between numbers of records that are
//! in the queue count.

mod memory;
mod records;

use core::ops::Range;
use std::collections::VecDeque;

use crate::base::sequence::SeqNr;
pub(crate) use records::SegmentPlan;
use records::{QueuedRecord, walk_records};

/// Marks of a segment in flight. This one: it is selectively acknowledged (RFC 2018).
pub(crate) const SACKED: u8 = 1;
/// It is deemed lost (RFC 8985 section 6.2) and was not retransmitted since.
pub(crate) const LOST: u8 = 2;
/// It was sent more than once.
pub(crate) const RETX: u8 = 4;
/// It ends a message.
pub(crate) const PUSH: u8 = 8;
/// It carries our FIN behind its payload.
pub(crate) const FIN: u8 = 16;
/// It is longer than the path is known to carry (RFC 8899).
pub(crate) const MTU_PROBE: u8 = 32;

/// A segment in flight, or several that were sent together, perhaps as one frame that the port cuts (TSO).
/// Its payload is the `len` bytes from `offset` of record `record` on.
#[derive(Clone, Copy)]
pub(crate) struct InFlightSegment {
    pub seq: SeqNr,
    pub len: u32,
    /// Running number of its first record.
    pub record: u32,
    pub offset: u32,
    /// When it was last sent, in ns.
    pub at: u64,
    /// The marks above.
    pub flags: u8,
    /// For several segments the payload of each, of which the last may have less; 0 for a single one. Only
    /// single segments are ever marked, see [`TransmitQueue::split_multi_segments`].
    pub mss: u16,
}

impl InFlightSegment {
    /// The sequence number behind it; a FIN takes one.
    #[inline]
    pub(crate) fn end_seq(&self) -> SeqNr {
        self.seq + self.len + u32::from(self.flags & FIN != 0)
    }

    /// Of several segments of which `una` acknowledges some: the payload in bytes of those.
    #[inline]
    pub(crate) fn whole_segments_to(&self, una: SeqNr) -> u32 {
        match u32::from(self.mss) {
            0 => 0,
            mss => una.distance_from(self.seq).max(0) as u32 / mss * mss,
        }
    }

    /// Whether it is an MTU probe: longer than `emss`, and not cut since.
    #[inline]
    pub(crate) fn is_probe(&self, emss: u32) -> bool {
        self.flags & MTU_PROBE != 0 && self.len > emss
    }

    /// Whether it counts as being on the wire (the pipe of RFC 6675 section 4).
    #[inline]
    pub(crate) fn in_pipe(&self) -> bool {
        self.flags & (SACKED | LOST) == 0
    }
}

/// What a cumulative ACK took off the queue.
#[derive(Default)]
pub(crate) struct AckedSegments {
    /// Payload bytes that had not been selectively acknowledged before.
    pub delivered: u32,
    /// Segments that were marked `SACKED`, and `LOST`.
    pub sacked_segs: u32,
    pub lost_segs: u32,
    /// When the newest segment was sent, in ns. `None`: the ACK measures no round trip, since one of the
    /// segments was sent more than once (Karn's algorithm, RFC 6298 section 3).
    pub sent_at: Option<u64>,
    /// One of the segments was sent more than once.
    pub retransmitted: bool,
    /// A record was acknowledged wholly, or more of a run.
    pub records: bool,
}

/// The records that were pushed and not taken back, and the segments in flight.
pub(crate) struct TransmitQueue<R> {
    records: VecDeque<QueuedRecord<R>>,
    /// Segments in flight, in the order of their sequence numbers, without gaps.
    pub sent: VecDeque<InFlightSegment>,
    /// Running number of `records[0]`.
    base: u32,
    /// Units of `records[0]` that were handed back.
    units_taken: u16,
    /// Where the next new segment begins.
    next_record: u32,
    next_offset: u32,
}

impl<R> TransmitQueue<R> {
    /// An empty queue.
    pub(crate) fn new() -> Self {
        TransmitQueue {
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

    /// Appends a record of units, at least one, each of `unit_len` bytes. `push`: each ends a message.
    #[inline]
    pub(crate) fn push_run(&mut self, (unit_len, units): (u32, u16), record: R, push: bool) {
        self.records.push_back(QueuedRecord {
            unit_len,
            units,
            ends_message: push,
            record,
        });
    }

    /// The index in `records` of the record with this running number.
    #[inline]
    fn record_index(&self, number: u32) -> usize {
        number.wrapping_sub(self.base) as usize
    }

    /// Plans the next new segment: whole units that fit into `emss` and `usable` bytes together. A unit
    /// longer than `emss`, and what is left of one, share a segment with no other. The first unit may
    /// exceed `usable`: then the caller decides whether to wait or to [`plan_part`](Self::plan_part).
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

    /// What is left of the unit that the next new segment begins with, in bytes.
    pub(crate) fn next_len(&self) -> u32 {
        let first = self.records.get(self.record_index(self.next_record));
        first.map_or(0, |record| {
            record.unit_len - record.offset_in_unit(self.next_offset)
        })
    }

    /// Index of the MTU probe that ends at `end`.
    pub(crate) fn mtu_probe(&self, end: SeqNr) -> Option<usize> {
        let index = self
            .sent
            .partition_point(|segment| segment.end_seq().lt(end));
        let segment = self.sent.get(index)?;
        (segment.flags & MTU_PROBE != 0 && segment.end_seq() == end).then_some(index)
    }

    /// Plans a segment of a part of the first unit, where the peer's window has no room for all of it.
    pub(crate) fn plan_part(&self, len: u32) -> SegmentPlan {
        SegmentPlan {
            len,
            ends_message: false,
            next_record: self.next_record,
            next_offset: self.next_offset + len,
        }
    }

    /// Puts up to `limit` full segments and one behind them that is shorter, `usable` bytes together, into
    /// `sent` as one entry. Returns it, and how many segments it stands for.
    ///
    /// Why this is fast: the segments carry consecutive bytes of consecutive records, so where the first
    /// begins says it for all, and full segments of one record are counted by a division.
    pub(crate) fn take_multi_segment(
        &mut self,
        (emss, usable): (u32, u32),
        limit: &crate::config::TsoLimits,
        seq: SeqNr,
        at: u64,
    ) -> Option<(InFlightSegment, u32)> {
        let most = u32::from(limit.max_segments);
        let (record, offset) = self.next_position();
        let (mut len, mut count, mut push) = (0, 0, false);
        while count < most {
            let left = usable - len;
            // The first segment goes whatever it takes.
            let within = limit.max_bytes.saturating_sub(len);
            let room = left.min(if count == 0 { within.max(emss) } else { within });
            // Full segments of one record are taken at once: units of that length, or parts of a longer one.
            if let Some(record) = self.records.get(self.record_index(self.next_record)) {
                let here = record.full_segments_in(self.next_offset, emss);
                let full = (here.min(room) / emss).min(most - count);
                if full > 0 {
                    push |= record.ends_message_in(self.next_offset, full * emss);
                    self.next_offset += full * emss;
                    if self.next_offset == record.len() {
                        self.next_record = self.next_record.wrapping_add(1);
                        self.next_offset = 0;
                    }
                    len += full * emss;
                    count += full;
                    continue;
                }
            }
            let Some(plan) = self
                .plan_segment(emss, left)
                .filter(|plan| plan.len <= room)
            else {
                break;
            };
            self.commit_plan(&plan);
            len += plan.len;
            count += 1;
            push |= plan.ends_message;
            if plan.len < emss {
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
            mss: if count > 1 { emss as u16 } else { 0 },
        };
        if count == 0 {
            return None;
        }
        self.sent.push_back(whole);
        Some((whole, count))
    }

    /// Where `len` bytes from a place on end, and whether a message ends with a record in them.
    #[inline]
    pub(crate) fn walk_records(&self, from: (u32, u32), len: u32) -> ((u32, u32), bool) {
        walk_records(&self.records, self.base, from, len)
    }

    /// The record in which all of `len` bytes from a place on lie, if one does.
    #[inline]
    pub(crate) fn single_record(&self, (record, offset): (u32, u32), len: u32) -> Option<&R> {
        let record = self.records.get(self.record_index(record))?;
        (len <= record.len() - offset).then_some(&record.record)
    }

    /// Gives each segment of an entry that stands for several an entry of its own, from index `first` on.
    /// Called before any segment is marked.
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
            while mss != 0 && segment.len > mss {
                let (end, push) = walk_records(
                    &self.records,
                    self.base,
                    (segment.record, segment.offset),
                    mss,
                );
                self.sent.push_back(InFlightSegment {
                    len: mss,
                    flags: if push { PUSH } else { 0 },
                    ..segment
                });
                segment.seq += mss;
                segment.len -= mss;
                (segment.record, segment.offset) = end;
            }
            self.sent.push_back(segment);
        }
    }

    /// The segment that was planned, at `seq`. `fin`: it carries our FIN. `at`: now, in ns.
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

    /// The planned segment was sent: the next one begins behind it.
    #[inline]
    pub(crate) fn commit_plan(&mut self, plan: &SegmentPlan) {
        self.next_record = plan.next_record;
        self.next_offset = plan.next_offset;
    }

    /// Where the next new segment begins, to come back to with [`rewind_to`](Self::rewind_to).
    #[inline]
    pub(crate) fn next_position(&self) -> (u32, u32) {
        (self.next_record, self.next_offset)
    }

    /// New segments begin again at a place that `next_position` returned: those behind it were not sent.
    #[inline]
    pub(crate) fn rewind_to(&mut self, (record, offset): (u32, u32)) {
        (self.next_record, self.next_offset) = (record, offset);
    }

    /// A segment of our FIN alone.
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

    /// Calls `visit` with each piece of a segment: the record, the offset in it, and the length.
    #[inline]
    pub(crate) fn for_each_piece(
        &self,
        segment: &InFlightSegment,
        mut visit: impl FnMut(&R, u32, u32),
    ) {
        let mut left = segment.len;
        let mut offset = segment.offset;
        let mut i = self.record_index(segment.record);
        while left > 0 {
            let Some(record) = self.records.get(i) else {
                return;
            };
            let n = left.min(record.len() - offset);
            visit(&record.record, offset, n);
            left -= n;
            offset = 0;
            i += 1;
        }
    }

    /// Removes every segment that ends at or before `una`, also where an entry stands for several, and
    /// updates `pipe`. A segment that is acknowledged in part stays whole: its retransmission keeps its
    /// boundaries, and the peer takes from it what is new.
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

    /// How many records are acknowledged wholly, and how many units of the one behind them.
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

    /// Hands back the records that are acknowledged wholly, in order.
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

    /// As [`take_acked`](Self::take_acked), by units: shows which units of which record are acknowledged
    /// since the last call.
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

    /// Hands back all records, in order: the connection has ended.
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

    /// Index of the first segment that ends after `seq`.
    #[inline]
    pub(crate) fn first_after(&self, seq: SeqNr) -> usize {
        self.sent
            .partition_point(|segment| segment.end_seq().le(seq))
    }

    /// Cuts segments longer than `emss`, between units where that is possible, and marks them as lost,
    /// since the path does not carry them. Those that were SACKed have arrived all the same.
    pub(crate) fn resegment_to(&mut self, emss: u32) {
        let emss = emss.max(1);
        for segment in core::mem::take(&mut self.sent) {
            if segment.len <= emss || segment.flags & SACKED != 0 {
                self.sent.push_back(segment);
                continue;
            }
            let mut rest = segment;
            rest.flags = (rest.flags | LOST) & !MTU_PROBE;
            while rest.len > emss {
                let (mut len, mut record, mut offset) = (0, rest.record, rest.offset);
                while let Some(queued) = self.records.get(self.record_index(record)) {
                    let unit_left = queued.unit_len - queued.offset_in_unit(offset);
                    let taken = if unit_left < queued.unit_len {
                        // What is left of a unit that was cut.
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
