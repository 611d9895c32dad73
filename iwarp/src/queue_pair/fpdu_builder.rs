//! From a record to the bytes of its FPDU; again, and identically, at each retransmission.
//!
//! TCP's transmit path calls it through [`QueuePair::build_fpdu`] with a builder over packet buffers.

use crate::ddp::{
    ControlOctets, MAX_HDR_LEN, Msn, QN_SEND, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN,
    UntaggedHeader,
};
use crate::environment::{ExtBufRef, FpduKind, FpduRecord, FrameBuilder};
use crate::mpa::RtrKind;
use crate::mpa::fpdu::{self, CRC_LEN, LEN_FIELD};
use crate::mpa::marker::{self, MARKER_LEN, MarkerLayout};
use crate::queue_pair::immediate;
use crate::queue_pair::requester::{DUMMY_STAG, sink_stag};
use crate::queue_pair::send_queue::Entry;
use crate::queue_pair::{BuildError, QueuePair};
use crate::rdmap::atomic_header::{
    ATOMIC_REQUEST_LEN, AtomicOp, AtomicRequestHeader, AtomicResponseHeader,
};
use crate::rdmap::terminate::TerminatePayload;
use crate::rdmap::{RdmapOpcode, ReadRequestHeader};
use siw_memory::key_table::Stag;
use siw_memory::{KeyReader, RegisteredMemory, crc, gap_copy};
use siw_shm::{Access, Opcode};

impl QueuePair {
    /// Makes the whole FPDU: header, payload, pad, CRC. Checks the memory key again.
    #[inline]
    pub fn build_fpdu(
        &self,
        keys: &KeyReader,
        rec: &FpduRecord,
        out: &mut impl FrameBuilder,
    ) -> Result<(), BuildError> {
        if rec.marker_position.has_markers() {
            self.build_kind(keys, rec, Build::<_, true>::new(self.crc, rec, out))
        } else {
            self.build_kind(keys, rec, Build::<_, false>::new(self.crc, rec, out))
        }
    }

    #[inline]
    fn build_kind<B: FrameBuilder, const MARKERS: bool>(
        &self,
        keys: &KeyReader,
        rec: &FpduRecord,
        mut f: Build<'_, B, MARKERS>,
    ) -> Result<(), BuildError> {
        match rec.kind {
            FpduKind::Request => {
                let e = self.sq.get(rec.slot).ok_or(BuildError::MessageCompleted)?;
                self.build_request(keys, rec, e, &mut f)?;
            }
            FpduKind::Immediate => {
                let e = self.sq.get(rec.slot).ok_or(BuildError::MessageCompleted)?;
                let (op, payload) = immediate::message(e);
                f.untagged(op, true, 0, Msn(e.msn), 0);
                f.append_bytes(&payload);
            }
            FpduKind::Response => {
                let r = self
                    .inbound
                    .get(rec.slot)
                    .ok_or(BuildError::MessageCompleted)?;
                if let Some(a) = r.atomic {
                    let response = AtomicResponseHeader {
                        id: a.req.id,
                        original: a.original,
                    };
                    f.message(RdmapOpcode::AtomicResponse, a.msn, &response.to_bytes());
                    f.finish();
                    return Ok(());
                }
                let to = r.req.sink_to.wrapping_add(u64::from(rec.offset));
                f.tagged(RdmapOpcode::ReadResponse, rec.is_last, r.req.sink_stag, to);
                let n = u32::from(rec.ulpdu_len) - TAGGED_HDR_LEN as u32;
                let from = r.req.src_to.wrapping_add(u64::from(rec.offset));
                let need = Access::REMOTE_READ;
                self.memory(keys, r.req.src_stag, from, n, need, r.owner, &mut f)?;
            }
            FpduKind::Rtr => match self.rtr.ok_or(BuildError::MessageCompleted)? {
                RtrKind::Write => f.tagged(RdmapOpcode::Write, true, DUMMY_STAG, 0),
                RtrKind::Send => f.untagged(RdmapOpcode::Send, true, 0, self.first_msn, 0),
                RtrKind::Read => f.read_request(
                    self.first_msn,
                    &ReadRequestHeader {
                        sink_stag: DUMMY_STAG,
                        src_stag: DUMMY_STAG,
                        ..ReadRequestHeader::default()
                    },
                ),
            },
            FpduKind::Terminate => {
                let o = self.outgoing.as_ref().ok_or(BuildError::MessageCompleted)?;
                f.header(&TerminatePayload::header().to_bytes());
                f.append_bytes(o.payload.as_bytes());
            }
        }
        f.finish();
        Ok(())
    }

