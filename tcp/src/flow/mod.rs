//! Which connection a segment belongs to, and which worker a connection.

pub(crate) mod port_set;
pub(crate) mod steering;
pub(crate) mod table;
pub(crate) mod toeplitz;
