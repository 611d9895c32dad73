//! Ethernet, VLAN and IP headers in front of TCP: [`classify_frame`].

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use smoltcp::wire::{
    EthernetProtocol, IpAddress, IpProtocol, Ipv4Packet, Ipv6FragmentHeader, Ipv6Packet, TcpPacket,
    checksum as smoltcp_checksum,
};

use super::{
    ETHERNET_HEADER, ETHERTYPE_VLAN, OWN_MAC, PEER_MAC, VLAN_TAG, address_pairs, ethernet_frame,
    vlan_tags,
};
use core::net::IpAddr;

use crate::base::buffer::{RecvBuf, VecBuf};
use crate::base::frame_info::RxChecksum;
use crate::base::stats::StackStats;
use crate::wire::extension_headers;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{
    FrameContent, FrameOrigin, LinkIdentity, classify_frame, peek_flow, plain_frame_end,
    strip_plain_frame,
};

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const IP_PROTOCOL_TCP: u8 = 6;
const ECN_CE: u8 = 3;
/// EtherTypes.
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// A TCP segment in an Ethernet frame.
#[derive(Clone, Debug)]
struct TcpFrame {
    source: IpAddr,
    destination: IpAddr,
    ports: (u16, u16),
    vlan: Option<u16>,
    ecn: u8,
    bytes: Vec<u8>,
    /// The TCP header and its payload.
    segment: Vec<u8>,
}

/// Generates frames built by smoltcp, with IPv4 options and padding after the packet.
fn smoltcp_frames() -> impl Strategy<Value = TcpFrame> {
    (
        address_pairs(),
        any::<(u16, u16)>(),
        vlan_tags(),
        0..=3u8,
        vec(any::<u8>(), 0..100),
        0..=10usize,
        0..20usize,
    )
        .prop_map(
            |(addresses, ports, vlan, ecn, payload, option_words, padding)| {
                let (source, destination) = addresses;
                let segment = tcp_segment(source, destination, ports, &payload);
                let (protocol, mut packet) = match (source, destination) {
                    (IpAddr::V4(source), IpAddr::V4(destination)) => {
                        let header = IPV4_HEADER + 4 * option_words;
                        let mut bytes = vec![0; header + segment.len()];
                        // Options are NOPs, which fit any length.
                        bytes[IPV4_HEADER..header].fill(1);
                        bytes[header..].copy_from_slice(&segment);
                        let total = bytes.len() as u16;
                        let mut ip = Ipv4Packet::new_unchecked(&mut bytes);
                        ip.set_version(4);
                        ip.set_header_len(header as u8);
                        ip.set_total_len(total);
                        ip.set_ecn(ecn);
                        ip.set_hop_limit(7);
                        ip.set_next_header(IpProtocol::Tcp);
                        ip.set_src_addr(source);
                        ip.set_dst_addr(destination);
                        ip.fill_checksum();
                        (EthernetProtocol::Ipv4, bytes)
                    }
                    (IpAddr::V6(source), IpAddr::V6(destination)) => {
                        let mut bytes = vec![0; IPV6_HEADER];
                        bytes.extend(&segment);
                        let mut ip = Ipv6Packet::new_unchecked(&mut bytes);
                        ip.set_version(6);
                        ip.set_traffic_class(ecn);
                        ip.set_payload_len(segment.len() as u16);
                        ip.set_hop_limit(7);
                        ip.set_next_header(IpProtocol::Tcp);
                        ip.set_src_addr(source);
                        ip.set_dst_addr(destination);
                        (EthernetProtocol::Ipv6, bytes)
                    }
                    _ => unreachable!("both are of one family"),
                };
                packet.resize(packet.len() + padding, 0);
                TcpFrame {
                    source,
                    destination,
                    ports,
                    vlan,
                    ecn,
                    bytes: ethernet_frame(PEER_MAC, OWN_MAC, vlan, protocol, &packet),
                    segment,
                }
            },
        )
}

/// Builds a TCP header with its checksum, and a payload.
fn tcp_segment(source: IpAddr, destination: IpAddr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 20];
    bytes.extend(payload);
    let mut tcp = TcpPacket::new_unchecked(&mut bytes);
    tcp.set_src_port(ports.0);
    tcp.set_dst_port(ports.1);
    tcp.set_header_len(20);
    tcp.set_ack(true);
    tcp.fill_checksum(&source.into(), &destination.into());
    bytes
}

