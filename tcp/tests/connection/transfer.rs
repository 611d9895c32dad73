//! Data, acknowledgements and windows.

use super::*;

#[test]
fn an_ack_beyond_snd_nxt_dequeues_no_unsent_data() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    // Unsent data beyond the congestion window.
    let data = pattern(30 * 1448);
    for chunk in data.chunks(1448) {
        lab.net.hosts[0]
            .push_record(client, chunk.len() as u32, chunk.to_vec(), false)
            .unwrap();
    }
    let mut ack = lab.forge(1);
    ack.ack = ack.ack.wrapping_add(25 * 1448);
    lab.net.flush(0, client);
    let info = siw_net::FrameInfo {
        checksum: siw_net::RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[0].receive_burst(now, std::iter::once((ack.frame().into(), info)));
    assert_eq!(lab.net.hosts[0].stats().tcp.bad_acks, 1);
    lab.net.hosts[0].take_acked(client, |_| panic!("nothing was acknowledged"));
    lab.run_ms(50);
    assert_eq!(lab.read(1, server), data);
}

#[test]
fn a_mutual_timeout_with_full_windows_does_not_wedge() {
    let mut configs = [host_config(0), host_config(1)];
    configs
        .iter_mut()
        .for_each(|config| config.tcp.recv_window = 8 * 1448);
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    lab.lose(|_, _| true);
    let data = pattern(8 * 1448);
    for (host, id) in [(0, client), (1, server)] {
        for chunk in data.chunks(1448) {
            lab.net.hosts[host]
                .push_record(id, chunk.len() as u32, chunk.to_vec(), false)
                .unwrap();
        }
    }
    lab.run_ms(100);
    assert!(
        lab.net
            .hosts
            .iter()
            .all(|host| host.stats().tcp.timeouts > 2)
    );
    lab.lose(|_, _| false);
    lab.run_ms(2000);
    assert_eq!(lab.read(0, client), data);
    assert_eq!(lab.read(1, server), data);
    lab.run_ms(10);
    assert!(lab.net.hosts.iter().all(|host| host.is_idle()));
}

#[test]
fn the_last_send_leaves_without_a_flush() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.net.hosts[0]
        .push_record(client, 5, b"hello".to_vec(), true)
        .unwrap();
    assert!(!lab.net.hosts[0].is_idle());
    lab.run_ms(1);
    assert_eq!(lab.read(1, server), b"hello");
}

#[test]
fn a_full_sink_keeps_the_work_for_later() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.net.sinks[0].space = Some(0);
    for _ in 0..3 {
        lab.send(0, client, &pattern(1448));
    }
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[1].tcp_info(server).unwrap().readable, 0);
    assert!(!lab.net.hosts[0].is_idle() && lab.net.hosts[0].has_output());
    lab.net.sinks[0].space = Some(1);
    lab.run_ms(1);
    lab.net.sinks[0].space = None;
    lab.run_ms(20);
    assert_eq!(
        lab.read(1, server),
        [pattern(1448), pattern(1448), pattern(1448)].concat()
    );
}

#[test]
fn who_comes_later_waits_behind_those_without_room() {
    let mut lab = Lab::new();
    let [first, first_server] = lab.connect();
    let [second, second_server] = lab.connect();
    lab.run_ms(50);
    lab.net.sinks[0].space = Some(0);
    lab.send(0, first, &pattern(100));
    lab.run_ms(1);
    // Room for one frame: it must not go to a connection that flushes out of turn.
    lab.net.sinks[0].space = Some(1);
    lab.send(0, second, &pattern(100));
    lab.run_ms(2);
    let readable = |lab: &Lab, id| lab.net.hosts[1].tcp_info(id).unwrap().readable;
    assert_eq!(readable(&lab, first_server), 100);
    assert_eq!(readable(&lab, second_server), 0);
    lab.net.sinks[0].space = None;
    lab.run_ms(20);
    assert_eq!(readable(&lab, second_server), 100);
    // With room for all, each sends at once.
    lab.net.hosts[0]
        .push_record(first, 100, pattern(100), true)
        .unwrap();
    lab.net.flush(0, first);
    assert_eq!(lab.net.hosts[0].tcp_info(first).unwrap().unsent, 0);
}

#[test]
fn a_full_sink_shows_until_what_waits_is_sent() {
    let mut lab = Lab::new();
    let [first, server] = lab.connect();
    lab.run_ms(50);
    let is_blocked = |lab: &Lab| lab.net.hosts[0].is_output_blocked();
    assert!(!is_blocked(&lab));
    lab.net.sinks[0].space = Some(0);
    let push = |lab: &mut Lab, bytes: Vec<u8>| {
        let stack = &mut lab.net.hosts[0];
        stack
            .push_record(first, bytes.len() as u32, bytes, true)
            .unwrap();
        // Pushed data and data in flight stay intact.
        stack.prefetch_for_sending(first);
        stack.prefetch_queues_for_sending(first);
        lab.net.flush(0, first);
    };
    push(&mut lab, pattern(100));
    assert!(is_blocked(&lab));
    lab.net.sinks[0].space = None;
    assert!(is_blocked(&lab), "it is not sent yet");
    lab.run_ms(20);
    assert!(!is_blocked(&lab));
    for _ in 0..3 {
        push(&mut lab, pattern(100));
    }
    lab.run_ms(20);
    let info = lab.net.hosts[1].tcp_info(server).unwrap();
    assert_eq!(info.readable, 400);
    let mut received = vec![0; 400];
    let queue = lab.net.hosts[1].receive_queue(server).unwrap();
    assert!(queue.copy_to_slice(0, &mut received));
    assert_eq!(received, pattern(100).repeat(4));
}

