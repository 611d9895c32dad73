//! FPDUs (RFC 5044 section 4): framing, CRC, and the end of a stream.

use crate::bench::{Responder, SILENCE};
use crate::common::net::lacks_network;
use crate::common::peer::{fpdu, send, terminate, write};
use crate::common::*;
use crate::skip_if;
use siw::{AsyncEventKind, WcStatus};

#[test]
fn c34_c35_an_fpdu_split_at_every_byte_and_several_in_one_segment_are_the_same_to_the_application()
{
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    for i in 0..4 {
        b.recv(i, i as usize * 64, 64);
    }
    let at = b.app.mr.addr() + 1000;
    let key = b.app.mr.rkey();
    peer.send_bytewise(&write(true, key, at, b"placed byte by byte"));
    peer.send_bytewise(&send(true, 1, 0, b"delivered"));
    let wc = b.app.wc();
    assert_eq!(
        (wc.status, wc.wr_id, wc.byte_len),
        (WcStatus::SUCCESS, 0, 9)
    );
    assert_eq!(b.app.read(1000, 19), b"placed byte by byte");

    // A message of two segments, a Write, and a message of one segment.
    let all = [
        send(false, 2, 0, b"in two "),
        send(true, 2, 7, b"segments"),
        write(true, key, at, b"together"),
        send(true, 3, 0, b""),
    ]
    .concat();
    peer.send(&all);
    let wc = b.app.wc();
    assert_eq!(
        (wc.status, wc.wr_id, wc.byte_len),
        (WcStatus::SUCCESS, 1, 15)
    );
    assert_eq!(b.app.read(64, 15), b"in two segments");
    let wc = b.app.wc();
    assert_eq!(
        (wc.status, wc.wr_id, wc.byte_len),
        (WcStatus::SUCCESS, 2, 0)
    );
    assert_eq!(b.app.read(1000, 8), b"together");
}

#[test]
fn c34_an_fpdu_cut_at_each_of_its_bytes_is_put_together() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    let text = b"two halves";
    let len = send(true, 1, 0, text).len();
    for cut in 1..len {
        b.recv(cut as u64, 0, 64);
        b.app.mr.write(0, &[0; 16]).unwrap();
        let f = send(true, cut as u32, 0, text);
        peer.send(&f[..cut]);
        peer.send(&f[cut..]);
        let wc = b.app.wc();
        assert_eq!(
            (wc.status, wc.wr_id, wc.byte_len),
            (WcStatus::SUCCESS, cut as u64, 10)
        );
        assert_eq!(b.app.read(0, 10), text);
    }
}

#[test]
fn fpdus_that_ignore_segments_carry_a_large_write() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    let data = pattern(77, 60_000);
    let at = b.app.mr.addr();
    // FPDU sizes unrelated to the segment size, some of them far longer.
    let mut stream = Vec::new();
    let mut sent = 0;
    for size in (1..).map(|i| [7, 9_001, 1, 20_000, 333][i % 5]) {
        let n = size.min(data.len() - sent);
        let last = sent + n == data.len();
        stream.extend(write(
            last,
            b.app.mr.rkey(),
            at + sent as u64,
            &data[sent..sent + n],
        ));
        sent += n;
        if last {
            break;
        }
    }
    stream.extend(send(true, 1, 0, b""));
    peer.send(&stream);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert!(b.app.read(0, data.len()) == data);
}

#[test]
fn c27_c79_a_bad_crc_is_answered_by_terminate_2_0_02_and_nothing_is_placed() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let mut f = write(true, b.app.mr.rkey(), b.app.mr.addr() + 512, b"corrupted");
    *f.last_mut().unwrap() ^= 1;
    peer.send(&f);
    let expected = [
        0x00, 0x16, // ULPDU_Length
        0x41, 0x47, 0, 0, 0, 0, // untagged, last, Terminate
        0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, // queue 2, MSN 1, MO 0
        0x20, 0x02, 0, 0, // MPA, 0, CRC; no headers
    ];
    assert_eq!(peer.take(24), expected);
    assert_eq!(peer.take(4), crc32c::crc32c(&expected).to_le_bytes());
    assert_eq!(peer.rest(), b"", "nothing follows a Terminate");
    drop(peer);
    b.broken(AsyncEventKind::QpFatal);
    assert_eq!(b.app.read(512, 9), [0; 9]);
}

#[test]
fn c40_c81_an_unknown_stag_is_answered_by_terminate_1_1_00_with_the_offending_header() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let f = write(true, 0x00bb_aa01, 0x1122_3344, b"whose");
    peer.send(&f);
    // M and D bits: the length of the segment and its header are quoted.
    let quoted = [&f[..2], &f[2..16]].concat();
    assert_eq!(peer.rest(), terminate([0x11, 0x00, 0xc0, 0], &quoted));
    drop(peer);
    b.broken(AsyncEventKind::QpAccessErr);
}

