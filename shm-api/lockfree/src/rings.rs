//! The synchronisation steps of every shared-memory ring, free of memory layout.
//!
//! Callers (the work queues, completion queues and doorbells of siw-shm) hand in the atomic words, wherever they live; loom hands
//! in its own. Each step says what it pairs with.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// A peer's index is further away than the ring is long.
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
    /// `slots` is a power of two.
    pub fn new(slots: u32) -> Self {
        debug_assert!(slots.is_power_of_two());
        Self {
            tail: 0,
            head: 0,
            mask: slots - 1,
        }
    }

    /// Whether `n` slots are free after those already filled. The consumer's
    /// line is read only when the cached head says no.
    #[inline]
    pub fn reserve_slots(&mut self, n: u32, head: &AtomicU32) -> bool {
        if self.free_slots() >= n {
            return true;
        }
        // Pairs with the Release in `SpscConsumer::release`: the consumer is
        // done reading the slots that are about to be overwritten.
        self.head = head.load(Ordering::Acquire);
        self.free_slots() >= n
    }

    #[inline]
    fn free_slots(&self) -> u32 {
        // A consumer that claims to be ahead of us leaves no free slots.
        (self.mask + 1).saturating_sub(self.tail.wrapping_sub(self.head))
    }

    /// Slot number of the `i`-th slot after those already filled.
    #[inline]
    pub fn slot_index(&self, i: u32) -> u32 {
        self.tail.wrapping_add(i) & self.mask
    }

    /// Counts `n` reserved slots as filled; [`Self::publish`] shows them.
    #[inline]
    pub fn mark_filled(&mut self, n: u32) {
        self.tail = self.tail.wrapping_add(n);
    }

    /// Shows every filled slot to the consumer.
    #[inline]
    pub fn publish_tail(&self, tail: &AtomicU32) {
        // Pairs with the Acquire in `SpscConsumer::available`.
        tail.store(self.tail, Ordering::Release);
    }

    /// Slots filled and not yet known to be consumed.
    #[inline]
    pub fn in_use(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }
}

/// Consumer end. It never trusts the producer's index.
#[derive(Debug)]
pub struct SpscConsumer {
    head: u32,
    tail: u32,
    mask: u32,
}

impl SpscConsumer {
    /// `slots` is a power of two.
    pub fn new(slots: u32) -> Self {
        debug_assert!(slots.is_power_of_two());
        Self {
            head: 0,
            tail: 0,
            mask: slots - 1,
        }
    }

    /// Number of slots that may be read. The producer's line is read only when
    /// the cached tail says that nothing is left.
    #[inline]
    pub fn available_slots(&mut self, tail: &AtomicU32) -> Result<u32, InvalidIndex> {
        if self.tail == self.head {
            return self.refresh_tail(tail);
        }
        Ok(self.tail.wrapping_sub(self.head))
    }

    /// Like [`Self::available`], but always looks at the producer's line.
    #[inline]
    pub fn refresh_tail(&mut self, tail: &AtomicU32) -> Result<u32, InvalidIndex> {
        // Pairs with the Release in `SpscProducer::publish`.
        let t = tail.load(Ordering::Acquire);
        let n = t.wrapping_sub(self.head);
        if n > self.mask + 1 {
            return Err(InvalidIndex);
        }
        self.tail = t;
        Ok(n)
    }

    /// Slot number of the `i`-th readable slot.
    #[inline]
    pub fn slot_index(&self, i: u32) -> u32 {
        self.head.wrapping_add(i) & self.mask
    }

    /// Steps over `n` slots that were copied out.
    #[inline]
    pub fn advance_head(&mut self, n: u32) {
        self.head = self.head.wrapping_add(n);
    }

    /// Lets the producer reuse every slot stepped over.
    #[inline]
    pub fn release_head(&self, head: &AtomicU32) {
        // Pairs with the Acquire in `SpscProducer::reserve`.
        head.store(self.head, Ordering::Release);
    }
}

/// Worker: shows the completion that was written as number `n` of its ring, counted from one.
#[inline]
pub fn publish_completion(seq: &AtomicU32, n: u32) {
    // Pairs with the Acquire in `is_completion`.
    seq.store(n, Ordering::Release);
}