/// The window opens even if the window update is lost (RFC 9293 section 3.8.6.1).
#[test]
fn a_zero_window_is_probed_until_it_opens() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.recv_window = 8192;
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    let data = pattern(40_000);
    for chunk in data.chunks(1000) {
        lab.net.hosts[0]
            .push_record(client, chunk.len() as u32, chunk.to_vec(), true)
            .unwrap();
    }
    lab.run_ms(200);
    assert!(
        lab.net.hosts[0].stats().tcp.zero_window_probes > 2
            || lab.net.hosts[0].tcp_info(client).unwrap().send_window > 0
    );
    let mut got = lab.read(1, server);
    assert!(got.len() <= 8192 && got.len() > 7000);
    // The window update is lost.
    lab.lose(|from, _| from == 1);
    lab.run_ms(1);
    lab.lose(|_, _| false);
    for _ in 0..400 {
        lab.run_ms(20);
        got.extend(lab.read(1, server));
    }
    assert_eq!(got, data);
    let info = lab.net.hosts[0].tcp_info(client).unwrap();
    assert_eq!(info.timeouts, 0, "probing is no loss");
    let probes = lab.net.hosts[0].stats().tcp.zero_window_probes;
    assert!(probes > 0);
    assert_eq!(u64::from(info.window_probes), probes);
    assert_eq!(info.retransmissions.total(), 0, "probes have no data");
}

#[test]
fn the_window_exceeds_64_kib_and_never_shrinks() {
    let mut lab = Lab::new();
    let link = siw_tcp_sim::Impairment::perfect(Duration::from_millis(5));
    lab.net.set_link(0, link);
    lab.net.set_link(1, link);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 1, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(30);
    let server = lab.events[1][0].0;
    let mut most = 0;
    for _ in 0..120 {
        while lab.net.hosts[0].send_room(client) >= 1448 {
            lab.net.hosts[0]
                .push_record(client, 1448, vec![1; 1448], false)
                .unwrap();
        }
        lab.run_ms(1);
        most = most.max(lab.net.hosts[0].tcp_info(client).unwrap().in_flight);
        lab.read(1, server);
    }
    assert!(most > 2 << 20, "{most}");
    let mut edge = None::<u32>;
    for segment in lab
        .seen
        .borrow()
        .iter()
        .filter(|segment| segment.from == 1 && segment.flags & SYN == 0)
    {
        let events = segment.ack.wrapping_add(u32::from(segment.window) << 7);
        assert!(
            edge.is_none_or(|before| events.wrapping_sub(before) as i32 >= 0),
            "the right edge moved left"
        );
        edge = Some(events);
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
        let mut configs = [host_config(0), host_config(1)];
        configs[0].tcp.sack = sack;
        configs[0].tcp.initial_window = 20;
        let mut lab = Lab::with(configs);
        let [client, server] = lab.connect();
        let (mut count, drop) = (0, lost.clone());
        lab.lose(move |from, frame| {
            let data = from == 0 && frame.len() > 1000;
            count += u32::from(data);
            data && drop.contains(&(count - 1))
        });
        let data = pattern(20 * 1448);
        for chunk in data.chunks(1448) {
            lab.net.hosts[0]
                .push_record(client, chunk.len() as u32, chunk.to_vec(), false)
                .unwrap();
        }
        lab.net.flush(0, client);
        lab.run_ms(50);
        assert_eq!(lab.read(1, server), data);
        let stats = lab.net.hosts[0].stats();
        assert_eq!(
            (stats.tcp.timeouts, stats.tcp.fast_recovery),
            (0, 1),
            "sack {sack} lost {lost:?}"
        );
        assert_eq!(
            stats.tcp.retrans_segs,
            lost.len() as u64,
            "only what was lost is sent again"
        );
    }
}

/// RFC 7323 section 5.3.
#[test]
fn an_old_timestamp_is_dropped_and_answered() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    lab.run_ms(100);
    lab.send(0, client, b"new");
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
    assert_eq!(lab.read(1, server), b"new");
    assert_eq!(lab.net.hosts[1].stats().tcp.paws_drops, 1);
}

