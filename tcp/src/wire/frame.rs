//! From a frame to what it is: Ethernet, VLAN and IP headers checked in place.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::base::buffer::RecvBuf;
use crate::base::frame_info::RxChecksum;
use crate::base::stats::StackStats;
use crate::wire::bytes::{read_u16, read_u32, read_u64};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::extension_headers::{self, WalkEnd};
use crate::wire::flow_key::FlowKey;
use crate::wire::icmp_error::IcmpError;

/// A frame's content; the buffer was advanced to its first byte and truncated to its last.
pub(crate) enum FrameContent {
    Tcp {
        key: FlowKey,
        /// Congestion experienced (RFC 3168 section 5).
        ce: bool,
    },
    Arp,
    Icmpv4 {
        src: Ipv4Addr,
        dst: Ipv4Addr,
    },
    Icmpv6 {
        src: Ipv6Addr,
        dst: Ipv6Addr,
        hop_limit: u8,
    },
    /// A part of a datagram to somebody here; the buffer begins with the IP header. In IPv6, where
    /// the fragment header is.
    Fragment {
        header: Option<usize>,
    },
    /// IP whose sender is told that it is not taken, when it is to one of us, or with `group` to a
    /// group that we are in; the buffer begins with the IP header.
    Rejected {
        src: IpAddr,
        dst: IpAddr,
        error: IcmpError,
        group: bool,
    },
}

/// Nothing follows the IPv6 header (RFC 8200 section 4.7).
pub(crate) const NO_NEXT_HEADER: u8 = 59;

/// What of the link layer the check needs.
pub(crate) struct LinkIdentity {
    pub mac: [u8; 6],
    pub vlan: Option<u16>,
}

/// The flow that a plain TCP segment belongs to, from its addresses and ports alone: nothing is
/// checked. `None`: something else, or options before TCP. `tagged`: frames have a VLAN tag here.
#[inline]
pub(crate) fn peek_flow(frame: &[u8], tagged: bool) -> Option<FlowKey> {
    let l2 = if tagged { 18 } else { 14 };
    if frame.len() < l2 + 24 || tagged && read_u16(frame, 12) != 0x8100 {
        return None;
    }
    let ip = &frame[l2..];
    match read_u16(frame, l2 - 2) {
        0x0800 if ip[0] == 0x45 && ip[9] == 6 => {
            let (src, dst) = (read_u32(ip, 12), read_u32(ip, 16));
            Some(FlowKey::v4(dst, src, read_u16(ip, 22), read_u16(ip, 20)))
        }
        0x86dd if ip.len() >= 44 && ip[6] == 6 => {
            let src = [read_u64(ip, 8), read_u64(ip, 16)];
            let dst = [read_u64(ip, 24), read_u64(ip, 32)];
            Some(FlowKey::v6(dst, src, read_u16(ip, 42), read_u16(ip, 40)))
        }
        _ => None,
    }
}

/// Classifies and strips; `None`: dropped and counted. `src_mac` is left for the answers.
#[inline]
pub(crate) fn classify_frame<B: RecvBuf>(
    link: &LinkIdentity,
    buffer: &mut B,
    checksum: RxChecksum,
    src_mac: &mut [u8; 6],
    stats: &mut StackStats,
) -> Option<FrameContent> {
    let frame = buffer.chunk();
    if frame.len() < 14 {
        stats.in_errs += 1;
        return None;
    }
    if frame[..6] != link.mac && frame[0] & 1 == 0 {
        stats.not_for_us += 1;
        return None;
    }
    // A group sends nothing (IEEE 802.3 clause 3.2.3); answers would go to all of it.
    if frame[6] & 1 != 0 {
        stats.martians += 1;
        return None;
    }
    src_mac.copy_from_slice(&frame[6..12]);
    let mut ethertype = read_u16(frame, 12);
    let mut l2 = 14;
    let mut vlan = 0;
    if ethertype == 0x8100 {
        if frame.len() < 18 {
            stats.in_errs += 1;
            return None;
        }
        vlan = read_u16(frame, 14) & 0xfff;
        ethertype = read_u16(frame, 16);
        l2 = 18;
    }
    // A priority tag (VLAN 0) is as good as none.
    if vlan != link.vlan.unwrap_or(0) {
        stats.not_for_us += 1;
        return None;
    }
    let multicast = frame[0] & 1 != 0;
    match ethertype {
        0x0800 => parse_ipv4(buffer, l2, checksum, multicast, stats),
        0x86dd => parse_ipv6(buffer, l2, checksum, multicast, stats),
        0x0806 => {
            buffer.advance(l2);
            Some(FrameContent::Arp)
        }
        _ => {
            stats.not_for_us += 1;
            None
        }
    }
}

