//! How connections open, close, probe and recover, one behaviour a test.

mod common;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, RST, SYN, Seg, pattern};
use siw_tcp::sim::host_config;
use siw_tcp::{Events, Keepalive, TcpState};

fn state(l: &Lab, host: usize, id: siw_tcp::ConnId) -> TcpState {
    l.net.hosts[host]
        .tcp_info(id)
        .map_or(TcpState::Closed, |c| c.state)
}

#[test]
fn a_connection_negotiates_options_and_carries_data_both_ways() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let syn = l.seen.borrow()[0].clone();
    assert_eq!(syn.options.len(), 20);
    assert_eq!(
        &syn.options[..4],
        [2, 4, 5, 180],
        "MSS 1460 (RFC 9293 section 3.7.1)"
    );
    assert_eq!(
        &syn.options[16..],
        [1, 3, 3, 7],
        "window scale for 4 MiB (RFC 7323)"
    );
    assert_eq!(l.net.hosts[0].effective_mss(a), 1448);
    l.send(0, a, b"ping");
    l.run_ms(1);
    assert_eq!(l.read(1, b), b"ping");
    l.send(1, b, b"pong");
    l.run_ms(1);
    assert_eq!(l.read(0, a), b"pong");
    assert!(l.got(0).contains(Events::ACKED));
    let mut n = 0;
    l.net.hosts[0].take_acked(a, |r| {
        assert_eq!(r, b"ping");
        n += 1;
    });
    assert_eq!(n, 1);
}

#[test]
fn isns_differ_between_four_tuples_and_rise_with_time_rfc_6528() {
    let mut l = Lab::new();
    l.connect();
    l.connect();
    let syns: Vec<Seg> = l
        .seen
        .borrow()
        .iter()
        .filter(|s| s.flags == SYN)
        .cloned()
        .collect();
    assert_eq!(syns.len(), 2);
    assert_ne!(syns[0].seq, syns[1].seq);
    assert_ne!(syns[0].sport, syns[1].sport, "RFC 6056");
}

#[test]
fn both_ends_may_open_at_once_rfc_9293_figure_8() {
    let mut l = Lab::new();
    // Neighbours first, so that the SYNs cross.
    l.connect();
    let now = l.net.now;
    let a = l.net.hosts[0]
        .connect(now, None, Some(1000), "10.0.0.2:2000".parse().unwrap(), 0)
        .unwrap();
    let b = l.net.hosts[1]
        .connect(now, None, Some(2000), "10.0.0.1:1000".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(20);
    assert_eq!(
        (state(&l, 0, a), state(&l, 1, b)),
        (TcpState::Established, TcpState::Established)
    );
    l.send(0, a, &pattern(100_000));
    l.run_ms(20);
    assert_eq!(l.read(1, b), pattern(100_000));
}

#[test]
fn a_half_closed_connection_still_carries_the_other_direction_rfc_9293_3_6() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.run_ms(5);
    assert!(l.got(1).contains(Events::PEER_FIN));
    assert_eq!(
        (state(&l, 0, a), state(&l, 1, b)),
        (TcpState::FinWait2, TcpState::CloseWait)
    );
    assert!(
        l.net.hosts[0].push_record(a, 1, vec![0], true).is_err(),
        "closed for sending"
    );
    l.send(1, b, &pattern(50_000));
    l.run_ms(5);
    assert_eq!(l.read(0, a), pattern(50_000));
    let now = l.net.now;
    l.net.hosts[1].close(now, b);
    l.run_ms(5);
    assert_eq!(
        (state(&l, 0, a), state(&l, 1, b)),
        (TcpState::TimeWait, TcpState::Closed)
    );
    assert!(l.got(0).contains(Events::CLOSED) && l.got(1).contains(Events::CLOSED));
}

