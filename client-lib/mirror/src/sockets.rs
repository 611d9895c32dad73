//! Kernel sockets at addresses of siwd.

use crate::devices::{KernelAddress, read_address};
use crate::netlink::{Parts, on_send, socket_option};
use crate::next::libc_calls;
use libc::{iovec, sockaddr, socklen_t};
use std::ffi::{c_int, c_void};

/// Checks for a TCP or UDP socket: others, such as that of ping(8), stay unchanged.
fn has_ports(fd: c_int) -> bool {
    let protocol = socket_option(fd, libc::SO_PROTOCOL);
    matches!(protocol, Some(libc::IPPROTO_TCP | libc::IPPROTO_UDP))
}

/// Returns the loopback address that replaces an address of siwd, and prepares the socket for it.
///
/// # Safety
/// NULL, or valid for `length` bytes.
unsafe fn redirect(fd: c_int, addr: *const sockaddr, length: socklen_t) -> Option<KernelAddress> {
    // SAFETY: as the caller promised.
    let loopback = unsafe { read_address(addr, length) }?.to_loopback()?;
    if !has_ports(fd) {
        return None;
    }
    if loopback.is_v6() {
        let off: c_int = 0;
        let (value, size) = ((&raw const off).cast(), size_of::<c_int>() as socklen_t);
        // SAFETY: a number, with its length. A failure is reported by the call that follows.
        unsafe { libc::setsockopt(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, value, size) };
    }
    Some(loopback)
}

#[unsafe(export_name = "bind")]
unsafe extern "C-unwind" fn bind_socket(
    fd: c_int,
    addr: *const sockaddr,
    length: socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        match redirect(fd, addr, length) {
            Some(loopback) => libc_calls::bind(fd, loopback.as_abi(), length),
            None => libc_calls::bind(fd, addr, length),
        }
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
        match redirect(fd, addr, length) {
            Some(loopback) => libc_calls::connect(fd, loopback.as_abi(), length),
            None => libc_calls::connect(fd, addr, length),
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
        let part = iovec {
            iov_base: from.cast_mut(),
            iov_len: length,
        };
        if let Some(result) = on_send(fd, Parts::of_buffer(&part), addr, addr_length) {
            return result;
        }
        let loopback = redirect(fd, addr, addr_length);
        let addr = loopback.as_ref().map_or(addr, KernelAddress::as_abi);
        libc_calls::sendto(fd, from, length, flags, addr, addr_length)
    }
}

#[unsafe(export_name = "sendmsg")]
unsafe extern "C-unwind" fn send_message(
    fd: c_int,
    message: *const libc::msghdr,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if message.is_null() {
            return libc_calls::sendmsg(fd, message, flags);
        }
        let mut given = message.read_unaligned();
        if let Some(result) = on_send(
            fd,
            Parts::of_message(&given),
            given.msg_name.cast(),
            given.msg_namelen,
        ) {
            return result;
        }
        match redirect(fd, given.msg_name.cast(), given.msg_namelen) {
            Some(loopback) => {
                given.msg_name = loopback.as_abi().cast_mut().cast();
                libc_calls::sendmsg(fd, &raw const given, flags)
            }
            None => libc_calls::sendmsg(fd, message, flags),
        }
    }
}
