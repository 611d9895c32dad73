//! Functions looked up by name: those of the C library that this library overrides, and those of
//! rsockets, in the drop-in library that is preloaded before this one.

use crate::imports::{imported_functions, missing};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Functions of the C library.
pub mod libc_calls {
    use super::*;
    use libc::{FILE, iovec, mmsghdr, msghdr, pollfd, sigset_t, sockaddr, socklen_t, timespec};
    use std::ffi::{c_char, c_int, c_long, c_uint};
    use std::ptr::null_mut;

    imported_functions! { libc::RTLD_NEXT;
        fn fdopen = c"fdopen" (fd: c_int, mode: *const c_char) -> *mut FILE;
        fn fclose = c"fclose" (stream: *mut FILE) -> c_int;
        fn freopen = c"freopen" (
            path: *const c_char, mode: *const c_char, stream: *mut FILE,
        ) -> *mut FILE;
        fn syscall = c"syscall" (
            number: c_long, first: c_long, second: c_long, third: c_long, fourth: c_long,
            fifth: c_long, sixth: c_long,
        ) -> c_long;
        fn close_range = c"close_range" (first: c_uint, last: c_uint, flags: c_int) -> c_int;
        fn closefrom = c"closefrom" (first: c_int) -> ();
        fn sendmmsg = c"sendmmsg" (
            fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int,
        ) -> c_int;
        fn recvmmsg = c"recvmmsg" (
            fd: c_int, list: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec,
        ) -> c_int;
        fn preadv2 = c"preadv2" (
            fd: c_int, list: *const iovec, count: c_int, offset: libc::off_t, flags: c_int,
        ) -> isize;
        fn pwritev2 = c"pwritev2" (
            fd: c_int, list: *const iovec, count: c_int, offset: libc::off_t, flags: c_int,
        ) -> isize;
        fn socket = c"socket" (domain: c_int, kind: c_int, protocol: c_int) -> c_int;
        fn bind = c"bind" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn listen = c"listen" (fd: c_int, backlog: c_int) -> c_int;
        fn accept4 = c"accept4" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t, flags: c_int,
        ) -> c_int;
        fn connect = c"connect" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn shutdown = c"shutdown" (fd: c_int, how: c_int) -> c_int;
        fn close = c"close" (fd: c_int) -> c_int;
        fn dup = c"dup" (fd: c_int) -> c_int;
        fn dup3 = c"dup3" (fd: c_int, to: c_int, flags: c_int) -> c_int;
        fn dup2 = c"dup2" (fd: c_int, to: c_int) -> c_int;
        fn fcntl = c"fcntl" (fd: c_int, command: c_int, argument: usize) -> c_int;
        fn ioctl = c"ioctl" (fd: c_int, request: libc::c_ulong, argument: usize) -> c_int;
        fn getsockopt = c"getsockopt" (
            fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t,
        ) -> c_int;
        fn setsockopt = c"setsockopt" (
            fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t,
        ) -> c_int;
        fn getsockname = c"getsockname" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
        ) -> c_int;
        fn getpeername = c"getpeername" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
        ) -> c_int;
        fn read = c"read" (fd: c_int, to: *mut c_void, length: usize) -> isize;
        fn write = c"write" (fd: c_int, from: *const c_void, length: usize) -> isize;
        fn pread = c"pread" (
            fd: c_int, to: *mut c_void, length: usize, offset: libc::off_t,
        ) -> isize;
        fn readv = c"readv" (fd: c_int, list: *const iovec, count: c_int) -> isize;
        fn writev = c"writev" (fd: c_int, list: *const iovec, count: c_int) -> isize;
        fn recv = c"recv" (fd: c_int, to: *mut c_void, length: usize, flags: c_int) -> isize;
        fn send = c"send" (fd: c_int, from: *const c_void, length: usize, flags: c_int) -> isize;
        fn recvfrom = c"recvfrom" (
            fd: c_int, to: *mut c_void, length: usize, flags: c_int, addr: *mut sockaddr,
            addr_length: *mut socklen_t,
        ) -> isize;
        fn sendto = c"sendto" (
            fd: c_int, from: *const c_void, length: usize, flags: c_int, addr: *const sockaddr,
            addr_length: socklen_t,
        ) -> isize;
        fn recvmsg = c"recvmsg" (fd: c_int, message: *mut msghdr, flags: c_int) -> isize;
        fn sendmsg = c"sendmsg" (fd: c_int, message: *const msghdr, flags: c_int) -> isize;
        fn sendfile = c"sendfile" (
            to: c_int, from: c_int, offset: *mut libc::off_t, length: usize,
        ) -> isize;
        fn lseek = c"lseek" (fd: c_int, offset: libc::off_t, whence: c_int) -> libc::off_t;
        fn ppoll = c"ppoll" (
            fds: *mut pollfd, count: libc::nfds_t, timeout: *const libc::timespec,
            mask: *const sigset_t,
        ) -> c_int;
    }
}

