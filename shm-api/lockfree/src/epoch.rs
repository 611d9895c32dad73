//! A table that many workers read without locks while a writer replaces its entries: quiescent-state
//! based reclamation.
//!
//! A worker passes a batch boundary with [`TableReader::report_quiescent`]. An entry taken out of the
//! table is freed when every worker has passed one since. A worker that is about to sleep calls
//! [`TableReader::go_offline`], so that reclamation does not wait for it. Used for the key table of
//! siw-memory; generic so that loom can explore it.

use crate::sync::{AtomicPtr, AtomicU64, Mutex, MutexGuard, Ordering, fence};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

#[repr(align(128))]
struct Padded(AtomicU64);

/// A reader's epoch while it is offline and does not access the table.
const OFFLINE: u64 = 0;

/// Begins when an entry is taken out, and has elapsed when no reader can use the entry any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GracePeriod(u64);

/// A grace period has elapsed when it is restored: the readers of the process that saved it do not run any
/// more, and those of this process have begun after it.
#[cfg(feature = "serde")]
mod saved {
    use super::GracePeriod;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    impl Serialize for GracePeriod {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_unit()
        }
    }

    impl<'de> Deserialize<'de> for GracePeriod {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            // Epochs of readers begin at 1.
            <()>::deserialize(deserializer).map(|()| GracePeriod(0))
        }
    }
}

/// State of the writing side.
struct WriterState<T> {
    /// Use of each reader slot.
    claimed: Vec<bool>,
    /// Entries that were taken out of the table and are not freed yet.
    dead: VecDeque<(GracePeriod, Box<T>)>,
}

/// The smallest page of memory, in bytes.
const PAGE: usize = 4096;

/// A fixed number of slots, each empty or holding a `T`.
pub struct EpochTable<T> {
    slots: Box<[AtomicPtr<T>]>,
    global: AtomicU64,
    readers: Box<[Padded]>,
    writer: Mutex<WriterState<T>>,
}

// SAFETY: entries are shared between threads (Sync), and may be freed on a thread other than the one
// that created them (Send).
unsafe impl<T: Send + Sync> Sync for EpochTable<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for EpochTable<T> {}

impl<T: Send + Sync> EpochTable<T> {
    /// `slots` entries, read by at most `max_readers` readers at a time.
    pub fn new(slots: usize, max_readers: usize) -> Arc<Self> {
        let slots: Box<[AtomicPtr<T>]> = (0..slots)
            .map(|_| AtomicPtr::new(std::ptr::null_mut()))
            .collect();
        // Zeroed memory that was never written has no pages yet. Entries are at random slots, so
        // without this loop each new entry could take a page fault until all pages exist.
        for slot in slots.iter().step_by(PAGE / size_of::<AtomicPtr<T>>()) {
            slot.store(std::ptr::null_mut(), Ordering::Relaxed);
        }
        Arc::new(EpochTable {
            slots,
            global: AtomicU64::new(1),
            readers: (0..max_readers)
                .map(|_| Padded(AtomicU64::new(OFFLINE)))
                .collect(),
            writer: Mutex::new(WriterState {
                claimed: vec![false; max_readers],
                dead: VecDeque::new(),
            }),
        })
    }

    fn lock_writer(&self) -> MutexGuard<'_, WriterState<T>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a reader, which is online; `None` when `max_readers` exist.
    pub fn register_reader(self: &Arc<Self>) -> Option<TableReader<T>> {
        let index = {
            let mut writer = self.lock_writer();
            let index = writer.claimed.iter().position(|is_claimed| !is_claimed)?;
            writer.claimed[index] = true;
            index
        };
        let mut reader = TableReader {
            table: self.clone(),
            index,
            online: false,
        };
        reader.go_online();
        Some(reader)
    }

