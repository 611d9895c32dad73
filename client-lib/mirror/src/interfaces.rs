//! Network interfaces for the devices of siwd (getifaddrs(3)), after those of the kernel.

use crate::devices::{DeviceAddress, device_addresses, read_address};
use crate::fork_lock::ForkLock;
use crate::next::libc_calls;
use libc::{ifaddrs, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_ll, socklen_t};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::null_mut;
use std::sync::{LazyLock, MutexGuard};

/// Entries appended to a list of the C library, by the address of the list's head.
static ADDED: LazyLock<ForkLock<HashMap<usize, Box<[InterfaceEntry]>>>> =
    LazyLock::new(|| ForkLock::new(hold_added, release_added));

/// Called when the library is loaded, before the program has threads that fork.
extern "C" fn on_load() {
    LazyLock::force(&ADDED);
}

#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

unsafe extern "C" fn hold_added() {
    ADDED.hold();
}

unsafe extern "C" fn release_added() {
    ADDED.release();
}

/// Flags of the interfaces, which are always up.
pub const FLAGS: c_int =
    libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_BROADCAST | libc::IFF_MULTICAST;
/// Netmasks: siwd does not report prefix lengths; these are the usual ones.
pub const V4_MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
pub const V6_MASK: Ipv6Addr = Ipv6Addr::new(0xffff, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0);

/// An address of any family in an entry.
#[derive(Clone, Copy)]
pub union EntryAddress {
    v4: sockaddr_in,
    v6: sockaddr_in6,
    packet: sockaddr_ll,
}

/// A list entry with the data that it points to.
struct InterfaceEntry {
    abi: ifaddrs,
    name: [u8; libc::IFNAMSIZ],
    addr: EntryAddress,
    mask: Option<EntryAddress>,
    broadcast: Option<EntryAddress>,
}

// SAFETY: its pointers refer to the list that contains it, and move with its owner.
unsafe impl Send for InterfaceEntry {}

/// An IPv4 address without a port.
pub fn v4_address(ip: Ipv4Addr) -> EntryAddress {
    // SAFETY: the struct is made of numbers.
    let mut addr: sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = libc::AF_INET as libc::sa_family_t;
    addr.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
    EntryAddress { v4: addr }
}

fn v6_address(ip: Ipv6Addr) -> EntryAddress {
    // SAFETY: the struct is made of numbers.
    let mut addr: sockaddr_in6 = unsafe { std::mem::zeroed() };
    addr.sin6_family = libc::AF_INET6 as libc::sa_family_t;
    addr.sin6_addr.s6_addr = ip.octets();
    EntryAddress { v6: addr }
}

fn packet_address(device: &DeviceAddress) -> EntryAddress {
    // SAFETY: the struct is made of numbers.
    let mut addr: sockaddr_ll = unsafe { std::mem::zeroed() };
    addr.sll_family = libc::AF_PACKET as libc::sa_family_t;
    addr.sll_ifindex = device.interface as c_int;
    addr.sll_hatype = libc::ARPHRD_ETHER;
    addr.sll_halen = device.mac.len() as u8;
    addr.sll_addr[..device.mac.len()].copy_from_slice(&device.mac);
    EntryAddress { packet: addr }
}

impl InterfaceEntry {
    fn new(device: &DeviceAddress, addr: EntryAddress) -> InterfaceEntry {
        let mut name = [0; libc::IFNAMSIZ];
        let octets = device.interface_name();
        name[..octets.len()].copy_from_slice(octets);
        InterfaceEntry {
            // SAFETY: the struct is made of numbers and pointers.
            abi: unsafe { std::mem::zeroed() },
            name,
            addr,
            mask: None,
            broadcast: None,
        }
    }

    fn of_address(device: &DeviceAddress) -> InterfaceEntry {
        match device.ip {
            IpAddr::V4(ip) => InterfaceEntry {
                mask: Some(v4_address(V4_MASK)),
                broadcast: Some(v4_address(ip | !V4_MASK)),
                ..InterfaceEntry::new(device, v4_address(ip))
            },
            IpAddr::V6(ip) => InterfaceEntry {
                mask: Some(v6_address(V6_MASK)),
                ..InterfaceEntry::new(device, v6_address(ip))
            },
        }
    }

