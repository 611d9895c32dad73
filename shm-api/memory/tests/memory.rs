//! Registered memory, memory keys and queue memory.

use siw_memory::queue_allocator::{AllocError, CHUNK, QueueAllocator};
use siw_memory::*;
use siw_shm::shared_memory::PageSize;
use siw_shm::*;
use std::collections::HashSet;
use std::sync::Arc;

#[test]
fn a_checksum_covers_bytes_of_the_memory_alone() {
    let memory = SharedMemory::new_anonymous(4096).unwrap();
    memory.write(4000, b"hello").unwrap();
    assert_eq!(
        crc::crc32c_append_shared(0, &memory, 4000, 5),
        Ok(crc32c::crc32c(b"hello"))
    );
    for (offset, len) in [(4096, 1), (4095, 2), (usize::MAX, 1), (0, 4097)] {
        let summed = crc::crc32c_append_shared(0, &memory, offset, len);
        assert_eq!(summed, Err(OutOfBounds));
    }
}

fn new_registration(access: Access) -> RegisteredMemory {
    let memory = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
    RegisteredMemory::new(memory, 4096, 100, 0x10_0000, 3, None, access).unwrap()
}

#[test]
fn a_key_is_checked_for_domain_stream_access_wrap_and_bounds() {
    let registered = new_registration(Access::REMOTE_READ);
    let need = Access::REMOTE_READ;
    assert_eq!(
        registered.check_access(0x10_0000, 100, need, 3, 1),
        Ok(4096)
    );
    assert_eq!(
        registered.check_access(0x10_0063, 1, need, 3, 1),
        Ok(4096 + 99)
    );
    assert_eq!(
        registered.check_access(0x10_0000, 101, need, 3, 1),
        Err(KeyError::Bounds)
    );
    assert_eq!(
        registered.check_access(0xf_ffff, 1, need, 3, 1),
        Err(KeyError::Bounds)
    );
    assert_eq!(
        registered.check_access(u64::MAX, 2, need, 3, 1),
        Err(KeyError::Wrap)
    );
    assert_eq!(
        registered.check_access(0x10_0000, 1, need, 4, 1),
        Err(KeyError::Pd)
    );
    assert_eq!(
        registered.check_access(0x10_0000, 1, Access::REMOTE_WRITE, 3, 1),
        Err(KeyError::Access)
    );
    assert_eq!(
        registered.check_access(0x10_0000, 1, Access::NONE, 3, 1),
        Ok(4096)
    );
    let memory = Arc::new(SharedMemory::new_anonymous(4096).unwrap());
    let one = RegisteredMemory::new(memory, 0, 10, 0, 3, Some(9), need).unwrap();
    assert_eq!(one.check_access(0, 1, need, 3, 9), Ok(0));
    assert_eq!(one.check_access(0, 1, need, 3, 8), Err(KeyError::Stream));
}

#[test]
fn placement_stays_inside_the_registered_bytes_of_the_region() {
    let registered = new_registration(Access::LOCAL_WRITE);
    assert_eq!(registered.write_at(4096, &[1; 100]), Ok(()));
    assert_eq!(registered.write_at(4095, &[1]), Err(OutOfBounds));
    assert_eq!(registered.write_at(4096, &[1; 101]), Err(OutOfBounds));
    let mut bytes = [0; 4];
    assert_eq!(registered.read_at(4192, &mut bytes), Ok(()));
    assert_eq!(bytes, [1; 4]);
    assert_eq!(registered.read_at(4193, &mut bytes), Err(OutOfBounds));
    assert_eq!(
        registered.crc32c_append_at(4096, 100, 0),
        Ok(crc32c::crc32c(&[1; 100]))
    );
    assert!(registered.ptr_at(4196, 0).is_ok() && registered.ptr_at(4196, 1).is_err());
}

