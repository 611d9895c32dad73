//! Registration of memory that the application already owns, end to end against a running daemon: a
//! peer writes and reads the application's own memory, and the memory around it does not change.

use crate::common::*;
use siw::{Access, AppMr, Arena, Error, ExtentMethod, Pd, SendData, SendWr, WcStatus};

const EVERYTHING: Access = Access(1 | 2 | 4 | 8);
const READ: Access = Access::REMOTE_READ;

/// Registers memory of a test, which uses it by volatile accesses and frees it after the region.
fn register(pd: &Pd, at: *mut u8, len: usize, access: Access) -> Result<AppMr, Error> {
    // SAFETY: as promised above.
    unsafe { pd.reg_memory(at, len, access) }
}

/// Anonymous private memory of whole pages.
struct Pages {
    start: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Pages {
        Pages::at(std::ptr::null_mut(), len)
    }

    fn at(address: *mut u8, len: usize) -> Pages {
        let prot = nix::libc::PROT_READ | nix::libc::PROT_WRITE;
        let mut flags = nix::libc::MAP_PRIVATE | nix::libc::MAP_ANONYMOUS;
        if !address.is_null() {
            flags |= nix::libc::MAP_FIXED_NOREPLACE;
        }
        // SAFETY: a new mapping in a free address range.
        let start = unsafe { nix::libc::mmap(address.cast(), len, prot, flags, -1, 0) };
        assert_ne!(start, nix::libc::MAP_FAILED);
        let start = start.cast();
        Pages { start, len }
    }

    fn slot(&self, offset: usize) -> *mut u64 {
        assert!(offset + 8 <= self.len);
        // SAFETY: `offset` lies within the mapping.
        unsafe { self.start.add(offset).cast() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value.
        unsafe { nix::libc::munmap(self.start.cast(), self.len) };
    }
}

fn load(slot: *mut u64) -> u64 {
    // SAFETY: slots of these tests are mapped words.
    unsafe { slot.read_volatile() }
}

fn store(slot: *mut u64, value: u64) {
    // SAFETY: as in `load`.
    unsafe { slot.write_volatile(value) };
}

/// Writes 8 bytes at `offset` of the peer's region.
fn write_word(peer: &End, mr: &AppMr, offset: u64, value: u64) -> WcStatus {
    peer.mr.write(0, &value.to_le_bytes()).unwrap();
    let sge = [peer.mr.sge(0, 8)];
    let wr = SendWr::write(1, SendData::Sges(&sge), mr.addr() + offset, mr.rkey());
    peer.qp.post_send(&[wr]).unwrap();
    match peer.wc().status {
        // A Write completes when its bytes are acknowledged; only a Read after it shows that they
        // were placed.
        WcStatus::SUCCESS => read_bytes(peer, mr, offset, 0).1,
        other => other,
    }
}

fn read_bytes(peer: &End, mr: &AppMr, offset: u64, len: usize) -> (Vec<u8>, WcStatus) {
    let sge = [peer.mr.sge(64, len)];
    let wr = SendWr::read(2, &sge, mr.addr() + offset, mr.rkey());
    peer.qp.post_send(&[wr]).unwrap();
    let status = peer.wc().status;
    (peer.read(64, len), status)
}

fn read_word(peer: &End, mr: &AppMr, offset: u64) -> u64 {
    let (bytes, status) = read_bytes(peer, mr, offset, 8);
    assert_eq!(status, WcStatus::SUCCESS);
    u64::from_le_bytes(bytes.try_into().unwrap())
}

fn fetch_add(peer: &End, mr: &AppMr, offset: u64, add: u64) -> u64 {
    let to = mr.addr() + offset;
    let wr = SendWr::fetch_add(3, peer.mr.sge(32, 8), to, mr.rkey(), add);
    peer.qp.post_send(&[wr]).unwrap();
    assert_eq!(peer.wc().status, WcStatus::SUCCESS);
    u64::from_le_bytes(peer.read(32, 8).try_into().unwrap())
}

fn only_method(mr: &AppMr) -> ExtentMethod {
    let methods = mr.methods();
    assert_eq!(methods.len(), 1, "{methods:?} {}", mr.reason());
    methods[0].0
}

#[test]
fn a_buffer_in_a_malloced_struct_is_registered_where_it_is() {
    #[repr(C)]
    struct Session {
        before: u64,
        buffer: [u8; 16],
        after: u64,
    }
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let mut session = Box::new(Session {
        before: 0x1111,
        buffer: [7; 16],
        after: 0x2222,
    });
    let at = session.buffer.as_mut_ptr();
    let mr = register(&b.pd, at, 16, EVERYTHING).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Remap);
    assert_eq!(mr.addr(), at as u64);
    assert_eq!(read_bytes(&a, &mr, 0, 16), (vec![7; 16], WcStatus::SUCCESS));
    assert_eq!(write_word(&a, &mr, 8, 0x55), WcStatus::SUCCESS);
    assert_eq!(load(at.wrapping_add(8).cast()), 0x55);
    assert_eq!((session.before, session.after), (0x1111, 0x2222));
    session.after = 0x3333;
    // One byte beyond the region: refused.
    let (_, status) = read_bytes(&a, &mr, 8, 9);
    assert_ne!(status, WcStatus::SUCCESS);
    mr.dereg().unwrap();
    assert_eq!((session.before, session.after), (0x1111, 0x3333));
    assert_eq!(&session.buffer[..8], [7; 8]);
}

