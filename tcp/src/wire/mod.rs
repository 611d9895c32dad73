//! Headers of Ethernet, IP and TCP: parsed in place in a received frame, and built from templates.

pub(crate) mod bytes;
pub mod checksum;
pub(crate) mod constants;
pub(crate) mod extension_headers;
pub(crate) mod flow_key;
pub(crate) mod frame;
pub(crate) mod icmp_error;
pub(crate) mod segment;
pub(crate) mod template;
