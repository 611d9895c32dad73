//! ibv_modify_qp(3) and ibv_query_qp(3): the control thread answers for detached queue pairs, the
//! worker for those that it has.

use nix::libc;
use siw_shm::Access;
use siw_shm::control::messages as m;
use siw_shm::work_queue::{HEADER, STATE_LINE_LEN, state_offset};

use super::ControlThread;
use super::pending::{DeferredRequest, PendingReply};
use super::requests::*;
use super::resources::{Client, QpPhase};
use crate::ids::{ClientId, CommandToken, Qpn};
use crate::worker::messages::{Command, ModifyTarget, QpInfo};

/// Access rights that a client denies to the peer of a queue pair.
pub(super) fn denied_access(bits: u32) -> Result<Access, Refusal> {
    let denied = Access(bits);
    if !Access::REMOTE.contains(denied) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("access bits {bits:#x}: remote write, read and atomic can be denied"),
        ));
    }
    Ok(denied)
}

impl ControlThread {
    pub(super) fn modify_qp(&mut self, id: ClientId, seq: u32, request: &m::ModifyQp) -> Outcome {
        let qpn = Qpn(request.qp_num);
        let client = self.resources.client_mut(id)?;
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
            return self.ask_worker(id, qpn, Some(ModifyTarget::DenyAccess(denied)), true);
        }
        if request.flags != 0 {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("flags {:#x}: 0 or 1 is allowed", request.flags),
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
                self.workers.post_command(worker, Command::ResetQp { qpn });
                return Ok(Served::Deferred(PendingReply::ResetQp { qpn }));
            }
            m::QpState::Error if detached => {
                qp.state = m::QpState::Error;
                qp.phase = QpPhase::Attached;
                qp.worker = 0;
                let setup = Box::new(Self::worker_qp_setup(client, qpn)?);
                self.workers.post_command(0, Command::InstallQp { setup });
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
            m::QpState::Sqd => Some(ModifyTarget::SendQueueDrain),
            m::QpState::Rts => Some(ModifyTarget::ReadyToSend),
            m::QpState::Terminate => Some(ModifyTarget::Terminate),
            m::QpState::Rtr => {
                return Err(Refusal::new(
                    libc::EINVAL,
                    "a queue pair reaches RTR by accepting a connection",
                ));
            }
        };
        self.ask_worker(id, qpn, to, true)
    }

    pub(super) fn query_qp(&mut self, id: ClientId, seq: u32, qpn: Qpn) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let reply = qp_state_reply(client, qpn, None)?;
        let detached = client
            .qps
            .get(&qpn)
            .is_some_and(|qp| qp.phase == QpPhase::Detached);
        if detached {
            return send_reply::<m::QueryQp>(client, seq, &reply);
        }
        self.ask_worker(id, qpn, None, false)
    }

    fn ask_worker(
        &mut self,
        id: ClientId,
        qpn: Qpn,
        to: Option<ModifyTarget>,
        modify: bool,
    ) -> Outcome {
        let worker = self
            .resources
            .client_mut(id)?
            .qps
            .get(&qpn)
            .map_or(0, |qp| qp.worker);
        let token = self.workers.next_token(Some(id));
        self.workers
            .post_command(worker, Command::Modify { qpn, to, token });
        Ok(Served::Deferred(PendingReply::QpInfo { token, modify }))
    }

    pub(super) fn on_qp_info(&mut self, qpn: Qpn, token: CommandToken, info: &QpInfo) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let waits = |waiting: &mut DeferredRequest| matches!(waiting.what, PendingReply::QpInfo { token: t, .. } if t == token);
        let Some(DeferredRequest {
            seq,
            what: PendingReply::QpInfo { modify, .. },
        }) = client.waiting.take_if(waits)
        else {
            return;
        };
        let kind = if modify {
            <m::ModifyQp as m::Message>::KIND
        } else {
            <m::QueryQp as m::Message>::KIND
        };
        if let Some(why) = info.refused {
            let why = format!("the queue pair is in {:?}: {why}", info.state);
            let _ = client.conn.send_refusal(kind, seq, libc::EINVAL, &why);
        } else if let Ok(reply) = qp_state_reply(client, qpn, Some(info)) {
            let _ = if modify {
                client.conn.send_reply::<m::ModifyQp>(seq, &reply, &[])
            } else {
                client.conn.send_reply::<m::QueryQp>(seq, &reply, &[])
            };
        }
        self.on_answered(id);
    }

    /// The worker has released the queue pair for a reset, which makes it new. Returns false if no
    /// request waits for that.
    pub(super) fn finish_reset(&mut self, id: ClientId, qpn: Qpn) -> bool {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return false;
        };
        let waits = |waiting: &mut DeferredRequest| matches!(waiting.what, PendingReply::ResetQp { qpn: q } if q == qpn);
        let Some(waiting) = client.waiting.take_if(waits) else {
            return false;
        };
        // The worker does not have it any more.
        self.on_completions_polled(qpn);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return true;
        };
        if let Some(qp) = client.qps.get_mut(&qpn) {
            let _ = clear_queues(qp);
            qp.phase = QpPhase::Detached;
            qp.state = m::QpState::Idle;
            (qp.worker, qp.ird, qp.ord) = (0, 0, 0);
            (qp.local, qp.peer) = (m::Addr::NONE, m::Addr::NONE);
        }
        self.resources.forget_connection(id, qpn);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return true;
        };
        if let Ok(reply) = qp_state_reply(client, qpn, None) {
            let _ = client
                .conn
                .send_reply::<m::ModifyQp>(waiting.seq, &reply, &[]);
        }
        self.on_answered(id);
        true
    }
}

/// Empties the rings of a queue pair that is in no worker; the client starts over in them. Only
/// headers and state are cleared: stale slots are never read, so the time does not depend on the
/// ring length.
fn clear_queues(qp: &super::resources::ClientQp) -> Result<(), Refusal> {
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