#[test]
fn regions_overlap_and_a_page_is_remapped_once() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let pages = Pages::new(5 * 4096);
    for page in 0..5 {
        store(pages.slot(page * 4096 + 8), page as u64);
    }
    let first = register(&b.pd, pages.start.wrapping_add(4000), 4200, EVERYTHING).unwrap();
    let second = register(&b.pd, pages.start.wrapping_add(4096), 4 * 4096, EVERYTHING).unwrap();
    assert_eq!(only_method(&first), ExtentMethod::Remap);
    assert_eq!(only_method(&second), ExtentMethod::Remap);
    assert_eq!(write_word(&a, &first, 96, 77), WcStatus::SUCCESS);
    assert_eq!(read_word(&a, &second, 0), 77, "the same memory");
    assert_eq!(load(pages.slot(4096)), 77);
    drop(first);
    assert_eq!(fetch_add(&a, &second, 0, 3), 77);
    for page in 1..5 {
        let offset = (page - 1) * 4096 + 8;
        assert_eq!(
            read_word(&a, &second, offset),
            page,
            "what was there before"
        );
    }
    assert_eq!(load(pages.slot(4096)), 80);
}

#[test]
fn a_large_allocation_is_remapped() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    // The region spans several windows; the last one is only partly used.
    let len = (5 << 20) + 123;
    let mut large = pattern(5, len);
    let mr = register(&b.pd, large.as_mut_ptr(), len, EVERYTHING).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Remap);
    assert_eq!(large, pattern(5, len), "nothing has changed");
    let (bytes, status) = read_bytes(&a, &mr, len as u64 - 2000, 2000);
    assert_eq!(status, WcStatus::SUCCESS);
    assert_eq!(bytes, large[len - 2000..]);
}

#[test]
fn memory_of_an_arena_is_found_by_its_address() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let arena = Arena::alloc(&b.ctx, 16_384, false).unwrap();
    let mr = register(&b.pd, arena.as_ptr().wrapping_add(100), 64, EVERYTHING).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Arena);
    assert_eq!(write_word(&a, &mr, 4, 9), WcStatus::SUCCESS);
    let mut back = [0; 8];
    arena.read(104, &mut back).unwrap();
    assert_eq!(u64::from_le_bytes(back), 9);
    drop(arena);
    assert_eq!(read_word(&a, &mr, 4), 9, "the region keeps it");
}

#[test]
fn memory_that_does_not_exist_or_cannot_be_written_is_refused() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let refused = |at: *mut u8, len, access| {
        let refused = register(&b.pd, at, len, access);
        refused
            .map(|_| ())
            .map_err(|error| (error.errno(), error.to_string()))
    };
    let pages = Pages::new(2 * 4096);
    let hole = Pages::new(3 * 4096);
    let start = hole.start;
    drop(hole);
    let (errno, text) = refused(start, 10, EVERYTHING).unwrap_err();
    assert_eq!(errno, nix::libc::EFAULT);
    assert!(text.contains("nothing is mapped"), "{text}");
    let (errno, _) = refused(pages.start, 0, EVERYTHING).unwrap_err();
    assert_eq!(errno, nix::libc::EINVAL);
    let (errno, _) = refused(pages.start, usize::MAX, EVERYTHING).unwrap_err();
    assert_eq!(errno, nix::libc::EINVAL);
    let text = "constant text, long enough to be in read-only memory of the program";
    let at = text.as_ptr().cast_mut();
    let (errno, why) = refused(at, text.len(), EVERYTHING).unwrap_err();
    assert_eq!(errno, nix::libc::EFAULT);
    assert!(why.contains("read-only"), "{why}");
    // Registered without local write, it can be read by a peer.
    let mr = register(&b.pd, at, text.len(), READ).unwrap();
    let (bytes, status) = read_bytes(&a, &mr, 0, text.len());
    assert_eq!((&bytes[..], status), (text.as_bytes(), WcStatus::SUCCESS));
}

