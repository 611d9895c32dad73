//! Segments that arrived out of order, held in their own buffers, and the SACK blocks that tell
//! the peer about them (RFC 2018).

use std::collections::VecDeque;

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::queues::receive_queue::ReceiveQueue;

/// So many recently changed ranges are remembered for SACK blocks.
const RECENT: usize = 16;

pub(crate) struct OutOfOrderQueue<B> {
    /// Sorted, disjoint.
    bufs: VecDeque<(SeqNr, B)>,
    /// Sorted, disjoint, not adjacent: `[start, end)`.
    ranges: VecDeque<(SeqNr, SeqNr)>,
    /// A sequence number inside each recently changed range, newest first.
    recent: [SeqNr; RECENT],
    recent_len: u8,
    /// So many of `recent` changed since the last ACK.
    unreported_count: u8,
    /// Segments that arrived since the last ACK.
    arrived_count: u8,
    /// Received twice, for the next ACK (RFC 2883).
    dsack_block: Option<(SeqNr, SeqNr)>,
    /// Where segments begin that the owner has not been shown; of owners who want to see them.
    unseen: Vec<SeqNr>,
}

impl<B: RecvBuf> OutOfOrderQueue<B> {
    pub(crate) fn new() -> Self {
        OutOfOrderQueue {
            bufs: VecDeque::new(),
            ranges: VecDeque::new(),
            recent: [SeqNr(0); RECENT],
            recent_len: 0,
            unreported_count: 0,
            arrived_count: 0,
            dsack_block: None,
            unseen: Vec::new(),
        }
    }

    /// Nothing is held and nothing to be told.
    pub(crate) fn is_idle(&self) -> bool {
        self.bufs.is_empty() && self.dsack_block.is_none()
    }

    /// `[lo, hi)` was received before. Duplicates of one batch that touch are told as one.
    pub(crate) fn note_duplicate(&mut self, lo: SeqNr, hi: SeqNr) {
        self.dsack_block = Some(match self.dsack_block {
            Some((a, b)) if lo.le(b) && hi.ge(a) => (a.min(lo), b.max(hi)),
            _ => (lo, hi),
        });
    }

    pub(crate) fn dsack_block(&self) -> Option<(SeqNr, SeqNr)> {
        self.dsack_block
    }

    pub(crate) fn buffer_count(&self) -> usize {
        self.bufs.len()
    }

    /// Keeps what of `b` (which starts at `seq`, beyond the next expected byte) is new; returns
    /// how many bytes that was.
    pub(crate) fn insert_segment(&mut self, mut seq: SeqNr, mut b: B) -> usize {
        self.arrived_count = self.arrived_count.saturating_add(1);
        let mut end = seq + b.remaining() as u32;
        let first = (seq, end);
        let mut at = self.bufs.partition_point(|(s, _)| s.lt(seq));
        if at > 0 {
            let (s, p) = &self.bufs[at - 1];
            let prev_end = *s + p.remaining() as u32;
            if prev_end.gt(seq) {
                if prev_end.ge(end) {
                    self.touch_range(first.0, first.1);
                    return 0;
                }
                b.advance((prev_end - seq) as usize);
                seq = prev_end;
            }
        }
        while let Some((s, n)) = self.bufs.get(at) {
            if s.ge(end) {
                break;
            }
            let next_end = *s + n.remaining() as u32;
            if next_end.gt(end) || (*s == seq && next_end == end) {
                b.truncate((*s - seq) as usize);
                end = *s;
                break;
            }
            self.bufs.remove(at);
        }
        let new = b.remaining();
        if new > 0 {
            if at == self.bufs.len() {
                self.bufs.push_back((seq, b));
            } else {
                self.bufs.insert(at, (seq, b));
            }
            at += 1;
        }
        debug_assert!(at <= self.bufs.len());
        debug_assert!(end.ge(seq));
        self.touch_range(first.0, first.1);
        new
    }

    /// Gives up the last buffer; `false`: there is none.
    #[cold]
    pub(crate) fn drop_last(&mut self) -> bool {
        let Some((start, _)) = self.bufs.pop_back() else {
            return false;
        };
        self.discard_from(start);
        true
    }

    /// Drops everything from `end` on.
    #[cold]
    pub(crate) fn discard_from(&mut self, end: SeqNr) {
        while self.bufs.back().is_some_and(|(s, _)| s.ge(end)) {
            self.bufs.pop_back();
        }
        if let Some((s, b)) = self.bufs.back_mut() {
            b.truncate(b.remaining().min((end - *s) as usize));
        }
        while self.ranges.back().is_some_and(|r| r.0.ge(end)) {
            self.ranges.pop_back();
        }
        if let Some(r) = self.ranges.back_mut() {
            r.1 = r.1.min(end);
        }
    }

