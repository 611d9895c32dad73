//! Devices with `host_routes = true`: reads the kernel's routes and neighbours on the shared
//! interface at the start, follows their changes, and passes them to every worker.
//!
//! Configured routes take precedence over the kernel's. A neighbour known to the kernel saves siwd
//! a solicitation, and permanent entries cover neighbours that answer none; siwd confirms all other
//! entries itself.

use std::collections::HashSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use siw_host::netlink::{KernelChange, KernelNeighbour, KernelRoute, RouteSocket};
use siw_tcp::{LearnedRoutes, Route};

use super::devices::Devices;
use crate::control::threads::workers::WorkerSet;
use crate::worker::messages::Command;

/// Follows the routes and neighbours of the interfaces of some devices, possibly none.
pub struct RouteFollower {
    /// Kernel interface indices, by device index; `None`: the device uses only its configured
    /// routes.
    interfaces: Vec<Option<u32>>,
    /// Receives changes; `None` if no interface is followed.
    monitor: Option<RouteSocket>,
}

impl RouteFollower {
    /// Follows the routes of these interfaces, by device index.
    ///
    /// # Errors
    /// The operating system cannot create a netlink socket.
    pub fn new(interfaces: Vec<Option<u32>>) -> std::io::Result<RouteFollower> {
        let any = interfaces.iter().any(Option::is_some);
        let monitor = any.then(RouteSocket::open_monitor).transpose()?;
        Ok(RouteFollower {
            interfaces,
            monitor,
        })
    }

    /// Follows the routes of the interface of a device that has the next index or that of a deleted one, if
    /// it has an interface. Returns the new monitor's descriptor if this is the first one.
    ///
    /// # Errors
    /// As [`RouteFollower::new`].
    pub(in crate::control) fn add(
        &mut self,
        device: usize,
        interface: Option<u32>,
    ) -> std::io::Result<Option<BorrowedFd<'_>>> {
        match self.interfaces.get_mut(device) {
            Some(former) => *former = interface,
            None => self.interfaces.push(interface),
        }
        let is_first = interface.is_some() && self.monitor.is_none();
        if is_first {
            self.monitor = Some(RouteSocket::open_monitor()?);
        }
        Ok(self.monitor_fd().filter(|_| is_first))
    }

    /// Stops following the routes of a removed device.
    pub(in crate::control) fn remove(&mut self, device: usize) {
        if let Some(interface) = self.interfaces.get_mut(device) {
            *interface = None;
        }
    }

    /// Loads the routes and neighbours of one device.
    pub(in crate::control) fn load_routes_of(
        &self,
        devices: &mut Devices,
        workers: &mut WorkerSet,
        device: usize,
    ) {
        if let Some(Some(interface)) = self.interfaces.get(device) {
            load_routes(devices, workers, device, *interface);
            load_neighbours(devices, workers, device, *interface);
        }
    }

    /// Returns true if the device has the kernel's routes.
    pub(in crate::control) fn follows(&self, device: usize) -> bool {
        matches!(self.interfaces.get(device), Some(Some(_)))
    }

    /// Descriptor that becomes readable on a change.
    pub(in crate::control) fn monitor_fd(&self) -> Option<BorrowedFd<'_>> {
        self.monitor.as_ref().map(AsFd::as_fd)
    }

    /// Loads the routes and neighbours of all followed interfaces: at the start, and after lost
    /// changes.
    pub(in crate::control) fn load_host_routes(
        &self,
        devices: &mut Devices,
        workers: &mut WorkerSet,
    ) {
        for device in 0..self.interfaces.len() {
            self.load_routes_of(devices, workers, device);
        }
    }

    /// Passes changes to the workers.
    pub(in crate::control) fn follow_host_routes(
        &mut self,
        devices: &mut Devices,
        workers: &mut WorkerSet,
    ) {
        let mut all = Vec::new();
        let followed: Vec<u32> = self.interfaces.iter().copied().flatten().collect();
        if let Some(monitor) = &mut self.monitor {
            monitor.take_changes(&followed, &mut all);
        }
        let interfaces = self.interfaces.clone();
        for (device, interface) in interfaces.into_iter().enumerate() {
            let Some(interface) = interface else { continue };
            let mut must_load = false;
            for change in &all {
                match change {
                    KernelChange::Neighbour(on, neighbour) if *on == interface => {
                        tell_neighbour(workers, device, neighbour);
                    }
                    KernelChange::Routes(on) if *on == interface => must_load = true,
                    KernelChange::Neighbour(..) | KernelChange::Routes(_) => {}
                    KernelChange::Lost => {
                        must_load = true;
                        load_neighbours(devices, workers, device, interface);
                    }
                }
            }
            if must_load {
                load_routes(devices, workers, device, interface);
            }
        }
    }
}

