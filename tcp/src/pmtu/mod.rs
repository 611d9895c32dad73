//! Path MTUs: how wide a path is, and the search for more (RFC 8899).

pub(crate) mod path_mtu;
pub(crate) mod probe;
pub(crate) mod search;
