//! What waits to be sent and what waits to be acknowledged: records as the upper layer pushed
//! them, and the segments that carried them, so that a repetition rebuilds the same boundaries.

use std::collections::VecDeque;

use crate::SeqNr;

/// Selectively acknowledged (RFC 2018).
pub(crate) const SACKED: u8 = 1;
/// Deemed lost (RFC 6675 section 4) and not yet repeated since.
pub(crate) const LOST: u8 = 2;
/// Sent more than once.
pub(crate) const RETX: u8 = 4;
/// Ends a message.
pub(crate) const PUSH: u8 = 8;
/// Carries our FIN behind its payload.
pub(crate) const FIN: u8 = 16;

struct Record<R> {
    len: u32,
    push: bool,
    record: R,
}

/// A segment on its way. Payload: `len` bytes from `offset` of record `record` on.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    pub seq: SeqNr,
    pub len: u32,
    /// Running number of its first record.
    pub record: u32,
    pub offset: u32,
    /// When it was last sent, ns.
    pub at: u64,
    pub flags: u8,
}

impl Sent {
    #[inline]
    pub(crate) fn end(&self) -> SeqNr {
        self.seq + self.len + u32::from(self.flags & FIN != 0)
    }
    /// Counts as on the wire (RFC 6675's pipe).
    #[inline]
    pub(crate) fn in_pipe(&self) -> bool {
        self.flags & (SACKED | LOST) == 0
    }
}

/// A new segment, not yet made.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub len: u32,
    push: bool,
    next_record: u32,
    next_offset: u32,
}

/// What a cumulative ACK took off the queue.
#[derive(Default)]
pub(crate) struct Acked {
    /// Payload bytes that had not been selectively acknowledged before.
    pub delivered: u32,
    pub sacked_segs: u32,
    pub lost_segs: u32,
    /// When the newest segment was sent, if the ACK measures a round trip (Karn).
    pub sent_at: Option<u64>,
    pub retransmitted: bool,
    pub records: bool,
}

pub(crate) struct SendQueue<R> {
    records: VecDeque<Record<R>>,
    pub sent: VecDeque<Sent>,
    /// Running number of `records[0]`.
    base: u32,
    /// So many of the first records are fully acknowledged.
    acked: u32,
    next_record: u32,
    next_offset: u32,
}

impl<R> SendQueue<R> {
    pub(crate) fn new() -> Self {
        SendQueue {
            records: VecDeque::new(),
            sent: VecDeque::new(),
            base: 0,
            acked: 0,
            next_record: 0,
            next_offset: 0,
        }
    }

    /// Asks for where the first records and segments lie.
    #[inline]
    pub(crate) fn prefetch<B: crate::RecvBuf>(&self) {
        B::prefetch(self.records.as_slices().0.as_ptr());
        B::prefetch(self.sent.as_slices().0.as_ptr());
    }

    #[inline]
    pub(crate) fn push(&mut self, len: u32, record: R, push: bool) {
        self.records.push_back(Record { len, push, record });
    }

    #[inline]
    fn index(&self, number: u32) -> usize {
        number.wrapping_sub(self.base) as usize
    }

    /// The next new segment: whole records that fit `emss` and `usable` together; a record above
    /// `emss`, and what is left of a split one, travel alone. The first record may exceed
    /// `usable`: the caller decides whether to wait or to [`Plan::cut`].
    #[inline]
    pub(crate) fn plan(&self, emss: u32, usable: u32) -> Option<Plan> {
        let i = self.index(self.next_record);
        let first = self.records.get(i)?;
        let left = first.len - self.next_offset;
        if self.next_offset > 0 || first.len > emss {
            let len = left.min(emss);
            let whole = len == left;
            return Some(Plan {
                len,
                push: whole && first.push,
                next_record: self.next_record.wrapping_add(u32::from(whole)),
                next_offset: if whole { 0 } else { self.next_offset + len },
            });
        }
        let limit = emss.min(usable);
        let mut plan = Plan {
            len: first.len,
            push: first.push,
            next_record: self.next_record.wrapping_add(1),
            next_offset: 0,
        };
        let mut i = i + 1;
        while plan.len < limit {
            match self.records.get(i) {
                Some(r) if r.len <= limit - plan.len => {
                    plan.len += r.len;
                    plan.push |= r.push;
                    plan.next_record = plan.next_record.wrapping_add(1);
                    i += 1;
                }
                _ => break,
            }
        }
        Some(plan)
    }

    /// The peer's window forces a part of the first record.
    pub(crate) fn cut(&self, len: u32) -> Plan {
        Plan {
            len,
            push: false,
            next_record: self.next_record,
            next_offset: self.next_offset + len,
        }
    }

