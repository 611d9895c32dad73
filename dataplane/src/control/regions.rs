//! Location of a registered region's memory, as recorded by the control thread.

use std::sync::Arc;

use siw_memory::ProcessMemory;
use siw_memory::queue_allocator::QueueMemory;

use crate::ids::{ArenaId, PdId};

/// A memory region of a client.
pub struct MemoryRegion {
    pub pd: PdId,
    /// Arena of the region. With `extents`: that of the first extent.
    pub arena: ArenaId,
    /// Extents, for a region of the application's existing memory.
    pub extents: Option<Box<RegionExtents>>,
    /// Page lists written by the client, for a fast registration.
    pub list: Option<QueueMemory>,
}

impl MemoryRegion {
    /// Creates a region in one piece of an arena.
    pub fn in_arena(pd: PdId, arena: ArenaId) -> MemoryRegion {
        MemoryRegion {
            pd,
            arena,
            extents: None,
            list: None,
        }
    }

    /// Arenas of the region, each once.
    pub fn arenas(&self) -> &[ArenaId] {
        match &self.extents {
            Some(extents) => &extents.arenas,
            None => std::slice::from_ref(&self.arena),
        }
    }
}

/// Extents of a region of the application's existing memory.
pub struct RegionExtents {
    /// Arenas, each once.
    pub arenas: Vec<ArenaId>,
    /// Bytes by [`siw_shm::control::ExtentMethod`].
    pub bytes: [u64; 4],
    /// Reason given by the client for extents that are not remapped.
    pub reason: String,
}

/// A client's address space, which workers copy from and to with system calls.
pub struct ClientProcess {
    pub memory: Arc<ProcessMemory>,
    /// Number of regions with extents in it.
    pub mrs: u32,
}
