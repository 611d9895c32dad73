//! `siw-perf report`: a self-contained HTML page, and tables in Markdown. Without a template crate: a
//! page is a few tables, whose rows the code computes, and plots in SVG.

mod plot;
mod transfer_table;

use crate::limits::MachineLimits;
use crate::machine::MachineRecord;
use crate::measurement::format_bytes;
use crate::peers::{PeerResult, PeersReport, format_value};
use crate::plan::Mode;
use crate::raw::{DirectionReport, RawMode, RawPortReport, RawReport};
use crate::report::PerfReport;
use crate::results::Results;
use crate::summary::{Spread, TransferRounds, all_settings, group_by_transfer};
use plot::{LineKind, LinePlot, LineSeries, SIWD, XUnit};
use serde_json::Value;
use std::fmt::Write;
use transfer_table::{TRANSFER_HEADS, add_transfer_table, transfer_cells};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;\
padding:0 1em;color:#1d2330}h1{font-size:1.6em}h2{margin-top:1.8em;font-size:1.2em}\
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.2em .8em;text-align:right;\
border-bottom:1px solid #dde1ea}td:first-child,th:first-child{text-align:left}td:not(:first-child){white-space:nowrap}\
.bar{background:#5b7fd4;height:1em;min-width:2px}\
.bars td{border:0;white-space:nowrap}.bars div.note{font-size:.8em;white-space:normal}\
.note{color:#667}svg{max-width:100%;height:auto}summary{cursor:pointer}\
.legend{font-size:.87em;margin:0 0 1em 4em}.legend span{margin-right:1.6em;display:inline-block}\
.legend i{display:inline-block;width:24px;margin-right:.5em;vertical-align:middle}";

/// Formats the HTML page.
pub fn format_page(results: &Results) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>siwd: measured</title><style>{STYLE}</style></head><body>\n<h1>siwd: measured</h1>\n"
    );
    for machine in machines(results) {
        let _ = writeln!(page, "<p>{}</p>", escape(&describe_machine(machine)));
    }
    add_settings_table(&mut page, results);
    let groups = group_by_transfer(&results.transfers);
    add_plots(&mut page, &groups);
    for peers in &results.peers {
        add_peers(&mut page, peers);
    }
    for report in &results.one_side {
        let text = escape(&report.to_string());
        let _ = writeln!(page, "<h2>One end alone</h2>\n<pre>{text}</pre>");
    }
    if !results.raw.is_empty() {
        add_raw_plot(&mut page, &results.raw);
        page.push_str("<h2>Raw frames</h2>\n");
        add_raw_table(&mut page, &results.raw);
    }
    for limits in &results.limits {
        add_limits(&mut page, limits);
    }
    if !groups.is_empty() {
        page.push_str("<h2>All transfers</h2>\n");
        add_transfer_table(&mut page, &groups);
    }
    page.push_str("</body></html>\n");
    page
}

