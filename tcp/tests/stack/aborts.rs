//! Resets of connections that end in large numbers at once: each one reaches its peer, however many
//! other frames wait, and even if the port accepts only a few frames at a time.

use crate::common::wire::{Lab, Seg};
use siw_net::ConnId;
use siw_tcp::Events;
use siw_tcp_sim::host_config;

const COUNT: usize = 1000;

/// Opens `COUNT` connections from host 0 to host 1.
fn many() -> (Lab, Vec<ConnId>) {
    let configs = [host_config(0), host_config(1)];
    let mut lab = Lab::with(configs);
    lab.net.hosts[1].listen(None, 80, COUNT, 0).unwrap();
    let to = "10.0.0.2:80".parse().unwrap();
    let now = lab.net.now;
    let ids = (0..COUNT)
        .map(|_| lab.net.hosts[0].connect(now, None, None, to, 0).unwrap())
        .collect();
    lab.run_ms(20);
    let accepted = lab.events[1].iter();
    let accepted = accepted.filter(|(_, events)| events.contains(Events::ACCEPTED));
    assert_eq!(accepted.count(), COUNT);
    (lab, ids)
}

fn resets(lab: &Lab, host: usize) -> usize {
    let all = lab.events[host].iter();
    all.filter(|(_, events)| events.contains(Events::RESET))
        .count()
}

#[test]
fn every_peer_of_a_thousand_aborted_connections_gets_a_reset() {
    let (mut lab, ids) = many();
    let now = lab.net.now;
    for id in ids {
        lab.net.hosts[0].abort(now, id);
        lab.net.hosts[0].release(now, id);
    }
    lab.run_ms(20);
    assert_eq!(resets(&lab, 1), COUNT);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
    assert_eq!(lab.net.hosts[0].stats().tcp.out_rsts, COUNT as u64);
    assert_eq!(lab.net.hosts[0].stats().net.control_drops, 0);
}

#[test]
fn resets_wait_for_a_port_that_is_full() {
    let (mut lab, ids) = many();
    let now = lab.net.now;
    lab.net.sinks[0].space = Some(0);
    for id in &ids[..COUNT / 2] {
        lab.net.hosts[0].abort(now, *id);
        lab.net.hosts[0].release(now, *id);
    }
    // The others are aborted, and their owner keeps them.
    for id in &ids[COUNT / 2..] {
        lab.net.hosts[0].abort(now, *id);
    }
    lab.run_ms(5);
    assert_eq!(resets(&lab, 1), 0);
    assert_eq!(lab.net.hosts[0].connection_count(), COUNT);
    while resets(&lab, 1) < COUNT {
        let before = resets(&lab, 1);
        lab.net.sinks[0].space = Some(7);
        lab.run_ms(1);
        assert!(resets(&lab, 1) > before, "{before} of {COUNT} resets");
    }
    assert_eq!(lab.net.hosts[0].connection_count(), COUNT / 2);
    let now = lab.net.now;
    for id in &ids[COUNT / 2..] {
        lab.net.hosts[0].release(now, *id);
    }
    assert_eq!(lab.net.hosts[0].find_leak(), None);
}

/// A client that is killed has data in flight that nobody reads on either side.
#[test]
fn connections_released_with_unread_data_are_reset() {
    let (mut lab, ids) = many();
    let accepted: Vec<_> = lab.events[1].iter().map(|(id, _)| *id).collect();
    for id in accepted {
        lab.send(1, id, b"unread");
    }
    lab.run_ms(20);
    let now = lab.net.now;
    for id in ids {
        lab.net.hosts[0].release(now, id);
    }
    lab.run_ms(20);
    assert_eq!(resets(&lab, 1), COUNT);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

/// A reset that waits for the port has the sequence numbers of its connection and precedes the SYN
/// of a connection that reuses the addresses.
#[test]
fn a_connection_that_reuses_the_port_follows_the_reset() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    lab.send(0, a, b"before");
    lab.run_ms(5);
    lab.read(1, b);
    lab.run_ms(5);
    let expected = lab.forge(0);
    let from = lab.seen.borrow().len();
    let now = lab.net.now;
    let port = lab.net.hosts[0].tcp_info(a).unwrap().local.port();
    lab.net.hosts[0].abort(now, a);
    lab.net.hosts[0].release(now, a);
    let to = "10.0.0.2:80".parse().unwrap();
    let again = lab.net.hosts[0]
        .connect(now, None, Some(port), to, 0)
        .unwrap();
    lab.run_ms(5);
    let seen: Vec<Seg> = lab.seen.borrow()[from..].to_vec();
    let sent: Vec<_> = seen.iter().filter(|segment| segment.from == 0).collect();
    assert_eq!((sent[0].flags, sent[0].seq), (4 | 16, expected.seq));
    assert_eq!(sent[1].flags & 2, 2, "the SYN");
    assert_eq!(resets(&lab, 1), 1);
    let info = lab.net.hosts[0].tcp_info(again).unwrap();
    assert_eq!(info.state, siw_tcp::TcpState::Established);
}
