//! Completion channels and completion queues.

use super::QueueRef;
use bytemuck::{Pod, Zeroable};

/// Creates a completion channel. One fd in the `IdReply`: the client reads 8-byte cookies from it
/// (the read end of `event_stream`), one per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateChannel {
    pub reserved: u64,
}

/// Destroys a completion channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyChannel {
    pub channel: u32,
    pub reserved: u32,
}

/// Creates a completion queue (ibv_create_cq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCq {
    pub cqe: u32,
    /// Completion channel or 0.
    pub channel: u32,
    /// Cookie that the channel delivers for this queue.
    pub cookie: u64,
}

/// A new completion queue, or new rings after a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CqReply {
    pub cq: u32,
    /// Entries of each ring, a power of two.
    pub entries: u32,
    /// Number of rings.
    pub workers: u32,
    pub reserved: u32,
    pub mem: QueueRef,
}

/// Destroys a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyCq {
    pub cq: u32,
    pub reserved: u32,
}

/// Resizes a completion queue (ibv_resize_cq(3)). Answered when every worker writes to the new rings;
/// the old rings hold the earlier completions until [`FreeCqRing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResizeCq {
    pub cq: u32,
    pub cqe: u32,
}

/// Frees the old rings after a resize; the client has emptied them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FreeCqRing {
    pub cq: u32,
    /// 1: the client found completions in the old rings after it had armed the queue, so their event
    /// may be lost: raise one.
    pub notify: u32,
}

/// Moderates events (ibv_modify_cq(3)): an armed queue raises its event after `count` completions, or
/// `period` microseconds after the first of them. Zeros end the moderation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ModerateCq {
    pub cq: u32,
    pub count: u16,
    pub period: u16,
}
