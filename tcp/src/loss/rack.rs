//! RACK-TLP (RFC 8985): losses told by time. What was sent clearly before something that was
//! delivered is lost, wherever it stands; the tail is probed before the retransmission timeout.
//! State of [`crate::loss::recovery::Recovery`]; the timer shares the connection's one deadline.

use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use std::collections::VecDeque;

use crate::base::sequence::SeqNr;
use crate::queues::send_queue::{LOST, RETX, SACKED, TransmitQueue};
use crate::wire::segment::Segment;

/// Section 6.2.1: D-SACKs widen the window for so many recoveries.
const DSACK_PERSIST: u8 = 16;

/// How long to wait for what may only be late (section 6.2 step 4).
#[derive(Clone, Copy, Default)]
pub(crate) struct ReorderWindow {
    /// RACK.reo_wnd_mult less one.
    widened: u8,
    /// RACK.reo_wnd_persist.
    persist: u8,
}

#[derive(Default)]
pub(crate) struct Rack {
    /// RACK.xmit_ts, RACK.end_seq: of the most recently sent segment that was delivered.
    xmit: u64,
    end: SeqNr,
    /// RACK.rtt: its round trip.
    rtt: u64,
    /// RACK.fack: highest sequence number delivered.
    fack: SeqNr,
    pub reorder_window: ReorderWindow,
    /// RACK.dsack_round: adapt once a round.
    dsack_round: Option<SeqNr>,
    /// Retransmissions in the order they left.
    retransmitted: VecDeque<(SeqNr, u64)>,
    /// First transmissions before this were all judged.
    pub edge: SeqNr,
}

/// TLP.end_seq and TLP.is_retrans (section 7.1).
#[derive(Clone, Copy)]
pub(crate) struct OutstandingProbe {
    pub end: SeqNr,
    pub again: bool,
}

/// What the detection found.
#[derive(Default)]
pub(crate) struct DetectedLosses {
    /// Indices in `sent`, in order of judgement.
    pub retransmitted: u64,
    /// When the next undecided segment is lost unless it arrives; 0: none.
    pub due: u64,
}

impl Rack {
    pub(crate) fn new(una: SeqNr) -> Self {
        Rack {
            end: una,
            fack: una,
            edge: una,
            ..Rack::default()
        }
    }

    /// Section 6.2 step 2, for one delivered segment.
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
        // A retransmission that seems to arrive at once is the original.
        if again && rtt < u64::from(min_rtt) {
            return;
        }
        if at > self.xmit || (at == self.xmit && end.gt(self.end)) {
            self.xmit = at;
            self.end = end;
            self.rtt = rtt;
        }
    }

    /// Step 3: a first transmission below the highest delivered one was delivered later.
    #[inline]
    pub(crate) fn note_order(&mut self, tcb: &mut Tcb, end: SeqNr, again: bool) {
        if end.gt(self.fack) {
            self.fack = end;
        } else if end.lt(self.fack) && !again {
            tcb.flags |= ConnectionFlags::REORDERING_SEEN;
        }
    }

    /// RACK.reo_wnd, step 4.
    fn reorder_timeout(&self, tcb: &Tcb, in_doubt: bool) -> u64 {
        if !tcb.has(ConnectionFlags::REORDERING_SEEN) && !in_doubt {
            return 0;
        }
        let step = u64::from(tcb.rtt.min) / 4;
        (step * (1 + u64::from(self.reorder_window.widened))).min(tcb.rtt.srtt)
    }

    /// Step 4: the peer received something twice, so patience was too short.
    pub(crate) fn on_dsack(&mut self, tcb: &Tcb) {
        if self.dsack_round.is_some_and(|round| tcb.snd_una.ge(round)) {
            self.dsack_round = None;
        }
        if self.dsack_round.is_none() {
            self.dsack_round = Some(tcb.snd_nxt);
            self.reorder_window.widened = self.reorder_window.widened.saturating_add(1);
            self.reorder_window.persist = DSACK_PERSIST;
        }
    }

    /// A recovery ended.
    pub(crate) fn on_recovery_end(&mut self) {
        self.reorder_window.persist = self.reorder_window.persist.saturating_sub(1);
        if self.reorder_window.persist == 0 {
            self.reorder_window.widened = 0;
        }
    }

    /// Nothing that left after the first unacknowledged segment last did was delivered yet: its
    /// fate is open, and what does arrive shows that the path is not silent.
    pub(crate) fn is_first_unjudged<R>(&self, queue: &TransmitQueue<R>) -> bool {
        queue
            .sent
            .front()
            .is_some_and(|segment| self.xmit < segment.at)
    }

    fn sent_before(&self, at: u64, end: SeqNr) -> bool {
        at < self.xmit || (at == self.xmit && end.lt(self.end))
    }

    /// Step 5: calls `lose` with what is lost by now. First transmissions left in the order of
    /// their sequence numbers and retransmissions in that of their list, so only the first of each
    /// that is undecided is looked at again.
    pub(crate) fn detect_losses<R>(
        &mut self,
        tcb: &mut Tcb,
        queue: &mut TransmitQueue<R>,
        in_doubt: bool,
        now: u64,
        mut lose: impl FnMut(&mut Tcb, &mut TransmitQueue<R>, usize),
    ) -> DetectedLosses {
        let mut found = DetectedLosses::default();
        if self.xmit == 0 {
            return found;
        }
        let patience = self.rtt + self.reorder_timeout(tcb, in_doubt);
        let mut i = queue.first_after(self.edge);
        while let Some(segment) = queue.sent.get(i) {
            let (at, end) = (segment.at, segment.end_seq());
            if segment.flags & (SACKED | LOST | RETX) == 0 {
                if !self.sent_before(at, end) {
                    break;
                }
                if at + patience > now {
                    found.due = at + patience;
                    break;
                }
                lose(tcb, queue, i);
            }
            self.edge = end;
            i += 1;
        }
        while let Some(&(seq, at)) = self.retransmitted.front() {
            if seq.ge(tcb.snd_una) {
                let i = queue.first_after(seq);
                if let Some(segment) = queue.sent.get(i)
                    && segment.at == at
                    && segment.flags & (SACKED | LOST) == 0
                {
                    if !self.sent_before(at, segment.end_seq()) {
                        break;
                    }
                    if at + patience > now {
                        let due = at + patience;
                        found.due = if found.due == 0 {
                            due
                        } else {
                            found.due.min(due)
                        };
                        break;
                    }
                    lose(tcb, queue, i);
                    found.retransmitted += 1;
                }
            }
            self.retransmitted.pop_front();
        }
        found
    }

    /// Section 6.3: on a timeout the first segment is lost, and what had its time.
    pub(crate) fn is_expired(&self, tcb: &Tcb, at: u64, now: u64) -> bool {
        at + self.rtt + self.reorder_timeout(tcb, true) <= now
    }

    pub(crate) fn on_retransmitted(&mut self, seq: SeqNr, now: u64) {
        self.retransmitted.push_back((seq, now));
    }

    pub(crate) fn forget_retransmitted(&mut self) {
        self.retransmitted.clear();
    }
}

/// The first block reports a duplicate (RFC 2883 section 4): it lies below the cumulative ACK
/// or inside the second block.
pub(crate) fn dsack_block(seg: &Segment) -> Option<(SeqNr, SeqNr)> {
    if seg.sacks == 0 {
        return None;
    }
    let (lo, hi) = seg.sack[0];
    let inside = seg.sacks > 1 && lo.ge(seg.sack[1].0) && hi.le(seg.sack[1].1);
    (lo.lt(hi) && (hi.le(seg.ack) || inside)).then_some((lo, hi))
}
