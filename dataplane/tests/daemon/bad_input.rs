//! Results of bad configurations, missing resources and hostile clients.

use std::io::Write;
use std::os::fd::AsFd;

use crate::common::*;
use nix::sys::signal::Signal;
use siw::{CmEvent, Opcode, SendData, SendWr, WrFlags};
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket, Message, codec};

fn refused(config: &str, args: &[&str]) -> String {
    let (status, _, stderr) = run(config, args);
    assert_eq!(status.code(), Some(1), "{stderr}");
    stderr
}

#[test]
fn a_check_names_file_line_and_column() {
    let e = refused("[workers]\ncoers = [1]\n", &["--check"]);
    assert!(
        e.contains("siwd.toml:2:1: ") && e.contains("coers") && e.contains("cores"),
        "{e}"
    );
    let (status, out, _) = run(LOOPBACK, &["--check"]);
    assert!(status.success() && out.contains("ok, 2 device(s)"), "{out}");
    let (_, out, _) = run("x = 1", &["--check", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["ok"], false);
}

#[test]
fn only_the_embedded_pair_loses_frames_on_purpose() {
    let with = |link: &str, loss: &str| {
        LOOPBACK.replacen("pair = \"lo\"", &format!("{link}\nloss = {loss}"), 1)
    };
    let e = refused(&with("pair = \"lo\"", "0.6"), &["--check"]);
    assert!(e.contains("loss 0.6: 0 to 0.5 are allowed"), "{e}");
    let e = refused(&with("devargs = \"net_tap0\"", "0.1"), &["--check"]);
    assert!(e.contains("tc-netem(8)"), "{e}");
}

#[test]
fn an_unknown_persona_is_refused_with_the_known_ones() {
    let config = LOOPBACK.replacen("pair = \"lo\"", "pair = \"lo\"\npersona = \"rocev2\"", 1);
    let e = refused(&config, &["--check"]);
    for expected in ["rocev2", "iwarp", "roce", "ib", "unspecified"] {
        assert!(e.contains(expected), "{e}");
    }
}

/// A shorter one would hold an FPDU back for ever.
#[test]
fn a_receive_window_without_room_for_an_fpdu_is_refused() {
    let config = format!("{LOOPBACK}[device.tcp]\nreceive_window = \"8 KiB\"\n");
    let e = refused(&config, &["--check"]);
    assert!(
        e.contains("receive_window 8192: \"128 KiB\" to \"1 GiB\"") && e.contains("FPDU"),
        "{e}"
    );
}

/// RFC 1122 section 3.2.1.3.
#[test]
fn addresses_of_no_host_are_refused() {
    let device = |lines: &str| {
        let text = format!("[[device]]\nname = \"siw0\"\ndevargs = \"net_null0\"\n{lines}\n");
        refused(&text, &["--check"])
    };
    for (lines, why) in [
        (
            "addresses = [\"10.77.0.255/24\"]",
            "10.77.0.255/24: it is the broadcast address",
        ),
        (
            "addresses = [\"10.77.0.0/24\"]",
            "10.77.0.0/24: it is the address of the network",
        ),
        (
            "addresses = [\"10.77.0.1/24\"]\ngateway = \"10.77.0.255\"",
            "router 10.77.0.255: it is the broadcast address",
        ),
        (
            "addresses = [\"10.77.0.1/24\"]\nroutes = [{ to = \"192.0.2.0/24\", via = \"10.77.0.0\" }]",
            "router 10.77.0.0: it is the address of the network",
        ),
    ] {
        let text = device(lines);
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_missing_configuration_is_named() {
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_siwd"))
        .args(["--config", "/nonexistent/siwd.toml"])
        .output()
        .unwrap();
    let e = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && e.contains("/nonexistent/siwd.toml: cannot read"),
        "{e}"
    );
}

#[test]
fn missing_hugepages_are_named_with_the_command_that_brings_them() {
    let config = LOOPBACK
        .replace("hugepages = \"never\"", "hugepages = \"require\"")
        .replace("buffers = 4096", "buffers = 40000000");
    let e = refused(&config, &[]);
    assert!(
        e.contains("not enough hugepages") && e.contains("nr_hugepages"),
        "{e}"
    );
}

#[test]
fn a_core_that_does_not_exist_is_refused_with_those_that_do() {
    let e = refused(
        &LOOPBACK.replace("[workers]", "[workers]\ncores = [1000]"),
        &[],
    );
    assert!(
        e.contains("core 1000") && e.contains("may run on cores"),
        "{e}"
    );
}

#[test]
fn a_link_that_does_not_exist_is_named() {
    let config = r#"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=no-such-if"
addresses = ["10.1.0.1/24"]
"#;
    let e = refused(config, &[]);
    assert!(e.contains("device siw0") && e.contains("no-such-if"), "{e}");
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on() {
    let daemon = Daemon::loopback();
    let out = spawn(daemon.dir.path(), LOOPBACK, &[])
        .wait_with_output()
        .unwrap();
    let e = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && e.contains("another siwd"), "{e}");
    assert!(e.contains(&daemon.child.id().to_string()), "{e}");
    daemon.context().query_devices().unwrap();
}

#[test]
fn a_stale_socket_of_a_killed_daemon_does_not_hinder_the_next() {
    let mut daemon = Daemon::loopback();
    daemon.signal(Signal::SIGKILL);
    crate::common::wait(&mut daemon.child);
    assert!(daemon.socket.exists());
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(&daemon.socket, dir.path().join("siwd.sock")).unwrap();
    let next = spawn(daemon.dir.path(), LOOPBACK, &[]);
    let next = Daemon::wait_ready(dir, next);
    siw::Context::open(Some(&daemon.socket))
        .unwrap()
        .query_devices()
        .unwrap();
    drop(next);
}

#[test]
fn a_stop_is_clean_and_tells_every_client() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let socket = daemon.socket.clone();
    daemon.signal(Signal::SIGTERM);
    for end in [&a, &b] {
        let event = end.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(siw::AsyncEventKind::DeviceFatal));
        assert!(event.reason.contains("stopping"), "{event:?}");
    }
    let status = daemon.stop();
    assert!(status.success());
    assert!(!socket.exists());
}

