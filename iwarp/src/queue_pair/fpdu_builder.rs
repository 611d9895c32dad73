//! The bytes of FPDUs, identical at each retransmission. [`QueuePair::build_fpdus`] builds an FPDU in
//! one of these ways:
//!
//! - [`FpduBuilder`]: any FPDU, part by part: headers, references to memory, several elements, inline
//!   data, markers, payload that the frame holds in several buffers.
//! - [`append_copied_fpdu`]: a single FPDU that copies one piece of memory into one piece of the frame,
//!   as nearly all do.
//! - [`append_copied_run`]: several such FPDUs of a run.
//!
//! Copied payload is read once: bytes and CRC of the frame come from the same load, even if the
//! application changes its memory meanwhile. Referenced payload is read here for the CRC and again
//! when the frame is transmitted, so references are used only for memory that must not change while
//! the message is in flight (verbs: WRITE and SEND, but not the source of a READ).
//!
//! [`QueuePair::build_fpdus`]: crate::QueuePair::build_fpdus

use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{
    ControlOctets, MAX_HDR_LEN, Msn, QN_SEND, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN,
    UntaggedHeader,
};
use crate::environment::ExtBufRef;
use crate::mpa::fpdu::{self, CRC_LEN, LEN_FIELD, MAX_PAD_LEN};
use crate::mpa::marker::{self, MARKER_LEN, MarkerLayout};
use crate::queue_pair::state::{BuildError, QpInitAttr};
use crate::rdmap::{RdmapOpcode, ReadRequestHeader};
use crate::record::{FpduRecord, FpduRun, FrameBuilder};
use siw_memory::key_table::LastKey;
use siw_memory::{KeyReader, RegisteredMemory, crc, crc_copy, gap_copy};
use siw_shm::{Access, Sge, SharedMemory};
use std::ops::Range;

/// Maximum number of bytes that one system call copies from unmapped memory: the payload of a usual
/// segment.
const COPIED_AT_ONCE: usize = 2048;

/// An FPDU whose payload is copied from one element.
pub(crate) struct CopiedFpdu<const HEAD: usize> {
    /// Length field and header.
    pub head: [u8; HEAD],
    /// The whole element; the payload begins at [`FpduRecord::offset`].
    pub element: Sge,
}

/// Appends the FPDUs `units` of a run to the frame, as long as `copied` returns their contents, their
/// payload is contiguous in memory, and the frame has room for them in one piece. Returns the number
/// of FPDUs appended. `copied` may fail because the message has ended. A run has no markers.
///
/// Why it is fast: room is reserved for many FPDUs at once, and the key of the previous FPDU is not
/// looked up again. A single FPDU takes 170 instructions less by [`append_copied_fpdu`].
#[inline(always)]
pub(crate) fn append_copied_run<B: FrameBuilder, const HEAD: usize>(
    (keys, attr, access): (&KeyReader, &QpInitAttr, Access),
    (run, units): (&FpduRun, Range<u16>),
    with_crc: bool,
    frame: &mut B,
    copied: impl Fn(&FpduRecord) -> Result<Option<CopiedFpdu<HEAD>>, BuildError>,
) -> Result<u16, (FpduRecord, BuildError)> {
    let unit_len = run.unit_len() as usize;
    let mut last_key = LastKey::default();
    let mut next = units.start;
    while next < units.end {
        let most = usize::from(units.end - next);
        let Some(room) = frame.reserve_fpdus(unit_len, most) else {
            break;
        };
        let reserved = room.len();
        let mut filled = 0;
        while let Some(fpdu) = room.get_mut(filled..filled + unit_len) {
            let record = run.get(next);
            let failure = |error| (record, error);
            let Some(CopiedFpdu { head, element }) = copied(&record).map_err(failure)? else {
                break;
            };
            let len = (LEN_FIELD + usize::from(record.ulpdu_len) - HEAD) as u32;
            let from = element.addr.wrapping_add(u64::from(record.offset));
            let (mr, off) = attr
                .check_key_with(keys, &mut last_key, (element.lkey, from, len), access)
                .map_err(|_| (record, BuildError::KeyDeregistered))?;
            if !record.is_last {
                let rest = element.length - record.offset - len;
                prefetch_behind(mr, off, len, rest, record.offset == 0);
            }
            let Some(source) = whole_piece_at(mr, off, len as usize) else {
                break;
            };
            fill_copied_fpdu(fpdu, record.ulpdu_len, with_crc, &head, source).map_err(failure)?;
            filled += unit_len;
            next += 1;
        }
        if filled < reserved {
            frame.withdraw(reserved - filled);
            break;
        }
    }
    Ok(next - units.start)
}

