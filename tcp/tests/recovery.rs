//! How losses are found and repaired, and what is made of repairs that were for nothing.

mod common;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, Seg, pattern};
use siw_tcp::sim::{Impairment, host_config};
use siw_tcp::{ConnId, Instant};

const MSS: usize = 1448;

/// A lab whose sender may send `segments` at once, and its connection.
fn lab(segments: u32) -> (Lab, [ConnId; 2]) {
    let mut c = [host_config(0), host_config(1)];
    c[0].initial_window = segments;
    let mut l = Lab::with(c);
    let ids = l.connect();
    // RACK wants the round trip of the path, not of the handshake alone.
    l.send(0, ids[0], &pattern(MSS));
    l.run_ms(5);
    assert_eq!(l.read(1, ids[1]).len(), MSS);
    (l, ids)
}

fn push(l: &mut Lab, id: ConnId, segments: usize) -> Vec<u8> {
    let data = pattern(segments * MSS);
    for c in data.chunks(MSS) {
        l.net.hosts[0]
            .push_record(id, c.len() as u32, c.to_vec(), false)
            .unwrap();
    }
    l.net.flush(0, id);
    data
}

/// Until the peer has it all; how long that took.
fn until_read(l: &mut Lab, peer: ConnId, len: usize, start: Instant) -> Duration {
    l.net.run(Duration::from_millis(50), |n| {
        n.hosts[1].tcp_info(peer).is_some_and(|c| c.readable == len)
    });
    l.net.now - start
}

/// Loses those first transmissions of host 0 (counted from now).
fn lose(l: &mut Lab, which: &[usize]) {
    let (mut n, which) = (0, which.to_vec());
    l.lose(move |from, f| {
        let data = from == 0 && Seg::parse(0, f).is_some_and(|s| !s.payload.is_empty());
        n += usize::from(data);
        data && which.contains(&(n - 1))
    });
}

/// Loses the next segment with payload of host 0, and its first repetition.
fn lose_twice(l: &mut Lab) {
    let (mut seen, mut first) = (0, None);
    l.lose(move |from, f| {
        let Some(s) = Seg::parse(from, f).filter(|s| from == 0 && !s.payload.is_empty()) else {
            return false;
        };
        let first = *first.get_or_insert(s.seq);
        seen += i32::from(s.seq == first);
        s.seq == first && seen <= 2
    });
}

#[test]
fn no_rto_for_up_to_3_losses_in_a_window_wherever_they_are_rfc_8985() {
    const N: usize = 12;
    for a in 0..N {
        for b in a..N {
            for c in b..N {
                let mut lost = vec![a, b, c];
                lost.dedup();
                let (mut l, [id, peer]) = lab(N as u32);
                lose(&mut l, &lost);
                let start = l.net.now;
                let data = push(&mut l, id, N);
                let took = until_read(&mut l, peer, data.len(), start);
                assert_eq!(l.read(1, peer), data, "{lost:?}");
                let s = l.net.hosts[0].stats();
                assert_eq!(s.timeouts, 0, "{lost:?}");
                assert!(
                    s.retrans_segs <= lost.len() as u64 + s.tlp_probes,
                    "{lost:?}: {} repetitions",
                    s.retrans_segs
                );
                assert!(took < Duration::from_millis(5), "{lost:?}: {took:?}");
            }
        }
    }
}

#[test]
fn a_repetition_has_its_round_trip_before_the_timer_takes_it_for_silence_rfc_6298_5_1() {
    // A round trip just below the shortest timeout: whoever starts the timer when the first
    // segment leaves, and not again when it is repeated, times out before the ACK can be here.
    for rtt_us in [2_600, 3_500, 4_400, 4_800] {
        let mut c = [host_config(0), host_config(1)];
        c[0].initial_window = 12;
        let mut l = Lab::with(c);
        let half = Impairment::perfect(Duration::from_micros(rtt_us / 2));
        (0..2).for_each(|from| l.net.set_link(from, half));
        l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
        let now = l.net.now;
        let to = "10.0.0.2:80".parse().unwrap();
        let id = l.net.hosts[0].connect(now, None, None, to, 0).unwrap();
        l.run_ms(20);
        let peer = l.events[1][0].0;
        // The round trip is known to be steady.
        for _ in 0..50 {
            l.send(0, id, b"tick");
            l.run_ms(10);
        }
        assert_eq!(l.read(1, peer).len(), 200);
        lose(&mut l, &[0]);
        let start = l.net.now;
        let data = push(&mut l, id, 12);
        let took = until_read(&mut l, peer, data.len(), start);
        assert_eq!(l.read(1, peer), data);
        let s = l.net.hosts[0].stats();
        assert_eq!((s.timeouts, s.fast_retrans), (0, 1), "{rtt_us} us");
        assert!(
            took < Duration::from_micros(2 * rtt_us),
            "{rtt_us} us: {took:?}"
        );
    }
}

