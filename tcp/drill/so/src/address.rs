//! Converts socket addresses between C and Rust.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use siw_drill::Errno;

/// Reads the address passed to a system call.
///
/// # Safety
/// `addr` points to `len` readable bytes.
pub(crate) unsafe fn read_sockaddr(
    addr: *const sockaddr,
    len: socklen_t,
) -> Result<SocketAddr, Errno> {
    let len = len as usize;
    if addr.is_null() || len < size_of::<libc::sa_family_t>() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the caller vouches for `len` bytes; the family is within them.
    let family = i32::from(unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() });
    if family == libc::AF_INET && len >= size_of::<sockaddr_in>() {
        // SAFETY: the caller vouches for `len` bytes, enough for this type of plain integers.
        let address = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
        let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
        return Ok(SocketAddr::new(ip.into(), u16::from_be(address.sin_port)));
    }
    if family == libc::AF_INET6 && len >= size_of::<sockaddr_in6>() {
        // SAFETY: as above.
        let address = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
        let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
        return Ok(SocketAddr::new(ip.into(), u16::from_be(address.sin6_port)));
    }
    Err(Errno::EAFNOSUPPORT)
}

/// Writes `address`, truncated to the available room; nothing when `addr` or `len` is null.
///
/// # Safety
/// `addr` points to `*len` writable bytes, and `len` to a writable length; either may be null.
pub(crate) unsafe fn write_sockaddr(address: SocketAddr, addr: *mut sockaddr, len: *mut socklen_t) {
    if addr.is_null() || len.is_null() {
        return;
    }
    // SAFETY: all-zero is a valid value of these types of plain integers.
    let (mut v4, mut v6): (sockaddr_in, sockaddr_in6) = unsafe { std::mem::zeroed() };
    let (from, size) = match address {
        SocketAddr::V4(address) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = address.port().to_be();
            v4.sin_addr.s_addr = u32::from(*address.ip()).to_be();
            ((&raw const v4).cast::<u8>(), size_of::<sockaddr_in>())
        }
        SocketAddr::V6(address) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = address.port().to_be();
            v6.sin6_addr.s6_addr = address.ip().octets();
            ((&raw const v6).cast::<u8>(), size_of::<sockaddr_in6>())
        }
    };
    // SAFETY: `from` has `size` bytes, `addr` has `*len`; the smaller number is copied, and the two
    // do not overlap since one is local.
    unsafe {
        let room = (*len as usize).min(size);
        std::ptr::copy_nonoverlapping(from, addr.cast::<u8>(), room);
        *len = size as socklen_t;
    }
}
