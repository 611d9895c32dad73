//! How connections open, close, probe and recover, one behaviour a test.

mod common;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, RST, SYN, Seg, pattern};
use siw_tcp::sim::host_config;
use siw_tcp::{Events, Keepalive, TcpState};

fn state(lab: &Lab, host: usize, id: siw_tcp::ConnId) -> TcpState {
    lab.net.hosts[host]
        .tcp_info(id)
        .map_or(TcpState::Closed, |c| c.state)
}

#[test]
fn options_are_negotiated_and_data_flows_both_ways() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let syn = lab.seen.borrow()[0].clone();
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
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1448);
    lab.send(0, a, b"ping");
    lab.run_ms(1);
    assert_eq!(lab.read(1, b), b"ping");
    lab.send(1, b, b"pong");
    lab.run_ms(1);
    assert_eq!(lab.read(0, a), b"pong");
    assert!(lab.got(0).contains(Events::ACKED));
    let mut n = 0;
    lab.net.hosts[0].take_acked(a, |r| {
        assert_eq!(r, b"ping");
        n += 1;
    });
    assert_eq!(n, 1);
}

/// RFC 6528.
#[test]
fn isns_differ_by_four_tuple_and_rise_with_time() {
    let mut lab = Lab::new();
    lab.connect();
    lab.connect();
    let syns: Vec<Seg> = lab
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
    let mut lab = Lab::new();
    // Neighbours first, so that the SYNs cross.
    lab.connect();
    let now = lab.net.now;
    let a = lab.net.hosts[0]
        .connect(now, None, Some(1000), "10.0.0.2:2000".parse().unwrap(), 0)
        .unwrap();
    let b = lab.net.hosts[1]
        .connect(now, None, Some(2000), "10.0.0.1:1000".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(20);
    assert_eq!(
        (state(&lab, 0, a), state(&lab, 1, b)),
        (TcpState::Established, TcpState::Established)
    );
    lab.send(0, a, &pattern(100_000));
    lab.run_ms(20);
    assert_eq!(lab.read(1, b), pattern(100_000));
}

/// RFC 9293 section 3.6.
#[test]
fn a_half_closed_connection_carries_the_other_way() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(
        (state(&lab, 0, a), state(&lab, 1, b)),
        (TcpState::FinWait2, TcpState::CloseWait)
    );
    assert!(
        lab.net.hosts[0].push_record(a, 1, vec![0], true).is_err(),
        "closed for sending"
    );
    lab.send(1, b, &pattern(50_000));
    lab.run_ms(5);
    assert_eq!(lab.read(0, a), pattern(50_000));
    let now = lab.net.now;
    lab.net.hosts[1].close(now, b);
    lab.run_ms(5);
    assert_eq!(
        (state(&lab, 0, a), state(&lab, 1, b)),
        (TcpState::TimeWait, TcpState::Closed)
    );
    assert!(lab.got(0).contains(Events::CLOSED) && lab.got(1).contains(Events::CLOSED));
}

#[test]
fn both_ends_may_close_at_once_rfc_9293_figure_13() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.net.hosts[1].close(now, b);
    lab.run_ms(5);
    assert_eq!(
        (state(&lab, 0, a), state(&lab, 1, b)),
        (TcpState::TimeWait, TcpState::TimeWait)
    );
    lab.run_ms(61_000);
    assert_eq!(
        (state(&lab, 0, a), state(&lab, 1, b)),
        (TcpState::Closed, TcpState::Closed)
    );
    for (h, id) in [(0, a), (1, b)] {
        let now = lab.net.now;
        lab.net.hosts[h].release(now, id);
        assert_eq!(lab.net.hosts[h].connection_count(), 0);
        assert!(lab.net.hosts[h].is_idle() && lab.net.hosts[h].tcp_info(id).is_none());
    }
}

#[test]
fn close_sends_what_is_queued_before_the_fin() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let data = pattern(200_000);
    for c in data.chunks(1448) {
        lab.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    let now = lab.net.now;
    lab.net.hosts[0].release(now, a);
    assert!(lab.net.hosts[0].tcp_info(a).is_none());
    lab.run_ms(50);
    assert_eq!(lab.read(1, b), data);
    assert!(lab.got(1).contains(Events::PEER_FIN));
}

