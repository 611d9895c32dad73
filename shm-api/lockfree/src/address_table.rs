//! A table of address ranges and their owners. A signal handler looks addresses up, so the lookup
//! takes no locks, never waits and allocates nothing, while other threads insert and remove ranges.
//!
//! ```text
//! owner:    insert_range ... the memory is used ... remove_range -> unmap
//! handler:  find_range of an address that a thread just used
//! ```
//! The range of an address in use cannot be removed meanwhile. The handler only has to avoid
//! mistaking it for another range whose entry is being filled.

use crate::sync::{AtomicU64, Ordering, fence};

/// [`RangeEntry::start`] of an unused entry.
const FREE: u64 = 0;
/// [`RangeEntry::start`] of an entry being filled. No memory begins at either address.
const CLAIMED: u64 = 1;

struct RangeEntry {
    start: AtomicU64,
    len: AtomicU64,
    owner: AtomicU64,
}

/// A range of addresses and its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Owner, as passed to [`AddressTable::insert_range`].
    pub owner: u64,
}

/// A table with a fixed capacity.
pub struct AddressTable {
    entries: Box<[RangeEntry]>,
}

impl AddressTable {
    /// A table for up to `capacity` ranges.
    pub fn new(capacity: usize) -> AddressTable {
        let entry = |_| RangeEntry {
            start: AtomicU64::new(FREE),
            len: AtomicU64::new(0),
            owner: AtomicU64::new(0),
        };
        AddressTable {
            entries: (0..capacity).map(entry).collect(),
        }
    }

    /// Inserts a range, which must not begin at address 0 or 1; returns its index. `None`: the table
    /// is full.
    pub fn insert_range(&self, range: AddressRange) -> Option<usize> {
        let index = self.entries.iter().position(|entry| {
            // Acquire: the fields are written only after the last use of the entry ended.
            let claim = (Ordering::Acquire, Ordering::Relaxed);
            entry.start.load(Ordering::Relaxed) == FREE
                && entry
                    .start
                    .compare_exchange(FREE, CLAIMED, claim.0, claim.1)
                    .is_ok()
        })?;
        let entry = &self.entries[index];
        // Pairs with the fence in `range_at`: a reader of a new field sees the claim.
        fence(Ordering::Release);
        entry.len.store(range.len, Ordering::Relaxed);
        entry.owner.store(range.owner, Ordering::Relaxed);
        // Pairs with the Acquire in `range_at`: the fields are written.
        entry.start.store(range.start, Ordering::Release);
        Some(index)
    }

    /// Removes the range at this index. Call it before its memory is unmapped.
    pub fn remove_range(&self, index: usize) {
        if let Some(entry) = self.entries.get(index) {
            entry.start.store(FREE, Ordering::Release);
        }
    }

    /// Returns the range at an index. `None`: there is none, or it was removed meanwhile.
    pub fn range_at(&self, index: usize) -> Option<AddressRange> {
        let entry = self.entries.get(index)?;
        // Pairs with the Release in `insert_range`.
        let start = entry.start.load(Ordering::Acquire);
        if start <= CLAIMED {
            return None;
        }
        let range = AddressRange {
            start,
            len: entry.len.load(Ordering::Relaxed),
            owner: entry.owner.load(Ordering::Relaxed),
        };
        // Pairs with the fence in `insert_range`: detects fields of another range.
        fence(Ordering::Acquire);
        (entry.start.load(Ordering::Relaxed) == start).then_some(range)
    }

    /// Finds the range that contains an address; returns it with its index.
    pub fn find_range(&self, address: u64) -> Option<(usize, AddressRange)> {
        (0..self.entries.len()).find_map(|index| {
            let range = self.range_at(index)?;
            let offset = address.checked_sub(range.start)?;
            (offset < range.len).then_some((index, range))
        })
    }
}
