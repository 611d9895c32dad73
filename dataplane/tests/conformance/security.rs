//! What RFC 5042 and RFC 5040 section 8.1.1 ask for, seen from the peer's side, beyond what the
//! numbered tests show: protection domains (c43, c69, c76), bounds (c45 to c47), keys that are gone
//! (c41, c42), rights (c48, c70, c77), too many requests (c74), silence (c12).

use std::collections::HashSet;

use crate::bench::{Responder, impatient, quoting};
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, send, write};
use crate::common::*;
use crate::skip_if;
use siw::{AsyncEventKind, WcStatus};

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
            (Some(AsyncEventKind::QpAccessErr), next.qp.number())
        );
    }
    good.send(&send(true, 1, 0, b"unharmed"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}
