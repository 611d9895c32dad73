//! Atomic Request and Atomic Response (RFC 7306 section 5): the headers.
//!
//! Requests share queue 1, its MSNs, and the IRD and ORD limits with Read Requests, and are answered
//! in one sequence with them; responses use queue 3.

use crate::ddp::{be32, be64};
use serde::{Deserialize, Serialize};
use siw_shm::AtomicArgs;
use std::sync::atomic::AtomicU64;

/// Length of the Atomic Request header.
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// Length of the Atomic Response header.
pub const ATOMIC_RESPONSE_LEN: usize = 12;
/// Octets that an atomic operates on.
pub const ATOMIC_OPERAND_LEN: u32 = 8;

/// Atomic opcodes; the field has four bits, the 28 before it are reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum AtomicOp {
    /// FetchAdd.
    FetchAdd = 0,
    /// CmpSwap.
    CmpSwap = 2,
}

impl AtomicOp {
    /// Parses a received opcode field.
    #[inline]
    pub fn from_wire(field: u32) -> Option<Self> {
        match field & 0x0f {
            0 => Some(Self::FetchAdd),
            2 => Some(Self::CmpSwap),
            _ => None,
        }
    }
}

/// The header that an Atomic Request carries as its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtomicRequestHeader {
    /// The operation.
    pub op: AtomicOp,
    /// Request identifier, repeated in the response.
    pub id: u32,
    /// STag of the operand, at the responder.
    pub stag: u32,
    /// Tagged offset of the operand; a multiple of eight.
    pub to: u64,
    /// The value to add, or the values to compare and swap.
    pub args: AtomicArgs,
}

impl AtomicRequestHeader {
    /// Parses the header; `None`: invalid atomic opcode.
    pub fn parse(octets: &[u8; ATOMIC_REQUEST_LEN]) -> Option<Self> {
        Some(Self {
            op: AtomicOp::from_wire(be32(octets, 0))?,
            id: be32(octets, 4),
            stag: be32(octets, 8),
            to: be64(octets, 12),
            args: AtomicArgs {
                add_or_swap: be64(octets, 20),
                add_or_swap_mask: be64(octets, 28),
                compare: be64(octets, 36),
                compare_mask: be64(octets, 44),
            },
        })
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; ATOMIC_REQUEST_LEN] {
        let mut octets = [0; ATOMIC_REQUEST_LEN];
        octets[3] = self.op as u8;
        octets[4..8].copy_from_slice(&self.id.to_be_bytes());
        octets[8..12].copy_from_slice(&self.stag.to_be_bytes());
        let args = &self.args;
        let words = [
            self.to,
            args.add_or_swap,
            args.add_or_swap_mask,
            args.compare,
            args.compare_mask,
        ];
        for (i, word) in words.into_iter().enumerate() {
            octets[12 + i * 8..20 + i * 8].copy_from_slice(&word.to_be_bytes());
        }
        octets
    }

    /// Executes the operation; returns the value before it. `None`: the operand kept changing under
    /// contention, and the operation was not performed.
    pub(crate) fn execute(&self, operand: &AtomicU64) -> Option<u64> {
        match self.op {
            AtomicOp::FetchAdd => self.args.fetch_add_on(operand),
            AtomicOp::CmpSwap => self.args.cmp_swap_on(operand),
        }
    }
}

/// The header that an Atomic Response carries as its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicResponseHeader {
    /// Identifier of the request.
    pub id: u32,
    /// The operand before the operation.
    pub original: u64,
}

impl AtomicResponseHeader {
    /// Parses the header.
    pub fn parse(octets: &[u8; ATOMIC_RESPONSE_LEN]) -> Self {
        Self {
            id: be32(octets, 0),
            original: be64(octets, 4),
        }
    }

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; ATOMIC_RESPONSE_LEN] {
        let mut octets = [0; ATOMIC_RESPONSE_LEN];
        octets[..4].copy_from_slice(&self.id.to_be_bytes());
        octets[4..].copy_from_slice(&self.original.to_be_bytes());
        octets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7306 section 5.2.
    #[test]
    fn atomic_request_has_the_octets_of_the_rfc() {
        let header = AtomicRequestHeader {
            op: AtomicOp::CmpSwap,
            id: 0x0102_0304,
            stag: 0x1112_1314,
            to: 0x2122_2324_2526_2728,
            args: AtomicArgs {
                add_or_swap: 3,
                add_or_swap_mask: 4,
                compare: 5,
                compare_mask: 6,
            },
        };
        let octets = header.to_bytes();
        assert_eq!(
            octets[..12],
            [0, 0, 0, 2, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14]
        );
        assert_eq!(octets[12..14], [0x21, 0x22]);
        assert_eq!(
            [octets[27], octets[35], octets[43], octets[51]],
            [3, 4, 5, 6]
        );
        assert_eq!(AtomicRequestHeader::parse(&octets), Some(header));
        let mut odd = octets;
        odd[0] = 0xff;
        odd[3] = 0xf2;
        assert_eq!(
            AtomicRequestHeader::parse(&odd),
            Some(header),
            "reserved bits"
        );
        for opcode in [1, 3, 4, 15] {
            odd[3] = opcode;
            assert_eq!(AtomicRequestHeader::parse(&odd), None);
        }
    }
}
