//! Protection domains, arenas, memory regions.

use bytemuck::{Pod, Zeroable};

/// Creates a protection domain (ibv_alloc_pd(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocPd {
    pub device: u32,
    pub reserved: u32,
}

/// Destroys a protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeallocPd {
    pub pd: u32,
    pub reserved: u32,
}

/// Allocates memory of the daemon for registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocArena {
    pub len: u64,
    /// 1: hugepages, if available.
    pub huge: u32,
    pub reserved: u32,
}

/// Reply with one fd: the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ArenaReply {
    pub arena: u32,
    /// 1 when hugepages back it.
    pub huge: u32,
    /// Actual size in bytes.
    pub len: u64,
}

/// Frees an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FreeArena {
    pub arena: u32,
    pub reserved: u32,
}

/// Registers part of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RegMr {
    pub pd: u32,
    pub arena: u32,
    pub offset: u64,
    pub len: u64,
    /// Address by which work requests and peers refer to the first byte.
    pub va: u64,
    /// [`crate::Access`] bits.
    pub access: u32,
    pub reserved: u32,
}

/// Keys of a registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MrReply {
    pub lkey: u32,
    pub rkey: u32,
}

/// In [`ReregMr`]: bits of `enum ibv_rereg_mr_flags`.
pub const REREG_TRANSLATION: u32 = 1;
/// In [`ReregMr`].
pub const REREG_PD: u32 = 2;
/// In [`ReregMr`].
pub const REREG_ACCESS: u32 = 4;

/// Deregisters a region and registers it again with the changes that `flags` selects
/// (ibv_rereg_mr(3)). Answered with its new keys when no worker can access the memory through the old
/// one any more.
///
/// A region of memory that the application already had can only change its access rights, and keeps
/// its keys; LOCAL_WRITE and REMOTE_ATOMIC can be added if all of its memory is shared with the daemon and
/// writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReregMr {
    /// The key from the registration.
    pub lkey: u32,
    /// `REREG_` bits.
    pub flags: u32,
    pub pd: u32,
    pub arena: u32,
    pub offset: u64,
    pub len: u64,
    /// The new address of the first byte, in all cases.
    pub va: u64,
    pub access: u32,
    pub reserved: u32,
}

/// Allocates a region for REG_MR work requests over pages of one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocFastMr {
    pub pd: u32,
    pub arena: u32,
    pub max_pages: u32,
    pub reserved: u32,
}

/// The page list is at `list`: `max_pages` offsets in the arena, u64 each. The client writes it
/// before it posts REG_MR and leaves it unchanged until that completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FastMrReply {
    pub lkey: u32,
    pub rkey: u32,
    pub max_pages: u32,
    pub reserved: u32,
    pub list: super::QueueRef,
}

/// Allocates a memory window (ibv_alloc_mw(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocMw {
    pub pd: u32,
    /// 1 or 2, as `enum ibv_mw_type`.
    pub kind: u32,
}

/// A new memory window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MwReply {
    /// Identifies the window in control messages; the key of its first bind differs in the low octet.
    pub rkey: u32,
    pub reserved: u32,
}

/// Deallocates a memory window. Answered when no worker can use the window any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeallocMw {
    /// The key from the allocation.
    pub rkey: u32,
    pub reserved: u32,
}

/// Flag of [`DeregMr`]: windows that are bound to the region are unbound first. Daemons that do not
/// know it refuse the request while windows are bound.
pub const DEREG_UNBIND_WINDOWS: u32 = 1;

/// Deregisters a region. Answered when no worker can access the memory any more. Without
/// [`DEREG_UNBIND_WINDOWS`] it is refused (EBUSY) while windows are bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeregMr {
    pub lkey: u32,
    pub flags: u32,
}
