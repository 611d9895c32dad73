//! The Rust verbs API against the daemon.

use crate::common::Daemon;
use siw::*;
use siw_shm::control::{ControlSocket, HelloReply};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SEC: Duration = Duration::from_secs(10);

struct Side {
    ctx: Context,
    pd: Pd,
    channel: Arc<CompletionChannel>,
    cq: Cq,
    mr: Mr,
    qp: Qp,
}

fn side_of(ctx: &Context, init: &QpInit) -> Side {
    let pd = ctx.alloc_pd().unwrap();
    let channel = CompletionChannel::new(ctx).unwrap();
    let cq = Cq::new(ctx, 128, Some((&channel, 42))).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let mr = pd.alloc_mr(8192, access).unwrap();
    let qp = pd.create_qp(&cq, &cq, init).unwrap();
    Side {
        ctx: ctx.clone(),
        pd,
        channel,
        cq,
        mr,
        qp,
    }
}

fn init() -> QpInit {
    QpInit {
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 100,
        ..QpInit::default()
    }
}

fn connect(a: &Side, b: &Side) -> (CmChannel, CmChannel, ConnectionInfo) {
    let server = CmChannel::new(&b.ctx).unwrap();
    let addr: SocketAddr = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&server, None, addr, 1, 7).unwrap();
    let client = CmChannel::new(&a.ctx).unwrap();
    let opt = ConnectOptions {
        private_data: b"hi",
        cookie: 5,
        ..Default::default()
    };
    a.qp.connect(&client, listener.local_addr(), &opt).unwrap();
    let CmEvent::ConnectRequest(req) = server.get_event(Some(SEC)).unwrap() else {
        panic!()
    };
    assert_eq!(
        (
            req.connection_info().cookie,
            &req.connection_info().private_data[..]
        ),
        (7, &b"hi"[..])
    );
    let opt = ConnectOptions {
        private_data: b"there",
        cookie: 6,
        ..Default::default()
    };
    req.accept(&b.qp, None, &opt).unwrap();
    let CmEvent::Established(info) = client.get_event(Some(SEC)).unwrap() else {
        panic!()
    };
    let CmEvent::Established(j) = server.get_event(Some(SEC)).unwrap() else {
        panic!()
    };
    assert_eq!((info.cookie, j.cookie), (5, 6));
    (client, server, info)
}

fn pair(daemon: &Daemon) -> (Side, Side) {
    let (a, b) = (
        side_of(&daemon.context(), &init()),
        side_of(&daemon.context(), &init()),
    );
    let (_, _, info) = connect(&a, &b);
    assert_eq!(info.private_data, b"there");
    (a, b)
}

fn one(cq: &Cq) -> Wc {
    let mut wc = [Wc::default(); 1];
    assert_eq!(cq.wait(&mut wc, Some(SEC)).unwrap(), 1);
    wc[0]
}

#[test]
fn data_goes_by_write_read_and_send_between_two_clients() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    a.mr.write(0, b"written").unwrap();
    let sge = [a.mr.sge(0, 7)];
    let wr = SendWr::write(1, SendData::Sges(&sge), b.mr.addr() + 100, b.mr.rkey());
    a.qp.post_send(&[wr]).unwrap();
    assert_eq!(
        (one(&a.cq).wr_id, one_status(&b, 100, 7)),
        (1, b"written".to_vec())
    );
    b.mr.write(200, b"read").unwrap();
    let sge = [a.mr.sge(50, 2), a.mr.sge(60, 2)];
    a.qp.post_send(&[SendWr::read(2, &sge, b.mr.addr() + 200, b.mr.rkey())])
        .unwrap();
    let wc = one(&a.cq);
    assert_eq!(
        (wc.wr_id, wc.status, wc.opcode),
        (2, WcStatus::SUCCESS, WcOpcode::RDMA_READ)
    );
    assert_eq!(one_status(&a, 50, 2), b"re");
    assert_eq!(one_status(&a, 60, 2), b"ad");
    b.qp.post_recv(&[RecvWr {
        wr_id: 3,
        sges: &[b.mr.sge(0, 64)],
    }])
    .unwrap();
    a.qp.post_send(&[SendWr::send(4, SendData::Inline(b"sent"))])
        .unwrap();
    assert_eq!(one(&a.cq).wr_id, 4);
    let wc = one(&b.cq);
    assert_eq!((wc.wr_id, wc.opcode, wc.byte_len), (3, WcOpcode::RECV, 4));
    assert_eq!(wc.qp_num, b.qp.qp_num());
    assert_eq!(one_status(&b, 0, 4), b"sent");
    assert_eq!(b.mr.read_byte(1).unwrap(), b'e');
}