#[test]
fn a_registration_outside_of_its_region_or_with_wrapping_addresses_is_refused() {
    let memory = Arc::new(SharedMemory::new_anonymous(4096).unwrap());
    let new = |offset, len, base, access| {
        RegisteredMemory::new(memory.clone(), offset, len, base, 1, None, access)
    };
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
    let table = KeyTable::new(16, 2);
    let registered = new_registration(Access::LOCAL_WRITE);
    let alive = Arc::downgrade(registered.shared_memory().unwrap());
    let stag = table.insert(registered).unwrap();
    let mut reader = table.register_reader().unwrap();
    let found = reader.lookup(stag).unwrap();
    let ticket = table.remove(stag).unwrap();
    assert!(table.remove(stag).is_none());
    assert!(!table.has_elapsed(ticket));
    assert_eq!(table.try_reclaim(), 1);
    found.write_at(4096, &[1]).unwrap();
    assert!(reader.lookup(stag).is_none());
    assert!(alive.upgrade().is_some());
    reader.report_quiescent();
    assert!(table.has_elapsed(ticket));
    assert_eq!(table.try_reclaim(), 0);
    assert!(alive.upgrade().is_none());
}

/// The oldest are freed first, so none waits for those that are removed after it.
#[test]
fn removed_memory_is_freed_in_parts_and_in_order() {
    let table = KeyTable::new(16, 2);
    let mut reader = table.register_reader().unwrap();
    let remove_one = || {
        let stag = table.insert(new_registration(Access::NONE)).unwrap();
        table.remove(stag).unwrap()
    };
    let [first, second, third] = [(); 3].map(|()| remove_one());
    assert_eq!(table.reclaim_some(2), (0, 3));
    reader.report_quiescent();
    let later = remove_one();
    assert!(table.has_elapsed(third) && !table.is_reclaimed(first));
    assert_eq!(table.reclaim_some(2), (2, 2));
    let are_freed = [first, second, third].map(|period| table.is_reclaimed(period));
    assert_eq!(are_freed, [true, true, false]);
    assert_eq!(table.reclaim_some(2), (1, 1));
    assert!(table.is_reclaimed(third) && !table.is_reclaimed(later));
    reader.report_quiescent();
    assert_eq!(table.try_reclaim(), 0);
    assert!(table.is_reclaimed(later));
}

#[test]
fn nobody_waits_for_a_sleeping_or_departed_worker() {
    let table = KeyTable::new(16, 2);
    let mut sleeper = table.register_reader().unwrap();
    let leaver = table.register_reader().unwrap();
    assert!(
        table.register_reader().is_none(),
        "as many readers as announced"
    );
    let stag = table.insert(new_registration(Access::NONE)).unwrap();
    sleeper.go_offline();
    assert!(sleeper.lookup(stag).is_none());
    let ticket = table.remove(stag).unwrap();
    assert!(!table.has_elapsed(ticket));
    drop(leaver);
    assert!(table.has_elapsed(ticket));
    table.wait_for_reclaim();
    sleeper.go_online();
    assert!(sleeper.lookup(stag).is_none());
    assert!(table.register_reader().is_some());
}

#[test]
fn an_invalidated_key_stops_working_and_can_still_be_removed() {
    let table = KeyTable::new(4, 1);
    let reader = table.register_reader().unwrap();
    let stag = table.insert(new_registration(Access::REMOTE_READ)).unwrap();
    assert_eq!(reader.invalidate_key(stag, 4, 0), Err(KeyError::Pd));
    assert!(
        reader
            .check_access(stag, 0x10_0000, 1, Access::REMOTE_READ, 3, 0)
            .is_ok()
    );
    assert_eq!(reader.invalidate_key(stag, 3, 0), Ok(()));
    assert!(reader.lookup(stag).is_none());
    assert_eq!(reader.invalidate_key(stag, 3, 0), Err(KeyError::Stag));
    assert!(table.remove(stag).is_some());
}