#[test]
fn a_lost_tail_is_repaired_by_a_probe_before_the_timeout_rfc_8985_7() {
    // The whole flight, its last segment, and a lone segment.
    for (n, lost) in [(3, vec![0, 1, 2]), (10, vec![9]), (1, vec![0])] {
        let (mut l, [id, peer]) = lab(10);
        lose(&mut l, &lost);
        let start = l.net.now;
        let data = push(&mut l, id, n);
        let took = until_read(&mut l, peer, data.len(), start);
        assert_eq!(l.read(1, peer), data);
        assert!(took < Duration::from_millis(4), "{lost:?}: {took:?}");
        let s = l.net.hosts[0].stats();
        assert_eq!((s.timeouts, s.tlp_probes), (0, 1), "{lost:?}");
    }
}

#[test]
fn a_probe_prefers_new_data_rfc_8985_7_3() {
    let (mut l, [id, peer]) = lab(4);
    lose(&mut l, &[2, 3, 4, 5, 6, 7, 8]);
    let before = l.net.hosts[0].tcp_info(id).unwrap().cwnd as usize / MSS;
    let data = push(&mut l, id, 30);
    l.run_ms(100);
    assert_eq!(l.read(1, peer), data);
    let s = l.net.hosts[0].stats();
    assert!(s.tlp_probes >= 1 && before < 30);
    let probe = l
        .seen
        .borrow()
        .iter()
        .filter(|s| s.from == 0 && !s.payload.is_empty())
        .map(|s| s.seq)
        .collect::<Vec<_>>();
    let repeats = |n: usize| probe[..n].iter().filter(|&&q| q == probe[n]).count();
    let first_again = (0..probe.len()).find(|&n| repeats(n) > 0).unwrap();
    assert!(
        first_again > before,
        "the probe carried data that had never been sent"
    );
}

#[test]
fn a_probe_that_hid_a_loss_reduces_the_window_rfc_8985_7_4() {
    let (mut l, [id, _]) = lab(10);
    lose(&mut l, &[9]);
    push(&mut l, id, 10);
    l.run_ms(10);
    let before = l.net.hosts[0].tcp_info(id).unwrap().cwnd;
    assert_eq!(l.net.hosts[0].stats().tlp_recoveries, 0, "not known yet");
    push(&mut l, id, 1);
    l.run_ms(10);
    assert_eq!(l.net.hosts[0].stats().tlp_recoveries, 1);
    assert!(l.net.hosts[0].tcp_info(id).unwrap().cwnd < before);
}

#[test]
fn a_needless_probe_is_told_by_d_sack_and_costs_nothing_rfc_2883() {
    let (mut l, [id, peer]) = lab(10);
    // The ACKs of the flight are late.
    let mut left = 8;
    l.lose(move |from, f| {
        let ack = from == 1 && Seg::parse(1, f).is_some_and(|s| s.payload.is_empty());
        left -= i32::from(ack && left > 0);
        ack && left > 6
    });
    let data = push(&mut l, id, 10);
    l.run_ms(20);
    assert_eq!(l.read(1, peer), data);
    push(&mut l, id, 1);
    l.run_ms(20);
    let s = l.net.hosts[0].stats();
    assert_eq!((s.tlp_probes, s.tlp_recoveries, s.timeouts), (1, 0, 0));
    assert_eq!(s.dsacks_in, 1);
    let block = l
        .seen
        .borrow()
        .iter()
        .rev()
        .find_map(|s| {
            let at = s.options.windows(2).position(|w| w == [5, 10])?;
            let b =
                |i: usize| u32::from_be_bytes(s.options[at + i..at + i + 4].try_into().unwrap());
            Some((b(2), b(6), s.ack))
        })
        .expect("a D-SACK block on the wire");
    assert_eq!(
        (block.1.wrapping_sub(block.0), block.1),
        (MSS as u32, block.2),
        "the last segment, below the cumulative ACK (RFC 2883 section 4)"
    );
}

#[test]
fn a_lost_repetition_is_repeated_without_a_timeout_rfc_8985_6() {
    let (mut l, [id, peer]) = lab(20);
    lose_twice(&mut l);
    let data = push(&mut l, id, 60);
    l.run_ms(100);
    assert_eq!(l.read(1, peer), data);
    let s = l.net.hosts[0].stats();
    assert_eq!(s.timeouts, 0);
    assert!(s.lost_retransmit >= 1);
}

