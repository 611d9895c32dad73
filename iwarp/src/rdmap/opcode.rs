//! The kinds of RDMAP message (RFC 5040 section 4.2, RFC 7306 section 4).

use crate::ddp::{QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE};

/// The RDMAP version of RFC 5040 (section 4.1).
pub const RDMAP_VERSION: u8 = 1;
/// Length of Immediate Data (RFC 7306 section 6.1).
pub const IMMEDIATE_LEN: usize = 8;
/// The last four octets of Immediate Data that belongs to the following Send: siwd's SEND with
/// immediate, an extension to the RFC. Only used between peers that agreed on it; other peers treat
/// these octets as plain data (PROTOCOL.md section 8.8).
pub const IMMEDIATE_FOR_NEXT_SEND: [u8; 4] = *b"send";

/// RDMA message opcodes (RFC 5040 section 4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RdmapOpcode {
    /// RDMA Write.
    Write = 0,
    /// RDMA Read Request.
    ReadRequest = 1,
    /// RDMA Read Response.
    ReadResponse = 2,
    /// Send.
    Send = 3,
    /// Send with Invalidate.
    SendInv = 4,
    /// Send with Solicited Event.
    SendSe = 5,
    /// Send with Solicited Event and Invalidate.
    SendSeInv = 6,
    /// Terminate.
    Terminate = 7,
    /// Immediate Data (RFC 7306 section 6).
    Immediate = 8,
    /// Immediate Data with Solicited Event.
    ImmediateSe = 9,
    /// Atomic Request (RFC 7306 section 5).
    AtomicRequest = 10,
    /// Atomic Response.
    AtomicResponse = 11,
}

impl RdmapOpcode {
    /// Parses a received opcode field; `None` for reserved opcodes.
    #[inline]
    pub fn from_wire(field: u8) -> Option<Self> {
        Some(match field {
            0 => Self::Write,
            1 => Self::ReadRequest,
            2 => Self::ReadResponse,
            3 => Self::Send,
            4 => Self::SendInv,
            5 => Self::SendSe,
            6 => Self::SendSeInv,
            7 => Self::Terminate,
            8 => Self::Immediate,
            9 => Self::ImmediateSe,
            10 => Self::AtomicRequest,
            11 => Self::AtomicResponse,
            _ => return None,
        })
    }

    /// Returns whether the message uses the tagged buffer model (RFC 5040 section 4.2, table 3).
    #[inline]
    pub fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// Returns whether this is one of the four kinds of Send.
    #[inline]
    pub fn is_send(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendInv | Self::SendSe | Self::SendSeInv
        )
    }

    /// Returns whether the message invalidates an STag of its receiver.
    #[inline]
    pub fn invalidates_stag(self) -> bool {
        matches!(self, Self::SendInv | Self::SendSeInv)
    }

    /// Returns whether the message requests a solicited event.
    #[inline]
    pub fn is_solicited(self) -> bool {
        matches!(self, Self::SendSe | Self::SendSeInv | Self::ImmediateSe)
    }

    /// The untagged queue that the message belongs to; `None` for tagged messages.
    #[inline]
    pub fn queue_number(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::ReadRequest | Self::AtomicRequest => Some(QN_READ_REQUEST),
            Self::AtomicResponse => Some(QN_ATOMIC_RESPONSE),
            Self::Terminate => Some(QN_TERMINATE),
            _ => Some(QN_SEND),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_opcodes_are_unknown() {
        for field in 12..16 {
            assert_eq!(RdmapOpcode::from_wire(field), None);
        }
        for field in 0..12 {
            let opcode = RdmapOpcode::from_wire(field);
            assert_eq!(opcode.map(|opcode| opcode as u8), Some(field));
        }
    }
}