#[test]
fn a_window_never_reaches_the_region_that_took_its_parents_place() {
    let table = KeyTable::new(3, 1);
    let mut reader = table.register_reader().unwrap();
    let rights = Access(31);
    let parent = table.insert(new_registration(rights)).unwrap();
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
    // As when a client exits: removed regardless of bound windows.
    table.remove(parent).unwrap();
    reader.report_quiescent();
    assert_eq!(table.try_reclaim(), 0);
    let other = table.insert(new_registration(rights)).unwrap();
    assert_eq!(other.0 >> 8, parent.0 >> 8, "the only free place");
    assert_ne!(other, parent);
    assert!(!is_readable(&reader, windows[0]), "the wrong region");
    reader
        .bind_window(&bind(windows[1], other, 64), 3, 0)
        .unwrap();
    // The count of the other region stays unchanged when the first window leaves its old region.
    reader
        .bind_window(&bind(windows[0], other, 0), 3, 0)
        .unwrap();
    assert_eq!(table.deregister(other), Err(DeregError::Bound(1)));
    table.remove(windows[0]).unwrap();
    assert_eq!(table.deregister(other), Err(DeregError::Bound(1)));
}

#[test]
fn keys_are_never_zero_and_come_back_late() {
    let table = KeyTable::new(8, 1);
    let mut reader = table.register_reader().unwrap();
    let mut seen = HashSet::new();
    // 8 indices with 256 keys each: no key may repeat within 2048 registrations that use each index
    // equally often; at least 250 per index are certain.
    for _ in 0..200 {
        let stag = table.insert(new_registration(Access::NONE)).unwrap();
        assert_ne!(stag.0, 0);
        assert!(stag.0 >> 8 >= 1);
        assert!(seen.insert(stag), "{stag:?} was reused");
        table.remove(stag).unwrap();
        reader.report_quiescent();
    }
    assert_eq!(table.try_reclaim(), 0);
}

#[test]
fn stale_and_invented_keys_are_unknown() {
    let table = KeyTable::new(8, 1);
    let reader = table.register_reader().unwrap();
    let stag = table.insert(new_registration(Access::NONE)).unwrap();
    for change in 1..=255u32 {
        assert!(reader.lookup(Stag(stag.0 ^ change)).is_none());
    }
    for invented in [0, 1, 255, u32::MAX, 0xffff_ff00] {
        assert!(invented == stag.0 || reader.lookup(Stag(invented)).is_none());
    }
    assert_eq!(table.with_entry(stag, |entry| entry.pd()), Some(3));
    assert_eq!(table.with_entry(Stag(stag.0 ^ 1), |entry| entry.pd()), None);
}

#[test]
fn a_full_table_says_so_and_recovers() {
    let table = KeyTable::new(3, 1);
    let stags: Vec<_> = (0..3)
        .map(|_| table.insert(new_registration(Access::NONE)).unwrap())
        .collect();
    assert!(table.insert(new_registration(Access::NONE)).is_err());
    table.remove(stags[1]).unwrap();
    assert!(table.insert(new_registration(Access::NONE)).is_ok());
}

#[test]
fn registration_under_lookup_from_many_threads_never_touches_freed_memory() {
    let table = KeyTable::new(64, 3);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let (mut reader, stop) = (table.register_reader().unwrap(), stop.clone());
            std::thread::spawn(move || {
                let mut hits = 0u64;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    for i in 0..65u32 {
                        for key in 0..=255 {
                            if let Some(registered) = reader.lookup(Stag(i << 8 | key)) {
                                registered
                                    .write_at(registered.start_offset(), &[1; 16])
                                    .unwrap();
                                hits += 1;
                            }
                        }
                    }
                    reader.report_quiescent();
                }
                hits
            })
        })
        .collect();
    for _ in 0..300 {
        let stag = table.insert(new_registration(Access::LOCAL_WRITE)).unwrap();
        std::thread::yield_now();
        table.remove(stag).unwrap();
        table.try_reclaim();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    for reader in readers {
        reader.join().unwrap();
    }
    table.wait_for_reclaim();
}

