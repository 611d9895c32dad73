//! The processor time of a piece of work. Unlike the time on a clock it does not grow when the
//! machine has other things to do.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What `work` returns, and the processor time that this thread needed for it.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = thread_time();
    let result = work();
    (result, thread_time() - start)
}
