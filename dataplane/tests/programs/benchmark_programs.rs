//! Benchmarks from the distribution, both ends on one daemon: perftest over rdma_cm (`-R`), and
//! perftest with queue pairs that it connects itself.

use crate::common::Daemon;
use crate::common::programs::{Program, is_installed, start_listening, start_over_tcp};

const PACKAGE: &str = "perftest";

/// Runs a program at both ends with common arguments, with rdma_cm and without. Returns the output
/// of the clients.
fn run_both_ways(daemon: &Daemon, program: &str, args: &str) -> [String; 2] {
    let line = format!("{program} -d siw1 -R -F {args}");
    let server = start_listening(daemon, &line);
    let client = Program::start(daemon, &format!("{line} 10.77.0.2")).succeed();
    server.succeed();
    let (server, paired) = start_over_tcp(
        daemon,
        &format!("{program} -d siw1 -x 0 -F {args}"),
        &format!("{program} -d siw0 -x 0 -F {args}"),
    );
    // Without rdma_cm, ib_send_bw on iWARP keeps a memory region registered to the end, so that
    // deallocating its protection domain fails.
    let codes: &[_] = match program.ends_with("ib_send_bw") {
        true => &[Some(0), Some(1)],
        false => &[Some(0)],
    };
    let [(_, paired), _] = [paired, server].map(|end| {
        let (status, said) = end.finish();
        assert!(
            codes.contains(&status.code()),
            "{program}: {status}\n{said}"
        );
        (status, said)
    });
    [client, paired]
}

/// Rows of results: lines that begin with a size and an iteration count.
fn rows(said: &str) -> Vec<(u64, u64)> {
    let numbers = said.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let size = words.next()?.parse().ok()?;
        Some((size, words.next()?.parse().ok()?))
    });
    numbers.collect()
}

/// Checks that every run prints one row with this size and at least `iterations` iterations.
fn check(program: &str, args: &str, size: u64, iterations: u64) {
    let daemon = Daemon::loopback();
    for said in run_both_ways(&daemon, program, args) {
        let rows = rows(&said);
        let is_right = matches!(rows[..], [row] if row.0 == size && row.1 >= iterations);
        assert!(is_right, "{program} {args}: no figures:\n{said}");
    }
}

#[test]
fn bandwidth_in_both_directions() {
    if !is_installed("ib_write_bw", PACKAGE) {
        return;
    }
    for program in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
        check(program, "-n 200 -s 4096 -b", 4096, 200);
    }
}

#[test]
fn latency_of_writes_reads_and_sends() {
    if !is_installed("ib_write_lat", PACKAGE) {
        return;
    }
    for program in ["ib_write_lat", "ib_read_lat", "ib_send_lat"] {
        check(program, "-n 200 -s 4096", 4096, 200);
    }
    for program in ["ib_read_lat", "ib_send_lat"] {
        check(program, "-n 200 -s 4096 -e", 4096, 200);
    }
}

/// perftest refuses events for WRITE. The client of `ib_send_bw` may sleep until its server returns
/// credits, which on iWARP the server does by WRITE: no request that the client posted is left to
/// raise an event.
#[test]
fn bandwidth_by_completion_events() {
    if !is_installed("ib_read_bw", PACKAGE) {
        return;
    }
    check("ib_read_bw", "-n 500 -s 4096 -e", 4096, 500);
    check("ib_atomic_bw", "-n 500 -e", 8, 500);
    check("ib_atomic_lat", "-n 200 -e", 8, 200);
    for _ in 0..4 {
        check("--wake-after 10 ib_send_bw", "-n 500 -s 4096 -e", 4096, 500);
    }
}

#[test]
fn bandwidth_over_sixteen_queue_pairs() {
    if !is_installed("ib_write_bw", PACKAGE) {
        return;
    }
    for program in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
        check(program, "-n 300 -s 4096 -q 16", 4096, 300);
    }
    check("ib_write_bw", "-n 300 -s 4096 -q 16 -b", 4096, 300);
    check("ib_atomic_bw", "-n 300 -q 16", 8, 300);
}

#[test]
fn atomics() {
    if !is_installed("ib_atomic_bw", PACKAGE) {
        return;
    }
    for kind in ["FETCH_AND_ADD", "CMP_AND_SWAP"] {
        check("ib_atomic_bw", &format!("-n 200 -A {kind}"), 8, 200);
        check("ib_atomic_lat", &format!("-n 200 -A {kind}"), 8, 200);
    }
}

#[test]
fn every_size_to_eight_mebibytes() {
    if !is_installed("ib_write_bw", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let sizes: Vec<u64> = (1..=23).map(|power| 1 << power).collect();
    for program in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
        for said in run_both_ways(&daemon, program, "-a -n 20") {
            let found: Vec<u64> = rows(&said).iter().map(|row| row.0).collect();
            assert_eq!(found, sizes, "{program} -a:\n{said}");
        }
    }
}

/// fio's rdma engine. Its SENDs arrive before the server has posted the next receive. An InfiniBand
/// sender retries after an RNR NAK; here the SENDs wait.
#[test]
fn fio_moves_data_by_each_verb() {
    if !is_installed("fio", "fio") {
        return;
    }
    for verb in ["write", "read", "send"] {
        let daemon = Daemon::loopback();
        let common = "--ioengine=rdma --port=8899 --bs=64k --size=8m --thread";
        let server = format!("--rnr wait fio --name=server {common} --rw=read");
        let server = start_listening(&daemon, &server);
        let client = format!(
            "--rnr wait fio --name=client {common} --rw=write --hostname=10.77.0.2 --verb={verb}"
        );
        let said = Program::start(&daemon, &client).succeed();
        assert!(said.contains("err= 0"), "{verb}: {said}");
        assert!(said.contains("(8192KiB/"), "{verb} moved less: {said}");
        server.succeed();
    }
}
