//! The requester: requests that this side sends to the peer. It takes work requests out of the send
//! queue, turns them into FPDUs, matches responses to them, and completes them in posting order.
//!
//! ```text
//! ring --> prepare_request --> next_segment --> TCP ... on_acked ----------.
//!              |                    |                                      v
//!              |                    '--> outstanding --> on_read_response, complete_ready --> CQE
//!              '--> local operations ------------------------------------->^  on_atomic_response
//! ```
//!
//! The queue pair calls it, and decides how its errors affect the stream.

mod atomic_exchange;
mod completion;
mod message;
mod outstanding_read;
mod read_exchange;
mod terminated_request;
mod work_request_queue;

pub(crate) use completion::CompletionContext;
pub(crate) use outstanding_read::{OutstandingRead, PLACEHOLDER_STAG};

use crate::ddp::Msn;
use crate::environment::{QpEnv, RingFault};
use crate::mpa::RtrKind;
use crate::queue_pair::state::{DrainState, QpInitAttr};
use crate::rdmap::atomic_header::ATOMIC_OPERAND_LEN;
use crate::record::{FpduKind, MessageSlot};
use serde::{Deserialize, Serialize};
use siw_memory::KeyReader;
use siw_memory::key_table::{Retired, Stag};
use siw_shm::{Access, BindMw, FastReg, Opcode, SendWqe, WcStatus};
use std::collections::{BTreeSet, VecDeque};
use work_request_queue::{SendEntry, WorkRequestQueue};

/// A work request or its ring is invalid: the queue pair ends with a local error. The work request
/// keeps the status with which it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LocalError;

/// Number of local operations after which a queue pair yields to others.
const LOCAL_OPERATIONS_PER_TURN: u32 = 64;

/// Result of preparing the next work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PreparedRequest {
    /// The current work request may be sent.
    Ready,
    /// There is no work request, or it has to wait.
    Nothing,
    /// The budget for local operations is used up, and more may follow.
    Yielded,
}

/// The requesting side of a stream. The fields up to the entries of `queue` are those that a Write or
/// Send accesses.
#[derive(Debug, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct Requester {
    /// The work request that was taken out of the ring and is not yet completely sent.
    current: Option<MessageSlot>,
    /// Longest message whose payload is copied into frames; longer ones are sent by reference.
    pub copied_up_to: u32,
    /// MSN of the next Send or Immediate Data.
    next_send_msn: Msn,
    pub drain: DrainState,
    /// A work request completed in error: the following ones are flushed.
    has_failed: bool,
    /// The peer joins Immediate Data with the following Send.
    joins_immediate: bool,
    /// The peer stopped responding, which the first flushed work request reports.
    has_lost_peer: bool,
    /// The flush stopped at its budget: the ring may hold more requests.
    pub has_unflushed: bool,
    /// Maximum number of outstanding Reads and atomics.
    pub ord: u16,
    /// The current work request invalidated a key that other workers may still use.
    quiescing: Option<Retired>,
    queue: WorkRequestQueue,
    /// Reads and atomics whose response is missing or incomplete, in the order of their requests.
    outstanding: VecDeque<OutstandingRead>,
    /// MSN of the next Read Request or Atomic Request.
    next_read_msn: Msn,
    /// MSN of the next Atomic Response.
    expected_atomic_msn: Msn,
    /// Local operations left in this turn.
    local_operations_left: u32,
    /// READ_WITH_INV requests whose keys other workers may still use.
    invalidated_reads: VecDeque<(Retired, MessageSlot)>,
    /// Type 2 windows that were bound through the queue pair, identified by the keys they were
    /// allocated with. Destroying the queue pair therefore need not search all windows of its client.
    pub bound_windows: BTreeSet<Stag>,
}

impl Requester {
    /// Bytes at the start that [`can_continue`](Self::can_continue) accesses first.
    pub const CURRENT_BYTES: usize = std::mem::offset_of!(Requester, copied_up_to);
    /// Bytes at the start that a Write or Send accesses.
    pub const HOT_BYTES: usize =
        std::mem::offset_of!(Requester, queue) + WorkRequestQueue::HOT_BYTES;