#[test]
fn a_lost_repetition_is_found_before_the_timeout_while_sacks_arrive_rfc_6675_6() {
    // The shortest timeout is half of the round trip beyond it. The first segment and its
    // repetition are lost; what shows that leaves most of a round trip after the repetition.
    let mut c = [host_config(0), host_config(1)];
    c[0].initial_window = 16;
    let mut l = Lab::with(c);
    let half = Impairment::perfect(Duration::from_millis(5));
    (0..2).for_each(|from| l.net.set_link(from, half));
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let now = l.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    let id = l.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    l.run_ms(60);
    let peer = l.events[1][0].0;
    for _ in 0..50 {
        l.send(0, id, b"tick");
        l.run_ms(20);
    }
    l.read(1, peer);
    lose_twice(&mut l);
    // The repetition leaves after 10 ms, alone; the answers to what left after 7.5 ms come after
    // 17.5 ms, those to what leaves after the repetition no sooner than after 26 ms.
    let mut data = push(&mut l, id, 4);
    l.net.run(Duration::from_micros(7_500), |_| false);
    data.extend(push(&mut l, id, 12));
    l.net.run(Duration::from_micros(8_500), |_| false);
    data.extend(push(&mut l, id, 8));
    let start = l.net.now;
    let took = until_read(&mut l, peer, data.len(), start);
    assert_eq!(l.read(1, peer), data);
    let s = l.net.hosts[0].stats();
    assert_eq!(
        (s.timeouts, s.lost_retransmit, s.retrans_segs),
        (0, 1, 2),
        "{took:?}"
    );
}

#[test]
fn a_path_that_reorders_teaches_patience_rfc_8985_6_2() {
    let (mut l, [id, peer]) = lab(40);
    let mut link = Impairment::perfect(Duration::from_micros(400));
    link.jitter = Duration::from_micros(150);
    l.net.set_link(0, link);
    let mut early = 0;
    let mut got = vec![];
    let mut sent = vec![];
    for round in 0..60 {
        sent.extend(push(&mut l, id, 20));
        l.run_ms(5);
        got.extend(l.read(1, peer));
        if round == 20 {
            early = l.net.hosts[0].stats().retrans_segs;
        }
    }
    assert_eq!(got, sent);
    let s = l.net.hosts[0].stats();
    assert!(l.net.hosts[1].stats().ofo_queue > 500, "it does reorder");
    println!(
        "{early} then {} needless repetitions",
        s.retrans_segs - early
    );
    assert!(
        s.retrans_segs - early <= 8,
        "{} of 780 repeated for nothing",
        s.retrans_segs - early
    );
    assert_eq!(s.timeouts, 0);
}

#[test]
fn a_timeout_for_nothing_is_taken_back_rfc_3522() {
    let (mut l, [id, peer]) = lab(10);
    let before = l.net.hosts[0].tcp_info(id).unwrap();
    // The path stalls for 30 ms, then delivers everything.
    let slow = Impairment::perfect(Duration::from_millis(30));
    l.net.set_link(0, slow);
    let data = push(&mut l, id, 10);
    l.run_ms(1);
    l.net
        .set_link(0, Impairment::perfect(Duration::from_micros(50)));
    // Repetitions are held up as well, behind the originals.
    l.lose(|from, f| from == 0 && f.len() > 1000);
    l.run_ms(28);
    l.lose(|_, _| false);
    l.run_ms(100);
    assert_eq!(l.read(1, peer), data);
    let s = l.net.hosts[0].stats();
    assert!(s.timeouts >= 1 && s.spurious == 1, "{s:?}");
    let after = l.net.hosts[0].tcp_info(id).unwrap();
    assert!(after.cwnd >= before.cwnd && after.ssthresh == before.ssthresh);
}

#[test]
fn a_lost_fin_is_probed_too() {
    let (mut l, [id, _]) = lab(10);
    let mut left = 1;
    l.lose(move |from, f| {
        let hit = from == 0
            && left > 0
            && Seg::parse(0, f).is_some_and(|s| s.flags & (FIN | ACK) == FIN | ACK);
        left -= i32::from(hit);
        hit
    });
    let now = l.net.now;
    l.net.hosts[0].close(now, id);
    l.run_ms(5);
    assert!(l.got(1).contains(siw_tcp::Events::PEER_FIN));
    let s = l.net.hosts[0].stats();
    assert_eq!((s.tlp_probes, s.timeouts), (1, 0));
}
