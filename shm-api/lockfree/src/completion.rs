//! The ring of completions from one worker to the client, and the arming of the event channel
//! (ibv_req_notify_cq(3)).
//!
//! ```text
//!  worker:  released_completions -> write the entry -> publish_completion -> take_arm
//!  client:  is_completion -> copy the entry -> release_completions
//!           nothing there: arm_event -> look once more -> wait for the channel
//! ```

use crate::sync::{AtomicU32, Ordering, fence};

/// Worker: shows the completion that was written as number `number` of its ring, counted from one.
#[inline]
pub fn publish_completion(sequence: &AtomicU32, number: u32) {
    // Pairs with the Acquire in `is_completion`: the entry is written.
    sequence.store(number, Ordering::Release);
}

/// Client: whether the entry holds completion number `number`.
#[inline]
pub fn is_completion(sequence: &AtomicU32, number: u32) -> bool {
    // Pairs with the Release in `publish_completion`.
    sequence.load(Ordering::Acquire) == number
}

/// Client: completions below `to` are copied, their entries may be written again.
#[inline]
pub fn release_completions(head: &AtomicU32, to: u32) {
    // Pairs with the Acquire in `released_completions`: the copies are finished.
    head.store(to, Ordering::Release);
}

/// Worker: how far the client says that it has copied.
#[inline]
pub fn released_completions(head: &AtomicU32) -> u32 {
    // Pairs with the Release in `release_completions`.
    head.load(Ordering::Acquire)
}

/// Nobody waits for the completion queue's event.
pub const ARM_NONE: u32 = 0;
/// The next solicited (or failed) completion raises an event.
pub const ARM_SOLICITED: u32 = 1;
/// The next completion raises an event.
pub const ARM_NEXT: u32 = 2;

/// Client: asks for an event. A later request for solicited completions does not weaken one for
/// the next completion. The caller polls once more afterwards (ibv_req_notify_cq(3)).
#[inline]
pub fn arm_event(armed: &AtomicU32, level: u32) {
    armed.fetch_max(level, Ordering::SeqCst);
    // Pairs with the fence in `take_arm`: either the worker sees the arming, or
    // the poll that follows sees the worker's completion.
    fence(Ordering::SeqCst);
}

/// Worker, after a batch of completions: whether this worker has to write the
/// event channel now. `solicited`: the batch held a solicited or failed completion.
#[inline]
pub fn take_arm(armed: &AtomicU32, solicited: bool) -> bool {
    // Pairs with the fence in `arm_event`.
    fence(Ordering::SeqCst);
    // Relaxed: the fences order this load against the client's arming.
    let level = armed.load(Ordering::Relaxed);
    // An unknown level counts as ARM_NEXT: it costs its own client an event.
    if level == ARM_NONE || (level == ARM_SOLICITED && !solicited) {
        return false;
    }
    // Several workers may complete into one queue: the swap lets exactly one take the arming.
    armed.swap(ARM_NONE, Ordering::AcqRel) != ARM_NONE
}

/// Takes an arming away without an event; the level it had.
#[inline]
pub fn disarm_event(armed: &AtomicU32) -> u32 {
    // In one order with `arm_event` and with the swap of a worker that takes the arming.
    armed.swap(ARM_NONE, Ordering::SeqCst)
}

/// Worker, between completions to the old memory of a queue and those to its new memory: moves an
/// arming from one to the other. When every worker has moved, the client looks for completions in
/// both and, if there are any, disarms and raises the event itself: a completion that was written
/// while the arming was being moved raised none.
#[inline]
pub fn move_arming(old: &AtomicU32, new: &AtomicU32) {
    arm_event(new, disarm_event(old).min(ARM_NEXT));
}
