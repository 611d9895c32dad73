//! Each kind of hostile frame by itself: counted under its name, bounded, answered as its RFC
//! says. `hostile.rs` has what mixes them.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::wire::{ACK, FIN, Lab, PSH, RST, SYN, Seg, pattern};
use siw_tcp::sim::forge::{Ends, Tcp};
use siw_tcp::sim::{Rng, host_config};
use siw_tcp::{ConnId, Events, FrameInfo, RxChecksum, StackStats, TcpState};

const STRANGER: [u8; 6] = [2, 9, 9, 9, 9, 9];
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
        mac: [STRANGER, HOST],
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

/// What host 1 sends in answer to a frame.
fn answers(lab: &mut Lab, frame: Vec<u8>) -> Vec<Vec<u8>> {
    give(lab, frame);
    let now = lab.net.now;
    lab.net.hosts[1].poll(now, &mut lab.net.sinks[1]);
    lab.net.sinks[1].frames.drain(..).map(|(f, _)| f).collect()
}

fn stats(lab: &Lab) -> StackStats {
    lab.net.hosts[1].stats().clone()
}

/// A connection to host 1 over which a segment has gone, and what would come next on it.
fn established(lab: &mut Lab) -> ([ConnId; 2], Seg) {
    let ids = lab.connect();
    lab.send(0, ids[0], b"x");
    lab.run_ms(5);
    assert_eq!(lab.read(1, ids[1]), b"x");
    lab.run_ms(5);
    (ids, lab.forge(0))
}

/// The connection still carries everything both ways.
fn unharmed(lab: &mut Lab, [a, b]: [ConnId; 2]) {
    let data = pattern(50_000);
    lab.send(0, a, &data);
    lab.send(1, b, &data);
    lab.run_ms(50);
    assert!(lab.read(1, b) == data && lab.read(0, a) == data);
    let over = Events::RESET | Events::TIMED_OUT | Events::CLOSED;
    assert!(!lab.got(0).intersects(over) && !lab.got(1).intersects(over));
}

/// Others still connect (RFC 6583).
#[test]
fn syns_of_absent_neighbours_evict_nobody() {
    let mut c = [host_config(0), host_config(1)];
    c[1].neighbours.max_entries = 64;
    let mut lab = Lab::with(c);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 400, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::1:1]:80".parse().unwrap(), 0)
        .unwrap();
    lab.net.hosts[0].release(now, a);
    let ids = lab.connect();
    lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(5);
    let before = stats(&lab);
    let mut rng = Rng::new(5);
    for round in 0..100 {
        for _ in 0..50 {
            let from = format!("fd00::{:x}:{:x}", 1 + rng.below(999), rng.below(0xffff));
            let t = Tcp {
                ports: [1 + rng.below(60_000) as u16, 80],
                seq: rng.next_u64() as u32,
                flags: SYN,
                window: 1000,
                ..Tcp::default()
            };
            give(&mut lab, ends(&from).tcp(&t));
        }
        // The neighbour in use is asked for by nobody again, and forgotten by nobody.
        lab.send(0, ids[0], b"tick");
        lab.send(1, ids[1], b"tock");
        lab.run_ms(20);
        assert_eq!(lab.read(1, ids[1]), b"tick", "{round}");
        assert_eq!(lab.read(0, ids[0]), b"tock", "{round}");
    }
    let s = stats(&lab);
    assert_eq!(s.retrans_segs, before.retrans_segs);
    assert!(
        s.cookies_sent > 4000,
        "beyond a quarter of the table: {s:?}"
    );
    // One solicitation a second for each of those.
    assert!(s.ndp_out - before.ndp_out < 16 * 8, "{}", s.ndp_out);
    // A newcomer whom nobody knows is let in by a cookie.
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(20);
    assert_eq!(stats(&lab).cookies_recv, 1);
    unharmed(&mut lab, ids);
}

