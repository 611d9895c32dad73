//! Calls of the drop-in libraries in functions of atexit(3), in threads that end, and in children of
//! fork(2).

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::Program;
use std::path::Path;

fn run(way: &str) {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/ending_programs.c");
    let (program, _) = compile(&daemon, &source);
    let said = Program::start(&daemon, &format!("{} {way}", program.display())).succeed();
    assert!(said.contains("done"), "{said}");
}

#[test]
fn every_object_is_used_and_destroyed_in_functions_of_atexit() {
    run("exit");
}

#[test]
fn every_object_is_used_and_destroyed_when_a_thread_has_lost_its_variables() {
    run("thread");
}

#[test]
fn a_child_of_fork_begins_anew_after_each_kind_of_call_and_leaves_its_parent_alone() {
    run("fork");
}
