//! Requirements of RFC 5042 for a hostile client on the same machine (its section 2.3, "local
//! peer"): it names objects and keys of other clients, reads none of its messages, sends endlessly,
//! and takes everything it can get. `hostile_memory.rs`, `hostile_rings.rs` and `bad_input.rs`
//! cover the memory that it shares with the daemon; `conformance/security.rs` covers the remote
//! peer.

use std::os::fd::OwnedFd;
use std::time::Instant;

use crate::common::raw_client::connection_parameters;
use crate::common::*;
use siw::{
    Access, AsyncEventKind, CmEvent, CmListener, ConnectOptions, Opcode, RecvWr, SendData, SendWr,
    Sge, WcStatus, WindowType, WrFlags,
};
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket, Message, codec};

/// A client that speaks the control protocol itself.
struct Raw {
    conn: ControlSocket,
    _fds: Vec<OwnedFd>,
}

impl Raw {
    fn new(daemon: &Daemon) -> Raw {
        let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
        let hello = m::ClientHello::new("hostile");
        let (_, fds) = conn.call_and_wait(1, &hello, &[]).unwrap();
        Raw { conn, _fds: fds }
    }

    fn call<M: Message>(&self, request: &M) -> Result<M::Reply, CallError> {
        self.conn
            .call_and_wait(2, request, &[])
            .map(|(reply, _)| reply)
    }

    /// Sends a request that must be refused with a reason, without closing the connection.
    fn refused<M: Message>(&self, what: &str, request: &M) {
        match self.call(request) {
            Err(CallError::Refused { errno, reason }) => {
                assert!(errno > 0 && !reason.is_empty(), "{what}: {errno} {reason}")
            }
            Err(error) => panic!("{what}: {error}"),
            Ok(_) => panic!("{what} was not refused"),
        }
    }
}

/// Checks that a WRITE arrives.
fn ping(a: &End, b: &End, seed: u64) {
    a.fill(seed);
    let sge = [a.mr.sge(0, 64)];
    let wr = SendWr::write(seed, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[wr, SendWr::read(seed, &[], b.mr.addr(), b.mr.rkey())])
        .unwrap();
    for _ in 0..2 {
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
    }
    assert_eq!(a.read(0, 64), b.read(0, 64));
}

