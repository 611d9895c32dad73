//! Clients that free pages of the memory that they share with the daemon: they cannot where a worker
//! would wait for it, and harm themselves alone elsewhere.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Mutex, PoisonError};

use crate::common::raw_client::RawClient;
use crate::common::*;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use siw::{SendData, SendWr, WcStatus};
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;
use siw_shm::control::messages::ExtentMethod;
use siw_shm::shared_memory::{HUGE_PAGE, PageSize, SharedMemory};

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

fn with_hugepages() -> Daemon {
    let config = LOOPBACK.replace("hugepages = \"never\"", "hugepages = \"require\"");
    Daemon::start(&config, &[])
}

fn try_punch(file: BorrowedFd<'_>, len: usize) -> nix::Result<()> {
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, hole, 0, len as i64)
}

fn punch(file: BorrowedFd<'_>, len: usize) {
    try_punch(file, len).unwrap();
}

/// Checks that no way to free pages of memory that the client has mapped works any more, and that the
/// mapping does.
fn assert_owned(memory: &SharedMemory) {
    let (file, len) = (memory.memfd().unwrap(), memory.len());
    assert_eq!(try_punch(file, len), Err(Errno::EPERM));
    // SAFETY: frees pages of a mapping to which no reference exists.
    let removed = unsafe { libc::madvise(memory.as_ptr().cast(), len, libc::MADV_REMOVE) };
    assert_eq!((removed, Errno::last()), (-1, Errno::EPERM));
    let reopened = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .unwrap();
    assert_eq!(try_punch(reopened.as_fd(), len), Err(Errno::EPERM));
    assert!(reopened.set_len(0).is_err());
    let mut byte = [0];
    memory.read(len - 1, &mut byte).unwrap();
    memory.write(len - 1, &byte).unwrap();
}

fn arena_of(client: &mut RawClient, len: usize, huge: bool) -> (u32, SharedMemory) {
    let request = m::AllocArena {
        len: len as u64,
        huge: huge.into(),
        reserved: 0,
    };
    let (reply, mut descriptors) = client.call(&request);
    let memory = SharedMemory::map_fd(descriptors.pop().unwrap(), len).unwrap();
    (reply.arena, memory)
}

fn whole_arena(client: &RawClient, arena: u32, len: usize) -> m::RegMr {
    m::RegMr {
        pd: client.pd,
        arena,
        offset: 0,
        len: len as u64,
        va: 0,
        access: 7,
        reserved: 0,
    }
}

fn extent_of(client: &RawClient, arena: u32, len: usize, method: ExtentMethod) -> m::RegMemory {
    let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
    extents[0] = m::MemoryExtent {
        arena,
        method: method as u32,
        offset: 0,
        len: len as u64,
    };
    m::RegMemory {
        pd: client.pd,
        access: 7,
        len: len as u64,
        va: 0,
        count: 1,
        reserved: 0,
        reason: m::Text::new(""),
        extents,
    }
}

