//! Fixed-size packet arrays that queues fill and drain, so that a burst needs no allocation.

use crate::{Mbuf, mbuf};
use dpdk_sys as sys;
use std::ptr::NonNull;

/// Maximum packets in one burst.
pub const BURST: usize = 64;

/// Up to [`BURST`] owned packets in order. Dropping the batch frees the packets left in it.
pub struct MbufBatch {
    /// Packets are at `head..tail`.
    head: usize,
    tail: usize,
    bufs: [*mut sys::rte_mbuf; BURST],
}

/// Batch filled by [`crate::RxQueue::rx_burst`].
pub type RxBatch = MbufBatch;
/// Batch drained by [`crate::TxQueue::tx_burst`].
pub type TxBatch = MbufBatch;

// SAFETY: the batch owns its packets, which are bound to no thread.
unsafe impl Send for MbufBatch {}

impl Default for MbufBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl MbufBatch {
    /// Creates an empty batch.
    pub fn new() -> Self {
        Self {
            head: 0,
            tail: 0,
            bufs: [mbuf::NULL; BURST],
        }
    }

    /// Packets in the batch.
    #[inline]
    pub fn len(&self) -> usize {
        self.tail - self.head
    }

    /// Returns true if the batch holds no packet.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns true if the batch holds [`BURST`] packets.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len() == BURST
    }

    /// Packets that can still be pushed.
    #[inline]
    pub fn free_slots(&self) -> usize {
        BURST - self.len()
    }

    /// Appends a packet; returns it if the batch is full.
    #[inline]
    pub fn push(&mut self, mbuf: Mbuf) -> Result<(), Mbuf> {
        if self.tail == BURST {
            if self.head == 0 {
                return Err(mbuf);
            }
            self.move_to_front();
        }
        self.bufs[self.tail] = mbuf.into_raw().as_ptr();
        self.tail += 1;
        Ok(())
    }

    /// Removes and returns the first packet.
    #[inline]
    pub fn pop(&mut self) -> Option<Mbuf> {
        if self.is_empty() {
            return None;
        }
        let packet = self.bufs[self.head];
        self.head += 1;
        // SAFETY: entries at head..tail are packets that the batch owns; this one leaves it.
        Some(unsafe { Mbuf::from_raw(NonNull::new_unchecked(packet)) })
    }

    /// Yields all packets in order. Packets not yet yielded when the iterator is dropped stay in
    /// the batch.
    #[inline]
    pub fn drain(&mut self) -> BatchDrain<'_> {
        BatchDrain { batch: self }
    }

    /// Prefetches the mbuf and the first data bytes of the packet at index `ahead`, if there is
    /// one.
    #[inline]
    pub fn prefetch_packet(&self, ahead: usize) {
        if let Some(&packet) = self.bufs[self.head..self.tail].get(ahead) {
            // SAFETY: entries at head..tail are packets that the batch owns.
            mbuf::prefetch_data(unsafe { NonNull::new_unchecked(packet) });
        }
    }

    /// Returns the packet at `index`, counted from the front, without removing it.
    #[inline]
    pub fn peek(&self, index: usize) -> Option<&Mbuf> {
        let slot = self.bufs[self.head..self.tail].get(index)?;
        // SAFETY: an Mbuf is transparent over a non-null pointer to an owned
        // packet, which each entry at head..tail is.
        Some(unsafe { &*std::ptr::from_ref(slot).cast::<Mbuf>() })
    }

    /// All packets in order, without removing them.
    #[inline]
    pub fn packets_mut(&mut self) -> &mut [Mbuf] {
        let pending = &raw mut self.bufs[self.head..self.tail];
        // SAFETY: as in `peek`; the slice borrows the batch.
        unsafe { &mut *(pending as *mut [Mbuf]) }
    }

    fn move_to_front(&mut self) {
        if !self.is_empty() {
            self.bufs.copy_within(self.head..self.tail, 0);
        }
        self.tail -= self.head;
        self.head = 0;
    }

    /// Free slots for a receive burst to write to.
    #[inline]
    pub(crate) fn spare_slots(&mut self) -> &mut [*mut sys::rte_mbuf] {
        if self.head != 0 {
            self.move_to_front();
        }
        &mut self.bufs[self.tail..]
    }

    /// # Safety
    /// The first `count` entries of [`Self::spare_slots`] were filled with owned packets.
    #[inline]
    pub(crate) unsafe fn mark_filled(&mut self, count: usize) {
        self.tail += count;
    }

    #[inline]
    pub(crate) fn pending_packets(&mut self) -> &mut [*mut sys::rte_mbuf] {
        &mut self.bufs[self.head..self.tail]
    }

    /// # Safety
    /// The first `count` entries of [`Self::pending_packets`] were passed to another owner.
    #[inline]
    pub(crate) unsafe fn mark_sent(&mut self, count: usize) {
        self.head += count;
        if self.head == self.tail {
            self.head = 0;
            self.tail = 0;
        }
    }
}

impl Drop for MbufBatch {
    fn drop(&mut self) {
        while let Some(packet) = self.pop() {
            drop(packet);
        }
    }
}

/// See [`MbufBatch::drain`].
pub struct BatchDrain<'a> {
    batch: &'a mut MbufBatch,
}

impl BatchDrain<'_> {
    /// Like [`MbufBatch::prefetch_packet`], counted from the next packet.
    #[inline]
    pub fn prefetch_packet(&self, ahead: usize) {
        self.batch.prefetch_packet(ahead);
    }
}

impl Iterator for BatchDrain<'_> {
    type Item = Mbuf;

    #[inline]
    fn next(&mut self) -> Option<Mbuf> {
        self.batch.pop()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.batch.len(), Some(self.batch.len()))
    }
}
