//! Replaces private pages by pages of a file in memory, at the same addresses, while other threads go
//! on using them: no update is lost, whoever writes.
//!
//! ```text
//! freeze   with userfaultfd(2): whoever touches the pages from now on waits
//! copy     their content into the file
//! replace  mmap(MAP_FIXED | MAP_SHARED) of the file
//! wake     who waits: it finds the new pages
//! ```
//! There are two ways to freeze. If userfaultfd may handle faults of the kernel too (as root, with
//! vm.unprivileged_userfaultfd=1, or with access to /dev/userfaultfd), mremap(2) moves the pages away,
//! and every access waits. Otherwise the pages are write-protected, so that reads go on, and a write
//! waits; but a system call of another thread that writes to the very pages fails with EFAULT in
//! these microseconds, and a thread whose stack is among them is killed if the kernel writes there.
//! So that way is taken only where memory cannot be copied instead.
//!
//! Between freeze and wake nothing of this process's memory is touched but the stack of this thread:
//! any page may be among the frozen ones, that of the allocator or of `errno`. So system calls are
//! made by rustix, which makes them directly, and nothing is allocated.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, UserfaultfdFlags};

/// Bytes that are frozen at a time: others wait as long as these take, about a millisecond.
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

const UFFD_API: u64 = 0xaa;
const GROUP: u8 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const MODE_MISSING: u64 = 1;
const MODE_WRITE_PROTECT: u64 = 2;
const WRITE_PROTECT: u64 = 1;

use rustix::ioctl::{Opcode, opcode};
const UFFDIO_API: Opcode = opcode::read_write::<UffdioApi>(GROUP, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(GROUP, 0);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<UffdioRange>(GROUP, 1);
const UFFDIO_WAKE: Opcode = opcode::read::<UffdioRange>(GROUP, 2);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(GROUP, 6);
/// `_IO(0xaa, 0)` on /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: Opcode = opcode::none(GROUP, 0);

/// How other threads are kept off pages that are being replaced.
#[derive(Debug)]
pub(super) enum Freezer {
    /// Faults of the kernel wait, too: pages are moved away.
    Move(OwnedFd),
    /// Only faults of programs wait: pages are write-protected.
    Protect(OwnedFd),
    /// There is no other thread.
    Alone,
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

/// userfaultfd(2) by the device file, whose permissions say who may handle faults of the kernel.
fn open_device() -> Result<OwnedFd, Errno> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/userfaultfd", flags, Mode::empty())?;
    /// The request whose argument is the flags of the new descriptor, and whose result it is.
    struct NewUserfaultfd;
    // SAFETY: the argument is a number; the result is a descriptor that nobody else has.
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
            // SAFETY: the kernel just made it for this call.
            Ok(unsafe { OwnedFd::from_raw_fd(out) })
        }
    }
    // SAFETY: see the implementation above.
    unsafe { rustix::ioctl::ioctl(&device, NewUserfaultfd) }
}

impl Freezer {
    /// The best way that this process may use.
    ///
    /// # Errors
    /// userfaultfd(2) is not allowed, and the process has several threads.
    pub fn open_best() -> Result<Freezer, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC;
        // SAFETY: a new descriptor, which does nothing until it is set up.
        let whole = unsafe { rustix::mm::userfaultfd(flags) }.or_else(|_| open_device());
        if let Ok(uffd) = whole {
            set_up(&uffd, 0)?;
            return Ok(Freezer::Move(uffd));
        }
        if is_only_thread() {
            return Ok(Freezer::Alone);
        }
        Self::open_for_programs()
    }

    /// Whether a system call of another thread fails that writes to the pages meanwhile.
    pub fn fails_system_calls(&self) -> bool {
        matches!(self, Freezer::Protect(_))
    }

    /// The way that needs no privilege.
    pub fn open_for_programs() -> Result<Freezer, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(1);
        // SAFETY: as in `open_best`.
        let uffd = unsafe { rustix::mm::userfaultfd(flags) }?;
        set_up(&uffd, UFFD_FEATURE_PAGEFAULT_FLAG_WP)?;
        Ok(Freezer::Protect(uffd))
    }
}

