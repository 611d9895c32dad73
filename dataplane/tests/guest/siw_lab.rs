//! Linux siw as a target of siw-lab that runs rping only: the smoke profile, in both roles.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::common::guest::{Guest, NEWER_SUITE, lacks_guest, lacks_newer_guest};
use crate::common::net::Netns;
use crate::common::siw_lab;

const PEER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../benches/lab/peers/siw-6.1.toml"
);
/// rping's persistent server forgets a connection if the next one comes before its main thread has
/// run, which happens in a guest on a busy machine: the case then waits in vain, and runs again.
const ATTEMPTS: usize = 5;

/// Runs cases of the smoke profile, or all; returns the number of results, those with another
/// verdict than expected, and what siw-lab said.
fn run(
    ns: &Netns,
    guest: &Guest,
    cases: &BTreeSet<String>,
    output: &Path,
) -> (usize, BTreeSet<String>, String) {
    let client = guest.shell_command("rping -c -a {address} -p {port} -C 1000");
    let mut lab = Command::new(siw_lab());
    lab.args(["run", "--target", "10.77.0.2", "--interface", "lab0"])
        .args(["--address", "10.77.0.8", "--client", &client])
        .args(["--profile", "smoke", "--jobs", "1", "--patience", "8"])
        .args(["--expect", PEER, "--report", "json", "--output"])
        .arg(output);
    if !cases.is_empty() {
        let cases: Vec<&str> = cases.iter().map(String::as_str).collect();
        lab.args(["--case", &cases.join(",")]);
    }
    let mut attempts = 1..=ATTEMPTS;
    let (run, said) = loop {
        let run = ns.run(|| lab.output().unwrap());
        let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        let said = said.into_owned();
        // The first conversation may be one that rping forgets.
        let is_forgotten = said.contains("no conversation with the target");
        if !is_forgotten || attempts.next() == Some(ATTEMPTS) {
            break (run, said);
        }
    };
    // 1 says that a verdict is not the expected one.
    assert!(matches!(run.status.code(), Some(0 | 1)), "{said}");
    let report = std::fs::read(output.join("run.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let results = report["results"].as_array().unwrap();
    let news = results.iter().filter(|result| result["news"] == true);
    let news = news.map(|result| result["case"].as_str().unwrap().to_owned());
    (results.len(), news.collect(), said)
}

/// Runs the smoke profile against a guest that boots with further arguments.
fn smoke(more: &[&str]) {
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &[&["--ip", "10.77.0.2/24"], more].concat());
    let _server = guest.start("while :; do rping -s -P -p 7174; done");
    guest.run("wait-listen 7174");
    let output = tempfile::tempdir().unwrap();
    let (count, mut left, mut said) = run(&ns, &guest, &BTreeSet::new(), output.path());
    assert!(count >= 30, "{said}");
    // More than a guest that pauses explains.
    assert!(left.len() * 2 < count, "{said}");
    for _ in 1..ATTEMPTS {
        if left.is_empty() {
            return;
        }
        (_, left, said) = run(&ns, &guest, &left, output.path());
    }
    assert!(left.is_empty(), "{said}");
}

#[test]
fn siw_lab_finds_what_its_peer_file_says_of_linux_siw() {
    skip_if!(lacks_guest());
    smoke(&[]);
}

#[test]
fn siw_lab_finds_what_its_peer_file_says_of_a_newer_linux_siw() {
    skip_if!(lacks_newer_guest());
    smoke(&["--suite", NEWER_SUITE]);
}
