//! Shared memory: a memfd that the daemon creates and the application maps, or anonymous memory for
//! tests. It is not a memory region of verbs, which is a registered part of such a mapping.
//!
//! Both processes write to it at the same time, so no `&mut [u8]` over it ever exists: access is by
//! bounds-checked raw copies and by atomic words. The daemon's queues, arenas and registered memory,
//! and all of client-lib, are built on this module.

use crate::fault_guard::GuardedMapping;
use crate::prefetch::{prefetch_line, prefetch_lines};
#[cfg(feature = "serde")]
use crate::saved::SavedMapping;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "serde")]
use rustix::fd::{AsRawFd, FromRawFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

/// The access does not lie inside the mapping or is misaligned, or the mapping is read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("access outside the shared memory")]
pub struct OutOfBounds;

/// Page size to request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PageSize {
    /// 4 KiB pages.
    Normal,
    /// 2 MiB hugetlb pages, or normal pages if none are available.
    TryHuge,
}

/// 2 MiB.
pub const HUGE_PAGE: usize = 2 << 20;
/// 4 KiB.
pub const PAGE: usize = 4096;
/// Type of the file system behind hugetlb pages (statfs(2)).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Pages are locked in memory by [`SharedMemory::own_pages`].
static LOCKS_PAGES: AtomicBool = AtomicBool::new(false);

/// From now on [`SharedMemory::own_pages`] locks pages in memory: a page that this process has accessed
/// is not swapped out any more. For a process without a limit of locked memory.
pub fn lock_owned_pages() {
    LOCKS_PAGES.store(true, Ordering::Relaxed);
}

/// A shared mapping. Holders of pointers into it keep an `Arc<SharedMemory>`.
pub struct SharedMemory {
    ptr: NonNull<u8>,
    len: usize,
    memfd: Option<OwnedFd>,
    huge: bool,
    writable: bool,
    /// Entry in the table of guarded mappings, whose faults the daemon survives.
    guard: Option<GuardedMapping>,
    /// See [`SharedMemory::io_address`].
    io_address: AtomicU64,
    /// See [`SharedMemory::own_pages`].
    owns_pages: AtomicBool,
}

// SAFETY: the mapping stays valid until drop, whichever thread drops it.
unsafe impl Send for SharedMemory {}
// SAFETY: no reference to the bytes exists. Threads and other processes access them through atomics
// and through `copy_bytes` and `fill_bytes`, for which the compiler assumes neither ordering nor
// exclusive access: racing copies may be torn, with no other consequences.
unsafe impl Sync for SharedMemory {}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMemory")
            .field("len", &self.len)
            .field("huge", &self.huge)
            .field("writable", &self.writable)
            .finish()
    }
}

impl SharedMemory {
    /// Creates a zeroed memfd of at least `len` bytes (rounded up to its page size), maps it, and
    /// seals its size. `name` shows up in /proc/*/maps. Holders of the fd that have mapped it can
    /// free its pages until [`SharedMemory::own_pages`].
    pub fn create_memfd(name: &str, len: usize, pages: PageSize) -> io::Result<SharedMemory> {
        Self::create_sealed(name, len, pages, SealFlags::empty())
    }

    /// Variant of [`SharedMemory::create_memfd`] that restricts later mappings of the fd to
    /// read-only: for the worker state page.
    pub fn create_read_only_for_others(name: &str, len: usize) -> io::Result<SharedMemory> {
        let extra = SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        Self::create_sealed(name, len, PageSize::Normal, extra)
    }

