//! siwd in a network namespace of the run's own: the smoke profile against it, and the mutants of it that
//! the cases have to find.

use std::path::{Path, PathBuf};
use std::process::Command;

use siw_lab::mutate;

/// siwd or, built from a copy of the source with mutants, `siwd-mutants`, with the programs and libraries
/// that the run needs, built with the profile of this test.
fn siwd(program: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_siw-lab")).parent().unwrap();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let copy = folder.with_file_name("siwd-mutants");
    if program == "siwd-mutants" {
        mutate::write_copy(&mutate::patches().unwrap(), source, &copy).unwrap();
    }
    for target in [
        &["siwd", "--bin", program][..],
        &["siw-preload", "--lib", "--all-features"],
        &["siw-mirror", "--lib", "--all-features"],
        &["siw-verbs", "--lib", "--bins"],
    ] {
        let is_copied = target.contains(&"siwd-mutants");
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--profile", profile, "--package"])
            .args(target)
            .arg("--target-dir")
            .arg(folder.parent().unwrap())
            .current_dir(if is_copied { copy.as_path() } else { source })
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{said}");
    }
    folder.join(program)
}

fn is_possible(needed: &str) -> bool {
    if !nix::unistd::geteuid().is_root() {
        println!("\nskipped: namespaces and interfaces need root");
        return false;
    }
    if !Path::new(needed).exists() {
        println!("\nskipped: no {needed}");
        return false;
    }
    true
}

/// Compiles the agent into a folder.
fn agent(folder: &Path) -> PathBuf {
    let program = folder.join("siw-lab-agent");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("agent/siw-lab-agent.c");
    let compiled = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&program, &source])
        .args(["-libverbs", "-lrdmacm"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");
    program
}

/// Runs the smoke profile, and the cases with the agent, over a link.
fn smoke(link: &str, needed: &str) {
    if !is_possible(needed) {
        return;
    }
    let siwd = siwd("siwd");
    let output = tempfile::tempdir().unwrap();
    let peer = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/siwd.toml");
    let got = Command::new(env!("CARGO_BIN_EXE_siw-lab"))
        .args([
            "run",
            "--via",
            "siwd",
            "--profile",
            "smoke",
            "--report",
            "html,junit",
            "--seed",
            "1",
            "--link",
            link,
            "--siwd",
        ])
        .arg(siwd)
        .arg("--agent")
        .arg(agent(output.path()))
        .arg("--expect")
        .arg(peer)
        .arg("--output")
        .arg(output.path())
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&got.stdout).into_owned() + &String::from_utf8_lossy(&got.stderr);
    assert_eq!(got.status.code(), Some(0), "{said}");
    for report in ["run.json", "run.html", "junit.xml"] {
        assert!(output.path().join(report).is_file(), "{report} is missing");
    }
}

#[test]
fn siwd_passes_the_smoke_profile_over_a_veth_pair() {
    smoke("veth", "/proc/self/ns/net");
}

/// The judge is judged: without a mutant of siwd its case passes each time, with it the case fails each time.
#[test]
fn each_mutant_of_siwd_turns_its_case_red() {
    if !is_possible("/proc/self/ns/net") {
        return;
    }
    let siwd = siwd("siwd-mutants");
    let output = tempfile::tempdir().unwrap();
    let got = Command::new(env!("CARGO_BIN_EXE_siw-lab"))
        .args(["mutants", "--seed", "1", "--siwd"])
        .arg(siwd)
        .arg("--output")
        .arg(output.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&got.stdout);
    let error = String::from_utf8_lossy(&got.stderr);
    let survived: Vec<_> = said.lines().filter(|l| l.starts_with("SURVIVED")).collect();
    assert_eq!(got.status.code(), Some(0), "{survived:#?}{error}");
}
