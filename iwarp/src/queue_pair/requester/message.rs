//! Messages of work requests: selects the next segments to send, and builds the bytes of any segment.
//!
//! Single-FPDU messages of equal length, and the full segments of a long message, become one record.
//! Why this is fast: their common properties are looked up, checked and recorded once. TCP keeps one
//! record for them, divides it among segments, and passes each part back to be built and acknowledged
//! as a whole.

use super::Requester;
use super::outstanding_read::sink_stag;
use super::work_request_queue::SendEntry;
use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{
    ControlOctets, Msn, QN_SEND, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::QpEnv;
use crate::mpa::fpdu;
use crate::queue_pair::fpdu_builder::{
    CopiedFpdu, FpduBuilder, append_copied_fpdu, append_copied_run, tagged_head, untagged_head,
};
use crate::queue_pair::state::{BuildError, DrainState, QpInitAttr};
use crate::queue_pair::transmitter::{FpduSegment, OpenMessage, Transmitter};
use crate::rdmap::atomic_header::{ATOMIC_REQUEST_LEN, AtomicOp, AtomicRequestHeader};
use crate::rdmap::{
    IMMEDIATE_FOR_NEXT_SEND, IMMEDIATE_LEN, READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader,
};
use crate::record::{FpduKind, FpduRecord, FpduRun, FrameBuilder, MessageSlot, OutgoingFpdu};
use siw_memory::KeyReader;
use siw_shm::{Access, Opcode, WrFlags};
use std::ops::Range;

impl Requester {
    /// Takes a run of uniform single-FPDU messages out of the ring: Writes, or Sends, of one length,
    /// each copied from one element. Takes as many as fit into `room`, at most `most`. `None`: the
    /// next request, if any, is of another kind, or has to wait, or is invalid. `false` with a run:
    /// the ring is empty, or the next request is not a [`siw_shm::PlainSend`].
    #[inline(always)]
    pub fn take_messages<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        tx: &mut Transmitter,
        room: usize,
        most: u32,
    ) -> Option<(FpduRun, bool)> {
        if self.current.is_some() || self.drain != DrainState::Inactive || self.quiescing.is_some()
        {
            return None;
        }
        let first = env.peek_plain_send()?;
        let (opcode, len) = (first.opcode, first.sge.length);
        let hdr_len = match opcode {
            Opcode::Write => TAGGED_HDR_LEN,
            Opcode::Send => UNTAGGED_HDR_LEN,
            _ => return None,
        } as u32;
        let is_alone = len == 0 || len > u32::from(tx.mulpdu) - hdr_len || self.is_referenced(len);
        if is_alone {
            return None;
        }
        let ulpdu_len = (hdr_len + len) as u16;
        let unit_len = fpdu::wire_len(ulpdu_len);
        // A correct client library never exceeds the depth of the queue.
        let depth_left = (attr.max_send_wr as usize).saturating_sub(self.queue.len());
        let most = (most as usize).min(usize::from(u16::MAX));
        let most = most.min(room / unit_len).min(depth_left);
        let mut request = first;
        let (mut count, mut has_next) = (0, true);
        let slot = self.queue.next_slot();
        while count < most {
            let is_alike = request.opcode == opcode
                && request.sge.length == len
                && !request.flags.contains(WrFlags::FENCE);
            let sge = &request.sge;
            if !is_alike
                || attr
                    .check_key(env.keys(), sge.lkey, sge.addr, len, Access::NONE)
                    .is_err()
            {
                break;
            }
            env.take_peeked_send();
            let msn = self.next_send_msn;
            self.queue.push_sent(&request, msn.0);
            if opcode == Opcode::Send {
                self.next_send_msn = msn.next();
            }
            count += 1;
            match env.peek_plain_send() {
                Some(next) => request = next,
                None => {
                    has_next = false;
                    break;
                }
            }
        }
        if count == 0 {
            return None;
        }
        tx.end_request(len);
        let segment = FpduSegment::whole_message(FpduKind::Request, slot, ulpdu_len);
        let first = tx.push_fpdu(segment, unit_len).record;
        Some((FpduRun::new(first, count as u16, len as u16), has_next))
    }

    /// Takes full segments of the current Write or Send, excluding its first and last segment: as
    /// many as fit into `room`, at most `most`. `None` in a stream with markers.
    #[inline]
    pub fn take_full_segments(
        &mut self,
        tx: &mut Transmitter,
        room: usize,
        most: u32,
    ) -> Option<FpduRun> {
        let slot = self.current?;
        let mulpdu = tx.mulpdu;
        let entry = self.queue.get_mut(slot)?;
        let hdr_len = match entry.opcode {
            Opcode::Write | Opcode::WriteWithImm => TAGGED_HDR_LEN,
            opcode if opcode.sends_data() => UNTAGGED_HDR_LEN,
            _ => return None,
        } as u32;
        let payload_len = u32::from(mulpdu) - hdr_len;
        let left = entry.length - entry.sent;
        if left <= payload_len || entry.sent == 0 || tx.has_markers() {
            return None;
        }
        let unit_len = fpdu::wire_len(mulpdu);
        let by_room = u32::try_from(room / unit_len).unwrap_or(u32::MAX);
        let count = ((left - 1) / payload_len)
            .min(by_room)
            .min(most)
            .min(u16::MAX.into());
        if count == 0 {
            return None;
        }
        let segment = FpduSegment {
            kind: FpduKind::Request,
            is_last: false,
            ulpdu_len: mulpdu,
            slot,
            offset: entry.sent,
        };
        entry.sent += count * payload_len;
        let first = tx.push_fpdu(segment, unit_len).record;
        Some(FpduRun::new(first, count as u16, payload_len as u16))
    }

    /// Returns the next segment of the current work request; `None`: there is no room for it.
    #[inline(always)]
    pub fn next_segment(&mut self, tx: &mut Transmitter, room: usize) -> Option<OutgoingFpdu> {
        let slot = self.current?;
        let mulpdu = u32::from(tx.mulpdu);
        let entry = self.queue.get_mut(slot)?;
        if entry.opcode.awaits_response() {
            return if entry.opcode.is_atomic() {
                self.next_atomic_request(tx, slot, room)
            } else {
                self.next_read_request(tx, slot, room)
            };
        }
        if is_immediate_due(entry) {
            return self.next_immediate(tx, slot, room);
        }
        let is_write = matches!(entry.opcode, Opcode::Write | Opcode::WriteWithImm);
        let hdr_len = if is_write {
            TAGGED_HDR_LEN
        } else {
            UNTAGGED_HDR_LEN
        } as u32;
        let payload_len = (entry.length - entry.sent).min(mulpdu - hdr_len);
        let ulpdu_len = (hdr_len + payload_len) as u16;
        let wire_len = tx.fit(ulpdu_len, room)?;
        let offset = entry.sent;
        if offset == 0 && !is_write {
            if entry.opcode != Opcode::SendWithImm {
                entry.msn = self.next_send_msn.0;
            }
            self.next_send_msn = self.next_send_msn.next();
        }
        entry.sent += payload_len;
        let len = entry.length;
        let is_last = entry.sent == len;
        if is_last && entry.opcode == Opcode::WriteWithImm {
            // Its Immediate Data follows.
            entry.messages_sent = 1;
            tx.open_message = OpenMessage::Request;
        } else if is_last {
            self.current = None;
            tx.end_request(len);
        } else {
            tx.open_message = OpenMessage::Request;
        }
        let segment = FpduSegment {
            kind: FpduKind::Request,
            is_last,
            ulpdu_len,
            slot,
            offset,
        };
        Some(tx.push_fpdu(segment, wire_len))
    }

    fn next_immediate(
        &mut self,
        tx: &mut Transmitter,
        slot: MessageSlot,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + IMMEDIATE_LEN) as u16;
        let wire_len = tx.fit(ulpdu_len, room)?;
        let entry = self.queue.get_mut(slot)?;
        entry.msn = self.next_send_msn.0;
        entry.messages_sent += 1;
        self.next_send_msn = self.next_send_msn.next();
        if entry.opcode == Opcode::WriteWithImm {
            let len = entry.length;
            self.current = None;
            tx.end_request(len);
        } else {
            tx.open_message = OpenMessage::Request;
        }
        let segment = FpduSegment::whole_message(FpduKind::Immediate, slot, ulpdu_len);
        Some(tx.push_fpdu(segment, wire_len))
    }

    /// Returns whether an FPDU of a work request, if that is still here, has its kind and length.
    pub fn knows_fpdu(&self, record: &FpduRecord) -> bool {
        self.queue.get(record.slot).is_none_or(|entry| {
            let len = usize::from(record.ulpdu_len);
            match entry.opcode {
                Opcode::Write | Opcode::WriteWithImm => {
                    record.is_part_of(TAGGED_HDR_LEN, entry.sent)
                }
                Opcode::Read | Opcode::ReadWithInv => len == UNTAGGED_HDR_LEN + READ_REQUEST_LEN,
                Opcode::FetchAdd | Opcode::CmpSwap => len == UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN,
                opcode => opcode.sends_data() && record.is_part_of(UNTAGGED_HDR_LEN, entry.sent),
            }
        })
    }

    /// The `count` single-FPDU messages from `slot` on are acknowledged.
    #[inline]
    pub fn on_messages_acked(&mut self, slot: MessageSlot, count: u16) {
        for entry in self.queue.range_mut(slot, count.into()) {
            entry.is_acked = true;
        }
    }

    /// Appends FPDUs of Writes or Sends, each copied from one element; see
    /// [`append_copied_run`].
    #[inline(always)]
    pub fn append_copied_run<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        (run, units): (&FpduRun, Range<u16>),
        with_crc: bool,
        frame: &mut B,
    ) -> Result<u16, (FpduRecord, BuildError)> {
        let first = run.get(units.start);
        let Some(entry) = self.queue.get(first.slot) else {
            return Err((first, BuildError::MessageCompleted));
        };
        if entry.copied_sge().is_none() {
            return Ok(0);
        }
        let source = (keys, attr, Access::NONE);
        match entry.opcode {
            Opcode::Write | Opcode::WriteWithImm if first.ulpdu_len > TAGGED_HDR_LEN as u16 => {
                append_copied_run(source, (run, units), with_crc, frame, |record| {
                    self.copied_fpdu(record, |entry| {
                        tagged_head(record.ulpdu_len, &write_header(entry, record))
                    })
                })
            }
            opcode if opcode.sends_data() && first.ulpdu_len > UNTAGGED_HDR_LEN as u16 => {
                append_copied_run(source, (run, units), with_crc, frame, |record| {
                    self.copied_fpdu(record, |entry| {
                        untagged_head(record.ulpdu_len, &send_header(entry, record))
                    })
                })
            }
            _ => Ok(0),
        }
    }

    /// Contents of an FPDU, if its payload is copied from one element.
    #[inline(always)]
    fn copied_fpdu<const HEAD: usize>(
        &self,
        record: &FpduRecord,
        head_of: impl Fn(&SendEntry) -> [u8; HEAD],
    ) -> Result<Option<CopiedFpdu<HEAD>>, BuildError> {
        let Some(entry) = self.queue.get(record.slot) else {
            return Err(BuildError::MessageCompleted);
        };
        Ok(entry.copied_sge().map(|&element| CopiedFpdu {
            head: head_of(entry),
            element,
        }))
    }

    /// Appends the FPDU of a segment of a Write or Send, if it is copied from one element; see
    /// [`append_copied_fpdu`].
    #[inline(always)]
    pub fn append_copied<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        record: &FpduRecord,
        with_crc: bool,
        frame: &mut B,
    ) -> Result<bool, BuildError> {
        let Some(entry) = self.queue.get(record.slot) else {
            return Err(BuildError::MessageCompleted);
        };
        let Some(sge) = entry.copied_sge() else {
            return Ok(false);
        };
        let hdr_len = match entry.opcode {
            Opcode::Write | Opcode::WriteWithImm => TAGGED_HDR_LEN,
            opcode if opcode.sends_data() => UNTAGGED_HDR_LEN,
            _ => return Ok(false),
        };
        let len = u32::from(record.ulpdu_len) - hdr_len as u32;
        if len == 0 {
            return Ok(false);
        }
        let from = sge.addr.wrapping_add(u64::from(record.offset));
        let (mr, off) = attr
            .check_key(keys, sge.lkey, from, len, Access::NONE)
            .map_err(|_| BuildError::KeyDeregistered)?;
        if !record.is_last {
            let rest = sge.length - record.offset - len;
            prefetch_behind(mr, off, len, rest, record.offset == 0);
        }
        if hdr_len == TAGGED_HDR_LEN {
            let head = tagged_head(record.ulpdu_len, &write_header(entry, record));
            append_copied_fpdu(frame, record, with_crc, &head, (mr, off))
        } else {
            let head = untagged_head(record.ulpdu_len, &send_header(entry, record));
            append_copied_fpdu(frame, record, with_crc, &head, (mr, off))
        }
    }

    /// Appends header and payload of a segment of a work request.
    #[inline]
    pub fn build_segment<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        record: &FpduRecord,
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        let entry = self
            .queue
            .get(record.slot)
            .ok_or(BuildError::MessageCompleted)?;
        match entry.opcode {
            Opcode::Write | Opcode::WriteWithImm => {
                let header = write_header(entry, record);
                self.build_payload(keys, attr, (record, entry), &header.to_bytes(), fpdu)
            }
            Opcode::Read | Opcode::ReadWithInv => {
                self.build_read_request(entry, record.offset, fpdu);
                Ok(())
            }
            Opcode::FetchAdd | Opcode::CmpSwap => self.build_atomic_request(entry, fpdu),
            _ => {
                let header = send_header(entry, record);
                self.build_payload(keys, attr, (record, entry), &header.to_bytes(), fpdu)
            }
        }
    }

    /// Appends header and payload of a segment that carries memory or inline data of its work
    /// request.
    #[inline]
    fn build_payload<B: FrameBuilder, const HDR: usize>(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        (record, entry): (&FpduRecord, &SendEntry),
        header: &[u8; HDR],
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        let len = u32::from(record.ulpdu_len) - HDR as u32;
        fpdu.append_header(header);
        if entry.is_inline() {
            let start = record.offset as usize;
            let data = self.queue.inline_data(entry);
            let part = data.get(start..start + len as usize);
            fpdu.append_bytes(part.ok_or(BuildError::MessageCompleted)?);
            return Ok(());
        }
        let (mut skip, mut left) = (record.offset, len);
        for sge in self.queue.sges(entry) {
            if left == 0 {
                break;
            }
            if skip >= sge.length {
                skip -= sge.length;
                continue;
            }
            let part_len = left.min(sge.length - skip);
            let from = sge.addr.wrapping_add(u64::from(skip));
            let (mr, off) = attr
                .check_key(keys, sge.lkey, from, part_len, Access::NONE)
                .map_err(|_| BuildError::KeyDeregistered)?;
            if !record.is_last {
                let rest = sge.length - skip - part_len;
                prefetch_behind(mr, off, part_len, rest, skip == 0);
            }
            fpdu.append_memory(mr, off, part_len, entry.ext_buf_ref)?;
            left -= part_len;
            skip = 0;
        }
        Ok(())
    }

    /// Appends the Immediate Data of a work request.
    pub fn build_immediate<B: FrameBuilder>(
        &self,
        record: &FpduRecord,
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        let entry = self
            .queue
            .get(record.slot)
            .ok_or(BuildError::MessageCompleted)?;
        let (opcode, payload) = immediate_payload(entry.opcode, entry.imm, entry.is_solicited());
        fpdu.append_short_message(opcode, Msn(entry.msn), &payload);
        Ok(())
    }

    fn build_read_request<B: FrameBuilder>(
        &self,
        entry: &SendEntry,
        offset: u32,
        fpdu: &mut FpduBuilder<'_, B>,
    ) {
        let (nth, sink) = self.queue.read_sink(entry, offset);
        fpdu.append_read_request(
            Msn(entry.msn.wrapping_add(nth)),
            &ReadRequestHeader {
                sink_stag: sink_stag(sink.lkey),
                sink_to: sink.addr,
                size: sink.length,
                src_stag: entry.rkey,
                src_to: entry.remote_addr.wrapping_add(u64::from(offset)),
            },
        );
    }

    fn build_atomic_request<B: FrameBuilder>(
        &self,
        entry: &SendEntry,
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        let header = AtomicRequestHeader {
            op: if entry.opcode == Opcode::FetchAdd {
                AtomicOp::FetchAdd
            } else {
                AtomicOp::CmpSwap
            },
            id: entry.msn,
            stag: entry.rkey,
            to: entry.remote_addr,
            args: self
                .queue
                .atomic_args(entry)
                .ok_or(BuildError::MessageCompleted)?,
        };
        let msn = Msn(entry.msn);
        fpdu.append_short_message(RdmapOpcode::AtomicRequest, msn, &header.to_bytes());
        Ok(())
    }
}

