//! Datagrams of RoCEv2 between two stacks, and wrong ones.

use std::time::Duration;

use siw_net::{DatagramError, DatagramPath, FrameInfo, Instant, QuotaOwner, RxChecksum, VecBuf};
use siw_tcp::{Stack, StackConfig};
use siw_tcp_sim::{Pattern, VecSink, host_config};

type TestStack = Stack<VecBuf, Pattern>;

const NOW: Instant = Instant::from_millis(1);
const OWNER: QuotaOwner = QuotaOwner { client: 1, user: 0 };
const PORT: u16 = 4791;

fn new_stack(host: usize, change: impl Fn(&mut StackConfig)) -> TestStack {
    let mut config = host_config(host);
    change(&mut config);
    Stack::new(config, NOW).unwrap()
}

fn path(from: &str, to: &str) -> DatagramPath {
    DatagramPath {
        from: from.parse().unwrap(),
        to: to.parse().unwrap(),
        hop_limit: 7,
        traffic_class: 0x2a,
        flow_label: 0x12345,
        source_port: 0xc001,
    }
}

/// The frame of a datagram from host 0 to its permanent neighbour.
fn send(stack: &mut TestStack, path: &DatagramPath, payload: &[u8]) -> Vec<u8> {
    stack.learn_neighbour(NOW, path.to, Some([2, 0, 0, 0, 0, 2]), true);
    let headers = stack.roce_headers(NOW, OWNER, path, payload.len()).unwrap();
    let mut sink = VecSink::default();
    assert!(stack.send_roce(&headers, payload, &mut sink));
    sink.frames.pop_front().unwrap().0
}

fn receive(stack: &mut TestStack, frame: &[u8]) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    stack.receive_burst(NOW, [(VecBuf::from(frame.to_vec()), info)].into_iter());
}

#[test]
fn a_datagram_arrives_as_it_was_sent_and_can_be_handed_on_whole() {
    for vlan in [None, Some(5)] {
        for (from, to, ip_len) in [("10.0.0.1", "10.0.0.2", 20), ("fd00::1", "fd00::2", 40)] {
            let tag = |config: &mut StackConfig| config.net.vlan = vlan;
            let (mut a, mut b) = (new_stack(0, tag), new_stack(1, tag));
            let frame = send(&mut a, &path(from, to), b"datagram");
            receive(&mut b, &frame);
            let datagram = b.next_roce_datagram().unwrap();
            assert_eq!(datagram.ip_len, ip_len);
            let packet = datagram.packet.as_slice();
            assert_eq!(&packet[ip_len + 8..], b"datagram");
            let word = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
            assert_eq!((word(ip_len), word(ip_len + 2)), (0xc001, PORT));
            let (class, limit) = match ip_len {
                20 => (packet[1], packet[8]),
                _ => ((word(0) >> 4) as u8, packet[7]),
            };
            assert_eq!((class, limit), (0x2a, 7));
            assert_eq!(datagram.into_frame().unwrap().as_slice(), frame);
            assert!(!b.has_roce_datagrams());
            assert_eq!(b.stats().net.unknown_protocols, 0);
        }
    }
}

#[test]
fn a_datagram_to_an_own_address_is_looped_back() {
    let mut stack = new_stack(0, |_| {});
    let path = path("10.0.0.1", "10.0.0.1");
    let headers = stack.roce_headers(NOW, OWNER, &path, 4).unwrap();
    let mut sink = VecSink::default();
    assert!(stack.send_roce(&headers, b"self", &mut sink));
    let (frame, meta) = sink.frames.pop_front().unwrap();
    assert!(meta.self_addressed);
    receive(&mut stack, &frame);
    assert!(stack.has_roce_datagrams());
}

#[test]
fn what_cannot_be_sent_is_refused_with_its_reason() {
    let mut stack = new_stack(0, |_| {});
    let mut refusal = |to: &str, len| {
        let path = path("10.0.0.1", to);
        stack.roce_headers(NOW, OWNER, &path, len).err()
    };
    assert_eq!(refusal("10.0.0.2", 64), Some(DatagramError::Unresolved));
    assert_eq!(refusal("10.9.0.2", 64), Some(DatagramError::NoRoute));
    assert_eq!(refusal("fd00::1", 64), Some(DatagramError::NoRoute));
    assert_eq!(refusal("10.0.0.1", 1473), Some(DatagramError::TooLong));
    assert_eq!(refusal("10.0.0.1", 1472), None);
}

