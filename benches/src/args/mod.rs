//! The command line of `siw-perf`, and the measurements that it requests.

mod endpoints;
mod other_commands;

pub use endpoints::PerfEndpoints;
pub use other_commands::{
    CompareOptions, ConnOptions, LimitsOptions, OneSideOptions, PageOptions, PeersOptions,
    PingPongOptions, ScaleOptions,
};

use crate::measurement::RunLimits;
use crate::option_values::{parse_seconds, parse_size};
use crate::plan::{ATOMIC_SIZE, MeasurementPlan, Mode, Operation};
use crate::raw::RawOptions;
use anyhow::{anyhow, bail};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Measures siwd and the machine below it.
#[derive(Debug, Clone, Parser)]
#[command(name = "siw-perf", version, about)]
pub struct PerfOptions {
    /// The measurement.
    #[command(subcommand)]
    pub command: PerfCommand,
}

/// Subcommands of `siw-perf`.
#[derive(Debug, Clone, Subcommand)]
pub enum PerfCommand {
    /// Bandwidth over siwd, compared with the bounds of the machine.
    Bw(TransferOptions),
    /// Round trips over siwd, one at a time.
    Lat(TransferOptions),
    /// Messages per second over siwd: 64 bytes, 128 in flight.
    Rate(TransferOptions),
    /// Round trips during a bulk transfer on other queue pairs.
    Mixed(MixedOptions),
    /// Cost of additional queue pairs: one busy queue pair with many idle ones, and all of them
    /// active in turn.
    Scale(ScaleOptions),
    /// Queue pairs created, connected, closed and destroyed per second.
    Conn(ConnOptions),
    /// Frames on a port without TCP and without a daemon, like testpmd: sends, receives, forwards
    /// or answers, with statistics for each second.
    Raw(RawOptions),
    /// Limits of the machine without siwd: copying, CRC32c, both in one pass, and the transfer of a
    /// cache line between two cores.
    Limits(LimitsOptions),
    /// siwd compared with the kernel's TCP, UCX, libfabric and testpmd on this machine: the same
    /// sizes and cores, medians of alternating rounds. Starts its own daemons and network
    /// namespaces; needs root.
    Peers(PeersOptions),
    /// Cost of each end alone: initiator and target in two daemons with a core each, joined by
    /// vhost-user. Messages and bytes per second of each end's core, with CRC and without. Starts its
    /// own daemons, as any user.
    OneSide(OneSideOptions),
    /// An HTML page and a table of results that were printed with --json.
    Report(PageOptions),
    /// Compares the same transfers in two result files as ratios; exit code 1 if any became worse.
    Compare(CompareOptions),
    /// Round trips over the kernel's TCP with both ends spinning; part of `peers`.
    #[command(hide = true)]
    TcpPingPong(PingPongOptions),
}

/// Options of a transfer measurement. Lists of sizes, depths or queue pairs measure every
/// combination and print a table.
#[derive(Debug, Clone, Args)]
pub struct TransferOptions {
    /// How the data moves.
    #[arg(long, value_enum, default_value = "write")]
    pub op: Operation,

    /// Bytes of a message, with K, M or G for KiB, MiB, GiB [default: 1M for bw, else 64].
    #[arg(long, short = 's', value_name = "N,..", value_delimiter = ',', value_parser = parse_size)]
    pub size: Vec<u32>,

    /// Messages in flight on each queue pair [default: 8 for bw, 128 for rate].
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub depth: Vec<u32>,

    /// Queue pairs, each with a connection of its own.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1")]
    pub qps: Vec<u32>,

    /// Connected but idle queue pairs in addition to the measured ones.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["listen", "connect"])]
    pub idle_qps: u32,

    /// Percent of frames that the link is configured to lose (tc-netem(8)): recorded in the result,
    /// and used as an axis by the report.
    #[arg(long, value_name = "PERCENT", value_parser = parse_loss)]
    pub link_loss: Option<u32>,

    /// Measurements of each combination; the median is shown with minimum and maximum. Disturbed
    /// measurements are repeated, at most N times in all.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Also report the bandwidth of each interval of this length.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub interval: Option<Duration>,

