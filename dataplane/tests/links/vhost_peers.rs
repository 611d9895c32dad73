//! vhost-user and virtio-user links whose ends are killed: stale sockets, absent peers, what the log says.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::links::pings;
use crate::common::*;

/// Lines that a daemon may log in a test, beside those of DPDK.
const MOST_LINES: usize = 60;

fn config(number: u8, devargs: &str) -> String {
    format!(
        "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n[[device]]\nname = \"siw0\"\ndevargs = \"{devargs}\"\n\
         mac = \"02:00:00:77:00:0{number}\"\naddresses = [\"10.77.0.{number}/24\"]\n"
    )
}

/// The end that a virtual machine has: net_virtio_user.
fn front(socket: &Path, more: &str) -> String {
    let socket = socket.display();
    config(
        2,
        &format!("net_virtio_user0,path={socket},queues=1,queue_size=256{more}"),
    )
}

/// The end of siwd beside a virtual machine: net_vhost.
fn back(socket: &Path, more: &str) -> String {
    config(1, &format!("net_vhost0,iface={}{more}", socket.display()))
}

/// Sends in both directions.
fn both_ways(back: &Daemon, front: &Daemon) {
    pings(back, front, "10.77.0.1", 64);
    pings(front, back, "10.77.0.2", 10_000);
}

/// Waits until a client sees the link go down, or up.
fn await_link(context: &siw::Context, kind: siw::AsyncEventKind) {
    let event = context.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(kind), "{event:?}");
}

/// Stops a daemon. Its log has no flood, and each line of DPDK once; returns it.
fn quiet_log(daemon: Daemon) -> String {
    let log = daemon.stop_and_read_log();
    assert!(log.lines().count() <= MOST_LINES, "{log}");
    assert!(!log.contains("left out"), "{log}");
    let mut lines: Vec<&str> = log
        .lines()
        .filter_map(|line| line.split_once(" dpdk: "))
        .map(|(_, line)| line)
        .collect();
    let all = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), all, "repeated lines: {log}");
    log
}

fn is_stale(socket: &Path) -> bool {
    let refused = std::os::unix::net::UnixStream::connect(socket).unwrap_err();
    refused.kind() == std::io::ErrorKind::ConnectionRefused
}

#[test]
fn the_back_end_serves_the_next_front_end_after_one_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let behind = Daemon::start(&back(&socket, ""), &[]);
    let observer = behind.context();
    for _ in 0..3 {
        let mut ahead = Daemon::start(&front(&socket, ""), &[]);
        await_link(&observer, siw::AsyncEventKind::PortActive);
        both_ways(&behind, &ahead);
        ahead.kill();
        await_link(&observer, siw::AsyncEventKind::PortErr);
    }
    drop(observer);
    quiet_log(behind);
    assert!(!socket.exists());
}

#[test]
fn a_front_end_that_connects_says_how_it_comes_back_after_its_back_end_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let mut behind = Daemon::start(&back(&socket, ""), &[]);
    let ahead = Daemon::start(&front(&socket, ""), &[]);
    both_ways(&behind, &ahead);
    let observer = ahead.context();
    behind.kill();
    await_link(&observer, siw::AsyncEventKind::PortErr);
    assert!(is_stale(&socket), "the killed daemon leaves its socket");
    let next = Daemon::start(&back(&socket, ""), &[]);
    let operator = ahead.context();
    operator.remove_device(0, true).unwrap();
    operator.add_device("siw0").unwrap();
    both_ways(&next, &ahead);
    drop((observer, operator));
    let log = quiet_log(ahead);
    let told = "the device does not connect again by itself";
    assert_eq!(log.matches(told).count(), 1, "{log}");
    let log = quiet_log(next);
    assert!(
        log.contains("removed the socket of a process that was killed"),
        "{log}"
    );
}

#[test]
fn ends_with_the_socket_at_the_front_come_back_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let spawn_front = || {
        let dir = tempfile::tempdir().unwrap();
        let child = spawn(dir.path(), &front(&socket, ",server=1"), &[]);
        (dir, child)
    };
    // The front end is ready when its peer has connected.
    let (folder, child) = spawn_front();
    let mut behind = Daemon::start(&back(&socket, ",client=1"), &[]);
    let mut ahead = Daemon::wait_ready(folder, child);
    both_ways(&behind, &ahead);
    let observer = ahead.context();
    behind.kill();
    await_link(&observer, siw::AsyncEventKind::PortErr);
    let behind = Daemon::start(&back(&socket, ",client=1"), &[]);
    await_link(&observer, siw::AsyncEventKind::PortActive);
    both_ways(&behind, &ahead);
    drop(observer);
    let observer = behind.context();
    ahead.kill();
    await_link(&observer, siw::AsyncEventKind::PortErr);
    assert!(is_stale(&socket), "the killed daemon leaves its socket");
    let (folder, child) = spawn_front();
    let ahead = Daemon::wait_ready(folder, child);
    await_link(&observer, siw::AsyncEventKind::PortActive);
    both_ways(&behind, &ahead);
    drop(observer);
    let log = quiet_log(ahead);
    assert!(
        log.contains("removed the socket of a process that was killed"),
        "{log}"
    );
    assert!(log.contains("waiting for its peer to connect to"), "{log}");
    quiet_log(behind);
}

#[test]
fn a_front_end_without_its_peer_says_so_and_ends_at_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let mut child = spawn(dir.path(), &front(&socket, ",server=1"), &[]);
    let log = BufReader::new(child.stderr.take().unwrap());
    let mut lines = log.lines().map(Result::unwrap);
    let told = lines.find(|line| line.contains("waiting for its peer to connect to"));
    assert!(told.is_some_and(|line| line.contains("v.sock")));
    // Where DPDK waits.
    let end = std::time::Instant::now() + PATIENCE;
    while !socket.exists() {
        assert!(std::time::Instant::now() < end, "no socket");
        std::thread::yield_now();
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert!(wait(&mut child).success());
    assert!(!dir.path().join("siwd.sock").exists());
    // An absent peer of the other kind is an error that names the remedy.
    let absent = dir.path().join("absent.sock");
    let (status, _, error) = run(&front(&absent, ""), &[]);
    assert_eq!(status.code(), Some(1));
    assert!(
        error.contains("there is no such socket: start its peer"),
        "{error}"
    );
}

#[test]
fn the_socket_of_a_running_process_is_refused_by_check_and_start() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let why = format!("process {} serves this socket", std::process::id());
    for config in [back(&socket, ""), front(&socket, ",server=1")] {
        let (status, _, error) = run(&config, &["--check"]);
        assert!(status.code() == Some(3) && error.contains(&why), "{error}");
        let (status, _, error) = run(&config, &[]);
        assert!(status.code() == Some(1) && error.contains(&why), "{error}");
    }
    drop(listener);
    let (status, _, error) = run(&back(&socket, ""), &["--check"]);
    assert!(
        matches!(status.code(), Some(0 | 4)),
        "a stale one is no obstacle: {error}"
    );
    assert!(socket.exists(), "--check changes nothing");
}
