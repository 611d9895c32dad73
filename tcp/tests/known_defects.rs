//! Defects found in other TCP stacks, each as a test that this stack does not have it: smoltcp and its
//! successor xarxa (with the number in xarxa's audit), TAS, libxlio, Demikernel, F-Stack, mTCP. The comment
//! on a test names the stack.

mod common;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, PSH, RST, SYN, Seg, icmp_error, pattern};
use common::{Transfer, configs, micros};
use siw_tcp::sim::{Impairment, host_config};
use siw_tcp::{
    ConnId, Events, FrameInfo, IpCidr, NeighbourConfig, RxChecksum, Stack, StackConfig, TcpState,
    TsoLimits, VecBuf,
};

const MSS: usize = 1448;
const INFO: FrameInfo = FrameInfo {
    checksum: RxChecksum::Unknown,
    rss_hash: 0,
};

fn with(f: impl Fn(&mut StackConfig)) -> Lab {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(f);
    Lab::with(c)
}

/// Hands a segment of the other host to `host` now.
fn give(lab: &mut Lab, host: usize, s: &Seg) {
    let now = lab.net.now;
    lab.net.hosts[host].receive_burst(now, std::iter::once((s.frame().into(), INFO)));
}

fn push(lab: &mut Lab, host: usize, id: ConnId, segments: usize) -> Vec<u8> {
    let data = pattern(segments * MSS);
    for c in data.chunks(MSS) {
        lab.net.hosts[host]
            .push_record(id, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    lab.net.flush(host, id);
    data
}

fn state(lab: &Lab, host: usize, id: ConnId) -> TcpState {
    lab.net.hosts[host].tcp_info(id).unwrap().state
}

/// What `host` sent since `from` frames were seen.
fn since(lab: &Lab, host: usize, from: usize) -> Vec<Seg> {
    let seen = lab.seen.borrow();
    seen[from..]
        .iter()
        .filter(|s| s.from == host)
        .cloned()
        .collect()
}

fn seen(lab: &Lab) -> usize {
    lab.seen.borrow().len()
}

// ---- smoltcp ----

/// Found in smoltcp; xarxa 015.
#[test]
fn an_ack_of_unsent_data_dequeues_nothing() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let mut ack = lab.forge(1);
    let data = push(&mut lab, 0, a, 30);
    ack.ack = ack.ack.wrapping_add(25 * MSS as u32);
    give(&mut lab, 0, &ack);
    assert_eq!(lab.net.hosts[0].stats().bad_acks, 1);
    lab.net.hosts[0].take_acked(a, |_| panic!("nothing was acknowledged"));
    lab.run_ms(50);
    assert!(lab.read(1, b) == data);
}

/// Found in smoltcp; xarxa 017. Resets do, too.
#[test]
fn acks_after_a_timeout_carry_snd_nxt() {
    let mut lab = with(|c| c.recv_window = 16 * MSS as u32);
    let [a, b] = lab.connect();
    // Both ends have data out, and both time out.
    lab.lose(|_, _| true);
    let data = push(&mut lab, 0, a, 8);
    assert!(push(&mut lab, 1, b, 8) == data);
    lab.run_ms(60);
    assert!(lab.net.hosts.iter().all(|h| h.stats().timeouts > 1));
    let [nxt_a, nxt_b] = [0, 1].map(|h| {
        let s = lab.seen.borrow();
        let ends = s.iter().filter(|s| s.from == h && !s.payload.is_empty());
        ends.map(|s| s.seq.wrapping_add(s.payload.len() as u32))
            .max()
            .unwrap()
    });
    // A segment of the peer is answered: the ACK must be acceptable to it.
    let from = seen(&lab);
    let mut probe = lab.forge(1);
    probe.seq = nxt_b.wrapping_sub(1);
    probe.payload = vec![data[data.len() - 1]];
    give(&mut lab, 0, &probe);
    lab.net.poll();
    let answer = since(&lab, 0, from)
        .into_iter()
        .find(|s| s.payload.is_empty())
        .unwrap();
    assert_eq!(answer.seq, nxt_a, "not the rewound one");
    lab.lose(|_, _| false);
    lab.run_ms(2000);
    assert!(lab.read(1, b) == data);
    assert!(lab.read(0, a) == data);
    lab.run_ms(10);
    assert!(lab.net.hosts.iter().all(Stack::is_idle), "no mutual wedge");
    // The same for a reset.
    lab.lose(|_, _| true);
    push(&mut lab, 0, a, 4);
    lab.run_ms(60);
    lab.lose(|_, _| false);
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, a);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::RESET));
}

