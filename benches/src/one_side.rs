//! `siw-perf one-side`: cost of the initiator's and of the target's end, each alone.
//!
//! Each end has a siwd of its own with one worker on its own core, so that a rate per core is that of
//! one end, as other implementations count it. vhost-user joins the two, the link between processes
//! with the fewest copies that any user can create: its net_vhost side copies each frame in both
//! directions, its net_virtio_user side none, like a NIC that reads and writes memory by itself.
//! Therefore each round measures twice, and the end on the virtio_user side counts.

use crate::args::{Choice, OneSideOptions, TransferMode, TransferOptions};
use crate::daemon::{WorkerUse, takes_super_segments};
use crate::end::Role;
use crate::machine::MachineRecord;
use crate::measurement::format_bytes;
use crate::own_daemon::OwnDaemon;
use crate::plan::{Mode, Operation};
use crate::report::PerfReport;
use crate::summary::Spread;
use crate::transfer::run_transfers;
use anyhow::{anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use toml::Value;

/// Time without work after which a worker sleeps, in microseconds. Shorter than siwd's default, since
/// empty polls count as CPU time.
const SPIN_US: u32 = 5;

/// A measured transfer.
struct Transfer {
    name: &'static str,
    mode: TransferMode,
    op: Operation,
    size: u32,
    depth: u32,
    /// Interval in messages between completions.
    cq_mod: u32,
    crc: bool,
}

/// The transfers in the order of the report.
fn transfers() -> Vec<Transfer> {
    let rate = |name, crc| Transfer {
        name,
        mode: TransferMode::Rate,
        op: Operation::Write,
        size: 64,
        depth: 128,
        cq_mod: 32,
        crc,
    };
    let bulk = |name, crc| Transfer {
        name,
        mode: TransferMode::Bw,
        op: Operation::Write,
        size: 64 << 10,
        depth: 16,
        cq_mod: 1,
        crc,
    };
    // With immediate data, which wakes an application that waits for events; a WRITE does not.
    let round_trip = |name, crc| Transfer {
        name,
        mode: TransferMode::Lat,
        op: Operation::WriteImm,
        size: 64,
        depth: 1,
        cq_mod: 1,
        crc,
    };
    vec![
        rate("write_64b_crc", true),
        rate("write_64b", false),
        bulk("write_64k_crc", true),
        bulk("write_64k", false),
        round_trip("round_trip_64b_crc", true),
        round_trip("round_trip_64b", false),
    ]
}

impl Transfer {
    fn options(&self, options: &OneSideOptions, application: Application) -> TransferOptions {
        TransferOptions {
            op: self.op,
            size: vec![self.size],
            // lat has one message in flight anyway.
            depth: if self.mode == TransferMode::Lat {
                vec![]
            } else {
                vec![self.depth]
            },
            cq_mod: self.cq_mod,
            crc: vec![if self.crc { Choice::On } else { Choice::Off }],
            verify: options.verify,
            events: application.waits_for_events,
            core: Some(application.core),
            ..TransferOptions::without_bounds(options.secs)
        }
    }
}

/// The application: one thread that drives both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// Its core.
    pub core: usize,
    /// True if it sleeps until a completion; otherwise it polls.
    pub waits_for_events: bool,
}

/// CPU time that one end's worker needs, medians over the rounds, and the run that it was measured in.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EndCost {
    /// The worker's core.
    pub core: usize,
    /// Messages per second of the worker's CPU time, in millions.
    pub mmsgs_per_core: f64,
    /// Payload per second of the worker's CPU time in Gb/s.
    pub gbps_per_core: f64,
    /// CPU nanoseconds per message, of a round trip for both of its messages.
    pub ns_per_message: f64,
    /// Minimum over the rounds.
    pub ns_min: f64,
    /// Maximum over the rounds.
    pub ns_max: f64,
    /// CPU time per message in cycles of the time-stamp counter.
    pub cycles_per_message: f64,
    /// CPU time of the worker in percent of the measured time.
    pub busy_percent: f64,
    /// CPU time of the application in percent of a core.
    pub application_percent: f64,
    /// Payload in Gb/s of the run, of the slower end.
    pub run_gbps: f64,
    /// Million messages or round trips per second of the run.
    pub run_mmsgs: f64,
    /// Median latency of the run in microseconds: the round trip, or from posting to completion.
    pub run_p50_us: f64,
    /// Segments that were retransmitted in all rounds.
    pub retrans_segs: u64,
    /// Messages whose data was verified, in all rounds.
    pub verified: u64,
    /// True if the initiator handed super-segments (TSO) to the link.
    pub super_segments: bool,
}

