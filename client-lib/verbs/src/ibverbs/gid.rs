//! GIDs (ibv_query_gid(3), ibv_query_gid_ex(3), ibv_query_gid_table(3)): the IP addresses of a
//! device, and last the Ethernet address, which is the GID of iWARP devices under Linux.

use super::context::ContextObject;
use super::port::PORT;
use crate::abi::*;
use crate::status::{explain, fail_errno};
use siw::DeviceInfo;
pub use siw_shm::device_identity::ip_of_gid;
use siw_shm::device_identity::{gid_table, interface_index};
use std::ffi::c_int;
use std::net::IpAddr;

/// A GID and the IP address in it.
#[derive(Clone, Copy)]
pub struct DeviceGid {
    /// Raw bytes, in network order.
    pub raw: [u8; 16],
    /// The IP address; None for the Ethernet address.
    pub ip: Option<IpAddr>,
}

/// All GIDs of a device, by index.
pub fn device_gids(info: &DeviceInfo) -> Vec<DeviceGid> {
    let gids = gid_table(info.mac, info.ips.iter().copied());
    let with_ip = |raw| DeviceGid {
        raw,
        ip: ip_of_gid(raw),
    };
    gids.into_iter().map(with_ip).collect()
}

/// Programs know the GID types of RoCE, where version 2 carries an IP address.
fn gid_type(gid: &DeviceGid) -> ibv_gid_type {
    if gid.ip.is_some() {
        IBV_GID_TYPE_ROCE_V2
    } else {
        IBV_GID_TYPE_IB
    }
}

/// # Safety
/// A context of this library.
unsafe fn gid_at(context: *mut ibv_context, port_num: u32, index: u32) -> Option<DeviceGid> {
    // SAFETY: by the caller's contract.
    let context = unsafe { ContextObject::from_abi(context) };
    let gids = device_gids(context.device().info());
    let found = (port_num == PORT).then(|| gids.get(index as usize).copied())?;
    if found.is_none() {
        let last = gids.len().saturating_sub(1);
        explain(&format_args!(
            "the device has no GID index {index}: its GIDs have the indices 0 to {last}"
        ));
    }
    found
}

/// ibv_query_gid(3)
pub unsafe fn query_gid(
    context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    // SAFETY: a context of this library.
    let Some(found) = (unsafe { gid_at(context, port_num.into(), index) }) else {
        fail_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: a GID to write.
    unsafe { gid.write(ibv_gid { raw: found.raw }) };
    0
}

/// The number of the network interface that `siwrun` shows for a device; 0 if it shows none.
fn shown_interface(info: &DeviceInfo) -> u32 {
    let number = interface_index(info.index);
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: room for a name. The preloaded library of `siwrun` overrides the function.
    let shown = unsafe { libc::if_indextoname(number, name.as_mut_ptr()) };
    if shown.is_null() { 0 } else { number }
}

fn to_entry(index: usize, gid: &DeviceGid, ndev_ifindex: u32) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.raw },
        gid_index: index as u32,
        port_num: PORT,
        gid_type: gid_type(gid),
        ndev_ifindex,
    }
}

/// ibv_query_gid_ex(3); `entry_size` is the size of the struct in the caller's release.
pub unsafe fn query_gid_ex(
    context: *mut ibv_context,
    port_num: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    if flags != 0 || entry_size < size_of::<ibv_gid_entry>() {
        return fail_errno(libc::EINVAL);
    }
    // SAFETY: a context of this library.
    let Some(found) = (unsafe { gid_at(context, port_num, index) }) else {
        return fail_errno(libc::ENODATA);
    };
    // SAFETY: a context of this library.
    let interface = shown_interface(unsafe { ContextObject::from_abi(context) }.device().info());
    // SAFETY: an entry to write, of at least this size.
    unsafe { entry.write(to_entry(index as usize, &found, interface)) };
    0
}

/// ibv_query_gid_table(3)
pub unsafe fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    if flags != 0 || entry_size < size_of::<ibv_gid_entry>() {
        return -(libc::EINVAL as isize);
    }
    // SAFETY: a context of this library.
    let info = unsafe { ContextObject::from_abi(context) }.device().info();
    let (gids, interface) = (device_gids(info), shown_interface(info));
    if gids.len() > max_entries {
        return -(libc::EINVAL as isize);
    }
    for (i, gid) in gids.iter().enumerate() {
        // SAFETY: there is room for `max_entries` entries of `entry_size` bytes.
        unsafe {
            entries
                .byte_add(i * entry_size)
                .write(to_entry(i, gid, interface))
        };
    }
    gids.len() as isize
}

/// ibv_query_gid_type, of ibv_devinfo: 0 is IB and RoCE v1, 1 is RoCE v2.
pub unsafe fn query_gid_type(
    context: *mut ibv_context,
    port_num: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    // SAFETY: a context of this library.
    let Some(found) = (unsafe { gid_at(context, port_num.into(), index) }) else {
        fail_errno(libc::EINVAL);
        return -1;
    };
    // SAFETY: a number to write.
    unsafe { kind.write(u32::from(gid_type(&found) == IBV_GID_TYPE_ROCE_V2)) };
    0
}