    fn create_sealed(
        name: &str,
        len: usize,
        pages: PageSize,
        extra: SealFlags,
    ) -> io::Result<SharedMemory> {
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a region needs a length",
            ));
        }
        if pages == PageSize::TryHuge
            && let Ok(memory) = Self::create_with_pages(name, len, true, extra)
        {
            return Ok(memory);
        }
        Self::create_with_pages(name, len, false, extra)
    }

    fn create_with_pages(
        name: &str,
        len: usize,
        huge: bool,
        extra: SealFlags,
    ) -> io::Result<SharedMemory> {
        let mut memory = MemoryInMaking::begin(name, len, huge, extra)?;
        memory.populate(usize::MAX)?;
        memory.finish()
    }

    /// Starts an incremental [`SharedMemory::create_memfd`], for large memory whose pages take time
    /// to allocate. Falls back to normal pages if hugepages are not supported;
    /// [`MemoryInMaking::populate`] reports when they run out.
    pub fn begin_memfd(name: &str, len: usize, pages: PageSize) -> io::Result<MemoryInMaking> {
        if pages == PageSize::TryHuge
            && let Ok(memory) = MemoryInMaking::begin(name, len, true, SealFlags::empty())
        {
            return Ok(memory);
        }
        MemoryInMaking::begin(name, len, false, SealFlags::empty())
    }

    /// Maps a received fd. Fails when the file is shorter than `min_len`. The creator of the file
    /// determines whether it can shrink or lose pages later: the daemon seals the files that it
    /// creates ([`SharedMemory::create_memfd`]), and checks those of others
    /// ([`SharedMemory::cannot_shrink`]).
    pub fn map_fd(fd: OwnedFd, min_len: usize) -> io::Result<SharedMemory> {
        Self::map_with_access(fd, min_len, true)
    }

    /// Maps a received fd for reading.
    pub fn map_read_only(fd: OwnedFd, min_len: usize) -> io::Result<SharedMemory> {
        Self::map_with_access(fd, min_len, false)
    }

    fn map_with_access(fd: OwnedFd, min_len: usize, writable: bool) -> io::Result<SharedMemory> {
        let size = rustix::fs::fstat(&fd)?.st_size;
        let len = usize::try_from(size).unwrap_or(0);
        if len < min_len || len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("shared memory has {len} bytes instead of at least {min_len}"),
            ));
        }
        let huge = rustix::fs::fstatfs(&fd).is_ok_and(|status| status.f_type == HUGETLBFS_MAGIC);
        let ptr = map_shared(fd.as_fd(), len, writable)?;
        Ok(SharedMemory {
            ptr,
            len,
            memfd: Some(fd),
            huge,
            writable,
            guard: None,
            io_address: AtomicU64::new(ptr.as_ptr() as u64),
            owns_pages: AtomicBool::new(false),
        })
    }

    /// Returns whether a file is in memory: created by memfd_create(2), or on tmpfs or hugetlbfs.
    /// Its creator cannot make calls on the file block, unlike calls on a FUSE file; this
    /// call cannot block either.
    pub fn is_memory_file(fd: BorrowedFd<'_>) -> bool {
        rustix::fs::fcntl_get_seals(fd).is_ok()
    }

    /// Page size in bytes of a file for which [`SharedMemory::is_memory_file`] is true.
    ///
    /// # Errors
    /// The operating system does not report it.
    pub fn file_page_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
        let is_huge = rustix::fs::fstatfs(fd)?.f_type == HUGETLBFS_MAGIC;
        let size = if is_huge {
            u64::try_from(rustix::fs::fstat(fd)?.st_blksize).unwrap_or(0)
        } else {
            0
        };
        Ok(size.max(PAGE as u64))
    }

    /// Maps whole pages of a foreign file for which [`SharedMemory::is_memory_file`] is true. Its
    /// creator may truncate it ([`SharedMemory::guard_for`]).
    ///
    /// # Errors
    /// The part does not consist of whole pages of the file, or the file is not open for this access.
    pub fn map_part(
        fd: OwnedFd,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> io::Result<SharedMemory> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        let status = rustix::fs::fstat(&fd)?;
        let page = Self::file_page_size(fd.as_fd())?;
        let size = u64::try_from(status.st_size)
            .unwrap_or(0)
            .next_multiple_of(page);
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= size);
        if len == 0 || !is_inside || !offset.is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(invalid(format!(
                "{len} bytes at {offset} are not whole pages of {page} bytes of a file of {size}"
            )));
        }
        let map_len = usize::try_from(len).map_err(|_| invalid("too long".into()))?;
        let prot = protection(writable);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let pointer = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_len,
                prot,
                MapFlags::SHARED,
                &fd,
                offset,
            )
        }?;
        let ptr = NonNull::new(pointer.cast())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(SharedMemory {
            ptr,
            len: map_len,
            memfd: Some(fd),
            huge: page >= HUGE_PAGE as u64,
            writable,
            guard: None,
            io_address: AtomicU64::new(ptr.as_ptr() as u64),
            owns_pages: AtomicBool::new(false),
        })
    }

    /// Maps whole pages of this memory once more, even if the file cannot be mapped for writing any
    /// more ([`SharedMemory::own_pages`]).
    ///
    /// # Errors
    /// The part does not consist of whole pages, or this memory is read-only or of hugepages.
    pub fn duplicate_part(
        &self,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> io::Result<SharedMemory> {
        let invalid = || {
            let what = format!(
                "{len} bytes at {offset} are not whole pages of {}",
                self.len
            );
            io::Error::new(io::ErrorKind::InvalidInput, what)
        };
        let (offset, len) = usize::try_from(offset)
            .ok()
            .zip(usize::try_from(len).ok())
            .filter(|(offset, len)| offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE))
            .filter(|(_, len)| *len > 0 && self.writable)
            .ok_or_else(invalid)?;
        let from = self.ptr_at(offset, len).map_err(|_| invalid())?;
        // SAFETY: duplicates a part of a shared mapping, which stays as it is (mremap(2)).
        let pointer = unsafe { rustix::mm::mremap(from.cast(), 0, len, MremapFlags::MAYMOVE) }?;
        let ptr = NonNull::new(pointer.cast())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let mut part = SharedMemory {
            ptr,
            len,
            memfd: None,
            huge: self.huge,
            writable,
            guard: None,
            io_address: AtomicU64::new(ptr.as_ptr() as u64),
            owns_pages: AtomicBool::new(self.owns_pages.load(Ordering::Relaxed)),
        };
        let memfd = self.memfd.as_ref().map(OwnedFd::try_clone);
        part.memfd = memfd.transpose()?;
        Ok(part)
    }

    /// Takes the right to free pages from all other holders of the file, which have mapped what they
    /// need of it before: existing mappings stay writable. mmap(2) makes no others, but mremap(2)
    /// duplicates existing ones ([`SharedMemory::duplicate_part`]).
    ///
    /// A page fault on a page that is being freed waits until the call that frees it ends, which
    /// takes seconds for a long range (`shmem_falloc_wait` in mm/shmem.c). The daemon therefore calls
    /// this before any worker accesses memory that a client holds, too.
    ///
    /// # Errors
    /// The file is not from [`SharedMemory::create_memfd`], another holder has sealed its seals, or
    /// hugepages have been freed: a fault might find no free one.
    pub fn own_pages(&self) -> io::Result<()> {
        // Relaxed: the seals are the kernel's; a second call would only repeat it.
        if self.owns_pages.load(Ordering::Relaxed) {
            return Ok(());
        }
        let fd = self.memfd.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::FUTURE_WRITE | SealFlags::SEAL) {
            rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        }
        if self.huge {
            // In units of 512 bytes (stat(2)).
            let allocated = rustix::fs::fstat(fd)?.st_blocks as u64 * 512;
            if allocated < self.len as u64 {
                return Err(io::Error::other("hugepages of the memory have been freed"));
            }
        }
        self.lock_pages();
        self.owns_pages.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Locks pages in memory if [`lock_owned_pages`] was called.
    fn lock_pages(&self) {
        if LOCKS_PAGES.load(Ordering::Relaxed) {
            let flags = rustix::mm::MlockFlags::ONFAULT;
            // Where the kernel refuses, pages can be swapped out as before.
            // SAFETY: changes no content of this mapping.
            let _ = unsafe { rustix::mm::mlock_with(self.ptr.as_ptr().cast(), self.len, flags) };
        }
    }

    /// The mapping as data, for the process that continues with it.
    #[cfg(feature = "serde")]
    pub(crate) fn describe_mapping(&self) -> SavedMapping {
        SavedMapping {
            address: self.start_address(),
            len: self.len,
            descriptor: self.memfd().map(|fd| fd.as_raw_fd()),
            huge: self.huge,
            writable: self.writable,
            guard_owner: self.guard.as_ref().and_then(GuardedMapping::owner),
            io_address: self.io_address(),
            owns_pages: self.owns_pages.load(Ordering::Relaxed),
        }
    }

    /// Takes over a mapping that the process already has. Guards it again, and locks its pages again
    /// ([`lock_owned_pages`]): a child does not inherit locks (fork(2)).
    ///
    /// # Errors
    /// The guard has no room for another mapping.
    ///
    /// # Safety
    ///
    /// The mapping exists as described, the descriptor is open, and both have no other owner.
    #[cfg(feature = "serde")]
    pub(crate) unsafe fn adopt(saved: &SavedMapping) -> io::Result<SharedMemory> {
        let ptr = NonNull::new(saved.address as *mut u8)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let memory = SharedMemory {
            ptr,
            len: saved.len,
            // SAFETY: open, and without another owner.
            memfd: saved
                .descriptor
                .map(|number| unsafe { OwnedFd::from_raw_fd(number) }),
            huge: saved.huge,
            writable: saved.writable,
            guard: None,
            io_address: AtomicU64::new(saved.io_address),
            owns_pages: AtomicBool::new(saved.owns_pages),
        };
        if saved.owns_pages {
            memory.lock_pages();
        }
        match saved.guard_owner {
            Some(owner) => memory.guard_for(owner),
            None => Ok(memory),
        }
    }

    /// Guards this memory, whose pages `owner` may free: if a guard is installed
    /// ([`crate::fault_guard`]), a fault on it is recorded and does not end the process.
    ///
    /// # Errors
    /// The guard has no room for another mapping.
    pub fn guard_for(mut self, owner: u64) -> io::Result<SharedMemory> {
        self.guard = GuardedMapping::enter(self.start_address(), self.len, owner)?;
        Ok(self)
    }

    /// Returns whether faults on the pages of a file for which [`SharedMemory::is_memory_file`] is true
    /// are short, whatever its holders do: none can free its pages any more
    /// ([`SharedMemory::own_pages`]).
    pub fn has_short_faults(fd: BorrowedFd<'_>) -> bool {
        let owned = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
        let has_small_pages = Self::file_page_size(fd).is_ok_and(|size| size == PAGE as u64);
        rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(owned)) && has_small_pages
    }

    /// Returns whether the file can never shrink under the mapping. The daemon checks this before it
    /// maps a file that it did not create.
    pub fn cannot_shrink(fd: BorrowedFd<'_>) -> bool {
        rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
    }

    /// Zeroed private memory without a file, for tests and in-process use.
    pub fn new_anonymous(len: usize) -> io::Result<SharedMemory> {
        let len = len.max(1).next_multiple_of(PAGE);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let pointer = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let ptr = NonNull::new(pointer.cast())
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(SharedMemory {
            ptr,
            len,
            memfd: None,
            huge: false,
            writable: true,
            guard: None,
            io_address: AtomicU64::new(ptr.as_ptr() as u64),
            owns_pages: AtomicBool::new(false),
        })
    }

    /// Address by which devices read the first byte: the address of this mapping, unless
    /// [`SharedMemory::set_io_address`] set another one.
    #[inline]
    pub fn io_address(&self) -> u64 {
        // Relaxed: set before any transmission from this memory.
        self.io_address.load(Ordering::Relaxed)
    }

    /// Sets the address that an IOMMU translates to this memory.
    pub fn set_io_address(&self, address: u64) {
        self.io_address.store(address, Ordering::Relaxed);
    }

    /// Mapped size in bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether hugetlb pages back it.
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    /// Size of a backing page in bytes.
    pub fn page_size(&self) -> usize {
        if self.huge { HUGE_PAGE } else { PAGE }
    }

    /// First byte in this process. Access through it is the caller's responsibility.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// [`SharedMemory::as_ptr`] as a number.
    #[inline]
    pub fn start_address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// Closes the memfd, for memory that is not sent to a peer: it stays mapped.
    pub fn without_descriptor(mut self) -> SharedMemory {
        self.memfd = None;
        self
    }

    /// The memfd, for sending to a peer; `None` for anonymous memory.
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.memfd.as_ref().map(AsFd::as_fd)
    }

    /// Returns a checked pointer to `len` bytes at `offset`.
    #[inline]
    pub fn ptr_at(&self, offset: usize, len: usize) -> Result<*mut u8, OutOfBounds> {
        match offset.checked_add(len) {
            // SAFETY: offset + len is at most the mapping's length, so the result is inside it or one
            // past its end.
            Some(end) if end <= self.len => Ok(unsafe { self.ptr.as_ptr().add(offset) }),
            _ => Err(OutOfBounds),
        }
    }

    #[inline]
    fn writable_ptr_at(&self, offset: usize, len: usize) -> Result<*mut u8, OutOfBounds> {
        if !self.writable {
            return Err(OutOfBounds);
        }
        self.ptr_at(offset, len)
    }

    /// Copies `src` to `offset`. A program that polls the last word sees it only with all other bytes,
    /// and may change it at once ([`copy_to_polled`]).
    #[inline]
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), OutOfBounds> {
        let dst = self.writable_ptr_at(offset, src.len())?;
        // SAFETY: `src` is readable, and `dst` is valid for the same number of writable bytes. Other
        // threads and processes may access those at the same time.
        unsafe { copy_to_polled(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Copies from `offset` into `dst`.
    #[inline]
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), OutOfBounds> {
        let src = self.ptr_at(offset, dst.len())?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { copy_bytes(src, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `offset` to `dst_off` of `dst`, which may be the same region with
    /// overlapping ranges. Only for memory without concurrent writers.
    #[inline]
    pub fn copy_to(
        &self,
        offset: usize,
        dst: &SharedMemory,
        dst_off: usize,
        len: usize,
    ) -> Result<(), OutOfBounds> {
        let source = self.ptr_at(offset, len)?;
        let destination = dst.writable_ptr_at(dst_off, len)?;
        // SAFETY: both ranges are inside live mappings; `copy` allows overlap. The caller, which
        // measures the machine's copy speed, ensures that neither range is written meanwhile.
        unsafe { std::ptr::copy(source, destination, len) };
        Ok(())
    }

    /// Zeroes `len` bytes at `offset`.
    #[inline]
    pub fn fill_zero(&self, offset: usize, len: usize) -> Result<(), OutOfBounds> {
        let destination = self.writable_ptr_at(offset, len)?;
        // SAFETY: `destination` is valid for `len` writable bytes.
        unsafe { fill_bytes(destination, 0, len) };
        Ok(())
    }

    /// Prefetches every cache line of a range, clipped to the mapping.
    #[inline]
    pub fn prefetch_range(&self, offset: usize, len: usize) {
        const LINE: usize = 64;
        const BLOCK: usize = 8 * LINE;
        let end = offset.saturating_add(len).min(self.len);
        if offset >= end {
            return;
        }
        let base = self.ptr.as_ptr();
        // Eight lines at a time, with a last block that may overlap: payload is prefetched for each
        // FPDU, and a simple loop would be half of the cost.
        let mut at = offset;
        while at + BLOCK <= end {
            prefetch_lines(base.wrapping_add(at), BLOCK / 64);
            at += BLOCK;
        }
        if at > offset {
            prefetch_lines(base.wrapping_add(end - BLOCK), BLOCK / 64);
        } else {
            while at < end {
                prefetch_line(base.wrapping_add(at));
                at += LINE;
            }
        }
    }

    /// An atomic word shared with the peer, which must be 4-aligned and inside the mapping.
    #[inline]
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, OutOfBounds> {
        if !offset.is_multiple_of(4) {
            return Err(OutOfBounds);
        }
        let pointer = self.ptr_at(offset, 4)?;
        // SAFETY: aligned, inside, and alive as long as self; every access to it by either process is
        // atomic or part of a raw copy.
        Ok(unsafe { AtomicU32::from_ptr(pointer.cast()) })
    }

    /// Variant of [`SharedMemory::atomic_u32`] for 8 bytes.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, OutOfBounds> {
        if !offset.is_multiple_of(8) {
            return Err(OutOfBounds);
        }
        let pointer = self.ptr_at(offset, 8)?;
        // SAFETY: as in `atomic_u32`.
        Ok(unsafe { AtomicU64::from_ptr(pointer.cast()) })
    }

    /// Returns whether the mapping is writable.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

/// Copies between shared memory, which may be accessed concurrently, and private memory of the
/// caller.
///
/// The call is opaque to the compiler, which can therefore assume neither that the bytes stay
/// unchanged nor that nothing else reads them, as it could with `copy_nonoverlapping`.
///
/// Why it is fast: the C library's copy uses the widest registers of the processor for short copies
/// and a string instruction for longer ones, except where that instruction is slow (`STRING_COPY_FROM`,
/// `SLOW_AHEAD`).
///
/// # Safety
///
/// `source` is readable and `destination` writable for `len` bytes, and they do not overlap.
#[inline]
pub unsafe fn copy_bytes(source: *const u8, destination: *mut u8, len: usize) {
    let ahead = destination.addr().wrapping_sub(source.addr()) % PAGE;
    if len >= STRING_COPY_FROM && (1..SLOW_AHEAD).contains(&ahead) {
        // SAFETY: the caller's promise.
        return unsafe { copy_by_blocks(source, destination, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { call_memcpy(source, destination, len) }
}

/// Length of the word that [`copy_to_polled`] stores last.
pub const POLLED_WORD: usize = size_of::<u64>();

/// As [`copy_bytes`], for memory that a program may poll, as many programs poll the target of an RDMA
/// WRITE, instead of waiting for a completion. The last word (the bytes from the last multiple of 8 on) is
/// stored after all others, and once: as soon as the program sees it, the program may read the rest and
/// clear the word for the next WRITE. The C library's copy stores 4, 8 or 16 bytes twice, and the end of
/// other lengths before bytes in front of it (`findings/memcpy-stores-short-copies-twice.sh`): a word cleared
/// between two stores would seem to be written anew.
///
/// # Safety
///
/// Same as for [`copy_bytes`].
#[inline]
pub unsafe fn copy_to_polled(source: *const u8, destination: *mut u8, len: usize) {
    let end = destination.addr().wrapping_add(len);
    if len < POLLED_WORD || !end.is_multiple_of(POLLED_WORD) {
        // SAFETY: the caller's promise.
        return unsafe { copy_to_polled_part(source, destination, len) };
    }
    let rest = len - POLLED_WORD;
    // SAFETY: the caller's promise, for both parts; the end is aligned.
    unsafe {
        if rest > 0 {
            copy_bytes(source, destination, rest);
        }
        let word = source.add(rest).cast::<u64>().read_unaligned();
        AtomicU64::from_ptr(destination.add(rest).cast()).store(word, Ordering::Release);
    }
}

/// [`copy_to_polled`] whose last word is not written as a whole: its bytes are stored in ascending order.
///
/// # Safety
///
/// Same as for [`copy_bytes`].
#[inline(never)]
unsafe fn copy_to_polled_part(source: *const u8, destination: *mut u8, len: usize) {
    let end = destination.addr().wrapping_add(len);
    let mut done = len.saturating_sub(end.wrapping_sub(1) % POLLED_WORD + 1);
    if done > 0 {
        // SAFETY: the caller's promise.
        unsafe { copy_bytes(source, destination, done) };
    }
    while done < len {
        let (left, address) = (len - done, destination.addr() + done);
        // SAFETY: the caller's promise; the address is a multiple of the length.
        done += unsafe {
            let (from, to) = (source.add(done), destination.add(done));
            if left >= 4 && address.is_multiple_of(4) {
                let part = from.cast::<u32>().read_unaligned();
                AtomicU32::from_ptr(to.cast()).store(part, Ordering::Release);
                4
            } else if left >= 2 && address.is_multiple_of(2) {
                let part = from.cast::<u16>().read_unaligned();
                AtomicU16::from_ptr(to.cast()).store(part, Ordering::Release);
                2
            } else {
                AtomicU8::from_ptr(to).store(from.read(), Ordering::Release);
                1
            }
        };
    }
}

/// Shortest copy for which the C library uses a string instruction (`rep movsb`), rounded down; glibc's
/// threshold is 2,112 bytes on AMD family 25.
const STRING_COPY_FROM: usize = 2048;

/// The string instruction is slow if the destination's position in its page is less than this many
/// bytes ahead of the source's. 8,900 bytes in the first-level cache of an AMD EPYC (family 25) take
/// 2,900 to 4,400 ns instead of 100 to 200; [`copy_by_blocks`] takes 220 to 330. In a pool of frames
/// whose sizes are multiples of 64, one frame in 64 lies like that to page-aligned payload.
const SLOW_AHEAD: usize = 32;

/// # Safety
///
/// Same as for [`copy_bytes`].
#[inline]
unsafe fn call_memcpy(source: *const u8, destination: *mut u8, len: usize) {
    // SAFETY: as the caller promises; the stack is aligned for a call, since `nostack` is not
    // specified.
    unsafe {
        core::arch::asm!(
            "call {copy}",
            copy = sym libc::memcpy,
            inout("rdi") destination => _,
            inout("rsi") source => _,
            inout("rdx") len => _,
            clobber_abi("sysv64"),
        );
    }
}

/// Copies 64 bytes at a time with SSE2, which every x86-64 processor has.
///
/// # Safety
///
/// Same as for [`copy_bytes`]; `len` is at least 64.
#[cold]
unsafe fn copy_by_blocks(source: *const u8, destination: *mut u8, len: usize) {
    let blocks = len & !63;
    // SAFETY: the offset stays below `blocks`, and the rest ends at `len`.
    unsafe {
        core::arch::asm!(
            "2:",
            "movdqu {a}, [{source} + {offset}]",
            "movdqu {b}, [{source} + {offset} + 16]",
            "movdqu {c}, [{source} + {offset} + 32]",
            "movdqu {d}, [{source} + {offset} + 48]",
            "movdqu [{destination} + {offset}], {a}",
            "movdqu [{destination} + {offset} + 16], {b}",
            "movdqu [{destination} + {offset} + 32], {c}",
            "movdqu [{destination} + {offset} + 48], {d}",
            "add {offset}, 64",
            "cmp {offset}, {blocks}",
            "jb 2b",
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            source = in(reg) source,
            destination = in(reg) destination,
            blocks = in(reg) blocks,
            offset = inout(reg) 0usize => _,
            options(nostack),
        );
        call_memcpy(source.add(blocks), destination.add(blocks), len - blocks);
    }
}

/// Fills memory that may be accessed concurrently; see [`copy_bytes`].
///
/// # Safety
///
/// `destination` is writable for `len` bytes.
#[inline]
unsafe fn fill_bytes(destination: *mut u8, value: u8, len: usize) {
    // SAFETY: as in `copy_bytes`.
    unsafe {
        core::arch::asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") destination => _,
            in("al") value,
            options(nostack, preserves_flags)
        );
    }
}

/// Shared memory under construction; see [`SharedMemory::begin_memfd`].
#[derive(Debug)]
pub struct MemoryInMaking {
    fd: OwnedFd,
    len: usize,
    populated: usize,
    huge: bool,
    extra: SealFlags,
}

impl MemoryInMaking {
    fn begin(name: &str, len: usize, huge: bool, extra: SealFlags) -> io::Result<Self> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let page = if huge { HUGE_PAGE } else { PAGE };
        let len = len
            .checked_next_multiple_of(page)
            .filter(|len| *len > 0)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let fd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&fd, len as u64)?;
        Ok(MemoryInMaking {
            fd,
            len,
            populated: 0,
            huge,
            extra,
        })
    }

    /// Returns whether hugetlb pages will back it.
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    /// Allocates the next `bytes` at most; returns true when all pages are allocated.
    ///
    /// # Errors
    /// Too few hugepages are free.
    pub fn populate(&mut self, bytes: usize) -> io::Result<bool> {
        if !self.huge {
            return Ok(true);
        }
        // Allocates the pages now: a later fault without a free page would raise SIGBUS.
        let part = (self.len - self.populated).min(bytes.max(HUGE_PAGE));
        if part > 0 {
            let flags = rustix::fs::FallocateFlags::empty();
            rustix::fs::fallocate(&self.fd, flags, self.populated as u64, part as u64)?;
            self.populated += part;
        }
        Ok(self.populated == self.len)
    }

    /// Maps the memory and seals the file.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn finish(self) -> io::Result<SharedMemory> {
        let ptr = map_shared(self.fd.as_fd(), self.len, true)?;
        let region = SharedMemory {
            ptr,
            len: self.len,
            memfd: Some(self.fd),
            huge: self.huge,
            writable: true,
            guard: None,
            io_address: AtomicU64::new(ptr.as_ptr() as u64),
            owns_pages: AtomicBool::new(false),
        };
        if let Some(fd) = &region.memfd {
            let seals = SealFlags::SHRINK | SealFlags::GROW | self.extra;
            rustix::fs::fcntl_add_seals(fd, seals)?;
        }
        Ok(region)
    }
}

fn protection(writable: bool) -> ProtFlags {
    if writable {
        ProtFlags::READ | ProtFlags::WRITE
    } else {
        ProtFlags::READ
    }
}

fn map_shared(fd: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<NonNull<u8>> {
    let prot = protection(writable);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let pointer =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
    NonNull::new(pointer.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Once this mapping is unmapped, its address may be reused by another one.
        drop(self.guard.take());
        // SAFETY: ptr and len describe our own mapping; no reference into it can exist, since
        // references borrow self.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
