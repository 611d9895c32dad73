//! Walks of file trees that start at a path of the kernel's RDMA devices: nftw(3), ftw(3),
//! fts_open(3). The C library makes their calls internally, where they cannot be overridden, so the
//! walks start at siwd's files. nftw(3) and ftw(3) report files below the requested path;
//! fts_read(3) reports siwd's paths.

use crate::next::libc_calls::{self, Compare, Ftw, Visit, VisitWithPlace};
use crate::paths::redirect;
use libc::stat;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// A walk of this thread that was redirected.
#[derive(Clone)]
struct Walk {
    asked: CString,
    /// Length of the path where it really starts.
    real_length: usize,
    visit: Visitor,
}

#[derive(Clone, Copy)]
enum Visitor {
    Plain(Visit),
    WithPlace(VisitWithPlace),
}

thread_local! {
    /// The innermost walk is last: the callback of a walk may begin another one.
    static WALKS: RefCell<Vec<Walk>> = const { RefCell::new(Vec::new()) };
}

/// Calls the caller's function for a file, with the path that the caller expects.
unsafe fn hand_over(
    path: *const c_char,
    found: *const stat,
    kind: c_int,
    place: *mut Ftw,
) -> c_int {
    // Not borrowed while the function runs, because it may begin a walk.
    let walk = WALKS.try_with(|walks| walks.borrow().last().cloned());
    let Ok(Some(walk)) = walk else {
        return 0;
    };
    // SAFETY: nftw(3) passes a C string, which begins with the path given to it.
    let below = unsafe { &CStr::from_ptr(path).to_bytes()[walk.real_length..] };
    let Ok(named) = CString::new([walk.asked.as_bytes(), below].concat()) else {
        return 0;
    };
    // SAFETY: the contract of nftw(3); its struct lives as long as this call.
    unsafe {
        match walk.visit {
            Visitor::Plain(visit) => visit(named.as_ptr(), found, kind),
            Visitor::WithPlace(visit) => {
                let named_length = walk.asked.as_bytes().len() as c_int;
                let mut shifted = *place;
                // The first path of the walk may have another last component than the requested
                // one.
                shifted.base = if shifted.level == 0 {
                    let slash = named.as_bytes().iter().rposition(|byte| *byte == b'/');
                    slash.map_or(0, |at| at as c_int + 1)
                } else {
                    shifted.base - walk.real_length as c_int + named_length
                };
                visit(named.as_ptr(), found, kind, &mut shifted)
            }
        }
    }
}

unsafe extern "C" fn hand_over_plain(
    path: *const c_char,
    found: *const stat,
    kind: c_int,
) -> c_int {
    // SAFETY: called by ftw(3) according to its manual page.
    unsafe { hand_over(path, found, kind, std::ptr::null_mut()) }
}

unsafe extern "C" fn hand_over_place(
    path: *const c_char,
    found: *const stat,
    kind: c_int,
    place: *mut Ftw,
) -> c_int {
    // SAFETY: called by nftw(3) according to its manual page.
    unsafe { hand_over(path, found, kind, place) }
}

fn without_last_slashes(path: &CStr) -> CString {
    let mut bytes = path.to_bytes();
    while let [rest @ .., b'/'] = bytes
        && !rest.is_empty()
    {
        bytes = rest;
    }
    // Part of a C string contains no zero byte.
    CString::new(bytes).unwrap_or_default()
}

/// Runs `call` with the path in siwd's tree, and registers the walk meanwhile; None for other
/// paths.
///
/// # Safety
/// NULL or a C string.
unsafe fn walk_elsewhere(
    path: *const c_char,
    visit: Visitor,
    call: impl FnOnce(*const c_char) -> c_int,
) -> Option<c_int> {
    // SAFETY: as the caller promised.
    let (real, asked) = unsafe { (redirect(path)?, CStr::from_ptr(path)) };
    // File names as from the C library: without trailing slashes of the requested path.
    let (real, asked) = (without_last_slashes(&real), without_last_slashes(asked));
    let walk = Walk {
        asked,
        real_length: real.as_bytes().len(),
        visit,
    };
    // The variable no longer exists in functions of atexit(3): they see the kernel's tree.
    let registered = WALKS.try_with(|walks| walks.borrow_mut().push(walk));
    registered.ok()?;
    let result = call(real.as_ptr());
    let _ = WALKS.try_with(|walks| walks.borrow_mut().pop());
    Some(result)
}

/// nftw(3) and ftw(3): the 64-bit variants use the same structs.
macro_rules! walks {
    ($(fn $plain:ident = $plain_call:literal, $placed:ident = $placed_call:literal;)*) => {
        $(
            #[unsafe(export_name = $plain_call)]
            unsafe extern "C" fn $plain(path: *const c_char, visit: Visit, most: c_int) -> c_int {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    walk_elsewhere(path, Visitor::Plain(visit), |path| {
                        libc_calls::$plain(path, hand_over_plain, most)
                    })
                    .unwrap_or_else(|| libc_calls::$plain(path, visit, most))
                }
            }

            #[unsafe(export_name = $placed_call)]
            unsafe extern "C" fn $placed(
                path: *const c_char, visit: VisitWithPlace, most: c_int, flags: c_int,
            ) -> c_int {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    walk_elsewhere(path, Visitor::WithPlace(visit), |path| {
                        libc_calls::$placed(path, hand_over_place, most, flags)
                    })
                    .unwrap_or_else(|| libc_calls::$placed(path, visit, most, flags))
                }
            }
        )*
    };
}

walks! {
    fn ftw = "ftw", nftw = "nftw";
    fn ftw64 = "ftw64", nftw64 = "nftw64";
}

/// # Safety
/// The contract of fts_open(3).
unsafe fn open_walk(
    paths: *const *const c_char,
    call: impl FnOnce(*const *const c_char) -> *mut c_void,
) -> *mut c_void {
    let mut kept = Vec::new();
    let mut list = Vec::new();
    // SAFETY: an array of C strings that ends with NULL.
    unsafe {
        let mut next = paths;
        while !(*next).is_null() {
            let other = redirect(*next);
            list.push(other.as_ref().map_or(*next, |other| other.as_ptr()));
            kept.extend(other);
            next = next.add(1);
        }
    }
    if kept.is_empty() {
        return call(paths);
    }
    list.push(std::ptr::null());
    // fts_open(3) copies the paths.
    call(list.as_ptr())
}

macro_rules! opened_walks {
    ($(fn $open:ident = $call:literal;)*) => {
        $(
            #[unsafe(export_name = $call)]
            unsafe extern "C" fn $open(
                paths: *const *const c_char, options: c_int, compare: Compare,
            ) -> *mut c_void {
                // SAFETY: by the contract of the manual page.
                unsafe { open_walk(paths, |paths| libc_calls::$open(paths, options, compare)) }
            }
        )*
    };
}

opened_walks! {
    fn fts_open = "fts_open";
    fn fts64_open = "fts64_open";
}
