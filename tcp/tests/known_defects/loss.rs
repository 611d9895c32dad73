//! Loss recovery, timers and congestion windows.

use super::*;

/// Found in smoltcp; xarxa 017. The same holds for resets.
#[test]
fn acks_after_a_timeout_carry_snd_nxt() {
    let mut lab = with(|config| config.tcp.recv_window = 16 * MSS as u32);
    let [client, server] = lab.connect();
    // Both ends have data in flight, and both time out.
    lab.lose(|_, _| true);
    let data = push(&mut lab, 0, client, 8);
    assert!(push(&mut lab, 1, server, 8) == data);
    lab.run_ms(60);
    assert!(
        lab.net
            .hosts
            .iter()
            .all(|host| host.stats().tcp.timeouts > 1)
    );
    let [nxt_a, nxt_b] = [0, 1].map(|host| {
        let segment = lab.seen.borrow();
        let ends = segment
            .iter()
            .filter(|segment| segment.from == host && !segment.payload.is_empty());
        ends.map(|segment| segment.seq.wrapping_add(segment.payload.len() as u32))
            .max()
            .unwrap()
    });
    // The answer to a segment of the peer must be an ACK that the peer accepts.
    let from = seen(&lab);
    let mut probe = lab.forge(1);
    probe.seq = nxt_b.wrapping_sub(1);
    probe.payload = vec![data[data.len() - 1]];
    give(&mut lab, 0, &probe);
    lab.net.poll();
    let answer = since(&lab, 0, from)
        .into_iter()
        .find(|segment| segment.payload.is_empty())
        .unwrap();
    assert_eq!(answer.seq, nxt_a, "not the rewound one");
    lab.lose(|_, _| false);
    lab.run_ms(2000);
    assert!(lab.read(1, server) == data);
    assert!(lab.read(0, client) == data);
    lab.run_ms(10);
    assert!(lab.net.hosts.iter().all(Stack::is_idle), "no mutual wedge");
    // The same with a reset.
    lab.lose(|_, _| true);
    push(&mut lab, 0, client, 4);
    lab.run_ms(60);
    lab.lose(|_, _| false);
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, client);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::RESET));
}

/// Found in smoltcp. Most of Reno's expected throughput must remain.
#[test]
fn one_percent_loss_costs_no_timeouts() {
    // Mathis: MSS / RTT * sqrt(3/2) / sqrt(p), the minimum that a loss-based flow should reach.
    for rtt_us in [100u64, 1_000] {
        let mut link = Impairment::perfect(micros(rtt_us / 2));
        link.rate = 10_000_000_000;
        let mut forward = link;
        forward.loss = 0.01;
        let size = 10_000_000;
        let mut transfer = Transfer::new(11, configs(), [forward, link], [size, 0]);
        transfer.connect(false);
        let start = transfer.net.now;
        assert!(transfer.run(Duration::from_secs(60)));
        let gbps = size as f64 * 8.0 / (transfer.net.now - start).as_secs_f64() / 1e9;
        let promised = MSS as f64 * 8.0 / (rtt_us as f64 * 1e3) * (1.5f64 / 0.01).sqrt();
        assert!(gbps > 0.8 * promised, "{gbps:.2} of {promised:.2} Gb/s");
        let stats = transfer.net.hosts[0].stats();
        assert!(stats.tcp.timeouts <= 2, "{stats:?}");
    }
}

