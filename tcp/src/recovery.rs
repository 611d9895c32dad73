//! Loss recovery: the RFC 6675 scoreboard kept on the sent segments, proportional rate reduction
//! (RFC 6937), and detection of lost repetitions by later deliveries (RFC 8985's idea). Exists
//! only for connections that met a loss or a SACK block.

use std::collections::VecDeque;

use crate::SeqNr;
use crate::congestion::Controller;
use crate::conn::{Hot, Phase, flag};
use crate::segment::Segment;
use crate::send_queue::{LOST, RETX, SACKED, SendQueue};

/// RFC 6675 section 2.
const DUP_THRESH: u32 = 3;

#[derive(Default)]
pub(crate) struct Recovery {
    /// Recovery ends when this is acknowledged.
    point: SeqNr,
    /// SACKed segments in `sent`.
    pub sacked: u32,
    /// Lost segments in `sent` that still await their repetition.
    pub lost: u32,
    /// End of the highest SACKed segment.
    high_sacked: SeqNr,
    /// Unsacked segments before this were all judged lost already.
    edge: SeqNr,
    /// No segment before this awaits repetition.
    cursor: SeqNr,
    /// Repetitions in the order they left.
    repeated: VecDeque<(SeqNr, u64)>,
    /// Blocks seen last: only what they grew by is walked.
    cache: [(SeqNr, SeqNr); 4],
    /// Newest sending time of all delivered segments.
    delivered_at: u64,
    prr_delivered: u32,
    prr_out: u32,
    recover_flight: u32,
}

impl Recovery {
    pub(crate) fn new(una: SeqNr) -> Self {
        Recovery {
            point: una,
            high_sacked: una,
            edge: una,
            cursor: una,
            cache: [(una, una); 4],
            ..Recovery::default()
        }
    }

    /// The cumulative ACK took segments off the queue.
    pub(crate) fn acked(&mut self, una: SeqNr, sacked: u32, lost: u32, newest: u64) {
        self.sacked -= sacked;
        self.lost -= lost;
        self.delivered_at = self.delivered_at.max(newest);
        self.edge = self.edge.max(una);
        self.cursor = self.cursor.max(una);
        self.high_sacked = self.high_sacked.max(una);
        for c in &mut self.cache {
            if c.0.lt(una) {
                *c = (una, c.1.max(una));
            }
        }
    }

    /// Marks what the blocks newly cover; returns (segments, bytes).
    pub(crate) fn sack<R>(
        &mut self,
        h: &mut Hot,
        tx: &mut SendQueue<R>,
        seg: &Segment,
        now: u64,
    ) -> (u32, u32) {
        let (mut segs, mut bytes) = (0, 0);
        let old = self.cache;
        let mut fresh = 0;
        for &(lo, hi) in &seg.sack[..usize::from(seg.sacks)] {
            // D-SACK (RFC 2883) and nonsense fall out here: only what is in flight counts.
            if lo.ge(hi) || lo.lt(h.snd_una) || lo.lt(seg.ack) || hi.gt(h.snd_nxt) {
                continue;
            }
            let mut from = lo;
            let mut to = hi;
            for c in &old {
                if c.0 == lo && c.1.le(hi) {
                    from = c.1.max(from);
                }
                if c.1 == hi && c.0.ge(lo) {
                    to = c.0.min(to);
                }
            }
            self.cache[fresh] = (lo, hi);
            fresh += 1;
            let mut i = tx.sent.partition_point(|s| s.seq.lt(from));
            while let Some(s) = tx.sent.get_mut(i) {
                if s.end().gt(hi) || s.seq.ge(to) {
                    break;
                }
                i += 1;
                if s.flags & SACKED != 0 {
                    continue;
                }
                if s.flags & LOST != 0 {
                    self.lost -= 1;
                } else {
                    h.pipe -= s.len;
                }
                s.flags = (s.flags | SACKED) & !LOST;
                segs += 1;
                bytes += s.len;
                self.high_sacked = self.high_sacked.max(s.end());
                // A repetition that seems to arrive at once is the original (RFC 8985 section 6.2).
                if s.flags & RETX == 0 || now.saturating_sub(s.at) > h.rtt.srtt / 2 {
                    self.delivered_at = self.delivered_at.max(s.at);
                }
            }
        }
        self.sacked += segs;
        if segs > 0 {
            h.flags |= flag::RECOVERING;
        }
        (segs, bytes)
    }