/// Whether no other thread of this process could write meanwhile.
pub(super) fn is_only_thread() -> bool {
    // One link for each thread, and two as every directory has.
    rustix::fs::stat("/proc/self/task").is_ok_and(|status| status.st_nlink == 3)
}

/// Replaces the pages of `range`, which are of one private anonymous mapping (or of one that nobody
/// can write, then with [`Freezer::Alone`]), by those of `file` at `offset`, with the same content
/// and the access `prot`. At most [`FROZEN_AT_ONCE`] bytes. The stack of this thread is not among
/// them.
///
/// # Errors
/// The operating system refuses; then everything is as before.
pub(super) fn replace_pages(
    freezer: &Freezer,
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: ProtFlags,
) -> io::Result<()> {
    // The file's pages exist before others have to wait.
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(file, flags, offset, range.len() as u64)?;
    // A handler that this thread ran would wait for this thread.
    let _blocked = BlockedSignals::block_all();
    let replaced = match freezer {
        Freezer::Move(uffd) => replace_moved(uffd, range, file, offset, prot),
        Freezer::Protect(uffd) => replace_protected(uffd, range, file, offset, prot),
        Freezer::Alone => copy_pages(range.start, range, file, offset)
            .and_then(|()| map_file(range, file, offset, prot)),
    };
    Ok(replaced?)
}

/// No signal handler runs in this thread while this exists.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn block_all() -> BlockedSignals {
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
        // SAFETY: the mask that there was before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, null_mut()) };
    }
}

fn uffd_range(range: &Range<usize>) -> UffdioRange {
    UffdioRange {
        start: range.start as u64,
        len: range.len() as u64,
    }
}

fn register_range(uffd: &OwnedFd, range: &Range<usize>, mode: u64) -> Result<(), Errno> {
    let mut argument = UffdioRegister {
        range: uffd_range(range),
        mode,
        ioctls: 0,
    };
    uffd_call::<UFFDIO_REGISTER, _>(uffd, &mut argument)
}

/// Nobody waits any more: also after a failure.
fn release_range(uffd: &OwnedFd, range: &Range<usize>) {
    let mut argument = uffd_range(range);
    // Removes protection too. Fails where the file is mapped by now.
    let _ = uffd_call::<UFFDIO_UNREGISTER, _>(uffd, &mut argument);
    let _ = uffd_call::<UFFDIO_WAKE, _>(uffd, &mut argument);
}

fn replace_moved(
    uffd: &OwnedFd,
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: ProtFlags,
) -> Result<(), Errno> {
    let (address, len) = (range.start as *mut c_void, range.len());
    let room = Room::reserve(len)?;
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    let moved = register_range(uffd, range, MODE_MISSING).and_then(|()| {
        // SAFETY: the pages stay reachable by their old addresses: until the file is mapped there,
        // faults wait. The room is of this function.
        unsafe { rustix::mm::mremap_fixed(address, len, len, flags, room.pages()) }
    });
    let moved = match moved {
        Ok(moved) => moved,
        Err(error) => {
            release_range(uffd, range);
            // The call may have unmapped the addresses before it failed, and another thread have got
            // them: they are left as they are.
            std::mem::forget(room);
            return Err(error);
        }
    };
    let mapped = copy_pages(moved as usize, range, file, offset)
        .and_then(|()| map_file(range, file, offset, prot));
    if mapped.is_err() {
        // SAFETY: puts the pages back where they were. The room stays mapped until it is dropped.
        let back = unsafe { rustix::mm::mremap_fixed(moved, len, len, flags, address) };
        if back.is_err() {
            // The application's memory cannot be given back to it.
            std::process::abort();
        }
    }
    release_range(uffd, range);
    mapped
}

