//! Work completions, in the form used in completion queues and returned to applications
//! (ibv_poll_cq(3)).

use bytemuck::{Pod, Zeroable};
use core::mem::{offset_of, size_of};

/// Outcome of a work request; values of `enum ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(transparent)]
pub struct WcStatus(pub u8);

impl WcStatus {
    /// The request succeeded.
    pub const SUCCESS: WcStatus = WcStatus(0);
    /// A message is longer than its receive request.
    pub const LOC_LEN_ERR: WcStatus = WcStatus(1);
    /// The queue pair does not support the request.
    pub const LOC_QP_OP_ERR: WcStatus = WcStatus(2);
    /// A local key does not allow the access.
    pub const LOC_PROT_ERR: WcStatus = WcStatus(4);
    /// The queue pair went to the error state before the request was done.
    pub const WR_FLUSH_ERR: WcStatus = WcStatus(5);
    /// A bind or a registration by work request was refused.
    pub const MW_BIND_ERR: WcStatus = WcStatus(6);
    /// The peer's response violates the protocol.
    pub const BAD_RESP_ERR: WcStatus = WcStatus(7);
    /// A peer was not allowed to access local memory.
    pub const LOC_ACCESS_ERR: WcStatus = WcStatus(8);
    /// The peer found the request invalid.
    pub const REM_INV_REQ_ERR: WcStatus = WcStatus(9);
    /// The peer does not allow the access.
    pub const REM_ACCESS_ERR: WcStatus = WcStatus(10);
    /// The peer could not execute the request.
    pub const REM_OP_ERR: WcStatus = WcStatus(11);
    /// The transport gave up.
    pub const RETRY_EXC_ERR: WcStatus = WcStatus(12);
    /// The peer did not post a receive in time.
    pub const RNR_RETRY_EXC_ERR: WcStatus = WcStatus(13);
    /// The peer aborted the operation.
    pub const REM_ABORT_ERR: WcStatus = WcStatus(16);
    /// The device failed.
    pub const FATAL_ERR: WcStatus = WcStatus(19);
    /// No response in time.
    pub const RESP_TIMEOUT_ERR: WcStatus = WcStatus(20);
    /// Any other error.
    pub const GENERAL_ERR: WcStatus = WcStatus(21);

    /// Describes the status, like ibv_wc_status_str.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SUCCESS => "success",
            Self::LOC_LEN_ERR => "local length error",
            Self::LOC_QP_OP_ERR => "local QP operation error",
            Self::LOC_PROT_ERR => "local protection error",
            Self::WR_FLUSH_ERR => "work request flushed",
            Self::MW_BIND_ERR => "memory window bind error",
            Self::BAD_RESP_ERR => "bad response",
            Self::LOC_ACCESS_ERR => "local access error",
            Self::REM_INV_REQ_ERR => "remote invalid request",
            Self::REM_ACCESS_ERR => "remote access error",
            Self::REM_OP_ERR => "remote operation error",
            Self::RETRY_EXC_ERR => "transport retries exceeded",
            Self::RNR_RETRY_EXC_ERR => "no receive posted at the peer",
            Self::REM_ABORT_ERR => "remote abort",
            Self::FATAL_ERR => "fatal error",
            Self::RESP_TIMEOUT_ERR => "response timeout",
            Self::GENERAL_ERR => "general error",
            _ => "unknown status",
        }
    }
}

/// Kind of the completed request; values of `enum ibv_wc_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(transparent)]
pub struct WcOpcode(pub u8);

