//! Lookup of a segment's connection, and of the worker that owns a connection.

pub(crate) mod port_set;
pub(crate) mod steering;
pub(crate) mod table;
pub(crate) mod toeplitz;
