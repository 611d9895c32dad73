//! Loss recovery: the scoreboard kept on the sent segments (RFC 2018, 6675), what RACK-TLP judges
//! (RFC 8985), proportional rate reduction (RFC 6937), and taking a reduction back that was for
//! nothing. Exists only for connections that met a loss, a SACK block or a silent tail.

use crate::base::sequence::SeqNr;
use crate::congestion::RecoveryPhase;
use crate::congestion::pacing::Pacer;
use crate::congestion::reduction::{WindowReduction, is_echo_older};
use crate::loss::rack::{self, OutstandingProbe, Rack};
use crate::queues::send_queue::{LOST, RETX, SACKED, TransmitQueue};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::Segment;

/// RFC 6675 section 2.
const DUP_THRESH: u32 = 3;

#[derive(Default)]
pub(crate) struct Recovery {
    /// SACKed segments in `sent`.
    pub sacked: u32,
    /// Lost segments in `sent` that still await their retransmission.
    pub lost: u32,
    /// No segment before this awaits retransmission.
    cursor: SeqNr,
    /// Blocks seen last: only what they grew by is walked.
    cache: [(SeqNr, SeqNr); 4],
    pub rack: Rack,
    /// A tail loss probe whose answer is not in.
    pub probe: Option<OutstandingProbe>,
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
        tcb: &mut Tcb,
        queue: &TransmitQueue<R>,
        ack: SeqNr,
        (echo, offset): (Option<u32>, u32),
        now: u64,
    ) {
        for segment in &queue.sent {
            let end = if segment.end_seq().le(ack) {
                segment.end_seq()
            } else {
                segment.seq + segment.whole_segments_to(ack)
            };
            if end == segment.seq {
                break;
            }
            if segment.flags & SACKED != 0 {
                continue;
            }
            let again = segment.flags & RETX != 0;
            self.rack.note_order(tcb, end, again);
            // An echo from before the retransmission answers the original (section 6.2 step 2).
            let old = |echoed: u32| again && is_echo_older(echoed, segment.at, offset);
            if !echo.is_some_and(old) {
                self.rack
                    .on_delivered(segment.at, end, again, tcb.rtt.min, now);
            }
        }
    }

    /// The cumulative ACK took segments off the queue.
    pub(crate) fn on_acked(&mut self, una: SeqNr, sacked: u32, lost: u32) {
        self.sacked -= sacked;
        self.lost -= lost;
        self.rack.edge = self.rack.edge.max(una);
        self.cursor = self.cursor.max(una);
        for cached in &mut self.cache {
            if cached.0.lt(una) {
                *cached = (una, cached.1.max(una));
            }
        }
    }

    /// Marks what the blocks newly cover; returns (segments, bytes).
    pub(crate) fn process_sack<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        seg: &Segment,
        now: u64,
    ) -> (u32, u32) {
        let (mut segments, mut bytes) = (0, 0);
        let old = self.cache;
        let mut fresh = 0;
        for &(lo, hi) in &seg.sack[..usize::from(seg.sacks)] {
            // D-SACK (RFC 2883) and nonsense fall out here: only what is in flight counts.
            if lo.ge(hi) || lo.lt(tcb.snd_una) || lo.lt(seg.ack) || hi.gt(tcb.snd_nxt) {
                continue;
            }
            let mut from = lo;
            let mut to = hi;
            for cached in &old {
                if cached.0 == lo && cached.1.le(hi) {
                    from = cached.1.max(from);
                }
                if cached.1 == hi && cached.0.ge(lo) {
                    to = cached.0.min(to);
                }
            }
            self.cache[fresh] = (lo, hi);
            fresh += 1;
            let mut index = queue.sent.partition_point(|segment| segment.seq.lt(from));
            while let Some(segment) = queue.sent.get_mut(index) {
                if segment.end_seq().gt(hi) || segment.seq.ge(to) {
                    break;
                }
                index += 1;
                if segment.flags & SACKED != 0 {
                    continue;
                }
                if segment.flags & LOST != 0 {
                    self.lost -= 1;
                } else {
                    tcb.pipe -= segment.len;
                }
                segment.flags = (segment.flags | SACKED) & !LOST;
                segments += 1;
                bytes += segment.len;
                let again = segment.flags & RETX != 0;
                self.rack.note_order(tcb, segment.end_seq(), again);
                self.rack
                    .on_delivered(segment.at, segment.end_seq(), again, tcb.rtt.min, now);
            }
        }
        self.sacked += segments;
        if segments > 0 {
            tcb.flags |= ConnectionFlags::RECOVERING;
        }
        (segments, bytes)
    }

    fn mark_lost<R>(&mut self, tcb: &mut Tcb, queue: &mut TransmitQueue<R>, index: usize) {
        if let Some(segment) = queue.sent.get_mut(index)
            && segment.flags & (SACKED | LOST) == 0
        {
            segment.flags |= LOST;
            tcb.pipe -= segment.len;
            self.lost += 1;
            self.cursor = self.cursor.min(segment.seq);
            tcb.flags |= ConnectionFlags::RECOVERING;
        }
    }

    /// RACK's judgement of everything in flight; returns (lost retransmissions, when to look again).
    pub(crate) fn detect_losses<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        now: u64,
    ) -> (u64, u64) {
        let in_doubt = tcb.phase == RecoveryPhase::Open && self.sacked < DUP_THRESH;
        let mut rack = core::mem::take(&mut self.rack);
        let found = rack.detect_losses(tcb, queue, in_doubt, now, |tcb, queue, index| {
            self.mark_lost(tcb, queue, index)
        });
        self.rack = rack;
        (found.retransmitted, found.due)
    }

    /// D-SACK: adapts RACK, and tells whether all retransmissions of the last recovery were needless
    /// (RFC 3708).
    pub(crate) fn on_dsack(&mut self, tcb: &Tcb) -> bool {
        self.rack.on_dsack(tcb);
        self.reduction.on_dsack()
    }

    /// What was marked lost was not (RFC 4015 section 3.2).
    pub(crate) fn unmark_lost<R>(&mut self, tcb: &mut Tcb, queue: &mut TransmitQueue<R>) {
        tcb.phase = RecoveryPhase::Open;
        tcb.backoff = 0;
        if self.lost > 0 {
            for segment in queue
                .sent
                .iter_mut()
                .filter(|segment| segment.flags & LOST != 0)
            {
                segment.flags &= !LOST;
                tcb.pipe += segment.len;
            }
            self.lost = 0;
        }
    }

    /// Fast recovery begins.
    pub(crate) fn begin_fast_recovery(&mut self, tcb: &mut Tcb) {
        tcb.phase = RecoveryPhase::Recovery;
        tcb.flags |= ConnectionFlags::RECOVERING;
        self.probe = None;
    }

    /// Section 7.4.2: does this ACK end the probe's episode, and did the probe repair a loss?
    pub(crate) fn probe_answered(&mut self, seg: &Segment, dup: bool) -> bool {
        let Some(probe) = self.probe.filter(|probe| seg.ack.ge(probe.end)) else {
            return false;
        };
        let twice = rack::dsack_block(seg).is_some_and(|(_, hi)| hi == probe.end);
        let repaired = probe.again && !twice && seg.ack.gt(probe.end);
        if !probe.again || twice || repaired || (dup && seg.sacks == 0) {
            self.probe = None;
        }
        repaired
    }

    /// Without SACK (RFC 6582): the first segment is the lost one.
    pub(crate) fn mark_first_lost<R>(&mut self, tcb: &mut Tcb, queue: &mut TransmitQueue<R>) {
        self.mark_lost(tcb, queue, 0);
    }

    /// Back to the fast path when nothing is marked any more.
    pub(crate) fn finish_if_settled(&mut self, tcb: &mut Tcb) {
        if tcb.phase == RecoveryPhase::Open
            && self.sacked == 0
            && self.lost == 0
            && self.probe.is_none()
        {
            tcb.flags &= !ConnectionFlags::RECOVERING;
            self.rack.forget_retransmitted();
        }
    }

    /// Retransmission timeout (RFC 8985 section 6.3): the first segment and what had its time is
    /// lost; without SACK all is (RFC 5681). SND.NXT stays where it is: going back would make our
    /// pure ACKs unacceptable.
    pub(crate) fn mark_after_timeout<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        now: u64,
    ) {
        // A SACKed first segment was reneged on (RFC 2018 section 8).
        let renege = queue
            .sent
            .front()
            .is_some_and(|segment| segment.flags & SACKED != 0);
        let all = !tcb.has(ConnectionFlags::SACK);
        (self.lost, tcb.pipe) = (0, 0);
        for (index, segment) in queue.sent.iter_mut().enumerate() {
            if renege {
                segment.flags &= !SACKED;
            }
            if segment.flags & SACKED != 0 {
                continue;
            }
            if index == 0
                || all
                || segment.flags & LOST != 0
                || self.rack.is_expired(tcb, segment.at, now)
            {
                segment.flags |= LOST;
                self.lost += 1;
            } else {
                tcb.pipe += segment.len;
            }
        }
        if renege {
            self.sacked = 0;
        }
        self.cache = [(tcb.snd_una, tcb.snd_una); 4];
        self.reduction.point = tcb.snd_nxt;
        self.cursor = tcb.snd_una;
        self.probe = None;
        tcb.phase = RecoveryPhase::Loss;
        tcb.flags |= ConnectionFlags::RECOVERING;
    }

    /// Segments were cut and marked: counts anew. No congestion (RFC 1191 section 6.5).
    pub(crate) fn recount_lost<R>(&mut self, tcb: &mut Tcb, queue: &TransmitQueue<R>) {
        (self.lost, tcb.pipe) = (0, 0);
        for segment in &queue.sent {
            self.lost += u32::from(segment.flags & LOST != 0);
            tcb.pipe += if segment.in_pipe() { segment.len } else { 0 };
        }
        self.cursor = tcb.snd_una;
        tcb.flags |= ConnectionFlags::RECOVERING;
    }

    /// Index of the next segment to repeat.
    pub(crate) fn next_lost<R>(&mut self, queue: &TransmitQueue<R>) -> Option<usize> {
        if self.lost == 0 {
            return None;
        }
        let mut index = queue.first_after(self.cursor);
        while let Some(segment) = queue.sent.get(index) {
            if segment.flags & LOST != 0 {
                self.cursor = segment.seq;
                return Some(index);
            }
            index += 1;
        }
        debug_assert!(false, "lost count without a lost segment");
        self.lost = 0;
        None
    }

    /// The segment at `i` was sent again.
    pub(crate) fn on_retransmitted<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        index: usize,
        now: u64,
    ) {
        let segment = &mut queue.sent[index];
        self.reduction
            .on_retransmitted(segment.len, segment.flags & RETX == 0, now);
        segment.flags = (segment.flags & !LOST) | RETX;
        segment.at = now;
        self.lost -= 1;
        self.cursor = segment.end_seq();
        tcb.pipe += segment.len;
        self.rack.on_retransmitted(segment.seq, now);
    }

    /// The last segment was sent again as a probe (RFC 8985 section 7.3): still once in the pipe.
    pub(crate) fn on_probe_sent<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        again: bool,
        now: u64,
    ) {
        self.probe = Some(OutstandingProbe {
            end: tcb.snd_nxt,
            again,
        });
        tcb.flags |= ConnectionFlags::RECOVERING;
        if again && let Some(segment) = queue.sent.back_mut() {
            segment.flags |= RETX;
            segment.at = now;
            self.rack.on_retransmitted(segment.seq, now);
        }
    }
}
