//! Descriptors of events that programs poll. Each is an epoll instance with its sources, such as the
//! daemon's socket: like the kernel's descriptors of events it is never writable, and programs that wait
//! for both do not spin.

use crate::mark::Mark;
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use std::ffi::c_int;
use std::mem::ManuallyDrop;

/// A descriptor that is readable while one of its sources is.
pub struct EventDescriptor {
    epoll: ManuallyDrop<OwnedFd>,
    /// Mark of the open file: the program can close the number and give it to another file.
    mark: Mark,
}

fn add(epoll: &OwnedFd, source: BorrowedFd<'_>) -> Result<(), Errno> {
    let data = epoll::EventData::new_u64(0);
    epoll::add(epoll, source, data, epoll::EventFlags::IN)
}

impl EventDescriptor {
    /// Creates the descriptor of `sources`, which the program may set to O_NONBLOCK.
    pub fn new(sources: &[BorrowedFd<'_>]) -> std::io::Result<EventDescriptor> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for source in sources {
            add(&epoll, *source)?;
        }
        let mark = Mark::next();
        mark.set(epoll.as_raw_fd());
        let epoll = ManuallyDrop::new(epoll);
        Ok(EventDescriptor { epoll, mark })
    }

    /// Adds a source.
    ///
    /// # Errors
    /// EBADF: the program has closed the descriptor.
    pub fn add_source(&self, source: BorrowedFd<'_>) -> Result<(), Errno> {
        self.check_open()?;
        add(&self.epoll, source)
    }

    /// Its number.
    pub fn number(&self) -> c_int {
        self.epoll.as_raw_fd()
    }

    /// Checks that the number still belongs to this descriptor.
    ///
    /// # Errors
    /// EBADF: the program has closed it.
    pub fn check_open(&self) -> Result<(), Errno> {
        if Mark::of(self.number()) == Some(self.mark) {
            Ok(())
        } else {
            Err(Errno::BADF)
        }
    }

    /// True if the program has set O_NONBLOCK.
    pub fn is_nonblocking(&self) -> bool {
        fcntl_getfl(&*self.epoll).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }

    /// Removes a source, after which it no longer makes the descriptor readable. The socket of a daemon that has ended stays readable, so
    /// that a loop around poll(2) would spin; the kernel's descriptors of a removed device are not
    /// readable, and reading them fails with EIO. In a child of fork(2) it would change the parent's.
    pub fn silence(&self, source: BorrowedFd<'_>) {
        // It fails if that was done before.
        if self.check_open().is_ok() {
            let _ = epoll::delete(&*self.epoll, source);
        }
    }
}

impl Drop for EventDescriptor {
    fn drop(&mut self) {
        if self.check_open().is_ok() {
            // SAFETY: dropped once; the object is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.epoll) };
        }
    }
}

impl AsFd for EventDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