/// Found in smoltcp.
#[test]
fn sacked_data_is_not_sent_again_after_a_timeout() {
    let mut lab = with(|config| config.tcp.initial_window = 20);
    let [client, server] = lab.connect();
    // The first segment is lost each time until the timer has fired twice.
    let first = lab.last(0).seq;
    let mut count = 0;
    lab.lose(move |from, frame| {
        let hit = from == 0
            && Seg::parse(0, frame)
                .is_some_and(|segment| segment.seq == first && !segment.payload.is_empty());
        count += usize::from(hit);
        hit && count <= 3
    });
    let from = seen(&lab);
    let data = push(&mut lab, 0, client, 20);
    lab.run_ms(500);
    assert!(lab.read(1, server) == data);
    assert!(lab.net.hosts[0].stats().tcp.timeouts > 0);
    let later = since(&lab, 0, from);
    let repeated = later
        .iter()
        .filter(|segment| !segment.payload.is_empty())
        .count()
        - 20;
    let of_first = later
        .iter()
        .filter(|segment| segment.seq == first && !segment.payload.is_empty())
        .count()
        - 1;
    let probes = lab.net.hosts[0].stats().tcp.tlp_probes as usize;
    let all: Vec<_> = later
        .iter()
        .map(|segment| {
            (
                segment.seq.wrapping_sub(first) / 1448,
                segment.payload.len(),
            )
        })
        .collect();
    assert!(
        repeated <= of_first + probes,
        "no go-back-N: {repeated} {all:?}"
    );
    assert!(repeated < 10);
}

/// Found in smoltcp, mTCP.
#[test]
fn the_rto_follows_the_path_down_to_its_minimum() {
    for floor in [1u64, 5, 200] {
        let mut lab = with(|config| config.tcp.rto_min = Duration::from_millis(floor));
        let [client, server] = lab.connect();
        for _ in 0..20 {
            lab.send(0, client, b"x");
            lab.run_ms(3);
            lab.read(1, server);
        }
        let rto = lab.net.hosts[0].tcp_info(client).unwrap().rto;
        let ms = Duration::from_millis;
        assert!(
            rto >= ms(floor) && rto <= ms(floor) + ms(2),
            "{rto:?} for {floor} ms"
        );
    }
}

/// Found in smoltcp, Demikernel.
#[test]
fn hundreds_of_holes_are_held() {
    let mut lab = with(|config| config.tcp.initial_window = 1000);
    let [client, server] = lab.connect();
    let mut link = Impairment::perfect(micros(50));
    link.rate = 10_000_000_000;
    lab.net.set_link(0, link);
    let mut count = 0;
    lab.lose(move |from, frame| {
        let data = from == 0 && frame.len() > 1000;
        count += u32::from(data);
        data && count <= 600 && count % 2 == 0
    });
    let data = push(&mut lab, 0, client, 600);
    lab.run_ms(200);
    assert!(lab.read(1, server) == data);
    let stats = lab.net.hosts[1].stats();
    assert_eq!(
        (stats.tcp.rcv_q_drop, stats.tcp.dup_bytes_in),
        (0, 0),
        "each segment was needed once"
    );
    assert!(stats.tcp.ofo_queue > 200, "{}", stats.tcp.ofo_queue);
    assert_eq!(lab.net.hosts[0].stats().tcp.retrans_segs, 300);
}

/// Found in smoltcp.
#[test]
fn sack_blocks_across_the_sequence_wrap_work() {
    // Whether some data crosses the wrap among many connections is chance. Instead, the clock part of
    // the initial sequence number is advanced until it is near the wrap.
    let mut wrapped = 0;
    for step in 0..64u64 {
        let mut lab = with(|config| config.tcp.initial_window = 40);
        lab.net.now = lab.net.now + Duration::from_nanos(step << 38);
        let [client, server] = lab.connect();
        let distance = 0u32.wrapping_sub(lab.last(0).seq);
        // Advance there if it is within the next 2^26 bytes.
        if distance > 1 << 26 {
            continue;
        }
        let bulk = distance as usize - 20 * MSS;
        let mut sent = 0;
        while sent < bulk {
            let count = (bulk - sent).min(MSS * 40);
            lab.send(0, client, &vec![0; count]);
            lab.net.run(Duration::from_millis(50), |n2| {
                n2.hosts[1].tcp_info(server).unwrap().readable >= count
            });
            lab.read(1, server);
            lab.net.hosts[0].take_acked(client, drop);
            lab.seen.borrow_mut().clear();
            sent += count;
        }
        lab.run_ms(5);
        lab.send(0, client, b"!");
        lab.run_ms(5);
        lab.read(1, server);
        let before = lab.net.hosts[0].stats();
        let mut count = 0;
        lab.lose(move |from, frame| {
            let data = from == 0 && frame.len() > 1000;
            count += u32::from(data);
            data && [3, 18, 19, 20, 21, 30].contains(&count)
        });
        let data = push(&mut lab, 0, client, 40);
        lab.run_ms(50);
        assert!(lab.read(1, server) == data);
        let stats = lab.net.hosts[0].stats();
        assert_eq!(stats.tcp.timeouts, before.tcp.timeouts);
        wrapped += 1;
    }
    assert!(wrapped > 0);
}

