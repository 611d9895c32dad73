//! The iWARP port mapper in both roles. The peer is a UDP socket of Linux that speaks as iwpmd of
//! rdma-core does, with the octets written by hand.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::bench::{CONFIG, Initiator, Responder, SILENCE};
use crate::common::net::{Netns, lacks_network};
use crate::common::peer::{C, Peer, S, reply};
use crate::common::*;
use crate::skip_if;
use siw::{CmEvent, ConnectOptions};

const OURS: &str = "10.77.0.1";
const PEER: &str = "10.77.0.2";
const OURS_V6: &str = "fd77::1";
const PEER_V6: &str = "fd77::2";
/// First octets by kind, for IPv4.
const REQUEST: u8 = 0x04;
const ACCEPT: u8 = 0x14;
const ACKNOWLEDGE: u8 = 0x24;
const REJECT: u8 = 0x34;

/// The port mapper of the host at the other end of the link.
fn mapper(ns: &Netns, address: &str) -> UdpSocket {
    let at = SocketAddr::new(address.parse().unwrap(), 3935);
    let socket = ns.run(|| UdpSocket::bind(at)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn take(mapper: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut message = vec![0; 2048];
    let (len, from) = mapper.recv_from(&mut message).unwrap();
    message.truncate(len);
    (message, from)
}

/// An answer to a request: its first 48 octets with another kind, and a port of the listener.
fn answer(request: &[u8], kind: u8, port: u16) -> Vec<u8> {
    let mut answer = request[..48].to_vec();
    answer[0] = kind | request[0] & 15;
    answer[2..4].fill(0);
    answer[4..6].copy_from_slice(&port.to_be_bytes());
    answer
}

fn request(to: SocketAddr, handle: u64) -> Vec<u8> {
    let put = |message: &mut Vec<u8>, address: IpAddr| match address {
        IpAddr::V4(address) => {
            message.extend(address.octets());
            message.extend([0; 12]);
        }
        IpAddr::V6(address) => message.extend(address.octets()),
    };
    let (version, from) = if to.is_ipv4() {
        (4, PEER)
    } else {
        (6, PEER_V6)
    };
    let mut message = vec![version, 0, 0xa0, 0];
    message.extend(to.port().to_be_bytes());
    message.extend([0xa0, 0]);
    message.extend(handle.to_be_bytes());
    put(&mut message, from.parse().unwrap());
    put(&mut message, to.ip());
    put(&mut message, from.parse().unwrap());
    message
}

/// A port of Linux on which nothing listens.
fn unused_port(initiator: &Initiator) -> u16 {
    let listener = initiator.ns.run(|| std::net::TcpListener::bind((PEER, 0)));
    listener.unwrap().local_addr().unwrap().port()
}

/// Accepts the TCP connection and completes the MPA exchange.
fn establish(b: &Initiator) -> Peer {
    let mut peer = Peer::accept(&b.listener);
    peer.take_mpa(b"MPA ID Req Frame");
    peer.send(&reply(S | C, 2, &[0, 1, 0, 1]));
    b.established();
    peer
}

#[test]
fn a_connect_goes_to_the_port_that_the_peers_mapper_names() {
    skip_if!(lacks_network());
    for (here, there) in [(OURS, PEER), (OURS_V6, PEER_V6)] {
        let b = Initiator::at(&SocketAddr::new(there.parse().unwrap(), 0).to_string());
        let mapper = mapper(&b.ns, there);
        let mut asked = b.to;
        asked.set_port(unused_port(&b));
        // On a busy machine an answer may come too late, and the connect is refused.
        let options = ConnectOptions {
            refusals: 200,
            ..Default::default()
        };
        b.app.qp.connect(&b.app.cm, asked, &options).unwrap();
        let mut expected = Vec::new();
        let acknowledgement = loop {
            let (message, from) = take(&mapper);
            if message.len() == 48 {
                break message;
            }
            assert_eq!(from.ip().to_string(), here);
            assert_eq!((message.len(), message[0] & 0xf0), (64, 0));
            assert_eq!(message[4..6], asked.port().to_be_bytes());
            assert!(message[6..8] != [0, 0] && message[2..4] == message[6..8]);
            // Answers to another request, or for another host, lead nowhere.
            let accept = answer(&message, ACCEPT & 0xf0, b.to.port());
            let (mut other_handle, mut other_host) = (accept.clone(), accept.clone());
            other_handle[8] ^= 1;
            other_host[35] ^= 1;
            for message in [&other_handle, &other_host, &accept] {
                mapper.send_to(message, from).unwrap();
            }
            expected = accept;
            expected[0] = ACKNOWLEDGE & 0xf0 | message[0] & 15;
        };
        assert_eq!(acknowledgement, expected);
        establish(&b);
    }
}

/// The base configuration with two workers, which share the device.
fn two_workers() -> String {
    let config = CONFIG.replace("buffers = 4096", "buffers = 16384");
    format!("[workers]\ncores = [0, 1]\nidle = \"adaptive\"\n{config}")
}

/// An answer arrives at any worker, and so does the connection to the port that it names: the hash of
/// the four-tuple says where.
#[test]
fn connects_of_two_workers_go_to_the_ports_that_the_mapper_names() {
    skip_if!(lacks_network().or_else(two_cores));
    let b = Initiator::with(&two_workers());
    let mapper = mapper(&b.ns, PEER);
    let mut asked = b.to;
    asked.set_port(unused_port(&b));
    let options = ConnectOptions {
        refusals: 200,
        ..Default::default()
    };
    let mut acknowledged = HashSet::new();
    let mut ends = Vec::new();
    for _ in 0..24 {
        let end = b.app.another();
        end.qp.connect(&end.cm, asked, &options).unwrap();
        loop {
            let (message, from) = take(&mapper);
            if message.len() == 48 {
                // One worker alone waits for the answer.
                assert!(acknowledged.insert(message[8..16].to_vec()), "{message:x?}");
                break;
            }
            let accept = answer(&message, ACCEPT & 0xf0, b.to.port());
            mapper.send_to(&accept, from).unwrap();
        }
        let mut peer = Peer::accept(&b.listener);
        peer.take_mpa(b"MPA ID Req Frame");
        peer.send(&reply(S | C, 2, &[0, 1, 0, 1]));
        let event = end.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(event, siw::CmEvent::Established(_)), "{event:?}");
        ends.push((end, peer));
    }
}

#[test]
fn two_workers_answer_a_request_once() {
    skip_if!(lacks_network().or_else(two_cores));
    let b = Responder::with(&two_workers());
    let to = b.listener.local_addr();
    // Of several ports of the peer: the kernel picks the queue, and with it the worker, by a hash.
    let mappers: Vec<UdpSocket> = (0..8)
        .map(|_| b.ns.run(|| UdpSocket::bind((PEER, 0))).unwrap())
        .collect();
    for (handle, mapper) in (1..).zip(&mappers) {
        let message = request(to, handle);
        mapper.set_read_timeout(Some(PATIENCE)).unwrap();
        mapper.send_to(&message, (to.ip(), 3935)).unwrap();
        let (told, _) = take(mapper);
        assert_eq!(told, answer(&message, ACCEPT & 0xf0, to.port()));
    }
    for mapper in &mappers {
        mapper.set_read_timeout(Some(SILENCE)).unwrap();
        assert!(mapper.recv(&mut [0; 64]).is_err(), "a second answer");
    }
}

#[test]
fn a_rejected_connect_goes_to_the_port_asked_for() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mapper = mapper(&b.ns, PEER);
    b.connect(&ConnectOptions::default());
    let (message, from) = take(&mapper);
    assert_eq!(message[0], REQUEST);
    let source = u16::from_be_bytes([message[6], message[7]]);
    let reject = answer(&message, REJECT & 0xf0, b.to.port());
    mapper.send_to(&reject, from).unwrap();
    let peer = establish(&b);
    assert_eq!(peer.0.peer_addr().unwrap().port(), source);
}

