//! States and attributes of queue pairs (ibv_modify_qp(3), ibv_query_qp(3)).
//!
//! The daemon knows only iWARP's states: unconnected, and those of a connection. The verbs states
//! before that (RESET, INIT, and RTR and RTS while connecting) are kept here. A new queue pair is
//! in INIT, as with every RNIC under Linux: iWARP's IDLE, in which receive requests may be posted;
//! with the other personas it is in RESET.

use super::address_vector::AddressPair;
use super::port::PORT;
use super::qp::{QpObject, to_cap};
use crate::abi::*;
use crate::status::fail_with;
use siw::{Access, Error, PairOptions, Persona, QpState, VerbsQpState};
use std::ffi::c_int;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Attributes set by ibv_modify_qp(3) and returned by ibv_query_qp(3).
#[derive(Clone)]
pub struct Attributes {
    /// The state while the daemon has no connection for it.
    pub state: ibv_qp_state,
    /// All other attributes.
    pub set: ibv_qp_attr,
    sq_sig_all: c_int,
    /// The program connects it by the peer's GID and number, and does not see the connection
    /// itself.
    is_paired: bool,
    /// The program moves it through its states after rdma_cm has connected it.
    is_moved_by_program: bool,
    /// The program has set `qp_access_flags`.
    limits_access: bool,
    /// Datagrams are sent and received, without a connection.
    is_datagram: bool,
}

// SAFETY: numbers only.
unsafe impl Send for Attributes {}

impl Attributes {
    /// Attributes of a new queue pair of a device with that persona.
    pub fn new(init: &ibv_qp_init_attr, persona: Persona) -> Attributes {
        let is_datagram = init.qp_type == IBV_QPT_UD;
        Attributes {
            state: match persona {
                Persona::Iwarp => IBV_QPS_INIT,
                Persona::Roce | Persona::Ib | Persona::Unspecified => IBV_QPS_RESET,
            },
            // SAFETY: the struct is made of numbers.
            set: unsafe { std::mem::zeroed() },
            sq_sig_all: init.sq_sig_all,
            is_paired: false,
            is_moved_by_program: false,
            limits_access: false,
            is_datagram,
        }
    }

    /// Access rights denied to the peer.
    fn denied_access(&self) -> Access {
        if !self.limits_access {
            return Access::NONE;
        }
        Access::REMOTE.without(Access(self.set.qp_access_flags))
    }

    /// The state that the program sees, given the daemon's state.
    fn verbs_state(&self, of_daemon: Option<QpState>) -> ibv_qp_state {
        match of_daemon {
            Some(QpState::Idle) | None => self.state,
            // The connection may be established before the program moves the queue pair to RTR or
            // RTS. To the daemon a queue pair of datagrams is in RTS from the move to RTR on.
            Some(QpState::Rtr | QpState::Rts) if self.is_paired || self.is_datagram => self.state,
            // The connection may be established before the program has begun.
            Some(QpState::Rtr | QpState::Rts)
                if self.is_moved_by_program
                    && matches!(self.state, IBV_QPS_RESET | IBV_QPS_INIT) =>
            {
                self.state
            }
            Some(state) => VerbsQpState::from(state) as ibv_qp_state,
        }
    }

    /// Copies the attributes in the mask.
    fn merge(&mut self, attr: &ibv_qp_attr, mask: ibv_qp_attr_mask) {
        macro_rules! take {
            ($($flag:ident => $($field:ident),*;)*) => {
                $(if mask & $flag != 0 { $(self.set.$field = attr.$field;)* })*
            };
        }
        take! {
            IBV_QP_ACCESS_FLAGS => qp_access_flags;
            IBV_QP_PKEY_INDEX => pkey_index;
            IBV_QP_PORT => port_num;
            IBV_QP_AV => ah_attr;
            IBV_QP_PATH_MTU => path_mtu;
            IBV_QP_TIMEOUT => timeout;
            IBV_QP_RETRY_CNT => retry_cnt;
            IBV_QP_RNR_RETRY => rnr_retry;
            IBV_QP_RQ_PSN => rq_psn;
            IBV_QP_SQ_PSN => sq_psn;
            IBV_QP_MAX_QP_RD_ATOMIC => max_rd_atomic;
            IBV_QP_MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
            IBV_QP_MIN_RNR_TIMER => min_rnr_timer;
            IBV_QP_DEST_QPN => dest_qp_num;
            IBV_QP_QKEY => qkey;
        }
        self.limits_access |= mask & IBV_QP_ACCESS_FLAGS != 0;
    }
}