#[test]
fn resets_for_stray_acks_are_rate_limited() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let before = stats(&lab);
    let mut rng = Rng::new(6);
    let mut resets = 0;
    for i in 0..5000u32 {
        let t = Tcp {
            ports: [1 + rng.below(60_000) as u16, 80 + (i % 2) as u16],
            seq: rng.next_u64() as u32,
            ack: rng.next_u64() as u32,
            flags: ACK,
            ..Tcp::default()
        };
        for f in answers(&mut lab, ends("192.0.2.9").tcp(&t)) {
            let r = Seg::parse(1, &f).unwrap();
            // RFC 9293 section 3.5.2, group 1.
            assert_eq!((r.flags, r.seq), (RST, t.ack));
            resets += 1;
        }
    }
    let s = stats(&lab);
    assert_eq!((resets, s.out_rsts), (1000, 1000));
    assert_eq!(s.resets_skipped, 4000);
    assert_eq!(s.no_connection - before.no_connection, 5000);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
    // Resets of no connection are answered by nobody.
    let t = Tcp {
        ports: [9, 80],
        flags: RST | ACK,
        ..Tcp::default()
    };
    assert!(answers(&mut lab, ends("192.0.2.9").tcp(&t)).is_empty());
    assert_eq!(stats(&lab).no_connection - before.no_connection, 5001);
}

/// RFC 5961 section 5.
#[test]
fn challenges_of_impossible_acks_are_rate_limited() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let before = stats(&lab);
    let mut answered = 0;
    for i in 0..5000u32 {
        let mut s = good.clone();
        // Never sent, or long before anything that is in flight.
        let off = if i % 2 == 0 { 1 + i } else { 0x8000_0000 + i };
        s.ack = s.ack.wrapping_add(off);
        for f in answers(&mut lab, s.frame()) {
            let r = Seg::parse(1, &f).unwrap();
            assert_eq!((r.flags, r.ack), (ACK, good.seq));
            answered += 1;
        }
    }
    let s = stats(&lab);
    assert_eq!(s.bad_acks - before.bad_acks, 5000);
    let sent = s.challenge_acks - before.challenge_acks;
    assert!((500..1500).contains(&sent), "{sent}");
    assert_eq!((answered, s.challenges_skipped), (sent, 5000 - sent));
    // Those that say nothing new are counted, and answered by nobody.
    for _ in 0..1000 {
        assert!(answers(&mut lab, good.frame()).is_empty());
    }
    assert_eq!(stats(&lab).pure_acks_in - s.pure_acks_in, 1000);
    lab.run_ms(1500);
    unharmed(&mut lab, ids);
}

/// RFC 5961 sections 3 and 4.
#[test]
fn challenges_of_blind_segments_are_rate_limited() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let before = stats(&lab);
    let (mut answered, mut syns) = (0, 0);
    for i in 1..=4000u32 {
        let mut s = good.clone();
        s.flags = if i % 2 == 0 { SYN } else { RST };
        s.seq = s.seq.wrapping_add(i);
        syns += u64::from(s.flags == SYN);
        answered += answers(&mut lab, s.frame()).len() as u64;
    }
    let s = stats(&lab);
    let sent = s.challenge_acks - before.challenge_acks;
    assert_eq!(sent, answered);
    assert!((500..1500).contains(&sent), "{sent}");
    assert_eq!(s.challenges_skipped, 4000 - sent);
    assert_eq!(s.syn_challenges, syns);
    // A SYN is answered with the connection wherever it lies, and without timestamps too: so a peer
    // that has forgotten it learns to reset it (RFC 9293 section 3.5.1).
    lab.run_ms(1500);
    for (off, timestamps) in [(1 << 30, true), (0x9000_0000u32, true), (77, false)] {
        let mut s = good.clone();
        s.flags = SYN;
        s.seq = s.seq.wrapping_add(off);
        if !timestamps {
            s.options.clear();
        }
        let a = answers(&mut lab, s.frame());
        let answers: Vec<_> = a.iter().map(|f| Seg::parse(1, f).unwrap()).collect();
        assert_eq!(answers.len(), 1);
        assert_eq!((answers[0].flags, answers[0].ack), (ACK, good.seq));
    }
    // Beyond the window, a reset is not worth a word.
    let before = stats(&lab);
    let mut far = good.clone();
    far.flags = RST;
    far.seq = far.seq.wrapping_add(1 << 30);
    assert!(answers(&mut lab, far.frame()).is_empty());
    assert_eq!(stats(&lab).out_of_window, before.out_of_window + 1);
    unharmed(&mut lab, ids);
}

#[test]
fn timestamps_beside_an_impossible_ack_are_ignored() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let mut s = good.clone();
    s.ack = s.ack.wrapping_add(1 << 30);
    let (value, _) = s.ts().unwrap();
    s.options[4..8].copy_from_slice(&value.wrapping_add(1 << 30).to_be_bytes());
    give(&mut lab, s.frame());
    assert_eq!(stats(&lab).bad_acks, 1);
    unharmed(&mut lab, ids);
    assert_eq!(stats(&lab).paws_drops, 0);
}

