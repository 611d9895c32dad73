//! Devices that operators add to a running daemon, and remove from it.
//!
//! A thread reads the configuration, opens the port and builds the workers' parts of it, because a
//! driver and a file system can be slow. The control thread and the workers then only take them over. A
//! removed device ends like one that vanishes (`links.rs`). Clients keep the index of a device longer than
//! the device exists, so only a device of the same name gets it again, and only when no connected client
//! knows it (`choose_index`).

use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::libc;
use parking_lot::Mutex;
use siw_host::routes::RouteFollower;
use siw_host::{HostPath, HostThread, HostThreadParts};
use siw_sysfs::DeviceWriter;
use toml::Spanned;

use super::captures::Captures;
use super::faults::FaultPlans;
use super::reload::Configuration;
use super::routes;
use super::runtime_changes::RuntimeChanges;
use crate::config::{Config, ConfigSource, DeviceConfig};
use crate::control::connection::connections::Connections;
use crate::control::context::Context;
use crate::control::device::host_routes;
use crate::control::device::links::{LinkMonitor, Removal, ReturningInterface, WatchedPort};
use crate::control::memory::Memory;
use crate::control::request::refusal::Refusal;
use crate::control::resources::QpPhase;
use crate::control::threads::reports::{HelperReport, Reporter};
use crate::datapath::clock::TscClock;
use crate::datapath::inbox::WorkerInbox;
use crate::device::{self, OpenDevice, SecondEnds, SharedStackConfig};
use crate::device_view::DeviceView;
use crate::host::LockUse;
use crate::ids::CommandToken;
use crate::link_traits::PayloadPolicy;
use crate::prepared::{DeviceClaims, HostReport, Prepared, StartedDpdk, claim_device};
use crate::worker::NewPort;
use crate::worker::messages::Command;

/// Parts of the daemon that a new device needs.
#[derive(Clone)]
pub struct DeviceOpener {
    /// DPDK and the packet buffers.
    pub dpdk: StartedDpdk,
    /// Cores of the workers.
    pub cores: Vec<usize>,
    /// Bytes that a packet buffer holds.
    pub buffer_room: u16,
    /// Secrets and limits of the TCP stacks.
    pub stacks: SharedStackConfig,
    /// Has the time base of the workers.
    pub clock: TscClock,
    /// Inboxes of the workers.
    pub inboxes: Arc<[Arc<WorkerInbox>]>,
}

/// A started device without the parts of its workers.
pub struct RunningDevice {
    view: DeviceView,
    port: WatchedPort,
    /// The interface whose routes the device follows.
    route_interface: Option<u32>,
    /// Frames may refer to registered memory.
    sends_by_reference: bool,
}

impl RunningDevice {
    /// Starts the host thread of a device, after the workers' ports were taken. The first worker, which
    /// serves every device, sends for the kernel.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn start(
        opener: &DeviceOpener,
        index: usize,
        mut device: OpenDevice,
        claims: DeviceClaims,
    ) -> std::io::Result<RunningDevice> {
        let view = device.client_view();
        let host = device.host.take();
        let follows = host.as_ref().filter(|host| host.settings.routes);
        let shared = device.port.xdp_interface();
        let shared = shared.filter(|_| device.config.host_routes);
        let route_interface = follows.map(|host| host.tap.index()).or(shared);
        let host_interface = host.as_ref().map(|host| host.tap.index());
        let start_thread = |host: HostPath| {
            let parts = HostThreadParts {
                device: index,
                tap: host.tap,
                queue: host.queue,
                worker: opener.inboxes[0].clone(),
                pool: opener.dpdk.pool.clone(),
                vlan: device.config.vlan.as_ref().map(|vlan| *vlan.get_ref()),
                mtu: *device.config.mtu.get_ref(),
            };
            let worker_cores = opener.cores.clone();
            let on_start = move || crate::host::avoid_cores(&worker_cores);
            HostThread::start(&opener.dpdk.eal, parts, on_start)
        };
        Ok(RunningDevice {
            view,
            route_interface,
            sends_by_reference: device.link.payload != PayloadPolicy::Copy,
            port: WatchedPort {
                host: host.map(start_thread).transpose()?,
                host_interface,
                port: device.port,
                claims,
                returning: returning_interface(&device.config),
            },
        })
    }
}