impl QpObject {
    fn lock_attributes(&self) -> MutexGuard<'_, Attributes> {
        self.attributes.lock_or_end_call()
    }

    /// The state that the program sees: the daemon's, once the queue pair is or was connected.
    pub fn verbs_state(&self) -> ibv_qp_state {
        let of_daemon = self.qp().state();
        self.lock_attributes().verbs_state(of_daemon)
    }

    /// Notes that rdma_cm connects it, and the program moves it through its states.
    pub fn set_moved_by_program(&self) {
        self.lock_attributes().is_moved_by_program = true;
    }

    /// Sets the state before there is a connection, for rdma_cm, which moves its queue pairs
    /// itself.
    pub fn set_unconnected_state(&self, state: ibv_qp_state) {
        self.lock_attributes().state = state;
    }
}

/// Checks a state transition: RESET and ERR may follow any state.
fn may_follow(from: ibv_qp_state, to: ibv_qp_state) -> bool {
    match to {
        IBV_QPS_RESET | IBV_QPS_ERR => true,
        IBV_QPS_INIT => matches!(from, IBV_QPS_RESET | IBV_QPS_INIT),
        IBV_QPS_RTR => matches!(from, IBV_QPS_INIT | IBV_QPS_RTR | IBV_QPS_RTS),
        IBV_QPS_RTS => matches!(from, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD),
        IBV_QPS_SQD => matches!(from, IBV_QPS_RTS | IBV_QPS_SQD),
        _ => false,
    }
}

/// Attributes that a move to RTR requires if it makes a connection (ibv_modify_qp(3)).
const TO_RTR: ibv_qp_attr_mask =
    CONNECTS | IBV_QP_PATH_MTU | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

/// Attributes that the following move to RTS requires.
const TO_RTS: ibv_qp_attr_mask =
    IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

/// Checks the attributes before anything changes. Queue pairs of rdma_cm are moved without most of
/// them, so that only a program that connects queue pairs itself has to give all.
fn check_attributes(
    queue_pair: &QpObject,
    attr: &ibv_qp_attr,
    mask: ibv_qp_attr_mask,
) -> Result<(), Error> {
    if mask & IBV_QP_PORT != 0 && u32::from(attr.port_num) != PORT {
        return Err(Error::Invalid("port_num is not a port of the device"));
    }
    if mask & IBV_QP_PATH_MTU != 0 && !(IBV_MTU_256..=IBV_MTU_4096).contains(&attr.path_mtu) {
        return Err(Error::Invalid("path_mtu is not a value of enum ibv_mtu"));
    }
    if mask & IBV_QP_STATE == 0 {
        return Ok(());
    }
    let from = queue_pair.verbs_state();
    if queue_pair.is_datagram() {
        return check_datagram_attributes(from, attr.qp_state, mask);
    }
    let is_paired = queue_pair.lock_attributes().is_paired;
    let required = match attr.qp_state {
        IBV_QPS_RTR if from == IBV_QPS_INIT && mask & CONNECTS != 0 => TO_RTR,
        IBV_QPS_RTS if from == IBV_QPS_RTR && is_paired => TO_RTS,
        _ => 0,
    };
    if mask & required != required {
        return Err(Error::Invalid(
            "attributes that this transition requires are missing in the mask (ibv_modify_qp(3))",
        ));
    }
    Ok(())
}