#[test]
fn both_ends_may_close_at_once_rfc_9293_figure_13() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.net.hosts[1].close(now, b);
    l.run_ms(5);
    assert_eq!(
        (state(&l, 0, a), state(&l, 1, b)),
        (TcpState::TimeWait, TcpState::TimeWait)
    );
    l.run_ms(61_000);
    assert_eq!(
        (state(&l, 0, a), state(&l, 1, b)),
        (TcpState::Closed, TcpState::Closed)
    );
    for (h, id) in [(0, a), (1, b)] {
        let now = l.net.now;
        l.net.hosts[h].release(now, id);
        assert_eq!(l.net.hosts[h].connection_count(), 0);
        assert!(l.net.hosts[h].is_idle() && l.net.hosts[h].tcp_info(id).is_none());
    }
}

#[test]
fn close_sends_what_is_queued_before_the_fin() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let data = pattern(200_000);
    for c in data.chunks(1448) {
        l.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    let now = l.net.now;
    l.net.hosts[0].release(now, a);
    assert!(l.net.hosts[0].tcp_info(a).is_none());
    l.run_ms(50);
    assert_eq!(l.read(1, b), data);
    assert!(l.got(1).contains(Events::PEER_FIN));
}

#[test]
fn a_closed_port_refuses() {
    let mut l = Lab::new();
    let now = l.net.now;
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:81".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(5);
    assert!(l.got(0).contains(Events::REFUSED | Events::CLOSED));
    assert_eq!(state(&l, 0, a), TcpState::Closed);
    assert_eq!(l.last(1).flags, RST | ACK);
}

#[test]
fn abort_resets_the_peer_at_once() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.net.hosts[0]
        .push_record(a, 3, vec![1, 2, 3], true)
        .unwrap();
    let now = l.net.now;
    l.net.hosts[0].abort(now, a);
    l.run_ms(5);
    assert!(l.got(0).contains(Events::CLOSED) && l.got(1).contains(Events::RESET | Events::CLOSED));
    assert_eq!(state(&l, 1, b), TcpState::Closed);
    let mut left = vec![];
    l.net.hosts[0].take_unacked(a, |r| left.push(r));
    assert_eq!(left, [vec![1, 2, 3]]);
}

#[test]
fn releasing_with_unread_data_resets_rfc_2525_2_17() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.send(0, a, b"unread");
    l.run_ms(1);
    let now = l.net.now;
    l.net.hosts[1].release(now, b);
    l.run_ms(5);
    assert!(l.got(0).contains(Events::RESET));
}

#[test]
fn a_blind_reset_or_syn_is_challenged_and_only_the_exact_reset_obeyed_rfc_5961() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.send(0, a, b"x");
    l.run_ms(5);
    let mut rst = l.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_add(100);
    l.inject(&rst);
    let mut syn = l.forge(0);
    syn.flags = SYN;
    l.inject(&syn);
    l.run_ms(5);
    assert_eq!(state(&l, 1, b), TcpState::Established);
    assert_eq!(l.net.hosts[1].stats().challenge_acks, 2);
    rst.seq = rst.seq.wrapping_sub(100);
    l.inject(&rst);
    l.run_ms(5);
    assert!(l.got(1).contains(Events::RESET));
}

