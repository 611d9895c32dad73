//! All operations of siwd's queue pairs, and their events.

use super::abi::*;
use super::completions::*;
use super::memory::*;
use super::proof::{Proof, ensure_that, proof_of};
use super::queue_pair::*;
use super::verbs::*;
use std::ffi::c_int;

/// Length of a message, in words and bytes.
const COUNT: usize = 512;
const LENGTH: usize = COUNT * 8;
/// Immediate data to send.
const IMMEDIATE: u32 = 0x1234_5678;

/// Checks SEND, with and without immediate data.
pub fn check_send(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    for opcode in [IBV_WR_SEND, IBV_WR_SEND_WITH_IMM] {
        near.mr.fill_pattern(u64::from(opcode) + 10);
        far.qp.post_receive(&[far.mr.sge(0, LENGTH)])?;
        let sges = [near.mr.sge(0, LENGTH)];
        let mut posted = signaled_request(opcode, &sges);
        posted.__bindgen_anon_1.imm_data = IMMEDIATE.to_be();
        near.qp.post_request(&mut posted)?;
        near.cq().await_success()?;
        let received = far.cq().await_success()?;
        ensure_that(received.opcode == IBV_WC_RECV, "no receive completed")?;
        ensure_that(received.byte_len as usize == LENGTH, "its length is wrong")?;
        check_immediate(&received, opcode == IBV_WR_SEND_WITH_IMM)?;
        far.mr.has_pattern(u64::from(opcode) + 10, COUNT)?;
    }
    proof_of(format!("{LENGTH} bytes each, immediate data"))
}

fn check_immediate(received: &ibv_wc, is_expected: bool) -> Result<(), String> {
    let has_it = received.wc_flags & IBV_WC_WITH_IMM != 0;
    ensure_that(has_it == is_expected, "IBV_WC_WITH_IMM is wrong")?;
    // SAFETY: both fields of the union are numbers.
    let data = u32::from_be(unsafe { received.__bindgen_anon_1.imm_data });
    ensure_that(!has_it || data == IMMEDIATE, "immediate data is wrong")
}

/// Checks RDMA WRITE, with and without immediate data.
pub fn check_write(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    let sges = [near.mr.sge(0, LENGTH)];
    near.mr.fill_pattern(20);
    near.qp
        .post_remote(IBV_WR_RDMA_WRITE, &sges, far.mr.as_remote())?;
    near.cq().await_success()?;
    near.mr.fill_pattern(21);
    far.qp.post_receive(&[])?;
    let mut posted = remote_request(IBV_WR_RDMA_WRITE_WITH_IMM, &sges, far.mr.as_remote());
    posted.__bindgen_anon_1.imm_data = IMMEDIATE.to_be();
    near.qp.post_request(&mut posted)?;
    near.cq().await_success()?;
    let received = far.cq().await_success()?;
    let is_right = received.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    ensure_that(is_right, "the receive has the wrong opcode")?;
    check_immediate(&received, true)?;
    far.mr.has_pattern(21, COUNT)?;
    proof_of("with and without immediate data")
}

/// Checks RDMA READ.
pub fn check_read(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    far.mr.fill_pattern(30);
    let sges = [near.mr.sge(0, LENGTH)];
    near.qp
        .post_remote(IBV_WR_RDMA_READ, &sges, far.mr.as_remote())?;
    ensure_that(
        near.cq().await_success()?.opcode == IBV_WC_RDMA_READ,
        "its opcode is wrong",
    )?;
    near.mr.has_pattern(30, COUNT)?;
    proof_of(format!("{LENGTH} bytes"))
}

/// Checks that access denied to the peer fails at both ends.
pub fn access_rights(bench: &Bench) -> Result<Proof, String> {
    for (opcode, access) in [
        (IBV_WR_RDMA_WRITE, ALL_ACCESS & !IBV_ACCESS_REMOTE_WRITE),
        (IBV_WR_RDMA_READ, ALL_ACCESS & !IBV_ACCESS_REMOTE_READ),
    ] {
        let (near, far) = connect_ends(bench)?;
        let closed = LibraryMr::new(&far.qp.pd, WORDS, access)?;
        closed.fill_pattern(40);
        near.qp
            .post_remote(opcode, &[near.mr.sge(0, 64)], closed.as_remote())?;
        near.cq().fail_with(IBV_WC_REM_ACCESS_ERR)?;
        closed.has_pattern(40, WORDS)?;
    }
    proof_of("WRITE and READ without the access right end with REM_ACCESS_ERR")
}

