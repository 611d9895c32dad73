//! Errors of the management calls. The data path returns no errors; it counts them.

use siw_net::NetError;

/// The reason why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StackError {
    /// A setting of [`crate::TcpConfig`] is out of range; the text names it and its limits.
    #[error("{0}")]
    Config(String),
    /// `listen` or `connect` named an address that is not one of the device's.
    #[error("this device has no address {0}; use one of its own")]
    NotOurAddress(core::net::IpAddr),
    /// The device has no address of the peer's address family.
    #[error("this device has no address of the address family of {0}; add one")]
    NoSource(core::net::IpAddr),
    /// The peer is off-link and not covered by a route or a gateway.
    #[error("no route to {0}: it is off-link, and there is neither a route nor a gateway for it")]
    NoRoute(core::net::IpAddr),
    /// The peer's address is not a unicast address, or its port is 0.
    #[error("{0} is not a valid remote address for a connection")]
    BadRemote(core::net::SocketAddr),
    /// The port is in use by a listener or by a connection to the same peer.
    #[error("port {0} is in use for this address and peer; choose another")]
    AddrInUse(u16),
    /// No local port is left for a connection to this peer.
    #[error(
        "all local ports towards this peer are in use; wait for TIME-WAIT or use another source address"
    )]
    NoPorts,
    /// [`crate::TcpConfig::max_connections`] is reached.
    #[error("the stack has its maximum of {0} connections; raise max_connections")]
    TooManyConnections(usize),
    /// The network layer refused it: a setting is out of range, or the owner has reached its limit of
    /// unresolved neighbours.
    #[error(transparent)]
    Net(#[from] NetError),
}