fn load_routes(devices: &mut Devices, workers: &mut WorkerSet, device: usize, interface: u32) {
    let routes = RouteSocket::open().and_then(|mut socket| socket.routes_of(interface));
    let routes = match routes {
        Ok(routes) => learned_routes(routes),
        Err(error) => {
            let name = &devices.views[device].name;
            tracing::warn!(device = %name, "the kernel's routes cannot be read: {error}");
            return;
        }
    };
    if devices.views[device].learned_routes == routes {
        return;
    }
    devices.views[device].learned_routes = routes.clone();
    let routes = Arc::new(routes);
    workers.post_to_all(|| Command::LearnRoutes {
        device,
        routes: routes.clone(),
    });
}

fn load_neighbours(devices: &Devices, workers: &mut WorkerSet, device: usize, interface: u32) {
    let neighbours = RouteSocket::open().and_then(|mut socket| socket.neighbours_of(interface));
    match neighbours {
        Ok(neighbours) => {
            for neighbour in &neighbours {
                tell_neighbour(workers, device, neighbour);
            }
        }
        Err(error) => {
            let name = &devices.views[device].name;
            tracing::warn!(device = %name, "the kernel's neighbours cannot be read: {error}");
        }
    }
}

fn tell_neighbour(workers: &mut WorkerSet, device: usize, neighbour: &KernelNeighbour) {
    workers.post_to_all(|| Command::LearnNeighbour {
        device,
        neighbour: *neighbour,
    });
}

/// Converts the kernel's routes for the stacks, keeping the best route to each destination.
fn learned_routes(mut routes: Vec<KernelRoute>) -> LearnedRoutes {
    routes.sort_by_key(|route| route.metric);
    let mut learned = LearnedRoutes::default();
    let mut seen = HashSet::new();
    for route in routes {
        if !seen.insert(route.to) {
            continue;
        }
        match (route.via, route.to.prefix) {
            (Some(IpAddr::V4(gateway)), 0) => learned.gateway_v4 = Some(gateway),
            (Some(IpAddr::V6(gateway)), 0) => learned.gateway_v6 = Some(gateway),
            (Some(via), _) => learned.routes.push(Route { to: route.to, via }),
            (None, _) => learned.on_link.push(route.to),
        }
    }
    learned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_metric_wins_and_default_routes_are_gateways() {
        let route = |to: &str, via: Option<&str>, metric| KernelRoute {
            to: to.parse().unwrap(),
            via: via.map(|via| via.parse().unwrap()),
            metric,
        };
        let learned = learned_routes(vec![
            route("0.0.0.0/0", Some("10.0.0.253"), 100),
            route("0.0.0.0/0", Some("10.0.0.254"), 10),
            route("::/0", Some("fe80::1"), 1024),
            route("10.0.0.0/24", None, 0),
            route("192.0.2.0/24", Some("10.0.0.9"), 5),
            route("192.0.2.0/24", Some("10.0.0.8"), 6),
        ]);
        assert_eq!(learned.gateway_v4, "10.0.0.254".parse().ok());
        assert_eq!(learned.gateway_v6, "fe80::1".parse().ok());
        assert_eq!(learned.on_link, ["10.0.0.0/24".parse().unwrap()]);
        let via: IpAddr = "10.0.0.9".parse().unwrap();
        assert_eq!(learned.routes.len(), 1);
        assert_eq!(learned.routes[0].via, via);
    }
}
