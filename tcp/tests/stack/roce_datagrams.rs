//! Datagrams of RoCEv2 between two stacks, and wrong ones.

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