#[test]
fn an_address_that_was_unmapped_gets_the_new_memory() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let pages = Pages::new(3 * 4096);
    store(pages.slot(0), 1);
    let at = pages.start;
    let mr = register(&b.pd, at, pages.len, EVERYTHING).unwrap();
    assert_eq!(read_word(&a, &mr, 0), 1);
    drop(mr);
    drop(pages);
    let pages = Pages::at(at, 3 * 4096);
    let mr = register(&b.pd, at, pages.len, EVERYTHING).unwrap();
    assert_eq!(read_word(&a, &mr, 0), 0);
    store(pages.slot(8), 5);
    assert_eq!(read_word(&a, &mr, 8), 5);
    // A region outlives its mapping, and the address is used for other memory: both work.
    drop(pages);
    let pages = Pages::at(at, 3 * 4096);
    store(pages.slot(8), 6);
    let other = register(&b.pd, at, pages.len, EVERYTHING).unwrap();
    assert_eq!(read_word(&a, &other, 8), 6);
    assert_eq!(read_word(&a, &mr, 8), 5);
    assert_eq!(write_word(&a, &mr, 8, 9), WcStatus::SUCCESS);
    assert_eq!(load(pages.slot(8)), 6);
}

#[test]
fn memory_that_was_registered_can_be_reallocated() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    // Large enough that malloc uses mmap and realloc uses mremap(2).
    let mut len = 1 << 20;
    let mut bytes = pattern(1, len);
    for round in 0..6 {
        let mr = register(&b.pd, bytes.as_mut_ptr(), len, EVERYTHING).unwrap();
        assert_eq!(write_word(&a, &mr, 800, round), WcStatus::SUCCESS);
        drop(mr);
        let mut expected = bytes.to_vec();
        expected[800..808].copy_from_slice(&round.to_le_bytes());
        let grown = pattern(round, len / 2);
        let other = pattern(round + 10, len);
        bytes.reserve_exact(grown.len());
        bytes.extend_from_slice(&grown);
        expected.extend_from_slice(&grown);
        assert!(bytes == expected, "round {round}");
        assert!(other == pattern(round + 10, len), "round {round}");
        len = bytes.len();
    }
}

/// Creates a memfd of whole pages and a shared mapping of it.
fn shared_file(len: usize) -> (std::fs::File, Pages) {
    let name = c"app-memory";
    let fd = nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::empty()).unwrap();
    let file = std::fs::File::from(fd);
    file.set_len(len as u64).unwrap();
    let pages = map_shared(&file, std::ptr::null_mut(), len);
    (file, pages)
}

fn map_shared(file: &std::fs::File, at: *mut u8, len: usize) -> Pages {
    use std::os::fd::AsRawFd;
    let prot = nix::libc::PROT_READ | nix::libc::PROT_WRITE;
    let fixed = if at.is_null() {
        0
    } else {
        nix::libc::MAP_FIXED
    };
    let flags = nix::libc::MAP_SHARED | fixed;
    // SAFETY: a new mapping in a free range, or one that replaces a mapping of the test.
    let start = unsafe { nix::libc::mmap(at.cast(), len, prot, flags, file.as_raw_fd(), 0) };
    assert_ne!(start, nix::libc::MAP_FAILED);
    let start = start.cast();
    Pages { start, len }
}

#[test]
fn a_shared_mapping_is_shared_with_the_daemon_too() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (file, pages) = shared_file(4 * 4096);
    // The file is found through an open descriptor, or, as root, after the application has closed
    // it.
    let other = map_shared(&file, std::ptr::null_mut(), pages.len);
    let mr = register(&b.pd, pages.start.wrapping_add(4100), 5000, EVERYTHING).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Shared);
    assert_eq!(write_word(&a, &mr, 4, 5), WcStatus::SUCCESS);
    assert_eq!(
        load(other.slot(4104)),
        5,
        "other mappings of the file see it"
    );
    store(other.slot(4104), 6);
    assert_eq!(fetch_add(&a, &mr, 4, 1), 6);
    mr.dereg().unwrap();
    assert_eq!(load(pages.slot(4104)), 7);
}

#[test]
fn a_file_that_is_truncated_ends_its_client_alone() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let others = pair(&daemon, 4096);
    let (file, pages) = shared_file(4 * 4096);
    let mr = register(&b.pd, pages.start, pages.len, EVERYTHING).unwrap();
    file.set_len(0).unwrap();
    a.mr.write(0, &[1; 8]).unwrap();
    let sge = [a.mr.sge(0, 8)];
    let wr = SendWr::write(1, SendData::Sges(&sge), mr.addr() + 8192, mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    let event = b.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(siw::AsyncEventKind::DeviceFatal));
    ping(&others.0, &others.1);
}

