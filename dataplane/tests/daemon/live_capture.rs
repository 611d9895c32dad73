//! `siwctl capture` on a running daemon.

use std::collections::BTreeSet;
use std::io::{BufReader, Read};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pcap_file::pcapng::{Block, PcapNgReader};
use siw::Context;

use super::client_faults::{as_user, open_to_all};
use super::siwctl::{shown, shown_json, siwctl, start_siwctl};
use crate::common::net::{judge, missing_program};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair, ping, wait};

/// A running `siwctl capture start`.
struct Capturing {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
}

impl Capturing {
    /// Starts a capture, which has begun when this returns.
    fn start(daemon: &Daemon, args: &[&str]) -> Capturing {
        let (child, said) = start_siwctl(daemon, &[&["capture", "start"], args].concat());
        Capturing { child, said }
    }

    fn interrupt(&self) {
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGINT).unwrap();
    }

    /// Waits for its end; returns its status and the rest of its messages.
    fn end(mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        self.said.read_to_string(&mut text).unwrap();
        (wait(&mut self.child), text)
    }
}

/// Number of frames and the ports in them.
fn frames_in(file: &Path) -> (usize, BTreeSet<(u16, u16)>) {
    let bytes = std::fs::read(file).unwrap();
    let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
    let (mut count, mut ports) = (0, BTreeSet::new());
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.unwrap() {
            count += 1;
            let word = |at: usize| u16::from_be_bytes([packet.data[at], packet.data[at + 1]]);
            let (from, to) = (word(34), word(36));
            ports.insert((from.min(to), from.max(to)));
        }
    }
    (count, ports)
}

/// The captures that siwctl shows.
fn await_captures(daemon: &Daemon, is_expected: impl Fn(&[serde_json::Value]) -> bool) {
    let start = Instant::now();
    loop {
        let rows = shown_json(daemon, &["show", "captures"]);
        if is_expected(&rows) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{rows:?}");
    }
}

/// A long capture keeps its latest files, each of which can be read by itself.
#[test]
fn a_capture_continues_in_further_files() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let file = daemon.dir.path().join("ring.pcapng");
    let name = file.to_str().unwrap();
    let (status, _, error) = siwctl(&daemon, &["capture", "start", "--ring", "2", name]);
    assert_eq!(status, Some(2), "{error}");
    let (status, _, error) = siwctl(&daemon, &["capture", "start", "--rotate", "1", name]);
    assert!(
        status == Some(2) && error.contains("at least 1MiB"),
        "{error}"
    );
    let args = ["--rotate", "1MiB", "--ring", "2", name];
    let capturing = Capturing::start(&daemon, &args);
    let numbered = |number: u32| daemon.dir.path().join(format!("ring.pcapng.{number}"));
    let start = Instant::now();
    // The writer may lag, and then make and remove several files between two looks.
    while !(3..100).any(|number| numbered(number).exists()) {
        assert!(start.elapsed() < PATIENCE, "there is no third file");
        for _ in 0..50 {
            ping(&a, &b);
        }
    }
    shown(&daemon, &["capture", "stop", "1"]);
    let (status, said) = capturing.end();
    assert!(status.success(), "{said}");
    let kept = (0..100).filter(|number| numbered(*number).exists());
    let kept: Vec<u32> = kept.collect();
    assert!(kept.len() == 2 && kept[1] == kept[0] + 1, "{kept:?}");
    assert!(!file.exists(), "the first file is not kept");
    for number in kept {
        let path = numbered(number);
        assert!(std::fs::metadata(&path).unwrap().len() <= 1 << 20);
        let (frames, ports) = frames_in(&path);
        assert!(frames > 0 && ports.len() == 1, "{frames} frames, {ports:?}");
    }
}