/// Progress of a device that is added.
pub enum AddedDevice {
    /// The device is open.
    Open(Box<OpenedDevice>),
    /// The interface of a removed device, which has this index, is there again.
    InterfaceIsBack {
        /// Index of the removed device.
        device: usize,
    },
}

/// The interface with which a device comes back after its removal.
fn returning_interface(config: &DeviceConfig) -> Option<ReturningInterface> {
    let name = config.existing_interface();
    let can_return = name.is_some() || config.creates_interface();
    (can_return && config.reattach).then_some(ReturningInterface {
        name,
        report: report_return,
    })
}

/// Report that the interface of a removed device is back.
fn report_return(device: usize) -> HelperReport {
    HelperReport::DeviceOpened(Box::new(Ok(AddedDevice::InterfaceIsBack { device })))
}

/// A device that was opened for an operator, or because its interface is back.
pub struct OpenedDevice {
    index: usize,
    device: RunningDevice,
    config: DeviceConfig,
    /// The part of each worker that serves it.
    ports: Vec<(usize, NewPort)>,
    /// Index of the removed device that it takes the place of.
    replaces: Option<usize>,
}

/// Opening of a device, in a thread of its own.
struct Opening {
    opener: DeviceOpener,
    pairs: Arc<Mutex<SecondEnds>>,
    source: ConfigSource,
    /// The configuration in force.
    running: Config,
    /// Addresses of the running devices, with the devices' names.
    addresses: Vec<(IpAddr, String)>,
    claims: Vec<DeviceClaims>,
    files: Option<DeviceWriter>,
    index: usize,
    name: String,
    /// The removed device that it takes the place of, with the settings that it had.
    replaces: Option<(usize, DeviceConfig)>,
}

fn invalid(why: impl std::fmt::Display) -> Refusal {
    Refusal::new(libc::EINVAL, why.to_string())
}

impl Opening {
    fn run(self) -> Result<AddedDevice, Refusal> {
        let (config, all) = self.read_configuration()?;
        let outcome = self.open(&config, &all);
        if let (Err(_), Some(pair)) = (&outcome, &config.pair) {
            let mut pairs = self.pairs.lock();
            pairs.remove(pair);
        }
        outcome
    }

    /// Reads the device's table. Returns it, and the configuration in force with this device.
    fn read_configuration(&self) -> Result<(DeviceConfig, Config), Refusal> {
        let name = &self.name;
        if let Some((_, config)) = &self.replaces {
            let mut all = self.running.clone();
            all.devices
                .retain(|other| other.get_ref().name != config.name);
            all.devices.push(Spanned::new(0..0, config.clone()));
            return Ok((config.clone(), all));
        }
        let file = self.source.load().map_err(invalid)?;
        let mut tables = file.devices.iter();
        let found = tables.find(|device| device.get_ref().name.get_ref().0 == *name);
        let table = found.ok_or_else(|| {
            let source = self.source.name();
            let why = format!("{source} has no device {name:?}: add its [[device]] there first");
            Refusal::new(libc::ENOENT, why)
        })?;
        let config = table.get_ref().clone();
        let mut all = self.running.clone();
        if let Some(pair) = &config.pair {
            let is_end = |other: &DeviceConfig| other.pair.as_ref() == Some(pair);
            let mut running = all.devices.iter();
            let pairs = self.pairs.lock();
            match running.find(|other| is_end(other.get_ref())) {
                Some(other) if !pairs.contains_key(pair) => {
                    let other = &other.get_ref().name.get_ref().0;
                    let why = format!(
                        "device {other} is the other end of pair {pair:?} and runs: siwctl device del {other} first, then add both"
                    );
                    return Err(Refusal::new(libc::EBUSY, why));
                }
                Some(_) => {}
                None => {
                    let mut ends = file.devices.iter();
                    let other = ends.find(|other| {
                        is_end(other.get_ref()) && other.get_ref().name != config.name
                    });
                    all.devices.extend(other.cloned());
                }
            }
        }
        all.devices.push(table.clone());
        all.check_settings()
            .map_err(|(_, why)| invalid(format!("device {name}, with the running ones: {why}")))?;
        for cidr in config.addresses.get_ref() {
            let mut taken = self.addresses.iter();
            if let Some((address, owner)) = taken.find(|(address, _)| *address == cidr.addr) {
                let why = format!("device {owner} has the address {address} already");
                return Err(Refusal::new(libc::EEXIST, why));
            }
        }
        let needed = device::buffer_room(&config);
        if needed > self.opener.buffer_room {
            let why = format!(
                "device {name}: its mtu needs packet buffers of {needed} bytes, and siwd has started with {}: restart siwd, or lower mtu",
                self.opener.buffer_room
            );
            return Err(Refusal::new(libc::ENOMEM, why));
        }
        Ok((config, all))
    }

