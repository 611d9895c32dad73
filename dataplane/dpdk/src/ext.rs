//! Trackers of external buffers: one for each work request in flight.
//!
//! A tracker counts the mbufs that point into a work request's memory. The request completes when
//! its bytes are ACKed and [`ExtTracker::outstanding_mbufs`] is zero: from then on neither the
//! stack, nor a driver, nor the peer on a ring pair reads the memory.
//!
//! ```text
//!            alloc             free, none outstanding
//!   free list ────► in use ─────────────────────────► free list
//!                     │  free, some outstanding              ▲
//!                     └───────────────► zombies ── sweep ────┘
//! ```
//!
//! DPDK's own reference counter is used. It starts at 1, the owner's share, so it never falls to
//! zero and the free callback never runs; a slot is reused only when the counter is back at 1. The
//! thread that frees an mbuf, whichever it is, returns the mbuf's share. A tracker with many mbufs
//! takes shares in advance, because each atomic step of the counter waits for all earlier stores.

use crate::{ExtMemory, ExtSlice, Mbuf, eal};
use dpdk_sys as sys;
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU16, Ordering};

/// Maximum shares of one tracker, including its owner's: DPDK counts in 16 bits.
const MAX_SHARES: u16 = u16::MAX - 1;
/// Maximum shares taken from the counter at once.
const AHEAD: u16 = 64;

#[repr(C, align(64))]
struct TrackerSlot {
    shinfo: sys::rte_mbuf_ext_shared_info,
    memory: Option<Arc<dyn ExtMemory>>,
    /// Serial number of the tracker that has the slot, or had it last.
    serial: u64,
    home: *const DroppedTrackers,
    /// Link in the list of dropped trackers.
    dropped_next: AtomicPtr<TrackerSlot>,
}

/// List of trackers that were dropped instead of freed.
struct DroppedTrackers {
    dropped: AtomicPtr<TrackerSlot>,
}

/// Tracker slots for one worker's work requests.
pub struct TrackerPool {
    home: NonNull<DroppedTrackers>,
    slots: NonNull<[TrackerSlot]>,
    free: Vec<NonNull<TrackerSlot>>,
    zombies: Vec<NonNull<TrackerSlot>>,
    last_serial: u64,
}

/// Identifies a tracker of a pool even after it has ended, see [`TrackerPool::has_mbufs_out`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrackerId {
    slot: usize,
    serial: u64,
}

// SAFETY: slots of the free and zombie lists belong to the pool; the fields that other threads
// access (the counter, the list of dropped trackers) are atomic.
unsafe impl Send for TrackerPool {}

impl TrackerPool {
    /// Creates a pool for `capacity` work requests in flight.
    pub fn new(capacity: usize) -> Self {
        let home = NonNull::from(Box::leak(Box::new(DroppedTrackers {
            dropped: AtomicPtr::new(ptr::null_mut()),
        })));
        let slots: Box<[TrackerSlot]> = (0..capacity)
            .map(|_| TrackerSlot {
                shinfo: sys::rte_mbuf_ext_shared_info {
                    free_cb: Some(nothing_to_free),
                    fcb_opaque: ptr::null_mut(),
                    refcnt: AtomicU16::new(1),
                },
                memory: None,
                serial: 0,
                home: home.as_ptr(),
                dropped_next: AtomicPtr::new(ptr::null_mut()),
            })
            .collect();
        let slots = NonNull::from(Box::leak(slots));
        let first = slots.cast::<TrackerSlot>();
        // Pushed backwards, so that low slots are used first.
        let free = (0..capacity)
            .rev()
            // SAFETY: the index is within the slice.
            .map(|index| unsafe { first.add(index) })
            .collect();
        Self {
            home,
            slots,
            free,
            zombies: Vec::with_capacity(capacity),
            last_serial: 0,
        }
    }

