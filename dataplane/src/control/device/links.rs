//! Detects link changes and removed devices, and reports them to every client; logs frames that an
//! interface refuses, and changes of its MTU.
//!
//! A thread for each port polls it, because few virtual links raise an interrupt, and the driver of a
//! NIC may take long to answer. It also does other calls of drivers that follow from a change, closes the
//! port, and reports to the control thread as helpers do.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dpdk::{DriverTraits, PortEvent};
use siw_host::HostThread;
use siw_host::netlink::RouteSocket;
use siw_ports::{LinkStatus, Port, XdpInterface};
use siw_shm::control::AsyncEventKind;
use siw_shm::control::messages as m;
use siw_sysfs::SysfsTree;

use crate::config::LinkSource;
use crate::control::context::Context;
use crate::control::resources::{Client, Resources};
use crate::control::threads::reports::{HelperReport, LinkReport, LinkState, Reporter};
use crate::device_view::DeviceView;
use crate::host::HostClaim;
use crate::ids::ClientId;
use crate::prepared::DeviceClaims;
use crate::worker::messages::Command;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time between two looks for an interface that was removed, and the longest pause after a failure to open
/// its device again; it doubles with each.
const RETURN_INTERVAL: Duration = Duration::from_millis(100);
const LONGEST_RETURN_PAUSE: Duration = Duration::from_secs(30);
/// Shortest time between two messages about refused frames of a device.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(10);

/// A device's port, and what ends with it.
pub struct WatchedPort {
    /// Passes frames between the port and the kernel, if it shares the device. Ends first.
    pub host: Option<HostThread>,
    /// Index of the kernel's interface that follows the link's state, if the device shares one.
    pub host_interface: Option<u32>,
    /// The port, closed with its last handle and queue.
    pub port: Port,
    /// Locks of the device on this machine.
    pub claims: DeviceClaims,
    /// The interface with which the device comes back after its removal; `None`: it does not.
    pub(in crate::control) returning: Option<ReturningInterface>,
}

/// An interface of the kernel whose device is opened again when the interface is back.
pub(in crate::control) struct ReturningInterface {
    /// Its name; `None`: opening the device makes it.
    pub name: Option<String>,
    /// Builds the report that it is back, from the index of the removed device.
    pub report: fn(usize) -> HelperReport,
}

/// Cause of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::control) enum Removal {
    /// The port reported it.
    Event(PortEvent),
    /// An operator asked for it.
    Operator,
}

/// The ports by device index, each with the thread that watches and closes it.
pub(in crate::control) struct LinkMonitor {
    ports: Vec<MonitoredPort>,
    reporter: Reporter,
    /// Files that describe devices and link states; `None` if they cannot be written.
    sysfs: Option<SysfsTree>,
}

/// A port, as the control thread knows it. Dropping it ends the thread, which closes the port.
struct MonitoredPort {
    /// Number of workers that still have queues of the port, after the removal of its device. The
    /// last one closes the port.
    queue_holders: Option<usize>,
    /// Orders the thread to close the port. Without it the thread ends.
    close: Option<mpsc::Sender<()>>,
    /// The thread waits, after it has closed the port, for the interface to come back.
    awaits_return: bool,
    thread: Option<JoinHandle<()>>,
    claims: Vec<Weak<HostClaim>>,
    is_closed: bool,
}

impl Drop for MonitoredPort {
    fn drop(&mut self) {
        self.close = None;
        // DPDK shuts down afterwards.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl LinkMonitor {
    /// Creates a monitor of no port.
    pub fn new(reporter: Reporter, sysfs: Option<SysfsTree>) -> LinkMonitor {
        LinkMonitor {
            ports: Vec::new(),
            reporter,
            sysfs,
        }
    }

    /// Starts the thread of a device with the next index, or with that of a deleted one.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn add(
        &mut self,
        index: usize,
        view: &DeviceView,
        port: WatchedPort,
    ) -> std::io::Result<()> {
        let mut device = WatchedDevice {
            number: index,
            name: view.name.clone(),
            mtu: view.mtu,
            is_in_memory: port.port.driver_traits().in_process,
            watched: port,
            refusals: Refusals::default(),
            unserved_queues: 0,
            is_carrier_on: true,
        };
        let claims = device.watched.claims.iter().map(Arc::downgrade).collect();
        let up = device.watched.port.link_status().map(|status| status.up);
        device.show_to_kernel(up.unwrap_or(true));
        let (close, orders) = mpsc::channel();
        let reporter = self.reporter.clone();
        let thread = std::thread::Builder::new()
            .name("siwd-link".into())
            .spawn(move || device.watch(&orders, &reporter))?;
        let monitored = MonitoredPort {
            queue_holders: None,
            close: Some(close),
            awaits_return: false,
            thread: Some(thread),
            claims,
            is_closed: false,
        };
        match self.ports.get_mut(index) {
            Some(former) => *former = monitored,
            None => self.ports.push(monitored),
        }
        Ok(())
    }

