//! Fragmented datagrams (RFC 1122 section 3.3.2, RFC 8200 section 4.5): they are reassembled and
//! received like whole ones, within limits, whatever arrives.

use std::time::Duration;

use crate::common::raw_host::{FrameChange, RawHost};
use crate::common::wire::{SYN, pattern, sum};
use siw_net::{Destination, Steering, WorkerSteering};
use siw_tcp_sim::forge::{Tcp, behind, fix_ipv4, fragments};

/// Splits every frame into fragments of at most `most` bytes, the last first.
fn cut(most: usize) -> impl Fn(Vec<u8>) -> Vec<Vec<u8>> {
    let id = std::cell::Cell::new(77);
    move |frame| {
        id.set(id.get() + 1);
        let mut all = fragments(&frame, most, id.get());
        all.reverse();
        all
    }
}

fn pass(raw_host: &mut RawHost, time: Duration) {
    raw_host.lab.net.now = raw_host.lab.net.now + time;
}

/// Returns type and code, the word after the checksum, and the rest of an ICMP message of either
/// family.
fn icmp(frame: &[u8]) -> ([u8; 2], u32, &[u8]) {
    let at = if frame[14] >> 4 == 6 { 54 } else { 34 };
    let word = u32::from_be_bytes(frame[at + 4..at + 8].try_into().unwrap());
    ([frame[at], frame[at + 1]], word, &frame[at + 8..])
}

/// Reassembles a datagram from frames, which must be fragments in order, each within the MTU.
fn put_together(frames: &[Vec<u8>], mtu: usize) -> Vec<u8> {
    let mut whole = Vec::new();
    let mut ids = Vec::new();
    for (i, frame) in frames.iter().enumerate() {
        assert!(frame.len() <= 14 + mtu);
        let b16 = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let (start, more, at) = if frame[14] >> 4 == 6 {
            assert_eq!((frame[20], usize::from(b16(18))), (44, frame.len() - 54));
            ids.push(frame[58..62].to_vec());
            (usize::from(b16(56) & 0xfff8), frame[57] & 1 != 0, 62)
        } else {
            assert_eq!(sum(&frame[14..34], 0), [0, 0]);
            assert_eq!(usize::from(b16(16)), frame.len() - 14);
            ids.push(frame[18..20].to_vec());
            let field = usize::from(b16(20));
            ((field & 0x1fff) * 8, field & 0x2000 != 0, 34)
        };
        assert_eq!((start, more), (whole.len(), i + 1 < frames.len()));
        whole.extend_from_slice(&frame[at..]);
    }
    assert!(ids.iter().all(|id| *id == ids[0]));
    whole
}

#[test]
fn tcp_works_in_fragments_of_any_order() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let id = raw_host.connect(&|frame| vec![frame]);
        for (most, bytes) in [(24, 1), (24, 600), (512, 1380), (1024, 1380)] {
            let way: FrameChange<'_> = &cut(most);
            assert!(
                raw_host.delivers(id, &pattern(bytes), way),
                "{most}, {bytes}"
            );
        }
        // Duplicated, and interleaved with fragments of another datagram.
        let doubled = |frame: Vec<u8>| {
            let all = fragments(&frame, 256, 9);
            let other = fragments(&frame, 128, 10);
            let twice = all
                .iter()
                .zip(&other)
                .flat_map(|(first, second)| [first, second, first]);
            twice.cloned().collect::<Vec<_>>()
        };
        assert!(raw_host.delivers(id, &pattern(900), &doubled));
        let spoilt = |frame: Vec<u8>| {
            let mut all = fragments(&frame, 512, 11);
            *all[1].last_mut().unwrap() ^= 1;
            all
        };
        assert!(!raw_host.delivers(id, &pattern(900), &spoilt));
        assert!(raw_host.delivers(id, &pattern(900), &|frame| vec![frame]));
        let stats = raw_host.stats();
        assert_eq!((stats.net.csum_errors, stats.net.reassembly_fails), (1, 0));
        assert_eq!(stats.net.reassembly_oks, 5, "one was short enough");
        assert!(stats.net.reassembly_required > 40);
    }
}

