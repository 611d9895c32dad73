//! Multicast groups (ibv_attach_mcast(3)): the GID of a group is its IP address, as with RoCE version 2.

use super::gid::ip_of_gid;
use super::qp::QpObject;
use crate::abi::*;
use crate::status::{explain, fail_errno, fail_with};
use siw::Error;
use std::ffi::c_int;
use std::net::IpAddr;

/// The group of a GID.
fn group_of(gid: &ibv_gid) -> Option<IpAddr> {
    // SAFETY: both fields of the union are numbers of the same size.
    ip_of_gid(unsafe { gid.raw }).filter(IpAddr::is_multicast)
}

/// # Safety
/// A queue pair of this library, and a GID to read.
unsafe fn change(
    call: &str,
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    change: impl FnOnce(&siw::Qp, IpAddr) -> Result<(), Error>,
) -> c_int {
    // SAFETY: as the caller promised.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    if !queue_pair.context().device().persona().has_datagrams() {
        return fail_errno(libc::EOPNOTSUPP);
    }
    // SAFETY: NULL or a GID to read.
    let Some(group) = unsafe { gid.as_ref() }.and_then(group_of) else {
        explain(&"the GID is not the IP address of a multicast group");
        return fail_errno(libc::EINVAL);
    };
    match change(queue_pair.qp(), group) {
        Ok(()) => 0,
        Err(error) => fail_with(call, &error),
    }
}

/// ibv_attach_mcast(3)
pub unsafe fn attach(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { change("ibv_attach_mcast", qp, gid, siw::Qp::attach_group) }
}

/// ibv_detach_mcast(3)
pub unsafe fn detach(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { change("ibv_detach_mcast", qp, gid, siw::Qp::detach_group) }
}
