//! Congestion control: how many bytes may be on the wire, and how fast they leave.
//! [`CongestionState`] owns all of its state. The connection reports what happens and asks for the
//! number of bytes that it may send; it writes neither the window nor the threshold.
//!
//! ```text
//! window             the window and the slow start threshold, in the cache line of SND.*
//! controller         NewReno, CUBIC, DCTCP: how the window grows and how far it is reduced
//! cubic              CUBIC's congestion avoidance
//! hystart            the end of CUBIC's first slow start
//! window_validation  windows that were not in use recently (RFC 7661)
//! reduction          the window during a recovery (RFC 9937)
//! undo               the undo of a spurious reduction (RFC 3708, RFC 3522)
//! pacing             when new segments leave
//! ```

pub(crate) mod controller;
pub(crate) mod cubic;
pub(crate) mod hystart;
pub(crate) mod pacing;
pub(crate) mod reduction;
pub(crate) mod undo;
pub(crate) mod window;
pub(crate) mod window_validation;

use crate::base::sequence::SeqNr;
use crate::config::CongestionControl;
use crate::congestion::controller::{AckSample, Controller};
use crate::congestion::reduction::{EntryScoreboard, WindowReduction};
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};
use crate::congestion::window_validation::WindowValidation;

/// The phase of a connection's loss recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecoveryPhase {
    /// No recovery.
    Open,
    /// Fast recovery (RFC 6675, RFC 9937).
    Recovery,
    /// Slow start after a retransmission timeout, until the data in flight at that time is
    /// acknowledged.
    Loss,
}

/// The input that a cumulative ACK provides to congestion control. Times are in ns.
pub(crate) struct DeliveredBytes {
    /// Bytes that arrived at the peer; not 0.
    pub bytes: u32,
    /// The round-trip time measured by this ACK; 0: none.
    pub rtt: u64,
    pub now: u64,
    /// The phase after the ACK.
    pub phase: RecoveryPhase,
    /// No recovery was in progress, neither before the ACK nor after it.
    pub open: bool,
    /// No data waits to be sent.
    pub idle: bool,
    /// The ACK echoes a mark, so the window does not grow (RFC 3168 section 6.1.2).
    pub marked: bool,
}

/// The congestion state of a connection except its window, which every segment touches.
pub(crate) struct CongestionState {
    controller: Controller,
    /// Validation of the window: how much of it was in use recently.
    pub(crate) validation: WindowValidation,
    /// SND.NXT at the last reduction of the window. Marks and losses of data before it belong to the
    /// same congestion event, which reduces the window once (RFC 3168 section 6.1.2).
    reduced_to: SeqNr,
}

impl CongestionState {
    /// Returns the state of a connection that is being opened.
    pub(crate) fn new(which: CongestionControl) -> Self {
        CongestionState {
            controller: Controller::new(which),
            validation: WindowValidation::NEW,
            reduced_to: SeqNr(0),
        }
    }

    /// Sets our first sequence number, which the handshake fixed.
    pub(crate) fn set_first_byte(&mut self, first: SeqNr) {
        self.reduced_to = first - 1;
    }

    /// Initializes the state of an established connection, with nothing in flight.
    pub(crate) fn on_established(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        now: u64,
    ) {
        self.validation.begin_validated(window, flight, now);
        self.reduced_to = flight.una - 1;
        if let Controller::Dctcp(dctcp) = &mut self.controller {
            dctcp.begin_window(flight.una);
        }
    }

    /// Processes bytes delivered outside of fast recovery. Returns whether the window was reduced
    /// because it was not in use.
    #[inline]
    pub(crate) fn on_ack(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        initial: u32,
        delivered: &DeliveredBytes,
    ) -> bool {
        let limited = self.validation.is_limited(window, flight);
        let mut reduced = false;
        if self.validation.is_round_over(flight.una) && delivered.open {
            self.forget_old_reduction(flight.una);
            reduced = self.validation.measure_round(
                window,
                flight,
                &mut self.controller,
                initial,
                delivered.now,
            );
        }
        let grows =
            limited || delivered.phase == RecoveryPhase::Loss || self.validation.may_grow(window);
        if grows && !delivered.marked {
            let ack = AckSample {
                acked: delivered.bytes,
                mss: flight.mss,
                now: delivered.now,
                srtt: flight.srtt,
                rtt: delivered.rtt,
                una: flight.una,
                nxt: flight.next,
            };
            self.controller
                .on_ack(&mut window.cwnd, &mut window.ssthresh.0, &ack);
        }
        if !grows || (flight.pipe == 0 && delivered.idle) {
            self.controller.on_limited(delivered.now);
        }
        reduced
    }

    /// Records that new segments were sent; `pipe` bytes are on the wire now.
    #[inline]
    pub(crate) fn on_sent(&mut self, pipe: u32) {
        self.validation.on_sent(pipe);
    }

    /// Returns whether the pause before new segments was so long that the last measurement of the
    /// window's use is stale.
    #[inline]
    pub(crate) fn has_rested(&self, now: u64) -> bool {
        self.validation.has_rested(now)
    }

    /// Handles that pause, before new segments are sent. Returns whether the window was reduced.
    #[cold]
    pub(crate) fn on_rest(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        initial: u32,
        now: u64,
    ) -> bool {
        self.validation
            .on_rest(window, flight, &mut self.controller, initial, now)
    }

