//! Send and receive queues: single-producer single-consumer rings of 64-byte
//! slots from the application to the QP's worker.
//!
//! ```text
//!  +0    tail u32, pending u32        written by the client
//!  +64   head u32, wr_done u32   written by the daemon
//!  +128  slots * 64 bytes
//! ```
//! A QP's state line follows its receive queue: qp_state u32 (`control::QpState`), worker u32,
//! failed u32 (`FAILED_SENDS`, `FAILED_RECEIVES`), sends_before_failure u32,
//! receives_before_failure u32. The posting thread reads the first two words, and the daemon writes
//! them seldom, whereas it writes the line with `head` in each batch.
//!
//! `head` frees slots (the worker has copied them); `wr_done` counts finished requests, to which
//! max_send_wr and max_recv_wr apply. The `pending` word belongs to the doorbell ring (see
//! [`crate::doorbell`]). Receive queues use it only when the QP is in error and posted receives have
//! to be flushed: their doorbell is that of the QP's send queue.

mod sq_watch;

pub use sq_watch::SqWatch;

use crate::prefetch::{prefetch_line, prefetch_line_to_write};
use crate::ring_memory::RingMemory;
use crate::shared_memory::{OutOfBounds, SharedMemory};
use crate::wqe::{
    PLAIN_WORDS, PlainSend, RecvWqe, RecvWr, SLOT_LEN, SendWqe, SendWr, WorkQueueElement,
    WorkRequest, WqeError, WqeSlot, slots_per_request,
};
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU32, Ordering, fence};
use siw_lockfree::doorbell;
use siw_lockfree::spsc::{SpscConsumer, SpscProducer};
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
/// Offset of the QP state (`control::QpState` as u32) in the state line.
const OFF_QP_STATE: usize = 0;
/// Offset of the index of the worker that serves the QP, in the state line.
pub const OFF_WORKER: usize = 4;
/// Offset of the flags of queues with a failed request, in the state line.
const OFF_FAILED: usize = 8;
/// Offset of the number of sends before the first failed one, in the state line.
const OFF_SENDS_BEFORE_FAILURE: usize = 12;
/// Offset of the number of receives before the first failed one, in the state line.
const OFF_RECEIVES_BEFORE_FAILURE: usize = 16;
/// Flag: a send has failed, and all later ones fail.
const FAILED_SENDS: u32 = 1;
/// Flag: a receive has failed, and all later ones fail.
const FAILED_RECEIVES: u32 = 2;
/// Bytes of a QP's state line.
pub const STATE_LINE_LEN: usize = 64;
/// Number of slots that are prefetched from the client's core before their turn.
const SLOTS_AHEAD: u32 = 4;
/// Maximum number of slots of one ring.
pub const MAX_RING_SLOTS: u32 = 1 << 20;

/// Reason why a worker cannot continue to read a work queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The indices are invalid: disconnect the client.
    #[error("the work queue's producer index is outside the ring")]
    InvalidIndex,
    /// A request that the client library would not have written: fail the QP.
    #[error("work request {wr_id:#x}: {error}")]
    Wqe {
        /// `wr_id` of the request's completion.
        wr_id: u64,
        /// The defect of the request.
        error: WqeError,
    },
}

/// Reason why a request cannot be queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// ENOMEM in verbs.
    #[error("the work queue is full")]
    Full,
    /// EINVAL in verbs.
    #[error(transparent)]
    Wqe(#[from] WqeError),
}

/// Sizes of a QP's two rings; computed by the daemon, sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct QpGeometry {
    /// Slots of the send queue, a power of two.
    pub sq_slots: u32,
    /// Slots of the receive queue, a power of two.
    pub rq_slots: u32,
    /// Offset of the receive queue from the send queue.
    pub rq_offset: usize,
    /// Bytes of both, and of the state line after them.
    pub len: usize,
}

impl QpGeometry {
    /// Computes the sizes; `None` when a ring would exceed [`MAX_RING_SLOTS`].
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
            len: state_offset(rq_offset, rq_slots) + STATE_LINE_LEN,
        })
    }
}

/// Offset of the state line of a QP from its send queue.
pub fn state_offset(rq_offset: usize, rq_slots: u32) -> usize {
    rq_offset + ring_len(rq_slots)
}

/// Bytes of a ring with `slots` slots.
pub fn ring_len(slots: u32) -> usize {
    HEADER + slots as usize * SLOT_LEN
}

/// Kind of a queue pair's work queue: [`SendKind`] or [`ReceiveKind`]. Both use the same ring; they
/// differ in the form of a request and in how the worker is notified.
pub trait QueueKind: sealed::Sealed {
    /// Request as posted by the application.
    type Request<'a>: WorkRequest;
    /// Request as taken by the worker.
    type Element: WorkQueueElement;
}

