//! Completion queues against the daemon: resize, overflow, moderation, notification.

use crate::common::*;
use siw::{
    AsyncEventKind, CompletionChannel, Cq, Opcode, QpInit, RecvWr, SendData, SendWr, Wc, WcStatus,
    WrFlags,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An end whose completion queue has a completion channel.
struct Armed {
    end: End,
    channel: Arc<CompletionChannel>,
}

fn with_channel(daemon: &Daemon, cqe: u32, init: &QpInit) -> Armed {
    let mut end = End::new(&daemon.context(), 65_536);
    let channel = CompletionChannel::new(&end.ctx).unwrap();
    end.cq = Cq::new(&end.ctx, cqe, Some((&channel, 7))).unwrap();
    end.qp = end.pd.create_qp(&end.cq, &end.cq, init).unwrap();
    Armed { end, channel }
}

fn to_siw1(a: &End, b: &End) {
    connect(a, b, "siw0", "10.77.0.2:0".parse().unwrap());
}

fn deep() -> QpInit {
    QpInit {
        max_send_wr: 256,
        max_recv_wr: 256,
        ..QpInit::default()
    }
}

fn write(from: &End, to: &End, wr_id: u64) -> Result<(), siw::PostError> {
    let wr = SendWr::write(wr_id, SendData::Inline(b"x"), to.mr.addr(), to.mr.rkey());
    from.qp.post_send(&[wr])
}

fn quiet(channel: &CompletionChannel) -> bool {
    channel.get_event(Some(Duration::ZERO)).is_err()
}

#[test]
fn resizing_under_load_loses_and_reorders_nothing() {
    skip_if!(two_cores());
    let daemon = Daemon::start(
        &LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]"),
        &[],
    );
    let ctx = daemon.context();
    let cq = Cq::new(&ctx, 2048, None).unwrap();
    let peer = daemon.context();
    let ends: Vec<(End, End)> = (0..4)
        .map(|_| {
            let mut a = End::new(&ctx, 4096);
            a.qp = a.pd.create_qp(&cq, &cq, &deep()).unwrap();
            let b = End::new(&peer, 4096);
            to_siw1(&a, &b);
            (a, b)
        })
        .collect();
    let sizes = [1024u32, 4096, 1100, 2048, 8192];
    let mut posted = vec![0u64; ends.len()];
    let mut polled = vec![0u64; ends.len()];
    let mut wc = [Wc::default(); 16];
    for round in 0..60 {
        for (i, (a, b)) in ends.iter().enumerate() {
            while write(a, b, posted[i]).is_ok() {
                posted[i] += 1;
            }
        }
        cq.resize(sizes[round % sizes.len()]).unwrap();
        assert!(cq.capacity() >= sizes[round % sizes.len()]);
        for _ in 0..20 {
            let n = cq.poll(&mut wc).unwrap();
            check(&wc[..n], &ends, &mut polled);
        }
    }
    while polled != posted {
        let n = cq.poll_spin(&mut wc, PATIENCE).unwrap();
        assert_ne!(n, 0, "{polled:?} of {posted:?}");
        check(&wc[..n], &ends, &mut polled);
    }
    assert_eq!(cq.poll(&mut wc).unwrap(), 0);
}

fn check(wc: &[Wc], ends: &[(End, End)], polled: &mut [u64]) {
    for wc in wc {
        let i = ends.iter().position(|(a, _)| a.qp.qp_num() == wc.qp_num);
        let i = i.expect("a queue pair of this test");
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, polled[i]));
        polled[i] += 1;
    }
}

#[test]
fn a_queue_does_not_shrink_below_what_waits_in_it() {
    let daemon = Daemon::loopback();
    let a = with_channel(&daemon, 64, &deep()).end;
    let b = End::new(&daemon.context(), 4096);
    to_siw1(&a, &b);
    for i in 0..20 {
        write(&a, &b, i).unwrap();
    }
    while a.qp.outstanding_sends() > 0 {
        std::thread::yield_now();
    }
    let error = a.cq.resize(16).unwrap_err();
    assert_eq!(error.errno(), nix::libc::EINVAL);
    a.cq.resize(32).unwrap();
    let mut wc = [Wc::default(); 6];
    assert_eq!(a.cq.poll(&mut wc).unwrap(), 6);
    a.cq.resize(16).unwrap();
    for i in 6..20 {
        assert_eq!(a.wc().wr_id, i);
    }
    for bad in [0, a.ctx.limits().max_cqe + 1] {
        let error = a.cq.resize(bad).unwrap_err();
        assert!(error.to_string().contains("3276800 are allowed"), "{error}");
    }
}