    /// Processes an ACK of `bytes` new bytes on a connection with ECN. Returns whether the echoed
    /// mark requires a reduction: at most once per window.
    #[inline]
    pub(crate) fn on_ecn_ack(&mut self, flight: &Flight, bytes: u32, marked: bool) -> bool {
        if let Controller::Dctcp(dctcp) = &mut self.controller {
            dctcp.on_acked(bytes, marked, flight.una, flight.next);
        }
        marked && self.is_unanswered(flight.una)
    }

    /// Returns whether data sent after the last reduction was acknowledged; SND.UNA is `una`.
    #[inline]
    fn is_unanswered(&self, una: SeqNr) -> bool {
        una.gt(self.reduced_to)
    }

    /// Lets `reduced_to` follow SND.UNA, because a number 2^31 behind would be taken for one ahead.
    #[inline]
    fn forget_old_reduction(&mut self, una: SeqNr) {
        if self.is_unanswered(una) {
            self.reduced_to = una - 1;
        }
    }

    /// Reduces the window for an echoed mark (RFC 3168 section 6.1.2, RFC 8257 section 3.3).
    /// The ACK acknowledges `newly` bytes, possibly all that were in flight.
    pub(crate) fn on_mark(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        newly: u32,
        now: u64,
    ) {
        let before = &flight.before_ack_of(newly);
        let in_use = self.validation.in_use(window, before);
        window.reduce_to(in_use.after_mark(window, &mut self.controller, before));
        self.reduced_to = flight.next;
        self.validation.begin_validated(window, flight, now);
    }

    /// Reduces the window for a loss that a tail loss probe repaired, as congestion control must
    /// react to it all the same (RFC 8985 section 7.4.2). The ACK acknowledges `newly` bytes.
    /// `is_answered`: [`is_tail_answered`](Self::is_tail_answered) when the probe was sent. Returns
    /// whether the window was reduced; not if it already was for the same event.
    pub(crate) fn on_probe_loss(
        &mut self,
        window: &mut CongestionWindow,
        is_answered: bool,
        flight: &Flight,
        newly: u32,
        now: u64,
    ) -> bool {
        let before = &flight.before_ack_of(newly);
        if is_answered || self.is_loss_answered(before.una) {
            return false;
        }
        let in_use = self.validation.in_use(window, before);
        window.reduce_to(in_use.after_loss(&mut self.controller, before));
        self.reduced_to = flight.next;
        self.validation.begin_validated(window, flight, now);
        true
    }

    /// Returns whether a loss of the data at `una` belongs to the last reduction. DCTCP reduces by
    /// the marked fraction, and a loss needs a reduction of its own (RFC 8257 section 3.5).
    fn is_loss_answered(&self, una: SeqNr) -> bool {
        una.lt(self.reduced_to) && !self.is_dctcp()
    }

    /// Returns whether a loss of the last segment, which ends at SND.NXT, belongs to the last reduction.
    pub(crate) fn is_tail_answered(&self, next: SeqNr) -> bool {
        self.is_loss_answered(next - 1)
    }

    /// Begins fast recovery, on an ACK or a timer; `entry` is the scoreboard at that time. Returns
    /// whether the threshold was reduced; not if it already was for the same event.
    pub(crate) fn on_recovery(
        &mut self,
        window: &mut CongestionWindow,
        reduction: &mut WindowReduction,
        flight: &Flight,
        entry: EntryScoreboard,
    ) -> bool {
        let is_answered = self.is_loss_answered(flight.una);
        let in_use = (!is_answered).then(|| self.validation.in_use(window, flight));
        reduction.begin_recovery(window, &mut self.controller, (in_use, entry), flight);
        self.reduced_to = flight.next;
        !is_answered
    }

    /// Ends a recovery: the capacity of the path is measured anew.
    pub(crate) fn on_recovered(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        now: u64,
    ) {
        self.validation.begin_validated(window, flight, now);
    }

    /// Handles a retransmission timeout: slow start towards a new threshold, once until the data is
    /// acknowledged. If a recovery was in progress, the window was already reduced; an undo
    /// restores the window before that first reduction.
    pub(crate) fn on_timeout(
        &mut self,
        window: &mut CongestionWindow,
        reduction: &mut WindowReduction,
        flight: &Flight,
        phase: RecoveryPhase,
    ) {
        if phase == RecoveryPhase::Loss {
            return;
        }
        if phase == RecoveryPhase::Open {
            reduction.remember_window(window, &self.controller, flight.una);
        }
        let in_use = self.validation.in_use(window, flight).bytes;
        let ssthresh = self
            .controller
            .on_timeout(in_use, flight.flight_size(), flight.mss);
        window.ssthresh = SlowStartThreshold(ssthresh);
    }

    /// Allows one segment in addition to those that may still arrive, after a timeout has marked
    /// the lost ones.
    pub(crate) fn after_timeout(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        now: u64,
    ) {
        self.reduced_to = flight.next;
        self.validation.begin_validated(window, flight, now);
        window.collapse_to_one(flight.pipe, flight.mss);
    }

    /// Undoes the last reduction, which was spurious.
    pub(crate) fn undo_reduction(
        &mut self,
        window: &mut CongestionWindow,
        reduction: &mut WindowReduction,
        flight: &Flight,
    ) {
        reduction.restore_window(window, &mut self.controller);
        self.reduced_to = flight.una - 1;
        self.validation.begin_round(flight);
    }

    /// Returns whether this is DCTCP, whose receiver echoes marks differently (RFC 8257 section
    /// 3.2).
    #[inline]
    pub(crate) fn is_dctcp(&self) -> bool {
        matches!(self.controller, Controller::Dctcp(_))
    }
}
