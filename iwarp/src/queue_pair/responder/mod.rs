//! The responder: the peer's Read Requests and Atomic Requests, and the responses to them (RFC 5040
//! sections 4.4, 4.5 and 5.5, RFC 7306 section 5).
//!
//! Requests are checked on arrival, answered in order, and kept until the response is acknowledged.
//! An atomic is executed in its turn, when TCP has the responses to everything before it (conformance
//! 89). The payload of these responses may be copied from memory later (PROTOCOL.md section 5.1).

mod response_queue;

use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{
    ControlOctets, Msn, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::{ExtBufRef, QpEnv};
use crate::mpa::fpdu::LEN_FIELD;
use crate::queue_pair::error_mapping::remote_access_code;
use crate::queue_pair::fpdu_builder::{FpduBuilder, append_copied_fpdu, tagged_head};
use crate::queue_pair::receive::SegmentError;
use crate::queue_pair::state::{BuildError, QpInitAttr};
use crate::queue_pair::transmitter::{FpduSegment, OpenMessage, Transmitter};
use crate::rdmap::atomic_header::{
    ATOMIC_OPERAND_LEN, ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicRequestHeader,
    AtomicResponseHeader,
};
use crate::rdmap::terminate::{OffendingSegment, TerminateCode};
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};
use crate::record::{FpduKind, FpduRecord, FrameBuilder, MessageSlot, OutgoingFpdu};
use crate::stream::RxStream;
use response_queue::{PendingResponse, ResponseQueue};
use serde::{Deserialize, Serialize};
use siw_memory::{KeyReader, RegisteredMemory};
use siw_shm::Access;

/// A request that was valid on arrival cannot be answered any more. Contains the parts of it that a
/// Terminate quotes.
pub(crate) struct ResponseError {
    pub code: TerminateCode,
    pub request: OffendingSegment,
}

/// The responding side of a stream.
#[derive(Debug, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct Responder {
    queue: ResponseQueue,
    /// MSN of the peer's next Read Request or Atomic Request.
    expected_request_msn: Msn,
    /// MSN of the next Atomic Response.
    next_atomic_msn: Msn,
    /// Maximum number of the peer's unanswered Reads and atomics.
    pub ird: u16,
}

impl Responder {
    /// The start of a stream: no request has been received.
    pub fn new(first_msn: Msn, ird: u16) -> Self {
        Self {
            queue: ResponseQueue::default(),
            expected_request_msn: first_msn,
            next_atomic_msn: first_msn,
            ird,
        }
    }

    /// Returns whether a restored responder is one that a stream can have.
    pub fn is_consistent(&self) -> bool {
        self.queue.is_consistent()
    }

    /// Returns whether an FPDU of a response, if that is still here, has its kind and length.
    pub fn knows_fpdu(&self, record: &FpduRecord) -> bool {
        self.queue.get(record.slot).is_none_or(|response| {
            let len = usize::from(record.ulpdu_len);
            match response.atomic {
                Some(_) => len == UNTAGGED_HDR_LEN + ATOMIC_RESPONSE_LEN,
                None => record.is_part_of(TAGGED_HDR_LEN, response.sent),
            }
        })
    }

    /// Returns whether a request waits for its response or the rest of it.
    #[inline]
    pub fn has_unsent(&self) -> bool {
        self.queue.unsent_len() > 0
    }

    /// Handles an RDMA Read Request (RFC 5040 section 4.4). `is_answerable`: the stream still sends
    /// responses.
    pub fn on_read_request(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
        is_answerable: bool,
    ) -> Result<(), SegmentError> {
        let payload = self.read_request::<READ_REQUEST_LEN>(rx, header, len)?;
        let read = ReadRequestHeader::parse(&payload);
        if read.size > 0 {
            let access = Access::REMOTE_READ;
            attr.check_key(keys, read.src_stag, read.src_to, read.size, access)
                .map_err(|error| SegmentError {
                    code: remote_access_code(error),
                    read: Some(read),
                    lacks_receive: false,
                })?;
        }
        self.expected_request_msn = self.expected_request_msn.next();
        if is_answerable {
            self.queue.push(PendingResponse::for_read(read, header.msn));
        }
        Ok(())
    }

