//! The Terminate message (RFC 5040 section 4.8): codes, layout, and both nibble orders on receive.
//!
//! The receiver writes it on a protocol error, the queue pair on a local one; `parse` serves the
//! Terminate of a peer.

use crate::ddp::{
    ControlOctets, MAX_HDR_LEN, Msn, QN_TERMINATE, TAGGED_HDR_LEN, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::mpa::fpdu;
use crate::mpa::marker::MarkerPosition;
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};

/// Layer, error type and code of a Terminate (RFC 5040 section 4.8, RFC 6580 section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TerminateCode {
    /// 0 RDMAP, 1 DDP, 2 MPA.
    pub layer: u8,
    /// Error type within the layer.
    pub error_type: u8,
    /// Error code within the type.
    pub code: u8,
}

impl std::fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{:02x}", self.layer, self.error_type, self.code)
    }
}

macro_rules! codes {
    ($($(#[$m:meta])* $name:ident = $l:literal / $t:literal / $c:literal;)*) => {
        impl TerminateCode {
            $($(#[$m])* pub const $name: TerminateCode = TerminateCode { layer: $l, error_type: $t, code: $c };)*
        }
    };
}

codes! {
    /// Local catastrophic error.
    LOCAL_CATASTROPHIC = 0/0/0x00;
    /// Remote protection: invalid STag.
    RDMAP_STAG = 0/1/0x00;
    /// Remote protection: base or bounds.
    RDMAP_BOUNDS = 0/1/0x01;
    /// Remote protection: access rights.
    RDMAP_ACCESS = 0/1/0x02;
    /// Remote protection: STag not associated with the stream.
    RDMAP_NOT_ASSOCIATED = 0/1/0x03;
    /// Remote protection: TO wrap.
    RDMAP_WRAP = 0/1/0x04;
    /// Remote protection: STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE_PROT = 0/1/0x09;
    /// Remote operation: invalid RDMAP version.
    RDMAP_VERSION = 0/2/0x05;
    /// Remote operation: unexpected opcode.
    RDMAP_OPCODE = 0/2/0x06;
    /// Remote operation: catastrophic, localised to the stream.
    RDMAP_CATASTROPHIC_STREAM = 0/2/0x07;
    /// Remote operation: STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE = 0/2/0x09;
    /// Remote operation: unspecified.
    RDMAP_UNSPECIFIED = 0/2/0xff;
    /// DDP local catastrophic.
    DDP_CATASTROPHIC = 1/0/0x00;
    /// Tagged buffer: invalid STag.
    DDP_STAG = 1/1/0x00;
    /// Tagged buffer: base or bounds.
    DDP_BOUNDS = 1/1/0x01;
    /// Tagged buffer: STag not associated with the stream.
    DDP_NOT_ASSOCIATED = 1/1/0x02;
    /// Tagged buffer: TO wrap.
    DDP_WRAP = 1/1/0x03;
    /// Tagged buffer: invalid DDP version.
    DDP_TAGGED_VERSION = 1/1/0x04;
    /// UntaggedHeader buffer: invalid QN.
    DDP_QN = 1/2/0x01;
    /// UntaggedHeader buffer: no buffer available.
    DDP_NO_BUFFER = 1/2/0x02;
    /// UntaggedHeader buffer: MSN range.
    DDP_MSN = 1/2/0x03;
    /// UntaggedHeader buffer: invalid MO.
    DDP_MO = 1/2/0x04;
    /// UntaggedHeader buffer: message too long.
    DDP_TOO_LONG = 1/2/0x05;
    /// UntaggedHeader buffer: invalid DDP version.
    DDP_UNTAGGED_VERSION = 1/2/0x06;
    /// MPA: TCP connection closed or lost (local only, never sent).
    MPA_TCP_LOST = 2/0/0x01;
    /// MPA: CRC mismatch.
    MPA_CRC = 2/0/0x02;
    /// MPA: marker and ULPDU_Length disagree.
    MPA_LENGTH = 2/0/0x03;
    /// MPA: invalid MPA frame.
    MPA_BAD_FRAME = 2/0/0x04;
    /// MPA: local catastrophic.
    MPA_CATASTROPHIC = 2/0/0x05;
    /// MPA: insufficient IRD.
    MPA_INSUFFICIENT_IRD = 2/0/0x06;
    /// MPA: no matching RTR option.
    MPA_NO_RTR = 2/0/0x07;
}

impl TerminateCode {
    /// The DDP header of the offending segment belongs into the message (RFC 5040 figure 10).
    fn has_ddp_header(self) -> bool {
        matches!((self.layer, self.error_type), (0, 1 | 2) | (1, 1 | 2))
    }

    /// The Read Request header belongs into the message when the offender was one.
    fn has_read_header(self) -> bool {
        matches!((self.layer, self.error_type), (0, 1 | 2))
    }

    fn is_registered(self) -> bool {
        match (self.layer, self.error_type) {
            (0, 0) => self.code == 0,
            (0, 1) => matches!(self.code, 0..=4 | 9 | 0xff),
            (0, 2) => matches!(self.code, 5..=9 | 0xff),
            (1, 0) => self.code == 0,
            (1, 1) => self.code <= 4,
            (1, 2) => (1..=6).contains(&self.code),
            (2, 0) => (1..=7).contains(&self.code),
            _ => false,
        }
    }
}

/// The segment that a Terminate complains about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffendingSegment {
    /// ULPDU_Length of the segment.
    pub ulpdu_len: u16,
    /// Its DDP header.
    pub hdr: [u8; MAX_HDR_LEN],
    /// Its Read Request header, updated to the current position (conformance 82).
    pub read: Option<ReadRequestHeader>,
}

/// Longest Terminate payload: control word, segment length, untagged header, Read Request.
pub const MAX_TERMINATE_LEN: usize = 4 + 2 + UNTAGGED_HDR_LEN + READ_REQUEST_LEN;

/// How the octets of a Terminate's control word are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum TerminateBitOrder {
    /// Layer in the high half, type in the low one (RFC 5040 figure 9).
    #[default]
    Rfc,
    /// The halves swapped and the header control bits at the other end of theirs, as Linux siw
    /// sends and understands it: its bit fields begin at the lowest bit.
    Siw,
}

/// The payload of a Terminate message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TerminatePayload {
    bytes: [u8; MAX_TERMINATE_LEN],
    len: u8,
}

impl TerminatePayload {
    /// Lays the message out; `offender` is quoted where figure 10 of RFC 5040 wants it.
    pub fn new(code: TerminateCode, offender: Option<&OffendingSegment>) -> Self {
        let mut bytes = [0; MAX_TERMINATE_LEN];
        bytes[0] = code.layer << 4 | code.error_type;
        bytes[1] = code.code;
        let mut len = 4;
        if let Some(o) = offender.filter(|_| code.has_ddp_header()) {
            // M: the length is there, D: the DDP header is there.
            bytes[2] = 0xc0;
            bytes[4..6].copy_from_slice(&o.ulpdu_len.to_be_bytes());
            let hl = if o.hdr[0] & crate::ddp::T_BIT != 0 {
                TAGGED_HDR_LEN
            } else {
                UNTAGGED_HDR_LEN
            };
            bytes[6..6 + hl].copy_from_slice(&o.hdr[..hl]);
            len = 6 + hl;
            if let Some(r) = o.read.filter(|_| code.has_read_header()) {
                bytes[2] |= 0x20;
                bytes[len..len + READ_REQUEST_LEN].copy_from_slice(&r.to_bytes());
                len += READ_REQUEST_LEN;
            }
        }
        Self {
            bytes,
            len: len as u8,
        }
    }

    /// The same with its control word in this order.
    pub fn in_order(mut self, order: TerminateBitOrder) -> Self {
        if order == TerminateBitOrder::Siw {
            self.bytes[0] = self.bytes[0].rotate_left(4);
            self.bytes[2] = self.bytes[2].reverse_bits();
        }
        self
    }

    /// The bytes of the payload.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The DDP header in front of it: queue 2, first and only message.
    pub fn header() -> UntaggedHeader {
        UntaggedHeader {
            control: ControlOctets::new(RdmapOpcode::Terminate, true),
            inv_stag: 0,
            qn: QN_TERMINATE,
            msn: Msn::FIRST,
            mo: 0,
        }
    }
}

/// A whole Terminate FPDU for a stream that has no queue pair yet: an initiator that cannot accept
/// the reply (RFC 6581 section 7).
pub fn encode_standalone_fpdu(
    code: TerminateCode,
    order: TerminateBitOrder,
    crc: bool,
    markers: bool,
) -> Box<[u8]> {
    let p = TerminatePayload::new(code, None).in_order(order);
    let marker_position = MarkerPosition::start(markers);
    fpdu::encode_fpdu_at(
        &[&TerminatePayload::header().to_bytes(), p.as_bytes()],
        crc,
        marker_position,
    )
}

/// A Terminate that a peer sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedTerminate {
    /// What it complains about, nibbles in the order of the RFC.
    pub code: TerminateCode,
    /// The first octet had its nibbles swapped, as Linux siw sends it.
    pub swapped: bool,
    /// DDP header of the segment of ours that is complained about.
    pub ddp: Option<[u8; MAX_HDR_LEN]>,
    /// Read Request of ours that is complained about.
    pub read: Option<ReadRequestHeader>,
}

