//! Functions for the library that `siwrun --rsockets` preloads (crate `siw-preload`), in addition
//! to those of rsockets: the choice of sockets that become rsockets, duplicated descriptors, and
//! calls with signal masks.

use super::exports::{
    accept_with, find_socket, list_of, poll_program_list, to_address, to_c, to_status,
};
use super::{connect, epoll, poll, table};
use crate::waiting::Call;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Checks whether the descriptor is an rsocket, for a call that uses it.
pub unsafe fn is_rsocket(fd: c_int) -> c_int {
    table::enable_checks();
    let is_found = table::find_checked(fd).is_some();
    if !is_found {
        table::report_inherited(fd);
    }
    is_found.into()
}

/// Checks whether the descriptor is an rsocket, for a call that closes it: children of fork(2) close
/// descriptors of their parents.
pub unsafe fn is_open(fd: c_int) -> c_int {
    table::enable_checks();
    table::find_checked(fd).is_some().into()
}

/// Checks whether siwd routes to the address or, with `own`, has it.
pub unsafe fn is_reachable(
    addr: *const libc::sockaddr,
    length: libc::socklen_t,
    own: c_int,
) -> c_int {
    // SAFETY: as the caller promised.
    let addr = unsafe { to_address(addr, length) };
    addr.is_ok_and(|addr| connect::is_reachable(addr, own != 0))
        .into()
}

/// Adds a duplicate of the descriptor, made by the program, to the rsocket.
pub unsafe fn duplicate(fd: c_int, number: c_int) -> c_int {
    // SAFETY: the caller made the duplicate and gives it away.
    to_status(find_socket(fd).map(|socket| unsafe { table::insert_duplicate(number, socket) }))
}

/// Closes the rsockets whose descriptors the program has closed without this library.
pub unsafe fn close_stale() -> c_int {
    table::close_stale();
    0
}

/// ioctl(2) of a socket: FIONBIO, FIONREAD and SIOCOUTQ.
pub unsafe fn control_socket(fd: c_int, request: libc::c_ulong, argument: *mut c_int) -> c_int {
    let socket = match find_socket(fd) {
        Ok(socket) => socket,
        Err(errno) => return to_status(Err(errno)),
    };
    if request == libc::FIONBIO {
        // SAFETY: by the contract of the manual page.
        let is_on = unsafe { argument.read_unaligned() } != 0;
        socket.nonblocking.store(is_on, Ordering::Relaxed);
        return 0;
    }
    let count = match request {
        libc::FIONREAD => socket.lock().receivable_bytes(),
        libc::TIOCOUTQ => socket.lock().outstanding_bytes(),
        _ => Err(libc::ENOTTY),
    };
    // SAFETY: by the contract of the manual page.
    to_status(count.map(|count| unsafe {
        argument.write_unaligned(c_int::try_from(count).unwrap_or(c_int::MAX));
    }))
}

/// Adds a listener of the kernel to the rsocket, which duplicates its descriptor.
pub unsafe fn join(fd: c_int, kernel: c_int) -> c_int {
    to_status(find_socket(fd).and_then(|socket| {
        let kernel = rustix::io::fcntl_dupfd_cloexec(table::borrow(kernel), 3)
            .map_err(rustix::io::Errno::raw_os_error)?;
        socket.join(fd, kernel)
    }))
}

/// raccept(3) with flags of its own instead of the listener's (accept4(2)).
pub unsafe fn accept4(
    call: &mut Call,
    fd: c_int,
    addr: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { accept_with(call, fd, addr, length, flags) }
}

/// Checks whether the descriptor is an epoll instance with rsockets.
pub unsafe fn is_epoll(number: c_int) -> c_int {
    epoll::find_instance(number).is_some().into()
}

/// Called when the program closes a descriptor that may be an epoll instance.
pub unsafe fn forget_epoll(number: c_int) -> c_int {
    epoll::forget_instance(number).into()
}

/// # Safety
/// NULL or a time.
unsafe fn duration_of(time: *const libc::timespec) -> Option<Duration> {
    if time.is_null() {
        return None;
    }
    // SAFETY: as the caller promised.
    let time = unsafe { time.read_unaligned() };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Some(Duration::from_secs(seconds) + Duration::from_nanos(nanos))
}

/// ppoll(2)
pub unsafe fn ppoll(
    call: &mut Call,
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { poll_program_list(call, fds, count, duration_of(timeout), mask) }
}

/// pselect(2)
pub unsafe fn pselect(
    call: &mut Call,
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let selected =
        unsafe { poll::select_sets(call, count, read, write, except, duration_of(timeout), mask) };
    to_c(selected, |ready| ready as isize) as c_int
}

/// epoll_pwait(2)
pub unsafe fn epoll_pwait(
    call: &mut Call,
    number: c_int,
    events: *mut libc::epoll_event,
    most: c_int,
    timeout_ms: c_int,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let events = unsafe { list_of(events, usize::try_from(most).unwrap_or(0)) };
    if events.is_empty() {
        return to_status(Err(libc::EINVAL));
    }
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    to_c(
        epoll::wait_for_events(call, number, events, timeout, mask),
        |count| count as isize,
    ) as c_int
}
