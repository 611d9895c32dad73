//! Unmodified libibverbs programs over the drop-in library: Debian's ibverbs-utils, both ends on
//! one daemon. Queue pairs are connected by GID and QP number, which the programs exchange over a
//! kernel TCP connection on 127.0.0.1.

use std::process::Command;

use crate::common::c_programs::run_to_done;
use crate::common::net::{Netns, lacks_network};
use crate::common::programs::{Program, is_installed, run_over_tcp, start_over_tcp};
use crate::common::{Daemon, PATIENCE, siwrun};

const PACKAGE: &str = "ibverbs-utils";

/// Runs a program of ibverbs-utils on two devices with common arguments; both ends report their
/// number of rounds.
fn run_pingpong(daemon: &Daemon, program: &str, (server, client): (&str, &str), args: &str) {
    let (server, client) = run_over_tcp(
        daemon,
        &format!("{program} -d {server} -n 300 {args}"),
        &format!("{program} -d {client} -n 300 {args}"),
    );
    for said in [server, client] {
        assert!(said.contains("300 iters in"), "{said}");
    }
}

#[test]
fn devices_show_with_what_siwd_says_of_them() {
    if !is_installed("ibv_devinfo", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let list = Program::start(&daemon, "ibv_devices").succeed();
    assert!(list.contains("siw0") && list.contains("siw1"), "{list}");
    let info = Program::start(&daemon, "ibv_devinfo -v -d siw1").succeed();
    for expected in [
        "iWARP (1)",
        "PORT_ACTIVE (4)",
        "Ethernet",
        "::ffff:10.77.0.2",
        "fd77::2",
        "ATOMIC_GLOB",
        "MEM_WINDOW_TYPE_2B",
    ] {
        assert!(info.contains(expected), "{expected} is not in\n{info}");
    }
}

#[test]
fn rc_pingpong_runs_between_devices_and_on_one() {
    if !is_installed("ibv_rc_pingpong", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    for devices in [("siw1", "siw0"), ("siw0", "siw1"), ("siw0", "siw0")] {
        run_pingpong(&daemon, "ibv_rc_pingpong", devices, "-g 0 -c");
    }
    // IPv6, asleep in ibv_get_cq_event(3), by ibv_wr_send(3).
    let devices = ("siw1", "siw0");
    run_pingpong(&daemon, "ibv_rc_pingpong", devices, "-g 1 -e -s 20000");
    run_pingpong(&daemon, "ibv_rc_pingpong", devices, "-g 0 -N -r 17");
}

#[test]
fn a_queue_pair_connected_with_itself_serves_a_program() {
    run_to_done("self_connected", "");
}

#[test]
fn access_rights_change_without_the_keys_of_a_region() {
    run_to_done("rereg_access", "");
}

#[test]
fn a_device_may_be_closed_before_its_objects_are_destroyed() {
    run_to_done("closed_first", "");
}

#[test]
fn completion_counters_and_other_newest_verbs_work() {
    run_to_done("newest_verbs", "");
}

#[test]
fn srq_pingpong_connects_sixteen_queue_pairs() {
    if !is_installed("ibv_srq_pingpong", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    run_pingpong(&daemon, "ibv_srq_pingpong", ("siw1", "siw0"), "-g 0");
    run_pingpong(&daemon, "ibv_srq_pingpong", ("siw0", "siw0"), "-g 0 -e");
}

/// Waits until the daemon has had traffic for a while.
fn await_traffic(daemon: &Daemon) {
    let ctx = daemon.context();
    let segments = || {
        let text = ctx.read_stats().unwrap();
        let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
        statistics["workers"][0]["devices"][0]["rx_frames"]
            .as_u64()
            .unwrap()
    };
    let start = std::time::Instant::now();
    while segments() < 1000 {
        assert!(start.elapsed() < PATIENCE, "no traffic");
    }
}

#[test]
fn programs_see_their_requests_flushed_when_the_daemon_dies() {
    if !is_installed("ibv_rc_pingpong", PACKAGE) {
        return;
    }
    // Polling, and asleep in ibv_get_cq_event(3).
    for mode in ["", "-e"] {
        end_daemon_under_programs(mode);
    }
}

fn end_daemon_under_programs(mode: &str) {
    let mut daemon = Daemon::loopback();
    let watch = Program::start(&daemon, "ibv_asyncwatch -d siw1");
    await_client(&daemon, "ibv_asyncwatch");
    let line = |device| format!("ibv_rc_pingpong -g 0 -n 100000000 -d {device} -s 4096 {mode}");
    let (server, client) = start_over_tcp(&daemon, &line("siw1"), &line("siw0"));
    await_traffic(&daemon);
    daemon.kill();
    for program in [server, client] {
        let (status, said) = program.finish();
        assert_eq!(status.code(), Some(1), "{said}");
        let flushed = "Failed status Work Request Flushed Error (5)";
        assert!(said.contains(flushed), "{said}");
    }
    let (status, said) = watch.finish();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("IBV_EVENT_DEVICE_FATAL (8)"), "{said}");
}

/// Waits until a client with this name is connected.
fn await_client(daemon: &Daemon, name: &str) {
    let ctx = daemon.context();
    let start = std::time::Instant::now();
    loop {
        let statistics: serde_json::Value =
            serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
        let clients = statistics["clients"].as_array().unwrap();
        if clients.iter().any(|client| client["name"] == name) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "no client {name}");
    }
}

/// Waits until the file in the sysfs tree next to the socket shows the state and the event was
/// posted.
fn await_port_state(daemon: &Daemon, state: &str) {
    let tree = daemon.dir.path().join("siwd.sock.sysfs");
    let file = tree.join("class/infiniband/siw0/ports/1/state");
    let start = std::time::Instant::now();
    while std::fs::read_to_string(&file).unwrap().trim_end() != state {
        assert!(
            start.elapsed() < PATIENCE,
            "{} is not {state}",
            file.display()
        );
        std::thread::yield_now();
    }
    // The thread that posts events answers this request after it has posted them.
    daemon.context().query_device(0).unwrap();
}

const TAP: &str = r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=siwtap0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
"#;

#[test]
fn asyncwatch_sees_the_link_go_down_and_up() {
    skip_if!(lacks_network());
    if !is_installed("ibv_asyncwatch", PACKAGE) {
        return;
    }
    let ns = Netns::new();
    let mut daemon = ns.siwd(TAP, &[]);
    ns.ip("link set siwtap0 up");
    await_port_state(&daemon, "4: ACTIVE");
    let watch = Program::start(&daemon, "ibv_asyncwatch -d siw0");
    await_client(&daemon, "ibv_asyncwatch");
    ns.ip("link set siwtap0 down");
    await_port_state(&daemon, "1: DOWN");
    ns.ip("link set siwtap0 up");
    await_port_state(&daemon, "4: ACTIVE");
    daemon.kill();
    let (_, said) = watch.finish();
    for event in ["PORT_ERR", "PORT_ACTIVE", "DEVICE_FATAL"] {
        assert!(
            said.contains(&format!("IBV_EVENT_{event} ")),
            "{event}: {said}"
        );
    }
}

#[test]
fn a_program_without_a_daemon_is_told_where_it_looked() {
    if !is_installed("ibv_devices", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let missing = daemon.dir.path().join("nobody.sock");
    let output = Command::new(siwrun())
        .args(["--socket".as_ref(), missing.as_os_str()])
        .arg("--links")
        .arg(daemon.dir.path().join("links"))
        .arg("ibv_devices")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("cannot reach siwd at") && text.contains("nobody.sock"),
        "{text}"
    );
}
