//! Snapshot of a worker's counters.

use std::time::Duration;

use super::Worker;
use super::messages::{PortStats, SharedLines, WorkerStats};
// From the C library: rustix looks up the vDSO by itself, which valgrind has removed.
use nix::sched::sched_getcpu;
use nix::time::{ClockId, clock_gettime};

impl Worker {
    pub(super) fn statistics(&self) -> WorkerStats {
        WorkerStats {
            queue_pairs: self.connections.queue_pairs.count(),
            iterations: self.batches,
            sleeps: self.wake_sources.sleeps(),
            core: sched_getcpu().unwrap_or_default(),
            cpu_ns: thread_cpu_ns(),
            placed_out_of_order: self.connections.placed_out_of_order,
            receive_waits: self.connections.receive_waits.begun,
            receive_wait_timeouts: self.connections.receive_waits.timed_out,
            shared_lines: SharedLines {
                request_slots: self.connections.context.request_slots,
                request_batches: self.connections.context.request_batches,
                doorbells: self.connections.scheduler.doorbells_taken,
                completions: self.connections.context.cqs.written_entries,
            },
            forward: self.forwarder.stats,
            devices: self
                .connections
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
            buffers_free: self.connections.cache.pool().available_buffers()
                + self.connections.cache.cached_buffers() as u32,
            buffers: self.connections.cache.pool().capacity(),
        }
    }
}

/// CPU time of the calling thread in nanoseconds.
fn thread_cpu_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_or(0, |time| Duration::from(time).as_nanos() as u64)
}
