//! Arenas, memory windows, fast registration, and work requests other
//! than messages: the C API.

use super::handles::{borrow_handle, borrow_handle_mut, free_handle, store_boxed};
use super::{SiwMwBind, SiwRange, SiwSendWr, borrow_array, borrow_value, fail_with, posted_status};
use crate::{
    Access, Arena, AtomicArgs, CancelGuard, Context, Error, FastMr, Mw, Opcode, Pd, PostError, Qp,
    SendData, SendWr, Sge, WindowType, WrFlags,
};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_arena(
    ctx: *const Context,
    len: usize,
    huge: c_int,
    out: *mut *mut Arc<Arena>,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        store_boxed(
            out,
            borrow_handle(ctx).and_then(|context| Arena::alloc(context, len, huge != 0)),
        )
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_free_arena(arena: *mut Arc<Arena>) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(arena) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_arena_ptr(arena: *const Arc<Arena>) -> *mut c_void {
    // SAFETY: module contract.
    unsafe { borrow_handle(arena) }.map_or(std::ptr::null_mut(), |arena| arena.as_ptr().cast())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_arena_len(arena: *const Arc<Arena>) -> usize {
    // SAFETY: module contract.
    unsafe { borrow_handle(arena) }.map_or(0, |arena| arena.len())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_fast_mr(
    pd: *const Pd,
    arena: *const Arc<Arena>,
    max_pages: u32,
    out: *mut *mut FastMr,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        let made =
            borrow_handle(pd).and_then(|pd| pd.alloc_fast_mr(borrow_handle(arena)?, max_pages));
        store_boxed(out, made)
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_free_fast_mr(mr: *mut FastMr) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(mr) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_fast_mr_key(mr: *const FastMr) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(0, FastMr::key)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_map_fast_mr(
    mr: *mut FastMr,
    ranges: *const SiwRange,
    count: u32,
    page_shift: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let mapped = unsafe {
        borrow_handle_mut(mr).and_then(|mr| {
            let ranges: Vec<_> = borrow_array(ranges, count as usize)?
                .iter()
                .map(|range| range.offset..range.offset.saturating_add(range.length))
                .collect();
            mr.map_ranges(&ranges, u8::try_from(page_shift).unwrap_or(u8::MAX))
        })
    };
    mapped.map_or_else(|error| -fail_with(error), |count| count as c_int)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_mw(pd: *const Pd, kind: u32, out: *mut *mut Mw) -> c_int {
    let _guard = CancelGuard::new();
    let kind = match kind {
        1 => Ok(WindowType::One),
        2 => Ok(WindowType::Two),
        _ => Err(Error::Invalid("the type of a memory window must be 1 or 2")),
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, borrow_handle(pd).and_then(|pd| pd.alloc_mw(kind?))) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_dealloc_mw(mw: *mut Mw) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(mw) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mw_rkey(mw: *const Mw) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(mw) }.map_or(0, Mw::rkey)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_bind_mw(
    qp: *const Qp,
    mw: *const Mw,
    wr_id: u64,
    flags: u32,
    info: *const SiwMwBind,
) -> c_int {
    let _guard = CancelGuard::new();
    let flags = u8::try_from(flags).map_err(|_| Error::Invalid("unknown send flags"));
    // SAFETY: module contract.
    let posted = unsafe {
        borrow_handle(qp)
            .and_then(|qp| Ok((qp, borrow_handle(mw)?, borrow_value(info)?, flags?)))
            .map_err(|error| PostError { index: 0, error })
            .and_then(|(qp, mw, bind, flags)| mw.post_bind(qp, wr_id, WrFlags(flags), &bind.into()))
    };
    // SAFETY: NULL is allowed.
    unsafe { posted_status(posted.map(|_| ()), std::ptr::null_mut()) }
}

/// Posts an atomic, BIND_MW or REG_MR.
///
/// # Safety
/// The field of `wr` for `opcode` is valid.
pub(super) unsafe fn post_special(
    qp: &Qp,
    wr: &SiwSendWr,
    opcode: Opcode,
    flags: WrFlags,
    sges: &[Sge],
) -> Result<(), Error> {
    let post = |wr: SendWr<'_>| {
        qp.post_send(&[wr.with_flags(flags)])
            .map_err(|error| error.error)
    };
    match opcode {
        Opcode::BindMw => {
            // SAFETY: by the caller's contract.
            let (bind, mw) = unsafe { (wr.what.bind_mw, borrow_handle(wr.what.bind_mw.mw)?) };
            post(mw.bind_request(wr.wr_id, &(&bind.info).into(), bind.rkey))?;
            mw.on_bind_posted(bind.rkey);
            Ok(())
        }
        Opcode::RegMr => {
            // SAFETY: by the caller's contract.
            let (fast_reg, mr) = unsafe { (wr.what.reg_mr, borrow_handle_mut(wr.what.reg_mr.mr)?) };
            post(mr.register_request(
                wr.wr_id,
                fast_reg.key,
                fast_reg.iova,
                Access(fast_reg.access),
            )?)
        }
        _ => {
            // SAFETY: by the caller's contract.
            let atomic = unsafe { wr.what.atomic };
            let &[sge] = sges else {
                return Err(Error::Invalid("an atomic takes one element of 8 bytes"));
            };
            let plain = (atomic.compare_add_mask, atomic.swap_mask) == (0, 0);
            let args = match (opcode, plain) {
                (Opcode::FetchAdd, _) => AtomicArgs {
                    add_or_swap_mask: atomic.compare_add_mask,
                    ..AtomicArgs::fetch_add(atomic.compare_add)
                },
                (_, true) => AtomicArgs::cmp_swap(atomic.compare_add, atomic.swap),
                (_, false) => AtomicArgs {
                    compare_mask: atomic.compare_add_mask,
                    add_or_swap_mask: atomic.swap_mask,
                    ..AtomicArgs::cmp_swap(atomic.compare_add, atomic.swap)
                },
            };
            post(SendWr {
                opcode,
                remote_addr: wr.remote_addr,
                rkey: wr.rkey,
                ..SendWr::send(wr.wr_id, SendData::Atomic(sge, args))
            })
        }
    }
}
