//! Congestion signals: marks, delay, pauses.

use std::time::Duration;

use crate::common::wire::{ACK, CWR, ECE, Lab, SYN, pattern};
use crate::common::{Transfer, configs, micros};
use siw_tcp::{CongestionControl, StackStats};
use siw_tcp_sim::{Impairment, host_config};

fn bottleneck(mark: usize) -> Impairment {
    let mut lab = Impairment::perfect(micros(50));
    lab.rate = 10_000_000_000;
    lab.queue = 1000;
    lab.mark = mark;
    lab
}

/// Transfers 12 MB through a marking bottleneck; returns (Gb/s, sender's counters, frames lost, marked).
fn through(congestion: CongestionControl, ecn: bool, v6: bool) -> (f64, StackStats, u64, u64) {
    let mut configs = configs();
    for config in &mut configs {
        config.tcp.congestion = congestion;
        config.tcp.ecn = ecn;
    }
    let size = 12_000_000;
    let mut transfer = Transfer::new(5, configs, [bottleneck(60), bottleneck(0)], [size, 0]);
    transfer.connect(v6);
    let start = transfer.net.now;
    while transfer.sides[1].received < size {
        transfer.run(micros(500));
    }
    let gbps = size as f64 * 8.0 / (transfer.net.now - start).as_secs_f64() / 1e9;
    (
        gbps,
        transfer.net.hosts[0].stats(),
        transfer.net.lost,
        transfer.net.marked,
    )
}

/// RFC 3168.
#[test]
fn marks_slow_a_flow_down_before_losses() {
    for congestion in [
        CongestionControl::Cubic,
        CongestionControl::NewReno,
        CongestionControl::Dctcp,
    ] {
        for v6 in [false, true] {
            let (gbps, stats, lost, marked) = through(congestion, true, v6);
            println!(
                "{congestion:?}: {gbps:.2} Gb/s, {marked} marked, {} reductions",
                stats.tcp.ecn_reductions
            );
            assert_eq!((lost, stats.tcp.retrans_segs), (0, 0), "{congestion:?}");
            assert!(marked > 0 && stats.tcp.ecn_reductions > 0, "{congestion:?}");
            assert!(gbps > 5.0, "{congestion:?} {gbps}");
        }
    }
    let (_, stats, lost, marked) = through(CongestionControl::NewReno, false, false);
    assert!(
        lost > 0 && stats.tcp.retrans_segs > 0 && marked == 0,
        "without ECN the queue overflows"
    );
}

/// RFC 8257.
#[test]
fn marks_reduce_dctcp_less_than_reno() {
    let (dctcp, dctcp_timeouts, ..) = through(CongestionControl::Dctcp, true, false);
    let (reno, ..) = through(CongestionControl::NewReno, true, false);
    assert!(dctcp > reno, "{dctcp} {reno}");
    assert!(dctcp_timeouts.tcp.ecn_reductions > 3);
}

/// RFC 3168 section 6.1.
#[test]
fn marks_are_echoed_until_cwr() {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(|config| config.tcp.ecn = true);
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    let flags = |lab: &Lab, i: usize| lab.seen.borrow()[i].flags;
    assert_eq!(flags(&lab, 0), SYN | ECE | CWR);
    assert_eq!(flags(&lab, 1), SYN | ACK | ECE);
    lab.send(0, client, b"x");
    lab.run_ms(5);
    // A forged marked segment; its sender receives ECE until it sends CWR.
    let mut segment = lab.forge(0);
    segment.payload = b"y".to_vec();
    let mut frame = segment.frame();
    frame[15] = 2;
    frame[24..26].fill(0);
    let sum = crate::common::wire::sum(&frame[14..34], 0);
    frame[24..26].copy_from_slice(&sum);
    assert!(siw_tcp_sim::mark(&mut frame));
    lab.net.inject(0, frame);
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].stats().tcp.ce_received, 1);
    assert_eq!(lab.last(1).flags, ACK | ECE);
    segment.seq = segment.seq.wrapping_add(1);
    lab.inject(&segment);
    lab.run_ms(5);
    assert_eq!(lab.last(1).flags, ACK | ECE, "still");
    segment.seq = segment.seq.wrapping_add(1);
    segment.flags |= CWR;
    lab.inject(&segment);
    lab.run_ms(5);
    assert_eq!(lab.last(1).flags, ACK);
    assert_eq!(lab.read(1, server), b"xyyy");
}

