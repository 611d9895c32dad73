//! The reset that a connection sends at its end. It is output of the connection itself: the slot stays
//! in use until the sink has taken the frame, so that each peer is told, however many connections
//! end at once.

use siw_net::FrameSink;

use crate::base::sink_full::SinkFull;
use crate::base::state::TcpState;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::{ACK, RST};
use crate::wire::template::SegmentFields;

impl PathState {
    /// Returns whether the end of this connection, in its current state, requires a reset: its peer
    /// may have state, and the neighbour was resolved once.
    fn may_reset(&self, tcb: &Tcb) -> bool {
        self.neighbour_generation != 0
            && !matches!(
                tcb.state,
                TcpState::SynSent | TcpState::Closed | TcpState::TimeWait
            )
    }
}

impl<B, R> Connection<B, R> {
    /// Schedules the reset of a connection that the caller is about to close.
    pub(crate) fn schedule_reset(&mut self, cx: &mut TcpContext<'_>) {
        if self.path.may_reset(&self.tcb) {
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NEED_RESET);
        }
    }

    /// Sends the reset of a closed connection, if one is due.
    pub(crate) fn send_pending_reset(
        &mut self,
        cx: &mut TcpContext<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        if !self.tcb.has(ConnectionFlags::NEED_RESET) {
            return Ok(());
        }
        let fields = self.reset_fields(cx);
        self.path.send_bare_segment(&self.tcb, cx, &fields, sink)?;
        self.tcb.flags.remove(ConnectionFlags::NEED_RESET);
        cx.shared.stats.out_rsts += 1;
        Ok(())
    }

    /// Queues the reset among the frames that belong to no connection, for a connection whose slot
    /// is needed at once. Returns `false` if there is no room.
    pub(crate) fn hand_over_reset(&self, cx: &mut TcpContext<'_>) -> bool {
        if !self.path.may_reset(&self.tcb) {
            return true;
        }
        if !cx.shared.net.has_room() {
            return false;
        }
        let fields = self.reset_fields(cx);
        cx.shared.stats.out_rsts += 1;
        cx.shared.push_segment(&self.path.template, &fields);
        true
    }

    /// Returns the fields of the reset, with timestamps if agreed (RFC 7323 section 3.2).
    fn reset_fields(&self, cx: &TcpContext<'_>) -> SegmentFields<'static> {
        SegmentFields {
            seq: self.sender.snd.bare_seq(self.tcb.state),
            ack: self.receiver.rcv.nxt,
            flags: RST | ACK,
            window: 0,
            ts: self.path.timestamps(&self.tcb, &self.receiver.rcv, cx.now),
            options: &[],
            payload: 0,
            ect: false,
            tso: false,
        }
    }
}
