//! State shared by all queue pairs of a worker, and the view of it that a queue pair gets for one
//! call.

use std::ops::Range;

use siw_iwarp::{BuildError, ExtBufRef, FpduRecord, FpduRun, QpEnv, QpEvent, RingFault};
use siw_memory::KeyReader;
use siw_shm::{PlainSend, RecvWqe, RingError, SendWqe, Wc, WcFlags, WcOpcode, WcStatus};

use super::completion_queues::CqTable;
use super::ext_bufs::ExtBufRefs;
use super::parked::{ParkedQueuePairs, Wait};
use super::qp_rings::{QpRings, RingMisuse};
use super::shared_receive_queues::SrqTable;
use super::slots::QpSlot;
use super::split_records::SplitRecords;

/// Messages with referenced memory in flight per worker; beyond it payload is copied.
const EXT_BUF_TRACKERS: usize = 65_536;

/// State shared by the queue pairs of a worker.
pub(crate) struct WorkerContext {
    pub(super) keys: KeyReader,
    pub(super) cqs: CqTable,
    pub(super) srqs: SrqTable,
    pub(super) ext_bufs: ExtBufRefs,
    pub(super) parked: ParkedQueuePairs,
    wqes: WqeScratch,
    /// Records that could not be built since the worker last looked.
    pub(super) build_failures: Vec<BuildFailure>,
    /// FPDUs that are sent in parts.
    pub(super) split_records: SplitRecords,
    /// Buffer in which an FPDU of `split_records` is built.
    pub(super) flat_record: Vec<u8>,
    /// Request slots taken out of rings.
    pub(super) request_slots: u64,
    /// Reads of rings, each of one or several requests.
    pub(super) request_batches: u64,
}

/// A record that could not be built; its queue pair has to end.
pub(super) struct BuildFailure {
    pub(super) slot: QpSlot,
    pub(super) record: FpduRecord,
    pub(super) error: BuildError,
}

/// Work requests on their way from a ring into a queue pair; one of each for the whole worker.
#[derive(Default)]
struct WqeScratch {
    send: SendWqe,
    recv: RecvWqe,
}

impl WorkerContext {
    pub(super) fn new(keys: KeyReader) -> WorkerContext {
        WorkerContext {
            keys,
            cqs: CqTable::default(),
            srqs: SrqTable::default(),
            ext_bufs: ExtBufRefs::new(EXT_BUF_TRACKERS),
            parked: ParkedQueuePairs::default(),
            wqes: WqeScratch::default(),
            build_failures: Vec::new(),
            split_records: SplitRecords::default(),
            flat_record: Vec::new(),
            request_slots: 0,
            request_batches: 0,
        }
    }

    /// Counts slots returned to the client.
    #[inline]
    fn count_taken(&mut self, slots: u32) {
        self.request_slots += u64::from(slots);
        self.request_batches += u64::from(slots > 0);
    }

    /// View for a queue pair with these rings during one call.
    #[inline]
    pub(super) fn for_rings<'a>(&'a mut self, rings: &'a mut QpRings) -> QpView<'a> {
        QpView {
            rings,
            context: self,
            announced: 0,
            has_taken_receive: false,
        }
    }
}

/// A queue pair's view of its worker: its own rings and the shared state.
pub(super) struct QpView<'a> {
    pub(super) rings: &'a mut QpRings,
    context: &'a mut WorkerContext,
    /// Sends whose slots were already returned to the client and that are still to be completed.
    announced: u32,
    /// A request was taken out of the receive queue during this call.
    has_taken_receive: bool,
}

impl Drop for QpView<'_> {
    /// Returns the slots of requests copied during the call to the client. Slots of requests that
    /// complete within the call were returned before.
    #[inline]
    fn drop(&mut self) {
        let slots = self.rings.sq.release_popped();
        self.context.count_taken(slots);
        // The receive queue is in a cache line that sends and Writes do not access otherwise.
        if self.has_taken_receive {
            let slots = self.rings.rq.release_popped();
            self.context.count_taken(slots);
        }
    }
}

