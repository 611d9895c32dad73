//! Connection management of the C API.

use super::{
    SiwCmEvent, SiwConnParam, c_text, fail, free, from_socket_addr, get, null, put, put_box, slice,
    status, timeout, to_socket_addr,
};
use crate::{
    CmChannel, CmEvent, ConnInfo, ConnectOptions, ConnectRequest, Context, Error, ListenOptions,
    Listener, Qp,
};
use rustix::fd::{AsFd, AsRawFd};
use siw_shm::control::{ANY_DEVICE, CmEventKind, MpaOptions};
use std::ffi::c_int;
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_cm_channel(
    ctx: *const Context,
    out: *mut *mut CmChannel,
) -> c_int {
    // SAFETY: module contract.
    unsafe { put_box(out, get(ctx).and_then(CmChannel::new)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_cm_channel(ch: *mut CmChannel) {
    // SAFETY: module contract.
    unsafe { free(ch) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cm_channel_fd(ch: *const CmChannel) -> c_int {
    // SAFETY: module contract.
    unsafe { get(ch) }.map_or(-1, |c| c.as_fd().as_raw_fd())
}

fn event(kind: CmEventKind, i: &ConnInfo) -> SiwCmEvent {
    let mut private_data = [0; 512];
    let n = i.private_data.len().min(private_data.len());
    private_data[..n].copy_from_slice(&i.private_data[..n]);
    SiwCmEvent {
        kind: kind as u32,
        err: i.errno,
        cookie: i.cookie,
        request: std::ptr::null_mut(),
        qp_num: i.qp_num,
        request_id: 0,
        device: ANY_DEVICE,
        initiator_depth: i.ord,
        responder_resources: i.ird,
        crc: i.crc.into(),
        mpa_rev: i.mpa_rev.into(),
        private_data_len: n as u32,
        local: from_socket_addr(i.local),
        peer: from_socket_addr(i.peer),
        reason: c_text(&i.reason),
        private_data,
    }
}

fn convert(e: CmEvent) -> SiwCmEvent {
    use CmEventKind as K;
    let none = ConnInfo::default();
    match e {
        CmEvent::ConnectRequest(r) => SiwCmEvent {
            request_id: r.id(),
            device: r.device(),
            ..event(K::ConnectRequest, r.info())
        }
        .with_request(r),
        CmEvent::Established(i) => event(K::Established, &i),
        CmEvent::Rejected(i) => event(K::Rejected, &i),
        CmEvent::Unreachable(i) => event(K::Unreachable, &i),
        CmEvent::ConnectError(i) => event(K::ConnectError, &i),
        CmEvent::Disconnected(i) => event(K::Disconnected, &i),
        CmEvent::RequestCancelled { request } => SiwCmEvent {
            request_id: request,
            ..event(K::RequestCancelled, &none)
        },
        CmEvent::DeviceRemoval { device } => SiwCmEvent {
            device,
            ..event(K::DeviceRemoval, &none)
        },
    }
}

impl SiwCmEvent {
    fn with_request(mut self, r: ConnectRequest) -> Self {
        self.request = Box::into_raw(Box::new(r));
        self
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_cm_event(
    ch: *const CmChannel,
    out: *mut SiwCmEvent,
    timeout_ms: c_int,
) -> c_int {
    if out.is_null() {
        return fail(null());
    }
    // SAFETY: module contract.
    status(unsafe { get(ch) }.and_then(|c| {
        let e = convert(c.get_event(timeout(timeout_ms))?);
        // SAFETY: module contract.
        unsafe { put(out, e) }
    }))
}

/// # Safety
/// NULL, or valid with its private data.
unsafe fn options<'a>(p: *const SiwConnParam) -> Result<ConnectOptions<'a>, Error> {
    let mut o = ConnectOptions::default();
    // SAFETY: by the caller's contract.
    let Some(p) = (unsafe { p.as_ref() }) else {
        return Ok(o);
    };
    // SAFETY: by the caller's contract.
    o.private_data = unsafe { slice(p.private_data, p.private_data_len as usize) }?;
    if p.initiator_depth > 0 {
        o.ord = p.initiator_depth;
    }
    if p.responder_resources > 0 {
        o.ird = p.responder_resources;
    }
    o.timeout = (p.timeout_ms > 0).then(|| Duration::from_millis(p.timeout_ms.into()));
    o.crc = (p.crc != 0).then_some(p.crc > 0);
    o.mpa_rev = match p.mpa_rev {
        0 => None,
        1 => Some(1),
        2 => Some(2),
        _ => return Err(Error::Invalid("mpa_rev is 0, 1 or 2")),
    };
    o.cookie = p.cookie;
    Ok(o)
}

const BAD_ADDR: Error = Error::Invalid("the address is neither IPv4 nor IPv6");

fn device(d: u32) -> Option<u32> {
    (d != ANY_DEVICE).then_some(d)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_connect(
    qp: *const Qp,
    ch: *const CmChannel,
    dev: u32,
    dst: *const libc::sockaddr,
    dst_len: libc::socklen_t,
    param: *const SiwConnParam,
) -> c_int {
    // SAFETY: module contract.
    let args = unsafe {
        get(qp).and_then(|q| {
            let to = to_socket_addr(dst, dst_len).ok_or(BAD_ADDR)?;
            Ok((q, get(ch)?, to, options(param)?))
        })
    };
    status(args.and_then(|(q, ch, to, o)| {
        q.connect(
            ch,
            to,
            &ConnectOptions {
                device: device(dev),
                ..o
            },
        )
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_disconnect(qp: *const Qp) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(qp) }.and_then(Qp::disconnect))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listen(
    ch: *const CmChannel,
    dev: u32,
    addr: *const libc::sockaddr,
    addr_len: libc::socklen_t,
    backlog: u32,
    cookie: u64,
    out: *mut *mut Listener,
) -> c_int {
    // SAFETY: module contract.
    let made = unsafe {
        get(ch).and_then(|ch| {
            let at = to_socket_addr(addr, addr_len).ok_or(BAD_ADDR)?;
            Listener::new(ch, device(dev), at, backlog, cookie)
        })
    };
    // SAFETY: module contract.
    unsafe { put_box(out, made) }
}

/// `struct siw_mpa_options` is laid out as the control message has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listen_mpa(
    ch: *const CmChannel,
    dev: u32,
    addr: *const libc::sockaddr,
    addr_len: libc::socklen_t,
    backlog: u32,
    cookie: u64,
    mpa: *const MpaOptions,
    out: *mut *mut Listener,
) -> c_int {
    // SAFETY: module contract.
    let made = unsafe {
        get(ch).and_then(|ch| {
            let at = to_socket_addr(addr, addr_len).ok_or(BAD_ADDR)?;
            let mpa = mpa.as_ref().copied().unwrap_or(MpaOptions::BY_DEVICE);
            let opt = ListenOptions {
                device: device(dev),
                backlog,
                cookie,
                ..Default::default()
            };
            Listener::listen(ch, at, &opt, mpa)
        })
    };
    // SAFETY: module contract.
    unsafe { put_box(out, made) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_listener_addr(
    l: *const Listener,
    out: *mut libc::sockaddr_storage,
) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(l).and_then(|l| put(out, from_socket_addr(Some(l.local_addr())))) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_listener(l: *mut Listener) {
    // SAFETY: module contract.
    unsafe { free(l) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_accept(
    req: *mut ConnectRequest,
    qp: *const Qp,
    ch: *const CmChannel,
    param: *const SiwConnParam,
) -> c_int {
    if req.is_null() {
        return fail(null());
    }
    // SAFETY: from `with_request`, given back once by contract.
    let req = unsafe { Box::from_raw(req) };
    // SAFETY: module contract.
    let args = unsafe { get(qp).and_then(|q| Ok((q, options(param)?))) };
    // SAFETY: module contract.
    let ch = unsafe { ch.as_ref() };
    status(args.and_then(|(q, o)| req.accept(q, ch, &o)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reject(
    req: *mut ConnectRequest,
    private_data: *const u8,
    len: u32,
) -> c_int {
    if req.is_null() {
        return fail(null());
    }
    // SAFETY: as in `siw_accept`.
    let req = unsafe { Box::from_raw(req) };
    // SAFETY: module contract.
    status(unsafe { slice(private_data, len as usize) }.and_then(|d| req.reject(d)))
}
