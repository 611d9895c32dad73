//! Closing, aborting and timing out of connections.

use super::*;

/// RFC 9293 section 3.6.
#[test]
fn a_half_closed_connection_carries_the_other_way() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(
        (state(&lab, 0, client), state(&lab, 1, server)),
        (TcpState::FinWait2, TcpState::CloseWait)
    );
    assert!(
        lab.net.hosts[0]
            .push_record(client, 1, vec![0], true)
            .is_err(),
        "closed for sending"
    );
    lab.send(1, server, &pattern(50_000));
    lab.run_ms(5);
    assert_eq!(lab.read(0, client), pattern(50_000));
    let now = lab.net.now;
    lab.net.hosts[1].close(now, server);
    lab.run_ms(5);
    assert_eq!(
        (state(&lab, 0, client), state(&lab, 1, server)),
        (TcpState::TimeWait, TcpState::Closed)
    );
    assert!(lab.got(0).contains(Events::CLOSED) && lab.got(1).contains(Events::CLOSED));
}

#[test]
fn both_ends_may_close_at_once_rfc_9293_figure_13() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.net.hosts[1].close(now, server);
    lab.run_ms(5);
    assert_eq!(
        (state(&lab, 0, client), state(&lab, 1, server)),
        (TcpState::TimeWait, TcpState::TimeWait)
    );
    lab.run_ms(61_000);
    assert_eq!(
        (state(&lab, 0, client), state(&lab, 1, server)),
        (TcpState::Closed, TcpState::Closed)
    );
    for (host, id) in [(0, client), (1, server)] {
        let now = lab.net.now;
        lab.net.hosts[host].release(now, id);
        assert_eq!(lab.net.hosts[host].connection_count(), 0);
        assert!(lab.net.hosts[host].is_idle() && lab.net.hosts[host].tcp_info(id).is_none());
    }
}

#[test]
fn close_sends_what_is_queued_before_the_fin() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let data = pattern(200_000);
    for chunk in data.chunks(1448) {
        lab.net.hosts[0]
            .push_record(client, chunk.len() as u32, chunk.to_vec(), false)
            .unwrap();
    }
    let now = lab.net.now;
    lab.net.hosts[0].release(now, client);
    assert!(lab.net.hosts[0].tcp_info(client).is_none());
    lab.run_ms(50);
    assert_eq!(lab.read(1, server), data);
    assert!(lab.got(1).contains(Events::PEER_FIN));
}

#[test]
fn abort_resets_the_peer_at_once() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.net.hosts[0]
        .push_record(client, 3, vec![1, 2, 3], true)
        .unwrap();
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, client);
    lab.run_ms(5);
    assert!(
        lab.got(0).contains(Events::CLOSED) && lab.got(1).contains(Events::RESET | Events::CLOSED)
    );
    assert_eq!(state(&lab, 1, server), TcpState::Closed);
    let mut left = vec![];
    lab.net.hosts[0].take_unacked(client, |record| left.push(record));
    assert_eq!(left, [vec![1, 2, 3]]);
}

#[test]
fn releasing_with_unread_data_resets_rfc_2525_2_17() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.send(0, client, b"unread");
    lab.run_ms(1);
    let now = lab.net.now;
    lab.net.hosts[1].release(now, server);
    lab.run_ms(5);
    assert!(lab.got(0).contains(Events::RESET));
}

/// Only a reset with the expected sequence number is accepted (RFC 5961).
#[test]
fn blind_resets_and_syns_are_challenged() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.send(0, client, b"x");
    lab.run_ms(5);
    let mut rst = lab.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_add(100);
    lab.inject(&rst);
    let mut syn = lab.forge(0);
    syn.flags = SYN;
    lab.inject(&syn);
    lab.run_ms(5);
    assert_eq!(state(&lab, 1, server), TcpState::Established);
    assert_eq!(lab.net.hosts[1].stats().tcp.challenge_acks, 2);
    rst.seq = rst.seq.wrapping_sub(100);
    lab.inject(&rst);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::RESET));
}

/// RFC 9293 section 3.8.3.
#[test]
fn the_user_timeout_ends_the_connection() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.user_timeout = Duration::from_secs(5);
    let mut lab = Lab::with(configs);
    let [client, _] = lab.connect();
    lab.lose(|_, _| true);
    lab.send(0, client, b"lost");
    lab.run_ms(4000);
    assert_eq!(state(&lab, 0, client), TcpState::Established);
    lab.run_ms(8000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

/// RFC 9293 section 3.8.4.
#[test]
fn keepalive_ends_only_connections_of_dead_peers() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.keepalive = Some(Keepalive {
        idle: Duration::from_secs(2),
        interval: Duration::from_secs(1),
        probes: 3,
    });
    let mut lab = Lab::with(configs);
    let [client, _] = lab.connect();
    lab.run_ms(20_000);
    assert_eq!(state(&lab, 0, client), TcpState::Established);
    assert!(lab.net.hosts[0].stats().tcp.keepalive_probes >= 8);
    lab.lose(|_, _| true);
    lab.run_ms(10_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

#[test]
fn a_fin_that_overtakes_data_waits_for_it() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let mut count = 0;
    lab.lose(move |from, frame| {
        let data =
            from == 0 && Seg::parse(0, frame).is_some_and(|segment| !segment.payload.is_empty());
        count += i32::from(data);
        data && count == 1
    });
    for _ in 0..2 {
        lab.net.hosts[0]
            .push_record(client, 1448, pattern(1448), false)
            .unwrap();
    }
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.net.poll();
    lab.net.run(common::micros(100), |_| false);
    lab.collect();
    assert!(!lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.last(0).flags & FIN, FIN);
    lab.run_ms(50);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, server).len(), 2 * 1448);
    assert_eq!(
        lab.net.hosts[0].stats().tcp.retrans_segs,
        1,
        "the FIN was remembered"
    );
}

#[test]
fn stale_ids_are_harmless() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, client);
    lab.net.hosts[0].release(now, client);
    lab.run_ms(5);
    let [opener, _] = lab.connect();
    assert_ne!(client, opener);
    let host = &mut lab.net.hosts[0];
    assert!(host.tcp_info(client).is_none() && host.receive_queue(client).is_none());
    assert_eq!((host.effective_mss(client), host.send_room(client)), (0, 0));
    assert_eq!(host.push_record(client, 1, vec![9], true), Err(vec![9]));
    host.close(now, client);
    host.abort(now, client);
    host.release(now, client);
    host.set_user(client, 1);
    host.take_acked(client, |_| panic!());
    assert_eq!(state(&lab, 0, opener), TcpState::Established);
    assert_eq!(state(&lab, 1, server), TcpState::Closed);
}
