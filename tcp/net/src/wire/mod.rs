//! Wire formats: headers are read and checked where they are.

pub mod bytes;
pub mod checksum;
pub mod constants;
pub(crate) mod extension_headers;
pub(crate) mod flow_key;
pub mod frame;
pub(crate) mod icmp_error;
