//! The kernel's routes and neighbours on the interfaces of devices: read at the start, and followed.
//!
//! A neighbour known to the kernel saves siwd a solicitation, and permanent entries cover neighbours that answer
//! none; siwd confirms all other entries itself.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use siw_net::{LearnedRoutes, Route};

use crate::netlink::{KernelChange, KernelNeighbour, KernelRoute, RouteSocket};

/// A change of the kernel's routes or neighbours, with the index of the device whose interface has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteChange {
    /// A neighbour became known or unknown.
    Neighbour(usize, KernelNeighbour),
    /// All neighbours have to be read again.
    Neighbours(usize),
    /// All routes have to be read again.
    Routes(usize),
}

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
    pub fn new(interfaces: Vec<Option<u32>>) -> io::Result<RouteFollower> {
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
    pub fn add(
        &mut self,
        device: usize,
        interface: Option<u32>,
    ) -> io::Result<Option<BorrowedFd<'_>>> {
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
    pub fn remove(&mut self, device: usize) {
        if let Some(interface) = self.interfaces.get_mut(device) {
            *interface = None;
        }
    }

    /// Returns true if the device has the kernel's routes.
    pub fn follows(&self, device: usize) -> bool {
        self.interface_of(device).is_some()
    }

    fn interface_of(&self, device: usize) -> Option<u32> {
        self.interfaces.get(device).copied().flatten()
    }

    /// Descriptor that becomes readable on a change.
    pub fn monitor_fd(&self) -> Option<BorrowedFd<'_>> {
        self.monitor.as_ref().map(AsFd::as_fd)
    }

    /// Reads the routes of a device's interface, the best one to each destination. `None` if the device does not
    /// follow the kernel.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_routes(&self, device: usize) -> io::Result<Option<LearnedRoutes>> {
        let Some(interface) = self.interface_of(device) else {
            return Ok(None);
        };
        let routes = RouteSocket::open()?.routes_of(interface)?;
        Ok(Some(learned_routes(routes)))
    }

    /// Reads the known neighbours on a device's interface; there are none if the device does not follow the
    /// kernel.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_neighbours(&self, device: usize) -> io::Result<Vec<KernelNeighbour>> {
        match self.interface_of(device) {
            Some(interface) => RouteSocket::open()?.neighbours_of(interface),
            None => Ok(Vec::new()),
        }
    }

    /// Takes the changes since the last call.
    pub fn take_changes(&mut self) -> Vec<RouteChange> {
        let mut changes = Vec::new();
        let followed: Vec<u32> = self.interfaces.iter().copied().flatten().collect();
        if let Some(monitor) = &mut self.monitor {
            monitor.take_changes(&followed, &mut changes);
        }
        changes_by_device(&self.interfaces, &changes)
    }
}

/// Assigns changes to the devices of their interfaces. A device reads its routes once, after all other changes.
fn changes_by_device(interfaces: &[Option<u32>], changes: &[KernelChange]) -> Vec<RouteChange> {
    let mut found = Vec::new();
    for (device, interface) in interfaces.iter().enumerate() {
        let Some(interface) = interface else { continue };
        let mut has_new_routes = false;
        for change in changes {
            match change {
                KernelChange::Neighbour(on, neighbour) if on == interface => {
                    found.push(RouteChange::Neighbour(device, *neighbour));
                }
                KernelChange::Routes(on) if on == interface => has_new_routes = true,
                KernelChange::Neighbour(..) | KernelChange::Routes(_) => {}
                KernelChange::Lost => {
                    has_new_routes = true;
                    found.push(RouteChange::Neighbours(device));
                }
            }
        }
        if has_new_routes {
            found.push(RouteChange::Routes(device));
        }
    }
    found
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
    fn a_device_gets_the_changes_of_its_interface_and_reads_all_after_lost_ones() {
        let neighbour = KernelNeighbour {
            address: "10.0.0.7".parse().unwrap(),
            mac: Some([2, 0, 0, 0, 0, 7]),
            is_permanent: false,
        };
        let on = |interface| KernelChange::Neighbour(interface, neighbour);
        let interfaces = [Some(5), None, Some(6)];
        let routes = KernelChange::Routes;
        let changes = changes_by_device(&interfaces, &[routes(5), on(6), routes(5), routes(9)]);
        let told = RouteChange::Neighbour(2, neighbour);
        assert_eq!(changes, [RouteChange::Routes(0), told]);
        let changes = changes_by_device(&interfaces, &[on(5), KernelChange::Lost, routes(5)]);
        let of_first = [
            RouteChange::Neighbour(0, neighbour),
            RouteChange::Neighbours(0),
            RouteChange::Routes(0),
        ];
        let of_third = [RouteChange::Neighbours(2), RouteChange::Routes(2)];
        assert_eq!(changes, [&of_first[..], &of_third[..]].concat());
    }

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
