//! Creating, binding, connecting, accepting and closing sockets; their options and descriptors.

use crate::cancel::CancelGuard;
use crate::convert::{
    add_candidate, add_duplicate_candidate, convert_socket, is_candidate, is_open_rsocket,
    is_rsocket, remove_candidate, remove_socket, wildcard_address,
};
use crate::dispatch::dispatched_calls;
use crate::next::{libc_calls, rsockets};
use libc::{sockaddr, socklen_t};
use std::ffi::{c_int, c_long, c_ulong, c_void};

dispatched_calls! {
    fn accept_with_flags = accept4 (
        fd: c_int, addr: *mut sockaddr, length: *mut socklen_t, flags: c_int,
    ) -> c_int;
    fn shut_down = shutdown (fd: c_int, how: c_int) -> c_int;
    fn get_option = getsockopt (
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t,
    ) -> c_int;
    fn set_option = setsockopt (
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t,
    ) -> c_int;
    fn get_own_address = getsockname (
        fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
    ) -> c_int;
    fn get_peer_address = getpeername (
        fd: c_int, addr: *mut sockaddr, length: *mut socklen_t,
    ) -> c_int;
}

#[unsafe(export_name = "socket")]
unsafe extern "C-unwind" fn create_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: numbers.
    let fd = unsafe { libc_calls::socket(domain, kind, protocol) };
    add_candidate(fd, domain, kind);
    fd
}

#[unsafe(export_name = "bind")]
unsafe extern "C-unwind" fn bind_socket(
    fd: c_int,
    addr: *const sockaddr,
    length: socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let is_own = is_candidate(fd) && rsockets::is_reachable(addr, length, 1) != 0;
        if is_rsocket(fd) || (is_own && convert_socket(fd)) {
            return rsockets::bind(fd, addr, length);
        }
        libc_calls::bind(fd, addr, length)
    }
}

#[unsafe(export_name = "connect")]
unsafe extern "C-unwind" fn connect_socket(
    fd: c_int,
    addr: *const sockaddr,
    length: socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let is_reachable = is_candidate(fd) && rsockets::is_reachable(addr, length, 0) != 0;
        if is_rsocket(fd) || (is_reachable && convert_socket(fd)) {
            return rsockets::connect(fd, addr, length);
        }
        remove_socket(fd);
        libc_calls::connect(fd, addr, length)
    }
}

#[unsafe(export_name = "listen")]
unsafe extern "C-unwind" fn start_listening(fd: c_int, backlog: c_int) -> c_int {
    if is_rsocket(fd) {
        // SAFETY: an rsocket.
        return unsafe { rsockets::listen(fd, backlog) };
    }
    // SAFETY: numbers.
    let listens = unsafe { libc_calls::listen(fd, backlog) };
    if listens == 0 && is_candidate(fd) {
        // SAFETY: a listener of the kernel, which stays unchanged if the call fails.
        unsafe { join_rsocket(fd, backlog) };
    }
    listens
}

/// Creates an rsocket that listens on the same port and takes the descriptor number; the kernel
/// socket becomes part of it.
///
/// # Safety
/// A listener of the kernel.
unsafe fn join_rsocket(fd: c_int, backlog: c_int) -> bool {
    // listen(2) is no cancellation point.
    let _guard = CancelGuard::new();
    let Some((addr, length)) = wildcard_address(fd) else {
        return false;
    };
    // SAFETY: an address with its length; descriptors that this function owns.
    unsafe {
        let kernel = libc_calls::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3);
        if kernel < 0 {
            return false;
        }
        let addr = (&raw const addr).cast();
        let is_done = convert_socket(fd)
            && rsockets::bind(fd, addr, length) == 0
            && rsockets::listen(fd, backlog) == 0
            && rsockets::join(fd, kernel) == 0;
        if !is_done && is_rsocket(fd) {
            // Restore the kernel socket.
            rsockets::close(fd);
            libc_calls::dup3(kernel, fd, 0);
        }
        libc_calls::close(kernel);
        is_done
    }
}

#[unsafe(export_name = "accept")]
unsafe extern "C-unwind" fn accept_connection(
    fd: c_int,
    addr: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { accept_with_flags(fd, addr, length, 0) }
}

