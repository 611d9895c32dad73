//! Datagrams in fragments (RFC 1122 section 3.3.2, RFC 8200 section 4.5): reassembled and received
//! as whole ones, within bounds, whatever comes.

mod common;

use std::time::Duration;

use common::raw_host::{FrameChange, RawHost};
use common::wire::{SYN, pattern, sum};
use siw_tcp::sim::forge::{Tcp, behind, fix_ipv4, fragments};
use siw_tcp::{Destination, Steering, WorkerSteering};

/// Every frame in fragments of so many bytes, the last first.
fn cut(most: usize) -> impl Fn(Vec<u8>) -> Vec<Vec<u8>> {
    let id = std::cell::Cell::new(77);
    move |f| {
        id.set(id.get() + 1);
        let mut all = fragments(&f, most, id.get());
        all.reverse();
        all
    }
}

fn pass(s: &mut RawHost, time: Duration) {
    s.lab.net.now = s.lab.net.now + time;
}

/// Type, code, and the word behind the checksum of an ICMP message of either family, and what
/// follows.
fn icmp(frame: &[u8]) -> ([u8; 2], u32, &[u8]) {
    let at = if frame[14] >> 4 == 6 { 54 } else { 34 };
    let word = u32::from_be_bytes(frame[at + 4..at + 8].try_into().unwrap());
    ([frame[at], frame[at + 1]], word, &frame[at + 8..])
}

/// The datagram that frames make, which are fragments in order, each within the MTU.
fn put_together(frames: &[Vec<u8>], mtu: usize) -> Vec<u8> {
    let mut whole = Vec::new();
    let mut ids = Vec::new();
    for (i, f) in frames.iter().enumerate() {
        assert!(f.len() <= 14 + mtu);
        let b16 = |at: usize| u16::from_be_bytes([f[at], f[at + 1]]);
        let (start, more, at) = if f[14] >> 4 == 6 {
            assert_eq!((f[20], usize::from(b16(18))), (44, f.len() - 54));
            ids.push(f[58..62].to_vec());
            (usize::from(b16(56) & 0xfff8), f[57] & 1 != 0, 62)
        } else {
            assert_eq!(sum(&f[14..34], 0), [0, 0]);
            assert_eq!(usize::from(b16(16)), f.len() - 14);
            ids.push(f[18..20].to_vec());
            let field = usize::from(b16(20));
            ((field & 0x1fff) * 8, field & 0x2000 != 0, 34)
        };
        assert_eq!((start, more), (whole.len(), i + 1 < frames.len()));
        whole.extend_from_slice(&f[at..]);
    }
    assert!(ids.iter().all(|id| *id == ids[0]));
    whole
}

#[test]
fn tcp_works_in_fragments_of_any_order() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let id = s.connect(&|f| vec![f]);
        for (most, bytes) in [(24, 1), (24, 600), (512, 1380), (1024, 1380)] {
            let way: FrameChange<'_> = &cut(most);
            assert!(s.delivers(id, &pattern(bytes), way), "{most}, {bytes}");
        }
        // Doubled, and with another datagram's between.
        let doubled = |f: Vec<u8>| {
            let all = fragments(&f, 256, 9);
            let other = fragments(&f, 128, 10);
            let twice = all.iter().zip(&other).flat_map(|(a, b)| [a, b, a]);
            twice.cloned().collect::<Vec<_>>()
        };
        assert!(s.delivers(id, &pattern(900), &doubled));
        let spoilt = |f: Vec<u8>| {
            let mut all = fragments(&f, 512, 11);
            *all[1].last_mut().unwrap() ^= 1;
            all
        };
        assert!(!s.delivers(id, &pattern(900), &spoilt));
        assert!(s.delivers(id, &pattern(900), &|f| vec![f]));
        let n = s.stats();
        assert_eq!((n.csum_errors, n.reassembly_fails), (1, 0));
        assert_eq!(n.reassembly_oks, 5, "one was short enough");
        assert!(n.reassembly_required > 40);
    }
}

#[test]
fn connections_open_in_fragments() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        // A header without options is in one of 24 bytes; what is shorter comes whole.
        let padded = |f: Vec<u8>| fragments(&f, 24, 1);
        let id = s.connect(&padded);
        assert!(s.delivers(id, &pattern(100), &padded));
    }
}

