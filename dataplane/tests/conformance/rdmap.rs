//! RDMAP: control fields, RDMA Reads, invalidation, Terminate (RFC 5040 sections 4, 5, 7).

use crate::bench::{Responder, quoting};
use crate::common::net::lacks_network;
use crate::common::peer::{Peer, ReadRequest, send, tagged, terminate, untagged, write};
use crate::common::*;
use crate::skip_if;
use siw::{Access, AsyncEventKind, Opcode, RecvWr, SendData, SendWr, WcStatus, WrFlags};

const ACCESS: AsyncEventKind = AsyncEventKind::QpAccessErr;
const REQUEST: AsyncEventKind = AsyncEventKind::QpReqErr;
const FATAL: AsyncEventKind = AsyncEventKind::QpFatal;

#[test]
fn c62_another_rdmap_version_is_answered_by_terminate_0_2_05() {
    skip_if!(lacks_network());
    let b = Responder::new();
    b.refuses(&untagged([0x41, 0x83], 0, 0, 1, 0, b""), [0x02, 0x05]);
    b.app.qp.reset().unwrap();
    let f = tagged([0xc1, 0x00], b.app.mr.rkey(), b.app.mr.addr(), b"x");
    b.refuses(&f, [0x02, 0x05]);
}

#[test]
fn c63_reserved_opcodes_are_answered_by_terminate_0_2_06() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for op in [0x4c, 0x4f] {
        let f = untagged([0x41, op], 0, 0, 1, 0, b"");
        b.refuses(&f, [0x02, 0x06]);
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c64_a_buffer_model_that_is_not_the_opcodes_is_answered_by_terminate_0_2_06() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = tagged(
        [0xc1, 0x43],
        b.app.mr.rkey(),
        b.app.mr.addr(),
        b"a tagged Send",
    );
    b.refuses(&f, [0x02, 0x06]);
    b.app.qp.reset().unwrap();
    let f = untagged([0x41, 0x40], 0, 0, 1, 0, b"an untagged Write");
    b.refuses(&f, [0x02, 0x06]);
}

#[test]
fn c65_a_read_response_that_nobody_asked_for_is_answered_by_terminate_0_2_06() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let f = tagged([0xc1, 0x42], b.app.mr.rkey(), b.app.mr.addr(), b"here");
    b.refuses(&f, [0x02, 0x06]);
    assert_eq!(b.app.read(0, 4), [0; 4]);
}

/// Posts a Read of `len` octets; returns the request as sent.
fn read(b: &Responder, peer: &mut Peer, len: usize) -> ReadRequest {
    b.begin(peer);
    let wr = SendWr {
        opcode: Opcode::Read,
        flags: WrFlags::SIGNALED,
        wr_id: 5,
        imm: 0,
        remote_addr: 0x1000,
        rkey: 0x2000,
        data: SendData::Sges(&[b.app.mr.sge(0, len)]),
    };
    b.app.qp.post_send(&[wr]).unwrap();
    let u = peer.take_fpdu();
    assert_eq!((&u[..2], u.len()), (&[0x41, 0x41][..], 46));
    let word = |i: usize| u32::from_be_bytes(u[i..i + 4].try_into().unwrap());
    let long = |i: usize| u64::from_be_bytes(u[i..i + 8].try_into().unwrap());
    let r = ReadRequest {
        sink_stag: word(18),
        sink_to: long(22),
        size: word(30),
        src_stag: word(34),
        src_to: long(38),
    };
    assert_eq!(
        (r.size as usize, r.src_stag, r.src_to),
        (len, 0x2000, 0x1000)
    );
    r
}

