//! Walks of file trees that start at a path of the kernel's RDMA devices: nftw(3), ftw(3),
//! fts_open(3). The C library makes their calls internally, where they cannot be overridden, so the
//! walks start at siwd's files. nftw(3) and ftw(3) report files below the requested path;
//! fts_read(3) reports siwd's paths.

use crate::cancel::CancelGuard;
use crate::next::libc_calls::{self, Compare, Ftw, Visit, VisitWithPlace};
use crate::paths::redirect;
use libc::stat;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// A walk of this thread that was redirected. Everything that a walk owns is here: the callback may end the
/// thread (pthread_exit(3)), which unwinds the frames of the walk.
struct Walk {
    asked: CString,
    /// The path where it really starts.
    real: CString,
    visit: Visitor,
    /// The latest path given to the callback.
    named: CString,
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

/// The path that the caller expects for a file of the innermost walk, with the walk's function; the path
/// stays until the next file of that walk. Corrects the offset in `place`.
///
/// # Safety
/// A path of the C library, which begins with the path given to it.
unsafe fn rename(path: *const c_char, place: Option<&mut Ftw>) -> Option<(*const c_char, Visitor)> {
    // Not borrowed while the callback runs, because it may begin a walk.
    let renamed = WALKS.try_with(|walks| {
        let mut walks = walks.borrow_mut();
        let walk = walks.last_mut()?;
        let (asked, real_length) = (walk.asked.as_bytes(), walk.real.as_bytes().len());
        // SAFETY: as the caller promised.
        let below = unsafe { CStr::from_ptr(path) }
            .to_bytes()
            .get(real_length..)?;
        let named = [asked, below].concat();
        if let Some(place) = place {
            // The first path of the walk may have another last component than the requested one.
            place.base = if place.level == 0 {
                let slash = named.iter().rposition(|byte| *byte == b'/');
                slash.map_or(0, |at| at as c_int + 1)
            } else {
                place.base - real_length as c_int + asked.len() as c_int
            };
        }
        walk.named = CString::new(named).ok()?;
        Some((walk.named.as_ptr(), walk.visit))
    });
    renamed.ok().flatten()
}

unsafe extern "C-unwind" fn hand_over_plain(
    path: *const c_char,
    found: *const stat,
    kind: c_int,
) -> c_int {
    // SAFETY: called by ftw(3) according to its manual page.
    unsafe {
        match rename(path, None) {
            Some((named, Visitor::Plain(visit))) => visit(named, found, kind),
            _ => 0,
        }
    }
}

unsafe extern "C-unwind" fn hand_over_place(
    path: *const c_char,
    found: *const stat,
    kind: c_int,
    place: *mut Ftw,
) -> c_int {
    // SAFETY: called by nftw(3) according to its manual page; its struct lives as long as this call.
    unsafe {
        let mut shifted = *place;
        match rename(path, Some(&mut shifted)) {
            Some((named, Visitor::WithPlace(visit))) => visit(named, found, kind, &raw mut shifted),
            _ => 0,
        }
    }
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

/// Registers a walk that starts in siwd's tree, and returns where; None for other paths.
///
/// # Safety
/// NULL or a C string.
unsafe fn begin_walk(path: *const c_char, visit: Visitor) -> Option<*const c_char> {
    // SAFETY: as the caller promised.
    let (real, asked) = unsafe { (redirect(path)?, CStr::from_ptr(path)) };
    // File names as from the C library: without trailing slashes of the requested path.
    let (real, asked) = (without_last_slashes(&real), without_last_slashes(asked));
    let start = real.as_ptr();
    let walk = Walk {
        asked,
        real,
        visit,
        named: CString::default(),
    };
    // The variable no longer exists in functions of atexit(3): they see the kernel's tree.
    let registered = WALKS.try_with(|walks| walks.borrow_mut().push(walk));
    registered.ok().map(|()| start)
}

fn end_walk() {
    let _ = WALKS.try_with(|walks| walks.borrow_mut().pop());
}

/// nftw(3) and ftw(3): the 64-bit variants use the same structs.
macro_rules! walks {
    ($(fn $plain:ident = $plain_call:literal, $placed:ident = $placed_call:literal;)*) => {
        $(
            #[unsafe(export_name = $plain_call)]
            unsafe extern "C-unwind" fn $plain(
                path: *const c_char, visit: Visit, most: c_int,
            ) -> c_int {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    let Some(start) = begin_walk(path, Visitor::Plain(visit)) else {
                        return libc_calls::$plain(path, visit, most);
                    };
                    let result = libc_calls::$plain(start, hand_over_plain, most);
                    end_walk();
                    result
                }
            }

            #[unsafe(export_name = $placed_call)]
            unsafe extern "C-unwind" fn $placed(
                path: *const c_char, visit: VisitWithPlace, most: c_int, flags: c_int,
            ) -> c_int {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    let Some(start) = begin_walk(path, Visitor::WithPlace(visit)) else {
                        return libc_calls::$placed(path, visit, most, flags);
                    };
                    let result = libc_calls::$placed(start, hand_over_place, most, flags);
                    end_walk();
                    result
                }
            }
        )*
    };
}

walks! {
    fn ftw = "ftw", nftw = "nftw";
    fn ftw64 = "ftw64", nftw64 = "nftw64";
}

/// Paths of fts_open(3), with those of siwd's tree in place of the kernel's.
struct StartPaths {
    list: Vec<*const c_char>,
    /// The paths in siwd's tree.
    _kept: Vec<CString>,
}

/// None if no path is redirected.
///
/// # Safety
/// The contract of fts_open(3).
unsafe fn redirect_all(paths: *const *const c_char) -> Option<StartPaths> {
    let (mut list, mut kept) = (Vec::new(), Vec::new());
    // SAFETY: an array of C strings that ends with NULL.
    unsafe {
        let mut next = paths;
        loop {
            let path = next.read_unaligned();
            let other = redirect(path);
            list.push(other.as_ref().map_or(path, |other| other.as_ptr()));
            kept.extend(other);
            if path.is_null() {
                break;
            }
            next = next.add(1);
        }
    }
    (!kept.is_empty()).then_some(StartPaths { list, _kept: kept })
}

macro_rules! opened_walks {
    ($(fn $open:ident = $call:literal;)*) => {
        $(
            #[unsafe(export_name = $call)]
            unsafe extern "C-unwind" fn $open(
                paths: *const *const c_char, options: c_int, compare: Compare,
            ) -> *mut c_void {
                // SAFETY: by the contract of the manual page. fts_open(3) copies the paths.
                unsafe {
                    let Some(start) = redirect_all(paths) else {
                        return libc_calls::$open(paths, options, compare);
                    };
                    let _guard = CancelGuard::new();
                    libc_calls::$open(start.list.as_ptr(), options, compare)
                }
            }
        )*
    };
}

opened_walks! {
    fn fts_open = "fts_open";
    fn fts64_open = "fts64_open";
}
