//! Functions looked up by name: those of the C library that this library overrides, and the
//! function of the drop-in library that lists addresses.

use crate::imports::{imported_functions, missing};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Functions of the C library.
pub mod libc_calls {
    use super::*;
    use libc::{DIR, FILE, ifaddrs, mode_t, msghdr, size_t, sockaddr, socklen_t, ssize_t, statx};
    pub use libc::{dirent, dirent64, stat, stat64, statfs, statfs64, statvfs, statvfs64};
    use std::ffi::{c_char, c_int, c_uint, c_ulong};
    use std::ptr::null_mut;

    /// `struct FTW` of ftw.h: offset of the last component of the path, and its depth.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct Ftw {
        pub base: c_int,
        pub level: c_int,
    }
    /// Callback of ftw(3).
    pub type Visit = unsafe extern "C-unwind" fn(*const c_char, *const stat, c_int) -> c_int;
    /// Callback of nftw(3).
    pub type VisitWithPlace =
        unsafe extern "C-unwind" fn(*const c_char, *const stat, c_int, *mut Ftw) -> c_int;
    /// Comparison function of fts_open(3); may be NULL.
    pub type Compare =
        Option<unsafe extern "C-unwind" fn(*mut *const c_void, *mut *const c_void) -> c_int>;

    imported_functions! { libc::RTLD_NEXT;
        fn socket = c"socket" (domain: c_int, kind: c_int, protocol: c_int) -> c_int;
        fn send = c"send" (
            fd: c_int, from: *const c_void, length: usize, flags: c_int,
        ) -> isize;
        fn recv = c"recv" (fd: c_int, to: *mut c_void, length: usize, flags: c_int) -> isize;
        fn recvfrom = c"recvfrom" (
            fd: c_int, to: *mut c_void, length: usize, flags: c_int, addr: *mut sockaddr,
            addr_length: *mut socklen_t,
        ) -> isize;
        fn recvmsg = c"recvmsg" (fd: c_int, message: *mut msghdr, flags: c_int) -> isize;
        fn bind = c"bind" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn connect = c"connect" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn sendto = c"sendto" (
            fd: c_int, from: *const c_void, length: usize, flags: c_int, addr: *const sockaddr,
            addr_length: socklen_t,
        ) -> isize;
        fn sendmsg = c"sendmsg" (fd: c_int, message: *const msghdr, flags: c_int) -> isize;
        fn getifaddrs = c"getifaddrs" (list: *mut *mut ifaddrs) -> c_int;
        fn freeifaddrs = c"freeifaddrs" (list: *mut ifaddrs) -> ();
        fn ioctl = c"ioctl" (fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
        fn if_nametoindex = c"if_nametoindex" (name: *const c_char) -> c_uint;
        fn if_indextoname = c"if_indextoname" (index: c_uint, name: *mut c_char) -> *mut c_char;
        fn open = c"open" (path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        fn open64 = c"open64" (path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
        fn open_2 = c"__open_2" (path: *const c_char, flags: c_int) -> c_int;
        fn open64_2 = c"__open64_2" (path: *const c_char, flags: c_int) -> c_int;
        fn openat = c"openat" (
            dir: c_int, path: *const c_char, flags: c_int, mode: mode_t,
        ) -> c_int;
        fn openat64 = c"openat64" (
            dir: c_int, path: *const c_char, flags: c_int, mode: mode_t,
        ) -> c_int;
        fn openat_2 = c"__openat_2" (dir: c_int, path: *const c_char, flags: c_int) -> c_int;
        fn openat64_2 = c"__openat64_2" (dir: c_int, path: *const c_char, flags: c_int) -> c_int;
        fn fopen = c"fopen" (path: *const c_char, mode: *const c_char) -> *mut FILE;
        fn fopen64 = c"fopen64" (path: *const c_char, mode: *const c_char) -> *mut FILE;
        fn stat_of = c"stat" (path: *const c_char, found: *mut stat) -> c_int;
        fn stat64_of = c"stat64" (path: *const c_char, found: *mut stat64) -> c_int;
        fn lstat = c"lstat" (path: *const c_char, found: *mut stat) -> c_int;
        fn lstat64 = c"lstat64" (path: *const c_char, found: *mut stat64) -> c_int;
        fn fstatat = c"fstatat" (
            dir: c_int, path: *const c_char, found: *mut stat, flags: c_int,
        ) -> c_int;
        fn fstatat64 = c"fstatat64" (
            dir: c_int, path: *const c_char, found: *mut stat64, flags: c_int,
        ) -> c_int;
        fn statx_of = c"statx" (
            dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, found: *mut statx,
        ) -> c_int;
        fn xstat = c"__xstat" (version: c_int, path: *const c_char, found: *mut stat) -> c_int;
        fn xstat64 = c"__xstat64" (
            version: c_int, path: *const c_char, found: *mut stat64,
        ) -> c_int;
        fn lxstat = c"__lxstat" (version: c_int, path: *const c_char, found: *mut stat) -> c_int;
        fn lxstat64 = c"__lxstat64" (
            version: c_int, path: *const c_char, found: *mut stat64,
        ) -> c_int;
        fn fxstatat = c"__fxstatat" (
            version: c_int, dir: c_int, path: *const c_char, found: *mut stat, flags: c_int,
        ) -> c_int;
        fn fxstatat64 = c"__fxstatat64" (
            version: c_int, dir: c_int, path: *const c_char, found: *mut stat64, flags: c_int,
        ) -> c_int;
        fn access = c"access" (path: *const c_char, mode: c_int) -> c_int;
        fn faccessat = c"faccessat" (
            dir: c_int, path: *const c_char, mode: c_int, flags: c_int,
        ) -> c_int;
        fn euidaccess = c"euidaccess" (path: *const c_char, mode: c_int) -> c_int;
        fn opendir = c"opendir" (path: *const c_char) -> *mut DIR;
        fn scandir = c"scandir" (
            path: *const c_char, list: *mut *mut *mut dirent, filter: usize, compare: usize,
        ) -> c_int;
        fn scandir64 = c"scandir64" (
            path: *const c_char, list: *mut *mut *mut dirent64, filter: usize, compare: usize,
        ) -> c_int;
        fn readlink = c"readlink" (
            path: *const c_char, target: *mut c_char, size: size_t,
        ) -> ssize_t;
        fn readlink_chk = c"__readlink_chk" (
            path: *const c_char, target: *mut c_char, size: size_t, room: size_t,
        ) -> ssize_t;
        fn readlinkat = c"readlinkat" (
            dir: c_int, path: *const c_char, target: *mut c_char, size: size_t,
        ) -> ssize_t;
        fn readlinkat_chk = c"__readlinkat_chk" (
            dir: c_int, path: *const c_char, target: *mut c_char, size: size_t, room: size_t,
        ) -> ssize_t;
        fn realpath = c"realpath" (path: *const c_char, resolved: *mut c_char) -> *mut c_char;
        fn realpath_chk = c"__realpath_chk" (
            path: *const c_char, resolved: *mut c_char, room: size_t,
        ) -> *mut c_char;
        fn canonicalize = c"canonicalize_file_name" (path: *const c_char) -> *mut c_char;
        fn chdir = c"chdir" (path: *const c_char) -> c_int;
        fn statfs_of = c"statfs" (path: *const c_char, found: *mut statfs) -> c_int;
        fn statfs64_of = c"statfs64" (path: *const c_char, found: *mut statfs64) -> c_int;
        fn statvfs_of = c"statvfs" (path: *const c_char, found: *mut statvfs) -> c_int;
        fn statvfs64_of = c"statvfs64" (path: *const c_char, found: *mut statvfs64) -> c_int;
        fn ftw = c"ftw" (path: *const c_char, visit: Visit, most: c_int) -> c_int;
        fn ftw64 = c"ftw64" (path: *const c_char, visit: Visit, most: c_int) -> c_int;
        fn nftw = c"nftw" (
            path: *const c_char, visit: VisitWithPlace, most: c_int, flags: c_int,
        ) -> c_int;
        fn nftw64 = c"nftw64" (
            path: *const c_char, visit: VisitWithPlace, most: c_int, flags: c_int,
        ) -> c_int;
        fn fts_open = c"fts_open" (
            paths: *const *const c_char, options: c_int, compare: Compare,
        ) -> *mut c_void;
        fn fts64_open = c"fts64_open" (
            paths: *const *const c_char, options: c_int, compare: Compare,
        ) -> *mut c_void;
        fn glob_paths = c"glob" (
            pattern: *const c_char, flags: c_int, on_error: usize, found: *mut c_void,
        ) -> c_int;
        fn glob64_paths = c"glob64" (
            pattern: *const c_char, flags: c_int, on_error: usize, found: *mut c_void,
        ) -> c_int;
    }
}

/// Functions of the drop-in library.
pub mod verbs {
    use super::*;
    use std::ffi::{c_char, c_int};
    use std::ptr::null_mut;

    /// Callback with the name of a device, its network interface index, Ethernet address, MTU, and
    /// one of its addresses.
    pub type OnDeviceAddress =
        unsafe extern "C" fn(*mut c_void, *const c_char, u32, *const u8, u32, *const u8);

    imported_functions! { libc::RTLD_DEFAULT;
        fn sysfs_tree = c"siw_sysfs_tree" () -> *const c_char;
        fn list_addresses = c"siw_list_addresses" (add: OnDeviceAddress, list: *mut c_void) -> c_int;
    }
}
