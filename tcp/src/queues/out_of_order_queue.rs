//! Segments that arrived out of order, held in the buffers in which they arrived, with the SACK
//! blocks that report them (RFC 2018) and the D-SACK blocks of duplicates (RFC 2883).
//!
//! Exists only while data is held or blocks are to be reported. The connection inserts segments
//! beyond a hole, and delivers them from here when the hole is filled.

use std::collections::VecDeque;

use siw_net::RecvBuf;

use crate::base::sequence::SeqNr;
use crate::queues::receive_queue::ReceiveQueue;

/// Maximum number of recently changed ranges remembered for SACK blocks.
const RECENT: usize = 16;
/// Maximum number of D-SACK blocks that wait for ACKs. Each ACK carries one; adjacent duplicates
/// are reported as one block.
const MAX_DUPLICATES: usize = 8;

/// The first sequence number of a block, and the one after its last.
pub(crate) type Block = (SeqNr, SeqNr);

pub(crate) struct OutOfOrderQueue<B> {
    /// The buffers with their first sequence numbers. Sorted, disjoint, none empty.
    bufs: VecDeque<(SeqNr, B)>,
    /// Number of pool buffers in `bufs`, whose frames may occupy several.
    buffers: usize,
    /// The ranges that the buffers cover: sorted, disjoint, not adjacent.
    ranges: VecDeque<Block>,
    /// A sequence number inside each recently changed range, newest first. All are beyond RCV.NXT.
    recent: [SeqNr; RECENT],
    recent_len: u8,
    /// Number of entries of `recent` that changed since the last ACK.
    unreported_count: u8,
    /// Number of segments that arrived since the last ACK.
    arrived_count: u8,
    /// The ranges received twice since the last ACK, oldest first (RFC 2883); `duplicate_count` are
    /// valid.
    duplicates: [Block; MAX_DUPLICATES],
    duplicate_count: u8,
    /// First sequence numbers of segments not yet shown to the owner, if the owner wants to see
    /// them.
    unseen: Vec<SeqNr>,
}

impl<B: RecvBuf> OutOfOrderQueue<B> {
    /// Returns an empty queue.
    pub(crate) fn new() -> Self {
        OutOfOrderQueue {
            bufs: VecDeque::new(),
            buffers: 0,
            ranges: VecDeque::new(),
            recent: [SeqNr(0); RECENT],
            recent_len: 0,
            unreported_count: 0,
            arrived_count: 0,
            duplicates: [(SeqNr(0), SeqNr(0)); MAX_DUPLICATES],
            duplicate_count: 0,
            unseen: Vec::new(),
        }
    }

    /// Returns whether nothing is held and nothing is to be reported.
    pub(crate) fn is_idle(&self) -> bool {
        self.bufs.is_empty() && self.duplicate_count == 0
    }

    /// Records that `[lo, hi)` was received before. If it touches the previous duplicate, both are
    /// reported as one; if the list is full, it replaces the last.
    pub(crate) fn note_duplicate(&mut self, lo: SeqNr, hi: SeqNr) {
        let count = usize::from(self.duplicate_count);
        if let Some(last) = self.duplicates[..count].last_mut()
            && lo.le(last.1)
            && hi.ge(last.0)
        {
            *last = (last.0.min(lo), last.1.max(hi));
            return;
        }
        let index = count.min(MAX_DUPLICATES - 1);
        self.duplicates[index] = (lo, hi);
        self.duplicate_count = (index + 1) as u8;
    }

    /// Returns the D-SACK block that the next ACK carries.
    pub(crate) fn dsack_block(&self) -> Option<Block> {
        self.duplicates[..usize::from(self.duplicate_count)]
            .first()
            .copied()
    }

    /// Removes the D-SACK block that was sent. Returns whether another waits.
    pub(crate) fn pop_duplicate(&mut self) -> bool {
        let count = usize::from(self.duplicate_count);
        if count > 0 {
            self.duplicates.copy_within(1..count, 0);
            self.duplicate_count -= 1;
        }
        self.duplicate_count > 0
    }

    /// Returns the first part of `[seq, end)` that is held. This part is reported for a segment
    /// that overlaps held ones, because a D-SACK reports one contiguous range (RFC 2883 section
    /// 4.2).
    pub(crate) fn first_overlap(&self, seq: SeqNr, end: SeqNr) -> Option<Block> {
        let index = self.ranges.partition_point(|range| range.1.le(seq));
        let range = self.ranges.get(index)?;
        let overlap = (range.0.max(seq), range.1.min(end));
        overlap.0.lt(overlap.1).then_some(overlap)
    }

