//! MPA requests (RFC 5044 section 7.1, RFC 6581) to siwd's listener.

use std::time::Duration;

use crate::bench::{CONFIG, Responder, SILENCE, impatient};
use crate::common::net::lacks_network;
use crate::common::peer::{C, M, R, S, mpa, reply, request, send, with_markers, write};
use crate::common::*;
use crate::skip_if;
use siw::{CmEvent, SendData, SendWr, WcStatus};

#[test]
fn c4_c5_a_revision_1_request_is_accepted_with_a_revision_1_reply() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(C, 1, b"hello"));
    assert_eq!(b.accept(b"welcome").private_data, b"hello");
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev, &data[..]), (C, 1, &b"welcome"[..]));
    let info = b.established();
    assert_eq!((info.mpa_rev, info.crc), (1, true));
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b"revision one"));
    let wc = b.app.wc();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::SUCCESS, 12));
    assert_eq!(b.app.read(0, 12), b"revision one");
}

#[test]
fn c6_c21_a_revision_2_request_is_answered_with_depths_and_one_ready_to_receive_kind() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    // A, IRD 4; C and D, ORD 2: peer-to-peer, by Write or Read.
    let mut data = vec![0x80, 4, 0xc0, 2];
    data.extend(b"two");
    peer.send(&request(S | C, 2, &data));
    let info = b.accept(b"");
    assert_eq!(
        (&info.private_data[..], info.ird, info.ord),
        (&b"two"[..], 2, 4)
    );
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev), (S | C, 2));
    let (ird, ord) = (
        u16::from_be_bytes([data[0], data[1]]),
        u16::from_be_bytes([data[2], data[3]]),
    );
    assert_eq!(ird & 0xc000, 0x8000, "A, not B");
    assert!(
        matches!(ord & 0xc000, 0x8000 | 0x4000),
        "exactly one of C and D: {ord:#x}"
    );
    assert!((2..=128).contains(&(ird & 0x3fff)) && (ird & 0x3fff).is_power_of_two());
    assert_eq!(ord & 0x3fff, 4, "no more reads than the initiator holds");
    let info = b.established();
    assert_eq!((info.mpa_rev, info.ord), (2, 4));
    // The ready-to-receive Write: zero-length, with an invalid STag.
    peer.send(&write(true, 1, 0, b""));
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b"after it"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

/// Each ready-to-receive kind, received by siwd as the responder (RFC 6581 section 9): none of them
/// consumes a receive work request, and siwd may send afterwards.
#[test]
fn a_ready_to_receive_of_every_kind_opens_the_stream_and_takes_no_receive() {
    skip_if!(lacks_network());
    for (kind, b_flag, cd) in [
        ("send", 0xc0, 0x00),
        ("write", 0x80, 0x80),
        ("read", 0x80, 0x40),
    ] {
        let b = Responder::with(&format!("{CONFIG}rtr = [\"{kind}\"]\n"));
        let mut peer = b.peer();
        peer.send(&request(S | C, 2, &[0xc0, 4, 0xc0, 4]));
        b.accept(b"");
        let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
        assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (b_flag, cd), "{kind}");
        b.established();
        b.recv(1, 0, 64);
        let sge = [b.app.mr.sge(0, 4)];
        b.app
            .qp
            .post_send(&[SendWr::send(2, SendData::Sges(&sge))])
            .unwrap();
        let empty_read = crate::common::peer::ReadRequest {
            sink_stag: 1,
            sink_to: 0,
            size: 0,
            src_stag: 1,
            src_to: 0,
        };
        peer.send(&match kind {
            "send" => send(true, 1, 0, b""),
            "write" => write(true, 1, 0, b""),
            _ => empty_read.message(1),
        });
        // The two may arrive in either order.
        let mut first = peer.take_fpdu();
        if kind == "read" {
            let second = peer.take_fpdu();
            let answer = if first[1] == 0x42 { &first } else { &second };
            assert_eq!((&answer[..2], answer.len()), (&[0xc1, 0x42][..], 14));
            if first[1] == 0x42 {
                first = second;
            }
        }
        assert_eq!(first[..2], [0x41, 0x43], "{kind}");
        assert_eq!(b.app.wc().wr_id, 2, "{kind}: the Send of this side");
        let msn = 1 + u32::from(kind == "send");
        peer.send(&send(true, msn, 0, b"first"));
        let wc = b.app.wc();
        assert_eq!((wc.wr_id, wc.byte_len), (1, 5), "{kind}");
    }
}

