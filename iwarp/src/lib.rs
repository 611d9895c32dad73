//! iWARP without I/O: MPA, DDP, RDMAP and the queue-pair state machine (RFC 5040, 5041, 5044, 6581, 7306).
//!
//! No TCP, no clock, no device: the daemon's worker drives [`QueuePair`] and the MPA machines with
//! bytes in order, acknowledgements and doorbells, and gives TCP the records that come out.
//!
//! The way of a byte: received slices ([`RxStream`]) -> FPDU and CRC ([`fpdu`]) -> headers ([`ddp`],
//! [`rdmap`]) -> key check and placement -> completion. To send: work request -> [`Fpdu`] record ->
//! [`QueuePair::build`] into a [`FrameBuilder`], again at each retransmission.
//!
//! # How a worker drives it
//!
//! Set-up: [`mpa::Initiator`] or [`mpa::Responder`] read the stream and give frames, which go out as
//! [`TxRecord::Stream`], each in one segment. [`mpa::MpaConfig`] names the timers' lengths. When both
//! frames have passed, [`Negotiated`] goes into [`QueuePair::set_rts`].
//!
//! A segment arrived: [`QueuePair::receive`] with the payload, then [`QueuePair::acked`] for every
//! record that its ACK covers, in order, then [`QueuePair::next_record`] while there is room. The
//! receive window must be able to hold [`fpdu::MAX_FPDU`] bytes.
//!
//! A doorbell rang: [`QueuePair::next_record`] until `None`; in ERROR, [`QueuePair::flush`].
//!
//! A segment leaves or is sent again: [`QueuePair::build`] for each record in it. When only a part of
//! a record is wanted, build it into scratch memory and cut. After a [`BuildError`]:
//! [`QueuePair::build_failed`].
//!
//! Buffers came back from the port: [`QueuePair::poll_releases`] for queue pairs that wait for some.
//!
//! After each of these: [`QueuePair::wants_close`]. [`CloseKind::Graceful`] sends FIN behind the
//! records that TCP has, and wants a timer: a peer that never closes ends with
//! [`QueuePair::tcp_closed`] too. The peer's FIN is [`QueuePair::peer_closed`], after `receive`.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod atomic;
mod atomics;
mod builder;
mod completion;
pub mod ddp;
mod env;
mod errors;
pub mod fpdu;
mod immediate;
pub mod marker;
pub mod mpa;
#[cfg(test)]
mod msn_wrap;
mod out_of_order;
mod placement;
mod queue_pair;
pub mod rdmap;
mod read_queue;
mod reads;
mod receiver;
mod responses;
mod send_queue;
mod sender;
mod stream;
pub mod terminate;
mod terminate_in;

pub use env::{AsyncEvent, Fpdu, FpduKind, FrameBuilder, QpEnv, RingFault, TxOwner, TxRecord};
pub use mpa::{MarkerPolicy, MpaConfig, MpaError, Negotiated};
pub use out_of_order::OutOfOrder;
pub use queue_pair::{
    BuildError, CloseKind, CloseReason, Drain, Progress, QpAttr, QpState, QueuePair,
};
pub use stream::{ByteStream, RxStream};
pub use terminate::{TermCode, TerminateOrder};
