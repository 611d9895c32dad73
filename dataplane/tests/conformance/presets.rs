//! Settings of devices and listeners, tested with peers that behave like the products behind the
//! presets (protocol facts of Linux siw, Chelsio cxgb4 and Intel irdma).

use std::net::SocketAddr;
use std::time::Duration;

use crate::bench::{CONFIG, Initiator, Responder, SILENCE};
use crate::common::net::lacks_network;
use crate::common::peer::{C, M, Peer, R, S, reply, request, terminate, write};
use crate::common::*;
use crate::skip_if;
use siw::{
    CmEvent, CmListener, ConnectOptions, ListenOptions, Markers, PeerPreset, ReadyToReceive,
    SendData, SendWr, TerminateOrder,
};

fn preset(name: &str) -> String {
    format!("{CONFIG}preset = \"{name}\"\n")
}

#[test]
fn with_the_siw_preset_terminates_go_out_as_linux_siw_reads_them() {
    skip_if!(lacks_network());
    let b = Responder::with(&preset("siw"));
    let mut peer = b.stream();
    let f = write(true, 0x00bb_aa01, 0, b"whose");
    peer.send(&f);
    // M and D at the low end of the octet, where siw's bit fields begin.
    assert_eq!(peer.rest(), terminate([0x11, 0x00, 0x03, 0], &f[..16]));
    drop(peer);
    b.disconnected();
    b.app.qp.reset().unwrap();
    let mut peer = b.stream();
    let mut f = write(true, b.app.mr.rkey(), b.app.mr.addr(), b"damaged");
    *f.last_mut().unwrap() ^= 1;
    peer.send(&f);
    // Layer 2, type 0, as Linux siw writes it.
    assert_eq!(peer.rest(), terminate([0x02, 0x02, 0, 0], b""));
}

#[test]
fn with_the_siw_preset_a_refused_reply_is_told_in_the_same_order() {
    skip_if!(lacks_network());
    let b = Initiator::with(&preset("siw"));
    let mut peer = b.answer(&reply(S | C, 2, &[0x80, 1, 0x80, 200]));
    assert_eq!(peer.take_fpdu()[18..22], [0x02, 0x06, 0, 0]);
}

/// Linux siw may not process data that arrives directly after its reply until more data arrives.
#[test]
fn with_the_siw_preset_a_peer_that_accepts_and_is_silent_gets_writes_of_nothing() {
    skip_if!(lacks_network());
    let b = Initiator::with(&preset("siw"));
    let mut peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1]));
    b.established();
    for _ in 0..2 {
        let woken = peer.take_fpdu();
        assert_eq!((&woken[..2], woken.len()), (&[0xc1, 0x40][..], 14));
        assert_ne!(woken[2..6], [0; 4], "hardware refuses STag 0");
    }
}

#[test]
fn a_peer_that_has_sent_something_is_not_woken_nor_is_any_by_default() {
    skip_if!(lacks_network());
    let b = Initiator::with(&format!("{CONFIG}wake_silent_peer_ms = 700\n"));
    let mut peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1]));
    b.established();
    assert_eq!(peer.take_fpdu()[..2], [0xc1, 0x40]);
    peer.send(&write(true, 1, 0, b""));
    // The next one would be due after 1.4 s.
    peer.is_quiet(Duration::from_secs(2));

    let b = Initiator::new();
    let mut peer = b.answer(&reply(S | C, 2, &[0, 1, 0, 1]));
    b.established();
    peer.is_quiet(SILENCE);
}

/// Programs on Linux siw may connect and wait for the accepting side, as between two siws: perftest's
/// ib_write_lat does.
#[test]
fn with_the_siw_preset_a_peer_that_connects_and_is_silent_gets_what_the_program_sends() {
    skip_if!(lacks_network());
    let send_first = |b: &Responder| {
        let sge = [b.app.mr.sge(0, 4)];
        let wr = SendWr::write(1, SendData::Sges(&sge), 0x1000, 7);
        b.app.qp.post_send(&[wr]).unwrap();
    };
    let b = Responder::with(&preset("siw"));
    let mut peer = b.stream();
    send_first(&b);
    assert_eq!(peer.take_fpdu()[..6], [0xc1, 0x40, 0, 0, 0, 7]);
    // An RTR message that was agreed comes, and is waited for.
    let mut peer = b.peer();
    b.app.qp.reset().unwrap();
    peer.send(&request(S | C, 2, &[0x80, 4, 0xc0, 4]));
    b.accept(b"");
    peer.take_mpa(b"MPA ID Rep Frame");
    b.established();
    send_first(&b);
    peer.is_quiet(SILENCE);

    // By default a peer has to send first, however long it takes.
    let b = Responder::new();
    let mut peer = b.stream();
    send_first(&b);
    peer.is_quiet(SILENCE);
    b.begin(&mut peer);
    assert_eq!(peer.take_fpdu()[..6], [0xc1, 0x40, 0, 0, 0, 7]);
}

