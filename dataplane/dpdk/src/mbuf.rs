//! A packet: an owned chain of buffers.
//!
//! An [`Mbuf`] owns its first segment and all that follow. The bytes of a segment lie in the
//! buffer's own room (direct), in registered memory (external, see `ext.rs`), or in another mbuf's
//! room (a clone). Only a direct segment without clones is writable.

use crate::Mempool;
use dpdk_sys as sys;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::Ordering;

/// An owned packet. Dropping it frees the whole chain through DPDK; the fast path uses
/// [`crate::MbufCache::free`] instead.
#[repr(transparent)]
pub struct Mbuf {
    ptr: NonNull<sys::rte_mbuf>,
    _owns: PhantomData<sys::rte_mbuf>,
}

// SAFETY: an mbuf is bound to no thread; its pool accepts it from any thread, and the counters that
// it shares with clones and external memory are atomic.
unsafe impl Send for Mbuf {}

impl Mbuf {
    /// Allocates an empty buffer; `None` when the pool is exhausted. Workers use
    /// [`crate::MbufCache::alloc`].
    pub fn alloc(pool: &Mempool) -> Option<Self> {
        // SAFETY: the pool is alive.
        let ptr = unsafe { sys::siw_pktmbuf_alloc(pool.as_ptr()) };
        // SAFETY: a fresh mbuf has no other owner.
        NonNull::new(ptr).map(|ptr| unsafe { Self::from_raw(ptr) })
    }

    /// Appends `count` empty buffers to `out`; returns false and appends none if the pool has too
    /// few.
    pub fn alloc_bulk(pool: &Mempool, out: &mut Vec<Mbuf>, count: usize) -> bool {
        let Ok(bulk) = u32::try_from(count) else {
            return false;
        };
        out.reserve(count);
        let spare = out.spare_capacity_mut().as_mut_ptr();
        // SAFETY: `spare` has room for `count` mbufs, each of which is one pointer; all are
        // initialised before the length is set.
        unsafe {
            if sys::siw_mempool_get_bulk(pool.as_ptr(), spare.cast(), bulk) != 0 {
                return false;
            }
            for index in 0..count {
                init_raw(
                    *spare.cast::<*mut sys::rte_mbuf>().add(index),
                    pool.buf_len(),
                );
            }
            out.set_len(out.len() + count);
        }
        true
    }

    /// # Safety
    /// `ptr` is a valid chain without another owner, and its last `next` is null.
    #[inline]
    pub(crate) unsafe fn from_raw(ptr: NonNull<sys::rte_mbuf>) -> Self {
        Self {
            ptr,
            _owns: PhantomData,
        }
    }

    /// Gives up ownership of the chain.
    #[inline]
    pub(crate) fn into_raw(self) -> NonNull<sys::rte_mbuf> {
        let ptr = self.ptr;
        std::mem::forget(self);
        ptr
    }

    #[inline]
    pub(crate) fn raw_mbuf(&self) -> &sys::rte_mbuf {
        // SAFETY: the mbuf is owned by `self`, so it is valid and not written to.
        unsafe { self.ptr.as_ref() }
    }