/// The send queue.
#[derive(Debug)]
pub enum SendKind {}

/// The receive queue.
#[derive(Debug)]
pub enum ReceiveKind {}

impl QueueKind for SendKind {
    type Request<'a> = SendWr<'a>;
    type Element = SendWqe;
}

impl QueueKind for ReceiveKind {
    type Request<'a> = RecvWr<'a>;
    type Element = RecvWqe;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::SendKind {}
    impl Sealed for super::ReceiveKind {}
}

/// Application's end of a send queue.
pub type SqProducer = WorkQueueProducer<SendKind>;
/// Application's end of a receive queue.
pub type RqProducer = WorkQueueProducer<ReceiveKind>;
/// Worker's end of a send queue.
pub type SqConsumer = WorkQueueConsumer<SendKind>;
/// Worker's end of a receive queue.
pub type RqConsumer = WorkQueueConsumer<ReceiveKind>;

/// The header words and the slots of one ring.
#[derive(Clone)]
struct WorkQueueMemory(RingMemory);

impl WorkQueueMemory {
    fn new(memory: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        if !slots.is_power_of_two() || slots > MAX_RING_SLOTS {
            return Err(OutOfBounds);
        }
        RingMemory::new(memory, offset, ring_len(slots)).map(Self)
    }

    #[inline]
    fn header_word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset < HEADER && offset.is_multiple_of(4));
        // SAFETY: the offset is one of the constants above, which are multiples of 4 inside the
        // header; `new` checked the header together with the slots.
        unsafe { self.0.word_at(offset) }
    }

    #[inline]
    fn slot_ptr(&self, index: u32) -> *mut WqeSlot {
        self.0.ptr_at(HEADER + index as usize * SLOT_LEN).cast()
    }

    #[inline]
    fn load_slot(&self, index: u32) -> WqeSlot {
        // SAFETY: the index was masked by the ring, whose size `new` checked; 64-aligned. Only a
        // misbehaving producer writes it meanwhile; the copy is validated afterwards.
        unsafe { self.slot_ptr(index).read_volatile() }
    }

    #[inline(always)]
    fn prefetch_slot(&self, index: u32) {
        prefetch_line(self.slot_ptr(index).cast());
    }

    /// Loads one 64-bit word of a slot.
    #[inline(always)]
    fn load_word(&self, index: u32, word: usize) -> u64 {
        debug_assert!(word < SLOT_LEN / 8);
        // SAFETY: as in `load_slot`.
        unsafe { self.slot_ptr(index).cast::<u64>().add(word).read_volatile() }
    }

    /// Stores the first words of a slot.
    #[inline(always)]
    fn store_words(&self, index: u32, words: [u64; PLAIN_WORDS]) {
        // SAFETY: as in `store_slot`.
        unsafe {
            self.slot_ptr(index)
                .cast::<[u64; PLAIN_WORDS]>()
                .write(words)
        };
    }

    #[inline]
    fn store_slot(&self, index: u32, slot: &WqeSlot) {
        // SAFETY: as in `load_slot`; the slot is reserved by this producer, so the consumer does
        // not read it.
        unsafe { self.slot_ptr(index).write(*slot) };
    }
}

/// Application's end of a work queue. One thread at a time (`&mut`).
pub struct WorkQueueProducer<K> {
    memory: WorkQueueMemory,
    ring: SpscProducer,
    posted: u32,
    done: u32,
    max_wr: u32,
    kind: PhantomData<K>,
}

