//! Asynchronous events.

use super::Text;
use bytemuck::{Pod, Zeroable};

/// Kind of an asynchronous event; values of `enum ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum AsyncEventKind {
    CqErr = 0,
    QpFatal = 1,
    QpReqErr = 2,
    QpAccessErr = 3,
    /// COMM_EST of the verbs numbering: never sent, because ESTABLISHED always comes first.
    CommEst = 4,
    SqDrained = 5,
    /// With [`EVERY_DEVICE`]: the daemon ends, or disconnects this client for the given reason. With
    /// the index of a device: that device failed or was removed, the others remain in service.
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
    /// Fewer receive requests are posted than the armed limit.
    SrqLimitReached = 15,
    /// The queue pair takes no more requests from its shared receive queue.
    QpLastWqeReached = 16,
    /// The GID table of a device has changed.
    GidChange = 18,
}

/// Stands for all devices in place of a device index.
pub const EVERY_DEVICE: u32 = u32::MAX;

impl AsyncEventKind {
    /// The kind with this number.
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
            GidChange,
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
