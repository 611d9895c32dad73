//! `siwctl monitor`, `doctor` and `report`, and the log as JSON.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::siwctl::{shown, siwctl};
use crate::common::{Daemon, LOOPBACK, client_program, pair, ping, wait};

#[test]
fn events_are_printed_as_they_happen() {
    let daemon = Daemon::loopback();
    let mut child = Command::new(client_program("siwctl"))
        .args([
            "monitor",
            "--json",
            "--interval",
            "10",
            "--count",
            "4",
            "--socket",
        ])
        .arg(&daemon.socket)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    said.read_line(&mut ready).unwrap();
    assert!(ready.contains("waiting for events"), "{ready}");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let (a, _b) = pair(&daemon, 64);
    for _ in 0..2 {
        let event = next();
        assert_eq!(
            (&event["event"], &event["change"]),
            (&"client".into(), &"new".into())
        );
        assert_eq!(event["row"]["pid"], std::process::id());
    }
    // This process's queue pairs end; siwctl itself comes and goes as a client, or is not seen at all.
    daemon.context().end_queue_pair(a.qp.qp_num()).unwrap();
    let mut reasons = Vec::new();
    while reasons.is_empty() {
        let event = next();
        if event["event"] == "connection" {
            reasons.push(event["row"]["reason"].clone());
        }
    }
    assert_eq!(reasons[0], "an operator ended the queue pair");
    drop(lines);
    child.kill().unwrap();
    wait(&mut child);
}

#[test]
fn the_doctor_examines_the_machine_and_the_daemon() {
    let daemon = Daemon::loopback();
    let text = shown(&daemon, &["doctor"]);
    for words in [
        "kernel",
        "IOMMU",
        "DPDK",
        "siwd runs without",
        "control socket",
        "memlock",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let (status, out, error) = siwctl(&daemon, &["doctor", "--json"]);
    assert_eq!(status, Some(0), "{error}");
    let rows: Value = serde_json::from_str(&out).unwrap();
    for row in rows.as_array().unwrap() {
        assert!(row["level"] == "ok" || row["command"].is_string(), "{row}");
    }
    let socket = daemon.socket.clone();
    assert!(daemon.stop().success());
    let out = Command::new(client_program("siwctl"))
        .args(["doctor", "--socket"])
        .arg(socket)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("fault  siwd") && text.contains("hugepages"),
        "{text}"
    );
}

/// The archive has everything but payload and keys.
#[test]
fn a_report_has_no_payload() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let payload = b"the payload of a client";
    a.mr.write(0, payload).unwrap();
    ping(&a, &b);
    let file = daemon.dir.path().join("report.zip");
    let name = file.to_str().unwrap();
    shown(&daemon, &["report", name]);
    let bytes = std::fs::read(&file).unwrap();
    assert!(bytes.starts_with(b"PK") && bytes.len() > 1000);
    let (status, _, error) = siwctl(&daemon, &["report", name]);
    assert_eq!(status, Some(1));
    assert!(error.contains("cannot create"), "{error}");
    let names = [
        "doctor.txt",
        "statistics.json",
        "ends.json",
        "connections.json",
    ];
    let text = String::from_utf8_lossy(&bytes);
    for name in names {
        assert!(text.contains(name), "{name}");
    }
    assert!(
        !text.contains("memory-regions"),
        "keys give access to memory"
    );
}

#[test]
fn the_log_can_be_json() {
    let daemon = Daemon::start(LOOPBACK, &["--log-format", "json"]);
    let (a, _b) = pair(&daemon, 64);
    daemon.context().end_queue_pair(a.qp.qp_num()).unwrap();
    let log = daemon.stop_and_read_log();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    let lost = lines.iter().find(|line| {
        let message = line["message"].as_str().unwrap_or_default();
        message.contains("an operator ended the queue pair")
    });
    let lost = lost.unwrap_or_else(|| panic!("{log}"));
    assert_eq!(lost["pid"], std::process::id(), "{lost}");
    assert_eq!(lost["level"], "INFO");
}
