//! Queue pairs, completion queues with their channels, and shared receive queues.

pub(super) mod completion_queues;
pub(super) mod queue_pairs;
pub(super) mod shared_receive;
