//! Per-worker stack of free buffers: allocation and release call into DPDK only once in 64
//! operations, to refill the stack or to return surplus.
//!
//! A buffer of the same pool that was freed here is the next one allocated, while it is still warm
//! in the CPU cache.

use crate::mbuf::{init_raw, prefetch};
use crate::{ExtTracker, Mbuf, Mempool};
use dpdk_sys as sys;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering;

const REFILL: usize = 64;
const STACK: usize = 512;
/// Buffers kept when a full stack is trimmed: the most recently used ones.
const KEEP: usize = STACK / 2;
/// Buffers kept when the pool runs dry.
const SPARE: usize = 16;

/// Buffer cache of one worker, whose thread is registered with DPDK.
pub struct MbufCache {
    len: usize,
    stack: Box<[*mut sys::rte_mbuf; STACK]>,
    pool: Mempool,
    /// The pool's address, for comparison with an mbuf's pool.
    own: *mut sys::rte_mempool,
    buf_len: u16,
    iova_is_va: bool,
    foreign: ForeignBuffers,
}

/// Buffers of another pool, collected to be returned to it in bulk.
struct ForeignBuffers {
    pool: *mut sys::rte_mempool,
    buf_len: u16,
    len: usize,
    bufs: [*mut sys::rte_mbuf; REFILL],
}

// SAFETY: the cache owns the buffers it holds, and buffers are bound to no thread; another pool
// stays alive while any of its buffers is held.
unsafe impl Send for MbufCache {}

impl MbufCache {
    /// Creates an empty cache for `pool`.
    pub fn new(pool: &Mempool) -> Self {
        Self {
            len: 0,
            stack: Box::new([ptr::null_mut(); STACK]),
            own: pool.as_ptr(),
            buf_len: pool.buf_len(),
            iova_is_va: pool.eal_handle().iova_is_va(),
            pool: pool.clone(),
            foreign: ForeignBuffers {
                pool: ptr::null_mut(),
                buf_len: 0,
                len: 0,
                bufs: [ptr::null_mut(); REFILL],
            },
        }
    }

    /// The pool that the cache allocates from.
    pub fn pool(&self) -> &Mempool {
        &self.pool
    }

    /// Buffers that can be allocated without a call to the pool.
    pub fn cached_buffers(&self) -> usize {
        self.len
    }

    /// Allocates an empty buffer; returns `None` when the pool is exhausted.
    #[inline]
    pub fn alloc(&mut self) -> Option<Mbuf> {
        if self.len == 0 && !self.refill_stack() {
            return None;
        }
        self.len -= 1;
        let buffer = self.stack[self.len];
        if let Some(next) = self.len.checked_sub(1) {
            // The next allocation writes the two cache lines of the mbuf and the first two lines of
            // its data, which follow the headroom.
            let next = self.stack[next].cast::<u8>().cast_const();
            for line in [0, 64, 256, 320] {
                prefetch(next.wrapping_add(line));
            }
        }
        // SAFETY: buffers on the stack are free ones of `pool`, owned by us.
        unsafe {
            init_raw(buffer, self.buf_len);
            Some(Mbuf::from_raw(NonNull::new_unchecked(buffer)))
        }
    }

    /// Ensures that the next `count` allocations succeed (at most 64).
    #[inline]
    pub fn reserve(&mut self, count: usize) -> bool {
        self.len >= count || self.refill_up_to(count.min(REFILL))
    }

    #[cold]
    fn refill_up_to(&mut self, count: usize) -> bool {
        while self.len < count {
            if !self.refill_stack() {
                return false;
            }
        }
        true
    }

    /// Builds a two-segment packet: `headers` bytes (at most the room of one buffer), which `fill`
    /// writes, and a reference to `len` bytes of a tracker's memory. Returns `None` without calling
    /// `fill` when the pool is exhausted, the headers do not fit, or [`ExtTracker::attach`] would
    /// refuse.
    #[inline]
    pub fn alloc_frame(
        &mut self,
        headers: u16,
        fill: impl FnOnce(&mut [u8]),
        (tracker, offset, len): (&ExtTracker, u64, u16),
    ) -> Option<Mbuf> {
        let at = tracker.locate_bytes(offset, len)?;
        let start = crate::HEADROOM.min(self.buf_len);
        if headers > self.buf_len - start || !self.reserve(2) || !tracker.take_share() {
            return None;
        }
        let (head, tail) = (self.stack[self.len - 1], self.stack[self.len - 2]);
        self.len -= 2;
        // The frame after the next one: the lines that will be written in its header buffer and its
        // tail mbuf.
        if let Some(&[next_tail, next_head]) = self.stack[..self.len].last_chunk::<2>() {
            for line in [0, 64, 256, 320] {
                prefetch(next_head.cast::<u8>().cast_const().wrapping_add(line));
            }
            for line in [0, 64] {
                prefetch(next_tail.cast::<u8>().cast_const().wrapping_add(line));
            }
        }
        // SAFETY: both are free buffers of `pool`, owned by us and not the same; `headers`
        // bytes fit behind the headroom, and pool memory is initialised.
        unsafe {
            init_raw(tail, self.buf_len);
            tracker.point_mbuf_at(&mut *tail, at, len);
            init_raw(head, self.buf_len);
            let mbuf = &mut *head;
            mbuf.next = tail;
            mbuf.nb_segs = 2;
            mbuf.data_len = headers;
            mbuf.pkt_len = u32::from(headers) + u32::from(len);
            fill(std::slice::from_raw_parts_mut(
                mbuf.buf_addr.cast::<u8>().add(usize::from(start)),
                usize::from(headers),
            ));
            Some(Mbuf::from_raw(NonNull::new_unchecked(head)))
        }
    }