    /// Returns the range that contains all of `block`.
    fn range_around(&self, block: Block) -> Option<Block> {
        let index = self.ranges.partition_point(|range| range.1.le(block.0));
        let range = *self.ranges.get(index)?;
        (range.0.le(block.0) && range.1.ge(block.1)).then_some(range)
    }

    /// Returns the number of buffers held.
    pub(crate) fn buffer_count(&self) -> usize {
        self.buffers
    }

    /// Keeps the new part of `buffer`, which starts at `seq`, beyond the next expected byte.
    /// Returns the number of new bytes.
    pub(crate) fn insert_segment(&mut self, mut seq: SeqNr, mut buffer: B) -> usize {
        self.arrived_count = self.arrived_count.saturating_add(1);
        let mut end = seq + buffer.remaining() as u32;
        let first = (seq, end);
        let mut at = self.bufs.partition_point(|(start, _)| start.lt(seq));
        if at > 0 {
            let (start, previous) = &self.bufs[at - 1];
            let previous_end = *start + previous.remaining() as u32;
            if previous_end.gt(seq) {
                if previous_end.ge(end) {
                    self.touch_range(first.0, first.1);
                    return 0;
                }
                buffer.advance((previous_end - seq) as usize);
                seq = previous_end;
            }
        }
        // Held buffers that lie wholly in this one are replaced by it, all at once: there may be as
        // many as a connection may hold.
        let mut behind = at;
        while let Some((start, next)) = self.bufs.get(behind) {
            if start.ge(end) {
                break;
            }
            let next_end = *start + next.remaining() as u32;
            if next_end.gt(end) || (*start == seq && next_end == end) {
                buffer.truncate((*start - seq) as usize);
                end = *start;
                break;
            }
            behind += 1;
        }
        for (_, replaced) in self.bufs.drain(at..behind) {
            self.buffers -= replaced.buffer_count();
        }
        let new = buffer.remaining();
        if new > 0 {
            self.buffers += buffer.buffer_count();
            if at == self.bufs.len() {
                self.bufs.push_back((seq, buffer));
            } else {
                self.bufs.insert(at, (seq, buffer));
            }
            at += 1;
        }
        debug_assert!(at <= self.bufs.len());
        debug_assert!(end.ge(seq));
        self.touch_range(first.0, first.1);
        new
    }

    /// Drops the last buffer, which the peer will retransmit (RFC 2018 section 8); `false` if there
    /// is none.
    #[cold]
    pub(crate) fn drop_last(&mut self) -> bool {
        let Some((start, dropped)) = self.bufs.pop_back() else {
            return false;
        };
        self.buffers -= dropped.buffer_count();
        self.discard_from(start);
        true
    }

    /// Drops all data from `end` on.
    #[cold]
    pub(crate) fn discard_from(&mut self, end: SeqNr) {
        while let Some((start, dropped)) = self.bufs.back()
            && start.ge(end)
        {
            self.buffers -= dropped.buffer_count();
            self.bufs.pop_back();
        }
        if let Some((start, buffer)) = self.bufs.back_mut() {
            buffer.truncate(buffer.remaining().min((end - *start) as usize));
        }
        while self.ranges.back().is_some_and(|range| range.0.ge(end)) {
            self.ranges.pop_back();
        }
        if let Some(range) = self.ranges.back_mut() {
            range.1 = range.1.min(end);
        }
    }

    /// Remembers the segment that begins at `seq`, to be shown to the owner. The list is limited to
    /// the number of held buffers.
    pub(crate) fn remember_unseen(&mut self, seq: SeqNr) {
        if self.unseen.len() < self.bufs.len() {
            self.unseen.push(seq);
        }
    }

    /// Calls `show` with each held segment that was not shown yet, in order of arrival.
    pub(crate) fn show_unseen(&mut self, mut show: impl FnMut(SeqNr, &B)) {
        for seq in self.unseen.drain(..) {
            let index = self.bufs.partition_point(|(start, _)| start.lt(seq));
            if let Some((start, buffer)) = self.bufs.get(index)
                && *start == seq
            {
                show(seq, buffer);
            }
        }
    }

    /// Merges `[start, end)` into the ranges and makes its range the most recent.
    fn touch_range(&mut self, start: SeqNr, end: SeqNr) {
        let first = self.ranges.partition_point(|range| range.1.lt(start));
        let (mut lo, mut hi) = (start, end);
        let mut behind = first;
        while let Some(range) = self.ranges.get(behind) {
            if range.0.gt(end) {
                break;
            }
            lo = lo.min(range.0);
            hi = hi.max(range.1);
            behind += 1;
        }
        if behind > first {
            self.ranges[first] = (lo, hi);
            if behind > first + 1 {
                self.ranges.drain(first + 1..behind);
            }
        } else {
            self.ranges.insert(first, (lo, hi));
        }
        let mut kept = 1;
        let mut fresh = 1;
        let old = self.recent;
        self.recent[0] = start;
        for (index, &seq) in old[..usize::from(self.recent_len)].iter().enumerate() {
            let merged = seq.ge(lo) && seq.lt(hi);
            if !merged && kept < RECENT {
                self.recent[kept] = seq;
                kept += 1;
                fresh += u8::from(index < usize::from(self.unreported_count));
            }
        }
        self.recent_len = kept as u8;
        self.unreported_count = fresh;
    }

