//! Requester side of RDMA Read: sends Read Requests, receives Read Responses (RFC 5040 sections 4.4,
//! 4.5, 5.5).

use super::Requester;
use super::outstanding_read::{OutstandingRead, sink_stag};
use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN};
use crate::environment::QpEnv;
use crate::mpa::fpdu::LEN_FIELD;
use crate::queue_pair::error_mapping::tagged_buffer_code;
use crate::queue_pair::receive::SegmentError;
use crate::queue_pair::state::QpInitAttr;
use crate::queue_pair::transmitter::{FpduSegment, Transmitter};
use crate::rdmap::READ_REQUEST_LEN;
use crate::rdmap::terminate::TerminateCode;
use crate::record::{FpduKind, MessageSlot, OutgoingFpdu};
use crate::stream::RxStream;
use siw_memory::KeyError;
use siw_memory::key_table::Stag;
use siw_shm::{Access, Opcode, WcStatus};

impl Requester {
    /// Returns the Read Request for the next element of the data sink.
    pub(super) fn next_read_request(
        &mut self,
        tx: &mut Transmitter,
        slot: MessageSlot,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + READ_REQUEST_LEN) as u16;
        let wire_len = tx.fit(ulpdu_len, room)?;
        let entry = self.queue.get(slot)?;
        let offset = entry.sent;
        let (_, sink) = self.queue.read_sink(entry, offset);
        let entry = self.queue.get_mut(slot)?;
        if offset == 0 {
            entry.msn = self.next_read_msn.0;
        }
        self.next_read_msn = self.next_read_msn.next();
        entry.messages_sent += 1;
        entry.sent += sink.length;
        let is_last = entry.sent == entry.length;
        self.outstanding.push_back(OutstandingRead {
            slot: Some(slot),
            sink_stag: sink_stag(sink.lkey),
            sink_to: sink.addr,
            len: sink.length,
            placed: 0,
            is_last,
            atomic_id: None,
        });
        if is_last {
            self.current = None;
        }
        // Each Read Request is a separate message: responses may be sent between them.
        tx.end_bare_request(0);
        let segment = FpduSegment {
            kind: FpduKind::Request,
            is_last,
            ulpdu_len,
            slot,
            offset,
        };
        Some(tx.push_fpdu(segment, wire_len))
    }

    /// Handles an RDMA Read Response: it must continue the oldest outstanding Read (RFC 5040 sections
    /// 5.2.2 and 5.5, conformance 65 and 66). `Ok(true)`: a work request has its complete response.
    pub fn on_read_response<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        header: &TaggedHeader,
        len: u32,
    ) -> Result<bool, SegmentError> {
        let Some(read) = self.outstanding.front_mut() else {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        };
        if read.atomic_id.is_some() {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        }
        let slot = read.slot;
        let is_last_read = read.is_last;
        if let Some(code) = find_mismatch(read, header, len) {
            self.fail_request(slot, WcStatus::BAD_RESP_ERR);
            return Err(code.into());
        }
        if len > 0 {
            let placed = attr
                .check_key(env.keys(), header.stag, header.to, len, Access::LOCAL_WRITE)
                .and_then(|(mr, off)| {
                    let rest = read.len - read.placed - len;
                    prefetch_behind(mr, off, len, rest, read.placed == 0);
                    rx.copy_to_memory(LEN_FIELD + TAGGED_HDR_LEN, len as usize, mr, off)
                        .then_some(())
                        .ok_or(KeyError::Access)
                });
            if let Err(error) = placed {
                self.fail_request(slot, WcStatus::LOC_PROT_ERR);
                return Err(tagged_buffer_code(error).into());
            }
            read.placed += len;
        }
        if !header.control.is_last() {
            return Ok(false);
        }
        self.outstanding.pop_front();
        let Some(slot) = slot.filter(|_| is_last_read) else {
            return Ok(false);
        };
        let Some(entry) = self.queue.get_mut(slot) else {
            return Ok(false);
        };
        if entry.opcode == Opcode::ReadWithInv {
            return self.invalidate_sink(env, attr, slot);
        }
        entry.is_answered = true;
        Ok(true)
    }

    /// Invalidates the sink of READ_WITH_INV at its end. `Ok(false)`: other workers may still use the
    /// key.
    fn invalidate_sink<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        slot: MessageSlot,
    ) -> Result<bool, SegmentError> {
        let entry = self.queue.get(slot);
        let sink = entry.and_then(|entry| self.queue.sges(entry).first());
        let key = Stag(sink.map_or(0, |sge| sge.lkey));
        if env.keys().invalidate_key(key, attr.pd, attr.qpn).is_err() {
            self.fail_request(Some(slot), WcStatus::LOC_PROT_ERR);
            return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
        }
        let grace_period = env.keys().begin_grace_period();
        if !env.keys().has_elapsed_for_others(grace_period) {
            self.invalidated_reads.push_back((grace_period, slot));
            env.await_quiescence();
            return Ok(false);
        }
        if let Some(entry) = self.queue.get_mut(slot) {
            entry.is_answered = true;
        }
        Ok(true)
    }
}

/// Finds a difference between a Read Response and the outstanding Read: another STag, another
/// position, excess bytes, or an end that is too early or too late. The response to a zero-length
/// Read is not compared (PROTOCOL.md section 8.4).
#[inline]
fn find_mismatch(read: &OutstandingRead, header: &TaggedHeader, len: u32) -> Option<TerminateCode> {
    let is_last = header.control.is_last();
    if len == 0 && read.len == 0 && is_last {
        return None;
    }
    let missing = read.len - read.placed;
    if header.stag != read.sink_stag {
        Some(TerminateCode::DDP_STAG)
    } else if header.to != read.sink_to.wrapping_add(u64::from(read.placed))
        || len > missing
        || is_last != (len == missing)
    {
        Some(TerminateCode::DDP_BOUNDS)
    } else {
        None
    }
}
