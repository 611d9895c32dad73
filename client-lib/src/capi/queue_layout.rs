//! The structs of `siw.h` about shared receive queues, queue pair attributes and limits.

use super::from_socket_addr;
use crate::{Limits, QpAttr, QpInit, QpState, SrqAttr, VerbsQpState};

/// `struct siw_srq_attr`
#[repr(C)]
pub struct SiwSrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
    pub posted: u32,
    pub max_share: u32,
    pub reserved: u32,
}

impl From<&SrqAttr> for SiwSrqAttr {
    fn from(a: &SrqAttr) -> Self {
        SiwSrqAttr {
            max_wr: a.max_wr,
            max_sge: a.max_sge,
            srq_limit: a.limit,
            posted: a.posted,
            max_share: a.share,
            reserved: 0,
        }
    }
}

/// `struct siw_qp_attr`
#[repr(C)]
pub struct SiwQpAttr {
    pub state: u32,
    pub verbs_state: u32,
    pub sq_draining: u32,
    pub mulpdu: u32,
    pub initiator_depth: u32,
    pub responder_resources: u32,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
    pub reserved: u32,
    pub local: libc::sockaddr_storage,
    pub peer: libc::sockaddr_storage,
}

impl SiwQpAttr {
    pub(super) fn new(a: &QpAttr, caps: &QpInit) -> Self {
        let state = a.state.unwrap_or(QpState::Error);
        SiwQpAttr {
            state: state as u32,
            verbs_state: VerbsQpState::from(state) as u32,
            sq_draining: a.draining.into(),
            mulpdu: a.mulpdu,
            initiator_depth: a.ord,
            responder_resources: a.ird,
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge: caps.max_recv_sge,
            max_inline_data: caps.max_inline,
            reserved: 0,
            local: from_socket_addr(a.local),
            peer: from_socket_addr(a.peer),
        }
    }
}

/// `struct siw_limits`
#[repr(C)]
pub struct SiwLimits {
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_inline_data: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_initiator_depth: u32,
    pub max_responder_resources: u32,
    pub max_private_data: u32,
    pub max_mw: u32,
    pub max_fast_pages: u32,
    pub reserved: u32,
    pub max_msg: u64,
    pub max_mr_size: u64,
}

impl From<&Limits> for SiwLimits {
    fn from(l: &Limits) -> Self {
        SiwLimits {
            max_qp: l.max_qp,
            max_qp_wr: l.max_qp_wr,
            max_sge: l.max_sge,
            max_sge_rd: l.max_sge_rd,
            max_inline_data: l.max_inline,
            max_cq: l.max_cq,
            max_cqe: l.max_cqe,
            max_mr: l.max_mr,
            max_pd: l.max_pd,
            max_srq: l.max_srq,
            max_srq_wr: l.max_srq_wr,
            max_srq_sge: l.max_srq_sge,
            max_initiator_depth: l.max_ord,
            max_responder_resources: l.max_ird,
            max_private_data: l.max_private_data,
            max_mw: l.max_mw,
            max_fast_pages: l.max_fast_pages,
            reserved: 0,
            max_msg: l.max_msg,
            max_mr_size: l.max_mr_size,
        }
    }
}
