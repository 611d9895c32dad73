//! Parses frames as an observer on the wire would, for the wire oracle and for readable logs. The code
//! is separate from the parser of the stack, so that a defect of that parser cannot hide itself.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use siw_net::checksum::OnesComplementSum;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_VLAN: u16 = 0x8100;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_ICMPV6: u8 = 58;

/// FIN, as on the wire.
pub const FIN: u8 = 1;
/// SYN.
pub const SYN: u8 = 2;
/// RST.
pub const RST: u8 = 4;
/// ACK.
pub const ACK: u8 = 16;
/// ECE.
pub const ECE: u8 = 64;

/// A TCP segment on the wire.
#[derive(Clone, Copy, Debug)]
pub struct TcpView<'a> {
    /// Address and port of the sender, as the segment claims.
    pub source: SocketAddr,
    /// Destination address and port.
    pub destination: SocketAddr,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgment number.
    pub ack: u32,
    /// Flags as on the wire.
    pub flags: u8,
    /// Window, not scaled.
    pub window: u16,
    /// The maximum segment size option.
    pub mss: Option<u16>,
    /// The window scale option.
    pub window_scale: Option<u8>,
    /// TSval and TSecr.
    pub timestamps: Option<(u32, u32)>,
    /// SACK blocks; the first `sack_count` are valid.
    pub sack: [(u32, u32); 4],
    /// Number of valid SACK blocks.
    pub sack_count: usize,
    /// Payload.
    pub payload: &'a [u8],
    /// Offset of the TCP header in the frame.
    pub tcp_offset: usize,
}

impl TcpView<'_> {
    /// Returns the length of the segment in sequence space, SYN and FIN included.
    pub fn span(&self) -> u32 {
        let flags = u32::from(self.flags & SYN != 0) + u32::from(self.flags & FIN != 0);
        self.payload.len() as u32 + flags
    }
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the EtherType and the offset of the payload, after a VLAN tag if any.
fn link_payload(frame: &[u8]) -> Option<(u16, usize)> {
    match word16(frame, 12)? {
        ETHERTYPE_VLAN => Some((word16(frame, 16)?, 18)),
        ethertype => Some((ethertype, 14)),
    }
}

/// Returns protocol, addresses, and the start and end of the IP payload.
fn ip_payload(frame: &[u8]) -> Option<(u8, [IpAddr; 2], usize, usize)> {
    let (ethertype, at) = link_payload(frame)?;
    match ethertype {
        ETHERTYPE_IPV4 => {
            let header = usize::from(frame.get(at)? & 15) * 4;
            let address = |from: usize| word32(frame, from).map(|bits| Ipv4Addr::from(bits).into());
            let end = at + usize::from(word16(frame, at + 2)?);
            let addresses = [address(at + 12)?, address(at + 16)?];
            Some((*frame.get(at + 9)?, addresses, at + header, end))
        }
        ETHERTYPE_IPV6 => {
            let address = |from: usize| {
                let octets: [u8; 16] = frame.get(from..from + 16)?.try_into().ok()?;
                Some(IpAddr::V6(Ipv6Addr::from(octets)))
            };
            let end = at + 40 + usize::from(word16(frame, at + 4)?);
            Some((
                *frame.get(at + 6)?,
                [address(at + 8)?, address(at + 24)?],
                at + 40,
                end,
            ))
        }
        _ => None,
    }
}

/// Parses the TCP segment in a frame; `None`: there is none, or it is malformed.
pub fn tcp_view(frame: &[u8]) -> Option<TcpView<'_>> {
    let (protocol, [source, destination], at, end) = ip_payload(frame)?;
    if protocol != PROTOCOL_TCP {
        return None;
    }
    let tcp = frame.get(at..end)?;
    let header = usize::from(tcp.get(12)? >> 4) * 4;
    let mut view = TcpView {
        source: SocketAddr::new(source, word16(tcp, 0)?),
        destination: SocketAddr::new(destination, word16(tcp, 2)?),
        seq: word32(tcp, 4)?,
        ack: word32(tcp, 8)?,
        flags: *tcp.get(13)?,
        window: word16(tcp, 14)?,
        mss: None,
        window_scale: None,
        timestamps: None,
        sack: [(0, 0); 4],
        sack_count: 0,
        payload: tcp.get(header..)?,
        tcp_offset: at,
    };
    let mut options = tcp.get(20..header)?;
    while let Some(&kind) = options.first() {
        if kind == 0 {
            break;
        }
        if kind == 1 {
            options = &options[1..];
            continue;
        }
        let len = usize::from(*options.get(1)?);
        let body = options.get(2..len)?;
        match (kind, body.len()) {
            (2, 2) => view.mss = word16(body, 0),
            (3, 1) => view.window_scale = Some(body[0].min(14)),
            (8, 8) => view.timestamps = Some((word32(body, 0)?, word32(body, 4)?)),
            (5, _) => {
                for block in body.chunks_exact(8).take(4) {
                    view.sack[view.sack_count] = (word32(block, 0)?, word32(block, 4)?);
                    view.sack_count += 1;
                }
            }
            _ => {}
        }
        options = &options[len..];
    }
    Some(view)
}

/// Kind of an ARP or NDP message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeighbourMessage {
    /// A broadcast or multicast solicitation: its sender does not know the neighbour's MAC address.
    Search,
    /// A unicast solicitation: its sender confirms a known neighbour.
    Confirmation,
    /// A reply or an advertisement.
    Answer,
}

