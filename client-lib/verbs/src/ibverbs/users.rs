//! Counts that decide whether an object may be destroyed: objects that use it (EBUSY), and events
//! that a program has taken and not acknowledged (destroying waits).

use siw::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// How many objects use another one.
#[derive(Default)]
pub struct Users(AtomicU32);

impl Users {
    /// One more.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less.
    pub fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// EBUSY while there are some.
    pub fn check_none(&self, what: &str) -> Result<(), Error> {
        // Pairs with the Release in `remove`: what the last user did is done.
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            count => Err(Error::Refused {
                errno: libc::EBUSY,
                reason: format!("{count} {what} still use it; destroy them first"),
            }),
        }
    }
}

/// Events of an object that were delivered, and acknowledged.
#[derive(Default)]
pub struct EventCount {
    unacknowledged: Mutex<u64>,
    all_acknowledged: Condvar,
}

impl EventCount {
    /// A program gets an event.
    pub fn deliver(&self) {
        *self
            .unacknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner) += 1;
    }

    /// A program acknowledges events.
    pub fn acknowledge(&self, count: u32) {
        let mut left = self
            .unacknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *left = left.saturating_sub(count.into());
        if *left == 0 {
            self.all_acknowledged.notify_all();
        }
    }

    /// Waits until all that were delivered are acknowledged. None may be delivered any more.
    pub fn wait_acknowledged(&self) {
        let mut left = self
            .unacknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while *left > 0 {
            left = self
                .all_acknowledged
                .wait(left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}
