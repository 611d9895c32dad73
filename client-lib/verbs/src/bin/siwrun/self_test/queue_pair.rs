//! Queue pairs of the self-test, connected by GID and number as by programs.

use super::abi::*;
use super::completions::*;
use super::memory::*;
use super::verbs::*;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;

/// A queue pair with the objects that it uses.
pub struct LibraryQp {
    pub raw: *mut ibv_qp,
    pub pd: Rc<LibraryPd>,
    pub cq: Rc<LibraryCq>,
    _srq: Option<Rc<LibrarySrq>>,
    /// Granted limits.
    pub cap: ibv_qp_cap,
}

/// Limits of a queue pair, unless a check uses others.
pub const CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline_data: 0,
};

/// Memory of the peer that a request accesses.
#[derive(Clone, Copy)]
pub struct Remote {
    pub addr: u64,
    pub rkey: u32,
}

impl LibraryMr {
    /// For requests of the peer.
    pub fn as_remote(&self) -> Remote {
        Remote {
            addr: self.addr(),
            rkey: self.rkey(),
        }
    }
}

impl LibraryQp {
    /// Creates a queue pair for a connection (RC).
    pub fn new(
        pd: &Rc<LibraryPd>,
        cq: &Rc<LibraryCq>,
        srq: Option<&Rc<LibrarySrq>>,
        cap: ibv_qp_cap,
    ) -> Result<LibraryQp, String> {
        LibraryQp::with_type(IBV_QPT_RC, pd, cq, srq, cap)
    }

    /// ibv_create_qp(3)
    pub fn with_type(
        qp_type: ibv_qp_type,
        pd: &Rc<LibraryPd>,
        cq: &Rc<LibraryCq>,
        srq: Option<&Rc<LibrarySrq>>,
        cap: ibv_qp_cap,
    ) -> Result<LibraryQp, String> {
        // SAFETY: objects of the library, and a struct to read and write.
        let (raw, granted) = unsafe {
            let mut init: ibv_qp_init_attr = zeroed();
            (init.send_cq, init.recv_cq) = (cq.raw, cq.raw);
            init.srq = srq.map_or(null_mut(), |srq| srq.raw);
            (init.cap, init.qp_type) = (cap, qp_type);
            ((verbs().ibv_create_qp)(pd.raw, &raw mut init), init.cap)
        };
        if raw.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(format!("ibv_create_qp: {error}"));
        }
        Ok(LibraryQp {
            raw,
            pd: pd.clone(),
            cq: cq.clone(),
            _srq: srq.cloned(),
            cap: granted,
        })
    }

    /// Creates a queue pair whose requests are built by calls (ibv_create_qp_ex(3)).
    pub fn new_extended(
        pd: &Rc<LibraryPd>,
        cq: &Rc<LibraryCq>,
        operations: u32,
    ) -> Result<LibraryQp, String> {
        let create = table_slot(pd.context.extended_context().create_qp_ex)?;
        // SAFETY: objects of the library, and a struct to read and write.
        let (raw, granted) = unsafe {
            let mut init: ibv_qp_init_attr_ex = zeroed();
            (init.send_cq, init.recv_cq) = (cq.raw, cq.raw);
            (init.cap, init.qp_type, init.pd) = (CAP, IBV_QPT_RC, pd.raw);
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.send_ops_flags = operations.into();
            (create(pd.context.raw, &raw mut init), init.cap)
        };
        if raw.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(format!("ibv_create_qp_ex: {error}"));
        }
        Ok(LibraryQp {
            raw,
            pd: pd.clone(),
            cq: cq.clone(),
            _srq: None,
            cap: granted,
        })
    }

    /// Its number.
    pub fn qp_num(&self) -> u32 {
        // SAFETY: a queue pair of the library.
        unsafe { (*self.raw).qp_num }
    }

    /// ibv_modify_qp(3)
    pub fn modify_attributes(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<(), String> {
        // SAFETY: a queue pair, and a struct to read.
        let status = unsafe { (verbs().ibv_modify_qp)(self.raw, attr, mask as c_int) };
        check_status("ibv_modify_qp", status)
    }

    /// Changes only the state.
    pub fn go_to(&self, state: ibv_qp_state) -> Result<(), String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = state;
        self.modify_attributes(&mut attr, IBV_QP_STATE)
    }

    /// Stops sending, with an event when the send queue is drained.
    pub fn drain_with_event(&self) -> Result<(), String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        (attr.qp_state, attr.en_sqd_async_notify) = (IBV_QPS_SQD, 1);
        self.modify_attributes(&mut attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY)
    }

    /// ibv_query_qp(3)
    pub fn query_attributes(&self) -> Result<ibv_qp_attr, String> {
        // SAFETY: a queue pair, and two structs to write.
        unsafe {
            let (mut attr, mut init) = (zeroed(), zeroed());
            let mask = IBV_QP_STATE as c_int;
            let status = (verbs().ibv_query_qp)(self.raw, &raw mut attr, mask, &raw mut init);
            check_status("ibv_query_qp", status).map(|()| attr)
        }
    }

    /// Moves from RESET to INIT.
    pub fn to_init(&self) -> Result<(), String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = ALL_ACCESS & !IBV_ACCESS_MW_BIND;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify_attributes(&mut attr, mask)
    }

    /// Moves to RTR, with the address of its peer.
    pub fn to_rtr(&self, peer: &LibraryQp, depth: u8) -> Result<(), String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = peer.qp_num();
        attr.max_dest_rd_atomic = depth;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = peer.pd.context.query_gid(0)?;
        attr.ah_attr.grh.hop_limit = 1;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify_attributes(&mut attr, mask)
    }

    /// Moves from RTR to RTS.
    pub fn to_rts(&self, depth: u8) -> Result<(), String> {
        // SAFETY: the struct is made of numbers.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
        attr.max_rd_atomic = depth;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify_attributes(&mut attr, mask)
    }

    /// Posts a receive request with these elements.
    pub fn post_receive(&self, sges: &[ibv_sge]) -> Result<(), String> {
        // SAFETY: a queue pair; the request is copied before this returns.
        unsafe {
            let post = table_slot((*self.pd.context.raw).ops.post_recv)?;
            let (mut request, mut bad) = (receive_request(sges), null_mut());
            let status = post(self.raw, &raw mut request, &raw mut bad);
            check_status("ibv_post_recv", status)
        }
    }

    /// Posts a request.
    pub fn post_request(&self, request: &mut ibv_send_wr) -> Result<(), String> {
        // SAFETY: a queue pair; the request is copied before this returns.
        unsafe {
            let post = table_slot((*self.pd.context.raw).ops.post_send)?;
            let mut bad = null_mut();
            check_status("ibv_post_send", post(self.raw, request, &raw mut bad))
        }
    }

    /// Posts a signaled request without remote memory.
    pub fn post_plain(&self, opcode: ibv_wr_opcode, sges: &[ibv_sge]) -> Result<(), String> {
        self.post_request(&mut signaled_request(opcode, sges))
    }

    /// Posts a signaled request that accesses memory of the peer.
    pub fn post_remote(
        &self,
        opcode: ibv_wr_opcode,
        sges: &[ibv_sge],
        remote: Remote,
    ) -> Result<(), String> {
        self.post_request(&mut remote_request(opcode, sges, remote))
    }
}