    /// Handles an Atomic Request (RFC 7306 section 5.2.1): checked now, executed in its turn.
    pub fn on_atomic_request(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
        is_answerable: bool,
    ) -> Result<(), SegmentError> {
        let payload = self.read_request::<ATOMIC_REQUEST_LEN>(rx, header, len)?;
        // Conformance 85: no such operation.
        let request = AtomicRequestHeader::parse(&payload).ok_or(TerminateCode::RDMAP_OPCODE)?;
        find_operand(keys, attr, &request)?;
        self.expected_request_msn = self.expected_request_msn.next();
        if is_answerable {
            let response = PendingResponse::for_atomic(request, header.msn);
            self.queue.push(response);
        }
        Ok(())
    }

    /// Returns the payload of a Read Request or Atomic Request after the common checks: a single
    /// segment with the expected MSN, `LEN` octets, and within IRD.
    #[inline]
    fn read_request<const LEN: usize>(
        &self,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<[u8; LEN], TerminateCode> {
        if header.msn != self.expected_request_msn {
            return Err(TerminateCode::DDP_MSN);
        }
        if header.mo != 0 {
            return Err(TerminateCode::DDP_MO);
        }
        if len as usize != LEN || !header.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED);
        }
        if self.queue.unsent_len() >= usize::from(self.ird) {
            return Err(TerminateCode::DDP_NO_BUFFER);
        }
        let mut payload = [0; LEN];
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut payload);
        Ok(payload)
    }

    /// Returns the next segment of the current response; `Ok(None)`: there is none, or no room.
    pub fn next_segment<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        tx: &mut Transmitter,
        room: usize,
    ) -> Result<Option<OutgoingFpdu>, ResponseError> {
        let Some((slot, response)) = self.queue.current_mut() else {
            return Ok(None);
        };
        if response.atomic.is_some() {
            return self.next_atomic_response(env.keys(), attr, tx, room);
        }
        let read = response.read;
        let max_payload = u32::from(tx.mulpdu) - TAGGED_HDR_LEN as u32;
        let payload_len = (read.size - response.sent).min(max_payload);
        let ulpdu_len = (TAGGED_HDR_LEN as u32 + payload_len) as u16;
        let Some(wire_len) = tx.fit(ulpdu_len, room) else {
            return Ok(None);
        };
        if payload_len > 0 {
            // The key may have been invalidated since the request was accepted.
            let from = read.src_to.wrapping_add(u64::from(response.sent));
            let access = Access::REMOTE_READ;
            if let Err(error) = attr.check_key(env.keys(), read.src_stag, from, payload_len, access)
            {
                return Err(ResponseError {
                    code: remote_access_code(error),
                    request: response.quote_request(),
                });
            }
        }
        let offset = response.sent;
        response.sent += payload_len;
        let is_last = response.sent == read.size;
        if is_last {
            self.queue.finish_current();
            tx.end_response(read.size);
        } else {
            tx.open_message = OpenMessage::Response;
        }
        let segment = FpduSegment {
            kind: FpduKind::Response,
            is_last,
            ulpdu_len,
            slot,
            offset,
        };
        Ok(Some(tx.push_fpdu(segment, wire_len)))
    }

    /// Executes the current atomic and answers it.
    fn next_atomic_response(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        tx: &mut Transmitter,
        room: usize,
    ) -> Result<Option<OutgoingFpdu>, ResponseError> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + ATOMIC_RESPONSE_LEN) as u16;
        let Some(wire_len) = tx.fit(ulpdu_len, room) else {
            return Ok(None);
        };
        let Some((slot, response)) = self.queue.current_mut() else {
            return Ok(None);
        };
        let request = response.quote_request();
        let Some(atomic) = &mut response.atomic else {
            return Ok(None);
        };
        // The key may have been invalidated since the request was accepted.
        let request_header = atomic.request;
        let executed = find_operand(keys, attr, &request_header).and_then(|(mr, off)| {
            mr.update_word_at(off, |operand| request_header.execute(operand))
                .map_err(|_| TerminateCode::RDMAP_CATASTROPHIC_STREAM)
        });
        match executed {
            Ok(Some(original)) => atomic.original = original,
            Ok(None) => {
                tx.has_yielded = true;
                return Ok(None);
            }
            Err(code) => return Err(ResponseError { code, request }),
        }
        atomic.response_msn = self.next_atomic_msn;
        self.next_atomic_msn = self.next_atomic_msn.next();
        self.queue.finish_current();
        tx.end_response(ATOMIC_RESPONSE_LEN as u32);
        let segment = FpduSegment::whole_message(FpduKind::Response, slot, ulpdu_len);
        Ok(Some(tx.push_fpdu(segment, wire_len)))
    }

    /// Appends the FPDU of a segment of a Read Response; see [`append_copied_fpdu`]. Always a copy: the
    /// application or a peer may change the memory at any time.
    #[inline(always)]
    pub fn append_copied<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        record: &FpduRecord,
        with_crc: bool,
        frame: &mut B,
    ) -> Result<bool, BuildError> {
        let Some(response) = self.queue.get(record.slot) else {
            return Err(BuildError::MessageCompleted);
        };
        let read = &response.read;
        let len = u32::from(record.ulpdu_len).saturating_sub(TAGGED_HDR_LEN as u32);
        if response.atomic.is_some() || len == 0 {
            return Ok(false);
        }
        let from = read.src_to.wrapping_add(u64::from(record.offset));
        let (mr, off) = attr
            .check_key(keys, read.src_stag, from, len, Access::REMOTE_READ)
            .map_err(|_| BuildError::KeyDeregistered)?;
        if !record.is_last {
            let rest = read.size - record.offset - len;
            prefetch_behind(mr, off, len, rest, record.offset == 0);
        }
        let head = tagged_head(record.ulpdu_len, &read_response_header(read, record));
        append_copied_fpdu(frame, record, with_crc, &head, (mr, off))
    }

    /// Appends header and payload of a segment of a response.
    #[inline]
    pub fn build_segment<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        record: &FpduRecord,
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        let response = self
            .queue
            .get(record.slot)
            .ok_or(BuildError::MessageCompleted)?;
        if let Some(atomic) = response.atomic {
            let header = AtomicResponseHeader {
                id: atomic.request.id,
                original: atomic.original,
            };
            let opcode = RdmapOpcode::AtomicResponse;
            fpdu.append_short_message(opcode, atomic.response_msn, &header.to_bytes());
            return Ok(());
        }
        let read = &response.read;
        fpdu.append_header(&read_response_header(read, record).to_bytes());
        let len = u32::from(record.ulpdu_len) - TAGGED_HDR_LEN as u32;
        if len == 0 {
            return Ok(());
        }
        let from = read.src_to.wrapping_add(u64::from(record.offset));
        let (mr, off) = attr
            .check_key(keys, read.src_stag, from, len, Access::REMOTE_READ)
            .map_err(|_| BuildError::KeyDeregistered)?;
        fpdu.append_memory(mr, off, len, ExtBufRef::NONE)
    }

    /// The last segment of a response is acknowledged.
    pub fn on_acked(&mut self, slot: MessageSlot) {
        if let Some(response) = self.queue.get_mut(slot) {
            response.is_acked = true;
            self.queue.retire_acked();
        }
    }

    /// Drops all responses.
    pub fn flush(&mut self) {
        while self.queue.pop_front().is_some() {}
    }
}

