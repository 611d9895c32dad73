//! Detection and repair of losses, and the response to needless retransmissions.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::wire::{ACK, FIN, Lab, Seg, pattern};
use siw_net::{ConnId, FrameInfo, Instant, RxChecksum};
use siw_tcp::{Retransmissions, StackConfig};
use siw_tcp_sim::{Impairment, host_config};

const MSS: usize = 1448;

/// A lab whose sender may send `segments` segments at once, and its connection.
fn lab_with_sender(segments: u32) -> (Lab, [ConnId; 2]) {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.initial_window = segments;
    lab_with_configs(configs)
}

/// A lab with these hosts, and its connection.
fn lab_with_configs(configs: [StackConfig; 2]) -> (Lab, [ConnId; 2]) {
    let mut lab = Lab::with(configs);
    let ids = lab.connect();
    // RACK needs the round trip of the path, not only that of the handshake.
    lab.send(0, ids[0], &pattern(MSS));
    lab.run_ms(5);
    assert_eq!(lab.read(1, ids[1]).len(), MSS);
    (lab, ids)
}

fn push(lab: &mut Lab, id: ConnId, segments: usize) -> Vec<u8> {
    let data = pattern(segments * MSS);
    for chunk in data.chunks(MSS) {
        lab.net.hosts[0]
            .push_record(id, chunk.len() as u32, chunk.to_vec(), false)
            .unwrap();
    }
    lab.net.flush(0, id);
    data
}

/// Runs until the peer has all data; returns how long that took.
fn until_read(lab: &mut Lab, peer: ConnId, len: usize, start: Instant) -> Duration {
    until_read_within(lab, peer, len, Duration::from_millis(50));
    lab.net.now - start
}

/// As [`until_read`], from now and for at most this time.
fn until_read_within(lab: &mut Lab, peer: ConnId, len: usize, limit: Duration) -> Duration {
    let start = lab.net.now;
    lab.net.run(limit, |net| {
        net.hosts[1]
            .tcp_info(peer)
            .is_some_and(|info| info.readable == len)
    });
    lab.net.now - start
}

/// Loses these first transmissions of host 0, counted from now.
fn lose(lab: &mut Lab, which: &[usize]) {
    let (mut count, which) = (0, which.to_vec());
    lab.lose(move |from, frame| {
        let data =
            from == 0 && Seg::parse(0, frame).is_some_and(|segment| !segment.payload.is_empty());
        count += usize::from(data);
        data && which.contains(&(count - 1))
    });
}

/// Loses the next segment with payload from host 0, and its first retransmission.
fn lose_twice(lab: &mut Lab) {
    let (mut seen, mut first) = (0, None);
    lab.lose(move |from, frame| {
        let Some(segment) =
            Seg::parse(from, frame).filter(|segment| from == 0 && !segment.payload.is_empty())
        else {
            return false;
        };
        let first = *first.get_or_insert(segment.seq);
        seen += i32::from(segment.seq == first);
        segment.seq == first && seen <= 2
    });
}

/// RFC 8985.
#[test]
fn up_to_3_losses_in_a_window_cost_no_timeout() {
    const N: usize = 12;
    for first in 0..N {
        for second in first..N {
            for third in second..N {
                let mut lost = vec![first, second, third];
                lost.dedup();
                let (mut lab, [id, peer]) = lab_with_sender(N as u32);
                lose(&mut lab, &lost);
                let start = lab.net.now;
                let data = push(&mut lab, id, N);
                let took = until_read(&mut lab, peer, data.len(), start);
                assert_eq!(lab.read(1, peer), data, "{lost:?}");
                let stats = lab.net.hosts[0].stats();
                assert_eq!(stats.tcp.timeouts, 0, "{lost:?}");
                assert!(
                    stats.tcp.retrans_segs <= lost.len() as u64 + stats.tcp.tlp_probes,
                    "{lost:?}: {} retransmissions",
                    stats.tcp.retrans_segs
                );
                assert!(took < Duration::from_millis(5), "{lost:?}: {took:?}");
            }
        }
    }
}