fn one_status(s: &Side, off: usize, len: usize) -> Vec<u8> {
    let mut b = vec![0; len];
    s.mr.read(off, &mut b).unwrap();
    b
}

#[test]
fn posting_refuses_what_verbs_refuse() {
    let d = Daemon::loopback();
    let a = side_of(&d.context(), &init());
    let s = |data| SendWr::send(1, data);
    let error = a.qp.post_send(&[s(SendData::Inline(b"x"))]).unwrap_err();
    assert_eq!(
        (error.index, error.error.errno()),
        (0, nix::libc::EINVAL),
        "not connected"
    );
    let b = side_of(&d.context(), &init());
    connect(&a, &b);
    let sges = [a.mr.sge(0, 1); 5];
    let ok = SendWr::write(1, SendData::Inline(b"x"), b.mr.addr(), b.mr.rkey());
    // No work requests are processed while the daemon is stopped.
    let paused = d.pause();
    let error = a.qp.post_send(&[ok, s(SendData::Sges(&sges))]).unwrap_err();
    assert_eq!(
        (error.index, error.error.errno()),
        (1, nix::libc::EINVAL),
        "too many SGEs"
    );
    let error =
        a.qp.post_send(&[s(SendData::Inline(&[0; 101]))])
            .unwrap_err();
    assert_eq!(error.error.errno(), nix::libc::EINVAL, "inline too long");
    let reserved = SendWr {
        opcode: Opcode::FetchAdd,
        ..ok
    };
    assert_eq!(
        a.qp.post_send(&[reserved]).unwrap_err().error.errno(),
        nix::libc::EINVAL
    );
    let error =
        a.qp.post_recv(&[RecvWr {
            wr_id: 0,
            sges: &sges,
        }])
        .unwrap_err();
    assert_eq!(error.error.errno(), nix::libc::EINVAL);
    // One request is in the queue; 63 more fill it.
    for i in 0..63 {
        a.qp.post_send(&[ok])
            .unwrap_or_else(|error| panic!("{i}: {error}"));
    }
    assert_eq!(
        a.qp.post_send(&[ok]).unwrap_err().error.errno(),
        nix::libc::ENOMEM
    );
    assert_eq!(a.qp.outstanding_sends(), 64);
    drop(paused);
    assert_eq!(one(&a.cq).status, WcStatus::SUCCESS);
    a.qp.post_send(&[ok]).unwrap();
    assert!(matches!(a.mr.write(8190, b"xyz"), Err(Error::Invalid(_))));
}

#[test]
fn a_sleeping_worker_is_woken_and_the_channel_delivers_the_cookie() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    b.cq.req_notify(false).unwrap();
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    b.qp.post_recv(&[RecvWr {
        wr_id: 9,
        sges: &[b.mr.sge(0, 8)],
    }])
    .unwrap();
    a.qp.post_send(&[SendWr::send(4, SendData::Inline(b"x"))])
        .unwrap();
    assert_eq!(b.channel.get_event(Some(SEC)).unwrap(), 42);
    assert_eq!(one(&b.cq).wr_id, 9);
    assert!(matches!(
        b.channel.get_event(Some(Duration::ZERO)),
        Err(Error::Timeout)
    ));
    // A post while the worker goes to sleep needs the worker's eventfd; no wake-up may be lost.
    let sleeps = || {
        let stats: serde_json::Value = serde_json::from_str(&a.ctx.read_stats().unwrap()).unwrap();
        stats["workers"][0]["sleeps"].as_u64().unwrap()
    };
    let before = sleeps();
    one(&a.cq);
    while sleeps() < before + 20 {
        let wr = SendWr::write(5, SendData::Inline(b"y"), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[wr]).unwrap();
        one(&a.cq);
    }
}

#[test]
fn only_solicited_messages_wake_a_receiver_that_asked_for_them() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    for i in 0..2 {
        b.qp.post_recv(&[RecvWr {
            wr_id: i,
            sges: &[b.mr.sge(0, 8)],
        }])
        .unwrap();
    }
    b.cq.req_notify(true).unwrap();
    let plain = SendWr::send(1, SendData::Inline(b"x"));
    a.qp.post_send(&[plain]).unwrap();
    one(&a.cq);
    assert!(matches!(
        b.channel.get_event(Some(Duration::ZERO)),
        Err(Error::Timeout)
    ));
    a.qp.post_send(&[plain.with_flags(WrFlags::SIGNALED | WrFlags::SOLICITED)])
        .unwrap();
    assert_eq!(b.channel.get_event(Some(SEC)).unwrap(), 42);
}

