//! Defects that other TCP stacks were found to have, each as a test that this engine has not:
//! smoltcp and its successor xarxa (with the number of xarxa's audit where it has one), TAS,
//! libxlio, Demikernel, F-Stack, mTCP.

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
fn give(l: &mut Lab, host: usize, s: &Seg) {
    let now = l.net.now;
    l.net.hosts[host].receive_burst(now, std::iter::once((s.frame().into(), INFO)));
}

fn push(l: &mut Lab, host: usize, id: ConnId, segments: usize) -> Vec<u8> {
    let data = pattern(segments * MSS);
    for c in data.chunks(MSS) {
        l.net.hosts[host]
            .push_record(id, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    l.net.flush(host, id);
    data
}

fn state(l: &Lab, host: usize, id: ConnId) -> TcpState {
    l.net.hosts[host].tcp_info(id).unwrap().state
}

/// What `host` sent since `from` frames were seen.
fn since(l: &Lab, host: usize, from: usize) -> Vec<Seg> {
    let seen = l.seen.borrow();
    seen[from..]
        .iter()
        .filter(|s| s.from == host)
        .cloned()
        .collect()
}

fn seen(l: &Lab) -> usize {
    l.seen.borrow().len()
}

// ---- smoltcp ----

#[test]
fn smoltcp_an_ack_of_bytes_never_sent_dequeues_nothing_xarxa_015() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let mut ack = l.forge(1);
    let data = push(&mut l, 0, a, 30);
    ack.ack = ack.ack.wrapping_add(25 * MSS as u32);
    give(&mut l, 0, &ack);
    assert_eq!(l.net.hosts[0].stats().bad_acks, 1);
    l.net.hosts[0].take_acked(a, |_| panic!("nothing was acknowledged"));
    l.run_ms(50);
    assert!(l.read(1, b) == data);
}

#[test]
fn smoltcp_after_a_timeout_pure_acks_and_resets_carry_snd_nxt_xarxa_017() {
    let mut l = with(|c| c.recv_window = 16 * MSS as u32);
    let [a, b] = l.connect();
    // Both ends have data out, and both time out.
    l.lose(|_, _| true);
    let data = push(&mut l, 0, a, 8);
    assert!(push(&mut l, 1, b, 8) == data);
    l.run_ms(60);
    assert!(l.net.hosts.iter().all(|h| h.stats().timeouts > 1));
    let [nxt_a, nxt_b] = [0, 1].map(|h| {
        let s = l.seen.borrow();
        let ends = s.iter().filter(|s| s.from == h && !s.payload.is_empty());
        ends.map(|s| s.seq.wrapping_add(s.payload.len() as u32))
            .max()
            .unwrap()
    });
    // A segment of the peer is answered: the ACK must be acceptable to it.
    let from = seen(&l);
    let mut probe = l.forge(1);
    probe.seq = nxt_b.wrapping_sub(1);
    probe.payload = vec![data[data.len() - 1]];
    give(&mut l, 0, &probe);
    l.net.poll();
    let answer = since(&l, 0, from)
        .into_iter()
        .find(|s| s.payload.is_empty())
        .unwrap();
    assert_eq!(answer.seq, nxt_a, "not the rewound one");
    l.lose(|_, _| false);
    l.run_ms(2000);
    assert!(l.read(1, b) == data);
    assert!(l.read(0, a) == data);
    l.run_ms(10);
    assert!(l.net.hosts.iter().all(Stack::is_idle), "no mutual wedge");
    // The same for a reset.
    l.lose(|_, _| true);
    push(&mut l, 0, a, 4);
    l.run_ms(60);
    l.lose(|_, _| false);
    let now = l.net.now;
    l.net.hosts[0].abort(now, a);
    l.run_ms(5);
    assert!(l.got(1).contains(Events::RESET));
}

#[test]
fn smoltcp_one_percent_loss_costs_no_timeouts_and_keeps_most_of_what_reno_promises() {
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

#[test]
fn smoltcp_a_received_sack_spares_what_it_covers_even_after_a_timeout() {
    let mut l = with(|c| c.initial_window = 20);
    let [a, b] = l.connect();
    // The first segment is lost every time until the timer has fired twice.
    let first = l.last(0).seq;
    let mut n = 0;
    l.lose(move |from, f| {
        let hit =
            from == 0 && Seg::parse(0, f).is_some_and(|s| s.seq == first && !s.payload.is_empty());
        n += usize::from(hit);
        hit && n <= 3
    });
    let from = seen(&l);
    let data = push(&mut l, 0, a, 20);
    l.run_ms(500);
    assert!(l.read(1, b) == data);
    assert!(l.net.hosts[0].stats().timeouts > 0);
    let later = since(&l, 0, from);
    let repeated = later.iter().filter(|s| !s.payload.is_empty()).count() - 20;
    let of_first = later
        .iter()
        .filter(|s| s.seq == first && !s.payload.is_empty())
        .count()
        - 1;
    let probes = l.net.hosts[0].stats().tlp_probes as usize;
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

#[test]
fn smoltcp_and_mtcp_the_retransmission_timeout_follows_the_path_down_to_the_configured_floor() {
    for floor in [1u64, 5, 200] {
        let mut l = with(|c| c.rto_min = Duration::from_millis(floor));
        let [a, b] = l.connect();
        for _ in 0..20 {
            l.send(0, a, b"x");
            l.run_ms(3);
            l.read(1, b);
        }
        let rto = l.net.hosts[0].tcp_info(a).unwrap().rto;
        let ms = Duration::from_millis;
        assert!(
            rto >= ms(floor) && rto <= ms(floor) + ms(2),
            "{rto:?} for {floor} ms"
        );
    }
}

#[test]
fn smoltcp_and_demikernel_hundreds_of_holes_are_held_not_dropped() {
    let mut l = with(|c| c.initial_window = 1000);
    let [a, b] = l.connect();
    let mut link = Impairment::perfect(micros(50));
    link.rate = 10_000_000_000;
    l.net.set_link(0, link);
    let mut n = 0;
    l.lose(move |from, f| {
        let data = from == 0 && f.len() > 1000;
        n += u32::from(data);
        data && n <= 600 && n % 2 == 0
    });
    let data = push(&mut l, 0, a, 600);
    l.run_ms(200);
    assert!(l.read(1, b) == data);
    let s = l.net.hosts[1].stats();
    assert_eq!(
        (s.rcv_q_drop, s.dup_bytes_in),
        (0, 0),
        "each segment was needed once"
    );
    assert!(s.ofo_queue > 200, "{}", s.ofo_queue);
    assert_eq!(l.net.hosts[0].stats().retrans_segs, 300);
}

#[test]
fn smoltcp_one_listener_takes_many_connections_and_no_work_grows_with_the_idle_ones() {
    // With a linear lookup 10,000 idle connections cost three orders of magnitude.
    let cost = |idle: usize| {
        let mut c = [host_config(0), host_config(1)];
        c.iter_mut().for_each(|c| {
            c.max_connections = idle + 10;
            c.control_rate = 1_000_000;
        });
        let mut l = Lab::with(c);
        let now = l.net.now;
        l.net.hosts[1].listen(None, 80, idle + 10, 0).unwrap();
        for _ in 0..idle {
            l.net.hosts[0]
                .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
                .unwrap();
        }
        l.run_ms(50);
        assert_eq!(l.net.hosts[1].stats().curr_estab, idle as u64);
        let [a, b] = l.connect();
        l.seen.borrow_mut().clear();
        l.net.filter = None;
        let start = std::time::Instant::now();
        for _ in 0..3_000 {
            l.send(0, a, &[7; 100]);
            l.net.run(micros(200), |n| {
                n.hosts[1].tcp_info(b).unwrap().readable > 0
            });
            l.read(1, b);
            l.net.hosts[0].take_acked(a, drop);
        }
        start.elapsed()
    };
    let (few, many) = (cost(1), cost(10_000));
    assert!(many < 8 * few, "1 idle: {few:?}, 10,000 idle: {many:?}");
}

#[test]
fn smoltcp_received_bytes_are_handed_over_in_the_buffer_that_they_came_in() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.lose(|_, _| true);
    let from = seen(&l);
    l.send(0, a, b"in place");
    l.net.poll();
    let frame = since(&l, 0, from)[0].frame();
    let span = frame.as_ptr_range();
    let now = l.net.now;
    l.net.hosts[1].receive_burst(now, std::iter::once((VecBuf::from(frame), INFO)));
    let rx = l.net.hosts[1].receive_queue(b).unwrap();
    let chunk = rx.chunks().next().unwrap();
    assert_eq!(chunk, b"in place");
    assert!(span.contains(&chunk.as_ptr()));
}

#[test]
fn smoltcp_sack_blocks_across_the_wrap_of_sequence_numbers_are_understood() {
    // Enough connections that some data crosses the wrap is a matter of luck: the clock part of
    // the initial sequence number is moved instead, so that it is near the wrap.
    let mut wrapped = 0;
    for step in 0..64u64 {
        let mut l = with(|c| c.initial_window = 40);
        l.net.now = l.net.now + Duration::from_nanos(step << 38);
        let [a, b] = l.connect();
        let distance = 0u32.wrapping_sub(l.last(0).seq);
        // Within the next 2^26 bytes: go there.
        if distance > 1 << 26 {
            continue;
        }
        let bulk = distance as usize - 20 * MSS;
        let mut sent = 0;
        while sent < bulk {
            let n = (bulk - sent).min(MSS * 40);
            l.send(0, a, &vec![0; n]);
            l.net.run(Duration::from_millis(50), |n2| {
                n2.hosts[1].tcp_info(b).unwrap().readable >= n
            });
            l.read(1, b);
            l.net.hosts[0].take_acked(a, drop);
            l.seen.borrow_mut().clear();
            sent += n;
        }
        l.run_ms(5);
        l.send(0, a, b"!");
        l.run_ms(5);
        l.read(1, b);
        let before = l.net.hosts[0].stats().clone();
        let mut n = 0;
        l.lose(move |from, f| {
            let data = from == 0 && f.len() > 1000;
            n += u32::from(data);
            data && [3, 18, 19, 20, 21, 30].contains(&n)
        });
        let data = push(&mut l, 0, a, 40);
        l.run_ms(50);
        assert!(l.read(1, b) == data);
        let s = l.net.hosts[0].stats();
        assert_eq!(s.timeouts, before.timeouts);
        wrapped += 1;
    }
    assert!(wrapped > 0);
}

#[test]
fn smoltcp_new_data_acknowledged_restarts_the_retransmission_timer_rfc_6298_5_3() {
    let mut l = with(|c| {
        c.rto_min = Duration::from_millis(20);
        c.sack = false;
    });
    let [a, _] = l.connect();
    l.lose(|from, _| from == 1);
    let una = l.last(0).seq;
    push(&mut l, 0, a, 4);
    let mut ack = l.forge(1);
    for k in 1..4u32 {
        l.net.run(Duration::from_millis(15), |_| false);
        ack.ack = una.wrapping_add(k * MSS as u32);
        give(&mut l, 0, &ack);
    }
    assert_eq!(
        l.net.hosts[0].stats().timeouts,
        0,
        "45 ms without silence of 20"
    );
    l.run_ms(500);
    assert!(l.net.hosts[0].stats().timeouts > 0);
}

// ---- xarxa's audit ----

#[test]
fn xarxa_002_the_window_of_a_syn_is_not_scaled() {
    let mut l = with(|c| c.recv_window = 8 << 20);
    let now = l.net.now;
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    l.net.run(Duration::from_millis(5), |n| {
        n.hosts[0].tcp_info(a).unwrap().state == TcpState::Established
    });
    assert_eq!(l.net.hosts[0].tcp_info(a).unwrap().send_window, 0xffff);
}

#[test]
fn xarxa_003_a_fin_behind_what_the_window_cuts_off_is_not_taken() {
    let mut l = with(|c| c.recv_window = 4096);
    let [_, b] = l.connect();
    let mut s = l.forge(0);
    s.flags = FIN | ACK | PSH;
    s.payload = pattern(5000);
    give(&mut l, 1, &s);
    l.collect();
    assert!(
        !l.got(1).contains(Events::PEER_FIN),
        "904 bytes before it are missing"
    );
    assert_eq!(l.read(1, b), pattern(4096));
    l.run_ms(5);
    s.seq = s.seq.wrapping_add(4096);
    s.payload.drain(..4096);
    give(&mut l, 1, &s);
    l.collect();
    assert!(l.got(1).contains(Events::PEER_FIN));
    assert_eq!(l.read(1, b), pattern(5000)[4096..]);
}

#[test]
fn xarxa_013_066_segments_to_broadcast_or_multicast_addresses_open_and_answer_nothing() {
    let mut l = Lab::new();
    l.connect();
    let mut syn = l.forge(0);
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
                let (from, now) = (seen(&l), l.net.now);
                let info = FrameInfo {
                    checksum: RxChecksum::Good,
                    rss_hash: 0,
                };
                l.net.hosts[1].receive_burst(now, std::iter::once((f.into(), info)));
                l.net.poll();
                assert!(since(&l, 1, from).is_empty());
            }
        }
    }
    assert_eq!(l.net.hosts[1].connection_count(), 1);
}

