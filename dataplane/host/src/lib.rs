//! Sharing of a NIC between siwd and the kernel's network stack.
//!
//! Exception path of a NIC that only siwd drives: frames not claimed by siwd go to the kernel's
//! stack through a TAP interface with the NIC's Ethernet address, and frames sent by the kernel
//! leave through the NIC. So ssh, ping and all other programs keep using the NIC alongside RDMA.
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
//! - Workers make no system call for this path, except to wake the host thread. That thread is kept
//!   off the workers' cores if there are others, and reads and writes the TAP with one call per
//!   frame. A flood of frames for the kernel fills the queue; further frames are dropped and
//!   counted, and cost a worker only their classification.
//! - The descriptor is siwd's own rather than DPDK's `net_tap`, which would poll from the worker,
//!   needs packet buffers for its rings, and installs filters next to the interface.
//! - The TAP has no offloads: frames carry their checksums and are at most one MTU long. It is not
//!   persistent: the kernel removes it when the process ends, even if killed.
//! - If the device has a VLAN, the interface carries its frames untagged.
//!
//! [`ports`] divides the TCP ports of shared addresses, [`netlink`] asks the kernel for its interfaces,
//! addresses, routes and neighbours, and [`routes`] follows the last two for each device. The daemon gives the kernel's frames a way out ([`WorkerQueue`]).
//! Classification of the kernel's frames: `tcp/src/stack/host_path.rs`.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod frame_bytes;
pub mod netlink;
pub mod ports;
mod queue;
pub mod routes;
mod tap;
mod thread;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use siw_net::IpCidr;

use crate::ports::{ClaimError, HostPorts};

pub use queue::HostQueue;
pub use tap::{TapError, TapInterface, check_tap};
pub use thread::{HostThread, HostThreadParts, WorkerQueue};

/// Failure to set up the exception path of a device.
#[derive(Debug, thiserror::Error)]
pub enum HostPathError {
    /// Failure of the TAP interface.
    #[error(transparent)]
    Interface(#[from] TapError),
    /// Failure to claim the TCP ports.
    #[error("host_ports: {0}")]
    Ports(#[from] ClaimError),
    /// Failure to create the frame queue.
    #[error("cannot create the queue of frames for the kernel: {0}")]
    Queue(std::io::Error),
}

/// Configuration of a device's exception path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Name of the TAP interface that siwd creates.
    pub interface: String,
    /// Addresses of the interface.
    pub addresses: Vec<IpCidr>,
    /// Those of them that the device shares.
    pub shared: Vec<IpAddr>,
    /// TCP ports for siwd's connects from shared addresses.
    pub ports: RangeInclusive<u16>,
    /// Follow the kernel's routes and neighbours.
    pub routes: bool,
}

/// The exception path of a device, set up but not running.
pub struct HostPath {
    /// The kernel's interface.
    pub tap: TapInterface,
    /// Queue of frames from workers.
    pub queue: Arc<HostQueue>,
    /// TCP port ownership at shared addresses.
    pub ports: Arc<HostPorts>,
    /// Configuration.
    pub settings: HostSettings,
}

impl HostPath {
    /// Creates the interface and claims the ports.
    ///
    /// # Errors
    /// The cause, with a remedy.
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