/// Found in smoltcp. RFC 6298 (5.3).
#[test]
fn acknowledged_data_restarts_the_rto() {
    let mut lab = with(|config| {
        config.tcp.rto_min = Duration::from_millis(20);
        config.tcp.sack = false;
    });
    let [client, _] = lab.connect();
    lab.lose(|from, _| from == 1);
    let una = lab.last(0).seq;
    push(&mut lab, 0, client, 4);
    let mut ack = lab.forge(1);
    for k in 1..4u32 {
        lab.net.run(Duration::from_millis(15), |_| false);
        ack.ack = una.wrapping_add(k * MSS as u32);
        give(&mut lab, 0, &ack);
    }
    assert_eq!(
        lab.net.hosts[0].stats().tcp.timeouts,
        0,
        "45 ms without silence of 20"
    );
    lab.run_ms(500);
    assert!(lab.net.hosts[0].stats().tcp.timeouts > 0);
}

/// Found in xarxa 086. RFC 3042, RFC 6582.
#[test]
fn limited_transmit_and_partial_acks_without_sack() {
    let mut lab = with(|config| {
        config.tcp.sack = false;
        config.tcp.initial_window = 4;
        config.tcp.rto_min = Duration::from_millis(200);
    });
    let [client, server] = lab.connect();
    // The first ACK carries a new window and is therefore not a duplicate: let it pass.
    lab.send(0, client, b"x");
    lab.run_ms(5);
    lab.read(1, server);
    let mut count = 0;
    // The first of four segments is lost: two duplicate ACKs; the third needs new data.
    lab.lose(move |from, frame| {
        let data = from == 0 && frame.len() > 1000;
        count += u32::from(data);
        data && (count == 1 || count == 3)
    });
    let data = push(&mut lab, 0, client, 10);
    lab.run_ms(20);
    assert!(lab.read(1, server) == data);
    let stats = lab.net.hosts[0].stats();
    assert_eq!((stats.tcp.timeouts, stats.tcp.fast_recovery), (0, 1));
    assert_eq!(stats.tcp.retrans_segs, 2, "each lost one once");
}

/// Found in xarxa 273. RFC 5681 section 2.
#[test]
fn a_fin_is_no_duplicate_ack() {
    let mut lab = with(|config| config.tcp.sack = false);
    let [client, _] = lab.connect();
    lab.lose(|_, _| true);
    let mut fin = lab.forge(1);
    fin.flags |= FIN;
    push(&mut lab, 0, client, 4);
    for _ in 0..5 {
        give(&mut lab, 0, &fin);
    }
    let stats = lab.net.hosts[0].stats();
    assert_eq!((stats.tcp.dup_acks_in, stats.tcp.fast_recovery), (0, 0));
}

/// Found in xarxa 277. The initial window is one segment after a lost SYN (RFC 5681 section 3.1).
#[test]
fn a_retransmitted_syn_leaves_slow_start_alone() {
    let mut lab = with(|config| config.tcp.rto_initial = Duration::from_millis(10));
    let mut lost = 0;
    lab.lose(move |from, frame| {
        let hit = from == 0 && frame[12..14] == [8, 0] && frame[47] & SYN != 0 && lost < 1;
        lost += u32::from(hit);
        hit
    });
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(100);
    assert_eq!(lab.net.hosts[0].stats().tcp.syn_retrans, 1);
    let info = lab.net.hosts[0].tcp_info(client).unwrap();
    assert_eq!(info.state, TcpState::Established);
    assert!(
        info.ssthresh > 1 << 29 && info.cwnd == MSS as u32,
        "{info:?}"
    );
}

