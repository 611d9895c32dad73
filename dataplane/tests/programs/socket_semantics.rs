//! Programs of socket calls whose results manual pages fix; the programs run over both kinds of
//! sockets.

use std::path::Path;

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::Program;

/// Runs a program of this folder for each list of arguments; it has to say "done".
fn run_over_rsockets(name: &str, arguments: &[&str]) {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let (program, _) = compile(&daemon, &source);
    for arguments in arguments {
        let line = format!("--rsockets {} {arguments}", program.display());
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{said}");
    }
}

const BOTH_KINDS: [&str; 2] = ["127.0.0.1", "10.77.0.2"];

#[test]
fn a_stream_ends_as_one_of_the_kernel_however_its_program_leaves_it() {
    run_over_rsockets("ended_streams", &BOTH_KINDS);
}

#[test]
fn calls_fail_with_the_errors_of_their_manual_pages() {
    run_over_rsockets("socket_errnos", &[""]);
}

#[test]
fn an_epoll_instance_with_rsockets_can_be_watched() {
    run_over_rsockets("nested_instances", &BOTH_KINDS);
}

#[test]
fn duplicates_of_a_socket_become_rsockets_with_it() {
    run_over_rsockets("socket_duplicates", &BOTH_KINDS);
}
