//! What waits to be sent and what waits to be acknowledged: records as the upper layer pushed
//! them, and the segments that carried them, so that a retransmission rebuilds the same boundaries.

use std::collections::VecDeque;

use crate::base::sequence::SeqNr;

/// Selectively acknowledged (RFC 2018).
pub(crate) const SACKED: u8 = 1;
/// Deemed lost (RFC 6675 section 4) and not retransmitted since.
pub(crate) const LOST: u8 = 2;
/// Sent more than once.
pub(crate) const RETX: u8 = 4;
/// Ends a message.
pub(crate) const PUSH: u8 = 8;
/// Carries our FIN behind its payload.
pub(crate) const FIN: u8 = 16;
/// Longer than the path is known to carry (RFC 8899).
pub(crate) const MTU_PROBE: u8 = 32;

struct QueuedRecord<R> {
    len: u32,
    ends_message: bool,
    record: R,
}

/// A segment on its way, or several that left together, perhaps as one frame for the port to cut. Payload: `len`
/// bytes from `offset` of record `record` on.
#[derive(Clone, Copy)]
pub(crate) struct InFlightSegment {
    pub seq: SeqNr,
    pub len: u32,
    /// Running number of its first record.
    pub record: u32,
    pub offset: u32,
    /// When it was last sent, ns.
    pub at: u64,
    pub flags: u8,
    /// Of several: what each carries, the last perhaps less. 0: one segment. Only single segments
    /// are ever marked, see [`TransmitQueue::split_multi_segments`].
    pub mss: u16,
}

impl InFlightSegment {
    #[inline]
    pub(crate) fn end_seq(&self) -> SeqNr {
        self.seq + self.len + u32::from(self.flags & FIN != 0)
    }
    /// Bytes of the segments of a frame of several that end at or before `una`, inside of it.
    #[inline]
    pub(crate) fn whole_segments_to(&self, una: SeqNr) -> u32 {
        match u32::from(self.mss) {
            0 => 0,
            mss => una.distance_from(self.seq).max(0) as u32 / mss * mss,
        }
    }
    /// Still one segment above `emss`, to probe the path.
    #[inline]
    pub(crate) fn is_probe(&self, emss: u32) -> bool {
        self.flags & MTU_PROBE != 0 && self.len > emss
    }
    /// Counts as on the wire (RFC 6675's pipe).
    #[inline]
    pub(crate) fn in_pipe(&self) -> bool {
        self.flags & (SACKED | LOST) == 0
    }
}

/// A new segment, not yet made.
#[derive(Clone, Copy)]
pub(crate) struct SegmentPlan {
    pub len: u32,
    ends_message: bool,
    next_record: u32,
    next_offset: u32,
}

/// What a cumulative ACK took off the queue.
#[derive(Default)]
pub(crate) struct AckedSegments {
    /// Payload bytes that had not been selectively acknowledged before.
    pub delivered: u32,
    pub sacked_segs: u32,
    pub lost_segs: u32,
    /// When the newest segment was sent, if the ACK measures a round trip (Karn).
    pub sent_at: Option<u64>,
    pub retransmitted: bool,
    pub records: bool,
}

pub(crate) struct TransmitQueue<R> {
    records: VecDeque<QueuedRecord<R>>,
    pub sent: VecDeque<InFlightSegment>,
    /// Running number of `records[0]`.
    base: u32,
    /// So many of the first records are fully acknowledged.
    acked: u32,
    next_record: u32,
    next_offset: u32,
}

/// `len` bytes from `offset` of record `record` on: where they end, and whether a message does.
#[inline]
fn walk_records<R>(
    records: &VecDeque<QueuedRecord<R>>,
    base: u32,
    (mut record, mut offset): (u32, u32),
    mut len: u32,
) -> ((u32, u32), bool) {
    let mut push = false;
    while len > 0 {
        let Some(queued) = records.get(record.wrapping_sub(base) as usize) else {
            break;
        };
        let n = len.min(queued.len - offset);
        len -= n;
        offset += n;
        if offset == queued.len {
            push |= queued.ends_message;
            (record, offset) = (record.wrapping_add(1), 0);
        }
    }
    ((record, offset), push)
}

impl<R> TransmitQueue<R> {
    pub(crate) fn new() -> Self {
        TransmitQueue {
            records: VecDeque::new(),
            sent: VecDeque::new(),
            base: 0,
            acked: 0,
            next_record: 0,
            next_offset: 0,
        }
    }

    /// Prefetches the first records and segments.
    #[inline]
    pub(crate) fn prefetch<B: crate::base::buffer::RecvBuf>(&self) {
        B::prefetch(self.records.as_slices().0.as_ptr());
        B::prefetch(self.sent.as_slices().0.as_ptr());
    }

    #[inline]
    pub(crate) fn push_record(&mut self, len: u32, record: R, push: bool) {
        self.records.push_back(QueuedRecord {
            len,
            ends_message: push,
            record,
        });
    }

    #[inline]
    fn record_index(&self, number: u32) -> usize {
        number.wrapping_sub(self.base) as usize
    }

