//! Send and receive queues: single-producer single-consumer rings of 64-byte
//! slots from the application to the QP's worker.
//!
//! ```text
//!  +0    tail u32, pending u32        written by the client
//!  +64   head u32, wr_done u32, qp_state u32, worker u32   written by the daemon
//!  +128  slots * 64 bytes
//! ```
//! `head` frees slots (the worker has copied them); `wr_done` counts requests
//! that are finished, which is what max_send_wr and max_recv_wr limit.
//! The `pending` word belongs to the doorbell ring (see [`crate::doorbell`]);
//! receive queues use it only when the QP is in error and posted receives have
//! to be flushed: their doorbell is that of the QP's send queue.

use crate::shared_memory::{OutOfBounds, SharedMemory};
use crate::wqe::{
    RecvWqe, RecvWr, SLOT_LEN, SendWqe, SendWr, WqeError, WqeSlot, slots_per_request,
};
use core::sync::atomic::{AtomicU32, Ordering, fence};
use siw_lockfree::rings::{self as lockfree, SpscConsumer, SpscProducer};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes before the slots.
pub const HEADER: usize = 128;
/// Offset of the producer index.
pub const OFF_TAIL: usize = 0;
/// Offset of the doorbell's pending word.
pub const OFF_PENDING: usize = 4;
/// Offset of the consumer index.
pub const OFF_HEAD: usize = 64;
/// Offset of the count of finished requests.
pub const OFF_WR_DONE: usize = 68;
/// Offset of the QP state (`control::QpState` as u32), send queue only.
pub const OFF_QP_STATE: usize = 72;
/// Offset of the index of the worker that serves the QP, send queue only.
pub const OFF_WORKER: usize = 76;
/// Most slots of one ring.
pub const MAX_RING_SLOTS: u32 = 1 << 20;

/// Why a worker cannot read a work queue any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The indices make no sense: close the client.
    #[error("the work queue's producer index is outside of the ring")]
    InvalidIndex,
    /// A request that the client library would not have written: fail the QP.
    #[error("work request {wr_id:#x}: {error}")]
    Wqe { wr_id: u64, error: WqeError },
}

/// Why a request cannot be queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// ENOMEM in verbs.
    #[error("the work queue is full")]
    Full,
    /// EINVAL in verbs.
    #[error(transparent)]
    Wqe(#[from] WqeError),
}

/// Sizes of a QP's two rings; computed by the daemon, told to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpGeometry {
    /// Slots of the send queue, a power of two.
    pub sq_slots: u32,
    /// Slots of the receive queue, a power of two.
    pub rq_slots: u32,
    /// Offset of the receive queue from the send queue.
    pub rq_offset: usize,
    /// Bytes of both.
    pub len: usize,
}

impl QpGeometry {
    /// None when a ring would exceed [`MAX_RING_SLOTS`].
    pub fn new(
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline: u32,
    ) -> Option<QpGeometry> {
        let slots = |wr: u32, per: usize| {
            let n = wr
                .max(1)
                .checked_mul(u32::try_from(per).ok()?)?
                .checked_next_power_of_two()?;
            (n <= MAX_RING_SLOTS).then_some(n)
        };
        let sq_slots = slots(
            max_send_wr,
            slots_per_request(max_send_sge as usize, max_inline as usize),
        )?;
        let rq_slots = slots(max_recv_wr, slots_per_request(max_recv_sge as usize, 0))?;
        let rq_offset = ring_len(sq_slots);
        Some(QpGeometry {
            sq_slots,
            rq_slots,
            rq_offset,
            len: rq_offset + ring_len(rq_slots),
        })
    }
}

/// Bytes of a ring with `slots` slots.
pub fn ring_len(slots: u32) -> usize {
    HEADER + slots as usize * SLOT_LEN
}

/// Checked pointers into the region, kept alive by the Arc.
#[derive(Clone)]
struct RingMem {
    base: NonNull<u8>,
    _region: Arc<SharedMemory>,
}

