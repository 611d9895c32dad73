//! Completion queues: one single-producer single-consumer ring per worker, so that workers never
//! lock; the client polls the rings of the workers that have written completions.
//!
//! ```text
//!  +0    armed u32                               armed by the client, taken by a worker
//!  +64   workers u64 (bit mask), error u32       written by the daemon
//!  +128  per worker: head u32 (client), pad to 64, entries * 64-byte CQE
//! ```
//! A CQE is valid when its `seq` equals its running number plus one: the client
//! needs no producer index, and touches one line per completion.

use crate::prefetch::prefetch_line_to_write;
use crate::ring_memory::RingMemory;
use crate::shared_memory::{OutOfBounds, SharedMemory};
use crate::work_completion::{Wc, WcFlags, WcStatus};
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use siw_lockfree::completion;
use std::sync::Arc;

/// Bytes before the rings.
pub const HEADER: usize = 128;
/// Offset of the arm word.
pub const OFF_ARMED: usize = 0;
/// Offset of the mask of workers that have written.
pub const OFF_WORKERS: usize = 64;
/// Offset of the error word: an errno, 0 when the queue works.
pub const OFF_ERROR: usize = 72;
/// Bytes before the entries of each ring.
pub const RING_HEADER: usize = 64;
/// Maximum number of workers: bits of the mask.
pub const MAX_WORKERS: u32 = 64;
/// Maximum number of entries of one ring.
pub const MAX_ENTRIES: u32 = 1 << 22;

/// The client does not poll, and its ring is full. Fatal for the CQ and for the QPs that complete
/// into it (CQ_ERR), and for no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("completion queue overflow")]
pub struct CqOverflow;

/// Sizes of a completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CqGeometry {
    /// Entries of each worker's ring, a power of two.
    pub entries: u32,
    /// Number of rings.
    pub workers: u32,
    /// Total size in bytes.
    pub len: usize,
}

impl CqGeometry {
    /// Sizes of a queue of at least `cqe` entries; `None` when it is too large.
    pub fn new(cqe: u32, workers: u32) -> Option<CqGeometry> {
        let entries = cqe.max(1).checked_next_power_of_two()?;
        Self::from_exact(entries, workers)
    }

    /// Sizes from the numbers in a reply.
    pub fn from_exact(entries: u32, workers: u32) -> Option<CqGeometry> {
        if entries > MAX_ENTRIES
            || !entries.is_power_of_two()
            || workers == 0
            || workers > MAX_WORKERS
        {
            return None;
        }
        let len = HEADER + workers as usize * ring_stride(entries);
        Some(CqGeometry {
            entries,
            workers,
            len,
        })
    }
}

fn ring_stride(entries: u32) -> usize {
    RING_HEADER + entries as usize * size_of::<Wc>()
}

/// The words and entries of all rings of a queue.
struct CqMemory {
    rings: RingMemory,
    geometry: CqGeometry,
}

impl CqMemory {
    fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
    ) -> Result<Self, OutOfBounds> {
        let geometry =
            CqGeometry::from_exact(geometry.entries, geometry.workers).ok_or(OutOfBounds)?;
        Ok(CqMemory {
            rings: RingMemory::new(memory, offset, geometry.len)?,
            geometry,
        })
    }

    #[inline]
    fn armed_word(&self) -> &AtomicU32 {
        // SAFETY: a multiple of 4 inside the header, which `new` checked.
        unsafe { self.rings.word_at(OFF_ARMED) }
    }

    #[inline]
    fn error_word(&self) -> &AtomicU32 {
        // SAFETY: as in `armed_word`.
        unsafe { self.rings.word_at(OFF_ERROR) }
    }

    #[inline]
    fn workers_mask(&self) -> &AtomicU64 {
        // SAFETY: a multiple of 8 inside the header.
        unsafe { self.rings.long_word_at(OFF_WORKERS) }
    }

    #[inline]
    fn ring_offset(&self, worker: u32) -> usize {
        debug_assert!(worker < self.geometry.workers);
        HEADER + worker as usize * ring_stride(self.geometry.entries)
    }

    #[inline]
    fn head_word(&self, worker: u32) -> &AtomicU32 {
        // SAFETY: the first word of the ring of a worker that exists; rings are 64-aligned.
        unsafe { self.rings.word_at(self.ring_offset(worker)) }
    }

    #[inline]
    fn entry_offset(&self, worker: u32, position: u32) -> usize {
        let index = (position & (self.geometry.entries - 1)) as usize;
        self.ring_offset(worker) + RING_HEADER + index * size_of::<Wc>()
    }

    #[inline]
    fn entry_ptr(&self, worker: u32, position: u32) -> *mut Wc {
        let offset = self.entry_offset(worker, position);
        self.rings.ptr_at(offset).cast()
    }

    #[inline]
    fn sequence_word(&self, worker: u32, position: u32) -> &AtomicU32 {
        let offset = self.entry_offset(worker, position) + offset_of!(Wc, seq);
        // SAFETY: a word of an entry whose position is masked, of a worker that exists.
        unsafe { self.rings.word_at(offset) }
    }
}

