//! The queues between a worker and the control thread, and how each wakes the other.
//!
//! Both sides put their message into the queue first and look at the other's sleep flag then; the
//! other announces its sleep first and looks at the queue once more (see `siw_shm::doorbell`). So no
//! message waits for a sleeper.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use siw_shm::doorbell::SleepFlag;

use super::messages::{Command, Event};
use crate::datapath::forward::WorkerInbox;

/// Both directions of the queue between a worker and the control thread.
pub struct Mailbox {
    /// Control thread to worker.
    pub commands: ArrayQueue<Command>,
    /// Worker to control thread.
    pub events: ArrayQueue<Event>,
    /// Frames that other workers forward, and what wakes the worker.
    pub inbox: Arc<WorkerInbox>,
    /// Wakes the control thread; shared by all workers.
    pub control_wake: Arc<OwnedFd>,
    /// The control thread sleeps; else it looks at `events` by itself.
    pub control_asleep: Arc<SleepFlag>,
}

impl Mailbox {
    /// After something was put into one of the worker's queues.
    #[inline]
    pub fn wake_worker(&self) {
        self.inbox.wake_if_asleep();
    }

    /// After events were put into the queue.
    pub(super) fn wake_control(&self) {
        if self.control_asleep.must_wake() {
            let _ = nix::unistd::write(&*self.control_wake, &1u64.to_ne_bytes());
        }
    }
}
