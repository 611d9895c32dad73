//! siwd connects to listeners on Linux sockets: most send faulty replies, one hand-written listener
//! a correct one.

use std::time::{Duration, Instant};

use crate::bench::{CONFIG, Initiator, impatient};
use crate::common::net::lacks_network;
use crate::common::peer::{C, M, Peer, R, S, fpdu, reply, request, terminate, with_markers, write};
use crate::common::*;
use crate::skip_if;
use siw::{
    CmEvent, CmListener, ConnectOptions, ListenOptions, Opcode, SendData, SendWr, WcStatus, WrFlags,
};

#[test]
fn the_request_is_what_hardware_and_linux_want_and_the_ready_to_receive_comes_first() {
    skip_if!(lacks_network());
    for addr in ["10.77.0.2:0", "[fd77::2]:0"] {
        let b = Initiator::at(addr);
        let opt = ConnectOptions {
            private_data: b"hi",
            ord: 4,
            ird: 4,
            ..Default::default()
        };
        b.connect(&opt);
        let mut peer = Peer::accept(&b.listener);
        let (flags, rev, data) = peer.take_mpa(b"MPA ID Req Frame");
        // A with IRD 4; C and D with ORD 4.
        assert_eq!(
            (flags, rev, &data[..]),
            (S | C | 0x08, 2, &[0x80, 4, 0xc0, 4, b'h', b'i'][..])
        );
        peer.send(&reply(S | C, 2, &[0x80, 4, 0x80, 4, b'y', b'o']));
        let info = b.established();
        assert_eq!(
            (&info.private_data[..], info.mpa_rev, info.crc),
            (&b"yo"[..], 2, true)
        );
        assert_eq!((info.ird, info.ord), (4, 4));
        let rtr = peer.take_fpdu();
        assert_eq!(
            (&rtr[..2], rtr.len()),
            (&[0xc1, 0x40][..], 14),
            "a zero-length Write"
        );
        assert_ne!(rtr[2..6], [0; 4], "hardware refuses STag 0");

        b.app.mr.write(0, b"from the application").unwrap();
        let wr = SendWr {
            opcode: Opcode::Write,
            flags: WrFlags::SIGNALED,
            wr_id: 8,
            imm: 0,
            remote_addr: 0x0102_0304_0506_0708,
            rkey: 0x0a0b_0c0d,
            data: SendData::Sges(&[b.app.mr.sge(0, 20)]),
        };
        b.app.qp.post_send(&[wr]).unwrap();
        let mut expected = vec![0xc1, 0x40, 10, 11, 12, 13, 1, 2, 3, 4, 5, 6, 7, 8];
        expected.extend(b"from the application");
        assert_eq!(peer.take_fpdu(), expected);
        assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
    }
}

#[test]
fn a_responder_without_ready_to_receive_is_met_without_it() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    // Like a reply of Linux siw with A clear: no RTR.
    let mut peer = b.answer(&reply(S, 2, &[0, 1, 0, 1]));
    let info = b.established();
    assert!(info.crc, "asked for by this side");
    let sge = [b.app.mr.sge(0, 4)];
    b.app
        .qp
        .post_send(&[SendWr::send(1, SendData::Sges(&sge))])
        .unwrap();
    assert_eq!(
        peer.take_fpdu()[..2],
        [0x41, 0x43],
        "a Send, and nothing before it"
    );
}

#[test]
fn a_responder_that_asks_for_markers_gets_them_from_the_first_fpdu_on() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mut peer = b.answer(&reply(M | S | C, 2, &[0x80, 1, 0x80, 1]));
    b.established();
    let rtr = with_markers(&write(true, 1, 0, b""));
    assert_eq!(peer.take(rtr.len()), rtr);
}

#[test]
fn garbage_instead_of_a_reply_is_a_connect_error_that_says_so() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    for (answer, words) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            "wrong MPA key",
        ),
        (request(S | C, 2, &[0, 1, 0, 1]), "initiator"),
        (reply(C, 2, b""), "enhanced"),
        (reply(S | C, 3, &[0, 1, 0, 1]), "revision 3"),
        (
            [&b"MPA ID Rep Frame"[..], &[C, 1, 0xff, 0xff]].concat(),
            "private data",
        ),
    ] {
        let mut peer = b.answer(&answer);
        b.fails(words);
        assert_eq!(peer.rest(), b"", "{words}");
    }
    // The queue pair can connect again, this time successfully.
    let _peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1]));
    b.established();
}

#[test]
fn c16_a_reject_brings_the_private_data_of_the_peer() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let mut peer = b.answer(&reply(R | S | C, 2, &[0, 1, 0, 1, b'n', b'o']));
    match b.event() {
        CmEvent::Rejected(i) => assert_eq!(i.private_data, b"no"),
        other => panic!("{other:?}"),
    }
    assert_eq!(peer.rest(), b"");
}