#[test]
fn c66_a_read_response_that_does_not_match_is_an_error_of_the_read() {
    skip_if!(lacks_network());
    let b = Responder::new();
    // Wrong STag, wrong position, too long, too short.
    for (stag, to, len, code) in [
        (1, 0, 8, 0x00),
        (0, 8, 8, 0x01),
        (0, 0, 9, 0x01),
        (0, 0, 7, 0x01),
    ] {
        let mut peer = b.stream();
        let r = read(&b, &mut peer, 8);
        let f = tagged(
            [0xc1, 0x42],
            r.sink_stag ^ stag,
            r.sink_to + to,
            &[7; 16][..len],
        );
        peer.send(&f);
        assert_eq!(peer.rest(), quoting([0x11, code], &f));
        drop(peer);
        let wc = b.app.wc();
        assert_eq!((wc.wr_id, wc.status), (5, WcStatus::BAD_RESP_ERR));
        b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        b.disconnected();
        assert_eq!(b.app.read(0, 16), [0; 16]);
        b.app.qp.reset().unwrap();
    }
    // A response that matches.
    let mut peer = b.stream();
    let r = read(&b, &mut peer, 8);
    peer.send(&tagged([0x81, 0x42], r.sink_stag, r.sink_to, b"four"));
    peer.send(&tagged([0xc1, 0x42], r.sink_stag, r.sink_to + 4, b"more"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.app.read(0, 8), b"fourmore");
}

/// A request for the first `size` octets of the application's memory.
fn request(b: &Responder, size: u32) -> ReadRequest {
    ReadRequest {
        sink_stag: 0x5151,
        sink_to: 0x6161,
        size,
        src_stag: b.app.mr.rkey(),
        src_to: b.app.mr.addr(),
    }
}

#[test]
fn c67_a_read_request_of_another_length_is_answered_by_terminate_0_2_ff() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for len in [27, 29] {
        let mut octets = request(&b, 8).octets();
        octets.resize(len, 0);
        let f = untagged([0x41, 0x41], 0, 1, 1, 0, &octets);
        b.refuses(&f, [0x02, 0xff]);
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c68_to_c72_a_read_of_what_may_not_be_read_is_answered_as_the_rfc_says() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let other = b.app.ctx.alloc_pd().unwrap();
    let foreign = other.alloc_mr(4096, ALL).unwrap();
    let sink = b
        .app
        .pd
        .alloc_mr(4096, Access(Access::LOCAL_WRITE.0 | Access::REMOTE_WRITE.0))
        .unwrap();
    let whole = request(&b, 65_536);
    for (code, r) in [
        (
            0x00,
            ReadRequest {
                src_stag: b.app.mr.rkey() ^ 1,
                ..whole
            },
        ),
        (
            0x03,
            ReadRequest {
                src_stag: foreign.rkey(),
                src_to: foreign.addr(),
                size: 8,
                ..whole
            },
        ),
        (
            0x02,
            ReadRequest {
                src_stag: sink.rkey(),
                src_to: sink.addr(),
                size: 8,
                ..whole
            },
        ),
        (
            0x01,
            ReadRequest {
                size: 65_537,
                ..whole
            },
        ),
        (
            0x01,
            ReadRequest {
                src_to: whole.src_to - 1,
                ..whole
            },
        ),
        (
            0x04,
            ReadRequest {
                src_to: u64::MAX - 3,
                size: 5,
                ..whole
            },
        ),
    ] {
        b.refuses(&r.message(1), [0x01, code]);
        b.app.qp.reset().unwrap();
    }
}

#[test]
fn c73_a_read_of_nothing_is_answered_by_nothing_whatever_its_stags() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    let r = ReadRequest {
        sink_stag: 0xaaaa,
        sink_to: u64::MAX,
        size: 0,
        src_stag: 0xbbbb,
        src_to: u64::MAX,
    };
    peer.send(&r.message(1));
    let mut empty = vec![0xc1, 0x42];
    empty.extend(0xaaaau32.to_be_bytes());
    empty.extend(u64::MAX.to_be_bytes());
    assert_eq!(peer.take_fpdu(), empty);
    // The stream continues: the next Read is answered.
    peer.send(&request(&b, 4).message(2));
    assert_eq!(peer.take_fpdu().len(), 14 + 4);
}

#[test]
fn c74_more_reads_than_agreed_on_end_their_own_stream_only() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let (other, mut bystander) = b.second();
    let mut peer = b.peer();
    peer.send(&crate::common::peer::request(0x50, 2, &[0, 4, 0, 2]));
    b.accept(b"");
    peer.take_mpa(b"MPA ID Rep Frame");
    let ird = b.established().ird;
    b.recv(99, 0, 64);
    let r = request(&b, 60_000);
    let all: Vec<u8> = (1..=ird + 1).flat_map(|msn| r.message(msn)).collect();
    peer.send(&all);
    let last = r.message(ird + 1);
    let got = peer.rest();
    // Responses that were already sent may come first.
    let expected = terminate([0x12, 0x02, 0xc0, 0], &last[..20]);
    assert!(
        got.ends_with(&expected),
        "{:02x?}",
        &got[got.len().saturating_sub(60)..]
    );
    drop(peer);
    b.broken(REQUEST);
    other
        .qp
        .post_recv(&[RecvWr {
            wr_id: 1,
            sges: &[],
        }])
        .unwrap();
    bystander.send(&send(true, 1, 0, b""));
    assert_eq!(other.wc().status, WcStatus::SUCCESS);
    b.goes_on();
}

