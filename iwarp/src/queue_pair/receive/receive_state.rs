//! State of the incoming stream, and the messages that it places and delivers: RDMA Writes, and Sends
//! and Immediate Data (RFC 5040 sections 4.6 and 5.3, RFC 7306 section 6), each of which takes a
//! receive work request and completes it when the whole message has arrived.

use super::early_fpdus::{OutOfOrderPlacement, ProcessedAhead};
use crate::ddp::prefetch::prefetch_behind;
use crate::ddp::{Msn, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::QpEnv;
use crate::mpa::OutOfOrderPolicy;
use crate::mpa::fpdu::LEN_FIELD;
use crate::mpa::marker::MarkerPosition;
use crate::queue_pair::error_mapping::{invalidation_code, tagged_buffer_code};
use crate::queue_pair::state::{FLUSHES_PER_TURN, QpInitAttr, StreamErrors};
use crate::rdmap::terminate::TerminateCode;
use crate::rdmap::{IMMEDIATE_FOR_NEXT_SEND, IMMEDIATE_LEN, RdmapOpcode, ReadRequestHeader};
use crate::stream::RxStream;
use serde::{Deserialize, Serialize};
use siw_memory::key_table::{LastKey, Retired, Stag};
use siw_memory::{KeyError, KeyReader, RegisteredMemory};
use siw_shm::{Access, Sge, Wc, WcFlags, WcOpcode, WcStatus};

/// Reason why a segment ends the stream.
#[derive(Debug)]
pub(crate) struct SegmentError {
    pub code: TerminateCode,
    /// The segment is a Read Request with this header.
    pub read: Option<ReadRequestHeader>,
    /// The segment begins a message for which there is no receive work request. A Read Request beyond
    /// IRD has the same code.
    pub lacks_receive: bool,
}

impl SegmentError {
    /// There is no receive work request.
    fn no_receive() -> Self {
        Self {
            code: TerminateCode::DDP_NO_BUFFER,
            read: None,
            lacks_receive: true,
        }
    }
}

impl From<TerminateCode> for SegmentError {
    fn from(code: TerminateCode) -> Self {
        Self {
            code,
            read: None,
            lacks_receive: false,
        }
    }
}

/// State of the incoming stream and of the message being received. The fields before `open` are those
/// that a Write accesses.
#[derive(Debug, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct ReceiveState {
    pub(super) marker_position: MarkerPosition,
    /// The first FPDU has arrived.
    pub has_first_fpdu: bool,
    /// The peer's first FPDU is a ready-to-receive Send, which consumes no receive work request.
    expects_rtr_send: bool,
    /// The last segment of the last RDMA Write has not arrived yet.
    is_write_open: bool,
    /// The peer may send Immediate Data that belongs to the following Send.
    joins_immediate: bool,
    /// The next FPDU begins a message that waits for a receive work request.
    pub awaits_receive: bool,
    /// The flush stopped at its budget: the ring may hold more requests.
    pub has_unflushed: bool,
    /// Bytes of the last RDMA Write, which directly following Immediate Data reports.
    write_len: u32,
    /// MSN of the next Send or Immediate Data.
    pub(super) expected_send_msn: Msn,
    pub out_of_order: OutOfOrderPlacement,
    /// A complete Send that is not delivered yet; nothing after it is received until it is.
    delayed_delivery: Option<DelayedDelivery>,
    pub(super) open: OpenReceive,
    /// Time that a message may wait for a receive work request, in milliseconds; 0: no wait.
    pub receive_wait_ms: u32,
    /// Present once a message has waited.
    pub(super) ahead: Option<Box<ProcessedAhead>>,
}

/// The Send being received, and its receive work request.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct OpenReceive {
    /// A Send is being received.
    pub is_active: bool,
    /// Opcode of its segments: it does not change within a message.
    pub opcode: u8,
    pub wr_id: u64,
    /// Capacity of the receive work request, in bytes.
    pub capacity: u32,
    /// Bytes placed in order.
    pub received: u32,
    /// The next Send has immediate data: `immediate`.
    has_immediate: bool,
    immediate: u32,
    /// Kept between messages to reuse the allocation.
    sges: Vec<Sge>,
}

/// Fields of the queue pair that completions of receive work requests need.
pub(crate) struct ReceiveContext<'a> {
    pub attr: &'a QpInitAttr,
    pub errors: &'a StreamErrors,
}

/// A complete Send whose delivery waits until no other worker uses the key that it invalidates.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct DelayedDelivery {
    grace_period: Retired,
    outcome: ReceiveOutcome,
}