impl<K: QueueKind> WorkQueueProducer<K> {
    /// The producer for a ring of `slots` slots at `offset`, with at most `max_wr` unfinished
    /// requests.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        slots: u32,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        let memory = WorkQueueMemory::new(memory, offset, slots)?;
        Ok(WorkQueueProducer {
            memory,
            ring: SpscProducer::new(slots),
            posted: 0,
            done: 0,
            max_wr,
            kind: PhantomData,
        })
    }

    /// Writes a request; the worker sees it after `publish_posted`.
    #[inline]
    pub fn push(&mut self, request: &K::Request<'_>) -> Result<(), PushError> {
        if let Some(words) = request.plain_words() {
            self.reserve_slots(1)?;
            self.memory.store_words(self.ring.slot_index(0), words);
            self.ring.mark_filled(1);
            self.posted = self.posted.wrapping_add(1);
            return Ok(());
        }
        let slots = request.slot_count()?;
        self.reserve_slots(slots)?;
        let (memory, ring) = (&self.memory, &self.ring);
        request.encode_slots(|i, slot| memory.store_slot(ring.slot_index(i), slot));
        self.ring.mark_filled(slots);
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn reserve_slots(&mut self, slots: u32) -> Result<(), PushError> {
        if self.posted.wrapping_sub(self.done) >= self.max_wr {
            // Relaxed: only a limit. `release_head` guarantees that the slots are free.
            self.done = self.memory.header_word(OFF_WR_DONE).load(Ordering::Relaxed);
            if self.posted.wrapping_sub(self.done) >= self.max_wr {
                return Err(PushError::Full);
            }
        }
        let head = self.memory.header_word(OFF_HEAD);
        if self.ring.reserve_slots(slots, head) {
            Ok(())
        } else {
            Err(PushError::Full)
        }
    }

    /// Number of unfinished requests.
    #[inline]
    pub fn count_outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.wr_done())
    }

    /// Requests finished so far, modulo 2^32. The receive queue also counts the receives that the QP
    /// took from a shared receive queue.
    #[inline]
    pub fn wr_done(&self) -> u32 {
        // Pairs with the Release in `complete_requests`.
        let done = self.memory.header_word(OFF_WR_DONE);
        done.load(Ordering::Acquire)
    }
}

/// Fill level of a queue at some time ([`SqProducer::mark`]).
#[derive(Debug, Clone, Copy)]
pub struct QueueMark {
    filled: u32,
    posted: u32,
}

impl WorkQueueProducer<SendKind> {
    /// Publishes all pushed requests to the worker. Returns whether the QP's number has to be put on
    /// the doorbell ring.
    #[inline]
    pub fn publish_posted(&mut self) -> bool {
        self.ring.publish_tail(self.memory.header_word(OFF_TAIL));
        doorbell::mark_pending(self.memory.header_word(OFF_PENDING))
    }

    /// Records the current fill level.
    pub fn mark(&self) -> QueueMark {
        QueueMark {
            filled: self.ring.count_filled(),
            posted: self.posted,
        }
    }

    /// Withdraws the requests pushed since `mark`, which must not be published yet; returns their
    /// number.
    pub fn withdraw_since(&mut self, mark: QueueMark) -> u32 {
        let slots = self.ring.count_filled().wrapping_sub(mark.filled);
        self.ring.withdraw_filled(slots);
        let requests = self.posted.wrapping_sub(mark.posted);
        self.posted = mark.posted;
        requests
    }

    /// A view of the QP state published by the daemon, for any thread. `offset` is that of the state
    /// line.
    pub fn new_watch(
        &self,
        memory: Arc<SharedMemory>,
        offset: usize,
    ) -> Result<SqWatch, OutOfBounds> {
        SqWatch::new(self.memory.clone(), memory, offset)
    }
}

impl WorkQueueProducer<ReceiveKind> {
    /// Publishes all pushed requests to the worker, which reads the queue when a message arrives. If
    /// the QP is in error afterwards ([`SqWatch::qp_state`]), the caller rings the QP's doorbell so
    /// that the worker flushes the requests.
    #[inline]
    pub fn publish_posted(&mut self) {
        self.ring.publish_tail(self.memory.header_word(OFF_TAIL));
        // Pairs with the fence in `set_qp_state`: either the worker's flush sees the requests, or the
        // caller sees the error state.
        fence(Ordering::SeqCst);
    }
}

/// Worker's end of a work queue.
pub struct WorkQueueConsumer<K> {
    memory: WorkQueueMemory,
    ring: SpscConsumer,
    done: u32,
    /// The QP's state line; only in the send queue.
    state_line: Option<RingMemory>,
    /// Flags stored in the state line.
    failed: u32,
    kind: PhantomData<K>,
}

impl<K: QueueKind> WorkQueueConsumer<K> {
    /// The consumer for a ring of `slots` slots at `offset`.
    pub fn new(memory: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        let memory = WorkQueueMemory::new(memory, offset, slots)?;
        Ok(WorkQueueConsumer {
            memory,
            ring: SpscConsumer::new(slots),
            done: 0,
            state_line: None,
            failed: 0,
            kind: PhantomData,
        })
    }

    #[inline]
    fn available_slots(&mut self) -> Result<u32, RingError> {
        self.ring
            .available_slots(self.memory.header_word(OFF_TAIL))
            .map_err(|_| RingError::InvalidIndex)
    }

