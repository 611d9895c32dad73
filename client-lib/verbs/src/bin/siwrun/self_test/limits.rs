//! The limits from ibv_query_device(3) and ibv_query_port(3): values up to the limit work, larger
//! ones are refused.

use super::abi::*;
use super::completions::*;
use super::memory::*;
use super::proof::{Proof, ensure_refused, ensure_that, proof_of};
use super::queue_pair::*;
use super::verbs::*;
use siw_shm::persona::Persona;
use std::ffi::{CStr, c_int};
use std::rc::Rc;

/// Maximum number of objects that a check creates: enough to see that they do not run out early.
const MANY: c_int = 300;
/// Maximum number of completion queue entries in a check: the limit may exceed the memory.
const ENTRIES: c_int = 1 << 16;
const PAGE: u64 = 4096;

/// Creates objects up to the limit, or to [`MANY`].
pub fn make_many<T>(
    limit: c_int,
    make: impl FnMut() -> Result<T, String>,
) -> Result<Proof, String> {
    ensure_that(limit > 0, "the limit is 0")?;
    let count = limit.min(MANY) as usize;
    let made: Result<Vec<T>, String> = std::iter::repeat_with(make).take(count).collect();
    made.map_err(|why| format!("of {limit}: {why}"))?;
    proof_of(format!("{count} of {limit} made"))
}

/// Creates protection domains up to the limit.
pub fn max_pd(bench: &Bench) -> Result<Proof, String> {
    make_many(bench.near.query_device()?.max_pd, || {
        LibraryPd::new(&bench.near)
    })
}

/// Creates completion queues up to the limit.
pub fn max_cq(bench: &Bench) -> Result<Proof, String> {
    make_many(bench.near.query_device()?.max_cq, || {
        LibraryCq::new(&bench.near, 16, None)
    })
}

/// Creates memory regions up to the limit.
pub fn max_mr(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.near)?;
    make_many(bench.near.query_device()?.max_mr, || {
        LibraryMr::new(&pd, 16, ALL_ACCESS)
    })
}

/// Creates memory windows up to the limit.
pub fn max_mw(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_device()?.max_mw;
    if limit == 0 {
        return Ok(Proof::NotAdvertised);
    }
    let pd = LibraryPd::new(&bench.near)?;
    make_many(limit, || LibraryMw::new(&pd, IBV_MW_TYPE_2))
}

/// Creates shared receive queues up to the limit.
pub fn max_srq(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.near)?;
    make_many(bench.near.query_device()?.max_srq, || {
        LibrarySrq::new(&pd, 4, 1)
    })
}

/// Creates queue pairs up to the limit.
pub fn max_qp(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.near)?;
    let cq = LibraryCq::new(&bench.near, 16, None)?;
    let cap = ibv_qp_cap {
        max_send_wr: 4,
        max_recv_wr: 4,
        ..CAP
    };
    make_many(bench.near.query_device()?.max_qp, || {
        LibraryQp::new(&pd, &cq, None, cap)
    })
}

/// Checks the number of entries of a completion queue.
pub fn max_cqe(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_device()?.max_cqe;
    let entries = limit.min(ENTRIES);
    // SAFETY: a completion queue of the library.
    let granted = unsafe { (*LibraryCq::new(&bench.near, entries, None)?.raw).cqe };
    ensure_that(granted >= entries, "fewer entries than requested")?;
    if limit < c_int::MAX {
        ensure_refused(LibraryCq::new(&bench.near, limit + 1, None), "one more")?;
    }
    proof_of(format!("{granted} of {limit}; one more is refused"))
}