/// Both ends of one transfer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OneSideResult {
    /// Bandwidth or round trips.
    pub mode: Mode,
    /// Operation that moved the data.
    pub op: Operation,
    /// Bytes of a message.
    pub size: u32,
    /// Messages in flight.
    pub depth: u32,
    /// Interval in messages between completions.
    pub cq_mod: u32,
    /// True if FPDUs had CRCs.
    pub crc: bool,
    /// The end that posts the messages.
    pub initiator: EndCost,
    /// The end whose memory they are written to.
    pub target: EndCost,
}

/// All results.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OneSideReport {
    /// What lies between the two daemons.
    pub one_side: String,
    /// MTU of the link.
    pub mtu: u32,
    /// Rounds of each transfer.
    pub rounds: u32,
    /// Microseconds without work after which a worker slept. Empty polls until then count as CPU time.
    pub spin_us: u32,
    /// The application.
    pub application: Application,
    /// Results by name of the transfer.
    pub results: BTreeMap<String, OneSideResult>,
    /// The machine.
    pub machine: MachineRecord,
}

/// Measures all transfers; `on_progress` is called with the current step.
pub fn measure_one_side(
    options: &OneSideOptions,
    mut on_progress: impl FnMut(&str),
) -> anyhow::Result<OneSideReport> {
    let allowed = dpdk::allowed_cores();
    let cores = match (options.cores.as_deref(), &allowed[..]) {
        (Some(&[first, second]), _) if first == second => {
            bail!("--cores: each end needs a core of its own")
        }
        (Some(&[first, second]), _) | (_, &[first, second, ..]) => [first, second],
        _ => bail!("two cores are needed: one for each end"),
    };
    let free = allowed.iter().find(|core| !cores.contains(core));
    let application = Application {
        core: free.copied().unwrap_or(cores[0]),
        waits_for_events: free.is_none(),
    };
    let transfers = transfers();
    let mut measured: Vec<[Vec<PerfReport>; 2]> = Vec::new();
    measured.resize_with(transfers.len(), Default::default);
    for round in 1..=options.rounds {
        for copies_nothing in [Role::Initiator, Role::Target] {
            let link = JoinedDaemons::start(options.mtu, cores, copies_nothing)?;
            for (transfer, reports) in transfers.iter().zip(&mut measured) {
                on_progress(&format!(
                    "round {round} of {}: {}, virtio_user at the {}",
                    options.rounds, transfer.name, copies_nothing
                ));
                let transfer_options = transfer.options(options, application);
                let report = link.measure(transfer.mode, transfer_options)?;
                reports[(copies_nothing == Role::Target) as usize].push(report);
            }
        }
    }
    let results = transfers.iter().zip(&measured).map(|(transfer, reports)| {
        let result = OneSideResult::new(transfer, reports)?;
        Ok((transfer.name.to_owned(), result))
    });
    Ok(OneSideReport {
        one_side: "vhost-user".into(),
        mtu: options.mtu,
        rounds: options.rounds,
        spin_us: SPIN_US,
        application,
        results: results.collect::<anyhow::Result<_>>()?,
        machine: MachineRecord::read(),
    })
}

/// Two daemons joined by vhost-user.
struct JoinedDaemons {
    // Dropped first: the back end may not leave before its front end.
    front: OwnDaemon,
    back: OwnDaemon,
    /// The end in `front`.
    at_front: Role,
}

