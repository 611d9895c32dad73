//! Counts that decide whether an object may be destroyed: objects that use it (EBUSY), and events
//! delivered to the program but not acknowledged (destroying waits).

use siw::{Error, ProcessMutex};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, PoisonError};

/// Number of objects that use another one.
#[derive(Default)]
pub struct Users(AtomicU32);

impl Users {
    /// Adds a user.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a user.
    pub fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Fails with EBUSY while there are users.
    pub fn check_none(&self, what: &str) -> Result<(), Error> {
        // Pairs with the Release in `remove`: the last user's accesses are complete.
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            count => Err(Error::Refused {
                errno: libc::EBUSY,
                reason: format!("{count} {what} still use it; destroy them first"),
            }),
        }
    }
}

/// Count of delivered events that are not acknowledged.
#[derive(Default)]
pub struct EventCount {
    unacknowledged: ProcessMutex<u64>,
    all_acknowledged: Condvar,
}

impl EventCount {
    /// Counts an event delivered to the program.
    pub fn deliver(&self) {
        *self.unacknowledged.lock_or_end_call() += 1;
    }

    /// Counts events acknowledged by the program.
    pub fn acknowledge(&self, count: u32) {
        let mut left = self.unacknowledged.lock_or_end_call();
        *left = left.saturating_sub(count.into());
        if *left == 0 {
            self.all_acknowledged.notify_all();
        }
    }

    /// Waits until all delivered events are acknowledged. No further ones may be delivered.
    pub fn wait_acknowledged(&self) {
        let mut left = self.unacknowledged.lock_or_end_call();
        while *left > 0 {
            left = self
                .all_acknowledged
                .wait(left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}
