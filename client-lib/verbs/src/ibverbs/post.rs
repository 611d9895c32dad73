//! Posting (ibv_post_send(3), ibv_post_recv(3), ibv_post_srq_recv(3)), which programs call through
//! the context: a list is posted without an allocation or a look-up, with one doorbell.

use super::address_vector::AhObject;
use super::mw::{MwObject, to_binding};
use super::qp::QpObject;
use super::send_flags::to_flags;
use super::srq::SrqObject;
use crate::abi::*;
use crate::status::{errno_of, fail_errno, fail_with};
use siw::{AtomicArgs, Error, Opcode, RecvWr, SendData, SendPosting, SendWr, Sge, WcStatus};
use siw_shm::wqe::{MAX_INLINE, MAX_SGE};
use std::ffi::c_int;
use std::mem::{MaybeUninit, offset_of};

// Lists of elements are used in place.
const _: () = assert!(size_of::<ibv_sge>() == size_of::<Sge>());
const _: () = assert!(offset_of!(ibv_sge, length) == offset_of!(Sge, length));
const _: () = assert!(offset_of!(ibv_sge, lkey) == offset_of!(Sge, lkey));
const _: () = assert!(WcStatus::WR_FLUSH_ERR.0 as u32 == IBV_WC_WR_FLUSH_ERR);

/// Buffer for elements that are not aligned for `Sge`.
type Realigned = MaybeUninit<[Sge; MAX_SGE]>;

/// Converts a list of elements.
///
/// # Safety
/// `list` has `count` elements.
#[inline]
unsafe fn to_sges(list: *mut ibv_sge, count: c_int, room: &mut Realigned) -> Result<&[Sge], Error> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: by the caller's contract.
        Ok(count) if !list.is_aligned() => unsafe { realign(list, count, room) },
        // SAFETY: by the caller's contract; the layouts are the same.
        Ok(count) => Ok(unsafe { std::slice::from_raw_parts(list.cast(), count) }),
        Err(_) => Err(Error::Invalid("num_sge is negative")),
    }
}

/// Copies unaligned elements: libiscsi has them in packed structs.
///
/// # Safety
/// `list` has `count` elements.
#[cold]
unsafe fn realign(list: *mut ibv_sge, count: usize, room: &mut Realigned) -> Result<&[Sge], Error> {
    if count > MAX_SGE {
        return Err(Error::Invalid("more elements than max_sge"));
    }
    let to = room.as_mut_ptr().cast::<Sge>();
    // SAFETY: the buffer has MAX_SGE elements, of which `count` are written; the layouts are the
    // same.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(list.cast(), count * size_of::<Sge>());
        Ok(std::slice::from_raw_parts(to, count))
    }
}

/// Gathers inline data of several elements in `buffer`.
///
/// # Safety
/// Each element refers to readable memory.
#[inline(never)]
unsafe fn gather<'a>(sges: &[Sge], buffer: &'a mut [u8; MAX_INLINE]) -> Result<&'a [u8], Error> {
    let mut filled = 0;
    // Empty elements need no address.
    for sge in sges.iter().filter(|sge| sge.length > 0) {
        let len = sge.length as usize;
        let room = buffer
            .get_mut(filled..filled + len)
            .ok_or(Error::Invalid("more inline data than max_inline_data"))?;
        // SAFETY: by the caller's contract.
        unsafe {
            room.as_mut_ptr()
                .copy_from_nonoverlapping(sge.addr as *const u8, len);
        }
        filled += len;
    }
    Ok(&buffer[..filled])
}

/// Pushes a request whose data is inline.
///
/// # Safety
/// Each element refers to readable memory.
#[inline]
unsafe fn push_inline(
    posting: &mut SendPosting<'_>,
    request: &SendWr<'_>,
    sges: &[Sge],
) -> Result<(), Error> {
    if let [sge] = sges {
        let data = match sge.length as usize {
            // The address may be NULL.
            0 => &[],
            // SAFETY: by the caller's contract; the bytes are copied before this returns.
            len => unsafe { std::slice::from_raw_parts(sge.addr as *const u8, len) },
        };
        return posting.push(&SendWr {
            data: SendData::Inline(data),
            ..*request
        });
    }
    let mut buffer = [0; MAX_INLINE];
    // SAFETY: by the caller's contract.
    let data = SendData::Inline(unsafe { gather(sges, &mut buffer) }?);
    posting.push(&SendWr { data, ..*request })
}

