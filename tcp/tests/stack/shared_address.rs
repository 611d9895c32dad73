//! A device whose addresses the kernel shares: frames for the kernel are handed over as received, frames
//! for this stack are processed, and frames go to both only if both need them.

use std::net::{IpAddr, SocketAddr};

use siw_net::{FrameInfo, HostShare, Instant, IpCidr, PortSet, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack, StackConfig, StackError};
use siw_tcp_sim::forge::{Ends, Tcp, fragments};
use siw_tcp_sim::{Pattern, VecSink, host_config};

type Host = Stack<VecBuf, Pattern>;

const NOW: Instant = Instant(1_000_000_000);
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const SYN: u8 = 2;
const RST: u8 = 4;

/// Addresses of both stacks, of ours only, of the kernel only; and the peer's.
const SHARED: [&str; 2] = ["10.0.0.1", "fd00::1"];
const OWN: [&str; 2] = ["10.0.0.9", "fd00::9"];
const FOREIGN: [&str; 2] = ["10.0.0.77", "fd00::77"];
const PEER: [&str; 2] = ["10.0.0.2", "fd00::2"];

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn config() -> StackConfig {
    let mut config = host_config(0);
    config.net.addresses.push(IpCidr::new(ip(OWN[0]), 24));
    config.net.addresses.push(IpCidr::new(ip(OWN[1]), 64));
    config.net.host = Some(HostShare {
        addresses: SHARED.map(ip).to_vec(),
        ports: PortSet::new(61_000..=61_099, |port| port.is_multiple_of(2)),
    });
    config
}

/// Result of a frame: the stack's answers, and the frames left for the kernel.
struct Outcome {
    answers: Vec<Vec<u8>>,
    left: Vec<Vec<u8>>,
}

fn give(host: &mut Host, frame: &[u8]) -> Outcome {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    host.receive_burst(NOW, std::iter::once((VecBuf::from(frame.to_vec()), info)));
    let left = host.take_host_frames();
    let left = left.map(|frame| frame.as_slice().to_vec()).collect();
    let mut sink = VecSink::default();
    host.poll(NOW, &mut sink);
    let answers = sink.frames.drain(..).map(|frame| frame.0).collect();
    Outcome { answers, left }
}

fn ends(to: &str) -> Ends {
    let family = usize::from(ip(to).is_ipv6());
    Ends {
        mac: [PEER_MAC, host_config(0).net.mac],
        ip: [ip(PEER[family]), ip(to)],
    }
}

fn syn(to: &str, port: u16) -> Vec<u8> {
    ends(to).tcp(&Tcp {
        ports: [4000, port],
        flags: SYN,
        window: 1000,
        ..Tcp::default()
    })
}

/// Counts TCP segments with this flag among the answers, of either family.
fn segments(outcome: &Outcome, flag: u8) -> usize {
    let has_flag = |frame: &&Vec<u8>| match (&frame[12..14], frame[20], frame[23]) {
        ([8, 0], _, 6) => frame[47] & flag != 0,
        ([0x86, 0xdd], 6, _) => frame[67] & flag != 0,
        _ => false,
    };
    outcome.answers.iter().filter(has_flag).count()
}

fn resets(outcome: &Outcome) -> usize {
    segments(outcome, RST)
}

/// Returns whether the frame went to the kernel only.
fn is_hosts(outcome: &Outcome, frame: &[u8]) -> bool {
    outcome.left == [frame] && outcome.answers.is_empty()
}

