//! Loss recovery: the scoreboard kept on the sent segments (RFC 2018, 6675), what RACK-TLP judges
//! (RFC 8985), proportional rate reduction (RFC 6937), and taking a reduction back that was for
//! nothing. Exists only for connections that met a loss, a SACK block or a silent tail.

use crate::base::sequence::SeqNr;
use crate::congestion::RecoveryPhase;
use crate::congestion::pacing::Pacer;
use crate::congestion::reduction::{WindowReduction, is_echo_older};
use crate::loss::rack::{self, Probe, Rack};
use crate::queues::send_queue::{LOST, RETX, SACKED, SendQueue};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::Segment;

/// RFC 6675 section 2.
const DUP_THRESH: u32 = 3;

#[derive(Default)]
pub(crate) struct Recovery {
    /// SACKed segments in `sent`.
    pub sacked: u32,
    /// Lost segments in `sent` that still await their repetition.
    pub lost: u32,
    /// No segment before this awaits repetition.
    cursor: SeqNr,
    /// Blocks seen last: only what they grew by is walked.
    cache: [(SeqNr, SeqNr); 4],
    pub rack: Rack,
    /// A tail loss probe whose answer is not in.
    pub probe: Option<Probe>,
    pub pacer: Pacer,
    pub reduction: WindowReduction,
}

impl Recovery {
    pub(crate) fn new(una: SeqNr) -> Self {
        Recovery {
            reduction: WindowReduction::new(una),
            cursor: una,
            cache: [(una, una); 4],
            rack: Rack::new(una),
            ..Recovery::default()
        }
    }

    /// The cumulative ACK is about to take off what is before `ack`.
    pub(crate) fn before_ack<R>(
        &mut self,
        h: &mut Tcb,
        tx: &SendQueue<R>,
        ack: SeqNr,
        (echo, offset): (Option<u32>, u32),
        now: u64,
    ) {
        for s in &tx.sent {
            let end = if s.end().le(ack) {
                s.end()
            } else {
                s.seq + s.whole_to(ack)
            };
            if end == s.seq {
                break;
            }
            if s.flags & SACKED != 0 {
                continue;
            }
            let again = s.flags & RETX != 0;
            self.rack.order(h, end, again);
            // An echo from before the repetition answers the original (section 6.2 step 2).
            let old = |e: u32| again && is_echo_older(e, s.at, offset);
            if !echo.is_some_and(old) {
                self.rack.delivered(s.at, end, again, h.rtt.min, now);
            }
        }
    }

    /// The cumulative ACK took segments off the queue.
    pub(crate) fn acked(&mut self, una: SeqNr, sacked: u32, lost: u32) {
        self.sacked -= sacked;
        self.lost -= lost;
        self.rack.edge = self.rack.edge.max(una);
        self.cursor = self.cursor.max(una);
        for c in &mut self.cache {
            if c.0.lt(una) {
                *c = (una, c.1.max(una));
            }
        }
    }

