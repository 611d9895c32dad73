//! Memory keys and queue memory that are saved, forgotten and restored, as in a live upgrade.

#[path = "../../tests/common/successor.rs"]
mod successor;

use serde::{Deserialize, Serialize};
use siw_memory::key_table::SavedKeyTable;
use siw_memory::queue_allocator::{AllocError, CHUNK, QueueAllocator, QueueMemory};
use siw_memory::*;
use siw_shm::saved::Restoring;
use siw_shm::shared_memory::PageSize;
use siw_shm::*;
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use successor::{save, succeed};

const PD: u32 = 3;
const QP: u32 = 9;
const CAPACITY: usize = 12;
const LEN: usize = 64 << 10;

fn new_memory() -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create_memfd("saved", LEN, PageSize::Normal).unwrap())
}

/// The table as a successor gets it.
fn succeed_table(table: Arc<KeyTable>, capacity: usize) -> Arc<KeyTable> {
    let (bytes, kept) = save(&*table);
    std::mem::forget(table);
    // SAFETY: the owners were forgotten.
    let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
    let saved: SavedKeyTable = restoring.run(|| postcard::from_bytes(&bytes)).unwrap();
    saved.restore(capacity, 2).unwrap()
}

/// A table with entries of every kind, in every state.
fn new_table() -> (Arc<KeyTable>, Vec<Stag>) {
    let table = KeyTable::new(CAPACITY, 2);
    let all = Access(31);
    let memory = new_memory();
    let plain = || RegisteredMemory::new(memory.clone(), 4096, 5000, 0x10_0000, PD, None, all);
    let one = RegisteredMemory::new(memory.clone(), 0, 100, 7, PD, Some(QP), all);
    let list = new_memory();
    let fast = || RegisteredMemory::new_fast(memory.clone(), 3, list.clone(), 64, PD).unwrap();
    let file: OwnedFd = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .unwrap()
        .into();
    let process = Arc::new(ProcessMemory::new(file));
    let word = Box::leak(Box::new([7u8; 64])).as_ptr() as u64;
    let scattered = |extents: Vec<(ExtentMemory, u64)>| {
        let len = 64 * extents.len() as u64;
        let extents = extents.into_iter().map(|(memory, offset)| Extent {
            memory,
            offset,
            len: 64,
        });
        RegisteredMemory::new_scattered(extents.collect(), len, 0, PD, all).unwrap()
    };
    let parts = vec![
        (ExtentMemory::Shared(memory.clone()), 8192),
        (ExtentMemory::Process(process.clone()), word),
        (ExtentMemory::Shared(list.clone()), 0),
    ];
    let copied = vec![(ExtentMemory::Process(process), word); 2];
    let entries = vec![
        plain().unwrap(),
        plain().unwrap(),
        one.unwrap(),
        fast(),
        fast(),
        scattered(parts),
        scattered(copied),
        RegisteredMemory::new_window(PD, WindowType::One),
        RegisteredMemory::new_window(PD, WindowType::Two),
        RegisteredMemory::new_window(PD, WindowType::Two),
    ];
    let stags: Vec<Stag> = entries
        .into_iter()
        .map(|entry| table.insert(entry).unwrap())
        .collect();
    let keys = table.register_reader().unwrap();
    // Pages in another order.
    for (i, page) in [8192u64, 0, 4096].into_iter().enumerate() {
        list.write(64 + i * 8, &page.to_le_bytes()).unwrap();
    }
    let register = FastReg {
        key: stags[3].0 ^ 5,
        iova: 0x9000,
        length: 9000,
        first_offset: 100,
        page_shift: 12,
        access: Access(7),
    };
    assert_eq!(
        keys.register_pages(
            &FastReg {
                key: stags[3].0,
                ..register
            },
            PD
        ),
        Ok(())
    );
    assert_eq!(keys.invalidate_key(stags[3], PD, QP), Ok(()));
    let register = FastReg {
        key: stags[3].0,
        ..register
    };
    assert_eq!(keys.register_pages(&register, PD), Ok(()));
    for (window, new, region) in [(stags[7], 1, stags[0]), (stags[8], 2, stags[0])] {
        let bind = BindMw {
            rkey: window.0,
            new_rkey: window.0 ^ new,
            lkey: region.0,
            addr: 0x10_0010,
            length: 32,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ,
        };
        assert_eq!(keys.bind_window(&bind, PD, QP), Ok(false));
    }
    assert_eq!(keys.invalidate_key(stags[1], PD, QP), Ok(()));
    (table, stags)
}

