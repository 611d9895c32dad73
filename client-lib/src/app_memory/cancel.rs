//! Cancellation of threads (pthread_cancel(3)).

use std::ffi::c_int;
use std::marker::PhantomData;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// Keeps a cancellation of the calling thread pending until it is dropped. Functions of the C library that
/// are cancellation points, such as open(2) and close(2), would otherwise unwind the stack: frames of Rust
/// with locks and values that are never dropped.
#[derive(Debug)]
pub struct CancelGuard {
    old: c_int,
    /// The state is that of the thread.
    _thread: PhantomData<*const ()>,
}

impl CancelGuard {
    /// Disables cancellation.
    #[inline]
    pub fn new() -> CancelGuard {
        let mut old = 0;
        // SAFETY: a number to write.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut old) };
        let _thread = PhantomData;
        CancelGuard { old, _thread }
    }
}

impl Default for CancelGuard {
    fn default() -> CancelGuard {
        CancelGuard::new()
    }
}

impl Drop for CancelGuard {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the state from before.
        unsafe { pthread_setcancelstate(self.old, std::ptr::null_mut()) };
    }
}
