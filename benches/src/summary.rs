//! Summary of several `siw-perf` results: the median of each transfer's rounds, as a table for
//! people and as comma-separated values for spreadsheets.

use crate::daemon::WorkerUse;
use crate::measurement::format_bytes;
use crate::plan::Mode;
use crate::report::PerfReport;
use serde_json::Value;
use std::fmt::Write;

/// Spread of a number over several rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// Spread of all values; `None` without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[middle],
            _ => (values[middle - 1] + values[middle]) / 2.0,
        };
        Some(Spread { median, min, max })
    }
}

/// The rounds of one transfer.
pub struct TransferRounds<'a> {
    /// The rounds that count: the undisturbed ones, or all if there are none.
    pub counted: Vec<&'a PerfReport>,
    /// Number of disturbed rounds.
    pub disturbed: usize,
    /// Position of the daemon's settings in [`all_settings`], counted from one; `None` if all
    /// results have the same.
    pub settings_number: Option<usize>,
}

/// The distinct daemon settings of all transfers, in order of first occurrence.
pub fn all_settings(reports: &[PerfReport]) -> Vec<&Value> {
    let mut all = Vec::new();
    for settings in reports.iter().filter_map(|report| report.settings.as_ref()) {
        if !all.contains(&settings) {
            all.push(settings);
        }
    }
    all
}

/// Groups results by transfer and by the daemon's settings, in order of first occurrence.
pub fn group_by_transfer(reports: &[PerfReport]) -> Vec<TransferRounds<'_>> {
    let mut groups: Vec<Vec<&PerfReport>> = Vec::new();
    for report in reports {
        let same = |group: &&mut Vec<&PerfReport>| {
            is_same_transfer(group[0], report) && group[0].settings == report.settings
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(report),
            None => groups.push(vec![report]),
        }
    }
    let settings = all_settings(reports);
    let number_of = |report: &PerfReport| {
        let found = settings
            .iter()
            .position(|&one| Some(one) == report.settings.as_ref());
        found.filter(|_| settings.len() > 1).map(|place| place + 1)
    };
    groups
        .into_iter()
        .map(|rounds| {
            let number = number_of(rounds[0]);
            TransferRounds::new(rounds, number)
        })
        .collect()
}

/// Returns true if two results are rounds of the same transfer.
pub fn is_same_transfer(first: &PerfReport, second: &PerfReport) -> bool {
    let key = |report: &PerfReport| {
        (
            (
                report.mode,
                report.op,
                report.size,
                report.depth,
                report.qps,
            ),
            (report.mtu, report.crc, report.inline),
            (
                report.idle_qps,
                report.bulk_gbps.is_some(),
                report.link_loss_ppm,
                report.pause_us,
            ),
            (
                report.threads,
                report.bidirectional,
                report.events,
                report.cq_mod,
                report.markers,
            ),
        )
    };
    key(first) == key(second) && (&first.from, &first.to) == (&second.from, &second.to)
}

impl<'a> TransferRounds<'a> {
    fn new(rounds: Vec<&'a PerfReport>, settings_number: Option<usize>) -> TransferRounds<'a> {
        let quiet: Vec<_> = rounds
            .iter()
            .copied()
            .filter(|report| report.conditions.disturbed.is_none())
            .collect();
        let disturbed = rounds.len() - quiet.len();
        TransferRounds {
            counted: if quiet.is_empty() { rounds } else { quiet },
            disturbed,
            settings_number,
        }
    }

    /// The name of a transfer, with the number of the daemon's settings if there are several.
    pub fn name_with_settings(&self, name: String) -> String {
        match self.settings_number {
            Some(number) => format!("{name}, settings {number}"),
            None => name,
        }
    }

    /// Spread of a number over the rounds that count.
    pub fn spread(&self, value: impl Fn(&PerfReport) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.counted.iter().filter_map(|report| value(report)))
    }

    /// Median of the workers' total cost per message; `None` if one of them lacks the number.
    pub fn worker_cost(&self, value: impl Fn(&WorkerUse) -> Option<f64>) -> Option<f64> {
        let of_report = |report: &PerfReport| {
            let workers = Some(&report.workers).filter(|workers| !workers.is_empty())?;
            workers.iter().map(&value).sum()
        };
        self.spread(of_report).map(|spread| spread.median)
    }

    /// The best rate divided by the best bound. Both vary over the rounds, and the best of the
    /// rounds' ratios would be that of the round whose bound was disturbed most.
    pub fn ratio_to_bound(&self) -> Option<f64> {
        Some(self.round_ratios()?.max)
    }

    /// Spread of the rounds' rates divided by the best bound.
    pub fn round_ratios(&self) -> Option<Spread> {
        let bound = |report: &PerfReport| report.ratio.and(report.bound.path_gbps);
        let best_bound = self.spread(bound)?.max;
        self.spread(|report| (report.mode == Mode::Bw).then_some(report.gbps / best_bound))
    }
}

