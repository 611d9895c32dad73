//! Work requests built by calls (ibv_wr_post(3)): `ibv_wr_start`, one call for each request and its
//! data, `ibv_wr_complete`. The requests are kept until then, so that they can be aborted.

use super::address_vector::AhObject;
use super::mw::{MwObject, to_binding};
use super::post::DATAGRAM_OPCODES;
use super::qp::QpObject;
use super::send_flags::to_flags;
use crate::abi::*;
use siw::{AtomicArgs, BracketLock, Error, Opcode, SendData, SendPosting, SendWr, Sge};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

/// The requests since `ibv_wr_start`. They belong to one thread until `ibv_wr_complete` or
/// `ibv_wr_abort`.
#[derive(Default)]
pub struct Batch {
    lock: BracketLock,
    building: UnsafeCell<Building>,
}

// SAFETY: only the thread that has the lock accesses the requests.
unsafe impl Sync for Batch {}
// SAFETY: the window in a request may be used from any thread.
unsafe impl Send for Batch {}

/// Requests being built, with their data. The lists keep their capacity across batches.
#[derive(Default)]
struct Building {
    requests: Vec<BuiltRequest>,
    sges: Vec<Sge>,
    inline_data: Vec<u8>,
    error: Option<Error>,
}

struct BuiltRequest {
    request: SendWr<'static>,
    data: BuiltData,
    window: Option<(*mut ibv_mw, u32)>,
    /// A datagram with its destination, or any other request.
    has_destination: bool,
}

/// Data of a request: ranges in the lists of [`Building`], or operands. `AsItIs` leaves the data
/// that the request was built with.
enum BuiltData {
    None,
    Sges(usize, usize),
    Inline(usize, usize),
    Atomic(AtomicArgs),
    AtomicWithSge(Sge, AtomicArgs),
    AsItIs,
}

impl Building {
    fn begin(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline_data.clear();
        self.error = None;
    }

    fn push_request(&mut self, request: SendWr<'static>, data: BuiltData, has_destination: bool) {
        self.requests.push(BuiltRequest {
            request,
            data,
            window: None,
            has_destination,
        });
    }

    /// Sets the data of the last request.
    fn set_data(&mut self, data: BuiltData) {
        let Some(last) = self.requests.last_mut() else {
            self.error = Some(Error::Invalid("data without a work request"));
            return;
        };
        last.data = match (&last.data, data) {
            (BuiltData::Atomic(operands), BuiltData::Sges(from, to)) if to - from == 1 => {
                BuiltData::AtomicWithSge(self.sges[from], *operands)
            }
            (BuiltData::None | BuiltData::Sges(..) | BuiltData::Inline(..), data) => data,
            _ => {
                self.error = Some(Error::Invalid(
                    "this work request does not take this kind of data",
                ));
                return;
            }
        };
    }

    /// Sets the destination of the last request.
    fn set_destination(&mut self, ah: u32, qpn: u32, qkey: u32) {
        let Some(last) = self.requests.last_mut() else {
            self.error = Some(Error::Invalid("an address without a work request"));
            return;
        };
        last.request = last.request.with_destination(ah, qpn, qkey);
        last.has_destination = true;
    }

    fn post_all(&self, posting: &mut SendPosting<'_>) -> Result<(), Error> {
        for built in &self.requests {
            if !built.has_destination {
                return Err(Error::Invalid(
                    "a datagram needs a destination (ibv_wr_set_ud_addr(3))",
                ));
            }
            let data = match built.data {
                BuiltData::None => SendData::Sges(&[]),
                BuiltData::Sges(from, to) => SendData::Sges(&self.sges[from..to]),
                BuiltData::Inline(from, to) => SendData::Inline(&self.inline_data[from..to]),
                BuiltData::AtomicWithSge(sge, operands) => SendData::Atomic(sge, operands),
                BuiltData::AsItIs => built.request.data,
                BuiltData::Atomic(_) => {
                    return Err(Error::Invalid("an atomic takes one element of 8 bytes"));
                }
            };
            posting.push(&SendWr {
                data,
                ..built.request
            })?;
        }
        Ok(())
    }

    /// Stores the keys that the posted requests bind in their windows.
    fn note_binds(&self) {
        for (window, key) in self.requests.iter().filter_map(|built| built.window) {
            // SAFETY: a window of this library, by ibv_wr_post(3).
            unsafe { MwObject::from_abi(window) }
                .mw()
                .on_bind_posted(key);
        }
    }
}

