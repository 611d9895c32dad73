//! Routes and neighbours that operators add to a device of a running daemon, in addition to those of its
//! configuration. They are gone after a restart (`runtime_changes.rs`). A device that follows the kernel's
//! routes gets them there.

use std::net::IpAddr;
use std::sync::Arc;

use nix::libc;
use serde_json::{Value, json};
use siw_host::netlink::KernelNeighbour;
use siw_net::{IpCidr, Route};
use siw_shm::control::messages::OPERATE_TEXT;

use super::addresses::is_neighbour;
use crate::config::{MAX_PERMANENT_NEIGHBOURS, MacAddress, PermanentNeighbour, reserved_in};
use crate::control::context::Context;
use crate::control::request::refusal::Refusal;
use crate::device_view::DeviceView;
use crate::worker::messages::Command;

/// Maximum number of routes that operators can add to a device.
const MAX_ROUTES: usize = 256;

const USAGE: &str = "routes: add NETWORK via ROUTER, del NETWORK, flush, show, or show FROM";

fn invalid(why: impl Into<String>) -> Refusal {
    Refusal::new(libc::EINVAL, why)
}

/// Changes the routes of a device as the words say: `add NETWORK via ROUTER`, `del NETWORK`, `flush`, or
/// `show FROM`. Returns the routes that operators have added as JSON: as many as fit into a reply, without
/// the first FROM ones.
pub(in crate::control) fn change_routes(
    context: &mut Context,
    device: usize,
    follows_kernel: bool,
    words: &str,
) -> Result<String, Refusal> {
    let view = usable_device(context, device, follows_kernel)?;
    let mut routes = view.learned_routes.clone();
    let words: Vec<&str> = words.split_whitespace().collect();
    let mut from = 0;
    match words[..] {
        ["add", network, "via", router] => {
            let to = parse_network(network)?;
            let via = parse_address(router)?;
            check_router(view, via, to.addr)?;
            if routes.routes.iter().any(|route| route.to == to) {
                let why = format!("device {} has a route to {network} already", view.name);
                return Err(Refusal::new(libc::EEXIST, why));
            }
            if routes.routes.len() >= MAX_ROUTES {
                let why = format!("at most {MAX_ROUTES} routes can be added to a device");
                return Err(Refusal::new(libc::ENOSPC, why));
            }
            routes.routes.push(Route { to, via });
        }
        ["del", network] => {
            let to = parse_network(network)?;
            let before = routes.routes.len();
            routes.routes.retain(|route| route.to != to);
            if routes.routes.len() == before {
                let why = format!(
                    "no route to {network} was added to device {}; those of its configuration stay",
                    view.name
                );
                return Err(Refusal::new(libc::ESRCH, why));
            }
        }
        ["flush"] => routes.routes.clear(),
        ["show"] => {}
        ["show", number] => from = number.parse().map_err(|_| invalid(USAGE))?,
        _ => return Err(invalid(USAGE)),
    }
    let text = first_rows(routes.routes.iter().skip(from).map(|route| {
        let to = format!("{}/{}", route.to.addr, route.to.prefix);
        json!({ "device": view.name, "to": to, "via": route.via.to_string() })
    }));
    if routes != view.learned_routes {
        tracing::warn!(device = %view.name, "an operator changes routes: {}", words.join(" "));
        context.devices.views[device].learned_routes = routes.clone();
        let routes = Arc::new(routes);
        context.workers.post_to_all(|| Command::LearnRoutes {
            device,
            routes: routes.clone(),
        });
    }
    Ok(text)
}

/// JSON array of the first rows, as many as fit into a reply.
fn first_rows(rows: impl Iterator<Item = Value>) -> String {
    let mut text = "[".to_owned();
    for row in rows {
        let row = row.to_string();
        if text.len() + 1 + row.len() + 1 > OPERATE_TEXT {
            break;
        }
        if text.len() > 1 {
            text.push(',');
        }
        text.push_str(&row);
    }
    text + "]"
}

