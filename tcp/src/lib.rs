//! A sans-IO TCP that keeps record boundaries, over the network layer of the crate `siw-net`: the transport
//! under siwd's iWARP.
//!
//! One [`Stack`] is one device in one worker. It does no I/O, reads no clock (the caller passes
//! [`Instant`](siw_net::Instant)s), starts no thread and knows no DPDK, so that a test runs it in virtual
//! time. A worker repeats:
//!
//! | call | effect |
//! |---|---|
//! | [`Stack::receive_burst`] | parses received frames in place, finds their connections, processes ACKs, queues data |
//! | [`Stack::next_event`] | returns the events of the next connection, each connection at most once in a batch |
//! | [`Stack::receive_queue`] | in-order bytes in the buffers they arrived in ([`ReceiveQueue`]), to parse in place |
//! | [`Stack::take_acked`] | returns the acknowledged records, whose memory can then be reused |
//! | [`Stack::push_record`], [`Stack::flush`] | queue records; send them, with the ACK of the received data |
//! | [`Stack::poll`] | serves timers and sends pending output: ACKs, retransmissions, ARP |
//!
//! Frames go to a [`FrameSink`](siw_net::FrameSink); in the daemon the sink fills DPDK mbufs.
//! [`Stack::next_deadline`] returns the time at which `poll` is due if no frame arrives before.
//!
//! **Records.** The upper layer pushes records: a length and a handle `R` from which the sink gathers
//! the bytes. A segment carries whole records. A record that fits a segment is split only if the
//! peer's window or a reduced path MTU forces it, and a retransmission has the same boundaries. So
//! every segment begins with an FPDU of MPA (RFC 5044), and nothing is copied into a send buffer.
//! Many records of one length can be pushed as one run ([`NewRecords::push_run`]): each unit of the
//! run then has the guarantees of a record, and [`Stack::take_acked_units`] returns the
//! acknowledged units.
//!
//! # Example
//!
//! Two stacks in one process, joined by a link in memory:
//!
//! ```
//! use siw_net::{FrameInfo, FrameMeta, FrameSink, Instant, IpCidr, PayloadPiece, RxChecksum, VecBuf};
//! use siw_tcp::{Events, Stack, StackConfig, StackError};
//!
//! /// Collects the frames of one stack; records are plain vectors.
//! #[derive(Default)]
//! struct MemoryLink {
//!     frames: Vec<Vec<u8>>,
//! }
//!
//! impl FrameSink<Vec<u8>> for MemoryLink {
//!     fn send_frame<'a>(
//!         &mut self,
//!         headers_len: usize,
//!         _meta: &FrameMeta,
//!         fill: impl FnOnce(&mut [u8]),
//!         payload: impl IntoIterator<Item = PayloadPiece<'a, Vec<u8>>>,
//!     ) -> bool {
//!         let mut frame = vec![0; headers_len];
//!         fill(&mut frame);
//!         for piece in payload {
//!             frame.extend(match piece {
//!                 PayloadPiece::Bytes(bytes) => bytes,
//!                 PayloadPiece::Record { record, offset, len, .. } => {
//!                     &record[offset as usize..(offset + len) as usize]
//!                 }
//!             });
//!         }
//!         self.frames.push(frame);
//!         true
//!     }
//! }
//!
//! type Host = Stack<VecBuf, Vec<u8>>;
//!
//! fn host(number: u8, now: Instant) -> Result<Host, StackError> {
//!     let address = IpCidr::new([10, 0, 0, number].into(), 24);
//!     Stack::new(StackConfig::new([2, 0, 0, 0, 0, number], vec![address]), now)
//! }
//!
//! /// Carries frames between the hosts until neither sends any more.
//! fn exchange(now: Instant, hosts: &mut [Host; 2]) {
//!     let mut quiet = false;
//!     while !quiet {
//!         quiet = true;
//!         for from in 0..2 {
//!             let mut link = MemoryLink::default();
//!             hosts[from].poll(now, &mut link);
//!             quiet &= link.frames.is_empty();
//!             // Frames in memory cannot be damaged: checksums need not be computed.
//!             let info = FrameInfo { checksum: RxChecksum::Good, rss_hash: 0 };
//!             let frames = link.frames.into_iter().map(|frame| (VecBuf::from(frame), info));
//!             hosts[1 - from].receive_burst(now, frames);
//!         }
//!     }
//! }
//!
//! /// Returns the connection of the next event of this kind.
//! fn expect_event(host: &mut Host, expected: Events) -> siw_net::ConnId {
//!     loop {
//!         let (id, _user, events) = host.next_event().expect("an event");
//!         if events.contains(expected) {
//!             return id;
//!         }
//!     }
//! }
//!
//! let now = Instant::from_millis(1_000);
//! let mut hosts = [host(1, now)?, host(2, now)?];
//! hosts[1].listen(None, 7, 16, 0)?;
//! let client = hosts[0].connect(now, None, None, ([10, 0, 0, 2], 7).into(), 0)?;
//! exchange(now, &mut hosts); // ARP, SYN, SYN-ACK, ACK
//! let server = expect_event(&mut hosts[1], Events::ACCEPTED);
//!
//! let record = b"a record".to_vec();
//! hosts[0].push_record(client, record.len() as u32, record, true).expect("an open connection");
//! exchange(now, &mut hosts);
//! let received = hosts[1].receive_queue(server).expect("a connection");
//! assert_eq!(received.contiguous_slice(0, 8), Some(&b"a record"[..]));
//! received.consume(8);
//!
//! // The receiver delays its ACK (by default 1 ms); then the record is returned.
//! let now = Instant::from_millis(1_010);
//! exchange(now, &mut hosts);
//! expect_event(&mut hosts[0], Events::ACKED);
//! hosts[0].take_acked(client, |record| assert_eq!(record, b"a record"));
//! # Ok::<(), StackError>(())
//! ```
//!
//! # Relation to smoltcp
//!
//! The network layer below TCP is the crate `siw-net`, which uses smoltcp's wire types on slow paths. Here
//! they are the reference in property tests: segments, options and header templates are compared with them
//! in both directions.
//!
//! TCP is written here, because smoltcp is made for small devices and this stack for many
//! connections at line rate:
//! - smoltcp's sockets copy bytes through a buffer of each socket and know no record boundaries; here
//!   received buffers are moved, not copied, and records are gathered when they are sent.
//! - smoltcp has no SACK-based loss recovery, RACK-TLP, PRR, ECN, pacing, path MTU discovery or SYN
//!   cookies.
//! - smoltcp polls every socket; here the work is proportional to arriving frames and expiring timers
//!   (dirty list, timer wheel, keyed flow table).
//! - The data path parses TCP/IP headers in place and patches a header template for each segment, which
//!   needs neither smoltcp's intermediate `Repr` values nor its checks of every field.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod base;
mod config;
mod congestion;
mod connection;
mod flow;
mod loss;
mod path_mtu;
mod queues;
#[cfg(test)]
mod smoltcp_properties;
mod stack;
mod tcb;
mod wire;

pub use base::error::StackError;
pub use base::events::Events;
pub use base::ids::ListenerId;
pub use base::retransmissions::Retransmissions;
pub use base::sequence::SeqNr;
pub use base::state::TcpState;
pub use base::stats::{StackStats, TcpStats};
pub use config::{CongestionControl, Keepalive, StackConfig, TcpConfig, TsoLimits};
pub use queues::receive_queue::ReceiveQueue;
pub use stack::transmit::NewRecords;
pub use stack::{Stack, TcpInfo};