/// close(2) of an rsocket or of another descriptor.
///
/// # Safety
/// As the manual page says.
#[unsafe(export_name = "close")]
pub unsafe extern "C-unwind" fn close_descriptor(fd: c_int) -> c_int {
    // SAFETY: numbers.
    unsafe {
        if is_open_rsocket(fd) {
            return rsockets::close(fd);
        }
        forget_number(fd);
        libc_calls::close(fd)
    }
}

/// syscall(2): libuv closes sockets by SYS_close.
///
/// The declaration in C is variadic; on x86-64 and AArch64, integer arguments of variadic functions are
/// passed as those of other functions.
#[unsafe(export_name = "syscall")]
unsafe extern "C-unwind" fn call_kernel(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
    sixth: c_long,
) -> c_long {
    // SAFETY: by the contract of the system call.
    unsafe {
        if number == libc::SYS_close {
            return close_descriptor(first as c_int).into();
        }
        libc_calls::syscall(number, first, second, third, fourth, fifth, sixth)
    }
}

/// Removes the state of a number that is closed or reused.
fn forget_number(fd: c_int) {
    remove_candidate(fd);
    // SAFETY: any number is allowed.
    unsafe { rsockets::close_epoll(fd) };
}

/// Makes a duplicate what the original is: an rsocket, or a socket that may become one.
///
/// # Safety
/// A descriptor and its duplicate, which the program has just made.
unsafe fn note_duplicate(fd: c_int, number: c_int) {
    if is_rsocket(fd) {
        // SAFETY: the duplicate belongs to the program, which gives it away.
        unsafe { rsockets::add_duplicate(fd, number) };
    } else if is_candidate(fd) {
        add_duplicate_candidate(fd, number);
    }
}

#[unsafe(export_name = "dup")]
unsafe extern "C-unwind" fn duplicate(fd: c_int) -> c_int {
    // SAFETY: numbers; the new descriptor belongs to the program.
    unsafe {
        let number = libc_calls::dup(fd);
        if number >= 0 {
            note_duplicate(fd, number);
        }
        number
    }
}

/// Duplicates to a number whose old descriptor is closed, as by dup2(2).
unsafe fn duplicate_to(fd: c_int, number: c_int, flags: c_int) -> c_int {
    // SAFETY: numbers.
    unsafe {
        let made = libc_calls::dup3(fd, number, flags);
        if made < 0 {
            return made;
        }
        remove_candidate(made);
        // These look-ups also drop the rsocket or the epoll instance that the call has closed.
        if !is_rsocket(fd) && !is_open_rsocket(made) {
            rsockets::close_epoll(made);
        }
        note_duplicate(fd, made);
        made
    }
}

#[unsafe(export_name = "dup2")]
unsafe extern "C-unwind" fn duplicate_as(fd: c_int, number: c_int) -> c_int {
    // SAFETY: numbers.
    unsafe {
        if fd == number {
            libc_calls::dup2(fd, number)
        } else {
            duplicate_to(fd, number, 0)
        }
    }
}

#[unsafe(export_name = "dup3")]
unsafe extern "C-unwind" fn duplicate_with_flags(fd: c_int, number: c_int, flags: c_int) -> c_int {
    // SAFETY: numbers.
    unsafe {
        if fd == number {
            libc_calls::dup3(fd, number, flags)
        } else {
            duplicate_to(fd, number, flags)
        }
    }
}

#[unsafe(export_name = "fcntl")]
unsafe extern "C-unwind" fn control_descriptor(
    fd: c_int,
    command: c_int,
    argument: usize,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
            let number = libc_calls::fcntl(fd, command, argument);
            if number >= 0 {
                note_duplicate(fd, number);
            }
            return number;
        }
        if is_rsocket(fd) {
            return rsockets::fcntl(fd, command, argument);
        }
        libc_calls::fcntl(fd, command, argument)
    }
}

#[unsafe(export_name = "fcntl64")]
unsafe extern "C-unwind" fn control_descriptor_64(
    fd: c_int,
    command: c_int,
    argument: usize,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { control_descriptor(fd, command, argument) }
}

#[unsafe(export_name = "ioctl")]
unsafe extern "C-unwind" fn control_device(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if is_rsocket(fd) && !matches!(request, libc::FIOCLEX | libc::FIONCLEX) {
            return rsockets::ioctl(fd, request, argument as *mut c_int);
        }
        libc_calls::ioctl(fd, request, argument)
    }
}
