//! Shared receive queues, changes of completion queues, states of queue pairs: the C API.

use super::{
    SiwLimits, SiwQpAttr, SiwRecvWr, SiwSrqAttr, SiwWc, fail, free, get, post_receives, put,
    put_box, status,
};
use crate::{Context, Cq, Error, Pd, Qp, QpState, Srq, SrqInit, Wc};
use siw_shm::control::{SRQ_LIMIT, SRQ_MAX_WR};
use std::ffi::{c_int, c_void};
use std::time::Duration;

// Each `unsafe` below relies on the header's contract, see the parent module.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_limits(ctx: *const Context, out: *mut SiwLimits) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(ctx).and_then(|c| put(out, SiwLimits::from(&c.limits()))) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_create_srq(
    pd: *const Pd,
    attr: *const SiwSrqAttr,
    out: *mut *mut Srq,
) -> c_int {
    // SAFETY: module contract.
    let made = unsafe {
        get(pd).and_then(|pd| {
            let a = get(attr)?;
            pd.create_srq(&SrqInit {
                max_wr: a.max_wr,
                max_sge: a.max_sge,
                limit: a.srq_limit,
                share: a.max_share,
            })
        })
    };
    // SAFETY: module contract.
    unsafe { put_box(out, made) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_destroy_srq(srq: *mut Srq) {
    // SAFETY: module contract.
    unsafe { free(srq) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_srq_num(srq: *const Srq) -> u32 {
    // SAFETY: module contract.
    unsafe { get(srq) }.map_or(0, Srq::number)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_srq(
    srq: *const Srq,
    attr: *const SiwSrqAttr,
    mask: u32,
) -> c_int {
    // SAFETY: module contract.
    let args = unsafe { get(srq).and_then(|s| Ok((s, get(attr)?))) };
    status(args.and_then(|(s, a)| {
        if mask == 0 || mask & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
            return Err(Error::Invalid(
                "SIW_SRQ_MAX_WR and SIW_SRQ_LIMIT can be modified",
            ));
        }
        if mask & SRQ_MAX_WR != 0 {
            s.resize(a.max_wr)?;
        }
        if mask & SRQ_LIMIT != 0 {
            s.arm_limit(a.srq_limit)?;
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_srq(srq: *const Srq, out: *mut SiwSrqAttr) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(srq) }.and_then(|s| {
        let a = SiwSrqAttr::from(&s.query()?);
        // SAFETY: module contract.
        unsafe { put(out, a) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_srq_recv(
    srq: *const Srq,
    wr: *const SiwRecvWr,
    n: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    unsafe { post_receives(get(srq), wr, n, bad, |s, wr| s.post_recv(&[wr])) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cq_num(cq: *const Cq) -> u32 {
    // SAFETY: module contract.
    unsafe { get(cq) }.map_or(0, Cq::number)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_cq_capacity(cq: *const Cq) -> u32 {
    // SAFETY: module contract.
    unsafe { get(cq) }.map_or(0, Cq::capacity)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_resize_cq(cq: *const Cq, cqe: u32) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(cq) }.and_then(|c| c.resize(cqe)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_cq(cq: *const Cq, count: u16, period_us: u16) -> c_int {
    let period = Duration::from_micros(period_us.into());
    // SAFETY: module contract.
    status(unsafe { get(cq) }.and_then(|c| c.moderate(count, period)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_modify_qp(qp: *const Qp, state: u32) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(qp) }.and_then(|q| {
        let to = QpState::from_u32(state).ok_or(Error::Invalid("no such queue pair state"))?;
        q.modify(to)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_query_qp(qp: *const Qp, out: *mut SiwQpAttr) -> c_int {
    // SAFETY: module contract.
    status(unsafe { get(qp) }.and_then(|q| {
        let a = SiwQpAttr::new(&q.query()?, &q.caps());
        // SAFETY: module contract.
        unsafe { put(out, a) }
    }))
}

/// Tells one completion that a drain found; may be NULL.
type Seen = Option<unsafe extern "C" fn(wc: *const SiwWc, arg: *mut c_void)>;

/// # Safety
/// The module's contract; `seen` may be called with `arg`.
unsafe fn drain(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
    run: impl FnOnce(&Qp, Duration, &mut dyn FnMut(&Wc)) -> Result<(), Error>,
) -> c_int {
    // Some centuries stand for ever.
    let timeout = super::timeout(timeout_ms).unwrap_or(Duration::from_secs(1 << 34));
    let mut tell = |wc: &Wc| {
        if let Some(f) = seen {
            // SAFETY: by the caller's contract; the pointer is valid for the call.
            unsafe { f(&SiwWc::from(wc), arg) };
        }
    };
    // SAFETY: module contract.
    match unsafe { get(qp) } {
        Ok(q) => status(run(q, timeout, &mut tell)),
        Err(e) => fail(e),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_drain_sq(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: module contract.
    unsafe { drain(qp, seen, arg, timeout_ms, |q, t, f| q.drain_sq(t, f)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_drain_rq(
    qp: *const Qp,
    seen: Seen,
    arg: *mut c_void,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: module contract.
    unsafe { drain(qp, seen, arg, timeout_ms, |q, t, f| q.drain_rq(t, f)) }
}