#[test]
fn connections_open_in_fragments() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        // A header without options fits one fragment of 24 bytes; shorter packets are not fragmented.
        let padded = |frame: Vec<u8>| fragments(&frame, 24, 1);
        let id = raw_host.connect(&padded);
        assert!(raw_host.delivers(id, &pattern(100), &padded));
    }
}

#[test]
fn long_echo_requests_are_answered_in_fragments() {
    for v6 in [false, true] {
        for bytes in [1400, 1500, 4000, 20_000, if v6 { 65_527 } else { 65_507 }] {
            let mut raw_host = RawHost::new(v6);
            let kind = if v6 { 128 } else { 8 };
            let frame = raw_host.ends.icmp([kind, 0], [1, 2, 3, 4], &pattern(bytes));
            let most = 1448;
            let replies = raw_host.answers(fragments(&frame, most, 5));
            let header = if v6 { 54 } else { 34 };
            let reply = match &replies[..] {
                [one] => one[header..].to_vec(),
                all => put_together(all, 1500),
            };
            assert_eq!(
                replies.len() > 1,
                bytes > 1472 - 20 * usize::from(v6),
                "{bytes}"
            );
            let kind = if v6 { 129 } else { 0 };
            assert_eq!(reply[..2], [kind, 0]);
            assert_eq!(reply[4..8], [1, 2, 3, 4]);
            assert!(reply[8..] == pattern(bytes)[..], "{bytes}");
            assert_eq!(raw_host.stats().net.reassembly_oks, u64::from(bytes > 1440));
        }
    }
}

/// The error is sent only if the first fragment was received.
#[test]
fn incomplete_datagrams_time_out_with_an_icmp_error() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let kind = if v6 { 128 } else { 8 };
        let frame = raw_host.ends.icmp([kind, 0], [0; 4], &pattern(600));
        // One datagram without its last fragment, one without its first.
        let first = fragments(&frame, 256, 1)[0].clone();
        raw_host.give(vec![first.clone(), fragments(&frame, 256, 2)[1].clone()]);
        // An error about an ICMP error must not be sent.
        let error = raw_host
            .ends
            .icmp(if v6 { [1, 0] } else { [3, 0] }, [0; 4], &pattern(600));
        raw_host.give(vec![fragments(&error, 256, 3)[0].clone()]);
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 3);
        let end = raw_host.lab.net.hosts[1]
            .next_deadline()
            .expect("a deadline");
        assert!(end <= raw_host.now() + Duration::from_secs(60));
        pass(&mut raw_host, Duration::from_secs(59));
        assert!(raw_host.said().is_empty());
        pass(&mut raw_host, Duration::from_secs(1));
        let replies = raw_host.said();
        assert_eq!(replies.len(), 1);
        let (what, word, quoted) = icmp(&replies[0]);
        assert_eq!((what, word), (if v6 { [3, 1] } else { [11, 1] }, 0));
        assert_eq!(quoted, &first[14..]);
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
        let stats = raw_host.stats();
        assert_eq!(
            (stats.net.reassembly_timeouts, stats.net.reassembly_fails),
            (3, 3)
        );
        assert_eq!(
            (stats.net.icmp_time_exceeded_out, stats.net.icmp_out),
            (1, 1)
        );
        assert_eq!(stats.net.icmp_unreachables_out, 0);
    }
}

/// RFC 1858, RFC 3128, RFC 7112.
#[test]
fn fragments_that_hide_the_tcp_header_are_refused() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let syn = raw_host.ends.tcp(&Tcp {
            ports: [5, 80],
            flags: SYN,
            options: &[2, 4, 5, 180],
            ..Tcp::default()
        });
        // 24 bytes of header in three fragments, and in two.
        for (i, most) in [8, 16].into_iter().enumerate() {
            let all = fragments(&syn, most, i as u32);
            let replies = raw_host.answers(all.clone());
            assert_eq!(replies.len(), usize::from(v6), "{most}");
            if v6 {
                // RFC 8200 section 4.5: incomplete headers in the first fragment.
                let (what, word, quoted) = icmp(&replies[0]);
                assert_eq!((what, word, quoted), ([4, 3], 0, &all[0][14..]));
            }
        }
        assert_eq!(
            raw_host.stats().tcp.no_ports + raw_host.stats().tcp.in_segs,
            0
        );
        if !v6 {
            // A fragment with the flags only, which would overwrite any others (RFC 3128).
            let before = raw_host.stats().net.reassembly_fails;
            raw_host.give(vec![fragments(&syn, 8, 9)[1].clone()]);
            assert_eq!(raw_host.stats().net.reassembly_fails, before + 1);
        }
    }
}

