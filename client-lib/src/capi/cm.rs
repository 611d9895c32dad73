//! Connection management of the C API.

use super::handles::{
    borrow_handle, borrow_optional, free_handle, new_handle, store_boxed, take_handle,
};
use super::{
    SiwCmEvent, SiwConnParam, SiwMpaOptions, borrow_array, c_text, fail_with, from_socket_addr,
    null_pointer, read_sized, store_out, to_socket_addr, to_status, to_timeout,
};
use crate::{
    CancelGuard, CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo, ConnectionRequest,
    Context, Error, ListenOptions, Qp,
};
use rustix::fd::{AsFd, AsRawFd};
use siw_shm::control::{ANY_DEVICE, CmEventKind, MpaOptions};
use std::ffi::c_int;
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_cm_channel(
    ctx: *const Context,
    out: *mut *mut CmChannel,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { store_boxed(out, borrow_handle(ctx).and_then(CmChannel::new)) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_cm_channel(channel: *mut CmChannel) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(channel) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cm_channel_fd(channel: *const CmChannel) -> c_int {
    // SAFETY: module contract.
    unsafe { borrow_handle(channel) }.map_or(-1, |channel| channel.as_fd().as_raw_fd())
}

fn siw_event(kind: CmEventKind, info: &ConnectionInfo) -> SiwCmEvent {
    let mut private_data = [0; 512];
    let n = info.private_data.len().min(private_data.len());
    private_data[..n].copy_from_slice(&info.private_data[..n]);
    SiwCmEvent {
        kind: kind as u32,
        err: info.errno,
        cookie: info.cookie,
        request: std::ptr::null_mut(),
        qp_num: info.qp_num,
        request_id: 0,
        device: ANY_DEVICE,
        initiator_depth: info.ord,
        responder_resources: info.ird,
        crc: info.crc.into(),
        mpa_rev: info.mpa_rev.into(),
        private_data_len: n as u32,
        local: from_socket_addr(info.local),
        peer: from_socket_addr(info.peer),
        reason: c_text(&info.reason),
        private_data,
    }
}

fn to_siw_event(event: CmEvent) -> SiwCmEvent {
    use CmEventKind as K;
    let none = ConnectionInfo::default();
    match event {
        CmEvent::ConnectRequest(request) => SiwCmEvent {
            request_id: request.id(),
            device: request.device(),
            ..siw_event(K::ConnectRequest, request.connection_info())
        }
        .with_request(request),
        CmEvent::Established(info) => siw_event(K::Established, &info),
        CmEvent::Rejected(info) => siw_event(K::Rejected, &info),
        CmEvent::Unreachable(info) => siw_event(K::Unreachable, &info),
        CmEvent::ConnectError(info) => siw_event(K::ConnectError, &info),
        CmEvent::Disconnected(info) => siw_event(K::Disconnected, &info),
        CmEvent::RequestCancelled { request } => SiwCmEvent {
            request_id: request,
            ..siw_event(K::RequestCancelled, &none)
        },
        CmEvent::DeviceRemoval { device, .. } => SiwCmEvent {
            device,
            ..siw_event(K::DeviceRemoval, &none)
        },
    }
}

impl SiwCmEvent {
    fn with_request(mut self, request: ConnectionRequest) -> Self {
        self.request = new_handle(request);
        self
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_cm_event(
    channel: *const CmChannel,
    out: *mut SiwCmEvent,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    if out.is_null() {
        return fail_with(null_pointer());
    }
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(channel) }.and_then(|channel| {
        let event = to_siw_event(channel.get_event(to_timeout(timeout_ms))?);
        // SAFETY: module contract.
        unsafe { store_out(out, event) }
    }))
}

/// # Safety
/// NULL, or valid with its private data.
unsafe fn to_connect_options<'a>(param: *const SiwConnParam) -> Result<ConnectOptions<'a>, Error> {
    let mut options = ConnectOptions::default();
    // SAFETY: by the caller's contract.
    let Some(param) = (unsafe { read_sized(param) })? else {
        return Ok(options);
    };
    // SAFETY: by the caller's contract.
    options.private_data =
        unsafe { borrow_array(param.private_data, param.private_data_len as usize) }?;
    if param.initiator_depth > 0 {
        options.ord = param.initiator_depth;
    }
    if param.responder_resources > 0 {
        options.ird = param.responder_resources;
    }
    options.timeout =
        (param.timeout_ms > 0).then(|| Duration::from_millis(param.timeout_ms.into()));
    options.crc = (param.crc != 0).then_some(param.crc > 0);
    options.mpa_rev = match param.mpa_rev {
        0 => None,
        1 => Some(1),
        2 => Some(2),
        _ => return Err(Error::Invalid("mpa_rev must be 0, 1 or 2")),
    };
    options.refusals = param.refusals;
    options.wait_for_receives = param.wait_for_receives != 0;
    if !param.source.is_null() {
        // SAFETY: by the caller's contract.
        let source = unsafe { to_socket_addr(param.source, param.source_len) };
        options.src = Some(source.ok_or(BAD_ADDR)?);
    }
    options.cookie = param.cookie;
    Ok(options)
}

pub(super) const BAD_ADDR: Error = Error::Invalid("the address is neither IPv4 nor IPv6");

pub(super) fn to_device_index(device: u32) -> Option<u32> {
    (device != ANY_DEVICE).then_some(device)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_connect(
    qp: *const Qp,
    channel: *const CmChannel,
    dev: u32,
    dst: *const libc::sockaddr,
    dst_len: libc::socklen_t,
    param: *const SiwConnParam,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let args = unsafe {
        borrow_handle(qp).and_then(|queue_pair| {
            let to = to_socket_addr(dst, dst_len).ok_or(BAD_ADDR)?;
            Ok((
                queue_pair,
                borrow_handle(channel)?,
                to,
                to_connect_options(param)?,
            ))
        })
    };
    to_status(args.and_then(|(queue_pair, channel, to, options)| {
        queue_pair.connect(
            channel,
            to,
            &ConnectOptions {
                device: to_device_index(dev),
                ..options
            },
        )
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_disconnect(qp: *const Qp) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(qp) }.and_then(Qp::disconnect))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listen(
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
            CmListener::new(channel, to_device_index(dev), at, backlog, cookie)
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listen_mpa(
    channel: *const CmChannel,
    dev: u32,
    addr: *const libc::sockaddr,
    addr_len: libc::socklen_t,
    backlog: u32,
    cookie: u64,
    mpa: *const SiwMpaOptions,
    out: *mut *mut CmListener,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(channel).and_then(|channel| {
            let at = to_socket_addr(addr, addr_len).ok_or(BAD_ADDR)?;
            let mpa = read_sized(mpa)?.map_or(MpaOptions::BY_DEVICE, MpaOptions::from);
            let options = ListenOptions {
                device: to_device_index(dev),
                backlog,
                cookie,
                ..Default::default()
            };
            CmListener::listen_with(channel, at, &options, mpa, 0)
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listener_addr(
    listener: *const CmListener,
    out: *mut libc::sockaddr_storage,
) -> c_int {
    // SAFETY: module contract.
    to_status(unsafe {
        borrow_handle(listener)
            .and_then(|listener| store_out(out, from_socket_addr(Some(listener.local_addr()))))
    })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_listener(listener: *mut CmListener) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(listener) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_accept(
    req: *mut ConnectionRequest,
    qp: *const Qp,
    channel: *const CmChannel,
    param: *const SiwConnParam,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: from `with_request`, returned once by contract.
    let request = match unsafe { take_handle(req) } {
        Ok(request) => request,
        Err(error) => return fail_with(error),
    };
    // SAFETY: module contract.
    to_status(unsafe {
        borrow_handle(qp).and_then(|queue_pair| {
            let (channel, options) = (borrow_optional(channel)?, to_connect_options(param)?);
            Ok(request.accept(queue_pair, channel, &options)?)
        })
    })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reject(
    req: *mut ConnectionRequest,
    private_data: *const u8,
    len: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: as in `siw_accept`; the other parameters by the module's contract.
    to_status(unsafe {
        take_handle(req).and_then(|request| {
            let private_data = borrow_array(private_data, len as usize)?;
            Ok(request.reject(private_data)?)
        })
    })
}