/// Found in smoltcp. Most of Reno's expected throughput remains.
#[test]
fn one_percent_loss_costs_no_timeouts() {
    // Mathis: MSS / RTT * sqrt(3/2) / sqrt(p), the least that a loss-driven flow should reach.
    for rtt_us in [100u64, 1_000] {
        let mut link = Impairment::perfect(micros(rtt_us / 2));
        link.rate = 10_000_000_000;
        let mut forward = link;
        forward.loss = 0.01;
        let size = 10_000_000;
        let mut t = Transfer::new(11, configs(), [forward, link], [size, 0]);
        t.connect(false);
        let start = t.net.now;
        assert!(t.run(Duration::from_secs(60)));
        let gbps = size as f64 * 8.0 / (t.net.now - start).as_secs_f64() / 1e9;
        let promised = MSS as f64 * 8.0 / (rtt_us as f64 * 1e3) * (1.5f64 / 0.01).sqrt();
        assert!(gbps > 0.8 * promised, "{gbps:.2} of {promised:.2} Gb/s");
        let s = t.net.hosts[0].stats();
        assert!(s.timeouts <= 2, "{s:?}");
    }
}

/// Found in smoltcp.
#[test]
fn sacked_data_is_not_sent_again_after_a_timeout() {
    let mut lab = with(|c| c.initial_window = 20);
    let [a, b] = lab.connect();
    // The first segment is lost every time until the timer has fired twice.
    let first = lab.last(0).seq;
    let mut n = 0;
    lab.lose(move |from, f| {
        let hit =
            from == 0 && Seg::parse(0, f).is_some_and(|s| s.seq == first && !s.payload.is_empty());
        n += usize::from(hit);
        hit && n <= 3
    });
    let from = seen(&lab);
    let data = push(&mut lab, 0, a, 20);
    lab.run_ms(500);
    assert!(lab.read(1, b) == data);
    assert!(lab.net.hosts[0].stats().timeouts > 0);
    let later = since(&lab, 0, from);
    let repeated = later.iter().filter(|s| !s.payload.is_empty()).count() - 20;
    let of_first = later
        .iter()
        .filter(|s| s.seq == first && !s.payload.is_empty())
        .count()
        - 1;
    let probes = lab.net.hosts[0].stats().tlp_probes as usize;
    let all: Vec<_> = later
        .iter()
        .map(|s| (s.seq.wrapping_sub(first) / 1448, s.payload.len()))
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
        let mut lab = with(|c| c.rto_min = Duration::from_millis(floor));
        let [a, b] = lab.connect();
        for _ in 0..20 {
            lab.send(0, a, b"x");
            lab.run_ms(3);
            lab.read(1, b);
        }
        let rto = lab.net.hosts[0].tcp_info(a).unwrap().rto;
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
    let mut lab = with(|c| c.initial_window = 1000);
    let [a, b] = lab.connect();
    let mut link = Impairment::perfect(micros(50));
    link.rate = 10_000_000_000;
    lab.net.set_link(0, link);
    let mut n = 0;
    lab.lose(move |from, f| {
        let data = from == 0 && f.len() > 1000;
        n += u32::from(data);
        data && n <= 600 && n % 2 == 0
    });
    let data = push(&mut lab, 0, a, 600);
    lab.run_ms(200);
    assert!(lab.read(1, b) == data);
    let s = lab.net.hosts[1].stats();
    assert_eq!(
        (s.rcv_q_drop, s.dup_bytes_in),
        (0, 0),
        "each segment was needed once"
    );
    assert!(s.ofo_queue > 200, "{}", s.ofo_queue);
    assert_eq!(lab.net.hosts[0].stats().retrans_segs, 300);
}

/// Found in smoltcp. No work grows with the idle ones.
#[test]
fn one_listener_accepts_many_connections() {
    // With a linear lookup 10,000 idle connections cost three orders of magnitude.
    let cost = |idle: usize| {
        let mut c = [host_config(0), host_config(1)];
        c.iter_mut().for_each(|c| {
            c.max_connections = idle + 10;
            c.control_rate = 1_000_000;
        });
        let mut lab = Lab::with(c);
        let now = lab.net.now;
        lab.net.hosts[1].listen(None, 80, idle + 10, 0).unwrap();
        for _ in 0..idle {
            lab.net.hosts[0]
                .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
                .unwrap();
        }
        lab.run_ms(50);
        assert_eq!(lab.net.hosts[1].stats().curr_estab, idle as u64);
        let [a, b] = lab.connect();
        lab.seen.borrow_mut().clear();
        lab.net.filter = None;
        let start = std::time::Instant::now();
        for _ in 0..3_000 {
            lab.send(0, a, &[7; 100]);
            lab.net.run(micros(200), |n| {
                n.hosts[1].tcp_info(b).unwrap().readable > 0
            });
            lab.read(1, b);
            lab.net.hosts[0].take_acked(a, drop);
        }
        start.elapsed()
    };
    let (few, many) = (cost(1), cost(10_000));
    assert!(many < 8 * few, "1 idle: {few:?}, 10,000 idle: {many:?}");
}

