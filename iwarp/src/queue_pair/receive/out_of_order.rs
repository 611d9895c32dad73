//! Placement of data that arrived beyond a gap in the stream (RFC 5041 section 5.2, RFC 5044 sections
//! 4.2 and 6): payload is placed in its memory on arrival, delivery stays in order.
//!
//! The worker passes a segment that TCP keeps behind a gap to [`QueuePair::receive_out_of_order`].
//! FPDUs that are valid and allowed to be placed are placed, and remembered by their position in the
//! stream. When [`QueuePair::receive_in_order`] reaches the same FPDU, it repeats every check and
//! skips only the copy. All other FPDUs wait for their turn: errors are found, reported and answered
//! in order.
//!
//! [`QueuePair::receive_out_of_order`]: crate::QueuePair::receive_out_of_order
//! [`QueuePair::receive_in_order`]: crate::QueuePair::receive_in_order

use super::receive_state::ReceiveState;
use crate::ddp::{
    ControlOctets, DDP_VERSION, QN_SEND, TAGGED_HDR_LEN, TaggedHeader, UntaggedHeader,
};
use crate::mpa::OutOfOrderPolicy;
use crate::mpa::fpdu::{FpduInfo, FpduSource, LEN_FIELD, PlainStream, UnmarkedStream};
use crate::mpa::marker::{self, MarkerPosition};
use crate::queue_pair::state::QpInitAttr;
use crate::rdmap::{RDMAP_VERSION, RdmapOpcode};
use crate::stream::{RxStream, StreamTail};
use siw_memory::{KeyReader, RegisteredMemory};
use siw_shm::Access;

/// A stream whose payload has already been placed: headers can be read, nothing is copied.
pub(super) struct AlreadyPlaced<'a, R>(pub &'a R);

impl<R: RxStream> RxStream for AlreadyPlaced<'_, R> {
    fn available(&self) -> usize {
        self.0.available()
    }
    fn peek(&self, offset: usize, out: &mut [u8]) {
        self.0.peek(offset, out);
    }
    fn for_each_slice(&self, _offset: usize, _len: usize, _visit: impl FnMut(&[u8])) {}
    fn copy_to_memory(
        &self,
        _offset: usize,
        _len: usize,
        _mr: &RegisteredMemory,
        _region_off: u64,
    ) -> bool {
        true
    }
    fn consume(&mut self, _len: usize) {}
}

impl ReceiveState {
    /// Places payload whose memory is already known: of Writes, of responses for which
    /// `wants_response` returns true (STag, TO, length), and of the Send being received. Returns
    /// whether it was placed.
    fn place_early(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        fpdu: &FpduInfo,
        wants_response: impl Fn(u32, u64, u32) -> bool,
    ) -> bool {
        let control = ControlOctets {
            ddp: fpdu.hdr[0],
            rdmap: fpdu.hdr[1],
        };
        let ulpdu_len = usize::from(fpdu.ulpdu_len);
        if ulpdu_len <= control.header_len()
            || control.ddp_version() != DDP_VERSION
            || control.rdmap_version() != RDMAP_VERSION
        {
            return false;
        }
        let len = (ulpdu_len - control.header_len()) as u32;
        let opcode = RdmapOpcode::from_wire(control.opcode());
        if !control.is_tagged() {
            let header = UntaggedHeader::parse(&fpdu.hdr);
            let open = &self.open;
            let continues_send =
                opcode.is_some_and(|opcode| opcode.is_send() && opcode as u8 == open.opcode);
            return continues_send
                && header.qn == QN_SEND
                && open.is_active
                && header.msn == self.expected_send_msn
                && header.mo >= open.received
                && header.mo <= open.capacity
                && len <= open.capacity - header.mo
                && self.scatter(keys, attr, rx, &header, len).is_ok();
        }
        let header = TaggedHeader::parse(&fpdu.hdr);
        let access = match opcode {
            Some(RdmapOpcode::Write) => Access::REMOTE_WRITE,
            Some(RdmapOpcode::ReadResponse) if wants_response(header.stag, header.to, len) => {
                Access::LOCAL_WRITE
            }
            _ => return false,
        };
        attr.check_key(keys, header.stag, header.to, len, access)
            .is_ok_and(|(mr, off)| {
                rx.copy_to_memory(LEN_FIELD + TAGGED_HDR_LEN, len as usize, mr, off)
            })
    }