/// Adds or removes the Ethernet address of a neighbour of a device: `add ADDRESS lladdr MAC`, which is not
/// confirmed by ARP or NDP, `del ADDRESS`, or `flush`, which forgets all neighbours.
pub(in crate::control) fn change_neighbours(
    context: &mut Context,
    device: usize,
    follows_kernel: bool,
    words: &str,
) -> Result<(), Refusal> {
    let view = usable_device(context, device, follows_kernel)?;
    let words: Vec<&str> = words.split_whitespace().collect();
    let (address, mac) = match words[..] {
        ["flush"] => {
            tracing::warn!(device = %view.name, "an operator forgets all neighbours");
            context.devices.views[device].permanent_neighbours.clear();
            context
                .workers
                .post_to_all(|| Command::FlushNeighbours { device });
            return Ok(());
        }
        ["add", address, "lladdr", mac] => {
            let mac: Result<MacAddress, _> = mac.parse();
            let mac = mac.map_err(|error| invalid(error.to_string()))?;
            (parse_address(address)?, Some(mac))
        }
        ["del", address] => (parse_address(address)?, None),
        _ => {
            return Err(invalid(
                "neighbours: add ADDRESS lladdr MAC, del ADDRESS, or flush",
            ));
        }
    };
    check_router(view, address, address)?;
    let mut permanent = view.permanent_neighbours.clone();
    permanent.retain(|neighbour| neighbour.address != address);
    permanent.extend(mac.map(|mac| PermanentNeighbour { address, mac }));
    if permanent.len() > MAX_PERMANENT_NEIGHBOURS {
        let why = format!("at most {MAX_PERMANENT_NEIGHBOURS} neighbours can be added to a device");
        return Err(Refusal::new(libc::ENOSPC, why));
    }
    tracing::warn!(device = %view.name, "an operator changes neighbours: {}", words.join(" "));
    context.devices.views[device].permanent_neighbours = permanent;
    let neighbour = KernelNeighbour {
        address,
        mac: mac.map(|mac| mac.0),
        is_permanent: mac.is_some(),
    };
    context
        .workers
        .post_to_all(|| Command::LearnNeighbour { device, neighbour });
    Ok(())
}

/// Gives the workers the permanent neighbours of a device that was opened.
pub(in crate::control) fn post_permanent_neighbours(context: &mut Context, device: usize) {
    for permanent in &context.devices.views[device].permanent_neighbours {
        let neighbour = KernelNeighbour {
            address: permanent.address,
            mac: Some(permanent.mac.0),
            is_permanent: true,
        };
        context
            .workers
            .post_to_all(|| Command::LearnNeighbour { device, neighbour });
    }
}

/// Gives a device that was opened again the routes that operators had added to it.
pub(in crate::control) fn post_added_routes(context: &mut Context, device: usize) {
    let routes = Arc::new(context.devices.views[device].learned_routes.clone());
    context.workers.post_to_all(|| Command::LearnRoutes {
        device,
        routes: routes.clone(),
    });
}

/// A device whose routes and neighbours operators can change.
fn usable_device(
    context: &Context,
    device: usize,
    follows_kernel: bool,
) -> Result<&DeviceView, Refusal> {
    let view = context.devices.check_device(device)?;
    if follows_kernel {
        let interface = view.interface.as_deref().unwrap_or("its interface");
        let why = format!(
            "device {} follows the kernel (host_routes): use ip(8) on {interface}",
            view.name
        );
        return Err(Refusal::new(libc::EOPNOTSUPP, why));
    }
    Ok(view)
}

fn parse_network(text: &str) -> Result<IpCidr, Refusal> {
    text.parse()
        .map_err(|error: siw_net::NetError| invalid(error.to_string()))
}

fn parse_address(text: &str) -> Result<IpAddr, Refusal> {
    let why = || invalid(format!("{text:?} is not an IP address"));
    text.parse().map_err(|_| why())
}

/// Checks that a router is a neighbour of the device, and of the destination's family.
fn check_router(view: &DeviceView, router: IpAddr, to: IpAddr) -> Result<(), Refusal> {
    let mut addresses = view.addresses.iter();
    if let Some(why) = addresses.find_map(|cidr| reserved_in(cidr, router)) {
        return Err(invalid(format!("{router}: {why}")));
    }
    if is_neighbour(&view.addresses, router) && router.is_ipv4() == to.is_ipv4() {
        return Ok(());
    }
    Err(invalid(format!(
        "{router}: it must be on one of the networks of device {}, of the destination's family, and not the device itself",
        view.name
    )))
}