#[test]
fn c22_an_unusable_reply_with_a_ready_to_receive_nobody_offered_is_terminated() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    // A and B: a zero-length Send, which siwd had not offered.
    let mut peer = b.answer(&reply(S | C, 2, &[0xc0, 1, 0, 1]));
    let t = peer.take_fpdu();
    assert_eq!(
        t[18..22],
        [0x20, 0x07, 0, 0],
        "no matching ready-to-receive: 2/0/07"
    );
    assert_eq!(peer.rest(), b"");
    b.fails("ready-to-receive");
}

#[test]
fn a_reset_of_revision_2_leads_to_a_second_attempt_with_revision_1() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    b.connect(&ConnectOptions {
        private_data: b"again",
        ..Default::default()
    });
    let mut first = Peer::accept(&b.listener);
    let (_, rev, data) = first.take_mpa(b"MPA ID Req Frame");
    assert_eq!((rev, &data[4..]), (2, &b"again"[..]));
    first.reset();
    let mut second = Peer::accept(&b.listener);
    let (flags, rev, data) = second.take_mpa(b"MPA ID Req Frame");
    assert_eq!((flags, rev, &data[..]), (C, 1, &b"again"[..]));
    second.send(&reply(C, 1, b"old"));
    let info = b.established();
    assert_eq!((info.mpa_rev, &info.private_data[..]), (1, &b"old"[..]));
    let sge = [b.app.mr.sge(0, 4)];
    b.app
        .qp
        .post_send(&[SendWr::send(1, SendData::Sges(&sge))])
        .unwrap();
    assert_eq!(second.take_fpdu()[..2], [0x41, 0x43]);
}

#[test]
fn a_peer_that_always_resets_is_tried_twice_and_told() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    b.connect(&ConnectOptions::default());
    for _ in 0..2 {
        let mut peer = Peer::accept(&b.listener);
        peer.take_mpa(b"MPA ID Req Frame");
        peer.reset();
    }
    b.fails("closed the connection during set-up");
    b.listener.set_nonblocking(true).unwrap();
    assert!(b.listener.accept().is_err(), "no third attempt");
}

#[test]
fn a_peer_that_closes_instead_of_answering_is_told_and_not_tried_again() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    b.connect(&ConnectOptions::default());
    let mut peer = Peer::accept(&b.listener);
    peer.take_mpa(b"MPA ID Req Frame");
    drop(peer);
    b.fails("closed the connection during set-up");
}

#[test]
fn c13_a_peer_that_never_answers_is_unreachable_after_the_reply_timeout() {
    skip_if!(lacks_network());
    let b = Initiator::with(&impatient());
    let began = Instant::now();
    let mut peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1])[..19]);
    match b.event() {
        CmEvent::Unreachable(i) => assert!(i.reason.contains("did not answer in time"), "{i:?}"),
        other => panic!("{other:?}"),
    }
    assert!(
        began.elapsed() > Duration::from_millis(600),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(peer.rest(), b"");
}

#[test]
fn a_closed_port_and_an_absent_host_are_told_apart() {
    skip_if!(lacks_network());
    let Initiator {
        app,
        listener,
        to,
        ns: _ns,
        _siwd,
    } = Initiator::new();
    drop(listener);
    app.qp
        .connect(&app.cm, to, &ConnectOptions::default())
        .unwrap();
    match app.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Rejected(i) => assert!(i.reason.contains("nothing listens"), "{i:?}"),
        other => panic!("{other:?}"),
    }
    let absent = "10.77.0.200:7174".parse().unwrap();
    app.qp
        .connect(&app.cm, absent, &ConnectOptions::default())
        .unwrap();
    match app.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Unreachable(i) => assert!(i.reason.contains("no neighbour"), "{i:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn c23_a_responder_that_reads_deeper_than_the_device_may_is_terminated_with_2_0_06() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    // ORD 200; a device supports at most 128.
    let mut peer = b.answer(&reply(S | C, 2, &[0x80, 1, 0x80, 200]));
    let t = peer.take_fpdu();
    assert_eq!(t[18..22], [0x20, 0x06, 0, 0]);
    assert_eq!(peer.rest(), b"");
    b.fails("exceeds the 128 inbound reads");
}

#[test]
fn c26_a_reply_that_this_side_cannot_do_as_it_says_is_terminated_with_2_0_05() {
    skip_if!(lacks_network());
    // The reply asks for markers, which the device does not send. The peer expects one before the
    // Terminate.
    let b = Initiator::with(&format!("{CONFIG}markers = \"never\"\n"));
    let mut peer = b.answer(&reply(M | S | C, 2, &[0, 1, 0, 1]));
    let told = terminate([0x20, 0x05, 0, 0], b"");
    assert_eq!(peer.rest(), with_markers(&told));
    b.fails("markers");
    // A reply without CRC, although the device requires it.
    let b = Initiator::with(&format!("{CONFIG}crc = \"required\"\n"));
    let mut peer = b.answer(&reply(S, 2, &[0, 1, 0, 1]));
    assert_eq!(peer.rest(), told);
    b.fails("CRC");
    let _peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1]));
    assert!(b.established().crc);
}

