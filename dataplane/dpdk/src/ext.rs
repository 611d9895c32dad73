//! Trackers of external buffers: one for each work request in flight.
//!
//! A tracker counts the mbufs that point into a work request's memory. The request completes when
//! its bytes are ACKed and [`ExtTracker::outstanding_mbufs`] is zero: from then on neither the
//! stack, nor a driver, nor the peer on a ring pair reads the memory.
//!
//! ```text
//!            alloc             free, none outstanding
//!   free list ────► in use ─────────────────────────────► free list
//!                     │  free, some outstanding              ▲
//!                     └──► zombies ── last mbuf freed ──► released list
//! ```
//!
//! DPDK's own reference counter is used. It starts at 1, the owner's share, so it does not fall to
//! zero while the tracker is in use. The thread that frees an mbuf, whichever it is, returns the
//! mbuf's share. A zombie has no owner's share: the thread that frees its last mbuf puts it on the
//! released list, where the pool finds it. So the number of zombies costs nothing, only their
//! releases do. A tracker with many mbufs takes shares in advance, because each atomic step of the
//! counter waits for all earlier stores.

use crate::{ExtMemory, ExtSlice, Mbuf, eal};
use dpdk_sys as sys;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU16, Ordering, fence};

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
    home: *const ReleasedTrackers,
    /// Link in the list of released trackers.
    released_next: AtomicPtr<TrackerSlot>,
    /// Place among the pool's zombies. Only the pool accesses it.
    zombie_at: Option<u32>,
    /// Number to report when the last mbuf of a zombie was freed. Only the pool accesses it.
    waiter: Option<u32>,
}

/// List of zombies whose last mbuf was freed, and of trackers that were dropped instead of freed.
struct ReleasedTrackers {
    first: AtomicPtr<TrackerSlot>,
}

impl ReleasedTrackers {
    /// Adds a slot.
    ///
    /// # Safety
    /// No mbuf refers to the slot, or its tracker was dropped; it is not in the list, and the caller
    /// does not access it afterwards.
    unsafe fn push(&self, slot: NonNull<TrackerSlot>) {
        let mut head = self.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the link is the caller's until the slot is in the list.
            unsafe {
                (*slot.as_ptr())
                    .released_next
                    .store(head, Ordering::Relaxed)
            };
            // Release: pairs with the acquire of `take_released`, which takes all.
            match self.first.compare_exchange_weak(
                head,
                slot.as_ptr(),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// Tracker slots for one worker's work requests.
pub struct TrackerPool {
    home: NonNull<ReleasedTrackers>,
    slots: NonNull<[TrackerSlot]>,
    free: Vec<NonNull<TrackerSlot>>,
    zombies: Vec<NonNull<TrackerSlot>>,
    /// Slots taken from the released list that are still to be reclaimed, linked by `released_next`.
    released: *mut TrackerSlot,
    /// Releases that were waited for and are still to be reported.
    notices: VecDeque<Released>,
    last_serial: u64,
}

/// Identifies a tracker of a pool even after it has ended, see [`TrackerPool::is_zombie`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrackerId {
    slot: usize,
    serial: u64,
}

/// Reports that the last mbuf of an ended tracker was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// The tracker.
    pub tracker: TrackerId,
    /// Number that was passed to [`TrackerPool::free_and_await`].
    pub waiter: u32,
}

// SAFETY: slots of the free and zombie lists belong to the pool; the fields that other threads
// access (the counter, the released list) are atomic.
unsafe impl Send for TrackerPool {}

impl TrackerPool {
    /// Creates a pool for `capacity` work requests in flight.
    pub fn new(capacity: usize) -> Self {
        let home = NonNull::from(Box::leak(Box::new(ReleasedTrackers {
            first: AtomicPtr::new(ptr::null_mut()),
        })));
        let slots: Box<[TrackerSlot]> = (0..capacity)
            .map(|_| TrackerSlot {
                shinfo: sys::rte_mbuf_ext_shared_info {
                    free_cb: Some(on_last_mbuf_freed),
                    fcb_opaque: ptr::null_mut(),
                    refcnt: AtomicU16::new(1),
                },
                memory: None,
                serial: 0,
                home: home.as_ptr(),
                released_next: AtomicPtr::new(ptr::null_mut()),
                zombie_at: None,
                waiter: None,
            })
            .collect();
        let slots = NonNull::from(Box::leak(slots));
        let first = slots.cast::<TrackerSlot>();
        // Pushed backwards, so that low slots are used first.
        let free = (0..capacity)
            .rev()
            .map(|index| {
                // SAFETY: the index is within the slice, and no other reference to it exists.
                unsafe {
                    let slot = first.add(index);
                    (*slot.as_ptr()).shinfo.fcb_opaque = slot.as_ptr().cast();
                    slot
                }
            })
            .collect();
        Self {
            home,
            slots,
            free,
            zombies: Vec::with_capacity(capacity),
            released: ptr::null_mut(),
            notices: VecDeque::new(),
            last_serial: 0,
        }
    }

