//! What a recovery does to the window: proportional rate reduction (RFC 9937), which brings what is in
//! flight down to the slow start threshold while ACKs keep segments leaving; and whether the reduction
//! is taken back ([`undo`](super::undo)).
//!
//! Everything is counted in bytes, in 64 bits: a recovery whose hole is lost again and again may
//! outlast the sequence space.

use crate::base::sequence::SeqNr;
use crate::congestion::controller::Controller;
use crate::congestion::undo::PriorWindow;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};
use crate::congestion::window_validation::InUse;

/// What the scoreboard says of the ACK that a recovery begins with, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct EntryScoreboard {
    /// Payload that is selectively acknowledged, by this ACK too.
    pub sacked: u32,
    /// Payload that this ACK newly acknowledges, cumulatively or selectively.
    pub newly_delivered: u32,
}

/// What an ACK during a recovery says, or the reordering timer, which delivers nothing.
#[derive(Clone, Copy)]
pub(crate) struct RecoveryAck {
    /// DeliveredData (RFC 9937 section 6.2): payload bytes that the peer has and did not have before.
    pub delivered: u32,
    /// SND.UNA advanced.
    pub advanced: bool,
    /// Segments were newly found lost, first transmissions or later ones.
    pub finds_loss: bool,
}

impl RecoveryAck {
    /// SafeACK (RFC 9937 section 6.2): the recovery makes good progress.
    fn is_safe(&self) -> bool {
        self.advanced && !self.finds_loss
    }
}

/// A segment that is sent again.
#[derive(Clone, Copy)]
pub(crate) struct Retransmission {
    /// Where its payload begins and ends; of a FIN without payload, where that does.
    pub seq: SeqNr,
    pub end: SeqNr,
    /// Its payload in bytes.
    pub len: u32,
    /// It had been sent once before.
    pub is_first: bool,
    /// When it is sent again, in ns.
    pub at: u64,
}

/// The reduction of the window by one recovery.
#[derive(Default)]
pub(crate) struct WindowReduction {
    /// The recovery ends when this is acknowledged (RecoveryPoint, RFC 6675 section 2). Only looked at
    /// during a recovery.
    pub(crate) point: SeqNr,
    prior: Option<PriorWindow>,
    /// prr_delivered, prr_out and RecoverFS (RFC 9937 section 6.1).
    prr_delivered: u64,
    prr_out: u64,
    recover_flight: u64,
    /// Without SACK: what duplicate ACKs of this recovery stand for that SND.UNA has not passed yet.
    duplicate_bytes: u32,
    /// RFC 7661 section 4.4.1: what was in use of a window that was not validated when this
    /// recovery began, 0: it was validated; and R, the bytes that it retransmitted, each counted
    /// once.
    unvalidated: u32,
    retransmitted: u32,
}

impl WindowReduction {
    /// No recovery yet; SND.UNA is `una`.
    pub(crate) fn new(una: SeqNr) -> Self {
        WindowReduction {
            point: una,
            ..WindowReduction::default()
        }
    }

    /// Whether the recovery point is passed.
    pub(crate) fn is_over(&self, una: SeqNr) -> bool {
        una.ge(self.point)
    }

    /// Fast recovery begins: the new slow start threshold, and the state of PRR (RFC 9937 section 6.1).
    pub(super) fn begin_recovery(
        &mut self,
        window: &mut CongestionWindow,
        controller: &mut Controller,
        (in_use, entry): (InUse, EntryScoreboard),
        flight: &Flight,
    ) {
        self.point = flight.next;
        // What was SACKed before this ACK is not delivered during the recovery, what this ACK delivers is.
        let outstanding = u64::from(flight.flight_size()) + u64::from(entry.newly_delivered);
        self.recover_flight = outstanding.saturating_sub(u64::from(entry.sacked)).max(1);
        self.prr_delivered = 0;
        self.prr_out = 0;
        self.duplicate_bytes = 0;
        self.remember_window(window, controller, flight.una);
        self.unvalidated = if in_use.unvalidated { in_use.bytes } else { 0 };
        self.retransmitted = 0;
        window.ssthresh = SlowStartThreshold(in_use.after_loss(controller, flight));
    }

    /// What the reduction that follows replaces. A reduction before it can no longer be taken back.
    pub(super) fn remember_window(
        &mut self,
        window: &CongestionWindow,
        controller: &Controller,
        una: SeqNr,
    ) {
        self.prior = Some(PriorWindow::new(*window, *controller, una));
    }

    /// Fast recovery ended: the window is ssthresh (RFC 9937 section 6.4), but for one that was not
    /// validated half of what arrived of what was in use (RFC 7661 section 4.4.1).
    pub(crate) fn end_recovery(&self, window: &mut CongestionWindow, mss: u32) {
        let ssthresh = window.ssthresh.0;
        window.cwnd = ssthresh;
        if self.unvalidated > 0 {
            let arrived = self.unvalidated.saturating_sub(self.retransmitted);
            window.cwnd = (arrived / 2).clamp(mss, ssthresh.max(mss));
            window.ssthresh = SlowStartThreshold(window.cwnd.max(2 * mss));
        }
    }

