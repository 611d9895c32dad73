//! IPv6 extension headers (RFC 8200 section 4): the header walk against one built on smoltcp's types.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use smoltcp::wire::{
    IpProtocol, Ipv6ExtHeader, Ipv6ExtHeaderRepr, Ipv6Option, Ipv6OptionFailureType,
    Ipv6OptionType, Ipv6RoutingHeader,
};

use crate::wire::extension_headers::{NEXT_HEADER_OFFSET, WalkEnd, walk_extension_headers};
use crate::wire::icmp_error::IcmpError;

const IPV6_HEADER: usize = 40;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
/// Maximum number of extension headers in the walk.
const HEADERS_MAX: usize = 8;

/// The body of an extension header behind its first two bytes: options, well-formed or not.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![4 => Just(1u8), 2 => Just(0), 1 => any::<u8>()];
    let well_formed = (kind, vec(any::<u8>(), 0..6)).prop_map(|(kind, data)| {
        if kind == 0 {
            vec![0]
        } else {
            [vec![kind, data.len() as u8], data].concat()
        }
    });
    let piece = prop_oneof![8 => well_formed, 1 => vec(any::<u8>(), 0..3)];
    vec(piece, 0..4).prop_map(|pieces| {
        let mut body = pieces.concat();
        // One-byte padding, up to a multiple of eight together with the first two bytes.
        body.resize((body.len() + 2).next_multiple_of(8) - 2, 0);
        body
    })
}

/// Generates IPv6 packets with extension headers, whose first bytes smoltcp writes.
fn packets() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![1 => Just(HOP_BY_HOP), 1 => Just(ROUTING), 5 => Just(DESTINATION)];
    let last = prop_oneof![Just(6u8), Just(44), Just(58), Just(59), any::<u8>()];
    let headers = vec((kind, bodies(), any::<bool>()), 0..=HEADERS_MAX + 1);
    (headers, last, option::weighted(0.2, 0..200usize)).prop_map(|(headers, last, cut)| {
        let mut kinds: Vec<u8> = headers.iter().map(|(kind, _, _)| *kind).collect();
        kinds.push(last);
        let mut packet = vec![0; IPV6_HEADER];
        packet[NEXT_HEADER_OFFSET] = kinds[0];
        for ((kind, mut body, segments_left), next) in headers.into_iter().zip(&kinds[1..]) {
            if kind == ROUTING && !segments_left {
                body[1] = 0;
            }
            let repr = Ipv6ExtHeaderRepr {
                next_header: IpProtocol::from(*next),
                length: ((body.len() + 2) / 8 - 1) as u8,
                data: &body,
            };
            let mut header = vec![0; body.len() + 2];
            repr.emit(&mut Ipv6ExtHeader::new_unchecked(&mut header));
            header[2..].copy_from_slice(&body);
            packet.extend(header);
        }
        packet.truncate(IPV6_HEADER + cut.unwrap_or(usize::MAX - IPV6_HEADER));
        packet
    })
}

/// An ICMPv6 parameter problem.
fn parameter_problem(code: u8, pointer: usize, group: bool) -> WalkEnd {
    WalkEnd::Report {
        error: IcmpError::parameter_problem(code, pointer),
        group,
    }
}

/// Returns how the options of the header at `at` end the walk; `None`: the walk continues.
fn smoltcp_options(payload: &[u8], at: usize) -> Option<WalkEnd> {
    let mut offset = 0;
    while offset < payload.len() {
        let Ok(option) = Ipv6Option::new_checked(&payload[offset..]) else {
            return Some(WalkEnd::Discard);
        };
        let kind = option.option_type();
        if kind != Ipv6OptionType::Pad1 {
            let pointer = at + 2 + offset;
            match Ipv6OptionFailureType::from(kind) {
                Ipv6OptionFailureType::Skip => {}
                Ipv6OptionFailureType::Discard => return Some(WalkEnd::Discard),
                Ipv6OptionFailureType::DiscardSendAll => {
                    return Some(parameter_problem(2, pointer, true));
                }
                Ipv6OptionFailureType::DiscardSendUnicast => {
                    return Some(parameter_problem(2, pointer, false));
                }
            }
            offset += 1 + usize::from(option.data_len());
        }
        offset += 1;
    }
    None
}

/// Walks the headers with smoltcp's types and the rules of RFC 8200 sections 4.1, 4.2 and 4.4.
fn smoltcp_walk(packet: &[u8]) -> WalkEnd {
    let (mut next, mut at, mut named) =
        (packet[NEXT_HEADER_OFFSET], IPV6_HEADER, NEXT_HEADER_OFFSET);
    for _ in 0..=HEADERS_MAX {
        match next {
            HOP_BY_HOP if named != NEXT_HEADER_OFFSET => return parameter_problem(1, named, false),
            HOP_BY_HOP | ROUTING | DESTINATION => {}
            _ => return WalkEnd::Reached { next, at, named },
        }
        let Ok(header) = Ipv6ExtHeader::new_checked(packet.get(at..).unwrap_or(&[])) else {
            return WalkEnd::Discard;
        };
        let payload = header.payload();
        if next == ROUTING {
            let routing = Ipv6RoutingHeader::new_unchecked(payload);
            if routing.segments_left() != 0 {
                return parameter_problem(0, at + 2, false);
            }
        } else if let Some(end) = smoltcp_options(payload, at) {
            return end;
        }
        (next, named) = (header.next_header().into(), at);
        at += 2 + payload.len();
    }
    WalkEnd::Discard
}

proptest! {
    #[test]
    fn extension_headers_are_walked_as_by_smoltcp(packet in packets()) {
        prop_assert_eq!(
            walk_extension_headers(&packet, packet[NEXT_HEADER_OFFSET], IPV6_HEADER, NEXT_HEADER_OFFSET),
            smoltcp_walk(&packet)
        );
    }
}
