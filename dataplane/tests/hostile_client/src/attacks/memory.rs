//! Attacks with memory: holes in shared memory, unlimited registrations, deregistration of memory
//! in use.

use super::rings::own_address;
use crate::attack::{Attack, Ended};
use crate::session::{AttackSession, REGION_LEN};
use rustix::fd::AsFd;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use siw_shm::control::codec::CallError;
use siw_shm::control::messages as m;
use siw_shm::{SendData, SendWr, WrFlags};
use std::sync::atomic::{AtomicBool, Ordering};

/// Punches holes into queues, doorbells and registered memory that the daemon uses, to free their
/// pages.
pub fn punched_holes(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let (from, to, memory) = session.connected_pair(64, own_address())?;
        let sges = [memory.first_half()];
        let write = memory.write_second_half(&sges);
        from.fill_slots(&write.with_flags(WrFlags::NONE));
        // Allocate all free pages, so that none is left to fill the holes.
        let taken = take_free_pages(attack, &mut session)?;
        for _ in 0..16 {
            from.fill_rings();
            from.ring(&session);
            punch_hole(&memory.memory);
            punch_hole(&from.memory);
            punch_hole(&to.memory);
            punch_hole(&session.bells);
            from.fill_slots(&write.with_flags(WrFlags::NONE));
        }
        drop(taken);
    }
    Ok(())
}

/// Punches holes into a long region while the daemon writes to it: a page fault waits until the
/// kernel has freed all pages of the hole.
pub fn long_holes(attack: &mut Attack) -> Ended {
    const LEN: u64 = 512 << 20;
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, _to, memory) = session.connected_pair(64, own_address())?;
    let (arena, file) = session.alloc_arena(LEN, false)?;
    let target = session.register_memory(memory.pd, arena, LEN)?;
    let sges = [memory.first_half()];
    while attack.begin_round() {
        let _ = fallocate(&file, FallocateFlags::empty(), 0, LEN);
        let address = attack.next_random() % (LEN / 2);
        let write = SendWr::write(1, SendData::Sges(&sges), address, target.rkey);
        from.fill_slots(&write.with_flags(WrFlags::NONE));
        from.fill_rings();
        from.ring(&session);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&file, hole, 0, LEN);
    }
    Ok(())
}

/// Punches holes into memory that replaces private pages of a program, while the daemon writes to it. A
/// page fault would wait for the thread that does it, which gets hardly any processor time.
pub fn slow_holes(attack: &mut Attack) -> Ended {
    punch_slowly(attack, None)
}

/// Makes the machine do the same work as [`slow_holes`], with holes in a file that the daemon does not
/// use. The stalls of honest clients during this are the machine's, not the daemon's.
pub fn own_holes(attack: &mut Attack) -> Ended {
    punch_slowly(attack, memfd_create("own-holes", MemfdFlags::CLOEXEC).ok())
}

fn punch_slowly(attack: &mut Attack, own_file: Option<rustix::fd::OwnedFd>) -> Ended {
    let len = 32 << 20;
    let mut session = AttackSession::open(&attack.socket)?;
    let (from, _to, memory) = session.connected_pair(64, own_address())?;
    let (arena, file) = session.alloc_arena(len, false)?;
    let file = own_file.unwrap_or(file);
    let extent = m::MemoryExtent {
        arena,
        method: m::ExtentMethod::Remap as u32,
        offset: 0,
        len,
    };
    let target = session.register_extent(memory.pd, extent)?;
    let sges = [memory.first_half()];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Of this thread alone.
            let _ = rustix::process::nice(19);
            while !stop.load(Ordering::Relaxed) {
                let _ = fallocate(&file, FallocateFlags::empty(), 0, len);
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&file, hole, 0, len);
            }
        });
        while attack.begin_round() {
            let address = attack.next_random() % (len / 2);
            let write = SendWr::write(1, SendData::Sges(&sges), address, target.rkey);
            from.fill_slots(&write.with_flags(WrFlags::NONE));
            from.fill_rings();
            from.ring(&session);
        }
        stop.store(true, Ordering::Relaxed);
    });
    Ok(())
}

