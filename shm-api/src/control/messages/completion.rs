//! Completion channels and completion queues.

use super::QueueRef;
use bytemuck::{Pod, Zeroable};

/// Completion channel. One fd in the `IdReply`: the client reads 8-byte cookies
/// from it (the reading end of `event_stream`), one per event.
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
    /// What the channel delivers for this queue.
    pub cookie: u64,
}

/// A new completion queue, or new rings after a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CqReply {
    pub cq: u32,
    /// Entries of each ring, a power of two.
    pub entries: u32,
    /// Rings.
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

/// ibv_resize_cq(3). Answered when every worker writes to the new rings: those before hold what
/// completed earlier, until [`FreeCqRing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResizeCq {
    pub cq: u32,
    pub cqe: u32,
}

/// The client has emptied the rings from before a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FreeCqRing {
    pub cq: u32,
    /// 1: the client found completions there after it had armed the queue, whose event may have
    /// got lost: raise one.
    pub notify: u32,
}

/// ibv_modify_cq(3): an armed queue raises its event after `count` completions, or `period`
/// microseconds after the first of them. Zeroes end the moderation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ModerateCq {
    pub cq: u32,
    pub count: u16,
    pub period: u16,
}
