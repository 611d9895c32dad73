//! fio, UCX and libfabric under built-in fault plans.

use crate::common::Daemon;
use crate::common::programs::{
    Program, await_kernel_listener, free_port, has_infiniband_of_ucx, is_installed, run_over_tcp,
    start_listening, ucx_perftest,
};

/// Every completion was late, and siwrun has counted them.
fn assert_slow(said: &str, least: u64) {
    let counted = said.lines().find_map(|line| {
        line.strip_prefix("siwrun: ")?
            .split_once(" faults were injected: ")
    });
    let count = counted
        .and_then(|(count, _)| count.parse().ok())
        .unwrap_or(0);
    assert!(
        count >= least,
        "{count} of {least} completions were late:\n{said}"
    );
}

#[test]
fn fio_moves_all_data_by_slow_completions() {
    if !is_installed("fio", "fio") {
        return;
    }
    let daemon = Daemon::loopback();
    let common = "--ioengine=rdma --port=8899 --bs=64k --size=8m --thread";
    let server = format!("--rnr wait fio --name=server {common} --rw=read");
    let server = start_listening(&daemon, &server);
    let client = format!(
        "--rnr wait --faults slow-completions fio --name=client {common} --rw=write --hostname=10.77.0.2 --verb=write"
    );
    let said = Program::start(&daemon, &client).succeed();
    assert!(said.contains("err= 0"), "{said}");
    assert!(said.contains("(8192KiB/"), "it moved less:\n{said}");
    assert_slow(&said, 128);
    server.succeed();
}

#[test]
fn ucx_sends_its_messages_by_slow_completions() {
    if !has_infiniband_of_ucx() {
        return;
    }
    let daemon = Daemon::loopback();
    let perftest = ucx_perftest();
    let line = |device: &str| {
        format!("{perftest} -d {device}:1 -x rc_verbs -D bcopy -t am_lat -s 64 -n 300 -w 1 -f")
    };
    let (_, said) = run_over_tcp(
        &daemon,
        &format!("--persona roce {}", line("siw1")),
        &format!("--persona roce --faults slow-completions {}", line("siw0")),
    );
    let mut rows = said.lines().map(|row| row.split_whitespace().next());
    assert!(rows.any(|first| first == Some("300")), "{said}");
    assert_slow(&said, 300);
}

/// Runs a client of `fi_pingpong` under a plan, and its server without; returns how the client ended.
fn run_fi_pingpong(plan: &str) -> (bool, String) {
    let daemon = Daemon::loopback();
    let port = free_port();
    let line = "fi_pingpong -p verbs -e msg -c -I 20";
    let mut server = Program::start(&daemon, &format!("{line} -B {port}"));
    await_kernel_listener(&mut server, port);
    let client = format!("--faults {plan} {line} -P {port} 10.77.0.2");
    let (status, said) = Program::start(&daemon, &client).finish();
    server.kill();
    (status.success(), said)
}

#[test]
fn libfabric_verifies_its_data_by_slow_completions() {
    if !is_installed("fi_pingpong", "libfabric-bin") {
        return;
    }
    let (is_well, said) = run_fi_pingpong("slow-completions");
    assert!(is_well, "{said}");
    for size in ["64", "256", "1k", "4k", "64k", "1m"] {
        let is_row = |line: &str| line.split_whitespace().take(3).eq([size, "20", "=20"]);
        assert!(said.lines().any(is_row), "no row of {size}:\n{said}");
    }
    assert_slow(&said, 120);
}

#[test]
fn libfabric_ends_with_the_error_of_a_denied_access() {
    if !is_installed("fi_pingpong", "libfabric-bin") {
        return;
    }
    let (is_well, said) = run_fi_pingpong("access-denied");
    assert!(!is_well, "{said}");
    // Newer ones look at the queue of receives first, whose requests are flushed.
    let errors = ["remote access error", "Work Request Flushed Error"];
    let is_told = |error| said.contains(&format!("cq_readerr: {error}"));
    assert!(errors.into_iter().any(is_told), "{said}");
    assert!(said.contains("siwrun: 1 fault was injected: "), "{said}");
}
