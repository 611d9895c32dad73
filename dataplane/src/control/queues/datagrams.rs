//! Datagrams: address handles, and queue pairs without a connection.
//!
//! ```text
//! CREATE_AH -> handle to each worker of the device -> its neighbour answers each of them -> reply
//! START_DATAGRAMS -> the worker that the queue pair's number selects -> barrier -> reply
//! ```

use std::net::IpAddr;
use std::time::Duration;

use nix::libc;
use siw_net::DatagramPath;
use siw_roce::MAX_QPN;
use siw_shm::control::messages as m;

use crate::control::account::quotas::Quota;
use crate::control::client::cm_events::describe_resolution_failure;
use crate::control::context::Context;
use crate::control::device::devices::{check_own_address, is_on_network, no_route, socket_addr};
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply};
use crate::control::resources::{QpPhase, Resources};
use crate::device_view::DeviceView;
use crate::ids::{AhId, ClientId, CommandToken, Qpn, ResolutionId};
use crate::worker::messages::{AhRequest, Command, ResolutionFailure};

/// Hop limit of address handles that name none.
const DEFAULT_HOP_LIMIT: u8 = 64;
/// Largest flow label of IPv6.
const MAX_FLOW_LABEL: u32 = 0xf_ffff;
/// Time for a neighbour's answer if the client names none.
const DEFAULT_TIMEOUT_MS: u32 = 1000;

/// Addresses and fields of the IP header, as the client requests them.
fn path_of(view: &DeviceView, request: &m::CreateAh) -> Result<DatagramPath, Refusal> {
    let missing = || Refusal::new(libc::EDESTADDRREQ, "the destination address is missing");
    let to = socket_addr(request.remote).ok_or_else(missing)?.ip();
    if to.is_unspecified() {
        let why = format!("{to} is the address of no host and of no group");
        return Err(Refusal::new(libc::EINVAL, why));
    }
    let from = match socket_addr(request.local) {
        Some(local) => local.ip(),
        None => source_for(view, to).ok_or_else(|| no_route(to))?,
    };
    check_own_address(view, from, to)?;
    if request.flow_label > MAX_FLOW_LABEL {
        let why = format!("flow label {:#x}: it has 20 bits", request.flow_label);
        return Err(Refusal::new(libc::EINVAL, why));
    }
    Ok(DatagramPath {
        from,
        to,
        hop_limit: match request.hop_limit {
            0 => DEFAULT_HOP_LIMIT,
            limit => limit,
        },
        traffic_class: request.traffic_class,
        flow_label: request.flow_label,
        source_port: 0,
    })
}

/// The address of a device from which datagrams to `to` are sent: one on its network, or the first.
fn source_for(view: &DeviceView, to: IpAddr) -> Option<IpAddr> {
    let of_family = || {
        let addresses = view.addresses.iter();
        addresses.filter(|cidr| cidr.addr.is_ipv4() == to.is_ipv4())
    };
    let near = of_family().filter(|cidr| is_on_network(cidr, to));
    let chosen = near.max_by_key(|cidr| cidr.prefix);
    chosen.or_else(|| of_family().next()).map(|cidr| cidr.addr)
}

/// Adds an address handle to the workers of its device; [`reply_ah`] replies.
pub(in crate::control) fn create_ah(
    context: &mut Context,
    id: ClientId,
    request: &m::CreateAh,
) -> Outcome {
    let device = request.device as usize;
    let view = context.devices.check_device(device)?;
    let path = path_of(view, request)?;
    let workers = view.workers.clone();
    let resources = &mut context.resources;
    let charge = resources.charge(id, [(Quota::AddressHandles, 1)])?;
    let ah = AhId(resources.ahs.allocate_number()?);
    let client = resources.client_mut(id)?;
    client.ahs.insert(ah, charge.of(()));
    let (user, resolution) = (client.peer.uid, ResolutionId(client.next_number()));
    let timeout = match request.timeout_ms {
        0 => DEFAULT_TIMEOUT_MS,
        timeout => timeout.min(m::MAX_AH_TIMEOUT_MS),
    };
    let token = context.workers.next_token(Some(id));
    for worker in &workers {
        let request = AhRequest {
            ah,
            client: id,
            user,
            device,
            path,
            resolution,
            timeout: Duration::from_millis(timeout.into()),
            token,
        };
        context
            .workers
            .post_command(*worker, Command::AddAh(Box::new(request)));
    }
    let failure = None;
    Ok(Served::Deferred(Deferred {
        token,
        left: workers.len(),
        then: Then::ReplyAh { ah, failure },
    }))
}