/// Found in smoltcp.
#[test]
fn data_is_delivered_in_the_buffer_it_came_in() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.lose(|_, _| true);
    let from = seen(&lab);
    lab.send(0, a, b"in place");
    lab.net.poll();
    let frame = since(&lab, 0, from)[0].frame();
    let span = frame.as_ptr_range();
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, std::iter::once((VecBuf::from(frame), INFO)));
    let rx = lab.net.hosts[1].receive_queue(b).unwrap();
    let chunk = rx.chunks().next().unwrap();
    assert_eq!(chunk, b"in place");
    assert!(span.contains(&chunk.as_ptr()));
}

/// Found in smoltcp.
#[test]
fn sack_blocks_across_the_sequence_wrap_work() {
    // Enough connections that some data crosses the wrap is a matter of luck: the clock part of
    // the initial sequence number is moved instead, so that it is near the wrap.
    let mut wrapped = 0;
    for step in 0..64u64 {
        let mut lab = with(|c| c.initial_window = 40);
        lab.net.now = lab.net.now + Duration::from_nanos(step << 38);
        let [a, b] = lab.connect();
        let distance = 0u32.wrapping_sub(lab.last(0).seq);
        // Within the next 2^26 bytes: go there.
        if distance > 1 << 26 {
            continue;
        }
        let bulk = distance as usize - 20 * MSS;
        let mut sent = 0;
        while sent < bulk {
            let n = (bulk - sent).min(MSS * 40);
            lab.send(0, a, &vec![0; n]);
            lab.net.run(Duration::from_millis(50), |n2| {
                n2.hosts[1].tcp_info(b).unwrap().readable >= n
            });
            lab.read(1, b);
            lab.net.hosts[0].take_acked(a, drop);
            lab.seen.borrow_mut().clear();
            sent += n;
        }
        lab.run_ms(5);
        lab.send(0, a, b"!");
        lab.run_ms(5);
        lab.read(1, b);
        let before = lab.net.hosts[0].stats().clone();
        let mut n = 0;
        lab.lose(move |from, f| {
            let data = from == 0 && f.len() > 1000;
            n += u32::from(data);
            data && [3, 18, 19, 20, 21, 30].contains(&n)
        });
        let data = push(&mut lab, 0, a, 40);
        lab.run_ms(50);
        assert!(lab.read(1, b) == data);
        let s = lab.net.hosts[0].stats();
        assert_eq!(s.timeouts, before.timeouts);
        wrapped += 1;
    }
    assert!(wrapped > 0);
}

/// Found in smoltcp. RFC 6298 (5.3).
#[test]
fn acknowledged_data_restarts_the_rto() {
    let mut lab = with(|c| {
        c.rto_min = Duration::from_millis(20);
        c.sack = false;
    });
    let [a, _] = lab.connect();
    lab.lose(|from, _| from == 1);
    let una = lab.last(0).seq;
    push(&mut lab, 0, a, 4);
    let mut ack = lab.forge(1);
    for k in 1..4u32 {
        lab.net.run(Duration::from_millis(15), |_| false);
        ack.ack = una.wrapping_add(k * MSS as u32);
        give(&mut lab, 0, &ack);
    }
    assert_eq!(
        lab.net.hosts[0].stats().timeouts,
        0,
        "45 ms without silence of 20"
    );
    lab.run_ms(500);
    assert!(lab.net.hosts[0].stats().timeouts > 0);
}

// ---- xarxa's audit ----

/// Found in xarxa 002.
#[test]
fn the_window_of_a_syn_is_not_scaled() {
    let mut lab = with(|c| c.recv_window = 8 << 20);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.net.run(Duration::from_millis(5), |n| {
        n.hosts[0].tcp_info(a).unwrap().state == TcpState::Established
    });
    assert_eq!(lab.net.hosts[0].tcp_info(a).unwrap().send_window, 0xffff);
}

