//! Connections released by their owner before the peer acknowledged everything: they end, whatever the
//! peer answers, and are evicted when slots run out.

use std::time::Duration;

use crate::common::wire::{ACK, FIN, Lab, pattern};
use siw_net::ConnId;
use siw_tcp::{Events, StackConfig, TcpState};
use siw_tcp_sim::host_config;

const WINDOW: usize = 8192;

/// Host 1 offers a small window; host 0 gives up after 10 s.
fn configs() -> [StackConfig; 2] {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.orphan_timeout = Duration::from_secs(10);
    configs[0].tcp.time_wait = Duration::from_secs(2);
    configs[1].tcp.recv_window = WINDOW as u32;
    configs
}

/// A connection of host 0, released while host 1, which does not read, has closed its window.
fn blocked(lab: &mut Lab) -> [ConnId; 2] {
    let ids = lab.connect();
    for part in pattern(3 * WINDOW).chunks(1024) {
        lab.send(0, ids[0], part);
        lab.run_ms(2);
    }
    let info = lab.net.hosts[0].tcp_info(ids[0]).unwrap();
    assert!(info.unsent > 0 && info.in_flight == 0, "{info:?}");
    lab.net.hosts[0].release(lab.net.now, ids[0]);
    ids
}

fn events_of(lab: &Lab, host: usize, id: ConnId) -> Events {
    let of_it = lab.events[host].iter().filter(|(other, _)| *other == id);
    of_it.fold(Events::NONE, |all, (_, events)| all | *events)
}

#[test]
fn a_peer_with_a_closed_window_holds_no_orphan() {
    let mut lab = Lab::with(configs());
    let [_, b] = blocked(&mut lab);
    lab.run_ms(9000);
    assert_eq!(lab.net.hosts[0].connection_count(), 1);
    assert!(lab.net.hosts[0].stats().tcp.zero_window_probes > 2);
    lab.run_ms(1500);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
    assert!(events_of(&lab, 1, b).contains(Events::RESET));
    assert_eq!(lab.net.hosts[0].stats().tcp.abort_on_timeout, 1);
    assert!(lab.net.hosts[0].is_idle());
}

#[test]
fn an_orphan_that_its_peer_reads_delivers_everything() {
    let mut lab = Lab::with(configs());
    let [_, b] = blocked(&mut lab);
    lab.run_ms(8000);
    let mut got = vec![];
    for _ in 0..20 {
        got.extend(lab.read(1, b));
        lab.run_ms(50);
    }
    assert_eq!(got, pattern(3 * WINDOW));
    assert!(events_of(&lab, 1, b).contains(Events::PEER_FIN));
    lab.net.hosts[1].release(lab.net.now, b);
    lab.run_ms(3000);
    for host in &lab.net.hosts {
        assert_eq!((host.connection_count(), host.stats().tcp.out_rsts), (0, 0));
    }
}