    #[inline]
    fn build_request<B: FrameBuilder, const MARKERS: bool>(
        &self,
        keys: &KeyReader,
        rec: &FpduRecord,
        e: &Entry,
        f: &mut Build<'_, B, MARKERS>,
    ) -> Result<(), BuildError> {
        let hdr = match e.opcode {
            Opcode::Write | Opcode::WriteWithImm => {
                let to = e.remote_addr.wrapping_add(u64::from(rec.offset));
                f.tagged(RdmapOpcode::Write, rec.is_last, e.rkey, to);
                TAGGED_HDR_LEN
            }
            Opcode::Read | Opcode::ReadWithInv => {
                let (nth, sink) = self.sq.read_sink(e, rec.offset);
                f.read_request(
                    Msn(e.msn.wrapping_add(nth)),
                    &ReadRequestHeader {
                        sink_stag: sink_stag(sink.lkey),
                        sink_to: sink.addr,
                        size: sink.length,
                        src_stag: e.rkey,
                        src_to: e.remote_addr.wrapping_add(u64::from(rec.offset)),
                    },
                );
                return Ok(());
            }
            Opcode::FetchAdd | Opcode::CmpSwap => {
                let req = AtomicRequestHeader {
                    op: if e.opcode == Opcode::FetchAdd {
                        AtomicOp::FetchAdd
                    } else {
                        AtomicOp::CmpSwap
                    },
                    id: e.msn,
                    stag: e.rkey,
                    to: e.remote_addr,
                    args: self.sq.atomic_args(e).ok_or(BuildError::MessageCompleted)?,
                };
                f.message(RdmapOpcode::AtomicRequest, Msn(e.msn), &req.to_bytes());
                return Ok(());
            }
            op => {
                let kind = match (op == Opcode::SendWithInv, e.is_solicited()) {
                    (false, false) => RdmapOpcode::Send,
                    (false, true) => RdmapOpcode::SendSe,
                    (true, false) => RdmapOpcode::SendInv,
                    (true, true) => RdmapOpcode::SendSeInv,
                };
                let inv_stag = if op == Opcode::SendWithInv { e.imm } else { 0 };
                let msn = immediate::send_msn(e);
                f.untagged(kind, rec.is_last, inv_stag, msn, rec.offset);
                UNTAGGED_HDR_LEN
            }
        };
        let len = u32::from(rec.ulpdu_len) - hdr as u32;
        if e.is_inline() {
            let at = rec.offset as usize;
            let d = self.sq.inline(e);
            f.append_bytes(
                d.get(at..at + len as usize)
                    .ok_or(BuildError::MessageCompleted)?,
            );
            return Ok(());
        }
        let (mut skip, mut left) = (rec.offset, len);
        for s in self.sq.sges(e) {
            if left == 0 {
                break;
            }
            if skip >= s.length {
                skip -= s.length;
                continue;
            }
            let n = left.min(s.length - skip);
            let from = s.addr.wrapping_add(u64::from(skip));
            self.memory(keys, s.lkey, from, n, Access::NONE, e.owner, f)?;
            left -= n;
            skip = 0;
        }
        Ok(())
    }