#[test]
fn an_armed_queue_keeps_its_arming_through_a_resize() {
    let daemon = Daemon::loopback();
    let Armed { end: a, channel } = with_channel(&daemon, 64, &deep());
    let b = End::new(&daemon.context(), 4096);
    to_siw1(&a, &b);
    for round in 0..50 {
        a.cq.req_notify(false).unwrap();
        if round % 2 == 0 {
            a.cq.resize(64 << (round % 3)).unwrap();
            write(&a, &b, round).unwrap();
        } else {
            write(&a, &b, round).unwrap();
            a.cq.resize(64 << (round % 3)).unwrap();
        }
        assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
        assert_eq!(a.wc_polled().wr_id, round);
    }
}

#[test]
fn an_overflow_ends_the_queue_pairs_of_that_queue_and_nobody_else() {
    let daemon = Daemon::loopback();
    let (a, other) = (
        with_channel(&daemon, 4, &deep()).end,
        End::new(&daemon.context(), 4096),
    );
    let (b, c) = (
        End::with(&daemon.context(), 4096, &deep()),
        End::new(&daemon.context(), 4096),
    );
    to_siw1(&a, &b);
    // A second queue pair of the same client with a queue of its own, and one of another client.
    let second = End::new(&a.ctx, 4096);
    let e = End::new(&daemon.context(), 4096);
    to_siw1(&second, &e);
    to_siw1(&other, &c);
    for i in 0..8 {
        write(&a, &b, i).unwrap();
    }
    let ev = a.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(
        (ev.kind, ev.object),
        (Some(AsyncEventKind::CqErr), a.cq.cq_id())
    );
    let mut wc = [Wc::default(); 16];
    let n = a.cq.poll(&mut wc).unwrap();
    assert_eq!(n, 4);
    assert!(wc[..n].iter().enumerate().all(|(i, w)| w.wr_id == i as u64));
    assert!(a.cq.poll_spin(&mut wc, PATIENCE).is_err());
    for (x, y) in [(&second, &e), (&other, &c)] {
        write(x, y, 9).unwrap();
        assert_eq!(x.wc().status, WcStatus::SUCCESS);
    }
    let q = a.qp.query().unwrap();
    assert_eq!(q.state, Some(siw::QpState::Error));
}

#[test]
fn an_overflow_ends_all_queue_pairs_of_the_queue_that_still_use_it() {
    const QUEUE_PAIRS: usize = 40;
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let cq = Cq::new(&ctx, 4, None).unwrap();
    let peer = daemon.context();
    let mut ends: Vec<(End, End)> = (0..QUEUE_PAIRS)
        .map(|_| {
            let mut a = End::new(&ctx, 4096);
            a.qp = a.pd.create_qp(&cq, &cq, &deep()).unwrap();
            let b = End::new(&peer, 4096);
            to_siw1(&a, &b);
            (a, b)
        })
        .collect();
    // Numbers of destroyed queue pairs are used again, with other completion queues.
    ends.truncate(QUEUE_PAIRS - 10);
    let others: Vec<(End, End)> = (0..10)
        .map(|_| (End::new(&ctx, 4096), End::new(&peer, 4096)))
        .collect();
    for (a, b) in &others {
        to_siw1(a, b);
    }
    for i in 0..8 {
        write(&ends[0].0, &ends[0].1, i).unwrap();
    }
    for (a, _) in &ends {
        let end = Instant::now() + PATIENCE;
        while a.qp.query().unwrap().state != Some(siw::QpState::Error) {
            assert!(Instant::now() < end, "a queue pair goes on");
        }
    }
    for (a, b) in &others {
        write(a, b, 9).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    }
}