#[test]
fn a_buffer_on_the_stack_is_copied_and_has_no_atomics() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let mut words = [3u64; 400];
    let at = words.as_mut_ptr().cast::<u8>();
    let mr = register(&b.pd, at, 3200, ALL).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Copy);
    assert_eq!(mr.reason(), "stack");
    assert_eq!(read_word(&a, &mr, 3000), 3);
    assert_eq!(write_word(&a, &mr, 3000, 8), WcStatus::SUCCESS);
    assert_eq!(load(at.wrapping_add(3000).cast()), 8);
    let refused = register(&b.pd, at, 3200, EVERYTHING).err().unwrap();
    assert_eq!(refused.errno(), nix::libc::EOPNOTSUPP, "{refused}");
    // It also works as a source.
    a.mr.write(0, &[0; 64]).unwrap();
    let sge = [mr.sge(2996, 64)];
    let wr = SendWr::write(1, SendData::Sges(&sge), a.mr.addr(), a.mr.rkey());
    b.qp.post_send(&[wr]).unwrap();
    assert_eq!(b.wc().status, WcStatus::SUCCESS);
    let wr = SendWr::read(1, &[], a.mr.addr(), a.mr.rkey());
    b.qp.post_send(&[wr]).unwrap();
    assert_eq!(b.wc().status, WcStatus::SUCCESS);
    assert_eq!(a.read(4, 8), 8u64.to_le_bytes());
}

static mut INITIALIZED: [u64; 512] = [11; 512];

#[test]
fn a_region_of_all_kinds_of_memory_is_one_region() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 65_536);
    let pages = Pages::new(8 * 4096);
    let (file, _shared) = shared_file(2 * 4096);
    let inner = map_shared(&file, pages.start.wrapping_add(3 * 4096), 2 * 4096);
    let disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    disk.set_len(4096).unwrap();
    let last = map_shared(&disk, pages.start.wrapping_add(7 * 4096), 4096);
    let mr = register(&b.pd, pages.start.wrapping_add(1), pages.len - 2, ALL).unwrap();
    let methods: Vec<ExtentMethod> = mr.methods().into_iter().map(|(method, _)| method).collect();
    let on_disk = methods.last() == Some(&ExtentMethod::Copy);
    println!("{:?} {}", mr.methods(), mr.reason());
    assert_eq!(methods[..2], [ExtentMethod::Remap, ExtentMethod::Shared]);
    assert!(on_disk || methods.len() == 2, "the folder may be in memory");
    a.fill(4);
    let sge = [a.mr.sge(0, mr.len())];
    let wr = SendWr::write(1, SendData::Sges(&sge), mr.addr(), mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    let (bytes, status) = read_bytes(&a, &mr, 0, mr.len());
    assert_eq!(status, WcStatus::SUCCESS);
    assert!(bytes == pattern(4, 65_536)[..mr.len()]);
    // SAFETY: mapped, and no thread writes to it any more.
    let seen = unsafe { std::slice::from_raw_parts(pages.start.add(1), mr.len()) };
    assert!(seen == bytes);
    drop((inner, last));
    // Initialized data is backed by the program's file.
    let at = (&raw mut INITIALIZED).cast::<u8>();
    let mr = register(&b.pd, at, 4096, ALL).unwrap();
    assert_eq!(read_word(&a, &mr, 88), 11);
    assert_eq!(write_word(&a, &mr, 88, 12), WcStatus::SUCCESS);
    assert_eq!(load(at.wrapping_add(88).cast()), 12);
}

#[test]
fn a_part_of_a_mapping_of_huge_pages_is_registered() {
    const HUGE: usize = 2 << 20;
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    for kind in [nix::libc::MAP_PRIVATE, nix::libc::MAP_SHARED] {
        let prot = nix::libc::PROT_READ | nix::libc::PROT_WRITE;
        let flags = kind | nix::libc::MAP_ANONYMOUS | nix::libc::MAP_HUGETLB;
        // SAFETY: a new mapping in a free address range.
        let start = unsafe { nix::libc::mmap(std::ptr::null_mut(), HUGE, prot, flags, -1, 0) };
        if start == nix::libc::MAP_FAILED {
            println!("skipped: no huge page is free (/proc/sys/vm/nr_hugepages)");
            return;
        }
        let pages = Pages {
            start: start.cast(),
            len: HUGE,
        };
        let at = |offset: usize| pages.slot(offset);
        store(at(HUGE / 2 - 8), 1);
        store(at(HUGE / 2), 2);
        let mr = register(&b.pd, at(HUGE / 2).cast(), 10_000, ALL).unwrap();
        println!("{:?} {}", mr.methods(), mr.reason());
        assert_eq!(read_word(&a, &mr, 0), 2);
        assert_eq!(write_word(&a, &mr, 0, 3), WcStatus::SUCCESS);
        assert_eq!((load(at(HUGE / 2 - 8)), load(at(HUGE / 2))), (1, 3));
        mr.dereg().unwrap();
        assert_eq!(load(at(HUGE / 2)), 3);
    }
}