    /// Also report the whole distribution of latencies (--json).
    #[arg(long)]
    pub histogram: bool,

    /// Seconds of silence before each round trip, during which a worker may go to sleep.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds_below_one)]
    pub pause: Option<Duration>,

    /// Seconds to measure, after a warm-up of some tenths of a second.
    #[arg(long, short = 'D', visible_alias = "duration", value_name = "N", default_value = "3",
          value_parser = parse_seconds)]
    pub secs: Duration,

    /// Messages to measure, instead of seconds; by each thread.
    #[arg(long, short = 'n', value_name = "N", conflicts_with = "secs",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub iters: Option<u64>,

    /// Initiator's device; with --connect the device to connect from. Several devices, for example
    /// with different MTUs, are measured one after the other, each with its counterpart in --to
    /// [default: siw0].
    #[arg(long, value_name = "DEVICE,..", value_delimiter = ',')]
    pub from: Vec<String>,

    /// Target's device in this process [default: siw1].
    #[arg(long, value_name = "DEVICE,..", value_delimiter = ',', conflicts_with_all = ["listen", "connect"])]
    pub to: Vec<String>,

    /// Serve one measurement requested by another process, with that process's options; port 7175
    /// by default.
    #[arg(long, value_name = "ADDR", value_parser = parse_address, conflicts_with_all = ["connect", "from"])]
    pub listen: Option<SocketAddr>,

    /// Measure with a process that listens.
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub connect: Option<SocketAddr>,

    /// Print each result as one line of JSON.
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,

    /// Print each result as a line of comma-separated values, after a header line.
    #[arg(long)]
    pub csv: bool,

    /// Check all received data; wrong bytes are an error. Slower.
    #[arg(long)]
    pub verify: bool,

    /// Payload travels in the work request (at most 256 bytes).
    #[arg(long)]
    pub inline: bool,

    /// Wait for completions on an event channel, and leave the core to other threads meanwhile.
    #[arg(long)]
    pub events: bool,

    /// Request a completion only for every N-th message of a QP, like perftest, whose
    /// default is 100; latencies are those of these messages.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub cq_mod: u32,

    /// CRC on the connections; both for a comparison [default: the devices' configuration].
    #[arg(long, value_enum, value_name = "on,off", value_delimiter = ',')]
    pub crc: Vec<Choice>,

    /// Markers requested by the target for its receive direction; both for a comparison [default:
    /// the device's configuration].
    #[arg(long, value_enum, value_name = "on,off", value_delimiter = ',')]
    pub markers: Vec<Choice>,

    /// The target also sends to the initiator, on separate queue pairs; bandwidth and
    /// rate are totals of both directions.
    #[arg(long, conflicts_with_all = ["listen", "connect"])]
    pub bidirectional: bool,

    /// Show progress once a second, or at each --interval: bandwidth, latency, workers,
    /// retransmissions; with several threads, the messages of the first one.
    #[arg(long)]
    pub live: bool,

    /// Number of threads, each with --qps queue pairs.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["listen", "connect"],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,

    /// Do not measure the bounds, which need DPDK memory in this process.
    #[arg(long)]
    pub no_bounds: bool,

    /// The daemon's control socket [default: $SIWD_SOCKET, that of this user, /run/siwd/siwd.sock].
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Control socket of the target's daemon, if it is another one; this process has both ends all
    /// the same [default: that of --socket].
    #[arg(long, value_name = "PATH", conflicts_with_all = ["listen", "connect", "bidirectional"])]
    pub target_socket: Option<PathBuf>,

    /// The core to measure on; the daemon's workers should have others [default: the first core
    /// available to this process, if both ends are in it].
    #[arg(long, value_name = "N")]
    pub core: Option<usize>,

    /// The core of the daemon's worker, for the cache-line round trip [default: that of the first
    /// worker].
    #[arg(long, value_name = "N")]
    pub worker_core: Option<usize>,
}

/// Requested setting of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Requested.
    On,
    /// Not requested; a device may require it all the same.
    Off,
}

