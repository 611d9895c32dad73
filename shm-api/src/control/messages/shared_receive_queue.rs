//! Shared receive queues.

use super::QueueRef;
use bytemuck::{Pod, Zeroable};

/// Creates a shared receive queue (ibv_create_srq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateSrq {
    pub pd: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    /// Low-water mark, 0 for none; see [`SRQ_LIMIT`].
    pub limit: u32,
    /// Maximum number of requests that one queue pair may hold: being filled, or completed and not
    /// polled. A stream that needs another one finds no buffer (RFC 5042 section 6.4.3.1). 0: no
    /// limit.
    pub share: u32,
    pub reserved: u32,
}

/// A new shared receive queue, or its new ring after a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SrqReply {
    pub srq: u32,
    /// Entries of the ring, a power of two.
    pub entries: u32,
    /// Slots per entry.
    pub stride: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    pub share: u32,
    pub mem: QueueRef,
}

/// [`ModifySrq`] applies `max_wr`: the reply has a new ring, and the client posts only to it.
pub const SRQ_MAX_WR: u32 = 1;
/// [`ModifySrq`] applies `limit`: one SRQ_LIMIT_REACHED follows when fewer requests are posted.
pub const SRQ_LIMIT: u32 = 2;

/// Modifies a shared receive queue (ibv_modify_srq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ModifySrq {
    pub srq: u32,
    /// Fields to apply: [`SRQ_MAX_WR`], [`SRQ_LIMIT`].
    pub mask: u32,
    pub max_wr: u32,
    pub limit: u32,
}

/// Queries the state of a shared receive queue (ibv_query_srq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QuerySrq {
    pub srq: u32,
    pub reserved: u32,
}

/// State of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SrqStateReply {
    pub max_wr: u32,
    pub max_sge: u32,
    /// 0 when no event is armed.
    pub limit: u32,
    /// Number of posted requests that no queue pair has taken.
    pub posted: u32,
    /// The share set at creation.
    pub share: u32,
    pub reserved: u32,
}

/// Destroys a shared receive queue. Refused while queue pairs use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroySrq {
    pub srq: u32,
    pub reserved: u32,
}
