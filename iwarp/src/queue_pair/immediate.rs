//! Immediate Data (RFC 7306 section 6): eight octets that consume a receive work request.
//!
//! The first four octets are the immediate data of the work request, most significant first, as
//! Chelsio hardware has them. RDMA WRITE with immediate is a Write and then Immediate Data.
//!
//! The RFC has no Send with immediate. Here it is Immediate Data whose other four octets are
//! [`OF_NEXT_SEND`], and then the Send: a queue pair of this kind joins the two into one completion
//! of one receive work request; any other peer sees two messages, and delivers them in order.

use crate::ddp::{Msn, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::{FpduKind, QpEnv};
use crate::mpa::fpdu::{self, LEN_FIELD};
use crate::queue_pair::receive::Fault;
use crate::queue_pair::requester::OutgoingFpdu;
use crate::queue_pair::send_queue::Entry;
use crate::queue_pair::{InMessage, QueuePair};
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_shm::{Opcode, Wc, WcFlags, WcOpcode, WcStatus};

/// Length of the payload.
pub(crate) const IMMEDIATE_LEN: usize = 8;
/// "send": the immediate data belongs to the Send that follows.
pub(crate) const OF_NEXT_SEND: [u8; 4] = *b"send";

/// The message that comes next for this work request is Immediate Data.
#[inline]
pub(crate) fn is_due(e: &Entry) -> bool {
    match e.opcode {
        // Its bytes went out, the last segment with L: see `request_record`.
        Opcode::WriteWithImm => e.parts == 1,
        Opcode::SendWithImm => e.parts == 0,
        _ => false,
    }
}

/// RdmapOpcode and payload of the Immediate Data of a work request.
pub(crate) fn message(e: &Entry) -> (RdmapOpcode, [u8; IMMEDIATE_LEN]) {
    let mut b = [0; IMMEDIATE_LEN];
    b[..4].copy_from_slice(&e.imm.to_be_bytes());
    if e.opcode == Opcode::SendWithImm {
        b[4..].copy_from_slice(&OF_NEXT_SEND);
        return (RdmapOpcode::Immediate, b);
    }
    let op = if e.is_solicited() {
        RdmapOpcode::ImmediateSe
    } else {
        RdmapOpcode::Immediate
    };
    (op, b)
}

impl QueuePair {
    pub(crate) fn immediate_record(&mut self, slot: u32, room: usize) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + IMMEDIATE_LEN) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        let e = self.sq.get_mut(slot)?;
        e.msn = self.send_msn.0;
        e.parts += 1;
        self.send_msn = self.send_msn.next();
        if e.opcode == Opcode::WriteWithImm {
            self.cur = None;
            self.in_message = InMessage::None;
            self.prefer_response = true;
        } else {
            self.in_message = InMessage::Request;
        }
        self.record(FpduKind::Immediate, true, ulpdu_len, slot, 0, wire)
    }

    /// Immediate Data arrived.
    pub(crate) fn immediate<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        op: RdmapOpcode,
        h: &UntaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        if h.msn != self.rx_send_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        if self.recv.active {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        }
        if h.mo != 0 {
            return Err(TerminateCode::DDP_MO.into());
        }
        // Conformance 86.
        if len as usize != IMMEDIATE_LEN || !h.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED.into());
        }
        self.absorb_send = false;
        let mut b = [0; IMMEDIATE_LEN];
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut b);
        let imm = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
        if b[4..] == OF_NEXT_SEND {
            self.send_imm = Some(imm);
            self.rx_send_msn = self.rx_send_msn.next();
            return Ok(());
        }
        self.send_imm = None;
        let wr_id = match env.next_recv() {
            Ok(Some(w)) => w.wr_id,
            Ok(None) => return Err(TerminateCode::DDP_NO_BUFFER.into()),
            Err(_) => return Err(TerminateCode::LOCAL_CATASTROPHIC.into()),
        };
        self.rx_send_msn = self.rx_send_msn.next();
        let solicited = if op.is_solicited() {
            WcFlags::SOLICITED
        } else {
            WcFlags::NONE
        };
        env.complete_recv(&Wc {
            wr_id,
            qp_num: self.attr.qpn,
            status: WcStatus::SUCCESS,
            opcode: WcOpcode::RECV_RDMA_WITH_IMM,
            flags: WcFlags::WITH_IMM | solicited,
            byte_len: std::mem::take(&mut self.write_len),
            imm,
            ..Wc::default()
        });
        Ok(())
    }
}

/// MSN of the Send of a work request.
#[inline]
pub(crate) fn send_msn(e: &Entry) -> Msn {
    if e.opcode == Opcode::SendWithImm {
        Msn(e.msn).next()
    } else {
        Msn(e.msn)
    }
}
