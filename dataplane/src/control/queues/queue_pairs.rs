//! Queue pairs: requests of clients, and the workers' reports. The control thread answers
//! ibv_modify_qp(3) and ibv_query_qp(3) for detached queue pairs, the worker for those that it has.

use nix::libc;
use siw_iwarp::{QpEvent, QpInitAttr};
use siw_shm::control::AsyncEventKind;
use siw_shm::control::codec::UNANSWERED;
use siw_shm::control::messages as m;
use siw_shm::work_queue::{HEADER, STATE_LINE_LEN, state_offset};
use siw_shm::{Access, QpGeometry, wqe};

use super::groups;
use crate::config::LimitsConfig;
use crate::control::account::quotas::Quota;
use crate::control::client::cm_events;
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{Client, ClientQp, QpPhase, Resources, denied_access};
use crate::ids::{ClientId, CommandToken, CqId, PdId, Qpn, SrqId};
use crate::worker::messages::{Command, ModifyTarget, QpInfo};

/// Computes the rings of a queue pair, or refuses sizes beyond the limits or the ABI.
fn qp_geometry(limits: &LimitsConfig, request: &m::CreateQp) -> Result<QpGeometry, Refusal> {
    let deepest = limits.work_requests;
    for (what, depth) in [
        ("send", request.max_send_wr),
        ("receive", request.max_recv_wr),
    ] {
        if depth > deepest {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("{depth} {what} work requests: at most {deepest} are allowed"),
            ));
        }
    }
    if request.max_send_sge.max(request.max_recv_sge) > wqe::MAX_SGE as u32
        || request.max_inline > wqe::MAX_INLINE as u32
    {
        return Err(Refusal::new(
            libc::EINVAL,
            format!(
                "at most {} scatter/gather elements and {} inline bytes are allowed",
                wqe::MAX_SGE,
                wqe::MAX_INLINE
            ),
        ));
    }
    QpGeometry::new(
        request.max_send_wr,
        request.max_recv_wr,
        request.max_send_sge,
        request.max_recv_sge,
        request.max_inline,
    )
    .ok_or_else(|| Refusal::new(libc::EINVAL, "the queues are too long"))
}

pub(in crate::control) fn create_qp(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    request: &m::CreateQp,
) -> Outcome {
    let geometry = qp_geometry(&resources.limits, request)?;
    let client = resources.client_mut(id)?;
    let pd_id = PdId(request.pd);
    let srq_id = (request.srq != 0).then_some(SrqId(request.srq));
    let (send_cq, recv_cq) = (CqId(request.send_cq), CqId(request.recv_cq));
    for cq in [send_cq, recv_cq] {
        if !client.cqs.contains_key(&cq) {
            return Err(Refusal::no_such("completion queue", cq.0));
        }
    }
    client.memory.check_pd(pd_id)?;
    if let Some(number) = srq_id {
        let srq = client
            .srqs
            .get(&number)
            .ok_or_else(|| Refusal::no_such("shared receive queue", request.srq))?;
        if srq.pd != pd_id {
            return Err(Refusal::new(
                libc::EINVAL,
                "the shared receive queue belongs to another protection domain",
            ));
        }
    }
    let charge = resources.charge(id, [(Quota::QueuePairs, 1)])?;
    let (mem, qpn) = resources.alloc_queue(id, geometry.len, |all, _| {
        Ok(Qpn(all.qpns.allocate_number()?))
    })?;
    resources.qp_owners.insert(qpn, id);
    let client = resources.client_mut(id)?;
    if let Some(srq) = srq_id.and_then(|srq| client.srqs.get_mut(&srq)) {
        srq.qps += 1;
    }
    for cq in [send_cq, recv_cq] {
        if let Some(cq) = client.cqs.get_mut(&cq) {
            cq.qps += 1;
        }
    }
    client.memory.add_pd_user(pd_id);
    let (place, fd) = client.queues.give(&mem);
    let reply = m::QpReply {
        qp_num: qpn.0,
        worker: 0,
        sq_slots: geometry.sq_slots,
        rq_slots: geometry.rq_slots,
        rq_offset: geometry.rq_offset as u32,
        max_send_wr: request.max_send_wr,
        max_recv_wr: request.max_recv_wr,
        max_send_sge: request.max_send_sge.max(1),
        max_recv_sge: request.max_recv_sge.max(1),
        max_inline: request.max_inline.max(wqe::INLINE_IN_HEADER as u32),
        mem: place,
    };
    send_reply_with_fds::<m::CreateQp>(client, seq, &reply, fd.as_slice())?;
    client.qps.insert(
        qpn,
        charge.of(ClientQp {
            attr: QpInitAttr {
                qpn: qpn.0,
                pd: request.pd,
                max_send_wr: request.max_send_wr.max(1),
                max_recv_wr: request.max_recv_wr.max(1),
                sq_sig_all: request.sq_sig_all != 0,
                denied_access: Access::NONE,
            },
            geometry,
            mem,
            send_cq,
            recv_cq,
            srq: srq_id,
            phase: QpPhase::Detached,
            worker: 0,
            cookie: 0,
            cm_channel: None,
            is_of_datagrams: false,
            end_is_recorded: false,
            held_disconnect: None,
            device: 0,
            state: m::QpState::Idle,
            ird: 0,
            ord: 0,
            local: m::Addr::NONE,
            peer: m::Addr::NONE,
            pair: None,
            waits_for_receives: false,
            final_send: request.final_send,
            is_recorded: false,
            connection: None,
            most_connections: 0,
        }),
    );
    resources.begin_recording(id, qpn);
    Ok(Served::Replied)
}

