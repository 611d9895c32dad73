//! Connections: listeners and connects of rdma_cm, its datagram services, queue pairs connected without it, and
//! ended connections.

pub(super) mod connections;
pub(super) mod ends;
pub(super) mod listening;
pub(super) mod pair_schedule;
pub(super) mod pairing;
pub(super) mod services;
pub(super) mod streaming;