/// Number of transfers that exceeded their bound in each of their rounds.
pub fn transfers_above_bound(reports: &[PerfReport]) -> usize {
    let groups = group_by_transfer(reports);
    let is_above =
        |rounds: &&TransferRounds<'_>| rounds.counted.iter().all(|report| report.exceeds_bound());
    groups.iter().filter(is_above).count()
}

/// Formats a table with a line for each transfer.
pub fn format_table(reports: &[PerfReport]) -> String {
    let mut text = format!(
        "{:<12} {:>6} {:>9} {:>6} {:>6} {:>22} {:>10} {:>20} {:>9} {:>6} {:>7}\n",
        "op",
        "MTU",
        "size",
        "depth",
        "QPs",
        "Gb/s (min to max)",
        "M msg/s",
        "p50 us",
        "p99 us",
        "ratio",
        "rounds"
    );
    for rounds in group_by_transfer(reports) {
        let first = rounds.counted[0];
        let range = |spread: Option<Spread>| match spread {
            Some(s) if s.min < s.max => format!("{:.2} ({:.2} to {:.2})", s.median, s.min, s.max),
            Some(s) => format!("{:.2}", s.median),
            None => "-".into(),
        };
        let median = |spread: Option<Spread>| spread.map_or(0.0, |spread| spread.median);
        let ratio = rounds
            .ratio_to_bound()
            .map_or("-".into(), |ratio| format!("{ratio:.2}"));
        let count = match rounds.disturbed {
            0 => format!("{}", rounds.counted.len()),
            disturbed => format!("{} ({disturbed}!)", rounds.counted.len()),
        };
        let mut words = first.variants();
        words.extend(first.loss_in_words());
        let variants = match &words[..] {
            [] => String::new(),
            words => format!("  {}", words.join(", ")),
        };
        let _ = writeln!(
            text,
            "{:<12} {:>6} {:>9} {:>6} {:>6} {:>22} {:>10.4} {:>20} {:>9.2} {ratio:>6} {count:>7}{variants}",
            first.op.json_name(),
            first.mtu,
            format_bytes(first.size),
            first.depth,
            first.qps,
            range(rounds.spread(|report| Some(report.gbps))),
            median(rounds.spread(|report| Some(report.mmsgs))),
            range(rounds.spread(|report| Some(report.lat_us.p50))),
            median(rounds.spread(|report| Some(report.lat_us.p99))),
        );
    }
    if reports
        .iter()
        .any(|report| report.conditions.disturbed.is_some())
    {
        text.push_str(
            "(!) number of disturbed rounds; they count only if all rounds were disturbed\n",
        );
    }
    text
}

/// Column names of [`csv_line`].
pub const CSV_HEADER: &str = "mode,op,size,depth,qps,mtu,crc,round,gbps,mmsgs,p50_us,p99_us,p999_us,\
raw_gbps,copy_crc_gbps,crc_gbps,ratio,steal_percent,cache_line_ns,disturbed,commit,threads,bidirectional,events,idle_qps,link_loss_ppm,cq_mod,pause_us,\
from,to,bound_gbps,retrans_segs,timeouts,worker_percent,min_us,avg_us,max_us,stddev_us";

/// Quotes a value that contains a separator (RFC 4180). Two fields need it: shorter than with a crate.
fn quote_csv(text: &str) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