/// Appends the whole FPDU of a record, if its payload at `off` of `mr`, which
/// [`RegisteredMemory::check_access`] returned, is one piece and the frame has room for it in one
/// piece. `false`: nothing was appended, and [`FpduBuilder`] builds it. `head`: length field and
/// header.
///
/// Why it is fast: room is reserved once, and a short FPDU gets its CRC in one pass.
#[inline(always)]
pub(crate) fn append_copied_fpdu<B: FrameBuilder>(
    frame: &mut B,
    record: &FpduRecord,
    with_crc: bool,
    head: &[u8],
    (mr, off): (&RegisteredMemory, u64),
) -> Result<bool, BuildError> {
    let payload_len = LEN_FIELD + usize::from(record.ulpdu_len) - head.len();
    let Some(source) = whole_piece_at(mr, off, payload_len) else {
        return Ok(false);
    };
    let has_markers = record.marker_position.has_markers();
    if has_markers && !is_marked_simply(record, head.len()) {
        return Ok(false);
    }
    let Some(room) = frame.reserve_fpdus(record.wire_len(), 1) else {
        return Ok(false);
    };
    if has_markers {
        fill_marked_fpdu(room, record, with_crc, head, source)?;
    } else {
        fill_copied_fpdu(room, record.ulpdu_len, with_crc, head, source)?;
    }
    Ok(true)
}

/// Returns whether no marker falls into the header and no pad is needed, as in nearly every full
/// segment.
fn is_marked_simply(record: &FpduRecord, head_len: usize) -> bool {
    record.marker_position.until_marker() >= head_len && fpdu::pad_len(record.ulpdu_len) == 0
}

/// Returns the memory of `len` octets at `off`, if they are contiguous.
#[inline(always)]
fn whole_piece_at(mr: &RegisteredMemory, off: u64, len: usize) -> Option<(&SharedMemory, usize)> {
    let (region, region_off, piece_len) = mr.piece_at(off, len).ok()?;
    (piece_len == len).then_some((&**region, region_off))
}

/// Length field and header of a tagged segment.
///
/// Why it is fast: it moves from registers to the frame in whole words, and the CRC reads those
/// words.
#[inline(always)]
pub(crate) fn tagged_head(
    ulpdu_len: u16,
    header: &TaggedHeader,
) -> [u8; LEN_FIELD + TAGGED_HDR_LEN] {
    let first = first_word(ulpdu_len, header.control, header.stag);
    (u128::from(first) << 64 | u128::from(header.to)).to_be_bytes()
}

/// Length field and header of an untagged segment, built in the same way.
#[inline(always)]
pub(crate) fn untagged_head(
    ulpdu_len: u16,
    header: &UntaggedHeader,
) -> [u8; LEN_FIELD + UNTAGGED_HDR_LEN] {
    let first = first_word(ulpdu_len, header.control, header.inv_stag);
    let second = u64::from(header.qn) << 32 | u64::from(header.msn.0);
    let mut head = [0; LEN_FIELD + UNTAGGED_HDR_LEN];
    head[..8].copy_from_slice(&first.to_be_bytes());
    head[8..16].copy_from_slice(&second.to_be_bytes());
    head[16..].copy_from_slice(&header.mo.to_be_bytes());
    head
}

/// Length field, control octets and the following STag.
#[inline(always)]
fn first_word(ulpdu_len: u16, control: ControlOctets, stag: u32) -> u64 {
    u64::from(ulpdu_len) << 48
        | u64::from(control.ddp) << 40
        | u64::from(control.rdmap) << 32
        | u64::from(stag)
}

