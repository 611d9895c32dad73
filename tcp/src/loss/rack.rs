//! RACK-TLP (RFC 8985): loss detection by time. A segment is lost if one that was sent sufficiently
//! later has been delivered, regardless of their sequence numbers. If no ACK arrives, the last
//! segment is probed before the retransmission timeout.
//!
//! Part of [`Recovery`](crate::loss::recovery::Recovery). The reordering timer and the probe timeout
//! share the one timer of the connection (section 8).

use std::collections::VecDeque;

use crate::base::sequence::SeqNr;
use crate::queues::send_buffer::{LOST, RETX, SACKED, SendBuffer};
use crate::tcb::send_variables::{SendFlags, SendVariables};
use crate::wire::segment::Segment;

/// Number of recoveries for which a D-SACK keeps the reordering window wide (section 6.2 step 4).
const DSACK_PERSIST: u8 = 16;

/// The extension of the reordering window (RACK.reo_wnd, section 6.2 step 4) after the peer
/// received segments twice. It outlives the other state of RACK, which an idle connection frees.
#[derive(Clone, Copy, Default)]
pub(crate) struct ReorderWindow {
    /// RACK.reo_wnd_mult minus one.
    widened: u8,
    /// RACK.reo_wnd_persist: recoveries until the window is narrow again.
    persist: u8,
}

/// The state of RACK for one connection. Times are in ns.
#[derive(Default)]
pub(crate) struct Rack {
    /// RACK.xmit_ts, RACK.end_seq: the send time and the end of the most recently sent among the
    /// delivered segments. The sequence number only breaks ties between segments sent at the same
    /// time, so it cannot become too old to be compared.
    xmit: u64,
    end: SeqNr,
    /// RACK.rtt: the round-trip time of that segment.
    rtt: u64,
    /// RACK.fack: the highest sequence number delivered, never below SND.UNA.
    fack: SeqNr,
    pub reorder_window: ReorderWindow,
    /// RACK.dsack_round: D-SACKs widen the window once per round trip, which ends when this is
    /// acknowledged.
    dsack_round: Option<SeqNr>,
    /// Retransmissions in the order in which they were sent, with the time. Entries whose segments
    /// have since been acknowledged or sent again are skipped.
    retransmitted: VecDeque<(SeqNr, u64)>,
    /// All first transmissions before this have been judged. Never below SND.UNA.
    judged_to: SeqNr,
    /// The time at which loss marks were withdrawn. Segments sent before it are judged as if they
    /// had been sent at that time, so that they have a full reordering window from then on to
    /// arrive.
    reprieved_at: u64,
}

/// A tail loss probe whose answer is outstanding: TLP.end_seq and TLP.is_retrans (section 7.1).
#[derive(Clone, Copy)]
pub(crate) struct OutstandingProbe {
    pub end: SeqNr,
    pub again: bool,
    /// A reduction of the window after the segment was first sent covers its loss too.
    pub is_answered: bool,
}

/// The result of loss detection.
#[derive(Default)]
pub(crate) struct DetectedLosses {
    /// Number of lost segments that were retransmissions.
    pub retransmitted: u64,
    /// The time at which the next undecided segment is lost unless it arrives, in ns; 0: none is
    /// undecided.
    pub due: u64,
}

impl Rack {
    /// Returns the state before any delivery; SND.UNA is `una`.
    pub(crate) fn new(una: SeqNr) -> Self {
        Rack {
            end: una,
            fack: una,
            judged_to: una,
            ..Rack::default()
        }
    }

    /// Records the delivery of a segment that ends at `end` and was sent at `at` (section 6.2 step
    /// 2). `again`: it had been sent before.
    #[inline]
    pub(crate) fn on_delivered(
        &mut self,
        at: u64,
        end: SeqNr,
        again: bool,
        min_rtt: u32,
        now: u64,
    ) {
        let rtt = now.saturating_sub(at);
        // A retransmission cannot arrive faster than the minimum RTT: this is the original.
        if again && rtt < u64::from(min_rtt) {
            return;
        }
        if at > self.xmit || (at == self.xmit && end.gt(self.end)) {
            self.xmit = at;
            self.end = end;
            self.rtt = rtt;
        }
    }

    /// Detects reordering: a first transmission delivered after one with a higher sequence number
    /// was reordered (section 6.2 step 3).
    #[inline]
    pub(crate) fn note_order(&mut self, snd: &mut SendVariables, end: SeqNr, again: bool) {
        if end.gt(self.fack) {
            self.fack = end;
        } else if end.lt(self.fack) && !again {
            snd.set(SendFlags::REORDERING_SEEN);
        }
    }

    /// Advances SND.UNA to `una`. Every stored sequence number follows it: one left behind would be
    /// taken for one ahead once 2^31 more bytes are acknowledged.
    #[inline]
    pub(crate) fn advance_to(&mut self, una: SeqNr) {
        self.judged_to = self.judged_to.max(una);
        self.fack = self.fack.max(una);
        if self.dsack_round.is_some_and(|round| una.ge(round)) {
            self.dsack_round = None;
        }
    }

    /// Returns the reordering window RACK.reo_wnd (section 6.2 step 4). Unless reordering was seen,
    /// it is 0 once losses are certain: in a recovery, or when three segments are SACKed.
    fn reorder_timeout(&self, snd: &SendVariables, in_doubt: bool) -> u64 {
        if !snd.has(SendFlags::REORDERING_SEEN) && !in_doubt {
            return 0;
        }
        let step = u64::from(snd.rtt.min) / 4;
        (step * (1 + u64::from(self.reorder_window.widened))).min(snd.rtt.srtt)
    }

