//! Maps ICMP errors to socket errors. The stack reports that a connection could not be opened, but not
//! the reason; a socket gets Linux's error number for the ICMP message (RFC 1122 section 4.2.3.9).

use std::net::IpAddr;

use crate::errno::Errno;

/// Offsets of the protocol in IP headers, and protocol numbers.
const IPV4_PROTOCOL_AT: usize = 9;
const IPV6_NEXT_HEADER_AT: usize = 6;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_ICMPV6: u8 = 58;
const IPV6_HEADER: usize = 40;
/// Length of the header of an ICMP error, before the quoted packet.
const ICMP_HEADER: usize = 8;

/// An ICMP error that quotes a segment of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IcmpReport {
    /// The ports of the host and of its peer.
    pub ports: (u16, u16),
    /// The peer's address.
    pub remote: IpAddr,
    pub errno: Errno,
}

/// Returns the report if the packet is an ICMP error about a TCP segment. Checksums are not verified: the
/// stack verifies them, and an error that it ignores has no effect.
pub(crate) fn read_icmp_error(packet: &[u8]) -> Option<IcmpReport> {
    let is_v4 = packet.first()? >> 4 == 4;
    let (protocol, body) = split_ip_packet(packet)?;
    let (kind, code) = (*body.first()?, *body.get(1)?);
    let errno = match (is_v4, protocol) {
        (true, PROTOCOL_ICMP) => errno_of_icmpv4(kind, code)?,
        (false, PROTOCOL_ICMPV6) => errno_of_icmpv6(kind, code)?,
        _ => return None,
    };
    let quoted = body.get(ICMP_HEADER..)?;
    let (protocol, segment) = split_ip_packet(quoted)?;
    if protocol != PROTOCOL_TCP {
        return None;
    }
    let port = |at: usize| {
        let octets = segment.get(at..at + 2)?;
        Some(u16::from_be_bytes([octets[0], octets[1]]))
    };
    Some(IcmpReport {
        ports: (port(0)?, port(2)?),
        remote: destination(quoted)?,
        errno,
    })
}

/// Returns the protocol of an IP packet without extension headers, and its payload.
fn split_ip_packet(packet: &[u8]) -> Option<(u8, &[u8])> {
    let first = *packet.first()?;
    if first >> 4 == 4 {
        let header = usize::from(first & 15) * 4;
        return Some((*packet.get(IPV4_PROTOCOL_AT)?, packet.get(header..)?));
    }
    Some((
        *packet.get(IPV6_NEXT_HEADER_AT)?,
        packet.get(IPV6_HEADER..)?,
    ))
}

/// Returns the destination address of an IP packet.
fn destination(packet: &[u8]) -> Option<IpAddr> {
    if packet.first()? >> 4 == 4 {
        let octets: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
        return Some(octets.into());
    }
    let octets: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
    Some(octets.into())
}

/// Returns the error number of an ICMPv4 error (RFC 792, RFC 1122 section 3.2.2, RFC 1812 section 5.2.7.1).
fn errno_of_icmpv4(kind: u8, code: u8) -> Option<Errno> {
    match (kind, code) {
        (3, 0 | 6 | 9 | 11) => Some(Errno::ENETUNREACH),
        (3, 2) => Some(Errno::ENOPROTOOPT),
        (3, 3) => Some(Errno::ECONNREFUSED),
        (3, 4) => None, // too big: path MTU discovery
        (3, 5) => Some(Errno::EOPNOTSUPP),
        (3, 7) => Some(Errno::EHOSTDOWN),
        (3, 8) => Some(Errno::ENONET),
        (3 | 11, _) => Some(Errno::EHOSTUNREACH),
        (12, _) => Some(Errno::EPROTO),
        _ => None,
    }
}

/// Returns the error number of an ICMPv6 error (RFC 4443 section 3).
fn errno_of_icmpv6(kind: u8, code: u8) -> Option<Errno> {
    match (kind, code) {
        (1, 0) => Some(Errno::ENETUNREACH),
        (1, 1 | 5 | 6) => Some(Errno::EACCES),
        (1, 4) => Some(Errno::ECONNREFUSED),
        (1 | 3, _) => Some(Errno::EHOSTUNREACH),
        (4, _) => Some(Errno::EPROTO),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_about_segments_are_read_and_nothing_else() {
        let mut packet = vec![0x45, 0, 0, 56, 0, 0, 0, 0, 64, 1, 0, 0];
        packet.extend([192, 0, 2, 1, 192, 168, 0, 1]);
        packet.extend([3, 1, 0, 0, 0, 0, 0, 0]);
        packet.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
        packet.extend([192, 168, 0, 1, 192, 0, 2, 1]);
        packet.extend([0x30, 0x39, 0x1f, 0x90, 0, 0, 0, 1]);
        let report = read_icmp_error(&packet).unwrap();
        assert_eq!(report.ports, (12345, 8080));
        assert_eq!(report.remote, IpAddr::from([192, 0, 2, 1]));
        assert_eq!(report.errno, Errno::EHOSTUNREACH);
        for (code, errno) in [
            (0, Some(Errno::ENETUNREACH)),
            (2, Some(Errno::ENOPROTOOPT)),
            (3, Some(Errno::ECONNREFUSED)),
            (4, None),
        ] {
            packet[21] = code;
            assert_eq!(read_icmp_error(&packet).map(|report| report.errno), errno);
        }
        packet[21] = 1;
        for len in 0..packet.len() - 4 {
            assert_eq!(read_icmp_error(&packet[..len]), None, "{len}");
        }
        packet[20] = 8;
        assert_eq!(read_icmp_error(&packet), None, "an echo request");
    }
}