    fn open(&self, config: &DeviceConfig, all: &Config) -> Result<AddedDevice, Refusal> {
        let failed = |why: String| Refusal::new(libc::EIO, why);
        let (opener, name) = (&self.opener, &self.name);
        let devices: Vec<DeviceConfig> = all
            .devices
            .iter()
            .map(|device| device.get_ref().clone())
            .collect();
        let plan = Prepared {
            config: all.clone(),
            devices,
            cores: opener.cores.clone(),
            buffer_room: opener.buffer_room,
        };
        if config.waits_for_peer() {
            let why = format!(
                "device {name} waits for its peer (server=1), and siwd could open no other device meanwhile: restart siwd"
            );
            return Err(Refusal::new(libc::EOPNOTSUPP, why));
        }
        let mut report = HostReport::default();
        plan.check_device(config, &mut report);
        report.into_result().map_err(invalid)?;
        let claims = claim_device(config, &self.claims, LockUse::Hold)
            .map_err(|error| Refusal::new(libc::EBUSY, error.to_string()))?;
        let (mut guard, mut no_pairs);
        let pairs = match &config.pair {
            Some(_) => {
                guard = self.pairs.lock();
                &mut *guard
            }
            None => {
                // The control thread may want the lock, and a driver may take long.
                no_pairs = SecondEnds::default();
                &mut no_pairs
            }
        };
        let (workers, index) = (opener.cores.len(), self.index);
        let dpdk = &opener.dpdk;
        let opened = device::open_device(dpdk, &plan.devices, config, workers, pairs);
        let mut device = opened.map_err(failed)?;
        if device.port.dma_port().is_some() && device.link.payload != PayloadPolicy::Copy {
            let why = format!(
                "device {name} would read memory of running programs, which is not mapped for it: set tx_payload = \"copy\", or restart siwd"
            );
            return Err(Refusal::new(libc::EOPNOTSUPP, why));
        }
        device.set_up_host_path().map_err(failed)?;
        let now = opener.clock.now();
        let mut ports = Vec::new();
        for worker in 0..workers {
            if let Some(port) = device.worker_port(index, worker, &opener.stacks) {
                let port = NewPort::new(port, now, &opener.inboxes);
                ports.push((worker, port.map_err(failed)?));
            }
        }
        let device = RunningDevice::start(opener, index, device, claims)
            .map_err(|error| failed(format!("device {name}: {error}")))?;
        if let Some(files) = &self.files
            && let Err(error) = files.add_device(&device.view.to_sysfs(index))
        {
            tracing::warn!(device = %name, "cannot write the files for programs that read /sys: {error}");
        }
        Ok(AddedDevice::Open(Box::new(OpenedDevice {
            index,
            device,
            config: config.clone(),
            ports,
            replaces: self.replaces.as_ref().map(|(device, _)| *device),
        })))
    }
}

/// Adds and removes devices; one is added at a time.
pub(in crate::control) struct DeviceChanges {
    opener: DeviceOpener,
    pairs: Arc<Mutex<SecondEnds>>,
    /// Opens a device.
    opening: Option<JoinHandle<()>>,
    /// Operator's request for the device that is being opened.
    adding: Option<CommandToken>,
    /// Operators' requests for the removal of devices whose ports are being closed.
    removing: Vec<(usize, CommandToken)>,
}

impl Drop for DeviceChanges {
    fn drop(&mut self) {
        // DPDK shuts down afterwards.
        if let Some(thread) = self.opening.take() {
            let _ = thread.join();
        }
    }
}

/// Parts of the control thread that a change of the devices concerns.
pub(in crate::control) struct ChangedParts<'a> {
    pub configuration: &'a mut Configuration,
    pub captures: &'a mut Captures,
    pub faults: &'a mut FaultPlans,
    pub connections: &'a mut Connections,
    pub links: &'a mut LinkMonitor,
    pub memory: &'a mut Memory,
    pub routes: &'a mut RouteFollower,
    pub changes: &'a mut RuntimeChanges,
}

