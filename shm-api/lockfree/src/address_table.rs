//! To whom stretches of addresses belong: asked by a signal handler, so without locks, waiting or
//! allocation, while other threads enter and remove stretches.
//!
//! ```text
//!  owner:    insert_range ... the memory is used ... remove_range -> unmap
//!  handler:  find_range of an address that a thread just used
//! ```
//! An address in use lies in a stretch that cannot be removed meanwhile; the handler only must not
//! take the stretch for another one whose entry is being filled.

use crate::sync::{AtomicU64, Ordering, fence};

/// [`RangeEntry::start`] of an entry that nobody uses.
const FREE: u64 = 0;
/// And of one that is being filled. No memory begins at either address.
const CLAIMED: u64 = 1;

struct RangeEntry {
    start: AtomicU64,
    len: AtomicU64,
    owner: AtomicU64,
}

/// A stretch of addresses and its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// As it was given to [`AddressTable::insert_range`].
    pub owner: u64,
}

/// A fixed number of stretches.
pub struct AddressTable {
    entries: Box<[RangeEntry]>,
}

impl AddressTable {
    /// Room for `capacity` stretches.
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

    /// Enters a stretch, which does not begin at the addresses 0 and 1; its place in the table. `None`:
    /// the table is full.
    pub fn insert_range(&self, range: AddressRange) -> Option<usize> {
        let index = self.entries.iter().position(|entry| {
            // Acquire: the fields are written after the last use of the entry ended.
            let claim = (Ordering::Acquire, Ordering::Relaxed);
            entry.start.load(Ordering::Relaxed) == FREE
                && entry
                    .start
                    .compare_exchange(FREE, CLAIMED, claim.0, claim.1)
                    .is_ok()
        })?;
        let entry = &self.entries[index];
        // Pairs with the fence in `range_at`: who reads a new field sees the claim.
        fence(Ordering::Release);
        entry.len.store(range.len, Ordering::Relaxed);
        entry.owner.store(range.owner, Ordering::Relaxed);
        // Pairs with the Acquire in `range_at`: the fields are written.
        entry.start.store(range.start, Ordering::Release);
        Some(index)
    }

    /// Takes the stretch at this place out, before its memory is unmapped.
    pub fn remove_range(&self, index: usize) {
        if let Some(entry) = self.entries.get(index) {
            entry.start.store(FREE, Ordering::Release);
        }
    }

    /// The stretch at a place. `None`: there is none, or not any more.
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
        // Pairs with the fence in `insert_range`: fields of another stretch are found out.
        fence(Ordering::Acquire);
        (entry.start.load(Ordering::Relaxed) == start).then_some(range)
    }

    /// The stretch that an address lies in, and its place.
    pub fn find_range(&self, address: u64) -> Option<(usize, AddressRange)> {
        (0..self.entries.len()).find_map(|index| {
            let range = self.range_at(index)?;
            let offset = address.checked_sub(range.start)?;
            (offset < range.len).then_some((index, range))
        })
    }
}