/// Notes that a worker did not reach the neighbour of an address handle.
pub(in crate::control) fn note_failure(
    resources: &mut Resources,
    token: CommandToken,
    failure: ResolutionFailure,
) {
    if let Some((deferred, _)) = resources.deferred_mut(token)
        && let Then::ReplyAh { failure: first, .. } = &mut deferred.then
    {
        first.get_or_insert(failure);
    }
}

/// Replies to the creation of an address handle; one without a neighbour is destroyed.
pub(in crate::control) fn reply_ah(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    ah: AhId,
    failure: Option<ResolutionFailure>,
) -> Outcome {
    if let Some(failure) = failure {
        remove_ah(context, id, ah)?;
        let (errno, why) = describe_resolution_failure(&failure);
        return Err(Refusal::new(errno, why));
    }
    let (number, reserved) = (ah.0, 0);
    let reply = m::IdReply {
        id: number,
        reserved,
    };
    send_reply::<m::CreateAh>(context.resources.client_mut(id)?, seq, &reply)
}

pub(in crate::control) fn destroy_ah(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    ah: AhId,
) -> Outcome {
    remove_ah(context, id, ah)?;
    send_reply::<m::DestroyAh>(context.resources.client_mut(id)?, seq, &EMPTY)
}

/// Removes an address handle. Its number may be reused at once: workers execute commands in order.
fn remove_ah(context: &mut Context, id: ClientId, ah: AhId) -> Result<(), Refusal> {
    let client = context.resources.client_mut(id)?;
    let removed = client.ahs.remove(&ah);
    removed.ok_or_else(|| Refusal::no_such("address handle", ah.0))?;
    context.workers.post_to_all(|| Command::RemoveAh { ah });
    context.resources.ahs.release_number(ah.0);
    Ok(())
}

/// Has the workers of a device take datagrams to addresses that the kernel has, too.
pub(in crate::control) fn take_shared_datagrams(context: &mut Context, device: usize) {
    let Some(view) = context.devices.views.get(device) else {
        return;
    };
    if view.host_ports.is_some() {
        for worker in &view.workers {
            let command = Command::TakeSharedDatagrams { device };
            context.workers.post_command(*worker, command);
        }
    }
}

/// Makes a queue pair one of datagrams, or changes its Q_Key; [`reply_started`] replies.
pub(in crate::control) fn start_datagrams(
    context: &mut Context,
    id: ClientId,
    request: &m::StartDatagrams,
) -> Outcome {
    let (qpn, device, qkey) = (Qpn(request.qp_num), request.device as usize, request.qkey);
    let worker = {
        let view = context.devices.check_device(device)?;
        view.steering.owner_of_datagrams(qpn.0)
    };
    let client = context.resources.client_mut(id)?;
    let is_operator = client.account.is_operator();
    let qp = client
        .qps
        .get_mut(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    if qkey & m::CONTROLLED_QKEY != 0 && !is_operator {
        let why = format!("the Q_Key {qkey:#x} is controlled: only operators may set it");
        return Err(Refusal::new(libc::EPERM, why));
    }
    if qpn.0 > MAX_QPN {
        let why = format!("queue pair {qpn} has a number of more than 24 bits: create another one");
        return Err(Refusal::new(libc::EOVERFLOW, why));
    }
    if qp.phase == QpPhase::Attached && qp.is_of_datagrams && qp.state == m::QpState::Rts {
        if device != qp.device {
            let why = "the queue pair belongs to another device: reset it first";
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let command = Command::SetQkey { qpn, qkey };
        context.workers.post_command(worker, command);
    } else if qp.phase == QpPhase::Detached && qp.pair.is_none() {
        qp.phase = QpPhase::Attached;
        qp.state = m::QpState::Rts;
        qp.is_of_datagrams = true;
        (qp.worker, qp.device) = (worker, device);
        let setup = Box::new(client.worker_setup(qpn)?);
        take_shared_datagrams(context, device);
        let command = Command::StartDatagrams {
            setup,
            device,
            qkey,
        };
        context.workers.post_command(worker, command);
    } else {
        let why = "the queue pair is or was connected, or is in the error state: reset it first";
        return Err(Refusal::new(libc::EISCONN, why));
    }
    let token = context.workers.next_token(Some(id));
    context
        .workers
        .post_command(worker, Command::Barrier { token });
    let then = Then::ReplyDatagrams;
    Ok(Served::Deferred(Deferred::new(token, then)))
}

/// Replies when the worker has the queue pair, and its new Q_Key.
pub(in crate::control) fn reply_started(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
) -> Outcome {
    send_reply::<m::StartDatagrams>(resources.client_mut(id)?, seq, &EMPTY)
}
