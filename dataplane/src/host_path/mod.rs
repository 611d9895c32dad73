//! The exception path of a NIC that siwd owns alone: what siwd does not claim goes to the kernel's
//! stack through a TAP interface with the NIC's Ethernet address, and what the kernel sends leaves by
//! the NIC. So ssh, ping and any other program keep their NIC beside RDMA.
//!
//! ```text
//!  NIC -> rx_burst -> Stack::receive_burst -> connections, listeners
//!                           | take_host_frames()             worker
//!          HostQueue (bounded) ..............................................
//!                           v                                host thread
//!                        TAP write -> kernel -> TAP read
//!                                                   v
//!          WorkerInbox (bounded) ............................................
//!                           v                                worker
//!  NIC <- tx_burst <- PortOutput
//! ```
//! - Workers make no system call for it but to wake a thread of its own, which is kept off the workers'
//!   cores where there are others, and reads and writes the TAP, a call for each frame. A flood of frames for the kernel
//!   fills the queue, and what does not fit is dropped and counted; it costs a worker no more than
//!   looking at the frames.
//! - The descriptor is our own and not DPDK's `net_tap`, which would poll from the worker, needs
//!   packet buffers for its rings, and installs filters of its own beside the interface.
//! - The TAP has no offloads: frames come with their checksums, and not longer than the MTU. It is not
//!   persistent: the kernel removes it when the process ends, however it does.
//! - The interface shows the device's VLAN without its tags, if the device has one.
//!
//! Which TCP ports are whose at an address that both have: [`crate::host_ports`]. Which frames are the
//! kernel's: `tcp/src/stack/host_path.rs`.

mod frame_bytes;
mod queue;
mod tap;
mod thread;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use siw_tcp::IpCidr;

use crate::config::DeviceConfig;
use crate::host_ports::{ClaimError, HostPorts};

pub use queue::HostQueue;
pub use tap::{TapError, TapInterface, check_tap};
pub use thread::{HostThread, HostThreadParts};

/// The kernel's part in a device cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum HostPathError {
    /// The TAP interface.
    #[error(transparent)]
    Interface(#[from] TapError),
    /// The division of TCP ports.
    #[error("host_ports: {0}")]
    Ports(#[from] ClaimError),
    /// Memory or descriptors for the queue.
    #[error("the queue of frames for the kernel cannot be made: {0}")]
    Queue(std::io::Error),
}

/// What the configuration says of the kernel's part in a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Name of the TAP interface that siwd creates.
    pub interface: String,
    /// Addresses that the interface gets.
    pub addresses: Vec<IpCidr>,
    /// Those of them that the device has too.
    pub shared: Vec<IpAddr>,
    /// TCP ports of connects from shared addresses.
    pub ports: RangeInclusive<u16>,
    /// The kernel's routes and neighbours are siwd's too.
    pub routes: bool,
}

impl HostSettings {
    /// `None`: the device is siwd's alone.
    pub fn of_device(config: &DeviceConfig) -> Option<HostSettings> {
        let interface = config.host_interface.as_ref()?.get_ref().0.clone();
        let own = config.addresses.get_ref();
        let addresses = match &config.host_addresses {
            Some(addresses) => addresses.get_ref(),
            None => own,
        };
        let is_own = |address: &IpAddr| own.iter().any(|cidr| cidr.addr == *address);
        Some(HostSettings {
            interface,
            shared: addresses
                .iter()
                .map(|cidr| cidr.addr)
                .filter(is_own)
                .collect(),
            addresses: addresses
                .iter()
                .map(|cidr| IpCidr::new(cidr.addr, cidr.prefix))
                .collect(),
            ports: config.host_ports.get_ref().0.clone(),
            routes: config.host_routes,
        })
    }
}

/// The kernel's part in a device, set up and not yet running.
pub struct HostPath {
    /// The kernel's interface.
    pub tap: TapInterface,
    /// Where workers leave frames.
    pub queue: Arc<HostQueue>,
    /// Whose TCP ports are whose at shared addresses.
    pub ports: Arc<HostPorts>,
    /// What was configured.
    pub settings: HostSettings,
}

impl HostPath {
    /// Creates the interface, and claims the ports.
    ///
    /// # Errors
    /// What is missing, with what to do.
    pub fn set_up(
        settings: HostSettings,
        mac: [u8; 6],
        mtu: u16,
    ) -> Result<HostPath, HostPathError> {
        let tap = TapInterface::create(&settings, mac, mtu)?;
        let ports = HostPorts::claim_range(settings.shared.clone(), settings.ports.clone())?;
        Ok(HostPath {
            tap,
            queue: Arc::new(HostQueue::new().map_err(HostPathError::Queue)?),
            ports: Arc::new(ports),
            settings,
        })
    }
}