    /// The segment that begins at `seq` is to be shown to the owner. At most as many as buffers are
    /// held are remembered.
    pub(crate) fn remember_unseen(&mut self, seq: SeqNr) {
        if self.unseen.len() < self.bufs.len() {
            self.unseen.push(seq);
        }
    }

    /// Shows each held segment that was not shown yet, in the order of their arrival.
    pub(crate) fn show_unseen(&mut self, mut f: impl FnMut(SeqNr, &B)) {
        for seq in self.unseen.drain(..) {
            let i = self.bufs.partition_point(|(s, _)| s.lt(seq));
            if let Some((s, b)) = self.bufs.get(i)
                && *s == seq
            {
                f(seq, b);
            }
        }
    }

    /// Merges `[start, end)` into the ranges and makes its range the most recent.
    fn touch_range(&mut self, start: SeqNr, end: SeqNr) {
        let i = self.ranges.partition_point(|r| r.1.lt(start));
        let (mut lo, mut hi) = (start, end);
        let mut j = i;
        while let Some(r) = self.ranges.get(j) {
            if r.0.gt(end) {
                break;
            }
            lo = lo.min(r.0);
            hi = hi.max(r.1);
            j += 1;
        }
        if j > i {
            self.ranges[i] = (lo, hi);
            if j > i + 1 {
                self.ranges.drain(i + 1..j);
            }
        } else {
            self.ranges.insert(i, (lo, hi));
        }
        let mut kept = 1;
        let mut fresh = 1;
        let old = self.recent;
        self.recent[0] = start;
        for (k, &s) in old[..usize::from(self.recent_len)].iter().enumerate() {
            let merged = s.ge(lo) && s.lt(hi);
            if !merged && kept < RECENT {
                self.recent[kept] = s;
                kept += 1;
                fresh += u8::from(k < usize::from(self.unreported_count));
            }
        }
        self.recent_len = kept as u8;
        self.unreported_count = fresh;
    }

    /// Moves what is in order now to `rx`; returns the next expected sequence number.
    pub(crate) fn deliver_in_order(&mut self, mut next: SeqNr, rx: &mut ReceiveQueue<B>) -> SeqNr {
        while let Some((s, b)) = self.bufs.front() {
            if s.gt(next) {
                break;
            }
            let end = *s + b.remaining() as u32;
            let skip = (next - *s) as usize;
            if let Some((_, mut b)) = self.bufs.pop_front()
                && end.gt(next)
            {
                b.advance(skip);
                rx.push(b);
                next = end;
            }
        }
        while self.ranges.front().is_some_and(|r| r.1.le(next)) {
            self.ranges.pop_front();
        }
        next
    }

    /// Up to `out.len()` blocks, most recently changed first (RFC 2018 section 4), skipping the
    /// first `skip` recent ones so that several ACKs of one batch tell different news.
    pub(crate) fn sack_blocks(
        &self,
        skip: usize,
        next: SeqNr,
        out: &mut [(SeqNr, SeqNr)],
    ) -> usize {
        let mut n = 0;
        let recent = &self.recent[..usize::from(self.recent_len)];
        for &s in recent.iter().skip(skip) {
            if n == out.len() {
                break;
            }
            let i = self.ranges.partition_point(|r| r.1.le(s));
            if let Some(&r) = self.ranges.get(i)
                && r.0.le(s)
                && r.0.gt(next)
                && !out[..n].contains(&r)
            {
                out[n] = r;
                n += 1;
            }
        }
        n
    }

    /// Ranges that changed since the last `reported`.
    pub(crate) fn unreported_count(&self) -> usize {
        usize::from(self.unreported_count)
    }

    /// Segments that arrived since the last `reported`.
    pub(crate) fn arrived_count(&self) -> usize {
        usize::from(self.arrived_count)
    }

    pub(crate) fn mark_reported(&mut self) {
        self.arrived_count = 0;
        self.unreported_count = 0;
        self.dsack_block = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::buffer::VecBuf;

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
                let n = r.sack_blocks(0, next, &mut blocks);
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
        assert_eq!(r.sack_blocks(0, SeqNr(50), &mut b), 3);
        assert_eq!(
            b,
            [(100, 120), (200, 210), (300, 310)].map(|(s, e)| (SeqNr(s), SeqNr(e)))
        );
        assert_eq!(r.unreported_count(), 3);
    }
}
