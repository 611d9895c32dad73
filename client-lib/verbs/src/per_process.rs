//! State that a child of fork(2) does not share with its parent.
//!
//! The objects of a process belong to its connection to the daemon, whose queues and descriptors a
//! child must not use. Each static that holds such objects is a [`PerProcess`], so that a child begins
//! without them, whatever its parent has called before.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// State of one process. The parent's state stays in the child's memory unused, with locks that another
/// thread of the parent may have held.
pub struct PerProcess<T: 'static>(AtomicPtr<Stamped<T>>);

struct Stamped<T: 'static> {
    /// Generation of the process that created the state.
    generation: u32,
    /// The state of the parent.
    inherited: Option<&'static Stamped<T>>,
    state: T,
}

impl<T: Default> PerProcess<T> {
    /// Creates the state empty.
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(null_mut()))
    }

    /// Returns the state of this process.
    #[inline]
    pub fn get(&self) -> &'static T {
        let found = self.0.load(Ordering::Acquire);
        // SAFETY: NULL or a box that is never freed.
        match unsafe { found.as_ref() } {
            Some(found) if found.generation == siw::process_generation() => &found.state,
            _ => self.renew(found),
        }
    }

    /// Returns the state of this process, if there is one. Allocates nothing: allocators open, read and
    /// close files with their locks held.
    #[inline]
    pub fn find(&self) -> Option<&'static T> {
        let found = self.load()?;
        (found.generation == siw::process_generation()).then_some(&found.state)
    }

    /// Returns the state of the parent, in a child of fork(2). Its locks must not be waited for.
    pub fn inherited(&self) -> Option<&'static T> {
        let found = self.load()?;
        let inherited = match found.generation == siw::process_generation() {
            true => found.inherited?,
            false => found,
        };
        Some(&inherited.state)
    }

    fn load(&self) -> Option<&'static Stamped<T>> {
        // SAFETY: NULL or a box that is never freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Creates the state of this process, unless another thread has done so.
    #[cold]
    fn renew(&self, old: *mut Stamped<T>) -> &'static T {
        siw::watch_forks();
        let fresh = Box::into_raw(Box::new(Stamped {
            generation: siw::process_generation(),
            // SAFETY: NULL or a box that is never freed.
            inherited: unsafe { old.as_ref() },
            state: T::default(),
        }));
        let order = Ordering::AcqRel;
        match self
            .0
            .compare_exchange(old, fresh, order, Ordering::Acquire)
        {
            // SAFETY: just made, and never freed.
            Ok(_) => unsafe { &(*fresh).state },
            Err(other) => {
                // SAFETY: just made, and not shared.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: made by another thread of this process, and never freed.
                unsafe { &(*other).state }
            }
        }
    }
}
