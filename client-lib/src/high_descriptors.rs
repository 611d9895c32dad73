//! Descriptors that programs do not see.
//!
//! A program may close all its descriptors or put its files at numbers of its choice, and its next files
//! get the lowest free numbers: a doorbell written to such a number would write into a file, and a request
//! would go to a peer. Therefore the libraries keep their descriptors above the numbers that the program
//! can get by its own limit (RLIMIT_NOFILE), and above 1023, up to which programs close and duplicate by
//! habit.

use crate::app_memory::vma::MappedFileId;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ops::Deref;

/// Number from which on descriptors are kept if the program's limit is higher: the kernel's table of
/// descriptors grows to the highest one.
const HIGH: u64 = 12 << 10;
/// First number above those that programs use by habit.
const ABOVE_HABITS: u64 = 1024;
/// Room below the hard limit that is worth raising the limit for.
const ROOM: u64 = 1024;
/// Limit during [`dup_above_limit`], if the hard limit allows it.
const RAISED: u64 = 1 << 16;
/// Attempts to duplicate while other threads change the limit.
const ATTEMPTS: usize = 8;

/// Duplicates a descriptor to a high number, if there is one.
pub(crate) fn dup_high(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    for _ in 0..ATTEMPTS {
        let limits = getrlimit(Resource::Nofile);
        let soft = limits.current.unwrap_or(u64::MAX);
        if soft > HIGH {
            if let Some(high) = dup_from(fd, HIGH) {
                return Some(high);
            }
        } else if let Some(high) = dup_above_limit(fd, limits, soft.max(ABOVE_HABITS)) {
            return Some(high);
        } else if limits
            .maximum
            .is_some_and(|hard| hard < soft.max(ABOVE_HABITS) + ROOM)
        {
            // The best that is left.
            return dup_from(fd, soft / 4 * 3);
        }
    }
    None
}

fn dup_from(fd: BorrowedFd<'_>, lowest: u64) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, i32::try_from(lowest).ok()?).ok()
}

/// Duplicates to a number above the program's limit, which is raised meanwhile: it holds only for new
/// descriptors. None if the hard limit is too low, or another thread has changed the limit.
fn dup_above_limit(fd: BorrowedFd<'_>, limits: Rlimit, lowest: u64) -> Option<OwnedFd> {
    let hard = limits.maximum.unwrap_or(RAISED);
    if hard < lowest + ROOM {
        return None;
    }
    let raised = Rlimit {
        current: Some(hard.min(RAISED)),
        maximum: limits.maximum,
    };
    setrlimit(Resource::Nofile, raised).ok()?;
    let high = dup_from(fd, lowest);
    // A limit that another thread has set meanwhile stays.
    if getrlimit(Resource::Nofile) == raised {
        let _ = setrlimit(Resource::Nofile, limits);
    }
    high
}

/// Moves a descriptor to a high number, or keeps it if there is none. For each descriptor that the library
/// keeps and does not give to the program.
pub fn to_high(fd: OwnedFd) -> OwnedFd {
    dup_high(fd.as_fd()).unwrap_or(fd)
}

/// A descriptor that the library keeps. When dropped it is closed only if its number still belongs to the
/// same file: the program may have closed it, and the number may be that of a file of the program. (Files
/// without an inode of their own, such as eventfds, are not told apart from each other.)
#[derive(Debug)]
pub struct KeptDescriptor<T: AsFd = OwnedFd> {
    /// None while it is dropped.
    owner: Option<T>,
    file: MappedFileId,
}

impl KeptDescriptor<OwnedFd> {
    /// Moves a descriptor to a high number and keeps it.
    pub fn at_high_number(fd: OwnedFd) -> std::io::Result<KeptDescriptor<OwnedFd>> {
        KeptDescriptor::new(to_high(fd))
    }
}

impl<T: AsFd> KeptDescriptor<T> {
    /// Keeps a descriptor, or an object with one.
    pub fn new(owner: T) -> std::io::Result<KeptDescriptor<T>> {
        Ok(KeptDescriptor {
            file: MappedFileId::of_file(owner.as_fd())?,
            owner: Some(owner),
        })
    }

    /// Checks that the number still belongs to the same file.
    pub fn is_open(&self) -> bool {
        MappedFileId::of_file(self.as_fd()).is_ok_and(|found| found == self.file)
    }
}

impl<T: AsFd> Deref for KeptDescriptor<T> {
    type Target = T;
    fn deref(&self) -> &T {
        match &self.owner {
            Some(owner) => owner,
            None => unreachable!("the descriptor was dropped"),
        }
    }
}

impl<T: AsFd> AsFd for KeptDescriptor<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl<T: AsFd> Drop for KeptDescriptor<T> {
    fn drop(&mut self) {
        if !self.is_open() {
            std::mem::forget(self.owner.take());
        }
    }
}
