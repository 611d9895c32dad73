//! Classifies received frames: checks Ethernet, VLAN and IP headers in place and identifies the content.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::buffer::RecvBuf;
use crate::frame_info::RxChecksum;
use crate::stats::NetStats;
use crate::wire::bytes::{read_u16, read_u32, read_u64};
use crate::wire::checksum::OnesComplementSum;
use crate::wire::constants::{
    CHECKSUM_RIGHT, ECN_CE, ETHERNET_HEADER_LEN, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6,
    ETHERTYPE_VLAN, IPV4_FRAGMENT_MASK, IPV4_HEADER_LEN, IPV4_PLAIN_FIRST_BYTE, IPV6_HEADER_LEN,
    PROTOCOL_ICMP, PROTOCOL_ICMPV6, PROTOCOL_TCP, TAGGED_HEADER_LEN, TCP_HEADER_LEN, VLAN_ID_MASK,
};
use crate::wire::extension_headers::{self, WalkEnd};
use crate::wire::flow_key::FlowKey;
use crate::wire::icmp_error::IcmpError;

/// Options of an IPv4 header (RFC 791 section 3.1).
const IPV4_OPTION_END: u8 = 0;
const IPV4_OPTION_NOP: u8 = 1;
const IPV4_LOOSE_SOURCE_ROUTE: u8 = 131;
const IPV4_STRICT_SOURCE_ROUTE: u8 = 137;

/// Returns whether an Ethernet address is unicast and not all zeros.
pub fn is_unicast_mac(mac: [u8; 6]) -> bool {
    mac[0] & 1 == 0 && mac != [0; 6]
}

/// Content of a frame. The buffer was advanced to its first byte and truncated to its last.
pub enum FrameContent {
    /// A TCP segment with a correct checksum.
    Tcp {
        /// The flow.
        key: FlowKey,
        /// The IP header is marked Congestion Experienced (RFC 3168 section 5).
        ce: bool,
    },
    /// An ARP packet.
    Arp,
    /// A frame to our station or to a group that concerns nothing here: a protocol other than IP and ARP, a
    /// fragment to a group, or no protocol at all. The buffer begins with Ethernet's payload.
    Unclaimed,
    /// A packet to a group, of a protocol that is never answered; the buffer begins with the IP header.
    Group {
        /// Source address.
        src: IpAddr,
        /// The group.
        dst: IpAddr,
    },
    /// An ICMPv4 message.
    Icmpv4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
    },
    /// An ICMPv6 message.
    Icmpv6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
        /// Hop limit; 0 if the message arrived in a fragment.
        hop_limit: u8,
    },
    /// An IP fragment that was not sent to a group; the buffer begins with the IP header.
    Fragment {
        /// Offset of the fragment header in an IPv6 packet.
        header: Option<usize>,
    },
    /// An IP packet that is answered with an ICMP error if its destination is our address or, with `group`,
    /// a group that we are a member of; the buffer begins with the IP header.
    Rejected {
        /// Source address.
        src: IpAddr,
        /// Destination address.
        dst: IpAddr,
        /// The answer.
        error: IcmpError,
        /// The destination is a group.
        group: bool,
    },
}

/// Source of a frame, and length of the headers stripped from its front.
#[derive(Clone, Copy, Default)]
pub struct FrameOrigin {
    /// The sender's Ethernet address, for answers.
    pub src_mac: [u8; 6],
    /// Bytes of headers stripped before the buffer's first byte; 0 for a reassembled datagram.
    pub stripped: u16,
}

/// The next header number for "no next header" (RFC 8200 section 4.7).
pub const NO_NEXT_HEADER: u8 = 59;

/// The Ethernet address and the VLAN of the device.
pub struct LinkIdentity {
    /// The Ethernet address.
    pub mac: [u8; 6],
    /// The identifier of the VLAN tag of all its frames.
    pub vlan: Option<u16>,
}

/// The headers of a plain frame: Ethernet, IPv4, TCP without options.
const PLAIN_HEADERS: usize = ETHERNET_HEADER_LEN + IPV4_HEADER_LEN + TCP_HEADER_LEN;