#[test]
fn pages_are_shared_by_contexts_until_the_last_region_ends() {
    let daemon = Daemon::loopback();
    let pages = Pages::new(4096);
    store(pages.slot(8), 4);
    let first = pair(&daemon, 4096);
    let mr = register(&first.1.pd, pages.start, 16, EVERYTHING).unwrap();
    assert_eq!(read_word(&first.0, &mr, 8), 4);
    let (a, b) = pair(&daemon, 4096);
    let other = register(&b.pd, pages.start, 16, EVERYTHING).unwrap();
    assert_eq!(only_method(&other), ExtentMethod::Shared);
    drop((mr, first));
    assert_eq!(fetch_add(&a, &other, 8, 1), 4);
    assert_eq!(load(pages.slot(8)), 5);
    // The context whose pages they are has ended.
    let (c, d) = pair(&daemon, 4096);
    let third = register(&d.pd, pages.start, 16, EVERYTHING).unwrap();
    assert_eq!(only_method(&third), ExtentMethod::Shared);
    assert_eq!(fetch_add(&c, &third, 8, 0), 5);
    drop((third, other));
    assert_eq!(load(pages.slot(8)), 5);
    // The pages are private again: the next region gets pages of its own context.
    let mr = register(&b.pd, pages.start, 16, EVERYTHING).unwrap();
    assert_eq!(only_method(&mr), ExtentMethod::Remap);
    assert_eq!(fetch_add(&a, &mr, 8, 1), 5);
    assert_eq!(load(pages.slot(8)), 6);
}

#[test]
fn a_daemon_may_be_told_to_copy_nobodys_memory() {
    let config = format!("{LOOPBACK}[control]\nprocess_memory = \"never\"\n");
    let daemon = Daemon::start(&config, &[]);
    let (_a, b) = pair(&daemon, 4096);
    let mut word = 3u64;
    let refused = register(&b.pd, (&raw mut word).cast(), 8, ALL)
        .err()
        .unwrap();
    assert_eq!(refused.errno(), nix::libc::EPERM);
    let text = refused.to_string();
    assert!(
        text.contains("process_memory") && text.contains("stack"),
        "{text}"
    );
    assert_eq!(word, 3);
}

/// Memory that the daemon has to keep mapped counts against its client's limit. Beyond the limit
/// the daemon copies instead, if it is allowed to. Each region counts against the region limit,
/// whichever method made it.
#[test]
fn limits_hold_for_each_way_to_register() {
    const LIMITS: &str =
        "[limits]\nmemory_per_client = \"16 MiB\"\nmemory_regions_per_client = 5\n";
    const MUCH: usize = 64 << 20;
    for (policy, may_copy) in [("all", true), ("never", false)] {
        let config = format!("{LOOPBACK}{LIMITS}[control]\nprocess_memory = \"{policy}\"\n");
        let daemon = Daemon::start(&config, &[]);
        let ctx = daemon.context();
        let pd = ctx.alloc_pd().unwrap();
        let error = Arena::alloc(&ctx, MUCH, false).err().unwrap().to_string();
        assert!(error.contains("[limits] memory_per_client"), "{error}");
        let private = Pages::new(MUCH);
        let (_file, shared) = shared_file(MUCH);
        for pages in [&private, &shared] {
            match register(&pd, pages.start, pages.len, ALL) {
                Ok(mr) => {
                    assert!(may_copy, "registered by {:?}", mr.methods());
                    assert_eq!(only_method(&mr), ExtentMethod::Copy);
                }
                Err(error) => assert!(!may_copy, "{error}"),
            }
        }
        let error = register(&pd, private.start, MUCH, ALL);
        let why = match error {
            Ok(mr) => mr.reason().to_owned(),
            Err(error) => error.to_string(),
        };
        assert!(why.contains("[limits] memory_per_client"), "{why}");

        let arena = Arena::alloc(&ctx, 4096, false).unwrap();
        let (_file, shared) = shared_file(4096);
        let private = Pages::new(4096);
        let on_stack = [0u64; 8];
        for (method, start) in [
            (ExtentMethod::Arena, arena.as_ptr()),
            (ExtentMethod::Remap, private.start),
            (ExtentMethod::Shared, shared.start),
            (ExtentMethod::Copy, on_stack.as_ptr().cast_mut().cast()),
        ] {
            if method == ExtentMethod::Copy && !may_copy {
                continue;
            }
            let mut regions = Vec::new();
            let error = loop {
                match register(&pd, start, 64, ALL) {
                    Ok(mr) => regions.push(mr),
                    Err(error) => break error.to_string(),
                }
                assert_eq!(only_method(regions.last().unwrap()), method);
            };
            assert_eq!(regions.len(), 5, "{method:?}: {error}");
            let named = error.contains("[limits] memory_regions_per_client");
            assert!(named, "{method:?}: {error}");
        }
    }
}

