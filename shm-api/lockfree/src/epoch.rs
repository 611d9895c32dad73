//! A table that many workers read without locks while one side replaces its
//! entries: quiescent-state based reclamation.
//!
//! A worker passes a batch boundary with [`TableReader::report_quiescent`]; an entry taken
//! out of the table is freed when every worker has passed one since. A worker that
//! is about to sleep goes [`TableReader::go_offline`] so that nobody waits for it.
//! Used for the key table of siw-memory; generic so that loom can explore it.

use crate::sync::{AtomicPtr, AtomicU64, Mutex, MutexGuard, Ordering, fence};
use std::sync::{Arc, PoisonError};

#[repr(align(128))]
struct Padded(AtomicU64);

/// A reader's epoch while it promises not to look at the table.
const OFFLINE: u64 = 0;

/// Begins when an entry is taken out, and has elapsed when no reader can use the entry any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GracePeriod(u64);

/// What only the writing side uses.
struct WriterState<T> {
    /// Which of the reader slots are in use.
    claimed: Vec<bool>,
    /// Entries that left the table and are not freed yet.
    dead: Vec<(GracePeriod, Box<T>)>,
}

/// The smallest page of memory, in bytes.
const PAGE: usize = 4096;

/// Fixed number of slots, each empty or holding a `T`.
pub struct EpochTable<T> {
    slots: Box<[AtomicPtr<T>]>,
    global: AtomicU64,
    readers: Box<[Padded]>,
    writer: Mutex<WriterState<T>>,
}

// SAFETY: entries are shared between threads (Sync) and freed on another than
// the one that made them (Send).
unsafe impl<T: Send + Sync> Sync for EpochTable<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for EpochTable<T> {}

impl<T: Send + Sync> EpochTable<T> {
    /// `slots` entries, read by at most `max_readers` readers at a time.
    pub fn new(slots: usize, max_readers: usize) -> Arc<Self> {
        let slots: Box<[AtomicPtr<T>]> = (0..slots)
            .map(|_| AtomicPtr::new(std::ptr::null_mut()))
            .collect();
        // Zeroes that nobody has written are no memory yet. Entries lie anywhere, so that a page
        // would be added, and its fault taken, for each of them until all exist.
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
                dead: Vec::new(),
            }),
        })
    }

    fn lock_writer(&self) -> MutexGuard<'_, WriterState<T>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader, online; None when `max_readers` exist.
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

    /// Puts an entry into an empty slot; gives it back when the slot is taken or
    /// does not exist.
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

    /// Takes the entry out if `which` agrees. It is freed by a later
    /// [`Self::try_reclaim`], once [`Self::has_elapsed`].
    pub fn clear_slot(&self, slot: usize, which: impl FnOnce(&T) -> bool) -> Option<GracePeriod> {
        let slot = self.slots.get(slot)?;
        // Writers are serialised by this lock, so the entry cannot be freed here.
        let mut writer = self.lock_writer();
        let pointer = slot.load(Ordering::Acquire);
        // SAFETY: non-null entries of the table are live; they only die in
        // `try_reclaim`, under the lock held here, after leaving the table.
        if pointer.is_null() || !which(unsafe { &*pointer }) {
            return None;
        }
        slot.store(std::ptr::null_mut(), Ordering::Relaxed);
        // Relaxed: the Release of the epoch below publishes the empty slot. Pairs with the Acquire
        // of the epoch in `report_quiescent`: a reader that announces it finds the slot empty.
        let grace_period = GracePeriod(self.global.fetch_add(1, Ordering::AcqRel) + 1);
        // SAFETY: it came from Box::into_raw in `set_slot` and just left the table; readers that
        // still hold it are waited for before the box is dropped.
        writer
            .dead
            .push((grace_period, unsafe { Box::from_raw(pointer) }));
        Some(grace_period)
    }

    /// Begins a grace period for a change inside of an entry, which was made before and which readers see
    /// when they look again.
    pub fn begin_grace_period(&self) -> GracePeriod {
        // Pairs with the Acquire in `report_quiescent`: a reader that announces this epoch sees the
        // change from then on.
        GracePeriod(self.global.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// The entry, for the writing side: alive as long as the closure runs.
    pub fn with_entry<R>(&self, slot: usize, f: impl FnOnce(&T) -> R) -> Option<R> {
        let slot = self.slots.get(slot)?;
        let _writer = self.lock_writer();
        let pointer = slot.load(Ordering::Acquire);
        // SAFETY: as in `clear_slot`: it cannot leave the table while the lock is held.
        (!pointer.is_null()).then(|| f(unsafe { &*pointer }))
    }

    /// Whether every reader passed a batch boundary, or went offline, since the
    /// grace period began: none can touch the entry any more.
    pub fn has_elapsed(&self, grace_period: GracePeriod) -> bool {
        // Pairs with the fence in `go_online`: either the reader's epoch is seen here,
        // or the reader sees the empty slot.
        fence(Ordering::SeqCst);
        self.readers.iter().all(|reader| {
            let epoch = reader.0.load(Ordering::Acquire);
            epoch == OFFLINE || epoch >= grace_period.0
        })
    }

    /// Frees what no reader can touch; returns how many entries are still waiting.
    pub fn try_reclaim(&self) -> usize {
        let mut freed = Vec::new();
        let left = {
            let mut writer = self.lock_writer();
            let mut index = 0;
            while index < writer.dead.len() {
                if self.has_elapsed(writer.dead[index].0) {
                    freed.push(writer.dead.swap_remove(index));
                } else {
                    index += 1;
                }
            }
            writer.dead.len()
        };
        // Outside of the lock: dropping may unmap memory.
        drop(freed);
        left
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
    /// The entry, borrowed until the next batch boundary; None while offline.
    #[inline]
    pub fn get(&self, slot: usize) -> Option<&T> {
        if !self.online {
            return None;
        }
        let pointer = self.table.slots.get(slot)?.load(Ordering::Acquire);
        // SAFETY: the entry was in the table after this reader's last announced
        // epoch, so it is not freed before the next announcement, which needs
        // `&mut self` and ends this borrow.
        (!pointer.is_null()).then(|| unsafe { &*pointer })
    }

    /// As [`EpochTable::begin_grace_period`].
    pub fn begin_grace_period(&self) -> GracePeriod {
        self.table.begin_grace_period()
    }

    /// As [`EpochTable::has_elapsed`], but for this reader, which knows by itself what it goes on with.
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

    /// Batch boundary: no reference obtained before is held any more.
    #[inline]
    pub fn report_quiescent(&mut self) {
        if self.online {
            // Pairs with the Release in `clear_slot`: what was removed before this epoch is not
            // found any more.
            let epoch = self.table.global.load(Ordering::Acquire);
            // Pairs with the Acquire in `has_elapsed`: accesses of the last batch come first.
            self.epoch_word().store(epoch, Ordering::Release);
        }
    }

    /// Before blocking.
    pub fn go_offline(&mut self) {
        self.online = false;
        self.epoch_word().store(OFFLINE, Ordering::Release);
    }

    /// After blocking.
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
