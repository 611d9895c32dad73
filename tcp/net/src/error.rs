//! Errors of the network layer's management calls. Received frames cause none; they are counted.

use crate::quota_owner::OwnerScope;

/// The reason why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// A setting of [`crate::NetConfig`] is out of range; the text names it and its limits.
    #[error("{0}")]
    Config(String),
    /// [`crate::NeighbourConfig::max_unresolved_per_client`] or
    /// [`crate::NeighbourConfig::max_unresolved_per_user`] is reached.
    #[error(
        "this {scope} has reached its limit of {limit} unresolved neighbours; see [device.neighbours] unresolved_per_{scope}"
    )]
    TooManyUnresolved {
        /// The scope of the limit.
        scope: OwnerScope,
        /// The limit.
        limit: usize,
    },
}
