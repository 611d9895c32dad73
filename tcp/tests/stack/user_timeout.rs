//! The user timeout (RFC 9293 section 3.8.3) ends a connection on time, however long the retransmission
//! timeout has become.

use std::time::Duration;

use crate::common::wire::Lab;
use siw_tcp::{Events, TcpState};
use siw_tcp_sim::host_config;

#[test]
fn the_user_timeout_does_not_wait_for_the_backoff() {
    for seconds in [3, 7, 50, 100] {
        let mut configs = [host_config(0), host_config(1)];
        configs[0].tcp.user_timeout = Duration::from_secs(seconds);
        let mut lab = Lab::with(configs);
        let [a, _] = lab.connect();
        lab.lose(|_, _| true);
        lab.send(0, a, b"lost");
        lab.run_ms(seconds * 1000 - 100);
        let state = lab.net.hosts[0].tcp_info(a).unwrap().state;
        assert_eq!(state, TcpState::Established, "{seconds} s");
        lab.run_ms(110);
        assert!(lab.got(0).contains(Events::TIMED_OUT), "{seconds} s");
    }
}

/// A peer that shrank its window below the data in flight is alive while it answers, and its answers do
/// not make the retransmission timer spin.
#[test]
fn a_shrunken_window_outlives_the_user_timeout() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.user_timeout = Duration::from_secs(5);
    let mut lab = Lab::with(configs);
    let [a, b] = lab.connect();
    lab.send(1, b, b"x");
    lab.run_ms(5);
    lab.read(0, a);
    lab.lose(|from, _| from == 1);
    let mut shrunk = lab.forge(1);
    shrunk.window = 0;
    lab.send(0, a, b"refused");
    let limit = lab.net.now + Duration::from_secs(30);
    let mut turns = 0;
    while lab.net.now < limit {
        lab.inject(&shrunk);
        let next = lab.net.now + Duration::from_secs(1);
        while lab.net.step(next) {
            turns += 1;
        }
    }
    lab.collect();
    assert!(!lab.got(0).contains(Events::TIMED_OUT));
    assert!(turns < 200, "{turns} turns in 30 s");
    lab.run_ms(11_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT), "silence ends it");
}
