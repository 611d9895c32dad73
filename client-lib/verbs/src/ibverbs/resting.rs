//! Descriptors polled by programs, after the daemon has ended. A closed pipe or socket stays
//! readable, so that a loop around poll(2) would spin; the kernel's descriptors of a removed device
//! are not readable, and reading them fails with EIO.

use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::pipe::{PipeFlags, pipe_with};

/// Replaces `fd` by a pipe without writers, under the same number and with the same O_NONBLOCK
/// setting. It is not readable as long as the returned writing end exists. Threads that sleep on
/// the old descriptor have been woken by its end; epoll(7) drops it with its last descriptor.
pub fn replace_by_quiet(fd: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let nonblocking = fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, nonblocking)?;
    // SAFETY: both numbers are descriptors held by the caller and this function; the owner of `fd`
    // still owns the descriptor with its number.
    let done = unsafe { libc::dup3(read.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) };
    if done < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(write)
}
