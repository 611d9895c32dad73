//! Send and receive queues: single-producer single-consumer rings of 64-byte
//! slots from the application to the QP's worker.
//!
//! ```text
//!  +0    tail u32, pending u32        written by the client
//!  +64   head u32, wr_done u32, qp_state u32, worker u32   written by the daemon
//!  +128  slots * 64 bytes
//! ```
//! Behind the receive queue of a QP lies its state line, with the same words as at +72 and +76 of its send
//! queue: qp_state u32, worker u32. Whoever posts reads them, and the daemon writes them seldom, but the
//! line with `head` in each batch. Libraries without `FEATURE_STATE_LINE` read those at +72.
//!
//! `head` frees slots (the worker has copied them); `wr_done` counts requests
//! that are finished, which is what max_send_wr and max_recv_wr limit.
//! The `pending` word belongs to the doorbell ring (see [`crate::doorbell`]);
//! receive queues use it only when the QP is in error and posted receives have
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
/// Offset of the QP state (`control::QpState` as u32), send queue only.
pub const OFF_QP_STATE: usize = 72;
/// Offset of the index of the worker that serves the QP, send queue only.
pub const OFF_WORKER: usize = 76;
/// Offset of the QP state in the state line.
const LINE_QP_STATE: usize = 0;
/// Offset of the worker's index there.
const LINE_WORKER: usize = 4;
/// Bytes of the state line of a QP.
pub const STATE_LINE_LEN: usize = 64;
/// Slots that are fetched from the client's core before their turn.
const SLOTS_AHEAD: u32 = 4;
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
    Wqe {
        /// Identifies the request in its completion.
        wr_id: u64,
        /// What is wrong with it.
        error: WqeError,
    },
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
    /// Bytes of both, and of the state line behind them.
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

/// Which of the two work queues of a queue pair a ring is: [`SendKind`] or [`ReceiveKind`]. Both
/// are the same ring; they differ in what a request looks like and in how the worker learns of it.
pub trait QueueKind: sealed::Sealed {
    /// What the application posts.
    type Request<'a>: WorkRequest;
    /// What the worker takes.
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
        // header; `new` checked the header with the slots.
        unsafe { self.0.word_at(offset) }
    }

    #[inline]
    fn slot_ptr(&self, index: u32) -> *mut WqeSlot {
        self.0.ptr_at(HEADER + index as usize * SLOT_LEN).cast()
    }

    #[inline]
    fn load_slot(&self, index: u32) -> WqeSlot {
        // SAFETY: the index was masked by the ring, whose size `new` checked; 64-aligned. The
        // producer may write it meanwhile only if it cheats; the copy is validated afterwards.
        unsafe { self.slot_ptr(index).read_volatile() }
    }

    #[inline(always)]
    fn prefetch_slot(&self, index: u32) {
        prefetch_line(self.slot_ptr(index).cast());
    }

    /// One 64-bit word of a slot.
    #[inline(always)]
    fn load_word(&self, index: u32, word: usize) -> u64 {
        debug_assert!(word < SLOT_LEN / 8);
        // SAFETY: as in `load_slot`.
        unsafe { self.slot_ptr(index).cast::<u64>().add(word).read_volatile() }
    }

    /// The first words of a slot.
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
    /// A ring of `slots` at `offset`; at most `max_wr` unfinished requests.
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
            // Relaxed: a mere limit. That the slots are free is what `release_head` says.
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

    /// Requests that are not finished.
    #[inline]
    pub fn count_outstanding(&self) -> u32 {
        let done = self.memory.header_word(OFF_WR_DONE);
        self.posted.wrapping_sub(done.load(Ordering::Relaxed))
    }
}

/// How far a queue was filled at a time ([`SqProducer::mark`]).
#[derive(Debug, Clone, Copy)]
pub struct QueueMark {
    filled: u32,
    posted: u32,
}

impl WorkQueueProducer<SendKind> {
    /// Shows all pushed requests to the worker. Returns whether the QP's number
    /// has to go on the doorbell ring.
    #[inline]
    pub fn publish_posted(&mut self) -> bool {
        self.ring.publish_tail(self.memory.header_word(OFF_TAIL));
        doorbell::mark_pending(self.memory.header_word(OFF_PENDING))
    }

    /// What was pushed so far.
    pub fn mark(&self) -> QueueMark {
        QueueMark {
            filled: self.ring.count_filled(),
            posted: self.posted,
        }
    }

    /// Takes back what was pushed since `mark`, which must not be published yet; how many requests
    /// these were.
    pub fn withdraw_since(&mut self, mark: QueueMark) -> u32 {
        let slots = self.ring.count_filled().wrapping_sub(mark.filled);
        self.ring.withdraw_filled(slots);
        let requests = self.posted.wrapping_sub(mark.posted);
        self.posted = mark.posted;
        requests
    }

    /// A view of what the daemon says about the QP, for any thread.
    pub fn new_watch(&self) -> SqWatch {
        SqWatch::new(self.memory.clone())
    }
}

impl WorkQueueProducer<ReceiveKind> {
    /// Shows all pushed requests to the worker, which looks by itself when a
    /// message arrives. Only when the QP is in error afterwards
    /// ([`SqWatch::qp_state`]) the caller rings the QP's doorbell, so that the
    /// worker flushes them.
    #[inline]
    pub fn publish_posted(&mut self) {
        self.ring.publish_tail(self.memory.header_word(OFF_TAIL));
        // Pairs with the fence in `set_qp_state`: either the worker's
        // flush sees the requests, or the caller sees the error state.
        fence(Ordering::SeqCst);
    }
}

