//! Shared receive queues against the daemon.

use crate::common::*;
use siw::{
    AsyncEventKind, CmEvent, ConnectOptions, Context, Cq, QpInit, RecvWr, SendData, SendWr, Srq,
    SrqInit, Wc, WcOpcode, WcStatus,
};
use std::time::Duration;

/// A receiver whose queue pairs share one receive queue and one completion queue.
struct Hub {
    end: End,
    srq: Srq,
    listener: siw::CmListener,
}

impl Hub {
    fn new(ctx: &Context, init: &SrqInit) -> Hub {
        let end = End::new(ctx, 256 * 1024);
        let srq = end.pd.create_srq(init).unwrap();
        let listener =
            siw::CmListener::new(&end.cm, None, "10.77.0.2:0".parse().unwrap(), 64, 0).unwrap();
        Hub { end, srq, listener }
    }

    /// Connects `from` to a new queue pair of the hub.
    fn join(&self, from: &End) -> siw::Qp {
        let e = &self.end;
        let qp =
            e.pd.create_qp_with_srq(&e.cq, &e.cq, &self.srq, &QpInit::default())
                .unwrap();
        from.qp
            .connect(
                &from.cm,
                self.listener.local_addr(),
                &ConnectOptions::default(),
            )
            .unwrap();
        let request = loop {
            match e.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::ConnectRequest(request) => break request,
                CmEvent::Disconnected(_) => {}
                other => panic!("{other:?}"),
            }
        };
        request
            .accept(&qp, None, &ConnectOptions::default())
            .unwrap();
        for cm in [&e.cm, &from.cm] {
            assert!(matches!(
                cm.get_event(Some(PATIENCE)).unwrap(),
                CmEvent::Established(_)
            ));
        }
        qp
    }

    fn post(&self, wr_id: u64) {
        self.try_post(wr_id).unwrap();
    }

    fn try_post(&self, wr_id: u64) -> Result<(), siw::PostError> {
        let sge = [self.end.mr.sge((wr_id as usize % 1024) * 64, 64)];
        self.srq.post_recv(&[RecvWr { wr_id, sges: &sge }])
    }

    fn event(&self) -> (Option<AsyncEventKind>, u32) {
        let e = self.end.ctx.get_async_event(Some(PATIENCE)).unwrap();
        (e.kind, e.object)
    }
}

fn send(from: &End, wr_id: u64, bytes: &[u8]) {
    from.qp
        .post_send(&[SendWr::send(wr_id, SendData::Inline(bytes))])
        .unwrap();
}

fn quiet(ctx: &Context) -> bool {
    // Events that a worker posted before this answer are queued by now.
    ctx.read_stats().unwrap();
    ctx.get_async_event(Some(Duration::ZERO)).is_err()
}

#[test]
fn queue_pairs_take_shared_requests_in_posting_order() {
    let daemon = Daemon::loopback();
    let hub = Hub::new(&daemon.context(), &SrqInit::default());
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let (qa, qb) = (hub.join(&a), hub.join(&b));
    for wr_id in 0..6 {
        hub.post(wr_id);
    }
    assert_eq!(hub.srq.query().unwrap().posted, 6);
    for i in 0..6u64 {
        let (from, to) = if i % 3 == 0 { (&a, &qa) } else { (&b, &qb) };
        send(from, i, format!("message {i}").as_bytes());
        let wc = hub.end.wc();
        assert_eq!((wc.status, wc.opcode), (WcStatus::SUCCESS, WcOpcode::RECV));
        assert_eq!((wc.wr_id, wc.qp_num), (i, to.qp_num()));
        assert_eq!(
            hub.end.read(i as usize * 64, 9),
            format!("message {i}").as_bytes()
        );
        assert_eq!(from.wc().status, WcStatus::SUCCESS);
    }
    assert_eq!(hub.srq.query().unwrap().posted, 0);
    let error = qa
        .post_recv(&[RecvWr {
            wr_id: 1,
            sges: &[],
        }])
        .unwrap_err();
    assert!(
        error.to_string().contains("shared receive queue"),
        "{error}"
    );
}