/// What one look at the headers of a TCP segment's frame tells, before its connection is known.
///
/// A plain frame is the most common kind: a valid TCP segment with a verified checksum in an unfragmented
/// IPv4 packet without options, to our station, without a VLAN tag. Its headers are not read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    /// The flow. Of a frame that is not plain, it is unchecked: good for a prefetch only.
    pub key: FlowKey,
    /// A plain frame is marked Congestion Experienced (RFC 3168 section 5).
    pub ce: bool,
    /// Length of a plain frame's Ethernet header and packet; 0: the frame is not plain.
    plain_end: u32,
}

impl FrameHead {
    /// Reads the head of a frame to a device with the identity `link`. `None`: not TCP, or TCP after IP
    /// options or extension headers.
    #[inline(always)]
    pub fn read<B: RecvBuf>(
        link: &LinkIdentity,
        buffer: &B,
        checksum: RxChecksum,
    ) -> Option<FrameHead> {
        // A slice of constant length needs no bounds check per read.
        let headers = buffer.chunk().first_chunk::<PLAIN_HEADERS>()?;
        let is_plain_tcp = read_u16(headers, 12) == ETHERTYPE_IPV4
            && headers[14] == IPV4_PLAIN_FIRST_BYTE
            && headers[23] == PROTOCOL_TCP;
        if !is_plain_tcp {
            return Self::read_other(link, buffer.chunk());
        }
        let end = ETHERNET_HEADER_LEN + usize::from(read_u16(headers, 16));
        let is_plain = checksum == RxChecksum::Good
            && headers[..6] == link.mac
            && link.vlan.is_none()
            && headers[6] & 1 == 0
            && read_u16(headers, 20) & IPV4_FRAGMENT_MASK == 0
            && end >= PLAIN_HEADERS
            && end <= buffer.remaining();
        Some(FrameHead {
            key: FlowKey::v4(
                read_u32(headers, 30),
                read_u32(headers, 26),
                read_u16(headers, 36),
                read_u16(headers, 34),
            ),
            ce: headers[15] & ECN_CE == ECN_CE,
            plain_end: if is_plain { end as u32 } else { 0 },
        })
    }

    /// Reads the flow of a frame with a VLAN tag or an IPv6 packet.
    #[inline]
    fn read_other(link: &LinkIdentity, frame: &[u8]) -> Option<FrameHead> {
        let mut l2 = ETHERNET_HEADER_LEN;
        if link.vlan.is_some() {
            if read_u16(frame, 12) != ETHERTYPE_VLAN {
                return None;
            }
            l2 = TAGGED_HEADER_LEN;
        }
        let ip = &frame[l2..];
        let key = match read_u16(frame, l2 - 2) {
            ETHERTYPE_IPV4 if ip[0] == IPV4_PLAIN_FIRST_BYTE && ip[9] == PROTOCOL_TCP => {
                let (src, dst) = (read_u32(ip, 12), read_u32(ip, 16));
                FlowKey::v4(dst, src, read_u16(ip, 22), read_u16(ip, 20))
            }
            ETHERTYPE_IPV6 if ip.len() >= IPV6_HEADER_LEN + 4 && ip[6] == PROTOCOL_TCP => {
                let src = [read_u64(ip, 8), read_u64(ip, 16)];
                let dst = [read_u64(ip, 24), read_u64(ip, 32)];
                FlowKey::v6(dst, src, read_u16(ip, 42), read_u16(ip, 40))
            }
            _ => return None,
        };
        Some(FrameHead {
            key,
            ce: false,
            plain_end: 0,
        })
    }

    /// Returns whether the frame is plain; any other has to pass [`classify_frame`].
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.plain_end != 0
    }

    /// Strips a plain frame to its TCP segment, and fills in `origin`.
    #[inline(always)]
    pub fn strip<B: RecvBuf>(&self, buffer: &mut B, origin: &mut FrameOrigin) {
        const STRIPPED: usize = ETHERNET_HEADER_LEN + IPV4_HEADER_LEN;
        if let Some(headers) = buffer.chunk().first_chunk::<PLAIN_HEADERS>() {
            origin.src_mac.copy_from_slice(&headers[6..12]);
        }
        origin.stripped = STRIPPED as u16;
        let end = self.plain_end as usize;
        if end < buffer.remaining() {
            buffer.truncate(end);
        }
        buffer.advance(STRIPPED);
    }
}