/// Client: whether the entry holds completion number `n`.
#[inline]
pub fn is_completion(seq: &AtomicU32, n: u32) -> bool {
    // Pairs with the Release in `show_completion`.
    seq.load(Ordering::Acquire) == n
}

/// Client: completions below `to` are copied, their entries may be written again.
#[inline]
pub fn release_completions(head: &AtomicU32, to: u32) {
    // Pairs with the Acquire in `released_completions`.
    head.store(to, Ordering::Release);
}

/// Worker: how far the client says that it has copied.
#[inline]
pub fn released_completions(head: &AtomicU32) -> u32 {
    // Pairs with the Release in `release_completions`.
    head.load(Ordering::Acquire)
}

/// Set in the count of taken entries while a low-water event may be wanted.
const LOW_WATER: u64 = 1 << 63;

/// Worker: takes the next entry of a ring that several workers consume: its running number, and
/// whether a low-water event may be wanted (then see [`take_low_water`]). `claimed` counts the
/// entries taken and lies in the daemon's own memory; `tail` is the client's. Lock-free: a
/// failed exchange means that another worker got an entry.
#[inline]
pub fn claim_entry(
    claimed: &AtomicU64,
    tail: &AtomicU32,
    entries: u32,
) -> Result<Option<(u32, bool)>, InvalidIndex> {
    let mut c = claimed.load(Ordering::Acquire);
    loop {
        // Pairs with the Release in `publish_entries`.
        let n = tail.load(Ordering::Acquire).wrapping_sub(c as u32);
        if n == 0 {
            return Ok(None);
        }
        if n > entries {
            // The tail may have been read long after the count.
            let again = claimed.load(Ordering::Acquire);
            if again as u32 == c as u32 {
                return Err(InvalidIndex);
            }
            c = again;
            continue;
        }
        // Acquire pairs with `arm_low_water`: who sees the mark sees the limit.
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match claimed.compare_exchange_weak(c, c + 1, success, failure) {
            Ok(_) => return Ok(Some((c as u32, c & LOW_WATER != 0))),
            Err(now) => c = now,
        }
    }
}

/// Worker: the entry is copied, the client may fill it again.
#[inline]
pub fn release_entry(flag: &AtomicU32) {
    // Pairs with the Acquire in `is_entry_free`.
    flag.store(0, Ordering::Release);
}

/// Client: whether an entry of a shared ring may be filled.
#[inline]
pub fn is_entry_free(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Acquire) == 0
}

/// Client: shows every filled entry to the workers.
#[inline]
pub fn publish_entries(tail: &AtomicU32, to: u32) {
    // Pairs with the Acquire in `claim_entry`.
    tail.store(to, Ordering::Release);
}

/// Entries that are posted and not taken; at most `entries`, whatever the client wrote.
#[inline]
pub fn count_posted(claimed: &AtomicU64, tail: &AtomicU32, entries: u32) -> u32 {
    let c = claimed.load(Ordering::Acquire) as u32;
    let n = tail.load(Ordering::Acquire).wrapping_sub(c);
    if n > entries { 0 } else { n }
}

/// Control thread: an event is wanted when the stock falls below `limit`. Look at the stock
/// with [`take_low_water`] afterwards: either it counts what a worker took, or that worker sees
/// the mark, which is in the same word.
#[inline]
pub fn arm_low_water(wanted: &AtomicU32, limit: u32, claimed: &AtomicU64) {
    wanted.store(limit, Ordering::Release);
    claimed.fetch_or(LOW_WATER, Ordering::AcqRel);
}

/// Whether the caller owes the low-water event, which takes the arming away.
#[inline]
pub fn take_low_water(wanted: &AtomicU32, stock: u32) -> bool {
    wanted.load(Ordering::Acquire) > stock && wanted.swap(0, Ordering::AcqRel) != 0
}

/// Nobody waits for the completion queue's event.
pub const ARM_NONE: u32 = 0;
/// The next solicited (or failed) completion raises an event.
pub const ARM_SOLICITED: u32 = 1;
/// The next completion raises an event.
pub const ARM_NEXT: u32 = 2;

