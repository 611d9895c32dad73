//! Ids of connections and listeners.

/// A connection of one stack. Stale ids are harmless: calls with a stale id have no effect.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A listener of one stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub(crate) u32);
