//! rsockets: unmodified programs of rdmacm-utils from the distribution, on a `siwd` with the
//! embedded loopback.

use crate::common::Daemon;
use crate::common::programs::{Program, await_listeners, is_installed, run_pair};

const PACKAGE: &str = "rdmacm-utils";

/// Runs `rstream` at both ends with the same options; it prints a line for each test.
fn run_rstream(options: &str, lines: usize) {
    if !is_installed("rstream", PACKAGE) {
        return;
    }
    let (server, client) = run_pair(
        &format!("rstream -b 10.77.0.2 {options}"),
        &format!("rstream -s 10.77.0.2 {options}"),
    );
    for said in [server, client] {
        let is_result = |line: &&str| line.split_whitespace().count() == 8;
        let found = said.lines().filter(is_result).count();
        // Plus one line with the names of the columns.
        assert_eq!(found, lines + 1, "{said}");
        assert!(!said.contains("data verification failed"), "{said}");
    }
}

/// The sizes of rstream's own latency and bandwidth tests, whose 100,000 round trips would take too
/// long here.
#[test]
fn rstream_works_blocking() {
    for size in [64, 4096, 65_536, 1_048_576] {
        run_rstream(&format!("-T b -S {size} -C 1 -I 50"), 1);
        run_rstream(&format!("-T b -S {size} -C 50 -I 1"), 1);
    }
}

#[test]
fn rstream_works_without_blocking() {
    run_rstream("-S 64 -C 1 -I 500", 1);
    run_rstream("-T v -S 65536 -C 20 -I 5", 1);
}

#[test]
fn rstream_works_with_poll() {
    run_rstream("-T a -S 64 -C 1 -I 500", 1);
    run_rstream("-T a -T v -S 65536 -C 20 -I 5", 1);
    run_rstream("-T a -T b -S 65536 -C 20 -I 5", 1);
}

#[test]
fn rstream_verifies_data_of_odd_sizes() {
    for size in [1, 63, 64, 65, 2047, 70_001, 1_500_000] {
        run_rstream(&format!("-T v -T b -S {size} -C 20 -I 3"), 1);
    }
}

#[test]
fn rstream_verifies_data_in_small_buffers() {
    run_rstream("-T v -B 2048 -S 100000 -C 10 -I 2", 1);
}

#[test]
fn rstream_resolves_its_address_with_rdma_cm() {
    run_rstream("-T r -T v -S 4096 -C 10 -I 10 -k 30", 1);
}

#[test]
fn riostream_writes_to_mapped_memory() {
    if !is_installed("riostream", PACKAGE) {
        return;
    }
    let (server, client) = run_pair(
        "riostream -b 10.77.0.2 -T v -S 65536 -C 20 -I 20",
        "riostream -s 10.77.0.2 -T v -S 65536 -C 20 -I 20",
    );
    for said in [server, client] {
        assert!(said.contains("custom"), "{said}");
        assert!(!said.contains("failed"), "{said}");
    }
}

#[test]
fn rcopy_copies_a_file() {
    if !is_installed("rcopy", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let _server = Program::start(&daemon, "rcopy");
    await_listeners(&daemon, 1);
    let (from, to) = (daemon.dir.path().join("from"), daemon.dir.path().join("to"));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i * 7 / 5) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let line = format!("rcopy {} 10.77.0.2:{}", from.display(), to.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(std::fs::read(&to).unwrap() == bytes, "{said}");
}

#[test]
fn an_rsocket_is_refused_where_nobody_listens() {
    if !is_installed("rstream", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let (status, said) = Program::start(&daemon, "rstream -T b -s 10.77.0.2").finish();
    assert!(
        said.contains("rconnect: Connection refused"),
        "{status} {said}"
    );
}
