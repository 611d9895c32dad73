//! A ring under a spin lock that is taken out of use while the daemon changes it.
//!
//! Spin locks are held for nanoseconds; a call to the daemon may last as long as its timeout.
//! Therefore a thread that changes the ring marks it as paused, calls the daemon without the spin
//! lock, and installs the new ring under the lock. Other threads that lock the ring meanwhile
//! sleep.

use crate::locking::lock_unpoisoned;
use siw_shm::spin::{SpinGuard, SpinLock};
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

/// A value that many threads use briefly, and that one thread at a time may change over a long
/// time.
pub(crate) struct Pausable<T> {
    value: SpinLock<Slot<T>>,
    /// Held by the thread that changes the value.
    changing: Mutex<()>,
}

/// Contents of the spin lock.
pub(crate) struct Slot<T> {
    is_paused: bool,
    value: T,
}

impl<T> Deref for Slot<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Slot<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Pausable<T> {
    pub fn new(value: T) -> Self {
        Pausable {
            value: SpinLock::new(Slot {
                is_paused: false,
                value,
            }),
            changing: Mutex::new(()),
        }
    }

    /// Locks the value briefly; sleeps while it is being changed.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, Slot<T>> {
        let guard = self.value.lock();
        if guard.is_paused {
            return self.wait_for_change(guard);
        }
        guard
    }

    #[cold]
    fn wait_for_change<'a>(&'a self, mut guard: SpinGuard<'a, Slot<T>>) -> SpinGuard<'a, Slot<T>> {
        while guard.is_paused {
            drop(guard);
            drop(lock_unpoisoned(&self.changing));
            guard = self.value.lock();
        }
        guard
    }

    /// Blocks other threads from the value until the result is dropped, without spinning.
    pub fn pause(&self) -> Pause<'_, T> {
        let changing = lock_unpoisoned(&self.changing);
        self.value.lock().is_paused = true;
        Pause {
            of: self,
            _changing: changing,
        }
    }
}

/// See [`Pausable::pause`].
pub(crate) struct Pause<'a, T> {
    of: &'a Pausable<T>,
    _changing: MutexGuard<'a, ()>,
}

impl<T> Pause<'_, T> {
    /// Replaces or inspects the value.
    pub fn with_value<R>(&mut self, change: impl FnOnce(&mut T) -> R) -> R {
        change(&mut self.of.value.lock().value)
    }
}

impl<T> Drop for Pause<'_, T> {
    fn drop(&mut self) {
        // Cleared before `changing` is released: a thread that waits for `changing` then finds the
        // value in use again.
        self.of.value.lock().is_paused = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn users_wait_while_a_value_is_changed_and_see_the_new_one() {
        let ring = Pausable::new(1);
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            let mut pause = ring.pause();
            let user = scope.spawn(|| {
                tell.send(()).unwrap();
                **ring.lock()
            });
            told.recv().unwrap();
            pause.with_value(|value| *value = 2);
            assert!(!user.is_finished());
            pause.with_value(|value| *value = 3);
            drop(pause);
            assert_eq!(user.join().unwrap(), 3);
        });
        assert_eq!(**ring.lock(), 3);
    }

    #[test]
    fn changes_come_one_after_the_other() {
        let ring = Pausable::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let mut pause = ring.pause();
                        let seen = pause.with_value(|value| *value);
                        pause.with_value(|value| *value = seen + 1);
                        drop(pause);
                        let _ = **ring.lock();
                    }
                });
            }
        });
        assert_eq!(**ring.lock(), 2000);
    }
}
