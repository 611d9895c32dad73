//! Trackers of external buffers: one for each work request in flight.
//!
//! A tracker counts the mbufs that point into a work request's memory. The
//! request completes when its bytes are ACKed and [`ExtTracker::outstanding`] is
//! zero: then neither the stack nor a driver nor the peer on a ring pair reads
//! the memory any more.
//!
//! ```text
//!            alloc             free, none outstanding
//!   free list ────► in use ─────────────────────────► free list
//!                     │  free, some outstanding              ▲
//!                     └───────────────► zombies ── sweep ────┘
//! ```
//!
//! DPDK's own counter does the counting. It starts at 1, the owner's share, so
//! it never falls to zero and the callback never has work; a slot is reused only
//! when the counter is back at 1. An mbuf gives its share back from whatever
//! thread frees it.

use crate::{ExtMemory, Mbuf, eal};
use dpdk_sys as sys;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU16, Ordering};

/// Shares one tracker can hand out: DPDK counts in 16 bits.
const MAX_SHARES: u16 = u16::MAX - 1;

#[repr(C, align(64))]
struct Slot {
    shinfo: sys::rte_mbuf_ext_shared_info,
    memory: Option<Arc<dyn ExtMemory>>,
    home: *const Home,
    /// Link of the list of dropped trackers.
    dropped_next: AtomicPtr<Slot>,
}

/// Where trackers go that are dropped instead of freed.
struct Home {
    dropped: AtomicPtr<Slot>,
}

/// One a worker: the slots of its work requests.
pub struct TrackerPool {
    home: NonNull<Home>,
    slots: NonNull<[Slot]>,
    free: Vec<NonNull<Slot>>,
    zombies: Vec<NonNull<Slot>>,
}

// SAFETY: slots of the free and zombie lists belong to the pool; what others
// touch (the counter, the list of dropped trackers) is atomic.
unsafe impl Send for TrackerPool {}

impl TrackerPool {
    /// Room for `capacity` work requests in flight.
    pub fn new(capacity: usize) -> Self {
        let home = NonNull::from(Box::leak(Box::new(Home {
            dropped: AtomicPtr::new(ptr::null_mut()),
        })));
        let slots: Box<[Slot]> = (0..capacity)
            .map(|_| Slot {
                shinfo: sys::rte_mbuf_ext_shared_info {
                    free_cb: Some(nothing_to_free),
                    fcb_opaque: ptr::null_mut(),
                    refcnt: AtomicU16::new(1),
                },
                memory: None,
                home: home.as_ptr(),
                dropped_next: AtomicPtr::new(ptr::null_mut()),
            })
            .collect();
        let slots = NonNull::from(Box::leak(slots));
        let first = slots.cast::<Slot>();
        // Pushed backwards, so that low slots are used first.
        let free = (0..capacity)
            .rev()
            // SAFETY: the index is within the slice.
            .map(|i| unsafe { first.add(i) })
            .collect();
        Self {
            home,
            slots,
            free,
            zombies: Vec::with_capacity(capacity),
        }
    }

    /// A tracker for a work request on `memory`, which stays mapped until no
    /// mbuf points into it. `None` when all slots are in use.
    #[inline]
    pub fn alloc(&mut self, memory: Arc<dyn ExtMemory>) -> Option<ExtTracker> {
        if self.free.is_empty() && self.sweep() == 0 {
            return None;
        }
        let slot = self.free.pop()?;
        // SAFETY: a slot on the free list belongs to us alone.
        unsafe { (*slot.as_ptr()).memory = Some(memory) };
        Some(ExtTracker { slot })
    }

    /// Ends a tracker. When mbufs still refer to it, its slot and its memory
    /// stay until a later [`Self::sweep`] finds them gone.
    #[inline]
    pub fn free(&mut self, tracker: ExtTracker) {
        if !self.owns(tracker.slot) {
            // Another pool's: its own list takes it.
            drop(tracker);
            return;
        }
        let slot = tracker.slot;
        std::mem::forget(tracker);
        self.reclaim(slot);
    }

    fn owns(&self, slot: NonNull<Slot>) -> bool {
        // SAFETY: a tracker's slot stays valid while the tracker lives.
        ptr::eq(unsafe { (*slot.as_ptr()).home }, self.home.as_ptr())
    }

