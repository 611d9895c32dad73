//! The link-layer destination of a connection's frames, and the wait for a neighbour that does not
//! answer (ARP, RFC 826; NDP, RFC 4861).

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::state::TcpState;
use crate::base::time::{to_nanos, to_ticks};
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::link::neighbours::NeighbourLookup;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

impl<B: RecvBuf, R> Connection<B, R> {
    /// Returns whether the template has the current link-layer destination, after a lookup if
    /// needed. If not, the connection waits for its neighbour and is scheduled again when the
    /// neighbour answers.
    #[inline]
    pub(crate) fn ensure_resolved(&mut self, cx: &mut TcpContext<'_>) -> bool {
        self.neighbour_generation == cx.shared.neighbours.generation || self.resolve_neighbour(cx)
    }

    #[cold]
    fn resolve_neighbour(&mut self, cx: &mut TcpContext<'_>) -> bool {
        if self.tcb.has(ConnectionFlags::SELF_ADDRESSED) {
            self.template.set_destination(cx.shared.config.mac);
        } else {
            let Some(hop) = cx.shared.next_hop(self.template.key().remote().ip()) else {
                return false;
            };
            let unproven =
                self.tcb.state == TcpState::SynReceived && self.tcb.has(ConnectionFlags::PASSIVE);
            let waiter = self.id(cx.index);
            let owner = cx.shared.side_table.quota_owner(cx.index);
            let neighbours = &mut cx.shared.neighbours;
            match neighbours.lookup(hop, waiter, unproven, owner, cx.now) {
                NeighbourLookup::Found(mac) => self.template.set_destination(mac),
                NeighbourLookup::Wait => return false,
                NeighbourLookup::Full => {
                    cx.shared.stats.neighbour_overflows += 1;
                    // No answer will schedule the connection; its timer retries.
                    return false;
                }
            }
        }
        self.neighbour_generation = cx.shared.neighbours.generation;
        if self.tcb.is_timer(Timer::NeighbourResolution) {
            // Segments sent from now on get the full timeouts.
            self.tcb.stop_timer();
            self.tcb.backoff = 0;
            self.stalled_since = 0;
        }
        true
    }

    /// Starts the timer of a connection with pending output whose neighbour is not resolved. With
    /// nothing in flight no other timer runs, and this one bounds the wait: the neighbour may stay
    /// silent, or the table may have had no room for the request.
    #[cold]
    pub(crate) fn wait_for_neighbour(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.timer().is_some()
            || !(self.is_busy() || self.tcb.has(ConnectionFlags::NEED_MASK))
        {
            return;
        }
        if self.stalled_since == 0 && self.is_busy() {
            self.stalled_since = to_ticks(cx.now.0).max(1);
        }
        self.start_neighbour_timer(cx);
    }

    /// (Re)starts the timer: with the time after which the neighbour table gives up, doubled after
    /// each expiry, and at most up to the user timeout.
    fn start_neighbour_timer(&mut self, cx: &mut TcpContext<'_>) {
        let asked = cx.shared.neighbours.resolution_time();
        let longest = to_nanos(cx.shared.config.rto_max).max(asked);
        let pause = asked
            .saturating_mul(1 << self.tcb.backoff.min(20))
            .min(longest);
        let left = self.user_timeout_left(cx);
        let at = cx.now.0.saturating_add(pause.min(left));
        self.tcb.set_timer(Timer::NeighbourResolution, at);
        cx.schedule_timer(&mut self.tcb, at);
    }

    /// Requests the neighbour again after it did not answer in time, unless the user timeout has
    /// passed (RFC 9293 section 3.8.3).
    pub(crate) fn neighbour_timeout(&mut self, cx: &mut TcpContext<'_>) {
        if !self.is_busy() {
            self.drop_unsent_acks();
            return;
        }
        if self.is_user_timeout_over(cx) {
            self.abort_on_timeout(cx);
            return;
        }
        self.tcb.backoff = self.tcb.backoff.saturating_add(1);
        self.start_neighbour_timer(cx);
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
    }

    /// Handles the failure of the neighbour table to resolve the neighbour.
    pub(crate) fn on_neighbour_failed(&mut self, cx: &mut TcpContext<'_>) {
        match self.tcb.state {
            TcpState::SynSent | TcpState::SynReceived => {
                self.fail_connection(cx, Events::UNREACHABLE)
            }
            TcpState::Closed => {}
            // Data waits: the neighbour is asked again at once, which makes a request per
            // `retransmit`, the limit of RFC 1122 section 2.3.2.1.
            _ if self.is_busy() => cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE),
            _ => {
                self.drop_unsent_acks();
                if self.tcb.is_timer(Timer::NeighbourResolution) {
                    self.tcb.stop_timer();
                }
            }
        }
    }

    /// Drops ACKs and keepalive probes that cannot be sent, as if the link had lost them: the peer
    /// retransmits its segment, and the keepalive timer the probe.
    fn drop_unsent_acks(&mut self) {
        self.tcb.flags.remove(ConnectionFlags::NEED_MASK);
    }
}