#[test]
fn xarxa_018_probes_of_two_closed_windows_do_not_lock_each_other_out() {
    let mut l = with(|c| c.recv_window = 4 * MSS as u32);
    let ids = l.connect();
    let mut sent = [vec![], vec![]];
    for h in [0, 1] {
        sent[h] = push(&mut l, h, ids[h], 12);
    }
    // Both windows are closed, both probe; every window update of the first opening is lost.
    l.run_ms(300);
    assert!(l.net.hosts.iter().all(|h| h.stats().zero_window_probes > 1));
    let mut got = [vec![], vec![]];
    let mut lost = 0;
    l.lose(move |_, _| {
        lost += 1;
        lost <= 2
    });
    for _ in 0..400 {
        for h in [0, 1] {
            let b = l.read(h, ids[h]);
            got[h].extend(b);
        }
        l.run_ms(20);
    }
    assert!(got[0] == sent[1] && got[1] == sent[0]);
}

#[test]
fn xarxa_019_data_can_be_read_after_time_wait_has_passed() {
    let mut l = with(|c| c.time_wait = Duration::from_millis(50));
    let [a, b] = l.connect();
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.run_ms(2);
    l.send(1, b, b"late reader");
    let now = l.net.now;
    l.net.hosts[1].close(now, b);
    l.run_ms(2);
    assert_eq!(state(&l, 0, a), TcpState::TimeWait);
    l.run_ms(200);
    assert_eq!(state(&l, 0, a), TcpState::Closed);
    assert_eq!(l.read(0, a), b"late reader");
}

