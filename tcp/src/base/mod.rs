//! Foundations of the crate: ticks, sequence numbers, counters, containers. Nothing
//! here knows a connection.

pub(crate) mod error;
pub(crate) mod events;
pub(crate) mod ids;
pub(crate) mod retransmissions;
pub(crate) mod sequence;
pub(crate) mod sink_full;
pub(crate) mod state;
pub(crate) mod stats;
pub(crate) mod time;
pub(crate) mod timer_wheel;