#[test]
fn an_ack_beyond_snd_nxt_dequeues_no_unsent_data() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    // Unsent data beyond the congestion window.
    let data = pattern(30 * 1448);
    for c in data.chunks(1448) {
        l.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    let mut ack = l.forge(1);
    ack.ack = ack.ack.wrapping_add(25 * 1448);
    l.net.flush(0, a);
    let info = siw_tcp::FrameInfo {
        checksum: siw_tcp::RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = l.net.now;
    l.net.hosts[0].receive_burst(now, std::iter::once((ack.frame().into(), info)));
    assert_eq!(l.net.hosts[0].stats().bad_acks, 1);
    l.net.hosts[0].take_acked(a, |_| panic!("nothing was acknowledged"));
    l.run_ms(50);
    assert_eq!(l.read(1, b), data);
}

#[test]
fn a_mutual_timeout_with_full_windows_does_not_wedge() {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(|c| c.recv_window = 8 * 1448);
    let mut l = Lab::with(c);
    let [a, b] = l.connect();
    l.lose(|_, _| true);
    let data = pattern(8 * 1448);
    for (h, id) in [(0, a), (1, b)] {
        for c in data.chunks(1448) {
            l.net.hosts[h]
                .push_record(id, c.len() as u32, c.to_vec(), false)
                .unwrap();
        }
    }
    l.run_ms(100);
    assert!(l.net.hosts.iter().all(|h| h.stats().timeouts > 2));
    l.lose(|_, _| false);
    l.run_ms(2000);
    assert_eq!(l.read(0, a), data);
    assert_eq!(l.read(1, b), data);
    l.run_ms(10);
    assert!(l.net.hosts.iter().all(|h| h.is_idle()));
}

#[test]
fn the_last_send_leaves_without_a_flush() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.net.hosts[0]
        .push_record(a, 5, b"hello".to_vec(), true)
        .unwrap();
    assert!(!l.net.hosts[0].is_idle());
    l.run_ms(1);
    assert_eq!(l.read(1, b), b"hello");
}

#[test]
fn a_full_sink_keeps_the_work_for_later() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.net.sinks[0].space = Some(0);
    for _ in 0..3 {
        l.send(0, a, &pattern(1448));
    }
    l.run_ms(20);
    assert_eq!(l.net.hosts[1].tcp_info(b).unwrap().readable, 0);
    assert!(!l.net.hosts[0].is_idle() && l.net.hosts[0].has_output());
    l.net.sinks[0].space = Some(1);
    l.run_ms(1);
    l.net.sinks[0].space = None;
    l.run_ms(20);
    assert_eq!(
        l.read(1, b),
        [pattern(1448), pattern(1448), pattern(1448)].concat()
    );
}

#[test]
fn a_closed_window_is_probed_and_a_lost_update_does_not_wedge_rfc_9293_3_8_6_1() {
    let mut c = [host_config(0), host_config(1)];
    c[1].recv_window = 8192;
    let mut l = Lab::with(c);
    let [a, b] = l.connect();
    let data = pattern(40_000);
    for c in data.chunks(1000) {
        l.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), true)
            .unwrap();
    }
    l.run_ms(200);
    assert!(
        l.net.hosts[0].stats().zero_window_probes > 2
            || l.net.hosts[0].tcp_info(a).unwrap().send_window > 0
    );
    let mut got = l.read(1, b);
    assert!(got.len() <= 8192 && got.len() > 7000);
    // The window update vanishes.
    l.lose(|from, _| from == 1);
    l.run_ms(1);
    l.lose(|_, _| false);
    for _ in 0..400 {
        l.run_ms(20);
        got.extend(l.read(1, b));
    }
    assert_eq!(got, data);
    assert_eq!(
        l.net.hosts[0].tcp_info(a).unwrap().timeouts,
        0,
        "probing is no loss"
    );
}

#[test]
fn the_window_grows_far_beyond_64_kib_and_never_shrinks() {
    let mut l = Lab::new();
    let link = siw_tcp::sim::Impairment::perfect(Duration::from_millis(5));
    l.net.set_link(0, link);
    l.net.set_link(1, link);
    let now = l.net.now;
    l.net.hosts[1].listen(None, 80, 1, 0).unwrap();
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(30);
    let b = l.events[1][0].0;
    let mut most = 0;
    for _ in 0..120 {
        while l.net.hosts[0].send_room(a) >= 1448 {
            l.net.hosts[0]
                .push_record(a, 1448, vec![1; 1448], false)
                .unwrap();
        }
        l.run_ms(1);
        most = most.max(l.net.hosts[0].tcp_info(a).unwrap().in_flight);
        l.read(1, b);
    }
    assert!(most > 2 << 20, "{most}");
    let mut edge = None::<u32>;
    for s in l
        .seen
        .borrow()
        .iter()
        .filter(|s| s.from == 1 && s.flags & SYN == 0)
    {
        let e = s.ack.wrapping_add(u32::from(s.window) << 7);
        assert!(
            edge.is_none_or(|p| e.wrapping_sub(p) as i32 >= 0),
            "the right edge moved left"
        );
        edge = Some(e);
    }
}