#[test]
fn xarxa_020_a_close_in_syn_received_still_finishes_the_handshake() {
    let mut l = Lab::new();
    let now = l.net.now;
    let to = |h: u8, p: u16| format!("10.0.0.{h}:{p}").parse().unwrap();
    // A simultaneous open whose SYN-ACKs are lost once.
    let a = l.net.hosts[0]
        .connect(now, None, Some(5001), to(2, 5002), 0)
        .unwrap();
    let b = l.net.hosts[1]
        .connect(now, None, Some(5002), to(1, 5001), 0)
        .unwrap();
    let mut lost = 0;
    l.lose(move |_, f| {
        let hit = f[12..14] == [8, 0] && f[47] & (SYN | ACK) == SYN | ACK && lost < 2;
        lost += u32::from(hit);
        hit
    });
    l.net.run(Duration::from_millis(5), |n| {
        n.hosts[0].tcp_info(a).unwrap().state == TcpState::SynReceived
    });
    assert_eq!(state(&l, 0, a), TcpState::SynReceived);
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.run_ms(5_000);
    assert_eq!(state(&l, 0, a), TcpState::FinWait2);
    assert_eq!(state(&l, 1, b), TcpState::CloseWait);
    let now = l.net.now;
    l.net.hosts[1].close(now, b);
    l.run_ms(10);
    assert_eq!(state(&l, 1, b), TcpState::Closed);
}

