//! RDMA Read as its responder: Read Requests in, Read Responses out (RFC 5040 sections 4.4, 4.5, 5.5).

use crate::ddp::{TAGGED_HDR_LEN, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::{ExtBufRef, FpduKind, QpEnv};
use crate::mpa::fpdu::{self, LEN_FIELD};
use crate::queue_pair::error_mapping::read_source;
use crate::queue_pair::read_queue::Inbound;
use crate::queue_pair::receive::Fault;
use crate::queue_pair::requester::OutgoingFpdu;
use crate::queue_pair::{InMessage, QueuePair, RdmapState};
use crate::rdmap::terminate::TerminateCode;
use crate::rdmap::{READ_REQUEST_LEN, ReadRequestHeader};
use crate::stream::RxStream;
use siw_memory::key_table::Stag;
use siw_shm::Access;

impl QueuePair {
    /// RDMA Read Request (RFC 5040 section 4.4).
    pub(crate) fn read_request<E: QpEnv>(
        &mut self,
        rx: &impl RxStream,
        env: &mut E,
        h: &UntaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        if h.msn != self.rx_read_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        if h.mo != 0 {
            return Err(TerminateCode::DDP_MO.into());
        }
        if len as usize != READ_REQUEST_LEN || !h.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED.into());
        }
        if self.inbound.unsent() >= usize::from(self.ird) {
            return Err(TerminateCode::DDP_NO_BUFFER.into());
        }
        let mut b = [0; READ_REQUEST_LEN];
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut b);
        let req = ReadRequestHeader::parse(&b);
        if req.size > 0 {
            env.keys()
                .check_access(
                    Stag(req.src_stag),
                    req.src_to,
                    req.size,
                    Access::REMOTE_READ,
                    self.attr.pd,
                    self.attr.qpn,
                )
                .map_err(|e| Fault {
                    code: read_source(e),
                    read: Some(req),
                })?;
        }
        self.rx_read_msn = self.rx_read_msn.next();
        if self.state == RdmapState::Rts {
            self.inbound.push(Inbound {
                req,
                atomic: None,
                msn: h.msn,
                sent: 0,
                owner: ExtBufRef::NONE,
                acked: false,
            });
        }
        Ok(())
    }

    pub(crate) fn response_record<E: QpEnv>(
        &mut self,
        env: &mut E,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let max = u32::from(self.mulpdu) - TAGGED_HDR_LEN as u32;
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        let (slot, r) = self.inbound.current()?;
        if r.atomic.is_some() {
            return self.atomic_response_record(env, room);
        }
        let n = (r.req.size - r.sent).min(max);
        let ulpdu_len = (TAGGED_HDR_LEN as u32 + n) as u16;
        let wire = self
            .tx_marker_position
            .marked_len(fpdu::wire_len(ulpdu_len));
        if wire > room {
            return None;
        }
        if n > 0 {
            // The key may have gone since the request was accepted.
            let to = r.req.src_to.wrapping_add(u64::from(r.sent));
            if let Err(e) =
                env.keys()
                    .check_access(Stag(r.req.src_stag), to, n, Access::REMOTE_READ, pd, qpn)
            {
                let offender = r.offender();
                self.fault(env, read_source(e), Some(&offender));
                return None;
            }
            if r.sent == 0 {
                r.owner = env.alloc_ext_buf_ref(r.req.size);
            }
        }
        let offset = r.sent;
        r.sent += n;
        let last = r.sent == r.req.size;
        if last {
            self.inbound.finish_current();
            self.in_message = InMessage::None;
            self.prefer_response = false;
        } else {
            self.in_message = InMessage::Response;
        }
        self.record(FpduKind::Response, last, ulpdu_len, slot, offset, wire)
    }
}
