//! Shared receive queues: one ring of receive work requests from the application, consumed by
//! the queue pairs of any number of workers (ibv_create_srq(3), RFC 5040 section 5.3).
//!
//! ```text
//!  +0    tail u32                                written by the client
//!  +128  entries, each of `stride` 64-byte slots; in the last word of its first slot a flag:
//!        1 set by the client that fills it, 0 by the worker that has copied it
//! ```
//! Workers take entries one at a time from a counter in the daemon's own memory, in posting
//! order: nobody hoards requests that another worker's queue pair needs, which is the fair share
//! of RFC 5042 section 6.4.3.1 among workers; the share of one stream is the worker's affair (see
//! `CreateSrq`). The client's words are read, never trusted: a tail
//! that cannot be closes the client, and flags are only for the client itself.
//!
//! A resize starts a new ring behind the old one: workers empty the old one first.

use crate::shared_memory::{OutOfBounds, SharedMemory};
use crate::work_queue::{PushError, RingError};
use crate::wqe::{MAX_SGE, RecvWqe, RecvWr, SLOT_LEN, WqeError, WqeSlot, slots_per_request};
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU32, AtomicU64};
use siw_lockfree::rings as lockfree;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// Bytes before the entries.
pub const HEADER: usize = 128;
/// Offset of the producer index.
pub const OFF_TAIL: usize = 0;
/// Offset of an entry's flag in its first slot.
pub const OFF_FLAG: usize = 60;
/// Most entries of one ring.
pub const MAX_ENTRIES: u32 = 1 << 20;

const _: () = assert!(OFF_FLAG + size_of::<u32>() == SLOT_LEN);
// Receive requests leave the operands of atomics alone.
const _: () = assert!(offset_of!(crate::wqe::WqeHeader, args) + 12 == OFF_FLAG);

/// Sizes of a shared receive queue; computed by the daemon, told to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqGeometry {
    /// Entries, a power of two.
    pub entries: u32,
    /// Slots of an entry.
    pub stride: u32,
    /// Bytes of all.
    pub len: usize,
}

impl SrqGeometry {
    /// For at least `max_wr` requests of up to `max_sge` elements; None when that is too much.
    pub fn new(max_wr: u32, max_sge: u32) -> Option<SrqGeometry> {
        if max_sge as usize > MAX_SGE {
            return None;
        }
        let entries = max_wr.max(1).checked_next_power_of_two()?;
        Self::from_exact(entries, slots_per_request(max_sge as usize, 0) as u32)
    }

    /// From the numbers in a reply.
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

/// Checked memory of a ring.
struct SrqMem {
    base: NonNull<u8>,
    geometry: SrqGeometry,
    _region: Arc<SharedMemory>,
}

// SAFETY: the words are atomics, the slots are copied raw; the Arc keeps the mapping alive.
unsafe impl Send for SrqMem {}
// SAFETY: as above; slots are stored to through a producer only, which is `&mut`.
unsafe impl Sync for SrqMem {}

impl SrqMem {
    fn new(region: Arc<SharedMemory>, offset: usize, g: SrqGeometry) -> Result<Self, OutOfBounds> {
        let geometry = SrqGeometry::from_exact(g.entries, g.stride).ok_or(OutOfBounds)?;
        if !offset.is_multiple_of(64) || !region.is_writable() {
            return Err(OutOfBounds);
        }
        let p = region.ptr_at(offset, geometry.len)?;
        Ok(SrqMem {
            base: NonNull::new(p).ok_or(OutOfBounds)?,
            geometry,
            _region: region,
        })
    }

    #[inline]
    fn tail_word(&self) -> &AtomicU32 {
        // SAFETY: inside the checked length, aligned.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(OFF_TAIL).cast()) }
    }

    #[inline]
    fn entry_ptr(&self, number: u32) -> *mut WqeSlot {
        let i = (number & (self.geometry.entries - 1)) as usize;
        let at = HEADER + i * self.geometry.stride as usize * SLOT_LEN;
        // SAFETY: masked, hence inside the checked length.
        unsafe { self.base.as_ptr().add(at).cast() }
    }

    #[inline]
    fn flag_word(&self, number: u32) -> &AtomicU32 {
        // SAFETY: the last word of an entry's first slot, inside and 4-aligned.
        unsafe { AtomicU32::from_ptr(self.entry_ptr(number).cast::<u8>().add(OFF_FLAG).cast()) }
    }
}

/// Application's end. One thread at a time (`&mut`).
pub struct SrqProducer {
    mem: SrqMem,
    tail_word: u32,
    max_wr: u32,
}

impl SrqProducer {
    /// A fresh ring at `offset`; at most `max_wr` requests that no queue pair has taken.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        geometry: SrqGeometry,
        max_wr: u32,
    ) -> Result<Self, OutOfBounds> {
        let mem = SrqMem::new(region, offset, geometry)?;
        let max_wr = max_wr.clamp(1, mem.geometry.entries);
        Ok(SrqProducer {
            mem,
            tail_word: 0,
            max_wr,
        })
    }

