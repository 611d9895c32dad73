//! madvise(2), mlock(2), mmap(2), mremap(2), munmap(2), free(3) and realloc(3), which this library
//! overrides for all of the program: it and its allocator use them on memory that is shared with the
//! daemon ([`siw::memory_calls`]).

use crate::export::{bare_functions, c_functions};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

c_functions! {
    #[unsafe(no_mangle)]
    fn mlock(address: *const c_void, len: usize) -> c_int = lock_pages;
    #[unsafe(no_mangle)]
    fn mlock2(address: *const c_void, len: usize, flags: u32) -> c_int = lock_pages_with;
    #[unsafe(no_mangle)]
    fn mlockall(flags: c_int) -> c_int = lock_all_pages;
    #[unsafe(no_mangle)]
    fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int = change_advice;
    #[unsafe(no_mangle)]
    fn mremap(
        old: *mut c_void, len: usize, new_len: usize, flags: c_int, to: *mut c_void,
    ) -> *mut c_void = move_pages;
}

// The dynamic linker uses these before this library is ready.
bare_functions! {
    #[unsafe(no_mangle)]
    fn free(block: *mut c_void) = free_block;
    #[unsafe(no_mangle)]
    fn mmap(
        address: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64,
    ) -> *mut c_void = map_pages;
    #[unsafe(no_mangle)]
    fn mmap64(
        address: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64,
    ) -> *mut c_void = map_pages;
    #[unsafe(no_mangle)]
    fn munmap(address: *mut c_void, len: usize) -> c_int = unmap_pages;
    #[unsafe(no_mangle)]
    fn realloc(block: *mut c_void, size: usize) -> *mut c_void = resize_block;
}

/// Declares this library, and the functions above as those of the whole program, if they come first in the
/// order in which the dynamic linker looks symbols up, and the allocator is that of the C library.
pub fn declare_overridden() {
    static DECLARED: Once = Once::new();
    DECLARED.call_once(|| {
        siw::memory_calls::declare_drop_in();
        let own: [(&CStr, *const ()); 7] = [
            (c"madvise", madvise as *const ()),
            (c"mremap", mremap as *const ()),
            (c"free", free as *const ()),
            (c"mmap", mmap as *const ()),
            (c"mmap64", mmap64 as *const ()),
            (c"munmap", munmap as *const ()),
            (c"realloc", realloc as *const ()),
        ];
        let is_used = |(name, function): &(&CStr, *const ())| {
            find_symbol(libc::RTLD_DEFAULT, name).cast_const().cast() == *function
        };
        let malloc = object_of(find_symbol(libc::RTLD_DEFAULT, c"malloc"));
        let c_library = object_of(find_symbol(libc::RTLD_DEFAULT, c"gnu_get_libc_version"));
        if own.iter().all(is_used) && malloc.is_some() && malloc == c_library {
            siw::memory_calls::declare_overridden();
        }
    });
}

fn find_symbol(scope: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: a name that ends with zero.
    unsafe { libc::dlsym(scope, name.as_ptr()) }
}

/// Address at which the shared object of a symbol is loaded.
fn object_of(symbol: *mut c_void) -> Option<usize> {
    // SAFETY: an all-zero structure is valid, and the call fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: a structure to fill.
    let found = unsafe { libc::dladdr(symbol, &mut info) };
    (found != 0).then_some(info.dli_fbase as usize)
}

/// mlock(2).
unsafe fn lock_pages(address: *const c_void, len: usize) -> c_int {
    siw::memory_calls::note_lock();
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mlock, address, len) as c_int }
}

/// mlock2(2).
unsafe fn lock_pages_with(address: *const c_void, len: usize, flags: u32) -> c_int {
    siw::memory_calls::note_lock();
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mlock2, address, len, flags) as c_int }
}

/// mlockall(2).
unsafe fn lock_all_pages(flags: c_int) -> c_int {
    siw::memory_calls::note_lock();
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mlockall, flags) as c_int }
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

/// mmap(2).
unsafe fn map_pages(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let mapped = unsafe { siw::memory_calls::mmap(address as usize, len, prot, flags, fd, offset) };
    mapped as *mut c_void
}

/// munmap(2).
unsafe fn unmap_pages(address: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { siw::memory_calls::munmap(address as usize, len) }
}

type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);

/// A function of the program's allocator, that of the C library or another one.
fn next_function(name: &CStr, known: &AtomicPtr<c_void>) -> *mut c_void {
    let mut found = known.load(Ordering::Relaxed);
    if found.is_null() {
        found = find_symbol(libc::RTLD_NEXT, name);
        if found.is_null() {
            std::process::abort();
        }
        known.store(found, Ordering::Relaxed);
    }
    found
}

fn next_realloc() -> Realloc {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    // SAFETY: the function of this name.
    unsafe { std::mem::transmute::<*mut c_void, Realloc>(next_function(c"realloc", &FOUND)) }
}

fn next_free() -> Free {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    // SAFETY: the function of this name.
    unsafe { std::mem::transmute::<*mut c_void, Free>(next_function(c"free", &FOUND)) }
}

/// free(3).
unsafe fn free_block(block: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        let gives_up = !block.is_null() && siw::memory_calls::gives_up_idle(block as usize);
        next_free()(block);
        if gives_up {
            siw::memory_calls::reclaim_given_up();
        }
    }
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
