//! What a recovery does to the window: proportional rate reduction (RFC 6937), and taking a reduction
//! back that was for nothing (RFC 3708, RFC 3522, RFC 4015).

use crate::base::sequence::SeqNr;
use crate::base::time::{Instant, timestamp_at};
use crate::congestion::controller::Controller;
use crate::congestion::window::{CongestionWindow, Flight, SlowStartThreshold};
use crate::congestion::window_validation::InUse;

/// What a reduction replaced, until it is known to be deserved.
#[derive(Clone, Copy)]
struct PriorWindow {
    window: CongestionWindow,
    controller: Controller,
    /// Retransmissions that no D-SACK called needless yet.
    unexplained: u32,
    /// When the first retransmission left in ns, 0: not yet.
    first_at: u64,
}

/// The reduction of the window by one recovery.
#[derive(Default)]
pub(crate) struct WindowReduction {
    /// Recovery ends when this is acknowledged (RecoveryPoint, RFC 6675 section 2).
    pub(crate) point: SeqNr,
    prior: Option<PriorWindow>,
    /// prr_delivered, prr_out and RecoverFS of RFC 6937 section 3, in bytes.
    prr_delivered: u32,
    prr_out: u32,
    recover_flight: u32,
    /// RFC 7661 section 4.4.1: what was in use of a window that was not validated when this
    /// recovery began, 0: it was validated; and R, the bytes that it retransmitted, each counted
    /// once.
    unvalidated: u32,
    retransmitted: u32,
}

impl WindowReduction {
    pub(crate) fn new(una: SeqNr) -> Self {
        WindowReduction {
            point: una,
            ..WindowReduction::default()
        }
    }

    /// The recovery point is passed.
    pub(crate) fn is_over(&self, una: SeqNr) -> bool {
        una.ge(self.point)
    }

    /// Fast recovery begins: the new slow start threshold.
    pub(super) fn begin_recovery(
        &mut self,
        window: &mut CongestionWindow,
        controller: &mut Controller,
        in_use: InUse,
        flight: &Flight,
    ) {
        self.point = flight.next;
        self.recover_flight = flight.flight_size().max(1);
        self.prr_delivered = 0;
        self.prr_out = 0;
        self.remember_window(window, controller);
        self.unvalidated = if in_use.unvalidated { in_use.bytes } else { 0 };
        self.retransmitted = 0;
        window.ssthresh = SlowStartThreshold(in_use.after_loss(controller, flight));
    }

    /// What the reduction that follows replaces.
    pub(super) fn remember_window(&mut self, window: &CongestionWindow, controller: &Controller) {
        self.prior = Some(PriorWindow {
            window: *window,
            controller: *controller,
            unexplained: 0,
            first_at: 0,
        });
    }

    /// Fast recovery ended: the window is ssthresh (RFC 6937 section 3), but for one that was not
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

    /// RFC 6937 section 3: how much may be sent in answer to an ACK that reports `delivered` bytes.
    pub(crate) fn on_ack(
        &mut self,
        window: &mut CongestionWindow,
        flight: &Flight,
        delivered: u32,
    ) {
        let ssthresh = window.ssthresh.0;
        let mss = flight.mss;
        self.prr_delivered = self.prr_delivered.saturating_add(delivered);
        let out = if flight.pipe > ssthresh {
            let share = u64::from(self.prr_delivered) * u64::from(ssthresh);
            let share = share.div_ceil(u64::from(self.recover_flight)) as u32;
            share.saturating_sub(self.prr_out)
        } else {
            let limit = self
                .prr_delivered
                .saturating_sub(self.prr_out)
                .max(delivered)
                + mss;
            limit.min(ssthresh - flight.pipe)
        };
        // The first retransmission always leaves.
        let out = if self.prr_out == 0 { out.max(mss) } else { out };
        window.cwnd = flight.pipe + out;
    }

    /// A partial ACK names the next lost segment, which leaves in any case (RFC 6582 section 3.2).
    pub(crate) fn on_partial_ack(&self, window: &mut CongestionWindow, flight: &Flight) {
        window.cwnd = window.cwnd.max(flight.pipe + flight.mss);
    }

    /// New segments of so many bytes left.
    pub(crate) fn on_sent(&mut self, len: u32) {
        self.prr_out = self.prr_out.saturating_add(len);
    }

    /// A segment of so many bytes was sent again, for the first time when `first`.
    pub(crate) fn on_retransmitted(&mut self, len: u32, first: bool, now: u64) {
        if first {
            self.retransmitted = self.retransmitted.saturating_add(len);
        }
        if let Some(prior) = &mut self.prior {
            prior.unexplained += 1;
            prior.first_at = if prior.first_at == 0 {
                now
            } else {
                prior.first_at
            };
        }
        self.prr_out = self.prr_out.saturating_add(len);
    }

    /// A D-SACK arrived: tells whether all retransmissions of the last recovery were needless
    /// (RFC 3708).
    pub(crate) fn on_dsack(&mut self) -> bool {
        let Some(prior) = &mut self.prior else {
            return false;
        };
        prior.unexplained = prior.unexplained.saturating_sub(1);
        prior.unexplained == 0 && prior.first_at != 0
    }

    /// The peer echoes a time before the first retransmission: the originals arrived (Eifel,
    /// RFC 3522 section 3.2).
    pub(crate) fn was_needless(&self, echo: u32, timestamp_offset: u32) -> bool {
        self.prior.as_ref().is_some_and(|prior| {
            prior.first_at != 0 && is_echo_older(echo, prior.first_at, timestamp_offset)
        })
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

/// The echoed timestamp is before that of a segment sent at `at` (ns).
pub(crate) fn is_echo_older(echo: u32, at: u64, timestamp_offset: u32) -> bool {
    let sent = timestamp_at(Instant(at), timestamp_offset);
    (echo.wrapping_sub(sent) as i32) < 0
}