#[test]
fn a_killed_daemon_is_an_error_for_its_clients_and_no_hang() {
    let mut daemon = Daemon::loopback();
    let (a, _b) = pair(&daemon, 4096);
    daemon.signal(Signal::SIGKILL);
    crate::common::wait(&mut daemon.child);
    let mut wc = [siw::Wc::default()];
    let error = a.cq.wait(&mut wc, Some(PATIENCE)).unwrap_err();
    assert!(matches!(error, siw::Error::DaemonGone), "{error}");
    assert!(a.ctx.alloc_pd().is_err());
    let error = a.cm.get_event(Some(PATIENCE)).unwrap_err();
    assert!(matches!(error, siw::Error::DaemonGone), "{error}");
    let error = siw::Context::open(Some(&daemon.socket))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("no siwd serves this socket"), "{error}");
}

#[test]
fn a_socket_without_permission_is_an_error_that_says_so() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    // The test process keeps root's group.
    let daemon = Daemon::start(&format!("{LOOPBACK}[control]\nmode = \"0600\"\n"), &[]);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(daemon.dir.path(), mode).unwrap();
    let socket = daemon.socket.clone();
    // In a thread of its own, because setfsuid applies to the calling thread only.
    let e = std::thread::spawn(move || {
        let nobody = nix::unistd::Uid::from_raw(65_534);
        nix::unistd::setfsuid(nobody);
        siw::Context::open(Some(&socket))
            .err()
            .map(|e| e.to_string())
    })
    .join()
    .unwrap();
    let e = e.expect("nobody may not open the socket");
    assert!(
        e.contains("Permission denied") && e.contains("a socket that this user may open"),
        "{e}"
    );
}

#[test]
fn a_wrong_protocol_version_is_refused_in_words() {
    let daemon = Daemon::loopback();
    let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
    let hello = m::ClientHello {
        version: 999,
        min_version: 998,
        ..m::ClientHello::new("x")
    };
    match conn.call_and_wait(1, &hello, &[]) {
        Err(CallError::Refused { reason, errno }) => {
            assert_eq!(errno, nix::libc::EPROTONOSUPPORT);
            assert!(reason.contains("versions 998 to 999"), "{reason}");
        }
        other => panic!("{:?}", other.map(|r| r.0)),
    }
    let mut packet = codec::encode_request(2, &hello);
    packet[4..6].copy_from_slice(&77u16.to_le_bytes());
    conn.send_packet(&packet, &[]).unwrap();
    let reply = conn.recv_packet().unwrap();
    let error = codec::decode_reply::<m::ClientHello>(2, &reply.bytes)
        .unwrap_err()
        .to_string();
    assert!(error.contains("77"), "{error}");
}

