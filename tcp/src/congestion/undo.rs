//! Taking back a reduction of the window that turns out to have been needless (RFC 3708, RFC 3522,
//! RFC 4015): what the window was before, and what shows whether the reduction was deserved.
//!
//! ```text
//! a recovery begins          PriorWindow: window and controller before the reduction
//!   each retransmission      is recorded: the peer must report every one of them as a duplicate
//!   an echoed timestamp      may show that a retransmission filled its hole: the reduction stands
//! the recovery ends          D-SACKs of its last retransmissions may still be on their way
//! a round trip later         the record is dropped: the reduction stands
//! ```

use std::collections::BTreeMap;

use crate::base::sequence::{SeqNr, StreamPositions};
use crate::base::time::{Instant, timestamp_at};
use crate::congestion::controller::Controller;
use crate::congestion::window::CongestionWindow;

/// What a reduction replaced, until it is known whether it was deserved.
pub(super) struct PriorWindow {
    pub(super) window: CongestionWindow,
    pub(super) controller: Controller,
    /// When the first retransmission of the recovery was sent in ns, 0: none was.
    first_at: u64,
    positions: StreamPositions,
    /// The retransmissions of the recovery that no D-SACK has reported yet, by where the segment begins,
    /// so that a D-SACK block costs what it finds.
    unexplained: BTreeMap<u64, RetransmittedSegment>,
    ended: Option<EpisodeEnd>,
}

/// A segment that a recovery sent again.
struct RetransmittedSegment {
    end: u64,
    /// How many times, less the D-SACKs that reported it.
    times: u32,
    /// When it was sent again first, in ns.
    first_at: u64,
    /// The timestamp of the last segment that reported it.
    reported: Option<u32>,
}

/// When the recovery has ended, and until when the answers to its retransmissions may arrive.
struct EpisodeEnd {
    /// SND.NXT at the end. Answers to what was sent later come after those to the retransmissions.
    next: SeqNr,
    /// The same for a connection that sends nothing more, in ns: a retransmission timeout later.
    until: u64,
}

impl PriorWindow {
    /// A recovery begins while SND.UNA is `una`, with this window and controller.
    pub(super) fn new(window: CongestionWindow, controller: Controller, una: SeqNr) -> Self {
        PriorWindow {
            window,
            controller,
            first_at: 0,
            positions: StreamPositions::new(una),
            unexplained: BTreeMap::new(),
            ended: None,
        }
    }

    /// The segment from `seq` to `end` was sent again. Only retransmissions of the recovery itself count;
    /// what is sent again after it says nothing of it.
    pub(super) fn on_retransmitted(&mut self, seq: SeqNr, end: SeqNr, now: u64) {
        if self.ended.is_some() {
            return;
        }
        if self.first_at == 0 {
            self.first_at = now;
        }
        let start = self.positions.position_of(seq);
        let end = self.positions.position_of(end);
        let segment = self
            .unexplained
            .entry(start)
            .or_insert(RetransmittedSegment {
                end,
                times: 0,
                first_at: now,
                reported: None,
            });
        segment.times += 1;
    }

    /// The peer reports that it received `lo..hi` twice (RFC 2883). Each segment of the recovery that lies
    /// wholly in it was sent again once for nothing; nothing else counts, so that duplicates made by the
    /// network, or reports of older recoveries, cannot excuse a loss. `timestamp`: that of the segment
    /// that reports it; with one that is not newer it may be the same report, duplicated by the network.
    pub(super) fn on_dsack(&mut self, lo: SeqNr, hi: SeqNr, timestamp: Option<u32>) {
        let lo = self.positions.position_of(lo);
        let hi = self.positions.position_of(hi);
        let mut at = lo;
        while at < hi {
            let Some((&start, segment)) = self.unexplained.range_mut(at..hi).next() else {
                return;
            };
            let end = segment.end;
            if end > hi {
                return;
            }
            at = end.max(at + 1);
            let is_new =
                |last: u32| timestamp.is_none_or(|new| (new.wrapping_sub(last) as i32) > 0);
            if !segment.reported.is_none_or(is_new) {
                continue;
            }
            segment.reported = timestamp;
            segment.times -= 1;
            if segment.times == 0 {
                self.unexplained.remove(&start);
            }
        }
    }

