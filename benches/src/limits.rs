//! `siw-perf limits`: limits of the machine without siwd: copying, CRC32c in each implementation,
//! both in one pass, a cache-line round trip between two cores, and waking a thread.

use crate::machine::{
    Conditions, ConditionsWatch, MachineRecord, cache_line_round_trip_ns, wake_up_us,
};
use crate::measurement::{format_bytes, gigabits_per_second};
use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use siw_memory::{crc, crc_copy};
use siw_shm::SharedMemory;
use siw_shm::shared_memory::PageSize;
use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Working set sizes: within the L1, L2 and last-level cache, and beyond.
const WORKING_SETS: [u32; 5] = [16 << 10, 256 << 10, 4 << 20, 32 << 20, 128 << 20];
/// Rounds of each measurement; the best counts, and the spread is reported too.
const ROUNDS: usize = 5;

/// Throughput of one kind of memory work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// Kind of work: `copy`, `copy + CRC32c`, or `CRC32c` with the implementation.
    pub work: String,
    /// Gb/s of the best round, for each working set of [`MachineLimits::working_sets`].
    pub gbps: Vec<f64>,
    /// Gb/s of the worst round, for each working set.
    pub worst_gbps: Vec<f64>,
}

/// The limits of the machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineLimits {
    /// The machine.
    pub machine: MachineRecord,
    /// Conditions during the measurement.
    pub conditions: Conditions,
    /// Bytes processed at a time: the payload of an FPDU.
    pub piece: usize,
    /// Bytes of source and destination together.
    pub working_sets: Vec<u32>,
    /// Each kind of work.
    pub memory: Vec<MemoryLimit>,
    /// The two cores that exchange a cache line; `None` on a single-core machine.
    pub cores: Option<[usize; 2]>,
    /// Cache-line round trip in nanoseconds.
    pub cache_line_ns: Option<f64>,
    /// Microseconds from waking a thread that sleeps on the second core until it runs, woken by the
    /// first core; `None` in results from before this was measured.
    #[serde(default)]
    pub wake_up_us: Option<f64>,
    /// Time of a copy of `ALIGNED_COPY` bytes at the slowest of 64 relative positions of source and
    /// destination in their pages, divided by that at the fastest; `None` in older results.
    #[serde(default)]
    pub slowest_copy_by_fastest: Option<f64>,
}

/// Bytes of the copies at different positions in a page: a frame of 9,000 bytes.
const ALIGNED_COPY: usize = 8928;

/// Measures all limits with pieces of `piece` bytes. `time`: duration of each round of each kind of
/// work.
pub fn measure_limits(
    piece: usize,
    cores: Option<[usize; 2]>,
    time: Duration,
) -> anyhow::Result<MachineLimits> {
    let watch = ConditionsWatch::begin(cores);
    let cache_line_ns = cores.map(cache_line_round_trip_ns).transpose()?;
    let wake_up_us = cores.map(wake_up_us).transpose()?;
    let measure = || Ok((measure_memory(piece, time)?, measure_positions()?));
    // Pinned to one core like a worker; the calling thread keeps its affinity.
    let (memory, slowest_copy_by_fastest) = std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            if let Some([core, _]) = cores {
                dpdk::pin_current_thread(core)?;
            }
            measure()
        });
        pinned
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the measurement panicked")))
    })?;
    Ok(MachineLimits {
        machine: MachineRecord::read(),
        conditions: watch.end(),
        piece,
        working_sets: WORKING_SETS.to_vec(),
        memory,
        cores,
        cache_line_ns,
        wake_up_us,
        slowest_copy_by_fastest: Some(slowest_copy_by_fastest),
    })
}

/// Ratio of the slowest to the fastest copy of `ALIGNED_COPY` bytes, with the destination 8, 72, ...
/// bytes ahead of the source in its page.
fn measure_positions() -> anyhow::Result<f64> {
    let source = SharedMemory::create_memfd("siw-perf-limits", 1 << 16, PageSize::Normal)
        .map_err(|error| anyhow!("memory to measure with: {error}"))?;
    let mut target = vec![0x5au8; 1 << 16];
    source.write(0, &target)?;
    let to_page = target.as_ptr().align_offset(4096);
    let (mut fastest, mut slowest) = (f64::MAX, 0.0_f64);
    for position in (8..4096).step_by(64) {
        let from = to_page + position;
        let to = &mut target[from..from + ALIGNED_COPY];
        let mut best = Duration::MAX;
        for _ in 0..20 {
            let start = Instant::now();
            for _ in 0..10 {
                source.read(0, black_box(&mut *to))?;
            }
            best = best.min(start.elapsed());
        }
        fastest = fastest.min(best.as_secs_f64());
        slowest = slowest.max(best.as_secs_f64());
    }
    Ok(slowest / fastest)
}

/// Work on one piece: source, offset in the source, and destination.
type PieceWork = Box<dyn Fn(&SharedMemory, usize, &mut [u8])>;

