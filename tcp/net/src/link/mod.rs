//! The neighbour table, frames that belong to no connection, and conflicts about our addresses.

pub(crate) mod address_conflicts;
pub(crate) mod control_queue;
pub(crate) mod groups;
pub(crate) mod ndp;
pub(crate) mod neighbour_quota;
pub(crate) mod neighbours;
