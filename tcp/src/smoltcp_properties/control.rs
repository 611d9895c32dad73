//! ARP, NDP and ICMP: the stack's answers to messages built by smoltcp, and its solicitations.

use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use proptest::collection::vec;
use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetProtocol, Icmpv4Message,
    Icmpv4Packet, Icmpv4Repr, Icmpv6Message, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv4Packet,
    Ipv4Repr, Ipv6Packet, Ipv6Repr, NdiscNeighborFlags, NdiscRepr,
};

use super::{OWN_MAC, PEER_MAC, ethernet_frame, open_ethernet, vlan_tags};
use crate::sim::append_payload;
use crate::{
    FrameInfo, FrameMeta, FrameSink, Instant, IpCidr, PayloadPiece, RxChecksum, Stack, StackConfig,
    VecBuf,
};

const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const NOW: Instant = Instant::from_millis(1_000_000);
const BROADCAST_MAC: [u8; 6] = [0xff; 6];
/// Hop limit of NDP (RFC 4861 section 7.1), which the stack uses for all IPv6 control messages.
const NDP_HOP_LIMIT: u8 = 255;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const ICMP_HEADER: usize = 8;

/// Collects whole frames.
#[derive(Default)]
struct Frames {
    complete: Vec<Vec<u8>>,
}

impl FrameSink<Vec<u8>> for Frames {
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        _meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, Vec<u8>>>,
    ) -> bool {
        let mut frame = vec![0; headers_len];
        fill(&mut frame);
        append_payload(&mut frame, payload);
        self.complete.push(frame);
        true
    }
}

/// Creates a stack with one address of each family, after it has announced itself.
fn stack(vlan: Option<u16>) -> Stack<VecBuf, Vec<u8>> {
    let addrs = vec![
        IpCidr::new(OWN_V4.into(), 24),
        IpCidr::new(OWN_V6.into(), 64),
    ];
    let mut config = StackConfig::new(OWN_MAC, addrs);
    config.vlan = vlan;
    let mut stack = Stack::new(config, NOW).expect("a good configuration");
    sent(&mut stack);
    stack
}

/// Polls the stack and returns the frames that it sends.
fn sent(stack: &mut Stack<VecBuf, Vec<u8>>) -> Vec<Vec<u8>> {
    let mut frames = Frames::default();
    stack.poll(NOW, &mut frames);
    frames.complete
}

/// Receives a frame and returns the frames that the stack sends in answer.
fn answers(stack: &mut Stack<VecBuf, Vec<u8>>, frame: Vec<u8>) -> Vec<Vec<u8>> {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    stack.receive_burst(NOW, [(VecBuf::from(frame), info)].into_iter());
    sent(stack)
}

/// Builds an IPv4 frame from the peer with this message.
fn ipv4_frame(vlan: Option<u16>, from: Ipv4Addr, protocol: IpProtocol, body: &[u8]) -> Vec<u8> {
    let repr = Ipv4Repr {
        src_addr: from,
        dst_addr: OWN_V4,
        next_header: protocol,
        payload_len: body.len(),
        hop_limit: 64,
    };
    let mut packet = vec![0; IPV4_HEADER];
    packet.extend(body);
    repr.emit(
        &mut Ipv4Packet::new_unchecked(&mut packet),
        &ChecksumCapabilities::default(),
    );
    ethernet_frame(PEER_MAC, OWN_MAC, vlan, EthernetProtocol::Ipv4, &packet)
}

/// Builds an IPv6 frame from the peer with this message.
fn ipv6_frame(
    vlan: Option<u16>,
    from: Ipv6Addr,
    to: Ipv6Addr,
    protocol: IpProtocol,
    body: &[u8],
) -> Vec<u8> {
    let repr = Ipv6Repr {
        src_addr: from,
        dst_addr: to,
        next_header: protocol,
        payload_len: body.len(),
        hop_limit: NDP_HOP_LIMIT,
    };
    let mut packet = vec![0; IPV6_HEADER];
    packet.extend(body);
    repr.emit(&mut Ipv6Packet::new_unchecked(&mut packet));
    ethernet_frame(PEER_MAC, OWN_MAC, vlan, EthernetProtocol::Ipv6, &packet)
}

/// Builds an ICMPv6 message with its checksum.
fn icmpv6_message(from: Ipv6Addr, to: Ipv6Addr, repr: &Icmpv6Repr<'_>) -> Vec<u8> {
    let mut message = vec![0; repr.buffer_len()];
    repr.emit(
        &from,
        &to,
        &mut Icmpv6Packet::new_unchecked(&mut message),
        &ChecksumCapabilities::default(),
    );
    message
}

