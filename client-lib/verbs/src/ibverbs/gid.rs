//! GIDs (ibv_query_gid(3), ibv_query_gid_ex(3), ibv_query_gid_table(3)): the IP addresses of a
//! device, and the Ethernet address, which is the GID of iWARP devices under Linux; devices with another
//! persona do not show it. The daemon has the
//! table: its addresses may change, and an entry keeps its index for its life and then leaves a hole.

use super::context::ContextObject;
use super::device::DeviceObject;
use super::port::PORT;
use crate::abi::*;
use crate::status::{explain, fail_errno, fail_with};
use siw::{Error, Persona};
use siw_shm::device_identity::interface_index;
pub use siw_shm::device_identity::ip_of_gid;
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

/// The GIDs of a context's device as they are now, by index; None is a hole.
pub fn device_gids(context: &ContextObject) -> Result<Vec<Option<DeviceGid>>, Error> {
    let info = context.device().info();
    let persona = context.device().persona();
    let gids = context.client().query_gids(info.index)?;
    let shown = |raw: Option<[u8; 16]>| raw.filter(|raw| persona.shows_gid(*raw, info.mac));
    let with_ip = |raw| DeviceGid {
        raw,
        ip: ip_of_gid(raw),
    };
    Ok(gids
        .into_iter()
        .map(|raw| shown(raw).map(with_ip))
        .collect())
}

/// Programs know the GID types of RoCE, where version 2 carries an IP address.
fn gid_type(persona: Persona, gid: &DeviceGid) -> ibv_gid_type {
    if persona.has_roce_gids() && gid.ip.is_some() {
        IBV_GID_TYPE_ROCE_V2
    } else {
        IBV_GID_TYPE_IB
    }
}

/// Returns the GID at an index, None for a hole, or the errno of a failure.
///
/// # Safety
/// A context of this library.
unsafe fn gid_at(
    context: *mut ibv_context,
    port_num: u32,
    index: u32,
) -> Result<Option<DeviceGid>, c_int> {
    // SAFETY: by the caller's contract.
    let context = unsafe { ContextObject::from_abi(context) };
    if port_num != PORT {
        return Err(libc::EINVAL);
    }
    let gids = device_gids(context).map_err(|error| fail_with("ibv_query_gid", &error))?;
    gids.get(index as usize).copied().ok_or_else(|| {
        let last = gids.len().saturating_sub(1);
        explain(&format_args!(
            "the device has no GID index {index}: its GIDs have the indices 0 to {last}"
        ));
        libc::EINVAL
    })
}

/// ibv_query_gid(3); a hole is a GID of zeros.
pub unsafe fn query_gid(
    context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let index = u32::try_from(index).unwrap_or(u32::MAX);
    // SAFETY: a context of this library.
    match unsafe { gid_at(context, port_num.into(), index) } {
        Ok(found) => {
            let raw = found.map_or([0; 16], |found| found.raw);
            // SAFETY: a GID to write.
            unsafe { gid.write(ibv_gid { raw }) };
            0
        }
        Err(errno) => {
            fail_errno(errno);
            -1
        }
    }
}

/// The number of the network interface that `siwrun` shows for a device; 0 if it shows none, and for GIDs of
/// InfiniBand, which belong to no interface.
fn shown_interface(device: &DeviceObject) -> u32 {
    if !device.persona().has_roce_gids() {
        return 0;
    }
    let info = device.info();
    let number = interface_index(info.index);
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: room for a name. The preloaded library of `siwrun` overrides the function.
    let shown = unsafe { libc::if_indextoname(number, name.as_mut_ptr()) };
    if shown.is_null() { 0 } else { number }
}

fn to_entry(persona: Persona, index: usize, gid: &DeviceGid, ndev_ifindex: u32) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: gid.raw },
        gid_index: index as u32,
        port_num: PORT,
        gid_type: gid_type(persona, gid),
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
    let found = match unsafe { gid_at(context, port_num, index) } {
        Ok(Some(found)) => found,
        Ok(None) => return fail_errno(libc::ENODATA),
        Err(errno) => return fail_errno(errno),
    };
    // SAFETY: a context of this library.
    let device = unsafe { ContextObject::from_abi(context) }.device();
    let shown = to_entry(
        device.persona(),
        index as usize,
        &found,
        shown_interface(device),
    );
    // SAFETY: an entry to write, of at least this size.
    unsafe { entry.write(shown) };
    0
}

/// ibv_query_gid_table(3): the entries without the holes.
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
    let object = unsafe { ContextObject::from_abi(context) };
    let gids = match device_gids(object) {
        Ok(gids) => gids,
        Err(error) => return -(fail_with("ibv_query_gid_table", &error) as isize),
    };
    let interface = shown_interface(object.device());
    let persona = object.device().persona();
    let present = gids
        .iter()
        .enumerate()
        .filter_map(|(index, gid)| Some((index, gid.as_ref()?)));
    let count = present.clone().count();
    if count > max_entries {
        return -(libc::EINVAL as isize);
    }
    for (place, (index, gid)) in present.enumerate() {
        // SAFETY: there is room for `max_entries` entries of `entry_size` bytes.
        unsafe {
            entries
                .byte_add(place * entry_size)
                .write(to_entry(persona, index, gid, interface))
        };
    }
    count as isize
}

/// ibv_query_gid_type, of ibv_devinfo: 0 is IB and RoCE v1, also for a hole, 1 is RoCE v2.
pub unsafe fn query_gid_type(
    context: *mut ibv_context,
    port_num: u8,
    index: u32,
    kind: *mut u32,
) -> c_int {
    // SAFETY: a context of this library.
    let found = match unsafe { gid_at(context, port_num.into(), index) } {
        Ok(found) => found,
        Err(errno) => {
            fail_errno(errno);
            return -1;
        }
    };
    // SAFETY: as above.
    let persona = unsafe { ContextObject::from_abi(context) }
        .device()
        .persona();
    let is_ip = found.is_some_and(|found| gid_type(persona, &found) == IBV_GID_TYPE_ROCE_V2);
    // SAFETY: a number to write.
    unsafe { kind.write(is_ip.into()) };
    0
}
