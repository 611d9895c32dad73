//! Undo of a spurious window reduction (RFC 3708, RFC 3522, RFC 4015): the window before the
//! reduction, and the evidence that shows whether the reduction was justified.
//!
//! ```text
//! a recovery begins          PriorWindow: window and controller before the reduction
//!   each retransmission      is recorded: the peer must report every one of them as a duplicate
//!   an echoed timestamp      may show that a retransmission filled its hole: the reduction stands
//! the recovery ends          D-SACKs of its last retransmissions may still be on their way
//! a round trip later         the record is dropped: the reduction stands
//! ```

use std::collections::BTreeMap;

use siw_net::Instant;

use crate::base::sequence::{SeqNr, StreamPositions};
use crate::base::time::timestamp_at;
use crate::congestion::controller::Controller;
use crate::congestion::window::CongestionWindow;

/// The window that a reduction replaced, kept until it is known whether the reduction was
/// justified.
pub(super) struct PriorWindow {
    pub(super) window: CongestionWindow,
    pub(super) controller: Controller,
    /// The time of the recovery's first retransmission in ns; 0 if there was none.
    first_at: u64,
    positions: StreamPositions,
    /// The retransmissions of the recovery that no D-SACK has reported yet, keyed by the start of
    /// the segment, so that a D-SACK block costs only the entries it covers.
    unexplained: BTreeMap<u64, RetransmittedSegment>,
    ended: Option<EpisodeEnd>,
}

/// A segment that a recovery retransmitted.
struct RetransmittedSegment {
    end: u64,
    /// The number of retransmissions minus the number of D-SACKs that reported them.
    times: u32,
    /// The time of the first retransmission, in ns.
    first_at: u64,
    /// The timestamp of the last segment with a D-SACK for it.
    reported: Option<u32>,
}

/// The end of a recovery, and the time until which answers to its retransmissions may arrive.
struct EpisodeEnd {
    /// SND.NXT at the end. Answers to later data follow those to the retransmissions.
    next: SeqNr,
    /// A time limit in ns for connections that send no more data: one retransmission timeout later.
    until: u64,
}

impl PriorWindow {
    /// Records the beginning of a recovery: this window and controller, while SND.UNA is `una`.
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

    /// Records that the segment from `seq` to `end` was retransmitted. Only retransmissions of the
    /// recovery itself count; later ones are no evidence about it.
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

    /// Processes a D-SACK block: the peer received `lo..hi` twice (RFC 2883). One retransmission of
    /// each segment of the recovery that lies wholly in the block was spurious. Nothing else
    /// counts, so that duplicates made by the network and reports about older recoveries cannot
    /// hide a loss. `timestamp` is that of the reporting segment; if it is not newer than the last,
    /// the report may be a duplicate made by the network.
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

    /// Returns whether a retransmission of the segment at `seq` arrived first and was therefore
    /// needed, given the timestamp echoed by the ACK that acknowledges the segment.
    pub(super) fn is_filled_by_retransmission(
        &self,
        seq: SeqNr,
        echo: u32,
        timestamp_offset: u32,
    ) -> bool {
        let segment = self.unexplained.get(&self.positions.position_of(seq));
        segment.is_some_and(|segment| !is_echo_older(echo, segment.first_at, timestamp_offset))
    }

    /// Returns whether the peer has reported every retransmission of the recovery as a duplicate
    /// (RFC 3708 section 2): all originals arrived, and nothing was lost.
    pub(super) fn is_explained(&self) -> bool {
        self.first_at != 0 && self.unexplained.is_empty()
    }

    /// Returns whether the peer echoes a time before the first retransmission: the originals
    /// arrived (Eifel, RFC 3522 section 3.2).
    pub(super) fn is_answered_by_original(&self, echo: u32, timestamp_offset: u32) -> bool {
        self.first_at != 0 && is_echo_older(echo, self.first_at, timestamp_offset)
    }

    /// Records the end of the recovery, while SND.NXT was `next`. D-SACKs of its retransmissions
    /// may arrive until `until` (ns), or until data sent after the end is acknowledged.
    pub(super) fn on_recovery_end(&mut self, next: SeqNr, until: u64) {
        self.ended = Some(EpisodeEnd { next, until });
    }

    /// Returns whether SND.UNA, now `una`, rules out further answers to the recovery's
    /// retransmissions.
    pub(super) fn is_outlived_by(&self, una: SeqNr) -> bool {
        self.ended.as_ref().is_some_and(|end| una.gt(end.next))
    }

    /// Returns whether the time `now` (ns) rules out further answers.
    pub(super) fn is_outdated(&self, now: u64) -> bool {
        self.ended.as_ref().is_some_and(|end| now > end.until)
    }
}

/// Returns whether the echoed timestamp is before that of a segment sent at `at` (ns).
pub(crate) fn is_echo_older(echo: u32, at: u64, timestamp_offset: u32) -> bool {
    let sent = timestamp_at(Instant(at), timestamp_offset);
    (echo.wrapping_sub(sent) as i32) < 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CongestionControl;

    /// Returns a record in which the segment 1:1001 was retransmitted twice, 10 and 40 ms after the
    /// start.
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