/// Frees pages where the daemon does not own them. Seals prevent truncation of the file.
fn punch_hole(memory: &siw_shm::SharedMemory) {
    if let Some(file) = memory.memfd() {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(file, hole, 0, memory.len() as u64);
    }
}

/// Allocates arenas of hugepages until none is free.
fn take_free_pages(
    attack: &mut Attack,
    session: &mut AttackSession,
) -> Result<Vec<rustix::fd::OwnedFd>, CallError> {
    let mut arenas = Vec::new();
    while arenas.len() < 64 {
        let made = session.alloc_arena(8 << 20, true);
        let Some((_, file)) = attack.count_refusal(made)? else {
            break;
        };
        arenas.push(file);
    }
    Ok(arenas)
}

/// Allocates and registers arenas of the maximum size, and frees them, endlessly.
pub fn giant_arenas(attack: &mut Attack) -> Ended {
    let mut session = AttackSession::open(&attack.socket)?;
    let pd = session.alloc_pd()?;
    let most = session.hello.limits.max_arena;
    let mut len = most;
    while attack.begin_round() {
        let huge = !attack.next_random().is_multiple_of(4);
        let made = session.alloc_arena(len, huge);
        let Some((arena, file)) = attack.count_refusal(made)? else {
            len = (len / 2).max(1 << 20);
            continue;
        };
        // Allocates pages of files that are not preallocated.
        allocate_pages(&file, len);
        let registered = session.register_memory(pd, arena, len);
        if let Some(keys) = attack.count_refusal(registered)? {
            let request = m::DeregMr {
                lkey: keys.lkey,
                flags: 0,
            };
            session.call(&request)?;
        }
        session.call(&m::FreeArena { arena, reserved: 0 })?;
        len = if len < most { len * 2 } else { most };
    }
    Ok(())
}

/// Most bytes that one call fills with pages.
const PAGES_AT_ONCE: u64 = 256 << 20;

/// Allocates pages of a file that is not preallocated.
fn allocate_pages(file: impl AsFd, len: u64) {
    let len = len.min(PAGES_AT_ONCE);
    let _ = fallocate(file, FallocateFlags::empty(), 0, len);
}

/// Makes the kernel do the same work as [`giant_arenas`], without a daemon: allocates and frees
/// pages, which any program may do. The slowdown of honest clients during this is the machine's
/// cost, not the daemon's.
pub fn fill_own_memory(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        if let Ok(file) = memfd_create("own-memory", MemfdFlags::CLOEXEC) {
            allocate_pages(&file, PAGES_AT_ONCE);
        }
    }
    Ok(())
}

/// Deregisters memory while it is being sent, received or read by the peer, and allocates it again.
pub fn deregister_in_flight(attack: &mut Attack) -> Ended {
    while attack.begin_round() {
        let mut session = AttackSession::open(&attack.socket)?;
        let (from, _to, memory) = session.connected_pair(64, own_address())?;
        let sges = [memory.first_half()];
        let request = if attack.next_random().is_multiple_of(2) {
            memory.write_second_half(&sges)
        } else {
            memory.read_second_half(&sges)
        };
        from.post(&request, 8);
        from.ring(&session);
        let mut lkey = memory.keys.lkey;
        for _ in 0..attack.next_random() % 4 {
            let request = m::ReregMr {
                lkey,
                flags: m::REREG_TRANSLATION,
                pd: 0,
                arena: memory.arena,
                offset: REGION_LEN / 2,
                len: REGION_LEN / 2,
                va: 0,
                access: 0,
                reserved: 0,
            };
            let moved = session.call(&request);
            if let Some((keys, _)) = attack.count_refusal(moved)? {
                lkey = keys.lkey;
            }
        }
        let request = m::DeregMr { lkey, flags: 0 };
        let gone = session.call(&request);
        attack.count_refusal(gone)?;
        let freed = session.call(&m::FreeArena {
            arena: memory.arena,
            reserved: 0,
        });
        attack.count_refusal(freed)?;
        let again = session.new_memory(memory.pd);
        attack.count_refusal(again)?;
    }
    Ok(())
}
