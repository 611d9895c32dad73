//! CPU time that the programs of a contender use in the middle of a run: all threads of both ends,
//! and the kernel's threads for received packets.
//!
//! Times are those that the scheduler counts for each thread (proc_pid_schedstat(5)), which include
//! system calls, and packets that the kernel processes within them. A kernel that counts interrupts
//! apart from threads (CONFIG_IRQ_TIME_ACCOUNTING) hides their time, in favour of its own TCP.

use crate::daemon::Process;
use std::fs;
use std::time::{Duration, Instant};

/// Share of a run before the measured middle, for start-up and warm-up.
const BEGIN_SHARE: f64 = 0.3;
/// Share of a run after which nothing counts, since programs end at different times.
const END_SHARE: f64 = 0.8;
/// Shortest measured middle of a run.
const SHORTEST_MIDDLE: Duration = Duration::from_millis(100);

/// CPU use of a contender in the middle of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CpuUse {
    /// Average number of busy cores.
    pub(super) cores: f64,
    /// Rate of the time-stamp counter in GHz.
    pub(super) tsc_ghz: f64,
}

impl CpuUse {
    /// CPU seconds for 10^9 bytes at `gbps` Gb/s.
    pub(super) fn seconds_per_gb(self, gbps: f64) -> f64 {
        self.cores * 8.0 / gbps
    }

    /// Cycles of the time-stamp counter for a message of `size` bytes at `gbps` Gb/s.
    pub(super) fn cycles_per_message(self, gbps: f64, size: f64) -> f64 {
        self.seconds_per_gb(gbps) * size * self.tsc_ghz
    }
}

/// Reads the CPU time of processes while they run.
pub(super) struct CpuSampler {
    processes: Vec<Process>,
    samples: Vec<(Instant, Duration)>,
    begin: (Instant, u64),
}

impl CpuSampler {
    /// Watches the processes with these ids.
    pub(super) fn new(pids: impl IntoIterator<Item = u32>) -> CpuSampler {
        let pids = pids.into_iter().chain(packet_threads());
        CpuSampler {
            processes: pids.map(Process::new).collect(),
            samples: Vec::new(),
            begin: (Instant::now(), dpdk::tsc_now()),
        }
    }

    /// Takes a sample; none once a process has ended.
    pub(super) fn sample(&mut self) {
        let times = self.processes.iter().map(Process::cpu_time);
        if let Ok(time) = times.sum::<anyhow::Result<Duration>>() {
            self.samples.push((Instant::now(), time));
        }
    }

    /// CPU use in the middle of the run; `None` if the run was too short.
    pub(super) fn finish(self) -> Option<CpuUse> {
        let (begin, ticks) = self.begin;
        let tsc_ghz =
            dpdk::tsc_now().wrapping_sub(ticks) as f64 / begin.elapsed().as_nanos().max(1) as f64;
        let cores = busy_cores(&self.samples)?;
        Some(CpuUse { cores, tsc_ghz })
    }
}

/// Average number of busy cores between two shares of the sampled time.
fn busy_cores(samples: &[(Instant, Duration)]) -> Option<f64> {
    let (first, last) = (samples.first()?.0, samples.last()?.0);
    let at = |share: f64| first + (last - first).mul_f64(share);
    let (begin, end) = (at(BEGIN_SHARE), at(END_SHARE));
    let mut middle = samples
        .iter()
        .filter(|(when, _)| (begin..=end).contains(when));
    let (from, to) = (middle.next()?, middle.next_back()?);
    let (wall, cpu) = (to.0 - from.0, to.1.saturating_sub(from.1));
    (wall >= SHORTEST_MIDDLE).then(|| cpu.as_secs_f64() / wall.as_secs_f64())
}

/// Ids of the kernel's threads that process received packets.
fn packet_threads() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_one = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.starts_with("ksoftirqd/"))
    };
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(is_one)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_run_counts() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        // One core during the start, two in the middle, none at the end.
        let cpu = |at: u64| match at {
            0..=250 => at,
            251..=850 => 250 + 2 * (at - 250),
            _ => 1450,
        };
        let samples: Vec<_> = (0..=1000)
            .step_by(50)
            .map(|at| (begin + ms(at), ms(cpu(at))))
            .collect();
        let cores = busy_cores(&samples).unwrap();
        assert!((cores - 2.0).abs() < 1e-9, "{cores}");
        assert_eq!(busy_cores(&samples[..2]), None);
        assert_eq!(busy_cores(&[]), None);
    }

    #[test]
    fn costs_are_per_byte_and_per_message() {
        let used = CpuUse {
            cores: 2.0,
            tsc_ghz: 3.0,
        };
        // 16 Gb/s are 2 GB/s.
        assert!((used.seconds_per_gb(16.0) - 1.0).abs() < 1e-9);
        assert!((used.cycles_per_message(16.0, 64.0) - 192.0).abs() < 1e-9);
    }
}