/// Writes a whole FPDU without markers to `room`, which has its length, with a copy of the payload at
/// `source`.
#[inline(always)]
fn fill_copied_fpdu(
    room: &mut [u8],
    ulpdu_len: u16,
    with_crc: bool,
    head: &[u8],
    (region, region_off): (&SharedMemory, usize),
) -> Result<(), BuildError> {
    let payload_at = head.len();
    let pad_at = LEN_FIELD + usize::from(ulpdu_len);
    let crc_at = pad_at + fpdu::pad_len(ulpdu_len);
    room[..payload_at].copy_from_slice(head);
    if pad_at < crc_at {
        room[pad_at..crc_at].fill(0);
    }
    let (bytes, field) = room.split_at_mut(crc_at);
    let crc = if with_crc {
        crc_copy::read_between_with_crc(region, region_off, bytes, payload_at..pad_at)
    } else {
        let read = region.read(region_off, &mut bytes[payload_at..pad_at]);
        read.map(|()| 0)
    };
    let crc = crc.map_err(|_| BuildError::KeyDeregistered)?;
    field.copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// Variant of [`fill_copied_fpdu`] for a stream with markers, if [`is_marked_simply`].
///
/// Why it is a variant of its own: [`FpduBuilder`] reserves room and continues the CRC for header,
/// payload and end separately. Sending full segments with markers takes 1.13 of the time without
/// markers this way and 1.28 by [`FpduBuilder`] (`benches/figures iwarp`, `fpdu_send_markers_ratio`).
#[inline(never)]
fn fill_marked_fpdu(
    room: &mut [u8],
    record: &FpduRecord,
    with_crc: bool,
    head: &[u8],
    (region, region_off): (&SharedMemory, usize),
) -> Result<(), BuildError> {
    let payload_at = head.len();
    let until_marker = record.marker_position.until_marker() - payload_at;
    let layout = MarkerLayout {
        until_marker,
        fpdu_offset: payload_at,
    };
    let len = LEN_FIELD + usize::from(record.ulpdu_len) - payload_at;
    let payload_end = payload_at + layout.marked_len(len);
    let (bytes, field) = room.split_at_mut(room.len() - CRC_LEN);
    bytes[..payload_at].copy_from_slice(head);
    let crc = with_crc.then(|| crc::crc32c(head));
    let marker_at = |offset| layout.marker_at(offset);
    let (payload, marker_behind) = bytes[payload_at..].split_at_mut(payload_end - payload_at);
    let gaps = layout.gaps();
    let copied = gap_copy::read_with_gaps(region, region_off, len, payload, gaps, marker_at, crc);
    let mut crc = copied.map_err(|_| BuildError::KeyDeregistered)?;
    if !marker_behind.is_empty() {
        marker_behind.copy_from_slice(&marker::encode_marker(payload_end));
        if with_crc {
            crc = crc::crc32c_append(crc, marker_behind);
        }
    }
    field.copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// One FPDU under construction, part by part.
pub(crate) struct FpduBuilder<'a, B> {
    frame: &'a mut B,
    ulpdu_len: u16,
    with_crc: bool,
    /// CRC32c of the bytes appended so far.
    crc: u32,
    /// Octets to the next marker; more than any FPDU has in a stream without markers.
    until_marker: usize,
    /// Octets since the start of the length field: the FPDUPTR of a marker at this point.
    fpdu_offset: usize,
}

impl<'a, B: FrameBuilder> FpduBuilder<'a, B> {
    /// Starts the FPDU of `record` at the end of `frame`.
    #[inline]
    pub fn new(with_crc: bool, record: &FpduRecord, frame: &'a mut B) -> Self {
        let position = record.marker_position;
        Self {
            frame,
            ulpdu_len: record.ulpdu_len,
            with_crc,
            crc: 0,
            until_marker: if position.has_markers() {
                position.until_marker()
            } else {
                usize::MAX
            },
            fpdu_offset: 0,
        }
    }

    /// Appends bytes of header or payload, with markers where they are due.
    #[inline]
    pub fn append_bytes(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            self.append_due_marker();
            let (now, later) = rest.split_at(rest.len().min(self.until_marker));
            self.advance(now.len());
            self.append_unmarked(now);
            rest = later;
        }
    }

    #[inline]
    fn advance(&mut self, len: usize) {
        self.until_marker -= len;
        self.fpdu_offset += len;
    }

    #[inline]
    fn append_due_marker(&mut self) {
        if self.until_marker == 0 {
            let marker = marker::encode_marker(self.fpdu_offset);
            self.append_unmarked(&marker);
            self.until_marker = marker::DATA_LEN;
            // A marker in front of the length field does not count.
            if self.fpdu_offset > 0 {
                self.fpdu_offset += MARKER_LEN;
            }
        }
    }

    #[inline]
    fn append_unmarked(&mut self, bytes: &[u8]) {
        if self.with_crc {
            self.crc = crc::crc32c_append(self.crc, bytes);
        }
        self.append_uncounted(bytes);
    }

    /// Appends bytes that the CRC does not cover, or already does.
    #[inline]
    fn append_uncounted(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some(room) = self.frame.reserve(rest.len()) else {
                return;
            };
            let (now, later) = rest.split_at(room.len());
            room.copy_from_slice(now);
            rest = later;
        }
    }

    /// Appends payload from registered memory at `off`, which [`RegisteredMemory::check_access`]
    /// returned: by reference as far as the frame takes references, if there is an `ext_buf_ref`, and
    /// otherwise as a copy.
    pub fn append_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
        ext_buf_ref: ExtBufRef,
    ) -> Result<(), BuildError> {
        let (mut off, mut left) = (off, len as usize);
        while left > 0 {
            let done = match mr.piece_at(off, left) {
                // One piece, unless the registered pages are not contiguous.
                Ok((region, region_off, len)) => {
                    let is_referenced = ext_buf_ref != ExtBufRef::NONE
                        && self
                            .frame
                            .append_reference(region, region_off, len, ext_buf_ref);
                    if is_referenced {
                        self.note_reference(region, region_off, len)?;
                        len
                    } else {
                        self.copy_memory(region, region_off, len)?
                    }
                }
                Err(_) => self.copy_unmapped_memory(mr, off, left)?,
            };
            if done == 0 {
                // The frame is dropped.
                return Ok(());
            }
            off += done as u64;
            left -= done;
        }
        Ok(())
    }

    /// Continues the CRC over bytes that the frame refers to.
    #[inline]
    fn note_reference(
        &mut self,
        region: &SharedMemory,
        region_off: usize,
        len: usize,
    ) -> Result<(), BuildError> {
        self.advance(len);
        if self.with_crc {
            let crc = crc::crc32c_append_shared(self.crc, region, region_off, len);
            self.crc = crc.map_err(|_| BuildError::KeyDeregistered)?;
        }
        Ok(())
    }

    /// Copies as much of the payload as fits into one piece of the frame, with its markers; returns
    /// the number of bytes.
    #[inline]
    fn copy_memory(
        &mut self,
        region: &SharedMemory,
        region_off: usize,
        len: usize,
    ) -> Result<usize, BuildError> {
        self.append_due_marker();
        let layout = MarkerLayout {
            until_marker: self.until_marker,
            fpdu_offset: self.fpdu_offset,
        };
        let want = layout.marked_len(len);
        let Some(room) = self.frame.reserve(want) else {
            return Ok(0);
        };
        let reserved = room.len();
        let (len, marked_len) = if reserved < want {
            let len = layout.payload_len(reserved);
            (len, layout.marked_len(len))
        } else {
            (len, want)
        };
        let room = &mut room[..marked_len];
        let copied = if marked_len > len {
            let crc = self.with_crc.then_some(self.crc);
            let marker_at = |offset| layout.marker_at(offset);
            gap_copy::read_with_gaps(region, region_off, len, room, layout.gaps(), marker_at, crc)
        } else if self.with_crc {
            crc_copy::read_with_crc(region, region_off, room, self.crc)
        } else {
            region.read(region_off, room).map(|()| 0)
        };
        self.crc = copied.map_err(|_| BuildError::KeyDeregistered)?;
        if reserved > marked_len {
            // A marker is due, and does not fit together with payload.
            self.frame.withdraw(reserved - marked_len);
        }
        self.fpdu_offset += marked_len;
        self.until_marker = layout.until_marker_after(len, marked_len);
        Ok(len)
    }

    /// Appends the first bytes of payload that the daemon has not mapped, using a system call.
    /// Returns the number of bytes.
    #[cold]
    fn copy_unmapped_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: usize,
    ) -> Result<usize, BuildError> {
        let mut bytes = [0; COPIED_AT_ONCE];
        let bytes = &mut bytes[..len.min(COPIED_AT_ONCE)];
        let copied = mr
            .read_piece(off, bytes)
            .map_err(|_| BuildError::KeyDeregistered)?;
        self.append_bytes(&bytes[..copied]);
        Ok(copied)
    }

    /// Appends length field and DDP header in one piece.
    #[inline]
    pub fn append_header(&mut self, header: &[u8]) {
        let mut bytes = [0; LEN_FIELD + MAX_HDR_LEN];
        let len = LEN_FIELD + header.len();
        bytes[..LEN_FIELD].copy_from_slice(&self.ulpdu_len.to_be_bytes());
        bytes[LEN_FIELD..len].copy_from_slice(header);
        self.append_bytes(&bytes[..len]);
    }

    /// Appends a whole untagged message of one segment: header and `payload`.
    pub fn append_short_message(&mut self, opcode: RdmapOpcode, msn: Msn, payload: &[u8]) {
        let header = UntaggedHeader {
            control: ControlOctets::new(opcode, true),
            inv_stag: 0,
            qn: opcode.queue_number().unwrap_or(QN_SEND),
            msn,
            mo: 0,
        };
        self.append_header(&header.to_bytes());
        self.append_bytes(payload);
    }

    /// Appends a Read Request.
    pub fn append_read_request(&mut self, msn: Msn, header: &ReadRequestHeader) {
        self.append_short_message(RdmapOpcode::ReadRequest, msn, &header.to_bytes());
    }

    /// Appends pad and CRC (RFC 5044 sections 4.1 and 4.4), and a marker between them if one is due.
    #[inline]
    pub fn finish(mut self) {
        let pad_len = fpdu::pad_len(self.ulpdu_len);
        self.append_bytes(&[0; MAX_PAD_LEN][..pad_len]);
        self.append_due_marker();
        let crc = if self.with_crc { self.crc } else { 0 };
        self.append_uncounted(&crc.to_le_bytes());
    }
}