#[test]
fn three_losses_in_a_window_are_repaired_without_a_timeout_rfc_6675() {
    for (sack, lost) in [
        (true, vec![5u32, 6, 11]),
        (true, vec![0, 10, 15]),
        (false, vec![5]),
    ] {
        let mut c = [host_config(0), host_config(1)];
        c[0].sack = sack;
        c[0].initial_window = 20;
        let mut l = Lab::with(c);
        let [a, b] = l.connect();
        let (mut n, drop) = (0, lost.clone());
        l.lose(move |from, f| {
            let data = from == 0 && f.len() > 1000;
            n += u32::from(data);
            data && drop.contains(&(n - 1))
        });
        let data = pattern(20 * 1448);
        for c in data.chunks(1448) {
            l.net.hosts[0]
                .push_record(a, c.len() as u32, c.to_vec(), false)
                .unwrap();
        }
        l.net.flush(0, a);
        l.run_ms(50);
        assert_eq!(l.read(1, b), data);
        let s = l.net.hosts[0].stats();
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (0, 1),
            "sack {sack} lost {lost:?}"
        );
        assert_eq!(
            s.retrans_segs,
            lost.len() as u64,
            "only what was lost is repeated"
        );
    }
}

#[test]
fn an_old_timestamp_is_dropped_and_answered_rfc_7323_5_3() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    l.run_ms(100);
    l.send(0, a, b"new");
    l.run_ms(5);
    let mut old = l.forge(0);
    let (val, ecr) = old.ts().unwrap();
    old.options = [
        &[1, 1, 8, 10][..],
        &val.wrapping_sub(50).to_be_bytes(),
        &ecr.to_be_bytes(),
    ]
    .concat();
    old.payload = b"stale".to_vec();
    l.inject(&old);
    l.run_ms(5);
    assert_eq!(l.read(1, b), b"new");
    assert_eq!(l.net.hosts[1].stats().paws_drops, 1);
}

#[test]
fn a_lost_syn_or_syn_ack_is_repeated() {
    for victim in [0, 1] {
        let mut l = Lab::new();
        let mut left = 1;
        l.lose(move |from, f| {
            let hit = from == victim
                && Seg::parse(from, f).is_some_and(|s| s.flags & SYN != 0)
                && left > 0;
            left -= i32::from(hit);
            hit
        });
        let now = l.net.now;
        l.net.hosts[1].listen(None, 80, 1, 0).unwrap();
        l.net.hosts[0]
            .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        l.run_ms(900);
        assert!(!l.got(0).contains(Events::CONNECTED));
        l.run_ms(400);
        assert!(
            l.got(0).contains(Events::CONNECTED),
            "RFC 6298 (2.1): after one second"
        );
    }
}