#[test]
fn overlapping_segments_deliver_each_byte_once() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let before = stats(&lab);
    let bytes = |at: u32, len: usize, what: u8| {
        let mut s = good.clone();
        s.seq = s.seq.wrapping_add(at);
        s.flags = ACK | PSH;
        s.payload = vec![what; len];
        s.frame()
    };
    // Beyond a hole, then over both its sides, then over everything. What is held stays; what
    // is in order goes before what is held.
    give(&mut lab, bytes(100, 100, 1));
    give(&mut lab, bytes(150, 100, 2));
    give(&mut lab, bytes(50, 100, 3));
    give(&mut lab, bytes(0, 60, 4));
    give(&mut lab, bytes(0, 250, 5));
    let got = lab.read(1, ids[1]);
    let want = [[4; 60].as_slice(), &[3; 40], &[1; 100], &[2; 50]].concat();
    assert_eq!(got, want);
    let s = stats(&lab);
    let twice = s.dup_bytes_in - before.dup_bytes_in;
    assert_eq!(twice, 50 + 50 + 250);
    assert_eq!(s.in_bytes - before.in_bytes, 250);
    lab.net.poll();
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
}

/// RFC 9293 section 3.10.7.4.
#[test]
fn segments_outside_the_window_are_acknowledged() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let before = stats(&lab);
    for i in 0..500u32 {
        let mut s = good.clone();
        let off = if i % 2 == 0 { 1 << 28 } else { 0xf000_0000 };
        s.seq = s.seq.wrapping_add(off + i);
        s.payload = vec![7; 20];
        let a = answers(&mut lab, s.frame());
        assert_eq!(a.len(), 1);
        let r = Seg::parse(1, &a[0]).unwrap();
        assert_eq!((r.flags, r.ack, r.payload.len()), (ACK, good.seq, 0));
    }
    // A burst gets one answer.
    let far = Seg {
        seq: good.seq.wrapping_add(1 << 28),
        payload: vec![7; 20],
        ..good.clone()
    };
    (0..99).for_each(|_| give(&mut lab, far.frame()));
    assert_eq!(answers(&mut lab, far.frame()).len(), 1);
    assert_eq!(stats(&lab).out_of_window - before.out_of_window, 600);
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
    unharmed(&mut lab, ids);
}

/// RFC 9293 MUST-7.
#[test]
fn malformed_options_are_counted_and_end_nothing() {
    let mut lab = Lab::new();
    let (ids, good) = established(&mut lab);
    let before = stats(&lab);
    let garbage: [&[u8]; 5] = [
        &[254, 0, 0, 0],
        &[1, 1, 1, 5],
        &[254, 255, 0, 0],
        &[5, 3, 1, 1],
        &[8, 0, 0, 0],
    ];
    for o in garbage {
        // Behind the timestamps, which count.
        let mut s = good.clone();
        s.options.extend(o);
        assert!(answers(&mut lab, s.frame()).is_empty());
        // A handshake with them is one without options.
        let t = Tcp {
            ports: [2000, 80],
            seq: 7,
            flags: SYN,
            window: 1000,
            options: o,
            ..Tcp::default()
        };
        let mut e = ends("10.0.0.1");
        e.mac[0] = [2, 0, 0, 0, 0, 1];
        let a = answers(&mut lab, e.tcp(&t));
        let r = Seg::parse(1, &a[0]).unwrap();
        assert_eq!((r.flags, r.ack), (SYN | ACK, 8));
        assert_eq!(r.options.len(), 4, "MSS alone: {:?}", r.options);
        let abort = Tcp {
            flags: RST,
            seq: 8,
            ..t
        };
        give(&mut lab, e.tcp(&abort));
    }
    assert_eq!(stats(&lab).bad_options - before.bad_options, 15);
    assert_eq!(stats(&lab).out_rsts, before.out_rsts);
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
    // Ourselves (LAND), loopback, nobody, groups, everybody.
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
        let e = ends(from);
        let echo = if e.ip[0].is_ipv4() { 8 } else { 128 };
        for f in [
            e.tcp(&syn),
            e.icmp([echo, 0], [0, 7, 0, 1], b"smurf"),
            e.udp([9, 9], b"fraggle"),
        ] {
            assert!(answers(&mut lab, f).is_empty(), "{from}");
            sent += 1;
        }
    }
    // A sender that is a group on the link.
    let mut e = ends("10.0.0.1");
    e.mac[0] = [0xff; 6];
    for f in [e.tcp(&syn), e.arp(1), e.icmp([8, 0], [0; 4], b"")] {
        assert!(answers(&mut lab, f).is_empty());
        sent += 1;
    }
    // To a group of the link, from a good address.
    let mut e = ends("10.0.0.1");
    e.mac[1] = [0xff; 6];
    assert!(answers(&mut lab, e.tcp(&syn)).is_empty());
    assert!(
        answers(&mut lab, e.udp([9, 9], b"")).is_empty(),
        "RFC 1122 section 3.2.2"
    );
    sent += 1;
    assert_eq!(stats(&lab).martians, sent);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
    // The address of nobody may ask whether an address is free (RFC 4862), and is told.
    let mut e = ends("::1");
    e.ip[0] = "::".parse().unwrap();
    let a = answers(&mut lab, e.solicit());
    assert_eq!((a.len(), &a[0][..6]), (1, &[0x33, 0x33, 0, 0, 0, 1][..]));
}

