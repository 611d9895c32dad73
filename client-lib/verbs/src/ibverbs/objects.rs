//! The objects of a context, by the numbers in asynchronous events.

use crate::abi::{ibv_cq, ibv_qp, ibv_srq};
use siw::ProcessMutex;
use std::collections::HashMap;

/// Queue pairs, completion queues and shared receive queues of a context.
#[derive(Default)]
pub struct Objects {
    /// By QP number.
    pub qps: Table<ibv_qp>,
    /// By the daemon's id.
    pub cqs: Table<ibv_cq>,
    /// By the daemon's id.
    pub srqs: Table<ibv_srq>,
}

/// Objects by number. Each is removed before it is freed.
pub struct Table<T>(ProcessMutex<HashMap<u32, Pointer<T>>>);

struct Pointer<T>(*mut T);

// SAFETY: the objects of verbs may be used from any thread, and are in the table as long as they
// exist.
unsafe impl<T> Send for Pointer<T> {}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Table(ProcessMutex::default())
    }
}

impl<T> Table<T> {
    /// Adds an object, which gets the events with the number.
    pub fn insert(&self, number: u32, object: *mut T) {
        let mut all = self.0.lock_or_end_call();
        all.insert(number, Pointer(object));
    }

    /// Removes an object, which gets no more events.
    pub fn remove(&self, number: u32) {
        let mut all = self.0.lock_or_end_call();
        all.remove(&number);
    }

    /// Calls `with` for each object, which is not freed meanwhile.
    pub fn for_each(&self, mut with: impl FnMut(*mut T)) {
        let all = self.0.lock_or_end_call();
        for found in all.values() {
            with(found.0);
        }
    }

    /// The lowest number of an object.
    pub fn first(&self) -> Option<u32> {
        let all = self.0.lock_or_end_call();
        all.keys().copied().min()
    }

    /// Calls `with` for the object, which is not freed meanwhile.
    pub fn find<R>(&self, number: u32, with: impl FnOnce(*mut T) -> R) -> Option<R> {
        let all = self.0.lock_or_end_call();
        // `remove` takes the lock before the object is freed.
        all.get(&number).map(|found| with(found.0))
    }
}
