//! Runs packetdrill scripts against siwd's TCP in virtual time.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;

/// Runs packetdrill scripts against siwd's TCP, in virtual time. Exit code 1: a script failed;
/// 2: a file could not be read or written.
#[derive(Parser)]
#[command(version)]
struct DrillArgs {
    /// Scripts; a directory stands for every .pkt below it.
    #[arg(required = true)]
    scripts: Vec<PathBuf>,
    /// Print one JSON object for each script: file, passed, and for a failure line and message.
    #[arg(long)]
    json: bool,
    /// Write the packets of the run (of the last script, if there are several) to this file.
    #[arg(long, value_name = "FILE")]
    pcapng: Option<PathBuf>,
    /// Print every packet in the notation of scripts.
    #[arg(long, short)]
    verbose: bool,
}

/// Adds a script, or every `.pkt` file below a directory in the order of names.
fn collect_scripts(path: PathBuf, out: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !path.is_dir() {
        out.push(path);
        return Ok(());
    }
    let mut inside: Vec<_> = std::fs::read_dir(path)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    inside.sort();
    for path in inside {
        if path.is_dir() || path.extension().is_some_and(|entry| entry == "pkt") {
            collect_scripts(path, out)?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let args = DrillArgs::parse();
    match run_scripts(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("siw-drill: {message}");
            ExitCode::from(2)
        }
    }
}

/// Runs the scripts and reports each. Returns whether all passed.
fn run_scripts(args: DrillArgs) -> Result<bool, String> {
    let mut scripts = vec![];
    for path in args.scripts {
        collect_scripts(path.clone(), &mut scripts)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let mut all_passed = true;
    for path in scripts {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{name}: {error}"))?;
        let outcome = siw_drill::run_script(&name, &text);
        if args.verbose {
            outcome.trace.iter().for_each(|line| println!("{line}"));
        }
        let failure = outcome.result.err();
        all_passed &= failure.is_none();
        if args.json {
            let line = failure.as_ref().map(|failure| failure.line);
            let message = failure.as_ref().map(|failure| failure.message.as_str());
            let passed = failure.is_none();
            println!(
                "{}",
                json!({ "file": name, "passed": passed, "line": line, "message": message })
            );
        } else {
            match failure {
                Some(failure) => eprintln!("FAIL {failure}"),
                None => println!("ok   {name}"),
            }
        }
        if let Some(file) = &args.pcapng {
            let out = File::create(file).map_err(|error| format!("{}: {error}", file.display()))?;
            siw_drill::write_pcapng(BufWriter::new(out), &outcome.packets)
                .map_err(|error| format!("{}: {error}", file.display()))?;
        }
    }
    Ok(all_passed)
}