    #[cold]
    fn refill_stack(&mut self) -> bool {
        for want in [REFILL, 8, 1] {
            let at = &mut self.stack[self.len..];
            if at.len() < want {
                continue;
            }
            // SAFETY: the pool is alive and `at` has room for `want` pointers.
            let rc = unsafe {
                sys::siw_mempool_get_bulk(self.pool.as_ptr(), at.as_mut_ptr(), want as u32)
            };
            if rc == 0 {
                self.len += want;
                return true;
            }
        }
        false
    }

    /// Frees a whole chain. External segments return their references; segments with clones are
    /// freed through DPDK.
    #[inline]
    pub fn free(&mut self, mbuf: Mbuf) {
        self.free_all(std::iter::once(mbuf));
    }

    /// Like [`Self::free`], for several chains. References of consecutive segments to the same
    /// memory are returned with one atomic operation, before this function returns.
    #[inline]
    pub fn free_all(&mut self, mbufs: impl Iterator<Item = Mbuf>) {
        let mut shares = Shares::new();
        for mbuf in mbufs {
            let mut seg = mbuf.into_raw().as_ptr();
            while !seg.is_null() {
                // SAFETY: the chain was owned by `mbuf`, so each segment is ours now.
                unsafe {
                    let mut next = (*seg).next;
                    if !next.is_null() && (*next).next.is_null() {
                        // The header buffer goes on top of the stack, to hold the next headers:
                        // buffers that only point to external memory keep their own room out of the
                        // CPU cache.
                        self.free_segment(next, &mut shares);
                        next = ptr::null_mut();
                    }
                    self.free_segment(seg, &mut shares);
                    seg = next;
                }
            }
        }
        shares.give_back();
    }

    /// # Safety
    /// `seg` is owned by the caller and not used by it afterwards.
    #[inline]
    unsafe fn free_segment(&mut self, seg: *mut sys::rte_mbuf, shares: &mut Shares) {
        // SAFETY: owned, see above.
        let mbuf = unsafe { &mut *seg };
        // Acquire: the last reader's release comes before the buffer's reuse.
        if mbuf.refcnt.load(Ordering::Acquire) != 1
            || mbuf.ol_flags & sys::RTE_MBUF_F_INDIRECT != 0
            || mbuf.pool != self.own
            || self.len == STACK
        {
            // SAFETY: owned by the caller.
            return unsafe { self.free_unusual(seg, shares) };
        }
        // As rte_pktmbuf_prefree_seg does: pools hold single segments.
        mbuf.next = ptr::null_mut();
        mbuf.nb_segs = 1;
        if mbuf.ol_flags & sys::RTE_MBUF_F_EXTERNAL != 0 {
            // SAFETY: an external segment with no other reference to it.
            unsafe { detach_external(mbuf, self.buf_len, self.iova_is_va, shares) };
        }
        self.stack[self.len] = seg;
        self.len += 1;
    }

    /// Slow path of [`Self::free_segment`]: segments with clones, segments of another pool, and a
    /// full stack.
    ///
    /// # Safety
    /// As for [`Self::free_segment`].
    #[inline(never)]
    unsafe fn free_unusual(&mut self, seg: *mut sys::rte_mbuf, shares: &mut Shares) {
        // SAFETY: owned, see above.
        let mbuf = unsafe { &mut *seg };
        // Acquire: as in `free_segment`.
        if mbuf.refcnt.load(Ordering::Acquire) != 1 || mbuf.ol_flags & sys::RTE_MBUF_F_INDIRECT != 0
        {
            // SAFETY: owned; DPDK decrements the reference count.
            unsafe { sys::siw_pktmbuf_free_seg(seg) };
            return;
        }
        if mbuf.pool == self.own {
            self.give_back(KEEP);
            // SAFETY: owned by the caller, and there is room for it.
            return unsafe { self.free_segment(seg, shares) };
        }
        mbuf.next = ptr::null_mut();
        mbuf.nb_segs = 1;
        if mbuf.pool != self.foreign.pool {
            self.change_foreign(mbuf.pool);
        }
        if mbuf.ol_flags & sys::RTE_MBUF_F_EXTERNAL != 0 {
            // SAFETY: an external segment with no other reference to it.
            unsafe { detach_external(mbuf, self.foreign.buf_len, self.iova_is_va, shares) };
        }
        if self.foreign.len == REFILL {
            self.flush_foreign();
        }
        self.foreign.bufs[self.foreign.len] = seg;
        self.foreign.len += 1;
    }

