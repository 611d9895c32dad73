//! The service manager's watchdog (`WatchdogSec` of systemd, sd_notify(3)): it hears `WATCHDOG=1`
//! only after every worker has executed a command that the control thread gave it for this. So a
//! thread that hangs, whichever it is, is found within the time that the unit names.

use std::time::{Duration, Instant};

use super::ControlThread;
use crate::host;
use crate::ids::CommandToken;

/// Rounds in each interval of the service manager: two may be late.
const ROUNDS_PER_INTERVAL: u32 = 3;

/// Rounds of barriers through all workers.
pub(super) struct Watchdog {
    period: Duration,
    next_round: Instant,
    /// The round under way: its barrier, and how many workers have not reached it.
    round: Option<(CommandToken, usize)>,
}

impl Watchdog {
    /// For a service manager that wants to hear from the daemon within each `interval`.
    pub fn new(interval: Duration) -> Watchdog {
        Watchdog {
            period: interval / ROUNDS_PER_INTERVAL,
            next_round: Instant::now(),
            round: None,
        }
    }

    /// `None` while a round is under way: its end wakes the control thread.
    pub fn time_until_round(&self) -> Option<Duration> {
        let left = self.next_round.saturating_duration_since(Instant::now());
        self.round.is_none().then_some(left)
    }

    /// Whether the barrier is this round's. The last worker's ends the round.
    pub fn on_barrier(&mut self, token: CommandToken) -> bool {
        let Some((_, left)) = self.round.as_mut().filter(|round| round.0 == token) else {
            return false;
        };
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.round = None;
            host::notify_service_manager("WATCHDOG=1");
        }
        true
    }
}

impl ControlThread {
    /// Starts the next round when it is time.
    pub(super) fn run_watchdog(&mut self) {
        let now = Instant::now();
        if let Some(watchdog) = &mut self.watchdog
            && watchdog.round.is_none()
            && now >= watchdog.next_round
        {
            watchdog.next_round = now + watchdog.period;
            watchdog.round = Some(self.workers.post_barrier());
        }
    }
}
