//! A sans-IO TCP/IP stack that keeps record boundaries: the transport under siwd's iWARP.
//!
//! One [`Stack`] is one device in one worker. The worker hands it bursts of received frames
//! ([`Stack::receive_burst`]), asks what happened ([`Stack::next_event`]), walks received bytes in
//! place ([`ReceiveQueue`]), queues records ([`Stack::push_record`]), and lets it send
//! ([`Stack::flush`], [`Stack::poll`]) into a [`FrameSink`]. The stack does no I/O, reads no
//! clock (the caller passes [`Instant`]s) and knows no DPDK.
//!
//! A worker's batch:
//! ```text
//! receive_burst(now, frames)             parse, demultiplex, acknowledge, queue
//! while next_event():                     each connection at most once
//!     take_acked / receive_queue.. consume complete work, parse FPDUs in place
//!     push_record.. ; flush               data carries the acknowledgement
//! poll(now)                               what is still owed: ACKs, timers, repetitions, ARP
//! ```
//!
//! Records are what the upper layer pushes: a length and a handle `R` that the sink can gather
//! from. A segment carries whole records; a record that fits a segment is never split unless the
//! peer's window forces it or the path was found narrower, and a retransmission rebuilds the same
//! segments.
#![forbid(unsafe_code)]

mod base;
mod config;
mod congestion;
mod connection;
mod flow;
mod ip;
mod link;
mod loss;
mod pmtu;
mod queues;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
#[cfg(test)]
mod smoltcp_properties;
mod stack;
mod tcb;
mod wire;

pub use base::buffer::{RecvBuf, VecBuf};
pub use base::error::StackError;
pub use base::events::Events;
pub use base::frame_info::{FrameInfo, RxChecksum};
pub use base::frame_sink::{FrameMeta, FrameSink, TxChecksum};
pub use base::ids::{ConnId, ListenerId};
pub use base::sequence::SeqNr;
pub use base::state::TcpState;
pub use base::stats::StackStats;
pub use base::time::Instant;
pub use config::{
    CongestionControl, IpCidr, Keepalive, NeighbourConfig, ReassemblyConfig, Route, StackConfig,
    TsoLimits,
};
pub use flow::steering::{Destination, Steering, WorkerSteering};
pub use flow::toeplitz::{DEFAULT_RSS_KEY, SYMMETRIC_RSS_KEY, Toeplitz};
pub use queues::receive_queue::ReceiveQueue;
pub use stack::{Stack, TcpInfo};
pub use wire::checksum;
