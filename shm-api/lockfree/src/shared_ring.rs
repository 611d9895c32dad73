//! A ring with several consuming workers: the shared receive queue.
//!
//! ```text
//!  client:  is_entry_free -> write the entry -> publish_entries
//!  worker:  claim_entry -> copy the entry -> release_entry
//! ```

use crate::spsc::InvalidIndex;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Set in the count of taken entries while a low-water event may be requested.
const LOW_WATER: u64 = 1 << 63;

/// Worker: takes the next entry of a ring with several consumers. Returns its running number, and
/// whether a low-water event may be requested (then call [`take_low_water`]). `claimed` counts the
/// entries taken and lies in the daemon's own memory; `tail` is the client's. Lock-free: a failed
/// exchange means that another worker took an entry.
#[inline]
pub fn claim_entry(
    claimed: &AtomicU64,
    tail: &AtomicU32,
    entries: u32,
) -> Result<Option<(u32, bool)>, InvalidIndex> {
    // Pairs with the exchange below in other workers: their entries precede this count.
    let mut count = claimed.load(Ordering::Acquire);
    loop {
        // Pairs with the Release in `publish_entries`: the entries below the tail are written.
        let posted = tail.load(Ordering::Acquire).wrapping_sub(count as u32);
        if posted == 0 {
            return Ok(None);
        }
        if posted > entries {
            // The tail may have been read long after the count, while other workers moved the count.
            // Pairs like the first load.
            let count_now = claimed.load(Ordering::Acquire);
            if count_now as u32 == count as u32 {
                return Err(InvalidIndex);
            }
            count = count_now;
            continue;
        }
        // The Acquire half pairs with the exchange in `arm_low_water`: a worker that sees the mark
        // sees the limit. The Release half keeps the order of claims for the load at the top.
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match claimed.compare_exchange_weak(count, count + 1, success, failure) {
            Ok(_) => return Ok(Some((count as u32, count & LOW_WATER != 0))),
            Err(count_now) => count = count_now,
        }
    }
}

/// Worker: releases a copied entry, which the client may fill again.
#[inline]
pub fn release_entry(flag: &AtomicU32) {
    // Pairs with the Acquire in `is_entry_free`: the copy is finished.
    flag.store(0, Ordering::Release);
}

/// Client: returns whether an entry of a shared ring may be filled.
#[inline]
pub fn is_entry_free(flag: &AtomicU32) -> bool {
    // Pairs with the Release in `release_entry`.
    flag.load(Ordering::Acquire) == 0
}

/// Client: publishes every filled entry to the workers.
#[inline]
pub fn publish_entries(tail: &AtomicU32, to: u32) {
    // Pairs with the Acquire of the tail in `claim_entry`.
    tail.store(to, Ordering::Release);
}

/// Number of entries that are posted and not taken; at most `entries`, and 0 for an invalid tail.
#[inline]
pub fn count_posted(claimed: &AtomicU64, tail: &AtomicU32, entries: u32) -> u32 {
    // Only a count: no entry is read. The load of `claimed` pairs with the exchange in `claim_entry`:
    // an entry that this worker took itself counts as taken.
    let taken = claimed.load(Ordering::Acquire) as u32;
    let posted = tail.load(Ordering::Acquire).wrapping_sub(taken);
    if posted > entries { 0 } else { posted }
}

/// Control thread: requests an event for when fewer than `limit` entries are posted. Count the
/// entries and call [`take_low_water`] afterwards: either the count includes an entry that a worker
/// took, or that worker sees the mark, which is in the same word.
#[inline]
pub fn arm_low_water(wanted: &AtomicU32, limit: u32, claimed: &AtomicU64) {
    wanted.store(limit, Ordering::Release);
    // Pairs with the exchange in `claim_entry`, which is ordered with this one in the same word.
    claimed.fetch_or(LOW_WATER, Ordering::AcqRel);
}

/// Returns whether the caller has to raise the low-water event; if so, disarms it.
#[inline]
pub fn take_low_water(wanted: &AtomicU32, posted: u32) -> bool {
    // The load pairs with the Release in `arm_low_water`. The swap lets exactly one of several
    // callers take the event.
    wanted.load(Ordering::Acquire) > posted && wanted.swap(0, Ordering::AcqRel) != 0
}
