//! External memory: counted, and mapped until the last mbuf is gone.

mod common;

use common::{as_ext, bytes, pattern, pool};
use dpdk::{ChainBuilder, ExtMemory, Mbuf, MbufCache, OwnedMemory, TrackerPool};
use std::sync::{Arc, Weak};

#[test]
fn a_tracker_counts_the_mbufs_that_point_into_its_memory() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(4);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let mut held: Vec<Mbuf> = (0..10u64)
        .map(|i| {
            let mut m = cache.alloc().unwrap();
            assert!(tracker.attach(&mut m, i * 100, 100));
            m
        })
        .collect();
    assert_eq!(tracker.outstanding(), 10);
    assert!(held[0].is_external());
    assert_eq!(held[3].data()[..3], [49, 50, 51], "bytes 300.. modulo 251");
    assert_eq!(held[3].data_len(), 100);
    cache.free(held.pop().unwrap());
    assert_eq!(tracker.outstanding(), 9);
    drop(held.pop());
    assert_eq!(tracker.outstanding(), 8);
    held.clear();
    assert_eq!(tracker.outstanding(), 0);
    trackers.free(tracker);
    assert_eq!((trackers.available(), trackers.zombies()), (4, 0));
    drop(cache);
    assert_eq!(pool.available(), 63);
}

#[test]
fn what_does_not_fit_is_not_attached() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut m = Mbuf::alloc(&pool).unwrap();
    let end = memory.len() as u64;
    assert!(!tracker.attach(&mut m, end - 9, 10));
    assert!(!tracker.attach(&mut m, u64::MAX, 10));
    assert!(!tracker.attach(&mut m, end + 1, 0));
    assert!(!m.is_external());
    assert!(tracker.attach(&mut m, end - 10, 10));
    assert!(!tracker.attach(&mut m, 0, 10), "attached already");
    let mut chain = Mbuf::alloc(&pool).unwrap();
    chain.chain(Mbuf::alloc(&pool).unwrap()).unwrap();
    assert!(!tracker.attach(&mut chain, 0, 10), "a chain");
    assert_eq!(tracker.outstanding(), 1);
}

#[test]
fn a_freed_tracker_keeps_its_memory_until_the_last_mbuf_is_gone() {
    let pool = pool(63);
    let memory = pattern();
    let alive: Weak<OwnedMemory> = Arc::downgrade(&memory);
    let mut trackers = TrackerPool::new(1);
    let ext: Arc<dyn ExtMemory> = memory;
    let tracker = trackers.alloc(ext).unwrap();
    let mut m = Mbuf::alloc(&pool).unwrap();
    assert!(tracker.attach(&mut m, 1, 3));

    trackers.free(tracker);
    assert_eq!(trackers.zombies(), 1);
    assert!(
        trackers.alloc(as_ext(&pattern())).is_none(),
        "the slot is not reused"
    );
    assert!(alive.upgrade().is_some());
    assert_eq!(m.data(), [1, 2, 3]);

    drop(m);
    assert_eq!(trackers.sweep(), 1);
    assert!(
        alive.upgrade().is_none(),
        "the memory goes with the last mbuf"
    );
    assert!(trackers.alloc(as_ext(&pattern())).is_some());
}

#[test]
fn a_sweep_finds_each_zombie_whose_mbufs_are_gone() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(8);
    let mut held: Vec<Mbuf> = (0..8)
        .map(|_| {
            let tracker = trackers.alloc(as_ext(&memory)).unwrap();
            let mut m = Mbuf::alloc(&pool).unwrap();
            assert!(tracker.attach(&mut m, 0, 8));
            trackers.free(tracker);
            m
        })
        .collect();
    assert_eq!((trackers.zombies(), trackers.sweep()), (8, 0));
    for i in [5, 2, 0] {
        held.remove(i);
    }
    assert_eq!(trackers.sweep(), 3);
    assert_eq!(trackers.zombies(), 5);
    held.clear();
    assert_eq!(trackers.sweep(), 5);
    assert_eq!(trackers.available(), 8);
}

#[test]
fn a_dropped_tracker_is_found_by_the_sweep() {
    let pool = pool(63);
    let mut trackers = TrackerPool::new(3);
    let held: Vec<Mbuf> = (0..3)
        .map(|_| {
            let tracker = trackers.alloc(as_ext(&pattern())).unwrap();
            let mut m = Mbuf::alloc(&pool).unwrap();
            assert!(tracker.attach(&mut m, 7, 1));
            m
        })
        .collect();
    assert_eq!(trackers.sweep(), 0);
    assert_eq!(trackers.zombies(), 3);
    assert_eq!(held[2].data(), [7]);
    drop(held);
    assert!(trackers.alloc(as_ext(&pattern())).is_some(), "alloc sweeps");
}

#[test]
fn mbufs_may_outlive_the_pool_of_trackers() {
    let pool = pool(63);
    let mut m = Mbuf::alloc(&pool).unwrap();
    let mut trackers = TrackerPool::new(2);
    let tracker = trackers.alloc(as_ext(&pattern())).unwrap();
    assert!(tracker.attach(&mut m, 10, 2));
    drop(trackers);
    assert_eq!(tracker.outstanding(), 1);
    drop(tracker);
    assert_eq!(m.data(), [10, 11]);
    drop(m);
    assert_eq!(pool.available(), 63);
}

#[test]
fn a_tracker_freed_into_the_wrong_pool_goes_home() {
    let (mut a, mut b) = (TrackerPool::new(1), TrackerPool::new(1));
    let tracker = a.alloc(as_ext(&pattern())).unwrap();
    b.free(tracker);
    assert_eq!((b.available(), b.zombies()), (1, 0));
    assert_eq!(a.sweep(), 1);
}

#[test]
fn clones_of_an_external_segment_count_too() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let mut chain = ChainBuilder::new(cache.alloc().unwrap());
    let mut payload = cache.alloc().unwrap();
    assert!(tracker.attach(&mut payload, 20, 4));
    chain.push(payload).unwrap();
    let chain = chain.finish();
    let clone = chain.clone_ref(&pool).unwrap();
    assert_eq!(tracker.outstanding(), 2);
    cache.free(chain);
    assert_eq!(tracker.outstanding(), 1);
    assert_eq!(bytes(&clone), [20, 21, 22, 23]);
    cache.free(clone);
    assert_eq!(tracker.outstanding(), 0);
    drop(cache);
    assert_eq!(pool.available(), 63);
}

#[test]
fn mbufs_freed_by_other_threads_are_all_counted() {
    let pool = pool(2047);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut mbufs = Vec::new();
    assert!(Mbuf::alloc_bulk(&pool, &mut mbufs, 2000));
    for m in &mut mbufs {
        assert!(tracker.attach(m, 0, 1448));
    }
    assert_eq!(tracker.outstanding(), 2000);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let part = mbufs.split_off(mbufs.len() - 500);
            let pool = &pool;
            scope.spawn(move || {
                let mut cache = MbufCache::new(pool);
                part.into_iter().for_each(|m| cache.free(m));
            });
        }
    });
    assert_eq!(tracker.outstanding(), 0);
    assert_eq!(pool.available(), 2047);
}
