//! Connections that wait for neighbour resolution.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::common::wire::Lab;
use siw_net::{ConnId, FrameInfo, Instant, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack};
use siw_tcp_sim::forge::Ends;
use siw_tcp_sim::{Pattern, VecSink, host_config};

type Host = Stack<VecBuf, Pattern>;

/// The Ethernet address of host 0, and the one that it moves to.
const OLD: [u8; 6] = [2, 0, 0, 0, 0, 1];
const MOVED: [u8; 6] = [2, 0, 0, 0, 0, 0x99];
const IPV6: [u8; 2] = [0x86, 0xdd];

/// Endpoints of a frame from `MOVED` to host 1.
fn from_moved(from: &str, to: &str) -> Ends {
    Ends {
        mac: [MOVED, [2, 0, 0, 0, 0, 2]],
        ip: [from, to].map(|address| address.parse().unwrap()),
    }
}

/// Opens a connection over IPv6 and returns the one of host 1.
fn connect_v6(lab: &mut Lab) -> ConnId {
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 8, 0).unwrap();
    let to = "[fd00::2]:80".parse().unwrap();
    lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(10);
    lab.events[1].last().unwrap().0
}

/// ARP of host 0's address at `MOVED` for `target`, with this operation.
fn arp_of_moved(operation: u8, target: [u8; 4]) -> Vec<u8> {
    let mut frame = [0xff; 6].to_vec();
    frame.extend(MOVED);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend(MOVED);
    frame.extend([10, 0, 0, 1]);
    frame.extend(MOVED);
    frame.extend(target);
    frame
}

/// Ethernet destinations and EtherTypes.
type Destinations = Rc<RefCell<Vec<([u8; 6], [u8; 2])>>>;

/// Destinations of the frames that host 1 sends from now on.
fn destinations(lab: &mut Lab) -> Destinations {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let record = seen.clone();
    lab.lose(move |from, frame| {
        if from == 1 {
            let to = frame[..6].try_into().unwrap();
            record.borrow_mut().push((to, [frame[12], frame[13]]));
        }
        false
    });
    seen
}

fn give(lab: &mut Lab, frame: Vec<u8>) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, std::iter::once((frame.into(), info)));
}

/// Linux updates an existing entry at once (arp_process): VRRP, live migration, bonding.
#[test]
fn a_gratuitous_arp_moves_a_neighbour_at_once() {
    for operation in [1, 2] {
        let mut lab = Lab::new();
        let [_, b] = lab.connect();
        let seen = destinations(&mut lab);
        give(&mut lab, arp_of_moved(operation, [10, 0, 0, 1]));
        lab.send(1, b, b"after the move");
        lab.run_ms(1);
        assert!(seen.borrow().contains(&(MOVED, [8, 0])), "{seen:?}");
    }
}

#[test]
fn arp_for_others_moves_a_neighbour() {
    let mut lab = Lab::new();
    let [_, b] = lab.connect();
    lab.run_ms(2000);
    let seen = destinations(&mut lab);
    give(&mut lab, arp_of_moved(1, [10, 0, 0, 77]));
    lab.send(1, b, b"after the move");
    lab.run_ms(1);
    assert!(seen.borrow().contains(&(MOVED, [8, 0])), "{seen:?}");
}

/// RFC 4861 section 7.2.5: the override flag decides.
#[test]
fn an_unsolicited_advertisement_moves_a_neighbour_at_once() {
    for (flags, moves) in [(0x20, true), (0, false)] {
        let mut lab = Lab::new();
        let b = connect_v6(&mut lab);
        let seen = destinations(&mut lab);
        let mut ends = from_moved("fd00::1", "ff02::1");
        ends.mac[1] = [0x33, 0x33, 0, 0, 0, 1];
        give(&mut lab, ends.announce(flags));
        lab.send(1, b, b"after the move");
        lab.run_ms(1);
        let moved = seen.borrow().contains(&(MOVED, IPV6));
        assert_eq!(moved, moves, "{seen:?}");
    }
}

/// RFC 826 (packet reception) and RFC 4861 section 7.2.3: the entry of the sender follows.
#[test]
fn a_neighbour_that_asks_for_us_is_followed_at_once() {
    let mut lab = Lab::new();
    let [_, b] = lab.connect();
    let seen = destinations(&mut lab);
    give(&mut lab, arp_of_moved(1, [10, 0, 0, 2]));
    lab.send(1, b, b"after the move");
    lab.run_ms(1);
    assert!(seen.borrow().contains(&(MOVED, [8, 0])), "{seen:?}");
    assert!(!seen.borrow().contains(&(OLD, [8, 0])), "{seen:?}");

    let mut lab = Lab::new();
    let b = connect_v6(&mut lab);
    let seen = destinations(&mut lab);
    give(&mut lab, from_moved("fd00::1", "fd00::2").solicit());
    lab.send(1, b, b"after the move");
    lab.run_ms(1);
    assert!(seen.borrow().contains(&(MOVED, IPV6)), "{seen:?}");
    assert!(!seen.borrow().contains(&(OLD, IPV6)), "{seen:?}");
}

