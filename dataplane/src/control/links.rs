//! Detects link changes and removed devices, and reports them to every client; logs frames that an
//! interface refuses, and changes of its MTU. Ports are polled,
//! because few virtual links raise an interrupt.

use std::time::{Duration, Instant};

use dpdk::{LinkStatus, PortEvent};
use siw_shm::control::AsyncEventKind;

use super::{ControlThread, DeviceView};
use crate::netlink::RouteSocket;
use crate::worker::messages::Command;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Logs a change of the number of receive queues without a socket.
fn log_unserved_queues(device: &DeviceView, unserved: u32) {
    let name = &device.name;
    match (device.unserved_queues, unserved) {
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

/// Shortest time between two messages about refused frames of a device.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(10);

/// A monitored port.
struct MonitoredPort {
    port: dpdk::Port,
    /// Number of workers that still have queues of the port, after the removal of its device. The
    /// last one closes the port.
    queue_holders: Option<usize>,
    refusals: Refusals,
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
    fn log(&mut self, device: &DeviceView, link: &LinkStatus, refused: u64, now: Instant) {
        let (name, wanted) = (&device.name, device.mtu);
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

/// Ports by device index; `None` for devices whose link is memory, and for removed ones.
pub struct LinkMonitor {
    ports: Vec<Option<MonitoredPort>>,
    /// Indices of the kernel interfaces of shared devices, which follow the link state, by device
    /// index; `None` for other devices.
    host_interfaces: Vec<Option<u32>>,
    next_poll: Instant,
}

impl LinkMonitor {
    /// Monitors these ports, by device index; `None` for a link that is memory. `host_interfaces`:
    /// kernel interface indices, by device index too.
    pub fn new(ports: Vec<Option<dpdk::Port>>, host_interfaces: Vec<Option<u32>>) -> LinkMonitor {
        let monitor = |port| MonitoredPort {
            port,
            queue_holders: None,
            refusals: Refusals::default(),
        };
        let monitor = LinkMonitor {
            ports: ports.into_iter().map(|port| port.map(monitor)).collect(),
            host_interfaces,
            next_poll: Instant::now(),
        };
        for device in 0..monitor.ports.len() {
            let status = monitor
                .port(device)
                .and_then(|port| port.link_status().ok());
            if status.is_some_and(|status| !status.up) {
                monitor.show_to_kernel(device, false);
            }
        }
        monitor
    }

    /// Sets the carrier of a shared device's kernel interface to the link state.
    fn show_to_kernel(&self, device: usize, is_up: bool) {
        let Some(Some(interface)) = self.host_interfaces.get(device).copied() else {
            return;
        };
        let changed =
            RouteSocket::open().and_then(|mut socket| socket.set_carrier(interface, is_up));
        if let Err(error) = changed {
            tracing::warn!("cannot set the carrier of the kernel's interface: {error}");
        }
    }

    /// Time until the next poll; `None` if no port is polled.
    pub(super) fn time_until_poll(&self) -> Option<Duration> {
        let any = self.ports.iter().any(Option::is_some);
        any.then(|| self.next_poll.saturating_duration_since(Instant::now()))
    }

    /// Port of a device that has not been removed.
    fn port(&self, device: usize) -> Option<&dpdk::Port> {
        let monitored = self.ports.get(device)?.as_ref()?;
        monitored.queue_holders.is_none().then_some(&monitored.port)
    }

    fn present_mut(&mut self, device: usize) -> Option<&mut MonitoredPort> {
        let monitored = self.ports.get_mut(device)?.as_mut()?;
        monitored.queue_holders.is_none().then_some(monitored)
    }
}

impl ControlThread {
    /// Reports link changes since the last poll, and removed devices, to every client.
    pub(super) fn poll_links(&mut self) {
        let now = Instant::now();
        if now < self.config.links.next_poll {
            return;
        }
        self.config.links.next_poll = now + POLL_INTERVAL;
        for device in 0..self.config.devices.len() {
            let Some(monitored) = self.config.links.present_mut(device) else {
                continue;
            };
            if let Some(event) = monitored.port.take_event() {
                self.begin_removal(device, event);
                continue;
            }
            // A port without a readable status has lost its interface.
            let link = monitored.port.link_status().ok();
            if let Some(link) = &link {
                let refused = monitored.port.refused_packets();
                let view = &self.config.devices[device];
                monitored.refusals.log(view, link, refused, now);
            }
            let up = link.is_some_and(|status| status.up);
            let unserved_queues = link.map_or(0, |status| status.unserved_queues);
            let view = &mut self.config.devices[device];
            log_unserved_queues(view, unserved_queues);
            view.unserved_queues = unserved_queues;
            let mbps = link.map_or(0, |status| status.mbps);
            let is_other_speed = std::mem::replace(&mut view.link_mbps, mbps) != mbps;
            let has_changed = std::mem::replace(&mut view.link_up, up) != up;
            if is_other_speed || has_changed {
                self.write_link_state(device);
            }
            if !has_changed {
                continue;
            }
            let (kind, why) = if up {
                (AsyncEventKind::PortActive, "the link is up")
            } else {
                (AsyncEventKind::PortErr, "the link is down")
            };
            tracing::info!(device = %self.config.devices[device].name, "{why}");
            self.config.links.show_to_kernel(device, up);
            self.post_to_clients(kind, device, why);
        }
    }

    fn write_link_state(&self, device: usize) {
        if let Some(sysfs) = &self.sysfs {
            sysfs.update_link(&self.config.devices[device]);
        }
    }

    fn post_to_clients(&mut self, kind: AsyncEventKind, device: usize, why: &str) {
        for id in self.resources.clients.keys().copied().collect::<Vec<_>>() {
            self.post_async_event(id, kind, device as u32, why);
        }
    }

    /// Begins the removal of a device: its connections end, and no new ones are made.
    fn begin_removal(&mut self, device: usize, event: PortEvent) {
        let why = match event {
            PortEvent::Removed => "the device was removed from the machine",
            PortEvent::NeedsReset => "the device needs a reset; restart siwd to use it again",
        };
        if let Some(Some(monitored)) = self.config.links.ports.get_mut(device) {
            monitored.queue_holders = Some(self.workers.worker_count());
        }
        let view = &mut self.config.devices[device];
        (view.is_gone, view.link_up, view.link_mbps) = (true, false, 0);
        tracing::error!(device = %view.name, "{why}; its connections end, other devices continue");
        self.write_link_state(device);
        self.post_to_clients(AsyncEventKind::DeviceFatal, device, why);
        self.config.links.show_to_kernel(device, false);
        self.post_removal_to_listeners(device);
        self.workers.post_to_all(|| Command::RemovePort { device });
    }

    /// A worker has released its queues of a removed device. After the last one the device is
    /// closed; the kernel may be waiting for that.
    pub(super) fn on_port_removed(&mut self, device: usize) {
        let Some(slot) = self.config.links.ports.get_mut(device) else {
            return;
        };
        let holders = slot.as_mut().and_then(|monitored| {
            let holders = monitored.queue_holders.as_mut()?;
            *holders = holders.saturating_sub(1);
            Some(*holders)
        });
        if holders == Some(0)
            && let Some(monitored) = slot.take()
        {
            let name = &self.config.devices[device].name;
            match monitored.port.detach() {
                Ok(()) => tracing::info!(device = %name, "the device is closed"),
                Err(error) => {
                    tracing::warn!(device = %name, "the device cannot be closed: {error}")
                }
            }
        }
    }
}
