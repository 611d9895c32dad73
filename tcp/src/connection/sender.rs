//! The send side of a connection: the queue of records and segments in flight, congestion control, and
//! the recovery from losses.

use crate::base::frame_sink::PayloadPiece;
use crate::base::time::{to_nanos, to_ticks};
use crate::config::CongestionControl;
use crate::congestion::{CongestionState, RecoveryPhase};
use crate::connection::context::TcpContext;
use crate::loss::rack::ReorderWindow;
use crate::loss::recovery::Recovery;
use crate::queues::send_queue::{SegmentPlan, TransmitQueue};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

/// The send side of one connection. SND.UNA, SND.NXT, the windows and the round trip are in its
/// [`Tcb`].
#[repr(C)]
pub(crate) struct Sender<R> {
    pub send_queue: TransmitQueue<R>,
    /// The state of a loss recovery, kept until the connection is idle.
    pub recovery: Option<Box<Recovery>>,
    pub congestion: CongestionState,
    /// The tick at which the current series of timeouts began; 0: none.
    pub stalled_since: u32,
    /// Segments that were sent again.
    pub retransmits: u32,
    /// The effective MSS agreed in the handshake, the upper limit of `tcb.emss`.
    pub emss_agreed: u16,
    /// RACK's reordering window, kept here while there is no `recovery`.
    pub reorder_window: ReorderWindow,
}

impl<R> Sender<R> {
    /// Returns a send side without data. `emss`: payload bytes of a full segment.
    pub(crate) fn new(congestion: CongestionControl, emss: u16) -> Self {
        Sender {
            send_queue: TransmitQueue::new(),
            recovery: None,
            congestion: CongestionState::new(congestion),
            stalled_since: 0,
            retransmits: 0,
            emss_agreed: emss,
            reorder_window: ReorderWindow::default(),
        }
    }

