//! The bits of `device_cap_flags`, and the guarantees of atomics.

use super::abi::*;
use super::completions::*;
use super::memory::*;
use super::proof::{Proof, ensure_refused, ensure_that, proof_of};
use super::queue_pair::*;
use super::verbs::*;
use std::rc::Rc;

/// Checks whether the near device advertises the bit.
fn has_bit(bench: &Bench, bit: u32) -> Result<bool, String> {
    Ok(bench.near.query_device()?.device_cap_flags & bit != 0)
}

/// Bits tested by this program.
const PROVEN: u32 = IBV_DEVICE_SYS_IMAGE_GUID
    | IBV_DEVICE_SRQ_RESIZE
    | IBV_DEVICE_CURR_QP_STATE_MOD
    | IBV_DEVICE_MEM_WINDOW
    | IBV_DEVICE_MEM_WINDOW_TYPE_2B
    | IBV_DEVICE_MEM_MGT_EXTENSIONS;

/// Checks that neither query has a bit without a test.
pub fn no_other_bit(bench: &Bench) -> Result<Proof, String> {
    let flags = bench.near.query_device()?.device_cap_flags;
    ensure_that(
        flags & !PROVEN == 0,
        &format!("bits {:#x} have no test", flags & !PROVEN),
    )?;
    let extended = bench.near.extended_attributes()?;
    let is_same = extended.device_cap_flags_ex == u64::from(flags);
    ensure_that(is_same, "ibv_query_device_ex differs")?;
    proof_of(format!("{flags:#x} in both queries"))
}

/// Checks that there is a GUID, the same as from ibv_get_device_guid(3).
pub fn sys_image_guid(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_SYS_IMAGE_GUID)? {
        return Ok(Proof::NotAdvertised);
    }
    let attr = bench.near.query_device()?;
    ensure_that(attr.sys_image_guid != 0, "sys_image_guid is 0")?;
    let is_same = attr.node_guid == bench.near.guid;
    ensure_that(is_same, "ibv_get_device_guid differs")?;
    proof_of(format!("{:016x}", u64::from_be(attr.sys_image_guid)))
}

/// Checks that a queue with receives grows, and takes the stated number of requests.
pub fn srq_resize(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_SRQ_RESIZE)? {
        return Ok(Proof::NotAdvertised);
    }
    let srq = LibrarySrq::new(&LibraryPd::new(&bench.near)?, 16, 1)?;
    let before = srq.query_attributes()?.max_wr;
    let wanted = before * 4;
    srq.modify_attributes(wanted, 0, IBV_SRQ_MAX_WR)?;
    let after = srq.query_attributes()?.max_wr;
    ensure_that(after >= wanted, "ibv_query_srq differs")?;
    for _ in 0..after {
        srq.post_receive(&[])?;
    }
    proof_of(format!("{before} to {after}, all posted"))
}

/// Checks ibv_modify_qp(3) with the program's view of the current state.
pub fn current_state(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_CURR_QP_STATE_MOD)? {
        return Ok(Proof::NotAdvertised);
    }
    let (near, _far) = connect_ends(bench)?;
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_SQD;
    attr.cur_qp_state = IBV_QPS_INIT;
    attr.en_sqd_async_notify = 1;
    let mask = IBV_QP_STATE | IBV_QP_CUR_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY;
    ensure_refused(
        near.qp.modify_attributes(&mut attr, mask),
        "a wrong current state",
    )?;
    attr.cur_qp_state = IBV_QPS_RTS;
    near.qp.modify_attributes(&mut attr, mask)?;
    bench.near.await_event(IBV_EVENT_SQ_DRAINED)?;
    proof_of("refused if wrong, accepted if right")
}

/// Binding of the first `length` bytes of a region.
fn bind_info(mr: &LibraryMr, length: u64) -> ibv_mw_bind_info {
    ibv_mw_bind_info {
        mr: mr.raw,
        addr: mr.addr(),
        length,
        mw_access_flags: IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    }
}

