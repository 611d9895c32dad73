//! The TCP stack in virtual time, over a simulated network or with a raw host as its peer.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/cpu_time.rs"]
mod cpu_time;

mod aborts;
mod challenge_acks;
mod coalescing;
mod congestion;
mod exhaustion;
mod extension_headers;
mod fairness;
mod fragments;
mod fuzz_bodies;
mod handshakes;
mod hostile;
mod idle_memory;
mod impaired;
mod ip_options;
mod keepalive;
mod long_paths;
mod ndp_validity;
mod neighbour_failure;
mod neighbours;
mod offload;
mod orphans;
mod out_of_order;
mod path_mtu;
mod recovery;
mod roce_datagrams;
mod routes;
mod scale;
mod seeds;
mod self_connect;
mod several_workers;
mod shared_address;
mod syn_cookies;
mod time_wait;
mod user_timeout;
