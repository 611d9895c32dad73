//! Addresses that operators add to a device of a running daemon, or remove from it, until a restart. New
//! connections use them at once, and so do listeners on all addresses. An address in use stays.

use std::net::IpAddr;
use std::sync::Arc;

use nix::libc;
use serde_json::json;
use siw_net::IpCidr;
use siw_shm::control::messages::MAX_ADDRESSES;

use crate::config::{Cidr, DeviceConfig, reserved_in};
use crate::control::connection::listening::Listeners;
use crate::control::context::Context;
use crate::control::device::devices::{LocalScope, is_on_network};
use crate::control::device::links::LinkMonitor;
use crate::control::request::refusal::Refusal;
use crate::control::resources::QpPhase;
use crate::worker::messages::Command;

/// Smallest MTU of IPv6 (RFC 8200 section 5).
const MIN_MTU_OF_IPV6: u16 = 1280;

fn invalid(why: impl Into<String>) -> Refusal {
    Refusal::new(libc::EINVAL, why)
}

/// Changes the addresses of a device as the words say: `add ADDRESS/PREFIX`, `del ADDRESS`, `flush`, or
/// `show`. Returns its addresses, and those of its configuration that were removed, as JSON.
pub(in crate::control) fn change_addresses(
    context: &mut Context,
    (config, listeners, links): (&DeviceConfig, &Listeners, &LinkMonitor),
    device: usize,
    words: &str,
) -> Result<String, Refusal> {
    let view = context.devices.check_device(device)?;
    let name = view.name.clone();
    let before = view.addresses.clone();
    let mut after = before.clone();
    let words: Vec<&str> = words.split_whitespace().collect();
    match words[..] {
        ["add", address] => {
            let cidr: Cidr = address
                .parse()
                .map_err(|error: crate::config::ValueError| invalid(error.to_string()))?;
            check_new(context, device, cidr)?;
            after.push(cidr);
        }
        ["del", address] => {
            let plain = address.split('/').next().unwrap_or(address);
            let address: IpAddr = plain
                .parse()
                .map_err(|_| invalid(format!("{plain:?} is not an IP address")))?;
            after.retain(|cidr| cidr.addr != address);
            if after.len() == before.len() {
                let why = format!("device {name} has no address {address}");
                return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
            }
        }
        ["flush"] => after.retain(|cidr| config.addresses.get_ref().contains(cidr)),
        ["show"] => {}
        _ => {
            return Err(invalid(
                "addresses: add ADDRESS/PREFIX, del ADDRESS, flush, or show",
            ));
        }
    }
    if after != before {
        check_alone(config, &name)?;
        check_removal(context, config, listeners, device, &after)?;
        tracing::warn!(device = %name, "an operator changes addresses: {}", words.join(" "));
        apply(context, listeners, device, &before, after);
        links.publish_addresses(context, device);
    }
    let addresses = &context.devices.views[device].addresses;
    let configured = config.addresses.get_ref();
    let present = addresses.iter().map(|cidr| {
        let state = match configured.contains(cidr) {
            true => "configured",
            false => "added",
        };
        (cidr, state)
    });
    let removed = configured.iter().filter(|cidr| !addresses.contains(cidr));
    let removed = removed.map(|cidr| (cidr, "removed"));
    let rows = present.chain(removed).map(|(cidr, state)| {
        let address = format!("{}/{}", cidr.addr, cidr.prefix);
        json!({ "device": name, "address": address, "state": state })
    });
    Ok(json!(rows.collect::<Vec<_>>()).to_string())
}

/// Refuses devices whose addresses the kernel has, too, or has to know.
fn check_alone(config: &DeviceConfig, name: &str) -> Result<(), Refusal> {
    let interface = config.kernel_interface();
    let Some(interface) =
        interface.filter(|_| config.af_xdp.is_some() || config.host_interface.is_some())
    else {
        return Ok(());
    };
    let why = format!(
        "device {name} divides the frames of {interface} with the kernel by its addresses: change `addresses` in its configuration and restart siwd"
    );
    Err(Refusal::new(libc::EOPNOTSUPP, why))
}

/// Checks an address that a device is to get.
fn check_new(context: &Context, device: usize, cidr: Cidr) -> Result<(), Refusal> {
    let views = &context.devices.views;
    let mut owners = views.iter().filter(|view| !view.is_gone);
    let owner = owners.find(|view| view.addresses.iter().any(|own| own.addr == cidr.addr));
    if let Some(owner) = owner {
        let why = format!(
            "device {} has the address {} already",
            owner.name, cidr.addr
        );
        return Err(Refusal::new(libc::EEXIST, why));
    }
    if let Some(why) = reserved_in(&cidr, cidr.addr) {
        return Err(invalid(format!("address {cidr}: {why}")));
    }
    let view = &views[device];
    if view.addresses.len() >= MAX_ADDRESSES {
        let why = format!(
            "device {} has {MAX_ADDRESSES} addresses, the most that programs see: delete one first",
            view.name
        );
        return Err(Refusal::new(libc::ENOSPC, why));
    }
    if cidr.addr.is_ipv6() && view.mtu < MIN_MTU_OF_IPV6 {
        return Err(invalid(format!(
            "IPv6 needs an mtu of {MIN_MTU_OF_IPV6}; that of device {} is {}",
            view.name, view.mtu
        )));
    }
    Ok(())
}

