//! Bounded queue of frames from workers for the kernel. A push needs a system call only if the host
//! thread sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::ArrayQueue;
use dpdk::Mbuf;
use nix::sys::eventfd::{EfdFlags, EventFd};
use siw_shm::WorkerPage;
use siw_shm::doorbell::SleepFlag;

/// Capacity in frames, which the kernel takes in a few milliseconds.
const HOST_QUEUE_DEPTH: usize = 1024;

/// Queue of frames from workers to the host thread of a device.
pub struct HostQueue {
    frames: ArrayQueue<Mbuf>,
    wake_fd: OwnedFd,
    sleep_flag: SleepFlag,
    is_stopped: AtomicBool,
}

impl HostQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// The process has no memory or descriptor left.
    pub fn new() -> io::Result<HostQueue> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let no_flag = || io::Error::from(io::ErrorKind::OutOfMemory);
        Ok(HostQueue {
            frames: ArrayQueue::new(HOST_QUEUE_DEPTH),
            wake_fd: EventFd::from_value_and_flags(0, flags)?.into(),
            sleep_flag: WorkerPage::create_sealed(1)?
                .sleep_flag(0)
                .ok_or_else(no_flag)?,
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Queues a frame, or returns it if the queue is full. [`Self::wake_if_asleep`] must follow,
    /// once per batch.
    #[inline]
    pub fn push(&self, frame: Mbuf) -> Result<(), Mbuf> {
        self.frames.push(frame)
    }

    /// Wakes the host thread if it sleeps; to be called after frames were pushed.
    #[inline]
    pub fn wake_if_asleep(&self) {
        if self.sleep_flag.must_wake() {
            self.wake();
        }
    }

    /// Requests the end of the host thread.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let _ = nix::unistd::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    pub(super) fn pop(&self) -> Option<Mbuf> {
        self.frames.pop()
    }

    /// Announces that the thread will sleep. Returns false if there is work, and it must not sleep.
    pub(super) fn announce_sleep(&self) -> bool {
        self.sleep_flag.announce_sleep();
        self.frames.is_empty() && !self.is_stopped()
    }

    /// Announces that the thread is awake.
    pub(super) fn announce_awake(&self) {
        self.sleep_flag.announce_awake();
        // Never blocks: the eventfd is non-blocking.
        let _ = nix::unistd::read(&self.wake_fd, &mut [0; 8]);
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }
}
