//! The client and the user that a connection is charged to.

/// The opener of a connection, for the limits per client and per user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuotaOwner {
    /// The client: a number below `u32::MAX`, chosen by the embedder.
    pub client: u32,
    /// The user that the client, with all the user's other clients, belongs to.
    pub user: u32,
}

/// The scope of a limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerScope {
    /// The limit of one client.
    Client,
    /// The limit of all clients of a user.
    User,
}

impl core::fmt::Display for OwnerScope {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            OwnerScope::Client => "client",
            OwnerScope::User => "user",
        })
    }
}
