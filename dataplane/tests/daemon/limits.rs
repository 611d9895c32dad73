//! Device limits that clients query (ibv_query_device(3)): each is at least that of Linux siw, each
//! can be reached, and requests beyond it are refused with a reason.

use crate::common::*;
use siw::{
    Access, ConnectOptions, Context, Cq, Error, Opcode, QpInit, RecvWr, SendData, SendWr, Sge,
    SrqInit, Wc, WcStatus, WrFlags,
};

fn refused(error: Error, words: &str) {
    assert!(error.to_string().contains(words), "{error}");
    assert!(
        [nix::libc::EINVAL, nix::libc::ENOMEM].contains(&error.errno()),
        "{error}"
    );
}

fn all_of<T>(n: u32, mut make: impl FnMut() -> Result<T, Error>, words: &str) -> Vec<T> {
    let all: Vec<T> = (0..n)
        .map(|i| make().unwrap_or_else(|error| panic!("{i} of {n}: {error}")))
        .collect();
    refused(make().err().expect("one too many"), words);
    all
}

#[test]
fn no_limit_is_below_that_of_linux_siw() {
    let daemon = Daemon::loopback();
    let limits = daemon.context().limits();
    assert!(limits.max_qp >= 102_400 && limits.max_qp_wr >= 32_768);
    assert!(limits.max_sge >= 16 && limits.max_sge_rd >= 1 && limits.max_inline >= 256);
    assert!(limits.max_ord >= 128 && limits.max_ird >= 128);
    assert!(limits.max_cq >= 102_400 && limits.max_cqe >= 3_276_800);
    assert!(limits.max_mr >= 1_024_000 && limits.max_pd >= 102_400);
    assert!(limits.max_srq >= 102_400 && limits.max_srq_wr >= 327_680 && limits.max_srq_sge >= 6);
    assert_eq!(limits.max_private_data, 512);
    assert_eq!(limits.max_msg, u64::from(u32::MAX));
}

#[test]
fn as_many_queue_pairs_as_promised_exist_at_once() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let cq = Cq::new(&ctx, 16, None).unwrap();
    let init = QpInit {
        max_send_wr: 1,
        max_recv_wr: 1,
        ..QpInit::default()
    };
    let most = ctx.limits().max_qp;
    let mut all = all_of(most, || pd.create_qp(&cq, &cq, &init), "limit is 102400");
    // The last queue pair works like the first, and destroying one makes room for another.
    let b = End::new(&daemon.context(), 4096);
    let mut a = End::new(&daemon.context(), 4096);
    drop(all.pop());
    a.ctx = ctx.clone();
    a.pd = pd.clone();
    a.cq = Cq::new(&ctx, 16, None).unwrap();
    a.qp = pd.create_qp(&a.cq, &a.cq, &init).unwrap();
    a.cm = siw::CmChannel::new(&ctx).unwrap();
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    let wr = SendWr::write(1, SendData::Inline(b"x"), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
}

#[test]
fn as_many_protection_domains_and_shared_queues_as_promised_exist_at_once() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let limits = ctx.limits();
    let pds = all_of(limits.max_pd, || ctx.alloc_pd(), "protection domains");
    let init = SrqInit {
        max_wr: 1,
        ..SrqInit::default()
    };
    let make = || pds[0].create_srq(&init);
    drop(all_of(limits.max_srq, make, "shared receive queues"));
}

#[test]
fn as_many_memory_regions_and_completion_queues_as_allowed_exist_at_once() {
    let limits = "[limits]\nmemory_regions_per_client = 100\ncompletion_queues_per_client = 100\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{limits}"), &[]);
    let ctx = daemon.context();
    assert_eq!((ctx.limits().max_mr, ctx.limits().max_cq), (100, 100));
    let pd = ctx.alloc_pd().unwrap();
    let make = || pd.alloc_mr(4096, Access::LOCAL_WRITE);
    drop(all_of(100, make, "memory regions"));
    drop(all_of(100, || Cq::new(&ctx, 1, None), "completion queues"));
}