    /// Allocates a tracker for a work request on `memory`, which stays mapped until no mbuf points
    /// into it. `None` when all slots are in use.
    #[inline]
    pub fn alloc(&mut self, memory: Arc<dyn ExtMemory>) -> Option<ExtTracker> {
        if self.free.is_empty() && self.sweep_released() == 0 {
            return None;
        }
        let slot = self.free.pop()?;
        self.last_serial += 1;
        // SAFETY: a slot on the free list belongs to us alone.
        unsafe {
            (*slot.as_ptr()).memory = Some(memory);
            (*slot.as_ptr()).serial = self.last_serial;
        }
        Some(ExtTracker {
            slot,
            spare: Cell::new(0),
            ahead: Cell::new(1),
        })
    }

    /// Ends a tracker. If mbufs still refer to it, its slot and its memory are kept until a later
    /// [`Self::sweep_released`] finds those mbufs freed.
    #[inline]
    pub fn free(&mut self, tracker: ExtTracker) {
        if !self.is_owner_of(tracker.slot) {
            // A tracker of another pool goes onto that pool's list.
            drop(tracker);
            return;
        }
        tracker.give_spare_back();
        let slot = tracker.slot;
        std::mem::forget(tracker);
        self.reclaim_slot(slot);
    }

    fn is_owner_of(&self, slot: NonNull<TrackerSlot>) -> bool {
        // SAFETY: a tracker's slot stays valid while the tracker lives.
        ptr::eq(unsafe { (*slot.as_ptr()).home }, self.home.as_ptr())
    }

    #[inline]
    fn reclaim_slot(&mut self, slot: NonNull<TrackerSlot>) {
        // SAFETY: the owner's share is ours now. Acquire: pairs with the release with which each
        // mbuf returned its share.
        unsafe {
            if (*slot.as_ptr()).shinfo.refcnt.load(Ordering::Acquire) == 1 {
                (*slot.as_ptr()).memory = None;
                self.free.push(slot);
            } else {
                self.zombies.push(slot);
            }
        }
    }

    /// Reclaims the slots of ended trackers whose mbufs have all been freed; returns the number of
    /// slots reclaimed. A worker calls it when it has nothing else to do.
    pub fn sweep_released(&mut self) -> usize {
        let before = self.free.len();
        for index in (0..self.zombies.len()).rev() {
            let slot = self.zombies[index];
            // SAFETY: the owner's share of a zombie is ours; Acquire as in `reclaim_slot`.
            if unsafe { (*slot.as_ptr()).shinfo.refcnt.load(Ordering::Acquire) } == 1 {
                self.zombies.swap_remove(index);
                self.reclaim_slot(slot);
            }
        }
        // SAFETY: `home` lives as long as the pool. Acquire: pairs with the
        // release that put a slot on the list.
        let mut next = unsafe { self.home.as_ref() }
            .dropped
            .swap(ptr::null_mut(), Ordering::Acquire);
        while let Some(slot) = NonNull::new(next) {
            // SAFETY: a slot on the list was given up by its tracker.
            next = unsafe { (*slot.as_ptr()).dropped_next.load(Ordering::Relaxed) };
            self.reclaim_slot(slot);
        }
        self.free.len() - before
    }

    /// Slots of ended trackers that still have mbufs out.
    pub fn zombie_count(&self) -> usize {
        self.zombies.len()
    }

    /// Identifier of the tracker, unique even after it has ended.
    pub fn id_of(&self, tracker: &ExtTracker) -> TrackerId {
        self.id_of_slot(tracker.slot)
    }

    fn id_of_slot(&self, slot: NonNull<TrackerSlot>) -> TrackerId {
        let bytes = slot.addr().get() - self.slots.cast::<TrackerSlot>().addr().get();
        TrackerId {
            slot: bytes / size_of::<TrackerSlot>(),
            // SAFETY: only `alloc` writes it, which cannot be called while this borrow lasts.
            serial: unsafe { (*slot.as_ptr()).serial },
        }
    }

