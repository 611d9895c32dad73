//! Addresses that are invalid for a peer, and ICMP errors.

use super::*;

/// Found in xarxa 013, 066. Broadcast and multicast.
#[test]
fn segments_to_group_addresses_are_ignored() {
    let mut lab = Lab::new();
    lab.connect();
    let mut syn = lab.forge(0);
    (syn.flags, syn.sport) = (SYN, 4000);
    for dst in [[255, 255, 255, 255], [10, 0, 0, 255], [224, 0, 0, 1]] {
        for dport in [80, 81] {
            syn.dport = dport;
            let mut frame = syn.frame();
            frame[30..34].copy_from_slice(&dst);
            let mac = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0];
            for broadcast in [false, true] {
                let mut frame = frame.clone();
                if broadcast {
                    frame[..6].copy_from_slice(&mac[..6]);
                }
                let (from, now) = (seen(&lab), lab.net.now);
                let info = FrameInfo {
                    checksum: RxChecksum::Good,
                    rss_hash: 0,
                };
                lab.net.hosts[1].receive_burst(now, std::iter::once((frame.into(), info)));
                lab.net.poll();
                assert!(since(&lab, 1, from).is_empty());
            }
        }
    }
    assert_eq!(lab.net.hosts[1].connection_count(), 1);
}

/// Found in xarxa 031, 067.
#[test]
fn source_quench_and_unquoted_errors_end_nothing() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    // SYN-ACKs are lost: the connect stays in SYN-SENT throughout.
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    lab.lose(|from, frame| from == 1 && frame[12..14] == [8, 0]);
    let client = lab.net.hosts[0]
        .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(2);
    let syn = lab.last(0);
    assert_eq!(syn.flags & SYN, SYN);
    let mut foreign = syn.clone();
    foreign.seq = foreign.seq.wrapping_add(1);
    for frame in [icmp_error(&syn, [4, 0], 0), icmp_error(&foreign, [3, 3], 0)] {
        lab.net.inject(1, frame);
        lab.run_ms(1);
        assert_eq!(state(&lab, 0, client), TcpState::SynSent);
    }
}

/// Found in xarxa 064, 314.
#[test]
fn loopback_and_invalid_sources_are_martians() {
    let mut lab = Lab::new();
    lab.connect();
    let mut syn = lab.forge(0);
    (syn.flags, syn.sport, syn.options) = (SYN, 4000, vec![]);
    let before = lab.net.hosts[1].stats().net.martians;
    let sources = [
        [127, 0, 0, 1],
        [0, 0, 0, 7],
        [224, 1, 2, 3],
        [255, 255, 255, 255],
    ];
    for src in sources {
        let mut frame = syn.frame();
        frame[26..30].copy_from_slice(&src);
        let (from, now) = (seen(&lab), lab.net.now);
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        lab.net.hosts[1].receive_burst(now, std::iter::once((frame.into(), info)));
        lab.net.poll();
        assert!(since(&lab, 1, from).is_empty(), "{src:?}");
    }
    assert_eq!(lab.net.hosts[1].stats().net.martians - before, 4);
    assert_eq!(lab.net.hosts[1].connection_count(), 1);
}

/// Found in xarxa 094, 095.
#[test]
fn connect_refuses_groups_and_the_other_family() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    for to in [
        "255.255.255.255:80",
        "224.0.0.1:80",
        "0.0.0.0:80",
        "[ff02::1]:80",
        "[::]:80",
        "10.0.0.2:0",
    ] {
        let result = lab.net.hosts[0].connect(now, None, None, to.parse().unwrap(), 0);
        assert!(result.is_err(), "{to}");
    }
    let own6 = Some("fd00::1".parse().unwrap());
    let result = lab.net.hosts[0].connect(now, own6, None, "10.0.0.2:80".parse().unwrap(), 0);
    assert!(result.is_err());
    assert_eq!(lab.net.hosts[0].connection_count(), 0);
}
