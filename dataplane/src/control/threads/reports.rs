//! Reports of helper threads to the control thread: about memory, disposals and links.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crossbeam::queue::SegQueue;
use dpdk::PortEvent;
use siw_ports::LinkStatus;
use siw_shm::SharedMemory;
use siw_shm::doorbell::SleepFlag;

use crate::control::operator::device_changes::AddedDevice;
use crate::control::operator::loaded_configuration::LoadedConfiguration;
use crate::control::request::refusal::Refusal;
use crate::ids::{ClientId, CommandToken};

/// A new arena, and its DMA mapping if NICs read it.
pub(in crate::control) type MadeArena = (Arc<SharedMemory>, Option<dpdk::ExternalRegion>);

/// A helper's report.
pub(in crate::control) enum HelperReport {
    /// An order is complete or has failed.
    MemoryMade {
        client: ClientId,
        token: CommandToken,
        made: Result<MadeArena, Refusal>,
    },
    /// All memory and descriptors of a departed client are freed.
    ClientGone,
    /// An arena that its client waits for is freed.
    ArenaFreed {
        client: ClientId,
        token: CommandToken,
    },
    /// The free heap is back with the operating system.
    HeapReturned,
    /// Descriptors of this user are received again.
    HasRoom { uid: u32 },
    /// The configuration was read again, or is wrong.
    ConfigurationRead(Box<Result<LoadedConfiguration, String>>),
    /// A device that an operator adds is open, or cannot be opened.
    DeviceOpened(Box<Result<AddedDevice, Refusal>>),
    /// The link of this device changed.
    Link { device: usize, report: LinkReport },
}

/// State of a link, as reported to clients and operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::control) struct LinkState {
    pub is_up: bool,
    /// Mb/s; 0 if the port has lost its interface.
    pub mbps: u32,
    /// Receive queues of an AF_XDP interface without a socket.
    pub unserved_queues: u32,
}

impl LinkState {
    /// A port without a readable status has lost its interface.
    pub fn new(link: Option<&LinkStatus>) -> LinkState {
        LinkState {
            is_up: link.is_some_and(|status| status.up),
            mbps: link.map_or(0, |status| status.mbps),
            unserved_queues: link.map_or(0, |status| status.unserved_queues),
        }
    }
}

/// Report of the thread that watches a port.
pub(in crate::control) enum LinkReport {
    /// The state is another one than in the last report.
    Changed(LinkState),
    /// The device is unusable; the thread waits for the order to close it.
    Gone(PortEvent),
    /// The port of a removed device is closed.
    Closed,
}

/// Queues a report and wakes the control thread.
#[derive(Clone)]
pub(in crate::control) struct Reporter {
    reports: Arc<SegQueue<HelperReport>>,
    wake: Arc<OwnedFd>,
    asleep: Arc<SleepFlag>,
}

impl Reporter {
    /// Creates a reporter that wakes the control thread through `wake`.
    pub fn new(wake: Arc<OwnedFd>, asleep: Arc<SleepFlag>) -> Reporter {
        Reporter {
            reports: Arc::default(),
            wake,
            asleep,
        }
    }

    /// Returns true if a report is queued.
    pub fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }

    /// Takes the next report.
    pub fn next_report(&self) -> Option<HelperReport> {
        self.reports.pop()
    }

    /// Sends a report.
    pub fn send(&self, report: HelperReport) {
        self.reports.push(report);
        if self.asleep.must_wake() {
            let _ = nix::unistd::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }
}
