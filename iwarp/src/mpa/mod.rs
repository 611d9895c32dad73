//! MPA connection set-up (RFC 5044 section 7, RFC 6581): the frames, the configuration, and what
//! comes out of the negotiation.
//!
//! [`MpaInitiator`] and [`MpaResponder`] are the two state machines. They read a stream and answer with
//! frames and decisions; the daemon owns the timers, whose lengths are in [`MpaConfig`].
//!
//! ```text
//! initiator                             responder
//! MpaInitiator::new -> request() ----------> on_stream -> Request{private data}
//!                                         accept()/reject()
//! on_stream -> Accepted/Rejected <------- reply
//! RTR FPDU (RFC 6581) ------------------> first FPDU: may send
//! ```

pub mod fpdu;
mod frame;
mod initiator;
pub mod marker;
mod responder;

pub use frame::{EnhancedData, MAX_PRIVATE_DATA, MPA_HEADER_LEN, MpaFrame, MpaFrameKind};
pub use initiator::{InitiatorStep, MpaInitiator};
pub use responder::{ConnectRequest, MpaResponder, ResponderStep};

use crate::ddp::Msn;
use crate::queue_pair::OutOfOrderPolicy;
use crate::rdmap::terminate::{TerminateBitOrder, TerminateCode};

/// IRD/ORD value that means "not negotiated here" (RFC 6581 section 9.1).
pub const DEPTH_UNNEGOTIATED: u16 = 0x3fff;

/// Whether FPDUs carry a valid CRC (RFC 5044 section 7.1.1: on when either side wants it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MpaCrcPolicy {
    /// Do not ask for it; use it when the peer asks.
    IfAsked,
    /// Ask for it, and use it even if the peer's reply does not say so.
    #[default]
    Asked,
    /// Ask for it, and refuse a reply that does not say so.
    Required,
}

impl MpaCrcPolicy {
    fn asks(self) -> bool {
        self != Self::IfAsked
    }
}

/// Markers in the streams of a device (RFC 5044 sections 4.3 and 7.1.1): each side tells whether it
/// wants to receive them, and the other must then send them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MarkerPolicy {
    /// Neither ask for them nor send any: a peer that wants them is refused.
    Never,
    /// Send them to a peer that wants them.
    #[default]
    Accept,
    /// Want to receive them, too. Linux siw and most hardware refuse such a connection.
    Request,
}

/// The kinds of ready-to-receive message (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RtrKind {
    /// B: a zero-length Send that consumes no receive work request.
    Send,
    /// C: a zero-length RDMA Write.
    Write,
    /// D: a zero-length RDMA Read Request.
    Read,
}

/// A set of RTR kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RtrKinds {
    /// B flag.
    pub send: bool,
    /// C flag.
    pub write: bool,
    /// D flag.
    pub read: bool,
}

impl RtrKinds {
    /// None of them.
    pub const NONE: Self = Self {
        send: false,
        write: false,
        read: false,
    };
    /// Write and Read: what hardware and siw understand.
    pub const WRITE_READ: Self = Self {
        send: false,
        write: true,
        read: true,
    };

    /// Only this one.
    pub fn only(kind: RtrKind) -> Self {
        Self {
            send: kind == RtrKind::Send,
            write: kind == RtrKind::Write,
            read: kind == RtrKind::Read,
        }
    }

    /// Holds `kind`.
    pub fn contains(self, kind: RtrKind) -> bool {
        match kind {
            RtrKind::Send => self.send,
            RtrKind::Write => self.write,
            RtrKind::Read => self.read,
        }
    }

    /// Those that are in both.
    pub fn intersection(self, other: Self) -> Self {
        Self {
            send: self.send && other.send,
            write: self.write && other.write,
            read: self.read && other.read,
        }
    }

    /// Holds none.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// The kind that a responder picks when several fit: Write costs nothing, Read needs IRD, and
    /// few peers know the zero-length Send.
    pub fn choose(self) -> Option<RtrKind> {
        [RtrKind::Write, RtrKind::Read, RtrKind::Send]
            .into_iter()
            .find(|&k| self.contains(k))
    }
}

/// How a device sets up connections. Defaults suit Linux siw, Chelsio and Intel peers alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaConfig {
    /// Revision to ask for, and the highest to accept: 1 or 2 (0 is taken as 1 from a peer).
    pub revision: u8,
    /// CRC policy.
    pub crc: MpaCrcPolicy,
    /// Marker policy.
    pub markers: MarkerPolicy,
    /// Ask for a ready-to-receive exchange (A flag), so that either side may send first.
    pub peer_to_peer: bool,
    /// RTR kinds that are offered, and accepted from a peer.
    pub rtr_kinds: RtrKinds,
    /// Inbound reads that this device can hold (IRD); a power of two serves siw peers best.
    pub max_ird: u16,
    /// Outbound reads that this device issues at most (ORD).
    pub max_ord: u16,
    /// Private data that is accepted from a peer; 5044 allows 512.
    pub max_private_data: u16,
    /// Try again with revision 1 when the peer resets a revision 2 request.
    pub fallback_to_rev1: bool,
    /// How Terminates begin.
    pub terminate_bit_order: TerminateBitOrder,
    /// Which streams place payload beyond a hole.
    pub out_of_order: OutOfOrderPolicy,
    /// Number of the first message of each queue, both ways: 1 (RFC 5041 section 4.3). Another one
    /// is for validating what comes after 2^32 messages, with a peer that begins there as well.
    pub first_msn: Msn,
    /// How long a responder waits for a request.
    pub request_timeout_ms: u32,
    /// How long an initiator waits for a reply.
    pub reply_timeout_ms: u32,
}