#[test]
fn everything_outstanding_is_flushed_in_the_error_state() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    b.qp.post_recv(&[RecvWr {
        wr_id: 1,
        sges: &[],
    }])
    .unwrap();
    b.qp.set_error().unwrap();
    assert_eq!(b.qp.state(), Some(QpState::Error));
    assert_eq!(one(&b.cq).status, WcStatus::WR_FLUSH_ERR);
    // Posted after the flush began: flushed as well.
    b.qp.post_recv(&[RecvWr {
        wr_id: 2,
        sges: &[],
    }])
    .unwrap();
    let wc = one(&b.cq);
    assert_eq!((wc.wr_id, wc.status), (2, WcStatus::WR_FLUSH_ERR));
    b.qp.post_send(&[SendWr::send(3, SendData::Inline(&[])).with_flags(WrFlags::NONE)])
        .unwrap();
    let wc = one(&b.cq);
    assert_eq!(
        (wc.wr_id, wc.status),
        (3, WcStatus::WR_FLUSH_ERR),
        "unsignaled failures complete"
    );
    assert_eq!(b.qp.query().unwrap().state, Some(QpState::Error));
    drop(a);
}

#[test]
fn unsignaled_sends_complete_silently_unless_the_qp_signals_all() {
    let daemon = Daemon::loopback();
    for sq_sig_all in [false, true] {
        let all = QpInit {
            sq_sig_all,
            ..init()
        };
        let (a, b) = (
            side_of(&daemon.context(), &all),
            side_of(&daemon.context(), &init()),
        );
        connect(&a, &b);
        let quiet = SendWr::write(1, SendData::Inline(b"q"), b.mr.addr(), b.mr.rkey());
        let loud = SendWr { wr_id: 2, ..quiet };
        a.qp.post_send(&[quiet.with_flags(WrFlags::NONE), loud])
            .unwrap();
        assert_eq!(one(&a.cq).wr_id, if sq_sig_all { 1 } else { 2 });
    }
}

#[test]
fn a_rejected_or_refused_connect_says_why() {
    let daemon = Daemon::loopback();
    let (a, b) = (side_of(&daemon.context(), &init()), daemon.context());
    let server = CmChannel::new(&b).unwrap();
    let listener = CmListener::new(&server, None, "10.77.0.2:0".parse().unwrap(), 1, 0).unwrap();
    let addr = listener.local_addr();
    let client = CmChannel::new(&a.ctx).unwrap();
    for by_drop in [false, true] {
        a.qp.connect(&client, addr, &ConnectOptions::default())
            .unwrap();
        let CmEvent::ConnectRequest(request) = server.get_event(Some(SEC)).unwrap() else {
            panic!()
        };
        if by_drop {
            drop(request)
        } else {
            request.reject(b"busy").unwrap()
        }
        let CmEvent::Rejected(info) = client.get_event(Some(SEC)).unwrap() else {
            panic!()
        };
        assert_eq!(info.private_data, if by_drop { &b""[..] } else { b"busy" });
    }
    drop(listener);
    let error =
        a.qp.connect_blocking(addr, &ConnectOptions::default())
            .err()
            .unwrap();
    assert!(error.to_string().contains("nothing listens"), "{error}");
    let long = ConnectOptions {
        private_data: &[0; 513],
        ..Default::default()
    };
    assert_eq!(
        a.qp.connect(&client, addr, &long).unwrap_err().errno(),
        nix::libc::EINVAL
    );
    let error = CmListener::new(&server, None, addr, 1, 0)
        .map(|_| ())
        .and_then(|()| {
            let _keep = CmListener::new(&server, None, addr, 1, 0)?;
            CmListener::new(&server, None, addr, 1, 0).map(|_| ())
        });
    assert_eq!(error.unwrap_err().errno(), nix::libc::EADDRINUSE);
}

#[test]
fn refusals_name_the_reason_and_leave_the_context_usable() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let cq = Cq::new(&ctx, 8, None).unwrap();
    let big = QpInit {
        max_send_wr: 50_000,
        ..init()
    };
    let error = pd.create_qp(&cq, &cq, &big).err().unwrap();
    assert!(error.to_string().contains("at most 32768"), "{error}");
    assert_eq!(error.errno(), nix::libc::EINVAL);
    assert!(pd.create_qp(&cq, &cq, &init()).is_ok());
    let other = daemon.context();
    let foreign = Cq::new(&other, 8, None).unwrap();
    assert!(matches!(
        pd.create_qp(&foreign, &foreign, &init()),
        Err(Error::OtherContext(_))
    ));
    assert_eq!(ctx.query_devices().unwrap()[1].name, "siw1");
    assert_eq!(ctx.device_by_name("siw0").unwrap().ips.len(), 2);
    assert!(ctx.device_by_name("nope").is_err());
    // Longer than one reply, so it arrives in parts.
    let others: Vec<Context> = (0..50).map(|_| daemon.context()).collect();
    let text = ctx.read_stats().unwrap();
    assert!(text.len() > 4096);
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(stats["clients"].as_array().unwrap().len(), 2 + others.len());
}