/// Worker's end of a work queue.
pub struct WorkQueueConsumer<K> {
    memory: WorkQueueMemory,
    ring: SpscConsumer,
    done: u32,
    /// Of the QP, in its send queue.
    state_line: Option<RingMemory>,
    kind: PhantomData<K>,
}

impl<K: QueueKind> WorkQueueConsumer<K> {
    /// A ring of `slots` at `offset`.
    pub fn new(memory: Arc<SharedMemory>, offset: usize, slots: u32) -> Result<Self, OutOfBounds> {
        let memory = WorkQueueMemory::new(memory, offset, slots)?;
        Ok(WorkQueueConsumer {
            memory,
            ring: SpscConsumer::new(slots),
            done: 0,
            state_line: None,
            kind: PhantomData,
        })
    }

    #[inline]
    fn available_slots(&mut self) -> Result<u32, RingError> {
        self.ring
            .available_slots(self.memory.header_word(OFF_TAIL))
            .map_err(|_| RingError::InvalidIndex)
    }

    /// Copies the next request out once and validates the copy into `element`. None
    /// when the queue is empty. After an error the queue must not be read again.
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

    /// Fetches the slots behind the next one, of `available`.
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

    /// Whether requests wait (looks at the client's line when none is cached).
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, RingError> {
        Ok(self.available_slots()? == 0)
    }

    /// Lets the client reuse the slots of all popped requests, and returns how many there are; once for
    /// several requests, since the client reads the line.
    #[inline]
    pub fn release_popped(&mut self) -> u32 {
        self.ring.release_head(self.memory.header_word(OFF_HEAD))
    }

    /// Counts `count` requests as finished, signaled or not: before their completions can be seen, since
    /// who sees one may post at once. The slots of all popped requests are the client's again: returns
    /// how many they are.
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
    /// The same of a QP with a state line at `offset`.
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

    /// Stores a word of the QP's state in both places where it is read.
    fn store_state(&self, (header_at, line_at): (usize, usize), value: u32) {
        self.memory
            .header_word(header_at)
            .store(value, Ordering::Release);
        if let Some(line) = &self.state_line {
            // SAFETY: a multiple of 4 inside the line.
            unsafe { line.word_at(line_at) }.store(value, Ordering::Release);
        }
    }

    /// A copy of the next request, if it is a [`PlainSend`]; [`Self::take_peeked`] takes it out. `None`:
    /// [`Self::pop`] tells what is there.
    #[inline(always)]
    pub fn peek_plain(&mut self) -> Option<PlainSend> {
        let was_drained = self.ring.is_drained();
        let available = self.available_slots().ok().filter(|&slots| slots > 0)?;
        self.prefetch_slots(was_drained, available);
        let index = self.ring.slot_index(0);
        PlainSend::parse(|i| self.memory.load_word(index, i))
    }

    /// Takes out the request that [`Self::peek_plain`] returned.
    #[inline(always)]
    pub fn take_peeked(&mut self) {
        self.ring.advance_head(1);
    }

    /// Fetches what [`Self::pop`] and [`Self::complete_requests`] touch first from the client's core, before
    /// any of it is waited for: the producer's line, the next slot, and the line of the consumer, to write it.
    #[inline]
    pub fn prefetch_next(&self) {
        self.memory.prefetch_slot(self.ring.slot_index(0));
        prefetch_line(self.memory.header_word(OFF_TAIL).as_ptr().cast());
        prefetch_line_to_write(self.memory.header_word(OFF_HEAD).as_ptr().cast());
    }

    /// Up to where the client has posted, as it wrote it: it changes when the client posts.
    #[inline]
    pub fn producer_index(&self) -> u32 {
        // Relaxed: `pop` looks again, and pairs with the Release of the client.
        self.memory.header_word(OFF_TAIL).load(Ordering::Relaxed)
    }

    /// Clears the doorbell's pending word: after the QP's number was popped from the ring and before the
    /// first [`Self::pop`]; or before the last look at [`Self::producer_index`] without a doorbell.
    #[inline]
    pub fn clear_pending(&self) {
        doorbell::clear_pending(self.memory.header_word(OFF_PENDING));
    }

    /// Tells the client the QP's state. When it is ERROR the caller flushes both
    /// queues afterwards.
    pub fn set_qp_state(&self, state: u32) {
        // Pairs with the Acquire in `SqWatch::qp_state`.
        self.store_state((OFF_QP_STATE, LINE_QP_STATE), state);
        // Pairs with the fence in `RqProducer::publish_posted`.
        fence(Ordering::SeqCst);
    }

    /// Tells the client whose doorbell ring to use: when the QP is created, and
    /// before [`Self::set_qp_state`] to RTS when the connection goes to another
    /// worker. Clients ring only after they have seen a state beyond IDLE. A worker
    /// that pops the number of a QP it does not own passes it to the owner, and the
    /// owner clears the pending word and looks once when it installs a QP: otherwise a
    /// number that was lost leaves the word set for ever.
    pub fn set_worker(&self, worker: u32) {
        self.store_state((OFF_WORKER, LINE_WORKER), worker);
    }
}

/// Validates a request into `element` from slots that `load` copies out of shared memory, at most
/// `available`, each copied once; returns how many slots it has.
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