#[test]
fn an_unanswered_connect_times_out() {
    let mut c = [host_config(0), host_config(1)];
    c[0].syn_retries = 2;
    let mut l = Lab::with(c);
    l.connect();
    l.lose(|_, _| true);
    let now = l.net.now;
    l.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(8000);
    assert!(l.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

#[test]
fn data_unacknowledged_for_the_user_timeout_ends_the_connection_rfc_9293_3_8_3() {
    let mut c = [host_config(0), host_config(1)];
    c[0].user_timeout = Duration::from_secs(5);
    let mut l = Lab::with(c);
    let [a, _] = l.connect();
    l.lose(|_, _| true);
    l.send(0, a, b"lost");
    l.run_ms(4000);
    assert_eq!(state(&l, 0, a), TcpState::Established);
    l.run_ms(8000);
    assert!(l.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

#[test]
fn keepalive_finds_a_dead_peer_and_leaves_a_live_one_alone_rfc_9293_3_8_4() {
    let mut c = [host_config(0), host_config(1)];
    c[0].keepalive = Some(Keepalive {
        idle: Duration::from_secs(2),
        interval: Duration::from_secs(1),
        probes: 3,
    });
    let mut l = Lab::with(c);
    let [a, _] = l.connect();
    l.run_ms(20_000);
    assert_eq!(state(&l, 0, a), TcpState::Established);
    assert!(l.net.hosts[0].stats().keepalive_probes >= 8);
    l.lose(|_, _| true);
    l.run_ms(10_000);
    assert!(l.got(0).contains(Events::TIMED_OUT));
}

#[test]
fn a_new_syn_takes_over_time_wait_rfc_6191() {
    let mut l = Lab::new();
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    for round in 0..3 {
        let now = l.net.now;
        let a = l.net.hosts[0]
            .connect(now, None, Some(5000), "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        l.run_ms(10);
        assert_eq!(state(&l, 0, a), TcpState::Established, "round {round}");
        let b = l.events[1]
            .iter()
            .rev()
            .find(|(_, e)| e.contains(Events::ACCEPTED))
            .unwrap()
            .0;
        // The server closes first and keeps TIME-WAIT; then the client does.
        let (h, id, other, oid) = if round == 0 {
            (1, b, 0, a)
        } else {
            (0, a, 1, b)
        };
        let now = l.net.now;
        l.net.hosts[h].release(now, id);
        l.run_ms(5);
        let now = l.net.now;
        l.net.hosts[other].release(now, oid);
        l.run_ms(5);
    }
    assert_eq!(l.net.hosts[1].stats().time_wait_recycled, 1);
    assert_eq!(l.net.hosts[0].stats().time_wait_recycled, 1);
}

#[test]
fn a_port_that_only_an_old_time_wait_holds_is_drawn_when_no_other_is_left() {
    const FREE: u16 = 5000;
    let to = "10.0.0.2:80".parse().unwrap();
    let mut config = host_config(0);
    config.max_connections = 65_536;
    let mut l = Lab::with([config, host_config(1)]);
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = l.net.now;
    let a = l.net.hosts[0]
        .connect(now, None, Some(FREE), to, 0)
        .unwrap();
    l.run_ms(10);
    l.net.hosts[0].release(l.net.now, a);
    l.run_ms(5);
    let (b, _) = l.events[1][0];
    l.net.hosts[1].release(l.net.now, b);
    l.run_ms(5);
    // All others are taken; every draw looks at some ports, so that these many look at all.
    let now = l.net.now;
    let host = &mut l.net.hosts[0];
    for port in (1024..=65535).filter(|p| *p != FREE) {
        host.connect(now, None, Some(port), to, 0).unwrap();
    }
    let mut draw = |now| (0..1100).any(|_| host.connect(now, None, None, to, 0).is_ok());
    assert!(!draw(now), "it rests");
    let later = now + Duration::from_millis(1100);
    assert!(draw(later));
    assert_eq!(l.net.hosts[0].stats().time_wait_recycled, 1);
}

#[test]
fn a_device_can_connect_to_its_own_address() {
    let mut l = Lab::new();
    let now = l.net.now;
    l.net.hosts[0].listen(None, 80, 4, 0).unwrap();
    let a = l.net.hosts[0]
        .connect(now, None, None, "10.0.0.1:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(1);
    let b = l.events[0]
        .iter()
        .find(|(_, e)| e.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    let data = pattern(100_000);
    l.send(0, a, &data);
    l.run_ms(10);
    assert_eq!(l.read(0, b), data);
    assert_eq!(l.net.carried, 0, "no frame reached the wire");
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.net.hosts[0].close(now, b);
    l.run_ms(5);
    assert!(
        l.events[0]
            .iter()
            .filter(|(_, e)| e.contains(Events::CLOSED))
            .count()
            == 2
    );
}

#[test]
fn a_batch_is_acknowledged_once_and_data_carries_the_ack() {
    let mut c = [host_config(0), host_config(1)];
    c[0].initial_window = 32;
    let mut l = Lab::with(c);
    let [a, b] = l.connect();
    let before = l.net.hosts[1].stats().pure_acks_out;
    for _ in 0..32 {
        l.net.hosts[0]
            .push_record(a, 1448, vec![3; 1448], false)
            .unwrap();
    }
    l.net.flush(0, a);
    l.run_ms(5);
    assert_eq!(l.net.hosts[1].stats().pure_acks_out - before, 1);
    // A reply in the same batch as the message: no pure ACK at all.
    l.read(1, b);
    l.run_ms(5);
    let before = l.net.hosts[1].stats().pure_acks_out;
    l.send(0, a, b"request");
    let now = l.net.now;
    l.net.run(Duration::from_millis(1), |n| {
        n.hosts[1].tcp_info(b).unwrap().readable > 0 || n.now > now + common::micros(500)
    });
    l.read(1, b);
    l.send(1, b, b"reply");
    l.run_ms(5);
    assert_eq!(l.net.hosts[1].stats().pure_acks_out, before);
    assert_eq!(l.read(0, a), b"reply");
}

#[test]
fn a_single_segment_without_push_is_acknowledged_after_the_delay() {
    let mut l = Lab::new();
    let [a, _] = l.connect();
    l.run_ms(5);
    let at = l.net.now;
    l.net.hosts[0]
        .push_record(a, 100, vec![0; 100], false)
        .unwrap();
    l.net.flush(0, a);
    l.net
        .run(Duration::from_millis(50), |n| n.hosts[0].is_idle());
    let took = l.net.now - at;
    assert!(
        took >= Duration::from_millis(1) && took < Duration::from_millis(2),
        "{took:?}"
    );
    assert_eq!(l.net.hosts[1].stats().delayed_acks, 1);
}

#[test]
fn a_fin_that_overtakes_data_waits_for_it() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let mut n = 0;
    l.lose(move |from, f| {
        let data = from == 0 && Seg::parse(0, f).is_some_and(|s| !s.payload.is_empty());
        n += i32::from(data);
        data && n == 1
    });
    for _ in 0..2 {
        l.net.hosts[0]
            .push_record(a, 1448, pattern(1448), false)
            .unwrap();
    }
    let now = l.net.now;
    l.net.hosts[0].close(now, a);
    l.net.poll();
    l.net.run(common::micros(100), |_| false);
    l.collect();
    assert!(!l.got(1).contains(Events::PEER_FIN));
    assert_eq!(l.last(0).flags & FIN, FIN);
    l.run_ms(50);
    assert!(l.got(1).contains(Events::PEER_FIN));
    assert_eq!(l.read(1, b).len(), 2 * 1448);
    assert_eq!(
        l.net.hosts[0].stats().retrans_segs,
        1,
        "the FIN was remembered"
    );
}

#[test]
fn stale_ids_are_harmless() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let now = l.net.now;
    l.net.hosts[0].abort(now, a);
    l.net.hosts[0].release(now, a);
    l.run_ms(5);
    let [c, _] = l.connect();
    assert_ne!(a, c);
    let h = &mut l.net.hosts[0];
    assert!(h.tcp_info(a).is_none() && h.receive_queue(a).is_none());
    assert_eq!((h.effective_mss(a), h.send_room(a)), (0, 0));
    assert_eq!(h.push_record(a, 1, vec![9], true), Err(vec![9]));
    h.close(now, a);
    h.abort(now, a);
    h.release(now, a);
    h.set_user(a, 1);
    h.take_acked(a, |_| panic!());
    assert_eq!(state(&l, 0, c), TcpState::Established);
    assert_eq!(state(&l, 1, b), TcpState::Closed);
}