/// Outcome of a receive work request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ReceiveOutcome {
    status: WcStatus,
    flags: WcFlags,
    /// Immediate data or the invalidated STag, depending on `flags`.
    imm: u32,
}

impl ReceiveOutcome {
    fn error(status: WcStatus) -> Self {
        Self {
            status,
            flags: WcFlags::NONE,
            imm: 0,
        }
    }
}

impl ReceiveState {
    /// Bytes at the start that a Write accesses.
    pub const HOT_BYTES: usize = std::mem::offset_of!(ReceiveState, open);

    /// Returns whether the stream has markers.
    pub fn has_markers(&self) -> bool {
        self.marker_position.has_markers()
    }

    /// The start of a stream. `expects_rtr_send`: the peer will send a zero-length Send as its
    /// ready-to-receive message.
    pub fn new(
        first_msn: Msn,
        marker_position: MarkerPosition,
        expects_rtr_send: bool,
        policy: OutOfOrderPolicy,
    ) -> Self {
        Self {
            marker_position,
            has_first_fpdu: false,
            expects_rtr_send,
            is_write_open: false,
            write_len: 0,
            expected_send_msn: first_msn,
            joins_immediate: false,
            open: OpenReceive::default(),
            receive_wait_ms: 0,
            awaits_receive: false,
            delayed_delivery: None,
            has_unflushed: false,
            out_of_order: OutOfOrderPlacement::new(policy),
            ahead: None,
        }
    }

    /// Sets whether Immediate Data may belong to the following Send; see
    /// [`crate::NegotiatedParameters::joins_immediate`].
    pub fn with_joined_immediate(mut self, joins_immediate: bool) -> Self {
        self.joins_immediate = joins_immediate;
        self
    }

    /// Sets the time that messages may wait for receive work requests.
    pub fn with_receive_wait(mut self, milliseconds: u32) -> Self {
        self.receive_wait_ms = milliseconds;
        self
    }

    /// Returns whether a restored state is one that a stream can have.
    pub fn is_consistent(&self) -> bool {
        let ahead = self.ahead.as_deref();
        self.open.received <= self.open.capacity
            && self.out_of_order.is_consistent()
            && ahead.is_none_or(ProcessedAhead::is_consistent)
    }

    /// Returns whether a Send has arrived only in part.
    pub fn is_within_message(&self) -> bool {
        self.open.is_active && !self.is_delivery_delayed()
    }

    /// Returns whether a complete Send waits until no other worker uses the key that it invalidates.
    #[inline]
    pub fn is_delivery_delayed(&self) -> bool {
        self.delayed_delivery.is_some()
    }

    /// Places a segment of an RDMA Write with `len` octets of payload, which `place` copies to an offset
    /// in registered memory. Each segment is handled independently: a gap in TO is legal (PROTOCOL.md
    /// section 8.3). On failure nothing has changed.
    #[inline(always)]
    pub(super) fn on_write<'k>(
        &mut self,
        (keys, attr): (&'k KeyReader, &QpInitAttr),
        last_key: &mut LastKey<'k>,
        header: &TaggedHeader,
        len: u32,
        place: impl FnOnce(&RegisteredMemory, u64) -> bool,
    ) -> Result<(), TerminateCode> {
        let (is_first, is_last) = (!self.is_write_open, header.control.is_last());
        // STag and TO of a zero-length segment are not checked (RFC 5041 section 5.2).
        if len > 0 {
            let range = (header.stag, header.to, len);
            let (mr, off) = attr
                .check_key_with(keys, last_key, range, Access::REMOTE_WRITE)
                .map_err(tagged_buffer_code)?;
            if !is_last {
                // The header does not tell the length of the message.
                prefetch_behind(mr, off, len, u32::MAX, is_first);
            }
            if !place(mr, off) {
                return Err(TerminateCode::LOCAL_CATASTROPHIC);
            }
        }
        let before = if is_first { 0 } else { self.write_len };
        self.write_len = before.wrapping_add(len);
        self.is_write_open = !is_last;
        Ok(())
    }