    /// Puts an entry into an empty slot; returns the entry when the slot is occupied or does not
    /// exist.
    pub fn set_slot(&self, slot: usize, value: Box<T>) -> Result<(), Box<T>> {
        let Some(slot) = self.slots.get(slot) else {
            return Err(value);
        };
        let pointer = Box::into_raw(value);
        // Pairs with the Acquire in `get`: the entry is complete.
        match slot.compare_exchange(
            std::ptr::null_mut(),
            pointer,
            Ordering::Release,
            Ordering::Relaxed,
        ) {
            Ok(_) => Ok(()),
            // SAFETY: the pointer came from Box::into_raw and was not published.
            Err(_) => Err(unsafe { Box::from_raw(pointer) }),
        }
    }

    /// Takes the entry out if `which` returns true for it. A later [`Self::try_reclaim`] frees it,
    /// once [`Self::has_elapsed`].
    pub fn clear_slot(&self, slot: usize, which: impl FnOnce(&T) -> bool) -> Option<GracePeriod> {
        let slot = self.slots.get(slot)?;
        // This lock serialises writers, so the entry cannot be freed here.
        let mut writer = self.lock_writer();
        let pointer = slot.load(Ordering::Acquire);
        // SAFETY: non-null entries of the table are live; they are only freed in `try_reclaim`, under
        // the lock held here, after leaving the table.
        if pointer.is_null() || !which(unsafe { &*pointer }) {
            return None;
        }
        slot.store(std::ptr::null_mut(), Ordering::Relaxed);
        // Relaxed: the Release of the epoch below publishes the empty slot. Pairs with the Acquire of
        // the epoch in `report_quiescent`: a reader that announces this epoch finds the slot empty.
        let grace_period = GracePeriod(self.global.fetch_add(1, Ordering::AcqRel) + 1);
        // SAFETY: it came from Box::into_raw in `set_slot` and just left the table; the box is
        // dropped only after the readers that still hold it.
        writer
            .dead
            .push_back((grace_period, unsafe { Box::from_raw(pointer) }));
        Some(grace_period)
    }

