//! CPU times of the programs and threads of a measurement, from proc(5).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Name of the daemon's process in `/proc/PID/comm`.
const DAEMON: &str = "siwd";

/// Clock ticks per second in proc_pid_stat(5).
const TICKS_PER_SECOND: u64 = 100;

/// CPU times of this program and of every siwd.
#[derive(Debug, Clone, Default)]
pub(super) struct ProgramTimes {
    /// Time on all cores, including ended threads, and ended children of this program.
    pub on_cpu: Duration,
    /// Threads by thread id.
    pub threads: BTreeMap<u32, ThreadTimes>,
}

/// Times of one thread since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct ThreadTimes {
    /// Time on a core.
    pub on_cpu: Duration,
    /// Time that it was ready to run and waited for a core (run delay).
    pub delay: Duration,
    /// Switches to another thread while it was ready to run.
    pub involuntary: u64,
}

impl ProgramTimes {
    /// Reads the times. Processes and threads whose files cannot be read are left out.
    pub fn read() -> ProgramTimes {
        let own = std::process::id();
        let mut times = ProgramTimes::default();
        for process in numbered_entries(Path::new("/proc")) {
            let folder = Path::new("/proc").join(process.to_string());
            let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
            if process != own && read("comm").trim_end() != DAEMON {
                continue;
            }
            times.on_cpu += process_time(&read("stat"), process == own).unwrap_or_default();
            let tasks = folder.join("task");
            for thread in numbered_entries(&tasks) {
                let task = tasks.join(thread.to_string());
                let read = |file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
                let found = ThreadTimes::parse(&read("schedstat"), &read("status"));
                times.threads.extend(found.map(|found| (thread, found)));
            }
        }
        times
    }
}

/// Parses utime and stime of proc_pid_stat(5), and with `has_children` cutime and cstime. The preceding
/// command name may contain spaces and parentheses.
fn process_time(stat: &str, has_children: bool) -> Option<Duration> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields = rest.split_whitespace().skip(11);
    let ticks: u64 = fields
        .take(if has_children { 4 } else { 2 })
        .map_while(|field| field.parse::<u64>().ok())
        .sum();
    Some(Duration::from_millis(1000 / TICKS_PER_SECOND * ticks))
}

impl ThreadTimes {
    /// Parses `schedstat` (Documentation/scheduler/sched-stats.rst of Linux: time on a core and run delay
    /// in ns) and `status` of a thread.
    fn parse(schedstat: &str, status: &str) -> Option<ThreadTimes> {
        let mut words = schedstat.split_whitespace();
        let mut nanos = || Some(Duration::from_nanos(words.next()?.parse().ok()?));
        let (on_cpu, delay) = (nanos()?, nanos()?);
        let involuntary = status
            .lines()
            .find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))
            .and_then(|count| count.trim().parse().ok());
        Some(ThreadTimes {
            on_cpu,
            delay,
            involuntary: involuntary.unwrap_or(0),
        })
    }

    /// Returns the growth since `before`.
    pub fn since(self, before: ThreadTimes) -> ThreadTimes {
        ThreadTimes {
            on_cpu: self.on_cpu.saturating_sub(before.on_cpu),
            delay: self.delay.saturating_sub(before.delay),
            involuntary: self.involuntary.saturating_sub(before.involuntary),
        }
    }
}

/// The entries of a folder whose names are numbers; none if it cannot be read.
fn numbered_entries(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_schedstat_and_status() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t9\n";
        let times = ThreadTimes::parse("2000000000 3000000 17\n", status).expect("numbers");
        let expected = ThreadTimes {
            on_cpu: Duration::from_secs(2),
            delay: Duration::from_millis(3),
            involuntary: 9,
        };
        assert_eq!(times, expected);
        assert_eq!(ThreadTimes::parse("", status), None);
    }

    #[test]
    fn process_times_are_those_of_stat() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 100 50 20 10 20 0 4 0 99";
        assert_eq!(process_time(stat, false), Some(Duration::from_millis(1500)));
        assert_eq!(process_time(stat, true), Some(Duration::from_millis(1800)));
    }

    #[test]
    fn the_threads_of_this_program_are_found() {
        let times = ProgramTimes::read();
        assert!(times.threads.contains_key(&std::process::id()));
    }
}
