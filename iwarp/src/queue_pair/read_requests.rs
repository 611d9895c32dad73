//! RDMA Read as its requester: Read Requests out, Read Responses in (RFC 5040 sections 4.4, 4.5, 5.5).

use crate::ddp::placement::place;
use crate::ddp::{TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN};
use crate::environment::{FpduKind, QpEnv};
use crate::mpa::fpdu::{self, LEN_FIELD};
use crate::queue_pair::QueuePair;
use crate::queue_pair::error_mapping::tagged;
use crate::queue_pair::read_queue::Outbound;
use crate::queue_pair::receive::Fault;
use crate::queue_pair::requester::{OutgoingFpdu, sink_stag};
use crate::rdmap::READ_REQUEST_LEN;
use crate::rdmap::terminate::TerminateCode;
use crate::stream::RxStream;
use siw_memory::KeyError;
use siw_memory::key_table::Stag;
use siw_shm::{Access, Opcode, WcStatus};

impl QueuePair {
    /// The Read Request for the next element of the data sink.
    pub(crate) fn read_record(&mut self, slot: u32, room: usize) -> Option<OutgoingFpdu> {
        let ulpdu_len = (UNTAGGED_HDR_LEN + READ_REQUEST_LEN) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        let e = self.sq.get(slot)?;
        let offset = e.sent;
        let (_, sink) = self.sq.read_sink(e, offset);
        let e = self.sq.get_mut(slot)?;
        if offset == 0 {
            e.msn = self.read_msn.0;
        }
        self.read_msn = self.read_msn.next();
        e.parts += 1;
        e.sent += sink.length;
        let last = e.sent == e.length;
        self.outbound.push_back(Outbound {
            slot: Some(slot),
            sink_stag: sink_stag(sink.lkey),
            sink_to: sink.addr,
            len: sink.length,
            placed: 0,
            last,
            atomic: None,
        });
        if last {
            self.cur = None;
        }
        // Each Read Request is a message of its own: responses may go between them.
        self.prefer_response = true;
        self.record(FpduKind::Request, last, ulpdu_len, slot, offset, wire)
    }

    /// RDMA Read Response: must continue the oldest outstanding read, nothing else (RFC 5040
    /// section 5.5, conformance 65 and 66).
    pub(crate) fn read_response<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        h: &TaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        let Some(r) = self.outbound.front_mut().filter(|r| r.atomic.is_none()) else {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        };
        let slot = r.slot;
        let whole = r.last;
        let last = h.control.is_last();
        let mut mismatch = None;
        let empty = len == 0 && r.len == 0 && last;
        if !empty {
            if h.stag != r.sink_stag {
                mismatch = Some(TerminateCode::DDP_STAG);
            } else if h.to != r.sink_to.wrapping_add(u64::from(r.placed))
                || len > r.len - r.placed
                || last != (len == r.len - r.placed)
            {
                mismatch = Some(TerminateCode::DDP_BOUNDS);
            }
        }
        if let Some(code) = mismatch {
            self.fail_request(slot, WcStatus::BAD_RESP_ERR);
            return Err(code.into());
        }
        if len > 0 {
            let placed = env
                .keys()
                .check_access(
                    Stag(h.stag),
                    h.to,
                    len,
                    Access::LOCAL_WRITE,
                    self.attr.pd,
                    self.attr.qpn,
                )
                .and_then(|(mr, off)| {
                    place(rx, LEN_FIELD + TAGGED_HDR_LEN, len as usize, mr, off)
                        .map_err(|_| KeyError::Access)
                });
            if let Err(e) = placed {
                self.fail_request(slot, WcStatus::LOC_PROT_ERR);
                return Err(tagged(e).into());
            }
            r.placed += len;
        }
        if last {
            self.outbound.pop_front();
            if whole && let Some(e) = slot.and_then(|s| self.sq.get_mut(s)) {
                e.answered = true;
                if e.opcode == Opcode::ReadWithInv {
                    return self.invalidate_sink(env, slot);
                }
                self.complete_ready(env);
            }
        }
        Ok(())
    }

    /// The end of READ_WITH_INV.
    fn invalidate_sink<E: QpEnv>(&mut self, env: &mut E, slot: Option<u32>) -> Result<(), Fault> {
        let e = slot.and_then(|s| self.sq.get(s));
        let key = e
            .and_then(|e| self.sq.sges(e).first())
            .map_or(0, |s| s.lkey);
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        if env.keys().invalidate_key(Stag(key), pd, qpn).is_err() {
            self.fail_request(slot, WcStatus::LOC_PROT_ERR);
            return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
        }
        self.complete_ready(env);
        Ok(())
    }

    pub(crate) fn fail_request(&mut self, slot: Option<u32>, status: WcStatus) {
        if let Some(e) = slot.and_then(|s| self.sq.get_mut(s)) {
            e.status = status;
        }
    }
}