/// Returns whether the next message of this work request is Immediate Data.
#[inline]
fn is_immediate_due(entry: &SendEntry) -> bool {
    match entry.opcode {
        // The Write has been sent, with the L bit in its last segment; see `next_segment`.
        Opcode::WriteWithImm => entry.messages_sent == 1,
        Opcode::SendWithImm => entry.messages_sent == 0,
        _ => false,
    }
}

/// Opcode and payload of the Immediate Data of a work request; see [`IMMEDIATE_FOR_NEXT_SEND`].
fn immediate_payload(
    opcode: Opcode,
    imm: u32,
    is_solicited: bool,
) -> (RdmapOpcode, [u8; IMMEDIATE_LEN]) {
    let mut payload = [0; IMMEDIATE_LEN];
    payload[..4].copy_from_slice(&imm.to_be_bytes());
    if opcode == Opcode::SendWithImm {
        payload[4..].copy_from_slice(&IMMEDIATE_FOR_NEXT_SEND);
        return (RdmapOpcode::Immediate, payload);
    }
    let opcode = if is_solicited {
        RdmapOpcode::ImmediateSe
    } else {
        RdmapOpcode::Immediate
    };
    (opcode, payload)
}

/// Header of a segment of a Write.
#[inline(always)]
pub(super) fn write_header(entry: &SendEntry, record: &FpduRecord) -> TaggedHeader {
    TaggedHeader {
        control: ControlOctets::new(RdmapOpcode::Write, record.is_last),
        stag: entry.rkey,
        to: entry.remote_addr.wrapping_add(u64::from(record.offset)),
    }
}