/// Found in xarxa 003.
#[test]
fn a_fin_beyond_the_window_is_not_accepted() {
    let mut lab = with(|c| c.recv_window = 4096);
    let [_, b] = lab.connect();
    let mut s = lab.forge(0);
    s.flags = FIN | ACK | PSH;
    s.payload = pattern(5000);
    give(&mut lab, 1, &s);
    lab.collect();
    assert!(
        !lab.got(1).contains(Events::PEER_FIN),
        "904 bytes before it are missing"
    );
    assert_eq!(lab.read(1, b), pattern(4096));
    lab.run_ms(5);
    s.seq = s.seq.wrapping_add(4096);
    s.payload.drain(..4096);
    give(&mut lab, 1, &s);
    lab.collect();
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, b), pattern(5000)[4096..]);
}

/// Found in xarxa 013, 066. Broadcast and multicast.
#[test]
fn segments_to_group_addresses_are_ignored() {
    let mut lab = Lab::new();
    lab.connect();
    let mut syn = lab.forge(0);
    (syn.flags, syn.sport) = (SYN, 4000);
    for dst in [[255, 255, 255, 255], [10, 0, 0, 255], [224, 0, 0, 1]] {
        for dport in [80, 81] {
            syn.dport = dport;
            let mut f = syn.frame();
            f[30..34].copy_from_slice(&dst);
            let mac = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0];
            for broadcast in [false, true] {
                let mut f = f.clone();
                if broadcast {
                    f[..6].copy_from_slice(&mac[..6]);
                }
                let (from, now) = (seen(&lab), lab.net.now);
                let info = FrameInfo {
                    checksum: RxChecksum::Good,
                    rss_hash: 0,
                };
                lab.net.hosts[1].receive_burst(now, std::iter::once((f.into(), info)));
                lab.net.poll();
                assert!(since(&lab, 1, from).is_empty());
            }
        }
    }
    assert_eq!(lab.net.hosts[1].connection_count(), 1);
}

/// Found in xarxa 018.
#[test]
fn probes_of_two_zero_windows_are_both_answered() {
    let mut lab = with(|c| c.recv_window = 4 * MSS as u32);
    let ids = lab.connect();
    let mut sent = [vec![], vec![]];
    for h in [0, 1] {
        sent[h] = push(&mut lab, h, ids[h], 12);
    }
    // Both windows are closed, both probe; every window update of the first opening is lost.
    lab.run_ms(300);
    assert!(
        lab.net
            .hosts
            .iter()
            .all(|h| h.stats().zero_window_probes > 1)
    );
    let mut got = [vec![], vec![]];
    let mut lost = 0;
    lab.lose(move |_, _| {
        lost += 1;
        lost <= 2
    });
    for _ in 0..400 {
        for h in [0, 1] {
            let b = lab.read(h, ids[h]);
            got[h].extend(b);
        }
        lab.run_ms(20);
    }
    assert!(got[0] == sent[1] && got[1] == sent[0]);
}

/// Found in xarxa 019.
#[test]
fn data_is_readable_after_time_wait() {
    let mut lab = with(|c| c.time_wait = Duration::from_millis(50));
    let [a, b] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.run_ms(2);
    lab.send(1, b, b"late reader");
    let now = lab.net.now;
    lab.net.hosts[1].close(now, b);
    lab.run_ms(2);
    assert_eq!(state(&lab, 0, a), TcpState::TimeWait);
    lab.run_ms(200);
    assert_eq!(state(&lab, 0, a), TcpState::Closed);
    assert_eq!(lab.read(0, a), b"late reader");
}

/// Found in xarxa 020.
#[test]
fn a_close_in_syn_received_completes_the_handshake() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    let to = |h: u8, p: u16| format!("10.0.0.{h}:{p}").parse().unwrap();
    // A simultaneous open whose SYN-ACKs are lost once.
    let a = lab.net.hosts[0]
        .connect(now, None, Some(5001), to(2, 5002), 0)
        .unwrap();
    let b = lab.net.hosts[1]
        .connect(now, None, Some(5002), to(1, 5001), 0)
        .unwrap();
    let mut lost = 0;
    lab.lose(move |_, f| {
        let hit = f[12..14] == [8, 0] && f[47] & (SYN | ACK) == SYN | ACK && lost < 2;
        lost += u32::from(hit);
        hit
    });
    lab.net.run(Duration::from_millis(5), |n| {
        n.hosts[0].tcp_info(a).unwrap().state == TcpState::SynReceived
    });
    assert_eq!(state(&lab, 0, a), TcpState::SynReceived);
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.run_ms(5_000);
    assert_eq!(state(&lab, 0, a), TcpState::FinWait2);
    assert_eq!(state(&lab, 1, b), TcpState::CloseWait);
    let now = lab.net.now;
    lab.net.hosts[1].close(now, b);
    lab.run_ms(10);
    assert_eq!(state(&lab, 1, b), TcpState::Closed);
}