impl DeviceChanges {
    /// No device is being added.
    pub fn new(opener: DeviceOpener) -> DeviceChanges {
        DeviceChanges {
            opener,
            pairs: Arc::default(),
            opening: None,
            adding: None,
            removing: Vec::new(),
        }
    }

    /// Starts to open a device of the configuration for an operator's request;
    /// [`HelperReport::DeviceOpened`] follows.
    pub fn begin_add(
        &mut self,
        context: &Context,
        parts: &ChangedParts<'_>,
        name: &str,
        token: CommandToken,
    ) -> Result<(), Refusal> {
        let links = &parts.links;
        let views = &context.devices.views;
        if let Some(device) = context.devices.find_by_name(name) {
            let why = match views[device].is_gone {
                true => format!("device {name} has vanished: siwctl device del {name} first"),
                false => format!("device {name} runs already"),
            };
            return Err(Refusal::new(libc::EEXIST, why));
        }
        let mut same_name = views
            .iter()
            .enumerate()
            .filter(|(_, view)| view.name == name);
        if self.opening.is_some() || same_name.any(|(device, _)| !links.is_closed(device)) {
            let why =
                "another device is being added, or this one is still being removed: try again";
            return Err(Refusal::new(libc::EBUSY, why));
        }
        self.begin_opening(context, parts, name, None)?;
        self.adding = Some(token);
        Ok(())
    }

    /// Starts the thread that opens a device.
    fn begin_opening(
        &mut self,
        context: &Context,
        parts: &ChangedParts<'_>,
        name: &str,
        replaces: Option<(usize, DeviceConfig)>,
    ) -> Result<(), Refusal> {
        let ChangedParts {
            configuration,
            connections,
            links,
            ..
        } = parts;
        let views = &context.devices.views;
        let running = views.iter().filter(|view| !view.is_gone);
        let addresses = running.flat_map(|view| {
            let addresses = view.addresses.iter();
            addresses.map(|cidr| (cidr.addr, view.name.clone()))
        });
        let opening = Opening {
            opener: self.opener.clone(),
            pairs: self.pairs.clone(),
            source: configuration.source().clone(),
            running: configuration.current().clone(),
            addresses: addresses.collect(),
            claims: links.claims(),
            files: links.sysfs().map(|sysfs| sysfs.device_writer()),
            index: choose_index(context, connections, links, name),
            name: name.to_owned(),
            replaces,
        };
        let reporter: Reporter = context.helpers.reporter().clone();
        let open = move || {
            let opened = opening.run();
            reporter.send(HelperReport::DeviceOpened(Box::new(opened)));
        };
        let thread = std::thread::Builder::new().name("siwd-device".into());
        let started = thread.spawn(open).map_err(|error| {
            let why = format!("a thread cannot be started: {error}");
            Refusal::new(libc::EAGAIN, why)
        });
        self.opening = Some(started?);
        Ok(())
    }

    /// Starts to open a removed device again, whose interface is back. If it fails, its thread reports the
    /// interface again.
    fn begin_return(&mut self, context: &Context, parts: &mut ChangedParts<'_>, device: usize) {
        let Some(view) = context.devices.views.get(device) else {
            return;
        };
        if view.is_deleted {
            parts.links.forget_return(device);
            return;
        }
        if self.opening.is_some() || !parts.links.is_closed(device) {
            return;
        }
        let mut config = DeviceConfig::clone(&view.config);
        config.addresses = Spanned::new(0..0, view.addresses.clone());
        parts.links.remove_files(device, view);
        let started = self.begin_opening(context, parts, &view.name, Some((device, config)));
        if let Err(refusal) = started {
            tracing::warn!(device = %view.name, "not opened again: {}", refusal.reason());
        }
    }