/// RFC 3168 section 6.1.2.
#[test]
fn an_echo_reduces_the_window_once_and_sends_cwr() {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(|config| config.tcp.ecn = true);
    let mut lab = Lab::with(configs);
    let [client, _] = lab.connect();
    for _ in 0..10 {
        lab.net.hosts[0]
            .push_record(client, 1448, pattern(1448), false)
            .unwrap();
    }
    lab.net.flush(0, client);
    let before = lab.net.hosts[0].tcp_info(client).unwrap().cwnd;
    let base = lab.forge(1);
    for i in 1..4u32 {
        let mut segment = base.clone();
        segment.flags = ACK | ECE;
        segment.ack = segment.ack.wrapping_add(i * 1448);
        lab.inject(&segment);
    }
    lab.run_ms(1);
    let after = lab.net.hosts[0].tcp_info(client).unwrap();
    assert_eq!(lab.net.hosts[0].stats().tcp.ecn_reductions, 1);
    assert!(after.cwnd < before);
    lab.send(0, client, b"next");
    lab.run_ms(1);
    let cwr = |segment: &&crate::common::wire::Seg| {
        segment.from == 0 && segment.flags & CWR != 0 && segment.flags & SYN == 0
    };
    assert_eq!(lab.seen.borrow().iter().filter(cwr).count(), 1);
}

#[test]
fn a_peer_without_ecn_gets_none() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.ecn = true;
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    lab.send(0, client, &pattern(5000));
    lab.run_ms(5);
    assert_eq!(lab.read(1, server).len(), 5000);
    let seen = lab.seen.borrow();
    assert!(
        seen.iter()
            .skip(1)
            .all(|segment| segment.flags & (ECE | CWR) == 0)
    );
}

/// RFC 9406.
#[test]
fn hystart_leaves_slow_start_when_the_queue_grows() {
    let mut lab = Impairment::perfect(Duration::from_millis(1));
    lab.rate = 1_000_000_000;
    lab.queue = usize::MAX >> 32;
    let mut configs = configs();
    configs
        .iter_mut()
        .for_each(|config| config.tcp.recv_window = 64 << 20);
    let size = 25_000_000;
    let mut transfer = Transfer::new(5, configs, [lab, lab], [size, 0]);
    transfer.connect(false);
    while transfer.sides[1].received < size {
        transfer.run(micros(5000));
    }
    let info = transfer.sides[0]
        .id
        .and_then(|id| transfer.net.hosts[0].tcp_info(id));
    assert_eq!(transfer.net.lost, 0, "{info:?}");
    let info = info.unwrap();
    // The path holds 250 KB; the queue would take all 25 MB.
    assert!(info.ssthresh < 12_000_000, "{info:?}");
    assert!(info.cwnd > 500_000, "{info:?}");
}

/// Sends `segments` on a quiet connection and lets them be acknowledged.
fn burst(lab: &mut Lab, [client, server]: [siw_net::ConnId; 2], segments: usize) {
    for _ in 0..segments {
        lab.net.hosts[0]
            .push_record(client, 1448, pattern(1448), false)
            .unwrap();
    }
    lab.net.flush(0, client);
    lab.run_ms(5);
    assert_eq!(lab.read(1, server).len(), segments * 1448);
}

/// Waits for this many seconds, even if no event occurs in them.
fn wait(lab: &mut Lab, seconds: u64) {
    let end = lab.net.now + Duration::from_secs(seconds);
    lab.run_ms(1000 * seconds);
    lab.net.now = end;
}

