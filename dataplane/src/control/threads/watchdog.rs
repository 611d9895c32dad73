//! The service manager's watchdog (`WatchdogSec` of systemd, sd_notify(3)): `WATCHDOG=1` is sent
//! only after every worker has passed a barrier of the control thread. Any thread that hangs is
//! therefore detected within the interval of the unit.

use std::time::{Duration, Instant};

use super::workers::WorkerSet;
use crate::host;
use crate::ids::CommandToken;

/// Rounds per interval of the service manager: two may be late.
const ROUNDS_PER_INTERVAL: u32 = 3;

/// Rounds of barriers through all workers.
pub(in crate::control) struct Watchdog {
    period: Duration,
    next_round: Instant,
    /// Current round: its barrier, and the number of workers that have not passed it.
    round: Option<(CommandToken, usize)>,
}

impl Watchdog {
    /// Creates a watchdog for a service manager that expects a message within each `interval`.
    pub fn new(interval: Duration) -> Watchdog {
        Watchdog {
            period: interval / ROUNDS_PER_INTERVAL,
            next_round: Instant::now(),
            round: None,
        }
    }

    /// Time until the next round; `None` during a round, whose end wakes the control thread.
    pub fn time_until_round(&self) -> Option<Duration> {
        let left = self.next_round.saturating_duration_since(Instant::now());
        self.round.is_none().then_some(left)
    }

    /// Counts a worker's barrier; the last one ends the round. Returns false for a barrier of
    /// another kind.
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

    /// Starts the next round if it is due.
    pub fn run(&mut self, workers: &mut WorkerSet) {
        let now = Instant::now();
        if self.round.is_none() && now >= self.next_round {
            self.next_round = now + self.period;
            self.round = Some(workers.post_barrier(None));
        }
    }
}
