//! AF_XDP for siwd: a NIC that stays with the kernel hands the frames of claimed addresses or TCP
//! ports to sockets of this process, past the kernel's stack, and everything else to the kernel as
//! before.
//!
//! ```text
//!   XdpInterface        properties of the NIC: number, MTU, MAC address, receive queues
//!   XdpSteering         the XDP program with its maps, attached to the NIC by a link
//!     program.rs       classification of frames, in BPF instructions (instruction.rs)
//!     bpf.rs           the bpf(2) system call
//!   XdpSocket           one AF_XDP socket: a Receiver (fill and RX ring), a Sender (TX and completion ring)
//!     ring.rs          one ring in memory shared with the kernel
//!   NeighbourCopies  copies of the ARP replies and advertisements that the kernel receives
//! ```
//!
//! The program is written in Rust and assembled when it is loaded, rather than compiled from C: it
//! needs no clang where siwd is built, no libbpf or libxdp where it runs, and each kind of claim gets
//! the program without the other's branches. It is attached by a BPF link, which the kernel detaches
//! when its descriptor is closed, so also when siwd is killed. That is why DPDK's own AF_XDP driver is
//! not used: it attaches by netlink, and leaves the program on the NIC of a killed process. It also
//! has no receive interrupts, and waits up to a second inside of a receive burst.
//!
//! Users of this crate are `siw-ports`, which puts packet buffers into the sockets' rings, and `siwd`,
//! which fills the maps.

#![deny(missing_docs)]

mod attached;
mod bpf;
mod error;
mod instruction;
mod interface;
mod neighbour_copies;
mod program;
mod ring;
mod socket;
mod steering;

pub use error::{Error, Result};
pub use interface::{FrameMembership, InterfaceOffloads, XdpInterface};
pub use neighbour_copies::NeighbourCopies;
pub use program::ClaimKind;
pub use socket::{
    CopyMode, Frame, PACKET_HEADROOM, Receiver, Sender, SocketConfig, SocketCounters, SocketHandle,
    Umem, XdpSocket,
};
pub use steering::{AttachMode, Claim, Verdict, XdpSteering};