/// RFC 6298 (5.1).
#[test]
fn a_retransmission_gets_a_full_rto() {
    // The round trip is just below the shortest timeout: a timer that is started when the first segment
    // is sent, and not restarted by its retransmission, fires before the ACK can arrive.
    for rtt_us in [2_600, 3_500, 4_400, 4_800] {
        let mut configs = [host_config(0), host_config(1)];
        configs[0].tcp.initial_window = 12;
        let mut lab = Lab::with(configs);
        let half = Impairment::perfect(Duration::from_micros(rtt_us / 2));
        (0..2).for_each(|from| lab.net.set_link(from, half));
        lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
        let now = lab.net.now;
        let to = "10.0.0.2:80".parse().unwrap();
        let id = lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
        lab.run_ms(20);
        let peer = lab.events[1][0].0;
        // Many samples show that the round trip is steady.
        for _ in 0..50 {
            lab.send(0, id, b"tick");
            lab.run_ms(10);
        }
        assert_eq!(lab.read(1, peer).len(), 200);
        lose(&mut lab, &[0]);
        let start = lab.net.now;
        let data = push(&mut lab, id, 12);
        let took = until_read(&mut lab, peer, data.len(), start);
        assert_eq!(lab.read(1, peer), data);
        let stats = lab.net.hosts[0].stats();
        assert_eq!(
            (stats.tcp.timeouts, stats.tcp.fast_retrans),
            (0, 1),
            "{rtt_us} us"
        );
        assert!(
            took < Duration::from_micros(2 * rtt_us),
            "{rtt_us} us: {took:?}"
        );
    }
}

/// RFC 8985 section 7.
#[test]
fn a_tail_loss_probe_repairs_before_the_timeout() {
    // The whole flight, its last segment, and a lone segment.
    for (count, lost) in [(3, vec![0, 1, 2]), (10, vec![9]), (1, vec![0])] {
        let (mut lab, [id, peer]) = lab_with_sender(10);
        lose(&mut lab, &lost);
        let start = lab.net.now;
        let data = push(&mut lab, id, count);
        let took = until_read(&mut lab, peer, data.len(), start);
        assert_eq!(lab.read(1, peer), data);
        assert!(took < Duration::from_millis(4), "{lost:?}: {took:?}");
        let stats = lab.net.hosts[0].stats();
        assert_eq!(
            (stats.tcp.timeouts, stats.tcp.tlp_probes),
            (0, 1),
            "{lost:?}"
        );
    }
}

#[test]
fn a_probe_prefers_new_data_rfc_8985_7_3() {
    let (mut lab, [id, peer]) = lab_with_sender(4);
    lose(&mut lab, &[2, 3, 4, 5, 6, 7, 8]);
    let before = lab.net.hosts[0].tcp_info(id).unwrap().cwnd as usize / MSS;
    let data = push(&mut lab, id, 30);
    lab.run_ms(100);
    assert_eq!(lab.read(1, peer), data);
    let stats = lab.net.hosts[0].stats();
    assert!(stats.tcp.tlp_probes >= 1 && before < 30);
    let probe = lab
        .seen
        .borrow()
        .iter()
        .filter(|segment| segment.from == 0 && !segment.payload.is_empty())
        .map(|segment| segment.seq)
        .collect::<Vec<_>>();
    let repeats = |count: usize| {
        probe[..count]
            .iter()
            .filter(|&&value| value == probe[count])
            .count()
    };
    let first_again = (0..probe.len()).find(|&count| repeats(count) > 0).unwrap();
    assert!(
        first_again > before,
        "the probe carried data that had never been sent"
    );
}

/// RFC 8985 section 7.4.
#[test]
fn a_probe_that_repairs_a_loss_reduces_cwnd() {
    let (mut lab, [id, _]) = lab_with_sender(10);
    lose(&mut lab, &[9]);
    push(&mut lab, id, 10);
    lab.run_ms(10);
    let before = lab.net.hosts[0].tcp_info(id).unwrap().cwnd;
    assert_eq!(
        lab.net.hosts[0].stats().tcp.tlp_recoveries,
        0,
        "not known yet"
    );
    push(&mut lab, id, 1);
    lab.run_ms(10);
    assert_eq!(lab.net.hosts[0].stats().tcp.tlp_recoveries, 1);
    assert!(lab.net.hosts[0].tcp_info(id).unwrap().cwnd < before);
}