impl Default for MpaConfig {
    fn default() -> Self {
        Self {
            revision: 2,
            crc: MpaCrcPolicy::Asked,
            markers: MarkerPolicy::Accept,
            peer_to_peer: true,
            rtr_kinds: RtrKinds::WRITE_READ,
            max_ird: 128,
            max_ord: 128,
            max_private_data: MAX_PRIVATE_DATA as u16,
            fallback_to_rev1: true,
            terminate_bit_order: TerminateBitOrder::Rfc,
            out_of_order: OutOfOrderPolicy::Off,
            first_msn: Msn::FIRST,
            request_timeout_ms: 5_000,
            reply_timeout_ms: 10_000,
        }
    }
}

/// The IRD to tell a peer: a power of two as far as the device allows, because Linux siw rounds its
/// ORD up to one.
fn announced_ird(cfg: &MpaConfig, ird: u16) -> u16 {
    let ird = ird.min(DEPTH_UNNEGOTIATED >> 1);
    let up = if ird == 0 { 0 } else { ird.next_power_of_two() };
    up.min(cfg.max_ird)
}

/// What both sides agreed on; goes into [`QueuePair::set_rts`](crate::QueuePair::set_rts).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NegotiatedParameters {
    /// This side sent the request, and sends the first FPDU.
    pub initiator: bool,
    /// FPDUs carry a CRC.
    pub crc: bool,
    /// The peer sends markers, because this side asked for them.
    pub markers_in: bool,
    /// This side sends markers, because the peer asked for them.
    pub markers_out: bool,
    /// Reads that the peer may have outstanding towards us.
    pub ird: u16,
    /// Reads that we may have outstanding towards the peer.
    pub ord: u16,
    /// The ready-to-receive message that starts the stream.
    pub rtr: Option<RtrKind>,
    /// Revision of the exchange.
    pub revision: u8,
}

/// Why a set-up failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MpaError {
    /// The frame does not start with the key of RFC 5044 section 7.1.1.
    #[error("MPA key is wrong: the peer does not speak iWARP on this port")]
    BadKey,
    /// Both sides sent requests.
    #[error("peer sent an MPA request where a reply belongs: both sides are initiators")]
    BothInitiators,
    /// A reply where a request belongs.
    #[error("peer sent an MPA reply where a request belongs")]
    UnexpectedReply,
    /// A revision that is not supported.
    #[error(
        "MPA revision {0} is not supported (0, 1 and 2 are); set rev in the device configuration"
    )]
    BadRevision(u8),
    /// PD_Length above the RFC's 512, or above the configured limit.
    #[error("MPA frame announces {0} bytes of private data, which is too much")]
    PrivateDataTooLong(u16),
    /// Own private data does not fit.
    #[error("private data of {0} bytes does not fit into an MPA frame")]
    OwnPrivateDataTooLong(usize),
    /// S=1 and fewer than four bytes.
    #[error("enhanced MPA frame is too short for its IRD and ORD")]
    EnhancedTooShort,
    /// S does not match what was asked for.
    #[error("peer answered without (or with unasked) enhanced connection data")]
    EnhancedMismatch,
    /// Bytes before it was the peer's turn.
    #[error("peer sent bytes after its MPA frame before it may")]
    TrailingBytes,
    /// The peer wants markers.
    #[error("peer asks for MPA markers, which this device is configured not to send")]
    MarkersUnsupported,
    /// The peer's reply leaves the CRC out.
    #[error("peer's reply leaves out the CRC that this device requires")]
    CrcRefused,
    /// No RTR kind in common.
    #[error("no ready-to-receive message that both sides know")]
    NoRtr,
    /// IRD of one side does not reach the ORD of the other.
    #[error("peer's ORD {peer_ord} exceeds the {ird} inbound reads of this device")]
    InsufficientIrd {
        /// Outbound reads of the peer.
        peer_ord: u16,
        /// Inbound reads that this device can hold.
        ird: u16,
    },
    /// A call that does not fit the state, such as accepting before a request came.
    #[error("MPA connection is not in a state for this call")]
    WrongState,
}

impl MpaError {
    /// The Terminate code with which the stream ends, for those errors that have one (RFC 6581
    /// section 7).
    pub fn terminate_code(self) -> Option<TerminateCode> {
        match self {
            Self::NoRtr => Some(TerminateCode::MPA_NO_RTR),
            Self::InsufficientIrd { .. } => Some(TerminateCode::MPA_INSUFFICIENT_IRD),
            // The reply is sound, and this side cannot do as it says.
            Self::MarkersUnsupported | Self::CrcRefused => Some(TerminateCode::MPA_CATASTROPHIC),
            _ => None,
        }
    }
}