/// cxgb4 accepts a reply only if its only ready-to-receive kind is Read; it offers no other kind.
#[test]
fn with_the_chelsio_preset_read_is_the_only_ready_to_receive() {
    skip_if!(lacks_network());
    let b = Initiator::with(&preset("chelsio"));
    b.connect(&ConnectOptions::default());
    let mut peer = Peer::accept(&b.listener);
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Req Frame");
    assert_eq!((flags, rev), (S | C, 2));
    assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (0x80, 0x40), "A; D alone");
    assert!(u16::from_be_bytes([data[0], data[1]]) & 0x3fff <= 32);
    peer.send(&reply(S | C, 2, &[0x80, 16, 0x40, 16]));
    b.established();
    let rtr = peer.take_fpdu();
    assert_eq!(
        (&rtr[..2], rtr.len()),
        (&[0x41, 0x41][..], 46),
        "a zero-length Read"
    );
    assert_ne!(rtr[18..22], [0; 4], "hardware refuses STag 0");
    assert_eq!(rtr[30..34], [0; 4]);

    let b = Responder::with(&preset("chelsio"));
    let mut peer = b.peer();
    peer.send(&request(S | C, 2, &[0x80, 16, 0x40, 16]));
    b.accept(b"");
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((data[0] & 0xc0, data[2] & 0xc0), (0x80, 0x40));
    // More private data than the preset allows.
    let mut peer = b.peer();
    peer.send(&request(C, 1, &[7; 257]));
    assert_eq!(peer.rest(), b"");
}

/// irdma always asks for CRC and both kinds, refuses A=0, and does not reassemble MPA frames from
/// several segments.
#[test]
fn with_the_intel_preset_a_reply_keeps_a_and_names_one_kind_in_one_segment() {
    skip_if!(lacks_network());
    let b = Responder::with(&preset("intel"));
    let mut peer = b.peer();
    peer.send(&request(S | C, 2, &[0x80, 63, 0xc0, 63]));
    b.accept(&[9; 100]);
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev, data[0] & 0xc0), (S | C, 2, 0x80));
    assert!(
        matches!(data[2] & 0xc0, 0x80 | 0x40),
        "exactly one of C and D"
    );
    assert!(u16::from_be_bytes([data[0], data[1]]) & 0x3fff >= 63);

    let b = Initiator::with(&preset("intel"));
    b.connect(&ConnectOptions {
        private_data: &[1; 400],
        ..Default::default()
    });
    let mut peer = Peer::accept(&b.listener);
    let mut whole = [0; 1024];
    let n = std::io::Read::read(&mut peer.0, &mut whole).unwrap();
    assert_eq!(n, 20 + 4 + 400, "the request lies in one segment");
}

/// [MS-SMBD] section 6.1: revision 1, IRD and ORD as the first eight octets of the private data.
#[test]
fn with_the_windows_preset_depths_are_in_the_private_data_of_revision_1() {
    skip_if!(lacks_network());
    let b = Initiator::with(&preset("windows"));
    b.connect(&ConnectOptions {
        private_data: b"hello",
        ird: 16,
        ord: 8,
        ..Default::default()
    });
    let mut peer = Peer::accept(&b.listener);
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Req Frame");
    assert_eq!((flags, rev), (C, 1));
    assert_eq!(data, b"\0\0\0\x10\0\0\0\x08hello");
    peer.send(&reply(C, 1, b"\0\0\0\x04\0\0\0\x20welcome"));
    let info = b.established();
    assert_eq!((info.ird, info.ord), (32, 4));
    assert_eq!(info.private_data, b"welcome");
    let rtr = peer.take_fpdu();
    assert_eq!(
        (&rtr[..2], rtr.len()),
        (&[0x41, 0x41][..], 46),
        "a zero-length Read"
    );

    let b = Responder::with(&preset("windows"));
    let mut peer = b.peer();
    peer.send(&request(C, 1, b"\0\0\0\x04\0\0\0\x20hello"));
    let info = b.accept(b"welcome");
    assert_eq!((info.ird, info.ord), (32, 4));
    assert_eq!(info.private_data, b"hello");
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev), (C, 1));
    assert_eq!(data, b"\0\0\0\x20\0\0\0\x04welcome");
    b.established();
    // Not a Windows peer.
    let mut peer = b.peer();
    peer.send(&request(C, 1, b"hello"));
    let (flags, rev, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev, data), (R | C, 1, Vec::new()));
}