/// Checks the functions of an extended queue pair (ibv_wr_post(3)), and of an extended completion
/// queue.
pub fn extended_interface(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.near)?;
    let cq = LibraryCq::new(&bench.near, 64, None)?;
    let near = End {
        qp: LibraryQp::new_extended(&pd, &cq, IBV_QP_EX_WITH_RDMA_WRITE)?,
        mr: LibraryMr::new(&pd, WORDS, ALL_ACCESS)?,
    };
    let far = End::new(&bench.far, CAP)?;
    connect_qps(&near.qp, &far.qp, DEPTH)?;
    near.mr.fill_pattern(50);
    // SAFETY: a connected queue pair, memory of its own region; functions of the library.
    unsafe {
        let extended = (verbs().ibv_qp_to_qp_ex)(near.qp.raw);
        ensure_that(!extended.is_null(), "ibv_qp_to_qp_ex returned NULL")?;
        let ops = &*extended;
        table_slot(ops.wr_start)?(extended);
        (*extended).wr_id = 7;
        (*extended).wr_flags = IBV_SEND_SIGNALED;
        table_slot(ops.wr_rdma_write)?(extended, far.mr.rkey(), far.mr.addr());
        table_slot(ops.wr_set_sge)?(extended, near.mr.lkey(), near.mr.addr(), LENGTH as u32);
        check_status("ibv_wr_complete", table_slot(ops.wr_complete)?(extended))?;
    }
    ensure_that(
        near.cq().await_success()?.wr_id == 7,
        "another request completed",
    )?;
    far.mr.has_pattern(50, COUNT)?;

    near.qp
        .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, 8)], far.mr.as_remote())?;
    let deadline = std::time::Instant::now() + PATIENCE;
    let queue: *mut ibv_cq_ex = near.cq().raw.cast();
    // SAFETY: a completion queue of the library can be used as an extended one.
    unsafe {
        let ops = &*queue;
        let mut attr: ibv_poll_cq_attr = zeroed();
        while table_slot(ops.start_poll)?(queue, &raw mut attr) != 0 {
            let is_late = std::time::Instant::now() > deadline;
            ensure_that(!is_late, "ibv_start_poll finds no completion")?;
        }
        let (status, opcode) = ((*queue).status, table_slot(ops.read_opcode)?(queue));
        table_slot(ops.end_poll)?(queue);
        let is_right = status == IBV_WC_SUCCESS && opcode == IBV_WC_RDMA_WRITE;
        ensure_that(is_right, "the extended completion is wrong")?;
    }
    proof_of("ibv_wr_start to ibv_wr_complete; ibv_start_poll, ibv_end_poll")
}

/// Checks completion channels: an event for the next completion, or the next solicited one.
pub fn completion_events(bench: &Bench) -> Result<Proof, String> {
    let near = End::new(&bench.near, CAP)?;
    let pd = LibraryPd::new(&bench.far)?;
    let channel = LibraryChannel::new(&bench.far)?;
    let cq = LibraryCq::new(&bench.far, 64, Some(&channel))?;
    let far = End::with_queue(&pd, &cq, None, CAP)?;
    connect_qps(&near.qp, &far.qp, DEPTH)?;
    for is_solicited in [false, true] {
        for _ in 0..2 {
            far.qp.post_receive(&[far.mr.sge(0, 64)])?;
        }
        cq.request_event(is_solicited)?;
        let sges = [near.mr.sge(0, 8)];
        if is_solicited {
            near.qp.post_plain(IBV_WR_SEND, &sges)?;
            near.cq().await_success()?;
            cq.await_success()?;
            ensure_that(!channel.has_event(), "an event without arming")?;
        }
        let mut posted = signaled_request(IBV_WR_SEND, &sges);
        posted.send_flags |= IBV_SEND_SOLICITED;
        near.qp.post_request(&mut posted)?;
        channel.take_event()?;
        near.cq().await_success()?;
        cq.await_success()?;
    }
    proof_of("for any completion, for solicited ones only")
}

