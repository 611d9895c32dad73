//! Shared receive queues: one ring of receive work requests from the application, consumed by
//! the queue pairs of any number of workers (ibv_create_srq(3), RFC 5040 section 5.3).
//!
//! ```text
//!  +0    tail u32                                written by the client
//!  +128  entries, each of `stride` 64-byte slots; the last word of its first slot is a flag:
//!        1 set by the client that fills it, 0 by the worker that has copied it
//! ```
//! Workers take entries one at a time, in posting order, from a counter in the daemon's own memory.
//! No worker thus withholds requests that the queue pair of another one needs: the fair share of RFC
//! 5042 section 6.4.3.1 among workers. The workers enforce the share of each stream (`share` of
//! `CreateSrq`). The client's words are read but never trusted: an invalid tail disconnects the
//! client, and the flags only serve the client.
//!
//! A resize appends a new ring to the old one: workers empty the old one first.

use crate::ring_memory::RingMemory;
use crate::shared_memory::{OutOfBounds, SharedMemory};
use crate::work_queue::{PushError, RingError, parse_copied};
use crate::wqe::{
    MAX_SGE, RecvWqe, RecvWr, SLOT_LEN, WorkRequest, WqeError, WqeSlot, slots_per_request,
};
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use siw_lockfree::shared_ring;
use std::sync::{Arc, OnceLock};

/// Bytes before the entries.
pub const HEADER: usize = 128;
/// Offset of the producer index.
pub const OFF_TAIL: usize = 0;
/// Offset of an entry's flag in its first slot.
pub const OFF_FLAG: usize = 60;
/// Maximum number of entries of one ring.
pub const MAX_ENTRIES: u32 = 1 << 20;

const _: () = assert!(OFF_FLAG + size_of::<u32>() == SLOT_LEN);
// Receive requests do not use the operands of atomics.
const _: () = assert!(offset_of!(crate::wqe::WqeHeader, args) + 12 == OFF_FLAG);

/// Sizes of a shared receive queue; computed by the daemon, sent to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SrqGeometry {
    /// Number of entries, a power of two.
    pub entries: u32,
    /// Slots per entry.
    pub stride: u32,
    /// Total size in bytes.
    pub len: usize,
}

impl SrqGeometry {
    /// Sizes for at least `max_wr` requests of up to `max_sge` elements; `None` when that is too
    /// large.
    pub fn new(max_wr: u32, max_sge: u32) -> Option<SrqGeometry> {
        if max_sge as usize > MAX_SGE {
            return None;
        }
        let entries = max_wr.max(1).checked_next_power_of_two()?;
        Self::from_exact(entries, slots_per_request(max_sge as usize, 0) as u32)
    }

    /// Sizes from the numbers in a reply.
    pub fn from_exact(entries: u32, stride: u32) -> Option<SrqGeometry> {
        let fits = entries.is_power_of_two() && entries <= MAX_ENTRIES;
        if !fits || stride == 0 || stride as usize > crate::wqe::MAX_SLOTS {
            return None;
        }
        let len = HEADER + entries as usize * stride as usize * SLOT_LEN;
        Some(SrqGeometry {
            entries,
            stride,
            len,
        })
    }
}

/// The words and entries of one ring.
struct SrqMemory {
    ring: RingMemory,
    geometry: SrqGeometry,
}

impl SrqMemory {
    fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: SrqGeometry,
    ) -> Result<Self, OutOfBounds> {
        let geometry =
            SrqGeometry::from_exact(geometry.entries, geometry.stride).ok_or(OutOfBounds)?;
        Ok(SrqMemory {
            ring: RingMemory::new(memory, offset, geometry.len)?,
            geometry,
        })
    }

    #[inline]
    fn tail_word(&self) -> &AtomicU32 {
        // SAFETY: a multiple of 4 inside the header, which `new` checked.
        unsafe { self.ring.word_at(OFF_TAIL) }
    }

    #[inline]
    fn entry_offset(&self, number: u32) -> usize {
        let index = (number & (self.geometry.entries - 1)) as usize;
        HEADER + index * self.geometry.stride as usize * SLOT_LEN
    }

    #[inline]
    fn entry_ptr(&self, number: u32) -> *mut WqeSlot {
        self.ring.ptr_at(self.entry_offset(number)).cast()
    }

    #[inline]
    fn flag_word(&self, number: u32) -> &AtomicU32 {
        // SAFETY: the last word of an entry's first slot; the number is masked, so the entry lies
        // inside the length that `new` checked.
        unsafe { self.ring.word_at(self.entry_offset(number) + OFF_FLAG) }
    }
}