/// The link loses all frames for 20 s; the retransmission timeout backs off to several seconds.
fn stall(lab: &mut Lab, from: ConnId) {
    lab.lose(|_, _| true);
    lab.send(1, from, b"waits");
    lab.run_ms(20_000);
}

#[test]
fn data_that_waits_is_sent_when_the_neighbour_moves() {
    let moves = [
        arp_of_moved(1, [10, 0, 0, 2]),
        arp_of_moved(1, [10, 0, 0, 1]),
        arp_of_moved(1, [10, 0, 0, 77]),
        arp_of_moved(2, [10, 0, 0, 2]),
    ];
    for claim in moves {
        let mut lab = Lab::new();
        let [_, b] = lab.connect();
        stall(&mut lab, b);
        let seen = destinations(&mut lab);
        give(&mut lab, claim);
        lab.run_ms(2);
        assert!(seen.borrow().contains(&(MOVED, [8, 0])), "{seen:?}");
    }
}

#[test]
fn data_that_waits_is_sent_when_the_neighbour_announces_itself() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    stall(&mut lab, b);
    lab.lose(|_, _| false);
    let mut announcement = arp_of_moved(1, [10, 0, 0, 1]);
    for at in [6, 22] {
        announcement[at..at + 6].copy_from_slice(&OLD);
    }
    give(&mut lab, announcement);
    lab.run_ms(5);
    assert_eq!(lab.read(0, a), b"waits");
}

#[test]
fn a_syn_that_waits_is_sent_when_the_neighbour_moves() {
    let mut lab = Lab::new();
    lab.connect();
    lab.lose(|_, _| true);
    let now = lab.net.now;
    let to = "10.0.0.1:99".parse().unwrap();
    lab.net.hosts[1].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(5_000);
    let seen = destinations(&mut lab);
    give(&mut lab, arp_of_moved(1, [10, 0, 0, 2]));
    lab.run_ms(2);
    assert!(seen.borrow().contains(&(MOVED, [8, 0])), "{seen:?}");
}

#[test]
fn data_that_waits_is_sent_when_neighbours_are_flushed() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    stall(&mut lab, b);
    lab.lose(|_, _| false);
    lab.net.hosts[1].flush_neighbours();
    lab.run_ms(5);
    assert_eq!(lab.read(0, a), b"waits");
}

/// A flood of claims makes no flood of retransmissions.
#[test]
fn each_timeout_is_followed_by_at_most_one_retransmission_for_claims() {
    let mut lab = Lab::new();
    let [_, b] = lab.connect();
    stall(&mut lab, b);
    let seen = destinations(&mut lab);
    let elsewhere = {
        let mut claim = arp_of_moved(1, [10, 0, 0, 2]);
        for at in [6, 22] {
            claim[at + 5] = 0x98;
        }
        claim
    };
    let timeouts = lab.net.hosts[1].tcp_info(b).unwrap().timeouts;
    for _ in 0..2_000 {
        give(&mut lab, arp_of_moved(1, [10, 0, 0, 2]));
        give(&mut lab, elsewhere.clone());
        lab.run_ms(1);
    }
    let timeouts = lab.net.hosts[1].tcp_info(b).unwrap().timeouts - timeouts;
    let sent = seen
        .borrow()
        .iter()
        .filter(|(_, kind)| *kind == [8, 0])
        .count();
    assert!(
        timeouts <= 20 && sent <= 20,
        "{timeouts} timeouts, {sent} segments"
    );
}

/// A neighbour that no longer answers at its old address is looked for on the whole link at once.
#[test]
fn a_dead_entry_is_asked_for_again_while_data_waits() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].net.neighbours.reachable = Duration::from_millis(100);
    let mut lab = Lab::with(configs);
    let [a, b] = lab.connect();
    lab.run_ms(500);
    let asked = Rc::new(RefCell::new(0));
    let count = asked.clone();
    // Host 0 is down for 20 s.
    lab.lose(move |from, frame| {
        let is_request = from == 1 && frame[..6] == [0xff; 6] && frame[12..14] == [8, 6];
        *count.borrow_mut() += u32::from(is_request);
        true
    });
    lab.send(1, b, b"waits");
    lab.run_ms(20_000);
    assert!(*asked.borrow() >= 15, "{asked:?} requests in 20 s");
    lab.lose(|_, _| false);
    lab.run_ms(1_100);
    assert_eq!(lab.read(0, a), b"waits", "within a second");
}

