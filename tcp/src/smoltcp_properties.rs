//! Property tests of this crate's wire code against smoltcp's independently written wire types: TCP
//! headers of arbitrary bytes are accepted exactly when smoltcp accepts them and have the same values
//! (each exception is listed at its test), and smoltcp reads the frames of this crate's templates.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, Ipv6Packet, TcpOption, TcpPacket,
};

use siw_net::FlowKey;
use siw_net::checksum::{self, OnesComplementSum};
use siw_net::constants::HEADER_MAX;

use crate::base::sequence::SeqNr;
use crate::wire::segment::Segment;
use crate::wire::template::{SegmentFields, Template};

/// The Ethernet address of the stack under test.
const OWN_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
/// The Ethernet address of its peer.
const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
/// EtherType of a frame with a VLAN tag (IEEE 802.1Q), which smoltcp does not parse.
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERNET_HEADER: usize = 14;
const VLAN_TAG: usize = 4;

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

/// Returns the Ethernet header and the payload of a frame; its VLAN tag must be `vlan`.
fn open_ethernet(frame: &[u8], vlan: Option<u16>) -> (EthernetFrame<Vec<u8>>, &[u8]) {
    let mut untagged = frame.to_vec();
    let mut header = ETHERNET_HEADER;
    if let Some(identifier) = vlan {
        let tag: Vec<u8> = untagged.drain(12..12 + VLAN_TAG).collect();
        assert_eq!(tag[..2], ETHERTYPE_VLAN.to_be_bytes());
        assert_eq!(tag[2..], identifier.to_be_bytes());
        header += VLAN_TAG;
    }
    let ethernet = EthernetFrame::new_checked(untagged).expect("an Ethernet header");
    (ethernet, &frame[header..])
}
const TCP_HEADER: usize = 20;
/// Maximum length of TCP options in bytes.
const OPTIONS_MAX: usize = 40;
const KIND_SACK: u8 = 5;
const KIND_TIMESTAMPS: u8 = 8;

/// Generates options that are well-formed, malformed, unknown or arbitrary, and that fit a header.
fn option_bytes() -> impl Strategy<Value = Vec<u8>> {
    let known_kind = prop_oneof![Just(2u8), Just(3), Just(4), Just(5), Just(8), any::<u8>()];
    let right_length =
        (known_kind.clone(), vec(any::<u8>(), 0..=32)).prop_map(|(kind, mut body)| {
            let len = match kind {
                2 => 2,
                3 => 1,
                4 => 0,
                5 => body.len() / 8 * 8,
                8 => 8,
                _ => body.len(),
            };
            body.resize(len, 0);
            [vec![kind, 2 + len as u8], body].concat()
        });
    let any_length = (known_kind, any::<u8>(), vec(any::<u8>(), 0..=10))
        .prop_map(|(kind, len, body)| [vec![kind, len % 16], body].concat());
    let piece = prop_oneof![
        4 => right_length,
        1 => any_length,
        2 => Just(vec![1]),
        1 => vec(any::<u8>(), 0..4),
    ];
    vec(piece, 0..6).prop_map(|pieces| {
        let mut bytes = pieces.concat();
        bytes.truncate(OPTIONS_MAX);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    })
}

/// Values of the options of a segment.
#[derive(Debug, Default, PartialEq, Eq)]
struct OptionValues {
    mss: Option<u16>,
    window_scale: Option<u8>,
    sack_permitted: bool,
    timestamps: Option<(u32, u32)>,
    sack_blocks: Vec<(u32, u32)>,
    malformed: bool,
}