/// Found in xarxa 031, 067.
#[test]
fn source_quench_and_unquoted_errors_end_nothing() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    // Nobody answers: the connect is in SYN-SENT all the time.
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    lab.lose(|from, f| from == 1 && f[12..14] == [8, 0]);
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(2);
    let syn = lab.last(0);
    assert_eq!(syn.flags & SYN, SYN);
    let mut foreign = syn.clone();
    foreign.seq = foreign.seq.wrapping_add(1);
    for f in [icmp_error(&syn, [4, 0], 0), icmp_error(&foreign, [3, 3], 0)] {
        lab.net.inject(1, f);
        lab.run_ms(1);
        assert_eq!(state(&lab, 0, a), TcpState::SynSent);
    }
}

/// Found in xarxa 064, 314.
#[test]
fn loopback_and_invalid_sources_are_martians() {
    let mut lab = Lab::new();
    lab.connect();
    let mut syn = lab.forge(0);
    (syn.flags, syn.sport, syn.options) = (SYN, 4000, vec![]);
    let before = lab.net.hosts[1].stats().martians;
    let sources = [
        [127, 0, 0, 1],
        [0, 0, 0, 7],
        [224, 1, 2, 3],
        [255, 255, 255, 255],
    ];
    for src in sources {
        let mut f = syn.frame();
        f[26..30].copy_from_slice(&src);
        let (from, now) = (seen(&lab), lab.net.now);
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        lab.net.hosts[1].receive_burst(now, std::iter::once((f.into(), info)));
        lab.net.poll();
        assert!(since(&lab, 1, from).is_empty(), "{src:?}");
    }
    assert_eq!(lab.net.hosts[1].stats().martians - before, 4);
    assert_eq!(lab.net.hosts[1].connection_count(), 1);
}

/// Found in xarxa 078.
#[test]
fn an_ack_that_found_no_room_is_sent_later() {
    let mut lab = Lab::new();
    let [a, _] = lab.connect();
    let s = {
        let mut s = lab.forge(0);
        s.flags |= PSH;
        s.payload = b"acknowledge me".to_vec();
        s
    };
    let _ = a;
    lab.net.sinks[1].space = Some(0);
    let from = seen(&lab);
    give(&mut lab, 1, &s);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty() && lab.net.hosts[1].has_output());
    lab.net.sinks[1].space = None;
    lab.net.poll();
    let acks = since(&lab, 1, from);
    assert_eq!(acks.len(), 1);
    assert_eq!(acks[0].ack, s.seq.wrapping_add(14));
}

/// Found in xarxa 084, 270.
#[test]
fn nothing_beyond_the_fin_is_accepted() {
    // The bytes beyond it come before, with and after the FIN.
    for order in 0..3 {
        let mut lab = Lab::new();
        let [_, b] = lab.connect();
        let text = pattern(300);
        let part = |lab: &Lab, from: usize, to: usize, fin: u8| {
            let mut s = lab.forge(0);
            s.flags |= fin;
            s.seq = s.seq.wrapping_add(from as u32);
            s.payload = text[from..to].to_vec();
            s
        };
        let head = part(&lab, 0, 100, 0);
        let end = part(&lab, 100, 200, FIN);
        let beyond = part(&lab, 200, 300, 0);
        let segs = match order {
            0 => [&beyond, &head, &end],
            1 => [&end, &beyond, &head],
            _ => [&beyond, &end, &head],
        };
        for s in segs {
            give(&mut lab, 1, s);
        }
        lab.run_ms(5);
        assert!(lab.got(1).contains(Events::PEER_FIN), "order {order}");
        assert_eq!(lab.read(1, b), text[..200], "order {order}");
        assert_eq!(lab.last(1).ack, head.seq.wrapping_add(201), "order {order}");
        give(&mut lab, 1, &beyond);
        lab.run_ms(5);
        assert!(lab.read(1, b).is_empty());
        assert_eq!(lab.last(1).ack, head.seq.wrapping_add(201));
    }
}