/// Writer threads of the torture test. Each has one word of each line; peers use the rest.
const WRITERS: usize = 4;

/// Every `BUSY_ROUNDS`-th round the writers never yield. There may be more of them than cores, so a
/// busy round lasts several time slices of the scheduler; any other takes less than a millisecond.
const BUSY_ROUNDS: usize = 20;
/// Increments between two yields of a writer.
const COUNTS_TO_YIELD: u64 = 16;

/// Increments the writer's words in all pages until the round ends. Returns the number of
/// increments per word.
fn count_up(
    writer: usize,
    pages: usize,
    len: usize,
    this: usize,
    round: &std::sync::atomic::AtomicUsize,
) -> u64 {
    use std::sync::atomic::Ordering;
    let words = (0..len / 8).filter(|word| word % 8 == writer);
    let words: Vec<*mut u64> = words.map(|word| (pages + word * 8) as *mut u64).collect();
    let mut count = 0;
    while round.load(Ordering::Acquire) == this {
        for word in &words {
            assert_eq!(load(*word), count, "an update of {word:?} was lost");
            store(*word, count + 1);
        }
        count += 1;
        if !this.is_multiple_of(BUSY_ROUNDS) && count.is_multiple_of(COUNTS_TO_YIELD) {
            std::thread::yield_now();
        }
    }
    for word in &words {
        assert_eq!(
            load(*word),
            count,
            "an update of {word:?} was lost at the end"
        );
    }
    count
}

/// Registers fresh memory while other threads write to it, for `SIWD_TORTURE_ROUNDS` rounds.
#[test]
fn no_update_is_lost_while_pages_are_registered() {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    const REGISTRARS: usize = 4;
    const LEN: usize = 6 * 4096;
    let rounds: usize =
        std::env::var("SIWD_TORTURE_ROUNDS").map_or(150, |text| text.parse().unwrap());
    let daemon = Daemon::loopback();
    let ends: Vec<_> = (0..REGISTRARS).map(|_| pair(&daemon, 4096)).collect();
    let (round, address) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (begin, end) = (
        Barrier::new(WRITERS + REGISTRARS + 1),
        Barrier::new(WRITERS + REGISTRARS + 1),
    );
    let (counted, busy) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (round, address, begin, end) = (&round, &address, &begin, &end);
            let counted = &counted;
            scope.spawn(move || {
                for i in 0..rounds {
                    begin.wait();
                    let count = count_up(writer, address.load(Ordering::Acquire), LEN, i, round);
                    counted.fetch_add(count as usize, Ordering::Relaxed);
                    end.wait();
                }
            });
        }
        for (registrar, (a, b)) in ends.iter().enumerate() {
            let (round, address, begin, end, busy) = (&round, &address, &begin, &end, &busy);
            scope.spawn(move || {
                for i in 0..rounds {
                    busy.fetch_add(1, Ordering::AcqRel);
                    begin.wait();
                    let start = address.load(Ordering::Acquire);
                    // The registered ranges overlap, and each registrar uses its own part of a line
                    // of words.
                    let mix = i
                        .wrapping_mul(0x9e37_79b9)
                        .wrapping_add(registrar * 0x85eb_ca6b);
                    let from = mix % (LEN / 2) / 64 * 64;
                    let len = LEN / 4 + mix / 7 % (LEN / 4);
                    let at = (start + from) as *mut u8;
                    let mr = register(&b.pd, at, len, EVERYTHING).unwrap();
                    // Remapped by this context, or shared with another context that remapped it
                    // first.
                    let is_copied = |(method, _)| method == ExtentMethod::Copy;
                    assert!(!mr.methods().into_iter().any(is_copied), "{}", mr.reason());
                    let line = (mix / 3 % (len / 64 - 1)) as u64 * 64;
                    let (mine, sum) = (line + (4 + registrar as u64 % 3) * 8, line + 56);
                    let value = i as u64 + 1;
                    let before = read_word(a, &mr, mine);
                    assert_eq!(
                        write_word(a, &mr, mine, value << 32 | before),
                        WcStatus::SUCCESS
                    );
                    fetch_add(a, &mr, sum, 1);
                    assert!(load((start + from + sum as usize) as *mut u64) >= 1);
                    drop(mr);
                    if busy.fetch_sub(1, Ordering::AcqRel) == 1 {
                        round.fetch_add(1, Ordering::AcqRel);
                    }
                    end.wait();
                }
            });
        }
        for _ in 0..rounds {
            let pages = Pages::new(LEN);
            address.store(pages.start as usize, Ordering::Release);
            begin.wait();
            end.wait();
            let sums = (0..LEN / 64).map(|line| load(pages.slot(line * 64 + 56)));
            assert_eq!(sums.sum::<u64>(), REGISTRARS as u64, "an atomic was lost");
        }
    });
    println!("{} rounds of writers", counted.load(Ordering::Relaxed));
}

