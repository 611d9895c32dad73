//! From a frame to what it is: Ethernet, VLAN and IP headers checked in place.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::base::buffer::RecvBuf;
use crate::base::frame_info::RxChecksum;
use crate::base::stats::StackStats;
use crate::wire::bytes::{be16, be32, be64};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::extension_headers::{self, Walk};
use crate::wire::flow_key::FlowKey;
use crate::wire::icmp_error::IcmpError;

/// A frame's content; the buffer was advanced to its first byte and truncated to its last.
pub(crate) enum Inbound {
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
    Trouble {
        src: IpAddr,
        dst: IpAddr,
        error: IcmpError,
        group: bool,
    },
}

/// Nothing follows the IPv6 header (RFC 8200 section 4.7).
pub(crate) const NO_NEXT_HEADER: u8 = 59;

/// What of the link layer the check needs.
pub(crate) struct Link {
    pub mac: [u8; 6],
    pub vlan: Option<u16>,
}

/// The flow that a plain TCP segment belongs to, from its addresses and ports alone: nothing is
/// checked. `None`: something else, or options before TCP. `tagged`: frames have a VLAN tag here.
#[inline]
pub(crate) fn flow(h: &[u8], tagged: bool) -> Option<FlowKey> {
    let l2 = if tagged { 18 } else { 14 };
    if h.len() < l2 + 24 || tagged && be16(h, 12) != 0x8100 {
        return None;
    }
    let ip = &h[l2..];
    match be16(h, l2 - 2) {
        0x0800 if ip[0] == 0x45 && ip[9] == 6 => {
            let (src, dst) = (be32(ip, 12), be32(ip, 16));
            Some(FlowKey::v4(dst, src, be16(ip, 22), be16(ip, 20)))
        }
        0x86dd if ip.len() >= 44 && ip[6] == 6 => {
            let src = [be64(ip, 8), be64(ip, 16)];
            let dst = [be64(ip, 24), be64(ip, 32)];
            Some(FlowKey::v6(dst, src, be16(ip, 42), be16(ip, 40)))
        }
        _ => None,
    }
}

/// Classifies and strips; `None`: dropped and counted. `src_mac` is left for the answers.
#[inline]
pub(crate) fn classify<B: RecvBuf>(
    link: &Link,
    b: &mut B,
    checksum: RxChecksum,
    src_mac: &mut [u8; 6],
    stats: &mut StackStats,
) -> Option<Inbound> {
    let h = b.chunk();
    if h.len() < 14 {
        stats.in_errs += 1;
        return None;
    }
    if h[..6] != link.mac && h[0] & 1 == 0 {
        stats.not_for_us += 1;
        return None;
    }
    // A group sends nothing (IEEE 802.3 clause 3.2.3); answers would go to all of it.
    if h[6] & 1 != 0 {
        stats.martians += 1;
        return None;
    }
    src_mac.copy_from_slice(&h[6..12]);
    let mut ethertype = be16(h, 12);
    let mut l2 = 14;
    let mut vlan = 0;
    if ethertype == 0x8100 {
        if h.len() < 18 {
            stats.in_errs += 1;
            return None;
        }
        vlan = be16(h, 14) & 0xfff;
        ethertype = be16(h, 16);
        l2 = 18;
    }
    // A priority tag (VLAN 0) is as good as none.
    if vlan != link.vlan.unwrap_or(0) {
        stats.not_for_us += 1;
        return None;
    }
    let multicast = h[0] & 1 != 0;
    match ethertype {
        0x0800 => ipv4(b, l2, checksum, multicast, stats),
        0x86dd => ipv6(b, l2, checksum, multicast, stats),
        0x0806 => {
            b.advance(l2);
            Some(Inbound::Arp)
        }
        _ => {
            stats.not_for_us += 1;
            None
        }
    }
}

