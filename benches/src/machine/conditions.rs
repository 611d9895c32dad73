//! Disturbances of the machine during a measurement.

use super::cache_line_round_trip_ns;
use serde::{Deserialize, Serialize};
use std::fs;

/// Largest permitted share of processor time that a hypervisor takes away (steal time).
pub const MAX_STEAL_PERCENT: f64 = 1.0;
/// Largest permitted change of the cache-line round trip during a measurement.
pub const MAX_CACHE_LINE_DRIFT: f64 = 0.3;

/// The conditions of one measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Percent of processor time that the hypervisor gave to other guests.
    pub steal_percent: f64,
    /// Interrupts of all processors.
    pub interrupts: u64,
    /// Cache-line round trip in nanoseconds between the cores before the measurement; `None` on one
    /// core.
    pub cache_line_ns_before: Option<f64>,
    /// Cache-line round trip after the measurement.
    pub cache_line_ns_after: Option<f64>,
    /// Reason why the result does not count; `None` if nothing disturbed it.
    pub disturbed: Option<String>,
}

/// Kernel counters since boot.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct KernelCounters {
    all_ticks: u64,
    steal_ticks: u64,
    interrupts: u64,
}

impl KernelCounters {
    fn read() -> KernelCounters {
        KernelCounters::parse(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// Parses the text of proc_stat(5).
    fn parse(text: &str) -> KernelCounters {
        let mut counters = KernelCounters::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("cpu") => {
                    // user nice system idle iowait irq softirq steal; guest times are in user's.
                    let ticks: Vec<u64> =
                        words.take(8).filter_map(|word| word.parse().ok()).collect();
                    counters.all_ticks = ticks.iter().sum();
                    counters.steal_ticks = ticks.get(7).copied().unwrap_or(0);
                }
                Some("intr") => {
                    counters.interrupts =
                        words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
                }
                _ => {}
            }
        }
        counters
    }
}

/// Monitors the machine during one measurement.
pub struct ConditionsWatch {
    cores: Option<[usize; 2]>,
    cache_line_ns: Option<f64>,
    counters: KernelCounters,
}

impl ConditionsWatch {
    /// Starts monitoring. `cores`: the two cores of the measurement, not used by other spinning
    /// threads.
    pub fn begin(cores: Option<[usize; 2]>) -> ConditionsWatch {
        ConditionsWatch {
            cores,
            cache_line_ns: round_trip(cores),
            counters: KernelCounters::read(),
        }
    }

    /// Stops monitoring, and decides whether the measurement counts.
    pub fn end(self) -> Conditions {
        let counters = KernelCounters::read();
        let after = round_trip(self.cores);
        Conditions::judge(self.counters, counters, self.cache_line_ns, after)
    }
}

fn round_trip(cores: Option<[usize; 2]>) -> Option<f64> {
    let ns = cache_line_round_trip_ns(cores?).ok()?;
    Some((ns * 10.0).round() / 10.0)
}

impl Conditions {
    /// The shorter of the measured cache-line round trips in nanoseconds: other threads on a core make
    /// one longer, nothing makes it shorter.
    pub fn shortest_cache_line_ns(&self) -> Option<f64> {
        let both = [self.cache_line_ns_before, self.cache_line_ns_after];
        both.into_iter().flatten().reduce(f64::min)
    }

    fn judge(
        before: KernelCounters,
        after: KernelCounters,
        line_before: Option<f64>,
        line_after: Option<f64>,
    ) -> Conditions {
        let ticks = after.all_ticks.saturating_sub(before.all_ticks).max(1);
        let steal = after.steal_ticks.saturating_sub(before.steal_ticks);
        let steal_percent = 100.0 * steal as f64 / ticks as f64;
        let drift = match (line_before, line_after) {
            (Some(before), Some(after)) => (after / before).max(before / after) - 1.0,
            _ => 0.0,
        };
        let disturbed = if steal_percent > MAX_STEAL_PERCENT {
            Some(format!(
                "the hypervisor took {steal_percent:.1} % of the time"
            ))
        } else if drift > MAX_CACHE_LINE_DRIFT {
            Some(format!(
                "the cache-line round trip changed from {:.0} to {:.0} ns",
                line_before.unwrap_or(0.0),
                line_after.unwrap_or(0.0)
            ))
        } else {
            None
        };
        Conditions {
            steal_percent: (steal_percent * 100.0).round() / 100.0,
            interrupts: after.interrupts.saturating_sub(before.interrupts),
            cache_line_ns_before: line_before,
            cache_line_ns_after: line_after,
            disturbed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  100 0 50 800 20 0 10 20 0 0\ncpu0 1 2 3 4\nintr 4711 1 2 3\nctxt 5\n";

    fn after(steal_ticks: u64) -> KernelCounters {
        KernelCounters {
            all_ticks: 2000,
            steal_ticks,
            interrupts: 4811,
        }
    }

    #[test]
    fn ticks_and_interrupts_are_those_of_all_processors() {
        let counters = KernelCounters::parse(STAT);
        assert_eq!(
            counters,
            KernelCounters {
                all_ticks: 1000,
                steal_ticks: 20,
                interrupts: 4711
            }
        );
    }

    #[test]
    fn little_steal_and_steady_lines_count() {
        let before = KernelCounters::parse(STAT);
        let conditions = Conditions::judge(before, after(30), Some(100.0), Some(129.0));
        assert_eq!(conditions.disturbed, None);
        assert_eq!(conditions.steal_percent, 1.0);
        assert_eq!(conditions.interrupts, 100);
    }

    #[test]
    fn much_steal_disturbs() {
        let before = KernelCounters::parse(STAT);
        let conditions = Conditions::judge(before, after(31), None, None);
        assert!(conditions.disturbed.unwrap().contains("1.1 %"));
    }

    #[test]
    fn a_round_trip_that_moves_disturbs_in_both_directions() {
        let before = KernelCounters::parse(STAT);
        for (first, second) in [(100.0, 131.0), (131.0, 100.0)] {
            let conditions = Conditions::judge(before, after(20), Some(first), Some(second));
            assert!(conditions.disturbed.is_some(), "{first} {second}");
        }
    }
}