#[inline]
fn parse_ipv4<B: RecvBuf>(
    buffer: &mut B,
    l2: usize,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<FrameContent> {
    let ip = &buffer.chunk()[l2..];
    if ip.len() < 20 || ip[0] >> 4 != 4 {
        stats.in_errs += 1;
        return None;
    }
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(read_u16(ip, 2));
    if header < 20 || total < header || ip.len() < header || buffer.remaining() - l2 < total {
        stats.in_errs += 1;
        return None;
    }
    if checksum != RxChecksum::Good {
        let mut sum = OnesComplementSum::new();
        sum.add(&ip[..header]);
        if checksum == RxChecksum::Bad || sum.value() != 0xffff {
            stats.csum_errors += 1;
            return None;
        }
    }
    // More fragments, or an offset.
    if read_u16(ip, 6) & 0x3fff != 0 {
        return accept_ipv4_fragment(buffer, l2, total, multicast, stats);
    }
    let (src, dst) = (read_u32(ip, 12), read_u32(ip, 16));
    let ce = ip[1] & 3 == 3;
    match ip[9] {
        6 => {
            let ports = ip.get(header..header + 4)?;
            let key = FlowKey::v4(dst, src, read_u16(ports, 2), read_u16(ports, 0));
            if multicast {
                stats.martians += 1;
                return None;
            }
            buffer.truncate(l2 + total);
            buffer.advance(l2 + header);
            if checksum == RxChecksum::Unknown {
                let mut sum = OnesComplementSum::new();
                for word in [src, dst] {
                    sum.add_word((word >> 16) as u16);
                    sum.add_word(word as u16);
                }
                verify_tcp_checksum(sum, buffer, stats)?;
            }
            Some(FrameContent::Tcp { key, ce })
        }
        1 => {
            buffer.truncate(l2 + total);
            buffer.advance(l2 + header);
            Some(FrameContent::Icmpv4 {
                src: src.into(),
                dst: dst.into(),
            })
        }
        _ => {
            stats.unknown_protocols += 1;
            buffer.truncate(l2 + total);
            buffer.advance(l2);
            let (src, dst): (Ipv4Addr, Ipv4Addr) = (src.into(), dst.into());
            (!multicast).then_some(FrameContent::Rejected {
                src: src.into(),
                dst: dst.into(),
                error: IcmpError::PROTOCOL,
                group: false,
            })
        }
    }
}

#[cold]
fn accept_ipv4_fragment<B: RecvBuf>(
    buffer: &mut B,
    l2: usize,
    total: usize,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<FrameContent> {
    if multicast {
        stats.not_for_us += 1;
        return None;
    }
    buffer.truncate(l2 + total);
    buffer.advance(l2);
    Some(FrameContent::Fragment { header: None })
}

#[inline]
fn parse_ipv6<B: RecvBuf>(
    buffer: &mut B,
    l2: usize,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<FrameContent> {
    let ip = &buffer.chunk()[l2..];
    if ip.len() < 40 || ip[0] >> 4 != 6 {
        stats.in_errs += 1;
        return None;
    }
    let len = usize::from(read_u16(ip, 4));
    if buffer.remaining() - l2 < 40 + len {
        stats.in_errs += 1;
        return None;
    }
    if checksum == RxChecksum::Bad {
        stats.csum_errors += 1;
        return None;
    }
    let packet = Ipv6Fields {
        src: [read_u64(ip, 8), read_u64(ip, 16)],
        dst: [read_u64(ip, 24), read_u64(ip, 32)],
        hop_limit: ip[7],
        ce: ip[1] >> 4 & 3 == 3,
        checksum,
        multicast,
    };
    match ip[6] {
        6 => accept_ipv6_tcp(buffer, &packet, l2, (40, len), stats),
        next => {
            buffer.truncate(l2 + 40 + len);
            buffer.advance(l2);
            parse_beyond_ipv6(buffer, &packet, next, stats)
        }
    }
}

/// What is asked of an IPv6 header, and of the frame.
struct Ipv6Fields {
    src: [u64; 2],
    dst: [u64; 2],
    hop_limit: u8,
    ce: bool,
    checksum: RxChecksum,
    multicast: bool,
}

impl Ipv6Fields {
    fn address_pair(&self) -> (Ipv6Addr, Ipv6Addr) {
        let addr = |halves: [u64; 2]| {
            Ipv6Addr::from_bits(u128::from(halves[0]) << 64 | u128::from(halves[1]))
        };
        (addr(self.src), addr(self.dst))
    }
}

/// TCP behind `at` bytes of IPv6 headers, `len` bytes long.
#[inline(always)]
fn accept_ipv6_tcp<B: RecvBuf>(
    buffer: &mut B,
    fields: &Ipv6Fields,
    l2: usize,
    (at, len): (usize, usize),
    stats: &mut StackStats,
) -> Option<FrameContent> {
    let ports = buffer.chunk().get(l2 + at..l2 + at + 4)?;
    let key = FlowKey::v6(
        fields.dst,
        fields.src,
        read_u16(ports, 2),
        read_u16(ports, 0),
    );
    if fields.multicast {
        stats.martians += 1;
        return None;
    }
    buffer.truncate(l2 + at + len);
    buffer.advance(l2 + at);
    if fields.checksum == RxChecksum::Unknown {
        let mut sum = OnesComplementSum::new();
        for word in [fields.src[0], fields.src[1], fields.dst[0], fields.dst[1]] {
            for shift in [48, 32, 16, 0] {
                sum.add_word((word >> shift) as u16);
            }
        }
        verify_tcp_checksum(sum, buffer, stats)?;
    }
    Some(FrameContent::Tcp { key, ce: fields.ce })
}

/// Not TCP, or not at once; `b` is the packet.
#[cold]
fn parse_beyond_ipv6<B: RecvBuf>(
    buffer: &mut B,
    fields: &Ipv6Fields,
    next: u8,
    stats: &mut StackStats,
) -> Option<FrameContent> {
    let (src, dst) = fields.address_pair();
    let trouble = |error, group| FrameContent::Rejected {
        src: src.into(),
        dst: dst.into(),
        error,
        group,
    };
    let packet = buffer.chunk();
    let mut hop_limit = fields.hop_limit;
    let mut walk = extension_headers::walk_extension_headers(
        packet,
        next,
        40,
        extension_headers::NEXT_HEADER_OFFSET,
    );
    if let WalkEnd::At {
        next: extension_headers::FRAGMENT,
        at,
        ..
    } = walk
    {
        let Some(header) = packet.get(at..at + 8) else {
            stats.header_errors += 1;
            return None;
        };
        if !extension_headers::is_atomic_fragment(header) {
            stats.not_for_us += u64::from(fields.multicast);
            return (!fields.multicast).then_some(FrameContent::Fragment { header: Some(at) });
        }
        // Whole in itself, whatever else has its number (RFC 6946); but no neighbour discovery (RFC
        // 6980), which wants 255 hops.
        hop_limit = 0;
        walk = extension_headers::walk_extension_headers(packet, header[0], at + 8, at);
    }
    match walk {
        WalkEnd::At { next: 6, at, .. } => {
            let len = buffer.remaining() - at;
            accept_ipv6_tcp(buffer, fields, 0, (at, len), stats)
        }
        WalkEnd::At {
            next: extension_headers::ICMPV6,
            at,
            ..
        } => {
            buffer.advance(at);
            Some(FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            })
        }
        WalkEnd::At { next, named, .. } => {
            stats.unknown_protocols += 1;
            (!fields.multicast && next != NO_NEXT_HEADER)
                .then(|| trouble(IcmpError::parameter_problem(1, named), false))
        }
        WalkEnd::Drop => {
            stats.header_errors += 1;
            None
        }
        WalkEnd::Tell { error, group } => {
            stats.header_errors += 1;
            let may = (group || !fields.multicast)
                && !extension_headers::carries_icmp_error(
                    packet,
                    packet[extension_headers::NEXT_HEADER_OFFSET],
                    40,
                );
            may.then(|| trouble(error, group))
        }
    }
}

/// The checksum of a segment that was put together.
pub(crate) fn verify_segment_checksum<B: RecvBuf>(
    key: &FlowKey,
    buffer: &B,
    stats: &mut StackStats,
) -> Option<()> {
    let mut sum = OnesComplementSum::new();
    for address in [key.local().ip(), key.remote().ip()] {
        match address {
            IpAddr::V4(address) => sum.add(&address.octets()),
            IpAddr::V6(address) => sum.add(&address.octets()),
        }
    }
    verify_tcp_checksum(sum, buffer, stats)
}

fn verify_tcp_checksum<B: RecvBuf>(
    mut sum: OnesComplementSum,
    buffer: &B,
    stats: &mut StackStats,
) -> Option<()> {
    sum.add_word(6);
    sum.add_word(buffer.remaining() as u16);
    buffer.chunks().for_each(|chunk| sum.add(chunk));
    if sum.value() != 0xffff {
        stats.csum_errors += 1;
        return None;
    }
    Some(())
}

/// An address that a TCP peer can have (RFC 1122 section 3.2.1.3, RFC 4291).
pub(crate) fn is_peer_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let never = address.is_broadcast() || address.is_multicast() || address.is_loopback();
            !(never || address.octets()[0] == 0)
        }
        IpAddr::V6(address) => {
            !(address.is_unspecified() || address.is_multicast() || address.is_loopback())
        }
    }
}