/// The settings to measure: only the configured one if the list is empty.
fn choices(list: &[Choice]) -> Vec<Option<bool>> {
    match list {
        [] => vec![None],
        list => list
            .iter()
            .map(|choice| Some(*choice == Choice::On))
            .collect(),
    }
}

/// Round trips during a bulk transfer.
#[derive(Debug, Clone, Args)]
pub struct MixedOptions {
    /// The round trips.
    #[command(flatten)]
    pub transfer: TransferOptions,

    /// Bytes of a message of the bulk transfer.
    #[arg(long, value_name = "N", default_value = "64K", value_parser = parse_size)]
    pub bulk_size: u32,

    /// Messages in flight of the bulk transfer.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub bulk_depth: u32,
}

impl MixedOptions {
    /// The bulk transfer: the same operation, one queue pair.
    pub fn to_bulk_plan(&self) -> anyhow::Result<MeasurementPlan> {
        if self.transfer.listen.is_some() || self.transfer.connect.is_some() {
            bail!("mixed measures both ends in one process; leave --listen and --connect out");
        }
        let op = self.transfer.op;
        let plan = MeasurementPlan::for_bandwidth(op, self.bulk_size, self.bulk_depth, 1);
        plan.check_limits()?;
        Ok(plan)
    }
}

/// Default port of --listen and --connect addresses.
pub const PORT: u16 = 7175;

/// Reads the command line of `siw-perf`; prints help and errors, and exits then.
pub fn parse_command_line() -> PerfOptions {
    let matches = command_by_mode().get_matches();
    PerfOptions::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Options of transfers that a subcommand refuses, or that have no effect in it.
const UNUSED_OPTIONS: [(&str, &[&str]); 4] = [
    ("bw", &["pause"]),
    ("rate", &["pause"]),
    (
        "lat",
        &["depth", "qps", "cq_mod", "bidirectional", "threads"],
    ),
    (
        "mixed",
        &[
            "depth",
            "qps",
            "cq_mod",
            "bidirectional",
            "threads",
            "listen",
            "connect",
        ],
    ),
];

/// Help of options that mean something else in modes that measure one round trip at a time.
const HELP_OF_ROUND_TRIPS: [(&str, &str); 3] = [
    (
        "interval",
        "Seconds between two lines of --live [default: 1]",
    ),
    ("iters", "Round trips to measure, instead of seconds"),
    (
        "live",
        "Show progress once a second, or at each --interval: round trips, workers, retransmissions",
    ),
];

/// The command line, with the help of each subcommand limited to the options that it has.
fn command_by_mode() -> clap::Command {
    let mut command = PerfOptions::command();
    for (mode, unused) in UNUSED_OPTIONS {
        let default = match mode {
            "bw" => "1M",
            _ => "64",
        };
        let size =
            format!("Bytes of a message, with K, M or G for KiB, MiB, GiB [default: {default}]");
        command = command.mut_subcommand(mode, |subcommand| {
            let hide = |subcommand: clap::Command, unused: &&'static str| {
                subcommand.mut_arg(*unused, |option| option.hide(true))
            };
            let subcommand = unused.iter().fold(subcommand, hide);
            subcommand.mut_arg("size", |option| option.help(size))
        });
    }
    for mode in ["lat", "mixed"] {
        command = command.mut_subcommand(mode, |subcommand| {
            let explain = |subcommand: clap::Command, (option, help)| {
                subcommand.mut_arg(option, |option| option.help(help))
            };
            HELP_OF_ROUND_TRIPS.into_iter().fold(subcommand, explain)
        });
    }
    for (mode, default) in [("bw", "8"), ("rate", "128")] {
        let depth = format!("Messages in flight on each queue pair [default: {default}]");
        command = command.mut_subcommand(mode, |subcommand| {
            subcommand.mut_arg("depth", |option| option.help(depth))
        });
    }
    command
}