/// RFC 7661 section 4.4.
#[test]
fn an_unused_window_is_halved_after_five_minutes() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.congestion = CongestionControl::NewReno;
    let mut lab = Lab::with(configs);
    let ids = lab.connect();
    let info = |lab: &Lab| lab.net.hosts[0].tcp_info(ids[0]).unwrap();
    for count in [10, 20, 40] {
        burst(&mut lab, ids, count);
    }
    // A loss sets the slow start threshold; then rounds use the whole window.
    let mut left = 1;
    lab.lose(move |from, frame| {
        let hit = from == 0 && frame.len() > 1000 && left > 0;
        left -= i32::from(hit);
        hit
    });
    burst(&mut lab, ids, 80);
    let low = info(&lab).ssthresh;
    while info(&lab).cwnd < low * 3 / 2 {
        let segments = info(&lab).cwnd as usize / 1448;
        burst(&mut lab, ids, segments);
    }
    let wide = info(&lab).cwnd;
    wait(&mut lab, 299);
    burst(&mut lab, ids, 2);
    assert_eq!((info(&lab).cwnd, info(&lab).ssthresh), (wide, low), "kept");
    // The window is not fully used, but the connection is not idle.
    for _ in 0..20 {
        lab.run_ms(200);
        burst(&mut lab, ids, 2);
    }
    let late = info(&lab);
    assert_eq!((late.cwnd, late.ssthresh), (wide / 2, wide / 4 * 3));
    assert_eq!(lab.net.hosts[0].stats().tcp.idle_restarts, 1);
    wait(&mut lab, 3_000);
    burst(&mut lab, ids, 1);
    assert_eq!(info(&lab).cwnd, 10 * 1448, "never below the initial window");
}

/// RFC 7661 section 4.4.
#[test]
fn an_unvalidated_window_grows_only_when_full() {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.initial_window = 40;
    let mut lab = Lab::with(configs);
    let ids = lab.connect();
    let cwnd = |lab: &Lab| lab.net.hosts[0].tcp_info(ids[0]).unwrap().cwnd / 1448;
    for _ in 0..10 {
        burst(&mut lab, ids, 15);
    }
    assert_eq!(cwnd(&lab), 40, "slow start, and 3/8 of the window in use");
    burst(&mut lab, ids, 40);
    assert!(cwnd(&lab) > 40, "full");
}

/// RFC 7661 section 4.4.1.
#[test]
fn a_mark_halves_what_an_unvalidated_window_used() {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(|config| config.tcp.ecn = true);
    configs[0].tcp.initial_window = 100;
    let mut lab = Lab::with(configs);
    let ids = lab.connect();
    burst(&mut lab, ids, 12);
    let mut segment = lab.forge(1);
    for _ in 0..6 {
        let record = pattern(1448);
        lab.net.hosts[0]
            .push_record(ids[0], 1448, record, false)
            .unwrap();
    }
    lab.net.flush(0, ids[0]);
    segment.flags = ACK | ECE;
    segment.ack = segment.ack.wrapping_add(1448);
    lab.inject(&segment);
    lab.run_ms(1);
    let info = lab.net.hosts[0].tcp_info(ids[0]).unwrap();
    assert!(
        info.ssthresh == 6 * 1448 && info.cwnd < 7 * 1448,
        "{info:?}"
    );
}

/// The ACK required by a change of marks (RFC 8257 section 3.2) acknowledges less than data sent in
/// the same batch, and so goes first.
#[test]
fn an_ack_for_a_changed_mark_precedes_newer_ones() {
    let mut configs = [host_config(0), host_config(1)];
    configs
        .iter_mut()
        .for_each(|config| config.tcp.congestion = CongestionControl::Dctcp);
    let mut lab = Lab::with(configs);
    let [_, server] = lab.connect();
    let base = lab.forge(0);
    // A segment whose ACK is delayed, followed by a marked segment.
    let frames = [0, 1].map(|place| {
        let mut segment = base.clone();
        segment.seq = base.seq.wrapping_add(place);
        segment.payload = vec![7];
        let mut frame = segment.frame();
        frame[15] = 2;
        siw_tcp_sim::forge::fix_ipv4(&mut frame[14..]);
        assert!(place == 0 || siw_tcp_sim::mark(&mut frame));
        frame
    });
    let info = siw_net::FrameInfo {
        checksum: siw_net::RxChecksum::Unknown,
        rss_hash: 0,
    };
    let (now, before) = (lab.net.now, lab.seen.borrow().len());
    let frames = frames.into_iter().map(|frame| (frame.into(), info));
    lab.net.hosts[1].receive_burst(now, frames);
    lab.send(1, server, b"data");
    lab.net.poll();
    let seen = lab.seen.borrow();
    let acks = seen[before..].iter().filter(|segment| segment.from == 1);
    let acks: Vec<u32> = acks
        .map(|segment| segment.ack.wrapping_sub(base.seq))
        .collect();
    assert!(acks.len() >= 2 && acks.is_sorted(), "{acks:?}");
}
