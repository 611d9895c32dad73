//! The epoll instances that watch an rsocket, as the rsocket sees them.

use siw::ProcessMutex;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, Weak};

/// An epoll instance with rsockets.
pub trait Watcher: Send + Sync {
    /// Has a waiting thread check the descriptor.
    fn wake_for(&self, descriptor: c_int);

    /// Removes a closed descriptor.
    fn forget(&self, descriptor: c_int);
}

/// The instances that watch an rsocket.
#[derive(Default)]
pub struct Watchers {
    any: AtomicBool,
    list: ProcessMutex<Vec<(c_int, Weak<dyn Watcher>)>>,
}

impl Watchers {
    fn lock(&self) -> MutexGuard<'_, Vec<(c_int, Weak<dyn Watcher>)>> {
        self.list.lock_or_end_call()
    }

    /// Adds an instance that watches a descriptor.
    pub fn add(&self, descriptor: c_int, instance: Weak<dyn Watcher>) {
        self.any.store(true, Ordering::Release);
        self.lock().push((descriptor, instance));
    }

    /// Removes an instance that watches a descriptor no more.
    pub fn remove(&self, descriptor: c_int, instance: &Weak<dyn Watcher>) {
        self.lock().retain(|(number, watcher)| {
            *number != descriptor || !std::ptr::addr_eq(watcher.as_ptr(), instance.as_ptr())
        });
    }

    /// Wakes the instances, after events for which they may wait were taken.
    pub fn wake(&self) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        for (descriptor, instance) in self.lock().iter() {
            if let Some(instance) = instance.upgrade() {
                instance.wake_for(*descriptor);
            }
        }
    }

    /// Removes a closed descriptor.
    pub fn forget(&self, descriptor: c_int) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let watchers = std::mem::take(&mut *self.lock());
        for (number, instance) in watchers {
            match instance.upgrade() {
                Some(watcher) if number == descriptor => watcher.forget(descriptor),
                Some(_) => self.lock().push((number, instance)),
                None => {}
            }
        }
    }
}
