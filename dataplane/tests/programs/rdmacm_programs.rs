//! Unmodified programs of rdmacm-utils from the distribution, on a `siwd` with the embedded
//! loopback: `siwrun` makes them load the drop-in libraries.

use crate::common::Daemon;
use crate::common::programs::{
    Program, await_kernel_listener, await_listeners, free_port, is_installed, run_pair,
};

const PACKAGE: &str = "rdmacm-utils";

#[test]
fn rping_validates_data_of_all_sizes() {
    if !is_installed("rping", PACKAGE) {
        return;
    }
    for size in [64, 1000, 4096, 65535] {
        let (_, said) = run_pair(
            &format!("rping -s -a 10.77.0.2 -C 10 -S {size} -vV"),
            &format!("rping -c -a 10.77.0.2 -C 10 -S {size} -vV"),
        );
        assert_eq!(said.matches("ping data: rdma-ping").count(), 10, "{said}");
    }
}

#[test]
fn rping_connects_queue_pairs_that_it_creates_and_moves_itself() {
    if !is_installed("rping", PACKAGE) {
        return;
    }
    for persona in ["iwarp", "roce"] {
        let (_, said) = run_pair(
            &format!("--persona {persona} rping -s -a 10.77.0.2 -C 10 -vVq"),
            &format!("--persona {persona} rping -c -a 10.77.0.2 -C 10 -vVq"),
        );
        assert_eq!(said.matches("ping data: rdma-ping").count(), 10, "{said}");
    }
}

/// As with the kernel's rdma_cm, a loopback address belongs to no device and stands for all of
/// them.
#[test]
fn rping_connects_to_a_loopback_address() {
    if !is_installed("rping", PACKAGE) {
        return;
    }
    for ip in ["127.0.0.1", "::1"] {
        let (_, said) = run_pair(
            &format!("rping -s -a {ip} -C 3 -vV"),
            &format!("rping -c -a {ip} -C 3 -vV"),
        );
        assert_eq!(said.matches("ping data: rdma-ping").count(), 3, "{said}");
    }
}

#[test]
fn a_persistent_rping_serves_several_clients() {
    if !is_installed("rping", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let _server = Program::start(&daemon, "rping -s -P -a 0.0.0.0");
    await_listeners(&daemon, 1);
    // One client after the other: the server keeps only the last request until a thread has taken
    // it.
    for to in ["10.77.0.1", "10.77.0.2", "10.77.0.2"] {
        let said = Program::start(&daemon, &format!("rping -c -a {to} -C 20 -vV")).succeed();
        assert_eq!(said.matches("ping data: rdma-ping").count(), 20, "{said}");
    }
}

#[test]
fn ucmatose_makes_a_hundred_connections_and_moves_data() {
    if !is_installed("ucmatose", PACKAGE) {
        return;
    }
    let (server, client) = run_pair(
        "ucmatose -b 10.77.0.2 -c 100",
        "ucmatose -s 10.77.0.2 -c 100",
    );
    for said in [server, client] {
        assert!(said.contains("return status 0"), "{said}");
        assert!(said.contains("data transfers complete"), "{said}");
    }
}

#[test]
fn cmtime_measures_connections() {
    if !is_installed("cmtime", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let (_, usage) = Program::start(&daemon, "cmtime -h").finish();
    let port = free_port();
    let common = format!("-c 100 -p {port}");
    // Since rdma-core 52 its ends agree on each step by a connection of the kernel; since 61 at an
    // address of its own.
    let (to, at) = match usage.contains("controller_address") {
        true => ("-b 10.77.0.1 -C 127.0.0.1", "-L -b 10.77.0.2 -C 127.0.0.1"),
        false => ("-s 10.77.0.2", "-b 10.77.0.2"),
    };
    let mut server = Program::start(&daemon, &format!("cmtime {at} {common}"));
    let client = format!("cmtime {to} {common}");
    if !usage.contains("mimic_qp_delay") {
        await_listeners(&daemon, 1);
        // The server keeps running after a test.
        let said = Program::start(&daemon, &client).succeed();
        assert!(said.contains("connect"), "{said}");
        return;
    }
    await_kernel_listener(&mut server, port);
    // The last stage connects identifiers without a queue pair, which iWARP does not have: Linux siw
    // refuses it alike.
    let (status, said) = Program::start(&daemon, &client).finish();
    assert!(!status.success(), "{said}");
    let (pairs, without) = said.split_once("no QPs").expect(&said);
    assert!(pairs.contains("full connect"), "{said}");
    assert!(without.contains("rdma_connect: Invalid argument"), "{said}");
}

#[test]
fn endpoints_of_rdma_client_and_rdma_server_work() {
    if !is_installed("rdma_client", PACKAGE) {
        return;
    }
    let (server, client) = run_pair("rdma_server", "rdma_client -s 10.77.0.2");
    assert!(server.contains("rdma_server: end 0"), "{server}");
    assert!(client.contains("rdma_client: end 0"), "{client}");
}

#[test]
fn rdma_xclient_and_rdma_xserver_work_with_rc() {
    if !is_installed("rdma_xclient", PACKAGE) {
        return;
    }
    let (server, client) = run_pair("rdma_xserver -c r", "rdma_xclient -s 10.77.0.2 -c r");
    assert!(server.contains("end 0"), "{server}");
    assert!(client.contains("end 0"), "{client}");
}

#[test]
fn rping_is_refused_where_nobody_listens() {
    if !is_installed("rping", PACKAGE) {
        return;
    }
    let daemon = Daemon::loopback();
    let client = Program::start(&daemon, "rping -c -a 10.77.0.2 -C 1");
    let (status, said) = client.finish();
    assert!(!status.success(), "{said}");
    assert!(
        said.contains("RDMA_CM_EVENT_REJECTED, error -111"),
        "{said}"
    );
}
