//! `siw-perf peers`: compares siwd with other ways to move data between two programs on one
//! machine, with the same sizes and cores, in alternating rounds.
//!
//! Each contender is a separate program, so that none inherits process state from another.

mod contenders;
mod cost;
mod default_daemon;
mod namespaces;
mod run_program;
pub mod tcp_ping_pong;
mod testpmd;

use crate::args::PeersOptions;
use crate::machine::{Conditions, ConditionsWatch, MachineRecord};
use crate::summary::Spread;
use anyhow::{anyhow, bail};
use contenders::{Contender, all_contenders, best_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Compared quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerFigure {
    /// Gb/s of payload, in messages or writes of 64 KiB.
    Bulk64kGbps,
    /// CPU seconds for 10^9 bytes of payload in messages of 64 KiB: all threads of both ends, which
    /// wait for events where the implementation can.
    CpuSecondsPerGb,
    /// Microseconds of a round trip of 64 bytes, median.
    RoundTrip64Us,
    /// Cycles of the time-stamp counter for a message of 64 bytes in a stream: all threads of both
    /// ends, as for [`Self::CpuSecondsPerGb`].
    CyclesPerMessage,
    /// Million frames of 64 bytes per second that one core receives from two rings and returns with
    /// swapped Ethernet addresses.
    RingMframes,
}

impl PeerFigure {
    /// Human-readable title.
    pub fn title(self) -> &'static str {
        match self {
            PeerFigure::Bulk64kGbps => "64 KiB messages, Gb/s (more is better)",
            PeerFigure::CpuSecondsPerGb => {
                "CPU seconds per GB, 64 KiB messages, all threads of both ends (less is better)"
            }
            PeerFigure::CyclesPerMessage => {
                "cycles per 64-byte message, all threads of both ends (less is better)"
            }
            PeerFigure::RoundTrip64Us => "64-byte round trip, us (less is better)",
            PeerFigure::RingMframes => "frames over rings, macswap, M/s (more is better)",
        }
    }

    /// Returns true if a smaller value is better.
    fn less_is_better(self) -> bool {
        match self {
            PeerFigure::CpuSecondsPerGb
            | PeerFigure::RoundTrip64Us
            | PeerFigure::CyclesPerMessage => true,
            PeerFigure::Bulk64kGbps | PeerFigure::RingMframes => false,
        }
    }
}

/// Result of one contender for one figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeerResult {
    /// The figure.
    pub figure: PeerFigure,
    /// The contender and its set-up.
    pub name: String,
    /// What differs from the other contenders: checksums computed, and cores.
    #[serde(default)]
    pub differs: String,
    /// Median of the rounds.
    pub median: f64,
    /// Minimum of the rounds.
    pub min: f64,
    /// Maximum of the rounds.
    pub max: f64,
    /// Rounds that counted.
    pub rounds: usize,
}

/// All results.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeersReport {
    /// The machine.
    pub machine: MachineRecord,
    /// Cores of the initiating side and of the other side, which includes siwd's worker.
    pub cores: [usize; 2],
    /// Cache-line round trip between them in nanoseconds, median over the rounds.
    pub cache_line_ns: Option<f64>,
    /// Result of each contender for each figure.
    pub results: Vec<PeerResult>,
    /// Factors by which siwd is better than its measured peers, by name.
    pub ratios: BTreeMap<String, f64>,
    /// Contenders that were not measured, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Rounds of a contender that were disturbed and repeated.
    pub disturbed: usize,
}

/// Measures all contenders; `on_progress` is called with the current step.
pub fn compare_with_peers(
    options: &PeersOptions,
    mut on_progress: impl FnMut(&str),
) -> anyhow::Result<PeersReport> {
    let cores = two_cores(options)?;
    let mut skipped = BTreeMap::new();
    let mut contenders: Vec<Contender> = Vec::new();
    for contender in all_contenders(options, cores) {
        if !options.only.is_empty() && !options.only.iter().any(|o| contender.name.contains(o)) {
            continue;
        }
        match contender.find_missing_program() {
            Some(missing) => {
                skipped.insert(contender.name, missing);
            }
            None => contenders.push(contender),
        }
    }
    if contenders.is_empty() {
        bail!("nothing to measure: --only names no contender that is installed");
    }
    let mut rounds = RoundValues::default();
    for round in 1..=options.rounds {
        for contender in &mut contenders {
            if skipped.contains_key(&contender.name) {
                continue;
            }
            on_progress(&format!(
                "round {round} of {}: {}",
                options.rounds, contender.name
            ));
            if let Err(error) = rounds.measure_once(contender, cores) {
                skipped.insert(contender.name.clone(), error.to_string());
            }
        }
    }
    Ok(rounds.into_report(cores, skipped))
}

fn two_cores(options: &PeersOptions) -> anyhow::Result<[usize; 2]> {
    if let Some(&[first, second]) = options.cores.as_deref() {
        return Ok([first, second]);
    }
    match dpdk::allowed_cores()[..] {
        [first, second, ..] => Ok([first, second]),
        _ => Err(anyhow!("two cores are needed: one for each side")),
    }
}

