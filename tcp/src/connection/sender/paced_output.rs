//! Limit of new segments by the pacer; see [`crate::congestion::pacing`].

use crate::congestion::pacing::{PacingCredit, is_effective};
use crate::connection::context::TcpContext;
use crate::connection::sender::Sender;
use crate::tcb::send_variables::SendFlags;

impl<R> Sender<R> {
    /// Returns how many bytes of new segments may be sent now. The caller starts the pacing timer for
    /// [`PacingCredit::NotBefore`]. `emss`: payload bytes of a full segment.
    #[inline]
    pub(crate) fn pacing_credit(&mut self, emss: u16, cx: &mut TcpContext<'_>) -> PacingCredit {
        // The usual case in a fabric: a connection without a congestion event is not paced, at the
        // cost of one comparison.
        if !self.snd.window.is_paced() {
            return PacingCredit::Unlimited;
        }
        self.ask_pacer(emss, cx)
    }

    #[cold]
    fn ask_pacer(&mut self, emss: u16, cx: &mut TcpContext<'_>) -> PacingCredit {
        let flight = self.snd.flight_state(emss);
        let window = self.snd.window;
        if !is_effective(&window, &flight, self.snd.phase) {
            self.snd.clear(SendFlags::WAITS_FOR_PACER);
            return PacingCredit::Unlimited;
        }
        let in_use = self.congestion.validation.is_validated();
        let pacer = &mut self.recovery_state().pacer;
        let credit = pacer.take_credit(&window, &flight, in_use, cx.now.0);
        match credit {
            PacingCredit::NotBefore(_) if self.snd.unsent > 0 => {
                let waits = self.snd.has(SendFlags::WAITS_FOR_PACER);
                cx.shared.stats.paced += u64::from(!waits);
                self.snd.set(SendFlags::WAITS_FOR_PACER);
            }
            PacingCredit::NotBefore(_) => return PacingCredit::Bytes(0),
            _ => self.snd.clear(SendFlags::WAITS_FOR_PACER),
        }
        credit
    }

    /// Records that `sent` bytes of new segments were sent, within the limit that
    /// [`pacing_credit`](Self::pacing_credit) returned.
    #[cold]
    pub(crate) fn on_paced_output(&mut self, sent: u32) {
        let (window, srtt) = (self.snd.window, self.snd.rtt.srtt);
        self.recovery_state().pacer.on_sent(&window, srtt, sent);
    }
}
