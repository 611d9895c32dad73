//! The neighbour table, and frames that belong to no connection.

pub(crate) mod control_queue;
pub(crate) mod neighbour_quota;
pub(crate) mod neighbours;
