//! Completion channels and completion queues.

use super::QueueRef;
use bytemuck::{Pod, Zeroable};

/// Completion channel. One fd in the [`IdReply`]: the client reads 8-byte cookies
/// from it (the reading end of [`super::event_pipe`]), one per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateChannel {
    pub reserved: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyChannel {
    pub channel: u32,
    pub reserved: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateCq {
    pub cqe: u32,
    /// Completion channel or 0.
    pub channel: u32,
    /// What the channel delivers for this queue.
    pub cookie: u64,
}

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyCq {
    pub cq: u32,
    pub reserved: u32,
}
