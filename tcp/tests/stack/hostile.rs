//! Unknown peers, floods and malformed segments; and the protocols other than TCP.

use std::time::Duration;

use crate::common::wire::{ACK, Lab, PSH, SYN, Seg, pattern, sum};
use siw_net::{FrameInfo, RxChecksum, VecBuf};
use siw_tcp::{Events, TcpState};
use siw_tcp_sim::{Rng, host_config};

fn give(lab: &mut Lab, host: usize, frame: Vec<u8>) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[host].receive_burst(now, std::iter::once((VecBuf::from(frame), info)));
}

fn syn(sport: u16, dport: u16) -> Seg {
    Seg {
        from: 0,
        sport,
        dport,
        seq: 99,
        flags: SYN,
        window: 1000,
        ..Seg::default()
    }
}

/// RFC 4987.
#[test]
fn a_syn_flood_is_bounded_by_the_backlog() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.syn_retries = 1;
    configs[1].tcp.syn_cookies = false;
    let mut lab = Lab::with(configs);
    lab.net.hosts[1].listen(None, 80, 20, 0).unwrap();
    for port in 1..2000 {
        give(&mut lab, 1, syn(port, 80).frame());
    }
    assert_eq!(lab.net.hosts[1].connection_count(), 20);
    assert!(lab.net.hosts[1].stats().tcp.listen_overflows > 1900);
    // The source of the flood never answers.
    lab.lose(|from, _| from == 0);
    lab.run_ms(10_000);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
    assert!(
        lab.net.hosts[1].next_event().is_none(),
        "nobody hears of half-open connections"
    );
    lab.lose(|_, _| false);
    lab.connect();
}

#[test]
fn resets_of_unknown_segments_are_rate_limited() {
    let mut lab = Lab::new();
    for port in 1..5000 {
        give(&mut lab, 1, syn(port, 81).frame());
        lab.net.hosts[1].poll(lab.net.now, &mut lab.net.sinks[1]);
    }
    assert_eq!(lab.net.hosts[1].stats().tcp.out_rsts, 1000);
    assert_eq!(lab.net.hosts[1].stats().tcp.no_ports, 4999);
}

#[test]
fn garbage_is_dropped_and_harms_no_other_flow() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.send(0, client, b"first");
    lab.run_ms(5);
    let good = lab.forge(0);
    let mut rng = Rng::new(11);
    let mut sent = vec![];
    let mut got = lab.read(1, server);
    for round in 0..300 {
        for _ in 0..20 {
            let mut segment = good.clone();
            segment.seq = segment
                .seq
                .wrapping_add((rng.below(1 << 20)) as u32)
                .wrapping_sub(1 << 19);
            segment.ack = rng.next_u64() as u32;
            segment.flags = rng.next_u64() as u8 & !4; // an exact RST would be accepted
            segment.options = (0..rng.below(11) * 4)
                .map(|_| rng.next_u64() as u8)
                .collect();
            segment.window = rng.next_u64() as u16;
            // Data at a valid sequence number would be accepted: send none.
            segment.flags &= !1;
            let mut frame = segment.frame();
            if rng.chance(0.5) {
                let count = rng.below(frame.len() as u64) as usize;
                frame.truncate(count);
            }
            if rng.chance(0.5) && !frame.is_empty() {
                let at = rng.below(frame.len() as u64) as usize;
                frame[at] ^= rng.next_u64() as u8 | 1;
            }
            give(&mut lab, 1, frame);
            let noise = (0..rng.below(120)).map(|_| rng.next_u64() as u8).collect();
            give(&mut lab, 1, noise);
        }
        let data = pattern(round + 1);
        lab.send(0, client, &data);
        sent.extend(data);
        lab.run_ms(1);
        got.extend(lab.read(1, server));
    }
    lab.run_ms(2000);
    got.extend(lab.read(1, server));
    assert_eq!(got[5..], sent);
    let stats = lab.net.hosts[1].stats();
    assert!(stats.net.in_errs > 0 && stats.net.csum_errors > 0 && stats.net.not_for_us > 0);
}

#[test]
fn incomplete_fragments_and_martians_are_counted() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 20, 0).unwrap();
    let mut frame = syn(5, 80).frame();
    frame[20] = 0x20; // more fragments
    frame[24..26].fill(0);
    let checksum = sum(&frame[14..34], 0);
    frame[24..26].copy_from_slice(&checksum);
    give(&mut lab, 1, frame);
    assert_eq!(lab.net.hosts[1].stats().net.reassembly_required, 1);
    // From our own address, received from the link (LAND).
    let mut frame = syn(80, 80).frame();
    frame[29] = 2;
    frame[24..26].fill(0);
    let checksum = sum(&frame[14..34], 0);
    frame[24..26].copy_from_slice(&checksum);
    let tcp = frame[34..].to_vec();
    let mut t2 = tcp.clone();
    t2[16..18].fill(0);
    let pseudo = 2 * (0x0a00 + 2) + 6 + tcp.len() as u32;
    let checksum = sum(&t2, pseudo);
    frame[50..52].copy_from_slice(&checksum);
    give(&mut lab, 1, frame);
    assert_eq!(lab.net.hosts[1].stats().net.martians, 1);
    assert_eq!(lab.net.hosts[1].connection_count(), 0);
}

