//! Tagged DDP segments and RDMA Writes (RFC 5041 sections 4.1, 5.3, 7.1; RFC 5040 section 7.2).

use crate::bench::Responder;
use crate::common::net::lacks_network;
use crate::common::peer::{send, tagged, untagged, write};
use crate::common::*;
use crate::skip_if;
use siw::{Access, AsyncEventKind, WcStatus};

const ACCESS: AsyncEventKind = AsyncEventKind::QpAccessErr;

#[test]
fn c38_another_ddp_version_is_answered_by_terminate_1_1_04() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = tagged([0xc2, 0x40], b.app.mr.rkey(), b.app.mr.addr(), b"version 2");
    b.refuses(&f, [0x11, 0x04]);
}

#[test]
fn c39_reserved_bits_of_ddp_and_rdmap_are_ignored() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    let at = b.app.mr.addr() + 100;
    peer.send(&tagged([0xfd, 0x70], b.app.mr.rkey(), at, b"reserved"));
    peer.send(&untagged([0x7d, 0x73], 0, 0, 1, 0, b""));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.app.read(100, 8), b"reserved");
}

#[test]
fn c41_a_stale_key_is_answered_by_terminate_1_1_00() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = write(true, b.app.mr.rkey() ^ 1, b.app.mr.addr(), b"stale");
    b.refuses(&f, [0x11, 0x00]);
    assert_eq!(b.app.read(0, 5), [0; 5]);
}

#[test]
fn c42_a_deregistered_stag_is_answered_by_terminate_1_1_00_also_within_a_message() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(98, 0, 16);
    b.recv(99, 0, 16);
    let mr = b.app.pd.alloc_mr(4096, ALL).unwrap();
    let (key, at) = (mr.rkey(), mr.addr());
    peer.send(&write(false, key, at, b"first half"));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().wr_id, 98);
    drop(mr);
    b.app.ctx.await_releases().unwrap();
    let f = write(true, key, at + 10, b"second half");
    peer.send(&f);
    assert_eq!(peer.rest(), crate::bench::quoting([0x11, 0x00], &f));
    drop(peer);
    b.broken(ACCESS);
}

#[test]
fn c42_an_stag_that_the_peer_invalidated_is_answered_by_terminate_1_1_00() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    b.recv(99, 0, 16);
    let mr = b.app.pd.alloc_mr(4096, ALL).unwrap();
    peer.send(&untagged([0x41, 0x44], mr.rkey(), 0, 1, 0, b""));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, 1));
    let f = write(true, mr.rkey(), mr.addr(), b"too late");
    peer.send(&f);
    assert_eq!(peer.rest(), crate::bench::quoting([0x11, 0x00], &f));
    drop(peer);
    b.broken(ACCESS);
}

#[test]
fn c43_memory_of_another_protection_domain_is_answered_by_terminate_1_1_02() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let pd = b.app.ctx.alloc_pd().unwrap();
    let mr = pd.alloc_mr(4096, ALL).unwrap();
    let f = write(true, mr.rkey(), mr.addr(), b"foreign");
    b.refuses(&f, [0x11, 0x02]);
    let mut now = [0; 7];
    mr.read(0, &mut now).unwrap();
    assert_eq!(now, [0; 7]);
}

#[test]
fn c45_an_offset_below_the_region_is_answered_by_terminate_1_1_01() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = write(true, b.app.mr.rkey(), b.app.mr.addr() - 1, b"x");
    b.refuses(&f, [0x11, 0x01]);
}

#[test]
fn c46_bounds_are_those_of_single_octets() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = b.app.pd.alloc_mr(1001, ALL).unwrap();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    b.recv(99, 0, 16);
    peer.send(&write(true, mr.rkey(), mr.addr() + 1000, b"z"));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().wr_id, 1);
    assert_eq!(mr.read_byte(1000).unwrap(), b'z');
    let f = write(true, mr.rkey(), mr.addr() + 1000, b"zz");
    peer.send(&f);
    assert_eq!(peer.rest(), crate::bench::quoting([0x11, 0x01], &f));
    drop(peer);
    b.broken(ACCESS);
}

#[test]
fn c47_an_offset_that_wraps_is_answered_by_terminate_1_1_03() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = write(true, b.app.mr.rkey(), u64::MAX - 2, b"wraps");
    b.refuses(&f, [0x11, 0x03]);
}

#[test]
fn c48_a_region_without_write_access_is_answered_by_terminate_0_1_02_and_stays() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let only_read = Access(Access::LOCAL_WRITE.0 | Access::REMOTE_READ.0);
    let mr = b.app.pd.alloc_mr(4096, only_read).unwrap();
    let f = write(true, mr.rkey(), mr.addr(), b"write");
    b.refuses(&f, [0x01, 0x02]);
    assert_eq!(mr.read_byte(0).unwrap(), 0);
}

#[test]
fn c49_a_write_of_nothing_needs_no_valid_stag() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    peer.send(&write(true, 0xdead_beef, u64::MAX, b""));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn c50_a_gap_within_a_write_is_no_error() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    let (key, at) = (b.app.mr.rkey(), b.app.mr.addr() + 1000);
    peer.send(&write(false, key, at, b"one"));
    peer.send(&write(true, key, at + 10, b"two"));
    peer.send(&send(true, 1, 0, b""));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.app.read(1000, 13), b"one\0\0\0\0\0\0\0two");
}