pub(in crate::control) fn modify_qp(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::ModifyQp,
) -> Outcome {
    let qpn = Qpn(request.qp_num);
    let client = context.resources.client_mut(id)?;
    let qp = client
        .qps
        .get_mut(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    let detached = qp.phase == QpPhase::Detached;
    if request.flags == m::MODIFY_ACCESS {
        let denied = denied_access(request.denied_access)?;
        qp.attr.denied_access = denied;
        if detached {
            let reply = qp_state_reply(client, qpn, None)?;
            return send_reply::<m::ModifyQp>(client, seq, &reply);
        }
        return ask_worker(
            context,
            id,
            qpn,
            Some(ModifyTarget::DenyAccess(denied)),
            true,
        );
    }
    let is_quiet = request.flags == m::MODIFY_QUIET_DRAIN;
    if request.flags != 0 && !(is_quiet && request.state == m::QpState::Sqd as u32) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!(
                "flags {:#x}: 0 or 1 is allowed, and 2 with SQD",
                request.flags
            ),
        ));
    }
    if request.state == m::QpState::Idle as u32 || request.state == m::QpState::Error as u32 {
        qp.pair = None;
    }
    let Some(state) = m::QpState::from_u32(request.state) else {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown queue pair state {}", request.state),
        ));
    };
    let to = match state {
        m::QpState::Idle if detached => {
            clear_queues(qp)?;
            let reply = qp_state_reply(client, qpn, None)?;
            return send_reply::<m::ModifyQp>(client, seq, &reply);
        }
        m::QpState::Idle => {
            let worker = qp.worker;
            qp.phase = QpPhase::Leaving;
            groups::leave_all(context, id, qpn, worker);
            context
                .workers
                .post_command(worker, Command::ResetQp { qpn });
            let token = context.workers.next_token(Some(id));
            let then = Then::ResetQp(qpn);
            return Ok(Served::Deferred(Deferred::new(token, then)));
        }
        m::QpState::Error if detached => {
            install_in_error(context, id, qpn)?;
            None
        }
        _ if detached => {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "a queue pair that is not connected can be moved only to IDLE and ERROR, not to {state:?}"
                ),
            ));
        }
        m::QpState::Error => {
            qp.state = m::QpState::Error;
            Some(ModifyTarget::Error)
        }
        m::QpState::Closing => Some(ModifyTarget::Closing),
        m::QpState::Sqd => Some(ModifyTarget::SendQueueDrain { is_quiet }),
        m::QpState::Rts => Some(ModifyTarget::ReadyToSend),
        m::QpState::Terminate => Some(ModifyTarget::Terminate),
        m::QpState::Rtr => {
            return Err(Refusal::new(
                libc::EINVAL,
                "a queue pair reaches RTR by accepting a connection",
            ));
        }
    };
    ask_worker(context, id, qpn, to, true)
}