    /// Ended trackers that still have mbufs pointing into `memory`.
    pub fn ended_trackers_of(&self, memory: *const ()) -> impl Iterator<Item = TrackerId> + '_ {
        let is_of_memory = move |slot: &&NonNull<TrackerSlot>| {
            // SAFETY: a zombie's memory is ours.
            let held = unsafe { (*slot.as_ptr()).memory.as_ref() };
            held.is_some_and(|held| ptr::addr_eq(Arc::as_ptr(held), memory))
        };
        let zombies = self.zombies.iter().filter(is_of_memory);
        zombies.map(|slot| self.id_of_slot(*slot))
    }

    /// Returns true if mbufs of an ended tracker still point into its memory.
    pub fn has_mbufs_out(&self, tracker: TrackerId) -> bool {
        if tracker.slot >= self.slots.len() {
            return false;
        }
        // SAFETY: within the slots. Only `alloc` writes serial numbers; the counter is atomic.
        // Acquire: at 1, every reader is done with the memory.
        unsafe {
            let slot = self.slots.cast::<TrackerSlot>().add(tracker.slot).as_ptr();
            (*slot).serial == tracker.serial && (*slot).shinfo.refcnt.load(Ordering::Acquire) > 1
        }
    }

    /// Trackers that [`Self::alloc`] can return without a sweep.
    pub fn available_trackers(&self) -> usize {
        self.free.len()
    }

    /// Work requests that can be in flight at once.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }
}

impl Drop for TrackerPool {
    fn drop(&mut self) {
        self.sweep_released();
        if self.free.len() == self.slots.len() {
            // SAFETY: both were leaked in `new`; every slot is on the free list,
            // so no tracker and no mbuf refers to them.
            unsafe {
                drop(Box::from_raw(self.slots.as_ptr()));
                drop(Box::from_raw(self.home.as_ptr()));
            }
        } else {
            // An mbuf or a tracker still refers to the slots, which must outlive it.
            eal::leak_environment();
        }
    }
}

/// The memory of one work request, and the count of mbufs that point into it.
///
/// Return it with [`TrackerPool::free`]. If it is dropped instead, the pool reclaims it at its next
/// sweep.
pub struct ExtTracker {
    slot: NonNull<TrackerSlot>,
    /// Shares taken from the counter but not yet given to an mbuf.
    spare: Cell<u16>,
    /// Shares to take next time: as many as were used since the last time.
    ahead: Cell<u16>,
}

// SAFETY: the tracker owns its slot except for the atomic counter.
unsafe impl Send for ExtTracker {}

impl ExtTracker {
    /// Attaches `len` bytes at `offset` of the memory to an empty buffer; they become its data and
    /// `len` its packet length.
    ///
    /// Returns false, with the mbuf unchanged, if the range is not within the memory, if the mbuf
    /// is a chain, shared, or already external, or if the tracker already has 65533 mbufs out.
    #[inline]
    #[must_use]
    pub fn attach(&self, mbuf: &mut Mbuf, offset: u64, len: u16) -> bool {
        let Some(at) = self.locate_bytes(offset, len) else {
            return false;
        };
        if !mbuf.is_writable() || mbuf.nb_segs() != 1 || !self.take_share() {
            return false;
        }
        self.point_mbuf_at(mbuf.raw_mbuf_mut(), at, len);
        true
    }

    /// Like [`Self::attach`], with one atomic step of the counter for each mbuf, as
    /// `rte_mbuf_ext_refcnt_update` counts: for measurements that must cost the same as in any
    /// other DPDK program.
    #[inline]
    #[must_use]
    pub fn attach_unbatched(&self, mbuf: &mut Mbuf, offset: u64, len: u16) -> bool {
        let Some(at) = self.locate_bytes(offset, len) else {
            return false;
        };
        if !mbuf.is_writable() || mbuf.nb_segs() != 1 || !self.take_shares(1) {
            return false;
        }
        self.point_mbuf_at(mbuf.raw_mbuf_mut(), at, len);
        true
    }

    /// Address of these bytes, if they are within the memory.
    #[inline]
    pub(crate) fn locate_bytes(&self, offset: u64, len: u16) -> Option<ExtSlice> {
        // SAFETY: the slot is ours while the tracker lives.
        let memory = unsafe { self.slot.as_ref() }.memory.as_ref()?;
        memory.slice(offset, usize::from(len))
    }

