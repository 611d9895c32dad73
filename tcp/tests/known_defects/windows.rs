//! Acknowledgements and windows.

use super::*;

/// Found in smoltcp; xarxa 015.
#[test]
fn an_ack_of_unsent_data_dequeues_nothing() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let mut ack = lab.forge(1);
    let data = push(&mut lab, 0, client, 30);
    ack.ack = ack.ack.wrapping_add(25 * MSS as u32);
    give(&mut lab, 0, &ack);
    assert_eq!(lab.net.hosts[0].stats().tcp.bad_acks, 1);
    lab.net.hosts[0].take_acked(client, |_| panic!("nothing was acknowledged"));
    lab.run_ms(50);
    assert!(lab.read(1, server) == data);
}

/// Found in xarxa 002.
#[test]
fn the_window_of_a_syn_is_not_scaled() {
    let mut lab = with(|config| config.tcp.recv_window = 8 << 20);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.net.run(Duration::from_millis(5), |net| {
        net.hosts[0].tcp_info(client).unwrap().state == TcpState::Established
    });
    assert_eq!(
        lab.net.hosts[0].tcp_info(client).unwrap().send_window,
        0xffff
    );
}

/// Found in xarxa 003.
#[test]
fn a_fin_beyond_the_window_is_not_accepted() {
    let mut lab = with(|config| config.tcp.recv_window = 4096);
    let [_, server] = lab.connect();
    let mut segment = lab.forge(0);
    segment.flags = FIN | ACK | PSH;
    segment.payload = pattern(5000);
    give(&mut lab, 1, &segment);
    lab.collect();
    assert!(
        !lab.got(1).contains(Events::PEER_FIN),
        "904 bytes before it are missing"
    );
    assert_eq!(lab.read(1, server), pattern(4096));
    lab.run_ms(5);
    segment.seq = segment.seq.wrapping_add(4096);
    segment.payload.drain(..4096);
    give(&mut lab, 1, &segment);
    lab.collect();
    assert!(lab.got(1).contains(Events::PEER_FIN));
    assert_eq!(lab.read(1, server), pattern(5000)[4096..]);
}

/// Found in xarxa 018.
#[test]
fn probes_of_two_zero_windows_are_both_answered() {
    let mut lab = with(|config| config.tcp.recv_window = 4 * MSS as u32);
    let ids = lab.connect();
    let mut sent = [vec![], vec![]];
    for host in [0, 1] {
        sent[host] = push(&mut lab, host, ids[host], 12);
    }
    // Both windows are closed and both ends probe; every window update of the first opening is lost.
    lab.run_ms(300);
    assert!(
        lab.net
            .hosts
            .iter()
            .all(|host| host.stats().tcp.zero_window_probes > 1)
    );
    let mut got = [vec![], vec![]];
    let mut lost = 0;
    lab.lose(move |_, _| {
        lost += 1;
        lost <= 2
    });
    for _ in 0..400 {
        for host in [0, 1] {
            let bytes = lab.read(host, ids[host]);
            got[host].extend(bytes);
        }
        lab.run_ms(20);
    }
    assert!(got[0] == sent[1] && got[1] == sent[0]);
}

/// Found in xarxa 078.
#[test]
fn an_ack_that_found_no_room_is_sent_later() {
    let mut lab = Lab::new();
    let [client, _] = lab.connect();
    let segment = {
        let mut segment = lab.forge(0);
        segment.flags |= PSH;
        segment.payload = b"acknowledge me".to_vec();
        segment
    };
    let _ = client;
    lab.net.sinks[1].space = Some(0);
    let from = seen(&lab);
    give(&mut lab, 1, &segment);
    lab.net.poll();
    assert!(since(&lab, 1, from).is_empty() && lab.net.hosts[1].has_output());
    lab.net.sinks[1].space = None;
    lab.net.poll();
    let acks = since(&lab, 1, from);
    assert_eq!(acks.len(), 1);
    assert_eq!(acks[0].ack, segment.seq.wrapping_add(14));
}

/// Found in xarxa 087, 090. It neither stalls nor times out.
#[test]
fn a_window_shrunk_to_zero_below_data_recovers() {
    let mut lab = with(|config| config.tcp.user_timeout = Duration::from_secs(20));
    let [client, _] = lab.connect();
    let una = lab.last(0).seq;
    lab.lose(|from, frame| from == 1 && frame[12..14] == [8, 0]);
    push(&mut lab, 0, client, 2);
    // The first record is acknowledged, and the window closes before the second.
    let mut ack = lab.forge(1);
    ack.ack = una.wrapping_add(MSS as u32);
    ack.window = 0;
    give(&mut lab, 0, &ack);
    let from = seen(&lab);
    // The peer is alive and answers, far longer than the user timeout.
    for _ in 0..60 {
        lab.run_ms(1000);
        give(&mut lab, 0, &ack);
    }
    assert_eq!(state(&lab, 0, client), TcpState::Established, "SHLD-17");
    assert!(!since(&lab, 0, from).is_empty(), "it is asked");
    ack.window = 1000;
    let from = seen(&lab);
    give(&mut lab, 0, &ack);
    lab.run_ms(1);
    let second = una.wrapping_add(MSS as u32);
    assert!(
        since(&lab, 0, from)
            .iter()
            .any(|segment| segment.seq == second && !segment.payload.is_empty()),
        "sent again as soon as the window is open"
    );
    // A peer that does not answer at all is given up.
    lab.run_ms(120_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT));
}

