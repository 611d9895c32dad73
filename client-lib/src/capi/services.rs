//! Datagram services of rdma_cm (RDMA_PS_UDP): the C API.

use super::cm::{BAD_ADDR, to_device_index};
use super::handles::{borrow_handle, free_handle, new_handle, store_boxed, take_handle};
use super::layout::{c_text, from_socket_addr, to_socket_addr};
use super::{borrow_array, fail_with, null_pointer, read_sized, store_out, to_status, to_timeout};
use crate::{
    BindOptions, CancelGuard, CmBinding, CmChannel, CmListener, ConnectionInfo, Context, Error,
    ListenOptions, Qp, RdmaCmEvent, ServiceReply, ServiceRequest, ServiceSearch,
};
use std::ffi::{c_char, c_int};
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// `SIW_SERVICE_REQUEST`
pub const SERVICE_REQUEST: u32 = 1;
/// `SIW_SERVICE_REPLY`
pub const SERVICE_REPLY: u32 = 2;

/// `struct siw_service_event`
#[repr(C)]
pub struct SiwServiceEvent {
    pub kind: u32,
    pub err: i32,
    pub cookie: u64,
    pub request: *mut ServiceRequest,
    pub device: u32,
    pub sidr_status: u32,
    pub qp_num: u32,
    pub qkey: u32,
    pub private_data_len: u32,
    pub reserved: u32,
    pub local: libc::sockaddr_storage,
    pub peer: libc::sockaddr_storage,
    pub reason: [c_char; 128],
    pub private_data: [u8; 256],
}

/// `struct siw_search_param`
#[repr(C)]
pub struct SiwSearchParam {
    pub size: u32,
    pub private_data_len: u32,
    pub private_data: *const u8,
    pub source: *const libc::sockaddr,
    pub source_len: u32,
    pub timeout_ms: u32,
    pub cookie: u64,
}

fn to_service_event(kind: u32, device: u32, info: &ConnectionInfo) -> SiwServiceEvent {
    let mut private_data = [0; 256];
    let len = info.private_data.len().min(private_data.len());
    private_data[..len].copy_from_slice(&info.private_data[..len]);
    SiwServiceEvent {
        kind,
        err: info.errno,
        cookie: info.cookie,
        request: std::ptr::null_mut(),
        device,
        sidr_status: 0,
        qp_num: 0,
        qkey: 0,
        private_data_len: len as u32,
        reserved: 0,
        local: from_socket_addr(info.local),
        peer: from_socket_addr(info.peer),
        reason: c_text(&info.reason),
        private_data,
    }
}

impl From<ServiceRequest> for SiwServiceEvent {
    fn from(request: ServiceRequest) -> SiwServiceEvent {
        let event = to_service_event(SERVICE_REQUEST, request.device(), request.info());
        SiwServiceEvent {
            request: new_handle(request),
            ..event
        }
    }
}

impl From<ServiceReply> for SiwServiceEvent {
    fn from(reply: ServiceReply) -> SiwServiceEvent {
        SiwServiceEvent {
            sidr_status: reply.sidr_status.into(),
            qp_num: reply.qp_num,
            qkey: reply.qkey,
            ..to_service_event(SERVICE_REPLY, reply.device, &reply.info)
        }
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listen_service(
    channel: *const CmChannel,
    dev: u32,
    addr: *const libc::sockaddr,
    addr_len: libc::socklen_t,
    backlog: u32,
    cookie: u64,
    out: *mut *mut CmListener,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(channel).and_then(|channel| {
            let at = to_socket_addr(addr, addr_len).ok_or(BAD_ADDR)?;
            let device = to_device_index(dev);
            let options = BindOptions {
                device,
                datagrams: true,
                ..Default::default()
            };
            let binding = CmBinding::new(&Context(channel.context().clone()), at, &options)?;
            let options = ListenOptions {
                device,
                backlog,
                cookie,
                ..Default::default()
            };
            Ok(CmListener::from_binding(channel, binding, &options)?)
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_find_service(
    channel: *const CmChannel,
    dev: u32,
    dst: *const libc::sockaddr,
    dst_len: libc::socklen_t,
    param: *const SiwSearchParam,
    out: *mut *mut ServiceSearch,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let started = unsafe {
        borrow_handle(channel).and_then(|channel| {
            let to = to_socket_addr(dst, dst_len).ok_or(BAD_ADDR)?;
            let param: Option<SiwSearchParam> = read_sized(param)?;
            let (mut source, mut data, mut timeout, mut cookie) = (None, &[][..], None, 0);
            if let Some(param) = param {
                if !param.source.is_null() {
                    let from = to_socket_addr(param.source, param.source_len);
                    source = Some(from.ok_or(BAD_ADDR)?);
                }
                data = borrow_array(param.private_data, param.private_data_len as usize)?;
                let millis = param.timeout_ms;
                timeout = (millis > 0).then(|| Duration::from_millis(millis.into()));
                cookie = param.cookie;
            }
            let context = Context(channel.context().clone());
            let from = context.resolve_address(to, source, to_device_index(dev))?;
            ServiceSearch::start(channel, &from, to, data, timeout, cookie)
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, started) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_end_search(search: *mut ServiceSearch) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(search) }
}

/// Waits for the next event of services; others are dropped.
fn await_service_event(channel: &CmChannel, timeout_ms: c_int) -> Result<SiwServiceEvent, Error> {
    loop {
        match channel.get_rdma_cm_event(to_timeout(timeout_ms))? {
            RdmaCmEvent::ServiceRequest(request) => return Ok(request.into()),
            RdmaCmEvent::ServiceReply(reply) => return Ok(reply.into()),
            _ => {}
        }
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_service_event(
    channel: *const CmChannel,
    out: *mut SiwServiceEvent,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    if out.is_null() {
        return fail_with(null_pointer());
    }
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(channel) }.and_then(|channel| {
        let event = await_service_event(channel, timeout_ms)?;
        // SAFETY: module contract.
        unsafe { store_out(out, event) }
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_accept_service(
    req: *mut ServiceRequest,
    qp: *const Qp,
    qkey: u32,
    private_data: *const u8,
    len: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: from `siw_get_service_event`, returned once by contract; the other parameters by the module's contract.
    to_status(unsafe {
        take_handle(req).and_then(|request| {
            let queue_pair = borrow_handle(qp)?;
            let data = borrow_array(private_data, len as usize)?;
            Ok(request.accept(queue_pair, qkey, data)?)
        })
    })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reject_service(
    req: *mut ServiceRequest,
    private_data: *const u8,
    len: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: as in `siw_accept_service`.
    to_status(unsafe {
        take_handle(req).and_then(|request| {
            let data = borrow_array(private_data, len as usize)?;
            Ok(request.reject(data)?)
        })
    })
}
