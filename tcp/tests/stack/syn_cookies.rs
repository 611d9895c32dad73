//! Listeners under attack, and several listeners together.

use std::time::Duration;

use crate::common::wire::{ACK, Lab, RST, SYN, Seg, pattern};
use crate::common::{PORT, Transfer, configs, micros};
use siw_net::{FrameInfo, RxChecksum, VecBuf};
use siw_tcp::{Events, TcpState};
use siw_tcp_sim::{Impairment, Rng, host_config};

const INFO: FrameInfo = FrameInfo {
    checksum: RxChecksum::Good,
    rss_hash: 0,
};

/// Builds a segment from any IPv4 address; checksums are left to `RxChecksum::Good`.
fn from(addr: [u8; 4], segment: &Seg) -> VecBuf {
    let mut frame = segment.frame();
    frame[26..30].copy_from_slice(&addr);
    frame[6..12].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
    frame.into()
}

fn flood(rng: &mut Rng, dport: u16, flags: u8) -> VecBuf {
    let segment = Seg {
        from: 0,
        sport: 1 + rng.below(65535) as u16,
        dport,
        seq: rng.next_u64() as u32,
        ack: rng.next_u64() as u32,
        flags,
        window: 1000,
        ..Seg::default()
    };
    // Half of them claim to be on the link.
    let near = rng.chance(0.5);
    let random = rng.next_u64();
    let address = if near {
        [10, 0, 0, 3 + (random % 250) as u8]
    } else {
        [198, 51, (random >> 8) as u8, 1 + (random % 250) as u8]
    };
    from(address, &segment)
}

fn fill(lab: &mut Lab, port: u16, count: usize) {
    let mut rng = Rng::new(8);
    let now = lab.net.now;
    let burst: Vec<_> = (0..count)
        .map(|_| (flood(&mut rng, port, SYN), INFO))
        .collect();
    lab.net.hosts[1].receive_burst(now, burst.into_iter());
}

/// The cookie and its timestamp carry the options (RFC 4987 section 3.6).
#[test]
fn a_full_backlog_is_answered_with_syn_cookies() {
    for (ts, v6) in [(true, false), (false, false), (true, true)] {
        let mut configs = [host_config(0), host_config(1)];
        configs[0].tcp.timestamps = ts;
        configs.iter_mut().for_each(|config| config.tcp.ecn = true);
        let mut lab = Lab::with(configs);
        lab.net.hosts[1].listen(None, 80, 8, 7).unwrap();
        fill(&mut lab, 80, 100);
        assert_eq!(
            lab.net.hosts[1].connection_count(),
            8,
            "nothing is kept of the rest"
        );
        assert_eq!(lab.net.hosts[1].stats().tcp.cookies_sent, 92);
        let now = lab.net.now;
        let to = if v6 { "[fd00::2]:80" } else { "10.0.0.2:80" };
        let client = lab.net.hosts[0]
            .connect(now, None, None, to.parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(20);
        assert_eq!(lab.net.hosts[1].stats().tcp.cookies_recv, 1);
        let (server, events) = lab.events[1][0];
        assert!(events.contains(Events::ACCEPTED));
        let info = lab.net.hosts[1].tcp_info(server).unwrap();
        assert_eq!((info.state, info.user), (TcpState::Established, 7));
        let overhead = if v6 { 60 } else { 40 } + if ts { 12 } else { 0 };
        // The closest MSS of the table.
        let mss = if v6 { 1440 } else { 1460 } + if v6 { 60 } else { 40 };
        assert_eq!(info.effective_mss, mss - overhead);
        // With timestamps, window scaling and SACK are preserved.
        let data = pattern(400_000);
        lab.send(0, client, &data);
        lab.send(1, server, &data);
        let (mut there, mut back) = (vec![], vec![]);
        for _ in 0..40 {
            lab.run_ms(5);
            there.extend(lab.read(1, server));
            back.extend(lab.read(0, client));
        }
        assert!(there == data && back == data);
        let window = lab.net.hosts[1].tcp_info(server).unwrap().send_window;
        assert_eq!(window > 0xffff, ts, "{window}");
    }
}

#[test]
fn a_lost_ack_is_made_good_by_the_data_behind_it() {
    let mut lab = Lab::new();
    lab.connect();
    lab.net.hosts[1].listen(None, 90, 4, 0).unwrap();
    fill(&mut lab, 90, 50);
    let mut left = 1;
    lab.lose(move |from, frame| {
        let hit = from == 0
            && left > 0
            && Seg::parse(0, frame).is_some_and(|segment| segment.flags == ACK);
        left -= i32::from(hit);
        hit
    });
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:90".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1);
    lab.send(0, client, b"first words");
    lab.run_ms(5);
    let server = lab.events[1].last().unwrap().0;
    assert_eq!(lab.read(1, server), b"first words");
}

/// No segment has been sent to the peer yet, so its neighbour was not looked up.
#[test]
fn a_connection_from_a_cookie_that_is_aborted_at_once_resets_its_peer() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 90, 4, 0).unwrap();
    fill(&mut lab, 90, 50);
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:90".parse().unwrap(), 0)
        .unwrap();
    let limit = now + Duration::from_millis(20);
    let accepted = loop {
        if let Some((id, _, events)) = lab.net.hosts[1].next_event()
            && events.contains(Events::ACCEPTED)
        {
            break id;
        }
        assert!(lab.net.step(limit), "no connection");
    };
    assert_eq!(lab.net.hosts[1].stats().tcp.cookies_recv, 1);
    let now = lab.net.now;
    lab.net.hosts[1].abort(now, accepted);
    lab.run_ms(5);
    assert!(lab.got(0).contains(Events::RESET));
}

