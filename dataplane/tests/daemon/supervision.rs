//! The service manager's view of a daemon that works, hangs, fails or reloads.

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::*;

/// Value of `WatchdogSec` of the unit.
const WATCHDOG: Duration = Duration::from_millis(300);

/// Starts a daemon with this test as its service manager.
fn supervised() -> (Daemon, UnixDatagram) {
    let dir = tempfile::tempdir().unwrap();
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = daemon_command(dir.path(), LOOPBACK, &[])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string())
        .spawn()
        .unwrap();
    (Daemon::wait_ready(dir, child), notify)
}

fn heard(notify: &UnixDatagram) -> String {
    let mut bytes = [0; 64];
    let len = notify.recv(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[test]
fn the_watchdog_hears_nothing_while_a_worker_hangs() {
    let (d, notify) = supervised();
    assert_eq!(heard(&notify), "READY=1");
    for _ in 0..3 {
        assert_eq!(heard(&notify), "WATCHDOG=1");
    }
    let Some(worker) = StoppedThread::stop(d.child.id(), "siwd-worker-0") else {
        return;
    };
    // Discards the notifications sent before the worker stopped; then none may arrive for longer
    // than the interval.
    notify.set_nonblocking(true).unwrap();
    while notify.recv(&mut [0; 64]).is_ok() {}
    notify.set_nonblocking(false).unwrap();
    notify.set_read_timeout(Some(WATCHDOG * 2)).unwrap();
    let mut late = 0;
    while notify.recv(&mut [0; 64]).is_ok() {
        late += 1;
        assert!(late <= 2, "the watchdog is fed by a daemon that hangs");
    }
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    drop(worker);
    for _ in 0..3 {
        assert_eq!(heard(&notify), "WATCHDOG=1");
    }
    assert!(d.stop().success());
}

#[test]
fn a_panic_in_a_worker_ends_the_process_with_a_message() {
    // This test binary, as a process with a worker.
    let out = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "supervision::helper_whose_worker_panics",
            "--include-ignored",
        ])
        .arg("--nocapture")
        .env("SIW_TEST_PANIC", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(101), "{said}");
    assert!(said.contains("a broken table"), "{said}");
    assert!(said.contains("siwd-worker-7 failed: siwd ends"), "{said}");
}

#[test]
#[ignore = "a process for the test above"]
fn helper_whose_worker_panics() {
    if std::env::var_os("SIW_TEST_PANIC").is_none() {
        return;
    }
    siwd::host::end_process_on_panic();
    let worker = std::thread::Builder::new().name("siwd-worker-7".into());
    worker.spawn(|| panic!("a broken table")).unwrap();
    // The main thread joins workers only at the stop of the daemon.
    std::thread::sleep(PATIENCE);
    std::process::exit(0);
}

#[test]
fn a_socket_that_cannot_be_bound_is_found_before_a_port_starts() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("siwd.toml");
    std::fs::write(&file, LOOPBACK).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_siwd"))
        .arg("--config")
        .arg(&file)
        .args(["--socket", "/proc/no-such-folder/siwd.sock"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(
        said.contains("control socket") && said.contains("[control] socket"),
        "{said}"
    );
    assert!(!said.contains("offloads"), "no port has started: {said}");
    // A port that fails to start leaves no socket behind.
    let config = LOOPBACK.replace(
        "pair = \"lo\"\naddresses = [\"10.77.0.1",
        "devargs = \"net_af_packet0,iface=no-such-if\"\naddresses = [\"10.77.0.1",
    );
    let config = config.split("[[device]]\nname = \"siw1\"").next().unwrap();
    let out = daemon_command(dir.path(), config, &[]).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("no-such-if"), "{said}");
    assert!(!dir.path().join("siwd.sock").exists());
}
