//! Unmodified programs under the built-in plans of siwd (`siwctl fault load`).

use crate::common::programs::{
    Program, is_installed, run_over_tcp, start_listening, start_over_tcp,
};
use crate::common::{Daemon, PATIENCE, client_program};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

const UTILS: &str = "ibverbs-utils";
const CM_UTILS: &str = "rdmacm-utils";

fn siwctl(daemon: &Daemon, args: &[&str]) -> String {
    let mut command = Command::new(client_program("siwctl"));
    command.args(args).arg("--socket").arg(&daemon.socket);
    let out = command.output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?}: {error}");
    String::from_utf8(out.stdout).unwrap()
}

fn load_plan(daemon: &Daemon, name: &str) {
    siwctl(daemon, &["fault", "load", name]);
}

/// Number of times that each fault was injected.
fn injected(daemon: &Daemon) -> Vec<u64> {
    let rows = siwctl(daemon, &["fault", "show", "--json"]);
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    rows.iter()
        .map(|row| row["injected"].as_u64().unwrap())
        .collect()
}

/// Runs rping with verified data; both ends have to succeed.
fn run_rping(daemon: &Daemon, rounds: u32) {
    let server = start_listening(daemon, "rping -s -V -S 30000 -a 10.77.0.2");
    let client = format!("rping -c -V -I 10.77.0.1 -a 10.77.0.2 -S 30000 -C {rounds}");
    Program::start(daemon, &client).succeed();
    server.succeed();
}

#[test]
fn built_in_plans_of_siwd_are_documented() {
    let daemon = Daemon::loopback();
    let rows = siwctl(&daemon, &["fault", "plans", "--json"]);
    let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
    let page = include_str!("../../../client-lib/faults/README.md");
    let of_test = include_str!("wire_fault_plans.rs");
    for row in &rows {
        let name = row["name"].as_str().unwrap();
        assert!(
            page.contains(&format!("**`{name}`**")),
            "{name} has no paragraph"
        );
        let tested = format!("load_plan(&daemon, \"{name}\")");
        assert!(of_test.contains(&tested), "{name} has no test");
    }
}

/// The link is dead for a while, and loses frames: programs go on.
#[test]
fn programs_bear_a_flaky_link() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    load_plan(&daemon, "flaky-link");
    let begin = Instant::now();
    loop {
        run_rping(&daemon, 300);
        let counts = injected(&daemon);
        if counts.iter().all(|count| *count > 0) {
            break;
        }
        assert!(begin.elapsed() < PATIENCE, "{counts:?}");
    }
}

#[test]
fn programs_bear_a_lossy_link() {
    let daemon = Daemon::loopback();
    load_plan(&daemon, "lossy-link");
    if is_installed("rping", CM_UTILS) {
        run_rping(&daemon, 300);
        assert!(injected(&daemon)[0] > 0);
    }
    if is_installed("ib_write_bw", "perftest") {
        let before = injected(&daemon);
        let (_, said) = run_over_tcp(
            &daemon,
            "ib_write_bw -d siw1 -x 0 -n 500",
            "ib_write_bw -d siw0 -x 0 -n 500",
        );
        assert!(said.contains("65536      500"), "{said}");
        assert!(injected(&daemon) > before);
    }
}

/// Each round takes the time of the path.
#[test]
fn programs_bear_a_slow_link() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    load_plan(&daemon, "slow-link");
    let begin = Instant::now();
    let (_, said) = run_over_tcp(
        &daemon,
        "ibv_rc_pingpong -d siw1 -g 0 -n 30",
        "ibv_rc_pingpong -d siw0 -g 0 -n 30",
    );
    assert!(said.contains("30 iters in"), "{said}");
    assert!(begin.elapsed() >= Duration::from_millis(300), "{said}");
}

/// The CRC of MPA finds the wrong octet: the connection ends, and siwctl names the plan.
#[test]
fn a_bit_error_ends_the_connection_of_a_program() {
    if !is_installed("ib_write_bw", "perftest") {
        return;
    }
    let daemon = Daemon::loopback();
    load_plan(&daemon, "bit-errors");
    let (mut server, client) = start_over_tcp(
        &daemon,
        "ib_write_bw -d siw1 -x 0 -n 5000",
        "ib_write_bw -d siw0 -x 0 -n 5000",
    );
    let (status, said) = client.finish();
    server.kill();
    assert!(!status.success(), "{said}");
    assert!(said.contains("Failed status"), "{said}");
    assert!(injected(&daemon)[0] > 0);
    let ends = siwctl(&daemon, &["show", "ends", "--json"]);
    let ends: Vec<Value> = serde_json::from_str(&ends).unwrap();
    let number = ends[0]["lqpn"].to_string();
    let why = siwctl(&daemon, &["why", &number]);
    assert!(
        why.contains("injected fault 1 of plan bit-errors: wire_corrupt"),
        "{why}"
    );
}

/// A program that runs stops, and goes on when the cable is back.
#[test]
fn a_program_goes_on_when_the_cable_is_back() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    let server = start_listening(&daemon, "rping -s -V -S 30000 -a 10.77.0.2");
    let client = Program::start(
        &daemon,
        "rping -c -V -I 10.77.0.1 -a 10.77.0.2 -S 30000 -C 20000",
    );
    let begin = Instant::now();
    while daemon.tcp_counter("out_segs") < 100 {
        assert!(begin.elapsed() < PATIENCE);
    }
    load_plan(&daemon, "cable-pulled");
    while injected(&daemon)[0] < 3 {
        assert!(begin.elapsed() < PATIENCE);
    }
    siwctl(&daemon, &["fault", "clear", "cable-pulled"]);
    client.succeed();
    server.succeed();
}

#[test]
fn programs_bear_a_busy_daemon() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    load_plan(&daemon, "busy-daemon");
    let begin = Instant::now();
    loop {
        run_rping(&daemon, 100);
        let counts = injected(&daemon);
        if counts.iter().all(|count| *count > 0) {
            break;
        }
        assert!(begin.elapsed() < PATIENCE, "{counts:?}");
    }
}
