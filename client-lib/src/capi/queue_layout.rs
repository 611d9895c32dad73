//! The structs of `siw.h` about shared receive queues, queue pair attributes and limits.

use super::from_socket_addr;
use crate::{Limits, QpAttr, QpInit, QpState, SrqAttr, VerbsQpState};

/// `struct siw_srq_attr`
#[repr(C)]
pub struct SiwSrqAttr {
    pub size: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
    pub posted: u32,
    pub max_share: u32,
}

impl From<&SrqAttr> for SiwSrqAttr {
    fn from(attributes: &SrqAttr) -> Self {
        SiwSrqAttr {
            size: size_of::<SiwSrqAttr>() as u32,
            max_wr: attributes.max_wr,
            max_sge: attributes.max_sge,
            srq_limit: attributes.limit,
            posted: attributes.posted,
            max_share: attributes.share,
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
    pub(super) fn new(attributes: &QpAttr, caps: &QpInit) -> Self {
        let state = attributes.state.unwrap_or(QpState::Error);
        SiwQpAttr {
            state: state as u32,
            verbs_state: VerbsQpState::from(state) as u32,
            sq_draining: attributes.draining.into(),
            mulpdu: attributes.mulpdu,
            initiator_depth: attributes.ord,
            responder_resources: attributes.ird,
            max_send_wr: caps.max_send_wr,
            max_recv_wr: caps.max_recv_wr,
            max_send_sge: caps.max_send_sge,
            max_recv_sge: caps.max_recv_sge,
            max_inline_data: caps.max_inline,
            reserved: 0,
            local: from_socket_addr(attributes.local),
            peer: from_socket_addr(attributes.peer),
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
    fn from(limits: &Limits) -> Self {
        SiwLimits {
            max_qp: limits.max_qp,
            max_qp_wr: limits.max_qp_wr,
            max_sge: limits.max_sge,
            max_sge_rd: limits.max_sge_rd,
            max_inline_data: limits.max_inline,
            max_cq: limits.max_cq,
            max_cqe: limits.max_cqe,
            max_mr: limits.max_mr,
            max_pd: limits.max_pd,
            max_srq: limits.max_srq,
            max_srq_wr: limits.max_srq_wr,
            max_srq_sge: limits.max_srq_sge,
            max_initiator_depth: limits.max_ord,
            max_responder_resources: limits.max_ird,
            max_private_data: limits.max_private_data,
            max_mw: limits.max_mw,
            max_fast_pages: limits.max_fast_pages,
            reserved: 0,
            max_msg: limits.max_msg,
            max_mr_size: limits.max_mr_size,
        }
    }
}