#[test]
fn ports_of_a_shared_address_have_one_owner_each() {
    let mut host = Host::new(config(), NOW).unwrap();
    host.listen(None, 7174, 8, 0).unwrap();
    host.listen(Some(ip(OWN[0])), 22, 8, 0).unwrap();
    // The neighbour is known, so that only the answer is sent.
    for family in 0..2 {
        let shared = SHARED[family];
        let known = match family {
            0 => ends(shared).arp(1),
            _ => ends(shared).solicit(),
        };
        give(&mut host, &known);
        let kernels = syn(shared, 22);
        assert!(is_hosts(&give(&mut host, &kernels), &kernels), "{shared}");
        let listened = give(&mut host, &syn(shared, 7174));
        assert_eq!((listened.left.len(), segments(&listened, SYN)), (0, 1));
        let drawn_from = give(&mut host, &syn(shared, 61_002));
        assert_eq!((drawn_from.left.len(), resets(&drawn_from)), (0, 1));
        // In the range, but not reserved for this stack.
        let odd = syn(shared, 61_003);
        assert!(is_hosts(&give(&mut host, &odd), &odd));
        // An address of ours only: the kernel does not answer.
        let refused = give(&mut host, &syn(OWN[family], 23));
        assert_eq!((refused.left.len(), resets(&refused)), (0, 1));
        let foreign = syn(FOREIGN[family], 7174);
        assert!(is_hosts(&give(&mut host, &foreign), &foreign));
    }
    let listened = give(&mut host, &syn(OWN[0], 22));
    assert_eq!((listened.left.len(), resets(&listened)), (0, 0));
    // A connect of ours to a port of the kernel is looped back, and refused.
    let remote = SocketAddr::new(ip(SHARED[0]), 22);
    let id = host.connect(NOW, None, None, remote, 0).unwrap();
    let mut sink = VecSink::default();
    host.poll(NOW, &mut sink);
    let looped = sink.frames.pop_back().unwrap().0;
    let answer = give(&mut host, &looped);
    assert_eq!((answer.left.len(), resets(&answer)), (0, 1));
    host.abort(NOW, id);
    assert_eq!(host.stats().net.host_drops, 0);
}

#[test]
fn echoes_datagrams_and_unknown_frames_are_the_kernels() {
    let mut host = Host::new(config(), NOW).unwrap();
    for family in 0..2 {
        let echo = [[8, 0], [128, 0]][family];
        for to in [SHARED[family], FOREIGN[family]] {
            let end = ends(to);
            let big = end.udp([53, 53], &[7; 3000]);
            let frames = [
                vec![
                    end.icmp(echo, [0, 1, 0, 1], &[5; 40]),
                    end.udp([53, 53], b"query"),
                ],
                fragments(&big, 1400, 9),
            ];
            for frame in frames.concat() {
                assert!(is_hosts(&give(&mut host, &frame), &frame), "{to}");
            }
        }
        let own = ends(OWN[family]);
        for frame in [
            own.icmp(echo, [0, 1, 0, 2], &[5; 40]),
            own.udp([53, 53], b"?"),
        ] {
            let outcome = give(&mut host, &frame);
            assert_eq!((outcome.left.len(), outcome.answers.len()), (0, 1));
        }
    }
    // To a group: LLDP, a DHCP offer, multicast DNS, a router advertisement of no use to us.
    let mut lldp = ends(SHARED[0]).ethernet(0x88cc, &[2; 60]);
    lldp[..6].copy_from_slice(&[1, 0x80, 0xc2, 0, 0, 0xe]);
    let mut offer = Ends {
        mac: [PEER_MAC, [0xff; 6]],
        ip: [ip(PEER[0]), ip("255.255.255.255")],
    }
    .udp([67, 68], &[0; 300]);
    let mut mdns = Ends {
        mac: [PEER_MAC, [1, 0, 0x5e, 0, 0, 0xfb]],
        ip: [ip(PEER[0]), ip("224.0.0.251")],
    }
    .udp([5353, 5353], b"_siwd");
    let mut report = Ends {
        mac: [PEER_MAC, [0x33, 0x33, 0, 0, 0, 0x16]],
        ip: [ip("fe80::2"), ip("ff02::16")],
    }
    .icmp([143, 0], [0; 4], &[]);
    for frame in [&mut lldp, &mut offer, &mut mdns, &mut report] {
        assert!(is_hosts(&give(&mut host, frame), frame));
    }
    // To another station: a promiscuous port must not hand the frame to the kernel.
    let mut other = ends(FOREIGN[0]).udp([1, 2], b"not for this machine");
    other[5] ^= 0x40;
    let outcome = give(&mut host, &other);
    assert!(outcome.left.is_empty() && outcome.answers.is_empty());
}

