//! Loss recovery of one connection: the scoreboard, kept as marks on the segments in flight (RFC
//! 2018, RFC 6675), the judgements of RACK-TLP (RFC 8985), and the selection of retransmissions.
//! Exists only for connections that have seen a loss, a SACK block, an unanswered tail, or pacing.

use core::ops::Range;

use crate::base::sequence::SeqNr;
use crate::congestion::RecoveryPhase;
use crate::congestion::pacing::Pacer;
use crate::congestion::reduction::{Retransmission, WindowReduction};
use crate::congestion::undo::is_echo_older;
use crate::loss::rack::{self, DetectedLosses, OutstandingProbe, Rack};
use crate::loss::sacked_ranges::SackedRanges;
use crate::queues::send_buffer::{LOST, RETX, SACKED, SendBuffer};
use crate::tcb::send_variables::{SendFlags, SendVariables};
use crate::wire::segment::Segment;

/// DupThresh (RFC 6675 section 2).
const DUP_THRESH: u32 = 3;

/// The loss state of a connection. The counts are those of the marks in `SendBuffer::sent`, and
/// every sequence number follows SND.UNA, so that none becomes too old to be compared.
#[derive(Default)]
pub(crate) struct Recovery {
    /// Number of segments marked `SACKED`, and their payload in bytes.
    pub sacked: u32,
    pub sacked_bytes: u32,
    /// Number of segments marked `LOST`: those that await retransmission.
    pub lost: u32,
    /// No segment before this awaits retransmission.
    cursor: SeqNr,
    /// The ranges that the segments marked `SACKED` cover.
    sacked_ranges: SackedRanges,
    pub rack: Rack,
    /// A tail loss probe whose answer is outstanding.
    pub probe: Option<OutstandingProbe>,
    pub pacer: Pacer,
    pub reduction: WindowReduction,
    /// Each segment before this has a record of its own.
    pub split_to: SeqNr,
    /// Retransmission timeouts since new data was last acknowledged.
    pub timeouts_in_row: u8,
    /// A duplicate ACK arrived since the last timeout: the peer receives some segments.
    pub is_answered: bool,
}

/// Segments that SACK blocks newly covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewlySacked {
    pub segments: u32,
    /// Their payload.
    pub bytes: u32,
}

/// The timestamp that an ACK echoes (RFC 7323).
#[derive(Clone, Copy)]
pub(crate) struct EchoedTimestamp {
    pub value: u32,
    /// The offset of our timestamps.
    pub offset: u32,
}

impl Recovery {
    /// Returns the state without marks; SND.UNA is `una`.
    pub(crate) fn new(una: SeqNr) -> Self {
        Recovery {
            reduction: WindowReduction::new(una),
            cursor: una,
            sacked_ranges: SackedRanges::new(una),
            rack: Rack::new(una),
            split_to: una,
            ..Recovery::default()
        }
    }

