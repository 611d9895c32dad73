//! Atomic Request and Atomic Response (RFC 7306 section 5): the headers.
//!
//! Requests share queue 1, its MSNs, and the IRD and ORD limits with Read Requests, and are answered
//! in one sequence with them; responses have queue 3.

use crate::ddp::{be32, be64};
use siw_shm::AtomicArgs;
use std::sync::atomic::AtomicU64;

/// Length of the Atomic Request header.
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// Length of the Atomic Response header.
pub const ATOMIC_RESPONSE_LEN: usize = 12;
/// Octets that an atomic works on.
pub const WORD: u32 = 8;

/// Atomic opcodes; the field has four bits, the 28 before it are reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum AtomicOp {
    /// FetchAdd.
    FetchAdd = 0,
    /// CmpSwap.
    CmpSwap = 2,
}

impl AtomicOp {
    /// The operation of a received field.
    #[inline]
    pub fn from_wire(v: u32) -> Option<Self> {
        match v & 0x0f {
            0 => Some(Self::FetchAdd),
            2 => Some(Self::CmpSwap),
            _ => None,
        }
    }
}

/// The header that an Atomic Request carries as its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicRequestHeader {
    /// What to do.
    pub op: AtomicOp,
    /// Comes back in the response.
    pub id: u32,
    /// STag of the word, at the responder.
    pub stag: u32,
    /// Tagged offset of the word; a multiple of eight.
    pub to: u64,
    /// Operands.
    pub args: AtomicArgs,
}

impl AtomicRequestHeader {
    /// Reads the header; `None`: no such atomic opcode.
    pub fn parse(b: &[u8; ATOMIC_REQUEST_LEN]) -> Option<Self> {
        Some(Self {
            op: AtomicOp::from_wire(be32(b, 0))?,
            id: be32(b, 4),
            stag: be32(b, 8),
            to: be64(b, 12),
            args: AtomicArgs {
                add_or_swap: be64(b, 20),
                add_or_swap_mask: be64(b, 28),
                compare: be64(b, 36),
                compare_mask: be64(b, 44),
            },
        })
    }

    /// The header as it goes on the wire.
    pub fn to_bytes(&self) -> [u8; ATOMIC_REQUEST_LEN] {
        let mut b = [0; ATOMIC_REQUEST_LEN];
        b[3] = self.op as u8;
        b[4..8].copy_from_slice(&self.id.to_be_bytes());
        b[8..12].copy_from_slice(&self.stag.to_be_bytes());
        let a = &self.args;
        let words = [
            self.to,
            a.add_or_swap,
            a.add_or_swap_mask,
            a.compare,
            a.compare_mask,
        ];
        for (i, w) in words.into_iter().enumerate() {
            b[12 + i * 8..20 + i * 8].copy_from_slice(&w.to_be_bytes());
        }
        b
    }

    /// Does it; the value before.
    pub(crate) fn apply(&self, word: &AtomicU64) -> u64 {
        match self.op {
            AtomicOp::FetchAdd => self.args.fetch_add_on(word),
            AtomicOp::CmpSwap => self.args.cmp_swap_on(word),
        }
    }
}

/// The header that an Atomic Response carries as its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicResponseHeader {
    /// Identifier of the request.
    pub id: u32,
    /// The word before the operation.
    pub original: u64,
}

impl AtomicResponseHeader {
    /// Reads the header.
    pub fn parse(b: &[u8; ATOMIC_RESPONSE_LEN]) -> Self {
        Self {
            id: be32(b, 0),
            original: be64(b, 4),
        }
    }

    /// The header as it goes on the wire.
    pub fn to_bytes(&self) -> [u8; ATOMIC_RESPONSE_LEN] {
        let mut b = [0; ATOMIC_RESPONSE_LEN];
        b[..4].copy_from_slice(&self.id.to_be_bytes());
        b[4..].copy_from_slice(&self.original.to_be_bytes());
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7306 section 5.2.
    #[test]
    fn an_atomic_request_has_the_octets_of_the_rfc() {
        let r = AtomicRequestHeader {
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
        let b = r.to_bytes();
        assert_eq!(b[..12], [0, 0, 0, 2, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14]);
        assert_eq!(b[12..14], [0x21, 0x22]);
        assert_eq!([b[27], b[35], b[43], b[51]], [3, 4, 5, 6]);
        assert_eq!(AtomicRequestHeader::parse(&b), Some(r));
        let mut odd = b;
        odd[0] = 0xff;
        odd[3] = 0xf2;
        assert_eq!(AtomicRequestHeader::parse(&odd), Some(r), "reserved bits");
        for op in [1, 3, 4, 15] {
            odd[3] = op;
            assert_eq!(AtomicRequestHeader::parse(&odd), None);
        }
    }
}