    /// DeliveredData on a connection without SACK (RFC 9937 section 6.2): a duplicate ACK stands for one
    /// segment, and when SND.UNA advances by `acked` bytes, what duplicate ACKs stood for is not counted
    /// again. A peer that sends more duplicate ACKs than segments were in flight gains nothing.
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

    /// Sets the window by an ACK that begins or continues the recovery, but not by the one that ends it
    /// (RFC 9937 section 6.2).
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
        // The window is what may be in flight by the count of those who send, for whom segments that
        // duplicate ACKs stand for are still in flight.
        let allowed = u64::from(flight.pipe) + count;
        let allowed = u32::try_from(allowed).unwrap_or(u32::MAX);
        window.cwnd = if ack.delivered > 0 {
            allowed
        } else {
            // Segments that are found lost while nothing is delivered, as by the timer, leave the pipe, but
            // that makes no room in it.
            window.cwnd.min(allowed)
        };
    }

    /// SndCnt: how many bytes may be sent now.
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
            // PRR-CRB: as much as was delivered. PRR-SSRB, a segment more, where the recovery makes good
            // progress.
            let conserved = unspent.max(u64::from(ack.delivered));
            let bound = conserved + if ack.is_safe() { mss } else { 0 };
            bound.min(ssthresh - in_flight)
        };
        // The recovery begins with a retransmission. Less than a segment does not let one leave whole, so
        // that is rounded up as well.
        if self.prr_out == 0 {
            count.max(mss)
        } else {
            count
        }
    }

    /// A partial ACK names the next lost segment, which leaves in any case (RFC 6582 section 3.2).
    pub(crate) fn on_partial_ack(&self, window: &mut CongestionWindow, flight: &Flight) {
        window.cwnd = window.cwnd.max(flight.pipe + flight.mss);
    }

    /// New segments of `len` bytes were sent (RFC 9937 section 6.3).
    pub(crate) fn on_sent(&mut self, len: u32) {
        self.prr_out += u64::from(len);
    }

    /// A segment is sent again.
    pub(crate) fn on_retransmitted(&mut self, segment: &Retransmission) {
        if segment.is_first {
            self.retransmitted = self.retransmitted.saturating_add(segment.len);
        }
        if let Some(prior) = &mut self.prior {
            prior.on_retransmitted(segment.seq, segment.end, segment.at);
        }
        self.prr_out += u64::from(segment.len);
    }

    /// SND.UNA is `una` now. Once data sent after the recovery is acknowledged, the reduction stands.
    #[inline]
    pub(crate) fn advance_to(&mut self, una: SeqNr) {
        if let Some(prior) = &self.prior
            && prior.is_outlived_by(una)
        {
            self.prior = None;
        }
    }

    /// The recovery, or the slow start after a timeout, ended while SND.NXT was `next`. Answers to its
    /// retransmissions may arrive until `until` (ns).
    pub(crate) fn on_recovery_end(&mut self, next: SeqNr, until: u64) {
        if let Some(prior) = &mut self.prior {
            prior.on_recovery_end(next, until);
        }
    }

    /// The reduction stands: a retransmission of it was needed, or another sign of congestion followed, which
    /// must not be taken back with it.
    pub(crate) fn confirm(&mut self) {
        self.prior = None;
    }

    /// The segment at `seq` is acknowledged by an ACK that echoes the segment that filled the hole (RFC 7323
    /// section 4.3). If that was a retransmission, it was needed; when the peer reports a duplicate later,
    /// another transmission of it arrived as well.
    pub(crate) fn on_hole_filled(&mut self, seq: SeqNr, echo: u32, timestamp_offset: u32) {
        let prior = self.prior.as_ref();
        if prior.is_some_and(|prior| prior.is_filled_by_retransmission(seq, echo, timestamp_offset))
        {
            self.confirm();
        }
    }

    /// The peer reports, in a segment with this timestamp, that it received `lo..hi` twice.
    pub(crate) fn on_dsack(&mut self, lo: SeqNr, hi: SeqNr, timestamp: Option<u32>, now: u64) {
        if let Some(prior) = &mut self.prior {
            if prior.is_outdated(now) {
                self.prior = None;
            } else {
                prior.on_dsack(lo, hi, timestamp);
            }
        }
    }

    /// Whether D-SACKs show that nothing that the recovery sent again had been lost.
    pub(crate) fn is_refuted(&self) -> bool {
        self.prior.as_ref().is_some_and(PriorWindow::is_explained)
    }

    /// Whether an echoed timestamp shows that the first retransmission was needless.
    pub(crate) fn is_answered_by_original(&self, echo: u32, timestamp_offset: u32) -> bool {
        let prior = self.prior.as_ref();
        prior.is_some_and(|prior| prior.is_answered_by_original(echo, timestamp_offset))
    }

    /// Takes the reduction back (RFC 4015 section 3, RFC 9438 section 4.9): the window and the
    /// controller as they were.
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
