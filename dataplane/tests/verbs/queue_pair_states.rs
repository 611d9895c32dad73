//! Queue pair states, modify, query and drain, against the daemon.

use crate::common::*;
use siw::{
    AsyncEventKind, CmEvent, ConnectOptions, Opcode, QpInit, QpState, RecvWr, SendData, SendWr,
    VerbsQpState, Wc, WcStatus, WrFlags,
};
use std::time::Duration;

fn state(e: &End) -> QpState {
    e.qp.query().unwrap().state.unwrap()
}

fn event(e: &End) -> (Option<AsyncEventKind>, u32) {
    let ev = e.ctx.get_async_event(Some(PATIENCE)).unwrap();
    (ev.kind, ev.object)
}

fn recv(e: &End, wr_id: u64) {
    e.qp.post_recv(&[RecvWr {
        wr_id,
        sges: &[e.mr.sge(0, 64)],
    }])
    .unwrap();
}

fn send(wr_id: u64) -> SendWr<'static> {
    SendWr::send(wr_id, SendData::Inline(b"x"))
}

fn until(e: &End, want: QpState) {
    let end = std::time::Instant::now() + PATIENCE;
    while state(e) != want {
        assert!(std::time::Instant::now() < end, "still {:?}", state(e));
    }
}

#[test]
fn a_query_tells_the_state_the_depths_and_the_addresses() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let fresh = a.qp.query().unwrap();
    assert_eq!(fresh.state, Some(QpState::Idle));
    assert_eq!((fresh.local, fresh.peer, fresh.mulpdu), (None, None, 0));
    assert_eq!(VerbsQpState::from(QpState::Idle), VerbsQpState::Init);
    let opt = ConnectOptions {
        ord: 4,
        ird: 8,
        mpa_rev: Some(2),
        ..Default::default()
    };
    connect_with(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap(), &opt);
    let (qa, qb) = (a.qp.query().unwrap(), b.qp.query().unwrap());
    assert_eq!((qa.state, qa.ord), (Some(QpState::Rts), 4));
    assert_eq!(qa.ird, 8);
    assert_eq!((qa.local, qa.peer), (qb.peer, qb.local));
    assert_eq!(qa.peer.unwrap().ip().to_string(), "10.77.0.2");
    // EMSS 1448 with timestamps (RFC 5044 section 4.1).
    assert_eq!(qa.mulpdu, 1442);
    assert_eq!(a.qp.granted_limits().max_send_wr, 64);
    b.qp.set_error().unwrap();
    assert_eq!(state(&b), QpState::Error);
    until(&a, QpState::Error);
}

#[test]
fn a_responder_is_ready_to_receive_until_the_first_fpdu_comes() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    // Revision 1 has no ready-to-receive message of its own.
    let opt = ConnectOptions {
        mpa_rev: Some(1),
        ..Default::default()
    };
    connect_with(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap(), &opt);
    assert_eq!((state(&a), state(&b)), (QpState::Rts, QpState::Rtr));
    let wr = SendWr::write(1, SendData::Inline(b"x"), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    assert_eq!(state(&b), QpState::Rts);
}

#[test]
fn sqd_holds_new_sends_back_and_rts_lets_them_go() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    for i in 0..4 {
        recv(&b, i);
    }
    a.qp.post_send(&[send(1)]).unwrap();
    assert_eq!(a.wc().wr_id, 1);
    a.qp.drain_start().unwrap();
    assert_eq!(event(&a), (Some(AsyncEventKind::SqDrained), a.qp.qp_num()));
    let q = a.qp.query().unwrap();
    assert_eq!((q.state, q.draining), (Some(QpState::Sqd), false));
    assert_eq!(VerbsQpState::from(QpState::Sqd), VerbsQpState::Sqd);
    a.qp.post_send(&[send(2), send(3)]).unwrap();
    // An answer to a later request shows that the worker has seen the doorbell.
    a.ctx.read_stats().unwrap();
    a.ctx.read_stats().unwrap();
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    assert_eq!(b.wc().wr_id, 0);
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    // Receiving continues.
    recv(&a, 9);
    b.qp.post_send(&[send(7)]).unwrap();
    assert_eq!(a.wc().wr_id, 9);
    a.qp.drain_end().unwrap();
    assert_eq!((a.wc().wr_id, a.wc().wr_id), (2, 3));
    assert_eq!(state(&a), QpState::Rts);
    // A second drain; then an error flushes the pending requests.
    a.qp.drain_start().unwrap();
    assert_eq!(event(&a).0, Some(AsyncEventKind::SqDrained));
    a.qp.post_send(&[send(4)]).unwrap();
    a.qp.set_error().unwrap();
    let wc = a.wc();
    assert_eq!((wc.wr_id, wc.status), (4, WcStatus::WR_FLUSH_ERR));
}

