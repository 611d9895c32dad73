//! Doorbells: one bounded ring of QP numbers per (client, worker), and the page with the workers'
//! sleep flags.
//!
//! ```text
//!  region of one client: n_workers rings of
//!  +0   tail u32 (client)
//!  +64  capacity * u32: QP number + 1, or 0 when empty
//! ```
//! Post: write the SQ tail, swap the QP's `pending` to 1; if it was 0, claim a slot and store the
//! number; fence; read `sleeping`; write the eventfd if it is set. Worker: take a number, zero the
//! slot, swap `pending` to 0, read the SQ. A QP is on the ring at most once, and a worker never scans QPs.
//!
//! A client whose QPs are more than the ring has slots may find its slot filled. It waits until the worker
//! has taken that number, which depends on no client. Libraries without
//! [`FEATURE_DOORBELL_WAIT`](crate::control::messages::FEATURE_DOORBELL_WAIT) get a ring that is never full.
//!
//! A worker may leave `pending` set after it took the number, and poll the SQ's tail meanwhile: the
//! client then rings no doorbells. To stop polling, it clears the word and checks the tail once more.
//! Before it sets its sleep flag, it does so for all of these QPs.

use crate::ring_memory::RingMemory;
use crate::shared_memory::{OutOfBounds, SharedMemory};
use core::mem::size_of;
use core::sync::atomic::{AtomicU32, Ordering};
use siw_lockfree::doorbell;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes before the numbers.
pub const HEADER: usize = 64;
/// Maximum number of entries of one ring.
pub const MAX_CAPACITY: u32 = 1 << 20;
/// Maximum number of entries of a ring whose client waits for a free slot: 16 KiB, and as many doorbells
/// as a worker takes from a client in 64 batches.
pub const MAX_CAPACITY_OF_WAITING: u32 = 4096;

/// Bytes of one ring of `capacity` numbers, a multiple of 64.
pub fn ring_len(capacity: u32) -> usize {
    (HEADER + capacity as usize * 4).next_multiple_of(64)
}

/// Offset of `worker`'s ring in a client's doorbell region.
pub fn ring_offset(worker: u32, capacity: u32) -> usize {
    worker as usize * ring_len(capacity)
}

/// The words of one ring.
struct DoorbellMemory {
    ring: RingMemory,
    mask: u32,
}

impl DoorbellMemory {
    fn new(memory: Arc<SharedMemory>, offset: usize, capacity: u32) -> Result<Self, OutOfBounds> {
        if !capacity.is_power_of_two() || capacity > MAX_CAPACITY {
            return Err(OutOfBounds);
        }
        Ok(DoorbellMemory {
            ring: RingMemory::new(memory, offset, ring_len(capacity))?,
            mask: capacity - 1,
        })
    }

    #[inline]
    fn tail_word(&self) -> &AtomicU32 {
        // SAFETY: the first word of the header, which `new` checked.
        unsafe { self.ring.word_at(0) }
    }

    #[inline]
    fn slot_word(&self, number: u32) -> &AtomicU32 {
        let index = (number & self.mask) as usize;
        // SAFETY: a multiple of 4; masked, hence inside the length that `new` checked.
        unsafe { self.ring.word_at(HEADER + index * size_of::<u32>()) }
    }
}

/// Application's end; any thread may ring.
pub struct DoorbellProducer(DoorbellMemory);

impl DoorbellProducer {
    /// The producer for the ring at `offset`; `capacity` is a power of two.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        capacity: u32,
    ) -> Result<Self, OutOfBounds> {
        DoorbellMemory::new(memory, offset, capacity).map(Self)
    }

    /// Puts a QP number on the ring. Call only after `SqProducer::publish_posted` returned true, then
    /// check [`WorkerPageView::must_wake`]. While the ring is full, calls `wait`, which wakes the worker if
    /// it sleeps, lets time pass, and returns false if the worker takes no numbers any more.
    #[inline]
    pub fn ring_doorbell(&self, qp_num: u32, mut wait: impl FnMut() -> bool) {
        let slot = doorbell::claim_slot(self.0.tail_word(), self.0.mask);
        while !doorbell::fill_slot(self.0.slot_word(slot), qp_num) && wait() {}
    }
}

/// Worker's end. The numbers come from the client: look them up only among that client's QPs.
pub struct DoorbellConsumer {
    memory: DoorbellMemory,
    head: u32,
}

impl DoorbellConsumer {
    /// The consumer for the ring at `offset`; `capacity` is a power of two.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        capacity: u32,
    ) -> Result<Self, OutOfBounds> {
        Ok(DoorbellConsumer {
            memory: DoorbellMemory::new(memory, offset, capacity)?,
            head: 0,
        })
    }

    /// Takes the next QP number. Bound the calls per batch: a hostile client can refill the ring
    /// indefinitely.
    #[inline]
    pub fn pop(&mut self) -> Option<u32> {
        let qp_num = doorbell::take_slot(self.memory.slot_word(self.head))?;
        self.head = self.head.wrapping_add(1);
        Some(qp_num)
    }

    /// Returns whether [`Self::pop`] would return a number; also serves as the check after
    /// [`SleepFlag::announce_sleep`].
    #[inline]
    pub fn has_work(&self) -> bool {
        // After the fence in `announce_sleep`, which pairs with the one in `must_wake`.
        self.memory.slot_word(self.head).load(Ordering::Acquire) != 0
    }
}

/// Bytes per worker in the worker state page.
pub const WORKER_LINE: usize = 64;