    /// Takes a share for one mbuf, which returns it when it is freed.
    #[inline]
    pub(crate) fn take_share(&self) -> bool {
        if self.spare.get() == 0 && !self.take_ahead() {
            return false;
        }
        self.spare.set(self.spare.get() - 1);
        true
    }

    #[inline(never)]
    fn take_ahead(&self) -> bool {
        // SAFETY: the slot is ours while the tracker lives. Relaxed: as in `take_shares`.
        let taken = unsafe { self.slot.as_ref() }
            .shinfo
            .refcnt
            .load(Ordering::Relaxed);
        let count = self.ahead.get().min(MAX_SHARES.saturating_sub(taken));
        if count == 0 || !self.take_shares(count) {
            return false;
        }
        self.spare.set(count);
        self.ahead.set((2 * self.ahead.get()).min(AHEAD));
        true
    }

    #[inline]
    fn take_shares(&self, count: u16) -> bool {
        // SAFETY: the slot is ours while the tracker lives.
        let refcnt = unsafe { &self.slot.as_ref().shinfo.refcnt };
        // Relaxed: the mbuf reaches other threads through a queue that provides the ordering.
        if refcnt.load(Ordering::Relaxed) > MAX_SHARES - count {
            return false;
        }
        refcnt.fetch_add(count, Ordering::Relaxed);
        true
    }

    /// Points the mbuf at the memory as `rte_pktmbuf_attach_extbuf` does, and sets its data; the
    /// caller has taken the share.
    #[inline]
    pub(crate) fn point_mbuf_at(&self, mbuf: &mut sys::rte_mbuf, at: ExtSlice, len: u16) {
        mbuf.buf_addr = at.ptr.as_ptr().cast();
        mbuf.buf_iova = at.iova;
        mbuf.buf_len = len;
        mbuf.data_off = 0;
        mbuf.data_len = len;
        mbuf.pkt_len = u32::from(len);
        mbuf.ol_flags |= sys::RTE_MBUF_F_EXTERNAL;
        // SAFETY: the slot is ours while the tracker lives.
        mbuf.shinfo = unsafe { &raw mut (*self.slot.as_ptr()).shinfo };
    }

    fn give_spare_back(&self) {
        let count = self.spare.replace(0);
        if count > 0 {
            // SAFETY: the slot is ours while the tracker lives.
            let refcnt = unsafe { &self.slot.as_ref().shinfo.refcnt };
            // If all other shares are returned, no other thread changes the counter. Acquire: as in
            // `outstanding_mbufs`.
            if refcnt.load(Ordering::Acquire) == count + 1 {
                refcnt.store(1, Ordering::Relaxed);
            } else {
                // Release: this may end a tracker that another thread reclaims.
                refcnt.fetch_sub(count, Ordering::Release);
            }
        }
    }

    /// Mbufs that still point into the memory, wherever they are.
    #[inline]
    pub fn outstanding_mbufs(&self) -> u16 {
        // SAFETY: the slot is ours while the tracker lives. Acquire: at zero,
        // every reader is done with the memory.
        unsafe { self.slot.as_ref() }
            .shinfo
            .refcnt
            .load(Ordering::Acquire)
            - 1
            - self.spare.get()
    }
}

impl Drop for ExtTracker {
    fn drop(&mut self) {
        self.give_spare_back();
        // SAFETY: the slot is valid, and `home` lives while any slot is out.
        unsafe {
            let slot = self.slot.as_ref();
            let dropped = &(*slot.home).dropped;
            let mut head = dropped.load(Ordering::Relaxed);
            loop {
                slot.dropped_next.store(head, Ordering::Relaxed);
                // Release: pairs with the acquire of `sweep`, which takes all.
                match dropped.compare_exchange_weak(
                    head,
                    self.slot.as_ptr(),
                    Ordering::Release,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return,
                    Err(now) => head = now,
                }
            }
        }
    }
}

/// DPDK requires a callback; the owner's share keeps the counter above zero, so this is never
/// called while the slot is in use.
unsafe extern "C" fn nothing_to_free(_addr: *mut c_void, _opaque: *mut c_void) {}