    /// Returns the pieces of the `len` bytes from a position of the send queue on. `user`: the user
    /// value of the connection.
    #[inline]
    pub(crate) fn payload(
        &self,
        user: u64,
        from: (u32, u32),
        len: u32,
    ) -> impl Iterator<Item = PayloadPiece<'_, R>> {
        let pieces = self.send_queue.pieces(from, len);
        pieces.map(move |(record, offset, len)| PayloadPiece::Record {
            user,
            record,
            offset,
            len,
        })
    }

    /// Plans the next new segment. Returns it together with the number of bytes that the peer's
    /// window and the congestion window still allow, or `None` if nothing may be sent now.
    #[inline]
    pub(crate) fn plan_new_segment(
        &self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        emss: u32,
    ) -> Option<(SegmentPlan, u32)> {
        let window = tcb.snd_wnd.saturating_sub(tcb.flight());
        // Limited transmit (RFC 3042): one segment for each of the first two duplicate ACKs, which
        // are counted only without SACK.
        let limited = if tcb.phase == RecoveryPhase::Open {
            u32::from(tcb.dup_acks.min(2))
        } else {
            0
        };
        let usable = window.min((tcb.window.cwnd() + limited * emss).saturating_sub(tcb.pipe));
        let mut plan = self.send_queue.plan_segment(emss, usable)?;
        if plan.len > window {
            if tcb.flight() > 0 {
                return None; // the ACK of the data in flight opens the window
            }
            // Sender's silly window avoidance (RFC 9293 section 3.8.6.2.1): a part of a record is
            // sent if it is half of the largest window seen, or if waiting did not help.
            if window > 0
                && (window >= tcb.max_snd_wnd / 2 || tcb.has(ConnectionFlags::MAY_SPLIT_RECORD))
            {
                plan = self
                    .send_queue
                    .plan_part(window.min(plan.len - 1).min(tcb.window.cwnd().max(1)));
            } else {
                // Nothing is in flight, and the peer's window is too small for the next record: the
                // window is probed (RFC 9293 section 3.8.6.1).
                if !tcb.is_timer(Timer::Persist) {
                    tcb.start_persist_timer(cx);
                }
                return None;
            }
        } else if plan.len > usable && tcb.pipe > 0 {
            return None;
        }
        Some((plan, usable))
    }

    /// Accounts for new segments with `sent` bytes of payload: charges pacing (if the connection is
    /// paced) and the recovery, and restarts the timer of the tail loss probe.
    #[inline]
    pub(crate) fn on_new_data_sent(
        &mut self,
        tcb: &mut Tcb,
        cx: &mut TcpContext<'_>,
        sent: u32,
        is_paced: bool,
    ) {
        if is_paced {
            self.on_paced_output(tcb, cx, sent);
        }
        if tcb.is_timer(Timer::TailLossProbe)
            && let Some(oldest) = self.send_queue.sent.front()
        {
            tcb.extend_probe_timeout(cx, oldest.at);
        }
        if tcb.phase == RecoveryPhase::Recovery
            && let Some(recovery) = &mut self.recovery
        {
            recovery.reduction.on_sent(sent);
        }
    }

    /// Checks, before new segments are sent after a pause, whether the congestion window has gone
    /// unused for too long to be valid (RFC 7661).
    #[inline]
    pub(crate) fn validate_window(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        if self.congestion.has_rested(cx.now.0) && tcb.phase == RecoveryPhase::Open {
            let initial = cx.shared.initial_window(tcb);
            let flight = tcb.flight_state();
            let reduced = self
                .congestion
                .on_rest(&mut tcb.window, &flight, initial, cx.now.0);
            cx.shared.stats.idle_restarts += u64::from(reduced);
            tcb.forget_pacing();
        }
    }

    /// Ensures that the recovery state exists and that each segment in flight has a record of its
    /// own, so that segments can be marked.
    #[cold]
    pub(crate) fn start_recovery(&mut self, tcb: &mut Tcb) {
        self.recovery_state(tcb);
        self.split_multi_segments(tcb);
    }

    /// Returns the number of retransmission timeouts since new data was last acknowledged.
    pub(crate) fn timeouts_in_row(&self) -> u8 {
        self.recovery
            .as_ref()
            .map_or(0, |recovery| recovery.timeouts_in_row)
    }

    /// Returns the recovery state, which is allocated on first use.
    pub(crate) fn recovery_state(&mut self, tcb: &Tcb) -> &mut Recovery {
        let (una, reorder_window) = (tcb.snd_una, self.reorder_window);
        self.recovery.get_or_insert_with(|| {
            let mut recovery = Box::new(Recovery::new(una));
            recovery.rack.reorder_window = reorder_window;
            recovery
        })
    }

    /// Splits the records of segments that were sent together into one per segment, before any is
    /// marked.
    pub(crate) fn split_multi_segments(&mut self, tcb: &mut Tcb) {
        if tcb.has(ConnectionFlags::MULTI_SEGMENT) {
            tcb.flags &= !ConnectionFlags::MULTI_SEGMENT;
            // Records split earlier are not visited again: a peer can make each of its ACKs cause a
            // search for losses.
            let first = match &mut self.recovery {
                Some(recovery) => {
                    let split_to = core::mem::replace(&mut recovery.split_to, tcb.snd_nxt);
                    self.send_queue.first_after(split_to)
                }
                None => 0,
            };
            self.send_queue.split_multi_segments(first);
        }
    }

    /// Resegments the segments in flight that exceed the path MTU, to be retransmitted.
    pub(crate) fn resegment(&mut self, tcb: &mut Tcb) {
        self.split_multi_segments(tcb);
        self.send_queue.resegment_to(u32::from(tcb.emss));
        self.start_recovery(tcb);
        if let Some(recovery) = &mut self.recovery {
            recovery.recount_lost(tcb, &self.send_queue);
        }
    }

    /// As [`resegment`](Self::resegment), and schedules the retransmission.
    pub(crate) fn resegment_and_resend(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) {
        self.resegment(tcb);
        cx.schedule_output(tcb, ConnectionFlags::NONE);
        if !tcb.is_timer(Timer::Persist) {
            tcb.restart_retransmission_timer(cx);
        }
    }

    /// Returns whether the user timeout passed without progress (RFC 9293 section 3.8.3).
    pub(crate) fn is_user_timeout_over(&mut self, tcb: &Tcb, cx: &TcpContext<'_>) -> bool {
        if self.stalled_since == 0 {
            self.stalled_since = to_ticks(
                self.send_queue
                    .sent
                    .front()
                    .map_or(cx.now.0, |segment| segment.at),
            )
            .max(1);
        }
        self.stalled_for(tcb, cx) >= to_nanos(cx.shared.config.user_timeout)
    }

    /// Returns how long no queued data has been acknowledged, in ns. `stalled_since` must be set.
    fn stalled_for(&self, tcb: &Tcb, cx: &TcpContext<'_>) -> u64 {
        // A peer that shrank its window below what is in flight and still answers is not dead
        // (RFC 9293 section 3.8.6, SHLD-17).
        let heard = if tcb.snd_wnd < tcb.flight() {
            tcb.last_rx
        } else {
            0
        };
        let stalled = u64::from(to_ticks(cx.now.0).wrapping_sub(self.stalled_since)) << 20;
        stalled.min(cx.now.0.saturating_sub(heard))
    }

    /// Returns the rest of the user timeout in ns, rounded up so that `is_user_timeout_over` is
    /// true when it expires.
    pub(crate) fn user_timeout_left(&self, tcb: &Tcb, cx: &TcpContext<'_>) -> u64 {
        if self.stalled_since == 0 {
            return u64::MAX;
        }
        let all = to_nanos(cx.shared.config.user_timeout);
        all.saturating_sub(self.stalled_for(tcb, cx))
            .saturating_add(1 << 20)
    }

    /// Returns whether `release_memory` would free any memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.send_queue.holds_memory() || self.recovery.is_some()
    }

    /// Frees the memory of an empty queue and of a finished recovery.
    pub(crate) fn release_memory(&mut self, tcb: &Tcb) {
        self.send_queue.release_memory();
        if !tcb.has(ConnectionFlags::RECOVERING)
            && let Some(recovery) = self.recovery.take()
        {
            self.reorder_window = recovery.rack.reorder_window;
        }
    }
}