/// Reads options with smoltcp. Differences between this crate and smoltcp:
/// - MSS, window scale and SACK-permitted count on a SYN only (RFC 9293 section 3.2, RFC 7323
///   section 2.2, RFC 2018 section 2); smoltcp takes them from any segment.
/// - smoltcp rejects a segment at the first malformed option. Here a known option of a wrong length
///   is skipped, and an impossible length ends the options (RFC 9293 section 3.1, MUST-7).
/// - smoltcp ignores the fourth SACK block; here all four are read.
/// - A SACK option without blocks is malformed to smoltcp and empty here. A timestamps option of a
///   wrong length is unknown to smoltcp and malformed here.
fn read_options(mut rest: &[u8], syn: bool) -> OptionValues {
    let mut values = OptionValues::default();
    while !rest.is_empty() {
        let Ok((next, option)) = TcpOption::parse(rest) else {
            let len = rest.get(1).map_or(0, |len| usize::from(*len));
            if rest[0] == KIND_SACK && len == 2 {
                values.sack_blocks.clear();
            } else {
                values.malformed = true;
            }
            if len < 2 || len > rest.len() {
                break;
            }
            rest = &rest[len..];
            continue;
        };
        match option {
            TcpOption::EndOfList => break,
            TcpOption::NoOperation => {}
            TcpOption::MaxSegmentSize(mss) if syn => values.mss = Some(mss),
            TcpOption::WindowScale(scale) if syn => values.window_scale = Some(scale.min(14)),
            TcpOption::SackPermitted if syn => values.sack_permitted = true,
            TcpOption::MaxSegmentSize(_) | TcpOption::WindowScale(_) | TcpOption::SackPermitted => {
            }
            TcpOption::TimeStamp { tsval, tsecr } => values.timestamps = Some((tsval, tsecr)),
            TcpOption::SackRange(blocks) => {
                values.sack_blocks = blocks.into_iter().flatten().collect();
                if rest[1] == 2 + 4 * 8 {
                    let word = |at: usize| {
                        u32::from_be_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]])
                    };
                    values.sack_blocks.push((word(26), word(30)));
                }
            }
            TcpOption::Unknown { kind, .. } => values.malformed |= kind == KIND_TIMESTAMPS,
        }
        rest = next;
    }
    values
}

/// Returns the option values of a segment that this crate parsed.
fn option_values(segment: &Segment, malformed: u64) -> OptionValues {
    OptionValues {
        mss: segment.mss,
        window_scale: segment.wscale,
        sack_permitted: segment.sack_permitted,
        timestamps: segment.has_ts.then_some((segment.ts_val, segment.ts_ecr)),
        sack_blocks: segment.sack[..usize::from(segment.sacks)]
            .iter()
            .map(|(left, right)| (left.0, right.0))
            .collect(),
        malformed: malformed > 0,
    }
}

