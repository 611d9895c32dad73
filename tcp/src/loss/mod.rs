//! Loss detection and recovery: round-trip times, RACK-TLP, what is marked lost.

pub(crate) mod rack;
pub(crate) mod recovery;