    /// Marks what the blocks newly cover; returns (segments, bytes).
    pub(crate) fn sack<R>(
        &mut self,
        h: &mut Tcb,
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
                let again = s.flags & RETX != 0;
                self.rack.order(h, s.end(), again);
                self.rack.delivered(s.at, s.end(), again, h.rtt.min, now);
            }
        }
        self.sacked += segs;
        if segs > 0 {
            h.flags |= ConnectionFlags::RECOVERING;
        }
        (segs, bytes)
    }

    fn lose<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>, i: usize) {
        if let Some(s) = tx.sent.get_mut(i)
            && s.flags & (SACKED | LOST) == 0
        {
            s.flags |= LOST;
            h.pipe -= s.len;
            self.lost += 1;
            self.cursor = self.cursor.min(s.seq);
            h.flags |= ConnectionFlags::RECOVERING;
        }
    }

    /// RACK's judgement of everything in flight; returns (lost repetitions, when to look again).
    pub(crate) fn detect<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>, now: u64) -> (u64, u64) {
        let in_doubt = h.phase == RecoveryPhase::Open && self.sacked < DUP_THRESH;
        let mut rack = core::mem::take(&mut self.rack);
        let found = rack.detect(h, tx, in_doubt, now, |h, tx, i| self.lose(h, tx, i));
        self.rack = rack;
        (found.repeated, found.due)
    }

    /// D-SACK: adapts RACK, and tells whether all retransmissions of the last recovery were needless
    /// (RFC 3708).
    pub(crate) fn duplicate(&mut self, h: &Tcb) -> bool {
        self.rack.dsack(h);
        self.reduction.on_dsack()
    }

    /// What was marked lost was not (RFC 4015 section 3.2).
    pub(crate) fn unmark_lost<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>) {
        h.phase = RecoveryPhase::Open;
        h.backoff = 0;
        if self.lost > 0 {
            for s in tx.sent.iter_mut().filter(|s| s.flags & LOST != 0) {
                s.flags &= !LOST;
                h.pipe += s.len;
            }
            self.lost = 0;
        }
    }

    /// Fast recovery begins.
    pub(crate) fn begin(&mut self, h: &mut Tcb) {
        h.phase = RecoveryPhase::Recovery;
        h.flags |= ConnectionFlags::RECOVERING;
        self.probe = None;
    }

    /// Section 7.4.2: does this ACK end the probe's episode, and did the probe repair a loss?
    pub(crate) fn probe_answered(&mut self, seg: &Segment, dup: bool) -> bool {
        let Some(p) = self.probe.filter(|p| seg.ack.ge(p.end)) else {
            return false;
        };
        let twice = rack::dsack(seg).is_some_and(|(_, hi)| hi == p.end);
        let repaired = p.again && !twice && seg.ack.gt(p.end);
        if !p.again || twice || repaired || (dup && seg.sacks == 0) {
            self.probe = None;
        }
        repaired
    }

    /// Without SACK (RFC 6582): the first segment is the lost one.
    pub(crate) fn lose_first<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>) {
        self.lose(h, tx, 0);
    }

    /// Back to the straight path when nothing is marked any more.
    pub(crate) fn settle(&mut self, h: &mut Tcb) {
        if h.phase == RecoveryPhase::Open
            && self.sacked == 0
            && self.lost == 0
            && self.probe.is_none()
        {
            h.flags &= !ConnectionFlags::RECOVERING;
            self.rack.settle();
        }
    }

    /// Retransmission timeout (RFC 8985 section 6.3): the first segment and what had its time is
    /// lost; without SACK all is (RFC 5681). SND.NXT stays where it is: going back would make our
    /// pure ACKs unacceptable.
    pub(crate) fn timeout<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>, now: u64) {
        // A SACKed first segment was reneged on (RFC 2018 section 8).
        let renege = tx.sent.front().is_some_and(|s| s.flags & SACKED != 0);
        let all = !h.has(ConnectionFlags::SACK);
        (self.lost, h.pipe) = (0, 0);
        for (i, s) in tx.sent.iter_mut().enumerate() {
            if renege {
                s.flags &= !SACKED;
            }
            if s.flags & SACKED != 0 {
                continue;
            }
            if i == 0 || all || s.flags & LOST != 0 || self.rack.expired(h, s.at, now) {
                s.flags |= LOST;
                self.lost += 1;
            } else {
                h.pipe += s.len;
            }
        }
        if renege {
            self.sacked = 0;
        }
        self.cache = [(h.snd_una, h.snd_una); 4];
        self.reduction.point = h.snd_nxt;
        self.cursor = h.snd_una;
        self.probe = None;
        h.phase = RecoveryPhase::Loss;
        h.flags |= ConnectionFlags::RECOVERING;
    }

    /// Segments were cut and marked: counts anew. No congestion (RFC 1191 section 6.5).
    pub(crate) fn recount<R>(&mut self, h: &mut Tcb, tx: &SendQueue<R>) {
        (self.lost, h.pipe) = (0, 0);
        for s in &tx.sent {
            self.lost += u32::from(s.flags & LOST != 0);
            h.pipe += if s.in_pipe() { s.len } else { 0 };
        }
        self.cursor = h.snd_una;
        h.flags |= ConnectionFlags::RECOVERING;
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
    pub(crate) fn repeat<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>, i: usize, now: u64) {
        let s = &mut tx.sent[i];
        self.reduction
            .on_retransmitted(s.len, s.flags & RETX == 0, now);
        s.flags = (s.flags & !LOST) | RETX;
        s.at = now;
        self.lost -= 1;
        self.cursor = s.end();
        h.pipe += s.len;
        self.rack.repeat(s.seq, now);
    }

    /// The last segment was sent again as a probe (RFC 8985 section 7.3): still once in the pipe.
    pub(crate) fn probed<R>(&mut self, h: &mut Tcb, tx: &mut SendQueue<R>, again: bool, now: u64) {
        self.probe = Some(Probe {
            end: h.snd_nxt,
            again,
        });
        h.flags |= ConnectionFlags::RECOVERING;
        if again && let Some(s) = tx.sent.back_mut() {
            s.flags |= RETX;
            s.at = now;
            self.rack.repeat(s.seq, now);
        }
    }
}
