//! Actions of operators on a running daemon.

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::control::messages::OperatorAction;
use siw_shm::control::{AsyncEventKind, QpState};

use super::addresses;
use super::routes;
use super::viewer::Viewer;
use crate::control::context::Context;
use crate::control::operator::device_changes::{ChangedParts, DeviceChanges};
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, Served, send_reply};
use crate::control::resources::{QpPhase, Resources};
use crate::host;
use crate::ids::{ClientId, Qpn};
use crate::worker::messages::{Command, ModifyTarget};

/// Reply of an action that has nothing to say.
const NOTHING: m::OperateReply = m::OperateReply {
    len: 0,
    reserved: 0,
    text: [0; m::OPERATE_TEXT],
};

/// Parts of the control thread that actions read or change.
pub(in crate::control) struct OperatedParts<'a> {
    pub device_changes: &'a mut DeviceChanges,
    pub changed: ChangedParts<'a>,
}

/// Outcome of an action.
enum Done {
    Silently,
    /// Text of the reply.
    With(String),
    /// The reply follows.
    Deferred(Deferred),
}

/// Performs the action, for an operator or, where it concerns one user, for that user. What operators
/// change is stored before the reply, so that the change is not forgotten if siwd is killed after it.
pub(in crate::control) fn operate(
    context: &mut Context,
    mut parts: OperatedParts<'_>,
    id: ClientId,
    seq: u32,
    request: &m::Operate,
) -> Outcome {
    let is_operator = context.resources.client_mut(id)?.account.is_operator();
    let done = perform(context, &mut parts, id, request);
    if is_operator {
        let changed = parts.changed;
        changed
            .changes
            .update(context, changed.configuration, changed.routes);
    }
    match done? {
        Done::Silently => {
            send_reply::<m::Operate>(context.resources.client_mut(id)?, seq, &NOTHING)
        }
        Done::With(text) => reply_text(&mut context.resources, id, seq, &text),
        Done::Deferred(deferred) => Ok(Served::Deferred(deferred)),
    }
}

fn perform(
    context: &mut Context,
    parts: &mut OperatedParts<'_>,
    id: ClientId,
    request: &m::Operate,
) -> Result<Done, Refusal> {
    let OperatedParts {
        device_changes,
        changed,
    } = parts;
    let Some(action) = OperatorAction::from_u32(request.action) else {
        let why = format!("no action {}", request.action);
        return Err(Refusal::new(libc::EINVAL, why));
    };
    let caller = context.resources.client_mut(id)?;
    let (viewer, pid) = (Viewer::of(caller), caller.peer.pid);
    match action {
        OperatorAction::EndQueuePair => end_queue_pair(context, viewer, request.target)?,
        OperatorAction::EndClient => end_client(&mut context.resources, viewer, request.target)?,
        OperatorAction::SetLogFilter => {
            viewer.require_operator("change the log")?;
            let filter = request.text.to_text();
            host::set_log_filter(&filter).map_err(|why| Refusal::new(libc::EINVAL, why))?;
            tracing::warn!(pid, "the filter of the log is now {filter:?}");
            changed.configuration.set_log_filter(filter);
        }
        OperatorAction::Reload => {
            viewer.require_operator("reload the configuration")?;
            let token = context.workers.next_token(Some(id));
            changed.configuration.awaiting.push(token);
            changed.configuration.begin_reload(&context.helpers);
            return Ok(Done::Deferred(Deferred::new(token, Then::ReplyAction)));
        }
        OperatorAction::StopCapture => {
            viewer.require_operator("end captures")?;
            changed
                .captures
                .stop(&mut context.workers, request.target)?;
        }
        OperatorAction::ClearFaults => {
            viewer.require_operator("clear fault plans")?;
            let name = request.text.to_text();
            let outcome = changed.faults.clear(&mut context.workers, &name)?;
            return Ok(Done::With(outcome));
        }
        OperatorAction::AddDevice => {
            viewer.require_operator("add devices")?;
            let name = request.text.to_text();
            let token = context.workers.next_token(Some(id));
            device_changes.begin_add(context, changed, &name, token)?;
            return Ok(Done::Deferred(Deferred::new(token, Then::ReplyAction)));
        }
        OperatorAction::RemoveDevice => {
            viewer.require_operator("remove devices")?;
            let device = device_index(request.target)?;
            let is_forced = request.text.to_text() == m::FORCE;
            tracing::warn!(pid, device, is_forced, "an operator removes a device");
            let token = context.workers.next_token(Some(id));
            let is_closed =
                device_changes.begin_removal(context, changed, (device, is_forced), token)?;
            if !is_closed {
                return Ok(Done::Deferred(Deferred::new(token, Then::ReplyAction)));
            }
        }
        OperatorAction::SetLimit => {
            viewer.require_operator("set limits")?;
            let outcome = changed
                .configuration
                .set_limit(&mut context.resources, &request.text.to_text());
            let outcome = outcome.map_err(|why| Refusal::new(libc::EINVAL, why))?;
            return Ok(Done::With(outcome));
        }
        OperatorAction::ChangeRoutes => {
            viewer.require_operator("change routes")?;
            let device = device_index(request.target)?;
            let follows = changed.routes.follows(device);
            let words = request.text.to_text();
            let outcome = routes::change_routes(context, device, follows, &words)?;
            return Ok(Done::With(outcome));
        }
        OperatorAction::ChangeAddresses => {
            viewer.require_operator("change addresses")?;
            let device = device_index(request.target)?;
            let config = context.devices.check_device(device)?.config.clone();
            let words = request.text.to_text();
            let parts = (&*config, &changed.connections.listeners, &*changed.links);
            let outcome = addresses::change_addresses(context, parts, device, &words)?;
            return Ok(Done::With(outcome));
        }
        OperatorAction::ChangeNeighbours => {
            viewer.require_operator("change neighbours")?;
            let device = device_index(request.target)?;
            let follows = changed.routes.follows(device);
            let words = request.text.to_text();
            routes::change_neighbours(context, device, follows, &words)?;
        }
    }
    Ok(Done::Silently)
}

