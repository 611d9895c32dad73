//! Redirects paths of the kernel's RDMA devices to the files that siwd writes:
//! /sys/class/infiniband and its siblings, /dev/infiniband. All other paths are passed to the C
//! library unchanged, after a check of their first bytes.

use crate::cancel::CancelGuard;
use crate::next::libc_calls::{self, dirent, dirent64};
use crate::next::verbs;
use libc::{FILE, c_uint, mode_t, size_t, ssize_t, stat, stat64, statx};
use std::ffi::{CStr, CString, c_char, c_int, c_void};

const CLASS: &[u8] = b"/sys/class/infiniband";
const DEVICES: &[u8] = b"/dev/infiniband";

/// Part of a redirected path below siwd's tree; None for other paths.
fn rest_in_tree(path: &[u8]) -> Option<&[u8]> {
    if let Some(after) = path.strip_prefix(CLASS) {
        // Includes infiniband_verbs, infiniband_mad and others, even if the tree lacks them.
        let is_class = matches!(after.first(), None | Some(b'/' | b'_'));
        return is_class.then(|| &path[b"/sys".len()..]);
    }
    let after = path.strip_prefix(DEVICES)?;
    matches!(after.first(), None | Some(b'/')).then_some(path)
}

/// Path in siwd's tree that replaces a path of the kernel; None for other paths, and without a
/// tree.
///
/// # Safety
/// NULL or a C string.
#[inline]
pub unsafe fn redirect(path: *const c_char) -> Option<CString> {
    // SAFETY: as the caller promised; the byte after a nonzero one may be read.
    unsafe {
        if path.is_null() || path.read() != b'/' as c_char {
            return None;
        }
        let is_candidate = matches!(path.add(1).read() as u8, b's' | b'd');
        if !is_candidate {
            return None;
        }
        redirect_candidate(CStr::from_ptr(path))
    }
}

fn redirect_candidate(path: &CStr) -> Option<CString> {
    let rest = rest_in_tree(path.to_bytes())?;
    // SAFETY: no arguments; NULL or a C string that is never freed.
    let tree = unsafe {
        let tree = verbs::sysfs_tree();
        (!tree.is_null()).then(|| CStr::from_ptr(tree))?
    };
    CString::new([tree.to_bytes(), rest].concat()).ok()
}

/// Exports calls of the C library, with redirected paths.
macro_rules! calls_with_path {
    ($(fn $function:ident = $call:literal ($($before:ident: $before_type:ty,)* @path
        $(, $after:ident: $after_type:ty)* $(,)?) -> $result:ty;)*) => {
        $(
            #[unsafe(export_name = $call)]
            unsafe extern "C-unwind" fn $function(
                $($before: $before_type,)* path: *const c_char $(, $after: $after_type)*
            ) -> $result {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    let Some(other) = redirect(path) else {
                        return libc_calls::$function($($before,)* path $(, $after)*);
                    };
                    let _guard = CancelGuard::new();
                    let path = other.as_ptr();
                    libc_calls::$function($($before,)* path $(, $after)*)
                }
            }
        )*
    };
}