// SAFETY: the words are atomics, the slots are copied raw; the Arc keeps the
// mapping alive on whatever thread.
unsafe impl Send for RingMem {}
// SAFETY: as above; slots are only stored to through a `Producer`, which is `&mut`.
unsafe impl Sync for RingMem {}

impl RingMem {
    fn new(region: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        if !offset.is_multiple_of(64) || !slots.is_power_of_two() || slots > MAX_RING_SLOTS {
            return Err(OutOfBounds);
        }
        if !region.is_writable() {
            return Err(OutOfBounds);
        }
        let p = region.ptr_at(offset, ring_len(slots))?;
        Ok(RingMem {
            base: NonNull::new(p).ok_or(OutOfBounds)?,
            _region: region,
        })
    }

    #[inline]
    fn word_at(&self, off: usize) -> &AtomicU32 {
        debug_assert!(off < HEADER && off.is_multiple_of(4));
        // SAFETY: HEADER bytes at base were checked, base is 64-aligned (page
        // aligned mapping plus a multiple of 64), off is one of the constants.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(off).cast()) }
    }

    #[inline]
    fn slot_ptr(&self, i: u32) -> *mut WqeSlot {
        // SAFETY: i was masked by the caller's ring, whose size was checked in `new`.
        unsafe {
            self.base
                .as_ptr()
                .add(HEADER + i as usize * SLOT_LEN)
                .cast()
        }
    }

    #[inline]
    fn load_slot(&self, i: u32) -> WqeSlot {
        // SAFETY: inside and 64-aligned. The producer may write it meanwhile only
        // if it cheats; the copy is validated afterwards.
        unsafe { self.slot_ptr(i).read_volatile() }
    }

    #[inline]
    fn store_slot(&self, i: u32, s: &WqeSlot) {
        // SAFETY: inside and 64-aligned; the slot is reserved by this producer.
        unsafe { self.slot_ptr(i).write(*s) };
    }
}

/// What producers of both kinds share.
struct Producer {
    mem: RingMem,
    ring: SpscProducer,
    posted: u32,
    done: u32,
    max_wr: u32,
}

impl Producer {
    fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        slots: u32,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        let mem = RingMem::new(region, offset, slots)?;
        Ok(Producer {
            mem,
            ring: SpscProducer::new(slots),
            posted: 0,
            done: 0,
            max_wr,
        })
    }

    #[inline]
    fn reserve_slots(&mut self, slots: u32) -> Result<(), PushError> {
        if self.posted.wrapping_sub(self.done) >= self.max_wr {
            self.done = self.mem.word_at(OFF_WR_DONE).load(Ordering::Relaxed);
            if self.posted.wrapping_sub(self.done) >= self.max_wr {
                return Err(PushError::Full);
            }
        }
        if self.ring.reserve_slots(slots, self.mem.word_at(OFF_HEAD)) {
            Ok(())
        } else {
            Err(PushError::Full)
        }
    }

    #[inline]
    fn count_outstanding(&self) -> u32 {
        self.posted
            .wrapping_sub(self.mem.word_at(OFF_WR_DONE).load(Ordering::Relaxed))
    }
}

/// Application's end of a send queue. One thread at a time (`&mut`).
pub struct SqProducer(Producer);

impl SqProducer {
    /// A ring of `slots` at `offset`; at most `max_wr` unfinished requests.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        slots: u32,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        Producer::new(region, offset, slots, max_wr).map(Self)
    }

    /// Writes a request; the worker sees it after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, d: &SendWr<'_>) -> Result<(), PushError> {
        let n = d.slot_count()?;
        self.0.reserve_slots(n)?;
        let Producer { mem, ring, .. } = &self.0;
        d.encode_slots(|i, s| mem.store_slot(ring.slot_index(i), s));
        self.0.ring.mark_filled(n);
        self.0.posted = self.0.posted.wrapping_add(1);
        Ok(())
    }

    /// Shows all pushed requests to the worker. Returns whether the QP's number
    /// has to go on the doorbell ring.
    #[inline]
    pub fn publish_posted(&mut self) -> bool {
        self.0.ring.publish_tail(self.0.mem.word_at(OFF_TAIL));
        lockfree::mark_pending(self.0.mem.word_at(OFF_PENDING))
    }

    /// A view of what the daemon says about the QP, for any thread.
    pub fn new_watch(&self) -> SqWatch {
        SqWatch(self.0.mem.clone())
    }

    /// Requests that are not finished.
    pub fn count_outstanding(&self) -> u32 {
        self.0.count_outstanding()
    }
}