/// The segments behind the one that proves the cookie arrive first, or while the backlog is full.
#[test]
fn data_behind_a_lost_cookie_does_not_reset_the_connection() {
    let mut lab = Lab::new();
    lab.connect();
    lab.net.hosts[1].listen(None, 90, 4, 0).unwrap();
    fill(&mut lab, 90, 50);
    let mut left = 2;
    lab.lose(move |from, frame| {
        let hit = from == 0
            && left > 0
            && Seg::parse(0, frame).is_some_and(|segment| segment.flags & SYN == 0);
        left -= i32::from(hit);
        hit
    });
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:90".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1);
    let data = pattern(20_000);
    lab.send(0, client, &data);
    lab.run_ms(2_000);
    assert!(lab.net.hosts[1].stats().tcp.cookies_failed > 0);
    let server = lab.events[1].last().unwrap().0;
    assert!(lab.read(1, server) == data);
}

#[test]
fn forged_and_stale_cookies_open_nothing() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let mut rng = Rng::new(4);
    // Without an attack, cookies are not even checked.
    let now = lab.net.now;
    let buffer = flood(&mut rng, 80, ACK);
    lab.net.hosts[1].receive_burst(now, std::iter::once((buffer, INFO)));
    assert_eq!(lab.net.hosts[1].stats().tcp.cookies_failed, 0);
    fill(&mut lab, 80, 50);
    let acks: Vec<_> = (0..20_000)
        .map(|_| (flood(&mut rng, 80, ACK), INFO))
        .collect();
    lab.net.hosts[1].receive_burst(now, acks.into_iter());
    let stats = lab.net.hosts[1].stats();
    assert_eq!(
        (stats.tcp.cookies_recv, stats.tcp.cookies_failed),
        (0, 20_000)
    );
    assert!(stats.tcp.out_rsts <= 1000, "rate limited");
    // A valid cookie that arrives too late.
    lab.net.poll();
    lab.lose(|from, frame| {
        from == 0 && Seg::parse(0, frame).is_some_and(|segment| segment.flags == ACK)
    });
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1);
    let ack = lab.last(0);
    assert_eq!(ack.flags, ACK);
    lab.lose(|_, _| false);
    lab.net.now = lab.net.now + Duration::from_secs(140);
    fill(&mut lab, 80, 50);
    lab.inject(&ack);
    lab.run_ms(1);
    assert_eq!(lab.net.hosts[1].stats().tcp.cookies_recv, 0);
}

