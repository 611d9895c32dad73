//! Runs seeds until one fails or all are done:
//! `cargo run -p siw-tcp --release --example soak -- --seeds 1000000 --from 0 --threads 4`.
//!
//! Without `--transfers` and `--shared` they are those of `siw_tcp_sim::seeds`: a seed that fails is
//! printed with its last frames and the command that runs it again; `--describe` prints what a seed
//! draws, and `--varied` counts from `seeds::FIRST_VARIED_SEED`, for peers and paths of other kinds too. With
//! `--transfers` they are the bulk transfers of `tests/stack/impaired.rs`, of which one that fails
//! leaves a pcapng in `--dir` (here). With `--shared` they are flows that share a drawn path
//! (`SharedPath::draw`); the sums are of thousandths.

#[path = "../tests/common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::scenario;
use siw_tcp_sim::SharedPath;
use siw_tcp_sim::seeds::{self, SeedOutcome};

const USAGE: &str = "usage: soak [--seeds N] [--from SEED] [--threads T] [--frames N] [--keep-going] \
                     [--json] [--describe] [--varied] [--transfers [--dir PATH]] [--shared]";

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_secs(10);

struct SoakArgs {
    seeds: u64,
    from: u64,
    threads: usize,
    frames: usize,
    dir: PathBuf,
    keep_going: bool,
    json: bool,
    describe: bool,
    transfers: bool,
    shared: bool,
}

fn parse_args() -> Result<SoakArgs, String> {
    let mut args = SoakArgs {
        seeds: 100_000,
        from: 0,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        frames: seeds::FRAMES_SHOWN,
        dir: PathBuf::from("."),
        keep_going: false,
        json: false,
        describe: false,
        transfers: false,
        shared: false,
    };
    let mut is_varied = false;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || -> Result<u64, String> {
            let value = words.next().ok_or(format!("{word} wants a number"))?;
            value
                .parse()
                .map_err(|_| format!("{word} {value}: not a number"))
        };
        match word.as_str() {
            "--seeds" => args.seeds = number()?,
            "--from" => args.from = number()?,
            "--threads" => args.threads = number()?.clamp(1, 1024) as usize,
            "--frames" => args.frames = number()? as usize,
            "--dir" => args.dir = words.next().ok_or("--dir wants a folder")?.into(),
            "--keep-going" => args.keep_going = true,
            "--json" => args.json = true,
            "--describe" => args.describe = true,
            "--varied" => is_varied = true,
            "--transfers" => args.transfers = true,
            "--shared" => args.shared = true,
            _ => return Err(format!("{word} is unknown\n{USAGE}")),
        }
    }
    if is_varied && args.from < seeds::FIRST_VARIED_SEED {
        args.from += seeds::FIRST_VARIED_SEED;
    }
    Ok(args)
}

/// What is reported of a run, by name.
type CounterRows = Vec<(&'static str, u64)>;

/// Runs a seed: its counters, or why it failed, which has been printed.
fn run_seed(args: &SoakArgs, seed: u64) -> Result<CounterRows, String> {
    if args.transfers {
        return match scenario::run(seed, None, &args.dir) {
            Ok(outcome) => Ok(outcome.rows().to_vec()),
            Err(failure) => {
                eprintln!("{failure}");
                Err(failure.why)
            }
        };
    }
    if args.shared {
        let path = SharedPath::draw(seed);
        let shares = path.measure();
        shares
            .judge()
            .inspect_err(|why| eprintln!("seed {seed}, {path:?}: {why}"))?;
        return Ok(shares.rows().to_vec());
    }
    match seeds::run_seed(seed, args.frames) {
        Ok(outcome) => {
            let rows = SeedOutcome::rows(&outcome).into_iter();
            Ok(rows.chain(outcome.varied_rows()).collect())
        }
        Err(failure) => {
            eprintln!("{failure}");
            Err(failure.why)
        }
    }
}

fn add_up(sum: &mut CounterRows, counters: CounterRows) {
    if sum.is_empty() {
        *sum = counters;
        return;
    }
    for (total, (_, value)) in sum.iter_mut().zip(counters) {
        total.1 += value;
    }
}

fn main() -> ExitCode {
    let args = match parse_args() {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    if args.describe {
        if args.shared {
            println!("{:#?}", SharedPath::draw(args.from));
        } else {
            println!("{}", seeds::describe_seed(args.from));
        }
        return ExitCode::SUCCESS;
    }
    let end = args.from.saturating_add(args.seeds);
    let (next, done) = (AtomicU64::new(args.from), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    let results = Mutex::new((CounterRows::new(), Vec::<(u64, String)>::new()));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let result = run_seed(&args, seed);
                    let Ok(mut results) = results.lock() else {
                        break;
                    };
                    match result {
                        Ok(counters) => add_up(&mut results.0, counters),
                        Err(why) => {
                            results.1.push((seed, why));
                            stop.fetch_or(!args.keep_going, Ordering::Relaxed);
                        }
                    }
                    drop(results);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let mut last_report = Instant::now();
            while !stop.load(Ordering::Relaxed) && done.load(Ordering::Relaxed) < args.seeds {
                std::thread::sleep(Duration::from_millis(50));
                if last_report.elapsed() >= REPORT_EVERY {
                    last_report = Instant::now();
                    let count = done.load(Ordering::Relaxed);
                    eprintln!("{count} of {} seeds, {:?}", args.seeds, start.elapsed());
                }
            }
        });
    });
    let Ok((sum, failures)) = results.into_inner() else {
        return ExitCode::FAILURE;
    };
    report(&args, done.into_inner(), start.elapsed(), &sum, &failures);
    if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(
    args: &SoakArgs,
    seeds: u64,
    took: Duration,
    sum: &CounterRows,
    failures: &[(u64, String)],
) {
    let mut rows = vec![
        ("seeds", seeds),
        ("from", args.from),
        ("milliseconds", took.as_millis() as u64),
    ];
    rows.extend(sum);
    rows.push(("failures", failures.len() as u64));
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(name, value)| format!("\"{name}\":{value}"))
            .collect();
        let failed: Vec<_> = failures
            .iter()
            .map(|(seed, why)| {
                let why = format!("{why:?}").replace("\\'", "'");
                format!("{{\"seed\":{seed},\"why\":{why}}}")
            })
            .collect();
        println!("{{{},\"failed\":[{}]}}", rows.join(","), failed.join(","));
        return;
    }
    for (name, value) in rows {
        println!("{name:>16} {value}");
    }
    for (seed, why) in failures {
        println!("seed {seed}: {why}");
    }
}