/// What the daemon says about a QP in its send queue's header.
pub struct SqWatch(RingMem);

impl SqWatch {
    /// The QP state that the daemon last wrote (`control::QpState` as u32).
    #[inline]
    pub fn qp_state(&self) -> u32 {
        self.0.word_at(OFF_QP_STATE).load(Ordering::Acquire)
    }

    /// Whose doorbell ring the QP uses. Read it after [`Self::qp_state`]: the
    /// daemon writes it before RTS.
    #[inline]
    pub fn worker_index(&self) -> u32 {
        self.0.word_at(OFF_WORKER).load(Ordering::Relaxed)
    }

    /// Marks the QP as pending without new requests: see [`RqProducer::publish`].
    #[inline]
    pub fn mark_pending(&self) -> bool {
        lockfree::mark_pending(self.0.word_at(OFF_PENDING))
    }

    /// Send requests finished so far, modulo 2^32.
    #[inline]
    pub fn wr_done(&self) -> u32 {
        self.0.word_at(OFF_WR_DONE).load(Ordering::Acquire)
    }
}

/// Application's end of a receive queue.
pub struct RqProducer(Producer);

impl RqProducer {
    /// A ring of `slots` at `offset`; at most `max_wr` unfinished requests.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        slots: u32,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        Producer::new(region, offset, slots, max_wr).map(Self)
    }

    /// Writes a request; the worker sees it after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, d: &RecvWr<'_>) -> Result<(), PushError> {
        let n = d.slot_count()?;
        self.0.reserve_slots(n)?;
        let Producer { mem, ring, .. } = &self.0;
        d.encode_slots(|i, s| mem.store_slot(ring.slot_index(i), s));
        self.0.ring.mark_filled(n);
        self.0.posted = self.0.posted.wrapping_add(1);
        Ok(())
    }

    /// Shows all pushed requests to the worker, which looks by itself when a
    /// message arrives. Only when the QP is in error afterwards
    /// ([`SqWatch::qp_state`]) the caller rings the QP's doorbell, so that the
    /// worker flushes them.
    #[inline]
    pub fn publish_posted(&mut self) {
        self.0.ring.publish_tail(self.0.mem.word_at(OFF_TAIL));
        // Pairs with the fence in `SqConsumer::set_qp_state`: either the worker's
        // flush sees the requests, or the caller sees the error state.
        fence(Ordering::SeqCst);
    }

    /// Requests that are not finished.
    pub fn count_outstanding(&self) -> u32 {
        self.0.count_outstanding()
    }
}

struct Consumer {
    mem: RingMem,
    ring: SpscConsumer,
    done: u32,
}

impl Consumer {
    fn new(region: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        let mem = RingMem::new(region, offset, slots)?;
        Ok(Consumer {
            mem,
            ring: SpscConsumer::new(slots),
            done: 0,
        })
    }

    #[inline]
    fn available_slots(&mut self) -> Result<u32, RingError> {
        self.ring
            .available_slots(self.mem.word_at(OFF_TAIL))
            .map_err(|_| RingError::InvalidIndex)
    }

    /// Has `parse(first slot, slots there, the others by index)` take a request, which
    /// returns how many slots it has.
    #[inline]
    fn pop(
        &mut self,
        parse: impl FnOnce(&WqeSlot, u32, &dyn Fn(u32) -> WqeSlot) -> Result<u32, RingError>,
    ) -> Result<Option<()>, RingError> {
        let have = self.available_slots()?;
        if have == 0 {
            return Ok(None);
        }
        let Consumer { mem, ring, .. } = self;
        let n = parse(&mem.load_slot(ring.slot_index(0)), have, &|i| {
            mem.load_slot(ring.slot_index(i))
        })?;
        self.ring.advance_head(n);
        Ok(Some(()))
    }