    /// Copies the next request once and validates the copy into `element`. `None` when the queue is
    /// empty. After an error the queue must not be read again.
    #[inline(always)]
    pub fn pop(&mut self, element: &mut K::Element) -> Result<Option<()>, RingError> {
        let was_drained = self.ring.is_drained();
        let available = self.available_slots()?;
        if available == 0 {
            return Ok(None);
        }
        self.prefetch_slots(was_drained, available);
        let (memory, ring) = (&self.memory, &self.ring);
        let index = ring.slot_index(0);
        let slots = if element.parse_plain(|i| memory.load_word(index, i)) {
            1
        } else {
            let load = |i: u32| memory.load_slot(ring.slot_index(i));
            parse_copied(element, available, load)?
        };
        self.ring.advance_head(slots);
        Ok(Some(()))
    }

    /// Prefetches the slots after the next one, of `available` slots.
    #[inline(always)]
    fn prefetch_slots(&self, was_drained: bool, available: u32) {
        let (memory, ring) = (&self.memory, &self.ring);
        if was_drained {
            for ahead in 1..available.min(SLOTS_AHEAD) {
                memory.prefetch_slot(ring.slot_index(ahead));
            }
        }
        if available > SLOTS_AHEAD {
            memory.prefetch_slot(ring.slot_index(SLOTS_AHEAD));
        }
    }

    /// Returns whether the queue is empty (reads the client's line when no cached request is left).
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, RingError> {
        Ok(self.available_slots()? == 0)
    }

    /// Lets the client reuse the slots of all popped requests, and returns their number. Call it once
    /// per several requests, since the client reads the line.
    #[inline]
    pub fn release_popped(&mut self) -> u32 {
        self.ring.release_head(self.memory.header_word(OFF_HEAD))
    }

    /// Counts `count` requests as finished, signaled or not. Call it before their completions become
    /// visible, since a client that sees one may post at once. Also releases the slots of all popped
    /// requests; returns their number.
    #[inline]
    pub fn complete_requests(&mut self, count: u32) -> u32 {
        let slots = self.release_popped();
        self.done = self.done.wrapping_add(count);
        // Pairs with the Acquire in `SqWatch::wr_done`.
        self.memory
            .header_word(OFF_WR_DONE)
            .store(self.done, Ordering::Release);
        slots
    }
}

impl WorkQueueConsumer<SendKind> {
    /// Adds the QP's state line at `offset`.
    pub fn with_state_line(
        self,
        memory: Arc<SharedMemory>,
        offset: usize,
    ) -> Result<Self, OutOfBounds> {
        let line = RingMemory::new(memory, offset, STATE_LINE_LEN)?;
        Ok(WorkQueueConsumer {
            state_line: Some(line),
            ..self
        })
    }

    /// Stores a word of the state line.
    fn store_state(&self, offset: usize, value: u32) {
        if let Some(line) = &self.state_line {
            // SAFETY: a multiple of 4 inside the line.
            unsafe { line.word_at(offset) }.store(value, Ordering::Release);
        }
    }

    /// Returns a copy of the next request, if it is a [`PlainSend`]; [`Self::take_peeked`] then
    /// removes it. `None`: call [`Self::pop`] instead.
    #[inline(always)]
    pub fn peek_plain(&mut self) -> Option<PlainSend> {
        let was_drained = self.ring.is_drained();
        let available = self.available_slots().ok().filter(|&slots| slots > 0)?;
        self.prefetch_slots(was_drained, available);
        let index = self.ring.slot_index(0);
        PlainSend::parse(|i| self.memory.load_word(index, i))
    }

    /// Removes the request that [`Self::peek_plain`] returned.
    #[inline(always)]
    pub fn take_peeked(&mut self) {
        self.ring.advance_head(1);
    }

    /// Prefetches the lines from the client's core that [`Self::pop`] and [`Self::complete_requests`]
    /// touch first: the producer's line, the next slot, and, for writing, the consumer's line.
    #[inline]
    pub fn prefetch_next(&self) {
        self.memory.prefetch_slot(self.ring.slot_index(0));
        prefetch_line(self.memory.header_word(OFF_TAIL).as_ptr().cast());
        self.prefetch_to_complete();
    }

    /// Prefetches the line that [`Self::complete_requests`] writes.
    #[inline]
    pub fn prefetch_to_complete(&self) {
        prefetch_line_to_write(self.memory.header_word(OFF_HEAD).as_ptr().cast());
    }

    /// The client's producer index, unchecked: it changes when the client posts.
    #[inline]
    pub fn producer_index(&self) -> u32 {
        // Relaxed: `pop` reads it again, and pairs with the client's Release.
        self.memory.header_word(OFF_TAIL).load(Ordering::Relaxed)
    }