    /// Allocates a tracker for a work request on `memory`, which stays mapped until no mbuf points
    /// into it. `None` when all slots are in use.
    #[inline]
    pub fn alloc(&mut self, memory: Arc<dyn ExtMemory>) -> Option<ExtTracker> {
        while self.free.is_empty() {
            self.reclaim_next()?;
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

    /// Ends a tracker. If mbufs still refer to it, its slot and its memory are kept until they are
    /// freed.
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
        self.end_slot(slot, None);
    }

    /// Ends a tracker to which mbufs may still refer, as [`Self::free`] does. Returns its identifier if
    /// some do: [`Self::pop_notice`] reports `waiter` after the last one was freed.
    #[inline]
    pub fn free_and_await(&mut self, tracker: ExtTracker, waiter: u32) -> Option<TrackerId> {
        if !self.is_owner_of(tracker.slot) {
            drop(tracker);
            return None;
        }
        tracker.give_spare_back();
        let slot = tracker.slot;
        std::mem::forget(tracker);
        let id = self.id_of_slot(slot);
        self.end_slot(slot, Some(waiter)).then_some(id)
    }

    /// Takes the next report of a release that is waited for.
    #[inline]
    pub fn pop_notice(&mut self) -> Option<Released> {
        self.notices.pop_front()
    }

    fn is_owner_of(&self, slot: NonNull<TrackerSlot>) -> bool {
        // SAFETY: a tracker's slot stays valid while the tracker lives.
        ptr::eq(unsafe { (*slot.as_ptr()).home }, self.home.as_ptr())
    }

    /// Ends the tracker of a slot, whose owner's share is ours. Returns true if mbufs refer to it.
    #[inline]
    fn end_slot(&mut self, slot: NonNull<TrackerSlot>, waiter: Option<u32>) -> bool {
        // SAFETY: the owner's share and all plain fields are ours.
        let refcnt = unsafe { &(*slot.as_ptr()).shinfo.refcnt };
        // Acquire: pairs with the release with which each mbuf returned its share. With
        // `fetch_sub`, the owner's share is given up; if it was the last one, no other thread has
        // seen zero.
        if refcnt.load(Ordering::Acquire) == 1 || refcnt.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.reclaim_slot(slot);
            return false;
        }
        // SAFETY: threads that free mbufs access neither field.
        unsafe {
            (*slot.as_ptr()).zombie_at = Some(self.zombies.len() as u32);
            (*slot.as_ptr()).waiter = waiter;
        }
        self.zombies.push(slot);
        true
    }

    /// Puts a slot to which no mbuf refers onto the free list.
    #[inline]
    fn reclaim_slot(&mut self, slot: NonNull<TrackerSlot>) {
        // SAFETY: no mbuf refers to the slot, so it belongs to us alone.
        unsafe {
            (*slot.as_ptr()).shinfo.refcnt.store(1, Ordering::Relaxed);
            (*slot.as_ptr()).memory = None;
        }
        self.free.push(slot);
    }

    /// Takes a slot from the released list.
    #[inline]
    fn take_released(&mut self) -> Option<NonNull<TrackerSlot>> {
        if self.released.is_null() {
            // SAFETY: `home` lives as long as the pool.
            let first = unsafe { &self.home.as_ref().first };
            if first.load(Ordering::Relaxed).is_null() {
                return None;
            }
            // Acquire: pairs with the release that put a slot on the list.
            self.released = first.swap(ptr::null_mut(), Ordering::Acquire);
        }
        let slot = NonNull::new(self.released)?;
        // SAFETY: a slot on the list is not accessed by other threads.
        self.released = unsafe { (*slot.as_ptr()).released_next.load(Ordering::Relaxed) };
        Some(slot)
    }

