//! How a device sets up connections.

use super::frame::MAX_PRIVATE_DATA;
use crate::ddp::Msn;
use crate::queue_pair::OutOfOrderPolicy;
use crate::rdmap::terminate::TerminateBitOrder;

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
    pub(super) fn requests_crc(self) -> bool {
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

    /// The set of this one kind.
    pub fn from_kind(kind: RtrKind) -> Self {
        Self {
            send: kind == RtrKind::Send,
            write: kind == RtrKind::Write,
            read: kind == RtrKind::Read,
        }
    }

    /// Whether `kind` is in the set.
    pub fn contains(self, kind: RtrKind) -> bool {
        match kind {
            RtrKind::Send => self.send,
            RtrKind::Write => self.write,
            RtrKind::Read => self.read,
        }
    }

    /// The kinds that are in both sets.
    pub fn intersection(self, other: Self) -> Self {
        Self {
            send: self.send && other.send,
            write: self.write && other.write,
            read: self.read && other.read,
        }
    }

    /// Whether the set has none.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// The kind that a responder picks when several fit: Write costs nothing, Read needs IRD, and
    /// few peers know the zero-length Send.
    pub fn choose(self) -> Option<RtrKind> {
        [RtrKind::Write, RtrKind::Read, RtrKind::Send]
            .into_iter()
            .find(|&kind| self.contains(kind))
    }
}

/// How a device sets up connections. Defaults suit Linux siw, Chelsio and Intel peers alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaConfig {
    /// Revision to ask for, and the highest to accept: 1 or 2.
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
    /// Private data that is accepted from a peer, in bytes; RFC 5044 allows 512.
    pub max_private_data: u16,
    /// Try again with revision 1 when the peer resets a revision 2 request.
    pub fallback_to_rev1: bool,
    /// Agree with peers that can on immediate data with SEND, which RFC 7306 does not have.
    pub immediate_with_send: bool,
    /// In which bit order Terminates are sent.
    pub terminate_bit_order: TerminateBitOrder,
    /// Which streams place payload beyond a gap.
    pub out_of_order: OutOfOrderPolicy,
    /// Number of the first message of each queue, in both directions: 1 (RFC 5041 section 4.3).
    /// Another one is for validating what follows 2^32 messages, with a peer that begins there, too.
    pub first_msn: Msn,
    /// How long an untagged message may wait for a receive work request, in milliseconds; 0: not at
    /// all (RFC 5041 section 7.1).
    pub receive_wait_ms: u32,
    /// When an initiator sends a peer that has accepted the connection, and nothing since, an RDMA
    /// Write of nothing, in milliseconds; 0: never. Linux siw may not look at what arrives just after
    /// its MPA reply until more arrives.
    pub wake_silent_peer_ms: u32,
    /// How long a responder waits for a request, in milliseconds.
    pub request_timeout_ms: u32,
    /// How long an initiator waits for a reply, in milliseconds.
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
            immediate_with_send: true,
            terminate_bit_order: TerminateBitOrder::Rfc,
            out_of_order: OutOfOrderPolicy::Off,
            first_msn: Msn::FIRST,
            receive_wait_ms: 0,
            wake_silent_peer_ms: 0,
            request_timeout_ms: 5_000,
            reply_timeout_ms: 10_000,
        }
    }
}
