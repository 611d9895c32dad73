//! The Terminate message (RFC 5040 section 4.8): its layout, and the two bit orders in use.
//!
//! The queue pair sends a Terminate on an error that it found; [`ReceivedTerminate::parse`] parses
//! the peer's.

pub use super::terminate_code::TerminateCode;

use crate::ddp::{
    ControlOctets, MAX_HDR_LEN, Msn, QN_TERMINATE, T_BIT, TAGGED_HDR_LEN, UNTAGGED_HDR_LEN,
    UntaggedHeader,
};
use crate::mpa::fpdu;
use crate::mpa::marker::MarkerPosition;
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};
use serde::{Deserialize, Serialize};

/// Octets of the control word: layer and error type, code, header control bits, reserved bits.
const CONTROL_LEN: usize = 4;
/// Octets of the DDP Segment Length field.
const SEGMENT_LEN_LEN: usize = 2;
/// M: the DDP Segment Length is quoted.
const M_BIT: u8 = 0x80;
/// D: the DDP header is quoted.
const D_BIT: u8 = 0x40;
/// R: the Read Request Header is quoted.
const R_BIT: u8 = 0x20;

/// Longest Terminate payload, in octets: control word, segment length, untagged header, Read Request.
pub const MAX_TERMINATE_LEN: usize =
    CONTROL_LEN + SEGMENT_LEN_LEN + UNTAGGED_HDR_LEN + READ_REQUEST_LEN;

/// The segment that a Terminate refers to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OffendingSegment {
    /// ULPDU_Length of the segment.
    pub ulpdu_len: u16,
    /// Its DDP header.
    pub hdr: [u8; MAX_HDR_LEN],
    /// Its Read Request Header, updated to the current position (conformance 82).
    pub read: Option<ReadRequestHeader>,
}

/// The order of the bits in a Terminate's control word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
pub enum TerminateBitOrder {
    /// Layer in the high half of the first octet, error type in the low one (RFC 5040 figure 9).
    #[default]
    Rfc,
    /// Both halves swapped, and the header control bits reversed, as Linux siw sends and expects
    /// them: its bit fields begin at the lowest bit.
    Siw,
}

/// The payload of a Terminate message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<u8>", try_from = "Vec<u8>")]
pub struct TerminatePayload {
    octets: [u8; MAX_TERMINATE_LEN],
    len: u8,
}

impl TerminatePayload {
    /// Builds the payload; quotes `offender` where RFC 5040 figure 10 requires it.
    pub fn new(code: TerminateCode, offender: Option<&OffendingSegment>) -> Self {
        let mut octets = [0; MAX_TERMINATE_LEN];
        octets[0] = code.layer << 4 | code.error_type;
        octets[1] = code.code;
        let mut len = CONTROL_LEN;
        if let Some(offender) = offender.filter(|_| code.quotes_ddp_header()) {
            octets[2] = M_BIT | D_BIT;
            let hdr_start = len + SEGMENT_LEN_LEN;
            octets[len..hdr_start].copy_from_slice(&offender.ulpdu_len.to_be_bytes());
            let hdr_len = header_len(offender.hdr[0]);
            len = hdr_start + hdr_len;
            octets[hdr_start..len].copy_from_slice(&offender.hdr[..hdr_len]);
            if let Some(read) = offender.read.filter(|_| code.quotes_read_header()) {
                octets[2] |= R_BIT;
                octets[len..len + READ_REQUEST_LEN].copy_from_slice(&read.to_bytes());
                len += READ_REQUEST_LEN;
            }
        }
        Self {
            octets,
            len: len as u8,
        }
    }

    /// Converts the control word to this bit order.
    pub fn in_bit_order(mut self, order: TerminateBitOrder) -> Self {
        if order == TerminateBitOrder::Siw {
            self.octets[0] = self.octets[0].rotate_left(4);
            self.octets[2] = self.octets[2].reverse_bits();
        }
        self
    }

    /// The octets of the payload.
    pub fn as_bytes(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }

    /// The DDP header of the message: queue 2, first and only message.
    pub fn ddp_header() -> UntaggedHeader {
        UntaggedHeader {
            control: ControlOctets::new(RdmapOpcode::Terminate, true),
            inv_stag: 0,
            qn: QN_TERMINATE,
            msn: Msn::FIRST,
            mo: 0,
        }
    }
}

impl From<TerminatePayload> for Vec<u8> {
    fn from(payload: TerminatePayload) -> Vec<u8> {
        payload.as_bytes().to_vec()
    }
}

impl TryFrom<Vec<u8>> for TerminatePayload {
    type Error = MalformedTerminate;

    fn try_from(payload: Vec<u8>) -> Result<Self, MalformedTerminate> {
        let mut octets = [0; MAX_TERMINATE_LEN];
        let room = octets.get_mut(..payload.len()).ok_or(MalformedTerminate)?;
        room.copy_from_slice(&payload);
        Ok(Self {
            octets,
            len: payload.len() as u8,
        })
    }
}

fn header_len(ddp_control: u8) -> usize {
    if ddp_control & T_BIT != 0 {
        TAGGED_HDR_LEN
    } else {
        UNTAGGED_HDR_LEN
    }
}

