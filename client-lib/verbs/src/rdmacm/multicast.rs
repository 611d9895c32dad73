//! Multicast groups of identifiers with RDMA_PS_UDP: rdma_join_multicast(3), rdma_join_multicast_ex(3),
//! rdma_leave_multicast(3). The group is an IP address; its queue pair joins with the identifier.

use super::events::start_and_complete;
use super::id::{IdObject, fail, find_queue_pair, result_of};
use super::queue::{DatagramParameters, PlainEvent, QueuedEvent};
use super::sockaddr::read_address;
use crate::abi::*;
use crate::ibverbs::address_vector::vector_between;
use crate::ibverbs::context::ContextObject;
use crate::status::explain;
use crate::waiting::Call;
use siw::{Error, MULTICAST_QPN, SERVICE_QKEY};
use std::ffi::{c_int, c_void};
use std::net::IpAddr;

/// TTL or hop limit of datagrams to a group, as on Linux.
const HOP_LIMIT: u8 = 1;

fn invalid(reason: &'static str) -> Result<(), Error> {
    Err(Error::Invalid(reason))
}

/// # Safety
/// An identifier of this library.
unsafe fn join(
    id: *mut rdma_cm_id,
    group: Option<IpAddr>,
    argument: *mut c_void,
) -> Result<(), Error> {
    // SAFETY: as the caller promised.
    let object = unsafe { IdObject::from_abi(id) };
    let Some(group) = group.filter(IpAddr::is_multicast) else {
        return invalid("the address is not one of a multicast group");
    };
    // SAFETY: as the caller promised.
    let verbs = unsafe { (*id).verbs };
    let local = object.lock_state().local;
    let Some(local) = local.filter(|_| !verbs.is_null()) else {
        return invalid(
            "the identifier has no device: bind it to an address, or resolve the group",
        );
    };
    if object.lock_state().groups.contains(&group) {
        return invalid("the identifier is in the group already");
    }
    // SAFETY: a context of this library, which is open for good.
    let context = unsafe { ContextObject::from_abi(verbs) };
    let mut vector = vector_between(context, local.ip(), group)?;
    vector.grh.hop_limit = HOP_LIMIT;
    let qkey = object.lock_state().fix_qkey(None).unwrap_or(SERVICE_QKEY);
    // SAFETY: as the caller promised.
    if let Some(qp) = unsafe { find_queue_pair(id) } {
        qp.attach_group(group)?;
    }
    object.lock_state().groups.push(group);
    object.push_event(QueuedEvent::Plain(PlainEvent {
        id: object.registered(),
        kind: RDMA_CM_EVENT_MULTICAST_JOIN,
        status: 0,
        info: None,
        datagram: Some(Box::new(DatagramParameters {
            vector,
            qp_num: MULTICAST_QPN,
            qkey,
            argument: argument as u64,
        })),
        argument: 0,
    }));
    Ok(())
}

/// # Safety
/// An identifier of this library.
unsafe fn start_join(
    call: &mut Call,
    name: &str,
    id: *mut rdma_cm_id,
    group: impl FnOnce() -> Option<IpAddr>,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: as the caller promised.
    if !unsafe { IdObject::from_abi(id) }.is_datagram() {
        explain(&"multicast needs an identifier with RDMA_PS_UDP");
        return fail(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller promised.
    let start = || result_of(name, unsafe { join(id, group(), argument) });
    // SAFETY: as the caller promised.
    unsafe { start_and_complete(call, id, start) }
}

/// rdma_join_multicast(3)
pub unsafe fn join_multicast(
    call: &mut Call,
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let group = || read_address(addr).map(|addr| addr.ip());
        start_join(call, "rdma_join_multicast", id, group, context)
    }
}

/// rdma_join_multicast_ex(3): a send-only member gets what is sent to the group, too.
pub unsafe fn join_multicast_ex(
    call: &mut Call,
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    // SAFETY: by the contract of the manual page: NULL, or a struct with an address.
    unsafe {
        let has_address =
            |attr: &&rdma_cm_join_mc_attr_ex| attr.comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS != 0;
        let group = || {
            let attr = attr.as_ref().filter(has_address)?;
            Some(read_address(attr.addr)?.ip())
        };
        start_join(call, "rdma_join_multicast_ex", id, group, context)
    }
}

/// rdma_leave_multicast(3)
pub unsafe fn leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: an identifier of this library, and an address.
    let (object, group) = unsafe { (IdObject::from_abi(id), read_address(addr)) };
    let mut state = object.lock_state();
    let groups = &mut state.groups;
    let place = group.and_then(|group| groups.iter().position(|joined| *joined == group.ip()));
    let Some(place) = place else {
        return fail(libc::EADDRNOTAVAIL);
    };
    let group = groups.swap_remove(place);
    drop(state);
    // SAFETY: as above.
    let left = match unsafe { find_queue_pair(id) } {
        Some(qp) => qp.detach_group(group),
        None => Ok(()),
    };
    result_of("rdma_leave_multicast", left)
}