/// Found in libxlio 511: TSO flows took seconds to reach their rate.
#[test]
fn the_initial_ssthresh_is_unlimited() {
    let tso = TsoLimits {
        max_segments: 40,
        max_bytes: 60_000,
    };
    let mut times = vec![];
    for on in [false, true] {
        let mut configs = configs();
        if on {
            configs.iter_mut().for_each(|config| {
                config.tcp.tx_checksum = false;
                config.tcp.tso = Some(tso);
            });
        }
        // 10 Gb/s and 4 ms: 5 MB in flight, nine doublings of ten segments.
        let mut link = Impairment::perfect(Duration::from_millis(2));
        link.rate = 10_000_000_000;
        link.queue = 10_000;
        let mut transfer = Transfer::new(4, configs, [link; 2], [200_000_000, 0]);
        transfer.net.log = None;
        transfer.connect(false);
        let start = transfer.net.now;
        let full = 4_000_000;
        while transfer.sides[0]
            .id
            .and_then(|id| transfer.net.hosts[0].tcp_info(id))
            .is_none_or(|info| info.in_flight < full)
        {
            transfer.run(Duration::from_millis(1));
            assert!(
                transfer.net.now - start < Duration::from_secs(1),
                "no ramp of seconds, TSO {on}"
            );
        }
        times.push(transfer.net.now - start);
    }
    let [plain, tso] = times[..] else {
        unreachable!()
    };
    assert!(tso < plain * 2, "{tso:?} with TSO, {plain:?} without");
}

/// Found in libxlio 618: above the square of the segment size.
#[test]
fn cwnd_growth_does_not_stall_in_large_windows() {
    use siw_tcp::CongestionControl;
    // 1448^2 is 2.1 MB: mss * mss / cwnd is 0 there.
    for which in [CongestionControl::NewReno, CongestionControl::Cubic] {
        let mut configs = configs();
        configs.iter_mut().for_each(|config| {
            config.tcp.congestion = which;
            config.tcp.recv_window = 64 << 20;
            config.tcp.initial_window = 2000;
        });
        let mut link = Impairment::perfect(Duration::from_millis(2));
        link.rate = 40_000_000_000;
        link.queue = 100_000;
        let mut transfer = Transfer::new(4, configs, [link; 2], [1 << 40, 0]);
        transfer.net.log = None;
        transfer.connect(false);
        transfer.run(Duration::from_millis(20));
        // One loss ends slow start.
        let mut once = false;
        transfer.net.filter = Some(Box::new(move |from, frame| {
            let lose = !once && from == 0 && frame.len() > 1000;
            once |= lose;
            !lose
        }));
        transfer.run(Duration::from_millis(30));
        let id = transfer.sides[0].id.unwrap();
        let before = transfer.net.hosts[0].tcp_info(id).unwrap();
        assert!(
            before.ssthresh > 2_200_000 && before.cwnd >= before.ssthresh,
            "{before:?}"
        );
        transfer.run(Duration::from_millis(60));
        let after = transfer.net.hosts[0].tcp_info(id).unwrap();
        assert!(
            after.cwnd >= before.cwnd + 5 * MSS as u32,
            "{} to {}",
            before.cwnd,
            after.cwnd
        );
    }
}

/// Found in libxlio 644.
#[test]
fn cwnd_is_bounded_when_the_receiver_limits() {
    let mut configs = configs();
    configs
        .iter_mut()
        .for_each(|config| config.tcp.recv_window = 128 << 10);
    let mut link = Impairment::perfect(micros(50));
    link.rate = 40_000_000_000;
    let mut transfer = Transfer::new(4, configs, [link; 2], [60_000_000, 0]);
    transfer.net.log = None;
    transfer.connect(false);
    assert!(transfer.run(Duration::from_secs(10)));
    let info = transfer.net.hosts[0]
        .tcp_info(transfer.sides[0].id.unwrap())
        .unwrap();
    assert!(info.cwnd < 4 * (128 << 10), "{}", info.cwnd);
}
