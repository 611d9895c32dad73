//! `siwctl`: shows the state of a running siwd, and changes it. The lists of objects have the form of
//! rdma(8) and ss(8), for the programs that read those.
#![forbid(unsafe_code)]

mod capture;
mod cdi;
mod config;
mod connections;
mod doctor;
mod fault;
mod metrics;
mod monitor;
mod objects;
mod reload;
mod report;
mod routes;
mod stat;
mod statistics;
mod top;
mod trace;
mod why;

use anyhow::Context as _;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show the state of a running siwd, explain it, and change it.
#[derive(Debug, Parser)]
#[command(name = "siwctl", version)]
struct Arguments {
    /// Control socket of siwd
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(short, long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Counters, merged and for each worker
    Stat(stat::StatArgs),
    /// Objects: devices, clients, queue pairs and their parts
    #[command(subcommand)]
    Show(Show),
    /// Why a queue pair's connection ended or was not made, also after the queue pair was destroyed
    Why(why::WhyArgs),
    /// Change a queue pair
    #[command(subcommand)]
    Qp(QpCommand),
    /// Change a client
    #[command(subcommand)]
    Client(ClientCommand),
    /// Change the filter of siwd's log until it restarts
    Log {
        /// Like `siwd --log`: a level (error, warn, info, debug, trace), or `siwd=debug,siw_tcp=info`
        filter: String,
    },
    /// Capture frames of the running siwd
    #[command(subcommand)]
    Capture(capture::CaptureCommand),
    /// Inject faults on purpose: lost, late, repeated or damaged frames, stalls, the end of siwd
    #[command(subcommand)]
    Fault(fault::FaultCommand),
    /// The next frames and turns of queue pairs: the counters that each moved, and the reasons of its drops
    Trace(trace::TraceArgs),
    /// Change limits of the running siwd
    #[command(subcommand)]
    Limits(LimitsCommand),
    /// Add a device to the running siwd, or remove one
    #[command(subcommand)]
    Device(DeviceCommand),
    /// Addresses of a device, changed until siwd restarts
    #[command(subcommand)]
    Addr(routes::AddressCommand),
    /// Routes of a device in addition to those of its configuration
    #[command(subcommand)]
    Route(routes::RouteCommand),
    /// Neighbours of a device: fixed Ethernet addresses, and known ones to forget
    #[command(subcommand)]
    Neigh(routes::NeighbourCommand),
    /// Have siwd read its configuration again; show the settings applied and those that need a restart
    Reload,
    /// The configuration of the running siwd
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Events as they happen: connections, clients, links
    Monitor(monitor::MonitorArgs),
    /// Check this machine for siwd, also without a running one; each finding has its command
    Doctor,
    /// Write an archive for a report: lists, counters, settings, ends, doctor; no payload
    Report(report::ReportArgs),
    /// Print a specification of the Container Device Interface: siwctl cdi >/etc/cdi/siwd.json, then
    /// podman run --device siwd.dev/rnic=siw0
    ///
    /// Runtimes search /etc/cdi and /var/run/cdi, podman 5.5.1 only the first. For rootless containers an
    /// ordinary user writes ~/.config/cdi/siwd.json and names its folder: podman --cdi-spec-dir
    /// ~/.config/cdi run, or cdi_spec_dirs of section engine in ~/.config/containers/containers.conf. Podman
    /// before 5.5 has neither, there only root's file is found. Rootless Docker searches ~/.config/cdi and
    /// $XDG_RUNTIME_DIR/cdi since December 2025, and takes "cdi-spec-dirs" from daemon.json before.
    Cdi(cdi::CdiArgs),
    /// Live rates of devices and workers, and the clients
    Top(top::TopArgs),
    /// Metrics in the OpenMetrics format, printed or served to Prometheus
    Metrics(metrics::MetricsArgs),
    /// Print the completions of siwctl for a shell
    Completions { shell: Shell },
    /// Write manual pages, one for each command
    Man {
        /// Existing folder
        folder: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum Show {
    /// Devices with addresses, driver and link
    Devices,
    /// Workers with their cores and load
    Workers,
    /// Dropped frames, refused and lost connections, by reason
    Drops {
        /// Also reasons that have not occurred
        #[arg(short, long)]
        all: bool,
    },
    /// Connected processes and their objects
    Clients(objects::Filter),
    /// Users with the resources that they hold
    Users,
    /// Effective settings
    Config,
    /// Queue pairs, in the form of `rdma resource show qp`
    Qp(objects::Filter),
    /// Completion queues
    Cq(objects::Filter),
    /// Shared receive queues
    Srq(objects::Filter),
    /// Memory regions
    Mr(objects::Filter),
    /// Protection domains
    Pd(objects::Filter),
    /// Connected queue pairs, listeners and bindings
    #[command(alias = "cm_id")]
    CmId(objects::Filter),
    /// Connections with the state of TCP, MPA and RDMAP, in the form of `ss -ti`
    Conn(objects::Filter),
    /// The latest connections that ended or were not made, with the reason
    Ends(objects::Filter),
    /// Running captures and traces with the numbers of frames or records written and dropped
    Captures,
}

#[derive(Debug, Subcommand)]
enum QpCommand {
    /// Move it to ERROR and reset its connection
    Kill {
        /// Number of the queue pair
        #[arg(value_name = "LQPN")]
        qp: u32,
    },
}

#[derive(Debug, Subcommand)]
enum ClientCommand {
    /// Disconnect it and free its objects
    Kill {
        /// Number of the client in `siwctl show clients`
        client: u64,
    },
}

#[derive(Debug, Subcommand)]
enum DeviceCommand {
    /// Read the configuration again, and open the device of this name; other devices go on. Programs that
    /// start from then on have it
    Add {
        /// Name in its table `[[device]]` of siwd's configuration
        name: String,
    },
    /// Close a device; other devices go on. It is back with `siwctl device add`, and after a restart if the
    /// configuration still has it
    Del {
        /// Name of the device
        name: String,
        /// Also if programs use it: their connections end, and they get DEVICE_FATAL
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
enum LimitsCommand {
    /// Set a limit until siwd reloads its configuration or restarts
    Set {
        /// Key in the table `limits` of the configuration
        key: String,
        /// A number, a size such as 4GiB, or `default`
        value: String,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = run(&arguments).and_then(|text| print(&text));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("siwctl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has seen enough, like `head`.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        written => written.context("cannot write the output"),
    }
}

/// Executes the command; returns its output.
fn run(arguments: &Arguments) -> anyhow::Result<String> {
    if let Command::Completions { shell } = &arguments.command {
        let mut text = Vec::new();
        clap_complete::generate(*shell, &mut Arguments::command(), "siwctl", &mut text);
        return Ok(String::from_utf8_lossy(&text).into_owned());
    }
    if let Command::Man { folder } = &arguments.command {
        clap_mangen::generate_to(Arguments::command(), folder)
            .with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
        return Ok(String::new());
    }
    let json = arguments.json;
    let socket = arguments.socket.as_deref();
    match &arguments.command {
        Command::Doctor => {
            let (text, is_sound) = doctor::run(socket, json);
            print(&text)?;
            anyhow::ensure!(is_sound, "something is at fault");
            return Ok(String::new());
        }
        Command::Report(args) => return report::run(socket, args),
        Command::Cdi(args) => return cdi::run(socket, args),
        Command::Fault(fault::FaultCommand::Plans) => return Ok(fault::plans(json)),
        _ => {}
    }
    let daemon = siw::Context::open(socket)?;
    match &arguments.command {
        Command::Stat(args) => stat::run(&daemon, args, json),
        Command::Show(show) => objects::show(&daemon, show, json),
        Command::Why(args) => why::explain(&daemon, args, json),
        Command::Qp(QpCommand::Kill { qp }) => {
            daemon.end_queue_pair(*qp)?;
            Ok(String::new())
        }
        Command::Client(ClientCommand::Kill { client }) => {
            daemon.end_client(*client)?;
            Ok(String::new())
        }
        Command::Log { filter } => {
            daemon.set_log_filter(filter)?;
            Ok(String::new())
        }
        Command::Capture(command) => capture::run(&daemon, command, json),
        Command::Fault(command) => fault::run(&daemon, command, json),
        Command::Trace(args) => trace::run(&daemon, args, json).map(|()| String::new()),
        Command::Limits(LimitsCommand::Set { key, value }) => {
            reload::describe_outcome(&daemon.set_limit(key, value)?, json)
        }
        Command::Device(DeviceCommand::Add { name }) => {
            daemon.add_device(name)?;
            Ok(String::new())
        }
        Command::Device(DeviceCommand::Del { name, force }) => {
            daemon.remove_device(routes::find_device(&daemon, name)?, *force)?;
            Ok(String::new())
        }
        Command::Addr(command) => routes::change_addresses(&daemon, command, json),
        Command::Route(command) => routes::change_routes(&daemon, command, json),
        Command::Neigh(command) => routes::change_neighbours(&daemon, command),
        Command::Config(config::ConfigCommand::Export) => config::export(&daemon, json),
        Command::Reload => reload::run(&daemon, json),
        Command::Monitor(args) => monitor::run(&daemon, args, json),
        Command::Top(args) => top::run(&daemon, args),
        Command::Metrics(args) => metrics::run(&daemon, args),
        Command::Completions { .. }
        | Command::Man { .. }
        | Command::Doctor
        | Command::Report(_)
        | Command::Cdi(_) => Ok(String::new()),
    }
}
