//! Posting of work requests: the C API.

use super::handles::borrow_handle;
use super::memory::post_special;
use super::{SiwRecvWr, SiwSendWr, SiwUd, borrow_array, fail_with, store_out};
use crate::{Error, Opcode, PostError, Qp, RecvWr, SendData, SendWr, Sge, WrFlags};
use std::ffi::c_int;

// Each `unsafe` below relies on the header's contract, see the parent module.

/// `SIW_SEND_TO_AH`
pub const SEND_TO_AH: u32 = 256;

/// Gathers inline data of one request.
///
/// # Safety
/// Each SGE refers to readable memory.
unsafe fn gather_inline(sges: &[Sge], into: &mut [u8; 256]) -> Result<usize, Error> {
    let mut count = 0;
    for sge in sges {
        let len = sge.length as usize;
        let to = into
            .get_mut(count..count + len)
            .ok_or(Error::Invalid("more than 256 bytes of inline data"))?;
        // SAFETY: readable for `length` bytes by contract; `to` is ours.
        unsafe { std::ptr::copy_nonoverlapping(sge.addr as *const u8, to.as_mut_ptr(), len) };
        count += len;
    }
    Ok(count)
}

/// # Safety
/// `wr` and its list are valid.
unsafe fn post_one(qp: &Qp, wr: &SiwSendWr, last: &mut [u8; 256]) -> Result<(), Error> {
    let opcode = u8::try_from(wr.opcode)
        .ok()
        .and_then(Opcode::from_u8)
        .ok_or(Error::Invalid("no such opcode"))?;
    let is_datagram = wr.flags & SEND_TO_AH != 0;
    let flags = wr.flags & !SEND_TO_AH;
    let flags = u8::try_from(flags).map_err(|_| Error::Invalid("unknown send flags"))?;
    let flags = WrFlags(flags);
    // SAFETY: by the caller's contract.
    let sges = unsafe { borrow_array(wr.sg_list, wr.num_sge as usize) }?;
    if opcode.is_atomic() || matches!(opcode, Opcode::RegMr | Opcode::BindMw) {
        // SAFETY: by the caller's contract.
        return unsafe { post_special(qp, wr, opcode, flags, sges) };
    }
    let data = if flags.contains(WrFlags::INLINE) {
        // SAFETY: by the caller's contract.
        let count = unsafe { gather_inline(sges, last) }?;
        SendData::Inline(&last[..count])
    } else {
        SendData::Sges(sges)
    };
    let request = SendWr {
        opcode,
        flags,
        wr_id: wr.wr_id,
        imm: wr.inv_rkey,
        remote_addr: wr.remote_addr,
        rkey: wr.rkey,
        data,
    };
    let request = if is_datagram {
        // SAFETY: by the caller's contract, which the flag selects.
        let (ah, qpn, qkey) = unsafe {
            let SiwUd {
                ah,
                remote_qpn,
                remote_qkey,
            } = wr.what.ud;
            (borrow_handle(ah)?, remote_qpn, remote_qkey)
        };
        request.with_destination(ah.number(), qpn, qkey)
    } else {
        request
    };
    qp.post_send(&[request]).map_err(|error| error.error)
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_send(
    qp: *const Qp,
    wr: *const SiwSendWr,
    count: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    let posted = unsafe { borrow_handle(qp) }
        .map_err(|error| PostError { index: 0, error })
        .and_then(|qp| {
            // SAFETY: module contract.
            let list = unsafe { borrow_array(wr, count as usize) }
                .map_err(|error| PostError { index: 0, error })?;
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
pub(super) unsafe fn posted_status(result: Result<(), PostError>, bad: *mut u32) -> c_int {
    result.map_or_else(
        |error| {
            // SAFETY: by the caller's contract.
            let _ = unsafe { store_out(bad, error.index as u32) };
            fail_with(error.error)
        },
        |()| 0,
    )
}

/// Posts receive requests one by one to `to`, a queue pair or a shared receive queue.
///
/// # Safety
/// `wr` and its lists are valid, `bad` is NULL or writable.
pub(super) unsafe fn post_receives<T>(
    to: Result<&T, Error>,
    wr: *const SiwRecvWr,
    count: u32,
    bad: *mut u32,
    post: impl Fn(&T, RecvWr<'_>) -> Result<(), PostError>,
) -> c_int {
    let posted = to
        .map_err(|error| PostError { index: 0, error })
        .and_then(|to| {
            // SAFETY: by the caller's contract.
            let list = unsafe { borrow_array(wr, count as usize) }
                .map_err(|error| PostError { index: 0, error })?;
            for (index, wr) in list.iter().enumerate() {
                // SAFETY: by the caller's contract.
                let sges = unsafe { borrow_array(wr.sg_list, wr.num_sge as usize) }
                    .map_err(|error| PostError { index, error })?;
                let wr_id = wr.wr_id;
                post(to, RecvWr { wr_id, sges }).map_err(|error| PostError {
                    index,
                    error: error.error,
                })?;
            }
            Ok(())
        });
    // SAFETY: by the caller's contract.
    unsafe { posted_status(posted, bad) }
}

/// Documented in `include/siw.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siw_post_recv(
    qp: *const Qp,
    wr: *const SiwRecvWr,
    count: u32,
    bad: *mut u32,
) -> c_int {
    // SAFETY: module contract.
    unsafe {
        post_receives(borrow_handle(qp), wr, count, bad, |queue_pair, wr| {
            queue_pair.post_recv(&[wr])
        })
    }
}