/// Moves a queue pair without a connection to ERROR: a worker flushes its requests, later ones too.
pub(in crate::control) fn install_in_error(
    context: &mut Context,
    id: ClientId,
    qpn: Qpn,
) -> Result<(), Refusal> {
    let client = context.resources.client_mut(id)?;
    let qp = client
        .qps
        .get_mut(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    qp.state = m::QpState::Error;
    qp.phase = QpPhase::Attached;
    qp.worker = 0;
    let setup = Box::new(client.worker_setup(qpn)?);
    context
        .workers
        .post_command(0, Command::InstallQp { setup });
    Ok(())
}

pub(in crate::control) fn query_qp(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    qpn: Qpn,
) -> Outcome {
    let client = context.resources.client_mut(id)?;
    let reply = qp_state_reply(client, qpn, None)?;
    let detached = client
        .qps
        .get(&qpn)
        .is_some_and(|qp| qp.phase == QpPhase::Detached);
    if detached {
        return send_reply::<m::QueryQp>(client, seq, &reply);
    }
    ask_worker(context, id, qpn, None, false)
}

fn ask_worker(
    context: &mut Context,
    id: ClientId,
    qpn: Qpn,
    to: Option<ModifyTarget>,
    modify: bool,
) -> Outcome {
    let worker = context
        .resources
        .client_mut(id)?
        .qps
        .get(&qpn)
        .map_or(0, |qp| qp.worker);
    let token = context.workers.next_token(Some(id));
    context
        .workers
        .post_command(worker, Command::Modify { qpn, to, token });
    let then = Then::ReplyQpState { qpn, modify };
    Ok(Served::Deferred(Deferred::new(token, then)))
}

/// Answers MODIFY_QP, if `modify`, or QUERY_QP with the worker's description of the queue pair.
pub(in crate::control) fn reply_state(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    (qpn, modify): (Qpn, bool),
    info: &QpInfo,
) -> Outcome {
    if let Some(why) = info.refused {
        let why = format!("the queue pair is in {:?}: {why}", info.state);
        return Err(Refusal::new(libc::EINVAL, why));
    }
    let client = resources.client_mut(id)?;
    let reply = qp_state_reply(client, qpn, Some(info))?;
    match modify {
        true => send_reply::<m::ModifyQp>(client, seq, &reply),
        false => send_reply::<m::QueryQp>(client, seq, &reply),
    }
}

/// Makes a queue pair new that its worker has released for a reset, and replies.
pub(in crate::control) fn reset_qp(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    qpn: Qpn,
) -> Outcome {
    // The worker has released it.
    cm_events::on_completions_polled(resources, qpn);
    let client = resources.client_mut(id)?;
    if let Some(qp) = client.qps.get_mut(&qpn) {
        let _ = clear_queues(qp);
        qp.connection = None;
        qp.phase = QpPhase::Detached;
        qp.state = m::QpState::Idle;
        qp.is_of_datagrams = false;
        (qp.worker, qp.ird, qp.ord) = (0, 0, 0);
        (qp.local, qp.peer) = (m::Addr::NONE, m::Addr::NONE);
    }
    let reply = qp_state_reply(client, qpn, None)?;
    send_reply::<m::ModifyQp>(client, seq, &reply)
}

/// Frees a queue pair that its worker has released, and replies.
pub(in crate::control) fn free_qp(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    qpn: Qpn,
) -> Outcome {
    resources.free_qp(id, qpn);
    send_reply::<m::DestroyQp>(resources.client_mut(id)?, seq, &EMPTY)
}

pub(in crate::control) fn destroy_qp(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    qpn: Qpn,
) -> Outcome {
    let client = context.resources.client_mut(id)?;
    let qp = client
        .qps
        .get_mut(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    if qp.phase == QpPhase::Detached {
        return free_qp(&mut context.resources, id, seq, qpn);
    }
    let worker = qp.worker;
    qp.phase = QpPhase::Leaving;
    groups::leave_all(context, id, qpn, worker);
    context
        .workers
        .post_command(worker, Command::DestroyQp { qpn });
    if seq != UNANSWERED {
        let token = context.workers.next_token(Some(id));
        let then = Then::FreeQp(qpn);
        return Ok(Served::Deferred(Deferred::new(token, then)));
    }
    // No reply is wanted: the client has forgotten the queue pair, but it stays here until its
    // worker has released it.
    let client = context.resources.client_mut(id)?;
    if let Some(qp) = client.qps.remove(&qpn) {
        client.departing_qps.insert(qpn, qp);
    }
    Ok(Served::Replied)
}

/// A worker has released a queue pair. Returns the token of the request that waits for it; without one,
/// the client has destroyed the queue pair without a reply.
pub(in crate::control) fn on_released(resources: &mut Resources, qpn: Qpn) -> Option<CommandToken> {
    let id = resources.owner_of_qp(qpn)?;
    let client = resources.clients.get(&id)?;
    let waiting = client.waiting.as_ref().map(|waiting| &waiting.what);
    if let Some(waiting) = waiting.filter(|waiting| waiting.awaits_release(qpn)) {
        return Some(waiting.token);
    }
    if client.departing_qps.contains_key(&qpn) {
        resources.free_qp(id, qpn);
        let client = resources.clients.get(&id)?;
        if client.departing_qps.is_empty() {
            resources.answered.push(id);
        }
    }
    None
}

/// Reports an asynchronous event of a queue pair to its client.
pub(in crate::control) fn on_qp_event(
    resources: &mut Resources,
    client: ClientId,
    qpn: Qpn,
    event: QpEvent,
) {
    let (kind, why) = match event {
        QpEvent::QpFatal => (
            AsyncEventKind::QpFatal,
            "the queue pair ended with an error",
        ),
        QpEvent::QpReqErr => (
            AsyncEventKind::QpReqErr,
            "the peer broke the protocol, or says that we did",
        ),
        QpEvent::QpAccessErr => (AsyncEventKind::QpAccessErr, "remote protection error"),
        QpEvent::SqDrained => (AsyncEventKind::SqDrained, "the send queue is drained"),
    };
    let name = match event {
        QpEvent::QpFatal => "QP_FATAL",
        QpEvent::QpReqErr => "QP_REQ_ERR",
        QpEvent::QpAccessErr => "QP_ACCESS_ERR",
        QpEvent::SqDrained => "SQ_DRAINED",
    };
    resources.record_event(qpn, name, Some(why));
    if kind != AsyncEventKind::SqDrained
        && let Some(qp) = resources.qp_mut(client, qpn)
    {
        qp.state = m::QpState::Error;
    }
    resources.post_async_event(client, kind, qpn.0, why);
}

/// Empties the rings of a queue pair that is in no worker; the client starts over in them. Only
/// headers and state are cleared: stale slots are never read, so the time does not depend on the
/// ring length.
fn clear_queues(qp: &ClientQp) -> Result<(), Refusal> {
    let geometry = &qp.geometry;
    for (offset, len) in [
        (0, HEADER),
        (geometry.rq_offset, HEADER),
        (
            state_offset(geometry.rq_offset, geometry.rq_slots),
            STATE_LINE_LEN,
        ),
    ] {
        qp.mem
            .region
            .fill_zero(qp.mem.offset + offset, len)
            .map_err(|error| Refusal::new(libc::EINVAL, error.to_string()))?;
    }
    Ok(())
}

fn qp_state_reply(
    client: &Client,
    qpn: Qpn,
    info: Option<&QpInfo>,
) -> Result<m::QpStateReply, Refusal> {
    let qp = client
        .qps
        .get(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    Ok(m::QpStateReply {
        state: info.map_or(qp.state, |info| info.state) as u32,
        worker: qp.worker as u32,
        ird: info.map_or(qp.ird, |info| info.ird).into(),
        ord: info.map_or(qp.ord, |info| info.ord).into(),
        draining: info
            .is_some_and(|info| info.state == m::QpState::Sqd && !info.drained)
            .into(),
        mulpdu: info.map_or(0, |info| info.mulpdu).into(),
        local: qp.local,
        peer: qp.peer,
    })
}