#[test]
fn overlapping_fragments_make_nothing_rfc_5722() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let id = raw_host.connect(&|frame| vec![frame]);
        let overlapping = |frame: Vec<u8>| {
            let (narrow, wide) = (fragments(&frame, 256, 5), fragments(&frame, 264, 5));
            // 0..256 and 264..528 are valid; then the missing bytes follow, with an overlap.
            [&narrow[..1], &wide[1..2], &narrow[1..], &wide[2..]].concat()
        };
        assert!(!raw_host.delivers(id, &pattern(1000), &overlapping));
        assert_eq!(raw_host.stats().net.reassembly_oks, 0);
        assert_eq!(raw_host.stats().net.reassembly_fails, 1);
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
        assert!(
            raw_host.delivers(id, &pattern(1000), &cut(256)),
            "the next number is good"
        );
    }
}

#[test]
fn overlong_and_misaligned_fragments_are_refused() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let frame = raw_host.ends.udp([1, 2], &pattern(700));
        let part = fragments(&frame, 704, 1).remove(0);
        let mut far = part.clone();
        if v6 {
            far[56..58].copy_from_slice(&0xfff8u16.to_be_bytes());
        } else {
            far[20..22].copy_from_slice(&0x1fffu16.to_be_bytes());
            fix_ipv4(&mut far[14..34]);
        }
        let replies = raw_host.answers(vec![far.clone()]);
        if v6 {
            // The pointer is that of the offset.
            assert_eq!(icmp(&replies[0]), ([4, 0], 42, &far[14..]));
        }
        let mut odd = part[..part.len() - 1].to_vec();
        let len = u16::from_be_bytes([
            part[if v6 { 18 } else { 16 }],
            part[if v6 { 19 } else { 17 }],
        ]) - 1;
        if v6 {
            odd[18..20].copy_from_slice(&len.to_be_bytes());
            odd[57] |= 1;
        } else {
            odd[16..18].copy_from_slice(&len.to_be_bytes());
            odd[20..22].copy_from_slice(&0x2000u16.to_be_bytes());
            fix_ipv4(&mut odd[14..34]);
        }
        let reply_frames = raw_host.answers(vec![odd.clone()]);
        if v6 {
            // The pointer is that of the length.
            assert_eq!(icmp(&reply_frames[0]), ([4, 0], 4, &odd[14..]));
        } else {
            assert!(replies.is_empty() && reply_frames.is_empty());
        }
        assert_eq!(raw_host.stats().net.reassembly_fails, 2);
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
    }
}

#[test]
fn segments_longer_than_our_mss_are_not_reassembled() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::new(v6);
        let id = raw_host.connect(&|frame| vec![frame]);
        let fits = 1500 - 20 - if v6 { 48 } else { 20 };
        assert!(!raw_host.delivers(id, &pattern(fits + 1), &cut(512)));
        assert!(raw_host.delivers(id, &pattern(fits), &cut(512)));
        assert_eq!(raw_host.stats().net.reassembly_fails, 1);
    }
}

