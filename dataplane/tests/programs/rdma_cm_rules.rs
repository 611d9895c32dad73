//! Rules of rdma_cm that programs rely on: readiness of descriptors, and the errors of calls.

use crate::common::c_programs::{can_compile, run_to_done, run_to_done_as};

#[test]
fn a_descriptor_of_events_is_readable_exactly_while_its_call_succeeds() {
    run_to_done("event_descriptors", "");
}

#[test]
fn calls_in_a_wrong_state_or_with_wrong_arguments_fail_as_under_linux() {
    run_to_done("rdma_cm_errors", "");
}

#[test]
fn a_connection_in_streaming_mode_turns_to_rdma_on_either_side() {
    run_to_done("streaming_mode", "");
}

#[test]
fn an_identifier_does_not_look_at_a_queue_pair_that_the_program_destroyed() {
    run_to_done("destroyed_queue_pair", "");
}

/// Programs end their completion threads by the flush of the last receive.
#[test]
fn a_receive_posted_while_its_connection_ends_is_flushed() {
    run_to_done("late_receives", "");
}

#[test]
fn a_program_with_its_own_queue_pair_gets_the_response_and_establishes_the_connection() {
    if !can_compile() {
        return;
    }
    for persona in ["iwarp", "roce", "ib", "unspecified"] {
        run_to_done_as(persona, "own_queue_pairs");
    }
}
