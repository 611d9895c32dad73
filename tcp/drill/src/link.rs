//! The Ethernet link of the stack. Converts frames to IP packets, and answers ARP (RFC 826) or NDP
//! (RFC 4861) requests for any address, so that scripts see neither.

use std::net::{IpAddr, Ipv6Addr};

use siw_net::checksum::{self, OnesComplementSum};
use siw_net::{FrameMeta, FrameSink, PayloadPiece, TxChecksum};

use crate::packet::{self, PROTOCOL_ICMPV6};

/// Ethernet address of all stations other than the stack.
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const ETHERNET_HEADER: usize = 14;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// Length of an ARP packet for IPv4 over Ethernet.
const ARP_LEN: usize = 28;
const ARP_REQUEST: u8 = 1;
const ARP_REPLY: u8 = 2;
/// Offset of an ICMPv6 message without extension headers in its packet.
const ICMPV6_AT: usize = packet::IPV6_HEADER;
/// Shortest Neighbour Solicitation in its IPv6 packet (RFC 4861 section 4.3).
const SOLICITATION_LEN: usize = ICMPV6_AT + 24;
/// ICMPv6 types of NDP: router solicitation to redirect (RFC 4861 section 4).
const NDP_FIRST: u8 = 133;
const NDP_LAST: u8 = 137;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Flags of an advertisement: solicited, override (RFC 4861 section 4.4).
const SOLICITED_OVERRIDE: u8 = 0x60;
/// NDP option: target link-layer address, one unit of eight bytes.
const TARGET_LINK_ADDRESS: [u8; 2] = [2, 1];

/// Collects whole frames and completes their checksums.
#[derive(Default)]
pub(crate) struct FrameCollector {
    /// Finished frames not taken yet.
    pub frames: Vec<Vec<u8>>,
}

impl FrameSink<Vec<u8>> for FrameCollector {
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, Vec<u8>>>,
    ) -> bool {
        let mut frame = vec![0; headers_len];
        fill(&mut frame);
        for piece in payload {
            frame.extend_from_slice(match piece {
                PayloadPiece::Bytes(bytes) => bytes,
                PayloadPiece::Record {
                    record,
                    offset,
                    len,
                    ..
                } => &record[offset as usize..(offset + len) as usize],
            });
        }
        if meta.checksum != TxChecksum::Complete && meta.l4_len > 0 {
            let (headers, payload) = frame.split_at(headers_len);
            let mut payload_sum = OnesComplementSum::new();
            payload_sum.add(payload);
            let checksum = checksum::complete_tcp_checksum(headers, meta, payload_sum);
            let at = checksum::tcp_checksum_offset(meta);
            frame[at..at + 2].copy_from_slice(&checksum);
        }
        self.frames.push(frame);
        true
    }
}

/// Wraps an IP packet in a frame from the peer to the Ethernet address `to`.
pub(crate) fn frame_from_peer(to: [u8; 6], ip: &[u8]) -> Vec<u8> {
    let ethertype = if ip.first().is_some_and(|first| first >> 4 == 6) {
        ETHERTYPE_IPV6
    } else {
        ETHERTYPE_IPV4
    };
    [&to[..], &PEER_MAC, &ethertype, ip].concat()
}

/// A frame of the stack as processed by the link.
pub(crate) enum SentFrame {
    /// An IP packet, which is passed to the script.
    Packet(Vec<u8>),
    /// The answer to an ARP request or a Neighbour Solicitation.
    Asked(Vec<u8>),
    /// ARP or NDP that needs no answer.
    Ignored,
}

/// Classifies a frame that the stack sent.
pub(crate) fn classify_frame(frame: Vec<u8>) -> SentFrame {
    let body = &frame[ETHERNET_HEADER..];
    let ethertype = [frame[12], frame[13]];
    match ethertype {
        ETHERTYPE_ARP => answer_arp(body),
        ETHERTYPE_IPV6
            if body.len() >= SOLICITATION_LEN
                && body[6] == PROTOCOL_ICMPV6
                && (NDP_FIRST..=NDP_LAST).contains(&body[ICMPV6_AT]) =>
        {
            let mut asker = [0; 6];
            asker.copy_from_slice(&frame[6..12]);
            answer_solicitation(asker, body)
        }
        _ => SentFrame::Packet(body.to_vec()),
    }
}

/// RFC 826: answers a request for any address, except for the sender's own, which is an announcement.
fn answer_arp(request: &[u8]) -> SentFrame {
    if request.len() < ARP_LEN || request[7] != ARP_REQUEST || request[14..18] == request[24..28] {
        return SentFrame::Ignored;
    }
    let (sender, sender_mac, target) = (&request[8..18], &request[8..14], &request[24..28]);
    // The first seven bytes ("IPv4 over Ethernet") are copied; the operation follows.
    let link_and_network = &request[..7];
    let mut reply = [sender_mac, &PEER_MAC, &ETHERTYPE_ARP, link_and_network].concat();
    reply.push(ARP_REPLY);
    reply.extend(PEER_MAC);
    reply.extend(target);
    reply.extend(sender);
    SentFrame::Asked(reply)
}

/// RFC 4861 section 7.2.4: answers a Neighbour Solicitation. `body` is the IPv6 packet.
fn answer_solicitation(asker: [u8; 6], body: &[u8]) -> SentFrame {
    if body[ICMPV6_AT] != NEIGHBOUR_SOLICITATION {
        return SentFrame::Ignored;
    }
    let address_at = |at: usize| {
        let mut octets = [0; 16];
        octets.copy_from_slice(&body[at..at + 16]);
        Ipv6Addr::from(octets)
    };
    // The IPv6 source address is at offset 8, the target of the solicitation after its 8-byte header.
    let (source, target) = (address_at(8), address_at(ICMPV6_AT + 8));
    SentFrame::Asked(frame_from_peer(asker, &build_advertisement(target, source)))
}

/// Builds a Neighbour Advertisement (RFC 4861 section 4.4) of `target` at [`PEER_MAC`].
fn build_advertisement(target: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let (from, to) = (IpAddr::V6(target), IpAddr::V6(to));
    let mut message = vec![
        NEIGHBOUR_ADVERTISEMENT,
        0,
        0,
        0,
        SOLICITED_OVERRIDE,
        0,
        0,
        0,
    ];
    message.extend(target.octets());
    message.extend(TARGET_LINK_ADDRESS);
    message.extend(PEER_MAC);
    let mut sum = packet::pseudo_header_sum(from, to, PROTOCOL_ICMPV6, message.len());
    sum.add(&message);
    message[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
    packet::build_ip_packet(from, to, PROTOCOL_ICMPV6, 0, &message)
}
