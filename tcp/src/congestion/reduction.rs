//! The window during a recovery: proportional rate reduction (RFC 9937), which brings the bytes in
//! flight down to the slow start threshold while ACKs keep segments leaving, and the decision
//! whether the reduction is undone ([`undo`](super::undo)).
//!
//! All counts are in bytes, in 64 bits: a recovery whose hole is lost again and again may outlast
//! the sequence space.

use crate::base::sequence::SeqNr;
use crate::congestion::controller::Controller;
use crate::congestion::undo::PriorWindow;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};
use crate::congestion::window_validation::InUse;

/// The scoreboard at the ACK that begins a recovery, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct EntryScoreboard {
    /// Payload that is selectively acknowledged, including by this ACK.
    pub sacked: u32,
    /// Payload that this ACK newly acknowledges, cumulatively or selectively.
    pub newly_delivered: u32,
}

/// An ACK during a recovery, or an expiry of the reordering timer, which delivers nothing.
#[derive(Clone, Copy)]
pub(crate) struct RecoveryAck {
    /// DeliveredData (RFC 9937 section 6.2): payload bytes that the peer has and did not have before.
    pub delivered: u32,
    /// SND.UNA advanced.
    pub advanced: bool,
    /// Segments were newly declared lost, first transmissions or later ones.
    pub finds_loss: bool,
}

impl RecoveryAck {
    /// SafeACK (RFC 9937 section 6.2): the recovery makes good progress.
    fn is_safe(&self) -> bool {
        self.advanced && !self.finds_loss
    }
}

/// A segment that is retransmitted.
#[derive(Clone, Copy)]
pub(crate) struct Retransmission {
    /// The beginning and the end of its payload, or of the FIN if it has no payload.
    pub seq: SeqNr,
    pub end: SeqNr,
    /// Its payload in bytes.
    pub len: u32,
    /// The segment had been sent only once before.
    pub is_first: bool,
    /// The time of the retransmission, in ns.
    pub at: u64,
}

/// The reduction of the window by one recovery.
#[derive(Default)]
pub(crate) struct WindowReduction {
    /// The recovery ends when this is acknowledged (RecoveryPoint, RFC 6675 section 2). Only used
    /// during a recovery.
    pub(crate) point: SeqNr,
    prior: Option<PriorWindow>,
    /// prr_delivered, prr_out and RecoverFS (RFC 9937 section 6.1).
    prr_delivered: u64,
    prr_out: u64,
    recover_flight: u64,
    /// Without SACK: bytes attributed to duplicate ACKs of this recovery that SND.UNA has not
    /// passed yet.
    duplicate_bytes: u32,
    /// RFC 7661 section 4.4.1: the part in use of a window that was not validated when this
    /// recovery began (0: it was validated), and R, the bytes retransmitted in this recovery, each
    /// counted once.
    unvalidated: u32,
    retransmitted: u32,
}

impl WindowReduction {
    /// Returns the state before any recovery; SND.UNA is `una`.
    pub(crate) fn new(una: SeqNr) -> Self {
        WindowReduction {
            point: una,
            ..WindowReduction::default()
        }
    }

    /// Returns whether the recovery point is acknowledged.
    pub(crate) fn is_over(&self, una: SeqNr) -> bool {
        una.ge(self.point)
    }

    /// Begins fast recovery: sets the new slow start threshold and the state of PRR (RFC 9937
    /// section 6.1). `in_use` is `None` if the window was already reduced for the same congestion
    /// event: the threshold stays.
    pub(super) fn begin_recovery(
        &mut self,
        window: &mut CongestionWindow,
        controller: &mut Controller,
        (in_use, entry): (Option<InUse>, EntryScoreboard),
        flight: &Flight,
    ) {
        self.point = flight.next;
        // Bytes SACKed before this ACK are not delivered during the recovery; the bytes that this
        // ACK delivers are.
        let outstanding = u64::from(flight.flight_size()) + u64::from(entry.newly_delivered);
        self.recover_flight = outstanding.saturating_sub(u64::from(entry.sacked)).max(1);
        self.prr_delivered = 0;
        self.prr_out = 0;
        self.duplicate_bytes = 0;
        self.remember_window(window, controller, flight.una);
        let unvalidated = in_use.filter(|in_use| in_use.unvalidated);
        self.unvalidated = unvalidated.map_or(0, |in_use| in_use.bytes);
        self.retransmitted = 0;
        if let Some(in_use) = in_use {
            window.ssthresh = SlowStartThreshold(in_use.after_loss(controller, flight));
        }
    }