/// Application's end. One thread at a time (`&mut`).
pub struct SrqProducer {
    memory: SrqMemory,
    tail: u32,
    max_wr: u32,
}

impl SrqProducer {
    /// Creates the producer of a new ring at `offset`, which holds at most `max_wr` requests that no
    /// queue pair has taken.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: SrqGeometry,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        let memory = SrqMemory::new(memory, offset, geometry)?;
        let max_wr = max_wr.clamp(1, memory.geometry.entries);
        Ok(SrqProducer {
            memory,
            tail: 0,
            max_wr,
        })
    }

    /// Writes a request; workers see it after [`Self::publish_posted`].
    #[inline]
    pub fn push(&mut self, request: &RecvWr<'_>) -> Result<(), PushError> {
        if request.slot_count()? > self.memory.geometry.stride {
            return Err(WqeError::TooManySge(request.sges.len()).into());
        }
        // Requests are taken in posting order, so the oldest that may remain is the one `max_wr`
        // earlier. A worker may still be copying the previous request of this entry.
        let oldest = self.memory.flag_word(self.tail.wrapping_sub(self.max_wr));
        let own = self.memory.flag_word(self.tail);
        if !shared_ring::is_entry_free(oldest) || !shared_ring::is_entry_free(own) {
            return Err(PushError::Full);
        }
        let entry = self.memory.entry_ptr(self.tail);
        request.encode_slots(|i, slot| {
            let mut slot = *slot;
            if i == 0 {
                // The upper half of the last word is the flag "entry in use".
                slot.0[7] = 1 << 32;
            }
            // SAFETY: i is below the stride; the entry is free, so no worker reads it.
            unsafe { entry.add(i as usize).write(slot) };
        });
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Publishes all pushed requests.
    #[inline]
    pub fn publish_posted(&mut self) {
        shared_ring::publish_entries(self.memory.tail_word(), self.tail);
    }
}

/// The daemon's side of one ring; shared by all workers.
pub struct SrqRing {
    memory: SrqMemory,
    claimed: AtomicU64,
    /// The ring that a resize appended to this one.
    next: OnceLock<Arc<SrqRing>>,
}

impl SrqRing {
    /// A new ring at `offset`.
    pub fn new(
        memory: Arc<SharedMemory>,
        offset: usize,
        geometry: SrqGeometry,
    ) -> Result<Arc<Self>, OutOfBounds> {
        Ok(Arc::new(SrqRing {
            memory: SrqMemory::new(memory, offset, geometry)?,
            claimed: AtomicU64::new(0),
            next: OnceLock::new(),
        }))
    }

    /// Number of requests in this ring alone that are posted and not taken.
    fn count_posted_here(&self) -> u32 {
        let entries = self.memory.geometry.entries;
        shared_ring::count_posted(&self.claimed, self.memory.tail_word(), entries)
    }

    /// Number of requests in this ring and the following ones that are posted and not taken.
    pub fn count_posted(&self) -> u32 {
        let mut ring = self;
        let mut posted = ring.count_posted_here();
        while let Some(next) = ring.next.get() {
            ring = next;
            posted = posted.saturating_add(ring.count_posted_here());
        }
        posted
    }

    /// Appends a ring to this one, once. The client posts nothing more here.
    pub fn append_ring(&self, next: Arc<SrqRing>) {
        let _ = self.next.set(next);
    }
}

/// The low-water mark of a shared receive queue (RFC 5042 section 6.4.3.1).
#[derive(Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LowWaterMark(AtomicU32);

impl LowWaterMark {
    /// Arms one event for when fewer than `limit` requests are left; 0 disarms. `true`: fewer are
    /// left already, and the caller raises the event. `oldest`: the oldest ring in use.
    pub fn arm_event(&self, limit: u32, oldest: &SrqRing) -> bool {
        let mut ring = oldest;
        shared_ring::arm_low_water(&self.0, limit, &ring.claimed);
        while let Some(next) = ring.next.get() {
            ring = next;
            shared_ring::arm_low_water(&self.0, limit, &ring.claimed);
        }
        limit > 0 && shared_ring::take_low_water(&self.0, oldest.count_posted())
    }

    /// The armed limit; 0 when none is armed.
    pub fn armed_limit(&self) -> u32 {
        // Relaxed: only used to answer a query.
        self.0.load(Ordering::Relaxed)
    }
}

