//! Property tests of this crate's wire code against smoltcp's independently written wire types: Ethernet,
//! VLAN and IP headers in front of TCP ([`classify_frame`]). The fast path reads frames as all checks do.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, Ipv6Packet, TcpPacket,
};

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::buffer::{RecvBuf, VecBuf};
use crate::frame_info::RxChecksum;
use crate::stats::NetStats;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{FrameContent, FrameHead, FrameOrigin, LinkIdentity, classify_frame};

/// The Ethernet address of the stack under test.
const OWN_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
/// The Ethernet address of its peer.
const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
/// EtherType of a frame with a VLAN tag (IEEE 802.1Q), which smoltcp does not parse.
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERNET_HEADER: usize = 14;

/// Generates two addresses of one family.
fn address_pairs() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<(u32, u32)>().prop_map(|(source, destination)| (
            Ipv4Addr::from_bits(source).into(),
            Ipv4Addr::from_bits(destination).into()
        )),
        any::<(u128, u128)>().prop_map(|(source, destination)| (
            Ipv6Addr::from_bits(source).into(),
            Ipv6Addr::from_bits(destination).into()
        )),
    ]
}

/// Generates no VLAN tag, or one with this identifier.
fn vlan_tags() -> impl Strategy<Value = Option<u16>> {
    proptest::option::of(1..4095u16)
}

/// Builds a frame from `source` with an Ethernet header by smoltcp, and with a VLAN tag if requested.
fn ethernet_frame(
    source: [u8; 6],
    destination: [u8; 6],
    vlan: Option<u16>,
    protocol: EthernetProtocol,
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = vec![0; ETHERNET_HEADER + body.len()];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes);
    frame.set_src_addr(EthernetAddress(source));
    frame.set_dst_addr(EthernetAddress(destination));
    frame.set_ethertype(protocol);
    frame.payload_mut().copy_from_slice(body);
    if let Some(identifier) = vlan {
        let mut tag = ETHERTYPE_VLAN.to_be_bytes().to_vec();
        tag.extend(identifier.to_be_bytes());
        bytes.splice(12..12, tag);
    }
    bytes
}

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const ECN_CE: u8 = 3;

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
    let mut stats = NetStats::default();
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

/// The head of a frame, if the frame is plain.
fn plain_head(link: &LinkIdentity, frame: &VecBuf, checksum: RxChecksum) -> Option<FrameHead> {
    FrameHead::read(link, frame, checksum).filter(FrameHead::is_plain)
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
        let link = LinkIdentity { mac: OWN_MAC, vlan: frame.vlan };
        let ahead = FrameHead::read(&link, &VecBuf::from(bytes.clone()), RxChecksum::Unknown);
        let classified = classify_tcp(&bytes, frame.vlan);
        if let (Some(ahead), Some((key, _, _))) = (ahead, classified) {
            prop_assert_eq!(ahead.key, key);
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
            prop_assert!(plain_head(&link, &whole, checksum).is_none());
        }
        let (mut checked, mut origin) = (whole.clone(), FrameOrigin::default());
        let mut stats = NetStats::default();
        let content =
            classify_frame(&link, &mut checked, RxChecksum::Good, &mut origin, &mut stats);
        if let Some(head) = plain_head(&link, &whole, RxChecksum::Good) {
            let (mut plain, mut plain_origin) = (whole, FrameOrigin::default());
            head.strip(&mut plain, &mut plain_origin);
            let Some(FrameContent::Tcp { key, ce }) = content else {
                return Err(TestCaseError::fail("not TCP for all checks"));
            };
            prop_assert_eq!((head.key, head.ce), (key, ce));
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
}
