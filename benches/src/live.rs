//! `--live`: progress of a long transfer once a second: bandwidth, latency, workers of the daemon,
//! retransmissions. On a terminal a block of lines that is redrawn, elsewhere a table row per
//! update.

use crate::daemon::{Retransmissions, WorkerCounters, WorkerUse};
use crate::measurement::{format_bytes, gigabits_per_second, new_histogram};
use crate::plan::MeasurementPlan;
use hdrhistogram::Histogram;
use siw::Context;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between two updates unless an interval is requested.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// Width of the progress bar in characters.
const BAR: usize = 40;

/// Counters of a measurement so far.
pub struct LiveSample<'a> {
    /// Messages.
    pub messages: u64,
    /// Their latencies in nanoseconds.
    pub latency: &'a Histogram<u64>,
    /// Time since the measurement began, and its total duration.
    pub progress: (Duration, Duration),
}

/// Changes between two updates.
struct LiveRow {
    progress: (Duration, Duration),
    gbps: f64,
    mmsgs: f64,
    /// Microseconds at p50, p99 and p99.9.
    latency: [f64; 3],
    workers: Vec<WorkerUse>,
    tcp: Retransmissions,
}

/// The display.
pub struct LiveView {
    ctx: Context,
    title: String,
    size: u32,
    tsc: (u64, Instant),
    is_terminal: bool,
    /// Lines on the terminal that the next block overwrites.
    drawn: usize,
    interval: Duration,
    next: Instant,
    last: Reading,
}

/// Counters at an update.
struct Reading {
    at: Instant,
    messages: u64,
    latency: Histogram<u64>,
    statistics: String,
}

impl LiveView {
    /// Creates the view of a transfer that begins now. Reads the daemon's statistics through `ctx`.
    pub fn new(
        ctx: &Context,
        plan: &MeasurementPlan,
        interval: Option<Duration>,
    ) -> anyhow::Result<LiveView> {
        let (now, interval) = (Instant::now(), interval.unwrap_or(UPDATE_INTERVAL));
        let view = LiveView {
            ctx: ctx.clone(),
            title: format!(
                "{} {}, depth {}, {} QP",
                plan.op.json_name(),
                format_bytes(plan.size),
                plan.depth,
                plan.qps
            ),
            size: plan.size,
            tsc: (dpdk::tsc_now(), now),
            is_terminal: std::io::stderr().is_terminal(),
            drawn: 0,
            interval,
            next: now + interval,
            last: Reading {
                at: now,
                messages: 0,
                latency: new_histogram()?,
                statistics: ctx.read_stats().unwrap_or_default(),
            },
        };
        if !view.is_terminal {
            eprintln!("{}", format_columns());
        }
        Ok(view)
    }

    /// Starts the measurement; earlier messages are not counted.
    pub fn begin_counting(&mut self, now: Instant) {
        self.next = now + self.interval;
        self.last.at = now;
        self.last.messages = 0;
        self.last.latency.reset();
        self.last.statistics = self.ctx.read_stats().unwrap_or_default();
    }

    /// Shows the changes since the last update if one is due; returns true if it was.
    #[inline]
    pub fn show_if_due<'a>(
        &mut self,
        now: Instant,
        sample: impl FnOnce() -> LiveSample<'a>,
    ) -> bool {
        let is_due = now >= self.next;
        if is_due {
            self.show_now(now, &sample());
        }
        is_due
    }

    #[cold]
    fn show_now(&mut self, now: Instant, sample: &LiveSample<'_>) {
        self.next = now + self.interval;
        let row = self.compute_row(now, sample);
        let text = match self.is_terminal {
            true => self.replace_block(&format_block(&self.title, &row)),
            false => format!("{}\n", format_row(&row)),
        };
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    fn compute_row(&mut self, now: Instant, sample: &LiveSample<'_>) -> LiveRow {
        let mut latency = sample.latency.clone();
        // Cannot fail, since the histogram contains everything that is subtracted.
        let _ = latency.subtract(&self.last.latency);
        let messages = sample.messages.saturating_sub(self.last.messages);
        let statistics = self.ctx.read_stats().unwrap_or_default();
        let time = now - self.last.at;
        let ticks = dpdk::tsc_now().wrapping_sub(self.tsc.0);
        let tsc_ghz = ticks as f64 / self.tsc.1.elapsed().as_nanos().max(1) as f64;
        let (before, after) = (&self.last.statistics, &statistics);
        let workers = WorkerCounters::from_statistics(before)
            .iter()
            .zip(&WorkerCounters::from_statistics(after))
            .map(|(before, after)| WorkerUse::between(before, after, time, messages, tsc_ghz))
            .collect();
        let us = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
        let row = LiveRow {
            progress: sample.progress,
            gbps: gigabits_per_second(messages * u64::from(self.size), time),
            mmsgs: messages as f64 / time.as_secs_f64().max(1e-9) / 1e6,
            latency: [us(0.5), us(0.99), us(0.999)],
            workers,
            tcp: Retransmissions::from_statistics(after)
                .growth_since(Retransmissions::from_statistics(before)),
        };
        self.last = Reading {
            at: now,
            messages: sample.messages,
            latency: sample.latency.clone(),
            statistics,
        };
        row
    }

    /// Text that replaces the last block by `block`.
    fn replace_block(&mut self, block: &str) -> String {
        let mut text = match self.drawn {
            0 => String::new(),
            lines => format!("\x1b[{lines}A"),
        };
        for line in block.lines() {
            // Writing into a string never fails.
            let _ = writeln!(text, "\x1b[K{line}");
        }
        self.drawn = block.lines().count();
        text
    }
}

