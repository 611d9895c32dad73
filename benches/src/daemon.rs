//! Resource usage of a running daemon: CPU time of its threads and private memory as the kernel
//! counts them, and TCP retransmissions as the daemon counts them.

use crate::end::Role;
use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// TCP work of the daemon that a loss-free link does not require.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retransmissions {
    /// Segments retransmitted.
    pub retrans_segs: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
}

impl Retransmissions {
    /// Reads the daemon's statistics; zero for missing counters.
    pub fn from_statistics(stats: &str) -> Retransmissions {
        let json: Value = serde_json::from_str(stats).unwrap_or_default();
        let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
        let sum = |key: &str| {
            list(&json, "workers")
                .iter()
                .flat_map(|worker| list(worker, "devices"))
                .filter_map(|device| device["tcp"][key].as_u64())
                .sum()
        };
        Retransmissions {
            retrans_segs: sum("retrans_segs"),
            timeouts: sum("timeouts"),
        }
    }

    /// Sum of two daemons' counts.
    pub fn plus(self, other: Retransmissions) -> Retransmissions {
        Retransmissions {
            retrans_segs: self.retrans_segs + other.retrans_segs,
            timeouts: self.timeouts + other.timeouts,
        }
    }

    /// Increase since `before`.
    pub fn growth_since(self, before: Retransmissions) -> Retransmissions {
        Retransmissions {
            retrans_segs: self.retrans_segs.saturating_sub(before.retrans_segs),
            timeouts: self.timeouts.saturating_sub(before.timeouts),
        }
    }
}

/// The daemon's effective settings from its statistics; `None` if they lack them.
pub fn settings_of(stats: &str) -> Option<Value> {
    let json: Value = serde_json::from_str(stats).ok()?;
    json.get("settings").cloned()
}

/// Returns true if a device sends segments that its link cuts into frames, or if the daemon's settings
/// do not say so.
pub fn takes_super_segments(settings: Option<&Value>, device: &str) -> bool {
    let devices = settings.and_then(|settings| settings["devices"].as_array());
    let mut devices = devices.into_iter().flatten();
    let found = devices.find(|one| one["device"] == device);
    found
        .and_then(|device| device["tso"].as_bool())
        .unwrap_or(true)
}

/// Work of one worker during a measurement, as the daemon counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerUse {
    /// The end that its daemon serves; `None` if one daemon serves both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Role>,
    /// The core that it runs on.
    pub core: usize,
    /// CPU time of its thread in percent; the rest of the time it slept or lacked the core.
    pub busy_percent: f64,
    /// Frames sent and received.
    pub frames: u64,
    /// CPU nanoseconds per frame, including empty polls; `None` without frames.
    pub ns_per_frame: Option<f64>,
    /// CPU nanoseconds per message of the measurement.
    pub ns_per_message: Option<f64>,
    /// CPU time per frame in cycles of the time-stamp counter.
    #[serde(default)]
    pub cycles_per_frame: Option<f64>,
    /// CPU time per message in cycles of the time-stamp counter.
    #[serde(default)]
    pub cycles_per_message: Option<f64>,
    /// Cache lines transferred between applications and the worker per message; `None` without
    /// messages or if siwd does not count them.
    #[serde(default)]
    pub lines_per_message: Option<LinesPerMessage>,
}

/// Cache-line transfers per message between the cores of applications and a worker through the
/// queues, each direction counted: the number that the queues need, which CPUs may exceed. Includes
/// the activity of all clients at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinesPerMessage {
    /// Request slots.
    pub requests: f64,
    /// Words of the queue headers: for each batch of requests, one line written by the client and
    /// one by the worker.
    pub indices: f64,
    /// Doorbell slots.
    pub doorbells: f64,
    /// Completion entries.
    pub completions: f64,
}

impl LinesPerMessage {
    /// Sum of all lines.
    pub fn total(&self) -> f64 {
        self.requests + self.indices + self.doorbells + self.completions
    }
}

/// Entries that a worker consumed from and produced into applications' queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct QueueCounters {
    slots: u64,
    batches: u64,
    doorbells: u64,
    completions: u64,
}

impl QueueCounters {
    /// `None` if the daemon does not count.
    fn from_worker(worker: &Value) -> Option<QueueCounters> {
        Some(QueueCounters {
            slots: worker["request_slots"].as_u64()?,
            batches: worker["request_batches"].as_u64()?,
            doorbells: worker["doorbells"].as_u64()?,
            completions: worker["completions"].as_u64()?,
        })
    }

    /// Lines per message for the entries counted since `before`.
    fn lines_since(self, before: QueueCounters, messages: u64) -> Option<LinesPerMessage> {
        let each = |after: u64, before: u64, lines: f64| {
            let count = after.saturating_sub(before) as f64 * lines;
            (count / messages as f64 * 1000.0).round() / 1000.0
        };
        (messages > 0).then(|| LinesPerMessage {
            requests: each(self.slots, before.slots, 1.0),
            indices: each(self.batches, before.batches, 2.0),
            doorbells: each(self.doorbells, before.doorbells, 1.0),
            completions: each(self.completions, before.completions, 1.0),
        })
    }
}