#[test]
fn wrong_and_foreign_datagrams_are_counted_and_dropped() {
    let (mut a, mut b) = (new_stack(0, |_| {}), new_stack(1, |_| {}));
    let frame = send(&mut a, &path("10.0.0.1", "10.0.0.2"), b"datagram");
    // UDP's length: longer than the packet, and shorter than the header.
    for len in [17, 7] {
        let mut wrong = frame.clone();
        wrong[14 + 20 + 5] = len;
        receive(&mut b, &wrong);
    }
    assert_eq!(b.stats().net.in_errs, 2);
    let spoofed = send(&mut a, &path("10.0.0.2", "10.0.0.2"), b"");
    receive(&mut b, &spoofed);
    let foreign = send(&mut a, &path("10.0.0.1", "10.0.0.9"), b"");
    receive(&mut b, &foreign);
    assert_eq!(b.stats().net.martians, 2);
    for len in 0..frame.len() {
        receive(&mut b, &frame[..len]);
    }
    assert!(!b.has_roce_datagrams());
    // Nobody takes them: the list is bounded.
    for _ in 0..2000 {
        receive(&mut b, &frame);
    }
    assert!(b.stats().net.control_drops >= 900);
    assert_eq!(b.owner_of_datagrams(7), None, "there is one worker");
}

/// Frames that the stack sends by itself.
fn said(stack: &mut TestStack) -> Vec<Vec<u8>> {
    let mut sink = VecSink::default();
    stack.poll(NOW, &mut sink);
    sink.frames.drain(..).map(|(frame, _)| frame).collect()
}

/// One's complement sum, which is all ones over data with its checksum.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn datagrams_to_a_group_arrive_while_the_stack_is_in_it() {
    for (from, group, mac) in [
        ("10.0.0.1", "239.129.2.3", [1, 0, 0x5e, 1, 2, 3]),
        ("fd00::1", "ff15::7:8", [0x33, 0x33, 0, 7, 0, 8]),
    ] {
        let (mut a, mut b) = (new_stack(0, |_| {}), new_stack(1, |_| {}));
        let path = path(from, group);
        let headers = a.roce_headers(NOW, OWNER, &path, 5).unwrap();
        assert_eq!(headers.group(), Some(path.to));
        let mut sink = VecSink::default();
        assert!(a.send_roce(&headers, b"group", &mut sink));
        let (frame, meta) = sink.frames.pop_front().unwrap();
        assert!(frame[..6] == mac && !meta.self_addressed);
        receive(&mut b, &frame);
        assert!(!b.has_roce_datagrams());
        b.join_group(NOW, path.to, true);
        receive(&mut b, &frame);
        let datagram = b.next_roce_datagram().unwrap();
        assert_eq!((datagram.group, datagram.is_copy), (Some(path.to), false));
        b.leave_group(path.to, true);
        receive(&mut b, &frame);
        assert!(!b.has_roce_datagrams());
        // The local copy, which is not a LAND attack.
        a.join_group(NOW, path.to, false);
        assert!(a.send_roce(&headers.into_local_copy(), b"group", &mut sink));
        let (frame, meta) = sink.frames.pop_front().unwrap();
        assert!(meta.self_addressed);
        receive(&mut a, &frame);
        assert!(a.has_roce_datagrams());
    }
}

#[test]
fn memberships_are_reported_by_igmp_and_queries_answered() {
    let mut stack = new_stack(0, |_| {});
    said(&mut stack);
    let group = [239, 1, 2, 3];
    stack.join_group(NOW, group.into(), true);
    let report = said(&mut stack).pop().unwrap();
    assert_eq!(report[..6], [1, 0, 0x5e, 1, 2, 3]);
    let (ip, message) = report[14..].split_at(24);
    assert_eq!(
        (ip[0], ip[8], ip[9]),
        (0x46, 1, 2),
        "router alert, TTL 1, IGMP"
    );
    assert_eq!(ip[16..], [239, 1, 2, 3, 0x94, 4, 0, 0]);
    assert_eq!((sum(ip), sum(message)), (0xffff, 0xffff));
    assert_eq!((message[0], &message[4..]), (0x16, &group[..]));

    // A general query and one for the group, as a router sends them; wrong ones.
    let query = |group: [u8; 4], kind: u8| {
        let mut frame = vec![1, 0, 0x5e, 0, 0, 1, 2, 9, 9, 9, 9, 9, 8, 0];
        let mut ip = vec![
            0x46, 0xc0, 0, 32, 0, 0, 0, 0, 1, 2, 0, 0, 10, 0, 0, 9, 224, 0, 0, 1,
        ];
        ip.extend([0x94, 4, 0, 0]);
        let value = !sum(&ip);
        ip[10..12].copy_from_slice(&value.to_be_bytes());
        let mut message = vec![kind, 100, 0, 0];
        message.extend(group);
        let value = !sum(&message);
        message[2..4].copy_from_slice(&value.to_be_bytes());
        frame.extend([ip, message].concat());
        frame
    };
    receive(&mut stack, &query([0; 4], 0x11));
    assert_eq!(said(&mut stack), std::slice::from_ref(&report));
    // Not again at once.
    receive(&mut stack, &query(group, 0x11));
    assert!(said(&mut stack).is_empty());
    let later = Instant::from_millis(1000);
    let give = |stack: &mut TestStack, frame: &[u8]| {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        stack.receive_burst(later, [(VecBuf::from(frame.to_vec()), info)].into_iter());
        said(stack)
    };
    let mut wrong = query(group, 0x11);
    *wrong.last_mut().unwrap() ^= 1;
    for frame in [wrong, query([239, 9, 9, 9], 0x11), query(group, 0x16)] {
        assert!(give(&mut stack, &frame).is_empty());
    }
    stack.leave_group(group.into(), true);
    let leave = said(&mut stack).pop().unwrap();
    assert_eq!(
        (leave[14 + 19], leave[14 + 24]),
        (2, 0x17),
        "to all routers"
    );
    assert!(give(&mut stack, &query([0; 4], 0x11)).is_empty());
}

