//! madvise(2), mremap(2) and realloc(3), which this library overrides for all of the program: its
//! allocator uses them on memory that is shared with the daemon ([`siw::memory_calls`]).

use crate::export::{bare_functions, c_functions};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

c_functions! {
    #[unsafe(no_mangle)]
    fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int = change_advice;
    #[unsafe(no_mangle)]
    fn mremap(
        old: *mut c_void, len: usize, new_len: usize, flags: c_int, to: *mut c_void,
    ) -> *mut c_void = move_pages;
}

bare_functions! {
    #[unsafe(no_mangle)]
    fn realloc(block: *mut c_void, size: usize) -> *mut c_void = resize_block;
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

type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;

/// The program's realloc(3), of the C library or of another allocator.
fn next_realloc() -> Realloc {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: a name that ends with zero.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"realloc".as_ptr()) };
        if found.is_null() {
            std::process::abort();
        }
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: the function of this name.
    unsafe { std::mem::transmute::<*mut c_void, Realloc>(found) }
}

/// realloc(3).
unsafe fn resize_block(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller's promise; the new block has `size` bytes, the old one those that it allows
    // to use.
    unsafe {
        if block.is_null() || size == 0 || !siw::memory_calls::must_be_copied(block as usize) {
            return next_realloc()(block, size);
        }
        let new = libc::malloc(size);
        if !new.is_null() {
            let kept = libc::malloc_usable_size(block).min(size);
            new.cast::<u8>()
                .copy_from_nonoverlapping(block.cast(), kept);
            libc::free(block);
        }
        new
    }
}