    /// Places the Write `fpdu` at `position`, behind a message that waits for a receive work request.
    /// `false`: it has to wait for its turn.
    pub(super) fn place_write_ahead(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        fpdu: &FpduInfo,
        position: u64,
    ) -> bool {
        // A zero-length Write has nothing to place.
        if usize::from(fpdu.ulpdu_len) == TAGGED_HDR_LEN || self.out_of_order.is_placed(position) {
            return true;
        }
        let Some(index) = self.out_of_order.insertion_index(position) else {
            return false;
        };
        let is_placed = self.place_early(keys, attr, rx, fpdu, |_, _, _| false);
        if is_placed {
            self.out_of_order.insert(index, position, fpdu);
        }
        is_placed
    }

    /// Processes `held`, a segment that TCP keeps behind a gap, `offset` octets after the first octet
    /// that was not consumed. Places the FPDUs that may be placed and returns their number.
    /// `wants_response`: as in [`place_early`](Self::place_early).
    pub(super) fn place_segment_early(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        offset: usize,
        held: &impl RxStream,
        wants_response: impl Fn(u32, u64, u32) -> bool,
    ) -> u32 {
        let segment_position = self.marker_position.advanced_by(offset);
        let Some(mut start) = self.find_first_fpdu(held, segment_position) else {
            return 0;
        };
        let mut placed = 0;
        loop {
            let mut tail = StreamTail { rx: held, start };
            let position = self.out_of_order.position + (offset + start) as u64;
            let marker_position = segment_position.advanced_by(start);
            let outcome = if marker_position.has_markers() {
                let mut unmarked = UnmarkedStream::new(&mut tail, marker_position);
                self.place_next_early(keys, attr, &mut unmarked, position, &wants_response)
            } else {
                let mut plain = PlainStream(&mut tail);
                self.place_next_early(keys, attr, &mut plain, position, &wants_response)
            };
            let Some((stream_len, is_placed)) = outcome else {
                return placed;
            };
            placed += u32::from(is_placed);
            start += stream_len;
        }
    }

    /// Finds the start of the first FPDU of a segment, if it is certain.
    fn find_first_fpdu(
        &self,
        segment: &impl RxStream,
        marker_position: MarkerPosition,
    ) -> Option<usize> {
        match self.out_of_order.policy {
            OutOfOrderPolicy::Off => None,
            _ if marker_position.has_markers() => marker::find_first_fpdu(segment, marker_position),
            OutOfOrderPolicy::Aligned if !self.out_of_order.is_unaligned => Some(0),
            _ => None,
        }
    }

    /// Processes the FPDU at the start of `rx`, which lies at `position`. Returns its length in the
    /// stream and whether it was placed; `None` when no complete and valid FPDU starts there.
    fn place_next_early(
        &mut self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &mut impl FpduSource,
        position: u64,
        wants_response: impl Fn(u32, u64, u32) -> bool,
    ) -> Option<(usize, bool)> {
        let fpdu = rx.next_fpdu()?;
        rx.verify(&fpdu, true).ok()?;
        let mut is_placed = false;
        if let Some(index) = self.out_of_order.insertion_index(position) {
            is_placed = self.place_early(keys, attr, rx, &fpdu, wants_response);
            if is_placed {
                self.out_of_order.insert(index, position, &fpdu);
            }
        }
        rx.take(&fpdu);
        Some((fpdu.stream_len, is_placed))
    }
}