/// RFC 2883.
#[test]
fn a_needless_probe_seen_by_d_sack_costs_nothing() {
    let (mut lab, [id, peer]) = lab_with_sender(10);
    // The ACKs of the flight are delayed.
    let mut left = 8;
    lab.lose(move |from, frame| {
        let ack =
            from == 1 && Seg::parse(1, frame).is_some_and(|segment| segment.payload.is_empty());
        left -= i32::from(ack && left > 0);
        ack && left > 6
    });
    let data = push(&mut lab, id, 10);
    lab.run_ms(20);
    assert_eq!(lab.read(1, peer), data);
    push(&mut lab, id, 1);
    lab.run_ms(20);
    let stats = lab.net.hosts[0].stats();
    assert_eq!(
        (
            stats.tcp.tlp_probes,
            stats.tcp.tlp_recoveries,
            stats.tcp.timeouts
        ),
        (1, 0, 0)
    );
    assert_eq!(stats.tcp.dsacks_in, 1);
    let block = lab
        .seen
        .borrow()
        .iter()
        .rev()
        .find_map(|segment| {
            let at = segment
                .options
                .windows(2)
                .position(|pair| pair == [5, 10])?;
            let word_at = |i: usize| {
                u32::from_be_bytes(segment.options[at + i..at + i + 4].try_into().unwrap())
            };
            Some((word_at(2), word_at(6), segment.ack))
        })
        .expect("a D-SACK block on the wire");
    assert_eq!(
        (block.1.wrapping_sub(block.0), block.1),
        (MSS as u32, block.2),
        "the last segment, below the cumulative ACK (RFC 2883 section 4)"
    );
}

/// RFC 2883 section 4: the first ACK of a batch has the D-SACK block, the range around it, and one more
/// range; further ACKs have the others.
#[test]
fn acks_with_a_d_sack_block_report_every_range() {
    let mut lab = Lab::new();
    let (_, segment) = lab.connect_with_data();
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    // The first range arrives twice, and is the least recent one of the batch.
    let frames = [10, 10, 30, 50, 70].map(|offset| {
        let segment = Seg {
            seq: segment.seq.wrapping_add(offset),
            payload: pattern(10),
            ..segment.clone()
        };
        (segment.frame().into(), info)
    });
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, frames.into_iter());
    let sink = &mut lab.net.sinks[1];
    lab.net.hosts[1].poll(now, sink);
    let mut reported = BTreeSet::new();
    for (frame, _) in sink.frames.drain(..) {
        let ack = Seg::parse(1, &frame).expect("an ACK");
        let at = (ack.options.iter().zip(&ack.options[1..]))
            .position(|(kind, len)| *kind == 5 && len % 8 == 2)
            .expect("SACK blocks");
        let blocks = ack.options[at + 2..at + usize::from(ack.options[at + 1])].chunks_exact(8);
        reported.extend(blocks.map(|block| {
            let start = u32::from_be_bytes(block[..4].try_into().unwrap());
            start.wrapping_sub(segment.seq)
        }));
    }
    assert_eq!(reported, BTreeSet::from([10, 30, 50, 70]));
}

/// RFC 8985 section 6.
#[test]
fn a_lost_retransmission_is_resent_without_timeout() {
    let (mut lab, [id, peer]) = lab_with_sender(20);
    lose_twice(&mut lab);
    let data = push(&mut lab, id, 60);
    lab.run_ms(100);
    assert_eq!(lab.read(1, peer), data);
    let stats = lab.net.hosts[0].stats();
    assert_eq!(stats.tcp.timeouts, 0);
    assert!(stats.tcp.lost_retransmit >= 1);
}

/// RFC 6675 section 6.
#[test]
fn sacks_reveal_a_lost_retransmission() {
    // The shortest timeout is the round trip plus half of it. The first segment and its retransmission
    // are lost; segments sent most of a round trip after the retransmission reveal the loss.
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.initial_window = 16;
    let mut lab = Lab::with(configs);
    let half = Impairment::perfect(Duration::from_millis(5));
    (0..2).for_each(|from| lab.net.set_link(from, half));
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = lab.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    let id = lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(60);
    let peer = lab.events[1][0].0;
    for _ in 0..50 {
        lab.send(0, id, b"tick");
        lab.run_ms(20);
    }
    lab.read(1, peer);
    lose_twice(&mut lab);
    // The retransmission is sent at 10 ms, alone. ACKs of segments sent at 7.5 ms arrive at 17.5 ms, those
    // of segments sent after the retransmission at 26 ms at the earliest.
    let mut data = push(&mut lab, id, 4);
    lab.net.run(Duration::from_micros(7_500), |_| false);
    data.extend(push(&mut lab, id, 12));
    lab.net.run(Duration::from_micros(8_500), |_| false);
    data.extend(push(&mut lab, id, 8));
    let start = lab.net.now;
    let took = until_read(&mut lab, peer, data.len(), start);
    assert_eq!(lab.read(1, peer), data);
    let stats = lab.net.hosts[0].stats();
    assert_eq!(
        (
            stats.tcp.timeouts,
            stats.tcp.lost_retransmit,
            stats.tcp.retrans_segs
        ),
        (0, 1, 2),
        "{took:?}"
    );
}

