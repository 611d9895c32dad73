//! `siw-perf scale`: cost of additional queue pairs. For each number of queue pairs, measures a
//! bulk transfer of one queue pair with all others idle, and a transfer of all of them in turn.

use crate::args::{ScaleOptions, TransferMode, TransferOptions};
use crate::measurement::format_bytes;
use crate::report::PerfReport;
use crate::transfer::run_transfers;
use std::fmt;

/// Total messages in flight of all active queue pairs, unless there are more queue pairs than that.
const IN_FLIGHT: u32 = 16;

/// Measurements for one number of queue pairs.
pub struct ScaleRow {
    /// Queue pairs.
    pub qps: u32,
    /// One busy queue pair, all others idle.
    pub idle: Option<PerfReport>,
    /// All of them active in turn.
    pub active: Option<PerfReport>,
}

/// All measurements, in the order of the numbers of queue pairs.
pub struct ScaleReport {
    rows: Vec<ScaleRow>,
    busy_size: u32,
    active_size: u32,
}

/// Measures every number of queue pairs. `on_report` is called with each result.
pub fn measure_scale(
    options: &ScaleOptions,
    mut on_report: impl FnMut(&PerfReport),
) -> anyhow::Result<ScaleReport> {
    let mut rows = Vec::new();
    for &qps in &options.qps {
        let mut measure = |transfer: &TransferOptions| {
            let mut last = None;
            run_transfers(transfer, TransferMode::Bw, None, |report| {
                on_report(report);
                last = Some(report.clone());
            })
            .map(|()| last)
        };
        let idle = match options.active {
            true => None,
            false => measure(&options.busy_beside(qps))?,
        };
        let active = match options.idle {
            true => None,
            false => measure(&options.all_active(qps))?,
        };
        rows.push(ScaleRow { qps, idle, active });
    }
    Ok(ScaleReport {
        rows,
        busy_size: options.busy_size,
        active_size: options.size,
    })
}

impl ScaleOptions {
    /// One busy queue pair and `idle` idle ones; a single idle one is left out, since it makes no
    /// difference.
    fn busy_beside(&self, idle: u32) -> TransferOptions {
        TransferOptions {
            size: vec![self.busy_size],
            depth: vec![IN_FLIGHT],
            idle_qps: if idle == 1 { 0 } else { idle },
            ..self.base_options()
        }
    }

    /// Options for all queue pairs active: each has its share of [`IN_FLIGHT`] messages, and at
    /// least one.
    fn all_active(&self, qps: u32) -> TransferOptions {
        TransferOptions {
            size: vec![self.size],
            depth: vec![(IN_FLIGHT / qps).max(1)],
            qps: vec![qps],
            ..self.base_options()
        }
    }
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (busy, active) = (format_bytes(self.busy_size), format_bytes(self.active_size));
        writeln!(
            f,
            "{:>7}  {:>22} {:>9}  {:>22} {:>9}  {:>9}",
            "QPs",
            format!("idle: {busy} Gb/s"),
            "of first",
            format!("active: {active} Gb/s"),
            "of first",
            "p99 us"
        )?;
        let first = |which: fn(&ScaleRow) -> &Option<PerfReport>| {
            let report = self.rows.first().and_then(|row| which(row).as_ref());
            report.map_or(f64::NAN, |report| report.gbps)
        };
        let (first_idle, first_active) = (first(|row| &row.idle), first(|row| &row.active));
        for row in &self.rows {
            let cells = |report: &Option<PerfReport>, first: f64| match report {
                Some(report) => (
                    format!("{:.3}", report.gbps),
                    format!("{:.3}", report.gbps / first),
                ),
                None => ("-".into(), "-".into()),
            };
            let (idle, idle_share) = cells(&row.idle, first_idle);
            let (active, active_share) = cells(&row.active, first_active);
            let p99 = row
                .active
                .as_ref()
                .map_or("-".into(), |report| format!("{:.1}", report.lat_us.p99));
            writeln!(
                f,
                "{:>7}  {idle:>22} {idle_share:>9}  {active:>22} {active_share:>9}  {p99:>9}",
                row.qps
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Mode;
    use crate::report::example_report;

    #[test]
    fn shares_are_of_the_first_number() {
        let report = |gbps| {
            let mut report = example_report(Mode::Bw);
            report.gbps = gbps;
            Some(report)
        };
        let row = |qps, idle, active| ScaleRow { qps, idle, active };
        let report = ScaleReport {
            rows: vec![
                row(1, report(40.0), report(8.0)),
                row(1000, report(38.0), None),
            ],
            busy_size: 65536,
            active_size: 4096,
        };
        let text = report.to_string();
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["1000", "38.000", "0.950", "-", "-", "-"]);
        assert!(text.contains("idle: 64 KiB Gb/s"), "{text}");
    }
}