#[test]
fn a_batch_gets_one_ack_which_data_carries() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.initial_window = 32;
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    let before = lab.net.hosts[1].stats().tcp.pure_acks_out;
    for _ in 0..32 {
        lab.net.hosts[0]
            .push_record(client, 1448, vec![3; 1448], false)
            .unwrap();
    }
    lab.net.flush(0, client);
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].stats().tcp.pure_acks_out - before, 1);
    // A reply in the same batch as the message: no pure ACK at all.
    lab.read(1, server);
    lab.run_ms(5);
    let before = lab.net.hosts[1].stats().tcp.pure_acks_out;
    lab.send(0, client, b"request");
    let now = lab.net.now;
    lab.net.run(Duration::from_millis(1), |net| {
        net.hosts[1].tcp_info(server).unwrap().readable > 0 || net.now > now + common::micros(500)
    });
    lab.read(1, server);
    lab.send(1, server, b"reply");
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].stats().tcp.pure_acks_out, before);
    assert_eq!(lab.read(0, client), b"reply");
}

/// Counts the ACKs without payload that the server sends if it answers a request after `pause`
/// microseconds.
fn acks_of_exchange(lab: &mut Lab, [client, server]: [siw_net::ConnId; 2], pause: u64) -> u64 {
    let before = lab.net.hosts[1].stats().tcp.pure_acks_out;
    lab.send(0, client, b"request");
    lab.net.run(Duration::from_millis(5), |net| {
        net.hosts[1].tcp_info(server).unwrap().readable > 0
    });
    assert_eq!(lab.read(1, server), b"request");
    lab.net.run(common::micros(pause), |_| false);
    lab.send(1, server, b"reply");
    lab.run_ms(5);
    assert_eq!(lab.read(0, client), b"reply");
    lab.net.hosts[1].stats().tcp.pure_acks_out - before
}

#[test]
fn the_ack_of_a_message_waits_for_the_answer_of_an_owner_who_answers_at_once() {
    let mut lab = Lab::new();
    let ends = lab.connect();
    assert_eq!(
        acks_of_exchange(&mut lab, ends, 1),
        1,
        "nothing is known yet"
    );
    assert_eq!(acks_of_exchange(&mut lab, ends, 1), 0);
    assert_eq!(acks_of_exchange(&mut lab, ends, 1), 0);
    // The ACK waits 3 us for the answer, not the millisecond of a delayed ACK, and only once: the next
    // ACK is sent at once.
    assert_eq!(acks_of_exchange(&mut lab, ends, 20), 1);
    assert_eq!(lab.net.hosts[1].stats().tcp.delayed_acks, 1);
    assert_eq!(acks_of_exchange(&mut lab, ends, 20), 1);
    assert_eq!(lab.net.hosts[1].stats().tcp.delayed_acks, 1);

    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.answer_wait = Duration::ZERO;
    let mut lab = Lab::with(configs);
    let ends = lab.connect();
    for _ in 0..3 {
        assert_eq!(acks_of_exchange(&mut lab, ends, 1), 1, "it is off");
    }
}

#[test]
fn a_segment_without_push_gets_a_delayed_ack() {
    let mut lab = Lab::new();
    let [client, _] = lab.connect();
    lab.run_ms(5);
    let at = lab.net.now;
    lab.net.hosts[0]
        .push_record(client, 100, vec![0; 100], false)
        .unwrap();
    lab.net.flush(0, client);
    lab.net
        .run(Duration::from_millis(50), |net| net.hosts[0].is_idle());
    let took = lab.net.now - at;
    assert!(
        took >= Duration::from_millis(1) && took < Duration::from_millis(2),
        "{took:?}"
    );
    assert_eq!(lab.net.hosts[1].stats().tcp.delayed_acks, 1);
}

/// The window of a segment that arrives late counts if it acknowledges new data: the right edge is
/// the one in this segment, not its acknowledgement plus an older window (RFC 9293 section 3.8.6).
#[test]
fn a_late_segment_with_a_newer_ack_brings_its_window() {
    let mut lab = Lab::new();
    let [client, _] = lab.connect();
    let una = lab.last(0).seq;
    let peer = lab.forge(1);
    lab.lose(|from, _| from == 1);
    for _ in 0..8 {
        lab.net.hosts[0]
            .push_record(client, 1448, vec![0; 1448], false)
            .unwrap();
    }
    // The peer's second segment overtakes the first, which is retransmitted after more data arrived.
    let mut second = peer.clone();
    (second.seq, second.window) = (peer.seq.wrapping_add(44), (4 * 1448) >> 7);
    second.payload = vec![0; 44];
    let mut first = peer;
    first.payload = vec![0; 44];
    first.ack = una.wrapping_add(2 * 1448);
    first.window = (2 * 1448) >> 7;
    lab.inject(&second);
    lab.run_ms(1);
    lab.net.hosts[0].take_acked(client, drop);
    lab.inject(&first);
    lab.run_ms(1);
    let window = lab.net.hosts[0].tcp_info(client).unwrap().send_window;
    assert_eq!(window, u32::from(first.window) << 7);
}