/// Distance in entries at which the line of an entry is prefetched from the client's core.
const ENTRIES_AHEAD: u32 = 4;

/// One worker's end of a completion queue.
pub struct CqProducer {
    memory: CqMemory,
    worker: u32,
    tail: u32,
    head: u32,
    /// Completions were pushed since the last [`Self::take_event`].
    has_unflushed: bool,
    /// A solicited or failed completion was among them.
    solicited: bool,
    /// The worker's bit is set in the mask.
    announced: bool,
}

impl CqProducer {
    /// The producer for `worker`'s ring in the queue at `offset`.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
        worker: u32,
    ) -> Result<Self, OutOfBounds> {
        let memory = CqMemory::new(memory, offset, geometry)?;
        if worker >= memory.geometry.workers {
            return Err(OutOfBounds);
        }
        Ok(CqProducer {
            memory,
            worker,
            tail: 0,
            head: 0,
            has_unflushed: false,
            solicited: false,
            announced: false,
        })
    }

    /// Appends a completion, which the client can poll at once. An invalid consumer index looks like
    /// a full ring.
    #[inline(always)]
    pub fn push(&mut self, completion: &Wc) -> Result<(), CqOverflow> {
        let entries = self.memory.geometry.entries;
        // The client's line is read only when the cached head says that the ring is full.
        if self.tail.wrapping_sub(self.head) >= entries {
            self.head = completion::released_completions(self.memory.head_word(self.worker));
            if self.tail.wrapping_sub(self.head) >= entries {
                return Err(CqOverflow);
            }
        }
        if !self.announced {
            self.announced = true;
            // Pairs with the Acquire in `CqConsumer::poll`. That load may miss the bit: the fences of
            // the arming ensure that the next poll sees the bit, as they do for the entry.
            self.memory
                .workers_mask()
                .fetch_or(1 << self.worker, Ordering::Release);
        }
        let sequence = self.memory.sequence_word(self.worker, self.tail);
        let [first, second, third, fourth, ..] = bytemuck::cast::<Wc, [u64; 8]>(*completion);
        let entry_ptr = self.memory.entry_ptr(self.worker, self.tail);
        prefetch_line_to_write(
            self.memory
                .entry_ptr(self.worker, self.tail.wrapping_add(ENTRIES_AHEAD))
                .cast(),
        );
        self.tail = self.tail.wrapping_add(1);
        // The line is in the cache of the client's core: the pending data is written with few stores,
        // and `seq` is not read. Reserved fields stay zero, as the ring was created.
        //
        // SAFETY: inside and 64-aligned; the client does not read the entry before `seq` is valid.
        unsafe {
            entry_ptr
                .cast::<[u64; 4]>()
                .write([first, second, third, fourth]);
        }
        completion::publish_completion(sequence, self.tail);
        self.has_unflushed = true;
        self.solicited |=
            completion.status != WcStatus::SUCCESS || completion.flags.contains(WcFlags::SOLICITED);
        Ok(())
    }

    /// Number of the last pushed completion.
    #[inline]
    pub fn last_pushed(&self) -> u32 {
        self.tail.wrapping_sub(1)
    }

    /// Returns whether the client has taken the completion with this number. The client's index is
    /// trusted: a client with a wrong index only affects its own share of a shared receive queue.
    #[inline]
    pub fn is_polled(&self, number: u32) -> bool {
        let head = completion::released_completions(self.memory.head_word(self.worker));
        head.wrapping_sub(number) as i32 > 0
    }

    /// Called after a batch of pushes: returns whether this worker has to write to the event channel
    /// now.
    #[inline]
    pub fn take_event(&mut self) -> bool {
        if !self.has_unflushed {
            return false;
        }
        let solicited = self.solicited;
        self.has_unflushed = false;
        self.solicited = false;
        completion::take_arm(self.memory.armed_word(), solicited)
    }

    /// Moves an arming to the queue that replaces this one on a resize.
    pub fn move_arming(&self, to: &CqProducer) {
        completion::move_arming(self.memory.armed_word(), to.memory.armed_word());
    }

    /// Returns whether [`Self::take_event`] is due after pushes.
    #[inline]
    pub fn has_unflushed(&self) -> bool {
        self.has_unflushed
    }

    /// Reports to the client that the queue has failed (an errno).
    pub fn set_error(&self, errno: u32) {
        // Pairs with the Acquire in `CqConsumer::error_code`.
        self.memory.error_word().store(errno, Ordering::Release);
    }
}

/// Application's end of a completion queue. One thread at a time (`&mut`).
pub struct CqConsumer {
    memory: CqMemory,
    /// Number of completions taken, per worker.
    heads: Box<[u32]>,
    /// The worker whose ring is polled first.
    first_worker: u32,
}

