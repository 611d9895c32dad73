//! The C API: thin wrappers of the Rust objects, declared in `include/siw.h`.
//! Handles are boxed Rust objects. Layouts are checked against the header by
//! tests/c_api.rs.
//!
//! Safety of every function here is the contract of the header: pointers are NULL
//! or valid for what they name, handles come from this library and are used no
//! more after they were destroyed.
#![allow(clippy::missing_safety_doc)]

mod cm;
mod layout;
mod memory;
mod memory_layout;
mod queue_layout;
mod queues;

pub use cm::*;
pub use layout::*;
pub use memory::*;
pub use memory_layout::*;
pub use queue_layout::*;
pub use queues::*;

use crate::{
    Access, CompletionChannel, Context, Cq, Error, Mr, Opcode, Pd, PostError, Qp, QpInit, RecvWr,
    SendData, SendWr, Sge, Wc, WcStatus, WrFlags,
};
use memory::post_special;
use rustix::fd::{AsFd, AsRawFd};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

fn remember(text: &str) {
    let clean: Vec<u8> = text.bytes().filter(|b| *b != 0).collect();
    LAST_ERROR.with(|l| *l.borrow_mut() = CString::new(clean).unwrap_or_default());
}

fn fail(e: Error) -> c_int {
    remember(&e.to_string());
    e.errno().max(1)
}

fn status(r: Result<(), Error>) -> c_int {
    r.map_or_else(fail, |()| 0)
}

fn null() -> Error {
    Error::Invalid("a required pointer is NULL")
}

fn timeout(ms: c_int) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// Borrows a handle or other pointed-to value.
///
/// # Safety
/// NULL or valid for the borrow.
unsafe fn get<'a, T>(p: *const T) -> Result<&'a T, Error> {
    // SAFETY: by the caller's contract.
    unsafe { p.as_ref() }.ok_or_else(null)
}

/// Stores `value` through an out pointer.
///
/// # Safety
/// NULL or valid for writing.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(null());
    }
    // SAFETY: by the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// Boxes a new object into an out pointer.
///
/// # Safety
/// As [`put`].
unsafe fn put_box<T>(out: *mut *mut T, value: Result<T, Error>) -> c_int {
    if out.is_null() {
        return fail(null());
    }
    match value {
        Ok(v) => {
            // SAFETY: not NULL, valid by the caller's contract.
            unsafe { out.write(Box::into_raw(Box::new(v))) };
            0
        }
        Err(e) => fail(e),
    }
}

/// Frees a handle.
///
/// # Safety
/// NULL or from [`put_box`], not used any more.
unsafe fn free<T>(p: *mut T) {
    if !p.is_null() {
        // SAFETY: by the caller's contract.
        drop(unsafe { Box::from_raw(p) });
    }
}

/// An array from C.
///
/// # Safety
/// `p` valid for `n` elements, or NULL with any `n`.
unsafe fn slice<'a, T>(p: *const T, n: usize) -> Result<&'a [T], Error> {
    if n == 0 {
        return Ok(&[]);
    }
    if p.is_null() {
        return Err(null());
    }
    // SAFETY: by the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(p, n) })
}

#[unsafe(no_mangle)]
pub extern "C" fn siw_last_error() -> *const c_char {
    LAST_ERROR.with(|l| l.borrow().as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn siw_wc_status_str(status: u32) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<CString> = RefCell::new(CString::default());
    }
    let text = WcStatus(u8::try_from(status).unwrap_or(u8::MAX)).as_str();
    TEXT.with(|t| {
        *t.borrow_mut() = CString::new(text).unwrap_or_default();
        t.borrow().as_ptr()
    })
}

