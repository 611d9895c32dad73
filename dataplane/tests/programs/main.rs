//! Unmodified RDMA and TCP programs on siwd's libraries, and this project's own programs.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod benchmark_programs;
mod ceph_cluster;
mod changing_devices;
mod dapl_programs;
mod datagram_programs;
mod doctor;
mod documented_commands;
mod ending_programs;
mod fault_plans;
mod faulted_programs;
mod gasnet_jobs;
mod infiniband_programs;
mod iser_programs;
mod killed_programs;
mod libfabric_programs;
mod mirrored_addresses;
mod mooncake_engine;
mod nccl_network;
mod ordinary_user;
mod persistent_memory;
mod personas;
mod poor_machines;
mod preloaded_sockets;
mod private_daemon;
mod python_transfers;
mod pyverbs_suite;
mod rdma_cm_rules;
mod rdmacm_programs;
mod rsockets;
mod siw_perf;
mod siw_perf_raw;
mod siw_ping;
mod socket_semantics;
mod socket_servers;
mod unmodified_objects;
mod valkey_server;
mod verbs_linking;
mod verbs_programs;
mod wire_fault_plans;