#[test]
fn the_longest_queues_hold_what_they_promise() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let limits = ctx.limits();
    let cq = Cq::new(&ctx, limits.max_cqe, None).unwrap();
    assert!(cq.capacity() >= 3_276_800);
    refused(
        Cq::new(&ctx, limits.max_cqe + 1, None).err().unwrap(),
        "3276800 are allowed",
    );
    drop(cq);
    let init = QpInit {
        max_send_wr: limits.max_qp_wr,
        max_recv_wr: limits.max_qp_wr,
        max_send_sge: limits.max_sge,
        max_recv_sge: limits.max_sge,
        max_inline: limits.max_inline,
        sq_sig_all: false,
    };
    let mut a = End::new(&ctx, 65_536);
    a.cq = Cq::new(&ctx, 2 * limits.max_qp_wr, None).unwrap();
    a.qp = a.pd.create_qp(&a.cq, &a.cq, &init).unwrap();
    for (words, bad) in [
        (
            "at most 32768",
            QpInit {
                max_send_wr: limits.max_qp_wr + 1,
                ..init
            },
        ),
        (
            "at most 32768",
            QpInit {
                max_recv_wr: limits.max_qp_wr + 1,
                ..init
            },
        ),
        (
            "at most 16 scatter",
            QpInit {
                max_send_sge: 17,
                ..init
            },
        ),
        (
            "at most 16 scatter",
            QpInit {
                max_recv_sge: 17,
                ..init
            },
        ),
        (
            "256 inline",
            QpInit {
                max_inline: limits.max_inline + 1,
                ..init
            },
        ),
    ] {
        refused(
            a.pd.create_qp(&a.cq, &a.cq, &bad).expect_err("refused"),
            words,
        );
    }
    let b = End::new(&daemon.context(), 65_536);
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    let n = limits.max_qp_wr;
    let sges = [a.mr.sge(0, 1); 16];
    let write = SendWr {
        opcode: Opcode::Write,
        ..SendWr::write(1, SendData::Sges(&sges), b.mr.addr(), b.mr.rkey())
    };
    let recv = RecvWr {
        wr_id: 2,
        sges: &sges,
    };
    let paused = daemon.pause();
    for i in 0..n {
        a.qp.post_send(&[write])
            .unwrap_or_else(|error| panic!("{i}: {error}"));
        a.qp.post_recv(&[recv])
            .unwrap_or_else(|error| panic!("{i}: {error}"));
    }
    for error in [a.qp.post_send(&[write]), a.qp.post_recv(&[recv])] {
        assert_eq!(error.unwrap_err().error.errno(), nix::libc::ENOMEM);
    }
    drop(paused);
    let mut wc = [Wc::default(); 256];
    let mut seen = 0;
    while seen < n as usize {
        let k = a.cq.wait(&mut wc, Some(PATIENCE)).unwrap();
        assert!(
            wc[..k]
                .iter()
                .all(|w| (w.status, w.wr_id) == (WcStatus::SUCCESS, 1))
        );
        seen += k;
    }
    a.qp.set_error().unwrap();
    for _ in 0..n {
        assert_eq!(a.wc().status, WcStatus::WR_FLUSH_ERR);
    }
    // The longest shared receive queue of Linux siw, filled.
    let srq =
        a.pd.create_srq(&SrqInit {
            max_wr: limits.max_srq_wr,
            ..SrqInit::default()
        })
        .unwrap();
    for i in 0..limits.max_srq_wr {
        let r = RecvWr {
            wr_id: u64::from(i),
            sges: &[],
        };
        srq.post_recv(&[r])
            .unwrap_or_else(|error| panic!("{i}: {error}"));
    }
    assert!(
        srq.post_recv(&[RecvWr {
            wr_id: 0,
            sges: &[]
        }])
        .is_err()
    );
    assert_eq!(srq.query().unwrap().posted, limits.max_srq_wr);
}

fn with_caps(ctx: &Context, init: &QpInit) -> End {
    End::with(ctx, 65_536, init)
}

#[test]
fn sixteen_elements_and_256_inline_bytes_travel_and_one_more_is_refused() {
    let daemon = Daemon::loopback();
    let init = QpInit {
        max_send_sge: 16,
        max_recv_sge: 16,
        max_inline: 256,
        ..QpInit::default()
    };
    let (a, b) = (
        with_caps(&daemon.context(), &init),
        with_caps(&daemon.context(), &init),
    );
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    a.fill(77);
    // Elements of 1 to 16 bytes with gaps on both sides, in opposite order.
    let from: Vec<Sge> = (0..16).map(|i| a.mr.sge(i * 100, i + 1)).collect();
    let to: Vec<Sge> = (0..16).map(|i| b.mr.sge(i * 200, 16 - i)).collect();
    let data: Vec<u8> = (0..16).flat_map(|i| a.read(i * 100, i + 1)).collect();
    b.qp.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &to,
    }])
    .unwrap();
    a.qp.post_send(&[SendWr::send(1, SendData::Sges(&from))])
        .unwrap();
    let wc = b.wc();
    assert_eq!(
        (wc.status, wc.byte_len as usize),
        (WcStatus::SUCCESS, data.len())
    );
    let got: Vec<u8> = (0..16).flat_map(|i| b.read(i * 200, 16 - i)).collect();
    assert_eq!(got, data);
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    // READ into sixteen elements.
    b.fill(78);
    let sinks: Vec<Sge> = (0..16).map(|i| a.mr.sge(8192 + i * 100, i + 1)).collect();
    a.qp.post_send(&[SendWr::read(2, &sinks, b.mr.addr(), b.mr.rkey())])
        .unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    let got: Vec<u8> = (0..16)
        .flat_map(|i| a.read(8192 + i * 100, i + 1))
        .collect();
    assert_eq!(got, b.read(0, 136));
    let seventeen = [a.mr.sge(0, 1); 17];
    assert!(
        a.qp.post_send(&[SendWr::send(1, SendData::Sges(&seventeen))])
            .is_err()
    );
    assert!(
        b.qp.post_recv(&[RecvWr {
            wr_id: 1,
            sges: &seventeen
        }])
        .is_err()
    );
    let bytes = pattern(5, 257);
    for n in [255, 256] {
        let wr = SendWr::write(3, SendData::Inline(&bytes[..n]), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[wr]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert_eq!(b.read(0, n), bytes[..n]);
    }
    let wr = SendWr::write(3, SendData::Inline(&bytes), b.mr.addr(), b.mr.rkey());
    assert!(a.qp.post_send(&[wr]).is_err());
}

