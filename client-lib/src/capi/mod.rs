//! The C API: thin wrappers of the Rust objects, declared in `include/siw.h`.
//! Handles are boxed Rust objects. Layouts are checked against the header by
//! tests/c_api.rs.
//!
//! Safety of every function here is the contract of the header: pointers are NULL or valid for
//! their type, handles come from this library and are not used after they were destroyed.
//!
//! A cancelled thread would be unwound by the cancellation points of the C library, which aborts in frames of
//! this ABI. Functions that may reach one, if only to close a descriptor, have a [`CancelGuard`].
#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    missing_debug_implementations
)]

mod cm;
mod datagrams;
mod handles;
mod layout;
mod memory;
mod memory_layout;
mod queue_layout;
mod queues;
mod regions;
mod services;
mod work_requests;

pub use cm::*;
pub use datagrams::*;
pub use layout::*;
pub use memory::*;
pub use memory_layout::*;
pub use queue_layout::*;
pub use queues::*;
pub use regions::*;
pub use services::*;
pub use work_requests::*;

use handles::{borrow_handle, borrow_optional, free_handle, store_boxed};

use crate::{CancelGuard, CompletionChannel, Context, Cq, Error, Pd, Qp, QpInit, Wc, WcStatus};
use rustix::fd::{AsFd, AsRawFd};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

fn set_last_error(text: &str) {
    let clean: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    // The variable no longer exists in functions of atexit(3) and in threads that are ending.
    let _ =
        LAST_ERROR.try_with(|last| *last.borrow_mut() = CString::new(clean).unwrap_or_default());
}

fn fail_with(error: Error) -> c_int {
    set_last_error(&error.to_string());
    error.errno().max(1)
}

fn to_status(result: Result<(), Error>) -> c_int {
    result.map_or_else(fail_with, |()| 0)
}

fn null_pointer() -> Error {
    Error::Invalid("a required pointer is NULL")
}

fn to_timeout(ms: c_int) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// Borrows a value of the program.
///
/// # Safety
/// NULL or valid for the borrow.
unsafe fn borrow_value<'a, T>(pointer: *const T) -> Result<&'a T, Error> {
    // SAFETY: by the caller's contract.
    unsafe { pointer.as_ref() }.ok_or_else(null_pointer)
}

/// Stores `value` through an out pointer.
///
/// # Safety
/// NULL or valid for writing.
unsafe fn store_out<T>(out: *mut T, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(null_pointer());
    }
    // SAFETY: by the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// Stores `value` through an out pointer to a struct that begins with its size, as the program was
/// compiled: what it has no room for is left out.
///
/// # Safety
/// NULL, or valid for writing the bytes that its first field, a `u32`, names.
unsafe fn store_sized<T>(out: *mut T, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(null_pointer());
    }
    // SAFETY: by the caller's contract.
    let size = unsafe { out.cast::<u32>().read() } as usize;
    if !(size_of::<u64>()..=MAX_PARAMETERS).contains(&size) {
        return Err(Error::Invalid(SIZE_NOT_SET));
    }
    let (from, to) = (std::ptr::from_ref(&value).cast::<u8>(), out.cast::<u8>());
    let known = size.min(size_of::<T>());
    // SAFETY: by the caller's contract. The size stays as it is.
    unsafe { std::ptr::copy_nonoverlapping(from.add(4), to.add(4), known - 4) };
    Ok(())
}

/// Copies a parameter struct that begins with its size as the program was compiled: fields beyond
/// that are zero, and fields that only newer headers have must be.
///
/// # Safety
/// NULL, or valid for the bytes that its first field, a `u32`, names. `T` has integers and nullable
/// pointers only.
unsafe fn read_sized<T>(pointer: *const T) -> Result<Option<T>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: by the caller's contract.
    let size = unsafe { pointer.cast::<u32>().read() } as usize;
    if !(size_of::<u64>()..=MAX_PARAMETERS).contains(&size) {
        return Err(Error::Invalid(SIZE_NOT_SET));
    }
    let known = size.min(size_of::<T>());
    // SAFETY: by the caller's contract; zeroes are valid.
    let value = unsafe {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast(), known);
        value.assume_init()
    };
    // SAFETY: by the caller's contract.
    let newer = unsafe { borrow_array(pointer.cast::<u8>().wrapping_add(known), size - known) }?;
    if newer.iter().any(|byte| *byte != 0) {
        return Err(Error::Invalid("parameters that this libsiw does not know"));
    }
    Ok(Some(value))
}