    /// The segment at `seq` is acknowledged by an ACK with this echo. Whether a retransmission of it
    /// arrived first, so that it was needed.
    pub(super) fn is_filled_by_retransmission(
        &self,
        seq: SeqNr,
        echo: u32,
        timestamp_offset: u32,
    ) -> bool {
        let segment = self.unexplained.get(&self.positions.position_of(seq));
        segment.is_some_and(|segment| !is_echo_older(echo, segment.first_at, timestamp_offset))
    }

    /// Whether the peer has reported every retransmission of the recovery as a duplicate (RFC 3708 section 2):
    /// it had all the originals, and nothing was lost.
    pub(super) fn is_explained(&self) -> bool {
        self.first_at != 0 && self.unexplained.is_empty()
    }

    /// Whether the peer echoes a time before the first retransmission: the originals arrived (Eifel,
    /// RFC 3522 section 3.2).
    pub(super) fn is_answered_by_original(&self, echo: u32, timestamp_offset: u32) -> bool {
        self.first_at != 0 && is_echo_older(echo, self.first_at, timestamp_offset)
    }

    /// The recovery ended while SND.NXT was `next`. Until `until` (ns), unless data sent from now on is
    /// acknowledged before, D-SACKs of its retransmissions may arrive.
    pub(super) fn on_recovery_end(&mut self, next: SeqNr, until: u64) {
        self.ended = Some(EpisodeEnd { next, until });
    }

    /// Whether no answer to a retransmission of the recovery can come any more, now that SND.UNA is `una`.
    pub(super) fn is_outlived_by(&self, una: SeqNr) -> bool {
        self.ended.as_ref().is_some_and(|end| una.gt(end.next))
    }

    /// The same, by the time `now` (ns).
    pub(super) fn is_outdated(&self, now: u64) -> bool {
        self.ended.as_ref().is_some_and(|end| now > end.until)
    }
}

/// Whether the echoed timestamp is before that of a segment sent at `at` (ns).
pub(crate) fn is_echo_older(echo: u32, at: u64, timestamp_offset: u32) -> bool {
    let sent = timestamp_at(Instant(at), timestamp_offset);
    (echo.wrapping_sub(sent) as i32) < 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CongestionControl;

    /// The segment 1:1001 was sent again twice, 10 and 40 ms after the start.
    fn sent_again_twice() -> PriorWindow {
        let controller = Controller::new(CongestionControl::NewReno);
        let mut prior = PriorWindow::new(CongestionWindow::CLOSED, controller, SeqNr(1));
        prior.on_retransmitted(SeqNr(1), SeqNr(1001), 10_000_000);
        prior.on_retransmitted(SeqNr(1), SeqNr(1001), 40_000_000);
        prior
    }

    #[test]
    fn a_doubled_report_counts_once() {
        let mut prior = sent_again_twice();
        prior.on_dsack(SeqNr(1), SeqNr(1001), Some(u32::MAX));
        prior.on_dsack(SeqNr(1), SeqNr(1001), Some(u32::MAX));
        assert!(!prior.is_explained(), "the network doubled the ACK");
        prior.on_dsack(SeqNr(1), SeqNr(1001), Some(0));
        assert!(prior.is_explained());
    }

    #[test]
    fn reports_without_timestamps_all_count() {
        let mut prior = sent_again_twice();
        prior.on_dsack(SeqNr(1), SeqNr(1001), None);
        assert!(!prior.is_explained());
        prior.on_dsack(SeqNr(1), SeqNr(1001), None);
        assert!(prior.is_explained());
    }

    #[test]
    fn an_echo_of_any_retransmission_shows_that_it_was_needed() {
        let prior = sent_again_twice();
        let at = |ms: u64| timestamp_at(Instant::from_millis(ms), 7);
        assert!(!prior.is_filled_by_retransmission(SeqNr(1), at(5), 7));
        assert!(prior.is_filled_by_retransmission(SeqNr(1), at(10), 7));
        assert!(prior.is_filled_by_retransmission(SeqNr(1), at(40), 7));
        assert!(!prior.is_filled_by_retransmission(SeqNr(1001), at(40), 7));
    }
}
