//! Ids of connections.

/// A connection of one stack, as its transport names it. This crate only keeps and returns ids. Stale ids are
/// harmless: calls with a stale id have no effect.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnId {
    /// The slot of the connection.
    pub index: u32,
    /// Number of connections that had the slot before.
    pub generation: u32,
}
