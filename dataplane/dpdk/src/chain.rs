//! Segment chains: built for transmission (header + registered memory + CRC), walked and split on
//! receipt.

use crate::{Mbuf, MbufCache, mbuf::seg_bytes};
use dpdk_sys as sys;
use std::marker::PhantomData;
use std::ptr::NonNull;

impl Mbuf {
    /// The bytes of each segment in order; see [`Self::data`] about external segments.
    #[inline]
    pub fn segments(&self) -> Segments<'_> {
        Segments {
            next: self.as_ptr(),
            _chain: PhantomData,
        }
    }

    /// Appends `tail` to this packet. Walks this chain to its end, which [`ChainBuilder`] avoids.
    /// Returns `tail` if the chain would exceed 65535 segments.
    #[inline]
    pub fn append_chain(&mut self, tail: Mbuf) -> Result<(), Mbuf> {
        let last = self.last_segment();
        // SAFETY: `last` is the last segment of `self`.
        unsafe { link_segments(self, last, tail) }
    }

    /// Splits off the first segment; returns it and the rest of the chain.
    #[inline]
    pub fn split_first(mut self) -> (Mbuf, Option<Mbuf>) {
        let head = self.raw_mbuf_mut();
        let Some(rest) = NonNull::new(head.next) else {
            return (self, None);
        };
        let (nb_segs, pkt_len) = (head.nb_segs - 1, head.pkt_len - u32::from(head.data_len));
        head.next = std::ptr::null_mut();
        head.nb_segs = 1;
        head.pkt_len = u32::from(head.data_len);
        // SAFETY: the rest was owned through `head.next`, which is cut.
        let mut rest = unsafe { Mbuf::from_raw(rest) };
        let rest_mbuf = rest.raw_mbuf_mut();
        rest_mbuf.nb_segs = nb_segs;
        rest_mbuf.pkt_len = pkt_len;
        (self, Some(rest))
    }

    /// Splits the chain into packets of one segment each.
    #[inline]
    pub fn split_chain(self) -> SplitChain {
        SplitChain { rest: Some(self) }
    }

    /// Copies the whole packet into one buffer, for ports that cannot send chains; `self` is
    /// unchanged. `None` when no buffer is left or the packet is longer than a buffer. Offload
    /// requests are kept.
    pub fn linearize(&self, cache: &mut MbufCache) -> Option<Mbuf> {
        let mut flat = cache.alloc()?;
        for seg in self.segments() {
            if !flat.append_slice(seg) {
                cache.free(flat);
                return None;
            }
        }
        let (from, to) = (self.raw_mbuf(), flat.raw_mbuf_mut());
        to.ol_flags = from.ol_flags & !(sys::RTE_MBUF_F_EXTERNAL | sys::RTE_MBUF_F_INDIRECT);
        to.tx_offload = from.tx_offload;
        to.vlan_tci = from.vlan_tci;
        to.rss = from.rss;
        Some(flat)
    }
}

/// Links `tail` behind `last`, the last segment of `head`.
///
/// # Safety
/// `last` is the last segment of the chain that `head` owns.
#[inline]
unsafe fn link_segments(head: &mut Mbuf, last: *mut sys::rte_mbuf, tail: Mbuf) -> Result<(), Mbuf> {
    let Some(segs) = head.nb_segs().checked_add(tail.nb_segs()) else {
        return Err(tail);
    };
    let Some(len) = head.pkt_len().checked_add(tail.pkt_len()) else {
        return Err(tail);
    };
    // SAFETY: promised by the caller.
    unsafe { (*last).next = tail.into_raw().as_ptr() };
    let first = head.raw_mbuf_mut();
    first.nb_segs = segs;
    first.pkt_len = len;
    Ok(())
}

/// Builds a chain segment by segment without walking it, by keeping a pointer to the last segment.
pub struct ChainBuilder {
    head: Mbuf,
    last: *mut sys::rte_mbuf,
}

impl ChainBuilder {
    /// Starts a chain with `head`.
    #[inline]
    pub fn new(head: Mbuf) -> Self {
        let last = head.last_segment();
        Self { head, last }
    }

    /// Appends `tail`; returns it if the chain is full (65535 segments).
    #[inline]
    pub fn push(&mut self, tail: Mbuf) -> Result<(), Mbuf> {
        let last = tail.last_segment();
        // SAFETY: `self.last` is the last segment of `self.head`.
        unsafe { link_segments(&mut self.head, self.last, tail)? };
        self.last = last;
        Ok(())
    }

