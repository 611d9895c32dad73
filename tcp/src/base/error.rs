//! Errors of the management calls. The data path has none: it counts.

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StackError {
    #[error("{0}")]
    Config(String),
    #[error("this device has no address {0}; use one of its own")]
    NotOurAddress(core::net::IpAddr),
    #[error("this device has no address of the family of {0}; give it one")]
    NoSource(core::net::IpAddr),
    #[error(
        "no route to {0}: it is off-link and neither a route nor a gateway of its family leads there"
    )]
    NoRoute(core::net::IpAddr),
    #[error("{0} is not an address that a connection can have at its far end")]
    BadRemote(core::net::SocketAddr),
    #[error("port {0} is in use for this address and peer; choose another")]
    AddrInUse(u16),
    #[error(
        "all local ports towards this peer are in use; wait for TIME-WAIT or use another source address"
    )]
    NoPorts,
    #[error("the stack has its maximum of {0} connections; raise max_connections")]
    TooManyConnections(usize),
}
