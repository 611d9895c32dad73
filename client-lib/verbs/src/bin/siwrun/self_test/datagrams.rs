//! UD queue pairs and address handles.

use super::abi::*;
use super::completions::*;
use super::limits::make_many;
use super::memory::*;
use super::proof::{Proof, ensure_refused, ensure_that, proof_of};
use super::queue_pair::*;
use super::verbs::*;
use std::rc::Rc;

/// Bytes before the data in the receive buffer of a datagram.
const GRH: usize = size_of::<ibv_grh>();
/// Length of a datagram, in words and bytes.
const COUNT: usize = 64;
const LENGTH: usize = COUNT * 8;
/// The Q_Key of both ends.
const QKEY: u32 = 0x1111_1111;

/// An address handle.
struct LibraryAh {
    raw: *mut ibv_ah,
    _pd: Rc<LibraryPd>,
}

impl LibraryAh {
    /// Creates a handle of the first address of a device.
    fn new(pd: &Rc<LibraryPd>, peer: &LibraryContext) -> Result<LibraryAh, String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_ah_attr = unsafe { zeroed() };
        attr.is_global = 1;
        attr.port_num = 1;
        attr.grh.dgid = peer.query_gid(0)?;
        attr.grh.hop_limit = 1;
        // SAFETY: a protection domain, and a struct to read.
        let raw = unsafe { (verbs().ibv_create_ah)(pd.raw, &raw mut attr) };
        LibraryAh::of_raw("ibv_create_ah", raw, pd)
    }

    /// Creates a handle of the sender of a datagram, which is at the beginning of the memory.
    fn of_sender(pd: &Rc<LibraryPd>, mut wc: ibv_wc, mr: &LibraryMr) -> Result<LibraryAh, String> {
        let grh = mr.addr() as *mut ibv_grh;
        // SAFETY: a protection domain, and structs to read.
        let raw = unsafe { (verbs().ibv_create_ah_from_wc)(pd.raw, &raw mut wc, grh, 1) };
        LibraryAh::of_raw("ibv_create_ah_from_wc", raw, pd)
    }

    fn of_raw(call: &str, raw: *mut ibv_ah, pd: &Rc<LibraryPd>) -> Result<LibraryAh, String> {
        check_pointer(call, raw).map(|raw| LibraryAh {
            raw,
            _pd: pd.clone(),
        })
    }
}

impl Drop for LibraryAh {
    fn drop(&mut self) {
        // SAFETY: created by `ibv_create_ah`.
        note_destroyed("AH", unsafe { (verbs().ibv_destroy_ah)(self.raw) });
    }
}

/// Moves a queue pair of datagrams to RTS.
fn start(qp: &LibraryQp) -> Result<(), String> {
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    (attr.qp_state, attr.port_num, attr.qkey) = (IBV_QPS_INIT, 1, QKEY);
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    qp.modify_attributes(&mut attr, mask)?;
    qp.go_to(IBV_QPS_RTR)?;
    attr.qp_state = IBV_QPS_RTS;
    qp.modify_attributes(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN)
}

/// Creates a started queue pair with memory.
fn make_end(context: &Rc<LibraryContext>) -> Result<End, String> {
    let pd = LibraryPd::new(context)?;
    let cq = LibraryCq::new(context, 256, None)?;
    let qp = LibraryQp::with_type(IBV_QPT_UD, &pd, &cq, None, CAP)?;
    let mr = LibraryMr::new(&pd, WORDS, ALL_ACCESS)?;
    start(&qp)?;
    Ok(End { qp, mr })
}

/// Sends the beginning of the memory to that of the peer, behind the GRH. Returns the completion of the receive.
fn send(from: &End, ah: &LibraryAh, to: &End, qpn: u32) -> Result<ibv_wc, String> {
    let seed = u64::from(from.qp.qp_num());
    from.mr.fill_pattern(seed);
    to.mr.fill_pattern(0);
    to.qp.post_receive(&[to.mr.sge(0, GRH + LENGTH)])?;
    let sges = [from.mr.sge(0, LENGTH)];
    let mut posted = signaled_request(IBV_WR_SEND, &sges);
    posted.wr.ud.ah = ah.raw;
    posted.wr.ud.remote_qpn = qpn;
    posted.wr.ud.remote_qkey = QKEY;
    from.qp.post_request(&mut posted)?;
    from.cq().await_success()?;
    let received = to.cq().await_success()?;
    let length = received.byte_len as usize;
    ensure_that(length == GRH + LENGTH, "its length is wrong")?;
    let has_grh = received.wc_flags & IBV_WC_GRH != 0;
    ensure_that(has_grh, "IBV_WC_GRH is missing")?;
    let is_right = received.src_qp == from.qp.qp_num();
    ensure_that(is_right, "src_qp is not the sender")?;
    let is_equal = |index| to.mr.word(GRH / 8 + index) == from.mr.word(index);
    ensure_that((0..COUNT).all(is_equal), "the data differs")?;
    Ok(received)
}

/// Checks datagrams in both directions, the second by a handle of the first one's sender, and the number of
/// handles.
pub fn check_datagrams(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_device()?.max_ah;
    if limit == 0 {
        let pd = LibraryPd::new(&bench.near)?;
        ensure_refused(LibraryAh::new(&pd, &bench.far), "an address handle")?;
        return Ok(Proof::NotAdvertised);
    }
    let (near, far) = (make_end(&bench.near)?, make_end(&bench.far)?);
    let there = LibraryAh::new(&near.qp.pd, &bench.far)?;
    let received = send(&near, &there, &far, far.qp.qp_num())?;
    let back = LibraryAh::of_sender(&far.qp.pd, received, &far.mr)?;
    send(&far, &back, &near, received.src_qp)?;
    make_many(limit, || LibraryAh::new(&near.qp.pd, &bench.far))?;
    proof_of(format!("{LENGTH} bytes there and back, {limit} handles"))
}