#[test]
fn a_closed_port_refuses() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:81".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(5);
    assert!(lab.got(0).contains(Events::REFUSED | Events::CLOSED));
    assert_eq!(state(&lab, 0, a), TcpState::Closed);
    assert_eq!(lab.last(1).flags, RST | ACK);
}

#[test]
fn abort_resets_the_peer_at_once() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.net.hosts[0]
        .push_record(a, 3, vec![1, 2, 3], true)
        .unwrap();
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, a);
    lab.run_ms(5);
    assert!(
        lab.got(0).contains(Events::CLOSED) && lab.got(1).contains(Events::RESET | Events::CLOSED)
    );
    assert_eq!(state(&lab, 1, b), TcpState::Closed);
    let mut left = vec![];
    lab.net.hosts[0].take_unacked(a, |r| left.push(r));
    assert_eq!(left, [vec![1, 2, 3]]);
}

#[test]
fn releasing_with_unread_data_resets_rfc_2525_2_17() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.send(0, a, b"unread");
    lab.run_ms(1);
    let now = lab.net.now;
    lab.net.hosts[1].release(now, b);
    lab.run_ms(5);
    assert!(lab.got(0).contains(Events::RESET));
}

/// Only a reset with the expected sequence number is obeyed (RFC 5961).
#[test]
fn blind_resets_and_syns_are_challenged() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.send(0, a, b"x");
    lab.run_ms(5);
    let mut rst = lab.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_add(100);
    lab.inject(&rst);
    let mut syn = lab.forge(0);
    syn.flags = SYN;
    lab.inject(&syn);
    lab.run_ms(5);
    assert_eq!(state(&lab, 1, b), TcpState::Established);
    assert_eq!(lab.net.hosts[1].stats().challenge_acks, 2);
    rst.seq = rst.seq.wrapping_sub(100);
    lab.inject(&rst);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::RESET));
}

#[test]
fn an_ack_beyond_snd_nxt_dequeues_no_unsent_data() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    // Unsent data beyond the congestion window.
    let data = pattern(30 * 1448);
    for c in data.chunks(1448) {
        lab.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    let mut ack = lab.forge(1);
    ack.ack = ack.ack.wrapping_add(25 * 1448);
    lab.net.flush(0, a);
    let info = siw_tcp::FrameInfo {
        checksum: siw_tcp::RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[0].receive_burst(now, std::iter::once((ack.frame().into(), info)));
    assert_eq!(lab.net.hosts[0].stats().bad_acks, 1);
    lab.net.hosts[0].take_acked(a, |_| panic!("nothing was acknowledged"));
    lab.run_ms(50);
    assert_eq!(lab.read(1, b), data);
}

#[test]
fn a_mutual_timeout_with_full_windows_does_not_wedge() {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(|c| c.recv_window = 8 * 1448);
    let mut lab = Lab::with(c);
    let [a, b] = lab.connect();
    lab.lose(|_, _| true);
    let data = pattern(8 * 1448);
    for (h, id) in [(0, a), (1, b)] {
        for c in data.chunks(1448) {
            lab.net.hosts[h]
                .push_record(id, c.len() as u32, c.to_vec(), false)
                .unwrap();
        }
    }
    lab.run_ms(100);
    assert!(lab.net.hosts.iter().all(|h| h.stats().timeouts > 2));
    lab.lose(|_, _| false);
    lab.run_ms(2000);
    assert_eq!(lab.read(0, a), data);
    assert_eq!(lab.read(1, b), data);
    lab.run_ms(10);
    assert!(lab.net.hosts.iter().all(|h| h.is_idle()));
}

#[test]
fn the_last_send_leaves_without_a_flush() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.net.hosts[0]
        .push_record(a, 5, b"hello".to_vec(), true)
        .unwrap();
    assert!(!lab.net.hosts[0].is_idle());
    lab.run_ms(1);
    assert_eq!(lab.read(1, b), b"hello");
}

#[test]
fn a_full_sink_keeps_the_work_for_later() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.net.sinks[0].space = Some(0);
    for _ in 0..3 {
        lab.send(0, a, &pattern(1448));
    }
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[1].tcp_info(b).unwrap().readable, 0);
    assert!(!lab.net.hosts[0].is_idle() && lab.net.hosts[0].has_output());
    lab.net.sinks[0].space = Some(1);
    lab.run_ms(1);
    lab.net.sinks[0].space = None;
    lab.run_ms(20);
    assert_eq!(
        lab.read(1, b),
        [pattern(1448), pattern(1448), pattern(1448)].concat()
    );
}

