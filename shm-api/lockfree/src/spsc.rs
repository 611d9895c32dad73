//! Indices of a ring with one producer and one consumer: send and receive queues.
//!
//! Each end keeps its own index and a copy of the other's, and reads the other's cache line only when
//! the copy indicates a full or empty ring. This keeps posting fast: in steady state neither side
//! waits for the other's line.

use crate::sync::{AtomicU32, Ordering};

/// The peer's index is further away than the length of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidIndex;

/// Producer end of a single-producer single-consumer ring of `mask + 1` slots.
/// Indices run freely and wrap at 2^32.
#[derive(Debug)]
pub struct SpscProducer {
    tail: u32,
    head: u32,
    mask: u32,
}

impl SpscProducer {
    /// The producer of an empty ring; `slots` is a power of two.
    pub fn new(slots: u32) -> Self {
        debug_assert!(slots.is_power_of_two());
        Self {
            tail: 0,
            head: 0,
            mask: slots - 1,
        }
    }

    /// Returns whether `count` slots are free after the filled ones. Reads the consumer's line only
    /// when the cached head shows too few.
    #[inline]
    pub fn reserve_slots(&mut self, count: u32, head: &AtomicU32) -> bool {
        if self.free_slots() >= count {
            return true;
        }
        // Pairs with the Release in `SpscConsumer::release_head`: the consumer is done reading the
        // slots that are about to be overwritten.
        self.head = head.load(Ordering::Acquire);
        self.free_slots() >= count
    }

    #[inline]
    fn free_slots(&self) -> u32 {
        // A consumer that claims to be ahead of the producer leaves no free slots.
        (self.mask + 1).saturating_sub(self.tail.wrapping_sub(self.head))
    }

    /// Index of the slot at `offset` after the filled ones.
    #[inline]
    pub fn slot_index(&self, offset: u32) -> u32 {
        self.tail.wrapping_add(offset) & self.mask
    }

    /// Counts `count` reserved slots as filled; [`Self::publish_tail`] publishes them.
    #[inline]
    pub fn mark_filled(&mut self, count: u32) {
        self.tail = self.tail.wrapping_add(count);
    }

    /// Withdraws the `count` slots that were filled last and are not published yet.
    #[inline]
    pub fn withdraw_filled(&mut self, count: u32) {
        self.tail = self.tail.wrapping_sub(count);
    }

    /// Number of slots filled so far, modulo 2^32.
    #[inline]
    pub fn count_filled(&self) -> u32 {
        self.tail
    }

    /// Publishes every filled slot to the consumer.
    #[inline]
    pub fn publish_tail(&self, tail: &AtomicU32) {
        // Pairs with the Acquire in `SpscConsumer::refresh_tail`.
        tail.store(self.tail, Ordering::Release);
    }
}

/// Consumer end of the ring. It never trusts the producer's index.
#[derive(Debug)]
pub struct SpscConsumer {
    head: u32,
    /// Value of `head` when slots were last released to the producer.
    released: u32,
    tail: u32,
    mask: u32,
}

impl SpscConsumer {
    /// The consumer of an empty ring; `slots` is a power of two.
    pub fn new(slots: u32) -> Self {
        debug_assert!(slots.is_power_of_two());
        Self {
            head: 0,
            released: 0,
            tail: 0,
            mask: slots - 1,
        }
    }

    /// Length of the ring, the index of the next slot to read, and its value when slots were last
    /// released: what [`Self::resume`] needs.
    pub fn position(&self) -> (u32, u32, u32) {
        (self.mask + 1, self.head, self.released)
    }

    /// The consumer at a [`Self::position`]. It reads the producer's index before the next slot.
    ///
    /// # Errors
    /// There is no such position.
    pub fn resume((slots, head, released): (u32, u32, u32)) -> Result<Self, InvalidIndex> {
        if !slots.is_power_of_two() || head.wrapping_sub(released) > slots {
            return Err(InvalidIndex);
        }
        Ok(Self {
            head,
            released,
            tail: head,
            mask: slots - 1,
        })
    }

    /// Returns whether [`Self::available_slots`] has to read the producer's line.
    #[inline]
    pub fn is_drained(&self) -> bool {
        self.tail == self.head
    }

    /// Number of slots that may be read. Reads the producer's line only when the cached tail shows
    /// none.
    #[inline]
    pub fn available_slots(&mut self, tail: &AtomicU32) -> Result<u32, InvalidIndex> {
        if self.tail == self.head {
            return self.refresh_tail(tail);
        }
        Ok(self.tail.wrapping_sub(self.head))
    }

    /// Variant of [`Self::available_slots`] that always reads the producer's line.
    #[inline]
    pub fn refresh_tail(&mut self, tail: &AtomicU32) -> Result<u32, InvalidIndex> {
        // Pairs with the Release in `SpscProducer::publish_tail`: the slots are written.
        let producer_tail = tail.load(Ordering::Acquire);
        let available = producer_tail.wrapping_sub(self.head);
        if available > self.mask + 1 {
            return Err(InvalidIndex);
        }
        self.tail = producer_tail;
        Ok(available)
    }

    /// Index of the readable slot at `offset`.
    #[inline]
    pub fn slot_index(&self, offset: u32) -> u32 {
        self.head.wrapping_add(offset) & self.mask
    }

    /// Advances past `count` slots that were copied out.
    #[inline]
    pub fn advance_head(&mut self, count: u32) {
        self.head = self.head.wrapping_add(count);
    }

    /// Lets the producer reuse every slot passed, and returns their number. Without any, the line,
    /// which the producer reads, is not written.
    #[inline]
    pub fn release_head(&mut self, head: &AtomicU32) -> u32 {
        let slots = self.head.wrapping_sub(self.released);
        if slots > 0 {
            self.released = self.head;
            // Pairs with the Acquire in `SpscProducer::reserve_slots`.
            head.store(self.head, Ordering::Release);
        }
        slots
    }
}
