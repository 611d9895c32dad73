//! ARP, NDP and ICMP.

use super::*;

/// RFC 1122 section 3.2.2.1.
#[test]
fn icmp_for_unknown_protocols_is_rate_limited() {
    let mut lab = Lab::new();
    let frame = ends("192.0.2.1").udp([53, 9999], &pattern(700));
    let replies = answers(&mut lab, frame.clone());
    assert_eq!(replies.len(), 1);
    let reply = &replies[0];
    assert_eq!(reply[..12], [RAW_HOST_MAC, HOST].concat());
    assert_eq!(reply[23], 1, "ICMP");
    assert_eq!(reply[34..36], [3, 2], "protocol unreachable");
    assert_eq!(reply.len(), 14 + 576);
    assert_eq!(reply[42..], frame[14..14 + 548], "it quotes what came");
    assert_eq!(common::wire::sum(&reply[34..], 0), [0, 0]);

    let frame = ends("2001:db8::1").udp([53, 9999], &pattern(1400));
    let replies = answers(&mut lab, frame.clone());
    assert_eq!(replies.len(), 1);
    let reply = &replies[0];
    assert_eq!(reply[20], 58, "ICMPv6");
    // RFC 4443 section 3.4: unrecognised next header, at byte 6.
    assert_eq!(
        (&reply[54..56], &reply[58..62]),
        (&[4, 1][..], &[0, 0, 0, 6][..])
    );
    assert_eq!(reply.len(), 14 + 1280);
    assert_eq!(reply[62..], frame[14..14 + 1232]);
    // RFC 8200 section 4.7: no next header, so no answer.
    assert!(answers(&mut lab, ends("2001:db8::1").ip(59, b"")).is_empty());

    let mut answered = 0;
    for i in 0..3000 {
        let from = ["192.0.2.1", "2001:db8::1"][i % 2];
        answered += answers(&mut lab, ends(from).udp([53, i as u16], b"scan")).len();
    }
    let counters = read_stats(&lab);
    assert_eq!(answered, 998);
    assert_eq!(
        (counters.net.icmp_out, counters.net.icmp_unreachables_out),
        (1000, 500)
    );
    assert_eq!(counters.net.icmp_parameter_problems_out, 500);
    assert_eq!(
        (counters.net.unknown_protocols, counters.net.control_drops),
        (3003, 2002)
    );
}

#[test]
fn arp_and_ndp_storms_are_answered_up_to_a_limit() {
    let mut lab = Lab::new();
    let (ids, _) = lab.connect_with_data();
    let before = read_stats(&lab);
    // Sent one at a time, each request is answered.
    for i in 0..200u8 {
        let endpoints = ends(&format!("10.0.0.{}", i.max(3)));
        let replies = answers(&mut lab, endpoints.arp(1));
        assert_eq!(replies.len(), 1);
        assert_eq!(
            (&replies[0][20..22], &replies[0][22..28]),
            (&[0, 2][..], &HOST[..])
        );
        let endpoints = ends(&format!("fd00::{:x}", 0x100 + u32::from(i)));
        let replies = answers(&mut lab, endpoints.solicit());
        assert_eq!((replies.len(), replies[0][54]), (1, 136));
    }
    // Sent at once, requests are answered until the queue is full; the rest is counted.
    for i in 0..5000u32 {
        let endpoints = ends(&format!("10.0.0.{}", 3 + i % 250));
        give(&mut lab, endpoints.arp(1));
        give(&mut lab, ends(&format!("fd00::{:x}:1", i + 1)).solicit());
    }
    let counters = read_stats(&lab);
    assert_eq!(counters.net.arp_in - before.net.arp_in, 5200);
    assert_eq!(counters.net.ndp_in - before.net.ndp_in, 5200);
    let out = counters.net.arp_out + counters.net.ndp_out - before.net.arp_out - before.net.ndp_out;
    assert_eq!((out, counters.net.control_drops), (400 + 256, 10_000 - 256));
    lab.run_ms(5);
    unharmed(&mut lab, ids);
}

#[test]
fn ndp_from_off_link_and_false_claims_change_nothing() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let server = lab.events[1].last().unwrap().0;
    let endpoints = ends("fd00::1");
    // RFC 4861 section 7.1: a hop limit below 255 means that the packet was forwarded.
    for mut frame in [endpoints.solicit(), endpoints.advertise()] {
        frame[21] = 254;
        assert!(answers(&mut lab, frame).is_empty());
    }
    assert_eq!(read_stats(&lab).net.martians, 2);
    lab.send(1, server, b"to the right one");
    lab.run_ms(10);
    assert_eq!(lab.read(0, client), b"to the right one");
}

/// RFC 4861 sections 7.2.3 and 7.3.3: the entry follows a claim, and unreachability detection finds
/// that nobody stands behind a false one.
#[test]
fn a_flow_outlives_false_claims() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let server = lab.events[1].last().unwrap().0;
    let mut endpoints = ends("fd00::1");
    let before = read_stats(&lab).net.ndp_out;
    for _ in 0..50 {
        give(&mut lab, endpoints.advertise());
        give(&mut lab, endpoints.solicit());
    }
    endpoints.ip = ends("10.0.0.1").ip;
    give(&mut lab, endpoints.arp(2));
    give(&mut lab, endpoints.arp(1));
    lab.send(1, server, b"after the claims");
    // Three probes, a second apart, and a solicitation to all.
    lab.run_ms(3_050);
    assert_eq!(lab.read(0, client), b"after the claims");
    let asked = read_stats(&lab).net.ndp_out - before - 50;
    assert!(asked <= 5, "{asked} solicitations");
    assert_eq!(
        lab.net.hosts[1].tcp_info(server).unwrap().state,
        TcpState::Established
    );
}

/// A flood of claims costs neither a solicitation nor a retransmission each, and a flow goes on after it.
#[test]
fn a_flow_outlives_a_flood_of_false_claims() {
    let mut lab = Lab::new();
    let ids = lab.connect();
    let endpoints = ends("10.0.0.1");
    lab.send(1, ids[1], b"during the flood");
    lab.run_ms(10);
    assert_eq!(lab.read(0, ids[0]), b"during the flood");
    let start = read_stats(&lab);
    lab.send(1, ids[1], b"after the flood");
    for tick in 0..2_000 {
        give(&mut lab, endpoints.arp(1 + tick as u8 % 2));
        lab.run_ms(10);
    }
    // Requests are answered.
    let asked = read_stats(&lab).net.arp_out - start.net.arp_out - 1_000;
    assert!(asked < 2 * 20, "{asked} solicitations in 20 s");
    let sent = read_stats(&lab).tcp.retrans_segs - start.tcp.retrans_segs;
    assert!(sent < 2 * 20, "{sent} retransmissions in 20 s");
    lab.run_ms(4_000);
    assert_eq!(lab.read(0, ids[0]), b"after the flood");
    lab.send(0, ids[0], b"both ways");
    lab.run_ms(100);
    assert_eq!(lab.read(1, ids[1]), b"both ways");
}
