//! Location of a registered region's memory, as recorded by the control thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use siw_memory::ProcessMemory;
use siw_memory::queue_allocator::QueueMemory;
use siw_shm::SharedMemory;

use super::arena_files::ListedFile;
use crate::ids::{ArenaId, PdId};

/// Request that an arena was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaOrigin {
    /// [`AllocArena`](siw_shm::control::AllocArena)
    Allocated,
    /// [`ImportMemory`](siw_shm::control::ImportMemory): the client's own file.
    Imported,
    /// [`ImportOwnFile`](siw_shm::control::ImportOwnFile): a file of another connection.
    OwnFile,
}

impl ArenaOrigin {
    /// Its memory does not come from the daemon's hugepages, and stays its owner's.
    pub fn is_imported(self) -> bool {
        self != ArenaOrigin::Allocated
    }
}

/// An arena: memory that the client may register.
pub struct ClientArena {
    /// Its entry in `Resources::arena_files`, dropped before the memory.
    #[allow(dead_code, reason = "held for its entry")]
    pub listed: Option<ListedFile>,
    pub region: Arc<SharedMemory>,
    /// Number of regions registered in it.
    pub mrs: u32,
    pub origin: ArenaOrigin,
    /// DMA mapping for NICs; `None` if no port needs one.
    #[allow(dead_code, reason = "held for its registration")]
    pub external: Option<dpdk::ExternalRegion>,
}

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
    /// The reason is counted by its text in [`RegisteredSums`].
    pub has_named_reason: bool,
}

/// Number of different reasons that are counted by their text; further ones are counted together.
const NAMED_REASONS: usize = 32;

/// Sums over a client's regions with extents, so that statistics need not visit each region.
#[derive(Default)]
pub struct RegisteredSums {
    /// Bytes by [`siw_shm::control::ExtentMethod`].
    pub bytes: [u64; 4],
    /// Number of regions by reason.
    pub reasons: BTreeMap<String, u64>,
    /// Number of regions with other reasons.
    pub other_reasons: u64,
}

impl RegisteredSums {
    /// Adds a region.
    pub fn add(&mut self, region: &mut RegionExtents) {
        for (sum, part) in self.bytes.iter_mut().zip(region.bytes) {
            *sum = sum.saturating_add(part);
        }
        if region.reason.is_empty() {
            return;
        }
        let is_named = self.reasons.contains_key(&region.reason);
        region.has_named_reason = is_named || self.reasons.len() < NAMED_REASONS;
        let count = if region.has_named_reason {
            self.reasons.entry(region.reason.clone()).or_insert(0)
        } else {
            &mut self.other_reasons
        };
        *count += 1;
    }

    /// Removes a region.
    pub fn remove(&mut self, region: &RegionExtents) {
        for (sum, part) in self.bytes.iter_mut().zip(region.bytes) {
            *sum = sum.saturating_sub(part);
        }
        if region.reason.is_empty() {
            return;
        }
        if !region.has_named_reason {
            self.other_reasons = self.other_reasons.saturating_sub(1);
        } else if let Some(count) = self.reasons.get_mut(&region.reason) {
            *count -= 1;
            if *count == 0 {
                self.reasons.remove(&region.reason);
            }
        }
    }
}

/// A client's address space, which workers copy from and to with system calls.
pub struct ClientProcess {
    pub memory: Arc<ProcessMemory>,
    /// Number of regions with extents in it.
    pub mrs: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_follow_the_regions_and_have_a_bounded_number_of_reasons() {
        let region = |number: usize| RegionExtents {
            arenas: Vec::new(),
            bytes: [1, 0, 0, number as u64],
            reason: format!("reason {}", number / 2),
            has_named_reason: false,
        };
        let mut sums = RegisteredSums::default();
        let mut regions: Vec<_> = (0..200).map(region).collect();
        for region in &mut regions {
            sums.add(region);
        }
        assert_eq!(sums.reasons.len(), NAMED_REASONS);
        let named: u64 = sums.reasons.values().sum();
        assert_eq!((named, sums.other_reasons), (64, 136));
        assert_eq!(sums.bytes, [200, 0, 0, 199 * 100]);
        // A reason that was counted with others may be named for a later region.
        sums.remove(&regions.remove(0));
        sums.remove(&regions.remove(0));
        let mut late = region(199);
        sums.add(&mut late);
        assert_eq!(sums.reasons["reason 99"], 1);
        for region in regions.iter().chain([&late]) {
            sums.remove(region);
        }
        assert_eq!((sums.bytes, sums.other_reasons), ([0; 4], 0));
        assert!(sums.reasons.is_empty());
    }
}
