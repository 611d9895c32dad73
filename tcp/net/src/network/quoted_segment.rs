//! ICMP errors about TCP segments: the segment of ours that an error quotes, and the meaning of the error.

use crate::wire::bytes::{read_u16, read_u32};
use crate::wire::constants::PROTOCOL_TCP;
use crate::wire::flow_key::FlowKey;
use crate::wire::icmp_error::{is_soft_error_v4, is_soft_error_v6};

/// ICMPv4 type and code (RFC 1191 section 4), and ICMPv6 type (RFC 4443 section 3.2).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
const PACKET_TOO_BIG: u8 = 2;

/// A smaller MTU reported by a router, below that of any link in use, is rejected: it would only
/// multiply the packets that we send (RFC 5927 section 7).
pub const MIN_PATH_MTU_V4: u16 = 552;
/// The minimum link MTU of IPv6 (RFC 8201 section 4).
pub const MIN_PATH_MTU_V6: u16 = 1280;

/// An ICMP error that quotes a TCP segment of ours. Anybody may have sent it: the connection checks whether
/// it has sent such a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentError {
    /// The flow of the segment.
    pub key: FlowKey,
    /// Its sequence number.
    pub sequence: u32,
    /// The meaning of the error.
    pub kind: SegmentErrorKind,
}

/// The meaning of an ICMP error about a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentErrorKind {
    /// The packet was longer than `mtu` bytes allow (RFC 1191, RFC 8201).
    TooBig {
        /// The MTU of the next hop, in bytes.
        mtu: u16,
    },
    /// The packet did not reach its destination.
    Unreachable {
        /// The error may be transient (RFC 9293 section 3.9.2.2).
        soft: bool,
    },
}

impl SegmentError {
    /// Parses an ICMPv4 error. `head`: the first eight bytes of the message at least; `quoted`: the bytes
    /// after them, an IPv4 header and at least the next eight bytes (RFC 792). `None`: it quotes no TCP
    /// segment.
    pub(super) fn parse_v4(head: &[u8], quoted: &[u8]) -> Option<SegmentError> {
        let ip = quoted.get(..20)?;
        let header_len = usize::from(ip[0] & 15) * 4;
        let tcp = quoted.get(header_len..header_len + 8)?;
        if header_len < 20 || ip[9] != PROTOCOL_TCP {
            return None;
        }
        let (local, remote) = (read_u32(ip, 12), read_u32(ip, 16));
        let kind = match head[..2] == FRAGMENTATION_NEEDED {
            true => SegmentErrorKind::TooBig {
                mtu: next_hop_mtu(read_u16(head, 6), read_u16(ip, 2)),
            },
            false => SegmentErrorKind::Unreachable {
                soft: is_soft_error_v4(head[0], head[1]),
            },
        };
        Some(SegmentError {
            key: FlowKey::v4(local, remote, read_u16(tcp, 0), read_u16(tcp, 2)),
            sequence: read_u32(tcp, 4),
            kind,
        })
    }

    /// As [`parse_v4`](Self::parse_v4), for an ICMPv6 error. `quoted`: an IPv6 header directly followed by
    /// TCP, as we send it.
    pub(super) fn parse_v6(head: &[u8], quoted: &[u8]) -> Option<SegmentError> {
        let (ip, tcp) = (quoted.get(..40)?, quoted.get(40..48)?);
        if ip[6] != PROTOCOL_TCP {
            return None;
        }
        let half = |at| u64::from(read_u32(ip, at)) << 32 | u64::from(read_u32(ip, at + 4));
        let (local, remote) = ([half(8), half(16)], [half(24), half(32)]);
        let kind = match head[0] == PACKET_TOO_BIG {
            true => SegmentErrorKind::TooBig {
                mtu: read_u32(head, 4).min(0xffff) as u16,
            },
            false => SegmentErrorKind::Unreachable {
                soft: is_soft_error_v6(head[0], head[1]),
            },
        };
        Some(SegmentError {
            key: FlowKey::v6(local, remote, read_u16(tcp, 0), read_u16(tcp, 2)),
            sequence: read_u32(tcp, 4),
            kind,
        })
    }
}

/// Returns the next-hop MTU of an ICMPv4 error. Routers from before RFC 1191 report 0; the result
/// is then the next plateau (RFC 1191 section 7) below `quoted`, the length of the packet that was
/// too big.
fn next_hop_mtu(mtu: u16, quoted: u16) -> u16 {
    const PLATEAUS: [u16; 5] = [8166, 4352, 2002, 1492, 1006];
    if mtu != 0 {
        return mtu;
    }
    let below = PLATEAUS.into_iter().find(|&plateau| plateau < quoted);
    below.unwrap_or(MIN_PATH_MTU_V4)
}
