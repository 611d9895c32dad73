//! Valkey with its RDMA transport: the server, its command line client and its benchmark.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::Daemon;
use crate::common::programs::{Program, is_installed, received_bytes, start_listening};

/// Starts a server on siw1, without a listener of TCP (port 0).
fn start_server(daemon: &Daemon) -> Program {
    let folder = daemon.dir.path().display();
    let line = format!(
        "valkey-server --port 0 --rdma-bind 10.77.0.2 --rdma-port 6390 --protected-mode no \
         --dir {folder} --appendonly no"
    );
    start_listening(daemon, &line)
}

/// Asks the server to end; it has to succeed.
fn end_server(server: Program) {
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    server.succeed();
}

/// A line of the command line client or the benchmark.
fn client(begin: &str, program: &str, arguments: &str) -> String {
    format!("{begin} {program} --rdma -h 10.77.0.2 -p 6390 {arguments}")
}

fn has_valkey() -> bool {
    is_installed("valkey-server", "nothing; deploy/programs builds it")
}

#[test]
#[ignore = "a build of two minutes: deploy/programs runs it"]
fn values_are_kept_over_rdma() {
    if !has_valkey() {
        return;
    }
    let daemon = Daemon::loopback();
    let server = start_server(&daemon);
    let call =
        |arguments: &str| Program::start(&daemon, &client("", "valkey-cli", arguments)).succeed();
    assert!(call("set short hello").contains("OK"));
    assert!(call("get short").contains("hello"));
    let long: String = (0..100_000)
        .map(|n| char::from(b'a' + (n * 7 + n / 26) as u8 % 26))
        .collect();
    assert!(call(&format!("set long {long}")).contains("OK"));
    assert!(call("get long").contains(&long));
    let before = received_bytes(&daemon, "siw1");
    for (clients, size, count) in [(1, 64, 2000), (50, 64, 5000), (4, 1_000_000, 100)] {
        let arguments = format!("-n {count} -c {clients} -d {size} -t set,get -q");
        let said = Program::start(&daemon, &client("", "valkey-benchmark", &arguments)).succeed();
        for what in ["SET: ", "GET: "] {
            assert!(said.contains(what), "{said}");
        }
    }
    assert!(received_bytes(&daemon, "siw1") - before >= 100_000_000);
    end_server(server);
}

#[test]
#[ignore = "a build of two minutes: deploy/programs runs it"]
fn a_server_outlives_clients_whose_connections_fail() {
    if !has_valkey() {
        return;
    }
    let daemon = Daemon::loopback();
    let server = start_server(&daemon);
    let benchmark = |plan: &str| {
        let begin = format!("--faults {plan}");
        let line = client(&begin, "valkey-benchmark", "-n 2000 -c 4 -d 64 -t set -q");
        Program::start(&daemon, &line).finish()
    };
    let (status, said) = benchmark("disconnected");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("RDMA: send/recv failed"), "{said}");
    let (status, said) = benchmark("slow-completions");
    assert!(status.success() && said.contains("SET: "), "{said}");
    assert!(said.contains("faults were injected"), "{said}");
    let line = client("", "valkey-cli", "set after all");
    assert!(Program::start(&daemon, &line).succeed().contains("OK"));
    end_server(server);
}
