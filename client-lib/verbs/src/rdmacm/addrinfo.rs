//! rdma_getaddrinfo(3): resolves names and services with getaddrinfo(3).

use super::sockaddr::{length_of, read_address, write_address};
use crate::abi::*;
use crate::status::set_errno;
use std::ffi::{c_char, c_int};
use std::mem::{ManuallyDrop, zeroed};
use std::net::SocketAddr;
use std::ptr::null_mut;

/// One result, with the memory that it points to.
#[repr(C)]
struct InfoObject {
    abi: rdma_addrinfo,
    src: libc::sockaddr_storage,
    dst: libc::sockaddr_storage,
}

/// A result that the program has not got yet.
pub struct AddressInfo(pub *mut rdma_addrinfo);

// SAFETY: the result is used by one thread at a time.
unsafe impl Send for AddressInfo {}

impl AddressInfo {
    /// The result for the program, which frees it.
    pub fn into_raw(self) -> *mut rdma_addrinfo {
        ManuallyDrop::new(self).0
    }
}

impl Drop for AddressInfo {
    fn drop(&mut self) {
        // SAFETY: from `getaddrinfo`, and not given to the program.
        unsafe { freeaddrinfo(self.0) };
    }
}

/// Chooses port space and queue pair type, each derived from the other if not given.
fn choose_space(hints: &rdma_addrinfo) -> (c_int, c_int) {
    let (udp, tcp) = (RDMA_PS_UDP as c_int, RDMA_PS_TCP as c_int);
    let (datagram, connected) = (IBV_QPT_UD as c_int, IBV_QPT_RC as c_int);
    match (hints.ai_port_space, hints.ai_qp_type) {
        (0, 0) => (tcp, connected),
        (0, kind) if kind == datagram => (udp, kind),
        (0, kind) => (tcp, kind),
        (space, 0) if space == udp => (space, datagram),
        (space, 0) => (space, connected),
        both => both,
    }
}

/// Calls getaddrinfo(3); returns its error code on failure.
///
/// # Safety
/// `node` and `service` are NULL or C strings.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: &rdma_addrinfo,
    is_datagram: bool,
) -> Result<Option<SocketAddr>, c_int> {
    // SAFETY: the struct is made of numbers and pointers.
    let mut asked: libc::addrinfo = unsafe { zeroed() };
    let flags = hints.ai_flags as u32;
    if flags & RAI_PASSIVE != 0 {
        asked.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & RAI_NUMERICHOST != 0 {
        asked.ai_flags |= libc::AI_NUMERICHOST;
    }
    asked.ai_family = hints.ai_family;
    asked.ai_socktype = if is_datagram {
        libc::SOCK_DGRAM
    } else {
        libc::SOCK_STREAM
    };
    let mut found = null_mut();
    // SAFETY: as the caller promised; the result is freed below.
    let status = unsafe { libc::getaddrinfo(node, service, &asked, &mut found) };
    if status != 0 {
        return Err(status);
    }
    let mut next = found;
    let mut addr = None;
    while addr.is_none() && !next.is_null() {
        // SAFETY: an element of the list.
        unsafe {
            addr = read_address((*next).ai_addr);
            next = (*next).ai_next;
        }
    }
    // SAFETY: from getaddrinfo(3).
    unsafe { libc::freeaddrinfo(found) };
    Ok(addr)
}

/// rdma_getaddrinfo(3): 0, -1 with errno set, or an error of getaddrinfo(3).
pub unsafe fn getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the struct is made of numbers and pointers.
    let none: rdma_addrinfo = unsafe { zeroed() };
    // SAFETY: NULL or a struct to read.
    let hints = unsafe { hints.as_ref() }.unwrap_or(&none);
    if node.is_null() && service.is_null() && hints.ai_src_len == 0 && hints.ai_dst_len == 0 {
        set_errno(libc::EINVAL);
        return -1;
    }
    let (port_space, qp_type) = choose_space(hints);
    let is_datagram = port_space == RDMA_PS_UDP as c_int;
    let is_passive = hints.ai_flags as u32 & RAI_PASSIVE != 0;
    // SAFETY: NULL or addresses.
    let (mut src, mut dst) = unsafe {
        (
            read_address(hints.ai_src_addr).filter(|_| hints.ai_src_len > 0),
            read_address(hints.ai_dst_addr).filter(|_| hints.ai_dst_len > 0),
        )
    };
    if !node.is_null() || !service.is_null() {
        // SAFETY: NULL or C strings.
        match unsafe { look_up(node, service, hints, is_datagram) } {
            Ok(found) if is_passive => src = found,
            Ok(found) => dst = found,
            Err(status) => return status,
        }
    }
    let Some(family_of) = dst.or(src) else {
        set_errno(libc::ENODATA);
        return -1;
    };
    // SAFETY: the structs are made of numbers and pointers.
    let mut object = Box::new(unsafe {
        InfoObject {
            abi: zeroed(),
            src: zeroed(),
            dst: zeroed(),
        }
    });
    object.abi.ai_flags = hints.ai_flags;
    object.abi.ai_family = if family_of.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    object.abi.ai_port_space = port_space;
    object.abi.ai_qp_type = qp_type;
    let object = Box::into_raw(object);
    // SAFETY: just created; the addresses have room for any family, and live as long as the result.
    unsafe {
        if let Some(src) = src {
            (*object).abi.ai_src_len = length_of(src) as socklen_t;
            (*object).abi.ai_src_addr = (&raw mut (*object).src).cast();
            write_address(src, &raw mut (*object).src);
        }
        if let Some(dst) = dst {
            (*object).abi.ai_dst_len = length_of(dst) as socklen_t;
            (*object).abi.ai_dst_addr = (&raw mut (*object).dst).cast();
            write_address(dst, &raw mut (*object).dst);
        }
        result.write(object.cast());
    }
    0
}

/// rdma_freeaddrinfo(3)
pub unsafe fn freeaddrinfo(mut info: *mut rdma_addrinfo) {
    while !info.is_null() {
        // SAFETY: `getaddrinfo` boxed it.
        let object = unsafe { Box::from_raw(info.cast::<InfoObject>()) };
        info = object.abi.ai_next;
    }
}