    fn lose<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>, i: usize) {
        if let Some(s) = tx.sent.get_mut(i)
            && s.flags & (SACKED | LOST) == 0
        {
            s.flags |= LOST;
            h.pipe -= s.len;
            self.lost += 1;
            self.cursor = self.cursor.min(s.seq);
            h.flags |= flag::RECOVERING;
        }
    }

    /// IsLost of RFC 6675 section 4 for every segment at once: lost is what has DupThresh SACKed
    /// segments above it. The edge only moves up, so each segment is judged once.
    pub(crate) fn judge<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>) {
        if self.sacked < DUP_THRESH {
            return;
        }
        let mut i = tx.first_after(self.high_sacked);
        let mut above = 0;
        while i > 0 {
            let s = &tx.sent[i - 1];
            if s.end().le(self.edge) {
                return;
            }
            i -= 1;
            above += u32::from(s.flags & SACKED != 0);
            if above == DUP_THRESH {
                let edge = s.seq;
                if edge.le(self.edge) {
                    return;
                }
                let mut k = tx.first_after(self.edge);
                while k < i {
                    if tx.sent[k].flags & RETX == 0 {
                        self.lose(h, tx, k);
                    }
                    k += 1;
                }
                self.edge = edge;
                return;
            }
        }
    }

    /// A repetition is lost when something sent clearly later was delivered. Returns how many.
    pub(crate) fn judge_repeated<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>) -> u64 {
        let mut n = 0;
        let slack = h.rtt.srtt / 4;
        while let Some(&(seq, at)) = self.repeated.front() {
            if seq.ge(h.snd_una) {
                let i = tx.first_after(seq);
                if let Some(s) = tx.sent.get_mut(i)
                    && s.at == at
                    && s.flags & SACKED == 0
                {
                    if self.delivered_at <= at + slack {
                        break;
                    }
                    self.lose(h, tx, i);
                    n += 1;
                }
            }
            self.repeated.pop_front();
        }
        n
    }

    /// Without SACK (RFC 6582): the first segment is the lost one.
    pub(crate) fn lose_first<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>) {
        self.lose(h, tx, 0);
    }

    /// Enters fast recovery.
    pub(crate) fn enter(&mut self, h: &mut Hot, cc: &mut Controller) {
        h.phase = Phase::Recovery;
        h.flags |= flag::RECOVERING;
        self.point = h.snd_nxt;
        self.recover_flight = h.flight().max(1);
        self.prr_delivered = 0;
        self.prr_out = 0;
        h.ssthresh = cc.on_loss(h.cwnd, h.flight(), u32::from(h.emss));
    }

    /// RFC 6937 section 3: how much may leave in answer to this ACK.
    pub(crate) fn reduce(&mut self, h: &mut Hot, delivered: u32) {
        let mss = u32::from(h.emss);
        self.prr_delivered = self.prr_delivered.saturating_add(delivered);
        let out = if h.pipe > h.ssthresh {
            let share = u64::from(self.prr_delivered) * u64::from(h.ssthresh);
            let share = share.div_ceil(u64::from(self.recover_flight)) as u32;
            share.saturating_sub(self.prr_out)
        } else {
            let limit = self
                .prr_delivered
                .saturating_sub(self.prr_out)
                .max(delivered)
                + mss;
            limit.min(h.ssthresh - h.pipe)
        };
        // The first repetition always leaves.
        let out = if self.prr_out == 0 { out.max(mss) } else { out };
        h.cwnd = h.pipe + out;
    }

    pub(crate) fn sent(&mut self, len: u32) {
        self.prr_out = self.prr_out.saturating_add(len);
    }

    /// The recovery point is passed.
    pub(crate) fn done(&self, una: SeqNr) -> bool {
        una.ge(self.point)
    }

    /// Back to the straight path when nothing is marked any more.
    pub(crate) fn settle(&mut self, h: &mut Hot) {
        if h.phase == Phase::Open && self.sacked == 0 && self.lost == 0 {
            h.flags &= !flag::RECOVERING;
            self.repeated.clear();
        }
    }

    /// Retransmission timeout (RFC 6675 section 5.1, RFC 5681): all that is not SACKed is lost.
    /// SND.NXT stays where it is: going back would make our pure ACKs unacceptable.
    pub(crate) fn timeout<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>) {
        // A SACKed first segment means the peer took its word back (RFC 2018 section 8).
        let renege = tx.sent.front().is_some_and(|s| s.flags & SACKED != 0);
        self.lost = 0;
        for s in &mut tx.sent {
            if renege {
                s.flags &= !SACKED;
            }
            if s.flags & SACKED == 0 {
                s.flags = (s.flags | LOST) & !RETX;
                self.lost += 1;
            }
        }
        if renege {
            self.sacked = 0;
            self.high_sacked = h.snd_una;
        }
        self.repeated.clear();
        self.cache = [(h.snd_una, h.snd_una); 4];
        self.point = h.snd_nxt;
        self.edge = h.snd_nxt;
        self.cursor = h.snd_una;
        h.pipe = 0;
        h.phase = Phase::Loss;
        h.flags |= flag::RECOVERING;
    }

    /// Index of the next segment to repeat.
    pub(crate) fn next_lost<R>(&mut self, tx: &SendQueue<R>) -> Option<usize> {
        if self.lost == 0 {
            return None;
        }
        let mut i = tx.first_after(self.cursor);
        while let Some(s) = tx.sent.get(i) {
            if s.flags & LOST != 0 {
                self.cursor = s.seq;
                return Some(i);
            }
            i += 1;
        }
        debug_assert!(false, "lost count without a lost segment");
        self.lost = 0;
        None
    }

    /// The segment at `i` was sent again.
    pub(crate) fn repeat<R>(&mut self, h: &mut Hot, tx: &mut SendQueue<R>, i: usize, now: u64) {
        let s = &mut tx.sent[i];
        s.flags = (s.flags & !LOST) | RETX;
        s.at = now;
        self.lost -= 1;
        self.cursor = s.end();
        h.pipe += s.len;
        self.repeated.push_back((s.seq, now));
        self.prr_out = self.prr_out.saturating_add(s.len);
    }
}