#[test]
fn an_empty_queue_terminates_the_stream_that_needs_it_and_no_other() {
    let daemon = Daemon::loopback();
    let hub = Hub::new(&daemon.context(), &SrqInit::default());
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let (qa, _qb) = (hub.join(&a), hub.join(&b));
    send(&a, 1, b"too early");
    match a.cm.get_event(Some(PATIENCE)).unwrap() {
        // RFC 5041 section 7.1: layer 1, type 2, code 02.
        CmEvent::Disconnected(info) => assert!(info.reason.contains("1/2/02"), "{}", info.reason),
        other => panic!("{other:?}"),
    }
    let events = [hub.event(), hub.event()];
    assert!(
        events.contains(&(Some(AsyncEventKind::QpReqErr), qa.qp_num())),
        "{events:?}"
    );
    assert!(
        events.contains(&(Some(AsyncEventKind::QpLastWqeReached), qa.qp_num())),
        "{events:?}"
    );
    hub.post(5);
    send(&b, 2, b"in time");
    let wc = hub.end.wc();
    assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, 5));
}

#[test]
fn a_queue_pair_that_ends_leaves_the_shared_requests_to_the_others() {
    let daemon = Daemon::loopback();
    let hub = Hub::new(&daemon.context(), &SrqInit::default());
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let (qa, qb) = (hub.join(&a), hub.join(&b));
    for wr_id in 0..3 {
        hub.post(wr_id);
    }
    qa.set_error().unwrap();
    assert_eq!(
        hub.event(),
        (Some(AsyncEventKind::QpLastWqeReached), qa.qp_num())
    );
    assert_eq!(hub.srq.query().unwrap().posted, 3, "nothing is flushed");
    assert_eq!(hub.end.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    b.qp.disconnect().unwrap();
    assert_eq!(
        hub.event(),
        (Some(AsyncEventKind::QpLastWqeReached), qb.qp_num())
    );
    assert!(quiet(&hub.end.ctx), "each queue pair tells it once");
    let c = End::new(&daemon.context(), 4096);
    let _qc = hub.join(&c);
    send(&c, 1, b"still there");
    assert_eq!(hub.end.wc().wr_id, 0);
}

#[test]
fn the_limit_event_comes_once_for_each_arming() {
    let daemon = Daemon::loopback();
    let hub = Hub::new(
        &daemon.context(),
        &SrqInit {
            limit: 3,
            ..SrqInit::default()
        },
    );
    // Nothing is posted: the count is below the limit from the start.
    assert_eq!(
        hub.event(),
        (Some(AsyncEventKind::SrqLimitReached), hub.srq.srq_id())
    );
    let a = End::new(&daemon.context(), 4096);
    let _qa = hub.join(&a);
    for wr_id in 0..5 {
        hub.post(wr_id);
    }
    hub.srq.arm_limit(3).unwrap();
    assert_eq!(hub.srq.query().unwrap().limit, 3);
    let take = || {
        send(&a, 1, b"x");
        hub.end.wc();
    };
    take();
    take();
    assert!(quiet(&hub.end.ctx), "three are left");
    take();
    assert_eq!(
        hub.event(),
        (Some(AsyncEventKind::SrqLimitReached), hub.srq.srq_id())
    );
    assert_eq!(hub.srq.query().unwrap().limit, 0, "the event disarms");
    take();
    assert!(quiet(&hub.end.ctx));
    let error = hub.srq.arm_limit(65).unwrap_err();
    assert!(error.to_string().contains("holds 64"), "{error}");
}

#[test]
fn a_resize_keeps_what_is_posted_and_refuses_to_lose_any() {
    let daemon = Daemon::loopback();
    let hub = Hub::new(
        &daemon.context(),
        &SrqInit {
            max_wr: 8,
            ..SrqInit::default()
        },
    );
    let a = End::new(&daemon.context(), 4096);
    let _qa = hub.join(&a);
    for wr_id in 0..8 {
        hub.post(wr_id);
    }
    assert_eq!(
        hub.try_post(8).unwrap_err().error.errno(),
        nix::libc::ENOMEM
    );
    let error = hub.srq.resize(7).unwrap_err();
    assert!(
        error.to_string().contains("8 receive requests are posted"),
        "{error}"
    );
    hub.srq.resize(100).unwrap();
    for wr_id in 8..16 {
        hub.post(wr_id);
    }
    hub.srq.arm_limit(2).unwrap();
    let mut expect = 0;
    let mut take = || {
        send(&a, 1, b"x");
        let wc = hub.end.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, expect));
        expect += 1;
    };
    (0..12).for_each(|_| take());
    hub.srq.resize(4).unwrap();
    assert_eq!(hub.srq.query().unwrap().max_wr, 4);
    (0..2).for_each(|_| take());
    assert!(quiet(&hub.end.ctx));
    take();
    assert_eq!(
        hub.event(),
        (Some(AsyncEventKind::SrqLimitReached), hub.srq.srq_id())
    );
    take();
    for wr_id in 16..20 {
        hub.post(wr_id);
    }
    assert!(hub.try_post(20).is_err());
    (0..4).for_each(|_| take());
    // Memory of former rings is reused: in total far more than the client's share is allocated.
    for i in 0..2000 {
        hub.srq.resize(1 + i % 20_000).unwrap();
    }
}