    #[inline]
    fn reclaim(&mut self, slot: NonNull<Slot>) {
        // SAFETY: the owner's share is ours now. Acquire: pairs with the release
        // with which each mbuf gave its share back.
        unsafe {
            if (*slot.as_ptr()).shinfo.refcnt.load(Ordering::Acquire) == 1 {
                (*slot.as_ptr()).memory = None;
                self.free.push(slot);
            } else {
                self.zombies.push(slot);
            }
        }
    }

    /// Looks whether the mbufs of freed trackers are gone by now; returns how
    /// many slots came back. A worker calls it when it has nothing else to do.
    pub fn sweep(&mut self) -> usize {
        let before = self.free.len();
        for i in (0..self.zombies.len()).rev() {
            let slot = self.zombies[i];
            // SAFETY: a zombie's owner's share is ours; Acquire as in `reclaim`.
            if unsafe { (*slot.as_ptr()).shinfo.refcnt.load(Ordering::Acquire) } == 1 {
                self.zombies.swap_remove(i);
                self.reclaim(slot);
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
            self.reclaim(slot);
        }
        self.free.len() - before
    }

    /// Slots that wait for mbufs to be freed.
    pub fn zombies(&self) -> usize {
        self.zombies.len()
    }

    /// Slots that [`Self::alloc`] can give at once.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }
}

impl Drop for TrackerPool {
    fn drop(&mut self) {
        self.sweep();
        if self.free.len() == self.slots.len() {
            // SAFETY: both were leaked in `new`; every slot is on the free list,
            // so no tracker and no mbuf refers to them.
            unsafe {
                drop(Box::from_raw(self.slots.as_ptr()));
                drop(Box::from_raw(self.home.as_ptr()));
            }
        } else {
            // An mbuf or a tracker is still out: the slots must outlive it.
            eal::leak_environment();
        }
    }
}

/// The memory of one work request, and the count of mbufs that point into it.
///
/// Give it back with [`TrackerPool::free`]; dropping it also works, the pool
/// then finds it at its next sweep.
pub struct ExtTracker {
    slot: NonNull<Slot>,
}

// SAFETY: the tracker owns its slot except for the atomic counter.
unsafe impl Send for ExtTracker {}

impl ExtTracker {
    /// Lets an empty buffer point to `len` bytes at `offset` of the memory; its
    /// data is then these bytes and its packet length `len`.
    ///
    /// False, with the mbuf unchanged, when the range is not in the memory, the
    /// mbuf is a chain, shared, or already external, or the tracker has 65534
    /// mbufs out.
    #[inline]
    #[must_use]
    pub fn attach(&self, mbuf: &mut Mbuf, offset: u64, len: u16) -> bool {
        // SAFETY: the slot is ours while the tracker lives.
        let slot = unsafe { self.slot.as_ref() };
        let Some(memory) = slot.memory.as_ref() else {
            return false;
        };
        let Some(at) = memory.slice(offset, usize::from(len)) else {
            return false;
        };
        if !mbuf.is_writable() || mbuf.nb_segs() != 1 {
            return false;
        }
        // Relaxed: the mbuf reaches other threads through a queue that orders.
        if slot.shinfo.refcnt.load(Ordering::Relaxed) >= MAX_SHARES {
            return false;
        }
        slot.shinfo.refcnt.fetch_add(1, Ordering::Relaxed);
        let m = mbuf.raw_mut();
        // As rte_pktmbuf_attach_extbuf does it, with the data filled in.
        m.buf_addr = at.ptr.as_ptr().cast();
        m.buf_iova = at.iova;
        m.buf_len = len;
        m.data_off = 0;
        m.data_len = len;
        m.pkt_len = u32::from(len);
        m.ol_flags |= sys::RTE_MBUF_F_EXTERNAL;
        m.shinfo = ptr::from_ref(&slot.shinfo).cast_mut();
        true
    }

    /// Mbufs that still point into the memory, wherever they are.
    #[inline]
    pub fn outstanding(&self) -> u16 {
        // SAFETY: the slot is ours while the tracker lives. Acquire: at zero,
        // every reader is done with the memory.
        unsafe { self.slot.as_ref() }
            .shinfo
            .refcnt
            .load(Ordering::Acquire)
            - 1
    }
}

impl Drop for ExtTracker {
    fn drop(&mut self) {
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

/// DPDK wants a callback; the owner's share keeps the counter above zero, so it
/// is never called while the slot is in use.
unsafe extern "C" fn nothing_to_free(_addr: *mut c_void, _opaque: *mut c_void) {}