#[test]
fn one_queue_pair_is_captured_live_among_others() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (c, d) = pair(&daemon, 4096);
    let file = daemon.dir.path().join("qp.pcapng");
    let number = a.qp.qp_num().to_string();
    let capturing = Capturing::start(&daemon, &["--qp", &number, file.to_str().unwrap()]);
    for _ in 0..5 {
        ping(&a, &b);
        ping(&c, &d);
        ping(&d, &c);
    }
    // It can be read while it runs.
    let start = Instant::now();
    while std::fs::metadata(&file).map_or(0, |file| file.len()) < 1000 {
        assert!(start.elapsed() < PATIENCE, "the file stays empty");
    }
    let rows = shown_json(&daemon, &["show", "captures"]);
    assert_eq!(rows[0]["filter"]["lqpn"], a.qp.qp_num(), "{rows:?}");
    let text = shown(&daemon, &["show", "captures"]);
    assert!(text.starts_with("capture 1 of pid "), "{text}");
    shown(&daemon, &["capture", "stop", "1"]);
    let (status, said) = capturing.end();
    assert!(status.success(), "{said}");
    let (count, ports) = frames_in(&file);
    assert!(said.contains(&format!("{count} frames\n")), "{said}");
    let rows = shown_json(&daemon, &["show", "conn", "--lqpn", &number]);
    let port = |key: &str| -> u16 {
        let address = rows[0]["tcp"][key].as_str().unwrap();
        address.rsplit(':').next().unwrap().parse().unwrap()
    };
    let (local, remote) = (port("local"), port("remote"));
    let expected = (local.min(remote), local.max(remote));
    assert_eq!(ports, BTreeSet::from([expected]));
    // Five requests in one direction, and their acknowledgements.
    assert!(count >= 5, "{count}");
    assert!(shown_json(&daemon, &["show", "captures"]).is_empty());
    if missing_program("tshark").is_none() {
        judge(&file);
    }
}

#[test]
fn a_later_connection_of_a_client_is_captured_and_the_end_of_siwctl_ends_the_capture() {
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 4096);
    let number = end.qp.qp_num().to_string();
    let row = &shown_json(&daemon, &["show", "qp", "--lqpn", &number, "--details"])[0];
    // Its connection is made during the capture, to itself.
    let file = daemon.dir.path().join("client.pcapng");
    let client = row["client"].to_string();
    let name = file.to_str().unwrap();
    let capturing = Capturing::start(&daemon, &["--client", &client, "--snaplen", "96", name]);
    let address: IpAddr = "10.77.0.1".parse().unwrap();
    end.qp
        .connect_pair(&siw::PairOptions {
            device: 0,
            local: address,
            peer: address,
            peer_qp_num: end.qp.qp_num(),
            ord: 16,
            ird: 16,
            denied_access: siw::Access::NONE,
        })
        .unwrap();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    ping(&end, &end);
    await_captures(&daemon, |rows| rows[0]["frames"].as_u64().unwrap() > 0);
    capturing.interrupt();
    let (status, said) = capturing.end();
    assert!(status.success(), "{said}");
    let (count, ports) = frames_in(&file);
    assert!(count > 0 && ports.len() == 1, "{ports:?}");
    let killed = Capturing::start(&daemon, &["/dev/null"]);
    let pid = Pid::from_raw(killed.child.id() as i32);
    kill(pid, Signal::SIGKILL).unwrap();
    killed.end();
    await_captures(&daemon, |rows| rows.is_empty());
    ping(&a, &b);
}

#[test]
fn a_full_disk_is_told_at_once_with_its_path() {
    let daemon = Daemon::loopback();
    let capturing = Capturing::start(&daemon, &["/dev/full"]);
    let (status, said) = capturing.end();
    assert_eq!(status.code(), Some(1), "{said}");
    let reason = "cannot write /dev/full: No space left on device (os error 28)";
    assert!(said.contains(reason), "{said}");
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    await_captures(&daemon, |rows| rows.is_empty());
    assert!(daemon.stop().success());
    // The configured capture tells the log.
    let daemon = Daemon::start(LOOPBACK, &["--capture", "/dev/full"]);
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    drop((a, b));
    let log = daemon.stop_and_read_log();
    let reason = "capture /dev/full ends: No space left on device (os error 28)";
    assert!(log.contains(reason), "{log}");
}