    #[inline]
    #[allow(clippy::too_many_arguments)]
    fn memory<B: FrameBuilder, const MARKERS: bool>(
        &self,
        keys: &KeyReader,
        stag: u32,
        addr: u64,
        len: u32,
        need: Access,
        owner: ExtBufRef,
        f: &mut Build<'_, B, MARKERS>,
    ) -> Result<(), BuildError> {
        if len == 0 {
            return Ok(());
        }
        let (mr, off) = keys
            .check_access(Stag(stag), addr, len, need, self.attr.pd, self.attr.qpn)
            .map_err(|_| BuildError::KeyDeregistered)?;
        // The next FPDU of the message is built right after this one.
        mr.prefetch_at(off + u64::from(len), len as usize);
        f.memory(mr, off, len, owner)
    }
}

/// One FPDU in the making; without markers it costs nothing that it could have some.
struct Build<'a, B, const MARKERS: bool> {
    out: &'a mut B,
    len: u16,
    crc: bool,
    sum: u32,
    /// Octets to the next marker.
    until: usize,
    /// Octets since the start of the length field.
    done: usize,
}

impl<'a, B: FrameBuilder, const MARKERS: bool> Build<'a, B, MARKERS> {
    #[inline]
    fn new(crc: bool, rec: &FpduRecord, out: &'a mut B) -> Self {
        Self {
            out,
            len: rec.ulpdu_len,
            crc,
            sum: 0,
            until: rec.marker_position.until_marker(),
            done: 0,
        }
    }