    /// The start of a stream: no request has been sent.
    pub fn new(first_msn: Msn, ord: u16) -> Self {
        Self {
            queue: WorkRequestQueue::default(),
            current: None,
            outstanding: VecDeque::new(),
            next_send_msn: first_msn,
            next_read_msn: first_msn,
            expected_atomic_msn: first_msn,
            ord,
            drain: DrainState::Inactive,
            copied_up_to: u32::MAX,
            joins_immediate: false,
            has_failed: false,
            has_lost_peer: false,
            has_unflushed: false,
            local_operations_left: LOCAL_OPERATIONS_PER_TURN,
            quiescing: None,
            invalidated_reads: VecDeque::new(),
            bound_windows: BTreeSet::new(),
        }
    }

    /// Sets whether SEND with immediate may be sent; see
    /// [`crate::NegotiatedParameters::joins_immediate`].
    pub fn with_joined_immediate(mut self, joins_immediate: bool) -> Self {
        self.joins_immediate = joins_immediate;
        self
    }

    /// Returns whether a restored requester is one that a stream can have.
    pub fn is_consistent(&self) -> bool {
        let mut outstanding = self.outstanding.iter();
        self.queue.is_consistent() && outstanding.all(|read| read.placed <= read.len)
    }

    /// Records that the peer stopped responding: the first flushed work request reports it.
    pub fn set_peer_lost(&mut self) {
        self.has_lost_peer = true;
    }

    /// Prefetches the memory outside `self` that taking a work request touches.
    #[inline]
    pub fn prefetch_for_sending(&mut self) {
        self.queue.prefetch_for_pushing();
    }

    /// Prefetches the memory outside `self` that completing the oldest work request touches.
    #[inline]
    pub fn prefetch_for_completing(&self) {
        self.queue.prefetch_front();
    }

    /// Returns whether all work requests are finished.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns whether the current work request can continue.
    #[inline]
    pub fn can_continue(&self) -> bool {
        self.current.is_some_and(|slot| !self.is_stalled(slot))
    }

    /// Returns whether part of the current work request has been handed to TCP.
    pub fn has_started_current(&self) -> bool {
        self.current
            .and_then(|slot| self.queue.get(slot))
            .is_some_and(SendEntry::is_started)
    }

    /// Returns whether a work request has started and is not completed.
    pub fn has_started_any(&self) -> bool {
        if self.quiescing.is_some() {
            return true;
        }
        match self.queue.front() {
            None => false,
            // A request that was taken out of the ring and waits for its turn has not started.
            Some(entry) => {
                entry.is_started() || self.current.is_none_or(|slot| !self.queue.is_front(slot))
            }
        }
    }

    /// Returns whether a work request cannot continue yet (RFC 5040 section 5.5): it waits for ORD,
    /// for its fence, or for the end of a drain.
    #[inline]
    fn is_stalled(&self, slot: MessageSlot) -> bool {
        let entry = self.queue.get(slot);
        entry.is_none_or(|entry| self.is_entry_stalled(slot, entry))
    }

    #[inline]
    fn is_entry_stalled(&self, slot: MessageSlot, entry: &SendEntry) -> bool {
        let waits_to_start = self.drain != DrainState::Inactive
            || (entry.is_fenced() && !self.outstanding.is_empty());
        (waits_to_start && !entry.is_started())
            || (entry.opcode.awaits_response() && self.outstanding.len() >= usize::from(self.ord))
            // Earlier requests may still be retransmitted from the memory.
            || (entry.opcode == Opcode::LocalInv && !self.queue.is_front(slot))
    }

