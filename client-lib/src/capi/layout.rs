//! The structs of `siw.h`.

use super::SiwWrUnion;
use crate::{AsyncEvent, Cq, DeviceInfo, Sge, Srq, Wc};
use siw_shm::control::MpaOptions;
use std::ffi::c_char;
use std::net::SocketAddr;

/// `struct siw_send_wr`
#[repr(C)]
pub struct SiwSendWr {
    pub wr_id: u64,
    pub sg_list: *const Sge,
    pub num_sge: u32,
    pub opcode: u32,
    pub flags: u32,
    pub inv_rkey: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub reserved: u32,
    pub what: SiwWrUnion,
}

/// `struct siw_recv_wr`
#[repr(C)]
pub struct SiwRecvWr {
    pub wr_id: u64,
    pub sg_list: *const Sge,
    pub num_sge: u32,
    pub reserved: u32,
}

/// `struct siw_wc`
#[repr(C)]
pub struct SiwWc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub qp_num: u32,
    pub byte_len: u32,
    pub flags: u32,
    pub invalidated_rkey: u32,
    pub vendor_err: u32,
    pub src_qp: u32,
}

impl From<&Wc> for SiwWc {
    #[inline]
    fn from(completion: &Wc) -> SiwWc {
        SiwWc {
            wr_id: completion.wr_id,
            status: completion.status.0.into(),
            opcode: completion.opcode.0.into(),
            qp_num: completion.qp_num,
            byte_len: completion.byte_len,
            flags: completion.flags.0.into(),
            invalidated_rkey: completion.imm,
            vendor_err: completion.vendor_err,
            src_qp: completion.src_qp,
        }
    }
}

/// `struct siw_qp_init_attr`
#[repr(C)]
pub struct SiwQpInitAttr {
    pub size: u32,
    pub sq_sig_all: u32,
    pub send_cq: *const Cq,
    pub recv_cq: *const Cq,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
    pub reserved: u32,
    pub srq: *const Srq,
}

/// `struct siw_device_attr`
#[repr(C)]
pub struct SiwDeviceAttr {
    pub name: [c_char; 32],
    pub mac: [u8; 8],
    pub index: u32,
    pub mtu: u32,
    pub active: u32,
    pub num_addrs: u32,
    pub capabilities: u64,
    pub addrs: [libc::sockaddr_storage; 8],
}

/// `struct siw_conn_param`
#[repr(C)]
pub struct SiwConnParam {
    pub size: u32,
    pub private_data_len: u32,
    pub private_data: *const u8,
    pub initiator_depth: u32,
    pub responder_resources: u32,
    pub timeout_ms: u32,
    pub crc: i32,
    pub mpa_rev: i32,
    pub refusals: u8,
    pub wait_for_receives: u8,
    pub reserved: u16,
    pub source_len: u32,
    pub source: *const libc::sockaddr,
    pub cookie: u64,
}

/// `struct siw_cm_event`
#[repr(C)]
pub struct SiwCmEvent {
    pub kind: u32,
    pub err: i32,
    pub cookie: u64,
    pub request: *mut crate::ConnectionRequest,
    pub qp_num: u32,
    pub request_id: u32,
    pub device: u32,
    pub initiator_depth: u32,
    pub responder_resources: u32,
    pub crc: u32,
    pub mpa_rev: u32,
    pub private_data_len: u32,
    pub local: libc::sockaddr_storage,
    pub peer: libc::sockaddr_storage,
    pub reason: [c_char; 128],
    pub private_data: [u8; 512],
}

/// `struct siw_async_event`
#[repr(C)]
pub struct SiwAsyncEvent {
    pub kind: u32,
    pub object: u32,
    pub reason: [c_char; 128],
}

/// Converts to a zero-terminated string, truncated if too long.
pub(super) fn c_text<const N: usize>(s: &str) -> [c_char; N] {
    let mut t = [0; N];
    for (to, from) in t[..N - 1].iter_mut().zip(s.bytes()) {
        *to = from as c_char;
    }
    t
}

impl From<&AsyncEvent> for SiwAsyncEvent {
    fn from(event: &AsyncEvent) -> Self {
        SiwAsyncEvent {
            kind: event.kind.map_or(u32::MAX, |k| k as u32),
            object: event.object,
            reason: c_text(&event.reason),
        }
    }
}

impl From<&DeviceInfo> for SiwDeviceAttr {
    fn from(device: &DeviceInfo) -> Self {
        let mut addrs = [from_socket_addr(None); 8];
        for (to, ip) in addrs.iter_mut().zip(&device.ips) {
            *to = from_socket_addr(Some(SocketAddr::new(*ip, 0)));
        }
        let mut mac = [0; 8];
        mac[..6].copy_from_slice(&device.mac);
        SiwDeviceAttr {
            name: c_text(&device.name),
            mac,
            index: device.index,
            mtu: device.mtu,
            active: device.active.into(),
            num_addrs: device.ips.len().min(8) as u32,
            capabilities: device.capabilities,
            addrs,
        }
    }
}