/// Checks the headers of a frame, strips them, and identifies the content. `None`: dropped and counted.
/// Fills in `origin`. For a [plain frame](FrameHead), [`FrameHead::strip`] is faster.
///
/// Why it is fast: headers are read where they are, each field once; `advance` and `truncate` only move
/// the ends of the buffer.
#[inline(never)]
pub fn classify_frame<B: RecvBuf>(
    link: &LinkIdentity,
    buffer: &mut B,
    checksum: RxChecksum,
    origin: &mut FrameOrigin,
    stats: &mut NetStats,
) -> Option<FrameContent> {
    let frame = buffer.chunk();
    if frame.len() < ETHERNET_HEADER_LEN {
        stats.in_errs += 1;
        return None;
    }
    if frame[..6] != link.mac && frame[0] & 1 == 0 {
        stats.not_for_us += 1;
        return None;
    }
    // A group address cannot be a source (IEEE 802.3 clause 3.2.3), and answers would go to the group.
    if frame[6] & 1 != 0 {
        stats.martians += 1;
        return None;
    }
    origin.src_mac.copy_from_slice(&frame[6..12]);
    let mut ethertype = read_u16(frame, 12);
    let mut l2 = ETHERNET_HEADER_LEN;
    let mut vlan = 0;
    if ethertype == ETHERTYPE_VLAN {
        if frame.len() < TAGGED_HEADER_LEN {
            stats.in_errs += 1;
            return None;
        }
        vlan = read_u16(frame, 14) & VLAN_ID_MASK;
        ethertype = read_u16(frame, 16);
        l2 = TAGGED_HEADER_LEN;
    }
    // VLAN 0 is a priority tag: the frame belongs to no VLAN (IEEE 802.1Q).
    if vlan != link.vlan.unwrap_or(0) {
        stats.not_for_us += 1;
        return None;
    }
    let multicast = frame[0] & 1 != 0;
    stats.group_frames_in += u64::from(multicast);
    origin.stripped = l2 as u16;
    match ethertype {
        ETHERTYPE_IPV4 => parse_ipv4(buffer, origin, checksum, multicast, stats),
        ETHERTYPE_IPV6 => parse_ipv6(buffer, origin, checksum, multicast, stats),
        ETHERTYPE_ARP => {
            buffer.advance(l2);
            Some(FrameContent::Arp)
        }
        _ => {
            stats.not_for_us += 1;
            buffer.advance(l2);
            Some(FrameContent::Unclaimed)
        }
    }
}