/// The outcome of many accesses with every STag that a table of this capacity has.
fn resolve_all(table: &KeyTable, capacity: usize) -> Vec<String> {
    let keys = table.register_reader().unwrap();
    let mut outcomes = Vec::new();
    for stag in 0..(capacity as u32 + 2) << 8 {
        for (address, len) in [
            (0x10_0010, 8),
            (0x10_0000, 5000),
            (0, 128),
            (0x9100, 4096),
            (7, 50),
        ] {
            for need in [
                Access::LOCAL_WRITE,
                Access::REMOTE_READ,
                Access::REMOTE_ATOMIC,
            ] {
                for (pd, qp) in [(PD, QP), (PD, 1), (4, QP)] {
                    let found = keys.check_access(Stag(stag), address, len, need, pd, qp);
                    let found = found.map(|(memory, offset)| {
                        let mut bytes = vec![0; len as usize];
                        let read = memory.read_at(offset, &mut bytes);
                        let sum = bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
                        (memory.home_key(), offset, read.is_ok(), sum)
                    });
                    if found != Err(KeyError::Stag) {
                        outcomes.push(format!("{stag:x} {address:x} {need:?} {pd} {qp} {found:?}"));
                    }
                }
            }
        }
    }
    outcomes
}

#[test]
fn every_key_resolves_as_before() {
    let (table, stags) = new_table();
    table
        .with_entry(stags[0], |mr| mr.write_at(4096, &[3; 200]))
        .unwrap()
        .unwrap();
    let before = resolve_all(&table, CAPACITY);
    // All kinds of entries allow something.
    for index in [0, 2, 3, 5, 6, 7, 8] {
        let home = format!("Ok((Stag({})", stags[if index > 6 { 0 } else { index }].0);
        assert!(before.iter().any(|line| line.contains(&home)), "{index}");
    }
    let windows = |table: &KeyTable| {
        stags
            .iter()
            .map(|stag| table.with_entry(*stag, |mr| mr.count_windows()))
            .collect::<Vec<_>>()
    };
    let bound = windows(&table);
    assert_eq!(bound[0], Some(2));
    let mut table = table;
    for _ in 0..2 {
        table = succeed_table(table, CAPACITY);
        assert_eq!(resolve_all(&table, CAPACITY), before);
        assert_eq!(windows(&table), bound);
    }
    // It goes on: unbinding, deregistration with and without windows, another registration.
    assert_eq!(table.deregister(stags[0]), Err(DeregError::Bound(2)));
    table.unbind_stream(stags[8], QP);
    table.unbind_region(stags[0], [stags[7]]);
    assert!(table.deregister(stags[0]).is_ok());
    let keys = table.register_reader().unwrap();
    assert_eq!(keys.invalidate_key(stags[3], PD, QP), Ok(()));
    assert!(keys.lookup(stags[1]).is_none() && keys.lookup(stags[3]).is_none());
}

#[test]
fn new_keys_are_not_those_of_live_ones_and_the_table_may_grow() {
    let (table, stags) = new_table();
    let table = succeed_table(table, 40);
    let live: HashSet<usize> = stags.iter().map(|stag| stag.0 as usize >> 8).collect();
    let mut indices = HashSet::new();
    for _ in 0..40 - stags.len() {
        let stag = table
            .insert(RegisteredMemory::new_window(PD, WindowType::One))
            .unwrap();
        let index = stag.0 as usize >> 8;
        assert!((1..=40).contains(&index) && !live.contains(&index));
        assert!(indices.insert(index), "each index once");
    }
    let window = RegisteredMemory::new_window(PD, WindowType::One);
    assert!(table.insert(window).is_err(), "no index is lost or found");
    // A table of a successor with lower limits keeps its size.
    let table = succeed_table(table, 1);
    assert!(table.remove(stags[0]).is_some());
    let again = table.insert(RegisteredMemory::new_window(PD, WindowType::One));
    assert_eq!(again.unwrap().0 >> 8, stags[0].0 >> 8);
}

