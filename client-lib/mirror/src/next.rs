//! Functions that are looked up by name: those of the C library, which this library stands before,
//! and that of the drop-in library which lists addresses.

use crate::imports::{imported_functions, missing};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The C library's.
pub mod libc_calls {
    use super::*;
    use libc::{ifaddrs, msghdr, sockaddr, socklen_t};
    use std::ffi::c_int;
    use std::ptr::null_mut;

    imported_functions! { libc::RTLD_NEXT;
        fn bind = c"bind" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn connect = c"connect" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn sendto = c"sendto" (
            fd: c_int, from: *const c_void, length: usize, flags: c_int, addr: *const sockaddr,
            addr_length: socklen_t,
        ) -> isize;
        fn sendmsg = c"sendmsg" (fd: c_int, message: *const msghdr, flags: c_int) -> isize;
        fn getifaddrs = c"getifaddrs" (list: *mut *mut ifaddrs) -> c_int;
        fn freeifaddrs = c"freeifaddrs" (list: *mut ifaddrs) -> ();
    }
}

/// The drop-in library's.
pub mod verbs {
    use super::*;
    use std::ffi::{c_char, c_int};
    use std::ptr::null_mut;

    /// Takes the name of a device, its index, its Ethernet address and an address of it.
    pub type OnDeviceAddress =
        unsafe extern "C" fn(*mut c_void, *const c_char, u32, *const u8, *const u8);

    imported_functions! { libc::RTLD_DEFAULT;
        fn list_addresses = c"siw_list_addresses" (add: OnDeviceAddress, list: *mut c_void) -> c_int;
    }
}