/// RFC 9293 sections 3.10.7.1 and 3.10.7.2.
#[test]
fn a_port_scan_is_counted_and_answered_with_resets() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let e = ends("192.0.2.1");
    let scan = |flags, port| {
        e.tcp(&Tcp {
            ports: [40_000, port],
            seq: 500,
            ack: 900,
            flags,
            window: 1024,
            ..Tcp::default()
        })
    };
    // Section 3.10.7.1: with an ACK, as it says; else after what came.
    for (flags, want) in [
        (SYN, (RST | ACK, 0, 501)),
        (ACK, (RST, 900, 0)),
        (SYN | ACK, (RST, 900, 0)),
        (FIN, (RST | ACK, 0, 501)),
        (0, (RST | ACK, 0, 500)),
        (FIN | PSH | 32, (RST | ACK, 0, 501)),
    ] {
        let a = answers(&mut lab, scan(flags, 81));
        assert_eq!(a.len(), 1, "{flags:#x}");
        let r = Seg::parse(1, &a[0]).unwrap();
        assert_eq!((r.flags, r.seq, r.ack), want, "{flags:#x}");
    }
    assert!(answers(&mut lab, scan(RST, 81)).is_empty());
    let s = stats(&lab);
    assert_eq!((s.no_ports, s.no_connection), (2, 5));
    // Section 3.10.7.2: a listener answers ACKs with a reset, and drops what is nothing.
    for (flags, n) in [(FIN, 0), (0, 0), (FIN | PSH | 32, 0), (ACK, 1), (RST, 0)] {
        assert_eq!(answers(&mut lab, scan(flags, 80)).len(), n, "{flags:#x}");
    }
    assert_eq!(stats(&lab).no_connection, 10);
    // All of them.
    let before = stats(&lab);
    for port in 1..=u16::MAX {
        if port != 80 {
            answers(&mut lab, scan(SYN, port));
        }
    }
    let s = stats(&lab);
    assert_eq!(s.no_ports - before.no_ports, 65534);
    assert_eq!(s.out_rsts, 1000);
    assert_eq!(s.out_rsts - before.out_rsts + s.resets_skipped, 65534);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
}

/// RFC 1122 section 3.2.2.1.
#[test]
fn icmp_for_unknown_protocols_is_rate_limited() {
    let mut lab = Lab::new();
    let f = ends("192.0.2.1").udp([53, 4791], &pattern(700));
    let a = answers(&mut lab, f.clone());
    assert_eq!(a.len(), 1);
    let a = &a[0];
    assert_eq!(a[..12], [STRANGER, HOST].concat());
    assert_eq!(a[23], 1, "ICMP");
    assert_eq!(a[34..36], [3, 2], "protocol unreachable");
    assert_eq!(a.len(), 14 + 576);
    assert_eq!(a[42..], f[14..14 + 548], "it quotes what came");
    assert_eq!(common::wire::sum(&a[34..], 0), [0, 0]);

    let f = ends("2001:db8::1").udp([53, 4791], &pattern(1400));
    let a = answers(&mut lab, f.clone());
    assert_eq!(a.len(), 1);
    let a = &a[0];
    assert_eq!(a[20], 58, "ICMPv6");
    // RFC 4443 section 3.4: unrecognised next header, at byte 6.
    assert_eq!((&a[54..56], &a[58..62]), (&[4, 1][..], &[0, 0, 0, 6][..]));
    assert_eq!(a.len(), 14 + 1280);
    assert_eq!(a[62..], f[14..14 + 1232]);
    // RFC 8200 section 4.7: nothing follows, nothing is said.
    assert!(answers(&mut lab, ends("2001:db8::1").ip(59, b"")).is_empty());

    let mut told = 0;
    for i in 0..3000 {
        let from = ["192.0.2.1", "2001:db8::1"][i % 2];
        told += answers(&mut lab, ends(from).udp([53, i as u16], b"scan")).len();
    }
    let s = stats(&lab);
    assert_eq!(told, 998);
    assert_eq!((s.icmp_out, s.icmp_unreachables_out), (1000, 500));
    assert_eq!(s.icmp_parameter_problems_out, 500);
    assert_eq!((s.unknown_protocols, s.control_drops), (3003, 2002));
}