    /// Takes up to `limit` full segments and what follows them, `usable` bytes together, into
    /// `sent`, and returns them as one: records are consecutive, so the pieces are too.
    #[cold]
    pub(crate) fn train(
        &mut self,
        (emss, usable): (u32, u32),
        limit: &crate::Tso,
        seq: SeqNr,
        at: u64,
    ) -> Option<(Sent, u32)> {
        let mut whole: Option<Sent> = None;
        let mut count = 0;
        while count < u32::from(limit.max_segments) {
            let len = whole.map_or(0, |w| w.len);
            let left = usable - len;
            let plan = self.plan(emss, left);
            // The first goes in any case.
            let fits = |p: &Plan| p.len <= left && (count == 0 || len + p.len <= limit.max_bytes);
            let Some(plan) = plan.filter(fits) else {
                break;
            };
            let s = self.make(&plan, seq + len, false, at);
            self.made(&plan);
            self.sent.push_back(s);
            count += 1;
            let w = whole.get_or_insert(Sent { len: 0, ..s });
            w.len += s.len;
            w.flags |= s.flags;
            if s.len < emss {
                break;
            }
        }
        whole.map(|w| (w, count))
    }

    /// The planned segment; [`SendQueue::made`] once it left.
    #[inline]
    pub(crate) fn make(&self, plan: &Plan, seq: SeqNr, fin: bool, at: u64) -> Sent {
        let flags = if plan.push { PUSH } else { 0 } | if fin { FIN } else { 0 };
        Sent {
            seq,
            len: plan.len,
            record: self.next_record,
            offset: self.next_offset,
            at,
            flags,
        }
    }

    #[inline]
    pub(crate) fn made(&mut self, plan: &Plan) {
        self.next_record = plan.next_record;
        self.next_offset = plan.next_offset;
    }

    /// Where the next new segment begins, to come back to with [`SendQueue::rewind`].
    #[inline]
    pub(crate) fn cursor(&self) -> (u32, u32) {
        (self.next_record, self.next_offset)
    }

    #[inline]
    pub(crate) fn rewind(&mut self, (record, offset): (u32, u32)) {
        (self.next_record, self.next_offset) = (record, offset);
    }

    pub(crate) fn make_fin(&self, seq: SeqNr, at: u64) -> Sent {
        Sent {
            seq,
            len: 0,
            record: self.next_record,
            offset: self.next_offset,
            at,
            flags: FIN,
        }
    }

    /// The pieces of a segment.
    #[inline]
    pub(crate) fn gather(&self, s: &Sent, mut f: impl FnMut(&R, u32, u32)) {
        let mut left = s.len;
        let mut offset = s.offset;
        let mut i = self.index(s.record);
        while left > 0 {
            let Some(r) = self.records.get(i) else { return };
            let n = left.min(r.len - offset);
            f(&r.record, offset, n);
            left -= n;
            offset = 0;
            i += 1;
        }
    }

    /// Takes off every segment that ends at or before `una`. A segment acknowledged in part stays
    /// whole: its repetition keeps its boundaries and the peer trims.
    #[inline]
    pub(crate) fn ack_to(&mut self, una: SeqNr, pipe: &mut u32) -> Acked {
        let mut r = Acked::default();
        while let Some(s) = self.sent.front() {
            if s.end().gt(una) {
                break;
            }
            if s.flags & (SACKED | LOST | RETX) == 0 {
                *pipe -= s.len;
                r.delivered += s.len;
                r.sent_at = Some(s.at);
            } else {
                if s.in_pipe() {
                    *pipe -= s.len;
                }
                if s.flags & SACKED != 0 {
                    r.sacked_segs += 1;
                } else {
                    r.delivered += s.len;
                }
                r.lost_segs += u32::from(s.flags & LOST != 0);
                r.retransmitted |= s.flags & RETX != 0;
            }
            self.sent.pop_front();
        }
        if r.retransmitted {
            r.sent_at = None;
        }
        let first_open = self.sent.front().map_or(self.next_record, |s| s.record);
        let acked = first_open.wrapping_sub(self.base);
        r.records = acked > self.acked;
        self.acked = acked;
        r
    }

    #[inline]
    pub(crate) fn take_acked(&mut self, mut f: impl FnMut(R)) {
        for _ in 0..core::mem::take(&mut self.acked) {
            if let Some(r) = self.records.pop_front() {
                self.base = self.base.wrapping_add(1);
                f(r.record);
            }
        }
    }

    /// The connection is over: everything, in order.
    pub(crate) fn drain(&mut self, mut f: impl FnMut(R)) {
        self.sent.clear();
        self.acked = 0;
        self.base = self.base.wrapping_add(self.records.len() as u32);
        self.next_record = self.base;
        self.next_offset = 0;
        for r in self.records.drain(..) {
            f(r.record);
        }
    }

    /// Index of the first segment that ends after `seq`.
    #[inline]
    pub(crate) fn first_after(&self, seq: SeqNr) -> usize {
        self.sent.partition_point(|s| s.end().le(seq))
    }