#[inline]
fn parse_ipv4<B: RecvBuf>(
    buffer: &mut B,
    origin: &mut FrameOrigin,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut NetStats,
) -> Option<FrameContent> {
    let l2 = usize::from(origin.stripped);
    let ip = &buffer.chunk()[l2..];
    if ip.len() < IPV4_HEADER_LEN || ip[0] >> 4 != 4 {
        stats.in_errs += 1;
        return None;
    }
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(read_u16(ip, 2));
    if header < IPV4_HEADER_LEN || total < header || ip.len() < header {
        stats.in_errs += 1;
        return None;
    }
    if buffer.remaining() - l2 < total {
        count_truncated(buffer, stats);
        return None;
    }
    if checksum != RxChecksum::Good {
        let mut sum = OnesComplementSum::new();
        sum.add(&ip[..header]);
        if checksum == RxChecksum::Bad || sum.value() != CHECKSUM_RIGHT {
            stats.csum_errors += 1;
            return None;
        }
    }
    if header > IPV4_HEADER_LEN {
        accept_ipv4_options(&ip[IPV4_HEADER_LEN..header], stats)?;
    }
    if read_u16(ip, 6) & IPV4_FRAGMENT_MASK != 0 {
        return accept_ipv4_fragment(buffer, l2, total, multicast, stats);
    }
    let (src, dst) = (read_u32(ip, 12), read_u32(ip, 16));
    let ce = ip[1] & ECN_CE == ECN_CE;
    match ip[9] {
        PROTOCOL_TCP => {
            let ports = ip.get(header..header + 4)?;
            let key = FlowKey::v4(dst, src, read_u16(ports, 2), read_u16(ports, 0));
            if multicast {
                stats.martians += 1;
                return None;
            }
            buffer.truncate(l2 + total);
            buffer.advance(l2 + header);
            origin.stripped = (l2 + header) as u16;
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
        PROTOCOL_ICMP => {
            buffer.truncate(l2 + total);
            buffer.advance(l2 + header);
            origin.stripped = (l2 + header) as u16;
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
            if multicast {
                let (src, dst) = (src.into(), dst.into());
                return Some(FrameContent::Group { src, dst });
            }
            Some(FrameContent::Rejected {
                src: src.into(),
                dst: dst.into(),
                error: IcmpError::PROTOCOL,
                group: false,
            })
        }
    }
}

/// Checks the options of an IPv4 header (RFC 791 section 3.1). `None`: the packet is dropped and
/// counted, because it is malformed or source-routed (RFC 6274 section 3.13.2.3); others are ignored.
#[cold]
fn accept_ipv4_options(mut options: &[u8], stats: &mut NetStats) -> Option<()> {
    loop {
        match *options {
            [] | [IPV4_OPTION_END, ..] => return Some(()),
            [IPV4_OPTION_NOP, ref rest @ ..] => options = rest,
            [IPV4_LOOSE_SOURCE_ROUTE | IPV4_STRICT_SOURCE_ROUTE, ..] => {
                stats.source_routed += 1;
                return None;
            }
            [_, len, ..] if len >= 2 && usize::from(len) <= options.len() => {
                options = &options[usize::from(len)..];
            }
            _ => {
                stats.header_errors += 1;
                return None;
            }
        }
    }
}

#[cold]
fn accept_ipv4_fragment<B: RecvBuf>(
    buffer: &mut B,
    l2: usize,
    total: usize,
    multicast: bool,
    stats: &mut NetStats,
) -> Option<FrameContent> {
    buffer.truncate(l2 + total);
    buffer.advance(l2);
    if multicast {
        stats.not_for_us += 1;
        return Some(FrameContent::Unclaimed);
    }
    Some(FrameContent::Fragment { header: None })
}

#[inline]
fn parse_ipv6<B: RecvBuf>(
    buffer: &mut B,
    origin: &mut FrameOrigin,
    checksum: RxChecksum,
    multicast: bool,
    stats: &mut NetStats,
) -> Option<FrameContent> {
    let l2 = usize::from(origin.stripped);
    let ip = &buffer.chunk()[l2..];
    if ip.len() < IPV6_HEADER_LEN || ip[0] >> 4 != 6 {
        stats.in_errs += 1;
        return None;
    }
    let len = usize::from(read_u16(ip, 4));
    if buffer.remaining() - l2 < IPV6_HEADER_LEN + len {
        count_truncated(buffer, stats);
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
        ce: ip[1] >> 4 & ECN_CE == ECN_CE,
        checksum,
        multicast,
    };
    match ip[6] {
        PROTOCOL_TCP => {
            origin.stripped = (l2 + IPV6_HEADER_LEN) as u16;
            accept_ipv6_tcp(buffer, &packet, l2, (IPV6_HEADER_LEN, len), stats)
        }
        next => {
            buffer.truncate(l2 + IPV6_HEADER_LEN + len);
            buffer.advance(l2);
            parse_beyond_ipv6(buffer, &packet, next, origin, stats)
        }
    }
}

/// Fields of an IPv6 header and its frame that are needed after stripping.
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

/// Accepts a TCP segment of `len` bytes after `at` bytes of IPv6 headers.
#[inline(always)]
fn accept_ipv6_tcp<B: RecvBuf>(
    buffer: &mut B,
    fields: &Ipv6Fields,
    l2: usize,
    (at, len): (usize, usize),
    stats: &mut NetStats,
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

/// Processes an IPv6 packet whose first next header is not TCP; the buffer begins with the IPv6 header.
#[cold]
fn parse_beyond_ipv6<B: RecvBuf>(
    buffer: &mut B,
    fields: &Ipv6Fields,
    next: u8,
    origin: &mut FrameOrigin,
    stats: &mut NetStats,
) -> Option<FrameContent> {
    let (src, dst) = fields.address_pair();
    let reject = |error, group| FrameContent::Rejected {
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
        IPV6_HEADER_LEN,
        extension_headers::NEXT_HEADER_OFFSET,
    );
    if let WalkEnd::Reached {
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
            if fields.multicast {
                stats.not_for_us += 1;
                return Some(FrameContent::Unclaimed);
            }
            return Some(FrameContent::Fragment { header: Some(at) });
        }
        // An atomic fragment is a complete datagram, even if other fragments have its identification (RFC
        // 6946). It may not carry neighbour discovery (RFC 6980), which requires a hop limit of 255.
        hop_limit = 0;
        walk = extension_headers::walk_extension_headers(packet, header[0], at + 8, at);
    }
    match walk {
        WalkEnd::Reached {
            next: PROTOCOL_TCP,
            at,
            ..
        } => {
            let len = buffer.remaining() - at;
            origin.stripped += at as u16;
            accept_ipv6_tcp(buffer, fields, 0, (at, len), stats)
        }
        WalkEnd::Reached {
            next: PROTOCOL_ICMPV6,
            at,
            ..
        } => {
            buffer.advance(at);
            origin.stripped += at as u16;
            Some(FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            })
        }
        WalkEnd::Reached { next, named, .. } => {
            stats.unknown_protocols += 1;
            if fields.multicast {
                let (src, dst) = (src.into(), dst.into());
                return Some(FrameContent::Group { src, dst });
            }
            if next == NO_NEXT_HEADER {
                return Some(FrameContent::Unclaimed);
            }
            Some(reject(IcmpError::parameter_problem(1, named), false))
        }
        WalkEnd::Discard => {
            stats.header_errors += 1;
            None
        }
        WalkEnd::Report { error, group } => {
            stats.header_errors += 1;
            let may_report = (group || !fields.multicast)
                && !extension_headers::carries_icmp_error(
                    packet,
                    packet[extension_headers::NEXT_HEADER_OFFSET],
                    IPV6_HEADER_LEN,
                );
            may_report.then(|| reject(error, group))
        }
    }
}

