//! Memory of this side that is mapped for the peer.

use siw::AppMr;

/// Memory mapped by this side.
#[derive(Default)]
pub struct Mappings(pub Vec<MappedMemory>);

/// Memory that the peer may write.
pub struct MappedMemory {
    pub address: usize,
    pub length: usize,
    pub offset: u64,
    pub region: AppMr,
    /// Index in the peer's list; None for memory that the peer may not write.
    pub index: Option<u16>,
    /// The peer has not been told.
    pub is_pending: bool,
}

impl Mappings {
    /// First index of the peer's list of `most` entries that is not in use.
    pub fn free_index(&self, most: u16) -> Option<u16> {
        let is_free = |index: &u16| !self.0.iter().any(|mapped| mapped.index == Some(*index));
        (0..most).find(is_free)
    }
}