/// Functions in the struct of a queue pair.
pub(super) mod slots {
    use crate::abi::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp_ex, ibv_sge};
    use std::ffi::{c_int, c_void};

    crate::export::fast_functions! {
        pub fn start(qp: *mut ibv_qp_ex) = super::start;
        pub fn complete(qp: *mut ibv_qp_ex) -> c_int = super::complete;
        pub fn abort(qp: *mut ibv_qp_ex) = super::abort;
        pub fn send(qp: *mut ibv_qp_ex) = super::send;
        pub fn send_imm(qp: *mut ibv_qp_ex, imm_data: u32) = super::send_imm;
        pub fn send_inv(qp: *mut ibv_qp_ex, key: u32) = super::send_inv;
        pub fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) = super::rdma_write;
        pub fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32)
            = super::rdma_write_imm;
        pub fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) = super::rdma_read;
        pub fn atomic_cmp_swp(
            qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, compare: u64, swap: u64,
        ) = super::atomic_cmp_swp;
        pub fn atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64)
            = super::atomic_fetch_add;
        pub fn local_inv(qp: *mut ibv_qp_ex, key: u32) = super::local_inv;
        pub fn bind_mw(
            qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info,
        ) = super::bind_mw;
        pub fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32)
            = super::set_ud_addr;
        pub fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) = super::set_sge;
        pub fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge)
            = super::set_sge_list;
        pub fn set_inline_data(qp: *mut ibv_qp_ex, address: *mut c_void, length: usize)
            = super::set_inline_data;
        pub fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf)
            = super::set_inline_data_list;
    }
}

/// Fills in the functions of a queue pair. Those of other transports stay empty: ibv_create_qp_ex
/// refuses their send operations.
pub(super) fn fill_extended(abi: &mut ibv_qp_ex, is_datagram: bool) {
    if is_datagram {
        abi.wr_set_ud_addr = Some(slots::set_ud_addr);
    }
    abi.wr_start = Some(slots::start);
    abi.wr_complete = Some(slots::complete);
    abi.wr_abort = Some(slots::abort);
    abi.wr_send = Some(slots::send);
    abi.wr_send_imm = Some(slots::send_imm);
    abi.wr_send_inv = Some(slots::send_inv);
    abi.wr_rdma_write = Some(slots::rdma_write);
    abi.wr_rdma_write_imm = Some(slots::rdma_write_imm);
    abi.wr_rdma_read = Some(slots::rdma_read);
    abi.wr_atomic_cmp_swp = Some(slots::atomic_cmp_swp);
    abi.wr_atomic_fetch_add = Some(slots::atomic_fetch_add);
    abi.wr_local_inv = Some(slots::local_inv);
    abi.wr_bind_mw = Some(slots::bind_mw);
    abi.wr_set_sge = Some(slots::set_sge);
    abi.wr_set_sge_list = Some(slots::set_sge_list);
    abi.wr_set_inline_data = Some(slots::set_inline_data);
    abi.wr_set_inline_data_list = Some(slots::set_inline_data_list);
}

/// # Safety
/// A queue pair of this library.
unsafe fn object_of<'a>(qp: *mut ibv_qp_ex) -> &'a QpObject {
    // SAFETY: by the caller's contract; `struct ibv_qp` is the first field.
    unsafe { QpObject::from_abi(qp.cast()) }
}

/// Returns the requests being built.
///
/// # Safety
/// Called between `ibv_wr_start` and its end, with one reference at a time.
unsafe fn building<'a>(qp: *mut ibv_qp_ex) -> &'a mut Building {
    // SAFETY: by the caller's contract.
    let batch = unsafe { &object_of(qp).batch };
    // In a child of fork(2) the requests may be half changed by another thread of the parent.
    batch.lock.check_or_end_call();
    // SAFETY: by the caller's contract, this thread has the lock.
    unsafe { &mut *batch.building.get() }
}

/// Begins a request with the flags and the id that the program has written into the struct.
///
/// # Safety
/// As [`building`].
unsafe fn begin_request(qp: *mut ibv_qp_ex, opcode: Opcode, imm: u32, data: BuiltData) {
    // SAFETY: by the caller's contract.
    let (building, wr_id, flags, is_datagram) = unsafe {
        (
            building(qp),
            (*qp).wr_id,
            (*qp).wr_flags,
            object_of(qp).is_datagram(),
        )
    };
    let is_refused = is_datagram && !matches!(opcode, Opcode::Send | Opcode::SendWithImm);
    match to_flags(flags) {
        Ok(_) if is_refused => building.error = Some(Error::Invalid(DATAGRAM_OPCODES)),
        Ok(flags) => {
            let request = SendWr {
                opcode,
                imm,
                ..SendWr::send(wr_id, SendData::Sges(&[])).with_flags(flags)
            };
            building.push_request(request, data, !is_datagram);
        }
        Err(error) => building.error = Some(error),
    }
}

/// As [`begin_request`], with memory of the peer.
///
/// # Safety
/// As [`building`].
unsafe fn begin_remote(
    qp: *mut ibv_qp_ex,
    opcode: Opcode,
    imm: u32,
    (rkey, remote_addr): (u32, u64),
    data: BuiltData,
) {
    // SAFETY: by the caller's contract.
    let building = unsafe {
        begin_request(qp, opcode, imm, data);
        building(qp)
    };
    if let Some(last) = building.requests.last_mut() {
        last.request.rkey = rkey;
        last.request.remote_addr = remote_addr;
    }
}

unsafe fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: by the contract of ibv_wr_post(3), as in all functions below.
    unsafe {
        object_of(qp).batch.lock.lock_or_end_call();
        building(qp).begin();
    }
}

