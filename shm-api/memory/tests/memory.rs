//! Regions, memory keys and queue memory.

use siw_memory::queue_allocator::{AllocError, CHUNK, QueueAllocator};
use siw_memory::*;
use siw_shm::shared_memory::PageSize;
use siw_shm::*;
use std::collections::HashSet;
use std::sync::Arc;

fn fd_of(r: &SharedMemory) -> rustix::fd::OwnedFd {
    r.memfd().unwrap().try_clone_to_owned().unwrap()
}

#[test]
fn two_mappings_of_a_region_see_each_other() {
    let a = SharedMemory::create_memfd("t", 5000, PageSize::Normal).unwrap();
    assert_eq!(a.len(), 8192);
    let b = SharedMemory::map_fd(fd_of(&a), 5000).unwrap();
    a.write(4000, b"hello").unwrap();
    let mut buf = [0; 5];
    b.read(4000, &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    a.atomic_u32(16)
        .unwrap()
        .store(7, std::sync::atomic::Ordering::Release);
    assert_eq!(
        b.atomic_u32(16)
            .unwrap()
            .load(std::sync::atomic::Ordering::Acquire),
        7
    );
    assert_eq!(
        crc::crc32c_append_shared(0, &b, 4000, 5).unwrap(),
        crc32c::crc32c(b"hello")
    );
    b.copy_to(4000, &a, 4002, 5).unwrap();
    a.read(4002, &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    a.fill_zero(0, 8192).unwrap();
    b.read(4002, &mut buf).unwrap();
    assert_eq!(buf, [0; 5]);
}

#[test]
fn accesses_outside_of_a_region_are_refused() {
    let r = SharedMemory::new_anonymous(4096).unwrap();
    for (off, len) in [
        (4096, 1),
        (4095, 2),
        (usize::MAX, 1),
        (0, 4097),
        (usize::MAX - 1, 8),
    ] {
        assert_eq!(r.write(off, &vec![0; len]), Err(OutOfBounds));
        assert_eq!(r.read(off, &mut vec![0; len]), Err(OutOfBounds));
        assert_eq!(r.fill_zero(off, len), Err(OutOfBounds));
        assert_eq!(crc::crc32c_append_shared(0, &r, off, len), Err(OutOfBounds));
        assert_eq!(r.copy_to(off, &r, 0, len), Err(OutOfBounds));
        assert_eq!(r.copy_to(0, &r, off, len), Err(OutOfBounds));
    }
    assert_eq!(r.write(4096, &[]), Ok(()));
    assert!(r.atomic_u32(2).is_err() && r.atomic_u32(4096).is_err());
    assert!(r.atomic_u64(4).is_err() && r.atomic_u64(4092).is_err());
    r.prefetch_at(1 << 40);
}

#[test]
fn a_region_can_neither_shrink_nor_grow() {
    let r = SharedMemory::create_memfd("t", 4096, PageSize::Normal).unwrap();
    let fd = fd_of(&r);
    assert!(SharedMemory::cannot_shrink(r.memfd().unwrap()));
    assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    assert!(rustix::fs::ftruncate(&fd, 8192).is_err());
    let plain = rustix::fs::memfd_create("p", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(!SharedMemory::cannot_shrink(rustix::fd::AsFd::as_fd(
        &plain
    )));
}

#[test]
fn a_file_shorter_than_promised_is_not_mapped() {
    let r = SharedMemory::create_memfd("t", 4096, PageSize::Normal).unwrap();
    let e = SharedMemory::map_fd(fd_of(&r), 4097).unwrap_err();
    assert!(e.to_string().contains("4096 bytes, 4097"), "{e}");
    let empty = rustix::fs::memfd_create("e", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(SharedMemory::map_fd(empty, 0).is_err());
}

#[test]
fn without_hugepages_a_region_falls_back_and_says_so() {
    let r = SharedMemory::create_memfd("t", 100, PageSize::TryHuge).unwrap();
    assert_eq!(r.len(), r.page_size());
    assert_eq!(r.is_huge(), r.page_size() > 4096);
    assert_eq!(
        SharedMemory::map_fd(fd_of(&r), 100).unwrap().is_huge(),
        r.is_huge()
    );
    r.write(r.len() - 1, &[1]).unwrap();
}

fn mr(access: Access) -> RegisteredMemory {
    let r = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
    RegisteredMemory::new(r, 4096, 100, 0x10_0000, 3, None, access).unwrap()
}

#[test]
fn a_key_is_checked_for_domain_stream_access_wrap_and_bounds() {
    let m = mr(Access::REMOTE_READ);
    let need = Access::REMOTE_READ;
    assert_eq!(m.check_access(0x10_0000, 100, need, 3, 1), Ok(4096));
    assert_eq!(m.check_access(0x10_0063, 1, need, 3, 1), Ok(4096 + 99));
    assert_eq!(
        m.check_access(0x10_0000, 101, need, 3, 1),
        Err(KeyError::Bounds)
    );
    assert_eq!(
        m.check_access(0xf_ffff, 1, need, 3, 1),
        Err(KeyError::Bounds)
    );
    assert_eq!(m.check_access(u64::MAX, 2, need, 3, 1), Err(KeyError::Wrap));
    assert_eq!(m.check_access(0x10_0000, 1, need, 4, 1), Err(KeyError::Pd));
    assert_eq!(
        m.check_access(0x10_0000, 1, Access::REMOTE_WRITE, 3, 1),
        Err(KeyError::Access)
    );
    assert_eq!(m.check_access(0x10_0000, 1, Access::NONE, 3, 1), Ok(4096));
    let r = Arc::new(SharedMemory::new_anonymous(4096).unwrap());
    let one = RegisteredMemory::new(r, 0, 10, 0, 3, Some(9), need).unwrap();
    assert_eq!(one.check_access(0, 1, need, 3, 9), Ok(0));
    assert_eq!(one.check_access(0, 1, need, 3, 8), Err(KeyError::Stream));
}

#[test]
fn placement_stays_inside_the_registered_bytes_of_the_region() {
    let m = mr(Access::LOCAL_WRITE);
    assert_eq!(m.write_at(4096, &[1; 100]), Ok(()));
    assert_eq!(m.write_at(4095, &[1]), Err(OutOfBounds));
    assert_eq!(m.write_at(4096, &[1; 101]), Err(OutOfBounds));
    let mut b = [0; 4];
    assert_eq!(m.read_at(4192, &mut b), Ok(()));
    assert_eq!(b, [1; 4]);
    assert_eq!(m.read_at(4193, &mut b), Err(OutOfBounds));
    assert_eq!(
        m.crc32c_append_at(4096, 100, 0),
        Ok(crc32c::crc32c(&[1; 100]))
    );
    assert!(m.ptr_at(4196, 0).is_ok() && m.ptr_at(4196, 1).is_err());
}

#[test]
fn a_registration_outside_of_its_region_or_with_wrapping_addresses_is_refused() {
    let r = Arc::new(SharedMemory::new_anonymous(4096).unwrap());
    let new = |off, len, base, a| RegisteredMemory::new(r.clone(), off, len, base, 1, None, a);
    assert!(new(0, 4097, 0, Access::NONE).is_err());
    assert!(new(u64::MAX, 2, 0, Access::NONE).is_err());
    assert!(new(0, 2, u64::MAX - 1, Access::NONE).is_err());
    assert_eq!(
        new(0, 2, u64::MAX - 1, Access::ZERO_BASED)
            .unwrap()
            .base_address(),
        0
    );
}

#[test]
fn a_removed_key_is_not_found_and_its_memory_lives_until_the_batch_ends() {
    let t = KeyTable::new(16, 2);
    let m = mr(Access::LOCAL_WRITE);
    let alive = Arc::downgrade(m.shared_memory().unwrap());
    let stag = t.insert(m).unwrap();
    let mut r = t.register_reader().unwrap();
    let found = r.lookup(stag).unwrap();
    let ticket = t.remove(stag).unwrap();
    assert!(t.remove(stag).is_none());
    assert!(!t.has_elapsed(ticket));
    assert_eq!(t.try_reclaim(), 1);
    found.write_at(4096, &[1]).unwrap();
    assert!(r.lookup(stag).is_none());
    assert!(alive.upgrade().is_some());
    r.report_quiescent();
    assert!(t.has_elapsed(ticket));
    assert_eq!(t.try_reclaim(), 0);
    assert!(alive.upgrade().is_none());
}

#[test]
fn nobody_waits_for_a_sleeping_or_departed_worker() {
    let t = KeyTable::new(16, 2);
    let mut sleeper = t.register_reader().unwrap();
    let leaver = t.register_reader().unwrap();
    assert!(
        t.register_reader().is_none(),
        "as many readers as announced"
    );
    let stag = t.insert(mr(Access::NONE)).unwrap();
    sleeper.go_offline();
    assert!(sleeper.lookup(stag).is_none());
    let ticket = t.remove(stag).unwrap();
    assert!(!t.has_elapsed(ticket));
    drop(leaver);
    assert!(t.has_elapsed(ticket));
    t.wait_for_reclaim();
    sleeper.go_online();
    assert!(sleeper.lookup(stag).is_none());
    assert!(t.register_reader().is_some());
}

#[test]
fn an_invalidated_key_stops_working_and_can_still_be_removed() {
    let t = KeyTable::new(4, 1);
    let r = t.register_reader().unwrap();
    let stag = t.insert(mr(Access::REMOTE_READ)).unwrap();
    assert_eq!(r.invalidate_key(stag, 4, 0), Err(KeyError::Pd));
    assert!(
        r.check_access(stag, 0x10_0000, 1, Access::REMOTE_READ, 3, 0)
            .is_ok()
    );
    assert_eq!(r.invalidate_key(stag, 3, 0), Ok(()));
    assert!(r.lookup(stag).is_none());
    assert_eq!(r.invalidate_key(stag, 3, 0), Err(KeyError::Stag));
    assert!(t.remove(stag).is_some());
}

#[test]
fn a_window_never_reaches_the_region_that_took_its_parents_place() {
    let table = KeyTable::new(3, 1);
    let mut reader = table.register_reader().unwrap();
    let rights = Access(31);
    let parent = table.insert(mr(rights)).unwrap();
    let windows = [(); 2].map(|()| {
        let window = RegisteredMemory::new_window(3, WindowType::One);
        table.insert(window).unwrap()
    });
    let bind = |window: Stag, region: Stag, length| BindMw {
        rkey: window.0,
        new_rkey: window.0,
        lkey: region.0,
        addr: 0x10_0000,
        length,
        access: Access::REMOTE_READ,
    };
    let is_readable = |reader: &KeyReader, window: Stag| {
        reader
            .check_access(window, 0x10_0000, 8, Access::REMOTE_READ, 3, 0)
            .is_ok()
    };
    reader
        .bind_window(&bind(windows[0], parent, 64), 3, 0)
        .unwrap();
    assert!(is_readable(&reader, windows[0]));
    // As when a client goes: whatever is bound to it.
    table.remove(parent).unwrap();
    reader.report_quiescent();
    assert_eq!(table.try_reclaim(), 0);
    let other = table.insert(mr(rights)).unwrap();
    assert_eq!(other.0 >> 8, parent.0 >> 8, "the only free place");
    assert_ne!(other, parent);
    assert!(!is_readable(&reader, windows[0]), "the wrong region");
    reader
        .bind_window(&bind(windows[1], other, 64), 3, 0)
        .unwrap();
    // The count of the other region is not touched when the first window leaves its old one.
    reader
        .bind_window(&bind(windows[0], other, 0), 3, 0)
        .unwrap();
    assert_eq!(table.deregister(other), Err(DeregError::Bound(1)));
    table.remove(windows[0]).unwrap();
    assert_eq!(table.deregister(other), Err(DeregError::Bound(1)));
}

#[test]
fn keys_are_never_zero_and_come_back_late() {
    let t = KeyTable::new(8, 1);
    let mut r = t.register_reader().unwrap();
    let mut seen = HashSet::new();
    // 8 indices with 256 keys each: no key may repeat within 2048 registrations
    // that use each index equally often; 250 per index at the least are certain.
    for _ in 0..200 {
        let stag = t.insert(mr(Access::NONE)).unwrap();
        assert_ne!(stag.0, 0);
        assert!(stag.0 >> 8 >= 1);
        assert!(seen.insert(stag), "{stag:?} was reused");
        t.remove(stag).unwrap();
        r.report_quiescent();
    }
    assert_eq!(t.try_reclaim(), 0);
}

#[test]
fn stale_and_invented_keys_are_unknown() {
    let t = KeyTable::new(8, 1);
    let r = t.register_reader().unwrap();
    let stag = t.insert(mr(Access::NONE)).unwrap();
    for k in 1..=255u32 {
        assert!(r.lookup(Stag(stag.0 ^ k)).is_none());
    }
    for s in [0, 1, 255, u32::MAX, 0xffff_ff00] {
        assert!(s == stag.0 || r.lookup(Stag(s)).is_none());
    }
    assert_eq!(t.with_entry(stag, |m| m.pd()), Some(3));
    assert_eq!(t.with_entry(Stag(stag.0 ^ 1), |m| m.pd()), None);
}

#[test]
fn a_full_table_says_so_and_recovers() {
    let t = KeyTable::new(3, 1);
    let s: Vec<_> = (0..3)
        .map(|_| t.insert(mr(Access::NONE)).unwrap())
        .collect();
    assert!(t.insert(mr(Access::NONE)).is_err());
    t.remove(s[1]).unwrap();
    assert!(t.insert(mr(Access::NONE)).is_ok());
}

#[test]
fn registration_under_lookup_from_many_threads_never_touches_freed_memory() {
    let t = KeyTable::new(64, 3);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let (mut r, stop) = (t.register_reader().unwrap(), stop.clone());
            std::thread::spawn(move || {
                let mut hits = 0u64;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    for i in 0..65u32 {
                        for k in 0..=255 {
                            if let Some(m) = r.lookup(Stag(i << 8 | k)) {
                                m.write_at(m.start_offset(), &[1; 16]).unwrap();
                                hits += 1;
                            }
                        }
                    }
                    r.report_quiescent();
                }
                hits
            })
        })
        .collect();
    for _ in 0..300 {
        let s = t.insert(mr(Access::LOCAL_WRITE)).unwrap();
        std::thread::yield_now();
        t.remove(s).unwrap();
        t.try_reclaim();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for r in readers {
        r.join().unwrap();
    }
    t.wait_for_reclaim();
}

#[test]
fn queues_share_chunks_and_reused_memory_is_zero() {
    let mut a = QueueAllocator::new(PageSize::Normal, 64 << 20, 0);
    let one = a.alloc(5000).unwrap();
    let two = a.alloc(5000).unwrap();
    assert!(one.new_region && !two.new_region);
    assert_eq!(one.region_id, two.region_id);
    assert!(two.offset >= one.offset + 5000 && two.offset.is_multiple_of(64));
    assert!(one.len >= 5000 && one.len <= 6250);
    one.region.write(one.offset, &[9; 5000]).unwrap();
    let at = one.offset;
    a.free(one);
    let again = a.alloc(5000).unwrap();
    assert_eq!((again.offset, again.new_region), (at, false));
    let mut b = [1; 5000];
    again.region.read(again.offset, &mut b).unwrap();
    assert!(b.iter().all(|b| *b == 0));
}

#[test]
fn a_large_queue_has_its_own_region_and_the_limit_holds() {
    let mut a = QueueAllocator::new(PageSize::Normal, 3 * CHUNK, 0);
    let big = a.alloc(2 * CHUNK + 1).unwrap();
    assert!(big.dedicated && big.new_region);
    let mapped = a.mapped_bytes();
    assert!(matches!(a.alloc(CHUNK), Err(AllocError::Limit(_))));
    a.free(big);
    assert!(a.mapped_bytes() < mapped);
    assert!(a.alloc(CHUNK).is_ok());
}

#[test]
fn no_two_live_queues_overlap() {
    let mut a = QueueAllocator::new(PageSize::Normal, 256 << 20, 0);
    let mut live: Vec<queue_allocator::QueueMemory> = Vec::new();
    let mut x = 12345u64;
    for _ in 0..2000 {
        x = x
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        if x >> 62 == 0 && !live.is_empty() {
            let m = live.swap_remove((x >> 20) as usize % live.len());
            a.free(m);
        } else {
            let m = a.alloc((x >> 40) as usize % 60_000 + 1).unwrap();
            assert!(m.offset + m.len <= m.region.len());
            for o in &live {
                let apart = o.region_id != m.region_id
                    || o.offset + o.len <= m.offset
                    || m.offset + m.len <= o.offset;
                assert!(apart, "{o:?} {m:?}");
            }
            live.push(m);
        }
    }
}