/// Client: asks for an event. A `next` request is not weakened by a later
/// `solicited` one. The caller polls once more afterwards (ibv_req_notify_cq(3)).
#[inline]
pub fn arm_event(armed: &AtomicU32, level: u32) {
    armed.fetch_max(level, Ordering::SeqCst);
    // Pairs with the fence in `take_arm`: either the worker sees the arming, or
    // the poll that follows sees the worker's completion.
    fence(Ordering::SeqCst);
}

/// Worker, after a batch of completions: whether this worker has to write the
/// event channel now. `solicited` tells that the batch held a solicited or
/// failed completion.
#[inline]
pub fn take_arm(armed: &AtomicU32, solicited: bool) -> bool {
    // Pairs with the fence in `arm`.
    fence(Ordering::SeqCst);
    let level = armed.load(Ordering::Relaxed);
    // Garbage levels count as NEXT: they cost their own client an event.
    if level == ARM_NONE || (level == ARM_SOLICITED && !solicited) {
        return false;
    }
    // Several workers may complete into one queue: exactly one takes the arming.
    armed.swap(ARM_NONE, Ordering::AcqRel) != ARM_NONE
}

/// Takes an arming away without an event; the level it had.
#[inline]
pub fn disarm_event(armed: &AtomicU32) -> u32 {
    armed.swap(ARM_NONE, Ordering::SeqCst)
}

/// Worker, between completions to the old memory of a queue and those to its new memory: takes an
/// arming along. When every worker has moved, the client looks for completions in both and, if
/// there are any, disarms and raises the event itself: what completed while the arming was on
/// its way raised none.
#[inline]
pub fn move_arming(old: &AtomicU32, new: &AtomicU32) {
    arm_event(new, disarm_event(old).min(ARM_NEXT));
}

/// Client: marks a queue as having work. `true` tells the caller to push the
/// queue's number on the doorbell ring; otherwise it is there already.
#[inline]
pub fn mark_pending(pending: &AtomicU32) -> bool {
    // AcqRel: carries the work queue's tail to whoever clears the word, see
    // `clear_pending`.
    pending.swap(1, Ordering::AcqRel) == 0
}

/// Worker: called after the number was popped and before the work queue is
/// read. Reads the last `mark_pending` in modification order, hence sees the
/// tail published before it.
#[inline]
pub fn clear_pending(pending: &AtomicU32) {
    pending.swap(0, Ordering::AcqRel);
}

/// Client: claims the next doorbell slot. Bounded by the pending words: a queue
/// is on the ring at most once.
#[inline]
pub fn claim_slot(tail: &AtomicU32, mask: u32) -> u32 {
    tail.fetch_add(1, Ordering::Relaxed) & mask
}

/// Client: fills a claimed doorbell slot.
#[inline]
pub fn fill_slot(slot: &AtomicU32, number: u32) {
    // Pairs with the Acquire in `take_slot`.
    slot.store(number.wrapping_add(1), Ordering::Release);
}

/// Worker: takes the number from the next doorbell slot, if it is filled.
#[inline]
pub fn take_slot(slot: &AtomicU32) -> Option<u32> {
    let v = slot.load(Ordering::Acquire);
    if v == 0 {
        return None;
    }
    // Before the number's pending word is cleared, hence before the client can
    // claim this slot again.
    slot.store(0, Ordering::Relaxed);
    Some(v - 1)
}

/// Client, after filling a doorbell slot: whether the worker sleeps and has to
/// be woken by its eventfd.
#[inline]
pub fn must_wake(sleeping: &AtomicU32) -> bool {
    // Pairs with the fence in `announce_sleep`: either the worker's last look
    // finds the slot, or this load finds the flag.
    fence(Ordering::SeqCst);
    sleeping.load(Ordering::Relaxed) != 0
}

/// Worker: says that it is about to sleep. It must look at all its doorbell
/// rings once more afterwards and may block only when they are empty.
#[inline]
pub fn announce_sleep(sleeping: &AtomicU32) {
    sleeping.store(1, Ordering::Relaxed);
    // Pairs with the fence in `must_wake`.
    fence(Ordering::SeqCst);
}

/// Worker: awake again.
#[inline]
pub fn announce_awake(sleeping: &AtomicU32) {
    sleeping.store(0, Ordering::Release);
}