/// Frames are missing then, the capture has their number, and the daemon's clients do not wait.
#[test]
fn a_stalled_reader_costs_frames_of_its_capture_only() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let mut capturing = Capturing::start(&daemon, &["-"]);
    let mut pipe = capturing.child.stdout.take().unwrap();
    let start = Instant::now();
    let mut pings = 0;
    let is_full = || {
        let rows = shown_json(&daemon, &["show", "captures"]);
        rows[0]["dropped"].as_u64().unwrap() > 0
    };
    while !is_full() {
        for _ in 0..2000 {
            ping(&a, &b);
        }
        pings += 2000;
        assert!(start.elapsed() < PATIENCE, "{pings} and no frame dropped");
    }
    ping(&a, &b);
    shown(&daemon, &["capture", "stop"]);
    let read = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let (status, said) = capturing.end();
    assert!(status.success(), "{said}");
    // A capture that was ended gives its reader a second for the rest.
    let bytes = read.join().unwrap();
    let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
    while let Some(block) = reader.next_block() {
        block.expect("only whole blocks are written");
    }
}

#[test]
fn mistakes_are_refused_with_the_reason() {
    let daemon = Daemon::loopback();
    let nowhere = ["capture", "start", "/nonexistent/x"];
    for (args, status, reason) in [
        (
            &["capture", "start", "--qp", "4000000", "/dev/null"][..],
            1,
            "no queue pair 4000000",
        ),
        (
            &["capture", "start", "--client", "4000000", "/dev/null"],
            1,
            "no client 4000000",
        ),
        (
            &["capture", "start", "--device", "siw9", "/dev/null"],
            1,
            "no device of that name",
        ),
        (&nowhere, 1, "cannot create /nonexistent/x"),
        (&["capture", "stop"], 1, "no capture is running"),
        (&["capture", "stop", "7"], 1, "no capture 7"),
        (
            &["capture", "start", "--host", "here", "/dev/null"],
            2,
            "invalid",
        ),
        (
            &["capture", "start", "--limit", "1MB", "/dev/null"],
            2,
            "64MiB",
        ),
    ] {
        let (code, out, error) = siwctl(&daemon, args);
        assert_eq!(code, Some(status), "{args:?}: {error}");
        assert!(
            error.contains(reason) && out.is_empty(),
            "{args:?}: {error}"
        );
    }
    // A filter that nothing meets.
    let file = daemon.dir.path().join("none.pcapng");
    let capturing = Capturing::start(&daemon, &["--port", "9", file.to_str().unwrap()]);
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    capturing.interrupt();
    let (status, said) = capturing.end();
    assert!(status.success() && said.contains("0 frames"), "{said}");
    assert!(said.contains("no frame matched"), "{said}");
    assert_eq!(frames_in(&file).0, 0);
}

#[test]
fn only_operators_capture() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let all = siw_shm::control::messages::StartCapture::ALL_FRAMES;
    let refusals = [
        theirs.start_capture(&all).err().unwrap(),
        theirs.stop_capture(0).unwrap_err(),
        theirs
            .list_objects(siw::ObjectList::Captures)
            .err()
            .unwrap(),
    ];
    for refused in refusals {
        let refused = refused.to_string();
        assert!(refused.contains("only operators"), "{refused}");
    }
}

/// The daemon ends a capture at its limit, and siwctl with it.
#[test]
fn a_capture_ends_at_its_limit() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let file = daemon.dir.path().join("limit.pcapng");
    let name = file.to_str().unwrap();
    let mut capturing = Capturing::start(&daemon, &["--limit", "20KiB", name]);
    let start = Instant::now();
    while capturing.child.try_wait().unwrap().is_none() {
        ping(&a, &b);
        assert!(start.elapsed() < PATIENCE);
    }
    let (status, said) = capturing.end();
    assert!(status.success(), "{said}");
    let len = std::fs::metadata(&file).unwrap().len();
    assert!((10 << 10..22 << 10).contains(&len), "{len}");
    assert!(frames_in(&file).0 > 2);
}