/// Checks the limits of a queue pair: values up to the limit work, larger ones are refused.
pub fn max_qp_wr(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_device()?.max_qp_wr as u32;
    let pd = LibraryPd::new(&bench.near)?;
    let cq = LibraryCq::new(&bench.near, 16, None)?;
    let cap = |wr| ibv_qp_cap {
        max_send_wr: wr,
        max_recv_wr: wr,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let qp = LibraryQp::new(&pd, &cq, None, cap(limit))?;
    ensure_that(qp.cap.max_recv_wr >= limit, "fewer are granted")?;
    qp.to_init()?;
    for posted in 0..limit {
        qp.post_receive(&[])
            .map_err(|why| format!("the {posted}. receive of {limit}: {why}"))?;
    }
    let more = LibraryQp::new(&pd, &cq, None, cap(limit + 1));
    ensure_refused(more, "one more")?;
    proof_of(format!("{limit} receives posted; one more is refused"))
}

/// `count` elements of eight bytes each, with gaps between them.
fn scattered_sges(mr: &LibraryMr, count: usize) -> Vec<ibv_sge> {
    (0..count).map(|index| mr.sge(index * 16, 8)).collect()
}

/// Checks the number of elements of work requests.
pub fn max_sge(bench: &Bench) -> Result<Proof, String> {
    let attr = bench.near.query_device()?;
    let (count, of_read) = (attr.max_sge as usize, attr.max_sge_rd as usize);
    let cap = ibv_qp_cap {
        max_send_sge: attr.max_sge as u32,
        max_recv_sge: attr.max_sge as u32,
        ..CAP
    };
    let (near, far) = connect_with(bench, cap)?;
    far.qp.post_receive(&scattered_sges(&far.mr, count))?;
    near.qp
        .post_plain(IBV_WR_SEND, &scattered_sges(&near.mr, count))?;
    near.cq().await_success()?;
    far.cq().await_success()?;
    let is_equal = |index: usize| far.mr.word(index * 2) == near.mr.word(index * 2);
    ensure_that((0..count).all(is_equal), "an element is wrong")?;
    ensure_refused(
        near.qp
            .post_plain(IBV_WR_SEND, &scattered_sges(&near.mr, count + 1)),
        "a request with one more",
    )?;
    far.mr.fill_pattern(70);
    let sges = scattered_sges(&near.mr, of_read);
    near.qp
        .post_remote(IBV_WR_RDMA_READ, &sges, far.mr.as_remote())?;
    near.cq().await_success()?;
    let is_equal = |index: usize| near.mr.word(index * 2) == far.mr.word(index);
    ensure_that((0..of_read).all(is_equal), "an element of READ is wrong")?;
    let more = ibv_qp_cap {
        max_send_sge: cap.max_send_sge + 1,
        ..cap
    };
    let more = LibraryQp::new(&near.qp.pd, &near.qp.cq, None, more);
    ensure_refused(more, "a queue pair with one more")?;
    proof_of(format!("{count}, {of_read} of READ; one more is refused"))
}

/// Finds the largest inline data that is granted, by bisection.
pub fn max_inline(bench: &Bench) -> Result<Proof, String> {
    let pd = LibraryPd::new(&bench.near)?;
    let cq = LibraryCq::new(&bench.near, 16, None)?;
    let cap = |inline| ibv_qp_cap {
        max_inline_data: inline,
        ..CAP
    };
    let (mut granted, mut refused) = (0, 1 << 16);
    while refused - granted > 1 {
        let middle = (granted + refused) / 2;
        match LibraryQp::new(&pd, &cq, None, cap(middle)) {
            Ok(_) => granted = middle,
            Err(_) => refused = middle,
        }
    }
    let length = granted as usize / 8 * 8;
    let (near, far) = connect_with(bench, cap(granted))?;
    near.mr.fill_pattern(80);
    // Inline data need not be registered.
    let sges = [ibv_sge {
        lkey: 0,
        ..near.mr.sge(0, length)
    }];
    let mut posted = remote_request(IBV_WR_RDMA_WRITE, &sges, far.mr.as_remote());
    posted.send_flags |= IBV_SEND_INLINE;
    near.qp.post_request(&mut posted)?;
    near.mr.fill_pattern(81);
    near.cq().await_success()?;
    far.mr.has_pattern(80, length / 8)?;
    proof_of(format!(
        "{granted} bytes, without a key; memory is free at once"
    ))
}

/// Checks READs in flight at the same time.
pub fn max_rd_atom(bench: &Bench) -> Result<Proof, String> {
    let attr = bench.near.query_device()?;
    let (inbound, outbound) = (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom);
    let depth = u8::try_from(inbound.min(outbound)).unwrap_or(u8::MAX);
    ensure_that(depth > 0, "the limit is 0")?;
    let near = End::new(&bench.near, CAP)?;
    let far = End::new(&bench.far, CAP)?;
    connect_qps(&near.qp, &far.qp, depth)?;
    far.mr.fill_pattern(90);
    for index in 0..CAP.max_send_wr as usize {
        let remote = Remote {
            addr: far.mr.addr() + index as u64 * 64,
            ..far.mr.as_remote()
        };
        let sges = [near.mr.sge(index * 64, 64)];
        near.qp.post_remote(IBV_WR_RDMA_READ, &sges, remote)?;
    }
    for _ in 0..CAP.max_send_wr {
        near.cq().await_success()?;
    }
    near.mr.has_pattern(90, CAP.max_send_wr as usize * 8)?;
    proof_of(format!(
        "{inbound} inbound, {outbound} outbound; 64 READs at once over depth {depth}"
    ))
}

/// Checks the requests of a shared receive queue, and their elements.
pub fn max_srq_wr(bench: &Bench) -> Result<Proof, String> {
    let attr = bench.near.query_device()?;
    let (wr, sge) = (attr.max_srq_wr as u32, attr.max_srq_sge as u32);
    let pd = LibraryPd::new(&bench.near)?;
    let srq = LibrarySrq::new(&pd, wr, 1)?;
    ensure_that(srq.query_attributes()?.max_wr >= wr, "fewer are granted")?;
    for posted in 0..wr {
        srq.post_receive(&[])
            .map_err(|why| format!("the {posted}. receive of {wr}: {why}"))?;
    }
    drop(srq);
    ensure_refused(LibrarySrq::new(&pd, wr + 1, 1), "one receive more")?;
    LibrarySrq::new(&pd, 4, sge)?;
    ensure_refused(LibrarySrq::new(&pd, 4, sge + 1), "one element more")?;
    proof_of(format!("{wr} receives, {sge} elements; more is refused"))
}

/// Registers a large region.
pub fn max_mr_size(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_device()?.max_mr_size;
    let wanted = limit.min(16 << 20);
    LibraryMr::new(
        &LibraryPd::new(&bench.near)?,
        wanted as usize / 8,
        ALL_ACCESS,
    )?;
    proof_of(format!("{wanted} of {limit} bytes registered"))
}

/// Checks that the sizes include the machine's page size.
pub fn page_sizes(bench: &Bench) -> Result<Proof, String> {
    let sizes = bench.near.query_device()?.page_size_cap;
    ensure_that(sizes & PAGE != 0, "pages of 4096 bytes are missing")?;
    proof_of(format!("{sizes:#x}"))
}

/// Sends a large message.
pub fn max_message(bench: &Bench) -> Result<Proof, String> {
    let limit = bench.near.query_port()?.max_msg_sz;
    const LENGTH: usize = 8 << 20;
    let (near, far) = connect_ends(bench)?;
    let from = LibraryMr::new(&near.qp.pd, LENGTH / 8, ALL_ACCESS)?;
    let to = LibraryMr::new(&far.qp.pd, LENGTH / 8, ALL_ACCESS)?;
    from.fill_pattern(100);
    let length = LENGTH.min(limit as usize);
    near.qp
        .post_remote(IBV_WR_RDMA_WRITE, &[from.sge(0, length)], to.as_remote())?;
    near.cq().await_success()?;
    to.has_pattern(100, length / 8)?;
    proof_of(format!("{length} of {limit} bytes in a message"))
}

/// Checks moderation: one event for several completions.
pub fn cq_moderation(bench: &Bench) -> Result<Proof, String> {
    let caps = bench.near.extended_attributes()?.cq_mod_caps;
    if caps.max_cq_count == 0 {
        return Ok(Proof::NotAdvertised);
    }
    let pd = LibraryPd::new(&bench.near)?;
    let channel = LibraryChannel::new(&bench.near)?;
    let cq = LibraryCq::new(&bench.near, 64, Some(&channel))?;
    let near = End::with_queue(&pd, &cq, None, CAP)?;
    let far = End::new(&bench.far, CAP)?;
    connect_qps(&near.qp, &far.qp, DEPTH)?;
    let modify = table_slot(bench.near.extended_context().modify_cq)?;
    let moderate = |count, period| {
        let mut attr = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq {
                cq_count: count,
                cq_period: period,
            },
        };
        // SAFETY: a completion queue, and a struct to read.
        check_status("ibv_modify_cq", unsafe { modify(cq.raw, &raw mut attr) })
    };
    moderate(caps.max_cq_count, caps.max_cq_period)?;
    // The longest period is 65 ms: the four completions come earlier.
    moderate(4, caps.max_cq_period)?;
    cq.request_event(false)?;
    for completion in 0..4 {
        ensure_that(
            completion == 0 || !channel.has_event(),
            "an event for fewer than four completions",
        )?;
        near.qp
            .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, 8)], far.mr.as_remote())?;
        cq.await_success()?;
    }
    channel.take_event()?;
    proof_of(format!(
        "count to {}, period to {} us; one event for four completions",
        caps.max_cq_count, caps.max_cq_period
    ))
}