#[inline]
fn ipv4<B: RecvBuf>(
    b: &mut B,
    l2: usize,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<Inbound> {
    let ip = &b.chunk()[l2..];
    if ip.len() < 20 || ip[0] >> 4 != 4 {
        stats.in_errs += 1;
        return None;
    }
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(be16(ip, 2));
    if header < 20 || total < header || ip.len() < header || b.remaining() - l2 < total {
        stats.in_errs += 1;
        return None;
    }
    if checksum != RxChecksum::Good {
        let mut s = OnesComplementSum::new();
        s.add(&ip[..header]);
        if checksum == RxChecksum::Bad || s.value() != 0xffff {
            stats.csum_errors += 1;
            return None;
        }
    }
    // More fragments, or an offset.
    if be16(ip, 6) & 0x3fff != 0 {
        return fragment4(b, l2, total, multicast, stats);
    }
    let (src, dst) = (be32(ip, 12), be32(ip, 16));
    let ce = ip[1] & 3 == 3;
    match ip[9] {
        6 => {
            let ports = ip.get(header..header + 4)?;
            let key = FlowKey::v4(dst, src, be16(ports, 2), be16(ports, 0));
            if multicast {
                stats.martians += 1;
                return None;
            }
            b.truncate(l2 + total);
            b.advance(l2 + header);
            if checksum == RxChecksum::Unknown {
                let mut s = OnesComplementSum::new();
                for w in [src, dst] {
                    s.add_word((w >> 16) as u16);
                    s.add_word(w as u16);
                }
                tcp_checksum(s, b, stats)?;
            }
            Some(Inbound::Tcp { key, ce })
        }
        1 => {
            b.truncate(l2 + total);
            b.advance(l2 + header);
            Some(Inbound::Icmpv4 {
                src: src.into(),
                dst: dst.into(),
            })
        }
        _ => {
            stats.unknown_protocols += 1;
            b.truncate(l2 + total);
            b.advance(l2);
            let (src, dst): (Ipv4Addr, Ipv4Addr) = (src.into(), dst.into());
            (!multicast).then_some(Inbound::Trouble {
                src: src.into(),
                dst: dst.into(),
                error: IcmpError::PROTOCOL,
                group: false,
            })
        }
    }
}

#[cold]
fn fragment4<B: RecvBuf>(
    b: &mut B,
    l2: usize,
    total: usize,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<Inbound> {
    if multicast {
        stats.not_for_us += 1;
        return None;
    }
    b.truncate(l2 + total);
    b.advance(l2);
    Some(Inbound::Fragment { header: None })
}

#[inline]
fn ipv6<B: RecvBuf>(
    b: &mut B,
    l2: usize,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut StackStats,
) -> Option<Inbound> {
    let ip = &b.chunk()[l2..];
    if ip.len() < 40 || ip[0] >> 4 != 6 {
        stats.in_errs += 1;
        return None;
    }
    let len = usize::from(be16(ip, 4));
    if b.remaining() - l2 < 40 + len {
        stats.in_errs += 1;
        return None;
    }
    if checksum == RxChecksum::Bad {
        stats.csum_errors += 1;
        return None;
    }
    let packet = Packet {
        src: [be64(ip, 8), be64(ip, 16)],
        dst: [be64(ip, 24), be64(ip, 32)],
        hop_limit: ip[7],
        ce: ip[1] >> 4 & 3 == 3,
        checksum,
        multicast,
    };
    match ip[6] {
        6 => tcp6(b, &packet, l2, (40, len), stats),
        next => {
            b.truncate(l2 + 40 + len);
            b.advance(l2);
            other6(b, &packet, next, stats)
        }
    }
}

/// What is asked of an IPv6 header, and of the frame.
struct Packet {
    src: [u64; 2],
    dst: [u64; 2],
    hop_limit: u8,
    ce: bool,
    checksum: RxChecksum,
    multicast: bool,
}

impl Packet {
    fn addresses(&self) -> (Ipv6Addr, Ipv6Addr) {
        let addr = |a: [u64; 2]| Ipv6Addr::from_bits(u128::from(a[0]) << 64 | u128::from(a[1]));
        (addr(self.src), addr(self.dst))
    }
}

/// TCP behind `at` bytes of IPv6 headers, `len` bytes long.
#[inline(always)]
fn tcp6<B: RecvBuf>(
    b: &mut B,
    p: &Packet,
    l2: usize,
    (at, len): (usize, usize),
    stats: &mut StackStats,
) -> Option<Inbound> {
    let ports = b.chunk().get(l2 + at..l2 + at + 4)?;
    let key = FlowKey::v6(p.dst, p.src, be16(ports, 2), be16(ports, 0));
    if p.multicast {
        stats.martians += 1;
        return None;
    }
    b.truncate(l2 + at + len);
    b.advance(l2 + at);
    if p.checksum == RxChecksum::Unknown {
        let mut s = OnesComplementSum::new();
        for w in [p.src[0], p.src[1], p.dst[0], p.dst[1]] {
            for shift in [48, 32, 16, 0] {
                s.add_word((w >> shift) as u16);
            }
        }
        tcp_checksum(s, b, stats)?;
    }
    Some(Inbound::Tcp { key, ce: p.ce })
}

/// Not TCP, or not at once; `b` is the packet.
#[cold]
fn other6<B: RecvBuf>(b: &mut B, p: &Packet, next: u8, stats: &mut StackStats) -> Option<Inbound> {
    let (src, dst) = p.addresses();
    let trouble = |error, group| Inbound::Trouble {
        src: src.into(),
        dst: dst.into(),
        error,
        group,
    };
    let packet = b.chunk();
    let mut hop_limit = p.hop_limit;
    let mut walk = extension_headers::walk(packet, next, 40, extension_headers::NEXT);
    if let Walk::At {
        next: extension_headers::FRAGMENT,
        at,
        ..
    } = walk
    {
        let Some(header) = packet.get(at..at + 8) else {
            stats.header_errors += 1;
            return None;
        };
        if !extension_headers::atomic(header) {
            stats.not_for_us += u64::from(p.multicast);
            return (!p.multicast).then_some(Inbound::Fragment { header: Some(at) });
        }
        // Whole in itself, whatever else has its number (RFC 6946); but no neighbour discovery (RFC
        // 6980), which wants 255 hops.
        hop_limit = 0;
        walk = extension_headers::walk(packet, header[0], at + 8, at);
    }
    match walk {
        Walk::At { next: 6, at, .. } => {
            let len = b.remaining() - at;
            tcp6(b, p, 0, (at, len), stats)
        }
        Walk::At {
            next: extension_headers::ICMPV6,
            at,
            ..
        } => {
            b.advance(at);
            Some(Inbound::Icmpv6 {
                src,
                dst,
                hop_limit,
            })
        }
        Walk::At { next, named, .. } => {
            stats.unknown_protocols += 1;
            (!p.multicast && next != NO_NEXT_HEADER)
                .then(|| trouble(IcmpError::parameter(1, named), false))
        }
        Walk::Drop => {
            stats.header_errors += 1;
            None
        }
        Walk::Tell { error, group } => {
            stats.header_errors += 1;
            let may = (group || !p.multicast)
                && !extension_headers::errs(packet, packet[extension_headers::NEXT], 40);
            may.then(|| trouble(error, group))
        }
    }
}

/// The checksum of a segment that was put together.
pub(crate) fn segment_checksum<B: RecvBuf>(
    key: &FlowKey,
    b: &B,
    stats: &mut StackStats,
) -> Option<()> {
    let mut s = OnesComplementSum::new();
    for a in [key.local().ip(), key.remote().ip()] {
        match a {
            IpAddr::V4(a) => s.add(&a.octets()),
            IpAddr::V6(a) => s.add(&a.octets()),
        }
    }
    tcp_checksum(s, b, stats)
}

fn tcp_checksum<B: RecvBuf>(mut s: OnesComplementSum, b: &B, stats: &mut StackStats) -> Option<()> {
    s.add_word(6);
    s.add_word(b.remaining() as u16);
    b.chunks().for_each(|c| s.add(c));
    if s.value() != 0xffff {
        stats.csum_errors += 1;
        return None;
    }
    Some(())
}

/// An address that a TCP peer can have (RFC 1122 section 3.2.1.3, RFC 4291).
pub(crate) fn peer_address(a: IpAddr) -> bool {
    match a {
        IpAddr::V4(a) => {
            let never = a.is_broadcast() || a.is_multicast() || a.is_loopback();
            !(never || a.octets()[0] == 0)
        }
        IpAddr::V6(a) => !(a.is_unspecified() || a.is_multicast() || a.is_loopback()),
    }
}