/// Also when the window update is lost (RFC 9293 section 3.8.6.1).
#[test]
fn a_zero_window_is_probed_until_it_opens() {
    let mut c = [host_config(0), host_config(1)];
    c[1].recv_window = 8192;
    let mut lab = Lab::with(c);
    let [a, b] = lab.connect();
    let data = pattern(40_000);
    for c in data.chunks(1000) {
        lab.net.hosts[0]
            .push_record(a, c.len() as u32, c.to_vec(), true)
            .unwrap();
    }
    lab.run_ms(200);
    assert!(
        lab.net.hosts[0].stats().zero_window_probes > 2
            || lab.net.hosts[0].tcp_info(a).unwrap().send_window > 0
    );
    let mut got = lab.read(1, b);
    assert!(got.len() <= 8192 && got.len() > 7000);
    // The window update vanishes.
    lab.lose(|from, _| from == 1);
    lab.run_ms(1);
    lab.lose(|_, _| false);
    for _ in 0..400 {
        lab.run_ms(20);
        got.extend(lab.read(1, b));
    }
    assert_eq!(got, data);
    assert_eq!(
        lab.net.hosts[0].tcp_info(a).unwrap().timeouts,
        0,
        "probing is no loss"
    );
}

#[test]
fn the_window_exceeds_64_kib_and_never_shrinks() {
    let mut lab = Lab::new();
    let link = siw_tcp::sim::Impairment::perfect(Duration::from_millis(5));
    lab.net.set_link(0, link);
    lab.net.set_link(1, link);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 1, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(30);
    let b = lab.events[1][0].0;
    let mut most = 0;
    for _ in 0..120 {
        while lab.net.hosts[0].send_room(a) >= 1448 {
            lab.net.hosts[0]
                .push_record(a, 1448, vec![1; 1448], false)
                .unwrap();
        }
        lab.run_ms(1);
        most = most.max(lab.net.hosts[0].tcp_info(a).unwrap().in_flight);
        lab.read(1, b);
    }
    assert!(most > 2 << 20, "{most}");
    let mut edge = None::<u32>;
    for s in lab
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

/// RFC 6675.
#[test]
fn three_losses_are_repaired_without_a_timeout() {
    for (sack, lost) in [
        (true, vec![5u32, 6, 11]),
        (true, vec![0, 10, 15]),
        (false, vec![5]),
    ] {
        let mut c = [host_config(0), host_config(1)];
        c[0].sack = sack;
        c[0].initial_window = 20;
        let mut lab = Lab::with(c);
        let [a, b] = lab.connect();
        let (mut n, drop) = (0, lost.clone());
        lab.lose(move |from, f| {
            let data = from == 0 && f.len() > 1000;
            n += u32::from(data);
            data && drop.contains(&(n - 1))
        });
        let data = pattern(20 * 1448);
        for c in data.chunks(1448) {
            lab.net.hosts[0]
                .push_record(a, c.len() as u32, c.to_vec(), false)
                .unwrap();
        }
        lab.net.flush(0, a);
        lab.run_ms(50);
        assert_eq!(lab.read(1, b), data);
        let s = lab.net.hosts[0].stats();
        assert_eq!(
            (s.timeouts, s.fast_recovery),
            (0, 1),
            "sack {sack} lost {lost:?}"
        );
        assert_eq!(
            s.retrans_segs,
            lost.len() as u64,
            "only what was lost is sent again"
        );
    }
}

/// RFC 7323 section 5.3.
#[test]
fn an_old_timestamp_is_dropped_and_answered() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.run_ms(100);
    lab.send(0, a, b"new");
    lab.run_ms(5);
    let mut old = lab.forge(0);
    let (val, ecr) = old.ts().unwrap();
    old.options = [
        &[1, 1, 8, 10][..],
        &val.wrapping_sub(50).to_be_bytes(),
        &ecr.to_be_bytes(),
    ]
    .concat();
    old.payload = b"stale".to_vec();
    lab.inject(&old);
    lab.run_ms(5);
    assert_eq!(lab.read(1, b), b"new");
    assert_eq!(lab.net.hosts[1].stats().paws_drops, 1);
}

