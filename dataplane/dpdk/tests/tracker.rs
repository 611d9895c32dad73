//! External memory: counted, and mapped until the last mbuf is freed.

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
    assert_eq!(tracker.outstanding_mbufs(), 10);
    assert!(held[0].is_external());
    assert_eq!(held[3].data()[..3], [49, 50, 51], "bytes 300.. modulo 251");
    assert_eq!(held[3].data_len(), 100);
    cache.free(held.pop().unwrap());
    assert_eq!(tracker.outstanding_mbufs(), 9);
    drop(held.pop());
    assert_eq!(tracker.outstanding_mbufs(), 8);
    held.clear();
    assert_eq!(tracker.outstanding_mbufs(), 0);
    trackers.free(tracker);
    assert_eq!(
        (trackers.available_trackers(), trackers.zombie_count()),
        (4, 0)
    );
    drop(cache);
    assert_eq!(pool.available_buffers(), 63);
}

#[test]
fn shares_taken_ahead_count_as_nobodys() {
    let pool = pool(511);
    let memory = pattern();
    let mut trackers = TrackerPool::new(2);
    let mut cache = MbufCache::new(&pool);
    for end in [true, false] {
        for many in [1, 2, 3, 5, 64, 129, 300] {
            let tracker = trackers.alloc(as_ext(&memory)).unwrap();
            let mut held = Vec::new();
            for n in 0..many {
                let mut m = cache.alloc().unwrap();
                let attach = [dpdk::ExtTracker::attach, dpdk::ExtTracker::attach_unbatched];
                assert!(attach[usize::from(n % 7 == 6)](&tracker, &mut m, 0, 8));
                held.push(m);
                assert_eq!(usize::from(tracker.outstanding_mbufs()), n + 1);
            }
            if end {
                // No mbuf is left: the slot is free at once.
                cache.free_all(held.drain(..));
                assert_eq!(tracker.outstanding_mbufs(), 0);
                trackers.free(tracker);
                assert_eq!(
                    (trackers.available_trackers(), trackers.zombie_count()),
                    (2, 0)
                );
                continue;
            }
            let last = held.pop();
            cache.free_all(held.drain(..));
            assert_eq!(tracker.outstanding_mbufs(), 1);
            if many % 2 == 0 {
                trackers.free(tracker);
            } else {
                drop(tracker);
            }
            assert_eq!(trackers.sweep_released(), 0);
            assert_eq!(
                (trackers.available_trackers(), trackers.zombie_count()),
                (1, 1)
            );
            drop(last);
            assert_eq!(trackers.sweep_released(), 1);
        }
    }
    drop(cache);
    assert_eq!(pool.available_buffers(), 511);
}

#[test]
fn a_tracker_has_65533_shares() {
    let pool = dpdk::Mempool::new(common::eal(), &common::unique("p"), 65_535, 0, 0, None).unwrap();
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut mbufs = Vec::new();
    assert!(Mbuf::alloc_bulk(&pool, &mut mbufs, 65_534));
    let mut spare = mbufs.pop().unwrap();
    assert!(mbufs.iter_mut().all(|m| tracker.attach(m, 1, 1)));
    assert_eq!(tracker.outstanding_mbufs(), 65_533);
    assert!(!tracker.attach(&mut spare, 1, 1) && !tracker.attach_unbatched(&mut spare, 1, 1));
    assert!(!spare.is_external());
    mbufs.pop();
    assert!(tracker.attach(&mut spare, 1, 1));
    assert!(!tracker.attach(&mut Mbuf::alloc(&pool).unwrap(), 1, 1));
    mbufs.clear();
    assert_eq!(tracker.outstanding_mbufs(), 1);
}