/// Calls ibv_bind_mw(3) and waits for its completion.
fn bind_type_1(end: &End, mw: &LibraryMw, length: u64) -> Result<(), String> {
    // SAFETY: objects of the library, and a struct to read.
    unsafe {
        let mut bind = ibv_mw_bind {
            wr_id: 0,
            send_flags: IBV_SEND_SIGNALED,
            bind_info: bind_info(&end.mr, length),
        };
        let bind_mw = table_slot((*end.qp.pd.context.raw).ops.bind_mw)?;
        check_status("ibv_bind_mw", bind_mw(end.qp.raw, mw.raw, &raw mut bind))?;
    }
    let is_bind = end.cq().await_success()?.opcode == IBV_WC_BIND_MW;
    ensure_that(is_bind, "its completion has another opcode")
}

fn write_by(near: &End, far: &End, rkey: u32, offset: u64) -> Result<(), String> {
    let remote = Remote {
        addr: far.mr.addr() + offset,
        rkey,
    };
    let sges = [near.mr.sge(0, 64)];
    near.qp.post_remote(IBV_WR_RDMA_WRITE, &sges, remote)
}

/// Checks a window of type 1: bound, used, unbound.
pub fn memory_window(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_MEM_WINDOW)? {
        return Ok(Proof::NotAdvertised);
    }
    let (near, far) = connect_ends(bench)?;
    let mw = LibraryMw::new(&far.qp.pd, IBV_MW_TYPE_1)?;
    let old = mw.rkey();
    bind_type_1(&far, &mw, 4096)?;
    ensure_that(mw.rkey() != old, "the key has not changed")?;
    write_by(&near, &far, mw.rkey(), 0)?;
    near.cq().await_success()?;
    far.mr.has_pattern(1, 8)?;
    // Unbound, it gives no access.
    let shown = mw.rkey();
    bind_type_1(&far, &mw, 0)?;
    write_by(&near, &far, shown, 0)?;
    near.cq().fail_with(IBV_WC_REM_ACCESS_ERR)?;
    proof_of("bound, written through, unbound, refused")
}

/// Posts a work request that binds a window of type 2, and waits for its completion.
fn bind_type_2(end: &End, mw: &LibraryMw) -> Result<u32, String> {
    let old = mw.rkey();
    let key = old & !0xff | (old + 1) & 0xff;
    let mut posted = signaled_request(IBV_WR_BIND_MW, &[]);
    posted.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        mw: mw.raw,
        rkey: key,
        bind_info: bind_info(&end.mr, 4096),
    };
    end.qp.post_request(&mut posted)?;
    end.cq().await_success()?;
    Ok(key)
}

fn post_invalidation(end: &End, opcode: ibv_wr_opcode, key: u32) -> Result<(), String> {
    let mut posted = signaled_request(opcode, &[]);
    posted.__bindgen_anon_1.invalidate_rkey = key;
    end.qp.post_request(&mut posted)?;
    end.cq().await_success().map(|_| ())
}

/// Checks a window of type 2B: valid for one stream, until it is invalidated.
pub fn window_of_one_stream(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_MEM_WINDOW_TYPE_2B)? {
        return Ok(Proof::NotAdvertised);
    }
    let (near, far) = connect_ends(bench)?;
    // Another stream of the same protection domain.
    let other_far = End::with_queue(&far.qp.pd, &far.qp.cq, None, CAP)?;
    let other_near = End::new(&bench.near, CAP)?;
    connect_qps(&other_near.qp, &other_far.qp, DEPTH)?;
    let mw = LibraryMw::new(&far.qp.pd, IBV_MW_TYPE_2)?;
    let key = bind_type_2(&far, &mw)?;
    write_by(&near, &far, key, 0)?;
    near.cq().await_success()?;
    far.mr.has_pattern(1, 8)?;
    write_by(&other_near, &far, key, 0)?;
    other_near.cq().fail_with(IBV_WC_REM_ACCESS_ERR)?;
    post_invalidation(&far, IBV_WR_LOCAL_INV, key)?;
    write_by(&near, &far, key, 0)?;
    near.cq().fail_with(IBV_WC_REM_ACCESS_ERR)?;
    proof_of("access by one stream, not by another; none after LOCAL_INV")
}