#[test]
fn c4_c5_revision_2_without_enhanced_data_is_answered_without() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(C, 2, b"plain"));
    assert_eq!(b.accept(b"").private_data, b"plain");
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame"), (C, 2, vec![]));
    b.established();
}

#[test]
fn c18_crc_is_used_when_only_the_device_asks_for_it() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(S, 2, &[0, 1, 0, 1]));
    b.accept(b"");
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame").0, S | C);
    assert!(b.established().crc);
}

#[test]
fn c1_c2_c3_c9_c10_wrong_frames_close_the_connection_and_the_application_hears_nothing() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for (what, frame) in [
        ("a wrong key", mpa(b"MPA ID Rex Frame", C, 1, b"")),
        ("a reply", reply(C, 1, b"")),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: siwd\r\n\r\n".to_vec()),
        ("revision 3", request(C, 3, b"")),
        ("revision 0", request(C, 0, b"")),
        ("S with three bytes", request(S | C, 2, &[0, 0, 0])),
        ("trailing bytes", [request(C, 1, b""), vec![0; 8]].concat()),
    ] {
        let mut peer = b.peer();
        peer.send(&frame);
        assert_eq!(peer.rest(), b"", "{what} gets no answer");
    }
    b.nothing_heard();
    b.goes_on();
}

#[test]
fn c17_a_peer_that_asks_for_markers_gets_them_every_512_bytes() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(M | C, 1, b""));
    b.accept(b"");
    let (flags, _, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(flags, C, "siwd itself asks for none");
    b.established();
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b"first"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);

    b.app.fill(9);
    let sge = [b.app.mr.sge(0, 1200)];
    let wr = SendWr::send(2, SendData::Sges(&sge));
    b.app.qp.post_send(&[wr]).unwrap();
    let expected = with_markers(&send(true, 1, 0, &b.app.read(0, 1200)));
    assert_eq!(peer.take(expected.len()), expected);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn a_device_without_markers_rejects_a_request_for_them_with_a_reply() {
    skip_if!(lacks_network());
    let b = Responder::with(&format!("{CONFIG}markers = \"never\"\n"));
    let mut peer = b.peer();
    peer.send(&request(M | C, 1, b""));
    let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags & R, rev), (R, 1));
    assert_eq!(peer.rest(), b"");
    b.nothing_heard();
}

#[test]
fn c7_c8_private_data_of_512_bytes_arrives_and_513_close() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let most = pattern(5, 512);
    let mut peer = b.peer();
    peer.send(&request(C, 1, &most));
    assert_eq!(b.accept(&most).private_data, most);
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame"), (C, 1, most));
    b.established();
    let mut peer = b.peer();
    peer.send(&request(C, 1, &pattern(5, 513)));
    assert_eq!(peer.rest(), b"");
    b.nothing_heard();
}

#[test]
fn c11_a_request_in_single_bytes_is_accepted() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send_bytewise(&request(S | C, 2, &[0, 1, 0, 1, 7]));
    assert_eq!(b.accept(b"").private_data, [7]);
    peer.take_mpa(b"MPA ID Rep Frame");
    b.established();
}

#[test]
fn c12_a_peer_that_never_asks_is_closed_after_the_request_timeout() {
    skip_if!(lacks_network());
    let b = Responder::with(&impatient());
    let began = std::time::Instant::now();
    let (mut silent, mut slow) = (b.peer(), b.peer());
    slow.send(&request(C, 1, b"")[..10]);
    assert_eq!(silent.rest(), b"");
    assert_eq!(slow.rest(), b"");
    assert!(
        began.elapsed() > Duration::from_millis(600),
        "{:?}",
        began.elapsed()
    );
    b.nothing_heard();
    b.goes_on();
}

#[test]
fn a_rejected_peer_gets_the_reason_and_the_end() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(S | C, 2, &[0, 1, 0, 1]));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    r.reject(b"no room").unwrap();
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(
        (flags & (R | S), rev, &data[4..]),
        (R | S, 2, &b"no room"[..])
    );
    assert_eq!(peer.rest(), b"");
}

#[test]
fn a_peer_that_leaves_before_the_answer_cancels_its_request() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(C, 1, b""));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    peer.reset();
    match b.event() {
        CmEvent::RequestCancelled { request } => assert_eq!(request, r.id()),
        other => panic!("{other:?}"),
    }
    b.goes_on();
}

#[test]
fn c14_c15_reserved_bits_and_a_reject_bit_in_a_request_are_ignored() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(S | C | R | 0x0f, 2, &[0, 1, 0, 1]));
    b.accept(b"");
    let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev), (S | C, 2));
    b.established();
}