    /// Saves the window that a reduction is about to replace. An earlier reduction can no longer be
    /// undone.
    pub(super) fn remember_window(
        &mut self,
        window: &CongestionWindow,
        controller: &Controller,
        una: SeqNr,
    ) {
        self.prior = Some(PriorWindow::new(*window, *controller, una));
    }

    /// Ends fast recovery. The window becomes ssthresh (RFC 9937 section 6.4). If it was not
    /// validated, it becomes half of the bytes in use that were not retransmitted (RFC 7661 section
    /// 4.4.1).
    pub(crate) fn end_recovery(&self, window: &mut CongestionWindow, mss: u32) {
        let ssthresh = window.ssthresh.0;
        window.cwnd = ssthresh;
        if self.unvalidated > 0 {
            let arrived = self.unvalidated.saturating_sub(self.retransmitted);
            window.cwnd = (arrived / 2).clamp(mss, ssthresh.max(mss));
            window.ssthresh = SlowStartThreshold(window.cwnd.max(2 * mss));
        }
    }

    /// Returns DeliveredData on a connection without SACK (RFC 9937 section 6.2): a duplicate ACK
    /// counts as one segment, and when SND.UNA advances by `acked` bytes, the bytes already counted
    /// by duplicate ACKs are not counted again. A peer gains nothing by sending more duplicate ACKs
    /// than segments were in flight.
    pub(crate) fn delivered_without_sack(&mut self, acked: u32, dup: bool, mss: u32) -> u32 {
        let delivered = if acked > 0 {
            let counted = self.duplicate_bytes.min(acked);
            self.duplicate_bytes -= counted;
            acked - counted
        } else if dup {
            self.duplicate_bytes = self.duplicate_bytes.saturating_add(mss);
            mss
        } else {
            0
        };
        let left = self.recover_flight.saturating_sub(self.prr_delivered);
        u64::from(delivered).min(left) as u32
    }

    /// Sets the window on an ACK that begins or continues the recovery, but not on the one that
    /// ends it (RFC 9937 section 6.2).
    pub(crate) fn on_ack(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        ack: RecoveryAck,
    ) {
        if ack.delivered == 0 && !ack.finds_loss {
            return;
        }
        self.prr_delivered += u64::from(ack.delivered);
        let count = self.send_count(window, flight, ack);
        // The window limits the sender's count of bytes in flight, which still includes the
        // segments that duplicate ACKs stand for.
        let allowed = u64::from(flight.pipe) + count;
        let allowed = u32::try_from(allowed).unwrap_or(u32::MAX);
        window.cwnd = if ack.delivered > 0 {
            allowed
        } else {
            // Segments declared lost while nothing is delivered, e.g. by the timer, leave the pipe
            // without making room in the window.
            window.cwnd.min(allowed)
        };
    }

    /// Returns SndCnt: how many bytes may be sent now.
    fn send_count(&self, window: &CongestionWindow, flight: &Flight, ack: RecoveryAck) -> u64 {
        let ssthresh = u64::from(window.ssthresh.0);
        let mss = u64::from(flight.mss);
        let duplicates = u64::from(self.duplicate_bytes).min(self.recover_flight);
        let in_flight = u64::from(flight.pipe).saturating_sub(duplicates);
        let unspent = self.prr_delivered.saturating_sub(self.prr_out);
        let count = if in_flight > ssthresh {
            // Proportional rate reduction.
            let share = u128::from(self.prr_delivered) * u128::from(ssthresh);
            let share = share.div_ceil(u128::from(self.recover_flight)) as u64;
            share.saturating_sub(self.prr_out)
        } else {
            // PRR-CRB: as many bytes as were delivered. PRR-SSRB: one segment more while the
            // recovery makes good progress.
            let conserved = unspent.max(u64::from(ack.delivered));
            let bound = conserved + if ack.is_safe() { mss } else { 0 };
            bound.min(ssthresh - in_flight)
        };
        // The recovery begins with a retransmission. A count below one segment would not let it
        // leave whole, so it is rounded up as well.
        if self.prr_out == 0 {
            count.max(mss)
        } else {
            count
        }
    }

