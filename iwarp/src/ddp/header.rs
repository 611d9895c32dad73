//! DDP segment headers (RFC 5041 section 4) together with the RDMAP control octet that lives in
//! their ULP fields (RFC 5040 section 4.1).
//!
//! The receiver parses them in place, the sender writes them, Terminate quotes them.

use crate::rdmap::{RDMAP_VERSION, RdmapOpcode};
use serde::{Deserialize, Serialize};

/// Tagged header: control octets, STag, TO (RFC 5041 section 4.2).
pub const TAGGED_HDR_LEN: usize = 14;
/// Untagged header: control octets, 4 octets for the ULP, QN, MSN, MO (RFC 5041 section 4.3).
pub const UNTAGGED_HDR_LEN: usize = 18;
/// Length of the longer header.
pub const MAX_HDR_LEN: usize = UNTAGGED_HDR_LEN;

/// Tagged flag of the DDP control octet.
pub const T_BIT: u8 = 0x80;
/// Last flag of the DDP control octet.
pub const L_BIT: u8 = 0x40;
/// The only DDP version (RFC 5041 section 4.1).
pub const DDP_VERSION: u8 = 1;

/// Queue of Send messages (RFC 5040 section 4.1).
pub const QN_SEND: u32 = 0;
/// Queue of Read Requests and Atomic Requests.
pub const QN_READ_REQUEST: u32 = 1;
/// Queue of Atomic Responses (RFC 7306).
pub const QN_ATOMIC_RESPONSE: u32 = 3;
/// Queue of the Terminate message.
pub const QN_TERMINATE: u32 = 2;

/// A message sequence number of one untagged queue: starts at 1, wraps to 0 (RFC 5041 section 4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Msn(pub u32);

impl Msn {
    /// The first message of a stream.
    pub const FIRST: Msn = Msn(1);

    /// The message after this one.
    #[inline]
    pub fn next(self) -> Msn {
        Msn(self.0.wrapping_add(1))
    }
}

/// The two control octets that start every segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlOctets {
    /// DDP control octet: T, L, reserved, DV.
    pub ddp: u8,
    /// RDMAP control octet: RV, reserved, opcode.
    pub rdmap: u8,
}

impl ControlOctets {
    /// Control octets of a segment that this side sends.
    #[inline]
    pub fn new(opcode: RdmapOpcode, is_last: bool) -> Self {
        let tagged = if opcode.is_tagged() { T_BIT } else { 0 };
        let last = if is_last { L_BIT } else { 0 };
        Self {
            ddp: tagged | last | DDP_VERSION,
            rdmap: RDMAP_VERSION << 6 | opcode as u8,
        }
    }

    /// Returns whether the segment is tagged: it names its buffer by STag.
    #[inline]
    pub fn is_tagged(self) -> bool {
        self.ddp & T_BIT != 0
    }

    /// Returns whether the segment is the last of its message.
    #[inline]
    pub fn is_last(self) -> bool {
        self.ddp & L_BIT != 0
    }

    /// DDP version field; the reserved bits are ignored (conformance 39).
    #[inline]
    pub fn ddp_version(self) -> u8 {
        self.ddp & 0x03
    }

    /// RDMAP version field.
    #[inline]
    pub fn rdmap_version(self) -> u8 {
        self.rdmap >> 6
    }

    /// RDMAP opcode field, not yet validated.
    #[inline]
    pub fn opcode(self) -> u8 {
        self.rdmap & 0x0f
    }

    /// Returns whether the segment is a Write of the supported versions.
    #[inline]
    pub fn is_write(self) -> bool {
        // The mask omits only the L bit and the reserved bits.
        const LOOKED_AT: [u8; 2] = [T_BIT | 0x03, 0xcf];
        const WRITE: [u8; 2] = [
            T_BIT | DDP_VERSION,
            RDMAP_VERSION << 6 | RdmapOpcode::Write as u8,
        ];
        let octets = u16::from_le_bytes([self.ddp, self.rdmap]);
        octets & u16::from_le_bytes(LOOKED_AT) == u16::from_le_bytes(WRITE)
    }

    /// Length of the header that these control octets introduce.
    #[inline]
    pub fn header_len(self) -> usize {
        if self.is_tagged() {
            TAGGED_HDR_LEN
        } else {
            UNTAGGED_HDR_LEN
        }
    }
}

/// Tagged segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaggedHeader {
    /// Control octets.
    pub control: ControlOctets,
    /// Steering tag of the data sink.
    pub stag: u32,
    /// Tagged offset of the first payload octet.
    pub to: u64,
}

impl TaggedHeader {
    /// Reads the header; `octets` must hold it (checked by the caller against ULPDU_Length).
    #[inline]
    pub fn parse(octets: &[u8; MAX_HDR_LEN]) -> Self {
        Self {
            control: ControlOctets {
                ddp: octets[0],
                rdmap: octets[1],
            },
            stag: be32(octets, 2),
            to: u64::from(be32(octets, 6)) << 32 | u64::from(be32(octets, 10)),
        }
    }

    /// Encodes the header.
    #[inline]
    pub fn to_bytes(self) -> [u8; TAGGED_HDR_LEN] {
        let mut octets = [0; TAGGED_HDR_LEN];
        octets[0] = self.control.ddp;
        octets[1] = self.control.rdmap;
        octets[2..6].copy_from_slice(&self.stag.to_be_bytes());
        octets[6..14].copy_from_slice(&self.to.to_be_bytes());
        octets
    }
}

