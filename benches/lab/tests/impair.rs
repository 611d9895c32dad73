//! Impairments between two peers.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use etherparse::{
    NetSlice, PacketBuilder, SlicedPacket, TcpHeader, TcpOptionElement, TransportSlice,
};
use siw_lab::case::built_in;
use siw_lab::impair::{Between, Direction, Impairer, Profile};
use siw_lab::link::{Station, memory_link};
use siw_lab::reference::Reference;
use siw_lab::script::{Target, Verdict};
use siw_lab::suite::{Instance, run_all};
use siw_lab::via::{PORT, addresses};

const SEQ: u32 = 0xFFFF_FFF0;

fn segment(is_ipv6: bool, payload: &[u8]) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let ip = if is_ipv6 {
        ethernet.ipv6([1; 16], [2; 16], 64)
    } else {
        ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
    };
    let mut frame = Vec::new();
    ip.tcp(20_000, 7174, SEQ, 60_000)
        .ack(5)
        .psh()
        .write(&mut frame, payload)
        .unwrap();
    frame
}

/// Sequence number, window and payload of a frame, whose checksums have to be right.
#[track_caller]
fn read(frame: &[u8]) -> (u32, u16, Vec<u8>) {
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
        panic!("no TCP")
    };
    let sum = match packet.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            tcp.calc_checksum_ipv4(header.source, header.destination)
                .unwrap()
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header();
            tcp.calc_checksum_ipv6(header.source(), header.destination())
                .unwrap()
        }
        _ => panic!("no IP"),
    };
    assert_eq!(tcp.checksum(), sum, "checksum");
    (
        tcp.sequence_number(),
        tcp.window_size(),
        tcp.payload().to_vec(),
    )
}

fn only(plan: Direction) -> Impairer {
    Impairer::new(&plan, 7)
}

const PAYLOAD: &[u8] = b"an FPDU or a part of one";

/// A segment with this TCP header.
fn with_header(change: impl Fn(&mut TcpHeader)) -> Vec<u8> {
    let mut header = TcpHeader::new(20_000, 7174, SEQ, 60_000);
    change(&mut header);
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .tcp_header(header)
        .write(&mut frame, b"")
        .unwrap();
    frame
}

fn header(frame: &[u8]) -> TcpHeader {
    read(frame);
    match SlicedPacket::from_ethernet(frame).unwrap().transport {
        Some(TransportSlice::Tcp(tcp)) => tcp.to_header(),
        _ => panic!("no TCP"),
    }
}

/// Numbers of the segments that are lost, from 1.
fn lost(plan: Direction, segments: usize, payload: &[u8]) -> Vec<usize> {
    let mut impairer = only(plan);
    let mut is_lost = |_: &usize| {
        impairer
            .pass(Instant::now(), segment(false, payload))
            .is_empty()
    };
    (1..=segments).filter(&mut is_lost).collect()
}

#[test]
fn segments_are_lost_by_number_length_and_kind() {
    let nth = Direction {
        nth: 3,
        ..Direction::default()
    };
    assert_eq!(lost(nth, 10, PAYLOAD), [3]);
    let whole = 40 + PAYLOAD.len();
    for (mtu, count) in [(whole - 1, 5), (whole, 0)] {
        let long = Direction {
            mtu,
            ..Direction::default()
        };
        assert_eq!(lost(long, 5, PAYLOAD).len(), count);
    }
    let acks = Direction {
        ack_every: 4,
        ..Direction::default()
    };
    assert_eq!(lost(acks.clone(), 8, b""), [1, 2, 3, 5, 6, 7]);
    assert!(lost(acks, 8, PAYLOAD).is_empty());
    let paused = Direction {
        pause_at: 2,
        pause_ms: 60_000.0,
        ..Direction::default()
    };
    assert_eq!(lost(paused, 4, PAYLOAD), [2, 3, 4]);
}

#[test]
fn a_burst_takes_segments_in_a_row() {
    let burst = Direction {
        loss: 0.01,
        burst: 5,
        ..Direction::default()
    };
    let lost = lost(burst, 2000, PAYLOAD);
    let runs = lost.chunk_by(|a, b| a + 1 == *b).map(<[usize]>::len);
    let runs: Vec<usize> = runs.collect();
    assert!(runs.len() > 5, "{runs:?}");
    let whole = &runs[..runs.len() - 1];
    assert!(whole.iter().all(|run| run % 5 == 0), "{runs:?}");
}