    #[inline]
    pub(crate) fn raw_mbuf_mut(&mut self) -> &mut sys::rte_mbuf {
        // SAFETY: the mbuf is owned by `self`; clones refer to its buffer and
        // its atomic counter, never to its other fields.
        unsafe { self.ptr.as_mut() }
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut sys::rte_mbuf {
        self.ptr.as_ptr()
    }

    /// Segments in the chain.
    #[inline]
    pub fn nb_segs(&self) -> u16 {
        self.raw_mbuf().nb_segs
    }

    /// Bytes in the whole chain.
    #[inline]
    pub fn pkt_len(&self) -> u32 {
        self.raw_mbuf().pkt_len
    }

    /// Bytes in the first segment.
    #[inline]
    pub fn data_len(&self) -> u16 {
        self.raw_mbuf().data_len
    }

    /// The bytes of the first segment.
    ///
    /// An application that shares external memory may change it at any time: copy out first any
    /// bytes that must not change after they were checked.
    #[inline]
    pub fn data(&self) -> &[u8] {
        seg_bytes(self.raw_mbuf())
    }

    /// The writable bytes of the first segment; empty if the segment is external or has clones.
    #[inline]
    pub fn data_mut(&mut self) -> &mut [u8] {
        if !self.is_writable() {
            return &mut [];
        }
        let mbuf = self.raw_mbuf();
        // SAFETY: data_off + data_len stay within the buffer (an invariant of every method), and
        // the segment is direct and unshared.
        unsafe {
            slice::from_raw_parts_mut(
                mbuf.buf_addr.cast::<u8>().add(usize::from(mbuf.data_off)),
                usize::from(mbuf.data_len),
            )
        }
    }

    /// Returns true if the first segment's bytes are in its own, unshared buffer.
    #[inline]
    pub fn is_writable(&self) -> bool {
        seg_is_writable(self.raw_mbuf())
    }

    /// Returns true if the first segment's bytes are external memory.
    #[inline]
    pub fn is_external(&self) -> bool {
        self.raw_mbuf().ol_flags & sys::RTE_MBUF_F_EXTERNAL != 0
    }

    /// Free bytes before the data of the first segment.
    #[inline]
    pub fn headroom(&self) -> u16 {
        if self.is_writable() {
            self.raw_mbuf().data_off
        } else {
            0
        }
    }

    /// Free bytes after the data of the first segment.
    #[inline]
    pub fn tailroom(&self) -> u16 {
        if self.is_writable() {
            let mbuf = self.raw_mbuf();
            mbuf.buf_len - mbuf.data_off - mbuf.data_len
        } else {
            0
        }
    }

    /// Grows the packet at its end by `len` bytes and returns them; they hold stale data of earlier
    /// packets. `None` if the last segment has no room or is not writable.
    #[inline]
    pub fn append(&mut self, len: u16) -> Option<&mut [u8]> {
        let last = self.last_segment();
        // SAFETY: `last` is a segment of the chain that `self` owns.
        let seg = unsafe { &mut *last };
        if !seg_is_writable(seg) || len > seg.buf_len - seg.data_off - seg.data_len {
            return None;
        }
        let at = usize::from(seg.data_off + seg.data_len);
        let start = seg.buf_addr.cast::<u8>();
        seg.data_len += len;
        let head = self.raw_mbuf_mut();
        head.pkt_len += u32::from(len);
        // SAFETY: the room was checked, the segment is direct and unshared, and
        // pool memory is always initialised (the kernel zeroes it).
        Some(unsafe { slice::from_raw_parts_mut(start.add(at), usize::from(len)) })
    }

    /// Appends a copy of `bytes`; false when they do not fit.
    #[inline]
    pub fn append_slice(&mut self, bytes: &[u8]) -> bool {
        let room = u16::try_from(bytes.len())
            .ok()
            .and_then(|len| self.append(len));
        match room {
            Some(room) => {
                room.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }

    /// Grows the packet at its front by `len` bytes and returns them; `None` if the headroom is too
    /// small.
    #[inline]
    pub fn prepend(&mut self, len: u16) -> Option<&mut [u8]> {
        if len > self.headroom() {
            return None;
        }
        let mbuf = self.raw_mbuf_mut();
        mbuf.data_off -= len;
        mbuf.data_len += len;
        mbuf.pkt_len += u32::from(len);
        self.data_mut().get_mut(..usize::from(len))
    }

    /// Removes `len` bytes from the front of the first segment; false if it has fewer. See
    /// [`Self::advance`] for the whole chain.
    #[inline]
    pub fn adj(&mut self, len: u16) -> bool {
        let mbuf = self.raw_mbuf_mut();
        if len > mbuf.data_len {
            return false;
        }
        mbuf.data_off += len;
        mbuf.data_len -= len;
        mbuf.pkt_len -= u32::from(len);
        true
    }

    /// Removes `len` bytes from the front of the packet; false if the packet is shorter. Segments
    /// that become empty stay in the chain.
    #[inline]
    pub fn advance(&mut self, len: u32) -> bool {
        let head = self.raw_mbuf_mut();
        if len <= u32::from(head.data_len) {
            return self.adj(len as u16);
        }
        if len > head.pkt_len {
            return false;
        }
        head.pkt_len -= len;
        let mut left = len;
        let mut seg = self.as_ptr();
        while left > 0 && !seg.is_null() {
            // SAFETY: `seg` walks the chain that `self` owns.
            let segment = unsafe { &mut *seg };
            let take = left.min(u32::from(segment.data_len)) as u16;
            segment.data_off += take;
            segment.data_len -= take;
            left -= u32::from(take);
            seg = segment.next;
        }
        true
    }

    /// Restores `len` bytes that [`Self::adj`] or [`Self::advance`] removed from the front of the
    /// first segment; false if fewer bytes precede its data.
    pub fn retreat(&mut self, len: u16) -> bool {
        let mbuf = self.raw_mbuf_mut();
        // The bytes are within the segment's buffer, whose memory is always initialised.
        if len > mbuf.data_off || mbuf.data_len.checked_add(len).is_none() {
            return false;
        }
        mbuf.data_off -= len;
        mbuf.data_len += len;
        mbuf.pkt_len += u32::from(len);
        true
    }

    /// Removes `len` bytes from the end of the last segment; false if it has fewer. See
    /// [`Self::truncate`] for the whole chain.
    #[inline]
    pub fn trim(&mut self, len: u16) -> bool {
        let last = self.last_segment();
        // SAFETY: `last` is a segment of the chain that `self` owns.
        let seg = unsafe { &mut *last };
        if len > seg.data_len {
            return false;
        }
        seg.data_len -= len;
        self.raw_mbuf_mut().pkt_len -= u32::from(len);
        true
    }

    /// Shortens the packet to `len` bytes, for example to drop Ethernet padding, and frees the segments
    /// after the cut. No effect if `len` exceeds the packet length.
    pub fn truncate(&mut self, len: u32) {
        if len >= self.pkt_len() {
            return;
        }
        self.raw_mbuf_mut().pkt_len = len;
        let mut left = len;
        let mut kept = 0;
        let mut next = self.as_ptr();
        let mut rest = None;
        while !next.is_null() {
            // SAFETY: `next` walks the chain that `self` owns.
            let segment = unsafe { &mut *next };
            let keep = left.min(u32::from(segment.data_len)) as u16;
            segment.data_len = keep;
            left -= u32::from(keep);
            kept += 1;
            next = segment.next;
            if left == 0 {
                rest = NonNull::new(std::mem::replace(&mut segment.next, std::ptr::null_mut()));
                break;
            }
        }
        let all = std::mem::replace(&mut self.raw_mbuf_mut().nb_segs, kept);
        if let Some(rest) = rest {
            // SAFETY: the rest was owned through `next` of the last segment, which is cut.
            let mut rest = unsafe { Mbuf::from_raw(rest) };
            rest.raw_mbuf_mut().nb_segs = all - kept;
        }
    }

    /// Copies bytes from `offset` on into `out`, across segments; returns the number of bytes
    /// copied.
    #[inline]
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> usize {
        let (mut skip, mut done) = (offset, 0);
        for seg in self.segments() {
            if skip >= seg.len() {
                skip -= seg.len();
                continue;
            }
            let count = (seg.len() - skip).min(out.len() - done);
            out[done..done + count].copy_from_slice(&seg[skip..skip + count]);
            done += count;
            skip = 0;
            if done == out.len() {
                break;
            }
        }
        done
    }

    /// Creates a second handle to the same bytes: every segment's buffer is shared, none is copied.
    /// Shared segments are read-only in both. `None` when `pool` is exhausted.
    pub fn clone_ref(&self, pool: &Mempool) -> Option<Self> {
        // SAFETY: DPDK makes new mbufs that refer to the buffers of these and
        // count themselves in them; both are alive.
        let ptr = unsafe { sys::siw_pktmbuf_clone(self.as_ptr(), pool.as_ptr()) };
        // SAFETY: the clone has no other owner.
        NonNull::new(ptr).map(|ptr| unsafe { Self::from_raw(ptr) })
    }

    /// Copies the packet into buffers of `pool`; `self` is unchanged. `None` when `pool` is exhausted.
    pub fn copy_into(&self, pool: &Mempool) -> Option<Self> {
        // SAFETY: DPDK copies the bytes of a packet that lives through the call; the pool is alive.
        let ptr = unsafe { sys::siw_pktmbuf_copy(self.as_ptr(), pool.as_ptr()) };
        // SAFETY: the copy has no other owner.
        NonNull::new(ptr).map(|ptr| unsafe { Self::from_raw(ptr) })
    }

    /// Prefetches the first data bytes of the packet.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_data(self.ptr);
    }

    /// Prefetches the first cache line of the mbuf itself, which [`prefetch`](Self::prefetch)
    /// reads.
    #[inline]
    pub fn prefetch_description(&self) {
        prefetch(self.as_ptr().cast_const().cast());
    }

    /// Prefetches the first data bytes of the second segment, if there is one.
    #[inline]
    pub fn prefetch_second_segment(&self) {
        if let Some(second) = NonNull::new(self.raw_mbuf().next) {
            prefetch_data(second);
        }
    }

    pub(crate) fn last_segment(&self) -> *mut sys::rte_mbuf {
        let mut seg = self.as_ptr();
        // SAFETY: walks the chain that `self` owns; its last `next` is null.
        unsafe {
            while !(*seg).next.is_null() {
                seg = (*seg).next;
            }
        }
        seg
    }
}

impl Drop for Mbuf {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the chain is owned by `self` and not used afterwards.
        unsafe { sys::siw_pktmbuf_free(self.ptr.as_ptr()) }
    }
}

impl std::fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mbuf")
            .field("pkt_len", &self.pkt_len())
            .field("nb_segs", &self.nb_segs())
            .field("ol_flags", &format_args!("{:#x}", self.raw_mbuf().ol_flags))
            .finish()
    }
}