    /// Locks of the devices that are not closed.
    pub fn claims(&self) -> Vec<DeviceClaims> {
        let held = |port: &MonitoredPort| port.claims.iter().filter_map(Weak::upgrade).collect();
        self.ports.iter().map(held).collect()
    }

    /// Returns true if the port of a removed device is closed.
    pub fn is_closed(&self, device: usize) -> bool {
        self.ports.get(device).is_none_or(|port| port.is_closed)
    }

    /// Records that the thread of a removed device has closed its port.
    pub fn on_closed(&mut self, device: usize) {
        if let Some(port) = self.ports.get_mut(device) {
            port.is_closed = true;
            port.claims = Vec::new();
            // It makes no call of DPDK any more. Its stack is freed when it ends, without a join.
            port.thread = None;
        }
    }

    /// The files that describe devices.
    pub fn sysfs(&self) -> Option<&SysfsTree> {
        self.sysfs.as_ref()
    }

    /// Reports a link that went up or down to every client.
    pub fn on_link_state(&self, context: &mut Context, device: usize, state: LinkState) {
        let view = &mut context.devices.views[device];
        if view.is_gone {
            return;
        }
        view.unserved_queues = state.unserved_queues;
        let is_other_speed = std::mem::replace(&mut view.link_mbps, state.mbps) != state.mbps;
        let has_changed = std::mem::replace(&mut view.link_up, state.is_up) != state.is_up;
        view.link_downs += u64::from(has_changed && !state.is_up);
        if is_other_speed || has_changed {
            self.write_link_state(device, &context.devices.views[device]);
        }
        if !has_changed {
            return;
        }
        let (kind, why) = if state.is_up {
            (AsyncEventKind::PortActive, "the link is up")
        } else {
            (AsyncEventKind::PortErr, "the link is down")
        };
        let view = &context.devices.views[device];
        tracing::info!(device = %view.name, "{why}");
        if let LinkSource::Vdev(devargs) = view.config.link_source()
            && !state.is_up
            && DriverTraits::connects_once(&devargs)
        {
            tracing::warn!(
                device = %view.name,
                "its peer has ended, and the device does not connect again by itself: when the peer is back, \
                 siwctl device del {0} --force and siwctl device add {0}; with server=1 here and client=1 at \
                 the peer, the peer connects again",
                view.name
            );
        }
        post_to_clients(&mut context.resources, kind, device, why);
        if state.is_up {
            // Connections whose timeouts have backed off meanwhile send again at once.
            let routes = Arc::new(context.devices.views[device].learned_routes.clone());
            context.workers.post_to_all(|| Command::LearnRoutes {
                device,
                routes: routes.clone(),
            });
        }
    }

    /// Writes the GIDs of a device whose addresses have changed, and reports the change to every client.
    pub fn publish_addresses(&self, context: &mut Context, device: usize) {
        if let Some(sysfs) = &self.sysfs {
            sysfs.update_addresses(&context.devices.views[device].to_sysfs(device));
        }
        let why = "the addresses of the device were changed";
        let resources = &mut context.resources;
        post_to_clients(resources, AsyncEventKind::GidChange, device, why);
    }

    fn write_link_state(&self, device: usize, view: &DeviceView) {
        if let Some(sysfs) = &self.sysfs {
            sysfs.update_link(&view.to_sysfs(device));
        }
    }

