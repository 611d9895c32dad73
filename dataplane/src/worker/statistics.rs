//! A worker's counters as of now.

use super::Worker;
use super::messages::{PortStats, WorkerStats};
use rustix::thread::sched_getcpu;
use rustix::time::{ClockId, clock_gettime};

impl Worker {
    pub(super) fn statistics(&self) -> WorkerStats {
        WorkerStats {
            queue_pairs: self.queue_pairs.count(),
            iterations: self.batches,
            sleeps: self.wake_sources.sleeps(),
            core: sched_getcpu(),
            cpu_ns: thread_cpu_ns(),
            placed_out_of_order: self.placed_out_of_order,
            receive_waits: self.receive_waits.begun,
            receive_wait_timeouts: self.receive_waits.timed_out,
            forward: self.forwarder.stats,
            devices: self
                .ports
                .iter()
                .map(|port| PortStats {
                    device: port.device,
                    frames_received: port.frames_received,
                    frames_sent: port.output.frames_sent,
                    frames_linearized: port.output.frames_linearized,
                    frames_refused: port.output.frames_refused(),
                    host_frames_sent: port.output.host_frames_sent,
                    host_frames_dropped: port.output.host_frames_dropped,
                    tcp: port.stack.stats().clone(),
                })
                .collect(),
            buffers_free: self.cache.pool().available_buffers()
                + self.cache.cached_buffers() as u32,
            buffers: self.cache.pool().capacity(),
        }
    }
}

/// Nanoseconds that the calling thread has run.
fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000) + time.tv_nsec as u64
}