#[test]
fn xarxa_031_source_quench_and_unquoted_errors_end_nothing_067() {
    let mut l = Lab::new();
    let now = l.net.now;
    // Nobody answers: the connect is in SYN-SENT all the time.
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    l.lose(|from, f| from == 1 && f[12..14] == [8, 0]);
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(2);
    let syn = l.last(0);
    assert_eq!(syn.flags & SYN, SYN);
    let mut foreign = syn.clone();
    foreign.seq = foreign.seq.wrapping_add(1);
    for f in [icmp_error(&syn, [4, 0], 0), icmp_error(&foreign, [3, 3], 0)] {
        l.net.inject(1, f);
        l.run_ms(1);
        assert_eq!(state(&l, 0, a), TcpState::SynSent);
    }
}

#[test]
fn xarxa_064_314_loopback_and_impossible_sources_are_martians() {
    let mut l = Lab::new();
    l.connect();
    let mut syn = l.forge(0);
    (syn.flags, syn.sport, syn.options) = (SYN, 4000, vec![]);
    let before = l.net.hosts[1].stats().martians;
    let sources = [
        [127, 0, 0, 1],
        [0, 0, 0, 7],
        [224, 1, 2, 3],
        [255, 255, 255, 255],
    ];
    for src in sources {
        let mut f = syn.frame();
        f[26..30].copy_from_slice(&src);
        let (from, now) = (seen(&l), l.net.now);
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        l.net.hosts[1].receive_burst(now, std::iter::once((f.into(), info)));
        l.net.poll();
        assert!(since(&l, 1, from).is_empty(), "{src:?}");
    }
    assert_eq!(l.net.hosts[1].stats().martians - before, 4);
    assert_eq!(l.net.hosts[1].connection_count(), 1);
}

