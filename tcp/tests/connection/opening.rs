//! Handshakes, ports and initial sequence numbers.

use super::*;

#[test]
fn options_are_negotiated_and_data_flows_both_ways() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
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
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1448);
    lab.send(0, client, b"ping");
    lab.run_ms(1);
    assert_eq!(lab.read(1, server), b"ping");
    lab.send(1, server, b"pong");
    lab.run_ms(1);
    assert_eq!(lab.read(0, client), b"pong");
    assert!(lab.got(0).contains(Events::ACKED));
    let mut count = 0;
    lab.net.hosts[0].take_acked(client, |record| {
        assert_eq!(record, b"ping");
        count += 1;
    });
    assert_eq!(count, 1);
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
        .filter(|segment| segment.flags == SYN)
        .cloned()
        .collect();
    assert_eq!(syns.len(), 2);
    assert_ne!(syns[0].seq, syns[1].seq);
    assert_ne!(syns[0].sport, syns[1].sport, "RFC 6056");
}

#[test]
fn both_ends_may_open_at_once_rfc_9293_figure_8() {
    let mut lab = Lab::new();
    // Neighbours are resolved first, so that the SYNs cross.
    lab.connect();
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, Some(1000), "10.0.0.2:2000".parse().unwrap(), 0)
        .unwrap();
    let server = lab.net.hosts[1]
        .connect(now, None, Some(2000), "10.0.0.1:1000".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(20);
    assert_eq!(
        (state(&lab, 0, client), state(&lab, 1, server)),
        (TcpState::Established, TcpState::Established)
    );
    lab.send(0, client, &pattern(100_000));
    lab.run_ms(20);
    assert_eq!(lab.read(1, server), pattern(100_000));
}

#[test]
fn a_closed_port_refuses() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:81".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(5);
    assert!(lab.got(0).contains(Events::REFUSED | Events::CLOSED));
    assert_eq!(state(&lab, 0, client), TcpState::Closed);
    assert_eq!(lab.last(1).flags, RST | ACK);
}

#[test]
fn a_lost_syn_or_syn_ack_is_sent_again() {
    for victim in [0, 1] {
        let mut lab = Lab::new();
        let mut left = 1;
        lab.lose(move |from, frame| {
            let hit = from == victim
                && Seg::parse(from, frame).is_some_and(|segment| segment.flags & SYN != 0)
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

/// The echoed timestamp of the SYN-ACK gives the round trip, so that a lost first segment does not
/// wait for the 3 s of RFC 6298 (5.7).
#[test]
fn timestamps_measure_the_path_of_a_retransmitted_syn() {
    let mut lab = Lab::new();
    let mut left = [1, 1];
    lab.lose(move |from, frame| {
        let segment = Seg::parse(from, frame).filter(|_| from == 0);
        let kind = segment.and_then(|segment| match segment.flags & SYN {
            0 => (!segment.payload.is_empty()).then_some(1),
            _ => Some(0),
        });
        let hit = kind.is_some_and(|kind| left[kind] > 0);
        if let Some(kind) = kind.filter(|_| hit) {
            left[kind] -= 1;
        }
        hit
    });
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 1, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1100);
    let server = lab.events[1][0].0;
    lab.send(0, client, b"ping");
    lab.run_ms(50);
    assert_eq!(lab.read(1, server), b"ping");
    assert_eq!(lab.net.hosts[0].stats().tcp.syn_retrans, 1);
}

#[test]
fn an_unanswered_connect_times_out() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.syn_retries = 2;
    let mut lab = Lab::with(configs);
    lab.connect();
    lab.lose(|_, _| true);
    let now = lab.net.now;
    lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(8000);
    assert!(lab.got(0).contains(Events::TIMED_OUT | Events::CLOSED));
}

#[test]
fn a_new_syn_takes_over_time_wait_rfc_6191() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    for round in 0..3 {
        let now = lab.net.now;
        let opener = lab.net.hosts[0]
            .connect(now, None, Some(5000), "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        lab.run_ms(10);
        assert_eq!(
            state(&lab, 0, opener),
            TcpState::Established,
            "round {round}"
        );
        let accepted = lab.events[1]
            .iter()
            .rev()
            .find(|(_, events)| events.contains(Events::ACCEPTED))
            .unwrap()
            .0;
        // In round 0 the server closes first and keeps TIME-WAIT; then the client does.
        let (host, id, other, oid) = if round == 0 {
            (1, accepted, 0, opener)
        } else {
            (0, opener, 1, accepted)
        };
        let now = lab.net.now;
        lab.net.hosts[host].release(now, id);
        lab.run_ms(5);
        let now = lab.net.now;
        lab.net.hosts[other].release(now, oid);
        lab.run_ms(5);
    }
    assert_eq!(lab.net.hosts[1].stats().tcp.time_wait_recycled, 1);
    assert_eq!(lab.net.hosts[0].stats().tcp.time_wait_recycled, 1);
}

#[test]
fn ports_in_time_wait_are_reused_when_all_are_taken() {
    const FREE: u16 = 5000;
    let to = "10.0.0.2:80".parse().unwrap();
    let mut config = host_config(0);
    config.tcp.max_connections = 65_536;
    let mut lab = Lab::with([config, host_config(1)]);
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = lab.net.now;
    let client = lab.net.hosts[0]
        .connect(now, None, Some(FREE), to, 0)
        .unwrap();
    lab.run_ms(10);
    lab.net.hosts[0].release(lab.net.now, client);
    lab.run_ms(5);
    let (server, _) = lab.events[1][0];
    lab.net.hosts[1].release(lab.net.now, server);
    lab.run_ms(5);
    // All other ports are taken; every draw tries some ports, so that these draws try all.
    let now = lab.net.now;
    let host = &mut lab.net.hosts[0];
    for port in (1024..=65535).filter(|port| *port != FREE) {
        host.connect(now, None, Some(port), to, 0).unwrap();
    }
    let mut draw = |now| (0..1100).any(|_| host.connect(now, None, None, to, 0).is_ok());
    assert!(!draw(now), "it rests");
    let later = now + Duration::from_millis(1100);
    assert!(draw(later));
    assert_eq!(lab.net.hosts[0].stats().tcp.time_wait_recycled, 1);
}

#[test]
fn a_device_can_connect_to_its_own_address() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[0].listen(None, 80, 4, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.1:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(1);
    let server = lab.events[0]
        .iter()
        .find(|(_, events)| events.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    let data = pattern(100_000);
    lab.send(0, client, &data);
    lab.run_ms(10);
    assert_eq!(lab.read(0, server), data);
    assert_eq!(lab.net.carried, 0, "no frame reached the wire");
    let now = lab.net.now;
    lab.net.hosts[0].close(now, client);
    lab.net.hosts[0].close(now, server);
    lab.run_ms(5);
    assert!(
        lab.events[0]
            .iter()
            .filter(|(_, events)| events.contains(Events::CLOSED))
            .count()
            == 2
    );
}