/// The Terminate is too short for what it announces (conformance 78).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed Terminate message")]
pub struct MalformedTerminate;

impl ReceivedTerminate {
    /// Reads a Terminate payload. Linux siw swaps Layer and EType (protocol.md, siw defect 1); hardware
    /// vendors send MPA errors with EType 3 where RFC 6580 registers 0. All of them are understood.
    pub fn parse(b: &[u8]) -> Result<Self, MalformedTerminate> {
        if b.len() < 4 {
            return Err(MalformedTerminate);
        }
        let (hi, lo) = (b[0] >> 4, b[0] & 0x0f);
        let as_rfc = normal(hi, lo, b[1]);
        let as_siw = normal(lo, hi, b[1]);
        // siw's control bits: M is the lowest.
        let by_siw = b[2] & 0xe0 == 0 && b[2] & 0x07 != 0 && as_siw.is_some();
        let flags = if by_siw { b[2].reverse_bits() } else { b[2] };
        let headers = flags & 0x40 != 0;
        // Some octets mean something in both orders (10 00 is DDP catastrophic, or siw's STag
        // violation): where the control bits are, and whether a header is quoted, tells them apart.
        let fits = |c: &Option<TerminateCode>| c.is_some_and(|c| c.has_ddp_header() == headers);
        let (code, swapped) = match (as_rfc, as_siw) {
            (_, Some(c)) if by_siw => (c, true),
            (Some(c), s) if fits(&as_rfc) || !fits(&s) => (c, false),
            (_, Some(c)) => (c, true),
            _ => (
                TerminateCode {
                    layer: hi,
                    error_type: lo,
                    code: b[1],
                },
                false,
            ),
        };
        let (m, d, r) = (flags & 0x80 != 0, flags & 0x40 != 0, flags & 0x20 != 0);
        let mut at = 4;
        if m || d {
            at += 2;
            if b.len() < at {
                return Err(MalformedTerminate);
            }
        }
        let mut ddp = None;
        if d {
            let tagged = b.get(at).ok_or(MalformedTerminate)? & crate::ddp::T_BIT != 0;
            let hl = if tagged {
                TAGGED_HDR_LEN
            } else {
                UNTAGGED_HDR_LEN
            };
            let src = b.get(at..at + hl).ok_or(MalformedTerminate)?;
            let mut hdr = [0; MAX_HDR_LEN];
            hdr[..hl].copy_from_slice(src);
            ddp = Some(hdr);
            at += hl;
        }
        let mut read = None;
        // siw sets the bit for other messages as well and quotes no such header then.
        if r && !(by_siw && b.len() == at) {
            let src: &[u8; READ_REQUEST_LEN] = b
                .get(at..at + READ_REQUEST_LEN)
                .and_then(|s| s.try_into().ok())
                .ok_or(MalformedTerminate)?;
            read = Some(ReadRequestHeader::parse(src));
        }
        Ok(Self {
            code,
            swapped,
            ddp,
            read,
        })
    }
}

fn normal(layer: u8, error_type: u8, code: u8) -> Option<TerminateCode> {
    let error_type = if layer == 2 && error_type == 3 {
        0
    } else {
        error_type
    };
    Some(TerminateCode {
        layer,
        error_type,
        code,
    })
    .filter(|c| c.is_registered())
}