/// Encodes a whole Terminate FPDU for a stream without a queue pair: an initiator cannot accept the
/// reply (RFC 6581 section 8).
pub fn encode_standalone_fpdu(
    code: TerminateCode,
    order: TerminateBitOrder,
    crc: bool,
    markers: bool,
) -> Box<[u8]> {
    let payload = TerminatePayload::new(code, None).in_bit_order(order);
    let header = TerminatePayload::ddp_header().to_bytes();
    let position = MarkerPosition::stream_start(markers);
    fpdu::encode_fpdu_at(&[&header, payload.as_bytes()], crc, position)
}

/// A Terminate sent by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedTerminate {
    /// The error, in the bit order of the RFC.
    pub code: TerminateCode,
    /// The control word was in the bit order of Linux siw ([`TerminateBitOrder::Siw`]).
    pub is_siw_order: bool,
    /// DDP header of this side's segment that the peer refused.
    pub ddp: Option<[u8; MAX_HDR_LEN]>,
    /// This side's Read Request that the peer refused.
    pub read: Option<ReadRequestHeader>,
}

/// The Terminate is shorter than its control bits require (conformance 78).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed Terminate message")]
pub struct MalformedTerminate;

/// The control word of a received Terminate.
struct ControlWord {
    code: TerminateCode,
    is_siw_order: bool,
    /// The header control bits are in siw's order too.
    has_siw_bits: bool,
    /// M, D and R, in the order of the RFC.
    header_bits: u8,
}

impl ControlWord {
    /// Parses both orders, and the EType 3 of hardware vendors (PROTOCOL.md sections 7.1, 7.4).
    fn parse(octets: &[u8; CONTROL_LEN]) -> Self {
        let (high, low) = (octets[0] >> 4, octets[0] & 0x0f);
        let as_rfc = registered_code(high, low, octets[1]);
        let as_siw = registered_code(low, high, octets[1]);
        // In siw's order, M is the lowest bit.
        let has_siw_bits = octets[2] & 0xe0 == 0 && octets[2] & 0x07 != 0 && as_siw.is_some();
        let header_bits = if has_siw_bits {
            octets[2].reverse_bits()
        } else {
            octets[2]
        };
        // Some octets are valid in both orders (10 00 is DDP catastrophic, or siw's invalid STag):
        // the position of the control bits, and whether a header is quoted, distinguishes them.
        let quotes_header = header_bits & D_BIT != 0;
        let fits = |code: Option<TerminateCode>| {
            code.is_some_and(|code| code.quotes_ddp_header() == quotes_header)
        };
        let (code, is_siw_order) = match (as_rfc, as_siw) {
            (_, Some(code)) if has_siw_bits => (code, true),
            (Some(code), _) if fits(as_rfc) || !fits(as_siw) => (code, false),
            (_, Some(code)) => (code, true),
            _ => {
                let unregistered = TerminateCode {
                    layer: high,
                    error_type: low,
                    code: octets[1],
                };
                (unregistered, false)
            }
        };
        Self {
            code,
            is_siw_order,
            has_siw_bits,
            header_bits,
        }
    }
}

impl ReceivedTerminate {
    /// Parses a Terminate payload in either bit order.
    pub fn parse(payload: &[u8]) -> Result<Self, MalformedTerminate> {
        let control = payload.first_chunk().ok_or(MalformedTerminate)?;
        let control = ControlWord::parse(control);
        let has = |bit: u8| control.header_bits & bit != 0;
        let mut at = CONTROL_LEN;
        if has(M_BIT | D_BIT) {
            at += SEGMENT_LEN_LEN;
            if payload.len() < at {
                return Err(MalformedTerminate);
            }
        }
        let mut ddp = None;
        if has(D_BIT) {
            let hdr_len = header_len(*payload.get(at).ok_or(MalformedTerminate)?);
            let quoted = payload.get(at..at + hdr_len).ok_or(MalformedTerminate)?;
            let mut hdr = [0; MAX_HDR_LEN];
            hdr[..hdr_len].copy_from_slice(quoted);
            ddp = Some(hdr);
            at += hdr_len;
        }
        let mut read = None;
        // siw also sets the bit for other messages, and then quotes no Read Request Header.
        if has(R_BIT) && !(control.has_siw_bits && payload.len() == at) {
            let quoted = payload.get(at..).and_then(|rest| rest.first_chunk());
            read = Some(ReadRequestHeader::parse(quoted.ok_or(MalformedTerminate)?));
        }
        Ok(Self {
            code: control.code,
            is_siw_order: control.is_siw_order,
            ddp,
            read,
        })
    }
}

/// Returns the code with these fields; `None` if it is not registered.
fn registered_code(layer: u8, error_type: u8, code: u8) -> Option<TerminateCode> {
    // Hardware vendors send MPA errors with EType 3 where RFC 6580 registers 0.
    let error_type = if layer == 2 && error_type == 3 {
        0
    } else {
        error_type
    };
    let code = TerminateCode {
        layer,
        error_type,
        code,
    };
    code.is_registered().then_some(code)
}