/// Offset of the checksum in a TCP header (RFC 9293 section 3.1).
const TCP_CHECKSUM_AT: usize = 16;

/// A frame of at least this many bytes that is shorter than its IP packet was cut to the port's room: the
/// packet was merged by GRO, or should have been cut by TSO.
const SHORTEST_CUT: usize = 1500;

/// Counts a frame that is shorter than its IP packet.
#[cold]
fn count_truncated<B: RecvBuf>(buffer: &B, stats: &mut NetStats) {
    if buffer.remaining() >= SHORTEST_CUT {
        stats.offloaded_segments += 1;
    } else {
        stats.in_errs += 1;
    }
}

/// Verifies the TCP checksum of a segment from a reassembled datagram. `None`: wrong, and counted.
pub fn verify_segment_checksum<B: RecvBuf>(
    key: &FlowKey,
    buffer: &B,
    stats: &mut NetStats,
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

/// Verifies a TCP checksum; `sum` is the sum of the addresses.
fn verify_tcp_checksum<B: RecvBuf>(
    mut sum: OnesComplementSum,
    buffer: &B,
    stats: &mut NetStats,
) -> Option<()> {
    sum.add_word(PROTOCOL_TCP.into());
    sum.add_word(buffer.remaining() as u16);
    let pseudo = sum.value();
    buffer.chunks().for_each(|chunk| sum.add(chunk));
    if sum.value() != CHECKSUM_RIGHT {
        let field = buffer.chunk().get(TCP_CHECKSUM_AT..TCP_CHECKSUM_AT + 2);
        stats.count_wrong_checksum(field.map_or(0, |field| read_u16(field, 0)), pseudo);
        return None;
    }
    Some(())
}

/// Returns whether a TCP peer can have this address (RFC 1122 section 3.2.1.3, RFC 4291).
pub fn is_peer_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let reserved =
                address.is_broadcast() || address.is_multicast() || address.is_loopback();
            !(reserved || address.octets()[0] == 0)
        }
        IpAddr::V6(address) => {
            !(address.is_unspecified() || address.is_multicast() || address.is_loopback())
        }
    }
}