    #[inline]
    fn append_bytes(&mut self, b: &[u8]) {
        if !MARKERS {
            return self.plain(b);
        }
        // A header is seldom cut by a marker.
        if b.len() <= self.until {
            self.until -= b.len();
            self.done += b.len();
            return self.plain(b);
        }
        let mut rest = b;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.stretch(rest.len()));
            self.plain(now);
            rest = later;
        }
    }

    #[inline]
    fn plain(&mut self, b: &[u8]) {
        if self.crc {
            self.sum = crc::crc32c_append(self.sum, b);
        }
        self.out.append_bytes(b);
    }

    #[inline]
    fn memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
        owner: ExtBufRef,
    ) -> Result<(), BuildError> {
        if !MARKERS {
            return self.plain_memory(mr, off, len, owner);
        }
        let (mut off, mut left) = (off, len as usize);
        while left > 0 {
            let n = self.marked_memory(mr, off, left)?;
            if n == 0 {
                // The builder drops the frame.
                return Ok(());
            }
            off += n as u64;
            left -= n;
        }
        Ok(())
    }

    /// Copies as much of the payload as lies in one piece and has room in one piece, markers and
    /// all; how much that is. What markers leave in one piece is too short for a reference.
    #[inline]
    fn marked_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: usize,
    ) -> Result<usize, BuildError> {
        let (region, at, len) = mr
            .piece_at(off, len)
            .map_err(|_| BuildError::KeyDeregistered)?;
        let layout = MarkerLayout {
            until_marker: self.until,
            fpdu_offset: self.done,
        };
        let want = layout.marked_len(len);
        let have = self.out.contiguous_room(want);
        let (n, marked_len) = if have < want {
            let n = layout.payload_len(have);
            (n, layout.marked_len(n))
        } else {
            (len, want)
        };
        let Some(room) = self.out.reserve(marked_len) else {
            return Ok(0);
        };
        let crc = self.crc.then_some(self.sum);
        let marker_at = |offset| layout.marker_at(offset);
        let gaps = layout.gaps();
        self.sum = gap_copy::read_with_gaps(region, at, n, room, gaps, marker_at, crc)
            .map_err(|_| BuildError::KeyDeregistered)?;
        self.done += marked_len;
        self.until = layout.until_marker_after(n, marked_len);
        Ok(n)
    }

    #[inline]
    fn plain_memory(
        &mut self,
        mr: &RegisteredMemory,
        off: u64,
        len: u32,
        owner: ExtBufRef,
    ) -> Result<(), BuildError> {
        if self.crc {
            self.sum = mr
                .crc32c_append_at(off, len as usize, self.sum)
                .map_err(|_| BuildError::KeyDeregistered)?;
        }
        self.out.append_memory(mr, off, len, owner);
        Ok(())
    }

    /// Puts a marker where one is due; how many of the next `want` octets may follow it.
    #[inline]
    fn stretch(&mut self, want: usize) -> usize {
        self.marker();
        let n = want.min(self.until);
        self.until -= n;
        self.done += n;
        n
    }

    #[inline]
    fn marker(&mut self) {
        if self.until == 0 {
            self.plain(&marker::encode_marker(self.done));
            self.until = marker::INTERVAL - MARKER_LEN;
            // In front of the length field, it does not count.
            if self.done > 0 {
                self.done += MARKER_LEN;
            }
        }
    }

    /// Length field and DDP header in one piece.
    #[inline]
    fn header(&mut self, hdr: &[u8]) {
        let mut b = [0; LEN_FIELD + MAX_HDR_LEN + ATOMIC_REQUEST_LEN];
        b[..LEN_FIELD].copy_from_slice(&self.len.to_be_bytes());
        b[LEN_FIELD..LEN_FIELD + hdr.len()].copy_from_slice(hdr);
        self.append_bytes(&b[..LEN_FIELD + hdr.len()]);
    }

    #[inline]
    fn tagged(&mut self, op: RdmapOpcode, last: bool, stag: u32, to: u64) {
        let control = ControlOctets::new(op, last);
        let mut b = [0; LEN_FIELD + TAGGED_HDR_LEN];
        b[..LEN_FIELD].copy_from_slice(&self.len.to_be_bytes());
        b[LEN_FIELD..].copy_from_slice(&TaggedHeader { control, stag, to }.to_bytes());
        self.append_bytes(&b);
    }

    #[inline]
    fn untagged(&mut self, op: RdmapOpcode, last: bool, inv_stag: u32, msn: Msn, mo: u32) {
        let h = UntaggedHeader {
            control: ControlOctets::new(op, last),
            inv_stag,
            qn: QN_SEND,
            msn,
            mo,
        };
        let mut b = [0; LEN_FIELD + UNTAGGED_HDR_LEN];
        b[..LEN_FIELD].copy_from_slice(&self.len.to_be_bytes());
        b[LEN_FIELD..].copy_from_slice(&h.to_bytes());
        self.append_bytes(&b);
    }

    fn read_request(&mut self, msn: Msn, r: &ReadRequestHeader) {
        self.message(RdmapOpcode::ReadRequest, msn, &r.to_bytes());
    }

    /// An untagged message of one segment whose payload is a header of RDMAP.
    fn message(&mut self, op: RdmapOpcode, msn: Msn, payload: &[u8]) {
        let h = UntaggedHeader {
            control: ControlOctets::new(op, true),
            inv_stag: 0,
            qn: op.queue().unwrap_or(0),
            msn,
            mo: 0,
        };
        let mut b = [0; UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN];
        b[..UNTAGGED_HDR_LEN].copy_from_slice(&h.to_bytes());
        let n = UNTAGGED_HDR_LEN + payload.len();
        b[UNTAGGED_HDR_LEN..n].copy_from_slice(payload);
        self.header(&b[..n]);
    }

    /// Pad and CRC (RFC 5044 section 4.3 and 4.4).
    #[inline]
    fn finish(&mut self) {
        let pad = fpdu::pad_len(self.len);
        if MARKERS {
            if pad != 0 {
                self.append_bytes(&[0; 3][..pad]);
            }
            self.marker();
        } else if pad != 0 {
            let mut b = [0; 3 + CRC_LEN];
            if self.crc {
                let sum = crc::crc32c_append(self.sum, &b[..pad]);
                b[pad..pad + CRC_LEN].copy_from_slice(&sum.to_le_bytes());
            }
            self.out.append_bytes(&b[..pad + CRC_LEN]);
            return;
        }
        // Every full segment at the usual EMSS comes here directly.
        let sum = if self.crc { self.sum } else { 0 };
        self.out.append_bytes(&sum.to_le_bytes());
    }
}
