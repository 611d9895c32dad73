//! Headers as they lie in a frame: parsed in place, and built from templates.

pub(crate) mod bytes;
pub mod checksum;
pub(crate) mod extension_headers;
pub(crate) mod flow_key;
pub(crate) mod frame;
pub(crate) mod icmp_error;
pub(crate) mod segment;
pub(crate) mod template;
