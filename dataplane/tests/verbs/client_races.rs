//! The client library with racing threads, with reused numbers, and with a daemon that does not
//! answer.

use crate::common::*;
use siw::{
    Access, CmChannel, CmListener, Context, Cq, Error, QpInit, RecvWr, SendData, SendWr, SrqInit,
    Wc, WcStatus,
};
use std::time::{Duration, Instant};

fn connect_pair(a: &End, b: &End) {
    connect(a, b, "siw0", "10.77.0.2:0".parse().unwrap());
}

fn post_receives(end: &End, count: u64) {
    for wr_id in 0..count {
        let sges = [end.mr.sge(0, 8)];
        end.qp.post_recv(&[RecvWr { wr_id, sges: &sges }]).unwrap();
    }
}

#[test]
fn queues_that_threads_create_at_once_all_find_their_memory() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let init = SrqInit {
        max_wr: 2048,
        ..SrqInit::default()
    };
    // Several queues share a region of memory. Every few calls a new region is needed; its
    // descriptor arrives with one reply only.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let kept: Vec<_> = (0..40)
                    .map(|_| {
                        let cq = Cq::new(&ctx, 2048, None).unwrap();
                        let qp = pd.create_qp(&cq, &cq, &QpInit::default()).unwrap();
                        (qp, pd.create_srq(&init).unwrap())
                    })
                    .collect();
                assert_eq!(kept.len(), 40);
            });
        }
    });
    assert!(ctx.is_alive());
}

#[test]
fn a_destroyed_queue_pair_leaves_no_completions() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    post_receives(&b, 8);
    a.qp.post_send(&[SendWr::send(1, SendData::Inline(b"x"))])
        .unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    let End { qp, cq, .. } = b;
    // One receive has completed and the others would be flushed; destroying the queue pair discards
    // all completions.
    drop(qp);
    assert_eq!(cq.poll(&mut [Wc::default(); 16]).unwrap(), 0);
}

#[test]
fn destroying_queue_pairs_does_not_overflow_a_queue_that_others_use() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let mut first = End::new(&ctx, 4096);
    first.cq = Cq::new(&ctx, 64, None).unwrap();
    first.qp = first
        .pd
        .create_qp(&first.cq, &first.cq, &QpInit::default())
        .unwrap();
    let share = |end: &End| End {
        ctx: ctx.clone(),
        pd: end.pd.clone(),
        cq: end.cq.clone(),
        cm: CmChannel::new(&ctx).unwrap(),
        qp: end
            .pd
            .create_qp(&end.cq, &end.cq, &QpInit::default())
            .unwrap(),
        mr: end.pd.alloc_mr(64, ALL).unwrap(),
    };
    let others = [share(&first), share(&first)];
    let peers: Vec<End> = [&first, &others[0], &others[1]]
        .map(|end| {
            let peer = End::new(&daemon.context(), 4096);
            connect_pair(&peer, end);
            post_receives(end, 60);
            peer
        })
        .into();
    drop(others);
    peers[0]
        .qp
        .post_send(&[SendWr::send(7, SendData::Inline(b"alive"))])
        .unwrap();
    let completion = first.wc();
    assert_eq!(
        (completion.status, completion.qp_num),
        (WcStatus::SUCCESS, first.qp.qp_num())
    );
}

#[test]
fn a_reused_number_starts_without_completions_and_with_all_its_places() {
    let daemon = Daemon::loopback();
    let (_a, b) = pair(&daemon, 4096);
    let number = b.qp.qp_num();
    post_receives(&b, 64);
    let End { qp, pd, cq, mr, .. } = b;
    drop(qp);
    // The daemon does not reuse a freed number at once, while others are being freed.
    let init = QpInit::default();
    let again = (0..5000)
        .map(|_| pd.create_qp(&cq, &cq, &init).unwrap())
        .find(|qp| qp.qp_num() == number)
        .expect("the number did not come back");
    let mut completions = [Wc::default(); 128];
    assert_eq!(cq.poll(&mut completions).unwrap(), 0);
    let sges = [mr.sge(0, 8)];
    let receive = RecvWr {
        wr_id: 100,
        sges: &sges,
    };
    for posted in 0..init.max_recv_wr {
        again
            .post_recv(&[receive])
            .unwrap_or_else(|error| panic!("{posted}: {error}"));
    }
    assert!(matches!(
        again.post_recv(&[receive]).unwrap_err().error,
        Error::QueueFull
    ));
    again.set_error().unwrap();
    let mut flushed = 0;
    while flushed < init.max_recv_wr as usize {
        let taken = cq.wait(&mut completions, Some(PATIENCE)).unwrap();
        assert!(completions[..taken].iter().all(|wc| wc.wr_id == 100));
        flushed += taken;
    }
    assert_eq!(flushed, init.max_recv_wr as usize);
}

