//! The table of all transfers.

use std::fmt::Write;

use super::{Axis, escape};

use crate::plan::Mode;
use crate::report::PerfReport;
use crate::summary::TransferRounds;

/// Adds the table as HTML.
pub fn add_transfer_table(page: &mut String, groups: &[TransferRounds<'_>]) {
    page.push_str("<table><tr><th>transfer</th><th>result</th><th>p50, p99 us</th>");
    page.push_str("<th>of the bound</th><th>for each message</th><th>rounds</th></tr>\n");
    for rounds in groups {
        page.push_str("<tr>");
        for cell in transfer_cells(rounds) {
            let _ = write!(page, "<td>{}</td>", escape(&cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

/// Cells: transfer, bandwidth or message rate, latency, ratio to the bound, cost per message,
/// rounds.
pub fn transfer_cells(rounds: &TransferRounds<'_>) -> [String; 6] {
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
    [
        rounds.name_with_settings(name),
        format!(
            "{:.2} Gb/s, {:.3} M/s",
            median(|report| report.gbps),
            median(|report| report.mmsgs)
        ),
        format!(
            "{:.2}, {:.2}",
            median(|report| report.lat_us.p50),
            median(|report| report.lat_us.p99)
        ),
        rounds
            .ratio_to_bound()
            .map_or("-".into(), |ratio| format!("{ratio:.2}")),
        describe_message_cost(rounds),
        match rounds.disturbed {
            0 => format!("{}", rounds.counted.len()),
            disturbed => format!("{}, {disturbed} disturbed", rounds.counted.len()),
        },
    ]
}

/// Cost per message, summed over all workers.
fn describe_message_cost(rounds: &TransferRounds<'_>) -> String {
    let cycles = rounds.worker_cost(|worker| worker.cycles_per_message);
    let lines = rounds.worker_cost(|worker| Some(worker.lines_per_message?.total()));
    match (cycles, lines) {
        (Some(cycles), Some(lines)) => format!("{cycles:.0} cycles, {lines:.2} cache lines"),
        (Some(cycles), None) => format!("{cycles:.0} cycles"),
        _ => "-".into(),
    }
}