#[test]
fn xarxa_078_an_ack_that_found_no_room_is_still_owed() {
    let mut l = Lab::new();
    let [a, _] = l.connect();
    let s = {
        let mut s = l.forge(0);
        s.flags |= PSH;
        s.payload = b"acknowledge me".to_vec();
        s
    };
    let _ = a;
    l.net.sinks[1].space = Some(0);
    let from = seen(&l);
    give(&mut l, 1, &s);
    l.net.poll();
    assert!(since(&l, 1, from).is_empty() && l.net.hosts[1].has_output());
    l.net.sinks[1].space = None;
    l.net.poll();
    let acks = since(&l, 1, from);
    assert_eq!(acks.len(), 1);
    assert_eq!(acks[0].ack, s.seq.wrapping_add(14));
}

#[test]
fn xarxa_084_270_nothing_beyond_the_peers_fin_is_delivered_or_acknowledged() {
    // The bytes beyond it come before, with and after the FIN.
    for order in 0..3 {
        let mut l = Lab::new();
        let [_, b] = l.connect();
        let text = pattern(300);
        let part = |l: &Lab, from: usize, to: usize, fin: u8| {
            let mut s = l.forge(0);
            s.flags |= fin;
            s.seq = s.seq.wrapping_add(from as u32);
            s.payload = text[from..to].to_vec();
            s
        };
        let head = part(&l, 0, 100, 0);
        let end = part(&l, 100, 200, FIN);
        let beyond = part(&l, 200, 300, 0);
        let segs = match order {
            0 => [&beyond, &head, &end],
            1 => [&end, &beyond, &head],
            _ => [&beyond, &end, &head],
        };
        for s in segs {
            give(&mut l, 1, s);
        }
        l.run_ms(5);
        assert!(l.got(1).contains(Events::PEER_FIN), "order {order}");
        assert_eq!(l.read(1, b), text[..200], "order {order}");
        assert_eq!(l.last(1).ack, head.seq.wrapping_add(201), "order {order}");
        give(&mut l, 1, &beyond);
        l.run_ms(5);
        assert!(l.read(1, b).is_empty());
        assert_eq!(l.last(1).ack, head.seq.wrapping_add(201));
    }
}

