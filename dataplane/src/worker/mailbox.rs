//! The queues between a worker and the control thread, and the wake-ups of both.
//!
//! A sender puts its message into the queue first and then reads the receiver's sleep flag; a receiver
//! announces its sleep first and then checks the queue once more (see `siw_shm::doorbell`). So no
//! message waits for a sleeping receiver.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crossbeam::queue::ArrayQueue;
use siw_shm::doorbell::SleepFlag;

use super::messages::{Command, Event};
use crate::datapath::inbox::WorkerInbox;

/// Both directions of the queue between a worker and the control thread.
pub struct Mailbox {
    /// Control thread to worker.
    pub commands: ArrayQueue<Command>,
    /// Worker to control thread.
    pub events: ArrayQueue<Event>,
    /// Set when the worker's thread ends: nothing takes commands any more.
    pub has_ended: AtomicBool,
    /// Frames that other workers forward, and the worker's wake-up descriptor.
    pub inbox: Arc<WorkerInbox>,
    /// Wakes the control thread; shared by all workers.
    pub control_wake: Arc<OwnedFd>,
    /// Set while the control thread sleeps; while it is awake, it polls `events`.
    pub control_asleep: Arc<SleepFlag>,
}

impl Mailbox {
    /// Wakes the worker after something was put into one of its queues.
    #[inline]
    pub fn wake_worker(&self) {
        self.inbox.wake_if_asleep();
    }

    /// Wakes the control thread after events were put into the queue.
    pub(super) fn wake_control(&self) {
        if self.control_asleep.must_wake() {
            let _ = nix::unistd::write(&*self.control_wake, &1u64.to_ne_bytes());
        }
    }
}