#[test]
fn two_devices_with_the_windows_preset_exchange_data() {
    let config = LOOPBACK.replace("pair =", "mpa.preset = \"windows\"\npair =");
    let d = Daemon::start(&config, &[]);
    let (a, b) = (End::new(&d.context(), 4096), End::new(&d.context(), 4096));
    let smb_direct: SocketAddr = "10.77.0.2:5445".parse().unwrap();
    let listener = CmListener::new(&b.cm, None, smb_direct, 8, 0).unwrap();
    let options = ConnectOptions {
        private_data: &[7; 504],
        ird: 4,
        ord: 32,
        ..Default::default()
    };
    a.qp.connect(&a.cm, listener.local_addr(), &options)
        .unwrap();
    let CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request")
    };
    let asked = request.connection_info().clone();
    assert_eq!(asked.private_data, [7; 504]);
    assert_eq!((asked.ird, asked.ord, asked.mpa_rev), (32, 4, 0));
    let answer = ConnectOptions {
        private_data: b"welcome",
        ird: 16,
        ord: 16,
        ..Default::default()
    };
    request.accept(&b.qp, None, &answer).unwrap();
    let established = |end: &End| match end.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Established(info) => info,
        other => panic!("{other:?}"),
    };
    let (initiator, responder) = (established(&a), established(&b));
    assert_eq!(initiator.private_data, b"welcome");
    assert_eq!(
        (initiator.ird, initiator.ord, initiator.mpa_rev),
        (4, 32, 1)
    );
    assert_eq!(
        (responder.ird, responder.ord, responder.mpa_rev),
        (32, 4, 1)
    );
    // The responder may send first, after the Read that the initiator starts with.
    ping(&b, &a);
    ping(&a, &b);
}

#[test]
fn a_device_without_fallback_asks_once() {
    skip_if!(lacks_network());
    let b = Initiator::with(&format!("{CONFIG}fallback = false\n"));
    b.connect(&ConnectOptions::default());
    let mut peer = Peer::accept(&b.listener);
    peer.take_mpa(b"MPA ID Req Frame");
    peer.reset();
    assert!(matches!(b.event(), CmEvent::ConnectError(_)));
    b.listener.set_nonblocking(true).unwrap();
    assert!(b.listener.accept().is_err(), "no second attempt");
}

/// Creates a listener with options of its own, in addition to that of the device.
fn listener(b: &Responder, opt: &ListenOptions) -> CmListener {
    let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
    CmListener::new_with_options(&b.app.cm, any, opt).unwrap()
}