#[test]
fn a_drain_waits_for_what_is_under_way() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 8 << 20);
    let sge = [a.mr.sge(0, 8 << 20)];
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    // Posted in one call: the drain races with it, and the Write is either started or not.
    a.qp.post_send(&[write, send(2)]).unwrap();
    a.qp.drain_start().unwrap();
    assert_eq!(event(&a).0, Some(AsyncEventKind::SqDrained));
    let mut wc = [Wc::default(); 4];
    let done = a.cq.poll(&mut wc).unwrap();
    assert!(wc[..done].iter().all(|w| w.status == WcStatus::SUCCESS));
    recv(&b, 1);
    a.qp.drain_end().unwrap();
    for _ in done..2 {
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    }
}

#[test]
fn moves_that_make_no_sense_are_refused_with_the_state() {
    let daemon = Daemon::loopback();
    let a = End::new(&daemon.context(), 4096);
    for to in [
        QpState::Sqd,
        QpState::Rts,
        QpState::Rtr,
        QpState::Closing,
        QpState::Terminate,
    ] {
        let error = a.qp.modify(to).unwrap_err();
        assert_eq!(error.errno(), nix::libc::EINVAL);
        assert!(error.to_string().contains("not connected"), "{error}");
    }
    let (a, b) = pair(&daemon, 4096);
    b.qp.set_error().unwrap();
    let error = b.qp.drain_start().unwrap_err();
    assert!(error.to_string().contains("in Error"), "{error}");
    drop(a);
}

/// RFC 5040 section 5.1: CLOSING ends in IDLE if the send queue has nothing to flush.
#[test]
fn closing_ends_in_idle_or_when_sends_are_lost_in_error() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    recv(&a, 5);
    a.qp.modify(QpState::Closing).unwrap();
    for e in [&a, &b] {
        match e.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Disconnected(info) => assert_eq!(info.errno, 0, "{info:?}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(state(e), QpState::Idle);
    }
    assert_eq!(a.wc().status, WcStatus::WR_FLUSH_ERR);
    let (a, b) = pair(&daemon, 4096);
    // The drain holds the request back, so it cannot have been sent.
    a.qp.drain_start().unwrap();
    a.qp.post_send(&[send(1)]).unwrap();
    a.qp.modify(QpState::Closing).unwrap();
    assert_eq!(a.wc().status, WcStatus::WR_FLUSH_ERR);
    until(&a, QpState::Error);
    until(&b, QpState::Idle);
}

#[test]
fn a_terminate_of_the_consumer_reaches_the_peer() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    recv(&b, 3);
    a.qp.modify(QpState::Terminate).unwrap();
    match b.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Disconnected(info) => {
            assert!(info.reason.contains("(0/0/00)"), "{}", info.reason)
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(event(&b), (Some(AsyncEventKind::QpFatal), b.qp.qp_num()));
    assert_eq!(b.wc().status, WcStatus::WR_FLUSH_ERR);
    until(&a, QpState::Error);
}

#[test]
fn a_reset_queue_pair_is_as_new_and_connects_again() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 65_536);
    for round in 0..3u64 {
        for i in 0..64 {
            recv(&b, round * 100 + i);
        }
        for i in 0..10 {
            a.qp.post_send(&[send(i)]).unwrap();
            assert_eq!(a.wc().status, WcStatus::SUCCESS);
            let wc = b.wc();
            assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, round * 100 + i));
        }
        if round == 1 {
            b.qp.set_error().unwrap();
            for _ in 10..64 {
                assert_eq!(b.wc().status, WcStatus::WR_FLUSH_ERR);
            }
        }
        for e in [&a, &b] {
            e.qp.reset().unwrap();
            assert_eq!(state(e), QpState::Idle);
            assert_eq!(e.qp.state(), Some(QpState::Idle));
            // Discards what is left of the old connection.
            assert_eq!(e.cq.poll(&mut [Wc::default()]).unwrap(), 0);
            while e.cm.get_event(Some(Duration::ZERO)).is_ok() {}
        }
        let err = a.qp.post_send(&[send(1)]).unwrap_err();
        assert!(err.to_string().contains("not connected"), "{err}");
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    }
    // A reset during a connect.
    a.qp.reset().unwrap();
    let nobody = "10.77.0.99:1".parse().unwrap();
    a.qp.connect(&a.cm, nobody, &ConnectOptions::default())
        .unwrap();
    a.qp.reset().unwrap();
    assert_eq!(state(&a), QpState::Idle);
}

