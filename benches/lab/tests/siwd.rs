//! The smoke profile against siwd, over a veth pair in a network namespace of the run's own.

use std::path::{Path, PathBuf};
use std::process::Command;

/// siwd with the programs and libraries that the run needs, built with the profile of this test.
fn siwd() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_siw-lab")).parent().unwrap();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    for target in [
        ["siwd", "--bin", "siwd"],
        ["siw-preload", "--lib", "--all-features"],
        ["siw-mirror", "--lib", "--all-features"],
        ["siw-verbs", "--lib", "--bins"],
    ] {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--profile", profile, "--package"])
            .args(target)
            .arg("--target-dir")
            .arg(folder.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{said}");
    }
    folder.join("siwd")
}

#[test]
fn siwd_passes_the_smoke_profile_as_expected() {
    if !nix::unistd::geteuid().is_root() {
        println!("\nskipped: namespaces and interfaces need root");
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
            "--siwd",
        ])
        .arg(siwd)
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
fn bad_input_ends_with_status_2_and_a_message() {
    let lines = [
        ("run", "no target"),
        ("run --target 10.0.0.9", "--interface is missing"),
        (
            "run --target 10.0.0.9 --interface nonesuch0 --address 10.0.0.8",
            "interface nonesuch0 does not exist",
        ),
        (
            "run --target 8.8.8.8 --interface lo --address 10.0.0.8",
            "not a private address",
        ),
        (
            "run --target 10.0.0.9 --interface lo --address 127.0.0.1",
            "belongs to this machine",
        ),
        (
            "run --via reference --case XYZ-1",
            "case XYZ-1 does not exist",
        ),
        (
            "run --via reference --group xyz",
            "group xyz does not exist",
        ),
        (
            "run --via reference --level never",
            "level never does not exist",
        ),
        (
            "run --via reference --expect /nonesuch.toml",
            "cannot read /nonesuch.toml",
        ),
        (
            "run --via siwd --siwd /nonesuch",
            "/nonesuch does not exist",
        ),
        ("run --target 300.1.1.1", "invalid value"),
        ("explain XYZ-1", "case XYZ-1 does not exist"),
        ("check-cases /nonesuch", "cannot read /nonesuch"),
        ("replay /nonesuch", "cannot read /nonesuch/run.json"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (line, message) in lines {
        let got = Command::new(env!("CARGO_BIN_EXE_siw-lab"))
            .current_dir(folder.path())
            .args(line.split(' '))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&got.stderr);
        assert_eq!(got.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(message), "{line}: {said}");
    }
}