/// Forks, and returns the result of `is_right` in the child, which may use only its own memory.
fn in_child(is_right: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child changes its memory, calls exit and nothing else.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let status = if is_right() { 0 } else { 1 };
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { nix::libc::_exit(status) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let ended = nix::sys::wait::waitpid(child, None).unwrap();
            ended == nix::sys::wait::WaitStatus::Exited(child, 0)
        }
    }
}

#[test]
fn a_child_of_fork_has_its_own_copy_and_disturbs_nobody() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let pages = Pages::new(3 * 4096);
    store(pages.slot(4096), 7);
    let mr = register(&b.pd, pages.start, pages.len, EVERYTHING).unwrap();
    let is_own = in_child(|| {
        let before = load(pages.slot(4096));
        store(pages.slot(4096), 1000);
        store(pages.slot(0), 1000);
        before == 7 && load(pages.slot(4096)) == 1000
    });
    assert!(is_own);
    assert_eq!((load(pages.slot(4096)), load(pages.slot(0))), (7, 0));
    assert_eq!(fetch_add(&a, &mr, 4096, 1), 7);
    // A child that frees its parent's objects does not disturb it either.
    let mut regions = Some(mr);
    assert!(in_child(|| {
        drop(regions.take());
        true
    }));
    let mr = regions.take().unwrap();
    assert_eq!(fetch_add(&a, &mr, 4096, 1), 8);
    assert_eq!(load(pages.slot(4096)), 9);
}

#[test]
fn operators_see_how_memory_is_reached() {
    let daemon = Daemon::loopback();
    let (_a, b) = pair(&daemon, 4096);
    let pages = Pages::new(4096);
    let mut word = 0u64;
    let _remapped = register(&b.pd, pages.start, 100, EVERYTHING).unwrap();
    let _copied = register(&b.pd, (&raw mut word).cast(), 8, ALL).unwrap();
    let out = std::process::Command::new(client_program("siwctl"))
        .arg("stat")
        .arg("--socket")
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let (_, table) = text.split_once("registered memory, bytes").unwrap();
    let fields: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(fields[2..], ["100", "0", "8"], "{text}");
    assert!(table.contains("1 regions: stack"), "{text}");
}