impl TransferOptions {
    /// The default options for measurements of `secs` each, without bounds.
    pub(crate) fn without_bounds(secs: Duration) -> TransferOptions {
        TransferOptions {
            op: Operation::Write,
            size: Vec::new(),
            depth: Vec::new(),
            qps: vec![1],
            idle_qps: 0,
            link_loss: None,
            rounds: 1,
            interval: None,
            pause: None,
            histogram: false,
            secs,
            iters: None,
            from: Vec::new(),
            to: Vec::new(),
            listen: None,
            connect: None,
            json: false,
            csv: false,
            verify: false,
            inline: false,
            events: false,
            cq_mod: 1,
            crc: Vec::new(),
            markers: Vec::new(),
            bidirectional: false,
            live: false,
            threads: 1,
            no_bounds: true,
            socket: None,
            target_socket: None,
            core: None,
            worker_core: None,
        }
    }

    /// End of each measurement.
    pub fn limits(&self) -> RunLimits {
        match self.iters {
            Some(messages) => RunLimits::Messages(messages),
            None => RunLimits::Time(self.secs),
        }
    }

    /// Combinations of CRC and markers, each for one set of measurements.
    pub fn mpa_choices(&self) -> Vec<(Option<bool>, Option<bool>)> {
        let markers = choices(&self.markers);
        let with_markers = |crc| markers.iter().map(move |markers| (crc, *markers));
        choices(&self.crc)
            .into_iter()
            .flat_map(with_markers)
            .collect()
    }

    /// Measurements that the options describe, one for each combination of sizes, depths and queue
    /// pairs, checked against the limits. Never empty.
    pub fn to_plans(&self, mode: TransferMode) -> anyhow::Result<Vec<MeasurementPlan>> {
        let latency = mode == TransferMode::Lat;
        if latency && self.depth.iter().any(|&depth| depth != 1) {
            bail!("--depth: lat has one message in flight; leave it out");
        }
        let (default_size, default_depth) = match mode {
            TransferMode::Bw => (1 << 20, 8),
            TransferMode::Lat => (64, 1),
            TransferMode::Rate => (64, 128),
        };
        let default_size = match self.op.is_atomic() {
            true => ATOMIC_SIZE,
            false => default_size,
        };
        if self.pause.is_some() && !latency {
            bail!("--pause: only lat waits between messages");
        }
        let beyond = [
            ("--bidirectional", self.bidirectional),
            ("--threads", self.threads > 1),
        ];
        if let (true, Some((option, _))) = (latency, beyond.iter().find(|(_, set)| *set)) {
            bail!("{option}: lat measures one round trip at a time");
        }
        let mut plans = Vec::new();
        for (crc, markers) in self.mpa_choices() {
            for &qps in &or_default(&self.qps, 1) {
                for &depth in &or_default(&self.depth, default_depth) {
                    for &size in &or_default(&self.size, default_size) {
                        let plan = MeasurementPlan {
                            mode: if latency { Mode::Lat } else { Mode::Bw },
                            op: self.op,
                            size,
                            depth,
                            qps,
                            verify: self.verify,
                            inline: self.inline,
                            events: self.events,
                            cq_mod: self.cq_mod,
                            crc,
                            markers,
                        };
                        plan.check_limits()?;
                        plans.push(plan);
                    }
                }
            }
        }
        if plans.len() > 1 && self.connect.is_some() {
            bail!(
                "--connect: the listening process answers one measurement; give one size, \
                 depth and number of queue pairs"
            );
        }
        Ok(plans)
    }
}

/// The list itself, or the default if it is empty.
fn or_default<T: Clone>(list: &[T], default: T) -> Vec<T> {
    match list {
        [] => vec![default],
        list => list.to_vec(),
    }
}

/// The command that a transfer is measured for, which determines the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferMode {
    /// Bandwidth.
    Bw,
    /// Round trips.
    Lat,
    /// Messages per second.
    Rate,
}

/// Parses a percentage into parts per million.
fn parse_loss(text: &str) -> anyhow::Result<u32> {
    let percent = text.trim_end_matches('%').parse::<f64>();
    match percent {
        Ok(percent) if (0.0..100.0).contains(&percent) => Ok((percent * 1e4).round() as u32),
        _ => Err(anyhow!("write percent from 0 to below 100, such as 0.1")),
    }
}

