//! Packets in scripts and on the wire: IP packets without a link layer.
//!
//! This code is deliberately separate from the stack's own wire code, so that an error in one cannot
//! hide in the other.

use std::net::{IpAddr, SocketAddr};

use siw_net::checksum::OnesComplementSum;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// The ECN codepoints (RFC 3168 section 5).
pub(crate) const ECN_NOT_ECT: u8 = 0;
pub(crate) const ECN_ECT1: u8 = 1;
pub(crate) const ECN_ECT0: u8 = 2;
pub(crate) const ECN_CE: u8 = 3;

const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
pub(crate) const PROTOCOL_ICMPV6: u8 = 58;
/// Bytes of an IPv4 header without options, an IPv6 header, a TCP header without options.
const IPV4_HEADER: usize = 20;
pub(crate) const IPV6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
/// The first byte of an IPv4 header without options: version 4, five words.
const IPV4_VERSION_AND_LENGTH: u8 = 0x45;
const IPV6_VERSION: u8 = 0x60;
const IPV4_DONT_FRAGMENT: u8 = 0x40;
/// Maximum length of TCP options in a header, in bytes.
const MAX_TCP_OPTIONS: usize = 40;
/// One's complement sum of data that includes its own, correct checksum.
const SUM_OF_CORRECT: u16 = 0xffff;

/// Kinds of TCP options (RFC 9293 section 3.2, RFC 7323, RFC 2018).
const OPTION_EOL: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_MSS: u8 = 2;
const OPTION_WINDOW_SCALE: u8 = 3;
const OPTION_SACK_PERMITTED: u8 = 4;
const OPTION_SACK: u8 = 5;
const OPTION_TIMESTAMPS: u8 = 8;
/// Bytes of one block of a SACK option: its two edges.
const SACK_BLOCK: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TcpOption {
    Nop,
    Eol,
    Mss(u16),
    WindowScale(u8),
    SackOk,
    Sack(Vec<(u32, u32)>),
    Timestamps {
        val: u32,
        ecr: u32,
    },
    /// Anything else: kind and body.
    Other(u8, Vec<u8>),
}

/// ECN codepoint in a script (RFC 3168 section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EcnSpec {
    Exactly(u8),
    /// `[ect01]`: ECT(0) or ECT(1).
    Capable,
}

/// A TCP segment as a script describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TcpSpec {
    /// Source and destination port, if the script specifies them.
    pub ports: Option<(u16, u16)>,
    pub ecn: Option<EcnSpec>,
    pub flags: u8,
    pub seq: u32,
    /// Bytes of payload.
    pub len: u32,
    pub ack: Option<u32>,
    pub window: Option<u16>,
    pub urgent: Option<u16>,
    /// `None`: `<...>`, which matches any options.
    pub options: Option<Vec<TcpOption>>,
}

/// An ICMP error that quotes a segment of the stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IcmpSpec {
    pub kind: String,
    pub code: Option<String>,
    pub mtu: Option<u32>,
    /// Sequence number and payload length of the quoted segment.
    pub quoted: (u32, u32),
}

/// A TCP segment on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WireSegment {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    /// The ECN codepoint.
    pub ecn: u8,
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    pub window: u16,
    pub urgent: u16,
    pub options: Vec<TcpOption>,
    pub payload: Vec<u8>,
}

/// Hop limit of packets that the peer sends: 255, as NDP requires (RFC 4861 section 7.1).
const HOP_LIMIT: u8 = 255;

fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Computes the one's complement sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
/// `len` is the length of the transport header with its payload.
pub(crate) fn pseudo_header_sum(
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    len: usize,
) -> OnesComplementSum {
    let mut sum = OnesComplementSum::new();
    for address in [src, dst] {
        match address {
            IpAddr::V4(address) => sum.add(&address.octets()),
            IpAddr::V6(address) => sum.add(&address.octets()),
        }
    }
    sum.add_word(u16::from(protocol));
    sum.add_word(len as u16);
    sum
}