    /// Clears the doorbell's pending word. Call it after the QP's number was popped from the ring and
    /// before the first [`Self::pop`], or before the last check of [`Self::producer_index`] without a
    /// doorbell.
    #[inline]
    pub fn clear_pending(&self) {
        doorbell::clear_pending(self.memory.header_word(OFF_PENDING));
    }

    /// Publishes the QP's state to the client. When it is ERROR, the caller flushes both queues
    /// afterwards.
    pub fn set_qp_state(&self, state: u32) {
        // Pairs with the Acquire in `SqWatch::qp_state`.
        self.store_state(OFF_QP_STATE, state);
        // Pairs with the fence in `RqProducer::publish_posted`.
        fence(Ordering::SeqCst);
    }

    /// Publishes that the next send to be finished fails. Later sends of the QP fail, too, and so the
    /// number of successful ones is known. Call it before [`Self::complete_requests`].
    #[cold]
    pub fn note_failed_send(&mut self) {
        self.note_failure(FAILED_SENDS, OFF_SENDS_BEFORE_FAILURE, self.done);
    }

    /// As [`Self::note_failed_send`], for the next receive of the QP, whose receive queue is `queue`.
    #[cold]
    pub fn note_failed_receive(&mut self, queue: &RqConsumer) {
        self.note_failure(FAILED_RECEIVES, OFF_RECEIVES_BEFORE_FAILURE, queue.done);
    }

    fn note_failure(&mut self, flag: u32, offset: usize, before: u32) {
        if self.failed & flag == 0 {
            self.failed |= flag;
            self.store_state(offset, before);
            self.store_state(OFF_FAILED, self.failed);
        }
    }

    /// Publishes the worker whose doorbell ring the client has to use: when the QP is created, and
    /// before [`Self::set_qp_state`] to RTS when the connection moves to another worker. Clients ring
    /// only after they have seen a state beyond IDLE. A worker that pops the number of a QP that it
    /// does not own passes it to the owner. The owner clears the pending word and checks the queue
    /// once when it installs a QP: otherwise a lost number would leave the word set forever.
    pub fn set_worker(&self, worker: u32) {
        self.store_state(OFF_WORKER, worker);
    }
}

/// Validates a request into `element` from slots that `load` copies out of shared memory: at most
/// `available` slots, each copied once. Returns the number of slots of the request.
pub(crate) fn parse_copied<E: WorkQueueElement>(
    element: &mut E,
    available: u32,
    load: impl Fn(u32) -> WqeSlot,
) -> Result<u32, RingError> {
    let first = load(0);
    element
        .parse_into(&first, available, load)
        .map_err(|error| RingError::Wqe {
            wr_id: element.wr_id(),
            error,
        })
}

#[cfg(feature = "serde")]
mod saved {
    use super::{OutOfBounds, PhantomData, SpscConsumer};
    use super::{QueueKind, STATE_LINE_LEN, WorkQueueConsumer, WorkQueueMemory, ring_len};
    use crate::ring_memory::RingPlace;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    /// A consumer as data. Its copy of the client's index is not part of it: that is read and checked again.
    #[derive(Serialize, Deserialize)]
    struct SavedConsumer {
        memory: RingPlace,
        state_line: Option<RingPlace>,
        /// See [`SpscConsumer::position`].
        position: (u32, u32, u32),
        done: u32,
        failed: u32,
    }

    impl<K> Serialize for WorkQueueConsumer<K> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let saved = SavedConsumer {
                memory: self.memory.0.place(),
                state_line: self.state_line.as_ref().map(super::RingMemory::place),
                position: self.ring.position(),
                done: self.done,
                failed: self.failed,
            };
            saved.serialize(serializer)
        }
    }

    impl<'de, K: QueueKind> Deserialize<'de> for WorkQueueConsumer<K> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let saved = SavedConsumer::deserialize(deserializer)?;
            saved.restore().map_err(D::Error::custom)
        }
    }

    impl SavedConsumer {
        fn restore<K: QueueKind>(self) -> Result<WorkQueueConsumer<K>, OutOfBounds> {
            let ring = SpscConsumer::resume(self.position).map_err(|_| OutOfBounds)?;
            let slots = self.position.0;
            if slots > super::MAX_RING_SLOTS {
                return Err(OutOfBounds);
            }
            let state_line = self.state_line.map(|place| place.open(STATE_LINE_LEN));
            Ok(WorkQueueConsumer {
                memory: WorkQueueMemory(self.memory.open(ring_len(slots))?),
                ring,
                done: self.done,
                state_line: state_line.transpose()?,
                failed: self.failed,
                kind: PhantomData,
            })
        }
    }
}