#[test]
fn c75_an_unknown_stag_cannot_be_invalidated_0_2_09() {
    skip_if!(lacks_network());
    let b = Responder::new();
    cannot_invalidate(&b, 0xdead_be00, [0x02, 0x09]);
}

#[test]
fn c76_an_stag_of_another_protection_domain_cannot_be_invalidated_0_1_09() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let pd = b.app.ctx.alloc_pd().unwrap();
    let mr = pd.alloc_mr(4096, ALL).unwrap();
    cannot_invalidate(&b, mr.rkey(), [0x01, 0x09]);
}

#[test]
fn c77_what_the_peer_may_not_use_it_cannot_invalidate_0_2_09() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mr = b.app.pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
    cannot_invalidate(&b, mr.lkey(), [0x02, 0x09]);
}

fn cannot_invalidate(b: &Responder, stag: u32, code: [u8; 2]) {
    let mut peer = b.stream();
    b.recv(98, 0, 64);
    b.recv(99, 0, 64);
    let f = untagged([0x41, 0x44], stag, 0, 1, 0, b"");
    peer.send(&f);
    assert_eq!(peer.rest(), quoting(code, &f));
    drop(peer);
    let wc = b.app.wc();
    assert_eq!((wc.wr_id, wc.status), (98, WcStatus::REM_INV_REQ_ERR));
    b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
    b.disconnected();
    assert_eq!(b.app.wc().status, WcStatus::WR_FLUSH_ERR);
}

#[test]
fn c78_a_terminate_that_is_too_short_ends_the_stream_without_an_answer() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.send(&untagged([0x41, 0x47], 0, 2, 1, 0, &[0x11]));
    assert_eq!(peer.rest(), b"");
    drop(peer);
    b.broken(FATAL);
}

#[test]
fn c79_nothing_of_the_application_follows_a_terminate() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    b.begin(&mut peer);
    let f = write(true, 0x00bb_aa01, 0, b"whose");
    peer.send(&f);
    assert_eq!(
        peer.take(quoting([0x11, 0], &f).len()),
        quoting([0x11, 0], &f)
    );
    let sge = [b.app.mr.sge(0, 64)];
    // Flushed or refused, but never sent.
    let _ = b.app.qp.post_send(&[SendWr::send(3, SendData::Sges(&sge))]);
    assert_eq!(peer.rest(), b"");
}

#[test]
fn c37_c80_of_several_errors_the_first_is_told_and_no_other() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let first = write(true, 0x00bb_aa01, 0, b"unknown");
    let mut bad_crc = send(true, 1, 0, b"damaged");
    bad_crc[9] ^= 1;
    peer.send(&[&first[..], &send(true, 9, 0, b"skipped"), &bad_crc].concat());
    assert_eq!(peer.rest(), quoting([0x11, 0x00], &first));
    drop(peer);
    b.broken(ACCESS);
}

#[test]
fn c81_a_refused_read_request_is_quoted_with_both_headers() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let r = ReadRequest {
        src_stag: 0x00bb_aa01,
        ..request(&b, 8)
    };
    let f = r.message(1);
    let mut peer = b.stream();
    peer.send(&f);
    let mut quoted = vec![0, 46];
    quoted.extend(&f[2..20]);
    quoted.extend(r.octets());
    assert_eq!(peer.rest(), terminate([0x01, 0x00, 0xe0, 0], &quoted));
}

#[test]
fn c82_a_read_that_is_refused_in_its_middle_is_quoted_from_there() {
    skip_if!(lacks_network());
    // The data that TCP holds at the deregistration decides between the two endings; both are legal
    // and both are checked. `iwarp/tests/queue_pair/terminate_reads.rs` tests without a network that the
    // position is always right.
    let resets = (0..4).filter(|_| is_reset_in_its_middle()).count();
    println!("{resets} of 4 streams were reset");
}

