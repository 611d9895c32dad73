//! Sockets of the kernel at addresses of siwd.

use crate::devices::{KernelAddress, read_address};
use crate::next::libc_calls;
use libc::{sockaddr, socklen_t};
use std::ffi::{c_int, c_void};

/// The socket is one of TCP or UDP: others, as that of ping(8), stay as they are.
fn has_ports(fd: c_int) -> bool {
    let mut protocol: c_int = 0;
    let mut length = size_of::<c_int>() as socklen_t;
    let place = (&raw mut protocol).cast();
    // SAFETY: a number, with its length.
    let status = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PROTOCOL,
            place,
            &raw mut length,
        )
    };
    status == 0 && matches!(protocol, libc::IPPROTO_TCP | libc::IPPROTO_UDP)
}

/// The loopback address in the place of one of siwd's, which the socket is made ready for.
///
/// # Safety
/// NULL, or an address as long as it says.
unsafe fn redirect(fd: c_int, addr: *const sockaddr, length: socklen_t) -> Option<KernelAddress> {
    // SAFETY: as the caller promised.
    let loopback = unsafe { read_address(addr, length) }?.to_loopback()?;
    if !has_ports(fd) {
        return None;
    }
    if loopback.is_v6() {
        let off: c_int = 0;
        let (value, size) = ((&raw const off).cast(), size_of::<c_int>() as socklen_t);
        // SAFETY: a number, with its length. Where it fails, the call that follows says so.
        unsafe { libc::setsockopt(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, value, size) };
    }
    Some(loopback)
}

#[unsafe(export_name = "bind")]
unsafe extern "C" fn bind_socket(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: as the manual page obliges the caller.
    unsafe {
        match redirect(fd, addr, length) {
            Some(loopback) => libc_calls::bind(fd, loopback.as_abi(), length),
            None => libc_calls::bind(fd, addr, length),
        }
    }
}

#[unsafe(export_name = "connect")]
unsafe extern "C" fn connect_socket(fd: c_int, addr: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: as the manual page obliges the caller.
    unsafe {
        match redirect(fd, addr, length) {
            Some(loopback) => libc_calls::connect(fd, loopback.as_abi(), length),
            None => libc_calls::connect(fd, addr, length),
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
    // SAFETY: as the manual page obliges the caller.
    unsafe {
        let loopback = redirect(fd, addr, addr_length);
        let addr = loopback.as_ref().map_or(addr, KernelAddress::as_abi);
        libc_calls::sendto(fd, from, length, flags, addr, addr_length)
    }
}

#[unsafe(export_name = "sendmsg")]
unsafe extern "C" fn send_message(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    // SAFETY: as the manual page obliges the caller.
    unsafe {
        let Some(given) = message.as_ref() else {
            return libc_calls::sendmsg(fd, message, flags);
        };
        match redirect(fd, given.msg_name.cast(), given.msg_namelen) {
            Some(loopback) => {
                let mut redirected = *given;
                redirected.msg_name = loopback.as_abi().cast_mut().cast();
                libc_calls::sendmsg(fd, &raw const redirected, flags)
            }
            None => libc_calls::sendmsg(fd, message, flags),
        }
    }
}
