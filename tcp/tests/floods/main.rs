//! Each kind of hostile frame by itself: it has its own counter, is bounded, and is answered as its RFC
//! requires. `hostile.rs` mixes them.

#[path = "../common/mod.rs"]
mod common;
mod link;

use std::net::IpAddr;

use common::wire::{ACK, FIN, Lab, PSH, RST, SYN, Seg, pattern};
use siw_net::{ConnId, FrameInfo, RxChecksum};
use siw_tcp::{Events, StackStats, TcpState};
use siw_tcp_sim::forge::{Ends, Tcp};
use siw_tcp_sim::{Rng, host_config};

const RAW_HOST_MAC: [u8; 6] = [2, 9, 9, 9, 9, 9];
const HOST: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// From a host that claims this address, to host 1.
fn ends(from: &str) -> Ends {
    let from: IpAddr = from.parse().unwrap();
    let to = if from.is_ipv4() {
        "10.0.0.2"
    } else {
        "fd00::2"
    };
    Ends {
        mac: [RAW_HOST_MAC, HOST],
        ip: [from, to.parse().unwrap()],
    }
}

fn give(lab: &mut Lab, frame: Vec<u8>) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, std::iter::once((frame.into(), info)));
}

/// Gives host 1 a frame and returns the frames that it sends in answer.
fn answers(lab: &mut Lab, frame: Vec<u8>) -> Vec<Vec<u8>> {
    give(lab, frame);
    let now = lab.net.now;
    lab.net.hosts[1].poll(now, &mut lab.net.sinks[1]);
    lab.net.sinks[1]
        .frames
        .drain(..)
        .map(|(frame, _)| frame)
        .collect()
}

fn read_stats(lab: &Lab) -> StackStats {
    lab.net.hosts[1].stats()
}

/// Checks that the connection still transfers data both ways.
fn unharmed(lab: &mut Lab, [client, server]: [ConnId; 2]) {
    let data = pattern(50_000);
    lab.send(0, client, &data);
    lab.send(1, server, &data);
    lab.run_ms(50);
    assert!(lab.read(1, server) == data && lab.read(0, client) == data);
    let over = Events::RESET | Events::TIMED_OUT | Events::CLOSED;
    assert!(!lab.got(0).intersects(over) && !lab.got(1).intersects(over));
}

/// Other peers can still connect (RFC 6583).
#[test]
fn syns_of_absent_neighbours_evict_nobody() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].net.neighbours.max_entries = 64;
    let mut lab = Lab::with(configs);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 400, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::1:1]:80".parse().unwrap(), 0)
        .unwrap();
    lab.net.hosts[0].release(now, client);
    let ids = lab.connect();
    lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(5);
    let before = read_stats(&lab);
    let mut rng = Rng::new(5);
    for round in 0..100 {
        for _ in 0..50 {
            let from = format!("fd00::{:x}:{:x}", 1 + rng.below(999), rng.below(0xffff));
            let segment = Tcp {
                ports: [1 + rng.below(60_000) as u16, 80],
                seq: rng.next_u64() as u32,
                flags: SYN,
                window: 1000,
                ..Tcp::default()
            };
            give(&mut lab, ends(&from).tcp(&segment));
        }
        // The neighbour in use is neither solicited again nor evicted.
        lab.send(0, ids[0], b"tick");
        lab.send(1, ids[1], b"tock");
        lab.run_ms(20);
        assert_eq!(lab.read(1, ids[1]), b"tick", "{round}");
        assert_eq!(lab.read(0, ids[0]), b"tock", "{round}");
    }
    let stats = read_stats(&lab);
    assert_eq!(stats.tcp.retrans_segs, before.tcp.retrans_segs);
    assert!(
        stats.tcp.cookies_sent > 4000,
        "beyond a quarter of the table: {stats:?}"
    );
    // One solicitation per second for each of those.
    assert!(
        stats.net.ndp_out - before.net.ndp_out < 16 * 8,
        "{}",
        stats.net.ndp_out
    );
    // A new peer without a neighbour entry can connect by a cookie.
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(20);
    assert_eq!(read_stats(&lab).tcp.cookies_recv, 1);
    unharmed(&mut lab, ids);
}