/// Checks a message that invalidates a key.
pub fn memory_management(bench: &Bench) -> Result<Proof, String> {
    if !has_bit(bench, IBV_DEVICE_MEM_MGT_EXTENSIONS)? {
        return Ok(Proof::NotAdvertised);
    }
    let (near, far) = connect_ends(bench)?;
    let mw = LibraryMw::new(&far.qp.pd, IBV_MW_TYPE_2)?;
    let key = bind_type_2(&far, &mw)?;
    far.qp.post_receive(&[far.mr.sge(0, 64)])?;
    post_invalidation(&near, IBV_WR_SEND_WITH_INV, key)?;
    let received = far.cq().await_success()?;
    ensure_that(
        received.wc_flags & IBV_WC_WITH_INV != 0,
        "IBV_WC_WITH_INV is not set",
    )?;
    // SAFETY: both fields of the union are numbers.
    let invalidated = unsafe { received.__bindgen_anon_1.invalidated_rkey };
    ensure_that(invalidated == key, "the completion names another key")?;
    write_by(&near, &far, key, 0)?;
    near.cq().fail_with(IBV_WC_REM_ACCESS_ERR)?;
    proof_of(
        "SEND_WITH_INV; LOCAL_INV under MEM_WINDOW_TYPE_2B; no fast registration in libibverbs",
    )
}

/// Number of additions per stream, and by this processor.
const ADDITIONS: u64 = 2000;

/// Checks that atomics exclude each other and, with GLOB, also those of the processor.
pub fn check_atomics(bench: &Bench) -> Result<Proof, String> {
    let capability = bench.near.query_device()?.atomic_cap;
    if capability == IBV_ATOMIC_NONE {
        return Ok(Proof::NotAdvertised);
    }
    let (near, far) = connect_ends(bench)?;
    let remote = far.mr.as_remote();
    let sges = [near.mr.sge(64, 8)];
    far.mr.set_word(0, 5);
    for (swap, found) in [(6, 5), (7, 6)] {
        let operands = (found, swap);
        near.qp.post_request(&mut atomic_request(
            IBV_WR_ATOMIC_CMP_AND_SWP,
            &sges,
            remote,
            operands,
        ))?;
        near.cq().await_success()?;
        ensure_that(near.mr.word(8) == found, "CmpSwap returns a wrong value")?;
    }
    ensure_that(far.mr.word(0) == 7, "CmpSwap did not swap")?;
    let mut unequal = atomic_request(IBV_WR_ATOMIC_CMP_AND_SWP, &sges, remote, (1, 9));
    near.qp.post_request(&mut unequal)?;
    near.cq().await_success()?;
    ensure_that(far.mr.word(0) == 7, "CmpSwap swapped an unequal value")?;

    let other = second_stream(bench, &far)?;
    far.mr.set_word(0, 0);
    let mut local = 0;
    for _ in 0..ADDITIONS {
        for end in [&near, &other.0] {
            let sges = [end.mr.sge(64, 8)];
            let mut add = atomic_request(IBV_WR_ATOMIC_FETCH_AND_ADD, &sges, remote, (1, 0));
            end.qp.post_request(&mut add)?;
        }
        if capability == IBV_ATOMIC_GLOB {
            far.mr.add_to_word(0, 1);
            local += 1;
        }
        near.cq().await_success()?;
        other.0.cq().await_success()?;
    }
    let sum = far.mr.word(0);
    let expected = 2 * ADDITIONS + local;
    ensure_that(sum == expected, &format!("{sum} of {expected} additions"))?;
    let what = "CmpSwap; FetchAdd of two streams";
    proof_of(match capability {
        IBV_ATOMIC_GLOB => format!("{what} and the processor, {sum} additions (GLOB)"),
        _ => format!("{what}, {sum} additions (HCA)"),
    })
}

/// Connects another stream to the same protection domain.
fn second_stream(bench: &Bench, far: &End) -> Result<(End, End), String> {
    let pd: &Rc<LibraryPd> = &far.qp.pd;
    let near = End::new(&bench.near, CAP)?;
    let other = End::with_queue(pd, &far.qp.cq, None, CAP)?;
    connect_qps(&near.qp, &other.qp, DEPTH)?;
    Ok((near, other))
}