/// Untagged segment header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UntaggedHeader {
    /// Control octets.
    pub control: ControlOctets,
    /// The ULP's four octets: the STag to invalidate in Send with Invalidate, else reserved.
    pub inv_stag: u32,
    /// Queue number.
    pub qn: u32,
    /// Message sequence number within the queue.
    pub msn: Msn,
    /// Offset of the first payload octet within the message.
    pub mo: u32,
}

impl UntaggedHeader {
    /// Reads the header.
    #[inline]
    pub fn parse(octets: &[u8; MAX_HDR_LEN]) -> Self {
        Self {
            control: ControlOctets {
                ddp: octets[0],
                rdmap: octets[1],
            },
            inv_stag: be32(octets, 2),
            qn: be32(octets, 6),
            msn: Msn(be32(octets, 10)),
            mo: be32(octets, 14),
        }
    }

    /// Encodes the header.
    #[inline]
    pub fn to_bytes(self) -> [u8; UNTAGGED_HDR_LEN] {
        let mut octets = [0; UNTAGGED_HDR_LEN];
        octets[0] = self.control.ddp;
        octets[1] = self.control.rdmap;
        octets[2..6].copy_from_slice(&self.inv_stag.to_be_bytes());
        octets[6..10].copy_from_slice(&self.qn.to_be_bytes());
        octets[10..14].copy_from_slice(&self.msn.0.to_be_bytes());
        octets[14..18].copy_from_slice(&self.mo.to_be_bytes());
        octets
    }
}

#[inline]
pub(crate) fn be32(octets: &[u8], at: usize) -> u32 {
    match octets.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(field) => u32::from_be_bytes(*field),
        None => 0,
    }
}

#[inline]
pub(crate) fn be64(octets: &[u8], at: usize) -> u64 {
    u64::from(be32(octets, at)) << 32 | u64::from(be32(octets, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pad_header(octets: &[u8]) -> [u8; MAX_HDR_LEN] {
        let mut padded = [0; MAX_HDR_LEN];
        padded[..octets.len()].copy_from_slice(octets);
        padded
    }

    #[test]
    fn a_write_is_told_by_its_fields_and_by_nothing_else() {
        for octets in 0..=u16::MAX {
            let [ddp, rdmap] = octets.to_le_bytes();
            let control = ControlOctets { ddp, rdmap };
            let by_fields = control.is_tagged()
                && control.ddp_version() == DDP_VERSION
                && control.rdmap_version() == RDMAP_VERSION
                && control.opcode() == RdmapOpcode::Write as u8;
            assert_eq!(control.is_write(), by_fields, "{control:?}");
        }
    }

    /// RFC 5041 section 4.2, RFC 5040 section 4.3.
    #[test]
    fn tagged_header_has_the_octets_of_the_rfc() {
        let header = TaggedHeader {
            control: ControlOctets::new(RdmapOpcode::Write, true),
            stag: 0x0102_0304,
            to: 0x1112_1314_1516_1718,
        };
        let octets = header.to_bytes();
        assert_eq!(
            octets,
            [
                0xc1, 0x40, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18
            ]
        );
        assert_eq!(TaggedHeader::parse(&pad_header(&octets)), header);
    }

    /// RFC 5041 section 4.3, RFC 5040 sections 4.4 and 4.6.
    #[test]
    fn untagged_header_has_the_octets_of_the_rfc() {
        let header = UntaggedHeader {
            control: ControlOctets::new(RdmapOpcode::SendSeInv, false),
            inv_stag: 0xa1a2_a3a4,
            qn: QN_SEND,
            msn: Msn(7),
            mo: 0x0000_0590,
        };
        let octets = header.to_bytes();
        assert_eq!(octets[..6], [0x01, 0x46, 0xa1, 0xa2, 0xa3, 0xa4]);
        assert_eq!(octets[6..18], [0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 5, 0x90]);
        assert_eq!(UntaggedHeader::parse(&octets), header);
    }

    #[test]
    fn every_message_starts_with_the_octets_of_the_rfc() {
        for (opcode, is_last, want) in [
            (RdmapOpcode::Write, false, [0x81, 0x40]),
            (RdmapOpcode::ReadRequest, true, [0x41, 0x41]),
            (RdmapOpcode::ReadResponse, false, [0x81, 0x42]),
            (RdmapOpcode::ReadResponse, true, [0xc1, 0x42]),
            (RdmapOpcode::Send, true, [0x41, 0x43]),
            (RdmapOpcode::SendInv, true, [0x41, 0x44]),
            (RdmapOpcode::SendSe, true, [0x41, 0x45]),
            (RdmapOpcode::SendSeInv, true, [0x41, 0x46]),
            (RdmapOpcode::Terminate, true, [0x41, 0x47]),
            (RdmapOpcode::Immediate, true, [0x41, 0x48]),
            (RdmapOpcode::ImmediateSe, true, [0x41, 0x49]),
            (RdmapOpcode::AtomicRequest, true, [0x41, 0x4a]),
            (RdmapOpcode::AtomicResponse, true, [0x41, 0x4b]),
        ] {
            let control = ControlOctets::new(opcode, is_last);
            assert_eq!([control.ddp, control.rdmap], want, "{opcode:?}");
        }
    }

    /// Conformance 39, 57.
    #[test]
    fn c39_c57_reserved_bits_are_ignored_and_msn_wraps() {
        let control = ControlOctets {
            ddp: 0x3d,
            rdmap: 0x43,
        };
        assert_eq!(control.ddp_version(), 1);
        assert!(!control.is_tagged() && !control.is_last());
        assert_eq!(Msn(u32::MAX).next(), Msn(0));
    }
}
