//! `siw-perf compare OLD NEW`: compares the transfers common to two result files as ratios.

use crate::measurement::format_bytes;
use crate::plan::Mode;
use crate::report::PerfReport;
use crate::summary::{Spread, TransferRounds, group_by_transfer, is_same_transfer};
use serde::Serialize;
use std::fmt;

/// Comparison of one transfer.
#[derive(Debug, Clone, Serialize)]
pub struct TransferComparison {
    /// Description of the transfer.
    pub transfer: String,
    /// `Gb/s`, or `us` for the median round trip.
    pub unit: &'static str,
    /// Median of the old rounds.
    pub old: f64,
    /// Median of the new rounds.
    pub new: f64,
    /// Improvement factor of the new result.
    pub gain: f64,
    /// Improvement factor of the ratios to the machine's bounds, if both files have them.
    pub gain_to_bound: Option<f64>,
    /// True if the new result is worse than the tolerance allows, and every new round worse than
    /// every old one.
    pub is_regression: bool,
}

/// Comparison of all transfers that both files have.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The transfers.
    pub transfers: Vec<TransferComparison>,
    /// Transfers that only one file has.
    pub unmatched: usize,
    /// True if the files come from different processors, so that only ratios to bounds are
    /// comparable.
    pub other_machine: bool,
}

impl Comparison {
    /// Compares medians. `tolerance`: permitted deterioration, 0.05 for 5 %.
    pub fn new(old: &[PerfReport], new: &[PerfReport], tolerance: f64) -> Comparison {
        let (old_groups, new_groups) = (group_by_transfer(old), group_by_transfer(new));
        let partners = find_partners(&old_groups, &new_groups);
        let pairs = new_groups.iter().zip(partners);
        let transfers: Vec<_> = pairs
            .filter_map(|(new, old)| compare_transfer(&old_groups[old?], new, tolerance))
            .collect();
        let unmatched = old_groups.len() + new_groups.len() - 2 * transfers.len();
        let cpu = |reports: &[PerfReport]| reports.first().map(|report| report.machine.cpu.clone());
        Comparison {
            transfers,
            unmatched,
            other_machine: cpu(old) != cpu(new),
        }
    }

    /// Returns true if any transfer became worse.
    pub fn has_regression(&self) -> bool {
        self.transfers.iter().any(|transfer| transfer.is_regression)
    }
}

/// Returns, for each new transfer, the index of the old one to compare it with. Among old ones with
/// different daemon settings it picks the one with the same settings; if there is none, the
/// comparison is between the settings.
fn find_partners(old: &[TransferRounds<'_>], new: &[TransferRounds<'_>]) -> Vec<Option<usize>> {
    let mut partners = vec![None; new.len()];
    for wants_same_settings in [true, false] {
        for (place, new) in new.iter().enumerate() {
            let first = new.counted[0];
            let is_partner = |place: &usize| {
                let old = old[*place].counted[0];
                let has_settings = old.settings == first.settings;
                is_same_transfer(old, first) && (has_settings || !wants_same_settings)
            };
            if partners[place].is_none() {
                let mut free = (0..old.len()).filter(|old| !partners.contains(&Some(*old)));
                partners[place] = free.find(is_partner);
            }
        }
    }
    partners
}

fn compare_transfer(
    old: &TransferRounds<'_>,
    new: &TransferRounds<'_>,
    tolerance: f64,
) -> Option<TransferComparison> {
    let first = new.counted[0];
    let latency = first.mode == Mode::Lat;
    let value = |report: &PerfReport| {
        Some(if latency {
            report.lat_us.p50
        } else {
            report.gbps
        })
    };
    let (old_spread, new_spread) = (old.spread(value)?, new.spread(value)?);
    let gain = match latency {
        true => old_spread.median / new_spread.median,
        false => new_spread.median / old_spread.median,
    };
    let gain_to_bound = match (old.ratio_to_bound(), new.ratio_to_bound()) {
        (Some(old), Some(new)) => Some(new / old),
        _ => None,
    };
    // Rounds are compared in the measure that is judged: on a faster machine each new rate may exceed
    // each old one while the ratios have fallen.
    let (judged, is_apart) = match (gain_to_bound, old.round_ratios(), new.round_ratios()) {
        (Some(gain), Some(old), Some(new)) => (gain, is_apart(false, old, new)),
        _ => (gain, is_apart(latency, old_spread, new_spread)),
    };
    Some(TransferComparison {
        transfer: format!(
            "{} {}, depth {}, {} QP, MTU {}",
            first.op.json_name().to_uppercase(),
            format_bytes(first.size),
            first.depth,
            first.qps,
            first.mtu
        ),
        unit: if latency { "us" } else { "Gb/s" },
        old: old_spread.median,
        new: new_spread.median,
        gain,
        gain_to_bound,
        is_regression: judged < 1.0 - tolerance && is_apart,
    })
}