// Each `unsafe` below relies on the header's contract, stated at the module's top.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_open(path: *const c_char, out: *mut *mut Context) -> c_int {
    let path = if path.is_null() {
        None
    } else {
        // SAFETY: a C string by contract.
        let s = unsafe { CStr::from_ptr(path) };
        Some(Path::new(std::ffi::OsStr::from_bytes(s.to_bytes())))
    };
    // SAFETY: module contract.
    unsafe { put_box(out, Context::open(path)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_close(ctx: *mut Context) {
    // SAFETY: module contract.
    unsafe { free(ctx) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_is_alive(ctx: *const Context) -> c_int {
    // SAFETY: module contract.
    unsafe { get(ctx) }.is_ok_and(Context::is_alive).into()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_devices(
    ctx: *const Context,
    out: *mut SiwDeviceAttr,
    n: u32,
) -> c_int {
    // SAFETY: module contract.
    let r = unsafe { get(ctx) }.and_then(Context::devices);
    match r {
        Ok(devices) => {
            if !out.is_null() {
                for (i, d) in devices.iter().take(n as usize).enumerate() {
                    // SAFETY: room for n elements by contract.
                    unsafe { out.add(i).write(SiwDeviceAttr::from(d)) };
                }
            }
            devices.len() as c_int
        }
        Err(e) => -fail(e),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_async_fd(ctx: *const Context) -> c_int {
    // SAFETY: module contract.
    unsafe { get(ctx) }.map_or(-1, |c| c.async_fd().as_raw_fd())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_async_event(
    ctx: *const Context,
    out: *mut SiwAsyncEvent,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(ctx) }.and_then(|c| {
        let e = c.get_async_event(timeout(timeout_ms))?;
        // SAFETY: module contract.
        unsafe { put(out, SiwAsyncEvent::from(&e)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_pd(ctx: *const Context, out: *mut *mut Pd) -> c_int {
    // SAFETY: module contract.
    unsafe { put_box(out, get(ctx).and_then(Context::alloc_pd)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_dealloc_pd(pd: *mut Pd) {
    // SAFETY: module contract.
    unsafe { free(pd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_mr(
    pd: *const Pd,
    len: usize,
    access: u32,
    out: *mut *mut Mr,
) -> c_int {
    // SAFETY: module contract.
    unsafe { put_box(out, get(pd).and_then(|p| p.alloc_mr(len, Access(access)))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_free_mr(mr: *mut Mr) {
    // SAFETY: module contract.
    unsafe { free(mr) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_ptr(mr: *const Mr) -> *mut c_void {
    // SAFETY: module contract.
    unsafe { get(mr) }.map_or(std::ptr::null_mut(), |m| m.as_ptr().cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_addr(mr: *const Mr) -> u64 {
    // SAFETY: module contract.
    unsafe { get(mr) }.map_or(0, Mr::addr)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_len(mr: *const Mr) -> usize {
    // SAFETY: module contract.
    unsafe { get(mr) }.map_or(0, Mr::len)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_lkey(mr: *const Mr) -> u32 {
    // SAFETY: module contract.
    unsafe { get(mr) }.map_or(0, Mr::lkey)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_rkey(mr: *const Mr) -> u32 {
    // SAFETY: module contract.
    unsafe { get(mr) }.map_or(0, Mr::rkey)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_channel(
    ctx: *const Context,
    out: *mut *mut Arc<CompletionChannel>,
) -> c_int {
    // SAFETY: module contract.
    unsafe { put_box(out, get(ctx).and_then(CompletionChannel::new)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_channel(ch: *mut Arc<CompletionChannel>) {
    // SAFETY: module contract.
    unsafe { free(ch) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_channel_fd(ch: *const Arc<CompletionChannel>) -> c_int {
    // SAFETY: module contract.
    unsafe { get(ch) }.map_or(-1, |c| c.as_fd().as_raw_fd())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_cq_event(
    ch: *const Arc<CompletionChannel>,
    cookie: *mut u64,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(ch) }.and_then(|c| {
        let got = c.get_event(timeout(timeout_ms))?;
        // SAFETY: module contract.
        unsafe { put(cookie, got) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_cq(
    ctx: *const Context,
    cqe: u32,
    ch: *const Arc<CompletionChannel>,
    cookie: u64,
    out: *mut *mut Cq,
) -> c_int {
    // SAFETY: module contract.
    let channel = unsafe { ch.as_ref() };
    // SAFETY: module contract.
    unsafe {
        put_box(
            out,
            get(ctx).and_then(|c| Cq::new(c, cqe, channel.map(|c| (c, cookie)))),
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_cq(cq: *mut Cq) {
    // SAFETY: module contract.
    unsafe { free(cq) }
}

/// Polls in batches on the stack and converts.
///
/// # Safety
/// `out` valid for `n` elements.
unsafe fn poll_into(
    n: u32,
    out: *mut SiwWc,
    mut poll: impl FnMut(&mut [Wc], bool) -> Result<usize, Error>,
) -> c_int {
    if out.is_null() && n > 0 {
        return -fail(null());
    }
    let mut batch = [Wc::default(); 16];
    let mut done = 0usize;
    while done < n as usize {
        let want = (n as usize - done).min(batch.len());
        let got = match poll(&mut batch[..want], done == 0) {
            Ok(got) => got,
            // What was taken before must be delivered first.
            Err(_) if done > 0 => break,
            Err(e) => return -fail(e),
        };
        for (i, wc) in batch[..got].iter().enumerate() {
            // SAFETY: done + i < n.
            unsafe { out.add(done + i).write(SiwWc::from(wc)) };
        }
        done += got;
        if got < want {
            break;
        }
    }
    done as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_poll_cq(cq: *const Cq, n: u32, out: *mut SiwWc) -> c_int {
    // SAFETY: module contract.
    match unsafe { get(cq) } {
        // SAFETY: module contract.
        Ok(cq) => unsafe { poll_into(n, out, |b, _| cq.poll(b)) },
        Err(e) => -fail(e),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_wait_cq(
    cq: *const Cq,
    n: u32,
    out: *mut SiwWc,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: module contract.
    match unsafe { get(cq) } {
        // SAFETY: module contract.
        Ok(cq) => unsafe {
            poll_into(n, out, |b, first| {
                if first {
                    cq.wait(b, timeout(timeout_ms))
                } else {
                    cq.poll(b)
                }
            })
        },
        Err(e) => -fail(e),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_req_notify_cq(cq: *const Cq, solicited_only: c_int) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(cq) }.and_then(|c| c.req_notify(solicited_only != 0)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_qp(
    pd: *const Pd,
    attr: *const SiwQpInitAttr,
    out: *mut *mut Qp,
) -> c_int {
    // SAFETY: module contract.
    let made = unsafe {
        get(pd).and_then(|pd| {
            let a = get(attr)?;
            let init = QpInit {
                max_send_wr: a.max_send_wr,
                max_recv_wr: a.max_recv_wr,
                max_send_sge: a.max_send_sge,
                max_recv_sge: a.max_recv_sge,
                max_inline: a.max_inline_data,
                sq_sig_all: a.sq_sig_all != 0,
            };
            let (send, recv) = (get(a.send_cq)?, get(a.recv_cq)?);
            match a.srq.as_ref() {
                Some(srq) => pd.create_qp_with_srq(send, recv, srq, &init),
                None => pd.create_qp(send, recv, &init),
            }
        })
    };
    // SAFETY: module contract.
    unsafe { put_box(out, made) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_qp(qp: *mut Qp) {
    // SAFETY: module contract.
    unsafe { free(qp) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_num(qp: *const Qp) -> u32 {
    // SAFETY: module contract.
    unsafe { get(qp) }.map_or(0, Qp::number)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_state(qp: *const Qp) -> c_int {
    // SAFETY: module contract.
    match unsafe { get(qp) } {
        Ok(q) => q.state().map_or(-libc::EPROTO, |s| s as c_int),
        Err(e) => -fail(e),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_set_error(qp: *const Qp) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(qp) }.and_then(Qp::set_error))
}

/// Gathers inline data of one request.
///
/// # Safety
/// Each SGE names readable memory.
unsafe fn gather(sges: &[Sge], into: &mut [u8; 256]) -> Result<usize, Error> {
    let mut n = 0;
    for s in sges {
        let len = s.length as usize;
        let to = into
            .get_mut(n..n + len)
            .ok_or(Error::Invalid("more than 256 bytes of inline data"))?;
        // SAFETY: readable for length bytes by contract; `to` is ours.
        unsafe { std::ptr::copy_nonoverlapping(s.addr as *const u8, to.as_mut_ptr(), len) };
        n += len;
    }
    Ok(n)
}

/// # Safety
/// `wr` and its list are valid.
unsafe fn post_one(qp: &Qp, wr: &SiwSendWr, last: &mut [u8; 256]) -> Result<(), Error> {
    let opcode = u8::try_from(wr.opcode)
        .ok()
        .and_then(Opcode::from_u8)
        .ok_or(Error::Invalid("no such opcode"))?;
    let flags = u8::try_from(wr.flags).map_err(|_| Error::Invalid("unknown send flags"))?;
    let flags = WrFlags(flags);
    // SAFETY: by the caller's contract.
    let sges = unsafe { slice(wr.sg_list, wr.num_sge as usize) }?;
    if opcode.is_atomic() || matches!(opcode, Opcode::RegMr | Opcode::BindMw) {
        // SAFETY: by the caller's contract.
        return unsafe { post_special(qp, wr, opcode, flags, sges) };
    }
    let data = if flags.contains(WrFlags::INLINE) {
        // SAFETY: by the caller's contract.
        let n = unsafe { gather(sges, last) }?;
        SendData::Inline(&last[..n])
    } else {
        SendData::Sges(sges)
    };
    let wr = SendWr {
        opcode,
        with_flags: flags,
        wr_id: wr.wr_id,
        imm: wr.inv_rkey,
        remote_addr: wr.remote_addr,
        rkey: wr.rkey,
        data,
    };
    qp.post_send(&[wr]).map_err(|e| e.error)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_send(
    qp: *const Qp,
    wr: *const SiwSendWr,
    n: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    let posted = unsafe { get(qp) }
        .map_err(|error| PostError { index: 0, error })
        .and_then(|qp| {
            // SAFETY: module contract.
            let list =
                unsafe { slice(wr, n as usize) }.map_err(|error| PostError { index: 0, error })?;
            let mut inline = [0; 256];
            for (index, wr) in list.iter().enumerate() {
                // SAFETY: module contract.
                unsafe { post_one(qp, wr, &mut inline) }
                    .map_err(|error| PostError { index, error })?;
            }
            Ok(())
        });
    // SAFETY: module contract.
    unsafe { posted_status(posted, bad) }
}

/// # Safety
/// `bad` is NULL or writable.
unsafe fn posted_status(r: Result<(), PostError>, bad: *mut u32) -> c_int {
    r.map_or_else(
        |e| {
            // SAFETY: by the caller's contract.
            let _ = unsafe { put(bad, e.index as u32) };
            fail(e.error)
        },
        |()| 0,
    )
}

/// Posts receive requests one by one, to whatever takes them.
///
/// # Safety
/// `wr` and its lists are valid, `bad` is NULL or writable.
unsafe fn post_receives<T>(
    to: Result<&T, Error>,
    wr: *const SiwRecvWr,
    n: u32,
    bad: *mut u32,
    post: impl Fn(&T, RecvWr<'_>) -> Result<(), PostError>,
) -> c_int {
    let posted = to
        .map_err(|error| PostError { index: 0, error })
        .and_then(|to| {
            // SAFETY: by the caller's contract.
            let list =
                unsafe { slice(wr, n as usize) }.map_err(|error| PostError { index: 0, error })?;
            for (index, wr) in list.iter().enumerate() {
                // SAFETY: by the caller's contract.
                let sges = unsafe { slice(wr.sg_list, wr.num_sge as usize) }
                    .map_err(|error| PostError { index, error })?;
                let wr_id = wr.wr_id;
                post(to, RecvWr { wr_id, sges }).map_err(|e| PostError {
                    index,
                    error: e.error,
                })?;
            }
            Ok(())
        });
    // SAFETY: by the caller's contract.
    unsafe { posted_status(posted, bad) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_recv(
    qp: *const Qp,
    wr: *const SiwRecvWr,
    n: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    unsafe { post_receives(get(qp), wr, n, bad, |q, wr| q.post_recv(&[wr])) }
}