/// Functions of the drop-in library.
pub mod rsockets {
    use super::*;
    use libc::{epoll_event, iovec, msghdr, pollfd, sigset_t, sockaddr, socklen_t};
    use std::ffi::c_int;
    use std::ptr::null_mut;

    imported_functions! { libc::RTLD_DEFAULT;
        fn is_rsocket = c"siw_is_rsocket" (fd: c_int) -> c_int;
        fn is_open = c"siw_rsocket_is_open" (fd: c_int) -> c_int;
        fn is_reachable = c"siw_is_reachable" (
            addr: *const sockaddr, length: socklen_t, own: c_int,
        ) -> c_int;
        fn add_duplicate = c"siw_rsocket_duplicate" (fd: c_int, number: c_int) -> c_int;
        fn close_stale = c"siw_rsocket_close_stale" () -> c_int;
        fn ioctl = c"siw_rsocket_ioctl" (
            fd: c_int, request: libc::c_ulong, argument: *mut c_int,
        ) -> c_int;
        fn join = c"siw_rsocket_join" (fd: c_int, kernel: c_int) -> c_int;
        fn socket = c"rsocket" (domain: c_int, kind: c_int, protocol: c_int) -> c_int;
        fn bind = c"rbind" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn listen = c"rlisten" (fd: c_int, backlog: c_int) -> c_int;
        fn accept4 = c"siw_raccept4" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t, flags: c_int,
        ) -> c_int;
        fn connect = c"rconnect" (fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int;
        fn shutdown = c"rshutdown" (fd: c_int, how: c_int) -> c_int;
        fn close = c"rclose" (fd: c_int) -> c_int;
        fn is_epoll = c"siw_repoll_is_instance" (number: c_int) -> c_int;
        fn close_epoll = c"siw_repoll_forget" (fd: c_int) -> c_int;
        fn fcntl = c"rfcntl" (fd: c_int, command: c_int, argument: usize) -> c_int;
        fn getsockopt = c"rgetsockopt" (
            fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t,
        ) -> c_int;
        fn setsockopt = c"rsetsockopt" (
            fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t,
        ) -> c_int;
        fn getsockname = c"rgetsockname" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
        ) -> c_int;
        fn getpeername = c"rgetpeername" (
            fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
        ) -> c_int;
        fn read = c"rread" (fd: c_int, to: *mut c_void, length: usize) -> isize;
        fn readv = c"rreadv" (fd: c_int, list: *const iovec, count: c_int) -> isize;
        fn writev = c"rwritev" (fd: c_int, list: *const iovec, count: c_int) -> isize;
        fn recv = c"rrecv" (fd: c_int, to: *mut c_void, length: usize, flags: c_int) -> isize;
        fn send = c"rsend" (fd: c_int, from: *const c_void, length: usize, flags: c_int) -> isize;
        fn recvfrom = c"rrecvfrom" (
            fd: c_int, to: *mut c_void, length: usize, flags: c_int, addr: *mut sockaddr,
            addr_length: *mut socklen_t,
        ) -> isize;
        fn recvmsg = c"rrecvmsg" (fd: c_int, message: *mut msghdr, flags: c_int) -> isize;
        fn sendmsg = c"rsendmsg" (fd: c_int, message: *const msghdr, flags: c_int) -> isize;
        fn ppoll = c"siw_rppoll" (
            fds: *mut pollfd, count: libc::nfds_t, timeout: *const libc::timespec,
            mask: *const sigset_t,
        ) -> c_int;
        fn pselect = c"siw_rpselect" (
            count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
            except: *mut libc::fd_set, timeout: *const libc::timespec, mask: *const sigset_t,
        ) -> c_int;
        fn epoll_ctl = c"repoll_ctl" (
            number: c_int, operation: c_int, fd: c_int, event: *mut epoll_event,
        ) -> c_int;
        fn epoll_pwait = c"siw_repoll_pwait" (
            number: c_int, events: *mut epoll_event, most: c_int, timeout_ms: c_int,
            mask: *const sigset_t,
        ) -> c_int;
    }
}
