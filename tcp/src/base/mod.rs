//! Foundations of the crate: time, sequence numbers, buffers, sinks, counters, containers. Nothing
//! here knows a connection.

pub(crate) mod buffer;
pub(crate) mod counters;
pub(crate) mod error;
pub(crate) mod events;
pub(crate) mod frame_info;
pub(crate) mod frame_sink;
pub(crate) mod ids;
pub(crate) mod net_error;
pub(crate) mod net_stats;
pub(crate) mod quota_owner;
pub(crate) mod rate_limits;
pub(crate) mod retransmissions;
pub(crate) mod sequence;
pub(crate) mod siphash;
pub(crate) mod state;
pub(crate) mod stats;
pub(crate) mod time;
pub(crate) mod timer_wheel;