    #[inline]
    fn complete_requests(&mut self, n: u32) {
        self.done = self.done.wrapping_add(n);
        self.mem
            .word_at(OFF_WR_DONE)
            .store(self.done, Ordering::Release);
    }

    #[inline]
    fn release_popped(&self) {
        self.ring.release_head(self.mem.word_at(OFF_HEAD));
    }
}

/// Worker's end of a send queue.
pub struct SqConsumer(Consumer);

impl SqConsumer {
    /// A ring of `slots` at `offset`.
    pub fn new(region: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        Consumer::new(region, offset, slots).map(Self)
    }

    /// Clears the doorbell's pending word: after the QP's number was popped from
    /// the ring and before the first [`Self::pop`].
    #[inline]
    pub fn clear_pending(&self) {
        lockfree::clear_pending(self.0.mem.word_at(OFF_PENDING));
    }

    /// Copies the next request out once and validates the copy into `w`. None
    /// when the queue is empty. After an error the queue must not be read again.
    #[inline]
    pub fn pop(&mut self, w: &mut SendWqe) -> Result<Option<()>, RingError> {
        self.0.pop(|first, have, more| {
            w.parse_into(first, have, more)
                .map_err(|error| RingError::Wqe {
                    wr_id: w.wr_id,
                    error,
                })
        })
    }

    /// Whether requests wait (looks at the client's line when none is cached).
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, RingError> {
        Ok(self.0.available_slots()? == 0)
    }

    /// Lets the client reuse the slots of all popped requests; once per batch.
    #[inline]
    pub fn release_popped(&self) {
        self.0.release_popped();
    }

    /// Counts `n` requests as finished, signaled or not.
    #[inline]
    pub fn complete_requests(&mut self, n: u32) {
        self.0.complete_requests(n);
    }

    /// Tells the client the QP's state. When it is ERROR the caller flushes both
    /// queues afterwards.
    pub fn set_qp_state(&self, state: u32) {
        self.0
            .mem
            .word_at(OFF_QP_STATE)
            .store(state, Ordering::Release);
        // Pairs with the fence in `RqProducer::publish`.
        fence(Ordering::SeqCst);
    }

    /// Tells the client whose doorbell ring to use: when the QP is created, and
    /// before [`Self::set_qp_state`] to RTS when the connection goes to another
    /// worker. Clients ring only after they have seen a state beyond IDLE. A worker
    /// that pops the number of a QP it does not own passes it to the owner, and the
    /// owner clears the pending word and looks once when it adopts a QP: otherwise a
    /// number that was lost leaves the word set for ever.
    pub fn set_worker(&self, worker: u32) {
        self.0
            .mem
            .word_at(OFF_WORKER)
            .store(worker, Ordering::Relaxed);
    }

    /// Hints the cache about the client's line and the next slot.
    #[inline]
    pub fn prefetch_next(&self) {
        crate::shared_memory::prefetch_line(self.0.mem.base.as_ptr());
        crate::shared_memory::prefetch_line(self.0.mem.slot_ptr(self.0.ring.slot_index(0)).cast());
    }
}

/// Worker's end of a receive queue.
pub struct RqConsumer(Consumer);

impl RqConsumer {
    /// A ring of `slots` at `offset`.
    pub fn new(region: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        Consumer::new(region, offset, slots).map(Self)
    }

    /// As [`SqConsumer::pop`].
    #[inline]
    pub fn pop(&mut self, w: &mut RecvWqe) -> Result<Option<()>, RingError> {
        self.0.pop(|first, have, more| {
            w.parse_into(first, have, more)
                .map_err(|error| RingError::Wqe {
                    wr_id: w.wr_id,
                    error,
                })
        })
    }

    /// Whether requests wait.
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, RingError> {
        Ok(self.0.available_slots()? == 0)
    }

    /// As [`SqConsumer::release`].
    #[inline]
    pub fn release_popped(&self) {
        self.0.release_popped();
    }

    /// As [`SqConsumer::complete`].
    #[inline]
    pub fn complete_requests(&mut self, n: u32) {
        self.0.complete_requests(n);
    }
}