    /// Segments above `emss` are cut, between records where that fits, and count as lost: the path
    /// does not carry them. SACKed ones arrived.
    pub(crate) fn resegment(&mut self, emss: u32) {
        let emss = emss.max(1);
        for s in core::mem::take(&mut self.sent) {
            if s.len <= emss || s.flags & SACKED != 0 {
                self.sent.push_back(s);
                continue;
            }
            let mut rest = s;
            rest.flags |= LOST;
            while rest.len > emss {
                let (mut len, mut record, mut offset) = (0, rest.record, rest.offset);
                while let Some(r) = self.records.get(self.index(record)) {
                    let left = r.len - offset;
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
                self.sent.push_back(Sent {
                    len,
                    flags: rest.flags & !(PUSH | FIN),
                    ..rest
                });
                rest = Sent {
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

    /// Of empty queues.
    pub(crate) fn holds_memory(&self) -> bool {
        self.records.is_empty()
            && self.sent.is_empty()
            && self.records.capacity() + self.sent.capacity() > 0
    }

    pub(crate) fn shrink(&mut self) {
        if self.records.is_empty() && self.sent.is_empty() {
            self.records = VecDeque::new();
            self.sent = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(lens: &[u32]) -> SendQueue<usize> {
        let mut q = SendQueue::new();
        for (i, &l) in lens.iter().enumerate() {
            q.push(l, i, false);
        }
        q
    }

    fn pieces(q: &SendQueue<usize>, i: usize) -> Vec<(usize, u32, u32)> {
        let mut v = vec![];
        q.gather(&q.sent[i], |r, o, l| v.push((*r, o, l)));
        v
    }

    fn send_all(q: &mut SendQueue<usize>, emss: u32) -> (SeqNr, u32) {
        let (mut seq, mut pipe) = (SeqNr(u32::MAX - 100), 0);
        while let Some(p) = q.plan(emss, u32::MAX) {
            q.sent.push_back(q.make(&p, seq, false, 0));
            q.made(&p);
            seq += p.len;
            pipe += p.len;
        }
        (seq, pipe)
    }

    #[test]
    fn small_records_share_a_segment_and_none_straddles_two() {
        let mut q = queue(&[100, 200, 800, 300, 1000]);
        send_all(&mut q, 1200);
        assert_eq!(q.sent.len(), 3);
        assert_eq!(pieces(&q, 0), [(0, 0, 100), (1, 0, 200), (2, 0, 800)]);
        assert_eq!(pieces(&q, 1), [(3, 0, 300)]);
        assert_eq!(pieces(&q, 2), [(4, 0, 1000)]);
    }

    #[test]
    fn a_record_above_emss_is_cut_and_its_tail_travels_alone() {
        let mut q = queue(&[2500, 100, 100]);
        send_all(&mut q, 1000);
        assert_eq!(pieces(&q, 0), [(0, 0, 1000)]);
        assert_eq!(pieces(&q, 1), [(0, 1000, 1000)]);
        assert_eq!(pieces(&q, 2), [(0, 2000, 500)]);
        assert_eq!(pieces(&q, 3), [(1, 0, 100), (2, 0, 100)]);
    }

    #[test]
    fn a_smaller_emss_cuts_between_records_and_inside_them_only_when_it_must() {
        let mut q = queue(&[400, 500, 300, 1300, 200]);
        send_all(&mut q, 1400);
        assert_eq!(q.sent.len(), 3);
        let end = q.sent[2].end();
        q.resegment(600);
        let all: Vec<_> = (0..q.sent.len()).map(|i| pieces(&q, i)).collect();
        assert_eq!(
            all,
            [
                vec![(0, 0, 400)],
                vec![(1, 0, 500)],
                vec![(2, 0, 300)],
                vec![(3, 0, 600)],
                vec![(3, 600, 600)],
                vec![(3, 1200, 100)],
                vec![(4, 0, 200)],
            ]
        );
        for w in q.sent.make_contiguous().windows(2) {
            assert_eq!(w[0].end(), w[1].seq);
        }
        assert_eq!(q.sent[6].end(), end);
        assert_eq!(q.sent[6].flags & LOST, 0, "what fits may still arrive");
    }

    #[test]
    fn records_complete_in_order_when_their_last_segment_is_acknowledged() {
        let mut q = queue(&[2500, 100]);
        let (end, mut pipe) = send_all(&mut q, 1000);
        let first = q.sent[0].seq;
        let a = q.ack_to(first + 2499, &mut pipe);
        assert_eq!(
            (a.delivered, a.records),
            (2000, false),
            "a part of a segment does not count"
        );
        q.take_acked(|_| panic!("nothing is complete"));
        let a = q.ack_to(first + 2500, &mut pipe);
        assert!(a.records);
        let mut got = vec![];
        q.take_acked(|r| got.push(r));
        q.ack_to(end, &mut pipe);
        q.take_acked(|r| got.push(r));
        assert_eq!((got, pipe), (vec![0, 1], 0));
    }
}
