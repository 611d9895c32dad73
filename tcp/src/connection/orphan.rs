//! Connections whose owner released them before they ended. No owner waits for them, so they end at
//! a time fixed from the start, regardless of the peer's answers: it may keep its window closed and
//! answer every probe, or acknowledge byte by byte.

use siw_net::to_nanos;

use crate::base::state::TcpState;
use crate::base::time::{at_ticks, to_ticks};
use crate::connection::closing_list::Closing;
use crate::connection::context::TcpContext;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;

/// Ticks wrap after 52 days; a deadline is at most this many ticks ahead: 12 days.
const ORPHAN_TICKS_MAX: u64 = 1 << 30;

impl Tcb {
    /// Starts the deadline of a closing connection that its owner has released. Queued data and our
    /// FIN have `orphan_timeout` to be acknowledged; after that the peer has the duration of a
    /// TIME-WAIT to close its direction.
    pub(crate) fn start_orphan_timer(&mut self, cx: &mut TcpContext<'_>) {
        let config = &cx.shared.config;
        let after = match self.state {
            TcpState::FinWait2 => config.time_wait,
            TcpState::SynReceived | TcpState::FinWait1 | TcpState::Closing | TcpState::LastAck => {
                config.orphan_timeout
            }
            _ => return,
        };
        let ticks = (to_nanos(after) >> 20).min(ORPHAN_TICKS_MAX) as u32 + 1;
        let until = to_ticks(cx.now.0).wrapping_add(ticks).max(1);
        cx.shared.side_table.fields_of(cx.id.index).orphan_until = until;
        cx.shared.closing.push(Closing::Orphan, cx.id.index);
        let at = at_ticks(until, cx.now);
        cx.schedule_timer(self, at);
    }

    /// Returns when the orphan ends, in ns; `None` if it has an owner or ends by other means.
    pub(crate) fn orphan_deadline(&self, cx: &TcpContext<'_>) -> Option<u64> {
        if !self.has(ConnectionFlags::RELEASED) {
            return None;
        }
        let until = cx.shared.side_table.orphan_until(cx.id.index)?;
        Some(at_ticks(until, cx.now))
    }
}

impl TcpContext<'_> {
    /// Stops the orphan's deadline: it ended or is in TIME-WAIT, which ends by itself.
    pub(crate) fn stop_orphan_timer(&mut self) {
        self.shared.closing.remove(self.id.index);
        self.shared.side_table.fields_of(self.id.index).orphan_until = 0;
    }
}
