//! Answers to unacceptable segments (RFC 5961, RFC 9293 section 3.10.7.4): their rate, and that no
//! sender can exhaust the answers to others.

use crate::common::wire::{ACK, Lab, PSH, RST, SYN, Seg};
use siw_net::{FrameInfo, RxChecksum, VecBuf};
use siw_tcp::{Events, TcpState};
use siw_tcp_sim::host_config;

/// Returns the segments with which host 1 answers at once.
fn answers(lab: &mut Lab, seg: &Seg) -> Vec<Seg> {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    let host = &mut lab.net.hosts[1];
    host.receive_burst(now, std::iter::once((VecBuf::from(seg.frame()), info)));
    host.poll(now, &mut lab.net.sinks[1]);
    let frames = lab.net.sinks[1].frames.drain(..);
    frames.filter_map(|(f, _)| Seg::parse(1, &f)).collect()
}

/// A keepalive probe of RFC 9293 section 3.8.4: left of the window, so that it is answered.
fn keepalive(next: &Seg) -> Seg {
    let mut probe = next.clone();
    probe.seq = probe.seq.wrapping_sub(1);
    probe
}

/// An ACK outside of the window.
fn outside(next: &Seg, by: u32) -> Seg {
    let mut seg = next.clone();
    seg.seq = seg.seq.wrapping_add(0x4000_0000 + by);
    seg
}

#[test]
fn no_connection_uses_up_the_answers_of_another() {
    let mut lab = Lab::new();
    let (_, honest) = lab.connect_with_data();
    let (_, attacker) = lab.connect_with_data();
    let mut answered = 0;
    for i in 0..5000 {
        let mut seg = match i % 4 {
            0 => outside(&attacker, i),
            1 => keepalive(&attacker),
            _ => attacker.clone(),
        };
        match i % 4 {
            2 => (seg.flags, seg.seq) = (SYN, seg.seq.wrapping_add(i)),
            3 => seg.ack = seg.ack.wrapping_add(i),
            _ => {}
        }
        answered += answers(&mut lab, &seg).len();
    }
    assert!((8..=16).contains(&answered), "{answered}");
    assert_eq!(answers(&mut lab, &keepalive(&honest)).len(), 1);
    let mut rst = honest.clone();
    (rst.flags, rst.seq) = (RST, rst.seq.wrapping_add(5));
    assert_eq!(answers(&mut lab, &rst).len(), 1, "RFC 5961 section 3.2");
    // After a second the attacker is answered again, at the same low rate.
    lab.run_ms(1000);
    let again = (0..1000).map(|i| answers(&mut lab, &outside(&attacker, i)).len());
    assert_eq!(again.sum::<usize>(), 8);
}

/// An attacker with the ports but without the sequence numbers cannot prevent the peer from learning
/// that the connection is alive.
#[test]
fn blind_segments_use_up_no_answers_to_probes() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.timestamps = false;
    let mut lab = Lab::with(configs);
    let (_, next) = lab.connect_with_data();
    assert!(next.options.is_empty());
    for i in 0..5000 {
        answers(&mut lab, &outside(&next, i));
    }
    assert_eq!(answers(&mut lab, &keepalive(&next)).len(), 1);
    // With a byte of garbage, as in the probes of older systems (RFC 1122 section 4.2.3.6).
    let mut probe = keepalive(&next);
    probe.payload = vec![0];
    assert_eq!(answers(&mut lab, &probe).len(), 1);
}

#[test]
fn probes_of_a_closed_window_are_limited() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.recv_window = 4096;
    let mut lab = Lab::with(configs);
    let (ids, _) = lab.connect_with_data();
    lab.send(0, ids[0], &[7; 1000]);
    while lab.net.hosts[0].tcp_info(ids[0]).unwrap().send_window > 0 {
        lab.send(0, ids[0], &[7; 512]);
        lab.run_ms(5);
    }
    lab.lose(|from, _| from == 0);
    let mut probe = lab.forge(0);
    probe.seq = lab.last(1).ack;
    probe.payload = vec![7];
    let answered: usize = (0..1000).map(|_| answers(&mut lab, &probe).len()).sum();
    assert_eq!(answered, 8);
    lab.run_ms(100);
    assert_eq!(answers(&mut lab, &probe).len(), 1);
}

/// RFC 5961 section 7 requires a limit for all connections together; the remainder of the limit must
/// not leak information (CVE-2016-5696).
#[test]
fn all_connections_together_are_limited_too() {
    let mut lab = Lab::new();
    let next: Vec<Seg> = (0..300).map(|_| lab.connect_with_data().1).collect();
    let before = lab.net.hosts[1].stats().tcp.challenge_acks;
    for i in 1..=10 {
        for seg in &next {
            let mut rst = seg.clone();
            (rst.flags, rst.seq) = (RST, rst.seq.wrapping_add(i));
            answers(&mut lab, &rst);
        }
    }
    let stats = lab.net.hosts[1].stats();
    let sent = stats.tcp.challenge_acks - before;
    assert!((500..1500).contains(&sent), "{sent}");
    assert_eq!(stats.tcp.challenges_skipped, 3000 - sent);
    // Keepalive probes are not subject to the limit.
    assert_eq!(answers(&mut lab, &keepalive(&next[0])).len(), 1);
}

