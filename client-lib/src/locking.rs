//! Locks.
//!
//! A child of fork(2) has the memory of its parent but only one of its threads. A lock that another thread
//! held at the fork is never released in the child, and the data under it may be half changed. Therefore
//! each object of this library and of the drop-in libraries uses the locks of this file, which know the
//! process that created them: in a child they refuse at once, whether they were held or not. This makes
//! the check of the process part of each access to shared state: a call cannot forget it. Ring memory and
//! descriptors, which a child shares with its parent, are only used under such a lock or after
//! [`ClientInner::check_process`](crate::context::ClientInner::check_process).

use crate::Error;
use crate::app_memory::process::process_generation;
use siw_shm::spin::{SpinGuard, SpinLock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic of another holder. For state that the handlers of fork(2) keep usable
/// in a child.
pub(crate) fn lock_unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The object belongs to the process that the calling one was forked from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inherited;

impl From<Inherited> for Error {
    /// A child has no connection to the daemon.
    fn from(_: Inherited) -> Error {
        Error::DaemonGone
    }
}

/// Ends the current call of the C interface with a failure, without the message of a panic. Only
/// [`contain_panic`](crate::contain_panic) may catch it.
#[cold]
fn end_call<T>(error: Inherited) -> T {
    std::panic::resume_unwind(Box::new(error))
}

/// Generation of the process that created an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Owner(u32);

impl Default for Owner {
    fn default() -> Owner {
        Owner(process_generation())
    }
}

impl Owner {
    #[inline]
    fn check(self) -> Result<(), Inherited> {
        if self.0 == process_generation() {
            Ok(())
        } else {
            Err(Inherited)
        }
    }
}

/// A mutex of one process, which stays usable after a panic of a holder.
#[derive(Debug, Default)]
pub struct ProcessMutex<T> {
    owner: Owner,
    mutex: Mutex<T>,
}

impl<T> ProcessMutex<T> {
    /// Creates an unlocked mutex of this process.
    pub fn new(value: T) -> ProcessMutex<T> {
        ProcessMutex {
            owner: Owner::default(),
            mutex: Mutex::new(value),
        }
    }

    /// Returns the value, also after a panic of a holder.
    pub fn into_inner(self) -> T {
        self.mutex
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the mutex.
    ///
    /// # Errors
    /// The caller is a child of the process that created it.
    pub fn lock(&self) -> Result<MutexGuard<'_, T>, Inherited> {
        self.owner.check()?;
        Ok(lock_unpoisoned(&self.mutex))
    }

    /// Waits for the mutex. In a child of the process that created it, the current call fails. For
    /// functions of the C interface.
    pub fn lock_or_end_call(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(end_call)
    }
}

/// A spin lock of one process.
pub(crate) struct ProcessSpinLock<T> {
    owner: Owner,
    lock: SpinLock<T>,
}

impl<T> ProcessSpinLock<T> {
    /// Creates an unlocked lock of this process.
    pub fn new(value: T) -> ProcessSpinLock<T> {
        ProcessSpinLock {
            owner: Owner::default(),
            lock: SpinLock::new(value),
        }
    }

    /// Spins until the lock is free.
    ///
    /// # Errors
    /// The caller is a child of the process that created it.
    #[inline]
    pub fn lock(&self) -> Result<SpinGuard<'_, T>, Inherited> {
        self.owner.check()?;
        Ok(self.lock.lock())
    }
}

/// A lock of one process that one call takes and another call releases, as polling with ibv_start_poll(3)
/// and ibv_end_poll(3).
#[derive(Debug, Default)]
pub struct BracketLock {
    owner: Owner,
    is_locked: AtomicBool,
}

impl BracketLock {
    /// Waits for the lock, and yields meanwhile. In a child of the process that created it, the current
    /// call fails.
    #[inline]
    pub fn lock_or_end_call(&self) {
        self.check_or_end_call();
        // Pairs with the Release in `unlock`.
        while self.is_locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    /// Makes the current call fail in a child of the process that created the lock, whose locking call has
    /// failed, too.
    #[inline]
    pub fn check_or_end_call(&self) {
        self.owner.check().unwrap_or_else(end_call);
    }

    /// Releases the lock.
    #[inline]
    pub fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contain_panic;

    /// A lock of the process that the calling one was forked from.
    fn inherited<T>(value: T) -> ProcessMutex<T> {
        ProcessMutex {
            owner: Owner(process_generation().wrapping_sub(1)),
            mutex: Mutex::new(value),
        }
    }

    #[test]
    fn a_lock_of_another_process_is_refused_while_another_thread_holds_it() {
        let lock = inherited(1);
        let _held = lock.mutex.lock().unwrap();
        assert_eq!(lock.lock().err(), Some(Inherited));
    }

    #[test]
    fn a_call_that_needs_a_lock_of_another_process_ends() {
        let lock = inherited(1);
        assert_eq!(contain_panic("call", || *lock.lock_or_end_call()), None);
    }

    #[test]
    fn a_lock_of_this_process_is_taken() {
        let lock = ProcessMutex::new(1);
        *lock.lock().unwrap() += 1;
        assert_eq!(*lock.lock_or_end_call(), 2);
    }
}