#[test]
fn long_echo_requests_are_answered_in_fragments() {
    for v6 in [false, true] {
        for bytes in [1400, 1500, 4000, 20_000, if v6 { 65_527 } else { 65_507 }] {
            let mut s = RawHost::new(v6);
            let kind = if v6 { 128 } else { 8 };
            let f = s.ends.icmp([kind, 0], [1, 2, 3, 4], &pattern(bytes));
            let most = 1448;
            let a = s.answers(fragments(&f, most, 5));
            let header = if v6 { 54 } else { 34 };
            let reply = match &a[..] {
                [one] => one[header..].to_vec(),
                all => put_together(all, 1500),
            };
            assert_eq!(a.len() > 1, bytes > 1472 - 20 * usize::from(v6), "{bytes}");
            let kind = if v6 { 129 } else { 0 };
            assert_eq!(reply[..2], [kind, 0]);
            assert_eq!(reply[4..8], [1, 2, 3, 4]);
            assert!(reply[8..] == pattern(bytes)[..], "{bytes}");
            assert_eq!(s.stats().reassembly_oks, u64::from(bytes > 1440));
        }
    }
}

/// If the first fragment was received.
#[test]
fn incomplete_datagrams_time_out_with_an_icmp_error() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let kind = if v6 { 128 } else { 8 };
        let f = s.ends.icmp([kind, 0], [0; 4], &pattern(600));
        // One without its last part, one without its first.
        let first = fragments(&f, 256, 1)[0].clone();
        s.give(vec![first.clone(), fragments(&f, 256, 2)[1].clone()]);
        // The error would be about an error.
        let error = s
            .ends
            .icmp(if v6 { [1, 0] } else { [3, 0] }, [0; 4], &pattern(600));
        s.give(vec![fragments(&error, 256, 3)[0].clone()]);
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 3);
        let end = s.lab.net.hosts[1].next_deadline().expect("a deadline");
        assert!(end <= s.now() + Duration::from_secs(60));
        pass(&mut s, Duration::from_secs(59));
        assert!(s.said().is_empty());
        pass(&mut s, Duration::from_secs(1));
        let a = s.said();
        assert_eq!(a.len(), 1);
        let (what, word, quoted) = icmp(&a[0]);
        assert_eq!((what, word), (if v6 { [3, 1] } else { [11, 1] }, 0));
        assert_eq!(quoted, &first[14..]);
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
        let n = s.stats();
        assert_eq!((n.reassembly_timeouts, n.reassembly_fails), (3, 3));
        assert_eq!((n.icmp_time_exceeded_out, n.icmp_out), (1, 1));
        assert_eq!(n.icmp_unreachables_out, 0);
    }
}

/// RFC 1858, RFC 3128, RFC 7112.
#[test]
fn fragments_that_hide_the_tcp_header_are_refused() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let syn = s.ends.tcp(&Tcp {
            ports: [5, 80],
            flags: SYN,
            options: &[2, 4, 5, 180],
            ..Tcp::default()
        });
        // 24 bytes of header in three parts, and in two.
        for (i, most) in [8, 16].into_iter().enumerate() {
            let all = fragments(&syn, most, i as u32);
            let a = s.answers(all.clone());
            assert_eq!(a.len(), usize::from(v6), "{most}");
            if v6 {
                // RFC 8200 section 4.5: incomplete headers in the first fragment.
                let (what, word, quoted) = icmp(&a[0]);
                assert_eq!((what, word, quoted), ([4, 3], 0, &all[0][14..]));
            }
        }
        assert_eq!(s.stats().no_ports + s.stats().in_segs, 0);
        if !v6 {
            // The flags alone, over whatever there is (RFC 3128).
            let before = s.stats().reassembly_fails;
            s.give(vec![fragments(&syn, 8, 9)[1].clone()]);
            assert_eq!(s.stats().reassembly_fails, before + 1);
        }
    }
}

#[test]
fn overlapping_fragments_make_nothing_rfc_5722() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let id = s.connect(&|f| vec![f]);
        let overlapping = |f: Vec<u8>| {
            let (a, b) = (fragments(&f, 256, 5), fragments(&f, 264, 5));
            // 0..256, 264..528: sound; then what is missing, and more.
            [&a[..1], &b[1..2], &a[1..], &b[2..]].concat()
        };
        assert!(!s.delivers(id, &pattern(1000), &overlapping));
        assert_eq!(s.stats().reassembly_oks, 0);
        assert_eq!(s.stats().reassembly_fails, 1);
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
        assert!(
            s.delivers(id, &pattern(1000), &cut(256)),
            "the next number is good"
        );
    }
}

