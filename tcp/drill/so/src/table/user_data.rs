//! The first argument of every function, and results as system calls return them.

use std::ffi::{c_int, c_void};

use libc::ssize_t;
use siw_drill::Errno;

use crate::adapter::Adapter;

/// Set by `packetdrill_interface_init` and passed to every function: points to an [`Adapter`].
pub(super) type UserData = *mut c_void;

/// Returns the adapter behind `userdata`.
///
/// # Safety
/// `packetdrill_interface_init` set `userdata`, and `free` has not been called.
pub(super) unsafe fn adapter_of<'a>(userdata: UserData) -> &'a Adapter {
    // SAFETY: the caller vouches for it; only shared references to the adapter exist.
    unsafe { &*userdata.cast::<Adapter>() }
}

/// Sets this thread's errno and returns -1, as a failed system call does.
pub(super) fn fail_with(errno: Errno) -> c_int {
    // SAFETY: the location of this thread's errno is always writable.
    unsafe { *libc::__errno_location() = errno.0 };
    -1
}

/// Returns the result of a system call that has no value.
pub(super) fn zero_or_error(result: Result<(), Errno>) -> c_int {
    result.map_or_else(fail_with, |()| 0)
}

/// Returns the result of a system call that transfers bytes.
pub(super) fn len_or_error(result: Result<usize, Errno>) -> ssize_t {
    result.map_or_else(|errno| fail_with(errno) as ssize_t, |len| len as ssize_t)
}
