//! The tests of `queue_pair`, with ends that are saved, dropped and restored before each step: results are
//! the same.

#[path = "../common/mod.rs"]
mod common;

mod corrupt;
mod elapsed;
mod form;

#[path = "../queue_pair/arbitration.rs"]
mod arbitration;
#[path = "../queue_pair/atomics.rs"]
mod atomics;
#[path = "../queue_pair/close.rs"]
mod close;
#[path = "../queue_pair/drain.rs"]
mod drain;
#[path = "../queue_pair/fpdu_runs.rs"]
mod fpdu_runs;
#[path = "../queue_pair/fuzz.rs"]
mod fuzz;
#[path = "../queue_pair/immediate.rs"]
mod immediate;
#[path = "../queue_pair/invalidate.rs"]
mod invalidate;
#[path = "../queue_pair/live_memory.rs"]
mod live_memory;
#[path = "../queue_pair/lossy.rs"]
mod lossy;
#[path = "../queue_pair/markers.rs"]
mod markers;
#[path = "../queue_pair/mpa.rs"]
mod mpa;
#[path = "../queue_pair/msn_wrap.rs"]
mod msn_wrap;
#[path = "../queue_pair/out_of_order.rs"]
mod out_of_order;
#[path = "../queue_pair/quiescence.rs"]
mod quiescence;
#[path = "../queue_pair/random.rs"]
mod random;
#[path = "../queue_pair/reads.rs"]
mod reads;
#[path = "../queue_pair/receive_wait.rs"]
mod receive_wait;
#[path = "../queue_pair/received_terminate.rs"]
mod received_terminate;
#[path = "../queue_pair/ring_limits.rs"]
mod ring_limits;
#[path = "../queue_pair/self_connected.rs"]
mod self_connected;
#[path = "../queue_pair/terminate.rs"]
mod terminate;
#[path = "../queue_pair/terminate_reads.rs"]
mod terminate_reads;
#[path = "../queue_pair/transfer.rs"]
mod transfer;
