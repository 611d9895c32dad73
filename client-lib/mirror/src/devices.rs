//! The addresses of siwd's devices, and the loopback address that represents each in the kernel.

use crate::cancel::CancelGuard;
use crate::interfaces::kernel_addresses;
use crate::next::verbs;
use libc::{sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;

/// An address of a device that the kernel does not have.
pub struct DeviceAddress {
    pub name: CString,
    /// Index of its network interface.
    pub interface: u32,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub ip: IpAddr,
}

impl DeviceAddress {
    /// The name of the device, truncated to the maximum length of interface names.
    pub fn interface_name(&self) -> &[u8] {
        let octets = self.name.to_bytes();
        &octets[..octets.len().min(libc::IFNAMSIZ - 1)]
    }
}

unsafe extern "C" fn add_address(
    list: *mut c_void,
    name: *const c_char,
    interface: u32,
    mac: *const u8,
    mtu: u32,
    ip: *const u8,
) {
    // SAFETY: the list of `query_addresses`; a name, and octets of the lengths in the callback's
    // contract.
    unsafe {
        let list = &mut *list.cast::<Vec<DeviceAddress>>();
        list.push(DeviceAddress {
            name: CStr::from_ptr(name).to_owned(),
            interface,
            mac: mac.cast::<[u8; 6]>().read(),
            mtu,
            ip: Ipv6Addr::from(ip.cast::<[u8; 16]>().read()).to_canonical(),
        });
    }
}

fn query_addresses() -> Option<Vec<DeviceAddress>> {
    let mut list: Vec<DeviceAddress> = Vec::new();
    // SAFETY: the function and its list.
    if unsafe { verbs::list_addresses(add_address, (&raw mut list).cast()) } != 0 {
        return None;
    }
    let kernel = kernel_addresses();
    list.retain(|addr| !kernel.contains(&addr.ip));
    Some(list)
}

/// All device addresses, as of the first contact with siwd.
pub fn device_addresses() -> &'static [DeviceAddress] {
    static KNOWN: OnceLock<Vec<DeviceAddress>> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return known;
    }
    let _guard = CancelGuard::new();
    match query_addresses() {
        Some(list) => KNOWN.get_or_init(|| list),
        None => &[],
    }
}

/// Loopback address of the kernel that represents an address of siwd: in 127.128.0.0/9, which is
/// rarely used otherwise. IPv6 has only one loopback address.
fn loopback_address(ip: IpAddr) -> Ipv4Addr {
    let [high, middle, low] = match ip {
        IpAddr::V4(v4) => {
            let [first, second, third, fourth] = v4.octets();
            [first.rotate_left(4) ^ second, third, fourth]
        }
        IpAddr::V6(v6) => {
            // FNV-1a, folded.
            let hash = v6.octets().iter().fold(0x811c_9dc5, |hash: u32, octet| {
                (hash ^ u32::from(*octet)).wrapping_mul(0x0100_0193)
            });
            let [first, second, third, fourth] = hash.to_be_bytes();
            [first ^ second, third, fourth]
        }
    };
    Ipv4Addr::new(127, 128 | high, middle, low)
}

/// A socket address for the kernel, of either family.
#[derive(Clone, Copy)]
pub union KernelAddress {
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

impl KernelAddress {
    /// Pointer for socket calls.
    pub fn as_abi(&self) -> *const sockaddr {
        (&raw const *self).cast()
    }
}

/// # Safety
/// NULL, or valid for `length` bytes.
pub unsafe fn read_address(addr: *const sockaddr, length: socklen_t) -> Option<KernelAddress> {
    let length = length as usize;
    // SAFETY: as the caller promised; the length is at least that of the family.
    unsafe {
        if addr.is_null() || length < size_of::<sockaddr_in>() {
            return None;
        }
        let family = (&raw const (*addr).sa_family).read_unaligned();
        match c_int::from(family) {
            libc::AF_INET => Some(KernelAddress {
                v4: addr.cast::<sockaddr_in>().read_unaligned(),
            }),
            libc::AF_INET6 if length >= size_of::<sockaddr_in6>() => Some(KernelAddress {
                v6: addr.cast::<sockaddr_in6>().read_unaligned(),
            }),
            _ => None,
        }
    }
}

impl KernelAddress {
    fn family(&self) -> c_int {
        // SAFETY: both begin with the family.
        c_int::from(unsafe { self.v4.sin_family })
    }

    /// Checks for the IPv6 family.
    pub fn is_v6(&self) -> bool {
        self.family() == libc::AF_INET6
    }

    /// The IP address; an IPv4-mapped one as IPv4.
    pub fn ip(&self) -> IpAddr {
        // SAFETY: the family determines the valid field.
        unsafe {
            if self.is_v6() {
                Ipv6Addr::from(self.v6.sin6_addr.s6_addr).to_canonical()
            } else {
                Ipv4Addr::from(self.v4.sin_addr.s_addr.to_ne_bytes()).into()
            }
        }
    }

    /// Replaces the IP address.
    fn with_ip(mut self, ip: Ipv4Addr) -> KernelAddress {
        if self.is_v6() {
            self.v6.sin6_addr.s6_addr = ip.to_ipv6_mapped().octets();
        } else {
            self.v4.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
        }
        self
    }

    /// The loopback address that represents it, if it is an address of siwd.
    pub fn to_loopback(self) -> Option<KernelAddress> {
        let ip = self.ip();
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
            return None;
        }
        let is_known = device_addresses().iter().any(|known| known.ip == ip);
        is_known.then(|| self.with_ip(loopback_address(ip)))
    }
}