/// Builds an IP packet with the payload `body`. Both addresses are of one family.
pub(crate) fn build_ip_packet(
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    ecn: u8,
    body: &[u8],
) -> Vec<u8> {
    let mut packet = vec![];
    match (src, dst) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            packet.extend([IPV4_VERSION_AND_LENGTH, ecn]);
            packet.extend(((IPV4_HEADER + body.len()) as u16).to_be_bytes());
            packet.extend([0, 0, IPV4_DONT_FRAGMENT, 0, HOP_LIMIT, protocol, 0, 0]);
            packet.extend(source.octets());
            packet.extend(destination.octets());
            let mut sum = OnesComplementSum::new();
            sum.add(&packet);
            packet[10..12].copy_from_slice(&(!sum.value()).to_be_bytes());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            // The lower bits of the traffic class are the ECN codepoint.
            packet.extend([IPV6_VERSION, ecn << 4, 0, 0]);
            packet.extend((body.len() as u16).to_be_bytes());
            packet.extend([protocol, HOP_LIMIT]);
            packet.extend(source.octets());
            packet.extend(destination.octets());
        }
        _ => unreachable!("a setup has addresses of one family"),
    }
    packet.extend(body);
    packet
}

impl TcpOption {
    /// Appends the option in wire format.
    fn emit(&self, out: &mut Vec<u8>) {
        match self {
            TcpOption::Nop => out.push(OPTION_NOP),
            TcpOption::Eol => out.push(OPTION_EOL),
            TcpOption::Mss(value) => {
                out.extend([OPTION_MSS, 4]);
                out.extend(value.to_be_bytes());
            }
            TcpOption::WindowScale(value) => out.extend([OPTION_WINDOW_SCALE, 3, *value]),
            TcpOption::SackOk => out.extend([OPTION_SACK_PERMITTED, 2]),
            TcpOption::Sack(blocks) => {
                out.extend([OPTION_SACK, 2 + (SACK_BLOCK * blocks.len()) as u8]);
                for (left, right) in blocks {
                    out.extend(left.to_be_bytes());
                    out.extend(right.to_be_bytes());
                }
            }
            TcpOption::Timestamps { val, ecr } => {
                out.extend([OPTION_TIMESTAMPS, 10]);
                out.extend(val.to_be_bytes());
                out.extend(ecr.to_be_bytes());
            }
            TcpOption::Other(kind, body) => {
                out.extend([*kind, 2 + body.len() as u8]);
                out.extend(body);
            }
        }
    }

    /// Parses all options of a header; `None` if a length is wrong.
    fn parse(mut rest: &[u8]) -> Option<Vec<TcpOption>> {
        let mut all = vec![];
        while let Some((&kind, after_kind)) = rest.split_first() {
            if kind == OPTION_EOL || kind == OPTION_NOP {
                all.push(if kind == OPTION_EOL {
                    TcpOption::Eol
                } else {
                    TcpOption::Nop
                });
                rest = after_kind;
                continue;
            }
            let len = usize::from(*after_kind.first()?);
            let body = rest.get(2..len)?;
            all.push(match (kind, body.len()) {
                (OPTION_MSS, 2) => TcpOption::Mss(read_u16(body, 0)),
                (OPTION_WINDOW_SCALE, 1) => TcpOption::WindowScale(body[0]),
                (OPTION_SACK_PERMITTED, 0) => TcpOption::SackOk,
                (OPTION_SACK, len) if len % SACK_BLOCK == 0 => TcpOption::Sack(
                    body.chunks(SACK_BLOCK)
                        .map(|block| (read_u32(block, 0), read_u32(block, 4)))
                        .collect(),
                ),
                (OPTION_TIMESTAMPS, 8) => TcpOption::Timestamps {
                    val: read_u32(body, 0),
                    ecr: read_u32(body, 4),
                },
                _ => TcpOption::Other(kind, body.to_vec()),
            });
            rest = &rest[len..];
        }
        Some(all)
    }
}

/// Checks that options fill whole words and fit a header.
pub(crate) fn check_options_fit(options: &[TcpOption]) -> Result<(), String> {
    let mut bytes = vec![];
    options.iter().for_each(|option| option.emit(&mut bytes));
    if bytes.len() % 4 != 0 {
        return Err(format!(
            "the TCP options are {} bytes, not a multiple of 4: add nop or eol",
            bytes.len()
        ));
    }
    if bytes.len() > MAX_TCP_OPTIONS {
        return Err(format!(
            "the TCP options are {} bytes; at most {MAX_TCP_OPTIONS} fit",
            bytes.len()
        ));
    }
    Ok(())
}