#[test]
fn a_peer_that_acks_byte_by_byte_holds_no_orphan() {
    let mut lab = Lab::with(configs());
    let [a, _] = lab.connect();
    lab.send(1, lab.events[1][0].0, b"x");
    lab.run_ms(5);
    lab.read(0, a);
    lab.lose(|from, _| from == 1);
    let mut ack = lab.forge(1);
    lab.send(0, a, &pattern(1000));
    lab.net.hosts[0].release(lab.net.now, a);
    for _ in 0..9 {
        lab.run_ms(1000);
        ack.ack = ack.ack.wrapping_add(1);
        lab.inject(&ack);
    }
    assert_eq!(lab.net.hosts[0].connection_count(), 1);
    for _ in 0..3 {
        lab.run_ms(1000);
        ack.ack = ack.ack.wrapping_add(1);
        lab.inject(&ack);
    }
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

/// CLOSING and LAST-ACK (RFC 9293 figure 5), with a peer that never acknowledges our FIN but keeps
/// sending ACKs.
#[test]
fn closing_and_last_ack_have_a_deadline() {
    for peer_first in [false, true] {
        let mut lab = Lab::with(configs());
        let [a, b] = lab.connect();
        lab.send(1, b, b"x");
        lab.run_ms(5);
        lab.read(0, a);
        lab.lose(|from, _| from == 1);
        let mut seg = lab.forge(1);
        let close = |lab: &mut Lab| {
            lab.net.hosts[0].close(lab.net.now, a);
            lab.run_ms(5);
        };
        if !peer_first {
            close(&mut lab);
        }
        seg.flags = ACK | FIN;
        lab.inject(&seg);
        lab.run_ms(5);
        if peer_first {
            close(&mut lab);
        }
        let state = lab.net.hosts[0].tcp_info(a).unwrap().state;
        let expected = [TcpState::Closing, TcpState::LastAck];
        assert_eq!(state, expected[usize::from(peer_first)]);
        lab.net.hosts[0].release(lab.net.now, a);
        seg.flags = ACK;
        seg.seq = seg.seq.wrapping_add(1);
        for _ in 0..11 {
            // Alternate between two windows, so that half of the ACKs are window updates.
            seg.window ^= 1;
            lab.inject(&seg);
            lab.run_ms(1000);
        }
        assert_eq!(lab.net.hosts[0].connection_count(), 0, "{state:?}");
    }
}

#[test]
fn the_oldest_orphan_gives_way_to_a_connection() {
    let mut configs = configs();
    configs[0].tcp.max_connections = 4;
    let mut lab = Lab::with(configs);
    let [honest, honest_peer] = lab.connect();
    let orphans: Vec<_> = (0..3).map(|_| blocked(&mut lab)[1]).collect();
    let now = lab.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    for (turn, orphan) in orphans.iter().enumerate() {
        lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
        lab.run_ms(5);
        assert!(events_of(&lab, 1, *orphan).contains(Events::RESET));
        assert_eq!(
            lab.net.hosts[0].stats().tcp.orphans_evicted,
            turn as u64 + 1
        );
    }
    assert!(lab.net.hosts[0].connect(now, None, None, to, 0).is_err());
    lab.send(0, honest, b"still here");
    lab.run_ms(5);
    assert_eq!(lab.read(1, honest_peer), b"still here");
}

#[test]
fn a_listener_gets_the_slot_of_an_orphan_too() {
    let mut configs = configs();
    configs[0].tcp.max_connections = 1;
    let mut lab = Lab::with(configs);
    let [_, orphan] = blocked(&mut lab);
    let now = lab.net.now;
    lab.net.hosts[0].listen(None, 90, 4, 0).unwrap();
    let to = "10.0.0.1:90".parse().unwrap();
    lab.net.hosts[1].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(5);
    assert!(events_of(&lab, 1, orphan).contains(Events::RESET));
    assert!(lab.got(0).contains(Events::ACCEPTED));
}

#[test]
fn a_time_wait_gives_way_before_an_orphan() {
    let mut configs = configs();
    configs[0].tcp.max_connections = 2;
    let mut lab = Lab::with(configs);
    let [_, orphan] = blocked(&mut lab);
    let [a, b] = lab.connect();
    lab.net.hosts[0].release(lab.net.now, a);
    lab.run_ms(5);
    lab.net.hosts[1].release(lab.net.now, b);
    lab.run_ms(5);
    lab.connect();
    let stats = lab.net.hosts[0].stats();
    assert_eq!(
        (stats.tcp.time_wait_evicted, stats.tcp.orphans_evicted),
        (1, 0)
    );
    assert!(!events_of(&lab, 1, orphan).contains(Events::RESET));
}

#[test]
fn an_orphan_holds_no_received_buffers() {
    let mut lab = Lab::with(configs());
    let [a, b] = lab.connect();
    lab.send(1, b, b"x");
    lab.run_ms(5);
    lab.read(0, a);
    // The first of two segments is lost, so that the second waits out of order.
    let mut first = true;
    lab.lose(move |from, _| from == 1 && std::mem::take(&mut first));
    lab.send(1, b, &pattern(500));
    lab.send(1, b, &pattern(500));
    lab.net.run(Duration::from_micros(80), |_| false);
    assert_eq!(lab.net.hosts[0].held_buffers(), 1);
    lab.net.hosts[0].release(lab.net.now, a);
    assert_eq!(lab.net.hosts[0].held_buffers(), 0);
    lab.run_ms(20);
    assert!(lab.got(1).contains(Events::RESET), "nobody will read it");
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}