/// Header of a segment of a Send.
#[inline(always)]
pub(super) fn send_header(entry: &SendEntry, record: &FpduRecord) -> UntaggedHeader {
    let (opcode, inv_stag) = send_opcode(entry);
    UntaggedHeader {
        control: ControlOctets::new(opcode, record.is_last),
        inv_stag,
        qn: QN_SEND,
        msn: send_msn(entry),
        mo: record.offset,
    }
}

/// Opcode of the Send of a work request, and the STag that it invalidates.
#[inline]
fn send_opcode(entry: &SendEntry) -> (RdmapOpcode, u32) {
    let invalidates = entry.opcode == Opcode::SendWithInv;
    let opcode = match (invalidates, entry.is_solicited()) {
        (false, false) => RdmapOpcode::Send,
        (false, true) => RdmapOpcode::SendSe,
        (true, false) => RdmapOpcode::SendInv,
        (true, true) => RdmapOpcode::SendSeInv,
    };
    (opcode, if invalidates { entry.imm } else { 0 })
}

/// MSN of a work request's Send: the one after its Immediate Data, if it has any.
#[inline]
fn send_msn(entry: &SendEntry) -> Msn {
    if entry.opcode == Opcode::SendWithImm {
        Msn(entry.msn).next()
    } else {
        Msn(entry.msn)
    }
}
