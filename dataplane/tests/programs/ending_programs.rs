//! Calls of the drop-in libraries in functions of atexit(3), in threads that end, and in children of
//! fork(2).

use crate::common::c_programs::run_to_done;

#[test]
fn every_object_is_used_and_destroyed_in_functions_of_atexit() {
    run_to_done("ending_programs", "exit");
}

#[test]
fn every_object_is_used_and_destroyed_when_a_thread_has_lost_its_variables() {
    run_to_done("ending_programs", "thread");
}

#[test]
fn a_child_of_fork_begins_anew_after_each_kind_of_call_and_leaves_its_parent_alone() {
    run_to_done("ending_programs", "fork");
}
