//! Retransmission timers wait while what would stop them may still lie in a receive ring:
//! after a burst that came up full, and after the thread was away. The worker asks this for
//! the time that its stacks' timers go by.

use siw_tcp::Instant;

/// See the module.
#[derive(Default)]
pub struct TimerHold {
    last_turn: Instant,
    /// Turns left to hold.
    turns: u32,
    /// When holding began.
    since: Instant,
    /// What timers think the time is.
    now: Instant,
}

impl TimerHold {
    const AWAY_NS: u64 = 300_000;
    /// Data, its acknowledgement, and what that releases each take a turn.
    const TURNS: u32 = 3;
    /// A flood must not stop the clock.
    const LONGEST_NS: u64 = 10_000_000;

    /// Once a turn, before frames are taken.
    #[inline]
    pub fn turn(&mut self, now: Instant) {
        if now.0.saturating_sub(self.last_turn.0) > Self::AWAY_NS {
            self.hold(now);
        }
        self.last_turn = now;
    }

    /// More may wait than was taken.
    #[inline]
    pub fn hold(&mut self, now: Instant) {
        if self.turns == 0 {
            self.since = now;
        }
        self.turns = Self::TURNS;
    }

    /// The time for timers, after frames were taken.
    #[inline]
    pub fn now(&mut self, now: Instant) -> Instant {
        if self.turns == 0 || now.0.saturating_sub(self.since.0) > Self::LONGEST_NS {
            self.now = now;
        }
        self.turns = self.turns.saturating_sub(1);
        self.now
    }
}
