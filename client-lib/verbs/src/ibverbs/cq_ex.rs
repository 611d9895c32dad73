//! Extended completion queues (ibv_create_cq_ex(3)): polled one completion at a time, whose fields
//! are read by functions.

use super::cq::{CqObject, create, to_imm_data, to_sl, to_wc_flags};
use crate::abi::*;
use crate::status::{null_with, pointer_of};
use siw::{BracketLock, Error, Wc};
use std::cell::UnsafeCell;
use std::ffi::c_int;

/// The completion found by `ibv_start_poll` or `ibv_next_poll`. It belongs to one thread from a
/// successful start to the end of polling.
#[derive(Default)]
pub struct Current {
    lock: BracketLock,
    completion: UnsafeCell<Wc>,
}

// SAFETY: only the thread that has the lock accesses the completion.
unsafe impl Sync for Current {}

/// Completion fields that a queue can be created with.
const SUPPORTED: u64 = (IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS) as u64;

/// ibv_create_cq_ex(3), which programs call through the context.
pub unsafe fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: a struct to read.
    let attr = unsafe { &*attr };
    if attr.wc_flags & !SUPPORTED != 0 {
        return null_with(libc::EOPNOTSUPP);
    }
    if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return null_with(libc::EINVAL);
    }
    let known = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 && attr.flags & !known != 0 {
        return null_with(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller promised.
    let queue = unsafe {
        create(
            context,
            attr.cqe.into(),
            attr.cq_context,
            attr.channel,
            attr.comp_vector.into(),
        )
    };
    pointer_of("ibv_create_cq_ex", queue).cast()
}

/// Functions in the struct of a queue.
mod slots {
    use crate::abi::{ibv_cq_ex, ibv_poll_cq_attr, ibv_wc_opcode};
    use std::ffi::c_int;

    crate::export::fast_functions! {
        pub fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int
            = super::start_poll;
        pub fn next_poll(cq: *mut ibv_cq_ex) -> c_int = super::next_poll;
        pub fn end_poll(cq: *mut ibv_cq_ex) = super::end_poll;
        pub fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode = super::read_opcode;
        pub fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 = super::read_vendor_err;
        pub fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 = super::read_byte_len;
        pub fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 = super::read_imm_data;
        pub fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 = super::read_qp_num;
        pub fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 = super::read_src_qp;
        pub fn read_wc_flags(cq: *mut ibv_cq_ex) -> u32 = super::read_wc_flags;
        pub fn read_sl(cq: *mut ibv_cq_ex) -> u8 = super::read_sl;
        pub fn read_zero(cq: *mut ibv_cq_ex) -> u32 = super::read_zero;
        pub fn read_zero_byte(cq: *mut ibv_cq_ex) -> u8 = super::read_zero_byte;
    }
}

/// Fills in the functions of a queue.
pub(super) fn fill_extended(abi: &mut ibv_cq_ex) {
    abi.start_poll = Some(slots::start_poll);
    abi.next_poll = Some(slots::next_poll);
    abi.end_poll = Some(slots::end_poll);
    abi.read_opcode = Some(slots::read_opcode);
    abi.read_vendor_err = Some(slots::read_vendor_err);
    abi.read_byte_len = Some(slots::read_byte_len);
    abi.read_imm_data = Some(slots::read_imm_data);
    abi.read_qp_num = Some(slots::read_qp_num);
    abi.read_src_qp = Some(slots::read_src_qp);
    abi.read_wc_flags = Some(slots::read_wc_flags);
    abi.read_slid = Some(slots::read_zero);
    abi.read_sl = Some(slots::read_sl);
    abi.read_dlid_path_bits = Some(slots::read_zero_byte);
}

/// Replaces the functions of a queue that poll.
pub(super) fn fill_polling(
    abi: &mut ibv_cq_ex,
    start_poll: unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int,
    next_poll: unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int,
) {
    abi.start_poll = Some(start_poll);
    abi.next_poll = Some(next_poll);
}

/// Takes the next completion into the queue's struct, by a function that polls.
///
/// # Safety
/// A completion queue of this library, locked by this thread.
#[inline(always)]
pub(super) unsafe fn take_next_by(
    cq: *mut ibv_cq_ex,
    poll: impl Fn(&CqObject, &mut [Wc]) -> Result<usize, Error>,
) -> c_int {
    // SAFETY: by the caller's contract.
    let queue = unsafe { CqObject::from_abi(cq.cast()) };
    let mut completion = [Wc::default()];
    let found = match poll(queue, &mut completion) {
        Err(Error::DaemonGone) if queue.cq().flush_lost_requests() => poll(queue, &mut completion),
        found => found,
    };
    match found {
        Ok(0) => libc::ENOENT,
        Ok(_) => {
            // SAFETY: the library may write the fields between start and end of polling; the completion
            // belongs to this thread.
            unsafe {
                (*cq).status = completion[0].status.0.into();
                (*cq).wr_id = completion[0].wr_id;
                *queue.current.completion.get() = completion[0];
            }
            0
        }
        Err(error) => error.errno(),
    }
}

/// ibv_start_poll(3), by a function that takes the first completion as [`take_next_by`] does.
///
/// # Safety
/// The contract of the manual page.
#[inline(always)]
pub(super) unsafe fn start_by(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
    take_next: unsafe fn(*mut ibv_cq_ex) -> c_int,
) -> c_int {
    // SAFETY: NULL or a struct to read.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq.cast()) };
    queue.current.lock.lock_or_end_call();
    // SAFETY: locked.
    let status = unsafe { take_next(cq) };
    if status != 0 {
        queue.current.lock.unlock();
    }
    status
}

/// # Safety
/// As for [`take_next_by`].
unsafe fn take_next(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { take_next_by(cq, |queue, completion| queue.cq().poll(completion)) }
}

unsafe fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { start_by(cq, attr, take_next) }
}

unsafe fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a completion queue of this library, which `start_poll` locked.
    unsafe { take_next(cq) }
}

unsafe fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: a completion queue of this library.
    unsafe { CqObject::from_abi(cq.cast()) }
        .current
        .lock
        .unlock();
}

/// # Safety
/// Between `start_poll` and `end_poll`.
unsafe fn completion_of(cq: *mut ibv_cq_ex) -> Wc {
    // SAFETY: by the caller's contract, this thread has the lock.
    unsafe { *CqObject::from_abi(cq.cast()).current.completion.get() }
}

unsafe fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    // SAFETY: the program is between start and end of polling.
    unsafe { completion_of(cq) }.opcode.0.into()
}

unsafe fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    unsafe { completion_of(cq) }.vendor_err
}

unsafe fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    unsafe { completion_of(cq) }.byte_len
}

unsafe fn read_imm_data(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    to_imm_data(&unsafe { completion_of(cq) })
}

unsafe fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    unsafe { completion_of(cq) }.qp_num
}

unsafe fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    unsafe { completion_of(cq) }.src_qp
}

unsafe fn read_wc_flags(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as in `read_opcode`.
    to_wc_flags(unsafe { completion_of(cq) }.flags)
}

unsafe fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: as in `read_opcode`.
    to_sl(unsafe { completion_of(cq) }.flags)
}

/// Reads a field of InfiniBand's link layer.
unsafe fn read_zero(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe fn read_zero_byte(_cq: *mut ibv_cq_ex) -> u8 {
    0
}
