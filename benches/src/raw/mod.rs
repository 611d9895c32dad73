//! `siw-perf raw`: frames on one or two ports, without TCP and without a daemon, like testpmd.
//!
//! ```text
//!  options ─► ports (opened as siwd opens them) ─► runner (threads, search) ─► report
//!                                                    └─ forward (a mode's loop on one thread)
//!                                                         ├─ frames (generated: by copy, by reference)
//!                                                         └─ echo (ARP and ICMP replies)
//! ```
//! Buffers are allocated from and freed to the thread's cache, as in siwd's workers.

mod echo;
mod forward;
mod frames;
mod options;
mod ports;
mod report;
mod runner;
mod search;

pub use options::{FrameSize, PayloadWay, RawMode, RawOptions};
pub use report::{DirectionReport, RawPortReport, RawReport};
pub use search::RateTrial;

use crate::machine::{ConditionsWatch, MachineRecord};
use crate::say;
use anyhow::bail;
use options::{OfferedRate, RawRun};
use ports::RawPorts;
use report::{format_header, format_interval};
use runner::RawRunner;
use search::RateSearch;
use std::time::Duration;

/// Time limit for a link to come up; afterwards frames are sent anyway.
const LINK_TIMEOUT: Duration = Duration::from_secs(5);

/// Executes the runs that the options describe: every size and placement of payload. `on_report`
/// is called with each result. SIGINT and SIGTERM end the current run, whose results so far are
/// reported.
pub fn run_raw(options: &RawOptions, mut on_report: impl FnMut(&RawReport)) -> anyhow::Result<()> {
    let config = options.to_config()?;
    siwd::host::log_to_stderr("warn", siwd::host::LogFormat::Text).map_err(anyhow::Error::msg)?;
    // Before DPDK's threads exist, so that none of them receives the signals.
    let signals = siwd::daemon::block_signals()?;
    let mut ports = RawPorts::open(config, options.threads())?;
    let runs = options.to_runs(&ports.describe_all())?;
    ports.wait_for_links(LINK_TIMEOUT);
    ports.read_link_speeds();
    let machine = MachineRecord::read();
    let mut runner = RawRunner::new(ports, signals)?;
    for run in runs {
        let watch = ConditionsWatch::begin(None);
        let show = !options.json;
        if show {
            say!("{}", format_header(&run, runner.ports()));
        }
        let mut report = match run.search {
            true => search_rate(&mut runner, &run, show)?,
            false => runner.run(&run, |names, interval| {
                if show {
                    say!("{}", format_interval(names, interval));
                }
            })?,
        };
        if !runner.has_hugepages() {
            report
                .notes
                .push("no hugepages are free: with them, rates are higher".into());
        }
        report.cores = runner.cores();
        report.conditions = watch.end();
        report.machine = machine.clone();
        on_report(&report);
        if runner.is_stopped() {
            break;
        }
    }
    Ok(())
}

/// Searches for the highest rate without loss; returns the report of its trial. The first trial runs
/// at the rate that the sender reaches.
fn search_rate(runner: &mut RawRunner, run: &RawRun, show: bool) -> anyhow::Result<RawReport> {
    let unlimited = runner.run(run, |_, _| {})?;
    let sent = unlimited.ports.first().map_or(0.0, |port| port.tx.mframes);
    let mut search = RateSearch::new((sent * 1e6).max(1.0));
    let (mut best, mut trials) = (None, Vec::new());
    while let Some(rate) = search.next_rate() {
        let trial = RawRun {
            offered: Some(OfferedRate::Frames(rate)),
            ..run.clone()
        };
        let report = runner.run(&trial, |_, _| {})?;
        if runner.is_stopped() {
            bail!("the search was ended by a signal");
        }
        let (frames, lost) = report.offered_and_lost();
        search.record(rate, lost);
        if show {
            say!(
                "          offered {:.4} M frames/s: {lost} of {frames} lost\n",
                rate / 1e6
            );
        }
        trials.push(RateTrial {
            offered_mframes: rate / 1e6,
            frames,
            lost,
        });
        if lost == 0 {
            best = Some(report);
        }
    }
    match best {
        Some(report) => Ok(RawReport { trials, ..report }),
        None => bail!(
            "--search: frames were lost at every rate; it needs a second port that receives them, \
             or a peer that returns them"
        ),
    }
}