    /// Handles a partial ACK, which identifies the next lost segment; that segment may always leave
    /// (RFC 6582 section 3.2).
    pub(crate) fn on_partial_ack(&self, window: &mut CongestionWindow, flight: &Flight) {
        window.cwnd = window.cwnd.max(flight.pipe + flight.mss);
    }

    /// Records that new segments of `len` bytes were sent (RFC 9937 section 6.3).
    pub(crate) fn on_sent(&mut self, len: u32) {
        self.prr_out += u64::from(len);
    }

    /// Records a retransmission.
    pub(crate) fn on_retransmitted(&mut self, segment: &Retransmission) {
        if segment.is_first {
            self.retransmitted = self.retransmitted.saturating_add(segment.len);
        }
        if let Some(prior) = &mut self.prior {
            prior.on_retransmitted(segment.seq, segment.end, segment.at);
        }
        self.prr_out += u64::from(segment.len);
    }

    /// Advances SND.UNA to `una`. Once data sent after the recovery is acknowledged, the reduction
    /// is final.
    #[inline]
    pub(crate) fn advance_to(&mut self, una: SeqNr) {
        if let Some(prior) = &self.prior
            && prior.is_outlived_by(una)
        {
            self.prior = None;
        }
    }

    /// Records that the recovery, or the slow start after a timeout, ended while SND.NXT was
    /// `next`. Answers to its retransmissions may arrive until `until` (ns).
    pub(crate) fn on_recovery_end(&mut self, next: SeqNr, until: u64) {
        if let Some(prior) = &mut self.prior {
            prior.on_recovery_end(next, until);
        }
    }

    /// Makes the reduction final: one of the retransmissions was needed, or another sign of
    /// congestion followed, whose effect an undo must not revert.
    pub(crate) fn confirm(&mut self) {
        self.prior = None;
    }

    /// Handles the acknowledgement of the segment at `seq` by an ACK that echoes the segment that
    /// filled the hole (RFC 7323 section 4.3). If that was a retransmission, it was needed; a
    /// duplicate that the peer reports later is then another transmission of the same segment.
    pub(crate) fn on_hole_filled(&mut self, seq: SeqNr, echo: u32, timestamp_offset: u32) {
        let prior = self.prior.as_ref();
        if prior.is_some_and(|prior| prior.is_filled_by_retransmission(seq, echo, timestamp_offset))
        {
            self.confirm();
        }
    }

    /// Processes a D-SACK: a segment with this timestamp reports that the peer received `lo..hi`
    /// twice.
    pub(crate) fn on_dsack(&mut self, lo: SeqNr, hi: SeqNr, timestamp: Option<u32>, now: u64) {
        if let Some(prior) = &mut self.prior {
            if prior.is_outdated(now) {
                self.prior = None;
            } else {
                prior.on_dsack(lo, hi, timestamp);
            }
        }
    }

    /// Returns whether D-SACKs show that all retransmissions of the recovery were spurious.
    pub(crate) fn is_refuted(&self) -> bool {
        self.prior.as_ref().is_some_and(PriorWindow::is_explained)
    }

    /// Returns whether an echoed timestamp shows that the first retransmission was spurious.
    pub(crate) fn is_answered_by_original(&self, echo: u32, timestamp_offset: u32) -> bool {
        let prior = self.prior.as_ref();
        prior.is_some_and(|prior| prior.is_answered_by_original(echo, timestamp_offset))
    }

    /// Undoes the reduction (RFC 4015 section 3, RFC 9438 section 4.9): restores the earlier
    /// controller, and the earlier window and threshold where they are larger.
    pub(super) fn restore_window(
        &mut self,
        window: &mut CongestionWindow,
        controller: &mut Controller,
    ) {
        let Some(prior) = self.prior.take() else {
            return;
        };
        window.cwnd = window.cwnd.max(prior.window.cwnd);
        window.ssthresh = window.ssthresh.max(prior.window.ssthresh);
        *controller = prior.controller;
    }
}
