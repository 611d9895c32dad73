//! Programs of socket calls whose results manual pages fix; the programs run over both kinds of
//! sockets.

use std::path::Path;

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::Program;

/// Runs a program of this folder over rsockets for each list of arguments, as [`run_with`].
fn run_over_rsockets(name: &str, arguments: &[&str]) -> Vec<String> {
    run_with("--rsockets", name, arguments)
}

/// Runs a program of this folder for each list of arguments; it has to say "done". Returns what it says.
fn run_with(options: &str, name: &str, arguments: &[&str]) -> Vec<String> {
    if !can_compile() {
        return Vec::new();
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let (program, _) = compile(&daemon, &source);
    let run = |arguments: &&str| {
        let line = format!("{options} {} {arguments}", program.display());
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{said}");
        said
    };
    arguments.iter().map(run).collect()
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

#[test]
fn an_allocator_may_use_files_with_its_locks_held() {
    run_over_rsockets("busy_allocator", &[""]);
}

#[test]
fn signals_and_cancellation_reach_threads_that_wait() {
    run_over_rsockets("waiting_calls", &BOTH_KINDS);
    run_over_rsockets("waiting_calls", &["verbs"]);
}

/// In the libraries that siwrun preloads, both with and without rsockets.
#[test]
fn a_cancelled_thread_ends_alone_in_any_call() {
    run_over_rsockets("cancelled_calls", &BOTH_KINDS);
    run_with("", "cancelled_calls", &BOTH_KINDS);
}

#[test]
fn calls_take_structs_at_any_address() {
    run_over_rsockets("unaligned_structs", &BOTH_KINDS);
    run_with("", "unaligned_structs", &BOTH_KINDS);
}

/// Number of random programs; SIWD_RANDOM_PROGRAMS is another one.
const PROGRAMS: usize = 300;

#[test]
fn random_programs_do_the_same_over_sockets_of_the_kernel_and_of_siwd() {
    let asked = std::env::var("SIWD_RANDOM_PROGRAMS").ok();
    let most = asked.map_or(PROGRAMS, |asked| asked.parse().unwrap());
    // A run of the program has to end within the patience of the tests.
    for first in (0..most).step_by(PROGRAMS) {
        let count = PROGRAMS.min(most - first);
        let arguments = BOTH_KINDS.map(|address| format!("{address} {first} {count}"));
        let said = run_over_rsockets("random_programs", &arguments.each_ref().map(String::as_str));
        let [kernel, siwd] = &said[..] else {
            return;
        };
        assert_eq!(kernel.lines().count(), count + 1);
        for (kernel, siwd) in kernel.lines().zip(siwd.lines()) {
            assert_eq!(kernel, siwd);
        }
    }
}