#[test]
fn a_flood_of_first_fragments_is_bounded() {
    for v6 in [false, true] {
        let mut raw_host = RawHost::of(v6, |config| {
            config.net.reassembly.max_datagrams = 16;
            config.net.reassembly.max_fragments = 40;
        });
        let id = raw_host.connect(&|frame| vec![frame]);
        let noise = raw_host.ends.udp([1, 2], &pattern(600));
        for i in 0..2000 {
            raw_host.give(vec![fragments(&noise, 256, i)[(i % 3) as usize].clone()]);
            assert!(raw_host.lab.net.hosts[1].held_fragments() <= 16);
            if i % 100 == 0 {
                assert!(raw_host.delivers(id, &pattern(500), &|frame| fragments(
                    &frame,
                    256,
                    1 << 15
                )));
            }
        }
        let stats = raw_host.stats();
        assert_eq!(stats.net.reassembly_oks, 20);
        assert!(stats.net.reassembly_fails >= 2000 - 16);
        let replies = raw_host.said();
        assert!(
            replies.len() < 60,
            "a SYN is answered, data acknowledged: {}",
            replies.len()
        );
        // The remaining ones time out; the ICMP rate limit applies to them.
        pass(&mut raw_host, Duration::from_secs(61));
        raw_host.said();
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
    }
}

#[test]
fn without_reassembly_fragments_are_dropped() {
    let mut raw_host = RawHost::of(false, |config| config.net.reassembly.max_datagrams = 0);
    let frame = raw_host.ends.icmp([8, 0], [0; 4], &pattern(600));
    assert!(raw_host.answers(fragments(&frame, 256, 1)).is_empty());
    assert_eq!(
        (
            raw_host.stats().net.reassembly_required,
            raw_host.stats().net.reassembly_fails
        ),
        (3, 3)
    );
    assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
}

/// They are accepted even if other fragments with the same identification wait (RFC 6946).
#[test]
fn atomic_fragments_are_whole_datagrams() {
    let mut raw_host = RawHost::new(true);
    let atomic: (u8, &[u8]) = (44, &[0, 0, 0, 0, 0, 0, 0, 7]);
    let id = raw_host.connect(&|frame| vec![behind(&frame, &[atomic])]);
    let frame = raw_host.ends.icmp([128, 0], [0; 4], &pattern(600));
    raw_host.give(vec![fragments(&frame, 256, 7)[0].clone()]);
    assert!(
        raw_host.delivers(id, b"in an atomic fragment", &|frame| vec![behind(
            &frame,
            &[atomic]
        )])
    );
    assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 1);
    raw_host.said();
    assert_eq!(raw_host.answers(vec![behind(&frame, &[atomic])]).len(), 1);
    assert_eq!(raw_host.stats().net.reassembly_required, 1);
}

/// RFC 6980.
#[test]
fn neighbour_discovery_in_fragments_is_dropped() {
    let mut raw_host = RawHost::new(true);
    let frame = raw_host.ends.solicit();
    let atomic: (u8, &[u8]) = (44, &[0, 0, 0, 0, 0, 0, 0, 7]);
    assert!(raw_host.answers(vec![behind(&frame, &[atomic])]).is_empty());
    assert!(raw_host.answers(fragments(&frame, 16, 8)).is_empty());
    assert_eq!(raw_host.stats().net.martians, 2);
}

#[test]
fn extension_headers_around_a_fragment_header_work() {
    let mut raw_host = RawHost::new(true);
    let skip: (u8, &[u8]) = (60, &[0, 0, 1, 4, 0, 0, 0, 0]);
    let hop: (u8, &[u8]) = (0, &[0, 0, 1, 4, 0, 0, 0, 0]);
    let way = |frame: Vec<u8>| {
        let all = fragments(&behind(&frame, &[skip, skip]), 64, 3);
        all.iter()
            .map(|frame| behind(frame, &[hop, skip]))
            .collect()
    };
    let id = raw_host.connect(&|frame| vec![frame]);
    assert!(raw_host.delivers(id, &pattern(700), &way));
    raw_host.said();
    // Unknown next header after the extension headers: the last of these names it.
    let frame = raw_host.ends.udp([1, 2], &pattern(300));
    let all: Vec<_> = way(frame);
    let replies = raw_host.answers(all.clone());
    assert_eq!(
        icmp(replies.last().unwrap()),
        ([4, 1], 40 + 16 + 8 + 8, &all[0][14..])
    );
    // An option that is rejected, in the fragmentable part.
    let bad: (u8, &[u8]) = (60, &[0, 0, 0x80, 4, 0, 0, 0, 0]);
    let all = fragments(
        &behind(&raw_host.ends.udp([1, 2], &pattern(300)), &[bad]),
        128,
        4,
    );
    let replies = raw_host.answers(all.clone());
    assert_eq!(icmp(&replies[0]), ([4, 2], 40 + 8 + 2, &all[0][14..]));
    // Headers that continue in the second fragment (RFC 7112).
    let frame = raw_host.ends.tcp(&Tcp::default());
    let all = fragments(&behind(&frame, &[skip; 3]), 16, 5);
    let replies = raw_host.answers(all.clone());
    assert_eq!(icmp(&replies[0]), ([4, 3], 0, &all[0][14..]));
}

