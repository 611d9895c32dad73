//! Lookup of a segment's connection.

pub(crate) mod table;
