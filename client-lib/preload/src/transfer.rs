//! Sending and receiving.

use crate::convert::is_rsocket;
use crate::dispatch::dispatched_calls;
use crate::next::{libc_calls, rsockets};
use libc::{iovec, mmsghdr, msghdr, sockaddr, socklen_t, timespec};
use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

dispatched_calls! {
    fn read_vector = readv (fd: c_int, list: *const iovec, count: c_int) -> isize;
    fn write_vector = writev (fd: c_int, list: *const iovec, count: c_int) -> isize;
    fn receive_bytes = recv (fd: c_int, to: *mut c_void, length: usize, flags: c_int) -> isize;
    fn send_bytes = send (fd: c_int, from: *const c_void, length: usize, flags: c_int) -> isize;
    fn receive_from = recvfrom (
        fd: c_int, to: *mut c_void, length: usize, flags: c_int, addr: *mut sockaddr,
        addr_length: *mut socklen_t,
    ) -> isize;
    fn receive_message = recvmsg (fd: c_int, message: *mut msghdr, flags: c_int) -> isize;
    fn send_message = sendmsg (fd: c_int, message: *const msghdr, flags: c_int) -> isize;
}

/// read(2) from an rsocket or from another descriptor.
///
/// # Safety
/// As the manual page says.
#[unsafe(export_name = "read")]
pub unsafe extern "C-unwind" fn read_bytes(fd: c_int, to: *mut c_void, length: usize) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if is_rsocket(fd) {
            rsockets::read(fd, to, length)
        } else {
            libc_calls::read(fd, to, length)
        }
    }
}

/// write(2) to an rsocket or to another descriptor.
///
/// # Safety
/// As the manual page says.
#[unsafe(export_name = "write")]
pub unsafe extern "C-unwind" fn write_bytes(
    fd: c_int,
    from: *const c_void,
    length: usize,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if is_rsocket(fd) {
            rsockets::send(fd, from, length, 0)
        } else {
            libc_calls::write(fd, from, length)
        }
    }
}

#[unsafe(export_name = "sendto")]
unsafe extern "C-unwind" fn send_to(
    fd: c_int,
    from: *const c_void,
    length: usize,
    flags: c_int,
    addr: *const sockaddr,
    addr_length: socklen_t,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if is_rsocket(fd) {
            rsockets::send(fd, from, length, flags)
        } else {
            libc_calls::sendto(fd, from, length, flags, addr, addr_length)
        }
    }
}

/// Variant of read(2) with a check of the buffer length, called by code compiled with
/// _FORTIFY_SOURCE.
#[unsafe(export_name = "__read_chk")]
unsafe extern "C-unwind" fn read_checked(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    room: usize,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { read_bytes(fd, to, length.min(room)) }
}

/// Variant of recv(2), likewise.
#[unsafe(export_name = "__recv_chk")]
unsafe extern "C-unwind" fn receive_checked(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    room: usize,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { receive_bytes(fd, to, length.min(room), flags) }
}

/// Variant of recvfrom(2), likewise.
#[unsafe(export_name = "__recvfrom_chk")]
unsafe extern "C-unwind" fn receive_from_checked(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    room: usize,
    flags: c_int,
    addr: *mut sockaddr,
    addr_length: *mut socklen_t,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { receive_from(fd, to, length.min(room), flags, addr, addr_length) }
}

/// Result of a call with several messages: the number of those that were moved, or the error of the
/// first.
fn moved_or_failed(moved: c_uint) -> c_int {
    if moved > 0 { moved as c_int } else { -1 }
}

#[unsafe(export_name = "sendmmsg")]
unsafe extern "C-unwind" fn send_messages(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if !is_rsocket(fd) {
            return libc_calls::sendmmsg(fd, list, count, flags);
        }
        for index in 0..count {
            let message = list.add(index as usize);
            let sent = rsockets::sendmsg(fd, &raw const (*message).msg_hdr, flags);
            match c_uint::try_from(sent) {
                Ok(sent) => (&raw mut (*message).msg_len).write_unaligned(sent),
                Err(_) => return moved_or_failed(index),
            }
        }
        count as c_int
    }
}

#[unsafe(export_name = "recvmmsg")]
unsafe extern "C-unwind" fn receive_messages(
    fd: c_int,
    list: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if !is_rsocket(fd) {
            return libc_calls::recvmmsg(fd, list, count, flags, timeout);
        }
        // As in the kernel, the timeout is checked only after each message.
        let deadline = (!timeout.is_null()).then(|| {
            let timeout = timeout.read_unaligned();
            let seconds = u64::try_from(timeout.tv_sec).unwrap_or(0);
            let nanos = u64::try_from(timeout.tv_nsec).unwrap_or(0);
            Instant::now() + Duration::from_secs(seconds) + Duration::from_nanos(nanos)
        });
        let mut each = flags & !libc::MSG_WAITFORONE;
        for index in 0..count {
            let message = list.add(index as usize);
            let received = rsockets::recvmsg(fd, &raw mut (*message).msg_hdr, each);
            match c_uint::try_from(received) {
                Ok(received) => (&raw mut (*message).msg_len).write_unaligned(received),
                Err(_) => return moved_or_failed(index),
            }
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if received == 0 || is_late {
                return index as c_int + 1;
            }
            if flags & libc::MSG_WAITFORONE != 0 {
                each |= libc::MSG_DONTWAIT;
            }
        }
        count as c_int
    }
}