/// RFC 2236 section 3, RFC 2710 section 4.
#[test]
fn reports_of_memberships_are_repeated_once_within_ten_seconds() {
    for group in ["239.1.2.3", "ff15::7:8"] {
        let group = group.parse().unwrap();
        let mut stack = new_stack(0, |_| {});
        said(&mut stack);
        let mut count_after_join = |leaves: bool| {
            stack.join_group(NOW, group, true);
            let report = said(&mut stack).pop().unwrap();
            if leaves {
                stack.leave_group(group, true);
                said(&mut stack);
            }
            let times = (1..=1100).map(|turn| NOW + Duration::from_millis(10 * turn));
            let reports = times.flat_map(|now| {
                let mut sink = VecSink::default();
                stack.poll(now, &mut sink);
                sink.frames
                    .into_iter()
                    .filter(|(frame, _)| *frame == report)
            });
            reports.count()
        };
        assert_eq!(count_after_join(true), 0, "after it was left");
        assert_eq!(count_after_join(false), 1);
    }
}

#[test]
fn memberships_are_reported_by_mld_and_queries_answered() {
    let mut stack = new_stack(0, |_| {});
    said(&mut stack);
    let group: std::net::Ipv6Addr = "ff15::7:8".parse().unwrap();
    stack.join_group(NOW, group.into(), true);
    let report = said(&mut stack).pop().unwrap();
    assert_eq!(report[..6], [0x33, 0x33, 0, 7, 0, 8]);
    let ip = &report[14..54];
    assert_eq!((ip[6], ip[7]), (0, 1), "hop-by-hop options, hop limit 1");
    assert_eq!(ip[24..40], group.octets());
    assert_eq!(report[54..62], [58, 0, 5, 2, 0, 0, 1, 0]);
    let message = &report[62..];
    assert_eq!((message[0], message.len()), (131, 24));
    assert_eq!(message[8..], group.octets());
    let pseudo = [&ip[8..40], &[0, 0, 0, 24, 0, 0, 0, 58]].concat();
    assert_eq!(sum(&[&pseudo[..], message].concat()), 0xffff);

    let router: std::net::Ipv6Addr = "fe80::9".parse().unwrap();
    let all_nodes: std::net::Ipv6Addr = "ff02::1".parse().unwrap();
    let query = |hop_limit: u8| {
        let mut frame = vec![0x33, 0x33, 0, 0, 0, 1, 2, 9, 9, 9, 9, 9, 0x86, 0xdd];
        frame.extend([0x60, 0, 0, 0, 0, 32, 0, hop_limit]);
        frame.extend([router.octets(), all_nodes.octets()].concat());
        frame.extend([58, 0, 5, 2, 0, 0, 1, 0]);
        let mut message = vec![130, 0, 0, 0, 0x27, 0x10, 0, 0];
        message.extend([0; 16]);
        let pseudo = [&frame[22..54], &[0, 0, 0, 24, 0, 0, 0, 58]].concat();
        let value = !sum(&[&pseudo[..], &message].concat());
        message[2..4].copy_from_slice(&value.to_be_bytes());
        frame.extend(message);
        frame
    };
    receive(&mut stack, &query(64));
    assert!(said(&mut stack).is_empty(), "not from the link");
    receive(&mut stack, &query(1));
    assert_eq!(said(&mut stack), [report]);
    stack.leave_group(group.into(), true);
    let done = said(&mut stack).pop().unwrap();
    assert_eq!((done[62], done[53]), (132, 2), "to all routers");
}