#[test]
fn the_permutation_of_keys_goes_on() {
    let mut table = KeyTable::new(2, 2);
    let mut seen: HashMap<u32, HashSet<u32>> = HashMap::new();
    for round in 0..400 {
        if round > 60 && round % 7 == 0 {
            table = succeed_table(table, 2);
        }
        let stag = table
            .insert(RegisteredMemory::new_window(PD, WindowType::One))
            .unwrap();
        let keys = seen.entry(stag.0 >> 8).or_default();
        let is_new = keys.insert(stag.0);
        assert!(
            is_new || keys.len() == 256,
            "round {round}: {stag:?} is used again too early"
        );
        assert!(table.remove(stag).is_some());
    }
}

#[test]
fn removed_entries_end_with_the_process_and_its_grace_periods_have_elapsed() {
    let (table, stags) = new_table();
    let reader = table.register_reader().unwrap();
    let retired = table.deregister(stags[5]).unwrap();
    assert!(!table.has_elapsed(retired) && table.try_reclaim() == 1);
    // Many grace periods of the old table.
    for _ in 0..100 {
        reader.begin_grace_period();
    }
    let late = reader.begin_grace_period();
    let tickets = [retired, late];
    let tickets: [Retired; 2] =
        postcard::from_bytes(&postcard::to_stdvec(&tickets).unwrap()).unwrap();
    std::mem::forget(reader);
    let table = succeed_table(table, CAPACITY);
    let reader = table.register_reader().unwrap();
    assert!(reader.lookup(stags[5]).is_none() && table.try_reclaim() == 0);
    for ticket in tickets {
        assert!(table.has_elapsed(ticket) && table.is_reclaimed(ticket));
        assert!(reader.has_elapsed_for_others(ticket));
    }
    // New ones have not.
    let other = table.register_reader().unwrap();
    let new = reader.begin_grace_period();
    assert!(!other.has_elapsed_for_others(new));
}

/// Changes a bit, or cuts the end.
fn damage(bytes: &mut Vec<u8>, turn: usize) {
    let at = turn / 9 % bytes.len();
    match turn % 9 {
        8 => bytes.truncate(at),
        bit => bytes[at] ^= 1 << bit,
    }
}

#[test]
fn damaged_keys_are_refused_or_harmless() {
    let (mut refused, mut restored) = (0, 0);
    for turn in 0..9000 {
        let (table, stags) = new_table();
        let (mut bytes, kept) = save(&*table);
        std::mem::forget(table);
        damage(&mut bytes, turn);
        // SAFETY: the owners were forgotten.
        let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
        let saved: Result<SavedKeyTable, _> = restoring.run(|| postcard::from_bytes(&bytes));
        match saved.ok().and_then(|saved| saved.restore(CAPACITY, 2).ok()) {
            Some(table) => {
                restored += 1;
                use_table(&table, &stags);
            }
            None => refused += 1,
        }
    }
    assert!(
        refused > 1000 && restored > 100,
        "{refused} refused, {restored} restored"
    );
}

/// Accesses and changes memory with the keys that a table had; any outcome will do, except for memory of
/// the process, which may be anywhere now.
fn use_table(table: &KeyTable, stags: &[Stag]) {
    let keys = table.register_reader().unwrap();
    let mut bytes = [0; 300];
    for stag in stags {
        table.with_entry(*stag, |mr| {
            let address = mr.base_address().wrapping_add(mr.len() / 2);
            if let Ok(offset) = mr.check_access(address, 300, Access::NONE, PD, QP) {
                let _ = mr.read_at(offset, &mut bytes);
                let _ = mr.check_word_at(offset);
                let _ = mr.crc32c_append_at(offset, 300, 0);
                mr.prefetch_at(offset, 300);
            }
        });
        let _ = keys.check_access(*stag, 0x10_0010, 8, Access::REMOTE_READ, PD, QP);
        let _ = keys.invalidate_key(*stag, PD, QP);
    }
    let window = RegisteredMemory::new_window(PD, WindowType::One);
    let _ = table.insert(window);
    for stag in stags {
        let _ = table.deregister(*stag);
    }
}