    /// Takes over an opened device. Returns the operator's request for it, and its outcome.
    pub fn on_opened(
        &mut self,
        context: &mut Context,
        mut parts: ChangedParts<'_>,
        opened: Result<AddedDevice, Refusal>,
    ) -> Option<(CommandToken, Result<(), Refusal>)> {
        let opened = match opened {
            Ok(AddedDevice::InterfaceIsBack { device }) => {
                self.begin_return(context, &mut parts, device);
                return None;
            }
            Ok(AddedDevice::Open(opened)) => Ok(*opened),
            Err(refusal) => Err(refusal),
        };
        // It has sent its last report.
        self.opening = None;
        let outcome = opened.and_then(|added| take_over(context, parts, added));
        if let Err(refusal) = &outcome {
            tracing::warn!("no device is added: {}", refusal.reason());
        }
        Some((self.adding.take()?, outcome))
    }

    /// Takes an operator's request for the removal of a device whose port is closed.
    pub fn take_removal(&mut self, device: usize) -> Option<CommandToken> {
        let mut removing = self.removing.iter();
        let found = removing.position(|(other, _)| *other == device)?;
        Some(self.removing.swap_remove(found).1)
    }

    /// Removes a device for an operator's request. Returns true if its port is closed already; otherwise
    /// the request has to wait.
    pub fn begin_removal(
        &mut self,
        context: &mut Context,
        parts: &mut ChangedParts<'_>,
        (device, is_forced): (usize, bool),
        token: CommandToken,
    ) -> Result<bool, Refusal> {
        let found = context.devices.views.get(device);
        let Some(view) = found.filter(|view| !view.is_deleted) else {
            return Err(Refusal::new(libc::ENODEV, format!("no device {device}")));
        };
        let ChangedParts {
            configuration,
            connections,
            links,
            routes,
            ..
        } = parts;
        let users = users_of(context, connections, device);
        if !users.is_empty() && !is_forced {
            let users: Vec<String> = users.iter().map(u32::to_string).collect();
            let why = format!(
                "device {} is used by process {}: end its connections and listeners first, or use --force",
                view.name,
                users.join(", ")
            );
            return Err(Refusal::new(libc::EBUSY, why));
        }
        if let Some(pair) = &view.config.pair {
            if self.opening.is_some() {
                let why = "a device is being added, perhaps the other end of this pair: try again";
                return Err(Refusal::new(libc::EBUSY, why));
            }
            let mut pairs = self.pairs.lock();
            pairs.remove(pair);
        }
        if !view.is_gone {
            remove_device(context, connections, links, device, Removal::Operator);
        }
        let view = &mut context.devices.views[device];
        view.is_deleted = true;
        configuration.remove_device(&view.name);
        links.remove_files(device, view);
        links.forget_return(device);
        routes.remove(device);
        let is_closed = links.is_closed(device);
        if !is_closed {
            self.removing.push((device, token));
        }
        Ok(is_closed)
    }
}

/// Ends the connections of a device, which workers then release.
pub(in crate::control) fn remove_device(
    context: &mut Context,
    connections: &mut Connections,
    links: &mut LinkMonitor,
    device: usize,
    cause: Removal,
) {
    if context.devices.views[device].is_gone {
        return;
    }
    links.begin_removal(context, device, cause);
    connections.remove_device(&mut context.resources, device);
    let command = || Command::RemovePort { device };
    context.workers.post_to_all(command);
}

/// Index for a new device of this name: that of a deleted one of the name that is closed, if no connected
/// client knows it, or the next one. So the devices of an operator who removes and adds them all day keep
/// their indices, and everything that is kept by index stays small.
fn choose_index(
    context: &Context,
    connections: &Connections,
    links: &LinkMonitor,
    name: &str,
) -> usize {
    let is_known = |device: usize| {
        let mut listeners = connections.listeners.iter();
        let mut clients = context.resources.clients.values();
        listeners.any(|(_, listener)| listener.devices.contains(&device))
            || clients.any(|client| {
                let mut queue_pairs = client.qps.values();
                client.known_devices.contains(&device)
                    || queue_pairs.any(|qp| qp.device == device && qp.phase != QpPhase::Detached)
            })
    };
    let views = context.devices.views.iter();
    let mut deleted = views
        .enumerate()
        .filter(|(_, view)| view.is_deleted && view.name == name);
    deleted
        .find(|(device, _)| links.is_closed(*device) && !is_known(*device))
        .map_or(context.devices.views.len(), |(device, _)| device)
}

