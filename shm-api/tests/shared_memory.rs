//! Shared memory: mappings of one file, bounds, seals, page sizes.

use siw_shm::shared_memory::{OutOfBounds, PageSize, SharedMemory};
use std::sync::atomic::{AtomicU32, Ordering};

fn clone_memfd(memory: &SharedMemory) -> rustix::fd::OwnedFd {
    memory.memfd().unwrap().try_clone_to_owned().unwrap()
}

#[test]
fn two_mappings_of_a_region_see_each_other() {
    let memory = SharedMemory::create_memfd("t", 5000, PageSize::Normal).unwrap();
    assert_eq!(memory.len(), 8192);
    let other = SharedMemory::map_fd(clone_memfd(&memory), 5000).unwrap();
    memory.write(4000, b"hello").unwrap();
    let mut buf = [0; 5];
    other.read(4000, &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    memory.atomic_u32(16).unwrap().store(7, Ordering::Release);
    assert_eq!(other.atomic_u32(16).unwrap().load(Ordering::Acquire), 7);
    other.copy_to(4000, &memory, 4002, 5).unwrap();
    memory.read(4002, &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    memory.fill_zero(0, 8192).unwrap();
    other.read(4002, &mut buf).unwrap();
    assert_eq!(buf, [0; 5]);
}

/// Waits in short turns for what another thread does.
fn await_other(mut is_done: impl FnMut() -> bool) {
    while !(0..1000).any(|_| {
        std::hint::spin_loop();
        is_done()
    }) {
        std::thread::yield_now();
    }
}

/// As programs do that poll the target of an RDMA WRITE: they read all of it when its end has changed,
/// clear the end, and expect it to stay clear until the next WRITE.
#[test]
fn the_last_word_of_a_copy_is_stored_last_and_once() {
    const ROUNDS: u32 = 20_000;
    let lens = [4, 8, 12, 16, 20, 32, 64, 66, 128, 256, 300, 1442, 4096];
    let memory = SharedMemory::new_anonymous(1 << 16).unwrap();
    let cleared = AtomicU32::new(0);
    for (len, start) in lens.into_iter().flat_map(|len| [(len, 0), (len, 4)]) {
        let end = memory.atomic_u32((start + len - 1) & !3).unwrap();
        cleared.store(0, Ordering::Release);
        std::thread::scope(|scope| {
            let poller = scope.spawn(|| {
                let mut bytes = vec![0; len];
                for round in 1..=ROUNDS {
                    await_other(|| end.load(Ordering::Acquire) != 0);
                    memory.read(start, &mut bytes).unwrap();
                    end.store(0, Ordering::Release);
                    cleared.store(round, Ordering::Release);
                    let is_whole = bytes.iter().all(|byte| *byte == round as u8 | 1);
                    assert!(is_whole, "{len} bytes at {start}, round {round}");
                }
            });
            for round in 1..=ROUNDS {
                memory.write(start, &vec![round as u8 | 1; len]).unwrap();
                await_other(|| cleared.load(Ordering::Acquire) == round || poller.is_finished());
                let again = end.load(Ordering::Acquire);
                assert_eq!(again, 0, "{len} bytes at {start}, round {round}");
            }
        });
    }
}

#[test]
fn copies_are_whole_at_every_position_in_a_page() {
    let memory = SharedMemory::new_anonymous(1 << 16).unwrap();
    let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut copy = vec![0xaa; 1 << 16];
    let page = copy.as_ptr().align_offset(4096);
    // Copies are made differently when the destination is 1 to 31 bytes ahead.
    for ahead in (0..=33).chain([63, 64, 2000, 4095]) {
        for len in [2047, 2048, 2049, 2111, 2112, 4096, 8928, 20_000] {
            for from in [0, 4090] {
                memory.fill_zero(0, 1 << 15).unwrap();
                memory.write(from, &bytes[..len]).unwrap();
                copy.fill(0xaa);
                let at = page + (from + ahead) % 4096;
                memory.read(from, &mut copy[at..at + len]).unwrap();
                assert!(copy[at..at + len] == bytes[..len], "{ahead} {len} {from}");
                assert!(copy[..at].iter().all(|byte| *byte == 0xaa));
                assert!(copy[at + len..].iter().all(|byte| *byte == 0xaa));
            }
        }
    }
}

#[test]
fn accesses_outside_of_a_region_are_refused() {
    let memory = SharedMemory::new_anonymous(4096).unwrap();
    for (offset, len) in [
        (4096, 1),
        (4095, 2),
        (usize::MAX, 1),
        (0, 4097),
        (usize::MAX - 1, 8),
    ] {
        assert_eq!(memory.write(offset, &vec![0; len]), Err(OutOfBounds));
        assert_eq!(memory.read(offset, &mut vec![0; len]), Err(OutOfBounds));
        assert_eq!(memory.fill_zero(offset, len), Err(OutOfBounds));
        assert_eq!(memory.copy_to(offset, &memory, 0, len), Err(OutOfBounds));
        assert_eq!(memory.copy_to(0, &memory, offset, len), Err(OutOfBounds));
    }
    assert_eq!(memory.write(4096, &[]), Ok(()));
    assert!(memory.atomic_u32(2).is_err() && memory.atomic_u32(4096).is_err());
    assert!(memory.atomic_u64(4).is_err() && memory.atomic_u64(4092).is_err());
    memory.prefetch_range(1 << 40, 4096);
    memory.prefetch_range(0, usize::MAX);
}

#[test]
fn a_region_can_neither_shrink_nor_grow() {
    let memory = SharedMemory::create_memfd("t", 4096, PageSize::Normal).unwrap();
    let fd = clone_memfd(&memory);
    assert!(SharedMemory::cannot_shrink(memory.memfd().unwrap()));
    assert!(rustix::fs::ftruncate(&fd, 0).is_err());
    assert!(rustix::fs::ftruncate(&fd, 8192).is_err());
    let plain = rustix::fs::memfd_create("p", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(!SharedMemory::cannot_shrink(rustix::fd::AsFd::as_fd(
        &plain
    )));
}

#[test]
fn a_file_shorter_than_promised_is_not_mapped() {
    let memory = SharedMemory::create_memfd("t", 4096, PageSize::Normal).unwrap();
    let error = SharedMemory::map_fd(clone_memfd(&memory), 4097).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("4096 bytes instead of at least 4097"),
        "{error}"
    );
    let empty = rustix::fs::memfd_create("e", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(SharedMemory::map_fd(empty, 0).is_err());
}

#[test]
fn without_hugepages_a_region_falls_back_and_says_so() {
    let memory = SharedMemory::create_memfd("t", 100, PageSize::TryHuge).unwrap();
    assert_eq!(memory.len(), memory.page_size());
    assert_eq!(memory.is_huge(), memory.page_size() > 4096);
    assert_eq!(
        SharedMemory::map_fd(clone_memfd(&memory), 100)
            .unwrap()
            .is_huge(),
        memory.is_huge()
    );
    memory.write(memory.len() - 1, &[1]).unwrap();
}