/// Queries of a router for all groups (RFC 2236 section 2, RFC 2710 section 3).
fn queries() -> [Vec<u8>; 2] {
    let igmp = Ends {
        mac: [PEER_MAC, [1, 0, 0x5e, 0, 0, 1]],
        ip: [ip(PEER[0]), ip("224.0.0.1")],
    }
    .ip(2, &[0x11, 100, 0xee, 0x9b, 0, 0, 0, 0]);
    let mut mld = Ends {
        mac: [PEER_MAC, [0x33, 0x33, 0, 0, 0, 1]],
        ip: [ip("fe80::2"), ip("ff02::1")],
    }
    .icmp([130, 0], [0x27, 0x10, 0, 0], &[0; 16]);
    // The hop limit.
    mld[21] = 1;
    [igmp, mld]
}

#[test]
fn groups_of_queue_pairs_leave_the_kernel_its_own() {
    let mut host = Host::new(config(), NOW).unwrap();
    let to_group = |group: &str, ports: [u16; 2]| {
        let family = usize::from(ip(group).is_ipv6());
        let mac = [[1, 0, 0x5e, 1, 2, 3], [0x33, 0x33, 0, 7, 0, 8]][family];
        Ends {
            mac: [PEER_MAC, mac],
            ip: [ip(PEER[family]), ip(group)],
        }
        .udp(ports, &[9; 40])
    };
    for query in queries() {
        assert!(is_hosts(&give(&mut host, &query), &query));
    }
    for (group, query) in ["239.1.2.3", "ff15::7:8"].into_iter().zip(queries()) {
        let datagram = to_group(group, [5000, 4791]);
        assert!(is_hosts(&give(&mut host, &datagram), &datagram), "{group}");
        host.join_group(NOW, ip(group), true);
        let taken = give(&mut host, &datagram);
        assert_eq!(taken.left.len(), 0, "{group}");
        assert!(host.next_roce_datagram().is_some(), "{group}");
        let others = to_group(group, [5000, 5001]);
        assert!(is_hosts(&give(&mut host, &others), &others), "{group}");
        // Both stacks have groups to report.
        let asked = give(&mut host, &query);
        assert_eq!(
            (asked.left, asked.answers.len()),
            (vec![query], 1),
            "{group}"
        );
        host.leave_group(ip(group), true);
        let datagram = to_group(group, [5000, 4791]);
        assert_eq!(give(&mut host, &datagram).left, [datagram], "{group}");
    }
}

#[test]
fn neighbours_and_errors_concern_both() {
    let mut host = Host::new(config(), NOW).unwrap();
    let mut question = ends(SHARED[0]).arp(1);
    question[..6].fill(0xff);
    let both = give(&mut host, &question);
    assert_eq!((both.left, both.answers.len()), (vec![question], 1));
    let solicitation = ends(SHARED[1]).solicit();
    let both = give(&mut host, &solicitation);
    assert_eq!((both.left, both.answers.len()), (vec![solicitation], 1));
    // An error about a connect of ours ends it; the kernel gets it too, without a matching connection.
    let remote = SocketAddr::new(ip("10.0.0.200"), 7);
    let id = host.connect(NOW, None, None, remote, 5).unwrap();
    let mut to_remote = ends(SHARED[0]);
    to_remote.ip[0] = remote.ip();
    host.receive_burst(
        NOW,
        std::iter::once((
            VecBuf::from(to_remote.arp(1)),
            FrameInfo {
                checksum: RxChecksum::Unknown,
                rss_hash: 0,
            },
        )),
    );
    host.take_host_frames().for_each(drop);
    let mut sink = VecSink::default();
    host.poll(NOW, &mut sink);
    let sent = sink.frames.iter().map(|frame| &frame.0);
    let mut sent = sent.filter(|frame| frame[12..14] == [8, 0]);
    let sent = sent.next_back().unwrap();
    let unreachable = ends(SHARED[0]).icmp([3, 3], [0; 4], &sent[14..14 + 28]);
    let outcome = give(&mut host, &unreachable);
    assert_eq!(outcome.left, [unreachable]);
    let (found, user, events) = host.next_event().unwrap();
    assert_eq!((found, user), (id, 5));
    assert!(events.contains(Events::UNREACHABLE));
}

