//! The ring of completions from one worker to the client, and the arming of the event channel
//! (ibv_req_notify_cq(3)).
//!
//! ```text
//!  worker:  released_completions -> write the entry -> publish_completion -> take_arm
//!  client:  is_completion -> copy the entry -> release_completions
//!           nothing there: arm_event -> look once more -> wait for the channel
//! ```

use crate::sync::{AtomicU32, Ordering, fence};

/// Worker: publishes the completion with number `number` of its ring, counted from one, after its
/// entry was written.
#[inline]
pub fn publish_completion(sequence: &AtomicU32, number: u32) {
    // Pairs with the Acquire in `is_completion`: the entry is written.
    sequence.store(number, Ordering::Release);
}

/// Client: returns whether the entry holds completion number `number`.
#[inline]
pub fn is_completion(sequence: &AtomicU32, number: u32) -> bool {
    // Pairs with the Release in `publish_completion`.
    sequence.load(Ordering::Acquire) == number
}

/// Client: releases the entries of the completions below `to`, which have been copied.
#[inline]
pub fn release_completions(head: &AtomicU32, to: u32) {
    // Pairs with the Acquire in `released_completions`: the copies are finished.
    head.store(to, Ordering::Release);
}

/// Worker: number of completions that the client has released.
#[inline]
pub fn released_completions(head: &AtomicU32) -> u32 {
    // Pairs with the Release in `release_completions`.
    head.load(Ordering::Acquire)
}

/// The completion queue is not armed.
pub const ARM_NONE: u32 = 0;
/// The next solicited (or failed) completion raises an event.
pub const ARM_SOLICITED: u32 = 1;
/// The next completion raises an event.
pub const ARM_NEXT: u32 = 2;

/// Client: requests an event. A later request for solicited completions does not weaken one for the
/// next completion. The caller polls once more afterwards (ibv_req_notify_cq(3)).
#[inline]
pub fn arm_event(armed: &AtomicU32, level: u32) {
    armed.fetch_max(level, Ordering::SeqCst);
    // Pairs with the fence in `take_arm`: either the worker sees the arming, or the following poll
    // sees the worker's completion.
    fence(Ordering::SeqCst);
}

/// Worker, after a batch of completions: returns whether this worker has to write to the event
/// channel now. `solicited`: the batch contained a solicited or failed completion.
#[inline]
pub fn take_arm(armed: &AtomicU32, solicited: bool) -> bool {
    // Pairs with the fence in `arm_event`.
    fence(Ordering::SeqCst);
    // Relaxed: the fences order this load against the client's arming.
    let level = armed.load(Ordering::Relaxed);
    // An unknown level counts as ARM_NEXT: it only costs its own client an event.
    if level == ARM_NONE || (level == ARM_SOLICITED && !solicited) {
        return false;
    }
    // Several workers may complete into one queue: the swap lets exactly one of them take the arming.
    armed.swap(ARM_NONE, Ordering::AcqRel) != ARM_NONE
}

/// Disarms the queue without an event; returns the previous level.
#[inline]
pub fn disarm_event(armed: &AtomicU32) -> u32 {
    // SeqCst: in a single order with `arm_event` and with the swap of a worker that takes the arming.
    armed.swap(ARM_NONE, Ordering::SeqCst)
}

/// Worker, between its last completion in a queue's old memory and its first one in the new memory:
/// moves an arming from the old to the new. A completion written during the move raises no event.
/// After all workers have moved, the client therefore looks for completions in both memories, and if
/// it finds any, disarms and raises the event itself.
#[inline]
pub fn move_arming(old: &AtomicU32, new: &AtomicU32) {
    arm_event(new, disarm_event(old).min(ARM_NEXT));
}
