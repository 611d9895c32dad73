//! Endpoints: identifiers created from the result of rdma_getaddrinfo(3), whose calls wait for
//! their events (rdma_create_ep(3), rdma_get_request(3)).

use super::address::{bind_addr, resolve_addr, resolve_route};
use super::events::release_event;
use super::id::{IdObject, InitAttr, fail, result_of};
use super::lifecycle::destroy_id;
use super::queues::{create_qp, destroy_qp, destroy_srq};
use crate::abi::*;
use crate::status::{fail_with, set_errno};
use crate::waiting::Call;
use std::ffi::c_int;
use std::ptr::null_mut;

/// Timeout of resolving, in milliseconds, as in librdmacm.
const RESOLVE_TIMEOUT_MS: c_int = 2000;

/// rdma_create_ep(3)
pub unsafe fn create_ep(
    id: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a struct to read.
    let info = unsafe { &*info };
    let ps = info.ai_port_space as rdma_port_space;
    let qp_type = info.ai_qp_type as ibv_qp_type;
    let created = match IdObject::create(null_mut(), null_mut(), ps, qp_type) {
        Ok(created) => created,
        Err(error) => return result_of("rdma_create_ep", Err(error)),
    };
    // SAFETY: by the contract of the manual page.
    let status = unsafe { set_up(created, info, pd, init) };
    if status != 0 {
        let errno = std::io::Error::last_os_error().raw_os_error();
        // SAFETY: just created, and not yet passed on.
        unsafe { destroy_id(created) };
        set_errno(errno.unwrap_or(libc::EINVAL));
        return -1;
    }
    // SAFETY: a pointer to write.
    unsafe { id.write(created) };
    0
}

/// # Safety
/// The contract of rdma_create_ep(3).
unsafe fn set_up(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: as the caller promised.
    unsafe {
        if !init.is_null() {
            (*init).qp_type = (*id).qp_type;
        }
        if info.ai_flags as u32 & RAI_PASSIVE != 0 {
            let status = bind_addr(id, info.ai_src_addr);
            if status == 0 {
                if !pd.is_null() {
                    (*id).pd = pd;
                }
                let mut state = IdObject::from_abi(id).lock_state();
                state.init_attr = (!init.is_null()).then(|| InitAttr(*init));
            }
            return status;
        }
        let (src, destination) = (info.ai_src_addr, info.ai_dst_addr);
        // Not cancellation points: the endpoint is the library's still.
        let mut status =
            Call::run_here(|call| resolve_addr(call, id, src, destination, RESOLVE_TIMEOUT_MS));
        if status == 0 {
            status = Call::run_here(|call| resolve_route(call, id, RESOLVE_TIMEOUT_MS));
        }
        if status == 0 && !init.is_null() {
            status = create_qp(id, pd, init);
        }
        status
    }
}

/// rdma_destroy_ep(3)
pub unsafe fn destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: an endpoint of this library.
    unsafe {
        if !(*id).qp.is_null() {
            destroy_qp(id);
        }
        if !(*id).srq.is_null() {
            destroy_srq(id);
        }
        destroy_id(id);
    }
}

/// rdma_get_request(3)
pub unsafe fn get_request(
    call: &mut Call,
    listen: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: an endpoint of this library.
    let object = unsafe { IdObject::from_abi(listen) };
    if !object.is_sync() {
        return fail(libc::EINVAL);
    }
    // SAFETY: as above.
    unsafe { release_event(listen) };
    let event = match object.channel().get_event(call) {
        Ok(event) => Box::into_raw(event).cast::<rdma_cm_event>(),
        Err(_) if call.must_wait() => return -1,
        Err(error) => {
            fail_with("rdma_get_request", &error);
            return -1;
        }
    };
    // SAFETY: a valid event, which is assigned to an identifier.
    unsafe {
        if (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            (*listen).event = event;
            return fail(libc::EINVAL);
        }
        let child = (*event).id;
        (*child).event = event;
        let init = object.lock_state().init_attr;
        if let Some(InitAttr(mut init)) = init {
            init.qp_type = (*listen).qp_type;
            if create_qp(child, (*listen).pd, &mut init) != 0 {
                let errno = std::io::Error::last_os_error().raw_os_error();
                destroy_id(child);
                set_errno(errno.unwrap_or(libc::EINVAL));
                return -1;
            }
        }
        id.write(child);
    }
    0
}
