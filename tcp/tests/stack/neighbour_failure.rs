//! Connections whose neighbour no longer answers: pending output waits for a bounded time.

use std::time::Duration;

use crate::common::wire::{ACK, Lab, SYN, Seg};
use siw_net::ConnId;
use siw_tcp::{Events, TcpState};
use siw_tcp_sim::host_config;

/// Returns whether a frame is ARP.
fn is_arp(frame: &[u8]) -> bool {
    frame[12..14] == [8, 6]
}

/// Two hosts with an idle connection; host 0 has forgotten its neighbour, and no ARP gets through.
fn forgotten(user_timeout: u64) -> (Lab, [ConnId; 2]) {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.user_timeout = Duration::from_secs(user_timeout);
    configs[0].tcp.orphan_timeout = configs[0].tcp.user_timeout;
    configs[0].net.neighbours.reachable = Duration::from_millis(100);
    let mut lab = Lab::with(configs);
    let ids = lab.connect();
    // An entry unused for ten times as long as it is reachable is removed.
    lab.run_ms(3000);
    lab.lose(|_, frame| is_arp(frame));
    (lab, ids)
}

/// Runs for some virtual time; returns the number of steps in which a stack had work.
fn turns(lab: &mut Lab, ms: u64) -> u32 {
    let limit = lab.net.now + Duration::from_millis(ms);
    let mut turns = 0;
    while lab.net.step(limit) {
        turns += 1;
    }
    lab.collect();
    turns
}

#[test]
fn data_for_a_silent_neighbour_times_out() {
    let (mut lab, [a, _]) = forgotten(60);
    let before = lab.net.hosts[0].stats().net.arp_out;
    lab.send(0, a, b"data");
    let busy = turns(&mut lab, 59_000);
    let info = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!((info.state, info.in_flight), (TcpState::Established, 0));
    assert!(busy < 200, "{busy} turns in a minute");
    // One request per second (RFC 1122 section 2.3.2.1).
    let asked = lab.net.hosts[0].stats().net.arp_out - before;
    assert!((55..=60).contains(&asked), "{asked} ARP requests");
    lab.run_ms(2000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
    assert_eq!(lab.net.hosts[0].stats().tcp.abort_on_timeout, 1);
    lab.net.hosts[0].release(lab.net.now, a);
    assert!(lab.net.hosts[0].is_idle() || turns(&mut lab, 10_000) < 20);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

#[test]
fn a_fin_for_a_silent_neighbour_ends_with_its_orphan() {
    let (mut lab, [a, _]) = forgotten(60);
    lab.net.hosts[0].release(lab.net.now, a);
    let busy = turns(&mut lab, 62_000);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
    assert!(busy < 200, "{busy} turns in a minute");
    let asked = lab.net.hosts[0].stats().net.arp_out;
    lab.run_ms(100_000);
    assert_eq!(
        lab.net.hosts[0].stats().net.arp_out,
        asked,
        "nobody asks any more"
    );
}

#[test]
fn data_leaves_when_the_neighbour_answers_at_last() {
    let (mut lab, [a, b]) = forgotten(60);
    lab.send(0, a, b"late");
    lab.run_ms(40_000);
    assert_eq!(lab.read(1, b), b"");
    lab.lose(|_, _| false);
    lab.run_ms(20_000);
    assert_eq!(lab.read(1, b), b"late");
    // The time without a neighbour does not affect data sent later.
    let info = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!((info.state, info.in_flight), (TcpState::Established, 0));
    assert!(info.rto < Duration::from_millis(100), "{:?}", info.rto);
    lab.lose(|_, _| true);
    lab.send(0, a, b"lost");
    lab.run_ms(50_000);
    assert!(!lab.got(0).contains(Events::TIMED_OUT));
    lab.run_ms(60_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

/// The user timeout counts from when data was submitted (RFC 9293 section 3.9.1.1): not anew from when
/// a neighbour is found that then takes it in silence.
#[test]
fn the_wait_for_a_neighbour_is_part_of_the_user_timeout() {
    let (mut lab, [a, _]) = forgotten(60);
    lab.send(0, a, b"data");
    lab.run_ms(40_000);
    lab.lose(|_, frame| !is_arp(frame));
    lab.run_ms(18_000);
    let info = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!((info.state, info.in_flight), (TcpState::Established, 4));
    lab.run_ms(3000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

/// An ACK that cannot be sent is lost, as it could be on the link: the peer retransmits its data.
#[test]
fn an_ack_for_a_silent_neighbour_is_given_up() {
    let (mut lab, [a, b]) = forgotten(5);
    lab.send(1, b, b"data");
    let busy = turns(&mut lab, 60_000);
    assert!(busy < 200, "{busy} turns");
    let info = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!(info.state, TcpState::Established, "it has nothing to send");
    assert_eq!(lab.read(0, a), b"data");
    lab.lose(|_, _| false);
    lab.run_ms(40_000);
    assert!(!lab.got(1).contains(Events::TIMED_OUT));
    assert_eq!(lab.net.hosts[1].tcp_info(b).unwrap().in_flight, 0);
}

#[test]
fn an_opener_hears_when_the_neighbour_stays_silent() {
    let mut lab = Lab::new();
    lab.lose(|_, frame| is_arp(frame));
    let now = lab.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, Some(1000), to, 0)
        .unwrap();
    // The peer opens at the same time.
    let syn = Seg {
        from: 1,
        sport: 80,
        dport: 1000,
        seq: 7,
        flags: SYN,
        window: 1000,
        ..Seg::default()
    };
    lab.inject(&syn);
    lab.run_ms(1);
    let info = lab.net.hosts[0].tcp_info(a).unwrap();
    assert_eq!(info.state, TcpState::SynReceived);
    lab.run_ms(5000);
    assert!(lab.got(0).contains(Events::UNREACHABLE | Events::CLOSED));
    assert!(lab.seen.borrow().iter().all(|seg| seg.flags & ACK == 0));
}
