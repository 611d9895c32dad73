//! The loop of a pinned thread: batch after batch while there is work, spinning for a while when
//! there is none, then sleep.

use siw_net::Instant;

use super::clock::TscClock;
use super::idle::Idle;

/// A thread that works in batches and reads the clock once for each.
pub trait BatchLoop {
    /// True when the thread has finished its task.
    fn is_finished(&self) -> bool;

    /// The clock that each batch reads once.
    fn clock(&self) -> &TscClock;

    /// Decides between spinning and sleeping.
    fn idle(&mut self) -> &mut Idle;

    /// Runs one batch: receive, process, send. Returns true if there was any work.
    fn run_batch(&mut self, now: Instant) -> bool;

    /// Notes the time of a batch.
    fn note_batch(&mut self, _began: Instant, _ended: Instant) {}

    /// Sleeps until there may be work.
    fn sleep(&mut self, now: Instant);

    /// Runs until [`Self::is_finished`].
    fn run_until_finished(&mut self) {
        let mut now = self.clock().now();
        while !self.is_finished() {
            let is_busy = self.run_batch(now);
            let began = now;
            // Ends this batch and begins the next one.
            now = self.clock().now();
            self.note_batch(began, now);
            if is_busy {
                self.idle().note_busy(now);
            } else if !self.is_finished() && self.idle().may_sleep(now) {
                self.sleep(now);
                now = self.clock().now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}
