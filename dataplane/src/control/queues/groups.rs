//! Multicast groups of queue pairs of datagrams (ibv_attach_mcast(3)).
//!
//! ```text
//! ATTACH_GROUP -> first member: CHANGE_GROUP to all workers of the device -> membership report on the link
//!              -> CHANGE_MEMBERSHIP to the queue pair's worker -> barrier -> reply
//! ```
//! A membership ends with DETACH_GROUP, with a reset or the end of its queue pair, or with its client.

use std::net::IpAddr;

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::control::{MAX_GROUPS, MAX_MEMBERSHIPS};

use crate::control::account::quotas::Quota;
use crate::control::context::Context;
use crate::control::device::devices::socket_addr;
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply};
use crate::control::resources::{QpPhase, Resources};
use crate::ids::{ClientId, Qpn};
use crate::worker::messages::{Command, Membership};

/// The queue pair's device and worker, if it sends and receives datagrams.
fn datagram_qp(
    resources: &mut Resources,
    id: ClientId,
    qpn: Qpn,
) -> Result<(usize, usize), Refusal> {
    let client = resources.client_mut(id)?;
    let qp = client.qps.get(&qpn);
    let qp = qp.ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    if qp.phase != QpPhase::Attached || !qp.is_of_datagrams {
        let why = "only queue pairs of datagrams (UD) in RTR or RTS can be members of a group";
        return Err(Refusal::new(libc::EINVAL, why));
    }
    Ok((qp.device, qp.worker))
}

fn group_of(addr: m::Addr) -> Result<IpAddr, Refusal> {
    let group = socket_addr(addr).map(|addr| addr.ip());
    group.filter(IpAddr::is_multicast).ok_or_else(|| {
        let why = "the GID is not the address of a multicast group";
        Refusal::new(libc::EINVAL, why)
    })
}

/// Makes a queue pair a member of a group, see [`m::AttachGroup`]; [`reply_changed`] replies.
pub(in crate::control) fn attach(
    context: &mut Context,
    id: ClientId,
    request: &m::AttachGroup,
) -> Outcome {
    let (qpn, group) = (Qpn(request.qp_num), group_of(request.group)?);
    let (device, worker) = datagram_qp(&mut context.resources, id, qpn)?;
    let view = context.devices.check_device(device)?;
    if !view
        .addresses
        .iter()
        .any(|cidr| cidr.addr.is_ipv4() == group.is_ipv4())
    {
        let why = format!(
            "device {} has no address of the family of {group}",
            view.name
        );
        return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
    }
    if view.config.af_xdp.is_some() {
        let why = format!(
            "the kernel gets the frames to groups of device {}, which uses AF_XDP beside it: give siwd a device \
             of its own for multicast, or one that it shares by host_interface",
            view.name
        );
        return Err(Refusal::new(libc::EOPNOTSUPP, why));
    }
    let membership = Membership {
        client: id,
        qpn,
        device,
        group,
    };
    let key = (qpn, device, group);
    let resources = &mut context.resources;
    let client = resources.client_mut(id)?;
    if !client.memberships.contains_key(&key) {
        if client.memberships.len() >= MAX_MEMBERSHIPS as usize {
            let why = format!("{MAX_MEMBERSHIPS} memberships of groups is the limit of a client");
            return Err(Refusal::new(libc::ENOMEM, why));
        }
        let on_device = resources.groups.range((device, IpAddr::from([0; 4]))..);
        let on_device = on_device.take_while(|((of, _), _)| *of == device).count();
        let is_new = !resources.groups.contains_key(&(device, group));
        if is_new && on_device >= MAX_GROUPS as usize {
            let why = format!("{MAX_GROUPS} groups is the limit of a device");
            return Err(Refusal::new(libc::ENOMEM, why));
        }
        let charge = resources.charge(id, [(Quota::Heap, 512)])?;
        let client = resources.client_mut(id)?;
        client.memberships.insert(key, charge.of(()));
        *resources.groups.entry((device, group)).or_default() += 1;
        if is_new {
            change_group(context, device, group, true);
        }
        let command = Command::ChangeMembership {
            membership,
            attaches: true,
        };
        context.workers.post_command(worker, command);
    }
    await_change(context, id, worker, true)
}

/// Ends a membership, see [`m::DetachGroup`]; [`reply_changed`] replies.
pub(in crate::control) fn detach(
    context: &mut Context,
    id: ClientId,
    request: &m::DetachGroup,
) -> Outcome {
    let (qpn, group) = (Qpn(request.qp_num), group_of(request.group)?);
    let (device, worker) = datagram_qp(&mut context.resources, id, qpn)?;
    let client = context.resources.client_mut(id)?;
    let removed = client.memberships.remove(&(qpn, device, group));
    removed.ok_or_else(|| {
        let why = format!("queue pair {qpn} is not a member of {group}");
        Refusal::new(libc::EINVAL, why)
    })?;
    end_membership(context, id, worker, (qpn, device, group));
    await_change(context, id, worker, false)
}

/// Ends the memberships of a queue pair, before its worker releases it.
pub(in crate::control) fn leave_all(context: &mut Context, id: ClientId, qpn: Qpn, worker: usize) {
    loop {
        let Some(client) = context.resources.clients.get_mut(&id) else {
            return;
        };
        let mut memberships = client.memberships.keys();
        let Some(key) = memberships.find(|(of, _, _)| *of == qpn).copied() else {
            return;
        };
        client.memberships.remove(&key);
        end_membership(context, id, worker, key);
    }
}

/// Ends what a departed client has had in groups; its workers forget the memberships themselves.
pub(in crate::control) fn leave_of_client(
    context: &mut Context,
    memberships: impl Iterator<Item = (Qpn, usize, IpAddr)>,
) {
    for (_, device, group) in memberships {
        count_down(context, device, group);
    }
}

fn end_membership(
    context: &mut Context,
    client: ClientId,
    worker: usize,
    (qpn, device, group): (Qpn, usize, IpAddr),
) {
    let membership = Membership {
        client,
        qpn,
        device,
        group,
    };
    let command = Command::ChangeMembership {
        membership,
        attaches: false,
    };
    context.workers.post_command(worker, command);
    count_down(context, device, group);
}

/// Counts the end of a membership; the last one of a group ends the reception.
fn count_down(context: &mut Context, device: usize, group: IpAddr) {
    let Some(members) = context.resources.groups.get_mut(&(device, group)) else {
        return;
    };
    *members = members.saturating_sub(1);
    if *members == 0 {
        context.resources.groups.remove(&(device, group));
        change_group(context, device, group, false);
    }
}

fn change_group(context: &mut Context, device: usize, group: IpAddr, joins: bool) {
    let Ok(view) = context.devices.check_device(device) else {
        return;
    };
    for worker in &view.workers {
        let command = Command::ChangeGroup {
            device,
            group,
            joins,
        };
        context.workers.post_command(*worker, command);
    }
}

fn await_change(context: &mut Context, id: ClientId, worker: usize, attached: bool) -> Outcome {
    let token = context.workers.next_token(Some(id));
    context
        .workers
        .post_command(worker, Command::Barrier { token });
    let then = Then::ReplyGroup { attached };
    Ok(Served::Deferred(Deferred::new(token, then)))
}

/// Replies when the worker knows the membership, or its end.
pub(in crate::control) fn reply_changed(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    attached: bool,
) -> Outcome {
    let client = resources.client_mut(id)?;
    match attached {
        true => send_reply::<m::AttachGroup>(client, seq, &EMPTY),
        false => send_reply::<m::DetachGroup>(client, seq, &EMPTY),
    }
}