// The third argument of open(2) exists only with O_CREAT; otherwise the register holds any value,
// and the C library ignores it.
calls_with_path! {
    fn open = "open" (@path, flags: c_int, mode: mode_t) -> c_int;
    fn open64 = "open64" (@path, flags: c_int, mode: mode_t) -> c_int;
    fn open_2 = "__open_2" (@path, flags: c_int) -> c_int;
    fn open64_2 = "__open64_2" (@path, flags: c_int) -> c_int;
    fn openat = "openat" (dir: c_int, @path, flags: c_int, mode: mode_t) -> c_int;
    fn openat64 = "openat64" (dir: c_int, @path, flags: c_int, mode: mode_t) -> c_int;
    fn openat_2 = "__openat_2" (dir: c_int, @path, flags: c_int) -> c_int;
    fn openat64_2 = "__openat64_2" (dir: c_int, @path, flags: c_int) -> c_int;
    fn fopen = "fopen" (@path, mode: *const c_char) -> *mut FILE;
    fn fopen64 = "fopen64" (@path, mode: *const c_char) -> *mut FILE;
    fn stat_of = "stat" (@path, found: *mut stat) -> c_int;
    fn stat64_of = "stat64" (@path, found: *mut stat64) -> c_int;
    fn lstat = "lstat" (@path, found: *mut stat) -> c_int;
    fn lstat64 = "lstat64" (@path, found: *mut stat64) -> c_int;
    fn fstatat = "fstatat" (dir: c_int, @path, found: *mut stat, flags: c_int) -> c_int;
    fn fstatat64 = "fstatat64" (dir: c_int, @path, found: *mut stat64, flags: c_int) -> c_int;
    fn statx_of = "statx" (
        dir: c_int, @path, flags: c_int, mask: c_uint, found: *mut statx,
    ) -> c_int;
    // Functions called by programs compiled for glibc before 2.33.
    fn xstat = "__xstat" (version: c_int, @path, found: *mut stat) -> c_int;
    fn xstat64 = "__xstat64" (version: c_int, @path, found: *mut stat64) -> c_int;
    fn lxstat = "__lxstat" (version: c_int, @path, found: *mut stat) -> c_int;
    fn lxstat64 = "__lxstat64" (version: c_int, @path, found: *mut stat64) -> c_int;
    fn fxstatat = "__fxstatat" (
        version: c_int, dir: c_int, @path, found: *mut stat, flags: c_int,
    ) -> c_int;
    fn fxstatat64 = "__fxstatat64" (
        version: c_int, dir: c_int, @path, found: *mut stat64, flags: c_int,
    ) -> c_int;
    fn access = "access" (@path, mode: c_int) -> c_int;
    fn faccessat = "faccessat" (dir: c_int, @path, mode: c_int, flags: c_int) -> c_int;
    fn euidaccess = "euidaccess" (@path, mode: c_int) -> c_int;
    fn opendir = "opendir" (@path) -> *mut libc::DIR;
    fn scandir = "scandir" (
        @path, list: *mut *mut *mut dirent, filter: usize, compare: usize,
    ) -> c_int;
    fn scandir64 = "scandir64" (
        @path, list: *mut *mut *mut dirent64, filter: usize, compare: usize,
    ) -> c_int;
    fn readlink = "readlink" (@path, target: *mut c_char, size: size_t) -> ssize_t;
    fn readlink_chk = "__readlink_chk" (
        @path, target: *mut c_char, size: size_t, room: size_t,
    ) -> ssize_t;
    fn readlinkat = "readlinkat" (
        dir: c_int, @path, target: *mut c_char, size: size_t,
    ) -> ssize_t;
    fn readlinkat_chk = "__readlinkat_chk" (
        dir: c_int, @path, target: *mut c_char, size: size_t, room: size_t,
    ) -> ssize_t;
    fn realpath = "realpath" (@path, resolved: *mut c_char) -> *mut c_char;
    fn realpath_chk = "__realpath_chk" (
        @path, resolved: *mut c_char, room: size_t,
    ) -> *mut c_char;
    fn canonicalize = "canonicalize_file_name" (@path) -> *mut c_char;
    fn chdir = "chdir" (@path) -> c_int;
    fn statfs_of = "statfs" (@path, found: *mut libc::statfs) -> c_int;
    fn statfs64_of = "statfs64" (@path, found: *mut libc::statfs64) -> c_int;
    fn statvfs_of = "statvfs" (@path, found: *mut libc::statvfs) -> c_int;
    fn statvfs64_of = "statvfs64" (@path, found: *mut libc::statvfs64) -> c_int;
}

/// `glob_t` of glob.h; that of glob64(3) is the same on 64 bits.
#[repr(C)]
struct Glob {
    pathc: size_t,
    pathv: *mut *mut c_char,
    offs: size_t,
    flags: c_int,
    closedir: unsafe extern "C" fn(*mut libc::DIR) -> c_int,
    readdir: unsafe extern "C" fn(*mut libc::DIR) -> *mut dirent64,
    opendir: unsafe extern "C-unwind" fn(*const c_char) -> *mut libc::DIR,
    lstat: unsafe extern "C-unwind" fn(*const c_char, *mut stat64) -> c_int,
    stat: unsafe extern "C-unwind" fn(*const c_char, *mut stat64) -> c_int,
}

/// The functions in the struct are to be used. The crate libc lacks this flag.
const GLOB_ALTDIRFUNC: c_int = 1 << 9;

/// Makes glob(3) use the calls of this module instead of its internal ones; the paths that it finds
/// begin as the pattern does.
///
/// # Safety
/// The contract of glob(3).
unsafe fn find_paths(
    pattern: *const c_char,
    flags: c_int,
    found: *mut c_void,
    call: impl FnOnce(c_int) -> c_int,
) -> c_int {
    // SAFETY: as the caller promised.
    let is_ours = flags & GLOB_ALTDIRFUNC == 0 && unsafe { redirect(pattern) }.is_some();
    if !is_ours {
        return call(flags);
    }
    let glob = found.cast::<Glob>();
    // SAFETY: the caller's struct; these fields are only used with the flag.
    unsafe {
        (&raw mut (*glob).closedir).write_unaligned(libc::closedir);
        (&raw mut (*glob).readdir).write_unaligned(libc::readdir64);
        (&raw mut (*glob).opendir).write_unaligned(opendir);
        (&raw mut (*glob).lstat).write_unaligned(lstat64);
        (&raw mut (*glob).stat).write_unaligned(stat64_of);
    }
    let result = call(flags | GLOB_ALTDIRFUNC);
    // SAFETY: as above; the flags are written by the call.
    unsafe {
        let flags = &raw mut (*glob).flags;
        flags.write_unaligned(flags.read_unaligned() & !GLOB_ALTDIRFUNC);
    }
    result
}

#[unsafe(export_name = "glob")]
unsafe extern "C-unwind" fn glob_paths(
    pattern: *const c_char,
    flags: c_int,
    on_error: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        find_paths(pattern, flags, found, |flags| {
            libc_calls::glob_paths(pattern, flags, on_error, found)
        })
    }
}

#[unsafe(export_name = "glob64")]
unsafe extern "C-unwind" fn glob64_paths(
    pattern: *const c_char,
    flags: c_int,
    on_error: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        find_paths(pattern, flags, found, |flags| {
            libc_calls::glob64_paths(pattern, flags, on_error, found)
        })
    }
}
