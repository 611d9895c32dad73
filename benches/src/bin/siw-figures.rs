//! `siw-figures`: measures one figure and prints it as one line; called by the groups of
//! `./benches/figures`. Exit code 0: the floor is reached; 1: it is not; 2: the figure could not be
//! measured. `siw-figures record` writes figures of a group into a document.
#![forbid(unsafe_code)]

use anyhow::anyhow;
use clap::{Args, Parser, Subcommand};
use siw::Context;
use siw_bench::daemon::Process;
use siw_bench::drop_in::{Load, LoadPlan, compare_drop_in};
use siw_bench::end::{Role, TransferEnd, find_device, open_context};
use siw_bench::figure::{BetterValue, Figure, best_value};
use siw_bench::machine::{MachineRecord, pin_thread};
use siw_bench::plan::{MeasurementPlan, Operation};
use siw_bench::registration::{MemoryKind, registration_time};
use siw_bench::results_document::{RunOrigin, replace_section};
use siw_bench::trust::{Victim, program_beside};
use siw_bench::{churn, session};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(version, about = "Measures one figure and prints it as a line of JSON")]
struct FigureOptions {
    #[command(subcommand)]
    command: FiguresCommand,

    /// Name of the figure.
    #[arg(long, global = true, default_value = "figure")]
    figure: String,

    #[arg(long, global = true, default_value = "")]
    unit: String,

    /// Lowest acceptable value; with --low the highest.
    #[arg(long, global = true, default_value_t = 0.0)]
    floor: f64,

    #[arg(long, global = true, default_value_t = 0.0)]
    goal: f64,

    /// Lower values are better.
    #[arg(long, global = true)]
    low: bool,
}

#[derive(Debug, Subcommand)]
enum FiguresCommand {
    #[command(flatten)]
    Measure(FigureCommand),
    /// Replaces the section of a group in a document by the figures of a run.
    Record(RecordOptions),
}

#[derive(Debug, Args)]
struct RecordOptions {
    /// Markdown file with the sections.
    #[arg(long)]
    document: PathBuf,
    #[arg(long)]
    group: String,
    /// Day of the run.
    #[arg(long)]
    date: String,
    /// Markdown tables of the transfers behind the figures.
    #[arg(long)]
    transfers: Option<PathBuf>,
    /// The printed figures, one line of JSON for each.
    figures: PathBuf,
}

#[derive(Debug, Subcommand)]
enum FigureCommand {
    /// Best value among the runs whose JSON lines are in a file.
    Best {
        file: PathBuf,
        /// Name of the number: gbps, lat_us.p50.
        #[arg(long)]
        key: String,
    },
    /// Best of some runs divided by the best of others, whose cost it measures.
    Ratio {
        file: PathBuf,
        others: PathBuf,
        /// Name of the number: gbps, lat_us.p50.
        #[arg(long)]
        key: String,
        /// Name of the number in the other runs, if it differs.
        #[arg(long)]
        others_key: Option<String>,
        /// The lowest value of each counts, because the numbers are times.
        #[arg(long)]
        lowest: bool,
    },
    /// CPU use of the daemon in percent of a core while its clients are idle.
    IdleCpu {
        #[command(flatten)]
        daemon: DaemonOptions,
        #[arg(long, default_value_t = 5.0)]
        secs: f64,
        /// Pairs of clients.
        #[arg(long, default_value_t = 4)]
        clients: u32,
        /// Connections between each pair.
        #[arg(long, default_value_t = 8)]
        connections: u32,
    },
    /// Queue pairs per second that are created, connected, closed and destroyed.
    QpChurn {
        #[command(flatten)]
        daemon: DaemonOptions,
        #[arg(long, default_value_t = 3.0)]
        secs: f64,
        /// Connections in progress at a time.
        #[arg(long, default_value_t = 64)]
        in_flight: u32,
        /// Number of tries, of which the best counts: other programs may disturb the machine.
        #[arg(long, default_value_t = 1)]
        tries: u32,
    },
    /// Growth of the daemon's private memory in bytes while queue pairs are created and destroyed.
    QpGrowth {
        #[command(flatten)]
        daemon: DaemonOptions,
        #[arg(long, default_value_t = 100_000)]
        count: u32,
        /// Queue pairs that exist at a time.
        #[arg(long, default_value_t = 64)]
        alive: u32,
    },
    /// Private bytes of the daemon for each end of an idle connection.
    IdleMemory {
        #[command(flatten)]
        daemon: DaemonOptions,
        #[arg(long, default_value_t = 1000)]
        connections: u32,
    },
    /// Growth of the daemon's open descriptors after clients were killed at random points.
    KilledClients {
        #[command(flatten)]
        daemon: DaemonOptions,
        #[arg(long, default_value_t = 10_000)]
        count: u32,
        /// Output file for other growth, as a line of JSON for `best`.
        #[arg(long)]
        growth: PathBuf,
    },
    /// Microseconds to register existing application memory.
    Registration {
        /// Control socket of siwd.
        #[arg(long)]
        socket: Option<PathBuf>,
        #[arg(long)]
        kind: MemoryKind,
        /// Bytes.
        #[arg(long)]
        size: usize,
        /// Number of registrations; the median counts.
        #[arg(long, default_value_t = 201)]
        count: usize,
    },
    /// Cost of the drop-in library relative to the client library: additional nanoseconds per
    /// request, or its throughput divided by the client library's.
    DropIn(DropInOptions),
    /// Seconds until the daemon has cleaned up a killed client with 10,000 connected queue pairs.
    KillAndClean {
        #[command(flatten)]
        daemon: DaemonOptions,
    },
}