/// Formats the transfers and the comparison with peers as Markdown.
pub fn format_markdown(results: &Results) -> String {
    let mut text = String::new();
    for machine in machines(results) {
        let _ = writeln!(text, "{}\n", describe_machine(machine));
    }
    for line in settings_lines(results) {
        let _ = writeln!(text, "{line}\n");
    }
    let groups = group_by_transfer(&results.transfers);
    if !groups.is_empty() {
        let _ = writeln!(text, "| {} |", TRANSFER_HEADS.join(" | "));
        let numbers = "---:|".repeat(TRANSFER_HEADS.len() - 1);
        let _ = writeln!(text, "|---|{numbers}");
        for rounds in &groups {
            let cells = transfer_cells(rounds);
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        text.push('\n');
    }
    for peers in &results.peers {
        text.push_str("| contender | median | min to max | differs |\n|---|---|---|---|\n");
        for result in &peers.results {
            let _ = writeln!(
                text,
                "| {}: {} | {} | {} to {} | {} |",
                result.figure.title(),
                result.name,
                format_value(result.median),
                format_value(result.min),
                format_value(result.max),
                result.differs
            );
        }
        text.push('\n');
    }
    for report in &results.one_side {
        let _ = writeln!(text, "```text\n{report}```\n");
    }
    if !results.raw.is_empty() {
        text.push_str(
            "| raw frames | received M/s, Gb/s | sent M/s, Gb/s | dropped | round trip p50, p99 us |\n\
             |---|---|---|---|---|\n",
        );
        for report in &results.raw {
            let _ = writeln!(text, "| {} |", raw_cells(report).join(" | "));
        }
        text.push('\n');
    }
    text
}

/// The distinct machines of all results.
fn machines(results: &Results) -> Vec<&MachineRecord> {
    let transfers = results.transfers.iter().map(|report| &report.machine);
    let peers = results.peers.iter().map(|report| &report.machine);
    let one_side = results.one_side.iter().map(|report| &report.machine);
    let raw = results.raw.iter().map(|report| &report.machine);
    let limits = results.limits.iter().map(|limits| &limits.machine);
    let mut all: Vec<&MachineRecord> = Vec::new();
    for machine in transfers
        .chain(peers)
        .chain(one_side)
        .chain(raw)
        .chain(limits)
    {
        if !all.contains(&machine) {
            all.push(machine);
        }
    }
    all
}

fn describe_machine(machine: &MachineRecord) -> String {
    format!(
        "{}, {} processors{}, Linux {}, {}, commit {}",
        machine.cpu,
        machine.processors,
        if machine.virtual_machine {
            " of a virtual machine"
        } else {
            ""
        },
        machine.kernel,
        machine.dpdk,
        if machine.commit.is_empty() {
            "unknown"
        } else {
            &machine.commit
        }
    )
}

/// A line for each daemon's settings, numbered if there are several, as the transfers refer to
/// them.
fn settings_lines(results: &Results) -> Vec<String> {
    let all = all_settings(&results.transfers);
    let is_single = all.len() == 1;
    let lines = all.into_iter().enumerate().map(|(place, settings)| {
        let line = describe_settings(settings);
        if is_single {
            line
        } else {
            format!("Settings {}, {line}", place + 1)
        }
    });
    lines.collect()
}

/// Lists the settings by name: those of workers, then those of each device.
fn describe_settings(settings: &Value) -> String {
    let named = |value: &Value| {
        let fields = value.as_object().into_iter().flatten();
        let words = fields.filter(|(name, _)| *name != "devices" && *name != "device");
        let words: Vec<_> = words
            .map(|(name, value)| match value.as_str() {
                Some(text) => format!("{name} {text}"),
                None => format!("{name} {value}"),
            })
            .collect();
        words.join(", ")
    };
    let mut text = format!("siwd: {}", named(settings));
    for device in settings["devices"].as_array().into_iter().flatten() {
        let name = device["device"].as_str().unwrap_or_default();
        let _ = write!(text, "; {name}: {}", named(device));
    }
    text
}

/// Adds the daemons' settings as a table that is folded at first: a row for each setting, a column
/// for each daemon.
fn add_settings_table(page: &mut String, results: &Results) {
    let all = all_settings(&results.transfers);
    if all.is_empty() {
        return;
    }
    let columns: Vec<Vec<(String, String)>> = all.iter().map(|one| list_settings(one)).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in columns.iter().flatten() {
        if !names.contains(&&name[..]) {
            names.push(name);
        }
    }
    page.push_str("<details><summary>Settings of siwd</summary>\n<table><tr><th>setting</th>");
    for number in 1..=columns.len() {
        let head = match columns.len() {
            1 => "value".into(),
            _ => format!("settings {number}"),
        };
        let _ = write!(page, "<th>{head}</th>");
    }
    page.push_str("</tr>\n");
    for name in names {
        let values: Vec<&str> = columns
            .iter()
            .map(|column| {
                let found = column.iter().find(|(other, _)| other == name);
                found.map_or("-", |(_, value)| &value[..])
            })
            .collect();
        let differs = values.iter().any(|value| *value != values[0]);
        let cell = if differs { "th" } else { "td" };
        let _ = write!(page, "<tr><td>{}</td>", escape(name));
        for value in values {
            let _ = write!(page, "<{cell}>{}</{cell}>", escape(value));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></details>\n");
}

/// Names and values of settings: those of workers, then those of each device.
fn list_settings(settings: &Value) -> Vec<(String, String)> {
    let list = |prefix: &str, value: &Value| {
        let fields = value.as_object().into_iter().flatten();
        let fields = fields.filter(|(name, _)| *name != "devices" && *name != "device");
        fields
            .map(|(name, value)| {
                let text = value.as_str().map_or(value.to_string(), str::to_owned);
                (format!("{prefix}{name}"), text)
            })
            .collect::<Vec<_>>()
    };
    let mut all = list("", settings);
    for device in settings["devices"].as_array().into_iter().flatten() {
        let name = device["device"].as_str().unwrap_or_default();
        all.extend(list(&format!("{name}: "), device));
    }
    all
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Quantity on a plot's x axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Size,
    Depth,
    QueuePairs,
    Loss,
}

impl Axis {
    fn title(self) -> &'static str {
        match self {
            Axis::Size => "size of a message",
            Axis::Depth => "messages in flight",
            Axis::QueuePairs => "queue pairs",
            Axis::Loss => "frame loss of the link",
        }
    }

    fn unit(self) -> XUnit {
        match self {
            Axis::Size => XUnit::Bytes,
            Axis::Depth | Axis::QueuePairs => XUnit::Count,
            Axis::Loss => XUnit::PartsPerMillion,
        }
    }

    fn value(self, report: &PerfReport) -> u32 {
        match self {
            Axis::Size => report.size,
            Axis::Depth => report.depth,
            Axis::QueuePairs => report.qps,
            Axis::Loss => report.link_loss_ppm,
        }
    }

    /// Description of the transfer without the quantity on this axis.
    fn name_of_others(self, report: &PerfReport) -> String {
        let mut parts = vec![report.op.json_name().to_uppercase()];
        if self != Axis::Size {
            parts.push(format_bytes(report.size));
        }
        if self != Axis::Depth && report.mode == Mode::Bw {
            parts.push(format!("depth {}", report.depth));
        }
        if self != Axis::QueuePairs && report.mode == Mode::Bw {
            parts.push(format!("{} QP", report.qps));
        }
        parts.push(format!("MTU {}", report.mtu));
        parts.extend(report.variants());
        if self != Axis::Loss {
            parts.extend(report.loss_in_words());
        }
        parts.join(", ")
    }
}

/// Adds plots over size, depth and number of queue pairs, for those that vary.
fn add_plots(page: &mut String, groups: &[TransferRounds<'_>]) {
    let of_mode = |mode| {
        groups
            .iter()
            .filter(move |rounds| rounds.counted[0].mode == mode)
    };
    for axis in [Axis::Size, Axis::Depth, Axis::QueuePairs, Axis::Loss] {
        let gbps = |rounds: &TransferRounds<'_>| rounds.spread(|report| Some(report.gbps));
        let mut series = series_over(of_mode(Mode::Bw), axis, gbps);
        if axis == Axis::Size {
            let bound =
                |rounds: &TransferRounds<'_>| rounds.spread(|report| report.bound.path_gbps);
            // One line for each is enough: the bound depends mainly on the size and on the CRC.
            for (crc, name) in [
                (true, "bound of the machine with CRC"),
                (false, "bound of the machine without CRC"),
            ] {
                let groups = of_mode(Mode::Bw).filter(|rounds| rounds.counted[0].crc == crc);
                let bounds = series_over(groups, axis, bound).into_iter();
                let longest = bounds.max_by_key(|line| line.points.len());
                series.extend(longest.map(|line| line.renamed(name.into(), LineKind::Bound)));
            }
        }
        let title = format!("Bandwidth by {}", axis.title());
        add_plot(page, &title, (axis.title(), axis.unit()), "Gb/s", series);
    }
    let median = |rounds: &TransferRounds<'_>| rounds.spread(|report| Some(report.lat_us.p50));
    let high = |rounds: &TransferRounds<'_>| rounds.spread(|report| Some(report.lat_us.p99));
    let mut series = series_over(of_mode(Mode::Lat), Axis::Size, median);
    for line in series_over(of_mode(Mode::Lat), Axis::Size, high) {
        let name = format!("{}: 99 of 100", line.name);
        series.push(line.renamed(name, LineKind::SiwdHigh));
    }
    let axis = (Axis::Size.title(), Axis::Size.unit());
    add_plot(page, "Round trips by size of a message", axis, "us", series);
}

/// Adds the lines that have several points; `x`: title and unit of the x axis.
fn add_plot(
    page: &mut String,
    title: &str,
    (x_title, x_unit): (&str, XUnit),
    unit: &str,
    series: Vec<LineSeries>,
) {
    let series: Vec<LineSeries> = series
        .into_iter()
        .filter(|line| line.points.len() > 1)
        .collect();
    if series.is_empty() {
        return;
    }
    let plot = LinePlot {
        x_title,
        x_unit,
        y_title: unit,
        series: &series,
    };
    let _ = writeln!(page, "<h2>{}</h2>", escape(title));
    match plot.to_svg() {
        Ok(svg) => {
            page.push_str(&svg);
            page.push_str(&plot.to_legend(escape));
        }
        Err(error) => {
            let _ = writeln!(
                page,
                "<p class=\"note\">no plot: {}</p>",
                escape(&error.to_string())
            );
        }
    }
}

/// One line for each set of transfers that differ only in the axis.
fn series_over<'a, 'r: 'a>(
    groups: impl Iterator<Item = &'a TransferRounds<'r>>,
    axis: Axis,
    value: impl Fn(&TransferRounds<'_>) -> Option<Spread>,
) -> Vec<LineSeries> {
    let mut lines: Vec<LineSeries> = Vec::new();
    for rounds in groups {
        let Some(spread) = value(rounds) else {
            continue;
        };
        let name = rounds.name_with_settings(axis.name_of_others(rounds.counted[0]));
        let point = (axis.value(rounds.counted[0]), spread);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(LineSeries {
                name,
                kind: LineKind::Siwd,
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by_key(|point| point.0);
    }
    lines
}

fn add_peers(page: &mut String, peers: &PeersReport) {
    let mut figures: Vec<_> = peers.results.iter().map(|result| result.figure).collect();
    figures.dedup();
    for figure in figures {
        let of_figure = || {
            peers
                .results
                .iter()
                .filter(|result| result.figure == figure)
        };
        let longest = of_figure().map(|result| result.median).fold(0.0, f64::max);
        let _ = writeln!(page, "<h2>{}</h2>\n<table class=\"bars\">", figure.title());
        for result in of_figure() {
            page.push_str(&bar(result, longest));
        }
        page.push_str("</table>\n");
    }
    for (name, reason) in &peers.skipped {
        let text = format!("not measured: {name}: {reason}");
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escape(&text));
    }
}

fn bar(result: &PeerResult, longest: f64) -> String {
    let color = match result.name.starts_with("siw") {
        true => format!(";background:rgb({},{},{})", SIWD.0, SIWD.1, SIWD.2),
        false => String::new(),
    };
    format!(
        "<tr><td>{}<div class=\"note\">{}</div></td>\
         <td style=\"width:40%\"><div class=\"bar\" style=\"width:{:.1}%{color}\"></div></td>\
         <td>{}</td><td class=\"note\">{} to {}</td></tr>\n",
        escape(&result.name),
        escape(&result.differs),
        100.0 * result.median / longest.max(f64::MIN_POSITIVE),
        format_value(result.median),
        format_value(result.min),
        format_value(result.max)
    )
}

/// Adds the frame rates over the frame size, with a line for each mode and placement of payload.
fn add_raw_plot(page: &mut String, reports: &[RawReport]) {
    let mut lines: Vec<LineSeries> = Vec::new();
    for report in reports {
        let is_sized = report.payload.is_some() && !report.imix && report.raw != RawMode::PingPong;
        let rates = report.ports.iter().map(|port| match report.raw {
            RawMode::TxOnly => port.tx.mframes,
            _ => port.rx.mframes,
        });
        let Some(spread) = Spread::of([rates.sum()]).filter(|_| is_sized) else {
            continue;
        };
        let size = format!(" {} B", report.size);
        let name = report.title().replacen(&size, "", 1);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push((report.size, spread)),
            None => lines.push(LineSeries {
                name,
                kind: LineKind::Machine,
                points: vec![(report.size, spread)],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by_key(|point| point.0);
    }
    let axis = ("size of a frame", XUnit::Bytes);
    add_plot(page, "Raw frames by size", axis, "million frames/s", lines);
}

fn add_raw_table(page: &mut String, reports: &[RawReport]) {
    page.push_str("<table><tr><th>run</th><th>received M/s, Gb/s</th><th>sent M/s, Gb/s</th>");
    page.push_str("<th>dropped</th><th>round trip p50, p99 us</th></tr>\n");
    for report in reports {
        page.push_str("<tr>");
        for cell in raw_cells(report) {
            let _ = write!(page, "<td>{}</td>", escape(&cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

/// Run, rates of all ports together, dropped frames, round trips.
fn raw_cells(report: &RawReport) -> [String; 5] {
    let together = |direction: fn(&RawPortReport) -> DirectionReport| {
        let sum = |value: fn(DirectionReport) -> f64| -> f64 {
            let ports = report.ports.iter();
            ports.map(|port| value(direction(port))).sum()
        };
        format!(
            "{:.3}, {:.2}",
            sum(|rates| rates.mframes),
            sum(|rates| rates.gbps)
        )
    };
    let dropped: u64 = report
        .ports
        .iter()
        .map(|port| port.rx.dropped + port.tx.dropped)
        .sum();
    [
        report.title(),
        together(|port| port.rx),
        together(|port| port.tx),
        dropped.to_string(),
        report.round_trip_us.map_or("-".into(), |times| {
            format!("{:.2}, {:.2}", times.p50, times.p99)
        }),
    ]
}

fn add_limits(page: &mut String, limits: &MachineLimits) {
    let lines = limits.memory.iter().map(|work| {
        let spreads = work.gbps.iter().zip(&work.worst_gbps);
        let spreads = spreads.map(|(best, worst)| Spread {
            median: *best,
            min: *worst,
            max: *best,
        });
        LineSeries {
            name: work.work.clone(),
            kind: LineKind::Machine,
            points: limits.working_sets.iter().copied().zip(spreads).collect(),
        }
    });
    let title = format!(
        "Limits of the machine: pieces of {} bytes, best of the rounds down to the worst",
        limits.piece
    );
    let axis = ("working set", XUnit::Bytes);
    add_plot(page, &title, axis, "Gb/s", lines.collect());
    page.push_str(
        "<details><summary>The same as a table, Gb/s</summary>\n<table><tr><th>working set</th>",
    );
    for &set in &limits.working_sets {
        let _ = write!(page, "<th>{}</th>", format_bytes(set));
    }
    page.push_str("</tr>\n");
    for work in &limits.memory {
        let _ = write!(page, "<tr><td>{}</td>", escape(&work.work));
        for rate in &work.gbps {
            let _ = write!(page, "<td>{rate:.1}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></details>\n");
    if let (Some([first, second]), Some(ns)) = (limits.cores, limits.cache_line_ns) {
        let _ = writeln!(
            page,
            "<p>A cache line from core {first} to core {second} and back: {ns:.0} ns.</p>"
        );
    }
    if let (Some([first, second]), Some(us)) = (limits.cores, limits.wake_up_us) {
        let _ = writeln!(
            page,
            "<p>Waking a thread on core {second} from core {first}: {us:.0} us.</p>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::{LinesPerMessage, WorkerUse};
    use crate::limits::MemoryLimit;
    use crate::machine::Conditions;
    use crate::report::example_report;

    fn results() -> Results {
        let mut transfers = Vec::new();
        for mode in [Mode::Bw, Mode::Lat] {
            for size in [64, 4096, 65536] {
                let mut report = example_report(mode);
                report.size = size;
                report.gbps = f64::from(size) / 1000.0;
                transfers.push(report);
            }
        }
        Results {
            transfers,
            ..Results::default()
        }
    }

    #[test]
    fn the_page_has_plots_and_refers_to_nothing() {
        let page = format_page(&results());
        assert_eq!(page.matches("<svg").count(), 2, "{page}");
        assert!(page.contains("Bandwidth by size") && page.contains("Round trips by size"));
        assert!(page.contains("bound of the machine with CRC"), "{page}");
        assert!(!page.contains("bound of the machine without CRC"), "{page}");
        for reference in ["href", "src=", "url(", "@import"] {
            assert!(!page.contains(reference), "{reference}");
        }
    }

    #[test]
    fn names_cannot_break_the_page() {
        let mut results = results();
        results.transfers[0].machine.cpu = "<script>&".into();
        let page = format_page(&results);
        assert!(page.contains("&lt;script&gt;&amp;") && !page.contains("<script>"));
    }

    #[test]
    fn transfers_over_links_that_lose_frames_are_a_line_over_the_loss() {
        let mut results = results();
        let mut lossy = results.transfers[0].clone();
        lossy.link_loss_ppm = 1000;
        results.transfers.push(lossy);
        let page = format_page(&results);
        assert!(
            page.contains("Bandwidth by frame loss of the link") && page.contains("0.10 %"),
            "{page}"
        );
        assert!(page.contains("0.1 % loss"), "{page}");
    }

    #[test]
    fn the_settings_of_each_daemon_are_told_once() {
        let mut results = results();
        for (transfer, tso) in results.transfers.iter_mut().zip([true, true, false]) {
            transfer.settings = Some(serde_json::json!({
                "idle": "poll",
                "devices": [{ "device": "siw0", "mtu": 1500, "tso": tso }],
            }));
        }
        let page = format_page(&results);
        assert_eq!(
            page.matches("<details><summary>Settings of siwd").count(),
            1
        );
        for row in [
            "<tr><td>idle</td><td>poll</td><td>poll</td></tr>",
            "<tr><td>siw0: mtu</td><td>1500</td><td>1500</td></tr>",
            // Settings that differ stand out.
            "<tr><td>siw0: tso</td><th>true</th><th>false</th></tr>",
        ] {
            assert_eq!(page.matches(row).count(), 1, "{row} in {page}");
        }
        let text = format_markdown(&results);
        for (number, tso) in [(1, true), (2, false)] {
            let line = format!("Settings {number}, siwd: idle poll; siw0: mtu 1500, tso {tso}");
            assert_eq!(text.matches(&line).count(), 1, "{text}");
            assert!(page.contains(&format!(", settings {number}<")), "{page}");
        }
    }

    #[test]
    fn the_limits_of_the_machine_are_a_plot() {
        let limits = MachineLimits {
            machine: MachineRecord::default(),
            conditions: Conditions::default(),
            piece: 1428,
            working_sets: vec![16 << 10, 128 << 20],
            memory: vec![MemoryLimit {
                work: "copy".into(),
                gbps: vec![200.0, 16.0],
                worst_gbps: vec![190.0, 5.0],
            }],
            cores: None,
            cache_line_ns: None,
            wake_up_us: None,
            slowest_copy_by_fastest: None,
        };
        let page = format_page(&Results {
            limits: vec![limits],
            ..Results::default()
        });
        assert_eq!(page.matches("<svg").count(), 1, "{page}");
        assert!(page.contains("</i>copy</span>"), "{page}");
        assert!(page.contains("<td>200.0</td>"), "{page}");
    }

    #[test]
    fn raw_frames_have_a_line_for_each_mode() {
        let report = |mode: &str, size: u32| -> RawReport {
            let line = format!(
                r#"{{"raw":"{mode}","size":{size},"burst":32,"payload":"copy","secs":1.0,
                "ports":[{{"name":"raw0","driver":"net_ring",
                "rx":{{"frames":1,"bytes":1,"dropped":0,"mframes":2.0,"gbps":1.0}},
                "tx":{{"frames":1,"bytes":1,"dropped":0,"mframes":3.0,"gbps":1.0}}}}],"series":[],
                "conditions":{{"steal_percent":0,"interrupts":0,"cache_line_ns_before":null,
                "cache_line_ns_after":null,"disturbed":null}},"machine":{{"cpu":"","processors":1,
                "virtual_machine":true,"kernel":"","dpdk":"","commit":""}}}}"#
            );
            serde_json::from_str(&line).unwrap()
        };
        let raw = vec![
            report("txonly", 64),
            report("txonly", 1514),
            report("macswap", 64),
            report("macswap", 1514),
        ];
        let page = format_page(&Results {
            raw,
            ..Results::default()
        });
        assert!(page.contains("Raw frames by size"), "{page}");
        for mode in ["txonly", "macswap"] {
            let entry = format!("</i>{mode} by copy, raw0 (net_ring)</span>");
            assert_eq!(page.matches(&entry).count(), 1, "{page}");
        }
    }

    #[test]
    fn markdown_has_a_line_for_each_transfer() {
        let mut results = results();
        let worker = |cycles| WorkerUse {
            cycles_per_message: Some(cycles),
            lines_per_message: Some(LinesPerMessage {
                requests: 1.0,
                indices: 0.25,
                doorbells: 0.0,
                completions: 1.0,
            }),
            ..WorkerUse::default()
        };
        results.transfers[0].workers = vec![worker(700.0), worker(300.0)];
        let text = format_markdown(&results);
        assert!(
            text.contains("| 1000 | 4.50 |") && text.contains("| - |"),
            "{text}"
        );
        let lines = text
            .lines()
            .filter(|line| line.starts_with("| WRITE"))
            .count();
        assert_eq!(lines, 6, "{text}");
    }
}
