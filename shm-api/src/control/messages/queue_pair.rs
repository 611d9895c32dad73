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
    /// 1: every send work request completes with a CQE.
    pub sq_sig_all: u32,
    /// Shared receive queue instead of an own one; 0 for none.
    pub srq: u32,
}

/// The send queue is at `mem.offset`, the receive queue `rq_offset` after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QpReply {
    /// Unique in the daemon.
    pub qp_num: u32,
    /// Whose doorbell ring to use; may change when the connection is established.
    pub worker: u32,
    pub sq_slots: u32,
    pub rq_slots: u32,
    pub rq_offset: u32,
    /// Granted, at least what was asked for.
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
    pub mem: QueueRef,
}

/// QP states of RFC 5040, numbered as `enum siw_qp_state` is ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum QpState {
    Idle = 0,
    Rtr = 1,
    Rts = 2,
    Closing = 3,
    Terminate = 4,
    Error = 5,
    /// RTS, but no work request starts (verbs' send queue drain). In the state word of the send
    /// queue's header it is RTS.
    Sqd = 6,
}

impl QpState {
    /// The state with that number.
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
    /// [`QpState`]: Idle empties the queues and gives up the connection (verbs' RESET: the client
    /// starts over at the beginning of both rings), Sqd and Rts stop and resume sending, Closing
    /// disconnects, Terminate sends one, Error flushes.
    pub state: u32,
    /// 0, or [`MODIFY_ACCESS`]: `denied_access` changes instead of the state. With
    /// [`FEATURE_QP_ACCESS`](super::FEATURE_QP_ACCESS).
    pub flags: u32,
    /// What the peer may not do: [`crate::Access`] bits of [`crate::Access::REMOTE`].
    pub denied_access: u32,
}

/// In [`ModifyQp`].
pub const MODIFY_ACCESS: u32 = 1;

/// Asks for the state of a queue pair (ibv_query_qp(3)).
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
    /// In [`QpState::Sqd`]: 1 until everything that was started is completed.
    pub draining: u32,
    /// Largest ULPDU of an FPDU (RFC 5044 section 4.1); 0 without a connection.
    pub mulpdu: u32,
    pub local: Addr,
    pub peer: Addr,
}

/// Destroys a queue pair (ibv_destroy_qp(3)); a connection is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DestroyQp {
    pub qp_num: u32,
    pub reserved: u32,
}
