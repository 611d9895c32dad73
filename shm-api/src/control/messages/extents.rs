//! Registration of memory that an application has already: its pieces lie in arenas, or in memory
//! that the client lets the daemon use.

use super::Text;
use bytemuck::{Pod, Zeroable};

/// Extents of one message.
pub const MAX_EXTENTS: usize = 128;

/// How the daemon gets at the memory of an extent. It is for statistics alone: what decides is the
/// arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum ExtentMethod {
    /// The application allocated it from an arena.
    Arena = 0,
    /// Pages of an arena took the place of private pages.
    Remap = 1,
    /// A mapping that the daemon shares ([`ImportMemory`]).
    Shared = 2,
    /// System calls copy it ([`ImportMemory`]).
    Copy = 3,
}

impl ExtentMethod {
    /// All of them, by number.
    pub const ALL: [ExtentMethod; 4] = [
        ExtentMethod::Arena,
        ExtentMethod::Remap,
        ExtentMethod::Shared,
        ExtentMethod::Copy,
    ];

    /// Its name in statistics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            ExtentMethod::Arena => "arena",
            ExtentMethod::Remap => "remap",
            ExtentMethod::Shared => "shared",
            ExtentMethod::Copy => "copy",
        }
    }
}

/// A piece of a region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MemoryExtent {
    /// Of [`super::AllocArena`] or [`ImportMemory`].
    pub arena: u32,
    /// [`ExtentMethod`].
    pub method: u32,
    /// First byte in the arena; for a process, its address.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The first extents of the region that the next [`RegMemory`] of this client registers, where they
/// are more than fit into that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AddExtents {
    /// Used entries of `extents`.
    pub count: u32,
    pub reserved: u32,
    pub extents: [MemoryExtent; MAX_EXTENTS],
}

/// Registers memory of one or more extents, which follow each other without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RegMemory {
    pub pd: u32,
    /// [`crate::Access`] bits.
    pub access: u32,
    /// Bytes, of all extents.
    pub len: u64,
    /// Address by which work requests and peers name the first byte.
    pub va: u64,
    /// Used entries of `extents`; those of [`AddExtents`] come before.
    pub count: u32,
    pub reserved: u32,
    /// Why the methods of its extents were chosen, for people.
    pub reason: Text<64>,
    pub extents: [MemoryExtent; MAX_EXTENTS],
}

/// [`ImportMemory::kind`]: a file in memory (memfd, /dev/shm, hugetlbfs).
pub const IMPORT_FILE: u32 = 1;
/// [`ImportMemory::kind`]: the client's own address space, by a descriptor of /proc/self/mem.
pub const IMPORT_PROCESS: u32 = 2;

/// Lets the daemon use memory that the client has: the only request that carries a file descriptor.
/// The reply has the number of an arena, to be freed by [`super::FreeArena`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ImportMemory {
    /// `IMPORT_`.
    pub kind: u32,
    /// 1: the daemon may write to it.
    pub writable: u32,
    /// Of files: the first byte, a multiple of the page size.
    pub offset: u64,
    /// Of files: bytes to map.
    pub len: u64,
}