    /// Returns the least recently used buffers to the pool, all but `keep`.
    fn give_back(&mut self, keep: usize) {
        let give = self.len.saturating_sub(keep);
        if give == 0 {
            return;
        }
        // SAFETY: the first `give` entries are free buffers of this pool.
        unsafe {
            sys::siw_mempool_put_bulk(self.pool.as_ptr(), self.stack.as_ptr(), give as u32);
        }
        self.stack.copy_within(give..self.len, 0);
        self.len = keep;
    }

    #[cold]
    fn change_foreign(&mut self, pool: *mut sys::rte_mempool) {
        self.flush_foreign();
        self.foreign.pool = pool;
        // SAFETY: the pool is alive because we hold one of its buffers.
        self.foreign.buf_len = unsafe { sys::siw_pool_data_room(pool) };
    }

    fn flush_foreign(&mut self) {
        if self.foreign.len > 0 {
            // SAFETY: these are free buffers of that pool.
            unsafe {
                sys::siw_mempool_put_bulk(
                    self.foreign.pool,
                    self.foreign.bufs.as_ptr(),
                    self.foreign.len as u32,
                );
            }
            self.foreign.len = 0;
        }
    }

    /// Returns the buffers of other pools, so that a peer does not run dry, and most buffers of the
    /// own pool when it has few left: ports receive into buffers of the pool, and without any no
    /// frame arrives that would make the worker free or use the cached ones. A worker calls this
    /// when it becomes idle, and from time to time while busy.
    pub fn return_surplus(&mut self) {
        self.flush_foreign();
        if self.len > SPARE && (self.pool.available_buffers() as usize) < STACK {
            self.give_back(SPARE);
        }
    }
}

impl Drop for MbufCache {
    fn drop(&mut self) {
        self.flush_foreign();
        if self.len > 0 {
            // SAFETY: the stack holds free buffers of this pool.
            unsafe {
                sys::siw_mempool_put_bulk(self.pool.as_ptr(), self.stack.as_ptr(), self.len as u32);
            }
        }
    }
}

/// References to external memory that freed mbufs held, not yet returned.
struct Shares {
    /// Null if there are none.
    of: *mut sys::rte_mbuf_ext_shared_info,
    count: u16,
    buf_addr: *mut c_void,
}

impl Shares {
    fn new() -> Shares {
        Shares {
            of: ptr::null_mut(),
            count: 0,
            buf_addr: ptr::null_mut(),
        }
    }

    #[inline]
    fn give_back(&mut self) {
        let (of, count) = (self.of, std::mem::take(&mut self.count));
        if count == 0 {
            return;
        }
        // SAFETY: `count` mbufs counted in `of` passed their references on to us, and `of` lives
        // until they are returned.
        unsafe {
            // Release: our reads of the memory come before its owner's reuse, which acquires the
            // counter. Acquire: the reads of all other holders come before the callback.
            if (*of).refcnt.fetch_sub(count, Ordering::AcqRel) == count
                && let Some(free) = (*of).free_cb
            {
                free(self.buf_addr, (*of).fcb_opaque);
            }
        }
    }
}

/// Detaches an external buffer as rte_pktmbuf_detach does, so that the mbuf points to its own room
/// again, except that [`Shares::give_back`] returns the reference later.
///
/// # Safety
/// `mbuf` has an external buffer attached, is owned by the caller, and its pool's buffers have
/// `buf_len` bytes.
#[inline]
unsafe fn detach_external(
    mbuf: &mut sys::rte_mbuf,
    buf_len: u16,
    iova_is_va: bool,
    shares: &mut Shares,
) {
    if shares.of != mbuf.shinfo {
        shares.give_back();
        shares.of = mbuf.shinfo;
    }
    shares.count += 1;
    shares.buf_addr = mbuf.buf_addr;
    let own = ptr::from_mut(mbuf)
        .cast::<u8>()
        .wrapping_add(size_of::<sys::rte_mbuf>() + usize::from(mbuf.priv_size));
    mbuf.buf_addr = own.cast();
    let iova = if iova_is_va {
        own as u64
    } else {
        let header = (size_of::<sys::rte_mbuf>() + usize::from(mbuf.priv_size)) as u64;
        // SAFETY: `mbuf` is an object of its pool; its buffer follows it.
        header + unsafe { sys::siw_mempool_virt2iova(ptr::from_ref(mbuf).cast()) }
    };
    mbuf.buf_iova = iova;
    mbuf.buf_len = buf_len;
    mbuf.ol_flags = 0;
}