    /// Records and reports the removal of a device; its connections have to be ended.
    pub fn begin_removal(&mut self, context: &mut Context, device: usize, cause: Removal) {
        let why = match cause {
            Removal::Event(PortEvent::Removed) => "the device was removed from the machine",
            Removal::Event(PortEvent::NeedsReset) => {
                "the device needs a reset; delete it and add it again to use it (siwctl device)"
            }
            Removal::Operator => "the device was removed by an operator",
        };
        if let Some(monitored) = self.ports.get_mut(device) {
            monitored.queue_holders = Some(context.workers.worker_count());
            monitored.awaits_return = cause == Removal::Event(PortEvent::Removed);
        }
        let view = &mut context.devices.views[device];
        view.link_downs += u64::from(view.link_up);
        (view.is_gone, view.link_up, view.link_mbps) = (true, false, 0);
        // Clients keep their claims of single ports.
        view.host_ports = None;
        if cause == Removal::Operator {
            tracing::warn!(device = %view.name, "{why}; its connections end, other devices continue");
        } else {
            tracing::error!(device = %view.name, "{why}; its connections end, other devices continue");
        }
        self.write_link_state(device, &context.devices.views[device]);
        post_to_clients(
            &mut context.resources,
            AsyncEventKind::DeviceFatal,
            device,
            why,
        );
    }

    /// Removes the files that describe a device.
    pub fn remove_files(&self, device: usize, view: &DeviceView) {
        if let Some(sysfs) = &self.sysfs {
            sysfs.remove_device(&view.to_sysfs(device));
        }
    }

    /// A worker has released its queues of a removed device. After the last one the device is closed.
    pub fn on_port_removed(&mut self, device: usize) {
        let Some(monitored) = self.ports.get_mut(device) else {
            return;
        };
        let Some(holders) = monitored.queue_holders.as_mut() else {
            return;
        };
        *holders = holders.saturating_sub(1);
        if *holders > 0 {
            return;
        }
        monitored.queue_holders = None;
        if let Some(close) = &monitored.close {
            // The thread takes this order in all its states.
            let _ = close.send(());
        }
        if !monitored.awaits_return {
            monitored.close = None;
        }
    }

    /// Ends the wait for the interface of a removed device.
    pub fn forget_return(&mut self, device: usize) {
        if let Some(monitored) = self.ports.get_mut(device) {
            monitored.awaits_return = false;
            // The order to close the port was sent; it arrives before the end.
            if monitored.queue_holders.is_none() {
                monitored.close = None;
            }
        }
    }
}

/// A device in the thread that watches its port.
struct WatchedDevice {
    /// Index of the device.
    number: usize,
    name: String,
    /// Configured MTU.
    mtu: u16,
    /// The link is memory of this process: its state does not change.
    is_in_memory: bool,
    watched: WatchedPort,
    refusals: Refusals,
    unserved_queues: u32,
    /// Carrier of the kernel's interface, if there is one.
    is_carrier_on: bool,
}

impl WatchedDevice {
    /// Polls the port until the device is removed or the daemon ends; closes it.
    fn watch(mut self, orders: &mpsc::Receiver<()>, reporter: &Reporter) {
        let report = |device, report| reporter.send(HelperReport::Link { device, report });
        let mut reported = None;
        // Ends without an order if the daemon ends.
        while !self.is_in_memory {
            if let Some(event) = self.watched.port.take_event() {
                report(self.number, LinkReport::Gone(event));
                self.show_to_kernel(false);
                break;
            }
            let link = self.watched.port.link_status().ok();
            if let Some(link) = &link {
                let refused = self.watched.port.refused_packets();
                let mut refusals = std::mem::take(&mut self.refusals);
                refusals.log(&self, link, refused);
                self.refusals = refusals;
            }
            let state = LinkState::new(link.as_ref());
            self.log_unserved_queues(state.unserved_queues);
            self.show_to_kernel(state.is_up);
            if reported.replace(state) != Some(state) {
                report(self.number, LinkReport::Changed(state));
            }
            match orders.recv_timeout(POLL_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Ok(()) => return self.close(orders, reporter),
            }
        }
        if orders.recv().is_ok() {
            self.close(orders, reporter);
        }
    }

    /// Closes the removed device; the kernel may be waiting for that. Then waits for the return of its
    /// interface until the control thread drops the sender of orders.
    fn close(self, orders: &mpsc::Receiver<()>, reporter: &Reporter) {
        let (device, name) = (self.number, self.name);
        let WatchedPort {
            host,
            port,
            claims,
            returning,
            ..
        } = self.watched;
        drop(host);
        match port.detach() {
            Ok(()) => tracing::info!(device = %name, "the device is closed"),
            Err(error) => tracing::warn!(device = %name, "the device cannot be closed: {error}"),
        }
        // An AF_XDP port is closed with its last handle.
        drop(port);
        drop(claims);
        let report = LinkReport::Closed;
        reporter.send(HelperReport::Link { device, report });
        if let Some(interface) = returning {
            await_return(device, &interface, orders, reporter);
        }
    }

