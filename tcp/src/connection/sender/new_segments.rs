//! New segments: which may be sent within the windows, and the state that they leave.

use siw_net::{Instant, PayloadPiece};

use crate::congestion::RecoveryPhase;
use crate::connection::context::TcpContext;
use crate::connection::sender::Sender;
use crate::loss::rack::OutstandingProbe;
use crate::queues::send_buffer::SegmentPlan;
use crate::tcb::send_variables::SendFlags;

/// The next new segment.
pub(crate) enum NextSegment {
    /// It may be sent. `usable`: bytes that the peer's window and the congestion window still allow,
    /// this segment included.
    Ready { plan: SegmentPlan, usable: u32 },
    /// Nothing may be sent until an ACK or a record arrives.
    Wait,
    /// Nothing is in flight, and the peer's window is too small for the next record: the window is to
    /// be probed (RFC 9293 section 3.8.6.1).
    ProbeWindow,
}

impl<R> Sender<R> {
    /// Returns the pieces of the `len` bytes from a position of the send buffer on. `user`: the user
    /// value of the connection.
    #[inline]
    pub(crate) fn payload(
        &self,
        user: u64,
        from: (u32, u32),
        len: u32,
    ) -> impl Iterator<Item = PayloadPiece<'_, R>> {
        let pieces = self.send_buffer.pieces(from, len);
        pieces.map(move |(record, offset, len)| PayloadPiece::Record {
            user,
            record,
            offset,
            len,
        })
    }

    /// Plans the next new segment. `emss`: payload bytes of a full segment.
    #[inline]
    pub(crate) fn plan_new_segment(&self, emss: u32) -> NextSegment {
        let snd = &self.snd;
        let window = snd.wnd.saturating_sub(snd.flight());
        // Limited transmit (RFC 3042): one segment for each of the first two duplicate ACKs, which
        // are counted only without SACK.
        let limited = if snd.phase == RecoveryPhase::Open {
            u32::from(snd.dup_acks.min(2))
        } else {
            0
        };
        let usable = window.min((snd.window.cwnd() + limited * emss).saturating_sub(snd.pipe));
        let Some(mut plan) = self.send_buffer.plan_segment(emss, usable) else {
            return NextSegment::Wait;
        };
        if plan.len > window {
            if snd.flight() > 0 {
                return NextSegment::Wait; // the ACK of the data in flight opens the window
            }
            // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part of a record is
            // sent if it is half of the largest window seen, or if waiting did not help.
            if window == 0 || (window < snd.max_wnd / 2 && !snd.has(SendFlags::MAY_SPLIT_RECORD)) {
                return NextSegment::ProbeWindow;
            }
            plan = self
                .send_buffer
                .plan_part(window.min(plan.len - 1).min(snd.window.cwnd().max(1)));
        } else if plan.len > usable && snd.pipe > 0 {
            return NextSegment::Wait;
        }
        NextSegment::Ready { plan, usable }
    }

    /// Counts `sent` bytes of new segments towards the limit of a recovery.
    #[inline]
    pub(crate) fn charge_recovery(&mut self, sent: u32) {
        if self.snd.phase == RecoveryPhase::Recovery
            && let Some(recovery) = &mut self.recovery
        {
            recovery.reduction.on_sent(sent);
        }
    }

    /// Records that a tail loss probe was sent. `again`: it was a retransmission of the last segment.
    pub(crate) fn on_probe_sent(&mut self, again: bool, now: Instant) {
        if let Some(recovery) = &mut self.recovery {
            let probe = OutstandingProbe {
                end: self.snd.nxt,
                again,
                is_answered: self.congestion.is_tail_answered(self.snd.nxt),
            };
            recovery.on_probe_sent(&mut self.snd, &mut self.send_buffer, probe, now.0);
        }
    }

    /// Checks, before new segments are sent after a pause, whether the congestion window has gone
    /// unused for too long to be valid (RFC 7661).
    #[inline]
    pub(crate) fn validate_window(&mut self, emss: u16, cx: &mut TcpContext<'_>) {
        if self.congestion.has_rested(cx.now.0) && self.snd.phase == RecoveryPhase::Open {
            let initial = cx.shared.initial_window(emss);
            let flight = self.snd.flight_state(emss);
            let reduced = self
                .congestion
                .on_rest(&mut self.snd.window, &flight, initial, cx.now.0);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            self.snd.forget_pacing();
        }
    }
}