/// RFC 8985 section 6.2.
#[test]
fn reordering_widens_the_rack_window() {
    let (mut lab, [id, peer]) = lab_with_sender(40);
    let mut link = Impairment::perfect(Duration::from_micros(400));
    link.jitter = Duration::from_micros(150);
    lab.net.set_link(0, link);
    let mut early = 0;
    let mut got = vec![];
    let mut sent = vec![];
    for round in 0..60 {
        sent.extend(push(&mut lab, id, 20));
        lab.run_ms(5);
        got.extend(lab.read(1, peer));
        if round == 20 {
            early = lab.net.hosts[0].stats().tcp.retrans_segs;
        }
    }
    assert_eq!(got, sent);
    let stats = lab.net.hosts[0].stats();
    assert!(
        lab.net.hosts[1].stats().tcp.ofo_queue > 500,
        "it does reorder"
    );
    println!(
        "{early} then {} needless retransmissions",
        stats.tcp.retrans_segs - early
    );
    assert!(
        stats.tcp.retrans_segs - early <= 8,
        "{} of 780 repeated for nothing",
        stats.tcp.retrans_segs - early
    );
    assert_eq!(stats.tcp.timeouts, 0);
}

#[test]
fn a_timeout_for_nothing_is_taken_back_rfc_3522() {
    let (mut lab, [id, peer]) = lab_with_sender(10);
    let before = lab.net.hosts[0].tcp_info(id).unwrap();
    // The path stalls for 30 ms, then delivers everything.
    let slow = Impairment::perfect(Duration::from_millis(30));
    lab.net.set_link(0, slow);
    let data = push(&mut lab, id, 10);
    lab.run_ms(1);
    lab.net
        .set_link(0, Impairment::perfect(Duration::from_micros(50)));
    // Retransmissions are delayed too, behind the originals.
    lab.lose(|from, frame| from == 0 && frame.len() > 1000);
    lab.run_ms(28);
    lab.lose(|_, _| false);
    lab.run_ms(100);
    assert_eq!(lab.read(1, peer), data);
    let stats = lab.net.hosts[0].stats();
    assert!(
        stats.tcp.timeouts >= 1 && stats.tcp.spurious == 1,
        "{stats:?}"
    );
    let after = lab.net.hosts[0].tcp_info(id).unwrap();
    assert!(after.cwnd >= before.cwnd && after.ssthresh == before.ssthresh);
}

/// The reordering timer runs no longer than the retransmission timeout: RACK takes the outage for the
/// round trip when the ACK that ends it takes back the timeouts.
#[test]
fn a_loss_before_an_outage_waits_for_one_timeout() {
    const OUTAGE: u64 = 8000;
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.rto_max = Duration::from_secs(1);
    let (mut lab, [id, peer]) = lab_with_configs(configs);
    // The sixth segment is lost, and every ACK for the others.
    let mut sent = 0;
    lab.lose(move |from, frame| {
        let data = Seg::parse(from, frame).is_some_and(|segment| !segment.payload.is_empty());
        sent += usize::from(from == 0 && data);
        from == 1 || sent == 6
    });
    let data = push(&mut lab, id, 10);
    lab.run_ms(OUTAGE);
    lab.lose(|_, _| false);
    // The first ACK after the outage is that of a segment with data, which carries no SACK block. The
    // answer to an old segment does; nothing sent after the outage is among them.
    lab.send(1, peer, b"x");
    lab.run_ms(1);
    let mut old = lab.forge(0);
    old.seq = old.seq.wrapping_sub(data.len() as u32 + 1);
    lab.inject(&old);
    let time = until_read_within(&mut lab, peer, data.len(), Duration::from_secs(20));
    assert!(time < Duration::from_millis(2200), "{time:?}");
    assert_eq!(lab.read(1, peer), data);
    assert_eq!(lab.net.hosts[0].stats().tcp.spurious, 1);
}

