//! Fast path for consecutive RDMA Writes in a piece of the stream, the usual content of a stream.
//!
//! Why it is fast: conditions that cannot change within a run of Writes are tested once for all of
//! them, and the key of the previous Write is not looked up again.

use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{ControlOctets, TAGGED_HDR_LEN, TaggedHeader};
use crate::mpa::fpdu::{self, HEAD_LEN, LEN_FIELD};
use crate::queue_pair::QueuePair;
use crate::queue_pair::state::ReceiveProgress;
use siw_memory::KeyReader;
use siw_memory::key_table::LastKey;
use siw_shm::Access;

impl QueuePair {
    /// Places the Writes at the start of `piece`, up to an FPDU that is of another kind, incomplete
    /// or invalid. That FPDU is left to the general path.
    #[inline]
    pub(super) fn place_writes(&mut self, keys: &KeyReader, piece: &[u8]) -> ReceiveProgress {
        let mut progress = ReceiveProgress::default();
        let is_usual = self.is_receiving()
            && self.receive.has_first_fpdu
            && self.receive.out_of_order.is_empty()
            && !self.receive.out_of_order.is_watching_alignment();
        if !is_usual {
            return progress;
        }
        let receive = &mut self.receive;
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
            let payload_at = LEN_FIELD + TAGGED_HDR_LEN;
            let payload_end = LEN_FIELD + usize::from(ulpdu_len);
            if !control.is_write() || payload_end <= payload_at || wire_len > rest.len() {
                break;
            }
            let (octets, behind) = rest.split_at(wire_len);
            if self.crc && !fpdu::is_crc_right(octets) {
                break;
            }
            let payload = &octets[payload_at..payload_end];
            let len = payload.len() as u32;
            let header = TaggedHeader::parse(&hdr);
            let range = (header.stag, header.to, len);
            let checked =
                self.attr
                    .check_key_with(keys, &mut last_key, range, Access::REMOTE_WRITE);
            let Ok((mr, off)) = checked else {
                break;
            };
            let is_first = !receive.is_write_open;
            let is_last = header.control.is_last();
            if !is_last {
                // The header does not tell the length of the message.
                prefetch_behind(mr, off, len, u32::MAX, is_first);
            }
            if mr.write_at(off, payload).is_err() {
                break;
            }
            let before = if is_first { 0 } else { receive.write_len };
            receive.write_len = before.wrapping_add(len);
            receive.is_write_open = !is_last;
            progress.fpdus += 1;
            rest = behind;
        }
        progress.bytes = piece.len() - rest.len();
        receive.out_of_order.position += progress.bytes as u64;
        progress
    }
}
