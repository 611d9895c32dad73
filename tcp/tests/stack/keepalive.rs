//! Keepalive (RFC 9293 section 3.8.4) with data in flight, and after a pause of the whole program.

use std::time::Duration;

use crate::common::wire::Lab;
use siw_tcp::{Events, Keepalive, TcpState};
use siw_tcp_sim::host_config;

fn lab() -> Lab {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.keepalive = Some(Keepalive {
        idle: Duration::from_secs(2),
        interval: Duration::from_secs(1),
        probes: 3,
    });
    Lab::with(configs)
}

#[test]
fn an_overdue_probe_waits_for_data_in_flight() {
    let mut lab = lab();
    let [a, _] = lab.connect();
    lab.lose(|_, _| true);
    lab.send(0, a, b"lost");
    let limit = lab.net.now + Duration::from_secs(100);
    let mut turns = 0;
    while lab.net.step(limit) {
        turns += 1;
    }
    lab.collect();
    assert!(turns < 100, "{turns} turns in 100 s");
    assert_eq!(lab.net.hosts[0].stats().tcp.keepalive_probes, 0);
    assert_eq!(
        lab.net.hosts[0].tcp_info(a).unwrap().state,
        TcpState::Established
    );
    // Data has its own timeout.
    lab.run_ms(100_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

#[test]
fn probes_go_on_after_data_was_acknowledged() {
    let mut lab = lab();
    let [a, _] = lab.connect();
    // The data is in flight while the probe would be due.
    lab.lose(|from, _| from == 0);
    lab.send(0, a, b"late");
    lab.run_ms(2500);
    lab.lose(|_, _| false);
    lab.run_ms(5000);
    assert_eq!(lab.net.hosts[0].tcp_info(a).unwrap().in_flight, 0);
    let before = lab.net.hosts[0].stats().tcp.keepalive_probes;
    lab.run_ms(10_000);
    assert!(lab.net.hosts[0].stats().tcp.keepalive_probes - before >= 4);
    lab.lose(|_, _| true);
    lab.run_ms(10_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

/// Each probe gets its full interval, even if the program was stopped for longer than all of them.
#[test]
fn a_pause_does_not_end_a_living_connection() {
    let mut lab = lab();
    let [a, _] = lab.connect();
    lab.run_ms(1000);
    lab.net.now = lab.net.now + Duration::from_secs(60);
    lab.run_ms(5000);
    assert!(!lab.got(0).contains(Events::TIMED_OUT));
    assert_eq!(
        lab.net.hosts[0].tcp_info(a).unwrap().state,
        TcpState::Established
    );
}
