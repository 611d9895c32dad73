//! Replaces private pages by pages of a file in memory, at the same addresses, while other threads
//! go on using them. No write is lost.
//!
//! ```text
//! freeze   with userfaultfd(2): from now on any access to the pages blocks
//! copy     their content into the file
//! replace  mmap(MAP_FIXED | MAP_SHARED) of the file
//! wake     blocked threads, which find the new pages
//! ```
//! There are two ways to freeze. If userfaultfd may handle faults of the kernel too (as root, with
//! vm.unprivileged_userfaultfd=1, or with access to /dev/userfaultfd), mremap(2) moves the pages
//! away, and every access blocks. Otherwise the pages are write-protected: reads continue, and
//! writes block. But during these microseconds a system call of another thread that writes to these
//! pages fails with EFAULT, and a thread whose stack is among them is killed if the kernel writes
//! to it. Therefore the second way is taken only if the memory cannot be copied instead.
//!
//! Between freeze and wake this thread must not access any memory of the process except its own
//! stack: any page may be frozen, including those of the allocator or of `errno`. Therefore system
//! calls go through rustix, which makes them directly, and no memory is allocated.

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags, UserfaultfdFlags};

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

/// Method of blocking other threads from pages that are being replaced.
#[derive(Debug)]
pub(super) enum Freezer {
    /// Faults of the kernel block, too: pages are moved away.
    Move(OwnedFd),
    /// Only faults of user code block: pages are write-protected.
    Protect(OwnedFd),
    /// The process has no other thread.
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

impl Freezer {
    /// Opens the best method available to this process.
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

    /// Checks whether system calls of other threads that write to the pages fail meanwhile.
    pub fn fails_system_calls(&self) -> bool {
        matches!(self, Freezer::Protect(_))
    }

    /// Opens the method that needs no privilege.
    pub fn open_for_programs() -> Result<Freezer, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(1);
        // SAFETY: as in `open_best`.
        let uffd = unsafe { rustix::mm::userfaultfd(flags) }?;
        set_up(&uffd, UFFD_FEATURE_PAGEFAULT_FLAG_WP)?;
        Ok(Freezer::Protect(uffd))
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
/// be in it.
///
/// # Errors
/// The operating system refuses; then nothing has changed.
pub(super) fn replace_pages(
    freezer: &Freezer,
    range: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    prot: ProtFlags,
) -> io::Result<()> {
    // Allocate the file's pages before other threads block.
    let flags = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(file, flags, offset, range.len() as u64)?;
    // A signal handler in this thread that touched a frozen page would deadlock.
    let _blocked = BlockedSignals::block_all();
    let replaced = match freezer {
        Freezer::Move(uffd) => replace_moved(uffd, range, file, offset, prot),
        Freezer::Protect(uffd) => replace_protected(uffd, range, file, offset, prot),
        Freezer::Alone => copy_pages(range.start, range, file, offset)
            .and_then(|()| map_file(range, file, offset, prot)),
    };
    Ok(replaced?)
}

/// Blocks signal handlers in this thread while it exists.
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

fn register_range(uffd: &OwnedFd, range: &Range<usize>, mode: u64) -> Result<(), Errno> {
    let mut argument = UffdioRegister {
        range: uffd_range(range),
        mode,
        ioctls: 0,
    };
    uffd_call::<UFFDIO_REGISTER, _>(uffd, &mut argument)
}

/// Wakes all blocked threads, also after a failure.
fn release_range(uffd: &OwnedFd, range: &Range<usize>) {
    let mut argument = uffd_range(range);
    // Also removes the protection. Fails if the file is already mapped.
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
        // SAFETY: accesses to the old addresses block until the file is mapped there, so no thread
        // sees them unmapped. The room belongs to this function.
        unsafe { rustix::mm::mremap_fixed(address, len, len, flags, room.pages()) }
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
    let mapped = copy_pages(moved as usize, range, file, offset)
        .and_then(|()| map_file(range, file, offset, prot));
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
struct Room {
    start: *mut c_void,
    len: usize,
}

impl Room {
    fn reserve(len: usize) -> Result<Room, Errno> {
        let len = len + 2 * PAGE;
        // SAFETY: a new mapping, which only reserves addresses.
        let start = unsafe {
            rustix::mm::mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        Ok(Room { start, len })
    }

    /// Destination of the pages.
    fn pages(&self) -> *mut c_void {
        self.start.wrapping_byte_add(PAGE)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: these addresses are used only here.
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
    // Missing pages cannot be protected, so they are populated first; a thread that faults in a
    // page freed meanwhile blocks.
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

/// Populates the pages of a range for writing, as far as there is memory.
pub(super) fn populate_pages(range: &Range<usize>) {
    let address = range.start as *mut c_void;
    // SAFETY: changes no content.
    let _ = unsafe {
        rustix::mm::madvise(address, range.len(), rustix::mm::Advice::LinuxPopulateWrite)
    };
}

/// Makes the last page of a range a mapping of its own. realloc(3) grows memory mapped by malloc(3)
/// with mremap(2), and a shared mapping would grow over the next pages of its file, which here
/// belong to other addresses. mremap(2) does not grow a range of two mappings, so realloc(3)
/// copies.
pub(super) fn end_mapping(range: &Range<usize>) {
    if range.len() > PAGE {
        let last = (range.end - PAGE) as *mut c_void;
        // SAFETY: a hint that disables read-ahead, which a file in memory does not need.
        let _ = unsafe { rustix::mm::madvise(last, PAGE, rustix::mm::Advice::Random) };
    }
}

/// Copies pages at `source`, which are to appear at `range`, into the file, by a system call: on a
/// missing page that it must not wait for, it fails instead of blocking.
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
        // SAFETY: the bytes are mapped, and no thread writes them meanwhile because they are
        // frozen. The slice is only handed to the kernel.
        let bytes = unsafe { std::slice::from_raw_parts((source + done) as *const u8, left) };
        match rustix::io::pwrite(file, bytes, offset + done as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            // The application freed the page meanwhile, and it cannot be populated again before the
            // end.
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
    // SAFETY: replaces pages by pages with the same content.
    unsafe { rustix::mm::mmap(address, len, prot, flags, file, offset) }.map(|_| ())
}
