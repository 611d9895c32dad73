//! Replaces private pages by pages of a file in memory, at the same addresses, while other threads
//! go on using them. No write is lost.
//!
//! ```text
//! prepare  a mapping of the file at other addresses ([`super::duplicate`])
//! freeze   with userfaultfd(2): from now on any access to the pages blocks
//! copy     their content into the file
//! replace  mremap(2) of the file's mapping over them
//! wake     blocked threads, which find the new pages
//! ```
//! Accesses through the page table block, but the kernel or a device may have pinned pages: a read
//! with O_DIRECT by libaio or io_uring that is under way, registered buffers of io_uring, AF_XDP,
//! VFIO. Their writes go to the old page whatever happens to the mapping, so a pinned page must not
//! be replaced. UFFDIO_MOVE (Linux 6.8) moves the pages away and refuses pinned ones with EBUSY.
//! Where it is missing, pages are replaced only if this process has no means to pin any
//! ([`super::pins`]): mremap(2) moves them away, or they are write-protected.
//!
//! If userfaultfd may handle faults of the kernel too (as root, with
//! vm.unprivileged_userfaultfd=1, or with access to /dev/userfaultfd), every access blocks.
//! Otherwise, during these microseconds, a system call of another thread that accesses these pages
//! fails with EFAULT, and a thread whose stack is among them is killed if the kernel writes to it.
//! Therefore, if the memory cannot be copied instead, all other threads are stopped
//! ([`super::park`]), and such faults are risked only where that is impossible.
//!
//! Between freeze and wake this thread must not access any memory of the process except its own
//! stack: any page may be frozen, including those of the allocator or of `errno`. Therefore system
//! calls go through rustix, which makes them directly, and no memory is allocated.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, UserfaultfdFlags};
use rustix::pipe::PipeFlags;
use siw_shm::shared_memory::PAGE;

use super::calls::IS_MMAPPED;
use super::duplicate::{Duplicate, MappedFile, populate_pages};
use super::pages::read_words;
use super::park::ParkedThreads;

/// Bytes frozen at a time; other threads block for about a millisecond.
pub(super) const FROZEN_AT_ONCE: usize = 4 << 20;

