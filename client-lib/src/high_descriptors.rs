//! Descriptors that programs do not see.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// Upper limit of [`high_number`]: the kernel's table of descriptors grows to the highest one.
const MAX_HIGH_NUMBER: u64 = 1 << 14;

/// Lowest number of descriptors that programs do not see. A program may close all its descriptors,
/// and its next files get the lowest free numbers: a doorbell written to such a number would write
/// into a file, and a request would go to a peer.
fn high_number() -> i32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let high = limit.unwrap_or(u64::MAX).min(MAX_HIGH_NUMBER) / 4 * 3;
    i32::try_from(high).unwrap_or(0)
}

/// Duplicates a descriptor to a high number, if there is one.
pub(crate) fn dup_high(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, high_number()).ok()
}

/// Moves a descriptor to a high number, or keeps it if there is none.
pub(crate) fn to_high(fd: OwnedFd) -> OwnedFd {
    dup_high(fd.as_fd()).unwrap_or(fd)
}