/// A worker that takes a request may have to look at each ring that still has some.
#[test]
fn resizes_in_front_of_posted_requests_are_bounded() {
    let daemon = Daemon::loopback();
    let init = SrqInit {
        max_wr: 1024,
        ..SrqInit::default()
    };
    let hub = Hub::new(&daemon.context(), &init);
    let a = End::new(&daemon.context(), 4096);
    let _qa = hub.join(&a);
    let mut posted = 0;
    let error = loop {
        hub.post(posted);
        posted += 1;
        assert!(posted < 100, "each resize has added a ring");
        if let Err(error) = hub.srq.resize(1024 + posted as u32) {
            break error;
        }
    };
    assert_eq!(error.errno(), nix::libc::EBUSY, "{error}");
    // The refused resize has changed nothing, and another one succeeds when requests were taken.
    let take = |wr_id| {
        send(&a, wr_id, b"x");
        let wc = hub.end.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, wr_id));
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    };
    (0..posted / 2).for_each(take);
    hub.srq.resize(512).unwrap();
    hub.post(posted);
    (posted / 2..=posted).for_each(take);
}

#[test]
fn a_stream_that_holds_its_share_cannot_starve_the_others() {
    let daemon = Daemon::loopback();
    let init = SrqInit {
        max_wr: 16,
        share: 4,
        ..SrqInit::default()
    };
    let hub = Hub::new(&daemon.context(), &init);
    assert_eq!(hub.srq.query().unwrap().share, 4);
    let (greedy, modest) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let (qg, qm) = (hub.join(&greedy), hub.join(&modest));
    for wr_id in 0..16 {
        hub.post(wr_id);
    }
    // Unlimited while the application keeps up.
    for i in 0..40u64 {
        send(&greedy, i, b"x");
        let wc = hub.end.wc();
        assert_eq!((wc.status, wc.qp_num), (WcStatus::SUCCESS, qg.qp_num()));
        hub.post(16 + i);
    }
    // Completions are not polled now: the share is four.
    for i in 0..10 {
        send(&greedy, i, b"x");
    }
    match greedy.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Disconnected(i) => assert!(i.reason.contains("1/2/02"), "{}", i.reason),
        other => panic!("{other:?}"),
    }
    assert_eq!(hub.srq.query().unwrap().posted, 12);
    send(&modest, 1, b"mine");
    for i in 0..5 {
        let wc = hub.end.wc();
        let from = if i < 4 { &qg } else { &qm };
        assert_eq!((wc.status, wc.qp_num), (WcStatus::SUCCESS, from.qp_num()));
    }
}

