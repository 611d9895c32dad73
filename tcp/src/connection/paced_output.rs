//! Limit of new segments by the pacer; see [`crate::congestion::pacing`].

use crate::congestion::pacing::{PacingCredit, is_effective};
use crate::connection::context::TcpContext;
use crate::connection::sender::Sender;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;

impl<R> Sender<R> {
    /// Returns how many bytes of new segments may be sent now; `u32::MAX` if the connection is not
    /// paced.
    #[inline]
    pub(crate) fn pacing_credit(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) -> u32 {
        // The usual case in a fabric: a connection without a congestion event is not paced, at the
        // cost of one comparison.
        if !tcb.window.is_paced() {
            return u32::MAX;
        }
        self.ask_pacer(tcb, cx)
    }

    #[cold]
    fn ask_pacer(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>) -> u32 {
        let flight = tcb.flight_state();
        let window = tcb.window;
        if !is_effective(&window, &flight, tcb.phase) {
            tcb.flags.remove(ConnectionFlags::WAITS_FOR_PACER);
            return u32::MAX;
        }
        let in_use = self.congestion.validation.is_validated();
        let pacer = &mut self.recovery_state(tcb).pacer;
        match pacer.take_credit(&window, &flight, in_use, cx.now.0) {
            PacingCredit::Bytes(bytes) => {
                tcb.flags.remove(ConnectionFlags::WAITS_FOR_PACER);
                bytes
            }
            PacingCredit::NotBefore(at) => {
                if tcb.unsent > 0 {
                    cx.shared.stats.paced += u64::from(!tcb.has(ConnectionFlags::WAITS_FOR_PACER));
                    tcb.flags |= ConnectionFlags::WAITS_FOR_PACER;
                    cx.schedule_timer(tcb, at);
                }
                0
            }
        }
    }

    /// Records that `sent` bytes of new segments were sent, within the limit that `pacing_credit`
    /// returned.
    #[cold]
    pub(crate) fn on_paced_output(&mut self, tcb: &mut Tcb, cx: &mut TcpContext<'_>, sent: u32) {
        let (window, srtt) = (tcb.window, tcb.rtt.srtt);
        self.recovery_state(tcb).pacer.on_sent(&window, srtt, sent);
        // Schedules the pacing timer when the credit is used up.
        self.pacing_credit(tcb, cx);
    }
}
