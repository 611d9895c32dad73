//! The worker that owns a flow, and sets of local ports.

pub(crate) mod port_set;
pub(crate) mod steering;
pub(crate) mod toeplitz;
