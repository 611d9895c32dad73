//! Marks that the peer echoes reduce the congestion window (RFC 3168 section 6.1.2; for DCTCP, RFC 8257
//! section 3.3).

use crate::congestion::RecoveryPhase;
use crate::connection::context::TcpContext;
use crate::connection::sender::Sender;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::{SendFlags, SendVariables};
use crate::wire::segment::{ECE, Segment};

impl SendVariables {
    /// Announces a reduction of the congestion window, for whatever reason: the next new segment
    /// carries CWR (RFC 3168 section 6.1.2).
    #[inline]
    pub(crate) fn announce_reduction(&mut self, tcb: &Tcb, cx: &mut TcpContext<'_>) {
        if tcb.has(ConnectionFlags::ECN) && cx.may_send_ect() {
            self.set(SendFlags::SEND_CWR);
        }
    }
}

impl<R> Sender<R> {
    /// Processes the ACK of `newly` bytes on a connection with ECN.
    #[inline]
    pub(crate) fn on_ecn_ack(
        &mut self,
        tcb: &Tcb,
        cx: &mut TcpContext<'_>,
        seg: &Segment,
        newly: u32,
    ) {
        let flight = self.snd.flight_state(tcb.emss);
        let marked = seg.flags & ECE != 0;
        if self.congestion.on_ecn_ack(&flight, newly, marked) {
            self.reduce_for_mark(tcb, cx, newly);
        }
    }

    /// Reduces the congestion window for an echoed mark, at most once per window of data (RFC 3168
    /// section 6.1.2, RFC 8257 section 3.3). The ACK acknowledges `newly` bytes.
    #[cold]
    fn reduce_for_mark(&mut self, tcb: &Tcb, cx: &mut TcpContext<'_>, newly: u32) {
        self.snd.announce_reduction(tcb, cx);
        // Any other phase has reduced the window already.
        if self.snd.phase == RecoveryPhase::Open {
            cx.shared.stats.ecn_reductions += 1;
            let flight = self.snd.flight_state(tcb.emss);
            // An earlier reduction can no longer be undone without also undoing this one.
            if let Some(recovery) = &mut self.recovery {
                recovery.reduction.confirm();
            }
            self.congestion
                .on_mark(&mut self.snd.window, &flight, newly, cx.now.0);
        }
    }
}