#[test]
fn overlong_and_misaligned_fragments_are_refused() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let f = s.ends.udp([1, 2], &pattern(700));
        let part = fragments(&f, 704, 1).remove(0);
        let mut far = part.clone();
        if v6 {
            far[56..58].copy_from_slice(&0xfff8u16.to_be_bytes());
        } else {
            far[20..22].copy_from_slice(&0x1fffu16.to_be_bytes());
            fix_ipv4(&mut far[14..34]);
        }
        let a = s.answers(vec![far.clone()]);
        if v6 {
            // Points at the offset.
            assert_eq!(icmp(&a[0]), ([4, 0], 42, &far[14..]));
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
        let b = s.answers(vec![odd.clone()]);
        if v6 {
            // Points at the length.
            assert_eq!(icmp(&b[0]), ([4, 0], 4, &odd[14..]));
        } else {
            assert!(a.is_empty() && b.is_empty());
        }
        assert_eq!(s.stats().reassembly_fails, 2);
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
    }
}

#[test]
fn segments_longer_than_our_mss_are_not_reassembled() {
    for v6 in [false, true] {
        let mut s = RawHost::new(v6);
        let id = s.connect(&|f| vec![f]);
        let fits = 1500 - 20 - if v6 { 48 } else { 20 };
        assert!(!s.delivers(id, &pattern(fits + 1), &cut(512)));
        assert!(s.delivers(id, &pattern(fits), &cut(512)));
        assert_eq!(s.stats().reassembly_fails, 1);
    }
}

#[test]
fn a_flood_of_first_fragments_is_bounded() {
    for v6 in [false, true] {
        let mut s = RawHost::of(v6, |c| {
            c.reassembly.max_datagrams = 16;
            c.reassembly.max_fragments = 40;
        });
        let id = s.connect(&|f| vec![f]);
        let noise = s.ends.udp([1, 2], &pattern(600));
        for i in 0..2000 {
            s.give(vec![fragments(&noise, 256, i)[(i % 3) as usize].clone()]);
            assert!(s.lab.net.hosts[1].held_fragments() <= 16);
            if i % 100 == 0 {
                assert!(s.delivers(id, &pattern(500), &|f| fragments(&f, 256, 1 << 15)));
            }
        }
        let n = s.stats();
        assert_eq!(n.reassembly_oks, 20);
        assert!(n.reassembly_fails >= 2000 - 16);
        let a = s.said();
        assert!(
            a.len() < 60,
            "a SYN is answered, data acknowledged: {}",
            a.len()
        );
        // Those left are given up; the limit of the rate of ICMP holds for them.
        pass(&mut s, Duration::from_secs(61));
        s.said();
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
    }
}

#[test]
fn without_reassembly_fragments_are_dropped() {
    let mut s = RawHost::of(false, |c| c.reassembly.max_datagrams = 0);
    let f = s.ends.icmp([8, 0], [0; 4], &pattern(600));
    assert!(s.answers(fragments(&f, 256, 1)).is_empty());
    assert_eq!(
        (s.stats().reassembly_required, s.stats().reassembly_fails),
        (3, 3)
    );
    assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
}

/// Whatever fragments wait with the same identification (RFC 6946).
#[test]
fn atomic_fragments_are_whole_datagrams() {
    let mut s = RawHost::new(true);
    let atomic: (u8, &[u8]) = (44, &[0, 0, 0, 0, 0, 0, 0, 7]);
    let id = s.connect(&|f| vec![behind(&f, &[atomic])]);
    let f = s.ends.icmp([128, 0], [0; 4], &pattern(600));
    s.give(vec![fragments(&f, 256, 7)[0].clone()]);
    assert!(s.delivers(id, b"in an atomic fragment", &|f| vec![behind(
        &f,
        &[atomic]
    )]));
    assert_eq!(s.lab.net.hosts[1].held_fragments(), 1);
    s.said();
    assert_eq!(s.answers(vec![behind(&f, &[atomic])]).len(), 1);
    assert_eq!(s.stats().reassembly_required, 1);
}

/// RFC 6980.
#[test]
fn neighbour_discovery_in_fragments_is_dropped() {
    let mut s = RawHost::new(true);
    let f = s.ends.solicit();
    let atomic: (u8, &[u8]) = (44, &[0, 0, 0, 0, 0, 0, 0, 7]);
    assert!(s.answers(vec![behind(&f, &[atomic])]).is_empty());
    assert!(s.answers(fragments(&f, 16, 8)).is_empty());
    assert_eq!(s.stats().martians, 2);
}