/// Values of one contender for one figure.
struct ContenderValues {
    figure: PeerFigure,
    name: String,
    differs: String,
    values: Vec<f64>,
}

/// Results of the rounds so far.
#[derive(Default)]
struct RoundValues {
    /// In the order of the contenders.
    values: Vec<ContenderValues>,
    cache_line_ns: Vec<f64>,
    disturbed: usize,
}

impl RoundValues {
    /// Measures a contender, and once more if the measurement was disturbed.
    fn measure_once(&mut self, contender: &mut Contender, cores: [usize; 2]) -> anyhow::Result<()> {
        let (mut values, mut conditions) = measure_watched(contender, cores)?;
        if conditions.disturbed.is_some() {
            self.disturbed += 1;
            (values, conditions) = measure_watched(contender, cores)?;
        }
        self.cache_line_ns.extend(conditions.cache_line_ns_before);
        for (figure, value) in values {
            let is_same =
                |of: &&mut ContenderValues| of.figure == figure && of.name == contender.name;
            match self.values.iter_mut().find(is_same) {
                Some(all) => all.values.push(value),
                None => self.values.push(ContenderValues {
                    figure,
                    name: contender.name.clone(),
                    differs: contender.differs.clone(),
                    values: vec![value],
                }),
            }
        }
        Ok(())
    }

    fn into_report(self, cores: [usize; 2], skipped: BTreeMap<String, String>) -> PeersReport {
        let results = self.values.into_iter().filter_map(|all| {
            let rounds = all.values.len();
            let spread = Spread::of(all.values)?;
            Some(PeerResult {
                figure: all.figure,
                name: all.name,
                differs: all.differs,
                median: spread.median,
                min: spread.min,
                max: spread.max,
                rounds,
            })
        });
        let mut results: Vec<PeerResult> = results.collect();
        results.sort_by_key(|result| result.figure);
        let ratios = RATIOS.iter().filter_map(|&(name, figure, ours, theirs)| {
            let ratio = ratio_of(&results, figure, ours, theirs)?;
            Some((name.to_owned(), (ratio * 1000.0).round() / 1000.0))
        });
        PeersReport {
            ratios: ratios.collect(),
            machine: MachineRecord::read(),
            cores,
            cache_line_ns: Spread::of(self.cache_line_ns).map(|spread| spread.median),
            results,
            skipped,
            disturbed: self.disturbed,
        }
    }
}

/// Figures and values of one measurement.
type MeasuredValues = Vec<(PeerFigure, f64)>;

fn measure_watched(
    contender: &mut Contender,
    cores: [usize; 2],
) -> anyhow::Result<(MeasuredValues, Conditions)> {
    let watch = ConditionsWatch::begin(Some(cores));
    let values = (contender.measure)()?;
    Ok((values, watch.end()))
}

