//! A sans-IO TCP/IP stack that keeps record boundaries: the transport under siwd's iWARP.
//!
//! One [`Stack`] is one device in one worker. The worker hands it bursts of received frames
//! ([`Stack::receive`]), asks what happened ([`Stack::next_event`]), walks received bytes in
//! place ([`RxQueue`]), queues records ([`Stack::push_record`]), and lets it send
//! ([`Stack::flush`], [`Stack::poll`]) into a [`FrameSink`]. The stack does no I/O, reads no
//! clock (the caller passes [`Instant`]s) and knows no DPDK.
//!
//! A worker's batch:
//! ```text
//! receive(now, burst)                     parse, demultiplex, acknowledge, queue
//! while next_event():                     each connection at most once
//!     take_acked / rx_queue.. consume     complete work, parse FPDUs in place
//!     push_record.. ; flush               data carries the acknowledgement
//! poll(now)                               what is still owed: ACKs, timers, repetitions, ARP
//! ```
//!
//! Records are what the upper layer pushes: a length and a handle `R` that the sink can gather
//! from. A segment carries whole records; a record that fits a segment is never split unless the
//! peer's window forces it or the path was found narrower, and a retransmission rebuilds the same
//! segments.
#![forbid(unsafe_code)]

mod acks;
mod bare;
mod buf;
mod burst;
pub mod checksum;
mod config;
mod congestion;
mod conn;
mod control;
mod cookie;
mod datagrams;
mod demux;
mod ecn;
mod error;
mod events;
mod extension;
mod flow_table;
mod fragmentation;
mod fragments;
mod handshake;
mod hystart;
mod icmp;
mod icmp_errors;
mod inbound;
mod input;
mod mtu_probe;
mod mtu_search;
mod neighbour;
mod open;
mod output;
mod pacing;
mod path_mtu;
mod rack;
mod rate;
mod reassembly;
mod recovery;
mod rtt;
mod rx_queue;
mod segment;
mod send_queue;
mod seq;
mod shared;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod sink;
mod siphash;
mod slots;
mod stack;
mod stats;
mod steering;
mod template;
mod time;
mod time_wait;
mod timers;
mod toeplitz;
mod train;
mod validation;
mod wheel;

pub use buf::{RecvBuf, VecBuf};
pub use config::{Congestion, IpCidr, Keepalive, NeighbourConfig, Route, StackConfig, Tso};
pub use error::Error;
pub use events::Events;
pub use fragments::ReassemblyConfig;
pub use rx_queue::RxQueue;
pub use seq::SeqNr;
pub use sink::{FrameMeta, FrameSink, TxChecksum};
pub use stack::{ConnId, ConnInfo, FrameInfo, ListenerId, RxChecksum, Stack, State};
pub use stats::Stats;
pub use steering::{Destination, Home, Steering};
pub use time::Instant;
pub use toeplitz::{DEFAULT_RSS_KEY, SYMMETRIC_RSS_KEY, Toeplitz};