    /// Moves the data that is now in order to `queue`; returns the next expected sequence number.
    pub(crate) fn deliver_in_order(
        &mut self,
        mut next: SeqNr,
        queue: &mut ReceiveQueue<B>,
    ) -> SeqNr {
        while let Some((start, buffer)) = self.bufs.front() {
            if start.gt(next) {
                break;
            }
            let end = *start + buffer.remaining() as u32;
            let skip = (next - *start) as usize;
            let Some((_, mut buffer)) = self.bufs.pop_front() else {
                break;
            };
            self.buffers -= buffer.buffer_count();
            if end.gt(next) {
                buffer.advance(skip);
                queue.push(buffer);
                next = end;
            }
        }
        while self.ranges.front().is_some_and(|range| range.1.le(next)) {
            self.ranges.pop_front();
        }
        self.forget_recent(next);
        next
    }

    /// Removes the recently changed ranges before `next`. On a connection that always has
    /// out-of-order data they would eventually be compared with numbers 2^31 ahead.
    fn forget_recent(&mut self, next: SeqNr) {
        let (mut kept, mut unreported) = (0, 0);
        for index in 0..usize::from(self.recent_len) {
            let seq = self.recent[index];
            if seq.ge(next) {
                self.recent[kept] = seq;
                kept += 1;
                unreported += u8::from(index < usize::from(self.unreported_count));
            }
        }
        self.recent_len = kept as u8;
        self.unreported_count = unreported;
    }

    /// Fills `blocks` with the SACK blocks of an ACK, and returns their number. Order: a D-SACK
    /// block, if `with_dsack` is set and one waits; the range around it, if that is not below
    /// `next`, RCV.NXT (RFC 2883 section 4); then the ranges, most recently changed first (RFC 2018
    /// section 4), without the first `skip`, so that several ACKs at once report different ones.
    pub(crate) fn fill_blocks(
        &self,
        (with_dsack, skip): (bool, usize),
        next: SeqNr,
        blocks: &mut [Block],
    ) -> FilledBlocks {
        let (mut count, mut dsacks, mut reported) = (0, 0, skip);
        if let Some(dsack) = self.dsack_block().filter(|_| with_dsack) {
            blocks[0] = dsack;
            (count, dsacks) = (1, 1);
            if let Some(around) = self.range_around(dsack).filter(|around| around.0.gt(next)) {
                blocks[1] = around;
                count = 2;
            }
        }
        let recent = &self.recent[..usize::from(self.recent_len)];
        for &seq in recent.iter().skip(skip) {
            if count == blocks.len() {
                break;
            }
            reported += 1;
            let index = self.ranges.partition_point(|range| range.1.le(seq));
            if let Some(&range) = self.ranges.get(index)
                && range.0.le(seq)
                && range.0.gt(next)
                && !blocks[dsacks..count].contains(&range)
            {
                blocks[count] = range;
                count += 1;
            }
        }
        FilledBlocks {
            count,
            dsacks,
            reported,
        }
    }

    /// Returns the number of ranges that changed since the last `mark_reported`.
    pub(crate) fn unreported_count(&self) -> usize {
        usize::from(self.unreported_count)
    }

    /// Returns the number of segments that arrived since the last `mark_reported`.
    pub(crate) fn arrived_count(&self) -> usize {
        usize::from(self.arrived_count)
    }

    /// Records that ACKs were sent that report everything.
    pub(crate) fn mark_reported(&mut self) {
        self.arrived_count = 0;
        self.unreported_count = 0;
        self.duplicate_count = 0;
    }
}

/// The result of [`OutOfOrderQueue::fill_blocks`].
pub(crate) struct FilledBlocks {
    /// Number of blocks.
    pub count: usize,
    /// Number of D-SACK blocks at the beginning.
    pub dsacks: usize,
    /// Number of recently changed ranges that need no further ACK, those skipped included.
    pub reported: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use siw_net::VecBuf;

