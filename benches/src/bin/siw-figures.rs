//! `siw-figures`: measures one figure and prints its line; called by the groups of
//! `./benches/figures`. Exit code 0: the floor holds; 1: not; 2: not measured.
#![forbid(unsafe_code)]

use clap::{Args, Parser, Subcommand};
use siw::Context;
use siw_bench::daemon::Process;
use siw_bench::end::{End, Role, device, open};
use siw_bench::figure::{Figure, Good, best};
use siw_bench::plan::{Mode, Op, Plan};
use siw_bench::{churn, session};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(version, about = "Measures one figure and prints it as a line of JSON")]
struct Cli {
    #[command(subcommand)]
    what: What,

    /// Name of the figure.
    #[arg(long, global = true, default_value = "figure")]
    figure: String,

    #[arg(long, global = true, default_value = "")]
    unit: String,

    /// The least that is good; with --low the most.
    #[arg(long, global = true, default_value_t = 0.0)]
    floor: f64,

    #[arg(long, global = true, default_value_t = 0.0)]
    goal: f64,

    /// Small values are good.
    #[arg(long, global = true)]
    low: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The best of the runs whose JSON lines are in a file.
    Best {
        file: PathBuf,
        /// Which number: gbps, lat_us.p50.
        #[arg(long)]
        key: String,
    },
    /// The best rate of some runs by the best of others: what the others cost.
    Ratio {
        file: PathBuf,
        others: PathBuf,
        /// Which number: gbps.
        #[arg(long)]
        key: String,
    },
    /// Percent of a core that the daemon uses while clients are silent.
    IdleCpu {
        #[command(flatten)]
        daemon: Daemon,
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
        daemon: Daemon,
        #[arg(long, default_value_t = 3.0)]
        secs: f64,
        /// Connections on their way at a time.
        #[arg(long, default_value_t = 64)]
        in_flight: u32,
        /// The best of so many tries counts: the machine may have others on it.
        #[arg(long, default_value_t = 1)]
        tries: u32,
    },
    /// Private bytes that the daemon grows by while queue pairs are created and destroyed.
    QpGrowth {
        #[command(flatten)]
        daemon: Daemon,
        #[arg(long, default_value_t = 100_000)]
        count: u32,
        /// Queue pairs that exist at a time.
        #[arg(long, default_value_t = 64)]
        alive: u32,
    },
    /// Private bytes of the daemon for each end of an idle connection.
    IdleMemory {
        #[command(flatten)]
        daemon: Daemon,
        #[arg(long, default_value_t = 1000)]
        connections: u32,
    },
}

#[derive(Debug, Args)]
struct Daemon {
    /// Process number of siwd.
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

fn main() -> ExitCode {
    let cli = Cli::parse();
    let good = if cli.low { Good::Low } else { Good::High };
    let value = measure(&cli, good);
    if let Err(e) = &value {
        eprintln!("siw-figures: {} could not be measured: {e}", cli.figure);
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
    println!("{}", figure.json());
    ExitCode::from(match (missing, figure.holds) {
        (true, _) => 2,
        (false, holds) => u8::from(!holds),
    })
}

fn measure(cli: &Cli, good: Good) -> Result<f64, String> {
    match &cli.what {
        What::Best { file, key } => best(&lines(file)?, key, good),
        What::Ratio { file, others, key } => {
            let rate = |f| best(&lines(f)?, key, Good::High);
            Ok(rate(file)? / rate(others)?)
        }
        What::IdleCpu {
            daemon,
            secs,
            clients,
            connections,
        } => {
            let mut pairs = Vec::new();
            for _ in 0..*clients {
                pairs.push(Pair::new(daemon)?.connect(daemon, *connections)?);
            }
            let process = Process::new(daemon.pid);
            // Handshakes and their delayed ACKs are over then.
            std::thread::sleep(Duration::from_secs(1));
            let (start, used) = (Instant::now(), process.cpu_time()?);
            std::thread::sleep(Duration::from_secs_f64(secs.clamp(0.1, 600.0)));
            let used = process.cpu_time()?.saturating_sub(used);
            Ok(100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64())
        }
        What::QpChurn {
            daemon,
            secs,
            in_flight,
            tries,
        } => {
            let pair = Pair::new(daemon)?;
            let from = device(&pair.a, &daemon.from)?;
            let to = device(&pair.b, &daemon.to)?;
            let ip = to.ips.first().ok_or("the target device has no address")?;
            let time = Duration::from_secs_f64(secs.clamp(0.1, 600.0));
            let mut best = 0f64;
            for _ in 0..*tries {
                let rate = churn::queue_pairs_per_second(
                    &pair.a,
                    from.index,
                    &pair.b,
                    (*ip, 0).into(),
                    *in_flight,
                    time,
                )?;
                eprintln!("{rate:.0} queue pairs per second");
                best = best.max(rate);
            }
            Ok(best)
        }
        What::QpGrowth {
            daemon,
            count,
            alive,
        } => {
            let process = Process::new(daemon.pid);
            let pair = Pair::new(daemon)?;
            // First allocations are no growth.
            churn::create_and_destroy(&pair.a, 2 * alive, *alive)?;
            let before = process.private_bytes()?;
            churn::create_and_destroy(&pair.a, *count, *alive)?;
            Ok(process.private_bytes()?.saturating_sub(before) as f64)
        }
        What::IdleMemory {
            daemon,
            connections,
        } => {
            let process = Process::new(daemon.pid);
            // What every client costs, and first allocations, are no connection's.
            let _first = Pair::new(daemon)?.connect(daemon, 8)?;
            let pair = Pair::new(daemon)?;
            let before = process.private_bytes()?;
            let pair = pair.connect(daemon, *connections)?;
            let after = process.private_bytes()?;
            let ends = 2 * pair.connections;
            Ok(after.saturating_sub(before) as f64 / f64::from(ends.max(1)))
        }
    }
}

fn lines(file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))
}

/// Two clients, one at each device.
struct Pair {
    a: Context,
    b: Context,
    ends: Option<(End, End)>,
    connections: u32,
}

impl Pair {
    fn new(daemon: &Daemon) -> Result<Pair, String> {
        let socket = daemon.socket.as_deref().map(Path::new);
        Ok(Pair {
            a: open(socket)?,
            b: open(socket)?,
            ends: None,
            connections: 0,
        })
    }

    /// With connections that nothing is sent on.
    fn connect(mut self, daemon: &Daemon, connections: u32) -> Result<Pair, String> {
        let plan = Plan {
            mode: Mode::Bw,
            op: Op::Write,
            size: 64,
            depth: 1,
            qps: connections,
            verify: false,
            inline: false,
        };
        plan.check()?;
        let mut a = End::new(&self.a, &plan, Role::Initiator)?;
        let mut b = End::new(&self.b, &plan, Role::Target)?;
        let from = device(&self.a, &daemon.from)?;
        let to = device(&self.b, &daemon.to)?;
        session::both(&mut a, &from, &mut b, &to)?;
        self.ends = Some((a, b));
        self.connections = connections;
        Ok(self)
    }
}