fn all_work() -> Vec<(String, PieceWork)> {
    let mut all: Vec<(String, PieceWork)> = vec![
        (
            "copy".into(),
            Box::new(|source, offset, to| {
                // The offsets are within the source by construction of the loop.
                let _ = source.read(offset, to);
            }),
        ),
        (
            "copy + CRC32c, one pass".into(),
            Box::new(|source, offset, to| {
                let _ = black_box(crc_copy::read_with_crc(source, offset, to, 0));
            }),
        ),
    ];
    let others = [
        ("as chosen", crc::crc32c_append as fn(u32, &[u8]) -> u32),
        ("crc32c crate", crc32c::crc32c_append),
    ];
    for (name, append) in crc::available_implementations().into_iter().chain(others) {
        all.push((
            format!("CRC32c, {name}"),
            Box::new(move |_, _, to| {
                black_box(append(0, to));
            }),
        ));
    }
    all
}

fn measure_memory(piece: usize, time: Duration) -> anyhow::Result<Vec<MemoryLimit>> {
    let largest = WORKING_SETS.iter().copied().max().unwrap_or(0) as usize;
    let source = SharedMemory::create_memfd("siw-perf-limits", largest, PageSize::TryHuge)
        .map_err(|error| anyhow!("memory to measure with: {error}"))?;
    let mut target = vec![0x5au8; largest];
    for at in (0..source.len()).step_by(4096) {
        source.write(at, &target[..4096])?;
    }
    let mut limits = Vec::new();
    for (work, run) in all_work() {
        let (mut best, mut worst) = (Vec::new(), Vec::new());
        for set in WORKING_SETS {
            // Copies use two buffers, which share the caches.
            let half = if work.starts_with("copy") {
                set / 2
            } else {
                set
            } as usize;
            let rates: Vec<f64> = (0..ROUNDS)
                .map(|_| rate_over(half, piece, time, &mut target, &source, &run))
                .collect();
            best.push(rates.iter().copied().fold(0.0, f64::max));
            worst.push(rates.iter().copied().fold(f64::MAX, f64::min));
        }
        limits.push(MemoryLimit {
            work,
            gbps: best,
            worst_gbps: worst,
        });
    }
    Ok(limits)
}

/// Gb/s of `run` over `len` bytes, repeatedly, piece by piece.
fn rate_over(
    len: usize,
    piece: usize,
    time: Duration,
    target: &mut [u8],
    source: &SharedMemory,
    run: &PieceWork,
) -> f64 {
    let pieces = (len / piece).max(1);
    let piece = piece.min(len);
    let mut pass = || {
        for index in 0..pieces {
            let at = index * piece;
            run(source, at, &mut target[at..at + piece]);
        }
    };
    // One uncounted pass warms up the caches.
    pass();
    let start = Instant::now();
    let mut bytes = 0;
    loop {
        pass();
        bytes += (pieces * piece) as u64;
        let elapsed = start.elapsed();
        if elapsed >= time {
            return gigabits_per_second(bytes, elapsed);
        }
    }
}

impl fmt::Display for MachineLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, Linux {}, {}; pieces of {} bytes, best of {ROUNDS} rounds, Gb/s:",
            self.machine.cpu, self.machine.kernel, self.machine.dpdk, self.piece
        )?;
        write!(f, "  {:<28}", "working set")?;
        for &set in &self.working_sets {
            write!(f, " {:>9}", format_bytes(set))?;
        }
        writeln!(f)?;
        for limit in &self.memory {
            write!(f, "  {:<28}", limit.work)?;
            for rate in &limit.gbps {
                write!(f, " {rate:>9.1}")?;
            }
            writeln!(f)?;
        }
        match (self.cores, self.cache_line_ns) {
            (Some([first, second]), Some(ns)) => writeln!(
                f,
                "  a cache line from core {first} to core {second} and back: {ns:.0} ns"
            )?,
            _ => writeln!(f, "  single core: no cache-line transfers")?,
        }
        if let (Some([first, second]), Some(us)) = (self.cores, self.wake_up_us) {
            writeln!(
                f,
                "  waking a thread on core {second} from core {first}: {us:.0} us"
            )?;
        }
        if let Some(ratio) = self.slowest_copy_by_fastest {
            writeln!(
                f,
                "  copying {ALIGNED_COPY} bytes, slowest by fastest position in a page: {ratio:.1}"
            )?;
        }
        if let Some(reason) = &self.conditions.disturbed {
            writeln!(f, "  disturbed: {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_work_has_a_rate_for_each_working_set() {
        let limits = measure_limits(1428, None, Duration::from_micros(50)).unwrap();
        assert!(limits.memory.len() >= 4, "{:?}", limits.memory);
        for limit in &limits.memory {
            assert_eq!(limit.gbps.len(), WORKING_SETS.len());
            let pairs = limit.gbps.iter().zip(&limit.worst_gbps);
            assert!(
                pairs
                    .clone()
                    .all(|(best, worst)| best >= worst && *worst > 0.0),
                "{limit:?}"
            );
        }
        let text = limits.to_string();
        assert!(
            text.contains("copy + CRC32c, one pass")
                && text.contains("128 MiB")
                && text.contains("slowest by fastest"),
            "{text}"
        );
    }

    #[test]
    fn a_piece_may_be_larger_than_the_working_set() {
        assert!(measure_limits(1 << 20, None, Duration::from_micros(1)).is_ok());
    }
}