/// Returns the only frame; panics unless there is exactly one.
fn single(frames: Vec<Vec<u8>>) -> Vec<u8> {
    let [frame] = <[Vec<u8>; 1]>::try_from(frames).expect("one frame");
    frame
}

/// Checks all headers of a frame from the stack to `to` and returns the ICMP message.
fn icmpv4_of(frame: &[u8], vlan: Option<u16>, to: Ipv4Addr) -> Vec<u8> {
    let (ethernet, packet) = open_ethernet(frame, vlan);
    assert_eq!(ethernet.ethertype(), EthernetProtocol::Ipv4);
    assert_eq!(
        (ethernet.src_addr().0, ethernet.dst_addr().0),
        (OWN_MAC, PEER_MAC)
    );
    let ip = Ipv4Packet::new_checked(packet).expect("an IPv4 packet");
    let repr = Ipv4Repr::parse(&ip, &ChecksumCapabilities::default()).expect("a good header");
    assert_eq!((repr.src_addr, repr.dst_addr), (OWN_V4, to));
    assert_eq!(repr.next_header, IpProtocol::Icmp);
    assert_eq!(usize::from(ip.total_len()), packet.len());
    ip.payload().to_vec()
}

/// Checks all headers of a frame between these addresses and returns the ICMPv6 message.
fn icmpv6_of(frame: &[u8], vlan: Option<u16>, from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let (ethernet, packet) = open_ethernet(frame, vlan);
    assert_eq!(ethernet.ethertype(), EthernetProtocol::Ipv6);
    assert_eq!(ethernet.src_addr().0, OWN_MAC);
    let ip = Ipv6Packet::new_checked(packet).expect("an IPv6 packet");
    assert_eq!((ip.src_addr(), ip.dst_addr()), (from, to));
    assert_eq!(
        (ip.next_header(), ip.hop_limit()),
        (IpProtocol::Icmpv6, NDP_HOP_LIMIT)
    );
    assert_eq!(ip.total_len(), packet.len());
    let message = Icmpv6Packet::new_checked(ip.payload()).expect("an ICMPv6 message");
    assert!(message.verify_checksum(&from, &to));
    ip.payload().to_vec()
}

/// Unicast addresses on the link of the stack that are not its own.
fn peers_v4() -> impl Strategy<Value = Ipv4Addr> {
    (2..=254u8).prop_map(|host| Ipv4Addr::new(10, 0, 0, host))
}

fn peers_v6() -> impl Strategy<Value = Ipv6Addr> {
    (2..=u64::MAX)
        .prop_map(|host| Ipv6Addr::from_bits(OWN_V6.to_bits() & !0xffff | u128::from(host)))
}