#[test]
fn garbage_on_the_control_socket_disturbs_nobody() {
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    for seed in 1..40u64 {
        let conn = ControlSocket::connect_to(&d.socket).unwrap();
        let mut bytes = pattern(seed, (seed as usize * 97) % 4000 + 1);
        if seed % 2 == 0 && bytes.len() > 24 {
            // A valid header before the garbage.
            bytes[..4].copy_from_slice(b"siwd");
            bytes[4..6].copy_from_slice(&m::VERSION.to_le_bytes());
            bytes[6..8].copy_from_slice(&((seed % 57) as u16).to_le_bytes());
            let len = bytes.len() as u32;
            bytes[8..12].copy_from_slice(&len.to_le_bytes());
        }
        // The daemon may have closed the socket by the second packet.
        let _ = conn.send_packet(&bytes, &[]);
        let _ = conn.send_packet(&bytes, &[std::io::stderr().as_fd()]);
        let _ = conn.recv_packet();
    }
    ping(&a, &b);
}

/// Message number and body size of each request.
fn requests() -> Vec<(u16, usize)> {
    macro_rules! list {
        ($($name:ident)*) => {
            vec![$((
                <m::$name as Message>::KIND,
                size_of::<m::$name>(),
            )),*]
        };
    }
    list!(
        QueryDevice AllocPd DeallocPd AllocArena FreeArena RegMr DeregMr CreateChannel
        DestroyChannel CreateCq DestroyCq CreateQp ModifyQp QueryQp DestroyQp CreateCmChannel
        DestroyCmChannel Connect Listen Unlisten Accept Reject Disconnect ReadStats ReregMr AllocFastMr
        AllocMw DeallocMw CreateSrq ModifySrq QuerySrq DestroySrq ResizeCq FreeCqRing ModerateCq
        Bind Resolve StartResolution EndResolution MigrateCm PairQp AddExtents RegMemory ImportMemory
        ImportOwnFile CreateAh DestroyAh StartDatagrams FindService EndFindService AnswerFindService
        AttachGroup DetachGroup LoadFaults OpenStream SendStream ReceiveStream TurnStream EndStream
    )
}

#[test]
fn every_request_with_random_arguments_is_answered_or_refused() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let greeted = || {
        let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
        conn.set_call_timeout(PATIENCE).unwrap();
        let hello = m::ClientHello::new("hostile");
        let (_, fds) = conn.call_and_wait(1, &hello, &[]).unwrap();
        (conn, fds)
    };
    let (mut conn, mut _fds) = greeted();
    let requests = requests();
    let mut seed = 0;
    for round in 0..40 {
        for &(kind, size) in &requests {
            seed += 1;
            let mut packet = codec::encode_request(
                seed as u32,
                &m::AllocPd {
                    device: 0,
                    reserved: 0,
                },
            );
            packet.truncate(24);
            let mut body = pattern(seed, size);
            match round % 4 {
                0 => {}
                // Small numbers match existing objects.
                1 => (0..size).filter(|i| i % 4 != 0).for_each(|i| body[i] = 0),
                2 => (0..size).for_each(|i| body[i] = u8::from(i % 4 == 0)),
                // A body of the wrong length.
                _ => body.truncate(seed as usize % (size + 1)),
            }
            packet.extend_from_slice(&body);
            packet[6..8].copy_from_slice(&kind.to_le_bytes());
            let len = packet.len() as u32;
            packet[8..12].copy_from_slice(&len.to_le_bytes());
            conn.send_packet(&packet, &[])
                .unwrap_or_else(|error| panic!("round {round}, before kind {kind}: {error}"));
            let reply = conn.recv_packet().unwrap();
            assert_eq!(reply.bytes[12..16], (seed as u32).to_le_bytes());
            // A malformed packet is refused and the client is closed.
            if packet.len() - 24 != size {
                assert!(conn.recv_packet().is_err(), "kind {kind}");
                (conn, _fds) = greeted();
            }
        }
    }
    ping(&a, &b);
}

