//! Shared receive queues, changes of completion queues, states of queue pairs: the C API.

use super::handles::{borrow_handle, free_handle, store_boxed};
use super::{
    SiwLimits, SiwQpAttr, SiwRecvWr, SiwSrqAttr, SiwWc, fail_with, null_pointer, post_receives,
    read_sized, store_out, store_sized, to_status,
};
use crate::{CancelGuard, Context, Cq, Error, Pd, Qp, QpState, Srq, SrqInit, Wc};
use siw_shm::control::{SRQ_LIMIT, SRQ_MAX_WR};
use std::ffi::{c_int, c_void};
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_limits(ctx: *const Context, out: *mut SiwLimits) -> c_int {
    // SAFETY: module contract.
    to_status(unsafe {
        borrow_handle(ctx).and_then(|queue| store_out(out, SiwLimits::from(&queue.limits())))
    })
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_srq(
    pd: *const Pd,
    attr: *const SiwSrqAttr,
    out: *mut *mut Srq,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let made = unsafe {
        borrow_handle(pd).and_then(|pd| {
            let attributes: SiwSrqAttr = read_sized(attr)?.ok_or_else(null_pointer)?;
            pd.create_srq(&SrqInit {
                max_wr: attributes.max_wr,
                max_sge: attributes.max_sge,
                limit: attributes.srq_limit,
                share: attributes.max_share,
            })
        })
    };
    // SAFETY: module contract.
    unsafe { store_boxed(out, made) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_srq(srq: *mut Srq) {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe { free_handle(srq) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_srq_num(srq: *const Srq) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(srq) }.map_or(0, Srq::srq_id)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_srq(
    srq: *const Srq,
    attr: *const SiwSrqAttr,
    mask: u32,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    let args = unsafe {
        borrow_handle(srq).and_then(|srq| {
            let attributes: SiwSrqAttr = read_sized(attr)?.ok_or_else(null_pointer)?;
            Ok((srq, attributes))
        })
    };
    to_status(args.and_then(|(srq, attributes)| {
        if mask == 0 || mask & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
            return Err(Error::Invalid(
                "SIW_SRQ_MAX_WR and SIW_SRQ_LIMIT can be modified",
            ));
        }
        if mask & SRQ_MAX_WR != 0 {
            srq.resize(attributes.max_wr)?;
        }
        if mask & SRQ_LIMIT != 0 {
            srq.arm_limit(attributes.srq_limit)?;
        }
        Ok(())
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_srq(srq: *const Srq, out: *mut SiwSrqAttr) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(srq) }.and_then(|srq| {
        let attributes = SiwSrqAttr::from(&srq.query()?);
        // SAFETY: module contract.
        unsafe { store_sized(out, attributes) }
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_srq_recv(
    srq: *const Srq,
    wr: *const SiwRecvWr,
    n: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    unsafe {
        post_receives(borrow_handle(srq), wr, n, bad, |srq, wr| {
            srq.post_recv(&[wr])
        })
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cq_num(cq: *const Cq) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(cq) }.map_or(0, Cq::cq_id)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cq_capacity(cq: *const Cq) -> u32 {
    // SAFETY: module contract.
    unsafe { borrow_handle(cq) }.map_or(0, Cq::capacity)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_resize_cq(cq: *const Cq, cqe: u32) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(cq) }.and_then(|queue| queue.resize(cqe)))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_cq(cq: *const Cq, count: u16, period_us: u16) -> c_int {
    let _guard = CancelGuard::new();
    let period = Duration::from_micros(period_us.into());
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(cq) }.and_then(|queue| queue.moderate(count, period)))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_qp(qp: *const Qp, state: u32) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(qp) }.and_then(|queue_pair| {
        let to = QpState::from_u32(state).ok_or(Error::Invalid("no such queue pair state"))?;
        queue_pair.modify(to)
    }))
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_qp(qp: *const Qp, out: *mut SiwQpAttr) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    to_status(unsafe { borrow_handle(qp) }.and_then(|queue_pair| {
        let attributes = SiwQpAttr::new(&queue_pair.query()?, &queue_pair.granted_limits());
        // SAFETY: module contract.
        unsafe { store_out(out, attributes) }
    }))
}

/// Callback for each completion found by a drain; may be NULL.
type Seen = Option<unsafe extern "C" fn(wc: *const SiwWc, arg: *mut c_void)>;

/// # Safety
/// The module's contract; `seen` may be called with `arg`.
unsafe fn drain_with(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
    run: impl FnOnce(&Qp, Duration, &mut dyn FnMut(&Wc)) -> Result<(), Error>,
) -> c_int {
    // A wait without a timeout is some centuries.
    let timeout = super::to_timeout(timeout_ms).unwrap_or(Duration::from_secs(1 << 34));
    let mut tell = |wc: &Wc| {
        if let Some(callback) = seen {
            // SAFETY: by the caller's contract; the pointer is valid for the call.
            unsafe { callback(&SiwWc::from(wc), arg) };
        }
    };
    // SAFETY: module contract.
    match unsafe { borrow_handle(qp) } {
        Ok(queue_pair) => to_status(run(queue_pair, timeout, &mut tell)),
        Err(error) => fail_with(error),
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_drain_sq(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        drain_with(
            qp,
            seen,
            arg,
            timeout_ms,
            |queue_pair, timeout, callback| queue_pair.drain_sq(timeout, callback),
        )
    }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_drain_rq(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
) -> c_int {
    let _guard = CancelGuard::new();
    // SAFETY: module contract.
    unsafe {
        drain_with(
            qp,
            seen,
            arg,
            timeout_ms,
            |queue_pair, timeout, callback| queue_pair.drain_rq(timeout, callback),
        )
    }
}