#[test]
fn resets_for_stray_acks_are_rate_limited() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let before = read_stats(&lab);
    let mut rng = Rng::new(6);
    let mut resets = 0;
    for i in 0..5000u32 {
        let segment = Tcp {
            ports: [1 + rng.below(60_000) as u16, 80 + (i % 2) as u16],
            seq: rng.next_u64() as u32,
            ack: rng.next_u64() as u32,
            flags: ACK,
            ..Tcp::default()
        };
        for frame in answers(&mut lab, ends("192.0.2.9").tcp(&segment)) {
            let seg = Seg::parse(1, &frame).unwrap();
            // RFC 9293 section 3.5.2, group 1.
            assert_eq!((seg.flags, seg.seq), (RST, segment.ack));
            resets += 1;
        }
    }
    let stats = read_stats(&lab);
    assert_eq!((resets, stats.tcp.out_rsts), (1000, 1000));
    assert_eq!(stats.tcp.resets_skipped, 4000);
    assert_eq!(stats.tcp.no_connection - before.tcp.no_connection, 5000);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
    // Resets that match no connection are not answered.
    let segment = Tcp {
        ports: [9, 80],
        flags: RST | ACK,
        ..Tcp::default()
    };
    assert!(answers(&mut lab, ends("192.0.2.9").tcp(&segment)).is_empty());
    assert_eq!(
        read_stats(&lab).tcp.no_connection - before.tcp.no_connection,
        5001
    );
}

/// RFC 5961 section 5.
#[test]
fn challenges_of_impossible_acks_are_rate_limited() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let before = read_stats(&lab);
    let mut answered = 0;
    for i in 0..5000u32 {
        let mut segment = good.clone();
        // Acknowledges data never sent, or far older than the data in flight.
        let off = if i % 2 == 0 { 1 + i } else { 0x8000_0000 + i };
        segment.ack = segment.ack.wrapping_add(off);
        for frame in answers(&mut lab, segment.frame()) {
            let segment = Seg::parse(1, &frame).unwrap();
            assert_eq!((segment.flags, segment.ack), (ACK, good.seq));
            answered += 1;
        }
    }
    let stats = read_stats(&lab);
    assert_eq!(stats.tcp.bad_acks - before.tcp.bad_acks, 5000);
    let sent = stats.tcp.challenge_acks - before.tcp.challenge_acks;
    assert_eq!(sent, 8, "the limit of one connection");
    assert_eq!(
        (answered, stats.tcp.challenges_skipped),
        (sent, 5000 - sent)
    );
    // ACKs that acknowledge nothing new are counted, and not answered.
    for _ in 0..1000 {
        assert!(answers(&mut lab, good.frame()).is_empty());
    }
    assert_eq!(
        read_stats(&lab).tcp.pure_acks_in - stats.tcp.pure_acks_in,
        1000
    );
    lab.run_ms(1500);
    unharmed(&mut lab, ids);
}

/// RFC 5961 sections 3 and 4.
#[test]
fn challenges_of_blind_segments_are_rate_limited() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let before = read_stats(&lab);
    let (mut answered, mut syns) = (0, 0);
    for i in 1..=4000u32 {
        let mut segment = good.clone();
        segment.flags = if i % 2 == 0 { SYN } else { RST };
        segment.seq = segment.seq.wrapping_add(i);
        syns += u64::from(segment.flags == SYN);
        answered += answers(&mut lab, segment.frame()).len() as u64;
    }
    let segment = read_stats(&lab);
    let sent = segment.tcp.challenge_acks - before.tcp.challenge_acks;
    assert_eq!(sent, answered);
    assert_eq!(sent, 8, "the limit of one connection");
    assert_eq!(segment.tcp.challenges_skipped, 4000 - sent);
    assert_eq!(segment.tcp.syn_challenges, syns);
    // A SYN is answered on the connection at any sequence number, and without timestamps too, so that a
    // peer that has lost the connection learns to reset it (RFC 9293 section 3.5.1).
    lab.run_ms(1500);
    for (off, timestamps) in [(1 << 30, true), (0x9000_0000u32, true), (77, false)] {
        let mut segment = good.clone();
        segment.flags = SYN;
        segment.seq = segment.seq.wrapping_add(off);
        if !timestamps {
            segment.options.clear();
        }
        let replies = answers(&mut lab, segment.frame());
        let answers: Vec<_> = replies
            .iter()
            .map(|frame| Seg::parse(1, frame).unwrap())
            .collect();
        assert_eq!(answers.len(), 1);
        assert_eq!((answers[0].flags, answers[0].ack), (ACK, good.seq));
    }
    // Beyond the window, a reset is not answered.
    let before = read_stats(&lab);
    let mut far = good.clone();
    far.flags = RST;
    far.seq = far.seq.wrapping_add(1 << 30);
    assert!(answers(&mut lab, far.frame()).is_empty());
    assert_eq!(
        read_stats(&lab).tcp.out_of_window,
        before.tcp.out_of_window + 1
    );
    unharmed(&mut lab, ids);
}

