//! The send side of a connection: SND.*, the queue of records and segments in flight, congestion control,
//! and the recovery from losses.
//!
//! ```text
//! ack           acknowledgements
//! ecn           echoed marks
//! new_segments  new segments: which may be sent, and what follows
//! paced_output  the limit of new segments by the pacer
//! ```

pub(crate) mod ack;
pub(crate) mod ecn;
pub(crate) mod new_segments;
pub(crate) mod paced_output;

use siw_net::to_nanos;

use crate::base::time::to_ticks;
use crate::config::CongestionControl;
use crate::congestion::CongestionState;
use crate::connection::context::TcpContext;
use crate::loss::rack::ReorderWindow;
use crate::loss::recovery::Recovery;
use crate::queues::send_buffer::{RETX, SendBuffer};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::{SendFlags, SendVariables};

/// The send side of one connection.
///
/// The variables that every segment accesses come first: they follow the [`Tcb`] in the connection.
#[repr(C)]
pub(crate) struct Sender<R> {
    pub snd: SendVariables,
    pub send_buffer: SendBuffer<R>,
    /// The state of a loss recovery, kept until the connection is idle.
    pub recovery: Option<Box<Recovery>>,
    pub congestion: CongestionState,
    /// The effective MSS agreed in the handshake, the upper limit of [`Tcb::emss`].
    pub emss_agreed: u16,
    /// RACK's reordering window, kept here while there is no `recovery`.
    pub reorder_window: ReorderWindow,
}

impl<R> Sender<R> {
    /// Returns a send side without data. `emss`: payload bytes of a full segment.
    pub(crate) fn new(congestion: CongestionControl, emss: u16) -> Self {
        Sender {
            snd: SendVariables::new(),
            send_buffer: SendBuffer::new(),
            recovery: None,
            congestion: CongestionState::new(congestion),
            emss_agreed: emss,
            reorder_window: ReorderWindow::default(),
        }
    }

    /// Ensures that the recovery state exists and that each segment in flight has a record of its
    /// own, so that segments can be marked.
    #[cold]
    pub(crate) fn start_recovery(&mut self) {
        self.recovery_state();
        self.split_multi_segments();
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
    pub(crate) fn recovery_state(&mut self) -> &mut Recovery {
        let (una, reorder_window) = (self.snd.una, self.reorder_window);
        self.recovery.get_or_insert_with(|| {
            let mut recovery = Box::new(Recovery::new(una));
            recovery.rack.reorder_window = reorder_window;
            recovery
        })
    }

    /// Returns whether segments wait to be sent again.
    #[inline]
    pub(crate) fn has_lost_segments(&self) -> bool {
        self.snd.has(SendFlags::RECOVERING)
            && self
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.lost > 0)
    }

    /// Splits the records of segments that were sent together into one per segment, before any is
    /// marked.
    pub(crate) fn split_multi_segments(&mut self) {
        if self.snd.has(SendFlags::MULTI_SEGMENT) {
            self.snd.clear(SendFlags::MULTI_SEGMENT);
            // Records split earlier are not visited again: a peer can make each of its ACKs cause a
            // search for losses.
            let first = match &mut self.recovery {
                Some(recovery) => {
                    let split_to = core::mem::replace(&mut recovery.split_to, self.snd.nxt);
                    self.send_buffer.first_after(split_to)
                }
                None => 0,
            };
            self.send_buffer.split_multi_segments(first);
        }
    }

    /// Resegments the segments in flight that exceed `emss` bytes, the path MTU, to be retransmitted.
    pub(crate) fn resegment(&mut self, emss: u16) {
        self.split_multi_segments();
        self.send_buffer.resegment_to(u32::from(emss));
        self.start_recovery();
        if let Some(recovery) = &mut self.recovery {
            recovery.recount_lost(&mut self.snd, &self.send_buffer);
        }
    }

    /// Handles a retransmission timeout: marks the lost segments, and begins slow start (RFC 5681
    /// section 3.1).
    pub(crate) fn on_retransmission_timeout(&mut self, tcb: &Tcb, cx: &mut TcpContext<'_>) {
        self.start_recovery();
        let snd = &mut self.snd;
        if let Some(recovery) = &mut self.recovery {
            let flight = snd.flight_state(tcb.emss);
            self.congestion.on_timeout(
                &mut snd.window,
                &mut recovery.reduction,
                &flight,
                snd.phase,
            );
            let has_sack = tcb.has(ConnectionFlags::SACK);
            recovery.mark_after_timeout(snd, &mut self.send_buffer, has_sack, cx.now.0);
            recovery.timeouts_in_row = recovery.timeouts_in_row.saturating_add(1);
        }
        let flight = snd.flight_state(tcb.emss);
        self.congestion
            .after_timeout(&mut snd.window, &flight, cx.now.0);
        snd.announce_reduction(tcb, cx);
        snd.backoff = snd.backoff.saturating_add(1);
        snd.dup_acks = 0;
    }

    /// Returns whether the user timeout passed without progress (RFC 9293 section 3.8.3).
    pub(crate) fn is_user_timeout_over(&mut self, tcb: &Tcb, cx: &TcpContext<'_>) -> bool {
        if self.snd.stalled_since == 0 {
            self.snd.stalled_since = to_ticks(
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
        let heard = if self.snd.wnd < self.snd.flight() {
            tcb.last_rx
        } else {
            0
        };
        let stalled = u64::from(to_ticks(cx.now.0).wrapping_sub(self.snd.stalled_since)) << 20;
        stalled.min(cx.now.0.saturating_sub(heard))
    }

    /// Returns the rest of the user timeout in ns, rounded up so that `is_user_timeout_over` is
    /// true when it expires.
    pub(crate) fn user_timeout_left(&self, tcb: &Tcb, cx: &TcpContext<'_>) -> u64 {
        if self.snd.stalled_since == 0 {
            return u64::MAX;
        }
        let all = to_nanos(cx.shared.config.user_timeout);
        all.saturating_sub(self.stalled_for(tcb, cx))
            .saturating_add(1 << 20)
    }

    /// Discards what was to be sent: the connection has ended. Records stay for their owner.
    pub(crate) fn discard_output(&mut self) {
        self.snd.clear(SendFlags::RECOVERING);
        (self.snd.pipe, self.snd.unsent) = (0, 0);
        self.recovery = None;
    }

    /// Returns whether `release_memory` would free any memory.
    pub(crate) fn holds_memory(&self) -> bool {
        self.send_buffer.holds_memory() || self.recovery.is_some()
    }

    /// Frees the memory of an empty queue and of a finished recovery.
    pub(crate) fn release_memory(&mut self) {
        self.send_buffer.release_memory();
        if !self.snd.has(SendFlags::RECOVERING)
            && let Some(recovery) = self.recovery.take()
        {
            self.reorder_window = recovery.rack.reorder_window;
        }
    }
}