#[test]
fn swapped_words_keep_the_sum_and_damage_does_not() {
    let mut swapping = only(Direction {
        swap: 1.0,
        ..Direction::default()
    });
    let mut damaging = only(Direction {
        damage: 1.0,
        ..Direction::default()
    });
    let mut changed = 0;
    for _ in 0..50 {
        let (_, _, mut got) = read(&swapping.pass(Instant::now(), segment(true, PAYLOAD))[0].1);
        changed += u32::from(got != PAYLOAD);
        let mut all = PAYLOAD.to_vec();
        got.sort_unstable();
        all.sort_unstable();
        assert_eq!(got, all);
        let before = segment(false, PAYLOAD);
        let after = &damaging.pass(Instant::now(), before.clone())[0].1;
        let differing = before.iter().zip(after).filter(|(a, b)| a != b).count();
        assert_eq!(differing, 1);
    }
    assert!(changed > 30, "{changed}");
}

#[test]
fn a_box_rewrites_numbers_and_options_of_syns() {
    let mut impairer = only(Direction {
        shift_seq: 0x20,
        shift_ack: 1,
        strip: 3,
        mss: 536,
        ..Direction::default()
    });
    let syn = with_header(|header| {
        header.syn = true;
        let options = [
            TcpOptionElement::MaximumSegmentSize(1460),
            TcpOptionElement::Noop,
            TcpOptionElement::WindowScale(7),
        ];
        header.set_options(&options).unwrap();
    });
    let got = header(&impairer.pass(Instant::now(), syn)[0].1);
    assert_eq!(got.sequence_number, SEQ.wrapping_add(0x20));
    assert_eq!(got.acknowledgment_number, 0);
    let options: Vec<_> = got.options_iterator().flatten().collect();
    assert_eq!(options[0], TcpOptionElement::MaximumSegmentSize(536));
    assert_eq!(options[1..], vec![TcpOptionElement::Noop; 4]);
    let data = header(&impairer.pass(Instant::now(), segment(false, PAYLOAD))[0].1);
    assert_eq!(data.acknowledgment_number, 6);
}

#[test]
fn acks_are_split_into_parts() {
    let mut impairer = only(Direction {
        ack_split: 3,
        ..Direction::default()
    });
    let mut acks = |number: u32| -> Vec<u32> {
        let frame = with_header(|header| {
            header.ack = true;
            header.acknowledgment_number = number;
        });
        let out = impairer.pass(Instant::now(), frame);
        out.iter()
            .map(|(_, frame)| header(frame).acknowledgment_number)
            .collect()
    };
    assert_eq!(acks(5), [5]);
    assert_eq!(acks(65), [25, 45, 65]);
    assert_eq!(acks(65), [65]);
}

#[test]
fn a_bottleneck_delays_and_then_loses() {
    let mut impairer = only(Direction {
        rate_kbit: 1000,
        queue: 1,
        ..Direction::default()
    });
    let start = Instant::now();
    let out: Vec<_> = (0..100)
        .map(|number| start + number * Duration::from_micros(10))
        .map(|now| impairer.pass(now, segment(false, PAYLOAD)))
        .collect();
    let passed: Vec<_> = out.iter().flatten().map(|(due, _)| *due - start).collect();
    // 64 octets take 0.512 ms, and a frame of 1500 octets 12 ms.
    let each = Duration::from_micros(512);
    let expected: Vec<_> = (1..=passed.len() as u32)
        .map(|number| number * each)
        .collect();
    assert_eq!(passed, expected);
    assert!((20..60).contains(&passed.len()), "{}", passed.len());
    assert!(impairer.counts().lost as usize == 100 - passed.len());
}

#[test]
fn a_cut_segment_is_two_with_the_same_octets() {
    let mut impairer = only(Direction {
        cut: 1.0,
        ..Direction::default()
    });
    let mut places = std::collections::BTreeSet::new();
    for round in 0..500 {
        let out = impairer.pass(Instant::now(), segment(round % 2 == 0, PAYLOAD));
        let [(_, first), (_, second)] = out.as_slice() else {
            panic!("{} frames", out.len())
        };
        let (first, second) = (read(first), read(second));
        assert_eq!(first.0, SEQ);
        assert_eq!(second.0, SEQ.wrapping_add(first.2.len() as u32));
        assert_eq!([first.2.as_slice(), &second.2].concat(), PAYLOAD);
        places.insert(first.2.len());
    }
    assert_eq!(places, (1..PAYLOAD.len()).collect(), "cut at every octet");
    // Nothing to cut.
    assert_eq!(impairer.pass(Instant::now(), segment(false, b"")).len(), 1);
    assert_eq!(impairer.pass(Instant::now(), segment(false, b"a")).len(), 1);
}

#[test]
fn a_corrupted_segment_has_one_other_octet_and_a_right_sum() {
    let mut impairer = only(Direction {
        corrupt: 1.0,
        ..Direction::default()
    });
    for round in 0..100 {
        let out = impairer.pass(Instant::now(), segment(round % 2 == 0, PAYLOAD));
        let (_, _, got) = read(&out[0].1);
        let differing = got.iter().zip(PAYLOAD).filter(|(a, b)| a != b).count();
        assert_eq!((out.len(), got.len(), differing), (1, PAYLOAD.len(), 1));
    }
    assert_eq!(impairer.counts().corrupted, 100);
}

