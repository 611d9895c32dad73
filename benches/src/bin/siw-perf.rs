//! `siw-perf`: measures siwd and compares it with the bounds of the machine.
#![forbid(unsafe_code)]

use anyhow::anyhow;
use siw_bench::args::{
    CompareOptions, ConnOptions, LimitsOptions, OneSideOptions, PageOptions, PeersOptions,
    PerfCommand, PingPongOptions, ScaleOptions, TransferMode, TransferOptions, parse_command_line,
};
use siw_bench::churn::queue_pairs_per_second;
use siw_bench::compare::Comparison;
use siw_bench::end::{find_device, open_context};
use siw_bench::html::{format_markdown, format_page};
use siw_bench::limits::measure_limits;
use siw_bench::one_side::measure_one_side;
use siw_bench::peers::{compare_with_peers, tcp_ping_pong};
use siw_bench::plan::MeasurementPlan;
use siw_bench::raw::{RawOptions, run_raw};
use siw_bench::results::Results;
use siw_bench::say;
use siw_bench::scale::measure_scale;
use siw_bench::summary::{CSV_HEADER, csv_line, format_table, transfers_above_bound};
use siw_bench::transfer::run_transfers;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match parse_command_line().command {
        PerfCommand::Bw(options) => run_and_print(&options, TransferMode::Bw, None),
        PerfCommand::Lat(options) => run_and_print(&options, TransferMode::Lat, None),
        PerfCommand::Rate(options) => run_and_print(&options, TransferMode::Rate, None),
        PerfCommand::Mixed(options) => options
            .to_bulk_plan()
            .and_then(|bulk| run_and_print(&options.transfer, TransferMode::Lat, Some(bulk))),
        PerfCommand::Scale(options) => print_scale(&options),
        PerfCommand::Conn(options) => print_connection_rate(&options),
        PerfCommand::Raw(options) => run_raw_frames(&options),
        PerfCommand::Limits(options) => print_limits(&options),
        PerfCommand::Peers(options) => print_peers(&options),
        PerfCommand::OneSide(options) => print_one_side(&options),
        PerfCommand::Report(options) => write_report(&options),
        PerfCommand::Compare(options) => match print_comparison(&options) {
            Ok(true) => return ExitCode::FAILURE,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        },
        PerfCommand::TcpPingPong(options) => run_ping_pong(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("siw-perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_and_print(
    options: &TransferOptions,
    mode: TransferMode,
    bulk: Option<MeasurementPlan>,
) -> anyhow::Result<()> {
    if options.csv {
        say!("{CSV_HEADER}\n");
    }
    let mut reports = Vec::new();
    run_transfers(options, mode, bulk, |report| {
        if options.json {
            say!("{}\n", report.to_json());
        } else if options.csv {
            say!("{}\n", csv_line(report));
        } else {
            say!("{report}");
        }
        reports.push(report.clone());
    })?;
    if reports.len() > 1 && !options.json && !options.csv {
        say!("\n{}", format_table(&reports));
    }
    match transfers_above_bound(&reports) {
        0 => Ok(()),
        count => Err(anyhow!(
            "{count} of the transfers exceeded their bound in each round: one of the two was \
             measured wrongly; measure again on a quiet machine"
        )),
    }
}

fn print_scale(options: &ScaleOptions) -> anyhow::Result<()> {
    let report = measure_scale(options, |report| match options.json {
        true => say!("{}\n", report.to_json()),
        false => eprintln!(
            "siw-perf: {} queue pairs, {} idle: {:.3} Gb/s",
            report.qps, report.idle_qps, report.gbps
        ),
    })?;
    if !options.json {
        say!("{report}");
    }
    Ok(())
}

fn print_connection_rate(options: &ConnOptions) -> anyhow::Result<()> {
    let open = || open_context(options.socket.as_deref());
    let (initiator, target) = (open()?, open()?);
    let from = find_device(&initiator, &options.from)?;
    let to = find_device(&target, &options.to)?;
    let ip = to
        .ips
        .first()
        .ok_or_else(|| anyhow!("{} has no address", options.to))?;
    let rate = queue_pairs_per_second(
        &initiator,
        from.index,
        &target,
        (*ip, 0).into(),
        options.in_flight,
        options.secs,
    )?;
    match options.json {
        true => say!(
            "{}\n",
            serde_json::json!({ "queue_pairs_per_second": rate.round() })
        ),
        false => say!(
            "{rate:.0} queue pairs per second created, connected, closed and destroyed: {:.0} \
             connections\n",
            rate / 2.0
        ),
    }
    Ok(())
}

fn run_raw_frames(options: &RawOptions) -> anyhow::Result<()> {
    run_raw(options, |report| match options.json {
        true => say!("{}\n", report.to_json()),
        false => say!("{report}"),
    })?;
    // Skip exit handlers, since driver threads may still run.
    dpdk::exit_process(0)
}

/// Prints a result as a line of JSON, or for people.
fn print_result(json: bool, result: &(impl serde::Serialize + std::fmt::Display)) {
    match json {
        true => say!("{}\n", serde_json::to_string(result).unwrap_or_default()),
        false => say!("{result}"),
    }
}

fn print_limits(options: &LimitsOptions) -> anyhow::Result<()> {
    let cores = match options.cores.as_deref() {
        Some(&[first, second]) => Some([first, second]),
        _ => match dpdk::allowed_cores()[..] {
            [first, second, ..] => Some([first, second]),
            _ => None,
        },
    };
    let limits = measure_limits(options.piece as usize, cores, options.secs)?;
    print_result(options.json, &limits);
    Ok(())
}

fn print_peers(options: &PeersOptions) -> anyhow::Result<()> {
    let report = compare_with_peers(options, |step| eprintln!("siw-perf: {step}"))?;
    print_result(options.json, &report);
    Ok(())
}

fn print_one_side(options: &OneSideOptions) -> anyhow::Result<()> {
    let report = measure_one_side(options, |step| eprintln!("siw-perf: {step}"))?;
    print_result(options.json, &report);
    Ok(())
}

fn run_ping_pong(options: &PingPongOptions) -> anyhow::Result<()> {
    let size = options.size as usize;
    if let Some(address) = options.listen {
        return tcp_ping_pong::answer_round_trips(address, size);
    }
    let address = options
        .connect
        .ok_or_else(|| anyhow!("--listen or --connect is needed"))?;
    let latency = tcp_ping_pong::measure_round_trips(address, size, options.secs)?;
    say!("{:.3}\n", latency.value_at_quantile(0.5) as f64 / 1e3);
    Ok(())
}

fn write_report(options: &PageOptions) -> anyhow::Result<()> {
    let mut results = Results::default();
    for file in &options.files {
        results.append(Results::read(file)?);
    }
    write_file(&options.html, &format_page(&results))?;
    eprintln!("siw-perf: wrote {}", options.html.display());
    match &options.markdown {
        Some(path) if path == Path::new("-") => say!("{}", format_markdown(&results)),
        Some(path) => write_file(path, &format_markdown(&results))?,
        None => {}
    }
    Ok(())
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// Prints the comparison; returns true if any result became worse.
fn print_comparison(options: &CompareOptions) -> anyhow::Result<bool> {
    let (old, new) = (Results::read(&options.old)?, Results::read(&options.new)?);
    let tolerance = options.tolerance / 100.0;
    let comparison = Comparison::new(&old.transfers, &new.transfers, tolerance);
    match options.json {
        true => say!(
            "{}\n",
            serde_json::to_string(&comparison).unwrap_or_default()
        ),
        false => say!("{comparison}"),
    }
    Ok(comparison.has_regression())
}
