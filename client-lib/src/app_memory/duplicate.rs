//! Further mappings of the daemon's files.
//!
//! Before workers access a file, the daemon seals it ([`SharedMemory::own_pages`]): mmap(2) makes no
//! writable mapping any more, and write(2) and fallocate(2) no longer change its pages. mremap(2)
//! with an old length of 0 still duplicates a shared mapping with its access. Therefore each file is
//! mapped once before it is sealed, without access to its pages, and later mappings are duplicates.
//! The mapping keeps the file, so no descriptor stays open: programs close descriptors that they do not
//! know, and use their numbers anew.
//!
//! Everything here makes system calls through rustix and allocates no memory: see [`super::remap`].
//!
//! [`SharedMemory::own_pages`]: siw_shm::SharedMemory::own_pages

use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use super::process::process_generation;

/// A file of the daemon, mapped as a whole without access to its pages.
#[derive(Debug)]
pub(super) struct MappedFile {
    range: Range<usize>,
    /// A child of fork(2) does not have the mapping.
    generation: u32,
}

impl MappedFile {
    /// Maps a file of `len` bytes, which the daemon has not sealed yet.
    pub fn map(fd: &OwnedFd, len: usize) -> io::Result<MappedFile> {
        let (prot, flags) = (ProtFlags::empty(), MapFlags::SHARED);
        // SAFETY: a new mapping.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, prot, flags, fd, 0) }?;
        let file = MappedFile {
            range: start as usize..start as usize + len,
            generation: process_generation(),
        };
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: a child of fork(2) does not use these addresses.
            unsafe { rustix::mm::madvise(start, len, advice) }?;
        }
        Ok(file)
    }

    /// Checks for the mapping of the whole file, or a part of it.
    pub fn holds(&self, pages: &Range<usize>) -> bool {
        self.range.start <= pages.start && pages.end <= self.range.end
    }

    /// Allocates pages of the file and maps them once more, for reading and writing.
    ///
    /// # Errors
    /// No memory or addresses are left.
    pub fn duplicate(&self, offset: u64, len: usize) -> Result<Duplicate, Errno> {
        let from = self.range.start + offset as usize;
        let duplicate = Duplicate::of_mapping(from, len)?;
        let start = duplicate.start as *mut c_void;
        for advice in [Advice::LinuxDoFork, Advice::LinuxDoDump] {
            // SAFETY: the attributes of memory of a program.
            unsafe { rustix::mm::madvise(start, len, advice) }?;
        }
        duplicate.set_access(ProtFlags::READ | ProtFlags::WRITE)?;
        match populate_pages(&duplicate.left) {
            // Before Linux 5.14 pages are allocated when they are written.
            Ok(()) | Err(Errno::INVAL) => Ok(duplicate),
            Err(error) => Err(error),
        }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if self.generation == process_generation() {
            // SAFETY: these addresses are used only here.
            let _ =
                unsafe { rustix::mm::munmap(self.range.start as *mut c_void, self.range.len()) };
        }
    }
}

/// Populates the pages of a range for writing.
///
/// # Errors
/// Not all of them are: no memory is left, or the kernel is older than Linux 5.14 (EINVAL).
pub(super) fn populate_pages(range: &Range<usize>) -> Result<(), Errno> {
    let address = range.start as *mut c_void;
    // SAFETY: changes no content.
    unsafe { rustix::mm::madvise(address, range.len(), Advice::LinuxPopulateWrite) }
}

/// Maps the pages of a range that the file has, as far as possible.
pub(super) fn populate_pages_for_reading(range: &Range<usize>) {
    let address = range.start as *mut c_void;
    // SAFETY: changes no content.
    let _ = unsafe { rustix::mm::madvise(address, range.len(), Advice::LinuxPopulateRead) };
}

/// A further mapping of a part of a file, until its pages are moved to where they are used.
#[derive(Debug)]
pub(super) struct Duplicate {
    start: usize,
    /// Pages not moved yet. Another thread may have mapped the other addresses since.
    left: Range<usize>,
}

impl Duplicate {
    /// Maps `pages`, which are a shared mapping, once more.
    ///
    /// # Errors
    /// No memory or addresses are left.
    pub fn of_pages(pages: &Range<usize>) -> Result<Duplicate, Errno> {
        Self::of_mapping(pages.start, pages.len())
    }

    fn of_mapping(from: usize, len: usize) -> Result<Duplicate, Errno> {
        let (from, flags) = (from as *mut c_void, MremapFlags::MAYMOVE);
        // SAFETY: a new mapping; the old one stays as it is.
        let start = unsafe { rustix::mm::mremap(from, 0, len, flags) }? as usize;
        Ok(Duplicate {
            start,
            left: start..start + len,
        })
    }

    /// First byte.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Sets the access to all pages not moved yet.
    pub fn set_access(&self, prot: ProtFlags) -> Result<(), Errno> {
        let (start, prot) = (self.left.start as *mut c_void, prot.bits());
        let prot = MprotectFlags::from_bits_retain(prot);
        // SAFETY: these addresses are used only here.
        unsafe { rustix::mm::mprotect(start, self.left.len(), prot) }
    }

    /// Moves the pages from `offset` of this mapping on to `to`, in whose place they appear at once.
    /// Pages before them that were not moved are unmapped.
    ///
    /// # Errors
    /// From mremap(2), which may have unmapped the destination.
    pub fn move_to(&mut self, offset: usize, to: &Range<usize>) -> Result<(), Errno> {
        let from = self.start + offset;
        if from > self.left.start {
            let before = self.left.start as *mut c_void;
            // SAFETY: these addresses are used only here.
            unsafe { rustix::mm::munmap(before, from - self.left.start) }?;
            self.left.start = from;
        }
        let (old, len) = (from as *mut c_void, to.len());
        let (new, flags) = (to.start as *mut c_void, MremapFlags::MAYMOVE);
        // SAFETY: replaces pages by pages with the same content.
        unsafe { rustix::mm::mremap_fixed(old, len, len, flags, new) }?;
        self.left.start = from + len;
        Ok(())
    }
}

impl Drop for Duplicate {
    fn drop(&mut self) {
        if !self.left.is_empty() {
            // SAFETY: these addresses are used only here.
            let _ = unsafe { rustix::mm::munmap(self.left.start as *mut c_void, self.left.len()) };
        }
    }
}
