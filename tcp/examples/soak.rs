//! Runs seeds of the impaired network until one fails or all are done:
//! `cargo run -p siw-tcp --release --example soak -- --seeds 1000000 --from 0 --threads 4`.
//! A seed that fails is printed with its replay command and leaves a pcapng in `--dir` (here).

#[path = "../tests/common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::scenario::{self, ScenarioFailure, ScenarioOutcome};

const USAGE: &str = "usage: soak [--seeds N] [--from S] [--threads T] [--dir PATH] [--keep-going] \
                     [--json]";

struct SoakArgs {
    seeds: u64,
    from: u64,
    threads: usize,
    dir: PathBuf,
    keep_going: bool,
    json: bool,
}

fn parse_args() -> Result<SoakArgs, String> {
    let mut args = SoakArgs {
        seeds: 100_000,
        from: 0,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        dir: PathBuf::from("."),
        keep_going: false,
        json: false,
    };
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
            "--dir" => args.dir = words.next().ok_or("--dir wants a folder")?.into(),
            "--keep-going" => args.keep_going = true,
            "--json" => args.json = true,
            _ => return Err(format!("{word} is unknown\n{USAGE}")),
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    let args = match parse_args() {
        Ok(args) => args,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let end = args.from.saturating_add(args.seeds);
    let (next, done, stop) = (
        AtomicU64::new(args.from),
        AtomicU64::new(0),
        AtomicBool::new(false),
    );
    let sum = Mutex::new((ScenarioOutcome::default(), Vec::<ScenarioFailure>::new()));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let result = scenario::run(seed, None, &args.dir);
                    let Ok(mut sum) = sum.lock() else { break };
                    match result {
                        Ok(outcome) => sum.0.add(&outcome),
                        Err(failure) => {
                            eprintln!("{failure}");
                            sum.1.push(failure);
                            stop.fetch_or(!args.keep_going, Ordering::Relaxed);
                        }
                    }
                    drop(sum);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(|| {
            let mut last_report = Instant::now();
            while !stop.load(Ordering::Relaxed) && done.load(Ordering::Relaxed) < args.seeds {
                std::thread::sleep(Duration::from_millis(50));
                if last_report.elapsed() >= Duration::from_secs(10) {
                    last_report = Instant::now();
                    let count = done.load(Ordering::Relaxed);
                    eprintln!("{count} of {} seeds, {:?}", args.seeds, start.elapsed());
                }
            }
        });
    });
    let Ok((sum, failures)) = sum.into_inner() else {
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
    sum: &ScenarioOutcome,
    failures: &[ScenarioFailure],
) {
    let rows = [
        ("seeds", seeds),
        ("from", args.from),
        ("milliseconds", took.as_millis() as u64),
        ("bytes", sum.bytes),
        ("frames", sum.frames),
        ("lost", sum.lost),
        ("retransmits", sum.retransmits),
        ("timeouts", sum.timeouts),
        ("windows_shrunk", sum.shrunk),
        ("packets_too_big", sum.too_big),
        ("paths_narrowed", sum.narrowed),
        ("buffers_pruned", sum.pruned),
        ("failures", failures.len() as u64),
    ];
    if args.json {
        let rows = rows.map(|(k, value)| format!("\"{k}\":{value}")).join(",");
        let quote = |scope: &str| format!("{scope:?}").replace("\\'", "'");
        let failed = failures.iter().map(|failure| {
            let file = failure
                .pcapng
                .as_ref()
                .map_or("null".into(), |path| quote(&path.to_string_lossy()));
            let replay = quote(&failure.replay);
            format!(
                "{{\"seed\":{},\"replay\":{replay},\"pcapng\":{file}}}",
                failure.seed
            )
        });
        let failed = failed.collect::<Vec<_>>().join(",");
        println!("{{{rows},\"failed\":[{failed}]}}");
        return;
    }
    for (k, value) in rows {
        println!("{k:>16} {value}");
    }
}