#[test]
fn extension_headers_around_a_fragment_header_work() {
    let mut s = RawHost::new(true);
    let skip: (u8, &[u8]) = (60, &[0, 0, 1, 4, 0, 0, 0, 0]);
    let hop: (u8, &[u8]) = (0, &[0, 0, 1, 4, 0, 0, 0, 0]);
    let way = |f: Vec<u8>| {
        let all = fragments(&behind(&f, &[skip, skip]), 64, 3);
        all.iter().map(|f| behind(f, &[hop, skip])).collect()
    };
    let id = s.connect(&|f| vec![f]);
    assert!(s.delivers(id, &pattern(700), &way));
    s.said();
    // Unknown behind them: named by the last header before it.
    let f = s.ends.udp([1, 2], &pattern(300));
    let all: Vec<_> = way(f);
    let a = s.answers(all.clone());
    assert_eq!(
        icmp(a.last().unwrap()),
        ([4, 1], 40 + 16 + 8 + 8, &all[0][14..])
    );
    // An option that is refused, in the part that is fragmented.
    let bad: (u8, &[u8]) = (60, &[0, 0, 0x80, 4, 0, 0, 0, 0]);
    let all = fragments(&behind(&s.ends.udp([1, 2], &pattern(300)), &[bad]), 128, 4);
    let a = s.answers(all.clone());
    assert_eq!(icmp(&a[0]), ([4, 2], 40 + 8 + 2, &all[0][14..]));
    // Headers that go on in the second fragment (RFC 7112).
    let f = s.ends.tcp(&Tcp::default());
    let all = fragments(&behind(&f, &[skip; 3]), 16, 5);
    let a = s.answers(all.clone());
    assert_eq!(icmp(&a[0]), ([4, 3], 0, &all[0][14..]));
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
        let mut s = RawHost::new(v6);
        s.ends.ip = [from, to].map(|a| a.parse().unwrap());
        let f = s
            .ends
            .icmp([if v6 { 128 } else { 8 }, 0], [0; 4], &pattern(600));
        assert!(s.answers(fragments(&f, 256, 1)).is_empty(), "{from} {to}");
        assert_eq!(s.lab.net.hosts[1].held_fragments(), 0);
        assert_eq!(s.stats().martians + s.stats().not_for_us, 3);
    }
}

#[test]
fn one_worker_processes_a_datagram_all_received() {
    let steering = std::sync::Arc::new(Steering::new(2, 0));
    for v6 in [false, true] {
        let worker = |n| {
            let steering = steering.clone();
            RawHost::of(v6, move |c| {
                c.steering = Some(WorkerSteering {
                    steering,
                    worker: n,
                })
            })
        };
        let mut workers = [worker(0), worker(1)];
        let hear = |w: &mut RawHost, f: &Vec<u8>| {
            let now = w.now();
            let stack = &mut w.lab.net.hosts[1];
            stack.receive_copy(now, f.clone().into(), siw_tcp::RxChecksum::Unknown);
        };
        // A port scan in fragments: the owner alone resets.
        for port in 1..20 {
            let t = Tcp {
                ports: [port, 99],
                flags: SYN,
                payload: &pattern(200),
                ..Tcp::default()
            };
            let f = workers[0].ends.tcp(&t);
            let Destination::Worker(owner) = steering.classify_frame(&f) else {
                panic!("an owner")
            };
            for (i, part) in fragments(&f, 128, port.into()).into_iter().enumerate() {
                assert_eq!(steering.classify_frame(&part), Destination::AllWorkers);
                let [a, b] = &mut workers;
                let (got, heard) = if i == 0 { (a, b) } else { (b, a) };
                got.give(vec![part.clone()]);
                hear(heard, &part);
            }
            for (n, w) in workers.iter_mut().enumerate() {
                assert_eq!(w.said().len(), usize::from(n == owner), "port {port}");
            }
        }
        // An echo: whoever received the first fragment itself, in whatever order they came.
        let kind = if v6 { 128 } else { 8 };
        let f = workers[0].ends.icmp([kind, 0], [0; 4], &pattern(200));
        for (round, order) in [[0, 1], [1, 0]].into_iter().enumerate() {
            let parts = fragments(&f, 128, 100 + round as u32);
            for i in order {
                let [a, b] = &mut workers;
                let (got, heard) = if i == 0 { (a, b) } else { (b, a) };
                hear(heard, &parts[i]);
                got.give(vec![parts[i].clone()]);
            }
            assert_eq!(workers[0].said().len(), 1, "{order:?}");
            assert!(workers[1].said().is_empty(), "{order:?}");
        }
    }
}