/// Checks the mask of a transition of a queue pair of datagrams: ibv_modify_qp(3) lists the attributes that
/// each transition requires and permits.
fn check_datagram_attributes(
    from: ibv_qp_state,
    to: ibv_qp_state,
    mask: ibv_qp_attr_mask,
) -> Result<(), Error> {
    const PORT_ATTRIBUTES: ibv_qp_attr_mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    let (required, permitted) = match (from, to) {
        (IBV_QPS_RESET, IBV_QPS_INIT) => (PORT_ATTRIBUTES, 0),
        (_, IBV_QPS_INIT) => (0, PORT_ATTRIBUTES),
        (_, IBV_QPS_RTR) => (0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY),
        (IBV_QPS_RTR, IBV_QPS_RTS) => (IBV_QP_SQ_PSN, IBV_QP_QKEY),
        (IBV_QPS_RTS, IBV_QPS_RTS) => (0, IBV_QP_QKEY),
        (_, IBV_QPS_SQD) => (0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        _ => (0, 0),
    };
    let always = IBV_QP_STATE | IBV_QP_CUR_STATE;
    if mask & required != required || mask & !(required | permitted | always) != 0 {
        return Err(Error::Invalid(
            "the mask lacks an attribute that this transition of a UD queue pair requires, or has one that it \
             does not permit (ibv_modify_qp(3))",
        ));
    }
    Ok(())
}

/// Attributes of a move to RTR that make a connection.
const CONNECTS: ibv_qp_attr_mask = IBV_QP_AV | IBV_QP_DEST_QPN;

/// `dest_qp_num` of rdma_init_qp_attr(3): rdma_cm makes the connection, and the move to RTR only stores the
/// attributes. No queue pair has this number.
pub const CONNECTED_BY_RDMA_CM: u32 = 0xff_fffe;

/// The peer that the attributes name.
fn pair_options(queue_pair: &QpObject, attributes: &Attributes) -> Result<PairOptions, Error> {
    let set = &attributes.set;
    let context = queue_pair.context();
    let info = context.device().info();
    let pair = AddressPair::of_vector(context, &set.ah_attr)?;
    Ok(PairOptions {
        device: info.index,
        local: pair.local,
        peer: pair.peer,
        peer_qp_num: set.dest_qp_num,
        // The program sets its own ORD only in the move to RTS; the peer states its limit.
        ord: context.client().limits().max_ord,
        ird: set.max_dest_rd_atomic.max(1).into(),
        denied_access: attributes.denied_access(),
    })
}

/// Time that a program which stops a queue pair may wait for its connection.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(2);

/// Waits for the connection of a paired queue pair: a program that does not see the connection may
/// be in RTS before it exists, and only then does the worker have the queue pair.
fn await_connection(queue_pair: &QpObject) {
    if !queue_pair.lock_attributes().is_paired {
        return;
    }
    let deadline = Instant::now() + CONNECTION_PATIENCE;
    while queue_pair.qp().state() == Some(QpState::Idle) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Moves the queue pair to the state in `attr`; `wanted` has all attributes as they are going to be.
fn change_state(
    queue_pair: &QpObject,
    attr: &ibv_qp_attr,
    mask: ibv_qp_attr_mask,
    wanted: &Attributes,
) -> Result<(), Error> {
    let (from, to) = (queue_pair.verbs_state(), attr.qp_state);
    if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != from {
        return Err(Error::Invalid("cur_qp_state is not the current state"));
    }
    if !may_follow(from, to) {
        return Err(Error::Invalid("invalid state transition"));
    }
    let qp = queue_pair.qp();
    match to {
        IBV_QPS_RESET if from != IBV_QPS_RESET => {
            qp.reset()?;
            queue_pair.reset_faults();
            queue_pair.lock_attributes().is_paired = false;
        }
        IBV_QPS_ERR => qp.set_error()?,
        IBV_QPS_RTR if queue_pair.is_datagram() => start_datagrams(queue_pair, wanted)?,
        IBV_QPS_RTS if queue_pair.is_datagram() && mask & IBV_QP_QKEY != 0 => {
            start_datagrams(queue_pair, wanted)?
        }
        // Without a peer's address rdma_cm makes the connection.
        IBV_QPS_RTR if wanted.set.dest_qp_num == CONNECTED_BY_RDMA_CM => {}
        IBV_QPS_RTR if from == IBV_QPS_INIT && mask & CONNECTS == CONNECTS => {
            let options = pair_options(queue_pair, wanted)?;
            qp.connect_pair(&options)?;
            queue_pair.lock_attributes().is_paired = true;
        }
        IBV_QPS_SQD if from == IBV_QPS_RTS => {
            await_connection(queue_pair);
            let notifies = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attr.en_sqd_async_notify != 0;
            match notifies {
                true => qp.drain_start()?,
                false => qp.drain_start_quietly()?,
            }
        }
        IBV_QPS_RTS if from == IBV_QPS_SQD => qp.drain_end()?,
        _ => {}
    }
    queue_pair.lock_attributes().state = to;
    Ok(())
}

/// Makes the queue pair receive datagrams with its Q_Key, and permits posting them.
fn start_datagrams(queue_pair: &QpObject, wanted: &Attributes) -> Result<(), Error> {
    let device = queue_pair.context().device().info().index;
    queue_pair.qp().start_datagrams(device, wanted.set.qkey)
}

/// Sets a new Q_Key of a queue pair that may be receiving already.
fn change_qkey(queue_pair: &QpObject, wanted: &Attributes) -> Result<(), Error> {
    match queue_pair.verbs_state() {
        IBV_QPS_RTR | IBV_QPS_RTS => start_datagrams(queue_pair, wanted),
        // The move to RTR sets it.
        _ => Ok(()),
    }
}

/// Updates the denied access rights of a queue pair that is connected without rdma_cm. For a queue
/// pair of rdma_cm the flags are only stored: rdma_cm sets them itself, without atomics.
fn limit_access(queue_pair: &QpObject, wanted: &Attributes) -> Result<(), Error> {
    let is_paired = queue_pair.lock_attributes().is_paired;
    match is_paired {
        true => queue_pair.qp().deny_access(wanted.denied_access()),
        false => Ok(()),
    }
}

/// ibv_modify_qp(3)
pub unsafe fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let (queue_pair, attr) = unsafe { (QpObject::from_abi(qp), &*attr) };
    let mask = mask as ibv_qp_attr_mask;
    if let Err(error) = apply_attributes(queue_pair, attr, mask) {
        return fail_with("ibv_modify_qp", &error);
    }
    if mask & IBV_QP_STATE != 0 {
        // SAFETY: the field is the library's to write, in calls that change the queue pair.
        unsafe { (*qp).state = attr.qp_state };
    }
    0
}

/// Changes the state first, which can be refused, and keeps the attributes only if it was not: a call
/// that fails changes nothing.
fn apply_attributes(
    queue_pair: &QpObject,
    attr: &ibv_qp_attr,
    mask: ibv_qp_attr_mask,
) -> Result<(), Error> {
    check_attributes(queue_pair, attr, mask)?;
    let mut wanted = queue_pair.lock_attributes().clone();
    wanted.merge(attr, mask);
    if mask & IBV_QP_STATE != 0 {
        change_state(queue_pair, attr, mask, &wanted)?;
    } else if mask & IBV_QP_QKEY != 0 && queue_pair.is_datagram() {
        change_qkey(queue_pair, &wanted)?;
    }
    if mask & IBV_QP_ACCESS_FLAGS != 0 {
        limit_access(queue_pair, &wanted)?;
    }
    queue_pair.lock_attributes().merge(attr, mask);
    Ok(())
}

/// ibv_query_qp(3)
pub unsafe fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    let state = match queue_pair.qp().query() {
        Ok(state) => state,
        Err(error) => return fail_with("ibv_query_qp", &error),
    };
    let attributes = queue_pair.lock_attributes();
    let verbs_state = attributes.verbs_state(state.state);
    let mut reply = attributes.set;
    reply.qp_state = verbs_state;
    reply.cur_qp_state = verbs_state;
    reply.cap = to_cap(&queue_pair.qp().granted_limits());
    reply.sq_draining = state.draining.into();
    if state.peer.is_some() {
        let to_depth = |depth: u32| u8::try_from(depth).unwrap_or(u8::MAX);
        reply.max_rd_atomic = to_depth(state.ord);
        reply.max_dest_rd_atomic = to_depth(state.ird);
    }
    let base = queue_pair.abi();
    let reply_init = ibv_qp_init_attr {
        qp_context: base.qp_context,
        send_cq: base.send_cq,
        recv_cq: base.recv_cq,
        srq: base.srq,
        cap: reply.cap,
        qp_type: base.qp_type,
        sq_sig_all: attributes.sq_sig_all,
    };
    // SAFETY: two structs to write, and the field that the library keeps.
    unsafe {
        attr.write(reply);
        init.write(reply_init);
        (*qp).state = verbs_state;
    }
    0
}
