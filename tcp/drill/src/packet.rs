//! Packets as scripts say them and as they are on the wire: IP packets without a link layer.

use std::net::{IpAddr, SocketAddr};

use siw_tcp::checksum::Sum;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

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

/// The two ECN bits, or what to ask of them (RFC 3168 section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ecn {
    Is(u8),
    /// `[ect01]`: ECN-capable, either way.
    Capable,
}

/// A TCP segment of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TcpSpec {
    /// Source and destination, when the script names them.
    pub ports: Option<(u16, u16)>,
    pub ecn: Option<Ecn>,
    pub flags: u8,
    pub seq: u32,
    pub len: u32,
    pub ack: Option<u32>,
    pub window: Option<u16>,
    pub urgent: Option<u16>,
    /// `None`: `<...>`, any will do.
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
pub(crate) struct Segment {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    /// The two ECN bits.
    pub ecn: u8,
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    pub window: u16,
    pub urgent: u16,
    pub options: Vec<TcpOption>,
    pub payload: Vec<u8>,
}

/// Of packets that the peer sends; NDP asks for it (RFC 4861 section 7.1).
const HOPS: u8 = 255;

fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
pub(crate) fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Sum {
    let mut s = Sum::new();
    for a in [src, dst] {
        match a {
            IpAddr::V4(a) => s.add(&a.octets()),
            IpAddr::V6(a) => s.add(&a.octets()),
        }
    }
    s.add_word(u16::from(protocol));
    s.add_word(len as u16);
    s
}

/// `body` in an IP packet.
pub(crate) fn ip(src: IpAddr, dst: IpAddr, protocol: u8, ecn: u8, body: &[u8]) -> Vec<u8> {
    let mut p = vec![];
    match (src, dst) {
        (IpAddr::V4(s), IpAddr::V4(d)) => {
            p.extend([0x45, ecn]);
            p.extend((20 + body.len() as u16).to_be_bytes());
            p.extend([0, 0, 0x40, 0, HOPS, protocol, 0, 0]);
            p.extend(s.octets());
            p.extend(d.octets());
            let mut sum = Sum::new();
            sum.add(&p);
            p[10..12].copy_from_slice(&(!sum.value()).to_be_bytes());
        }
        (IpAddr::V6(s), IpAddr::V6(d)) => {
            p.extend([0x60, ecn << 4, 0, 0]);
            p.extend((body.len() as u16).to_be_bytes());
            p.extend([protocol, HOPS]);
            p.extend(s.octets());
            p.extend(d.octets());
        }
        _ => unreachable!("a setup has addresses of one family"),
    }
    p.extend(body);
    p
}

impl TcpOption {
    fn emit(&self, out: &mut Vec<u8>) {
        match self {
            TcpOption::Nop => out.push(1),
            TcpOption::Eol => out.push(0),
            TcpOption::Mss(v) => {
                out.extend([2, 4]);
                out.extend(v.to_be_bytes());
            }
            TcpOption::WindowScale(v) => out.extend([3, 3, *v]),
            TcpOption::SackOk => out.extend([4, 2]),
            TcpOption::Sack(blocks) => {
                out.extend([5, 2 + 8 * blocks.len() as u8]);
                for (lo, hi) in blocks {
                    out.extend(lo.to_be_bytes());
                    out.extend(hi.to_be_bytes());
                }
            }
            TcpOption::Timestamps { val, ecr } => {
                out.extend([8, 10]);
                out.extend(val.to_be_bytes());
                out.extend(ecr.to_be_bytes());
            }
            TcpOption::Other(kind, body) => {
                out.extend([*kind, 2 + body.len() as u8]);
                out.extend(body);
            }
        }
    }