/// Opens a connection of host 1 up to SYN-RECEIVED and returns the peer's next segment.
fn half_open(lab: &mut Lab) -> Seg {
    lab.connect();
    let syn = Seg {
        from: 0,
        sport: 999,
        dport: 80,
        seq: 5000,
        flags: SYN,
        window: 1000,
        ..Seg::default()
    };
    let back = answers(lab, &syn);
    assert_eq!(back[0].flags, SYN | ACK);
    Seg {
        seq: 5001,
        ack: back[0].seq.wrapping_add(1),
        flags: ACK,
        ..syn
    }
}

/// RFC 9293 section 3.10.7.4: a passive open returns to LISTEN, and the next SYN begins another.
#[test]
fn a_syn_in_the_window_ends_a_passive_syn_received() {
    let mut lab = Lab::new();
    let mut again = half_open(&mut lab);
    again.flags = SYN;
    again.seq = again.seq.wrapping_add(100);
    assert!(answers(&mut lab, &again).is_empty());
    let back = answers(&mut lab, &again);
    let got: Vec<_> = back.iter().map(|s| (s.flags, s.ack)).collect();
    assert_eq!(got, [(SYN | ACK, again.seq.wrapping_add(1))]);
}

/// RFC 5961 section 3.2.
#[test]
fn syn_received_challenges_resets() {
    let mut lab = Lab::new();
    let next = half_open(&mut lab);
    let mut seg = next.clone();
    (seg.flags, seg.seq) = (RST, seg.seq.wrapping_add(100));
    let back = answers(&mut lab, &seg);
    let got: Vec<_> = back.iter().map(|s| (s.flags, s.seq, s.ack)).collect();
    assert_eq!(got, [(ACK, next.ack, next.seq)]);
    assert_eq!(lab.net.hosts[1].stats().tcp.challenge_acks, 1);
    // The handshake continues.
    answers(&mut lab, &next);
    assert!(
        lab.net.hosts[1]
            .next_event()
            .unwrap()
            .2
            .contains(Events::ACCEPTED)
    );
}

#[test]
fn an_exact_reset_ends_syn_received() {
    let mut lab = Lab::new();
    let mut next = half_open(&mut lab);
    let before = lab.net.hosts[1].connection_count();
    next.flags = RST;
    assert!(answers(&mut lab, &next).is_empty());
    assert_eq!(lab.net.hosts[1].connection_count(), before - 1);
}

/// RFC 9293 section 3.10.7.4: the window ends before RCV.NXT + RCV.WND.
#[test]
fn a_reset_on_the_right_edge_is_dropped_silently() {
    let mut lab = Lab::new();
    let ([_, b], next) = lab.connect_with_data();
    let last = lab.last(1);
    let window = u32::from(last.window) << 7;
    let mut rst = next.clone();
    rst.flags = RST;
    rst.seq = last.ack.wrapping_add(window);
    assert!(answers(&mut lab, &rst).is_empty());
    assert_eq!(lab.net.hosts[1].stats().tcp.challenge_acks, 0);
    rst.seq = rst.seq.wrapping_sub(1);
    assert_eq!(answers(&mut lab, &rst).len(), 1, "the last place inside");
    let mut next = half_open(&mut lab);
    let advertised = 65_535;
    (next.flags, next.seq) = (RST, next.seq.wrapping_add(advertised));
    assert!(answers(&mut lab, &next).is_empty());
    assert_eq!(
        lab.net.hosts[1].tcp_info(b).unwrap().state,
        TcpState::Established
    );
}

/// No sequence number is within a zero window, but the exact reset counts (RFC 9293 section 3.10.7.4).
#[test]
fn an_exact_reset_counts_with_a_closed_window() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.recv_window = 4096;
    let mut lab = Lab::with(configs);
    let (ids, _) = lab.connect_with_data();
    while lab.net.hosts[0].tcp_info(ids[0]).unwrap().send_window > 0 {
        lab.send(0, ids[0], &[7; 512]);
        lab.run_ms(5);
    }
    let mut rst = lab.forge(0);
    (rst.flags, rst.seq) = (RST | PSH, lab.last(1).ack.wrapping_add(1));
    assert!(answers(&mut lab, &rst).is_empty());
    rst.seq = rst.seq.wrapping_sub(1);
    answers(&mut lab, &rst);
    lab.collect();
    assert!(lab.got(1).contains(Events::RESET));
}
