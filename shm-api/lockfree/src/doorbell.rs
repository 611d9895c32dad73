//! Doorbell rings, and the handshake with a worker that goes to sleep.
//!
//! ```text
//!  client:  publish the work queue's tail -> mark_pending -> claim_slot -> fill_slot -> must_wake
//!  worker:  take_slot -> clear_pending -> read the work queue
//!           nothing there: announce_sleep -> look once more -> block
//! ```

use crate::sync::{AtomicU32, Ordering, fence};

/// Client: marks a queue as having work. `true`: the caller puts the queue's number on the doorbell
/// ring; otherwise it is already there.
#[inline]
pub fn mark_pending(pending: &AtomicU32) -> bool {
    // Pairs with the swap in `clear_pending`: carries the work queue's tail to the worker that
    // clears the word.
    pending.swap(1, Ordering::AcqRel) == 0
}

/// Worker: called after the number was popped and before the work queue is read. It reads the last
/// `mark_pending` in modification order, and therefore sees the tail published before it.
#[inline]
pub fn clear_pending(pending: &AtomicU32) {
    // Pairs with the swap in `mark_pending`.
    pending.swap(0, Ordering::AcqRel);
}

/// Client: claims the next doorbell slot, which an earlier claim may still occupy.
#[inline]
pub fn claim_slot(tail: &AtomicU32, mask: u32) -> u32 {
    // Pairs with itself in other threads. A slot is claimed again a lap later. The ring has a slot for
    // each queue, so meanwhile some queue was claimed twice: the second claim came after the worker
    // emptied this slot (see `take_slot`), and the claims after it, by whatever thread, see that.
    tail.fetch_add(1, Ordering::AcqRel) & mask
}

/// Client: fills a claimed doorbell slot. `false`: an earlier number is still in it; the caller tries
/// again once the worker has taken that. Claims of one slot may be filled in any order: the worker takes
/// as many numbers from a slot as were claimed.
#[inline]
pub fn fill_slot(slot: &AtomicU32, number: u32) -> bool {
    // Release pairs with the Acquire in `take_slot`. Relaxed: nothing is read on account of the 0. An
    // exchange, because another thread may have claimed the same slot a lap later.
    let filled = number.wrapping_add(1);
    slot.compare_exchange(0, filled, Ordering::Release, Ordering::Relaxed)
        .is_ok()
}

/// Worker: takes the number from the next doorbell slot, if it is filled.
#[inline]
pub fn take_slot(slot: &AtomicU32) -> Option<u32> {
    // Pairs with the Release in `fill_slot`.
    let filled = slot.load(Ordering::Acquire);
    if filled == 0 {
        return None;
    }
    // Relaxed: a client that waits for the slot needs no more than the value. For one that does not, it
    // precedes the Release half of `clear_pending` for this number and the later ones, and thus any new
    // claim of this slot (see `claim_slot`).
    slot.store(0, Ordering::Relaxed);
    Some(filled - 1)
}

/// Client, after filling a doorbell slot: returns whether the worker sleeps and has to be woken
/// through its eventfd.
#[inline]
pub fn must_wake(sleeping: &AtomicU32) -> bool {
    // Pairs with the fence in `announce_sleep`: either the worker's last check finds the slot, or
    // this load finds the flag.
    fence(Ordering::SeqCst);
    sleeping.load(Ordering::Relaxed) != 0
}

/// Worker: announces that it is about to sleep. It must check all its doorbell rings once more
/// afterwards, and may block only when they are empty.
#[inline]
pub fn announce_sleep(sleeping: &AtomicU32) {
    sleeping.store(1, Ordering::Relaxed);
    // Pairs with the fence in `must_wake`.
    fence(Ordering::SeqCst);
}

/// Worker: announces that it is awake again.
#[inline]
pub fn announce_awake(sleeping: &AtomicU32) {
    // Pairs with nothing: a client that still sees the old value only writes the eventfd once
    // unnecessarily.
    sleeping.store(0, Ordering::Release);
}
