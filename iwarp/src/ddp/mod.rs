//! Direct data placement (RFC 5041): the segment headers, and prefetching of payload.
//! PROTOCOL.md section 2.4 shows the formats.

mod header;
pub(crate) mod prefetch;

pub use header::{
    ControlOctets, DDP_VERSION, L_BIT, MAX_HDR_LEN, Msn, QN_ATOMIC_RESPONSE, QN_READ_REQUEST,
    QN_SEND, QN_TERMINATE, T_BIT, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
pub(crate) use header::{be32, be64};