impl CqConsumer {
    /// The consumer of the queue at `offset`.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: CqGeometry,
    ) -> Result<Self, OutOfBounds> {
        let memory = CqMemory::new(memory, offset, geometry)?;
        let heads = vec![0; memory.geometry.workers as usize].into_boxed_slice();
        Ok(CqConsumer {
            memory,
            heads,
            first_worker: 0,
        })
    }

    /// Takes up to `out.len()` completions, starting with a different worker's ring each time.
    #[inline]
    pub fn poll(&mut self, out: &mut [Wc]) -> usize {
        // Pairs with the Release in `CqProducer::push`.
        let all = self.memory.workers_mask().load(Ordering::Acquire);
        let mut taken = 0;
        // Rings at or above `first_worker` first, then those below.
        let below = (1u64 << self.first_worker) - 1;
        for mut mask in [all & !below, all & below] {
            while mask != 0 && taken < out.len() {
                let worker = mask.trailing_zeros();
                mask &= mask - 1;
                if worker < self.memory.geometry.workers {
                    taken += self.poll_ring(worker, &mut out[taken..]);
                }
            }
        }
        let several_rings = all & (all.wrapping_sub(1)) != 0;
        if several_rings {
            self.first_worker = (self.first_worker + 1) % self.memory.geometry.workers;
        }
        taken
    }

    #[inline]
    fn poll_ring(&mut self, worker: u32, out: &mut [Wc]) -> usize {
        let start = self.heads[worker as usize];
        let mut position = start;
        for slot in out.iter_mut() {
            if !self.is_filled(worker, position) {
                break;
            }
            // SAFETY: inside and 64-aligned; the worker does not touch the entry before the head
            // below passes it.
            *slot = unsafe { self.memory.entry_ptr(worker, position).read() };
            position = position.wrapping_add(1);
        }
        if position != start {
            self.heads[worker as usize] = position;
            completion::release_completions(self.memory.head_word(worker), position);
        }
        position.wrapping_sub(start) as usize
    }

    /// Requests an event for the next completion, or the next solicited one; poll once more
    /// afterwards.
    #[inline]
    pub fn arm_event(&self, solicited_only: bool) {
        let level = if solicited_only {
            completion::ARM_SOLICITED
        } else {
            completion::ARM_NEXT
        };
        completion::arm_event(self.memory.armed_word(), level);
    }

    /// Cancels an arming. Returns whether the queue was armed.
    pub fn disarm_event(&self) -> bool {
        completion::disarm_event(self.memory.armed_word()) != completion::ARM_NONE
    }

    /// Counts the completions that can be polled, up to `most`.
    pub fn count_waiting(&self, most: usize) -> usize {
        // Pairs as in `poll`.
        let all = self.memory.workers_mask().load(Ordering::Acquire);
        let mut waiting = 0;
        for worker in (0..self.memory.geometry.workers).filter(|worker| all >> worker & 1 == 1) {
            let mut position = self.heads[worker as usize];
            while waiting < most && self.is_filled(worker, position) {
                position = position.wrapping_add(1);
                waiting += 1;
            }
        }
        waiting
    }

    #[inline]
    fn is_filled(&self, worker: u32, position: u32) -> bool {
        let sequence = self.memory.sequence_word(worker, position);
        completion::is_completion(sequence, position.wrapping_add(1))
    }

    /// The errno with which the queue failed; 0 while it works.
    #[inline]
    pub fn error_code(&self) -> u32 {
        // Pairs with the Release in `CqProducer::set_error`.
        self.memory.error_word().load(Ordering::Acquire)
    }

    /// Sizes.
    pub fn queue_geometry(&self) -> CqGeometry {
        self.memory.geometry
    }
}

#[cfg(feature = "serde")]
mod saved {
    use super::{CqGeometry, CqMemory, CqProducer, OutOfBounds};
    use crate::ring_memory::RingPlace;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    /// A producer as data. Its copy of the client's index is not part of it: that is read again.
    #[derive(Serialize, Deserialize)]
    struct SavedProducer {
        rings: RingPlace,
        geometry: CqGeometry,
        worker: u32,
        tail: u32,
        has_unflushed: bool,
        solicited: bool,
        announced: bool,
    }

    impl Serialize for CqProducer {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let saved = SavedProducer {
                rings: self.memory.rings.place(),
                geometry: self.memory.geometry,
                worker: self.worker,
                tail: self.tail,
                has_unflushed: self.has_unflushed,
                solicited: self.solicited,
                announced: self.announced,
            };
            saved.serialize(serializer)
        }
    }

    impl<'de> Deserialize<'de> for CqProducer {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let saved = SavedProducer::deserialize(deserializer)?;
            saved.restore().map_err(D::Error::custom)
        }
    }

    impl SavedProducer {
        fn restore(self) -> Result<CqProducer, OutOfBounds> {
            let CqGeometry {
                entries, workers, ..
            } = self.geometry;
            let geometry = CqGeometry::from_exact(entries, workers).ok_or(OutOfBounds)?;
            if self.worker >= workers {
                return Err(OutOfBounds);
            }
            Ok(CqProducer {
                memory: CqMemory {
                    rings: self.rings.open(geometry.len)?,
                    geometry,
                },
                worker: self.worker,
                tail: self.tail,
                // As of a full ring, so that the next push reads the client's index.
                head: self.tail.wrapping_sub(entries),
                has_unflushed: self.has_unflushed,
                solicited: self.solicited,
                announced: self.announced,
            })
        }
    }
}
