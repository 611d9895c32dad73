//! siwd's listener against a peer that writes iWARP by hand, byte by byte, over a TCP socket
//! of Linux: what goes over the wire, and what the application sees of it.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::net::{Netns, lacks_network};
use common::peer::{
    C, M, Peer, R, S, fpdu, mpa, reply, request, send, terminate, with_markers, write,
};
use common::*;
use siw::{
    AsyncEventKind, CmEvent, ConnInfo, ConnectOptions, Data, Listener, RecvWr, SendWr, WcStatus,
};

/// How long nothing must happen where nothing may.
const SILENCE: Duration = Duration::from_millis(200);

const CONFIG: &str = r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=tap0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[device.mpa]
request_timeout_ms = 700
"#;

/// siwd with a listening application, Linux on the other end of the wire.
struct Bench {
    app: End,
    listener: Listener,
    ns: Netns,
    _siwd: Daemon,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(CONFIG)
    }

    fn with(config: &str) -> Bench {
        let ns = Netns::new();
        let siwd = ns.siwd(config, &[]);
        ns.address("tap0", "10.77.0.2/24");
        ns.address("tap0", "fd77::2/64");
        ns.ip("link set tap0 up");
        ns.wait_ping("10.77.0.1".parse().unwrap());
        let app = End::new(&siwd.context(), 65_536);
        let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
        let listener = Listener::new(&app.cm, None, any, 8, 0).unwrap();
        Bench {
            app,
            listener,
            ns,
            _siwd: siwd,
        }
    }

    fn peer(&self) -> Peer {
        Peer::connect(&self.ns, self.listener.local_addr())
    }

    /// An accepted connection of MPA revision 2 with CRC, in FPDU mode on both sides.
    fn stream(&self) -> Peer {
        let mut peer = self.peer();
        peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
        self.accept(b"");
        let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
        assert_eq!((flags, rev), (S | C, 2));
        self.established();
        peer
    }

    /// The request that the application sees; it says yes.
    fn accept(&self, private_data: &[u8]) -> ConnInfo {
        let CmEvent::ConnectRequest(r) = self.event() else {
            panic!("no request")
        };
        let info = r.info().clone();
        let opt = ConnectOptions {
            private_data,
            ..Default::default()
        };
        r.accept(&self.app.qp, None, &opt).unwrap();
        info
    }

    fn established(&self) -> ConnInfo {
        match self.event() {
            CmEvent::Established(i) => i,
            other => panic!("{other:?}"),
        }
    }

    fn disconnected(&self) {
        match self.event() {
            CmEvent::Disconnected(_) => {}
            other => panic!("{other:?}"),
        }
    }

    fn event(&self) -> CmEvent {
        self.app.cm.get_event(Some(PATIENCE)).unwrap()
    }

    /// The application hears of no connection.
    fn nothing_heard(&self) {
        let heard = self.app.cm.get_event(Some(SILENCE));
        assert!(matches!(heard, Err(siw::Error::Timeout)), "{heard:?}");
    }

    fn recv(&self, wr_id: u64, at: usize, len: usize) {
        let sge = [self.app.mr.sge(at, len)];
        self.app
            .qp
            .post_recv(&[RecvWr { wr_id, sges: &sge }])
            .unwrap();
    }

    /// The error that ended the connection: one event, the receive flushed, the end told.
    fn broken(&self, kind: AsyncEventKind) {
        let e = self.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(
            (e.kind, e.object),
            (Some(kind), self.app.qp.number()),
            "{e:?}"
        );
        self.disconnected();
        let wc = self.app.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::WR_FLUSH_ERR, 99));
    }

    /// siwd still serves others.
    fn goes_on(&self) {
        let next = End::new(&self.app.ctx, 4096);
        let mut peer = self.peer();
        peer.send(&request(C, 1, b""));
        let CmEvent::ConnectRequest(r) = self.event() else {
            panic!("no request")
        };
        r.accept(&next.qp, None, &ConnectOptions::default())
            .unwrap();
        peer.take_mpa(b"MPA ID Rep Frame");
    }
}

// ---- MPA requests -------------------------------------------------------------------------

#[test]
fn a_revision_1_request_is_accepted_with_a_revision_1_reply() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
fn a_revision_2_request_is_answered_with_depths_and_one_ready_to_receive_kind() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
    // The ready-to-receive Write: nothing in it, on an STag that is none.
    peer.send(&write(true, 1, 0, b""));
    b.recv(1, 0, 64);
    peer.send(&send(true, 1, 0, b"after it"));
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn crc_is_used_when_only_the_device_asks_for_it() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut peer = b.peer();
    peer.send(&request(S, 2, &[0, 1, 0, 1]));
    b.accept(b"");
    assert_eq!(peer.take_mpa(b"MPA ID Rep Frame").0, S | C);
    assert!(b.established().crc);
}