    /// Sets the carrier of a shared device's kernel interface to the link state.
    fn show_to_kernel(&mut self, is_up: bool) {
        let Some(interface) = self.watched.host_interface else {
            return;
        };
        if std::mem::replace(&mut self.is_carrier_on, is_up) == is_up {
            return;
        }
        let changed =
            RouteSocket::open().and_then(|mut socket| socket.set_carrier(interface, is_up));
        if let Err(error) = changed {
            tracing::warn!("cannot set the carrier of the kernel's interface: {error}");
        }
    }

    /// Logs a change of the number of receive queues without a socket.
    fn log_unserved_queues(&mut self, unserved: u32) {
        let name = &self.name;
        match (
            std::mem::replace(&mut self.unserved_queues, unserved),
            unserved,
        ) {
            (before, now) if before == now => {}
            (_, 0) => {
                tracing::info!(device = %name, "all receive queues of the interface are served again")
            }
            (_, queues) => tracing::error!(
                device = %name,
                "the interface has {queues} more receive queues than at the start of siwd, and connections \
                 whose frames arrive there stand still: give it the former number (ethtool -L), or restart \
                 siwd"
            ),
        }
    }
}

/// Reports the interface of a removed device when it exists and is up, or the device will make it, again and
/// again until the sender of orders is gone.
fn await_return(
    device: usize,
    interface: &ReturningInterface,
    orders: &mpsc::Receiver<()>,
    reporter: &Reporter,
) {
    let mut pause = RETURN_INTERVAL;
    loop {
        let can_open = interface
            .name
            .as_deref()
            .is_none_or(|name| XdpInterface::find_by_name(name).is_ok_and(|found| found.is_up));
        if can_open {
            reporter.send((interface.report)(device));
            pause = (2 * pause).min(LONGEST_RETURN_PAUSE);
        } else {
            pause = RETURN_INTERVAL;
        }
        if let Err(RecvTimeoutError::Disconnected) = orders.recv_timeout(pause) {
            return;
        }
    }
}

/// Frames that the driver or its interface refused, as far as they are logged.
#[derive(Default)]
struct Refusals {
    /// The interface has a smaller MTU than the device.
    is_narrow: bool,
    logged: u64,
    logged_at: Option<Instant>,
}

impl Refusals {
    /// Logs a change of the interface's MTU in relation to the device's, and refused frames at most
    /// once per interval.
    fn log(&mut self, device: &WatchedDevice, link: &LinkStatus, refused: u64) {
        let (name, wanted, now) = (&device.name, device.mtu, Instant::now());
        let narrow_mtu = link.mtu.filter(|mtu| *mtu < u32::from(wanted));
        match (
            narrow_mtu,
            std::mem::replace(&mut self.is_narrow, narrow_mtu.is_some()),
        ) {
            (Some(mtu), false) => tracing::warn!(
                device = %name,
                "the interface's MTU is now {mtu}, less than the device's mtu {wanted}: longer frames \
                 are lost until TCP has found the size that passes; set both to the same value"
            ),
            (None, true) => tracing::info!(
                device = %name,
                "the interface carries the device's mtu {wanted} again"
            ),
            _ => {}
        }
        let is_silent = self
            .logged_at
            .is_some_and(|at| now.duration_since(at) < REFUSAL_INTERVAL);
        if refused > self.logged && !is_silent {
            tracing::warn!(
                device = %name,
                frames = refused - self.logged,
                total = refused,
                "the interface refused frames: it is down, or its MTU or that of its peer is less than \
                 the device's mtu {wanted}"
            );
            (self.logged, self.logged_at) = (refused, Some(now));
        }
    }
}

/// Reports an event of a device to the clients that know its kind and watch the device, or all devices.
fn post_to_clients(resources: &mut Resources, kind: AsyncEventKind, device: usize, why: &str) {
    let is_concerned = |client: &&Client| {
        let knows_kind =
            kind != AsyncEventKind::GidChange || client.features & m::FEATURE_GIDS != 0;
        knows_kind
            && client
                .watched_device
                .is_none_or(|watched| watched == device)
    };
    let clients = resources.clients.values().filter(is_concerned);
    for id in clients.map(|client| client.id).collect::<Vec<ClientId>>() {
        resources.post_async_event(id, kind, device as u32, why);
    }
}
