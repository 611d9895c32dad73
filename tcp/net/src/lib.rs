//! The network layer of siwd: what a host on an IP network needs below its transports. It knows no
//! connection; the transport above it is `siw-tcp`.
//!
//! | module or type | purpose |
//! |---|---|
//! | [`Network`] | addresses, routes, neighbours, and queued frames of one device in one worker |
//! | [`NetworkInput`] | received frames without a TCP segment: ARP, NDP, ICMP, fragments, datagrams, frames for the kernel's stack |
//! | [`frame`] | checks Ethernet, VLAN and IP headers in place, and finds the TCP segment |
//! | [`RecvBuf`], [`FrameSink`] | received frames, and the way out for frames to send |
//! | [`Steering`] | the worker that a flow belongs to |
//!
//! Like `siw-tcp` it does no I/O, reads no clock, starts no thread and knows no DPDK. A transport receives
//! a frame with [`frame::classify_frame`]; a TCP segment is its own, everything else it gives to
//! [`NetworkInput::receive`], which returns what concerns the transport as a value ([`Received`]): a segment
//! that arrived in fragments, an ICMP error about a segment, or a neighbour's claim for which connections
//! waited. In each turn it calls [`NetworkInput::poll`], [`Network::flush`] and
//! [`Network::send_solicitations`].
//!
//! # Relation to smoltcp
//!
//! smoltcp's wire types parse and build ARP, NDP, ICMPv6, the IP headers of ICMP messages and IP
//! fragments, and they are the reference in this crate's property tests: IP and extension headers are
//! compared with them in both directions. On the fast path headers are read in place, which needs neither
//! smoltcp's intermediate `Repr` values nor its checks of every field.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod buffer;
mod config;
mod counters;
mod error;
mod flow;
mod frame_info;
mod frame_sink;
mod ids;
mod ip;
mod link;
mod network;
mod quota_owner;
mod rate_limits;
pub mod siphash;
#[cfg(test)]
mod smoltcp_properties;
mod stats;
mod time;
mod wire;

pub use buffer::{RecvBuf, VecBuf};
pub use config::{
    HostShare, IpCidr, LearnedRoutes, NeighbourConfig, NetConfig, ReassemblyConfig, Route,
};
pub use error::NetError;
pub use flow::port_set::PortSet;
pub use flow::steering::{Destination, Steering, WorkerSteering};
pub use flow::toeplitz::{DEFAULT_RSS_KEY, SYMMETRIC_RSS_KEY, Toeplitz};
pub use frame_info::{FrameInfo, RxChecksum};
pub use frame_sink::{FrameMeta, FrameSink, PayloadPiece, TxChecksum};
pub use ids::ConnId;
pub use link::address_conflicts::AddressConflict;
pub use link::neighbours::{ClaimOutcome, NO_CONNECTION, NeighbourLookup, Neighbours};
pub use network::Network;
pub use network::datagrams::{Datagram, DatagramOutcome, PortMapperEvent};
pub use network::input::{NetworkInput, ReassembledSegment, Received};
pub use network::quoted_segment::{
    MIN_PATH_MTU_V4, MIN_PATH_MTU_V6, SegmentError, SegmentErrorKind,
};
pub use network::roce::{DatagramError, DatagramHeaders, DatagramPath, RoceDatagram};
pub use quota_owner::{OwnerScope, QuotaOwner};
pub use rate_limits::{RandomizedLimit, TokenBucket};
pub use stats::NetStats;
pub use time::{Instant, to_nanos};
pub use wire::flow_key::{FlowKey, TableHasher};
pub use wire::{bytes, checksum, constants, frame};