    /// Handles a segment of any of the four kinds of Send (RFC 5040 sections 4.6 and 5.3).
    pub(super) fn on_send<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &ReceiveContext<'_>,
        rx: &impl RxStream,
        opcode: RdmapOpcode,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<(), SegmentError> {
        if header.msn != self.expected_send_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        let is_last = header.control.is_last();
        // It precedes all other FPDUs of the initiator (RFC 6581 section 9.2).
        if self.expects_rtr_send && !self.has_first_fpdu && len == 0 && is_last {
            self.expected_send_msn = self.expected_send_msn.next();
            return Ok(());
        }
        if !self.open.is_active {
            if header.mo != 0 {
                return Err(TerminateCode::DDP_MO.into());
            }
            self.begin_receive(env, opcode)?;
        } else if self.open.opcode != opcode as u8 {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        } else if header.mo != self.open.received {
            return Err(TerminateCode::DDP_MO.into());
        }
        if len > self.open.capacity - self.open.received {
            let outcome = ReceiveOutcome::error(WcStatus::LOC_LEN_ERR);
            self.complete_receive(env, context, outcome);
            return Err(TerminateCode::DDP_TOO_LONG.into());
        }
        if len > 0 {
            let placed = self.scatter(env.keys(), context.attr, rx, header, len);
            if placed.is_err() {
                let outcome = ReceiveOutcome::error(WcStatus::LOC_PROT_ERR);
                self.complete_receive(env, context, outcome);
                return Err(TerminateCode::LOCAL_CATASTROPHIC.into());
            }
            self.open.received += len;
        }
        if is_last {
            self.expected_send_msn = self.expected_send_msn.next();
            self.deliver_send(env, context, opcode, header.inv_stag)?;
        }
        Ok(())
    }

    fn begin_receive<E: QpEnv>(
        &mut self,
        env: &mut E,
        opcode: RdmapOpcode,
    ) -> Result<(), SegmentError> {
        let wqe = match env.next_recv() {
            Ok(Some(wqe)) => wqe,
            Ok(None) => return Err(SegmentError::no_receive()),
            Err(_) => return Err(TerminateCode::LOCAL_CATASTROPHIC.into()),
        };
        self.write_len = 0;
        self.open.is_active = true;
        self.open.opcode = opcode as u8;
        self.open.wr_id = wqe.wr_id;
        self.open.capacity = wqe.length;
        self.open.received = 0;
        self.open.sges.clear();
        self.open.sges.extend_from_slice(wqe.sges());
        Ok(())
    }

    /// Places the payload of one segment at its offset in the message being received.
    pub(super) fn scatter(
        &self,
        keys: &KeyReader,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<(), KeyError> {
        let (mut skip, mut left) = (header.mo, len);
        let mut from = LEN_FIELD + UNTAGGED_HDR_LEN;
        for sge in &self.open.sges {
            if left == 0 {
                break;
            }
            if skip >= sge.length {
                skip -= sge.length;
                continue;
            }
            let part_len = left.min(sge.length - skip);
            let to = sge.addr.wrapping_add(u64::from(skip));
            let (mr, off) = attr.check_key(keys, sge.lkey, to, part_len, Access::LOCAL_WRITE)?;
            if !header.control.is_last() {
                let rest = sge.length - skip - part_len;
                prefetch_behind(mr, off, part_len, rest, skip == 0);
            }
            if !rx.copy_to_memory(from, part_len as usize, mr, off) {
                return Err(KeyError::Access);
            }
            from += part_len as usize;
            left -= part_len;
            skip = 0;
        }
        Ok(())
    }

    /// Delivers a complete Send: invalidates the STag that it names, then completes its receive work
    /// request.
    fn deliver_send<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &ReceiveContext<'_>,
        opcode: RdmapOpcode,
        inv_stag: u32,
    ) -> Result<(), TerminateCode> {
        let has_immediate = std::mem::take(&mut self.open.has_immediate);
        let imm = has_immediate.then_some(self.open.immediate);
        let mut outcome = ReceiveOutcome {
            status: WcStatus::SUCCESS,
            flags: solicited_flag(opcode),
            imm: 0,
        };
        if opcode.invalidates_stag() {
            // The peer can only invalidate memory that it may use at all (RFC 5040 section 8.1.1).
            let QpInitAttr { pd, qpn, .. } = *context.attr;
            if let Err(error) = env.keys().invalidate_remote(Stag(inv_stag), pd, qpn) {
                let outcome = ReceiveOutcome::error(WcStatus::REM_INV_REQ_ERR);
                self.complete_receive(env, context, outcome);
                return Err(invalidation_code(error));
            }
            outcome.flags = outcome.flags | WcFlags::WITH_INV;
            outcome.imm = inv_stag;
            let grace_period = env.keys().begin_grace_period();
            if !env.keys().has_elapsed_for_others(grace_period) {
                self.delayed_delivery = Some(DelayedDelivery {
                    grace_period,
                    outcome,
                });
                env.await_quiescence();
                return Ok(());
            }
        } else if let Some(imm) = imm {
            outcome.flags = outcome.flags | WcFlags::WITH_IMM;
            outcome.imm = imm;
        }
        self.complete_receive(env, context, outcome);
        Ok(())
    }

