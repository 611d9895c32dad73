//! Registration of memory that an application already has: its pieces lie in arenas, or in memory of
//! the client that the daemon may use.

use super::Text;
use bytemuck::{Pod, Zeroable};

/// Maximum number of extents in one message.
pub const MAX_EXTENTS: usize = 128;

/// Method by which the daemon accesses the memory of an extent. The arena determines the access.
/// Before a region is registered in an arena of the daemon, the client has mapped the arena for writing:
/// the daemon takes the right to free its pages, and then mmap(2) makes no writable mapping of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum ExtentMethod {
    /// The application allocated the memory from an arena.
    Arena = 0,
    /// Pages of an arena replaced private pages.
    Remap = 1,
    /// A mapping that the daemon shares ([`ImportMemory`]).
    Shared = 2,
    /// System calls copy the memory ([`ImportMemory`]).
    Copy = 3,
}

impl ExtentMethod {
    /// All methods, by number.
    pub const ALL: [ExtentMethod; 4] = [
        ExtentMethod::Arena,
        ExtentMethod::Remap,
        ExtentMethod::Shared,
        ExtentMethod::Copy,
    ];

    /// Name in statistics and logs.
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
    /// Number of an arena from [`super::AllocArena`] or [`ImportMemory`].
    pub arena: u32,
    /// [`ExtentMethod`].
    pub method: u32,
    /// Offset of the first byte in the arena; for a process, its address.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The first extents of the region that the next [`RegMemory`] of this client registers, if the
/// region has more than fit into that message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AddExtents {
    /// Used entries of `extents`.
    pub count: u32,
    pub reserved: u32,
    pub extents: [MemoryExtent; MAX_EXTENTS],
}

/// Registers memory of one or more extents, concatenated without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RegMemory {
    pub pd: u32,
    /// [`crate::Access`] bits.
    pub access: u32,
    /// Length of all extents in bytes.
    pub len: u64,
    /// Address by which work requests and peers refer to the first byte.
    pub va: u64,
    /// Used entries of `extents`; those of [`AddExtents`] precede them.
    pub count: u32,
    pub reserved: u32,
    /// Human-readable reason for the choice of methods.
    pub reason: Text<64>,
    pub extents: [MemoryExtent; MAX_EXTENTS],
}

/// [`ImportMemory::kind`]: a file in memory (memfd, /dev/shm, hugetlbfs).
pub const IMPORT_FILE: u32 = 1;
/// [`ImportMemory::kind`]: the client's own address space, given by a descriptor of /proc/self/mem.
pub const IMPORT_PROCESS: u32 = 2;

/// Lets the daemon use memory of the client; the only request that carries a file descriptor. The
/// reply has the number of an arena, to be freed with [`super::FreeArena`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ImportMemory {
    /// An `IMPORT_` constant.
    pub kind: u32,
    /// 1: the daemon may write to it.
    pub writable: u32,
    /// Files only: offset of the first byte, a multiple of the page size.
    pub offset: u64,
    /// Files only: number of bytes to map.
    pub len: u64,
}

/// Lets this client use a part of a file that the daemon made for the same process: memory that
/// another of its connections has registered. The reply has the number of an arena, as that of
/// [`ImportMemory`]; needs [`FEATURE_OWN_FILES`](super::FEATURE_OWN_FILES).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ImportOwnFile {
    /// Device of the file (stat(2)), major number.
    pub device_major: u32,
    /// Minor number.
    pub device_minor: u32,
    /// Inode of the file.
    pub inode: u64,
    /// 1: the daemon may write to it.
    pub writable: u32,
    pub reserved: u32,
    /// Offset of the first byte, a multiple of the page size.
    pub offset: u64,
    /// Number of bytes to map.
    pub len: u64,
}