    /// Free bytes behind the data of the last segment.
    #[inline]
    pub fn tailroom(&self) -> u16 {
        // SAFETY: `last` belongs to the chain; the view is not dropped as an owner.
        let view = unsafe { std::mem::ManuallyDrop::new(segment_view(self.last)) };
        view.tailroom()
    }

    /// Appends a copy of `bytes` to the last segment; false when it has no room.
    #[inline]
    pub fn append_slice(&mut self, bytes: &[u8]) -> bool {
        if bytes.len() > usize::from(self.tailroom()) {
            return false;
        }
        // SAFETY: the tail is writable and has enough room, as `tailroom` reports; it belongs to
        // the chain that `self` owns.
        unsafe {
            let seg = &mut *self.last;
            let at = seg
                .buf_addr
                .cast::<u8>()
                .add(usize::from(seg.data_off + seg.data_len));
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
            seg.data_len += bytes.len() as u16;
        }
        self.head.raw_mbuf_mut().pkt_len += bytes.len() as u32;
        true
    }

    /// Grows the last segment by `len` bytes and returns them; they hold stale data of earlier
    /// packets. `None` if there is no room.
    #[inline(always)]
    pub fn append_room(&mut self, len: u16) -> Option<&mut [u8]> {
        if len > self.tailroom() {
            return None;
        }
        self.head.raw_mbuf_mut().pkt_len += u32::from(len);
        // SAFETY: the tail is writable and has enough room, as `tailroom` reports; it belongs to
        // the chain that `self` owns, and pool memory is initialised.
        unsafe {
            let seg = &mut *self.last;
            let at = seg
                .buf_addr
                .cast::<u8>()
                .add(usize::from(seg.data_off + seg.data_len));
            seg.data_len += len;
            Some(std::slice::from_raw_parts_mut(at, usize::from(len)))
        }
    }

    /// Removes the last `len` bytes of the last segment; false, without effect, if it has fewer.
    #[inline]
    pub fn withdraw(&mut self, len: u16) -> bool {
        // SAFETY: `last` belongs to the chain that `self` owns.
        let seg = unsafe { &mut *self.last };
        let Some(left) = seg.data_len.checked_sub(len) else {
            return false;
        };
        seg.data_len = left;
        self.head.raw_mbuf_mut().pkt_len -= u32::from(len);
        true
    }

    /// Bytes in the whole chain.
    #[inline]
    pub fn pkt_len(&self) -> u32 {
        self.head.pkt_len()
    }

    /// Segments in the chain.
    #[inline]
    pub fn nb_segs(&self) -> u16 {
        self.head.nb_segs()
    }

    /// The first segment's data, for filling in headers; its length does not change.
    #[inline]
    pub fn head_data_mut(&mut self) -> &mut [u8] {
        self.head.data_mut()
    }

    /// Returns the chain as one packet.
    #[inline]
    pub fn finish(self) -> Mbuf {
        self.head
    }
}

// SAFETY: `last` points into the chain that `head` owns, and moves with it.
unsafe impl Send for ChainBuilder {}

/// # Safety
/// `seg` is valid; the result is not dropped and not used after `seg` is freed.
#[inline]
unsafe fn segment_view(seg: *mut sys::rte_mbuf) -> Mbuf {
    // SAFETY: promised by the caller; a segment pointer is never null.
    unsafe { Mbuf::from_raw(NonNull::new_unchecked(seg)) }
}

/// See [`Mbuf::segments`].
pub struct Segments<'a> {
    next: *mut sys::rte_mbuf,
    _chain: PhantomData<&'a Mbuf>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        // SAFETY: `next` is null or a segment of the chain borrowed for 'a.
        let seg: &'a sys::rte_mbuf = unsafe { self.next.as_ref()? };
        self.next = seg.next;
        Some(seg_bytes(seg))
    }
}

/// See [`Mbuf::split_chain`]. Dropping it frees the segments not yet yielded.
pub struct SplitChain {
    rest: Option<Mbuf>,
}

impl Iterator for SplitChain {
    type Item = Mbuf;

    #[inline]
    fn next(&mut self) -> Option<Mbuf> {
        let (first, rest) = self.rest.take()?.split_first();
        self.rest = rest;
        Some(first)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self
            .rest
            .as_ref()
            .map_or(0, |rest| usize::from(rest.nb_segs()));
        (len, Some(len))
    }
}
