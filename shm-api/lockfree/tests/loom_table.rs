//! Loom explores every interleaving of the steps on the table of memory keys:
//! `RUSTFLAGS="--cfg loom" cargo test -p siw-lockfree --release`
//! (with a target directory of its own).
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use siw_lockfree::address_table::{AddressRange, AddressTable};
use siw_lockfree::epoch::EpochTable;
use siw_lockfree::key_cell::{KeyCell, KeyWord};
use siw_lockfree::sync::{AtomicU32, Ordering};

/// Loom reports a race when it is freed during a read.
struct Entry(UnsafeCell<u32>);

// SAFETY: reads only, except in drop, which loom checks.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

impl Drop for Entry {
    fn drop(&mut self) {
        // SAFETY: loom checks that there is no concurrent read.
        self.0.with_mut(|p| unsafe { *p = 0 });
    }
}

impl Entry {
    fn read(&self) -> u32 {
        // SAFETY: loom checks that there is no concurrent write.
        self.0.with(|p| unsafe { *p })
    }
}

#[test]
fn no_stretch_of_addresses_is_found_with_the_length_of_another() {
    loom::model(|| {
        let table = Arc::new(AddressTable::new(1));
        let range = |start, len| AddressRange {
            start,
            len,
            owner: len,
        };
        let index = table.insert_range(range(0x1000, 0x10)).unwrap();
        let handler = {
            let table = table.clone();
            thread::spawn(move || {
                // After the short range, inside the long one, which begins later.
                for address in [0x1020, 0x3000] {
                    if let Some((_, found)) = table.find_range(address) {
                        assert_eq!(found, range(0x2000, 0x2000));
                    }
                }
            })
        };
        table.remove_range(index);
        assert_eq!(table.insert_range(range(0x2000, 0x2000)), Some(0));
        handler.join().unwrap();
        assert_eq!(table.find_range(0x3fff), Some((0, range(0x2000, 0x2000))));
        assert_eq!(table.find_range(0x4000), None);
    });
}

#[test]
fn an_entry_is_freed_only_after_the_batch_that_found_it() {
    loom::model(|| {
        let t = EpochTable::new(1, 1);
        t.set_slot(0, Box::new(Entry(UnsafeCell::new(5)))).ok();
        let mut r = t.register_reader().unwrap();
        let worker = thread::spawn(move || {
            if let Some(e) = r.get(0) {
                assert_eq!(e.read(), 5);
            }
            r.report_quiescent();
            if let Some(e) = r.get(0) {
                assert_eq!(e.read(), 5);
            }
            r.report_quiescent();
        });
        let grace_period = t.clear_slot(0, |_| true).unwrap();
        if t.has_elapsed(grace_period) {
            assert_eq!(t.try_reclaim(), 0);
        } else {
            t.try_reclaim();
        }
        worker.join().unwrap();
        assert_eq!(t.try_reclaim(), 0);
    });
}

#[test]
fn a_worker_that_wakes_does_not_find_what_was_freed_while_it_slept() {
    loom::model(|| {
        let t = EpochTable::new(1, 1);
        t.set_slot(0, Box::new(Entry(UnsafeCell::new(5)))).ok();
        let mut r = t.register_reader().unwrap();
        r.go_offline();
        let worker = thread::spawn(move || {
            assert!(r.get(0).is_none());
            r.go_online();
            if let Some(e) = r.get(0) {
                assert_eq!(e.read(), 5);
            }
            r.go_offline();
        });
        t.clear_slot(0, |_| true).unwrap();
        t.try_reclaim();
        worker.join().unwrap();
        assert_eq!(t.try_reclaim(), 0);
    });
}

/// A binding in the form that siw-memory uses: two fields that belong together.
struct Binding {
    cell: KeyCell,
    base: AtomicU32,
    len: AtomicU32,
}

impl Binding {
    fn bind(&self, word: KeyWord, stag: u32) -> bool {
        let claimed = self.cell.try_claim(word);
        if claimed {
            self.base.store(stag, Ordering::Relaxed);
            self.len.store(stag, Ordering::Relaxed);
            self.cell.publish_key(stag, true);
        }
        claimed
    }

    /// Reads the binding like a worker that looks up a key.
    fn read(&self) -> Option<(u32, u32, u32)> {
        let word = self.cell.load_word();
        let (base, len) = (
            self.base.load(Ordering::Relaxed),
            self.len.load(Ordering::Relaxed),
        );
        (word.is_valid() && self.cell.is_unchanged(word)).then_some((word.stag(), base, len))
    }
}

fn binding() -> Arc<Binding> {
    Arc::new(Binding {
        cell: KeyCell::new(1, true),
        base: AtomicU32::new(1),
        len: AtomicU32::new(1),
    })
}

#[test]
fn a_key_is_never_seen_with_the_fields_of_another_binding() {
    loom::model(|| {
        let b = binding();
        let w = b.clone();
        let worker = thread::spawn(move || {
            let first = w.cell.load_word();
            assert!(w.bind(first, 2));
            let word = w.cell.load_word();
            assert!(w.bind(word, 3));
        });
        for _ in 0..2 {
            if let Some((key, base, len)) = b.read() {
                assert_eq!((base, len), (key, key));
            }
        }
        worker.join().unwrap();
        assert_eq!(b.read(), Some((3, 3, 3)));
    });
}

#[test]
fn of_two_workers_that_bind_one_window_one_wins() {
    loom::model(|| {
        let b = binding();
        let (x, y) = (b.clone(), b.clone());
        let word = b.cell.load_word();
        let other = thread::spawn(move || x.bind(word, 2));
        let mine = y.bind(word, 3);
        let theirs = other.join().unwrap();
        assert!(mine != theirs);
        let key = if mine { 3 } else { 2 };
        assert_eq!(b.read(), Some((key, key, key)));
    });
}

#[test]
fn nothing_is_bound_to_what_leaves_the_table() {
    loom::model(|| {
        let b = binding();
        let w = b.clone();
        let worker = thread::spawn(move || {
            let word = w.cell.load_word();
            w.bind(word, 2)
        });
        let last = b.cell.retire_key();
        let bound = worker.join().unwrap();
        assert_eq!(last.stag(), if bound { 2 } else { 1 });
        assert_eq!(b.read(), None);
        assert!(!b.bind(b.cell.load_word(), 4));
    });
}
