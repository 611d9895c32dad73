//! Configuration of connection set-up for a device.

use super::frame::MAX_PRIVATE_DATA;
use crate::ddp::Msn;
use crate::rdmap::terminate::TerminateBitOrder;
use serde::{Deserialize, Serialize};

/// Policy for the CRC of FPDUs (RFC 5044 section 7.1.1: on when either side requests it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum MpaCrcPolicy {
    /// Do not request it; use it when the peer requests it.
    IfAsked,
    /// Request it, and use it even if the peer's reply does not set the flag.
    #[default]
    Asked,
    /// Request it, and refuse a reply that does not set the flag.
    Required,
}

impl MpaCrcPolicy {
    pub(super) fn requests_crc(self) -> bool {
        self != Self::IfAsked
    }
}

/// Selects the streams that may place payload beyond a gap. All of them need the CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
pub enum OutOfOrderPolicy {
    /// None: everything is placed in order.
    #[default]
    Off,
    /// Streams with markers, which prove where an FPDU begins.
    Markers,
    /// Additionally, streams in which every FPDU so far lay inside one segment: the sender aligns
    /// FPDUs.
    Aligned,
}

/// Policy for the markers in a device's streams (RFC 5044 sections 4.3 and 7.1.1): each side
/// announces whether it wants to receive markers, and the other side must then send them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum MarkerPolicy {
    /// Neither request nor send them: a peer that requests them is refused.
    Never,
    /// Send them to a peer that requests them.
    #[default]
    Accept,
    /// Also request to receive them. Linux siw and most hardware refuse such a connection.
    Request,
}

/// The kinds of ready-to-receive message (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RtrKind {
    /// B: a zero-length Send that consumes no receive work request.
    Send,
    /// C: a zero-length RDMA Write.
    Write,
    /// D: a zero-length RDMA Read Request.
    Read,
}

/// A set of RTR kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RtrKinds {
    /// B flag.
    pub send: bool,
    /// C flag.
    pub write: bool,
    /// D flag.
    pub read: bool,
}

impl RtrKinds {
    /// The empty set.
    pub const NONE: Self = Self {
        send: false,
        write: false,
        read: false,
    };
    /// Write and Read: the kinds that hardware and siw support.
    pub const WRITE_READ: Self = Self {
        send: false,
        write: true,
        read: true,
    };

    /// The set of only `kind`.
    pub fn from_kind(kind: RtrKind) -> Self {
        Self {
            send: kind == RtrKind::Send,
            write: kind == RtrKind::Write,
            read: kind == RtrKind::Read,
        }
    }

    /// Returns whether `kind` is in the set.
    pub fn contains(self, kind: RtrKind) -> bool {
        match kind {
            RtrKind::Send => self.send,
            RtrKind::Write => self.write,
            RtrKind::Read => self.read,
        }
    }

    /// Intersection of the two sets.
    pub fn intersection(self, other: Self) -> Self {
        Self {
            send: self.send && other.send,
            write: self.write && other.write,
            read: self.read && other.read,
        }
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// The kind that a responder picks when several are possible: Write costs nothing, Read needs
    /// IRD, and few peers support the zero-length Send.
    pub fn choose(self) -> Option<RtrKind> {
        [RtrKind::Write, RtrKind::Read, RtrKind::Send]
            .into_iter()
            .find(|&kind| self.contains(kind))
    }
}

/// Configuration of connection set-up for a device. The defaults suit Linux siw, Chelsio and Intel
/// peers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpaConfig {
    /// Revision to request, and the highest to accept: 1 or 2.
    pub revision: u8,
    /// CRC policy.
    pub crc: MpaCrcPolicy,
    /// Marker policy.
    pub markers: MarkerPolicy,
    /// Request a ready-to-receive exchange (A flag), so that either side may send first.
    pub peer_to_peer: bool,
    /// RTR kinds that are offered to a peer, and accepted from it.
    pub rtr_kinds: RtrKinds,
    /// Maximum of inbound Reads that this device can hold (IRD); a power of two suits siw peers best.
    pub max_ird: u16,
    /// Maximum of outbound Reads that this device issues (ORD).
    pub max_ord: u16,
    /// Maximum of private data that is accepted from a peer, in bytes; RFC 5044 allows 512.
    pub max_private_data: u16,
    /// Exchange IRD and ORD in revision 1, in the first octets of the private data, and start with a
    /// zero-length Read, as Windows does ([MS-SMBD] section 6.1).
    pub depths_in_private_data: bool,
    /// Try again with revision 1 when the peer resets a revision 2 request.
    pub fallback_to_rev1: bool,
    /// Negotiate Immediate Data with Send, a siwd extension to RFC 7306, with peers that support it.
    pub immediate_with_send: bool,
    /// Bit order of the Terminates that are sent.
    pub terminate_bit_order: TerminateBitOrder,
    /// Selects the streams that place payload beyond a gap.
    pub out_of_order: OutOfOrderPolicy,
    /// Number of the first message of each queue, in both directions: 1 (RFC 5041 section 4.3). Other
    /// values serve to test the wrap at 2^32 messages, with a peer that is configured alike.
    pub first_msn: Msn,
    /// Time that an untagged message may wait for a receive work request, in milliseconds; 0: no wait
    /// (RFC 5041 section 7.1).
    pub receive_wait_ms: u32,
    /// Time in milliseconds after which the silence of a peer is broken that has sent nothing since the
    /// MPA reply; 0: never. An initiator sends a zero-length RDMA Write: Linux siw may not process data
    /// that arrives just after its MPA reply until more data arrives. A responder that agreed on no
    /// ready-to-receive message may send from then on: see
    /// [`QueuePair::send_before_first_fpdu`](crate::QueuePair::send_before_first_fpdu).
    pub wake_silent_peer_ms: u32,
    /// Time that a responder waits for a request, in milliseconds.
    pub request_timeout_ms: u32,
    /// Time that an initiator waits for a reply, in milliseconds.
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
            depths_in_private_data: false,
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
