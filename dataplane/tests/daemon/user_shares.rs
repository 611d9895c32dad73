//! Two users with more queue pairs than a port has room for: each gets the same share.

use crate::common::{Daemon, LOOPBACK, siw_perf};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const NOBODY: u32 = 65534;
/// More than the number of descriptors of a pair's ring.
const QUEUE_PAIRS: &str = "700";

/// Starts a client of the user `uid` that writes 64 bytes on each of its queue pairs in turn.
fn start_client(daemon: &Daemon, program: &Path, uid: u32) -> Option<Child> {
    let started = Command::new(program)
        .args(["bw", "--op", "write", "--size", "64", "--depth", "1"])
        .args(["--qps", QUEUE_PAIRS, "--secs", "2", "--events"])
        .args(["--no-bounds", "--json", "--socket"])
        .arg(&daemon.socket)
        .uid(uid)
        .gid(uid)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    match started {
        Ok(child) => Some(child),
        Err(error) => {
            println!("skipped: another user cannot run siw-perf: {error}");
            None
        }
    }
}

/// Number of messages that the client transferred.
fn messages(client: Child) -> f64 {
    let output = client.wait_with_output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    result["messages"].as_f64().unwrap()
}

#[test]
fn users_have_equal_shares_of_a_port_that_is_full() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::start(&LOOPBACK.replace("buffers = 4096", "buffers = 16384"), &[]);
    // A copy, because another user may be unable to reach the build folder.
    let program = daemon.dir.path().join("siw-perf");
    std::fs::copy(siw_perf(), &program).unwrap();
    for path in [daemon.dir.path(), &daemon.socket, &program] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    let Some(first) = start_client(&daemon, &program, 0) else {
        return;
    };
    let Some(second) = start_client(&daemon, &program, NOBODY) else {
        return;
    };
    let counts = [messages(first), messages(second)];
    let ratio = counts[0] / counts[1];
    // Without turns one of them would get less than a tenth of the other's share.
    assert!((0.33..3.0).contains(&ratio), "{counts:?}");
}
