//! Measures the processor time of a piece of work, which unlike wall-clock time does not grow when the
//! machine is busy.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the result of `work` and the processor time that this thread used for it.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = thread_time();
    let result = work();
    (result, thread_time() - start)
}