    /// Ensures that there is a current work request for [`next_segment`](Self::next_segment), and
    /// that it may be sent. Executes local operations along the way.
    #[inline(always)]
    pub fn prepare_request<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &mut CompletionContext<'_>,
    ) -> Result<PreparedRequest, LocalError> {
        loop {
            if self.current.is_none()
                && (self.drain != DrainState::Inactive || !self.take_request(env, context.attr)?)
            {
                return Ok(PreparedRequest::Nothing);
            }
            let current = self
                .current
                .and_then(|slot| Some((slot, self.queue.get(slot)?)));
            let Some((slot, entry)) = current else {
                return Ok(PreparedRequest::Nothing);
            };
            if self.is_entry_stalled(slot, entry) {
                return Ok(PreparedRequest::Nothing);
            }
            // Later requests rely on the invalidation: for example, a registration of other pages
            // under the same key, or a message that notifies the peer.
            if self.quiescing.is_some() {
                return Ok(PreparedRequest::Nothing);
            }
            if !entry.opcode.is_local() {
                return Ok(PreparedRequest::Ready);
            }
            // Local operations need no room in TCP: a client could post them faster than they are
            // executed.
            if self.local_operations_left == 0 {
                self.local_operations_left = LOCAL_OPERATIONS_PER_TURN;
                return Ok(PreparedRequest::Yielded);
            }
            self.local_operations_left -= 1;
            self.execute_local_operation(env, slot, context)?;
        }
    }

    /// Takes a work request out of the ring and checks it; `Ok(false)`: the ring is empty.
    #[inline]
    fn take_request<E: QpEnv>(
        &mut self,
        env: &mut E,
        attr: &QpInitAttr,
    ) -> Result<bool, LocalError> {
        // A correct client library never exceeds the depth of the queue.
        if self.queue.len() >= attr.max_send_wr as usize {
            return Ok(false);
        }
        let slot = match env.next_send() {
            Ok(Some(wqe)) => self.queue.push(wqe),
            Ok(None) => return Ok(false),
            Err(RingFault::InvalidIndex) => return Err(LocalError),
            Err(RingFault::InvalidRequest { wr_id }) => return Err(self.refuse_unknown(wr_id)),
        };
        self.current = Some(slot);
        let entry = self.queue.get(slot).ok_or(LocalError)?;
        let status = self.check_request(env.keys(), attr, entry);
        if status != WcStatus::SUCCESS {
            return Err(self.refuse_current(slot, status));
        }
        let has_payload_in_memory = !entry.is_inline() && !entry.opcode.awaits_response();
        if has_payload_in_memory
            && self.is_referenced(entry.length)
            && let Some(entry) = self.queue.get_mut(slot)
        {
            entry.ext_buf_ref = env.alloc_ext_buf_ref();
        }
        Ok(true)
    }

    /// Decides for a message of `len` bytes whether its payload is sent by reference.
    #[inline(always)]
    fn is_referenced(&self, len: u32) -> bool {
        len > self.copied_up_to
    }

    /// Queues a work request that cannot be parsed; it completes in error in its turn.
    #[cold]
    fn refuse_unknown(&mut self, wr_id: u64) -> LocalError {
        let mut unknown = SendWqe::new();
        unknown.wr_id = wr_id;
        let slot = self.queue.push(&unknown);
        self.refuse_current(slot, WcStatus::LOC_QP_OP_ERR)
    }

    #[cold]
    fn refuse_current(&mut self, slot: MessageSlot, status: WcStatus) -> LocalError {
        self.fail_request(Some(slot), status);
        self.current = None;
        LocalError
    }

    /// Executes LOCAL_INV, BIND_MW and REG_MR immediately in their turn. An operation that
    /// invalidates a key is finished when no other worker uses the key any more (RFC 5040 section
    /// 8.1.1).
    fn execute_local_operation<E: QpEnv>(
        &mut self,
        env: &mut E,
        slot: MessageSlot,
        context: &mut CompletionContext<'_>,
    ) -> Result<(), LocalError> {
        let QpInitAttr { pd, qpn, .. } = *context.attr;
        let entry = self.queue.get(slot).ok_or(LocalError)?;
        let sge = self.queue.sges(entry).first().copied().unwrap_or_default();
        let keys = env.keys();
        let (result, status) = match entry.opcode {
            Opcode::BindMw => {
                let bind = BindMw::from_fields(entry.imm, entry.rkey, entry.remote_addr, &sge);
                let bound = keys.bind_window(&bind, pd, qpn);
                if bound.is_ok() {
                    let window = keys.stream_window(Stag(bind.new_rkey));
                    self.bound_windows.extend(window);
                }
                (bound, WcStatus::MW_BIND_ERR)
            }
            Opcode::RegMr => {
                let reg = FastReg::from_fields(entry.imm, entry.rkey, entry.remote_addr, &sge);
                // Its key was invalid until now.
                let registered = keys.register_pages(&reg, pd).map(|()| false);
                (registered, WcStatus::MW_BIND_ERR)
            }
            _ => {
                let result = keys.invalidate_key(Stag(entry.imm), pd, qpn);
                (result.map(|()| true), WcStatus::LOC_PROT_ERR)
            }
        };
        let Ok(was_valid) = result else {
            return Err(self.refuse_current(slot, status));
        };
        if was_valid {
            let grace_period = keys.begin_grace_period();
            if !keys.has_elapsed_for_others(grace_period) {
                self.quiescing = Some(grace_period);
                env.await_quiescence();
                return Ok(());
            }
        }
        self.finish_local_operation(env, slot, context);
        Ok(())
    }

    fn finish_local_operation<E: QpEnv>(
        &mut self,
        env: &mut E,
        slot: MessageSlot,
        context: &mut CompletionContext<'_>,
    ) {
        self.current = None;
        if let Some(entry) = self.queue.get_mut(slot) {
            entry.is_acked = true;
        }
        self.complete_ready(env, context);
    }

    /// Completes work requests that waited until no other worker uses a key. `true`: some still wait.
    pub fn poll_quiescence<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &mut CompletionContext<'_>,
    ) -> bool {
        let has_elapsed = |env: &E, grace_period| env.keys().has_elapsed_for_others(grace_period);
        if let (Some(grace_period), Some(slot)) = (self.quiescing, self.current)
            && has_elapsed(env, grace_period)
        {
            self.quiescing = None;
            self.finish_local_operation(env, slot, context);
        }
        while let Some(&(grace_period, slot)) = self.invalidated_reads.front()
            && has_elapsed(env, grace_period)
        {
            self.invalidated_reads.pop_front();
            if let Some(entry) = self.queue.get_mut(slot) {
                entry.is_answered = true;
            }
        }
        self.quiescing.is_some() || !self.invalidated_reads.is_empty()
    }

    /// Checks a work request locally, before any of its bytes is sent.
    #[inline]
    fn check_request(&self, keys: &KeyReader, attr: &QpInitAttr, entry: &SendEntry) -> WcStatus {
        let access = match entry.opcode {
            // For any other peer it would be two messages.
            Opcode::SendWithImm if !self.joins_immediate => return WcStatus::LOC_QP_OP_ERR,
            Opcode::Write
            | Opcode::Send
            | Opcode::SendWithInv
            | Opcode::WriteWithImm
            | Opcode::SendWithImm => Access::NONE,
            opcode if opcode.is_local() => return WcStatus::SUCCESS,
            Opcode::Read | Opcode::ReadWithInv | Opcode::FetchAdd | Opcode::CmpSwap => {
                // READ_WITH_INV invalidates the one key that names its sink.
                let has_one_sink =
                    entry.opcode != Opcode::ReadWithInv || self.queue.sges(entry).len() == 1;
                if self.ord == 0 || !has_one_sink {
                    return WcStatus::LOC_QP_OP_ERR;
                }
                if entry.opcode.is_atomic() && entry.length != ATOMIC_OPERAND_LEN {
                    return WcStatus::LOC_LEN_ERR;
                }
                Access::LOCAL_WRITE
            }
            _ => return WcStatus::LOC_QP_OP_ERR,
        };
        if entry.is_inline() {
            return WcStatus::SUCCESS;
        }
        for sge in self.queue.sges(entry) {
            let check = || attr.check_key(keys, sge.lkey, sge.addr, sge.length, access);
            if sge.length > 0 && check().is_err() {
                return WcStatus::LOC_PROT_ERR;
            }
        }
        WcStatus::SUCCESS
    }

    /// The ready-to-receive message was handed to TCP (RFC 6581 section 9.2).
    pub fn on_ready_to_receive_sent(&mut self, kind: RtrKind) {
        match kind {
            RtrKind::Write => {}
            RtrKind::Send => self.next_send_msn = self.next_send_msn.next(),
            RtrKind::Read => {
                self.next_read_msn = self.next_read_msn.next();
                self.outstanding
                    .push_back(OutstandingRead::ready_to_receive());
            }
        }
    }

    /// The last segment of a message is acknowledged.
    #[inline]
    pub fn on_acked(&mut self, slot: MessageSlot, kind: FpduKind) {
        // Immediate Data is the last message of WRITE_WITH_IMM, the first of SEND_WITH_IMM.
        let is_immediate = kind == FpduKind::Immediate;
        if let Some(entry) = self.queue.get_mut(slot)
            && is_immediate == (entry.opcode == Opcode::WriteWithImm)
        {
            entry.is_acked = true;
        }
    }

    /// Marks a work request as failed; it completes once everything before it has completed.
    pub fn fail_request(&mut self, slot: Option<MessageSlot>, status: WcStatus) {
        if let Some(entry) = slot.and_then(|slot| self.queue.get_mut(slot)) {
            entry.status = status;
        }
    }

    /// Returns whether an outstanding Read expects these bytes, which may then be placed before their
    /// turn.
    pub fn wants_read_response(&self, stag: u32, to: u64, len: u32) -> bool {
        self.outstanding
            .iter()
            .any(|read| read.wants(stag, to, len))
    }
}