#[derive(Debug, Args)]
struct DaemonOptions {
    /// Process id of siwd.
    #[arg(long)]
    pid: u32,
    /// Its control socket.
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long, default_value = "siw0")]
    from: String,
    #[arg(long, default_value = "siw1")]
    to: String,
}

#[derive(Debug, Args)]
struct DropInOptions {
    /// Control socket of siwd.
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long)]
    load: Load,
    /// Bytes of a WRITE.
    #[arg(long)]
    size: usize,
    /// Requests in flight, or requests of a round.
    #[arg(long, default_value_t = 16)]
    depth: u32,
    /// Seconds for bandwidth, rounds for call cost.
    #[arg(long)]
    amount: f64,
    /// Number of runs of each; medians count.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The core that both programs run on.
    #[arg(long)]
    core: Option<usize>,
    /// `siwrun`, followed by the program that creates the same load through the drop-in library.
    #[arg(last = true)]
    program: Vec<String>,
}

fn main() -> ExitCode {
    let cli = FigureOptions::parse();
    let command = match &cli.command {
        FiguresCommand::Measure(command) => command,
        FiguresCommand::Record(options) => {
            return match record_figures(options) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("siw-figures: {error}");
                    ExitCode::from(2)
                }
            };
        }
    };
    let good = if cli.low {
        BetterValue::Lower
    } else {
        BetterValue::Higher
    };
    let value = measure_figure(command, good);
    if let Err(error) = &value {
        eprintln!("siw-figures: {} could not be measured: {error}", cli.figure);
    }
    let missing = value.is_err();
    let figure = Figure::new(
        &cli.figure,
        value.ok(),
        &cli.unit,
        cli.floor,
        cli.goal,
        good,
    );
    println!("{}", figure.to_json());
    ExitCode::from(match (missing, figure.holds) {
        (true, _) => 2,
        (false, holds) => u8::from(!holds),
    })
}

