//! Converts between the C addresses `struct sockaddr_in` and `struct sockaddr_in6` and Rust's.

use std::ffi::c_void;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Size of the C sockaddr.
pub fn length_of(addr: SocketAddr) -> usize {
    match addr {
        SocketAddr::V4(_) => size_of::<libc::sockaddr_in>(),
        SocketAddr::V6(_) => size_of::<libc::sockaddr_in6>(),
    }
}

/// Reads a C address; None for NULL and for families other than AF_INET and AF_INET6. An IPv4-mapped
/// address is that of IPv4: getaddrinfo(3) without hints returns such where interfaces have only
/// IPv6 addresses, as where siwd owns those of IPv4.
///
/// # Safety
/// NULL, or valid for the size of its family.
pub unsafe fn read_address<T>(addr: *const T) -> Option<SocketAddr> {
    let addr: *const c_void = addr.cast();
    if addr.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family.
    let family = unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family is that of this struct.
            let v4 = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family is that of this struct.
            let v6 = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(match ip.to_ipv4_mapped() {
                Some(v4) => SocketAddrV4::new(v4, port).into(),
                None => SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into(),
            })
        }
        _ => None,
    }
}

/// Writes a C address.
///
/// # Safety
/// There is room for [`length_of`] bytes.
pub unsafe fn write_address<T>(addr: SocketAddr, to: *mut T) {
    match addr {
        SocketAddr::V4(v4) => {
            // SAFETY: the struct is made of numbers.
            let mut out: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            out.sin_family = libc::AF_INET as libc::sa_family_t;
            out.sin_port = v4.port().to_be();
            out.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: as the caller promised.
            unsafe { to.cast::<libc::sockaddr_in>().write_unaligned(out) };
        }
        SocketAddr::V6(v6) => {
            // SAFETY: the struct is made of numbers.
            let mut out: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            out.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            out.sin6_port = v6.port().to_be();
            out.sin6_addr.s6_addr = v6.ip().octets();
            out.sin6_scope_id = v6.scope_id();
            // SAFETY: as the caller promised.
            unsafe { to.cast::<libc::sockaddr_in6>().write_unaligned(out) };
        }
    }
}
