//! A lock of state that a child of fork(2) goes on using. The crate `siw-mirror` includes this file too.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock that the forking thread holds during a fork: the child finds the state whole and the lock free.
/// It is held for moments only, and without calls of other libraries.
pub struct ForkLock<T: 'static> {
    mutex: Mutex<T>,
    /// The guard of the forking thread, made by [`Box::into_raw`].
    held: AtomicPtr<MutexGuard<'static, T>>,
}

impl<T: Default> ForkLock<T> {
    /// Creates the lock of a static, whose functions `hold` and `release` call those of this type.
    pub fn new(hold: unsafe extern "C" fn(), release: unsafe extern "C" fn()) -> ForkLock<T> {
        // SAFETY: two functions that stay valid: preloaded libraries are not unloaded.
        unsafe { libc::pthread_atfork(Some(hold), Some(release), Some(release)) };
        ForkLock {
            mutex: Mutex::default(),
            held: AtomicPtr::new(null_mut()),
        }
    }
}

impl<T> ForkLock<T> {
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock before a fork.
    pub fn hold(&'static self) {
        let guard = Box::into_raw(Box::new(self.lock()));
        self.held.store(guard, Ordering::Relaxed);
    }

    /// Releases the lock after a fork, in the parent and in the child.
    pub fn release(&self) {
        let guard = self.held.swap(null_mut(), Ordering::Relaxed);
        if !guard.is_null() {
            // SAFETY: from `hold`, which the same thread called before the fork; taken once.
            drop(unsafe { Box::from_raw(guard) });
        }
    }
}
