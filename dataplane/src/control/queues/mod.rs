//! Queue pairs, completion queues with their channels, shared receive queues, and address handles.

pub(super) mod completion_queues;
pub(super) mod datagrams;
pub(super) mod queue_pairs;
pub(super) mod shared_receive;