/// Found in xarxa 086. RFC 3042, RFC 6582.
#[test]
fn limited_transmit_and_partial_acks_without_sack() {
    let mut lab = with(|c| {
        c.sack = false;
        c.initial_window = 4;
        c.rto_min = Duration::from_millis(200);
    });
    let [a, b] = lab.connect();
    // The first ACK brings a new window and so is no duplicate: let it pass.
    lab.send(0, a, b"x");
    lab.run_ms(5);
    lab.read(1, b);
    let mut n = 0;
    // Of a window of four the first is lost: two duplicates and no third, but for new data.
    lab.lose(move |from, f| {
        let data = from == 0 && f.len() > 1000;
        n += u32::from(data);
        data && (n == 1 || n == 3)
    });
    let data = push(&mut lab, 0, a, 10);
    lab.run_ms(20);
    assert!(lab.read(1, b) == data);
    let s = lab.net.hosts[0].stats();
    assert_eq!((s.timeouts, s.fast_recovery), (0, 1));
    assert_eq!(s.retrans_segs, 2, "each lost one once");
}

/// Found in xarxa 087, 090. It neither stalls nor times out.
#[test]
fn a_window_shrunk_to_zero_below_data_recovers() {
    let mut lab = with(|c| c.user_timeout = Duration::from_secs(20));
    let [a, _] = lab.connect();
    let una = lab.last(0).seq;
    lab.lose(|from, f| from == 1 && f[12..14] == [8, 0]);
    push(&mut lab, 0, a, 2);
    // The first is taken, the window closes over the second.
    let mut ack = lab.forge(1);
    ack.ack = una.wrapping_add(MSS as u32);
    ack.window = 0;
    give(&mut lab, 0, &ack);
    let from = seen(&lab);
    // The peer lives and answers for long beyond the user timeout.
    for _ in 0..60 {
        lab.run_ms(1000);
        give(&mut lab, 0, &ack);
    }
    assert_eq!(state(&lab, 0, a), TcpState::Established, "SHLD-17");
    assert!(!since(&lab, 0, from).is_empty(), "it is asked");
    ack.window = 1000;
    give(&mut lab, 0, &ack);
    let from = seen(&lab);
    lab.run_ms(1_000);
    let second = una.wrapping_add(MSS as u32);
    assert!(
        since(&lab, 0, from)
            .iter()
            .any(|s| s.seq == second && !s.payload.is_empty())
    );
    // A peer that says nothing at all is given up.
    lab.run_ms(120_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

/// Found in xarxa 088.
#[test]
fn a_released_connection_leaves_fin_wait_2() {
    let mut lab = with(|c| c.time_wait = Duration::from_secs(1));
    let [a, b] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].release(now, a);
    lab.run_ms(10);
    assert_eq!(state(&lab, 1, b), TcpState::CloseWait);
    assert_eq!(lab.net.hosts[0].connection_count(), 1);
    lab.run_ms(2000);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

/// Found in xarxa 089, 092.
#[test]
fn silly_windows_are_neither_offered_nor_filled() {
    let mut lab = with(|c| c.recv_window = 8 * MSS as u32);
    let [a, b] = lab.connect();
    let data = push(&mut lab, 0, a, 24);
    lab.run_ms(20);
    // Reading bytes one by one opens nothing.
    let from = seen(&lab);
    for _ in 0..200 {
        lab.net.hosts[1].receive_queue(b).unwrap().consume(1);
        lab.net.poll();
    }
    assert!(
        since(&lab, 1, from).is_empty(),
        "no window updates of one byte"
    );
    let mut got = 200;
    for _ in 0..2000 {
        got += lab.net.hosts[1].receive_queue(b).unwrap().consume(700);
        lab.net.run(Duration::from_millis(1), |_| false);
    }
    assert_eq!(got, data.len());
    let short = since(&lab, 0, 0)
        .iter()
        .filter(|s| (1..MSS).contains(&s.payload.len()))
        .count();
    assert!(short <= 2, "{short} silly segments");
}

/// Found in xarxa 091.
#[test]
fn duplicates_do_not_stop_the_timer_of_a_lone_fin() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.lose(|from, f| from == 0 && Seg::parse(0, f).is_some_and(|s| s.flags & FIN != 0));
    let ack = lab.forge(1);
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.net.poll();
    for _ in 0..5 {
        give(&mut lab, 0, &ack);
    }
    lab.run_ms(20);
    lab.lose(|_, _| false);
    lab.run_ms(500);
    assert_eq!(state(&lab, 1, b), TcpState::CloseWait);
    assert_eq!(state(&lab, 0, a), TcpState::FinWait2);
}

/// Found in xarxa 094, 095.
#[test]
fn connect_refuses_groups_and_the_other_family() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    for to in [
        "255.255.255.255:80",
        "224.0.0.1:80",
        "0.0.0.0:80",
        "[ff02::1]:80",
        "[::]:80",
        "10.0.0.2:0",
    ] {
        let r = lab.net.hosts[0].connect(now, None, None, to.parse().unwrap(), 0);
        assert!(r.is_err(), "{to}");
    }
    let own6 = Some("fd00::1".parse().unwrap());
    let r = lab.net.hosts[0].connect(now, own6, None, "10.0.0.2:80".parse().unwrap(), 0);
    assert!(r.is_err());
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

/// Found in xarxa 266.
#[test]
fn a_fin_behind_duplicate_data_is_accepted() {
    let mut lab = Lab::new();
    let [_, b] = lab.connect();
    let mut s = lab.forge(0);
    s.payload = pattern(100);
    give(&mut lab, 1, &s);
    s.flags |= FIN;
    give(&mut lab, 1, &s);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, b), pattern(100));
}