    /// Writes a request; workers see it after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, d: &RecvWr<'_>) -> Result<(), PushError> {
        let n = d.slot_count()?;
        if n > self.mem.geometry.stride {
            return Err(WqeError::TooManySge(d.sges.len()).into());
        }
        // Requests are taken in posting order: the one `max_wr` earlier is the oldest that may
        // be left. The entry's own last use may be in the middle of being copied.
        let oldest = self.mem.flag_word(self.tail_word.wrapping_sub(self.max_wr));
        let own = self.mem.flag_word(self.tail_word);
        if !lockfree::is_entry_free(oldest) || !lockfree::is_entry_free(own) {
            return Err(PushError::Full);
        }
        let at = self.mem.entry_ptr(self.tail_word);
        d.encode_slots(|i, s| {
            let mut s = *s;
            if i == 0 {
                s.0[7] = 1 << 32;
            }
            // SAFETY: i < n <= stride; the entry is free, so no worker reads it.
            unsafe { at.add(i as usize).write(s) };
        });
        self.tail_word = self.tail_word.wrapping_add(1);
        Ok(())
    }

    /// Shows all pushed requests.
    #[inline]
    pub fn publish_posted(&mut self) {
        lockfree::publish_entries(self.mem.tail_word(), self.tail_word);
    }
}

/// One ring as the daemon knows it; shared by all workers.
pub struct SrqRing {
    mem: SrqMem,
    claimed: AtomicU64,
    /// The ring that a resize put behind this one.
    next: OnceLock<Arc<SrqRing>>,
}

impl SrqRing {
    /// A fresh ring at `offset`.
    pub fn new(
        region: Arc<SharedMemory>,
        offset: usize,
        geometry: SrqGeometry,
    ) -> Result<Arc<Self>, OutOfBounds> {
        Ok(Arc::new(SrqRing {
            mem: SrqMem::new(region, offset, geometry)?,
            claimed: AtomicU64::new(0),
            next: OnceLock::new(),
        }))
    }

    /// Requests that are posted and not taken, in this ring and in those behind it.
    pub fn count_posted(&self) -> u32 {
        let (mut ring, mut n) = (self, 0u32);
        loop {
            let entries = ring.mem.geometry.entries;
            n = n.saturating_add(lockfree::count_posted(
                &ring.claimed,
                ring.mem.tail_word(),
                entries,
            ));
            match ring.next.get() {
                Some(r) => ring = r,
                None => return n,
            }
        }
    }

    /// Puts a ring behind this one, once. The client posts nothing more here.
    pub fn append_ring(&self, next: Arc<SrqRing>) {
        let _ = self.next.set(next);
    }
}

/// The low-water mark of a shared receive queue (RFC 5042 section 6.4.3.1).
#[derive(Debug, Default)]
pub struct LowWaterMark(AtomicU32);

impl LowWaterMark {
    /// Wants one event when fewer than `limit` requests are left; 0 wants none. True: they are
    /// fewer already, and the caller owes the event. `ring`: the oldest that is in use.
    pub fn arm_event(&self, limit: u32, ring: &SrqRing) -> bool {
        let mut r = ring;
        lockfree::arm_low_water(&self.0, limit, &r.claimed);
        while let Some(n) = r.next.get() {
            r = n;
            lockfree::arm_low_water(&self.0, limit, &r.claimed);
        }
        limit > 0 && lockfree::take_low_water(&self.0, ring.count_posted())
    }

    /// The limit; 0 when none is armed.
    pub fn armed_limit(&self) -> u32 {
        self.0.load(core::sync::atomic::Ordering::Relaxed)
    }
}

/// One worker's end.
pub struct SrqConsumer {
    ring: Arc<SrqRing>,
    low: Arc<LowWaterMark>,
}

/// A request was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenRequest {
    /// The stock fell below the limit: the caller owes the event.
    pub limit_reached: bool,
}

impl SrqConsumer {
    /// An end that starts with `ring`.
    pub fn new(ring: Arc<SrqRing>, low: Arc<LowWaterMark>) -> Self {
        SrqConsumer { ring, low }
    }

    /// Takes the oldest request, copies it once and validates the copy into `w`. None when
    /// nothing is posted.
    #[inline]
    pub fn pop(&mut self, w: &mut RecvWqe) -> Result<Option<TakenRequest>, RingError> {
        loop {
            // Before the ring is found empty: what was posted to it came before its successor.
            let next = self.ring.next.get();
            let mem = &self.ring.mem;
            let claim =
                lockfree::claim_entry(&self.ring.claimed, mem.tail_word(), mem.geometry.entries);
            if let Some((number, marked)) = claim.map_err(|_| RingError::InvalidIndex)? {
                let copied = self.copy_request(number, w);
                let limit_reached =
                    marked && lockfree::take_low_water(&self.low.0, self.ring.count_posted());
                return copied.map(|()| Some(TakenRequest { limit_reached }));
            }
            match next {
                Some(n) => self.ring = n.clone(),
                None => return Ok(None),
            }
        }
    }

    #[inline]
    fn copy_request(&self, number: u32, w: &mut RecvWqe) -> Result<(), RingError> {
        let mem = &self.ring.mem;
        let at = mem.entry_ptr(number);
        // SAFETY: i < stride, inside and 64-aligned. The client may write it meanwhile only if
        // it cheats; the copy is validated.
        let load = |i: u32| unsafe { at.add(i as usize).read_volatile() };
        let parsed = w.parse_into(&load(0), mem.geometry.stride, load);
        lockfree::release_entry(mem.flag_word(number));
        parsed.map_err(|error| RingError::Wqe {
            wr_id: w.wr_id,
            error,
        })?;
        Ok(())
    }

    /// Goes on to the ring of a resize when nothing is left in the old one, so that its memory
    /// can be freed.
    pub fn leave_old_ring(&mut self) {
        while let Some(n) = self.ring.next.get() {
            let mem = &self.ring.mem;
            if lockfree::count_posted(&self.ring.claimed, mem.tail_word(), mem.geometry.entries) > 0
            {
                return;
            }
            self.ring = n.clone();
        }
    }
}
