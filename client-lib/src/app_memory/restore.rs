//! Gives pages back after their last registration: pages of a file in memory become private
//! anonymous memory again, at the same addresses and with the same content, while other threads go
//! on using them.
//!
//! ```text
//! replace  mremap(2) of missing anonymous pages over the file: from now on any access blocks
//! copy     UFFDIO_COPY of the file's pages, each of which is accessible at once
//! wake     blocked threads
//! ```
//! userfaultfd stays with the moved pages if it reports their move (UFFD_FEATURE_EVENT_REMAP), and
//! mremap(2) returns when the report has been read, by a thread that exists meanwhile. Missing
//! pages take the attributes of their new address, so the kernel merges them with the memory around
//! them. Without privilege, where that makes system calls of other threads fail, the file is
//! write-protected and a copy moved over it, which stays a mapping of its own.
//!
//! Writes to pinned pages would be lost. Nothing shows that a page of a file is pinned, so pages are
//! given back only if this process has no means to pin any ([`super::pins`]), which is checked again
//! when no access can pin one any more; otherwise they stay as they are. Pages that belong to a region
//! alone are given back regardless where the caller has promised that no I/O into it is under way
//! ([`Access::Unpinned`]).

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use siw_shm::shared_memory::PAGE;

use super::calls::MAPPINGS;
use super::duplicate::{Duplicate, populate_pages, populate_pages_for_reading};
use super::remap::*;
use super::vma::{MappedFileId, find_mapping};

/// Pages to give back.
#[derive(Debug)]
pub(super) struct SharedPages {
    pub pages: Range<usize>,
    pub id: MappedFileId,
    pub offset: u64,
    pub prot: ProtFlags,
    /// The memory was mapped with MAP_NORESERVE.
    pub is_not_reserved: bool,
    /// The page before and the page behind, if they are private anonymous memory.
    pub neighbours: [Option<usize>; 2],
}

impl SharedPages {
    /// Flags of mmap(2) for private memory in their place.
    fn flags(&self) -> MapFlags {
        match self.is_not_reserved {
            true => MapFlags::PRIVATE | MapFlags::NORESERVE,
            false => MapFlags::PRIVATE,
        }
    }
}

/// Method of blocking other threads.
#[derive(Debug)]
enum Restorer {
    Copy(OwnedFd),
    Protect(OwnedFd),
    Alone,
}

/// Stack of the thread that reads reports.
const REPORTS_STACK: usize = 64 << 10;

impl Restorer {
    fn open() -> Result<Restorer, Errno> {
        if is_only_thread() {
            return Ok(Restorer::Alone);
        }
        match open_userfaultfd(UFFD_FEATURE_EVENT_REMAP) {
            Ok(uffd) => Ok(Restorer::Copy(uffd)),
            Err(_) => {
                open_user_mode_userfaultfd(UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_SHMEM)
                    .map(Restorer::Protect)
            }
        }
    }
}

/// Others that may access pages while they are given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Threads, and the kernel or devices by pins.
    Any,
    /// Threads.
    Unpinned,
    /// None.
    Sole,
}

impl Access {
    /// Checks that no page can be pinned that must not be.
    fn check_pins(self) -> Result<(), Errno> {
        match self {
            Access::Any => check_no_pins(),
            Access::Unpinned | Access::Sole => Ok(()),
        }
    }
}

/// Gives pages back; returns those that are private again, in the order of `list`.
pub(super) fn give_back(list: &[SharedPages], access: Access) -> Vec<Range<usize>> {
    let restorer = match access {
        Access::Sole => Ok(Restorer::Alone),
        Access::Any | Access::Unpinned => Restorer::open(),
    };
    let (Ok(restorer), Ok(maps)) = (restorer, File::open("/proc/self/maps")) else {
        return Vec::new();
    };
    match &restorer {
        Restorer::Alone => give_back_all(list, &maps, |part| {
            access.check_pins()?;
            give_back_alone(part)
        }),
        Restorer::Protect(uffd) => {
            give_back_all(list, &maps, |part| give_back_protected(uffd, part, access))
        }
        Restorer::Copy(uffd) => {
            let given = with_reports_read(uffd, || {
                give_back_all(list, &maps, |part| give_back_missing(uffd, part, access))
            });
            given.unwrap_or_default()
        }
    }
}