#[test]
fn posting_until_enomem_without_polling_overflows_no_queue() {
    let d = Daemon::loopback();
    let init = QpInit {
        max_send_wr: 16,
        max_recv_wr: 16,
        ..QpInit::default()
    };
    let mut a = with_channel(&d, 16, &init).end;
    let rcq = Cq::new(&a.ctx, 16, None).unwrap();
    a.qp = a.pd.create_qp(&a.cq, &rcq, &init).unwrap();
    let b = End::with(&d.context(), 4096, &deep());
    to_siw1(&a, &b);
    let recv = |wr_id| a.qp.post_recv(&[RecvWr { wr_id, sges: &[] }]);
    let mut sent = 0;
    let mut received = 0;
    for i in 0..300 {
        // The daemon finishes requests between the posts; only polled completions make room.
        if write(&a, &b, i).is_ok() {
            sent += 1;
        }
        if recv(i).is_ok() {
            received += 1;
            b.qp.post_send(&[SendWr::send(i, SendData::Sges(&[]))])
                .unwrap();
        }
        if i % 100 == 0 {
            a.ctx.read_stats().unwrap();
        }
    }
    assert_eq!((sent, received), (16, 16));
    let error = write(&a, &b, 0).unwrap_err();
    assert_eq!(error.error.errno(), nix::libc::ENOMEM);
    for _ in 0..16 {
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(rcq.wait(&mut [Wc::default()], Some(PATIENCE)).unwrap(), 1);
    }
    write(&a, &b, 0).unwrap();
    recv(0).unwrap();
    // Unsignaled requests occupy the queue only until they are finished.
    let quiet = SendWr {
        opcode: Opcode::Write,
        flags: WrFlags::NONE,
        ..SendWr::write(5, SendData::Inline(b"x"), b.mr.addr(), b.mr.rkey())
    };
    let end = Instant::now() + PATIENCE;
    for _ in 0..100 {
        while a.qp.post_send(&[quiet]).is_err() {
            assert!(Instant::now() < end);
        }
    }
}

#[test]
fn an_error_behind_unpolled_completions_overflows_no_queue() {
    let d = Daemon::loopback();
    let init = QpInit {
        max_send_wr: 16,
        ..QpInit::default()
    };
    let mut a = with_channel(&d, 16, &init).end;
    let rcq = Cq::new(&a.ctx, 64, None).unwrap();
    for round in 0..5u64 {
        a.qp = a.pd.create_qp(&a.cq, &rcq, &init).unwrap();
        a.cm = siw::CmChannel::new(&a.ctx).unwrap();
        let b = End::with(&d.context(), 4096, &deep());
        to_siw1(&a, &b);
        for i in 0..8 {
            write(&a, &b, i).unwrap();
        }
        while a.qp.outstanding_sends() > 0 {
            std::thread::yield_now();
        }
        // Eight completions are pending; the paused daemon processes no further requests.
        let paused = d.pause();
        let mut posted = 8;
        while posted < 30 {
            let flags = if posted % 4 == round % 4 {
                WrFlags::SIGNALED
            } else {
                WrFlags::NONE
            };
            // The first of them fails, the others are flushed.
            let lkey = if posted == 8 { 1 } else { a.mr.lkey() };
            let sge = [siw::Sge {
                lkey,
                ..a.mr.sge(0, 1)
            }];
            let wr = SendWr::write(posted, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
            if a.qp.post_send(&[wr.with_flags(flags)]).is_err() {
                break;
            }
            posted += 1;
        }
        assert_eq!(posted, 16);
        drop(paused);
        for i in 0..16 {
            let wc = a.wc_polled();
            assert_eq!((wc.wr_id, wc.status == WcStatus::SUCCESS), (i, i < 8));
        }
        assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    }
}

#[test]
fn a_moderated_queue_raises_one_event_for_many_completions_or_after_a_while() {
    let daemon = Daemon::loopback();
    let Armed { end: a, channel } = with_channel(&daemon, 256, &deep());
    let b = End::new(&daemon.context(), 4096);
    to_siw1(&a, &b);
    // Longer than the test takes to post.
    a.cq.moderate(10, Duration::from_micros(60_000)).unwrap();
    a.cq.req_notify(false).unwrap();
    let start = Instant::now();
    for i in 0..9 {
        write(&a, &b, i).unwrap();
    }
    for _ in 0..9 {
        a.wc_polled();
    }
    // On a machine too slow for the period, the event is due by now.
    let is_early = channel.get_event(Some(Duration::ZERO)).is_ok();
    assert!(
        !is_early || start.elapsed() >= Duration::from_millis(59),
        "nine of ten, and no time has passed"
    );
    write(&a, &b, 9).unwrap();
    if !is_early {
        assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
    }
    a.wc_polled();
    // A single completion: its event comes when the period ends.
    a.cq.req_notify(false).unwrap();
    let start = Instant::now();
    write(&a, &b, 10).unwrap();
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
    assert!(
        start.elapsed() >= Duration::from_millis(59),
        "{:?}",
        start.elapsed()
    );
    a.wc_polled();
    // Without moderation the event comes at once, and a pending event is raised when moderation
    // ends.
    a.cq.req_notify(false).unwrap();
    a.cq.moderate(100, Duration::from_micros(65_535)).unwrap();
    write(&a, &b, 11).unwrap();
    a.wc_polled();
    a.cq.moderate(0, Duration::ZERO).unwrap();
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
    assert!(a.cq.moderate(2, Duration::from_secs(1)).is_err());
}

#[test]
fn a_queue_armed_for_solicited_events_sleeps_through_others() {
    let daemon = Daemon::loopback();
    let Armed { end: b, channel } = with_channel(&daemon, 64, &deep());
    let a = End::new(&daemon.context(), 4096);
    to_siw1(&a, &b);
    for wr_id in 0..4 {
        b.qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
    }
    let send = |flags| {
        let wr = SendWr::send(1, SendData::Sges(&[])).with_flags(flags);
        a.qp.post_send(&[wr]).unwrap();
    };
    b.cq.req_notify(true).unwrap();
    send(WrFlags::SIGNALED);
    assert_eq!(b.wc_polled().wr_id, 0);
    b.ctx.read_stats().unwrap();
    assert!(quiet(&channel));
    send(WrFlags::SIGNALED | WrFlags::SOLICITED);
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
    assert_eq!(b.wc_polled().wr_id, 1);
    // A failed completion counts as solicited.
    b.cq.req_notify(true).unwrap();
    b.qp.set_error().unwrap();
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
}

trait Polled {
    fn wc_polled(&self) -> Wc;
}

impl Polled for End {
    /// Polls for the next completion, without arming the queue.
    fn wc_polled(&self) -> Wc {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.poll_spin(&mut wc, PATIENCE).unwrap(), 1);
        wc[0]
    }
}

