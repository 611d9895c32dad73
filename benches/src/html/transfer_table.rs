//! The table of all transfers.

use std::fmt::Write;

use super::{Axis, escape};

use crate::plan::Mode;
use crate::report::PerfReport;
use crate::summary::TransferRounds;

/// Heads of the columns, one value in each; cycles and cache lines are per message, summed over all
/// workers.
pub const TRANSFER_HEADS: [&str; 10] = [
    "transfer",
    "Gb/s",
    "M/s",
    "p50 us",
    "p99 us",
    "of the bound",
    "cycles",
    "cache lines",
    "rounds",
    "disturbed",
];

/// Adds the table as HTML.
pub fn add_transfer_table(page: &mut String, groups: &[TransferRounds<'_>]) {
    let heads = TRANSFER_HEADS.join("</th><th>");
    let _ = writeln!(page, "<table><tr><th>{heads}</th></tr>");
    for rounds in groups {
        page.push_str("<tr>");
        for cell in transfer_cells(rounds) {
            let _ = write!(page, "<td>{}</td>", escape(&cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

/// One cell for each of [`TRANSFER_HEADS`].
pub fn transfer_cells(rounds: &TransferRounds<'_>) -> [String; 10] {
    let first = rounds.counted[0];
    let median = |value: fn(&PerfReport) -> f64| {
        rounds
            .spread(|report| Some(value(report)))
            .map_or(0.0, |spread| spread.median)
    };
    let name = format!(
        "{}, {}",
        Axis::Depth.name_of_others(first),
        match first.mode {
            Mode::Bw => format!("depth {}", first.depth),
            Mode::Lat => "round trips".into(),
        }
    );
    let number = |value: Option<f64>, digits: usize| {
        value.map_or("-".into(), |value| format!("{value:.digits$}"))
    };
    [
        rounds.name_with_settings(name),
        format!("{:.2}", median(|report| report.gbps)),
        format!("{:.3}", median(|report| report.mmsgs)),
        format!("{:.2}", median(|report| report.lat_us.p50)),
        format!("{:.2}", median(|report| report.lat_us.p99)),
        number(rounds.ratio_to_bound(), 2),
        number(rounds.worker_cost(|worker| worker.cycles_per_message), 0),
        number(
            rounds.worker_cost(|worker| Some(worker.lines_per_message?.total())),
            2,
        ),
        rounds.counted.len().to_string(),
        rounds.disturbed.to_string(),
    ]
}