    /// Sets its pointers; it must not move afterwards.
    fn link(&mut self, next: *mut ifaddrs) {
        fn pointer(addr: &mut Option<EntryAddress>) -> *mut sockaddr {
            addr.as_mut()
                .map_or(null_mut(), |addr| (&raw mut *addr).cast())
        }
        self.abi.ifa_next = next;
        self.abi.ifa_name = self.name.as_mut_ptr().cast::<c_char>();
        self.abi.ifa_flags = FLAGS as c_uint;
        self.abi.ifa_addr = (&raw mut self.addr).cast();
        self.abi.ifa_netmask = pointer(&mut self.mask);
        self.abi.ifa_ifu = pointer(&mut self.broadcast);
    }
}

/// Creates a list of the entries of all devices.
fn device_entries() -> Box<[InterfaceEntry]> {
    let devices = device_addresses();
    let mut packets: Vec<InterfaceEntry> = Vec::new();
    let mut last = None;
    for device in devices {
        if last.replace(device.interface) != Some(device.interface) {
            packets.push(InterfaceEntry::new(device, packet_address(device)));
        }
    }
    let addresses = devices.iter().map(InterfaceEntry::of_address);
    let mut entries: Box<[InterfaceEntry]> = packets.into_iter().chain(addresses).collect();
    let mut next = null_mut();
    for entry in entries.iter_mut().rev() {
        entry.link(next);
        next = &raw mut entry.abi;
    }
    entries
}

fn lock_added() -> MutexGuard<'static, HashMap<usize, Box<[InterfaceEntry]>>> {
    ADDED.lock()
}

#[unsafe(export_name = "getifaddrs")]
unsafe extern "C-unwind" fn list_interfaces(list: *mut *mut ifaddrs) -> c_int {
    // SAFETY: by the contract of the manual page.
    let status = unsafe { libc_calls::getifaddrs(list) };
    if status != 0 {
        return status;
    }
    let mut entries = device_entries();
    let Some(first) = entries.first_mut() else {
        return status;
    };
    let first = &raw mut first.abi;
    // SAFETY: a list of the C library, whose end is found and written.
    unsafe {
        // The program's own pointer may be unaligned; those of the C library are not.
        let mut head = list.read_unaligned();
        if head.is_null() {
            head = first;
            list.write_unaligned(first);
        } else {
            let mut end = &raw mut (*head).ifa_next;
            while !(*end).is_null() {
                end = &raw mut (**end).ifa_next;
            }
            *end = first;
        }
        lock_added().insert(head.addr(), entries);
    }
    status
}

#[unsafe(export_name = "freeifaddrs")]
unsafe extern "C-unwind" fn free_interfaces(list: *mut ifaddrs) {
    let added = lock_added().remove(&list.addr());
    // If the C library has no interfaces, the list is only that of the devices.
    let is_own = added
        .iter()
        .flatten()
        .any(|entry| std::ptr::eq(&raw const entry.abi, list));
    if !is_own {
        // SAFETY: a list of the C library, which frees it as one piece.
        unsafe { libc_calls::freeifaddrs(list) };
    }
}

/// The kernel's own addresses.
pub fn kernel_addresses() -> Vec<IpAddr> {
    let mut list: *mut ifaddrs = null_mut();
    // SAFETY: a place for a list.
    if unsafe { libc_calls::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let mut entry = list;
    // SAFETY: a list of the C library; addresses have the length of their family.
    unsafe {
        while let Some(found) = entry.as_ref() {
            let length = size_of::<sockaddr_in6>() as socklen_t;
            all.extend(read_address(found.ifa_addr, length).map(|addr| addr.ip()));
            entry = found.ifa_next;
        }
        libc_calls::freeifaddrs(list);
    }
    all
}