/// Converts to C; all zero for None.
pub(super) fn from_socket_addr(a: Option<SocketAddr>) -> libc::sockaddr_storage {
    // SAFETY: all zero is a valid sockaddr_storage.
    let mut s: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let pointer = &raw mut s;
    match a {
        None => {}
        Some(SocketAddr::V4(v4)) => {
            // SAFETY: sockaddr_storage has room and alignment for sockaddr_in.
            let sin = unsafe { &mut *pointer.cast::<libc::sockaddr_in>() };
            sin.sin_family = libc::AF_INET as libc::sa_family_t;
            sin.sin_port = v4.port().to_be();
            sin.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
        }
        Some(SocketAddr::V6(v6)) => {
            // SAFETY: as above for sockaddr_in6.
            let sin = unsafe { &mut *pointer.cast::<libc::sockaddr_in6>() };
            sin.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            sin.sin6_port = v6.port().to_be();
            sin.sin6_addr.s6_addr = v6.ip().octets();
            sin.sin6_scope_id = v6.scope_id();
        }
    }
    s
}

/// Converts from C; None for NULL, unknown families and short lengths.
///
/// # Safety
/// `pointer` is NULL or valid for `len` bytes.
pub(super) unsafe fn to_socket_addr(
    pointer: *const libc::sockaddr,
    len: libc::socklen_t,
) -> Option<SocketAddr> {
    let len = len as usize;
    if pointer.is_null() || len < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: the family is inside len bytes; reads are unaligned.
    let family = i32::from(unsafe { pointer.cast::<libc::sa_family_t>().read_unaligned() });
    if family == libc::AF_INET && len >= size_of::<libc::sockaddr_in>() {
        // SAFETY: len covers it.
        let sin = unsafe { pointer.cast::<libc::sockaddr_in>().read_unaligned() };
        let ip = sin.sin_addr.s_addr.to_ne_bytes();
        return Some(SocketAddr::from((ip, u16::from_be(sin.sin_port))));
    }
    if family == libc::AF_INET6 && len >= size_of::<libc::sockaddr_in6>() {
        // SAFETY: len covers it.
        let sin = unsafe { pointer.cast::<libc::sockaddr_in6>().read_unaligned() };
        let port = u16::from_be(sin.sin6_port);
        let ip = sin.sin6_addr.s6_addr.into();
        return Some(std::net::SocketAddrV6::new(ip, port, 0, sin.sin6_scope_id).into());
    }
    None
}

/// `struct siw_mpa_options`
#[repr(C)]
pub struct SiwMpaOptions {
    pub size: u32,
    pub crc: u8,
    pub mpa_rev: u8,
    pub markers: u8,
    pub rtr: u8,
    pub max_ird: u16,
    pub max_ord: u16,
    pub request_timeout_ms: u32,
    pub accept_timeout_ms: u32,
    pub private_data: u16,
    pub terminate: u8,
    pub out_of_order: u8,
}

impl From<SiwMpaOptions> for MpaOptions {
    fn from(options: SiwMpaOptions) -> MpaOptions {
        MpaOptions {
            crc: options.crc,
            mpa_rev: options.mpa_rev,
            markers: options.markers,
            rtr: options.rtr,
            max_ird: options.max_ird,
            max_ord: options.max_ord,
            request_timeout_ms: options.request_timeout_ms,
            accept_timeout_ms: options.accept_timeout_ms,
            private_data: options.private_data,
            terminate: options.terminate,
            out_of_order: options.out_of_order,
            ..MpaOptions::BY_DEVICE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_survive_the_c_form() {
        for s in ["10.1.2.3:7174", "[fe80::1%3]:80", "[::]:0"] {
            let a: SocketAddr = s.parse().unwrap();
            let c = from_socket_addr(Some(a));
            let pointer = (&raw const c).cast();
            // SAFETY: c is a whole sockaddr_storage.
            let back = unsafe { to_socket_addr(pointer, size_of_val(&c) as u32) };
            assert_eq!(back, Some(a));
            // SAFETY: as above.
            let short = unsafe { to_socket_addr(pointer, 4) };
            assert_eq!(short, None);
        }
    }

    #[test]
    fn text_is_cut_and_terminated() {
        assert_eq!(c_text::<4>("abcdef"), [97, 98, 99, 0]);
        assert_eq!(c_text::<4>("a"), [97, 0, 0, 0]);
    }
}