impl QpView<'_> {
    /// Returns whether the stream may take one more shared request (RFC 5042 section 6.4.3.1).
    fn is_within_srq_share(&mut self) -> bool {
        let QpRings { held, recv_cq, .. } = &mut *self.rings;
        while let Some(oldest) = held.front()
            && self.context.cqs.is_polled(*recv_cq, *oldest)
        {
            held.pop_front();
        }
        held.len() < self.rings.srq_share as usize
    }

    fn park(&mut self, wait: Wait) {
        let QpRings { qpn, waits, .. } = &mut *self.rings;
        self.context.parked.park(wait, *qpn, waits);
    }

    /// Removes the split records of acknowledged FPDUs: `units` of a run.
    #[inline]
    pub(super) fn forget_split_records(&mut self, slot: QpSlot, run: &FpduRun, units: Range<u16>) {
        if !self.context.split_records.is_empty(slot) {
            for unit in units {
                self.context.split_records.remove(slot, &run.get(unit));
            }
        }
    }

    /// Records the defect of a ring, which is not read any more: behind a request that cannot be read,
    /// the start of the next one is unknown.
    #[cold]
    fn note_misuse(&mut self, error: RingError) -> RingFault {
        match error {
            RingError::InvalidIndex => {
                self.rings.is_sq_broken = true;
                self.rings.is_rq_broken = true;
                self.rings.misuse = Some(RingMisuse::InvalidIndex);
                RingFault::InvalidIndex
            }
            RingError::Wqe { wr_id, error } => {
                self.rings.misuse = Some(RingMisuse::BadRequest(error.to_string()));
                RingFault::InvalidRequest { wr_id }
            }
        }
    }

    /// Takes the final SEND of a lingering stream, which follows the last request in the ring.
    #[cold]
    fn take_final_send(&mut self) -> Option<&SendWqe> {
        self.context.wqes.send = *self.rings.final_send.take()?;
        Some(&self.context.wqes.send)
    }

    /// Returns the slots of a receive that is about to complete to the client, and those of all
    /// receives taken before it.
    #[inline]
    fn complete_receive(&mut self, status: WcStatus) {
        if status != WcStatus::SUCCESS {
            let QpRings { sq, rq, .. } = &mut *self.rings;
            sq.note_failed_receive(rq);
        }
        let slots = self.rings.rq.complete_requests(1);
        self.context.count_taken(slots);
    }

    #[cold]
    fn refuse_recv(&mut self, error: RingError) -> RingFault {
        let fault = self.note_misuse(error);
        self.rings.is_rq_broken = true;
        if let RingFault::InvalidRequest { wr_id } = fault {
            let cqe = Wc {
                wr_id,
                qp_num: self.rings.qpn.0,
                status: WcStatus::LOC_QP_OP_ERR,
                opcode: WcOpcode::RECV,
                flags: WcFlags::NONE,
                ..Wc::default()
            };
            self.complete_receive(cqe.status);
            self.context.cqs.push(self.rings.recv_cq, &cqe);
        }
        fault
    }
}

impl QpEnv for QpView<'_> {
    #[inline]
    fn keys(&self) -> &KeyReader {
        &self.context.keys
    }

    #[inline(always)]
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault> {
        if self.rings.is_sq_broken {
            return Ok(None);
        }
        match self.rings.sq.pop(&mut self.context.wqes.send) {
            Ok(Some(())) => Ok(Some(&self.context.wqes.send)),
            Ok(None) if self.rings.final_send.is_some() => Ok(self.take_final_send()),
            Ok(None) => {
                self.rings.is_sq_drained = true;
                Ok(None)
            }
            Err(error) => {
                self.rings.is_sq_broken = true;
                Err(self.note_misuse(error))
            }
        }
    }

    #[inline(always)]
    fn peek_plain_send(&mut self) -> Option<PlainSend> {
        if self.rings.is_sq_broken {
            return None;
        }
        self.rings.sq.peek_plain()
    }

    #[inline(always)]
    fn take_peeked_send(&mut self) {
        self.rings.sq.take_peeked();
    }

    #[inline]
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        if self.rings.is_rq_broken {
            return Ok(None);
        }
        if self.rings.srq_share != 0 && !self.is_within_srq_share() {
            return Ok(None);
        }
        let srq = self.rings.srq;
        let popped = match srq {
            Some(srq) => {
                let popped = self.context.srqs.pop(srq, &mut self.context.wqes.recv);
                self.context.request_slots += u64::from(matches!(popped, Ok(Some(()))));
                popped
            }
            None => {
                self.has_taken_receive = true;
                self.rings.rq.pop(&mut self.context.wqes.recv)
            }
        };
        match popped {
            Ok(Some(())) => Ok(Some(&self.context.wqes.recv)),
            Ok(None) => Ok(None),
            Err(error) => Err(self.refuse_recv(error)),
        }
    }

    fn next_flushed_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        if self.rings.srq.is_some() {
            return Ok(None);
        }
        self.next_recv()
    }

    #[inline]
    fn announce_completions(&mut self, count: u32) {
        let slots = self.rings.sq.complete_requests(count);
        self.context.count_taken(slots);
        self.announced = count;
    }

    #[inline(always)]
    fn complete_send(&mut self, cqe: Option<&Wc>) {
        match self.announced.checked_sub(1) {
            Some(left) => self.announced = left,
            None => {
                if cqe.is_some_and(|cqe| cqe.status != WcStatus::SUCCESS) {
                    self.rings.sq.note_failed_send();
                }
                let slots = self.rings.sq.complete_requests(1);
                self.context.count_taken(slots);
            }
        }
        if let Some(cqe) = cqe {
            self.context.cqs.push(self.rings.send_cq, cqe);
        }
    }

    #[inline]
    fn complete_recv(&mut self, cqe: &Wc) {
        self.complete_receive(cqe.status);
        self.context.cqs.push(self.rings.recv_cq, cqe);
        if self.rings.srq_share != 0 {
            let newest = self.context.cqs.last_cqe(self.rings.recv_cq);
            self.rings.held.extend(newest);
        }
    }

    #[inline]
    fn is_released(&mut self, ext_buf: ExtBufRef) -> bool {
        // If no reference outlives the acknowledgement, the acknowledgement is the release.
        !self.rings.awaits_releases || self.context.ext_bufs.await_release(ext_buf, self.rings.qpn)
    }

    #[inline]
    fn alloc_ext_buf_ref(&mut self) -> ExtBufRef {
        self.context.ext_bufs.alloc()
    }

    #[inline]
    fn free_ext_buf_ref(&mut self, ext_buf: ExtBufRef) {
        self.context.ext_bufs.free(ext_buf);
    }

    fn await_quiescence(&mut self) {
        self.park(Wait::Quiescence);
    }

    fn await_receive(&mut self) {
        self.park(Wait::Receive);
    }

    fn post_event(&mut self, event: QpEvent) {
        self.rings.events.push(event);
    }
}
