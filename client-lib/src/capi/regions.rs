//! Regions of arenas and of memory of the program: the C API.

use super::handles::{borrow_handle, borrow_handle_mut, free_handle, store_boxed};
use super::to_status;
use crate::{Access, AppMr, Arena, CancelGuard, Error, Mr, Pd, ReregChange};
use siw_shm::control::{REREG_ACCESS, REREG_PD, REREG_TRANSLATION};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// `siw_mr`
pub enum SiwMr {
    /// Memory of the daemon.
    Arena(Mr),
    /// Memory of the program.
    Program(AppMr),
}

impl SiwMr {
    fn as_ptr(&self) -> *mut u8 {
        match self {
            SiwMr::Arena(mr) => mr.as_ptr(),
            SiwMr::Program(mr) => mr.as_ptr(),
        }
    }

    fn addr(&self) -> u64 {
        match self {
            SiwMr::Arena(mr) => mr.addr(),
            SiwMr::Program(mr) => mr.addr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            SiwMr::Arena(mr) => mr.len(),
            SiwMr::Program(mr) => mr.len(),
        }
    }

    fn lkey(&self) -> u32 {
        match self {
            SiwMr::Arena(mr) => mr.lkey(),
            SiwMr::Program(mr) => mr.lkey(),
        }
    }

    fn rkey(&self) -> u32 {
        match self {
            SiwMr::Arena(mr) => mr.rkey(),
            SiwMr::Program(mr) => mr.rkey(),
        }
    }

    fn deregister(&mut self) -> Result<(), Error> {
        match self {
            SiwMr::Arena(mr) => mr.deregister(),
            SiwMr::Program(mr) => mr.deregister(),
        }
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_alloc_mr(
    pd: *const Pd,
    len: usize,
    access: u32,
    out: *mut *mut SiwMr,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        store_boxed(
            out,
            borrow_handle(pd).and_then(|pd| Ok(SiwMr::Arena(pd.alloc_mr(len, Access(access))?))),
        )
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_free_mr(mr: *mut SiwMr) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(mr) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_ptr(mr: *const SiwMr) -> *mut c_void {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(std::ptr::null_mut(), |region| region.as_ptr().cast())
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_addr(mr: *const SiwMr) -> u64 {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(0, SiwMr::addr)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_len(mr: *const SiwMr) -> usize {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(0, SiwMr::len)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_lkey(mr: *const SiwMr) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(0, SiwMr::lkey)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_mr_rkey(mr: *const SiwMr) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(mr) }.map_or(0, SiwMr::rkey)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reg_memory(
    pd: *const Pd,
    address: *mut c_void,
    len: usize,
    access: u32,
    out: *mut *mut SiwMr,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract; the header has the contract of `Pd::reg_memory`.
    unsafe {
        let made = borrow_handle(pd).and_then(|pd| {
            let mr = pd.reg_memory(address.cast(), len, Access(access))?;
            Ok(SiwMr::Program(mr))
        });
        store_boxed(out, made)
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reg_mr(
    pd: *const Pd,
    arena: *const Arc<Arena>,
    offset: usize,
    len: usize,
    access: u32,
    out: *mut *mut SiwMr,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        let made = borrow_handle(pd).and_then(|pd| {
            let range = offset..offset.saturating_add(len);
            let mr = pd.reg_mr(borrow_handle(arena)?, range, Access(access))?;
            Ok(SiwMr::Arena(mr))
        });
        store_boxed(out, made)
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_reg_mr_iova(
    pd: *const Pd,
    arena: *const Arc<Arena>,
    offset: usize,
    len: usize,
    iova: u64,
    access: u32,
    out: *mut *mut SiwMr,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        let made = borrow_handle(pd).and_then(|pd| {
            let range = offset..offset.saturating_add(len);
            let mr = pd.reg_mr_iova(borrow_handle(arena)?, range, iova, Access(access))?;
            Ok(SiwMr::Arena(mr))
        });
        store_boxed(out, made)
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_dereg_mr(mr: *mut SiwMr) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let tried = unsafe { borrow_handle_mut(mr) }.and_then(SiwMr::deregister);
    if tried.is_ok() {
        // SAFETY: module contract; already deregistered.
        unsafe { free_handle(mr) };
    }
    to_status(tried)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_rereg_mr(
    mr: *mut SiwMr,
    flags: u32,
    pd: *const Pd,
    arena: *const Arc<Arena>,
    offset: usize,
    len: usize,
    access: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    let has = |flag| flags & flag != 0;
    // SAFETY: module contract.
    to_status(unsafe {
        borrow_handle_mut(mr).and_then(|mr| {
            if flags & !(REREG_TRANSLATION | REREG_PD | REREG_ACCESS) != 0 {
                return Err(Error::Invalid("unknown flags of siw_rereg_mr"));
            }
            let mut change = ReregChange::default();
            if has(REREG_TRANSLATION) {
                change.range = Some((borrow_handle(arena)?, offset, len));
            }
            if has(REREG_PD) {
                change.pd = Some(borrow_handle(pd)?);
            }
            if has(REREG_ACCESS) {
                change.access = Some(Access(access));
            }
            match mr {
                SiwMr::Arena(mr) => mr.rereg(&change),
                SiwMr::Program(mr) if flags == REREG_ACCESS => mr.change_access(Access(access)),
                SiwMr::Program(_) => Err(Error::Invalid(
                    "only the access rights of memory of the program can be changed",
                )),
            }
        })
    })
}