impl NeighbourMessage {
    /// Classifies a frame. `None`: neither ARP nor a neighbour solicitation or advertisement.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let asks = match link_payload(frame)? {
            (ETHERTYPE_ARP, at) => word16(frame, at + 6)? == 1,
            _ => match ip_payload(frame)? {
                (PROTOCOL_ICMPV6, _, at, _) => match frame.get(at)? {
                    135 => true,
                    136 => false,
                    _ => return None,
                },
                _ => return None,
            },
        };
        Some(match (asks, frame.first()? & 1 != 0) {
            (true, true) => NeighbourMessage::Search,
            (true, false) => NeighbourMessage::Confirmation,
            (false, _) => NeighbourMessage::Answer,
        })
    }
}

/// Returns whether all IPv4, TCP and ICMP checksums of the frame are correct. No receiver can detect that
/// a frame was damaged if they are.
pub fn has_valid_checksums(frame: &[u8]) -> bool {
    let Some((ethertype, ip)) = link_payload(frame) else {
        return false;
    };
    if ethertype == ETHERTYPE_ARP {
        return true; // ARP has no checksum
    }
    let Some((protocol, addresses, at, end)) = ip_payload(frame) else {
        return false;
    };
    let Some(payload) = frame.get(at..end) else {
        return false;
    };
    if ethertype == ETHERTYPE_IPV4 {
        let mut header = OnesComplementSum::new();
        header.add(&frame[ip..at]);
        if !header.value() != 0 {
            return false;
        }
    }
    let mut sum = OnesComplementSum::new();
    if protocol != PROTOCOL_ICMP {
        for address in addresses {
            match address {
                IpAddr::V4(address) => sum.add(&address.octets()),
                IpAddr::V6(address) => sum.add(&address.octets()),
            }
        }
        sum.add_word(protocol.into());
        sum.add_word(payload.len() as u16);
    }
    sum.add(payload);
    match protocol {
        PROTOCOL_TCP | PROTOCOL_ICMP | PROTOCOL_ICMPV6 => !sum.value() == 0,
        _ => true,
    }
}

/// Formats a frame on one line like tcpdump; sequence numbers are absolute.
pub struct FrameLine<'a>(pub &'a [u8]);

impl fmt::Display for FrameLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frame = self.0;
        if let Some(view) = tcp_view(frame) {
            write!(f, "{} > {} ", view.source, view.destination)?;
            for (bit, letter) in [
                (2, 'S'),
                (1, 'F'),
                (4, 'R'),
                (8, 'P'),
                (64, 'E'),
                (128, 'W'),
                (16, '.'),
            ] {
                if view.flags & bit != 0 {
                    write!(f, "{letter}")?;
                }
            }
            write!(f, " seq {}", view.seq)?;
            if !view.payload.is_empty() {
                write!(f, ":{}", view.seq.wrapping_add(view.payload.len() as u32))?;
            }
            write!(
                f,
                " ack {} win {} len {}",
                view.ack,
                view.window,
                view.payload.len()
            )?;
            if let Some(mss) = view.mss {
                write!(f, " mss {mss}")?;
            }
            if let Some(shift) = view.window_scale {
                write!(f, " wscale {shift}")?;
            }
            if let Some((value, echo)) = view.timestamps {
                write!(f, " TS {value}:{echo}")?;
            }
            for (low, high) in &view.sack[..view.sack_count] {
                write!(f, " sack {low}:{high}")?;
            }
            return Ok(());
        }
        match link_payload(frame) {
            Some((ETHERTYPE_ARP, at)) => {
                let kind = frame.get(at + 7).copied().unwrap_or(0);
                write!(f, "ARP {}", if kind == 1 { "request" } else { "reply" })
            }
            _ => match ip_payload(frame) {
                Some((protocol, [source, destination], at, _)) => {
                    let kind = frame.get(at).copied().unwrap_or(0);
                    write!(
                        f,
                        "{source} > {destination} protocol {protocol} type {kind}"
                    )
                }
                None => write!(f, "frame of {} bytes", frame.len()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge::{Ends, Tcp};

    #[test]
    fn segments_are_read_and_damage_is_seen() {
        for ip in [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]] {
            let ends = Ends {
                mac: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
                ip: ip.map(|address| address.parse().unwrap()),
            };
            let mut options = vec![2, 4, 5, 180, 3, 3, 7, 1, 8, 10, 0, 0, 0, 9, 0, 0, 0, 4];
            options.extend([5, 10, 0, 0, 0, 1, 0, 0, 0, 5]);
            let frame = ends.tcp(&Tcp {
                ports: [7, 80],
                seq: 5,
                ack: 6,
                flags: SYN | ACK,
                window: 77,
                options: &options,
                payload: b"payload",
            });
            let view = tcp_view(&frame).expect("a segment");
            assert_eq!(
                (view.seq, view.ack, view.span(), view.window),
                (5, 6, 8, 77)
            );
            assert_eq!((view.mss, view.window_scale), (Some(1460), Some(7)));
            assert_eq!(view.timestamps, Some((9, 4)));
            assert_eq!((view.sack_count, view.sack[0]), (1, (1, 5)));
            assert_eq!(view.payload, b"payload");
            let line = FrameLine(&frame).to_string();
            assert!(line.contains("S. seq 5:12 ack 6 win 77"), "{line}");
            assert!(has_valid_checksums(&frame));
            for at in view.tcp_offset..frame.len() {
                let mut damaged = frame.clone();
                damaged[at] ^= 0x41;
                assert!(!has_valid_checksums(&damaged), "byte {at}");
            }
        }
    }
}
