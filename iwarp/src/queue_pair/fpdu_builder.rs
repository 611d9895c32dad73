//! Builds the bytes of a record's FPDU, identically at each retransmission.
//!
//! [`QueuePair::build_fpdu`](crate::QueuePair::build_fpdu) selects the message; requester and
//! responder append its header and payload here; the builder adds length field, markers, pad and CRC,
//! and writes to the frame's [`FrameBuilder`].
//!
//! Copied payload is read once: bytes and CRC of the frame come from the same load, even if the
//! application changes its memory meanwhile. Referenced payload is read here for the CRC and again
//! when the frame is transmitted, so references are used only for memory that must not change while
//! the message is in flight (verbs: WRITE and SEND, but not the source of a READ).
//!
//! Why it is fast: the presence of markers is a const generic, so streams without markers pay nothing
//! for them. The header is written in one piece with the length field.

use crate::ddp::{
    ControlOctets, MAX_HDR_LEN, Msn, QN_SEND, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN,
    UntaggedHeader,
};
use crate::environment::ExtBufRef;
use crate::mpa::fpdu::{self, CRC_LEN, LEN_FIELD, MAX_PAD_LEN};
use crate::mpa::marker::{self, MARKER_LEN, MarkerLayout};
use crate::queue_pair::state::BuildError;
use crate::rdmap::atomic_header::ATOMIC_REQUEST_LEN;
use crate::rdmap::{RdmapOpcode, ReadRequestHeader};
use crate::record::{FpduRecord, FrameBuilder};
use siw_memory::{RegisteredMemory, crc, crc_copy, gap_copy};
use siw_shm::SharedMemory;

/// Maximum number of bytes that one system call copies from unmapped memory: the payload of a usual
/// segment.
const COPIED_AT_ONCE: usize = 2048;

/// Returns the memory of `len` octets at `off`, if they are contiguous.
#[inline(always)]
pub(crate) fn whole_piece_at(
    mr: &RegisteredMemory,
    off: u64,
    len: usize,
) -> Option<(&SharedMemory, usize)> {
    let (region, region_off, piece_len) = mr.piece_at(off, len).ok()?;
    (piece_len == len).then_some((&**region, region_off))
}