    /// Widens the reordering window, which was too short: the peer received a segment twice
    /// (section 6.2 step 4).
    pub(crate) fn on_dsack(&mut self, snd: &SendVariables) {
        if self.dsack_round.is_none() {
            self.dsack_round = Some(snd.nxt);
            self.reorder_window.widened = self.reorder_window.widened.saturating_add(1);
            self.reorder_window.persist = DSACK_PERSIST;
        }
    }

    /// Counts the end of a recovery, the unit in which the lifetime of a widened reordering window
    /// is measured.
    pub(crate) fn on_recovery_end(&mut self) {
        self.reorder_window.persist = self.reorder_window.persist.saturating_sub(1);
        if self.reorder_window.persist == 0 {
            self.reorder_window.widened = 0;
        }
    }

    /// Returns whether no segment has been delivered that was sent after the last transmission of
    /// the first unacknowledged segment. Then the loss of that segment cannot be detected yet, and
    /// the segments that arrive show that the path still carries traffic.
    pub(crate) fn is_first_unjudged<R>(&self, queue: &SendBuffer<R>) -> bool {
        queue
            .sent
            .front()
            .is_some_and(|segment| self.xmit < segment.at)
    }

    /// Returns whether a segment sent at `at`, which ends at `end`, was sent before one that has
    /// been delivered.
    fn is_overtaken(&self, at: u64, end: SeqNr) -> bool {
        at < self.xmit || (at == self.xmit && end.lt(self.end))
    }

    /// Judges the segments in flight (section 6.2 step 5), and calls `lose` with the index of each
    /// segment that is now lost.
    ///
    /// First transmissions were sent in the order of their sequence numbers, and retransmissions in
    /// the order of their list. So only the first undecided one of each has to be checked again,
    /// and the cost of an ACK is proportional to the number of segments that it decides.
    pub(crate) fn detect_losses<R>(
        &mut self,
        snd: &mut SendVariables,
        queue: &mut SendBuffer<R>,
        in_doubt: bool,
        now: u64,
        mut lose: impl FnMut(&mut SendVariables, &mut SendBuffer<R>, usize),
    ) -> DetectedLosses {
        let mut found = DetectedLosses::default();
        if self.xmit == 0 {
            return found;
        }
        let allowed = self.rtt + self.reorder_timeout(snd, in_doubt);
        let reprieved_at = self.reprieved_at;
        let lost_at = |sent_at: u64| sent_at.max(reprieved_at) + allowed;
        let mut index = queue.first_after(self.judged_to);
        while let Some(segment) = queue.sent.get(index) {
            let (at, end) = (segment.at, segment.end_seq());
            if segment.flags & (SACKED | LOST | RETX) == 0 {
                if !self.is_overtaken(at, end) {
                    break;
                }
                if lost_at(at) > now {
                    found.due = lost_at(at);
                    break;
                }
                lose(snd, queue, index);
            }
            self.judged_to = end;
            index += 1;
        }
        while let Some(&(seq, at)) = self.retransmitted.front() {
            if seq.ge(snd.una) {
                let index = queue.first_after(seq);
                if let Some(segment) = queue.sent.get(index)
                    && segment.at == at
                    && segment.flags & (SACKED | LOST) == 0
                {
                    if !self.is_overtaken(at, segment.end_seq()) {
                        break;
                    }
                    if lost_at(at) > now {
                        found.due = match found.due {
                            0 => lost_at(at),
                            due => due.min(lost_at(at)),
                        };
                        break;
                    }
                    lose(snd, queue, index);
                    found.retransmitted += 1;
                }
            }
            self.retransmitted.pop_front();
        }
        found
    }

    /// Returns whether a segment sent at `at` is lost when the retransmission timer fires (section
    /// 6.3).
    pub(crate) fn is_expired(&self, snd: &SendVariables, at: u64, now: u64) -> bool {
        at + self.rtt + self.reorder_timeout(snd, true) <= now
    }

    /// Records the retransmission of the segment at `seq`.
    pub(crate) fn on_retransmitted(&mut self, seq: SeqNr, now: u64) {
        self.retransmitted.push_back((seq, now));
    }

    /// Drops acknowledged retransmissions after a recovery left no marks. Those still in flight
    /// stay listed: nothing else would detect their loss before a timeout.
    pub(crate) fn forget_acknowledged(&mut self, una: SeqNr) {
        self.retransmitted.retain(|&(seq, _)| seq.ge(una));
    }

    /// Schedules a new judgement of all segments in flight after loss marks were withdrawn, with
    /// the full time to arrive from now on. Otherwise nothing would judge these segments any more,
    /// and a loss among them would cost a timeout.
    pub(crate) fn judge_again<R>(&mut self, snd: &SendVariables, queue: &SendBuffer<R>, now: u64) {
        self.reprieved_at = now;
        self.judged_to = snd.una;
        let in_flight = queue.sent.iter();
        let mut retransmitted: Vec<_> = in_flight
            .filter(|segment| segment.flags & (SACKED | RETX) == RETX)
            .map(|segment| (segment.seq, segment.at))
            .collect();
        // Stable: among those sent at the same time, the first in the stream was sent first.
        retransmitted.sort_by_key(|&(_, at)| at);
        self.retransmitted = retransmitted.into();
    }
}

/// Returns the D-SACK block of a segment, if it has one: the first block reports a duplicate if it
/// lies below the cumulative ACK or inside the second block (RFC 2883 section 4).
pub(crate) fn dsack_block(seg: &Segment) -> Option<(SeqNr, SeqNr)> {
    if seg.sacks == 0 {
        return None;
    }
    let (lo, hi) = seg.sack[0];
    let inside = seg.sacks > 1 && lo.ge(seg.sack[1].0) && hi.le(seg.sack[1].1);
    (lo.lt(hi) && (hi.le(seg.ack) || inside)).then_some((lo, hi))
}