impl JoinedDaemons {
    /// Starts both. `cores`: the initiator's worker's and the target's; `at_front`: the end on the
    /// side that copies nothing.
    fn start(mtu: u32, cores: [usize; 2], at_front: Role) -> anyhow::Result<JoinedDaemons> {
        let back = OwnDaemon::start(|folder| {
            let path = folder.join("vhost.sock");
            let devargs = format!("net_vhost0,iface={},queues=1,tso=1", path.display());
            Ok(configuration(at_front.other(), cores, mtu, &devargs))
        })?;
        let path = back.folder().join("vhost.sock");
        let devargs = format!(
            "net_virtio_user0,path={},queues=1,queue_size=1024,mrg_rxbuf=1",
            path.display()
        );
        let front = OwnDaemon::start(|_| Ok(configuration(at_front, cores, mtu, &devargs)))?;
        Ok(JoinedDaemons {
            front,
            back,
            at_front,
        })
    }

    fn daemon_of(&self, role: Role) -> &OwnDaemon {
        match role == self.at_front {
            true => &self.front,
            false => &self.back,
        }
    }

    /// Measures one transfer.
    fn measure(
        &self,
        mode: TransferMode,
        mut options: TransferOptions,
    ) -> anyhow::Result<PerfReport> {
        options.socket = Some(self.daemon_of(Role::Initiator).socket());
        options.target_socket = Some(self.daemon_of(Role::Target).socket());
        // In a thread of its own, since it is pinned to a core and daemons inherit that.
        let outcome = std::thread::scope(|scope| {
            let measure = || {
                let mut last = None;
                run_transfers(&options, mode, None, |report| last = Some(report.clone()))?;
                last.ok_or_else(|| anyhow!("nothing was measured"))
            };
            scope.spawn(measure).join()
        });
        outcome.unwrap_or_else(|_| Err(anyhow!("the measuring thread panicked")))
    }
}

/// Configuration of the daemon of one end.
fn configuration(role: Role, cores: [usize; 2], mtu: u32, devargs: &str) -> String {
    let (core, name, number) = match role {
        Role::Initiator => (cores[0], "siw0", 1),
        Role::Target => (cores[1], "siw1", 2),
    };
    let devargs = Value::from(devargs);
    format!(
        r#"
[workers]
cores = [{core}]
idle = "adaptive"
spin_us = {SPIN_US}

[dpdk]
hugepages = "auto"
buffers = 8192

[[device]]
name = "{name}"
devargs = {devargs}
mac = "02:00:00:77:00:0{number}"
addresses = ["10.77.0.{number}/24"]
mtu = {mtu}

[device.mpa]
crc = "off"
receive_wait_ms = 10000
"#
    )
}

impl OneSideResult {
    /// `reports`: the rounds with the initiator, and those with the target on the side that copies
    /// nothing.
    fn new(transfer: &Transfer, reports: &[Vec<PerfReport>; 2]) -> anyhow::Result<OneSideResult> {
        let [initiator, target] = reports;
        Ok(OneSideResult {
            mode: match transfer.mode {
                TransferMode::Lat => Mode::Lat,
                TransferMode::Bw | TransferMode::Rate => Mode::Bw,
            },
            op: transfer.op,
            size: transfer.size,
            depth: transfer.depth,
            cq_mod: transfer.cq_mod,
            crc: transfer.crc,
            initiator: EndCost::of(Role::Initiator, initiator)?,
            target: EndCost::of(Role::Target, target)?,
        })
    }
}