proptest! {
    #[test]
    fn arp_requests_are_answered(peer in peers_v4(), vlan in vlan_tags()) {
        let request = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: EthernetAddress(PEER_MAC),
            source_protocol_addr: peer,
            target_hardware_addr: EthernetAddress([0; 6]),
            target_protocol_addr: OWN_V4,
        };
        let mut packet = vec![0; request.buffer_len()];
        request.emit(&mut ArpPacket::new_unchecked(&mut packet));
        let frame =
            ethernet_frame(PEER_MAC, BROADCAST_MAC, vlan, EthernetProtocol::Arp, &packet);
        let answer = single(answers(&mut stack(vlan), frame));
        let (ethernet, packet) = open_ethernet(&answer, vlan);
        prop_assert_eq!(ethernet.ethertype(), EthernetProtocol::Arp);
        prop_assert_eq!((ethernet.src_addr().0, ethernet.dst_addr().0), (OWN_MAC, PEER_MAC));
        let reply = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Reply,
            source_hardware_addr: EthernetAddress(OWN_MAC),
            source_protocol_addr: OWN_V4,
            target_hardware_addr: EthernetAddress(PEER_MAC),
            target_protocol_addr: peer,
        };
        let parsed = ArpPacket::new_checked(packet).and_then(|packet| ArpRepr::parse(&packet));
        prop_assert_eq!(parsed, Ok(reply));
    }

    #[test]
    fn a_connect_asks_by_arp(peer in peers_v4(), vlan in vlan_tags()) {
        let mut stack = stack(vlan);
        stack.connect(NOW, None, None, SocketAddr::new(peer.into(), 9), 0).expect("a connection");
        let question = single(sent(&mut stack));
        let (ethernet, packet) = open_ethernet(&question, vlan);
        prop_assert_eq!(ethernet.dst_addr().0, BROADCAST_MAC);
        let request = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: EthernetAddress(OWN_MAC),
            source_protocol_addr: OWN_V4,
            target_hardware_addr: EthernetAddress([0; 6]),
            target_protocol_addr: peer,
        };
        let parsed = ArpPacket::new_checked(packet).and_then(|packet| ArpRepr::parse(&packet));
        prop_assert_eq!(parsed, Ok(request));
    }

    #[test]
    fn a_connect_asks_by_neighbour_solicitation(peer in peers_v6(), vlan in vlan_tags()) {
        let mut stack = stack(vlan);
        stack.connect(NOW, None, None, SocketAddr::new(peer.into(), 9), 0).expect("a connection");
        let question = single(sent(&mut stack));
        // RFC 4291 section 2.7.1: ff02::1:ff00:0/104 and the lowest 24 bits of the address; RFC 2464
        // section 7: 33:33 and its lowest 32 bits.
        let low = peer.octets();
        let prefix = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).to_bits();
        let group = Ipv6Addr::from_bits(prefix | peer.to_bits() & 0xff_ffff);
        let group_mac = [0x33, 0x33, 0xff, low[13], low[14], low[15]];
        prop_assert_eq!(open_ethernet(&question, vlan).0.dst_addr().0, group_mac);
        let message = icmpv6_of(&question, vlan, OWN_V6, group);
        let parsed = Icmpv6Repr::parse(
            &OWN_V6,
            &group,
            &Icmpv6Packet::new_unchecked(&message[..]),
            &ChecksumCapabilities::default(),
        );
        let solicitation = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit {
            target_addr: peer,
            lladdr: Some(EthernetAddress(OWN_MAC).into()),
        });
        prop_assert_eq!(parsed, Ok(solicitation));
    }

    #[test]
    fn neighbour_solicitations_are_answered(peer in peers_v6(), vlan in vlan_tags()) {
        let solicitation = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit {
            target_addr: OWN_V6,
            lladdr: Some(EthernetAddress(PEER_MAC).into()),
        });
        let message = icmpv6_message(peer, OWN_V6, &solicitation);
        let frame = ipv6_frame(vlan, peer, OWN_V6, IpProtocol::Icmpv6, &message);
        let answer = single(answers(&mut stack(vlan), frame));
        prop_assert_eq!(open_ethernet(&answer, vlan).0.dst_addr().0, PEER_MAC);
        let message = icmpv6_of(&answer, vlan, OWN_V6, peer);
        let parsed = Icmpv6Repr::parse(
            &OWN_V6,
            &peer,
            &Icmpv6Packet::new_unchecked(&message[..]),
            &ChecksumCapabilities::default(),
        );
        let advertisement = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
            flags: NdiscNeighborFlags::SOLICITED | NdiscNeighborFlags::OVERRIDE,
            target_addr: OWN_V6,
            lladdr: Some(EthernetAddress(OWN_MAC).into()),
        });
        prop_assert_eq!(parsed, Ok(advertisement));
    }

    #[test]
    fn ipv4_echo_requests_are_answered(
        peer in peers_v4(),
        vlan in vlan_tags(),
        (ident, seq_no) in any::<(u16, u16)>(),
        data in vec(any::<u8>(), 0..1400),
    ) {
        let request = Icmpv4Repr::EchoRequest { ident, seq_no, data: &data };
        let mut message = vec![0; request.buffer_len()];
        let checksums = ChecksumCapabilities::default();
        request.emit(&mut Icmpv4Packet::new_unchecked(&mut message), &checksums);
        let frame = ipv4_frame(vlan, peer, IpProtocol::Icmp, &message);
        let answer = single(answers(&mut stack(vlan), frame));
        let message = icmpv4_of(&answer, vlan, peer);
        let packet = Icmpv4Packet::new_checked(&message[..]).expect("an ICMP message");
        prop_assert_eq!(
            Icmpv4Repr::parse(&packet, &checksums),
            Ok(Icmpv4Repr::EchoReply { ident, seq_no, data: &data })
        );
    }

    #[test]
    fn ipv6_echo_requests_are_answered(
        peer in peers_v6(),
        vlan in vlan_tags(),
        (ident, seq_no) in any::<(u16, u16)>(),
        data in vec(any::<u8>(), 0..1400),
    ) {
        let request = Icmpv6Repr::EchoRequest { ident, seq_no, data: &data };
        let message = icmpv6_message(peer, OWN_V6, &request);
        let frame = ipv6_frame(vlan, peer, OWN_V6, IpProtocol::Icmpv6, &message);
        let answer = single(answers(&mut stack(vlan), frame));
        let message = icmpv6_of(&answer, vlan, OWN_V6, peer);
        let parsed = Icmpv6Repr::parse(
            &OWN_V6,
            &peer,
            &Icmpv6Packet::new_unchecked(&message[..]),
            &ChecksumCapabilities::default(),
        );
        prop_assert_eq!(parsed, Ok(Icmpv6Repr::EchoReply { ident, seq_no, data: &data }));
    }

    #[test]
    fn icmp_with_a_wrong_checksum_is_dropped(
        v6 in any::<bool>(),
        (ident, seq_no) in any::<(u16, u16)>(),
        data in vec(any::<u8>(), 0..100),
        (at, mask) in (0..100usize, 1..=u8::MAX),
    ) {
        let (peer_v4, peer_v6) = (Ipv4Addr::new(10, 0, 0, 2), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
        let mut message = if v6 {
            let request = Icmpv6Repr::EchoRequest { ident, seq_no, data: &data };
            icmpv6_message(peer_v6, OWN_V6, &request)
        } else {
            let request = Icmpv4Repr::EchoRequest { ident, seq_no, data: &data };
            let mut message = vec![0; request.buffer_len()];
            let checksums = ChecksumCapabilities::default();
            request.emit(&mut Icmpv4Packet::new_unchecked(&mut message), &checksums);
            message
        };
        let at = at % message.len();
        message[at] ^= mask;
        let good = if v6 {
            let packet = Icmpv6Packet::new_checked(&message[..]);
            packet.is_ok_and(|packet| packet.verify_checksum(&peer_v6, &OWN_V6))
        } else {
            let packet = Icmpv4Packet::new_checked(&message[..]);
            packet.is_ok_and(|packet| packet.verify_checksum())
        };
        prop_assume!(!good);
        let frame = if v6 {
            ipv6_frame(None, peer_v6, OWN_V6, IpProtocol::Icmpv6, &message)
        } else {
            ipv4_frame(None, peer_v4, IpProtocol::Icmp, &message)
        };
        prop_assert_eq!(answers(&mut stack(None), frame), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn unknown_protocols_get_icmp_errors_that_quote(
        v6 in any::<bool>(),
        vlan in vlan_tags(),
        body in vec(any::<u8>(), 0..1400),
    ) {
        // RFC 3692 section 2.1: a protocol number for experiments.
        let protocol = IpProtocol::from(253);
        let (peer_v4, peer_v6) = (Ipv4Addr::new(10, 0, 0, 2), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));
        let frame = if v6 {
            ipv6_frame(vlan, peer_v6, OWN_V6, protocol, &body)
        } else {
            ipv4_frame(vlan, peer_v4, protocol, &body)
        };
        let packet = open_ethernet(&frame, vlan).1.to_vec();
        let answer = single(answers(&mut stack(vlan), frame));
        let (message, most) = if v6 {
            let message = icmpv6_of(&answer, vlan, OWN_V6, peer_v6);
            let icmp = Icmpv6Packet::new_unchecked(&message[..]);
            // RFC 4443 section 3.4: unrecognised next header; its number is at byte 6.
            prop_assert_eq!(icmp.msg_type(), Icmpv6Message::ParamProblem);
            prop_assert_eq!((icmp.msg_code(), icmp.param_problem_ptr()), (1, 6));
            (message, 1280 - IPV6_HEADER - ICMP_HEADER)
        } else {
            let message = icmpv4_of(&answer, vlan, peer_v4);
            let icmp = Icmpv4Packet::new_checked(&message[..]).expect("an ICMP message");
            prop_assert!(icmp.verify_checksum());
            // RFC 792: destination unreachable, protocol unreachable.
            prop_assert_eq!((icmp.msg_type(), icmp.msg_code()), (Icmpv4Message::DstUnreachable, 2));
            (message, 576 - IPV4_HEADER - ICMP_HEADER)
        };
        let quoted = packet.len().min(most);
        prop_assert_eq!(&message[ICMP_HEADER..], &packet[..quoted]);
    }
}
