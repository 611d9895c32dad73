//! Devices with `host_routes = true`: the kernel's routes and neighbours on the shared interface are passed to
//! every worker ([`RouteFollower`] reads them). Configured routes take precedence over the kernel's.

use std::sync::Arc;

use siw_host::netlink::KernelNeighbour;
use siw_host::routes::{RouteChange, RouteFollower};

use super::devices::Devices;
use crate::control::threads::workers::WorkerSet;
use crate::worker::messages::Command;

/// Loads the routes and neighbours of one device.
pub(in crate::control) fn load_host_routes(
    follower: &RouteFollower,
    devices: &mut Devices,
    workers: &mut WorkerSet,
    device: usize,
) {
    load_routes(follower, devices, workers, device);
    load_neighbours(follower, devices, workers, device);
}

/// Passes changes to the workers.
pub(in crate::control) fn follow_host_routes(
    follower: &mut RouteFollower,
    devices: &mut Devices,
    workers: &mut WorkerSet,
) {
    for change in follower.take_changes() {
        match change {
            RouteChange::Neighbour(device, neighbour) => post_neighbour(workers, device, neighbour),
            RouteChange::Neighbours(device) => load_neighbours(follower, devices, workers, device),
            RouteChange::Routes(device) => load_routes(follower, devices, workers, device),
        }
    }
}

fn load_routes(
    follower: &RouteFollower,
    devices: &mut Devices,
    workers: &mut WorkerSet,
    device: usize,
) {
    let Some(view) = devices.views.get_mut(device) else {
        return;
    };
    match follower.read_routes(device) {
        Ok(Some(routes)) if routes != view.learned_routes => {
            view.learned_routes = routes.clone();
            let routes = Arc::new(routes);
            workers.post_to_all(|| Command::LearnRoutes {
                device,
                routes: routes.clone(),
            });
        }
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(device = %view.name, "the kernel's routes cannot be read: {error}");
        }
    }
}

fn load_neighbours(
    follower: &RouteFollower,
    devices: &Devices,
    workers: &mut WorkerSet,
    device: usize,
) {
    match follower.read_neighbours(device) {
        Ok(neighbours) => {
            for neighbour in neighbours {
                post_neighbour(workers, device, neighbour);
            }
        }
        Err(error) => {
            let view = devices.views.get(device);
            let name = view.map_or("", |view| view.name.as_str());
            tracing::warn!(device = %name, "the kernel's neighbours cannot be read: {error}");
        }
    }
}

fn post_neighbour(workers: &mut WorkerSet, device: usize, neighbour: KernelNeighbour) {
    workers.post_to_all(|| Command::LearnNeighbour { device, neighbour });
}
