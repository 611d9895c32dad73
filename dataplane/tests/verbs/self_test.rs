//! `siwrun --self-test`: every capability, limit and operation that devices advertise, on the embedded
//! loopback.

use crate::common::Daemon;
use crate::common::siwrun;
use serde_json::Value;
use std::process::{Command, Output};

fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(siwrun());
    command.arg("--socket").arg(&daemon.socket);
    command.arg("--self-test").args(arguments).output().unwrap()
}

#[test]
fn everything_that_is_advertised_works() {
    let daemon = Daemon::loopback();
    let out = run(&daemon, &["--json"]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{said}");
    let document: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(document["works"], true);
    let checks = document["checks"].as_array().unwrap();
    assert!(checks.len() > 30, "{said}");
    for check in checks {
        // The default persona has no datagrams.
        let is_advertised = check["name"] != "UD, max_ah";
        let wanted = if is_advertised {
            "ok"
        } else {
            "not advertised"
        };
        assert_eq!(check["result"], wanted, "{check}");
    }
}

/// Nothing but the persona and datagrams differs.
#[test]
fn every_persona_passes_and_is_named() {
    let daemon = Daemon::loopback();
    for persona in ["iwarp", "roce", "ib", "unspecified"] {
        let out = run(&daemon, &["--persona", persona]);
        let said = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success(), "{said}");
        let mut rows = said.lines().map(|line| line.split_whitespace());
        assert!(rows.any(|row| row.eq(["persona", "ok", persona])), "{said}");
        let has_datagrams = said
            .lines()
            .any(|line| line.starts_with("UD, max_ah") && line.contains(" ok "));
        assert_eq!(has_datagrams, persona != "iwarp", "{said}");
    }
}

#[test]
fn one_device_is_its_own_peer() {
    let daemon = Daemon::loopback();
    let out = run(&daemon, &["--devices", "siw1"]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{said}");
    assert!(
        said.contains("siw1 and siw1:") && said.contains(" 0 failed"),
        "{said}"
    );
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let daemon = Daemon::loopback();
    let out = run(&daemon, &["--devices", "siw7"]);
    assert!(!out.status.success());
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("no device siw7"), "{said}");
}

/// A low limit of the daemon is reported as one that siwd keeps.
#[test]
fn limits_are_those_of_the_daemon() {
    let low = "[limits]\nqueue_pairs_per_client = 40\nwork_requests = 128\n";
    let daemon = Daemon::start(&format!("{low}{}", crate::common::LOOPBACK), &[]);
    let out = run(&daemon, &[]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{said}");
    assert!(said.contains("40 of 40 made"), "{said}");
    assert!(said.contains("128 receives posted"), "{said}");
}
