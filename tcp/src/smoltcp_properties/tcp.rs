//! The TCP header and its options (RFC 9293 section 3.1).

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetProtocol, IpAddress, IpProtocol, Ipv4Packet, Ipv6Packet, TcpControl, TcpOption,
    TcpPacket, TcpRepr, TcpSeqNumber, TcpTimestampRepr, checksum as smoltcp_checksum,
};

use super::{OWN_MAC, PEER_MAC, address_pairs, open_ethernet, vlan_tags};
use crate::base::sequence::SeqNr;
use crate::connection::handshake::syn_options;
use crate::wire::checksum::{self, OnesComplementSum};
use crate::wire::flow_key::FlowKey;
use crate::wire::segment::{ACK, SYN, Segment};
use crate::wire::template::{HEADER_MAX, SegmentFields, Template};

const TCP_HEADER: usize = 20;
/// Maximum length of TCP options in bytes.
const OPTIONS_MAX: usize = 40;
const KIND_SACK: u8 = 5;
const KIND_TIMESTAMPS: u8 = 8;

/// Generates segments in smoltcp's representation, without payload. SYN options and SACK blocks do not
/// fit one header together, and smoltcp sends SACK blocks only with an acknowledgment.
fn smoltcp_segments() -> impl Strategy<Value = TcpRepr<'static>> {
    let syn_options = (
        option::of(any::<u16>()),
        option::of(any::<u8>()),
        any::<bool>(),
    );
    let blocks = vec(any::<(u32, u32)>(), 0..=3);
    let control = prop_oneof![
        Just(TcpControl::None),
        Just(TcpControl::Psh),
        Just(TcpControl::Syn),
        Just(TcpControl::Fin),
        Just(TcpControl::Rst),
    ];
    (
        (
            1..=u16::MAX,
            1..=u16::MAX,
            any::<u32>(),
            option::of(any::<u32>()),
            any::<u16>(),
        ),
        control,
        syn_options,
        blocks,
        option::of(any::<(u32, u32)>()),
    )
        .prop_map(
            |(fixed, control, (mss, scale, sack_permitted), blocks, timestamps)| {
                let (src_port, dst_port, seq, ack, window_len) = fixed;
                let syn = control == TcpControl::Syn;
                let mut sack_ranges = [None; 3];
                if !syn && ack.is_some() {
                    for (range, block) in sack_ranges.iter_mut().zip(blocks) {
                        *range = Some(block);
                    }
                }
                TcpRepr {
                    src_port,
                    dst_port,
                    control,
                    seq_number: TcpSeqNumber(seq as i32),
                    ack_number: ack.map(|ack| TcpSeqNumber(ack as i32)),
                    window_len,
                    window_scale: scale.filter(|_| syn),
                    max_seg_size: mss.filter(|_| syn),
                    sack_permitted: sack_permitted && syn,
                    sack_ranges,
                    timestamp: timestamps.map(|(value, echo)| TcpTimestampRepr::new(value, echo)),
                    payload: &[],
                }
            },
        )
}

/// Builds the bytes of a segment without an IP header or a checksum.
fn emit_segment(repr: &TcpRepr<'_>) -> Vec<u8> {
    let mut bytes = vec![0; repr.buffer_len()];
    let unspecified = IpAddress::v4(0, 0, 0, 0);
    repr.emit(
        &mut TcpPacket::new_unchecked(&mut bytes),
        &unspecified,
        &unspecified,
        &ChecksumCapabilities::ignored(),
    );
    bytes
}

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
    fn segments_of_smoltcp_parse_to_the_same_values(repr in smoltcp_segments()) {
        let bytes = emit_segment(&repr);
        let (mut segment, mut malformed) = (Segment::default(), 0);
        prop_assert!(segment.parse(&bytes, &mut malformed));
        prop_assert_eq!(segment.seq.0, repr.seq_number.0 as u32);
        prop_assert_eq!(
            (segment.flags & ACK != 0).then_some(segment.ack.0),
            repr.ack_number.map(|ack| ack.0 as u32)
        );
        prop_assert_eq!(segment.window, repr.window_len);
        prop_assert_eq!(usize::from(segment.header_len), repr.header_len());
        let packet = TcpPacket::new_unchecked(&bytes[..]);
        prop_assert_eq!(segment.flags & SYN != 0, packet.syn());
        let expected = OptionValues {
            mss: repr.max_seg_size,
            window_scale: repr.window_scale.map(|scale| scale.min(14)),
            sack_permitted: repr.sack_permitted,
            timestamps: repr.timestamp.map(|option| (option.tsval, option.tsecr)),
            sack_blocks: repr.sack_ranges.into_iter().flatten().collect(),
            malformed: false,
        };
        prop_assert_eq!(option_values(&segment, malformed), expected);
    }

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
    fn options_of_our_syn_are_those_smoltcp_reads(
        mss in any::<u16>(),
        sack in any::<bool>(),
        timestamps in option::of(any::<(u32, u32)>()),
        scale in option::of(0..=14u8),
    ) {
        let (bytes, len) = syn_options(mss, sack, timestamps, scale);
        prop_assert!(len % 4 == 0 && len <= OPTIONS_MAX);
        let expected = OptionValues {
            mss: Some(mss),
            window_scale: scale,
            sack_permitted: sack,
            timestamps,
            ..OptionValues::default()
        };
        prop_assert_eq!(read_options(&bytes[..len], true), expected);
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

    #[test]
    fn a_super_segment_has_a_sum_without_a_length(
        (local, remote) in address_pairs(),
        ports in any::<(u16, u16)>(),
        payload in 1..60_000u32,
    ) {
        let key = FlowKey::new(local, ports.0, remote, ports.1).expect("one family");
        let template = Template::new(OWN_MAC, PEER_MAC, None, &key);
        let fields = SegmentFields {
            seq: SeqNr(1),
            ack: SeqNr(2),
            flags: ACK,
            window: 3,
            ts: None,
            options: &[],
            payload,
            ect: false,
            tso: true,
        };
        let (len, meta) = template.meta(&fields);
        let mut headers = [0; HEADER_MAX];
        template.build(&mut headers[..len], &fields);
        let at = checksum::tcp_checksum_offset(&meta);
        let sum = u16::from_be_bytes([headers[at], headers[at + 1]]);
        let expected =
            smoltcp_checksum::pseudo_header(&local.into(), &remote.into(), IpProtocol::Tcp, 0);
        prop_assert_eq!(sum, expected);
    }

    #[test]
    fn sums_of_pieces_are_smoltcps_sum_of_the_whole(
        pieces in vec(vec(any::<u8>(), 0..200), 0..6),
    ) {
        let mut sum = OnesComplementSum::new();
        pieces.iter().for_each(|piece| sum.add(piece));
        prop_assert_eq!(sum.value(), smoltcp_checksum::data(&pieces.concat()));
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