impl WcOpcode {
    /// A SEND of any kind.
    pub const SEND: WcOpcode = WcOpcode(0);
    /// An RDMA WRITE.
    pub const RDMA_WRITE: WcOpcode = WcOpcode(1);
    /// An RDMA READ.
    pub const RDMA_READ: WcOpcode = WcOpcode(2);
    /// A CmpSwap.
    pub const COMP_SWAP: WcOpcode = WcOpcode(3);
    /// A FetchAdd.
    pub const FETCH_ADD: WcOpcode = WcOpcode(4);
    /// A bind of a memory window.
    pub const BIND_MW: WcOpcode = WcOpcode(5);
    /// A local invalidation, or a registration by work request.
    pub const LOCAL_INV: WcOpcode = WcOpcode(6);
    /// A receive request completed by a SEND.
    pub const RECV: WcOpcode = WcOpcode(128);
    /// A receive request completed by an RDMA WRITE with immediate data.
    pub const RECV_RDMA_WITH_IMM: WcOpcode = WcOpcode(129);
}

impl WcOpcode {
    /// Returns whether a receive work request completed.
    #[inline]
    pub fn is_receive(self) -> bool {
        self.0 & Self::RECV.0 != 0
    }
}

impl From<crate::wqe::Opcode> for WcOpcode {
    fn from(other: crate::wqe::Opcode) -> WcOpcode {
        use crate::wqe::Opcode::*;
        match other {
            Write | WriteWithImm => WcOpcode::RDMA_WRITE,
            Read | ReadWithInv => WcOpcode::RDMA_READ,
            Send | SendWithInv | SendWithImm => WcOpcode::SEND,
            FetchAdd => WcOpcode::FETCH_ADD,
            CmpSwap => WcOpcode::COMP_SWAP,
            LocalInv | RegMr => WcOpcode::LOCAL_INV,
            BindMw => WcOpcode::BIND_MW,
        }
    }
}

/// Flags of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(transparent)]
pub struct WcFlags(pub u16);

impl WcFlags {
    /// No flag.
    pub const NONE: WcFlags = WcFlags(0);
    /// A received datagram: the buffer begins with its GRH.
    pub const GRH: WcFlags = WcFlags(1);
    /// `imm` holds immediate data.
    pub const WITH_IMM: WcFlags = WcFlags(2);
    /// `imm` holds the local key that the peer invalidated.
    pub const WITH_INV: WcFlags = WcFlags(8);
    /// The peer requested a solicited event.
    pub const SOLICITED: WcFlags = WcFlags(0x100);
    /// A received datagram came by IPv4, not by IPv6.
    pub const IPV4: WcFlags = WcFlags(0x200);

    /// Returns whether all bits of `flags` are set.
    #[inline]
    pub fn contains(self, flags: WcFlags) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl std::ops::BitOr for WcFlags {
    type Output = WcFlags;
    fn bitor(self, other: WcFlags) -> WcFlags {
        WcFlags(self.0 | other.0)
    }
}

/// Completion queue entry, 64 bytes in shared memory.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Wc {
    /// Set by the application in the work request.
    pub wr_id: u64,
    /// The queue pair that completed it.
    pub qp_num: u32,
    /// Success or the kind of error.
    pub status: WcStatus,
    /// Kind of the request; meaningful after a success, and to distinguish receives from sends.
    pub opcode: WcOpcode,
    /// Validity and meaning of `imm`, and other properties.
    pub flags: WcFlags,
    /// Bytes received or read; of a datagram, with its GRH.
    pub byte_len: u32,
    /// Immediate data or the invalidated key; see `flags`.
    pub imm: u32,
    /// Details of a failure: layer, type and code of a Terminate message, or 0.
    pub vendor_err: u32,
    /// Number of the queue pair that sent a received datagram; 0 otherwise.
    pub src_qp: u32,
    /// Zero.
    pub reserved: [u32; 6],
    /// TSC or 0; reserved for extended completion queues.
    pub reserved2: u32,
    /// Written last; owned by the ring code.
    pub seq: u32,
}

const _: () = assert!(size_of::<Wc>() == 64 && offset_of!(Wc, seq) == 60);
const _: () = assert!(offset_of!(Wc, qp_num) == 8 && offset_of!(Wc, byte_len) == 16);
// All fields except the reserved ones and `seq` lie in the first four words; see `CqProducer::push`.
const _: () = assert!(offset_of!(Wc, reserved) <= 32);