impl WireSegment {
    /// Builds the segment in an IP packet, with its checksums.
    pub(crate) fn to_packet(&self) -> Vec<u8> {
        let mut tcp = vec![0; TCP_HEADER];
        tcp[0..2].copy_from_slice(&self.src.port().to_be_bytes());
        tcp[2..4].copy_from_slice(&self.dst.port().to_be_bytes());
        tcp[4..8].copy_from_slice(&self.seq.to_be_bytes());
        tcp[8..12].copy_from_slice(&self.ack.to_be_bytes());
        tcp[13] = self.flags;
        tcp[14..16].copy_from_slice(&self.window.to_be_bytes());
        tcp[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        self.options.iter().for_each(|option| option.emit(&mut tcp));
        tcp[12] = (tcp.len() as u8 / 4) << 4;
        tcp.extend(&self.payload);
        let mut sum = pseudo_header_sum(self.src.ip(), self.dst.ip(), PROTOCOL_TCP, tcp.len());
        sum.add(&tcp);
        tcp[16..18].copy_from_slice(&(!sum.value()).to_be_bytes());
        build_ip_packet(self.src.ip(), self.dst.ip(), PROTOCOL_TCP, self.ecn, &tcp)
    }

    /// Parses an IP packet of the stack. An error describes the malformed part.
    pub(crate) fn parse(packet: &[u8]) -> Result<WireSegment, String> {
        let (src, dst, protocol, ecn, body): (IpAddr, IpAddr, u8, u8, &[u8]) = match packet.first()
        {
            Some(&IPV4_VERSION_AND_LENGTH) if packet.len() >= IPV4_HEADER => {
                let total = usize::from(read_u16(packet, 2));
                let mut sum = OnesComplementSum::new();
                sum.add(&packet[..IPV4_HEADER]);
                if sum.value() != SUM_OF_CORRECT {
                    return Err("its IPv4 header checksum is wrong".into());
                }
                (
                    IpAddr::from([packet[12], packet[13], packet[14], packet[15]]),
                    IpAddr::from([packet[16], packet[17], packet[18], packet[19]]),
                    packet[9],
                    packet[1] & ECN_CE,
                    packet
                        .get(IPV4_HEADER..total)
                        .ok_or("its IPv4 length is wrong")?,
                )
            }
            Some(first) if first >> 4 == 6 && packet.len() >= IPV6_HEADER => {
                let len = usize::from(read_u16(packet, 4));
                let mut addresses = [[0; 16]; 2];
                addresses[0].copy_from_slice(&packet[8..24]);
                addresses[1].copy_from_slice(&packet[24..40]);
                (
                    addresses[0].into(),
                    addresses[1].into(),
                    packet[6],
                    packet[1] >> 4 & ECN_CE,
                    packet
                        .get(IPV6_HEADER..IPV6_HEADER + len)
                        .ok_or("its IPv6 length is wrong")?,
                )
            }
            _ => return Err("it is not an IP packet".into()),
        };
        if protocol != PROTOCOL_TCP {
            return Err(format!("its protocol is {protocol}, not TCP"));
        }
        let mut sum = pseudo_header_sum(src, dst, PROTOCOL_TCP, body.len());
        sum.add(body);
        if sum.value() != SUM_OF_CORRECT {
            return Err("its TCP checksum is wrong".into());
        }
        let header = body.get(12).map_or(0, |byte| usize::from(byte >> 4) * 4);
        if header < TCP_HEADER || body.len() < header {
            return Err("its TCP header length is wrong".into());
        }
        Ok(WireSegment {
            src: SocketAddr::new(src, read_u16(body, 0)),
            dst: SocketAddr::new(dst, read_u16(body, 2)),
            ecn,
            flags: body[13],
            seq: read_u32(body, 4),
            ack: read_u32(body, 8),
            window: read_u16(body, 14),
            urgent: read_u16(body, 18),
            options: TcpOption::parse(&body[TCP_HEADER..header])
                .ok_or("its TCP options are malformed")?,
            payload: body[header..].to_vec(),
        })
    }
}

/// Returns type and code of an ICMP error for their names in scripts (RFC 792, RFC 1122 section 3.2.2.1,
/// RFC 1812 section 5.2.7.1, RFC 4443 section 3).
pub(crate) fn icmp_type_and_code(v6: bool, spec: &IcmpSpec) -> Result<(u8, u8), String> {
    let code = spec.code.as_deref();
    let unreachable_v4 = [
        "net_unreachable",
        "host_unreachable",
        "protocol_unreachable",
        "port_unreachable",
        "frag_needed",
        "source_route_failed",
        "net_unknown",
        "host_unknown",
        "source_host_isolated",
        "net_prohibited",
        "host_prohibited",
        "net_unreachable_for_tos",
        "host_unreachable_for_tos",
        "packet_filtered",
    ];
    let unreachable_v6 = [
        "no_route",
        "admin_prohibited",
        "not_neighbour",
        "address_unreachable",
        "port_unreachable",
    ];
    let find = |all: &[&str]| match code {
        None => Ok(0),
        Some(name) => match all.iter().position(|known| *known == name) {
            Some(position) => Ok(position as u8),
            None => Err(format!("{name:?} is not a code of icmp {}", spec.kind)),
        },
    };
    match (v6, spec.kind.as_str()) {
        (false, "unreachable") => Ok((3, find(&unreachable_v4)?)),
        (true, "unreachable") => Ok((1, find(&unreachable_v6)?)),
        (true, "packet_too_big") => Ok((2, find(&[])?)),
        (false, "source_quench") => Ok((4, find(&[])?)),
        (false, "time_exceeded") => Ok((11, find(&[])?)),
        (true, "time_exceeded") => Ok((3, find(&[])?)),
        (false, "parameter_problem") => Ok((12, find(&[])?)),
        (true, "parameter_problem") => Ok((4, find(&[])?)),
        (_, unknown) => Err(format!(
            "icmp type {unknown:?} is not supported for this IP version"
        )),
    }
}

/// Builds the ICMP error about `quoted`, from its destination to its source.
pub(crate) fn build_icmp_error(kind: u8, code: u8, mtu: u32, quoted: &WireSegment) -> Vec<u8> {
    let original = quoted.to_packet();
    let (src, dst) = (quoted.dst.ip(), quoted.src.ip());
    let v6 = src.is_ipv6();
    let mut message = vec![kind, code, 0, 0];
    message.extend(mtu.to_be_bytes());
    // RFC 792: the header and 64 bits. RFC 4443: as much as fits; here the TCP header suffices.
    let quoted_len = if v6 {
        IPV6_HEADER + TCP_HEADER
    } else {
        IPV4_HEADER + 8
    };
    message.extend(&original[..quoted_len.min(original.len())]);
    let mut sum = if v6 {
        pseudo_header_sum(src, dst, PROTOCOL_ICMPV6, message.len())
    } else {
        OnesComplementSum::new()
    };
    sum.add(&message);
    message[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
    let protocol = if v6 { PROTOCOL_ICMPV6 } else { PROTOCOL_ICMP };
    build_ip_packet(src, dst, protocol, 0, &message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(v6: bool) -> WireSegment {
        let (src, dst) = if v6 {
            ("[fd00::1]:1", "[fd00::2]:2")
        } else {
            ("10.0.0.1:1", "10.0.0.2:2")
        };
        WireSegment {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            ecn: 2,
            flags: ACK | PSH,
            seq: 7,
            ack: 9,
            window: 100,
            urgent: 0,
            options: vec![
                TcpOption::Nop,
                TcpOption::Nop,
                TcpOption::Sack(vec![(1, 2)]),
            ],
            payload: vec![1, 2, 3],
        }
    }

    #[test]
    fn segments_survive_the_wire_unless_a_bit_flips() {
        for v6 in [false, true] {
            let segment = segment(v6);
            let mut packet = segment.to_packet();
            assert_eq!(WireSegment::parse(&packet).unwrap(), segment);
            let last = packet.len() - 1;
            packet[last] ^= 4;
            assert!(
                WireSegment::parse(&packet)
                    .unwrap_err()
                    .contains("checksum")
            );
        }
    }

    #[test]
    fn options_must_fill_words_and_fit_the_header() {
        assert!(
            check_options_fit(&[TcpOption::Nop])
                .unwrap_err()
                .contains("multiple of 4")
        );
        assert!(check_options_fit(&[TcpOption::Mss(1)]).is_ok());
        let many = vec![TcpOption::Timestamps { val: 0, ecr: 0 }; 4];
        assert!(
            check_options_fit(&[&many[..], &[TcpOption::Mss(1)]].concat())
                .unwrap_err()
                .contains("40")
        );
    }
}
