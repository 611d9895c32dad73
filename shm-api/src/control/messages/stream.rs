//! Connections in streaming mode (RFC 5044 section 7.1.3): TCP bytes, until one end or the other agrees
//! with its peer to start MPA.
//!
//! ```text
//! OPEN_STREAM -> STREAM_OPENED --+-- SEND_STREAM, RECEIVE_STREAM --+-- CONNECT (initiator) -> ESTABLISHED
//! LISTEN -----> STREAM_OPENED --'    STREAM_READY                  |-- TURN_STREAM (responder) -> CONNECT_REQUEST
//!                                                                  '-- END_STREAM
//! ```

use super::Addr;
use bytemuck::{Pod, Zeroable};

/// Maximum number of bytes of one [`SendStream`] or [`ReceiveStream`].
pub const STREAM_BYTES: usize = 2048;

/// Opens a TCP connection in streaming mode. The reply has its number; the outcome is one event with
/// `cookie`: [`CmEventKind::StreamOpened`](super::CmEventKind::StreamOpened), or as for
/// [`Connect`](super::Connect).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenStream {
    /// Index or [`ANY_DEVICE`](super::ANY_DEVICE).
    pub device: u32,
    pub cm_channel: u32,
    /// Milliseconds for the TCP connection; 0 for the default.
    pub timeout_ms: u32,
    /// Milliseconds without a byte in either direction after which the connection is reset; 0: the device's
    /// `accept_timeout_ms`.
    pub idle_timeout_ms: u32,
    pub cookie: u64,
    pub dst: Addr,
    /// Family 0: the daemon chooses.
    pub src: Addr,
}

/// Sends bytes of a connection in streaming mode, as many as TCP takes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SendStream {
    /// Number of the connection, as in [`CmEventMessage::request`](super::CmEventMessage::request).
    pub stream: u32,
    /// 1 to [`STREAM_BYTES`].
    pub len: u32,
    pub bytes: [u8; STREAM_BYTES],
}

/// Number of bytes that were taken. 0: an event,
/// [`CmEventKind::StreamReady`](super::CmEventKind::StreamReady), follows when there is room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SendStreamReply {
    pub len: u32,
    pub reserved: u32,
}

/// Reads received bytes of a connection in streaming mode, at most `len`. The others stay in TCP's receive
/// queue, and are MPA's if the connection turns to RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReceiveStream {
    pub stream: u32,
    /// 1 to [`STREAM_BYTES`].
    pub len: u32,
}

/// Bytes that were read. None, without [`STREAM_CLOSED`]: an event,
/// [`CmEventKind::StreamReady`](super::CmEventKind::StreamReady), follows when there are some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReceiveStreamReply {
    pub len: u32,
    /// `STREAM_` bits.
    pub flags: u32,
    pub bytes: [u8; STREAM_BYTES],
}

/// [`ReceiveStreamReply::flags`]: the peer has closed its direction, and all its bytes were read.
pub const STREAM_CLOSED: u32 = 1;

/// Turns a connection in streaming mode to RDMA, with this end as the MPA responder. An event with `cookie`
/// follows on `cm_channel`: [`CmEventKind::ConnectRequest`](super::CmEventKind::ConnectRequest) with the
/// number of the connection, to be answered as any other, or
/// [`CmEventKind::ConnectError`](super::CmEventKind::ConnectError).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TurnStream {
    pub stream: u32,
    pub cm_channel: u32,
    pub cookie: u64,
}

/// [`EndStream::flags`]: the connection is reset, unsent bytes are lost.
pub const END_RESET: u32 = 1;
/// [`EndStream::flags`]: only this direction is closed; bytes of the peer can be read.
pub const END_SENDING: u32 = 2;

/// Closes a connection in streaming mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EndStream {
    pub stream: u32,
    /// `END_` bits.
    pub flags: u32,
}
