//! Receive side of a queue pair: checks, placement and delivery, FPDU by FPDU.
//!
//! ```text
//! stream --> next_fpdu, verify (MPA) --> process_segment (DDP, RDMAP) --> requester: responses
//!                                                                     --> responder: requests
//!                                                                     --> receive state: Write, Send
//! ```
//!
//! The order of the checks is MPA (CRC, markers, length), DDP (version, queue, buffer), RDMAP
//! (version, opcode, rights). The first failed check determines the Terminate code (PROTOCOL.md
//! section 6).

mod ahead;
mod early_fpdus;
mod out_of_order;
mod receive_state;

pub(crate) use receive_state::{ReceiveContext, ReceiveState, SegmentError};

use crate::ddp::{
    ControlOctets, DDP_VERSION, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::QpEnv;
use crate::mpa::fpdu::{
    self, FpduInfo, FpduSource, HEAD_LEN, LEN_FIELD, PlainStream, UnmarkedStream,
};
use crate::queue_pair::QueuePair;
use crate::queue_pair::state::{RdmapState, ReceiveProgress};
use crate::rdmap::terminate::{OffendingSegment, TerminateCode};
use crate::rdmap::{RDMAP_VERSION, RdmapOpcode};
use crate::stream::{RxStream, StreamPiece};
use out_of_order::AlreadyPlaced;
use siw_memory::key_table::LastKey;
use siw_memory::{KeyReader, RegisteredMemory};

/// Untagged queues of RFC 5040 section 4.1 and RFC 7306 section 5.
const QUEUE_COUNT: u32 = 4;

/// Counts the pieces of the stream that contain the first `len` octets.
fn count_pieces(rx: &impl RxStream, len: usize) -> u32 {
    let mut count = 0;
    rx.for_each_slice(0, len, |_| count += 1);
    count
}

#[inline]
fn parse_opcode(control: ControlOctets) -> Result<RdmapOpcode, TerminateCode> {
    if control.rdmap_version() != RDMAP_VERSION {
        return Err(TerminateCode::RDMAP_VERSION);
    }
    RdmapOpcode::from_wire(control.opcode()).ok_or(TerminateCode::RDMAP_OPCODE)
}

impl QueuePair {
    /// Consumes every FPDU that is complete in `rx`: checks, places, completes, queues responses;
    /// stops at an incomplete one. On a protocol error it queues the Terminate, and from then on
    /// discards all received bytes so that the peer's FIN is reached.
    ///
    /// Call it before [`complete_acked`](Self::complete_acked) for the acknowledgement of the same
    /// segment, so that a Terminate still finds the work request that it refers to.
    pub fn receive_in_order<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl RxStream,
    ) -> ReceiveProgress {
        self.receive.awaits_receive = false;
        let mut progress = if self.receive.marker_position.has_markers() {
            let mut unmarked = UnmarkedStream::new(&mut *rx, self.receive.marker_position);
            let progress = self.process_fpdus(env, &mut unmarked, u32::MAX);
            self.receive.marker_position = unmarked.marker_position;
            progress
        } else {
            let progress = self.process_unmarked(env, rx);
            if self.receive.awaits_receive {
                self.process_ahead(env, rx);
            }
            progress
        };
        self.finish_receiving(rx, &mut progress);
        progress
    }

    /// Processes the responses behind a message that [waits](Self::awaits_receive) for a receive work
    /// request, when more of the stream has arrived. Streams with markers wait as a whole.
    #[cold]
    pub fn receive_behind_waiting<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl RxStream,
    ) -> ReceiveProgress {
        let mut progress = ReceiveProgress::default();
        if !self.receive.marker_position.has_markers() {
            self.process_ahead(env, rx);
        }
        self.finish_receiving(rx, &mut progress);
        progress
    }

    /// Processes `held`, a segment that TCP keeps behind a gap, `offset` octets after the first octet
    /// that [`receive_in_order`](Self::receive_in_order) has not consumed. Places the FPDUs that may
    /// be placed and returns their number. Completes nothing and reports nothing.
    #[cold]
    pub fn receive_out_of_order<E: QpEnv>(
        &mut self,
        env: &mut E,
        offset: usize,
        held: &impl RxStream,
    ) -> u32 {
        if self.state != RdmapState::Rts || !self.crc || !self.receive.has_first_fpdu {
            return 0;
        }
        let requester = &self.requester;
        let wants = |stag, to, len| requester.wants_read_response(stag, to, len);
        self.receive
            .place_segment_early(env.keys(), &self.attr, offset, held, wants)
    }

    /// Discards the rest of a stream that has ended.
    #[inline]
    fn finish_receiving(&mut self, rx: &mut impl RxStream, progress: &mut ReceiveProgress) {
        let is_ended = matches!(self.state, RdmapState::Terminate | RdmapState::Error);
        if is_ended && !self.holds_terminate() {
            let rest = rx.available();
            rx.consume(rest);
            progress.bytes += rest;
            self.receive.awaits_receive = false;
        }
        progress.has_output = self.has_output();
    }

    /// Processes a stream without markers: piece by piece, with FPDUs that span several pieces one by
    /// one.
    #[inline]
    fn process_unmarked<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl RxStream,
    ) -> ReceiveProgress {
        let mut progress = ReceiveProgress::default();
        while rx.available() > 0 {
            rx.prefetch_next_pieces();
            let mut piece = StreamPiece(rx.first_piece());
            let mut part = self.place_writes(env.keys(), piece.0);
            if part.fpdus == 0 {
                part = self.process_fpdus(env, &mut PlainStream(&mut piece), u32::MAX);
            }
            if part.fpdus > 0 {
                rx.consume(part.bytes);
            } else {
                part = self.process_fpdus(env, &mut PlainStream(&mut *rx), 1);
            }
            progress.fpdus += part.fpdus;
            progress.bytes += part.bytes;
            progress.first_fpdu |= part.first_fpdu;
            if part.fpdus == 0 {
                break;
            }
        }
        progress
    }

    /// Places the Writes at the start of `piece`, up to an FPDU that is of another kind, incomplete
    /// or invalid. That FPDU is left to [`process_fpdus`](Self::process_fpdus).
    ///
    /// Why it is fast: conditions that cannot change within a run of Writes, the usual content of a
    /// stream, are tested once for all of them, and the key of the previous Write is not looked up
    /// again.
    #[inline]
    fn place_writes(&mut self, keys: &KeyReader, piece: &[u8]) -> ReceiveProgress {
        let mut progress = ReceiveProgress::default();
        let is_usual = self.is_receiving()
            && self.receive.has_first_fpdu
            && self.receive.out_of_order.is_empty()
            && !self.receive.out_of_order.is_watching_alignment();
        if !is_usual {
            return progress;
        }
        let mut last_key = LastKey::default();
        let mut rest = piece;
        while let Some(head) = rest.first_chunk::<HEAD_LEN>() {
            let [high, low, hdr @ ..] = *head;
            let ulpdu_len = u16::from_be_bytes([high, low]);
            let control = ControlOctets {
                ddp: hdr[0],
                rdmap: hdr[1],
            };
            let wire_len = fpdu::wire_len(ulpdu_len);
            let payload = LEN_FIELD + TAGGED_HDR_LEN..LEN_FIELD + usize::from(ulpdu_len);
            if !control.is_write() || payload.is_empty() || wire_len > rest.len() {
                break;
            }
            let (octets, behind) = rest.split_at(wire_len);
            if self.crc && !fpdu::is_crc_right(octets) {
                break;
            }
            let payload = &octets[payload];
            let (header, len) = (TaggedHeader::parse(&hdr), payload.len() as u32);
            let place = |mr: &RegisteredMemory, off| mr.write_at(off, payload).is_ok();
            let placed =
                self.receive
                    .on_write((keys, &self.attr), &mut last_key, &header, len, place);
            if placed.is_err() {
                break;
            }
            progress.fpdus += 1;
            rest = behind;
        }
        progress.bytes = piece.len() - rest.len();
        self.receive.out_of_order.position += progress.bytes as u64;
        progress
    }

    /// Returns whether FPDUs can be received now.
    #[inline]
    fn is_receiving(&self) -> bool {
        matches!(self.state, RdmapState::Rts | RdmapState::Closing)
            && !self.receive.is_delivery_delayed()
            && !self.receive.awaits_receive
    }

    /// Consumes the complete FPDUs in `rx`, at most `limit` of them.
    #[inline]
    fn process_fpdus<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl FpduSource,
        limit: u32,
    ) -> ReceiveProgress {
        let mut progress = ReceiveProgress::default();
        while progress.fpdus < limit && (self.is_receiving() || self.holds_terminate()) {
            let Some(fpdu) = rx.next_fpdu() else { break };
            if let Err(code) = rx.verify(&fpdu, self.crc) {
                // The initiator is in FPDU mode, and so takes a Terminate.
                self.may_send = true;
                self.fail_stream(env, code, None);
                break;
            }
            if self.state == RdmapState::Terminate {
                // The first FPDU, for which the Terminate has waited. It is not processed.
                (self.may_send, progress.first_fpdu) = (true, true);
                progress.fpdus += 1;
                rx.take(&fpdu);
                progress.bytes += fpdu.stream_len;
                break;
            }
            let out_of_order = &mut self.receive.out_of_order;
            if out_of_order.is_watching_alignment() && count_pieces(rx, fpdu.wire_len) > 1 {
                out_of_order.is_unaligned = true;
            }
            let position = out_of_order.position + progress.bytes as u64;
            let ahead = self.receive.ahead.as_mut();
            let is_processed = ahead.is_some_and(|ahead| ahead.take(position));
            let result = if is_processed {
                out_of_order.take(position, &fpdu);
                Ok(())
            } else if !out_of_order.is_empty() && out_of_order.take(position, &fpdu) {
                self.process_segment(env, &AlreadyPlaced(rx), &fpdu)
            } else {
                self.process_segment(env, rx, &fpdu)
            };
            if !self.receive.has_first_fpdu {
                self.receive.has_first_fpdu = true;
                self.may_send = true;
                progress.first_fpdu = true;
            }
            if let Err(error) = &result
                && error.lacks_receive
                && self.receive.receive_wait_ms > 0
            {
                // It stays in the stream, whose window closes, and is processed again later.
                self.receive.awaits_receive = true;
                env.await_receive();
                break;
            }
            progress.fpdus += 1;
            rx.take(&fpdu);
            progress.bytes += fpdu.stream_len;
            if let Err(error) = result {
                let offender = OffendingSegment {
                    ulpdu_len: fpdu.ulpdu_len,
                    hdr: fpdu.hdr,
                    read: error.read,
                };
                self.fail_stream(env, error.code, Some(&offender));
            }
        }
        self.receive.out_of_order.position += progress.bytes as u64;
        progress
    }

    #[inline]
    fn process_segment<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        fpdu: &FpduInfo,
    ) -> Result<(), SegmentError> {
        let control = ControlOctets {
            ddp: fpdu.hdr[0],
            rdmap: fpdu.hdr[1],
        };
        let ulpdu_len = usize::from(fpdu.ulpdu_len);
        // Most segments are Writes: they skip all other tests.
        if control.is_write() && ulpdu_len >= TAGGED_HDR_LEN {
            let header = TaggedHeader::parse(&fpdu.hdr);
            let len = (ulpdu_len - TAGGED_HDR_LEN) as u32;
            let payload_at = LEN_FIELD + TAGGED_HDR_LEN;
            let place =
                |mr: &RegisteredMemory, off| rx.copy_to_memory(payload_at, len as usize, mr, off);
            let (key_check, mut last_key) = ((env.keys(), &self.attr), LastKey::default());
            self.receive
                .on_write(key_check, &mut last_key, &header, len, place)?;
            return Ok(());
        }
        if ulpdu_len < 2 || ulpdu_len < control.header_len() {
            return Err(TerminateCode::MPA_LENGTH.into());
        }
        if !control.is_tagged() {
            let len = (ulpdu_len - UNTAGGED_HDR_LEN) as u32;
            return self.process_untagged(env, rx, control, &UntaggedHeader::parse(&fpdu.hdr), len);
        }
        if control.ddp_version() != DDP_VERSION {
            return Err(TerminateCode::DDP_TAGGED_VERSION.into());
        }
        let header = TaggedHeader::parse(&fpdu.hdr);
        let len = (ulpdu_len - TAGGED_HDR_LEN) as u32;
        match parse_opcode(control)? {
            RdmapOpcode::ReadResponse => {
                let is_answered = self
                    .requester
                    .on_read_response(env, &self.attr, rx, &header, len)?;
                if is_answered {
                    self.complete_ready(env);
                }
                Ok(())
            }
            _ => Err(TerminateCode::RDMAP_OPCODE.into()),
        }
    }

    #[inline]
    fn process_untagged<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        control: ControlOctets,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<(), SegmentError> {
        if control.ddp_version() != DDP_VERSION {
            return Err(TerminateCode::DDP_UNTAGGED_VERSION.into());
        }
        if header.qn >= QUEUE_COUNT {
            return Err(TerminateCode::DDP_QN.into());
        }
        let opcode = parse_opcode(control)?;
        match opcode.queue_number() {
            None => return Err(TerminateCode::RDMAP_OPCODE.into()),
            Some(qn) if qn != header.qn => return Err(TerminateCode::DDP_QN.into()),
            Some(_) => {}
        }
        // A closing stream answers only the requests that arrived before.
        let is_answerable = self.state == RdmapState::Rts;
        let (attr, responder) = (&self.attr, &mut self.responder);
        match opcode {
            RdmapOpcode::ReadRequest => {
                responder.on_read_request(env.keys(), attr, rx, header, len, is_answerable)
            }
            RdmapOpcode::AtomicRequest => {
                responder.on_atomic_request(env.keys(), attr, rx, header, len, is_answerable)
            }
            RdmapOpcode::AtomicResponse => {
                let is_answered = self
                    .requester
                    .on_atomic_response(env, attr, rx, header, len)?;
                if is_answered {
                    self.complete_ready(env);
                }
                Ok(())
            }
            RdmapOpcode::Immediate | RdmapOpcode::ImmediateSe => self
                .receive
                .on_immediate_data(env, attr, rx, opcode, header, len),
            RdmapOpcode::Terminate => {
                self.on_terminate(env, rx, header, len);
                Ok(())
            }
            _ => {
                let (receive, context) = self.receive_with_context();
                receive.on_send(env, &context, rx, opcode, header, len)
            }
        }
    }
}