/// Runs a call of preadv2(2) or pwritev2(2) with an rsocket: these have no offset but -1, and
/// RWF_NOWAIT is MSG_DONTWAIT.
///
/// # Safety
/// A list with its length.
unsafe fn with_message(
    list: *const iovec,
    count: c_int,
    offset: libc::off_t,
    flags: c_int,
    call: impl FnOnce(*mut msghdr, c_int) -> isize,
) -> isize {
    let failure = if offset != -1 {
        Some(libc::ESPIPE)
    } else if flags & !libc::RWF_NOWAIT != 0 {
        Some(libc::EOPNOTSUPP)
    } else {
        None
    };
    if let Some(errno) = failure {
        // SAFETY: the C library gives a valid pointer to this thread's errno.
        unsafe { *libc::__errno_location() = errno };
        return -1;
    }
    // SAFETY: the struct is made of numbers and pointers.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.cast_mut();
    message.msg_iovlen = usize::try_from(count).unwrap_or(0);
    let is_nowait = flags & libc::RWF_NOWAIT != 0;
    call(
        &raw mut message,
        if is_nowait { libc::MSG_DONTWAIT } else { 0 },
    )
}

/// Calls with a list of buffers, an offset of 64 bits and flags.
macro_rules! vector_calls {
    ($($name:ident = $symbol:literal, $call:ident, $of_rsocket:ident;)*) => {$(
        #[unsafe(export_name = $symbol)]
        unsafe extern "C-unwind" fn $name(
            fd: c_int,
            list: *const iovec,
            count: c_int,
            offset: libc::off_t,
            flags: c_int,
        ) -> isize {
            // SAFETY: by the contract of the manual page.
            unsafe {
                if !is_rsocket(fd) {
                    return libc_calls::$call(fd, list, count, offset, flags);
                }
                with_message(list, count, offset, flags, |message, flags| {
                    rsockets::$of_rsocket(fd, message, flags)
                })
            }
        }
    )*};
}

vector_calls! {
    read_vector_with_flags = "preadv2", preadv2, recvmsg;
    read_vector_with_flags_64 = "preadv64v2", preadv2, recvmsg;
    write_vector_with_flags = "pwritev2", pwritev2, sendmsg;
    write_vector_with_flags_64 = "pwritev64v2", pwritev2, sendmsg;
}

/// Bytes that sendfile(2) to an rsocket copies per call.
const PIECE: usize = 1 << 16;

thread_local! {
    /// Buffer of sendfile(2): the frame of a call that waits may be unwound, and has nothing to drop.
    static COPIED: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into());
}

#[unsafe(export_name = "sendfile")]
unsafe extern "C-unwind" fn send_file(
    to: c_int,
    from: c_int,
    offset: *mut libc::off_t,
    length: usize,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if !is_rsocket(to) {
            return libc_calls::sendfile(to, from, offset, length);
        }
        let mut at = if offset.is_null() {
            libc_calls::lseek(from, 0, libc::SEEK_CUR)
        } else {
            offset.read_unaligned()
        };
        let sent = copy_file(to, from, &mut at, length);
        if offset.is_null() {
            libc_calls::lseek(from, at, libc::SEEK_SET);
        } else {
            offset.write_unaligned(at);
        }
        sent
    }
}

/// # Safety
/// An rsocket and a file.
unsafe fn copy_file(to: c_int, from: c_int, at: &mut libc::off_t, length: usize) -> isize {
    // There is none any more in a thread that ends.
    let Ok(buffer) = COPIED.try_with(|buffer| buffer.borrow_mut().as_mut_ptr()) else {
        // SAFETY: the C library gives a valid pointer to this thread's errno.
        unsafe { *libc::__errno_location() = libc::ENOMEM };
        return -1;
    };
    let mut done = 0;
    while done < length {
        let wanted = PIECE.min(length - done);
        // SAFETY: a buffer of this thread with its length.
        let sent = unsafe {
            match libc_calls::pread(from, buffer.cast(), wanted, *at) {
                count if count <= 0 => count,
                count => rsockets::send(to, buffer.cast(), count as usize, 0),
            }
        };
        match usize::try_from(sent) {
            Ok(0) => break,
            Ok(sent) => {
                done += sent;
                *at += sent as libc::off_t;
            }
            Err(_) if done > 0 => break,
            Err(_) => return -1,
        }
    }
    done as isize
}

#[unsafe(export_name = "sendfile64")]
unsafe extern "C-unwind" fn send_file_64(
    to: c_int,
    from: c_int,
    offset: *mut libc::off_t,
    length: usize,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { send_file(to, from, offset, length) }
}

/// Calls that only files have: sockets cannot seek.
macro_rules! seeks {
    ($($name:ident = $symbol:literal;)*) => {$(
        #[unsafe(export_name = $symbol)]
        unsafe extern "C-unwind" fn $name(fd: c_int, offset: libc::off_t, whence: c_int) -> libc::off_t {
            // SAFETY: by the contract of the manual page.
            unsafe {
                if !is_rsocket(fd) {
                    return libc_calls::lseek(fd, offset, whence);
                }
                *libc::__errno_location() = libc::ESPIPE;
                -1
            }
        }
    )*};
}

seeks! {
    seek = "lseek";
    seek_64 = "lseek64";
}