fn exchange(a: &End, b: &End, seed: u64) {
    a.fill(seed);
    let source = [a.mr.sge(0, 4096)];
    let write = SendWr::write(seed, SendData::Sges(&source), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    assert_eq!(a.read(0, 4096), b.read(0, 4096));
}

/// A page fault waits for the call that frees the page: several seconds in gigabytes of memory.
#[test]
fn pages_that_workers_access_cannot_be_freed() {
    const LEN: usize = 4 << 20;
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 4096);
    let mut client = RawClient::connected(&daemon, &end, false);
    assert_owned(&client.queues);
    let (arena, memory) = arena_of(&mut client, LEN, false);
    punch(memory.memfd().unwrap(), LEN);
    let (region, _) = client.call(&whole_arena(&client, arena, LEN));
    assert_owned(&memory);
    for method in [ExtentMethod::Arena, ExtentMethod::Remap] {
        let (arena, extent) = arena_of(&mut client, LEN, false);
        client.call(&extent_of(&client, arena, LEN, method));
        assert_owned(&extent);
    }
    let (arena, fast) = arena_of(&mut client, LEN, false);
    client.call(&m::AllocFastMr {
        pd: client.pd,
        arena,
        max_pages: 1,
        reserved: 0,
    });
    assert_owned(&fast);
    // The client's own mapping still has the memory that peers write to.
    end.fill(3);
    let source = [end.mr.sge(0, 4096)];
    let write = SendWr::write(1, SendData::Sges(&source), 8192, region.rkey);
    end.qp.post_send(&[write]).unwrap();
    assert_eq!(end.wc().status, WcStatus::SUCCESS);
    let mut bytes = vec![0; 4096];
    memory.read(8192, &mut bytes).unwrap();
    assert_eq!(bytes, end.read(0, 4096));
    if nix::unistd::geteuid().is_root() {
        // Pages that workers have accessed are not swapped out.
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
        let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
        assert!(locked.is_some_and(|size| size.trim() != "0 kB"), "{status}");
    }
    // A client that keeps the daemon from owning the pages cannot register them.
    let (arena, memory) = arena_of(&mut client, LEN, false);
    nix::fcntl::fcntl(
        memory.memfd().unwrap(),
        nix::fcntl::FcntlArg::F_ADD_SEALS(nix::fcntl::SealFlag::F_SEAL_SEAL),
    )
    .unwrap();
    let refused = client.try_call(&whole_arena(&client, arena, LEN));
    assert!(refused.unwrap_err().to_string().contains("arena"));
    assert!(daemon.stop().success());
}

/// The refused request is the first one that needs memory for queues, and a later one gets it.
#[test]
fn a_refused_request_loses_no_descriptor_of_queues() {
    let limits = format!("{LOOPBACK}[limits]\nmemory_regions_per_client = 1\n");
    let daemon = Daemon::start(&limits, &[]);
    let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
    let hello = m::ClientHello::new("refused");
    conn.call_and_wait(1, &hello, &[]).unwrap();
    let reserved = 0;
    let pd = m::AllocPd {
        device: 0,
        reserved,
    };
    let pd = conn.call_and_wait(2, &pd, &[]).unwrap().0.id;
    let arena = m::AllocArena {
        len: 4096,
        huge: 0,
        reserved,
    };
    let arena = conn.call_and_wait(3, &arena, &[]).unwrap().0.arena;
    let region = m::RegMr {
        pd,
        arena,
        offset: 0,
        len: 4096,
        va: 0,
        access: 7,
        reserved,
    };
    conn.call_and_wait(4, &region, &[]).unwrap();
    // One region too many.
    let list = m::AllocFastMr {
        pd,
        arena,
        max_pages: 8,
        reserved,
    };
    assert!(conn.call_and_wait(5, &list, &[]).is_err());
    let cq = m::CreateCq {
        cqe: 16,
        channel: 0,
        cookie: 0,
    };
    let (made, mut descriptors) = conn.call_and_wait(6, &cq, &[]).unwrap();
    assert_eq!((made.mem.fd, descriptors.len()), (1, 1));
    let len = made.mem.region_len as usize;
    SharedMemory::map_fd(descriptors.remove(0), len).unwrap();
    let (second, descriptors) = conn.call_and_wait(7, &cq, &[]).unwrap();
    assert_eq!(second.mem.region, made.mem.region);
    assert_eq!((second.mem.fd, descriptors.len()), (0, 0));
    assert!(daemon.stop().success());
}