#[test]
fn c46_a_write_beyond_the_region_is_answered_by_terminate_1_1_01() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let f = write(true, b.app.mr.rkey(), b.app.mr.addr() + 65_530, b"too far");
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x11, 0x01, 0xc0, 0], &f[..16]));
    drop(peer);
    b.broken(AsyncEventKind::QpAccessErr);
}

#[test]
fn c54_a_send_without_a_receive_is_answered_by_terminate_1_2_02() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    let f = send(true, 1, 0, b"anybody?");
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x12, 0x02, 0xc0, 0], &f[..20]));
    let e = b.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(e.kind, Some(AsyncEventKind::QpReqErr), "{e:?}");
    drop(peer);
    b.disconnected();
}

#[test]
fn c30_a_ulpdu_shorter_than_its_header_is_answered_by_terminate_2_0_03() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.send(&fpdu(&[0xc1, 0x40, 0, 0]));
    assert_eq!(peer.rest(), terminate([0x20, 0x03, 0, 0], b""));
    drop(peer);
    b.broken(AsyncEventKind::QpFatal);
}

#[test]
fn c59_a_message_longer_than_its_receive_is_answered_by_terminate_1_2_05() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(7, 0, 4);
    b.recv(99, 64, 4);
    let f = send(true, 1, 0, b"longer than four");
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x12, 0x05, 0xc0, 0], &f[..20]));
    drop(peer);
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.wr_id), (WcStatus::LOC_LEN_ERR, 7));
    b.broken(AsyncEventKind::QpReqErr);
    assert_eq!(b.app.read(0, 8), [0; 8]);
}

#[test]
fn the_longest_ulpdu_is_waited_for_and_delivered() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 65_536);
    let data = pattern(3, usize::from(u16::MAX) - 18);
    peer.send(&send(true, 1, 0, &data));
    let wc = b.app.wc();
    assert_eq!(
        (wc.status, wc.byte_len as usize),
        (WcStatus::SUCCESS, data.len())
    );
    assert!(b.app.read(0, data.len()) == data);
}

#[test]
fn c36_an_end_within_an_fpdu_is_an_error_of_the_connection() {
    skip_if!(lacks_network());
    for reset in [false, true] {
        let b = Responder::new();
        let mut peer = b.stream();
        b.recv(99, 0, 64);
        let f = send(true, 1, 0, b"cut short");
        peer.send(&f[..f.len() - 3]);
        if reset {
            peer.reset();
        } else {
            peer.fin();
            assert_eq!(
                peer.rest(),
                b"",
                "a lost stream is not terminated (local 2/0/01)"
            );
        }
        b.broken(AsyncEventKind::QpFatal);
    }
}

#[test]
fn an_oversized_length_never_completes_and_ends_with_the_stream() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.send(&[0xff, 0xff, 0xc1, 0x40]);
    peer.send(&[0; 5000]);
    peer.is_quiet(SILENCE);
    peer.fin();
    assert_eq!(peer.rest(), b"");
    b.broken(AsyncEventKind::QpFatal);
}

#[test]
fn a_terminate_from_the_peer_ends_the_connection_with_its_reason() {
    skip_if!(lacks_network());
    // In the RFC's order of the nibbles, in that of Linux siw, and with the layer and type that
    // hardware uses for MPA errors.
    for first in [0x20, 0x02, 0x23] {
        let b = Responder::new();
        let mut peer = b.stream();
        b.recv(99, 0, 64);
        peer.send(&terminate([first, 0x02, 0, 0], b""));
        assert_eq!(peer.rest(), b"", "no Terminate answers a Terminate");
        drop(peer);
        b.broken(AsyncEventKind::QpFatal);
    }
}

#[test]
fn an_orderly_end_of_the_peer_is_a_disconnect_without_an_error() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.fin();
    assert_eq!(peer.rest(), b"");
    b.disconnected();
    assert_eq!(b.app.wc().status, WcStatus::WR_FLUSH_ERR);
    let e = b.app.ctx.get_async_event(Some(SILENCE));
    assert!(matches!(e, Err(siw::Error::Timeout)), "{e:?}");
}

#[test]
fn c29_a_pad_that_is_not_zero_is_ignored_and_counts_into_the_crc() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    b.recv(99, 0, 16);
    let padded = |msn, pad: [u8; 3]| {
        let mut f = send(true, msn, 0, b"12345");
        let crc = f.len() - 4;
        f.truncate(crc);
        f[crc - 3..].copy_from_slice(&pad);
        let sum = crc32c::crc32c(&f);
        f.extend(sum.to_le_bytes());
        f
    };
    peer.send(&padded(1, [1, 2, 3]));
    assert_eq!(b.app.wc().byte_len, 5);
    let mut f = padded(2, [0; 3]);
    let at = f.len() - 5;
    f[at] = 9;
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x20, 0x02, 0, 0], b""));
    drop(peer);
    b.broken(AsyncEventKind::QpFatal);
}