#[test]
fn fragments_to_groups_and_from_nobody_are_not_kept() {
    for (v6, from, to) in [
        (false, "10.0.0.9", "10.0.0.255"),
        (false, "10.0.0.2", "10.0.0.2"),
        (false, "127.0.0.1", "10.0.0.2"),
        (true, "fd00::9", "ff02::1"),
        (true, "ff02::2", "fd00::2"),
        (true, "fd00::9", "fd00::3"),
    ] {
        let mut raw_host = RawHost::new(v6);
        raw_host.ends.ip = [from, to].map(|address| address.parse().unwrap());
        let frame = raw_host
            .ends
            .icmp([if v6 { 128 } else { 8 }, 0], [0; 4], &pattern(600));
        assert!(
            raw_host.answers(fragments(&frame, 256, 1)).is_empty(),
            "{from} {to}"
        );
        assert_eq!(raw_host.lab.net.hosts[1].held_fragments(), 0);
        assert_eq!(
            raw_host.stats().net.martians + raw_host.stats().net.not_for_us,
            3
        );
    }
}

#[test]
fn one_worker_processes_a_datagram_all_received() {
    let steering = std::sync::Arc::new(Steering::new(2, 0));
    for v6 in [false, true] {
        let worker = |count| {
            let steering = steering.clone();
            RawHost::of(v6, move |config| {
                config.net.steering = Some(WorkerSteering {
                    steering,
                    worker: count,
                })
            })
        };
        let mut workers = [worker(0), worker(1)];
        let hear = |net: &mut RawHost, frame: &Vec<u8>| {
            let now = net.now();
            let stack = &mut net.lab.net.hosts[1];
            stack.receive_copy(now, frame.clone().into(), siw_net::RxChecksum::Unknown);
        };
        // A port scan in fragments: only the owner of the flow sends resets.
        for port in 1..20 {
            let segment = Tcp {
                ports: [port, 99],
                flags: SYN,
                payload: &pattern(200),
                ..Tcp::default()
            };
            let frame = workers[0].ends.tcp(&segment);
            let Destination::Worker(owner) = steering.classify_frame(&frame) else {
                panic!("an owner")
            };
            for (i, part) in fragments(&frame, 128, port.into()).into_iter().enumerate() {
                assert_eq!(steering.classify_frame(&part), Destination::AllWorkers);
                let [first, second] = &mut workers;
                let (got, heard) = if i == 0 {
                    (first, second)
                } else {
                    (second, first)
                };
                got.give(vec![part.clone()]);
                hear(heard, &part);
            }
            for (count, worker) in workers.iter_mut().enumerate() {
                assert_eq!(
                    worker.said().len(),
                    usize::from(count == owner),
                    "port {port}"
                );
            }
        }
        // An echo request: the worker that received the first fragment answers, in any order of arrival.
        let kind = if v6 { 128 } else { 8 };
        let frame = workers[0].ends.icmp([kind, 0], [0; 4], &pattern(200));
        for (round, order) in [[0, 1], [1, 0]].into_iter().enumerate() {
            let parts = fragments(&frame, 128, 100 + round as u32);
            for i in order {
                let [first, second] = &mut workers;
                let (got, heard) = if i == 0 {
                    (first, second)
                } else {
                    (second, first)
                };
                hear(heard, &parts[i]);
                got.give(vec![parts[i].clone()]);
            }
            assert_eq!(workers[0].said().len(), 1, "{order:?}");
            assert!(workers[1].said().is_empty(), "{order:?}");
        }
    }
}