#[test]
fn queue_pairs_of_several_workers_share_one_queue_without_losing_a_message() {
    let daemon = Daemon::start(
        &LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]"),
        &[],
    );
    const MESSAGES: u64 = 400;
    let hub = Hub::new(
        &daemon.context(),
        &SrqInit {
            max_wr: 256,
            ..SrqInit::default()
        },
    );
    let ctx = daemon.context();
    let ends: Vec<_> = (0..4)
        .map(|_| {
            let deep = QpInit {
                max_send_wr: 512,
                ..QpInit::default()
            };
            let a = End::with(&ctx, 4096, &deep);
            let qp = hub.join(&a);
            (a, qp)
        })
        .collect();
    let stats: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    for w in 0..2 {
        assert_ne!(stats["workers"][w]["queue_pairs"], 0, "{stats}");
    }
    for wr_id in 0..256 {
        hub.post(wr_id);
    }
    let (mut posted, mut got) = (256, 0);
    let mut next = vec![0u64; ends.len()];
    let mut sent = vec![0u64; ends.len()];
    let mut acked = 0;
    while got < MESSAGES * ends.len() as u64 {
        for (i, (a, _)) in ends.iter().enumerate() {
            // The messages in flight of all senders together never exceed the posted requests.
            while sent[i] < MESSAGES && sent[i] - next[i] < 32 {
                let m = [i as u64, sent[i]];
                send(a, 0, &le_bytes(&m));
                sent[i] += 1;
            }
            let mut wc = [Wc::default(); 32];
            acked += a.cq.poll(&mut wc).unwrap();
        }
        let mut wc = [Wc::default(); 32];
        let n = hub
            .end
            .cq
            .poll_spin(&mut wc, Duration::from_millis(1))
            .unwrap();
        for wc in &wc[..n] {
            assert_eq!(wc.status, WcStatus::SUCCESS);
            let b = hub.end.read((wc.wr_id as usize % 1024) * 64, 16);
            let (i, k) = (u64_at(&b, 0) as usize, u64_at(&b, 8));
            assert_eq!(wc.qp_num, ends[i].1.qp_num());
            assert_eq!(k, next[i], "each stream delivers in order");
            next[i] += 1;
            got += 1;
            hub.post(posted % 1024);
            posted += 1;
        }
    }
    while acked < (MESSAGES as usize) * ends.len() {
        for (a, _) in &ends {
            acked += a.cq.poll(&mut [Wc::default(); 32]).unwrap();
        }
    }
    assert_eq!(hub.srq.query().unwrap().posted, 256);
}

fn le_bytes(words: &[u64; 2]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}

#[test]
fn what_makes_no_sense_is_refused_in_words() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let most = ctx.limits().max_srq_wr;
    assert!(most >= 327_680, "Linux siw's limit");
    let make = |max_wr, max_sge, limit| {
        pd.create_srq(&SrqInit {
            max_wr,
            max_sge,
            limit,
            share: 0,
        })
    };
    let says = |r: Result<Srq, siw::Error>, what: &str| {
        let error = r.expect_err("refused").to_string();
        assert!(error.contains(what), "{error}");
    };
    says(make(0, 1, 0), "1 to 327680 are allowed");
    says(make(most + 1, 1, 0), "327681 work requests");
    says(make(8, 17, 0), "at most 16");
    says(make(8, 1, 9), "the queue holds 8");
    let deepest = make(most, 16, 0).unwrap();
    deepest
        .post_recv(&[RecvWr {
            wr_id: 1,
            sges: &[siw::Sge::default(); 16],
        }])
        .unwrap();
    let error = make(8, 2, 0)
        .unwrap()
        .post_recv(&[RecvWr {
            wr_id: 1,
            sges: &[siw::Sge::default(); 3],
        }])
        .unwrap_err();
    assert_eq!(error.error.errno(), nix::libc::EINVAL);
    let other = ctx.alloc_pd().unwrap();
    let cq = Cq::new(&ctx, 16, None).unwrap();
    let error = other.create_qp_with_srq(&cq, &cq, &deepest, &QpInit::default());
    assert!(
        error
            .expect_err("refused")
            .to_string()
            .contains("another protection domain")
    );
}
