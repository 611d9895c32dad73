//! The Rust examples of the client library against the daemon on the embedded loopback.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::common::{Daemon, client_example};

#[test]
fn every_rust_example_says_ok() {
    let examples = [
        "ping",
        "read",
        "write_with_completion_channel",
        "srq_server",
        "atomics",
        "tokio_echo",
        "tokio_key_value",
        "tokio_accept",
    ];
    let daemon = Daemon::loopback();
    for name in examples {
        let out = Command::new(client_example(name))
            .arg(&daemon.socket)
            .output()
            .unwrap();
        let (said, complained) = (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr),
        );
        assert_eq!((said.as_ref(), complained.as_ref()), ("ok\n", ""), "{name}");
    }
}

/// `deploy/sanitize client` runs it under AddressSanitizer; SIW_RANDOM_SEQUENCES is their number.
#[test]
fn random_calls_keep_memory_and_contexts() {
    let sequences = std::env::var("SIW_RANDOM_SEQUENCES").unwrap_or("100".into());
    let daemon = Daemon::loopback();
    let mut command = Command::new(client_example("random_calls"));
    let output = command.arg(&daemon.socket).args(["1", &sequences]);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("calls succeeded"), "{said}");
}

/// A task that awaits completions gets all of them before the error.
#[test]
fn completions_are_awaited_until_the_daemon_has_ended() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let daemon = Daemon::loopback();
        let mut program = Command::new(client_example("tokio_daemon_end"))
            .arg(&daemon.socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(program.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "waiting\n");
        daemon.signal(signal);
        line.clear();
        said.read_line(&mut line).unwrap();
        let output = program.wait_with_output().unwrap();
        assert_eq!(line, "ok\n", "{output:?}");
    }
}

#[test]
fn the_first_example_sends_to_itself() {
    let daemon = Daemon::loopback();
    let end = |argument: Option<&str>| {
        let mut command = Command::new(client_example("first"));
        command.args(argument).env("SIWD_SOCKET", &daemon.socket);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let listener = end(Some("listen"));
    let until = Instant::now() + Duration::from_secs(20);
    // The listener may not listen yet.
    let sender = loop {
        let out = end(None).wait_with_output().unwrap();
        if String::from_utf8_lossy(&out.stdout).contains("Established") || Instant::now() > until {
            break out;
        }
    };
    assert!(sender.status.success(), "{sender:?}");
    let received = listener.wait_with_output().unwrap();
    assert!(received.status.success(), "{received:?}");
}
