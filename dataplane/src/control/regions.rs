//! What the control thread knows of a registered region: where its memory lies.

use std::sync::Arc;

use siw_memory::ProcessMemory;
use siw_memory::queue_allocator::QueueMemory;

use crate::ids::{ArenaId, PdId};

/// A memory region of a client.
pub struct MemoryRegion {
    pub pd: PdId,
    /// Of memory that the application had already: the one of its first extent.
    pub arena: ArenaId,
    /// Of memory that the application had already.
    pub extents: Option<Box<RegionExtents>>,
    /// Of a fast registration: where its client writes page lists.
    pub list: Option<QueueMemory>,
}

impl MemoryRegion {
    /// A region in one piece of an arena.
    pub fn in_arena(pd: PdId, arena: ArenaId) -> MemoryRegion {
        MemoryRegion {
            pd,
            arena,
            extents: None,
            list: None,
        }
    }

    /// The arenas that it lies in, each once.
    pub fn arenas(&self) -> &[ArenaId] {
        match &self.extents {
            Some(extents) => &extents.arenas,
            None => std::slice::from_ref(&self.arena),
        }
    }
}

/// What a region is made of whose memory the application had already.
pub struct RegionExtents {
    /// Each arena once.
    pub arenas: Vec<ArenaId>,
    /// Bytes by [`siw_shm::control::ExtentMethod`].
    pub bytes: [u64; 4],
    /// Why, as the client says.
    pub reason: String,
}

/// The address space of a client, which system calls copy from and to.
pub struct ClientProcess {
    pub memory: Arc<ProcessMemory>,
    /// Regions with extents in it.
    pub mrs: u32,
}