fn give_back_all(
    list: &[SharedPages],
    maps: &File,
    mut give_back: impl FnMut(&SharedPages) -> Result<(), Errno>,
) -> Vec<Range<usize>> {
    let mut given = Vec::new();
    for whole in list {
        for start in whole.pages.clone().step_by(FROZEN_AT_ONCE) {
            let pages = start..whole.pages.end.min(start + FROZEN_AT_ONCE);
            let before = (start != whole.pages.start).then(|| start - PAGE);
            let part = SharedPages {
                offset: whole.offset + (start - whole.pages.start) as u64,
                neighbours: [
                    before.or(whole.neighbours[0]),
                    whole.neighbours[1].filter(|_| pages.end == whole.pages.end),
                ],
                pages: pages.clone(),
                ..*whole
            };
            // A signal handler in this thread that touched a missing page would deadlock.
            let blocked = BlockedSignals::block_all();
            let held = MAPPINGS.lock();
            let done = check_mapping(maps, &part).and_then(|()| give_back(&part));
            drop((held, blocked));
            if done.is_err() {
                break;
            }
            given.push(pages);
        }
    }
    given
}

/// Checks that the pages are still mapped as they were: the program may have discarded them.
fn check_mapping(maps: &File, part: &SharedPages) -> Result<(), Errno> {
    let is_there = find_mapping(maps, part.pages.start)?.is_some_and(|found| {
        found.range.start <= part.pages.start
            && found.range.end >= part.pages.end
            && found.shared
            && found.file == Some(part.id)
            && found.offset_of(part.pages.start) == part.offset
    });
    if is_there { Ok(()) } else { Err(Errno::FAULT) }
}

/// Reads the reports of `uffd` in another thread during a call.
fn with_reports_read<T>(uffd: &OwnedFd, call: impl FnOnce() -> T) -> Result<T, std::io::Error> {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (is_ready, ready) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stopped, stop) = pipe_with(PipeFlags::CLOEXEC)?;
    std::thread::scope(|scope| {
        // Its handlers would run in a thread that must not block.
        let blocked = BlockedSignals::block_all();
        let reader = std::thread::Builder::new().stack_size(REPORTS_STACK);
        reader.spawn_scoped(scope, move || {
            // From here to the end this thread only makes system calls: memory of the allocator may
            // be among the missing pages.
            drop(ready);
            while read_report(uffd, &stopped) {}
        })?;
        drop(blocked);
        let mut byte = [0];
        while rustix::io::read(&is_ready, &mut byte) == Err(Errno::INTR) {}
        let result = call();
        drop(stop);
        Ok(result)
    })
}

/// Waits for a report and reads it; returns false when `stopped` is closed at its other end.
fn read_report(uffd: &OwnedFd, stopped: &OwnedFd) -> bool {
    let mut fds = [
        PollFd::new(uffd, PollFlags::IN),
        PollFd::new(stopped, PollFlags::IN),
    ];
    if rustix::event::poll(&mut fds, None).is_ok() {
        if !fds[1].revents().is_empty() {
            return false;
        }
        let mut report = [0; REPORT_LEN];
        // Faults are reported, too, and answered when the copy reaches their page.
        let _ = rustix::io::read(uffd, &mut report);
    }
    true
}

/// Maps the pages of a part once more, to copy them or to put them back.
fn duplicate(part: &SharedPages) -> Result<Duplicate, Errno> {
    let view = Duplicate::of_pages(&part.pages)?;
    if !part.prot.contains(ProtFlags::READ) {
        view.set_access(ProtFlags::READ)?;
    }
    Ok(view)
}

/// Maps the file again for the pages from `done` on.
fn put_back(part: &SharedPages, view: &mut Duplicate, done: usize) -> Result<(), Errno> {
    if !part.prot.contains(ProtFlags::READ) {
        view.set_access(part.prot)?;
    }
    view.move_to(done, &(part.pages.start + done..part.pages.end))
}

/// Moves the pages of the room over a mapping of the file. After an error the file is mapped there.
fn move_over(part: &SharedPages, room: &mut Room, view: &mut Duplicate) -> Result<(), Errno> {
    let to = part.pages.start as *mut c_void;
    // SAFETY: the destination is a mapping of the file, whose content the caller puts in its place.
    if let Err(error) = unsafe { room.move_away(to) } {
        // The call may have unmapped the destination before it failed.
        put_back(part, view, 0)?;
        return Err(error);
    }
    Ok(())
}

fn give_back_missing(uffd: &OwnedFd, part: &SharedPages, access: Access) -> Result<(), Errno> {
    let mut view = duplicate(part)?;
    let mut room = Room::reserve_as(&part.pages, part.flags())?;
    let missing = room.make_accessible(part.prot)?;
    // The kernel merges mappings with the same attributes only; afterwards all are one again.
    let around = part.neighbours.into_iter().flatten();
    let around = || around.clone().map(|page| page..page + PAGE);
    register_range(uffd, &missing, MODE_MISSING)?;
    for page in around() {
        let _ = register_range(uffd, &page, MODE_MISSING);
    }
    let given = move_over(part, &mut room, &mut view).and_then(|()| {
        if let Err(error) = access.check_pins() {
            put_back(part, &mut view, 0)?;
            return Err(error);
        }
        copy_missing(uffd, part, &mut view)
    });
    release_range(uffd, &part.pages);
    for page in around() {
        release_range(uffd, &page);
    }
    given
}