/// Connects another queue pair, whose TCP connection the peer accepts.
fn connect_another(b: &Initiator) {
    let end = b.app.another();
    let options = ConnectOptions::default();
    end.qp.connect(&end.cm, b.to, &options).unwrap();
    Peer::accept(&b.listener);
}

fn was_asked(mapper: &UdpSocket) -> bool {
    mapper.set_nonblocking(true).unwrap();
    let mut any = false;
    while mapper.recv(&mut [0; 64]).is_ok() {
        any = true;
    }
    any
}

#[test]
fn a_peer_whose_mapper_does_not_answer_is_asked_once() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mapper = mapper(&b.ns, PEER);
    connect_another(&b);
    assert!(was_asked(&mapper));
    connect_another(&b);
    assert!(!was_asked(&mapper));
}

#[test]
fn a_peer_without_a_mapper_is_asked_once() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    // Linux answers with an ICMP error.
    connect_another(&b);
    let mapper = mapper(&b.ns, PEER);
    connect_another(&b);
    assert!(!was_asked(&mapper));
}

fn take_request(mapper: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let (message, from) = take(mapper);
    assert_eq!(message.len(), 64, "{message:x?}");
    (message, from)
}

/// The mapper of a host that first has to resolve siwd's address, as iwpmd over IPv6: until it answers,
/// nothing listens on the port asked for.
#[test]
fn a_refused_connect_waits_for_a_slow_mapper_and_goes_to_the_port_that_it_names() {
    skip_if!(lacks_network());
    for there in [PEER, PEER_V6] {
        let b = Initiator::at(&SocketAddr::new(there.parse().unwrap(), 0).to_string());
        let mapper = mapper(&b.ns, there);
        let mut asked = b.to;
        asked.set_port(unused_port(&b));
        let options = ConnectOptions::default();
        let start = Instant::now();
        b.app.qp.connect(&b.app.cm, asked, &options).unwrap();
        let (request, from) = take_request(&mapper);
        // Pauses of 5 and 10 ms before the connect is refused, then 20, 40 and 80.
        for _ in 0..6 {
            assert_eq!(take_request(&mapper).0, request);
        }
        assert!(
            start.elapsed() > Duration::from_millis(140),
            "{:?}",
            start.elapsed()
        );
        let accept = answer(&request, ACCEPT & 0xf0, b.to.port());
        mapper.send_to(&accept, from).unwrap();
        let acknowledgement = loop {
            let (message, _) = take(&mapper);
            if message.len() == 48 {
                break message;
            }
        };
        assert_eq!(acknowledgement[8..], accept[8..]);
        establish(&b);
    }
}