/// Found in xarxa 267.
#[test]
fn the_ack_of_data_beyond_a_zero_window_counts() {
    let mut lab = with(|c| c.recv_window = 4096);
    let [_, b] = lab.connect();
    lab.lose(|_, _| true);
    let mut fill = lab.forge(0);
    fill.payload = pattern(4096);
    give(&mut lab, 1, &fill);
    lab.net.poll();
    lab.send(1, b, b"answer");
    assert_eq!(lab.net.hosts[1].tcp_info(b).unwrap().in_flight, 6);
    let mut more = fill.clone();
    more.seq = fill.seq.wrapping_add(4096);
    more.ack = fill.ack.wrapping_add(6);
    give(&mut lab, 1, &more);
    assert_eq!(
        lab.net.hosts[1].tcp_info(b).unwrap().in_flight,
        0,
        "RFC 9293 section 3.10.7.4"
    );
    assert_eq!(
        lab.net.hosts[1].tcp_info(b).unwrap().readable,
        4096,
        "the bytes do not count"
    );
    let from = seen(&lab);
    lab.net.poll();
    assert_eq!(since(&lab, 1, from)[0].ack, more.seq);
}

/// Found in xarxa 273. RFC 5681 section 2.
#[test]
fn a_fin_is_no_duplicate_ack() {
    let mut lab = with(|c| c.sack = false);
    let [a, _] = lab.connect();
    lab.lose(|_, _| true);
    let mut fin = lab.forge(1);
    fin.flags |= FIN;
    push(&mut lab, 0, a, 4);
    for _ in 0..5 {
        give(&mut lab, 0, &fin);
    }
    let s = lab.net.hosts[0].stats();
    assert_eq!((s.dup_acks_in, s.fast_recovery), (0, 0));
}

/// Found in xarxa 277.
#[test]
fn a_retransmitted_syn_leaves_slow_start_alone() {
    let mut lab = with(|c| c.rto_initial = Duration::from_millis(10));
    let mut lost = 0;
    lab.lose(move |from, f| {
        let hit = from == 0 && f[12..14] == [8, 0] && f[47] & SYN != 0 && lost < 1;
        lost += u32::from(hit);
        hit
    });
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(100);
    assert_eq!(lab.net.hosts[0].stats().syn_retrans, 1);
    let c = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!(c.state, TcpState::Established);
    assert!(c.ssthresh > 1 << 29 && c.cwnd == 10 * MSS as u32, "{c:?}");
}

/// Found in smoltcp; xarxa 288. One with FIN or SYN set is a reset as well.
#[test]
fn a_reset_outside_the_window_is_ignored() {
    let mut lab = Lab::new();
    let [_, b] = lab.connect();
    let mut rst = lab.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_sub(1 << 30);
    let from = seen(&lab);
    give(&mut lab, 1, &rst);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty(), "no answer to a reset");
    assert_eq!(state(&lab, 1, b), TcpState::Established);
    let mut rst = lab.forge(0);
    rst.flags = RST | FIN | ACK;
    give(&mut lab, 1, &rst);
    lab.collect();
    assert!(lab.got(1).contains(Events::RESET));
    // Nor is a reset of no connection answered.
    rst.sport = 9;
    let from = seen(&lab);
    give(&mut lab, 1, &rst);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty());
}

// ---- TAS ----

/// Found in TAS 15.
#[test]
fn the_last_data_is_sent_without_another_call() {
    // Userspace iWARP hung over TAS since the last of several sends was never flushed.
    for n in [1usize, 2, 3, 17] {
        let mut lab = Lab::new();
        let [a, b] = lab.connect();
        for k in 0..n {
            let record = vec![k as u8; 40];
            lab.net.hosts[0]
                .push_record(a, 40, record, k + 1 == n)
                .unwrap();
            if k % 2 == 0 {
                lab.net.hosts[0].take_acked(a, drop);
            }
        }
        assert!(!lab.net.hosts[0].is_idle() && lab.net.hosts[0].has_output());
        lab.run_ms(1);
        assert_eq!(lab.read(1, b).len(), 40 * n);
    }
}