/// Numbers shared by the whole daemon (queue pairs, keys, listeners, requests) are invalid for
/// clients that do not own the object; a client's own numbers are invalid before it has created an
/// object.
#[test]
fn a_client_can_do_nothing_to_what_is_another_clients() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let window = a.pd.alloc_mw(WindowType::Two).unwrap();
    let any = "10.77.0.1:0".parse().unwrap();
    let listener = CmListener::new(&a.cm, None, any, 8, 0).unwrap();
    let caller = b.another();
    let to = listener.local_addr();
    let options = ConnectOptions::default();
    caller.qp.connect(&caller.cm, to, &options).unwrap();
    let CmEvent::ConnectRequest(request) = a.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request")
    };

    let h = Raw::new(&d);
    let qp_num = a.qp.qp_num();
    let (lkey, rkey, reserved) = (a.mr.lkey(), window.rkey(), 0);
    let channel = h.call(&m::CreateCmChannel { flags: 0 }).unwrap().id;
    h.refused(
        "destroying a queue pair",
        &m::DestroyQp { qp_num, reserved },
    );
    h.refused("querying a queue pair", &m::QueryQp { qp_num, reserved });
    h.refused("disconnecting", &m::Disconnect { qp_num, flags: 0 });
    for state in 0..=7 {
        let modify = m::ModifyQp {
            qp_num,
            state,
            flags: 0,
            denied_access: 0,
        };
        h.refused("modifying a queue pair", &modify);
    }
    let connect = m::Connect {
        qp_num,
        device: m::ANY_DEVICE,
        cm_channel: channel,
        timeout_ms: 0,
        cookie: 0,
        dst: to.into(),
        src: m::Addr::NONE,
        params: connection_parameters(1),
        stream: 0,
        reserved,
    };
    h.refused("connecting a queue pair", &connect);
    h.refused("deregistering", &m::DeregMr { lkey, flags: 0 });
    for flags in 0..8 {
        let again = m::ReregMr {
            lkey,
            flags,
            pd: 1,
            arena: 1,
            offset: 0,
            len: 64,
            va: 0,
            access: 7,
            reserved,
        };
        h.refused("registering anew", &again);
    }
    h.refused("freeing a window", &m::DeallocMw { rkey, reserved });
    h.refused(
        "freeing a region as a window",
        &m::DeallocMw {
            rkey: lkey,
            reserved,
        },
    );
    for number in 0..64 {
        let unlisten = m::Unlisten {
            listener: number,
            flags: reserved,
        };
        h.refused("ending a listener", &unlisten);
    }
    let accept = m::Accept {
        request: request.id(),
        qp_num,
        cookie: 0,
        cm_channel: channel,
        reserved,
        params: connection_parameters(1),
    };
    h.refused("accepting a request", &accept);
    let reject = m::Reject {
        request: request.id(),
        private_data: m::PrivateData::new(&[]).unwrap(),
    };
    h.refused("rejecting a request", &reject);
    for id in 1..64 {
        h.refused("a domain", &m::DeallocPd { pd: id, reserved });
        h.refused(
            "an arena",
            &m::FreeArena {
                arena: id,
                reserved,
            },
        );
        h.refused("a queue", &m::DestroyCq { cq: id, reserved });
        h.refused("a queue", &m::ResizeCq { cq: id, cqe: 4 });
        h.refused("a queue", &m::FreeCqRing { cq: id, notify: 0 });
        let moderate = m::ModerateCq {
            cq: id,
            count: 1,
            period: 1,
        };
        h.refused("a queue", &moderate);
        h.refused("a window", &m::AllocMw { pd: id, kind: 1 });
        let register = m::RegMr {
            pd: id,
            arena: id,
            offset: 0,
            len: 64,
            va: 0,
            access: 7,
            reserved,
        };
        h.refused("a region", &register);
    }

    // Everything is unchanged.
    ping(&a, &b, 1);
    ping(&b, &a, 2);
    let own = a.another();
    request.accept(&own.qp, None, &options).unwrap();
    for end in [&caller, &a] {
        let e = end.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(e, CmEvent::Established(_)), "{e:?}");
    }
    drop(window);
}