/// Checks that nothing uses the addresses that `after` lacks.
fn check_removal(
    context: &Context,
    config: &DeviceConfig,
    listeners: &Listeners,
    device: usize,
    after: &[Cidr],
) -> Result<(), Refusal> {
    let view = &context.devices.views[device];
    let busy = |why: String| Err(Refusal::new(libc::EBUSY, why));
    if after.is_empty() {
        return busy(format!("device {} needs at least one address", view.name));
    }
    let removed = view.addresses.iter().filter(|cidr| !after.contains(cidr));
    for address in removed.map(|cidr| cidr.addr) {
        let clients = context.resources.clients.values();
        let connections = clients.flat_map(|client| client.qps.values()).filter(|qp| {
            let local = qp.local.to_socket_addr();
            qp.phase != QpPhase::Detached && local.is_some_and(|local| local.ip() == address)
        });
        let connections = connections.count();
        let bound = listeners
            .iter()
            .filter(|(_, listener)| listener.scope == LocalScope::One(address))
            .count();
        if connections + bound > 0 {
            return busy(format!(
                "{address} is in use by {connections} queue pairs and {bound} listeners: end them first (siwctl show qp, siwctl show cm-id)"
            ));
        }
    }
    let gateways = [
        config
            .gateway
            .as_ref()
            .map(|gateway| IpAddr::V4(*gateway.get_ref())),
        config
            .gateway6
            .as_ref()
            .map(|gateway| IpAddr::V6(*gateway.get_ref())),
    ];
    let configured = config.routes.iter().map(|route| *route.via.get_ref());
    let added = view.learned_routes.routes.iter().map(|route| route.via);
    let mut routers = gateways
        .into_iter()
        .flatten()
        .chain(configured)
        .chain(added);
    let lost = routers
        .find(|router| is_neighbour(&view.addresses, *router) && !is_neighbour(after, *router));
    match lost {
        Some(router) => busy(format!(
            "router {router} of device {} is reached through this address: remove its routes first",
            view.name
        )),
        None => Ok(()),
    }
}

/// Returns true if a router is on the link of a device with these addresses, and not the device itself.
pub(in crate::control) fn is_neighbour(addresses: &[Cidr], router: IpAddr) -> bool {
    addresses.iter().any(|cidr| match router {
        IpAddr::V6(address) if address.is_unicast_link_local() => cidr.addr.is_ipv6(),
        _ => cidr.addr != router && is_on_network(cidr, router),
    })
}

/// Gives a device other addresses. Listeners on all addresses of a family listen on the new ones.
fn apply(
    context: &mut Context,
    listeners: &Listeners,
    device: usize,
    before: &[Cidr],
    after: Vec<Cidr>,
) {
    let cidrs = after.iter().map(|cidr| IpCidr::new(cidr.addr, cidr.prefix));
    let addresses: Arc<[IpCidr]> = cidrs.collect();
    context.workers.post_to_all(|| Command::SetAddresses {
        device,
        addresses: addresses.clone(),
    });
    let new = after.iter().filter(|cidr| !before.contains(cidr));
    let new: Vec<IpAddr> = new.map(|cidr| cidr.addr).collect();
    let view = &mut context.devices.views[device];
    view.gids.set_addresses(after.iter().map(|cidr| cidr.addr));
    view.addresses = after;
    for (number, listener) in listeners.iter() {
        let is_of_family = matches!(listener.scope, LocalScope::Ipv4 | LocalScope::Ipv6);
        let owner = context.resources.clients.get(&listener.client);
        let Some(owner) = owner
            .filter(|_| is_of_family && listener.listening && listener.devices.contains(&device))
        else {
            continue;
        };
        for address in new
            .iter()
            .filter(|address| listener.scope.includes(**address))
        {
            for &worker in &context.devices.views[device].workers {
                let command = Command::Listen {
                    listener: number,
                    user: owner.account.uid(),
                    device,
                    local: Some(*address),
                    port: listener.port,
                    backlog: listener.backlog as usize,
                    mpa: listener.mpa,
                    is_streaming: listener.is_streaming,
                };
                context.workers.post_command(worker, command);
            }
        }
    }
}