#[test]
fn a_listener_may_differ_from_its_device_in_everything() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let own = ListenOptions {
        crc: Some(false),
        mpa_rev: Some(1),
        markers: Some(Markers::Never),
        ..Default::default()
    };
    let l = listener(&b, &own);
    // CRC only on request; the device's own setting would require it.
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(0, 1, b""));
    b.accept(b"");
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame").0, 0);
    assert!(!b.established().crc);
    // Markers are refused.
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(M | C, 1, b""));
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame").0 & R, R);
    // Revision 2 is above the listener's maximum.
    let mut newer = Peer::connect(&b.ns, l.local_addr());
    newer.send(&request(S | C, 2, &[0, 1, 0, 1]));
    assert_eq!(newer.rest(), b"");
    b.nothing_heard();

    let reads = ListenOptions {
        rtr: Some(ReadyToReceive {
            read: true,
            ..Default::default()
        }),
        max_ird: Some(4),
        max_ord: Some(2),
        ..Default::default()
    };
    let l = listener(&b, &reads);
    let next = End::new(&b.app.ctx, 4096);
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(S | C, 2, &[0x80, 16, 0xc0, 4]));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    r.accept(&next.qp, None, &ConnectOptions::default())
        .unwrap();
    let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!(data[..4], [0x80, 4, 0x40, 2]);
    b.established();
    let narrow = ListenOptions {
        max_private_data: Some(8),
        terminate: Some(TerminateOrder::Siw),
        ..Default::default()
    };
    let l = listener(&b, &narrow);
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(C, 1, &[1; 9]));
    assert_eq!(peer.rest(), b"", "9 octets are too many");
    let own = End::new(&b.app.ctx, 4096);
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(C, 1, &[1; 8]));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    r.accept(&own.qp, None, &ConnectOptions::default()).unwrap();
    peer.take_mpa(b"MPA ID Rep Frame");
    b.established();
    let f = write(true, 0x00bb_aa01, 0, b"whose");
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x11, 0x00, 0x03, 0], &f[..16]));
    drop(peer);
    b.disconnected();

    // The device's own listener is unaffected.
    let third = End::new(&b.app.ctx, 4096);
    let mut peer = b.peer();
    peer.send(&request(S, 2, &[0, 1, 0, 1]));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    r.accept(&third.qp, None, &ConnectOptions::default())
        .unwrap();
    let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags, rev), (S | C, 2));
}

#[test]
fn a_listener_may_be_less_patient_than_its_device() {
    skip_if!(lacks_network());
    let b = Responder::new();
    let soon = Some(Duration::from_millis(100));
    let began = std::time::Instant::now();
    let hasty = ListenOptions {
        request_timeout: soon,
        ..Default::default()
    };
    let l = listener(&b, &hasty);
    let mut silent = Peer::connect(&b.ns, l.local_addr());
    assert_eq!(silent.rest(), b"");
    b.nothing_heard();
    // The application does not answer in time.
    let hasty = ListenOptions {
        accept_timeout: soon,
        ..Default::default()
    };
    let l = listener(&b, &hasty);
    let mut peer = Peer::connect(&b.ns, l.local_addr());
    peer.send(&request(C, 1, b""));
    let CmEvent::ConnectRequest(r) = b.event() else {
        panic!("no request")
    };
    assert_eq!(peer.rest(), b"");
    match b.event() {
        CmEvent::RequestCancelled { request } => assert_eq!(request, r.id()),
        other => panic!("{other:?}"),
    }
    // Half of one time limit of the device.
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
}

/// The answers equal those of devices with these presets.
#[test]
fn a_listener_takes_a_preset_of_its_own() {
    skip_if!(lacks_network());
    let b = Responder::new();
    for (preset, ird, rtr) in [
        (PeerPreset::Siw, 100, [0x80, 0x80]),
        (PeerPreset::Chelsio, 32, [0x80, 0x40]),
        (PeerPreset::Intel, 64, [0x80, 0x80]),
    ] {
        let l = listener(&b, &ListenOptions::for_peer(preset));
        let mut peer = Peer::connect(&b.ns, l.local_addr());
        peer.send(&request(M | C, 1, b""));
        assert_eq!(peer.take_mpa(b"MPA ID Rep Frame").0 & R, R, "{preset:?}");
        let mut peer = Peer::connect(&b.ns, l.local_addr());
        // Dropped before its peer, so that no event of this connection reaches the next iteration.
        let end = End::new(&b.app.ctx, 4096);
        peer.send(&request(S | C, 2, &[0x80, 16, 0xc0, 100]));
        // The end of the connection before may be reported first.
        let r = loop {
            if let CmEvent::ConnectRequest(r) = b.event() {
                break r;
            }
        };
        r.accept(&end.qp, None, &ConnectOptions::default()).unwrap();
        let (_, _, data) = peer.take_mpa(b"MPA ID Rep Frame");
        assert_eq!([data[0] & 0xc0, data[2] & 0xc0], rtr, "{preset:?}");
        let told = u16::from_be_bytes([data[0], data[1]]) & 0x3fff;
        assert_eq!(told.min(100), ird, "{preset:?}");
        b.established();
    }
}
