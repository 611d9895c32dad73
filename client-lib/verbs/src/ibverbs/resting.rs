//! Descriptors that programs poll, once the daemon is gone. The end of a pipe or socket is readable for
//! ever, so that a loop around poll(2) would spin; the kernel's descriptors of a device that is gone
//! are not readable, and reading them fails with EIO.

use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::pipe::{PipeFlags, pipe_with};

/// Puts a pipe into which nobody writes in the place of `fd`, under the same number and with the same
/// O_NONBLOCK. It is not readable as long as the writing end lives, which is returned. Who sleeps on
/// the old one has been woken by its end; epoll(7) drops the old one with its last descriptor.
pub fn replace_by_quiet(fd: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let nonblocking = fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, nonblocking)?;
    // SAFETY: both numbers are descriptors that the caller and this function hold; the owner of `fd`
    // still owns what has its number.
    let done = unsafe { libc::dup3(read.as_raw_fd(), fd.as_raw_fd(), libc::O_CLOEXEC) };
    if done < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(write)
}