impl EndCost {
    fn of(role: Role, reports: &[PerfReport]) -> anyhow::Result<EndCost> {
        let missing = || anyhow!("siwd did not tell the CPU time of the {role}");
        let worker_of = |report: &PerfReport| -> Option<WorkerUse> {
            let mut workers = report.workers.iter();
            workers.find(|worker| worker.end == Some(role)).copied()
        };
        let workers: Option<Vec<WorkerUse>> = reports.iter().map(worker_of).collect();
        let workers = workers.ok_or_else(missing)?;
        let spread_of = |value: fn(&WorkerUse) -> Option<f64>| {
            let values: Option<Vec<f64>> = workers.iter().map(value).collect();
            Spread::of(values?)
        };
        let median_of = |value: fn(&PerfReport) -> f64| {
            Spread::of(reports.iter().map(value)).map_or(0.0, |spread| spread.median)
        };
        let ns = spread_of(|worker| worker.ns_per_message).ok_or_else(missing)?;
        let cycles = spread_of(|worker| worker.cycles_per_message).ok_or_else(missing)?;
        let busy = spread_of(|worker| Some(worker.busy_percent)).ok_or_else(missing)?;
        let first = reports.first().ok_or_else(missing)?;
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        Ok(EndCost {
            core: workers[0].core,
            mmsgs_per_core: rounded(1e3 / ns.median),
            gbps_per_core: rounded(f64::from(first.size) * 8.0 / ns.median),
            ns_per_message: ns.median,
            ns_min: ns.min,
            ns_max: ns.max,
            cycles_per_message: cycles.median,
            busy_percent: busy.median,
            application_percent: median_of(|report| report.application_percent.unwrap_or(0.0)),
            run_gbps: rounded(median_of(|report| report.gbps)),
            run_mmsgs: rounded(median_of(|report| report.mmsgs)),
            run_p50_us: rounded(median_of(|report| report.lat_us.p50)),
            retrans_segs: reports.iter().map(|report| report.tcp.retrans_segs).sum(),
            verified: reports.iter().map(|report| report.verified).sum(),
            super_segments: takes_super_segments(first.settings.as_ref(), &first.from),
        })
    }
}

impl OneSideReport {
    /// The results in the order of the measurement.
    fn in_order(&self) -> impl Iterator<Item = &OneSideResult> {
        let names = transfers().into_iter().map(|transfer| transfer.name);
        names.filter_map(|name| self.results.get(name))
    }
}

impl fmt::Display for OneSideReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "One end alone, MTU {}; {}, Linux {}, {}",
            self.mtu, self.machine.cpu, self.machine.kernel, self.machine.dpdk
        )?;
        if let Some(result) = self.in_order().next() {
            writeln!(
                f,
                "Two daemons with one worker each: the initiator's on core {}, the target's on core {}.",
                result.initiator.core, result.target.core
            )?;
        }
        writeln!(
            f,
            "Between them: vhost-user. net_vhost copies each frame, net_virtio_user none; each end is\n\
             measured on the side of net_virtio_user."
        )?;
        let Application {
            core,
            waits_for_events,
        } = self.application;
        match waits_for_events {
            true => writeln!(
                f,
                "The application of both ends shares core {core} with the initiator's worker and waits \
                 for events: a run\nis slower than its ends, and a round trip is mostly the wake-ups of \
                 the application."
            )?,
            false => writeln!(f, "The application of both ends polls on core {core}.")?,
        }
        writeln!(
            f,
            "Per core: divided by the CPU time of the end's worker. It includes empty polls, for {} us \
             after the last\nwork, and sleeping and waking: a worker that waits for the other end can do \
             more.\n",
            self.spin_us
        )?;
        writeln!(
            f,
            "{:<34} {:<10} {:>10} {:>8} {:>24} {:>8} {:>6}  run",
            "", "end", "messages", "Gb/s", "ns each (min to max)", "cycles", "ran"
        )?;
        for result in self.in_order() {
            for (role, end) in [
                (Role::Initiator, &result.initiator),
                (Role::Target, &result.target),
            ] {
                let title = match role {
                    Role::Initiator => result.title(),
                    Role::Target => String::new(),
                };
                let mut ns = format!("{:.0}", end.ns_per_message);
                if end.ns_min < end.ns_max {
                    ns += &format!(" ({:.0} to {:.0})", end.ns_min, end.ns_max);
                }
                writeln!(
                    f,
                    "{title:<34} {role:<10} {:>10} {:>8.2} {ns:>24} {:>8.0} {:>4.0} %  {}",
                    format_rate(end.mmsgs_per_core),
                    end.gbps_per_core,
                    end.cycles_per_message,
                    end.busy_percent,
                    end.describe_run(result.mode)
                )?;
            }
        }
        Ok(())
    }
}