#[test]
fn the_deepest_reads_are_negotiated_and_run() {
    let daemon = Daemon::loopback();
    let init = QpInit {
        max_send_wr: 512,
        ..QpInit::default()
    };
    let (a, b) = (
        with_caps(&daemon.context(), &init),
        with_caps(&daemon.context(), &init),
    );
    let limits = a.ctx.limits();
    let opt = ConnectOptions {
        ord: limits.max_ord,
        ird: limits.max_ird,
        mpa_rev: Some(2),
        ..Default::default()
    };
    assert_eq!(depths(&a, &b, &opt), (128, 128));
    b.fill(3);
    let sge = [a.mr.sge(0, 60_000)];
    let wr = SendWr::read(1, &sge, b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr; 400]).unwrap();
    for _ in 0..400 {
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    }
    assert_eq!(a.read(0, 60_000), b.read(0, 60_000));
    // Larger values are reduced to the device's maximum, as the event shows (RFC 6581 section 9.1).
    let deeper = ConnectOptions {
        ord: limits.max_ord + 1,
        ird: limits.max_ird + 1,
        ..opt
    };
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    assert_eq!(depths(&a, &b, &deeper), (128, 128));
}

/// Connects with the same depths on both sides; returns the depths from ESTABLISHED on each side.
fn depths(a: &End, b: &End, opt: &ConnectOptions<'_>) -> (u32, u32) {
    let listener = siw::CmListener::new(&b.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    a.qp.connect(&a.cm, listener.local_addr(), opt).unwrap();
    let siw::CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    request.accept(&b.qp, None, opt).unwrap();
    let told = [a, b].map(|e| match e.cm.get_event(Some(PATIENCE)).unwrap() {
        siw::CmEvent::Established(info) => (info.ord, info.ird),
        other => panic!("{other:?}"),
    });
    assert_eq!(told[0], told[1]);
    told[0]
}

#[test]
fn a_fenced_request_waits_for_the_reads_before_it() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 1 << 20);
    b.fill(99);
    let len = 400_000;
    for round in 0..8 {
        a.mr.write(0, &vec![round; len]).unwrap();
        b.mr.write(500_000, &vec![0; len]).unwrap();
        let sge = [a.mr.sge(0, len)];
        let read = SendWr::read(1, &sge, b.mr.addr(), b.mr.rkey());
        // The fenced WRITE sends the bytes that were read, not those from before.
        let write = SendWr::write(2, SendData::Sges(&sge), b.mr.addr() + 500_000, b.mr.rkey())
            .with_flags(WrFlags::SIGNALED | WrFlags::FENCE);
        a.qp.post_send(&[read.with_flags(WrFlags::NONE), write])
            .unwrap();
        let wc = a.wc();
        assert_eq!((wc.status, wc.wr_id), (WcStatus::SUCCESS, 2));
        assert!(b.read(500_000, len) == b.read(0, len), "round {round}");
    }
}

#[test]
fn only_signaled_requests_complete_visibly_unless_all_do() {
    let daemon = Daemon::loopback();
    let all = QpInit {
        sq_sig_all: true,
        ..QpInit::default()
    };
    for (init, want) in [(QpInit::default(), vec![3, 6]), (all, (1..=6).collect())] {
        let (a, b) = (
            with_caps(&daemon.context(), &init),
            End::new(&daemon.context(), 4096),
        );
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
        for i in 1..=6 {
            let flags = if i % 3 == 0 {
                WrFlags::SIGNALED
            } else {
                WrFlags::NONE
            };
            let wr = SendWr::write(i, SendData::Inline(b"x"), b.mr.addr(), b.mr.rkey())
                .with_flags(flags);
            a.qp.post_send(&[wr]).unwrap();
        }
        let got: Vec<u64> = want.iter().map(|_| a.wc().wr_id).collect();
        assert_eq!(got, want);
        assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        assert_eq!(a.qp.outstanding_sends(), 0);
    }
}

/// A queue pair without requests is destroyed asynchronously. A later request that needs its slot
/// or its resources waits for that and is never refused because of it.
#[test]
fn what_a_destroyed_queue_pair_held_is_free_for_the_next_request() {
    let limit = "[limits]\nqueue_pairs_per_client = 1\ncompletion_queues_per_client = 1\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{limit}"), &[]);
    let (a, b) = (daemon.context(), daemon.context());
    for _ in 0..50 {
        let (a, b) = (End::new(&a, 64), End::new(&b, 64));
        connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    }
    let stats: serde_json::Value = serde_json::from_str(&a.read_stats().unwrap()).unwrap();
    for client in stats["clients"].as_array().unwrap() {
        assert_eq!(client["queue_pairs"], 0, "{client}");
        assert_eq!(client["completion_queues"], 0, "{client}");
        assert_eq!(client["memory_regions"], 0, "{client}");
    }
}