fn parse_seconds_below_one(text: &str) -> anyhow::Result<Duration> {
    match text.parse::<f64>() {
        Ok(seconds) if (1e-6..1.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(anyhow!("write seconds below one, such as 0.002")),
    }
}

fn parse_address(text: &str) -> anyhow::Result<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse() {
        return Ok(SocketAddr::new(ip, PORT));
    }
    if let Some(port) = text.strip_prefix(':').and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port));
    }
    Err(anyhow!(
        "write an address with or without port: 10.77.0.2, 10.77.0.2:7175, [fd77::2]:7175"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options of a transfer, and the plan of its first combination.
    #[derive(Debug)]
    pub(super) struct Parsed {
        pub(super) options: TransferOptions,
        mode: TransferMode,
    }

    impl Parsed {
        fn to_plan(&self) -> anyhow::Result<MeasurementPlan> {
            self.options.to_plans(self.mode).map(|plans| plans[0])
        }
    }

    pub(super) fn parse(line: &str) -> anyhow::Result<Parsed> {
        let parsed = PerfOptions::try_parse_from(line.split(' '))?;
        let (mode, options) = match parsed.command {
            PerfCommand::Bw(options) => (TransferMode::Bw, options),
            PerfCommand::Lat(options) => (TransferMode::Lat, options),
            PerfCommand::Rate(options) => (TransferMode::Rate, options),
            other => bail!("{other:?}"),
        };
        Ok(Parsed { options, mode })
    }

    #[test]
    fn lists_measure_every_combination() {
        let parsed = parse("siw-perf bw --size 64,4K --depth 1,16 --qps 1,2").unwrap();
        let plans = parsed.options.to_plans(parsed.mode).unwrap();
        let all: Vec<_> = plans
            .iter()
            .map(|plan| (plan.qps, plan.depth, plan.size))
            .collect();
        assert_eq!(all.len(), 8);
        assert_eq!(
            (all[0], all[1], all[2]),
            ((1, 1, 64), (1, 1, 4096), (1, 16, 64))
        );
        let error = parse("siw-perf bw --size 64,4K --connect 10.77.0.2").unwrap();
        let error = error.to_plan().unwrap_err().to_string();
        assert!(error.contains("one measurement"), "{error}");
    }

    #[test]
    fn rate_has_many_small_messages_in_flight() {
        let plan = parse("siw-perf rate").unwrap().to_plan().unwrap();
        assert_eq!((plan.mode, plan.size, plan.depth), (Mode::Bw, 64, 128));
    }

    #[test]
    fn loss_is_read_as_percent() {
        let read =
            |text| parse(&format!("siw-perf bw --link-loss {text}")).map(|p| p.options.link_loss);
        assert_eq!(
            (read("0.1").unwrap(), read("2%").unwrap()),
            (Some(1000), Some(20_000))
        );
        assert!(read("100").unwrap_err().to_string().contains("below 100"));
    }

    #[test]
    fn output_has_one_form() {
        assert!(parse("siw-perf bw --json --csv").is_err());
    }

    #[test]
    fn a_full_command_line_says_everything() {
        let a = parse(
            "siw-perf bw --op read --size 64K --depth 16 --qps 4 --secs 0.5 --from siw0 --to siw1 --json --verify",
        )
        .unwrap();
        let port = a.to_plan().unwrap();
        assert_eq!(
            (port.op, port.size, port.depth, port.qps),
            (Operation::Read, 65536, 16, 4)
        );
        assert_eq!(a.options.secs, Duration::from_millis(500));
        let both = PerfEndpoints::Both {
            from: "siw0".into(),
            to: "siw1".into(),
        };
        assert_eq!(a.options.endpoints().unwrap(), vec![both]);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("64").unwrap(), 64);
        assert_eq!(parse_size("1MiB").unwrap(), 1 << 20);
        assert_eq!(parse_size("4k").unwrap(), 4096);
        for bad in [
            "",
            "k",
            "4x",
            "-1",
            "1.5M",
            "4G",
            "99999999999999999999",
            "ü",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_sizes_are_refused_with_what_is_allowed() {
        let error = parse("siw-perf bw --size lots").unwrap_err().to_string();
        assert!(error.contains("write bytes as 64, 4K, 1M or 1G"), "{error}");
        let error = parse("siw-perf bw --size 0")
            .unwrap()
            .to_plan()
            .unwrap_err()
            .to_string();
        assert!(error.contains("--size 0"), "{error}");
        let error = parse("siw-perf bw --secs 0").unwrap_err().to_string();
        assert!(error.contains("0.01 to 86400"), "{error}");
    }

    #[test]
    fn an_unknown_operation_lists_those_that_exist() {
        let error = parse("siw-perf bw --op append").unwrap_err().to_string();
        assert!(
            error.contains("write, read, write-imm, send, fetch-add"),
            "{error}"
        );
    }

    #[test]
    fn options_have_the_names_that_perftest_uses() {
        let run = |line: &str| parse(line).map(|parsed| parsed.options.limits());
        let five = RunLimits::Time(Duration::from_secs(5));
        for line in ["siw-perf bw -D 5", "siw-perf bw --duration 5"] {
            assert_eq!(run(line).unwrap(), five, "{line}");
        }
        for line in ["siw-perf lat -n 1000", "siw-perf lat --iters 1000"] {
            assert_eq!(run(line).unwrap(), RunLimits::Messages(1000), "{line}");
        }
        assert!(run("siw-perf bw -n 5 -D 5").is_err());
        assert!(run("siw-perf bw -n 0").is_err());
        let plan = parse("siw-perf rate -s 256 --op write-imm").unwrap();
        let plan = plan.to_plan().unwrap();
        assert_eq!((plan.size, plan.op), (256, Operation::WriteImm));
    }

    #[test]
    fn help_lists_the_options_that_a_mode_has() {
        let help = |mode: &str| {
            let mut command = command_by_mode();
            let subcommand = command.find_subcommand_mut(mode).unwrap();
            subcommand.render_long_help().to_string()
        };
        let (bw, lat) = (help("bw"), help("lat"));
        assert!(
            bw.contains("--depth") && bw.contains("[default: 1M]"),
            "{bw}"
        );
        assert!(!bw.contains("--pause"), "{bw}");
        assert!(
            lat.contains("--pause") && lat.contains("[default: 64]"),
            "{lat}"
        );
        for foreign in [
            "--depth",
            "--threads",
            "--bidirectional",
            "--cq-mod",
            "--qps",
        ] {
            assert!(!lat.contains(foreign), "{foreign}");
        }
        assert!(lat.contains("Round trips to measure") && !lat.contains("each thread"));
        assert!(!help("mixed").contains("--listen"));
    }

    #[test]
    fn latency_has_one_message_in_flight() {
        let a = parse("siw-perf lat --depth 4").unwrap();
        assert!(
            a.to_plan()
                .unwrap_err()
                .to_string()
                .contains("one message in flight")
        );
        let port = parse("siw-perf lat").unwrap().to_plan().unwrap();
        assert_eq!((port.size, port.depth), (64, 1));
    }

    #[test]
    fn atomics_have_eight_bytes() {
        for line in [
            "siw-perf rate --op atomic",
            "siw-perf lat --op compare-swap",
        ] {
            assert_eq!(parse(line).unwrap().to_plan().unwrap().size, 8, "{line}");
        }
    }

    #[test]
    fn crc_on_and_off_are_measured_one_after_the_other() {
        let parsed = parse("siw-perf bw --crc on,off --threads 2 --bidirectional").unwrap();
        let plans = parsed.options.to_plans(parsed.mode).unwrap();
        let crcs: Vec<_> = plans.iter().map(|plan| plan.crc).collect();
        assert_eq!(crcs, [Some(true), Some(false)]);
        let error = parse("siw-perf lat --threads 2").unwrap();
        assert!(
            error
                .to_plan()
                .unwrap_err()
                .to_string()
                .contains("--threads")
        );
    }
}
