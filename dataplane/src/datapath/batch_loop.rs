//! The loop of a pinned thread: batch after batch while there is work, spinning for a while when
//! there is none, then sleep.

use siw_tcp::Instant;

use super::clock::TscClock;
use super::idle::Idle;

/// A thread that works in batches. The clock is read once for each.
pub(crate) trait BatchLoop {
    /// The thread has done what it was started for.
    fn is_finished(&self) -> bool;

    fn clock(&self) -> &TscClock;

    fn idle(&mut self) -> &mut Idle;

    /// One batch of everything: receive, process, send. True when anything was done.
    fn run_batch(&mut self, now: Instant) -> bool;

    /// Sleeps until something may have to be done.
    fn sleep(&mut self, now: Instant);

    /// Runs until [`Self::is_finished`].
    fn run_until_finished(&mut self) {
        while !self.is_finished() {
            let now = self.clock().now();
            if self.run_batch(now) {
                self.idle().note_busy(now);
            } else if !self.is_finished() && self.idle().may_sleep(now) {
                self.sleep(now);
            } else {
                std::hint::spin_loop();
            }
        }
    }
}