#[test]
fn a_hostile_client_imports_nothing_else_and_names_no_extent_outside() {
    use siw_shm::control::messages as m;
    use siw_shm::control::{CallError, ControlSocket, Message};
    use std::os::fd::{AsFd, BorrowedFd};

    fn errno<M: Message>(conn: &ControlSocket, request: &M, fds: &[BorrowedFd<'_>]) -> i32 {
        match conn.call_and_wait(2, request, fds) {
            Err(CallError::Refused { errno, reason }) => {
                assert!(!reason.is_empty());
                errno
            }
            Err(error) => panic!("{error}"),
            Ok(_) => 0,
        }
    }
    let daemon = Daemon::loopback();
    let greet = || {
        let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
        let hello = m::ClientHello::new("hostile");
        conn.call_and_wait(1, &hello, &[]).unwrap();
        conn
    };
    let conn = greet();
    let import = |kind, offset, len| m::ImportMemory {
        kind,
        writable: 1,
        offset,
        len,
    };
    let (file, _pages) = shared_file(2 * 4096);
    let (pipe, _other) = nix::unistd::pipe().unwrap();
    let disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let whole = import(m::IMPORT_FILE, 0, 8192);
    assert_eq!(errno(&conn, &whole, &[]), nix::libc::EINVAL);
    assert_eq!(errno(&conn, &whole, &[pipe.as_fd()]), nix::libc::EOPNOTSUPP);
    let process = import(m::IMPORT_PROCESS, 0, 0);
    let other = greet();
    assert_eq!(errno(&other, &process, &[disk.as_fd()]), nix::libc::EINVAL);
    assert_eq!(
        errno(&other, &whole, &[pipe.as_fd()]),
        nix::libc::EOPNOTSUPP
    );
    assert!(other.call_and_wait(3, &whole, &[]).is_err(), "it is closed");
    for (offset, len) in [
        (0, 0),
        (0, 12_288),
        (8192, 4096),
        (1, 4096),
        (0, 100),
        (1 << 63, 1 << 63),
    ] {
        let part = import(m::IMPORT_FILE, offset, len);
        assert_ne!(
            errno(&conn, &part, &[file.as_fd()]),
            0,
            "{len} bytes at {offset}"
        );
    }
    let (imported, _) = conn.call_and_wait(3, &whole, &[file.as_fd()]).unwrap();
    let pd = m::AllocPd {
        device: m::ANY_DEVICE,
        reserved: 0,
    };
    let (pd, _) = conn.call_and_wait(4, &pd, &[]).unwrap();
    let region = |arena, offset, len, total, count| {
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        extents[0] = m::MemoryExtent {
            arena,
            method: u32::MAX,
            offset,
            len,
        };
        m::RegMemory {
            pd: pd.id,
            access: 7,
            len: total,
            va: 0,
            count,
            reserved: 0,
            reason: m::Text::new("none"),
            extents,
        }
    };
    let id = imported.id;
    for (what, wrong) in [
        ("no extent", region(id, 0, 8192, 8192, 0)),
        ("more than a message has", region(id, 0, 8192, 8192, 129)),
        ("another sum", region(id, 0, 8192, 8193, 1)),
        ("beyond the arena", region(id, 1, 8192, 8192, 1)),
        ("no such arena", region(id + 1000, 0, 8192, 8192, 1)),
        ("it wraps", region(id, u64::MAX, 2, 2, 1)),
    ] {
        assert_ne!(errno(&conn, &wrong, &[]), 0, "{what}");
    }
    assert_eq!(errno(&conn, &region(id, 0, 8192, 8192, 1), &[]), 0);
    let free = m::FreeArena {
        arena: id,
        reserved: 0,
    };
    assert_eq!(errno(&conn, &free, &[]), nix::libc::EBUSY);
    // Two descriptors, or one with another request, are rejected as before.
    let two = [file.as_fd(), pipe.as_fd()];
    assert!(greet().call_and_wait(5, &whole, &two).is_err());
    assert!(greet().call_and_wait(5, &free, &two[..1]).is_err());
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
}

/// Runs a test of this program in a process of its own: it opens a file with O_DIRECT, after which other
/// tests would leave their pages shared.
fn run_alone(name: &str) -> bool {
    const ALONE: &str = "SIWD_TEST_RUNS_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    print!("{}", String::from_utf8_lossy(&out.stdout));
    false
}

#[test]
fn a_returned_buffer_is_private_memory_in_a_process_with_pins() {
    use std::os::unix::fs::OpenOptionsExt;
    if !run_alone("app_memory::a_returned_buffer_is_private_memory_in_a_process_with_pins") {
        return;
    }
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut options = std::fs::File::options();
    options.read(true).custom_flags(nix::libc::O_DIRECT);
    let _direct = match options.open(file.path()) {
        Ok(direct) => direct,
        Err(error) => return println!("skipped: O_DIRECT: {error}"),
    };
    const LENGTH: usize = 256 << 10;
    let daemon = Daemon::loopback();
    let context = siw::Context::open(Some(&daemon.socket)).unwrap();
    let pd = context.alloc_pd().unwrap();
    let regions = [b'a', b'b'].map(|value| {
        let region = pd.register(vec![value; LENGTH], Access::LOCAL_WRITE);
        region.map_err(|failed| failed.error).unwrap()
    });
    let [mut first, mut second] =
        regions.map(|region| region.dereg().map_err(|failed| failed.error).unwrap());
    for (buffer, other, value) in [(0, 1, b'x'), (1, 0, b'y')] {
        let [grown, kept] = match buffer {
            0 => [&mut first, &mut second],
            _ => [&mut second, &mut first],
        };
        let before = kept.clone();
        grown.truncate(100);
        grown.shrink_to_fit();
        grown.reserve_exact(2 * LENGTH);
        grown.resize(2 * LENGTH, value);
        assert!(*kept == before, "buffer {other} changed");
    }
}
