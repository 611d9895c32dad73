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

/// Memory from the daemon for registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocArena {
    pub len: u64,
    /// 1: hugepages if there are any.
    pub huge: u32,
    pub reserved: u32,
}

/// One fd: the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ArenaReply {
    pub arena: u32,
    /// 1 when hugepages back it.
    pub huge: u32,
    /// Actual bytes.
    pub len: u64,
}

/// Gives an arena back.
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
    /// Address by which work requests and peers name the first byte.
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

/// Deregisters a region and registers it with what `flags` names changed (ibv_rereg_mr(3)).
/// Answered with its new keys when no worker can touch the memory by the old one.
///
/// A region of memory that the application had already changes its access rights alone, and keeps its
/// keys; LOCAL_WRITE and REMOTE_ATOMIC may go, but not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReregMr {
    /// As of the registration.
    pub lkey: u32,
    /// `REREG_` bits.
    pub flags: u32,
    pub pd: u32,
    pub arena: u32,
    pub offset: u64,
    pub len: u64,
    /// Always the address of the first byte from now on.
    pub va: u64,
    pub access: u32,
    pub reserved: u32,
}

/// A region for REG_MR work requests over pages of one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocFastMr {
    pub pd: u32,
    pub arena: u32,
    pub max_pages: u32,
    pub reserved: u32,
}

/// The page list is at `list`: `max_pages` offsets in the arena, u64 each, written by the client
/// before it posts REG_MR and left alone until that completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FastMrReply {
    pub lkey: u32,
    pub rkey: u32,
    pub max_pages: u32,
    pub reserved: u32,
    pub list: super::QueueRef,
}

/// A memory window (ibv_alloc_mw(3)).
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
    /// Names the window in control messages; the key of its first bind differs in the low octet.
    pub rkey: u32,
    pub reserved: u32,
}

/// Answered when no worker can use the window any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeallocMw {
    /// As of the allocation.
    pub rkey: u32,
    pub reserved: u32,
}

/// Answered when no worker can touch the memory any more. Refused (EBUSY) while windows are
/// bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeregMr {
    pub lkey: u32,
    pub reserved: u32,
}
