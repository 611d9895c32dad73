//! Clients that free pages of the memory that they share with the daemon, at a time when no free
//! pages are left: the daemon closes that client and serves all others.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use crate::common::raw_client::RawClient;
use crate::common::*;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use siw::{CmEvent, SendData, SendWr, WcStatus};
use siw_shm::control::messages as m;
use siw_shm::shared_memory::{HUGE_PAGE, SharedMemory};

/// Hugepages that a daemon of these tests and its clients need.
const PAGES_NEEDED: u64 = 96;

/// Serializes the tests that take every hugepage.
static POOL: Mutex<()> = Mutex::new(());

fn free_hugepages() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("HugePages_Free:"))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

fn missing_hugepages() -> Option<String> {
    let free = free_hugepages();
    (free < PAGES_NEEDED).then(|| format!("{free} hugepages are free, {PAGES_NEEDED} are needed"))
}

/// Holds every free hugepage until it is dropped.
struct AllHugepages {
    start: *mut libc::c_void,
    len: usize,
}

impl AllHugepages {
    fn take() -> AllHugepages {
        let (mut parts, mut pages) = (AllHugepages::none(), free_hugepages());
        // Other processes on this machine may take or free hugepages at the same time.
        while pages > 0 && parts.len == 0 {
            let len = pages as usize * HUGE_PAGE;
            let kind =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_POPULATE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
            if start == libc::MAP_FAILED {
                pages -= 1;
            } else {
                parts = AllHugepages { start, len };
            }
        }
        parts
    }

    fn none() -> AllHugepages {
        AllHugepages {
            start: std::ptr::null_mut(),
            len: 0,
        }
    }
}

impl Drop for AllHugepages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping from `take`, to which no reference exists.
            unsafe { libc::munmap(self.start, self.len) };
        }
    }
}

fn with_hugepages() -> Daemon {
    let config = LOOPBACK.replace("hugepages = \"never\"", "hugepages = \"require\"");
    Daemon::start(&config, &[])
}

fn punch(file: BorrowedFd<'_>, len: usize) {
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, hole, 0, len as i64).unwrap();
}

fn exchange(a: &End, b: &End, seed: u64) {
    a.fill(seed);
    let source = [a.mr.sge(0, 4096)];
    let write = SendWr::write(seed, SendData::Sges(&source), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    assert_eq!(a.read(0, 4096), b.read(0, 4096));
}

/// Waits until the daemon has closed the client's socket.
fn await_end(client: &RawClient) {
    assert!(
        client.conn.recv_packet().is_err(),
        "the client was not closed"
    );
}

#[test]
fn pages_freed_in_an_arena_end_their_client_alone() {
    let _pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    skip_if!(missing_hugepages());
    let daemon = with_hugepages();
    let (a, b) = pair(&daemon, 4096);
    let end = End::new(&daemon.context(), 4096);
    let mut client = RawClient::connected(&daemon, &end, false);
    let arena = m::AllocArena {
        len: HUGE_PAGE as u64,
        huge: 1,
        reserved: 0,
    };
    let (arena, descriptors) = client.call(&arena);
    assert_eq!(arena.huge, 1);
    let region = m::RegMr {
        pd: client.pd,
        arena: arena.arena,
        offset: 0,
        len: HUGE_PAGE as u64,
        va: 0,
        access: 7,
        reserved: 0,
    };
    let (region, _) = client.call(&region);
    let taken = {
        punch(descriptors[0].as_fd(), HUGE_PAGE);
        AllHugepages::take()
    };
    // A peer writes to a page that was freed.
    end.fill(3);
    let source = [end.mr.sge(0, 4096)];
    let write = SendWr::write(1, SendData::Sges(&source), 8192, region.rkey);
    end.qp.post_send(&[write]).unwrap();
    await_end(&client);
    drop(taken);
    loop {
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Established(_) => {}
            CmEvent::Disconnected(_) => break,
            other => panic!("{other:?}"),
        }
    }
    exchange(&a, &b, 5);
    // The daemon has released everything of the client, and other clients get memory.
    let after = End::new(&daemon.context(), 4096);
    drop(after);
    assert!(daemon.stop().success());
}

#[test]
fn pages_freed_under_the_queues_end_their_client_alone() {
    let _pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    skip_if!(missing_hugepages());
    let daemon = with_hugepages();
    let (a, b) = pair(&daemon, 4096);
    let client = RawClient::detached(&daemon, false);
    assert!(client.queues.is_huge());
    let error = m::ModifyQp {
        qp_num: client.qp.qp_num,
        state: siw_shm::control::QpState::Error as u32,
        flags: 0,
        denied_access: 0,
    };
    let taken = {
        punch(client.queues.memfd().unwrap(), client.queues.len());
        AllHugepages::take()
    };
    // The worker reads the queues to flush them, and writes its state there.
    let _ = client.conn.call_and_wait(100, &error, &[]);
    await_end(&client);
    drop(taken);
    exchange(&a, &b, 6);
    assert!(daemon.stop().success());
}

#[test]
fn a_queue_that_cannot_be_made_leaves_its_channel_alone() {
    let config = format!("{LOOPBACK}[limits]\nmemory_per_client = \"8 MiB\"\n");
    let daemon = Daemon::start(&config, &[]);
    let mut client = RawClient::detached(&daemon, false);
    let (channel, _) = client.call(&m::CreateChannel { reserved: 0 });
    let too_large = m::CreateCq {
        cqe: 1 << 18,
        channel: channel.id,
        cookie: 0,
    };
    for _ in 0..3 {
        let refused = client.try_call(&too_large).unwrap_err().to_string();
        assert!(refused.contains("8388608"), "{refused}");
    }
    // Succeeds: the channel is not reported as in use.
    client.call(&m::DestroyChannel {
        channel: channel.id,
        reserved: 0,
    });
}

#[test]
fn a_client_that_frees_pages_all_the_time_harms_itself_alone() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let end = End::new(&daemon.context(), 4096);
    let mut client = RawClient::connected(&daemon, &end, false);
    let arena = m::AllocArena {
        len: 1 << 20,
        huge: 0,
        reserved: 0,
    };
    let (_, descriptors) = client.call(&arena);
    let arena = SharedMemory::map_fd(descriptors[0].try_clone().unwrap(), 1 << 20).unwrap();
    // Freed pages of normal memory come back zeroed: the rings start over, possibly with invalid
    // indices, and the arena holds zeroes.
    for seed in 1..200 {
        punch(arena.memfd().unwrap(), arena.len());
        punch(client.queues.memfd().unwrap(), client.queues.len());
        client.ring(seed as u32 % 4);
        exchange(&a, &b, seed);
    }
    assert!(daemon.stop().success());
}