#[test]
fn a_lost_syn_or_syn_ack_is_sent_again() {
    for victim in [0, 1] {
        let mut lab = Lab::new();
        let mut left = 1;
        lab.lose(move |from, f| {
            let hit = from == victim
                && Seg::parse(from, f).is_some_and(|s| s.flags & SYN != 0)
                && left > 0;
            left -= i32::from(hit);
            hit
        });
        let now = lab.net.now;
        lab.net.hosts[1].listen(None, 80, 1, 0).unwrap();
        lab.net.hosts[0]
            .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(900);
        assert!(!lab.got(0).contains(Events::CONNECTED));
        lab.run_ms(400);
        assert!(
            lab.got(0).contains(Events::CONNECTED),
            "RFC 6298 (2.1): after one second"
        );
    }
}

#[test]
fn an_unanswered_connect_times_out() {
    let mut c = [host_config(0), host_config(1)];
    c[0].syn_retries = 2;
    let mut lab = Lab::with(c);
    lab.connect();
    lab.lose(|_, _| true);
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(8000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

/// RFC 9293 section 3.8.3.
#[test]
fn the_user_timeout_ends_the_connection() {
    let mut c = [host_config(0), host_config(1)];
    c[0].user_timeout = Duration::from_secs(5);
    let mut lab = Lab::with(c);
    let [a, _] = lab.connect();
    lab.lose(|_, _| true);
    lab.send(0, a, b"lost");
    lab.run_ms(4000);
    assert_eq!(state(&lab, 0, a), TcpState::Established);
    lab.run_ms(8000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

/// RFC 9293 section 3.8.4.
#[test]
fn keepalive_ends_only_connections_of_dead_peers() {
    let mut c = [host_config(0), host_config(1)];
    c[0].keepalive = Some(Keepalive {
        idle: Duration::from_secs(2),
        interval: Duration::from_secs(1),
        probes: 3,
    });
    let mut lab = Lab::with(c);
    let [a, _] = lab.connect();
    lab.run_ms(20_000);
    assert_eq!(state(&lab, 0, a), TcpState::Established);
    assert!(lab.net.hosts[0].stats().keepalive_probes >= 8);
    lab.lose(|_, _| true);
    lab.run_ms(10_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

#[test]
fn a_new_syn_takes_over_time_wait_rfc_6191() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    for round in 0..3 {
        let now = lab.net.now;
        let a = lab.net.hosts[0]
            .connect(now, None, Some(5000), "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(10);
        assert_eq!(state(&lab, 0, a), TcpState::Established, "round {round}");
        let b = lab.events[1]
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
        let now = lab.net.now;
        lab.net.hosts[h].release(now, id);
        lab.run_ms(5);
        let now = lab.net.now;
        lab.net.hosts[other].release(now, oid);
        lab.run_ms(5);
    }
    assert_eq!(lab.net.hosts[1].stats().time_wait_recycled, 1);
    assert_eq!(lab.net.hosts[0].stats().time_wait_recycled, 1);
}

#[test]
fn ports_in_time_wait_are_reused_when_all_are_taken() {
    const FREE: u16 = 5000;
    let to = "10.0.0.2:80".parse().unwrap();
    let mut config = host_config(0);
    config.max_connections = 65_536;
    let mut lab = Lab::with([config, host_config(1)]);
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = lab.net.now;
    let a = lab.net.hosts[0]
        .connect(now, None, Some(FREE), to, 0)
        .unwrap();
    lab.run_ms(10);
    lab.net.hosts[0].release(lab.net.now, a);
    lab.run_ms(5);
    let (b, _) = lab.events[1][0];
    lab.net.hosts[1].release(lab.net.now, b);
    lab.run_ms(5);
    // All others are taken; every draw looks at some ports, so that these many look at all.
    let now = lab.net.now;
    let host = &mut lab.net.hosts[0];
    for port in (1024..=65535).filter(|p| *p != FREE) {
        host.connect(now, None, Some(port), to, 0).unwrap();
    }
    let mut draw = |now| (0..1100).any(|_| host.connect(now, None, None, to, 0).is_ok());
    assert!(!draw(now), "it rests");
    let later = now + Duration::from_millis(1100);
    assert!(draw(later));
    assert_eq!(lab.net.hosts[0].stats().time_wait_recycled, 1);
}

#[test]
fn a_device_can_connect_to_its_own_address() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[0].listen(None, 80, 4, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.1:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1);
    let b = lab.events[0]
        .iter()
        .find(|(_, e)| e.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    let data = pattern(100_000);
    lab.send(0, a, &data);
    lab.run_ms(10);
    assert_eq!(lab.read(0, b), data);
    assert_eq!(lab.net.carried, 0, "no frame reached the wire");
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.net.hosts[0].close(now, b);
    lab.run_ms(5);
    assert!(
        lab.events[0]
            .iter()
            .filter(|(_, e)| e.contains(Events::CLOSED))
            .count()
            == 2
    );
}

#[test]
fn a_batch_gets_one_ack_which_data_carries() {
    let mut c = [host_config(0), host_config(1)];
    c[0].initial_window = 32;
    let mut lab = Lab::with(c);
    let [a, b] = lab.connect();
    let before = lab.net.hosts[1].stats().pure_acks_out;
    for _ in 0..32 {
        lab.net.hosts[0]
            .push_record(a, 1448, vec![3; 1448], false)
            .unwrap();
    }
    lab.net.flush(0, a);
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].stats().pure_acks_out - before, 1);
    // A reply in the same batch as the message: no pure ACK at all.
    lab.read(1, b);
    lab.run_ms(5);
    let before = lab.net.hosts[1].stats().pure_acks_out;
    lab.send(0, a, b"request");
    let now = lab.net.now;
    lab.net.run(Duration::from_millis(1), |n| {
        n.hosts[1].tcp_info(b).unwrap().readable > 0 || n.now > now + common::micros(500)
    });
    lab.read(1, b);
    lab.send(1, b, b"reply");
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].stats().pure_acks_out, before);
    assert_eq!(lab.read(0, a), b"reply");
}

#[test]
fn a_segment_without_push_gets_a_delayed_ack() {
    let mut lab = Lab::new();
    let [a, _] = lab.connect();
    lab.run_ms(5);
    let at = lab.net.now;
    lab.net.hosts[0]
        .push_record(a, 100, vec![0; 100], false)
        .unwrap();
    lab.net.flush(0, a);
    lab.net
        .run(Duration::from_millis(50), |n| n.hosts[0].is_idle());
    let took = lab.net.now - at;
    assert!(
        took >= Duration::from_millis(1) && took < Duration::from_millis(2),
        "{took:?}"
    );
    assert_eq!(lab.net.hosts[1].stats().delayed_acks, 1);
}

#[test]
fn a_fin_that_overtakes_data_waits_for_it() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let mut n = 0;
    lab.lose(move |from, f| {
        let data = from == 0 && Seg::parse(0, f).is_some_and(|s| !s.payload.is_empty());
        n += i32::from(data);
        data && n == 1
    });
    for _ in 0..2 {
        lab.net.hosts[0]
            .push_record(a, 1448, pattern(1448), false)
            .unwrap();
    }
    let now = lab.net.now;
    lab.net.hosts[0].close(now, a);
    lab.net.poll();
    lab.net.run(common::micros(100), |_| false);
    lab.collect();
    assert!(!lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.last(0).flags & FIN, FIN);
    lab.run_ms(50);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, b).len(), 2 * 1448);
    assert_eq!(
        lab.net.hosts[0].stats().retrans_segs,
        1,
        "the FIN was remembered"
    );
}

#[test]
fn stale_ids_are_harmless() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, a);
    lab.net.hosts[0].release(now, a);
    lab.run_ms(5);
    let [c, _] = lab.connect();
    assert_ne!(a, c);
    let h = &mut lab.net.hosts[0];
    assert!(h.tcp_info(a).is_none() && h.receive_queue(a).is_none());
    assert_eq!((h.effective_mss(a), h.send_room(a)), (0, 0));
    assert_eq!(h.push_record(a, 1, vec![9], true), Err(vec![9]));
    h.close(now, a);
    h.abort(now, a);
    h.release(now, a);
    h.set_user(a, 1);
    h.take_acked(a, |_| panic!());
    assert_eq!(state(&lab, 0, c), TcpState::Established);
    assert_eq!(state(&lab, 1, b), TcpState::Closed);
}
