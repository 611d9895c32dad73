//! madvise(2), mlock(2), mmap(2), mremap(2), munmap(2), free(3) and realloc(3), which this library
//! overrides for all of the program: it and its allocator use them on memory that is shared with the
//! daemon ([`siw::memory_calls`]).

use crate::export::{bare_functions, c_functions};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Once, OnceLock};

use siw::memory_calls::{Madvise, Mmap, Mremap, Munmap};

type Free = unsafe extern "C" fn(*mut c_void);

/// Functions that come next after those of this library: the C library's, another allocator's, or another
/// override's. A program may have hooked them, so they are called instead of the kernel.
macro_rules! next_functions {
    ($(fn $name:ident = $symbol:literal: $type:ty;)*) => {
        $(
            fn $name() -> $type {
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                let mut found = FOUND.load(Ordering::Relaxed);
                if found.is_null() {
                    found = find_symbol(libc::RTLD_NEXT, $symbol);
                    if found.is_null() {
                        std::process::abort();
                    }
                    FOUND.store(found, Ordering::Relaxed);
                }
                // SAFETY: the function of this name.
                unsafe { std::mem::transmute::<*mut c_void, $type>(found) }
            }
        )*

        /// Finds all of them, when the library is loaded: a later search would wait for the dynamic
        /// linker, which may be waiting for an allocator that calls mmap(2). Nothing comes next where the
        /// program does not use the functions of this library.
        fn find_next_functions() {
            $(if !find_symbol(libc::RTLD_NEXT, $symbol).is_null() {
                $name();
            })*
        }
    };
}

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
    ) -> *mut c_void = map_pages64;
    #[unsafe(no_mangle)]
    fn munmap(address: *mut c_void, len: usize) -> c_int = unmap_pages;
    #[unsafe(no_mangle)]
    fn realloc(block: *mut c_void, size: usize) -> *mut c_void = resize_block;
}

next_functions! {
    fn next_mlock = c"mlock": unsafe extern "C" fn(*const c_void, usize) -> c_int;
    fn next_mlock2 = c"mlock2": unsafe extern "C" fn(*const c_void, usize, u32) -> c_int;
    fn next_mlockall = c"mlockall": unsafe extern "C" fn(c_int) -> c_int;
    fn next_madvise = c"madvise": Madvise;
    fn next_mremap = c"mremap": Mremap;
    fn next_free = c"free": Free;
    fn next_mmap = c"mmap": Mmap;
    fn next_mmap64 = c"mmap64": Mmap;
    fn next_munmap = c"munmap": Munmap;
    fn next_realloc = c"realloc": unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
}

/// Overridden functions whose calls idle pages depend on.
const OVERRIDDEN: [&CStr; 7] = [
    c"madvise", c"mremap", c"free", c"mmap", c"mmap64", c"munmap", c"realloc",
];

/// Functions as this library itself calls them. A hook that replaces a function in the tables of all objects
/// (global offset tables) changes the address, one that replaces the function itself its first instructions.
#[derive(PartialEq, Eq)]
struct CalledFunctions {
    addresses: [usize; OVERRIDDEN.len()],
    code: [[u8; 16]; OVERRIDDEN.len()],
}

/// [`OVERRIDDEN`] when the library was loaded.
static LOADED: OnceLock<CalledFunctions> = OnceLock::new();

impl CalledFunctions {
    fn read() -> CalledFunctions {
        let addresses = called_addresses();
        // SAFETY: the beginnings of functions, which are not shorter.
        let code = addresses.map(|address| unsafe { (address as *const [u8; 16]).read_volatile() });
        CalledFunctions { addresses, code }
    }
}

/// Notes the functions before a program has hooked any.
pub fn note_functions() {
    find_next_functions();
    LOADED.get_or_init(CalledFunctions::read);
}