    fn parse(mut o: &[u8]) -> Option<Vec<TcpOption>> {
        let mut all = vec![];
        while let Some((&kind, rest)) = o.split_first() {
            if kind < 2 {
                all.push(if kind == 0 {
                    TcpOption::Eol
                } else {
                    TcpOption::Nop
                });
                o = rest;
                continue;
            }
            let len = usize::from(*rest.first()?);
            let body = o.get(2..len)?;
            all.push(match (kind, body.len()) {
                (2, 2) => TcpOption::Mss(be16(body, 0)),
                (3, 1) => TcpOption::WindowScale(body[0]),
                (4, 0) => TcpOption::SackOk,
                (5, n) if n % 8 == 0 => {
                    TcpOption::Sack(body.chunks(8).map(|b| (be32(b, 0), be32(b, 4))).collect())
                }
                (8, 8) => TcpOption::Timestamps {
                    val: be32(body, 0),
                    ecr: be32(body, 4),
                },
                _ => TcpOption::Other(kind, body.to_vec()),
            });
            o = &o[len..];
        }
        Some(all)
    }
}

/// The option list on the wire must be a multiple of four bytes and at most forty.
pub(crate) fn options_fit(options: &[TcpOption]) -> Result<(), String> {
    let mut b = vec![];
    options.iter().for_each(|o| o.emit(&mut b));
    if b.len() % 4 != 0 {
        return Err(format!(
            "the TCP options are {} bytes, not a multiple of 4: add nop or eol",
            b.len()
        ));
    }
    if b.len() > 40 {
        return Err(format!("the TCP options are {} bytes; 40 fit", b.len()));
    }
    Ok(())
}

impl Segment {
    pub(crate) fn packet(&self) -> Vec<u8> {
        let mut t = vec![0; 20];
        t[0..2].copy_from_slice(&self.src.port().to_be_bytes());
        t[2..4].copy_from_slice(&self.dst.port().to_be_bytes());
        t[4..8].copy_from_slice(&self.seq.to_be_bytes());
        t[8..12].copy_from_slice(&self.ack.to_be_bytes());
        t[13] = self.flags;
        t[14..16].copy_from_slice(&self.window.to_be_bytes());
        t[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        self.options.iter().for_each(|o| o.emit(&mut t));
        t[12] = (t.len() as u8 / 4) << 4;
        t.extend(&self.payload);
        let mut sum = pseudo(self.src.ip(), self.dst.ip(), 6, t.len());
        sum.add(&t);
        t[16..18].copy_from_slice(&(!sum.value()).to_be_bytes());
        ip(self.src.ip(), self.dst.ip(), 6, self.ecn, &t)
    }

    /// Reads an IP packet; says what is wrong with one that no stack should send.
    pub(crate) fn parse(p: &[u8]) -> Result<Segment, String> {
        let (src, dst, protocol, ecn, body): (IpAddr, IpAddr, u8, u8, &[u8]) = match p.first() {
            Some(0x45) if p.len() >= 20 => {
                let total = usize::from(be16(p, 2));
                let mut sum = Sum::new();
                sum.add(&p[..20]);
                if sum.value() != 0xffff {
                    return Err("its IPv4 header checksum is wrong".into());
                }
                (
                    IpAddr::from([p[12], p[13], p[14], p[15]]),
                    IpAddr::from([p[16], p[17], p[18], p[19]]),
                    p[9],
                    p[1] & 3,
                    p.get(20..total).ok_or("its IPv4 length is wrong")?,
                )
            }
            Some(v) if v >> 4 == 6 && p.len() >= 40 => {
                let len = usize::from(be16(p, 4));
                let mut a = [[0; 16]; 2];
                a[0].copy_from_slice(&p[8..24]);
                a[1].copy_from_slice(&p[24..40]);
                (
                    a[0].into(),
                    a[1].into(),
                    p[6],
                    p[1] >> 4 & 3,
                    p.get(40..40 + len).ok_or("its IPv6 length is wrong")?,
                )
            }
            _ => return Err("it is no IP packet".into()),
        };
        if protocol != 6 {
            return Err(format!("it is of protocol {protocol}, not TCP"));
        }
        let mut sum = pseudo(src, dst, 6, body.len());
        sum.add(body);
        if sum.value() != 0xffff {
            return Err("its TCP checksum is wrong".into());
        }
        let header = body.get(12).map_or(0, |b| usize::from(b >> 4) * 4);
        if header < 20 || body.len() < header {
            return Err("its TCP header length is wrong".into());
        }
        Ok(Segment {
            src: SocketAddr::new(src, be16(body, 0)),
            dst: SocketAddr::new(dst, be16(body, 2)),
            ecn,
            flags: body[13],
            seq: be32(body, 4),
            ack: be32(body, 8),
            window: be16(body, 14),
            urgent: be16(body, 18),
            options: TcpOption::parse(&body[20..header]).ok_or("its TCP options are malformed")?,
            payload: body[header..].to_vec(),
        })
    }
}

/// Type and code of an ICMP error (RFC 792, 4443).
pub(crate) fn icmp_numbers(v6: bool, s: &IcmpSpec) -> Result<(u8, u8), String> {
    let code = s.code.as_deref();
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
        Some(c) => match all.iter().position(|a| *a == c) {
            Some(n) => Ok(n as u8),
            None => Err(format!("{c:?} is no code of icmp {}", s.kind)),
        },
    };
    match (v6, s.kind.as_str()) {
        (false, "unreachable") => Ok((3, find(&unreachable_v4)?)),
        (true, "unreachable") => Ok((1, find(&unreachable_v6)?)),
        (true, "packet_too_big") => Ok((2, find(&[])?)),
        (false, "source_quench") => Ok((4, find(&[])?)),
        (false, "time_exceeded") => Ok((11, find(&[])?)),
        (true, "time_exceeded") => Ok((3, find(&[])?)),
        (false, "parameter_problem") => Ok((12, find(&[])?)),
        (true, "parameter_problem") => Ok((4, find(&[])?)),
        (_, k) => Err(format!("icmp type {k:?} is not known for this IP version")),
    }
}

