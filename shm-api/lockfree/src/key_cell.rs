//! The word with the current key of a key-table entry and its validity: a sequence lock for fields
//! that a worker changes in place (a window's binding, a fast registration) while others read them.
//! Used by the regions of siw-memory.

use crate::sync::{AtomicU64, Ordering, fence, spin_loop};

const VALID: u64 = 1 << 32;
const BUSY: u64 = 1 << 33;
const GONE: u64 = 1 << 34;
const STEP: u64 = 1 << 35;

/// A snapshot of a [`KeyCell`]: STag, state, and a count of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyWord(u64);

impl KeyWord {
    /// The STag that is valid, or was valid last.
    #[inline]
    pub fn stag(self) -> u32 {
        self.0 as u32
    }

    /// Returns whether the entry has this STag and accesses are allowed.
    #[inline]
    pub fn is_valid_for(self, stag: u32) -> bool {
        self.0 & (VALID | 0xffff_ffff) == VALID | u64::from(stag)
    }

    /// Returns whether accesses are allowed.
    #[inline]
    pub fn is_valid(self) -> bool {
        self.0 & VALID != 0
    }

    /// Returns whether no change is in progress and the entry is not leaving the table.
    #[inline]
    pub fn is_settled(self) -> bool {
        self.0 & (BUSY | GONE) == 0
    }
}

/// The word in an entry of the key table; see the module documentation.
#[derive(Debug)]
pub struct KeyCell(AtomicU64);

impl KeyCell {
    /// Creates a cell for `stag`, valid at once or after the first [`Self::publish_key`].
    pub fn new(stag: u32, valid: bool) -> KeyCell {
        let valid = if valid { VALID } else { 0 };
        KeyCell(AtomicU64::new(u64::from(stag) | valid))
    }

    /// Loads the word; call it before the fields are read.
    #[inline]
    pub fn load_word(&self) -> KeyWord {
        // Pairs with the Release in `publish_key`: the fields are complete.
        KeyWord(self.0.load(Ordering::Acquire))
    }

    /// Returns whether the fields belong to `word`; call it after the fields were read.
    #[inline]
    pub fn is_unchanged(&self, word: KeyWord) -> bool {
        // Pairs with the fence in `try_claim`: a reader of a new field sees the claim.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == word.0
    }

    /// Claims the exclusive right to change the fields, until [`Self::publish_key`] or
    /// [`Self::abandon_claim`] is called. `false`: the cell has changed since `word`.
    pub fn try_claim(&self, word: KeyWord) -> bool {
        let busy = (word.0 & !VALID).wrapping_add(STEP) | BUSY;
        let claimed = word.is_settled()
            && self
                .0
                .compare_exchange(word.0, busy, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        fence(Ordering::Release);
        claimed
    }

    /// Ends a claim; the fields have been written.
    pub fn publish_key(&self, stag: u32, valid: bool) {
        let count = self.0.load(Ordering::Relaxed) & !(STEP - 1);
        let valid = if valid { VALID } else { 0 };
        self.0
            .store(count | valid | u64::from(stag), Ordering::Release);
    }

    /// Ends a claim without a change.
    pub fn abandon_claim(&self, word: KeyWord) {
        self.publish_key(word.stag(), word.is_valid());
    }

    /// Marks the entry as leaving the table: no claim succeeds any more. Waits for a current claim to
    /// end; returns the previous word.
    pub fn retire_key(&self) -> KeyWord {
        loop {
            let word = self.load_word();
            let gone = (word.0 & !VALID).wrapping_add(STEP) | GONE;
            if word.0 & BUSY == 0
                && self
                    .0
                    .compare_exchange(word.0, gone, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                return word;
            }
            spin_loop();
        }
    }
}
