//! Where workers leave frames for the kernel: bounded, and it costs a system call only if the host
//! thread sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::ArrayQueue;
use dpdk::Mbuf;
use nix::sys::eventfd::{EfdFlags, EventFd};
use siw_shm::WorkerPage;
use siw_shm::doorbell::SleepFlag;

/// Frames that wait for the kernel: what it takes in a few milliseconds.
const HOST_QUEUE_DEPTH: usize = 1024;

/// Frames on their way from workers to the host thread of a device.
pub struct HostQueue {
    frames: ArrayQueue<Mbuf>,
    wake_fd: OwnedFd,
    sleep_flag: SleepFlag,
    is_stopped: AtomicBool,
}

impl HostQueue {
    /// An empty queue.
    ///
    /// # Errors
    /// The process has no memory or no descriptor left.
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

    /// Leaves a frame, or gives it back when the queue is full. [`Self::wake_if_asleep`] has to follow,
    /// once for all frames of a batch.
    #[inline]
    pub fn push(&self, frame: Mbuf) -> Result<(), Mbuf> {
        self.frames.push(frame)
    }

    /// After frames were pushed.
    #[inline]
    pub fn wake_if_asleep(&self) {
        if self.sleep_flag.must_wake() {
            self.wake();
        }
    }

    /// The thread ends as soon as it sees this.
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

    /// Before the thread sleeps; false: it must not, there is something to do.
    pub(super) fn announce_sleep(&self) -> bool {
        self.sleep_flag.announce_sleep();
        self.frames.is_empty() && !self.is_stopped()
    }

    /// After the thread slept.
    pub(super) fn announce_awake(&self) {
        self.sleep_flag.announce_awake();
        // Only this process has the descriptor: it never blocks.
        let _ = nix::unistd::read(&self.wake_fd, &mut [0; 8]);
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }
}