#[test]
fn a_receive_queue_has_room_as_soon_as_one_completes() {
    const DEPTH: u32 = 8;
    let daemon = Daemon::loopback();
    let (a, mut b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let init = QpInit {
        max_recv_wr: DEPTH,
        max_recv_sge: 1,
        ..QpInit::default()
    };
    b.qp = b.pd.create_qp(&b.cq, &b.cq, &init).unwrap();
    let sges = [b.mr.sge(0, 64)];
    let receive = RecvWr {
        wr_id: 1,
        sges: &sges,
    };
    // The receive queue is full all the time: a slot is reused as soon as its completion is polled.
    while b.qp.post_recv(&[receive]).is_ok() {}
    to_siw1(&a, &b);
    for round in 0..5_000 {
        let sends = [SendWr::send(2, SendData::Inline(b"x")); DEPTH as usize];
        a.qp.post_send(&sends).unwrap();
        let (mut received, mut wc) = (0, [Wc::default()]);
        while received < DEPTH {
            if b.cq.poll(&mut wc).unwrap() == 1 {
                assert_eq!(wc[0].status, WcStatus::SUCCESS);
                let posted = b.qp.post_recv(&[receive]);
                assert!(posted.is_ok(), "round {round}: {posted:?}");
                received += 1;
            }
        }
        for _ in 0..DEPTH {
            assert_eq!(a.wc().status, WcStatus::SUCCESS);
        }
    }
}

#[test]
fn who_polls_in_vain_leaves_the_core_to_others() {
    use std::sync::atomic::{AtomicBool, Ordering};
    const WORK: Duration = Duration::from_millis(300);
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 4096);
    let core = siwd::host::allowed_cores()[0];
    let (started, done) = (std::sync::Barrier::new(2), AtomicBool::new(false));
    let polling = std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            siwd::host::pin_thread_to(core).unwrap();
            started.wait();
            let before = thread_cpu_time();
            while !done.load(Ordering::Relaxed) {
                assert_eq!(end.cq.poll(&mut [Wc::default(); 4]).unwrap(), 0);
            }
            thread_cpu_time() - before
        });
        scope.spawn(|| {
            siwd::host::pin_thread_to(core).unwrap();
            started.wait();
            let before = thread_cpu_time();
            while thread_cpu_time() - before < WORK {}
            done.store(true, Ordering::Relaxed);
        });
        poller.join().unwrap()
    });
    println!("polled for {polling:?} during {WORK:?} of work");
    // Without yielding, each of the two would get half of the core.
    assert!(
        polling < WORK / 2,
        "{polling:?} of polling during {WORK:?} of work"
    );
}
