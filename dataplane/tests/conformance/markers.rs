//! Markers in the streams that siwd receives, at its request (RFC 5044 section 4.3).

use crate::bench::{CONFIG, Responder};
use crate::common::net::lacks_network;
use crate::common::peer::{C, M, Peer, S, request, send, terminate, with_markers, write};
use crate::skip_if;
use siw::{AsyncEventKind, WcStatus};

/// A stream in which the peer sends markers.
fn marked() -> (Responder, Peer) {
    let b = Responder::with(&format!("{CONFIG}markers = \"request\"\n"));
    let mut peer = b.peer();
    peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
    b.accept(b"");
    let (flags, _, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(flags, M | S | C, "siwd asks for markers");
    b.established();
    b.recv(99, 0, 64);
    (b, peer)
}

/// A Write of 600 octets as the first FPDU of the stream, with markers at 0 and 512. `change`
/// corrupts it before the CRC is computed.
fn first_write(b: &Responder, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut f = with_markers(&write(
        true,
        b.app.mr.rkey(),
        b.app.mr.addr() + 1000,
        &[7; 600],
    ));
    f.truncate(f.len() - 4);
    change(&mut f);
    let crc = crc32c::crc32c(&f);
    f.extend(crc.to_le_bytes());
    f
}

#[test]
fn c31_a_marker_that_points_elsewhere_is_answered_by_terminate_2_0_03() {
    skip_if!(lacks_network());
    let (b, mut peer) = marked();
    peer.send(&first_write(&b, |f| {
        f[514..516].copy_from_slice(&512u16.to_be_bytes())
    }));
    assert_eq!(peer.rest(), terminate([0x20, 0x03, 0, 0], b""));
    drop(peer);
    b.broken(AsyncEventKind::QpFatal);
    assert_eq!(b.app.read(1000, 600), [0; 600]);
}

#[test]
fn c32_c33_low_bits_of_the_pointer_and_reserved_bits_are_ignored() {
    skip_if!(lacks_network());
    let (b, mut peer) = marked();
    let w = first_write(&b, |f| {
        f[0..2].copy_from_slice(&[0xff, 0xff]);
        f[512..514].copy_from_slice(&[0x12, 0x34]);
        f[515] |= 3;
    });
    let behind = w.len();
    assert!(behind < 1024 - 60, "no marker within the Send");
    peer.send(&w);
    peer.send(&send(true, 1, 0, b"after"));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 5));
    assert_eq!(b.app.read(1000, 600), [7; 600]);
}

#[test]
fn c17_c34_a_stream_with_markers_may_be_cut_anywhere() {
    skip_if!(lacks_network());
    let (b, mut peer) = marked();
    let w = first_write(&b, |_| {});
    for part in w.chunks(97) {
        peer.send(part);
    }
    peer.send(&send(true, 1, 0, b"after"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.app.read(1000, 600), [7; 600]);
}
