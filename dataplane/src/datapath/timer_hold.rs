//! Holds retransmission timers while the acknowledgement that would stop them may still be in a
//! receive ring: after a full burst, and after the thread did not run for a while. Otherwise a busy
//! machine would retransmit data that has arrived.

use std::time::Duration;

use siw_net::Instant;

/// Decides whether TCP's timers run in the current batch.
#[derive(Default)]
pub struct TimerHold {
    last_batch: Instant,
    /// Number of further batches in which timers are held.
    batches_left: u32,
    /// Start of the hold.
    held_since: Instant,
}

impl TimerHold {
    /// Time without a batch after which the thread counts as having been away.
    const AWAY: Duration = Duration::from_micros(300);
    /// Data, its acknowledgement, and the data that this releases each take a batch.
    const BATCHES: u32 = 3;
    /// Bounds the hold, so that a flood of frames cannot stop the timers.
    const LONGEST_HOLD: Duration = Duration::from_millis(10);

    /// Called once per batch, before frames are taken.
    #[inline]
    pub fn on_batch_start(&mut self, now: Instant) {
        if now.duration_since(self.last_batch) > Self::AWAY {
            self.hold_timers(now);
        }
        self.last_batch = now;
    }

    /// Holds the timers: the ring may contain more frames than were taken.
    #[inline]
    pub fn hold_timers(&mut self, now: Instant) {
        if self.batches_left == 0 {
            self.held_since = now;
        }
        self.batches_left = Self::BATCHES;
    }

    /// Returns whether timers are held in this batch. Called once per batch, after frames were taken.
    #[inline]
    pub fn is_held(&mut self, now: Instant) -> bool {
        let is_held =
            self.batches_left > 0 && now.duration_since(self.held_since) <= Self::LONGEST_HOLD;
        self.batches_left = self.batches_left.saturating_sub(1);
        is_held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_wait_after_an_absence_but_not_through_a_flood() {
        let mut hold = TimerHold::default();
        hold.on_batch_start(Instant(5_000_000));
        for _ in 0..3 {
            assert!(hold.is_held(Instant(5_000_000)));
        }
        assert!(!hold.is_held(Instant(5_000_000)));
        hold.on_batch_start(Instant(5_000_100));
        assert!(
            !hold.is_held(Instant(5_000_100)),
            "batches in quick succession hold nothing"
        );
        let mut now = 5_000_100;
        let mut held = 0;
        for _ in 0..1000 {
            now += 100_000;
            hold.on_batch_start(Instant(now));
            hold.hold_timers(Instant(now));
            held += u32::from(hold.is_held(Instant(now)));
        }
        assert!(held <= 101, "{held} batches of 0.1 ms");
    }
}
