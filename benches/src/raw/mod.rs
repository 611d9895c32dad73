//! `siw-perf raw`: frames on one or two ports, without TCP and without a daemon, like testpmd.
//!
//! ```text
//!  options ─► ports (opened as siwd opens them) ─► forward (a mode's loop, one thread) ─► report
//!                                                    ├─ frames (generated: by copy, by reference)
//!                                                    └─ echo (ARP and ICMP replies)
//! ```
//! Buffers are allocated from and freed to the thread's cache, as in siwd's workers.

mod echo;
mod forward;
mod frames;
mod options;
mod ports;
mod report;

pub use options::{PayloadWay, RawMode, RawOptions};
pub use report::{DirectionReport, RawPortReport, RawReport};

use crate::machine::{ConditionsWatch, MachineRecord};
use crate::say;
use forward::RawRunner;
use ports::RawPorts;
use report::{format_header, format_interval};
use std::time::Duration;

/// Time limit for a link to come up; afterwards frames are sent anyway.
const LINK_TIMEOUT: Duration = Duration::from_secs(5);

/// Executes the runs that the options describe: every size, by copy and by reference. `on_report`
/// is called with each result. SIGINT and SIGTERM end the current run, whose results so far are
/// reported.
pub fn run_raw(options: &RawOptions, mut on_report: impl FnMut(&RawReport)) -> anyhow::Result<()> {
    let config = options.to_config()?;
    siwd::host::log_to_stderr("warn", siwd::host::LogFormat::Text).map_err(anyhow::Error::msg)?;
    // Before DPDK's threads exist, so that none of them receives the signals.
    let signals = siwd::daemon::block_signals()?;
    let ports = RawPorts::open(config)?;
    let runs = options.to_runs(&ports.describe_all())?;
    ports.wait_for_links(LINK_TIMEOUT);
    let machine = MachineRecord::read();
    let mut runner = RawRunner::new(ports, signals)?;
    for run in runs {
        let watch = ConditionsWatch::begin(None);
        let show = !options.json;
        if show {
            say!("{}", format_header(&run, runner.ports()));
        }
        let mut report = runner.run(&run, |names, interval| {
            if show {
                say!("{}", format_interval(names, interval));
            }
        })?;
        report.conditions = watch.end();
        report.machine = machine.clone();
        on_report(&report);
        if runner.is_stopped() {
            break;
        }
    }
    Ok(())
}
