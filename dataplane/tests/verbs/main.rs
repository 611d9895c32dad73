//! Verbs of the client library in Rust and C against a running siwd on the embedded loopback.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod app_memory;
mod c_example;
mod client_lib;
mod client_races;
mod completion_queues;
mod datagram_services;
mod datagrams;
mod deregistration;
mod doorbells;
mod errors_to_completions;
mod invalidation_races;
mod live_memory;
mod longest_messages;
mod memory_objects;
mod multicast;
mod out_of_order;
mod pairs;
mod protocol_versions;
mod queue_pair_states;
mod random;
mod receive_wait;
mod rust_examples;
mod safety;
mod self_pairs;
mod self_test;
mod set_up_ends;
mod shared_arenas;
mod shared_receive;
mod streaming;
mod verbs;
mod verbs_in_c;
