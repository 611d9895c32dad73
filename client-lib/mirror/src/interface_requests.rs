//! Interface queries of older programs: the SIOCGIF* requests of ioctl(2) (netdevice(7)),
//! if_nametoindex(3), if_indextoname(3). The kernel answers for its own interfaces.

use crate::devices::{DeviceAddress, device_addresses};
use crate::interfaces::{FLAGS, V4_MASK, v4_address};
use crate::next::libc_calls;
use libc::{c_ulong, ifconf, ifreq, sockaddr};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::net::{IpAddr, Ipv4Addr};

/// The type of these requests, in their second octet.
const SOCKET_REQUESTS: c_ulong = 0x89;

fn set_errno(errno: c_int) {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// Addresses of the device whose interface has that name.
fn addresses_of(name: &[u8]) -> impl Iterator<Item = &'static DeviceAddress> {
    let is_named = move |device: &&DeviceAddress| device.interface_name() == name;
    device_addresses().iter().filter(is_named)
}

fn v4_of(device: &DeviceAddress) -> Option<Ipv4Addr> {
    match device.ip {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

/// Name in a request, which may lack the final zero.
fn requested_name(request: &ifreq) -> &[u8] {
    let name = &raw const request.ifr_name;
    // SAFETY: an array of octets, signed or not.
    let octets = unsafe { &*name.cast::<[u8; libc::IFNAMSIZ]>() };
    let length = octets.iter().position(|octet| *octet == 0);
    &octets[..length.unwrap_or(octets.len())]
}

fn put_address(request: &mut ifreq, ip: Ipv4Addr) {
    let addr = v4_address(ip);
    // SAFETY: an IPv4 address has the size of the generic one.
    request.ifr_ifru.ifru_addr = unsafe { (&raw const addr).cast::<sockaddr>().read_unaligned() };
}

/// Answers a request for one interface; an errno if there is no answer.
fn answer(code: c_ulong, request: &mut ifreq) -> Result<(), c_int> {
    let named: Vec<_> = addresses_of(requested_name(request)).collect();
    let first = *named.first().ok_or(libc::ENODEV)?;
    let v4 = named.iter().find_map(|device| v4_of(device));
    let union = &mut request.ifr_ifru;
    match code {
        libc::SIOCGIFFLAGS => union.ifru_flags = FLAGS as i16,
        libc::SIOCGIFINDEX => union.ifru_ifindex = first.interface as c_int,
        libc::SIOCGIFMTU => union.ifru_mtu = first.mtu as c_int,
        libc::SIOCGIFHWADDR => {
            // SAFETY: the struct is made of numbers.
            let mut addr: sockaddr = unsafe { std::mem::zeroed() };
            addr.sa_family = libc::ARPHRD_ETHER;
            for (to, from) in addr.sa_data.iter_mut().zip(first.mac) {
                *to = from as c_char;
            }
            union.ifru_hwaddr = addr;
        }
        libc::SIOCGIFADDR => put_address(request, v4.ok_or(libc::EADDRNOTAVAIL)?),
        libc::SIOCGIFNETMASK => {
            v4.ok_or(libc::EADDRNOTAVAIL)?;
            put_address(request, V4_MASK);
        }
        libc::SIOCGIFBRDADDR => put_address(request, v4.ok_or(libc::EADDRNOTAVAIL)? | !V4_MASK),
        _ => return Err(libc::ENODEV),
    }
    Ok(())
}

/// Writes the name of an interface, by its index, into a buffer of `IFNAMSIZ` octets.
///
/// # Safety
/// The buffer is writable.
unsafe fn write_name(index: c_uint, name: *mut c_char) -> bool {
    let mut all = device_addresses().iter();
    let Some(found) = all.find(|device| device.interface == index) else {
        return false;
    };
    let octets = found.interface_name();
    // SAFETY: as the caller promised; the name is shorter than the buffer.
    unsafe {
        name.copy_from_nonoverlapping(octets.as_ptr().cast(), octets.len());
        name.add(octets.len()).write(0);
    }
    true
}

/// Appends the interfaces with IPv4 addresses to those of the kernel, as far as there is room.
/// Without a buffer it only adds to the length.
///
/// # Safety
/// The contract of the request; the kernel has answered it, in a buffer of `size` octets.
unsafe fn add_interfaces(config: &mut ifconf, size: c_int) {
    let added = device_addresses().iter();
    let added = added.filter_map(|device| Some((device, v4_of(device)?)));
    // SAFETY: both members of the union are pointers.
    let buffer = unsafe { config.ifc_ifcu.ifcu_req };
    let length = size_of::<ifreq>() as c_int;
    for (device, ip) in added {
        if buffer.is_null() {
            config.ifc_len += length;
            continue;
        }
        if size - config.ifc_len < length {
            return;
        }
        // SAFETY: the struct is made of numbers and pointers.
        let mut entry: ifreq = unsafe { std::mem::zeroed() };
        let name = device.interface_name();
        for (to, from) in entry.ifr_name.iter_mut().zip(name) {
            *to = *from as c_char;
        }
        put_address(&mut entry, ip);
        // SAFETY: there is room for it behind the others.
        unsafe {
            let place = buffer.byte_add(config.ifc_len as usize);
            place.write_unaligned(entry);
        }
        config.ifc_len += length;
    }
}

/// SIOCGIFCONF: the kernel's interfaces, then those of the devices.
///
/// # Safety
/// The contract of the request.
unsafe fn list_interfaces(fd: c_int, argument: *mut ifconf) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        let size = argument.read_unaligned().ifc_len;
        let status = libc_calls::ioctl(fd, libc::SIOCGIFCONF, argument.cast());
        if status == 0 {
            let mut config = argument.read_unaligned();
            add_interfaces(&mut config, size);
            argument.write_unaligned(config);
        }
        status
    }
}

