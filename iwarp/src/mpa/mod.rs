//! Marker PDU aligned framing (RFC 5044, RFC 6581): connection set-up, FPDUs and markers.
//!
//! [`MpaInitiator`] and [`MpaResponder`] are the two state machines of the set-up. They read a stream
//! and answer with frames and decisions; the daemon owns the timers, whose lengths are in
//! [`MpaConfig`].
//!
//! ```text
//! initiator                             responder
//! MpaInitiator::new -> request_frame() -> on_stream -> Request{private data}
//!                                         accept()/reject()
//! on_stream -> Accepted/Rejected <------- reply
//! RTR FPDU (RFC 6581) ------------------> first FPDU: may send
//! ```
//!
//! [`fpdu`] frames the stream after set-up, [`marker`] defines the marker positions in it.
//! PROTOCOL.md sections 2 and 3 describe formats and rules.

mod config;
mod error;
pub mod fpdu;
mod frame;
mod initiator;
pub mod marker;
mod responder;

pub use config::{MarkerPolicy, MpaConfig, MpaCrcPolicy, OutOfOrderPolicy, RtrKind, RtrKinds};
pub use error::MpaError;
use frame::PrivateDepths;
pub use frame::{EnhancedData, MAX_PRIVATE_DATA, MPA_HEADER_LEN, MpaFrame, MpaFrameKind};
pub use initiator::{InitiatorStep, MpaInitiator};
pub use responder::{ConnectRequest, MpaResponder, ResponderStep};
use serde::{Deserialize, Serialize};

/// IRD or ORD value that means "not negotiated by this frame" (RFC 6581 section 9.1).
pub const DEPTH_UNNEGOTIATED: u16 = 0x3fff;

/// The IRD to announce: rounded up to a power of two within the device's limit, because Linux siw
/// rounds its ORD up to one (PROTOCOL.md section 7.1).
fn announced_ird(config: &MpaConfig, ird: u16) -> u16 {
    let ird = ird.min(DEPTH_UNNEGOTIATED >> 1);
    let rounded_up = if ird == 0 { 0 } else { ird.next_power_of_two() };
    rounded_up.min(config.max_ird)
}

/// Parameters that both sides agreed on; input of [`QueuePair::set_rts`](crate::QueuePair::set_rts).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NegotiatedParameters {
    /// This side sent the request, and sends the first FPDU.
    pub initiator: bool,
    /// FPDUs carry a CRC.
    pub crc: bool,
    /// The peer sends markers, because this side asked for them.
    pub markers_in: bool,
    /// This side sends markers, because the peer asked for them.
    pub markers_out: bool,
    /// IRD: Reads that the peer may have outstanding.
    pub ird: u16,
    /// ORD: Reads that this side may have outstanding.
    pub ord: u16,
    /// Both sides treat Immediate Data and the following Send as one message (PROTOCOL.md section
    /// 8.8).
    pub joins_immediate: bool,
    /// The ready-to-receive message that starts the stream.
    pub rtr: Option<RtrKind>,
    /// Revision of the exchange.
    pub revision: u8,
}
