//! madvise(2) and mremap(2), which this library overrides for all of the program: its allocator uses
//! them on memory that is shared with the daemon ([`siw::memory_calls`]).

use crate::export::c_functions;
use std::ffi::{c_int, c_void};

c_functions! {
    #[unsafe(no_mangle)]
    fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int = change_advice;
    #[unsafe(no_mangle)]
    fn mremap(
        old: *mut c_void, len: usize, new_len: usize, flags: c_int, to: *mut c_void,
    ) -> *mut c_void = move_pages;
}

/// madvise(2).
unsafe fn change_advice(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { siw::memory_calls::madvise(address as usize, len, advice) }
}

/// mremap(2). In C the last argument is optional, and is passed in the same way.
unsafe fn move_pages(
    old: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let moved =
        unsafe { siw::memory_calls::mremap(old as usize, len, new_len, flags, to as usize) };
    moved as *mut c_void
}
