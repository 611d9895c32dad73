//! Disturbances of the machine during a measurement.

use super::cache_line_round_trip_ns;
use super::threads::ProgramTimes;
use serde::{Deserialize, Serialize};
use std::fs;
use std::time::{Duration, Instant};

/// Largest permitted share of processor time that a hypervisor takes away (steal time).
pub const MAX_STEAL_PERCENT: f64 = 1.0;
/// Largest permitted change of the cache-line round trip during a measurement.
pub const MAX_CACHE_LINE_DRIFT: f64 = 0.3;
/// Largest permitted time that other programs take from the threads of the measurement, in percent of
/// the time of one core.
pub const MAX_RUN_DELAY_PERCENT: f64 = 1.0;
/// Largest permitted rate of involuntary context switches of one thread, per second, while other
/// programs run. A program that shares the core with a busy thread preempts it about 300 times per
/// second.
pub const MAX_INVOLUNTARY_RATE: f64 = 100.0;

/// Length of the clock ticks in proc_stat(5).
const TICK: Duration = Duration::from_millis(10);
/// Least share of the measurement's time for which a thread was busy, or waited for a core. Threads that
/// mostly sleep wait behind the measurement's own busy threads.
const BUSY_SHARE: f64 = 0.1;

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
    /// Longest time for which a busy thread of this program or of a siwd waited for a core, in percent of
    /// the time of the measurement; 0 in results from before this was measured.
    #[serde(default)]
    pub run_delay_percent: f64,
    /// Involuntary context switches of these threads.
    #[serde(default)]
    pub involuntary_switches: u64,
    /// Time in which other programs ran, in percent of the time of one core.
    #[serde(default)]
    pub other_programs_percent: f64,
    /// Reason why the result does not count; `None` if nothing disturbed it.
    pub disturbed: Option<String>,
}

/// Kernel counters since boot.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct KernelCounters {
    all_ticks: u64,
    /// Ticks in programs and in the kernel, without interrupts.
    busy_ticks: u64,
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
                    counters.busy_ticks = ticks.iter().take(3).sum();
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
    began: Instant,
    begin: Snapshot,
}

/// Counters of the kernel and of threads at one moment.
#[derive(Debug, Clone, Default)]
struct Snapshot {
    /// Time since the watch began.
    at: Duration,
    counters: KernelCounters,
    /// This program and every siwd.
    programs: ProgramTimes,
}

impl Snapshot {
    fn read(began: Instant) -> Snapshot {
        Snapshot {
            at: began.elapsed(),
            counters: KernelCounters::read(),
            programs: ProgramTimes::read(),
        }
    }
}

impl ConditionsWatch {
    /// Starts monitoring. `cores`: the two cores of the measurement, not used by other spinning
    /// threads.
    pub fn begin(cores: Option<[usize; 2]>) -> ConditionsWatch {
        let began = Instant::now();
        ConditionsWatch {
            cores,
            cache_line_ns: round_trip(cores),
            began,
            begin: Snapshot::read(began),
        }
    }

    /// Stops monitoring, and decides whether the measurement counts.
    pub fn end(self) -> Conditions {
        let end = Snapshot::read(self.began);
        let after = round_trip(self.cores);
        Conditions::judge(&self.begin, &end, self.cache_line_ns, after)
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
        begin: &Snapshot,
        end: &Snapshot,
        line_before: Option<f64>,
        line_after: Option<f64>,
    ) -> Conditions {
        let (before, after) = (begin.counters, end.counters);
        let ticks = after.all_ticks.saturating_sub(before.all_ticks).max(1);
        let steal = after.steal_ticks.saturating_sub(before.steal_ticks);
        let steal_percent = 100.0 * steal as f64 / ticks as f64;
        let drift = match (line_before, line_after) {
            (Some(before), Some(after)) => (after / before).max(before / after) - 1.0,
            _ => 0.0,
        };
        let preemption = Preemption::between(begin, end);
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
            preemption.disturbance()
        };
        let rounded = |percent: f64| (percent * 100.0).round() / 100.0;
        Conditions {
            steal_percent: rounded(steal_percent),
            interrupts: after.interrupts.saturating_sub(before.interrupts),
            cache_line_ns_before: line_before,
            cache_line_ns_after: line_after,
            run_delay_percent: rounded(preemption.delay_percent),
            involuntary_switches: preemption.switches,
            other_programs_percent: rounded(preemption.others_percent),
            disturbed,
        }
    }
}

/// Preemption of the measurement's busy threads.
#[derive(Debug, Default)]
struct Preemption {
    /// Longest delay of a thread, in percent of the elapsed time.
    delay_percent: f64,
    /// Involuntary switches of all threads.
    switches: u64,
    /// Highest rate of involuntary switches of a thread, per second.
    switch_rate: f64,
    /// Time in which other programs ran, in percent of the elapsed time.
    others_percent: f64,
}