/// Keys are checked against the protection domain of the queue pair that uses them, in local
/// requests as on the wire.
#[test]
fn keys_of_another_client_serve_no_work_request() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let bindable = a.pd.alloc_mr(4096, Access(31)).unwrap();
    a.fill(7);
    bindable.write(0, b"secret").unwrap();
    let before = a.read(0, 4096);
    let theirs = Sge {
        addr: a.mr.addr(),
        length: 64,
        lkey: a.mr.lkey(),
    };
    type Try<'t> = &'t dyn Fn(&End, &End);
    let send = |x: &End, wr: SendWr<'_>| x.qp.post_send(&[wr]).unwrap();
    let tries: [(&str, WcStatus, Try<'_>); 7] = [
        ("SEND", WcStatus::LOC_PROT_ERR, &|x, _| {
            send(x, SendWr::send(1, SendData::Sges(&[theirs])))
        }),
        ("WRITE", WcStatus::LOC_PROT_ERR, &|x, y| {
            let data = SendData::Sges(std::slice::from_ref(&theirs));
            send(x, SendWr::write(1, data, y.mr.addr(), y.mr.rkey()))
        }),
        ("READ", WcStatus::LOC_PROT_ERR, &|x, y| {
            send(x, SendWr::read(1, &[theirs], y.mr.addr(), y.mr.rkey()))
        }),
        ("LOCAL_INV", WcStatus::LOC_PROT_ERR, &|x, _| {
            send(x, SendWr::local_inv(1, theirs.lkey))
        }),
        ("BIND_MW", WcStatus::MW_BIND_ERR, &|x, _| {
            let mw = x.pd.alloc_mw(WindowType::Two).unwrap();
            let to = bindable.window(0..8, Access::REMOTE_READ).unwrap();
            mw.post_bind(&x.qp, 1, WrFlags::SIGNALED, &to).unwrap();
        }),
        ("RECV", WcStatus::LOC_PROT_ERR, &|x, y| {
            x.qp.post_recv(&[RecvWr {
                wr_id: 1,
                sges: &[theirs],
            }])
            .unwrap();
            y.qp.post_send(&[SendWr::send(2, SendData::Inline(b"overwritten"))])
                .unwrap();
        }),
        ("SEND_WITH_INV", WcStatus::REM_INV_REQ_ERR, &|x, y| {
            x.qp.post_recv(&[RecvWr {
                wr_id: 1,
                sges: &[],
            }])
            .unwrap();
            let wr = SendWr {
                opcode: Opcode::SendWithInv,
                imm: theirs.lkey,
                ..SendWr::send(2, SendData::Sges(&[]))
            };
            y.qp.post_send(&[wr]).unwrap();
        }),
    ];
    for (what, status, attempt) in tries {
        let (x, y) = pair(&daemon, 4096);
        attempt(&x, &y);
        let wc = x.wc();
        assert_eq!((wc.status, wc.wr_id), (status, 1), "{what}");
    }
    assert_eq!(a.read(0, 4096), before);
    ping(&b, &a, 3);
    ping(&a, &b, 4);
}

/// A client that does not read its events gets them in order later, and does not delay other
/// clients.
#[test]
fn events_that_a_client_does_not_read_keep_nobody_waiting() {
    const ERRORS: u64 = 400;
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let deaf = End::new(&daemon.context(), 64);
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&deaf.cm, None, any, 8, 0).unwrap();
    // Requests that are not read and whose peers give up.
    for i in 0..ERRORS {
        let caller = a.another();
        let options = ConnectOptions {
            cookie: i,
            ..ConnectOptions::default()
        };
        let to = listener.local_addr();
        caller.qp.connect(&caller.cm, to, &options).unwrap();
        drop(caller);
        if i % 50 == 0 {
            ping(&a, &b, i);
        }
    }
    // Errors of its queue pairs, one by one.
    let mut qps = Vec::new();
    for _ in 0..ERRORS / 10 {
        let (x, y) = (deaf.another(), End::new(&daemon.context(), 64));
        connect(&x, &y, "siw0", "10.77.0.2:0".parse().unwrap());
        y.qp.modify(siw::QpState::Terminate).unwrap();
        let e = x.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(e, CmEvent::Disconnected(_)), "{e:?}");
        qps.push(x);
    }
    ping(&b, &a, 5);
    for x in &qps {
        let e = deaf.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(
            (e.kind, e.object),
            (Some(AsyncEventKind::QpFatal), x.qp.qp_num())
        );
    }
    // Each request that arrived is followed by its cancellation.
    let mut open = std::collections::HashSet::new();
    let (mut came, end) = (0, Instant::now() + PATIENCE);
    drop(listener);
    let last = End::new(&daemon.context(), 64);
    let listener = CmListener::new(&deaf.cm, None, any, 8, 9).unwrap();
    let to = listener.local_addr();
    last.qp
        .connect(&last.cm, to, &ConnectOptions::default())
        .unwrap();
    loop {
        assert!(Instant::now() < end);
        match deaf.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(r) if r.connection_info().cookie == 9 => break,
            CmEvent::ConnectRequest(r) => {
                came += 1;
                assert!(open.insert(r.id()), "reported twice");
            }
            CmEvent::RequestCancelled { request } => assert!(open.remove(&request)),
            other => panic!("{other:?}"),
        }
    }
    assert!(came > 0, "some got as far as a request");
}