#[test]
fn tiny_segments_cannot_pin_more_than_the_buffer_cap() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_recv_buffers = 64;
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    lab.send(0, client, b"x");
    lab.run_ms(5);
    let base = lab.forge(0);
    // First every other byte out of order; then in order, without reading.
    for i in 0..2000u32 {
        let mut segment = base.clone();
        segment.seq = segment.seq.wrapping_add(2 * i + 1);
        segment.flags = ACK | PSH;
        segment.payload = vec![1];
        give(&mut lab, 1, segment.frame());
    }
    assert!(lab.net.hosts[1].stats().tcp.rcv_q_drop >= 1900);
    assert_eq!(
        lab.net.hosts[1].stats().tcp.ofo_queue,
        63,
        "one buffer is in order"
    );
    let mut segment = base.clone();
    segment.payload = vec![1; 130];
    give(&mut lab, 1, segment.frame());
    let count = lab.read(1, server).len();
    assert!(count >= 127, "what fills the hole is taken: {count}");
    assert_eq!(state(&lab, 1, server), TcpState::Established);
}

fn state(lab: &Lab, host: usize, id: siw_net::ConnId) -> TcpState {
    lab.net.hosts[host]
        .tcp_info(id)
        .map_or(TcpState::Closed, |info| info.state)
}

#[test]
fn lost_arp_is_retried_until_unreachable() {
    let mut lab = Lab::new();
    let mut left = 2;
    lab.lose(move |_, frame| {
        let hit = frame[12..14] == [8, 6] && left > 0;
        left -= i32::from(hit);
        hit
    });
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(2500);
    assert!(lab.got(0).contains(Events::CONNECTED));
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.77:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(4000);
    assert!(lab.got(0).contains(Events::UNREACHABLE | Events::CLOSED));
    assert!(
        lab.net.hosts[0]
            .next_deadline()
            .is_some_and(|deadline| deadline > lab.net.now)
    );
}

#[test]
fn off_link_peers_are_reached_through_the_gateway() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].net.gateway_v4 = Some("10.0.0.2".parse().unwrap());
    // Host 1 acts as both the gateway and the remote peer.
    configs[1]
        .net
        .addresses
        .push("192.0.2.7/32".parse().unwrap());
    configs[1].net.gateway_v4 = Some("10.0.0.1".parse().unwrap());
    let mut lab = Lab::with(configs);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    lab.net.hosts[0]
        .connect(now, None, None, "192.0.2.7:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    assert!(lab.got(0).contains(Events::CONNECTED));
    let now = lab.net.now;
    let events = lab.net.hosts[1].connect(now, None, None, "[2001:db8::1]:80".parse().unwrap(), 0);
    assert!(
        matches!(events, Err(siw_tcp::StackError::NoRoute(_))),
        "{events:?}"
    );
}

#[test]
fn a_spoofed_arp_reply_changes_nothing() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let mut arp = vec![
        2, 0, 0, 0, 0, 1, 6, 6, 6, 6, 6, 6, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2,
    ];
    arp.extend([6, 6, 6, 6, 6, 6, 10, 0, 0, 2, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1]);
    give(&mut lab, 0, arp);
    lab.send(0, client, b"safe");
    lab.run_ms(5);
    assert_eq!(lab.read(1, server), b"safe");
}

#[test]
fn echo_is_answered_and_rate_limited() {
    let mut lab = Lab::new();
    let echo = |data: &[u8]| {
        let mut icmp = vec![8, 0, 0, 0, 0, 7, 0, 1];
        icmp.extend_from_slice(data);
        let checksum = sum(&icmp, 0);
        icmp[2..4].copy_from_slice(&checksum);
        let mut ip = vec![
            0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ];
        ip[2..4].copy_from_slice(&(20 + icmp.len() as u16).to_be_bytes());
        let checksum = sum(&ip, 0);
        ip[10..12].copy_from_slice(&checksum);
        [vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0], ip, icmp].concat()
    };
    give(&mut lab, 1, echo(&pattern(500)));
    lab.net.hosts[1].poll(lab.net.now, &mut lab.net.sinks[1]);
    let (reply, _) = lab.net.sinks[1].frames.pop_front().unwrap();
    assert_eq!(reply[..12], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    assert_eq!(reply[34], 0, "echo reply");
    assert_eq!(&reply[42..], pattern(500));
    assert_eq!(sum(&reply[34..], 0), [0, 0]);
    for _ in 0..3000 {
        give(&mut lab, 1, echo(b"x"));
        lab.net.hosts[1].poll(lab.net.now, &mut lab.net.sinks[1]);
    }
    assert_eq!(lab.net.hosts[1].stats().net.icmp_out, 1000);
}