impl Preemption {
    fn between(begin: &Snapshot, end: &Snapshot) -> Preemption {
        let elapsed = end.at.saturating_sub(begin.at).as_secs_f64();
        if elapsed <= 0.0 {
            return Preemption::default();
        }
        let mut found = Preemption::default();
        let before = &begin.programs.threads;
        for (id, times) in &end.programs.threads {
            // A thread that began meanwhile counts from its beginning.
            let used = times.since(before.get(id).copied().unwrap_or_default());
            let wanted = (used.on_cpu + used.delay).as_secs_f64();
            if wanted < BUSY_SHARE * elapsed {
                continue;
            }
            let delay = 100.0 * used.delay.as_secs_f64() / elapsed;
            found.delay_percent = found.delay_percent.max(delay);
            found.switches += used.involuntary;
            found.switch_rate = found.switch_rate.max(used.involuntary as f64 / elapsed);
        }
        let ticks = end
            .counters
            .busy_ticks
            .saturating_sub(begin.counters.busy_ticks);
        let busy = TICK.as_secs_f64() * ticks as f64;
        let own = end.programs.on_cpu.saturating_sub(begin.programs.on_cpu);
        let others = (busy - own.as_secs_f64()).max(0.0);
        found.others_percent = 100.0 * others / elapsed;
        found
    }

    /// Reason why the result does not count. Delays while no other program ran are due to the
    /// measurement's own threads, of which there may be more than cores.
    fn disturbance(&self) -> Option<String> {
        if self.others_percent <= MAX_RUN_DELAY_PERCENT {
            return None;
        }
        if self.delay_percent > MAX_RUN_DELAY_PERCENT {
            return Some(format!(
                "a thread waited {:.1} % of the time for a core, while other programs ran",
                self.delay_percent
            ));
        }
        (self.switch_rate > MAX_INVOLUNTARY_RATE).then(|| {
            format!(
                "a thread was preempted {:.0} times per second, while other programs ran",
                self.switch_rate
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::threads::ThreadTimes;
    use super::*;

    const STAT: &str = "cpu  100 0 50 800 20 0 10 20 0 0\ncpu0 1 2 3 4\nintr 4711 1 2 3\nctxt 5\n";

    fn before() -> Snapshot {
        Snapshot {
            counters: KernelCounters::parse(STAT),
            ..Snapshot::default()
        }
    }

    /// The state after 10 s of two cores.
    fn after(steal_ticks: u64) -> Snapshot {
        Snapshot {
            at: Duration::from_secs(10),
            counters: KernelCounters {
                all_ticks: 2000,
                busy_ticks: 150,
                steal_ticks,
                interrupts: 4811,
            },
            ..Snapshot::default()
        }
    }

    /// The state after 10 s in which one thread ran for `on_cpu` and waited for the rest, and all
    /// programs used `busy` of the cores' time.
    fn shared(on_cpu: f64, busy: f64, involuntary: u64) -> Snapshot {
        let all = Duration::from_secs(10);
        let times = ThreadTimes {
            on_cpu: all.mul_f64(on_cpu / 10.0),
            delay: all.mul_f64(1.0 - on_cpu / 10.0),
            involuntary,
        };
        let mut end = after(20);
        end.counters.busy_ticks = 150 + (busy * 100.0) as u64;
        end.programs.on_cpu = times.on_cpu;
        end.programs.threads.insert(7, times);
        end
    }

    #[test]
    fn ticks_and_interrupts_are_those_of_all_processors() {
        let counters = KernelCounters::parse(STAT);
        assert_eq!(
            counters,
            KernelCounters {
                all_ticks: 1000,
                busy_ticks: 150,
                steal_ticks: 20,
                interrupts: 4711
            }
        );
    }

    #[test]
    fn little_steal_and_steady_lines_count() {
        let conditions = Conditions::judge(&before(), &after(30), Some(100.0), Some(129.0));
        assert_eq!(conditions.disturbed, None);
        assert_eq!(conditions.steal_percent, 1.0);
        assert_eq!(conditions.interrupts, 100);
    }

    #[test]
    fn much_steal_disturbs() {
        let conditions = Conditions::judge(&before(), &after(31), None, None);
        assert!(conditions.disturbed.unwrap().contains("1.1 %"));
    }

    #[test]
    fn a_round_trip_that_moves_disturbs_in_both_directions() {
        for (first, second) in [(100.0, 131.0), (131.0, 100.0)] {
            let conditions = Conditions::judge(&before(), &after(20), Some(first), Some(second));
            assert!(conditions.disturbed.is_some(), "{first} {second}");
        }
    }

    #[test]
    fn another_program_on_a_core_disturbs() {
        // It takes half of the core of a busy thread.
        let conditions = Conditions::judge(&before(), &shared(5.0, 10.0, 1500), None, None);
        assert_eq!(conditions.run_delay_percent, 50.0);
        assert_eq!(conditions.other_programs_percent, 50.0);
        assert_eq!(conditions.involuntary_switches, 1500);
        assert!(conditions.disturbed.unwrap().contains("waited 50.0 %"));
        // It runs often and for short times.
        let conditions = Conditions::judge(&before(), &shared(9.95, 10.2, 1500), None, None);
        assert!(conditions.disturbed.unwrap().contains("150 times"));
    }

    #[test]
    fn delays_by_own_threads_and_programs_on_other_cores_do_not_disturb() {
        let alone = Conditions::judge(&before(), &shared(5.0, 5.0, 1500), None, None);
        assert_eq!((alone.run_delay_percent, alone.disturbed), (50.0, None));
        let elsewhere = Conditions::judge(&before(), &shared(10.0, 15.0, 20), None, None);
        assert_eq!(elsewhere.disturbed, None);
        // A thread that sleeps most of the time waits behind the busy ones.
        let mut sleeper = shared(9.95, 12.0, 20);
        let times = ThreadTimes {
            delay: Duration::from_millis(500),
            ..ThreadTimes::default()
        };
        sleeper.programs.threads.insert(8, times);
        let conditions = Conditions::judge(&before(), &sleeper, None, None);
        assert_eq!(conditions.disturbed, None);
    }
}