#[test]
fn xarxa_086_without_sack_two_duplicates_let_new_data_out_and_a_partial_ack_repairs_rfc_3042_6582()
{
    let mut l = with(|c| {
        c.sack = false;
        c.initial_window = 4;
        c.rto_min = Duration::from_millis(200);
    });
    let [a, b] = l.connect();
    // The first ACK brings a new window and so is no duplicate: let it pass.
    l.send(0, a, b"x");
    l.run_ms(5);
    l.read(1, b);
    let mut n = 0;
    // Of a window of four the first is lost: two duplicates and no third, but for new data.
    l.lose(move |from, f| {
        let data = from == 0 && f.len() > 1000;
        n += u32::from(data);
        data && (n == 1 || n == 3)
    });
    let data = push(&mut l, 0, a, 10);
    l.run_ms(20);
    assert!(l.read(1, b) == data);
    let s = l.net.hosts[0].stats();
    assert_eq!((s.timeouts, s.fast_recovery), (0, 1));
    assert_eq!(s.retrans_segs, 2, "each lost one once");
}

#[test]
fn xarxa_087_090_a_window_shrunk_to_zero_over_data_in_flight_neither_wedges_nor_times_out() {
    let mut l = with(|c| c.user_timeout = Duration::from_secs(20));
    let [a, _] = l.connect();
    let una = l.last(0).seq;
    l.lose(|from, f| from == 1 && f[12..14] == [8, 0]);
    push(&mut l, 0, a, 2);
    // The first is taken, the window closes over the second.
    let mut ack = l.forge(1);
    ack.ack = una.wrapping_add(MSS as u32);
    ack.window = 0;
    give(&mut l, 0, &ack);
    let from = seen(&l);
    // The peer lives and answers for long beyond the user timeout.
    for _ in 0..60 {
        l.run_ms(1000);
        give(&mut l, 0, &ack);
    }
    assert_eq!(state(&l, 0, a), TcpState::Established, "SHLD-17");
    assert!(!since(&l, 0, from).is_empty(), "it is asked");
    ack.window = 1000;
    give(&mut l, 0, &ack);
    let from = seen(&l);
    l.run_ms(1_000);
    let second = una.wrapping_add(MSS as u32);
    assert!(
        since(&l, 0, from)
            .iter()
            .any(|s| s.seq == second && !s.payload.is_empty())
    );
    // A peer that says nothing at all is given up.
    l.run_ms(120_000);
    assert!(l.got(0).contains(Events::TIMED_OUT));
}

#[test]
fn xarxa_088_a_connection_without_owner_does_not_stay_in_fin_wait_2() {
    let mut l = with(|c| c.time_wait = Duration::from_secs(1));
    let [a, b] = l.connect();
    let now = l.net.now;
    l.net.hosts[0].release(now, a);
    l.run_ms(10);
    assert_eq!(state(&l, 1, b), TcpState::CloseWait);
    assert_eq!(l.net.hosts[0].connection_count(), 1);
    l.run_ms(2000);
    assert_eq!(l.net.hosts[0].connection_count(), 0);
}

#[test]
fn xarxa_089_092_silly_windows_are_neither_offered_nor_filled() {
    let mut l = with(|c| c.recv_window = 8 * MSS as u32);
    let [a, b] = l.connect();
    let data = push(&mut l, 0, a, 24);
    l.run_ms(20);
    // Reading bytes one by one opens nothing.
    let from = seen(&l);
    for _ in 0..200 {
        l.net.hosts[1].receive_queue(b).unwrap().consume(1);
        l.net.poll();
    }
    assert!(
        since(&l, 1, from).is_empty(),
        "no window updates of one byte"
    );
    let mut got = 200;
    for _ in 0..2000 {
        got += l.net.hosts[1].receive_queue(b).unwrap().consume(700);
        l.net.run(Duration::from_millis(1), |_| false);
    }
    assert_eq!(got, data.len());
    let short = since(&l, 0, 0)
        .iter()
        .filter(|s| (1..MSS).contains(&s.payload.len()))
        .count();
    assert!(short <= 2, "{short} silly segments");
}