/// Initializes a buffer fresh from its pool as rte_pktmbuf_reset does.
///
/// # Safety
/// `mbuf` is a free buffer of a pool whose buffers have `buf_len` bytes, owned by the caller.
#[inline]
pub(crate) unsafe fn init_raw(mbuf: *mut sys::rte_mbuf, buf_len: u16) {
    // SAFETY: owned by the caller.
    let mbuf = unsafe { &mut *mbuf };
    debug_assert!(mbuf.next.is_null() && mbuf.nb_segs == 1 && mbuf.buf_len == buf_len);
    mbuf.data_off = crate::HEADROOM.min(buf_len);
    mbuf.port = u16::MAX;
    mbuf.ol_flags = 0;
    mbuf.packet_type = 0;
    mbuf.pkt_len = 0;
    mbuf.data_len = 0;
    mbuf.vlan_tci = 0;
    mbuf.tx_offload = 0;
}

/// The bytes of one segment.
#[inline]
pub(crate) fn seg_bytes(mbuf: &sys::rte_mbuf) -> &[u8] {
    if mbuf.data_len == 0 {
        return &[];
    }
    // SAFETY: data_off + data_len lie within the segment's buffer, which lives as
    // long as the mbuf: its own room, or memory that its tracker keeps mapped.
    unsafe {
        slice::from_raw_parts(
            mbuf.buf_addr.cast::<u8>().add(usize::from(mbuf.data_off)),
            usize::from(mbuf.data_len),
        )
    }
}

#[inline]
fn seg_is_writable(mbuf: &sys::rte_mbuf) -> bool {
    // Acquire: pairs with the release when a clone is freed, so that its reads are over before we
    // write.
    mbuf.ol_flags & (sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT) == 0
        && mbuf.refcnt.load(Ordering::Acquire) == 1
}

#[inline]
pub(crate) fn prefetch_data(mbuf: NonNull<sys::rte_mbuf>) {
    // SAFETY: the mbuf is valid; prefetching never faults.
    unsafe {
        let data = (*mbuf.as_ptr())
            .buf_addr
            .cast::<u8>()
            .wrapping_add(usize::from((*mbuf.as_ptr()).data_off));
        prefetch(data);
    }
}

/// Prefetches the cache line at `ptr`, which need not be valid.
#[inline]
pub fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(ptr.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

pub(crate) const NULL: *mut sys::rte_mbuf = ptr::null_mut();