    /// The next new segment: whole records that fit `emss` and `usable` together; a record above
    /// `emss`, and what is left of a split one, travel alone. The first record may exceed
    /// `usable`: the caller decides whether to wait or to [`plan_part`](Self::plan_part).
    #[inline]
    pub(crate) fn plan_segment(&self, emss: u32, usable: u32) -> Option<SegmentPlan> {
        let i = self.record_index(self.next_record);
        let first = self.records.get(i)?;
        let left = first.len - self.next_offset;
        if self.next_offset > 0 || first.len > emss {
            let len = left.min(emss);
            let whole = len == left;
            return Some(SegmentPlan {
                len,
                ends_message: whole && first.ends_message,
                next_record: self.next_record.wrapping_add(u32::from(whole)),
                next_offset: if whole { 0 } else { self.next_offset + len },
            });
        }
        let limit = emss.min(usable);
        let mut plan = SegmentPlan {
            len: first.len,
            ends_message: first.ends_message,
            next_record: self.next_record.wrapping_add(1),
            next_offset: 0,
        };
        let mut i = i + 1;
        while plan.len < limit {
            match self.records.get(i) {
                Some(record) if record.len <= limit - plan.len => {
                    plan.len += record.len;
                    plan.ends_message |= record.ends_message;
                    plan.next_record = plan.next_record.wrapping_add(1);
                    i += 1;
                }
                _ => break,
            }
        }
        Some(plan)
    }

    /// What is left of the record that goes next.
    pub(crate) fn next_len(&self) -> u32 {
        let first = self.records.get(self.record_index(self.next_record));
        first.map_or(0, |record| record.len - self.next_offset)
    }

    /// Index of the probe that ends at `end`.
    pub(crate) fn mtu_probe(&self, end: SeqNr) -> Option<usize> {
        let index = self
            .sent
            .partition_point(|segment| segment.end_seq().lt(end));
        let segment = self.sent.get(index)?;
        (segment.flags & MTU_PROBE != 0 && segment.end_seq() == end).then_some(index)
    }

    /// The peer's window forces a part of the first record.
    pub(crate) fn plan_part(&self, len: u32) -> SegmentPlan {
        SegmentPlan {
            len,
            ends_message: false,
            next_record: self.next_record,
            next_offset: self.next_offset + len,
        }
    }

    /// Takes up to `limit` full segments and what follows them, `usable` bytes together, into
    /// `sent` as one, and returns it and how many they are: records are consecutive, so the
    /// pieces are too.
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
            let room = if count == 0 {
                left
            } else {
                left.min(limit.max_bytes.saturating_sub(len))
            };
            // Full segments of one record are taken at once.
            let first = self.records.get(self.record_index(self.next_record));
            let here = first.map_or(0, |record| record.len - self.next_offset);
            let full =
                (here.min(left).min(limit.max_bytes.saturating_sub(len)) / emss).min(most - count);
            if full > 1 {
                self.next_offset += full * emss;
                if full * emss == here {
                    push |= first.is_some_and(|record| record.ends_message);
                    (self.next_record, self.next_offset) = (self.next_record.wrapping_add(1), 0);
                }
                len += full * emss;
                count += full;
                continue;
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
        (len <= record.len - offset).then_some(&record.record)
    }

    /// Segments that left as one frame become segments of their own: what marks them calls this
    /// first, for those from `first` on.
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

    /// The planned segment; [`commit_plan`](Self::commit_plan) once it was sent.
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

    #[inline]
    pub(crate) fn rewind_to(&mut self, (record, offset): (u32, u32)) {
        (self.next_record, self.next_offset) = (record, offset);
    }

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

    /// The pieces of a segment.
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
            let n = left.min(record.len - offset);
            visit(&record.record, offset, n);
            left -= n;
            offset = 0;
            i += 1;
        }
    }

    /// Takes off every segment that ends at or before `una`, also from a frame of several. A segment
    /// acknowledged in part stays whole: its retransmission keeps its boundaries and the peer trims.
    #[inline]
    pub(crate) fn ack_to(&mut self, una: SeqNr, pipe: &mut u32) -> AckedSegments {
        let mut taken = AckedSegments::default();
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
        let first_open = self
            .sent
            .front()
            .map_or(self.next_record, |segment| segment.record);
        let acked = first_open.wrapping_sub(self.base);
        taken.records = acked > self.acked;
        self.acked = acked;
        taken
    }

    #[inline]
    pub(crate) fn take_acked(&mut self, mut visit: impl FnMut(R)) {
        for _ in 0..core::mem::take(&mut self.acked) {
            if let Some(record) = self.records.pop_front() {
                self.base = self.base.wrapping_add(1);
                visit(record.record);
            }
        }
    }

    /// The connection is over: everything, in order.
    pub(crate) fn drain_all(&mut self, mut visit: impl FnMut(R)) {
        self.sent.clear();
        self.acked = 0;
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

    /// Segments above `emss` are cut, between records where that fits, and count as lost: the path
    /// does not carry them. SACKed ones arrived.
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
                    let left = queued.len - offset;
                    if left > emss - len {
                        if len == 0 {
                            (len, offset) = (emss, offset + emss);
                        }
                        break;
                    }
                    len += left;
                    (record, offset) = (record.wrapping_add(1), 0);
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

    /// Whether the queue is empty and still holds memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.records.is_empty()
            && self.sent.is_empty()
            && self.records.capacity() + self.sent.capacity() > 0
    }

    pub(crate) fn release_memory(&mut self) {
        if self.records.is_empty() && self.sent.is_empty() {
            self.records = VecDeque::new();
            self.sent = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests;
