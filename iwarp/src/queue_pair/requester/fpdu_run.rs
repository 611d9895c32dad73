//! Bulk processing of requests: single-FPDU messages, and the full segments of a long message, become
//! one record.
//!
//! Why it is fast: their common properties are looked up, checked and recorded once. TCP keeps one
//! record for them, divides it among segments, and passes each part back to be built and acknowledged
//! as a whole.

use super::Requester;
use crate::ddp::{TAGGED_HDR_LEN, UNTAGGED_HDR_LEN};
use crate::environment::QpEnv;
use crate::mpa::fpdu;
use crate::queue_pair::state::{DrainState, QpInitAttr};
use crate::queue_pair::transmitter::{FpduSegment, Transmitter};
use crate::record::{FpduKind, FpduRun, MessageSlot};
use siw_shm::{Access, Opcode, WrFlags};

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
        let is_alone = len == 0 || len > u32::from(tx.mulpdu) - hdr_len || !env.copies_payload(len);
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

    /// The `count` single-FPDU messages from `slot` on are acknowledged.
    #[inline]
    pub fn on_messages_acked(&mut self, slot: MessageSlot, count: u16) {
        for entry in self.queue.range_mut(slot, count.into()) {
            entry.is_acked = true;
        }
    }
}