#[test]
fn drained_queues_have_completed_everything_posted() {
    let daemon = Daemon::loopback();
    let init = QpInit {
        max_send_wr: 64,
        max_recv_wr: 32,
        ..QpInit::default()
    };
    let ctx = daemon.context();
    let (a, b) = (
        End::with(&ctx, 65_536, &init),
        End::with(&ctx, 65_536, &init),
    );
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    for i in 0..32 {
        recv(&a, 1000 + i);
    }
    let sge = [a.mr.sge(0, 60_000)];
    let unsignaled = |wr_id| SendWr {
        opcode: Opcode::Write,
        flags: if wr_id % 3 == 0 {
            WrFlags::SIGNALED
        } else {
            WrFlags::NONE
        },
        ..SendWr::write(wr_id, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey())
    };
    for i in 0..64 {
        a.qp.post_send(&[unsignaled(i)]).unwrap();
    }
    let mut sends = Vec::new();
    let mut recvs = Vec::new();
    let mut sort = |wc: &Wc| {
        if wc.opcode.0 < 128 {
            &mut sends
        } else {
            &mut recvs
        }
        .push(wc.wr_id)
    };
    a.qp.drain_sq(PATIENCE, &mut sort).unwrap();
    a.qp.drain_rq(PATIENCE, &mut sort).unwrap();
    assert_eq!(recvs, (1000..1032).collect::<Vec<_>>());
    assert!(
        sends.is_sorted() && sends.iter().filter(|i| *i % 3 == 0).count() == 22,
        "{sends:?}"
    );
    assert_eq!(a.qp.outstanding_sends(), 0);
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    // Never connected.
    let c = End::new(&ctx, 4096);
    recv(&c, 5);
    let mut got = Vec::new();
    c.qp.drain_rq(PATIENCE, |wc| got.push(wc.wr_id)).unwrap();
    c.qp.drain_sq(PATIENCE, |wc| got.push(wc.wr_id)).unwrap();
    assert_eq!(got, [5]);
}

#[test]
fn the_time_out_of_a_connect_bounds_tcp_too() {
    let d = Daemon::loopback();
    let a = End::new(&d.context(), 4096);
    let opt = ConnectOptions {
        device: Some(a.ctx.device_by_name("siw0").unwrap().index),
        timeout: Some(Duration::from_millis(200)),
        ..Default::default()
    };
    let start = std::time::Instant::now();
    // No host has this address: without the time-out, ARP alone takes three seconds.
    a.qp.connect(&a.cm, "10.77.0.99:7".parse().unwrap(), &opt)
        .unwrap();
    match a.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Unreachable(info) | CmEvent::ConnectError(info) => {
            assert_eq!(info.errno, nix::libc::ETIMEDOUT);
        }
        other => panic!("{other:?}"),
    }
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(190), "{took:?}");
    assert!(took < Duration::from_millis(2000), "{took:?}");
}

/// A client posts until it sees that its queue pair is closed: every accepted request completes.
#[test]
fn a_clean_close_loses_no_work_request() {
    let d = Daemon::loopback();
    let (ctx_a, ctx_b) = (d.context(), d.context());
    for round in 0..60 {
        let (a, b) = (End::new(&ctx_a, 4096), End::new(&ctx_b, 4096));
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
        let mut posted = 0u64;
        let mut completed = 0;
        let mut wc = [Wc::default(); 16];
        let end = std::time::Instant::now() + PATIENCE;
        let mut is_closing = false;
        loop {
            // A zero-length Write needs no memory of the peer.
            let write = SendWr::write(posted, SendData::Inline(b""), 0, 0);
            match a.qp.post_send(&[write]) {
                Ok(()) => posted += 1,
                Err(_) if is_closing && a.qp.state() == Some(QpState::Idle) => break,
                // After a flush, or with a full queue.
                Err(_) if is_closing && a.qp.state() == Some(QpState::Error) => break,
                Err(_) => {}
            }
            completed += a.cq.poll(&mut wc).unwrap() as u64;
            if !is_closing && posted > 4 + round {
                is_closing = true;
                b.qp.disconnect().unwrap();
            }
            if is_closing && a.qp.state() == Some(QpState::Error) {
                break;
            }
            assert!(std::time::Instant::now() < end, "{:?}", a.qp.state());
        }
        while completed < posted {
            completed += a.cq.wait(&mut wc, Some(PATIENCE)).unwrap() as u64;
        }
        assert_eq!(completed, posted, "round {round}");
    }
}
