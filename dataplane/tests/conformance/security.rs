//! Requirements of RFC 5042 and RFC 5040 section 8.1.1, tested by a remote peer. The numbered tests
//! cover protection domains (c43, c69, c76), bounds (c45 to c47), invalidated keys (c41, c42),
//! access rights (c48, c70, c77), too many requests (c74) and silence (c12); this file covers the
//! rest.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crate::bench::{CONFIG, Responder, impatient, quoting};
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, send, tagged, write};
use crate::common::*;
use crate::skip_if;
use siw::{AsyncEventKind, RecvWr, SendWr, WcStatus};

#[test]
fn stags_are_unpredictable_and_slowly_reused() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut seen = HashSet::new();
    let mut steps = HashSet::new();
    let mut last = 0u32;
    for _ in 0..500 {
        let mr = b.app.pd.alloc_mr(4096, ALL).unwrap();
        assert!(seen.insert(mr.rkey()), "reused at once");
        steps.insert(mr.rkey().wrapping_sub(last));
        last = mr.rkey();
    }
    assert!(
        steps.len() > 490,
        "no pattern in their distances: {}",
        steps.len()
    );
    let keys: HashSet<u8> = seen.iter().map(|k| *k as u8).collect();
    assert!(keys.len() > 150, "the key octet is drawn: {}", keys.len());
}

#[test]
fn a_flood_of_wrong_streams_is_answered_and_forgotten() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut good = b.stream();
    for i in 0..300 {
        let mut peer = b.peer();
        let garbage = pattern(i + 1, 64);
        peer.send(&garbage);
        peer.reset();
    }
    b.recv(1, 0, 64);
    good.send(&send(true, 1, 0, b"still here"));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 10));
}

#[test]
fn silent_connections_are_bounded_and_reaped() {
    skip_if!(lacks_network());
    let b = Responder::with(&impatient());
    let mut silent: Vec<Peer> = (0..64).map(|_| b.peer()).collect();
    for p in &mut silent {
        assert_eq!(p.rest(), b"");
    }
    b.nothing_heard();
    b.goes_on();
}

