//! Asynchronous events.

use super::Text;
use bytemuck::{Pod, Zeroable};

/// What happened to an object or to everything; numbers of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum AsyncEventKind {
    CqErr = 0,
    QpFatal = 1,
    QpReqErr = 2,
    QpAccessErr = 3,
    SqDrained = 5,
    /// The daemon ends, or closes this client for the given reason.
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
}

impl AsyncEventKind {
    /// The kind with that number.
    pub fn from_u32(v: u32) -> Option<AsyncEventKind> {
        use AsyncEventKind::*;
        [
            CqErr,
            QpFatal,
            QpReqErr,
            QpAccessErr,
            SqDrained,
            DeviceFatal,
            PortActive,
            PortErr,
        ]
        .into_iter()
        .find(|k| *k as u32 == v)
    }
}

/// One packet on the async event socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AsyncEvent {
    /// [`AsyncEventKind`].
    pub kind: u32,
    /// QP number, CQ id or device index.
    pub object: u32,
    pub reason: Text<120>,
}
