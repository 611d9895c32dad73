//! iWARP without I/O: MPA, DDP, RDMAP and the queue-pair state machine (RFC 5040, 5041, 5044, 6581,
//! 7306). `PROTOCOL.md` beside the sources gathers the facts that comments cite; `CONFORMANCE.md`
//! lists the numbered cases.
//!
//! No TCP, no clock, no device: the daemon's worker drives [`QueuePair`] and the MPA state machines
//! with bytes in order, acknowledgements and doorbells, and gives TCP the records that come out.
//!
//! Data path, receive: slices of the stream ([`RxStream`]) -> FPDU and CRC ([`mpa::fpdu`]) -> headers
//! ([`ddp`], [`rdmap`]) -> key check and placement -> completion. Send: work request ->
//! [`FpduRun`] -> [`QueuePair::build_run`], [`QueuePair::build_fpdu`] into a [`FrameBuilder`], again at each
//! retransmission.
//!
//! # How a worker drives it
//!
//! Set-up: [`mpa::MpaInitiator`] or [`mpa::MpaResponder`] read the stream and give frames, which go
//! out as [`TxRecord::Stream`], each in one segment. [`MpaConfig`] has the lengths of the timers. When
//! both frames have passed, [`NegotiatedParameters`] go into [`QueuePair::set_rts`].
//!
//! A segment arrived: [`QueuePair::receive_in_order`] with the payload, then
//! [`QueuePair::on_fpdus_acked`] for all that its ACK covers, in order, and
//! [`QueuePair::complete_acked`], then [`QueuePair::next_records`] with the room that there is. The receive
//! window must be able to hold [`mpa::fpdu::MAX_FPDU`] bytes.
//!
//! A doorbell rang: [`QueuePair::next_records`]; in ERROR, [`QueuePair::flush_queues`].
//!
//! A segment leaves or is sent again: [`QueuePair::build_run`] for what it has of each record, and
//! [`QueuePair::build_fpdu`] for each FPDU that is left. When only a part of an FPDU is wanted, build it into
//! scratch memory and cut. After a [`BuildError`]:
//! [`QueuePair::on_build_failure`].
//!
//! Buffers came back from the port: [`QueuePair::poll_releases`] for queue pairs for which
//! [`QpEnv::is_released`] said no.
//!
//! After each of these: [`QueuePair::requested_close`]. [`CloseKind::Graceful`] sends FIN behind the
//! records that TCP has, and wants a timer: a peer that never closes ends with
//! [`QueuePair::on_tcp_closed`] too. The peer's FIN is [`QueuePair::on_peer_fin`], after
//! `receive_in_order`.
//!
//! # Example
//!
//! Two ends set up a connection; their streams are plain memory here.
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
mod queue_pair;
pub mod rdmap;
mod record;
mod stream;

pub use environment::{ExtBufRef, QpEnv, QpEvent, RingFault};
pub use mpa::{MarkerPolicy, MpaConfig, MpaError, NegotiatedParameters};
pub use queue_pair::{
    BuildError, CloseKind, CloseReason, DrainState, OutOfOrderPolicy, QpInitAttr, QueuePair,
    RdmapState, ReceiveProgress,
};
pub use rdmap::terminate::{TerminateBitOrder, TerminateCode};
pub use record::{
    FpduKind, FpduRecord, FpduRun, FrameBuilder, MessageSlot, OutgoingFpdu, TxRecord,
};
pub use stream::{ByteStream, RxStream};