/// One worker's end.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SrqConsumer {
    #[cfg_attr(feature = "serde", serde(with = "crate::saved"))]
    ring: Arc<SrqRing>,
    #[cfg_attr(feature = "serde", serde(with = "crate::saved"))]
    low_water: Arc<LowWaterMark>,
}

/// Result of taking a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenRequest {
    /// Fewer requests than the limit are left: the caller raises the event.
    pub limit_reached: bool,
}

impl SrqConsumer {
    /// Creates a consumer that starts with `ring`.
    pub fn new(ring: Arc<SrqRing>, low_water: Arc<LowWaterMark>) -> Self {
        SrqConsumer { ring, low_water }
    }

    /// Takes the oldest request, copies it once and validates the copy into `element`. `None` when
    /// nothing is posted.
    #[inline]
    pub fn pop(&mut self, element: &mut RecvWqe) -> Result<Option<TakenRequest>, RingError> {
        loop {
            // Read before the ring is found empty: every request in this ring was posted before its
            // successor was appended.
            let next = self.ring.next.get();
            let memory = &self.ring.memory;
            let entries = memory.geometry.entries;
            let claim = shared_ring::claim_entry(&self.ring.claimed, memory.tail_word(), entries);
            if let Some((number, marked)) = claim.map_err(|_| RingError::InvalidIndex)? {
                let copied = self.copy_request(number, element);
                let limit_reached = marked
                    && shared_ring::take_low_water(&self.low_water.0, self.ring.count_posted());
                return copied.map(|()| Some(TakenRequest { limit_reached }));
            }
            match next {
                Some(next) => self.ring = next.clone(),
                None => return Ok(None),
            }
        }
    }

    #[inline]
    fn copy_request(&self, number: u32, element: &mut RecvWqe) -> Result<(), RingError> {
        let memory = &self.ring.memory;
        let entry = memory.entry_ptr(number);
        // SAFETY: `parse_copied` asks for slots below the stride, which lie inside and are
        // 64-aligned. Only a misbehaving client writes them meanwhile; the copy is validated.
        let load = |i: u32| unsafe { entry.add(i as usize).read_volatile() };
        let parsed = parse_copied(element, memory.geometry.stride, load);
        shared_ring::release_entry(memory.flag_word(number));
        parsed.map(|_| ())
    }

    /// Moves on to the ring of a resize once the old one is empty, so that the old one's memory can
    /// be freed.
    pub fn leave_old_ring(&mut self) {
        while let Some(next) = self.ring.next.get() {
            if self.ring.count_posted_here() > 0 {
                return;
            }
            self.ring = next.clone();
        }
    }
}

#[cfg(feature = "serde")]
mod saved {
    use super::{Arc, AtomicU64, LowWaterMark, OnceLock, OutOfBounds};
    use super::{SrqGeometry, SrqMemory, SrqRing};
    use crate::ring_memory::RingPlace;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use std::sync::atomic::Ordering;

    // Workers and the control thread share both.
    crate::keep_by_serde!(SrqRing, LowWaterMark);

    #[derive(Serialize, Deserialize)]
    struct SavedRing {
        ring: RingPlace,
        geometry: SrqGeometry,
        claimed: u64,
        #[serde(with = "crate::saved")]
        next: Option<Arc<SrqRing>>,
    }

    impl Serialize for SrqRing {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let saved = SavedRing {
                ring: self.memory.ring.place(),
                geometry: self.memory.geometry,
                claimed: self.claimed.load(Ordering::Acquire),
                next: self.next.get().cloned(),
            };
            saved.serialize(serializer)
        }
    }

    impl<'de> Deserialize<'de> for SrqRing {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let saved = SavedRing::deserialize(deserializer)?;
            saved.restore().map_err(D::Error::custom)
        }
    }

    impl SavedRing {
        fn restore(self) -> Result<SrqRing, OutOfBounds> {
            let SrqGeometry {
                entries, stride, ..
            } = self.geometry;
            let geometry = SrqGeometry::from_exact(entries, stride).ok_or(OutOfBounds)?;
            Ok(SrqRing {
                memory: SrqMemory {
                    ring: self.ring.open(geometry.len)?,
                    geometry,
                },
                claimed: AtomicU64::new(self.claimed),
                next: self.next.map_or_else(OnceLock::new, OnceLock::from),
            })
        }
    }
}