/// Classifies a frame with [`classify_frame`]. For TCP, returns the four-tuple, whether it is marked
/// Congestion Experienced, and the bytes from the TCP header on.
fn classify_tcp(bytes: &[u8], vlan: Option<u16>) -> Option<(FlowKey, bool, Vec<u8>)> {
    let link = LinkIdentity { mac: OWN_MAC, vlan };
    let mut buffer = VecBuf::from(bytes.to_vec());
    let mut origin = FrameOrigin::default();
    let mut stats = StackStats::default();
    match classify_frame(
        &link,
        &mut buffer,
        RxChecksum::Unknown,
        &mut origin,
        &mut stats,
    )? {
        FrameContent::Tcp { key, ce } => Some((key, ce, buffer.chunk().to_vec())),
        _ => None,
    }
}

/// Classifies a frame with smoltcp's types. `None`: not TCP, or not acceptable. In addition to smoltcp's
/// checks, this crate rejects frames from a group address and TCP segments sent to one.
fn smoltcp_tcp(bytes: &[u8], vlan: Option<u16>) -> Option<(FlowKey, bool, Vec<u8>)> {
    if bytes.len() < ETHERNET_HEADER {
        return None;
    }
    let (destination, source) = (&bytes[..6], &bytes[6..12]);
    if destination != OWN_MAC || source[0] & 1 != 0 {
        return None;
    }
    let mut header = ETHERNET_HEADER;
    let mut identifier = 0;
    let word = |at: usize| {
        bytes
            .get(at..at + 2)
            .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    if word(12)? == ETHERTYPE_VLAN {
        identifier = word(14)? & 0xfff;
        header += VLAN_TAG;
    }
    if identifier != vlan.unwrap_or(0) {
        return None;
    }
    let packet = bytes.get(header..)?;
    let (source, destination, ecn, tcp): (IpAddress, IpAddress, _, _) = match word(header - 2)? {
        IPV4 => {
            let ip = Ipv4Packet::new_checked(packet).ok()?;
            let whole = !ip.more_frags() && ip.frag_offset() == 0;
            let acceptable = ip.version() == 4 && ip.verify_checksum() && whole;
            if !acceptable || ip.next_header() != IpProtocol::Tcp {
                return None;
            }
            (
                ip.src_addr().into(),
                ip.dst_addr().into(),
                ip.ecn(),
                ip.payload(),
            )
        }
        IPV6 => {
            let ip = Ipv6Packet::new_checked(packet).ok()?;
            if ip.version() != 6 || ip.next_header() != IpProtocol::Tcp {
                return None;
            }
            let ecn = ip.traffic_class() & ECN_CE;
            (
                ip.src_addr().into(),
                ip.dst_addr().into(),
                ecn,
                ip.payload(),
            )
        }
        _ => return None,
    };
    // Only the ports are read here; the rest of the TCP header is checked when the segment is parsed.
    let ports = tcp.get(..4)?;
    let sum = smoltcp_checksum::combine(&[
        smoltcp_checksum::pseudo_header(&source, &destination, IpProtocol::Tcp, tcp.len() as u32),
        smoltcp_checksum::data(tcp),
    ]);
    let port = |at: usize| u16::from_be_bytes([ports[at], ports[at + 1]]);
    let key = FlowKey::new(destination.into(), port(2), source.into(), port(0))?;
    (sum == 0xffff).then(|| (key, ecn == ECN_CE, tcp.to_vec()))
}

/// Corrects the checksums of a packet, so that its other errors matter.
fn repair_checksums(packet: &mut [u8]) {
    match packet[0] >> 4 {
        4 => {
            if let Ok(mut ip) = Ipv4Packet::new_checked(packet) {
                ip.fill_checksum();
                let (source, destination) = (ip.src_addr().into(), ip.dst_addr().into());
                if let Ok(mut tcp) = TcpPacket::new_checked(ip.payload_mut()) {
                    tcp.fill_checksum(&source, &destination);
                }
            }
        }
        6 => {
            if let Ok(mut ip) = Ipv6Packet::new_checked(packet) {
                let (source, destination) = (ip.src_addr().into(), ip.dst_addr().into());
                if let Ok(mut tcp) = TcpPacket::new_checked(ip.payload_mut()) {
                    tcp.fill_checksum(&source, &destination);
                }
            }
        }
        _ => {}
    }
}

proptest! {
    #[test]
    fn frames_of_smoltcp_are_classified_as_tcp(frame in smoltcp_frames()) {
        let TcpFrame { source, destination, ports, vlan, .. } = frame;
        let key = FlowKey::new(destination, ports.1, source, ports.0).expect("one family");
        let congestion_experienced = frame.ecn == ECN_CE;
        let expected = Some((key, congestion_experienced, frame.segment.clone()));
        prop_assert_eq!(classify_tcp(&frame.bytes, vlan), expected);
    }

    #[test]
    fn changed_frames_are_accepted_as_in_smoltcp(
        frame in smoltcp_frames(),
        changes in vec((0..80usize, any::<u8>()), 0..4),
        cut in option::weighted(0.2, 0..160usize),
        repair in any::<bool>(),
    ) {
        let mut bytes = frame.bytes.clone();
        for (at, mask) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= mask;
            }
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let ip = ETHERNET_HEADER + if frame.vlan.is_some() { VLAN_TAG } else { 0 };
        if repair && bytes.len() > ip {
            repair_checksums(&mut bytes[ip..]);
        }
        // TCP behind IPv6 extension headers has its own test; smoltcp does not walk them.
        let extended = bytes
            .get(ip + 6)
            .is_some_and(|next| frame.source.is_ipv6() && *next != IP_PROTOCOL_TCP);
        // So have IPv4 options, which smoltcp does not parse.
        let has_options = bytes
            .get(ip)
            .is_some_and(|first| frame.source.is_ipv4() && first & 15 > 5);
        prop_assume!(!extended && !has_options);
        prop_assert_eq!(classify_tcp(&bytes, frame.vlan), smoltcp_tcp(&bytes, frame.vlan));
    }

    #[test]
    fn the_flow_read_ahead_is_the_one_classified(
        frame in smoltcp_frames(),
        changes in vec((0..60usize, any::<u8>()), 0..2),
    ) {
        let mut bytes = frame.bytes.clone();
        for (at, mask) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= mask;
            }
        }
        let ahead = peek_flow(&bytes, frame.vlan.is_some());
        let classified = classify_tcp(&bytes, frame.vlan);
        if let (Some(ahead), Some((key, _, _))) = (ahead, classified) {
            prop_assert_eq!(ahead, key);
        }
    }

    #[test]
    fn plain_frames_are_what_all_checks_make_of_them(
        frame in smoltcp_frames(),
        changes in vec((0..60usize, any::<u8>()), 0..3),
        cut in option::weighted(0.2, 0..160usize),
    ) {
        let mut bytes = frame.bytes.clone();
        for (at, mask) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= mask;
            }
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let link = LinkIdentity { mac: OWN_MAC, vlan: frame.vlan };
        let whole = VecBuf::from(bytes);
        for checksum in [RxChecksum::Unknown, RxChecksum::Bad, RxChecksum::TcpGood] {
            prop_assert_eq!(plain_frame_end(&link, &whole, checksum), None);
        }
        let (mut checked, mut origin) = (whole.clone(), FrameOrigin::default());
        let mut stats = StackStats::default();
        let content =
            classify_frame(&link, &mut checked, RxChecksum::Good, &mut origin, &mut stats);
        if let Some(end) = plain_frame_end(&link, &whole, RxChecksum::Good) {
            let (mut plain, mut plain_origin) = (whole, FrameOrigin::default());
            let stripped = strip_plain_frame(&mut plain, end, &mut plain_origin);
            let Some(FrameContent::Tcp { key, ce }) = content else {
                return Err(TestCaseError::fail("not TCP for all checks"));
            };
            prop_assert_eq!(stripped, (key, ce));
            prop_assert_eq!(plain.as_slice(), checked.as_slice());
            prop_assert_eq!(
                (plain_origin.src_mac, plain_origin.stripped),
                (origin.src_mac, origin.stripped)
            );
        } else if frame.source.is_ipv4() && frame.vlan.is_none() && checked.as_slice() == frame.segment {
            // An intact segment fails to be plain only because of IPv4 options.
            prop_assert!(usize::from(origin.stripped) > ETHERNET_HEADER + IPV4_HEADER);
        }
    }

    #[test]
    fn atomic_fragments_are_those_of_smoltcp(
        mut header in any::<[u8; 8]>(),
        begins in any::<bool>(),
    ) {
        // Only one random offset in 8192 is zero, the only value for which the flag matters.
        if begins {
            header[2] = 0;
            header[3] &= 7;
        }
        // smoltcp's view begins behind the next header and the first reserved byte.
        let by_smoltcp = Ipv6FragmentHeader::new_unchecked(&header[2..]);
        let whole = by_smoltcp.frag_offset() == 0 && !by_smoltcp.more_frags();
        prop_assert_eq!(extension_headers::is_atomic_fragment(&header), whole);
    }
}