#[test]
fn a_frame_is_headers_and_a_reference() {
    let pool = pool(127);
    let memory = pattern();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    let mut cache = MbufCache::new(&pool);
    let fill = |b: &mut [u8]| b.fill(0xee);
    let frame = |cache: &mut MbufCache| cache.alloc_frame(66, fill, (&tracker, 300, 1448));
    // Buffers with leftovers of an earlier packet.
    let mut old = cache.alloc().unwrap();
    assert!(old.append_slice(&[1; 2000]) && old.adj(7));
    old.set_tx_offload(dpdk::TxOffload {
        l2_len: 14,
        l3_len: 20,
        l4_len: 32,
        ipv6: false,
        ip_checksum: true,
        tcp_checksum: true,
        tso_segsz: 1448,
    });
    let mut pointing = cache.alloc().unwrap();
    assert!(tracker.attach(&mut pointing, 0, 9));
    cache.free_all([old, pointing].into_iter());
    let mut headers = None;
    for n in 0..300 {
        let m = frame(&mut cache).unwrap();
        assert_eq!((m.nb_segs(), m.pkt_len(), m.data_len()), (2, 1514, 66));
        let mut all = vec![0xee; 66];
        all.extend((300..300 + 1448).map(|i| (i % 251) as u8));
        assert_eq!(bytes(&m), all);
        assert!(m.is_writable() && m.tx_offload().is_none());
        assert_eq!(m.headroom(), dpdk::HEADROOM);
        assert_eq!(tracker.outstanding_mbufs(), 1);
        // The same buffer holds headers again, and the other one never does.
        let at = m.data().as_ptr();
        assert!(n == 0 || headers == Some(at));
        headers = Some(at);
        cache.free(m);
        assert_eq!(tracker.outstanding_mbufs(), 0);
    }
    // Allocates all that the pool has; a failed attempt loses no buffer.
    let held: Vec<Mbuf> = std::iter::from_fn(|| frame(&mut cache)).collect();
    assert_eq!((held.len(), tracker.outstanding_mbufs()), (63, 63));
    let never = |_: &mut [u8]| panic!("there is no frame to fill");
    assert!(cache.alloc_frame(66, never, (&tracker, 0, 1)).is_none());
    cache.free_all(held.into_iter());
    assert!(
        cache
            .alloc_frame(66, never, (&tracker, 65_530, 7))
            .is_none()
    );
    assert!(cache.alloc_frame(2049, never, (&tracker, 0, 7)).is_none());
    let widest = cache.alloc_frame(2048, fill, (&tracker, 0, 7)).unwrap();
    assert_eq!(widest.pkt_len(), 2055);
    cache.free(widest);
    assert_eq!(tracker.outstanding_mbufs(), 0);
    drop(cache);
    assert_eq!(pool.available_buffers(), 127);
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
    chain.append_chain(Mbuf::alloc(&pool).unwrap()).unwrap();
    assert!(!tracker.attach(&mut chain, 0, 10), "a chain");
    assert_eq!(tracker.outstanding_mbufs(), 1);
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
    assert_eq!(trackers.zombie_count(), 1);
    assert!(
        trackers.alloc(as_ext(&pattern())).is_none(),
        "the slot is not reused"
    );
    assert!(alive.upgrade().is_some());
    assert_eq!(m.data(), [1, 2, 3]);

    drop(m);
    assert_eq!(trackers.sweep_released(), 1);
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
    assert_eq!((trackers.zombie_count(), trackers.sweep_released()), (8, 0));
    for i in [5, 2, 0] {
        held.remove(i);
    }
    assert_eq!(trackers.sweep_released(), 3);
    assert_eq!(trackers.zombie_count(), 5);
    held.clear();
    assert_eq!(trackers.sweep_released(), 5);
    assert_eq!(trackers.available_trackers(), 8);
}

#[test]
fn a_release_is_reported_when_the_last_mbuf_is_freed_and_not_before() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(8);
    let mut held: Vec<Vec<Mbuf>> = (0..8).map(|_| Vec::new()).collect();
    let mut ids = Vec::new();
    for (number, mbufs) in held.iter_mut().enumerate() {
        let tracker = trackers.alloc(as_ext(&memory)).unwrap();
        for _ in 0..3 {
            let mut m = Mbuf::alloc(&pool).unwrap();
            assert!(tracker.attach(&mut m, 0, 8));
            mbufs.push(m);
        }
        ids.push(trackers.free_and_await(tracker, number as u32).unwrap());
    }
    let mut cache = MbufCache::new(&pool);
    for (number, mut mbufs) in held.into_iter().enumerate().rev() {
        cache.free(mbufs.pop().unwrap());
        drop(mbufs.pop());
        trackers.reclaim_released(8);
        assert_eq!(trackers.pop_notice(), None, "one mbuf is left");
        assert!(trackers.is_zombie(ids[number]));
        match number % 2 {
            0 => cache.free(mbufs.pop().unwrap()),
            _ => std::thread::scope(|scope| {
                scope.spawn(|| drop(mbufs));
            }),
        }
        trackers.reclaim_released(8);
        let (tracker, waiter) = (ids[number], number as u32);
        let told = Some(dpdk::Released { tracker, waiter });
        assert_eq!(trackers.pop_notice(), told);
        assert_eq!(trackers.pop_notice(), None);
        assert!(!trackers.is_zombie(tracker));
        assert_eq!(trackers.zombie_count(), number);
    }
    // Without mbufs there is nothing to wait for.
    let tracker = trackers.alloc(as_ext(&memory)).unwrap();
    assert_eq!(trackers.free_and_await(tracker, 7), None);
    assert_eq!(trackers.available_trackers(), 8);
}