fn record_figures(options: &RecordOptions) -> anyhow::Result<()> {
    let path = &options.document;
    let machine = MachineRecord::read();
    let origin = RunOrigin {
        machine: machine.summary(),
        commit: if machine.commit.is_empty() {
            "unknown".into()
        } else {
            machine.commit
        },
        date: options.date.clone(),
    };
    let figures = Figure::from_lines(&read_lines(&options.figures)?)?;
    let transfers = match &options.transfers {
        Some(file) => read_lines(file)?,
        None => String::new(),
    };
    let document = read_lines(path)?;
    let document = replace_section(&document, &options.group, &origin, &figures, &transfers)
        .map_err(|error| anyhow!("{}: {error}", path.display()))?;
    std::fs::write(path, document).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn measure_figure(command: &FigureCommand, good: BetterValue) -> anyhow::Result<f64> {
    match command {
        FigureCommand::Best { file, key } => best_value(&read_lines(file)?, key, good),
        FigureCommand::Ratio {
            file,
            others,
            key,
            others_key,
            lowest,
        } => {
            let better = if *lowest {
                BetterValue::Lower
            } else {
                BetterValue::Higher
            };
            let best = |file, key: &str| best_value(&read_lines(file)?, key, better);
            Ok(best(file, key)? / best(others, others_key.as_ref().unwrap_or(key))?)
        }
        FigureCommand::IdleCpu {
            daemon,
            secs,
            clients,
            connections,
        } => {
            let mut pairs = Vec::new();
            for _ in 0..*clients {
                pairs.push(ClientPair::new(daemon)?.connect_idle(daemon, *connections)?);
            }
            let process = Process::new(daemon.pid);
            // By then, handshakes and their delayed ACKs are over.
            std::thread::sleep(Duration::from_secs(1));
            let (start, used) = (Instant::now(), process.cpu_time()?);
            std::thread::sleep(Duration::from_secs_f64(secs.clamp(0.1, 600.0)));
            let used = process.cpu_time()?.saturating_sub(used);
            Ok(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64())
        }
        FigureCommand::QpChurn {
            daemon,
            secs,
            in_flight,
            tries,
        } => {
            let pair = ClientPair::new(daemon)?;
            let from = find_device(&pair.initiator, &daemon.from)?;
            let to = find_device(&pair.target, &daemon.to)?;
            let ip = to
                .ips
                .first()
                .ok_or_else(|| anyhow!("the target device has no address"))?;
            let time = Duration::from_secs_f64(secs.clamp(0.1, 600.0));
            let mut best = 0f64;
            for _ in 0..*tries {
                let rate = churn::queue_pairs_per_second(
                    &pair.initiator,
                    from.index,
                    &pair.target,
                    (*ip, 0).into(),
                    *in_flight,
                    time,
                )?;
                eprintln!("{rate:.0} queue pairs per second");
                best = best.max(rate);
            }
            Ok(best)
        }
        FigureCommand::QpGrowth {
            daemon,
            count,
            alive,
        } => {
            let process = Process::new(daemon.pid);
            let pair = ClientPair::new(daemon)?;
            // First-time allocations do not count as growth.
            churn::create_and_destroy(&pair.initiator, 2 * alive, *alive)?;
            let before = process.private_bytes()?;
            churn::create_and_destroy(&pair.initiator, *count, *alive)?;
            Ok(process.private_bytes()?.saturating_sub(before) as f64)
        }
        FigureCommand::IdleMemory {
            daemon,
            connections,
        } => {
            let process = Process::new(daemon.pid);
            // Excludes the base memory of a client, and first-time allocations.
            let _first = ClientPair::new(daemon)?.connect_idle(daemon, 8)?;
            let pair = ClientPair::new(daemon)?;
            let before = process.private_bytes()?;
            let pair = pair.connect_idle(daemon, *connections)?;
            let after = process.private_bytes()?;
            let ends = 2 * pair.connections;
            Ok(after.saturating_sub(before) as f64 / f64::from(ends.max(1)))
        }
        FigureCommand::KilledClients {
            daemon,
            count,
            growth,
        } => {
            let grown = victim(daemon)?.kill_clients(*count)?;
            eprintln!("{count} clients killed: {grown:?}");
            let line = serde_json::to_string(&grown)?;
            std::fs::write(growth, line)
                .map_err(|error| anyhow!("{}: {error}", growth.display()))?;
            Ok(grown.descriptors as f64)
        }
        FigureCommand::Registration {
            socket,
            kind,
            size,
            count,
        } => {
            let context = open_context(socket.as_deref())?;
            let time = registration_time(&context, *kind, *size, *count)?;
            Ok(time.as_secs_f64() * 1e6)
        }
        FigureCommand::DropIn(options) => measure_drop_in(options),
        FigureCommand::KillAndClean { daemon } => {
            Ok(victim(daemon)?.kill_large_client()?.as_secs_f64())
        }
    }
}

fn measure_drop_in(options: &DropInOptions) -> anyhow::Result<f64> {
    if let Some(core) = options.core {
        pin_thread(core)?;
    }
    let socket = options.socket.as_deref();
    let contexts = [open_context(socket)?, open_context(socket)?];
    let plan = LoadPlan {
        load: options.load,
        size: options.size,
        depth: options.depth.max(1),
        amount: options.amount,
    };
    compare_drop_in(&contexts, &options.program, &plan, options.rounds)
}

fn victim(daemon: &DaemonOptions) -> anyhow::Result<Victim> {
    let explicit = daemon.socket.as_deref();
    Ok(Victim {
        process: Process::new(daemon.pid),
        observer: open_context(explicit)?,
        socket: siw_shm::control::socket_path(explicit)?,
        program: program_beside("siw-hostile-client")?,
    })
}

fn read_lines(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).map_err(|error| anyhow!("{}: {error}", file.display()))
}

/// Two clients, one at each device.
struct ClientPair {
    initiator: Context,
    target: Context,
    ends: Option<(TransferEnd, TransferEnd)>,
    connections: u32,
}

impl ClientPair {
    fn new(daemon: &DaemonOptions) -> anyhow::Result<ClientPair> {
        let socket = daemon.socket.as_deref().map(Path::new);
        Ok(ClientPair {
            initiator: open_context(socket)?,
            target: open_context(socket)?,
            ends: None,
            connections: 0,
        })
    }

    /// Adds idle connections.
    fn connect_idle(
        mut self,
        daemon: &DaemonOptions,
        connections: u32,
    ) -> anyhow::Result<ClientPair> {
        let plan = MeasurementPlan::for_bandwidth(Operation::Write, 64, 1, connections);
        plan.check_limits()?;
        let mut initiator = TransferEnd::new(&self.initiator, &plan, Role::Initiator)?;
        let mut target = TransferEnd::new(&self.target, &plan, Role::Target)?;
        let from = find_device(&self.initiator, &daemon.from)?;
        let to = find_device(&self.target, &daemon.to)?;
        session::connect_locally(&mut initiator, &from, &mut target, &to)?;
        self.ends = Some((initiator, target));
        self.connections = connections;
        Ok(self)
    }
}
