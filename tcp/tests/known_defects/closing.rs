//! FIN, TIME-WAIT and resets.

use super::*;

/// Found in xarxa 019.
#[test]
fn data_is_readable_after_time_wait() {
    let mut lab = with(|config| config.tcp.time_wait = Duration::from_millis(50));
    let [client, server] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.run_ms(2);
    lab.send(1, server, b"late reader");
    let now = lab.net.now;
    lab.net.hosts[1].close(now, server);
    lab.run_ms(2);
    assert_eq!(state(&lab, 0, client), TcpState::TimeWait);
    lab.run_ms(200);
    assert_eq!(state(&lab, 0, client), TcpState::Closed);
    assert_eq!(lab.read(0, client), b"late reader");
}

/// Found in xarxa 020.
#[test]
fn a_close_in_syn_received_completes_the_handshake() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    let to = |host: u8, port: u16| format!("10.0.0.{host}:{port}").parse().unwrap();
    // A simultaneous open in which the first SYN-ACKs are lost.
    let client = lab.net.hosts[0]
        .connect(now, None, Some(5001), to(2, 5002), 0)
        .unwrap();
    let server = lab.net.hosts[1]
        .connect(now, None, Some(5002), to(1, 5001), 0)
        .unwrap();
    let mut lost = 0;
    lab.lose(move |_, frame| {
        let hit = frame[12..14] == [8, 0] && frame[47] & (SYN | ACK) == SYN | ACK && lost < 2;
        lost += u32::from(hit);
        hit
    });
    lab.net.run(Duration::from_millis(5), |net| {
        net.hosts[0].tcp_info(client).unwrap().state == TcpState::SynReceived
    });
    assert_eq!(state(&lab, 0, client), TcpState::SynReceived);
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.run_ms(5_000);
    assert_eq!(state(&lab, 0, client), TcpState::FinWait2);
    assert_eq!(state(&lab, 1, server), TcpState::CloseWait);
    let now = lab.net.now;
    lab.net.hosts[1].close(now, server);
    lab.run_ms(10);
    assert_eq!(state(&lab, 1, server), TcpState::Closed);
}

/// Found in xarxa 084, 270.
#[test]
fn nothing_beyond_the_fin_is_accepted() {
    // The bytes beyond the FIN arrive before, with and after it.
    for order in 0..3 {
        let mut lab = Lab::new();
        let [_, server] = lab.connect();
        let text = pattern(300);
        let part = |lab: &Lab, from: usize, to: usize, fin: u8| {
            let mut segment = lab.forge(0);
            segment.flags |= fin;
            segment.seq = segment.seq.wrapping_add(from as u32);
            segment.payload = text[from..to].to_vec();
            segment
        };
        let head = part(&lab, 0, 100, 0);
        let end = part(&lab, 100, 200, FIN);
        let beyond = part(&lab, 200, 300, 0);
        let segs = match order {
            0 => [&beyond, &head, &end],
            1 => [&end, &beyond, &head],
            _ => [&beyond, &end, &head],
        };
        for segment in segs {
            give(&mut lab, 1, segment);
        }
        lab.run_ms(5);
        assert!(lab.got(1).contains(Events::PEER_FIN), "order {order}");
        assert_eq!(lab.read(1, server), text[..200], "order {order}");
        assert_eq!(lab.last(1).ack, head.seq.wrapping_add(201), "order {order}");
        give(&mut lab, 1, &beyond);
        lab.run_ms(5);
        assert!(lab.read(1, server).is_empty());
        assert_eq!(lab.last(1).ack, head.seq.wrapping_add(201));
    }
}

/// Found in xarxa 088.
#[test]
fn a_released_connection_leaves_fin_wait_2() {
    let mut lab = with(|config| config.tcp.time_wait = Duration::from_secs(1));
    let [client, server] = lab.connect();
    let now = lab.net.now;
    lab.net.hosts[0].release(now, client);
    lab.run_ms(10);
    assert_eq!(state(&lab, 1, server), TcpState::CloseWait);
    assert_eq!(lab.net.hosts[0].connection_count(), 1);
    lab.run_ms(2000);
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}

/// Found in xarxa 091.
#[test]
fn duplicates_do_not_stop_the_timer_of_a_lone_fin() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.lose(|from, frame| {
        from == 0 && Seg::parse(0, frame).is_some_and(|segment| segment.flags & FIN != 0)
    });
    let ack = lab.forge(1);
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.net.poll();
    for _ in 0..5 {
        give(&mut lab, 0, &ack);
    }
    lab.run_ms(20);
    lab.lose(|_, _| false);
    lab.run_ms(500);
    assert_eq!(state(&lab, 1, server), TcpState::CloseWait);
    assert_eq!(state(&lab, 0, client), TcpState::FinWait2);
}

/// Found in xarxa 266.
#[test]
fn a_fin_behind_duplicate_data_is_accepted() {
    let mut lab = Lab::new();
    let [_, server] = lab.connect();
    let mut segment = lab.forge(0);
    segment.payload = pattern(100);
    give(&mut lab, 1, &segment);
    segment.flags |= FIN;
    give(&mut lab, 1, &segment);
    lab.run_ms(5);
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, server), pattern(100));
}

/// Found in smoltcp; xarxa 288. One with FIN or SYN set is a reset as well.
#[test]
fn a_reset_outside_the_window_is_ignored() {
    let mut lab = Lab::new();
    let [_, server] = lab.connect();
    let mut rst = lab.forge(0);
    rst.flags = RST;
    rst.seq = rst.seq.wrapping_sub(1 << 30);
    let from = seen(&lab);
    give(&mut lab, 1, &rst);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty(), "no answer to a reset");
    assert_eq!(state(&lab, 1, server), TcpState::Established);
    let mut rst = lab.forge(0);
    rst.flags = RST | FIN | ACK;
    give(&mut lab, 1, &rst);
    lab.collect();
    assert!(lab.got(1).contains(Events::RESET));
    // A reset that matches no connection is not answered either.
    rst.sport = 9;
    let from = seen(&lab);
    give(&mut lab, 1, &rst);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty());
}