/// One thread frees an object without waiting, while another has the reply with the memory of its new
/// queue and has not mapped it yet.
#[test]
fn a_request_without_a_reply_leaves_new_queues_to_be_mapped() {
    let daemon = Daemon::loopback();
    let mut client = RawClient::detached(&daemon, false);
    let (channel, mut descriptors) = client.call(&m::CreateChannel { reserved: 0 });
    let events = std::fs::File::from(descriptors.pop().unwrap());
    let (cq, mut descriptors) = client.call(&m::CreateCq {
        cqe: 16_384,
        channel: 0,
        cookie: 0,
    });
    let destroy = client.conn.encode_unanswered(&m::DestroyChannel {
        channel: channel.id,
        reserved: 0,
    });
    assert!(client.conn.try_send(&destroy).unwrap());
    // Its end shows that the daemon has carried out the request.
    assert_eq!((&events).read(&mut [0]).unwrap(), 0);
    let len = cq.mem.region_len as usize;
    let queue = SharedMemory::map_fd(descriptors.pop().unwrap(), len).unwrap();
    // Any other request shows that it is mapped.
    client.call(&m::QueryDevice { index: 0, flags: 0 });
    assert_owned(&queue);
}

/// Calls `open` with another effective user of this thread alone.
pub fn as_user<T>(uid: u32, open: impl FnOnce() -> T) -> T {
    // SAFETY: the system call changes this thread's effective user; the others stay root.
    let become_user = |uid: u32| unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
    assert_eq!(become_user(uid), 0);
    let opened = open();
    assert_eq!(become_user(0), 0);
    opened
}