/// Checks that all queries show the same kind of device, and names the persona.
pub fn check_persona(bench: &Bench) -> Result<Proof, String> {
    // SAFETY: an open context, whose device exists.
    let (node_type, transport) = unsafe {
        let device = &*(*bench.near.raw).device;
        (device.node_type, device.transport_type)
    };
    let layer = bench.near.query_port()?.link_layer;
    let shows = |persona: &Persona| {
        let layer_of_persona = persona.link_layer() as u8;
        persona.node_type() == node_type
            && persona.transport_type() == transport
            && layer_of_persona == layer
    };
    let Some(persona) = Persona::ALL.into_iter().find(shows) else {
        return Err(format!(
            "node type {node_type}, transport type {transport} and link layer {layer} are of no persona"
        ));
    };
    let in_files = read_file(&bench.near, c"node_type")?;
    let is_same = in_files == persona.node_type_text();
    ensure_that(is_same, "node_type in sysfs differs")?;
    let in_files = read_file(&bench.near, c"ports/1/link_layer")?;
    let is_same = in_files == persona.link_layer().text();
    ensure_that(is_same, "link_layer in sysfs differs")?;
    proof_of(persona.name().to_owned())
}

/// Checks the port, its tables, and the files with the same contents.
pub fn check_port(bench: &Bench) -> Result<Proof, String> {
    let attr = bench.near.query_device()?;
    ensure_that(attr.phys_port_cnt == 1, "the device does not have one port")?;
    let port = bench.near.query_port()?;
    ensure_that(port.state == IBV_PORT_ACTIVE, "the port is not active")?;
    ensure_that(port.gid_tbl_len > 0, "there is no GID")?;
    for index in 0..port.gid_tbl_len {
        bench.near.query_gid(index)?;
    }
    ensure_refused(
        bench.near.query_gid(port.gid_tbl_len),
        "a GID beyond the table",
    )?;
    let mut pkey = 0;
    // SAFETY: an open context, and a number to write.
    let status = unsafe { (verbs().ibv_query_pkey)(bench.near.raw, 1, 0, &raw mut pkey) };
    check_status("ibv_query_pkey", status)?;
    ensure_that(pkey == u16::MAX, "it is not the default partition key")?;
    let in_files = read_file(&bench.near, c"ports/1/state")?;
    ensure_that(in_files == "4: ACTIVE", "the file in sysfs differs")?;
    proof_of(format!("active, {} GIDs, one P_Key", port.gid_tbl_len))
}

/// Reads a file below the device's folder.
fn read_file(context: &Rc<LibraryContext>, name: &CStr) -> Result<String, String> {
    let mut text = [0u8; 64];
    // SAFETY: an open context; C strings, and a buffer with its size.
    unsafe {
        let folder = (*(*context.raw).device).ibdev_path.as_ptr();
        let buffer = text.as_mut_ptr().cast();
        let length = (verbs().ibv_read_sysfs_file)(folder, name.as_ptr(), buffer, text.len());
        let length = usize::try_from(length).map_err(|_| {
            let root = CStr::from_ptr((verbs().ibv_get_sysfs_path)());
            format!(
                "no {} below {}",
                name.to_string_lossy(),
                root.to_string_lossy()
            )
        })?;
        Ok(String::from_utf8_lossy(&text[..length]).into_owned())
    }
}
