//! Each way in which a stream ends, and the completions of the posted work requests: each completes
//! exactly once, in posting order, sends before receives, with the status of the error (RFC 5040
//! sections 5.4 and 7).

use std::net::SocketAddr;

use crate::common::net::{Netns, lacks_network};
use crate::common::peer::{C, Peer, S, fpdu, request, send, terminate, write};
use crate::common::*;
use siw::{
    AsyncEventKind, CmEvent, CmListener, ConnectOptions, Opcode, QpInit, QpState, RecvWr, SendData,
    SendWr, Wc, WcOpcode, WcStatus, WrFlags,
};

const CONFIG: &str = r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_tap0,iface=tap0"
addresses = ["10.77.0.1/24"]
"#;

const ALL_FLUSHED: WcStatus = WcStatus::WR_FLUSH_ERR;

struct Bench {
    ns: Netns,
    siwd: Daemon,
}

/// A connection with a hand-written peer.
struct Stream {
    app: End,
    peer: Peer,
}

impl Bench {
    fn new() -> Bench {
        let ns = Netns::new();
        let siwd = ns.siwd(CONFIG, &[]);
        ns.address("tap0", "10.77.0.2/24");
        ns.ip("link set tap0 up");
        ns.wait_ping("10.77.0.1".parse().unwrap());
        Bench { ns, siwd }
    }

    fn stream(&self) -> Stream {
        let app = End::new(&self.siwd.context(), 65_536);
        let any: SocketAddr = "10.77.0.1:0".parse().unwrap();
        let listener = CmListener::new(&app.cm, None, any, 8, 0).unwrap();
        let mut peer = Peer::connect(&self.ns, listener.local_addr());
        peer.send(&request(S | C, 2, &[0, 4, 0, 4]));
        match app.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => {
                request
                    .accept(&app.qp, None, &ConnectOptions::default())
                    .unwrap();
            }
            other => panic!("{other:?}"),
        }
        peer.take_mpa(b"MPA ID Rep Frame");
        assert!(matches!(
            app.cm.get_event(Some(PATIENCE)).unwrap(),
            CmEvent::Established(_)
        ));
        // The responder may send after the initiator's first FPDU.
        peer.send(&write(true, 1, 0, b""));
        Stream { app, peer }
    }
}

impl Stream {
    /// Posts READ 1, WRITE 2, unsignaled SEND 3, READ 4, and receives 11 and 12. Returns the ULPDUs
    /// of the sends as the peer received them.
    fn loaded(&mut self) -> Vec<Vec<u8>> {
        let a = &self.app;
        for wr_id in [11, 12] {
            a.qp.post_recv(&[RecvWr {
                wr_id,
                sges: &[a.mr.sge(0, 64)],
            }])
            .unwrap();
        }
        let sge = [a.mr.sge(1000, 100)];
        let silent = SendWr::send(3, SendData::Inline(b"three")).with_flags(WrFlags::NONE);
        a.qp.post_send(&[
            SendWr::read(1, &sge, 0x1000, 0x1100),
            SendWr::write(2, SendData::Sges(&sge), 0x2000, 0x2200),
            silent,
            SendWr::read(4, &sge, 0x4000, 0x4400),
        ])
        .unwrap();
        (0..4).map(|_| self.peer.take_fpdu()).collect()
    }