/// Returns true if each new round is worse than each old one.
fn is_apart(latency: bool, old: Spread, new: Spread) -> bool {
    match latency {
        true => new.min > old.max,
        false => new.max < old.min,
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<44} {:>10} {:>10} {:>8} {:>9}",
            "", "old", "new", "gain", "to bound"
        )?;
        for transfer in &self.transfers {
            let to_bound = transfer
                .gain_to_bound
                .map_or("-".into(), |gain| format!("{gain:.2}"));
            writeln!(
                f,
                "{:<44} {:>10.2} {:>10.2} {:>8.2} {to_bound:>9}  {}{}",
                transfer.transfer,
                transfer.old,
                transfer.new,
                transfer.gain,
                transfer.unit,
                if transfer.is_regression {
                    "  REGRESSION"
                } else {
                    ""
                }
            )?;
        }
        if self.unmatched > 0 {
            writeln!(f, "{} transfers are in one file only", self.unmatched)?;
        }
        if self.other_machine {
            writeln!(
                f,
                "the files come from different processors: compare the last column only"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example_report;

    fn rounds(mode: Mode, values: &[f64]) -> Vec<PerfReport> {
        let round = |&value: &f64| {
            let mut report = example_report(mode);
            report.gbps = value;
            report.lat_us.p50 = value;
            report
        };
        values.iter().map(round).collect()
    }

    #[test]
    fn worse_rounds_beyond_the_tolerance_are_a_regression() {
        let old = rounds(Mode::Bw, &[10.0, 11.0, 12.0]);
        let compare = |new: &[f64]| Comparison::new(&old, &rounds(Mode::Bw, new), 0.05);
        assert!(compare(&[8.0, 9.0, 9.5]).has_regression());
        // One of them is as good as the old ones.
        assert!(!compare(&[8.0, 9.0, 10.5]).has_regression());
        assert!(!compare(&[13.0]).has_regression());
    }

    #[test]
    fn longer_round_trips_are_worse() {
        let old = rounds(Mode::Lat, &[2.0, 2.1]);
        let worse = Comparison::new(&old, &rounds(Mode::Lat, &[3.0, 3.1]), 0.05);
        assert!(worse.has_regression());
        assert!((worse.transfers[0].gain - 2.05 / 3.05).abs() < 1e-9);
        let better = Comparison::new(&old, &rounds(Mode::Lat, &[1.0]), 0.05);
        assert!(!better.has_regression());
    }

    #[test]
    fn transfers_are_compared_with_those_under_the_same_settings() {
        let with_settings = |values: &[(f64, bool)]| {
            let mut all = rounds(
                Mode::Bw,
                &values.iter().map(|(gbps, _)| *gbps).collect::<Vec<_>>(),
            );
            for (report, (_, tso)) in all.iter_mut().zip(values) {
                report.settings = Some(serde_json::json!({ "tso": tso }));
            }
            all
        };
        let old = with_settings(&[(40.0, true), (10.0, false)]);
        let new = with_settings(&[(11.0, false), (44.0, true)]);
        let found = Comparison::new(&old, &new, 0.05);
        let gains: Vec<_> = found
            .transfers
            .iter()
            .map(|transfer| transfer.gain)
            .collect();
        assert_eq!((gains, found.unmatched), (vec![1.1, 1.1], 0));
        // Transfers with different settings are compared if there is no match with the same
        // settings, each transfer once.
        let only = with_settings(&[(20.0, false)]);
        let found = Comparison::new(&only, &new, 0.05);
        assert_eq!((found.transfers.len(), found.unmatched), (1, 1));
        assert_eq!(
            Comparison::new(&only, &new[1..], 0.05).transfers[0].gain,
            2.2
        );
    }

    #[test]
    fn a_slower_machine_is_no_regression() {
        let old = rounds(Mode::Bw, &[10.0]);
        let mut new = rounds(Mode::Bw, &[5.0]);
        let half = |gbps: Option<f64>| gbps.map(|gbps| gbps / 2.0);
        let bound = &mut new[0].bound;
        bound.path_gbps = half(bound.path_gbps);
        let comparison = Comparison::new(&old, &new, 0.05);
        assert!(!comparison.has_regression(), "{comparison}");
    }

    #[test]
    fn a_ratio_that_fell_on_a_faster_machine_is_a_regression() {
        let old = rounds(Mode::Bw, &[10.0, 11.0]);
        let mut new = rounds(Mode::Bw, &[10.0, 11.0]);
        for report in &mut new {
            report.bound.path_gbps = report.bound.path_gbps.map(|gbps| 2.0 * gbps);
        }
        let comparison = Comparison::new(&old, &new, 0.05);
        assert_eq!(comparison.transfers[0].gain_to_bound, Some(0.5));
        assert!(comparison.has_regression(), "{comparison}");
    }

    #[test]
    fn transfers_of_one_file_alone_are_counted() {
        let old = rounds(Mode::Bw, &[10.0]);
        let mut new = rounds(Mode::Bw, &[10.0]);
        new[0].size = 64;
        let comparison = Comparison::new(&old, &new, 0.05);
        assert_eq!((comparison.transfers.len(), comparison.unmatched), (0, 2));
    }
}