/// A cookie proves that the peer received the SYN-ACK, not that the connection is new (RFC 4987 section
/// 3.6): as in Linux, only a listener whose backlog was full lately accepts it, and TIME-WAIT protects the
/// end that closed first.
#[test]
fn a_late_copy_of_a_returned_cookie_opens_nothing_that_is_known_or_without_an_attack() {
    for (is_flooded, first, opened) in [(false, 0, 0), (true, 1, 1), (true, 0, 2)] {
        let mut lab = Lab::new();
        lab.net.hosts[1].listen(None, 90, 4, 0).unwrap();
        if is_flooded {
            fill(&mut lab, 90, 50);
        }
        let now = lab.net.now;
        let client = lab.net.hosts[0]
            .connect(now, None, None, "10.0.0.2:90".parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(5);
        let ack = lab.last(0);
        assert_eq!((ack.flags, ack.dport), (ACK, 90));
        let ids = [client, lab.events[1].last().unwrap().0];
        for host in [first, 1 - first] {
            lab.net.hosts[host].release(lab.net.now, ids[host]);
            lab.run_ms(5);
        }
        let established = lab.net.hosts[1].stats().tcp.curr_estab;
        assert_eq!(established, 0);
        lab.inject(&ack);
        lab.run_ms(5);
        let stats = lab.net.hosts[1].stats();
        assert_eq!(
            (stats.tcp.cookies_recv, stats.tcp.cookies_failed),
            (opened, 0)
        );
        if !is_flooded {
            assert_eq!(lab.last(1).flags, RST);
        }
    }
}

#[test]
fn a_flood_beside_a_bulk_flow_costs_that_flow_no_byte() {
    let mut link = Impairment::perfect(micros(50));
    link.rate = 400_000_000;
    link.queue = 1 << 30;
    let size = 3_000_000;
    let mut link = Transfer::new(
        3,
        configs(),
        [link, Impairment::perfect(micros(50))],
        [size, size],
    );
    link.connect(false);
    let mut rng = Rng::new(77);
    let limit = link.net.now + Duration::from_secs(10);
    let mut frames = 0;
    while !link.sides.iter().all(|side| side.received == size) {
        assert!(link.net.now < limit, "wedged");
        let now = link.net.now;
        let burst: Vec<_> = (0..200)
            .map(|i| {
                let port = [PORT, 81][i % 2];
                let flags = [SYN, ACK, SYN, SYN | ACK, 4, 0x29][rng.below(6) as usize];
                (flood(&mut rng, port, flags), INFO)
            })
            .collect();
        frames += burst.len();
        link.net.hosts[1].receive_burst(now, burst.into_iter());
        link.run(micros(100));
    }
    let stats = link.net.hosts[1].stats();
    println!("{frames} hostile frames: {stats:?}");
    assert!(stats.tcp.cookies_sent > 1000 && stats.tcp.out_rsts < 5000);
    assert!(
        link.net.hosts[1].connection_count() <= 9,
        "the backlog and the flow"
    );
    for host in &link.net.hosts {
        assert_eq!(
            (host.stats().tcp.retrans_segs, host.stats().tcp.timeouts),
            (0, 0)
        );
    }
}

#[test]
fn several_listeners_live_beside_each_other() {
    let mut lab = Lab::new();
    let one = lab.net.hosts[1].listen(None, 80, 4, 1).unwrap();
    let two = lab.net.hosts[1]
        .listen(Some("10.0.0.2".parse().unwrap()), 80, 4, 2)
        .unwrap();
    let three = lab.net.hosts[1].listen(None, 81, 4, 3).unwrap();
    assert!(lab.net.hosts[1].listen(None, 81, 4, 3).is_err(), "taken");
    fill(&mut lab, 80, 50);
    for to in ["10.0.0.2:80", "[fd00::2]:80", "10.0.0.2:81"] {
        let now = lab.net.now;
        lab.net.hosts[0]
            .connect(now, None, None, to.parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(10);
    }
    let by: Vec<_> = lab.events[1]
        .iter()
        .map(|(id, _)| lab.net.hosts[1].tcp_info(*id).unwrap())
        .map(|info| (info.listener.unwrap(), info.user))
        .collect();
    assert_eq!(
        by,
        [(two, 2), (one, 1), (three, 3)],
        "the closest address wins"
    );
    let stats = lab.net.hosts[1].stats();
    assert_eq!(
        stats.tcp.cookies_recv, 1,
        "only the flooded listener needed a cookie"
    );
    let now = lab.net.now;
    lab.net.hosts[1].stop_listening(now, two);
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    assert_eq!(
        lab.net.hosts[0].tcp_info(client).unwrap().state,
        TcpState::Established,
        "the wildcard takes over"
    );
}

#[test]
fn connections_not_yet_accepted_are_bounded() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = lab.net.now;
    let mut ids = vec![];
    for _ in 0..30 {
        ids.push(
            lab.net.hosts[0]
                .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
                .unwrap(),
        );
    }
    // next_event is not called on host 1.
    lab.net.run(Duration::from_millis(20), |_| false);
    // At most `backlog` connections by cookie, plus those that were half-open.
    assert!(lab.net.hosts[1].stats().tcp.curr_estab <= 8);
    assert!(lab.net.hosts[1].stats().tcp.listen_overflows > 0);
    lab.collect();
    lab.run_ms(5000);
    assert!(
        lab.net.hosts[1].stats().tcp.curr_estab > 4,
        "those who come again get in"
    );
}