#[test]
fn xarxa_091_duplicates_beside_a_lone_fin_do_not_disarm_its_timer() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.lose(|from, f| from == 0 && Seg::parse(0, f).is_some_and(|s| s.flags & FIN != 0));
    let ack = l.forge(1);
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.net.poll();
    for _ in 0..5 {
        give(&mut l, 0, &ack);
    }
    l.run_ms(20);
    l.lose(|_, _| false);
    l.run_ms(500);
    assert_eq!(state(&l, 1, b), TcpState::CloseWait);
    assert_eq!(state(&l, 0, a), TcpState::FinWait2);
}

#[test]
fn xarxa_094_095_no_connect_to_groups_nor_from_the_other_family() {
    let mut l = Lab::new();
    let now = l.net.now;
    for to in [
        "255.255.255.255:80",
        "224.0.0.1:80",
        "0.0.0.0:80",
        "[ff02::1]:80",
        "[::]:80",
        "10.0.0.2:0",
    ] {
        let r = l.net.hosts[0].connect(now, None, None, to.parse().unwrap(), 0);
        assert!(r.is_err(), "{to}");
    }
    let own6 = Some("fd00::1".parse().unwrap());
    let r = l.net.hosts[0].connect(now, own6, None, "10.0.0.2:80".parse().unwrap(), 0);
    assert!(r.is_err());
    assert_eq!(l.net.hosts[0].connection_count(), 0);
}

#[test]
fn xarxa_266_a_fin_coalesced_with_what_was_received_already_is_taken() {
    let mut l = Lab::new();
    let [_, b] = l.connect();
    let mut s = l.forge(0);
    s.payload = pattern(100);
    give(&mut l, 1, &s);
    s.flags |= FIN;
    give(&mut l, 1, &s);
    l.run_ms(5);
    assert!(l.got(1).contains(Events::PEER_FIN));
    assert_eq!(l.read(1, b), pattern(100));
}

#[test]
fn xarxa_267_the_ack_of_a_segment_that_a_closed_window_keeps_out_counts() {
    let mut l = with(|c| c.recv_window = 4096);
    let [_, b] = l.connect();
    l.lose(|_, _| true);
    let mut fill = l.forge(0);
    fill.payload = pattern(4096);
    give(&mut l, 1, &fill);
    l.net.poll();
    l.send(1, b, b"answer");
    assert_eq!(l.net.hosts[1].tcp_info(b).unwrap().in_flight, 6);
    let mut more = fill.clone();
    more.seq = fill.seq.wrapping_add(4096);
    more.ack = fill.ack.wrapping_add(6);
    give(&mut l, 1, &more);
    assert_eq!(
        l.net.hosts[1].tcp_info(b).unwrap().in_flight,
        0,
        "RFC 9293 section 3.10.7.4"
    );
    assert_eq!(
        l.net.hosts[1].tcp_info(b).unwrap().readable,
        4096,
        "the bytes do not count"
    );
    let from = seen(&l);
    l.net.poll();
    assert_eq!(since(&l, 1, from)[0].ack, more.seq);
}

#[test]
fn xarxa_273_a_fin_is_no_duplicate_ack_rfc_5681() {
    let mut l = with(|c| c.sack = false);
    let [a, _] = l.connect();
    l.lose(|_, _| true);
    let mut fin = l.forge(1);
    fin.flags |= FIN;
    push(&mut l, 0, a, 4);
    for _ in 0..5 {
        give(&mut l, 0, &fin);
    }
    let s = l.net.hosts[0].stats();
    assert_eq!((s.dup_acks_in, s.fast_recovery), (0, 0));
}

