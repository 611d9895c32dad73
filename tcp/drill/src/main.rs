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
struct Args {
    /// Scripts; a directory stands for every .pkt below it.
    #[arg(required = true)]
    scripts: Vec<PathBuf>,
    /// One JSON object a script: file, passed, and for a failure line and message.
    #[arg(long)]
    json: bool,
    /// Write the packets of the run (of the last script, if there are several) to this file.
    #[arg(long, value_name = "FILE")]
    pcapng: Option<PathBuf>,
    /// Print every packet in the notation of scripts.
    #[arg(long, short)]
    verbose: bool,
}

fn collect(path: PathBuf, out: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !path.is_dir() {
        out.push(path);
        return Ok(());
    }
    let mut inside: Vec<_> = std::fs::read_dir(path)?
        .map(|e| e.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    inside.sort();
    for p in inside {
        if p.is_dir() || p.extension().is_some_and(|e| e == "pkt") {
            collect(p, out)?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("siw-drill: {e}");
            ExitCode::from(2)
        }
    }
}

/// Whether all scripts passed.
fn run(args: Args) -> Result<bool, String> {
    let mut scripts = vec![];
    for p in args.scripts {
        collect(p.clone(), &mut scripts).map_err(|e| format!("{}: {e}", p.display()))?;
    }
    let mut all = true;
    for path in scripts {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{name}: {e}"))?;
        let outcome = siw_drill::run(&name, &text);
        if args.verbose {
            outcome.trace.iter().for_each(|l| println!("{l}"));
        }
        let failure = outcome.result.err();
        all &= failure.is_none();
        if args.json {
            let line = failure.as_ref().map(|f| f.line);
            let message = failure.as_ref().map(|f| f.message.as_str());
            let passed = failure.is_none();
            println!(
                "{}",
                json!({ "file": name, "passed": passed, "line": line, "message": message })
            );
        } else {
            match failure {
                Some(f) => eprintln!("FAIL {f}"),
                None => println!("ok   {name}"),
            }
        }
        if let Some(file) = &args.pcapng {
            let out = File::create(file).map_err(|e| format!("{}: {e}", file.display()))?;
            siw_drill::write_pcapng(BufWriter::new(out), &outcome.packets)
                .map_err(|e| format!("{}: {e}", file.display()))?;
        }
    }
    Ok(all)
}