/// The ICMP error about `quoted`, from its destination to its source.
pub(crate) fn icmp_error(kind: u8, code: u8, mtu: u32, quoted: &Segment) -> Vec<u8> {
    let original = quoted.packet();
    let (src, dst) = (quoted.dst.ip(), quoted.src.ip());
    let v6 = src.is_ipv6();
    let mut b = vec![kind, code, 0, 0];
    b.extend(mtu.to_be_bytes());
    // RFC 792: the header and 64 bits; RFC 4443: as much as fits.
    let keep = if v6 { 40 + 20 } else { 20 + 8 };
    b.extend(&original[..keep.min(original.len())]);
    let mut sum = if v6 {
        pseudo(src, dst, 58, b.len())
    } else {
        Sum::new()
    };
    sum.add(&b);
    b[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
    ip(src, dst, if v6 { 58 } else { 1 }, 0, &b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(v6: bool) -> Segment {
        let (src, dst) = if v6 {
            ("[fd00::1]:1", "[fd00::2]:2")
        } else {
            ("10.0.0.1:1", "10.0.0.2:2")
        };
        Segment {
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
    fn a_segment_survives_the_wire_and_a_flipped_bit_is_seen() {
        for v6 in [false, true] {
            let s = segment(v6);
            let mut p = s.packet();
            assert_eq!(Segment::parse(&p).unwrap(), s);
            let last = p.len() - 1;
            p[last] ^= 4;
            assert!(Segment::parse(&p).unwrap_err().contains("checksum"));
        }
    }

    #[test]
    fn options_that_do_not_fill_words_are_refused() {
        assert!(
            options_fit(&[TcpOption::Nop])
                .unwrap_err()
                .contains("multiple of 4")
        );
        assert!(options_fit(&[TcpOption::Mss(1)]).is_ok());
        let ts = TcpOption::Timestamps { val: 0, ecr: 0 };
        let many = [ts.clone(), ts.clone(), ts.clone(), ts];
        assert!(
            options_fit(&[&many[..], &[TcpOption::Mss(1)]].concat())
                .unwrap_err()
                .contains("40")
        );
    }
}
