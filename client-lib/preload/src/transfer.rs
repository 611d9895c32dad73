//! Sending and receiving.

use crate::convert::is_rsocket;
use crate::dispatch::dispatched_calls;
use crate::next::{libc_calls, rsockets};
use libc::{iovec, msghdr, sockaddr, socklen_t};
use std::ffi::{c_int, c_void};

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

#[unsafe(export_name = "read")]
unsafe extern "C" fn read_bytes(fd: c_int, to: *mut c_void, length: usize) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if is_rsocket(fd) {
            rsockets::recv(fd, to, length, 0)
        } else {
            libc_calls::read(fd, to, length)
        }
    }
}

#[unsafe(export_name = "write")]
unsafe extern "C" fn write_bytes(fd: c_int, from: *const c_void, length: usize) -> isize {
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
unsafe extern "C" fn send_to(
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
unsafe extern "C" fn read_checked(fd: c_int, to: *mut c_void, length: usize, room: usize) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { read_bytes(fd, to, length.min(room)) }
}

/// Variant of recv(2), likewise.
#[unsafe(export_name = "__recv_chk")]
unsafe extern "C" fn receive_checked(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    room: usize,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { receive_bytes(fd, to, length.min(room), flags) }
}

/// Bytes that sendfile(2) to an rsocket copies per call.
const PIECE: usize = 1 << 16;

#[unsafe(export_name = "sendfile")]
unsafe extern "C" fn send_file(
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
            libc::lseek(from, 0, libc::SEEK_CUR)
        } else {
            *offset
        };
        let sent = copy_file(to, from, &mut at, length);
        if offset.is_null() {
            libc::lseek(from, at, libc::SEEK_SET);
        } else {
            *offset = at;
        }
        sent
    }
}

/// # Safety
/// An rsocket and a file.
unsafe fn copy_file(to: c_int, from: c_int, at: &mut libc::off_t, length: usize) -> isize {
    let mut buffer = vec![0u8; PIECE.min(length)];
    let mut done = 0;
    while done < length {
        let wanted = buffer.len().min(length - done);
        // SAFETY: a buffer with its length.
        let sent = unsafe {
            match libc::pread(from, buffer.as_mut_ptr().cast(), wanted, *at) {
                count if count <= 0 => count,
                count => rsockets::send(to, buffer.as_ptr().cast(), count as usize, 0),
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
unsafe extern "C" fn send_file_64(
    to: c_int,
    from: c_int,
    offset: *mut libc::off_t,
    length: usize,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { send_file(to, from, offset, length) }
}