#[test]
fn timestamps_beside_an_impossible_ack_are_ignored() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let mut segment = good.clone();
    segment.ack = segment.ack.wrapping_add(1 << 30);
    let (value, _) = segment.ts().unwrap();
    segment.options[4..8].copy_from_slice(&value.wrapping_add(1 << 30).to_be_bytes());
    give(&mut lab, segment.frame());
    assert_eq!(read_stats(&lab).tcp.bad_acks, 1);
    unharmed(&mut lab, ids);
    assert_eq!(read_stats(&lab).tcp.paws_drops, 0);
}

#[test]
fn overlapping_segments_deliver_each_byte_once() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let before = read_stats(&lab);
    let bytes = |at: u32, len: usize, what: u8| {
        let mut segment = good.clone();
        segment.seq = segment.seq.wrapping_add(at);
        segment.flags = ACK | PSH;
        segment.payload = vec![what; len];
        segment.frame()
    };
    // First beyond a hole, then overlapping both its sides, then overlapping everything. Held data is
    // kept; data in order is delivered before held data.
    give(&mut lab, bytes(100, 100, 1));
    give(&mut lab, bytes(150, 100, 2));
    give(&mut lab, bytes(50, 100, 3));
    give(&mut lab, bytes(0, 60, 4));
    give(&mut lab, bytes(0, 250, 5));
    let got = lab.read(1, ids[1]);
    let want = [[4; 60].as_slice(), &[3; 40], &[1; 100], &[2; 50]].concat();
    assert_eq!(got, want);
    let counters = read_stats(&lab);
    let twice = counters.tcp.dup_bytes_in - before.tcp.dup_bytes_in;
    assert_eq!(twice, 50 + 50 + 250);
    assert_eq!(counters.tcp.in_bytes - before.tcp.in_bytes, 250);
    lab.net.poll();
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
}

/// RFC 9293 section 3.10.7.4.
#[test]
fn segments_outside_the_window_are_acknowledged() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let before = read_stats(&lab);
    for i in 0..500u32 {
        let mut segment = good.clone();
        let off = if i % 2 == 0 { 1 << 28 } else { 0xf000_0000 };
        segment.seq = segment.seq.wrapping_add(off + i);
        segment.payload = vec![7; 20];
        let replies = answers(&mut lab, segment.frame());
        assert_eq!(replies.len(), 1);
        let segment = Seg::parse(1, &replies[0]).unwrap();
        assert_eq!(
            (segment.flags, segment.ack, segment.payload.len()),
            (ACK, good.seq, 0)
        );
    }
    // A burst of them gets one answer.
    let far = Seg {
        seq: good.seq.wrapping_add(1 << 28),
        payload: vec![7; 20],
        ..good.clone()
    };
    (0..99).for_each(|_| give(&mut lab, far.frame()));
    assert_eq!(answers(&mut lab, far.frame()).len(), 1);
    assert_eq!(
        read_stats(&lab).tcp.out_of_window - before.tcp.out_of_window,
        600
    );
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
    unharmed(&mut lab, ids);
}

/// RFC 9293 MUST-7.
#[test]
fn malformed_options_are_counted_and_end_nothing() {
    let mut lab = Lab::new();
    let (ids, good) = lab.connect_with_data();
    let before = read_stats(&lab);
    let garbage: [&[u8]; 5] = [
        &[254, 0, 0, 0],
        &[1, 1, 1, 5],
        &[254, 255, 0, 0],
        &[5, 3, 1, 1],
        &[8, 0, 0, 0],
    ];
    for garbage_option in garbage {
        // After the timestamps, which remain valid.
        let mut segment = good.clone();
        segment.options.extend(garbage_option);
        assert!(answers(&mut lab, segment.frame()).is_empty());
        // A handshake with these options proceeds as without options.
        let syn = Tcp {
            ports: [2000, 80],
            seq: 7,
            flags: SYN,
            window: 1000,
            options: garbage_option,
            ..Tcp::default()
        };
        let mut endpoints = ends("10.0.0.1");
        endpoints.mac[0] = [2, 0, 0, 0, 0, 1];
        let replies = answers(&mut lab, endpoints.tcp(&syn));
        let segment = Seg::parse(1, &replies[0]).unwrap();
        assert_eq!((segment.flags, segment.ack), (SYN | ACK, 8));
        assert_eq!(segment.options.len(), 4, "MSS alone: {:?}", segment.options);
        let abort = Tcp {
            flags: RST,
            seq: 8,
            ..syn
        };
        give(&mut lab, endpoints.tcp(&abort));
    }
    assert_eq!(
        read_stats(&lab).tcp.bad_options - before.tcp.bad_options,
        15
    );
    assert_eq!(read_stats(&lab).tcp.out_rsts, before.tcp.out_rsts);
    unharmed(&mut lab, ids);
}