    /// Begins a grace period for a change inside an entry that was made before; readers see the
    /// change at their next lookup after a batch boundary.
    pub fn begin_grace_period(&self) -> GracePeriod {
        // Pairs with the Acquire in `report_quiescent`: a reader that announces this epoch sees the
        // change from then on.
        GracePeriod(self.global.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// Calls `f` with the entry, for the writing side; the entry stays alive while `f` runs.
    pub fn with_entry<R>(&self, slot: usize, f: impl FnOnce(&T) -> R) -> Option<R> {
        let slot = self.slots.get(slot)?;
        let _writer = self.lock_writer();
        let pointer = slot.load(Ordering::Acquire);
        // SAFETY: as in `clear_slot`: it cannot leave the table while the lock is held.
        (!pointer.is_null()).then(|| f(unsafe { &*pointer }))
    }

    /// Calls `look` with all entries, in the order of their slots, for the writing side; they stay alive while
    /// it runs.
    pub fn with_entries<R>(&self, look: impl FnOnce(&[&T]) -> R) -> R {
        let _writer = self.lock_writer();
        let entries: Vec<&T> = self
            .slots
            .iter()
            .map(|slot| slot.load(Ordering::Acquire))
            .filter(|pointer| !pointer.is_null())
            // SAFETY: as in `clear_slot`: they cannot leave the table while the lock is held.
            .map(|pointer| unsafe { &*pointer })
            .collect();
        look(&entries)
    }

    /// Returns whether every reader has passed a batch boundary or gone offline since the grace
    /// period began: none can access the entry any more.
    pub fn has_elapsed(&self, grace_period: GracePeriod) -> bool {
        // Pairs with the fence in `go_online`: either the reader's epoch is seen here, or the reader
        // sees the empty slot.
        fence(Ordering::SeqCst);
        self.readers.iter().all(|reader| {
            let epoch = reader.0.load(Ordering::Acquire);
            epoch == OFFLINE || epoch >= grace_period.0
        })
    }

    /// Returns whether a grace period has elapsed and all entries that left the table before its end are
    /// freed.
    pub fn is_reclaimed(&self, grace_period: GracePeriod) -> bool {
        let oldest = self.lock_writer().dead.front().map(|(period, _)| period.0);
        self.has_elapsed(grace_period) && oldest.is_none_or(|oldest| oldest > grace_period.0)
    }

    /// Frees the entries that no reader can access; returns the number of entries that still wait.
    pub fn try_reclaim(&self) -> usize {
        self.reclaim_some(usize::MAX).1
    }

    /// Frees at most `most` entries that no reader can access, the oldest first. Returns the numbers of
    /// freed entries and of those that still wait.
    pub fn reclaim_some(&self, most: usize) -> (usize, usize) {
        let mut freed = Vec::new();
        let left = {
            let mut writer = self.lock_writer();
            // The oldest is first, because `clear_slot` begins grace periods under this lock.
            while freed.len() < most
                && writer
                    .dead
                    .front()
                    .is_some_and(|(period, _)| self.has_elapsed(*period))
            {
                freed.extend(writer.dead.pop_front());
            }
            writer.dead.len()
        };
        // Outside the lock: dropping may unmap memory.
        (freed.len(), left)
    }
}

impl<T> Drop for EpochTable<T> {
    fn drop(&mut self) {
        for slot in &self.slots {
            let pointer = slot.load(Ordering::Acquire);
            if !pointer.is_null() {
                // SAFETY: readers hold an Arc of the table, so none is left.
                drop(unsafe { Box::from_raw(pointer) });
            }
        }
    }
}

/// One worker's view of the table.
pub struct TableReader<T: Send + Sync> {
    table: Arc<EpochTable<T>>,
    index: usize,
    online: bool,
}

impl<T: Send + Sync> TableReader<T> {
    /// Returns the entry, borrowed until the next batch boundary; `None` while offline.
    #[inline]
    pub fn get(&self, slot: usize) -> Option<&T> {
        if !self.online {
            return None;
        }
        let pointer = self.table.slots.get(slot)?.load(Ordering::Acquire);
        // SAFETY: the entry was in the table after this reader's last announced epoch, so it is not
        // freed before the next announcement, which needs `&mut self` and ends this borrow.
        (!pointer.is_null()).then(|| unsafe { &*pointer })
    }

    /// See [`EpochTable::begin_grace_period`].
    pub fn begin_grace_period(&self) -> GracePeriod {
        self.table.begin_grace_period()
    }

    /// Variant of [`EpochTable::has_elapsed`] that ignores this reader, which knows its own accesses.
    pub fn has_elapsed_for_others(&self, grace_period: GracePeriod) -> bool {
        // Pairs with the fence in `go_online`, as in `has_elapsed`.
        fence(Ordering::SeqCst);
        let mut readers = self.table.readers.iter().enumerate();
        readers.all(|(index, reader)| {
            let epoch = reader.0.load(Ordering::Acquire);
            index == self.index || epoch == OFFLINE || epoch >= grace_period.0
        })
    }

    #[inline]
    fn epoch_word(&self) -> &AtomicU64 {
        &self.table.readers[self.index].0
    }

    /// Reports a batch boundary: no reference obtained earlier is held any more.
    #[inline]
    pub fn report_quiescent(&mut self) {
        if self.online {
            // Pairs with the Release in `clear_slot`: entries removed before this epoch are no longer
            // found.
            let epoch = self.table.global.load(Ordering::Acquire);
            // Pairs with the Acquire in `has_elapsed`: accesses of the last batch come first.
            self.epoch_word().store(epoch, Ordering::Release);
        }
    }

    /// Goes offline; call it before blocking.
    pub fn go_offline(&mut self) {
        self.online = false;
        self.epoch_word().store(OFFLINE, Ordering::Release);
    }

    /// Goes online; call it after blocking.
    pub fn go_online(&mut self) {
        let epoch = self.table.global.load(Ordering::Acquire);
        self.epoch_word().store(epoch, Ordering::Relaxed);
        // Pairs with the fence in `has_elapsed`.
        fence(Ordering::SeqCst);
        self.online = true;
    }
}

impl<T: Send + Sync> Drop for TableReader<T> {
    fn drop(&mut self) {
        self.go_offline();
        self.table.lock_writer().claimed[self.index] = false;
    }
}