/// Processes with connections and listeners on a device alone.
fn users_of(context: &Context, connections: &Connections, device: usize) -> Vec<u32> {
    let mut users: Vec<u32> = Vec::new();
    for client in context.resources.clients.values() {
        let mut queue_pairs = client.qps.values();
        let mut listeners = connections.listeners.iter();
        let is_user = queue_pairs.any(|qp| qp.device == device && qp.phase != QpPhase::Detached)
            || listeners
                .any(|(_, listener)| listener.client == client.id && listener.devices == [device]);
        if is_user {
            users.push(client.peer.pid);
        }
    }
    users.sort_unstable();
    users.dedup();
    users
}

/// Adds an opened device to all parts of the control thread, and gives the workers their parts.
fn take_over(
    context: &mut Context,
    parts: ChangedParts<'_>,
    added: OpenedDevice,
) -> Result<(), Refusal> {
    let OpenedDevice {
        index,
        device,
        config,
        ports,
        replaces,
    } = added;
    if let Some(former) = replaces {
        let view = &mut context.devices.views[former];
        if view.is_deleted {
            parts.links.remove_files(index, &device.view);
            let why = format!("an operator has removed device {} meanwhile", view.name);
            return Err(Refusal::new(libc::ENODEV, why));
        }
        view.is_deleted = true;
        parts.configuration.remove_device(&view.name);
        parts.links.forget_return(former);
        parts.routes.remove(former);
    }
    if let Err(error) = parts.links.add(index, &device.view, device.port) {
        parts.links.remove_files(index, &device.view);
        let why = format!("a thread cannot be started: {error}");
        return Err(Refusal::new(libc::EAGAIN, why));
    }
    match replaces {
        Some(_) => {
            tracing::warn!(device = %device.view.name, "the interface is back, and the device is open again");
        }
        None => tracing::warn!(device = %device.view.name, "an operator has added the device"),
    }
    parts.memory.sends_by_reference |= device.sends_by_reference;
    let name = device.view.name.clone();
    match context.devices.views.get_mut(index) {
        Some(deleted) => *deleted = device.view,
        None => context.devices.views.push(device.view),
    }
    match replaces {
        Some(former) => {
            parts.configuration.readd_device(config);
            let view = &context.devices.views[former];
            let (routes, neighbours) = (
                view.learned_routes.clone(),
                view.permanent_neighbours.clone(),
            );
            let view = &mut context.devices.views[index];
            view.learned_routes = routes;
            view.permanent_neighbours = neighbours;
        }
        None => parts.configuration.add_device(config),
    }
    for (worker, port) in ports {
        let command = Command::AddPort(Box::new(port));
        context.workers.post_command(worker, command);
    }
    routes::post_added_routes(context, index);
    routes::post_permanent_neighbours(context, index);
    parts
        .captures
        .add_device(&mut context.workers, index, &name);
    parts.faults.on_device_added(&mut context.workers);
    parts.connections.add_device(context, index);
    let monitored = parts.routes.add(index, device.route_interface);
    let monitored = monitored.and_then(|monitor| match monitor {
        Some(monitor) => crate::control::watch_routes(&context.resources.epoll, monitor),
        None => Ok(()),
    });
    if let Err(error) = monitored {
        tracing::warn!(device = %name, "the kernel's routes cannot be followed: {error}");
    }
    let (devices, workers) = (&mut context.devices, &mut context.workers);
    host_routes::load_host_routes(parts.routes, devices, workers, index);
    Ok(())
}

/// The devices of a start, divided among the parts of the control thread.
pub(in crate::control) struct StartedDevices {
    pub views: Vec<DeviceView>,
    pub ports: Vec<WatchedPort>,
    pub routes: RouteFollower,
    pub sends_by_reference: bool,
}

impl StartedDevices {
    /// Divides them.
    ///
    /// # Errors
    /// The operating system cannot create a netlink socket.
    pub fn new(devices: Vec<RunningDevice>) -> std::io::Result<StartedDevices> {
        let mut started = StartedDevices {
            views: Vec::new(),
            ports: Vec::new(),
            routes: RouteFollower::new(
                devices
                    .iter()
                    .map(|device| device.route_interface)
                    .collect(),
            )?,
            sends_by_reference: devices.iter().any(|device| device.sends_by_reference),
        };
        for device in devices {
            started.views.push(device.view);
            started.ports.push(device.port);
        }
        Ok(started)
    }
}