#[test]
fn a_late_answer_is_acknowledged_and_its_mapper_remembered() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mapper = mapper(&b.ns, PEER);
    // The port asked for is that of the listener.
    let end = b.app.another();
    end.qp
        .connect(&end.cm, b.to, &ConnectOptions::default())
        .unwrap();
    let _peer = Peer::accept(&b.listener);
    let (request, from) = take_request(&mapper);
    let accept = answer(&request, ACCEPT & 0xf0, b.to.port());
    // iwpmd repeats an answer until it is acknowledged.
    for _ in 0..2 {
        mapper.send_to(&accept, from).unwrap();
        while take(&mapper).0.len() == 64 {}
    }
    // The next connect waits for longer than it does for a peer without a mapper.
    b.listener.set_nonblocking(true).unwrap();
    let start = Instant::now();
    b.connect(&ConnectOptions::default());
    let (request, from) = take_request(&mapper);
    while start.elapsed() < Duration::from_millis(60) {
        take_request(&mapper);
        assert!(b.listener.accept().is_err(), "connected without an answer");
    }
    b.listener.set_nonblocking(false).unwrap();
    let reject = answer(&request, REJECT & 0xf0, b.to.port());
    mapper.send_to(&reject, from).unwrap();
    establish(&b);
}

#[test]
fn a_refused_connect_is_reported_if_the_mapper_stays_silent_and_the_next_one_at_once() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mapper = mapper(&b.ns, PEER);
    let mut asked = b.to;
    asked.set_port(unused_port(&b));
    let refused = |end: &siw::CmChannel| match end.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Rejected(info) | CmEvent::ConnectError(info) | CmEvent::Unreachable(info) => {
            assert!(info.reason.contains("nothing listens"), "{info:?}");
        }
        other => panic!("{other:?}"),
    };
    b.app
        .qp
        .connect(&b.app.cm, asked, &ConnectOptions::default())
        .unwrap();
    refused(&b.app.cm);
    assert!(was_asked(&mapper));
    let end = b.app.another();
    end.qp
        .connect(&end.cm, asked, &ConnectOptions::default())
        .unwrap();
    refused(&end.cm);
    assert!(!was_asked(&mapper));
}

#[test]
fn port_map_off_asks_nobody_and_answers_nobody() {
    skip_if!(lacks_network());
    let config = CONFIG.replace("[device.mpa]", "port_map = \"off\"\n[device.mpa]");
    let b = Initiator::with(&config);
    let mapper = mapper(&b.ns, PEER);
    b.connect(&ConnectOptions::default());
    let _peer = establish(&b);
    let to = SocketAddr::new(OURS.parse().unwrap(), 7471);
    mapper.send_to(&request(to, 7), (OURS, 3935)).unwrap();
    mapper.set_read_timeout(Some(SILENCE)).unwrap();
    // Neither a request of the connect, nor an answer; Linux may report the ICMP error.
    assert!(mapper.recv(&mut [0; 64]).is_err());
}

#[test]
fn requests_for_listeners_are_accepted_and_others_rejected() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let listening = b.listener.local_addr();
    let v6 = SocketAddr::new(OURS_V6.parse().unwrap(), listening.port());
    let nobody = SocketAddr::new(listening.ip(), listening.port() ^ 1);
    for (to, kind, peer) in [
        (listening, ACCEPT, PEER),
        (nobody, REJECT, PEER),
        // The listener is on the IPv4 address only.
        (v6, REJECT, PEER_V6),
    ] {
        let mapper = mapper(&b.ns, peer);
        let message = request(to, 0x0102_0304_0506_0708);
        // Malformed datagrams before it get no answer.
        for len in [0, 1, 47, 48, 63] {
            mapper.send_to(&message[..len], (to.ip(), 3935)).unwrap();
        }
        let mut other_version = message.clone();
        other_version[0] |= 0x40;
        mapper.send_to(&other_version, (to.ip(), 3935)).unwrap();
        mapper.send_to(&message, (to.ip(), 3935)).unwrap();
        let (told, from) = take(&mapper);
        assert_eq!((from.ip(), from.port()), (to.ip(), 3935));
        assert_eq!(told, answer(&message, kind & 0xf0, to.port()), "{to}");
        // An acknowledgement needs nothing.
        let done = answer(&message, ACKNOWLEDGE & 0xf0, to.port());
        mapper.send_to(&done, (to.ip(), 3935)).unwrap();
        mapper
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        assert!(mapper.recv(&mut [0; 64]).is_err());
    }
}