    #[test]
    fn any_order_and_overlap_gives_the_same_bytes() {
        let data: Vec<u8> = (0..2000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let origin = SeqNr(u32::MAX - 700);
        for seed in 0..200u64 {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
            let mut rand = move |n: usize| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                (x >> 11) as usize % n
            };
            let mut r = OutOfOrderQueue::<VecBuf>::new();
            let mut rx = ReceiveQueue::new();
            let mut next = origin;
            let mut have = vec![false; data.len()];
            for _ in 0..60 {
                let done = (next - origin) as usize;
                let a = done + rand(data.len() - done + 1);
                let b = (a + 1 + rand(300)).min(data.len());
                if a >= b {
                    continue;
                }
                if a == done {
                    rx.push(data[a..b].to_vec().into());
                    next = origin + b as u32;
                    next = r.deliver_in_order(next, &mut rx);
                } else {
                    let fresh = (a..b).filter(|&i| !have[i]).count();
                    let kept = r.insert_segment(origin + a as u32, data[a..b].to_vec().into());
                    assert!(kept <= b - a && (fresh == 0 || kept > 0));
                }
                have[a..b].fill(true);
                let mut blocks = [(SeqNr(0), SeqNr(0)); 16];
                let n = r.fill_blocks((false, 0), next, &mut blocks).count;
                for &(s, e) in &blocks[..n] {
                    let (s, e) = ((s - origin) as usize, (e - origin) as usize);
                    assert!(
                        have[s..e].iter().all(|&h| h),
                        "a block claims only what arrived"
                    );
                    assert!(s == 0 || !have[s - 1], "blocks are maximal");
                    assert!(e == data.len() || !have[e]);
                }
            }
            let n = (next - origin) as usize;
            let mut out = vec![0; n];
            assert!(rx.copy_to_slice(0, &mut out) && rx.len_bytes() == n);
            assert_eq!(out, data[..n]);
        }
    }

    #[test]
    fn blocks_name_the_newest_range_first_rfc_2018_4() {
        let mut r = OutOfOrderQueue::<VecBuf>::new();
        let buf = |n: usize| VecBuf::from(vec![0; n]);
        r.insert_segment(SeqNr(100), buf(10));
        r.insert_segment(SeqNr(300), buf(10));
        r.insert_segment(SeqNr(200), buf(10));
        r.insert_segment(SeqNr(110), buf(10));
        let mut b = [(SeqNr(0), SeqNr(0)); 3];
        assert_eq!(r.fill_blocks((true, 0), SeqNr(50), &mut b).count, 3);
        assert_eq!(
            b,
            [(100, 120), (200, 210), (300, 310)].map(|(s, e)| (SeqNr(s), SeqNr(e)))
        );
        assert_eq!(r.unreported_count(), 3);
    }

    #[test]
    fn each_duplicate_is_reported_with_its_range() {
        let mut queue = OutOfOrderQueue::<VecBuf>::new();
        let buf = |n: usize| VecBuf::from(vec![0; n]);
        queue.insert_segment(SeqNr(100), buf(50));
        queue.insert_segment(SeqNr(200), buf(50));
        let overlap = |queue: &OutOfOrderQueue<VecBuf>, seq, end| {
            let block = queue.first_overlap(SeqNr(seq), SeqNr(end));
            block.map(|(lo, hi)| (lo.0, hi.0))
        };
        assert_eq!(overlap(&queue, 50, 100), None);
        assert_eq!(overlap(&queue, 50, 120), Some((100, 120)));
        assert_eq!(overlap(&queue, 120, 300), Some((120, 150)));
        assert_eq!(overlap(&queue, 150, 260), Some((200, 250)));
        assert_eq!(overlap(&queue, 250, 300), None);
        queue.note_duplicate(SeqNr(110), SeqNr(120));
        queue.note_duplicate(SeqNr(120), SeqNr(130));
        queue.note_duplicate(SeqNr(200), SeqNr(250));
        queue.note_duplicate(SeqNr(10), SeqNr(20));
        let mut reports = vec![];
        loop {
            let mut blocks = [(SeqNr(0), SeqNr(0)); 3];
            let filled = queue.fill_blocks((true, 0), SeqNr(50), &mut blocks);
            assert_eq!(filled.dsacks, 1);
            reports.push(blocks[..filled.count].to_vec());
            if !queue.pop_duplicate() {
                break;
            }
        }
        let (low, high) = ((SeqNr(100), SeqNr(150)), (SeqNr(200), SeqNr(250)));
        assert_eq!(
            reports,
            [
                vec![(SeqNr(110), SeqNr(130)), low, high],
                vec![high, high, low],
                vec![(SeqNr(10), SeqNr(20)), high, low],
            ]
        );
        for n in 0..2 * MAX_DUPLICATES as u32 {
            queue.note_duplicate(SeqNr(3 * n), SeqNr(3 * n + 1));
        }
        assert_eq!(usize::from(queue.duplicate_count), MAX_DUPLICATES);
    }
}
