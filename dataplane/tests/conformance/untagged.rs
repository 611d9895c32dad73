//! Untagged DDP segments and Sends (RFC 5041 sections 4.2, 7.1; RFC 5040 sections 4.6, 5.3).

use crate::bench::Responder;
use crate::bench::quoting;
use crate::common::net::lacks_network;
use crate::common::peer::{send, untagged};
use crate::common::*;
use crate::skip_if;
use siw::{AsyncEventKind, WcStatus};

const REQUEST: AsyncEventKind = AsyncEventKind::QpReqErr;

#[test]
fn c51_another_ddp_version_is_answered_by_terminate_1_2_06() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = untagged([0x40, 0x43], 0, 0, 1, 0, b"version 0");
    b.refuses(&f, [0x12, 0x06]);
}

#[test]
fn c52_a_queue_number_beyond_the_last_is_answered_by_terminate_1_2_01() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for qn in [4, u32::MAX] {
        b.refuses(
            &untagged([0x41, 0x43], 0, qn, 1, 0, b"whose queue"),
            [0x12, 0x01],
        );
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c53_an_opcode_on_the_queue_of_another_is_answered_by_terminate_1_2_01() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for (control, qn) in [([0x41, 0x43], 1), ([0x41, 0x41], 0), ([0x41, 0x47], 0)] {
        let f = untagged(control, 0, qn, 1, 0, &[0; 28]);
        b.refuses(&f, [0x12, 0x01]);
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c55_a_replayed_message_number_is_answered_by_terminate_1_2_03() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 64);
    b.recv(99, 64, 64);
    peer.send(&send(true, 1, 0, b"once"));
    assert_eq!(b.app.wc().wr_id, 1);
    let f = send(true, 1, 0, b"twice");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting([0x12, 0x03], &f));
    drop(peer);
    b.broken(REQUEST);
    assert_eq!(b.app.read(0, 4), b"once");
}

#[test]
fn c56_a_skipped_message_number_is_answered_by_terminate_1_2_03() {
    skip_if!(lacks_network());
    let b = Responder::new();
    b.refuses(&send(true, 2, 0, b"second"), [0x12, 0x03]);
}

#[test]
fn c58_a_wrong_message_offset_is_answered_by_terminate_1_2_04() {
    skip_if!(lacks_network());
    let b = Responder::new();
    b.refuses(&send(true, 1, 1, b"not the start"), [0x12, 0x04]);
    b.app.qp.reset().unwrap();
    let mut peer = b.stream();
    b.recv(98, 0, 64);
    b.recv(99, 0, 64);
    peer.send(&send(false, 1, 0, b"four"));
    let f = send(true, 1, 5, b"a gap");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting([0x12, 0x04], &f));
    drop(peer);
    let e = b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(e.kind, Some(REQUEST));
    b.disconnected();
    for wr_id in [98, 99] {
        let wc = b.app.wc();
        assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::WR_FLUSH_ERR));
    }
}

#[test]
fn c60_an_empty_send_takes_a_receive_and_fills_nothing() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.app.fill(3);
    let before = b.app.read(0, 64);
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b""));
    let wc = b.app.wc();
    assert_eq!(
        (wc.wr_id, wc.status, wc.byte_len),
        (1, WcStatus::SUCCESS, 0)
    );
    assert_eq!(b.app.read(0, 64), before);
    let f = send(true, 2, 0, b"");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting([0x12, 0x02], &f), "no second receive");
}

#[test]
fn c61_the_stag_of_a_plain_send_is_ignored() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 64);
    peer.send(&untagged([0x41, 0x43], b.app.mr.rkey(), 0, 1, 0, b"plain"));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 5));
    assert_eq!(b.app.read(0, 5), b"plain");
}