/// Addresses to move pages to, between two pages that nobody can access. Without those the kernel
/// could join the moved pages to the mapping next to them. If that is the one that they came from,
/// which it may be while nothing has touched it (`copy_vma` in mm/vma.c), then userfaultfd is taken
/// off both: whoever touches the old addresses does not wait, and loses what it writes.
struct Room {
    start: *mut c_void,
    len: usize,
}

impl Room {
    fn reserve(len: usize) -> Result<Room, Errno> {
        let len = len + 2 * PAGE;
        // SAFETY: a new mapping, which only keeps addresses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        Ok(Room { start, len })
    }

    /// Where pages are moved to.
    fn pages(&self) -> *mut c_void {
        self.start.wrapping_byte_add(PAGE)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: nobody else knows these addresses.
        let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

fn replace_protected(
    uffd: &OwnedFd,
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: ProtFlags,
) -> Result<(), Errno> {
    // Pages that do not exist cannot be protected: they are made first, and whoever makes one that
    // was freed meanwhile waits.
    populate_pages(range);
    register_range(uffd, range, MODE_MISSING | MODE_WRITE_PROTECT)?;
    let mut argument = UffdioWriteprotect {
        range: uffd_range(range),
        mode: WRITE_PROTECT,
    };
    let mapped = uffd_call::<UFFDIO_WRITEPROTECT, _>(uffd, &mut argument)
        .and_then(|()| copy_pages(range.start, range, file, offset))
        .and_then(|()| map_file(range, file, offset, prot));
    release_range(uffd, range);
    mapped
}

/// Has the pages of a range exist and be writable, as far as there is memory.
pub(super) fn populate_pages(range: &Range<usize>) {
    let address = range.start as *mut c_void;
    // SAFETY: changes no content.
    let _ = unsafe {
        rustix::mm::madvise(address, range.len(), rustix::mm::Advice::LinuxPopulateWrite)
    };
}

/// Makes the last page of a range a mapping of its own. realloc(3) lets mremap(2) grow what malloc(3)
/// mapped, and a shared mapping grows over the next pages of its file, which are others' here: of two
/// mappings mremap(2) grows neither, and realloc(3) copies.
pub(super) fn end_mapping(range: &Range<usize>) {
    if range.len() > PAGE {
        let last = (range.end - PAGE) as *mut c_void;
        // SAFETY: a hint, which tells the kernel not to read ahead of a file that is memory.
        let _ = unsafe { rustix::mm::madvise(last, PAGE, rustix::mm::Advice::Random) };
    }
}

/// Copies pages at `source`, whose place is `range`, into the file: by a system call, for which a
/// page that is missing and must not be waited for is an error.
fn copy_pages(
    source: usize,
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<(), Errno> {
    const ZEROES: [u8; PAGE] = [0; PAGE];
    let mut done = 0;
    while done < range.len() {
        let left = range.len() - done;
        // SAFETY: the bytes are mapped, and nobody writes them meanwhile: they are frozen. The slice
        // is only handed to the kernel.
        let bytes = unsafe { std::slice::from_raw_parts((source + done) as *const u8, left) };
        match rustix::io::pwrite(file, bytes, offset + done as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            // Freed by the application meanwhile, and nobody can make it anew before the end.
            Err(Errno::FAULT) => {
                let page = done / PAGE * PAGE;
                rustix::io::pwrite(file, &ZEROES, offset + page as u64)?;
                done = page + PAGE;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

const PAGE: usize = siw_shm::shared_memory::PAGE;

fn map_file(
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: ProtFlags,
) -> Result<(), Errno> {
    let (address, len) = (range.start as *mut c_void, range.len());
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: replaces pages by others of the same content.
    unsafe { rustix::mm::mmap(address, len, prot, flags, file, offset) }.map(|_| ())
}
