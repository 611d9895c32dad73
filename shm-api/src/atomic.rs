//! Operands of FetchAdd and CmpSwap (RFC 7306 section 5), and their execution by a responder.
//!
//! Applications put them into work requests, the wire carries them, and the peer's worker applies
//! them to registered memory. The value in memory is a native 64-bit integer of its host.

use core::sync::atomic::{AtomicU64, Ordering};

/// Operands of an atomic work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AtomicArgs {
    /// Value to add, or the new value.
    pub add_or_swap: u64,
    /// Add: each set bit is the highest bit of a field, whose carry is dropped. Swap: the bits to
    /// change.
    pub add_or_swap_mask: u64,
    /// Value that the memory must hold for a swap.
    pub compare: u64,
    /// Bits to compare.
    pub compare_mask: u64,
}

impl AtomicArgs {
    /// A 64-bit addition.
    pub const fn fetch_add(add: u64) -> Self {
        AtomicArgs {
            add_or_swap: add,
            add_or_swap_mask: 0,
            compare: 0,
            compare_mask: 0,
        }
    }

    /// A 64-bit compare and swap.
    pub const fn cmp_swap(compare: u64, swap: u64) -> Self {
        AtomicArgs {
            add_or_swap: swap,
            add_or_swap_mask: u64::MAX,
            compare,
            compare_mask: u64::MAX,
        }
    }

    /// Result of FetchAdd on `old`: fields are added separately, without carry between them.
    #[inline]
    pub fn fetch_add_result(&self, old: u64) -> u64 {
        let (top, add) = (self.add_or_swap_mask, self.add_or_swap);
        // With the highest bits cleared no field overflows; the highest bits are added without carry.
        (old & !top).wrapping_add(add & !top) ^ ((old ^ add) & top)
    }

    /// Result of CmpSwap on `old`; `None` if the comparison fails.
    #[inline]
    pub fn cmp_swap_result(&self, old: u64) -> Option<u64> {
        let mask = self.add_or_swap_mask;
        ((old ^ self.compare) & self.compare_mask == 0)
            .then_some(old & !mask | self.add_or_swap & mask)
    }

    /// Performs FetchAdd on shared memory; returns the previous value. `None`: not performed, because
    /// other writers kept changing the word; the caller tries again later.
    pub fn fetch_add_on(&self, word: &AtomicU64) -> Option<u64> {
        if self.add_or_swap_mask == 0 {
            // One instruction, which other writers cannot delay.
            return Some(word.fetch_add(self.add_or_swap, Ordering::SeqCst));
        }
        update_word(word, |old| Some(self.fetch_add_result(old)))
    }

    /// Performs CmpSwap on shared memory; returns the previous value. `None` as in
    /// [`Self::fetch_add_on`].
    pub fn cmp_swap_on(&self, word: &AtomicU64) -> Option<u64> {
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.add_or_swap_mask == u64::MAX && self.compare_mask == u64::MAX {
            let outcome = word.compare_exchange(self.compare, self.add_or_swap, success, failure);
            return Some(outcome.unwrap_or_else(|other| other));
        }
        update_word(word, |old| self.cmp_swap_result(old))
    }
}

/// Attempts to update a word under contention. An application that writes its word in a loop may
/// delay its peers' operations on that word, but not the worker.
const ATTEMPTS_PER_TURN: u32 = 128;

/// Replaces the word by the result of `change`, or leaves it if the result is `None`; returns the
/// previous value. `None`: all attempts failed under contention.
fn update_word(word: &AtomicU64, mut change: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
    // SeqCst: the application may use the same word with its own atomics.
    let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
    let mut old = word.load(Ordering::SeqCst);
    for _ in 0..ATTEMPTS_PER_TURN {
        let Some(new) = change(old) else {
            return Some(old);
        };
        match word.compare_exchange(old, new, success, failure) {
            Ok(_) => return Some(old),
            Err(now) => old = now,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The addition as specified by RFC 7306 section 5, bit by bit.
    fn slow_add(old: u64, add: u64, mask: u64) -> u64 {
        let (mut carry, mut out) = (0, 0);
        for bit in 0..64 {
            let sum = carry + (old >> bit & 1) + (add >> bit & 1);
            out |= (sum & 1) << bit;
            carry = if mask >> bit & 1 == 1 { 0 } else { sum >> 1 };
        }
        out
    }

    #[test]
    fn a_masked_add_keeps_carries_within_its_fields() {
        let samples = [
            0,
            1,
            u64::MAX,
            0x8000_0000_8000_0000,
            0x00ff_00ff_00ff_00ff,
            0x7fff_ffff_ffff_ffff,
            0x0123_4567_89ab_cdef,
            0xfedc_ba98_7654_3210,
        ];
        for old in samples {
            for add in samples {
                for mask in samples {
                    let a = AtomicArgs {
                        add_or_swap_mask: mask,
                        ..AtomicArgs::fetch_add(add)
                    };
                    assert_eq!(
                        a.fetch_add_result(old),
                        slow_add(old, add, mask),
                        "{old:x} {add:x} {mask:x}"
                    );
                }
            }
        }
        assert_eq!(AtomicArgs::fetch_add(2).fetch_add_result(u64::MAX), 1);
    }

    #[test]
    fn a_masked_swap_compares_and_changes_only_its_bits() {
        let a = AtomicArgs {
            add_or_swap: 0xaaaa,
            add_or_swap_mask: 0x0ff0,
            compare: 0x1200,
            compare_mask: 0xff00,
        };
        assert_eq!(a.cmp_swap_result(0x1234), Some(0x1aa4));
        assert_eq!(a.cmp_swap_result(0x1334), None);
        let w = AtomicU64::new(5);
        assert_eq!(AtomicArgs::cmp_swap(4, 9).cmp_swap_on(&w), Some(5));
        assert_eq!(AtomicArgs::cmp_swap(5, 9).cmp_swap_on(&w), Some(5));
        assert_eq!(AtomicArgs::fetch_add(1).fetch_add_on(&w), Some(9));
        assert_eq!(w.into_inner(), 10);
    }

    #[test]
    fn a_word_that_changes_all_the_time_ends_the_attempts() {
        let word = AtomicU64::new(0);
        let mut attempts = 0;
        let outcome = update_word(&word, |old| {
            attempts += 1;
            // Another writer is faster each time.
            word.store(old + 1, Ordering::SeqCst);
            Some(old)
        });
        assert_eq!((outcome, attempts), (None, ATTEMPTS_PER_TURN));
    }
}