/// Lets all users connect to the daemon.
pub fn open_to_all(daemon: &Daemon) {
    for (path, mode) in [(daemon.dir.path(), 0o755), (daemon.socket.as_path(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Users can free pages of files that they import, unless the files are sealed against that.
#[test]
fn memory_of_other_users_cannot_stop_a_worker_for_long() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    for (uid, is_trusted) in [(65_534, false), (0, true)] {
        let client = as_user(uid, || RawClient::detached(&daemon, false));
        let import = |writable: bool| m::ImportMemory {
            kind: m::IMPORT_FILE,
            writable: writable.into(),
            offset: 0,
            len: 8192,
        };
        let fixed = SharedMemory::create_memfd("own", 8192, PageSize::Normal).unwrap();
        let sealed = SharedMemory::create_read_only_for_others("own", 8192).unwrap();
        // May grow: its length says nothing.
        let growing = tempfile::tempfile_in("/dev/shm").unwrap();
        growing.set_len(8192).unwrap();
        for (file, writable, may) in [
            (fixed.memfd().unwrap(), true, is_trusted),
            (growing.as_fd(), true, is_trusted),
            (sealed.memfd().unwrap(), false, true),
        ] {
            let imported = client.conn.call_and_wait(100, &import(writable), &[file]);
            assert_eq!(imported.is_ok(), may);
            if let Err(why) = imported {
                assert!(why.to_string().contains("process_memory"), "{why}");
            }
        }
    }
    assert!(daemon.stop().success());
}

/// A program with two contexts registers memory of one in the other.
#[test]
fn a_sealed_arena_is_imported_writable_by_its_process_alone() {
    const LEN: usize = 64 << 10;
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    for (path, mode) in [(daemon.dir.path(), 0o755), (daemon.socket.as_path(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let end = End::new(&daemon.context(), 4096);
    let mut owner = as_user(65_534, || RawClient::detached(&daemon, false));
    let (arena, memory) = arena_of(&mut owner, LEN, false);
    owner.call(&extent_of(&owner, arena, LEN, ExtentMethod::Remap));
    let import = m::ImportMemory {
        kind: m::IMPORT_FILE,
        writable: 1,
        offset: 4096,
        len: 8192,
    };
    let foreign = RawClient::detached(&daemon, false);
    let mut same = as_user(65_534, || RawClient::connected(&daemon, &end, false));
    let file = memory.memfd().unwrap();
    assert!(foreign.conn.call_and_wait(100, &import, &[file]).is_err());
    let (reply, _) = same.conn.call_and_wait(100, &import, &[file]).unwrap();
    let (region, _) = same.call(&extent_of(&same, reply.id, 8192, ExtentMethod::Shared));
    // The mapping of another context does not depend on the arena.
    drop(owner);
    end.fill(6);
    let source = [end.mr.sge(0, 4096)];
    let write = SendWr::write(1, SendData::Sges(&source), 4096, region.rkey);
    end.qp.post_send(&[write]).unwrap();
    assert_eq!(end.wc().status, WcStatus::SUCCESS);
    let mut bytes = vec![0; 4096];
    memory.read(8192, &mut bytes).unwrap();
    assert_eq!(bytes, end.read(0, 4096));
    assert!(daemon.stop().success());
}

#[test]
fn hugepages_freed_before_workers_access_them_are_refused() {
    let _pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    skip_if!(missing_hugepages());
    let daemon = with_hugepages();
    let (a, b) = pair(&daemon, 4096);
    let end = End::new(&daemon.context(), 4096);
    let mut client = RawClient::connected(&daemon, &end, false);
    let (arena, memory) = arena_of(&mut client, HUGE_PAGE, true);
    assert!(memory.is_huge());
    punch(memory.memfd().unwrap(), HUGE_PAGE);
    let refused = client.try_call(&whole_arena(&client, arena, HUGE_PAGE));
    assert!(refused.unwrap_err().to_string().contains("freed"));
    let (arena, memory) = arena_of(&mut client, HUGE_PAGE, true);
    client.call(&whole_arena(&client, arena, HUGE_PAGE));
    assert_owned(&memory);
    drop(client);
    exchange(&a, &b, 5);
    let client = RawClient::detached(&daemon, false);
    assert!(client.queues.is_huge());
    assert_owned(&client.queues);
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
    // Memory whose pages a trusted client may free.
    let memory = SharedMemory::create_memfd("own", 1 << 20, PageSize::Normal).unwrap();
    let import = m::ImportMemory {
        kind: m::IMPORT_FILE,
        writable: 1,
        offset: 0,
        len: 1 << 20,
    };
    let file = memory.memfd().unwrap();
    let (reply, _) = client.conn.call_and_wait(100, &import, &[file]).unwrap();
    let request = extent_of(&client, reply.id, 1 << 20, ExtentMethod::Shared);
    let (region, _) = client.call(&request);
    // Freed pages come back zeroed: the doorbell ring starts over.
    for seed in 1..200 {
        punch(memory.memfd().unwrap(), memory.len());
        punch(client.doorbells.memfd().unwrap(), client.doorbells.len());
        client.ring(0);
        let source = [end.mr.sge(0, 4096)];
        let write = SendWr::write(1, SendData::Sges(&source), 0, region.rkey);
        end.qp.post_send(&[write]).unwrap();
        assert_eq!(end.wc().status, WcStatus::SUCCESS);
        exchange(&a, &b, seed);
    }
    assert!(daemon.stop().success());
}

/// Payload and queues lie in shared mappings, which a core dump leaves out.
#[test]
fn a_core_dump_has_no_memory_shared_with_clients() {
    let daemon = Daemon::loopback();
    let (a, _b) = pair(&daemon, 1 << 20);
    a.fill(1);
    let of_process = |file: &str| {
        std::fs::read_to_string(format!("/proc/{}/{file}", daemon.child.id())).unwrap()
    };
    let filter = of_process("coredump_filter");
    let filter = u32::from_str_radix(filter.trim(), 16).unwrap();
    // Shared mappings, of memory and of files, and hugepages (core(5)).
    assert_eq!(filter & 0b110_1010, 0, "{filter:#x}");
    let maps = of_process("maps");
    let files: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains("/memfd:"))
        .collect();
    assert!(
        files.iter().any(|line| line.contains("siwd-arena")),
        "{maps}"
    );
    for line in files {
        assert!(
            line.split_whitespace().nth(1).unwrap().ends_with('s'),
            "{line}"
        );
    }
}
