//! Messages of the iWARP port mapper, which hosts with RNICs run (iwpmd of rdma-core). A listener of an
//! RNIC is on another TCP port than the one that its application asked for, because the host's own
//! stack has the ports of the address. The connecting peer asks the accepting peer's mapper for that
//! port.
//!
//! ```text
//!  connecting peer                      accepting peer, UDP port 3935
//!        | Request (port asked for) ------------> |
//!        | <----- Accept (port to connect to), or Reject
//!        | Acknowledge (of an Accept) ----------> |
//! ```
//! Every message is a datagram of 48 octets, a request of 64 octets. Numbers are in network byte order:
//!
//! | octets | field |
//! |---|---|
//! | 0 | version (2 bits, 0), kind (2 bits), IP version (4 bits) |
//! | 1 | time, 0 |
//! | 2, 3 | request: TCP port that the connecting peer will use |
//! | 4, 5 | port of the accepting peer |
//! | 6, 7 | port of the connecting peer |
//! | 8 to 15 | association handle, chosen by the connecting peer and repeated in answers |
//! | 16 to 31 | address of the connecting peer; IPv4 in the first four octets |
//! | 32 to 47 | address of the accepting peer |
//! | 48 to 63 | request: address that the connecting peer will use |

use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Length of an answer, and of a request.
const ANSWER_LEN: usize = 48;
const REQUEST_LEN: usize = 64;

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortMapperKind {
    /// Asks for the port of a listener.
    Request,
    /// Names the port.
    Accept,
    /// Acknowledges an `Accept`.
    Acknowledge,
    /// There is no such listener.
    Reject,
}

/// A message of either peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapperMessage {
    /// Its kind.
    pub kind: PortMapperKind,
    /// Association handle of the request.
    pub handle: u64,
    /// Address and port of the listener: as asked for in a request, as it is in an accept.
    pub accepting: SocketAddr,
    /// Address and port of the connecting peer, of the same IP version.
    pub connecting: SocketAddr,
}

impl PortMapperMessage {
    /// Parses a datagram. `None`: not a message of this version.
    #[must_use]
    pub fn parse(datagram: &[u8]) -> Option<PortMapperMessage> {
        let (head, rest) = datagram.split_first_chunk::<ANSWER_LEN>()?;
        if !(rest.is_empty() || rest.len() == REQUEST_LEN - ANSWER_LEN) || head[0] >> 6 != 0 {
            return None;
        }
        let kind = match head[0] >> 4 & 3 {
            0 => PortMapperKind::Request,
            1 => PortMapperKind::Accept,
            2 => PortMapperKind::Acknowledge,
            _ => PortMapperKind::Reject,
        };
        if kind == PortMapperKind::Request && rest.is_empty() {
            return None;
        }
        let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let address = |at: usize| -> Option<IpAddr> {
            let octets: [u8; 16] = head[at..at + 16].try_into().ok()?;
            match head[0] & 15 {
                4 => Some(Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]).into()),
                6 => Some(Ipv6Addr::from(octets).into()),
                _ => None,
            }
        };
        let handle = head.get(8..16)?.try_into().ok().map(u64::from_be_bytes)?;
        Some(PortMapperMessage {
            kind,
            handle,
            accepting: SocketAddr::new(address(32)?, port(4)),
            connecting: SocketAddr::new(address(16)?, port(6)),
        })
    }

    /// Builds the datagram. In a request, the connecting peer uses the address and port that it has.
    #[must_use]
    pub fn build(&self) -> Vec<u8> {
        let is_request = self.kind == PortMapperKind::Request;
        let len = if is_request { REQUEST_LEN } else { ANSWER_LEN };
        let mut out = vec![0; len];
        let kind = match self.kind {
            PortMapperKind::Request => 0,
            PortMapperKind::Accept => 1,
            PortMapperKind::Acknowledge => 2,
            PortMapperKind::Reject => 3,
        };
        let version = if self.accepting.is_ipv4() { 4 } else { 6 };
        out[0] = kind << 4 | version;
        out[4..6].copy_from_slice(&self.accepting.port().to_be_bytes());
        out[6..8].copy_from_slice(&self.connecting.port().to_be_bytes());
        out[8..16].copy_from_slice(&self.handle.to_be_bytes());
        let mut put = |at: usize, address: IpAddr| match address {
            IpAddr::V4(address) => out[at..at + 4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => out[at..at + 16].copy_from_slice(&address.octets()),
        };
        put(16, self.connecting.ip());
        put(32, self.accepting.ip());
        if is_request {
            put(48, self.connecting.ip());
            out[2..4].copy_from_slice(&self.connecting.port().to_be_bytes());
        }
        out
    }

    /// The message with another kind, for an answer.
    #[must_use]
    pub fn answer(self, kind: PortMapperKind) -> PortMapperMessage {
        PortMapperMessage { kind, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> PortMapperMessage {
        PortMapperMessage {
            kind: PortMapperKind::Request,
            handle: 0x0102_0304_0506_0708,
            accepting: "10.1.2.3:7471".parse().unwrap(),
            connecting: "10.1.2.9:40000".parse().unwrap(),
        }
    }

    #[test]
    fn a_request_has_the_octets_that_iwpmd_sends() {
        let mut expected = vec![0x04, 0, 0x9c, 0x40, 0x1d, 0x2f, 0x9c, 0x40];
        expected.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        for address in [[10, 1, 2, 9], [10, 1, 2, 3], [10, 1, 2, 9]] {
            expected.extend(address);
            expected.extend([0; 12]);
        }
        assert_eq!(request().build(), expected);
        assert_eq!(PortMapperMessage::parse(&expected), Some(request()));
    }

    #[test]
    fn an_answer_has_48_octets_and_the_bits_of_its_kind() {
        for (kind, first) in [
            (PortMapperKind::Accept, 0x16),
            (PortMapperKind::Acknowledge, 0x26),
            (PortMapperKind::Reject, 0x36),
        ] {
            let message = PortMapperMessage {
                accepting: "[fd00::1]:1".parse().unwrap(),
                connecting: "[fd00::2]:2".parse().unwrap(),
                ..request().answer(kind)
            };
            let bytes = message.build();
            assert_eq!((bytes.len(), bytes[0]), (48, first));
            assert_eq!(PortMapperMessage::parse(&bytes), Some(message));
        }
    }

    #[test]
    fn datagrams_that_are_no_messages_are_not_parsed() {
        let good = request().build();
        for len in (0..good.len()).chain([good.len() + 1]) {
            let mut cut = good.clone();
            cut.resize(len, 0);
            assert_eq!(PortMapperMessage::parse(&cut), None, "{len} octets");
        }
        for first in [0x44, 0x05, 0x00] {
            let mut other = good.clone();
            other[0] = first;
            assert_eq!(PortMapperMessage::parse(&other), None, "{first:#x}");
        }
    }
}
