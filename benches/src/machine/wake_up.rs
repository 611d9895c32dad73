//! Time to wake a sleeping thread from another core: a lower bound for the latency of any daemon
//! that sleeps. On a virtual machine most of it is the hypervisor's.

use super::cache_line::{Line, median, run_on_cores};
use anyhow::{anyhow, bail};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Number of wake-ups; their median counts.
const SAMPLES: u32 = 41;
/// Sleep before each wake-up, long enough for the core to enter an idle state.
const SLEEP: Duration = Duration::from_millis(2);
/// Time limit of one wake-up.
const TIME_LIMIT: Duration = Duration::from_millis(400);

/// Microseconds from the write to an eventfd on the first core until a thread that blocked on it on
/// the second core has reported through a cache line. Fails if a core is not available to this
/// process, if both are the same, or if other programs occupy the second.
pub fn wake_up_us(cores: [usize; 2]) -> anyhow::Result<f64> {
    if cores[0] == cores[1] {
        bail!("core {} cannot wake itself", cores[0]);
    }
    let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| anyhow!("eventfd: {error}"))?;
    let woken = Line(AtomicU32::new(0));
    let samples = run_on_cores(
        cores,
        || time_wake_ups(&event, &woken),
        || {
            woken.0.store(u32::MAX, Ordering::Release);
            // The write fails only if the counter is full; then the thread does not sleep anyway.
            let _ = wake(&event);
        },
        || tell_wake_ups(&event, &woken),
    )?;
    median(samples).ok_or_else(|| anyhow!("nothing was measured"))
}

fn wake(event: &OwnedFd) -> anyhow::Result<()> {
    let written = rustix::io::write(event, &1u64.to_ne_bytes());
    written.map_err(|error| anyhow!("eventfd: {error}"))?;
    Ok(())
}

/// Counts the wake-ups in `woken`, until the other thread writes [`u32::MAX`] there.
fn tell_wake_ups(event: &OwnedFd, woken: &Line) -> anyhow::Result<()> {
    for number in 0.. {
        rustix::io::read(event, &mut [0; 8]).map_err(|error| anyhow!("eventfd: {error}"))?;
        let (current, next) = (Ordering::AcqRel, Ordering::Acquire);
        let is_over = woken.0.compare_exchange(number, number + 1, current, next);
        if is_over.is_err() {
            break;
        }
    }
    Ok(())
}

/// Microseconds of each wake-up.
fn time_wake_ups(event: &OwnedFd, woken: &Line) -> anyhow::Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(SAMPLES as usize);
    for number in 1..=SAMPLES {
        std::thread::sleep(SLEEP);
        let start = Instant::now();
        wake(event)?;
        while woken.0.load(Ordering::Acquire) != number {
            std::hint::spin_loop();
            if start.elapsed() > TIME_LIMIT {
                bail!("a woken thread did not run: other threads occupy its core");
            }
        }
        samples.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_does_not_wake_itself() {
        assert!(
            wake_up_us([0, 0])
                .unwrap_err()
                .to_string()
                .contains("itself")
        );
    }

    #[test]
    fn a_core_that_does_not_exist_is_an_error_and_ends() {
        let error = wake_up_us([0, 100_000]).unwrap_err().to_string();
        assert!(error.contains("100000"), "{error}");
        let error = wake_up_us([100_000, 0]).unwrap_err().to_string();
        assert!(error.contains("100000"), "{error}");
    }

    #[test]
    fn a_wake_up_takes_microseconds() {
        let cores = dpdk::allowed_cores();
        let [first, second, ..] = cores[..] else {
            println!("skipped: this machine has one core");
            return;
        };
        match wake_up_us([first, second]) {
            Ok(us) => assert!(us > 0.1 && us < 400_000.0, "{us}"),
            Err(error) => assert!(error.to_string().contains("other threads"), "{error}"),
        }
    }
}