#[test]
fn c18_crc_is_off_only_when_nobody_wants_it() {
    skip_if!(lacks_network());
    for (device, asked, on) in [
        ("off", false, false),
        ("off", true, true),
        ("on", false, true),
        ("on", true, true),
        ("required", false, true),
    ] {
        let b = Responder::with(&format!("{CONFIG}crc = \"{device}\"\n"));
        let mut peer = b.peer();
        peer.send(&request(if asked { C } else { 0 }, 1, b""));
        b.accept(b"");
        assert_eq!(
            peer.take_mpa(b"MPA ID Rep Frame").0 & C != 0,
            on,
            "{device} {asked}"
        );
        assert_eq!(b.established().crc, on);
    }
}

#[test]
fn c28_without_crc_any_field_is_accepted_and_zero_is_sent() {
    skip_if!(lacks_network());
    let b = Responder::with(&format!("{CONFIG}crc = \"off\"\n"));
    let mut peer = b.peer();
    peer.send(&request(0, 1, b""));
    b.accept(b"");
    peer.take_mpa(b"MPA ID Rep Frame");
    b.established();
    b.recv(1, 0, 64);
    let mut f = send(true, 1, 0, b"unchecked");
    let at = f.len() - 4;
    f[at..].copy_from_slice(&[1, 2, 3, 4]);
    peer.send(&f);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    assert_eq!(b.app.read(0, 9), b"unchecked");
    let sge = [b.app.mr.sge(0, 6)];
    b.app
        .qp
        .post_send(&[SendWr::send(2, SendData::Sges(&sge))])
        .unwrap();
    let f = peer.take(2 + 18 + 6 + 2 + 4);
    assert_eq!((&f[..4], &f[28..]), (&[0, 24, 0x41, 0x43][..], &[0; 4][..]));
}

#[test]
fn c19_a_responder_sends_nothing_before_the_initiators_first_fpdu() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.stream();
    let sge = [b.app.mr.sge(0, 8)];
    b.app
        .qp
        .post_send(&[SendWr::send(2, SendData::Sges(&sge))])
        .unwrap();
    peer.is_quiet(SILENCE);
    peer.send(&write(true, 1, 0, b""));
    assert_eq!(peer.take_fpdu()[..2], [0x41, 0x43]);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn c20_without_a_the_other_flags_do_not_count() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    // B, C and D set, A clear.
    peer.send(&request(S | C, 2, &[0x40, 4, 0xc0, 4]));
    b.accept(b"");
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (0, 0));
    let info = b.established();
    assert_eq!((info.ord, info.ird >= 4), (4, true));
}

#[test]
fn c22_a_request_whose_ready_to_receive_the_device_has_not_is_rejected() {
    skip_if!(lacks_network());
    let b = Responder::with(&format!("{CONFIG}rtr = [\"write\"]\n"));
    let mut peer = b.peer();
    // A; D only: Read.
    peer.send(&request(S | C, 2, &[0x80, 4, 0x40, 4]));
    let (flags, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(flags & R, R);
    // A; C only: the kind that the device supports.
    assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (0x80, 0x80));
    assert_eq!(peer.rest(), b"");
    b.nothing_heard();
}

#[test]
fn c24_a_ready_to_receive_read_finds_room_though_no_reads_are_wanted() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    // A; D with ORD 0.
    peer.send(&request(S | C, 2, &[0x80, 0, 0x40, 0]));
    b.accept(b"");
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    let ird = u16::from_be_bytes([data[0], data[1]]) & 0x3fff;
    assert!(ird >= 1);
    assert_eq!(data[2] & 0xc0, 0x40, "exactly D");
    b.established();
    let rtr = crate::common::peer::ReadRequest {
        sink_stag: 1,
        sink_to: 0,
        size: 0,
        src_stag: 1,
        src_to: 0,
    };
    peer.send(&rtr.message(1));
    assert_eq!(peer.take_fpdu()[..2], [0xc1, 0x42]);
}

#[test]
fn c25_depths_that_say_unknown_are_echoed() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let mut peer = b.peer();
    peer.send(&request(S | C, 2, &[0x3f, 0xff, 0x3f, 0xff]));
    b.accept(b"");
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(data[..4], [0x3f, 0xff, 0x3f, 0xff]);
    let info = b.established();
    assert!(
        info.ird >= 1 && info.ird <= 128 && info.ord <= 128,
        "{info:?}"
    );
}