// ---- libxlio ----

/// Found in libxlio 511: TSO flows took seconds to reach their rate.
#[test]
fn the_initial_ssthresh_is_unlimited() {
    let tso = TsoLimits {
        max_segments: 40,
        max_bytes: 60_000,
    };
    let mut times = vec![];
    for on in [false, true] {
        let mut c = configs();
        if on {
            c.iter_mut().for_each(|c| {
                c.tx_checksum = false;
                c.tso = Some(tso);
            });
        }
        // 10 Gb/s and 4 ms: 5 MB in flight, 9 doublings of ten segments.
        let mut link = Impairment::perfect(Duration::from_millis(2));
        link.rate = 10_000_000_000;
        link.queue = 10_000;
        let mut t = Transfer::new(4, c, [link; 2], [200_000_000, 0]);
        t.net.log = None;
        t.connect(false);
        let start = t.net.now;
        let full = 4_000_000;
        while t.sides[0]
            .id
            .and_then(|id| t.net.hosts[0].tcp_info(id))
            .is_none_or(|c| c.in_flight < full)
        {
            t.run(Duration::from_millis(1));
            assert!(
                t.net.now - start < Duration::from_secs(1),
                "no ramp of seconds, TSO {on}"
            );
        }
        times.push(t.net.now - start);
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
        let mut c = configs();
        c.iter_mut().for_each(|c| {
            c.congestion = which;
            c.recv_window = 64 << 20;
            c.initial_window = 2000;
        });
        let mut link = Impairment::perfect(Duration::from_millis(2));
        link.rate = 40_000_000_000;
        link.queue = 100_000;
        let mut t = Transfer::new(4, c, [link; 2], [1 << 40, 0]);
        t.net.log = None;
        t.connect(false);
        t.run(Duration::from_millis(20));
        // One loss ends slow start.
        let mut once = false;
        t.net.filter = Some(Box::new(move |from, f| {
            let lose = !once && from == 0 && f.len() > 1000;
            once |= lose;
            !lose
        }));
        t.run(Duration::from_millis(30));
        let id = t.sides[0].id.unwrap();
        let before = t.net.hosts[0].tcp_info(id).unwrap();
        assert!(
            before.ssthresh > 2_200_000 && before.cwnd >= before.ssthresh,
            "{before:?}"
        );
        t.run(Duration::from_millis(60));
        let after = t.net.hosts[0].tcp_info(id).unwrap();
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
    let mut c = configs();
    c.iter_mut().for_each(|c| c.recv_window = 128 << 10);
    let mut link = Impairment::perfect(micros(50));
    link.rate = 40_000_000_000;
    let mut t = Transfer::new(4, c, [link; 2], [60_000_000, 0]);
    t.net.log = None;
    t.connect(false);
    assert!(t.run(Duration::from_secs(10)));
    let c = t.net.hosts[0].tcp_info(t.sides[0].id.unwrap()).unwrap();
    assert!(c.cwnd < 4 * (128 << 10), "{}", c.cwnd);
}

// ---- Demikernel, F-Stack ----

/// Found in Demikernel.
#[test]
fn one_poll_sends_all_that_the_window_allows() {
    let mut lab = with(|c| c.initial_window = 64);
    let [a, _] = lab.connect();
    let from = seen(&lab);
    for c in pattern(64 * MSS).chunks(MSS) {
        lab.net.hosts[0]
            .push_record(a, MSS as u32, c.to_vec(), false)
            .unwrap();
    }
    lab.net.poll();
    assert_eq!(since(&lab, 0, from).len(), 64);
}

/// Found in xarxa 278.
#[test]
fn idle_connections_cost_a_poll_nothing() {
    let mut c = host_config(0);
    c.neighbours = NeighbourConfig::default();
    c.addresses = vec![IpCidr::new("10.0.0.1".parse().unwrap(), 24)];
    let mut lab = Lab::with([c, host_config(1)]);
    let ids = (0..100).map(|_| lab.connect()).collect::<Vec<_>>();
    lab.run_ms(100);
    assert!(!lab.net.hosts[0].has_output() && lab.net.hosts[0].is_idle());
    let from = seen(&lab);
    for _ in 0..1000 {
        lab.net.poll();
    }
    assert_eq!(seen(&lab), from);
    assert_eq!(ids.len(), 100);
}
