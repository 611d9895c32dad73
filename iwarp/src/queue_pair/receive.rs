//! The receiving half of a queue pair: FPDU by FPDU, checks, placement, delivery.
//!
//! Order of the checks: MPA (CRC, length), DDP (version, queue, buffer), RDMAP (version, opcode,
//! rights). The first that fails names the Terminate code.

use crate::ddp::placement::place;
use crate::ddp::{
    ControlOctets, DDP_VERSION, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::QpEnv;
use crate::mpa::fpdu::{Frame, LEN_FIELD};
use crate::mpa::marker::{FpduSource, Plain, Unmarked};
use crate::queue_pair::error_mapping::tagged;
use crate::queue_pair::out_of_order::Done;
use crate::queue_pair::{QueuePair, RdmapState, ReceiveProgress};
use crate::rdmap::terminate::{OffendingSegment, TerminateCode};
use crate::rdmap::{RDMAP_VERSION, RdmapOpcode, ReadRequestHeader};
use crate::stream::RxStream;
use siw_memory::KeyError;
use siw_memory::key_table::Stag;
use siw_shm::{Access, WcFlags, WcStatus};

/// UntaggedHeader queues of RFC 5040 and RFC 7306.
const QUEUES: u32 = 4;

/// Why a segment ends the stream.
pub(crate) struct Fault {
    pub code: TerminateCode,
    /// The offender is this Read Request.
    pub read: Option<ReadRequestHeader>,
}

impl From<TerminateCode> for Fault {
    fn from(code: TerminateCode) -> Self {
        Self { code, read: None }
    }
}

/// In how many pieces the first `len` octets lie.
fn pieces(rx: &impl RxStream, len: usize) -> u32 {
    let mut n = 0;
    rx.for_each_slice(0, len, |_| n += 1);
    n
}

impl QueuePair {
    /// Consumes every FPDU that is complete in `rx`: checks, places, completes, queues responses;
    /// stops at an incomplete one. On a protocol error it queues the Terminate; from then on it
    /// discards what comes, so that the peer's FIN is reached.
    ///
    /// Call it before [`on_record_acked`](Self::on_record_acked) for the acknowledgement of the same segment: a
    /// Terminate then still finds the work request that it is about.
    pub fn receive_in_order<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl RxStream,
    ) -> ReceiveProgress {
        let mut p = if self.rx_marker_position.has_markers() {
            let mut rx = Unmarked::new(rx, self.rx_marker_position);
            let p = self.fpdus(env, &mut rx);
            self.rx_marker_position = rx.marker_position;
            p
        } else {
            self.fpdus(env, &mut Plain(&mut *rx))
        };
        self.early.position += p.bytes as u64;
        if matches!(self.state, RdmapState::Terminate | RdmapState::Error) {
            let n = rx.available();
            rx.consume(n);
            p.bytes += n;
        }
        p.has_output = self.has_output();
        p
    }

    #[inline]
    fn fpdus<E: QpEnv>(&mut self, env: &mut E, rx: &mut impl FpduSource) -> ReceiveProgress {
        let mut p = ReceiveProgress::default();
        while matches!(self.state, RdmapState::Rts | RdmapState::Closing) {
            let Some(f) = rx.next_fpdu() else { break };
            if let Err(code) = rx.verify(&f, self.crc) {
                self.fault(env, code, None);
                break;
            }
            if self.early.watches() && pieces(rx, f.wire_len) > 1 {
                self.early.unaligned = true;
            }
            let at = self.early.position + p.bytes as u64;
            let result = if !self.early.is_empty() && self.early.take(at, &f) {
                self.segment(env, &Done(rx), &f)
            } else {
                self.segment(env, rx, &f)
            };
            p.fpdus += 1;
            rx.take(&f);
            p.bytes += f.stream_len;
            if !self.first_seen {
                self.first_seen = true;
                self.may_send = true;
                p.first_fpdu = true;
            }
            if let Err(fault) = result {
                let by = OffendingSegment {
                    ulpdu_len: f.ulpdu_len,
                    hdr: f.hdr,
                    read: fault.read,
                };
                self.fault(env, fault.code, Some(&by));
            }
        }
        p
    }

    #[inline]
    fn segment<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        f: &Frame,
    ) -> Result<(), Fault> {
        let c = ControlOctets {
            ddp: f.hdr[0],
            rdmap: f.hdr[1],
        };
        let len = usize::from(f.ulpdu_len);
        if len < 2 || len < c.header_len() {
            return Err(TerminateCode::MPA_LENGTH.into());
        }
        if c.is_tagged() {
            if c.ddp_version() != DDP_VERSION {
                return Err(TerminateCode::DDP_TAGGED_VERSION.into());
            }
            let h = TaggedHeader::parse(&f.hdr);
            let n = (len - TAGGED_HDR_LEN) as u32;
            match self.opcode(c)? {
                RdmapOpcode::Write => self.write(env, rx, &h, n),
                RdmapOpcode::ReadResponse => self.read_response(env, rx, &h, n),
                _ => Err(TerminateCode::RDMAP_OPCODE.into()),
            }
        } else {
            if c.ddp_version() != DDP_VERSION {
                return Err(TerminateCode::DDP_UNTAGGED_VERSION.into());
            }
            let h = UntaggedHeader::parse(&f.hdr);
            if h.qn >= QUEUES {
                return Err(TerminateCode::DDP_QN.into());
            }
            let n = (len - UNTAGGED_HDR_LEN) as u32;
            let op = self.opcode(c)?;
            match op.queue() {
                None => return Err(TerminateCode::RDMAP_OPCODE.into()),
                Some(q) if q != h.qn => return Err(TerminateCode::DDP_QN.into()),
                Some(_) => {}
            }
            match op {
                RdmapOpcode::ReadRequest => self.read_request(rx, env, &h, n),
                RdmapOpcode::AtomicRequest => self.atomic_request(rx, env, &h, n),
                RdmapOpcode::AtomicResponse => self.atomic_response(rx, env, &h, n),
                RdmapOpcode::Immediate | RdmapOpcode::ImmediateSe => {
                    self.immediate(env, rx, op, &h, n)
                }
                RdmapOpcode::Terminate => {
                    self.terminate_arrived(env, rx, &h, n);
                    Ok(())
                }
                _ => self.send(env, rx, op, &h, n),
            }
        }
    }

    #[inline]
    fn opcode(&self, c: ControlOctets) -> Result<RdmapOpcode, Fault> {
        if c.rdmap_version() != RDMAP_VERSION {
            return Err(TerminateCode::RDMAP_VERSION.into());
        }
        RdmapOpcode::from_wire(c.opcode()).ok_or(TerminateCode::RDMAP_OPCODE.into())
    }

    /// RDMA Write. Each segment stands for itself: a gap in TO is legal (RFC 5041 section 5.3).
    #[inline]
    fn write<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        h: &TaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        if !self.write_open {
            self.write_len = 0;
        }
        self.write_open = !h.control.is_last();
        self.write_len = self.write_len.wrapping_add(len);
        if len == 0 {
            // Zero-length: STag and TO are not looked at (RFC 5040 section 5.2).
            return Ok(());
        }
        let (mr, off) = env
            .keys()
            .check_access(
                Stag(h.stag),
                h.to,
                len,
                Access::REMOTE_WRITE,
                self.attr.pd,
                self.attr.qpn,
            )
            .map_err(tagged)?;
        place(rx, LEN_FIELD + TAGGED_HDR_LEN, len as usize, mr, off)
            .map_err(|_| TerminateCode::LOCAL_CATASTROPHIC.into())
    }

    /// Send in its four kinds (RFC 5040 sections 4.6 and 5.3).
    fn send<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        op: RdmapOpcode,
        h: &UntaggedHeader,
        len: u32,
    ) -> Result<(), Fault> {
        if h.msn != self.rx_send_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        if self.absorb_send {
            self.absorb_send = false;
            if len == 0 && h.control.is_last() {
                self.rx_send_msn = self.rx_send_msn.next();
                return Ok(());
            }
        }
        if !self.recv.active {
            if h.mo != 0 {
                return Err(TerminateCode::DDP_MO.into());
            }
            self.begin_recv(env, op)?;
        } else if self.recv.rdmap != op as u8 {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        } else if h.mo != self.recv.received {
            return Err(TerminateCode::DDP_MO.into());
        }
        if len > self.recv.capacity - self.recv.received {
            self.finish_recv(env, WcStatus::LOC_LEN_ERR, WcFlags::NONE, 0);
            return Err(TerminateCode::DDP_TOO_LONG.into());
        }
        if len > 0 {
            if self.scatter(env, rx, self.recv.received, len).is_err() {
                self.finish_recv(env, WcStatus::LOC_PROT_ERR, WcFlags::NONE, 0);
                return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
            }
            self.recv.received += len;
        }
        if h.control.is_last() {
            self.rx_send_msn = self.rx_send_msn.next();
            self.deliver(env, op, h.inv_stag)?;
        }
        Ok(())
    }

    fn begin_recv<E: QpEnv>(&mut self, env: &mut E, op: RdmapOpcode) -> Result<(), Fault> {
        match env.next_recv() {
            Ok(Some(w)) => {
                self.recv.active = true;
                self.write_len = 0;
                self.recv.wr_id = w.wr_id;
                self.recv.capacity = w.length;
                self.recv.received = 0;
                self.recv.rdmap = op as u8;
                self.recv.sges.clear();
                self.recv.sges.extend_from_slice(w.sges());
                Ok(())
            }
            Ok(None) => Err(TerminateCode::DDP_NO_BUFFER.into()),
            Err(_) => Err(TerminateCode::LOCAL_CATASTROPHIC.into()),
        }
    }

    /// Places the payload of one segment at offset `mo` of the message that is being received.
    pub(crate) fn scatter<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        mo: u32,
        len: u32,
    ) -> Result<(), KeyError> {
        let (mut skip, mut left) = (mo, len);
        let mut at = LEN_FIELD + UNTAGGED_HDR_LEN;
        for s in &self.recv.sges {
            if left == 0 {
                break;
            }
            if skip >= s.length {
                skip -= s.length;
                continue;
            }
            let n = left.min(s.length - skip);
            let to = s.addr.wrapping_add(u64::from(skip));
            let (mr, off) = env.keys().check_access(
                Stag(s.lkey),
                to,
                n,
                Access::LOCAL_WRITE,
                self.attr.pd,
                self.attr.qpn,
            )?;
            place(rx, at, n as usize, mr, off).map_err(|_| KeyError::Access)?;
            at += n as usize;
            left -= n;
            skip = 0;
        }
        Ok(())
    }

    /// The message is complete: invalidate what it asks for, then complete.
    fn deliver<E: QpEnv>(&mut self, env: &mut E, op: RdmapOpcode, stag: u32) -> Result<(), Fault> {
        let mut flags = WcFlags::NONE;
        let imm = self.send_imm.take();
        if op.is_solicited() {
            flags = flags | WcFlags::SOLICITED;
        }
        if op.invalidates() {
            if let Err(code) = self.invalidate(env, stag) {
                self.finish_recv(env, WcStatus::REM_INV_REQ_ERR, WcFlags::NONE, 0);
                return Err(code.into());
            }
            self.finish_recv(env, WcStatus::SUCCESS, flags | WcFlags::WITH_INV, stag);
        } else if let Some(imm) = imm {
            self.finish_recv(env, WcStatus::SUCCESS, flags | WcFlags::WITH_IMM, imm);
        } else {
            self.finish_recv(env, WcStatus::SUCCESS, flags, 0);
        }
        Ok(())
    }

    /// Only memory that the peer may use at all can be invalidated by it (RFC 5040 section 8.1.1).
    fn invalidate<E: QpEnv>(&self, env: &mut E, stag: u32) -> Result<(), TerminateCode> {
        let (pd, qpn) = (self.attr.pd, self.attr.qpn);
        let result = env.keys().invalidate_remote(Stag(stag), pd, qpn);
        result.map_err(|e| match e {
            KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_CANNOT_INVALIDATE_PROT,
            _ => TerminateCode::RDMAP_CANNOT_INVALIDATE,
        })
    }
}