    /// Reports the segments that the cumulative ACK `ack` delivers to RACK, before they are removed
    /// from the queue. `echo`: the timestamp that the ACK echoes.
    pub(crate) fn before_ack<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &SendBuffer<R>,
        ack: SeqNr,
        echo: Option<EchoedTimestamp>,
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
                self.sacked_bytes -= segment.len;
                continue;
            }
            let again = segment.flags & RETX != 0;
            self.rack.note_order(snd, end, again);
            // An echo from before the retransmission acknowledges the original (RFC 8985 section
            // 6.2 step 2).
            let is_original = echo
                .is_some_and(|echo| again && is_echo_older(echo.value, segment.at, echo.offset));
            if let Some(echo) = echo
                && again
                && segment.seq == snd.una
            {
                self.reduction
                    .on_hole_filled(segment.seq, echo.value, echo.offset);
            }
            if !is_original {
                self.rack
                    .on_delivered(segment.at, end, again, snd.rtt.min, now);
            }
        }
    }

    /// Updates the state after a cumulative ACK removed segments from the queue, `sacked` of which
    /// were marked `SACKED`, and `lost` marked `LOST`.
    pub(crate) fn on_acked(&mut self, una: SeqNr, sacked: u32, lost: u32) {
        self.sacked -= sacked;
        self.lost -= lost;
        self.timeouts_in_row = 0;
        self.is_answered = false;
        self.rack.advance_to(una);
        self.cursor = self.cursor.max(una);
        self.split_to = self.split_to.max(una);
        self.sacked_ranges.advance_to(una);
        self.reduction.advance_to(una);
    }

    /// Marks the segments that the SACK blocks of `seg` newly cover.
    ///
    /// Blocks below SND.UNA are ignored: they are D-SACKs (RFC 2883), or come from an ACK that was
    /// overtaken by a later one, whose other blocks are valid nevertheless (RFC 2018 section 5).
    ///
    /// The cost is proportional to the newly covered segments: known ranges are skipped one by one,
    /// and the ranges that a block covers are joined into one.
    pub(crate) fn process_sack<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        seg: &Segment,
        now: u64,
    ) -> NewlySacked {
        let mut newly = NewlySacked::default();
        for &(lo, hi) in &seg.sack[..usize::from(seg.sacks)] {
            if lo.ge(hi) || hi.le(snd.una) || hi.gt(snd.nxt) {
                continue;
            }
            let mut at = lo.max(snd.una);
            while at.lt(hi) {
                if let Some(end) = self.sacked_ranges.end_of_range_at(at) {
                    at = end;
                    continue;
                }
                let next = self.sacked_ranges.next_range_after(at);
                let limit = next.map_or(hi, |next| next.min(hi));
                let found = self.mark_sacked(snd, queue, at..limit, now);
                newly.segments += found.segments;
                newly.bytes += found.bytes;
                at = limit;
            }
        }
        self.sacked += newly.segments;
        self.sacked_bytes += newly.bytes;
        if newly.segments > 0 {
            snd.set(SendFlags::RECOVERING);
        }
        newly
    }

    /// Marks the segments that lie wholly in `range`, none of which is marked yet.
    fn mark_sacked<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        range: Range<SeqNr>,
        now: u64,
    ) -> NewlySacked {
        let mut newly = NewlySacked::default();
        let mut covered = None;
        let mut index = queue
            .sent
            .partition_point(|segment| segment.seq.lt(range.start));
        while let Some(segment) = queue.sent.get_mut(index) {
            let end = segment.end_seq();
            if end.gt(range.end) {
                break;
            }
            index += 1;
            debug_assert_eq!(segment.flags & SACKED, 0, "outside of every range");
            if segment.flags & LOST != 0 {
                self.lost -= 1;
            } else {
                snd.pipe -= segment.len;
            }
            segment.flags = (segment.flags | SACKED) & !LOST;
            newly.segments += 1;
            newly.bytes += segment.len;
            let start = covered.map_or(segment.seq, |(start, _)| start);
            covered = Some((start, end));
            let again = segment.flags & RETX != 0;
            self.rack.note_order(snd, end, again);
            self.rack
                .on_delivered(segment.at, end, again, snd.rtt.min, now);
        }
        if let Some((start, end)) = covered {
            self.sacked_ranges.insert(start, end);
        }
        newly
    }

    /// Marks a segment as lost, unless it is already marked `SACKED` or `LOST`.
    fn mark_lost<R>(&mut self, snd: &mut SendVariables, queue: &mut SendBuffer<R>, index: usize) {
        if let Some(segment) = queue.sent.get_mut(index)
            && segment.flags & (SACKED | LOST) == 0
        {
            segment.flags |= LOST;
            snd.pipe -= segment.len;
            self.lost += 1;
            self.cursor = self.cursor.min(segment.seq);
            snd.set(SendFlags::RECOVERING);
        }
    }

    /// Lets RACK judge the segments in flight, and marks the lost ones.
    pub(crate) fn detect_losses<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        now: u64,
    ) -> DetectedLosses {
        let in_doubt = snd.phase == RecoveryPhase::Open && self.sacked < DUP_THRESH;
        let mut rack = core::mem::take(&mut self.rack);
        let found = rack.detect_losses(snd, queue, in_doubt, now, |snd, queue, index| {
            self.mark_lost(snd, queue, index)
        });
        self.rack = rack;
        found
    }

    /// Withdraws the loss marks of a timeout that was spurious (RFC 4015 section 3.2). The segments
    /// are judged anew, because some of them may be lost nevertheless.
    pub(crate) fn withdraw_lost_marks<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        now: u64,
    ) {
        if self.lost > 0 {
            for segment in queue
                .sent
                .iter_mut()
                .filter(|segment| segment.flags & LOST != 0)
            {
                segment.flags &= !LOST;
                snd.pipe += segment.len;
            }
            self.lost = 0;
        }
        self.rack.judge_again(snd, queue, now);
    }

    /// Begins fast recovery.
    pub(crate) fn begin_fast_recovery(&mut self, snd: &mut SendVariables) {
        snd.phase = RecoveryPhase::Recovery;
        snd.set(SendFlags::RECOVERING);
        self.probe = None;
    }

    /// Handles the answer to a tail loss probe (RFC 8985 section 7.4.2). Returns the probe if it
    /// repaired a loss, to which the window must react.
    pub(crate) fn probe_answered(&mut self, seg: &Segment, dup: bool) -> Option<OutstandingProbe> {
        let probe = self.probe.filter(|probe| seg.ack.ge(probe.end))?;
        let twice = rack::dsack_block(seg).is_some_and(|(_, hi)| hi == probe.end);
        let repaired = probe.again && !twice && seg.ack.gt(probe.end);
        if !probe.again || twice || repaired || (dup && seg.sacks == 0) {
            self.probe = None;
        }
        repaired.then_some(probe)
    }

    /// Marks the first segment as lost: without SACK it is the lost one (RFC 6582 section 3.2).
    pub(crate) fn mark_first_lost<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
    ) {
        self.mark_lost(snd, queue, 0);
    }

    /// Returns to the fast path if no segment is marked any more.
    pub(crate) fn finish_if_settled(&mut self, snd: &mut SendVariables) {
        if snd.phase == RecoveryPhase::Open
            && self.sacked == 0
            && self.lost == 0
            && self.probe.is_none()
        {
            snd.clear(SendFlags::RECOVERING);
            self.rack.forget_acknowledged(snd.una);
        }
    }

    /// Marks the segments lost at a retransmission timeout (RFC 8985 section 6.3): the first one,
    /// and those whose time to arrive has passed; without `has_sack` all (RFC 5681 section 3.1). SND.NXT
    /// is not moved back, which would make our pure ACKs unacceptable to the peer.
    pub(crate) fn mark_after_timeout<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        has_sack: bool,
        now: u64,
    ) {
        // A SACKed first segment means that the peer reneged (RFC 2018 section 8). It may have
        // dropped all data that it reported, and SACKed segments are not judged again, so all of
        // them count as lost.
        let renege = queue
            .sent
            .front()
            .is_some_and(|segment| segment.flags & SACKED != 0);
        let all = !has_sack;
        (self.lost, snd.pipe) = (0, 0);
        for (index, segment) in queue.sent.iter_mut().enumerate() {
            let sacked = segment.flags & SACKED != 0;
            if renege {
                segment.flags &= !SACKED;
            } else if sacked {
                continue;
            }
            if index == 0
                || all
                || sacked
                || segment.flags & LOST != 0
                || self.rack.is_expired(snd, segment.at, now)
            {
                segment.flags |= LOST;
                self.lost += 1;
            } else {
                snd.pipe += segment.len;
            }
        }
        if renege {
            (self.sacked, self.sacked_bytes) = (0, 0);
            self.sacked_ranges.clear();
        }
        self.reduction.point = snd.nxt;
        self.cursor = snd.una;
        self.probe = None;
        self.is_answered = false;
        snd.phase = RecoveryPhase::Loss;
        snd.set(SendFlags::RECOVERING);
    }

    /// Recounts the marks after segments that exceed the path MTU were resegmented and marked as
    /// lost. That is no sign of congestion (RFC 1191 section 6.5).
    pub(crate) fn recount_lost<R>(&mut self, snd: &mut SendVariables, queue: &SendBuffer<R>) {
        (self.lost, snd.pipe) = (0, 0);
        for segment in &queue.sent {
            self.lost += u32::from(segment.flags & LOST != 0);
            snd.pipe += if segment.in_pipe() { segment.len } else { 0 };
        }
        self.cursor = snd.una;
        snd.set(SendFlags::RECOVERING);
    }

    /// Returns the index of the next segment to retransmit.
    pub(crate) fn next_lost<R>(&mut self, queue: &SendBuffer<R>) -> Option<usize> {
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

    /// Records the retransmission of the segment at `index`.
    pub(crate) fn on_retransmitted<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        index: usize,
        now: u64,
    ) {
        let segment = &mut queue.sent[index];
        self.reduction.on_retransmitted(&Retransmission {
            seq: segment.seq,
            end: segment.seq + segment.len.max(1),
            len: segment.len,
            is_first: segment.flags & RETX == 0,
            at: now,
        });
        segment.flags = (segment.flags & !LOST) | RETX;
        segment.at = now;
        self.lost -= 1;
        self.cursor = segment.end_seq();
        snd.pipe += segment.len;
        self.rack.on_retransmitted(segment.seq, now);
    }

    /// Records that a tail loss probe was sent (RFC 8985 section 7.3). The pipe counts a
    /// retransmission of the last segment only once.
    pub(crate) fn on_probe_sent<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        probe: OutstandingProbe,
        now: u64,
    ) {
        self.probe = Some(probe);
        snd.set(SendFlags::RECOVERING);
        if probe.again
            && let Some(segment) = queue.sent.back_mut()
        {
            segment.flags |= RETX;
            segment.at = now;
            self.rack.on_retransmitted(segment.seq, now);
        }
    }
}
