//! Path MTU discovery: the packet size in use on each path, and the search for a larger one (RFC
//! 8899).

pub(crate) mod path_mtu;
pub(crate) mod probe;
pub(crate) mod search;