#[test]
fn an_application_cannot_do_without_a_crc_that_its_device_requires() {
    skip_if!(lacks_network());
    let b = Initiator::with(&format!("{CONFIG}crc = \"required\"\n"));
    let without = ConnectOptions {
        crc: Some(false),
        ..Default::default()
    };
    let e = b.app.qp.connect(&b.app.cm, b.to, &without).err().unwrap();
    assert!(e.to_string().contains("siw0 requires CRC"), "{e}");
    let listen = ListenOptions {
        crc: Some(false),
        ..Default::default()
    };
    let any = "10.77.0.1:0".parse().unwrap();
    let e = CmListener::new_with_options(&b.app.cm, any, &listen)
        .err()
        .unwrap();
    assert!(e.to_string().contains("siw0 requires CRC"), "{e}");
}

#[test]
fn a_connect_waits_for_its_reply_as_long_as_the_application_says() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    let began = Instant::now();
    b.connect(&ConnectOptions {
        timeout: Some(Duration::from_millis(100)),
        ..Default::default()
    });
    let mut peer = Peer::accept(&b.listener);
    match b.event() {
        CmEvent::Unreachable(i) => assert!(i.reason.contains("did not answer in time"), "{i:?}"),
        other => panic!("{other:?}"),
    }
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "longer than half of the device's time limit: {:?}",
        began.elapsed()
    );
    peer.take_mpa(b"MPA ID Req Frame");
    assert_eq!(peer.rest(), b"");
}

/// Each ready-to-receive kind, sent by siwd as the initiator (RFC 6581 section 9).
#[test]
fn the_ready_to_receive_that_the_reply_names_is_sent_before_anything_else() {
    skip_if!(lacks_network());
    // Flag B is next to the IRD, C and D are next to the ORD.
    for (kind, b_flag, cd, control) in [
        ("send", 0xc0, 0x00, [0x41, 0x43]),
        ("write", 0x80, 0x80, [0xc1, 0x40]),
        ("read", 0x80, 0x40, [0x41, 0x41]),
    ] {
        let b = Initiator::with(&format!("{CONFIG}rtr = [\"{kind}\"]\n"));
        b.connect(&ConnectOptions::default());
        let mut peer = Peer::accept(&b.listener);
        let (_, _, data) = peer.take_mpa(b"MPA ID Req Frame");
        assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (b_flag, cd), "{kind}");
        peer.send(&reply(S | C, 2, &[b_flag, 4, cd, 4]));
        b.established();
        let sge = [b.app.mr.sge(0, 4)];
        b.app
            .qp
            .post_send(&[SendWr::send(1, SendData::Sges(&sge))])
            .unwrap();
        let rtr = peer.take_fpdu();
        assert_eq!(rtr[..2], control, "{kind}");
        let empty = match kind {
            "send" => rtr.len() == 18,
            "write" => rtr.len() == 14,
            _ => rtr.len() == 46 && rtr[30..34] == [0; 4],
        };
        assert!(empty, "{kind}: {rtr:02x?}");
        if kind == "read" {
            let mut answer = vec![0xc1, 0x42];
            answer.extend(&rtr[18..30]);
            peer.send(&fpdu(&answer));
        }
        // The ready-to-receive Send used message number 1.
        let u = peer.take_fpdu();
        let msn = 1 + u32::from(kind == "send");
        assert_eq!(
            (&u[..2], &u[10..14]),
            (&[0x41, 0x43][..], &msn.to_be_bytes()[..])
        );
        let wc = b.app.wc();
        assert_eq!(
            (wc.status, wc.wr_id),
            (WcStatus::SUCCESS, 1),
            "and no other"
        );
    }
}

#[test]
fn an_initiator_whose_queue_pair_goes_in_set_up_closes() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    b.connect(&ConnectOptions::default());
    let mut peer = Peer::accept(&b.listener);
    peer.take_mpa(b"MPA ID Req Frame");
    let Initiator { app, .. } = b;
    drop(app.qp);
    assert_eq!(peer.rest(), b"");
}

#[test]
fn a_connect_ends_when_its_queue_pair_moves_to_error() {
    skip_if!(lacks_network());
    let b = Initiator::new();
    b.connect(&ConnectOptions::default());
    let mut peer = Peer::accept(&b.listener);
    peer.take_mpa(b"MPA ID Req Frame");
    b.app.qp.set_error().unwrap();
    b.fails("during set-up");
    assert_eq!(peer.rest(), b"");
}
