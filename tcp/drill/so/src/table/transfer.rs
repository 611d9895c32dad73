//! Functions of the table that transfer bytes.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, loff_t, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use siw_drill::Errno;

use super::user_data::{UserData, adapter_of, fail_with, len_or_error};
use crate::adapter::AdapterState;

/// Returns whether a non-empty buffer has a null address.
fn has_null_buffer(iov: &[iovec]) -> bool {
    iov.iter()
        .any(|buffer| buffer.iov_base.is_null() && buffer.iov_len > 0)
}

/// Reads into the buffers of `iov`, in order.
///
/// # Safety
/// `iov` has writable buffers as for readv(2).
unsafe fn receive_into(userdata: UserData, fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    // SAFETY: our userdata.
    let adapter = unsafe { adapter_of(userdata) };
    if has_null_buffer(iov) {
        return fail_with(Errno::EFAULT) as ssize_t;
    }
    let room = iov.iter().map(|buffer| buffer.iov_len).sum();
    let read = |state: &mut AdapterState| {
        if flags & libc::MSG_PEEK != 0 {
            state.host.peek(fd, room)
        } else {
            state.host.read(fd, room)
        }
    };
    let received = if flags & libc::MSG_DONTWAIT != 0 {
        read(&mut adapter.lock())
    } else {
        adapter.retry_until_done(fd, read)
    };
    len_or_error(received.map(|data| {
        let mut left = &data[..];
        for buffer in iov {
            let len = left.len().min(buffer.iov_len);
            // SAFETY: the caller vouches for `iov_len` writable bytes, of which `len` are written.
            unsafe { std::ptr::copy_nonoverlapping(left.as_ptr(), buffer.iov_base.cast(), len) };
            left = &left[len..];
        }
        data.len()
    }))
}

/// Writes the buffers of `iov`, in order.
///
/// # Safety
/// `iov` has readable buffers as for writev(2).
unsafe fn send_from(userdata: UserData, fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    // SAFETY: our userdata.
    let adapter = unsafe { adapter_of(userdata) };
    if has_null_buffer(iov) {
        return fail_with(Errno::EFAULT) as ssize_t;
    }
    let mut data = vec![];
    for buffer in iov.iter().filter(|buffer| buffer.iov_len > 0) {
        // SAFETY: the caller vouches for `iov_len` readable bytes.
        data.extend_from_slice(unsafe {
            std::slice::from_raw_parts(buffer.iov_base.cast(), buffer.iov_len)
        });
    }
    // A blocking call returns when all bytes are accepted; a non-blocking one when no more fit.
    let mut accepted = 0;
    loop {
        let write = |state: &mut AdapterState| state.host.write(fd, &data[accepted..]);
        let result = if flags & libc::MSG_DONTWAIT != 0 {
            write(&mut adapter.lock())
        } else {
            adapter.retry_until_done(fd, write)
        };
        match result {
            Err(_) if accepted > 0 => return accepted as ssize_t,
            Err(errno) => return fail_with(errno) as ssize_t,
            Ok(len) => accepted += len,
        }
        if accepted == data.len() {
            return accepted as ssize_t;
        }
    }
}

/// # Safety
/// `iov` points to `count` entries, or `count` is 0.
unsafe fn iovec_slice<'a>(iov: *const iovec, count: usize) -> &'a [iovec] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for `count` entries.
    unsafe { std::slice::from_raw_parts(iov, count) }
}

fn single_iovec(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }]
}

pub(super) unsafe extern "C" fn sys_read(
    userdata: UserData,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for read(2).
    unsafe { receive_into(userdata, fd, &single_iovec(buf, len), 0) }
}

pub(super) unsafe extern "C" fn sys_readv(
    userdata: UserData,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: our userdata; buffers as for readv(2).
    unsafe { receive_into(userdata, fd, iovec_slice(iov, count.max(0) as usize), 0) }
}

pub(super) unsafe extern "C" fn sys_recv(
    userdata: UserData,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for recv(2).
    unsafe { receive_into(userdata, fd, &single_iovec(buf, len), flags) }
}

pub(super) unsafe extern "C" fn sys_recvfrom(
    userdata: UserData,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    _addr: *mut sockaddr,
    _addr_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for recvfrom(2).
    unsafe { receive_into(userdata, fd, &single_iovec(buf, len), flags) }
}

pub(super) unsafe extern "C" fn sys_recvmsg(
    userdata: UserData,
    fd: c_int,
    msg: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a message as for recvmsg(2).
    unsafe {
        receive_into(
            userdata,
            fd,
            iovec_slice((*msg).msg_iov, (*msg).msg_iovlen),
            flags,
        )
    }
}

pub(super) unsafe extern "C" fn sys_write(
    userdata: UserData,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for write(2).
    unsafe { send_from(userdata, fd, &single_iovec(buf, len), 0) }
}

pub(super) unsafe extern "C" fn sys_writev(
    userdata: UserData,
    fd: c_int,
    iov: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: our userdata; buffers as for writev(2).
    unsafe { send_from(userdata, fd, iovec_slice(iov, count.max(0) as usize), 0) }
}

pub(super) unsafe extern "C" fn sys_send(
    userdata: UserData,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for send(2).
    unsafe { send_from(userdata, fd, &single_iovec(buf, len), flags) }
}

pub(super) unsafe extern "C" fn sys_sendto(
    userdata: UserData,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    _addr: *const sockaddr,
    _addr_len: socklen_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for sendto(2).
    unsafe { send_from(userdata, fd, &single_iovec(buf, len), flags) }
}

pub(super) unsafe extern "C" fn sys_sendmsg(
    userdata: UserData,
    fd: c_int,
    msg: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a message as for sendmsg(2).
    unsafe {
        send_from(
            userdata,
            fd,
            iovec_slice((*msg).msg_iov, (*msg).msg_iovlen),
            flags,
        )
    }
}

pub(super) unsafe extern "C" fn sys_pipe(_userdata: UserData, _fds: *mut c_int) -> c_int {
    fail_with(Errno::EOPNOTSUPP)
}

pub(super) unsafe extern "C" fn sys_splice(
    _userdata: UserData,
    _from: c_int,
    _from_at: *mut loff_t,
    _to: c_int,
    _to_at: *mut loff_t,
    _len: size_t,
    _flags: c_uint,
) -> c_int {
    fail_with(Errno::EOPNOTSUPP)
}
