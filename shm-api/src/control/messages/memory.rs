//! Protection domains, arenas, memory regions.

use bytemuck::{Pod, Zeroable};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AllocPd {
    pub device: u32,
    pub reserved: u32,
}

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
    /// [`crate::key_table::Access`] bits.
    pub access: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MrReply {
    pub lkey: u32,
    pub rkey: u32,
}

/// Answered when no worker can touch the memory any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeregMr {
    pub lkey: u32,
    pub reserved: u32,
}
