//! RDMAP message kinds and the Read Request header (RFC 5040 section 4).

use crate::ddp::{be32, be64};

/// The RDMAP version of RFC 5040 (section 4.1).
pub const RDMAP_VERSION: u8 = 1;
/// Length of the Read Request header (RFC 5040 section 4.4).
pub const READ_REQUEST_LEN: usize = 28;

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
    /// The opcode of a received field; `None` for the reserved ones.
    #[inline]
    pub fn from_wire(v: u8) -> Option<Self> {
        Some(match v {
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

    /// The message uses the tagged buffer model (RFC 5040 section 4.2, table 3).
    #[inline]
    pub fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// One of the four kinds of Send.
    #[inline]
    pub fn is_send(self) -> bool {
        matches!(
            self,
            Self::Send | Self::SendInv | Self::SendSe | Self::SendSeInv
        )
    }

    /// The message invalidates an STag of its receiver.
    #[inline]
    pub fn invalidates(self) -> bool {
        matches!(self, Self::SendInv | Self::SendSeInv)
    }

    /// The message asks for a solicited event.
    #[inline]
    pub fn is_solicited(self) -> bool {
        matches!(self, Self::SendSe | Self::SendSeInv | Self::ImmediateSe)
    }

    /// The untagged queue that the message belongs to; `None` for tagged messages.
    #[inline]
    pub fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::ReadRequest | Self::AtomicRequest => Some(crate::ddp::QN_READ_REQUEST),
            Self::AtomicResponse => Some(crate::ddp::QN_ATOMIC_RESPONSE),
            Self::Terminate => Some(crate::ddp::QN_TERMINATE),
            _ => Some(crate::ddp::QN_SEND),
        }
    }
}

/// The header that a Read Request carries as its payload (RFC 5040 section 4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadRequestHeader {
    /// STag of the data sink, at the requester.
    pub sink_stag: u32,
    /// Tagged offset of the data sink.
    pub sink_to: u64,
    /// Bytes to read.
    pub size: u32,
    /// STag of the data source, at the responder.
    pub src_stag: u32,
    /// Tagged offset of the data source.
    pub src_to: u64,
}

impl ReadRequestHeader {
    /// Reads the header.
    #[inline]
    pub fn parse(b: &[u8; READ_REQUEST_LEN]) -> Self {
        Self {
            sink_stag: be32(b, 0),
            sink_to: be64(b, 4),
            size: be32(b, 12),
            src_stag: be32(b, 16),
            src_to: be64(b, 20),
        }
    }

    /// The header as it goes on the wire.
    #[inline]
    pub fn to_bytes(&self) -> [u8; READ_REQUEST_LEN] {
        let mut b = [0; READ_REQUEST_LEN];
        b[0..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        b[4..12].copy_from_slice(&self.sink_to.to_be_bytes());
        b[12..16].copy_from_slice(&self.size.to_be_bytes());
        b[16..20].copy_from_slice(&self.src_stag.to_be_bytes());
        b[20..28].copy_from_slice(&self.src_to.to_be_bytes());
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5040 section 4.4, figure 5.
    #[test]
    fn a_read_request_has_the_octets_of_the_rfc() {
        let r = ReadRequestHeader {
            sink_stag: 0x0101_0101,
            sink_to: 0x0202_0202_0202_0202,
            size: 0x0303_0303,
            src_stag: 0x0404_0404,
            src_to: 0x0505_0505_0505_0505,
        };
        let b = r.to_bytes();
        let mut want = vec![1; 4];
        want.extend([2; 8]);
        want.extend([3; 4]);
        want.extend([4; 4]);
        want.extend([5; 8]);
        assert_eq!(b[..], want[..]);
        assert_eq!(ReadRequestHeader::parse(&b), r);
    }

    #[test]
    fn reserved_opcodes_are_unknown() {
        for v in 12..16 {
            assert_eq!(RdmapOpcode::from_wire(v), None);
        }
        for v in 0..12 {
            assert_eq!(RdmapOpcode::from_wire(v).map(|o| o as u8), Some(v));
        }
    }
}
