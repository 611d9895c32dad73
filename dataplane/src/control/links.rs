//! Links that go down and come up again: polled, since few virtual links raise an interrupt for
//! it, and reported to every client.

use std::time::{Duration, Instant};

use siw_shm::control::AsyncEventKind;

use super::ControlThread;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The ports of the devices, by device index; `None` for those whose link is memory.
pub struct LinkMonitor {
    ports: Vec<Option<dpdk::Port>>,
    next_poll: Instant,
}

impl LinkMonitor {
    /// Watches these ports, by device index; `None` for a link that is memory.
    pub fn new(ports: Vec<Option<dpdk::Port>>) -> LinkMonitor {
        LinkMonitor {
            ports,
            next_poll: Instant::now(),
        }
    }

    /// How long the control thread may sleep; `None`: there is nothing to poll.
    pub(super) fn time_until_poll(&self) -> Option<Duration> {
        let any = self.ports.iter().any(Option::is_some);
        any.then(|| self.next_poll.saturating_duration_since(Instant::now()))
    }
}

impl ControlThread {
    /// Reports links that changed since the last poll to every client.
    pub(super) fn poll_links(&mut self) {
        let links = &mut self.config.links;
        let now = Instant::now();
        if now < links.next_poll {
            return;
        }
        links.next_poll = now + POLL_INTERVAL;
        for device in 0..self.config.devices.len() {
            let port = self.config.links.ports.get(device).and_then(Option::as_ref);
            let Some(port) = port else { continue };
            // A port that cannot say has lost its interface.
            let link = port.link_status().ok();
            let up = link.is_some_and(|status| status.up);
            let view = &mut self.config.devices[device];
            view.link_mbps = link.map_or(0, |status| status.mbps);
            if std::mem::replace(&mut view.link_up, up) == up {
                continue;
            }
            let (kind, why) = if up {
                (AsyncEventKind::PortActive, "the link is up")
            } else {
                (AsyncEventKind::PortErr, "the link is down")
            };
            tracing::info!(device = %view.name, "{why}");
            for id in self.resources.clients.keys().copied().collect::<Vec<_>>() {
                self.post_async_event(id, kind, device as u32, why);
            }
        }
    }
}
