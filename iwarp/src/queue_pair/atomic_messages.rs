//! Atomics as both of their ends: requests out and answers in, requests in and answers out (RFC 7306
//! section 5). They wait in the same queues as Reads, and so keep their order with them
//! (conformance 89): the responder does an atomic when everything before it is answered.

use crate::ddp::{Msn, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::{ExtBufRef, FpduKind, QpEnv};
use crate::mpa::fpdu::{self, LEN_FIELD};
use crate::queue_pair::error_mapping::read_source;
use crate::queue_pair::read_queue::{Inbound, InboundAtomic, Outbound};
use crate::queue_pair::receive::Fault;
use crate::queue_pair::requester::OutgoingFpdu;
use crate::queue_pair::{InMessage, QueuePair, RdmapState};
use crate::rdmap::ReadRequestHeader;
use crate::rdmap::atomic_header::{
    ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicRequestHeader, AtomicResponseHeader, WORD,
};
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_memory::KeyReader;
use siw_memory::key_table::Stag;
use siw_shm::{Access, WcStatus};
use std::sync::atomic::AtomicU64;

impl QueuePair {
    /// The Atomic Request of a work request.
    pub(crate) fn atomic_record(&mut self, slot: u32, room: usize) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        let e = self.sq.get(slot)?;
        let sink = self.sq.sges(e).first().copied()?;
        let e = self.sq.get_mut(slot)?;
        e.msn = self.read_msn.0;
        e.sent = e.length;
        e.parts = 1;
        let id = e.msn;
        self.read_msn = self.read_msn.next();
        self.outbound.push_back(Outbound {
            slot: Some(slot),
            sink_stag: sink.lkey,
            sink_to: sink.addr,
            len: WORD,
            placed: 0,
            last: true,
            atomic: Some(id),
        });
        self.cur = None;
        self.in_message = InMessage::None;
        self.prefer_response = true;
        self.record(FpduKind::Request, true, ulpdu_len, slot, 0, wire)
    }

    /// An Atomic Response: must answer the oldest outstanding request, which must be an atomic.
    pub(crate) fn atomic_response<E: QpEnv>(
        &mut self,
        rx: &impl RxStream,
        env: &mut E,
        h: &UntaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        let front = self.outbound.front().copied();
        let Some((r, id)) = front.and_then(|r| r.atomic.map(|id| (r, id))) else {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        };
        let mut b = [0; ATOMIC_RESPONSE_LEN];
        let mut response = None;
        if len as usize == b.len() {
            rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut b);
            response = Some(AtomicResponseHeader::parse(&b));
        }
        let wrong = if h.msn != self.rx_atomic_msn {
            Some(TerminateCode::DDP_MSN)
        } else if h.mo != 0 {
            Some(TerminateCode::DDP_MO)
        } else if !h.control.is_last() || response.is_none_or(|p| p.id != id) {
            Some(TerminateCode::RDMAP_UNSPECIFIED)
        } else {
            None
        };
        let (Some(response), None) = (response, wrong) else {
            self.fail_request(r.slot, WcStatus::BAD_RESP_ERR);
            return Err(wrong.unwrap_or(TerminateCode::RDMAP_UNSPECIFIED).into());
        };
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        let placed = env
            .keys()
            .check_access(
                Stag(r.sink_stag),
                r.sink_to,
                WORD,
                Access::LOCAL_WRITE,
                pd,
                qpn,
            )
            .is_ok_and(|(mr, off)| mr.write_at(off, &response.original.to_ne_bytes()).is_ok());
        if !placed {
            self.fail_request(r.slot, WcStatus::LOC_PROT_ERR);
            return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
        }
        self.rx_atomic_msn = self.rx_atomic_msn.next();
        self.outbound.pop_front();
        if let Some(e) = r.slot.and_then(|s| self.sq.get_mut(s)) {
            e.answered = true;
            self.complete_ready(env);
        }
        Ok(())
    }

    /// An Atomic Request arrived: checked now, done when it is its turn.
    pub(crate) fn atomic_request<E: QpEnv>(
        &mut self,
        rx: &impl RxStream,
        env: &mut E,
        h: &UntaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        if h.msn != self.rx_read_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        if h.mo != 0 {
            return Err(TerminateCode::DDP_MO.into());
        }
        if len as usize != ATOMIC_REQUEST_LEN || !h.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED.into());
        }
        if self.inbound.unsent() >= usize::from(self.ird) {
            return Err(TerminateCode::DDP_NO_BUFFER.into());
        }
        let mut b = [0; ATOMIC_REQUEST_LEN];
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut b);
        // Conformance 85.
        let req = AtomicRequestHeader::parse(&b).ok_or(TerminateCode::RDMAP_OPCODE)?;
        target(env.keys(), &req, self.attr.pd, self.attr.qpn)?;
        self.rx_read_msn = self.rx_read_msn.next();
        if self.state == RdmapState::Rts {
            self.inbound.push(Inbound {
                req: ReadRequestHeader::default(),
                atomic: Some(InboundAtomic {
                    req,
                    msn: Msn::FIRST,
                    original: 0,
                }),
                msn: h.msn,
                sent: 0,
                owner: ExtBufRef::NONE,
                acked: false,
            });
        }
        Ok(())
    }

    /// Does the atomic that is next, and answers it.
    pub(crate) fn atomic_response_record<E: QpEnv>(
        &mut self,
        env: &mut E,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + ATOMIC_RESPONSE_LEN) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        let (slot, r) = self.inbound.current()?;
        let a = r.atomic.as_mut()?;
        // The key may have gone since the request was accepted.
        match target(env.keys(), &a.req, pd, qpn) {
            Ok(word) => a.original = a.req.apply(word),
            Err(code) => {
                let offender = r.offender();
                self.fault(env, code, Some(&offender));
                return None;
            }
        }
        a.msn = self.atomic_msn;
        self.atomic_msn = self.atomic_msn.next();
        self.inbound.finish_current();
        self.in_message = InMessage::None;
        self.prefer_response = false;
        self.record(FpduKind::Response, true, ulpdu_len, slot, 0, wire)
    }
}

/// The word that an atomic works on.
fn target<'k>(
    keys: &'k KeyReader,
    req: &AtomicRequestHeader,
    pd: u32,
    qpn: u32,
) -> Result<&'k AtomicU64, TerminateCode> {
    let (mr, off) = keys
        .check_access(Stag(req.stag), req.to, WORD, Access::REMOTE_ATOMIC, pd, qpn)
        .map_err(read_source)?;
    // Conformance 84: both the address and the memory behind it.
    if !req.to.is_multiple_of(u64::from(WORD)) {
        return Err(TerminateCode::RDMAP_CATASTROPHIC_STREAM);
    }
    mr.atomic_at(off)
        .map_err(|_| TerminateCode::RDMAP_CATASTROPHIC_STREAM)
}
