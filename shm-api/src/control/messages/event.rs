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
    /// The numbering's COMM_EST: never sent, ESTABLISHED always comes first.
    CommEst = 4,
    SqDrained = 5,
    /// The daemon ends, or closes this client for the given reason: with [`EVERY_DEVICE`]. With the
    /// index of a device: that one is gone, the others serve on.
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
    /// Fewer receive requests are posted than the limit that was armed.
    SrqLimitReached = 15,
    /// The queue pair takes nothing more from its shared receive queue.
    QpLastWqeReached = 16,
}

/// Instead of the index of a device: all of them.
pub const EVERY_DEVICE: u32 = u32::MAX;

impl AsyncEventKind {
    /// The kind with that number.
    pub fn from_u32(number: u32) -> Option<AsyncEventKind> {
        use AsyncEventKind::*;
        [
            CqErr,
            QpFatal,
            QpReqErr,
            QpAccessErr,
            CommEst,
            SqDrained,
            DeviceFatal,
            PortActive,
            PortErr,
            SrqLimitReached,
            QpLastWqeReached,
        ]
        .into_iter()
        .find(|kind| *kind as u32 == number)
    }
}

/// One packet on the async event socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AsyncEventMessage {
    /// [`AsyncEventKind`].
    pub kind: u32,
    /// QP number, CQ id, SRQ id or device index.
    pub object: u32,
    pub reason: Text<120>,
}
