//! The sending half of a queue pair: which FPDU comes next.

use crate::ddp::{TAGGED_HDR_LEN, UNTAGGED_HDR_LEN};
use crate::environment::{ExtBufRef, FpduKind, FpduRecord, QpEnv};
use crate::mpa::RtrKind;
use crate::mpa::fpdu;
use crate::queue_pair::immediate;
use crate::queue_pair::read_queue::Outbound;
use crate::queue_pair::send_queue::Entry;
use crate::queue_pair::{DrainState, InMessage, QueuePair, RdmapState};
use crate::rdmap::READ_REQUEST_LEN;
use crate::rdmap::atomic_header::WORD;
use crate::rdmap::terminate::TerminateCode;
use siw_memory::KeyReader;
use siw_memory::key_table::Stag;
use siw_shm::{Access, BindMw, FastReg, Opcode, WcStatus};

/// STag of messages that name no memory. Hardware refuses zero even at zero length.
pub(crate) const DUMMY_STAG: u32 = 1;

/// What [`QueuePair::next_record`] hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingFpdu {
    /// What TCP keeps, and hands to [`QueuePair::build_fpdu`] whenever it sends it.
    pub record: FpduRecord,
    /// [`FpduRecord::wire_len`], which is known already.
    pub wire_len: u32,
}