/// Pushes one request of a list.
///
/// # Safety
/// The contract of ibv_post_send(3).
#[inline]
unsafe fn push_request(posting: &mut SendPosting<'_>, wr: &ibv_send_wr) -> Result<(), Error> {
    let mut room = Realigned::uninit();
    // SAFETY: by the caller's contract. The opcode decides which field of a union is valid; all of
    // them are numbers.
    let (sges, rdma, imm_data, key) = unsafe {
        (
            to_sges(wr.sg_list, wr.num_sge, &mut room)?,
            wr.wr.rdma,
            u32::from_be(wr.__bindgen_anon_1.imm_data),
            wr.__bindgen_anon_1.invalidate_rkey,
        )
    };
    let mut request = SendWr {
        opcode: Opcode::Send,
        flags: to_flags(wr.send_flags)?,
        wr_id: wr.wr_id,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        data: SendData::Sges(sges),
    };
    let mut set_remote = |opcode| {
        request.opcode = opcode;
        request.remote_addr = rdma.remote_addr;
        request.rkey = rdma.rkey;
    };
    match wr.opcode {
        IBV_WR_SEND => {}
        IBV_WR_RDMA_WRITE => set_remote(Opcode::Write),
        IBV_WR_RDMA_READ => set_remote(Opcode::Read),
        IBV_WR_RDMA_WRITE_WITH_IMM => {
            set_remote(Opcode::WriteWithImm);
            request.imm = imm_data;
        }
        IBV_WR_SEND_WITH_IMM => {
            request.opcode = Opcode::SendWithImm;
            request.imm = imm_data;
        }
        IBV_WR_SEND_WITH_INV => {
            request.opcode = Opcode::SendWithInv;
            request.imm = key;
        }
        // SAFETY: by the caller's contract.
        _ => return unsafe { push_special(posting, wr, request, sges) },
    }
    if wr.send_flags & IBV_SEND_INLINE != 0 && request.opcode != Opcode::Read {
        // SAFETY: by the caller's contract.
        return unsafe { push_inline(posting, &request, sges) };
    }
    posting.push(&request)
}

/// Pushes an atomic, or a request that changes keys of this side.
///
/// # Safety
/// The contract of ibv_post_send(3).
#[inline(never)]
unsafe fn push_special(
    posting: &mut SendPosting<'_>,
    wr: &ibv_send_wr,
    mut request: SendWr<'_>,
    sges: &[Sge],
) -> Result<(), Error> {
    match wr.opcode {
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
            // SAFETY: the field of atomics.
            let atomic = unsafe { wr.wr.atomic };
            let [sge] = sges else {
                return Err(Error::Invalid("an atomic takes one element of 8 bytes"));
            };
            let (opcode, operands) = if wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP {
                let operands = AtomicArgs::cmp_swap(atomic.compare_add, atomic.swap);
                (Opcode::CmpSwap, operands)
            } else {
                (Opcode::FetchAdd, AtomicArgs::fetch_add(atomic.compare_add))
            };
            request.opcode = opcode;
            request.remote_addr = atomic.remote_addr;
            request.rkey = atomic.rkey;
            request.data = SendData::Atomic(*sge, operands);
            posting.push(&request)
        }
        IBV_WR_LOCAL_INV => {
            request.opcode = Opcode::LocalInv;
            // SAFETY: the field of this opcode.
            request.imm = unsafe { wr.__bindgen_anon_1.invalidate_rkey };
            request.data = SendData::Sges(&[]);
            posting.push(&request)
        }
        IBV_WR_BIND_MW => {
            // SAFETY: the field of this opcode, with a window of this library.
            let (bind, window, binding) = unsafe {
                let bind = wr.__bindgen_anon_2.bind_mw;
                let binding = to_binding(&bind.bind_info);
                (bind, MwObject::from_abi(bind.mw), binding)
            };
            let bind_request = window.mw().bind_request(wr.wr_id, &binding, bind.rkey);
            posting.push(&bind_request.with_flags(request.flags))?;
            window.mw().on_bind_posted(bind.rkey);
            Ok(())
        }
        _ => Err(Error::Invalid("iWARP does not have this opcode")),
    }
}

/// Pushes one datagram of a list.
///
/// # Safety
/// The contract of ibv_post_send(3), with a queue pair of datagrams.
#[inline]
unsafe fn push_datagram(
    posting: &mut SendPosting<'_>,
    queue_pair: &QpObject,
    wr: &ibv_send_wr,
) -> Result<(), Error> {
    let mut room = Realigned::uninit();
    // SAFETY: by the caller's contract. `ud` is the valid field of the union.
    let (sges, ud, imm_data) = unsafe {
        (
            to_sges(wr.sg_list, wr.num_sge, &mut room)?,
            wr.wr.ud,
            wr.__bindgen_anon_1.imm_data,
        )
    };
    // SAFETY: by the caller's contract, NULL or an address handle of this library.
    let ah = unsafe { AhObject::number_for(ud.ah, queue_pair) }?;
    let (opcode, imm) = match wr.opcode {
        IBV_WR_SEND => (Opcode::Send, 0),
        IBV_WR_SEND_WITH_IMM => (Opcode::SendWithImm, u32::from_be(imm_data)),
        _ => return Err(Error::Invalid(DATAGRAM_OPCODES)),
    };
    let request = SendWr {
        opcode,
        imm,
        ..SendWr::send(wr.wr_id, SendData::Sges(sges)).with_flags(to_flags(wr.send_flags)?)
    };
    let request = request.with_destination(ah, ud.remote_qpn, ud.remote_qkey);
    if wr.send_flags & IBV_SEND_INLINE != 0 {
        // SAFETY: by the caller's contract.
        return unsafe { push_inline(posting, &request, sges) };
    }
    posting.push(&request)
}