/// Appends a whole FPDU without markers, from length field to CRC, if its payload can be copied from
/// one piece of memory into one piece of the frame, which is nearly always so. `false`: nothing was
/// appended, and the caller appends it part by part. The payload is as for
/// [`FpduBuilder::append_memory`]. `head`: length field and header.
///
/// Why it is fast: room in the frame is reserved once, and a short FPDU gets its CRC in one pass.
#[inline(always)]
pub(crate) fn append_copied_fpdu<B: FrameBuilder>(
    frame: &mut B,
    ulpdu_len: u16,
    with_crc: bool,
    head: &[u8],
    (mr, off): (&RegisteredMemory, u64),
) -> Result<bool, BuildError> {
    let payload_len = LEN_FIELD + usize::from(ulpdu_len) - head.len();
    let Some(source) = whole_piece_at(mr, off, payload_len) else {
        return Ok(false);
    };
    let Some(room) = frame.reserve_in_one_piece(fpdu::wire_len(ulpdu_len)) else {
        return Ok(false);
    };
    fill_copied_fpdu(room, ulpdu_len, with_crc, head, source)?;
    Ok(true)
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
pub(crate) fn fill_copied_fpdu(
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

/// One FPDU under construction.
pub(crate) struct FpduBuilder<'a, B, const MARKERS: bool> {
    frame: &'a mut B,
    ulpdu_len: u16,
    with_crc: bool,
    /// CRC32c of the bytes appended so far.
    crc: u32,
    /// Octets to the next marker.
    until_marker: usize,
    /// Octets since the start of the length field: the FPDUPTR of a marker at this point.
    fpdu_offset: usize,
    /// Pad and CRC have been appended.
    is_whole: bool,
}

impl<'a, B: FrameBuilder, const MARKERS: bool> FpduBuilder<'a, B, MARKERS> {
    /// Starts the FPDU of `record` at the end of `frame`.
    #[inline]
    pub fn new(with_crc: bool, record: &FpduRecord, frame: &'a mut B) -> Self {
        Self {
            frame,
            ulpdu_len: record.ulpdu_len,
            with_crc,
            crc: 0,
            until_marker: record.marker_position.until_marker(),
            fpdu_offset: 0,
            is_whole: false,
        }
    }

    /// Appends the whole FPDU, from length field to CRC, if its payload is to be copied from one
    /// piece of memory into one piece of the frame, which is nearly always so. `false`: nothing was
    /// appended, and the caller appends it part by part. The payload is as for
    /// [`append_memory`](Self::append_memory).
    #[inline(always)]
    pub fn append_in_one_piece<const HDR: usize>(
        &mut self,
        header: &[u8; HDR],
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
    ) -> Result<bool, BuildError> {
        if MARKERS {
            return self.append_marked_in_one_piece(header, mr, off, len as usize);
        }
        let (ulpdu_len, with_crc) = (self.ulpdu_len, self.with_crc);
        let mut head = [0; LEN_FIELD + MAX_HDR_LEN];
        head[..LEN_FIELD].copy_from_slice(&ulpdu_len.to_be_bytes());
        head[LEN_FIELD..LEN_FIELD + HDR].copy_from_slice(header);
        let head = &head[..LEN_FIELD + HDR];
        self.is_whole = append_copied_fpdu(&mut *self.frame, ulpdu_len, with_crc, head, (mr, off))?;
        Ok(self.is_whole)
    }

    /// Variant of [`append_in_one_piece`](Self::append_in_one_piece) for a stream with markers, if no
    /// marker falls into the header and no pad is needed, as in nearly every full segment.
    #[inline(always)]
    fn append_marked_in_one_piece<const HDR: usize>(
        &mut self,
        header: &[u8; HDR],
        mr: &RegisteredMemory,
        off: u64,
        len: usize,
    ) -> Result<bool, BuildError> {
        let Some((region, region_off)) = whole_piece_at(mr, off, len) else {
            return Ok(false);
        };
        let payload_at = LEN_FIELD + HDR;
        let Some(until_marker) = self.until_marker.checked_sub(payload_at) else {
            return Ok(false);
        };
        if fpdu::pad_len(self.ulpdu_len) != 0 {
            return Ok(false);
        }
        let layout = MarkerLayout {
            until_marker,
            fpdu_offset: payload_at,
        };
        let marked_len = layout.marked_len(len);
        let payload_end = payload_at + marked_len;
        let has_marker_behind = layout.until_marker_after(len, marked_len) == 0;
        let crc_at = payload_end + if has_marker_behind { MARKER_LEN } else { 0 };
        let Some(room) = self.frame.reserve_in_one_piece(crc_at + CRC_LEN) else {
            return Ok(false);
        };
        self.is_whole = true;
        let (bytes, field) = room.split_at_mut(crc_at);
        bytes[..LEN_FIELD].copy_from_slice(&self.ulpdu_len.to_be_bytes());
        bytes[LEN_FIELD..payload_at].copy_from_slice(header);
        let crc = self.with_crc.then(|| crc::crc32c(&bytes[..payload_at]));
        let marker_at = |offset| layout.marker_at(offset);
        let payload = &mut bytes[payload_at..payload_end];
        let gaps = layout.gaps();
        let copied =
            gap_copy::read_with_gaps(region, region_off, len, payload, gaps, marker_at, crc);
        let mut crc = copied.map_err(|_| BuildError::KeyDeregistered)?;
        if has_marker_behind {
            let marker = marker::encode_marker(payload_end);
            bytes[payload_end..].copy_from_slice(&marker);
            if self.with_crc {
                crc = crc::crc32c_append(crc, &marker);
            }
        }
        field.copy_from_slice(&crc.to_le_bytes());
        Ok(true)
    }

    /// Appends bytes of header or payload, with markers where they are due.
    #[inline]
    pub fn append_bytes(&mut self, bytes: &[u8]) {
        if !MARKERS {
            return self.append_unmarked(bytes);
        }
        // A marker seldom falls into a header.
        if bytes.len() <= self.until_marker {
            self.advance(bytes.len());
            return self.append_unmarked(bytes);
        }
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
    fn append_unmarked(&mut self, bytes: &[u8]) {
        if self.with_crc {
            self.crc = crc::crc32c_append(self.crc, bytes);
        }
        self.frame.append_bytes(bytes);
    }

    /// Appends payload from registered memory at `off`, which [`RegisteredMemory::check_access`]
    /// returned.
    #[inline]
    pub fn append_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
        ext_buf_ref: ExtBufRef,
    ) -> Result<(), BuildError> {
        if !MARKERS {
            return self.append_unmarked_memory(mr, off, len, ext_buf_ref);
        }
        let (mut off, mut left) = (off, len as usize);
        while left > 0 {
            let copied = self.copy_marked_memory(mr, off, left)?;
            if copied == 0 {
                // The builder drops the frame.
                return Ok(());
            }
            off += copied as u64;
            left -= copied;
        }
        Ok(())
    }

    #[inline]
    fn append_unmarked_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
        ext_buf_ref: ExtBufRef,
    ) -> Result<(), BuildError> {
        let (mut off, mut left) = (off, len as usize);
        while left > 0 {
            // One piece, unless the registered pages are not contiguous.
            let Ok((region, region_off, piece_len)) = mr.piece_at(off, left) else {
                let done = self.append_copied_memory(mr, off, left)?;
                off += done as u64;
                left -= done;
                continue;
            };
            let is_referenced = ext_buf_ref != ExtBufRef::NONE
                && self
                    .frame
                    .append_reference(region, region_off, piece_len, ext_buf_ref);
            let done = if is_referenced {
                if self.with_crc {
                    let crc = crc::crc32c_append_shared(self.crc, region, region_off, piece_len);
                    self.crc = crc.map_err(|_| BuildError::KeyDeregistered)?;
                }
                piece_len
            } else {
                self.copy_unmarked_memory(region, region_off, piece_len)?
            };
            if done == 0 {
                // The builder drops the frame.
                return Ok(());
            }
            off += done as u64;
            left -= done;
        }
        Ok(())
    }

    /// Copies as much of the payload as fits into one piece of the frame; returns the number of
    /// bytes.
    #[inline]
    fn copy_unmarked_memory(
        &mut self,
        region: &SharedMemory,
        region_off: usize,
        len: usize,
    ) -> Result<usize, BuildError> {
        let len = self.frame.contiguous_room(len).min(len);
        let Some(room) = self.frame.reserve(len) else {
            return Ok(0);
        };
        if self.with_crc {
            self.crc = crc_copy::read_with_crc(region, region_off, room, self.crc)
                .map_err(|_| BuildError::KeyDeregistered)?;
        } else {
            region
                .read(region_off, room)
                .map_err(|_| BuildError::KeyDeregistered)?;
        }
        Ok(len)
    }

    /// Copies as much of the payload as is contiguous in memory and fits into one piece of the frame,
    /// with its markers; returns the number of bytes. The pieces between markers are too short for
    /// references.
    #[inline]
    fn copy_marked_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: usize,
    ) -> Result<usize, BuildError> {
        let Ok((region, region_off, len)) = mr.piece_at(off, len) else {
            return self.append_copied_memory(mr, off, len);
        };
        let layout = MarkerLayout {
            until_marker: self.until_marker,
            fpdu_offset: self.fpdu_offset,
        };
        let want = layout.marked_len(len);
        let have = self.frame.contiguous_room(want);
        let (len, marked_len) = if have < want {
            let len = layout.payload_len(have);
            (len, layout.marked_len(len))
        } else {
            (len, want)
        };
        let Some(room) = self.frame.reserve(marked_len) else {
            return Ok(0);
        };
        let crc = self.with_crc.then_some(self.crc);
        let marker_at = |offset| layout.marker_at(offset);
        let gaps = layout.gaps();
        self.crc = gap_copy::read_with_gaps(region, region_off, len, room, gaps, marker_at, crc)
            .map_err(|_| BuildError::KeyDeregistered)?;
        self.fpdu_offset += marked_len;
        self.until_marker = layout.until_marker_after(len, marked_len);
        Ok(len)
    }

    /// Appends the first bytes of payload that the daemon has not mapped, using a system call.
    /// Returns the number of bytes.
    #[cold]
    fn append_copied_memory(
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

    #[inline]
    fn append_due_marker(&mut self) {
        if self.until_marker == 0 {
            self.append_unmarked(&marker::encode_marker(self.fpdu_offset));
            self.until_marker = marker::DATA_LEN;
            // A marker in front of the length field does not count.
            if self.fpdu_offset > 0 {
                self.fpdu_offset += MARKER_LEN;
            }
        }
    }

    /// Appends length field, DDP header and, if present, the following RDMAP header in one piece.
    #[inline]
    pub fn append_header(&mut self, header: &[u8]) {
        let mut bytes = [0; LEN_FIELD + MAX_HDR_LEN + ATOMIC_REQUEST_LEN];
        bytes[..LEN_FIELD].copy_from_slice(&self.ulpdu_len.to_be_bytes());
        bytes[LEN_FIELD..LEN_FIELD + header.len()].copy_from_slice(header);
        self.append_bytes(&bytes[..LEN_FIELD + header.len()]);
    }

    /// Appends length field and tagged header.
    #[inline]
    pub fn append_tagged_header(&mut self, opcode: RdmapOpcode, is_last: bool, stag: u32, to: u64) {
        let control = ControlOctets::new(opcode, is_last);
        let mut bytes = [0; LEN_FIELD + TAGGED_HDR_LEN];
        bytes[..LEN_FIELD].copy_from_slice(&self.ulpdu_len.to_be_bytes());
        bytes[LEN_FIELD..].copy_from_slice(&TaggedHeader { control, stag, to }.to_bytes());
        self.append_bytes(&bytes);
    }

    /// Appends length field and untagged header of a message on the queue of Sends.
    #[inline]
    pub fn append_untagged_header(
        &mut self,
        opcode: RdmapOpcode,
        is_last: bool,
        inv_stag: u32,
        msn: Msn,
        mo: u32,
    ) {
        let header = UntaggedHeader {
            control: ControlOctets::new(opcode, is_last),
            inv_stag,
            qn: QN_SEND,
            msn,
            mo,
        };
        let mut bytes = [0; LEN_FIELD + UNTAGGED_HDR_LEN];
        bytes[..LEN_FIELD].copy_from_slice(&self.ulpdu_len.to_be_bytes());
        bytes[LEN_FIELD..].copy_from_slice(&header.to_bytes());
        self.append_bytes(&bytes);
    }

    /// Appends a Read Request.
    pub fn append_read_request(&mut self, msn: Msn, header: &ReadRequestHeader) {
        self.append_short_message(RdmapOpcode::ReadRequest, msn, &header.to_bytes());
    }

    /// Appends a single-segment untagged message whose payload is an RDMAP header.
    pub fn append_short_message(&mut self, opcode: RdmapOpcode, msn: Msn, payload: &[u8]) {
        let header = UntaggedHeader {
            control: ControlOctets::new(opcode, true),
            inv_stag: 0,
            qn: opcode.queue_number().unwrap_or(QN_SEND),
            msn,
            mo: 0,
        };
        let mut bytes = [0; UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN];
        bytes[..UNTAGGED_HDR_LEN].copy_from_slice(&header.to_bytes());
        let len = UNTAGGED_HDR_LEN + payload.len();
        bytes[UNTAGGED_HDR_LEN..len].copy_from_slice(payload);
        self.append_header(&bytes[..len]);
    }

    /// Appends pad and CRC (RFC 5044 sections 4.1 and 4.4), and a marker between them if one is due.
    #[inline]
    pub fn finish(mut self) {
        if self.is_whole {
            return;
        }
        let pad_len = fpdu::pad_len(self.ulpdu_len);
        if MARKERS {
            if pad_len != 0 {
                self.append_bytes(&[0; MAX_PAD_LEN][..pad_len]);
            }
            self.append_due_marker();
        } else if pad_len != 0 {
            let mut bytes = [0; MAX_PAD_LEN + CRC_LEN];
            if self.with_crc {
                let crc = crc::crc32c_append(self.crc, &bytes[..pad_len]);
                bytes[pad_len..pad_len + CRC_LEN].copy_from_slice(&crc.to_le_bytes());
            }
            self.frame.append_bytes(&bytes[..pad_len + CRC_LEN]);
            return;
        }
        // Every full segment at the usual EMSS gets here directly.
        let crc = if self.with_crc { self.crc } else { 0 };
        self.frame.append_bytes(&crc.to_le_bytes());
    }
}
