//! The port of a device (ibv_query_port(3), ibv_query_pkey(3)): each device has one.

use super::context::ContextObject;
use super::faulty::ContextFaults;
use super::gid::device_gids;
use crate::abi::*;
use crate::status::{fail_errno, fail_with};
use siw::{DeviceInfo, Error, Persona};
use siw_shm::device_identity::link_rate;
use std::ffi::c_int;
use std::mem::offset_of;

/// The number of the only port.
pub const PORT: u32 = 1;

/// Linux numbers of `phys_state`.
const PHYS_DISABLED: u8 = 3;
const PHYS_LINK_UP: u8 = 5;

/// `IBV_QPF_GRH_REQUIRED`: each address vector needs a GID.
const GRH_REQUIRED: u8 = 1;

/// Offset of `active_speed_ex`, which later releases have behind the fields of this one; zero means `active_speed`.
const SPEED_EX: usize = 52;

/// Headers and trailer of a datagram within an IP packet: IPv6 40, UDP 8, BTH 12, DETH 8, immediate data 4 and
/// ICRC 4 bytes (InfiniBand Architecture Specification, annex A17). Programs send datagrams of the port's MTU.
const DATAGRAM_HEADERS: u32 = 76;

/// Rounds down to a power of two of the enumeration.
fn to_mtu(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

/// The path MTU of a device with this MTU in bytes.
pub fn active_mtu(persona: Persona, mtu: u32) -> ibv_mtu {
    match persona.has_datagrams() {
        true => to_mtu(mtu.saturating_sub(DATAGRAM_HEADERS)),
        false => to_mtu(mtu),
    }
}

/// The attributes of a port whose GID table has `gids` places.
fn port_attributes(context: &ContextObject, info: &DeviceInfo, gids: usize) -> ibv_port_attr {
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    let is_down = context.faults().is_some_and(ContextFaults::is_port_down);
    let is_active = info.active && !is_down;
    attr.state = if is_active {
        IBV_PORT_ACTIVE
    } else {
        IBV_PORT_DOWN
    };
    let persona = context.device().persona();
    attr.max_mtu = active_mtu(persona, info.mtu);
    attr.active_mtu = attr.max_mtu;
    attr.gid_tbl_len = gids as c_int;
    attr.max_msg_sz = u32::try_from(context.client().limits().max_msg).unwrap_or(u32::MAX);
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    let rate = link_rate(info.link_mbps);
    (attr.active_speed, attr.active_width) = (rate.speed, rate.width);
    attr.phys_state = if is_active {
        PHYS_LINK_UP
    } else {
        PHYS_DISABLED
    };
    attr.link_layer = persona.link_layer() as u8;
    attr.lid = persona.lid(info.ips.iter().copied());
    attr.sm_lid = attr.lid;
    attr.port_cap_flags = persona.port_capabilities();
    if persona.requires_gids() {
        attr.flags = GRH_REQUIRED;
    }
    attr
}

/// ibv_query_port(3) as programs call it through the context: `length` is the size of the struct in
/// their release.
pub unsafe fn query_port_sized(
    context: *mut ibv_context,
    port_num: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    if u32::from(port_num) != PORT {
        return fail_errno(libc::EINVAL);
    }
    // SAFETY: a context of this library.
    let context = unsafe { ContextObject::from_abi(context) };
    let info = context.client().query_device(context.device().info().index);
    let queried = info.and_then(|info| Ok((info, device_gids(context)?.len())));
    let full = match queried {
        Ok((info, gids)) => port_attributes(context, &info, gids),
        Err(error) => return fail_with("ibv_query_port", &error),
    };
    let has_speed_ex =
        length >= SPEED_EX + size_of::<u32>() && context.device().persona() != Persona::Iwarp;
    // SAFETY: the caller's struct has `length` bytes; fields unknown to this release are zeroed.
    unsafe {
        let bytes: *mut u8 = attr.cast();
        bytes.write_bytes(0, length);
        bytes.copy_from_nonoverlapping(
            (&raw const full).cast(),
            length.min(size_of::<ibv_port_attr>()),
        );
        if has_speed_ex {
            let speed: *mut u32 = bytes.add(SPEED_EX).cast();
            speed.write_unaligned(full.active_speed.into());
        }
    }
    0
}

/// ibv_query_port_speed(3), in units of 100 Mb/s: the speed of the link itself, which ibv_query_port(3)
/// rounds down to a rate of InfiniBand.
pub unsafe fn query_port_speed(context: *mut ibv_context, port_num: u32, speed: *mut u64) -> c_int {
    if port_num != PORT {
        return fail_errno(libc::EINVAL);
    }
    // SAFETY: a context of this library.
    let context = unsafe { ContextObject::from_abi(context) };
    let info: Result<DeviceInfo, Error> =
        context.client().query_device(context.device().info().index);
    match info {
        // SAFETY: a number to write.
        Ok(info) => unsafe { speed.write(u64::from(info.link_mbps / 100)) },
        Err(error) => return fail_with("ibv_query_port_speed", &error),
    }
    0
}

/// Size of the struct of the exported function ibv_query_port: that of the header without the fields
/// behind `flags`, which later releases added. The header only declares its type, so that programs
/// pass a pointer to their own `struct ibv_port_attr`.
const SYMBOL_LENGTH: usize = 48;
const _: () = assert!(offset_of!(ibv_port_attr, flags) + 1 == SYMBOL_LENGTH);

/// The exported function ibv_query_port, for programs that look it up by name or declare it
/// themselves; programs compiled against the header call [`query_port_sized`].
pub unsafe fn query_port(
    context: *mut ibv_context,
    port_num: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { query_port_sized(context, port_num, attr.cast(), SYMBOL_LENGTH) }
}

/// ibv_query_pkey(3): iWARP has no partitions; it reports the default partition with full
/// membership.
pub unsafe fn query_pkey(
    _context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    if u32::from(port_num) != PORT || index != 0 {
        fail_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: a number to write.
    unsafe { pkey.write(0xffff_u16.to_be()) };
    0
}

/// ibv_get_pkey_index(3)
pub unsafe fn get_pkey_index(_context: *mut ibv_context, port_num: u8, pkey: u16) -> c_int {
    if u32::from(port_num) == PORT && pkey == 0xffff_u16.to_be() {
        return 0;
    }
    fail_errno(libc::EINVAL);
    -1
}