/// A client's queues.
#[derive(Serialize, Deserialize)]
struct Queues {
    allocator: QueueAllocator,
    live: Vec<QueueMemory>,
}

#[test]
fn queue_memory_goes_on() {
    let lens = [64, 512, 5000, 100_000, 600_000, 5 << 20];
    let mut queues = Queues {
        allocator: QueueAllocator::new(PageSize::Normal, 64 << 20, 1),
        live: Vec::new(),
    };
    let mut given: HashSet<u32> = HashSet::new();
    let mut number = 1u64;
    for step in 0..600u64 {
        number = number
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let pick = (number >> 33) as usize;
        if pick.is_multiple_of(3) && !queues.live.is_empty() {
            let memory = queues.live.swap_remove(pick % queues.live.len());
            queues.allocator.free(memory);
            if pick.is_multiple_of(5) {
                queues.allocator.take_long_regions();
            }
        } else {
            let memory = match queues.allocator.alloc(lens[pick % lens.len()]) {
                Ok(memory) => memory,
                Err(AllocError::Limit(limit)) => {
                    assert_eq!(limit, 64 << 20);
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let mut start = [1; 64];
            memory.region.read(memory.offset, &mut start).unwrap();
            assert_eq!(start, [0; 64], "zeroed");
            memory
                .region
                .write(memory.offset, &[step as u8 | 1; 64])
                .unwrap();
            let (place, fd) = queues.allocator.give(&memory);
            assert_eq!(fd.is_some(), given.insert(memory.region_id), "given once");
            assert_eq!(place.region, memory.region_id);
            queues.live.push(memory);
        }
        if step % 5 == 0 {
            let counts = |queues: &QueueAllocator| {
                (
                    queues.mapped_bytes(),
                    queues.region_count(),
                    queues.heap_bytes(),
                )
            };
            let before = counts(&queues.allocator);
            queues = succeed(queues);
            assert_eq!(counts(&queues.allocator), before);
        }
        if step % 50 == 0 {
            queues.allocator.own_regions().unwrap();
        }
        check_disjoint(&queues.live);
    }
    assert!(given.len() > 10, "{} regions", given.len());
    assert!(queues.allocator.mapped_bytes() >= CHUNK);
}

/// No queue has memory of another one, and those of one region have the same mapping.
fn check_disjoint(live: &[QueueMemory]) {
    let mut ranges: Vec<(usize, usize)> = live
        .iter()
        .map(|memory| (memory.region.start_address() + memory.offset, memory.len))
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0);
    }
    for memory in live {
        let same = live
            .iter()
            .filter(|other| other.region_id == memory.region_id);
        assert!(
            same.into_iter()
                .all(|other| Arc::ptr_eq(&other.region, &memory.region))
        );
    }
}

#[test]
fn damaged_queue_memory_is_refused_or_harmless() {
    let (mut refused, mut restored) = (0, 0);
    for turn in 0..2000 {
        let mut allocator = QueueAllocator::new(PageSize::Normal, 64 << 20, 1);
        let lens = [64, 5000, 5000, 600_000];
        let mut live: Vec<QueueMemory> = lens.map(|len| allocator.alloc(len).unwrap()).into();
        allocator.give(&live[0]);
        allocator.free(live.remove(1));
        let queues = Queues { allocator, live };
        let (mut bytes, kept) = save(&queues);
        std::mem::forget(queues);
        damage(&mut bytes, turn);
        // SAFETY: the owners were forgotten.
        let mut restoring = unsafe { Restoring::adopt(&kept) }.unwrap();
        let queues: Result<Queues, _> = restoring.run(|| postcard::from_bytes(&bytes));
        let Ok(mut queues) = queues else {
            refused += 1;
            continue;
        };
        restored += 1;
        for len in lens {
            queues.allocator.bytes_needed(len);
            let memory = queues.allocator.alloc(len).ok();
            memory
                .into_iter()
                .for_each(|memory| queues.allocator.free(memory));
        }
        if let Some(memory) = queues.live.first() {
            queues.allocator.give(memory);
        }
        let _ = queues.allocator.own_regions();
        queues
            .live
            .into_iter()
            .for_each(|memory| queues.allocator.free(memory));
    }
    assert!(
        refused > 200 && restored > 200,
        "{refused} refused, {restored} restored"
    );
}
