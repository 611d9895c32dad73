//! The error of output that the sink does not take.

/// The sink has no room for a frame now; the connection stays on the output list.
pub(crate) struct SinkFull;