const SIZE_NOT_SET: &str = "set the size field of the parameters to the size of their struct";
/// Largest parameter struct that a newer header may have.
const MAX_PARAMETERS: usize = 4096;

/// Borrows an array from C.
///
/// # Safety
/// `pointer` is valid for `count` elements, or NULL.
unsafe fn borrow_array<'a, T>(pointer: *const T, count: usize) -> Result<&'a [T], Error> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null_pointer());
    }
    // SAFETY: by the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub extern "C" fn siw_last_error() -> *const c_char {
    let text = LAST_ERROR.try_with(|text| text.borrow().as_ptr());
    text.unwrap_or(c"".as_ptr())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub extern "C" fn siw_wc_status_str(status: u32) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<CString> = RefCell::new(CString::default());
    }
    let text = WcStatus(u8::try_from(status).unwrap_or(u8::MAX)).as_str();
    let text = TEXT.try_with(|buffer| {
        *buffer.borrow_mut() = CString::new(text).unwrap_or_default();
        buffer.borrow().as_ptr()
    });
    text.unwrap_or(c"".as_ptr())
}

// Each `unsafe` below relies on the header's contract, stated at the module's top.

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub extern "C" fn siw_version() -> u32 {
    let part = |text: &str| text.parse().unwrap_or(0);
    let version = [
        part(env!("CARGO_PKG_VERSION_MAJOR")),
        part(env!("CARGO_PKG_VERSION_MINOR")),
        part(env!("CARGO_PKG_VERSION_PATCH")),
    ];
    version.iter().fold(0u32, |sum, part| sum << 8 | part)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_read_stats(
    ctx: *const Context,
    out: *mut c_char,
    room: usize,
) -> isize {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    match unsafe { borrow_handle(ctx) }.and_then(Context::read_stats) {
        Ok(text) => {
            let text: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
            if let Some(most) = room.checked_sub(1).filter(|_| !out.is_null()) {
                let len = text.len().min(most);
                // SAFETY: room for `len` bytes and the terminating zero by contract.
                unsafe {
                    std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), len);
                    out.add(len).write(0);
                }
            }
            text.len() as isize
        }
        Err(error) => -(fail_with(error) as isize),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_open(path: *const c_char, out: *mut *mut Context) -> c_int {
    let _guard = CancelGuard::new();
    let path = if path.is_null() {
        None
    } else {
        // SAFETY: a C string by contract.
        let sge = unsafe { CStr::from_ptr(path) };
        Some(Path::new(std::ffi::OsStr::from_bytes(sge.to_bytes())))
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, Context::open(path)) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_close(ctx: *mut Context) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(ctx) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_set_call_timeout(ctx: *const Context, timeout_ms: u32) -> c_int {
    let _guard = CancelGuard::new();
    let timeout = Duration::from_millis(timeout_ms.into());
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(ctx) }.and_then(|ctx| ctx.set_call_timeout(timeout)))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_await_releases(ctx: *const Context) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(ctx) }.and_then(Context::await_releases))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_is_alive(ctx: *const Context) -> c_int {
    // SAFETY: module contract.
    unsafe { borrow_handle(ctx) }
        .is_ok_and(Context::is_alive)
        .into()
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_devices(
    ctx: *const Context,
    out: *mut SiwDeviceAttr,
    count: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let result = unsafe { borrow_handle(ctx) }.and_then(Context::query_devices);
    match result {
        Ok(devices) => {
            if !out.is_null() {
                for (i, device) in devices.iter().take(count as usize).enumerate() {
                    // SAFETY: room for `count` elements by contract.
                    unsafe { out.add(i).write(SiwDeviceAttr::from(device)) };
                }
            }
            devices.len() as c_int
        }
        Err(error) => -fail_with(error),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_async_fd(ctx: *const Context) -> c_int {
    // SAFETY: module contract.
    unsafe { borrow_handle(ctx) }.map_or(-1, |object| object.async_fd().as_raw_fd())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_async_event(
    ctx: *const Context,
    out: *mut SiwAsyncEvent,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(ctx) }.and_then(|object| {
        let error = object.get_async_event(to_timeout(timeout_ms))?;
        // SAFETY: module contract.
        unsafe { store_out(out, SiwAsyncEvent::from(&error)) }
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_pd(ctx: *const Context, out: *mut *mut Pd) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { store_boxed(out, borrow_handle(ctx).and_then(Context::alloc_pd)) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_dealloc_pd(pd: *mut Pd) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(pd) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_channel(
    ctx: *const Context,
    out: *mut *mut Arc<CompletionChannel>,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { store_boxed(out, borrow_handle(ctx).and_then(CompletionChannel::new)) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_channel(channel_handle: *mut Arc<CompletionChannel>) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(channel_handle) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_channel_fd(channel_handle: *const Arc<CompletionChannel>) -> c_int {
    // SAFETY: module contract.
    unsafe { borrow_handle(channel_handle) }.map_or(-1, |object| object.as_fd().as_raw_fd())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_get_cq_event(
    channel_handle: *const Arc<CompletionChannel>,
    cookie: *mut u64,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(channel_handle) }.and_then(|object| {
        let got = object.get_event(to_timeout(timeout_ms))?;
        // SAFETY: module contract.
        unsafe { store_out(cookie, got) }
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_cq(
    ctx: *const Context,
    cqe: u32,
    channel_handle: *const Arc<CompletionChannel>,
    cookie: u64,
    out: *mut *mut Cq,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(ctx).and_then(|object| {
            let channel = borrow_optional(channel_handle)?;
            Cq::new(object, cqe, channel.map(|channel| (channel, cookie)))
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_cq(cq: *mut Cq) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(cq) }
}

/// Polls in batches on the stack and converts.
///
/// # Safety
/// `out` is valid for `count` elements.
unsafe fn poll_into(
    count: u32,
    out: *mut SiwWc,
    mut poll: impl FnMut(&mut [Wc], bool) -> Result<usize, Error>,
) -> c_int {
    if out.is_null() && count > 0 {
        return -fail_with(null_pointer());
    }
    let mut batch = [Wc::default(); 16];
    let mut done = 0usize;
    while done < count as usize {
        let want = (count as usize - done).min(batch.len());
        let got = match poll(&mut batch[..want], done == 0) {
            Ok(got) => got,
            // Completions taken before the error must be delivered first.
            Err(_) if done > 0 => break,
            Err(error) => return -fail_with(error),
        };
        for (i, wc) in batch[..got].iter().enumerate() {
            // SAFETY: done + i < count.
            unsafe { out.add(done + i).write(SiwWc::from(wc)) };
        }
        done += got;
        if got < want {
            break;
        }
    }
    done as c_int
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_poll_cq(cq: *const Cq, count: u32, out: *mut SiwWc) -> c_int {
    // SAFETY: module contract.
    match unsafe { borrow_handle(cq) } {
        // SAFETY: module contract.
        Ok(cq) => unsafe { poll_into(count, out, |byte, _| cq.poll(byte)) },
        Err(error) => -fail_with(error),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_wait_cq(
    cq: *const Cq,
    count: u32,
    out: *mut SiwWc,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    match unsafe { borrow_handle(cq) } {
        // SAFETY: module contract.
        Ok(cq) => unsafe {
            poll_into(count, out, |byte, first| {
                if first {
                    cq.wait(byte, to_timeout(timeout_ms))
                } else {
                    cq.poll(byte)
                }
            })
        },
        Err(error) => -fail_with(error),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_req_notify_cq(cq: *const Cq, solicited_only: c_int) -> c_int {
    // SAFETY: module contract.
    to_status(
        unsafe { borrow_handle(cq) }.and_then(|object| object.req_notify(solicited_only != 0)),
    )
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_qp(
    pd: *const Pd,
    attr: *const SiwQpInitAttr,
    out: *mut *mut Qp,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(pd).and_then(|pd| {
            let attributes = read_sized(attr)?.ok_or_else(null_pointer)?;
            let init = QpInit {
                max_send_wr: attributes.max_send_wr,
                max_recv_wr: attributes.max_recv_wr,
                max_send_sge: attributes.max_send_sge,
                max_recv_sge: attributes.max_recv_sge,
                max_inline: attributes.max_inline_data,
                sq_sig_all: attributes.sq_sig_all != 0,
            };
            let (send, recv) = (
                borrow_handle(attributes.send_cq)?,
                borrow_handle(attributes.recv_cq)?,
            );
            match attributes.srq.as_ref() {
                Some(srq) => pd.create_qp_with_srq(send, recv, srq, &init),
                None => pd.create_qp(send, recv, &init),
            }
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_qp(qp: *mut Qp) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(qp) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_num(qp: *const Qp) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(qp) }.map_or(0, Qp::qp_num)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_state(qp: *const Qp) -> c_int {
    // SAFETY: module contract.
    match unsafe { borrow_handle(qp) } {
        Ok(queue_pair) => queue_pair.state().map_or(-libc::EPROTO, |sge| sge as c_int),
        Err(error) => -fail_with(error),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_qp_set_error(qp: *const Qp) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(qp) }.and_then(Qp::set_error))
}