/// RFC 1122 section 3.2.1.3.
#[test]
fn martians_are_counted_and_not_answered() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let syn = Tcp {
        ports: [9, 80],
        flags: SYN,
        ..Tcp::default()
    };
    let mut sent = 0;
    // Source addresses: our own (LAND), loopback, unspecified, multicast, broadcast.
    for from in [
        "10.0.0.2",
        "127.0.0.1",
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "255.255.255.255",
        "10.0.0.255",
        "10.0.0.0",
        "fd00::2",
        "::1",
        "ff02::1",
    ] {
        let endpoints = ends(from);
        let echo = if endpoints.ip[0].is_ipv4() { 8 } else { 128 };
        for frame in [
            endpoints.tcp(&syn),
            endpoints.icmp([echo, 0], [0, 7, 0, 1], b"smurf"),
            endpoints.udp([9, 9], b"fraggle"),
        ] {
            assert!(answers(&mut lab, frame).is_empty(), "{from}");
            sent += 1;
        }
    }
    // A source that is a group address on the link.
    let mut endpoints = ends("10.0.0.1");
    endpoints.mac[0] = [0xff; 6];
    for frame in [
        endpoints.tcp(&syn),
        endpoints.arp(1),
        endpoints.icmp([8, 0], [0; 4], b""),
    ] {
        assert!(answers(&mut lab, frame).is_empty());
        sent += 1;
    }
    // To a group address of the link, from a valid source address.
    let mut endpoints = ends("10.0.0.1");
    endpoints.mac[1] = [0xff; 6];
    assert!(answers(&mut lab, endpoints.tcp(&syn)).is_empty());
    assert!(
        answers(&mut lab, endpoints.udp([9, 9], b"")).is_empty(),
        "RFC 1122 section 3.2.2"
    );
    sent += 1;
    assert_eq!(read_stats(&lab).net.martians, sent);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
    // The unspecified address may be the source of duplicate address detection (RFC 4862), which is
    // answered.
    let mut endpoints = ends("::1");
    endpoints.ip = ["::", "ff02::1:ff00:2"].map(|address| address.parse().unwrap());
    let target = "fd00::2".parse().unwrap();
    let replies = answers(&mut lab, endpoints.solicitation(target, &[]));
    assert_eq!(
        (replies.len(), &replies[0][..6]),
        (1, &[0x33, 0x33, 0, 0, 0, 1][..])
    );
}

/// RFC 9293 sections 3.10.7.1 and 3.10.7.2.
#[test]
fn a_port_scan_is_counted_and_answered_with_resets() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let endpoints = ends("192.0.2.1");
    let scan = |flags, port| {
        endpoints.tcp(&Tcp {
            ports: [40_000, port],
            seq: 500,
            ack: 900,
            flags,
            window: 1024,
            ..Tcp::default()
        })
    };
    // Section 3.10.7.1: with an ACK, the reset uses its number; otherwise it acknowledges the segment.
    for (flags, want) in [
        (SYN, (RST | ACK, 0, 501)),
        (ACK, (RST, 900, 0)),
        (SYN | ACK, (RST, 900, 0)),
        (FIN, (RST | ACK, 0, 501)),
        (0, (RST | ACK, 0, 500)),
        (FIN | PSH | 32, (RST | ACK, 0, 501)),
    ] {
        let replies = answers(&mut lab, scan(flags, 81));
        assert_eq!(replies.len(), 1, "{flags:#x}");
        let segment = Seg::parse(1, &replies[0]).unwrap();
        assert_eq!(
            (segment.flags, segment.seq, segment.ack),
            want,
            "{flags:#x}"
        );
    }
    assert!(answers(&mut lab, scan(RST, 81)).is_empty());
    let stats = read_stats(&lab);
    assert_eq!((stats.tcp.no_ports, stats.tcp.no_connection), (2, 5));
    // Section 3.10.7.2: a listener answers ACKs with a reset, and ignores other segments without SYN.
    for (flags, count) in [(FIN, 0), (0, 0), (FIN | PSH | 32, 0), (ACK, 1), (RST, 0)] {
        assert_eq!(
            answers(&mut lab, scan(flags, 80)).len(),
            count,
            "{flags:#x}"
        );
    }
    assert_eq!(read_stats(&lab).tcp.no_connection, 10);
    // Scan all ports.
    let before = read_stats(&lab);
    for port in 1..=u16::MAX {
        if port != 80 {
            answers(&mut lab, scan(SYN, port));
        }
    }
    let stats = read_stats(&lab);
    assert_eq!(stats.tcp.no_ports - before.tcp.no_ports, 65534);
    assert_eq!(stats.tcp.out_rsts, 1000);
    assert_eq!(
        stats.tcp.out_rsts - before.tcp.out_rsts + stats.tcp.resets_skipped,
        65534
    );
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
}