#[test]
fn arp_and_ndp_storms_are_answered_while_there_is_room() {
    let mut lab = Lab::new();
    let (ids, _) = established(&mut lab);
    let before = stats(&lab);
    // One by one each question gets its answer.
    for i in 0..200u8 {
        let e = ends(&format!("10.0.0.{}", i.max(3)));
        let a = answers(&mut lab, e.arp(1));
        assert_eq!(a.len(), 1);
        assert_eq!((&a[0][20..22], &a[0][22..28]), (&[0, 2][..], &HOST[..]));
        let e = ends(&format!("fd00::{:x}", 0x100 + u32::from(i)));
        let a = answers(&mut lab, e.solicit());
        assert_eq!((a.len(), a[0][54]), (1, 136));
    }
    // All at once, as many as the queue holds; the rest is counted.
    for i in 0..5000u32 {
        let e = ends(&format!("10.0.0.{}", 3 + i % 250));
        give(&mut lab, e.arp(1));
        give(&mut lab, ends(&format!("fd00::{:x}:1", i + 1)).solicit());
    }
    let s = stats(&lab);
    assert_eq!(s.arp_in - before.arp_in, 5200);
    assert_eq!(s.ndp_in - before.ndp_in, 5200);
    let out = s.arp_out + s.ndp_out - before.arp_out - before.ndp_out;
    assert_eq!((out, s.control_drops), (400 + 256, 10_000 - 256));
    lab.run_ms(5);
    unharmed(&mut lab, ids);
}

#[test]
fn ndp_from_off_link_and_false_claims_change_nothing() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let b = lab.events[1].last().unwrap().0;
    let mut e = ends("fd00::1");
    // RFC 4861 section 7.1: a hop limit below 255 was forwarded.
    for mut f in [e.solicit(), e.advertise()] {
        f[21] = 254;
        assert!(answers(&mut lab, f).is_empty());
    }
    assert_eq!(stats(&lab).martians, 2);
    // Host 0's address at that host: unasked for, and in a question.
    for _ in 0..50 {
        give(&mut lab, e.advertise());
        give(&mut lab, e.solicit());
    }
    e.ip = ends("10.0.0.1").ip;
    give(&mut lab, e.arp(2));
    give(&mut lab, e.arp(1));
    lab.run_ms(10);
    lab.send(1, b, b"to the right one");
    lab.run_ms(10);
    assert_eq!(lab.read(0, a), b"to the right one");
    // It asked the one it knew, once.
    assert!(stats(&lab).ndp_out <= 52 + 2, "{}", stats(&lab).ndp_out);
    lab.net.run(Duration::from_secs(5), |_| false);
    lab.send(1, b, b"still");
    lab.run_ms(10);
    assert_eq!(lab.read(0, a), b"still");
    assert_eq!(
        lab.net.hosts[1].tcp_info(b).unwrap().state,
        TcpState::Established
    );
}

#[test]
fn false_claims_on_a_lossy_link_divert_no_flow() {
    let mut lab = Lab::new();
    let ids = lab.connect();
    let e = ends("10.0.0.1");
    let mut rng = Rng::new(9);
    // As a flood makes a receive ring lose: what would disprove the claims, too.
    lab.lose(move |from, f| from == 0 && f[12..14] == [8, 6] && rng.chance(0.4));
    let start = stats(&lab).arp_out;
    for tick in 0..12_000 {
        give(&mut lab, e.arp(1 + tick as u8 % 2));
        if tick % 100 == 0 {
            lab.send(1, ids[1], b"to the right one");
        }
        lab.run_ms(10);
        if tick % 100 == 0 {
            assert_eq!(lab.read(0, ids[0]), b"to the right one", "after {tick}0 ms");
        }
    }
    // Each is no reason to ask, let alone to be told.
    let asked = stats(&lab).arp_out - start - 6000;
    assert!(asked < 4 * 120, "{asked}");
}