impl QueuePair {
    /// The next FPDU that may leave; TCP pushes it when it ends a message
    /// ([`FpduRecord::is_last`]). `room`: bytes that TCP takes now; an FPDU is never cut to fit. `None`: nothing to
    /// do, no room, or a stall (ORD, fence, ready-to-receive). Takes work requests out of the ring as
    /// it needs them.
    pub fn next_record<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        match self.state {
            RdmapState::Rts if !self.may_send => return None,
            RdmapState::Rts => {
                if self.rtr_pending {
                    return self.rtr_record(room);
                }
                let next = match self.in_message {
                    InMessage::Request => self.request_record(room),
                    InMessage::Response => self.response_record(env, room),
                    InMessage::None => self.start_message(env, room),
                };
                if next.is_some() || self.state != RdmapState::Terminate {
                    return next;
                }
            }
            RdmapState::Closing => {
                return match self.in_message {
                    InMessage::Request => self.request_record(room),
                    InMessage::Response => self.response_record(env, room),
                    InMessage::None => None,
                };
            }
            _ => {}
        }
        self.terminate_record(room)
    }

    /// Responses and requests take turns, message by message.
    fn start_message<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        let responses = self.inbound.unsent() > 0;
        if responses && self.prefer_response {
            return self.response_record(env, room);
        }
        if self.request_ready(env) {
            return self.request_record(room);
        }
        if responses && self.state == RdmapState::Rts {
            return self.response_record(env, room);
        }
        None
    }

    /// A work request that cannot start yet: the ORD limit, or its fence (RFC 5040 section 5.5).
    #[inline]
    pub(crate) fn stalled(&self, slot: u32) -> bool {
        self.sq.get(slot).is_none_or(|e| {
            (!e.started() && self.drain != DrainState::Inactive)
                || (!e.started() && e.fence() && !self.outbound.is_empty())
                || (e.opcode.awaits_response() && self.outbound.len() >= usize::from(self.ord))
                // What came before may still be sent again from the memory.
                || (e.opcode == Opcode::LocalInv && !self.sq.is_front(slot))
        })
    }

    /// Sees to it that there is a current work request, and that it may go.
    #[inline]
    fn request_ready<E: QpEnv>(&mut self, env: &mut E) -> bool {
        loop {
            if self.cur.is_none() && (self.drain != DrainState::Inactive || !self.take_request(env))
            {
                return false;
            }
            let Some(slot) = self.cur.filter(|&c| !self.stalled(c)) else {
                return false;
            };
            let local = |e: &Entry| e.opcode.is_local();
            if !self.sq.get(slot).is_some_and(local) {
                return true;
            }
            if !self.local_operation(env, slot) {
                return false;
            }
        }
    }

    /// Takes a work request out of the ring; false: there is none, or it is wrong.
    #[inline]
    fn take_request<E: QpEnv>(&mut self, env: &mut E) -> bool {
        let slot = match env.next_send() {
            Ok(Some(w)) => self.sq.push(w),
            Ok(None) => return false,
            Err(_) => {
                self.fault(env, TerminateCode::LOCAL_CATASTROPHIC, None);
                return false;
            }
        };
        self.cur = Some(slot);
        let Some(e) = self.sq.get(slot) else {
            return false;
        };
        let status = self.validate(env.keys(), e);
        if status != WcStatus::SUCCESS {
            self.refuse_current(env, slot, status);
            return false;
        }
        let referenced = !e.is_inline() && e.length > 0 && !e.opcode.awaits_response();
        let owner = if referenced {
            env.alloc_ext_buf_ref(e.length)
        } else {
            ExtBufRef::NONE
        };
        if let Some(e) = self.sq.get_mut(slot) {
            e.owner = owner;
        }
        true
    }

    fn refuse_current<E: QpEnv>(&mut self, env: &mut E, slot: u32, status: WcStatus) {
        if let Some(e) = self.sq.get_mut(slot) {
            e.status = status;
        }
        self.cur = None;
        self.fault(env, TerminateCode::LOCAL_CATASTROPHIC, None);
        self.complete_ready(env);
    }

    /// LOCAL_INV, BIND_MW, REG_MR: done at once when it is their turn. False: refused, which ends
    /// the queue pair.
    fn local_operation<E: QpEnv>(&mut self, env: &mut E, slot: u32) -> bool {
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        let Some(e) = self.sq.get(slot) else {
            return false;
        };
        let sge = self.sq.sges(e).first().copied().unwrap_or_default();
        let keys = env.keys();
        let (done, status) = match e.opcode {
            Opcode::BindMw => {
                let b = BindMw::from_fields(e.imm, e.rkey, e.remote_addr, &sge);
                (keys.bind_window(&b, pd, qpn), WcStatus::MW_BIND_ERR)
            }
            Opcode::RegMr => {
                let r = FastReg::from_fields(e.imm, e.rkey, e.remote_addr, &sge);
                (keys.register_pages(&r, pd), WcStatus::MW_BIND_ERR)
            }
            _ => (
                keys.invalidate_key(Stag(e.imm), pd, qpn),
                WcStatus::LOC_PROT_ERR,
            ),
        };
        if done.is_err() {
            self.refuse_current(env, slot, status);
            return false;
        }
        self.cur = None;
        if let Some(e) = self.sq.get_mut(slot) {
            e.acked = true;
        }
        self.complete_ready(env);
        true
    }

    /// Local checks of a work request, before a byte of it leaves.
    #[inline]
    fn validate(&self, keys: &KeyReader, e: &Entry) -> WcStatus {
        let need = match e.opcode {
            Opcode::Write
            | Opcode::Send
            | Opcode::SendWithInv
            | Opcode::WriteWithImm
            | Opcode::SendWithImm => Access::NONE,
            op if op.is_local() => return WcStatus::SUCCESS,
            Opcode::Read | Opcode::ReadWithInv | Opcode::FetchAdd | Opcode::CmpSwap => {
                let one = e.opcode != Opcode::ReadWithInv || self.sq.sges(e).len() == 1;
                if self.ord == 0 || !one {
                    return WcStatus::LOC_QP_OP_ERR;
                }
                if e.opcode.is_atomic() && e.length != WORD {
                    return WcStatus::LOC_LEN_ERR;
                }
                Access::LOCAL_WRITE
            }
            _ => return WcStatus::LOC_QP_OP_ERR,
        };
        if e.is_inline() {
            return WcStatus::SUCCESS;
        }
        for s in self.sq.sges(e) {
            if s.length > 0
                && keys
                    .check_access(
                        Stag(s.lkey),
                        s.addr,
                        s.length,
                        need,
                        self.attr.pd,
                        self.attr.qpn,
                    )
                    .is_err()
            {
                return WcStatus::LOC_PROT_ERR;
            }
        }
        WcStatus::SUCCESS
    }

    #[inline]
    fn request_record(&mut self, room: usize) -> Option<OutgoingFpdu> {
        let slot = self.cur?;
        let mulpdu = u32::from(self.mulpdu);
        let e = self.sq.get_mut(slot)?;
        if e.opcode.awaits_response() {
            return if e.opcode.is_atomic() {
                self.atomic_record(slot, room)
            } else {
                self.read_record(slot, room)
            };
        }
        if immediate::is_due(e) {
            return self.immediate_record(slot, room);
        }
        let is_write = matches!(e.opcode, Opcode::Write | Opcode::WriteWithImm);
        let hdr = if is_write {
            TAGGED_HDR_LEN
        } else {
            UNTAGGED_HDR_LEN
        } as u32;
        let n = (e.length - e.sent).min(mulpdu - hdr);
        let ulpdu = hdr + n;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu as u16));
        if wire > room {
            return None;
        }
        let offset = e.sent;
        if offset == 0 && !is_write {
            if e.opcode != Opcode::SendWithImm {
                e.msn = self.send_msn.0;
            }
            self.send_msn = self.send_msn.next();
        }
        e.sent += n;
        let last = e.sent == e.length;
        if last && e.opcode == Opcode::WriteWithImm {
            e.parts = 1;
            self.in_message = InMessage::Request;
        } else if last {
            self.cur = None;
            self.in_message = InMessage::None;
            self.prefer_response = true;
        } else {
            self.in_message = InMessage::Request;
        }
        self.record(FpduKind::Request, last, ulpdu as u16, slot, offset, wire)
    }

    /// The record of an FPDU that takes `wire` octets of the stream from here on.
    #[inline]
    pub(crate) fn record(
        &mut self,
        kind: FpduKind,
        last: bool,
        ulpdu_len: u16,
        slot: u32,
        offset: u32,
        wire: usize,
    ) -> Option<OutgoingFpdu> {
        let marker_position = self.tx_marker_position;
        self.tx_marker_position = marker_position.advanced_by(wire);
        let record = FpduRecord {
            kind,
            is_last: last,
            ulpdu_len,
            slot,
            offset,
            marker_position,
        };
        Some(OutgoingFpdu {
            record,
            wire_len: wire as u32,
        })
    }

    /// The ready-to-receive message goes before everything else (RFC 6581 section 9).
    fn rtr_record(&mut self, room: usize) -> Option<OutgoingFpdu> {
        let kind = self.rtr?;
        let ulpdu_len = match kind {
            RtrKind::Write => TAGGED_HDR_LEN,
            RtrKind::Send => UNTAGGED_HDR_LEN,
            RtrKind::Read => UNTAGGED_HDR_LEN + READ_REQUEST_LEN,
        } as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        self.rtr_pending = false;
        match kind {
            RtrKind::Write => {}
            RtrKind::Send => self.send_msn = self.send_msn.next(),
            RtrKind::Read => {
                self.read_msn = self.read_msn.next();
                self.outbound.push_back(Outbound {
                    slot: None,
                    sink_stag: DUMMY_STAG,
                    sink_to: 0,
                    len: 0,
                    placed: 0,
                    last: false,
                    atomic: None,
                });
            }
        }
        self.record(FpduKind::Rtr, true, ulpdu_len, 0, 0, wire)
    }

    fn terminate_record(&mut self, room: usize) -> Option<OutgoingFpdu> {
        let o = self.outgoing.as_mut().filter(|o| !o.queued)?;
        let ulpdu_len = (UNTAGGED_HDR_LEN + o.payload.as_bytes().len()) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        o.queued = true;
        self.record(FpduKind::Terminate, true, ulpdu_len, 0, 0, wire)
    }
}

/// Sink of a Read in the peer's eyes: the local key, or something non-zero for none.
#[inline]
pub(crate) fn sink_stag(lkey: u32) -> u32 {
    if lkey == 0 { DUMMY_STAG } else { lkey }
}