/// One result as comma-separated values; values that were not measured are empty.
pub fn csv_line(report: &PerfReport) -> String {
    let number = |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
    let mode = match report.mode {
        Mode::Bw => "bw",
        Mode::Lat => "lat",
    };
    let fields = [
        mode.into(),
        report.op.json_name().into(),
        report.size.to_string(),
        report.depth.to_string(),
        report.qps.to_string(),
        report.mtu.to_string(),
        report.crc.to_string(),
        report.round.to_string(),
        report.gbps.to_string(),
        report.mmsgs.to_string(),
        report.lat_us.p50.to_string(),
        report.lat_us.p99.to_string(),
        report.lat_us.p999.to_string(),
        number(report.bound.raw_gbps),
        number(report.bound.copy_crc_gbps),
        number(report.bound.crc_gbps),
        number(report.ratio),
        report.conditions.steal_percent.to_string(),
        number(report.conditions.cache_line_ns_before),
        report.conditions.disturbed.is_some().to_string(),
        report.machine.commit.clone(),
        report.threads.to_string(),
        report.bidirectional.to_string(),
        report.events.to_string(),
        report.idle_qps.to_string(),
        report.link_loss_ppm.to_string(),
        report.cq_mod.to_string(),
        report.pause_us.to_string(),
        quote_csv(&report.from),
        quote_csv(&report.to),
        number(report.bound.path_gbps),
        report.tcp.retrans_segs.to_string(),
        report.tcp.timeouts.to_string(),
        number(report.worker_percent()),
        report.lat_us.min.to_string(),
        report.lat_us.avg.to_string(),
        report.lat_us.max.to_string(),
        report.lat_us.stddev.to_string(),
    ];
    fields.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Conditions;
    use crate::report::example_report;

    fn reports() -> Vec<PerfReport> {
        let round = |gbps, raw| {
            let mut report = example_report(Mode::Bw);
            report.gbps = gbps;
            report.bound.path_gbps = Some(raw / 3.0);
            report
        };
        vec![round(10.0, 100.0), round(30.0, 100.0), round(20.0, 50.0)]
    }

    #[test]
    fn the_median_stands_between_least_and_greatest() {
        let spread = Spread::of([4.0, 1.0, 2.0]);
        assert_eq!(
            spread,
            Some(Spread {
                median: 2.0,
                min: 1.0,
                max: 4.0
            })
        );
        assert_eq!(
            Spread::of([1.0, 2.0]).map(|spread| spread.median),
            Some(1.5)
        );
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn the_best_rate_is_divided_by_the_best_bound() {
        let reports = reports();
        let groups = group_by_transfer(&reports);
        assert_eq!(groups.len(), 1);
        let ratio = groups[0].ratio_to_bound().unwrap();
        assert!((ratio - 30.0 / (100.0 / 3.0)).abs() < 1e-9, "{ratio}");
    }

    #[test]
    fn a_transfer_always_above_its_bound_was_measured_wrongly() {
        let mut reports = reports();
        for report in &mut reports {
            report.ratio = Some(1.2);
            report.add_conditions(Conditions::default());
        }
        assert_eq!(transfers_above_bound(&reports), 1);
        reports[1].ratio = Some(0.9);
        reports[1].conditions.disturbed = None;
        assert_eq!(transfers_above_bound(&reports), 0);
    }

    #[test]
    fn disturbed_rounds_do_not_count_beside_quiet_ones() {
        let mut reports = reports();
        reports[1].conditions.disturbed = Some("steal".into());
        let groups = group_by_transfer(&reports);
        assert_eq!((groups[0].counted.len(), groups[0].disturbed), (2, 1));
        let table = format_table(&reports);
        assert!(
            table.contains("15.00 (10.00 to 20.00)") && table.contains("2 (1!)"),
            "{table}"
        );
    }

    #[test]
    fn other_sizes_have_lines_of_their_own() {
        let mut reports = reports();
        reports[2].size = 64;
        assert_eq!(group_by_transfer(&reports).len(), 2);
        assert_eq!(format_table(&reports).lines().count(), 3);
    }

    #[test]
    fn rounds_under_other_settings_are_another_transfer() {
        let mut reports = reports();
        for (report, tso) in reports.iter_mut().zip([true, false, true]) {
            report.settings = Some(serde_json::json!({ "tso": tso }));
        }
        let groups = group_by_transfer(&reports);
        let found: Vec<_> = groups
            .iter()
            .map(|rounds| (rounds.counted.len(), rounds.settings_number))
            .collect();
        assert_eq!(found, [(2, Some(1)), (1, Some(2))]);
        assert_eq!(group_by_transfer(&reports[..1])[0].settings_number, None);
    }

    #[test]
    fn round_trips_after_silence_are_another_transfer() {
        let mut reports = reports();
        reports[1].pause_us = 2000;
        let groups = group_by_transfer(&reports);
        let counts: Vec<_> = groups.iter().map(|rounds| rounds.counted.len()).collect();
        assert_eq!(counts, [2, 1]);
        let words = groups[1].counted[0].variants();
        assert_eq!(words, ["after 2000 us of silence"]);
    }

    #[test]
    fn each_mtu_has_a_line_that_names_it() {
        let mut reports = reports();
        reports[2].mtu = 9000;
        let table = format_table(&reports);
        let mtus: Vec<_> = table
            .lines()
            .map(|line| line.split_whitespace().nth(1).unwrap())
            .collect();
        assert_eq!(mtus, ["MTU", "1500", "9000"], "{table}");
    }

    #[test]
    fn a_csv_line_has_a_value_for_each_name() {
        let line = csv_line(&reports()[0]);
        assert_eq!(
            line.split(',').count(),
            CSV_HEADER.split(',').count(),
            "{line}"
        );
        assert!(
            line.starts_with("bw,write,1048576,8,2,1500,true,1,10,"),
            "{line}"
        );
        let mut report = reports()[0].clone();
        report.tcp.retrans_segs = 7;
        let worker = |busy_percent| WorkerUse {
            busy_percent,
            ..WorkerUse::default()
        };
        report.workers = vec![worker(50.0), worker(25.0)];
        let line = csv_line(&report);
        assert!(
            line.contains(",siw0,siw1,") && line.contains(",7,0,75,"),
            "{line}"
        );
        assert_eq!(quote_csv("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
