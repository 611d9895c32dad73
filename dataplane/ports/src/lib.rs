//! Ports that siwd's workers receive and send through.
//!
//! ```text
//!   Port ──┬── dpdk::Port       all links that DPDK has a driver for       dpdk
//!          ├── PacketPort       an interface of the kernel (AF_PACKET):    packet_port.rs
//!          │                    DPDK's port, except for transmission
//!          └── XdpPort          an interface that stays with the kernel    xdp_port.rs, xdp_queue.rs
//!                               (AF_XDP)
//! ```
//!
//! A started [`Port`] has an [`RxQueue`] and a [`TxQueue`] for each worker. [`ReceiveQueue`] and
//! [`TransmitQueue`] are what a worker needs of them. Frames are packets of DPDK's pools on every port,
//! so the rest of the data path does not know the kind of a port; a queue decides on it once per burst.

#![deny(missing_docs)]

mod error;
mod packet_port;
mod port;
mod queue;
mod xdp_port;
mod xdp_queue;

pub use error::{Error, Result};
pub use port::{LinkStatus, Port, PortQueues};
pub use queue::{ReceiveQueue, RxQueue, TransmitQueue, TxQueue};
pub use siw_xdp::{Claim, ClaimKind, CopyMode, XdpInterface};
pub use xdp_port::XdpLink;