/// Builds a signaled request, to be used while the elements exist.
pub fn signaled_request(opcode: ibv_wr_opcode, sges: &[ibv_sge]) -> ibv_send_wr {
    // SAFETY: the struct is made of numbers and pointers.
    let mut request: ibv_send_wr = unsafe { zeroed() };
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    request.sg_list = sges.as_ptr().cast_mut();
    request.num_sge = sges.len() as c_int;
    request
}

/// Builds a signaled READ or WRITE request, likewise.
pub fn remote_request(opcode: ibv_wr_opcode, sges: &[ibv_sge], remote: Remote) -> ibv_send_wr {
    let mut request = signaled_request(opcode, sges);
    request.wr.rdma.remote_addr = remote.addr;
    request.wr.rdma.rkey = remote.rkey;
    request
}

/// Builds an atomic request; for FetchAdd `compare_add` is the addend.
pub fn atomic_request(
    opcode: ibv_wr_opcode,
    sges: &[ibv_sge],
    remote: Remote,
    (compare_add, swap): (u64, u64),
) -> ibv_send_wr {
    let mut request = signaled_request(opcode, sges);
    request.wr.atomic.remote_addr = remote.addr;
    request.wr.atomic.rkey = remote.rkey;
    request.wr.atomic.compare_add = compare_add;
    request.wr.atomic.swap = swap;
    request
}

impl Drop for LibraryQp {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        note_destroyed("QP", unsafe { (verbs().ibv_destroy_qp)(self.raw) });
    }
}

/// One end of a connection, with memory.
pub struct End {
    pub qp: LibraryQp,
    pub mr: LibraryMr,
}

impl End {
    /// ibv_create_qp(3)
    pub fn new(context: &Rc<LibraryContext>, cap: ibv_qp_cap) -> Result<End, String> {
        let pd = LibraryPd::new(context)?;
        let cq = LibraryCq::new(context, 256, None)?;
        End::with_queue(&pd, &cq, None, cap)
    }

    /// Creates an end with these queues.
    pub fn with_queue(
        pd: &Rc<LibraryPd>,
        cq: &Rc<LibraryCq>,
        srq: Option<&Rc<LibrarySrq>>,
        cap: ibv_qp_cap,
    ) -> Result<End, String> {
        let qp = LibraryQp::new(pd, cq, srq, cap)?;
        let mr = LibraryMr::new(pd, WORDS, ALL_ACCESS)?;
        Ok(End { qp, mr })
    }

    /// The completion queue of all its requests.
    pub fn cq(&self) -> &LibraryCq {
        &self.qp.cq
    }
}

/// Length of an end's memory, in words.
pub const WORDS: usize = 2048;

/// RDMA operations in flight, unless a check uses another number.
pub const DEPTH: u8 = 4;

/// Connects two queue pairs: RESET, INIT, RTR, RTS.
pub fn connect_qps(near: &LibraryQp, far: &LibraryQp, depth: u8) -> Result<(), String> {
    near.to_init()?;
    far.to_init()?;
    near.to_rtr(far, depth)?;
    far.to_rtr(near, depth)?;
    near.to_rts(depth)?;
    far.to_rts(depth)
}

/// Creates two connected ends, the second on the peer's device.
pub fn connect_ends(bench: &Bench) -> Result<(End, End), String> {
    connect_with(bench, CAP)
}

/// As [`connect_ends`], with other queue pairs.
pub fn connect_with(bench: &Bench, cap: ibv_qp_cap) -> Result<(End, End), String> {
    let near = End::new(&bench.near, cap)?;
    let far = End::new(&bench.far, cap)?;
    connect_qps(&near.qp, &far.qp, DEPTH)?;
    // The connection is established when a request is done: SQD is refused before that.
    near.qp
        .post_remote(IBV_WR_RDMA_WRITE, &[near.mr.sge(0, 8)], far.mr.as_remote())?;
    near.cq().await_success()?;
    near.mr.fill_pattern(1);
    far.mr.fill_pattern(2);
    Ok((near, far))
}

/// The two devices.
pub struct Bench {
    pub near: Rc<LibraryContext>,
    pub far: Rc<LibraryContext>,
}
