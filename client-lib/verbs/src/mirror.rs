//! The addresses of the devices, for the library by which `siwrun` adds them to those of the kernel
//! (crate `siw-mirror`).

use crate::export::export_symbols;
use siw::Context;
use siw_shm::device_identity::interface_index;
use std::ffi::{CString, c_char, c_int, c_void};
use std::net::IpAddr;

/// Callback with the name of a device, its network interface index, Ethernet address (6 octets),
/// MTU, and one of its addresses (16 octets; IPv4 as IPv4-mapped IPv6).
type AddAddress = unsafe extern "C" fn(*mut c_void, *const c_char, u32, *const u8, u32, *const u8);

/// Calls the function for each address of each device; -1 if there is no daemon.
pub unsafe fn list_addresses(add: AddAddress, list: *mut c_void) -> c_int {
    let Ok(devices) = Context::open(None).and_then(|client| client.query_devices()) else {
        return -1;
    };
    for info in devices {
        let Ok(name) = CString::new(info.name) else {
            continue;
        };
        for ip in info.ips {
            let octets = match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            // SAFETY: a function with its argument; text and octets have the layout that it
            // expects.
            unsafe {
                let (mac, octets) = (info.mac.as_ptr(), octets.as_ptr());
                let interface = interface_index(info.index);
                add(list, name.as_ptr(), interface, mac, info.mtu, octets);
            }
        }
    }
    0
}

export_symbols! { "SIWD_PRIVATE":
    fn siw_list_addresses(add: AddAddress, list: *mut c_void) -> c_int = list_addresses;
}
