//! The header of a Read Request (RFC 5040 section 4.4).

use crate::ddp::{be32, be64};
use serde::{Deserialize, Serialize};

/// Length of the Read Request header, in octets.
pub const READ_REQUEST_LEN: usize = 28;

/// The header that a Read Request carries as its payload (RFC 5040 section 4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
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
    /// Parses the header.
    #[inline]
    pub fn parse(octets: &[u8; READ_REQUEST_LEN]) -> Self {
        Self {
            sink_stag: be32(octets, 0),
            sink_to: be64(octets, 4),
            size: be32(octets, 12),
            src_stag: be32(octets, 16),
            src_to: be64(octets, 20),
        }
    }

    /// Encodes the header.
    #[inline]
    pub fn to_bytes(self) -> [u8; READ_REQUEST_LEN] {
        let mut octets = [0; READ_REQUEST_LEN];
        octets[0..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        octets[4..12].copy_from_slice(&self.sink_to.to_be_bytes());
        octets[12..16].copy_from_slice(&self.size.to_be_bytes());
        octets[16..20].copy_from_slice(&self.src_stag.to_be_bytes());
        octets[20..28].copy_from_slice(&self.src_to.to_be_bytes());
        octets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5040 section 4.4, figure 5.
    #[test]
    fn read_request_has_the_octets_of_the_rfc() {
        let header = ReadRequestHeader {
            sink_stag: 0x0101_0101,
            sink_to: 0x0202_0202_0202_0202,
            size: 0x0303_0303,
            src_stag: 0x0404_0404,
            src_to: 0x0505_0505_0505_0505,
        };
        let octets = header.to_bytes();
        let mut want = vec![1; 4];
        want.extend([2; 8]);
        want.extend([3; 4]);
        want.extend([4; 4]);
        want.extend([5; 8]);
        assert_eq!(octets[..], want[..]);
        assert_eq!(ReadRequestHeader::parse(&octets), header);
    }
}