/// Counters of one worker since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// The core that it runs on.
    pub core: usize,
    cpu_ns: u64,
    frames: u64,
    queues: Option<QueueCounters>,
}

impl WorkerCounters {
    /// Counters of all workers, from the daemon's statistics; empty if the client may not see them.
    pub fn from_statistics(stats: &str) -> Vec<WorkerCounters> {
        let json: Value = serde_json::from_str(stats).unwrap_or_default();
        let workers = json["workers"].as_array().cloned().unwrap_or_default();
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        workers
            .iter()
            .map(|worker| WorkerCounters {
                core: count(&worker["core"]) as usize,
                cpu_ns: count(&worker["cpu_ns"]),
                frames: worker["devices"].as_array().map_or(0, |devices| {
                    let frames =
                        |device: &Value| count(&device["rx_frames"]) + count(&device["tx_frames"]);
                    devices.iter().map(frames).sum()
                }),
                queues: QueueCounters::from_worker(worker),
            })
            .collect()
    }
}

impl WorkerUse {
    /// Work of a worker between two readings of its counters, `time` apart, while `messages`
    /// completed; the time-stamp counter runs at `tsc_ghz`.
    pub fn between(
        before: &WorkerCounters,
        after: &WorkerCounters,
        time: Duration,
        messages: u64,
        tsc_ghz: f64,
    ) -> WorkerUse {
        let ran = after.cpu_ns.saturating_sub(before.cpu_ns) as f64;
        let frames = after.frames.saturating_sub(before.frames);
        let rounded = |value: f64| (value * 10.0).round() / 10.0;
        let each = |count: u64| (count > 0).then(|| rounded(ran / count as f64));
        let cycles = |count: u64| (count > 0).then(|| rounded(ran * tsc_ghz / count as f64));
        WorkerUse {
            end: None,
            core: after.core,
            busy_percent: (ran / time.as_nanos().max(1) as f64 * 1000.0).round() / 10.0,
            frames,
            ns_per_frame: each(frames),
            ns_per_message: each(messages),
            cycles_per_frame: cycles(frames),
            cycles_per_message: cycles(messages),
            lines_per_message: before
                .queues
                .zip(after.queues)
                .and_then(|(before, after)| after.lines_since(before, messages)),
        }
    }
}

impl fmt::Display for WorkerUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_end = self.end.map(|end| format!(" of the {end}"));
        let of_end = of_end.unwrap_or_default();
        write!(
            f,
            "worker{of_end} on core {}: ran {:.0} % of the time, {} frames",
            self.core, self.busy_percent, self.frames
        )?;
        if let (Some(ns), Some(cycles)) = (self.ns_per_frame, self.cycles_per_frame) {
            write!(f, ", {ns:.0} ns ({cycles:.0} cycles) each")?;
        }
        if let (Some(ns), Some(cycles)) = (self.ns_per_message, self.cycles_per_message) {
            write!(f, ", {ns:.0} ns ({cycles:.0} cycles) for each message")?;
        }
        Ok(())
    }
}

impl fmt::Display for LinesPerMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LinesPerMessage {
            requests,
            indices,
            doorbells,
            completions,
        } = self;
        write!(
            f,
            "cache lines between cores per message: {:.2} (requests {requests:.2}, \
             indices {indices:.2}, doorbells {doorbells:.2}, completions {completions:.2})",
            self.total()
        )
    }
}

/// A process, by its id.
pub struct Process {
    proc: PathBuf,
    pid: u32,
}

impl Process {
    /// The process with id `pid`; it need not exist.
    pub fn new(pid: u32) -> Process {
        Process {
            proc: format!("/proc/{pid}").into(),
            pid,
        }
    }

    fn describe_missing(&self, error: std::io::Error) -> anyhow::Error {
        anyhow!("process {}: {error}; is siwd still running?", self.pid)
    }

    /// CPU time of all threads.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        let mut ns = 0;
        for task in
            fs::read_dir(self.proc.join("task")).map_err(|error| self.describe_missing(error))?
        {
            let task = task.map_err(|error| self.describe_missing(error))?.path();
            // A thread may have ended meanwhile.
            if let Ok(text) = fs::read_to_string(task.join("schedstat")) {
                ns += schedstat_ns(&text).unwrap_or(0);
            } else if let Ok(text) = fs::read_to_string(task.join("stat")) {
                ns += stat_ns(&text).unwrap_or(0);
            }
        }
        Ok(Duration::from_nanos(ns))
    }

    /// Bytes of resident anonymous memory, without shared rings, arenas or hugepages. Read from the
    /// page tables, since the counters in `status` lag behind by some hundred KiB since Linux 6.2.
    pub fn private_bytes(&self) -> anyhow::Result<u64> {
        let text = fs::read_to_string(self.proc.join("smaps_rollup"))
            .map_err(|error| self.describe_missing(error))?;
        status_bytes(&text, "Anonymous:").ok_or_else(|| anyhow!("the kernel reports no Anonymous"))
    }

    /// Bytes of resident shared memory: rings, arenas, hugepages.
    pub fn shared_bytes(&self) -> anyhow::Result<u64> {
        let text = fs::read_to_string(self.proc.join("status"))
            .map_err(|error| self.describe_missing(error))?;
        let bytes = |key| status_bytes(&text, key).unwrap_or(0);
        Ok(bytes("RssShmem:") + bytes("HugetlbPages:"))
    }

    /// Number of open descriptors.
    pub fn descriptors(&self) -> anyhow::Result<u64> {
        let folder = fs::read_dir(self.proc.join("fd"));
        Ok(folder
            .map_err(|error| self.describe_missing(error))?
            .count() as u64)
    }
}