/// RFC 9293 section 3.10.7.4: a closed window accepts RCV.NXT alone.
#[test]
fn acks_and_resets_at_a_closed_window_have_the_peers_next_number() {
    let mut lab = Lab::new();
    let [client, _] = lab.connect();
    let next = lab.last(0).seq.wrapping_add(MSS as u32);
    lab.lose(|from, frame| from == 1 && frame[12..14] == [8, 0]);
    push(&mut lab, 0, client, 2);
    let mut ack = lab.forge(1);
    ack.ack = next;
    ack.window = 0;
    ack.flags |= PSH;
    ack.payload = b"data to acknowledge".to_vec();
    give(&mut lab, 0, &ack);
    let from = seen(&lab);
    lab.net.poll();
    let acks = since(&lab, 0, from);
    assert_eq!((acks.len(), acks[0].seq), (1, next), "{acks:?}");
    let from = seen(&lab);
    let now = lab.net.now;
    lab.net.hosts[0].abort(now, client);
    lab.net.poll();
    let resets = since(&lab, 0, from);
    assert_eq!((resets[0].flags & RST, resets[0].seq), (RST, next));
}

/// RFC 9293 section 3.8.6.1: a FIN takes no room in the window.
#[test]
fn a_fin_at_a_closed_window_is_accepted() {
    let mut lab = with(|config| config.tcp.recv_window = 4096);
    let [_, server] = lab.connect();
    let mut segment = lab.forge(0);
    segment.payload = pattern(4096);
    give(&mut lab, 1, &segment);
    lab.run_ms(5);
    for fills in [false, true] {
        let mut fin = segment.clone();
        fin.flags |= FIN;
        if fills {
            // The last byte is repeated.
            fin.seq = segment.seq.wrapping_add(4095);
            fin.payload = vec![segment.payload[4095]];
        } else {
            fin.seq = segment.seq.wrapping_add(4096);
            fin.payload.clear();
        }
        give(&mut lab, 1, &fin);
        lab.collect();
        assert!(lab.got(1).contains(Events::PEER_FIN));
    }
    assert_eq!(lab.read(1, server), pattern(4096));
}

/// Found in xarxa 089, 092.
#[test]
fn silly_windows_are_neither_offered_nor_filled() {
    let mut lab = with(|config| config.tcp.recv_window = 8 * MSS as u32);
    let [client, server] = lab.connect();
    let data = push(&mut lab, 0, client, 24);
    lab.run_ms(20);
    // Reading single bytes does not open the window.
    let from = seen(&lab);
    for _ in 0..200 {
        lab.net.hosts[1].receive_queue(server).unwrap().consume(1);
        lab.net.poll();
    }
    assert!(
        since(&lab, 1, from).is_empty(),
        "no window updates of one byte"
    );
    let mut got = 200;
    for _ in 0..2000 {
        got += lab.net.hosts[1].receive_queue(server).unwrap().consume(700);
        lab.net.run(Duration::from_millis(1), |_| false);
    }
    assert_eq!(got, data.len());
    let short = since(&lab, 0, 0)
        .iter()
        .filter(|segment| (1..MSS).contains(&segment.payload.len()))
        .count();
    assert!(short <= 2, "{short} silly segments");
}

/// Found in xarxa 267.
#[test]
fn the_ack_of_data_beyond_a_zero_window_counts() {
    let mut lab = with(|config| config.tcp.recv_window = 4096);
    let [_, server] = lab.connect();
    lab.lose(|_, _| true);
    let mut fill = lab.forge(0);
    fill.payload = pattern(4096);
    give(&mut lab, 1, &fill);
    lab.net.poll();
    lab.send(1, server, b"answer");
    assert_eq!(lab.net.hosts[1].tcp_info(server).unwrap().in_flight, 6);
    let mut more = fill.clone();
    more.seq = fill.seq.wrapping_add(4096);
    more.ack = fill.ack.wrapping_add(6);
    give(&mut lab, 1, &more);
    assert_eq!(
        lab.net.hosts[1].tcp_info(server).unwrap().in_flight,
        0,
        "RFC 9293 section 3.10.7.4"
    );
    assert_eq!(
        lab.net.hosts[1].tcp_info(server).unwrap().readable,
        4096,
        "the bytes do not count"
    );
    let from = seen(&lab);
    lab.net.poll();
    assert_eq!(since(&lab, 1, from)[0].ack, more.seq);
}