#[test]
fn xarxa_277_a_repeated_syn_leaves_slow_start_alone() {
    let mut l = with(|c| c.rto_initial = Duration::from_millis(10));
    let mut lost = 0;
    l.lose(move |from, f| {
        let hit = from == 0 && f[12..14] == [8, 0] && f[47] & SYN != 0 && lost < 1;
        lost += u32::from(hit);
        hit
    });
    let now = l.net.now;
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(100);
    assert_eq!(l.net.hosts[0].stats().syn_retrans, 1);
    let c = l.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!(c.state, TcpState::Established);
    assert!(c.ssthresh > 1 << 29 && c.cwnd == 10 * MSS as u32, "{c:?}");
}

#[test]
fn smoltcp_a_reset_beyond_the_window_is_ignored_and_one_with_fin_or_syn_is_a_reset_xarxa_288() {
    let mut l = Lab::new();
    let [_, b] = l.connect();
    let mut rst = l.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_sub(1 << 30);
    let from = seen(&l);
    give(&mut l, 1, &rst);
    l.net.poll();
    assert!(since(&l, 1, from).is_empty(), "no answer to a reset");
    assert_eq!(state(&l, 1, b), TcpState::Established);
    let mut rst = l.forge(0);
    rst.flags = RST | FIN | ACK;
    give(&mut l, 1, &rst);
    l.collect();
    assert!(l.got(1).contains(Events::RESET));
    // Nor is a stranger's reset answered.
    rst.sport = 9;
    let from = seen(&l);
    give(&mut l, 1, &rst);
    l.net.poll();
    assert!(since(&l, 1, from).is_empty());
}

// ---- TAS ----

#[test]
fn tas_15_the_last_send_leaves_without_anybody_asking_for_more() {
    // Userspace iWARP hung over TAS since the last of several sends was never flushed.
    for n in [1usize, 2, 3, 17] {
        let mut l = Lab::new();
        let [a, b] = l.connect();
        for k in 0..n {
            let record = vec![k as u8; 40];
            l.net.hosts[0]
                .push_record(a, 40, record, k + 1 == n)
                .unwrap();
            if k % 2 == 0 {
                l.net.hosts[0].take_acked(a, drop);
            }
        }
        assert!(!l.net.hosts[0].is_idle() && l.net.hosts[0].has_output());
        l.run_ms(1);
        assert_eq!(l.read(1, b).len(), 40 * n);
    }
}

// ---- libxlio ----

#[test]
fn libxlio_511_the_first_ssthresh_is_unlimited_so_tso_flows_ramp_in_round_trips_not_in_seconds() {
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

#[test]
fn libxlio_618_growth_does_not_stall_when_the_window_is_above_the_square_of_the_segment() {
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

#[test]
fn libxlio_644_a_window_that_the_receiver_limits_does_not_grow_without_bound() {
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

#[test]
fn demikernel_a_round_of_polling_sends_all_that_the_window_allows_not_one_frame() {
    let mut l = with(|c| c.initial_window = 64);
    let [a, _] = l.connect();
    let from = seen(&l);
    for c in pattern(64 * MSS).chunks(MSS) {
        l.net.hosts[0]
            .push_record(a, MSS as u32, c.to_vec(), false)
            .unwrap();
    }
    l.net.poll();
    assert_eq!(since(&l, 0, from).len(), 64);
}

#[test]
fn xarxa_278_idle_connections_cost_a_poll_nothing() {
    let mut c = host_config(0);
    c.neighbours = NeighbourConfig::default();
    c.addresses = vec![IpCidr::new("10.0.0.1".parse().unwrap(), 24)];
    let mut l = Lab::with([c, host_config(1)]);
    let ids = (0..100).map(|_| l.connect()).collect::<Vec<_>>();
    l.run_ms(100);
    assert!(!l.net.hosts[0].has_output() && l.net.hosts[0].is_idle());
    let from = seen(&l);
    for _ in 0..1000 {
        l.net.poll();
    }
    assert_eq!(seen(&l), from);
    assert_eq!(ids.len(), 100);
}