#[test]
fn wrong_frames_close_the_connection_and_the_application_hears_nothing() {
    skip_if!(lacks_network());
    let b = Bench::new();
    for (what, frame) in [
        ("a wrong key", mpa(b"MPA ID Rex Frame", C, 1, b"")),
        ("a reply", reply(C, 1, b"")),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: siwd\r\n\r\n".to_vec()),
        ("revision 3", request(C, 3, b"")),
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
fn a_peer_that_asks_for_markers_gets_them_every_512_bytes() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
    let wr = SendWr::send(2, Data::Sges(&sge));
    b.app.qp.post_send(&[wr]).unwrap();
    let expected = with_markers(&send(true, 1, 0, &b.app.read(0, 1200)));
    assert_eq!(peer.take(expected.len()), expected);
    assert_eq!(b.app.wc().status, WcStatus::SUCCESS);
}

#[test]
fn a_device_without_markers_rejects_a_request_for_them_with_a_reply() {
    skip_if!(lacks_network());
    let b = Bench::with(&format!("{CONFIG}markers = \"never\"\n"));
    let mut peer = b.peer();
    peer.send(&request(M | C, 1, b""));
    let (flags, rev, _) = peer.take_mpa(b"MPA ID Rep Frame");
    assert_eq!((flags & R, rev), (R, 1));
    assert_eq!(peer.rest(), b"");
    b.nothing_heard();
}

#[test]
fn private_data_of_512_bytes_arrives_and_513_close() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
fn a_request_in_single_bytes_is_accepted() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut peer = b.peer();
    peer.send_bytewise(&request(S | C, 2, &[0, 1, 0, 1, 7]));
    assert_eq!(b.accept(b"").private_data, [7]);
    peer.take_mpa(b"MPA ID Rep Frame");
    b.established();
}

#[test]
fn a_peer_that_never_asks_is_closed_after_the_request_timeout() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let (mut silent, mut slow) = (b.peer(), b.peer());
    slow.send(&request(C, 1, b"")[..10]);
    let began = std::time::Instant::now();
    assert_eq!(silent.rest(), b"");
    assert_eq!(slow.rest(), b"");
    assert!(
        began.elapsed() > Duration::from_millis(400),
        "{:?}",
        began.elapsed()
    );
    b.nothing_heard();
    b.goes_on();
}

#[test]
fn a_rejected_peer_gets_the_reason_and_the_end() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
    let b = Bench::new();
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

// ---- FPDUs --------------------------------------------------------------------------------

#[test]
fn an_fpdu_split_at_every_byte_and_several_in_one_segment_are_the_same_to_the_application() {
    skip_if!(lacks_network());
    let b = Bench::new();
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

    // Two parts of a message, a Write and a message in one segment.
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
fn an_fpdu_cut_at_each_of_its_bytes_is_put_together() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
    let b = Bench::new();
    let mut peer = b.stream();
    b.recv(1, 0, 16);
    let data = pattern(77, 60_000);
    let at = b.app.mr.addr();
    // FPDUs of sizes that no segment has, far longer ones among them.
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
fn a_bad_crc_is_answered_by_terminate_2_0_02_and_nothing_is_placed() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
fn an_unknown_stag_is_answered_by_terminate_1_1_00_with_the_offending_header() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let f = write(true, 0x00bb_aa01, 0x1122_3344, b"whose");
    peer.send(&f);
    // M and D: the length of the segment and its header are quoted.
    let quoted = [&f[..2], &f[2..16]].concat();
    assert_eq!(peer.rest(), terminate([0x11, 0x00, 0xc0, 0], &quoted));
    drop(peer);
    b.broken(AsyncEventKind::QpAccessErr);
}

#[test]
fn a_write_beyond_the_region_is_answered_by_terminate_1_1_01() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    let f = write(true, b.app.mr.rkey(), b.app.mr.addr() + 65_530, b"too far");
    peer.send(&f);
    assert_eq!(peer.rest(), terminate([0x11, 0x01, 0xc0, 0], &f[..16]));
    drop(peer);
    b.broken(AsyncEventKind::QpAccessErr);
}

#[test]
fn a_send_without_a_receive_is_answered_by_terminate_1_2_02() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
fn a_ulpdu_shorter_than_its_header_is_answered_by_terminate_2_0_03() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.send(&fpdu(&[0xc1, 0x40, 0, 0]));
    assert_eq!(peer.rest(), terminate([0x20, 0x03, 0, 0], b""));
    drop(peer);
    b.broken(AsyncEventKind::QpFatal);
}

#[test]
fn a_message_longer_than_its_receive_is_answered_by_terminate_1_2_05() {
    skip_if!(lacks_network());
    let b = Bench::new();
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
    let b = Bench::new();
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
fn an_end_within_an_fpdu_is_an_error_of_the_connection() {
    skip_if!(lacks_network());
    for reset in [false, true] {
        let b = Bench::new();
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
    let b = Bench::new();
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
    // As the RFC orders the nibbles, as Linux siw does, and as hardware names MPA errors.
    for first in [0x20, 0x02, 0x23] {
        let b = Bench::new();
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
    let b = Bench::new();
    let mut peer = b.stream();
    b.recv(99, 0, 64);
    peer.fin();
    assert_eq!(peer.rest(), b"");
    b.disconnected();
    assert_eq!(b.app.wc().status, WcStatus::WR_FLUSH_ERR);
    let e = b.app.ctx.get_async_event(Some(SILENCE));
    assert!(matches!(e, Err(siw::Error::Timeout)), "{e:?}");
}