#[test]
fn ipv6_connects_by_ndp_or_fails_in_bounded_time() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1]
        .listen(Some("fd00::2".parse().unwrap()), 80, 4, 0)
        .unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let server = lab.events[1]
        .iter()
        .find(|(_, events)| events.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1428);
    lab.send(0, client, &pattern(100_000));
    lab.run_ms(20);
    assert_eq!(lab.read(1, server), pattern(100_000));
    assert!(lab.net.hosts[0].stats().net.ndp_out >= 1 && lab.net.hosts[1].stats().net.ndp_in >= 1);
}

#[test]
fn neighbours_are_probed_while_a_connection_uses_them() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    for _ in 0..10 {
        lab.run_ms(10_000);
        lab.send(0, client, b"tick");
        lab.run_ms(10);
        assert_eq!(lab.read(1, server), b"tick");
    }
    assert!(lab.net.hosts[0].stats().net.arp_out >= 3);
    // The peer no longer answers ARP: the neighbour fails, the data waits, nothing panics.
    lab.lose(|_, _| true);
    lab.run_ms(40_000);
    lab.send(0, client, b"lost");
    lab.run_ms(20_000);
    lab.lose(|_, _| false);
    lab.run_ms(60_000);
    assert_eq!(lab.read(1, server), b"lost");
}

/// RFC 5927.
#[test]
fn an_icmp_error_ends_only_the_connect_it_quotes() {
    let mut lab = Lab::new();
    lab.connect();
    lab.lose(|from, frame| {
        from == 0 && Seg::parse(0, frame).is_some_and(|segment| segment.flags == SYN)
    });
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:99".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(5);
    let syn = lab.last(0);
    let error = |seq: u32| {
        let mut quoted = syn.clone();
        quoted.seq = seq;
        let frame = quoted.frame();
        let mut icmp = vec![3, 2, 0, 0, 0, 0, 0, 0]; // protocol unreachable
        icmp.extend_from_slice(&frame[14..42]);
        let checksum = sum(&icmp, 0);
        icmp[2..4].copy_from_slice(&checksum);
        let mut ip = vec![
            0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1,
        ];
        ip[2..4].copy_from_slice(&(20 + icmp.len() as u16).to_be_bytes());
        let checksum = sum(&ip, 0);
        ip[10..12].copy_from_slice(&checksum);
        [vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], ip, icmp].concat()
    };
    give(&mut lab, 0, error(syn.seq.wrapping_add(1)));
    assert_eq!(state(&lab, 0, client), TcpState::SynSent);
    give(&mut lab, 0, error(syn.seq));
    lab.run_ms(1);
    assert!(lab.got(0).contains(Events::UNREACHABLE | Events::CLOSED));
}

#[test]
fn many_connections_open_close_and_leave_nothing() {
    let mut configs = [host_config(0), host_config(1)];
    configs
        .iter_mut()
        .for_each(|config| config.tcp.max_connections = 300);
    let mut lab = Lab::with(configs);
    lab.net.hosts[1].listen(None, 80, 300, 0).unwrap();
    for _ in 0..5 {
        let now = lab.net.now;
        let ids: Vec<_> = (0..250)
            .map(|_| {
                lab.net.hosts[0]
                    .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
                    .unwrap()
            })
            .collect();
        lab.run_ms(20);
        let accepted: Vec<_> = std::mem::take(&mut lab.events[1])
            .into_iter()
            .filter(|(_, events)| events.contains(Events::ACCEPTED))
            .collect();
        assert_eq!(accepted.len(), 250);
        let now = lab.net.now;
        ids.iter().for_each(|&id| lab.net.hosts[0].release(now, id));
        lab.run_ms(20);
        let now = lab.net.now;
        accepted
            .iter()
            .for_each(|&(id, _)| lab.net.hosts[1].release(now, id));
        lab.run_ms(20);
    }
    assert!(
        lab.net.hosts[0].stats().tcp.time_wait_evicted > 0,
        "TIME-WAIT gave way"
    );
    lab.net.run(Duration::from_secs(70), |_| false);
    for host in &lab.net.hosts {
        assert_eq!(host.connection_count(), 0);
        assert!(host.is_idle());
        assert_eq!(host.stats().tcp.curr_estab, 0);
    }
}
