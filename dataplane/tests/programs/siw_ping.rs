//! siw-ping as two processes over the daemon.

use crate::common::Daemon;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

fn ping(d: &Daemon, args: &[&str]) -> Command {
    let mut command = Command::new(crate::common::siw_ping());
    command
        .arg("--socket")
        .arg(&d.socket)
        .args(["--timeout", "10"])
        .args(args);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Starts a server; returns it with its port once it listens.
fn server(daemon: &Daemon, args: &[&str]) -> (Server, String) {
    let mut child = ping(daemon, args)
        .args(["-s", "-a", "10.77.0.2", "-p", "0"])
        .spawn()
        .unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    err.read_line(&mut line).unwrap();
    let port = line.trim().rsplit(':').next().unwrap().to_owned();
    assert!(port.parse::<u16>().is_ok(), "{line}");
    // Keeps the pipe open, so that later output does not kill the server.
    (
        Server {
            child: Some(child),
            _err: err,
        },
        port,
    )
}

struct Server {
    child: Option<Child>,
    _err: BufReader<std::process::ChildStderr>,
}

impl Server {
    fn output(mut self) -> (bool, String) {
        let out = self.child.take().unwrap().wait_with_output().unwrap();
        (
            out.status.success(),
            String::from_utf8_lossy(&out.stdout).into_owned(),
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(c) = &mut self.child {
            let _ = c.kill();
            let _ = c.wait();
        }
    }
}

fn client(daemon: &Daemon, port: &str, args: &[&str]) -> (bool, String, String) {
    let out = ping(daemon, args)
        .args(["-c", "-a", "10.77.0.2", "-p", port])
        .output()
        .unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    (out.status.success(), text(&out.stdout), text(&out.stderr))
}

#[test]
fn client_and_server_exchange_verified_pings() {
    let daemon = Daemon::loopback();
    let (s, port) = server(&daemon, &["-v", "--json"]);
    let (ok, out, err) = client(
        &daemon,
        &port,
        &["-C", "3", "-v", "-V", "-S", "30", "--json"],
    );
    assert!(ok, "{err}");
    let mut lines = out.lines();
    assert_eq!(
        lines.next(),
        Some("ping data: rdma-ping-0: ABCDEFGHIJKLMNOP")
    );
    assert_eq!(
        lines.next(),
        Some("ping data: rdma-ping-1: BCDEFGHIJKLMNOPQ")
    );
    let json: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!((&json["pings"], &json["ok"]), (&3.into(), &true.into()));
    let (ok, out) = s.output();
    assert!(ok, "{out}");
    assert!(
        out.starts_with("server ping data: rdma-ping-0: ABCDEFGHIJKLMNOP\n"),
        "{out}"
    );
    let json: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&json["pings"], &json["role"]),
        (&3.into(), &"server".into())
    );
}

#[test]
fn a_persistent_server_serves_one_client_after_the_other() {
    let daemon = Daemon::loopback();
    let (_s, port) = server(&daemon, &["-P"]);
    for size in ["64", "65535"] {
        let (ok, _, err) = client(&daemon, &port, &["-C", "5", "-V", "-S", size]);
        assert!(ok, "{err}");
    }
}

#[test]
fn nobody_listening_and_no_daemon_are_told_apart() {
    let mut daemon = Daemon::loopback();
    let (ok, out, err) = client(&daemon, "1", &["-C", "1", "--json"]);
    assert!(
        !ok && err.contains("cannot connect to 10.77.0.2: nothing listens"),
        "{err}"
    );
    assert!(out.contains("\"ok\":false"), "{out}");
    daemon.kill();
    let (ok, _, err) = client(&daemon, "1", &["-C", "1"]);
    assert!(!ok && err.contains("cannot reach siwd"), "{err}");
}

#[test]
fn a_server_whose_daemon_dies_ends_with_an_error() {
    let mut daemon = Daemon::loopback();
    let (s, _) = server(&daemon, &[]);
    daemon.kill();
    let (ok, _) = s.output();
    assert!(!ok);
}

#[test]
fn a_client_whose_reader_is_gone_ends_quietly() {
    let daemon = Daemon::loopback();
    let (_server, port) = server(&daemon, &[]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = ping(&daemon, &["-C", "3", "-v"])
        .args(["-c", "-a", "10.77.0.2", "-p", &port])
        .stdout(writer)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.is_empty(), "{out:?}");
}
