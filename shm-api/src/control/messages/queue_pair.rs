//! Queue pairs.

use super::{Addr, QueueRef};
use bytemuck::{Pod, Zeroable};

/// Creates a queue pair (ibv_create_qp(3)); the reply is [`QpReply`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CreateQp {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
    /// 1: every send work request generates a CQE.
    pub sq_sig_all: u32,
    /// Shared receive queue instead of a receive queue of its own; 0 for none.
    pub srq: u32,
    /// With [`FEATURE_STREAMS`](super::FEATURE_STREAMS).
    pub final_send: FinalSend,
}

/// The SEND that ends a stream. A queue pair that has one is a stream: when its client departs, the
/// daemon sends the requests posted to it, then this SEND, and closes the connection instead of
/// resetting it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(C)]
pub struct FinalSend {
    /// Bytes of `data`; 0: the queue pair is not a stream.
    pub len: u32,
    pub data: [u8; FinalSend::MAX],
}

impl FinalSend {
    /// Maximum length.
    pub const MAX: usize = 12;

    /// Creates it; `None` if it is longer than [`Self::MAX`].
    pub fn new(bytes: &[u8]) -> Option<FinalSend> {
        let mut message = FinalSend {
            len: bytes.len() as u32,
            ..FinalSend::default()
        };
        message.data.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(message)
    }

    /// The bytes; a length out of range counts as the maximum. `None`: not a stream.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        let len = (self.len as usize).min(FinalSend::MAX);
        (len > 0).then_some(&self.data[..len])
    }
}

/// Reply to [`CreateQp`]. The send queue is at `mem.offset`, the receive queue `rq_offset` after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QpReply {
    /// Unique within the daemon.
    pub qp_num: u32,
    /// Worker whose doorbell ring to use; may change when the connection is established.
    pub worker: u32,
    pub sq_slots: u32,
    pub rq_slots: u32,
    pub rq_offset: u32,
    /// Granted values, at least the requested ones.
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
    pub mem: QueueRef,
}

/// QP states of RFC 5040, numbered in the order of `enum siw_qp_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum QpState {
    Idle = 0,
    Rtr = 1,
    Rts = 2,
    Closing = 3,
    Terminate = 4,
    Error = 5,
    /// RTS, but no work request starts (verbs' send queue drain). The state word in the send queue's
    /// header shows RTS.
    Sqd = 6,
}

impl QpState {
    /// The state with this number.
    pub fn from_u32(number: u32) -> Option<QpState> {
        use QpState::*;
        [Idle, Rtr, Rts, Closing, Terminate, Error, Sqd]
            .get(number as usize)
            .copied()
    }
}

/// Changes the state of a queue pair (ibv_modify_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ModifyQp {
    pub qp_num: u32,
    /// [`QpState`]: Idle empties the queues and drops the connection (verbs' RESET: the client
    /// restarts at the beginning of both rings), Sqd and Rts stop and resume sending, Closing
    /// disconnects, Terminate sends a Terminate, Error flushes.
    pub state: u32,
    /// 0, [`MODIFY_QUIET_DRAIN`], or [`MODIFY_ACCESS`]: changes `denied_access` instead of the state.
    pub flags: u32,
    /// Rights that the peer is denied: [`crate::Access`] bits of [`crate::Access::REMOTE`].
    pub denied_access: u32,
}

/// [`ModifyQp::flags`]: change `denied_access`.
pub const MODIFY_ACCESS: u32 = 1;
/// [`ModifyQp::flags`]: a move to SQD without an event when the send queue is drained.
pub const MODIFY_QUIET_DRAIN: u32 = 2;

/// Queries the state of a queue pair (ibv_query_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueryQp {
    pub qp_num: u32,
    pub reserved: u32,
}

/// State of a queue pair, and of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QpStateReply {
    /// [`QpState`].
    pub state: u32,
    pub worker: u32,
    pub ird: u32,
    pub ord: u32,
    /// In [`QpState::Sqd`]: 1 until all started work requests are completed.
    pub draining: u32,
    /// Maximum ULPDU size of an FPDU (RFC 5044 section 4.1); 0 without a connection.
    pub mulpdu: u32,
    pub local: Addr,
    pub peer: Addr,
}

/// Destroys a queue pair (ibv_destroy_qp(3)) and resets its connection, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyQp {
    pub qp_num: u32,
    pub reserved: u32,
}