/// Copies the file's pages to missing pages.
fn copy_missing(uffd: &OwnedFd, part: &SharedPages, view: &mut Duplicate) -> Result<(), Errno> {
    let mut done = 0;
    while done < part.pages.len() {
        let from = view.start() + done;
        let to = part.pages.start + done..part.pages.end;
        match fill_pages(uffd, from, &to) {
            Ok(bytes) => done += bytes,
            Err(Errno::AGAIN) => {}
            // The pages not reached cannot have changed in the file.
            Err(error) => {
                put_back(part, view, done)?;
                return Err(error);
            }
        }
    }
    Ok(())
}

fn give_back_protected(uffd: &OwnedFd, part: &SharedPages, access: Access) -> Result<(), Errno> {
    let mut view = duplicate(part)?;
    let mut room = Room::reserve_as(&part.pages, part.flags())?;
    let range = room.make_accessible(ProtFlags::READ | ProtFlags::WRITE)?;
    let copy = range.start as *mut c_void;
    let _ = populate_pages(&range);
    register_range(uffd, &part.pages, MODE_WRITE_PROTECT)?;
    let prot = MprotectFlags::from_bits_retain(part.prot.bits());
    let given = protect_range(uffd, &part.pages).and_then(|()| {
        access.check_pins()?;
        // SAFETY: memory of this function; nothing writes the file's pages meanwhile.
        unsafe {
            let from = view.start() as *const u8;
            copy_pages(from, copy.cast(), range.len());
            rustix::mm::mprotect(copy, range.len(), prot)?;
        }
        move_over(part, &mut room, &mut view)
    });
    release_range(uffd, &part.pages);
    given
}

/// Copies whole pages. They may hold several blocks of the heap and what lies between them, which
/// AddressSanitizer takes for an overflow in memcpy(3), also of a program that only uses this library.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_pages(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller promised; the direction flag is clear in Rust code.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as the caller promised.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, len);
    }
}

/// Gives pages back that no other thread uses meanwhile: nothing has to block. Allocates no memory.
/// After an error the file is mapped.
pub(super) fn give_back_alone(part: &SharedPages) -> Result<(), Errno> {
    let mut view = duplicate(part)?;
    // A copy would take a fault for each page.
    populate_pages_for_reading(&(view.start()..view.start() + part.pages.len()));
    let (start, len) = (part.pages.start as *mut c_void, part.pages.len());
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let flags = part.flags() | MapFlags::FIXED;
    // SAFETY: no other thread uses the pages, and this one only its stack until the content is back.
    let given = unsafe {
        rustix::mm::mmap_anonymous(start, len, prot, flags).and_then(|_| {
            populate_pages(&part.pages).or_else(|error| match error {
                Errno::INVAL => Ok(()),
                error => Err(error),
            })?;
            let from = view.start() as *const u8;
            copy_pages(from, start.cast(), len);
            let prot = MprotectFlags::from_bits_retain(part.prot.bits());
            rustix::mm::mprotect(start, len, prot)
        })
    };
    given.or_else(|error| put_back(part, &mut view, 0).and(Err(error)))
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn another_threads_mapping_in_place_of_moved_pages_stays() {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let map = |at: *mut c_void, flags| {
            // SAFETY: a new mapping, which replaces none.
            unsafe { rustix::mm::mmap_anonymous(at, PAGE, prot, MapFlags::PRIVATE | flags) }
        };
        let file = rustix::fs::memfd_create("moved", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        // SAFETY: a new mapping.
        let target =
            unsafe { rustix::mm::mmap(null_mut(), PAGE, prot, MapFlags::SHARED, &file, 0) }
                .unwrap();
        let part = SharedPages {
            pages: target as usize..target as usize + PAGE,
            id: MappedFileId::of_file(&file).unwrap(),
            offset: 0,
            prot,
            is_not_reserved: false,
            neighbours: [None, None],
        };
        let mut room = Room::reserve(&part.pages).unwrap();
        let left = room.make_accessible(prot).unwrap();
        let mut view = duplicate(&part).unwrap();
        move_over(&part, &mut room, &mut view).unwrap();
        let mapped = map(left.start as *mut c_void, MapFlags::FIXED_NOREPLACE).unwrap();
        drop(room);
        // SAFETY: both pages belong to this test, and are unmapped once.
        unsafe {
            rustix::mm::munmap(target, PAGE).unwrap();
            rustix::mm::mprotect(mapped, PAGE, MprotectFlags::READ).expect("the mapping is gone");
            rustix::mm::munmap(mapped, PAGE).unwrap();
        }
    }
}
