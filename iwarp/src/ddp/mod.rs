//! Direct data placement (RFC 5041): the segment headers and the copy into registered memory.

mod header;
pub(crate) mod placement;

pub use header::*;