/// Formats a rate in millions per second.
fn format_rate(mmsgs: f64) -> String {
    match mmsgs >= 1.0 {
        true => format!("{mmsgs:.3} M/s"),
        false => format!("{:.1} k/s", mmsgs * 1e3),
    }
}

impl OneSideResult {
    fn title(&self) -> String {
        let kind = match self.mode {
            Mode::Bw => "",
            Mode::Lat => " round trip",
        };
        format!(
            "{} {}{kind}, CRC {}",
            self.op.json_name().to_uppercase(),
            format_bytes(self.size),
            if self.crc { "on" } else { "off" }
        )
    }
}

impl EndCost {
    /// The run that the end was measured in.
    fn describe_run(&self, mode: Mode) -> String {
        let mut text = match mode {
            Mode::Bw => format!("{}, {:.2} Gb/s", format_rate(self.run_mmsgs), self.run_gbps),
            Mode::Lat => format!("round trip {:.1} us", self.run_p50_us),
        };
        text += &format!(", application ran {:.0} %", self.application_percent);
        if self.super_segments {
            text += ", TSO";
        }
        if self.retrans_segs > 0 {
            text += &format!(", {} segments retransmitted", self.retrans_segs);
        }
        if self.verified > 0 {
            text += &format!(", {} messages checked", self.verified);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example_report;

    /// A round of the example transfer, in which the worker of each end took `ns` for a message.
    fn round(ns: [f64; 2]) -> PerfReport {
        let worker = |(end, ns): (Role, f64)| WorkerUse {
            end: Some(end),
            core: end as usize,
            busy_percent: 50.0,
            ns_per_message: Some(ns),
            cycles_per_message: Some(2.0 * ns),
            ..WorkerUse::default()
        };
        let ends = [Role::Initiator, Role::Target].into_iter().zip(ns);
        let mut report = example_report(Mode::Bw);
        report.workers = ends.map(worker).collect();
        report
    }

    #[test]
    fn an_end_counts_where_it_copies_nothing() {
        let transfer = &transfers()[0];
        let reports = [
            vec![
                round([100.0, 900.0]),
                round([300.0, 900.0]),
                round([200.0, 900.0]),
            ],
            vec![round([900.0, 50.0])],
        ];
        let result = OneSideResult::new(transfer, &reports).unwrap();
        let (initiator, target) = (result.initiator, result.target);
        assert_eq!((initiator.core, target.core), (0, 1));
        assert_eq!(
            (initiator.ns_per_message, target.ns_per_message),
            (200.0, 50.0)
        );
        assert_eq!((initiator.ns_min, initiator.ns_max), (100.0, 300.0));
        assert_eq!(
            (initiator.mmsgs_per_core, target.mmsgs_per_core),
            (5.0, 20.0)
        );
        assert_eq!(target.cycles_per_message, 100.0);
        let report = OneSideReport {
            one_side: "vhost-user".into(),
            mtu: 1500,
            rounds: 3,
            spin_us: SPIN_US,
            application: Application {
                core: 0,
                waits_for_events: true,
            },
            results: BTreeMap::from([(transfer.name.to_owned(), result)]),
            machine: MachineRecord::default(),
        };
        let json = serde_json::to_string(&report).unwrap();
        let report: OneSideReport = serde_json::from_str(&json).unwrap();
        let text = report.to_string();
        for part in [
            "the initiator's on core 0, the target's on core 1",
            "net_vhost copies each frame",
            "shares core 0 with the initiator's worker",
            "WRITE 64 B, CRC on",
            "200 (100 to 300)",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }

    #[test]
    fn a_daemon_that_tells_no_times_is_an_error() {
        let error = EndCost::of(Role::Target, &[example_report(Mode::Bw)]).unwrap_err();
        assert!(
            error.to_string().contains("CPU time of the target"),
            "{error}"
        );
    }
}
