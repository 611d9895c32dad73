//! Links: ring pairs, tap, AF_PACKET, AF_XDP, vhost-user, shared NICs; byte streams over them.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod af_xdp;
mod link_churn;
mod links;
mod path_mtu;
mod properties;
mod retransmissions;
mod returning_interfaces;
mod service_unit;
mod shared_nic;
mod stream_device;
mod stream_fragments;
mod stream_impaired;
mod stream_linux;
mod tso;
mod vhost_peers;