#[test]
fn a_call_reclaims_a_bounded_number_of_released_trackers() {
    let pool = pool(63);
    let memory = pattern();
    let mut trackers = TrackerPool::new(8);
    let mut held: Vec<Mbuf> = (0..8)
        .map(|number| {
            let tracker = trackers.alloc(as_ext(&memory)).unwrap();
            let mut m = Mbuf::alloc(&pool).unwrap();
            assert!(tracker.attach(&mut m, 0, 8));
            assert!(trackers.free_and_await(tracker, number).is_some());
            m
        })
        .collect();
    let last = held.pop();
    drop(held);
    for left in [5, 2, 1, 1] {
        trackers.reclaim_released(3);
        assert_eq!(trackers.zombie_count(), left);
    }
    drop(last);
    trackers.reclaim_released(3);
    assert_eq!(trackers.zombie_count(), 0);
    let mut told: Vec<_> = std::iter::from_fn(|| trackers.pop_notice()).collect();
    told.sort_by_key(|released| released.waiter);
    let waiters: Vec<_> = told.iter().map(|released| released.waiter).collect();
    assert_eq!(waiters, (0..8).collect::<Vec<_>>());
}

#[test]
fn releases_by_several_threads_are_each_reported_once() {
    const COUNT: u32 = 1500;
    let pool = pool(2047);
    let memory = pattern();
    let mut trackers = TrackerPool::new(COUNT as usize);
    let mut mbufs = Vec::new();
    let mut live = Vec::new();
    for _ in 0..COUNT {
        let tracker = trackers.alloc(as_ext(&memory)).unwrap();
        let mut m = Mbuf::alloc(&pool).unwrap();
        assert!(tracker.attach(&mut m, 0, 8));
        mbufs.push(m);
        live.push(tracker);
    }
    let mut awaited = 0;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let part = mbufs.split_off(mbufs.len() - COUNT as usize / 3);
            scope.spawn(move || part.into_iter().for_each(drop));
        }
        // Each ends while its mbuf is freed.
        for (waiter, tracker) in live.into_iter().enumerate() {
            awaited += u32::from(trackers.free_and_await(tracker, waiter as u32).is_some());
            trackers.reclaim_released(2);
        }
    });
    trackers.sweep_released();
    let told = std::iter::from_fn(|| trackers.pop_notice());
    let mut waiters: Vec<_> = told.map(|released| released.waiter).collect();
    assert_eq!(waiters.len() as u32, awaited);
    waiters.sort_unstable();
    waiters.dedup();
    assert_eq!(waiters.len() as u32, awaited, "each once");
    assert_eq!(trackers.available_trackers(), COUNT as usize);
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
    assert_eq!(trackers.sweep_released(), 0);
    assert_eq!(trackers.zombie_count(), 3);
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
    assert_eq!(tracker.outstanding_mbufs(), 1);
    drop(tracker);
    assert_eq!(m.data(), [10, 11]);
    drop(m);
    assert_eq!(pool.available_buffers(), 63);
}

#[test]
fn a_tracker_freed_into_the_wrong_pool_goes_home() {
    let (mut a, mut b) = (TrackerPool::new(1), TrackerPool::new(1));
    let tracker = a.alloc(as_ext(&pattern())).unwrap();
    b.free(tracker);
    assert_eq!((b.available_trackers(), b.zombie_count()), (1, 0));
    assert_eq!(a.sweep_released(), 1);
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
    assert_eq!(tracker.outstanding_mbufs(), 2);
    cache.free(chain);
    assert_eq!(tracker.outstanding_mbufs(), 1);
    assert_eq!(bytes(&clone), [20, 21, 22, 23]);
    cache.free(clone);
    assert_eq!(tracker.outstanding_mbufs(), 0);
    drop(cache);
    assert_eq!(pool.available_buffers(), 63);
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
    assert_eq!(tracker.outstanding_mbufs(), 2000);
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
    assert_eq!(tracker.outstanding_mbufs(), 0);
    assert_eq!(pool.available_buffers(), 2047);
}