    /// Reclaims the next slot of the released list. Returns `None` if the list is empty.
    #[inline]
    fn reclaim_next(&mut self) -> Option<()> {
        let slot = self.take_released()?;
        // SAFETY: only the pool accesses these fields.
        let (zombie_at, waiter) = unsafe {
            (
                (*slot.as_ptr()).zombie_at.take(),
                (*slot.as_ptr()).waiter.take(),
            )
        };
        let Some(place) = zombie_at else {
            // Dropped, with its owner's share.
            self.end_slot(slot, None);
            return Some(());
        };
        self.zombies.swap_remove(place as usize);
        if let Some(moved) = self.zombies.get(place as usize) {
            // SAFETY: only the pool accesses the field.
            unsafe { (*moved.as_ptr()).zombie_at = Some(place) };
        }
        if let Some(waiter) = waiter {
            let tracker = self.id_of_slot(slot);
            self.notices.push_back(Released { tracker, waiter });
        }
        self.reclaim_slot(slot);
        Some(())
    }

    /// Reclaims up to `most` slots of ended trackers whose mbufs have all been freed. The cost does not
    /// depend on the number of other slots.
    #[inline]
    pub fn reclaim_released(&mut self, most: usize) {
        for _ in 0..most {
            if self.reclaim_next().is_none() {
                return;
            }
        }
    }

    /// Reclaims the slots of all ended trackers whose mbufs have been freed; returns the number of
    /// slots reclaimed.
    pub fn sweep_released(&mut self) -> usize {
        let before = self.free.len();
        while self.reclaim_next().is_some() {}
        self.free.len() - before
    }

    /// Slots of ended trackers that are not reclaimed yet.
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

    /// Ended trackers that still have mbufs pointing into memory whose address `is_meant` accepts.
    pub fn ended_trackers_of(
        &self,
        is_meant: impl Fn(usize) -> bool,
    ) -> impl Iterator<Item = TrackerId> {
        let is_of_memory = move |slot: &&NonNull<TrackerSlot>| {
            // SAFETY: a zombie's memory is ours.
            let held = unsafe { (*slot.as_ptr()).memory.as_ref() };
            held.is_some_and(|held| is_meant(Arc::as_ptr(held).cast::<()>() as usize))
        };
        let zombies = self.zombies.iter().filter(is_of_memory);
        zombies.map(|slot| self.id_of_slot(*slot))
    }

    /// Returns true while the pool keeps the memory of an ended tracker, because mbufs point into it
    /// or did so until recently.
    pub fn is_zombie(&self, tracker: TrackerId) -> bool {
        if tracker.slot >= self.slots.len() {
            return false;
        }
        // SAFETY: within the slots. Only the pool writes both fields.
        unsafe {
            let slot = self.slots.cast::<TrackerSlot>().add(tracker.slot).as_ptr();
            (*slot).serial == tracker.serial && (*slot).zombie_at.is_some()
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
/// Return it with [`TrackerPool::free`]. If it is dropped instead, the pool finds it on its released
/// list.
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
        // SAFETY: the slot is valid and in no list, and `home` lives while any slot is out.
        unsafe { (*(*self.slot.as_ptr()).home).push(self.slot) };
    }
}

/// Puts a zombie whose last mbuf was freed onto the released list of its pool. While a tracker is in
/// use, its owner's share keeps the counter above zero, and this is not called.
unsafe extern "C" fn on_last_mbuf_freed(_addr: *mut c_void, opaque: *mut c_void) {
    let Some(slot) = NonNull::new(opaque.cast::<TrackerSlot>()) else {
        return;
    };
    // DPDK reads the counter of a last mbuf relaxed. Acquire: pairs with the releases with which the
    // other mbufs returned their shares.
    fence(Ordering::Acquire);
    // SAFETY: `opaque` is the slot that has the counter, which is at zero: no mbuf refers to the slot,
    // and it is not in the list. `home` lives while any slot is out, and does not change.
    unsafe { (*(*slot.as_ptr()).home).push(slot) };
}
