//! Writes CONFORMANCE.md: `cargo run -p siw-iwarp --example conformance`.
//!
//! It runs the numbered tests, those of this crate and those against a running siwd (which need root).
//! With `--names-only` it runs none and brings the list in step with the names of the tests; a test that
//! fails is then found by the suites.
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
    let report = if names_only {
        conformance::render(|_| Some(true))
    } else {
        let results = run_suites()?;
        conformance::render(|name| results.get(name).copied())
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("CONFORMANCE.md");
    std::fs::write(path, &report)?;
    println!("{}", report.lines().last().unwrap_or_default());
    Ok(())
}

/// Whether each test passed, by name.
fn run_suites() -> std::io::Result<BTreeMap<String, bool>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut results = BTreeMap::new();
    let mut errors = String::new();
    for suite in SUITES {
        let output = Command::new(&cargo)
            .args(["test", "--no-fail-fast"])
            .args(suite)
            .output()?;
        errors += &String::from_utf8_lossy(&output.stderr);
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some(line) = line.strip_prefix("test ") else {
                continue;
            };
            if let Some((path, outcome)) = line.split_once(" ... ") {
                let name = path.rsplit("::").next().unwrap_or(path);
                let has_passed = outcome == "ok";
                // Tests of the same name: all of them have to pass.
                *results.entry(name.to_string()).or_insert(true) &= has_passed;
            }
        }
    }
    if results.is_empty() {
        eprint!("{errors}");
        return Err(std::io::Error::other("the tests did not run"));
    }
    Ok(results)
}