/// `struct uffdio_api` of linux/userfaultfd.h.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_move`.
#[repr(C)]
struct UffdioMove {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

const UFFD_API: u64 = 0xaa;
const GROUP: u8 = 0xaa;
pub(super) const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const UFFD_FEATURE_MOVE: u64 = 1 << 16;
pub(super) const UFFD_FEATURE_EVENT_REMAP: u64 = 1 << 2;
pub(super) const UFFD_FEATURE_WP_SHMEM: u64 = 1 << 12;
/// Length of `struct uffd_msg`.
pub(super) const REPORT_LEN: usize = 32;
pub(super) const MODE_MISSING: u64 = 1;
pub(super) const MODE_WRITE_PROTECT: u64 = 2;
const WRITE_PROTECT: u64 = 1;
const MOVE_DONT_WAKE: u64 = 1;
const MOVE_ALLOW_HOLES: u64 = 2;
/// Attempts to move a page that the kernel is working on. It also reports a pinned huge page in
/// this way, because it cannot split it.
const MOVE_ATTEMPTS: usize = 16;

use rustix::ioctl::{Opcode, opcode};
const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(GROUP, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(GROUP, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdioRange>(GROUP, 1);
const UFFDIO_WAKE: Opcode = opcode::read::<UffdioRange>(GROUP, 2);
const UFFDIO_COPY: Opcode = opcode::read_write::<UffdioCopy>(GROUP, 3);
const UFFDIO_MOVE: Opcode = opcode::read_write::<UffdioMove>(GROUP, 5);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(GROUP, 6);
/// `_IO(0xaa, 0)` on /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: Opcode = opcode::none(GROUP, 0);

/// Method of blocking other threads from pages that are being replaced.
#[derive(Debug)]
pub(super) enum Freezer {
    /// UFFDIO_MOVE moves the pages away, except pinned ones.
    Take {
        uffd: OwnedFd,
        /// Faults of the kernel block, too.
        blocks_kernel: bool,
    },
    /// Faults of the kernel block, too: mremap(2) moves the pages away, also pinned ones.
    Move(OwnedFd),
    /// Only faults of user code block: pages are write-protected. Writes to pinned ones go on.
    Protect(OwnedFd),
    /// The other threads are stopped; if that is impossible, the second method is used. Writes to
    /// pinned pages go on.
    Park(Option<Box<Freezer>>),
    /// The process has no other thread. Writes to pinned pages go on.
    Alone,
}

/// Pages of one call of [`replace_pages`] that were left in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct KeptPages([u64; FROZEN_AT_ONCE / PAGE / 64]);

impl KeptPages {
    fn keep(&mut self, page: usize) {
        self.0[page / 64] |= 1 << (page % 64);
    }

    fn has(&self, page: usize) -> bool {
        self.0[page / 64] & 1 << (page % 64) != 0
    }

    /// Runs of pages of `range` that were all kept, or all replaced.
    pub fn runs(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let (kept, range) = (*self, range.clone());
        let mut at = 0;
        std::iter::from_fn(move || {
            let (first, count) = (at, range.len() / PAGE);
            if first >= count {
                return None;
            }
            let is_kept = kept.has(first);
            while at < count && kept.has(at) == is_kept {
                at += 1;
            }
            let start = range.start + first * PAGE;
            Some((start..range.start + at * PAGE, is_kept))
        })
    }
}

/// One ioctl(2) of userfaultfd.
fn uffd_call<const CODE: Opcode, T>(uffd: &OwnedFd, argument: &mut T) -> Result<(), Errno> {
    // SAFETY: each request is used with its structure, which has no pointers.
    unsafe { rustix::ioctl::ioctl(uffd, rustix::ioctl::Updater::<CODE, T>::new(argument)) }
}

fn set_up(uffd: &OwnedFd, features: u64) -> Result<(), Errno> {
    let mut api = UffdioApi {
        api: UFFD_API,
        features,
        ioctls: 0,
    };
    uffd_call::<UFFDIO_API, _>(uffd, &mut api)
}

/// userfaultfd(2) through the device file, whose permissions control the handling of kernel faults.
fn open_device() -> Result<OwnedFd, Errno> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/userfaultfd", flags, Mode::empty())?;
    /// The request takes the flags of the new descriptor as its argument and returns the
    /// descriptor.
    struct NewUserfaultfd;
    // SAFETY: the argument is a number; the result is a new descriptor without another owner.
    unsafe impl rustix::ioctl::Ioctl for NewUserfaultfd {
        type Output = OwnedFd;
        const IS_MUTATING: bool = false;
        fn opcode(&self) -> Opcode {
            USERFAULTFD_IOC_NEW
        }
        fn as_ptr(&mut self) -> *mut c_void {
            std::ptr::without_provenance_mut(UserfaultfdFlags::CLOEXEC.bits() as usize)
        }
        unsafe fn output_from_ptr(
            out: rustix::ioctl::IoctlOutput,
            _: *mut c_void,
        ) -> Result<OwnedFd, Errno> {
            use std::os::fd::FromRawFd;
            // SAFETY: the kernel has just made it for this call.
            Ok(unsafe { OwnedFd::from_raw_fd(out) })
        }
    }
    // SAFETY: see the implementation above.
    unsafe { rustix::ioctl::ioctl(&device, NewUserfaultfd) }
}

/// userfaultfd(2) for faults of the kernel and of programs, which needs privilege.
fn open_whole() -> Result<OwnedFd, Errno> {
    // SAFETY: a new descriptor, which does nothing until it is set up.
    unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }.or_else(|_| open_device())
}

/// userfaultfd(2) for faults of programs.
fn open_user_mode() -> Result<OwnedFd, Errno> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(1);
    // SAFETY: as in `open_whole`.
    unsafe { rustix::mm::userfaultfd(flags) }
}