#[test]
fn a_reused_slot_ignores_the_old_neighbour_lookup() {
    let mut lab = Lab::new();
    // The peer exists, but its SYN-ACKs are lost.
    lab.lose(|_, frame| {
        frame[12..14] == [8, 0] && frame.get(47).is_some_and(|flags| flags & 2 != 0)
    });
    let now = lab.net.now;
    let host = &mut lab.net.hosts[0];
    let nobody = "10.0.0.77:80".parse().unwrap();
    let given_up = host.connect(now, None, None, nobody, 0).unwrap();
    lab.run_ms(500);
    let now = lab.net.now;
    let host = &mut lab.net.hosts[0];
    host.abort(now, given_up);
    host.release(now, given_up);
    let peer = "10.0.0.2:80".parse().unwrap();
    let id = host.connect(now, None, None, peer, 0).unwrap();
    assert_eq!(host.connection_count(), 1, "in the same slot");
    // Three requests, a second apart, are not answered.
    lab.run_ms(4000);
    assert_eq!(lab.net.hosts[0].stats().net.neighbour_failures, 1);
    assert!(!lab.got(0).contains(Events::UNREACHABLE));
    assert!(lab.net.hosts[0].tcp_info(id).is_some());
}

/// Processor time of `count` connects that wait for one neighbour, whose answer completes them all.
fn waiting(count: usize) -> Duration {
    let mut config = host_config(0);
    config.tcp.max_connections = count;
    let now = Instant::from_millis(1);
    let mut host = Host::new(config, now).unwrap();
    let mut peer = Host::new(host_config(1), now).unwrap();
    let mut sink = VecSink::default();
    let ((), took) = crate::cpu_time::measure(|| {
        for i in 0..count {
            let to = ([10, 0, 0, 2], 1000 + (i / 10_000) as u16).into();
            host.connect(now, None, None, to, 0).unwrap();
            host.poll(now, &mut sink);
        }
    });
    assert_eq!(sink.frames.len(), 1, "one question");
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let frame = |frame: (Vec<u8>, _)| (VecBuf::from(frame.0), info);
    peer.receive_burst(now, sink.frames.drain(..).map(frame));
    peer.poll(now, &mut sink);
    host.receive_burst(now, sink.frames.drain(..).map(frame));
    host.poll(now, &mut sink);
    assert_eq!(sink.frames.len(), count, "a SYN of each");
    took
}

#[test]
fn waiting_for_a_neighbour_costs_constant_work() {
    // A search through the waiting connections would take a hundred times as long.
    let (few, many) = (
        (0..3).map(|_| waiting(5_000)).min().unwrap(),
        (0..3).map(|_| waiting(50_000)).min().unwrap(),
    );
    assert!(many < 40 * few, "{few:?} for 5000, {many:?} for 50000");
}

#[test]
fn a_time_wait_gives_way_as_soon_as_it_has_no_owner() {
    let mut config = host_config(0);
    config.tcp.max_connections = 2;
    let mut lab = Lab::with([config, host_config(1)]);
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let to = "10.0.0.2:80".parse().unwrap();
    let mut ids = vec![];
    for _ in 0..2 {
        let now = lab.net.now;
        ids.push(lab.net.hosts[0].connect(now, None, None, to, 0).unwrap());
        lab.run_ms(5);
        let now = lab.net.now;
        lab.net.hosts[0].close(now, ids[ids.len() - 1]);
        lab.run_ms(5);
        let peers: Vec<_> = lab.events[1].drain(..).map(|(id, _)| id).collect();
        let now = lab.net.now;
        peers
            .iter()
            .for_each(|probe| lab.net.hosts[1].release(now, *probe));
        lab.run_ms(5);
    }
    let now = lab.net.now;
    let host = &mut lab.net.hosts[0];
    // Both are in TIME-WAIT and not released.
    assert!(host.connect(now, None, None, to, 0).is_err());
    host.release(now, ids[1]);
    assert!(host.connect(now, None, None, to, 0).is_ok());
    assert_eq!(host.stats().tcp.time_wait_evicted, 1);
    assert!(host.tcp_info(ids[0]).is_some(), "the other is not touched");
}
