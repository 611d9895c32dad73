//! Whose limits a connection counts for.

/// Who opens a connection, for limits of what one client and one user may have the stack keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuotaOwner {
    /// The client; the embedder's number.
    pub client: u32,
    /// The user that the client belongs to, with all its other clients.
    pub user: u32,
}

/// Which of the two limits is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerScope {
    /// That of one client.
    Client,
    /// That of all clients of a user.
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
