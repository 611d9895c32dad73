//! Queue pairs in virtual time: two of them over a simulated stream, or one and a model of its peer.

#[path = "../common/mod.rs"]
mod common;

mod arbitration;
mod atomics;
mod close;
mod drain;
mod fpdu_runs;
mod fuzz;
mod immediate;
mod invalidate;
mod live_memory;
mod lossy;
mod markers;
mod mpa;
mod msn_wrap;
mod out_of_order;
mod quiescence;
mod random;
mod reads;
mod receive_wait;
mod received_terminate;
mod ring_limits;
mod self_connected;
mod terminate;
mod terminate_reads;
mod transfer;
