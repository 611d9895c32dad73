//! Requester side of atomics: sends Atomic Requests, receives Atomic Responses (RFC 7306 section 5).
//! They share the queue of outstanding Reads, and so keep their order with them (conformance 89).

use super::Requester;
use super::outstanding_read::OutstandingRead;
use crate::ddp::{UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::QpEnv;
use crate::mpa::fpdu::LEN_FIELD;
use crate::queue_pair::receive::SegmentError;
use crate::queue_pair::state::QpInitAttr;
use crate::queue_pair::transmitter::{FpduSegment, Transmitter};
use crate::rdmap::atomic_header::{
    ATOMIC_OPERAND_LEN, ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicResponseHeader,
};
use crate::rdmap::terminate::TerminateCode;
use crate::record::{FpduKind, MessageSlot, OutgoingFpdu};
use crate::stream::RxStream;
use siw_shm::{Access, WcStatus};

impl Requester {
    /// Returns the Atomic Request of a work request.
    pub(super) fn next_atomic_request(
        &mut self,
        tx: &mut Transmitter,
        slot: MessageSlot,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN) as u16;
        let wire_len = tx.fit(ulpdu_len, room)?;
        let entry = self.queue.get(slot)?;
        let sink = self.queue.sges(entry).first().copied()?;
        let entry = self.queue.get_mut(slot)?;
        entry.msn = self.next_read_msn.0;
        entry.sent = entry.length;
        entry.messages_sent = 1;
        let id = entry.msn;
        self.next_read_msn = self.next_read_msn.next();
        self.outstanding.push_back(OutstandingRead {
            slot: Some(slot),
            sink_stag: sink.lkey,
            sink_to: sink.addr,
            len: ATOMIC_OPERAND_LEN,
            placed: 0,
            is_last: true,
            atomic_id: Some(id),
        });
        self.current = None;
        tx.end_bare_request(0);
        let segment = FpduSegment::whole_message(FpduKind::Request, slot, ulpdu_len);
        Some(tx.push_fpdu(segment, wire_len))
    }

    /// Handles an Atomic Response: it must answer the oldest outstanding request, which must be an
    /// atomic. `Ok(true)`: a work request has been answered.
    pub fn on_atomic_response<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<bool, SegmentError> {
        let front = self.outstanding.front().copied();
        let Some((read, id)) = front.and_then(|read| read.atomic_id.map(|id| (read, id))) else {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        };
        let response = match self.parse_atomic_response(rx, header, len, id) {
            Ok(response) => response,
            Err(code) => {
                self.fail_request(read.slot, WcStatus::BAD_RESP_ERR);
                return Err(code.into());
            }
        };
        let (stag, to) = (read.sink_stag, read.sink_to);
        let is_placed = attr
            .check_key(
                env.keys(),
                stag,
                to,
                ATOMIC_OPERAND_LEN,
                Access::LOCAL_WRITE,
            )
            .is_ok_and(|(mr, off)| mr.write_at(off, &response.original.to_ne_bytes()).is_ok());
        if !is_placed {
            self.fail_request(read.slot, WcStatus::LOC_PROT_ERR);
            return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
        }
        self.expected_atomic_msn = self.expected_atomic_msn.next();
        self.outstanding.pop_front();
        let Some(entry) = read.slot.and_then(|slot| self.queue.get_mut(slot)) else {
            return Ok(false);
        };
        entry.is_answered = true;
        Ok(true)
    }

    fn parse_atomic_response(
        &self,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
        id: u32,
    ) -> Result<AtomicResponseHeader, TerminateCode> {
        if header.msn != self.expected_atomic_msn {
            return Err(TerminateCode::DDP_MSN);
        }
        if header.mo != 0 {
            return Err(TerminateCode::DDP_MO);
        }
        let mut payload = [0; ATOMIC_RESPONSE_LEN];
        if len as usize != payload.len() || !header.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED);
        }
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut payload);
        let response = AtomicResponseHeader::parse(&payload);
        if response.id != id {
            return Err(TerminateCode::RDMAP_UNSPECIFIED);
        }
        Ok(response)
    }
}