/// Checks the states of a queue pair, and the fate of its requests.
pub fn check_states(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    ensure_that(
        near.qp.query_attributes()?.qp_state == IBV_QPS_RTS,
        "it is not in RTS",
    )?;
    near.qp.drain_with_event()?;
    bench.near.await_event(IBV_EVENT_SQ_DRAINED)?;
    near.qp.go_to(IBV_QPS_RTS)?;
    near.qp.post_receive(&[near.mr.sge(0, 64)])?;
    near.qp.go_to(IBV_QPS_ERR)?;
    near.cq().fail_with(IBV_WC_WR_FLUSH_ERR)?;
    ensure_that(
        near.qp.query_attributes()?.qp_state == IBV_QPS_ERR,
        "it is not in ERR",
    )?;
    near.qp.go_to(IBV_QPS_RESET)?;
    far.qp.go_to(IBV_QPS_RESET)?;
    connect_qps(&near.qp, &far.qp, DEPTH)?;
    near.qp
        .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, 64)], far.mr.as_remote())?;
    near.cq().await_success()?;
    proof_of("RESET to RTS, SQD with its event, ERR with flushed requests, and again")
}

/// Checks a shared receive queue for two queue pairs, with its events.
pub fn shared_receives(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.far)?;
    let cq = LibraryCq::new(&bench.far, 64, None)?;
    let srq = LibrarySrq::new(&pd, 16, 1)?;
    let ends = [(); 2].map(|()| {
        let near = End::new(&bench.near, CAP)?;
        let far = End::with_queue(&pd, &cq, Some(&srq), CAP)?;
        connect_qps(&near.qp, &far.qp, DEPTH)?;
        Ok::<_, String>((near, far))
    });
    let [first, second] = ends;
    let ends = [first?, second?];
    for _ in 0..4 {
        srq.post_receive(&[ends[0].1.mr.sge(0, 64)])?;
    }
    srq.modify_attributes(0, 4, IBV_SRQ_LIMIT)?;
    for (near, _) in &ends {
        near.qp.post_plain(IBV_WR_SEND, &[near.mr.sge(0, 8)])?;
        near.cq().await_success()?;
        cq.await_success()?;
    }
    bench.far.await_event(IBV_EVENT_SRQ_LIMIT_REACHED)?;
    ends[0].1.qp.go_to(IBV_QPS_ERR)?;
    bench.far.await_event(IBV_EVENT_QP_LAST_WQE_REACHED)?;
    proof_of("two queue pairs; SRQ_LIMIT_REACHED, QP_LAST_WQE_REACHED")
}

/// Checks registration: other access rights by ibv_rereg_mr(3), other addresses by
/// ibv_reg_mr_iova(3).
pub fn check_registration(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    let region = LibraryMr::new(&far.qp.pd, WORDS, IBV_ACCESS_LOCAL_WRITE)?;
    // SAFETY: a region of the library.
    let status = unsafe {
        let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
        let pd = far.qp.pd.raw;
        let access = ALL_ACCESS as c_int;
        (verbs().ibv_rereg_mr)(region.raw, flags, pd, std::ptr::null_mut(), 0, access)
    };
    check_status("ibv_rereg_mr", status)?;
    near.mr.fill_pattern(60);
    near.qp.post_remote(
        IBV_WR_RDMA_WRITE,
        &[near.mr.sge(0, LENGTH)],
        region.as_remote(),
    )?;
    near.cq().await_success()?;
    region.has_pattern(60, COUNT)?;
    const IOVA: u64 = 0x10_0000;
    let place = region.addr() as *mut std::ffi::c_void;
    // SAFETY: the memory lives longer than the region, which ends before it.
    unsafe {
        let raw = (verbs().ibv_reg_mr_iova2)(far.qp.pd.raw, place, LENGTH, IOVA, ALL_ACCESS);
        ensure_that(!raw.is_null(), "ibv_reg_mr_iova fails")?;
        near.mr.fill_pattern(61);
        let remote = Remote {
            addr: IOVA,
            rkey: (*raw).rkey,
        };
        let written = near
            .qp
            .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, LENGTH)], remote)
            .and_then(|()| near.cq().await_success());
        check_status("ibv_dereg_mr", (verbs().ibv_dereg_mr)(raw))?;
        written?;
    }
    region.has_pattern(61, COUNT)?;
    proof_of("ibv_rereg_mr, ibv_reg_mr_iova, overlapping regions")
}

/// Checks that resizing a completion queue keeps its completions.
pub fn resize_cq(bench: &Bench) -> Result<Proof, String> {
    let (near, far) = connect_ends(bench)?;
    for _ in 0..8 {
        near.qp
            .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, 8)], far.mr.as_remote())?;
    }
    // SAFETY: a completion queue.
    let status = unsafe { (verbs().ibv_resize_cq)(near.cq().raw, 1024) };
    check_status("ibv_resize_cq", status)?;
    for _ in 0..8 {
        near.cq().await_success()?;
    }
    proof_of("to 1024 entries, no completion lost")
}