/// The daemon stops reading from a client that keeps sending requests and takes no reply.
#[test]
fn a_client_that_sends_requests_and_reads_no_reply_keeps_nobody_waiting() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let floods: Vec<Raw> = (0..4).map(|_| Raw::new(&daemon)).collect();
    let request =
        siw_shm::control::codec::encode_request(3, &m::QueryDevice { index: 0, flags: 0 });
    for h in &floods {
        h.conn.set_nonblocking(true).unwrap();
    }
    for round in 0..50 {
        for h in &floods {
            for _ in 0..200 {
                if h.conn.send_packet(&request, &[]).is_err() {
                    break;
                }
            }
        }
        if round % 10 == 0 {
            // Control requests and data of others.
            drop(a.another());
            ping(&a, &b, round);
        }
    }
    drop(floods);
    drop(daemon.context().alloc_pd().unwrap());
    ping(&b, &a, 60);
    assert!(daemon.stop().success());
}

/// One client's share is bounded and does not reduce that of another.
#[test]
fn a_client_that_takes_all_it_may_leaves_others_theirs() {
    let limits = "[limits]\nqueue_pairs_per_client = 8\ncompletion_queues_per_client = 8\n\
                  memory_regions_per_client = 8\nmemory_per_client = \"4 MiB\"\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{limits}"), &[]);
    let greedy = daemon.context();
    let pd = greedy.alloc_pd().unwrap();
    let (mut mrs, mut cqs, mut qps, mut arenas) = (vec![], vec![], vec![], vec![]);
    let why = |error: siw::Error| error.to_string();
    let mr = loop {
        match pd.alloc_mr(64, ALL) {
            Ok(mr) => mrs.push(mr),
            Err(error) => break why(error),
        }
    };
    assert_eq!(mrs.len(), 8, "{mr}");
    let cq = loop {
        match siw::Cq::new(&greedy, 4, None) {
            Ok(cq) => cqs.push(cq),
            Err(error) => break why(error),
        }
    };
    assert_eq!(cqs.len(), 8, "{cq}");
    let qp = loop {
        match pd.create_qp(&cqs[0], &cqs[0], &siw::QpInit::default()) {
            Ok(qp) => qps.push(qp),
            Err(error) => break why(error),
        }
    };
    assert_eq!(qps.len(), 8, "{qp}");
    let memory = loop {
        match siw::Arena::alloc(&greedy, 1 << 20, false) {
            Ok(arena) => arenas.push(arena),
            Err(error) => break why(error),
        }
        assert!(arenas.len() <= 4);
    };
    for (refusal, number) in [(mr, "8"), (cq, "8"), (qp, "8"), (memory, "4")] {
        assert!(
            refusal.contains(number),
            "does not name the limit: {refusal}"
        );
    }
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b, 1);
    // Resources that it frees can be allocated again.
    drop((mrs, arenas));
    let _again = pd.alloc_mr(1 << 20, ALL).unwrap();
}

/// Regions are parts of arenas: any part, overlapping ones included, and nothing beyond.
#[test]
fn a_region_lies_within_its_arena() {
    let daemon = Daemon::loopback();
    let h = Raw::new(&daemon);
    let pd = m::AllocPd {
        device: siw_shm::control::ANY_DEVICE,
        reserved: 0,
    };
    let pd = h.call(&pd).unwrap().id;
    let arena = m::AllocArena {
        len: 3 * 4096,
        huge: 0,
        reserved: 0,
    };
    let arena = h.call(&arena).unwrap();
    let part = |offset: u64, len: u64| m::RegMr {
        pd,
        arena: arena.arena,
        offset,
        len,
        va: 0x1000,
        access: 7,
        reserved: 0,
    };
    let end = arena.len;
    for (offset, len) in [
        (0, end + 1),
        (end, 1),
        (end - 4096, 4097),
        (u64::MAX - 4095, 4096),
        (4096, u64::MAX - 4095),
        (u64::MAX, u64::MAX),
    ] {
        h.refused("a part beyond the arena", &part(offset, len));
    }
    let parts = [(0, end), (4096, 4096), (4096, 4096), (end - 1, 1)];
    let keys = parts.map(|(offset, len)| h.call(&part(offset, len)).unwrap().rkey);
    let free = m::FreeArena {
        arena: arena.arena,
        reserved: 0,
    };
    h.refused("the end of an arena with regions", &free);
    for lkey in keys {
        h.call(&m::DeregMr { lkey, flags: 0 }).unwrap();
        h.refused("a second deregistration", &m::DeregMr { lkey, flags: 0 });
    }
    h.call(&free).unwrap();
}