#[test]
fn a_second_copy_comes_later_and_may_differ() {
    let mut impairer = only(Direction {
        duplicate: 1.0,
        duplicate_altered: true,
        late_ms: 2.0,
        delay_ms: 1.0,
        window: 2000,
        ..Direction::default()
    });
    let now = Instant::now();
    let out = impairer.pass(now, segment(false, PAYLOAD));
    let (first, second) = (read(&out[0].1), read(&out[1].1));
    assert_eq!((first.1, second.1), (2000, 2000));
    assert_eq!((first.2.as_slice(), first.0), (PAYLOAD, second.0));
    assert_ne!(second.2, PAYLOAD);
    assert_eq!(out[0].0 - now, Duration::from_millis(1));
    assert_eq!(out[1].0 - now, Duration::from_millis(3));
}

#[test]
fn the_seed_decides() {
    let profile = Profile::find("rough").unwrap();
    let start = Instant::now();
    let run = |seed| {
        let mut impairer = Impairer::new(&profile.left, seed);
        let all: Vec<_> = (0..2000)
            .map(|_| impairer.pass(start, segment(false, PAYLOAD)))
            .collect();
        (all, impairer.counts())
    };
    assert_eq!(run(1), run(1));
    let counts = run(1).1;
    assert_ne!(counts, run(2).1);
    assert!((5..60).contains(&counts.lost), "{counts:?}");
    assert!((200..600).contains(&counts.cut), "{counts:?}");
}

#[test]
fn other_frames_pass_as_they_are() {
    let plan = Direction {
        loss: 1.0,
        ..Direction::default()
    };
    let mut udp = Vec::new();
    PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .udp(1, 2)
        .write(&mut udp, b"x")
        .unwrap();
    let mut cut_off = segment(false, PAYLOAD);
    cut_off.truncate(50);
    for frame in [udp, cut_off, vec![0; 3], Vec::new()] {
        let now = Instant::now();
        let passed = only(plan.clone()).pass(now, frame.clone());
        assert_eq!(passed, [(now, frame)]);
    }
}

#[test]
fn errors_of_a_profile_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("profile.toml");
    for (text, message) in [
        ("[both]\nloss = 2.0\n", "loss = 2: a share is from 0 to 1"),
        ("[both]\nlate_ms = -1.0\n", "late_ms = -1"),
        ("[both]\nlos = 0.1\n", "unknown field `los`"),
        ("[middle]\nloss = 0.1\n", "unknown field `middle`"),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = Profile::find(file.to_str().unwrap()).unwrap_err();
        assert!(format!("{error:#}").contains(message), "{error:#}");
    }
    let error = Profile::find("nonesuch").unwrap_err();
    assert!(
        format!("{error:#}").contains("neither a profile (loss,"),
        "{error:#}"
    );
}

/// Verdicts of cases about the reference peer with the lab between.
fn through(profile: &str, ids: &[&str]) -> Vec<(String, Verdict, String)> {
    let (lab_end, left) = memory_link();
    let (right, target_end) = memory_link();
    let between = Between::start(left, right, &Profile::find(profile).unwrap(), 3);
    let (lab, its) = addresses(false);
    let station = Station::start(lab_end, lab, 20_000);
    let reference = Reference::start(target_end, its, PORT, None);
    let mac = station.station.resolve(its, Duration::from_secs(10));
    let clients = reference.clients(lab);
    let target = Target {
        patience: Duration::from_secs(20),
        ..Target::new(station.station.clone(), its, mac.unwrap(), PORT, clients)
    };
    let cases = built_in().unwrap();
    let instances: Vec<_> = cases
        .iter()
        .filter(|case| ids.contains(&case.id.as_str()))
        .map(|case| Instance {
            case,
            params: case.instances().swap_remove(0),
        })
        .collect();
    assert_eq!(instances.len(), ids.len());
    let ran = run_all(&target, &instances, 1, &AtomicBool::new(false), &|_| {});
    let (from_lab, from_target) = between.end();
    assert!(from_lab.segments > 10 && from_target.segments > 10);
    let verdicts = ran.outcomes.into_iter();
    verdicts
        .map(|outcome| (outcome.name(), outcome.verdict, outcome.reason))
        .collect()
}

#[test]
fn peers_converse_through_everything_that_tcp_repairs() {
    for profile in [
        "loss",
        "reorder",
        "duplicate",
        "delay",
        "cut",
        "window",
        "rough",
    ] {
        for (name, verdict, reason) in through(profile, &["TAG-01", "RD-01"]) {
            assert_eq!(verdict, Verdict::Pass, "{profile}, {name}: {reason}");
        }
    }
}
