//! siwd's use of host resources: readiness notification, hugepages, core claims.

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

use crate::common::*;

#[test]
fn a_service_manager_hears_ready_and_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let config = dir.path().join("siwd.toml");
    std::fs::write(&config, LOOPBACK).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_siwd"))
        .arg("--config")
        .arg(&config)
        .arg("--socket")
        .arg(dir.path().join("siwd.sock"))
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let daemon = Daemon::wait_ready(dir, child);
    let heard = || {
        let mut b = [0; 64];
        let n = notify.recv(&mut b).unwrap();
        String::from_utf8_lossy(&b[..n]).into_owned()
    };
    assert_eq!(heard(), "READY=1");
    assert!(daemon.stop().success());
    assert_eq!(heard(), "STOPPING=1");
}

#[test]
fn the_ready_line_is_json_when_asked() {
    let daemon = Daemon::start(LOOPBACK, &["--json"]);
    let line: serde_json::Value = serde_json::from_str(&daemon.ready).unwrap();
    assert_eq!(line["ready"], true);
    assert_eq!(line["devices"][1]["name"], "siw1");
    assert_eq!(line["hugepages"], false);
}

fn meminfo(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    text.lines()
        .find_map(|l| l.strip_prefix(field))
        .and_then(|l| l.split_whitespace().next())
        .and_then(|n| n.parse().ok())
        .unwrap()
}

#[test]
fn hugepages_are_used_and_given_back() {
    let before = meminfo("HugePages_Free:");
    if before < 64 {
        println!("skipped: {before} hugepages are free, 64 are needed");
        return;
    }
    let config = LOOPBACK.replace("\"never\"", "\"require\"");
    let daemon = Daemon::start(&config, &["--json"]);
    let line: serde_json::Value = serde_json::from_str(&daemon.ready).unwrap();
    assert_eq!(line["hugepages"], true);
    assert!(meminfo("HugePages_Free:") < before);
    let (a, b) = pair(&daemon, 4 << 20);
    assert!(a.mr.len() == 4 << 20 && b.mr.len() == 4 << 20);
    drop((a, b));
    assert!(daemon.stop().success());
    assert_eq!(meminfo("HugePages_Free:"), before);
    let left = std::fs::read_dir("/var/run/dpdk").map_or(0, |entries| {
        entries
            .filter_map(Result::ok)
            .filter(|e| e.file_name().to_string_lossy().contains("siwd"))
            .filter(|e| {
                // Skips folders of daemons that other tests are running.
                let name = e.file_name().to_string_lossy().into_owned();
                let pid = name.rsplit('-').next().unwrap_or("").to_owned();
                !std::path::Path::new("/proc").join(pid).exists()
            })
            .count()
    });
    assert_eq!(left, 0, "nothing of DPDK is left behind");
}