fn called_addresses() -> [usize; OVERRIDDEN.len()] {
    [
        madvise as *const () as usize,
        mremap as *const () as usize,
        free as *const () as usize,
        mmap as *const () as usize,
        mmap64 as *const () as usize,
        munmap as *const () as usize,
        realloc as *const () as usize,
    ]
}

/// Declares this library, and the functions above as those of the whole program, if they come first in the
/// order in which the dynamic linker looks symbols up, no hook replaces them, and the allocator is that of
/// the C library. Called before each registration: hooks may come later.
pub fn declare_overridden() {
    static DECLARED: Once = Once::new();
    let is_hooked = LOADED.get() != Some(&CalledFunctions::read());
    DECLARED.call_once(|| {
        siw::memory_calls::declare_drop_in();
        let default = |name| find_symbol(libc::RTLD_DEFAULT, name);
        let is_used = OVERRIDDEN.map(|name| default(name) as usize) == called_addresses();
        let malloc = object_of(default(c"malloc"));
        let c_library = object_of(default(c"gnu_get_libc_version"));
        if is_used && !is_hooked && malloc.is_some() && malloc == c_library {
            siw::memory_calls::declare_overridden();
        }
    });
    if is_hooked {
        siw::memory_calls::declare_bypassed();
    }
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
    unsafe { next_mlock()(address, len) }
}

/// mlock2(2).
unsafe fn lock_pages_with(address: *const c_void, len: usize, flags: u32) -> c_int {
    siw::memory_calls::note_lock();
    // SAFETY: the caller's promise.
    unsafe { next_mlock2()(address, len, flags) }
}

/// mlockall(2).
unsafe fn lock_all_pages(flags: c_int) -> c_int {
    siw::memory_calls::note_lock();
    // SAFETY: the caller's promise.
    unsafe { next_mlockall()(flags) }
}

/// madvise(2).
unsafe fn change_advice(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { siw::memory_calls::madvise(next_madvise(), address as usize, len, advice) }
}

/// mremap(2). In C the last argument is optional, and is passed in the same way.
unsafe fn move_pages(
    old: *mut c_void,
    len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let next = next_mremap();
    // SAFETY: the caller's promise.
    let moved =
        unsafe { siw::memory_calls::mremap(next, old as usize, len, new_len, flags, to as usize) };
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
    let (next, address) = (next_mmap(), address as usize);
    // SAFETY: the caller's promise.
    let mapped = unsafe { siw::memory_calls::mmap(next, address, len, prot, flags, fd, offset) };
    mapped as *mut c_void
}

/// mmap64, by which C programs with 64-bit file offsets call mmap(2).
unsafe fn map_pages64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let (next, address) = (next_mmap64(), address as usize);
    // SAFETY: the caller's promise.
    let mapped = unsafe { siw::memory_calls::mmap(next, address, len, prot, flags, fd, offset) };
    mapped as *mut c_void
}

/// munmap(2).
unsafe fn unmap_pages(address: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { siw::memory_calls::munmap(next_munmap(), address as usize, len) }
}

/// Finds the next free(3). `None` while dlsym(3) looks for it: that of the GNU C library 2.43 releases the text of an
/// earlier error then, and looking for free(3) again would never end. The text is not released.
fn find_next_free() -> Option<Free> {
    static IS_FOUND: AtomicBool = AtomicBool::new(false);
    static IS_SEARCHING: AtomicBool = AtomicBool::new(false);
    if !IS_FOUND.load(Ordering::Relaxed) {
        if IS_SEARCHING.swap(true, Ordering::Relaxed) {
            return None;
        }
        next_free();
        IS_FOUND.store(true, Ordering::Relaxed);
        IS_SEARCHING.store(false, Ordering::Relaxed);
    }
    Some(next_free())
}

/// free(3).
unsafe fn free_block(block: *mut c_void) {
    let Some(next) = find_next_free() else {
        return;
    };
    // SAFETY: the caller's promise.
    unsafe {
        let gives_up = !block.is_null() && siw::memory_calls::gives_up_idle(block as usize);
        next(block);
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