#[test]
fn killing_a_client_in_the_middle_of_a_transfer_frees_it_and_disturbs_nobody() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let observer = daemon.context();
    let server = End::new(&daemon.context(), 1 << 20);
    let listener =
        siw::CmListener::new(&server.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    // This test binary, as a client process of its own.
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "bad_input::helper_that_writes_for_ever",
            "--include-ignored",
            "--nocapture",
        ])
        .env("SIW_TEST_SOCKET", &daemon.socket)
        .env("SIW_TEST_TARGET", listener.local_addr().to_string())
        .env(
            "SIW_TEST_MR",
            format!("{} {}", server.mr.addr(), server.mr.rkey()),
        )
        .stdout(std::process::Stdio::null())
        .stdin(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let CmEvent::ConnectRequest(request) = server.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    request
        .accept(&server.qp, None, &siw::ConnectOptions::default())
        .unwrap();
    assert!(matches!(
        server.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    // The transfer is under way when bytes have arrived.
    while server.mr.read_byte(0).unwrap() == 0 {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(
        server.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Disconnected(_)
    ));
    ping(&a, &b);
    // Nothing of the client is left: its queue pair is destroyed and all buffers are free.
    let stats = |key: &str| -> serde_json::Value {
        let text = observer.read_stats().unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()[key].clone()
    };
    let end = std::time::Instant::now() + PATIENCE;
    while stats("clients")
        .as_array()
        .unwrap()
        .iter()
        .any(|c| c["pid"] == child.id())
        || stats("workers")[0]["queue_pairs"] != 3
    {
        assert!(std::time::Instant::now() < end);
    }
}

#[test]
#[ignore = "a client process for the test above"]
fn helper_that_writes_for_ever() {
    let Ok(socket) = std::env::var("SIW_TEST_SOCKET") else {
        return;
    };
    let ctx = siw::Context::open(Some(socket.as_ref())).unwrap();
    let end = End::new(&ctx, 1 << 20);
    end.fill(3);
    end.mr.write(0, &[1]).unwrap();
    let target = std::env::var("SIW_TEST_TARGET").unwrap();
    let mr = std::env::var("SIW_TEST_MR").unwrap();
    let (addr, key) = mr.split_once(' ').unwrap();
    end.qp
        .connect(
            &end.cm,
            target.parse().unwrap(),
            &siw::ConnectOptions::default(),
        )
        .unwrap();
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Established(_)
    ));
    let started = std::time::Instant::now();
    while started.elapsed() < PATIENCE {
        let wr = SendWr {
            opcode: Opcode::Write,
            flags: WrFlags::SIGNALED,
            wr_id: 1,
            imm: 0,
            remote_addr: addr.parse().unwrap(),
            rkey: key.parse().unwrap(),
            data: SendData::Sges(&[end.mr.sge(0, 1 << 20)]),
        };
        if end.qp.post_send(&[wr]).is_err() {
            let mut wc = [siw::Wc::default(); 64];
            let _ = end.cq.poll_spin(&mut wc, PATIENCE);
        }
    }
    let _ = std::io::stdout().flush();
}

/// Connections of the killed client below: more than a bounded queue of answers holds.
const KILLED: usize = 1000;

fn small_pair(end: &End) -> siw::Qp {
    let init = siw::QpInit {
        max_send_wr: 4,
        max_recv_wr: 4,
        ..siw::QpInit::default()
    };
    end.pd.create_qp(&end.cq, &end.cq, &init).unwrap()
}

/// Peers that only wait send nothing that would show them the end of the client.
#[test]
fn each_peer_of_a_client_killed_with_a_thousand_queue_pairs_is_told() {
    let daemon = Daemon::loopback();
    let server = End::new(&daemon.context(), 4096);
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = siw::CmListener::new(&server.cm, None, any, 1024, 0).unwrap();
    let helper = "bad_input::helper_that_connects_many_times";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", helper, "--include-ignored", "--nocapture"])
        .env("SIW_TEST_SOCKET", &daemon.socket)
        .env("SIW_TEST_TARGET", listener.local_addr().to_string())
        .stdout(std::process::Stdio::null())
        .stdin(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let (mut pairs, mut established) = (vec![], 0);
    while established < KILLED {
        match server.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => {
                let pair = small_pair(&server);
                let options = siw::ConnectOptions::default();
                request.accept(&pair, None, &options).unwrap();
                pairs.push(pair);
            }
            CmEvent::Established(_) => established += 1,
            other => panic!("{other:?}"),
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    for count in 0..KILLED {
        match server.cm.get_event(Some(PATIENCE)) {
            Ok(CmEvent::Disconnected(_)) => {}
            other => panic!("after {count} of {KILLED}: {other:?}"),
        }
    }
}

#[test]
#[ignore = "a client process for the test above"]
fn helper_that_connects_many_times() {
    let Ok(socket) = std::env::var("SIW_TEST_SOCKET") else {
        return;
    };
    let ctx = siw::Context::open(Some(socket.as_ref())).unwrap();
    let (end, target) = (End::new(&ctx, 4096), std::env::var("SIW_TEST_TARGET"));
    let target = target.unwrap().parse().unwrap();
    let (mut pairs, mut established) = (vec![], 0);
    while established < KILLED {
        // At most some dozens of connects in progress.
        while pairs.len() < KILLED.min(established + 64) {
            let pair = small_pair(&end);
            let options = siw::ConnectOptions::default();
            pair.connect(&end.cm, target, &options).unwrap();
            pairs.push(pair);
        }
        match end.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::Established(_) => established += 1,
            other => panic!("{other:?}"),
        }
    }
    let _ = end.cm.get_event(Some(PATIENCE)); // killed meanwhile
}