    /// Delivers the Send that waits for other workers. `true`: it still waits.
    pub fn poll_quiescence<E: QpEnv>(&mut self, env: &mut E, context: &ReceiveContext<'_>) -> bool {
        let Some(delayed) = self.delayed_delivery else {
            return false;
        };
        if !env.keys().has_elapsed_for_others(delayed.grace_period) {
            return true;
        }
        self.delayed_delivery = None;
        self.complete_receive(env, context, delayed.outcome);
        false
    }

    fn complete_receive<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &ReceiveContext<'_>,
        outcome: ReceiveOutcome,
    ) {
        if !self.open.is_active {
            return;
        }
        self.open.is_active = false;
        let cqe = Wc {
            wr_id: self.open.wr_id,
            qp_num: context.attr.qpn,
            status: outcome.status,
            opcode: WcOpcode::RECV,
            flags: outcome.flags,
            byte_len: self.open.received,
            imm: outcome.imm,
            vendor_err: context.errors.vendor_error(outcome.status),
            ..Wc::default()
        };
        env.complete_recv(&cqe);
    }

    /// Handles Immediate Data (RFC 7306 section 6): it completes its own receive work request, or
    /// belongs to the following Send (PROTOCOL.md section 8.8).
    pub(super) fn on_immediate_data<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
        rx: &impl RxStream,
        opcode: RdmapOpcode,
        header: &UntaggedHeader,
        len: u32,
    ) -> Result<(), SegmentError> {
        if header.msn != self.expected_send_msn {
            return Err(TerminateCode::DDP_MSN.into());
        }
        if self.open.is_active {
            return Err(TerminateCode::RDMAP_OPCODE.into());
        }
        if header.mo != 0 {
            return Err(TerminateCode::DDP_MO.into());
        }
        // Conformance 86.
        if len as usize != IMMEDIATE_LEN || !header.control.is_last() {
            return Err(TerminateCode::RDMAP_UNSPECIFIED.into());
        }
        let mut payload = [0; IMMEDIATE_LEN];
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut payload);
        let imm = u32::from_be_bytes([payload[0], payload[1], payload[2], payload[3]]);
        if self.joins_immediate && payload[4..] == IMMEDIATE_FOR_NEXT_SEND {
            (self.open.has_immediate, self.open.immediate) = (true, imm);
            self.expected_send_msn = self.expected_send_msn.next();
            return Ok(());
        }
        self.open.has_immediate = false;
        let wr_id = match env.next_recv() {
            Ok(Some(wqe)) => wqe.wr_id,
            Ok(None) => return Err(SegmentError::no_receive()),
            Err(_) => return Err(TerminateCode::LOCAL_CATASTROPHIC.into()),
        };
        self.expected_send_msn = self.expected_send_msn.next();
        env.complete_recv(&Wc {
            wr_id,
            qp_num: attr.qpn,
            status: WcStatus::SUCCESS,
            opcode: WcOpcode::RECV_RDMA_WITH_IMM,
            flags: WcFlags::WITH_IMM | solicited_flag(opcode),
            byte_len: std::mem::take(&mut self.write_len),
            imm,
            ..Wc::default()
        });
        Ok(())
    }

    /// Completes the requests of the receive queue with WR_FLUSH_ERR, within the budget.
    pub fn flush<E: QpEnv>(&mut self, env: &mut E, context: &ReceiveContext<'_>) {
        let status = WcStatus::WR_FLUSH_ERR;
        self.delayed_delivery = None;
        self.complete_receive(env, context, ReceiveOutcome::error(status));
        self.has_unflushed = false;
        // Bounded like the flush of the send queue.
        for _ in 0..FLUSHES_PER_TURN {
            let Ok(Some(wqe)) = env.next_flushed_recv() else {
                return;
            };
            let cqe = Wc {
                wr_id: wqe.wr_id,
                qp_num: context.attr.qpn,
                status,
                opcode: WcOpcode::RECV,
                vendor_err: context.errors.vendor_error(status),
                ..Wc::default()
            };
            env.complete_recv(&cqe);
        }
        self.has_unflushed = true;
    }
}

fn solicited_flag(opcode: RdmapOpcode) -> WcFlags {
    if opcode.is_solicited() {
        WcFlags::SOLICITED
    } else {
        WcFlags::NONE
    }
}
