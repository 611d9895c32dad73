//! The queue in which a worker gets frames from other threads, and the sender that uses it in place of
//! a port's queue. `forward.rs` has the rules by which frames are forwarded.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use dpdk::{Mbuf, TxBatch};
use siw_host::WorkerQueue;
use siw_net::RxChecksum;
use siw_shm::doorbell::SleepFlag;

/// Capacity of a worker's queue of forwarded frames.
const FORWARD_QUEUE_DEPTH: usize = 2048;
/// Length of a worker's queue at which the kernel's frames have to wait; the rest is for other
/// workers.
const HOST_FRAMES_LIMIT: usize = FORWARD_QUEUE_DEPTH / 4;

/// Purpose of a forwarded frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForwardPurpose {
    /// Received for a connection of this worker.
    Receive(RxChecksum),
    /// Copy of a frame that concerns all workers.
    Overhear(RxChecksum),
    /// Ready to be sent through this worker's queue.
    Send,
    /// Likewise, sent by the kernel's stack.
    SendForHost,
}

/// A frame on its way between workers.
pub(super) struct ForwardedFrame {
    pub(super) device: usize,
    pub(super) purpose: ForwardPurpose,
    pub(super) mbuf: Mbuf,
}

/// Queue in which other workers leave frames for one worker, and the worker's wake-up.
pub struct WorkerInbox {
    pub(super) frames: ArrayQueue<ForwardedFrame>,
    wake_fd: OwnedFd,
    sleep_flag: SleepFlag,
}

impl WorkerInbox {
    /// `wake_fd`: the event descriptor that the worker sleeps on; `sleep_flag`: set while it sleeps.
    pub fn new(wake_fd: OwnedFd, sleep_flag: SleepFlag) -> WorkerInbox {
        WorkerInbox {
            frames: ArrayQueue::new(FORWARD_QUEUE_DEPTH),
            wake_fd,
            sleep_flag,
        }
    }

    /// Wakes the worker after something was put into one of its queues; a system call only if it
    /// sleeps.
    #[inline]
    pub fn wake_if_asleep(&self) {
        if self.sleep_flag.must_wake() {
            self.wake_always();
        }
    }

    /// Wakes the worker regardless of its sleep flag.
    pub fn wake_always(&self) {
        let _ = nix::unistd::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    /// The event descriptor that the worker sleeps on.
    pub fn wake_fd(&self) -> &OwnedFd {
        &self.wake_fd
    }

    /// True if no frame waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

impl WorkerQueue for WorkerInbox {
    fn has_room_for_host(&self) -> bool {
        self.frames.len() < HOST_FRAMES_LIMIT
    }

    fn push_for_host(&self, device: usize, mbuf: Mbuf) -> Result<(), Mbuf> {
        let frame = ForwardedFrame {
            device,
            purpose: ForwardPurpose::SendForHost,
            mbuf,
        };
        self.frames.push(frame).map_err(|frame| frame.mbuf)
    }

    fn wake_if_asleep(&self) {
        WorkerInbox::wake_if_asleep(self);
    }
}

/// Transmit path of a worker that has no queue of a port: another worker sends for it.
pub struct ProxyTx {
    /// Index of the port's device.
    pub device: usize,
    /// Inbox of the worker that sends.
    pub inbox: Arc<WorkerInbox>,
}

impl ProxyTx {
    /// Hands over frames from the front of `batch` and returns their number. The rest stays.
    pub(super) fn transmit_batch(&self, batch: &mut TxBatch) -> usize {
        let mut sent = 0;
        while !self.inbox.frames.is_full() {
            let Some(mbuf) = batch.pop() else { break };
            let frame = ForwardedFrame {
                device: self.device,
                purpose: ForwardPurpose::Send,
                mbuf,
            };
            // Another worker may have taken the last slot: then the frame is lost, and TCP retransmits
            // it.
            let _ = self.inbox.frames.push(frame);
            sent += 1;
        }
        if sent > 0 {
            self.inbox.wake_if_asleep();
        }
        sent
    }
}
