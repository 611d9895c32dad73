//! iWARP without I/O: MPA, DDP, RDMAP and the queue-pair state machine (RFC 5040, 5041, 5044, 6581, 7306).
//!
//! No TCP, no clock, no device: the daemon's worker drives [`QueuePair`] and the MPA machines with
//! bytes in order, acknowledgements and doorbells, and gives TCP the records that come out.
//!
//! The way of a byte: received slices ([`RxStream`]) -> FPDU and CRC ([`mpa::fpdu`]) -> headers ([`ddp`],
//! [`rdmap`]) -> key check and placement -> completion. To send: work request -> [`FpduRecord`] record ->
//! [`QueuePair::build_fpdu`] into a [`FrameBuilder`], again at each retransmission.
//!
//! # How a worker drives it
//!
//! Set-up: [`mpa::MpaInitiator`] or [`mpa::MpaResponder`] read the stream and give frames, which go out as
//! [`TxRecord::Stream`], each in one segment. [`mpa::MpaConfig`] names the timers' lengths. When both
//! frames have passed, [`NegotiatedParameters`] goes into [`QueuePair::set_rts`].
//!
//! A segment arrived: [`QueuePair::receive_in_order`] with the payload, then [`QueuePair::on_record_acked`] for every
//! record that its ACK covers, in order, then [`QueuePair::next_record`] while there is room. The
//! receive window must be able to hold [`mpa::fpdu::MAX_FPDU`] bytes.
//!
//! A doorbell rang: [`QueuePair::next_record`] until `None`; in ERROR, [`QueuePair::flush_queues`].
//!
//! A segment leaves or is sent again: [`QueuePair::build_fpdu`] for each record in it. When only a part of
//! a record is wanted, build it into scratch memory and cut. After a [`BuildError`]:
//! [`QueuePair::on_build_failure`].
//!
//! Buffers came back from the port: [`QueuePair::poll_releases`] for queue pairs that wait for some.
//!
//! After each of these: [`QueuePair::requested_close`]. [`CloseKind::Graceful`] sends FIN behind the
//! records that TCP has, and wants a timer: a peer that never closes ends with
//! [`QueuePair::on_tcp_closed`] too. The peer's FIN is [`QueuePair::on_peer_fin`], after `receive`.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod ddp;
mod environment;
pub mod mpa;
mod queue_pair;
pub mod rdmap;
mod stream;

pub use environment::{
    ExtBufRef, FpduKind, FpduRecord, FrameBuilder, QpEnv, QpEvent, RingFault, TxRecord,
};
pub use mpa::{MarkerPolicy, MpaConfig, MpaError, NegotiatedParameters};
pub use queue_pair::{
    BuildError, CloseKind, CloseReason, DrainState, OutOfOrderPolicy, OutgoingFpdu, QpInitAttr,
    QueuePair, RdmapState, ReceiveProgress,
};
pub use rdmap::terminate::{TerminateBitOrder, TerminateCode};
pub use stream::{ByteStream, RxStream};