/// Header of a segment of a Read Response.
#[inline(always)]
fn read_response_header(read: &ReadRequestHeader, record: &FpduRecord) -> TaggedHeader {
    TaggedHeader {
        control: ControlOctets::new(RdmapOpcode::ReadResponse, record.is_last),
        stag: read.sink_stag,
        to: read.sink_to.wrapping_add(u64::from(record.offset)),
    }
}

/// The memory and the offset in it of the 64-bit word that an atomic operates on.
fn find_operand<'k>(
    keys: &'k KeyReader,
    attr: &QpInitAttr,
    request: &AtomicRequestHeader,
) -> Result<(&'k RegisteredMemory, u64), TerminateCode> {
    let access = Access::REMOTE_ATOMIC;
    let (mr, off) = attr
        .check_key(keys, request.stag, request.to, ATOMIC_OPERAND_LEN, access)
        .map_err(remote_access_code)?;
    // Conformance 84: both the address and the memory at it must be aligned.
    if !request.to.is_multiple_of(u64::from(ATOMIC_OPERAND_LEN)) {
        return Err(TerminateCode::RDMAP_CATASTROPHIC_STREAM);
    }
    mr.check_word_at(off)
        .map_err(|_| TerminateCode::RDMAP_CATASTROPHIC_STREAM)?;
    Ok((mr, off))
}