/// Client time-out in tests that stop the daemon.
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn the_objects_of_a_context_that_is_given_up_are_freed() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    post_receives(&a, 4);
    let listener = CmListener::new(&a.cm, None, "10.77.0.1:0".parse().unwrap(), 1, 0).unwrap();
    let srq = a.pd.create_srq(&SrqInit::default()).unwrap();
    a.ctx.set_call_timeout(SHORT).unwrap();
    let ctx = a.ctx.clone();
    let paused = daemon.pause();
    drop((srq, listener, a));
    assert!(matches!(ctx.alloc_pd(), Err(Error::Timeout)));
    assert!(matches!(ctx.alloc_pd(), Err(Error::DaemonGone)));
    assert!(matches!(
        Context::open_with_timeout(Some(&daemon.socket), SHORT),
        Err(Error::Timeout)
    ));
    drop(paused);
    // The daemon frees the objects that the client gave up: the peer sees the end of the
    // connection.
    while !matches!(
        b.cm.get_event(Some(PATIENCE)).unwrap(),
        siw::CmEvent::Disconnected(_)
    ) {}
    assert!(b.ctx.is_alive());
}

#[test]
fn a_call_that_times_out_says_so_and_ends_the_context() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    ctx.set_call_timeout(SHORT).unwrap();
    let paused = daemon.pause();
    assert!(matches!(ctx.alloc_pd(), Err(Error::Timeout)));
    assert!(!ctx.is_alive());
    assert!(matches!(ctx.get_async_event(None), Err(Error::DaemonGone)));
    drop(paused);
    assert!(daemon.context().alloc_pd().is_ok());
}

#[test]
fn who_posts_during_a_resize_that_hangs_sleeps() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let srq = pd.create_srq(&SrqInit::default()).unwrap();
    let mr = pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
    ctx.set_call_timeout(Duration::from_secs(1)).unwrap();
    let _paused = daemon.pause();
    let sges = [mr.sge(0, 8)];
    std::thread::scope(|scope| {
        let resize = scope.spawn(|| srq.resize(128));
        let receive = RecvWr {
            wr_id: 1,
            sges: &sges,
        };
        let mut posted = 0;
        // Posting continues until the resize has begun; then one call blocks until the resize ends.
        while !resize.is_finished() {
            let before = (Instant::now(), thread_cpu_time());
            match srq.post_recv(&[receive]) {
                Ok(()) => posted += 1,
                Err(full) => assert!(matches!(full.error, Error::QueueFull), "{full}"),
            }
            let (wall, cpu) = (before.0.elapsed(), thread_cpu_time() - before.1);
            assert!(cpu < Duration::from_millis(50), "{cpu:?} of {wall:?}");
        }
        assert!(matches!(resize.join().unwrap(), Err(Error::Timeout)));
        assert!(posted > 0);
    });
}

#[test]
fn completions_are_polled_while_a_resize_hangs() {
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 4096);
    end.ctx.set_call_timeout(Duration::from_secs(3)).unwrap();
    post_receives(&end, 4);
    end.qp.set_error().unwrap();
    assert_eq!(end.wc().status, WcStatus::WR_FLUSH_ERR);
    // The worker has flushed all four when it answers.
    end.qp.query().unwrap();
    let _paused = daemon.pause();
    std::thread::scope(|scope| {
        let resize = scope.spawn(|| end.cq.resize(4096));
        let mut slowest = Duration::ZERO;
        let mut polled = 0;
        while !resize.is_finished() {
            let begin = Instant::now();
            let taken = end.cq.poll(&mut [Wc::default(); 1]);
            slowest = slowest.max(begin.elapsed());
            polled += taken.unwrap_or(0);
        }
        assert_eq!(polled, 3);
        // A poll that waited for the resize would take three seconds.
        assert!(slowest < Duration::from_secs(2), "{slowest:?}");
        assert!(matches!(resize.join().unwrap(), Err(Error::Timeout)));
    });
}