#[test]
fn an_error_of_one_stream_leaves_the_others_alone() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut good = b.stream();
    b.recv(1, 0, 64);
    for _ in 0..20 {
        let next = End::new(&b.app.ctx, 4096);
        let mut peer = b.peer();
        peer.send(&crate::common::peer::request(0x40, 1, b""));
        let siw::CmEvent::ConnectRequest(r) = b.event() else {
            panic!("no request")
        };
        r.accept(&next.qp, None, &Default::default()).unwrap();
        peer.take_mpa(b"MPA ID Rep Frame");
        b.established();
        let f = write(true, 0x00bb_aa01, 0, b"whose");
        peer.send(&f);
        assert_eq!(peer.rest(), quoting([0x11, 0], &f));
        b.disconnected();
        let e = b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(
            (e.kind, e.object),
            (Some(AsyncEventKind::QpAccessErr), next.qp.qp_num())
        );
    }
    good.send(&send(true, 1, 0, b"unharmed"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

/// Data requested or receives posted before the deregistration of a key are not placed after it
/// (RFC 5042 section 6.1; c42 covers the peer's own writes).
#[test]
fn nothing_is_placed_into_a_sink_or_a_receive_that_was_deregistered() {
    skip_if!(lacks_network());
    let b = Responder::new();
    // The sink is deregistered in the middle of a Read Response.
    let sink = b.app.pd.alloc_mr(4096, ALL).unwrap();
    let mut peer = b.stream();
    b.recv(98, 0, 16);
    b.recv(99, 0, 16);
    b.begin(&mut peer);
    let sges = [sink.sge(0, 16)];
    b.app
        .qp
        .post_send(&[SendWr::read(5, &sges, 0x1000, 0x2000)])
        .unwrap();
    let u = peer.take_fpdu();
    let (stag, to) = (&u[18..22], &u[22..30]);
    let stag = u32::from_be_bytes(stag.try_into().unwrap());
    let to = u64::from_be_bytes(to.try_into().unwrap());
    peer.send(&tagged([0x81, 0x42], stag, to, b"first 8!"));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().wr_id, 98, "the first half was placed");
    let (arena, at) = (sink.arena().clone(), sink.arena_offset());
    drop(sink);
    b.app.ctx.await_releases().unwrap();
    let rest = tagged([0xc1, 0x42], stag, to + 8, b"second 8");
    peer.send(&rest);
    assert_eq!(peer.rest(), quoting([0x11, 0x00], &rest));
    drop(peer);
    let wc = b.app.wc();
    assert_eq!((wc.wr_id, wc.status), (5, WcStatus::LOC_PROT_ERR));
    b.broken(AsyncEventKind::QpAccessErr);
    let mut now = [0; 16];
    arena.read(at, &mut now).unwrap();
    assert_eq!(&now, b"first 8!\0\0\0\0\0\0\0\0");

    // The memory of a posted receive is deregistered before the message arrives.
    b.app.qp.reset().unwrap();
    let inbox = b.app.pd.alloc_mr(4096, ALL).unwrap();
    let mut peer = b.stream();
    b.app
        .qp
        .post_recv(&[RecvWr {
            wr_id: 6,
            sges: &[inbox.sge(0, 16)],
        }])
        .unwrap();
    let (arena, at) = (inbox.arena().clone(), inbox.arena_offset());
    drop(inbox);
    b.app.ctx.await_releases().unwrap();
    peer.send(&send(true, 1, 0, b"for nobody"));
    let t = peer.take_fpdu();
    assert_eq!(
        (&t[..2], &t[18..20]),
        (&[0x41, 0x47][..], &[0x00, 0x00][..])
    );
    let wc = b.app.wc();
    assert_eq!((wc.wr_id, wc.status), (6, WcStatus::LOC_PROT_ERR));
    arena.read(at, &mut now).unwrap();
    assert_eq!(now, [0; 16]);
}

/// A peer that overflows a completion queue that is too short for its messages ends only the queue
/// pairs of that queue (RFC 5042 section 6.4.3.2).
#[test]
fn a_peer_that_overflows_a_completion_queue_ends_its_own_queue_pairs_only() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (other, mut bystander) = b.second();
    let cq = siw::Cq::new(&b.app.ctx, 4, None).unwrap();
    let qp = b.app.pd.create_qp(&cq, &cq, &Default::default()).unwrap();
    let short = End {
        qp,
        cq,
        ..b.app.another()
    };
    let mut peer = b.stream_of(&short);
    let entries = 64;
    for wr_id in 0..entries {
        let wr = RecvWr { wr_id, sges: &[] };
        short.qp.post_recv(&[wr]).unwrap();
    }
    let all: Vec<u8> = (1..=entries as u32)
        .flat_map(|msn| send(true, msn, 0, b""))
        .collect();
    peer.send(&all);
    peer.rest();
    let e = b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(
        (e.kind, e.object),
        (Some(AsyncEventKind::CqErr), short.cq.cq_id())
    );
    b.disconnected();
    let empty = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    other.qp.post_recv(&[empty]).unwrap();
    bystander.send(&send(true, 1, 0, b""));
    assert_eq!(other.wc().status, WcStatus::SUCCESS);
    b.goes_on();
}

/// With keepalive configured, siwd detects an established stream whose peer vanished silently, and
/// frees its resources.
#[test]
fn an_idle_stream_whose_peer_has_vanished_is_reaped() {
    skip_if!(lacks_network());
    let config = format!("{CONFIG}[device.tcp]\nkeepalive_s = 1\n");
    let b = Responder::with(&config);
    let _peer = b.stream();
    b.recv(99, 0, 64);
    // A peer that is only idle answers the probes, and the stream stays.
    let probes = || {
        let stats: serde_json::Value =
            serde_json::from_str(&b.app.ctx.read_stats().unwrap()).unwrap();
        stats["total"][0]["mib"]["TcpExtTCPKeepAlive"].as_u64()
    };
    let end = Instant::now() + PATIENCE;
    while probes() < Some(2) {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
    b.nothing_heard();
    // The peer's address is removed: no answer comes any more.
    b.ns.ip("addr del 10.77.0.2/24 dev tap0");
    b.broken(AsyncEventKind::QpFatal);
}
