//! Queue pairs, completion queues with their channels, shared receive queues, address handles, and
//! multicast groups.

pub(super) mod completion_queues;
pub(super) mod datagrams;
pub(super) mod groups;
pub(super) mod queue_pairs;
pub(super) mod shared_receive;
