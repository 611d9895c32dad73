//! A spin lock of one byte for client-lib's posting and polling: verbs objects
//! are thread-safe, and nearly always used by one thread at a time.

use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, Ordering};

/// Mutual exclusion for sections of nanoseconds. Not for the daemon.
#[derive(Debug, Default)]
pub struct SpinLock<T> {
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: only the lock's holder accesses the value, one thread at a time, so the value moves between
// threads but is never shared.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// An unlocked lock around `value`.
    pub const fn new(value: T) -> Self {
        SpinLock {
            locked: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Spins, and yields the CPU when the holder seems not to be running.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        // Pairs with the Release when a guard is dropped: the last holder's writes are visible.
        if self.locked.swap(true, Ordering::Acquire) {
            self.wait_for_unlock();
        }
        SpinGuard {
            lock: self,
            value: PhantomData,
        }
    }

    #[cold]
    fn wait_for_unlock(&self) {
        let mut spins = 0u32;
        loop {
            // Relaxed: only the swap below takes the lock.
            while self.locked.load(Ordering::Relaxed) {
                spins += 1;
                if spins.is_multiple_of(128) {
                    std::thread::yield_now();
                } else {
                    core::hint::spin_loop();
                }
            }
            // Pairs as in `lock`.
            if !self.locked.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }
}

/// Unlocks when dropped. Threads may share a guard only if they may share the guarded value:
///
/// ```compile_fail
/// fn share_between_threads<T: Sync>(_: T) {}
/// let lock = siw_shm::spin::SpinLock::new(std::cell::Cell::new(0));
/// share_between_threads(lock.lock());
/// ```
pub struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    /// A guard gives out references like a `&mut T`: without this field it would be `Sync` whenever
    /// the lock is, which only needs `T: Send`.
    value: PhantomData<&'a mut T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Pairs with the Acquire swaps in `lock`.
        self.lock.locked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn increments_from_many_threads_are_not_lost() {
        let n = SpinLock::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..10_000).for_each(|_| *n.lock() += 1));
            }
        });
        assert_eq!(*n.lock(), 40_000);
    }
}