#[test]
fn many_queues_share_few_mappings() {
    let daemon = Daemon::loopback();
    let a = side_of(&daemon.context(), &init());
    let qps: Vec<Qp> = (0..300)
        .map(|_| a.pd.create_qp(&a.cq, &a.cq, &init()).unwrap())
        .collect();
    let numbers: std::collections::HashSet<u32> = qps.iter().map(Qp::qp_num).collect();
    assert_eq!(numbers.len(), 300);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // Other tests of this process map queues, too; 300 QPs of 13 KiB fit in 2 chunks.
    assert!(maps.matches("siwd-queues").count() < 200);
    drop(qps);
    a.pd.create_qp(&a.cq, &a.cq, &init()).unwrap();
}

#[test]
fn several_threads_post_and_poll_the_same_objects() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    let (threads, each) = (4u64, 500u64);
    // The completion queue holds 128, so the number of unpolled completions must stay below that.
    let credits = std::sync::atomic::AtomicI64::new(100);
    std::thread::scope(|s| {
        for t in 0..threads {
            let (a, b, credits) = (&a, &b, &credits);
            s.spawn(move || {
                for i in 0..each {
                    while credits.fetch_sub(1, Ordering::Relaxed) <= 0 {
                        credits.fetch_add(1, Ordering::Relaxed);
                        std::thread::yield_now();
                    }
                    let id = t * each + i;
                    let wr = SendWr::write(id, SendData::Inline(b"z"), b.mr.addr(), b.mr.rkey());
                    while let Err(error) = a.qp.post_send(&[wr]) {
                        assert!(matches!(error.error, Error::QueueFull), "{error}");
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut seen = std::collections::HashSet::new();
        let mut wc = [Wc::default(); 16];
        while seen.len() < (threads * each) as usize {
            let n = a.cq.wait(&mut wc, Some(SEC)).unwrap();
            credits.fetch_add(n as i64, Ordering::Relaxed);
            for w in &wc[..n] {
                assert_eq!(w.status, WcStatus::SUCCESS);
                assert!(seen.insert(w.wr_id));
            }
        }
    });
}

#[test]
fn a_dead_daemon_ends_every_wait() {
    let mut daemon = Daemon::loopback();
    let a = side_of(&daemon.context(), &init());
    let bare = Cq::new(&a.ctx, 8, None).unwrap();
    let cm = CmChannel::new(&a.ctx).unwrap();
    assert!(a.ctx.is_alive());
    std::thread::scope(|s| {
        let mut waits = Vec::new();
        waits.push(s.spawn(|| a.cq.wait(&mut [Wc::default()], None).unwrap_err()));
        waits.push(s.spawn(|| bare.wait(&mut [Wc::default()], None).unwrap_err()));
        waits.push(s.spawn(|| a.channel.get_event(None).unwrap_err()));
        waits.push(s.spawn(|| cm.get_event(None).unwrap_err()));
        waits.push(s.spawn(|| a.ctx.get_async_event(None).unwrap_err()));
        waits.push(s.spawn(|| {
            loop {
                // Plain polling, without the library's blocking calls.
                if let Err(error) = bare.poll(&mut [Wc::default()]) {
                    return error;
                }
            }
        }));
        daemon.kill();
        for w in waits {
            let error = w.join().unwrap();
            assert!(matches!(error, Error::DaemonGone), "{error}");
        }
    });
    assert!(!a.ctx.is_alive());
    assert!(matches!(a.ctx.alloc_pd().err(), Some(Error::DaemonGone)));
    assert_eq!(Error::DaemonGone.errno(), nix::libc::ENODEV);
    // Posting into shared memory does not crash; destructors do not hang.
    let _ = a.qp.post_recv(&[RecvWr {
        wr_id: 0,
        sges: &[],
    }]);
}

#[test]
fn completions_before_the_daemons_death_are_delivered() {
    let mut daemon = Daemon::loopback();
    let (a, b) = pair(&daemon);
    let wr = SendWr::write(1, SendData::Inline(b"z"), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr; 3]).unwrap();
    while a.qp.outstanding_sends() > 0 {
        std::thread::yield_now();
    }
    // The worker answers between batches, and writes the completions of a batch at its end.
    a.qp.query().unwrap();
    daemon.kill();
    assert!(!a.ctx.is_alive());
    let mut wc = [Wc::default(); 8];
    assert_eq!(a.cq.poll(&mut wc).unwrap(), 3);
    assert!(matches!(a.cq.poll(&mut wc), Err(Error::DaemonGone)));
}

#[test]
fn an_overflowed_completion_queue_reports_it() {
    let daemon = Daemon::loopback();
    let (ctx, b) = (daemon.context(), side_of(&daemon.context(), &init()));
    let mut a = side_of(&ctx, &init());
    a.cq = Cq::new(&ctx, 4, None).unwrap();
    a.qp = a.pd.create_qp(&a.cq, &a.cq, &init()).unwrap();
    connect(&a, &b);
    let wr = SendWr::write(1, SendData::Inline(b"z"), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr; 5]).unwrap();
    let error = ctx.get_async_event(Some(SEC)).unwrap();
    assert_eq!(
        (error.kind, error.object),
        (Some(AsyncEventKind::CqErr), a.cq.cq_id())
    );
    assert_eq!(a.cq.poll(&mut [Wc::default(); 8]).unwrap(), 4);
    let error = a.cq.poll_spin(&mut [Wc::default(); 8], SEC).unwrap_err();
    assert_eq!(error.errno(), nix::libc::EOVERFLOW);
}

#[test]
fn no_daemon_is_told_with_the_path() {
    let error = Context::open(Some("/nonexistent/siwd.sock".as_ref()))
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("/nonexistent/siwd.sock"),
        "{error}"
    );
    assert_eq!(error.errno(), nix::libc::ENOENT);
}

/// Opens a context while `answer` acts as the daemon for one request.
fn open_against(answer: impl FnOnce(&ControlSocket, u32) + Send + 'static) -> Error {
    let (daemon, client) = ControlSocket::new_pair().unwrap();
    daemon.set_nonblocking(false).unwrap();
    let t = std::thread::spawn(move || {
        let p = daemon.recv_packet().unwrap();
        let (_, seq) = siw_shm::control::codec::peek_header(&p.bytes).unwrap();
        answer(&daemon, seq);
    });
    let error = Context::from_conn(client).err().unwrap();
    t.join().unwrap();
    error
}

#[test]
fn a_daemon_of_another_version_is_refused_in_words() {
    let e = open_against(|d, seq| {
        let mut p = siw_shm::control::codec::encode_error(1, seq, 93, "this is siwd protocol 9");
        p[4] = 9;
        d.send_packet(&p, &[]).unwrap();
    });
    assert!(e.to_string().contains("this is siwd protocol 9"), "{e}");
    let e = open_against(|d, seq| {
        let r: HelloReply = bytemuck::Zeroable::zeroed();
        let mut p = siw_shm::control::codec::encode_reply::<siw_shm::control::ClientHello>(seq, &r);
        p[4] = 9;
        d.send_packet(&p, &[]).unwrap();
    });
    assert_eq!(e.errno(), nix::libc::EPROTONOSUPPORT, "{e}");
}

#[test]
fn a_hello_reply_without_descriptors_or_sense_is_refused() {
    let e = open_against(|d, seq| {
        let r = HelloReply {
            version: siw_shm::control::VERSION.into(),
            n_workers: 4,
            ..bytemuck::Zeroable::zeroed()
        };
        d.send_reply::<siw_shm::control::ClientHello>(seq, &r, &[])
            .unwrap();
    });
    assert!(e.to_string().contains("file descriptor"), "{e}");
    assert!(matches!(open_against(|_, _| ()), Error::DaemonGone));
    let e = open_against(|d, _| d.send_packet(b"nonsense", &[]).unwrap());
    assert_eq!(e.errno(), nix::libc::EPROTO, "{e}");
}

#[test]
fn shared_memory_shorter_than_promised_is_refused_instead_of_faulting() {
    let e = open_against(|d, seq| {
        let r = HelloReply {
            version: siw_shm::control::VERSION.into(),
            n_workers: 1,
            doorbell_capacity: 1 << 16,
            ..bytemuck::Zeroable::zeroed()
        };
        let short =
            siw_shm::SharedMemory::create_memfd("s", 64, siw_shm::shared_memory::PageSize::Normal)
                .unwrap();
        let fd = short.memfd().unwrap();
        d.send_reply::<siw_shm::control::ClientHello>(seq, &r, &[fd; 4])
            .unwrap();
    });
    assert!(e.to_string().contains("instead of at least"), "{e}");
}