/// Nanoseconds on a CPU: the first number of proc_pid_schedstat(5).
fn schedstat_ns(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// utime and stime of proc_pid_stat(5), in clock ticks of 10 ms. The preceding command name may
/// contain spaces and parentheses.
fn stat_ns(text: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) * 10_000_000)
}

/// A size in proc_pid_status(5).
fn status_bytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kb: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kb * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_read_behind_a_name_with_parentheses() {
        let line = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0";
        assert_eq!(stat_ns(line), Some(420_000_000));
        assert_eq!(stat_ns("nonsense"), None);
        assert_eq!(schedstat_ns("123456 7 8\n"), Some(123_456));
    }

    #[test]
    fn a_link_takes_super_segments_unless_its_settings_deny_it() {
        let stats = r#"{"settings":{"devices":[{"device":"siw0","tso":false},{"device":"siw1","tso":true}]}}"#;
        let settings = settings_of(stats);
        let takes = |device| takes_super_segments(settings.as_ref(), device);
        assert!(!takes("siw0") && takes("siw1"));
        assert!(takes_super_segments(None, "siw0"));
    }

    #[test]
    fn private_memory_is_the_anonymous_part() {
        let status = "VmRSS:\t900 kB\nRssAnon:\t  300 kB\nRssShmem:\t600 kB\n";
        assert_eq!(status_bytes(status, "RssAnon:"), Some(300 * 1024));
        assert_eq!(status_bytes("VmRSS: 3 kB", "RssAnon:"), None);
    }

    #[test]
    fn the_own_process_has_used_time_and_memory() {
        let me = Process::new(std::process::id());
        let before = me.cpu_time().unwrap();
        let mut x = 1u64;
        while me.cpu_time().unwrap() == before {
            for i in 0..100_000 {
                x = std::hint::black_box(x.wrapping_mul(31).wrapping_add(i));
            }
        }
        assert!(me.private_bytes().unwrap() > 0);
        assert!(me.descriptors().unwrap() > 2);
    }

    #[test]
    fn retransmissions_of_all_workers_and_devices_add_up() {
        let stats = r#"{"workers":[
            {"devices":[{"tcp":{"retrans_segs":2,"timeouts":1}},{"tcp":{"retrans_segs":3}}]},
            {"devices":[{"tcp":{"retrans_segs":5,"timeouts":1}}]}]}"#;
        let all = Retransmissions {
            retrans_segs: 10,
            timeouts: 2,
        };
        assert_eq!(Retransmissions::from_statistics(stats), all);
        assert_eq!(all.growth_since(all), Retransmissions::default());
        assert_eq!(
            Retransmissions::from_statistics("no JSON"),
            Retransmissions::default()
        );
    }

    #[test]
    fn the_use_of_a_worker_is_what_its_counters_grew_by() {
        let stats = |cpu_ns, frames| {
            let text = format!(
                r#"{{"workers":[{{"core":1,"cpu_ns":{cpu_ns},
                "request_slots":{frames},"request_batches":{frames},"doorbells":{frames},"completions":{frames},
                "devices":[{{"rx_frames":{frames},"tx_frames":0}},{{"tx_frames":{frames}}}]}}]}}"#
            );
            WorkerCounters::from_statistics(&text)[0]
        };
        let time = Duration::from_micros(10);
        let used = WorkerUse::between(&stats(1000, 10), &stats(6000, 60), time, 20, 2.0);
        let expected = WorkerUse {
            end: None,
            core: 1,
            busy_percent: 50.0,
            frames: 100,
            ns_per_frame: Some(50.0),
            ns_per_message: Some(250.0),
            cycles_per_frame: Some(100.0),
            cycles_per_message: Some(500.0),
            lines_per_message: Some(LinesPerMessage {
                requests: 2.5,
                indices: 5.0,
                doorbells: 2.5,
                completions: 2.5,
            }),
        };
        assert_eq!(used, expected);
        let lines = used.lines_per_message.unwrap();
        assert!(lines.to_string().ends_with(
            "cache lines between cores per message: 12.50 (requests 2.50, indices 5.00, \
             doorbells 2.50, completions 2.50)"
        ));
        assert_eq!(WorkerCounters::from_statistics("{}"), []);
    }

    #[test]
    fn a_missing_process_is_an_error() {
        let error = Process::new(u32::MAX).cpu_time().unwrap_err().to_string();
        assert!(error.contains("still running"), "{error}");
    }
}
