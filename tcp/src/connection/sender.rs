//! The send side of a connection: the queue of records and segments in flight, congestion control, and
//! the recovery from losses.

use crate::base::time::{to_nanos, to_ticks};
use crate::config::CongestionControl;
use crate::congestion::CongestionState;
use crate::connection::context::TcpContext;
use crate::loss::rack::ReorderWindow;
use crate::loss::recovery::Recovery;
use crate::queues::send_buffer::{RETX, SendBuffer};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

/// The send side of one connection. SND.UNA, SND.NXT, the windows and the round trip are in its
/// [`Tcb`].
#[repr(C)]
pub(crate) struct Sender<R> {
    pub send_buffer: SendBuffer<R>,
    /// The state of a loss recovery, kept until the connection is idle.
    pub recovery: Option<Box<Recovery>>,
    pub congestion: CongestionState,
    /// The tick at which the current series of timeouts began; 0: none.
    pub stalled_since: u32,
    /// The effective MSS agreed in the handshake, the upper limit of `tcb.emss`.
    pub emss_agreed: u16,
    /// RACK's reordering window, kept here while there is no `recovery`.
    pub reorder_window: ReorderWindow,
}

impl<R> Sender<R> {
    /// Returns a send side without data. `emss`: payload bytes of a full segment.
    pub(crate) fn new(congestion: CongestionControl, emss: u16) -> Self {
        Sender {
            send_buffer: SendBuffer::new(),
            recovery: None,
            congestion: CongestionState::new(congestion),
            stalled_since: 0,
            emss_agreed: emss,
            reorder_window: ReorderWindow::default(),
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

    /// Returns the number of segments in flight that were sent again and are not deemed lost. The cost
    /// is proportional to the number of segments in flight after a loss.
    pub(crate) fn retransmitted_in_flight(&self) -> u32 {
        // Without a recovery no segment is marked.
        if self.recovery.is_none() {
            return 0;
        }
        let in_flight = self.send_buffer.sent.iter();
        let again = in_flight.filter(|segment| segment.flags & RETX != 0 && segment.in_pipe());
        again.count() as u32
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
                    self.send_buffer.first_after(split_to)
                }
                None => 0,
            };
            self.send_buffer.split_multi_segments(first);
        }
    }

    /// Resegments the segments in flight that exceed the path MTU, to be retransmitted.
    pub(crate) fn resegment(&mut self, tcb: &mut Tcb) {
        self.split_multi_segments(tcb);
        self.send_buffer.resegment_to(u32::from(tcb.emss));
        self.start_recovery(tcb);
        if let Some(recovery) = &mut self.recovery {
            recovery.recount_lost(tcb, &self.send_buffer);
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
                self.send_buffer
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
        self.send_buffer.holds_memory() || self.recovery.is_some()
    }

    /// Frees the memory of an empty queue and of a finished recovery.
    pub(crate) fn release_memory(&mut self, tcb: &Tcb) {
        self.send_buffer.release_memory();
        if !tcb.has(ConnectionFlags::RECOVERING)
            && let Some(recovery) = self.recovery.take()
        {
            self.reorder_window = recovery.rack.reorder_window;
        }
    }
}