/// [`open_whole`] with these features, reports to be read without waiting.
pub(super) fn open_userfaultfd(features: u64) -> Result<OwnedFd, Errno> {
    let uffd = open_whole()?;
    rustix::fs::fcntl_setfl(&uffd, rustix::fs::OFlags::NONBLOCK)?;
    set_up(&uffd, features)?;
    Ok(uffd)
}

/// [`open_user_mode`] with these features.
pub(super) fn open_user_mode_userfaultfd(features: u64) -> Result<OwnedFd, Errno> {
    let uffd = open_user_mode()?;
    set_up(&uffd, features)?;
    Ok(uffd)
}

impl Freezer {
    /// Opens the best method available to this process.
    ///
    /// # Errors
    /// userfaultfd(2) is not allowed, and the process has several threads.
    pub fn open_best() -> Result<Freezer, Errno> {
        if let Ok(uffd) = open_whole() {
            if set_up(&uffd, UFFD_FEATURE_MOVE).is_ok() {
                return Ok(Freezer::Take {
                    uffd,
                    blocks_kernel: true,
                });
            }
            set_up(&uffd, 0)?;
            return Ok(Freezer::Move(uffd));
        }
        Self::open_for_programs()
    }

    /// Checks whether system calls of other threads that access the pages fail meanwhile.
    pub fn fails_system_calls(&self) -> bool {
        match self {
            Freezer::Take { blocks_kernel, .. } => !blocks_kernel && !is_only_thread(),
            Freezer::Protect(_) => true,
            Freezer::Move(_) | Freezer::Park(_) | Freezer::Alone => false,
        }
    }

    /// Checks whether pinned pages are left in place.
    pub fn finds_pinned(&self) -> bool {
        matches!(self, Freezer::Take { .. })
    }

    /// Checks whether several threads of this library may replace pages at once: none stops the others.
    pub fn lets_threads_help(&self) -> bool {
        !matches!(self, Freezer::Park(_))
    }

    /// Opens the method that needs no privilege.
    pub fn open_for_programs() -> Result<Freezer, Errno> {
        let is_alone = is_only_thread();
        match open_user_mode() {
            // System calls that read write-protected pages go on, and those that access missing
            // ones fail.
            Ok(uffd)
                if (is_alone || super::pins::may_exist())
                    && set_up(&uffd, UFFD_FEATURE_MOVE).is_ok() =>
            {
                Ok(Freezer::Take {
                    uffd,
                    blocks_kernel: false,
                })
            }
            _ if is_alone => Ok(Freezer::Alone),
            Ok(uffd) => {
                set_up(&uffd, UFFD_FEATURE_PAGEFAULT_FLAG_WP)?;
                Ok(Freezer::Protect(uffd))
            }
            Err(error) => Err(error),
        }
    }
}

/// Checks that no other thread of this process could write meanwhile.
pub(super) fn is_only_thread() -> bool {
    // One link for each thread, and the two links of every directory.
    rustix::fs::stat("/proc/self/task").is_ok_and(|status| status.st_nlink == 3)
}

/// Replaces the pages of `range` by those of `file` at `offset`, with the same content and the
/// access `prot`. The range lies in one private anonymous mapping (or in a read-only one, then with
/// [`Freezer::Alone`]) and has at most [`FROZEN_AT_ONCE`] bytes. The stack of this thread must not
/// be in it. Returns the pages that are pinned and therefore left in place.
///
/// # Errors
/// The operating system refuses; then no content has changed.
pub(super) fn replace_pages(
    freezer: &Freezer,
    range: &Range<usize>,
    file: &MappedFile,
    offset: u64,
    prot: ProtFlags,
) -> io::Result<KeptPages> {
    // Before other threads block.
    let mut new = NewPages {
        pages: file.duplicate(offset, range.len())?,
        prot,
        pipe: rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?,
    };
    // A signal handler in this thread that touched a frozen page would deadlock.
    let _blocked = BlockedSignals::block_all();
    match freeze_and_replace(freezer, range, &mut new) {
        // Another thread has opened a file with O_DIRECT or the like meanwhile.
        Err(Errno::BUSY) => {
            let mut kept = KeptPages::default();
            (0..range.len() / PAGE).for_each(|page| kept.keep(page));
            Ok(kept)
        }
        other => Ok(other?),
    }
}