/// Name of the interface whose index the request has.
fn answer_name(request: &mut ifreq) -> Result<(), c_int> {
    // SAFETY: the index is a number, as are all other members.
    let index = unsafe { request.ifr_ifru.ifru_ifindex } as c_uint;
    // SAFETY: a buffer of `IFNAMSIZ` octets.
    let is_known = unsafe { write_name(index, request.ifr_name.as_mut_ptr()) };
    is_known.then_some(()).ok_or(libc::ENODEV)
}

/// ioctl(2). The structs of a program may be unaligned: Python passes the octets of an object.
#[unsafe(export_name = "ioctl")]
unsafe extern "C-unwind" fn request(fd: c_int, code: c_ulong, argument: *mut c_void) -> c_int {
    if code >> 8 != SOCKET_REQUESTS || argument.is_null() {
        // SAFETY: by the contract of the manual page.
        return unsafe { libc_calls::ioctl(fd, code, argument) };
    }
    // SAFETY: the manual page of each request defines its argument.
    unsafe {
        if code == libc::SIOCGIFCONF {
            return list_interfaces(fd, argument.cast());
        }
        let status = libc_calls::ioctl(fd, code, argument);
        if status == 0 || errno() != libc::ENODEV {
            return status;
        }
        let answer: fn(c_ulong, &mut ifreq) -> Result<(), c_int> = match code {
            libc::SIOCGIFFLAGS
            | libc::SIOCGIFINDEX
            | libc::SIOCGIFMTU
            | libc::SIOCGIFHWADDR
            | libc::SIOCGIFADDR
            | libc::SIOCGIFNETMASK
            | libc::SIOCGIFBRDADDR => answer,
            libc::SIOCGIFNAME => |_, request| answer_name(request),
            _ => return status,
        };
        let argument: *mut ifreq = argument.cast();
        let mut request = argument.read_unaligned();
        match answer(code, &mut request) {
            Ok(()) => {
                argument.write_unaligned(request);
                0
            }
            Err(errno) => {
                set_errno(errno);
                -1
            }
        }
    }
}

#[unsafe(export_name = "if_nametoindex")]
unsafe extern "C-unwind" fn name_to_index(name: *const c_char) -> c_uint {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let index = libc_calls::if_nametoindex(name);
        if index != 0 {
            return index;
        }
        let errno = errno();
        let mut named = addresses_of(CStr::from_ptr(name).to_bytes());
        let found = named.next().map_or(0, |device| device.interface);
        set_errno(errno);
        found
    }
}

#[unsafe(export_name = "if_indextoname")]
unsafe extern "C-unwind" fn index_to_name(index: c_uint, name: *mut c_char) -> *mut c_char {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let found = libc_calls::if_indextoname(index, name);
        if !found.is_null() {
            return found;
        }
        let errno = errno();
        if write_name(index, name) {
            return name;
        }
        set_errno(errno);
        std::ptr::null_mut()
    }
}
