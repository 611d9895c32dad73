//! RACK-TLP (RFC 8985): losses told by time. What was sent clearly before something that was
//! delivered is lost, wherever it stands; the tail is probed before the retransmission timeout.
//! State of [`crate::loss::recovery::Recovery`]; the timer shares the connection's one deadline.

use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use std::collections::VecDeque;

use crate::base::sequence::SeqNr;
use crate::queues::send_queue::{LOST, RETX, SACKED, SendQueue};
use crate::wire::segment::Segment;

/// Section 6.2.1: D-SACKs widen the window for so many recoveries.
const PERSIST: u8 = 16;

/// How long to wait for what may only be late (section 6.2 step 4).
#[derive(Clone, Copy, Default)]
pub(crate) struct Patience {
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
    pub patience: Patience,
    /// RACK.dsack_round: adapt once a round.
    dsack_round: Option<SeqNr>,
    /// Repetitions in the order they left.
    repeated: VecDeque<(SeqNr, u64)>,
    /// First transmissions before this were all judged.
    pub edge: SeqNr,
}

/// TLP.end_seq and TLP.is_retrans (section 7.1).
#[derive(Clone, Copy)]
pub(crate) struct Probe {
    pub end: SeqNr,
    pub again: bool,
}

/// What the detection found.
#[derive(Default)]
pub(crate) struct Detected {
    /// Indices in `sent`, in order of judgement.
    pub repeated: u64,
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
    pub(crate) fn delivered(&mut self, at: u64, end: SeqNr, again: bool, min_rtt: u32, now: u64) {
        let rtt = now.saturating_sub(at);
        // A repetition that seems to arrive at once is the original.
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
    pub(crate) fn order(&mut self, h: &mut Tcb, end: SeqNr, again: bool) {
        if end.gt(self.fack) {
            self.fack = end;
        } else if end.lt(self.fack) && !again {
            h.flags |= ConnectionFlags::REORDERING_SEEN;
        }
    }

    /// RACK.reo_wnd, step 4.
    fn window(&self, h: &Tcb, in_doubt: bool) -> u64 {
        if !h.has(ConnectionFlags::REORDERING_SEEN) && !in_doubt {
            return 0;
        }
        let step = u64::from(h.rtt.min) / 4;
        (step * (1 + u64::from(self.patience.widened))).min(h.rtt.srtt)
    }

    /// Step 4: the peer received something twice, so patience was too short.
    pub(crate) fn dsack(&mut self, h: &Tcb) {
        if self.dsack_round.is_some_and(|r| h.snd_una.ge(r)) {
            self.dsack_round = None;
        }
        if self.dsack_round.is_none() {
            self.dsack_round = Some(h.snd_nxt);
            self.patience.widened = self.patience.widened.saturating_add(1);
            self.patience.persist = PERSIST;
        }
    }

    /// A recovery ended.
    pub(crate) fn recovered(&mut self) {
        self.patience.persist = self.patience.persist.saturating_sub(1);
        if self.patience.persist == 0 {
            self.patience.widened = 0;
        }
    }

    /// Nothing that left after the first unacknowledged segment last did was delivered yet: its
    /// fate is open, and what does arrive shows that the path is not silent.
    pub(crate) fn all_before<R>(&self, tx: &SendQueue<R>) -> bool {
        tx.sent.front().is_some_and(|s| self.xmit < s.at)
    }

    fn sent_before(&self, at: u64, end: SeqNr) -> bool {
        at < self.xmit || (at == self.xmit && end.lt(self.end))
    }

    /// Step 5: calls `lose` with what is lost by now. First transmissions left in the order of
    /// their sequence numbers and repetitions in that of their list, so only the first of each
    /// that is undecided is looked at again.
    pub(crate) fn detect<R>(
        &mut self,
        h: &mut Tcb,
        tx: &mut SendQueue<R>,
        in_doubt: bool,
        now: u64,
        mut lose: impl FnMut(&mut Tcb, &mut SendQueue<R>, usize),
    ) -> Detected {
        let mut found = Detected::default();
        if self.xmit == 0 {
            return found;
        }
        let patience = self.rtt + self.window(h, in_doubt);
        let mut i = tx.first_after(self.edge);
        while let Some(s) = tx.sent.get(i) {
            let (at, end) = (s.at, s.end());
            if s.flags & (SACKED | LOST | RETX) == 0 {
                if !self.sent_before(at, end) {
                    break;
                }
                if at + patience > now {
                    found.due = at + patience;
                    break;
                }
                lose(h, tx, i);
            }
            self.edge = end;
            i += 1;
        }
        while let Some(&(seq, at)) = self.repeated.front() {
            if seq.ge(h.snd_una) {
                let i = tx.first_after(seq);
                if let Some(s) = tx.sent.get(i)
                    && s.at == at
                    && s.flags & (SACKED | LOST) == 0
                {
                    if !self.sent_before(at, s.end()) {
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
                    lose(h, tx, i);
                    found.repeated += 1;
                }
            }
            self.repeated.pop_front();
        }
        found
    }

    /// Section 6.3: on a timeout the first segment is lost, and what had its time.
    pub(crate) fn expired(&self, h: &Tcb, at: u64, now: u64) -> bool {
        at + self.rtt + self.window(h, true) <= now
    }

    pub(crate) fn repeat(&mut self, seq: SeqNr, now: u64) {
        self.repeated.push_back((seq, now));
    }

    pub(crate) fn settle(&mut self) {
        self.repeated.clear();
    }
}

/// The first block tells of a duplicate (RFC 2883 section 4): it lies below the cumulative ACK
/// or inside the second block.
pub(crate) fn dsack(seg: &Segment) -> Option<(SeqNr, SeqNr)> {
    if seg.sacks == 0 {
        return None;
    }
    let (lo, hi) = seg.sack[0];
    let inside = seg.sacks > 1 && lo.ge(seg.sack[1].0) && hi.le(seg.sack[1].1);
    (lo.lt(hi) && (hi.le(seg.ack) || inside)).then_some((lo, hi))
}
