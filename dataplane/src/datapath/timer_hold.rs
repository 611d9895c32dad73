//! Retransmission timers wait while what would stop them may still lie in a receive ring:
//! after a burst that came up full, and after the thread was away. The worker asks this
//! whether to let its stacks' timers run.

use siw_tcp::Instant;

/// See the module.
#[derive(Default)]
pub struct TimerHold {
    last_turn: Instant,
    /// Turns left to hold.
    turns: u32,
    /// When holding began.
    since: Instant,
}

impl TimerHold {
    const AWAY_NS: u64 = 300_000;
    /// Data, its acknowledgement, and what that releases each take a turn.
    const TURNS: u32 = 3;
    /// A flood must not stop the clock.
    const LONGEST_NS: u64 = 10_000_000;

    /// Once a turn, before frames are taken.
    #[inline]
    pub fn on_batch_start(&mut self, now: Instant) {
        if now.0.saturating_sub(self.last_turn.0) > Self::AWAY_NS {
            self.hold_timers(now);
        }
        self.last_turn = now;
    }

    /// More may wait than was taken.
    #[inline]
    pub fn hold_timers(&mut self, now: Instant) {
        if self.turns == 0 {
            self.since = now;
        }
        self.turns = Self::TURNS;
    }

    /// Whether timers wait this turn; asked once a turn, after frames were taken.
    #[inline]
    pub fn is_held(&mut self, now: Instant) -> bool {
        let held = self.turns > 0 && now.0.saturating_sub(self.since.0) <= Self::LONGEST_NS;
        self.turns = self.turns.saturating_sub(1);
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_wait_three_turns_after_the_thread_was_away_and_no_flood_holds_them_for_ever() {
        let mut hold = TimerHold::default();
        hold.on_batch_start(Instant(5_000_000));
        for _ in 0..3 {
            assert!(hold.is_held(Instant(5_000_000)));
        }
        assert!(!hold.is_held(Instant(5_000_000)));
        hold.on_batch_start(Instant(5_000_100));
        assert!(
            !hold.is_held(Instant(5_000_100)),
            "turns in quick succession hold nothing"
        );
        let mut now = 5_000_100;
        let mut held = 0;
        for _ in 0..1000 {
            now += 100_000;
            hold.on_batch_start(Instant(now));
            hold.hold_timers(Instant(now));
            held += u32::from(hold.is_held(Instant(now)));
        }
        assert!(held <= 101, "{held} turns of 0.1 ms");
    }
}
