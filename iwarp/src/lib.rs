//! iWARP without I/O: MPA, DDP, RDMAP and the queue-pair state machine (RFC 5040, 5041, 5044, 6581).
//!
//! No TCP, no clock, no device: the daemon's worker drives [`QueuePair`] and the MPA machines with
//! bytes in order, acknowledgements and doorbells, and gives TCP the records that come out.
//!
//! The way of a byte: received slices ([`RxStream`]) -> FPDU and CRC ([`fpdu`]) -> headers ([`ddp`],
//! [`rdmap`]) -> key check and placement -> completion. To send: work request -> [`Fpdu`] record ->
//! [`QueuePair::build`] into a [`FrameBuilder`], again at each retransmission.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod completion;
pub mod ddp;
mod env;
mod errors;
pub mod fpdu;
pub mod mpa;
mod placement;
mod queue_pair;
pub mod rdmap;
mod read_queue;
mod receiver;
mod send_queue;
mod sender;
mod stream;
pub mod terminate;

pub use env::{AsyncEvent, Fpdu, FpduKind, FrameBuilder, QpEnv, RingFault, TxOwner, TxRecord};
pub use mpa::{MpaConfig, MpaError, Negotiated};
pub use queue_pair::{BuildError, CloseKind, CloseReason, Progress, QpAttr, QpState, QueuePair};
pub use stream::{ByteStream, RxStream};
pub use terminate::TermCode;