/// Sends the outcome of an action.
pub(in crate::control) fn reply_text(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    text: &str,
) -> Outcome {
    let why = "done, but the outcome is too long for a reply";
    let reply = m::OperateReply::new(text).ok_or_else(|| Refusal::new(libc::EMSGSIZE, why))?;
    send_reply::<m::Operate>(resources.client_mut(id)?, seq, &reply)
}

fn device_index(target: u64) -> Result<usize, Refusal> {
    usize::try_from(target).map_err(|_| no_device(target))
}

fn no_device(target: u64) -> Refusal {
    Refusal::new(libc::ENODEV, format!("no device {target}"))
}

/// Moves a queue pair to ERROR; its work requests are flushed, its connection is reset.
fn end_queue_pair(context: &mut Context, viewer: Viewer, target: u64) -> Result<(), Refusal> {
    let no_such = || Refusal::new(libc::ENOENT, format!("no queue pair {target}"));
    let qpn = u32::try_from(target).map(Qpn).map_err(|_| no_such())?;
    let owner = context.resources.owner_of_qp(qpn).ok_or_else(no_such)?;
    let client = context.resources.client_mut(owner)?;
    if !viewer.sees(client.account.uid()) {
        return Err(no_such());
    }
    let qp = client.qps.get(&qpn).ok_or_else(no_such)?;
    if qp.phase == QpPhase::Detached {
        let why = format!("queue pair {qpn} is not connected");
        return Err(Refusal::new(libc::ENOTCONN, why));
    }
    let worker = qp.worker;
    let why = "an operator ended the queue pair";
    context.record_end(qpn, true, Some(why));
    if let Some(qp) = context.resources.qp_mut(owner, qpn) {
        // The worker's report would name the reset that follows.
        qp.end_is_recorded = true;
        qp.state = QpState::Error;
        qp.pair = None;
    }
    let token = context.workers.next_token(None);
    let to = Some(ModifyTarget::Error);
    let command = Command::Modify { qpn, to, token };
    context.workers.post_command(worker, command);
    let resources = &mut context.resources;
    resources.post_async_event(owner, AsyncEventKind::QpFatal, qpn.0, why);
    Ok(())
}

/// Closes a client with all its objects.
fn end_client(resources: &mut Resources, viewer: Viewer, target: u64) -> Result<(), Refusal> {
    let id = ClientId(target);
    let found = resources.clients.get(&id);
    if !found.is_some_and(|client| viewer.sees(client.account.uid())) {
        return Err(Refusal::new(libc::ENOENT, format!("no client {target}")));
    }
    let why = "an operator ended the client".to_owned();
    resources.faulty.push((id, why));
    Ok(())
}