#[test]
fn connects_from_a_shared_address_draw_claimed_ports() {
    let mut host = Host::new(config(), NOW).unwrap();
    let remote = SocketAddr::new(ip(PEER[0]), 7174);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..40 {
        let id = host.connect(NOW, None, None, remote, 0).unwrap();
        let local = host.tcp_info(id).unwrap().local;
        assert_eq!(local.ip(), ip(SHARED[0]));
        assert!(local.port().is_multiple_of(2) && (61_000..61_100).contains(&local.port()));
        assert!(seen.insert(local.port()), "{local} twice");
    }
    while let Ok(id) = host.connect(NOW, None, None, remote, 0) {
        assert!(seen.insert(host.tcp_info(id).unwrap().local.port()));
    }
    assert!(seen.len() > 40 && seen.len() <= 50);
    let refused = host.connect(NOW, None, None, remote, 0).unwrap_err();
    assert_eq!(refused, StackError::NoPorts);
    // An address of ours only has all ports.
    for _ in 0..60 {
        host.connect(NOW, Some(ip(OWN[0])), None, remote, 0)
            .unwrap();
    }
}

#[test]
fn a_burst_for_the_kernel_is_bounded_and_copies_go_nowhere() {
    let mut host = Host::new(config(), NOW).unwrap();
    let frame = ends(SHARED[0]).udp([1, 2], b"flood");
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let burst = || (0..100).map(|_| (VecBuf::from(frame.clone()), info));
    host.receive_burst(NOW, burst());
    assert_eq!(host.take_host_frames().count(), 64);
    assert!(!host.has_host_frames());
    let stats = host.stats();
    assert_eq!((stats.net.host_frames, stats.net.host_drops), (64, 36));
    // Copies from another worker are not handed over: that worker does it.
    let frames = [
        ends(SHARED[0]).arp(1),
        ends(SHARED[0]).icmp([3, 1], [0; 4], &[0; 28]),
    ];
    for frame in frames {
        host.receive_copy(NOW, VecBuf::from(frame), RxChecksum::Unknown);
    }
    assert!(!host.has_host_frames());
    // A device that is not shared hands over nothing.
    let mut alone = Host::new(host_config(0), NOW).unwrap();
    for frame in [syn(SHARED[0], 22), frame, ends(FOREIGN[0]).udp([1, 2], b"")] {
        assert!(give(&mut alone, &frame).left.is_empty());
    }
}

#[test]
fn frames_of_the_devices_vlan_keep_their_tag() {
    let mut tagged = config();
    tagged.net.vlan = Some(7);
    let mut host = Host::new(tagged, NOW).unwrap();
    let untagged = ends(SHARED[0]).udp([1, 2], b"in the VLAN");
    let tag = |vlan: u8| [&untagged[..12], &[0x81, 0, 0, vlan], &untagged[12..]].concat();
    let frame = tag(7);
    assert!(is_hosts(&give(&mut host, &frame), &frame));
    for other in [tag(8), untagged.clone()] {
        assert!(give(&mut host, &other).left.is_empty());
    }
}

#[test]
fn an_address_that_the_device_lacks_cannot_be_shared() {
    let mut wrong = config();
    wrong.net.host = Some(HostShare {
        addresses: vec![ip(FOREIGN[0])],
        ports: PortSet::none(),
    });
    let error = Host::new(wrong, NOW).err().unwrap();
    assert!(error.to_string().contains(FOREIGN[0]), "{error}");
}