/// Daemon's side of the worker state page; read-only for clients.
pub struct WorkerPage {
    shared_memory: Arc<SharedMemory>,
    workers: u32,
}

impl WorkerPage {
    /// Creates the page, sealed so that clients can only map it read-only.
    pub fn create_sealed(workers: u32) -> std::io::Result<WorkerPage> {
        let len = workers.max(1) as usize * WORKER_LINE;
        let region = Arc::new(SharedMemory::create_read_only_for_others(
            "siwd-workers",
            len,
        )?);
        Ok(WorkerPage {
            shared_memory: region,
            workers,
        })
    }

    /// The page's memory, for passing its fd to clients.
    pub fn shared_memory(&self) -> &Arc<SharedMemory> {
        &self.shared_memory
    }

    /// A worker's own flag. `None` for an unknown worker.
    pub fn sleep_flag(&self, worker: u32) -> Option<SleepFlag> {
        if worker >= self.workers {
            return None;
        }
        let word = self
            .shared_memory
            .atomic_u32(worker as usize * WORKER_LINE)
            .ok()?;
        Some(SleepFlag {
            sleep_word: NonNull::from(word),
            _region: self.shared_memory.clone(),
        })
    }
}

/// One worker's `sleeping` word.
pub struct SleepFlag {
    sleep_word: NonNull<AtomicU32>,
    _region: Arc<SharedMemory>,
}

// SAFETY: an atomic word in a mapping kept alive by the Arc.
unsafe impl Send for SleepFlag {}
// SAFETY: as above.
unsafe impl Sync for SleepFlag {}

impl SleepFlag {
    #[inline]
    fn sleep_word(&self) -> &AtomicU32 {
        // SAFETY: points into the mapping that `_region` keeps alive.
        unsafe { self.sleep_word.as_ref() }
    }

    /// Call before blocking; then check every doorbell ring once more
    /// ([`DoorbellConsumer::has_work`]) and block only if all are empty.
    pub fn announce_sleep(&self) {
        doorbell::announce_sleep(self.sleep_word());
    }

    /// Call after blocking, or when the last check found work.
    pub fn announce_awake(&self) {
        doorbell::announce_awake(self.sleep_word());
    }

    /// Variant of [`WorkerPageView::must_wake`] for users of this word in the same process.
    #[inline]
    pub fn must_wake(&self) -> bool {
        doorbell::must_wake(self.sleep_word())
    }
}

/// Client's view of the worker state page.
pub struct WorkerPageView {
    shared_memory: Arc<SharedMemory>,
    workers: u32,
}

impl WorkerPageView {
    /// A view of a mapping of the page, usually read-only.
    pub fn new(region: Arc<SharedMemory>, workers: u32) -> Result<Self, OutOfBounds> {
        region.ptr_at(0, workers as usize * WORKER_LINE)?;
        Ok(WorkerPageView {
            shared_memory: region,
            workers,
        })
    }

    /// Call after [`DoorbellProducer::ring_doorbell`]: returns whether the worker's eventfd has to be
    /// written.
    #[inline]
    pub fn must_wake(&self, worker: u32) -> bool {
        debug_assert!(worker < self.workers);
        match self.shared_memory.atomic_u32(worker as usize * WORKER_LINE) {
            Ok(word) => doorbell::must_wake(word),
            Err(_) => true,
        }
    }
}

#[cfg(feature = "serde")]
mod saved {
    use super::{Arc, OutOfBounds, SharedMemory};
    use super::{
        DoorbellConsumer, DoorbellMemory, MAX_CAPACITY, WORKER_LINE, WorkerPage, ring_len,
    };
    use crate::ring_memory::RingPlace;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    #[derive(Serialize, Deserialize)]
    struct SavedDoorbells {
        ring: RingPlace,
        mask: u32,
        head: u32,
    }

    impl Serialize for DoorbellConsumer {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let saved = SavedDoorbells {
                ring: self.memory.ring.place(),
                mask: self.memory.mask,
                head: self.head,
            };
            saved.serialize(serializer)
        }
    }

    impl<'de> Deserialize<'de> for DoorbellConsumer {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let saved = SavedDoorbells::deserialize(deserializer)?;
            saved.restore().map_err(D::Error::custom)
        }
    }

    impl SavedDoorbells {
        fn restore(self) -> Result<DoorbellConsumer, OutOfBounds> {
            let capacity = self.mask.checked_add(1).ok_or(OutOfBounds)?;
            if !capacity.is_power_of_two() || capacity > MAX_CAPACITY {
                return Err(OutOfBounds);
            }
            Ok(DoorbellConsumer {
                memory: DoorbellMemory {
                    ring: self.ring.open(ring_len(capacity))?,
                    mask: self.mask,
                },
                head: self.head,
            })
        }
    }

    #[derive(Serialize, Deserialize)]
    struct SavedPage {
        #[serde(with = "crate::saved")]
        memory: Arc<SharedMemory>,
        workers: u32,
    }

    /// The flags of workers are in its memory: [`WorkerPage::sleep_flag`] finds them again.
    impl Serialize for WorkerPage {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let saved = SavedPage {
                memory: self.shared_memory.clone(),
                workers: self.workers,
            };
            saved.serialize(serializer)
        }
    }

    impl<'de> Deserialize<'de> for WorkerPage {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let SavedPage { memory, workers } = SavedPage::deserialize(deserializer)?;
            let lines = memory.ptr_at(0, workers as usize * WORKER_LINE);
            lines.map_err(D::Error::custom)?;
            Ok(WorkerPage {
                shared_memory: memory,
                workers,
            })
        }
    }
}