fn format_columns() -> String {
    format!(
        "{:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "s", "Gb/s", "M msg/s", "p50 us", "p99 us", "p99.9 us", "worker %", "retrans", "timeouts"
    )
}

fn format_row(row: &LiveRow) -> String {
    let [p50, p99, p999] = row.latency;
    let busy: Vec<String> = row
        .workers
        .iter()
        .map(|worker| format!("{:.0}", worker.busy_percent))
        .collect();
    format!(
        "{:>8.1} {:>9.3} {:>9.4} {p50:>9.2} {p99:>9.2} {p999:>9.2} {:>9} {:>8} {:>8}",
        row.progress.0.as_secs_f64(),
        row.gbps,
        row.mmsgs,
        busy.join(","),
        row.tcp.retrans_segs,
        row.tcp.timeouts
    )
}

fn format_block(title: &str, row: &LiveRow) -> String {
    let (done, all) = row.progress;
    let share = (done.as_secs_f64() / all.as_secs_f64().max(1e-9)).clamp(0.0, 1.0);
    let filled = (share * BAR as f64).round() as usize;
    let [p50, p99, p999] = row.latency;
    let mut text = format!(
        "{title}\n  [{}{}] {:.1} of {:.1} s\n  bandwidth  {:.2} Gb/s, {:.4} M messages/s\n  \
         latency    p50 {p50:.2}  p99 {p99:.2}  p99.9 {p999:.2} us\n",
        "#".repeat(filled),
        ".".repeat(BAR - filled),
        done.as_secs_f64(),
        all.as_secs_f64(),
        row.gbps,
        row.mmsgs
    );
    for worker in &row.workers {
        // Writing into a string never fails.
        let _ = writeln!(text, "  {worker}");
    }
    let _ = writeln!(
        text,
        "  TCP        {} segments retransmitted, {} timeouts",
        row.tcp.retrans_segs, row.tcp.timeouts
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> LiveRow {
        LiveRow {
            progress: (Duration::from_secs(5), Duration::from_secs(10)),
            gbps: 24.5,
            mmsgs: 0.0467,
            latency: [85.0, 120.0, 300.0],
            workers: vec![WorkerUse {
                core: 1,
                busy_percent: 99.0,
                ..WorkerUse::default()
            }],
            tcp: Retransmissions {
                retrans_segs: 3,
                timeouts: 1,
            },
        }
    }

    #[test]
    fn a_row_has_a_value_below_each_column() {
        let row = format_row(&example());
        assert_eq!(row.len(), format_columns().len(), "{row}");
        let values: Vec<&str> = row.split_whitespace().collect();
        let expected = [
            "5.0", "24.500", "0.0467", "85.00", "120.00", "300.00", "99", "3", "1",
        ];
        assert_eq!(values, expected);
    }

    #[test]
    fn a_block_says_how_much_of_the_time_is_over() {
        let block = format_block("write 64 KiB", &example());
        let bar = format!("[{}{}] 5.0 of 10.0 s", "#".repeat(20), ".".repeat(20));
        assert!(block.contains(&bar), "{block}");
        assert!(block.contains("worker on core 1: ran 99 %"), "{block}");
        assert!(block.contains("3 segments retransmitted"), "{block}");
    }
}
