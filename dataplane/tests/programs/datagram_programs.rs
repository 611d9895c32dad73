//! Datagrams (UD) of unmodified programs, whose devices have a persona with datagrams: both ends on one
//! daemon. The programs exchange addresses, numbers and Q_Keys over a kernel TCP connection.

use std::path::Path;

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{
    Program, await_kernel_listener, free_port, has_infiniband_of_ucx, is_installed, run_over_tcp,
    start_listening, ucx_perftest,
};

#[test]
fn datagrams_follow_the_manual_pages() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/datagrams.c");
    let (program, _) = compile(&daemon, &source);
    for persona in ["roce", "ib", "unspecified"] {
        for gid_index in 0..2 {
            let line = format!("--persona {persona} {} {gid_index}", program.display());
            let said = Program::start(&daemon, &line).succeed();
            assert!(said.contains("done"), "{line}: {said}");
        }
    }
}

#[test]
fn ud_pingpong_runs_between_devices_and_on_one() {
    if !is_installed("ibv_ud_pingpong", "ibverbs-utils") {
        return;
    }
    let daemon = Daemon::loopback();
    for (persona, (server, client), args) in [
        ("roce", ("siw1", "siw0"), "-g 0 -c"),
        ("roce", ("siw0", "siw1"), "-g 1 -e"),
        ("unspecified", ("siw0", "siw0"), "-g 0 -s 64"),
        // By LID.
        ("ib", ("siw1", "siw0"), "-e"),
    ] {
        let line =
            |device| format!("--persona {persona} ibv_ud_pingpong -d {device} -n 300 {args}");
        let (server, client) = run_over_tcp(&daemon, &line(server), &line(client));
        for said in [server, client] {
            assert!(said.contains("300 iters in"), "{said}");
        }
    }
}

/// rdma_cm with RDMA_PS_UDP: found by the service ID resolution, many at once.
#[test]
fn udaddy_exchanges_datagrams_with_services_found_by_rdma_cm() {
    if !is_installed("udaddy", "rdmacm-utils") {
        return;
    }
    for (persona, args) in [
        ("roce", "-c 50"),
        ("roce", "-C 100 -S 1000"),
        ("ib", "-c 1"),
        ("unspecified", "-c 3"),
    ] {
        let daemon = Daemon::loopback();
        let line = format!("--persona {persona} udaddy {args}");
        let server = start_listening(&daemon, &format!("{line} -b 10.77.0.2"));
        let client = Program::start(&daemon, &format!("{line} -s 10.77.0.2")).succeed();
        for said in [server.succeed(), client] {
            assert!(said.contains("return status 0"), "{said}");
            assert!(said.contains("data transfers complete"), "{said}");
        }
    }
}

#[test]
fn udaddy_says_that_nothing_serves_the_port_and_that_iwarp_has_no_datagrams() {
    if !is_installed("udaddy", "rdmacm-utils") {
        return;
    }
    let daemon = Daemon::loopback();
    // IB_SIDR_UNSUPPORTED.
    let said = Program::start(&daemon, "--persona roce udaddy -s 10.77.0.2").finish();
    let unreachable = "event: RDMA_CM_EVENT_UNREACHABLE, error: 1";
    assert!(said.1.contains(unreachable), "{}", said.1);
    let (_, said) = Program::start(&daemon, "udaddy -s 10.77.0.2").finish();
    assert!(said.contains("siwrun --persona roce"), "{said}");
}

/// Sender and receivers on two devices, and two receivers on one.
#[test]
fn mckey_sends_to_a_multicast_group() {
    if !is_installed("mckey", "rdmacm-utils") {
        return;
    }
    let daemon = Daemon::loopback();
    for (persona, group) in [
        ("roce", "239.1.2.3"),
        ("ib", "239.1.2.3"),
        ("roce", "ff15::1:2"),
    ] {
        let line = |address: &str, args: &str| {
            let ip = if group.contains(':') {
                "fd77::"
            } else {
                "10.77.0."
            };
            format!("--persona {persona} mckey -m {group} -b {ip}{address} {args}")
        };
        let receivers = ["1", "2", "2"].map(|at| Program::start(&daemon, &line(at, "")));
        // Receivers wait 3 s after they have joined, and so does the sender.
        let sender = Program::start(&daemon, &line("1", "-s"));
        let mut ended = vec![sender.succeed()];
        ended.extend(receivers.map(Program::succeed));
        for said in ended {
            assert!(said.contains("return status 0"), "{said}");
            assert!(said.contains("data transfers complete"), "{said}");
        }
    }
}

/// Checks that perftest prints one row with this size and number of iterations.
fn run_perftest(daemon: &Daemon, program: &str, args: &str) {
    let line = |device| {
        format!("--persona roce {program} -c UD -x 0 -F -n 300 -s 1024 {args} -d {device}")
    };
    let (_, client) = run_over_tcp(daemon, &line("siw1"), &line("siw0"));
    let has_row = client
        .lines()
        .any(|row| row.split_whitespace().take(2).eq(["1024", "300"]));
    assert!(has_row, "{program} {args}: no figures:\n{client}");
}

/// No more iterations than receive requests: datagrams that find none are lost.
#[test]
fn perftest_measures_latency_and_bandwidth_of_datagrams() {
    if !is_installed("ib_send_lat", "perftest") {
        return;
    }
    let daemon = Daemon::loopback();
    run_perftest(&daemon, "ib_send_lat", "");
    run_perftest(&daemon, "ib_send_lat", "-e");
    run_perftest(&daemon, "ib_send_bw", "-r 512");
}

/// qperf without rdma_cm knows LIDs only. Its messages of `ud_bw` are longer than the MTU unless told otherwise.
#[test]
fn qperf_measures_datagrams() {
    if !is_installed("qperf", "qperf") {
        return;
    }
    let daemon = Daemon::loopback();
    let port = free_port();
    // The server keeps running after a test.
    let mut server = Program::start(&daemon, &format!("--persona ib qperf -lp {port}"));
    await_kernel_listener(&mut server, port);
    let line = format!("--persona ib qperf 127.0.0.1 -lp {port} -t 1 -m 1024 ud_lat ud_bw");
    let said = Program::start(&daemon, &line).succeed();
    for figure in ["latency", "send_bw", "recv_bw"] {
        let mut lines = said.lines().map(str::trim_start);
        assert!(lines.any(|line| line.starts_with(figure)), "{said}");
    }
}

/// Runs a test of UCX's benchmark; both ends have the same settings.
fn run_ucx(daemon: &Daemon, settings: &str, test: &str) {
    let line = |device: &str| {
        format!(
            "--persona roce env UCX_NET_DEVICES={device}:1 {settings} {} -t {test} -n 1000 -w 10 -f",
            ucx_perftest()
        )
    };
    let (_, client) = run_over_tcp(daemon, &line("siw1"), &line("siw0"));
    let mut rows = client.lines().map(|row| row.split_whitespace().next());
    assert!(
        rows.any(|first| first == Some("1000")),
        "{settings} {test}:\n{client}"
    );
}

#[test]
fn ucx_transfers_messages_by_datagrams_and_connects_queue_pairs_by_them() {
    if !has_infiniband_of_ucx() {
        return;
    }
    let daemon = Daemon::loopback();
    for settings in ["UCX_TLS=ud", "UCX_TLS=rc", "UCX_TLS=all"] {
        for test in ["tag_lat -s 8", "tag_bw -s 65536", "ucp_put_bw -s 4096"] {
            run_ucx(&daemon, settings, test);
        }
    }
}