/// A daemon in a pid namespace of its own, as in a container with a shared socket.
#[test]
fn a_peer_outside_the_pid_namespace_keeps_its_uid() {
    let dir = tempfile::tempdir().unwrap();
    let plain = daemon_command(dir.path(), LOOPBACK, &[]);
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child"])
        .arg(plain.get_program())
        .args(plain.get_args())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let may = std::process::Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .status();
    if !may.is_ok_and(|status| status.success()) {
        println!("skipped: this process may not create a pid namespace");
        return;
    }
    let d = Daemon::wait_ready(dir, command.spawn().unwrap());
    let (a, b) = pair(&d, 4096);
    ping(&a, &b, 1);
    let stats: serde_json::Value = serde_json::from_str(&a.ctx.read_stats().unwrap()).unwrap();
    let own = nix::unistd::geteuid().as_raw();
    for client in stats["clients"].as_array().unwrap() {
        assert_eq!((&client["uid"], &client["pid"]), (&own.into(), &0.into()));
    }
}

/// With any umask, the socket has the configured mode, and users other than the daemon's reach it and
/// the files beside it.
#[test]
fn a_strict_umask_does_not_hide_the_socket() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("new/run");
    let socket = folder.join("siwd.sock");
    let config = format!("{LOOPBACK}[control]\nmode = \"0666\"\n");
    let args = ["--socket", socket.to_str().unwrap()];
    let file = dir.path().join("siwd.toml");
    std::fs::write(&file, config).unwrap();
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", "umask 077; exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_siwd"))
        .arg("--config")
        .arg(&file)
        .args(args)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut d = Daemon::wait_ready(dir, command.spawn().unwrap());
    d.socket = socket.clone();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o666);
    let mut folders = vec![folder.parent().unwrap().to_owned(), folder];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        assert_eq!(mode(&folder) & 0o755, 0o755, "{}", folder.display());
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap().file_type();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() && path.extension().is_none_or(|kind| kind != "lock") {
                assert_eq!(mode(&path) & 0o444, 0o444, "{}", path.display());
                files += 1;
            }
        }
    }
    assert!(files > 0, "no files for programs that read /sys");
    d.context();
}

/// A client that sends unknown messages without end causes a bounded number of lines.
#[test]
fn a_flood_of_invalid_messages_does_not_flood_the_log() {
    const MESSAGES: usize = 5000;
    let d = Daemon::loopback();
    let client = Raw::new(&d);
    let (device, reserved) = (0, 0);
    let mut packet = codec::encode_request(9, &m::AllocPd { device, reserved });
    // The kind follows the magic number and the version.
    packet[6..8].copy_from_slice(&60_000u16.to_ne_bytes());
    for _ in 0..MESSAGES {
        client.conn.send_packet(&packet, &[]).unwrap();
        client.conn.recv_packet().unwrap();
    }
    drop(client);
    let log = d.stop_and_read_log();
    let lines = log.lines().count();
    assert!(lines > 0 && lines < 500, "{lines} lines");
    assert!(log.contains("the rest is left out"), "{log}");
}
