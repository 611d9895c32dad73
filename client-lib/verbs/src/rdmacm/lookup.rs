//! Functions of RDMACM_1.4: looking up addresses with an event (rdma_resolve_addrinfo(3),
//! rdma_query_addrinfo(3)), and events of the program itself (rdma_write_cm_event(3)).

use super::addrinfo::{AddressInfo, getaddrinfo};
use super::events::start_and_complete;
use super::id::{IdObject, fail};
use super::queue::{PlainEvent, QueuedEvent, RDMA_CM_EVENT_ADDRINFO_RESOLVED, RDMA_CM_EVENT_USER};
use crate::abi::*;
use crate::waiting::Call;
use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

/// `RAI_SA`: ask the subnet administrator of InfiniBand.
const RAI_SA: c_int = 0x10;

/// rdma_resolve_addrinfo(3). As in rdma-core, the lookup takes place in the call, and the event follows.
pub unsafe fn resolve_addrinfo(
    call: &mut Call,
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    if id.is_null() {
        return fail(libc::EINVAL);
    }
    // SAFETY: by the contract of the manual page; an identifier of this library.
    unsafe { start_and_complete(call, id, || start_lookup(id, node, service, hints)) }
}

/// # Safety
/// The contract of rdma_resolve_addrinfo(3).
unsafe fn start_lookup(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    // SAFETY: NULL or a struct to read.
    if unsafe { hints.as_ref() }.is_some_and(|hints| hints.ai_flags & RAI_SA != 0) {
        return fail(libc::EOPNOTSUPP);
    }
    let mut found = null_mut();
    // SAFETY: as for rdma_getaddrinfo(3), and a pointer to write.
    match unsafe { getaddrinfo(node, service, hints, &mut found) } {
        0 => {}
        -1 => return -1,
        _ => return fail(libc::ENODATA),
    }
    let found = AddressInfo(found);
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let mut state = object.lock_state();
    if state.looked_up.is_some() {
        return fail(libc::EBUSY);
    }
    state.looked_up = Some(found);
    drop(state);
    object.push_plain(RDMA_CM_EVENT_ADDRINFO_RESOLVED);
    0
}

/// rdma_query_addrinfo(3)
pub unsafe fn query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int {
    if id.is_null() || info.is_null() {
        return fail(libc::EINVAL);
    }
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let Some(found) = object.lock_state().looked_up.take() else {
        return fail(libc::ENOENT);
    };
    // SAFETY: a pointer to write.
    unsafe { info.write(found.into_raw()) };
    0
}

/// rdma_write_cm_event(3)
pub unsafe fn write_cm_event(
    id: *mut rdma_cm_id,
    kind: rdma_cm_event_type,
    status: c_int,
    argument: u64,
) -> c_int {
    if id.is_null() || kind != RDMA_CM_EVENT_USER {
        return fail(libc::EINVAL);
    }
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    object.push_event(QueuedEvent::Plain(PlainEvent {
        id: object.registered(),
        kind,
        status,
        info: None,
        datagram: None,
        argument,
    }));
    0
}
