//! siwd in a network namespace of the run's own: the smoke profile against it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// siwd, with the programs and libraries that the run needs, built with the profile of this test.
fn siwd() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_siw-lab")).parent().unwrap();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    for target in [
        &["siwd", "--bin", "siwd"][..],
        &["siw-preload", "--lib", "--all-features"],
        &["siw-mirror", "--lib", "--all-features"],
        &["siw-verbs", "--lib", "--bins"],
    ] {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--profile", profile, "--package"])
            .args(target)
            .arg("--target-dir")
            .arg(folder.parent().unwrap())
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{said}");
    }
    folder.join("siwd")
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
    let siwd = siwd();
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
