//! Longest batch of a thread, in processor time: what one client's work can add to a message of another.
//!
//! A batch is measured with the clock that the loop reads anyway. Where that shows a long batch, the
//! thread may have lost its core meanwhile; the processor time tells.

use std::time::Duration;

use siw_net::Instant;
// From the C library: rustix looks up the vDSO by itself, which valgrind has removed.
use nix::time::{ClockId, clock_gettime};

/// Up to this time, a batch counts as the clock shows it. Reading the processor time is a system call
/// of less than a microsecond.
const UNCHECKED: Duration = Duration::from_micros(50);

/// Longest batch of a thread.
pub(crate) struct BatchTimes {
    longest: Duration,
    /// Longer batches are looked at.
    noted_above: Duration,
    /// Last reading of the processor time.
    read_at: Instant,
    processor_time: Duration,
    /// Time of the sleep since then.
    asleep: Duration,
}

impl BatchTimes {
    /// Called on the thread that runs the batches.
    pub(crate) fn new(now: Instant) -> BatchTimes {
        BatchTimes {
            longest: Duration::ZERO,
            noted_above: Duration::ZERO,
            read_at: now,
            processor_time: thread_time(),
            asleep: Duration::ZERO,
        }
    }

    /// Longest batch so far.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }

    /// Counts a batch.
    #[inline]
    pub(crate) fn note_batch(&mut self, began: Instant, ended: Instant) {
        let elapsed = ended.duration_since(began);
        if elapsed > self.noted_above {
            self.note_long(elapsed, ended, thread_time);
        }
    }

    /// Counts a batch that the clock shows as long: the time that the thread did not run since the last
    /// reading is not the batch's.
    #[cold]
    fn note_long(&mut self, elapsed: Duration, ended: Instant, read: impl FnOnce() -> Duration) {
        let spent = if elapsed <= UNCHECKED {
            elapsed
        } else {
            let awake = ended
                .duration_since(self.read_at)
                .saturating_sub(self.asleep);
            let before = self.processor_time;
            self.read(ended, read());
            let ran = self.processor_time.saturating_sub(before);
            elapsed.saturating_sub(awake.saturating_sub(ran))
        };
        self.longest = self.longest.max(spent);
        self.noted_above = self.longest.min(UNCHECKED);
    }

    /// Reads the processor time before the thread sleeps, so that system calls of earlier sleeps do not
    /// count.
    pub(crate) fn begin_sleep(&mut self, now: Instant) {
        self.read(now, thread_time());
    }

    /// Excludes a sleep that began with the last reading.
    pub(crate) fn end_sleep(&mut self, now: Instant) {
        self.asleep = now.duration_since(self.read_at);
    }

    fn read(&mut self, now: Instant, time: Duration) {
        (self.read_at, self.processor_time, self.asleep) = (now, time, Duration::ZERO);
    }
}

/// Processor time of the calling thread; zero if the operating system does not report it.
pub(crate) fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Counts a batch from `began` to `ended`, until whose end the thread has run for `ran` in all.
    fn note(times: &mut BatchTimes, began: u64, ended: u64, ran: u64) {
        let elapsed = at(ended).duration_since(at(began));
        if elapsed > times.noted_above {
            times.note_long(elapsed, at(ended), || us(ran));
        }
    }

    fn new() -> BatchTimes {
        BatchTimes {
            processor_time: Duration::ZERO,
            ..BatchTimes::new(at(0))
        }
    }

    #[test]
    fn the_longest_batch_counts_without_the_time_that_the_thread_did_not_run() {
        let mut times = new();
        note(&mut times, 0, 10, 10);
        assert_eq!(times.longest(), us(10));
        note(&mut times, 10, 15, 15);
        assert_eq!(times.longest(), us(10));
        // Another thread had the core for 4 ms.
        note(&mut times, 100, 4_130, 130);
        assert_eq!(times.longest(), us(30));
        note(&mut times, 4_130, 4_430, 430);
        assert_eq!(times.longest(), us(300));
        // The loss was between two batches, and may have been in this one.
        note(&mut times, 9_000, 9_310, 1_000);
        assert_eq!(times.longest(), us(300));
    }

    #[test]
    fn sleep_is_no_loss_of_the_core() {
        let mut times = new();
        times.read(at(1_000), us(1_000));
        times.end_sleep(at(900_000));
        note(&mut times, 900_000, 900_400, 1_410);
        assert_eq!(times.longest(), us(400));
    }

    #[test]
    fn a_batch_that_works_is_measured_by_the_operating_system() {
        let begin = std::time::Instant::now();
        let now =
            |begin: std::time::Instant| Instant::from_nanos(begin.elapsed().as_nanos() as u64);
        let mut times = BatchTimes::new(now(begin));
        let (began, before) = (now(begin), thread_time());
        while thread_time() - before < us(2_000) {}
        times.note_batch(began, now(begin));
        // The clocks are read one after the other.
        assert!(times.longest() >= us(1_500), "{:?}", times.longest());
        let longest = times.longest();
        let began = now(begin);
        std::thread::sleep(20 * longest);
        times.note_batch(began, now(begin));
        assert!(times.longest() < 10 * longest, "{:?}", times.longest());
    }
}