/// Reason why any other request is refused.
pub(super) const DATAGRAM_OPCODES: &str =
    "a UD queue pair has SEND and SEND with immediate data only";

/// ibv_post_send(3)
pub unsafe fn post_send(
    qp: *mut ibv_qp,
    list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    let mut next = list;
    let mut posting = match queue_pair.qp().start_sending() {
        Ok(posting) => posting,
        Err(error) => {
            // SAFETY: a pointer to write.
            unsafe { bad.write(next) };
            return fail_with("ibv_post_send", &error);
        }
    };
    // SAFETY: a list that ends with NULL.
    while let Some(request) = unsafe { next.as_ref() } {
        // SAFETY: as the caller promised.
        let pushed = unsafe {
            match queue_pair.is_datagram() {
                false => push_request(&mut posting, request),
                true => push_datagram(&mut posting, queue_pair, request),
            }
        };
        if let Err(error) = pushed {
            drop(posting);
            // SAFETY: a pointer to write.
            unsafe { bad.write(next) };
            return fail_post("ibv_post_send", &error);
        }
        next = request.next;
    }
    0
}

/// Converts an error of posting. A full queue is not reported: programs post until they get ENOMEM.
#[cold]
fn fail_post(call: &str, error: &Error) -> c_int {
    match error {
        Error::QueueFull => fail_errno(libc::ENOMEM),
        _ => fail_with(call, error),
    }
}

/// Pushes a list of receive requests by `push`.
///
/// # Safety
/// The contract of ibv_post_recv(3).
#[inline]
unsafe fn push_receives(
    call: &str,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    mut push: impl FnMut(&RecvWr<'_>) -> Result<(), Error>,
) -> c_int {
    let mut next = list;
    // SAFETY: a list that ends with NULL.
    while let Some(request) = unsafe { next.as_ref() } {
        let mut room = Realigned::uninit();
        // SAFETY: by the caller's contract.
        let sges = unsafe { to_sges(request.sg_list, request.num_sge, &mut room) };
        let wr_id = request.wr_id;
        if let Err(error) = sges.and_then(|sges| push(&RecvWr { wr_id, sges })) {
            // SAFETY: a pointer to write.
            unsafe { bad.write(next) };
            return fail_post(call, &error);
        }
        next = request.next;
    }
    0
}

/// ibv_post_recv(3)
pub unsafe fn post_recv(
    qp: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    match unsafe { QpObject::from_abi(qp) }.qp().start_receiving() {
        // SAFETY: as the caller promised.
        Ok(mut posting) => unsafe {
            push_receives("ibv_post_recv", list, bad, |request| posting.push(request))
        },
        Err(error) => {
            // SAFETY: a pointer to write.
            unsafe { bad.write(list) };
            fail_with("ibv_post_recv", &error)
        }
    }
}

/// ibv_post_srq_recv(3)
pub unsafe fn post_srq_recv(
    srq: *mut ibv_srq,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a shared receive queue of this library.
    let mut posting = match unsafe { SrqObject::from_abi(srq) }.srq().start_receiving() {
        Ok(posting) => posting,
        Err(error) => {
            // SAFETY: a place to write.
            unsafe { *bad = list };
            return fail_with("ibv_post_srq_recv", &error);
        }
    };
    // SAFETY: as the caller promised.
    unsafe {
        push_receives("ibv_post_srq_recv", list, bad, |request| {
            posting.push(request)
        })
    }
}

/// ibv_bind_mw(3): type 1, under the next key.
pub unsafe fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: as the caller promised.
    let (queue_pair, window, bind) =
        unsafe { (QpObject::from_abi(qp), MwObject::from_abi(mw), &*bind) };
    if queue_pair.is_datagram() {
        return fail_with("ibv_bind_mw", &Error::Invalid(DATAGRAM_OPCODES));
    }
    // SAFETY: as above.
    if unsafe { (*mw).pd != (*qp).pd || (*mw).type_ != IBV_MW_TYPE_1 } {
        return fail_errno(libc::EPERM);
    }
    let flags = to_flags(bind.send_flags & !IBV_SEND_INLINE);
    let posted = flags.and_then(|flags| {
        // SAFETY: as above.
        let binding = unsafe { to_binding(&bind.bind_info) };
        let key = window
            .mw()
            .post_bind(queue_pair.qp(), bind.wr_id, flags, &binding)
            .map_err(|error| error.error)?;
        // SAFETY: the field is the library's to write, in calls that bind the window.
        unsafe { (*mw).rkey = key };
        Ok::<(), Error>(())
    });
    errno_of("ibv_bind_mw", posted)
}