unsafe fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as in `start`.
    let (object, building) = unsafe { (object_of(qp), building(qp)) };
    let posted = match building.error.take() {
        Some(error) => Err(error),
        // All requests are posted, or none.
        None => object.qp().start_sending().and_then(|mut posting| {
            posting.push_all_or_none(|posting| building.post_all(posting))?;
            building.note_binds();
            Ok(())
        }),
    };
    object.batch.lock.unlock();
    crate::status::errno_of("ibv_wr_complete", posted)
}

unsafe fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as in `start`.
    unsafe { object_of(qp) }.batch.lock.unlock();
}

unsafe fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: as in `start`.
    unsafe { begin_request(qp, Opcode::Send, 0, BuiltData::None) };
}

unsafe fn send_imm(qp: *mut ibv_qp_ex, imm_data: u32) {
    let imm = u32::from_be(imm_data);
    // SAFETY: as in `start`.
    unsafe { begin_request(qp, Opcode::SendWithImm, imm, BuiltData::None) };
}

unsafe fn send_inv(qp: *mut ibv_qp_ex, key: u32) {
    // SAFETY: as in `start`.
    unsafe { begin_request(qp, Opcode::SendWithInv, key, BuiltData::None) };
}

unsafe fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: as in `start`.
    unsafe { begin_remote(qp, Opcode::Write, 0, (rkey, remote_addr), BuiltData::None) };
}

unsafe fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32) {
    let (imm, remote) = (u32::from_be(imm_data), (rkey, remote_addr));
    // SAFETY: as in `start`.
    unsafe { begin_remote(qp, Opcode::WriteWithImm, imm, remote, BuiltData::None) };
}

unsafe fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: as in `start`.
    unsafe { begin_remote(qp, Opcode::Read, 0, (rkey, remote_addr), BuiltData::None) };
}

unsafe fn atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, compare: u64, swap: u64) {
    let operands = BuiltData::Atomic(AtomicArgs::cmp_swap(compare, swap));
    // SAFETY: as in `start`.
    unsafe { begin_remote(qp, Opcode::CmpSwap, 0, (rkey, remote_addr), operands) };
}

unsafe fn atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64) {
    let operands = BuiltData::Atomic(AtomicArgs::fetch_add(add));
    // SAFETY: as in `start`.
    unsafe { begin_remote(qp, Opcode::FetchAdd, 0, (rkey, remote_addr), operands) };
}

unsafe fn local_inv(qp: *mut ibv_qp_ex, key: u32) {
    // SAFETY: as in `start`.
    unsafe { begin_request(qp, Opcode::LocalInv, key, BuiltData::AsItIs) };
}

unsafe fn bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: as in `start`, with a window of this library.
    unsafe {
        begin_request(qp, Opcode::BindMw, 0, BuiltData::AsItIs);
        let window = MwObject::from_abi(mw);
        if let Some(last) = building(qp).requests.last_mut() {
            let (wr_id, flags) = (last.request.wr_id, last.request.flags);
            let bind = window.mw().bind_request(wr_id, &to_binding(&*info), rkey);
            last.request = bind.with_flags(flags);
            last.window = Some((mw, rkey));
        }
    }
}

unsafe fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: as in `start`, with NULL or an address handle of this library.
    unsafe {
        match AhObject::number_for(ah, object_of(qp)) {
            Ok(ah) => building(qp).set_destination(ah, remote_qpn, remote_qkey),
            Err(error) => building(qp).error = Some(error),
        }
    }
}

unsafe fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: as in `start`.
    let building = unsafe { building(qp) };
    let from = building.sges.len();
    building.sges.push(Sge { addr, length, lkey });
    building.set_data(BuiltData::Sges(from, from + 1));
}

unsafe fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: as in `start`; the layouts are the same (post.rs).
    let building = unsafe { building(qp) };
    let from = building.sges.len();
    // SAFETY: as above, with `count` elements, wherever they are.
    let elements = (0..count).map(|n| unsafe { list.cast::<Sge>().add(n).read_unaligned() });
    building.sges.extend(elements);
    building.set_data(BuiltData::Sges(from, from + count));
}

/// # Safety
/// As [`building`], with readable memory.
unsafe fn copy_inline(building: &mut Building, address: *const c_void, length: usize) {
    if length > 0 {
        // SAFETY: by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) };
        building.inline_data.extend_from_slice(bytes);
    }
}

unsafe fn set_inline_data(qp: *mut ibv_qp_ex, address: *mut c_void, length: usize) {
    // SAFETY: as in `start`.
    let building = unsafe { building(qp) };
    let from = building.inline_data.len();
    // SAFETY: as above.
    unsafe { copy_inline(building, address, length) };
    building.set_data(BuiltData::Inline(from, from + length));
}

unsafe fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: as in `start`.
    let building = unsafe { building(qp) };
    let from = building.inline_data.len();
    for i in 0..count {
        // SAFETY: as above, with `count` elements.
        unsafe {
            let part = &*list.add(i);
            copy_inline(building, part.addr, part.length);
        }
    }
    building.set_data(BuiltData::Inline(from, building.inline_data.len()));
}