/// The region of a Read Request is deregistered during the response. Either the Terminate quotes
/// the rest of the request, or the stream is reset, because TCP had accepted a segment whose
/// payload is no longer available. Returns whether it was reset.
fn is_reset_in_its_middle() -> bool {
    let b = Responder::new();
    const LEN: u32 = 16 << 20;
    let mr = b.app.pd.alloc_mr(LEN as usize, ALL).unwrap();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    // A small receive buffer, so that siwd cannot send the whole response.
    nix::sys::socket::setsockopt(&peer.0, nix::sys::socket::sockopt::RcvBuf, &8192).unwrap();
    let request = ReadRequest {
        size: LEN,
        src_stag: mr.rkey(),
        src_to: mr.addr(),
        ..request(&b, 0)
    };
    peer.send(&request.message(1));
    let mut done = 0;
    // Each segment of the response continues the previous one, and none is the last.
    let mut take_segment = |segment: &[u8]| {
        assert_eq!(segment[..2], [0x81, 0x42]);
        assert_eq!(segment[2..6], request.sink_stag.to_be_bytes());
        let position = request.sink_to + u64::from(done);
        assert_eq!(segment[6..14], position.to_be_bytes());
        assert!(segment[14..].iter().all(|&octet| octet == 0));
        done += (segment.len() - 14) as u32;
    };
    take_segment(&peer.take_fpdu());
    drop(mr);
    let end = loop {
        match peer.try_fpdu() {
            Ok(fpdu) if fpdu[1] == 0x42 => take_segment(&fpdu),
            end => break end,
        }
    };
    assert!(done < LEN, "the response ended after the deregistration");
    let is_reset = match end {
        Ok(told) => {
            let left = ReadRequest {
                sink_to: request.sink_to + u64::from(done),
                size: LEN - done,
                src_to: request.src_to + u64::from(done),
                ..request
            };
            assert_eq!(told[..2], [0x41, 0x47]);
            assert_eq!(told[18..22], [0x01, 0x00, 0xe0, 0]);
            assert_eq!(told[22 + 20..], left.octets());
            assert_eq!(peer.rest(), b"");
            false
        }
        Err(error) => {
            // Not a FIN: the peer must not take the truncated data for the whole.
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
            true
        }
    };
    drop(peer);
    if is_reset {
        // Either the refused request or the segment that could not be built is detected first.
        b.broken_by(&[ACCESS, FATAL]);
    } else {
        b.broken(ACCESS);
    }
    is_reset
}

/// An error that is not caused by a message of the peer has no header to quote.
#[test]
fn c83_an_error_of_this_side_is_told_by_terminate_0_0_00_without_headers() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    b.begin(&mut peer);
    let good = [b.app.mr.sge(0, 8)];
    // One octet beyond the region.
    let bad = [b.app.mr.sge(0, 8), b.app.mr.sge(0, 8)].map(|mut s| {
        s.addr += 65_536 - 7;
        s
    });
    let post = |wr_id, sges: &[siw::Sge]| {
        let wr = SendWr::write(wr_id, SendData::Sges(sges), 0x1000, 0x2000);
        b.app.qp.post_send(&[wr]).unwrap();
    };
    post(1, &good);
    post(2, &bad[..1]);
    post(3, &good);
    assert_eq!(peer.take_fpdu()[..2], [0xc1, 0x40], "the one in front");
    assert_eq!(peer.rest(), terminate([0x00, 0x00, 0, 0], b""));
    drop(peer);
    for (wr_id, status) in [
        (1, WcStatus::SUCCESS),
        (2, WcStatus::LOC_PROT_ERR),
        (3, WcStatus::WR_FLUSH_ERR),
    ] {
        let wc = b.app.wc();
        assert_eq!((wc.wr_id, wc.status), (wr_id, status));
    }
    b.broken(FATAL);
    // The same when the application asks for the Terminate.
    b.app.qp.reset().unwrap();
    let mut peer = b.stream();
    b.app.qp.modify(siw::QpState::Terminate).unwrap();
    b.begin(&mut peer);
    assert_eq!(peer.rest(), terminate([0x00, 0x00, 0, 0], b""));
}
