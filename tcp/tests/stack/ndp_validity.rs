//! The checks of received neighbour solicitations and advertisements, line by line (RFC 4861 sections
//! 7.1.1 and 7.1.2).

use std::cell::RefCell;
use std::net::Ipv6Addr;
use std::rc::Rc;

use crate::common::wire::{Lab, sum};
use siw_net::{FrameInfo, RxChecksum};
use siw_tcp_sim::forge::{Ends, behind, fragments};

const OURS: &str = "fd00::2";
const PEER: &str = "fd00::1";
const OUR_GROUP: &str = "ff02::1:ff00:2";
const ALL_NODES: &str = "ff02::1";
const MOVED: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
/// Options with the sender's and the target's Ethernet address (section 4.6.1).
const SOURCE: [u8; 8] = [1, 1, 2, 0, 0, 0, 0, 0x99];
const TARGET: [u8; 8] = [2, 1, 2, 0, 0, 0, 0, 0x99];
/// An option of a type that is not known, whose second unit has zeros (section 4.6).
const UNKNOWN: [u8; 16] = [77, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

fn ends(from: &str, to: &str) -> Ends {
    Ends {
        mac: [MOVED, [2, 0, 0, 0, 0, 2]],
        ip: [from, to].map(|address| address.parse().unwrap()),
    }
}

fn solicitation(from: &str, to: &str, target: &str, options: &[u8]) -> Vec<u8> {
    let target: Ipv6Addr = target.parse().unwrap();
    ends(from, to).solicitation(target, options)
}

fn advertisement(to: &str, flags: u8, target: &str, options: &[u8]) -> Vec<u8> {
    let target: Ipv6Addr = target.parse().unwrap();
    ends(PEER, to).advertisement(flags, target, options)
}

/// Changes a valid message, and corrects its checksum.
fn with(mut frame: Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    change(&mut frame);
    let len = (frame.len() - 54) as u16;
    frame[18..20].copy_from_slice(&len.to_be_bytes());
    frame[56..58].fill(0);
    let words = frame[22..54].chunks(2);
    let addresses: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let checksum = sum(&frame[54..], addresses + u32::from(len) + 58);
    frame[56..58].copy_from_slice(&checksum);
    frame
}

/// Gives host 1 the frames; returns what it sends.
fn answers(lab: &mut Lab, frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    let frames = frames.into_iter().map(|frame| (frame.into(), info));
    lab.net.hosts[1].receive_burst(now, frames);
    lab.net.hosts[1].poll(now, &mut lab.net.sinks[1]);
    let sent = lab.net.sinks[1].frames.drain(..);
    sent.map(|(frame, _)| frame).collect()
}

/// Returns whether host 1 answers a solicitation in these frames.
fn is_answered(frames: Vec<Vec<u8>>) -> bool {
    let mut lab = Lab::new();
    let answers = answers(&mut lab, frames);
    assert!(
        answers.iter().all(|answer| answer[54] == 136),
        "{answers:?}"
    );
    !answers.is_empty()
}

/// Returns whether host 1 believes an advertisement in these frames: its data for the peer goes to
/// `MOVED`.
fn is_believed(frames: Vec<Vec<u8>>) -> bool {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let to = format!("[{OURS}]:80").parse().unwrap();
    lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(10);
    let server = lab.events[1].last().unwrap().0;
    let answers = answers(&mut lab, frames);
    assert!(answers.is_empty(), "{answers:?}");
    let data_to = Rc::new(RefCell::new(Vec::new()));
    let seen = data_to.clone();
    lab.lose(move |from, frame| {
        if from == 1 && frame[20] == 6 {
            seen.borrow_mut().extend_from_slice(&frame[..6]);
        }
        false
    });
    lab.send(1, server, b"data");
    lab.run_ms(1);
    data_to.borrow()[..6] == MOVED
}

#[test]
fn solicitations_are_validated_rfc_4861_section_7_1_1() {
    let valid = || solicitation(PEER, OURS, OURS, &SOURCE);
    let detection = || solicitation("::", OUR_GROUP, OURS, &[]);
    let mut bad_checksum = valid();
    bad_checksum[56] ^= 1;
    let rows = [
        ("valid, to a unicast address", valid(), true),
        (
            "valid, to the group",
            solicitation(PEER, OUR_GROUP, OURS, &SOURCE),
            true,
        ),
        ("valid, from the unspecified address", detection(), true),
        ("hop limit", with(valid(), |frame| frame[21] = 254), false),
        ("checksum", bad_checksum, false),
        ("code", with(valid(), |frame| frame[55] = 1), false),
        (
            "length",
            with(solicitation(PEER, OURS, OURS, &[]), |frame| {
                frame.truncate(77)
            }),
            false,
        ),
        (
            "length without target",
            with(valid(), |frame| frame.truncate(62)),
            false,
        ),
        (
            "multicast target",
            solicitation(PEER, OURS, OUR_GROUP, &SOURCE),
            false,
        ),
        (
            "option without length",
            with(valid(), |frame| frame[79] = 0),
            false,
        ),
        (
            "later option without length",
            solicitation(
                PEER,
                OURS,
                OURS,
                &[SOURCE, [77, 0, 0, 0, 0, 0, 0, 0]].concat(),
            ),
            false,
        ),
        (
            "option beyond the end",
            with(valid(), |frame| frame[79] = 2),
            false,
        ),
        (
            "from the unspecified address to a unicast address",
            solicitation("::", OURS, OURS, &[]),
            false,
        ),
        (
            "from the unspecified address to all nodes",
            solicitation("::", ALL_NODES, OURS, &[]),
            false,
        ),
        (
            "from the unspecified address with a source link-layer address",
            solicitation("::", OUR_GROUP, OURS, &SOURCE),
            false,
        ),
        (
            "from the unspecified address with it behind another option",
            solicitation("::", OUR_GROUP, OURS, &[&UNKNOWN[..], &SOURCE].concat()),
            false,
        ),
        // The contents of reserved fields and of unknown options are ignored.
        (
            "reserved field",
            with(valid(), |frame| frame[58..62].fill(0xff)),
            true,
        ),
        (
            "unknown option",
            solicitation(PEER, OURS, OURS, &[&UNKNOWN[..], &SOURCE].concat()),
            true,
        ),
        (
            "unknown option from the unspecified address",
            solicitation("::", OUR_GROUP, OURS, &UNKNOWN),
            true,
        ),
    ];
    for (what, frame, is_valid) in rows {
        assert_eq!(is_answered(vec![frame]), is_valid, "{what}");
    }
}

#[test]
fn advertisements_are_validated_rfc_4861_section_7_1_2() {
    let valid = || advertisement(OURS, OVERRIDE, PEER, &TARGET);
    let mut bad_checksum = valid();
    bad_checksum[56] ^= 1;
    let rows = [
        ("valid", valid(), true),
        (
            "valid, solicited",
            advertisement(OURS, OVERRIDE | SOLICITED, PEER, &TARGET),
            true,
        ),
        (
            "valid, to all nodes",
            advertisement(ALL_NODES, OVERRIDE, PEER, &TARGET),
            true,
        ),
        ("hop limit", with(valid(), |frame| frame[21] = 254), false),
        ("checksum", bad_checksum, false),
        ("code", with(valid(), |frame| frame[55] = 1), false),
        ("length", with(valid(), |frame| frame.truncate(77)), false),
        (
            "multicast target",
            advertisement(OURS, OVERRIDE, ALL_NODES, &TARGET),
            false,
        ),
        (
            "solicited, to a multicast address",
            advertisement(ALL_NODES, OVERRIDE | SOLICITED, PEER, &TARGET),
            false,
        ),
        (
            "option without length",
            with(valid(), |frame| frame[79] = 0),
            false,
        ),
        (
            "later option without length",
            advertisement(
                OURS,
                OVERRIDE,
                PEER,
                &[TARGET, [77, 0, 0, 0, 0, 0, 0, 0]].concat(),
            ),
            false,
        ),
        (
            "reserved field",
            with(valid(), |frame| frame[59..62].fill(0xff)),
            true,
        ),
        (
            "unknown option",
            advertisement(OURS, OVERRIDE, PEER, &[&UNKNOWN[..], &TARGET].concat()),
            true,
        ),
    ];
    for (what, frame, is_valid) in rows {
        assert_eq!(is_believed(vec![frame]), is_valid, "{what}");
    }
}

#[test]
fn neighbour_discovery_in_fragments_is_ignored_rfc_6980_section_5() {
    let parts = |frame: &[u8]| fragments(frame, 16, 7);
    assert!(!is_answered(parts(&solicitation(
        PEER, OURS, OURS, &SOURCE
    ))));
    assert!(!is_believed(parts(&advertisement(
        OURS, OVERRIDE, PEER, &TARGET
    ))));
    // An atomic fragment has the header, too.
    let header: (u8, &[u8]) = (44, &[0, 0, 0, 0, 0, 0, 0, 9]);
    let atomic = behind(&solicitation(PEER, OURS, OURS, &SOURCE), &[header]);
    assert!(!is_answered(vec![atomic]));
}
