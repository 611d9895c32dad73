//! IPv6 packets with extension headers (RFC 8200 section 4): the upper-layer packet is received, and
//! invalid headers are reported to the sender.

use crate::common::raw_host::{FrameChange, RawHost};
use crate::common::wire::pattern;
use siw_net::{Destination, Steering};
use siw_tcp_sim::forge::behind;

/// Hop-by-hop with a router alert, destination options with padding, routing with no segments left.
const SKIPPED: [(u8, &[u8]); 3] = [
    (0, &[0, 0, 5, 2, 0, 0, 1, 0]),
    (60, &[0, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (
        43,
        &[
            0, 2, 0, 0, 9, 9, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ],
    ),
];
/// An atomic fragment (RFC 6946).
const ATOMIC: (u8, &[u8]) = (44, &[0, 0, 0, 0, 1, 2, 3, 4]);

fn through<'a>(headers: &'a [(u8, &'a [u8])]) -> impl Fn(Vec<u8>) -> Vec<Vec<u8>> + 'a {
    move |frame| vec![behind(&frame, headers)]
}

/// Returns type and code, pointer, and quoted packet of an error.
fn error(frame: &[u8]) -> ([u8; 2], u32, &[u8]) {
    assert_eq!(frame[20], 58, "ICMPv6");
    let pointer = u32::from_be_bytes(frame[58..62].try_into().unwrap());
    ([frame[54], frame[55]], pointer, &frame[62..])
}

#[test]
fn tcp_works_behind_skipped_extension_headers() {
    let mut raw_host = RawHost::new(true);
    let all = [&SKIPPED[..], &SKIPPED[1..2]].concat();
    let way: FrameChange<'_> = &through(&all);
    let id = raw_host.connect(way);
    for count in [1, 999, 1300] {
        assert!(raw_host.delivers(id, &pattern(count), way), "{count} bytes");
    }
    for one in &SKIPPED {
        assert!(raw_host.delivers(id, b"behind one", &through(&[*one])));
    }
    // The TCP checksum does not cover the extension headers; a wrong one is detected after them.
    let spoilt = |frame: Vec<u8>| {
        let mut frame = behind(&frame, &SKIPPED);
        *frame.last_mut().unwrap() ^= 1;
        vec![frame]
    };
    assert!(!raw_host.delivers(id, b"spoilt", &spoilt));
    let stats = raw_host.stats();
    assert_eq!((stats.net.csum_errors, stats.net.header_errors), (1, 0));
    assert_eq!(stats.net.unknown_protocols, 0);
}

#[test]
fn echo_and_ndp_work_behind_extension_headers() {
    let mut raw_host = RawHost::new(true);
    for request in [
        raw_host.ends.icmp([128, 0], [0, 7, 0, 1], b"hello"),
        raw_host.ends.solicit(),
    ] {
        let replies = raw_host.answers(vec![request.clone()]);
        assert_eq!(replies.len(), 1);
        assert_eq!(raw_host.answers(vec![behind(&request, &SKIPPED)]), replies);
    }
}

/// RFC 8200 section 4.2.
#[test]
fn option_types_decide_what_happens() {
    let mut raw_host = RawHost::new(true);
    let packet = raw_host.ends.udp([1, 2], b"data");
    let with = |kind: u8, option: u8| behind(&packet, &[(kind, &[0, 0, 1, 0, option, 2, 0, 0])]);
    for kind in [0, 60] {
        // Skipped: then the next header is not supported. The first byte of this header names it.
        let frame = with(kind, 0x1e);
        let replies = raw_host.answers(vec![frame.clone()]);
        assert_eq!(error(&replies[0]), ([4, 1], 40, &frame[14..]));
        assert!(raw_host.answers(vec![with(kind, 0x5e)]).is_empty());
        for option in [0x9e, 0xde, 0xc2] {
            let frame = with(kind, option);
            let replies = raw_host.answers(vec![frame.clone()]);
            assert_eq!(
                error(&replies[0]),
                ([4, 2], 44, &frame[14..]),
                "{option:#x}"
            );
        }
    }
    let stats = raw_host.stats();
    assert_eq!(stats.net.header_errors, 8);
    assert_eq!(
        (stats.net.icmp_out, stats.net.icmp_parameter_problems_out),
        (8, 8)
    );
    assert_eq!(stats.net.icmp_unreachables_out, 0);
}

#[test]
fn multicast_is_answered_only_for_options_that_ask() {
    let mut raw_host = RawHost::new(true);
    let ours = raw_host.ends.ip[1];
    let solicited: std::net::Ipv6Addr = "ff02::1:ff00:2".parse().unwrap();
    for (group, member) in [
        ("ff02::1", true),
        ("ff02::1:ff00:2", true),
        ("ff02::1:ff00:3", false),
        ("ff02::5", false),
    ] {
        let mut endpoints = raw_host.ends;
        endpoints.ip[1] = group.parse().unwrap();
        endpoints.mac[1] = [0x33, 0x33, 0, 0, 0, 1];
        let packet = endpoints.udp([1, 2], b"data");
        for (option, answered) in [(0x9e, member), (0xde, false), (0x5e, false), (0x1e, false)] {
            let frame = behind(&packet, &[(60, &[0, 0, option, 4, 0, 0, 0, 0])]);
            let replies = raw_host.answers(vec![frame.clone()]);
            assert_eq!(replies.len(), usize::from(answered), "{group}, {option:#x}");
            if answered {
                assert_eq!(error(&replies[0]), ([4, 2], 42, &frame[14..]));
                let std::net::IpAddr::V6(from) = ours else {
                    unreachable!()
                };
                assert_eq!(replies[0][22..38], from.octets(), "from an address of ours");
            }
        }
    }
    assert_eq!(solicited.octets()[13..], [0, 0, 2], "as our address ends");
}

/// RFC 5095.
#[test]
fn routing_headers_with_segments_left_are_refused() {
    let mut raw_host = RawHost::new(true);
    let mut header = [0; 24];
    (header[1], header[3]) = (2, 1);
    let packet = raw_host.ends.udp([1, 2], b"data");
    for kind in [0, 2, 3, 4, 200] {
        header[2] = kind;
        let frame = behind(&packet, &[SKIPPED[0], (43, &header)]);
        let replies = raw_host.answers(vec![frame.clone()]);
        assert_eq!(
            replies.len(),
            1,
            "nothing is sent on, and its sender is answered"
        );
        assert_eq!(error(&replies[0]), ([4, 0], 48 + 2, &frame[14..]));
    }
    // Not even if the port has a listener.
    let id = raw_host.connect(&through(&[]));
    assert!(!raw_host.delivers(id, b"by a detour", &through(&[(43, &header)])));
}

#[test]
fn errors_are_not_answered_with_errors_rfc_4443_2_4() {
    let mut raw_host = RawHost::new(true);
    let quoted = [0; 48];
    let error = raw_host.ends.icmp([1, 4], [0; 4], &quoted);
    let bad: (u8, &[u8]) = (60, &[0, 0, 0x9e, 4, 0, 0, 0, 0]);
    assert!(raw_host.answers(vec![behind(&error, &[bad])]).is_empty());
    assert!(
        raw_host
            .answers(vec![behind(&error, &[bad, SKIPPED[1]])])
            .is_empty()
    );
    let echo = raw_host.ends.icmp([128, 0], [0; 4], &quoted);
    assert_eq!(
        raw_host
            .answers(vec![behind(&echo, &[bad, SKIPPED[1]])])
            .len(),
        1
    );
    assert_eq!(raw_host.stats().net.header_errors, 3);
}

#[test]
fn long_or_truncated_chains_are_dropped_and_counted() {
    let mut raw_host = RawHost::new(true);
    let packet = raw_host.ends.udp([1, 2], b"data");
    assert!(
        raw_host
            .answers(vec![behind(&packet, &[SKIPPED[1]; 9])])
            .is_empty()
    );
    // A length that reaches beyond the packet.
    let long: (u8, &[u8]) = (60, &[0, 200, 1, 4, 0, 0, 0, 0]);
    assert!(raw_host.answers(vec![behind(&packet, &[long])]).is_empty());
    assert_eq!(raw_host.stats().net.header_errors, 2);
    // Truncated at any byte, a packet has no effect other than counting.
    let whole = behind(&packet, &SKIPPED);
    for count in 14..whole.len() {
        let mut frame = whole[..count].to_vec();
        if count >= 54 {
            frame[18..20].copy_from_slice(&(count as u16 - 54).to_be_bytes());
        }
        raw_host.answers(vec![frame]);
    }
}

#[test]
fn steering_looks_behind_extension_headers() {
    let raw_host = RawHost::new(true);
    let steering = Steering::new(4, 0);
    let all = [&SKIPPED[..], &[ATOMIC]].concat();
    let mut seen = [0; 4];
    for port in 1..100 {
        let segment = siw_tcp_sim::forge::Tcp {
            ports: [port, 80],
            ..Default::default()
        };
        let frame = raw_host.ends.tcp(&segment);
        let Destination::Worker(worker) = steering.classify_frame(&frame) else {
            panic!("TCP has an owner")
        };
        seen[worker] += 1;
        assert_eq!(
            steering.classify_frame(&behind(&frame, &all)),
            Destination::Worker(worker)
        );
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    let everyone = behind(&raw_host.ends.solicit(), &all);
    assert_eq!(steering.classify_frame(&everyone), Destination::AllWorkers);
    for count in 0..everyone.len() {
        steering.classify_frame(&everyone[..count]);
    }
}
