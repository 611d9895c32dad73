//! Round-trip time of a cache line between two cores: a unit in which latencies of work shared by
//! two cores can be compared between machines.

use anyhow::{anyhow, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Round trips between two clock readings.
const ROUNDS_PER_SAMPLE: u32 = 500;
/// Samples; their median counts.
const SAMPLES: usize = 41;
/// Time limit of a measurement: another thread may occupy one of the cores.
const TIME_LIMIT: Duration = Duration::from_millis(400);
/// Unsuccessful polls between two clock readings.
const POLLS_PER_CLOCK_CHECK: u32 = 1 << 12;

/// A counter with two cache lines of its own, which processors prefetch in pairs.
#[repr(align(128))]
pub(super) struct Line(pub(super) AtomicU32);

/// Measures the round-trip time in nanoseconds between two threads that spin on `cores`: each
/// writes a line that the other reads. Fails if a core is not available to this process, or both
/// are the same.
pub fn cache_line_round_trip_ns(cores: [usize; 2]) -> anyhow::Result<f64> {
    if cores[0] == cores[1] {
        bail!("core {} cannot exchange cache lines with itself", cores[0]);
    }
    let (request, reply) = (Line(AtomicU32::new(0)), Line(AtomicU32::new(0)));
    let samples = run_on_cores(
        cores,
        || Ok(time_requests(&request, &reply)),
        || request.0.store(u32::MAX, Ordering::Release),
        || {
            answer_requests(&request, &reply);
            Ok(())
        },
    )?;
    median(samples).ok_or_else(|| {
        anyhow!(
            "cores {} and {} exchanged no cache lines in {} ms: other threads occupy one of them",
            cores[0],
            cores[1],
            TIME_LIMIT.as_millis()
        )
    })
}

/// Runs `ask` on the first core and `answer` on the second; returns the result of `ask`. `end` is
/// called after it and makes `answer` return at any point.
pub(super) fn run_on_cores<T: Send>(
    cores: [usize; 2],
    ask: impl FnOnce() -> anyhow::Result<T> + Send,
    end: impl FnOnce() + Send,
    answer: impl FnOnce() -> anyhow::Result<()> + Send,
) -> anyhow::Result<T> {
    let started = Barrier::new(2);
    std::thread::scope(|scope| {
        let answerer = scope.spawn(|| {
            let pinned = pin_thread(cores[1]);
            started.wait();
            pinned.and_then(|()| answer())
        });
        let asker = scope.spawn(|| {
            let pinned = pin_thread(cores[0]);
            started.wait();
            let asked = pinned.and_then(|()| ask());
            end();
            asked
        });
        let panicked = |_| anyhow!("the measurement panicked");
        let asked = asker.join().map_err(panicked)?;
        answerer.join().map_err(panicked)??;
        asked
    })
}

/// Moves the calling thread to `core`, even if its parent was pinned to another one.
pub fn pin_thread(core: usize) -> anyhow::Result<()> {
    let fail = |reason: &str| anyhow!("core {core} cannot be used: {reason}");
    if core >= CpuSet::MAX_CPU {
        return Err(fail("there is no such core"));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|error| fail(&error.to_string()))
}

/// Writes each request's number into the reply.
fn answer_requests(request: &Line, reply: &Line) {
    let mut last = 0;
    while last != u32::MAX {
        let seen = request.0.load(Ordering::Acquire);
        if seen != last {
            reply.0.store(seen, Ordering::Release);
            last = seen;
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Round-trip nanoseconds of each sample completed in time.
fn time_requests(request: &Line, reply: &Line) -> Vec<f64> {
    let begin = Instant::now();
    let mut samples = Vec::with_capacity(SAMPLES);
    let mut number = 0;
    while samples.len() < SAMPLES && begin.elapsed() < TIME_LIMIT {
        let start = Instant::now();
        for _ in 0..ROUNDS_PER_SAMPLE {
            number += 1;
            request.0.store(number, Ordering::Release);
            let mut polls = 0;
            while reply.0.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
                polls += 1;
                if polls % POLLS_PER_CLOCK_CHECK == 0 && begin.elapsed() > TIME_LIMIT {
                    return samples;
                }
            }
        }
        samples.push(start.elapsed().as_nanos() as f64 / f64::from(ROUNDS_PER_SAMPLE));
    }
    samples
}

/// The median; `None` without samples.
pub(super) fn median(mut samples: Vec<f64>) -> Option<f64> {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_does_not_exchange_lines_with_itself() {
        let error = cache_line_round_trip_ns([0, 0]).unwrap_err().to_string();
        assert!(error.to_string().contains("itself"), "{error}");
    }

    #[test]
    fn a_core_that_does_not_exist_is_an_error_and_ends() {
        let error = cache_line_round_trip_ns([0, 100_000])
            .unwrap_err()
            .to_string();
        assert!(error.to_string().contains("100000"), "{error}");
    }

    #[test]
    fn the_median_is_that_of_the_sorted_samples() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn two_cores_exchange_lines_in_nanoseconds() {
        let cores = dpdk::allowed_cores();
        let [first, second, ..] = cores[..] else {
            println!("skipped: this machine has one core");
            return;
        };
        match cache_line_round_trip_ns([first, second]) {
            Ok(ns) => assert!(ns > 1.0 && ns < 1e6, "{ns}"),
            // Other programs may occupy a core for longer than the limit.
            Err(error) => assert!(error.to_string().contains("other threads"), "{error}"),
        }
    }
}