#[test]
fn a_lost_fin_is_probed_too() {
    let (mut lab, [id, _]) = lab_with_sender(10);
    let mut left = 1;
    lab.lose(move |from, frame| {
        let hit = from == 0
            && left > 0
            && Seg::parse(0, frame).is_some_and(|segment| segment.flags & (FIN | ACK) == FIN | ACK);
        left -= i32::from(hit);
        hit
    });
    let now = lab.net.now;
    lab.net.hosts[0].close(now, id);
    lab.run_ms(5);
    assert!(lab.got(1).contains(siw_tcp::Events::PEER_FIN));
    let stats = lab.net.hosts[0].stats();
    assert_eq!((stats.tcp.tlp_probes, stats.tcp.timeouts), (1, 0));
}

/// Each retransmission is counted under one cause, for its connection and for the stack.
#[test]
fn retransmissions_are_counted_by_cause() {
    let counts = |lab: &Lab, id| {
        let host = &lab.net.hosts[0];
        let info = host.tcp_info(id).unwrap();
        let (counts, stats) = (info.retransmissions, host.stats());
        assert_eq!(u64::from(counts.timeout), stats.tcp.slow_start_retrans);
        assert_eq!(u64::from(counts.fast), stats.tcp.fast_retrans);
        assert_eq!(u64::from(counts.tail_probe), stats.tcp.tail_retrans);
        assert_eq!(u64::from(counts.total()), stats.tcp.retrans_segs);
        assert_eq!(info.retransmitted_in_flight, 0, "all is acknowledged");
        counts
    };
    // An ACK reports the losses.
    let (mut lab, [id, _]) = lab_with_sender(12);
    lose(&mut lab, &[2, 5]);
    push(&mut lab, id, 12);
    lab.run_ms(50);
    let expected = Retransmissions {
        fast: 2,
        ..Retransmissions::default()
    };
    assert_eq!(counts(&lab, id), expected);
    // The tail is lost: the probe sends it again.
    let (mut lab, [id, _]) = lab_with_sender(12);
    lose(&mut lab, &[11]);
    push(&mut lab, id, 12);
    lab.run_ms(50);
    let expected = Retransmissions {
        tail_probe: 1,
        ..Retransmissions::default()
    };
    assert_eq!(counts(&lab, id), expected);
    // And the probe is lost too.
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.max_connections = 1;
    let (mut lab, [id, _]) = lab_with_configs(configs);
    lose_twice(&mut lab);
    push(&mut lab, id, 1);
    lab.run_ms(500);
    let expected = Retransmissions {
        tail_probe: 1,
        timeout: 1,
        ..Retransmissions::default()
    };
    assert_eq!(counts(&lab, id), expected);
    // The next connection, which has the only slot, begins with zeros.
    let now = lab.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    let host = &mut lab.net.hosts[0];
    assert!(host.connect(now, None, None, to, 0).is_err());
    host.abort(now, id);
    host.release(now, id);
    lab.run_ms(50);
    let now = lab.net.now;
    let next = lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    let info = lab.net.hosts[0].tcp_info(next).unwrap();
    assert_eq!(info.retransmissions, Retransmissions::default());
}

/// A retransmission is outstanding from its departure to its acknowledgement.
#[test]
fn outstanding_retransmissions_are_those_on_the_way() {
    let (mut lab, [id, _]) = lab_with_sender(12);
    lose(&mut lab, &[5]);
    push(&mut lab, id, 12);
    let on_the_way = |lab: &Lab| {
        let info = lab.net.hosts[0].tcp_info(id).unwrap();
        info.retransmitted_in_flight
    };
    assert_eq!(on_the_way(&lab), 0);
    let mut most = 0;
    lab.net.run(Duration::from_millis(50), |net| {
        let info = net.hosts[0].tcp_info(id).unwrap();
        most = most.max(info.retransmitted_in_flight);
        false
    });
    assert_eq!((most, on_the_way(&lab)), (1, 0));
}