/// Name of a ratio, its figure, and the name prefixes of our contenders and of the peers.
type NamedRatio = (&'static str, PeerFigure, &'static str, &'static str);

/// The ratios in the report.
const RATIOS: [NamedRatio; 12] = [
    (
        "bulk_to_kernel_offloads",
        PeerFigure::Bulk64kGbps,
        "siwd, default",
        "kernel TCP, all offloads",
    ),
    (
        "bulk_crc_to_kernel_offloads",
        PeerFigure::Bulk64kGbps,
        "siwd, CRC, MTU of the default",
        "kernel TCP, all offloads",
    ),
    (
        "bulk_1500_to_kernel_offloads",
        PeerFigure::Bulk64kGbps,
        "siwd, CRC, MTU 1500",
        "kernel TCP, all offloads, MTU 1500",
    ),
    (
        "bulk_1500_to_kernel_no_offloads",
        PeerFigure::Bulk64kGbps,
        "siwd, CRC, MTU 1500",
        "kernel TCP, no offloads, MTU 1500",
    ),
    (
        "bulk_to_ucx",
        PeerFigure::Bulk64kGbps,
        "siwd, default",
        "UCX",
    ),
    (
        "cpu_crc_to_kernel_offloads",
        PeerFigure::CpuSecondsPerGb,
        "siwd, CRC, MTU of the default",
        "kernel TCP, all offloads",
    ),
    (
        "cpu_1500_to_kernel_offloads",
        PeerFigure::CpuSecondsPerGb,
        "siwd, CRC, MTU 1500",
        "kernel TCP, all offloads, MTU 1500",
    ),
    (
        "cpu_to_kernel_offloads",
        PeerFigure::CpuSecondsPerGb,
        "siwd, default",
        "kernel TCP, all offloads",
    ),
    (
        "cycles_to_kernel",
        PeerFigure::CyclesPerMessage,
        "siwd, CRC, MTU of the default",
        "kernel TCP",
    ),
    (
        "round_trip_to_ucx",
        PeerFigure::RoundTrip64Us,
        "siwd, default",
        "UCX",
    ),
    (
        "round_trip_to_kernel",
        PeerFigure::RoundTrip64Us,
        "siwd, default",
        "kernel TCP",
    ),
    (
        "frames_to_testpmd",
        PeerFigure::RingMframes,
        "siw-perf raw",
        "testpmd",
    ),
];

/// Factor by which siwd is better than a peer: compares the best median of the contenders with name
/// prefix `ours` with that for prefix `theirs`. `None` if either is missing.
fn ratio_of(results: &[PeerResult], figure: PeerFigure, ours: &str, theirs: &str) -> Option<f64> {
    let best = |prefix| best_of(results.iter(), figure, prefix);
    let (ours, theirs) = (best(ours)?, best(theirs)?);
    Some(match figure.less_is_better() {
        true => theirs / ours,
        false => ours / theirs,
    })
}

/// Formats a value with three digits if it is below one, else with two decimal places.
pub fn format_value(value: f64) -> String {
    match value < 1.0 {
        true => format!("{value:.3}"),
        false => format!("{value:.2}"),
    }
}

impl fmt::Display for PeersReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, Linux {}, {}; cores {} and {}{}",
            self.machine.cpu,
            self.machine.kernel,
            self.machine.dpdk,
            self.cores[0],
            self.cores[1],
            match self.cache_line_ns {
                Some(ns) => format!(", cache-line round trip {ns:.0} ns"),
                None => String::new(),
            }
        )?;
        let mut figure = None;
        for result in &self.results {
            if figure.replace(result.figure) != Some(result.figure) {
                writeln!(f, "{}:", result.figure.title())?;
            }
            writeln!(
                f,
                "  {:<44} {:>9}  ({} to {}, {} rounds){}",
                result.name,
                format_value(result.median),
                format_value(result.min),
                format_value(result.max),
                result.rounds,
                match &result.differs[..] {
                    "" => String::new(),
                    differs => format!("  {differs}"),
                }
            )?;
        }
        if !self.ratios.is_empty() {
            writeln!(f, "siwd is better by these factors:")?;
        }
        for (name, ratio) in &self.ratios {
            writeln!(f, "  {name:<44} {ratio:>9.2}")?;
        }
        for (name, reason) in &self.skipped {
            writeln!(f, "  not measured: {name}: {reason}")?;
        }
        if self.disturbed > 0 {
            writeln!(
                f,
                "  {} measurements were disturbed and repeated once",
                self.disturbed
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_above_one_where_siwd_is_better() {
        let result = |figure, name: &str, median| PeerResult {
            figure,
            name: name.into(),
            differs: String::new(),
            median,
            min: median,
            max: median,
            rounds: 1,
        };
        let results = [
            result(PeerFigure::RoundTrip64Us, "siwd, default", 2.0),
            result(PeerFigure::RoundTrip64Us, "kernel TCP, no offloads", 10.0),
            result(PeerFigure::RoundTrip64Us, "kernel TCP, all offloads", 8.0),
            result(PeerFigure::Bulk64kGbps, "siwd, default", 20.0),
            result(PeerFigure::Bulk64kGbps, "UCX tcp", 5.0),
            result(PeerFigure::CpuSecondsPerGb, "siwd, CRC", 0.25),
            result(PeerFigure::CpuSecondsPerGb, "kernel TCP", 0.5),
        ];
        let ratio = |figure, theirs| ratio_of(&results, figure, "siwd", theirs);
        assert_eq!(ratio(PeerFigure::RoundTrip64Us, "kernel TCP"), Some(4.0));
        assert_eq!(ratio(PeerFigure::Bulk64kGbps, "UCX"), Some(4.0));
        assert_eq!(ratio(PeerFigure::RoundTrip64Us, "UCX"), None);
        let cost = PeerFigure::CpuSecondsPerGb;
        assert_eq!(ratio(cost, "kernel TCP"), Some(2.0));
    }

    #[test]
    fn values_of_all_rounds_make_one_result() {
        let mut rounds = RoundValues::default();
        let mut next = 0.0;
        let mut contender = Contender {
            name: "example".into(),
            differs: "no checksum".into(),
            needs: vec![],
            measure: Box::new(move || {
                next += 1.0;
                Ok(vec![
                    (PeerFigure::RoundTrip64Us, next),
                    (PeerFigure::Bulk64kGbps, 10.0 * next),
                ])
            }),
        };
        for _ in 0..3 {
            rounds.measure_once(&mut contender, [0, 0]).unwrap();
        }
        let report = rounds.into_report([0, 1], BTreeMap::new());
        assert_eq!(report.results.len(), 2);
        let bulk = &report.results[0];
        assert_eq!(bulk.figure, PeerFigure::Bulk64kGbps);
        assert_eq!(bulk.rounds, 3);
        assert!(bulk.min >= 10.0 && bulk.median > bulk.min && bulk.max > bulk.median);
        let text = report.to_string();
        let is_whole = |line: &str| line.contains("example") && line.ends_with("no checksum");
        assert_eq!(
            text.lines().filter(|line| is_whole(line)).count(),
            2,
            "{text}"
        );
    }
}
