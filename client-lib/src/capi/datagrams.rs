//! Unreliable datagrams: address handles, queue pairs without a connection, multicast groups: the C API.

use super::handles::{borrow_handle, free_handle, store_boxed};
use super::layout::to_socket_addr;
use super::{null_pointer, read_sized, to_status};
use crate::{Ah, AhAttr, CancelGuard, Context, Error, Qp};
use std::ffi::c_int;
use std::net::IpAddr;
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// `struct siw_ah_attr`
#[repr(C)]
pub struct SiwAhAttr {
    pub size: u32,
    pub device: u32,
    pub remote: *const libc::sockaddr,
    pub local: *const libc::sockaddr,
    pub remote_len: u32,
    pub local_len: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub reserved: u16,
    pub flow_label: u32,
    pub timeout_ms: u32,
    pub reserved2: u32,
}

/// Converts the attributes.
///
/// # Safety
/// The addresses are NULL or valid for their lengths.
unsafe fn to_attr(attr: &SiwAhAttr) -> Result<AhAttr, Error> {
    // SAFETY: by the caller's contract.
    let (remote, local) = unsafe {
        (
            to_socket_addr(attr.remote, attr.remote_len),
            to_socket_addr(attr.local, attr.local_len),
        )
    };
    let remote = remote.ok_or(Error::Invalid("remote is not an IPv4 or IPv6 address"))?;
    if local.is_none() && !attr.local.is_null() {
        return Err(Error::Invalid("local is not an IPv4 or IPv6 address"));
    }
    let timeout = (attr.timeout_ms != 0).then(|| Duration::from_millis(attr.timeout_ms.into()));
    Ok(AhAttr {
        local: local.map(|local| local.ip()),
        hop_limit: attr.hop_limit,
        traffic_class: attr.traffic_class,
        flow_label: attr.flow_label,
        timeout,
        ..AhAttr::new(attr.device, remote.ip())
    })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_ah(
    ctx: *const Context,
    attr: *const SiwAhAttr,
    out: *mut *mut Ah,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(ctx).and_then(|ctx| {
            let attr: SiwAhAttr = read_sized(attr)?.ok_or_else(null_pointer)?;
            ctx.create_ah(&to_attr(&attr)?)
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_ah(ah: *mut Ah) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(ah) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_start_datagrams(qp: *const Qp, device: u32, qkey: u32) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(qp) }.and_then(|qp| qp.start_datagrams(device, qkey)))
}

/// # Safety
/// The module's contract.
unsafe fn change_group(
    qp: *const Qp,
    group: *const libc::sockaddr,
    len: libc::socklen_t,
    change: impl FnOnce(&Qp, IpAddr) -> Result<(), Error>,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let (qp, group) = unsafe { (borrow_handle(qp), to_socket_addr(group, len)) };
    to_status(qp.and_then(|qp| {
        let group = group.ok_or(Error::Invalid("the group is not an IPv4 or IPv6 address"))?;
        change(qp, group.ip())
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_attach_group(
    qp: *const Qp,
    group: *const libc::sockaddr,
    len: libc::socklen_t,
) -> c_int {
    // SAFETY: module contract.
    unsafe { change_group(qp, group, len, Qp::attach_group) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_detach_group(
    qp: *const Qp,
    group: *const libc::sockaddr,
    len: libc::socklen_t,
) -> c_int {
    // SAFETY: module contract.
    unsafe { change_group(qp, group, len, Qp::detach_group) }
}