#[test]
fn queues_share_chunks_and_reused_memory_is_zero() {
    let mut allocator = QueueAllocator::new(PageSize::Normal, 64 << 20, 0);
    let one = allocator.alloc(5000).unwrap();
    let two = allocator.alloc(5000).unwrap();
    assert_eq!(one.region_id, two.region_id);
    assert!(two.offset >= one.offset + 5000 && two.offset.is_multiple_of(64));
    assert!(one.len >= 5000 && one.len <= 6250);
    one.region.write(one.offset, &[9; 5000]).unwrap();
    let at = one.offset;
    allocator.free(one);
    let again = allocator.alloc(5000).unwrap();
    assert_eq!(again.offset, at);
    let mut bytes = [1; 5000];
    again.region.read(again.offset, &mut bytes).unwrap();
    assert!(bytes.iter().all(|bytes| *bytes == 0));
}

#[test]
fn a_client_gets_the_descriptor_of_a_region_once_whatever_was_refused_before() {
    let mut allocator = QueueAllocator::new(PageSize::Normal, 64 << 20, 0);
    // The request was refused after its queue had been allocated.
    let refused = allocator.alloc(5000).unwrap();
    allocator.free(refused);
    let queues = [5000, 5000, 600].map(|len| allocator.alloc(len).unwrap());
    let given = queues.each_ref().map(|queue| {
        let (place, fd) = allocator.give(queue);
        (place.fd, fd.is_some())
    });
    assert_eq!(given, [(1, true), (0, false), (0, false)]);
    assert_eq!(queues[1].place().fd, 0);
}

#[test]
fn a_large_queue_has_its_own_region_and_the_limit_holds() {
    let mut allocator = QueueAllocator::new(PageSize::Normal, 3 * CHUNK, 0);
    let big = allocator.alloc(2 * CHUNK + 1).unwrap();
    assert!(big.dedicated);
    let (place, fd) = allocator.give(&big);
    assert!(fd.is_some() && place.fd == 1 && place.dedicated == 1);
    let mapped = allocator.mapped_bytes();
    assert!(matches!(allocator.alloc(CHUNK), Err(AllocError::Limit(_))));
    allocator.free(big);
    assert!(allocator.mapped_bytes() < mapped);
    assert!(allocator.alloc(CHUNK).is_ok());
}

#[test]
fn a_long_region_is_left_to_the_caller_to_unmap() {
    let mut allocator = QueueAllocator::new(PageSize::Normal, 256 << 20, 0);
    let freed = [1 << 20, 17 << 20].map(|len| {
        let queue = allocator.alloc(len).unwrap();
        let region = std::sync::Arc::downgrade(&queue.region);
        allocator.free(queue);
        region
    });
    assert_eq!(allocator.mapped_bytes(), 0);
    assert!(freed[0].upgrade().is_none(), "unmapped at once");
    let long = allocator.take_long_regions();
    assert_eq!(long.len(), 1);
    assert!(std::sync::Arc::ptr_eq(
        &long[0],
        &freed[1].upgrade().unwrap()
    ));
    drop(long);
    assert!(freed[1].upgrade().is_none());
    assert!(allocator.take_long_regions().is_empty());
}

#[test]
fn no_two_live_queues_overlap() {
    let mut allocator = QueueAllocator::new(PageSize::Normal, 256 << 20, 0);
    let mut live: Vec<queue_allocator::QueueMemory> = Vec::new();
    let mut random = 12345u64;
    for _ in 0..2000 {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        if random >> 62 == 0 && !live.is_empty() {
            let queue = live.swap_remove((random >> 20) as usize % live.len());
            allocator.free(queue);
        } else {
            let queue = allocator
                .alloc((random >> 40) as usize % 60_000 + 1)
                .unwrap();
            assert!(queue.offset + queue.len <= queue.region.len());
            for other in &live {
                let apart = other.region_id != queue.region_id
                    || other.offset + other.len <= queue.offset
                    || queue.offset + queue.len <= other.offset;
                assert!(apart, "{other:?} {queue:?}");
            }
            live.push(queue);
        }
    }
}
