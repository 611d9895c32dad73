//! A ring under a spin lock that is taken out of use while the daemon changes it.
//!
//! Spin locks are held for nanoseconds; a call to the daemon may last as long as its timeout.
//! Therefore a thread that changes the ring marks it as paused, calls the daemon without the spin
//! lock, and installs the new ring under the lock. Other threads that lock the ring meanwhile
//! sleep.

use crate::locking::{Inherited, ProcessMutex, ProcessSpinLock};
use siw_shm::spin::SpinGuard;
use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

/// A value that many threads use briefly, and that one thread at a time may change over a long
/// time.
pub(crate) struct Pausable<T> {
    value: ProcessSpinLock<Slot<T>>,
    /// Held by the thread that changes the value.
    changing: ProcessMutex<()>,
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
            value: ProcessSpinLock::new(Slot {
                is_paused: false,
                value,
            }),
            changing: ProcessMutex::default(),
        }
    }

    /// Locks the value briefly; sleeps while it is being changed.
    ///
    /// # Errors
    /// The caller is a child of the process that created it.
    #[inline]
    pub fn lock(&self) -> Result<SpinGuard<'_, Slot<T>>, Inherited> {
        let guard = self.value.lock()?;
        if guard.is_paused {
            return self.wait_for_change(guard);
        }
        Ok(guard)
    }

    #[cold]
    fn wait_for_change<'a>(
        &'a self,
        mut guard: SpinGuard<'a, Slot<T>>,
    ) -> Result<SpinGuard<'a, Slot<T>>, Inherited> {
        while guard.is_paused {
            drop(guard);
            drop(self.changing.lock()?);
            guard = self.value.lock()?;
        }
        Ok(guard)
    }

    /// Blocks other threads from the value until the result is dropped, without spinning.
    ///
    /// # Errors
    /// As [`Self::lock`].
    pub fn pause(&self) -> Result<Pause<'_, T>, Inherited> {
        let changing = self.changing.lock()?;
        self.value.lock()?.is_paused = true;
        Ok(Pause {
            of: self,
            _changing: changing,
        })
    }
}

/// See [`Pausable::pause`].
pub(crate) struct Pause<'a, T> {
    of: &'a Pausable<T>,
    _changing: MutexGuard<'a, ()>,
}

impl<T> Pause<'_, T> {
    /// Replaces or inspects the value.
    ///
    /// # Errors
    /// As [`Pausable::lock`].
    pub fn with_value<R>(&mut self, change: impl FnOnce(&mut T) -> R) -> Result<R, Inherited> {
        Ok(change(&mut self.of.value.lock()?.value))
    }
}

impl<T> Drop for Pause<'_, T> {
    fn drop(&mut self) {
        // Cleared before `changing` is released: a thread that waits for `changing` then finds the
        // value in use again.
        if let Ok(mut slot) = self.of.value.lock() {
            slot.is_paused = false;
        }
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
            let mut pause = ring.pause().unwrap();
            let user = scope.spawn(|| {
                tell.send(()).unwrap();
                **ring.lock().unwrap()
            });
            told.recv().unwrap();
            pause.with_value(|value| *value = 2).unwrap();
            assert!(!user.is_finished());
            pause.with_value(|value| *value = 3).unwrap();
            drop(pause);
            assert_eq!(user.join().unwrap(), 3);
        });
        assert_eq!(**ring.lock().unwrap(), 3);
    }

    #[test]
    fn changes_come_one_after_the_other() {
        let ring = Pausable::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let mut pause = ring.pause().unwrap();
                        let seen = pause.with_value(|value| *value).unwrap();
                        pause.with_value(|value| *value = seen + 1).unwrap();
                        drop(pause);
                        let _ = **ring.lock().unwrap();
                    }
                });
            }
        });
        assert_eq!(**ring.lock().unwrap(), 2000);
    }
}