proptest! {
    #[test]
    fn any_bytes_parse_as_in_smoltcp(
        fixed in vec(any::<u8>(), TCP_HEADER),
        options in option_bytes(),
        flags in any::<u8>(),
        header_words in option::weighted(0.1, 0..16u8),
        cut in option::weighted(0.1, 0..60usize),
    ) {
        let mut bytes = [&fixed[..], &options].concat();
        let words = header_words.unwrap_or(bytes.len() as u8 / 4);
        bytes[12] = words << 4 | bytes[12] & 15;
        bytes[13] = flags;
        bytes.truncate(cut.unwrap_or(usize::MAX));
        let (mut segment, mut malformed) = (Segment::default(), 0);
        let accepted = segment.parse(&bytes, &mut malformed);
        let packet = TcpPacket::new_checked(&bytes[..]);
        prop_assert_eq!(accepted, packet.is_ok());
        if let Ok(packet) = packet {
            prop_assert_eq!(segment.seq.0, packet.seq_number().0 as u32);
            prop_assert_eq!(segment.ack.0, packet.ack_number().0 as u32);
            prop_assert_eq!(segment.window, packet.window_len());
            prop_assert_eq!(segment.header_len, packet.header_len());
            let expected = read_options(packet.options(), packet.syn());
            prop_assert_eq!(option_values(&segment, malformed), expected);
        }
    }

    #[test]
    fn frames_of_a_template_are_those_smoltcp_reads(
        (local, remote) in address_pairs(),
        ports in any::<(u16, u16)>(),
        vlan in vlan_tags(),
        (seq, ack, window) in any::<(u32, u32, u16)>(),
        flags in any::<u8>(),
        timestamps in option::of(any::<(u32, u32)>()),
        blocks in vec(any::<(u32, u32)>(), 0..=3),
        payload in vec(any::<u8>(), 0..100),
        ect in any::<bool>(),
        cut in 0..100usize,
    ) {
        let key = FlowKey::new(local, ports.0, remote, ports.1).expect("one family");
        let template = Template::new(OWN_MAC, PEER_MAC, vlan, &key);
        prop_assert!(template.carries(&key));
        prop_assert_eq!(template.key(), key);
        let mut options = vec![];
        if !blocks.is_empty() {
            options.extend([1, 1, KIND_SACK, 2 + 8 * blocks.len() as u8]);
            for (left, right) in &blocks {
                options.extend(left.to_be_bytes());
                options.extend(right.to_be_bytes());
            }
        }
        if options.len() + 12 > OPTIONS_MAX && timestamps.is_some() {
            options.truncate(0);
        }
        let fields = SegmentFields {
            seq: SeqNr(seq),
            ack: SeqNr(ack),
            flags,
            window,
            ts: timestamps,
            options: &options,
            payload: payload.len() as u32,
            ect,
            tso: false,
        };
        let (len, meta) = template.meta(&fields);
        let mut headers = [0; HEADER_MAX];
        template.build(&mut headers[..len], &fields);
        // The payload is summed in two pieces, because a sink may get it in pieces.
        let mut sum = OnesComplementSum::new();
        let (first, second) = payload.split_at(cut.min(payload.len()));
        sum.add(first);
        sum.add(second);
        let mut frame = headers[..len].to_vec();
        let at = checksum::tcp_checksum_offset(&meta);
        let complete = checksum::complete_tcp_checksum(&frame, &meta, sum);
        frame[at..at + 2].copy_from_slice(&complete);
        frame.extend(&payload);

        let (ethernet, packet) = open_ethernet(&frame, vlan);
        prop_assert_eq!(ethernet.src_addr().0, OWN_MAC);
        prop_assert_eq!(ethernet.dst_addr().0, PEER_MAC);
        let tcp = if local.is_ipv4() {
            prop_assert_eq!(ethernet.ethertype(), EthernetProtocol::Ipv4);
            let ip = Ipv4Packet::new_checked(packet).expect("an IPv4 packet");
            prop_assert!(ip.verify_checksum());
            prop_assert!(ip.version() == 4 && ip.header_len() == 20 && ip.dont_frag());
            prop_assert!(!ip.more_frags() && ip.frag_offset() == 0);
            prop_assert_eq!(usize::from(ip.total_len()), packet.len());
            prop_assert_eq!((ip.src_addr(), ip.dst_addr()).into_addresses(), (local, remote));
            prop_assert_eq!((ip.hop_limit(), ip.next_header()), (64, IpProtocol::Tcp));
            prop_assert_eq!((ip.dscp(), ip.ecn()), (0, if ect { 2 } else { 0 }));
            ip.payload()
        } else {
            prop_assert_eq!(ethernet.ethertype(), EthernetProtocol::Ipv6);
            let ip = Ipv6Packet::new_checked(packet).expect("an IPv6 packet");
            prop_assert_eq!(ip.version(), 6);
            prop_assert_eq!(ip.total_len(), packet.len());
            prop_assert_eq!((ip.src_addr(), ip.dst_addr()).into_addresses(), (local, remote));
            prop_assert_eq!((ip.hop_limit(), ip.next_header()), (64, IpProtocol::Tcp));
            prop_assert_eq!(ip.traffic_class(), if ect { 2 } else { 0 });
            ip.payload()
        };
        let tcp = TcpPacket::new_checked(tcp).expect("a TCP header");
        prop_assert!(tcp.verify_checksum(&local.into(), &remote.into()));
        prop_assert_eq!((tcp.src_port(), tcp.dst_port()), ports);
        prop_assert_eq!(tcp.seq_number().0 as u32, seq);
        prop_assert_eq!(tcp.ack_number().0 as u32, ack);
        prop_assert_eq!(tcp.window_len(), window);
        prop_assert_eq!(tcp.payload(), &payload[..]);
        let raw_flags = packet[packet.len() - payload.len() - usize::from(tcp.header_len()) + 13];
        prop_assert_eq!(raw_flags, flags);
        let values = read_options(tcp.options(), false);
        prop_assert_eq!(values.timestamps, timestamps);
        prop_assert!(!values.malformed);
        if !options.is_empty() {
            prop_assert_eq!(values.sack_blocks, blocks);
        }
    }
}

/// Both addresses of a packet as `IpAddr`.
trait IntoAddresses {
    fn into_addresses(self) -> (core::net::IpAddr, core::net::IpAddr);
}

impl<A: Into<core::net::IpAddr>> IntoAddresses for (A, A) {
    fn into_addresses(self) -> (core::net::IpAddr, core::net::IpAddr) {
        (self.0.into(), self.1.into())
    }
}