fn freeze_and_replace(
    freezer: &Freezer,
    range: &Range<usize>,
    new: &mut NewPages,
) -> Result<KeptPages, Errno> {
    match freezer {
        Freezer::Take { uffd, .. } => return replace_taken(uffd, range, new),
        Freezer::Move(uffd) => replace_moved(uffd, range, new)?,
        Freezer::Protect(uffd) => replace_protected(uffd, range, new)?,
        Freezer::Park(other) => match (ParkedThreads::park_all(), other) {
            (Ok(_parked), _) => check_no_pins().and_then(|()| replace_alone(range, new))?,
            (Err(_), Some(other)) => return freeze_and_replace(other, range, new),
            (Err(error), None) => return Err(error),
        },
        Freezer::Alone => replace_alone(range, new)?,
    }
    Ok(KeptPages::default())
}

/// Pages of a file that are to replace others.
struct NewPages {
    pages: Duplicate,
    prot: ProtFlags,
    pipe: (OwnedFd, OwnedFd),
}

impl NewPages {
    /// Copies `len` bytes at `source` into the pages from `offset` on, through a pipe: on a missing
    /// page that it must not wait for, a system call fails instead of blocking.
    fn fill(&self, offset: usize, source: usize, len: usize) -> Result<(), Errno> {
        let (read_end, write_end) = &self.pipe;
        let mut done = 0;
        while done < len {
            // SAFETY: the bytes are mapped, and no thread writes them meanwhile because they are
            // frozen. The slice is only handed to the kernel.
            let bytes =
                unsafe { std::slice::from_raw_parts((source + done) as *const u8, len - done) };
            let mut left = match rustix::io::write(write_end, bytes) {
                Ok(written) => written,
                Err(Errno::INTR) => continue,
                // The application freed the page meanwhile, and it cannot be populated again before
                // the end.
                Err(Errno::FAULT) => {
                    let page = done / PAGE * PAGE;
                    let to = self.pages.start() + offset + page;
                    // SAFETY: pages of this object, which no other thread knows.
                    unsafe { std::ptr::write_bytes(to as *mut u8, 0, PAGE) };
                    done = page + PAGE;
                    continue;
                }
                Err(error) => return Err(error),
            };
            while left > 0 {
                let to = (self.pages.start() + offset + done) as *mut u8;
                // SAFETY: pages of this object, which no other thread knows. The slice is only
                // handed to the kernel.
                let space = unsafe { std::slice::from_raw_parts_mut(to, left) };
                match rustix::io::read(read_end, space) {
                    Ok(0) => return Err(Errno::IO),
                    Ok(read) => (done, left) = (done + read, left - read),
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Copies `len` bytes at `source` into the pages from `offset` on.
    ///
    /// # Safety
    /// The bytes can be read without waiting, and nothing writes them meanwhile.
    unsafe fn copy(&self, offset: usize, source: usize, len: usize) {
        let to = (self.pages.start() + offset) as *mut u8;
        // SAFETY: the caller's promise; the new pages are those of this object, which no other thread
        // knows.
        unsafe { to.copy_from_nonoverlapping(source as *const u8, len) };
    }

    /// Prepares for [`NewPages::move_to`], when all pages are filled.
    fn finish(&self) -> Result<(), Errno> {
        if self.prot != ProtFlags::READ | ProtFlags::WRITE {
            self.pages.set_access(self.prot)?;
        }
        Ok(())
    }

    fn move_to(&mut self, offset: usize, to: &Range<usize>) -> Result<(), Errno> {
        self.pages.move_to(offset, to)
    }

    /// Replaces `range` by all of the pages, with the content at `source`.
    fn replace(&mut self, range: &Range<usize>, source: usize) -> Result<(), Errno> {
        self.fill(0, source, range.len())?;
        self.finish()?;
        self.move_to(0, range)
    }
}

/// Blocks signal handlers in this thread while it exists.
pub(super) struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    pub fn block_all() -> BlockedSignals {
        // SAFETY: both sets are of this function; the call fills them.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            BlockedSignals(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores the previous mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, null_mut()) };
    }
}

fn uffd_range(range: &Range<usize>) -> UffdioRange {
    UffdioRange {
        start: range.start as u64,
        len: range.len() as u64,
    }
}

pub(super) fn register_range(uffd: &OwnedFd, range: &Range<usize>, mode: u64) -> Result<(), Errno> {
    let mut argument = UffdioRegister {
        range: uffd_range(range),
        mode,
        ioctls: 0,
    };
    uffd_call::<UFFDIO_REGISTER, _>(uffd, &mut argument)
}

/// Wakes all blocked threads, also after a failure.
pub(super) fn release_range(uffd: &OwnedFd, range: &Range<usize>) {
    let mut argument = uffd_range(range);
    // Also removes the protection. Fails if the file is already mapped.
    let _ = uffd_call::<UFFDIO_UNREGISTER, _>(uffd, &mut argument);
    let _ = uffd_call::<UFFDIO_WAKE, _>(uffd, &mut argument);
}

fn replace_taken(
    uffd: &OwnedFd,
    range: &Range<usize>,
    new: &mut NewPages,
) -> Result<KeptPages, Errno> {
    // A page shared with a child of fork(2) or merged by KSM is refused like a pinned one. Such a
    // page is never pinned for writing, and becomes private here.
    let _ = populate_pages(range);
    let room = Room::reserve(range)?;
    let pages = room.make_accessible(new.prot)?;
    register_range(uffd, &pages, MODE_MISSING)?;
    register_range(uffd, range, MODE_MISSING)?;
    let mut kept = KeptPages::default();
    let mut replaced = take_pages(uffd, range, pages.start, &mut kept);
    // Missing pages are read as zeroes.
    release_range(uffd, &pages);
    let taken = || kept.runs(range).filter(|(_, is_kept)| !is_kept);
    let place_of = |run: &Range<usize>| run.start - range.start;
    for (run, _) in taken() {
        let place = place_of(&run);
        if replaced.is_ok() {
            // SAFETY: moved pages, which only this thread knows; missing ones are read as zeroes.
            unsafe { new.copy(place, pages.start + place, run.len()) };
        }
    }
    replaced = replaced.and_then(|()| new.finish());
    for (run, _) in taken() {
        let place = place_of(&run);
        replaced = replaced.and_then(|()| new.move_to(place, &run));
        if replaced.is_err() && put_back(uffd, pages.start + place, &run).is_err() {
            // The application's memory cannot be restored.
            std::process::abort();
        }
    }
    release_range(uffd, range);
    replaced.map(|()| kept)
}

/// Moves pages from `range` to `room`, except those that are pinned. After an error, pages that
/// were not reached are kept.
fn take_pages(
    uffd: &OwnedFd,
    range: &Range<usize>,
    room: usize,
    kept: &mut KeptPages,
) -> Result<(), Errno> {
    let (mut done, mut attempts) = (0, 0);
    let mut may_lock = true;
    while done < range.len() {
        let from = range.start + done..range.end;
        let error = match move_pages(uffd, room + done, &from) {
            Ok(bytes) => {
                (done, attempts) = (done + bytes, 0);
                continue;
            }
            Err(error) => error,
        };
        attempts += 1;
        if error == Errno::AGAIN && attempts < MOVE_ATTEMPTS {
            continue;
        }
        if error == Errno::INVAL && may_lock {
            // Pages move between two locked mappings, or two that are not.
            may_lock = false;
            let flags = rustix::mm::MlockFlags::ONFAULT;
            // SAFETY: changes no content.
            let _ = unsafe { rustix::mm::mlock_with(room as *mut c_void, range.len(), flags) };
            continue;
        }
        if error == Errno::BUSY || error == Errno::AGAIN {
            kept.keep(done / PAGE);
            (done, attempts) = (done + PAGE, 0);
            continue;
        }
        for page in done / PAGE..range.len() / PAGE {
            kept.keep(page);
        }
        return Err(error);
    }
    Ok(())
}

/// Moves pages until the first that cannot be moved; returns the bytes moved.
fn move_pages(uffd: &OwnedFd, to: usize, from: &Range<usize>) -> Result<usize, Errno> {
    let mut argument = UffdioMove {
        dst: to as u64,
        src: from.start as u64,
        len: from.len() as u64,
        mode: MOVE_DONT_WAKE | MOVE_ALLOW_HOLES,
        moved: 0,
    };
    match uffd_call::<UFFDIO_MOVE, _>(uffd, &mut argument) {
        Ok(()) => Ok(from.len()),
        Err(_) if argument.moved > 0 => Ok(argument.moved as usize),
        Err(error) => Err(error),
    }
}

/// Moves pages back to where they were.
fn put_back(uffd: &OwnedFd, from: usize, to: &Range<usize>) -> Result<(), Errno> {
    let (mut done, mut attempts) = (0, 0);
    while done < to.len() {
        match move_pages(uffd, to.start + done, &(from + done..from + to.len())) {
            Ok(bytes) => (done, attempts) = (done + bytes, 0),
            Err(Errno::AGAIN) if attempts < MOVE_ATTEMPTS => attempts += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn replace_moved(uffd: &OwnedFd, range: &Range<usize>, new: &mut NewPages) -> Result<(), Errno> {
    let (address, len) = (range.start as *mut c_void, range.len());
    let room = Room::reserve(range)?;
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    let pages = room.pages().start as *mut c_void;
    let moved = register_range(uffd, range, MODE_MISSING).and_then(|()| {
        // SAFETY: accesses to the old addresses block until the file is mapped there, so no thread
        // sees them unmapped. The room belongs to this function.
        unsafe { rustix::mm::mremap_fixed(address, len, len, flags, pages) }
    });
    let moved = match moved {
        Ok(moved) => moved,
        Err(error) => {
            release_range(uffd, range);
            // The call may have unmapped the addresses before it failed, and another thread may
            // have mapped them: leave them as they are.
            std::mem::forget(room);
            return Err(error);
        }
    };
    let mapped = check_no_pins().and_then(|()| new.replace(range, moved as usize));
    if mapped.is_err() {
        // SAFETY: puts the pages back where they were. The room stays mapped until it is dropped.
        let back = unsafe { rustix::mm::mremap_fixed(moved, len, len, flags, address) };
        if back.is_err() {
            // The application's memory cannot be restored.
            std::process::abort();
        }
    }
    release_range(uffd, range);
    mapped
}

/// Addresses to move pages to, between two inaccessible pages. Without those the kernel could merge
/// the moved pages with an adjacent mapping. If that is the mapping that they came from, which is
/// possible while no page of it has been touched (`copy_vma` in mm/vma.c), the kernel removes
/// userfaultfd from both: then accesses to the old addresses do not block, and their writes are
/// lost.
pub(super) struct Room {
    start: *mut c_void,
    len: usize,
    pages: Range<usize>,
    /// The pages were moved away. Another thread may have mapped their addresses since.
    is_moved: bool,
}

/// Size of a huge page, which is moved as a whole between places of equal alignment.
const HUGE_PAGE: usize = 2 << 20;

impl Room {
    /// Reserves addresses for the pages of `range`.
    pub fn reserve(range: &Range<usize>) -> Result<Room, Errno> {
        Self::reserve_as(range, MapFlags::PRIVATE)
    }

    /// As [`Room::reserve`], of memory with these flags.
    pub fn reserve_as(range: &Range<usize>, flags: MapFlags) -> Result<Room, Errno> {
        let len = range.len() + HUGE_PAGE + 2 * PAGE;
        // SAFETY: a new mapping, which only reserves addresses.
        let start =
            unsafe { rustix::mm::mmap_anonymous(null_mut(), len, ProtFlags::empty(), flags) }?;
        let first = start as usize + PAGE;
        let ahead = range.start.wrapping_sub(first) % HUGE_PAGE;
        let pages = first + ahead..first + ahead + range.len();
        Ok(Room {
            start,
            len,
            pages,
            is_moved: false,
        })
    }

    /// Destination of the pages.
    fn pages(&self) -> Range<usize> {
        self.pages.clone()
    }

    /// Makes the destination memory with access `prot`, of missing pages.
    pub fn make_accessible(&self, prot: ProtFlags) -> Result<Range<usize>, Errno> {
        let pages = self.pages();
        let prot = rustix::mm::MprotectFlags::from_bits_retain(prot.bits());
        let (address, len) = (pages.start as *mut c_void, pages.len());
        // SAFETY: these addresses are used only here. Unlocking has an effect after
        // mlockall(MCL_FUTURE): locked memory would be populated.
        unsafe {
            rustix::mm::munlock(address, len)?;
            rustix::mm::mprotect(address, len, prot)?;
        }
        Ok(pages)
    }

    /// Moves the pages, which are accessible, to other addresses.
    ///
    /// # Errors
    /// From mremap(2), which may have unmapped the destination.
    ///
    /// # Safety
    /// The caller may replace the mapping at `to`.
    pub unsafe fn move_away(&mut self, to: *mut c_void) -> Result<(), Errno> {
        let (from, len) = (self.pages.start as *mut c_void, self.pages.len());
        // SAFETY: the source belongs to this object, the destination to the caller.
        unsafe { rustix::mm::mremap_fixed(from, len, len, MremapFlags::MAYMOVE, to) }?;
        self.is_moved = true;
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let whole = self.start as usize..self.start as usize + self.len;
        let moved = if self.is_moved {
            self.pages.clone()
        } else {
            whole.end..whole.end
        };
        for own in [whole.start..moved.start, moved.end..whole.end] {
            if !own.is_empty() {
                // SAFETY: these addresses are used only here.
                let _ = unsafe { rustix::mm::munmap(own.start as *mut c_void, own.len()) };
            }
        }
    }
}

/// Blocks writes.
pub(super) fn protect_range(uffd: &OwnedFd, range: &Range<usize>) -> Result<(), Errno> {
    let mut argument = UffdioWriteprotect {
        range: uffd_range(range),
        mode: WRITE_PROTECT,
    };
    uffd_call::<UFFDIO_WRITEPROTECT, _>(uffd, &mut argument)
}

/// Checks that no page can be pinned. Where the frozen pages are not checked one by one, this is
/// certain only after they are frozen.
pub(super) fn check_no_pins() -> Result<(), Errno> {
    if super::pins::may_exist() {
        return Err(Errno::BUSY);
    }
    Ok(())
}

/// Fills missing pages with those at `from`, and wakes the threads that wait for them; returns the
/// bytes copied.
pub(super) fn fill_pages(uffd: &OwnedFd, from: usize, to: &Range<usize>) -> Result<usize, Errno> {
    let mut argument = UffdioCopy {
        dst: to.start as u64,
        src: from as u64,
        len: to.len() as u64,
        mode: 0,
        copied: 0,
    };
    match uffd_call::<UFFDIO_COPY, _>(uffd, &mut argument) {
        Ok(()) => Ok(to.len()),
        Err(_) if argument.copied > 0 => Ok(argument.copied as usize),
        Err(error) => Err(error),
    }
}

/// Replaces pages that no other thread can access now.
fn replace_alone(range: &Range<usize>, new: &mut NewPages) -> Result<(), Errno> {
    new.replace(range, range.start)
}

fn replace_protected(
    uffd: &OwnedFd,
    range: &Range<usize>,
    new: &mut NewPages,
) -> Result<(), Errno> {
    // Missing pages cannot be protected, so they are populated first; a thread that faults in a
    // page freed meanwhile blocks.
    let _ = populate_pages(range);
    register_range(uffd, range, MODE_MISSING | MODE_WRITE_PROTECT)?;
    let mapped = protect_range(uffd, range)
        .and_then(|()| check_no_pins())
        .and_then(|()| new.replace(range, range.start));
    release_range(uffd, range);
    mapped
}

/// Makes the first page of a range a mapping of its own if a chunk that malloc(3) of glibc has mapped
/// begins in it. realloc(3) grows such a chunk with mremap(2), and a shared mapping would grow over the
/// next pages of its file, which belong to other addresses. mremap(2) does not grow a range of two
/// mappings, so realloc(3) copies. Other memory, of which programs register thousands of parts, stays
/// one mapping.
pub(super) fn split_mapped_chunk(range: &Range<usize>) {
    if range.len() > PAGE && mapped_chunk_end(range.start).is_some() {
        let first = range.start as *mut c_void;
        // SAFETY: a hint that disables read-ahead, which a file in memory does not need.
        let _ = unsafe { rustix::mm::madvise(first, PAGE, rustix::mm::Advice::Random) };
    }
}

/// Gaps in bytes between the start of a mapping and the header of its chunk, where the block begins in
/// the same page: posix_memalign(3) aligns it to a power of two.
const GAPS: [usize; 7] = [0, 48, 112, 240, 496, 1008, 2032];

/// Size of the header of a chunk: the gap before it, and its own size.
const CHUNK_HEADER: usize = 2 * size_of::<usize>();

/// Bit in the gap of a chunk of huge pages, from glibc 2.43 on.
const HAS_HUGE_PAGES: usize = 1;

/// The end of a chunk that malloc(3) has mapped, if one begins in a page: its header has the size of the
/// gap before it, and its own size with only the bit IS_MMAPPED. From glibc 2.43 on the size is that of
/// the bytes behind the header. `page` has to be a readable page of this process.
pub(super) fn mapped_chunk_end(page: usize) -> Option<usize> {
    const WORD: usize = size_of::<usize>();
    let mut words = [0usize; GAPS[GAPS.len() - 1] / WORD + 2];
    // SAFETY: the caller has found the page mapped and readable.
    unsafe { read_words(page, &mut words) };
    GAPS.iter().find_map(|gap| {
        let [before, size] = [words[gap / WORD], words[gap / WORD + 1]];
        if before & !HAS_HUGE_PAGES != *gap || size % 16 != IS_MMAPPED {
            return None;
        }
        let end = page.checked_add(*gap)?.checked_add(size & !IS_MMAPPED)?;
        [end, end.checked_add(CHUNK_HEADER)?]
            .into_iter()
            .find(|end| end.is_multiple_of(PAGE) && *end > page)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two pages, whose first has a header at its start: `before` and `size`.
    fn chunk_end_of(before: usize, size: usize, gap: usize) -> Option<usize> {
        let len = 2 * PAGE;
        let room = Room::reserve(&(0..len)).expect("addresses");
        let pages = room
            .make_accessible(ProtFlags::READ | ProtFlags::WRITE)
            .expect("memory");
        let header = (pages.start + gap) as *mut usize;
        // SAFETY: both words are in the first page of the room.
        unsafe {
            header.write(before);
            header.add(1).write(size);
        }
        mapped_chunk_end(pages.start).map(|end| end - pages.start)
    }

    #[test]
    fn chunks_of_every_glibc_are_recognised() {
        for gap in GAPS {
            let whole = 2 * PAGE - gap;
            // Until 2.42, and from 2.43 on without and with huge pages.
            assert_eq!(chunk_end_of(gap, whole | IS_MMAPPED, gap), Some(2 * PAGE));
            let inside = (whole - CHUNK_HEADER) | IS_MMAPPED;
            assert_eq!(chunk_end_of(gap, inside, gap), Some(2 * PAGE));
            assert_eq!(
                chunk_end_of(gap | HAS_HUGE_PAGES, inside, gap),
                Some(2 * PAGE)
            );
        }
    }

    #[test]
    fn other_words_are_no_chunk() {
        let whole = (2 * PAGE) | IS_MMAPPED;
        assert_eq!(chunk_end_of(16, whole, 0), None, "another gap");
        assert_eq!(chunk_end_of(0, 2 * PAGE, 0), None, "not mapped");
        assert_eq!(chunk_end_of(0, whole + 32, 0), None, "not whole pages");
        assert_eq!(chunk_end_of(0, IS_MMAPPED, 0), None, "empty");
    }
}
