//! iWARP without I/O: MPA, DDP, RDMAP and the queue-pair state machine (RFC 5040, 5041, 5044, 6581,
//! 7306). `PROTOCOL.md` in this crate's directory gathers the facts that comments cite;
//! `TESTS.md` lists the numbered tests, `CONFORMANCE.md` the verdicts of siw-lab.
//!
//! The crate has no TCP, no clock and no device. The daemon's worker drives [`QueuePair`] and the MPA
//! state machines with in-order bytes, acknowledgements and doorbells, and passes the records that
//! they produce to TCP.
//!
//! Receive data path: slices of the stream ([`RxStream`]) -> FPDU and CRC ([`mpa::fpdu`]) -> headers
//! ([`ddp`], [`rdmap`]) -> key check and placement -> completion. Send data path: work request ->
//! [`FpduRun`] -> [`QueuePair::build_fpdus`] into a [`FrameBuilder`], repeated at each retransmission.
//!
//! # How a worker drives it
//!
//! Connection set-up: [`mpa::MpaInitiator`] and [`mpa::MpaResponder`] read the stream and return
//! frames, which are sent as [`TxRecord::Stream`], each in one segment. [`MpaConfig`] has the timer
//! durations. After both frames have been exchanged, pass the [`NegotiatedParameters`] to
//! [`QueuePair::set_rts`].
//!
//! On a received segment: call [`QueuePair::receive_in_order`] with the payload, then
//! [`QueuePair::on_fpdus_acked`] for each record that its ACK covers, in order, then
//! [`QueuePair::complete_acked`], then [`QueuePair::next_records`] with the available send room. The
//! receive window must be able to hold [`mpa::fpdu::MAX_FPDU`] bytes.
//!
//! On a doorbell: call [`QueuePair::next_records`]; in ERROR, [`QueuePair::flush_queues`].
//!
//! To transmit or retransmit a segment: call [`QueuePair::build_fpdus`] for its part of each record.
//! When the segment needs only part of an FPDU, build the FPDU into scratch memory and cut it. After
//! a [`BuildError`], call [`QueuePair::on_build_failure`].
//!
//! When the port returns buffers: call [`QueuePair::poll_releases`] for the queue pairs for which
//! [`QpEnv::is_released`] returned `false`.
//!
//! After each of these, check [`QueuePair::requested_close`]. [`CloseKind::Graceful`] sends a FIN
//! after the records that TCP already has, and needs a timer: when it expires because the peer never
//! closes, call [`QueuePair::on_tcp_closed`] as well. On the peer's FIN, call
//! [`QueuePair::on_peer_fin`] after `receive_in_order`.
//!
//! # Example
//!
//! Two endpoints set up a connection; their streams are plain memory here.
//!
//! ```
//! use siw_iwarp::mpa::{InitiatorStep, MpaInitiator, MpaResponder, ResponderStep};
//! use siw_iwarp::{ByteStream, MpaConfig, QpInitAttr, QueuePair, RdmapState};
//! use siw_shm::Access;
//!
//! let config = MpaConfig::default();
//! let mut initiator = MpaInitiator::new(&config, 16, 16, b"hello")?;
//! let mut responder = MpaResponder::new(&config);
//!
//! // The request arrives; the application of the responder accepts it.
//! let mut to_responder = ByteStream::from(&initiator.request_frame()[..]);
//! let ResponderStep::Request(request) = responder.on_stream(&mut to_responder) else {
//!     panic!("the request is complete and sound");
//! };
//! assert_eq!(request.private_data, b"hello");
//! let (reply, _) = responder.accept(16, 16, b"welcome")?;
//!
//! // The reply arrives; the queue pair enters FPDU mode.
//! let mut to_initiator = ByteStream::from(&reply[..]);
//! let InitiatorStep::Accepted { negotiated, private_data } =
//!     initiator.on_stream(&mut to_initiator)
//! else {
//!     panic!("the reply is complete and accepts");
//! };
//! assert_eq!(private_data, b"welcome");
//! let mut queue_pair = QueuePair::new(QpInitAttr {
//!     qpn: 1,
//!     pd: 1,
//!     max_send_wr: 16,
//!     max_recv_wr: 16,
//!     sq_sig_all: false,
//!     denied_access: Access::NONE,
//! });
//! queue_pair.set_rts(negotiated, 1448);
//! assert_eq!(queue_pair.state(), RdmapState::Rts);
//! // The ready-to-receive message waits to be sent.
//! assert!(queue_pair.has_output());
//! # Ok::<(), siw_iwarp::MpaError>(())
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod ddp;
mod environment;
pub mod mpa;
pub mod port_mapper;
mod queue_pair;
pub mod rdmap;
mod record;
mod stream;

pub use environment::{ExtBufRef, QpEnv, QpEvent, RingFault};
pub use mpa::{MarkerPolicy, MpaConfig, MpaError, NegotiatedParameters, OutOfOrderPolicy};
pub use queue_pair::{
    BuildError, CloseKind, CloseReason, DrainState, QpInitAttr, QueuePair, QueuePairInfo,
    RdmapState, ReceiveProgress,
};
pub use rdmap::terminate::{TerminateBitOrder, TerminateCode};
pub use record::{
    FpduKind, FpduRecord, FpduRun, FrameBuilder, MessageSlot, OutgoingFpdu, TxRecord,
};
pub use stream::{ByteStream, RxStream};
