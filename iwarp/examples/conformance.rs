//! Writes TESTS.md: `cargo run -p siw-iwarp --example conformance`.
//!
//! Runs the numbered tests, those of this crate and those against a running siwd (which need root).
//! If one fails or is skipped, the file is left unchanged, so it never shows a pass for a test that
//! did not run. With `--names-only` it runs no tests and only updates the list to the names of the
//! tests; failing tests are then found by the suites, skipped ones by CI.
#[path = "../tests/common/conformance.rs"]
mod conformance;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const SUITES: [&[&str]; 2] = [
    &["-p", "siw-iwarp"],
    &["-p", "siwd", "--test", "conformance"],
];

fn main() -> std::io::Result<()> {
    let names_only = std::env::args().any(|arg| arg == "--names-only");
    if !names_only {
        let results = run_suites()?;
        let wrong = results
            .iter()
            .filter(|(_, outcome)| **outcome != conformance::TestOutcome::Passed);
        let wrong: Vec<_> = wrong.collect();
        for (name, outcome) in &wrong {
            eprintln!("{name}: {outcome:?}");
        }
        if !wrong.is_empty() {
            let count = wrong.len();
            let text = format!("{count} tests failed or were skipped; TESTS.md stays as it is");
            return Err(std::io::Error::other(text));
        }
    }
    let report = conformance::render();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("TESTS.md");
    std::fs::write(path, &report)?;
    println!("{}", report.lines().last().unwrap_or_default());
    Ok(())
}

/// Runs the suites; returns the outcome of each numbered test by name.
fn run_suites() -> std::io::Result<BTreeMap<String, conformance::TestOutcome>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut results = BTreeMap::new();
    let mut errors = String::new();
    for suite in SUITES {
        let output = Command::new(&cargo)
            .args(["test", "--no-fail-fast"])
            .args(suite)
            .args(["--", "--show-output"])
            .output()?;
        errors += &String::from_utf8_lossy(&output.stderr);
        conformance::read_outcomes(&String::from_utf8_lossy(&output.stdout), &mut results);
    }
    if results.is_empty() {
        eprint!("{errors}");
        return Err(std::io::Error::other("the tests did not run"));
    }
    Ok(results)
}
