//! The TCP header: received segments, and the headers of those to send.

pub(crate) mod segment;
pub(crate) mod template;