    /// Takes `n` completions, which must be all of them; returns work request ids and statuses.
    fn completions(&self, n: usize) -> Vec<(u64, WcStatus)> {
        let all = (0..n).map(|_| {
            let wc = self.app.wc();
            assert_eq!(wc.qp_num, self.app.qp.qp_num());
            (wc.wr_id, wc.status)
        });
        let all = all.collect();
        let end = std::time::Instant::now() + PATIENCE;
        while self.app.qp.query().unwrap().state != Some(QpState::Error) {
            assert!(
                std::time::Instant::now() < end,
                "the queue pair does not end"
            );
        }
        assert_eq!(
            self.app.cq.poll(&mut [Wc::default()]).unwrap(),
            0,
            "{all:?}"
        );
        assert_eq!(self.app.qp.outstanding_sends(), 0);
        // Requests posted now are flushed too, once.
        let late = SendWr::send(90, SendData::Sges(&[])).with_flags(WrFlags::NONE);
        self.app.qp.post_send(&[late]).unwrap();
        self.app
            .qp
            .post_recv(&[RecvWr {
                wr_id: 91,
                sges: &[],
            }])
            .unwrap();
        let mut both = [self.app.wc(), self.app.wc()].map(|w| (w.wr_id, w.status));
        both.sort_unstable_by_key(|b| b.0);
        assert_eq!(both, [(90, ALL_FLUSHED), (91, ALL_FLUSHED)]);
        assert_eq!(self.app.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        all
    }

    fn event(&self) -> Option<AsyncEventKind> {
        let e = self.app.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(e.object, self.app.qp.qp_num());
        e.kind
    }

    fn no_event(&self) {
        self.app.ctx.read_stats().unwrap();
        let e = self
            .app
            .ctx
            .get_async_event(Some(std::time::Duration::ZERO));
        assert!(e.is_err(), "{e:?}");
    }
}

fn flushed(ids: &[u64]) -> Vec<(u64, WcStatus)> {
    ids.iter().map(|i| (*i, ALL_FLUSHED)).collect()
}

/// The Read Response to a Read Request of 100 bytes.
fn response(read_request: &[u8]) -> Vec<u8> {
    let mut u = vec![0xc1, 0x42];
    u.extend(&read_request[18..30]);
    u.extend([7; 100]);
    fpdu(&u)
}

#[test]
fn a_terminate_fails_the_request_it_is_about_and_flushes_the_rest() {
    skip_if!(lacks_network());
    let b = Bench::new();
    use AsyncEventKind::*;
    let rows = [
        // Layer and type, code, status, event. The headers of the first Read Request are quoted
        // where the error requires it.
        ([0x01, 0x00], WcStatus::REM_ACCESS_ERR, QpAccessErr),
        ([0x01, 0x01], WcStatus::REM_ACCESS_ERR, QpAccessErr),
        ([0x01, 0x02], WcStatus::REM_ACCESS_ERR, QpAccessErr),
        ([0x02, 0x05], WcStatus::REM_OP_ERR, QpReqErr),
        ([0x02, 0x07], WcStatus::REM_OP_ERR, QpReqErr),
        ([0x12, 0x02], WcStatus::REM_OP_ERR, QpReqErr),
        ([0x20, 0x02], WcStatus::GENERAL_ERR, QpFatal),
        ([0x20, 0x03], WcStatus::GENERAL_ERR, QpFatal),
        ([0x00, 0x00], WcStatus::REM_OP_ERR, QpFatal),
        ([0x10, 0x00], WcStatus::REM_OP_ERR, QpFatal),
    ];
    for (code, status, event) in rows {
        let mut s = b.stream();
        let wire = s.loaded();
        let mut quoted = Vec::new();
        let mut flags = 0;
        if !matches!(code[0], 0x20 | 0x00 | 0x10) {
            quoted.extend((wire[0].len() as u16).to_be_bytes());
            quoted.extend(&wire[0][..18]);
            flags = 0xc0;
            if code[0] < 0x10 {
                quoted.extend(&wire[0][18..46]);
                flags |= 0x20;
            }
        }
        s.peer
            .send(&terminate([code[0], code[1], flags, 0], &quoted));
        s.peer.fin();
        let mut want = vec![(1, status)];
        want.extend(flushed(&[2, 3, 4, 11, 12]));
        assert_eq!(s.completions(6), want, "{code:02x?}");
        assert_eq!(s.event(), Some(event), "{code:02x?}");
        s.no_event();
        match s.app.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Disconnected(info) => assert!(info.reason.contains("Terminate"), "{info:?}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_the_peer_answered_before_its_terminate_succeeds() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut s = b.stream();
    let wire = s.loaded();
    s.peer.send(&response(&wire[0]));
    for want in [1, 2] {
        let wc = s.app.wc();
        assert_eq!((wc.wr_id, wc.status), (want, WcStatus::SUCCESS));
    }
    assert_eq!(s.app.read(1000, 100), [7; 100]);
    let mut quoted = (wire[3].len() as u16).to_be_bytes().to_vec();
    quoted.extend(&wire[3][..46]);
    s.peer.send(&terminate([0x01, 0x01, 0xe0, 0], &quoted));
    s.peer.fin();
    // The unsignaled SEND was acknowledged: it completed silently.
    let mut want = vec![(4, WcStatus::REM_ACCESS_ERR)];
    want.extend(flushed(&[11, 12]));
    assert_eq!(s.completions(3), want);
}

#[test]
fn a_terminate_about_a_later_request_tells_so_behind_the_flush_of_earlier_ones() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut s = b.stream();
    let wire = s.loaded();
    let mut quoted = (wire[3].len() as u16).to_be_bytes().to_vec();
    quoted.extend(&wire[3][..46]);
    s.peer.send(&terminate([0x01, 0x02, 0xe0, 0], &quoted));
    s.peer.fin();
    let mut want = flushed(&[1, 2, 3]);
    want.push((4, WcStatus::REM_ACCESS_ERR));
    want.extend(flushed(&[11, 12]));
    assert_eq!(s.completions(6), want);
}

#[test]
fn a_reset_and_a_lost_stream_flush_everything_and_are_fatal() {
    skip_if!(lacks_network());
    let b = Bench::new();
    for half_an_fpdu in [false, true] {
        let mut s = b.stream();
        s.loaded();
        if half_an_fpdu {
            s.peer.send(&send(true, 1, 0, b"cut off")[..20]);
            s.peer.fin();
        } else {
            let Stream { app, peer } = s;
            peer.reset();
            let peer = b.stream().peer;
            s = Stream { app, peer };
        }
        assert_eq!(s.completions(6), flushed(&[1, 2, 3, 4, 11, 12]));
        assert_eq!(s.event(), Some(AsyncEventKind::QpFatal));
        s.no_event();
    }
}

#[test]
fn a_graceful_close_of_the_peer_flushes_without_an_error_event() {
    skip_if!(lacks_network());
    let b = Bench::new();
    let mut s = b.stream();
    s.loaded();
    s.peer.fin();
    assert_eq!(s.completions(6), flushed(&[1, 2, 3, 4, 11, 12]));
    s.no_event();
}

#[test]
fn an_error_found_here_flushes_the_sends_and_the_receive_under_way() {
    skip_if!(lacks_network());
    let b = Bench::new();
    // A bad CRC after the first segment of a Send; the events are those of protocol errors.
    let mut s = b.stream();
    s.loaded();
    s.peer.send(&send(false, 1, 0, b"first half"));
    let mut bad = send(true, 1, 10, b"second half");
    *bad.last_mut().unwrap() ^= 1;
    s.peer.send(&bad);
    assert_eq!(s.peer.take_fpdu()[18..20], [0x20, 0x02]);
    s.peer.fin();
    assert_eq!(s.completions(6), flushed(&[1, 2, 3, 4, 11, 12]));
    assert_eq!(s.event(), Some(AsyncEventKind::QpFatal));
    // A Send longer than its receive: LOC_LEN_ERR, then the others are flushed.
    let mut s = b.stream();
    s.loaded();
    s.peer.send(&send(true, 1, 0, &[1; 65]));
    assert_eq!(s.peer.take_fpdu()[18..20], [0x12, 0x05]);
    s.peer.fin();
    let mut want = vec![(11, WcStatus::LOC_LEN_ERR)];
    want.extend(flushed(&[1, 2, 3, 4, 12]));
    assert_eq!(s.completions(6), want);
    assert_eq!(s.event(), Some(AsyncEventKind::QpReqErr));
    // A Send with Invalidate of a key that does not exist: REM_INV_REQ_ERR.
    let mut s = b.stream();
    s.loaded();
    let mut u = vec![
        0x41, 0x44, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0,
    ];
    u.extend(b"gone");
    s.peer.send(&fpdu(&u));
    assert_eq!(s.peer.take_fpdu()[18..20], [0x02, 0x09]);
    s.peer.fin();
    let mut want = vec![(11, WcStatus::REM_INV_REQ_ERR)];
    want.extend(flushed(&[1, 2, 3, 4, 12]));
    assert_eq!(s.completions(6), want);
    assert_eq!(s.event(), Some(AsyncEventKind::QpReqErr));
    // The receive's own key is wrong: LOC_PROT_ERR.
    let mut s = b.stream();
    let mut sge = s.app.mr.sge(0, 64);
    sge.lkey ^= 0x700;
    let wrong = RecvWr {
        wr_id: 11,
        sges: &[sge],
    };
    s.app
        .qp
        .post_recv(&[
            wrong,
            RecvWr {
                wr_id: 12,
                sges: &[],
            },
        ])
        .unwrap();
    s.peer.send(&send(true, 1, 0, b"x"));
    s.peer.take_fpdu();
    s.peer.fin();
    assert_eq!(
        s.completions(2),
        [(11, WcStatus::LOC_PROT_ERR), (12, ALL_FLUSHED)]
    );
    assert_eq!(s.event(), Some(AsyncEventKind::QpFatal));
}

/// siwd at both ends.
#[test]
fn errors_of_both_ends_complete_everything_once() {
    let daemon = Daemon::loopback();
    let bad_lkey = |a: &End, _: &End| {
        let mut sge = a.mr.sge(0, 8);
        sge.lkey ^= 0x700;
        sge
    };
    let good = |a: &End, _: &End| a.mr.sge(0, 8);
    type Pick = fn(&End, &End) -> siw::Sge;
    let rows: [(Opcode, Pick, u32, WcStatus, Option<AsyncEventKind>); 5] = [
        (Opcode::Write, bad_lkey, 0, WcStatus::LOC_PROT_ERR, None),
        (Opcode::Send, bad_lkey, 0, WcStatus::LOC_PROT_ERR, None),
        (Opcode::Read, bad_lkey, 0, WcStatus::LOC_PROT_ERR, None),
        (
            Opcode::Read,
            good,
            0x900,
            WcStatus::REM_ACCESS_ERR,
            Some(AsyncEventKind::QpAccessErr),
        ),
        (
            Opcode::FetchAdd,
            good,
            0x900,
            WcStatus::REM_ACCESS_ERR,
            Some(AsyncEventKind::QpAccessErr),
        ),
    ];
    for (opcode, sge, twist, status, event) in rows {
        let (a, b) = (
            End::new(&daemon.context(), 4096),
            End::new(&daemon.context(), 4096),
        );
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
        for e in [&a, &b] {
            for wr_id in [11, 12] {
                e.qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
            }
        }
        let sges = [sge(&a, &b)];
        let ok = [a.mr.sge(0, 8)];
        let (to, key) = (b.mr.addr(), b.mr.rkey());
        let fails = match opcode {
            Opcode::FetchAdd => SendWr::fetch_add(2, sges[0], to, key ^ twist, 1),
            _ => SendWr {
                opcode,
                ..SendWr::read(2, &sges, to, key ^ twist)
            },
        };
        let before = SendWr::read(1, &ok, to, key);
        let after = SendWr::write(3, SendData::Sges(&ok), to, key).with_flags(WrFlags::NONE);
        a.qp.post_send(&[before, fails, after, SendWr::read(4, &ok, to, key)])
            .unwrap();
        let got: Vec<_> = (0..6)
            .map(|_| a.wc())
            .map(|w| (w.wr_id, w.status))
            .collect();
        let first = got[0].1;
        // A local error may be found while the READ before it is still in progress.
        assert!(
            first == WcStatus::SUCCESS || first == ALL_FLUSHED,
            "{opcode:?} {got:?}"
        );
        assert_eq!(got[0].0, 1);
        assert_eq!(got[1], (2, status), "{opcode:?}");
        assert_eq!(got[2..], flushed(&[3, 4, 11, 12]), "{opcode:?}");
        assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        let at_b: Vec<_> = (0..2)
            .map(|_| b.wc())
            .map(|w| (w.wr_id, w.status))
            .collect();
        assert_eq!(at_b, flushed(&[11, 12]));
        if let Some(kind) = event {
            assert_eq!(
                a.ctx.get_async_event(Some(PATIENCE)).unwrap().kind,
                Some(kind)
            );
            assert_eq!(
                b.ctx.get_async_event(Some(PATIENCE)).unwrap().kind,
                Some(kind)
            );
        }
    }
}

#[test]
fn a_message_longer_than_the_receive_fails_on_both_ends() {
    let daemon = Daemon::loopback();
    let init = QpInit {
        max_recv_wr: 4,
        ..QpInit::default()
    };
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::with(&daemon.context(), 4096, &init),
    );
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    for wr_id in [1, 2] {
        let sge = [b.mr.sge(0, 100)];
        b.qp.post_recv(&[RecvWr { wr_id, sges: &sge }]).unwrap();
    }
    let sge = [a.mr.sge(0, 101)];
    a.qp.post_send(&[SendWr::send(1, SendData::Sges(&sge))])
        .unwrap();
    let (x, y) = (b.wc(), b.wc());
    assert_eq!(
        (x.wr_id, x.status, x.opcode),
        (1, WcStatus::LOC_LEN_ERR, WcOpcode::RECV)
    );
    assert_eq!((y.wr_id, y.status), (2, ALL_FLUSHED));
    let wc = a.wc();
    assert_eq!((wc.wr_id, wc.status), (1, WcStatus::REM_INV_REQ_ERR));
}
